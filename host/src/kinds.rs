//! How an API server serves a kind, as far as that can be told without one: from the CustomResourceDefinitions of the plugin, and
//! for the kinds of Kubernetes itself from two lists. For the commands that work without a cluster; the host asks its API server.

use kube::discovery::ApiResource;
use serde_json::Value;

use crate::{object::Kind, plugin::describe::KindName};

/// The kinds of Kubernetes 1.36 without a namespace, as `Kind.group`.
const CLUSTER_SCOPED: [&str; 36] = [
    "APIService.apiregistration.k8s.io",
    "CSIDriver.storage.k8s.io",
    "CSINode.storage.k8s.io",
    "CertificateSigningRequest.certificates.k8s.io",
    "ClusterRole.rbac.authorization.k8s.io",
    "ClusterRoleBinding.rbac.authorization.k8s.io",
    "ClusterTrustBundle.certificates.k8s.io",
    "ComponentStatus",
    "CustomResourceDefinition.apiextensions.k8s.io",
    "DeviceClass.resource.k8s.io",
    "DeviceTaintRule.resource.k8s.io",
    "FlowSchema.flowcontrol.apiserver.k8s.io",
    "IPAddress.networking.k8s.io",
    "IngressClass.networking.k8s.io",
    "MutatingAdmissionPolicy.admissionregistration.k8s.io",
    "MutatingAdmissionPolicyBinding.admissionregistration.k8s.io",
    "MutatingWebhookConfiguration.admissionregistration.k8s.io",
    "Namespace",
    "Node",
    "PersistentVolume",
    "PriorityClass.scheduling.k8s.io",
    "PriorityLevelConfiguration.flowcontrol.apiserver.k8s.io",
    "ResourceSlice.resource.k8s.io",
    "RuntimeClass.node.k8s.io",
    "SelfSubjectAccessReview.authorization.k8s.io",
    "SelfSubjectReview.authentication.k8s.io",
    "SelfSubjectRulesReview.authorization.k8s.io",
    "ServiceCIDR.networking.k8s.io",
    "StorageClass.storage.k8s.io",
    "SubjectAccessReview.authorization.k8s.io",
    "TokenReview.authentication.k8s.io",
    "ValidatingAdmissionPolicy.admissionregistration.k8s.io",
    "ValidatingAdmissionPolicyBinding.admissionregistration.k8s.io",
    "ValidatingWebhookConfiguration.admissionregistration.k8s.io",
    "VolumeAttachment.storage.k8s.io",
    "VolumeAttributesClass.storage.k8s.io",
];

/// Those whose status is a subresource of its own, likewise.
const WITH_STATUS: [&str; 26] = [
    "APIService.apiregistration.k8s.io",
    "CertificateSigningRequest.certificates.k8s.io",
    "CronJob.batch",
    "CustomResourceDefinition.apiextensions.k8s.io",
    "DaemonSet.apps",
    "Deployment.apps",
    "FlowSchema.flowcontrol.apiserver.k8s.io",
    "HorizontalPodAutoscaler.autoscaling",
    "Ingress.networking.k8s.io",
    "Job.batch",
    "Namespace",
    "Node",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "Pod",
    "PodDisruptionBudget.policy",
    "PriorityLevelConfiguration.flowcontrol.apiserver.k8s.io",
    "ReplicaSet.apps",
    "ReplicationController",
    "ResourceClaim.resource.k8s.io",
    "ResourceQuota",
    "Service",
    "ServiceCIDR.networking.k8s.io",
    "StatefulSet.apps",
    "ValidatingAdmissionPolicy.admissionregistration.k8s.io",
    "VolumeAttachment.storage.k8s.io",
];

/// How the kind is served. None: it comes from a CustomResourceDefinition that is not among `crds`.
pub fn served(name: &KindName, crds: &[Value]) -> Option<Kind> {
    let kind = assumed(name);
    let spec = crds.iter().map(|crd| &crd["spec"]);
    let spec = spec
        .into_iter()
        .find(|spec| spec["group"] == kind.api.group.as_str() && spec["names"]["kind"] == kind.api.kind.as_str());
    if let Some(spec) = spec {
        return Some(defined(kind, spec));
    }
    if !kind.is_built_in() {
        return None;
    }
    let (namespaced, has_status) =
        (!CLUSTER_SCOPED.contains(&&*kind.group_kind()), WITH_STATUS.contains(&&*kind.group_kind()));
    Some(Kind { namespaced, has_status, ..kind })
}

/// What most kinds are like: with namespaces and a status, and a plural by the rule that those of Kubernetes follow.
pub fn assumed(name: &KindName) -> Kind {
    Kind { api: ApiResource::from_gvk(&name.gvk()), namespaced: true, has_status: true }
}

/// As the `spec` of its definition says.
fn defined(mut kind: Kind, spec: &Value) -> Kind {
    if let Some(plural) = spec["names"]["plural"].as_str() {
        plural.clone_into(&mut kind.api.plural);
    }
    let versions = spec["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let version = versions.iter().find(|version| version["name"] == kind.api.version.as_str());
    kind.has_status = version.is_some_and(|version| version["subresources"]["status"].is_object());
    kind.namespaced = spec["scope"] != "Cluster";
    kind
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn name(api_version: &str, kind: &str) -> KindName {
        KindName { api_version: api_version.to_owned(), kind: kind.to_owned() }
    }

    fn how(api_version: &str, kind: &str, crds: &[Value]) -> Option<(String, bool, bool)> {
        served(&name(api_version, kind), crds).map(|kind| (kind.api.plural, kind.namespaced, kind.has_status))
    }

    #[test]
    fn the_kinds_of_kubernetes_are_known() {
        assert_eq!(how("v1", "ConfigMap", &[]), Some(("configmaps".to_owned(), true, false)));
        assert_eq!(how("apps/v1", "Deployment", &[]), Some(("deployments".to_owned(), true, true)));
        let role = how("rbac.authorization.k8s.io/v1", "ClusterRole", &[]);
        assert_eq!(role, Some(("clusterroles".to_owned(), false, false)));
    }

    #[test]
    fn other_kinds_are_as_their_definition_says() {
        let crd = json!({"spec": {"group": "t.example", "scope": "Cluster", "names": {"kind": "Box", "plural": "boxen"},
            "versions": [{"name": "v1", "subresources": {"status": {}}}, {"name": "v2"}]}});
        assert_eq!(how("t.example/v1", "Box", std::slice::from_ref(&crd)), Some(("boxen".to_owned(), false, true)));
        assert_eq!(how("t.example/v2", "Box", std::slice::from_ref(&crd)), Some(("boxen".to_owned(), false, false)));
        assert_eq!(how("t.example/v1", "Lid", &[crd]), None);
    }
}
