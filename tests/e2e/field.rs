//! Failures from the field that need more than a host and a plugin: a proxy that misleads the host, another definition of a kind, many
//! objects, or somebody who never stops. Each has a host of its own, and all but one share a control plane.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use faults::{Asked, Fault, Options, Point, Proxy};
use kube::api::{DynamicObject, ListParams, Patch, PatchParams, PropagationPolicy};
use serde_json::{Value, json};

use crate::{
    audit::{self, Request},
    cluster::{
        Cluster, Host, Namespace, condition, config_map, delete, edit, eventually, get, gone, mirror, our_finalizers,
        pilothouse, refused, synced, until,
    },
};

/// Without a shared host: each test has one that sees its own reconcilers only.
pub(crate) fn cluster() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    CLUSTER.get_or_init(Cluster::start)
}

/// A namespace with a reconciler and a host of its own, behind a proxy.
pub(crate) struct Stand {
    pub(crate) ns: Namespace<'static>,
    proxy: Proxy,
    pub(crate) host: Host,
}

impl Stand {
    /// With a reconciler that serves this plugin to what is labelled for it, and a fault.
    pub(crate) async fn start(name: &str, plugin: &str, fault: Option<(Point, Fault)>, arguments: &[&str]) -> Self {
        let ns = cluster().namespace(name).await;
        declare(&ns, name, plugin).await;
        Self::of(ns, fault, arguments).await
    }

    /// With those reconcilers whose label `run` is the name of the namespace.
    async fn of(ns: Namespace<'static>, fault: Option<(Point, Fault)>, arguments: &[&str]) -> Self {
        let cluster = cluster();
        let options =
            Options { run: Some(ns.name.clone()), fault, failing: 0.0, crash: Box::new(|| {}), aliases: Vec::new() };
        let proxy = Proxy::start(cluster.control_plane.kubeconfig(), options).await.expect("the proxy starts");
        cluster.write_kubeconfig_by_way_of(&kubeconfig(&ns), proxy.address, &cluster.host_token());
        let host = Self::host(&ns, arguments).await;
        Self { ns, proxy, host }
    }

    async fn host(ns: &Namespace<'_>, arguments: &[&str]) -> Host {
        let host = cluster().spawn_host(&kubeconfig(ns), arguments);
        eventually("the host watches", async || host.log_text().contains("\"message\":\"watching\"").then_some(()))
            .await;
        host
    }

