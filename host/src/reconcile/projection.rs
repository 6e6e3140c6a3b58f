//! The no-op rule: what of a live object is ours, as a digest.
//!
//! The *projection* of an object is the part of it that one entry of `metadata.managedFields` owns. As long as the plugin
//! wants the same and the projection is the same, nobody has changed, removed or taken a field of ours, and there is nothing to
//! write; what others do to their own fields does not show in it. The walk needs no schema, since `fieldsV1` itself says what is a
//! keyed list (`k:`), a set (`v:`) or atomic (it stops there). The order of our own list items is ours, too: the one of init
//! containers decides. See "Server-Side Apply" in the Kubernetes documentation.

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

/// A SHA-256.
pub type Digest = [u8; 32];

/// The digest of a JSON value, the same for every order of keys.
pub fn digest(value: &Value) -> Digest {
    let mut hash = Sha256::new();
    canonical(value, &mut hash);
    hash.finalize().into()
}

/// The digest of a JSON object, the same for every order of keys.
pub fn digest_object(object: &Map<String, Value>) -> Digest {
    let mut hash = Sha256::new();
    canonical_object(object, &mut hash);
    hash.finalize().into()
}

/// The digest of what `fields`, a `fieldsV1` document, owns of the object `live`.
///
/// # Errors
/// If one of them is not JSON.
pub fn projection(fields: &str, live: &str) -> Result<Digest, serde_json::Error> {
    Ok(projection_of(&serde_json::from_str(fields)?, &serde_json::from_str(live)?))
}

/// [`projection`] of what is parsed already.
pub fn projection_of(fields: &Value, live: &Value) -> Digest {
    let mut hash = Sha256::new();
    project(fields, Some(live), &mut hash);
    hash.finalize().into()
}

fn project(fields: &Value, live: Option<&Value>, hash: &mut Sha256) {
    let Some(live) = live else { return hash.update(b"absent") };
    let members = match fields {
        Value::Object(members) if !members.is_empty() => members,
        // Ours as a whole: a scalar, or an atomic list or map.
        _ => return canonical(live, hash),
    };
    hash.update(b"<");
    match live {
        Value::Array(items) => {
            let mut owned: Vec<_> = members.iter().map(|(name, below)| (place(items, name), name, below)).collect();
            owned.sort_unstable_by_key(|(place, name, _)| (*place, *name));
            for (place, name, below) in owned {
                hash.update(name);
                project(below, place.map(|place| &items[place]), hash);
            }
        }
        live => {
            for name in sorted(members) {
                hash.update(name);
                // Also `.`: that it is there at all is ours.
                if let Some(field) = name.strip_prefix("f:") {
                    project(&members[name], live.get(field), hash);
                }
            }
        }
    }
    hash.update(b">");
}

/// Where in a list the item is that a member of its node owns.
fn place(items: &[Value], name: &str) -> Option<usize> {
    match name.split_once(':')? {
        ("k", key) => position_of_key(items, &serde_json::from_str(key).ok()?),
        ("v", value) => {
            let value: Value = serde_json::from_str(value).ok()?;
            items.iter().position(|item| *item == value)
        }
        ("i", index) => index.parse().ok().filter(|index| *index < items.len()),
        _ => None,
    }
}

/// Where in a list the item with this key is.
pub fn position_of_key(items: &[Value], key: &Map<String, Value>) -> Option<usize> {
    items.iter().position(|item| key.iter().all(|(name, value)| item.get(name) == Some(value)))
}

fn canonical(value: &Value, hash: &mut Sha256) {
    match value {
        Value::Object(object) => canonical_object(object, hash),
        Value::Array(items) => {
            hash.update(b"[");
            for item in items {
                canonical(item, hash);
                hash.update(b",");
            }
            hash.update(b"]");
        }
        scalar => hash.update(scalar.to_string()),
    }
}

fn canonical_object(object: &Map<String, Value>, hash: &mut Sha256) {
    hash.update(b"{");
    for name in sorted(object) {
        // As JSON text, so that no name can pass for two.
        hash.update(Value::from(name.as_str()).to_string());
        hash.update(b":");
        canonical(&object[name], hash);
        hash.update(b",");
    }
    hash.update(b"}");
}

