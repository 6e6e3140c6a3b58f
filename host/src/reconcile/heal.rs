//! Drift that an apply cannot undo, since an apply merges: a union whose member was swapped. Pure.
//!
//! When a volume's `configMap` has been replaced by an `emptyDir`, our apply would make a volume of both, and the API server
//! refuses that with 422. It names the field; what encloses that field is replaced by ours as a whole.

use json_patch::{PatchOperation, ReplaceOperation, TestOperation, jsonptr::PointerBuf};
use serde_json::{Map, Value};

use super::{coverage::includes, projection::position_of_key};

/// Never replaced as a whole: too much in them is not ours.
const TOO_LARGE: [&str; 3] = ["metadata", "spec", "template"];

/// The patch that puts ours in place of what encloses the `refused` fields of `live`. None: this is no such drift.
///
/// `refused` are the fields of a 422, as `spec.template.spec.volumes[0].configMap`; an index is of no use, since it counts in a
/// merged list that nobody has seen. `fields`, our entry of `managedFields` or null, knows the keys of lists.
pub fn heal<'a>(
    refused: impl IntoIterator<Item = &'a str>,
    sent: &Map<String, Value>,
    fields: &Value,
    live: &Value,
) -> Option<json_patch::Patch> {
    let sent = Value::from(sent.clone());
    let mut found = Vec::new();
    for field in refused {
        let path = parse(field);
        let place = Place { sent: &sent, fields, live, pointer: Vec::new() };
        if let Some(enclosing) = path.len().checked_sub(1).filter(|enclosing| *enclosing >= 2) {
            // A list item that is named itself is what is to be replaced.
            let depth = if matches!(path[enclosing], Step::Item) { path.len() } else { enclosing };
            place.find(&path[..depth], &mut found);
        }
    }
    let uid = live.get("metadata")?.get("uid")?;
    let test = |path: PointerBuf, value: &Value| PatchOperation::Test(TestOperation { path, value: value.clone() });
    let mut patch = vec![test(PointerBuf::from_tokens(["metadata", "uid"]), uid)];
    let mut replaced: Vec<Vec<String>> = Vec::new();
    for (pointer, ours, theirs) in found {
        if !replaced.iter().any(|known| pointer.starts_with(known)) {
            let path = PointerBuf::from_tokens(&pointer);
            patch.push(test(path.clone(), theirs));
            patch.push(PatchOperation::Replace(ReplaceOperation { path, value: ours.clone() }));
            replaced.push(pointer);
        }
    }
    (!replaced.is_empty()).then_some(json_patch::Patch(patch))
}

/// A step of a field's path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Member(String),
    /// Into some item of a list.
    Item,
}

/// `a.b[0].c[key]` in steps.
fn parse(field: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut rest = field;
    while !rest.is_empty() {
        let end = rest.find(['.', '[']).unwrap_or(rest.len());
        if end > 0 {
            steps.push(Step::Member(rest[..end].to_owned()));
        }
        rest = &rest[end..];
        if let Some(inside) = rest.strip_prefix('[') {
            let (key, after) = inside.split_once(']').unwrap_or((inside, ""));
            let is_index = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit());
            steps.push(if is_index { Step::Item } else { Step::Member(key.to_owned()) });
            rest = after;
        }
        rest = rest.strip_prefix('.').unwrap_or(rest);
    }
    steps
}

/// A place that is in what we send and in the live object.
struct Place<'a, 'b> {
    sent: &'a Value,
    fields: &'b Value,
    live: &'b Value,
    pointer: Vec<String>,
}

/// Where, ours, theirs.
type Found<'a, 'b> = (Vec<String>, &'a Value, &'b Value);

impl<'a, 'b> Place<'a, 'b> {
    fn find(&self, path: &[Step], found: &mut Vec<Found<'a, 'b>>) {
        match path.split_first() {
            None => {
                let differs = self.sent.is_object() && self.live.is_object() && !includes(Some(self.live), self.sent);
                if differs && !self.pointer.last().is_some_and(|name| TOO_LARGE.contains(&name.as_str())) {
                    found.push((self.pointer.clone(), self.sent, self.live));
                }
            }
            Some((Step::Member(name), rest)) => {
                let (Some(sent), Some(live)) = (self.sent.get(name), self.live.get(name)) else { return };
                let fields = self.fields.get(format!("f:{name}")).unwrap_or(&Value::Null);
                self.below(sent, fields, live, name).find(rest, found);
            }
            Some((Step::Item, rest)) => {
                let (Some(sent), Some(live)) = (self.sent.as_array(), self.live.as_array()) else { return };
                for item in sent {
                    let Some((place, fields)) = self.item(item, live) else { continue };
                    self.below(item, fields, &live[place], &place.to_string()).find(rest, found);
                }
            }
        }
    }

