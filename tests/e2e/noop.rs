//! Nothing is written when there is nothing to do, also by a host that remembers nothing; and what an apply alone cannot do.

use std::{fs, process::Command, time::Duration};

use kube::{
    Api,
    api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams, PropagationPolicy},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

use crate::{
    audit::{self, Request},
    cluster::{
        Cluster, Namespace, component, condition, config_map, delete, edit, eventually, get, gone, refused, synced,
        until,
    },
};

async fn namespace(name: &str) -> Namespace<'static> {
    Cluster::shared().namespace(name).await
}

/// What the API server adds to, spells in its own way, or leaves out of what it is told.
fn deployment(name: &str) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "containers": [{
                        "name": "web", "image": "nginx:1",
                        "ports": [{"containerPort": 80}, {"containerPort": 53, "protocol": "UDP"}],
                        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, {"name": "EMPTY", "value": ""}],
                        "resources": {"requests": {"cpu": "1000m", "memory": "2048Mi"}, "limits": {"cpu": 1}},
                        "readinessProbe": {"httpGet": {"path": "/", "port": 80}},
                        "livenessProbe": {"tcpSocket": {"port": 80}, "initialDelaySeconds": 0},
                        "volumeMounts": [{"name": "s", "mountPath": "/s", "readOnly": false}],
                        "args": [],
                    }],
                    "initContainers": [
                        {"name": "init", "image": "busybox", "env": [], "resources": {"requests": {"cpu": "0.5", "memory": 1_073_741_824}}},
                        {"name": "again", "image": "busybox", "securityContext": {}},
                    ],
                    "volumes": [{"name": "s", "secret": {"secretName": name}}, {"name": "tmp", "emptyDir": {}}],
                    "tolerations": [{"key": "k", "operator": "Exists"}],
                    "priorityClassName": null,
                },
            },
        },
    })
}

fn service(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "annotations": {}},
        "spec": {"selector": {"app": name}, "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 81, "targetPort": 8080}]}})
}

fn secret(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": {"a": "b2xk"}, "stringData": {"a": "b", "empty": ""}})
}

fn account(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "labels": {}, "creationTimestamp": null}})
}

fn varied(name: &str) -> Vec<Value> {
    vec![deployment(name), service(name), secret(name), account(name), config_map(name, "1")]
}

/// The host's writes of children.
fn child_writes(ns: &Namespace<'_>) -> Vec<Request> {
    let mut writes = ns.writes();
    writes.retain(|write| write.resource != "widgets" && write.resource != "myapps");
    writes
}

/// Those writes as `verb resource name`, sorted.
fn told(writes: &[Request]) -> Vec<String> {
    let mut told: Vec<_> = writes.iter().map(|write| format!("{} {}", write.what(), write.name)).collect();
    told.sort();
    told
}

