//! Children that a backup has brought back: their owner reference names the UID that their parent had before (`C65`). Pure.
//!
//! The garbage collector takes such a child for one without an owner. If we are first, it is tied to its parent again, and keeps what
//! only it has: its UID, its addresses, its data.

use json_patch::{PatchOperation, RemoveOperation, ReplaceOperation, TestOperation, jsonptr::PointerBuf};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Map, Value};

use crate::object::{Kind, Object};

/// The patch that puts the owner reference of `sent` in the place of one to a former `parent`: of its kind and name, and with another UID.
/// None: `live` has no such controller.
pub(super) fn relinked(
    live: &Value,
    sent: &Map<String, Value>,
    parent: &Object,
    kind: &Kind,
) -> Option<json_patch::Patch> {
    let metadata = live.get("metadata")?;
    let namespace = metadata.get("namespace").and_then(Value::as_str);
    // An owner is in the same namespace, or in none.
    if parent.key().namespace.is_some_and(|of_parent| Some(of_parent.as_str()) != namespace) {
        return None;
    }
    let owners = metadata.get("ownerReferences")?.as_array()?;
    let is_former = |owner: &&Value| {
        serde_json::from_value((*owner).clone()).is_ok_and(|owner: OwnerReference| {
            let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
            owner.controller == Some(true)
                && (group, owner.kind.as_str(), owner.name.as_str()) == (&kind.api.group, &kind.api.kind, parent.name())
                && owner.uid != parent.uid()
        })
    };
    let (place, former) = owners.iter().enumerate().find(|(_, owner)| is_former(owner))?;
    let pointer = |tokens: &[&str]| PointerBuf::from_tokens([&["metadata"], tokens].concat());
    let path = pointer(&["ownerReferences", &place.to_string()]);
    let ours =
        sent.get("metadata").and_then(|metadata| metadata.get("ownerReferences")).and_then(|owners| owners.get(0));
    let test = |path, value: &Value| PatchOperation::Test(TestOperation { path, value: value.clone() });
    Some(json_patch::Patch(vec![
        test(pointer(&["uid"]), metadata.get("uid")?),
        test(pointer(&["resourceVersion"]), metadata.get("resourceVersion")?),
        test(path.clone(), former),
        match ours {
            Some(ours) => PatchOperation::Replace(ReplaceOperation { path, value: ours.clone() }),
            // It is to outlive its parent.
            None => PatchOperation::Remove(RemoveOperation { path }),
        },
    ]))
}

#[cfg(test)]
mod tests {
    use kube::{core::GroupVersionKind, discovery::ApiResource};
    use serde_json::json;

    use super::*;

    fn patch(owners: Value, namespace: &str, sent: &Value) -> Option<Value> {
        let kind = Kind {
            api: ApiResource::from_gvk(&GroupVersionKind::gvk("t.example", "v1", "Widget")),
            namespaced: true,
            has_status: true,
        };
        let parent = Object::from_json(r#"{"metadata":{"name":"p","namespace":"n","uid":"new"}}"#).unwrap();
        let live = json!({"metadata": {"name": "c", "namespace": namespace, "uid": "u", "resourceVersion": "7", "ownerReferences": owners}});
        let patch = relinked(&live, sent.as_object().unwrap(), &parent, &kind)?;
        Some(serde_json::to_value(patch).unwrap())
    }

    fn owner(api_version: &str, kind: &str, name: &str, uid: &str, controller: bool) -> Value {
        json!({"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": controller})
    }

    #[test]
    fn c65_the_owner_reference_to_the_former_uid_is_replaced_and_nothing_else() {
        let other = owner("v1", "ConfigMap", "other", "o", false);
        let former = owner("t.example/v1alpha1", "Widget", "p", "old", true);
        let ours = owner("t.example/v1", "Widget", "p", "new", true);
        let sent = json!({"metadata": {"ownerReferences": [ours]}});
        let tests = json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "test", "path": "/metadata/ownerReferences/1", "value": former},
        ]);
        let expected = |last: Value| Some(Value::from([tests.as_array().unwrap().as_slice(), &[last]].concat()));
        let replace = json!({"op": "replace", "path": "/metadata/ownerReferences/1", "value": ours});
        assert_eq!(patch(json!([other, former]), "n", &sent), expected(replace));
        let remove = json!({"op": "remove", "path": "/metadata/ownerReferences/1"});
        assert_eq!(patch(json!([other, former]), "n", &json!({"metadata": {}})), expected(remove));
    }

    #[test]
    fn c65_a_child_of_another_parent_is_none_of_ours() {
        let sent = json!({"metadata": {"ownerReferences": [owner("t.example/v1", "Widget", "p", "new", true)]}});
        for (owner, namespace) in [
            (owner("t.example/v1", "Widget", "q", "old", true), "n"),
            (owner("t.example/v1", "Gadget", "p", "old", true), "n"),
            (owner("other.example/v1", "Widget", "p", "old", true), "n"),
            (owner("t.example/v1", "Widget", "p", "old", false), "n"),
            (owner("t.example/v1", "Widget", "p", "new", true), "n"),
            // The parent of that name in that namespace is another one.
            (owner("t.example/v1", "Widget", "p", "old", true), "elsewhere"),
        ] {
            assert_eq!(patch(json!([owner]), namespace, &sent), None, "{owner} {namespace}");
        }
    }
}
