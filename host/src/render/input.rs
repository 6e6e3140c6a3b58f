//! The objects of `pilothouse render`: read from files, completed by what a cluster would have given them, and put in the order
//! in which a plugin is shown them. Pure, but for [`read`].

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Read as _},
    path::Path,
};

use serde_json::{Map, Value, json};

use crate::{
    object::{Kind, Object},
    state::ChildKey,
};

/// An object in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Where it stands.
    pub origin: Origin,
    /// The object.
    pub object: Map<String, Value>,
}

/// Where an object stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    file: String,
    /// Counted from 1, empty documents left out.
    document: usize,
    /// The place in the `items` of a list.
    item: Option<usize>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, document {}", self.file, self.document)?;
        self.item.map_or(Ok(()), |item| write!(f, ", items[{item}]"))
    }
}

/// Why the input cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("failed to read {file}")]
    Read {
        /// The file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// A document is not YAML.
    #[error("{origin} is no YAML")]
    Yaml {
        /// Which one.
        origin: Origin,
        /// Why not.
        source: Box<serde_saphyr::Error>,
    },
    /// A document is no object.
    #[error("{0} is no object; it must have apiVersion, kind and metadata")]
    NoObject(Origin),
    /// The metadata has a value of another type than that of Kubernetes.
    #[error("{origin}: metadata is not as Kubernetes has it")]
    Metadata {
        /// Which document.
        origin: Origin,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A field is missing or wrong.
    #[error("{origin}: {path} {problem}")]
    Field {
        /// Which document.
        origin: Origin,
        /// Which field.
        path: &'static str,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// An object is there twice.
    #[error("{0} is {1} a second time")]
    Twice(Origin, String),
    /// The wrong number of objects.
    #[error("{file} has {count} documents; {what} is one")]
    NotOne {
        /// The file.
        file: String,
        /// How many there are.
        count: usize,
        /// What should be in it.
        what: &'static str,
    },
}

/// The text of a file; `-` is standard input.
///
/// # Errors
/// If it cannot be read as text.
pub fn read(file: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let read = match file.to_str() {
        Some("-") => io::stdin().lock().read_to_string(&mut text).map(|_| text),
        _ => std::fs::read_to_string(file),
    };
    read.map_err(|source| Error::Read { file: name(file), source })
}

/// How a file is called in messages.
pub fn name(file: &Path) -> String {
    if file.as_os_str() == "-" { "standard input".to_owned() } else { file.display().to_string() }
}

/// The objects in YAML or JSON text; a list, as `kubectl get -o yaml` prints it, counts as its items.
///
/// # Errors
/// If a document is no object.
pub fn documents(file: &str, text: &str) -> Result<Vec<Input>, Error> {
    let mut inputs = Vec::new();
    let options = serde_saphyr::options! { with_snippet: false };
    let mut bytes = text.as_bytes();
    for (at, document) in serde_saphyr::read_with_options::<_, Value>(&mut bytes, options).enumerate() {
        let origin = Origin { file: file.to_owned(), document: at + 1, item: None };
        let document = match document {
            Ok(document) => document,
            Err(error) => return Err(Error::Yaml { origin, source: error.into() }),
        };
        let Value::Object(mut object) = document else { return Err(Error::NoObject(origin)) };
        let is_list = object.get("kind").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("List"));
        match object.remove("items") {
            Some(Value::Array(items)) if is_list => {
                for (at, item) in items.into_iter().enumerate() {
                    let origin = Origin { item: Some(at), ..origin.clone() };
                    let Value::Object(object) = item else { return Err(Error::NoObject(origin)) };
                    inputs.push(Input { origin, object });
                }
            }
            items => {
                object.extend(items.map(|items| ("items".to_owned(), items)));
                inputs.push(Input { origin, object });
            }
        }
    }
    Ok(inputs)
}

/// The config in YAML or JSON text.
///
/// # Errors
/// If it is not one object.
pub fn config(file: &str, text: &str) -> Result<Map<String, Value>, Error> {
    Ok(only(file, "the config", documents(file, text)?)?.object)
}

fn only(file: &str, what: &'static str, mut inputs: Vec<Input>) -> Result<Input, Error> {
    match (inputs.pop(), inputs.len()) {
        (Some(input), 0) => Ok(input),
        (_, others) => Err(Error::NotOne { file: file.to_owned(), count: others + usize::from(others > 0), what }),
    }
}

/// The parent.
#[derive(Clone, Debug)]
pub struct Parent {
    /// As the plugin sees it.
    pub object: Object,
    /// Whether its UID is of the file, and not ours.
    pub has_uid: bool,
}

/// The parent in YAML or JSON text. `deleting` is when its deletion began, if it is being deleted and does not say itself.
///
/// # Errors
/// If it is not one object of this kind.
pub fn parent(file: &str, text: &str, kind: &Kind, deleting: Option<&str>) -> Result<Parent, Error> {
    let mut input = only(file, "a parent", documents(file, text)?)?;
    let (api_version, name) = input.kind()?;
    if (api_version, name) != (kind.api.api_version.as_str(), kind.api.kind.as_str()) {
        return input.refuse("kind", format!("is {name} ({api_version}), and the plugin reconciles {kind}"));
    }
    let has_uid = input.metadata()?.contains_key("uid");
    input.complete(kind, "default", PARENT)?;
    let metadata = input.metadata()?;
    metadata.entry("generation").or_insert(1.into());
    if let Some(deleting) = deleting {
        metadata.entry("deletionTimestamp").or_insert(deleting.into());
    }
    Ok(Parent { object: input.read()?, has_uid })
}

/// The number of the parent; those of the others are above it.
const PARENT: usize = 1;
/// When all that does not say it was made.
const CREATED: &str = "2000-01-01T00:00:00Z";

/// An object beside the parent.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Which one.
    pub key: ChildKey,
    /// As it was read, `metadata.managedFields` included.
    pub value: Value,
    /// As the plugin sees it.
    pub object: Object,
}