fn events(ns: &Namespace<'_>, reason: &str) -> Vec<String> {
    let requests = ns.requests().into_iter().filter(|request| request.resource == "events");
    let of_reason = requests.filter(|request| request.body["reason"] == reason);
    of_reason.map(|request| request.body["note"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The exit code of `pilothouse render` with these live children, and what it prints.
fn render(ns: &Namespace<'_>, parent: &str, children: &str) -> (Option<i32>, String) {
    let file = |name: &str, text: &str| {
        let file = ns.cluster.control_plane.data_dir().join(name);
        fs::write(&file, text).expect("the file can be written");
        file
    };
    let (parent, children) = (file("parent.yaml", parent), file("children.yaml", children));
    let mut render = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
    render.arg("render").arg(component("mirror")).arg(parent).arg("--children").arg(children);
    let output = render.output().expect("pilothouse runs");
    (
        output.status.code(),
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat(),
    )
}

/// Makes the plugin be asked again, and waits until it was.
async fn ask_again(ns: &Namespace<'_>, name: &str) {
    let calls = ns.calls(name, "called");
    edit(&ns.widgets(), name, json!({"metadata": {"annotations": {"asked": calls.to_string()}}})).await;
    eventually("the plugin is called again", async || (ns.calls(name, "called") > calls).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
}

fn managers(object: &DynamicObject) -> Vec<String> {
    let entries = object.metadata.managed_fields.iter().flatten();
    let of_object = entries.filter(|entry| entry.subresource.is_none());
    of_object.filter_map(|entry| Some(format!("{} {}", entry.operation.as_ref()?, entry.manager.as_ref()?))).collect()
}

#[tokio::test]
async fn noop_a_restarted_host_writes_nothing_and_heals_just_what_has_drifted() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("restart").await;
    // Two hundred parents: twenty with children of many kinds, ten MyApps, and plain ones.
    let mut names: Vec<_> = (0..20).map(|n| format!("w{n:02}")).collect();
    for name in &names {
        ns.widget(name, json!({"reply": {"children": varied(name), "log": ["called"], "status": {"n": 1}}})).await;
    }
    let plain: Vec<_> = (0..170).map(|n| format!("plain{n:03}")).collect();
    for name in &plain {
        ns.widget(name, json!({"reply": {"children": [config_map(name, "1")], "log": ["called"]}})).await;
    }
    for n in 0..10 {
        ns.my_app(&format!("app{n}"), json!({"image": "nginx:1", "replicas": 2, "config": {"a": n.to_string()}})).await;
    }
    for name in &names {
        synced(&ns.widgets(), name).await;
        until(&ns.deployments(), name, "available", |deployment| condition(deployment, "Available").is_some()).await;
    }
    for n in 0..10 {
        synced(&ns.my_apps(), &format!("app{n}")).await;
    }
    names.extend(plain);
    for name in &names {
        synced(&ns.widgets(), name).await;
    }
    // The counts are told at the latest when the host ends, or the next one would have something to tell.
    ns.assert_quiet(Duration::from_secs(3)).await;
    host.terminate();

    let asked = || audit::requests(cluster.control_plane.audit_log());
    let before = ns.writes().len();
    let latest = asked().pop().map(|request| request.at);
    let host = cluster.run_host();
    let all_called = |host: &crate::cluster::Host| {
        let log = host.log_text();
        names.iter().all(|name| {
            log.lines().any(|line| line.contains("\"called\"") && line.contains(&format!("restart/{name}\"")))
        })
    };
    eventually("every plugin was called", async || all_called(&host).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let writes = ns.writes().split_off(before);
    assert!(writes.is_empty(), "a restart writes nothing: {:#?}", told(&writes));
    // Lists, watches and discovery: nothing of a parent, nor of a reconciler.
    let mut requests = asked();
    requests.retain(|request| Some(&request.at) > latest.as_ref());
    requests.retain(|request| !matches!(request.verb.as_str(), "list" | "watch") && !request.resource.is_empty());
    assert!(requests.is_empty(), "{requests:#?}");
    host.terminate();

    // Nobody looks.
    edit(&ns.config_maps(), "w03", json!({"data": {"key": "drift", "other": "theirs"}})).await;
    edit(&ns.api("v1", "Service"), "w04", json!({"metadata": {"labels": {"internal.pilothouse.dev/applied": null}}}))
        .await;
    edit(&ns.deployments(), "w05", json!({"spec": {"template": {"spec": {"priorityClassName": null}}, "replicas": 2}}))
        .await;
    edit(&ns.deployments(), "w06", json!({"spec": {"template": {"spec": {"initContainers": null}}}})).await;
    edit(&ns.config_maps(), "w07", json!({"metadata": {"labels": {"team": "blue"}}})).await;
    edit(&ns.config_maps(), "w08", json!({"metadata": {"managedFields": [{}]}})).await;
    delete(&ns.api("v1", "Secret"), "w09", PropagationPolicy::Background).await;
    let before = child_writes(&ns).len();
    let host = cluster.run_host();
    eventually("every plugin was called", async || all_called(&host).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let writes = child_writes(&ns).split_off(before);
    let expected = [
        "patch configmaps w03",
        "patch configmaps w08",
        // And what before-first-apply owned of ours.
        "patch configmaps w08",
        "patch deployments w06",
        "patch secrets w09",
        "patch services w04",
    ];
    assert_eq!(told(&writes), expected);
    let healed = get(&ns.config_maps(), "w03").await.expect("it is there");
    assert_eq!(healed.data["data"], json!({"key": "1", "other": "theirs"}));
    host.terminate();
}

#[tokio::test]
async fn noop_a_new_parent_gets_its_finalizer_and_one_status_which_knows_its_children() {
    let ns = namespace("written-once").await;
    let event = json!({"type": "Normal", "reason": "Made"});
    let reply = json!({"children": [config_map("c", "1")], "echo": true, "events": [event], "log": ["called"]});
    ns.widget("w", json!({"reply": reply})).await;
    let parent = synced(&ns.widgets(), "w").await;
    assert_eq!(parent.data["status"]["echo"]["children"], json!(["ConfigMap/written-once/c"]));
    ns.assert_quiet(Duration::from_secs(2)).await;
    let expected = ["patch configmaps c", "patch widgets w", "patch widgets/status w"];
    assert_eq!(told(&ns.writes()), expected);
    assert_eq!((events(&ns, "Made").len(), events(&ns, "ReconcileSuccess").len()), (1, 1));
    // An edit costs its child and, again, one status.
    let more = json!({"reply": {"children": [config_map("c", "2"), config_map("d", "1")]}});
    edit(&ns.widgets(), "w", json!({"spec": more})).await;
    synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    let more = ["patch configmaps c", "patch configmaps d", "patch widgets/status w"];
    assert_eq!(told(&ns.writes().split_off(expected.len())), more);
}

#[tokio::test]
async fn noop_what_the_host_leaves_alone_is_no_difference_to_render_either() {
    let ns = namespace("rendered").await;
    ns.widget("w", json!({"reply": {"children": varied("w")}})).await;
    synced(&ns.widgets(), "w").await;
    let children =
        ["get", "deployments,services,secrets,serviceaccounts,configmaps", "--namespace=rendered", "--output=yaml"];
    let live = |more: &[&str]| ns.cluster.kubectl(&[&children[..], more].concat());
    let parent = ns.cluster.kubectl(&["get", "widget", "w", "--namespace=rendered", "--output=yaml"]);

    let ours = "--selector=internal.pilothouse.dev/reconciler";
    let (code, told) = render(&ns, &parent, &live(&[ours]));
    assert_eq!(code, Some(0), "{told}");
    let (code, told) = render(&ns, &parent, &live(&[ours, "--show-managed-fields"]));
    assert_eq!(code, Some(0), "{told}");

    let mut fewer = varied("w");
    fewer[0]["spec"]["template"]["spec"]["containers"][0]["env"] = json!([]);
    fewer.pop();
    let parent = json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": "w", "namespace": "rendered"},
        "spec": {"reply": {"children": fewer}}});
    let (code, told) = render(&ns, &parent.to_string(), &live(&[ours, "--show-managed-fields"]));
    assert_eq!(code, Some(2), "{told}");
    assert!(
        told.contains("change Deployment rendered/w\n") && told.contains("delete ConfigMap rendered/w\n"),
        "{told}"
    );
    assert!(told.contains("-        - name: POD") && !told.contains("+        - name: POD"), "{told}");
}

#[tokio::test]
async fn noop_an_answer_that_differs_is_the_new_normal_and_told_once() {
    let ns = namespace("rewritten").await;
    let cluster_scoped = |kind: &str| {
        let api = ApiResource::from_gvk(&GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind));
        Api::<DynamicObject>::all_with(ns.client.clone(), &api)
    };
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy",
    "metadata": {"name": "rewrite"},
    "spec": {
        "failurePolicy": "Fail", "reinvocationPolicy": "Never",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "rewritten"}},
            "objectSelector": {"matchLabels": {"rewrite": "yes"}},
            "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]}],
        },
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {
            "expression": "[JSONPatch{op: \"add\", path: \"/data/key\", value: \"rewritten\"}]"}}],
    }});
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": "rewrite"}, "spec": {"policyName": "rewrite"}});
    for object in [policy, binding] {
        let api = cluster_scoped(object["kind"].as_str().unwrap_or_default());
        let object: DynamicObject = serde_json::from_value(object).expect("it is an object");
        api.create(&PostParams::default(), &object).await.expect("the kind is served");
    }
    let labelled = |name: &str, value: &str| {
        let mut object = config_map(name, value);
        object["metadata"]["labels"] = json!({"rewrite": "yes"});
        object
    };
    eventually("the policy is in force", async || {
        let probe: DynamicObject = serde_json::from_value(labelled("probe", "1")).expect("it is an object");
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let probe = ns.config_maps().create(&params, &probe).await.expect("it can be created");
        (probe.data["data"]["key"] == "rewritten").then_some(())
    })
    .await;

    let children = json!([labelled("a", "ours"), config_map("b", "ours")]);
    ns.widget("w", json!({"reply": {"children": children, "log": ["called"], "next": {"afterMs": 1000}}})).await;
    synced(&ns.widgets(), "w").await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(told(&child_writes(&ns)), ["patch configmaps a", "patch configmaps b"]);
    let told_once = events(&ns, "AppliedDifferently");
    assert_eq!(told_once.len(), 1, "{told_once:?}");
    assert!(told_once[0].starts_with("ConfigMap rewritten/a: data.key: "), "{told_once:?}");
    // Drift is healed as ever, and not told again.
    edit(&ns.config_maps(), "a", json!({"metadata": {"labels": {"rewrite": null}}})).await;
    until(&ns.config_maps(), "a", "healed", |child| {
        child.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key("rewrite"))
    })
    .await;
    ns.assert_quiet(Duration::from_secs(3)).await;
    assert_eq!(events(&ns, "AppliedDifferently").len(), 1);
    assert_eq!(child_writes(&ns).len(), 3, "{:#?}", told(&child_writes(&ns)));
    for kind in ["MutatingAdmissionPolicyBinding", "MutatingAdmissionPolicy"] {
        delete(&cluster_scoped(kind), "rewrite", PropagationPolicy::Background).await;
    }
}

