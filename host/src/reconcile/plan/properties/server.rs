//! A toy of server-side apply: maps, an atomic list and a keyed list, with the bookkeeping of `metadata.managedFields`. Enough to
//! tell whether [`plan`](super::plan) settles on one; what the API server really does is for the end-to-end tests to say.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::object::Object;

/// A field, step by step as `fieldsV1` writes it: `f:name`, or `k:{"name":"x"}` for an item of a keyed list.
type Path = Vec<String>;
type Fields = BTreeSet<Path>;

/// What names an object, and what the API server decides of it.
const OF_SERVER: [&str; 6] = ["name", "namespace", "uid", "resourceVersion", "deletionTimestamp", "finalizers"];

/// One object of the server.
#[derive(Clone, Debug)]
pub(super) struct Live {
    pub(super) json: Value,
    managed: BTreeMap<(String, &'static str), Fields>,
}

impl Live {
    /// A new object of these names.
    pub(super) fn new(body: &Map<String, Value>, uid: &str) -> Self {
        let metadata = json!({"name": body["metadata"]["name"], "namespace": body["metadata"]["namespace"], "uid": uid,
            "resourceVersion": "0"});
        let json = json!({"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata});
        Self { json, managed: BTreeMap::new() }
    }

    /// A forced apply. What the manager sent before and no longer sends goes, unless somebody else owns it, too.
    pub(super) fn apply(&mut self, manager: &str, body: &Map<String, Value>) {
        let body = Value::from(body.clone());
        let before = self.clone();
        let by = (manager.to_owned(), "Apply");
        merge(&mut self.json, &body, &Path::new());
        let sent = fields(&body);
        let last = self.managed.insert(by.clone(), sent.clone()).unwrap_or_default();
        for path in last.difference(&sent).collect::<Vec<_>>().into_iter().rev() {
            let is_kept = |owned: &Fields| owned.iter().any(|field| field.starts_with(path));
            if !self.managed.values().any(is_kept) {
                remove(&mut self.json, path);
            }
        }
        self.settle(&before, &by);
    }

    /// Any other write: what it changes belongs to its manager from then on.
    pub(super) fn update(&mut self, manager: &str, change: impl FnOnce(&mut Value)) {
        let before = self.clone();
        let by = (manager.to_owned(), "Update");
        change(&mut self.json);
        let changed =
            fields(&self.json).into_iter().filter(|path| state(&before.json, path) != state(&self.json, path));
        self.managed.entry(by.clone()).or_default().extend(changed);
        self.settle(&before, &by);
    }

    /// Who else owned what `by` has changed no longer does, and nobody owns what is gone.
    fn settle(&mut self, before: &Self, by: &(String, &'static str)) {
        let Self { json, managed } = self;
        for (manager, owned) in managed.iter_mut() {
            owned.retain(|path| {
                let now = state(json, path);
                now.is_some() && (manager == by || now == state(&before.json, path))
            });
        }
        managed.retain(|_, owned| !owned.is_empty());
        let version = &json["metadata"]["resourceVersion"];
        if (&*json, &*managed) != (&before.json, &before.managed) {
            let version: u64 = version.as_str().unwrap().parse().unwrap();
            json["metadata"]["resourceVersion"] = (version + 1).to_string().into();
        }
    }

    /// As the API server would show it.
    pub(super) fn object(&self) -> Object {
        Object::from_json(&self.text().to_string()).unwrap()
    }

    /// The JSON of [`Self::object`].
    pub(super) fn text(&self) -> Value {
        let entry = |((manager, operation), fields): (&(String, &str), &Fields)| json!({"manager": manager, "operation": operation, "fieldsV1": fields_v1(fields)});
        let mut json = self.json.clone();
        json["metadata"]["managedFields"] = self.managed.iter().map(entry).collect();
        json
    }

    /// Whether all that is sent is there, in the order in which it is sent, and the manager owns that and no more. An empty list may be
    /// somebody else's who has filled it for a while: a keyed one has no owner, so a host that starts cannot tell.
    pub(super) fn is(&self, manager: &str, sent: &Map<String, Value>) -> bool {
        let sent = Value::from(sent.clone());
        let fields = fields(&sent);
        let order = |json: &Value| -> Vec<Path> {
            let items = json["spec"]["items"].as_array().into_iter().flatten();
            let path = |item: &Value| vec!["f:spec".to_owned(), "f:items".to_owned(), item_step("name", item)];
            items.map(path).filter(|path| fields.contains(path)).collect()
        };
        let none = Fields::new();
        let owned = self.managed.get(&(manager.to_owned(), "Apply")).unwrap_or(&none);
        owned.is_subset(&fields)
            && fields.difference(owned).all(|path| state(&sent, path) == Some(&json!([])))
            && fields.iter().all(|path| state(&self.json, path) == state(&sent, path))
            && order(&self.json) == order(&sent)
    }
}

/// The schema: the key of a list, if it has one.
fn key_of(list: &[String]) -> Option<&'static str> {
    match list.last()?.as_str() {
        "f:ownerReferences" => Some("uid"),
        "f:items" => Some("name"),
        _ => None,
    }
}

/// The schema: what is owned and replaced as a whole, though it has members.
fn is_atomic(path: &[String]) -> bool {
    path.len() >= 2 && path[path.len() - 2] == "f:ownerReferences"
}

fn item_step(key: &str, item: &Value) -> String {
    format!("k:{}", json!({key: item[key]}))
}

fn fields(object: &Value) -> Fields {
    let mut found = Fields::new();
    for (name, value) in object.as_object().unwrap() {
        let path = vec![format!("f:{name}")];
        match (name.as_str(), value) {
            ("apiVersion" | "kind" | "status", _) => {}
            ("metadata", Value::Object(metadata)) => {
                let owned = metadata.iter().filter(|(name, _)| !OF_SERVER.contains(&name.as_str()));
                owned.for_each(|(name, value)| add_fields(value, below(&path, format!("f:{name}")), &mut found));
            }
            (_, value) => add_fields(value, path, &mut found),
        }
    }
    found
}

fn add_fields(value: &Value, path: Path, found: &mut Fields) {
    match (value, key_of(&path)) {
        (Value::Object(members), _) if !members.is_empty() && !is_atomic(&path) => {
            members.iter().for_each(|(name, value)| add_fields(value, below(&path, format!("f:{name}")), found));
        }
        (Value::Array(items), Some(key)) => {
            for item in items {
                let path = below(&path, item_step(key, item));
                found.insert(path.clone());
                add_fields(item, path, found);
            }
        }
        _ => drop(found.insert(path)),
    }
}

fn below(path: &Path, step: String) -> Path {
    path.iter().cloned().chain([step]).collect()
}

fn fields_v1(fields: &Fields) -> Value {
    let mut root = json!({});
    for path in fields {
        let mut node = &mut root;
        for step in path {
            node = &mut node[step];
            if node.is_null() {
                *node = json!({});
            }
        }
        if fields.iter().any(|other| other.len() > path.len() && other.starts_with(path)) {
            node["."] = json!({});
        }
    }
    root
}

fn position(items: &[Value], step: &str) -> Option<usize> {
    items.iter().position(|item| ["name", "uid"].iter().any(|key| item_step(key, item) == step))
}

fn get<'a>(mut value: &'a Value, path: &[String]) -> Option<&'a Value> {
    for step in path {
        value = match step.strip_prefix("f:") {
            Some(name) => value.get(name)?,
            None => &value.as_array()?[position(value.as_array()?, step)?],
        };
    }
    Some(value)
}

/// What a field is: its value, or for an item that has fields of its own that it is there.
fn state<'a>(json: &'a Value, path: &Path) -> Option<&'a Value> {
    let value = get(json, path)?;
    let is_item = path.last().is_some_and(|step| step.starts_with("k:")) && !is_atomic(path);
    Some(if is_item || value.as_object().is_some_and(|_| !is_atomic(path)) { &Value::Null } else { value })
}

