//! The mirror: a plugin for the kind `Widget` (version 8: `ConfigMap`, whose `data.spec` is JSON; version 9: `ClusterWidget`) that answers what the parent's `spec` tells it to, also what no plugin should.
//!
//! `spec.reply` is the answer of `reconcile`, `spec.cleanup` that of `finalize` (`finished` without one). Both have the keys of
//! `Reply`. It is written on the bindings themselves, since the SDK would not let it misbehave.

use std::hint::black_box;

use pilothouse_sdk::raw::types::{
    Child, Cleanup, Condition, ConditionStatus, Desired, Event, EventKind, Failure, Finalization, Next, Request,
};
use pilothouse_sdk::raw::{finalizer, log, reconciler};
use serde::Deserialize;
use serde_json::{Value, json};

struct Mirror;

/// A test makes another version of this plugin by replacing the last letter of this text in the component.
const VERSION: &str = "the mirror, version 1";

/// What to answer, and how to misbehave before. The keys work in this order.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Reply {
    /// Lines to log.
    log: Vec<String>,
    /// Memory to allocate and fill.
    #[serde(rename = "allocateMiB")]
    allocate_mib: usize,
    /// Execute `unreachable`.
    trap: bool,
    /// Never return.
    spin: bool,
    /// Compute for a while: so many million steps, each about a nanosecond. Or what `config.busy` says.
    busy: u64,
    /// `{"retry": m}`, `{"retryAfter": {"ms": n, "message": m}}` or `{"terminal": m}`.
    failure: Option<Refusal>,
    /// Objects, or `{"object": …, "options": …}`. In `cleanup`, none leaves the children alone.
    children: Option<Vec<Value>>,
    /// Any JSON; it may be what no status should be.
    status: Option<Value>,
    conditions: Vec<ReplyCondition>,
    events: Vec<ReplyEvent>,
    /// `"onChange"`, `"immediately"` or `{"afterMs": n}`; only in `reply`.
    next: ReplyNext,
    /// Not finished yet; only in `cleanup`.
    waiting_ms: Option<u32>,
    /// Says the default of `cleanup` aloud.
    #[serde(rename = "finished")]
    _finished: bool,
    /// Want only the first of the children that is not there, as no plugin should.
    restless: bool,
    /// Show this plugin's version, and `config.word`, in an annotation on each child.
    versioned: bool,
    /// Show the digit of this plugin's version in a label on the Pods of each child, a Deployment.
    labelled: bool,
    /// Show the time of the call in an annotation on each child, as no plugin should.
    stamped: bool,
    /// Fill each child, a ConfigMap, with so many KiB of data.
    #[serde(rename = "fillKiB")]
    fill_kib: usize,
    /// One more child, which is no JSON.
    garbage: bool,
    /// A status of this size instead.
    #[serde(rename = "outputMiB")]
    output_mib: usize,
    /// Show the request in `status.echo`: context, config, and the children and related objects as `Kind/namespace/name`.
    echo: bool,
    extra: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Refusal {
    Retry(String),
    RetryAfter { ms: u32, message: String },
    Terminal(String),
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
enum ReplyNext {
    #[default]
    OnChange,
    Immediately,
    AfterMs(u32),
}

/// As in the Kubernetes API: `type`, `status` (`"True"`, `"False"`, `"Unknown"`), `reason` and `message`.
#[derive(Deserialize)]
struct ReplyCondition {
    r#type: String,
    status: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

/// As in the Kubernetes API: `type` (`"Normal"`, `"Warning"`), `reason` and `message`.
#[derive(Deserialize)]
struct ReplyEvent {
    r#type: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

/// The parts of a Widget's spec.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Spec {
    reply: Reply,
    cleanup: Reply,
    /// Add the time of each call to conditions and status, as plugins do that make a storm of writes.
    stamp: bool,
}

#[derive(Deserialize)]
struct Parent {
    #[serde(default)]
    spec: Spec,
    data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    spec: String,
}

impl reconciler::Guest for Mirror {
    fn describe() -> String {
        // The files are part of this source, so they are JSON.
        let [mut widget, gadget]: [Value; 2] = [include_str!("../widget.json"), include_str!("../gadget.json")]
            .map(|crd| serde_json::from_str(crd).unwrap_or_default());
        let parent = if black_box(VERSION).ends_with('8') {
            json!({ "apiVersion": "v1", "kind": "ConfigMap" })
        } else if black_box(VERSION).ends_with('9') {
            widget["metadata"]["name"] = json!("clusterwidgets.t.example");
            widget["spec"]["scope"] = json!("Cluster");
            widget["spec"]["names"] = json!({
                "kind": "ClusterWidget", "listKind": "ClusterWidgetList", "plural": "clusterwidgets", "singular": "clusterwidget",
            });
            json!({ "apiVersion": "t.example/v1", "kind": "ClusterWidget" })
        } else {
            json!({ "apiVersion": "t.example/v1", "kind": "Widget" })
        };
        let mut children = vec![json!({ "apiVersion": "v1", "kind": "ConfigMap" })];
        // Version 5 makes nothing else.
        if !black_box(VERSION).ends_with('5') {
            children.extend([
                json!({ "apiVersion": "v1", "kind": "Service" }),
                json!({ "apiVersion": "v1", "kind": "ServiceAccount" }),
                json!({ "apiVersion": "v1", "kind": "Pod" }),
                json!({ "apiVersion": "apps/v1", "kind": "Deployment" }),
                json!({ "apiVersion": "apps/v1", "kind": "StatefulSet" }),
                json!({ "apiVersion": "batch/v1", "kind": "Job" }),
                json!({ "apiVersion": "networking.k8s.io/v1", "kind": "Ingress" }),
                json!({ "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy" }),
                json!({ "apiVersion": "policy/v1", "kind": "PodDisruptionBudget" }),
                json!({ "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler" }),
                json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role" }),
                json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding" }),
                json!({ "apiVersion": "t.example/v1", "kind": "Gadget" }),
            ]);
        }
        // Nor has it anything of cluster scope, as version 6.
        if !black_box(VERSION).ends_with(['5', '6']) {
            children.push(json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass" }));
            children.push(json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole" }));
            children.push(json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding" }));
            children.push(json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition" }));
        }
        // Version 7 makes no Secrets.
        if !black_box(VERSION).ends_with(['5', '7']) {
            children.push(json!({ "apiVersion": "v1", "kind": "Secret" }));
        }
        json!({
            "parent": parent,
            "children": children,
            // Seen only by a version of this plugin that exports `relations`, which tests make.
            "related": [{ "apiVersion": "v1", "kind": "Secret" }, { "apiVersion": "t.example/v1", "kind": "Widget" }],
            "crds": [widget, gadget],
        })
        .to_string()
    }

    fn reconcile(request: Request) -> Result<Desired, Failure> {
        let Spec { mut reply, stamp, .. } = spec(&request)?;
        reply.misbehave(&request)?;
        let next = match reply.next {
            ReplyNext::OnChange => Next::OnChange,
            ReplyNext::Immediately => Next::Immediately,
            ReplyNext::AfterMs(ms) => Next::After(ms),
        };
        Ok(Desired {
            children: reply.children(&request).unwrap_or_default(),
            status: reply.status(&request, stamp),
            conditions: reply.conditions(&request, stamp),
            events: reply.events(),
            next,
            extra: reply.extra(),
        })
    }
}

impl finalizer::Guest for Mirror {
    fn finalize(request: Request) -> Result<Finalization, Failure> {
        let Spec { cleanup: mut reply, stamp, .. } = spec(&request)?;
        reply.misbehave(&request)?;
        Ok(Finalization {
            cleanup: reply.waiting_ms.map_or(Cleanup::Finished, Cleanup::Waiting),
            children: reply.children(&request),
            status: reply.status(&request, stamp),
            conditions: reply.conditions(&request, stamp),
            events: reply.events(),
            extra: reply.extra(),
        })
    }
}

pilothouse_sdk::export_plugin!(Mirror, finalizer);

fn spec(request: &Request) -> Result<Spec, Failure> {
    let parse = || match serde_json::from_str(&request.parent)? {
        Parent { data: Some(data), .. } => serde_json::from_str(&data.spec),
        Parent { spec, .. } => Ok(spec),
    };
    // A test that misspells a key has to see it.
    parse().map_err(|err: serde_json::Error| Failure::Terminal(err.to_string()))
}

fn now(request: &Request) -> Value {
    let context: Value = serde_json::from_str(&request.context).unwrap_or_default();
    context["now"].clone()
}

impl Reply {
    fn misbehave(&mut self, request: &Request) -> Result<(), Failure> {
        for line in &self.log {
            log::write(log::Level::Info, line, &[]);
        }
        // Filled, since memory that nobody touches costs nothing.
        black_box(vec![1_u8; self.allocate_mib << 20]);
        if self.trap {
            std::process::abort();
        }
        while black_box(self.spin) {}
        let config: Value = serde_json::from_str(&request.config).unwrap_or_default();
        for _ in 0..config["busy"].as_u64().unwrap_or(self.busy) * 1_000_000 {
            black_box(());
        }
        match self.failure.take() {
            None => Ok(()),
            Some(Refusal::Retry(message)) => Err(Failure::Retry(message)),
            Some(Refusal::RetryAfter { ms, message }) => Err(Failure::RetryAfter((ms, message))),
            Some(Refusal::Terminal(message)) => Err(Failure::Terminal(message)),
        }
    }

    fn children(&mut self, request: &Request) -> Option<Vec<Child>> {
        let config: Value = serde_json::from_str(&request.config).unwrap_or_default();
        if config["forget"] == true {
            // As a plugin does that has lost its mind.
            return Some(Vec::new());
        }
        if self.versioned {
            let version = format!("{} {}", black_box(VERSION), config["word"].as_str().unwrap_or_default());
            for child in self.children.iter_mut().flatten() {
                child["metadata"]["annotations"] = json!({ "t.example/version": version.trim() });
            }
        }
        if self.labelled {
            let version = black_box(VERSION).trim_start_matches(|c: char| !c.is_ascii_digit());
            for child in self.children.iter_mut().flatten() {
                child["spec"]["template"]["metadata"]["labels"]["t.example/version"] = json!(version);
            }
        }
        if self.stamped {
            for child in self.children.iter_mut().flatten() {
                child["metadata"]["annotations"] = json!({ "t.example/called": now(request) });
            }
        }
        if self.restless {
            let there = |child: &Value| {
                let name = child["metadata"]["name"].to_string();
                request.children.iter().any(|there| there.contains(&format!("\"name\":{name}")))
            };
            let first = self.children.iter().flatten().find(|child| !there(child)).cloned();
            self.children = Some(first.into_iter().collect());
        }
        if self.fill_kib > 0 {
            for child in self.children.iter_mut().flatten() {
                child["data"]["filler"] = json!("x".repeat(self.fill_kib << 10));
            }
        }
        let garbage = self.garbage.then(|| Child { object: "{\"kind\": garbage".to_owned(), options: "{}".to_owned() });
        let children = self.children.iter().flatten().map(|child| match child.get("object") {
            Some(object) => {
                let options = child.get("options").map_or_else(|| "{}".to_owned(), Value::to_string);
                Child { object: object.to_string(), options }
            }
            None => Child { object: child.to_string(), options: "{}".to_owned() },
        });
        (self.garbage || self.children.is_some()).then(|| children.chain(garbage).collect())
    }

    fn status(&self, request: &Request, stamp: bool) -> Option<String> {
        if self.output_mib > 0 {
            return Some(json!({ "filler": "x".repeat(self.output_mib << 20) }).to_string());
        }
        let mut status = self.status.clone();
        if stamp {
            status.get_or_insert_with(|| json!({}))["stamp"] = now(request);
        }
        if self.echo {
            status.get_or_insert_with(|| json!({}))["echo"] = echo(request);
        }
        status.map(|status| status.to_string())
    }

    fn conditions(&self, request: &Request, stamp: bool) -> Vec<Condition> {
        let stamp = stamp.then(|| Condition {
            kind: "Stamped".to_owned(),
            status: ConditionStatus::True,
            reason: "Called".to_owned(),
            message: now(request).to_string(),
        });
        let given = self.conditions.iter().map(|condition| Condition {
            kind: condition.r#type.clone(),
            status: match condition.status.as_str() {
                "True" => ConditionStatus::True,
                "False" => ConditionStatus::False,
                _ => ConditionStatus::Unknown,
            },
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        });
        given.chain(stamp).collect()
    }

    fn events(&self) -> Vec<Event> {
        let event = |event: &ReplyEvent| Event {
            kind: if event.r#type == "Warning" { EventKind::Warning } else { EventKind::Normal },
            reason: event.reason.clone(),
            message: event.message.clone(),
        };
        self.events.iter().map(event).collect()
    }

    fn extra(&self) -> String {
        self.extra.as_ref().map_or_else(|| "{}".to_owned(), Value::to_string)
    }
}

fn echo(request: &Request) -> Value {
    let parse = |json: &String| serde_json::from_str::<Value>(json).unwrap_or_default();
    let identity = |child: &String| {
        let child = parse(child);
        let [kind, namespace, name] = ["/kind", "/metadata/namespace", "/metadata/name"]
            .map(|path| child.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned());
        format!("{kind}/{namespace}/{name}")
    };
    json!({
        "context": parse(&request.context),
        "config": parse(&request.config),
        "children": request.children.iter().map(identity).collect::<Vec<_>>(),
        "related": request.related.iter().map(identity).collect::<Vec<_>>(),
    })
}
