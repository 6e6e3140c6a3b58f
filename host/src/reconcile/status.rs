//! The status step: what the parent says of itself, written only when it changes. Also taken when a step before it failed.
//!
//! The status belongs to the plugin; the host merges the conditions by type, owns `Synced`, `observedGeneration` and
//! every `lastTransitionTime`, and derives `Ready` from the children unless the plugin decides it.

use jiff::Timestamp;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    apply::is_status,
    projection::{Digest, digest, digest_object},
};
use crate::{
    lookup,
    object::Object,
    plugin::{Condition, ConditionStatus},
    state::{LastStatus, Report},
};

/// Why `Responsive` is False, and the Event that says so.
pub(super) const CIRCUIT_OPEN: &str = "WatchCircuitOpen";
/// What that means.
pub(super) const CIRCUIT_OPEN_MESSAGE: &str = "its children are written again and again, so for some minutes a change of them wakes it \
     each 30 s at most; its own changes still do at once; find out who else writes them (kubectl get … -o yaml \
     --show-managed-fields), or whether the plugin names or makes them otherwise each time";
const RESPONSIVE: &str = "Responsive";

/// What to tell.
pub(super) struct Publish<'a> {
    /// What the plugin tells; none when it gave no answer.
    pub(super) report: Option<&'a Report>,
    /// What the host tells: `Synced`, `Ready` if it is known, and `Responsive` if it is not.
    pub(super) conditions: Vec<Condition>,
    /// The field manager of this parent.
    pub(super) manager: &'a str,
    /// Whether children were written: then it is news which revision did that, also if all else is as it was told.
    pub(super) made_changes: bool,
}

/// What `Synced` says of the revision that it is about.
const BY_REVISION: &str = "by revision ";

/// The message of `Synced` where all is well: which revision the parent is as it is by, and what else there is to tell.
pub(super) fn success_message(revision: &str, more: &str) -> String {
    let stop = if more.is_empty() { "" } else { "; " };
    format!("{BY_REVISION}{revision}{stop}{more}")
}

/// The rest of such a message.
fn without_revision(message: &str) -> &str {
    let Some(rest) = message.strip_prefix(BY_REVISION) else { return message };
    rest.split_once("; ").map_or("", |(_, more)| more)
}

