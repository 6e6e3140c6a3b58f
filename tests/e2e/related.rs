//! What plugins see beside their parents and children: related objects, which are watched, and reads by the capability `kube`. Both as the
//! service account, and Secrets only as they are granted.

use std::{process::Command, sync::OnceLock, time::Duration};

use kube::{
    Api,
    api::{DynamicObject, PropagationPolicy},
};
use serde_json::{Value, json};

use crate::{
    audit,
    cluster::{
        Cluster, Host, Namespace, component, condition, config_map, delete, edit, eventually, get, gone, pilothouse,
        refused, synced, told, until,
    },
    swap::push,
};

/// Reach without its relations: the same under a name that is none of the contract.
fn without_relations() -> Vec<u8> {
    let mut bytes = std::fs::read(component("reach")).expect("it was built");
    let (from, to) = (b"pilothouse:plugin/relations@", b"pilothouse:plugxx/relations@");
    let places: Vec<_> =
        bytes.windows(from.len()).enumerate().filter(|(_, part)| part == from).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "it exports relations");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    bytes
}

/// These grants, and some of what reach imports as well, and does not use here. `secret` is how a Secret is named.
fn granted(mut grants: Value, secret: &Value) -> Value {
    let unused = json!({
        "http": [{"name": "unused", "url": "https://nobody.invalid"}],
        "sql": [{"name": "unused", "engine": "postgres", "secretRef": secret}],
    });
    for (capability, unused) in unused.as_object().into_iter().flatten() {
        if grants[capability].is_null() {
            grants[capability] = unused.clone();
        }
    }
    grants
}

/// Installs reach, beside what is there already.
fn install(cluster: &Cluster, grants: Value) {
    let grants = granted(grants, &json!({"namespace": "pilothouse-system", "name": "unused"}));
    // What it may not read the host would try again and again, and wake the parents.
    let here = "--namespace=pilothouse-system";
    let rights = ["--verb=get,list,watch", "--resource=secrets", "--resource-name=unused", here];
    cluster.kubectl(&[&["create", "role", "unused"][..], &rights].concat());
    let host = "--serviceaccount=pilothouse-system:pilothouse";
    cluster.kubectl(&["create", "rolebinding", "unused", "--role=unused", host, here]);
    cluster.apply(&pilothouse(&["manifests", &component("reach").to_string_lossy()]));
    cluster.kubectl(&[
        "patch",
        "crec",
        "reach",
        "--type=merge",
        "-p",
        &json!({"spec": {"grants": grants}}).to_string(),
    ]);
}

/// The rights to some resources in the core group, of those names if there are any, for the service account of reach in one namespace.
fn permit(cluster: &Cluster, namespace: &str, resource: &str, names: &[&str]) {
    let metadata = json!({"name": format!("reach-{resource}"), "namespace": namespace});
    let rule =
        json!({"apiGroups": [""], "resources": [resource], "resourceNames": names, "verbs": ["get", "list", "watch"]});
    let role =
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": [rule]});
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": "reach", "namespace": "pilothouse-system"}],
    });
    for object in [role, binding] {
        cluster.apply(object.to_string().as_bytes());
    }
}

/// A cluster where reach may not see Pods.
fn shared() -> &'static Cluster {
    static SHARED: OnceLock<(Cluster, Host)> = OnceLock::new();
    let (cluster, _) = SHARED.get_or_init(|| {
        let cluster = Cluster::start();
        let secret = |name: &str| json!({"namespace": "related-secrets", "name": name});
        let listed: Vec<_> = ["open", "late", "own"].map(secret).into();
        let sql = json!([{"name": "db", "engine": "postgres", "secretRef": secret("own")}]);
        install(&cluster, json!({"kube": {"secrets": listed}, "sql": sql}));
        let role: Value =
            serde_json::from_str(&cluster.kubectl(&["get", "clusterrole", "pilothouse:reach", "-o", "json"]))
                .expect("it is JSON");
        let rules = role["rules"].as_array().expect("it has rules");
        let place = rules.iter().position(|rule| rule["resources"][0] == "pods").expect("it may see Pods");
        let patch = json!([{"op": "remove", "path": format!("/rules/{place}")}]).to_string();
        cluster.kubectl(&["patch", "clusterrole", "pilothouse:reach", "--type=json", "-p", &patch]);
        let host = cluster.run_host_with(&[], 3);
        (cluster, host)
    });
    cluster
}

