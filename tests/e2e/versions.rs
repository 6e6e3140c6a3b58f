//! Versions of a kind that come and go while the host runs. Each test has a control plane of its own, since it changes a CRD.

use std::time::Duration;

use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Namespace, edit, eventually, get, synced, told, until};

/// Serves the kind in these versions, stored as the first.
async fn serve(ns: &Namespace<'_>, crd: &str, versions: &[&str]) {
    let crds = ns.cluster_api("apiextensions.k8s.io/v1", "CustomResourceDefinition");
    let mut object = get(&crds, crd).await.expect("it is there");
    let template = object.data["spec"]["versions"][0].clone();
    let version = |(at, name): (usize, &&str)| {
        let mut version = template.clone();
        (version["name"], version["storage"]) = (json!(name), json!(at == 0));
        version
    };
    object.data["spec"]["versions"] = versions.iter().enumerate().map(version).collect();
    let spec = json!({"spec": {"versions": object.data["spec"]["versions"]}});
    crds.patch(crd, &PatchParams::default(), &Patch::Merge(&spec)).await.expect("it can be changed");
    // A version goes only once nothing is stored as it.
    let stored = json!({"status": {"storedVersions": [versions[0]]}});
    crds.patch_status(crd, &PatchParams::default(), &Patch::Merge(&stored)).await.expect("it can be changed");
}

async fn is_served(ns: &Namespace<'_>, version: &str, kind: &str) -> bool {
    ns.api(&format!("t.example/{version}"), kind).list(&ListParams::default()).await.is_ok()
}

fn gadget(mode: &str) -> Value {
    json!({"apiVersion": "t.example/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": {"mode": mode}})
}

/// Who owned a child in a version that is no longer served stands in the way of every apply: the API server answers 500 to all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_of_a_child_that_is_no_longer_served_stands_in_nobodys_way() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("dropped").await;
    serve(&ns, "gadgets.t.example", &["v1", "v1alpha1"]).await;
    eventually("both are served", async || is_served(&ns, "v1alpha1", "Gadget").await.then_some(())).await;
    let spec = |mode: &str| json!({"reply": {"children": [gadget(mode)]}});
    ns.widget("w", spec("one")).await;
    synced(&ns.widgets(), "w").await;
    let gadgets = ns.api("t.example/v1", "Gadget");
    // As it is where an earlier version of the plugin, and another operator, have made it what it is.
    let theirs = json!({"apiVersion": "t.example/v1alpha1", "kind": "Gadget", "metadata": {"name": "g", "labels": {"theirs": "1"}}});
    let old = ns.api("t.example/v1alpha1", "Gadget");
    old.patch("g", &PatchParams::apply("gitops"), &Patch::Apply(theirs)).await.expect("it can be applied");
    let child = get(&gadgets, "g").await.expect("it is there");
    let entries = child.metadata.managed_fields.clone().unwrap_or_default();
    let place = entries.iter().position(|entry| entry.manager.as_ref().is_some_and(|it| it.starts_with("pilothouse/")));
    let path = format!("/metadata/managedFields/{}/apiVersion", place.expect("it is ours"));
    let patch = json!([{"op": "replace", "path": path, "value": "t.example/v1alpha1"}]).to_string();
    cluster.kubectl(&["--namespace=dropped", "patch", "gadget", "g", "--type=json", "-p", &patch]);
    serve(&ns, "gadgets.t.example", &["v1"]).await;
    eventually("one is served", async || (!is_served(&ns, "v1alpha1", "Gadget").await).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(2)).await;

    edit(&ns.widgets(), "w", json!({"spec": spec("two")})).await;
    let child = until(&gadgets, "g", "applied", |child| child.data["spec"]["mode"] == "two").await;
    synced(&ns.widgets(), "w").await;
    let entries = child.metadata.managed_fields.clone().unwrap_or_default();
    assert!(entries.iter().all(|entry| entry.api_version.as_deref() == Some("t.example/v1")), "{entries:#?}");
    let managers: Vec<_> = entries.iter().filter_map(|entry| entry.manager.as_deref()).collect();
    assert!(managers.contains(&"gitops") && managers.len() == 2, "nobody loses what is theirs: {managers:?}");
    let of_child = || ns.writes().into_iter().filter(|write| write.resource == "gadgets").collect::<Vec<_>>();
    assert_eq!(of_child().iter().filter(|write| write.code == 500).count(), 1, "{:#?}", of_child());
    // What the plugin no longer sends is no longer there.
    let none = json!({"apiVersion": "t.example/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": {"mode": null, "ports": [{"port": 1}]}});
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [none]}}})).await;
    until(&gadgets, "g", "the default holds", |child| child.data["spec"]["mode"] == "fast").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    host.terminate();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c40_a_kind_that_is_served_in_another_version_later_is_picked_up() {
    let cluster = Cluster::start();
    let ns = cluster.namespace("c40").await;
    for versions in [&["v1alpha1", "v1"][..], &["v1alpha1"]] {
        serve(&ns, "gadgets.t.example", versions).await;
    }
    eventually("the plugin's is not served", async || (!is_served(&ns, "v1", "Gadget").await).then_some(())).await;
    let host = cluster.run_host_with(&[], 1);
    let reconcilers = ns.reconcilers();
    let message = told(&reconcilers, "mirror", "Loaded", "False", "KindMissing").await;
    assert!(message.contains("Gadget"), "{message}");
    ns.widget("w", json!({"reply": {"children": [gadget("one")]}})).await;
    // The other reconciler of this host works.
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 1})).await;
    synced(&ns.my_apps(), "web").await;
    serve(&ns, "gadgets.t.example", &["v1", "v1alpha1"]).await;
    told(&reconcilers, "mirror", "Ready", "True", "").await;
    synced(&ns.widgets(), "w").await;
    serve(&ns, "gadgets.t.example", &["v1"]).await;
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [gadget("two")]}}})).await;
    until(&ns.api("t.example/v1", "Gadget"), "g", "applied", |child| child.data["spec"]["mode"] == "two").await;
    synced(&ns.widgets(), "w").await;
    host.terminate();
}

