//! The check step: from what a plugin wrote to what the host will stand for. Pure.
//!
//! A plugin's answer is taken whole or not at all, and what is wrong with it is said by path: an ignored key could be the one
//! that keeps a child from being deleted.

use std::{collections::HashSet, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Map, Value, json};

use super::projection::{digest, digest_object};
use crate::{
    identity::DOMAIN,
    object::{FIELD_MANAGER_PREFIX, Kind, Object, ObjectKey},
    plugin::{Answer, Child, Cleanup, Condition, Event, FinalizeAnswer, Next, describe::KindName},
    state::{
        AdoptionPolicy, ChildKey, ChildOptions, Desired, DesiredChild, Finalization, Readiness, Report, Tie,
        UpdateStrategy,
    },
};

/// Parts of a child's metadata that the host or the API server decides.
pub const RESERVED_METADATA: [&str; 8] = [
    "ownerReferences",
    "finalizers",
    "managedFields",
    "uid",
    "resourceVersion",
    "generateName",
    "creationTimestamp",
    "deletionTimestamp",
];
/// Condition types that the host decides alone.
const RESERVED_CONDITIONS: [&str; 1] = ["Synced"];
/// Parts of the status that the host decides.
const RESERVED_STATUS: [&str; 2] = ["conditions", "observedGeneration"];
/// An Event's reason, by the API (events.k8s.io/v1).
const MAX_REASON: usize = 128;
/// The last wave that there can be.
const LAST_WAVE: u16 = 1000;
/// An Event's note, by the API (events.k8s.io/v1).
const MAX_NOTE: usize = 1024;
/// Anything faster is polling.
const MIN_WAIT: Duration = Duration::from_secs(1);

/// Why an answer is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the plugin's answer is refused: {path} {problem}")]
pub struct Error {
    /// Where, as `children[0].object.metadata.name`.
    pub path: String,
    /// What is wrong there, and what to do.
    pub problem: String,
}

fn refuse<T>(path: impl Into<String>, problem: impl Into<String>) -> Result<T, Error> {
    Err(Error { path: path.into(), problem: problem.into() })
}

/// What an answer is checked against.
pub struct Rules<'a> {
    /// The kinds that are watched.
    pub kinds: &'a [Kind],
    /// Those of them that the plugin declares: what it may return.
    pub declared: &'a [KindName],
    /// The parent.
    pub parent: &'a Object,
    /// The one namespace that the reconciler may write to; none: all of them.
    pub scope: Option<&'a str>,
    /// The largest number of children.
    pub max_children: usize,
}

