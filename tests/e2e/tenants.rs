//! Reconcilers in namespaces, who may name which service account, parents that are not custom kinds of a namespace, and plugins
//! from files.

use std::{path::PathBuf, time::Duration};

use kube::{
    Api,
    api::{DynamicObject, PropagationPolicy},
};
use serde_json::{Value, json};

use crate::{
    audit,
    cluster::{
        Cluster, Namespace, component, condition, config_map, delete, edit, eventually, get, gone, mirror,
        our_finalizers, pilothouse, refused, synced, told, until,
    },
};

/// The mirror in another version, as a file.
fn mirror_file(cluster: &Cluster, version: u8) -> PathBuf {
    let file = cluster.control_plane.data_dir().join(format!("mirror-{version}.wasm"));
    std::fs::write(&file, mirror(version)).expect("it can be written");
    file
}

/// Installs the mirror for one namespace.
pub(crate) fn install_in(cluster: &Cluster, namespace: &str, name: &str, version: u8) {
    let file = mirror_file(cluster, version).display().to_string();
    cluster.apply(&pilothouse(&["manifests", &file, "--namespaced", "--namespace", namespace, "--name", name]));
}

pub(crate) fn reconcilers(ns: &Namespace<'_>) -> Api<DynamicObject> {
    ns.api("pilothouse.dev/v1alpha1", "Reconciler")
}

#[tokio::test]
async fn a_reconciler_neither_sees_nor_writes_outside_its_namespace() {
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    let (mine, other) = (cluster.namespace("mine").await, cluster.namespace("other").await);
    // Version 6 declares kinds of namespaces only.
    install_in(&cluster, "mine", "greeter", 6);
    let host = cluster.run_host_with(&[], 1);
    told(&reconcilers(&mine), "greeter", "Ready", "True", "").await;
    for ns in [&mine, &other] {
        ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    }
    let parent = synced(&mine.widgets(), "w").await;
    assert!(our_finalizers(&parent)[0].starts_with("pilothouse.dev/n-greeter-"), "{parent:?}");
    assert!(get(&mine.config_maps(), "c").await.is_some());

    // Nor does an answer reach elsewhere.
    let mut elsewhere = config_map("c", "1");
    elsewhere["metadata"]["namespace"] = json!("other");
    mine.widget("reaches", json!({"reply": {"children": [elsewhere]}})).await;
    let message = refused(&mine.widgets(), "reaches", "InvalidAnswer").await;
    assert!(message.contains("children[0].object.metadata.namespace is \"other\""), "{message}");

    let untouched = get(&other.widgets(), "w").await.expect("it is there");
    assert!(our_finalizers(&untouched).is_empty() && untouched.data["status"].is_null(), "{untouched:?}");
    assert!(get(&other.config_maps(), "c").await.is_none());
    // It does not even ask.
    let mut requests = audit::requests(cluster.control_plane.audit_log());
    requests.retain(|request| request.user == "system:serviceaccount:mine:greeter");
    let outside: Vec<_> =
        requests.iter().filter(|request| !request.resource.is_empty() && request.namespace != "mine").collect();
    assert!(requests.len() > 10 && outside.is_empty(), "{outside:#?}");

    // One whose plugin makes objects of cluster scope has no place here.
    install_in(&cluster, "other", "greeter", 1);
    let message = told(&reconcilers(&other), "greeter", "Loaded", "False", "ClusterScoped").await;
    assert!(message.contains("ClusterRole (rbac.authorization.k8s.io/v1) is of cluster scope"), "{message}");
    // And the same name elsewhere is another one.
    install_in(&cluster, "other", "greeter", 6);
    let parent = synced(&other.widgets(), "w").await;
    assert_ne!(our_finalizers(&parent), our_finalizers(&get(&mine.widgets(), "w").await.expect("it is there")));

    // It goes as any other: its parents are released, their children stay.
    delete(&reconcilers(&mine), "greeter", PropagationPolicy::Background).await;
    gone(&reconcilers(&mine), "greeter").await;
    assert!(our_finalizers(&get(&mine.widgets(), "w").await.expect("it is there")).is_empty());
    assert!(get(&mine.config_maps(), "c").await.is_some());
    host.terminate();
}