fn reaches(ns: &Namespace<'_>) -> Api<DynamicObject> {
    ns.api("t.example/v1", "Reach")
}

async fn reach(ns: &Namespace<'_>, name: &str, spec: Value) {
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Reach", "metadata": {"name": name}, "spec": spec})).await;
}

fn selects(kind: &str, namespace: &str, names: &[&str], labels: &str) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "namespace": namespace, "names": names, "labels": labels})
}

/// Waits until the parent tells to have seen exactly this.
async fn sees(ns: &Namespace<'_>, name: &str, seen: &[&str]) -> DynamicObject {
    until(&reaches(ns), name, &format!("it sees {seen:?}"), |parent| parent.data["status"]["seen"] == json!(seen)).await
}

fn labelled(name: &str, value: &str, labels: Value) -> Value {
    let mut map = config_map(name, value);
    map["metadata"]["labels"] = labels;
    map
}

fn secret(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": {"all": "yes"}}, "stringData": {"key": name}})
}

async fn set(api: &Api<DynamicObject>, name: &str, value: &str) {
    edit(api, name, json!({"data": {"key": value}})).await;
}

#[tokio::test]
async fn a_change_wakes_those_who_select_the_object_before_or_after_it_and_nobody_else() {
    let cluster = shared();
    let (ns, other) = (cluster.namespace("related-wakes").await, cluster.namespace("related-other").await);
    ns.create(config_map("x", "1")).await;
    other.create(config_map("x", "other")).await;
    let mine = |names: &[&str], labels: &str| selects("ConfigMap", "related-wakes", names, labels);
    reach(&ns, "by-name", json!({"relate": [mine(&["x"], ""), mine(&["x"], "")]})).await;
    reach(&ns, "by-label", json!({"relate": [mine(&[], "app in (b,c),!hidden")]})).await;
    reach(&ns, "elsewhere", json!({"relate": [selects("ConfigMap", "related-other", &["x"], "")]})).await;
    reach(&ns, "nothing", json!({})).await;
    let x = "ConfigMap related-wakes/x";
    sees(&ns, "by-name", &[&format!("{x} 1")]).await;
    sees(&ns, "by-label", &[]).await;
    sees(&ns, "elsewhere", &["ConfigMap related-other/x other"]).await;
    sees(&ns, "nothing", &[]).await;
    for name in ["by-name", "by-label", "elsewhere", "nothing"] {
        synced(&reaches(&ns), name).await;
    }
    let calls = || ["by-name", "by-label", "elsewhere", "nothing"].map(|name| ns.calls(name, "asked"));
    ns.assert_quiet(Duration::from_secs(2)).await;

    // Each step says whom it wakes.
    let before = calls();
    set(&ns.config_maps(), "x", "2").await;
    sees(&ns, "by-name", &[&format!("{x} 2")]).await;
    assert_eq!(calls(), [before[0] + 1, before[1], before[2], before[3]]);

    // It enters the selection by its labels, is changed in it, and leaves it.
    let before = calls();
    ns.create(labelled("y", "1", json!({"app": "b"}))).await;
    sees(&ns, "by-label", &["ConfigMap related-wakes/y 1"]).await;
    set(&ns.config_maps(), "y", "2").await;
    sees(&ns, "by-label", &["ConfigMap related-wakes/y 2"]).await;
    edit(&ns.config_maps(), "y", json!({"metadata": {"labels": {"hidden": ""}}})).await;
    sees(&ns, "by-label", &[]).await;
    set(&ns.config_maps(), "y", "3").await;
    set(&other.config_maps(), "x", "2").await;
    sees(&ns, "elsewhere", &["ConfigMap related-other/x 2"]).await;
    assert_eq!(calls(), [before[0], before[1] + 3, before[2] + 1, before[3]]);

    // Another selection is another matter, from the parent's edit on.
    let before = calls();
    edit(&reaches(&ns), "by-name", json!({"spec": {"relate": [mine(&["y", "z"], "")]}})).await;
    sees(&ns, "by-name", &["ConfigMap related-wakes/y 3"]).await;
    set(&ns.config_maps(), "x", "3").await;
    ns.create(config_map("z", "1")).await;
    sees(&ns, "by-name", &["ConfigMap related-wakes/y 3", "ConfigMap related-wakes/z 1"]).await;
    delete(&ns.config_maps(), "y", PropagationPolicy::Background).await;
    sees(&ns, "by-name", &["ConfigMap related-wakes/z 1"]).await;
    assert_eq!(calls(), [before[0] + 3, before[1], before[2], before[3]]);

    // Quiet is quiet.
    synced(&reaches(&ns), "by-name").await;
    let before = calls();
    ns.assert_quiet(Duration::from_secs(3)).await;
    assert_eq!(calls(), before);
}

