//! Whatever arrives as JSON, from a plugin, the API server or a user: no text brings the host down, and what a plugin gets wrong is said
//! by path.
//!
//! Each target sees the texts of `edge/texts.txt`, then such as a strategy makes, for [`SECONDS`]; `EDGE_SECONDS=3600` looks for
//! longer. What is found gets a test beside the code that fails on it, and a line in the file.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::core::v1::{ConfigMap, Secret},
    apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry,
};
use kube::discovery::ApiResource;
use proptest::{
    collection,
    prelude::*,
    sample,
    test_runner::{Config, TestRunner},
};
use serde_json::{Map, Value, json};

use super::{
    coverage::{differences, includes},
    desired::Rules,
    fields, finalizer,
    heal::heal,
    managers,
    plan::{Owner, plan},
    projection::{digest, projection, projection_of},
    quantity::quantity,
    readiness,
    remote::Record,
    status,
};
use crate::{
    crd::{Bytes, Limits, Timeout},
    identity::RECORD_ANNOTATION,
    object::{Kind, Object},
    plugin::{Answer, Child, Cleanup, FinalizeAnswer, describe::Description},
    state::{ChildKey, DesiredChild, Memory, Observed},
};

const SECONDS: u64 = 2;
const TEXTS: &str = include_str!("edge/texts.txt");
const OURS: &str = "pilothouse/1";

/// Member names that mean something to the host.
const NAMES: [&str; 50] = [
    "",
    ".",
    "a",
    "é",
    "f:",
    "f:a",
    "f:metadata",
    "f:labels",
    "f:spec",
    "f:data",
    "k:{\"name\":\"a\"}",
    "k:{\"uid\":\"u\"}",
    "k:{",
    "v:\"a\"",
    "v:",
    "i:0",
    "i:9",
    "apiVersion",
    "kind",
    "metadata",
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "labels",
    "annotations",
    "finalizers",
    "deletionTimestamp",
    "ownerReferences",
    "controller",
    "managedFields",
    "manager",
    "operation",
    "subresource",
    "fieldsV1",
    "spec",
    "status",
    "conditions",
    "type",
    "data",
    "stringData",
    "updateStrategy",
    "adoptionPolicy",
    "adoptFieldManagers",
    "parent",
    "children",
    "rights",
    "internal.pilothouse.dev/parent-uid",
    "internal.pilothouse.dev/binding",
];
/// Well-formed texts, to be spoilt in one place.
const WELL_FORMED: [&str; 6] = [
    r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","labels":{"a":"1"}},"data":{"a":"1"}}"#,
    r#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a","namespace":"n"},"data":{"a":"MQ=="},"stringData":{"b":"1"}}"#,
    r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":"n","uid":"u","resourceVersion":"1","labels":{"a":"1"},
        "ownerReferences":[{"apiVersion":"t.example/v1","kind":"Parent","name":"p","uid":"u-p","controller":true}],"finalizers":["x"],
        "managedFields":[{"manager":"pilothouse/1","operation":"Apply","fieldsV1":{"f:metadata":{"f:labels":{"f:a":{}}},"f:data":{"f:a":{}}}},
            {"manager":"before-first-apply","operation":"Update","fieldsV1":{"f:data":{"f:a":{}}}}]},
        "data":{"a":"1"},"status":{"conditions":[{"type":"Synced","status":"True","reason":"X"}]}}"#,
    r#"{"f:metadata":{"f:labels":{"f:a":{}}},"f:spec":{"f:list":{"k:{\"name\":\"a\"}":{".":{},"f:a":{}},"v:\"a\"":{},"i:0":{}}}}"#,
    r#"{"parent":{"apiVersion":"t.example/v1","kind":"P"},"children":[{"apiVersion":"v1","kind":"Secret"}],"rights":[{"verbs":["get"]}]}"#,
    r#"{"memory":"64Mi","timeout":"5s","output":"4Mi","children":10,"concurrency":1}"#,
];

fn text() -> impl Strategy<Value = String> {
    let lines: Vec<_> = TEXTS.lines().collect();
    let spoilt = (sample::select(WELL_FORMED.to_vec()), any::<sample::Index>(), value());
    let spoilt = spoilt.prop_map(|(text, place, value)| {
        let mut json: Value = serde_json::from_str(text).unwrap();
        let mut pointers = Vec::new();
        find_pointers(&json, String::new(), &mut pointers);
        *json.pointer_mut(&pointers[place.index(pointers.len())]).unwrap() = value;
        json.to_string()
    });
    // A line of the file as a member, since some are no values that this process could hold.
    let member = (sample::select(NAMES.to_vec()), sample::select(NAMES.to_vec()), sample::select(lines));
    let member = member.prop_map(|(outer, inner, line)| format!("{{{}:{{{}:{line}}}}}", json!(outer), json!(inner)));
    let deep = (1..400_usize, sample::select(vec![("[", "]"), ("{\"a\":", "}"), ("{\"metadata\":", "}")]));
    let deep = deep.prop_map(|(depth, (open, close))| format!("{}1{}", open.repeat(depth), close.repeat(depth)));
    let cut = (value(), any::<sample::Index>()).prop_map(|(value, end)| {
        let text = value.to_string();
        text[..text.floor_char_boundary(end.index(text.len() + 1))].to_owned()
    });
    prop_oneof![4 => spoilt, 2 => value().prop_map(|value| value.to_string()), 2 => member, 1 => deep, 1 => cut, 1 => any::<String>()]
}

