//! What a plugin's answer would change of a live child, as a person reads it. Pure.
//!
//! Only what the plugin decides is compared: what it sends, and if the live object tells its `metadata.managedFields`, what it
//! has sent before, since that is removed when it is no longer sent. All else of the live object belongs to others, and does not
//! show. Where managed fields are not told, the lists that Kubernetes merges by a key are known by name.

use std::io;

use serde::Serialize;
use serde_json::{Map, Value};
use similar::TextDiff;

use crate::{
    object::FIELD_MANAGER_PREFIX,
    output,
    reconcile::{
        coverage::{includes, same},
        desired::{RESERVED_METADATA, is_reserved_key},
        fields,
    },
};

/// What becomes of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// It is not there yet.
    Create,
    /// Something of it changes.
    Change,
    /// It is there, and not wanted.
    Delete,
    /// It is as it should be.
    Unchanged,
}

/// A child, as it is and as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// What becomes of it.
    pub action: Action,
    /// How, as a unified diff of YAML; empty for one that is unchanged.
    pub diff: String,
}

/// Compares a child with what is wanted of it. `built_in` says whether Kubernetes itself defines its kind.
///
/// # Errors
/// If one of them cannot be written as YAML.
pub fn compare(wanted: Option<&Map<String, Value>>, live: Option<&Value>, built_in: bool) -> io::Result<Comparison> {
    let (action, before, after) = match (wanted, live) {
        (None, None) => (Action::Unchanged, String::new(), String::new()),
        (Some(wanted), None) => (Action::Create, String::new(), output::to_yaml(wanted)?),
        (None, Some(live)) => (Action::Delete, output::to_yaml(&without_bookkeeping(live))?, String::new()),
        (Some(wanted), Some(live)) => {
            let wanted = Value::from(wanted.clone());
            let owned = applied_fields(live);
            let walk = Walk { built_in };
            let ours = walk.decided("", Some(&wanted), owned.as_ref(), &without_bookkeeping(live)).unwrap_or_default();
            let action = if ours == wanted { Action::Unchanged } else { Action::Change };
            (action, output::to_yaml(&ours)?, output::to_yaml(&wanted)?)
        }
    };
    let diff = match action {
        Action::Unchanged => String::new(),
        _ => TextDiff::from_lines(&before, &after).unified_diff().header("live", "wanted").to_string(),
    };
    Ok(Comparison { action, diff })
}

/// The object without what the host and the API server keep in it for themselves.
fn without_bookkeeping(live: &Value) -> Value {
    let mut live = live.clone();
    if let Some(object) = live.as_object_mut() {
        object.remove("status");
    }
    if let Some(metadata) = live.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.retain(|name, _| !RESERVED_METADATA.contains(&name.as_str()) && name != "generation");
        for name in ["labels", "annotations"] {
            if let Some(members) = metadata.get_mut(name).and_then(Value::as_object_mut) {
                members.retain(|key, _| !is_reserved_key(key));
            }
        }
    }
    live
}

/// The fields that a host has applied, as `fieldsV1`; none if the object does not tell.
pub fn applied_fields(live: &Value) -> Option<Value> {
    let entries = live["metadata"]["managedFields"].as_array()?.iter();
    let ours = entries.filter(|entry| {
        let text = |key: &str| entry[key].as_str().unwrap_or_default();
        text("manager").starts_with(FIELD_MANAGER_PREFIX)
            && text("operation") == "Apply"
            && text("subresource").is_empty()
    });
    ours.map(|entry| entry["fieldsV1"].clone()).reduce(|left, right| fields::union(&left, &right))
}

/// The lists that Kubernetes merges by a key, by their name: the keys of an item, of which one may be missing since it has a
/// default. All other lists of its kinds are one value.
const KEYED_LISTS: [(&str, &[&str]); 14] = [
    ("containers", &["name"]),
    ("env", &["name"]),
    ("ephemeralContainers", &["name"]),
    ("hostAliases", &["ip"]),
    ("imagePullSecrets", &["name"]),
    ("initContainers", &["name"]),
    ("ports", &["port", "containerPort", "protocol"]),
    ("resourceClaims", &["name"]),
    ("secrets", &["name"]),
    ("topologySpreadConstraints", &["topologyKey", "whenUnsatisfiable"]),
    ("volumeDevices", &["devicePath"]),
    ("volumeMounts", &["mountPath"]),
    ("volumes", &["name"]),
    ("webhooks", &["name"]),
];

