//! Reach: a plugin for the kind `Reach` that looks at what its parent's `spec` tells it to, by relations and by capabilities, and shows in
//! its status what it has seen. Built with the SDK alone, as authors do.
//!
//! Each way to look is a list in the spec, and a list of what came of it in the status: `relate` → `seen`, `kube` → `kube`. What came of a
//! read is what was found, or `error`.

use pilothouse_sdk::prelude::*;
use pilothouse_sdk::{Object, Value};
use serde::{Deserialize, Serialize};

struct Reach;

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Spec {
    /// What to select by relations.
    relate: Vec<Selects>,
    /// What to read.
    kube: Vec<Read>,
    /// The children.
    children: Vec<Value>,
    /// One more child, a ConfigMap of this name that holds the status.
    copy: Option<String>,
    /// In cleanup: wait until a related object of this name is seen.
    wait_for: Option<String>,
}

/// A selector, as the contract has it.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selects {
    api_version: String,
    kind: String,
    namespace: Option<String>,
    #[serde(default)]
    names: Vec<String>,
    #[serde(default)]
    labels: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Read {
    Get(One),
    List(Selects),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct One {
    api_version: String,
    kind: String,
    namespace: Option<String>,
    name: String,
}

#[derive(Serialize)]
struct Status {
    /// The related objects, each as `shown`.
    seen: Vec<String>,
    /// What came of each read.
    kube: Vec<Value>,
}

impl Plugin for Reach {
    type Spec = Spec;
    type Status = Status;

    fn describe() -> Describe {
        Describe::crd(include_str!("../reach.json"))
            .child("v1", "ConfigMap")
            .related("v1", "ConfigMap")
            .related("v1", "Secret")
            .related("v1", "Namespace")
            .related("v1", "Pod")
    }

    fn reconcile(request: &Request<Self>) -> Result<Desired<Status>, Failure> {
        log::info!("asked");
        let Spec { children, copy, .. } = &request.parent.spec;
        let status = look(request);
        let copy = copy.iter().map(|name| {
            json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": { "name": name },
                "data": { "key": json!(status).to_string() },
            })
        });
        Ok(Desired::new().children(children).children(copy).status(status))
    }
}

impl Relate for Reach {
    fn relate(request: &Request<Self>) -> Result<Vec<Selector>, Failure> {
        Ok(request.parent.spec.relate.iter().cloned().map(Selector::from).collect())
    }
}

impl Finalize for Reach {
    fn finalize(request: &Request<Self>) -> Result<Finalization<Status>, Failure> {
        log::info!("asked to clean up");
        let is_there = |name: &String| request.related().iter().any(|object| object.metadata().name == *name);
        if request.parent.spec.wait_for.as_ref().is_none_or(is_there) {
            return Ok(Finalization::finished());
        }
        Ok(Finalization::waiting(std::time::Duration::from_secs(3600)).status(look(request)))
    }
}

pilothouse_sdk::export_plugin!(Reach, finalizer, relations);

fn look(request: &Request<Reach>) -> Status {
    Status {
        seen: request.related().iter().map(|object| shown(&value(object))).collect(),
        kube: request.parent.spec.kube.iter().map(read).collect(),
    }
}

fn read(read: &Read) -> Value {
    let found = match read {
        Read::Get(One { api_version, kind, namespace, name }) => {
            kube::get(api_version, kind, namespace.as_deref(), name).map(|found| found.iter().map(shown).collect())
        }
        Read::List(selects) => {
            kube::list(selects.clone().into()).map(|found| found.iter().map(shown).collect::<Vec<_>>())
        }
    };
    match found {
        Ok(found) => json!({ "found": found }),
        Err(error) => json!({ "error": error.to_string() }),
    }
}

fn value(object: &Object) -> Value {
    object.parse().unwrap_or_default()
}

/// `Kind namespace/name key`: its name, and the value of the key `key` in its data.
fn shown(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let metadata = &object["metadata"];
    let (namespace, name) = (text(&metadata["namespace"]), text(&metadata["name"]));
    format!("{} {namespace}/{name} {}", text(&object["kind"]), text(&object["data"]["key"]))
}

impl From<Selects> for Selector {
    fn from(selects: Selects) -> Self {
        let Selects { api_version, kind, namespace, names, labels } = selects;
        let mut selector = Self::of(api_version, kind).labels(labels);
        if let Some(namespace) = namespace {
            selector = selector.namespace(namespace);
        }
        names.into_iter().fold(selector, Self::name)
    }
}
