//! Whether a live object is what we would send: the walk behind the no-op rule of a host that remembers nothing yet, and behind
//! the question whether the answer to an apply is what was sent.
//!
//! Every leaf of what is sent has to be owned by our own entry of `metadata.managedFields` (somebody who changes or removes a field takes
//! it from us), and has to be equal to the live one (admission can change a value and leave its owner). Neither needs a schema:
//! `fieldsV1` itself says what is a keyed list (`k:`), a set (`v:`) or atomic (it stops there).

use std::fmt;

use serde_json::{Map, Value};

use super::{projection::position_of_key, quantity::quantity};

/// A field that is not as it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Where, as `spec.ports[0].port`.
    pub path: String,
    /// Whether our entry owns it all the same: then nobody took it, and the API server or admission made it so.
    pub owned: bool,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

/// What says which object is meant, not what it should be.
const NAMES: [&str; 4] = ["name", "namespace", "uid", "resourceVersion"];

/// Where `live` is not what `sent` says, or is not ours. `fields` is the `fieldsV1` of our own Apply entry in `live`.
pub fn differences(sent: &Map<String, Value>, fields: &Value, live: &Value) -> Vec<Difference> {
    let mut walk = Walk::default();
    for (name, value) in sent {
        match (name.as_str(), value) {
            ("apiVersion" | "kind", _) => {}
            ("metadata", Value::Object(metadata)) => {
                let (fields, live) = (fields.get("f:metadata"), live.get("metadata"));
                let decided = metadata.iter().filter(|(name, _)| !NAMES.contains(&name.as_str()));
                decided.for_each(|(name, value)| walk.member(name, value, fields, live, "metadata"));
            }
            _ => walk.member(name, value, Some(fields), Some(live), ""),
        }
    }
    walk.found
}

#[derive(Default)]
struct Walk {
    found: Vec<Difference>,
}

impl Walk {
    fn report(&mut self, path: &str, owned: bool) {
        self.found.push(Difference { path: path.to_owned(), owned });
    }

    fn member(&mut self, name: &str, sent: &Value, fields: Option<&Value>, live: Option<&Value>, path: &str) {
        let fields = fields.and_then(|fields| fields.get(format!("f:{name}")));
        let live = live.and_then(|live| live.get(name));
        let dot = if path.is_empty() { "" } else { "." };
        self.value(sent, fields, live, &format!("{path}{dot}{name}"));
    }

    fn value(&mut self, sent: &Value, fields: Option<&Value>, live: Option<&Value>, path: &str) {
        if sent.is_null() {
            // A null asks for nothing, so nobody owns it.
            if live.is_some_and(|live| !live.is_null()) {
                self.report(path, true);
            }
            return;
        }
        let Some(Value::Object(owned)) = fields else {
            // An empty keyed list or set has no owner, but an empty atomic list had one: if something is there, it may have been taken.
            if !owns_nothing(sent) || !includes(live, sent) {
                self.report(path, false);
            }
            return;
        };
        match sent {
            // The entry stops here: a scalar, or an atomic list, map or struct.
            _ if owned.is_empty() => {
                if !includes(live, sent) {
                    self.report(path, true);
                }
            }
            Value::Object(members) => {
                members.iter().for_each(|(name, value)| self.member(name, value, fields, live, path));
            }
            Value::Array(items) => self.list(items, owned, live, path),
            _ => self.report(path, false),
        }
    }

    fn list(&mut self, items: &[Value], owned: &Map<String, Value>, live: Option<&Value>, path: &str) {
        let live = live.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let members = Members::of(owned);
        let mut last = None;
        let mut in_order = true;
        for (at, (item, owner)) in items.iter().zip(members.owners(items)).enumerate() {
            if item.is_null() {
                continue;
            }
            let path = format!("{path}[{at}]");
            let place = match owner {
                None => {
                    self.report(&path, false);
                    continue;
                }
                Some(Owner::Value) => live.iter().position(|live| same(item, live)),
                Some(Owner::Key(place)) => {
                    let (key, fields) = &members.keyed[place];
                    let place = position_of_key(live, key);
                    if let Some(place) = place {
                        self.value(item, Some(fields), Some(&live[place]), &path);
                    }
                    place
                }
            };
            match place {
                None => self.report(&path, true),
                Some(_) => {
                    in_order &= place > last;
                    last = place;
                }
            }
        }
        if !in_order {
            self.report(path, true);
        }
    }
}