/// Why the status was not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The parent is not JSON as we know it.
    #[error("failed to read the parent")]
    Read(#[source] serde_json::Error),
    /// The parent has changed in between, and wakes us again.
    #[error("the parent was changed at the same time")]
    Conflict(#[source] kube::Error),
    /// Anything else.
    #[error("failed to write the status")]
    Request(#[source] kube::Error),
}

/// Writes the status if it differs from what the API server would keep of it. None: nothing to write.
pub(super) async fn publish(
    api: &Api<Object>,
    parent: &Object,
    publish: &Publish<'_>,
    last: &mut Option<LastStatus>,
) -> Result<Option<Object>, Error> {
    let live = live_status(parent).map_err(Error::Read)?;
    let owned = owned_status(parent, publish.manager);
    let wanted = wanted(&live, &owned, publish, parent.generation(), Timestamp::now());
    let changes = merge_diff(&live, &wanted);
    let lasting = |status: &Map<String, Value>| match publish.made_changes {
        true => status.clone(),
        // A new revision of which nothing is different is no news, or it would write to each parent (`C54`).
        false => without_revisions(status),
    };
    if lasting(&live) == lasting(&wanted) {
        return Ok(None);
    }
    let sent = digest_without_times(&lasting(&wanted));
    let kept = digest_object(&live);
    // What the schema drops or rewrites differs for ever; sending it again would not help.
    let known = last.as_ref().is_some_and(|last| last.sent == sent && last.kept == kept);
    if changes.is_empty() || known {
        return Ok(None);
    }
    let body = json!({
        "metadata": {"uid": parent.uid(), "resourceVersion": parent.resource_version()},
        "status": changes,
    });
    let params = PatchParams { field_manager: Some(publish.manager.to_owned()), ..PatchParams::default() };
    match api.patch_status(parent.name(), &params, &Patch::Merge(&body)).await {
        Ok(answer) => {
            let live = live_status(&answer).map_err(Error::Read)?;
            let dropped = dropped(&wanted, &live);
            *last = Some(LastStatus { sent, kept: digest_object(&live), dropped });
            Ok(Some(answer))
        }
        // Gone: there is nobody left to tell.
        Err(error) if lookup::is_absent(&error, parent.name()) => Ok(None),
        Err(error) if is_status(&error, 409) => Err(Error::Conflict(error)),
        Err(error) => Err(Error::Request(error)),
    }
}

fn live_status(parent: &Object) -> Result<Map<String, Value>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Parent {
        status: Option<Map<String, Value>>,
    }
    Ok(serde_json::from_str::<Parent>(parent.json())?.status.unwrap_or_default())
}

/// The `fieldsV1` of what we have written into the status before.
fn owned_status(parent: &Object, manager: &str) -> Map<String, Value> {
    let fields = parent.owned_by(manager, "Update", "status");
    let fields: Option<Map<String, Value>> = fields.and_then(|fields| serde_json::from_str(fields.get()).ok());
    match fields.and_then(|mut fields| fields.remove("f:status")) {
        Some(Value::Object(status)) => status,
        _ => Map::new(),
    }
}

/// The whole status as it should be.
fn wanted(
    live: &Map<String, Value>,
    owned: &Map<String, Value>,
    publish: &Publish<'_>,
    generation: i64,
    now: Timestamp,
) -> Map<String, Value> {
    let mut status = live.clone();
    if let Some(told) = publish.report.and_then(|report| report.status.as_ref()) {
        // What the plugin wrote before and no longer does goes; what others wrote stays.
        status.retain(|name, _| {
            !owned.contains_key(&format!("f:{name}")) || name == "conditions" || name == "observedGeneration"
        });
        status.extend(
            told.iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.clone(), value.clone())),
        );
    }
    let owned_conditions = owned.get("f:conditions").and_then(Value::as_object);
    let conditions = conditions(live, owned_conditions, publish, generation, now);
    status.insert("conditions".to_owned(), conditions.into());
    if generation > 0 {
        status.insert("observedGeneration".to_owned(), generation.into());
    }
    status
}

fn conditions(
    live: &Map<String, Value>,
    owned: Option<&Map<String, Value>>,
    publish: &Publish<'_>,
    generation: i64,
    now: Timestamp,
) -> Vec<Value> {
    let told = publish.report.map(|report| report.conditions.as_slice());
    let told_by_plugin = |kind: &str| told.unwrap_or_default().iter().any(|condition| condition.kind == kind);
    let by_host = publish.conditions.iter().filter(|condition| !told_by_plugin(&condition.kind));
    let news: Vec<_> = told.unwrap_or_default().iter().chain(by_host).collect();

    let before = live.get("conditions").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let mut merged: Vec<_> = before
        .iter()
        .filter(|condition| {
            let text = |name| condition.get(name).and_then(Value::as_str).unwrap_or_default();
            let kind = text("type");
            // The plugin's own, which it no longer tells.
            let dropped = told.is_some()
                && owned.is_some_and(|owned| owned.contains_key(&format!("k:{{\"type\":{}}}", Value::from(kind))));
            // Ours, which is there only while it holds.
            let over = kind == RESPONSIVE && text("reason") == CIRCUIT_OPEN;
            !(dropped || over) || news.iter().any(|new| new.kind == kind) || kind == "Synced" || kind == "Ready"
        })
        .cloned()
        .collect();
    for new in news {
        let place = merged.iter().position(|condition| condition.get("type").is_some_and(|kind| *kind == new.kind));
        let since = place
            .map(|place| &merged[place])
            .filter(|old| old.get("status").is_some_and(|status| *status == new.status.as_str()));
        let since = since.and_then(|old| old.get("lastTransitionTime").cloned()).unwrap_or_else(|| seconds(now).into());
        let mut condition = json!({
            "type": new.kind,
            "status": new.status.as_str(),
            "reason": new.reason,
            "message": new.message,
            "lastTransitionTime": since,
        });
        if generation > 0 {
            condition["observedGeneration"] = generation.into();
        }
        match place {
            Some(place) => merged[place] = condition,
            None => merged.push(condition),
        }
    }
    merged
}

