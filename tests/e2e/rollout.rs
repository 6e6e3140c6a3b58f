//! How a new revision takes over: looked at before it serves, step by step, and back again if it does harm.

use std::{collections::BTreeSet, process::Command, time::Duration};

use kube::{
    Api,
    api::{DynamicObject, ListParams},
    core::{ApiResource, GroupVersionKind},
};
use pilothouse::rollout::is_among;
use serde_json::{Value, json};

use crate::{
    cluster::{
        Cluster, Namespace, component, condition, config_map, edit, eventually, get, mirror, refused, synced, told,
        until,
    },
    swap::push,
};

const ALLOW: &str = "pilothouse.dev/allow-rollout";

fn patch_reconciler(cluster: &Cluster, patch: &Value) {
    cluster.kubectl(&["patch", "crec", "mirror", "--type=merge", "-p", &patch.to_string()]);
}

/// What the reconciler tells of its rollout.
async fn rollout(ns: &Namespace<'_>) -> Value {
    get(&ns.reconcilers(), "mirror").await.expect("it is there").data["status"]["rollout"].clone()
}

/// Waits until the rollout of a revision other than `before` is in this state; what is told of it.
async fn rolled(ns: &Namespace<'_>, before: &Value, state: &str) -> Value {
    eventually(&format!("the rollout is {state}"), async || {
        let rollout = rollout(ns).await;
        (rollout["state"] == state && rollout["revision"] != *before).then_some(rollout)
    })
    .await
}