/// Objects of `kinds`, sorted as the contract says. `role` is what `describe` calls them; `before` is how many others there are
/// beside the parent.
///
/// # Errors
/// If one of them is incomplete, of another kind or there twice.
pub fn seen(
    inputs: Vec<Input>,
    kinds: &[Kind],
    role: &str,
    parent: &Object,
    before: usize,
) -> Result<Vec<Seen>, Error> {
    let namespace = parent.key().namespace;
    let mut seen = BTreeMap::new();
    for (at, mut input) in inputs.into_iter().enumerate() {
        let (api_version, name) = input.kind()?;
        let is_named = |kind: &Kind| kind.api.api_version == api_version && kind.api.kind == name;
        let Some(place) = kinds.iter().position(is_named) else {
            let problem = format!("is {name} ({api_version}), which describe() does not list under {role}");
            return input.refuse("kind", problem);
        };
        input.complete(&kinds[place], namespace.as_deref().unwrap_or("default"), PARENT + 1 + before + at)?;
        let object = input.read()?;
        let key = ChildKey { kind: place, object: object.key() };
        if seen.contains_key(&key) {
            return Err(Error::Twice(input.origin, format!("{} {}", kinds[place].api.kind, key.object)));
        }
        seen.insert(key.clone(), Seen { key, value: input.object.into(), object });
    }
    Ok(seen.into_values().collect())
}

/// Whose it is, if it is controlled by somebody else than the parent: then the host does not take it for a child.
pub fn other_controller(child: &Seen, parent: &Parent, parent_kind: &Kind) -> Option<String> {
    let owners = child.value["metadata"]["ownerReferences"].as_array()?;
    let controller = owners.iter().find(|owner| owner["controller"] == true)?;
    let text = |key: &str| controller[key].as_str().unwrap_or_default();
    let is_parent = text("kind") == parent_kind.api.kind
        && text("name") == parent.object.name()
        && (!parent.has_uid || text("uid") == parent.object.uid());
    (!is_parent).then(|| format!("{} {}", text("kind"), text("name")))
}

impl Input {
    fn refuse<T>(&self, path: &'static str, problem: impl Into<String>) -> Result<T, Error> {
        Err(Error::Field { origin: self.origin.clone(), path, problem: problem.into() })
    }