#[tokio::test]
async fn noop_after_managed_fields_were_cleared_a_dropped_field_goes_and_those_of_others_stay() {
    let ns = namespace("cleared").await;
    let child = |data: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data});
    let spec = |data: Value| json!({"reply": {"children": [child(data)], "log": ["called"]}});
    ns.widget("w", spec(json!({"a": "1", "b": "1"}))).await;
    synced(&ns.widgets(), "w").await;
    edit(&ns.config_maps(), "c", json!({"data": {"theirs": "1"}})).await;
    edit(&ns.config_maps(), "c", json!({"metadata": {"managedFields": [{}]}})).await;
    let cleared = until(&ns.config_maps(), "c", "ours again", |child| {
        let entry = |name: &str| {
            let mut entries = child.metadata.managed_fields.iter().flatten();
            let entry = entries.find(|entry| entry.manager.as_deref().is_some_and(|manager| manager.starts_with(name)));
            entry.and_then(|entry| entry.fields_v1.as_ref()).map(|fields| fields.0["f:data"].clone())
        };
        entry("pilothouse/") == Some(json!({"f:a": {}, "f:b": {}}))
            && entry("before-first-apply") == Some(json!({"f:theirs": {}}))
    })
    .await;
    assert_eq!(managers(&cleared).len(), 2);
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(told(&child_writes(&ns)).len(), 3, "create, apply, release: {:#?}", child_writes(&ns));
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [child(json!({"a": "1"}))]}}})).await;
    until(&ns.config_maps(), "c", "b is gone", |child| child.data["data"] == json!({"a": "1", "theirs": "1"})).await;
}

