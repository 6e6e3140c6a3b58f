//! What the project was founded on, row by row: idempotent convergence and finalizers.

use std::time::Duration;

use kube::api::{DeleteParams, ListParams, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, Namespace, condition, config_map, delete, edit, eventually, get, gone, our_finalizers, refused, synced,
    until,
};

async fn namespace(name: &str) -> Namespace<'static> {
    Cluster::shared().namespace(name).await
}

/// Waits until as many replicas are available as the parent's status says.
async fn available(ns: &Namespace<'_>, name: &str, replicas: i64) {
    until(&ns.my_apps(), name, "availableReplicas", |parent| parent.data["status"]["availableReplicas"] == replicas)
        .await;
}

#[tokio::test]
async fn seed_check_differentiate_act_converges_and_is_repeatable() {
    let ns = namespace("converges").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 3, "config": {"a": "1"}})).await;
    available(&ns, "web", 3).await;
    synced(&ns.my_apps(), "web").await;
    ns.assert_quiet(Duration::from_secs(3)).await;
    let before = ns.writes().len();
    // Asked again, with nothing to do: an annotation of somebody wakes the parent.
    for round in 0..5 {
        edit(&ns.my_apps(), "web", json!({"metadata": {"annotations": {"round": round.to_string()}}})).await;
    }
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(ns.writes().len(), before, "{:#?}", ns.writes().split_off(before));
}

#[tokio::test]
async fn seed_a_created_parent_costs_one_finalizer_patch_one_write_a_child_and_status_writes_that_change_something() {
    let ns = namespace("exact").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 3, "config": {"a": "1"}})).await;
    available(&ns, "web", 3).await;
    ns.assert_quiet(Duration::from_secs(60)).await;
    let writes = ns.writes();
    let count = |what: &str| writes.iter().filter(|write| write.what() == what).count();
    assert_eq!(count("patch myapps"), 1, "{writes:#?}");
    assert_eq!(count("patch deployments"), 1, "{writes:#?}");
    assert_eq!(count("patch configmaps"), 1, "{writes:#?}");
    let statuses: Vec<_> = writes.iter().filter(|write| write.what() == "patch myapps/status").collect();
    assert_eq!(statuses.len() + 3, writes.len(), "{writes:#?}");
    for pair in statuses.windows(2) {
        assert_ne!(pair[0].body["status"], pair[1].body["status"], "a status was written twice");
    }
    assert!(statuses.iter().all(|status| status.code == 200 && status.body["status"] != json!({})), "{statuses:#?}");
}

#[tokio::test]
async fn seed_no_already_exists_loop_and_updates_are_handled() {
    let ns = namespace("updates").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 1})).await;
    available(&ns, "web", 1).await;
    edit(&ns.my_apps(), "web", json!({"spec": {"image": "nginx:2"}})).await;
    let image = |deployment: &kube::api::DynamicObject| {
        deployment.data["spec"]["template"]["spec"]["containers"][0]["image"].clone()
    };
    until(&ns.deployments(), "web", "the new image", |deployment| image(deployment) == "nginx:2").await;
    synced(&ns.my_apps(), "web").await;
    assert!(ns.writes().iter().all(|write| write.code < 300), "{:#?}", ns.writes());
}

#[tokio::test]
async fn seed_nothing_is_clobbered_an_autoscaler_and_a_label_stay() {
    let ns = namespace("clobber").await;
    ns.my_app("web", json!({"image": "nginx:1"})).await;
    available(&ns, "web", 1).await;
    ns.cluster.kubectl(&["--namespace=clobber", "scale", "deployment/web", "--replicas=4"]);
    ns.cluster.kubectl(&["--namespace=clobber", "label", "deployment/web", "team=blue"]);
    available(&ns, "web", 4).await;
    edit(&ns.my_apps(), "web", json!({"spec": {"image": "nginx:2"}})).await;
    let deployment = until(&ns.deployments(), "web", "the new image", |deployment| {
        deployment.data["spec"]["template"]["spec"]["containers"][0]["image"] == "nginx:2"
    })
    .await;
    assert_eq!(deployment.data["spec"]["replicas"], 4);
    assert_eq!(deployment.metadata.labels.unwrap_or_default().get("team").map(String::as_str), Some("blue"));
    let applies = ns.writes().iter().filter(|write| write.what() == "patch deployments").count();
    assert_eq!(applies, 2, "one to create, one for the new image: {:#?}", ns.writes());
}

