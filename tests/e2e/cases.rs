//! Failures from the field, each under its number, that must not happen to us.

use std::time::Duration;

use kube::api::PropagationPolicy;
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, Namespace, condition, config_map, delete, edit, eventually, get, gone, our_finalizers, refused, synced,
    until,
};

async fn namespace(name: &str) -> Namespace<'static> {
    Cluster::shared().namespace(name).await
}

#[tokio::test]
async fn c01_a_released_parent_is_left_alone() {
    let ns = namespace("c01").await;
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Widget",
        "metadata": {"name": "w", "finalizers": ["t.example/hold"]},
        "spec": {"reply": {"log": ["called"]}, "cleanup": {"log": ["cleanup"]}}}))
        .await;
    synced(&ns.widgets(), "w").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    until(&ns.widgets(), "w", "released", |parent| our_finalizers(parent).is_empty()).await;
    let (writes, calls) = (ns.writes().len(), (ns.calls("w", "called"), ns.calls("w", "cleanup")));
    for round in 0..20 {
        edit(&ns.widgets(), "w", json!({"metadata": {"annotations": {"round": round.to_string()}}})).await;
    }
    ns.assert_quiet(Duration::from_secs(5)).await;
    assert_eq!(ns.writes().len(), writes, "{:#?}", ns.writes());
    assert_eq!((ns.calls("w", "called"), ns.calls("w", "cleanup")), calls);
    let finalizer_writes: Vec<_> = ns.writes().into_iter().filter(|write| write.what() == "patch widgets").collect();
    assert_eq!(finalizer_writes.len(), 2, "one to add, one to remove: {finalizer_writes:#?}");
    assert!(finalizer_writes.iter().all(|write| write.code == 200));
    edit(&ns.widgets(), "w", json!({"metadata": {"finalizers": null}})).await;
    gone(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn c02_no_child_is_made_again_while_the_parent_dies_in_the_foreground() {
    let ns = namespace("c02").await;
    let children: Vec<_> = ["a", "b", "c", "held"].iter().map(|name| config_map(name, "1")).collect();
    ns.widget("w", json!({"reply": {"children": children}})).await;
    synced(&ns.widgets(), "w").await;
    edit(&ns.config_maps(), "held", json!({"metadata": {"finalizers": ["t.example/hold"]}})).await;
    delete(&ns.widgets(), "w", PropagationPolicy::Foreground).await;
    until(&ns.widgets(), "w", "only the garbage collector holds it", |parent| {
        parent.metadata.finalizers == Some(vec!["foregroundDeletion".to_owned()])
    })
    .await;
    for name in ["a", "b", "c"] {
        gone(&ns.config_maps(), name).await;
    }
    let deleted_at =
        ns.requests().iter().rfind(|request| request.what() == "get widgets").map(|request| request.at.clone());
    let deleted_at = deleted_at.expect("cleanup reads the parent");
    ns.assert_quiet(Duration::from_secs(5)).await;
    edit(&ns.config_maps(), "held", json!({"metadata": {"finalizers": null}})).await;
    gone(&ns.widgets(), "w").await;
    let after: Vec<_> = ns.writes().into_iter().filter(|write| write.at > deleted_at).collect();
    assert!(after.iter().all(|write| write.what() == "patch widgets"), "only the finalizer is written: {after:#?}");
}

#[tokio::test]
async fn c03_orphaned_children_stay() {
    let ns = namespace("c03").await;
    ns.widget(
        "w",
        json!({"reply": {"children": [config_map("a", "1"), config_map("b", "1")]},
        "cleanup": {"waitingMs": 60000, "echo": true, "children": []}}),
    )
    .await;
    synced(&ns.widgets(), "w").await;
    let uid = async |name: &str| get(&ns.config_maps(), name).await.and_then(|child| child.metadata.uid);
    let before = (uid("a").await, uid("b").await);
    delete(&ns.widgets(), "w", PropagationPolicy::Orphan).await;
    until(&ns.widgets(), "w", "the plugin is told", |parent| {
        parent.data["status"]["echo"]["context"]["deletion"]["propagation"] == "Orphan"
    })
    .await;
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
    gone(&ns.widgets(), "w").await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!((uid("a").await, uid("b").await), before);
    for name in ["a", "b"] {
        let child = get(&ns.config_maps(), name).await.expect("it stays");
        assert_eq!(child.metadata.owner_references.unwrap_or_default(), Vec::new());
    }
}

#[tokio::test]
async fn c05_only_an_explicit_word_ends_cleanup() {
    let ns = namespace("c05").await;
    let cases = [
        ("retry", json!({"failure": {"retry": "not yet"}}), "PluginRetry"),
        ("terminal", json!({"failure": {"terminal": "never"}}), "PluginTerminal"),
        ("trap", json!({"trap": true}), "PluginTrap"),
        ("spin", json!({"spin": true}), "PluginDeadline"),
        ("memory", json!({"allocateMiB": 100}), "PluginMemory"),
        ("output", json!({"outputMiB": 5}), "PluginAnswerUndecodable"),
        ("garbage", json!({"garbage": true}), "InvalidAnswer"),
        ("status", json!({"status": [1]}), "InvalidAnswer"),
        ("unknown", json!({"extra": {"keep": true}}), "InvalidAnswer"),
    ];
    for (name, cleanup, _) in &cases {
        ns.widget(name, json!({"reply": {"children": [config_map(name, "1")]}, "cleanup": cleanup})).await;
    }
    for (name, ..) in &cases {
        synced(&ns.widgets(), name).await;
        delete(&ns.widgets(), name, PropagationPolicy::Background).await;
    }
    for (name, _, reason) in &cases {
        let message = refused(&ns.widgets(), name, reason).await;
        assert!(!message.is_empty(), "{name}: a person is told why");
    }
    // A few tries each.
    tokio::time::sleep(Duration::from_secs(5)).await;
    for (name, ..) in &cases {
        let parent = get(&ns.widgets(), name).await.expect("it stays");
        assert_eq!(our_finalizers(&parent).len(), 1, "{name} keeps the finalizer");
        assert!(get(&ns.config_maps(), name).await.is_some(), "{name}: its child is untouched");
        edit(&ns.widgets(), name, json!({"spec": {"cleanup": null}})).await;
    }
    for (name, ..) in &cases {
        gone(&ns.widgets(), name).await;
        let writes: Vec<_> =
            ns.writes().into_iter().filter(|write| write.what() == "patch widgets" && write.name == *name).collect();
        assert_eq!(writes.len(), 2, "{name}: the finalizer is added once and removed once: {writes:#?}");
    }
}

#[tokio::test]
async fn c05_a_reconcile_that_fails_touches_nothing() {
    let ns = namespace("c05-reconcile").await;
    ns.widget("w", json!({"reply": {"children": [config_map("a", "1"), config_map("b", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    let version =
        async |name: &str| get(&ns.config_maps(), name).await.and_then(|child| child.metadata.resource_version);
    let before = (version("a").await, version("b").await);
    for (reply, reason) in [
        (json!({"trap": true}), "PluginTrap"),
        (json!({"trap": null, "spin": true}), "PluginDeadline"),
        (json!({"spin": null, "garbage": true, "children": []}), "InvalidAnswer"),
        (
            json!({"garbage": null, "children": [config_map("a", "2"), {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}]}),
            "InvalidAnswer",
        ),
        (
            json!({"children": [{"object": config_map("a", "2"), "options": {"deletionPolicy": "Orphan"}}]}),
            "InvalidAnswer",
        ),
    ] {
        edit(&ns.widgets(), "w", json!({"spec": {"reply": reply}})).await;
        let parent = until(&ns.widgets(), "w", reason, |parent| {
            condition(parent, "Synced").is_some_and(|synced| {
                synced["reason"] == reason && synced["observedGeneration"].as_i64() == parent.metadata.generation
            })
        })
        .await;
        assert_eq!(condition(&parent, "Synced").map(|synced| synced["status"].clone()), Some(json!("False")));
        assert_eq!((version("a").await, version("b").await), before, "{reason}");
    }
}

#[tokio::test]
async fn c10_a_deletion_or_a_label_wakes_the_parent_though_its_generation_stays() {
    let ns = namespace("c10").await;
    ns.widget("w", json!({"reply": {"log": ["called"]}, "cleanup": {"log": ["cleanup"], "waitingMs": 60000}})).await;
    synced(&ns.widgets(), "w").await;
    let mut calls = ns.calls("w", "called");
    for metadata in [json!({"labels": {"a": "1"}}), json!({"annotations": {"a": "1"}})] {
        edit(&ns.widgets(), "w", json!({"metadata": metadata})).await;
        eventually("the plugin is called", async || (ns.calls("w", "called") > calls).then_some(())).await;
        calls = ns.calls("w", "called");
    }
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    eventually("cleanup is called", async || (ns.calls("w", "cleanup") > 0).then_some(())).await;
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
    gone(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn c21_what_the_api_server_defaults_is_no_drift() {
    let ns = namespace("c21").await;
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {
                    "containers": [{
                        "name": "web", "image": "nginx:1",
                        "ports": [{"containerPort": 80}],
                        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, {"name": "EMPTY", "value": ""}],
                        "resources": {"requests": {"cpu": "1000m", "memory": "2048Mi"}, "limits": {"cpu": 1}},
                        "readinessProbe": {"httpGet": {"path": "/", "port": 80}},
                        "livenessProbe": {"tcpSocket": {"port": 80}, "initialDelaySeconds": 0},
                        "volumeMounts": [{"name": "s", "mountPath": "/s", "readOnly": false}],
                    }],
                    "initContainers": [{"name": "init", "image": "busybox", "env": []}],
                    "volumes": [{"name": "s", "secret": {"secretName": "s"}}],
                    "tolerations": [{"key": "k", "operator": "Exists"}],
                },
            },
        },
    });
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}, {"name": "b", "port": 81, "targetPort": "8080"}]}});
    let service_ports = json!([{"name": "a", "port": 80}, {"name": "b", "port": 81, "targetPort": 8080}]);
    let mut service = service;
    service["spec"]["ports"] = service_ports;
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "b"}});
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "web", "labels": {}}});
    let reply =
        json!({"children": [deployment, service, secret, account], "next": {"afterMs": 1000}, "log": ["called"]});
    ns.widget("w", json!({"reply": reply})).await;
    synced(&ns.widgets(), "w").await;
    until(&ns.deployments(), "web", "available", |deployment| condition(deployment, "Available").is_some()).await;
    let versions = async || {
        let mut versions = Vec::new();
        for (api, name) in
            [(ns.api("v1", "Service"), "web"), (ns.api("v1", "Secret"), "s"), (ns.api("v1", "ServiceAccount"), "web")]
        {
            versions.push(get(&api, name).await.and_then(|child| child.metadata.resource_version));
        }
        versions
    };
    let (before, calls) = (versions().await, ns.calls("w", "called"));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(ns.calls("w", "called") >= calls + 5, "it was asked again and again");
    assert_eq!(versions().await, before);
    for resource in ["deployments", "services", "secrets", "serviceaccounts"] {
        let applies: Vec<_> =
            ns.writes().into_iter().filter(|write| write.what() == format!("patch {resource}")).collect();
        assert_eq!(applies.len(), 1, "{resource} is applied once: {applies:#?}");
    }
    let fields = get(&ns.deployments(), "web")
        .await
        .and_then(|deployment| deployment.metadata.managed_fields)
        .unwrap_or_default();
    let ours =
        fields.iter().find(|entry| entry.manager.as_deref().is_some_and(|manager| manager.starts_with("pilothouse/")));
    let ours = serde_json::to_string(&ours.expect("we own fields").fields_v1).expect("it is JSON");
    for defaulted in ["f:scheme", "f:terminationMessagePath", "f:defaultMode", "f:strategy", "f:protocol\""] {
        assert!(!ours.contains(defaulted), "{defaulted} is not ours: {ours}");
    }
}

