//! How the host treats a child.

use serde::Serialize;

/// How the host treats a child; the default of each is what most children want. See `child.options` in the contract.
///
/// ```
/// # use pilothouse_sdk::prelude::*;
/// # type Desired = pilothouse_sdk::Desired<()>;
/// let claim = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "data" } });
/// let desired = Desired::new().child_with(claim, ChildOptions::new().orphan().adopt_if_unowned());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[must_use]
pub struct ChildOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    update_strategy: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    adoption_policy: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deletion_policy: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    adopt_field_managers: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wave: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    readiness: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    force: Option<bool>,
}

impl ChildOptions {
    /// The defaults: a change that the API server refuses is reported, an object of somebody else is left alone, and the child is deleted
    /// with its parent.
    pub fn new() -> Self {
        Self::default()
    }

    /// When a field is changed that can be set only at creation, delete the child and make it anew; a Job that runs, once it has finished.
    pub fn recreate(self) -> Self {
        Self { update_strategy: Some("Recreate"), ..self }
    }

    /// When a field is changed that can be set only at creation, leave the child as it is until somebody deletes it.
    pub fn on_delete(self) -> Self {
        Self { update_strategy: Some("OnDelete"), ..self }
    }

    /// Take an object of this name that is there already, if no controller owns it.
    pub fn adopt_if_unowned(self) -> Self {
        Self { adoption_policy: Some("IfUnowned"), ..self }
    }

    /// Leave the child when it is no longer wanted, and when its parent is gone.
    pub fn orphan(self) -> Self {
        Self { deletion_policy: Some("Orphan"), ..self }
    }

    /// These field managers wrote the child before this plugin did, and no longer do: their fields become this plugin's, so that those
    /// it does not name are removed.
    pub fn adopt_field_managers(self, managers: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { adopt_field_managers: managers.into_iter().map(Into::into).collect(), ..self }
    }

    /// Leave a field to another field manager that has set it to another value, and report that.
    pub fn without_force(self) -> Self {
        Self { force: Some(false), ..self }
    }

    /// Make and change this child only when all children of earlier waves are ready, and delete it before them; 0 (the default) to 1,000.
    pub fn wave(self, wave: u16) -> Self {
        Self { wave: Some(wave), ..self }
    }

    /// Whether this child is ready is said here, rather than by the conventions of its kind. One that does not exist never is.
    pub fn ready(self, ready: bool) -> Self {
        Self { readiness: Some(if ready { "Ready" } else { "NotReady" }), ..self }
    }

    /// As JSON: texts, numbers, booleans and lists of texts always are.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_written_as_the_contract_has_them() {
        assert_eq!(ChildOptions::new().json(), "{}");
        assert_eq!(
            ChildOptions::new().recreate().orphan().adopt_if_unowned().adopt_field_managers(["old"]).json(),
            r#"{"updateStrategy":"Recreate","adoptionPolicy":"IfUnowned","deletionPolicy":"Orphan","adoptFieldManagers":["old"]}"#
        );
        assert_eq!(ChildOptions::new().on_delete().json(), r#"{"updateStrategy":"OnDelete"}"#);
        assert_eq!(ChildOptions::new().wave(2).ready(false).json(), r#"{"wave":2,"readiness":"NotReady"}"#);
        assert_eq!(ChildOptions::new().ready(true).json(), r#"{"readiness":"Ready"}"#);
        assert_eq!(ChildOptions::new().without_force().json(), r#"{"force":false}"#);
    }
}
