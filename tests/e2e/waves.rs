//! Children that come one wave after the other, and go the way back.

use std::time::Duration;

use kube::api::{Api, DynamicObject, Patch, PatchParams, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Namespace, config_map, delete, edit, get, gone, our_finalizers, synced, until};

async fn namespace(name: &str) -> Namespace<'static> {
    Cluster::shared().namespace(name).await
}

/// One that no node takes: it is ready when the test says so.
fn pod(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"nodeSelector": {"t.example/node": "none"}, "containers": [{"name": "main", "image": "example.org/none"}]}})
}

fn in_wave(wave: u32, object: Value) -> Value {
    json!({"object": object, "options": {"wave": wave}})
}

async fn edit_status(api: &Api<DynamicObject>, name: &str, patch: Value) {
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("it can be edited");
}

fn message(parent: &DynamicObject, kind: &str) -> String {
    let conditions = parent.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let condition = conditions.iter().find(|condition| condition["type"] == kind);
    condition.map(|condition| condition["message"].as_str().unwrap_or_default().to_owned()).unwrap_or_default()
}

#[tokio::test]
async fn a_wave_is_made_when_the_one_before_is_ready_and_deleted_before_it() {
    let ns = namespace("waves").await;
    let (maps, pods) = (ns.config_maps(), ns.api("v1", "Pod"));
    let children = json!([
        in_wave(2, config_map("third", "1")),
        in_wave(1, pod("second")),
        config_map("first", "1"),
        {"object": config_map("beside", "1"), "options": {"wave": 1}},
    ]);
    ns.widget("w", json!({"reply": {"children": children}})).await;
    until(&ns.widgets(), "w", "it waits for the pod", |parent| {
        message(parent, "Ready") == "2 of 4 children are ready; waiting for Pod waves/second"
    })
    .await;
    let parent = synced(&ns.widgets(), "w").await;
    assert_eq!(our_finalizers(&parent).len(), 1, "or nobody could delete them in order");
    assert!(get(&maps, "third").await.is_none());
    ns.assert_quiet(Duration::from_secs(2)).await;

    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    edit_status(&pods, "second", ready).await;
    until(&ns.widgets(), "w", "all are ready", |parent| message(parent, "Ready") == "4 of 4 children are ready").await;
    let third = get(&maps, "third").await.expect("it is there");

    // One that is no longer ready holds back changes of later waves, and what is no longer wanted stays meanwhile.
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    edit_status(&pods, "second", unready).await;
    let children = json!([in_wave(2, config_map("third", "2")), in_wave(1, pod("second")), config_map("first", "2")]);
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": children}}})).await;
    until(&maps, "first", "the first wave is changed", |map| map.data["data"]["key"] == "2").await;
    until(&ns.widgets(), "w", "it waits", |parent| message(parent, "Ready").contains("waiting for Pod")).await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(
        get(&maps, "third").await.map(|map| map.metadata.resource_version),
        Some(third.metadata.resource_version)
    );
    assert!(get(&maps, "beside").await.is_some());
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    edit_status(&pods, "second", ready).await;
    until(&maps, "third", "the last wave is changed", |map| map.data["data"]["key"] == "2").await;
    gone(&maps, "beside").await;
    ns.assert_quiet(Duration::from_secs(2)).await;

    // The way back: what is held in the last wave holds up those before.
    edit(&maps, "third", json!({"metadata": {"finalizers": ["t.example/hold"]}})).await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    until(&maps, "third", "it is being deleted", |map| map.metadata.deletion_timestamp.is_some()).await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert!(get(&pods, "second").await.is_some_and(|pod| pod.metadata.deletion_timestamp.is_none()));
    edit(&maps, "third", json!({"metadata": {"finalizers": null}})).await;
    gone(&ns.widgets(), "w").await;
    gone(&pods, "second").await;
    gone(&maps, "first").await;
    let deletes: Vec<_> = ns
        .writes()
        .into_iter()
        .filter(|write| write.verb == "delete" && write.code == 200)
        .map(|write| write.name)
        .collect();
    let place = |name: &str| deletes.iter().position(|deleted| deleted == name);
    assert!(place("third") < place("second") && place("second").is_some(), "{deletes:?}");
    assert_eq!(place("first"), None, "it is garbage: {deletes:?}");
}

#[tokio::test]
async fn a_plugin_may_say_what_is_ready() {
    let ns = namespace("waves-told").await;
    let told = |readiness: &str| {
        json!([
            {"object": config_map("a", "1"), "options": {"readiness": readiness}},
            in_wave(1, config_map("b", "1")),
        ])
    };
    ns.widget("w", json!({"reply": {"children": told("NotReady")}})).await;
    until(&ns.widgets(), "w", "it waits", |parent| {
        message(parent, "Ready") == "0 of 2 children are ready; waiting for ConfigMap waves-told/a"
    })
    .await;
    assert!(get(&ns.config_maps(), "b").await.is_none());
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": told("Ready")}}})).await;
    until(&ns.widgets(), "w", "all are ready", |parent| message(parent, "Ready") == "2 of 2 children are ready").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
}