#[tokio::test]
async fn c33_a_status_never_triggers_itself() {
    let ns = namespace("c33").await;
    let conditions = json!([{"type": "Db", "status": "True", "reason": "Up"}]);
    ns.widget(
        "same",
        json!({"reply": {"next": {"afterMs": 1000}, "log": ["called"], "status": {"n": 1}, "conditions": conditions}}),
    )
    .await;
    ns.widget(
        "stamp",
        json!({"stamp": true, "reply": {"log": ["called"], "status": {"n": 1}, "conditions": conditions}}),
    )
    .await;
    synced(&ns.widgets(), "same").await;
    synced(&ns.widgets(), "stamp").await;
    // Asked again and again, the same answer writes nothing.
    let writes = |name: &str| ns.writes().iter().filter(|write| write.name == name).count();
    let events = || ns.requests().iter().filter(|request| request.resource == "events").count();
    let (before, events_before, calls) = (writes("same"), events(), ns.calls("same", "called"));
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(ns.calls("same", "called") >= calls + 4);
    assert_eq!(writes("same"), before);
    assert_eq!(events(), events_before);
    // One that tells the time is written when it is asked, and is not asked because it was written.
    assert!(ns.calls("stamp", "called") <= 2, "{} calls", ns.calls("stamp", "called"));
    assert!(writes("stamp") <= 3, "{:#?}", ns.writes());
    let parent = get(&ns.widgets(), "stamp").await.expect("it is there");
    assert_eq!(condition(&parent, "Db").map(|db| db["status"].clone()), Some(json!("True")));
}

