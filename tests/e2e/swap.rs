//! Reconcilers that start, change, break, heal and stop while the host runs; and plugins that are replaced under load.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::api::{DynamicObject, ListParams, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, Namespace, component, condition, config_map, delete, edit, eventually, get, gone, manifests, mirror,
    our_finalizers, synced, until,
};

/// Puts a component into the ConfigMap of the plugin `name`.
pub(crate) fn push(cluster: &Cluster, name: &str, bytes: &[u8]) {
    let patch = json!({"binaryData": {"plugin.wasm": BASE64_STANDARD.encode(bytes)}}).to_string();
    let file = cluster.control_plane.data_dir().join(format!("{name}.patch.json"));
    std::fs::write(&file, patch).expect("it can be written");
    let map = format!("configmap/{name}-plugin");
    let file = format!("--patch-file={}", file.display());
    cluster.kubectl(&["patch", &map, "--namespace=pilothouse-system", "--type=merge", &file]);
}

fn patch_reconciler(cluster: &Cluster, name: &str, spec: &Value) {
    cluster.kubectl(&["patch", "crec", name, "--type=merge", "-p", &json!({"spec": spec}).to_string()]);
}

/// The plugin as if it had no cleanup: that of its component has another name on the outside.
fn without_cleanup(plugin: &[u8]) -> Vec<u8> {
    let export = |package: &str| [&[1, 0, 33], format!("pilothouse:{package}/finalizer@0.1.0").as_bytes()].concat();
    let (export, other) = (export("plugin"), export("others"));
    let place = plugin.windows(export.len()).position(|bytes| bytes == export).expect("it exports one");
    [&plugin[..place], &other, &plugin[place + other.len()..]].concat()
}

/// Waits until the condition of the reconciler has this status; its message.
async fn told(ns: &Namespace<'_>, name: &str, kind: &str, status: &str, reason: &str) -> String {
    crate::cluster::told(&ns.reconcilers(), name, kind, status, reason).await
}

/// Installs a plugin as another reconciler, whose service account lacks what `without` names.
fn versioned(name: &str) -> Value {
    json!({"reply": {"children": [config_map(name, "1")], "versioned": true}})
}

fn shows(child: &DynamicObject, version: &str) -> bool {
    let mut annotations = child.metadata.annotations.iter().flatten();
    annotations.any(|(key, value)| key == "t.example/version" && value == version)
}

