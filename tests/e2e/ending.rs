//! Namespaces that are deleted with a `Reconciler` and its parents in them, and accounts that lose their rights before their reconciler
//! goes: whatever goes first, every parent is cleaned up, and nothing waits for ever (`C08`).

use std::time::{Duration, Instant};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::{
    Api,
    api::{DynamicObject, PropagationPolicy},
};
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, Namespace, config_map, delete, edit, eventually, get, gone, our_finalizers, synced, told,
};
use crate::tenants::{install_in, reconcilers};

/// What the issue of namespaces that never end allows.
const SOON: Duration = Duration::from_secs(30);

/// The names of what the host keeps of a tenant.
fn kept(cluster: &Cluster, kind: &str, name: &str) -> Vec<String> {
    let kept = cluster.kubectl(&["get", kind, "--namespace=pilothouse-system", "--output=name"]);
    kept.lines().filter(|line| line.contains(&format!("/n-{name}-"))).map(ToOwned::to_owned).collect()
}

fn namespaces(ns: &Namespace<'_>) -> Api<DynamicObject> {
    ns.cluster_api("v1", "Namespace")
}

/// A tenant with so many parents that are cleaned up, one by one, as `cleanup` says.
async fn populate(ns: &Namespace<'_>, parents: usize, cleanup: &Value) {
    for number in 0..parents {
        let spec = json!({"reply": {"children": [config_map(&format!("c{number}"), "1")]}, "cleanup": cleanup});
        ns.widget(&format!("w{number}"), spec).await;
    }
    for number in 0..parents {
        let parent = synced(&ns.widgets(), &format!("w{number}")).await;
        assert_eq!(our_finalizers(&parent).len(), 1);
    }
}

#[tokio::test]
async fn c08_a_namespace_with_all_that_is_in_it_ends_by_itself() {
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    let ns = cluster.namespace("ending").await;
    let policy = cluster.control_plane.data_dir().join("tenants.yaml");
    std::fs::write(&policy, "namespaces: {ending: {grants: [sql]}}").expect("it can be written");
    let policy = format!("--tenant-policy={}", policy.display());
    install_in(&cluster, "ending", "greeter", 6);
    let host = cluster.run_host_with(&[&policy], 1);
    populate(&ns, 3, &json!({"log": ["cleaned"]})).await;
    assert_eq!(kept(&cluster, "controllerrevisions", "greeter").len(), 1);

    // The Secrets of its grants are kept, too, and follow.
    let secret = |password: &str| {
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "db", "namespace": "ending"},
            "stringData": {"password": password}})
    };
    cluster.apply(secret("first").to_string().as_bytes());
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "db", "namespace": "ending"},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["db"], "verbs": ["get", "list", "watch"]}]});
    cluster.apply(role.to_string().as_bytes());
    cluster.kubectl(&[
        "create",
        "rolebinding",
        "db",
        "--namespace=ending",
        "--role=db",
        "--serviceaccount=pilothouse-system:pilothouse",
    ]);
    let grants =
        json!({"spec": {"grants": {"sql": [{"name": "db", "engine": "postgres", "secretRef": {"name": "db"}}]}}});
    edit(&reconcilers(&ns), "greeter", grants).await;
    let copied = async |password: &str| {
        eventually(&format!("the copy of {password}"), async || {
            let copy = kept(&cluster, "secrets", "greeter").pop()?;
            let copy =
                cluster.kubectl(&["get", &copy, "--namespace=pilothouse-system", "--output=jsonpath={.data.password}"]);
            (copy == BASE64_STANDARD.encode(password)).then_some(())
        })
        .await;
    };
    copied("first").await;
    cluster.apply(secret("second").to_string().as_bytes());
    copied("second").await;

    delete(&namespaces(&ns), "ending", PropagationPolicy::Background).await;
    let begun = Instant::now();
    gone(&namespaces(&ns), "ending").await;
    assert!(begun.elapsed() < SOON, "it took {:?}", begun.elapsed());
    for number in 0..3 {
        assert!(ns.calls(&format!("w{number}"), "cleaned") >= 1, "w{number} was not cleaned up");
    }
    for kind in ["controllerrevisions", "secrets"] {
        assert_eq!(kept(&cluster, kind, "greeter"), Vec::<String>::new());
    }
    host.terminate();
}

#[tokio::test]
async fn a_host_that_starts_in_the_midst_sees_a_namespace_end() {
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    let ns = cluster.namespace("midst").await;
    install_in(&cluster, "midst", "greeter", 6);
    let host = cluster.run_host_with(&[], 1);
    populate(&ns, 2, &json!({"log": ["cleaned"], "waitingMs": 1000})).await;
    delete(&namespaces(&ns), "midst", PropagationPolicy::Background).await;
    // All that can go is gone: roles, account, plugin.
    let roles: Api<DynamicObject> = ns.api("rbac.authorization.k8s.io/v1", "RoleBinding");
    gone(&roles, "pilothouse:greeter:host").await;
    gone(&ns.config_maps(), "greeter-plugin").await;
    host.kill();
    assert!(get(&ns.widgets(), "w0").await.is_some(), "it waits for its cleanup");
    let host = cluster.run_host_that("the host itself sees its parents out");
    told(&reconcilers(&ns), "greeter", "Loaded", "False", "NamespaceTerminating").await;
    let parent = eventually("its cleanup waits", async || {
        get(&ns.widgets(), "w0")
            .await
            .filter(|parent| parent.data["status"]["conditions"].to_string().contains("Deleting"))
    })
    .await;
    assert_eq!(our_finalizers(&parent).len(), 1);
    for name in ["w0", "w1"] {
        edit(&ns.widgets(), name, json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
    }
    gone(&namespaces(&ns), "midst").await;
    assert!(kept(&cluster, "controllerrevisions", "greeter").is_empty());
    host.terminate();
}

#[tokio::test]
async fn a_reconciler_whose_account_has_no_rights_any_more_releases_its_parents() {
    let cluster = Cluster::start();
    let ns = cluster.namespace("revoked").await;
    let host = cluster.run_host_with(&[], 2);
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    host.kill();
    // As `kubectl delete -f` of all that `pilothouse manifests` prints does it, but for the definitions.
    cluster.kubectl(&["delete", "clusterrole,clusterrolebinding", "pilothouse:mirror"]);
    cluster.kubectl(&["delete", "crec", "mirror", "--wait=false"]);
    let host = cluster.run_host_that("the host itself sees its parents out");
    gone(&ns.cluster_api("pilothouse.dev/v1alpha1", "ClusterReconciler"), "mirror").await;
    let parent = get(&ns.widgets(), "w").await.expect("it lives");
    assert!(our_finalizers(&parent).is_empty());
    assert!(get(&ns.config_maps(), "c").await.is_some());
    host.terminate();
}
