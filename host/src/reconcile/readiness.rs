//! Whether a child does what it is there for: by the conventions of its kind, as users of kubectl (`rollout status`, `wait`) and of Helm
//! (`--wait`) know them, unless the plugin says so itself.

use serde::Deserialize;

use crate::{
    object::Object,
    state::{DesiredChild, Readiness},
};

/// Whether this child is ready, as it is now.
pub(super) fn is_ready(child: &DesiredChild, live: &Object) -> bool {
    match child.options.readiness {
        Readiness::Auto => is_ready_by_itself(live),
        Readiness::Ready => true,
        Readiness::NotReady => false,
    }
}

/// What the conventions look at.
#[derive(Deserialize)]
struct Probe {
    kind: Option<String>,
    spec: Option<Spec>,
    status: Option<Status>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    replicas: Option<i64>,
    #[serde(rename = "type")]
    kind: Option<String>,
    update_strategy: Option<Strategy>,
}

#[derive(Deserialize)]
struct Strategy {
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    observed_generation: Option<i64>,
    conditions: Vec<Condition>,
    phase: Option<String>,
    replicas: i64,
    updated_replicas: i64,
    available_replicas: i64,
    ready_replicas: i64,
    desired_number_scheduled: i64,
    updated_number_scheduled: i64,
    number_available: i64,
    load_balancer: LoadBalancer,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct LoadBalancer {
    ingress: Vec<serde::de::IgnoredAny>,
}

/// By the conventions of its kind. One that says nothing of itself is ready when it exists.
pub(super) fn is_ready_by_itself(child: &Object) -> bool {
    // Anything else under these names is not the convention, so it says nothing.
    let Ok(probe) = serde_json::from_str::<Probe>(child.json()) else { return true };
    let spec = probe.spec.unwrap_or_default();
    let status = probe.status.unwrap_or_default();
    if status.observed_generation.is_some_and(|observed| observed < child.generation()) {
        return false;
    }
    let replicas = spec.replicas.unwrap_or(1);
    let condition = |kind: &str| Some(status.conditions.iter().find(|it| it.kind == kind)?.status == "True");
    let on_delete = spec.update_strategy.is_some_and(|strategy| strategy.kind.as_deref() == Some("OnDelete"));
    match probe.kind.as_deref() {
        // `kubectl rollout status`: all of them new, none of the old ones left, all available.
        Some("Deployment") => {
            status.observed_generation.is_some()
                && status.updated_replicas >= replicas
                && status.replicas <= status.updated_replicas
                && status.available_replicas >= replicas
        }
        Some("StatefulSet") => status.ready_replicas >= replicas && (on_delete || status.updated_replicas >= replicas),
        Some("DaemonSet") => {
            status.observed_generation.is_some()
                && status.number_available >= status.desired_number_scheduled
                && (on_delete || status.updated_number_scheduled >= status.desired_number_scheduled)
        }
        Some("ReplicaSet" | "ReplicationController") => status.ready_replicas >= replicas,
        Some("Pod") => condition("Ready") == Some(true) || status.phase.as_deref() == Some("Succeeded"),
        Some("Job") => condition("Complete") == Some(true),
        Some("PersistentVolumeClaim") => status.phase.as_deref() == Some("Bound"),
        Some("Namespace") => status.phase.as_deref() == Some("Active"),
        Some("CustomResourceDefinition") => condition("Established") == Some(true),
        Some("Service") => spec.kind.as_deref() != Some("LoadBalancer") || !status.load_balancer.ingress.is_empty(),
        _ => condition("Ready").or_else(|| condition("Available")).unwrap_or(true),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn ready(kind: &str, spec: Value, status: Value) -> bool {
        let metadata = json!({"name": "x", "uid": "u", "generation": 2});
        let object = json!({"kind": kind, "metadata": metadata, "spec": spec, "status": status});
        is_ready_by_itself(&Object::from_json(&object.to_string()).unwrap())
    }

    fn condition(kind: &str, status: &str) -> Value {
        json!({"observedGeneration": 2, "conditions": [{"type": kind, "status": status}]})
    }

    #[test]
    fn workloads_are_ready_when_their_rollout_is_over() {
        let two = || json!({"replicas": 2});
        let rolled = |updated: i64, replicas: i64, available: i64| {
            json!({"observedGeneration": 2, "updatedReplicas": updated, "replicas": replicas,
                "availableReplicas": available, "readyReplicas": available})
        };
        for kind in ["Deployment", "StatefulSet"] {
            assert!(ready(kind, two(), rolled(2, 2, 2)), "{kind}");
            assert!(!ready(kind, two(), rolled(1, 2, 2)), "{kind}: one is old");
            assert!(!ready(kind, two(), rolled(2, 2, 1)), "{kind}: one is not available");
            assert!(!ready(kind, json!({}), Value::Null), "{kind}");
            assert!(
                !ready(
                    kind,
                    two(),
                    json!({"observedGeneration": 1, "updatedReplicas": 2, "readyReplicas": 2,
                "availableReplicas": 2, "replicas": 2})
                ),
                "{kind}: that is about an older spec"
            );
        }
        assert!(!ready("Deployment", two(), rolled(2, 3, 2)), "an old one is left");
        assert!(ready("Deployment", json!({"replicas": 0}), json!({"observedGeneration": 2})));
        let by_hand = json!({"replicas": 2, "updateStrategy": {"type": "OnDelete"}});
        assert!(ready("StatefulSet", by_hand, rolled(0, 2, 2)), "who rolls by hand is not waited for");
        let daemons = |updated: i64, available: i64| json!({"observedGeneration": 2, "desiredNumberScheduled": 3, "updatedNumberScheduled": updated, "numberAvailable": available});
        assert!(ready("DaemonSet", json!({}), daemons(3, 3)));
        assert!(!ready("DaemonSet", json!({}), daemons(2, 3)) && !ready("DaemonSet", json!({}), daemons(3, 2)));
        assert!(ready("ReplicaSet", two(), json!({"readyReplicas": 2})));
        assert!(!ready("ReplicaSet", two(), json!({"readyReplicas": 1})));
    }

    #[test]
    fn others_by_what_their_kind_says_of_itself() {
        assert!(ready("Pod", json!({}), condition("Ready", "True")));
        assert!(ready("Pod", json!({}), json!({"phase": "Succeeded", "conditions": []})));
        assert!(!ready("Pod", json!({}), json!({"phase": "Running"})));
        assert!(ready("Job", json!({}), condition("Complete", "True")));
        assert!(
            !ready("Job", json!({}), condition("Failed", "True")) && !ready("Job", json!({}), json!({"active": 1}))
        );
        assert!(ready("PersistentVolumeClaim", json!({}), json!({"phase": "Bound"})));
        assert!(!ready("PersistentVolumeClaim", json!({}), json!({"phase": "Pending"})));
        assert!(ready("CustomResourceDefinition", json!({}), condition("Established", "True")));
        assert!(!ready("CustomResourceDefinition", json!({}), Value::Null));
        assert!(ready("Service", json!({"type": "ClusterIP"}), json!({"loadBalancer": {}})));
        assert!(!ready("Service", json!({"type": "LoadBalancer"}), json!({"loadBalancer": {}})));
        assert!(ready(
            "Service",
            json!({"type": "LoadBalancer"}),
            json!({"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}]}})
        ));
    }

    #[test]
    fn a_kind_that_nobody_knows_by_its_conditions_or_at_once() {
        assert!(ready("Thing", json!({}), condition("Ready", "True")));
        assert!(!ready("Thing", json!({}), condition("Ready", "False")));
        assert!(!ready("Thing", json!({}), condition("Available", "Unknown")));
        assert!(!ready("Thing", json!({}), json!({"observedGeneration": 1})));
        assert!(ready("Thing", json!({}), condition("Other", "False")));
        assert!(ready("ConfigMap", json!({}), Value::Null));
        assert!(ready("Odd", json!("text"), json!("text")), "that is no convention");
    }
}
