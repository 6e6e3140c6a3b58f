//! The host's own custom resources: "this plugin reconciles that kind, as this service account".
//!
//! A `ClusterReconciler` has parents in all namespaces, and names what it refers to by namespace and name. A `Reconciler` lives in a
//! namespace, and neither sees nor writes anything outside. Field documentation here becomes the API documentation
//! (`kubectl explain clusterreconciler.spec`, and host/docs/reference.md).

use std::{ops::RangeInclusive, str::FromStr, time::Duration};

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceColumnDefinition, CustomResourceDefinition},
    apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector},
};
use kube::{CustomResource, CustomResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::plugin::{CallLimits, describe::KindName};

mod grants;
mod rollout;
mod source;

pub use self::{
    grants::{Auth, AwsSigV4, FromSecret, Grants, HeaderAuth, HttpGrant, KubeGrant, SqlAccess, SqlEngine, SqlGrant},
    rollout::{Guards, Percent, Preview, Rollout, RolloutState, RolloutStatus, RolloutStep, Strategy},
    source::{
        ConfigMapRef, Cosign, ImageStatus, LocalConfigMapRef, LocalPluginSource, LocalSecretRef, PluginSource,
        PullPolicy, SecretRef, Verify,
    },
};

/// A plugin that reconciles parents in all namespaces.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[kube(
    group = "pilothouse.dev",
    version = "v1alpha1",
    kind = "ClusterReconciler",
    shortname = "crec",
    category = "pilothouse",
    status = "ReconcilerStatus"
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterReconcilerSpec {
    /// Where the plugin comes from.
    pub plugin: PluginSource,
    /// The service account that the host acts as for this reconciler: whatever it may not do, the plugin cannot bring about. The host has to
    /// be allowed to impersonate it, and so has whoever writes this.
    pub service_account: ServiceAccountRef,
    /// What the plugin may use beside its request. Default: nothing.
    #[serde(default)]
    pub grants: Grants,
    /// How it reconciles.
    #[serde(flatten)]
    pub terms: Terms,
}

/// A plugin that reconciles the parents of one namespace: its own. It sees and writes nothing outside.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[kube(
    group = "pilothouse.dev",
    version = "v1alpha1",
    kind = "Reconciler",
    namespaced,
    shortname = "rec",
    category = "pilothouse",
    status = "ReconcilerStatus"
)]
#[serde(rename_all = "camelCase")]
pub struct ReconcilerSpec {
    /// Where the plugin comes from.
    pub plugin: LocalPluginSource,
    /// The name of the service account, in this namespace, that the host acts as for this reconciler: whatever it may not do, the plugin cannot
    /// bring about. The host has to be allowed to impersonate it, and so has whoever writes this.
    pub service_account: String,
    /// What the plugin may use beside its request, within what the host's policy allows this namespace. Default: nothing. Secrets are those
    /// of this namespace.
    #[serde(default)]
    pub grants: Grants<LocalSecretRef>,
    /// How it reconciles.
    #[serde(flatten)]
    pub terms: Terms,
}

/// What both kinds of reconcilers say of how they reconcile.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Terms {
    /// Handed to the plugin with each call, as it is.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
    pub config: Map<String, Value>,
    /// Which parents, by their labels; without it all of them. A parent that leaves the selection is released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// What one call of the plugin may use. Holds from the next call on. For a `Reconciler`, the host's policy says how much that may be at
    /// most.
    #[serde(default)]
    pub limits: Limits,
    /// Reconcile nothing, and clean up nothing, until this is false again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Finalizers that an earlier operator, which is gone, has left on the parents, at most 8. They count as this reconciler's: on a parent
    /// that lives its own takes their place, if its plugin cleans up; one that is being deleted is cleaned up, and let go. Whatever
    /// releases a parent takes them off, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 8),
        inner(length(max = 317), regex(pattern = FINALIZER_NAME)),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = [{
            "rule": "self.all(name, !name.startsWith('pilothouse.dev/') && name != 'foregroundDeletion' && name != 'orphan')",
            "message": "neither finalizers of this host nor those of the garbage collector"
        }])
    )]
    pub legacy_finalizers: Vec<String>,
    /// Let parents go without cleanup where the plugin that serves has none any more. Without it they wait: that there was a cleanup says
    /// that there may be something to clean up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drop_finalizer: bool,
    /// What happens to the finalizers on its parents when this reconciler is deleted itself. `Release`: they are taken off, without
    /// cleanup, and children stay. `Block`: it stays, and works, until the last parent that carries its finalizer is gone.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
    /// How a new revision of the plugin takes over from the one that serves.
    #[serde(default)]
    pub rollout: Rollout,
    /// How many revisions are kept besides the active one, to fall back to.
    #[serde(default = "default_history")]
    #[schemars(with = "i32", range(min = 1))]
    pub revision_history_limit: u32,
}