/// A time as the Kubernetes API writes it.
pub(super) fn seconds(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// The merge patch (RFC 7386) that makes `to` of `from`.
fn merge_diff(from: &Map<String, Value>, to: &Map<String, Value>) -> Map<String, Value> {
    let mut patch = Map::new();
    for (name, old) in from {
        match (old, to.get(name)) {
            (_, None) => drop(patch.insert(name.clone(), Value::Null)),
            (Value::Object(old), Some(Value::Object(new))) => {
                let below = merge_diff(old, new);
                if !below.is_empty() {
                    patch.insert(name.clone(), below.into());
                }
            }
            (old, Some(new)) if old != new => drop(patch.insert(name.clone(), new.clone())),
            _ => {}
        }
    }
    patch
        .extend(to.iter().filter(|(name, _)| !from.contains_key(*name)).map(|(name, new)| (name.clone(), new.clone())));
    patch
}

/// The fields of `sent` that are not in `kept`, by path: the API server prunes what the schema of a kind does not have (`C34`).
fn dropped(sent: &Map<String, Value>, kept: &Map<String, Value>) -> Vec<String> {
    fn below(sent: &Value, kept: &Value, path: &str, dropped: &mut Vec<String>) {
        match (sent, kept) {
            (Value::Object(sent), Value::Object(kept)) => {
                for (name, sent) in sent.iter().filter(|(_, sent)| !sent.is_null()) {
                    let path = format!("{path}.{name}");
                    match kept.get(name) {
                        Some(kept) => below(sent, kept, &path, dropped),
                        None if dropped.contains(&path) => {}
                        None => dropped.push(path),
                    }
                }
            }
            (Value::Array(sent), Value::Array(kept)) => {
                let path = format!("{path}[]");
                sent.iter().zip(kept).for_each(|(sent, kept)| below(sent, kept, &path, dropped));
            }
            _ => {}
        }
    }
    let mut dropped = Vec::new();
    below(&sent.clone().into(), &kept.clone().into(), "status", &mut dropped);
    dropped
}

fn without_revisions(status: &Map<String, Value>) -> Map<String, Value> {
    let mut status = status.clone();
    let conditions = status.get_mut("conditions").and_then(Value::as_array_mut).into_iter().flatten();
    for condition in conditions.filter(|condition| condition["type"] == "Synced") {
        let message = condition["message"].as_str().map(without_revision).unwrap_or_default().to_owned();
        if let Some(condition) = condition.as_object_mut() {
            condition.insert("message".to_owned(), message.into());
        }
    }
    status
}

fn digest_without_times(status: &Map<String, Value>) -> Digest {
    let mut status = Value::from(status.clone());
    let conditions = status.get_mut("conditions").and_then(Value::as_array_mut);
    for condition in conditions.into_iter().flatten().filter_map(Value::as_object_mut) {
        condition.remove("lastTransitionTime");
    }
    digest(&status)
}

/// The condition of that type on the parent, as (status, reason).
pub(super) fn live_condition(parent: &Object, kind: &str) -> Option<(String, String)> {
    let status = live_status(parent).ok()?;
    let condition = status
        .get("conditions")?
        .as_array()?
        .iter()
        .find(|condition| condition.get("type").is_some_and(|t| t == kind))?;
    let text = |name| condition.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    Some((text("status"), text("reason")))
}

/// Since when the condition of that type on the parent is not True; none if it is, or is not told.
pub(super) fn unmet_since(parent: &Object, kind: &str) -> Option<Timestamp> {
    let status = live_status(parent).ok()?;
    let mut conditions = status.get("conditions")?.as_array()?.iter();
    let condition = conditions.find(|condition| condition["type"] == kind && condition["status"] != "True")?;
    condition["lastTransitionTime"].as_str()?.parse().ok()
}

/// Whether `Synced` tells this already.
pub(super) fn tells(parent: &Object, message: &str) -> bool {
    let Ok(status) = live_status(parent) else { return false };
    let mut conditions = status.get("conditions").and_then(Value::as_array).into_iter().flatten();
    conditions.any(|condition| {
        condition.get("type").is_some_and(|kind| kind == "Synced")
            && condition["message"].as_str().is_some_and(|told| without_revision(told) == message)
    })
}

/// `Ready`, from the children: `ready` of `wanted` are, and this is the first that is not.
pub(super) fn ready(wanted: usize, ready: usize, waiting_for: Option<String>) -> Condition {
    let (status, reason, message) = match waiting_for {
        None => (ConditionStatus::True, "Available", format!("{ready} of {wanted} children are ready")),
        Some(child) => (
            ConditionStatus::False,
            "Unavailable",
            format!("{ready} of {wanted} children are ready; waiting for {child}"),
        ),
    };
    Condition { kind: "Ready".to_owned(), status, reason: reason.to_owned(), message }
}

/// `Responsive`, while the circuit of the parent is open (see [`crate::queue`]).
pub(super) fn unresponsive() -> Condition {
    Condition {
        kind: RESPONSIVE.to_owned(),
        status: ConditionStatus::False,
        reason: CIRCUIT_OPEN.to_owned(),
        message: CIRCUIT_OPEN_MESSAGE.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANAGER: &str = "pilothouse/1";

    fn object(value: Value) -> Map<String, Value> {
        let Value::Object(object) = value else { panic!("{value}") };
        object
    }

    fn condition(kind: &str, status: ConditionStatus, reason: &str) -> Condition {
        Condition { kind: kind.to_owned(), status, reason: reason.to_owned(), message: String::new() }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn told(status: Option<Value>, conditions: Vec<Condition>) -> Report {
        Report { status: status.map(object), conditions, events: Vec::new() }
    }

    fn want(live: &Value, owned: &Value, report: Option<&Report>, host: Vec<Condition>, now: i64) -> Value {
        let publish = Publish { report, conditions: host, manager: MANAGER, made_changes: false };
        wanted(&object(live.clone()), &object(owned.clone()), &publish, 3, at(now)).into()
    }

    #[test]
    fn a_revision_of_which_nothing_is_different_is_no_news() {
        let status = |message: &str| {
            object(
                json!({"n": 1, "conditions": [{"type": "Ready", "message": "by revision a"}, {"type": "Synced", "message": message}]}),
            )
        };
        let (a, b) = (success_message("a", ""), success_message("b", ""));
        assert_eq!(without_revisions(&status(&a)), without_revisions(&status(&b)));
        // As hosts of before had it.
        assert_eq!(without_revisions(&status(&a)), status(""));
        let handled = success_message("b", "reconciled as requested");
        assert_eq!(handled, "by revision b; reconciled as requested");
        assert_eq!(without_revisions(&status(&handled)), status("reconciled as requested"));
        assert_eq!(without_revisions(&status("revision b: it crashed")), status("revision b: it crashed"));
    }

    #[test]
    fn since_when_a_condition_is_unmet_is_on_the_parent() {
        let parent = json!({"metadata": {"name": "w"}, "status": {"conditions": [
            {"type": "Synced", "status": "False", "lastTransitionTime": "1970-01-01T00:00:07Z"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:00:07Z"}]}});
        let parent = Object::from_json(&parent.to_string()).unwrap();
        assert_eq!(unmet_since(&parent, "Synced"), Some(at(7)));
        assert_eq!((unmet_since(&parent, "Ready"), unmet_since(&parent, "Other")), (None, None));
    }

    #[test]
    fn c33_a_transition_time_moves_only_with_the_status() {
        let report = told(Some(json!({"n": 1})), vec![condition("Db", ConditionStatus::True, "Up")]);
        let first = want(&json!({}), &json!({}), Some(&report), Vec::new(), 100);
        assert_eq!(first["conditions"][0]["lastTransitionTime"], "1970-01-01T00:01:40Z");
        assert_eq!(first["observedGeneration"], 3);
        let again = want(&first, &json!({}), Some(&report), Vec::new(), 200);
        assert_eq!(again, first);
        assert!(merge_diff(&object(first.clone()), &object(again)).is_empty());
        let report = told(Some(json!({"n": 1})), vec![condition("Db", ConditionStatus::False, "Down")]);
        let changed = want(&first, &json!({}), Some(&report), Vec::new(), 300);
        assert_eq!(changed["conditions"][0]["lastTransitionTime"], "1970-01-01T00:05:00Z");
    }

    #[test]
    fn conditions_and_keys_of_others_stay_and_our_dropped_ones_go() {
        let live = json!({
            "theirs": 1, "ours": 2, "kept": {"a": 1, "b": 2},
            "conditions": [{"type": "Theirs", "status": "True"}, {"type": "Ours", "status": "True"}],
        });
        let owned = json!({"f:ours": {}, "f:kept": {}, "f:conditions": {"k:{\"type\":\"Ours\"}": {".": {}}}});
        let report = told(Some(json!({"kept": {"b": 3}})), Vec::new());
        let wanted = want(&live, &owned, Some(&report), Vec::new(), 1);
        assert_eq!(
            wanted,
            json!({"theirs": 1, "kept": {"b": 3}, "observedGeneration": 3,
            "conditions": [{"type": "Theirs", "status": "True"}]})
        );
        let patch = merge_diff(&object(live.clone()), &object(wanted));
        assert_eq!(patch["ours"], Value::Null);
        assert_eq!(patch["kept"], json!({"a": null, "b": 3}));
        // Without an answer nothing of the plugin's is taken away.
        let failed = want(&live, &owned, None, vec![condition("Synced", ConditionStatus::False, "PluginTrap")], 1);
        assert_eq!((&failed["ours"], failed["conditions"].as_array().unwrap().len()), (&json!(2), 3));
    }

    #[test]
    fn an_open_circuit_is_told_as_long_as_it_is_open_also_where_the_plugin_fails() {
        let report = told(None, Vec::new());
        let open = want(&json!({}), &json!({}), Some(&report), vec![unresponsive()], 100);
        assert_eq!(
            (&open["conditions"][0]["type"], &open["conditions"][0]["status"]),
            (&json!("Responsive"), &json!("False"))
        );
        assert_eq!(want(&open, &json!({}), None, vec![unresponsive()], 200), open);
        for report in [None, Some(&report)] {
            assert_eq!(want(&open, &json!({}), report, Vec::new(), 200)["conditions"], json!([]));
        }
        // One of this name that is not ours is left alone.
        let theirs = json!({"conditions": [{"type": "Responsive", "status": "False", "reason": "Slow"}]});
        assert_eq!(want(&theirs, &json!({}), None, Vec::new(), 200)["conditions"], theirs["conditions"]);
    }

    #[test]
    fn c34_what_the_schema_does_not_keep_is_found_by_path() {
        let sent =
            json!({"n": 1, "deep": {"a": 1, "b": null}, "conditions": [{"type": "A", "x": 1}, {"type": "B", "x": 2}]});
        let dropped = |kept: Value| dropped(&object(sent.clone()), &object(kept));
        assert_eq!(dropped(sent.clone()), Vec::<String>::new());
        assert_eq!(dropped(json!({})), ["status.n", "status.deep", "status.conditions"]);
        let kept = json!({"n": 2, "deep": {}, "conditions": [{"type": "A"}, {"type": "B"}], "theirs": 1});
        assert_eq!(dropped(kept), ["status.deep.a", "status.conditions[].x"]);
    }

    #[test]
    fn the_plugin_may_decide_ready() {
        let report = told(None, vec![condition("Ready", ConditionStatus::False, "Migrating")]);
        let host = vec![condition("Synced", ConditionStatus::True, "ReconcileSuccess"), ready(1, 1, None)];
        let wanted = want(&json!({}), &json!({}), Some(&report), host, 1);
        let conditions = wanted["conditions"].as_array().unwrap();
        assert_eq!(conditions.len(), 2);
        assert_eq!((&conditions[0]["type"], &conditions[0]["reason"]), (&json!("Ready"), &json!("Migrating")));
    }
}
