//! Two hosts, and one of them is at work.

use kube::api::{ListParams, PropagationPolicy};
use serde_json::json;

use crate::{
    audit,
    cluster::{Cluster, Host, Namespace, config_map, delete, edit, eventually, synced, until},
};

/// Times that are kept on a busy machine, and are soon over.
const SHORT: [&str; 3] = [
    "--leader-election-lease-duration=9s",
    "--leader-election-renew-deadline=6s",
    "--leader-election-retry-period=500ms",
];
/// Longer than any test waits: whoever leads after such a leader was let.
const LONG: [&str; 3] = [
    "--leader-election-lease-duration=5m",
    "--leader-election-renew-deadline=30s",
    "--leader-election-retry-period=500ms",
];

/// A host that stands for election, with a token of its own.
fn candidate(cluster: &Cluster, name: &str, times: [&str; 3]) -> Host {
    let arguments: Vec<_> = ["--leader-elect"].into_iter().chain(times).collect();
    cluster.spawn_host(&cluster.kubeconfig(name), &arguments)
}

/// Waits until the host leads; the name under which it does.
async fn leads(host: &Host) -> String {
    let line = eventually("the host leads", async || host.logged("leading")).await;
    line["identity"].as_str().expect("it says who it is").to_owned()
}

async fn stands_by(host: &Host) {
    eventually("the host stands by", async || host.logged("standing by")).await;
    assert!(host.is_ready().await);
    assert!(host.logged("leading").is_none());
}

/// What the host that leads under this name has asked for, in the order of arrival, and since when it leads.
fn requests_of(cluster: &Cluster, identity: &str) -> (Vec<audit::Request>, String) {
    let mut requests = audit::requests(cluster.control_plane.audit_log());
    let acquired = requests.iter().find(|request| {
        request.resource == "leases" && request.code < 300 && request.body["spec"]["holderIdentity"] == identity
    });
    let acquired = acquired.expect("it has taken the Lease").clone();
    assert!(!acquired.token.is_empty(), "{acquired:?}");
    requests.retain(|request| request.token == acquired.token);
    (requests, acquired.at)
}

/// Asserts that a standby has done nothing before it led but to look at the Lease.
fn assert_stood_by(cluster: &Cluster, identity: &str) {
    let (requests, acquired) = requests_of(cluster, identity);
    let before: Vec<_> = requests.iter().filter(|request| request.at < acquired).collect();
    assert!(!before.is_empty());
    assert!(before.iter().all(|request| request.what() == "get leases"), "{before:#?}");
}

async fn widgets_left(ns: &Namespace<'_>) -> usize {
    ns.widgets().list(&ListParams::default()).await.expect("they can be listed").items.len()
}

#[tokio::test]
async fn a_standby_does_nothing_until_the_leader_is_killed_or_lets_it() {
    let cluster = Cluster::start();
    let first = candidate(&cluster, "first", SHORT);
    leads(&first).await;
    let second = candidate(&cluster, "second", LONG);
    stands_by(&second).await;
    let leading = r#"leader_election_master_status{name="pilothouse"}"#;
    assert!(first.metrics().await.contains(&format!("{leading} 1")));
    assert!(second.metrics().await.contains(&format!("{leading} 0")));

    let ns = cluster.namespace("takeover").await;
    let names: Vec<_> = (0..10).map(|n| format!("w-{n}")).collect();
    for name in &names {
        ns.widget(name, json!({"reply": {"children": [config_map(name, "1")]}})).await;
    }
    // Some are done, some perhaps not.
    synced(&ns.widgets(), &names[0]).await;
    first.kill();
    for name in &names {
        edit(&ns.widgets(), name, json!({"spec": {"reply": {"children": [config_map(name, "2")]}}})).await;
    }
    let identity = leads(&second).await;
    for name in &names {
        synced(&ns.widgets(), name).await;
        until(&ns.config_maps(), name, "as wanted", |child| child.data["data"]["key"] == "2").await;
    }
    assert_stood_by(&cluster, &identity);
    assert!(second.metrics().await.contains(&format!("{leading} 1")));
    assert!(second.is_ready().await);

    let third = candidate(&cluster, "third", SHORT);
    stands_by(&third).await;
    second.terminate();
    let identity = leads(&third).await;
    edit(&ns.widgets(), &names[0], json!({"spec": {"reply": {"children": [config_map(&names[0], "3")]}}})).await;
    until(&ns.config_maps(), &names[0], "as wanted", |child| child.data["data"]["key"] == "3").await;
    assert_stood_by(&cluster, &identity);
    // All else was in place.
    let (requests, _) = requests_of(&cluster, &identity);
    let written = requests.iter().filter(|request| request.resource == "configmaps" && request.is_write());
    assert!(written.clone().all(|request| request.name == names[0]), "{:#?}", written.collect::<Vec<_>>());
    third.terminate();
}

