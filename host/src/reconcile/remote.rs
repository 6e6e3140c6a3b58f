//! Children that cannot have an owner reference: in another namespace than their parent, or of cluster scope (`C61`).
//!
//! The garbage collector would take them for orphans, so it is us who delete them, and that takes proof: who may patch an object can
//! put any label on it. The proof is a record on the parent, written before the child is made. It forces our finalizer on, so that a
//! parent is not gone before they are.

use std::collections::BTreeSet;

use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    identity::RECORD_ANNOTATION,
    object::{Kind, Object, ObjectKey},
    plugin::describe::KindName,
    state::ChildKey,
};

/// The record on a parent.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(default)]
pub struct Record {
    /// Whether a plugin that cleans up has had this parent: then one has to clean up.
    pub cleanup: bool,
    /// Whether the user wants the children to stay when the parent is deleted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub orphan: bool,
    /// The UID of the parent that it was written for. After a restore the parent has another one, and children still name this one (`C65`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The same of the record that a restore brought, once this one has taken its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub former: Option<String>,
    /// The children that may exist.
    pub children: BTreeSet<Entry>,
}

/// One child in the record.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    #[serde(flatten)]
    kind: KindName,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    namespace: Option<String>,
    name: String,
}

impl Record {
    /// The record of this parent; none if it never had such children. One that cannot be read counts as empty: what it named is
    /// then left alone.
    pub fn of(parent: &Object) -> Option<Self> {
        let text = parent.annotation(RECORD_ANNOTATION)?;
        Some(serde_json::from_str(&text).unwrap_or_else(|error| {
            tracing::warn!(parent = %parent.key(), "annotation {RECORD_ANNOTATION} cannot be read: {error}");
            Self::default()
        }))
    }

    /// Whether it was written for a parent with this UID, by a host: a user who copies a record copies that, too.
    pub fn is_of(&self, uid: &str) -> bool {
        [&self.parent, &self.former].into_iter().flatten().any(|known| known == uid)
    }

    /// Whether the child is in it.
    pub fn has(&self, key: &ChildKey, kinds: &[Kind]) -> bool {
        let wanted = Entry::of(key, kinds);
        self.children.iter().any(|entry| {
            // Another version of the kind has the same objects.
            entry.kind.is_same_kind(&wanted.kind)
                && (&entry.namespace, &entry.name) == (&wanted.namespace, &wanted.name)
        })
    }

    /// The children in it whose kinds are known.
    pub fn keys(&self, kinds: &[Kind]) -> Vec<ChildKey> {
        let key = |entry: &Entry| {
            let kind = kinds.iter().position(|kind| kind.name().is_same_kind(&entry.kind))?;
            let object = ObjectKey { namespace: entry.namespace.clone(), name: entry.name.clone() };
            Some(ChildKey { kind, object })
        };
        self.children.iter().filter_map(key).collect()
    }

    /// The record that has to be on the parent before `wanted` are made. None: the one that is there will do.
    ///
    /// What is no longer wanted stays in it until nothing is left of it, as `live` tells; but not what is wanted and is to outlive its
    /// parent, those in `loose`.
    pub fn before(
        parent: &Object,
        wanted: &[&ChildKey],
        live: &[&ChildKey],
        loose: &[&ChildKey],
        cleans_up: bool,
        kinds: &[Kind],
    ) -> Option<Self> {
        let before = Self::of(parent);
        if wanted.is_empty() && before.is_none() {
            return None;
        }
        let before = before.unwrap_or_default();
        let needed: BTreeSet<_> = wanted.iter().map(|key| Entry::of(key, kinds)).collect();
        let loose: BTreeSet<_> = loose.iter().map(|key| Entry::of(key, kinds)).collect();
        let cleanup = before.cleanup || cleans_up;
        if needed.is_subset(&before.children) && loose.is_disjoint(&before.children) && cleanup == before.cleanup {
            return None;
        }
        let live: BTreeSet<_> = live.iter().map(|key| Entry::of(key, kinds)).collect();
        let mut children: BTreeSet<_> = before.children.intersection(&live).chain(&needed).cloned().collect();
        children.retain(|child| !loose.contains(child));
        let former = before.parent.filter(|known| known != parent.uid()).or(before.former);
        Some(Self { cleanup, orphan: before.orphan, parent: Some(parent.uid().to_owned()), former, children })
    }