#[tokio::test]
async fn a_tenant_has_no_more_than_the_policy_of_the_host_allows() {
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    let ns = cluster.namespace("tenant").await;
    let policy = cluster.control_plane.data_dir().join("tenants.yaml");
    std::fs::write(&policy, "namespaces: {tenant: {limits: {memory: 32Mi, timeout: 1s}, grants: [http]}}")
        .expect("it can be written");
    install_in(&cluster, "tenant", "greeter", 6);
    let patch = |spec: Value| {
        let patch = json!({"spec": spec}).to_string();
        cluster.kubectl(&["patch", "reconciler", "greeter", "--namespace=tenant", "--type=merge", "-p", &patch])
    };
    patch(json!({"limits": {"memory": "32Mi", "timeout": "1s"}}));
    let host = cluster.run_host_with(&[&format!("--tenant-policy={}", policy.display())], 1);
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    synced(&ns.widgets(), "w").await;

    for (spec, parts) in [
        (json!({"limits": {"memory": "1Gi"}}), ["spec.limits.memory is 1Gi", "namespace tenant may have 32Mi at most"]),
        (
            // What may be granted here is no reason.
            json!({"limits": {"memory": "32Mi"}, "grants": {
                "http": [{"name": "all", "url": "https://example.com"}],
                "sql": [{"name": "db", "engine": "postgres", "secretRef": {"name": "db"}}],
            }}),
            ["spec.grants.sql", "namespace tenant"],
        ),
    ] {
        patch(spec);
        let message = until(&reconcilers(&ns), "greeter", parts[0], |object| {
            condition(object, "Loaded").is_some_and(|it| {
                it["reason"] == "NotAllowed" && parts.iter().all(|part| it["message"].to_string().contains(part))
            })
        })
        .await;
        // What serves goes on, within what is allowed.
        assert_eq!(condition(&message, "Ready").expect("it is told")["status"], "True");
    }
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("c", "2")], "allocateMiB": 40}}})).await;
    let message = refused(&ns.widgets(), "w", "PluginMemory").await;
    assert!(message.contains("33554432 bytes (limits.memory)"), "{message}");
    patch(json!({"grants": null}));
    told(&reconcilers(&ns), "greeter", "Loaded", "True", "").await;
    host.terminate();
}

#[tokio::test]
async fn only_who_may_impersonate_an_account_may_name_it() {
    let cluster = Cluster::shared();
    let ns = cluster.namespace("accounts").await;
    cluster.kubectl(&[
        "create",
        "role",
        "author",
        "--namespace=accounts",
        "--verb=create,update,patch,get",
        "--resource=reconcilers.pilothouse.dev",
    ]);
    cluster.kubectl(&["create", "rolebinding", "author", "--namespace=accounts", "--role=author", "--user=alice"]);
    cluster.kubectl(&[
        "create",
        "clusterrole",
        "author",
        "--verb=create,patch,get",
        "--resource=clusterreconcilers.pilothouse.dev",
    ]);
    cluster.kubectl(&["create", "clusterrolebinding", "author", "--clusterrole=author", "--user=alice"]);
    for name in ["hers", "another"] {
        cluster.kubectl(&["create", "serviceaccount", name, "--namespace=accounts"]);
    }
    let alice = |arguments: &[&str], input: &Value| {
        let file = cluster.control_plane.data_dir().join("alice.json");
        std::fs::write(&file, input.to_string()).expect("it can be written");
        let mut kubectl = cluster.control_plane.kubectl();
        let output = kubectl.arg("--as=alice").args(arguments).arg(file).output().expect("kubectl runs");
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
    };
    let reconciler = |account: &str| {
        json!({"apiVersion": "pilothouse.dev/v1alpha1", "kind": "Reconciler", "metadata": {"name": "r", "namespace": "accounts"},
            "spec": {"plugin": {"configMap": {"name": "none"}}, "serviceAccount": account, "paused": true}})
    };
    let refused = eventually("the policy is in force", async || {
        alice(&["create", "--dry-run=server", "-f"], &reconciler("hers")).err()
    })
    .await;
    assert!(refused.contains("alice may not impersonate the service account accounts/hers"), "{refused}");
    let cluster_wide = json!({"apiVersion": "pilothouse.dev/v1alpha1", "kind": "ClusterReconciler", "metadata": {"name": "alice"},
        "spec": {"plugin": {"configMap": {"namespace": "accounts", "name": "none"}},
            "serviceAccount": {"namespace": "pilothouse-system", "name": "myapp"}}});
    let refused = alice(&["create", "-f"], &cluster_wide).expect_err("she may not");
    assert!(refused.contains("alice may not impersonate the service account pilothouse-system/myapp"), "{refused}");

    cluster.kubectl(&[
        "create",
        "role",
        "impersonate",
        "--namespace=accounts",
        "--verb=impersonate",
        "--resource=serviceaccounts",
        "--resource-name=hers",
    ]);
    cluster.kubectl(&[
        "create",
        "rolebinding",
        "impersonate",
        "--namespace=accounts",
        "--role=impersonate",
        "--user=alice",
    ]);
    eventually("she may", async || alice(&["create", "-f"], &reconciler("hers")).ok()).await;
    // Not every account, though; and what she may no longer name she may not change.
    let refused =
        alice(&["apply", "--server-side", "--force-conflicts", "-f"], &reconciler("another")).expect_err("she may not");
    assert!(refused.contains("accounts/another"), "{refused}");
    cluster.kubectl(&["delete", "rolebinding", "impersonate", "--namespace=accounts"]);
    let mut changed = reconciler("hers");
    changed["spec"]["plugin"]["configMap"]["name"] = json!("evil");
    let refused = eventually("she may no longer", async || {
        alice(&["apply", "--server-side", "--force-conflicts", "-f"], &changed).err()
    })
    .await;
    assert!(refused.contains("accounts/hers"), "{refused}");
    // What names no account is nobody's business.
    let mut labelled = reconciler("hers");
    labelled["metadata"]["labels"] = json!({"team": "blue"});
    alice(&["apply", "--server-side", "--force-conflicts", "-f"], &labelled).expect("a label is no spec");
    delete(&reconcilers(&ns), "r", PropagationPolicy::Background).await;
}

