//! The finalizer state machine: in which phase a parent is, and the two writes that move it on.
//!
//! new (our finalizer is missing, and needed) → live → deleting with our finalizer → deleting without it (nothing at all, ever).
//!
//! Both writes are one form: a JSON patch that tests the UID and the whole old list, so that a finalizer of somebody else is never
//! touched, and one of ours never put on an object of the same name that came later.

use json_patch::{AddOperation, PatchOperation, TestOperation, jsonptr::PointerBuf};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::Value;

use super::apply::is_status;
use crate::{lookup, object::Object};

/// The finalizers that count as ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ours {
    /// The one that is put on.
    name: String,
    /// Those of an earlier operator, whose work is ours now (`C16`).
    legacy: Vec<String>,
}

impl Ours {
    /// This one, and those that it takes the place of.
    pub fn new(name: impl Into<String>, legacy: Vec<String>) -> Self {
        Self { name: name.into(), legacy }
    }

    /// Whether they are on the parent as they should be. One that lives has the one that is put on, and of a plugin that `cleans_up` no
    /// other; one that is being deleted can be given no other than it has.
    pub fn hold(&self, parent: &Object, cleans_up: bool) -> bool {
        match parent.is_deleting() {
            true => self.are_on(parent),
            false => is_on(parent, &self.name) && !(cleans_up && self.has_legacy(parent)),
        }
    }

    /// Whether one of them is on the parent.
    pub fn are_on(&self, parent: &Object) -> bool {
        is_on(parent, &self.name) || self.has_legacy(parent)
    }

    /// Whether one of an earlier operator is on the parent.
    pub fn has_legacy(&self, parent: &Object) -> bool {
        self.legacy.iter().any(|legacy| is_on(parent, legacy))
    }

    fn contain(&self, finalizer: &String) -> bool {
        *finalizer == self.name || self.legacy.contains(finalizer)
    }
}

/// Where a parent is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It needs our finalizer before anything is made for it, in the place of one of an earlier operator if it has such.
    New,
    /// It is to be reconciled.
    Live,
    /// It is being deleted, and waits for our cleanup.
    Finalizing,
    /// It is being deleted, and is none of our business any more.
    Released,
}

impl Phase {
    /// That of a parent. `ours`: our finalizer is on it; `needed`: it has to be, before anything is made for it.
    pub fn of(deleting: bool, ours: bool, needed: bool) -> Self {
        match (deleting, ours) {
            (true, true) => Self::Finalizing,
            (true, false) => Self::Released,
            (false, false) if needed => Self::New,
            (false, _) => Self::Live,
        }
    }
}

/// Whether the finalizer is on the parent.
pub fn is_on(parent: &Object, finalizer: &str) -> bool {
    parent.finalizers().iter().any(|entry| entry == finalizer)
}

/// Whether a parent of which the watch says that it is gone has gone against the rules, as it was at last: with our finalizer on, and never
/// marked for deletion. Else we, or a person, have taken the finalizer off.
pub fn is_lost(parent: &Object, finalizer: &str) -> bool {
    !parent.is_deleting() && is_on(parent, finalizer)
}