/// What an entry owns of a list.
struct Members<'a> {
    values: Vec<Value>,
    keyed: Vec<(Map<String, Value>, &'a Value)>,
}

/// What owns a list item: its value, or the key in this place of [`Members`].
#[derive(Clone, Copy)]
enum Owner {
    Value,
    Key(usize),
}

impl<'a> Members<'a> {
    fn of(owned: &'a Map<String, Value>) -> Self {
        let values = owned.keys().filter_map(|name| serde_json::from_str(name.strip_prefix("v:")?).ok()).collect();
        let keyed = owned
            .iter()
            .filter_map(|(name, fields)| Some((serde_json::from_str(name.strip_prefix("k:")?).ok()?, fields)))
            .collect();
        Self { values, keyed }
    }

    /// Hands each item its owner: exact keys first, since an item may leave out a key that has a default; each owner once; and what
    /// is ambiguous then gets none.
    fn owners(&self, items: &[Value]) -> Vec<Option<Owner>> {
        let mut owners: Vec<_> = items
            .iter()
            .map(|item| self.values.iter().any(|value| same(item, value)).then_some(Owner::Value))
            .collect();
        let mut used = vec![false; self.keyed.len()];
        for may_default in [false, true] {
            for (item, owner) in items.iter().zip(&mut owners) {
                let (Some(item), None) = (item.as_object(), &owner) else { continue };
                let fits = |place: &usize| {
                    let key = &self.keyed[*place].0;
                    !used[*place]
                        && key
                            .iter()
                            .all(|(name, value)| item.get(name).is_none_or(|it| it.is_null() || same(it, value)))
                };
                let fitting: Vec<_> = (0..self.keyed.len()).filter(fits).collect();
                let exact =
                    fitting.iter().find(|place| self.keyed[**place].0.keys().all(|name| item.contains_key(name)));
                let found = match (exact, fitting.as_slice()) {
                    (Some(exact), _) => *exact,
                    (None, [only]) if may_default => *only,
                    _ => continue,
                };
                used[found] = true;
                *owner = Some(Owner::Key(found));
            }
        }
        owners
    }
}

/// Whether `live` has all of `sent`: maps may have more, which was defaulted, and lists may not.
pub fn includes(live: Option<&Value>, sent: &Value) -> bool {
    // What is empty is left out by Go.
    let Some(live) = live.filter(|live| !live.is_null()) else { return is_empty(sent) };
    match (sent, live) {
        (Value::Null, _) => false,
        (Value::Object(sent), Value::Object(live)) => sent.iter().all(|(name, value)| includes(live.get(name), value)),
        (Value::Array(sent), Value::Array(live)) => {
            sent.len() == live.len() && sent.iter().zip(live).all(|(sent, live)| includes(Some(live), sent))
        }
        _ => same(sent, live),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.values().all(is_empty),
    }
}

/// Whether it may be that an apply of this has no owner: empty lists, and what holds nothing else.
fn owns_nothing(sent: &Value) -> bool {
    match sent {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => !members.is_empty() && members.values().all(owns_nothing),
        _ => false,
    }
}

