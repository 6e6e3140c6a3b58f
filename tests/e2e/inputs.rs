//! Manifests as people have them, with all that makes an apply hard (`tests/e2e/inputs`): each is applied once, and then there is nothing
//! to do, also for a host that starts.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::{
    audit::{self, Request},
    cluster::{Cluster, condition, eventually, get, synced, until},
};

const INPUTS: [(&str, &str); 8] = [
    ("activator", include_str!("inputs/activator.yaml")),
    ("addresses", include_str!("inputs/addresses.yaml")),
    ("certificate", include_str!("inputs/certificate.yaml")),
    ("ensemble", include_str!("inputs/ensemble.yaml")),
    ("job", include_str!("inputs/job.yaml")),
    ("network-policy", include_str!("inputs/network-policy.yaml")),
    ("rights", include_str!("inputs/rights.yaml")),
    ("rollout-crd", include_str!("inputs/rollout-crd.yaml")),
];

/// The documents of a file.
fn documents(name: &str, yaml: &str) -> Vec<Value> {
    let mut bytes = yaml.as_bytes();
    let documents =
        serde_saphyr::read_with_options::<_, Value>(&mut bytes, serde_saphyr::options! { with_snippet: false });
    documents.map(|document| document.expect(name)).collect()
}

/// A definition that no annotation could hold: client-side apply fails on it.
fn large_definition() -> Value {
    let text = "Says in many words what may be said in few, as the definitions of well-known operators do. ".repeat(2);
    let field = |number: usize| {
        let field = match number % 4 {
            0 => json!({"type": "string", "description": text}),
            1 => {
                json!({"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}], "description": text})
            }
            2 => {
                json!({"type": "array", "items": {"type": "object", "x-kubernetes-map-type": "atomic", "properties": {"name": {"type": "string", "default": ""}}}})
            }
            _ => json!({"type": "object", "additionalProperties": {"type": "string"}, "description": text}),
        };
        (format!("field{number}"), field)
    };
    let fields: Map<String, Value> = (0..1800).map(field).collect();
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "monitors.inputs.example"},
        "spec": {"group": "inputs.example", "scope": "Namespaced",
            "names": {"kind": "Monitor", "listKind": "MonitorList", "plural": "monitors", "singular": "monitor"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", "properties": fields}}}}}]}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inputs_are_applied_once_and_quiet_from_then_on_also_for_a_host_that_starts() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("inputs").await;
    let large = large_definition();
    assert!(large.to_string().len() > 262_144, "{}", large.to_string().len());
    let mut inputs: Vec<_> = INPUTS.iter().map(|(name, yaml)| (*name, documents(name, yaml))).collect();
    inputs.push(("large", vec![large]));
    for (name, children) in &inputs {
        // Asked again all the time.
        let reply = json!({"children": children, "log": ["called"], "next": {"afterMs": 1000}});
        ns.widget(name, json!({"reply": reply})).await;
    }
    for (name, _) in &inputs {
        synced(&ns.widgets(), name).await;
    }
    // What others have to do with them is done.
    until(&ns.deployments(), "activator", "available", |it| condition(it, "Available").is_some()).await;
    until(&ns.api("batch/v1", "Job"), "migrate", "complete", |it| condition(it, "Complete").is_some()).await;
    let definitions = ns.cluster_api("apiextensions.k8s.io/v1", "CustomResourceDefinition");
    for name in ["rollouts.inputs.example", "certs.inputs.example", "monitors.inputs.example"] {
        until(&definitions, name, "established", |it| condition(it, "Established").is_some()).await;
    }
    // And their parents have told so, which may come a moment later.
    eventually("the parents have told all", async || {
        let before = ns.writes().len();
        tokio::time::sleep(Duration::from_secs(3)).await;
        (ns.writes().len() == before).then_some(())
    })
    .await;
    let known =
        |name: &str| inputs.iter().any(|(_, children)| children.iter().any(|child| child["metadata"]["name"] == name));
    // Those of cluster scope are in no namespace. A binding is refused until its role is there.
    let of_children = || -> Vec<Request> {
        let mut writes = audit::requests(cluster.control_plane.audit_log());
        writes.retain(|write| {
            write.is_write()
                && write.code < 400
                && write.resource != "events"
                && write.resource != "widgets"
                && known(&write.name)
        });
        writes
    };
    let children: usize = inputs.iter().map(|(_, children)| children.len()).sum();
    let told = |writes: &[Request]| {
        writes.iter().map(|write| format!("{} {} {}", write.what(), write.name, write.code)).collect::<Vec<_>>()
    };
    assert_eq!(of_children().len(), children, "each is applied once: {:#?}", told(&of_children()));
    let before: Vec<_> = inputs.iter().map(|(name, _)| ns.calls(name, "called")).collect();
    ns.assert_quiet(Duration::from_secs(6)).await;
    for ((name, _), before) in inputs.iter().zip(before) {
        assert!(ns.calls(name, "called") > before + 2, "{name} was asked again and again");
    }
    assert_eq!(of_children().len(), children, "{:#?}", told(&of_children()));
    let differently: Vec<_> = ns
        .requests()
        .into_iter()
        .filter(|event| event.body["reason"] == "AppliedDifferently")
        .map(|event| event.body["note"].clone())
        .collect();
    assert_eq!(differently, Vec::<Value>::new(), "all of it is kept as it was sent");
    host.terminate();

    let (writes, parents) = (of_children().len(), ns.writes().len());
    let host = cluster.run_host();
    for (name, _) in &inputs {
        let calls = || {
            host.log_text()
                .lines()
                .filter(|line| line.contains("\"called\"") && line.contains(&format!("inputs/{name}\"")))
                .count()
        };
        eventually(&format!("{name} was asked"), async || (calls() > 1).then_some(())).await;
    }
    ns.assert_quiet(Duration::from_secs(3)).await;
    assert_eq!(told(&of_children()[writes..]), Vec::<String>::new());
    assert_eq!(told(&ns.writes()[parents..]), Vec::<String>::new());
    assert!(get(&definitions, "monitors.inputs.example").await.is_some());
    host.terminate();
}
