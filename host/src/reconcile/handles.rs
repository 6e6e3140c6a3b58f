//! The user's handles: annotations on a parent by which a person asks the host for something. What is done about it is told on the
//! parent, in an Event that says who asked.

use kube::{Api, ResourceExt as _, api::PartialObjectMeta};

use crate::object::{Object, ObjectKey};

/// `"true"`: reconcile nothing and clean up nothing, until it is taken away.
pub const PAUSED: &str = "pilothouse.dev/paused";
/// Anything, such as a time: reconcile now. Once that has succeeded, the message of `Synced` says so.
pub const RECONCILE_REQUESTED_AT: &str = "pilothouse.dev/reconcile-requested-at";
/// `"true"`: when the parent is deleted, let it go without cleanup. For what cannot be cleaned up any more.
pub const ABANDON_CLEANUP: &str = "pilothouse.dev/abandon-cleanup";
/// The id of a revision: while a rollout goes on, the parent has this one of the two that serve, whatever its share.
pub const REVISION: &str = "pilothouse.dev/revision";

/// Whether the parent carries this annotation with the value `"true"`.
pub(super) fn is_set(parent: &Object, annotation: &str) -> bool {
    parent.annotation(annotation).is_some_and(|value| value == "true")
}

/// What the message of `Synced` says when all is well.
pub(super) fn handled(parent: &Object) -> String {
    parent.annotation(RECONCILE_REQUESTED_AT).map_or_else(String::new, |request| {
        format!("reconciled as requested by annotation {RECONCILE_REQUESTED_AT}={request}")
    })
}

/// Who set the annotation: the name of a field manager, as far as the API server knows. Asked for only when there is something to
/// tell.
pub(super) async fn who_set(api: &Api<Object>, parent: &ObjectKey, annotation: &str) -> String {
    let unknown = || "somebody".to_owned();
    let Ok(meta) = api.get_metadata(&parent.name).await else { return unknown() };
    manager_of(&meta, annotation).map_or_else(unknown, |manager| format!("{manager:?}"))
}

fn manager_of(meta: &PartialObjectMeta<Object>, annotation: &str) -> Option<String> {
    let owns =
        |fields: &serde_json::Value| fields["f:metadata"]["f:annotations"].get(format!("f:{annotation}")).is_some();
    let entries = meta.managed_fields().iter();
    let mut owners = entries.filter(|entry| entry.fields_v1.as_ref().is_some_and(|fields| owns(&fields.0)));
    owners.next().and_then(|entry| entry.manager.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn who_set_an_annotation_is_in_the_managed_fields() {
        let meta = json!({"metadata": {"name": "w", "managedFields": [
            {"manager": "kubectl-create", "operation": "Update", "fieldsV1": {"f:spec": {}}},
            {"manager": "kubectl-annotate", "operation": "Update", "fieldsV1": {"f:metadata": {"f:annotations": {".": {}, "f:pilothouse.dev/paused": {}}}}},
        ]}});
        let meta: PartialObjectMeta<Object> = serde_json::from_value(meta).unwrap();
        assert_eq!(manager_of(&meta, PAUSED).as_deref(), Some("kubectl-annotate"));
        assert_eq!(manager_of(&meta, ABANDON_CLEANUP), None);
    }

    #[test]
    fn only_the_word_true_sets_a_handle() {
        let parent = |value: &str| {
            Object::from_json(&json!({"metadata": {"name": "w", "annotations": {PAUSED: value}}}).to_string()).unwrap()
        };
        assert!(is_set(&parent("true"), PAUSED));
        assert!(!is_set(&parent("false"), PAUSED) && !is_set(&parent("true"), ABANDON_CLEANUP));
    }
}