#[tokio::test]
async fn c26_an_adopted_object_loses_what_its_earlier_manager_had_set() {
    let ns = namespace("c26").await;
    let mut before = deployment("web");
    before["metadata"]["labels"] = json!({"old": "1"});
    before["metadata"]["annotations"] = json!({"kubectl.kubernetes.io/last-applied-configuration": "{}"});
    before["spec"]["template"]["spec"]["containers"][0]["env"] =
        json!([{"name": "OLD", "value": "1"}, {"name": "KEPT", "value": "1"}]);
    let before: DynamicObject = serde_json::from_value(before).expect("it is an object");
    let params = PostParams { field_manager: Some("old-op".to_owned()), ..PostParams::default() };
    let before = ns.deployments().create(&params, &before).await.expect("it can be created");
    ns.cluster.kubectl(&["--namespace=c26", "label", "deployment/web", "team=blue"]);

    let mut wanted = deployment("web");
    wanted["spec"]["template"]["spec"]["containers"][0]["env"] = json!([{"name": "KEPT", "value": "1"}]);
    ns.widget("w", json!({"reply": {"children": [wanted], "log": ["called"]}})).await;
    refused(&ns.widgets(), "w", "NameCollision").await;
    let options = json!({"adoptionPolicy": "IfUnowned", "adoptFieldManagers": ["old-op"]});
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [{"object": wanted, "options": options}]}}})).await;
    synced(&ns.widgets(), "w").await;
    let adopted = get(&ns.deployments(), "web").await.expect("it is there");
    assert_eq!(adopted.metadata.uid, before.metadata.uid);
    let env = &adopted.data["spec"]["template"]["spec"]["containers"][0]["env"];
    assert_eq!(env, &json!([{"name": "KEPT", "value": "1"}]));
    let labels = adopted.metadata.labels.clone().unwrap_or_default();
    assert!(!labels.contains_key("old") && labels.get("team").is_some_and(|team| team == "blue"), "{labels:?}");
    let annotations = adopted.metadata.annotations.clone().unwrap_or_default();
    assert!(!annotations.contains_key("kubectl.kubernetes.io/last-applied-configuration"), "{annotations:?}");
    assert!(managers(&adopted).iter().all(|manager| !manager.ends_with("old-op")), "{:?}", managers(&adopted));
    let writes = child_writes(&ns).len();
    ask_again(&ns, "w").await;
    assert_eq!(child_writes(&ns).len(), writes, "a second run writes nothing");

    // The earlier manager writes once more; its fields become ours again, and go.
    let patch = Patch::Merge(json!({"metadata": {"labels": {"old": "2"}}}));
    let params = PatchParams { field_manager: Some("old-op".to_owned()), ..PatchParams::default() };
    ns.deployments().patch("web", &params, &patch).await.expect("it can be patched");
    until(&ns.deployments(), "web", "the label is gone", |deployment| {
        !deployment.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key("old"))
    })
    .await;
    ns.assert_quiet(Duration::from_secs(2)).await;
}