#[tokio::test]
async fn c58_an_object_of_somebody_else_is_never_taken() {
    let ns = namespace("c58").await;
    let theirs = ns.create(config_map("b", "theirs")).await;
    ns.create(config_map("pruned", "theirs")).await;
    ns.widget("w", json!({"reply": {"children": [config_map("a", "1"), config_map("b", "1"), config_map("c", "1")]}}))
        .await;
    let message = refused(&ns.widgets(), "w", "NameCollision").await;
    assert!(message.contains("ConfigMap c58/b"), "{message}");
    for name in ["a", "c"] {
        until(&ns.config_maps(), name, "its neighbours are made", |child| child.metadata.owner_references.is_some())
            .await;
    }
    // Nothing is pruned while a child fails, and nothing of somebody else's ever.
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("a", "1")]}}})).await;
    synced(&ns.widgets(), "w").await;
    gone(&ns.config_maps(), "c").await;
    let untouched = async || {
        let child = get(&ns.config_maps(), "b").await.expect("it stays");
        assert_eq!((&child.metadata.resource_version, &child.data), (&theirs.metadata.resource_version, &theirs.data));
    };
    untouched().await;
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("b", "1")]}}})).await;
    refused(&ns.widgets(), "w", "NameCollision").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "w").await;
    gone(&ns.config_maps(), "a").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    untouched().await;
}

