//! `pilothouse inspect`: what a component is, for a person who was handed one.
//!
//! What cannot be loaded is shown as far as it can be read, and then why, in the words that the host would use.

use std::{
    io::{self, Write as _},
    path::PathBuf,
    sync::Arc,
};

use anyhow::Context as _;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::{
    crd::Limits,
    identity, output,
    plugin::{self, Description, Engine, GUEST_MEMORY, Plugin, Surface, describe::KindName},
    registry::{self, Reference},
    telemetry, transfer,
};

/// What to inspect.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The component: a file, or where it is in a registry, as registry.example.com/team/plugin:1.0.
    #[arg(value_name = "FILE|REFERENCE")]
    plugin: PathBuf,
    /// How it is shown.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
    #[command(flatten)]
    registry: registry::Options,
}

/// What there is to say of a component: the document of `pilothouse inspect -o json`. Its keys are there to stay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// The file, as it was named; missing if it is in a registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Where it is in a registry, with its digest there; missing if it is a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Its size in bytes.
    pub size: usize,
    /// Its SHA-256, in hex.
    pub digest: String,
    /// `component`, `module` (a core module, which is no plugin) or `unknown`.
    pub format: plugin::Format,
    /// What it exports, in the order of the file.
    pub exports: Vec<Interface>,
    /// What it imports, likewise.
    pub imports: Vec<Interface>,
    /// What it says of itself; these keys are missing if it could not be asked.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub description: Option<Described>,
    /// Why this host does not serve it; missing if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// An import or an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Interface {
    /// Its name, as `pilothouse:plugin/log@0.1.0`.
    pub name: String,
    /// Whether this host has what is imported, or calls what is exported.
    pub served: bool,
}

/// What a plugin says of itself (`describe` in the contract).
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Described {
    /// The kind that it reconciles, as `{"apiVersion", "kind"}`.
    pub parent: KindName,
    /// The kinds of its children, likewise.
    pub children: Vec<KindName>,
    /// The kinds that it looks at, likewise.
    pub related: Vec<KindName>,
    /// The CustomResourceDefinitions that it carries, without their schemas.
    pub crds: Vec<Crd>,
    /// The capabilities that it asks for by name.
    pub capabilities: Vec<String>,
    /// The OpenAPI schema of its config, or null.
    pub config_schema: Option<Value>,
    /// The RBAC rules that it asks for beyond the usual ones.
    pub rights: Vec<PolicyRule>,
}

/// A CustomResourceDefinition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Crd {
    /// Its name, as `myapps.mygroup.example.com`.
    pub name: String,
    /// The versions that it defines.
    pub versions: Vec<String>,
}

/// Shows a component.
///
/// # Errors
/// If it cannot be read, or this host does not serve it; then it was shown all the same.
pub async fn inspect(options: &Options) -> anyhow::Result<()> {
    let (source, bytes) = read(options).await?;
    let engine = Arc::new(Engine::new(GUEST_MEMORY)?);
    let mut inspection = Inspection::of(source, &bytes);
    let opened = Plugin::open(&engine, None, bytes, Limits::default().of_a_call(), Arc::default()).await;
    let served = opened.map(|plugin| inspection.description = Some(Described::of(plugin.description())));
    inspection.error = served.as_ref().err().map(|error| telemetry::chain(error));
    match options.output {
        output::Format::Text => anstream::stdout().lock().write_all(inspection.text()?.as_bytes())?,
        output::Format::Json => output::json(&inspection)?,
    }
    Ok(served?)
}

/// Where a component has been found.
enum Source {
    File(String),
    Registry(Reference),
}

async fn read(options: &Options) -> anyhow::Result<(Source, Vec<u8>)> {
    let name = options.plugin.display().to_string();
    let file = std::fs::read(&options.plugin);
    let absent = file.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    match name.parse::<Reference>() {
        Ok(reference) if absent => {
            let pulled = transfer::fetch(&reference, &options.registry).await?;
            Ok((Source::Registry(reference.pinned(pulled.digest)), pulled.bytes))
        }
        _ => Ok((Source::File(name.clone()), file.with_context(|| format!("failed to read {name}"))?)),
    }
}