struct Walk {
    built_in: bool,
}

impl Walk {
    /// What of `live` the plugin decides: what it sends, and what `owned` says that it has sent. In the order of what it sends,
    /// and in its words where they mean the same. `name` is that of the field.
    fn decided(&self, name: &str, sent: Option<&Value>, owned: Option<&Value>, live: &Value) -> Option<Value> {
        if sent.is_none() && owned.is_none() {
            return None;
        }
        let below = owned.and_then(Value::as_object).filter(|below| !below.is_empty());
        match (sent, live) {
            // Was sent as a whole, and is sent no longer.
            (None, live) if below.is_none() => Some(live.clone()),
            (None | Some(Value::Object(_)), Value::Object(live)) => {
                let ours = self.members(sent.and_then(Value::as_object), below, live);
                (sent.is_some() || !ours.is_empty()).then(|| ours.into())
            }
            (None | Some(Value::Array(_)), Value::Array(live)) => {
                let ours = self.items(name, sent.and_then(Value::as_array), below, live);
                (sent.is_some() || !ours.is_empty()).then(|| ours.into())
            }
            (Some(sent), live) if same(sent, live) => Some(sent.clone()),
            (_, live) => Some(live.clone()),
        }
    }

    fn members(
        &self,
        sent: Option<&Map<String, Value>>,
        owned: Option<&Map<String, Value>>,
        live: &Map<String, Value>,
    ) -> Map<String, Value> {
        let owner = |name: &str| owned.and_then(|owned| owned.get(&format!("f:{name}")));
        let mut ours = Map::new();
        for (name, sent) in sent.into_iter().flatten() {
            match live.get(name).filter(|live| !live.is_null()) {
                Some(live) => {
                    ours.extend(self.decided(name, Some(sent), owner(name), live).map(|value| (name.clone(), value)));
                }
                // What is empty is left out by the API server.
                None if includes(None, sent) => drop(ours.insert(name.clone(), sent.clone())),
                None => {}
            }
        }
        for (name, live) in live {
            if !sent.is_some_and(|sent| sent.contains_key(name)) {
                ours.extend(self.decided(name, None, owner(name), live).map(|value| (name.clone(), value)));
            }
        }
        ours
    }

    fn items(
        &self,
        name: &str,
        sent: Option<&Vec<Value>>,
        owned: Option<&Map<String, Value>>,
        live: &[Value],
    ) -> Vec<Value> {
        let sent = sent.map(Vec::as_slice).unwrap_or_default();
        let owners = Owners::of(owned);
        if !owners.values.is_empty() {
            let is_ours = |item: &&Value| sent.contains(item) || owners.values.contains(item);
            return live.iter().filter(is_ours).cloned().collect();
        }
        let Some(keys) = owners.keys().or_else(|| self.keys(name, sent)) else {
            // One value: whatever is in it is ours. Inside of its items there may be defaults.
            let item = |(at, live): (usize, &Value)| match sent.get(at) {
                Some(sent) => self.decided("", Some(sent), None, live),
                None => Some(live.clone()),
            };
            return live.iter().enumerate().filter_map(item).collect();
        };
        let mut used = vec![false; sent.len()];
        let item = |live: &Value| {
            let place = (0..sent.len()).find(|place| !used[*place] && has_key_of(&sent[*place], live, &keys));
            if let Some(place) = place {
                used[place] = true;
            }
            self.decided("", place.map(|place| &sent[place]), owners.of_item(live), live)
        };
        live.iter().filter_map(item).collect()
    }

    fn keys(&self, name: &str, sent: &[Value]) -> Option<Vec<String>> {
        let (_, keys) = KEYED_LISTS.iter().find(|(list, _)| self.built_in && *list == name)?;
        // Lists of strings can have such a name, too.
        sent.iter().all(Value::is_object).then(|| keys.iter().map(|key| (*key).to_owned()).collect())
    }
}

/// Whether an item that is sent is this one: the keys that it gives are the same.
fn has_key_of(sent: &Value, live: &Value, keys: &[String]) -> bool {
    let mut given = keys.iter().filter_map(|key| Some((sent.get(key)?, live.get(key)))).peekable();
    given.peek().is_some() && given.all(|(sent, live)| live.is_some_and(|live| same(sent, live)))
}