impl Rules<'_> {
    /// Checks the answer of `reconcile`.
    ///
    /// # Errors
    /// If any part of it cannot be followed.
    pub fn desired(&self, answer: Answer) -> Result<Desired, Error> {
        no_keys("extra", &answer.extra)?;
        let children = self.children(answer.children)?;
        let report = report(answer.status, answer.conditions, answer.events)?;
        let next = match answer.next {
            Next::After(wait) => Next::After(wait.max(MIN_WAIT)),
            next => next,
        };
        Ok(Desired { children, report, next })
    }

    /// Checks the answer of `finalize`.
    ///
    /// # Errors
    /// If any part of it cannot be followed.
    pub fn finalization(&self, answer: FinalizeAnswer) -> Result<Finalization, Error> {
        no_keys("extra", &answer.extra)?;
        let children = answer.children.map(|children| self.children(children)).transpose()?;
        let report = report(answer.status, answer.conditions, answer.events)?;
        let waiting = match answer.cleanup {
            Cleanup::Finished => None,
            Cleanup::Waiting(wait) => Some(wait.max(MIN_WAIT)),
        };
        Ok(Finalization { waiting, children, report })
    }

    fn children(&self, children: Vec<Child>) -> Result<Vec<DesiredChild>, Error> {
        if children.len() > self.max_children {
            let problem = format!("has {} items, and limits.children is {}", children.len(), self.max_children);
            return refuse("children", problem);
        }
        let mut seen = HashSet::with_capacity(children.len());
        let mut desired = Vec::with_capacity(children.len());
        for (at, child) in children.into_iter().enumerate() {
            let path = format!("children[{at}]");
            let child = self.child(&path, child)?;
            if !seen.insert(child.key.clone()) {
                return refuse(path, format!("is {} a second time", self.describe(&child.key)));
            }
            desired.push(child);
        }
        Ok(desired)
    }

    fn child(&self, path: &str, child: Child) -> Result<DesiredChild, Error> {
        let options = options(&format!("{path}.options"), &child.options)?;
        let path = format!("{path}.object");
        let mut object = json_object(&path, &child.object)?;
        let place = self.kind(&path, &object)?;
        let kind = &self.kinds[place];

        let Some(Value::Object(metadata)) = object.get_mut("metadata") else {
            return refuse(format!("{path}.metadata"), "is missing; a child needs metadata.name");
        };
        check_metadata(&path, metadata)?;
        let Some(name) = metadata.get("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
            return refuse(format!("{path}.metadata.name"), "is missing");
        };
        let name = name.to_owned();
        let namespace = self.namespace(&path, kind, metadata)?;
        if let Some(namespace) = &namespace {
            metadata.insert("namespace".to_owned(), namespace.as_str().into());
        }

        if kind.has_status {
            object.remove("status");
        }
        if kind.api.kind == "Secret" && kind.api.api_version == "v1" {
            fold_string_data(&path, &mut object)?;
        }
        if kind.is_built_in() {
            // Built-in kinds take null for absent; a custom kind may mean it.
            object.values_mut().for_each(strip_nulls);
            object.retain(|_, value| !value.is_null());
        }
        // By the rules of owner references: an owner of cluster scope, or in the same namespace.
        let of_parent = self.parent.key().namespace;
        let can_be_owned = of_parent.is_none() || of_parent == namespace;
        let tie = match (options.orphan, can_be_owned) {
            (true, _) => Tie::Loose,
            (false, true) => Tie::Owner,
            (false, false) => Tie::Record,
        };
        let of_object = digest_object(&object);
        let digest = match (tie, options.wave) {
            // For the same object another tie or wave is another apply. Which of these two ties it is, its name decides.
            (Tie::Owner | Tie::Record, 0) => of_object,
            (Tie::Owner | Tie::Record, wave) => digest(&json!(["wave", wave, of_object])),
            (Tie::Loose, _) => digest(&json!(["loose", of_object])),
        };
        let key = ChildKey { kind: place, object: ObjectKey { namespace, name } };
        Ok(DesiredChild { key, object, digest, tie, options })
    }

    fn kind(&self, path: &str, object: &Map<String, Value>) -> Result<usize, Error> {
        let text = |name: &str| match object.get(name).and_then(Value::as_str) {
            Some(text) if !text.is_empty() => Ok(text),
            _ => refuse(format!("{path}.{name}"), "is missing"),
        };
        let (api_version, kind) = (text("apiVersion")?, text("kind")?);
        let declared = self.declared.iter().any(|known| known.api_version == api_version && known.kind == kind);
        let place = self.kinds.iter().position(|known| known.api.api_version == api_version && known.api.kind == kind);
        let place = place.filter(|_| declared);
        place.map_or_else(
            || {
                let problem = format!("is {kind} ({api_version}), which describe() does not list under children");
                refuse(format!("{path}.kind"), problem)
            },
            Ok,
        )
    }

    fn namespace(&self, path: &str, kind: &Kind, metadata: &Map<String, Value>) -> Result<Option<String>, Error> {
        let path = format!("{path}.metadata.namespace");
        let given = metadata.get("namespace").and_then(Value::as_str).filter(|namespace| !namespace.is_empty());
        let of_parent = self.parent.key().namespace;
        match (kind.namespaced, given, of_parent) {
            (false, Some(_), _) => refuse(path, format!("is given, but {kind} has no namespaces")),
            (false, None, _) => Ok(None),
            (true, None, None) => refuse(path, "is missing; the parent is of cluster scope and has none to lend"),
            (true, Some(given), _) if self.scope.is_some_and(|scope| scope != given) => {
                refuse(path, format!("is {given:?}; a Reconciler makes children in its own namespace only"))
            }
            (true, Some(given), _) => Ok(Some(given.to_owned())),
            (true, None, of_parent) => Ok(of_parent),
        }
    }

    fn describe(&self, key: &ChildKey) -> String {
        format!("{} {}", self.kinds[key.kind].api.kind, key.object)
    }
}

