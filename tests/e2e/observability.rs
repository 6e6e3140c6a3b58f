//! What the host tells of itself: metrics, traces, and the counts in the status of a reconciler.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, extract::State, routing::post};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse},
    common::v1::{KeyValue, any_value::Value as AnyValue},
    trace::v1::{Span, status::StatusCode},
};
use prost::Message as _;
use serde_json::json;

use crate::{
    audit,
    cluster::{Cluster, config_map, eventually, gone, refused, synced, until},
};

/// A collector of traces, and what it was sent.
#[derive(Clone, Default)]
struct Collector {
    received: Arc<Mutex<Vec<Received>>>,
}

/// The attributes of who sent a span, and the span.
type Received = (Vec<KeyValue>, Span);

impl Collector {
    /// Listens; the URL.
    async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("it has an address"));
        let router = Router::new().route("/v1/traces", post(Self::receive)).with_state(self.clone());
        tokio::spawn(async { axum::serve(listener, router).await });
        url
    }

    async fn receive(State(collector): State<Self>, body: Bytes) -> Vec<u8> {
        let request = ExportTraceServiceRequest::decode(body).expect("it is OTLP");
        let mut received = collector.received.lock().expect("nobody panics here");
        for of_resource in request.resource_spans {
            let resource = of_resource.resource.unwrap_or_default().attributes;
            let spans = of_resource.scope_spans.into_iter().flat_map(|of_scope| of_scope.spans);
            received.extend(spans.map(|span| (resource.clone(), span)));
        }
        ExportTraceServiceResponse::default().encode_to_vec()
    }

    /// The trace of a reconcile of this parent that took this step: its root, its other spans, and who sent it.
    fn trace(&self, parent: &str, step: &str) -> Option<(Span, Vec<Span>, Vec<KeyValue>)> {
        let received = self.received.lock().expect("nobody panics here");
        let (resource, root) = received.iter().find(|(_, span)| {
            span.name == "reconcile"
                && text(&span.attributes, "parent") == parent
                && received.iter().any(|(_, other)| other.parent_span_id == span.span_id && other.name == step)
        })?;
        let rest = received.iter().map(|(_, span)| span);
        let rest = rest.filter(|span| span.trace_id == root.trace_id && span.span_id != root.span_id);
        Some((root.clone(), rest.cloned().collect(), resource.clone()))
    }
}