/// Who owns what in a list, by its node of `fieldsV1`.
struct Owners<'a> {
    values: Vec<Value>,
    keyed: Vec<(Map<String, Value>, &'a Value)>,
}

impl<'a> Owners<'a> {
    fn of(owned: Option<&'a Map<String, Value>>) -> Self {
        let (mut values, mut keyed) = (Vec::new(), Vec::new());
        for (name, below) in owned.into_iter().flatten() {
            match name.split_once(':') {
                Some(("v", value)) => values.extend(serde_json::from_str::<Value>(value)),
                Some(("k", key)) => keyed.extend(serde_json::from_str(key).map(|key| (key, below))),
                _ => {}
            }
        }
        Self { values, keyed }
    }

    fn keys(&self) -> Option<Vec<String>> {
        Some(self.keyed.first()?.0.keys().cloned().collect())
    }

    fn of_item(&self, live: &Value) -> Option<&'a Value> {
        let owner = self.keyed.iter().find(|(key, _)| key.iter().all(|(name, value)| live.get(name) == Some(value)));
        owner.map(|(_, below)| *below)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn compared(wanted: &Value, live: &Value) -> Comparison {
        compare(wanted.as_object(), Some(live), true).unwrap()
    }

    /// The lines that the diff removes and adds, without their indentation.
    fn changes(wanted: &Value, live: &Value) -> Vec<String> {
        let Comparison { action, diff } = compared(wanted, live);
        assert_eq!(action == Action::Unchanged, diff.is_empty());
        let lines = diff.lines().skip(2).filter(|line| line.starts_with(['-', '+']));
        lines.map(|line| format!("{} {}", &line[..1], line[1..].trim())).collect()
    }