    /// Another host, after `meanwhile` in which there was none.
    pub(crate) async fn restart(self, meanwhile: impl AsyncFnOnce(&Namespace<'_>)) -> Self {
        self.host.terminate();
        meanwhile(&self.ns).await;
        let host = Self::host(&self.ns, &[]).await;
        Self { host, ..self }
    }

    pub(crate) async fn widget(&self, name: &str, spec: Value) -> DynamicObject {
        let metadata = json!({"name": name, "labels": {"run": self.ns.name}});
        self.ns
            .create(json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": metadata, "spec": spec}))
            .await
    }

    async fn my_app(&self, name: &str) -> DynamicObject {
        let metadata = json!({"name": name, "labels": {"run": self.ns.name}});
        self.ns
            .create(json!({"apiVersion": "mygroup.example.com/v1", "kind": "MyApp", "metadata": metadata,
                "spec": {"image": "nginx:1", "replicas": 1}}))
            .await
    }
}

fn kubeconfig(ns: &Namespace<'_>) -> std::path::PathBuf {
    cluster().control_plane.data_dir().join(format!("{}.kubeconfig", ns.name))
}

/// Declares a reconciler for one test, with the plugin and the service account of one that is installed.
async fn declare(ns: &Namespace<'_>, name: &str, plugin: &str) {
    let reconciler = json!({"apiVersion": "pilothouse.dev/v1alpha1", "kind": "ClusterReconciler",
        "metadata": {"name": name, "labels": {"run": ns.name}},
        "spec": {"plugin": {"configMap": {"namespace": "pilothouse-system", "name": format!("{plugin}-plugin")}},
            "serviceAccount": {"namespace": "pilothouse-system", "name": plugin},
            "limits": {"timeout": "1s"},
            "selector": {"matchLabels": {"run": ns.name}}}});
    let reconcilers = ns.reconcilers();
    let mut reconciler: DynamicObject = serde_json::from_value(reconciler).expect("it is an object");
    // As the one that is there.
    let there = get(&reconcilers, plugin).await.expect("it is installed");
    reconciler.data["spec"]["grants"] = there.data["spec"]["grants"].clone();
    reconcilers.create(&Default::default(), &reconciler).await.expect("it can be created");
}

/// The writes of these: verb and resource, the name unless it is empty, and the code.
fn count(writes: &[Request], what: &str, name: &str, code: u16) -> usize {
    let is = |write: &&Request| write.what() == what && (name.is_empty() || write.name == name) && write.code == code;
    writes.iter().filter(is).count()
}

/// The Events with this reason in the namespace: how often each was written.
pub(crate) fn told(ns: &Namespace<'_>, reason: &str) -> usize {
    let requests = ns.requests();
    requests.iter().filter(|request| request.resource == "events" && request.body["reason"] == reason).count()
}

/// An older operator has left its finalizer on parents, and is gone. Its name is listed, so nobody else's is touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c16_the_finalizer_of_an_operator_that_is_gone_is_served_and_goes() {
    const LEGACY: &str = "old.t.example/x";
    let ns = cluster().namespace("c16").await;
    declare(&ns, "c16", "mirror").await;
    let patch = |names: &[&str]| json!({"spec": {"legacyFinalizers": names}}).to_string();
    let refused = |names: &[&str]| {
        let mut kubectl = cluster().control_plane.kubectl();
        let output = kubectl.args(["patch", "crec", "c16", "--type=merge", "-p", &patch(names)]).output();
        !output.expect("kubectl runs").status.success()
    };
    for bad in [&["orphan"][..], &["foregroundDeletion"], &["pilothouse.dev/c-x-1"], &["a b"], &["a/b/c"], &["a/b"; 2]]
    {
        assert!(refused(bad), "{bad:?}");
    }
    let names: Vec<_> = (0..9).map(|number| format!("t.example/{number}")).collect();
    assert!(refused(&names.iter().map(String::as_str).collect::<Vec<_>>()), "nine are too many");
    cluster().kubectl(&["patch", "crec", "c16", "--type=merge", "-p", &patch(&[LEGACY, "finalizer.older.example"])]);

    let widget = async |name: &str, finalizers: &[&str], run: &str| {
        let metadata = json!({"name": name, "labels": {"run": run}, "finalizers": finalizers});
        let spec =
            json!({"reply": {"children": [config_map(name, "1")]}, "cleanup": {"log": ["cleanup"], "echo": true}});
        ns.create(json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": metadata, "spec": spec})).await;
    };
    widget("live", &[LEGACY, "t.example/hold", "finalizer.older.example"], "c16").await;
    widget("dying", &[LEGACY], "c16").await;
    // The older operator may still serve it.
    widget("elsewhere", &[LEGACY], "other").await;
    delete(&ns.widgets(), "dying", PropagationPolicy::Background).await;
    let stand = Stand::of(ns, None, &[]).await;
    let ns = &stand.ns;
    gone(&ns.widgets(), "dying").await;
    assert_eq!(ns.calls("dying", "cleanup"), 1);
    let parent = synced(&ns.widgets(), "live").await;
    let ours = our_finalizers(&parent);
    assert_eq!(parent.metadata.finalizers, Some(vec!["t.example/hold".to_owned(), ours[0].clone()]));
    let finalizer_writes = |name: &str| count(&ns.writes(), "patch widgets", name, 200);
    assert_eq!(finalizer_writes("live"), 1, "out and in at once: {:#?}", ns.writes());
    // Both, as after a migration that has stopped in the midst.
    widget_with_both(ns, &ours[0], LEGACY).await;
    until(&ns.widgets(), "both", "only ours", |parent| parent.metadata.finalizers == Some(ours.clone())).await;
    synced(&ns.widgets(), "both").await;
    delete(&ns.widgets(), "both", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "both").await;

    // Only the end of the reconciler itself releases its parents, no change of it.
    let before = ns.writes().len();
    cluster().kubectl(&["patch", "crec", "c16", "--type=merge", "-p", &patch(&[LEGACY])]);
    cluster().kubectl(&["patch", "crec", "c16", "--type=merge", "-p", r#"{"spec":{"config":{"word":"new"}}}"#]);
    ns.assert_quiet(Duration::from_secs(3)).await;
    assert_eq!(ns.writes().len(), before, "{:#?}", ns.writes());
    edit(&ns.widgets(), "live", json!({"metadata": {"finalizers": [ours[0], "t.example/hold"]}})).await;
    let reconcilers = ns.reconcilers();
    delete(&reconcilers, "c16", PropagationPolicy::Background).await;
    gone(&reconcilers, "c16").await;
    let live = get(&ns.widgets(), "live").await.expect("it stays");
    assert_eq!(live.metadata.finalizers, Some(vec!["t.example/hold".to_owned()]));
    assert!(get(&ns.config_maps(), "live").await.is_some(), "children stay");
    let elsewhere = get(&ns.widgets(), "elsewhere").await.expect("it stays");
    assert_eq!(elsewhere.metadata.finalizers, Some(vec![LEGACY.to_owned()]));
    for name in ["live", "elsewhere"] {
        edit(&ns.widgets(), name, json!({"metadata": {"finalizers": null}})).await;
    }
}

async fn widget_with_both(ns: &Namespace<'_>, ours: &str, legacy: &str) {
    let metadata = json!({"name": "both", "labels": {"run": ns.name}, "finalizers": [legacy, ours]});
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": metadata, "spec": {"reply": {}}}))
        .await;
}

/// The deletion of the old object is shown late, and meanwhile there is a new one of its name, which wants the same child. Whatever the
/// host does about the old one must not touch the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c14_what_is_done_about_an_old_parent_does_not_touch_a_new_one_of_its_name() {
    let point = Point::Event { resource: "widgets".into(), kind: "DELETED".into(), name: "w".into(), nth: 1 };
    let stand = Stand::start("c14", "mirror", Some((point, Fault::Delay(Duration::from_secs(5)))), &[]).await;
    let ns = &stand.ns;
    let spec = |value: &str| {
        json!({"reply": {"children": [config_map("a", value), config_map(&format!("only-{value}"), value)]},
            "cleanup": {"log": ["cleanup"], "waitingMs": 200}})
    };
    let old = stand.widget("w", spec("old")).await;
    synced(&ns.widgets(), "w").await;
    let garbage = get(&ns.config_maps(), "a").await.expect("it is there").metadata.uid;
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    eventually("the cleanup of the old one waits", async || (ns.calls("w", "cleanup") > 0).then_some(())).await;
    // Somebody loses patience, and makes it anew at once.
    edit(&ns.widgets(), "w", json!({"metadata": {"finalizers": null}})).await;
    let made = Instant::now();
    let new = stand.widget("w", spec("new")).await;
    assert_ne!(old.metadata.uid, new.metadata.uid);
    let uid = new.metadata.uid.clone().expect("it has one");
    until(&ns.config_maps(), "a", "the child of the new one", |child| {
        child.data["data"]["key"] == "new"
            && child.metadata.owner_references.iter().flatten().any(|owner| owner.uid == uid)
    })
    .await;
    assert_ne!(get(&ns.config_maps(), "a").await.expect("it is there").metadata.uid, garbage, "made anew (`C65`)");
    assert!(stand.proxy.has_fired() && made.elapsed() > Duration::from_secs(4), "the host was misled");
    let parent = synced(&ns.widgets(), "w").await;
    assert_eq!((&parent.metadata.uid, our_finalizers(&parent).len()), (&new.metadata.uid, 1));
    gone(&ns.config_maps(), "only-old").await;
    // Its finalizer was put on once and never taken off: what was written after the new one came is one such patch.
    let patches: Vec<_> = ns.writes().into_iter().filter(|write| write.what() == "patch widgets").collect();
    let about_new: Vec<_> = patches.iter().filter(|patch| patch.body.to_string().contains(&uid)).collect();
    assert_eq!(about_new.len(), 1, "{patches:#?}");
    let deletes: Vec<_> = ns.writes().into_iter().filter(|write| write.verb == "delete").collect();
    assert!(deletes.iter().all(|delete| delete.body["preconditions"]["uid"].is_string()), "{deletes:#?}");
    ns.assert_quiet(Duration::from_secs(2)).await;
}

/// A status is no more than the CRD lets it be: what is not kept is told, once, and nothing depends on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c34_a_status_that_the_crd_does_not_keep_is_written_once_and_told_once() {
    let ns = cluster().namespace("c34").await;
    // An older CRD: no conditions, no observedGeneration.
    let status = json!({"type": "object", "properties": {"availableReplicas": {"type": "integer"}}});
    let patch = json!([{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/status", "value": status}]);
    cluster().kubectl(&["patch", "crd", "myapps.mygroup.example.com", "--type=json", "-p", &patch.to_string()]);
    ns.my_app("probe", json!({"image": "nginx:1"})).await;
    eventually("the API server prunes", async || {
        let probe = Patch::Merge(json!({"status": {"observedGeneration": 1, "availableReplicas": 1}}));
        let answer =
            ns.my_apps().patch_status("probe", &PatchParams::default(), &probe).await.expect("it can be patched");
        answer.data["status"]["observedGeneration"].is_null().then_some(())
    })
    .await;
    declare(&ns, "c34", "myapp").await;
    let stand = Stand::of(ns, None, &[]).await;
    let ns = &stand.ns;
    stand.my_app("w").await;
    until(&ns.my_apps(), "w", "what the CRD has is there", |parent| parent.data["status"]["availableReplicas"] == 1)
        .await;
    eventually("it is told", async || (told(ns, "StatusPruned") > 0).then_some(())).await;
    ns.assert_quiet(Duration::from_secs(1)).await;
    let written = || count(&ns.writes(), "patch myapps/status", "w", 200);
    let (before, events) = (written(), ns.requests().iter().filter(|request| request.resource == "events").count());
    // One for each number of replicas: none, and one.
    assert!(before <= 3, "{before}: {:#?}", ns.writes());
    for round in 0..10 {
        edit(&ns.my_apps(), "w", json!({"metadata": {"annotations": {"round": round.to_string()}}})).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(written(), before, "nothing is written again");
    assert_eq!(
        (told(ns, "StatusPruned"), told(ns, "ReconcileSuccess")),
        (1, 1),
        "each is told once: {:#?}",
        ns.requests()
    );
    assert_eq!(ns.requests().iter().filter(|request| request.resource == "events").count(), events);
    let event = ns.requests().into_iter().find(|request| request.body["reason"] == "StatusPruned").expect("it is told");
    let note = event.body["note"].as_str().unwrap_or_default();
    for part in ["the CRD of MyApp", "status.conditions", "status.observedGeneration"] {
        assert!(note.contains(part), "{note}");
    }
    assert!(!note.contains("availableReplicas"), "{note}");
    let parent = get(&ns.my_apps(), "w").await.expect("it is there");
    assert_eq!(parent.metadata.generation, Some(1));
}

/// Without the subresource a status would be a part of the object like its spec, and each write of it a change that wakes the parent. So
/// none is written: Events tell what there is to tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c35_a_kind_without_a_status_subresource_gets_events_and_its_generation_stops() {
    let ns = cluster().namespace("c35").await;
    // Version 9 is for ClusterWidgets, which nobody else here uses.
    let file = cluster().control_plane.data_dir().join("c35.wasm");
    std::fs::write(&file, mirror(9)).expect("it can be written");
    cluster().apply(&pilothouse(&["manifests", &file.to_string_lossy(), "--name", "c35"]));
    let patch = json!([{"op": "remove", "path": "/spec/versions/0/subresources"}]).to_string();
    cluster().kubectl(&["patch", "crd", "clusterwidgets.t.example", "--type=json", "-p", &patch]);
    eventually("the API server serves no status", async || {
        let served = cluster().kubectl(&["get", "--raw", "/apis/t.example/v1"]);
        (served.contains("\"clusterwidgets\"") && !served.contains("clusterwidgets/status")).then_some(())
    })
    .await;
    cluster().kubectl(&["label", "crec", "c35", "run=c35"]);
    let stand = Stand::of(ns, None, &[]).await;
    let ns = &stand.ns;
    let parents = ns.cluster_api("t.example/v1", "ClusterWidget");
    let mut child = config_map("c", "1");
    child["metadata"]["namespace"] = json!(ns.name);
    let parent = json!({"apiVersion": "t.example/v1", "kind": "ClusterWidget", "metadata": {"name": "c35"},
        "spec": {"reply": {"children": [child], "status": {"n": 1}, "log": ["called"], "next": {"afterMs": 300},
            "conditions": [{"type": "Db", "status": "True", "reason": "Up"}]}}});
    let parent: DynamicObject = serde_json::from_value(parent).expect("it is an object");
    parents.create(&Default::default(), &parent).await.expect("it can be created");
    until(&ns.config_maps(), "c", "made", |_| true).await;
    let calls = || stand.host.log_text().matches("\"message\":\"called\"").count();
    let before = calls();
    eventually("it is asked again and again", async || (calls() > before + 8).then_some(())).await;
    let parent = get(&parents, "c35").await.expect("it is there");
    // The finalizer is metadata, and counts no generation.
    assert_eq!((parent.metadata.generation, parent.data["status"].is_null()), (Some(1), true), "{parent:?}");
    let mut requests = audit::requests(cluster().control_plane.audit_log());
    requests.retain(|request| request.resource == "clusterwidgets" && request.is_write());
    assert_eq!(requests.len(), 1, "the finalizer: {requests:#?}");
    requests = audit::requests(cluster().control_plane.audit_log());
    requests.retain(|request| request.resource == "events" && request.body["regarding"]["kind"] == "ClusterWidget");
    assert_eq!(requests.len(), 1, "one success: {requests:#?}");
    assert_eq!(requests[0].body["reason"], "ReconcileSuccess");
    delete(&parents, "c35", PropagationPolicy::Background).await;
    gone(&parents, "c35").await;
}

/// What was written is known before the watch shows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c37_a_child_watch_that_lags_makes_nothing_twice() {
    let point = Point::Event { resource: "configmaps".into(), kind: "ADDED".into(), name: "a".into(), nth: 1 };
    let stand = Stand::start("c37", "mirror", Some((point, Fault::Delay(Duration::from_secs(10)))), &[]).await;
    let ns = &stand.ns;
    let children: Vec<_> = ["a", "b", "c"].iter().map(|name| config_map(name, "1")).collect();
    stand.widget("w", json!({"reply": {"children": children, "log": ["called"]}})).await;
    synced(&ns.widgets(), "w").await;
    eventually("the watch lags", async || stand.proxy.has_fired().then_some(())).await;
    let since = Instant::now();
    let calls = ns.calls("w", "called");
    for round in 0.. {
        edit(&ns.widgets(), "w", json!({"metadata": {"annotations": {"round": round.to_string()}}})).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
        if ns.calls("w", "called") >= calls + 10 {
            break;
        }
        assert!(since.elapsed() < Duration::from_secs(10), "the machine is too slow to tell: {:?}", since.elapsed());
    }
    // And when the watch has shown all of it at last.
    tokio::time::sleep(Duration::from_secs(11).saturating_sub(since.elapsed())).await;
    ns.assert_quiet(Duration::from_secs(1)).await;
    let writes = ns.writes();
    for name in ["a", "b", "c"] {
        assert_eq!(count(&writes, "patch configmaps", name, 201), 1, "{name} is made once");
    }
    let others: Vec<_> = writes.iter().filter(|write| write.resource == "configmaps" && write.code != 201).collect();
    assert!(others.is_empty(), "{others:#?}");
}

/// Both ways in which an API server says that a watch is too old. The host sleeps while three children are deleted, so it has only a new
/// list to see it by.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c38_a_watch_that_is_too_old_is_listed_anew_and_what_went_in_the_gap_is_made_again() {
    let run = async |name: &str, fault: Fault| {
        let point = Point::Event { resource: "configmaps".into(), kind: "DELETED".into(), name: "a".into(), nth: 1 };
        let stand = Stand::start(name, "mirror", Some((point, fault)), &[]).await;
        let ns = &stand.ns;
        let names = ["a", "b", "c"];
        let children: Vec<_> = names.iter().map(|name| config_map(name, "1")).collect();
        stand.widget("w", json!({"reply": {"children": children}})).await;
        synced(&ns.widgets(), "w").await;
        stand.host.pause();
        for name in names {
            delete(&ns.config_maps(), name, PropagationPolicy::Background).await;
        }
        eventually("the watch is cut", async || stand.proxy.has_fired().then_some(())).await;
        stand.host.resume();
        let woken = Instant::now();
        for name in names {
            until(&ns.config_maps(), name, "made again", |_| true).await;
        }
        // A second of pause and some of work.
        assert!(woken.elapsed() < Duration::from_secs(15), "{fault}: after {:?}", woken.elapsed());
        ns.assert_quiet(Duration::from_secs(2)).await;
        for name in names {
            assert_eq!(count(&ns.writes(), "patch configmaps", name, 201), 2, "{fault}: {name} is made again once");
        }
        let is_list = |point: &Point| matches!(point, Point::Request { asked: Asked { verb, resource, namespace, .. }, .. } if verb == "list" && resource == "configmaps" && namespace.is_empty());
        let lists = stand.proxy.points().iter().filter(|point| is_list(point)).count();
        assert_eq!(lists, 2, "{fault}: one list at the start, and one more");
        assert!(!stand.host.log_text().contains("cannot watch"), "{fault}: it is no error: {}", stand.host.log_text());
    };
    tokio::join!(run("c38-stream", Fault::Lose), run("c38-status", Fault::LoseAndRefuse));
}

/// A connection that has died without a word: nothing comes, and nobody says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c39_a_watch_that_is_silently_dead_is_replaced_within_the_idle_limit() {
    let point = Point::Event { resource: "widgets".into(), kind: "ADDED".into(), name: "late".into(), nth: 1 };
    let stand = Stand::start("c39", "mirror", Some((point, Fault::Silence)), &["--watch-idle-timeout=10s"]).await;
    let ns = &stand.ns;
    let spec = |name: &str| json!({"reply": {"children": [config_map(name, "1")], "log": ["called"]}});
    stand.widget("early", spec("early")).await;
    synced(&ns.widgets(), "early").await;
    stand.widget("late", spec("late")).await;
    eventually("the watch falls silent", async || stand.proxy.has_fired().then_some(())).await;
    let silent = Instant::now();
    until(&ns.config_maps(), "late", "made", |_| true).await;
    let took = silent.elapsed();
    assert!(took > Duration::from_secs(3) && took < Duration::from_secs(60), "after {took:?}");
    // The new watch shows what comes.
    edit(&ns.widgets(), "late", json!({"spec": spec("later")})).await;
    until(&ns.config_maps(), "later", "made", |_| true).await;
    synced(&ns.widgets(), "late").await;
    for name in ["early", "late", "later"] {
        assert_eq!(count(&ns.writes(), "patch configmaps", name, 201), 1, "{name} is made once");
    }
}

/// Events of a child neither count as failures nor bring tries without end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c43_a_storm_of_events_does_not_lengthen_the_backoff_of_a_child_that_is_blocked() {
    let stand = Stand::start("c43", "mirror", None, &[]).await;
    let ns = &stand.ns;
    until(&ns.config_maps(), "kube-root-ca.crt", "made", |_| true).await;
    let quota = |most: &str| json!({"spec": {"hard": {"count/configmaps": most}}});
    let mut object = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}});
    object["spec"] = quota("3")["spec"].clone();
    ns.create(object).await;
    let quotas = ns.api("v1", "ResourceQuota");
    until(&quotas, "q", "counted", |quota| quota.data["status"]["used"]["count/configmaps"] == "1").await;
    let names = ["a", "b", "c"];
    let children: Vec<_> = names.iter().map(|name| config_map(name, "1")).collect();
    stand.widget("w", json!({"reply": {"children": children}})).await;
    let message = refused(&ns.widgets(), "w", "Forbidden").await;
    assert!(message.contains("exceeded quota: q"), "{message}");
    let mut there = Vec::new();
    eventually("two of three are made", async || {
        there.clear();
        for name in names {
            there.extend(get(&ns.config_maps(), name).await.map(|_| name));
        }
        (there.len() == 2).then_some(())
    })
    .await;
    let tries = || ns.writes().iter().filter(|write| write.resource == "configmaps" && write.code == 403).count();
    let before = tries();
    let (storm, mut events) = (Instant::now(), 0);
    while storm.elapsed() < Duration::from_secs(8) {
        edit(&ns.config_maps(), there[0], json!({"metadata": {"labels": {"round": events.to_string()}}})).await;
        events += 1;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let tried = tries() - before;
    assert!(events > 50, "it was a storm of {events}");
    // Once a second at most, for their sake, and a few by the backoff itself.
    assert!(tried <= 14, "{tried} tries in a storm of {events} events");
    edit(&quotas, "q", quota("10")).await;
    let raised = Instant::now();
    synced(&ns.widgets(), "w").await;
    // Ten failures in a row would have made it a minute.
    assert!(raised.elapsed() < Duration::from_secs(30), "after {:?}", raised.elapsed());
}

