//! A cluster that comes back from a backup of its objects: all of them have new UIDs, and refer to the old ones (`C65`).

use std::time::Duration;

use kube::{
    Api,
    api::{DynamicObject, PostParams, PropagationPolicy},
};
use serde_json::{Value, json};

use crate::cluster::{Cluster, config_map, delete, edit, eventually, get, gone, our_finalizers, refused, synced};

/// The object as a backup has it.
async fn save(api: &Api<DynamicObject>, name: &str, managed_fields: bool) -> DynamicObject {
    let mut object = get(api, name).await.expect("it is there");
    let metadata = &mut object.metadata;
    (metadata.resource_version, metadata.uid, metadata.creation_timestamp, metadata.generation) =
        (None, None, None, None);
    if !managed_fields {
        metadata.managed_fields = None;
    }
    object
}

/// Makes it go at once, whoever holds it.
async fn wipe(api: &Api<DynamicObject>, name: &str) {
    edit(api, name, json!({"metadata": {"finalizers": null}})).await;
    delete(api, name, PropagationPolicy::Background).await;
    gone(api, name).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c65_children_from_a_backup_are_tied_to_their_parent_again_and_keep_their_uid() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let (ns, far) = (cluster.namespace("c65").await, cluster.namespace("c65-far").await);
    let classes = ns.cluster_api("scheduling.k8s.io/v1", "PriorityClass");
    let mut elsewhere = config_map("far", "1");
    elsewhere["metadata"]["namespace"] = json!("c65-far");
    let class = |name: &str| json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 7});
    let stays = json!({"object": config_map("stays", "1"), "options": {"deletionPolicy": "Orphan"}});
    let children = json!([config_map("near", "1"), config_map("bare", "1"), elsewhere, class("c65")]);
    ns.widget("w", json!({"reply": {"children": children, "log": ["called"]}})).await;
    ns.widget("loose", json!({"reply": {"children": [stays]}})).await;
    synced(&ns.widgets(), "w").await;
    synced(&ns.widgets(), "loose").await;

    // Most backups have the field managers, `kubectl get -o yaml` does not.
    let objects = [
        (ns.widgets(), "w", true),
        (ns.config_maps(), "near", true),
        (ns.config_maps(), "bare", false),
        (far.config_maps(), "far", false),
        (classes.clone(), "c65", true),
    ];
    let mut saved = Vec::new();
    for (api, name, managed_fields) in &objects {
        saved.push(save(api, name, *managed_fields).await);
    }
    host.terminate();
    cluster.control_plane.stop_controller_manager().expect("it stops");
    for (api, name, _) in &objects {
        wipe(api, name).await;
    }
    let mut restored = Vec::new();
    for ((api, ..), object) in objects.iter().zip(&saved) {
        restored.push(api.create(&PostParams::default(), object).await.expect("it can be restored"));
    }
    assert_eq!(our_finalizers(&restored[0]).len(), 1, "it comes with its finalizer, and without a status");
    let parent = restored[0].metadata.uid.clone().expect("it has one");
    // An object of another parent that is no more; the garbage collector has it.
    let mut others: DynamicObject = saved[1].clone();
    others.metadata.name = Some("others".to_owned());
    others.metadata.owner_references.as_mut().expect("it has one")[0].name = "other".to_owned();
    let others = ns.config_maps().create(&PostParams::default(), &others).await.expect("it can be made");

    let host = cluster.run_host();
    let called = || host.log_text().matches("\"message\":\"called\"").count();
    eventually("the plugin is asked", async || (called() > 0).then_some(())).await;
    synced(&ns.widgets(), "w").await;
    for ((api, name, _), before) in objects.iter().zip(&restored).skip(1) {
        let child = get(api, name).await.expect("it is there");
        assert_eq!(child.metadata.uid, before.metadata.uid, "{name} is the same object");
        let owners: Vec<_> = child.metadata.owner_references.iter().flatten().map(|owner| owner.uid.clone()).collect();
        let bound = child.metadata.labels.iter().flatten().any(|(_, value)| *value == parent);
        assert!(owners == [parent.clone()] || (owners.is_empty() && bound), "{name}: {owners:?}");
    }
    ns.assert_quiet(Duration::from_secs(2)).await;

    // The garbage collector finds nothing to collect but what is nobody's.
    cluster.control_plane.start_controller_manager().expect("it starts");
    gone(&ns.config_maps(), "others").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    for ((api, name, _), before) in objects.iter().zip(&restored) {
        let object = get(api, name).await.expect("it stays");
        assert_eq!(object.metadata.uid, before.metadata.uid, "{name}");
    }
    assert_eq!(get(&ns.config_maps(), "stays").await.map(|stays| stays.metadata.uid.is_some()), Some(true));

    // They are its children in every way.
    edit(&far.config_maps(), "far", json!({"data": {"key": "drift"}})).await;
    eventually("it is healed", async || {
        get(&far.config_maps(), "far").await.filter(|far| far.data["data"]["key"] == "1").map(drop)
    })
    .await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "w").await;
    for (api, name, _) in &objects {
        gone(api, name).await;
    }
    let wrong: Vec<_> = ns.writes().into_iter().filter(|write| write.name == "others").collect();
    assert!(wrong.is_empty(), "{others:?}: {wrong:#?}");
    host.terminate();
}

/// What is bound to a parent that lives is not taken, whatever a record says that somebody has copied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c65_a_copied_record_takes_no_child_of_a_parent_that_lives() {
    let ns = Cluster::shared().namespace("c65-copied").await;
    let far = Cluster::shared().namespace("c65-copied-far").await;
    let mut elsewhere = config_map("far", "1");
    elsewhere["metadata"]["namespace"] = json!("c65-copied-far");
    let spec = json!({"reply": {"children": [elsewhere]}});
    ns.widget("w", spec.clone()).await;
    let parent = synced(&ns.widgets(), "w").await;
    let before = get(&far.config_maps(), "far").await.expect("it is there");
    let metadata: Value = json!({"name": "copy", "annotations": parent.metadata.annotations});
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": metadata, "spec": spec})).await;
    refused(&ns.widgets(), "copy", "NameCollision").await;
    delete(&ns.widgets(), "copy", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "copy").await;
    let after = get(&far.config_maps(), "far").await.expect("it stays");
    assert_eq!(after.metadata.resource_version, before.metadata.resource_version);
}
