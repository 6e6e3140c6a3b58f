//! The CustomResourceDefinition of a plugin's parent, generated from the author's types.
//!
//! It is committed (as `crd.json` beside the plugin's `Cargo.toml`), so that people can read it and the component can carry it
//! without the generator. One test keeps it current:
//!
//! ```no_run
//! # use pilothouse_sdk::{prelude::*, crd::Crd};
//! # fn test<MyApp: Plugin>() where MyApp::Spec: schemars::JsonSchema, MyApp::Status: schemars::JsonSchema {
//! Crd::of::<MyApp>("mygroup.example.com/v1", "MyApp")
//!     .column("Replicas", "integer", ".spec.replicas")
//!     .column("Age", "date", ".metadata.creationTimestamp")
//!     .check(concat!(env!("CARGO_MANIFEST_DIR"), "/crd.json"));
//! # }
//! ```

use std::path::Path;

use kube_core::schema::{OptionalEnum, OptionalIntOrString, StructuralSchemaRewriter};
use schemars::generate::SchemaSettings;
use schemars::transform::{AddNullable, Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use crate::Plugin;

/// A CustomResourceDefinition with one version.
///
/// Status is a subresource and always has `conditions` and `observedGeneration`, which are the host's. No field of the
/// status is required, since the host writes conditions also before the plugin has answered.
#[derive(Debug, Clone)]
#[must_use]
pub struct Crd {
    group: String,
    version: String,
    kind: String,
    plural: String,
    short_names: Vec<String>,
    scope: &'static str,
    columns: Vec<Value>,
    scale: Option<Value>,
    spec: Value,
    status: Value,
}

impl Crd {
    /// The definition of a namespaced kind. `api_version` is group and version, such as `example.com/v1`; the plural is the kind
    /// in lower case with an `s`.
    pub fn of<P: Plugin>(api_version: &str, kind: &str) -> Self
    where
        P::Spec: JsonSchema,
        P::Status: JsonSchema,
    {
        let (group, version) = api_version.split_once('/').unwrap_or((api_version, "v1"));
        let mut status = schema::<P::Status>();
        if let Value::Object(status) = &mut status {
            status.insert("type".to_owned(), "object".into());
            status.remove("required");
            status.remove("nullable");
            let properties = status.entry("properties").or_insert_with(|| Map::new().into());
            properties["observedGeneration"] = observed_generation();
            properties["conditions"] = conditions();
        }
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            kind: kind.to_owned(),
            plural: format!("{}s", kind.to_lowercase()),
            short_names: Vec::new(),
            scope: "Namespaced",
            columns: Vec::new(),
            scale: None,
            spec: schema::<P::Spec>(),
            status,
        }
    }

    /// Another plural, in lower case.
    pub fn plural(mut self, plural: &str) -> Self {
        plural.clone_into(&mut self.plural);
        self
    }

    /// A short name for `kubectl get`.
    pub fn short_name(mut self, name: &str) -> Self {
        self.short_names.push(name.to_owned());
        self
    }

    /// The kind is of cluster scope.
    pub fn cluster_scoped(mut self) -> Self {
        self.scope = "Cluster";
        self
    }

    /// A column of `kubectl get`; `kind` is `string`, `integer`, `number`, `boolean` or `date`.
    pub fn column(mut self, name: &str, kind: &str, json_path: &str) -> Self {
        self.columns.push(json!({ "name": name, "type": kind, "jsonPath": json_path }));
        self
    }

    /// `kubectl scale` and autoscalers work on the parent itself: the paths of the wanted and the present number, and of the
    /// label selector as text (empty: none, then autoscalers do not).
    pub fn scale(mut self, spec_path: &str, status_path: &str, selector_path: &str) -> Self {
        let mut scale = json!({ "specReplicasPath": spec_path, "statusReplicasPath": status_path });
        if !selector_path.is_empty() {
            scale["labelSelectorPath"] = selector_path.into();
        }
        self.scale = Some(scale);
        self
    }

    /// The definition, of `apiextensions.k8s.io/v1`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut names = json!({
            "kind": self.kind,
            "listKind": format!("{}List", self.kind),
            "plural": self.plural,
            "singular": self.kind.to_lowercase(),
        });
        if !self.short_names.is_empty() {
            names["shortNames"] = json!(self.short_names);
        }
        let mut subresources = json!({ "status": {} });
        if let Some(scale) = &self.scale {
            subresources["scale"] = scale.clone();
        }
        let mut version = json!({
            "name": self.version,
            "served": true,
            "storage": true,
            "subresources": subresources,
            "schema": {
                "openAPIV3Schema": {
                    "type": "object",
                    "required": ["spec"],
                    "properties": { "spec": self.spec, "status": self.status },
                },
            },
        });
        if !self.columns.is_empty() {
            version["additionalPrinterColumns"] = json!(self.columns);
        }
        sorted(json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": { "name": format!("{}.{}", self.plural, self.group) },
            "spec": { "group": self.group, "names": names, "scope": self.scope, "versions": [version] },
        }))
    }

    /// For a test: fails when the file is not this definition. With `UPDATE_CRD=1` in the environment it writes the file
    /// instead.
    ///
    /// # Panics
    /// When the file is not current, or cannot be written.
    #[allow(clippy::panic, reason = "called from a test, where a panic is how it fails")]
    pub fn check(&self, file: impl AsRef<Path>) {
        let file = file.as_ref();
        let current = format!("{:#}\n", self.to_json());
        if std::env::var_os("UPDATE_CRD").is_some() {
            std::fs::write(file, current).unwrap_or_else(|err| panic!("cannot write {}: {err}", file.display()));
        } else {
            let committed = std::fs::read_to_string(file).unwrap_or_default();
            assert!(committed == current, "{} is not current: run `UPDATE_CRD=1 cargo test`", file.display());
        }
    }
}

