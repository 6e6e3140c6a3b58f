//! What a `Reconciler` may ask for at most: the host's word against the wishes of a tenant. Pure.
//!
//! Whoever may write a `Reconciler` in a namespace could otherwise give a plugin of their own all of the host's memory, or the
//! capabilities that the host has. A `ClusterReconciler` is written by those who run the cluster, and is not bound by it.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::{
    crd::{Grants, Limits},
    object::ObjectKey,
};

/// The policy, as `--tenant-policy` names its file:
///
/// ```yaml
/// default:                # namespaces that are not named below; left out: the defaults of spec.limits, and no grants
///   limits: {memory: 64Mi, timeout: 5s, output: 4Mi, children: 1000, concurrency: 8}
///   grants: []            # names of capabilities
/// namespaces:
///   team-a:
///     limits: {memory: 256Mi, concurrency: 16}
/// ```
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TenantPolicy {
    default: Tenant,
    namespaces: BTreeMap<String, Tenant>,
}

/// What the Reconcilers of a namespace may ask for.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Tenant {
    /// The most that `spec.limits` may be.
    limits: Limits,
    /// The capabilities that `spec.grants` may name.
    grants: BTreeSet<String>,
}

/// What a reconciler asks for and may not have.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A limit.
    #[error(
        "spec.limits.{field} is {asked}, and a Reconciler in namespace {namespace} may have {most} at most; lower it, or let those who run \
         the host raise it (--tenant-policy)"
    )]
    Limit {
        /// Which one.
        field: &'static str,
        /// What it is.
        asked: String,
        /// What it may be.
        most: String,
        /// Where.
        namespace: String,
    },
    /// A capability.
    #[error(
        "spec.grants.{capability}: no Reconciler in namespace {namespace} may grant that; those who run the host can allow it \
         (--tenant-policy)"
    )]
    Grant {
        /// Which one.
        capability: &'static str,
        /// Where.
        namespace: String,
    },
}

impl TenantPolicy {
    /// Reads the policy from YAML.
    ///
    /// # Errors
    /// If it is not what [`TenantPolicy`] says, with the place.
    pub fn read(yaml: &str) -> Result<Self, serde_saphyr::Error> {
        serde_saphyr::from_str(yaml)
    }

    /// Whether the reconciler may have what it asks for.
    ///
    /// # Errors
    /// The first thing that it may not have.
    pub fn check(&self, reconciler: &ObjectKey, limits: &Limits, grants: &Grants) -> Result<(), Error> {
        let Some(namespace) = &reconciler.namespace else { return Ok(()) };
        let tenant = self.tenant(namespace);
        if let Some(capability) = grants.capabilities().find(|capability| !tenant.grants.contains(*capability)) {
            return Err(Error::Grant { capability, namespace: namespace.clone() });
        }
        check_limits(namespace, limits, &tenant.limits)
    }

    /// The grants that hold for a reconciler: those it asks for, of the capabilities that it may have. Whatever it says, and whichever of
    /// its revisions serves.
    pub fn grants(&self, reconciler: &ObjectKey, asked: &Grants) -> Grants {
        let Some(namespace) = &reconciler.namespace else { return asked.clone() };
        let tenant = self.tenant(namespace);
        let mut grants = Grants::default();
        for capability in asked.capabilities().filter(|capability| tenant.grants.contains(*capability)) {
            match capability {
                "http" => grants.http.clone_from(&asked.http),
                "sql" => grants.sql.clone_from(&asked.sql),
                _ => grants.kube.clone_from(&asked.kube),
            }
        }
        grants
    }

    /// The limits that hold for a reconciler: those it asks for, within what it may have. Whatever it says, and whichever of its
    /// revisions serves.
    pub fn limits(&self, reconciler: &ObjectKey, asked: &Limits) -> Limits {
        match &reconciler.namespace {
            Some(namespace) => asked.within(&self.tenant(namespace).limits),
            None => asked.clone(),
        }
    }

    fn tenant(&self, namespace: &str) -> &Tenant {
        self.namespaces.get(namespace).unwrap_or(&self.default)
    }
}

