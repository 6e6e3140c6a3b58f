//! The user's handles on a parent: pause it, have it reconciled now, give up its cleanup. Each leaves an Event that says who asked.

use std::time::Duration;

use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PropagationPolicy},
};
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, Namespace, condition, config_map, delete, edit, eventually, get, gone, our_finalizers, refused, synced,
    until,
};

/// Annotates as a person does who is called `who`.
async fn annotate(api: &Api<DynamicObject>, name: &str, who: &str, annotation: &str, value: Value) {
    let params = PatchParams { field_manager: Some(who.to_owned()), ..PatchParams::default() };
    let patch = json!({"metadata": {"annotations": {format!("pilothouse.dev/{annotation}"): value}}});
    api.patch(name, &params, &Patch::Merge(&patch)).await.expect("it can be annotated");
}

/// The notes of the Events of this reason.
fn events(ns: &Namespace<'_>, reason: &str) -> Vec<String> {
    let events =
        ns.requests().into_iter().filter(|request| request.resource == "events" && request.body["reason"] == reason);
    events.map(|event| event.body["note"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test]
async fn a_paused_parent_is_left_alone_also_while_it_is_deleted() {
    let ns = Cluster::shared().namespace("paused").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")], "log": ["called"]}})).await;
    synced(&ns.widgets(), "w").await;
    annotate(&ns.widgets(), "w", "ada", "paused", json!("true")).await;
    let message = refused(&ns.widgets(), "w", "ReconcilePaused").await;
    assert!(message.starts_with("paused by \"ada\" with annotation pilothouse.dev/paused"), "{message}");
    eventually("it is told", async || (events(&ns, "ReconcilePaused").len() == 1).then_some(())).await;
    let (writes, calls) = (ns.writes().len(), ns.calls("w", "called"));
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("c", "2")]}}})).await;
    edit(&ns.config_maps(), "c", json!({"data": {"key": "drift"}})).await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!((ns.writes().len(), ns.calls("w", "called")), (writes, calls), "{:#?}", ns.writes());
    assert_eq!(our_finalizers(&get(&ns.widgets(), "w").await.expect("it waits")).len(), 1);
    assert_eq!(events(&ns, "ReconcilePaused").len(), 1);
    // What is new and paused is not even begun.
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Widget",
        "metadata": {"name": "new", "annotations": {"pilothouse.dev/paused": "true"}}, "spec": {"reply": {"children": [config_map("n", "1")]}}}))
        .await;
    refused(&ns.widgets(), "new", "ReconcilePaused").await;
    assert!(our_finalizers(&get(&ns.widgets(), "new").await.expect("it is there")).is_empty());
    annotate(&ns.widgets(), "new", "ada", "paused", Value::Null).await;
    synced(&ns.widgets(), "new").await;
    annotate(&ns.widgets(), "w", "ada", "paused", Value::Null).await;
    gone(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn a_requested_reconcile_ends_the_wait_and_is_echoed() {
    let ns = Cluster::shared().namespace("requested").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")], "log": ["called"]}})).await;
    synced(&ns.widgets(), "w").await;
    let calls = ns.calls("w", "called");
    annotate(&ns.widgets(), "w", "ada", "reconcile-requested-at", json!("2026-01-01T00:00:00Z")).await;
    until(&ns.widgets(), "w", "the request is echoed", |parent| {
        condition(parent, "Synced").is_some_and(|synced| {
            synced["message"].as_str().is_some_and(|message| {
                message.ends_with(
                    "; reconciled as requested by annotation pilothouse.dev/reconcile-requested-at=2026-01-01T00:00:00Z",
                )
            })
        })
    })
    .await;
    assert!(ns.calls("w", "called") > calls);
    eventually("it is told", async || (events(&ns, "ReconcileRequestHandled").len() == 1).then_some(())).await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    edit(&ns.widgets(), "w", json!({"metadata": {"labels": {"other": "1"}}})).await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(events(&ns, "ReconcileRequestHandled").len(), 1, "once for each request");
}

#[tokio::test]
async fn an_abandoned_cleanup_lets_the_parent_go_and_says_who_wanted_it() {
    let ns = Cluster::shared().namespace("abandoned").await;
    let cleanup = json!({"failure": {"terminal": "the bucket is gone"}, "log": ["cleanup"]});
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}, "cleanup": cleanup})).await;
    synced(&ns.widgets(), "w").await;
    // It only matters when the parent is deleted.
    annotate(&ns.widgets(), "w", "ada", "abandon-cleanup", json!("false")).await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    refused(&ns.widgets(), "w", "PluginTerminal").await;
    let calls = ns.calls("w", "cleanup");
    annotate(&ns.widgets(), "w", "ada", "abandon-cleanup", json!("true")).await;
    gone(&ns.widgets(), "w").await;
    assert_eq!(ns.calls("w", "cleanup"), calls, "the plugin is not asked any more");
    let told = events(&ns, "CleanupAbandoned");
    assert!(told.len() == 1 && told[0].starts_with("\"ada\" abandoned cleanup"), "{told:?}");
}

#[tokio::test]
async fn an_event_that_comes_again_is_counted_and_one_that_was_deleted_is_made_anew() {
    let ns = Cluster::shared().namespace("series").await;
    ns.widget("w", json!({"reply": {"children": []}})).await;
    synced(&ns.widgets(), "w").await;
    let pause = async || {
        annotate(&ns.widgets(), "w", "ada", "paused", json!("true")).await;
        refused(&ns.widgets(), "w", "ReconcilePaused").await;
        annotate(&ns.widgets(), "w", "ada", "paused", json!(null)).await;
        synced(&ns.widgets(), "w").await;
    };
    let api = ns.api("events.k8s.io/v1", "Event");
    let told = async |count: u64| {
        eventually(&format!("one Event, told {count} times"), async || {
            let mut events = api.list(&ListParams::default()).await.ok()?.items;
            events.retain(|event| event.data["reason"] == "ReconcilePaused");
            let [event] = <[DynamicObject; 1]>::try_from(events).ok()?;
            (event.data["series"]["count"].as_u64().unwrap_or(1) == count).then_some(event.metadata)
        })
        .await
    };
    pause().await;
    let first = told(1).await;
    pause().await;
    pause().await;
    let again = told(3).await;
    assert_eq!(first.uid, again.uid);
    api.delete(&first.name.expect("it has one"), &DeleteParams::default()).await.expect("it can be deleted");
    pause().await;
    assert_ne!(told(1).await.uid, first.uid);
}