#[tokio::test]
async fn seed_a_field_of_ours_is_healed() {
    let ns = namespace("healed").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "ours")]}})).await;
    synced(&ns.widgets(), "w").await;
    edit(&ns.config_maps(), "c", json!({"data": {"key": "changed", "other": "theirs"}})).await;
    let child = until(&ns.config_maps(), "c", "healed", |child| child.data["data"]["key"] == "ours").await;
    assert_eq!(child.data["data"]["other"], "theirs");
    edit(&ns.config_maps(), "c", json!({"data": {"key": null}})).await;
    until(&ns.config_maps(), "c", "healed", |child| child.data["data"]["key"] == "ours").await;
    edit(&ns.config_maps(), "c", json!({"metadata": {"ownerReferences": null}})).await;
    until(&ns.config_maps(), "c", "owned again", |child| child.metadata.owner_references.is_some()).await;
    ns.assert_quiet(Duration::from_secs(2)).await;
}

#[tokio::test]
async fn seed_children_have_a_controller_owner_reference_and_are_garbage_collected() {
    let ns = namespace("owned").await;
    let parent = ns.my_app("web", json!({"image": "nginx:1", "config": {"a": "1"}})).await;
    available(&ns, "web", 1).await;
    for child in [get(&ns.deployments(), "web").await, get(&ns.config_maps(), "web-config").await] {
        let owners = child.expect("it is there").metadata.owner_references.unwrap_or_default();
        assert_eq!(owners.len(), 1);
        assert_eq!((owners[0].kind.as_str(), Some(&owners[0].uid)), ("MyApp", parent.metadata.uid.as_ref()));
        assert_eq!((owners[0].controller, owners[0].block_owner_deletion), (Some(true), Some(true)));
    }
    delete(&ns.my_apps(), "web", PropagationPolicy::Background).await;
    gone(&ns.my_apps(), "web").await;
    gone(&ns.deployments(), "web").await;
    gone(&ns.config_maps(), "web-config").await;
    let deletes = ns.writes().iter().filter(|write| write.verb == "delete").count();
    assert_eq!(deletes, 0, "the garbage collector does it");
}

#[tokio::test]
async fn seed_a_child_no_longer_wanted_is_pruned_by_uid() {
    let ns = namespace("pruned").await;
    ns.my_app("web", json!({"image": "nginx:1", "config": {"a": "1"}})).await;
    available(&ns, "web", 1).await;
    edit(&ns.my_apps(), "web", json!({"spec": {"config": null}})).await;
    gone(&ns.config_maps(), "web-config").await;
    let deletes: Vec<_> = ns.writes().into_iter().filter(|write| write.verb == "delete").collect();
    assert_eq!(deletes.len(), 1, "{deletes:#?}");
    assert!(deletes[0].body["preconditions"]["uid"].is_string(), "{deletes:#?}");
    assert!(get(&ns.deployments(), "web").await.is_some());
}