#[tokio::test]
async fn what_may_not_be_watched_fails_those_who_select_it_until_it_may() {
    let cluster = shared();
    let ns = cluster.namespace("related-forbidden").await;
    ns.create(config_map("x", "1")).await;
    reach(&ns, "blind", json!({"relate": [selects("Pod", "related-forbidden", &[], "")]})).await;
    reach(&ns, "sighted", json!({"relate": [selects("ConfigMap", "related-forbidden", &["x"], "")]})).await;
    let message = refused(&reaches(&ns), "blind", "RelatedForbidden").await;
    for part in [
        "Pod (v1) in namespace related-forbidden",
        "pods is forbidden",
        "system:serviceaccount:pilothouse-system:reach",
    ] {
        assert!(message.contains(part), "{part:?} in {message}");
    }
    sees(&ns, "sighted", &["ConfigMap related-forbidden/x 1"]).await;
    assert_eq!(ns.calls("blind", "asked"), 0, "it is not asked with less than it selects");

    permit(cluster, "related-forbidden", "pods", &[]);
    synced(&reaches(&ns), "blind").await;
    sees(&ns, "blind", &[]).await;

    // What is no selection at all.
    for (name, relate, told) in [
        ("unknown", selects("Service", "related-forbidden", &[], ""), "selectors[0].kind is Service (v1)"),
        (
            "labels",
            selects("ConfigMap", "related-forbidden", &[], "a in b"),
            "selectors[0].labels is no label selector",
        ),
    ] {
        reach(&ns, name, json!({"relate": [relate]})).await;
        let message = refused(&reaches(&ns), name, "InvalidAnswer").await;
        assert!(message.contains(told), "{message}");
    }
    reach(&ns, "scoped", json!({"relate": [selects("Namespace", "related-forbidden", &[], "")]})).await;
    let message = refused(&reaches(&ns), "scoped", "RelatedUnavailable").await;
    assert!(message.contains("it has no namespaces"), "{message}");
}

#[tokio::test]
async fn secrets_are_seen_only_if_they_are_granted_and_never_those_of_the_reconciler() {
    let cluster = shared();
    let ns = cluster.namespace("related-secrets").await;
    for name in ["open", "closed", "own"] {
        ns.create(secret(name)).await;
    }
    // The service account itself may see all of them.
    permit(cluster, "related-secrets", "secrets", &[]);
    let of = |names: &[&str]| selects("Secret", "related-secrets", names, "");
    let get_secret = |kind: &str, name: &str| json!({"get": {"apiVersion": "v1", "kind": kind, "namespace": "related-secrets", "name": name}});
    let open = "Secret related-secrets/open b3Blbg==";

    reach(&ns, "all", json!({"relate": [selects("Secret", "related-secrets", &[], "all=yes")]})).await;
    sees(&ns, "all", &[open]).await;
    for name in ["closed", "own"] {
        reach(&ns, name, json!({"relate": [of(&["open", name])]})).await;
        let message = refused(&reaches(&ns), name, "RelatedNotGranted").await;
        assert!(message.contains(&format!("selectors[0] selects Secret related-secrets/{name}")), "{message}");
        assert_eq!(ns.calls(name, "asked"), 0);
    }
    let reads = json!([
        get_secret("Secret", "open"), get_secret("Secret", "late"), {"list": selects("Secret", "related-secrets", &[], "")},
        get_secret("Secret", "closed"), get_secret("Secret", "own"), get_secret("secret", "closed"), get_secret("SecretList", "closed"),
        {"list": selects("Secret", "related-wakes", &[], "")},
    ]);
    reach(&ns, "reads", json!({"kube": reads})).await;
    let read = synced(&reaches(&ns), "reads").await.data["status"]["kube"].clone();
    assert_eq!(read[0], json!({"found": [open]}));
    assert_eq!(read[1], json!({"found": []}), "granted, and not there");
    assert_eq!(read[2], json!({"found": [open]}));
    for at in 3..8 {
        assert!(read[at]["error"].to_string().contains("denied"), "{at}: {read}");
    }

    // One that is granted and comes later is seen when it comes.
    reach(&ns, "waits", json!({"relate": [of(&["late"])]})).await;
    sees(&ns, "waits", &[]).await;
    ns.create(secret("late")).await;
    sees(&ns, "waits", &["Secret related-secrets/late bGF0ZQ=="]).await;
    sees(&ns, "all", &["Secret related-secrets/late bGF0ZQ==", open]).await;

    // No other was ever asked for as the service account.
    let requests = audit::requests(cluster.control_plane.audit_log());
    let mut asked: Vec<_> = requests
        .iter()
        .filter(|it| it.resource == "secrets" && it.user == "system:serviceaccount:pilothouse-system:reach")
        .map(|it| it.name.as_str())
        .collect();
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked, ["late", "open"]);
}