async fn all_versions(ns: &Namespace<'_>, version: &str, count: usize) {
    eventually(&format!("all children are of version {version}"), async || {
        let children = ns.config_maps().list(&ListParams::default()).await.ok()?;
        let current = children.items.iter().filter(|child| shows(child, version));
        (current.count() == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_plugin_is_swapped_under_load_and_a_broken_one_is_refused() {
    const PARENTS: usize = 50;
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("swap").await;
    for n in 0..PARENTS {
        let name = format!("w{n}");
        ns.widget(&name, versioned(&name)).await;
    }
    all_versions(&ns, "the mirror, version 1", PARENTS).await;

    // Parents are edited all the time while the plugin changes.
    let load = async {
        for round in 0..60 {
            let name = format!("w{}", round % PARENTS);
            edit(&ns.widgets(), &name, json!({"metadata": {"annotations": {"round": round.to_string()}}})).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let swap = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        push(&cluster, "mirror", &mirror(2));
        all_versions(&ns, "the mirror, version 2", PARENTS).await;
    };
    tokio::join!(load, swap);
    let failed = host.log_text().lines().filter(|line| line.contains("reconcile failed")).count();
    assert_eq!(failed, 0, "a swap fails no reconcile: {}", host.log_text());
    told(&ns, "mirror", "Degraded", "False", "").await;

    // A broken one changes nothing, and is told.
    let active = |object: &DynamicObject| object.data["status"]["activeRevision"].clone();
    let before = active(&get(&ns.reconcilers(), "mirror").await.expect("it is there"));
    let writes = ns.writes().len();
    push(&cluster, "mirror", &mirror(3)[..1000]);
    let message = told(&ns, "mirror", "Degraded", "True", "InvalidPlugin").await;
    assert!(message.contains("failed to compile the plugin"), "{message}");
    told(&ns, "mirror", "Ready", "True", "").await;
    let object = get(&ns.reconcilers(), "mirror").await.expect("it is there");
    assert_eq!(active(&object), before);
    assert_ne!(object.data["status"]["desiredRevision"], before);
    ns.widget("late", versioned("late")).await;
    all_versions(&ns, "the mirror, version 2", PARENTS + 1).await;
    assert!(ns.writes()[writes..].iter().all(|write| write.name == "late"), "{:#?}", &ns.writes()[writes..]);

    // Not even a restart: the last good revision is kept in the cluster.
    host.kill();
    let host = cluster.run_host_that("the last good revision serves");
    edit(&ns.widgets(), "late", json!({"spec": {"reply": {"children": [config_map("late", "2")]}}})).await;
    until(&ns.config_maps(), "late", "the new value", |child| child.data["data"]["key"] == "2").await;
    all_versions(&ns, "the mirror, version 2", PARENTS + 1).await;
    let message = told(&ns, "mirror", "Degraded", "True", "InvalidPlugin").await;
    assert!(message.contains("serves"), "{message}");

    // And heals by itself, once there is one that works; the config is part of the revision, too.
    push(&cluster, "mirror", &mirror(4));
    all_versions(&ns, "the mirror, version 4", PARENTS + 1).await;
    told(&ns, "mirror", "Degraded", "False", "").await;
    patch_reconciler(&cluster, "mirror", &json!({"config": {"word": "hello"}}));
    all_versions(&ns, "the mirror, version 4 hello", PARENTS + 1).await;
    assert!(!host.log_text().contains("reconcile failed"), "{}", host.log_text());
    let kept = cluster.kubectl(&["get", "controllerrevisions", "--namespace=pilothouse-system", "--output=name"]);
    assert!((2..=12).contains(&kept.lines().count()), "{kept}");
    host.terminate();
}

#[tokio::test]
async fn a_running_call_ends_on_the_revision_that_it_began_with() {
    let cluster = Cluster::start();
    patch_reconciler(&cluster, "mirror", &json!({"limits": {"timeout": "1m"}, "rollout": {"preview": "Off"}}));
    let host = cluster.run_host();
    let ns = cluster.namespace("running").await;
    // The other version is compiled already when it is to take over, which is quicker than the call.
    let first = revision(&ns).await;
    for version in [2, 1] {
        let before = revision(&ns).await;
        push(&cluster, "mirror", &mirror(version));
        eventually("another revision serves", async || (revision(&ns).await != before).then_some(())).await;
    }
    let reply = json!({"children": [config_map("c", "1")], "versioned": true, "log": ["called"], "busy": 4000});
    ns.widget("w", json!({"reply": reply})).await;
    eventually("the plugin is called", async || (ns.calls("w", "called") == 1).then_some(())).await;
    push(&cluster, "mirror", &mirror(2));
    eventually("the new revision serves", async || (revision(&ns).await != first).then_some(())).await;
    assert_eq!(ns.calls("w", "called"), 1, "the call has not come to its end yet");
    until(&ns.config_maps(), "c", "the new version's", |child| shows(child, "the mirror, version 2")).await;
    let versions: Vec<_> = ns
        .writes()
        .iter()
        .filter(|write| write.resource == "configmaps")
        .map(|write| write.body["metadata"]["annotations"]["t.example/version"].clone())
        .collect();
    assert_eq!(versions, ["the mirror, version 1", "the mirror, version 2"]);
    host.terminate();
}

/// The revision of the mirror that serves.
async fn revision(ns: &Namespace<'_>) -> String {
    let object = get(&ns.reconcilers(), "mirror").await.expect("it is there");
    object.data["status"]["activeRevision"].to_string()
}

#[tokio::test]
async fn each_mistake_is_told_with_its_remedy_and_harms_nobody_else() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("mistakes").await;
    let good = std::fs::read(component("mirror")).expect("it was built");

    // No component, no WebAssembly, another world, nothing.
    let module = b"\0asm\x01\0\0\0".to_vec();
    let empty_component = b"\0asm\x0d\0\x01\0".to_vec();
    for (bytes, message) in [
        (module, "core module"),
        (b"hello".to_vec(), "failed to compile the plugin"),
        (empty_component, "does not export pilothouse:plugin/reconciler"),
        (good[..good.len() / 2].to_vec(), "failed to compile the plugin"),
    ] {
        push(&cluster, "mirror", &bytes);
        let told = until(&ns.reconcilers(), "mirror", message, |object| {
            condition(object, "Loaded")
                .is_some_and(|loaded| loaded["message"].as_str().is_some_and(|text| text.contains(message)))
        })
        .await;
        assert_eq!(
            condition(&told, "Ready").map(|ready| ready["status"].clone()),
            Some(json!("True")),
            "the former one serves"
        );
    }
    patch_reconciler(&cluster, "mirror", &json!({"plugin": {"configMap": {"name": "nowhere"}}}));
    let message = told(&ns, "mirror", "Loaded", "False", "SourceUnavailable").await;
    assert!(
        message.contains("ConfigMap pilothouse-system/nowhere") || message.contains("pilothouse manifests"),
        "{message}"
    );
    patch_reconciler(&cluster, "mirror", &json!({"plugin": {"configMap": {"name": "mirror-plugin", "key": "other"}}}));
    let message = told(&ns, "mirror", "Loaded", "False", "SourceUnavailable").await;
    eventually("the key is named", async || {
        let object = get(&ns.reconcilers(), "mirror").await?;
        condition(&object, "Loaded")?["message"].as_str()?.contains("\"other\"").then_some(())
    })
    .await;
    drop(message);

    // Another kind of parent.
    cluster.apply(include_bytes!("../../plugins/workerpool/crd.json"));
    push(&cluster, "mirror", &std::fs::read(component("workerpool")).expect("it was built"));
    patch_reconciler(&cluster, "mirror", &json!({"plugin": {"configMap": {"key": "plugin.wasm"}}}));
    let message = told(&ns, "mirror", "Degraded", "True", "").await;
    eventually("the kinds are named", async || {
        let object = get(&ns.reconcilers(), "mirror").await?;
        let degraded = condition(&object, "Degraded")?;
        (degraded["reason"] == "ParentKindChanged" && degraded["message"].as_str()?.contains("WorkerPool"))
            .then_some(())
    })
    .await;
    drop(message);

    // All the while the other reconciler works, and this one serves what it had.
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 1})).await;
    synced(&ns.my_apps(), "web").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    push(&cluster, "mirror", &good);
    told(&ns, "mirror", "Degraded", "False", "").await;
    told(&ns, "mirror", "Loaded", "True", "").await;
    host.terminate();
}

#[tokio::test]
async fn c40_a_missing_crd_and_c41_a_forbidden_kind_degrade_one_reconciler_and_heal() {
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crd", "widgets.t.example"]);
    cluster.kubectl(&["delete", "clusterrolebinding", "pilothouse:myapp"]);
    let host = cluster.run_host_that("the desired revision does not serve");
    let ns = cluster.namespace("missing").await;

    let message = told(&ns, "mirror", "Loaded", "False", "KindMissing").await;
    assert!(message.contains("Widget (t.example/v1)") && message.contains("CRD"), "{message}");
    let message = told(&ns, "myapp", "Permitted", "False", "Forbidden").await;
    for part in ["system:serviceaccount:pilothouse-system:myapp", "list", "manifests"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    told(&ns, "myapp", "Ready", "False", "").await;

    // The CRD comes, and is noticed at once; the right comes, and is noticed at the next try.
    let manifests = manifests("mirror", "mirror");
    cluster.apply(&manifests);
    told(&ns, "mirror", "Ready", "True", "").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    told(&ns, "myapp", "Ready", "False", "").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 1})).await;
    cluster.apply(&crate::cluster::manifests("myapp", "myapp"));
    told(&ns, "myapp", "Ready", "True", "").await;
    synced(&ns.my_apps(), "web").await;

    // A right that is taken away is named on the parent, and nothing is deleted.
    cluster.kubectl(&["delete", "clusterrolebinding", "pilothouse:mirror"]);
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("c", "2")]}}})).await;
    eventually("the host meets the refusal", async || host.log_text().contains("cannot patch resource").then_some(()))
        .await;
    assert!(get(&ns.config_maps(), "c").await.is_some());
    cluster.apply(&manifests);
    until(&ns.config_maps(), "c", "the new value", |child| child.data["data"]["key"] == "2").await;
    host.terminate();
}