/// Why a finalizer was not written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The parent has changed; it must be read again.
    #[error("the parent was changed at the same time")]
    Conflict(#[source] kube::Error),
    /// The parent is gone.
    #[error("the parent is gone")]
    Gone(#[source] kube::Error),
    /// Anything else.
    #[error("failed to write the finalizer")]
    Request(#[source] kube::Error),
}

/// Puts ours on, in the place of those of an earlier operator; the answer is the parent as it is from then on.
pub(crate) async fn add(api: &Api<Object>, parent: &Object, ours: &Ours) -> Result<Object, Error> {
    write(api, parent, with(parent, ours)).await
}

/// Takes all of ours off.
pub(crate) async fn remove(api: &Api<Object>, parent: &Object, ours: &Ours) -> Result<Object, Error> {
    write(api, parent, without(parent, ours)).await
}

fn with(parent: &Object, ours: &Ours) -> Vec<String> {
    let mut finalizers = without(parent, ours);
    finalizers.push(ours.name.clone());
    finalizers
}

fn without(parent: &Object, ours: &Ours) -> Vec<String> {
    parent.finalizers().iter().filter(|entry| !ours.contain(entry)).cloned().collect()
}

async fn write(api: &Api<Object>, parent: &Object, finalizers: Vec<String>) -> Result<Object, Error> {
    let patch = Patch::<()>::Json(patch(parent, &finalizers));
    api.patch(parent.name(), &PatchParams::default(), &patch).await.map_err(|error| Error::of(error, parent))
}

impl Error {
    /// What it means that the API server refuses a guarded write on a parent.
    pub(super) fn of(error: kube::Error, parent: &Object) -> Self {
        match () {
            () if lookup::is_absent(&error, parent.name()) => Self::Gone(error),
            // 422 is its word for a test that does not hold.
            () if is_status(&error, 422) || is_status(&error, 409) => Self::Conflict(error),
            () => Self::Request(error),
        }
    }
}

fn patch(parent: &Object, finalizers: &[String]) -> json_patch::Patch {
    let pointer = |name| PointerBuf::from_tokens(["metadata", name]);
    // A test for null holds where there is no list.
    let before = match parent.finalizers() {
        [] => Value::Null,
        before => before.into(),
    };
    json_patch::Patch(vec![
        PatchOperation::Test(TestOperation { path: pointer("uid"), value: parent.uid().into() }),
        PatchOperation::Test(TestOperation { path: pointer("finalizers"), value: before }),
        // `add` replaces what is there.
        PatchOperation::Add(AddOperation { path: pointer("finalizers"), value: finalizers.into() }),
    ])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OURS: &str = "pilothouse.dev/c-x-1";

    fn parent(finalizers: &[&str], deleting: bool) -> Object {
        let mut object = json!({"metadata": {"name": "p", "uid": "u", "finalizers": finalizers}});
        if deleting {
            object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        }
        Object::from_json(&object.to_string()).unwrap()
    }

    #[test]
    fn the_four_phases() {
        for (finalizers, deleting, needed, expected) in [
            (&[][..], false, true, Phase::New),
            (&["a/b"], false, true, Phase::New),
            (&[], false, false, Phase::Live),
            (&[OURS], false, true, Phase::Live),
            (&[OURS], false, false, Phase::Live),
            (&["a/b", OURS], true, true, Phase::Finalizing),
            (&[OURS], true, false, Phase::Finalizing),
            (&["a/b"], true, true, Phase::Released),
            (&[], true, false, Phase::Released),
        ] {
            let ours = is_on(&parent(finalizers, deleting), OURS);
            assert_eq!(Phase::of(deleting, ours, needed), expected, "{finalizers:?} {deleting} {needed}");
        }
    }

    #[test]
    fn c16_a_finalizer_of_an_earlier_operator_counts_as_ours_and_gives_way_to_it() {
        let ours = Ours::new(OURS, vec!["old/x".to_owned(), "older".to_owned()]);
        for (finalizers, deleting, cleans_up, expected) in [
            (&["old/x"][..], false, true, false),
            (&["a/b", OURS, "older"], false, true, false),
            (&[OURS], false, true, true),
            // A plugin without cleanup takes the place of nobody.
            (&["old/x"], false, false, false),
            (&["old/x", OURS], false, false, true),
            (&["a/b", "old/x"], true, true, true),
            (&["older"], true, false, true),
            (&["a/b"], true, true, false),
        ] {
            let parent = parent(finalizers, deleting);
            assert_eq!(ours.hold(&parent, cleans_up), expected, "{finalizers:?} {deleting} {cleans_up}");
        }
        let both = parent(&["old/x", "a/b", OURS, "older"], false);
        assert_eq!(with(&both, &ours), ["a/b", OURS]);
        assert_eq!(without(&both, &ours), ["a/b"]);
    }

    #[test]
    fn c11_a_parent_is_lost_only_if_it_went_with_our_finalizer_and_no_deletion() {
        assert!(is_lost(&parent(&["a/b", OURS], false), OURS));
        for (finalizers, deleting) in [(&[OURS][..], true), (&["a/b"], false), (&[], false)] {
            assert!(!is_lost(&parent(finalizers, deleting), OURS), "{finalizers:?} {deleting}");
        }
    }

    #[test]
    fn a_patch_tests_all_that_it_was_made_for() {
        let patch = patch(&parent(&["a/b"], false), &["a/b".to_owned(), OURS.to_owned()]);
        let expected = json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/metadata/finalizers", "value": ["a/b"]},
            {"op": "add", "path": "/metadata/finalizers", "value": ["a/b", OURS]},
        ]);
        assert_eq!(serde_json::to_value(patch).unwrap(), expected);
    }
}