impl Inspection {
    /// What its bytes tell, without running it.
    fn of(source: Source, bytes: &[u8]) -> Self {
        let Surface { format, imports, exports } = Surface::of(bytes);
        let interfaces = |names: Vec<String>, serves: fn(&str) -> bool| {
            let interface = |name: String| Interface { served: serves(&name), name };
            names.into_iter().map(interface).collect()
        };
        let (file, reference) = match source {
            Source::File(file) => (Some(file), None),
            Source::Registry(reference) => (None, Some(reference.to_string())),
        };
        Self {
            file,
            reference,
            size: bytes.len(),
            digest: identity::hex(&Sha256::digest(bytes), 32),
            format,
            exports: interfaces(exports, plugin::serves_export),
            imports: interfaces(imports, plugin::serves_import),
            description: None,
            error: None,
        }
    }

    /// For a person: a label, and beside it what there is, a line each.
    fn text(&self) -> io::Result<String> {
        let format = match self.format {
            plugin::Format::Component => "WebAssembly component",
            plugin::Format::Module => "WebAssembly core module",
            plugin::Format::Unknown => "no WebAssembly",
        };
        let source = self.reference.iter().chain(&self.file).cloned().collect();
        let mut rows = vec![
            (if self.reference.is_some() { "Reference" } else { "File" }, source),
            ("Format", vec![format.to_owned()]),
            ("Size", vec![size(self.size)]),
            ("Digest", vec![format!("sha256:{}", self.digest)]),
            ("Exports", interfaces(&self.exports)),
            ("Imports", interfaces(&self.imports)),
        ];
        if let Some(description) = &self.description {
            rows.extend(description.rows()?);
        }
        Ok(output::labelled(&rows))
    }
}

impl Described {
    fn of(description: &Description) -> Self {
        // Named one by one, so that what a description gains is not forgotten here.
        let Description { parent, children, related, crds, capabilities, config_schema, rights } = description;
        Self {
            parent: parent.clone(),
            children: children.clone(),
            related: related.clone(),
            crds: crds.iter().map(Crd::of).collect(),
            capabilities: capabilities.clone(),
            config_schema: config_schema.clone(),
            rights: rights.clone(),
        }
    }

    fn rows(&self) -> io::Result<Vec<(&'static str, Vec<String>)>> {
        let crds: Vec<_> = self.crds.iter().map(|crd| [crd.name.clone(), crd.versions.join(", ")]).collect();
        let config = match &self.config_schema {
            None => vec!["any".to_owned()],
            Some(schema) => config(schema)?,
        };
        Ok(vec![
            ("Parent", kinds(std::slice::from_ref(&self.parent))),
            ("Children", kinds(&self.children)),
            ("Related", kinds(&self.related)),
            ("CRDs", output::columns(&crds)),
            ("Capabilities", self.capabilities.clone()),
            ("Config", config),
            ("Rights", self.rights.iter().map(right).collect()),
        ])
    }
}