fn remove(json: &mut Value, path: &Path) {
    let (last, above) = path.split_last().unwrap();
    let mut value = json;
    for step in above {
        let place = value.as_array().map(|items| position(items, step));
        let below = match (step.strip_prefix("f:"), place) {
            (Some(name), _) => value.get_mut(name),
            (None, place) => place.flatten().and_then(|place| value.get_mut(place)),
        };
        let Some(below) = below else { return };
        value = below;
    }
    match value {
        Value::Object(members) => drop(members.remove(&last[2..])),
        Value::Array(items) => drop(position(items, last).map(|place| items.remove(place))),
        _ => {}
    }
}

fn merge(live: &mut Value, sent: &Value, path: &Path) {
    match (sent, key_of(path)) {
        (Value::Object(members), _) if !is_atomic(path) => {
            if !live.is_object() {
                *live = json!({});
            }
            // What says which object is meant is no field; the caller has looked.
            let is_name = |name: &str| path == &["f:metadata"] && OF_SERVER.contains(&name);
            for (name, value) in members.iter().filter(|(name, _)| !is_name(name)) {
                merge(&mut live[name], value, &below(path, format!("f:{name}")));
            }
        }
        (Value::Array(items), Some(key)) => {
            let before = live.as_array().cloned().unwrap_or_default();
            let merged = |item: &Value| {
                let step = item_step(key, item);
                let mut merged = position(&before, &step).map_or(Value::Null, |place| before[place].clone());
                merge(&mut merged, item, &below(path, step));
                merged
            };
            // Ours in our order, in the places of ours; those of others stay where they are.
            let mut ours = items.iter().map(merged);
            let mut list = Vec::new();
            for item in &before {
                let is_ours = items.iter().any(|sent| sent[key] == item[key]);
                list.extend(if is_ours { ours.next() } else { Some(item.clone()) });
            }
            list.extend(ours);
            *live = list.into();
        }
        (sent, _) => *live = sent.clone(),
    }
}