#[tokio::test]
async fn an_account_limits_and_pause_hold_at_once() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("revoked").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    synced(&ns.widgets(), "w").await;

    // Paused: nothing, not even cleanup.
    patch_reconciler(&cluster, "mirror", &json!({"paused": true}));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = ns.writes().len();
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("c", "2")]}}})).await;
    ns.widget("doomed", json!({})).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(ns.writes().len(), before, "{:#?}", ns.writes());
    patch_reconciler(&cluster, "mirror", &json!({"paused": false}));
    until(&ns.config_maps(), "c", "the new value", |child| child.data["data"]["key"] == "2").await;
    synced(&ns.widgets(), "doomed").await;

    // Limits.
    patch_reconciler(&cluster, "mirror", &json!({"limits": {"children": 1}}));
    tokio::time::sleep(Duration::from_secs(1)).await;
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("c", "3"), config_map("d", "3")]}}}))
        .await;
    let message = crate::cluster::refused(&ns.widgets(), "w", "InvalidAnswer").await;
    assert!(message.contains("limits.children"), "{message}");
    patch_reconciler(&cluster, "mirror", &json!({"limits": {"children": 10}}));
    edit(&ns.widgets(), "w", json!({"metadata": {"annotations": {"again": "1"}}})).await;
    synced(&ns.widgets(), "w").await;

    // Another account, which the host may not act as.
    cluster.kubectl(&["create", "serviceaccount", "other", "--namespace=pilothouse-system"]);
    patch_reconciler(&cluster, "mirror", &json!({"serviceAccount": {"name": "other"}}));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = ns.writes().len();
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("c", "4")]}}})).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let by_mirror: Vec<_> = ns.writes().split_off(before);
    assert!(by_mirror.is_empty(), "{by_mirror:#?}");
    told(&ns, "mirror", "Ready", "False", "").await;
    patch_reconciler(&cluster, "mirror", &json!({"serviceAccount": {"name": "mirror"}}));
    until(&ns.config_maps(), "c", "the new value", |child| child.data["data"]["key"] == "4").await;
    host.terminate();
}

