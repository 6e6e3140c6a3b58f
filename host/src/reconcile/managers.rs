//! Changes to `metadata.managedFields`: who else is taken to own what is ours, and in which version of its kind. Pure; `apply` writes them.
//!
//! A field that we no longer send goes only if nobody else owns it. Two kinds of others stand in the way: a manager that wrote the
//! object before us and never will again (its fields become ours: [`fold`]), and entries that only repeat ours ([`release`]).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry};
use serde_json::{Map, Value};

use super::fields;
use crate::object::{BEFORE_FIRST_APPLY, FIELD_MANAGER_PREFIX, Object};

/// The entries once those of `legacy` managers, and what other managers of ours have applied, belong to `manager`. None: nothing to do.
///
/// Also entries of another version of the kind: most fields have the same names there, and the name of a field that this one does not
/// have harms nobody.
pub(super) fn fold(
    entries: &[ManagedFieldsEntry],
    manager: &str,
    api_version: &str,
    legacy: &[String],
) -> Option<Vec<ManagedFieldsEntry>> {
    let is_legacy = |entry: &ManagedFieldsEntry| {
        let name = entry.manager.as_deref().unwrap_or_default();
        let ours_before = name.starts_with(FIELD_MANAGER_PREFIX) && is(entry, "Apply");
        of_object(entry) && name != manager && (ours_before || legacy.iter().any(|legacy| legacy == name))
    };
    let (before, mut entries): (Vec<_>, Vec<_>) = entries.iter().cloned().partition(is_legacy);
    let newest = before.iter().max_by_key(|entry| entry.time.clone().map(|time| time.0))?.clone();
    let place = entries.iter().position(|entry| is_own(entry, manager) && is(entry, "Apply"));
    let place = place.unwrap_or_else(|| {
        entries.push(ManagedFieldsEntry {
            manager: Some(manager.to_owned()),
            operation: Some("Apply".to_owned()),
            api_version: Some(api_version.to_owned()),
            fields_v1: Some(FieldsV1(Map::new().into())),
            ..newest
        });
        entries.len() - 1
    });
    let ours = before.iter().fold(fields_of(&entries[place]), |ours, entry| fields::union(&ours, &fields_of(entry)));
    entries[place].fields_v1 = Some(FieldsV1(ours));
    Some(entries)
}

/// The entries once `before-first-apply` no longer owns what `manager` has applied, and `manager` owns nothing else: what it has patched
/// it has applied, too, and defaults within that are nobody's. None: it is so.
pub(super) fn release(entries: &[ManagedFieldsEntry], manager: &str) -> Option<Vec<ManagedFieldsEntry>> {
    let ours = entries.iter().find(|entry| is_own(entry, manager) && is(entry, "Apply"))?;
    let owned = fields_of(ours);
    let left = |entry: &ManagedFieldsEntry| match () {
        () if !is(entry, "Update") => Some(entry.clone()),
        () if is_own(entry, manager) => None,
        () if is_own(entry, BEFORE_FIRST_APPLY) => {
            let left = fields::difference(&fields_of(entry), &owned);
            (!fields::is_empty(&left)).then(|| ManagedFieldsEntry { fields_v1: Some(FieldsV1(left)), ..entry.clone() })
        }
        () => Some(entry.clone()),
    };
    let rest: Vec<_> = entries.iter().filter_map(left).collect();
    (rest != entries).then_some(rest)
}

/// The entries once those of versions that are no longer served are of `api_version`: while there is one, whoever it belongs to, the API
/// server answers every apply of a custom kind with 500. None: there is none.
///
/// Most fields have the same names in both, and the name of a field that the new one does not have harms nobody.
pub(super) fn renew(
    entries: &[ManagedFieldsEntry],
    dropped: &[String],
    api_version: &str,
) -> Option<Vec<ManagedFieldsEntry>> {
    let is_dropped = |entry: &ManagedFieldsEntry| entry.api_version.as_ref().is_some_and(|it| dropped.contains(it));
    let (stale, mut entries): (Vec<_>, Vec<_>) = entries.iter().cloned().partition(is_dropped);
    if stale.is_empty() {
        return None;
    }
    for stale in stale {
        let renewed = ManagedFieldsEntry { api_version: Some(api_version.to_owned()), ..stale };
        // By all else the API server takes two entries for one.
        let id = |entry: &ManagedFieldsEntry| {
            let ManagedFieldsEntry { manager, operation, subresource, api_version, .. } = entry.clone();
            (manager, operation, subresource, api_version)
        };
        match entries.iter_mut().find(|known| id(known) == id(&renewed)) {
            Some(known) => known.fields_v1 = Some(FieldsV1(fields::union(&fields_of(known), &fields_of(&renewed)))),
            None => entries.push(renewed),
        }
    }
    Some(entries)
}

/// Whether there is something to [`fold`].
pub(super) fn has_legacy(live: &Object, manager: &str, legacy: &[String]) -> bool {
    live.has_older_apply_than(manager) || legacy.iter().any(|legacy| live.has_manager(legacy))
}

/// Whether there is something to [`release`].
pub(super) fn has_repeats(live: &Object, manager: &str) -> bool {
    let fields = |manager, operation| -> Option<Value> {
        let fields = live.owned_by(manager, operation, "")?;
        serde_json::from_str(fields.get()).ok()
    };
    let before = fields(BEFORE_FIRST_APPLY, "Update");
    let overlaps = |ours: Value| before.is_some_and(|before| fields::overlaps(&before, &ours));
    live.owned_by(manager, "Update", "").is_some() || fields(manager, "Apply").is_some_and(overlaps)
}