/// Whether two values mean the same: 1 and 1.0, and quantities such as 1000m and 1.
pub fn same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::String(_) | Value::Number(_), Value::String(_) | Value::Number(_)) if left != right => {
            quantity(left).is_some_and(|left| quantity(right) == Some(left))
        }
        _ => left == right,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn paths(sent: &Value, fields: &Value, live: &Value) -> Vec<(String, bool)> {
        let found = differences(sent.as_object().unwrap(), fields, live);
        found.into_iter().map(|difference| (difference.path, difference.owned)).collect()
    }

    /// Compares `spec` only.
    fn spec(sent: Value, fields: Value, live: Value) -> Vec<(String, bool)> {
        paths(&json!({"spec": sent}), &json!({"f:spec": fields}), &json!({"spec": live}))
    }

    fn taken(path: &str) -> Vec<(String, bool)> {
        vec![(path.to_owned(), false)]
    }

    fn changed(path: &str) -> Vec<(String, bool)> {
        vec![(path.to_owned(), true)]
    }

    #[test]
    fn what_names_the_object_is_left_out_and_our_own_marks_are_not() {
        let sent = json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "a", "namespace": "n", "uid": "u", "labels": {"l": "1"}, "annotations": {"a": "1"},
                "ownerReferences": [{"uid": "p", "name": "p", "controller": true}]},
            "data": {"k": "v"}});
        let fields = json!({"f:metadata": {"f:labels": {"f:l": {}}, "f:annotations": {"f:a": {}},
            "f:ownerReferences": {"k:{\"uid\":\"p\"}": {}}}, "f:data": {"f:k": {}}});
        assert_eq!(paths(&sent, &fields, &sent), []);
        for (pointer, path) in [
            ("/metadata/labels/l", "metadata.labels.l"),
            ("/metadata/annotations/a", "metadata.annotations.a"),
            ("/metadata/ownerReferences/0/name", "metadata.ownerReferences[0]"),
            ("/data/k", "data.k"),
        ] {
            let mut live = sent.clone();
            *live.pointer_mut(pointer).unwrap() = "x".into();
            assert_eq!(paths(&sent, &fields, &live), changed(path));
        }
        for (pointer, name, path) in [
            ("/f:metadata/f:labels", "f:l", "metadata.labels.l"),
            ("/f:metadata/f:ownerReferences", "k:{\"uid\":\"p\"}", "metadata.ownerReferences[0]"),
            ("/f:data", "f:k", "data.k"),
            ("", "f:data", "data"),
        ] {
            let mut fields = fields.clone();
            let node = fields.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
            assert!(node.remove(name).is_some());
            // A node that is left empty would say that it stops there.
            node.insert("f:other".to_owned(), json!({}));
            assert_eq!(paths(&sent, &fields, &sent), taken(path));
        }
    }

    #[test]
    fn lists_with_keys_that_the_server_defaults() {
        let fields = json!({"f:ports": {
            "k:{\"port\":53,\"protocol\":\"TCP\"}": {".": {}, "f:port": {}, "f:name": {}},
            "k:{\"port\":53,\"protocol\":\"UDP\"}": {".": {}, "f:port": {}, "f:name": {}, "f:protocol": {}}}});
        let live = json!({"ports": [{"name": "t", "port": 53, "protocol": "TCP", "targetPort": 53},
            {"name": "u", "port": 53, "protocol": "UDP", "targetPort": 53}]});
        let sent = json!({"ports": [{"name": "t", "port": 53}, {"name": "u", "port": 53, "protocol": "UDP"}]});
        assert_eq!(spec(sent, fields.clone(), live.clone()), []);
        let two_left_out = json!({"ports": [{"name": "t", "port": 53}, {"name": "u", "port": 53}]});
        assert_eq!(spec(two_left_out, fields.clone(), live.clone()).len(), 2, "ambiguous is not covered");
        let swapped = json!({"ports": [{"name": "u", "port": 53, "protocol": "UDP"}, {"name": "t", "port": 53}]});
        assert_eq!(spec(swapped, fields.clone(), live.clone()), changed("spec.ports"));
        let renamed = json!({"ports": [{"name": "x", "port": 53}, {"name": "u", "port": 53, "protocol": "UDP"}]});
        assert_eq!(spec(renamed, fields.clone(), live), changed("spec.ports[0].name"));
        let gone = json!({"ports": [{"name": "t", "port": 53, "protocol": "TCP"}]});
        let sent = json!({"ports": [{"name": "t", "port": 53}, {"name": "u", "port": 53, "protocol": "UDP"}]});
        assert_eq!(spec(sent, fields, gone), changed("spec.ports[1]"));
    }

    #[test]
    fn others_may_add_to_a_keyed_list_and_to_a_set_and_not_to_an_atomic_one() {
        let fields = json!({"f:containers": {"k:{\"name\":\"a\"}": {".": {}, "f:name": {}}}, "f:hosts": {"v:\"x\"": {}}, "f:args": {}});
        let sent = json!({"containers": [{"name": "a"}], "hosts": ["x"], "args": ["1"]});
        let live =
            json!({"containers": [{"name": "side"}, {"name": "a", "tty": true}], "hosts": ["w", "x"], "args": ["1"]});
        assert_eq!(spec(sent.clone(), fields.clone(), live), []);
        let live = json!({"containers": [{"name": "a"}], "hosts": ["w"], "args": ["1", "2"]});
        let expected = [("spec.hosts[0]".to_owned(), true), ("spec.args".to_owned(), true)];
        assert_eq!(spec(sent, fields, live), expected);
    }

    #[test]
    fn what_is_empty() {
        // An empty keyed list has no owner; an empty map or atomic list is a leaf.
        assert_eq!(spec(json!({"a": 1, "env": []}), json!({"f:a": {}}), json!({"a": 1})), []);
        assert_eq!(spec(json!({"a": 1, "pod": {"env": []}}), json!({"f:a": {}}), json!({"a": 1, "pod": {}})), []);
        // An empty atomic list is taken by whoever fills it.
        let filled = json!({"a": 1, "args": ["1"]});
        assert_eq!(spec(json!({"a": 1, "args": []}), json!({"f:a": {}}), filled), taken("spec.args"));
        assert_eq!(spec(json!({"a": 1, "dir": {}}), json!({"f:a": {}}), json!({"a": 1, "dir": {}})), taken("spec.dir"));
        assert_eq!(spec(json!({"dir": {}}), json!({"f:dir": {}}), json!({"dir": {}})), []);
        assert_eq!(spec(json!({"dir": {}}), json!({"f:dir": {}}), json!({"dir": {"medium": ""}})), []);
        assert_eq!(
            spec(
                json!({"args": [], "v": "", "n": 0, "b": false}),
                json!({"f:args": {}, "f:v": {}, "f:n": {}, "f:b": {}}),
                json!({})
            ),
            [],
            "Go leaves them out"
        );
        assert_eq!(spec(json!({"args": []}), json!({"f:args": {}}), json!({"args": ["1"]})), changed("spec.args"));
        assert_eq!(spec(json!({"l": [{}]}), json!({"f:l": {}}), json!({"l": []})), changed("spec.l"));
    }

    #[test]
    fn nulls_ask_for_nothing() {
        assert_eq!(spec(json!({"a": null, "b": 1}), json!({"f:b": {}}), json!({"b": 1})), []);
        assert_eq!(spec(json!({"a": null, "b": 1}), json!({"f:b": {}}), json!({"a": null, "b": 1})), []);
        assert_eq!(spec(json!({"a": null, "b": 1}), json!({"f:b": {}}), json!({"a": 2, "b": 1})), changed("spec.a"));
        assert_eq!(spec(json!({"a": {"x": null}}), json!({"f:a": {}}), json!({"a": {"x": 1}})), changed("spec.a"));
    }

    #[test]
    fn an_atomic_struct_has_defaults_inside() {
        let live = json!({"ref": {"kind": "Role", "name": "r", "apiGroup": "rbac"}});
        assert_eq!(spec(json!({"ref": {"kind": "Role", "name": "r"}}), json!({"f:ref": {}}), live.clone()), []);
        assert_eq!(
            spec(json!({"ref": {"kind": "Role", "name": "x"}}), json!({"f:ref": {}}), live),
            changed("spec.ref")
        );
    }

    #[test]
    fn spellings_of_one_amount() {
        let fields = json!({"f:a": {}});
        for (sent, live) in [
            (json!(1), json!(1.0)),
            (json!(1), json!("1")),
            (json!("1000m"), json!("1")),
            (json!("0.5"), json!("500m")),
            (json!("2048Mi"), json!("2Gi")),
            (json!("1e3"), json!("1k")),
            (json!(1_073_741_824_u64), json!("1Gi")),
        ] {
            assert_eq!(spec(json!({"a": sent}), fields.clone(), json!({"a": live})), [], "{sent} {live}");
        }
        for (sent, live) in [
            (json!("a"), json!("b")),
            (json!("1"), json!("2")),
            (json!("1Mi"), json!("1M")),
            (json!(true), json!("true")),
            (json!(1), json!(true)),
            (json!("60s"), json!("1m0s")),
        ] {
            assert_eq!(
                spec(json!({"a": sent}), fields.clone(), json!({"a": live})),
                changed("spec.a"),
                "{sent} {live}"
            );
        }
    }

    #[test]
    fn odd_entries_are_a_doubt_and_never_a_panic() {
        assert_eq!(spec(json!({"a": 1}), json!({"f:a": {"f:b": {}}}), json!({"a": 1})), taken("spec.a"));
        assert_eq!(spec(json!({"a": [1]}), json!({"f:a": {"i:0": {}}}), json!({"a": [1]})), taken("spec.a[0]"));
        assert_eq!(spec(json!({"a": [{}]}), json!({"f:a": {"k:{": {}}}), json!({"a": [{}]})), taken("spec.a[0]"));
        assert_eq!(spec(json!({"a": 1}), json!(null), json!(7)), taken("spec"));
    }
}