fn sorted(object: &Map<String, Value>) -> Vec<&String> {
    let mut names: Vec<_> = object.keys().collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const FIELDS: &str = r#"{
        "f:metadata": {"f:labels": {"f:app": {}}},
        "f:spec": {
            "f:replicas": {},
            "f:template": {"f:spec": {"f:containers": {"k:{\"name\":\"app\"}": {".": {}, "f:image": {}, "f:name": {}}}}},
            "f:args": {},
            "f:hosts": {"v:\"a\"": {}}
        }
    }"#;

    fn live() -> Value {
        json!({
            "metadata": {"name": "x", "labels": {"app": "x", "theirs": "1"}, "resourceVersion": "1"},
            "spec": {
                "replicas": 3,
                "paused": false,
                "template": {"spec": {"containers": [{"name": "side", "image": "s"}, {"name": "app", "image": "a", "tty": true}]}},
                "args": ["1", "2"],
                "hosts": ["a", "b"]
            },
            "status": {"n": 1}
        })
    }

    fn project_live(live: &Value) -> Digest {
        projection(FIELDS, &live.to_string()).unwrap()
    }

    #[test]
    fn what_others_do_to_their_own_fields_does_not_show() {
        let before = project_live(&live());
        for (pointer, value) in [
            ("/metadata/labels/theirs", json!("2")),
            ("/metadata/resourceVersion", json!("2")),
            ("/spec/paused", json!(true)),
            ("/spec/template/spec/containers/0/image", json!("other")),
            ("/spec/template/spec/containers/1/tty", json!(false)),
            ("/spec/hosts/1", json!("c")),
            ("/status/n", json!(2)),
        ] {
            let mut live = live();
            *live.pointer_mut(pointer).unwrap() = value;
            assert_eq!(project_live(&live), before, "{pointer} is not ours");
        }
    }

    #[test]
    fn a_changed_field_of_ours_shows() {
        let before = project_live(&live());
        for (pointer, value) in [
            ("/metadata/labels/app", json!("y")),
            ("/spec/replicas", json!(4)),
            ("/spec/replicas", json!("3")),
            ("/spec/template/spec/containers/1/image", json!("b")),
            ("/spec/template/spec/containers/1/name", json!("renamed")),
            ("/spec/args", json!(["2", "1"])),
            ("/spec/args", json!(["12"])),
            ("/spec/hosts/0", json!("z")),
            ("/spec/template", json!({})),
        ] {
            let mut live = live();
            *live.pointer_mut(pointer).unwrap() = value;
            assert_ne!(project_live(&live), before, "{pointer} is ours");
        }
    }

    #[test]
    fn the_order_of_our_items_shows_and_that_of_others_does_not() {
        let fields = r#"{"f:l": {"k:{\"n\":1}": {".": {}}, "k:{\"n\":2}": {".": {}}}}"#;
        let of = |items: &[i32]| {
            let items: Vec<_> = items.iter().map(|n| json!({"n": n})).collect();
            projection(fields, &json!({"l": items}).to_string()).unwrap()
        };
        assert_eq!(of(&[1, 2]), of(&[3, 1, 4, 2]));
        assert_ne!(of(&[1, 2]), of(&[2, 1]));
    }

    #[test]
    fn a_field_taken_from_us_shows() {
        let taken = FIELDS.replace(r#""f:replicas": {},"#, "");
        assert_ne!(projection(&taken, &live().to_string()).unwrap(), project_live(&live()));
    }

    #[test]
    fn the_order_of_keys_does_not_matter_and_the_order_of_items_does() {
        let digest_of = |text: &str| digest(&serde_json::from_str(text).unwrap());
        assert_eq!(digest_of(r#"{"a":1,"b":{"c":[1,2],"d":null}}"#), digest_of(r#"{"b":{"d":null,"c":[1,2]},"a":1}"#));
        assert_ne!(digest_of("[1,2]"), digest_of("[2,1]"));
        assert_ne!(digest_of(r#"{"a":{}}"#), digest_of(r#"{"a":[]}"#));
        assert_ne!(digest_of(r#"["1,2"]"#), digest_of(r#"["1","2"]"#));
    }
}
