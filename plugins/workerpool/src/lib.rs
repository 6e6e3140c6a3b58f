//! WorkerPool: workers that take tasks from a queue. What it shows is the end of one: first the workers are drained, then a Job cleans up,
//! and only then everything is deleted, in that order, whatever crashes in between.
//!
//! Each call of `finalize` looks at what is there and says what should be there next; it remembers nothing. So the order is kept by what
//! it sees: there is no Job before the last worker is gone, and no end before the Job is complete.

use std::time::Duration;

use pilothouse_sdk::{Propagation, Value, prelude::*};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The operator for `example.com/v1`, kind `WorkerPool`.
#[derive(Debug)]
pub struct WorkerPool;

/// What a user asks for.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The container image of a worker. On SIGTERM a worker finishes the task that it has.
    pub image: String,
    /// How many workers there are. Leave it out when an autoscaler decides.
    #[schemars(range(min = 0))]
    pub replicas: Option<i32>,
    /// How long a worker may take for the task that it has, in seconds.
    #[schemars(range(min = 0))]
    pub drain_seconds: Option<i64>,
    /// What runs once, after the last worker is gone and before the pool is deleted.
    pub cleanup: Option<Cleanup>,
}

/// A Job that runs once.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct Cleanup {
    /// The container image.
    pub image: String,
    /// The arguments of the container.
    pub args: Option<Vec<String>>,
}

/// What is reported back.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Status {
    /// How many workers there are.
    pub workers: i32,
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
    replicas: i32,
    terminating_replicas: i32,
}

/// The little that we want to know of the Job.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Job {
    status: JobStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct JobStatus {
    conditions: Vec<JobCondition>,
}

#[derive(Deserialize)]
struct JobCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    #[serde(default)]
    message: String,
}

/// Children wake us when they change; this is for what no child shows.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

impl Plugin for WorkerPool {
    type Spec = Spec;
    type Status = Status;

    fn describe() -> Describe {
        Describe::crd(include_str!("../crd.json")).child("apps/v1", "Deployment").child("batch/v1", "Job")
    }

    fn reconcile(request: &Request<Self>) -> Result<Desired<Status>, Failure> {
        let Parent { metadata, spec } = &request.parent;
        let found: Option<Deployment> = request.child("Deployment", &metadata.name)?;
        Ok(Desired::new()
            .child(workers(&metadata.name, spec, spec.replicas))
            .status(Status { workers: found.map_or(0, |found| found.status.replicas) }))
    }
}

impl Finalize for WorkerPool {
    fn finalize(request: &Request<Self>) -> Result<Finalization<Status>, Failure> {
        let Parent { metadata, spec } = &request.parent;
        if request.context.propagation != Some(Propagation::Background) {
            // The garbage collector deletes the workers in its own time, or the user wants them left: nothing is for us to order.
            return Ok(Finalization::finished());
        }
        let found: Option<Deployment> = request.child("Deployment", &metadata.name)?;
        let Deployment { spec: asked, status } = found.unwrap_or_default();
        let left = status.replicas.max(status.terminating_replicas);
        let drained = asked.replicas == 0 && left == 0;
        let waiting = Finalization::waiting(LOOK_AGAIN)
            .child(workers(&metadata.name, spec, Some(0)))
            .status(Status { workers: left });
        if !drained {
            let message = format!("{left} workers finish what they have");
            return Ok(waiting.condition(Condition::new("Drained", false, "Draining").message(message)));
        }
        let Some(cleanup) = &spec.cleanup else { return Ok(Finalization::finished()) };

        let job: Option<Job> = request.child("Job", &job_name(&metadata.name))?;
        let conditions = job.map(|job| job.status.conditions).unwrap_or_default();
        let has = |kind| conditions.iter().find(|condition| condition.kind == kind && condition.status == "True");
        if has("Complete").is_some() {
            return Ok(Finalization::finished());
        }
        if let Some(failed) = has("Failed") {
            let job = job_name(&metadata.name);
            return Err(Failure::retry(format!(
                "Job {job} failed: {}; look at its log, and delete it to try again",
                failed.message
            )));
        }
        Ok(waiting
            .child(cleanup_job(&metadata.name, cleanup))
            .condition(Condition::new("Drained", true, "NoWorkers"))
            .condition(Condition::new("CleanedUp", false, "JobRuns")))
    }
}

export_plugin!(WorkerPool, finalizer);

fn workers(pool: &str, spec: &Spec, replicas: Option<i32>) -> Value {
    let mut deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": pool, "labels": labels(pool) },
        "spec": {
            "selector": { "matchLabels": labels(pool) },
            "template": {
                "metadata": { "labels": labels(pool) },
                "spec": { "containers": [{ "name": "worker", "image": spec.image }] },
            },
        },
    });
    if let Some(replicas) = replicas {
        // Left out otherwise: a field that we do not send belongs to the autoscaler.
        deployment["spec"]["replicas"] = replicas.into();
    }
    if let Some(seconds) = spec.drain_seconds {
        deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = seconds.into();
    }
    deployment
}

fn cleanup_job(pool: &str, cleanup: &Cleanup) -> Value {
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": job_name(pool), "labels": labels(pool) },
        "spec": {
            "backoffLimit": 3,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{ "name": "cleanup", "image": cleanup.image, "args": cleanup.args }],
                },
            },
        },
    })
}

fn job_name(pool: &str) -> String {
    format!("{pool}-cleanup")
}

fn labels(pool: &str) -> Value {
    json!({ "app.kubernetes.io/name": "workerpool", "app.kubernetes.io/instance": pool })
}
