//! The plan step: what there is and what is wanted, to what is to be done. Pure: no client, no clock, nothing async.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{
    coverage::differences,
    jobs, managers,
    projection::{projection, projection_of},
    readiness::is_ready,
};
use crate::{
    identity::{APPLIED_LABEL, BINDING_ANNOTATION, PARENT_LABEL, RECONCILER_LABEL, WAVE_LABEL, applied, binding},
    object::{Kind, Object},
    state::{ChildApply, ChildDelete, ChildKey, DesiredChild, Held, LastApply, Memory, Observed, Plan, Tie},
};

/// Whose children they are to be.
pub struct Owner<'a> {
    /// The parent's kind.
    pub kind: &'a Kind,
    /// The kinds of the children.
    pub child_kinds: &'a [Kind],
    /// The value of the reconciler's label.
    pub label: &'a str,
    /// The field manager of this parent.
    pub manager: &'a str,
}

/// What to do so that `observed` becomes `desired`.
///
/// A child that is as it should be is left alone: its plugin wants what it wanted at our last apply, and nothing of ours has
/// changed since (see [`projection`]). If nothing is remembered, or something seems to have changed, it is compared with all that we
/// would send (see [`differences`]). A child that is being deleted is left alone, too; its end will wake the parent.
///
/// Waves: a child waits while one of an earlier wave is missing, about to be written, being deleted, or not ready.
pub fn plan(observed: &Observed, desired: &[DesiredChild], memory: &Memory, owner: &Owner<'_>) -> Plan {
    let live: HashMap<_, _> = observed.children.iter().map(|(key, child)| (key, child.as_ref())).collect();
    let mut plan = Plan::default();
    let last = desired.iter().map(|child| child.options.wave).max().unwrap_or_default();
    // The first wave that is not complete yet: those after it wait.
    let mut open = last;
    for child in in_waves(desired) {
        let wave = child.options.wave;
        if wave > open {
            plan.waiting.push(child.key.clone());
            continue;
        }
        let before = plan.applies.len() + plan.deleting.len();
        plan_child(&mut plan, child, &live, observed, memory, owner);
        let is_done = || {
            let left_alone = plan.applies.len() + plan.deleting.len() == before;
            left_alone && live.get(&child.key).is_some_and(|live| is_ready(child, live))
        };
        if wave < open && !is_done() {
            open = wave;
        }
    }
    let wanted: std::collections::HashSet<_> = desired.iter().map(|child| &child.key).collect();
    // The same object seen as two versions of its kind is one object.
    let kept: std::collections::HashSet<_> =
        observed.children.iter().filter(|(key, _)| wanted.contains(key)).map(|(_, child)| child.uid()).collect();
    let unwanted = observed.children.iter().filter(|(key, child)| {
        // A label alone never buys a delete: it takes our owner reference, or the record on the parent.
        let proven = child.controller_uid() == Some(observed.parent.uid())
            || observed.record.as_ref().is_some_and(|record| record.has(key, owner.child_kinds));
        proven && !wanted.contains(key) && !kept.contains(child.uid()) && !child.is_deleting()
    });
    plan.deletes = unwanted.map(|(key, child)| ChildDelete { key: key.clone(), uid: child.uid().to_owned() }).collect();
    plan
}