#[tokio::test]
async fn reads_are_those_of_the_service_account() {
    let cluster = shared();
    let ns = cluster.namespace("related-reads").await;
    for (name, app) in [("b", "web"), ("a", "web"), ("c", "other")] {
        ns.create(labelled(name, "1", json!({"app": app}))).await;
    }
    let get_one = |api_version: &str, kind: &str, namespace: Option<&str>, name: &str| json!({"get": {"apiVersion": api_version, "kind": kind, "namespace": namespace, "name": name}});
    let here = Some("related-reads");
    let reads = json!([
        get_one("v1", "ConfigMap", here, "a"),
        get_one("v1", "ConfigMap", here, "missing"),
        {"list": selects("ConfigMap", "related-reads", &[], "app=web")},
        {"list": selects("ConfigMap", "related-reads", &["c", "a"], "")},
        get_one("v1", "Namespace", None, "related-reads"),
        get_one("v1", "Pod", here, "p"),
        get_one("t.example/v1", "Nothing", here, "n"),
        get_one("v1", "ConfigMap", None, "a"),
        get_one("v1", "ConfigMap", here, "../secrets/s"),
    ]);
    reach(&ns, "reads", json!({"kube": reads, "children": [config_map("child", "1")]})).await;
    let read = synced(&reaches(&ns), "reads").await.data["status"]["kube"].clone();
    let map = |name: &str| format!("ConfigMap related-reads/{name} 1");
    assert_eq!(read[0], json!({"found": [map("a")]}));
    assert_eq!(read[1], json!({"found": []}));
    assert_eq!(read[2], json!({"found": [map("a"), map("b")]}));
    assert_eq!(read[3], json!({"found": [map("a"), map("c")]}));
    assert_eq!(read[4], json!({"found": ["Namespace -/related-reads -"]}));
    for (at, told) in [
        (5, "denied: pods \\\"p\\\" is forbidden: User \\\"system:serviceaccount:pilothouse-system:reach\\\""),
        (6, "no such kind"),
        (7, "has namespaces; name one"),
        (8, "is no name of an object"),
    ] {
        assert!(read[at]["error"].to_string().contains(told), "{at}: {read}");
    }
    assert!(get(&ns.config_maps(), "child").await.is_some());

    // What may be read changes without another plugin.
    permit(cluster, "related-reads", "pods", &["p"]);
    edit(&reaches(&ns), "reads", json!({"metadata": {"annotations": {"again": ""}}})).await;
    until(&reaches(&ns), "reads", "it may read the Pod", |parent| {
        parent.data["status"]["kube"][5] == json!({"found": []})
    })
    .await;
}

