//! What becomes of a swap: whether the revision serves, and how its parents follow.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{
    Api, Client, ResourceExt as _,
    api::DynamicObject,
    runtime::watcher::{self, Event as Watched},
};
use serde::Serialize;
use tokio::sync::watch;

use super::view::{Event, View};
use crate::{
    crd::{ClusterReconciler, ReconcilerStatus},
    object::{Kind, ObjectKey},
    watch::watch,
};

/// How long parents are left alone that change, so that what changes together is shown together, …
const SETTLE: Duration = Duration::from_millis(300);
/// … and how long at most.
const SHOWN_AFTER: Duration = Duration::from_secs(2);

/// The revision that is to serve.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    pub(super) revision: String,
    /// When its source was edited.
    pub(super) since: Instant,
}

/// How it stands with the revision that is to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Standing {
    Serves,
    Fails { reason: String, message: String },
}

/// Tells of each revision whether it serves, or why it does not.
pub(super) async fn reconciler(
    client: Client,
    name: String,
    watches: watcher::Config,
    mut expected: watch::Receiver<Option<Expected>>,
    view: View,
) {
    let watches = watches.fields(&format!("metadata.name={name}"));
    let mut events = pin!(watch(Api::<ClusterReconciler>::all(client), watches));
    let (mut status, mut told) = (None, None);
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(Watched::Apply(reconciler) | Watched::InitApply(reconciler))) => status = reconciler.status,
                Some(_) => {}
                None => return,
            },
            changed = expected.changed() => {
                if changed.is_err() {
                    return;
                }
                told = None;
            }
        }
        let Some(Expected { revision, since }) = expected.borrow().clone() else { continue };
        let standing = status.as_ref().and_then(|status| standing(status, &revision));
        if standing.is_none() || standing == told {
            continue;
        }
        match standing.clone() {
            Some(Standing::Serves) => view.show(&Event::Serving { revision, seconds: since.elapsed().as_secs_f64() }),
            Some(Standing::Fails { reason, message }) => view.show(&Event::Failing { reason, message }),
            None => {}
        }
        told = standing;
    }
}

/// None: that is not known yet.
fn standing(status: &ReconcilerStatus, revision: &str) -> Option<Standing> {
    // What it tells is about another one.
    if status.desired_revision.as_deref() != Some(revision) {
        return None;
    }
    let is = |kind: &str, value: &str| {
        status.conditions.iter().find(|condition| condition.type_ == kind && condition.status == value)
    };
    let begins = |condition: &&Condition| matches!(condition.reason.as_str(), "Listing" | "NotLoaded");
    let failing = is("Degraded", "True").or_else(|| is("Ready", "False").filter(|ready| !begins(ready)));
    if let Some(Condition { reason, message, .. }) = failing {
        return Some(Standing::Fails { reason: reason.clone(), message: message.clone() });
    }
    let serves = status.active_revision.as_deref() == Some(revision) && is("Ready", "True").is_some();
    serves.then_some(Standing::Serves)
}

/// A parent, as it says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Row {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// The conditions of these names; null if there is none.
    pub(super) synced: Option<String>,
    pub(super) ready: Option<String>,
    /// What there is to say about the one that is not True.
    pub(super) message: String,
}

/// Tells how the parents are, whenever some of them change.
pub(super) async fn parents(client: Client, kind: Kind, watches: watcher::Config, view: View) {
    let mut events = pin!(watch(kind.objects::<DynamicObject>(&client, None), watches));
    let mut rows: BTreeMap<ObjectKey, Row> = BTreeMap::new();
    let mut changed: BTreeSet<ObjectKey> = BTreeSet::new();
    let mut since = Instant::now();
    loop {
        let quiet = tokio::time::sleep(SETTLE.min(SHOWN_AFTER.saturating_sub(since.elapsed())));
        tokio::select! {
            event = events.next() => {
                let (key, row) = match event {
                    Some(Ok(Watched::Apply(parent) | Watched::InitApply(parent))) => (key(&parent), row(&parent)),
                    Some(Ok(Watched::Delete(parent))) => {
                        (key(&parent), Row { synced: None, ready: None, message: "gone".to_owned(), ..row(&parent) })
                    }
                    Some(_) => continue,
                    None => return,
                };
                if rows.get(&key) != Some(&row) {
                    if changed.is_empty() {
                        since = Instant::now();
                    }
                    rows.insert(key.clone(), row);
                    changed.insert(key);
                }
            }
            () = quiet, if !changed.is_empty() => {
                let parents = changed.iter().filter_map(|key| rows.get(key).cloned()).collect();
                view.show(&Event::Parents { kind: kind.api.kind.clone(), parents });
                rows.retain(|key, row| !changed.contains(key) || row.message != "gone");
                changed.clear();
            }
        }
    }
}