/// The structural schema of a type, as the API server wants it.
fn schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3()
        .with(|settings| {
            settings.inline_subschemas = true;
            settings.meta_schema = None;
        })
        .with_transform(AddNullable::default())
        .with_transform(StructuralSchemaRewriter)
        .with_transform(OptionalEnum)
        .with_transform(OptionalIntOrString)
        .with_transform(KnownFormats);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    if let Value::Object(schema) = &mut schema {
        // The name of a Rust type tells a reader of the CRD nothing.
        schema.remove("title");
    }
    schema
}

/// Removes the formats of Rust's integers that Kubernetes does not know: it warns about each at `kubectl apply`.
#[derive(Debug, Clone)]
struct KnownFormats;

impl Transform for KnownFormats {
    fn transform(&mut self, schema: &mut Schema) {
        let format = schema.get("format").and_then(Value::as_str).unwrap_or_default();
        if format.starts_with("uint") || ["int", "int8", "int16", "int128"].contains(&format) {
            schema.remove("format");
        }
        transform_subschemas(self, schema);
    }
}

/// The same with sorted keys, however the map of `serde_json` is built: features of it differ between builds.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            entries.sort_by(|one, other| one.0.cmp(&other.0));
            Value::Object(entries.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

fn observed_generation() -> Value {
    json!({ "type": "integer", "format": "int64", "minimum": 0, "description": "The generation that this status is about." })
}

/// `metav1.Condition`, as the Kubernetes API conventions have it.
fn conditions() -> Value {
    let camel_case = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$";
    json!({
        "type": "array",
        "description": "What is known about the state of this object.",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "reason", "message", "lastTransitionTime"],
            "properties": {
                "type": { "type": "string", "maxLength": 316 },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "reason": { "type": "string", "minLength": 1, "maxLength": 1024, "pattern": camel_case },
                "message": { "type": "string", "maxLength": 32768 },
                "lastTransitionTime": { "type": "string", "format": "date-time" },
                "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0 },
            },
        },
    })
}
