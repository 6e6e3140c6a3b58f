//! The example plugin WorkerPool: its end in order, on real Deployments, Jobs and Pods, with a crash in the midst.

use std::time::Duration;

use kube::api::PropagationPolicy;
use serde_json::json;

use crate::cluster::{Cluster, condition, delete, eventually, get, gone, manifests, our_finalizers, synced};

/// The garbage collector learns of a new kind within half a minute, or when it starts.
fn install(cluster: &Cluster) {
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    cluster.apply(&manifests("workerpool", "workerpool"));
    cluster.control_plane.stop_controller_manager().expect("the controller manager stops");
    cluster.control_plane.start_controller_manager().expect("the controller manager starts");
}

#[tokio::test]
async fn a_worker_pool_is_drained_then_cleaned_up_after_and_then_gone() {
    let cluster = Cluster::start();
    install(&cluster);
    let ns = cluster.namespace("pools").await;
    let host = cluster.run_host_with(&[], 1);
    let (pools, jobs) = (ns.api("example.com/v1", "WorkerPool"), ns.api("batch/v1", "Job"));
    // Its Pods are workers that take their time to end: something holds them.
    let spec = json!({"image": "worker:1", "replicas": 2, "cleanup": {"image": "sweep:1", "args": ["all"]}});
    ns.create(
        json!({"apiVersion": "example.com/v1", "kind": "WorkerPool", "metadata": {"name": "mail"}, "spec": spec}),
    )
    .await;
    synced(&pools, "mail").await;
    eventually("its workers are ready", async || {
        get(&ns.deployments(), "mail").await.filter(|it| it.data["status"]["readyReplicas"] == 2).map(drop)
    })
    .await;

    delete(&pools, "mail", PropagationPolicy::Background).await;
    eventually("it is drained", async || {
        get(&ns.deployments(), "mail").await.filter(|it| it.data["spec"]["replicas"] == 0).map(drop)
    })
    .await;
    host.kill();
    let host = cluster.run_host_with(&[], 1);
    gone(&pools, "mail").await;
    gone(&jobs, "mail-cleanup").await;
    gone(&ns.deployments(), "mail").await;
    host.terminate();

    // In that order: no workers, then the Job, which completes, then our finalizer goes.
    let writes = ns.writes();
    let place = |what: &str, is: &dyn Fn(&crate::audit::Request) -> bool| {
        writes.iter().position(is).unwrap_or_else(|| panic!("{what}: {writes:#?}"))
    };
    let drained = place("the Deployment is scaled to nothing", &|write| {
        write.what() == "patch deployments" && write.body["spec"]["replicas"] == 0
    });
    let job = place("the Job is made", &|write| write.what() == "patch jobs" && write.code == 201);
    let released = place("our finalizer goes", &|write| {
        write.what() == "patch workerpools"
            && write.body.to_string().contains("/metadata/finalizers")
            && write.body.to_string().contains("\"value\":[]")
    });
    assert!(drained < job && job < released, "{drained} {job} {released}: {writes:#?}");
    // Nothing is made again once it is deleted, but that Job.
    let made = writes.iter().filter(|write| write.code == 201 && write.resource != "events").count();
    assert_eq!(made, 2, "{writes:#?}");
}

#[tokio::test]
async fn a_worker_pool_whose_cleanup_fails_stays_and_says_so() {
    let cluster = Cluster::start();
    install(&cluster);
    let ns = cluster.namespace("pools").await;
    let host = cluster.run_host_with(&[], 1);
    let (pools, jobs) = (ns.api("example.com/v1", "WorkerPool"), ns.api("batch/v1", "Job"));
    let spec = json!({"image": "worker:1", "replicas": 0, "cleanup": {"image": "sweep:1"}});
    ns.create(
        json!({"apiVersion": "example.com/v1", "kind": "WorkerPool", "metadata": {"name": "mail"}, "spec": spec}),
    )
    .await;
    synced(&pools, "mail").await;
    // Somebody has made a Job of that name, and it is not of this pool.
    cluster.kubectl(&["create", "job", "mail-cleanup", "--namespace=pools", "--image=other:1"]);
    delete(&pools, "mail", PropagationPolicy::Background).await;
    let parent = eventually("it says why it waits", async || {
        get(&pools, "mail").await.filter(|it| condition(it, "Synced").is_some_and(|it| it["reason"] == "NameCollision"))
    })
    .await;
    assert_eq!(our_finalizers(&parent).len(), 1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(get(&pools, "mail").await.is_some());
    cluster.kubectl(&["delete", "job", "mail-cleanup", "--namespace=pools"]);
    gone(&pools, "mail").await;
    gone(&jobs, "mail-cleanup").await;
    host.terminate();
}
