//! Failures from the field, each under its number, that must not happen to us.

use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
    time::Duration,
};

use futures::StreamExt as _;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams, PropagationPolicy, WatchEvent, WatchParams};
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
            json!({"garbage": null, "children": [config_map("a", "2"), {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "x"}}]}),
            "InvalidAnswer",
        ),
        (json!({"children": [{"object": config_map("a", "2"), "options": {"vawe": 1}}]}), "InvalidAnswer"),
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
async fn c42_no_failure_of_a_plugin_is_taken_for_an_empty_answer() {
    let ns = namespace("c42-failures").await;
    let names: Vec<_> = (0..20).map(|number| format!("c{number}")).collect();
    let children: Vec<_> = names.iter().map(|name| config_map(name, "1")).collect();
    ns.widget("w", json!({"reply": {"children": children}})).await;
    synced(&ns.widgets(), "w").await;
    // None of these answers has a child in it, and only the last one says that there is to be none.
    for (reply, reason) in [
        (json!({"trap": true}), "PluginTrap"),
        (json!({"spin": true}), "PluginDeadline"),
        (json!({"allocateMiB": 100}), "PluginMemory"),
        (json!({"outputMiB": 5}), "PluginAnswerUndecodable"),
        (json!({"garbage": true}), "InvalidAnswer"),
        (json!({"failure": {"retry": "not yet"}}), "PluginRetry"),
        (json!({"failure": {"terminal": "never"}}), "PluginTerminal"),
    ] {
        let reply = format!(r#"[{{"op": "replace", "path": "/spec/reply", "value": {reply}}}]"#);
        ns.cluster.kubectl(&["--namespace=c42-failures", "patch", "widget/w", "--type=json", "-p", &reply]);
        refused(&ns.widgets(), "w", reason).await;
        let left = ns.config_maps().list(&ListParams::default()).await.expect("they can be listed");
        assert_eq!(
            left.items.iter().filter(|child| child.metadata.deletion_timestamp.is_none()).count(),
            21,
            "{reason}"
        );
    }
    let deletes = || ns.writes().iter().filter(|write| write.what() == "delete configmaps").count();
    assert_eq!(deletes(), 0, "{:#?}", ns.writes());
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"failure": null, "children": []}}})).await;
    for name in &names {
        gone(&ns.config_maps(), name).await;
    }
    assert_eq!(deletes(), 20);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c04_finalizers_of_others_are_never_touched_while_somebody_changes_them_all_the_time() {
    const PARENTS: usize = 4;
    const CHANGES: usize = 25;
    const TURNS: [&str; 2] = ["t.example/a", "t.example/b"];
    let ns = namespace("c04").await;
    // All states of the parents, as they were stored.
    let watched = ns.widgets();
    let list = watched.list(&ListParams::default()).await.expect("it can be listed");
    let version = list.metadata.resource_version.expect("a list has a version");
    let events = watched.watch(&WatchParams::default(), &version).await.expect("it can be watched");

    let widgets = ns.widgets();
    // Adds and removes, as fast as it can, only what was read; which states it made.
    let adversary = async |name: &str, changes: &Cell<usize>| -> Vec<String> {
        let mut made = Vec::new();
        let mut turn = 0;
        while let Some(parent) = get(&widgets, name).await {
            let mut finalizers = parent.metadata.finalizers.clone().unwrap_or_default();
            let item = TURNS[turn % TURNS.len()];
            match finalizers.iter().position(|it| it == item) {
                Some(place) => drop(finalizers.remove(place)),
                // The API server takes no new ones on what is being deleted.
                None if parent.metadata.deletion_timestamp.is_some() => {
                    // Its own go at last, when there is nothing else.
                    if finalizers.iter().any(|it| it.starts_with("pilothouse.dev/")) {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        let touch = json!({"metadata": {"annotations": {"turn": turn.to_string()}}});
                        drop(widgets.patch(name, &PatchParams::default(), &Patch::Merge(&touch)).await);
                    }
                    turn += 1;
                    continue;
                }
                None => finalizers.insert(turn % 2 * finalizers.len(), item.to_owned()),
            }
            let change = json!({"metadata": {"uid": parent.metadata.uid, "resourceVersion": parent.metadata.resource_version,
                "finalizers": finalizers}});
            match widgets.patch(name, &PatchParams::default(), &Patch::Merge(&change)).await {
                Ok(answer) => {
                    changes.set(changes.get() + 1);
                    made.extend(answer.metadata.resource_version);
                }
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                Err(error) => panic!("the adversary fails: {error}"),
            }
            turn += 1;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        made
    };
    let life = async |name: String| {
        ns.create(
            json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": name, "finalizers": TURNS},
            "spec": {"reply": {"children": [config_map(&name, "1")]}}}),
        )
        .await;
        let changes = Cell::new(0);
        let user = async {
            until(&ns.widgets(), &name, "it has our finalizer", |parent| our_finalizers(parent).len() == 1).await;
            until(&ns.config_maps(), &name, "its child is made", |_| true).await;
            let before = changes.get();
            eventually("more changes", async || (changes.get() >= before + CHANGES).then_some(())).await;
            delete(&ns.widgets(), &name, PropagationPolicy::Background).await;
            gone(&ns.widgets(), &name).await;
        };
        tokio::join!(user, adversary(&name, &changes)).1
    };
    let made: HashSet<String> =
        futures::future::join_all((0..PARENTS).map(|n| life(format!("w{n}")))).await.into_iter().flatten().collect();
    assert!(made.len() > PARENTS * CHANGES, "it was at it all the time: {}", made.len());

    let mut before: HashMap<String, Vec<String>> = HashMap::new();
    let (mut ended, mut ours) = (0, 0);
    let mut events = std::pin::pin!(events);
    while ended < PARENTS {
        let event = tokio::time::timeout(Duration::from_secs(20), events.next()).await.expect("the watch shows all");
        let (parent, is_gone) = match event.expect("it goes on").expect("it is an event") {
            WatchEvent::Added(parent) | WatchEvent::Modified(parent) => (parent, false),
            WatchEvent::Deleted(parent) => (parent, true),
            _ => continue,
        };
        let name = parent.metadata.name.clone().unwrap_or_default();
        let version = parent.metadata.resource_version.clone().unwrap_or_default();
        let finalizers = parent.metadata.finalizers.clone().unwrap_or_default();
        let foreign =
            |list: &[String]| list.iter().filter(|it| !it.starts_with("pilothouse.dev/")).cloned().collect::<Vec<_>>();
        assert!(our_finalizers(&parent).len() <= 1, "{finalizers:?}");
        if let Some(before) = before.insert(name, finalizers.clone()) {
            let same = foreign(&before) == foreign(&finalizers);
            assert!(is_gone || same || made.contains(&version), "{before:?} became {finalizers:?} by somebody else");
            ours += usize::from(before.len() - foreign(&before).len() != our_finalizers(&parent).len());
        }
        ended += usize::from(is_gone);
    }
    assert!(ours >= PARENTS, "ours came: {ours}");
    // No try is a write that was not meant: refused ones say that the test of the list did not hold.
    let patches: Vec<_> = ns.writes().into_iter().filter(|write| write.what() == "patch widgets").collect();
    assert_eq!(patches.iter().filter(|patch| patch.code == 200).count(), 2 * PARENTS, "{patches:#?}");
    assert!(patches.iter().all(|patch| matches!(patch.code, 200 | 404 | 409 | 422)), "{patches:#?}");
}

