//! Whose turn it is: an edit before what is only looked at, no parent at the cost of others, and no more at once than is allowed.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream};
use serde_json::json;

use crate::{
    cluster::{Namespace, condition, config_map, edit, eventually, get, synced, until},
    field::{Stand, told},
    observability::Page,
};

/// The parents in whose turn the plugin logged this, in order.
fn turns(stand: &Stand, line: &str) -> Vec<String> {
    let (line, parent) = (format!("\"message\":\"{line}\""), format!("\"parent\":\"{}/", stand.ns.name));
    let log = stand.host.log_text();
    let lines = log.lines().filter(|text| text.contains(&line));
    lines.filter_map(|text| Some(text.split(&parent).nth(1)?.split('"').next()?.to_owned())).collect()
}

async fn sample(stand: &Stand, name: &str) -> f64 {
    Page(stand.host.metrics().await).get(name)
}

/// With a plugin of 50 ms a call it takes a while until all of a thousand parents were looked at, and nothing is to be done for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c45_a_restart_with_a_thousand_parents_writes_nothing_and_an_edit_overtakes_it() {
    let stand = Stand::start("c45-thousand", "mirror", None, &[]).await;
    let names: Vec<_> = (0..1000).map(|number| format!("w{number:03}")).collect();
    let spec = |name: &str| json!({"reply": {"children": [config_map(name, "1")], "log": ["called"]}});
    stream::iter(&names).for_each_concurrent(16, async |name| drop(stand.widget(name, spec(name)).await)).await;
    for name in &names {
        synced(&stand.ns.widgets(), name).await;
    }
    stand.ns.assert_quiet(Duration::from_secs(3)).await;
    let before = stand.ns.writes().len();

    let stand = stand
        .restart(async |ns| {
            let reconcilers = ns.reconcilers();
            let spec = json!({"config": {"busy": 50}, "limits": {"timeout": "30s"}, "rollout": {"preview": "Off"}});
            edit(&reconcilers, "c45-thousand", json!({"spec": spec})).await;
        })
        .await;
    // The last one in any order that there may be.
    let edited = eventually("one that has not had its turn", async || {
        let called: HashSet<_> = turns(&stand, "called").into_iter().collect();
        (!called.is_empty()).then(|| names.iter().rev().find(|name| !called.contains(*name)).cloned()).flatten()
    })
    .await;
    let reply = json!({"children": [config_map(&edited, "2")], "log": ["edited"]});
    edit(&stand.ns.widgets(), &edited, json!({"spec": {"reply": reply}})).await;
    eventually("the edit has its turn", async || (!turns(&stand, "edited").is_empty()).then_some(())).await;
    let overtaken = 1000 - turns(&stand, "called").into_iter().collect::<HashSet<_>>().len();
    assert!(overtaken > 900, "only {overtaken} come later");
    until(&stand.ns.config_maps(), &edited, "as edited", |child| child.data["data"]["key"] == "2").await;
    let mut seen = 0;
    while seen < names.len() - 1 {
        seen = eventually("the others have their turn, too", async || {
            let called: HashSet<_> = turns(&stand, "called").into_iter().filter(|name| *name != edited).collect();
            (called.len() > seen).then_some(called.len())
        })
        .await;
    }
    synced(&stand.ns.widgets(), &edited).await;
    stand.ns.assert_quiet(Duration::from_secs(3)).await;
    let writes = stand.ns.writes().split_off(before);
    let others: Vec<_> = writes.iter().filter(|write| write.name != edited).collect();
    assert!(others.is_empty(), "nothing is written for those that were in sync: {others:#?}");
    assert!(writes.len() <= 3, "a child and a status for the one that was edited: {writes:#?}");
}

/// A plugin that names its children otherwise each time sets itself off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_that_sets_itself_off_without_end_is_slowed_down_and_told_and_its_edits_are_not() {
    let stand = Stand::start("circuit", "mirror", None, &[]).await;
    let ns = &stand.ns;
    let both = || vec![config_map("a", "1"), config_map("b", "1")];
    stand.widget("calm", json!({"reply": {"children": [config_map("calm", "1")]}})).await;
    stand.widget("w", json!({"reply": {"children": both(), "restless": true, "log": ["called"]}})).await;
    let parent =
        until(&ns.widgets(), "w", "the circuit is open", |parent| condition(parent, "Responsive").is_some()).await;
    let responsive = condition(&parent, "Responsive").expect("it is there");
    assert_eq!((&responsive["status"], &responsive["reason"]), (&json!("False"), &json!("WatchCircuitOpen")));
    let message = responsive["message"].as_str().unwrap_or_default();
    assert!(message.contains("each 30 s at most"), "{message}");
    assert_eq!(sample(&stand, r#"pilothouse_open_circuits{reconciler="circuit"}"#).await, 1.0);
    let calls = turns(&stand, "called").len();
    assert!((100..=115).contains(&calls), "{calls} calls");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(turns(&stand, "called").len() <= calls + 1, "it is slow now");
    eventually("an Event tells it", async || (told(ns, "WatchCircuitOpen") > 0).then_some(())).await;
    // Nobody else is slow, and it is not itself when somebody edits it.
    let since = Instant::now();
    edit(&ns.widgets(), "calm", json!({"spec": {"reply": {"children": [config_map("calm", "2")]}}})).await;
    until(&ns.config_maps(), "calm", "as edited", |child| child.data["data"]["key"] == "2").await;
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": both(), "restless": false}}})).await;
    synced(&ns.widgets(), "w").await;
    for name in ["a", "b"] {
        until(&ns.config_maps(), name, "made", |_| true).await;
    }
    assert!(since.elapsed() < Duration::from_secs(15), "after {:?}", since.elapsed());
    let parent = get(&ns.widgets(), "w").await.expect("it is there");
    assert!(condition(&parent, "Responsive").is_some(), "it is held back for a while");
    assert!(condition(&get(&ns.widgets(), "calm").await.expect("it is there"), "Responsive").is_none());
    // Another host knows nothing of it, and there is nothing left to tell.
    let stand = stand.restart(async |_: &Namespace<'_>| {}).await;
    let ns = &stand.ns;
    until(&ns.widgets(), "w", "it is over", |parent| condition(parent, "Responsive").is_none()).await;
    synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(told(ns, "WatchCircuitOpen"), 1, "it is told once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_parents_are_reconciled_at_once_than_the_reconciler_allows() {
    let stand = Stand::start("concurrency", "mirror", None, &["--max-concurrent-reconciles=16"]).await;
    let ns = &stand.ns;
    let reconcilers = ns.reconcilers();
    let active = async || sample(&stand, r#"controller_runtime_active_workers{controller="concurrency"}"#).await;
    for number in 0..40 {
        stand.widget(&format!("w{number}"), json!({"reply": {"busy": 300, "next": {"afterMs": 100}}})).await;
    }
    // Each is at it for a while, and others wait.
    for most in [1, 5, 2] {
        edit(&reconcilers, "concurrency", json!({"spec": {"limits": {"concurrency": most, "timeout": "1s"}}})).await;
        let most = f64::from(most);
        let allowed = r#"controller_runtime_max_concurrent_reconciles{controller="concurrency"}"#;
        eventually("it holds", async || (sample(&stand, allowed).await == most).then_some(())).await;
        eventually("those that ran have ended", async || (active().await <= most).then_some(())).await;
        let (mut seen, begun) = (0.0, Instant::now());
        while begun.elapsed() < Duration::from_secs(3) || seen < most && begun.elapsed() < Duration::from_secs(30) {
            seen = f64::max(seen, active().await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(seen, most, "as many as are allowed");
    }
}