/// A qualified name, as the API server takes finalizers of custom resources: the prefix may be missing.
const FINALIZER_NAME: &str = "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

fn default_history() -> u32 {
    5
}

/// What happens to the finalizers of a reconciler that is deleted.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub enum DeletionPolicy {
    /// They are taken off, without cleanup; children stay.
    #[default]
    Release,
    /// The reconciler stays, and works, until the last parent that carries its finalizer is gone.
    Block,
}

/// A service account.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub struct ServiceAccountRef {
    /// The service account's namespace.
    pub namespace: String,
    /// The service account's name.
    pub name: String,
}

impl ServiceAccountRef {
    /// The name under which the API server knows the account.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }
}

/// What one call of a plugin may use.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(default)]
pub struct Limits {
    /// Memory of the plugin during a call, as a quantity in bytes.
    pub memory: Bytes,
    /// How long a call may take, waiting included.
    pub timeout: Timeout,
    /// Size of the answer, as a quantity in bytes.
    pub output: Bytes,
    /// Number of children in an answer.
    #[schemars(with = "i32", range(min = 0))]
    pub children: u32,
    /// How many parents are reconciled at the same time.
    #[schemars(with = "i32", range(min = 1))]
    pub concurrency: u32,
}

impl Limits {
    /// The lesser of each two: what `self` asks for, within `most`.
    #[must_use]
    pub fn within(&self, most: &Self) -> Self {
        Self {
            memory: self.memory.min(most.memory),
            timeout: self.timeout.min(most.timeout),
            output: self.output.min(most.output),
            children: self.children.min(most.children),
            concurrency: self.concurrency.min(most.concurrency),
        }
    }

    /// As the plugin's calls take them.
    pub fn of_a_call(&self) -> CallLimits {
        CallLimits { memory: self.memory.0, timeout: self.timeout.0, output: self.output.0 }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: Bytes(64 << 20),
            timeout: Timeout(Duration::from_secs(5)),
            output: Bytes(4 << 20),
            children: 1000,
            concurrency: 8,
        }
    }
}

/// A number of bytes, written as a Kubernetes quantity: `64Mi`, `1Gi`, `500k`, `1048576`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub usize);

/// A duration, written as `5s`, `500ms`, `1m30s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timeout(pub Duration);

/// A limit that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ParseLimitError {
    /// No quantity.
    #[error("{0:?} is no number of bytes; write it as 64Mi, 1Gi or 1048576")]
    Bytes(String),
    /// No share.
    #[error("{0:?} is no share; write it as 10%, from 0% to 100%")]
    Percent(String),
    /// No duration.
    #[error("{0:?} is no duration between 1ms and a year; write it as 5s, 500ms or 1m30s")]
    Timeout(String),
}

/// A shorter one would be written as 0s, and one that is much longer can be added to no clock.
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_hours(24 * 365);

const BYTE_UNITS: [(&str, usize); 7] =
    [("Ki", 1 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30), ("k", 1000), ("M", 1_000_000), ("G", 1_000_000_000), ("", 1)];

impl FromStr for Bytes {
    type Err = ParseLimitError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = BYTE_UNITS
            .iter()
            .find_map(|(unit, factor)| text.strip_suffix(unit)?.parse::<usize>().ok()?.checked_mul(*factor));
        read.map(Self).ok_or_else(|| ParseLimitError::Bytes(text.to_owned()))
    }
}

impl TryFrom<String> for Bytes {
    type Error = ParseLimitError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Bytes> for String {
    fn from(Bytes(bytes): Bytes) -> Self {
        let whole = BYTE_UNITS[..3].iter().rev().find(|(_, factor)| bytes > 0 && bytes % factor == 0);
        whole.map_or_else(|| bytes.to_string(), |(unit, factor)| format!("{}{unit}", bytes / factor))
    }
}

impl FromStr for Timeout {
    type Err = ParseLimitError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = text.parse::<jiff::SignedDuration>().ok().and_then(|read| Duration::try_from(read).ok());
        let read = read.filter(|read| TIMEOUTS.contains(read));
        read.map(Self).ok_or_else(|| ParseLimitError::Timeout(text.to_owned()))
    }
}

impl TryFrom<String> for Timeout {
    type Error = ParseLimitError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Timeout> for String {
    fn from(Timeout(duration): Timeout) -> Self {
        match duration.subsec_millis() {
            0 => format!("{}s", duration.as_secs()),
            _ => format!("{}ms", duration.as_millis()),
        }
    }
}

/// Written as strings, whatever they are in memory.
macro_rules! schema_of_a_string {
    ($($type:ty),*) => { $(
        impl JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                String::json_schema(generator)
            }
        }
    )* };
}
schema_of_a_string!(Bytes, Timeout, Percent);