    fn deployment() -> Value {
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "n", "labels": {"app": "web"}},
            "spec": {"template": {"spec": {"containers": [{"name": "web", "image": "a", "args": ["1"],
                "ports": [{"containerPort": 80}], "resources": {"limits": {"cpu": "1000m"}}}]}}}})
    }

    fn live() -> Value {
        json!({"kind": "Deployment", "apiVersion": "apps/v1",
            "metadata": {"namespace": "n", "name": "web", "uid": "u", "resourceVersion": "7", "generation": 2,
                "labels": {"app": "web", "internal.pilothouse.dev/applied": "1-x", "theirs": "1"},
                "annotations": {"deployment.kubernetes.io/revision": "1"},
                "ownerReferences": [{"kind": "MyApp", "name": "web", "uid": "p", "controller": true}]},
            "spec": {"replicas": 3, "template": {"spec": {"dnsPolicy": "ClusterFirst", "containers": [
                {"name": "sidecar", "image": "s"},
                {"name": "web", "image": "a", "args": ["1"], "imagePullPolicy": "Always",
                    "ports": [{"containerPort": 80, "protocol": "TCP"}], "resources": {"limits": {"cpu": "1"}}}]}}},
            "status": {"replicas": 3}})
    }

    #[test]
    fn what_others_and_the_api_server_add_does_not_show() {
        assert_eq!(compared(&deployment(), &live()).action, Action::Unchanged);
    }

    #[test]
    fn what_the_plugin_wants_otherwise_shows_and_nothing_else() {
        for (pointer, value, expected) in [
            ("/spec/template/spec/containers/0/image", json!("b"), vec!["- image: a", "+ image: b"]),
            ("/metadata/labels/app", json!("x"), vec!["- app: web", "+ app: x"]),
            ("/spec/template/spec/containers/0/resources/limits/cpu", json!("2"), vec!["- cpu: \"1\"", "+ cpu: \"2\""]),
        ] {
            let mut wanted = deployment();
            *wanted.pointer_mut(pointer).unwrap() = value;
            assert_eq!(changes(&wanted, &live()), expected, "{pointer}");
        }
        let mut wanted = deployment();
        wanted["spec"]["replicas"] = json!(5);
        assert_eq!(changes(&wanted, &live()), ["- replicas: 3", "+ replicas: 5"]);
        wanted["spec"] = json!({"paused": true});
        assert_eq!(changes(&wanted, &live()), ["- spec: {}", "+ spec:", "+ paused: true"]);
    }

    #[test]
    fn a_list_without_keys_is_one_value() {
        let object = |args: Value| json!({"apiVersion": "v1", "kind": "X", "metadata": {"name": "a"}, "args": args});
        assert_eq!(changes(&object(json!(["1"])), &object(json!(["1", "2"]))).len(), 1);
        assert_eq!(changes(&object(json!(["1", "2"])), &object(json!(["1"]))).len(), 1);
        assert_eq!(
            changes(&object(json!([])), &json!({"apiVersion": "v1", "kind": "X", "metadata": {"name": "a"}})).len(),
            0
        );
        let subjects = |names: &[&str]| {
            let subjects: Vec<_> = names.iter().map(|name| json!({"kind": "User", "name": name})).collect();
            json!({"apiVersion": "v1", "kind": "X", "metadata": {"name": "a"}, "subjects": subjects})
        };
        assert_eq!(changes(&subjects(&["a"]), &subjects(&["a", "b"])).len(), 2);
    }

    #[test]
    fn lists_of_custom_kinds_are_one_value() {
        let object = |names: &[&str]| {
            let items: Vec<_> = names.iter().map(|name| json!({"name": name})).collect();
            json!({"apiVersion": "t.example/v1", "kind": "X", "metadata": {"name": "a"}, "env": items})
        };
        let (wanted, live) = (object(&["a"]), object(&["a", "b"]));
        assert_eq!(compared(&wanted, &live).action, Action::Unchanged);
        let custom = compare(wanted.as_object(), Some(&live), false).unwrap();
        assert_eq!(custom.action, Action::Change);
    }

    #[test]
    fn what_was_sent_before_and_no_longer_is_shows_when_managed_fields_tell() {
        let fields = json!({"f:metadata": {"f:labels": {"f:app": {}, "f:old": {}, "f:internal.pilothouse.dev/applied": {}},
                "f:ownerReferences": {"k:{\"uid\":\"p\"}": {}}},
            "f:spec": {"f:template": {"f:spec": {
                "f:containers": {"k:{\"name\":\"web\"}": {".": {}, "f:name": {}, "f:image": {}, "f:args": {}, "f:tty": {}, "f:resources": {},
                        "f:ports": {"k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {".": {}, "f:containerPort": {}}}},
                    "k:{\"name\":\"gone\"}": {".": {}, "f:name": {}}}}}}});
        let mut live = live();
        live["metadata"]["labels"]["old"] = json!("1");
        live["spec"]["template"]["spec"]["containers"][1]["tty"] = json!(true);
        let containers = live["spec"]["template"]["spec"]["containers"].as_array_mut().unwrap();
        containers.push(json!({"name": "gone", "image": "defaulted by somebody"}));
        assert_eq!(compared(&deployment(), &live).action, Action::Unchanged, "not told");
        live["metadata"]["managedFields"] = json!([
            {"manager": "pilothouse/1", "operation": "Apply", "fieldsV1": fields},
            {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        ]);
        let expected = ["- old: \"1\"", "- tty: true", "- - name: gone"];
        assert_eq!(changes(&deployment(), &live), expected);
    }

    #[test]
    fn sets_are_compared_by_their_own_members() {
        let object = |hosts: Value| json!({"apiVersion": "v1", "kind": "X", "metadata": {"name": "a"}, "hosts": hosts});
        let mut live = object(json!(["theirs", "ours", "old"]));
        live["metadata"]["managedFields"] = json!([{"manager": "pilothouse/1", "operation": "Apply",
            "fieldsV1": {"f:hosts": {"v:\"ours\"": {}, "v:\"old\"": {}}}}]);
        assert_eq!(changes(&object(json!(["ours"])), &live), ["- - old"]);
    }

    #[test]
    fn what_is_created_or_deleted_shows_as_a_whole() {
        let wanted = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "v"}});
        let created = compare(wanted.as_object(), None, true).unwrap();
        assert_eq!(created.action, Action::Create);
        assert!(created.diff.contains("+kind: ConfigMap"), "{}", created.diff);
        let deleted = compare(None, Some(&live()), true).unwrap();
        assert_eq!(deleted.action, Action::Delete);
        assert!(deleted.diff.contains("-kind: Deployment"), "{}", deleted.diff);
        assert!(!deleted.diff.contains("status") && !deleted.diff.contains("uid"), "{}", deleted.diff);
    }
}