#[tokio::test]
async fn c30_a_field_that_cannot_change_follows_the_update_strategy() {
    let ns = namespace("c30").await;
    let with_selector = |name: &str, app: &str| {
        let mut deployment = deployment(name);
        deployment["spec"]["selector"]["matchLabels"]["app"] = app.into();
        deployment["spec"]["template"]["metadata"]["labels"]["app"] = app.into();
        deployment
    };
    let spec = |strategy: &str, name: &str, app: &str, more: &[Value]| {
        let child = json!({"object": with_selector(name, app), "options": {"updateStrategy": strategy}});
        let children = [&[child], more].concat();
        json!({"reply": {"children": children, "log": ["called"]}})
    };
    let selector = |deployment: &DynamicObject| deployment.data["spec"]["selector"]["matchLabels"]["app"].clone();
    let uid = async |name: &str| get(&ns.deployments(), name).await.and_then(|deployment| deployment.metadata.uid);
    for (name, strategy) in [("apply", "Apply"), ("recreate", "Recreate"), ("ondelete", "OnDelete")] {
        ns.widget(name, spec(strategy, name, "1", &[config_map(name, "1"), config_map(&format!("{name}-old"), "1")]))
            .await;
    }
    for name in ["apply", "recreate", "ondelete"] {
        synced(&ns.widgets(), name).await;
    }
    let before = (uid("apply").await, uid("recreate").await, uid("ondelete").await);
    for (name, strategy) in [("apply", "Apply"), ("recreate", "Recreate"), ("ondelete", "OnDelete")] {
        edit(&ns.widgets(), name, json!({"spec": spec(strategy, name, "2", &[config_map(name, "2")])})).await;
    }

    let message = refused(&ns.widgets(), "apply", "ImmutableField").await;
    for part in ["Deployment c30/apply", "spec.selector", "updateStrategy", "1 children that are no longer wanted"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    until(&ns.config_maps(), "apply", "its neighbour is written", |child| child.data["data"]["key"] == "2").await;
    assert!(get(&ns.config_maps(), "apply-old").await.is_some(), "nothing is pruned");
    assert_eq!(uid("apply").await, before.0);
    edit(&ns.widgets(), "apply", json!({"spec": spec("Apply", "apply", "1", &[config_map("apply", "1")])})).await;
    synced(&ns.widgets(), "apply").await;
    gone(&ns.config_maps(), "apply-old").await;

    until(&ns.deployments(), "recreate", "made anew", |deployment| selector(deployment) == "2").await;
    assert_ne!(uid("recreate").await, before.1);
    synced(&ns.widgets(), "recreate").await;
    gone(&ns.config_maps(), "recreate-old").await;
    let deletes: Vec<_> = child_writes(&ns).into_iter().filter(|write| write.what() == "delete deployments").collect();
    assert_eq!(deletes.len(), 1, "{deletes:#?}");
    assert!(deletes[0].body["preconditions"]["uid"].is_string(), "{deletes:#?}");

    eventually("it is told that it waits", async || (events(&ns, "WaitsForDeletion").len() == 1).then_some(())).await;
    assert_eq!(uid("ondelete").await, before.2);
    let writes = child_writes(&ns).len();
    ask_again(&ns, "ondelete").await;
    assert_eq!(child_writes(&ns).len(), writes, "{:#?}", told(&child_writes(&ns)));
    delete(&ns.deployments(), "ondelete", PropagationPolicy::Background).await;
    until(&ns.deployments(), "ondelete", "made anew", |deployment| selector(deployment) == "2").await;
    synced(&ns.widgets(), "ondelete").await;
    gone(&ns.config_maps(), "ondelete-old").await;
}

#[tokio::test]
async fn c30_an_invalid_child_is_named_with_the_fields_that_are_wrong() {
    let ns = namespace("invalid").await;
    let spec = |image: &str, port: i64| {
        let mut child = deployment("web");
        child["spec"]["template"]["spec"]["containers"][0]["image"] = image.into();
        child["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = port.into();
        json!({"reply": {"children": [{"object": child, "options": {"updateStrategy": "Recreate"}}]}})
    };
    ns.widget("w", spec("nginx:1", 80)).await;
    synced(&ns.widgets(), "w").await;
    let before = get(&ns.deployments(), "web").await.and_then(|deployment| deployment.metadata.uid);
    edit(&ns.widgets(), "w", json!({"spec": spec("nginx:2", 99_999)})).await;
    let message = refused(&ns.widgets(), "w", "ChildInvalid").await;
    assert!(message.contains("spec.template.spec.containers[0].ports"), "{message}");
    edit(&ns.widgets(), "w", json!({"spec": spec("nginx:2", 81)})).await;
    synced(&ns.widgets(), "w").await;
    assert_eq!(get(&ns.deployments(), "web").await.and_then(|deployment| deployment.metadata.uid), before);
    // No field of this name is known.
    let mut unknown = config_map("c", "1");
    unknown["datum"] = json!({});
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [unknown]}}})).await;
    let message = refused(&ns.widgets(), "w", "ApplyFailed").await;
    assert!(message.contains("datum") && message.contains("another version"), "{message}");
}