#[tokio::test]
async fn the_oldest_reconciler_has_a_parent_and_one_that_leaves_the_selection_is_released() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("selected").await;
    patch_reconciler(&cluster, "mirror", &json!({"selector": {"matchLabels": {"team": "blue"}}}));
    // Creation times have seconds: the other one must be younger.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    cluster.apply(&manifests("mirror", "second"));
    told(&ns, "second", "Ready", "True", "").await;

    let finalizer = async |name: &str| our_finalizers(&get(&ns.widgets(), name).await.expect("it is there"));
    ns.widget("plain", json!({"reply": {"children": [config_map("plain", "1")]}})).await;
    synced(&ns.widgets(), "plain").await;
    assert!(finalizer("plain").await[0].starts_with("pilothouse.dev/c-second-"));

    // It enters the selection of the older one: the younger lets go, and says that it is not alone.
    edit(&ns.widgets(), "plain", json!({"metadata": {"labels": {"team": "blue"}}})).await;
    eventually("the older one has it", async || {
        let finalizers = finalizer("plain").await;
        (finalizers.len() == 1 && finalizers[0].starts_with("pilothouse.dev/c-mirror-")).then_some(())
    })
    .await;
    let message = told(&ns, "second", "Conflict", "True", "").await;
    assert!(message.contains("ClusterReconciler mirror"), "{message}");

    // It leaves it again.
    edit(&ns.widgets(), "plain", json!({"metadata": {"labels": {"team": "green"}}})).await;
    eventually("the younger one has it", async || {
        let finalizers = finalizer("plain").await;
        (finalizers.len() == 1 && finalizers[0].starts_with("pilothouse.dev/c-second-")).then_some(())
    })
    .await;
    delete(&ns.widgets(), "plain", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "plain").await;
    host.terminate();
}

#[tokio::test]
async fn c16_a_deleted_reconciler_releases_its_parents_and_leaves_their_children() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("uninstalled").await;
    for name in ["a", "b"] {
        ns.widget(name, json!({"reply": {"children": [config_map(name, "1")]}, "cleanup": {"waitingMs": 60000}})).await;
        synced(&ns.widgets(), name).await;
    }
    // One is being cleaned up at that moment.
    delete(&ns.widgets(), "b", PropagationPolicy::Background).await;

    patch_reconciler(&cluster, "mirror", &json!({"deletionPolicy": "Block"}));
    cluster.kubectl(&["delete", "crec", "mirror", "--wait=false"]);
    let message = told(&ns, "mirror", "Degraded", "True", "DeletionBlocked").await;
    assert!(message.contains("2 parents"), "{message}");

    patch_reconciler(&cluster, "mirror", &json!({"deletionPolicy": "Release"}));
    gone(&ns.reconcilers(), "mirror").await;
    gone(&ns.widgets(), "b").await;
    let parent = get(&ns.widgets(), "a").await.expect("it stays");
    assert_eq!(our_finalizers(&parent), Vec::<String>::new());
    assert!(get(&ns.config_maps(), "a").await.is_some());
    host.terminate();
}