fn value() -> impl Strategy<Value = Value> {
    let lines: Vec<Value> = TEXTS.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let leaf = prop_oneof![
        sample::select(lines),
        sample::select(NAMES.to_vec()).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    let name = prop_oneof![9 => sample::select(NAMES.to_vec()).prop_map(str::to_owned), 1 => any::<String>()];
    leaf.prop_recursive(5, 40, 5, move |inner| {
        prop_oneof![
            collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            collection::vec((name.clone(), inner), 0..5)
                .prop_map(|members| members.into_iter().collect::<Map<_, _>>().into()),
        ]
    })
}

fn find_pointers(value: &Value, pointer: String, found: &mut Vec<String>) {
    let below: Vec<_> = match value {
        Value::Object(members) => {
            members.iter().map(|(name, value)| (name.replace('~', "~0").replace('/', "~1"), value)).collect()
        }
        Value::Array(items) => items.iter().enumerate().map(|(at, value)| (at.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    found.push(pointer.clone());
    below.into_iter().for_each(|(name, value)| find_pointers(value, format!("{pointer}/{name}"), found));
}

/// Lets `target` see the texts of the file, and then pairs of others until the time is over.
fn feed(target: impl Fn(&str, &str)) {
    for (at, line) in TEXTS.lines().enumerate() {
        TEXTS.lines().skip(at % 7).step_by(7).for_each(|other| target(line, other));
    }
    let seconds = std::env::var("EDGE_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(SECONDS);
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
        let found = runner.run(&(text(), text()), |(one, other)| {
            target(&one, &other);
            Ok(())
        });
        found.unwrap_or_else(|found| panic!("{found}"));
    }
}

fn kinds() -> [Kind; 3] {
    let custom = ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk("t.example", "v1", "Free"));
    let kind = |api, has_status| Kind { api, namespaced: true, has_status };
    [
        kind(ApiResource::erase::<ConfigMap>(&()), false),
        kind(ApiResource::erase::<Secret>(&()), false),
        kind(custom, true),
    ]
}

fn parent() -> Object {
    Object::from_json(r#"{"metadata":{"name":"p","namespace":"n","uid":"u-p"}}"#).unwrap()
}

fn read(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok()
}

/// The plan for this parent, with a live child for each wanted one.
fn plan_on(parent: Object, wanted: &[DesiredChild], live: &Object) {
    let kinds = kinds();
    let children = wanted.iter().map(|child| (child.key.clone(), Arc::new(live.clone()))).collect();
    let observed = Observed { record: Record::of(&parent), parent: Arc::new(parent), children };
    let owner = Owner { kind: &kinds[2], child_kinds: &kinds, label: "c-x-1", manager: OURS };
    let made = plan(&observed, wanted, &Memory::default(), &owner);
    assert_eq!(made, plan(&observed, wanted, &Memory::default(), &owner));
    let deleted = plan(&observed, &[], &Memory::default(), &owner).deletes;
    let proven = live.controller_uid() == Some(observed.parent.uid()) || observed.record.is_some();
    assert!(proven || deleted.is_empty());
}

#[test]
fn an_answer_is_followed_or_refused_by_path() {
    let (kinds, parent) = (kinds(), parent());
    let declared: Vec<_> = kinds.iter().map(Kind::name).collect();
    let rules = Rules { kinds: &kinds, declared: &declared, parent: &parent, scope: None, max_children: 3 };
    let empty = || "{}".to_owned();
    feed(|one, other| {
        let live = Object::from_json(other).ok();
        let child = |object: &str, options: &str| Child { object: object.to_owned(), options: options.to_owned() };
        let answer = || Answer { extra: empty(), ..Answer::default() };
        for (slot, answer) in [
            ("children[0].object", Answer { children: vec![child(one, "{}")], ..answer() }),
            ("children[0].options", Answer { children: vec![child(WELL_FORMED[0], one)], ..answer() }),
            ("status", Answer { status: Some(one.to_owned()), ..answer() }),
            ("extra", Answer { extra: one.to_owned(), ..answer() }),
            ("children[1]", Answer { children: vec![child(WELL_FORMED[0], "{}"), child(one, other)], ..answer() }),
        ] {
            match rules.desired(answer) {
                Ok(desired) => {
                    if let Some(live) = &live {
                        plan_on(parent.clone(), &desired.children, live);
                    }
                }
                Err(error) => assert!(error.path.starts_with(slot) && !error.problem.is_empty(), "{slot}: {error}"),
            }
        }
        let cleanup = FinalizeAnswer {
            cleanup: Cleanup::Finished,
            children: Some(vec![child(one, "{}")]),
            status: Some(other.to_owned()),
            conditions: Vec::new(),
            events: Vec::new(),
            extra: empty(),
        };
        if let Err(error) = rules.finalization(cleanup) {
            assert!(error.path.starts_with("children[0].object") || error.path.starts_with("status"), "{error}");
        }
    });
}

#[test]
fn an_object_is_read_or_refused() {
    let api = ApiResource::erase::<ConfigMap>(&());
    feed(|one, other| {
        let event = format!(r#"{{"type":"MODIFIED","object":{one}}}"#);
        let of_watch: Result<kube::core::WatchEvent<Object>, _> = serde_json::from_str(&event);
        let Ok(object) = Object::from_json(one) else { return };
        assert!(of_watch.is_ok(), "{of_watch:?}");
        let again = Object::from_json(object.json()).unwrap();
        assert_eq!((again.key(), again.uid(), again.json()), (object.key(), object.uid(), object.json()));
        assert_eq!(again.controller_uid(), object.controller_uid());
        assert!(!object.is_newer_than(&again));
        let typed = object.clone().with_kind(&api);
        let typed = read(typed.json());
        assert!(read(object.json()).is_none() || typed.is_some_and(|typed| typed.get("kind").is_some()));
        let _ = (object.parent_uid("ConfigMap"), object.labels(), object.overhead(), object.annotation(other));
        let _ = (
            readiness::is_ready_by_itself(&object),
            status::live_condition(&object, "Synced"),
            finalizer::is_on(&object, "x"),
        );
        let recorded = json!({"metadata": {"name": "p", "uid": "u-p", "annotations": {RECORD_ANNOTATION: one}}});
        let recorded = Object::from_json(&recorded.to_string()).unwrap();
        let keys = Record::of(&recorded).map(|record| record.keys(&kinds())).unwrap_or_default();
        let keys: Vec<&ChildKey> = keys.iter().collect();
        Record::before(&recorded, &keys, &[], &[], true, &kinds());
        for parent in [parent(), object.clone(), recorded] {
            plan_on(parent, &[], &object);
        }
    });
}

#[test]
fn fields_and_values_of_any_kind_are_compared() {
    feed(|one, other| {
        let _ = projection(one, other);
        let (Some(one), Some(other)) = (read(one), read(other)) else { return };
        let _ = (quantity(&one), projection_of(&one, &other));
        assert!(includes(Some(&one), &one) || one.is_null() || one.to_string().contains("null"));
        assert_eq!(digest(&one) == digest(&other), one == other);
        let rest = fields::difference(&one, &other);
        let _ = fields::union(&one, &other);
        if !fields::overlaps(&one, &other) {
            assert_eq!(rest, one);
        }
        let _ = fields::is_empty(&rest);
        if let Value::Object(sent) = &one {
            let paths: Vec<_> = differences(sent, &other, &one).into_iter().map(|found| found.path).collect();
            assert!(paths.iter().all(|path| !path.is_empty()) || sent.contains_key(""));
            heal(paths.iter().map(String::as_str), sent, &other, &other);
        }
        let entries: Result<Vec<ManagedFieldsEntry>, _> = serde_json::from_value(json!([
            {"manager": OURS, "operation": "Apply", "fieldsV1": one},
            {"manager": "before-first-apply", "operation": "Update", "fieldsV1": other},
            {"manager": "pilothouse/0", "operation": "Apply", "fieldsV1": other},
        ]));
        if let Ok(entries) = entries {
            let folded = managers::fold(&entries, OURS, "v1", &[]).unwrap();
            assert_eq!(managers::fold(&folded, OURS, "v1", &[]), None);
            let released = managers::release(&folded, OURS).unwrap_or(folded);
            assert_eq!(managers::release(&released, OURS), None);
        }
    });
}

#[test]
fn a_description_and_limits_are_read_or_refused() {
    feed(|one, other| {
        if let Ok(description) = Description::read(one) {
            let _ = description.parent.gvk();
        }
        if let Ok(limits) = serde_json::from_str::<Limits>(one) {
            let written = serde_json::to_string(&limits).unwrap();
            assert!(serde_json::from_str::<Limits>(&written).is_ok(), "{written}");
        }
        let text = read(other).and_then(|text| text.as_str().map(str::to_owned));
        for text in [Some(other.to_owned()), text].into_iter().flatten() {
            if let Ok(bytes) = text.parse::<Bytes>() {
                assert_eq!(String::from(bytes).parse::<Bytes>().unwrap(), bytes, "{text}");
            }
            if let Ok(timeout) = text.parse::<Timeout>() {
                let again = String::from(timeout).parse::<Timeout>().unwrap();
                assert!(timeout.0 - again.0 < Duration::from_millis(1), "{text}");
                let _ = Instant::now() + timeout.0;
            }
        }
    });
}