/// One reconciler's plugin computes until its deadline for each of its parents: those of another one are served meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c45_a_slow_plugin_starves_nobody_else() {
    let ns = cluster().namespace("c45").await;
    declare(&ns, "c45-slow", "mirror").await;
    declare(&ns, "c45-fast", "myapp").await;
    let stand = Stand::of(ns, None, &[]).await;
    let ns = &stand.ns;
    eventually("both are served", async || {
        (stand.host.log_text().matches("\"message\":\"watching\"").count() == 2).then_some(())
    })
    .await;
    for number in 0..30 {
        stand.widget(&format!("slow-{number}"), json!({"reply": {"log": ["slow"], "spin": true}})).await;
    }
    let slow = || stand.host.log_text().matches("\"message\":\"slow\"").count();
    eventually("the slow one is at it", async || (slow() >= 4).then_some(())).await;
    let mut longest = Duration::ZERO;
    let (before, begun) = (slow(), Instant::now());
    for number in 0..8 {
        let (name, since) = (format!("fast-{number}"), Instant::now());
        stand.my_app(&name).await;
        until(&ns.deployments(), &name, "made", |_| true).await;
        longest = longest.max(since.elapsed());
    }
    // The others had to wait for half of all slow calls if they stood in line behind them: 30 seconds on two cores.
    assert!(longest < Duration::from_secs(15), "one waited for {longest:?}");
    assert!(slow() > before || begun.elapsed() < Duration::from_secs(1), "the slow one went on all the time");
}