fn check_metadata(path: &str, metadata: &mut Map<String, Value>) -> Result<(), Error> {
    for name in RESERVED_METADATA {
        match metadata.get(name) {
            None => {}
            // Typed languages write what they do not set.
            Some(Value::Null) => drop(metadata.remove(name)),
            Some(_) => return refuse(format!("{path}.metadata.{name}"), "is decided by the host; leave it out"),
        }
    }
    for name in ["labels", "annotations"] {
        let keys = metadata.get(name).and_then(Value::as_object).into_iter().flat_map(Map::keys);
        if let Some(key) = keys.into_iter().find(|key| is_reserved_key(key)) {
            let problem = format!("has a domain that belongs to the host ({DOMAIN}); choose one of your own");
            return refuse(format!("{path}.metadata.{name}[{key:?}]"), problem);
        }
    }
    Ok(())
}

/// Whether a label or an annotation of this name is the host's.
pub fn is_reserved_key(key: &str) -> bool {
    let domain = key.split_once('/').map(|(domain, _)| domain);
    domain
        .is_some_and(|domain| domain == DOMAIN || domain.strip_suffix(DOMAIN).is_some_and(|below| below.ends_with('.')))
}

/// What the API server does at every write (`stringData` of a Secret wins over `data`), done once, so that what is sent is
/// what is owned (`C19`).
fn fold_string_data(path: &str, object: &mut Map<String, Value>) -> Result<(), Error> {
    let strings = match object.remove("stringData") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(strings)) => strings,
        Some(_) => return refuse(format!("{path}.stringData"), "is not an object"),
    };
    let data = object.entry("data").or_insert_with(|| Map::new().into());
    if data.is_null() {
        *data = Map::new().into();
    }
    let Value::Object(data) = data else { return refuse(format!("{path}.data"), "is not an object") };
    for (name, value) in strings {
        let Value::String(text) = value else { return refuse(format!("{path}.stringData.{name}"), "is not a string") };
        data.insert(name, BASE64_STANDARD.encode(text).into());
    }
    Ok(())
}

fn strip_nulls(value: &mut Value) {
    match value {
        Value::Object(object) => {
            object.retain(|_, value| !value.is_null());
            object.values_mut().for_each(strip_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(strip_nulls),
        _ => {}
    }
}

fn report(status: Option<String>, conditions: Vec<Condition>, mut events: Vec<Event>) -> Result<Report, Error> {
    let status = status.map(|status| json_object("status", &status)).transpose()?;
    if let Some(name) =
        RESERVED_STATUS.iter().find(|name| status.as_ref().is_some_and(|status| status.contains_key(**name)))
    {
        return refuse(format!("status.{name}"), "is written by the host; leave it out of the status");
    }
    for (at, condition) in conditions.iter().enumerate() {
        let path = format!("conditions[{at}]");
        if RESERVED_CONDITIONS.contains(&condition.kind.as_str()) {
            return refuse(format!("{path}.kind"), format!("is {:?}, which the host decides", condition.kind));
        }
        check_name(&format!("{path}.kind"), &condition.kind)?;
        check_name(&format!("{path}.reason"), &condition.reason)?;
        if conditions[..at].iter().any(|earlier| earlier.kind == condition.kind) {
            return refuse(format!("{path}.kind"), format!("is {:?} a second time", condition.kind));
        }
    }
    for (at, event) in events.iter_mut().enumerate() {
        check_name(&format!("events[{at}].reason"), &event.reason)?;
        event.message.truncate(event.message.floor_char_boundary(MAX_NOTE));
    }
    Ok(Report { status, conditions, events })
}

/// Condition types and reasons, by the API conventions: words of letters, digits and a few separators, beginning with a letter.
fn check_name(path: &str, name: &str) -> Result<(), Error> {
    let proper = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.len() <= MAX_REASON
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/'));
    if proper {
        return Ok(());
    }
    refuse(path, format!("is {name:?}; it must be one CamelCase word of at most {MAX_REASON} characters"))
}

fn json_object(path: &str, text: &str) -> Result<Map<String, Value>, Error> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => refuse(path, "is not a JSON object"),
        Err(error) => refuse(path, format!("is not JSON: {error}")),
    }
}