#[tokio::test]
async fn seed_the_finalizer_is_unique_added_first_removed_last_and_others_are_respected() {
    let ns = namespace("finalizer").await;
    let mut parent = json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": "w"},
        "spec": {"reply": {"children": [config_map("c", "1")]}, "cleanup": {"waitingMs": 1000, "log": ["cleanup"]}}});
    parent["metadata"]["finalizers"] = json!(["t.example/before"]);
    ns.create(parent).await;
    let parent = synced(&ns.widgets(), "w").await;
    let ours = our_finalizers(&parent);
    assert_eq!(ours.len(), 1, "{ours:?}");
    assert!(ours[0].starts_with("pilothouse.dev/c-mirror-"), "{ours:?}");
    assert_eq!(parent.metadata.finalizers, Some(vec!["t.example/before".to_owned(), ours[0].clone()]));
    let writes = ns.writes();
    assert_eq!(writes[0].what(), "patch widgets", "the finalizer comes first: {writes:#?}");

    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    until(&ns.widgets(), "w", "being cleaned up", |parent| {
        condition(parent, "Ready").is_some_and(|ready| ready["reason"] == "Deleting")
    })
    .await;
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
    let parent = until(&ns.widgets(), "w", "released", |parent| our_finalizers(parent).is_empty()).await;
    assert_eq!(parent.metadata.finalizers, Some(vec!["t.example/before".to_owned()]));
    assert!(ns.calls("w", "cleanup") >= 2);
    let last = ns.writes().pop().expect("there were writes");
    assert_eq!(last.what(), "patch widgets", "our finalizer is removed last");
    edit(&ns.widgets(), "w", json!({"metadata": {"finalizers": null}})).await;
    gone(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn seed_a_failed_cleanup_keeps_the_finalizer_and_is_retried_with_backoff() {
    let ns = namespace("backoff").await;
    ns.widget("w", json!({"cleanup": {"failure": {"retry": "the database is away"}, "log": ["cleanup"]}})).await;
    synced(&ns.widgets(), "w").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    let message = refused(&ns.widgets(), "w", "PluginRetry").await;
    assert!(message.contains("the database is away"), "{message}");
    tokio::time::sleep(Duration::from_secs(8)).await;
    let tries = ns.calls("w", "cleanup");
    // After 0, 0.5, 1.5, 3.5 and 7.5 s, each wait up to a quarter longer; and once for each change of the parent by us.
    assert!((3..=7).contains(&tries), "{tries} tries in 8 s");
    assert_eq!(our_finalizers(&get(&ns.widgets(), "w").await.expect("it stays")).len(), 1);
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": {"failure": null}}})).await;
    gone(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn seed_not_found_is_success_on_delete() {
    let ns = namespace("notfound").await;
    // Cleanup wants no children, and others remove them at the same moment.
    let children: Vec<_> = (0..20).map(|n| config_map(&format!("c{n}"), "1")).collect();
    ns.widget("w", json!({"reply": {"children": children}, "cleanup": {"children": []}})).await;
    synced(&ns.widgets(), "w").await;
    let child_api = ns.config_maps();
    let params = DeleteParams::default();
    let others = futures::future::join_all((0..20).map(|n| {
        let (child_api, params) = (&child_api, &params);
        async move { drop(child_api.delete(&format!("c{n}"), params).await) }
    }));
    let widgets = ns.widgets();
    tokio::join!(delete(&widgets, "w", PropagationPolicy::Background), others);
    gone(&ns.widgets(), "w").await;
    assert!(
        ns.config_maps()
            .list(&ListParams::default().labels("internal.pilothouse.dev/reconciler"))
            .await
            .unwrap()
            .items
            .is_empty()
    );
    let failed: Vec<_> =
        ns.writes().into_iter().filter(|write| write.code >= 400 && !matches!(write.code, 404 | 409)).collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[tokio::test]
async fn seed_the_four_outcomes_done_requeue_requeue_after_and_error() {
    let ns = namespace("outcomes").await;
    let spec = |reply: Value| json!({"reply": reply});
    ns.widget("done", spec(json!({"log": ["called"]}))).await;
    ns.widget("requeue", spec(json!({"log": ["called"], "next": "immediately"}))).await;
    ns.widget("after", spec(json!({"log": ["called"], "next": {"afterMs": 2000}}))).await;
    ns.widget("error", spec(json!({"log": ["called"], "failure": {"retry": "not yet"}}))).await;
    ns.widget("terminal", spec(json!({"log": ["called"], "failure": {"terminal": "never"}}))).await;
    for name in ["done", "requeue", "after"] {
        synced(&ns.widgets(), name).await;
    }
    refused(&ns.widgets(), "error", "PluginRetry").await;
    refused(&ns.widgets(), "terminal", "PluginTerminal").await;
    tokio::time::sleep(Duration::from_secs(9)).await;
    let calls = |name| ns.calls(name, "called");
    // A second time at most, if the watch shows our own status before the answer to its write is there.
    assert!((1..=2).contains(&calls("done")), "{}", calls("done"));
    assert!((4..=6).contains(&calls("after")), "every 2 s for 9 s and more: {}", calls("after"));
    assert!((4..=7).contains(&calls("requeue")), "through the rate limiter: {}", calls("requeue"));
    assert!((4..=7).contains(&calls("error")), "with backoff: {}", calls("error"));
    assert!((1..=2).contains(&calls("terminal")), "{}", calls("terminal"));
    edit(&ns.widgets(), "terminal", json!({"spec": {"reply": {"failure": null}}})).await;
    synced(&ns.widgets(), "terminal").await;
}

#[tokio::test]
async fn seed_reads_come_from_the_cache_and_writes_go_out_directly() {
    let ns = namespace("cached").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "0")]}})).await;
    synced(&ns.widgets(), "w").await;
    // Faster than the watches: what was written must be seen by the next pass, or a child would be written twice.
    for round in 1..=30 {
        let spec = json!({"spec": {"reply": {"children": [config_map("c", &round.to_string())]}}});
        edit(&ns.widgets(), "w", spec).await;
    }
    until(&ns.config_maps(), "c", "the last value", |child| child.data["data"]["key"] == "30").await;
    synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    let requests = ns.requests();
    let reads: Vec<_> = requests.iter().filter(|request| request.verb == "get" || request.verb == "list").collect();
    // A conflict with the user's own edits is the one reason to read.
    let conflicts = requests.iter().filter(|request| matches!(request.code, 409 | 422)).count();
    assert!(reads.len() <= conflicts, "{reads:#?}");
    let creates = requests.iter().filter(|request| request.what() == "patch configmaps" && request.code == 201).count();
    assert_eq!(creates, 1, "{requests:#?}");
    let applies = requests.iter().filter(|request| request.what() == "patch configmaps").count();
    assert!(applies <= 31, "{applies} applies of 31 values");
}