/// An object has a largest size: who exceeds it learns by how much, and nobody tries all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c67_a_child_that_is_too_large_is_told_with_its_size_and_not_tried_all_the_time() {
    let stand = Stand::start("c67", "mirror", None, &[]).await;
    let ns = &stand.ns;
    // More than a ConfigMap may hold, and more than a request may be.
    for (name, kib) in [("large", 1600), ("huge", 3200)] {
        stand.widget(name, json!({"reply": {"children": [config_map(name, "1")], "fillKiB": kib}})).await;
    }
    for (name, kib) in [("large", 1600), ("huge", 3200)] {
        let message = refused(&ns.widgets(), name, "ChildTooLarge").await;
        let size = message.split("it has ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        let size: usize = size.parse().unwrap_or_else(|_| panic!("it tells the size: {message}"));
        assert!((kib << 10..(kib << 10) + 2000).contains(&size), "{message}");
        assert!(message.contains(&format!("ConfigMap c67/{name}")) && message.len() < 1000, "{message}");
    }
    tokio::time::sleep(Duration::from_secs(6)).await;
    let tries =
        |name: &str| ns.writes().iter().filter(|write| write.resource == "configmaps" && write.name == name).count();
    // Half a second, then one, two, four …
    for name in ["large", "huge"] {
        assert!((1..=7).contains(&tries(name)), "{name}: {} tries", tries(name));
    }
    // A smaller one is taken at once.
    edit(&ns.widgets(), "large", json!({"spec": {"reply": {"fillKiB": 900}}})).await;
    synced(&ns.widgets(), "large").await;
    assert!(get(&ns.config_maps(), "large").await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c67_a_thousand_children_cost_a_write_each_and_no_inventory() {
    const CHILDREN: usize = 1000;
    let stand = Stand::start("c67-many", "mirror", None, &[]).await;
    let ns = &stand.ns;
    let children = |changed: &str| -> Vec<_> {
        let value = |number| if number == 500 { changed } else { "1" };
        (0..CHILDREN).map(|number| config_map(&format!("c-{number}"), value(number))).collect()
    };
    stand.widget("w", json!({"reply": {"children": children("1")}})).await;
    let parent = synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    let writes = ns.writes();
    assert_eq!(count(&writes, "patch configmaps", "", 201), CHILDREN);
    let status = serde_json::to_string(&parent.data["status"]).expect("it is JSON");
    assert!(status.len() < 2000, "the status lists no children: {} bytes", status.len());
    let rest: Vec<_> = writes.iter().filter(|write| write.resource != "configmaps").map(Request::what).collect();
    assert!(rest.len() <= 6, "{rest:?}");
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": children("2")}}})).await;
    until(&ns.config_maps(), "c-500", "changed", |child| child.data["data"]["key"] == "2").await;
    synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(1)).await;
    let changes: Vec<_> =
        ns.writes().into_iter().filter(|write| write.resource == "configmaps" && write.code == 200).collect();
    assert_eq!(changes.len(), 1, "one write for one change");
}

/// The CRD goes, with its parents, and comes back: cleanup runs, nobody shouts, and the new parents are served by the same process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c17_a_crd_that_is_deleted_and_comes_back_is_served_again() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("c17").await;
    let crd: Value =
        serde_json::from_str(&cluster.kubectl(&["get", "crd", "widgets.t.example", "-o", "json"])).expect("it is JSON");
    let names = ["w-0", "w-1", "w-2", "w-3", "w-4"];
    let spec = |name: &str| json!({"reply": {"children": [config_map(name, "1")]}, "cleanup": {"log": ["cleanup"]}});
    for name in names {
        ns.widget(name, spec(name)).await;
    }
    for name in names {
        synced(&ns.widgets(), name).await;
    }
    let crds = ns.cluster_api("apiextensions.k8s.io/v1", "CustomResourceDefinition");
    delete(&crds, "widgets.t.example", PropagationPolicy::Background).await;
    gone(&crds, "widgets.t.example").await;
    for name in names {
        assert_eq!(ns.calls(name, "cleanup"), 1, "{name} was cleaned up");
    }
    let warned = || host.log_text().lines().filter(|line| line.contains("\"level\":\"WARN\"")).count();
    let (before, since) = (warned(), Instant::now());
    // Meanwhile the other reconciler of this host works.
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 1})).await;
    synced(&ns.my_apps(), "web").await;
    tokio::time::sleep(Duration::from_secs(8).saturating_sub(since.elapsed())).await;
    let warnings = warned() - before;
    assert!(warnings <= 8, "{warnings} warnings in {:?}: {}", since.elapsed(), host.log_text());

    let fresh = json!({"apiVersion": crd["apiVersion"], "kind": crd["kind"], "metadata": {"name": "widgets.t.example"}, "spec": crd["spec"]});
    cluster.apply(fresh.to_string().as_bytes());
    cluster.kubectl(&["wait", "--for=condition=Established", "crd/widgets.t.example", "--timeout=30s"]);
    eventually("the API server serves it", async || ns.widgets().list(&ListParams::default()).await.ok().map(drop))
        .await;
    let back = Instant::now();
    for name in ["w-0", "new"] {
        ns.widget(name, spec(name)).await;
    }
    for name in ["w-0", "new"] {
        let parent = synced(&ns.widgets(), name).await;
        assert_eq!(our_finalizers(&parent).len(), 1);
    }
    assert!(back.elapsed() < Duration::from_secs(45), "after {:?}", back.elapsed());
    delete(&ns.widgets(), "new", PropagationPolicy::Background).await;
    gone(&ns.widgets(), "new").await;
    let ready = condition(&get(&ns.reconcilers(), "mirror").await.expect("it is there"), "Ready");
    assert_eq!(ready.expect("it is told")["status"], "True");
    host.terminate();
}