/// A definition that lets a status be written only later, and then takes that back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c17_a_status_subresource_that_comes_and_goes_is_noticed_while_the_host_runs() {
    let cluster = Cluster::start();
    let ns = cluster.namespace("c17-status").await;
    let patch = |patch: Value| {
        let operation = json!([patch]).to_string();
        cluster.kubectl(&["patch", "crd", "widgets.t.example", "--type=json", "-p", &operation]);
    };
    let path = "/spec/versions/0/subresources";
    patch(json!({"op": "remove", "path": path}));
    eventually("no status is served", async || {
        (!cluster.kubectl(&["get", "--raw", "/apis/t.example/v1"]).contains("widgets/status")).then_some(())
    })
    .await;
    let host = cluster.run_host();
    ns.widget("w", json!({"reply": {"children": [gadget("one")]}})).await;
    let gadgets = ns.api("t.example/v1", "Gadget");
    until(&gadgets, "g", "made", |_| true).await;
    let parent = get(&ns.widgets(), "w").await.expect("it is there");
    assert!(parent.data["status"].is_null(), "{parent:?}");
    patch(json!({"op": "add", "path": path, "value": {"status": {}}}));
    synced(&ns.widgets(), "w").await;
    let writes = ns.writes().iter().filter(|write| write.resource == "gadgets").count();
    assert_eq!(writes, 1, "nothing is applied for that: {:#?}", ns.writes());
    patch(json!({"op": "remove", "path": path}));
    eventually("they are watched anew", async || {
        (host.log_text().matches("they are watched anew").count() == 2).then_some(())
    })
    .await;
    let status = || ns.writes().iter().filter(|write| write.subresource == "status").count();
    let before = status();
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [gadget("two")]}}})).await;
    until(&gadgets, "g", "applied", |child| child.data["spec"]["mode"] == "two").await;
    assert_eq!(status(), before);
    host.terminate();
}