#[tokio::test]
async fn c30_a_field_that_the_kind_does_not_have_and_a_namespace_that_is_missing_are_named() {
    let ns = namespace("unknown").await;
    let gadget =
        |spec: Value| json!({"apiVersion": "t.example/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": spec});
    let reply = |child: Value| json!({"reply": {"children": [child, config_map("c", "1")]}});
    ns.widget("w", reply(gadget(json!({"mode": "slow", "speed": 3})))).await;
    let message = refused(&ns.widgets(), "w", "ApplyFailed").await;
    assert!(
        message.starts_with("Gadget unknown/g: ") && message.contains(".spec.speed: field not declared in schema"),
        "{message}"
    );
    assert!(get(&ns.config_maps(), "c").await.is_some(), "one bad child stops none of the others");
    edit(&ns.widgets(), "w", json!({"spec": reply(gadget(json!({"mode": "slow"})))})).await;
    synced(&ns.widgets(), "w").await;

    let mut elsewhere = config_map("e", "1");
    elsewhere["metadata"]["namespace"] = json!("unknown-later");
    edit(&ns.widgets(), "w", json!({"spec": reply(elsewhere)})).await;
    let message = refused(&ns.widgets(), "w", "ChildNotFound").await;
    assert!(message.starts_with("ConfigMap unknown-later/e: its namespace or its kind does not exist"), "{message}");
    let later = namespace("unknown-later").await;
    until(&later.config_maps(), "e", "made by itself", |_| true).await;
    synced(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn noop_what_the_cluster_does_not_let_us_change_back_is_told_as_drift() {
    let ns = namespace("frozen").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "ours")]}})).await;
    synced(&ns.widgets(), "w").await;
    edit(&ns.config_maps(), "c", json!({"metadata": {"labels": {"frozen": "yes"}}})).await;
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": "frozen"},
    "spec": {
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "frozen"}},
            "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["configmaps"]}],
        },
        "validations": [{"expression": "oldObject.data.key != 'theirs' || object.data.key == 'theirs'", "message": "theirs stays"}],
    }});
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "frozen"}, "spec": {"policyName": "frozen", "validationActions": ["Deny"]}});
    ns.cluster.apply(policy.to_string().as_bytes());
    ns.cluster.apply(binding.to_string().as_bytes());
    ns.create(
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "probe"}, "data": {"key": "theirs"}}),
    )
    .await;
    eventually("the policy is in force", async || {
        let patch = Patch::Merge(json!({"data": {"key": "other"}}));
        ns.config_maps().patch("probe", &PatchParams { dry_run: true, ..PatchParams::default() }, &patch).await.err()
    })
    .await;
    let before = child_writes(&ns).len();
    edit(&ns.config_maps(), "c", json!({"data": {"key": "theirs"}})).await;
    let message = refused(&ns.widgets(), "w", "ChildDrifted").await;
    assert!(
        message.starts_with("ConfigMap frozen/c: somebody changed it") && message.contains("theirs stays"),
        "{message}"
    );
    tokio::time::sleep(Duration::from_secs(5)).await;
    let writes = child_writes(&ns).len() - before;
    assert!(writes <= 20, "no hot loop: {:#?}", told(&child_writes(&ns)));
    ns.cluster.kubectl(&["delete", "validatingadmissionpolicybinding/frozen", "validatingadmissionpolicy/frozen"]);
    edit(&ns.widgets(), "w", json!({"metadata": {"annotations": {"again": "1"}}})).await;
    until(&ns.config_maps(), "c", "ours again", |child| child.data["data"]["key"] == "ours").await;
    synced(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn noop_a_swapped_union_member_is_brought_back() {
    let ns = namespace("union").await;
    let mut child = deployment("web");
    child["spec"]["template"]["spec"]["volumes"] = json!([{"name": "s", "configMap": {"name": "c"}}]);
    ns.widget("w", json!({"reply": {"children": [child]}})).await;
    synced(&ns.widgets(), "w").await;
    let before = get(&ns.deployments(), "web").await.and_then(|deployment| deployment.metadata.uid);
    let swap =
        json!([{"op": "replace", "path": "/spec/template/spec/volumes/0", "value": {"name": "s", "emptyDir": {}}}]);
    ns.cluster.kubectl(&["--namespace=union", "patch", "deployment/web", "--type=json", "-p", &swap.to_string()]);
    let healed = until(&ns.deployments(), "web", "the volume is back", |deployment| {
        let volume = &deployment.data["spec"]["template"]["spec"]["volumes"][0];
        volume["configMap"]["name"] == "c" && volume["emptyDir"].is_null()
    })
    .await;
    assert_eq!(healed.metadata.uid, before);
    synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    let healed = get(&ns.deployments(), "web").await.expect("it is there");
    let ours: Vec<_> = managers(&healed).into_iter().filter(|manager| manager.contains("pilothouse/")).collect();
    assert_eq!(ours.len(), 1, "only what was applied: {ours:?}");

    // The plugin itself makes a union of what was defaulted and what it wants.
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [{
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"strategy": {"type": "Recreate"}, "selector": child["spec"]["selector"], "template": child["spec"]["template"]}}]}}}))
    .await;
    until(&ns.deployments(), "web", "another strategy", |deployment| {
        deployment.data["spec"]["strategy"] == json!({"type": "Recreate"})
    })
    .await;
    synced(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn c42_a_prune_that_waits_says_for_whom() {
    let ns = namespace("c42").await;
    ns.create(config_map("theirs", "1")).await;
    ns.widget("w", json!({"reply": {"children": [config_map("a", "1"), config_map("b", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("theirs", "2")]}}})).await;
    let message = refused(&ns.widgets(), "w", "NameCollision").await;
    assert!(
        message.contains("ConfigMap c42/theirs") && message.contains("2 children that are no longer wanted"),
        "{message}"
    );
    assert!(get(&ns.config_maps(), "a").await.is_some() && get(&ns.config_maps(), "b").await.is_some());
}

#[tokio::test]
async fn noop_a_child_that_is_being_deleted_is_never_applied_also_when_the_watch_has_lost_it() {
    let ns = namespace("dying").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    edit(&ns.config_maps(), "c", json!({"metadata": {"finalizers": ["t.example/hold"]}})).await;
    delete(&ns.config_maps(), "c", PropagationPolicy::Background).await;
    // Without our label the watch shows it as gone.
    let left =
        edit(&ns.config_maps(), "c", json!({"metadata": {"labels": {"internal.pilothouse.dev/reconciler": null}}}))
            .await;
    let refused = || child_writes(&ns).iter().filter(|write| write.code == 409).count();
    eventually("the host wants to make it, and may not", async || (refused() > 0).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let same = get(&ns.config_maps(), "c").await.expect("somebody holds it");
    assert_eq!(same.metadata.resource_version, left.metadata.resource_version, "it is left alone");
    edit(&ns.config_maps(), "c", json!({"metadata": {"finalizers": null}})).await;
    until(&ns.config_maps(), "c", "made anew", |child| child.metadata.uid != left.metadata.uid).await;
    synced(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn noop_a_namespace_that_is_being_deleted_is_a_wait() {
    let ns = namespace("terminating").await;
    ns.create(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "holds", "finalizers": ["t.example/hold"]}})).await;
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": "w", "finalizers": ["t.example/hold"]},
        "spec": {"reply": {"children": [config_map("a", "1")]}, "cleanup": {"children": [config_map("late", "1")], "waitingMs": 1000}}}))
        .await;
    synced(&ns.widgets(), "w").await;
    delete(&ns.api("v1", "Namespace"), "terminating", PropagationPolicy::Background).await;
    let message = refused(&ns.widgets(), "w", "NamespaceTerminating").await;
    assert!(message.starts_with("ConfigMap terminating/"), "{message}");
    let writes = child_writes(&ns).len();
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(child_writes(&ns).len() <= writes + 2, "{:#?}", told(&child_writes(&ns)));
    edit(&ns.widgets(), "w", json!({"metadata": {"finalizers": null}})).await;
    edit(&ns.config_maps(), "holds", json!({"metadata": {"finalizers": null}})).await;
}

