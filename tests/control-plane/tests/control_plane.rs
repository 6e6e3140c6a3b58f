//! The control plane itself: what the other tests take for granted. Needs the servers: `make control-plane`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use control_plane::ControlPlane;
use serde_json::{Value, json};

/// One for the tests that do not disturb each other. It ends with the process, as its supervisor's stdin does.
static SHARED: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start().unwrap());

fn kubectl(control_plane: &ControlPlane, arguments: &[&str]) -> Output {
    control_plane.kubectl().args(arguments).output().unwrap()
}

fn ok(control_plane: &ControlPlane, arguments: &[&str]) -> String {
    let output = kubectl(control_plane, arguments);
    assert!(output.status.success(), "kubectl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn create(control_plane: &ControlPlane, object: &Value) {
    let mut process = control_plane.kubectl().args(["create", "-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(object.to_string().as_bytes()).unwrap();
    assert!(process.wait().unwrap().success());
}

#[track_caller]
fn eventually(what: &str, is_true: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Command lines of all processes that work in a data folder.
fn processes(data: &Path) -> Vec<String> {
    let data = data.to_str().unwrap();
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| fs::read(entry.ok()?.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(data))
        .collect()
}

#[test]
fn a_deployment_becomes_ready_without_kubelets() {
    ok(&SHARED, &["create", "namespace", "ready"]);
    ok(&SHARED, &["-n", "ready", "create", "deployment", "web", "--image=example.test/web", "--replicas=3"]);
    ok(&SHARED, &["-n", "ready", "rollout", "status", "deployment/web", "--timeout=30s"]);
    let ready = ok(&SHARED, &["-n", "ready", "get", "deployment", "web", "-o", "jsonpath={.status.readyReplicas}"]);
    assert_eq!(ready, "3");
}

#[test]
fn dependents_go_with_their_owner() {
    ok(&SHARED, &["create", "configmap", "owner"]);
    let uid = ok(&SHARED, &["get", "configmap", "owner", "-o", "jsonpath={.metadata.uid}"]);
    let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid});
    let dependent = json!({"name": "dependent", "ownerReferences": [owner]});
    create(&SHARED, &json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": dependent}));
    ok(&SHARED, &["delete", "configmap", "owner"]);
    eventually("the dependent is gone", || !kubectl(&SHARED, &["get", "configmap", "dependent"]).status.success());
}

#[test]
fn a_namespace_can_be_deleted() {
    ok(&SHARED, &["create", "namespace", "passing"]);
    ok(&SHARED, &["-n", "passing", "create", "configmap", "content"]);
    ok(&SHARED, &["delete", "namespace", "passing", "--timeout=30s"]);
}

#[test]
fn a_service_account_may_do_only_what_it_was_granted() {
    ok(&SHARED, &["create", "namespace", "limited"]);
    ok(&SHARED, &["-n", "limited", "create", "serviceaccount", "reader"]);
    ok(&SHARED, &["-n", "limited", "create", "role", "reader", "--verb=list", "--resource=configmaps"]);
    ok(
        &SHARED,
        &["-n", "limited", "create", "rolebinding", "reader", "--role=reader", "--serviceaccount=limited:reader"],
    );
    let token = ok(&SHARED, &["-n", "limited", "create", "token", "reader"]);

    let as_reader = |path: &str| {
        SHARED
            .kubectl()
            // The administrator's token would win over one on the command line.
            .env("KUBECONFIG", "/dev/null")
            .args(["--server", SHARED.server(), "--token", &token])
            .arg("--certificate-authority")
            .arg(SHARED.certificate_authority())
            .args(["get", "--raw", path])
            .output()
            .unwrap()
    };
    eventually("the role is known", || as_reader("/api/v1/namespaces/limited/configmaps").status.success());
    let refused = as_reader("/api/v1/namespaces/limited/secrets");
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("Forbidden"), "{message}");

    let user = "system:serviceaccount:limited:reader";
    assert!(
        events(&SHARED).iter().any(|event| event["user"]["username"] == user && event["responseStatus"]["code"] == 403)
    );
}

#[test]
fn writes_are_in_the_audit_log_with_what_was_sent() {
    ok(&SHARED, &["create", "configmap", "audited", "--from-literal=colour=green"]);
    let event = events(&SHARED)
        .into_iter()
        .find(|event| event["verb"] == "create" && event["requestObject"]["metadata"]["name"] == "audited")
        .unwrap();
    assert_eq!(event["objectRef"]["resource"], "configmaps");
    assert_eq!(event["requestObject"]["data"]["colour"], "green");
    assert_eq!(event["responseStatus"]["code"], 201);
    assert!(event["userAgent"].as_str().unwrap().starts_with("kubectl/v1.36.3"));
    assert_eq!(event["user"]["username"], "admin");
}

fn events(control_plane: &ControlPlane) -> Vec<Value> {
    let log = fs::read_to_string(control_plane.audit_log()).unwrap();
    // The server may be in the middle of the last line.
    log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn another_one_is_apart_survives_its_api_server_and_leaves_nothing() {
    let own = ControlPlane::start().unwrap();
    assert_ne!(own.server(), SHARED.server());
    ok(&own, &["create", "configmap", "only-here"]);
    assert!(!kubectl(&SHARED, &["get", "configmap", "only-here"]).status.success());

    // A client that keeps asking sees the API server go and come back with its data.
    let done = AtomicBool::new(false);
    let answers: Vec<bool> = thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut answers = Vec::new();
            while !done.load(Ordering::Relaxed) {
                answers.push(
                    kubectl(&own, &["get", "--raw", "/api/v1/namespaces/default/configmaps/only-here"])
                        .status
                        .success(),
                );
                thread::sleep(Duration::from_millis(50));
            }
            answers
        });
        own.stop_api_server().unwrap();
        assert!(!kubectl(&own, &["get", "--raw", "/readyz"]).status.success());
        own.start_api_server().unwrap();
        ok(&own, &["get", "configmap", "only-here"]);
        thread::sleep(Duration::from_millis(500));
        done.store(true, Ordering::Relaxed);
        client.join().unwrap()
    });
    assert!(answers.contains(&false) && answers.last() == Some(&true), "{answers:?}");

    own.stop_controller_manager().unwrap();
    ok(&own, &["create", "deployment", "late", "--image=example.test/late"]);
    own.start_controller_manager().unwrap();
    ok(&own, &["rollout", "status", "deployment/late", "--timeout=30s"]);

    let data = PathBuf::from(own.data_dir());
    assert_eq!(processes(&data).len(), 5, "{:?}", processes(&data));
    drop(own);
    assert!(!data.exists());
    assert!(processes(&data).is_empty(), "{:?}", processes(&data));
}