    /// Writes it on the parent; the answer is the parent as it is from then on.
    ///
    /// # Errors
    /// If the API server refuses, with 409 if the parent has changed.
    pub(super) async fn write(&self, api: &Api<Object>, parent: &Object) -> Result<Object, kube::Error> {
        // Names and booleans: it can always be written as JSON.
        let text = serde_json::to_string(self).unwrap_or_default();
        let patch = json!({"metadata": {
            "uid": parent.uid(),
            "resourceVersion": parent.resource_version(),
            "annotations": {RECORD_ANNOTATION: text},
        }});
        api.patch(parent.name(), &PatchParams::default(), &Patch::Merge(&patch)).await
    }
}

impl Entry {
    fn of(key: &ChildKey, kinds: &[Kind]) -> Self {
        let ObjectKey { namespace, name } = key.object.clone();
        Self { kind: kinds[key.kind].name(), namespace, name }
    }
}

#[cfg(test)]
mod tests {
    use kube::discovery::ApiResource;

    use super::*;

    fn kinds() -> Vec<Kind> {
        let api = ApiResource::erase::<k8s_openapi::api::core::v1::ConfigMap>(&());
        vec![Kind { api, namespaced: true, has_status: false }]
    }

    fn key(name: &str) -> ChildKey {
        ChildKey { kind: 0, object: ObjectKey { namespace: Some("other".into()), name: name.into() } }
    }

    fn parent(record: Option<&Record>) -> Object {
        let mut parent =
            json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": {"theirs": "1"}}});
        if let Some(record) = record {
            parent["metadata"]["annotations"][RECORD_ANNOTATION] = serde_json::to_string(record).unwrap().into();
        }
        Object::from_json(&parent.to_string()).unwrap()
    }

    #[test]
    fn a_parent_without_such_children_has_no_record() {
        assert_eq!(Record::of(&parent(None)), None);
        assert_eq!(Record::before(&parent(None), &[], &[], &[], true, &kinds()), None);
    }

    #[test]
    fn it_is_written_before_a_child_is_made_and_only_then() {
        let (a, b) = (key("a"), key("b"));
        let record = Record::before(&parent(None), &[&a], &[], &[], false, &kinds()).unwrap();
        assert!(record.has(&a, &kinds()) && !record.has(&b, &kinds()));
        assert_eq!(record.keys(&kinds()), [key("a")]);
        let known = parent(Some(&record));
        assert_eq!(Record::of(&known), Some(record));
        assert_eq!(Record::before(&known, &[&a], &[&a], &[], false, &kinds()), None);
        assert_eq!(
            Record::before(&known, &[], &[&a], &[], false, &kinds()),
            None,
            "it is to be pruned, which takes the proof"
        );
        let more = Record::before(&known, &[&b], &[&a], &[], false, &kinds()).unwrap();
        assert_eq!(more.keys(&kinds()), [key("a"), key("b")]);
        let less = Record::before(&known, &[&b], &[], &[], false, &kinds()).unwrap();
        assert_eq!(less.keys(&kinds()), [key("b")], "nothing is left of the other one");
        let stays = Record::before(&known, &[], &[&a], &[&a], false, &kinds()).unwrap();
        assert!(stays.keys(&kinds()).is_empty(), "it is to outlive its parent");
    }

    #[test]
    fn c65_a_record_from_before_a_restore_says_to_whom_its_children_are_bound() {
        let (a, b) = (key("a"), key("b"));
        let written = Record::before(&parent(None), &[&a], &[], &[], false, &kinds()).unwrap();
        assert!(written.is_of("u") && !written.is_of("other"));
        let mut restored = serde_json::from_str::<serde_json::Value>(parent(Some(&written)).json()).unwrap();
        restored["metadata"]["uid"] = "new".into();
        let restored = Object::from_json(&restored.to_string()).unwrap();
        assert_eq!(
            Record::before(&restored, &[&a], &[], &[], false, &kinds()),
            None,
            "it need not be written for that"
        );
        let more = Record::before(&restored, &[&a, &b], &[], &[], false, &kinds()).unwrap();
        assert!(more.is_of("u") && more.is_of("new"));
    }

    #[test]
    fn that_a_plugin_cleans_up_is_never_forgotten() {
        let a = key("a");
        let record = Record::before(&parent(None), &[&a], &[], &[], true, &kinds()).unwrap();
        let known = parent(Some(&record));
        assert_eq!(Record::before(&known, &[&a], &[&a], &[], false, &kinds()), None);
        let without = parent(Some(&Record { cleanup: false, ..record }));
        assert!(Record::before(&without, &[&a], &[&a], &[], true, &kinds()).unwrap().cleanup);
    }
}