#[tokio::test]
async fn seed_the_status_subresource_is_written_only_when_it_changes() {
    let ns = namespace("status").await;
    ns.widget(
        "w",
        json!({"reply": {"status": {"phase": "up", "nested": {"a": 1, "b": 2}}, "log": ["called"],
        "conditions": [{"type": "Db", "status": "True", "reason": "Up"}]}}),
    )
    .await;
    let parent = synced(&ns.widgets(), "w").await;
    assert_eq!(parent.data["status"]["nested"], json!({"a": 1, "b": 2}));
    let since = condition(&parent, "Db").expect("it is told")["lastTransitionTime"].clone();
    let before = ns.writes().len();
    for round in 0..3 {
        edit(&ns.widgets(), "w", json!({"metadata": {"labels": {"round": round.to_string()}}})).await;
    }
    eventually("the plugin is called again", async || (ns.calls("w", "called") > 1).then_some(())).await;
    ns.assert_quiet(Duration::from_secs(1)).await;
    assert_eq!(ns.writes().len(), before, "{:#?}", ns.writes());

    // What the plugin no longer tells goes; what others told stays.
    ns.cluster.kubectl(&[
        "--namespace=status",
        "patch",
        "widget",
        "w",
        "--subresource=status",
        "--type=merge",
        "-p",
        r#"{"status":{"theirs":1}}"#,
    ]);
    let spec = json!({"spec": {"reply": {"status": {"phase": null, "nested": {"a": null}}}}});
    edit(&ns.widgets(), "w", spec).await;
    let parent =
        until(&ns.widgets(), "w", "the new status", |parent| parent.data["status"]["nested"] == json!({"b": 2})).await;
    assert_eq!((&parent.data["status"]["theirs"], parent.data["status"].get("phase")), (&json!(1), None));
    assert_eq!(condition(&parent, "Db").expect("it is told")["lastTransitionTime"], since);
    let generation = parent.metadata.generation.expect("a custom resource has one");
    let parent = synced(&ns.widgets(), "w").await;
    assert_eq!(parent.metadata.generation, Some(generation), "a status is no spec");
}

#[tokio::test]
async fn seed_owns_a_change_of_a_child_wakes_its_parent() {
    let ns = namespace("owns").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 2, "config": {"a": "1"}})).await;
    available(&ns, "web", 2).await;
    let before = get(&ns.config_maps(), "web-config").await.expect("it is there").metadata.uid;
    delete(&ns.config_maps(), "web-config", PropagationPolicy::Background).await;
    until(&ns.config_maps(), "web-config", "made again", |child| child.metadata.uid != before).await;
    edit(&ns.my_apps(), "web", json!({"spec": {"replicas": 3}})).await;
    available(&ns, "web", 3).await;
}

#[tokio::test]
async fn seed_my_app_has_a_deployment_and_tells_its_available_replicas() {
    let ns = namespace("myapp").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 3, "config": {"greeting": "hello"}})).await;
    available(&ns, "web", 3).await;
    let deployment = get(&ns.deployments(), "web").await.expect("it is there");
    assert_eq!(deployment.data["spec"]["replicas"], 3);
    let config = get(&ns.config_maps(), "web-config").await.expect("it is there");
    assert_eq!(config.data["data"], json!({"greeting": "hello"}));
    let parent = synced(&ns.my_apps(), "web").await;
    for kind in ["Ready", "Synced", "Available"] {
        assert_eq!(
            condition(&parent, kind).map(|condition| condition["status"].clone()),
            Some(json!("True")),
            "{kind}"
        );
    }
    let template = deployment.data["spec"]["template"]["metadata"].clone();
    edit(&ns.my_apps(), "web", json!({"spec": {"config": {"greeting": "bonjour"}}})).await;
    until(&ns.deployments(), "web", "its pods roll", |deployment| {
        deployment.data["spec"]["template"]["metadata"] != template
    })
    .await;
    // Not while they roll.
    eventually("the columns say that it is ready", async || {
        let columns = ns.cluster.kubectl(&["--namespace=myapp", "get", "myapp", "web", "--no-headers"]);
        (columns.contains("nginx:1") && columns.contains("True")).then_some(())
    })
    .await;
}
