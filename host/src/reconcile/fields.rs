//! The algebra of `fieldsV1`, the sets of fields in `metadata.managedFields`. Pure.
//!
//! A node is a JSON object. An empty one is a field that is owned itself; in one that is not, `"."` says so, and the other members
//! are the fields below. The root is no field, so an empty root is the empty set. See "FieldsV1" in the Kubernetes documentation.

use serde_json::{Map, Value};

const SELF: &str = ".";

/// The fields that are in `left` or in `right`.
pub fn union(left: &Value, right: &Value) -> Value {
    let (Value::Object(left), Value::Object(right)) = (left, right) else { return left.clone() };
    let mut fields = below(left).map(|(name, node)| (name.clone(), node.clone())).collect::<Map<_, _>>();
    for (name, node) in below(right) {
        let both = fields.get(name).map_or_else(|| node.clone(), |known| union_nodes(known, node));
        fields.insert(name.clone(), both);
    }
    fields.into()
}

fn union_nodes(left: &Value, right: &Value) -> Value {
    let fields = union(left, right);
    node(is_owned(left) || is_owned(right), fields).unwrap_or_default()
}

/// The fields of `left` that are not in `right`. Who owns a field is taken to own the way to it, too: a map that is there only for a
/// field that goes has to go with it, or a union would keep a member that is empty.
pub fn difference(left: &Value, right: &Value) -> Value {
    let Value::Object(members) = left else { return left.clone() };
    let rest = below(members).filter_map(|(name, fields)| match right.get(name) {
        None => Some((name.clone(), fields.clone())),
        Some(right) => Some((name.clone(), node(false, difference(fields, right))?)),
    });
    rest.collect::<Map<_, _>>().into()
}

/// The fields that are in both.
pub fn intersection(left: &Value, right: &Value) -> Value {
    difference(left, &difference(left, right))
}

/// Each field with nothing below it, as `spec.ports[port=80].name`.
pub fn paths(root: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    add_paths(root, "", &mut paths);
    paths
}

fn add_paths(node: &Value, path: &str, paths: &mut Vec<String>) {
    for (name, fields) in node.as_object().into_iter().flat_map(below) {
        let path = match name.split_once(':') {
            Some(("f", name)) if path.is_empty() => name.to_owned(),
            Some(("f", name)) => format!("{path}.{name}"),
            Some(("k", key)) => {
                let key: Map<String, Value> = serde_json::from_str(key).unwrap_or_default();
                let parts: Vec<_> = key.iter().map(|(name, value)| format!("{name}={value}")).collect();
                format!("{path}[{}]", parts.join(","))
            }
            Some(("v", value)) => format!("{path}[={value}]"),
            _ => format!("{path}[{name}]"),
        };
        if is_empty(fields) {
            paths.push(path);
        } else {
            add_paths(fields, &path, paths);
        }
    }
}

/// Whether some field is in both.
pub fn overlaps(left: &Value, right: &Value) -> bool {
    difference(left, right) != *left
}

/// Whether it is the empty set.
pub fn is_empty(root: &Value) -> bool {
    root.as_object().is_none_or(|members| below(members).next().is_none())
}

fn below(members: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    members.iter().filter(|(name, _)| *name != SELF)
}

fn is_owned(node: &Value) -> bool {
    node.as_object().is_some_and(|members| members.is_empty() || members.contains_key(SELF))
}

/// A node below the root. None: nothing of it is left.
fn node(owned: bool, fields: Value) -> Option<Value> {
    match fields {
        Value::Object(below) if below.is_empty() => owned.then(|| below.into()),
        Value::Object(mut below) if owned => {
            below.insert(SELF.to_owned(), Map::new().into());
            Some(below.into())
        }
        fields => Some(fields),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_union_has_both() {
        let left = json!({"f:data": {"f:a": {}, "f:b": {}}, "f:atomic": {}});
        let right = json!({"f:data": {".": {}, "f:b": {}, "f:c": {}}, "f:atomic": {"f:x": {}}, "f:list": {"k:{\"n\":1}": {".": {}, "f:n": {}}}});
        let both = union(&left, &right);
        assert_eq!(
            both,
            json!({"f:data": {".": {}, "f:a": {}, "f:b": {}, "f:c": {}}, "f:atomic": {".": {}, "f:x": {}},
                "f:list": {"k:{\"n\":1}": {".": {}, "f:n": {}}}})
        );
        assert_eq!(union(&right, &left), both);
        assert_eq!(union(&left, &json!({})), left);
        assert_eq!(union(&json!({}), &json!({})), json!({}));
    }

    #[test]
    fn a_difference_leaves_what_is_not_ours_and_takes_the_way_to_ours() {
        let theirs = json!({
            "f:metadata": {"f:labels": {".": {}, "f:theirs": {}, "f:ours": {}}},
            "f:spec": {"f:volumes": {".": {}, "k:{\"name\":\"a\"}": {".": {}, "f:configMap": {".": {}, "f:name": {}, "f:defaultMode": {}}, "f:name": {}}}},
            "f:data": {".": {}, "f:ours": {}},
        });
        let ours = json!({
            "f:metadata": {"f:labels": {"f:ours": {}}, "f:annotations": {"f:x": {}}},
            "f:spec": {"f:volumes": {"k:{\"name\":\"a\"}": {".": {}, "f:configMap": {"f:name": {}}, "f:name": {}}}},
            "f:data": {"f:ours": {}},
        });
        let rest = difference(&theirs, &ours);
        assert_eq!(
            rest,
            json!({"f:metadata": {"f:labels": {"f:theirs": {}}},
                "f:spec": {"f:volumes": {"k:{\"name\":\"a\"}": {"f:configMap": {"f:defaultMode": {}}}}}})
        );
        assert_eq!(difference(&rest, &ours), rest);
        assert!(overlaps(&theirs, &ours));
        assert!(!overlaps(&json!({"f:data": {"f:theirs": {}}}), &json!({"f:spec": {}})));
        assert!(is_empty(&difference(&ours, &ours)));
        assert!(!is_empty(&rest));
    }

    #[test]
    fn paths_name_what_is_in_both() {
        let theirs = json!({
            "f:metadata": {"f:annotations": {".": {}, "f:t.example/x": {}, "f:theirs": {}}},
            "f:spec": {"f:ports": {"k:{\"port\":80,\"protocol\":\"TCP\"}": {".": {}, "f:name": {}}}, "f:atomic": {}},
            "f:set": {"v:\"a\"": {}},
        });
        let ours = json!({
            "f:metadata": {"f:annotations": {"f:t.example/x": {}}},
            "f:spec": {"f:ports": {"k:{\"port\":80,\"protocol\":\"TCP\"}": {".": {}, "f:name": {}, "f:port": {}}}},
            "f:set": {"v:\"a\"": {}, "v:\"b\"": {}},
        });
        let both = ["metadata.annotations.t.example/x", "spec.ports[port=80,protocol=\"TCP\"].name", "set[=\"a\"]"];
        assert_eq!(paths(&intersection(&theirs, &ours)), both);
        assert!(is_empty(&intersection(&theirs, &json!({"f:data": {}}))));
    }

    #[test]
    fn sets_and_atomic_fields() {
        let theirs = json!({"f:set": {"v:\"a\"": {}, "v:\"b\"": {}}, "f:atomic": {}});
        let ours = json!({"f:set": {"v:\"a\"": {}}, "f:atomic": {}});
        assert_eq!(difference(&theirs, &ours), json!({"f:set": {"v:\"b\"": {}}}));
    }
}