/// What the host says of a reconciler.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ReconcilerStatus {
    /// The generation of the spec that this status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Resolved`: the plugin was found. `Verified`: it is signed as it has to be. `Loaded`: it was compiled and asked what it is. `Permitted`: the service account may watch its kinds.
    /// `Watching`: they are being watched. `Ready`: all of these. `Degraded`: the latest revision does not work, and the last good
    /// one serves. `Progressing`: parents go over to the latest revision step by step. `Deterministic`: the latest revision that was previewed
    /// gives the same answer to the same request. `Conflict`: an older reconciler has some of its parents.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The kind that the plugin reconciles, as `Kind.version.group`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_kind: Option<String>,
    /// The revision that serves now: the digest of a plugin and its config.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_revision: Option<String>,
    /// The revision that the spec asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_revision: Option<String>,
    /// The latest revision that served; what a host that starts falls back to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_good_revision: Option<String>,
    /// What `spec.plugin.image` was when its registry was last asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageStatus>,
    /// How far the latest revision has taken over. Missing as long as there was only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// How its parents are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parents: Option<ParentCounts>,
    /// The kinds of which this reconciler may have made children. They stay watched when a plugin no longer declares them, so
    /// that what is left of them can be deleted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub applied_kinds: Vec<KindName>,
    /// The finalizer that this reconciler puts on its parents, when its plugin cleans up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finalizer: Option<String>,
}

/// The parents of a reconciler, counted. Published at most every ten seconds.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub struct ParentCounts {
    /// Those that it selects.
    #[schemars(with = "i32", range(min = 0))]
    pub total: u32,
    /// Those that were reconciled with success when they were last looked at, with the revision that serves now.
    #[schemars(with = "i32", range(min = 0))]
    pub current: u32,
    /// Those whose condition `Ready` is True.
    #[schemars(with = "i32", range(min = 0))]
    pub ready: u32,
    /// Those whose last reconcile failed; their condition `Synced` says why.
    #[schemars(with = "i32", range(min = 0))]
    pub failing: u32,
}

/// What `kubectl get` shows of either kind: name, type, path, and whether only with `-o wide`.
const COLUMNS: [(&str, &str, &str, bool); 8] = [
    ("Parent", "string", ".status.parentKind", false),
    ("Revision", "string", ".status.activeRevision", false),
    ("Current", "integer", ".status.parents.current", false),
    ("Total", "integer", ".status.parents.total", false),
    ("Ready", "string", r#".status.conditions[?(@.type=="Ready")].status"#, false),
    ("Rollout", "string", ".status.rollout.state", false),
    ("Reason", "string", r#".status.conditions[?(@.type=="Ready")].reason"#, true),
    ("Age", "date", ".metadata.creationTimestamp", false),
];

/// The definitions of the host's own kinds.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    [ClusterReconciler::crd(), Reconciler::crd()].map(with_columns).into()
}

fn with_columns(mut definition: CustomResourceDefinition) -> CustomResourceDefinition {
    let column = |(name, type_, path, wide): (&str, &str, &str, bool)| CustomResourceColumnDefinition {
        name: name.to_owned(),
        type_: type_.to_owned(),
        json_path: path.to_owned(),
        priority: wide.then_some(1),
        ..CustomResourceColumnDefinition::default()
    };
    for version in &mut definition.spec.versions {
        version.additional_printer_columns = Some(COLUMNS.map(column).into());
    }
    definition
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_written_as_kubernetes_writes_them() {
        let limits: Limits = serde_json::from_str(r#"{"memory":"1Gi","timeout":"1m30s"}"#).unwrap();
        assert_eq!((limits.memory, limits.timeout.0), (Bytes(1 << 30), Duration::from_secs(90)));
        assert_eq!(limits.children, 1000);
        assert_eq!(serde_json::to_value(Limits::default()).unwrap()["memory"], "64Mi");
        assert_eq!(String::from(Bytes(1500)), "1500");
        assert_eq!("1500k".parse::<Bytes>().unwrap(), Bytes(1_500_000));
    }

    #[test]
    fn a_limit_that_cannot_be_read_says_how_to_write_it() {
        for bad in ["64 MB", "Mi", "-1", "99999999999Gi"] {
            let error = bad.parse::<Bytes>().unwrap_err().to_string();
            assert!(error.contains("64Mi"), "{error}");
        }
        for bad in ["5", "0s", "-1s", "soon", "1us", "9223372036854775807s"] {
            let error = bad.parse::<Timeout>().unwrap_err().to_string();
            assert!(error.contains("500ms"), "{error}");
        }
    }
}