#[tokio::test]
async fn c19_manifests_that_the_api_server_spells_in_its_own_way_are_quiet() {
    let ns = namespace("c19").await;
    let stateful_set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "db"},
        "spec": {"serviceName": "db", "replicas": 0, "selector": {"matchLabels": {"app": "db"}},
            "template": {"metadata": {"labels": {"app": "db"}}, "spec": {"containers": [{"name": "db", "image": "db", "env": [{"name": "E", "value": ""}]}]}},
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}}}]}});
    let ingress = json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "in"},
        "spec": {"rules": [{"host": "", "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": {"service": {"name": "s", "port": {"number": 80}}}}]}}], "tls": []}});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "c19"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "c19"}, "subjects": []});
    // The second port leaves out a key of the list, which has a default.
    let gadget = json!({"apiVersion": "t.example/v1", "kind": "Gadget", "metadata": {"name": "g"},
        "spec": {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53}]}});
    let cluster_role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "c19"}, "rules": []});
    ns.cluster.apply(cluster_role.to_string().as_bytes());
    let children = [&varied("web")[..], &[stateful_set, ingress, binding, gadget]].concat();
    // The one of cluster scope is written elsewhere.
    let resources = children.len() - 1;
    ns.widget("w", json!({"reply": {"children": children, "log": ["called"], "next": {"afterMs": 1000}}})).await;
    synced(&ns.widgets(), "w").await;
    until(&ns.deployments(), "web", "available", |deployment| condition(deployment, "Available").is_some()).await;
    let calls = ns.calls("w", "called");
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(ns.calls("w", "called") >= calls + 4);
    assert_eq!(child_writes(&ns).len(), resources, "{:#?}", told(&child_writes(&ns)));
    let gadget = get(&ns.api("t.example/v1", "Gadget"), "g").await.expect("it is there");
    assert_eq!(gadget.data["spec"]["ports"][1], json!({"port": 53, "protocol": "TCP", "weight": 1}));
    let mut bindings = audit::requests(ns.cluster.control_plane.audit_log());
    bindings.retain(|request| request.resource == "clusterrolebindings" && request.name == "c19" && request.is_write());
    assert_eq!(bindings.len(), 1, "{bindings:#?}");
}

