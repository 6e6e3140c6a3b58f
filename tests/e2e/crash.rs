//! The host dies, whenever it likes, and everything converges.

use std::{collections::BTreeMap, time::Duration};

use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PropagationPolicy};
use serde_json::json;

use crate::{
    audit,
    cluster::{Cluster, Host, Namespace, condition, eventually, our_finalizers},
};

const PARENTS: usize = 50;

async fn count(ns: &Namespace<'_>, api_version: &str, kind: &str, matches: impl Fn(&DynamicObject) -> bool) -> usize {
    let list = ns.api(api_version, kind).list(&ListParams::default()).await.expect("it can be listed");
    list.items.iter().filter(|object| matches(object)).count()
}

/// Whether this MyApp and its Deployment have this image everywhere.
fn converged(parent: &DynamicObject) -> bool {
    let current = |kind: &str| {
        condition(parent, kind).is_some_and(|condition| {
            condition["status"] == "True" && condition["observedGeneration"].as_i64() == parent.metadata.generation
        })
    };
    current("Synced") && current("Ready") && our_finalizers(parent).len() == 1
}

async fn all_converge(ns: &Namespace<'_>, image: &str) {
    eventually("all parents converge", async || {
        let parents = count(ns, "mygroup.example.com/v1", "MyApp", converged).await;
        let deployments = count(ns, "apps/v1", "Deployment", |deployment| {
            deployment.data["spec"]["template"]["spec"]["containers"][0]["image"] == image
        })
        .await;
        let configs = count(ns, "v1", "ConfigMap", |config| config.metadata.owner_references.is_some()).await;
        (parents == PARENTS && deployments == PARENTS && configs == PARENTS).then_some(())
    })
    .await;
}

/// Kills the host once some, and not yet all, parents are done; and starts another.
async fn kill_midway(ns: &Namespace<'_>, host: Host, done: impl AsyncFn(&Namespace<'_>) -> usize) -> Host {
    host.resume();
    eventually("some are done", async || (done(ns).await >= 5).then_some(())).await;
    host.kill();
    let done = done(ns).await;
    assert!(done < PARENTS, "the host was killed too late, {done} were done");
    ns.cluster.run_host()
}

#[tokio::test]
async fn a_killed_host_converges_after_create_update_and_delete_of_50_and_is_quiet() {
    let cluster = Cluster::start();
    // Slow enough to be killed half-way.
    cluster.kubectl(&["patch", "crec", "myapp", "--type=merge", "-p", r#"{"spec":{"limits":{"concurrency":1}}}"#]);
    let host = cluster.run_host();
    let ns = cluster.namespace("crash").await;
    let names: Vec<_> = (0..PARENTS).map(|n| format!("app-{n:02}")).collect();

    host.pause();
    for name in &names {
        ns.my_app(name, json!({"image": "nginx:1", "replicas": 1, "config": {"a": "1"}})).await;
    }
    let host = kill_midway(&ns, host, async |ns| count(ns, "apps/v1", "Deployment", |_| true).await).await;
    all_converge(&ns, "nginx:1").await;

    host.pause();
    let patch = Patch::Merge(json!({"spec": {"image": "nginx:2", "config": {"a": "2"}}}));
    for name in &names {
        ns.my_apps().patch(name, &PatchParams::default(), &patch).await.expect("it can be edited");
    }
    let updated = async |ns: &Namespace<'_>| {
        count(ns, "apps/v1", "Deployment", |deployment| {
            deployment.data["spec"]["template"]["spec"]["containers"][0]["image"] == "nginx:2"
        })
        .await
    };
    let host = kill_midway(&ns, host, updated).await;
    all_converge(&ns, "nginx:2").await;

    quiet_minute(&cluster).await;

    host.pause();
    let params = DeleteParams { propagation_policy: Some(PropagationPolicy::Background), ..DeleteParams::default() };
    for name in &names {
        ns.my_apps().delete(name, &params).await.expect("it can be deleted");
    }
    let host =
        kill_midway(&ns, host, async |ns| PARENTS - count(ns, "mygroup.example.com/v1", "MyApp", |_| true).await).await;
    eventually("all is gone", async || {
        let parents = count(&ns, "mygroup.example.com/v1", "MyApp", |_| true).await;
        let deployments = count(&ns, "apps/v1", "Deployment", |_| true).await;
        let configs =
            count(&ns, "v1", "ConfigMap", |config| config.metadata.name.as_deref() != Some("kube-root-ca.crt")).await;
        (parents + deployments + configs == 0).then_some(())
    })
    .await;

    // The finalizer was always there before the first child, and every delete of ours named the object.
    let mut finalized = BTreeMap::new();
    for write in ns.writes() {
        match write.what().as_str() {
            "patch myapps" if write.code == 200 => drop(finalized.entry(write.name.clone()).or_insert(write.at)),
            "patch deployments" if write.code == 201 => {
                assert!(finalized.get(&write.name).is_some_and(|at| *at < write.at), "{write:#?}");
            }
            "delete configmaps" | "delete deployments" => assert!(write.body["preconditions"]["uid"].is_string()),
            _ => {}
        }
    }
    host.terminate();
}

/// Nobody does anything, and the host asks nothing: of the whole cluster, not only of one namespace.
async fn quiet_minute(cluster: &Cluster) {
    tokio::time::sleep(Duration::from_secs(2)).await;
    let asked = || {
        let mut requests = audit::requests(cluster.control_plane.audit_log());
        requests.retain(|request| request.verb != "watch");
        requests
    };
    let before = asked().len();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let requests = asked().split_off(before);
    assert!(requests.is_empty(), "not quiet: {requests:#?}");
}
