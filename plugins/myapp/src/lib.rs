//! MyApp: an application with an image, replicas and a config, as a Deployment and a ConfigMap; and, if it asks for them, with a record in
//! a database and a bucket in S3, which outlive no MyApp.
//!
//! Read it as the specification of the kind `MyApp`. The host does the rest: it watches, compares, writes, retries, prunes and
//! holds the finalizer.

mod outside;

use std::{collections::BTreeMap, time::Duration};

use pilothouse_sdk::{Value, prelude::*, s3::Deleted};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The operator for `mygroup.example.com/v1`, kind `MyApp`.
#[derive(Debug)]
pub struct MyApp;

/// What a user asks for.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
// What was made under the old name would be left behind.
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(oldSelf.databaseID) || (has(self.databaseID) && self.databaseID == oldSelf.databaseID)",
        "message": "databaseID cannot be changed once it is set"
    },
    {
        "rule": "!has(oldSelf.bucketName) || (has(self.bucketName) && self.bucketName == oldSelf.bucketName)",
        "message": "bucketName cannot be changed once it is set"
    }
]))]
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
    #[schemars(length(min = 1, max = 253))]
    pub database_id: Option<String>,
    /// The S3 bucket of this application, and of no other: deleted with it, and all that is in it.
    #[schemars(length(min = 3, max = 63), regex(pattern = "^[a-z0-9][a-z0-9.-]*[a-z0-9]$"))]
    pub bucket_name: Option<String>,
}

/// `spec.config` of the reconciler.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Config {
    /// Where buckets are made, such as `eu-central-1`; by default where the service makes them.
    bucket_region: Option<String>,
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
        Describe::crd(include_str!("../crd.json"))
            .child("apps/v1", "Deployment")
            .child("v1", "ConfigMap")
            .capability("sql")
            .capability("http")
    }

    fn reconcile(request: &Request<Self>) -> Result<Desired<Status>, Failure> {
        let Parent { metadata, spec } = &request.parent;
        let found: Option<Deployment> = request.child("Deployment", &metadata.name)?;
        let config: Config = request.config()?;

        let desired = Desired::new()
            .children(spec.config.as_ref().map(|config| config_map(&metadata.name, config)))
            .child(deployment(&metadata.name, spec))
            .status(Status { available_replicas: found.as_ref().map_or(0, |found| found.status.available_replicas) })
            .condition(available(spec, found.as_ref()));
        let record = spec.database_id.as_ref().map(|id| ("RecordReady", outside::ensure_record(id, metadata)));
        let bucket = spec
            .bucket_name
            .as_ref()
            .map(|bucket| ("BucketReady", outside::ensure_bucket(bucket, config.bucket_region.as_deref())));
        Ok([record, bucket].into_iter().flatten().fold(desired, |desired, (kind, outcome)| match outcome {
            Ok(()) => desired.condition(Condition::new(kind, true, "Exists")),
            // What is in the cluster goes on without it; it is tried again, ever more slowly.
            Err(failure) => {
                desired.condition(Condition::new(kind, false, "NotMade").message(failure.message())).requeue()
            }
        }))
    }
}

/// How soon to go on with a cleanup that has more to do.
const SOON: Duration = Duration::from_secs(1);
/// Says of a MyApp in deletion that its record is gone.
const RECORD_DELETED: &str = "RecordDeleted";
/// Says of a MyApp in deletion whether its bucket is gone.
const BUCKET_DELETED: &str = "BucketDeleted";

impl Finalize for MyApp {
    /// The record, then the bucket. Children need no cleanup, they are garbage collected.
    ///
    /// The host may have ended after any line of this, in which case all of it is done again: what is gone already is success.
    fn finalize(request: &Request<Self>) -> Result<Finalization<Status>, Failure> {
        let Parent { metadata, spec } = &request.parent;
        if !request.context.ever_reached {
            return Ok(Finalization::finished());
        }
        let mut done = Vec::new();
        if let Some(id) = &spec.database_id {
            outside::delete_record(id, metadata)?;
            done.push(Condition::new(RECORD_DELETED, true, "Deleted"));
        }
        let answer =
            |finalization: Finalization<Status>| done.iter().cloned().fold(finalization, Finalization::condition);
        let nothing_left = || log::info!("nothing of {} is left outside the cluster", metadata.name);
        let Some(bucket) = &spec.bucket_name else {
            nothing_left();
            return Ok(answer(Finalization::finished()));
        };
        if !done.is_empty() && !outside::shows(request.object(), RECORD_DELETED)? {
            // Seen by who wonders what it waits for, whatever becomes of the bucket.
            return Ok(answer(Finalization::waiting(SOON)));
        }
        match outside::remove_bucket(bucket)? {
            Deleted::Gone => {
                nothing_left();
                Ok(answer(Finalization::finished().condition(Condition::new(BUCKET_DELETED, true, "Deleted"))))
            }
            Deleted::NotEmpty => {
                let emptying = Condition::new(BUCKET_DELETED, false, "Emptying");
                let message = format!("bucket {bucket} is being emptied, a thousand objects at a time");
                Ok(answer(Finalization::waiting(SOON).condition(emptying.message(message))))
            }
        }
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