/// What is to be done about one child that is wanted.
fn plan_child(
    plan: &mut Plan,
    child: &DesiredChild,
    live: &HashMap<&ChildKey, &Object>,
    observed: &Observed,
    memory: &Memory,
    owner: &Owner<'_>,
) {
    let apply = |body, changed, fold| ChildApply {
        key: child.key.clone(),
        body,
        digest: child.digest,
        create: !live.contains_key(&child.key),
        changed,
        fold,
        options: child.options.clone(),
    };
    let Some(live) = live.get(&child.key) else {
        plan.applies.push(apply(body(child, None, &observed.parent, owner), true, false));
        return;
    };
    if live.is_deleting() {
        plan.deleting.push(child.key.clone());
        return;
    }
    let last = memory.children.get(&child.key);
    let fold = managers::has_legacy(live, owner.manager, &child.options.adopt_field_managers);
    if !fold && last.is_some_and(|last| is_unchanged(live, child, last, owner.manager)) {
        plan.unchanged.push((child.key.clone(), live.resource_version().to_owned()));
        return;
    }
    if let Some(held) = memory.held.get(&child.key).filter(|held| is_held(held, child, live)) {
        if !held.running {
            return;
        }
        if jobs::is_running(live) {
            plan.running.push(child.key.clone());
            return;
        }
    }
    let body = body(child, Some(live.uid()), &observed.parent, owner);
    let changed = last.map(|last| last.desired != child.digest);
    if changed == Some(true) {
        plan.applies.push(apply(body, true, fold));
        return;
    }
    // Also if another apply is remembered: a map of ours that is sent empty is all in the projection, whoever fills it.
    match recognize(live, child, &body, owner.manager) {
        Recognized::Same(last) if !fold => plan.recognized.push((child.key.clone(), last)),
        recognized => {
            let changed = changed.unwrap_or(matches!(recognized, Recognized::Changed));
            plan.applies.push(apply(body, changed, fold));
        }
    }
}

/// The children in the order of their waves; most have only one.
pub(super) fn in_waves(desired: &[DesiredChild]) -> Vec<&DesiredChild> {
    let mut ordered: Vec<_> = desired.iter().collect();
    ordered.sort_by_key(|child| child.options.wave);
    ordered
}

fn is_unchanged(live: &Object, child: &DesiredChild, last: &LastApply, manager: &str) -> bool {
    if last.desired != child.digest {
        return false;
    }
    if last.resource_version == live.resource_version() {
        return true;
    }
    let fields = live.owned_by(manager, "Apply", "");
    fields.and_then(|fields| projection(fields.get(), live.json()).ok()) == Some(last.projection)
}

fn is_held(held: &Held, child: &DesiredChild, live: &Object) -> bool {
    held.desired == child.digest && held.uid == live.uid()
}

/// What a live child is to a host that remembers nothing of it.
enum Recognized {
    /// Just what we would send; the apply that made it so is remembered.
    Same(LastApply),
    /// Applied for what the plugin still wants, and something has happened to it.
    Drifted,
    /// Applied for something else, or never.
    Changed,
}

fn recognize(live: &Object, child: &DesiredChild, body: &Map<String, Value>, manager: &str) -> Recognized {
    let Ok(json) = serde_json::from_str::<Value>(live.json()) else { return Recognized::Changed };
    if applied_for(&json) != Some(applied(&child.digest).as_str()) {
        return Recognized::Changed;
    }
    let fields = live.owned_by(manager, "Apply", "").and_then(|fields| serde_json::from_str(fields.get()).ok());
    let Some(fields) = fields else { return Recognized::Drifted };
    if managers::has_repeats(live, manager) || !differences(body, &fields, &json).is_empty() {
        return Recognized::Drifted;
    }
    Recognized::Same(LastApply {
        desired: child.digest,
        projection: projection_of(&fields, &json),
        resource_version: live.resource_version().to_owned(),
    })
}

/// The value of that label on a live child.
pub(super) fn applied_for(live: &Value) -> Option<&str> {
    live.get("metadata")?.get("labels")?.get(APPLIED_LABEL)?.as_str()
}

/// The wave of a live child.
pub(super) fn wave_of(live: &Object) -> u16 {
    live.labels().get(WAVE_LABEL).and_then(|wave| wave.parse().ok()).unwrap_or_default()
}

