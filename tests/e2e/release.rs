//! A host that is gone for good, and what it has left behind (`C16`): `pilothouse release`.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use kube::api::{ListParams, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::{Cluster, config_map, delete, get, gone, our_finalizers, synced};

/// What the command has done: its exit code, what it prints, and what it says.
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn release(cluster: &Cluster, arguments: &[&str], answer: &str) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
    command.arg("release").args(arguments).env("KUBECONFIG", cluster.control_plane.kubeconfig());
    let mut command =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // It may end without reading.
    drop(command.stdin.take().expect("it is piped").write_all(answer.as_bytes()));
    let output = command.wait_with_output().expect("it ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it is text");
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c16_what_a_host_has_left_behind_is_released_by_hand() {
    let cluster = Cluster::start();
    // Whoever looks waits as long as the Lease says, so it is short.
    let lease = [
        "--leader-elect",
        "--leader-election-lease-duration=6s",
        "--leader-election-renew-deadline=4s",
        "--leader-election-retry-period=1s",
    ];
    let host = cluster.run_host_with(&lease, 2);
    let (ns, far) = (cluster.namespace("released").await, cluster.namespace("released-far").await);
    let mut elsewhere = config_map("far", "1");
    elsewhere["metadata"]["namespace"] = json!("released-far");
    ns.widget("live", json!({"reply": {"children": [config_map("live", "1"), elsewhere]}})).await;
    ns.widget("stuck", json!({"reply": {}, "cleanup": {"failure": {"terminal": "the bucket is gone"}}})).await;
    let held = json!({"apiVersion": "t.example/v1", "kind": "Widget", "spec": {"reply": {}},
        "metadata": {"name": "held", "finalizers": ["t.example/hold"]}});
    ns.create(held).await;
    for name in ["live", "stuck", "held"] {
        synced(&ns.widgets(), name).await;
    }
    let ours = our_finalizers(&get(&ns.widgets(), "live").await.expect("it is there"));
    delete(&ns.widgets(), "stuck", PropagationPolicy::Background).await;

    let refused = release(&cluster, &["widgets", "--yes"], "");
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("a host is at work") && refused.stderr.contains("--force"), "{}", refused.stderr);
    host.kill();
    // Who does not say yes has said no.
    let refused = release(&cluster, &["widgets"], "\n");
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("nothing was released") && refused.stderr.contains("[y/N]"), "{}", refused.stderr);
    let lines: Vec<Vec<&str>> = refused.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines[1..],
        [
            ["released/held", "live", "0", &ours[0]],
            ["released/live", "live", "1", &ours[0]],
            ["released/stuck", "deleting", "0", &ours[0]],
        ],
        "{}",
        refused.stdout
    );
    // That of another reconciler is on none of them.
    let other = release(&cluster, &["widget", "--reconciler", "other"], "");
    assert_eq!(
        (other.code, other.stdout.as_str()),
        (Some(0), "no finalizer of ours is on any of widgets.t.example\n"),
        "{}",
        other.stderr
    );

    let ran = release(&cluster, &["Widget.t.example", "--reconciler", "mirror", "-o", "json"], "y\n");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let report: Value = serde_json::from_str(&ran.stdout).expect("it is JSON");
    let live =
        json!({"namespace": "released", "name": "live", "deleting": false, "finalizers": ours, "remoteChildren": 1});
    assert_eq!((&report["resource"], &report["objects"][1]), (&json!("widgets.t.example"), &live));
    let user = report["user"].as_str().expect("it says who").to_owned();
    gone(&ns.widgets(), "stuck").await;
    for (name, left) in [("live", None), ("held", Some(vec!["t.example/hold".to_owned()]))] {
        let parent = get(&ns.widgets(), name).await.expect("it stays");
        assert_eq!(parent.metadata.finalizers.filter(|list| !list.is_empty()), left, "{name}");
    }
    assert!(get(&ns.config_maps(), "live").await.is_some() && get(&far.config_maps(), "far").await.is_some());
    let events = ns.api("events.k8s.io/v1", "Event").list(&ListParams::default()).await.expect("they can be listed");
    let notes: Vec<_> = events
        .items
        .iter()
        .filter(|event| event.data["reason"] == "Released")
        .map(|event| &event.data["note"])
        .collect();
    assert_eq!(notes.len(), 3, "{notes:?}");
    let expected = format!("{user} took {} off with `pilothouse release`, without cleanup", ours[0]);
    assert!(notes.iter().all(|note| **note == *expected), "{notes:?}");

    // And the reconcilers themselves.
    let reconcilers = ns.reconcilers();
    delete(&reconcilers, "mirror", PropagationPolicy::Background).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(get(&reconcilers, "mirror").await.is_some(), "it waits for a host");
    let ran = release(&cluster, &["clusterreconcilers", "--yes", "--force"], "");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("mirror released\n") && ran.stdout.contains("myapp released\n"), "{}", ran.stdout);
    gone(&reconcilers, "mirror").await;

    let unknown = release(&cluster, &["gizmos", "--yes"], "");
    assert!(unknown.code == Some(1) && unknown.stderr.contains("serves no kind gizmos"), "{}", unknown.stderr);
}
