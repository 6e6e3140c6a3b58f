//! A reconciler as the host takes it, whichever of the two kinds of [`crate::crd`] says it: every reference by namespace and name.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, core::object::HasStatus as _, discovery::ApiResource};

use crate::{
    crd::{ClusterReconciler, Grants, PluginSource, Reconciler, ReconcilerStatus, ServiceAccountRef, Terms},
    identity::ALLOW_ROLLOUT_ANNOTATION,
    object::{Object, ObjectKey},
};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Declaration {
    /// Where it is: a `Reconciler` in a namespace, or a `ClusterReconciler` in none.
    pub key: ObjectKey,
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// Where its plugin comes from.
    pub plugin: PluginSource,
    /// Whom the host acts as.
    pub account: ServiceAccountRef,
    /// What its plugin may use.
    pub grants: Grants,
    /// How it reconciles.
    pub terms: Terms,
    /// What the host says of it.
    pub status: Option<ReconcilerStatus>,
}

impl Declaration {
    /// The one namespace that it sees; none: all of them.
    pub fn scope(&self) -> Option<&str> {
        self.key.namespace.as_deref()
    }

    /// Whether it carries this finalizer.
    pub fn has_finalizer(&self, finalizer: &str) -> bool {
        self.metadata.finalizers.iter().flatten().any(|entry| entry == finalizer)
    }

    /// The revision that a user lets take over, whatever the guards say.
    pub fn allowed_rollout(&self) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(ALLOW_ROLLOUT_ANNOTATION).map(String::as_str)
    }

    /// The reconcilers of its kind, in its namespace.
    pub fn api(&self, client: Client) -> Api<Object> {
        match self.scope() {
            None => Api::all_with(client, &ApiResource::erase::<ClusterReconciler>(&())),
            Some(namespace) => Api::namespaced_with(client, namespace, &ApiResource::erase::<Reconciler>(&())),
        }
    }
}

/// The kind of reconcilers that live in namespaces.
pub const NAMESPACED: &str = "Reconciler";

/// The kind of the reconciler of that name.
pub fn kind(key: &ObjectKey) -> &'static str {
    if key.namespace.is_some() { NAMESPACED } else { "ClusterReconciler" }
}

/// Which reconciler a user means: the name of a `ClusterReconciler`, or NAMESPACE/NAME of a `Reconciler`.
///
/// # Errors
/// None: that is for the API server to say. A parser of clap has to be able to.
pub fn key_of(text: &str) -> Result<ObjectKey, String> {
    Ok(match text.split_once('/') {
        Some((namespace, name)) => ObjectKey { namespace: Some(namespace.to_owned()), name: name.to_owned() },
        None => ObjectKey { namespace: None, name: text.to_owned() },
    })
}

/// What the host looks at: who owns which field takes more memory than all the rest, and is kept as long as the reconciler lives.
fn metadata(metadata: ObjectMeta) -> ObjectMeta {
    ObjectMeta { managed_fields: None, ..metadata }
}

fn key(metadata: &ObjectMeta) -> ObjectKey {
    ObjectKey { namespace: metadata.namespace.clone(), name: metadata.name.clone().unwrap_or_default() }
}

impl From<ClusterReconciler> for Declaration {
    fn from(declared: ClusterReconciler) -> Self {
        let status = declared.status().cloned();
        Self {
            key: key(&declared.metadata),
            metadata: metadata(declared.metadata),
            plugin: declared.spec.plugin,
            account: declared.spec.service_account,
            grants: declared.spec.grants,
            terms: declared.spec.terms,
            status,
        }
    }
}

impl From<Reconciler> for Declaration {
    fn from(declared: Reconciler) -> Self {
        let key = key(&declared.metadata);
        let status = declared.status().cloned();
        let namespace = key.namespace.clone().unwrap_or_default();
        Self {
            key,
            metadata: metadata(declared.metadata),
            plugin: declared.spec.plugin.within(&namespace),
            grants: declared.spec.grants.within(&namespace),
            account: ServiceAccountRef { namespace, name: declared.spec.service_account },
            terms: declared.spec.terms,
            status,
        }
    }
}
