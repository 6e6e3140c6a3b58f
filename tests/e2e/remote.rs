//! Children that cannot have an owner reference, in another namespace than their parent or of cluster scope (`C61`).

use std::time::Duration;

use kube::api::{Api, DynamicObject, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::{Cluster, config_map, delete, edit, get, gone, our_finalizers, refused, synced, until};

fn priority_class(name: &str) -> Value {
    json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 7})
}

fn in_namespace(namespace: &str, mut object: Value) -> Value {
    object["metadata"]["namespace"] = namespace.into();
    object
}

async fn has_no_owner(api: &Api<DynamicObject>, name: &str) -> DynamicObject {
    let child = get(api, name).await.expect("it is there");
    assert_eq!(child.metadata.owner_references.clone().unwrap_or_default(), Vec::new());
    child
}

#[tokio::test]
async fn c61_children_elsewhere_have_no_owner_reference_survive_the_garbage_collector_and_go_with_their_parent() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("here").await;
    let there = cluster.namespace("there").await;
    let classes = ns.cluster_api("scheduling.k8s.io/v1", "PriorityClass");
    let children =
        json!([config_map("near", "1"), in_namespace("there", config_map("far", "1")), priority_class("wide")]);
    ns.widget("w", json!({"reply": {"children": children, "log": ["called"]}})).await;
    let parent = synced(&ns.widgets(), "w").await;
    assert_eq!(our_finalizers(&parent).len(), 1);
    let far = has_no_owner(&there.config_maps(), "far").await;
    let wide = has_no_owner(&classes, "wide").await;
    let near = get(&ns.config_maps(), "near").await.expect("it is there");
    assert_eq!(near.metadata.owner_references.unwrap_or_default().len(), 1);

    // The record was there before the children.
    let writes = ns.writes();
    let recorded = writes
        .iter()
        .position(|write| write.body["metadata"]["annotations"]["internal.pilothouse.dev/remote-children"].is_string());
    let recorded = &writes[recorded.expect("they are on record")];
    let made: Vec<_> = there.writes().into_iter().filter(|write| write.code == 201).collect();
    assert_eq!(made.len(), 1, "{made:#?}");
    assert!(recorded.at < made[0].at);

    // The garbage collector starts anew and sees nothing to collect.
    cluster.control_plane.stop_controller_manager().expect("it stops");
    cluster.control_plane.start_controller_manager().expect("it starts");
    tokio::time::sleep(Duration::from_secs(10)).await;
    let uid = |object: &DynamicObject| object.metadata.uid.clone();
    assert_eq!(uid(&has_no_owner(&there.config_maps(), "far").await), uid(&far));
    assert_eq!(uid(&has_no_owner(&classes, "wide").await), uid(&wide));

    // They are watched and healed like others.
    edit(&there.config_maps(), "far", json!({"data": {"key": "changed"}})).await;
    until(&there.config_maps(), "far", "healed", |child| child.data["data"]["key"] == "1").await;
    delete(&classes, "wide", PropagationPolicy::Background).await;
    until(&classes, "wide", "made again", |child| uid(child) != uid(&wide)).await;

    // Somebody copies a child with all its labels and annotations, another one forges them: neither is ever deleted.
    let copy = |name: &str| {
        let mut copy =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": "theirs"}});
        copy["metadata"]["labels"] = json!(far.metadata.labels);
        copy["metadata"]["annotations"] = json!(far.metadata.annotations);
        copy
    };
    there.create(copy("copy")).await;
    let mut forged = copy("forged");
    let uid_of_parent = parent.metadata.uid.clone().expect("it has one");
    forged["metadata"]["annotations"]["internal.pilothouse.dev/binding"] =
        format!("{uid_of_parent} ConfigMap there/forged").into();
    there.create(forged).await;

    // One is no longer wanted.
    let children = json!([in_namespace("there", config_map("far", "1"))]);
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": children}}})).await;
    gone(&classes, "wide").await;
    gone(&ns.config_maps(), "near").await;
    synced(&ns.widgets(), "w").await;

    // And they go with their parent, even if somebody holds one for a while.
    edit(&there.config_maps(), "far", json!({"metadata": {"finalizers": ["t.example/hold"]}})).await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    until(&there.config_maps(), "far", "being deleted", |child| child.metadata.deletion_timestamp.is_some()).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(get(&ns.widgets(), "w").await.is_some(), "the parent waits for it");
    edit(&there.config_maps(), "far", json!({"metadata": {"finalizers": null}})).await;
    gone(&there.config_maps(), "far").await;
    gone(&ns.widgets(), "w").await;
    for name in ["copy", "forged"] {
        assert!(get(&there.config_maps(), name).await.is_some(), "{name} stays");
    }
    let deletes: Vec<_> = there.writes().into_iter().filter(|write| write.verb == "delete").collect();
    assert!(
        deletes.iter().all(|delete| delete.name == "far" && delete.body["preconditions"]["uid"].is_string()),
        "{deletes:#?}"
    );
    host.terminate();
}