#[tokio::test]
async fn c42_a_new_revision_that_wants_nothing_any_more_is_held_until_it_is_allowed() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("held").await;
    ns.widget("w", json!({"reply": {"children": [config_map("a", "1"), config_map("b", "1")]}})).await;
    synced(&ns.widgets(), "w").await;

    // Without a look before, which would see it, too.
    patch_reconciler(&cluster, "mirror", &json!({"config": {"forget": true}, "rollout": {"preview": "Off"}}));
    let message = crate::cluster::refused(&ns.widgets(), "w", "PruneHeld").await;
    assert!(message.contains("all 2 children") && message.contains("pilothouse.dev/allow-prune="), "{message}");
    // Also after a restart, since it has never been allowed.
    host.kill();
    let host = cluster.run_host();
    edit(&ns.widgets(), "w", json!({"metadata": {"labels": {"a": "1"}}})).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    for name in ["a", "b"] {
        assert!(get(&ns.config_maps(), name).await.is_some(), "{name} stays");
    }
    let revision = message.rsplit_once('=').expect("it says how").1.to_owned();
    edit(&ns.widgets(), "w", json!({"metadata": {"annotations": {"pilothouse.dev/allow-prune": revision}}})).await;
    gone(&ns.config_maps(), "a").await;
    gone(&ns.config_maps(), "b").await;
    synced(&ns.widgets(), "w").await;
    host.terminate();
}

#[tokio::test]
async fn a_kind_that_comes_is_watched_before_it_is_made_and_one_that_goes_is_cleaned_up() {
    let cluster = Cluster::start();
    // Version 7 does not declare Secrets.
    push(&cluster, "mirror", &mirror(7));
    let host = cluster.run_host();
    let ns = cluster.namespace("kinds").await;
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"a": "YQ=="}});
    let both = json!({"spec": {"reply": {"children": [config_map("c", "1"), secret]}}});
    ns.widget("w", both["spec"].clone()).await;
    let message = crate::cluster::refused(&ns.widgets(), "w", "InvalidAnswer").await;
    assert!(message.contains("children[1].object.kind is Secret (v1)"), "{message}");
    let kinds = async || {
        let object = get(&ns.reconcilers(), "mirror").await.expect("it is there");
        object.data["status"]["appliedKinds"].to_string()
    };
    assert!(!kinds().await.contains("Secret"));

    // The next version does: another kind to watch, beside the revision that serves.
    push(&cluster, "mirror", &mirror(1));
    synced(&ns.widgets(), "w").await;
    let secrets = ns.api("v1", "Secret");
    assert!(get(&secrets, "s").await.is_some());
    assert!(kinds().await.contains("Secret"));

    // And back: what is left of the kind is still seen, and goes when it is no longer wanted.
    push(&cluster, "mirror", &mirror(7));
    crate::cluster::refused(&ns.widgets(), "w", "InvalidAnswer").await;
    assert!(get(&secrets, "s").await.is_some(), "an answer that is refused deletes nothing");
    host.kill();
    let host = cluster.run_host();
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("c", "1")]}}})).await;
    gone(&secrets, "s").await;
    synced(&ns.widgets(), "w").await;
    host.terminate();
}

#[tokio::test]
async fn a_revision_without_cleanup_lets_no_parent_go_unless_the_reconciler_says_so() {
    let cluster = Cluster::start();
    let _host = cluster.run_host();
    let ns = cluster.namespace("drop").await;
    for name in ["waits", "goes"] {
        let spec =
            json!({"reply": {"children": [config_map(name, "1")], "versioned": true}, "cleanup": {"log": ["cleanup"]}});
        ns.widget(name, spec).await;
    }
    all_versions(&ns, "the mirror, version 1", 2).await;
    push(&cluster, "mirror", &without_cleanup(&mirror(2)));
    all_versions(&ns, "the mirror, version 2", 2).await;

    delete(&ns.widgets(), "waits", PropagationPolicy::Background).await;
    let message = crate::cluster::refused(&ns.widgets(), "waits", "NoCleanup").await;
    assert!(message.contains("spec.dropFinalizer"), "{message}");
    patch_reconciler(&cluster, "mirror", &json!({"dropFinalizer": true}));
    gone(&ns.widgets(), "waits").await;
    delete(&ns.widgets(), "goes", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "goes").await;

    // One that has a cleanup is asked all the same.
    push(&cluster, "mirror", &mirror(3));
    ns.widget("cleaned", versioned("cleaned")).await;
    all_versions(&ns, "the mirror, version 3", 1).await;
    edit(&ns.widgets(), "cleaned", json!({"spec": {"cleanup": {"log": ["cleanup"]}}})).await;
    delete(&ns.widgets(), "cleaned", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "cleaned").await;
    let cleanups = ["waits", "goes", "cleaned"].map(|name| ns.calls(name, "cleanup"));
    assert_eq!(cleanups, [0, 0, 1]);
}