fn check_limits(namespace: &str, asked: &Limits, most: &Limits) -> Result<(), Error> {
    let fields = [
        ("memory", asked.memory > most.memory, String::from(asked.memory), String::from(most.memory)),
        ("timeout", asked.timeout > most.timeout, String::from(asked.timeout), String::from(most.timeout)),
        ("output", asked.output > most.output, String::from(asked.output), String::from(most.output)),
        ("children", asked.children > most.children, asked.children.to_string(), most.children.to_string()),
        (
            "concurrency",
            asked.concurrency > most.concurrency,
            asked.concurrency.to_string(),
            most.concurrency.to_string(),
        ),
    ];
    match fields.into_iter().find(|(_, too_much, ..)| *too_much) {
        None => Ok(()),
        Some((field, _, asked, most)) => Err(Error::Limit { field, asked, most, namespace: namespace.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tenant(namespace: &str) -> ObjectKey {
        ObjectKey { namespace: Some(namespace.to_owned()), name: "r".to_owned() }
    }

    fn limits(limits: serde_json::Value) -> Limits {
        serde_json::from_value(limits).unwrap()
    }

    #[test]
    fn a_tenant_has_the_usual_limits_and_no_grants() {
        let policy = TenantPolicy::default();
        let check =
            |asked, grants| policy.check(&tenant("a"), &limits(asked), &grants).map_err(|error| error.to_string());
        assert_eq!(check(json!({}), Grants::default()), Ok(()));
        assert_eq!(check(json!({"memory": "1Mi", "timeout": "1s"}), Grants::default()), Ok(()));
        for (limits, part) in [
            (
                json!({"memory": "65Mi"}),
                "spec.limits.memory is 65Mi, and a Reconciler in namespace a may have 64Mi at most",
            ),
            (json!({"timeout": "5001ms"}), "spec.limits.timeout is 5001ms"),
            (json!({"output": "1Gi"}), "spec.limits.output is 1Gi"),
            (json!({"children": 1001}), "spec.limits.children is 1001"),
            (json!({"concurrency": 9}), "spec.limits.concurrency is 9"),
        ] {
            let error = check(limits, Grants::default()).unwrap_err();
            assert!(error.starts_with(part), "{error}");
        }
        let error = check(json!({}), an_api()).unwrap_err();
        assert!(error.starts_with("spec.grants.http: no Reconciler in namespace a may grant that"), "{error}");
        // What is refused does not hold either.
        let holds = policy.limits(&tenant("a"), &limits(json!({"memory": "1Gi", "timeout": "1s"})));
        assert_eq!((String::from(holds.memory), String::from(holds.timeout)), ("64Mi".into(), "1s".into()));
        assert_eq!(policy.grants(&tenant("a"), &an_api()), Grants::default());
    }

    #[test]
    fn the_policy_says_otherwise_by_namespace_and_binds_no_cluster_reconciler() {
        let yaml = "default: {limits: {memory: 1Mi}}\nnamespaces: {a: {limits: {memory: 1Gi}, grants: [http]}}";
        let policy = TenantPolicy::read(yaml).unwrap();
        let much = limits(json!({"memory": "1Gi"}));
        assert_eq!(policy.check(&tenant("a"), &much, &an_api()), Ok(()));
        assert_eq!(policy.grants(&tenant("a"), &an_api()), an_api());
        assert!(policy.check(&tenant("b"), &much, &Grants::default()).is_err());
        let kube = Grants { kube: Some(crate::crd::KubeGrant::default()), ..an_api() };
        assert!(policy.check(&tenant("a"), &much, &kube).unwrap_err().to_string().starts_with("spec.grants.kube"));
        assert_eq!(policy.grants(&tenant("a"), &kube), an_api());
        let cluster = ObjectKey { namespace: None, name: "r".to_owned() };
        assert_eq!(policy.check(&cluster, &limits(json!({"memory": "900Gi"})), &kube), Ok(()));
        assert_eq!(policy.grants(&cluster, &kube), kube);
        let error = TenantPolicy::read("namespaces: {a: {limit: {}}}").unwrap_err().to_string();
        assert!(error.contains("limit"), "{error}");
    }

    fn an_api() -> Grants {
        serde_json::from_value(json!({"http": [{"name": "api", "url": "https://api.example.com/v1"}]})).unwrap()
    }
}