#[tokio::test]
async fn c61_with_orphan_propagation_they_stay() {
    let ns = Cluster::shared().namespace("orphan-here").await;
    let there = Cluster::shared().namespace("orphan-there").await;
    ns.widget("w", json!({"reply": {"children": [in_namespace("orphan-there", config_map("far", "1"))]}})).await;
    synced(&ns.widgets(), "w").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Orphan).await;
    gone(&ns.widgets(), "w").await;
    assert!(get(&there.config_maps(), "far").await.is_some());
}

#[tokio::test]
async fn c61_one_that_cleanup_asks_for_is_on_record_too() {
    let ns = Cluster::shared().namespace("cleanup-here").await;
    let there = Cluster::shared().namespace("cleanup-there").await;
    let late = in_namespace("cleanup-there", config_map("late", "1"));
    ns.widget("w", json!({"cleanup": {"children": [late], "waitingMs": 60000}})).await;
    synced(&ns.widgets(), "w").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    until(&there.config_maps(), "late", "made", |_| true).await;
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
    gone(&ns.widgets(), "w").await;
    gone(&there.config_maps(), "late").await;
}

#[tokio::test]
async fn a_child_that_is_to_outlive_its_parent_has_no_owner_and_is_never_deleted() {
    let ns = Cluster::shared().namespace("outlives").await;
    let far = Cluster::shared().namespace("outlives-far").await;
    let child = |name: &str, options: Value| json!({"object": config_map(name, "1"), "options": options});
    let mut elsewhere = child("far", json!({"deletionPolicy": "Orphan"}));
    elsewhere["object"]["metadata"]["namespace"] = json!("outlives-far");
    let stays = json!({"deletionPolicy": "Orphan"});
    let spec = |children: Vec<Value>| json!({"spec": {"reply": {"children": children, "log": ["called"]}}});
    let all = vec![
        child("stays", stays.clone()),
        child("dropped", stays.clone()),
        child("goes", json!({})),
        elsewhere.clone(),
    ];
    ns.widget("w", spec(all)["spec"].clone()).await;
    let parent = synced(&ns.widgets(), "w").await;
    for (api, name) in [(ns.config_maps(), "stays"), (ns.config_maps(), "dropped"), (far.config_maps(), "far")] {
        has_no_owner(&api, name).await;
    }
    let record = parent.metadata.annotations.iter().flatten().find(|(name, _)| name.ends_with("remote-children"));
    assert_eq!(record, None, "what is never deleted needs no proof");
    // It is kept as any other child is.
    edit(&ns.config_maps(), "stays", json!({"data": {"key": "drift"}})).await;
    until(&ns.config_maps(), "stays", "healed", |child| child.data["data"]["key"] == "1").await;
    // What is no longer wanted stays; and the policy can change both ways.
    edit(&ns.widgets(), "w", spec(vec![child("stays", json!({})), child("goes", stays.clone()), elsewhere.clone()]))
        .await;
    synced(&ns.widgets(), "w").await;
    until(&ns.config_maps(), "stays", "owned", |child| child.metadata.owner_references.iter().flatten().count() == 1)
        .await;
    has_no_owner(&ns.config_maps(), "goes").await;
    edit(&ns.widgets(), "w", spec(vec![child("stays", stays), child("goes", json!({})), elsewhere])).await;
    synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "w").await;
    gone(&ns.config_maps(), "goes").await;
    for (api, name) in [(ns.config_maps(), "stays"), (ns.config_maps(), "dropped"), (far.config_maps(), "far")] {
        assert!(get(&api, name).await.is_some(), "{name}");
    }
    let deletes = ns.writes().into_iter().chain(far.writes()).filter(|write| write.verb == "delete").count();
    assert_eq!(deletes, 0, "the garbage collector takes what is owned");
    // A later parent of that name takes it only if the plugin says so.
    let uid = get(&ns.config_maps(), "stays").await.expect("it is there").metadata.uid;
    let outlives = |adoption: &str| json!({"deletionPolicy": "Orphan", "adoptionPolicy": adoption});
    ns.widget("w", spec(vec![child("stays", outlives("Never"))])["spec"].clone()).await;
    refused(&ns.widgets(), "w", "NameCollision").await;
    edit(&ns.widgets(), "w", spec(vec![child("stays", outlives("IfUnowned"))])).await;
    synced(&ns.widgets(), "w").await;
    assert_eq!(has_no_owner(&ns.config_maps(), "stays").await.metadata.uid, uid);
}