#[tokio::test]
async fn c58_a_name_that_becomes_free_is_taken() {
    let ns = namespace("c58-free").await;
    ns.create(config_map("a", "theirs")).await;
    ns.widget("w", json!({"reply": {"children": [config_map("a", "ours")]}})).await;
    refused(&ns.widgets(), "w", "NameCollision").await;
    delete(&ns.config_maps(), "a", PropagationPolicy::Background).await;
    until(&ns.config_maps(), "a", "made", |child| child.data["data"]["key"] == "ours").await;
    synced(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn the_host_and_its_plugins_act_under_their_own_roles() {
    let ns = namespace("roles").await;
    ns.widget("w", json!({"reply": {"children": [config_map("a", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "w").await;
    let requests: Vec<Value> = ns.requests().iter().map(|request| json!([request.user, request.what()])).collect();
    assert!(!requests.is_empty());
    for request in &requests {
        let expected = match request[1].as_str() {
            Some("create events" | "patch events") => "system:serviceaccount:pilothouse-system:pilothouse",
            _ => "system:serviceaccount:pilothouse-system:mirror",
        };
        assert_eq!(request[0], expected, "{request}");
    }
    let may = |arguments: &[&str]| {
        let mut kubectl = ns.cluster.control_plane.kubectl();
        kubectl.args(["auth", "can-i", "--as=system:serviceaccount:pilothouse-system:pilothouse"]).args(arguments);
        kubectl.output().is_ok_and(|output| output.status.success())
    };
    assert!(may(&["impersonate", "serviceaccounts/mirror", "--namespace=pilothouse-system"]));
    assert!(!may(&["impersonate", "serviceaccounts/default", "--namespace=pilothouse-system"]));
    assert!(!may(&["get", "secrets", "--all-namespaces"]));
    assert!(!may(&["patch", "widgets.t.example", "--all-namespaces"]));
}