/// Documents that can grow: a key that this host does not know could mean anything, so it refuses the answer.
fn no_keys(path: &str, text: &str) -> Result<(), Error> {
    if text == "{}" {
        return Ok(());
    }
    match json_object(path, text)?.keys().next() {
        None => Ok(()),
        Some(key) => unknown(path, key),
    }
}

fn unknown<T>(path: &str, key: &str) -> Result<T, Error> {
    refuse(format!("{path}.{key}"), "is not known to this host; it may be too old for this plugin")
}

fn options(path: &str, text: &str) -> Result<ChildOptions, Error> {
    let mut options = ChildOptions::default();
    if text == "{}" {
        return Ok(options);
    }
    for (key, value) in json_object(path, text)? {
        let path_of_key = format!("{path}.{key}");
        match key.as_str() {
            "updateStrategy" => {
                let known = [
                    ("Apply", UpdateStrategy::Apply),
                    ("Recreate", UpdateStrategy::Recreate),
                    ("OnDelete", UpdateStrategy::OnDelete),
                ];
                options.update = one_of(&path_of_key, &value, &known)?;
            }
            "adoptionPolicy" => {
                let known = [("Never", AdoptionPolicy::Never), ("IfUnowned", AdoptionPolicy::IfUnowned)];
                options.adoption = one_of(&path_of_key, &value, &known)?;
            }
            "deletionPolicy" => {
                options.orphan = one_of(&path_of_key, &value, &[("Delete", false), ("Orphan", true)])?;
            }
            "wave" => options.wave = wave(&path_of_key, &value)?,
            "readiness" => {
                let known = [("Auto", Readiness::Auto), ("Ready", Readiness::Ready), ("NotReady", Readiness::NotReady)];
                options.readiness = one_of(&path_of_key, &value, &known)?;
            }
            "force" => {
                options.yields = match value {
                    Value::Bool(force) => !force,
                    _ => return refuse(path_of_key, format!("is {value}; it must be true or false")),
                };
            }
            "adoptFieldManagers" => options.adopt_field_managers = field_managers(&path_of_key, value)?,
            _ => return unknown(path, &key),
        }
    }
    Ok(options)
}

fn one_of<T: Copy>(path: &str, value: &Value, known: &[(&str, T)]) -> Result<T, Error> {
    let found = known.iter().find(|(name, _)| value.as_str() == Some(name));
    found.map(|(_, found)| *found).map_or_else(
        || {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            refuse(path, format!("is {value}; it must be one of {}", names.join(", ")))
        },
        Ok,
    )
}

fn wave(path: &str, value: &Value) -> Result<u16, Error> {
    let wave = value.as_u64().and_then(|wave| u16::try_from(wave).ok()).filter(|wave| *wave <= LAST_WAVE);
    wave.map_or_else(|| refuse(path, format!("is {value}; it must be a number from 0 to {LAST_WAVE}")), Ok)
}