    /// apiVersion and kind.
    fn kind(&self) -> Result<(&str, &str), Error> {
        let text = |path: &'static str| match self.object.get(path).and_then(Value::as_str) {
            Some(text) if !text.is_empty() => Ok(text),
            _ => self.refuse(path, "is missing"),
        };
        Ok((text("apiVersion")?, text("kind")?))
    }

    fn metadata(&mut self) -> Result<&mut Map<String, Value>, Error> {
        match self.object.get_mut("metadata") {
            Some(Value::Object(metadata)) => Ok(metadata),
            _ => Err(Error::Field {
                origin: self.origin.clone(),
                path: "metadata.name",
                problem: "is missing".to_owned(),
            }),
        }
    }

    /// Whether the metadata has this text.
    fn text(&mut self, name: &str, path: &'static str) -> Result<bool, Error> {
        match self.metadata()?.get(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::String(text)) => Ok(!text.is_empty()),
            // `n` and `1` are none in YAML.
            Some(_) => self.refuse(path, "is no text; put it in quotes"),
        }
    }

    /// Adds what a cluster gives to each object, where it is not there. The values are the same each time.
    fn complete(&mut self, kind: &Kind, namespace: &str, number: usize) -> Result<(), Error> {
        if !self.text("name", "metadata.name")? {
            return self.refuse("metadata.name", "is missing");
        }
        match (self.text("namespace", "metadata.namespace")?, kind.namespaced) {
            (true, false) => {
                return self.refuse("metadata.namespace", format!("is given, but {kind} has no namespaces"));
            }
            (false, true) => drop(self.metadata()?.insert("namespace".to_owned(), namespace.into())),
            _ => {}
        }
        let given = json!({
            "uid": format!("00000000-0000-4000-8000-{number:012}"),
            "resourceVersion": "1",
            "creationTimestamp": CREATED,
        });
        let metadata = self.metadata()?;
        for (name, value) in given.as_object().into_iter().flatten() {
            metadata.entry(name.as_str()).or_insert_with(|| value.clone());
        }
        Ok(())
    }

    fn read(&self) -> Result<Object, Error> {
        let text = Value::from(self.object.clone()).to_string();
        Object::from_json(&text).map_err(|source| Error::Metadata { origin: self.origin.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kinds, plugin::describe::KindName, telemetry};

    fn kind(api_version: &str, kind: &str) -> Kind {
        let name = KindName { api_version: api_version.to_owned(), kind: kind.to_owned() };
        kinds::served(&name, &[]).unwrap_or_else(|| kinds::assumed(&name))
    }

    fn widget(text: &str) -> Result<Parent, String> {
        parent("p.yaml", text, &kind("t.example/v1", "Widget"), None).map_err(|error| telemetry::chain(&error))
    }

    const WIDGET: &str = "apiVersion: t.example/v1\nkind: Widget\nmetadata:\n  name: w\n";

    fn children(text: &str) -> Result<Vec<Seen>, String> {
        let kinds = [kind("v1", "ConfigMap"), kind("v1", "Namespace"), kind("v1", "Secret")];
        let parent = widget(&format!("{WIDGET}  namespace: ns\n")).unwrap().object;
        let read = documents("c.yaml", text).and_then(|inputs| seen(inputs, &kinds, "children", &parent, 0));
        read.map_err(|error| telemetry::chain(&error))
    }

    #[test]
    fn a_parent_gets_what_a_cluster_would_give_it() {
        let completed = widget(WIDGET).unwrap();
        let json: Value = serde_json::from_str(completed.object.json()).unwrap();
        let expected = json!({"name": "w", "namespace": "default", "uid": "00000000-0000-4000-8000-000000000001",
            "resourceVersion": "1", "creationTimestamp": CREATED, "generation": 1});
        assert_eq!((&json["metadata"], completed.has_uid), (&expected, false));
        let given = widget(&format!("{WIDGET}  namespace: ns\n  uid: u\n  managedFields: []\n")).unwrap();
        let json: Value = serde_json::from_str(given.object.json()).unwrap();
        assert_eq!((&json["metadata"]["uid"], &json["metadata"]["namespace"]), (&"u".into(), &"ns".into()));
        assert_eq!((json["metadata"].get("managedFields"), given.has_uid), (None, true));
    }

    #[test]
    fn a_parent_that_is_deleted_says_since_when() {
        let deleted = parent("p", WIDGET, &kind("t.example/v1", "Widget"), Some("2026-01-01T00:00:00Z")).unwrap();
        assert!(deleted.object.is_deleting());
    }

    #[test]
    fn what_is_wrong_is_told_by_file_document_and_path() {
        for (text, error) in [
            ("", "p.yaml has 0 documents; a parent is one"),
            (&format!("{WIDGET}---\n{WIDGET}"), "p.yaml has 2 documents; a parent is one"),
            ("a: [", "p.yaml, document 1 is no YAML: "),
            ("- a", "p.yaml, document 1 is no object"),
            ("kind: Widget", "p.yaml, document 1: apiVersion is missing"),
            (
                "apiVersion: v1\nkind: Pod",
                "p.yaml, document 1: kind is Pod (v1), and the plugin reconciles Widget (t.example/v1)",
            ),
            ("apiVersion: t.example/v1\nkind: Widget", "p.yaml, document 1: metadata.name is missing"),
            (&format!("{WIDGET}  namespace: n"), "p.yaml, document 1: metadata.namespace is no text; put it in quotes"),
            (
                "apiVersion: t.example/v1\nkind: Widget\nmetadata: {name: w, labels: 1}",
                "p.yaml, document 1: metadata is not as Kubernetes has it: ",
            ),
        ] {
            let message = widget(text).unwrap_err();
            assert!(message.starts_with(error), "{message}");
        }
    }

    #[test]
    fn children_are_sorted_and_lists_are_their_items() {
        let text = "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n---\n---\n\
            {apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: ConfigMap, metadata: {name: b, namespace: z}},\
            {apiVersion: v1, kind: ConfigMap, metadata: {name: b}}, {apiVersion: v1, kind: Namespace, metadata: {name: x}}]}";
        let seen = children(text).unwrap();
        let keys: Vec<_> = seen.iter().map(|seen| (seen.key.kind, seen.key.object.to_string())).collect();
        let expected = [(0, "ns/b"), (0, "z/b"), (1, "x"), (2, "ns/a")].map(|(kind, key)| (kind, key.to_owned()));
        assert_eq!(keys, expected);
        let uids: std::collections::BTreeSet<_> = seen.iter().map(|seen| seen.object.uid()).collect();
        assert_eq!(uids.len(), 4);
    }

    #[test]
    fn what_is_no_child_is_refused() {
        let config_map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n";
        for (text, error) in [
            (
                "{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: Pod}]}",
                "c.yaml, document 1, items[0]: kind is Pod (v1), which describe() does not list under children",
            ),
            (&format!("{config_map}---\n{config_map}"), "c.yaml, document 2 is ConfigMap ns/a a second time"),
            (
                "{apiVersion: v1, kind: Namespace, metadata: {name: a, namespace: b}}",
                "c.yaml, document 1: metadata.namespace is given, but Namespace (v1) has no namespaces",
            ),
        ] {
            assert_eq!(children(text).unwrap_err(), error);
        }
    }

    #[test]
    fn a_child_of_somebody_else_is_none() {
        let of = |uid: &str, name: &str| {
            let text = format!(
                "{{apiVersion: v1, kind: Secret, metadata: {{name: a, ownerReferences: \
                 [{{apiVersion: t.example/v1, kind: Widget, name: {name}, uid: {uid}, controller: true}}]}}}}"
            );
            children(&text).unwrap().remove(0)
        };
        let (kind, unknown) = (kind("t.example/v1", "Widget"), widget(WIDGET).unwrap());
        let known = widget(&format!("{WIDGET}  uid: u\n")).unwrap();
        assert_eq!(other_controller(&of("x", "w"), &unknown, &kind), None);
        assert_eq!(other_controller(&of("u", "w"), &known, &kind), None);
        assert_eq!(other_controller(&of("x", "w"), &known, &kind), Some("Widget w".to_owned()));
        assert_eq!(other_controller(&of("u", "v"), &unknown, &kind), Some("Widget v".to_owned()));
    }

    #[test]
    fn a_config_is_one_object() {
        assert_eq!(config("c", "a: 1").unwrap()["a"], 1);
        assert!(config("c", "[1]").is_err());
        assert!(config("c", "").is_err());
    }
}