#[tokio::test]
async fn cleanup_sees_related_objects_and_is_woken_by_them() {
    let cluster = shared();
    let ns = cluster.namespace("related-cleanup").await;
    reach(&ns, "w", json!({"relate": [selects("ConfigMap", "related-cleanup", &["done"], "")], "waitFor": "done"}))
        .await;
    synced(&reaches(&ns), "w").await;
    delete(&reaches(&ns), "w", PropagationPolicy::Background).await;
    until(&reaches(&ns), "w", "it waits", |parent| {
        condition(parent, "Ready").is_some_and(|ready| ready["reason"] == "Deleting")
    })
    .await;
    ns.create(config_map("done", "1")).await;
    gone(&reaches(&ns), "w").await;
}

#[tokio::test]
async fn relations_come_and_go_with_a_revision_a_restart_writes_nothing_and_a_tenant_sees_its_namespace() {
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    install(&cluster, json!({"kube": {"secrets": [{"namespace": "related-swap", "name": "s"}]}}));
    let policy = cluster.control_plane.data_dir().join("tenants.yaml");
    std::fs::write(&policy, "default: {grants: [http, kube, sql]}").expect("it can be written");
    let flag = format!("--tenant-policy={}", policy.display());
    let host = cluster.run_host_with(&[&flag], 1);
    let ns = cluster.namespace("related-swap").await;
    ns.create(config_map("x", "1")).await;
    let relate = json!([selects("ConfigMap", "related-swap", &["x"], "")]);
    let read = json!([{"get": {"apiVersion": "v1", "kind": "ConfigMap", "namespace": "related-swap", "name": "x"}}]);
    reach(&ns, "w", json!({"relate": relate, "kube": read, "copy": "child"})).await;
    sees(&ns, "w", &["ConfigMap related-swap/x 1"]).await;

    // Without relations it sees nothing, and is not woken.
    push(&cluster, "reach", &without_relations());
    sees(&ns, "w", &[]).await;
    let calls = ns.calls("w", "asked");
    set(&ns.config_maps(), "x", "2").await;
    ns.assert_quiet(Duration::from_secs(2)).await;
    assert_eq!(ns.calls("w", "asked"), calls);
    push(&cluster, "reach", &std::fs::read(component("reach")).expect("it was built"));
    sees(&ns, "w", &["ConfigMap related-swap/x 2"]).await;
    set(&ns.config_maps(), "x", "3").await;
    sees(&ns, "w", &["ConfigMap related-swap/x 3"]).await;
    synced(&reaches(&ns), "w").await;
    let metrics = host.metrics().await;
    for line in [
        r#"pilothouse_related_watches{reconciler="reach",kind="ConfigMap"} 1"#,
        r#"pilothouse_plugin_calls_total{reconciler="reach",function="relate",outcome="ok"}"#,
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }

    // A preview sees what is there, by both ways.
    host.terminate();
    let preview = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
        command.args(["preview", "reach"]).arg(component("reach"));
        let output = command.env("KUBECONFIG", cluster.control_plane.kubeconfig()).output().expect("it runs");
        (output.status.code(), String::from_utf8(output.stdout).expect("it is text"))
    };
    assert_eq!(preview().0, Some(0), "{}", preview().1);
    set(&ns.config_maps(), "x", "4").await;
    let (code, text) = preview();
    let (kube, seen) =
        (r#"kube\":[{\"found\":[\"ConfigMap related-swap/x 4"#, r#"seen\":[\"ConfigMap related-swap/x 4"#);
    assert!(code == Some(2) && text.contains(kube) && text.contains(seen), "{text}");
    set(&ns.config_maps(), "x", "3").await;

    let writes = ns.writes().len();
    let host = cluster.run_host_with(&[&flag], 1);
    let asked = || {
        let log = host.log_text();
        log.lines().filter(|line| line.contains("\"asked\"") && line.contains("related-swap/w\"")).count()
    };
    eventually("the plugin is asked again", async || (asked() > 0).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(asked(), 1, "once is enough: {}", host.log_text());
    assert_eq!(ns.writes().len(), writes, "{:#?}", ns.writes().split_off(writes));

    // What is no longer granted is no longer seen, by either way. From here on watches are renewed each quarter of a minute.
    host.terminate();
    let host = cluster.run_host_with(&[&flag, "--watch-idle-timeout=20s"], 1);
    ns.create(secret("s")).await;
    permit(&cluster, "related-swap", "secrets", &["s"]);
    let secrets = selects("Secret", "related-swap", &["s"], "");
    reach(&ns, "s", json!({"relate": [secrets], "copy": "seen"})).await;
    reach(&ns, "reads", json!({"kube": [{"list": secrets}]})).await;
    sees(&ns, "s", &["Secret related-swap/s cw=="]).await;
    let reads = async |kind: &str| {
        until(&reaches(&ns), "reads", kind, |parent| parent.data["status"]["kube"][0][kind] != Value::Null).await;
    };
    reads("found").await;
    // Nor what the account may not see any more: a read is refused at once, and a watch when it is renewed.
    cluster.kubectl(&["delete", "rolebinding", "reach-secrets", "--namespace=related-swap"]);
    edit(&reaches(&ns), "reads", json!({"metadata": {"annotations": {"again": "1"}}})).await;
    reads("error").await;
    let message = refused(&reaches(&ns), "s", "RelatedForbidden").await;
    assert!(message.contains("Secret (v1) s in namespace related-swap"), "{message}");
    permit(&cluster, "related-swap", "secrets", &["s"]);
    synced(&reaches(&ns), "s").await;
    edit(&reaches(&ns), "reads", json!({"metadata": {"annotations": {"again": "2"}}})).await;
    reads("found").await;
    let none = json!({"spec": {"grants": {"kube": {"secrets": null}}}}).to_string();
    cluster.kubectl(&["patch", "crec", "reach", "--type=merge", "-p", &none]);
    refused(&reaches(&ns), "s", "RelatedNotGranted").await;
    reads("error").await;
    assert!(get(&ns.config_maps(), "seen").await.is_some(), "what was made of it stays");
    for name in ["s", "reads"] {
        delete(&reaches(&ns), name, PropagationPolicy::Background).await;
    }

    // A Reconciler is told what is elsewhere by nobody.
    delete(&reaches(&ns), "w", PropagationPolicy::Background).await;
    gone(&reaches(&ns), "w").await;
    cluster.kubectl(&["delete", "crec", "reach"]);
    let tenant = cluster.namespace("related-tenant").await;
    let file = component("reach").display().to_string();
    cluster.apply(&pilothouse(&["manifests", &file, "--namespaced", "--namespace=related-tenant", "--skip-crds"]));
    let grants = granted(json!({"kube": {}}), &json!({"name": "unused"}));
    let grants = json!({"spec": {"grants": grants}}).to_string();
    cluster.kubectl(&["patch", "rec", "reach", "--namespace=related-tenant", "--type=merge", "-p", &grants]);
    told(&tenant.api("pilothouse.dev/v1alpha1", "Reconciler"), "reach", "Ready", "True", "").await;
    tenant.create(config_map("mine", "1")).await;
    // Without a namespace its own is meant.
    let anywhere = json!({"apiVersion": "v1", "kind": "ConfigMap", "names": ["mine", "x"]});
    let get_one = |namespace: Value, name: &str| json!({"get": {"apiVersion": "v1", "kind": "ConfigMap", "namespace": namespace, "name": name}});
    let node = json!({"get": {"apiVersion": "v1", "kind": "Namespace", "name": "related-tenant"}});
    let reads = json!([get_one(Value::Null, "mine"), get_one(json!("related-swap"), "x"), node, {"list": anywhere}]);
    reach(&tenant, "w", json!({"relate": [anywhere], "kube": reads})).await;
    let mine = "ConfigMap related-tenant/mine 1";
    sees(&tenant, "w", &[mine]).await;
    let read = synced(&reaches(&tenant), "w").await.data["status"]["kube"].clone();
    assert_eq!((&read[0], &read[3]), (&json!({"found": [mine]}), &json!({"found": [mine]})));
    for at in [1, 2] {
        assert!(read[at]["error"].to_string().contains("denied"), "{at}: {read}");
    }
    reach(&tenant, "elsewhere", json!({"relate": [selects("ConfigMap", "related-swap", &["x"], "")]})).await;
    let message = refused(&reaches(&tenant), "elsewhere", "InvalidAnswer").await;
    assert!(message.contains("a Reconciler sees its own namespace only"), "{message}");
    host.terminate();
}
