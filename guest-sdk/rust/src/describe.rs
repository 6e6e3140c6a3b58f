//! What a plugin says about itself, once, when it is loaded.

use serde::Serialize;
use serde_json::Value;

use crate::log;

/// What a plugin reconciles and needs.
///
/// ```
/// # use pilothouse_sdk::prelude::*;
/// Describe::parent("v1", "ConfigMap").child("apps/v1", "Deployment").capability("sql");
/// ```
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
#[must_use]
pub struct Describe {
    parent: Kind,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    children: Vec<Kind>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    related: Vec<Kind>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    crds: Vec<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    capabilities: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    config_schema: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rights: Vec<Value>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Kind {
    api_version: String,
    kind: String,
}

impl Kind {
    fn new(api_version: &str, kind: &str) -> Self {
        Self { api_version: api_version.to_owned(), kind: kind.to_owned() }
    }
}

impl Describe {
    /// The parent is this kind, which exists already or is defined elsewhere.
    pub fn parent(api_version: &str, kind: &str) -> Self {
        Self {
            parent: Kind::new(api_version, kind),
            children: Vec::new(),
            related: Vec::new(),
            crds: Vec::new(),
            capabilities: Vec::new(),
            config_schema: None,
            rights: Vec::new(),
        }
    }

    /// The parent is the kind that this CustomResourceDefinition (JSON) defines, in its storage version. `pilothouse manifests`
    /// prints it. Usually `Describe::crd(include_str!("../crd.json"))`.
    pub fn crd(json: &str) -> Self {
        let crd: Value = serde_json::from_str(json).unwrap_or_else(|err| {
            // The host refuses a plugin without a parent kind; the tests of a plugin see it before.
            log::error!("the plugin's CRD is no JSON: {err}");
            Value::Null
        });
        let spec = &crd["spec"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let stored = spec["versions"].as_array().and_then(|all| all.iter().find(|version| version["storage"] == true));
        let version = stored.map(|version| text(&version["name"])).unwrap_or_default();
        let mut describe = Self::parent(&format!("{}/{version}", text(&spec["group"])), &text(&spec["names"]["kind"]));
        describe.crds.push(crd);
        describe
    }

    /// A kind of child that `reconcile` may return. The host watches it, and refuses others.
    pub fn child(mut self, api_version: &str, kind: &str) -> Self {
        self.children.push(Kind::new(api_version, kind));
        self
    }

    /// A kind that [`Relate::relate`](crate::Relate::relate) may select.
    pub fn related(mut self, api_version: &str, kind: &str) -> Self {
        self.related.push(Kind::new(api_version, kind));
        self
    }

    /// A capability that the plugin needs, such as `sql`. `log` needs no mention.
    pub fn capability(mut self, name: &str) -> Self {
        self.capabilities.push(name.to_owned());
        self
    }

    /// The OpenAPI v3 schema of the reconciler's `spec.config`.
    pub fn config_schema(mut self, schema: Value) -> Self {
        self.config_schema = Some(schema);
        self
    }

    /// An RBAC policy rule that the plugin needs beyond the usual ones for parent and children.
    pub fn right(mut self, rule: Value) -> Self {
        self.rights.push(rule);
        self
    }

    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}