/// `C46`
#[tokio::test]
async fn c46_a_leader_that_was_frozen_in_a_cleanup_sends_nothing_when_it_wakes() {
    let cluster = Cluster::start();
    // Slow enough to be frozen half-way, with calls and writes under way.
    cluster.kubectl(&[
        "patch",
        "crec",
        "mirror",
        "--type=merge",
        "-p",
        r#"{"spec":{"limits":{"timeout":"30s","concurrency":2}}}"#,
    ]);
    let old = candidate(&cluster, "old", SHORT);
    let old_identity = leads(&old).await;
    let new = candidate(&cluster, "new", SHORT);
    stands_by(&new).await;

    let ns = cluster.namespace("frozen").await;
    let names: Vec<_> = (0..24).map(|n| format!("w-{n:02}")).collect();
    for name in &names {
        let children = ["a", "b"].map(|child| config_map(&format!("{name}-{child}"), "1"));
        ns.widget(name, json!({"reply": {"children": children}, "cleanup": {"children": [], "busy": 300}})).await;
    }
    ns.widget("stays", json!({"reply": {"children": [config_map("stays", "1")]}})).await;
    for name in names.iter().map(String::as_str).chain(["stays"]) {
        synced(&ns.widgets(), name).await;
    }
    for name in &names {
        delete(&ns.widgets(), name, PropagationPolicy::Background).await;
    }
    let at_most = async |left: usize| {
        eventually("cleanups go on", async || (widgets_left(&ns).await <= left).then_some(())).await;
    };
    at_most(names.len() - 3).await;
    old.pause();
    let left = widgets_left(&ns).await;
    assert!(left > names.len() / 2, "it was frozen too late, {left} were left");

    let new_identity = leads(&new).await;
    // The new one is in the middle of it, too.
    at_most(left - 3).await;
    old.resume();
    eventually("the old one ends", async || {
        old.log_text().contains("this host no longer leads, and ends").then_some(())
    })
    .await;
    assert!(widgets_left(&ns).await > 1, "it was woken too late");
    assert_eq!(old.exit_code(), Some(1));
    at_most(1).await;

    edit(&ns.widgets(), "stays", json!({"spec": {"reply": {"children": [config_map("stays", "2")]}}})).await;
    until(&ns.config_maps(), "stays", "as wanted", |child| child.data["data"]["key"] == "2").await;
    eventually("the children are gone", async || {
        let children = ns.config_maps().list(&ListParams::default().labels("internal.pilothouse.dev/reconciler")).await;
        (children.expect("they can be listed").items.len() == 1).then_some(())
    })
    .await;

    assert_stood_by(&cluster, &new_identity);
    let (_, acquired) = requests_of(&cluster, &new_identity);
    let (of_old, _) = requests_of(&cluster, &old_identity);
    let cleanups = |requests: &[audit::Request]| {
        let cleanups = requests.iter().filter(|request| request.what() == "delete configmaps" && request.code == 200);
        cleanups.count()
    };
    assert!(cleanups(&of_old) > 0, "the old one was at work");
    // Not even a request that would have been refused. One for the Lease may have been on its way, and is refused by its version.
    let late: Vec<_> = of_old.iter().filter(|request| request.at > acquired).collect();
    assert!(late.iter().all(|request| request.resource == "leases" && request.code == 409), "{late:#?}");
    new.terminate();
}