/// What is sent: what the plugin decides, our marks and owner reference, and the one object that may be meant.
fn body(child: &DesiredChild, uid: Option<&str>, parent: &Object, owner: &Owner<'_>) -> Map<String, Value> {
    let mut body = child.object.clone();
    if let Some(Value::Object(metadata)) = body.get_mut("metadata") {
        mark(metadata, "labels", RECONCILER_LABEL, owner.label);
        mark(metadata, "labels", APPLIED_LABEL, &applied(&child.digest));
        if child.options.wave > 0 && child.tie != Tie::Loose {
            mark(metadata, "labels", WAVE_LABEL, &child.options.wave.to_string());
        }
        if child.tie == Tie::Owner {
            metadata.insert("ownerReferences".to_owned(), owner_reference(parent, owner.kind));
        } else {
            let kind = owner.child_kinds[child.key.kind].group_kind();
            mark(metadata, "labels", PARENT_LABEL, parent.uid());
            mark(metadata, "annotations", BINDING_ANNOTATION, &binding(parent.uid(), &kind, &child.key.object));
        }
        match uid {
            // This very object: gone or replaced is a conflict.
            Some(uid) => metadata.insert("uid".to_owned(), uid.into()),
            // Only if there is none: the API server answers 409 to an apply that names a version of what exists or not.
            None => metadata.insert("resourceVersion".to_owned(), "1".into()),
        };
    }
    body
}

/// Adds a label or an annotation of ours to those of the plugin.
fn mark(metadata: &mut Map<String, Value>, map: &str, key: &str, value: &str) {
    let map = metadata.entry(map).or_insert_with(|| json!({}));
    if map.is_null() {
        *map = json!({});
    }
    if let Value::Object(map) = map {
        map.insert(key.to_owned(), value.into());
    }
}