#[tokio::test]
async fn c04_a_manifest_that_lists_our_finalizer_is_no_fight() {
    let ns = namespace("c04-listed").await;
    ns.widget("w", json!({"reply": {"log": ["called"]}})).await;
    let parent = synced(&ns.widgets(), "w").await;
    let ours = our_finalizers(&parent);
    let apply = async |finalizers: Value| {
        let manifest = json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": "w", "finalizers": finalizers},
            "spec": {"reply": {"log": ["called"]}}});
        let params = PatchParams::apply("gitops").force();
        ns.widgets().patch("w", &params, &Patch::Apply(manifest)).await.expect("it can be applied");
    };
    let written = || ns.writes().iter().filter(|write| write.what() == "patch widgets").count();
    assert_eq!(written(), 1);
    for round in 0..5 {
        apply(json!([ours[0], format!("t.example/{}", round % 2)])).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(written(), 1, "{:#?}", ns.writes());
    let parent = get(&ns.widgets(), "w").await.expect("it is there");
    assert_eq!(our_finalizers(&parent), ours, "just once");
    // It goes as any other, though its manifest lists it.
    edit(&ns.widgets(), "w", json!({"metadata": {"finalizers": ours}})).await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "w").await;
    assert_eq!(written(), 2, "one to add, one to remove: {:#?}", ns.writes());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c07_what_was_never_made_is_no_reason_to_stay() {
    let ns = namespace("c07").await;
    ns.widget(
        "w",
        json!({"reply": {"failure": {"retry": "the credentials are bad"}, "log": ["called"]},
            "cleanup": {"echo": true, "waitingMs": 60000}}),
    )
    .await;
    ns.widget("made", json!({"reply": {}, "cleanup": {"echo": true, "waitingMs": 60000}})).await;
    refused(&ns.widgets(), "w", "PluginRetry").await;
    synced(&ns.widgets(), "made").await;
    eventually("it was tried again", async || (ns.calls("w", "called") >= 2).then_some(())).await;
    for (name, ever) in [("w", false), ("made", true)] {
        delete(&ns.widgets(), name, PropagationPolicy::Background).await;
        let parent = until(&ns.widgets(), name, "cleanup is called", |parent| {
            parent.data["status"]["echo"]["context"]["deletion"].is_object()
        })
        .await;
        assert_eq!(parent.data["status"]["echo"]["context"]["everApplied"], ever, "{name}");
        edit(&ns.widgets(), name, json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
        gone(&ns.widgets(), name).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c11_a_parent_deleted_as_it_is_made_has_no_child_or_is_cleaned_up() {
    const PARENTS: usize = 150;
    let ns = namespace("c11").await;
    let widgets = ns.widgets();
    let life = async |n: usize| {
        let name = format!("w{n}");
        ns.widget(&name, json!({"reply": {"children": [config_map(&name, "1")]}, "cleanup": {"log": ["cleanup"]}}))
            .await;
        tokio::time::sleep(Duration::from_micros(u64::try_from(n % 25 * 200).unwrap_or_default())).await;
        delete(&widgets, &name, PropagationPolicy::Background).await;
    };
    futures::stream::iter((0..PARENTS).map(life)).buffer_unordered(4).collect::<Vec<()>>().await;
    eventually("all parents are gone", async || {
        widgets.list(&ListParams::default()).await.ok().filter(|list| list.items.is_empty()).map(drop)
    })
    .await;
    eventually("no child is left", async || {
        let maps = ns.config_maps().list(&ListParams::default()).await.ok()?;
        maps.items.iter().all(|map| map.metadata.name.as_deref() == Some("kube-root-ca.crt")).then_some(())
    })
    .await;
    ns.assert_quiet(Duration::from_secs(1)).await;
    let (mut untouched, mut cleaned_up, mut vanished) = (0, 0, 0);
    let writes = ns.writes();
    for n in 0..PARENTS {
        let name = format!("w{n}");
        let of = |what: &str, code: u16| {
            writes.iter().filter(|write| write.name == name && write.what() == what && write.code == code).count()
        };
        let (children, finalizers, cleanups) =
            (of("patch configmaps", 201), of("patch widgets", 200), ns.calls(&name, "cleanup"));
        // Put on and taken off, or neither; but the API server may acknowledge it and let the parent go all the same.
        assert!(finalizers <= 2, "{name}: {finalizers}");
        assert!(finalizers == 0 || cleanups > 0, "{name}: with a finalizer acknowledged there is a cleanup");
        vanished += usize::from(finalizers == 1);
        assert!(children == 0 || cleanups > 0, "{name} leaks: {children} children and no cleanup");
        untouched += usize::from(finalizers == 0);
        cleaned_up += usize::from(cleanups > 0);
    }
    assert_eq!(untouched + cleaned_up, PARENTS);
    // What came of those is on an Event, since there is no parent to tell it; unless the host has not seen that one vanish.
    let events = ns.api("events.k8s.io/v1", "Event").list(&ListParams::default()).await.expect("they can be listed");
    let told = events.items.iter().filter(|event| event.data["reason"] == "CleanedUpVanished").count();
    assert!(told <= vanished, "{told} Events for {vanished} that vanished");
    assert!(cleaned_up > vanished, "none was seen in time: the race was not run");
}

#[tokio::test]
async fn c15_cleanup_is_told_which_children_the_garbage_collector_has_left() {
    let ns = namespace("c15").await;
    let spec = |name: &str| json!({"reply": {"children": [config_map(name, "1")]}, "cleanup": {"echo": true, "waitingMs": 300}});
    let echoes = |children: Value, propagation: &'static str| {
        move |parent: &DynamicObject| {
            let echo = &parent.data["status"]["echo"];
            echo["children"] == children && echo["context"]["deletion"]["propagation"] == propagation
        }
    };
    for name in ["foreground", "background"] {
        ns.widget(name, spec(name)).await;
        synced(&ns.widgets(), name).await;
        let child = get(&ns.config_maps(), name).await.expect("it is there");
        let owner = &child.metadata.owner_references.unwrap_or_default()[0];
        assert_eq!(owner.block_owner_deletion, Some(true));
    }
    // The garbage collector is at work while cleanup is not finished. As long as somebody holds a child it is shown; what is gone is no
    // longer shown, and not made again. By then the garbage collector has taken its note away, and cleanup may have children again.
    edit(&ns.config_maps(), "foreground", json!({"metadata": {"finalizers": ["t.example/hold"]}})).await;
    delete(&ns.widgets(), "foreground", PropagationPolicy::Foreground).await;
    let held = echoes(json!(["ConfigMap/c15/foreground"]), "Foreground");
    until(&ns.widgets(), "foreground", "it is told", held).await;
    edit(&ns.config_maps(), "foreground", json!({"metadata": {"finalizers": null}})).await;
    until(&ns.widgets(), "foreground", "nothing is left", |parent| {
        parent.data["status"]["echo"]["children"] == json!([])
    })
    .await;
    assert!(get(&ns.config_maps(), "foreground").await.is_none());
    // In the background it waits for the parent to go.
    delete(&ns.widgets(), "background", PropagationPolicy::Background).await;
    until(&ns.widgets(), "background", "it is there", echoes(json!(["ConfigMap/c15/background"]), "Background")).await;
    for name in ["foreground", "background"] {
        edit(&ns.widgets(), name, json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
        gone(&ns.widgets(), name).await;
        gone(&ns.config_maps(), name).await;
        let made: Vec<_> = ns.writes().into_iter().filter(|write| write.name == name && write.code == 201).collect();
        assert_eq!(made.len(), 1, "{made:#?}");
    }
}

#[tokio::test]
async fn c59_a_child_that_somebody_else_controls_is_left_and_stops_no_other() {
    let ns = namespace("c59").await;
    let owner = ns.create(config_map("owner", "theirs")).await;
    let theirs = |name: &str| {
        let mut theirs = config_map(name, "theirs");
        theirs["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner",
            "uid": owner.metadata.uid, "controller": true, "blockOwnerDeletion": true}]);
        theirs
    };
    let before = [ns.create(theirs("c2")).await, ns.create(theirs("c5")).await];
    let may_take = json!({"object": config_map("c2", "ours"), "options": {"adoptionPolicy": "IfUnowned"}});
    let never = config_map("c5", "ours");
    let children = json!([config_map("c1", "1"), may_take, config_map("c3", "1"), config_map("c4", "1"), never]);
    ns.widget("w", json!({"reply": {"children": children}})).await;
    let message = refused(&ns.widgets(), "w", "NameCollision").await;
    assert!(message.contains("ConfigMap c59/c2") && message.contains("ConfigMap c59/c5"), "{message}");
    tokio::time::sleep(Duration::from_secs(8)).await;
    let tries =
        |name: &str| ns.writes().iter().filter(|write| write.resource == "configmaps" && write.name == name).count();
    for name in ["c1", "c3", "c4"] {
        assert_eq!(tries(name), 1, "{name} is applied once");
    }
    for (name, before) in ["c2", "c5"].into_iter().zip(&before) {
        // After 0, 0.5, 1.5, 3.5 and 7.5 s, and for each change of the parent by us.
        assert!((2..=7).contains(&tries(name)), "{name}: {} tries", tries(name));
        let now = get(&ns.config_maps(), name).await.expect("it stays");
        assert_eq!(now.metadata.resource_version, before.metadata.resource_version, "{name} is untouched");
    }
    let events = ns.requests().iter().filter(|request| request.body["reason"] == "NameCollision").count();
    assert_eq!(events, 1, "told once");
    // Both are let go: one may be taken then, the other not.
    for name in ["c2", "c5"] {
        edit(&ns.config_maps(), name, json!({"metadata": {"ownerReferences": null}})).await;
    }
    until(&ns.config_maps(), "c2", "taken", |child| child.data["data"]["key"] == "ours").await;
    let message = refused(&ns.widgets(), "w", "NameCollision").await;
    let other = get(&ns.config_maps(), "c5").await.expect("it stays");
    assert_eq!(other.data["data"]["key"], "theirs", "{message}");
    delete(&ns.config_maps(), "c5", PropagationPolicy::Background).await;
    synced(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn c63_who_may_not_update_the_finalizers_of_the_parent_is_told_which_right_is_missing() {
    // As some distributions do.
    let cluster = Cluster::start_with(&["--enable-admission-plugins=OwnerReferencesPermissionEnforcement"]);
    let host = cluster.run_host();
    let ns = cluster.namespace("c63").await;
    // What `pilothouse manifests` grants is enough.
    ns.widget("allowed", json!({"reply": {"children": [config_map("b", "1")]}})).await;
    synced(&ns.widgets(), "allowed").await;
    let child = get(&ns.config_maps(), "b").await.expect("it is there");
    assert_eq!(child.metadata.owner_references.unwrap_or_default()[0].block_owner_deletion, Some(true));
    let role: Value =
        serde_json::from_str(&cluster.kubectl(&["get", "clusterrole", "pilothouse:mirror", "-o", "json"]))
            .expect("it is JSON");
    let rules = role["rules"].as_array().expect("it has rules");
    let place = rules.iter().position(|rule| rule["resources"].to_string().contains("widgets/finalizers"));
    let place = place.expect("the right is among them");
    let patch =
        json!([{"op": "replace", "path": format!("/rules/{place}/resources"), "value": ["widgets/none"]}]).to_string();
    cluster.kubectl(&["patch", "clusterrole", "pilothouse:mirror", "--type=json", "-p", &patch]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    ns.widget("w", json!({"reply": {"children": [config_map("a", "1")]}})).await;
    let message = refused(&ns.widgets(), "w", "Forbidden").await;
    assert!(message.contains("set finalizers on") && message.contains("pilothouse manifests"), "{message}");
    tokio::time::sleep(Duration::from_secs(4)).await;
    let tries = ns.writes().iter().filter(|write| write.resource == "configmaps" && write.name == "a").count();
    assert!((1..=6).contains(&tries), "{tries} tries in 4 s");
    let patch = json!([{"op": "replace", "path": format!("/rules/{place}"), "value": rules[place]}]).to_string();
    cluster.kubectl(&["patch", "clusterrole", "pilothouse:mirror", "--type=json", "-p", &patch]);
    synced(&ns.widgets(), "w").await;
    host.terminate();
}

#[tokio::test]
async fn c72_a_cleanup_that_always_fails_is_told_with_its_reason_and_tried_ever_more_slowly() {
    let ns = namespace("c72").await;
    ns.widget(
        "w",
        json!({"reply": {"children": [config_map("a", "1")]}, "cleanup": {"log": ["cleanup"], "spin": true}}),
    )
    .await;
    synced(&ns.widgets(), "w").await;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    // Each try has a deadline.
    let message = refused(&ns.widgets(), "w", "PluginDeadline").await;
    assert!(message.contains("limits.timeout"), "{message}");
    let refusal =
        json!({"failure": {"retry": "403 from the bucket: bad credentials"}, "log": ["cleanup"], "spin": null});
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": refusal}})).await;
    let message = refused(&ns.widgets(), "w", "PluginRetry").await;
    assert!(message.contains("403 from the bucket: bad credentials"), "the last error is told: {message}");
    let since = condition(&get(&ns.widgets(), "w").await.expect("it stays"), "Synced").expect("it is told");
    let calls = ns.calls("w", "cleanup");
    tokio::time::sleep(Duration::from_secs(6)).await;
    let tries = ns.calls("w", "cleanup") - calls;
    assert!((1..=6).contains(&tries), "{tries} tries in 6 s");
    let parent = get(&ns.widgets(), "w").await.expect("it stays");
    assert_eq!(our_finalizers(&parent).len(), 1);
    // Since when it fails does not move with each try, and what is told once is not told again.
    assert_eq!(condition(&parent, "Synced").expect("it is told")["lastTransitionTime"], since["lastTransitionTime"]);
    let events = ns.requests().iter().filter(|request| request.body["reason"] == "PluginRetry").count();
    assert_eq!(events, 1);
    assert!(get(&ns.config_maps(), "a").await.is_some(), "its children stay as long as it does");
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": {"failure": null}}})).await;
    gone(&ns.widgets(), "w").await;
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
    // That it may let parents go when their account is at its end is all: no reconcile has used it, as was seen above.
    assert!(may(&["patch", "widgets.t.example", "--all-namespaces"]));
    assert!(!may(&["delete", "widgets.t.example", "--all-namespaces"]));
    assert!(!may(&["patch", "configmaps", "--all-namespaces"]));
}