fn field_managers(path: &str, value: Value) -> Result<Vec<String>, Error> {
    let Value::Array(names) = value else { return refuse(path, "is not a list of field managers") };
    let name = |(at, name)| match name {
        Value::String(name) if name.starts_with(FIELD_MANAGER_PREFIX) => refuse(
            format!("{path}[{at}]"),
            "is a field manager of the host, which adopts those by itself; leave it out",
        ),
        Value::String(name) if !name.is_empty() => Ok(name),
        _ => refuse(format!("{path}[{at}]"), "is not the name of a field manager"),
    };
    names.into_iter().enumerate().map(name).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Secret},
    };
    use kube::discovery::ApiResource;
    use serde_json::json;

    use super::*;
    use crate::plugin::{ConditionStatus, EventKind};

    fn kinds() -> Vec<Kind> {
        let kind = |api, has_status| Kind { api, namespaced: true, has_status };
        let custom = ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk("t.example", "v1", "Free"));
        vec![
            kind(ApiResource::erase::<ConfigMap>(&()), false),
            kind(ApiResource::erase::<Secret>(&()), false),
            kind(ApiResource::erase::<Deployment>(&()), true),
            kind(custom, true),
        ]
    }

    fn parent() -> Object {
        Object::from_json(r#"{"metadata":{"name":"p","namespace":"n","uid":"u"}}"#).unwrap()
    }

    fn check(children: &[Value]) -> Result<Vec<DesiredChild>, String> {
        let children =
            children.iter().map(|object| Child { object: object.to_string(), options: "{}".to_owned() }).collect();
        check_answer(Answer { children, extra: "{}".to_owned(), ..Answer::default() }).map(|desired| desired.children)
    }

    fn check_answer(answer: Answer) -> Result<Desired, String> {
        check_in(None, answer)
    }

    fn check_in(scope: Option<&str>, answer: Answer) -> Result<Desired, String> {
        let (kinds, parent) = (kinds(), parent());
        let declared: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
        let rules = Rules { kinds: &kinds, declared: &declared, parent: &parent, scope, max_children: 3 };
        rules.desired(answer).map_err(|error| format!("{}: {}", error.path, error.problem))
    }

    fn config_map(name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}})
    }

    #[test]
    fn a_child_gets_the_namespace_of_its_parent() {
        let children = check(&[config_map("a")]).unwrap();
        assert_eq!(children[0].object["metadata"]["namespace"], "n");
        assert_eq!((children[0].key.object.to_string().as_str(), children[0].tie), ("n/a", Tie::Owner));
    }

    #[test]
    fn c61_a_child_in_another_namespace_is_remote() {
        let mut object = config_map("a");
        object["metadata"]["namespace"] = json!("other");
        let children = check(&[object]).unwrap();
        assert_eq!((children[0].key.object.to_string().as_str(), children[0].tie), ("other/a", Tie::Record));
    }

    #[test]
    fn a_reconciler_in_a_namespace_makes_children_nowhere_else() {
        let answer = |namespace: &str| {
            let mut object = config_map("a");
            object["metadata"]["namespace"] = json!(namespace);
            let child = Child { object: object.to_string(), options: "{}".to_owned() };
            Answer { children: vec![child], extra: "{}".to_owned(), ..Answer::default() }
        };
        assert!(check_in(Some("n"), answer("n")).is_ok());
        let error = check_in(Some("n"), answer("other")).unwrap_err();
        assert!(
            error.starts_with("children[0].object.metadata.namespace: is \"other\"; a Reconciler makes"),
            "{error}"
        );
    }

    #[test]
    fn a_child_that_outlives_its_parent_has_no_tie_and_another_digest() {
        let answer = |options: &str| {
            let child = Child { object: config_map("a").to_string(), options: options.to_owned() };
            let answer = Answer { children: vec![child], extra: "{}".to_owned(), ..Answer::default() };
            check_answer(answer).unwrap().children.remove(0)
        };
        let (owned, loose) = (answer("{}"), answer(r#"{"deletionPolicy": "Orphan"}"#));
        assert_eq!((owned.tie, loose.tie), (Tie::Owner, Tie::Loose));
        assert_ne!(owned.digest, loose.digest, "a change of the policy is a change of the child");
    }

    #[test]
    fn reserved_fields_are_refused_by_path() {
        for (pointer, value, path) in [
            ("ownerReferences", json!([]), "children[0].object.metadata.ownerReferences"),
            ("finalizers", json!(["x"]), "children[0].object.metadata.finalizers"),
            ("uid", json!("x"), "children[0].object.metadata.uid"),
            ("generateName", json!("x-"), "children[0].object.metadata.generateName"),
            ("labels", json!({"pilothouse.dev/x": ""}), r#"children[0].object.metadata.labels["pilothouse.dev/x"]"#),
            (
                "labels",
                json!({"internal.pilothouse.dev/x": ""}),
                r#"children[0].object.metadata.labels["internal.pilothouse.dev/x"]"#,
            ),
            (
                "annotations",
                json!({"a.pilothouse.dev/x": ""}),
                r#"children[0].object.metadata.annotations["a.pilothouse.dev/x"]"#,
            ),
        ] {
            let mut object = config_map("a");
            object["metadata"][pointer] = value;
            let error = check(&[object]).unwrap_err();
            assert!(error.starts_with(path), "{error}");
        }
        let mut object = config_map("a");
        object["metadata"]["labels"] = json!({"notpilothouse.dev/x": "", "pilothouse": ""});
        object["metadata"]["creationTimestamp"] = Value::Null;
        assert!(check(&[object]).is_ok());
    }

    #[test]
    fn an_incomplete_or_unknown_child_is_refused_by_path() {
        for (object, path) in [
            (json!({"kind": "ConfigMap", "metadata": {"name": "a"}}), "children[0].object.apiVersion"),
            (json!({"apiVersion": "v1", "metadata": {"name": "a"}}), "children[0].object.kind"),
            (
                json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}),
                "children[0].object.kind: is Pod (v1)",
            ),
            (json!({"apiVersion": "v1", "kind": "ConfigMap"}), "children[0].object.metadata"),
            (json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}}), "children[0].object.metadata.name"),
            (json!([]), "children[0].object: is not a JSON object"),
        ] {
            let error = check(&[object]).unwrap_err();
            assert!(error.starts_with(path), "{error}");
        }
        assert_eq!(
            check(&[config_map("a"), config_map("a")]).unwrap_err(),
            "children[1]: is ConfigMap n/a a second time"
        );
        let many: Vec<_> = ["a", "b", "c", "d"].map(config_map).into();
        assert_eq!(check(&many).unwrap_err(), "children: has 4 items, and limits.children is 3");
    }

    #[test]
    fn what_is_not_understood_refuses_the_answer() {
        let child = Child { object: config_map("a").to_string(), options: r#"{"vawe":1}"#.to_owned() };
        let answer = Answer { children: vec![child], extra: "{}".to_owned(), ..Answer::default() };
        assert!(check_answer(answer).unwrap_err().starts_with("children[0].options.vawe"));
        let answer = Answer { extra: r#"{"x":1}"#.to_owned(), ..Answer::default() };
        assert!(check_answer(answer).unwrap_err().starts_with("extra.x"));
        let child = Child { object: "{\"a\":".to_owned(), options: "{}".to_owned() };
        let answer = Answer { children: vec![child], extra: "{}".to_owned(), ..Answer::default() };
        assert!(check_answer(answer).unwrap_err().starts_with("children[0].object: is not JSON"));
    }

    #[test]
    fn options_are_read_and_what_is_wrong_in_them_is_refused_by_path() {
        let with = |options: Value| {
            let child = Child { object: config_map("a").to_string(), options: options.to_string() };
            let answer = Answer { children: vec![child], extra: "{}".to_owned(), ..Answer::default() };
            check_answer(answer).map(|desired| desired.children[0].options.clone())
        };
        let expected = ChildOptions {
            update: UpdateStrategy::Recreate,
            adoption: AdoptionPolicy::IfUnowned,
            orphan: true,
            adopt_field_managers: vec!["old".to_owned()],
            wave: 3,
            readiness: Readiness::NotReady,
            yields: true,
        };
        let options = json!({"updateStrategy": "Recreate", "adoptionPolicy": "IfUnowned", "deletionPolicy": "Orphan",
            "adoptFieldManagers": ["old"], "wave": 3, "readiness": "NotReady", "force": false});
        assert_eq!(with(options), Ok(expected));
        assert_eq!(
            with(json!({"updateStrategy": "Apply", "adoptFieldManagers": [], "force": true})),
            Ok(ChildOptions::default())
        );
        for (options, error) in [
            (
                json!({"updateStrategy": "recreate"}),
                "children[0].options.updateStrategy: is \"recreate\"; it must be one of Apply,",
            ),
            (json!({"adoptionPolicy": true}), "children[0].options.adoptionPolicy: is true"),
            (json!({"force": "no"}), "children[0].options.force: is \"no\"; it must be true or false"),
            (json!({"adoptFieldManagers": "old"}), "children[0].options.adoptFieldManagers: is not a list"),
            (json!({"adoptFieldManagers": ["a", ""]}), "children[0].options.adoptFieldManagers[1]"),
            (json!({"adoptFieldManagers": ["pilothouse/1"]}), "children[0].options.adoptFieldManagers[0]"),
            (
                json!({"deletionPolicy": "orphan"}),
                "children[0].options.deletionPolicy: is \"orphan\"; it must be one of Delete, Orphan",
            ),
            (json!({"wave": 1001}), "children[0].options.wave: is 1001; it must be a number from 0 to 1000"),
            (json!({"wave": -1}), "children[0].options.wave: is -1"),
            (json!({"readiness": true}), "children[0].options.readiness: is true"),
            (json!({"vawe": 1}), "children[0].options.vawe"),
            (json!([]), "children[0].options: is not a JSON object"),
        ] {
            let refused = with(options).unwrap_err();
            assert!(refused.starts_with(error), "{refused}");
        }
    }

    #[test]
    fn c23_null_is_absent_for_built_in_kinds_only() {
        let built_in = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a", "labels": {}},
            "spec": {"paused": null, "template": {"spec": {"containers": [{"name": "a", "args": [], "tty": null}]}}},
            "status": null});
        let children = check(&[built_in]).unwrap();
        let expected = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a", "labels": {}, "namespace": "n"},
            "spec": {"template": {"spec": {"containers": [{"name": "a", "args": []}]}}}});
        assert_eq!(Value::from(children[0].object.clone()), expected);
        let custom = json!({"apiVersion": "t.example/v1", "kind": "Free", "metadata": {"name": "a"}, "spec": {"x": null}, "status": {"a": 1}});
        let children = check(&[custom]).unwrap();
        assert_eq!(children[0].object["spec"], json!({"x": null}));
        assert_eq!(children[0].object.get("status"), None);
    }

    #[test]
    fn c19_string_data_becomes_data() {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"},
            "data": {"x": "b2xk", "y": "eQ=="}, "stringData": {"x": "new"}});
        let children = check(&[secret]).unwrap();
        assert_eq!(children[0].object["data"], json!({"x": "bmV3", "y": "eQ=="}));
        assert_eq!(children[0].object.get("stringData"), None);
    }

    #[test]
    fn conditions_events_and_status_are_checked() {
        let condition = |kind: &str, reason: &str| Condition {
            kind: kind.to_owned(),
            status: ConditionStatus::True,
            reason: reason.to_owned(),
            message: String::new(),
        };
        let with = |conditions: Vec<Condition>| Answer { conditions, extra: "{}".to_owned(), ..Answer::default() };
        assert!(check_answer(with(vec![condition("Synced", "X")])).unwrap_err().starts_with("conditions[0].kind"));
        assert!(check_answer(with(vec![condition("A", "")])).unwrap_err().starts_with("conditions[0].reason"));
        assert!(
            check_answer(with(vec![condition("A", "X"), condition("A", "Y")]))
                .unwrap_err()
                .starts_with("conditions[1].kind")
        );
        let status =
            |status: &str| Answer { status: Some(status.to_owned()), extra: "{}".to_owned(), ..Answer::default() };
        assert!(check_answer(status(r#"{"conditions":[]}"#)).unwrap_err().starts_with("status.conditions"));
        assert!(check_answer(status("[]")).unwrap_err().starts_with("status"));
        let event = Event { kind: EventKind::Normal, reason: "Made".to_owned(), message: "é".repeat(1000) };
        let answer = Answer { events: vec![event], extra: "{}".to_owned(), ..Answer::default() };
        assert_eq!(check_answer(answer).unwrap().report.events[0].message.len(), 1024);
    }

    #[test]
    fn a_wait_below_a_second_is_a_second() {
        let answer = |wait| Answer {
            next: Next::After(Duration::from_millis(wait)),
            extra: "{}".to_owned(),
            ..Answer::default()
        };
        assert_eq!(check_answer(answer(5)).unwrap().next, Next::After(MIN_WAIT));
        assert_eq!(check_answer(answer(5000)).unwrap().next, Next::After(Duration::from_secs(5)));
    }
}