fn owner_reference(parent: &Object, kind: &Kind) -> Value {
    json!([{
        "apiVersion": kind.api.api_version,
        "kind": kind.api.kind,
        "name": parent.name(),
        "uid": parent.uid(),
        "controller": true,
        "blockOwnerDeletion": true,
    }])
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::discovery::ApiResource;

    use super::*;
    use crate::{
        object::ObjectKey,
        reconcile::{projection::digest_object, remote::Record},
        state::{ChildKey, ChildOptions},
    };

    const MANAGER: &str = "pilothouse/1";

    fn parent_kind() -> Kind {
        let api = ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk("t.example", "v1", "Widget"));
        Kind { api, namespaced: true, has_status: true }
    }

    fn child_kinds() -> Vec<Kind> {
        vec![Kind { api: ApiResource::erase::<ConfigMap>(&()), namespaced: true, has_status: false }]
    }

    fn key(name: &str) -> ChildKey {
        ChildKey { kind: 0, object: ObjectKey { namespace: Some("n".into()), name: name.into() } }
    }

    fn wanted(name: &str, value: &str) -> DesiredChild {
        let api = ApiResource::erase::<ConfigMap>(&());
        let object = json!({"apiVersion": api.api_version, "kind": api.kind,
            "metadata": {"name": name, "namespace": "n"}, "data": {"k": value}});
        let Value::Object(object) = object else { unreachable!() };
        DesiredChild {
            key: key(name),
            digest: digest_object(&object),
            object,
            tie: Tie::Owner,
            options: ChildOptions::default(),
        }
    }

    fn live(name: &str, value: &str, version: &str, extra: &str) -> Arc<Object> {
        let text = format!(
            r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"{name}","namespace":"n","uid":"u-{name}","resourceVersion":"{version}"{extra},
               "ownerReferences":[{{"apiVersion":"t.example/v1","kind":"Widget","name":"p","uid":"u-p","controller":true}}],
               "managedFields":[{{"manager":"{MANAGER}","operation":"Apply","fieldsV1":{{"f:data":{{"f:k":{{}}}}}}}}]}},"data":{{"k":"{value}","theirs":"{version}"}}}}"#
        );
        Arc::new(Object::from_json(&text).unwrap())
    }

    fn remembered(child: &DesiredChild, live: &Object) -> (ChildKey, LastApply) {
        let fields = live.owned_by(MANAGER, "Apply", "").unwrap();
        let last = LastApply {
            desired: child.digest,
            projection: projection(fields.get(), live.json()).unwrap(),
            resource_version: live.resource_version().to_owned(),
        };
        (child.key.clone(), last)
    }

    fn plan_for(children: &[Arc<Object>], desired: &[DesiredChild], memory: &HashMap<ChildKey, LastApply>) -> Plan {
        let parent = Object::from_json(r#"{"metadata":{"name":"p","namespace":"n","uid":"u-p"}}"#).unwrap();
        let children = children.iter().map(|child| (key(child.name()), child.clone())).collect();
        let observed = Observed { parent: Arc::new(parent), children, record: None };
        let memory = Memory { children: memory.clone(), ..Memory::default() };
        plan(&observed, desired, &memory, &owner(&parent_kind(), &child_kinds()))
    }

    fn owner<'a>(kind: &'a Kind, child_kinds: &'a [Kind]) -> Owner<'a> {
        Owner { kind, child_kinds, label: "c-x-1", manager: MANAGER }
    }

    /// The child as our apply leaves it.
    fn in_sync(child: &DesiredChild) -> Value {
        let parent = Object::from_json(r#"{"metadata":{"name":"p","namespace":"n","uid":"u-p"}}"#).unwrap();
        let mut live = Value::from(body(child, Some("u-a"), &parent, &owner(&parent_kind(), &child_kinds())));
        live["metadata"]["resourceVersion"] = "5".into();
        let labels: Map<_, _> = live["metadata"]["labels"]
            .as_object()
            .unwrap()
            .keys()
            .map(|label| (format!("f:{label}"), json!({})))
            .collect();
        live["metadata"]["managedFields"] = json!([{"manager": MANAGER, "operation": "Apply", "fieldsV1": {
            "f:metadata": {"f:labels": labels,
                "f:ownerReferences": {"k:{\"uid\":\"u-p\"}": {}}},
            "f:data": {"f:k": {}}}}]);
        live
    }

    fn plan_after_restart(live: &Value, child: &DesiredChild) -> Plan {
        let live = Arc::new(Object::from_json(&live.to_string()).unwrap());
        plan_for(&[live], std::slice::from_ref(child), &HashMap::new())
    }

    #[test]
    fn a_child_in_sync_is_recognized_after_a_restart() {
        let child = wanted("a", "1");
        let plan = plan_after_restart(&in_sync(&child), &child);
        let [(known, last)] = plan.recognized.as_slice() else { panic!("{plan:?}") };
        assert_eq!((known, last.desired, plan.applies.len()), (&child.key, child.digest, 0));
        // From here on it is as after an apply.
        let live = Arc::new(Object::from_json(&in_sync(&child).to_string()).unwrap());
        let memory = HashMap::from([(known.clone(), last.clone())]);
        assert_eq!(plan_for(&[live], std::slice::from_ref(&child), &memory).unchanged.len(), 1);
    }

    #[test]
    fn any_doubt_after_a_restart_is_one_apply() {
        let child = wanted("a", "1");
        let entry = "/metadata/managedFields/0";
        for (pointer, value, changed) in [
            ("/data/k".to_owned(), json!("2"), false),
            ("/metadata/labels/internal.pilothouse.dev~1reconciler".to_owned(), json!("x"), false),
            ("/metadata/ownerReferences/0/controller".to_owned(), json!(false), false),
            ("/metadata/labels".to_owned(), json!({}), true),
            (format!("{entry}/operation"), json!("Update"), false),
            (format!("{entry}/manager"), json!("pilothouse/2"), false),
            (format!("{entry}/fieldsV1/f:data"), json!({"f:other": {}}), false),
            (format!("{entry}/fieldsV1/f:metadata/f:ownerReferences"), json!({"k:{\"uid\":\"x\"}": {}}), false),
            (format!("{entry}/fieldsV1/f:metadata/f:labels"), json!({"f:x": {}}), false),
        ] {
            let mut live = in_sync(&child);
            *live.pointer_mut(&pointer).unwrap() = value;
            let plan = plan_after_restart(&live, &child);
            let [apply] = plan.applies.as_slice() else { panic!("{pointer}: {plan:?}") };
            assert_eq!((apply.changed, apply.create), (changed, false), "{pointer}");
        }
        let other = plan_after_restart(&in_sync(&child), &wanted("a", "2"));
        assert!(other.applies[0].changed);
    }

    #[test]
    fn what_only_repeats_ours_is_a_doubt_and_an_earlier_manager_is_folded() {
        let mut child = wanted("a", "1");
        let mut live = in_sync(&child);
        let add = |live: &mut Value, manager: &str, operation: &str| {
            let entry = json!({"manager": manager, "operation": operation, "fieldsV1": {"f:data": {"f:k": {}}}});
            live["metadata"]["managedFields"].as_array_mut().unwrap().push(entry);
        };
        add(&mut live, "old", "Update");
        assert_eq!(plan_after_restart(&live, &child).applies.len(), 0, "others may own it, too");
        add(&mut live, "before-first-apply", "Update");
        assert_eq!(plan_after_restart(&live, &child).applies.len(), 1);

        let mut live = in_sync(&child);
        add(&mut live, "pilothouse/old", "Apply");
        assert!(plan_after_restart(&live, &child).applies[0].fold);
        let mut live = in_sync(&child);
        add(&mut live, "old", "Update");
        child.options.adopt_field_managers = vec!["old".to_owned()];
        assert!(plan_after_restart(&live, &child).applies[0].fold);
    }

    #[test]
    fn a_child_that_waits_for_its_deletion_is_left_alone_as_long_as_the_plugin_wants_the_same() {
        let (before, child) = (wanted("a", "1"), wanted("a", "2"));
        let live = live("a", "1", "5", "");
        let memory = |uid: &str| Memory {
            children: HashMap::from([remembered(&before, &live)]),
            held: HashMap::from([(key("a"), Held { desired: child.digest, uid: uid.to_owned(), running: false })]),
            ..Memory::default()
        };
        let parent = Object::from_json(r#"{"metadata":{"name":"p","namespace":"n","uid":"u-p"}}"#).unwrap();
        let observed = Observed { parent: Arc::new(parent), children: vec![(key("a"), live.clone())], record: None };
        let plan = |child: &DesiredChild, uid: &str| {
            plan(&observed, std::slice::from_ref(child), &memory(uid), &owner(&parent_kind(), &child_kinds()))
                .applies
                .len()
        };
        assert_eq!(plan(&child, "u-a"), 0);
        assert_eq!(plan(&child, "u-b"), 1);
        assert_eq!(plan(&wanted("a", "3"), "u-a"), 1);
    }

    #[test]
    fn an_absent_child_is_created_and_only_created() {
        let plan = plan_for(&[], &[wanted("a", "1")], &HashMap::new());
        let [apply] = plan.applies.as_slice() else { panic!("{plan:?}") };
        assert!(apply.create);
        assert_eq!(apply.body["metadata"]["resourceVersion"], "1");
        assert_eq!(apply.body["metadata"]["labels"][RECONCILER_LABEL], "c-x-1");
        let applied = apply.body["metadata"]["labels"][APPLIED_LABEL].as_str().unwrap();
        assert!(applied.starts_with("1-") && applied.len() == 34, "{applied}");
        assert_eq!(apply.body["metadata"]["ownerReferences"][0]["uid"], "u-p");
        assert_eq!(apply.body["metadata"].get("uid"), None);
    }

    #[test]
    fn a_child_in_its_place_is_left_alone_whatever_others_do_to_theirs() {
        let child = wanted("a", "1");
        let memory = HashMap::from([remembered(&child, &live("a", "1", "5", ""))]);
        for version in ["5", "6"] {
            let plan = plan_for(&[live("a", "1", version, "")], std::slice::from_ref(&child), &memory);
            assert_eq!(plan, Plan { unchanged: vec![(key("a"), version.to_owned())], ..Plan::default() });
        }
    }

    #[test]
    fn a_map_that_is_sent_empty_is_for_others_to_fill() {
        let mut child = wanted("a", "1");
        child.object.insert("data".to_owned(), json!({}));
        child.digest = digest_object(&child.object);
        let mut live = in_sync(&child);
        live["metadata"]["managedFields"][0]["fieldsV1"]["f:data"] = json!({});
        let object = |live: &Value| Arc::new(Object::from_json(&live.to_string()).unwrap());
        let memory = HashMap::from([remembered(&child, &object(&live))]);
        live["metadata"]["resourceVersion"] = json!("6");
        live["data"]["theirs"] = json!("1");
        let plan = plan_for(&[object(&live)], std::slice::from_ref(&child), &memory);
        assert_eq!((plan.recognized.len(), plan.applies.len()), (1, 0));
    }

    #[test]
    fn a_changed_child_is_applied_by_uid() {
        let child = wanted("a", "1");
        let memory = HashMap::from([remembered(&child, &live("a", "1", "5", ""))]);
        let by_others = plan_for(&[live("a", "changed", "6", "")], std::slice::from_ref(&child), &memory);
        let by_plugin = plan_for(&[live("a", "1", "5", "")], &[wanted("a", "2")], &memory);
        let forgotten = plan_for(&[live("a", "1", "5", "")], std::slice::from_ref(&child), &HashMap::new());
        for plan in [by_others, by_plugin, forgotten] {
            let [apply] = plan.applies.as_slice() else { panic!("{plan:?}") };
            assert!(!apply.create);
            assert_eq!(apply.body["metadata"]["uid"], "u-a");
            assert_eq!(apply.body["metadata"].get("resourceVersion"), None);
        }
    }

    #[test]
    fn c61_a_remote_child_is_bound_not_owned_and_deleted_only_if_it_is_on_record() {
        let parent = Object::from_json(r#"{"metadata":{"name":"p","namespace":"elsewhere","uid":"u-p"}}"#).unwrap();
        let owner = Owner { kind: &parent_kind(), child_kinds: &child_kinds(), label: "c-x-1", manager: MANAGER };
        let child = DesiredChild { tie: Tie::Record, ..wanted("a", "1") };
        let mut observed = Observed { parent: Arc::new(parent), children: Vec::new(), record: None };
        let made = plan(&observed, std::slice::from_ref(&child), &Memory::default(), &owner);
        let metadata = &made.applies[0].body["metadata"];
        assert_eq!(metadata.get("ownerReferences"), None);
        assert_eq!(metadata["labels"][PARENT_LABEL], "u-p");
        assert_eq!(metadata["annotations"][BINDING_ANNOTATION], "u-p ConfigMap n/a");

        let text = json!({"metadata": {"name": "a", "namespace": "n", "uid": "u-a", "labels": metadata["labels"], "annotations": metadata["annotations"]}});
        let live = Object::from_json(&text.to_string()).unwrap();
        assert_eq!(live.parent_uid("ConfigMap"), Some("u-p"));
        assert_eq!(live.parent_uid("Secret"), None, "a copy of it as something else is not bound");
        observed.children = vec![(key("a"), Arc::new(live))];
        assert_eq!(plan(&observed, &[], &Memory::default(), &owner).deletes, [], "a label proves nothing");
        observed.record = Record::before(&observed.parent, &[&key("a")], &[], &[], false, &child_kinds());
        assert_eq!(plan(&observed, &[], &Memory::default(), &owner).deletes.len(), 1);
    }

    #[test]
    fn a_child_being_deleted_is_left_alone() {
        let dying = live("a", "1", "5", r#","deletionTimestamp":"2026-01-01T00:00:00Z""#);
        let plan = plan_for(std::slice::from_ref(&dying), &[wanted("a", "2")], &HashMap::new());
        assert_eq!(plan, Plan { deleting: vec![key("a")], ..Plan::default() });
        assert_eq!(plan_for(&[dying], &[], &HashMap::new()), Plan::default());
    }

    #[test]
    fn a_child_seen_as_two_versions_of_its_kind_is_one_child() {
        let parent = Object::from_json(r#"{"metadata":{"name":"p","namespace":"n","uid":"u-p"}}"#).unwrap();
        let other = ChildKey { kind: 1, ..key("a") };
        let children = vec![(key("a"), live("a", "1", "5", "")), (other, live("a", "1", "5", ""))];
        let observed = Observed { parent: Arc::new(parent), children, record: None };
        let kinds = [child_kinds(), child_kinds()].concat();
        let plan = plan(&observed, &[wanted("a", "1")], &Memory::default(), &owner(&parent_kind(), &kinds));
        assert_eq!(plan.deletes, []);
    }

    #[test]
    fn an_unwanted_child_is_deleted_by_uid() {
        let plan = plan_for(&[live("a", "1", "5", "")], &[], &HashMap::new());
        assert_eq!(plan.deletes, [ChildDelete { key: key("a"), uid: "u-a".into() }]);
    }

    fn in_wave(name: &str, wave: u16) -> DesiredChild {
        let child = wanted(name, "1");
        DesiredChild { options: ChildOptions { wave, ..ChildOptions::default() }, ..child }
    }

    #[test]
    fn a_wave_waits_until_the_one_before_is_there_and_ready() {
        let names = |keys: &[ChildKey]| keys.iter().map(|key| key.object.name.clone()).collect::<Vec<_>>();
        let applied = |plan: &Plan| {
            let keys: Vec<_> = plan.applies.iter().map(|apply| apply.key.clone()).collect();
            names(&keys)
        };
        let desired = [in_wave("last", 7), in_wave("first", 0), in_wave("second", 2), in_wave("also", 0)];
        let live = |child: &DesiredChild| Arc::new(Object::from_json(&in_sync(child).to_string()).unwrap());
        let named = |name: &str| {
            let child = desired.iter().find(|child| child.key.object.name == name).unwrap();
            let mut object = in_sync(child);
            object["metadata"]["name"] = name.into();
            object["metadata"]["uid"] = format!("u-{name}").into();
            Arc::new(Object::from_json(&object.to_string()).unwrap())
        };
        let plan = |children: &[Arc<Object>], desired: &[DesiredChild]| plan_for(children, desired, &HashMap::new());

        let nothing = plan(&[], &desired);
        assert_eq!(
            (applied(&nothing), names(&nothing.waiting)),
            (vec!["first".into(), "also".into()], vec!["second".into(), "last".into()])
        );
        let half = plan(&[named("first")], &desired);
        assert_eq!((applied(&half), half.waiting.len()), (vec!["also".into()], 2), "one of a wave is missing");
        let one = plan(&[named("first"), named("also")], &desired);
        assert_eq!((applied(&one), names(&one.waiting)), (vec!["second".into()], vec!["last".into()]));
        let all = plan(&[named("first"), named("also"), named("second")], &desired);
        assert_eq!((applied(&all), all.waiting.len()), (vec!["last".into()], 0));

        // What was made already waits, too: it is neither changed nor deleted.
        let mut again = desired.clone();
        again[1].options.readiness = crate::state::Readiness::NotReady;
        again[0] = DesiredChild { options: again[0].options.clone(), ..wanted("last", "2") };
        let stale = live(&in_wave("last", 7));
        let held = plan(&[named("first"), named("also"), named("second"), stale], &again);
        assert_eq!(
            (applied(&held).len(), names(&held.waiting), held.deletes.len()),
            (0, vec!["second".into(), "last".into()], 0)
        );
    }

    #[test]
    fn a_child_of_a_later_wave_carries_its_number() {
        let child = in_wave("a", 3);
        let live = Object::from_json(&in_sync(&child).to_string()).unwrap();
        assert_eq!(wave_of(&live), 3);
        assert_eq!(wave_of(&Object::from_json(&in_sync(&wanted("a", "1")).to_string()).unwrap()), 0);
        assert_eq!(
            wave_of(
                &Object::from_json(r#"{"metadata":{"name":"a","labels":{"internal.pilothouse.dev/wave":"x"}}}"#)
                    .unwrap()
            ),
            0
        );
    }
}