fn key(parent: &DynamicObject) -> ObjectKey {
    ObjectKey { namespace: parent.namespace(), name: parent.name_any() }
}

fn row(parent: &DynamicObject) -> Row {
    let conditions = parent.data["status"]["conditions"].as_array();
    let condition = |kind: &str| conditions?.iter().find(|condition| condition["type"] == kind);
    let text = |kind: &str, name: &str| condition(kind).and_then(|it| it[name].as_str()).map(str::to_owned);
    let (synced, ready) = (text("Synced", "status"), text("Ready", "status"));
    let about = if synced.as_deref().is_none_or(|synced| synced == "True") { "Ready" } else { "Synced" };
    let good = text(about, "status").is_none_or(|status| status == "True");
    let words = [text(about, "reason"), text(about, "message")].into_iter().flatten().filter(|word| !word.is_empty());
    let message = if good { String::new() } else { words.collect::<Vec<_>>().join(": ") };
    Row { namespace: parent.namespace(), name: parent.name_any(), synced, ready, message }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_revision_serves_or_fails_once_its_reconciler_says_so_of_it() {
        let status = |desired: &str, active: &str, conditions: &[(&str, &str, &str)]| {
            let conditions: Vec<_> = conditions
                .iter()
                .map(|(kind, status, reason)| {
                    json!({"type": kind, "status": status, "reason": reason, "message": "m",
                        "lastTransitionTime": "2026-01-01T00:00:00Z"})
                })
                .collect();
            let status = json!({"desiredRevision": desired, "activeRevision": active, "conditions": conditions});
            serde_json::from_value::<ReconcilerStatus>(status).unwrap()
        };
        let fails = |reason: &str| Some(Standing::Fails { reason: reason.to_owned(), message: "m".to_owned() });
        let ready = [("Ready", "True", "Ready"), ("Degraded", "False", "AsDesired")];
        assert_eq!(standing(&status("b", "b", &ready), "b"), Some(Standing::Serves));
        assert_eq!(standing(&status("a", "a", &ready), "b"), None);
        assert_eq!(standing(&status("b", "b", &[("Ready", "False", "Listing")]), "b"), None);
        assert_eq!(standing(&status("b", "b", &[("Ready", "False", "Forbidden")]), "b"), fails("Forbidden"));
        let degraded = [("Ready", "True", "Ready"), ("Degraded", "True", "KindMissing")];
        assert_eq!(standing(&status("b", "a", &degraded), "b"), fails("KindMissing"));
    }

    #[test]
    fn a_parent_says_what_is_not_as_it_should_be() {
        let parent = |conditions: serde_json::Value| {
            let parent = json!({"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "p", "namespace": "n"},
                "status": {"conditions": conditions}});
            row(&serde_json::from_value(parent).unwrap())
        };
        let good = parent(json!([{"type": "Synced", "status": "True"}, {"type": "Ready", "status": "True"}]));
        assert_eq!(
            (good.synced.as_deref(), good.ready.as_deref(), good.message.as_str()),
            (Some("True"), Some("True"), "")
        );
        let failing = parent(json!([
            {"type": "Synced", "status": "False", "reason": "PluginTrap", "message": "it crashed"},
            {"type": "Ready", "status": "False", "reason": "Why"},
        ]));
        assert_eq!(failing.message, "PluginTrap: it crashed");
        let new = parent(json!([]));
        assert_eq!((new.synced, new.ready, new.message.as_str()), (None, None, ""));
    }
}