#[tokio::test]
async fn c20_an_amount_in_another_spelling_is_no_change() {
    let ns = namespace("c20").await;
    let spec = |cpu: Value| {
        let mut child = deployment("web");
        child["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu;
        json!({"reply": {"children": [child], "log": ["called"], "next": {"afterMs": 1000}}})
    };
    ns.widget("w", spec(json!("1000m"))).await;
    synced(&ns.widgets(), "w").await;
    until(&ns.deployments(), "web", "available", |deployment| condition(deployment, "Available").is_some()).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(child_writes(&ns).len(), 1, "{:#?}", told(&child_writes(&ns)));
    assert_eq!(events(&ns, "AppliedDifferently"), Vec::<String>::new());
    let generation = async || get(&ns.deployments(), "web").await.and_then(|deployment| deployment.metadata.generation);
    let before = generation().await;
    edit(&ns.widgets(), "w", json!({"spec": spec(json!(1))})).await;
    synced(&ns.widgets(), "w").await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(generation().await, before);
    assert!(child_writes(&ns).len() <= 2, "{:#?}", told(&child_writes(&ns)));
}

#[tokio::test]
async fn c22_another_order_of_children_is_no_change() {
    let ns = namespace("c22").await;
    let mut children: Vec<_> = ["a", "b", "c", "d"].map(|name| config_map(name, "1")).into();
    let spec = |children: &[Value]| json!({"spec": {"reply": {"children": children, "log": ["called"]}}});
    ns.widget("w", spec(&children)["spec"].clone()).await;
    synced(&ns.widgets(), "w").await;
    for _ in 0..4 {
        children.rotate_left(1);
        edit(&ns.widgets(), "w", spec(&children)).await;
        synced(&ns.widgets(), "w").await;
    }
    assert_eq!(child_writes(&ns).len(), 4, "{:#?}", told(&child_writes(&ns)));
}

#[tokio::test]
async fn c22_a_plugin_that_never_settles_is_slowed_down_and_told_where() {
    let ns = namespace("c22-unstable").await;
    // A Deployment changes by itself after each apply: that is no reason to go on faster.
    let spec = |stamped: bool| json!({"reply": {"children": [deployment("web")], "stamped": stamped, "log": ["called"], "next": {"afterMs": 1000}}});
    ns.widget("w", spec(true)).await;
    let message = refused(&ns.widgets(), "w", "UnstableOutput").await;
    assert!(
        message.starts_with("Deployment c22-unstable/web: the plugin wants another value")
            && message.contains("at metadata.annotations.t.example/called,"),
        "{message}"
    );
    let writes = ns.writes().len();
    tokio::time::sleep(Duration::from_secs(15)).await;
    let writes = ns.writes().split_off(writes);
    assert!((1..=6).contains(&writes.len()), "{:#?}", told(&writes));
    assert!(writes.iter().all(|write| write.resource == "deployments"), "{:#?}", told(&writes));
    // The remedy holds at once.
    edit(&ns.widgets(), "w", json!({"spec": spec(false)})).await;
    synced(&ns.widgets(), "w").await;
    let writes = child_writes(&ns).len();
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(child_writes(&ns).len(), writes);
}

fn pod(more: &Value) -> Value {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {}},
        "spec": {"priorityClassName": null, "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "i:1", "env": [{"name": "A", "value": null}], "args": []}]}});
    if let (Some(spec), Some(more)) = (pod["spec"].as_object_mut(), more.as_object()) {
        spec.extend(more.clone());
    }
    pod
}

#[tokio::test]
async fn c23_nulls_and_empty_values_are_quiet_also_with_recreate() {
    let ns = namespace("c23").await;
    let child = json!({"object": pod(&json!({})), "options": {"updateStrategy": "Recreate"}});
    ns.widget("w", json!({"reply": {"children": [child], "log": ["called"], "next": {"afterMs": 1000}}})).await;
    synced(&ns.widgets(), "w").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(told(&child_writes(&ns)), ["patch pods p"]);
    assert_eq!(events(&ns, "AppliedDifferently"), Vec::<String>::new());
}

#[tokio::test]
async fn c24_what_admission_adds_never_recreates() {
    let ns = namespace("c24").await;
    ns.create(json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "defaults"},
        "spec": {"limits": [{"type": "Container", "default": {"cpu": "500m"}, "defaultRequest": {"cpu": "100m", "memory": "64Mi"}}]}}))
        .await;
    let spec = |more: Value| {
        let mut more = more;
        more["tolerations"] = json!([{"key": "ours", "operator": "Exists"}]);
        let child = json!({"object": pod(&more), "options": {"updateStrategy": "Recreate"}});
        json!({"reply": {"children": [child], "log": ["called"], "next": {"afterMs": 1000}}})
    };
    ns.widget("w", spec(json!({}))).await;
    synced(&ns.widgets(), "w").await;
    let pods = ns.api("v1", "Pod");
    let before = get(&pods, "p").await.expect("it is there");
    assert_eq!(before.data["spec"]["tolerations"].as_array().map(Vec::len), Some(3), "admission adds two");
    let requests = &before.data["spec"]["containers"][0]["resources"]["requests"];
    assert_eq!(*requests, json!({"cpu": "100m", "memory": "64Mi"}), "and what the LimitRange says");
    edit(&pods, "p", json!({"metadata": {"labels": {"team": "blue"}}})).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(told(&child_writes(&ns)), ["patch pods p"]);
    let uid = async || get(&pods, "p").await.and_then(|pod| pod.metadata.uid);
    assert_eq!(uid().await, before.metadata.uid);
    // Only what cannot be changed, and what the plugin has changed, makes it anew.
    edit(&ns.widgets(), "w", json!({"spec": spec(json!({"terminationGracePeriodSeconds": 7}))})).await;
    until(&pods, "p", "made anew", |pod| {
        pod.metadata.uid != before.metadata.uid && pod.data["spec"]["terminationGracePeriodSeconds"] == 7
    })
    .await;
    synced(&ns.widgets(), "w").await;
    let deletes = child_writes(&ns).iter().filter(|write| write.verb == "delete").count();
    assert_eq!(deletes, 1, "{:#?}", told(&child_writes(&ns)));
    assert_eq!(ns.api("v1", "Pod").list(&ListParams::default()).await.map_or(0, |pods| pods.items.len()), 1);
}

#[tokio::test]
async fn noop_a_map_that_is_sent_empty_is_for_others_to_fill() {
    let ns = namespace("empty-map").await;
    let child =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "annotations": {}}, "data": {}});
    ns.widget("w", json!({"reply": {"children": [child], "log": ["called"]}})).await;
    synced(&ns.widgets(), "w").await;
    ns.assert_quiet(Duration::from_secs(1)).await;
    let mut writes = Vec::new();
    for round in ["1", "2", "3"] {
        let calls = ns.calls("w", "called");
        edit(
            &ns.config_maps(),
            "a",
            json!({"metadata": {"annotations": {"theirs": round}}, "data": {"theirs": round}}),
        )
        .await;
        eventually("the plugin is asked", async || (ns.calls("w", "called") > calls).then_some(())).await;
        ns.assert_quiet(Duration::from_secs(1)).await;
        writes.push(child_writes(&ns).len());
    }
    // The API server keeps no empty map, so who fills it first takes it from us, and it is applied once more.
    assert_eq!(writes, [2, 2, 2], "{:#?}", told(&child_writes(&ns)));
}