fn fields_of(entry: &ManagedFieldsEntry) -> Value {
    entry.fields_v1.as_ref().map_or_else(|| Map::new().into(), |fields| fields.0.clone())
}

fn is(entry: &ManagedFieldsEntry, operation: &str) -> bool {
    entry.operation.as_deref() == Some(operation)
}

/// Not one of a subresource, such as the status.
fn of_object(entry: &ManagedFieldsEntry) -> bool {
    entry.subresource.as_deref().unwrap_or_default().is_empty()
}

fn is_own(entry: &ManagedFieldsEntry, manager: &str) -> bool {
    of_object(entry) && entry.manager.as_deref() == Some(manager)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OURS: &str = "pilothouse/1";

    fn entry(manager: &str, operation: &str, fields: Value) -> ManagedFieldsEntry {
        let entry = json!({"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsType": "FieldsV1",
            "fieldsV1": fields, "time": "2026-01-01T00:00:00Z"});
        serde_json::from_value(entry).unwrap()
    }

    fn of_status(mut entry: ManagedFieldsEntry) -> ManagedFieldsEntry {
        entry.subresource = Some("status".to_owned());
        entry
    }

    #[test]
    fn c26_listed_managers_are_folded_into_ours_and_others_left_alone() {
        let legacy = ["old".to_owned()];
        let theirs = entry("kubectl", "Update", json!({"f:data": {"f:t": {}}}));
        let status = of_status(entry("old", "Update", json!({"f:status": {}})));
        let old = [
            entry("old", "Update", json!({"f:data": {".": {}, "f:a": {}}})),
            entry("old", "Apply", json!({"f:data": {"f:b": {}}})),
        ];
        let entries = [theirs.clone(), status.clone(), old[0].clone(), old[1].clone()];
        let folded = fold(&entries, OURS, "v1", &legacy).unwrap();
        let ours = entry(OURS, "Apply", json!({"f:data": {".": {}, "f:a": {}, "f:b": {}}}));
        assert_eq!(folded, [theirs, status, ours.clone()]);
        assert_eq!(fold(&folded, OURS, "v1", &legacy), None, "once");
        assert_eq!(fold(&entries, OURS, "v1", &[]), None);
        let of_v2 = fold(&entries, OURS, "v2", &legacy).unwrap();
        assert_eq!(of_v2[2].api_version.as_deref(), Some("v2"));

        let entries = [
            ours,
            entry("pilothouse/0", "Apply", json!({"f:x": {}})),
            entry("pilothouse/0", "Update", json!({"f:y": {}})),
        ];
        let folded = fold(&entries, OURS, "v1", &[]).unwrap();
        assert_eq!(folded.len(), 2);
        assert_eq!(fields_of(&folded[0]), json!({"f:data": {".": {}, "f:a": {}, "f:b": {}}, "f:x": {}}));
    }

    #[test]
    fn entries_of_a_version_that_is_dropped_are_of_the_one_that_is_served() {
        let of = |version: &str, mut entry: ManagedFieldsEntry| {
            entry.api_version = Some(version.to_owned());
            entry
        };
        let ours = |version| of(version, entry(OURS, "Apply", json!({"f:spec": {"f:a": {}}})));
        let theirs = |version, fields| of(version, entry("kubectl", "Update", fields));
        let status = of("t/v1alpha1", of_status(entry("kubectl", "Update", json!({"f:status": {}}))));
        let entries = [
            theirs("t/v1", json!({"f:spec": {"f:b": {}}})),
            theirs("t/v1alpha1", json!({"f:spec": {"f:c": {}}})),
            status.clone(),
            ours("t/v1alpha1"),
        ];
        let renewed = renew(&entries, &["t/v1alpha1".to_owned()], "t/v1").unwrap();
        let both = theirs("t/v1", json!({"f:spec": {"f:b": {}, "f:c": {}}}));
        assert_eq!(renewed, [both, of("t/v1", status), ours("t/v1")]);
        assert_eq!(renew(&renewed, &["t/v1alpha1".to_owned()], "t/v1"), None, "once");
    }

    #[test]
    fn what_only_repeats_ours_is_released() {
        let ours = entry(OURS, "Apply", json!({"f:data": {"f:a": {}}}));
        let theirs = entry("kubectl", "Update", json!({"f:data": {"f:a": {}}}));
        let status = of_status(entry(OURS, "Update", json!({"f:data": {"f:a": {}}})));
        let before = entry(BEFORE_FIRST_APPLY, "Update", json!({"f:data": {".": {}, "f:a": {}, "f:t": {}}}));
        let patched = entry(OURS, "Update", json!({"f:data": {"f:a": {}, "f:default": {}}}));
        let entries = [before, ours.clone(), theirs.clone(), status.clone(), patched];
        let released = release(&entries, OURS).unwrap();
        let left = entry(BEFORE_FIRST_APPLY, "Update", json!({"f:data": {"f:t": {}}}));
        assert_eq!(released, [left, ours, theirs.clone(), status]);
        assert_eq!(release(&released, OURS), None, "once");
        assert_eq!(release(&[theirs], OURS), None);
    }
}
