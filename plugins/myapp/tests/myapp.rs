//! What a MyApp becomes: each form of its spec, and what is reported back.

use myapp::MyApp;
use pilothouse_sdk::crd::Crd;
use pilothouse_sdk::testing::{Answer, Case, Cleanup, ConditionStatus};
use pilothouse_sdk::{Failure, Value, json};

fn case(spec: Value) -> Case {
    Case::parent(json!({
        "apiVersion": "mygroup.example.com/v1",
        "kind": "MyApp",
        "metadata": { "name": "web", "namespace": "team", "uid": "1", "generation": 1 },
        "spec": spec,
    }))
}

fn reconcile(case: &Case) -> Answer {
    case.reconcile::<MyApp>().expect("an answer")
}

fn deployment(replicas: i32, available: i32) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": "web", "namespace": "team" },
        "spec": { "replicas": replicas, "template": {} },
        "status": { "availableReplicas": available, "replicas": replicas },
    })
}

#[test]
fn crd_is_current() {
    Crd::of::<MyApp>("mygroup.example.com/v1", "MyApp")
        .column("Image", "string", ".spec.image")
        .column("Replicas", "integer", ".spec.replicas")
        .column("Available", "integer", ".status.availableReplicas")
        .column("Ready", "string", r#".status.conditions[?(@.type=="Ready")].status"#)
        .column("Age", "date", ".metadata.creationTimestamp")
        .check(concat!(env!("CARGO_MANIFEST_DIR"), "/crd.json"));
}

#[test]
fn the_smallest_spec_is_one_deployment() {
    let labels = json!({ "app.kubernetes.io/name": "myapp", "app.kubernetes.io/instance": "web" });
    let answer = reconcile(&case(json!({ "image": "nginx:1" })));
    assert_eq!(
        answer.children,
        Some(vec![json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": { "name": "web", "labels": labels },
            "spec": {
                "selector": { "matchLabels": labels },
                "template": {
                    "metadata": { "labels": labels },
                    "spec": { "containers": [{ "name": "myapp", "image": "nginx:1" }] },
                },
            },
        })])
    );
}

#[test]
fn replicas_are_sent_only_when_the_user_decides_them() {
    let decided = reconcile(&case(json!({ "image": "nginx:1", "replicas": 0 })));
    assert_eq!(decided.child("Deployment", "web")["spec"]["replicas"], 0);
    let autoscaled = reconcile(&case(json!({ "image": "nginx:1" })));
    assert_eq!(autoscaled.child("Deployment", "web")["spec"].get("replicas"), None);
}

#[test]
fn a_config_is_mounted_from_a_config_map() {
    let answer = reconcile(&case(json!({ "image": "nginx:1", "config": { "color": "blue" } })));
    assert_eq!(answer.child("ConfigMap", "web-config")["data"], json!({ "color": "blue" }));
    let pod = &answer.child("Deployment", "web")["spec"]["template"]["spec"];
    assert_eq!(pod["volumes"], json!([{ "name": "config", "configMap": { "name": "web-config" } }]));
    assert_eq!(pod["containers"][0]["volumeMounts"][0]["mountPath"], "/etc/myapp");
}

#[test]
fn pods_are_replaced_when_the_config_changes_and_only_then() {
    let hash = |spec| {
        let answer = reconcile(&case(spec));
        answer.child("Deployment", "web")["spec"]["template"]["metadata"]["annotations"]["mygroup.example.com/config-hash"].clone()
    };
    let blue = hash(json!({ "image": "nginx:1", "config": { "a": "1", "color": "blue" } }));
    assert_eq!(blue, "17963802d43af624", "this value must never change: it would restart all pods");
    assert_eq!(blue, hash(json!({ "image": "nginx:2", "replicas": 3, "config": { "color": "blue", "a": "1" } })));
    assert_ne!(blue, hash(json!({ "image": "nginx:1", "config": { "a": "1", "color": "red" } })));
    assert_ne!(blue, hash(json!({ "image": "nginx:1", "config": { "a1": "", "color": "blue" } })));
}

#[test]
fn status_tells_how_many_replicas_are_available() {
    let report = |case: Case| {
        let answer = reconcile(&case);
        let condition = answer.condition("Available").expect("the condition").clone();
        (answer.status["availableReplicas"].clone(), condition.status, condition.reason, condition.message)
    };
    let three = case(json!({ "image": "nginx:1", "replicas": 3 }));
    let autoscaled = case(json!({ "image": "nginx:1" }));
    let expect = |available: i32, status, reason: &str, message: &str| {
        (json!(available), status, reason.to_owned(), message.to_owned())
    };

    assert_eq!(
        report(three.clone()),
        expect(0, ConditionStatus::False, "DeploymentMissing", "the Deployment does not exist yet")
    );
    assert_eq!(
        report(three.clone().child(deployment(3, 2))),
        expect(2, ConditionStatus::False, "ReplicasUnavailable", "2 of 3 replicas are available")
    );
    assert_eq!(
        report(three.child(deployment(3, 3))),
        expect(3, ConditionStatus::True, "ReplicasAvailable", "3 of 3 replicas are available")
    );
    assert_eq!(
        report(autoscaled.child(deployment(7, 5))),
        expect(5, ConditionStatus::False, "ReplicasUnavailable", "5 of 7 replicas are available")
    );
}

#[test]
fn a_child_of_the_same_name_in_another_namespace_is_not_ours() {
    let mut foreign = deployment(3, 3);
    foreign["metadata"]["namespace"] = "other".into();
    assert_eq!(reconcile(&case(json!({ "image": "nginx:1" })).child(foreign)).status["availableReplicas"], 0);
}

#[test]
fn a_spec_that_cannot_be_read_names_the_field() {
    let failure = |spec| case(spec).reconcile::<MyApp>().expect_err("a failure");
    assert_eq!(failure(json!({})), Failure::terminal("spec: missing field `image`"));
    assert_eq!(
        failure(json!({ "image": "nginx:1", "replicas": "three" })),
        Failure::terminal(r#"spec.replicas: invalid type: string "three", expected i32"#)
    );
}

#[test]
fn cleanup_is_finished_at_once() {
    let (cleanup, answer) = case(json!({ "image": "nginx:1" })).finalize::<MyApp>().expect("an answer");
    assert_eq!(cleanup, Cleanup::Finished);
    assert_eq!(answer.children, None);
}