impl Crd {
    fn of(crd: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let versions = crd["spec"]["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
        Self {
            name: text(&crd["metadata"]["name"]),
            versions: versions.iter().map(|version| text(&version["name"])).collect(),
        }
    }
}

fn interfaces(interfaces: &[Interface]) -> Vec<String> {
    let served = |served| if served { "" } else { "not served by this host" };
    let rows: Vec<_> = interfaces.iter().map(|it| [it.name.clone(), served(it.served).to_owned()]).collect();
    output::columns(&rows)
}

fn kinds(kinds: &[KindName]) -> Vec<String> {
    let rows: Vec<_> = kinds.iter().map(|kind| [kind.kind.clone(), kind.api_version.clone()]).collect();
    output::columns(&rows)
}

/// The properties of the config; or all of the schema, if it is not that of an object.
fn config(schema: &Value) -> io::Result<Vec<String>> {
    let Some(properties) = schema["properties"].as_object() else {
        return Ok(output::to_yaml(schema)?.lines().map(str::to_owned).collect());
    };
    let required = schema["required"].as_array().map(Vec::as_slice).unwrap_or_default();
    let row = |(name, property): (&String, &Value)| {
        let text = |key: &str| property[key].as_str().unwrap_or_default().lines().next().unwrap_or_default().to_owned();
        let required = if required.iter().any(|required| required == name.as_str()) { "required" } else { "optional" };
        [name.clone(), text("type"), required.to_owned(), text("description")]
    };
    Ok(output::columns(&properties.iter().map(row).collect::<Vec<_>>()))
}

/// `get, list secrets`, or `get, list deployments.apps (only web)`.
fn right(rule: &PolicyRule) -> String {
    let groups = rule.api_groups.as_deref().unwrap_or_default();
    let resources = rule.resources.iter().flatten().flat_map(|resource| {
        let name = move |group: &String| format!("{resource}.{group}").trim_end_matches('.').to_owned();
        groups.iter().map(name)
    });
    let what: Vec<_> = resources.chain(rule.non_resource_urls.iter().flatten().cloned()).collect();
    let only = rule.resource_names.as_ref().filter(|names| !names.is_empty());
    let only = only.map(|names| format!(" (only {})", names.join(", "))).unwrap_or_default();
    format!("{} {}{only}", rule.verbs.join(", "), what.join(", "))
}

fn size(bytes: usize) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        _ => format!("{} KB ({bytes} bytes)", bytes.div_ceil(1000)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_description_as_a_person_reads_it() {
        let description = json!({
            "parent": {"apiVersion": "t.example/v1", "kind": "Widget"},
            "children": [{"apiVersion": "v1", "kind": "Secret"}, {"apiVersion": "apps/v1", "kind": "Deployment"}],
            "crds": [{"metadata": {"name": "widgets.t.example"}, "spec": {"versions": [{"name": "v1"}, {"name": "v2"}]}}],
            "capabilities": ["http"],
            "configSchema": {"type": "object", "required": ["url"], "properties": {
                "url": {"type": "string", "description": "Where it is.\nMore of it."}, "retries": {"type": "integer"}}},
            "rights": [{"apiGroups": ["", "apps"], "resources": ["pods"], "verbs": ["get", "list"], "resourceNames": ["web"]}],
        });
        let described = Described::of(&Description::read(&description.to_string()).unwrap());
        let text = anstream::adapter::strip_str(&output::labelled(&described.rows().unwrap())).to_string();
        assert_eq!(
            text,
            "Parent        Widget  t.example/v1\n\
             Children      Secret      v1\n\
             \x20             Deployment  apps/v1\n\
             Related       none\n\
             CRDs          widgets.t.example  v1, v2\n\
             Capabilities  http\n\
             Config        url      string   required  Where it is.\n\
             \x20             retries  integer  optional\n\
             Rights        get, list pods, pods.apps (only web)\n"
        );
    }

    #[test]
    fn the_keys_of_the_json_document() {
        let mut inspection = Inspection::of(Source::File("x.wasm".to_owned()), b"no component");
        inspection.error = Some("why".to_owned());
        let value = serde_json::to_value(&inspection).unwrap();
        let digest = &value["digest"];
        assert_eq!(
            value,
            json!({"file": "x.wasm", "size": 12, "digest": digest, "format": "unknown", "exports": [], "imports": [], "error": "why"})
        );
        let description = Description::read(r#"{"parent":{"apiVersion":"v1","kind":"X"}}"#).unwrap();
        (inspection.description, inspection.error) = (Some(Described::of(&description)), None);
        let value = serde_json::to_value(&inspection).unwrap();
        assert_eq!(value["parent"], json!({"apiVersion": "v1", "kind": "X"}));
        assert_eq!((&value["configSchema"], value.get("error")), (&Value::Null, None));
    }
}
