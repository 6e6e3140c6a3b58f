//! The host dies, whenever it likes, and everything converges.

use std::{collections::BTreeMap, time::Duration};

use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, PropagationPolicy};
use serde_json::json;

use crate::{
    audit,
    cluster::{
        Cluster, Host, Namespace, condition, config_map, delete, edit, eventually, gone, our_finalizers, synced,
    },
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

/// Asks until the API server is there to answer.
async fn persist<T>(mut ask: impl AsyncFnMut() -> Result<T, kube::Error>) {
    eventually("the API server answers", async || match ask().await {
        Ok(_) => Some(()),
        // An earlier try may have come through without its answer.
        Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 => Some(()),
        Err(_) => None,
    })
    .await;
}

#[tokio::test]
async fn fifty_parents_created_changed_and_deleted_at_once_converge_over_a_restart_of_the_api_server() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("restart").await;
    let third = PARENTS / 3;
    let name = |n: usize| format!("app-{n:02}");
    let app = |n: usize| -> DynamicObject {
        let app = json!({"apiVersion": "mygroup.example.com/v1", "kind": "MyApp", "metadata": {"name": name(n)},
            "spec": {"image": "nginx:1", "replicas": 1, "config": {"a": "1"}}});
        serde_json::from_value(app).expect("it is an object")
    };
    // Two thirds exist before: one is going to be changed, one deleted.
    for n in third..PARENTS {
        ns.my_apps().create(&PostParams::default(), &app(n)).await.expect("it can be created");
    }
    eventually("they converge", async || {
        (count(&ns, "mygroup.example.com/v1", "MyApp", converged).await == PARENTS - third).then_some(())
    })
    .await;

    let my_apps = ns.my_apps();
    let patch = Patch::Merge(json!({"spec": {"image": "nginx:2", "config": null}}));
    let user = async |n: usize| {
        tokio::time::sleep(Duration::from_millis(40 * u64::try_from(n % third).unwrap_or_default())).await;
        match n / third {
            0 => persist(async || my_apps.create(&PostParams::default(), &app(n)).await).await,
            1 => persist(async || my_apps.patch(&name(n), &PatchParams::default(), &patch).await).await,
            _ => persist(async || my_apps.delete(&name(n), &DeleteParams::default()).await).await,
        }
    };
    let outage = async {
        tokio::time::sleep(Duration::from_millis(250)).await;
        cluster.control_plane.stop_api_server().expect("it stops");
        tokio::time::sleep(Duration::from_secs(2)).await;
        cluster.control_plane.start_api_server().expect("it starts");
    };
    tokio::join!(futures::future::join_all((0..PARENTS).map(user)), outage);

    let left = 2 * third;
    eventually("all converge, and nothing else is left", async || {
        let list = ns.my_apps().list(&ListParams::default()).await.ok()?;
        let deployments = ns.deployments().list(&ListParams::default()).await.ok()?;
        let configs = ns.config_maps().list(&ListParams::default()).await.ok()?;
        let image = |deployment: &&DynamicObject| {
            deployment.data["spec"]["template"]["spec"]["containers"][0]["image"] == "nginx:2"
        };
        let owned = |config: &&DynamicObject| config.metadata.owner_references.is_some();
        (list.items.len() == left
            && list.items.iter().all(converged)
            && deployments.items.len() == left
            && deployments.items.iter().filter(image).count() == third
            && configs.items.iter().filter(owned).count() == third)
            .then_some(())
    })
    .await;
    // The same process all along.
    host.terminate();
}

/// Nobody does anything, and the host asks nothing: of the whole cluster, not only of one namespace.
async fn quiet_minute(cluster: &Cluster) {
    // The counts of the parents are told last, at most ten seconds after they were told before.
    tokio::time::sleep(Duration::from_secs(12)).await;
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

/// There is no bookkeeping of how far a change has come: what is there says it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c70_a_change_of_many_children_survives_a_crash_and_a_deletion_in_its_midst() {
    const CHILDREN: usize = 600;
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("c70").await;
    let spec = |value: &str| {
        let children: Vec<_> = (0..CHILDREN).map(|number| config_map(&format!("c-{number}"), value)).collect();
        json!({"reply": {"children": children}, "cleanup": {"log": ["cleanup"]}})
    };
    let with = async |value: &str| count(&ns, "v1", "ConfigMap", |child| child.data["data"]["key"] == value).await;
    let midway = async |value: &str| {
        eventually("some have changed", async || (with(value).await >= 20).then_some(())).await;
    };
    let uids = async || -> BTreeMap<_, _> {
        let list = ns.config_maps().list(&ListParams::default()).await.expect("it can be listed");
        list.items.into_iter().map(|child| (child.metadata.name, child.metadata.uid)).collect()
    };
    ns.widget("w", spec("1")).await;
    synced(&ns.widgets(), "w").await;
    let before = uids().await;

    edit(&ns.widgets(), "w", json!({"spec": spec("2")})).await;
    midway("2").await;
    host.kill();
    let changed = with("2").await;
    assert!(changed < CHILDREN, "the host was killed too late");
    let writes = ns.writes().len();
    let host = cluster.run_host();
    synced(&ns.widgets(), "w").await;
    assert_eq!(with("2").await, CHILDREN);
    assert_eq!(uids().await, before, "none was made anew");
    let rest = ns.writes().split_off(writes).iter().filter(|write| write.resource == "configmaps").count();
    // What was on its way when the host died arrived all the same.
    let left = CHILDREN - changed;
    assert!((left - 8..=left).contains(&rest), "only what was left to do is done: {rest} of {left}");

    edit(&ns.widgets(), "w", json!({"spec": spec("3")})).await;
    midway("3").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "w").await;
    eventually("all children are gone", async || (with("2").await + with("3").await == 0).then_some(())).await;
    assert_eq!(ns.calls("w", "cleanup"), 1);
    let made = ns.writes().iter().filter(|write| write.resource == "configmaps" && write.code == 201).count();
    assert_eq!(made, CHILDREN, "each was made once");
    host.terminate();
}
