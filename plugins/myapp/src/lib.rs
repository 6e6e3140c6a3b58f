//! MyApp: an application with an image, replicas and a config, as a Deployment and a ConfigMap.
//!
//! Read it as the specification of the kind `MyApp`. The host does the rest: it watches, compares, writes, retries, prunes and
//! holds the finalizer.

use std::collections::BTreeMap;

use pilothouse_sdk::{Value, prelude::*};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The operator for `mygroup.example.com/v1`, kind `MyApp`.
#[derive(Debug)]
pub struct MyApp;

/// What a user asks for.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The container image to run.
    pub image: String,
    /// How many pods to run. Leave it out when an autoscaler decides.
    #[schemars(range(min = 0))]
    pub replicas: Option<i32>,
    /// Files to mount in the pods, in /etc/myapp. A change replaces the pods.
    pub config: Option<BTreeMap<String, String>>,
    /// The record of this application in the SQL database, deleted with it.
    #[serde(rename = "databaseID")]
    pub database_id: Option<String>,
    /// The S3 bucket of this application, deleted with it.
    pub bucket_name: Option<String>,
}

/// What is reported back.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// How many pods are ready to serve.
    pub available_replicas: i32,
}

/// The little that we want to know of the Deployment as it is.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Deployment {
    spec: DeploymentSpec,
    status: DeploymentStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DeploymentSpec {
    replicas: i32,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct DeploymentStatus {
    available_replicas: i32,
}

impl Plugin for MyApp {
    type Spec = Spec;
    type Status = Status;

    fn describe() -> Describe {
        Describe::crd(include_str!("../crd.json")).child("apps/v1", "Deployment").child("v1", "ConfigMap")
    }

    fn reconcile(request: &Request<Self>) -> Result<Desired<Status>, Failure> {
        let Parent { metadata, spec } = &request.parent;
        let found: Option<Deployment> = request.child("Deployment", &metadata.name)?;

        Ok(Desired::new()
            .children(spec.config.as_ref().map(|config| config_map(&metadata.name, config)))
            .child(deployment(&metadata.name, spec))
            .status(Status { available_replicas: found.as_ref().map_or(0, |found| found.status.available_replicas) })
            .condition(available(spec, found.as_ref())))
    }
}

impl Finalize for MyApp {
    /// Children need no cleanup, they are garbage collected; this is for what lives outside the cluster.
    fn finalize(request: &Request<Self>) -> Result<Finalization<Status>, Failure> {
        log::info!("nothing of {} is left outside the cluster", request.parent.metadata.name);
        Ok(Finalization::finished())
    }
}

export_plugin!(MyApp, finalizer);

/// The condition `Available`: as many pods serve as are wanted, by the user or else by the autoscaler.
fn available(spec: &Spec, found: Option<&Deployment>) -> Condition {
    let Some(found) = found else {
        return Condition::new("Available", false, "DeploymentMissing").message("the Deployment does not exist yet");
    };
    let (have, want) = (found.status.available_replicas, spec.replicas.unwrap_or(found.spec.replicas));
    let reason = if have >= want { "ReplicasAvailable" } else { "ReplicasUnavailable" };
    Condition::new("Available", have >= want, reason).message(format!("{have} of {want} replicas are available"))
}

fn config_map(app: &str, config: &BTreeMap<String, String>) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": config_name(app), "labels": labels(app) },
        "data": config,
    })
}

fn deployment(app: &str, spec: &Spec) -> Value {
    let mut container = json!({ "name": "myapp", "image": spec.image });
    let mut pod = json!({ "metadata": { "labels": labels(app) }, "spec": {} });
    if let Some(config) = &spec.config {
        // Pods do not notice that a ConfigMap changed; a new template replaces them.
        pod["metadata"]["annotations"] = json!({ "mygroup.example.com/config-hash": hash(config) });
        pod["spec"]["volumes"] = json!([{ "name": "config", "configMap": { "name": config_name(app) } }]);
        container["volumeMounts"] = json!([{ "name": "config", "mountPath": "/etc/myapp", "readOnly": true }]);
    }
    pod["spec"]["containers"] = json!([container]);

    let mut deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": app, "labels": labels(app) },
        "spec": { "selector": { "matchLabels": labels(app) }, "template": pod },
    });
    if let Some(replicas) = spec.replicas {
        // Left out otherwise: a field that we do not send belongs to the autoscaler.
        deployment["spec"]["replicas"] = replicas.into();
    }
    deployment
}

fn labels(app: &str) -> Value {
    json!({ "app.kubernetes.io/name": "myapp", "app.kubernetes.io/instance": app })
}

fn config_name(app: &str) -> String {
    format!("{app}-config")
}

/// FNV-1a over keys and values. It has to be the same for ever: with the standard library's hash, an update of the compiler
/// would restart every pod of every user.
fn hash(config: &BTreeMap<String, String>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    // The zero bytes keep `ab: c` and `a: bc` apart.
    for text in config.iter().flat_map(|(key, value)| [key.as_bytes(), b"\0", value.as_bytes(), b"\0"]) {
        for byte in text {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("{hash:016x}")
}
