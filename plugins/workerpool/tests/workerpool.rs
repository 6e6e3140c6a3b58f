//! The end of a WorkerPool, step by step: each state that `finalize` can find, and what it wants next.

use pilothouse_sdk::crd::Crd;
use pilothouse_sdk::testing::{Answer, Case, Cleanup, ConditionStatus};
use pilothouse_sdk::{Failure, Value, json};
use workerpool::WorkerPool;

fn case(spec: Value) -> Case {
    Case::parent(json!({
        "apiVersion": "example.com/v1",
        "kind": "WorkerPool",
        "metadata": { "name": "mail", "namespace": "team", "uid": "1", "generation": 1 },
        "spec": spec,
    }))
}

fn ending(spec: Value) -> Case {
    case(spec).context(json!({ "deletion": { "propagation": "Background" } }))
}

fn with_cleanup() -> Value {
    json!({ "image": "worker:1", "replicas": 3, "cleanup": { "image": "sweep:1", "args": ["--queue", "mail"] } })
}

fn finalize(case: &Case) -> (Cleanup, Answer) {
    case.finalize::<WorkerPool>().expect("an answer")
}

fn deployment(asked: i32, left: i32) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": "mail", "namespace": "team" },
        "spec": { "replicas": asked },
        "status": { "replicas": left },
    })
}

fn job(condition: Option<&str>) -> Value {
    let conditions: Vec<_> =
        condition.iter().map(|kind| json!({ "type": kind, "status": "True", "message": "as it went" })).collect();
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": "mail-cleanup", "namespace": "team" },
        "status": { "conditions": conditions },
    })
}

fn is_waiting(cleanup: Cleanup) -> bool {
    matches!(cleanup, Cleanup::Waiting(_))
}

#[test]
fn crd_is_current() {
    Crd::of::<WorkerPool>("example.com/v1", "WorkerPool")
        .column("Image", "string", ".spec.image")
        .column("Workers", "integer", ".status.workers")
        .column("Ready", "string", r#".status.conditions[?(@.type=="Ready")].status"#)
        .column("Age", "date", ".metadata.creationTimestamp")
        .check(concat!(env!("CARGO_MANIFEST_DIR"), "/crd.json"));
}

#[test]
fn a_pool_that_lives_is_its_workers_and_no_job() {
    let answer = case(with_cleanup()).child(deployment(3, 2)).reconcile::<WorkerPool>().expect("an answer");
    assert_eq!(answer.children.as_ref().map(Vec::len), Some(1));
    assert_eq!(answer.child("Deployment", "mail")["spec"]["replicas"], 3);
    assert_eq!(answer.status, json!({ "workers": 2 }));
    let autoscaled =
        case(json!({ "image": "worker:1", "drainSeconds": 600 })).reconcile::<WorkerPool>().expect("an answer");
    let deployment = autoscaled.child("Deployment", "mail");
    assert_eq!(deployment["spec"].get("replicas"), None);
    assert_eq!(deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], 600);
}

#[test]
fn workers_are_drained_before_anything_is_cleaned_up() {
    // Not asked yet; asked; the last one finishes its task.
    for (found, left) in [(deployment(3, 3), "3"), (deployment(0, 2), "2")] {
        let (cleanup, answer) = finalize(&ending(with_cleanup()).child(found));
        assert!(is_waiting(cleanup));
        assert_eq!(answer.children.as_ref().map(Vec::len), Some(1), "no Job yet");
        assert_eq!(answer.child("Deployment", "mail")["spec"]["replicas"], 0);
        let drained = answer.condition("Drained").expect("the condition");
        assert_eq!((drained.status, drained.reason.as_str()), (ConditionStatus::False, "Draining"));
        assert!(drained.message.starts_with(left), "{}", drained.message);
    }
    let mut terminating = deployment(0, 0);
    terminating["status"]["terminatingReplicas"] = json!(1);
    assert!(is_waiting(finalize(&ending(with_cleanup()).child(terminating)).0));
}

#[test]
fn a_job_cleans_up_when_the_last_worker_is_gone() {
    for found in [None, Some(job(None))] {
        let case = ending(with_cleanup()).child(deployment(0, 0));
        let (cleanup, answer) = finalize(&found.into_iter().fold(case, Case::child));
        assert!(is_waiting(cleanup));
        let container = &answer.child("Job", "mail-cleanup")["spec"]["template"]["spec"]["containers"][0];
        assert_eq!((&container["image"], &container["args"]), (&json!("sweep:1"), &json!(["--queue", "mail"])));
        // Left out, it would be deleted, and come back no more.
        assert_eq!(answer.child("Deployment", "mail")["spec"]["replicas"], 0);
        assert_eq!(answer.condition("Drained").map(|it| it.status), Some(ConditionStatus::True));
    }
}

#[test]
fn the_end_is_when_the_job_is_complete_and_never_when_it_failed() {
    let with = |job| ending(with_cleanup()).child(deployment(0, 0)).child(job);
    assert_eq!(finalize(&with(job(Some("Complete")))).0, Cleanup::Finished);
    let failure = with(job(Some("Failed"))).finalize::<WorkerPool>().expect_err("a failure");
    assert_eq!(
        failure,
        Failure::retry("Job mail-cleanup failed: as it went; look at its log, and delete it to try again")
    );
}

#[test]
fn without_cleanup_a_pool_is_at_its_end_when_it_is_drained() {
    let spec = json!({ "image": "worker:1" });
    assert!(is_waiting(finalize(&ending(spec.clone()).child(deployment(2, 2))).0));
    assert_eq!(finalize(&ending(spec.clone()).child(deployment(0, 0))).0, Cleanup::Finished);
    // Somebody has deleted the Deployment.
    assert_eq!(finalize(&ending(spec)).0, Cleanup::Finished);
}

#[test]
fn the_order_of_the_garbage_collector_and_the_wish_to_keep_the_workers_go_first() {
    for propagation in ["Foreground", "Orphan"] {
        let context = json!({ "deletion": { "propagation": propagation } });
        let (cleanup, answer) = finalize(&case(with_cleanup()).context(context).child(deployment(3, 3)));
        assert_eq!((cleanup, answer.children), (Cleanup::Finished, None));
    }
}
