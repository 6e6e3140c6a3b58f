//! What a plugin says of itself: the answer of `describe` in the WIT, checked.

use std::fmt;

use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::core::GroupVersionKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::capability;

/// The answer of `describe`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Description {
    /// The kind that it reconciles.
    pub parent: KindName,
    /// The kinds of its children.
    #[serde(default)]
    pub children: Vec<KindName>,
    /// The kinds that it looks at.
    #[serde(default)]
    pub related: Vec<KindName>,
    /// CustomResourceDefinitions that belong to it.
    #[serde(default)]
    pub crds: Vec<Value>,
    /// The capabilities that it needs.
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// The OpenAPI schema of its config.
    #[serde(default)]
    pub config_schema: Option<Value>,
    /// RBAC rules beyond the usual ones.
    #[serde(default)]
    pub rights: Vec<PolicyRule>,
}

/// A kind by name.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KindName {
    /// `group/version`, or `version` alone for the core group.
    pub api_version: String,
    /// The kind.
    pub kind: String,
}

/// Why a description is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not the JSON document that the contract asks for.
    #[error("the plugin's describe() is not what the contract asks for")]
    Json(#[source] serde_json::Error),
    /// A kind has no proper apiVersion.
    #[error("{field} in the plugin's describe() is no apiVersion; write it as apps/v1 or v1")]
    ApiVersion {
        /// Where it stands.
        field: String,
    },
    /// A kind is missing its name.
    #[error("{field} in the plugin's describe() is empty; name the kind")]
    EmptyKind {
        /// Where it stands.
        field: String,
    },
    /// A kind is there twice, maybe in two versions: its objects are the same, so which of them would be meant?
    #[error("{field} in the plugin's describe() is a kind that is there already; declare it once, in one version")]
    KindTwice {
        /// Where it stands.
        field: String,
    },
    /// It needs what this host does not have.
    #[error("the plugin needs {0:?}, which this host does not serve; it serves: log, {known}", known = capability::NAMES.join(", "))]
    Capability(String),
}

impl fmt::Display for KindName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind, self.api_version)
    }
}

impl KindName {
    fn check(&self, field: &str) -> Result<(), Error> {
        if self.kind.is_empty() {
            return Err(Error::EmptyKind { field: format!("{field}.kind") });
        }
        let parts: Vec<_> = self.api_version.split('/').collect();
        if parts.len() > 2 || parts.contains(&"") {
            return Err(Error::ApiVersion { field: format!("{field}.apiVersion") });
        }
        Ok(())
    }

    /// Whether the other is the same kind, in whatever version.
    pub fn is_same_kind(&self, other: &Self) -> bool {
        self.kind == other.kind && self.gvk().group == other.gvk().group
    }

    /// `Kind.group`: the kind whatever its version.
    pub fn group_kind(&self) -> String {
        format!("{}.{}", self.kind, self.gvk().group).trim_end_matches('.').to_owned()
    }

    /// The kind in parts.
    pub fn gvk(&self) -> GroupVersionKind {
        let (group, version) = self.api_version.split_once('/').unwrap_or(("", &self.api_version));
        GroupVersionKind::gvk(group, version, &self.kind)
    }
}

impl Description {
    /// Reads the answer of `describe`.
    ///
    /// # Errors
    /// If it is not what the contract asks for, naming the field.
    pub fn read(json: &str) -> Result<Self, Error> {
        let description: Self = serde_json::from_str(json).map_err(Error::Json)?;
        description.parent.check("parent")?;
        for (at, child) in description.children.iter().enumerate() {
            child.check(&format!("children[{at}]"))?;
            if description.children[..at].iter().any(|other| other.is_same_kind(child)) {
                return Err(Error::KindTwice { field: format!("children[{at}]") });
            }
        }
        for (at, related) in description.related.iter().enumerate() {
            related.check(&format!("related[{at}]"))?;
        }
        match description.capabilities.iter().find(|name| *name != "log" && capability::of_name(name).is_none()) {
            Some(unknown) => Err(Error::Capability(unknown.clone())),
            None => Ok(description),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_checked_by_field() {
        let read = |json: &str| Description::read(json).map_err(|error| crate::telemetry::chain(&error));
        let good = read(
            r#"{"parent":{"apiVersion":"t.example/v1","kind":"Widget"},"children":[{"apiVersion":"v1","kind":"Secret"}]}"#,
        );
        assert_eq!(good.unwrap().children[0].gvk().group, "");
        let bad = read(r#"{"parent":{"apiVersion":"a/b/c","kind":"Widget"}}"#).unwrap_err();
        assert!(bad.contains("parent.apiVersion"), "{bad}");
        let bad = read(r#"{"parent":{"apiVersion":"v1","kind":"X"},"children":[{"apiVersion":"v1","kind":""}]}"#)
            .unwrap_err();
        assert!(bad.contains("children[0].kind"), "{bad}");
        let twice = r#"[{"apiVersion":"autoscaling/v1","kind":"H"},{"apiVersion":"autoscaling/v2","kind":"H"}]"#;
        let bad = read(&format!(r#"{{"parent":{{"apiVersion":"v1","kind":"X"}},"children":{twice}}}"#)).unwrap_err();
        assert!(bad.contains("children[1]"), "{bad}");
        let bad = read(r#"{"parent":{"apiVersion":"v1","kind":"X"},"childs":[]}"#).unwrap_err();
        assert!(bad.contains("childs"), "{bad}");
        let wants =
            |names: &str| read(&format!(r#"{{"parent":{{"apiVersion":"v1","kind":"X"}},"capabilities":{names}}}"#));
        assert_eq!(wants(r#"["log","sql"]"#).unwrap().capabilities, ["log", "sql"]);
        let bad = wants(r#"["log","smtp"]"#).unwrap_err();
        assert!(bad.contains("\"smtp\"") && bad.contains("log, http, kube, sql"), "{bad}");
    }
}