#[tokio::test]
async fn a_parent_of_a_built_in_kind_gets_events_and_no_status() {
    let cluster = Cluster::start();
    let file = mirror_file(&cluster, 8).display().to_string();
    cluster.apply(&pilothouse(&["manifests", &file, "--name=maps"]));
    cluster.kubectl(&[
        "patch",
        "crec",
        "maps",
        "--type=merge",
        "-p",
        r#"{"spec":{"selector":{"matchLabels":{"parent":"yes"}}}}"#,
    ]);
    let host = cluster.run_host_with(&[], 3);
    let ns = cluster.namespace("maps").await;
    let spec = |spec: &Value| json!({"data": {"spec": spec.to_string()}});
    let reply = json!({"reply": {"children": [config_map("child", "1")], "status": {"n": 1}, "log": ["called"]}});
    let mut parent = spec(&reply);
    parent["apiVersion"] = json!("v1");
    parent["kind"] = json!("ConfigMap");
    parent["metadata"] = json!({"name": "parent", "labels": {"parent": "yes"}});
    ns.create(parent).await;
    let child = until(&ns.config_maps(), "child", "there", |_| true).await;
    let owner = &child.metadata.owner_references.expect("it has an owner")[0];
    assert_eq!((owner.kind.as_str(), owner.controller), ("ConfigMap", Some(true)));
    let reasons = || {
        let events = ns.requests().into_iter().filter(|request| request.resource == "events");
        // One that was told before is counted, in the object that is there.
        let told = |event: &audit::Request| event.body["reason"].as_str().unwrap_or("again").to_owned();
        events.map(|event| told(&event)).collect::<Vec<_>>()
    };
    eventually("success is told", async || (reasons() == ["ReconcileSuccess"]).then_some(())).await;
    // A failure is told when it begins, and when it is over.
    edit(&ns.config_maps(), "parent", spec(&json!({"reply": {"failure": {"terminal": "no"}}}))).await;
    eventually("the failure is told", async || (reasons().len() == 2).then_some(())).await;
    edit(&ns.config_maps(), "parent", json!({"metadata": {"annotations": {"again": "1"}}})).await;
    edit(&ns.config_maps(), "parent", spec(&reply)).await;
    eventually("success is told again", async || (reasons().len() == 3).then_some(())).await;
    assert_eq!(reasons(), ["ReconcileSuccess", "PluginTerminal", "again"]);
    ns.assert_quiet(Duration::from_secs(2)).await;
    host.terminate();

    // A host that starts has nothing to tell.
    let writes = ns.requests().iter().filter(|request| request.is_write()).count();
    let host = cluster.run_host_with(&[], 3);
    eventually("it is called", async || host.log_text().contains("\"called\"").then_some(())).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(ns.requests().iter().filter(|request| request.is_write()).count(), writes);
    assert!(!ns.requests().iter().any(|request| request.subresource == "status"));
    delete(&ns.config_maps(), "parent", PropagationPolicy::Background).await;
    gone(&ns.config_maps(), "parent").await;
    gone(&ns.config_maps(), "child").await;
    host.terminate();
}