/// The attribute of that name, as text.
fn text(attributes: &[KeyValue], name: &str) -> String {
    let attribute = attributes.iter().find(|attribute| attribute.key == name);
    match attribute.and_then(|attribute| attribute.value.as_ref()?.value.as_ref()) {
        Some(AnyValue::StringValue(text)) => text.clone(),
        Some(AnyValue::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

/// A page of `/metrics`.
pub(crate) struct Page(pub(crate) String);

impl Page {
    /// The families and their types.
    fn families(&self) -> BTreeMap<&str, &str> {
        self.0.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect()
    }

    /// The samples, as name with labels, and value.
    fn samples(&self) -> impl Iterator<Item = (&str, f64)> {
        let lines = self.0.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| {
            let (sample, value) = line.rsplit_once(' ').expect("a sample has a value");
            (sample, value.parse().expect("it is a number"))
        })
    }

    /// The value of that sample.
    pub(crate) fn get(&self, sample: &str) -> f64 {
        let found = self.samples().find(|(known, _)| *known == sample);
        assert!(found.is_some(), "{sample} is missing: {}", self.0);
        found.map_or(f64::NAN, |(_, value)| value)
    }

    /// All samples of that beginning, together.
    pub(crate) fn sum(&self, beginning: &str) -> f64 {
        let of_it = self.samples().filter(|(sample, _)| sample.starts_with(beginning));
        // Of none it is 0, and not the -0 of the library.
        of_it.fold(0.0, |sum, (_, value)| sum + value)
    }
}

#[tokio::test]
async fn one_reconcile_can_be_followed_in_metrics_and_traces() {
    let collector = Collector::default();
    let endpoint = format!("--otlp-endpoint={}", collector.start().await);
    let cluster = Cluster::start();
    let host = cluster.run_host_with(&[&endpoint], 2);
    let ns = cluster.namespace("observed").await;
    let before = Page(host.metrics().await);

    ns.widget(
        "w",
        json!({"reply": {"children": [config_map("w", "1")], "conditions": [{"type": "Ready", "status": "True", "reason": "Up"}]}}),
    )
    .await;
    ns.widget("trap", json!({"reply": {"trap": true}})).await;
    synced(&ns.widgets(), "w").await;
    refused(&ns.widgets(), "trap", "PluginTrap").await;

    // The status of the reconciler: counts and columns.
    let reconcilers = ns.reconcilers();
    let reconciler = until(&reconcilers, "mirror", "counted", |reconciler| {
        reconciler.data["status"]["parents"] == json!({"total": 2, "current": 1, "ready": 1, "failing": 1})
    })
    .await;
    let revision = reconciler.data["status"]["activeRevision"].as_str().expect("one is active").to_owned();
    let table = cluster.kubectl(&["get", "clusterreconciler", "mirror"]);
    let rows: Vec<Vec<_>> = table.lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "PARENT", "REVISION", "CURRENT", "TOTAL", "READY", "ROLLOUT", "AGE"]);
    assert_eq!(rows[1][..6], ["mirror", "Widget.v1.t.example", &revision, "1", "2", "True"]);

    // Metrics.
    let after = Page(host.metrics().await);
    let rose = |beginning: &str| after.sum(beginning) - before.sum(beginning);
    assert!(rose(r#"controller_runtime_reconcile_total{controller="mirror""#) >= 2.0);
    assert!(rose(r#"controller_runtime_reconcile_total{controller="mirror",result="success"}"#) >= 1.0);
    assert!(rose(r#"controller_runtime_reconcile_errors_total{controller="mirror"}"#) >= 1.0);
    assert!(rose(r#"controller_runtime_reconcile_time_seconds_count{controller="mirror"}"#) >= 2.0);
    assert!(rose(r#"workqueue_adds_total{name="mirror",controller="mirror"}"#) >= 2.0);
    assert!(rose(r#"workqueue_retries_total{name="mirror",controller="mirror"}"#) >= 1.0);
    assert!(rose(r#"pilothouse_plugin_calls_total{reconciler="mirror",function="reconcile",outcome="ok"}"#) >= 1.0);
    assert!(
        rose(r#"pilothouse_plugin_calls_total{reconciler="mirror",function="reconcile",outcome="PluginTrap"}"#) >= 1.0
    );
    assert_eq!(
        after.get(r#"pilothouse_plugin_calls_total{reconciler="mirror",function="describe",outcome="ok"}"#),
        1.0
    );
    assert!(rose(r#"pilothouse_plugin_call_seconds_count{reconciler="mirror",function="reconcile"}"#) >= 2.0);
    assert!(rose(r#"pilothouse_plugin_memory_bytes_sum{reconciler="mirror",function="reconcile"}"#) > 1_000_000.0);
    assert_eq!(after.get(r#"pilothouse_writes_total{reconciler="mirror",verb="apply",resource="configmaps"}"#), 1.0);
    assert!(
        rose(r#"pilothouse_writes_total{reconciler="mirror",verb="patch",resource="widgets.t.example/status"}"#) >= 2.0
    );
    assert!(rose(r#"rest_client_requests_total{code="200",method="PATCH""#) >= 2.0);
    for (state, count) in [("total", 2.0), ("current", 1.0), ("ready", 1.0), ("failing", 1.0)] {
        assert_eq!(
            after.get(&format!(r#"pilothouse_parents{{reconciler="mirror",state="{state}"}}"#)),
            count,
            "{state}"
        );
    }
    assert!(after.sum(&format!(r#"pilothouse_revision_info{{reconciler="mirror",revision="{revision}""#)) == 1.0);
    assert_eq!(after.get(r#"pilothouse_store_objects{reconciler="mirror",kind="Widget.t.example"}"#), 2.0);
    assert_eq!(after.get(r#"pilothouse_store_objects{reconciler="mirror",kind="ConfigMap"}"#), 1.0);
    // The API server sends a bookmark about each minute.
    let ages: Vec<_> =
        after.samples().filter(|(sample, _)| sample.starts_with("pilothouse_watch_age_seconds")).collect();
    assert!(ages.len() >= 9 && ages.iter().all(|(_, age)| *age < 120.0), "{ages:?}");
    assert!(after.get("process_resident_memory_bytes") > 1e6);
    assert!(!after.0.contains("observed"), "no parent is a label");

    // Traces.
    let followed =
        async |parent: &str, step: &str| eventually("the trace has come", async || collector.trace(parent, step)).await;
    let (root, steps, resource) = followed("observed/w", "apply").await;
    assert!(root.parent_span_id.is_empty());
    assert_eq!(text(&root.attributes, "reconciler"), "mirror");
    assert_eq!(text(&root.attributes, "revision"), revision);
    assert_eq!(text(&root.attributes, "generation"), "1");
    assert_eq!(text(&root.attributes, "reconcileID").len(), 16);
    // Whether the watch or the answer has shown the child first makes the difference.
    let outcome = text(&root.attributes, "outcome");
    assert!(["requeue", "success"].contains(&outcome.as_str()), "{outcome}");
    let (name, version) = (text(&resource, "service.name"), text(&resource, "service.version"));
    assert_eq!((name.as_str(), version.as_str()), ("pilothouse", env!("CARGO_PKG_VERSION")));
    for step in ["plugin", "apply", "status"] {
        let span = steps.iter().find(|span| span.name == step).unwrap_or_else(|| panic!("{step}: {steps:#?}"));
        assert_eq!(span.parent_span_id, root.span_id, "{step}");
        assert!(root.start_time_unix_nano <= span.start_time_unix_nano, "{step}");
        assert!(span.start_time_unix_nano < span.end_time_unix_nano, "{step}");
        assert!(span.end_time_unix_nano <= root.end_time_unix_nano, "{step}");
    }
    let (root, steps, _) = followed("observed/trap", "plugin").await;
    assert_eq!(
        (text(&root.attributes, "outcome"), text(&root.attributes, "category")),
        ("error".into(), "PluginTrap".into())
    );
    assert_eq!(root.status.map(|status| status.code), Some(StatusCode::Error.into()));
    let call = steps.iter().find(|span| span.name == "plugin").expect("the plugin was called");
    assert_eq!(
        (text(&call.attributes, "function"), text(&call.attributes, "category")),
        ("reconcile".into(), "PluginTrap".into())
    );

    // Quiet, also of the counts: no request until something changes.
    ns.widgets().delete("trap", &kube::api::DeleteParams::default()).await.expect("it can be deleted");
    until(&reconcilers, "mirror", "counted", |reconciler| {
        reconciler.data["status"]["parents"] == json!({"total": 1, "current": 1, "ready": 1, "failing": 0})
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let asked = || audit::requests(cluster.control_plane.audit_log()).into_iter().filter(|it| it.verb != "watch");
    let before = asked().count();
    tokio::time::sleep(Duration::from_secs(11)).await;
    let requests: Vec<_> = asked().skip(before).collect();
    assert!(requests.is_empty(), "not quiet: {requests:#?}");

    // Who goes takes its series along.
    cluster.kubectl(&["delete", "clusterreconciler", "mirror", "--wait=false"]);
    gone(&reconcilers, "mirror").await;
    eventually("its series are gone", async || {
        let page = host.metrics().await;
        (!page.contains(r#""mirror""#) && page.contains(r#"reconciler="myapp""#)).then_some(())
    })
    .await;

    // Nothing that is not sent yet is lost at the end.
    ns.my_app("last", json!({"image": "nginx:1", "replicas": 1, "config": {}})).await;
    synced(&ns.my_apps(), "last").await;
    // The collector has this thread.
    tokio::task::spawn_blocking(|| host.terminate()).await.expect("it ends in order");
    assert!(collector.trace("observed/last", "apply").is_some());
}

#[tokio::test]
async fn the_documentation_lists_each_metric_that_is_served_and_no_other() {
    let (_, host) = Cluster::shared_with_host();
    let page = Page(host.metrics().await);
    let documentation = include_str!("../../host/docs/metrics.md");
    let rows = documentation.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let documented: BTreeMap<_, Vec<_>> = rows.map(|(name, rest)| (name, rest.split(" | ").collect())).collect();
    let types: BTreeMap<_, _> = documented.iter().map(|(name, columns)| (*name, columns[0])).collect();
    assert_eq!(page.families(), types);
    for (sample, _) in page.samples() {
        let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
        let family =
            page.families().into_keys().filter(|family| name.starts_with(family)).max_by_key(|family| family.len());
        let columns = &documented[family.expect("a sample has a family")];
        let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| Some(label.split_once('=')?.0));
        let labels: BTreeSet<_> = labels.filter(|label| *label != "le").collect();
        let listed: BTreeSet<_> =
            columns[1].split(", ").map(|label| label.trim_matches('`')).filter(|label| !label.is_empty()).collect();
        assert_eq!(labels, listed, "{sample}");
    }
}