    fn below(&self, sent: &'a Value, fields: &'b Value, live: &'b Value, token: &str) -> Self {
        let mut pointer = self.pointer.clone();
        pointer.push(token.to_owned());
        Self { sent, fields, live, pointer }
    }

    /// Where the live counterpart of an item of ours is: by the key that our entry has for it, else by name.
    fn item(&self, item: &Value, live: &[Value]) -> Option<(usize, &'b Value)> {
        let has = |key: &Map<String, Value>| {
            key.iter().all(|(name, value)| item.get(name).is_none_or(|it| it == value))
                && key.keys().any(|name| item.get(name).is_some())
        };
        let members = self.fields.as_object().into_iter().flatten();
        let mut keyed = members.filter_map(|(name, fields)| {
            let key: Map<String, Value> = serde_json::from_str(name.strip_prefix("k:")?).ok()?;
            has(&key).then_some(())?;
            Some((position_of_key(live, &key)?, fields))
        });
        let by_name = || {
            let key = Map::from_iter([("name".to_owned(), item.get("name")?.clone())]);
            Some((position_of_key(live, &key)?, &Value::Null))
        };
        keyed.next().or_else(by_name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn patch(refused: &str, sent: &Value, fields: &Value, live: &Value) -> Option<Value> {
        let patch = heal([refused], sent.as_object().unwrap(), fields, live)?;
        Some(serde_json::to_value(patch).unwrap())
    }

    #[test]
    fn the_path_of_a_field() {
        let member = |name: &str| Step::Member(name.to_owned());
        let expected = [member("spec"), member("volumes"), Step::Item, member("configMap")];
        assert_eq!(parse("spec.volumes[10].configMap"), expected);
        assert_eq!(parse("data[a.b]"), [member("data"), member("a.b")]);
        assert_eq!(parse(""), []);
        assert_eq!(parse("[["), [member("[")]);
    }

    #[test]
    fn a_swapped_volume_is_replaced_by_ours_alone() {
        let sent = json!({"spec": {"volumes": [{"name": "same", "emptyDir": {}}, {"name": "cfg", "configMap": {"name": "c"}}]}});
        let theirs = json!({"name": "cfg", "emptyDir": {}});
        let live = json!({"metadata": {"uid": "u"}, "spec": {"volumes": [{"name": "other"}, theirs, {"name": "same", "emptyDir": {}}]}});
        let fields = json!({"f:spec": {"f:volumes": {"k:{\"name\":\"cfg\"}": {".": {}, "f:name": {}}}}});
        let expected = json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/volumes/1", "value": theirs},
            {"op": "replace", "path": "/spec/volumes/1", "value": {"name": "cfg", "configMap": {"name": "c"}}},
        ]);
        for fields in [&fields, &Value::Null] {
            assert_eq!(patch("spec.volumes[0].configMap", &sent, fields, &live), Some(expected.clone()));
            assert_eq!(patch("spec.volumes[0]", &sent, fields, &live), Some(expected.clone()));
        }
    }

    #[test]
    fn a_union_that_is_no_list_is_replaced_and_what_is_large_never() {
        let sent = json!({"spec": {"strategy": {"type": "Recreate"}, "template": {"spec": {"restartPolicy": "Never"}}, "selector": {"a": "1"}}});
        let live = json!({"metadata": {"uid": "u"}, "spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}},
            "template": {"spec": {"restartPolicy": "Always"}}, "selector": {"a": "2"}}});
        let healed = patch("spec.strategy.rollingUpdate", &sent, &Value::Null, &live).unwrap();
        assert_eq!(healed[2], json!({"op": "replace", "path": "/spec/strategy", "value": {"type": "Recreate"}}));
        for refused in
            ["spec", "spec.selector", "spec.template.spec.restartPolicy", "spec.other.x", "", "spec.strategy[0].x"]
        {
            assert_eq!(patch(refused, &sent, &Value::Null, &live), None, "{refused}");
        }
    }
}