#[tokio::test]
async fn a_parent_of_cluster_scope_owns_children_in_the_namespaces_that_they_name() {
    let cluster = Cluster::start();
    let file = mirror_file(&cluster, 9).display().to_string();
    cluster.apply(&pilothouse(&["manifests", &file, "--name=wide"]));
    let host = cluster.run_host_with(&[], 3);
    let ns = cluster.namespace("wide").await;
    let parents = ns.cluster_api("t.example/v1", "ClusterWidget");
    let mut child = config_map("c", "1");
    let parent = |child: &Value| {
        let parent = json!({"apiVersion": "t.example/v1", "kind": "ClusterWidget", "metadata": {"name": "w"},
            "spec": {"reply": {"children": [child]}}});
        cluster.apply(parent.to_string().as_bytes());
    };
    // It has no namespace to lend.
    parent(&child);
    let message = refused(&parents, "w", "InvalidAnswer").await;
    assert!(message.contains("children[0].object.metadata.namespace is missing"), "{message}");
    child["metadata"]["namespace"] = json!("wide");
    parent(&child);
    synced(&parents, "w").await;
    let made = get(&ns.config_maps(), "c").await.expect("it is there");
    assert_eq!(made.metadata.owner_references.expect("it has an owner")[0].kind, "ClusterWidget");
    edit(&ns.config_maps(), "c", json!({"data": {"key": "drift"}})).await;
    until(&ns.config_maps(), "c", "healed", |child| child.data["data"]["key"] == "1").await;
    delete(&parents, "w", PropagationPolicy::Background).await;
    gone(&parents, "w").await;
    gone(&ns.config_maps(), "c").await;
    host.terminate();
}

#[tokio::test]
async fn a_plugin_from_a_file_is_read_again_when_it_changes_and_only_if_the_host_allows_it() {
    let cluster = Cluster::start();
    let folder = cluster.control_plane.data_dir().join("dev");
    std::fs::create_dir(&folder).expect("it can be made");
    let file = folder.join("mirror.wasm");
    std::fs::copy(component("mirror"), &file).expect("it can be copied");
    let source = json!({"spec": {"plugin": {"configMap": null, "path": file}}}).to_string();
    cluster.kubectl(&["patch", "crec", "mirror", "--type=merge", "-p", &source]);
    let ns = cluster.namespace("files").await;
    let reconcilers = ns.cluster_api("pilothouse.dev/v1alpha1", "ClusterReconciler");
    let host = cluster.run_host_with(&[], 1);
    let message = told(&reconcilers, "mirror", "Loaded", "False", "SourceUnavailable").await;
    assert!(message.contains("--allow-plugin-paths"), "{message}");
    host.terminate();

    let host = cluster.run_host_with(&["--allow-plugin-paths"], 2);
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")], "versioned": true}})).await;
    let shows = async |version: &str| {
        until(&ns.config_maps(), "c", version, |child| {
            let annotations = child.metadata.annotations.iter().flatten();
            annotations.into_iter().any(|(_, value)| value.starts_with(version))
        })
        .await;
    };
    shows("the mirror, version 1").await;
    // Written in place, and put in its place.
    std::fs::write(&file, mirror(2)).expect("it can be written");
    shows("the mirror, version 2").await;
    std::fs::write(folder.join("new"), mirror(3)).expect("it can be written");
    std::fs::rename(folder.join("new"), &file).expect("it can be renamed");
    shows("the mirror, version 3").await;
    host.terminate();
    // Two sources are none.
    let both = json!({"spec": {"plugin": {"configMap": {"namespace": "pilothouse-system", "name": "mirror-plugin"}}}})
        .to_string();
    let mut kubectl = cluster.control_plane.kubectl();
    let output = kubectl.args(["patch", "crec", "mirror", "--type=merge", "-p", &both]).output().expect("kubectl runs");
    assert!(String::from_utf8_lossy(&output.stderr).contains("exactly one of image, configMap and path"), "{output:?}");
}
