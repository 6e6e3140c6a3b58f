//! Reach: a plugin for the kind `Reach` that looks at what its parent's `spec` tells it to, by relations and by capabilities, and shows in
//! its status what it has seen. Built with the SDK alone, as authors do.
//!
//! Each way to look is a list in the spec, and a list of what came of it in the status: `relate` → `seen`, `kube` → `kube`, `http` → `http`,
//! `sql` → `sql`, `scan` → `memory`. What came of a read is what was found, or `error`.

mod memory;

use pilothouse_sdk::prelude::*;
use pilothouse_sdk::{Object, Value, http};
use serde::{Deserialize, Serialize};

struct Reach;

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Spec {
    /// What to select by relations.
    relate: Vec<Selects>,
    /// What to read.
    kube: Vec<Read>,
    /// What to ask for by HTTP.
    http: Vec<Ask>,
    /// What to ask databases.
    sql: Vec<Statement>,
    /// Whether there has to be an answer to each of these.
    insist: bool,
    /// What to leave in memory before all that, as `memory` reads it.
    leave: Option<String>,
    /// What to look for in memory afterwards, likewise.
    scan: Vec<String>,
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

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Ask {
    grant: String,
    #[serde(default)]
    method: Option<String>,
    target: String,
    #[serde(default)]
    headers: Vec<(String, String)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Statement {
    grant: String,
    text: String,
    /// For one that is executed, and not queried.
    #[serde(default)]
    execute: bool,
}

#[derive(Serialize)]
struct Status {
    /// The related objects, each as `shown`.
    seen: Vec<String>,
    /// What came of each read.
    kube: Vec<Value>,
    /// The status of each answer.
    http: Vec<Value>,
    /// How many rows each statement gave, or affected.
    sql: Vec<Value>,
    /// In how many places of the memory each text was.
    memory: Vec<usize>,
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
        let status = look(request)?;
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
        Ok(Finalization::waiting(std::time::Duration::from_secs(3600)).status(look(request)?))
    }
}

pilothouse_sdk::export_plugin!(Reach, finalizer, relations);

fn look(request: &Request<Reach>) -> Result<Status, Failure> {
    let Spec { kube, http, sql, insist, leave, scan, .. } = &request.parent.spec;
    leave.iter().try_for_each(|text| memory::leave(text))?;
    // Kept until the memory was looked at.
    let answers: Vec<_> = http.iter().map(ask).collect();
    let results: Vec<_> = sql.iter().map(run).collect();
    if *insist {
        answers.iter().try_for_each(|answer| answer.as_ref().map(drop).map_err(Clone::clone))?;
        results.iter().try_for_each(|result| result.as_ref().map(drop).map_err(Clone::clone))?;
    }
    Ok(Status {
        seen: request.related().iter().map(|object| shown(&value(object))).collect(),
        kube: kube.iter().map(read).collect(),
        http: answers.iter().map(|answer| told(answer.as_ref().map(|answer| answer.status))).collect(),
        sql: results.iter().map(|result| told(result.as_ref())).collect(),
        memory: memory::count(scan)?,
    })
}

fn ask(Ask { grant, method, target, headers }: &Ask) -> Result<http::Response, http::Error> {
    let request = http::Request::new(method.as_deref().unwrap_or("GET"), grant, target);
    headers.iter().fold(request, |request, (name, value)| request.header(name, value)).send()
}

fn run(Statement { grant, text, execute }: &Statement) -> Result<u64, sql::Error> {
    if *execute { sql::execute(grant, text, &[]) } else { sql::query(grant, text, &[]).map(|rows| rows.len() as u64) }
}

/// What came of it; an error by its name in the contract.
fn told(result: Result<impl Serialize, &impl std::fmt::Debug>) -> Value {
    match result {
        Ok(value) => json!(value),
        Err(error) => json!({ "error": format!("{error:?}") }),
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