async fn events(ns: &Namespace<'_>, reason: &str) -> Vec<String> {
    // Those of objects of cluster scope are there.
    let api = ApiResource::from_gvk(&GroupVersionKind::gvk("events.k8s.io", "v1", "Event"));
    let events = Api::<DynamicObject>::namespaced_with(ns.client.clone(), "default", &api);
    let found = events.list(&ListParams::default()).await.expect("they can be listed").items;
    let of_reason = found.iter().filter(|event| event.data["reason"] == reason);
    of_reason.map(|event| event.data["note"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Asserts that the host has written nothing but its first so many writes.
fn assert_unwritten(ns: &Namespace<'_>, before: usize) {
    let writes = ns.writes().split_off(before);
    assert!(writes.is_empty(), "{writes:#?}");
}

/// The same plugin from another build: another digest, the same answers.
fn rebuilt(version: u8) -> Vec<u8> {
    // An empty section of a name that nobody reads.
    [mirror(version), vec![0, 6, 5, b'b', b'u', b'i', b'l', b'd']].concat()
}

fn deployment(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
        "replicas": 0, "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "c", "image": "c:1"}]}}}})
}

/// The version that the Pods of each Deployment have, by name.
async fn versions(ns: &Namespace<'_>) -> Vec<(String, u8)> {
    let all = ns.deployments().list(&ListParams::default()).await.expect("they can be listed").items;
    let version = |it: &DynamicObject| {
        let label = &it.data["spec"]["template"]["metadata"]["labels"]["t.example/version"];
        label.as_str().and_then(|label| label.parse().ok()).unwrap_or_default()
    };
    all.iter().map(|it| (it.metadata.name.clone().unwrap_or_default(), version(it))).collect()
}

async fn ready(ns: &Namespace<'_>, count: usize) {
    eventually("all parents are ready", async || {
        let parents = ns.widgets().list(&ListParams::default()).await.ok()?.items;
        let is_ready = |parent: &&DynamicObject| condition(parent, "Ready").is_some_and(|it| it["status"] == "True");
        (parents.iter().filter(is_ready).count() == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn c54_a_new_build_goes_step_by_step_stops_when_parents_are_not_ready_and_an_equal_one_writes_nothing() {
    const PARENTS: usize = 100;
    let cluster = Cluster::start();
    let steps = json!([{"percent": 10, "pause": "3s"}, {"percent": 50, "pause": "3s"}]);
    patch_reconciler(&cluster, &json!({"spec": {"rollout": {"strategy": "Staged", "steps": steps}}}));
    let host = cluster.run_host();
    let ns = cluster.namespace("paced").await;
    for n in 0..PARENTS {
        let name = format!("w{n}");
        ns.widget(&name, json!({"reply": {"children": [deployment(&name)], "labelled": true}})).await;
    }
    ready(&ns, PARENTS).await;
    let first = get(&ns.reconcilers(), "mirror").await.expect("it is there").data["status"]["activeRevision"].clone();

    // The same from another build: nothing is written on a parent or a child.
    ns.assert_quiet(Duration::from_secs(1)).await;
    let writes = ns.writes().len();
    push(&cluster, "mirror", &rebuilt(1));
    let equal = rolled(&ns, &first, "Complete").await;
    assert_unwritten(&ns, writes);
    assert_eq!(equal["preview"], "of 100 parents 0 change: 0 errors");

    // Another label on the Pods: never more parents than the step has, but for those that are pinned.
    let parents = ns.widgets().list(&ListParams::default()).await.expect("they can be listed").items;
    let among = |percent: u8| -> BTreeSet<String> {
        let of_step =
            parents.iter().filter(|parent| is_among(parent.metadata.uid.as_deref().unwrap_or_default(), percent));
        of_step.map(|parent| parent.metadata.name.clone().unwrap_or_default()).collect()
    };
    let stays = among(10).first().cloned().expect("there are some");
    let pin = |revision: &Value| json!({"metadata": {"annotations": {"pilothouse.dev/revision": revision}}});
    edit(&ns.widgets(), &stays, pin(&equal["revision"])).await;
    push(&cluster, "mirror", &mirror(2));
    let started = eventually("the rollout begins", async || {
        let rollout = rollout(&ns).await;
        (rollout["state"] == "Progressing").then_some(rollout)
    })
    .await;
    assert_eq!(started["preview"], "of 100 parents 100 change: 100 Deployments updated, 0 errors");
    assert_eq!((started["percent"].as_u64(), started["step"].as_u64()), (Some(10), Some(1)));
    let goes = (0..PARENTS).map(|n| format!("w{n}")).find(|name| !among(50).contains(name)).expect("there is one");
    edit(&ns.widgets(), &goes, pin(&started["revision"])).await;
    let mut seen = BTreeSet::new();
    loop {
        let changed: BTreeSet<_> = versions(&ns).await.into_iter().filter(|it| it.1 == 2).map(|it| it.0).collect();
        // Read afterwards: by then it may have more.
        let rollout = rollout(&ns).await;
        if rollout["state"] == "Complete" {
            break;
        }
        assert_eq!(rollout["state"], "Progressing", "{rollout}");
        let percent = u8::try_from(rollout["percent"].as_u64().expect("it is told")).expect("it is small");
        let mut allowed = among(percent);
        allowed.insert(goes.clone());
        allowed.remove(&stays);
        assert!(changed.is_subset(&allowed), "{percent}%: {changed:?}");
        seen.insert(percent);
    }
    // The last one can be over before it is seen.
    assert!(seen.is_subset(&[10, 50, 100].into()), "{seen:?}");
    ready(&ns, PARENTS).await;
    // Its revision is gone, so it has the one that serves.
    eventually("all are of the new version", async || versions(&ns).await.iter().all(|it| it.1 == 2).then_some(()))
        .await;

    // One that nobody rolls out: it stops at the first step, goes back, and is not tried again, whoever starts.
    cluster.control_plane.stop_controller_manager().expect("it stops");
    patch_reconciler(&cluster, &json!({"spec": {"rollout": {"progressDeadline": "3s"}}}));
    push(&cluster, "mirror", &mirror(3));
    let back = rolled(&ns, &started["revision"], "RolledBack").await;
    let message = told(&ns.reconcilers(), "mirror", "Degraded", "True", "RolledBack").await;
    assert!(message.contains("rolled back at step 1 of 3") && message.contains("are not ready"), "{message}");
    told(&ns.reconcilers(), "mirror", "Progressing", "False", "RolledBack").await;
    eventually("all are back", async || versions(&ns).await.iter().all(|it| it.1 == 2).then_some(())).await;
    let moved: BTreeSet<_> = ns
        .writes()
        .iter()
        .filter(|write| {
            write.resource == "deployments" && write.body.to_string().contains(r#""t.example/version":"3""#)
        })
        .map(|write| write.name.clone())
        .collect();
    assert!(!moved.is_empty() && moved.is_subset(&among(10)), "{moved:?}");
    cluster.control_plane.start_controller_manager().expect("it starts");
    ready(&ns, PARENTS).await;
    host.kill();
    let host = cluster.run_host();
    told(&ns.reconcilers(), "mirror", "Degraded", "True", "RolledBack").await;
    assert_eq!(rollout(&ns).await["since"], back["since"]);
    assert!(versions(&ns).await.iter().all(|it| it.1 == 2));
    host.terminate();
}

#[tokio::test]
async fn a_rollout_goes_on_where_it_was_when_the_host_ended_and_back_by_hand() {
    const PARENTS: usize = 20;
    let cluster = Cluster::start();
    let steps = json!([{"percent": 50, "pause": "1h"}]);
    patch_reconciler(&cluster, &json!({"spec": {"rollout": {"strategy": "Staged", "steps": steps}}}));
    let host = cluster.run_host();
    let ns = cluster.namespace("resumed").await;
    for n in 0..PARENTS {
        let name = format!("w{n}");
        ns.widget(&name, json!({"reply": {"children": [deployment(&name)], "labelled": true}})).await;
    }
    ready(&ns, PARENTS).await;
    push(&cluster, "mirror", &mirror(2));
    let of_new = async || versions(&ns).await.iter().filter(|it| it.1 == 2).count();
    let parents = ns.widgets().list(&ListParams::default()).await.expect("they can be listed").items;
    let half = parents.iter().filter(|it| is_among(it.metadata.uid.as_deref().unwrap_or_default(), 50)).count();
    eventually("the half goes over", async || (of_new().await == half).then_some(())).await;
    ready(&ns, PARENTS).await;
    let message = until(&ns.reconcilers(), "mirror", "the numbers are told", |it| {
        condition(it, "Progressing").is_some_and(|it| {
            it["message"].as_str().is_some_and(|text| text.starts_with(&format!("{half} of 20 parents on revision ")))
        })
    })
    .await;
    let message = condition(&message, "Progressing").expect("it is told")["message"].to_string();
    assert!(message.contains("step 1 of 2, next at "), "{message}");
    // A parent says by which revision it is as it is.
    let rollout_before = rollout(&ns).await;
    let by = |parent: &DynamicObject| condition(parent, "Synced").expect("it is told")["message"].to_string();
    let parents = ns.widgets().list(&ListParams::default()).await.expect("they can be listed").items;
    for parent in &parents {
        let new = is_among(parent.metadata.uid.as_deref().unwrap_or_default(), 50);
        let revision = &rollout_before[if new { "revision" } else { "from" }];
        assert_eq!(by(parent), format!("\"by revision {}\"", revision.as_str().expect("it is told")));
    }

    // A host that starts takes nobody back.
    host.kill();
    let writes = ns.writes().len();
    let host = cluster.run_host_that("the rollout goes on");
    edit(&ns.widgets(), "w0", json!({"metadata": {"annotations": {"again": "1"}}})).await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_unwritten(&ns, writes);
    assert_eq!(of_new().await, half);
    assert_eq!(rollout(&ns).await["since"], rollout_before["since"]);

    // By hand: the former one is asked for again.
    push(&cluster, "mirror", &mirror(1));
    let back = eventually("it is withdrawn", async || {
        let rollout = rollout(&ns).await;
        (rollout["state"] == "RolledBack").then_some(rollout)
    })
    .await;
    assert_eq!(back["reason"], "Withdrawn");
    eventually("all are back", async || (of_new().await == 0).then_some(())).await;
    told(&ns.reconcilers(), "mirror", "Degraded", "False", "").await;

    // What was withdrawn can be tried again, and a person can end the steps.
    push(&cluster, "mirror", &mirror(2));
    eventually("the half goes over", async || (of_new().await == half).then_some(())).await;
    patch_reconciler(&cluster, &json!({"spec": {"rollout": {"strategy": "Immediate"}}}));
    eventually("all go over", async || (of_new().await == PARENTS).then_some(())).await;
    assert_eq!(rollout(&ns).await["state"], "Complete");
    // And what has been left is wanted back in a hurry: without a look, and without steps.
    patch_reconciler(&cluster, &json!({"spec": {"rollout": {"strategy": "Staged"}}}));
    push(&cluster, "mirror", &mirror(1));
    eventually("all are back", async || (of_new().await == 0).then_some(())).await;
    assert_eq!(rollout(&ns).await["state"], "Complete");
    host.terminate();
}

#[tokio::test]
async fn what_a_revision_would_change_is_told_and_one_that_deletes_much_is_not_let_in() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("previewed").await;
    for name in ["a", "b", "c"] {
        let reply = json!({"children": [config_map(name, "1")], "versioned": name == "a"});
        ns.widget(name, json!({"reply": reply})).await;
        synced(&ns.widgets(), name).await;
    }
    let first = get(&ns.reconcilers(), "mirror").await.expect("it is there").data["status"]["activeRevision"].clone();

    push(&cluster, "mirror", &mirror(2));
    let second = rolled(&ns, &first, "Complete").await;
    assert_eq!(second["preview"], "of 3 parents 1 changes: 1 ConfigMap updated, 0 errors");
    assert_eq!(second["from"], first);
    let told_so = events(&ns, "Previewed").await;
    assert!(told_so.iter().any(|note| note.ends_with("1 ConfigMap updated, 0 errors")), "{told_so:?}");
    told(&ns.reconcilers(), "mirror", "Deterministic", "True", "SameAnswer").await;

    // It would want nothing any more.
    let writes = ns.writes().len();
    patch_reconciler(&cluster, &json!({"spec": {"config": {"forget": true}}}));
    let message = told(&ns.reconcilers(), "mirror", "Degraded", "True", "RolloutGuarded").await;
    for part in ["it deletes children of 3 of the 3 parents", "maxLosingChildren is 10%", "3 ConfigMaps deleted", ALLOW]
    {
        assert!(message.contains(part), "{part}: {message}");
    }
    let object = get(&ns.reconcilers(), "mirror").await.expect("it is there");
    assert_eq!(object.data["status"]["activeRevision"], second["revision"]);
    for kind in ["Ready", "Loaded"] {
        assert_eq!(condition(&object, kind).expect("it is told")["status"], "True", "{kind}");
    }
    assert_eq!(events(&ns, "RolloutGuarded").await.len(), 1);
    // Nor after a restart.
    host.kill();
    let host = cluster.run_host();
    edit(&ns.widgets(), "a", json!({"metadata": {"annotations": {"again": "1"}}})).await;
    told(&ns.reconcilers(), "mirror", "Degraded", "True", "RolloutGuarded").await;
    ns.assert_quiet(Duration::from_secs(1)).await;
    assert_unwritten(&ns, writes);
    assert_eq!(events(&ns, "RolloutGuarded").await.len(), 1);

    // Somebody says that it is meant; each parent still asks for itself.
    let refused_revision = object.data["status"]["desiredRevision"].clone();
    patch_reconciler(&cluster, &json!({"metadata": {"annotations": {ALLOW: refused_revision}}}));
    refused(&ns.widgets(), "a", "PruneHeld").await;
    told(&ns.reconcilers(), "mirror", "Degraded", "False", "").await;

    // What fails for parents that were well is not let in either.
    patch_reconciler(&cluster, &json!({"spec": {"config": null, "rollout": {"preview": "Off"}}}));
    for name in ["a", "b", "c"] {
        synced(&ns.widgets(), name).await;
    }
    patch_reconciler(&cluster, &json!({"spec": {"limits": {"timeout": "100ms"}, "rollout": {"preview": "On"}}}));
    tokio::time::sleep(Duration::from_secs(1)).await;
    patch_reconciler(&cluster, &json!({"spec": {"config": {"busy": 100_000}}}));
    let message = told(&ns.reconcilers(), "mirror", "Degraded", "True", "RolloutGuarded").await;
    assert!(message.contains("it fails for 3 of the 3 parents") && message.contains("PluginDeadline"), "{message}");
    host.terminate();
}

#[tokio::test]
async fn pilothouse_preview_shows_what_would_change_and_changes_nothing() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("looked-at").await;
    for name in ["a", "b"] {
        let reply = json!({"children": [config_map(name, "1")], "versioned": name == "a"});
        ns.widget(name, json!({"reply": reply})).await;
        synced(&ns.widgets(), name).await;
    }
    host.terminate();
    let file = cluster.control_plane.data_dir().join("second.wasm");
    std::fs::write(&file, mirror(2)).expect("it can be written");
    let writes = ns.writes().len();
    let preview = |plugin: &std::path::Path, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
        command.args(["preview", "mirror"]).arg(plugin).args(arguments);
        let output = command.env("KUBECONFIG", cluster.control_plane.kubeconfig()).output().expect("it runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it is text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, same, errors) = preview(&component("mirror"), &[]);
    assert_eq!((code, errors.as_str()), (Some(0), ""), "{same}");
    assert!(same.ends_with(": of 2 parents 0 change: 0 errors\n"), "{same}");
    let (code, text, _) = preview(&file, &[]);
    assert_eq!(code, Some(2), "{text}");
    for part in [
        "Widget looked-at/a\nchange ConfigMap looked-at/a\n--- live\n+++ wanted\n",
        "-    t.example/version: the mirror, version 1\n+    t.example/version: the mirror, version 2\n",
        "PARENT       ACTION  KIND       CHILD\nlooked-at/a  change  ConfigMap  looked-at/a\n",
        ": of 2 parents 1 changes: 1 ConfigMap updated, 0 errors\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (code, json, _) = preview(&file, &["-o", "json"]);
    let json: Value = serde_json::from_str(&json).expect("it is JSON");
    assert_eq!((code, &json["seen"]), (Some(2), &json!(2)));
    assert_eq!(json["parents"][0]["children"][0]["action"], "change");
    let (code, _, errors) = preview(&component("myapp"), &[]);
    assert_eq!(code, Some(1));
    assert!(errors.contains("the plugin reconciles MyApp.v1.mygroup.example.com"), "{errors}");
    assert_eq!(ns.writes().len(), writes);
}
