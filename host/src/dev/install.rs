//! What a plugin in development needs in the cluster: applied as [`mod@manifests`] says, and removed again. What was there before stays.

use std::{path::Path, time::Duration};

use k8s_openapi::{
    api::apps::v1::ControllerRevision, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, Preconditions, TypeMeta},
    runtime::wait::{await_condition, conditions},
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    crd::{self, ClusterReconciler, ServiceAccountRef},
    declaration::{self, Declaration},
    identity::{DEV_LABEL, HOST_LABEL, Identity, RECONCILER_LABEL},
    kinds, lease, lookup,
    manifests::{self, Granted, manifests},
    object::{Kind, ObjectKey},
    plugin::{Plugin, describe::KindName},
    preview::without_version,
};

/// Who applies.
const FIELD_MANAGER: &str = "pilothouse-dev";
/// How long the API server may take to serve a kind, and a host to let its parents go.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why something is not in the cluster as it should be, or not out of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The API server refuses.
    #[error("failed to {verb} {kind} {key}")]
    Request {
        /// What was tried.
        verb: &'static str,
        /// With what.
        kind: String,
        /// Which one.
        key: ObjectKey,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// There is a reconciler of that name already.
    #[error(
        "there is a ClusterReconciler {0}, with a plugin of its own; take another name (--name), or serve its parents by this plugin for \
         as long as this runs (--take-over)"
    )]
    Exists(String),
    /// Another person is at it.
    #[error("{1} has ClusterReconciler {0} to itself; end it, or take it away (--take-over)")]
    Held(String, String),
    /// Another reconciler has the parents.
    #[error(
        "{kind} {key} reconciles {parents} already; serve them by this plugin (--name {key} --take-over), or delete it"
    )]
    Rival {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        key: ObjectKey,
        /// The kind of the parents.
        parents: String,
    },
    /// A definition is not taken.
    #[error("the API server does not serve {0} within {PATIENCE:?}; see `kubectl describe crd {0}`")]
    NotServed(String),
    /// The manifests cannot be made.
    #[error(transparent)]
    Manifests(#[from] manifests::Error),
    /// It is not let go.
    #[error(
        "ClusterReconciler {0} does not let its parents go within {PATIENCE:?}; see `kubectl describe clusterreconciler {0}`, and \
         `pilothouse release --help` for the last resort"
    )]
    NotReleased(String),
}

/// Whose reconciler it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// Made here, or to be made.
    Own,
    /// Taken from the host of the cluster, and given back in the end.
    TakenOver,
}

/// What has become of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Action {
    Created,
    Changed,
    Unchanged,
    Removed,
    /// It is not removed.
    Left,
}

/// An object that was applied, or removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Applied {
    pub(super) action: Action,
    pub(super) kind: String,
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

/// Where a reconciler and all that belongs to it go.
pub(super) struct Install {
    pub(super) client: Client,
    /// The name of the reconciler.
    pub(super) name: String,
    /// Where its service account is.
    pub(super) namespace: String,
    /// What is granted to the plugin.
    pub(super) grants: Option<Granted>,
    /// What this host calls itself.
    pub(super) host: String,
}

impl Install {
    fn reconcilers(&self) -> Api<ClusterReconciler> {
        Api::all(self.client.clone())
    }

    fn key(&self) -> ObjectKey {
        ObjectKey { namespace: None, name: self.name.clone() }
    }

    fn of_reconciler(&self, verb: &'static str) -> impl FnOnce(kube::Error) -> Error {
        let key = self.key();
        move |source| Error::Request { verb, kind: "ClusterReconciler".to_owned(), key, source: Box::new(source) }
    }

    /// Makes sure that nobody else has the reconciler; with `take_over` it is theirs no longer.
    pub(super) async fn claim(&self, take_over: bool) -> Result<Claim, Error> {
        let api = self.reconcilers();
        let there = match lookup::get(&api, &self.name).await {
            // The kinds of the host are not installed yet.
            Err(kube::Error::Api(status)) if status.code == 404 => None,
            there => there.map_err(self.of_reconciler("read"))?,
        };
        let Some(there) = there else { return Ok(Claim::Own) };
        if let Some(holder) = there.labels().get(HOST_LABEL).filter(|holder| **holder != self.host) {
            let ended = ended(holder, &machine(), |pid| Path::new("/proc").join(pid).exists());
            if !ended && !take_over {
                return Err(Error::Held(self.name.clone(), holder.clone()));
            }
        }
        if there.labels().contains_key(DEV_LABEL) {
            return Ok(Claim::Own);
        }
        if !take_over {
            return Err(Error::Exists(self.name.clone()));
        }
        self.label(&there, Some(&self.host)).await?;
        Ok(Claim::TakenOver)
    }

    /// Takes a reconciler that an earlier run has made.
    pub(super) async fn take(&self) -> Result<(), Error> {
        let there = lookup::get(&self.reconcilers(), &self.name).await.map_err(self.of_reconciler("read"))?;
        match there {
            Some(there) => self.label(&there, Some(&self.host)).await,
            None => Ok(()),
        }
    }

    /// Gives a reconciler back to the host of the cluster.
    pub(super) async fn give_back(&self) -> Result<(), Error> {
        let there = lookup::get(&self.reconcilers(), &self.name).await.map_err(self.of_reconciler("read"))?;
        match there.filter(|there| there.labels().get(HOST_LABEL) == Some(&self.host)) {
            Some(there) => self.label(&there, None).await,
            None => Ok(()),
        }
    }

    async fn label(&self, there: &ClusterReconciler, host: Option<&str>) -> Result<(), Error> {
        let metadata = json!({"uid": there.metadata.uid, "labels": {HOST_LABEL: host}});
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patched = self.reconcilers().patch(&self.name, &params, &Patch::Merge(json!({"metadata": metadata}))).await;
        patched.map(drop).map_err(self.of_reconciler("label"))
    }

    /// Makes sure that no other reconciler has the parents of the plugin.
    pub(super) async fn check_rivals(&self, plugin: &Plugin) -> Result<(), Error> {
        let name = &plugin.description().parent;
        let group = name.api_version.split_once('/').map_or("", |(group, _)| group);
        let all = ListParams::default();
        let of_cluster = self.reconcilers().list(&all).await.map_err(self.of_reconciler("list"))?;
        let of_namespaces = Api::<crd::Reconciler>::all(self.client.clone()).list(&all).await;
        let of_cluster = of_cluster.items.into_iter().map(Declaration::from);
        let of_namespaces = of_namespaces.map_err(self.of_reconciler("list"))?.items.into_iter().map(Into::into);
        let rival = of_cluster.chain(of_namespaces).find(|other| {
            let reconciles = other.status.as_ref().and_then(|status| status.parent_kind.as_deref());
            other.key != self.key()
                && reconciles.is_some_and(|kind| without_version(kind) == (name.kind.as_str(), group))
        });
        match rival {
            Some(rival) => {
                Err(Error::Rival { kind: declaration::kind(&rival.key), key: rival.key, parents: name.kind.clone() })
            }
            None => Ok(()),
        }
    }

    /// What has to be in the cluster for the plugin, which is in the file `component`.
    pub(super) fn manifests(&self, plugin: &Plugin, component: &Path) -> Result<Vec<Value>, Error> {
        let options = manifests::Options {
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            host: ServiceAccountRef { namespace: lease::NAMESPACE.to_owned(), name: "pilothouse".to_owned() },
            namespaced: false,
            image: None,
            path: Some(component.to_owned()),
            pull_secrets: Vec::new(),
            skip_crds: false,
            only_crds: false,
            grants: self.grants.clone(),
        };
        let mut manifests = manifests(plugin, &[], &options)?;
        if let Some(reconciler) = manifests.last_mut() {
            reconciler["metadata"]["labels"] = json!({HOST_LABEL: self.host});
        }
        Ok(manifests)
    }

    /// Installs the kinds of the host, where they are not. Those that are may be of another release, and are left alone.
    pub(super) async fn install_own_kinds(&self) -> Result<Vec<Applied>, Error> {
        let mut applied = Vec::new();
        for definition in crd::definitions() {
            let api = Api::<CustomResourceDefinition>::all(self.client.clone());
            let name = definition.name_any();
            let key = ObjectKey { namespace: None, name: name.clone() };
            let failed = |verb| {
                let key = key.clone();
                move |source| Error::Request {
                    verb,
                    kind: "CustomResourceDefinition".to_owned(),
                    key,
                    source: Box::new(source),
                }
            };
            if lookup::get(&api, &name).await.map_err(failed("read"))?.is_some() {
                continue;
            }
            api.patch(&name, &PatchParams::apply(FIELD_MANAGER), &Patch::Apply(&definition))
                .await
                .map_err(failed("apply"))?;
            self.await_definition(&name).await?;
            applied.push(Applied {
                action: Action::Created,
                kind: "CustomResourceDefinition".to_owned(),
                namespace: None,
                name,
            });
        }
        Ok(applied)
    }

    async fn await_definition(&self, name: &str) -> Result<(), Error> {
        let api = Api::<CustomResourceDefinition>::all(self.client.clone());
        let served = await_condition(api, name, conditions::is_crd_established());
        match tokio::time::timeout(PATIENCE, served).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Error::NotServed(name.to_owned())),
        }
    }

    /// Applies manifests. What was not there before is marked as made here.
    pub(super) async fn apply(&self, manifests: &[Value]) -> Result<Vec<Applied>, Error> {
        let mut applied = Vec::new();
        for manifest in manifests {
            let (kind, key) = (kind_of(manifest), key_of(manifest));
            let failed = |verb| {
                let (kind, key) = (kind.api.kind.clone(), key.clone());
                move |source| Error::Request { verb, kind, key, source: Box::new(source) }
            };
            let api = kind.objects::<DynamicObject>(&self.client, key.namespace.as_deref());
            let before = lookup::get(&api, &key.name).await.map_err(failed("read"))?;
            let is_namespace = kind.api.kind == "Namespace";
            let (before, action) = match before {
                // A namespace may have come to hold things of others, so it is never removed, and need not be marked.
                Some(_) if is_namespace => continue,
                Some(before) => (Some(before), Action::Unchanged),
                None => (None, Action::Created),
            };
            let mut manifest = manifest.clone();
            let made_here = before.as_ref().is_none_or(|before| before.labels().contains_key(DEV_LABEL));
            if made_here && !is_namespace {
                manifest["metadata"]["labels"][DEV_LABEL] = Identity::of(&self.key()).label().into();
            }
            let params = PatchParams::apply(FIELD_MANAGER).force();
            let after = api.patch(&key.name, &params, &Patch::Apply(&manifest)).await.map_err(failed("apply"))?;
            let changed = before.is_some_and(|before| before.resource_version() != after.resource_version());
            if kind.api.kind == "CustomResourceDefinition" {
                self.await_definition(&key.name).await?;
            }
            applied.push(Applied {
                action: if changed { Action::Changed } else { action },
                kind: kind.api.kind,
                namespace: key.namespace,
                name: key.name,
            });
        }
        Ok(applied)
    }

    /// Removes all that was made here for the reconciler, while a host serves it, which lets its parents go.
    pub(super) async fn remove(&self) -> Result<Vec<Applied>, Error> {
        let mut removed = Vec::new();
        let ours = ListParams::default().labels(&format!("{DEV_LABEL}={}", Identity::of(&self.key()).label()));
        // Last is what the others need.
        for (api_version, kind) in [
            ("pilothouse.dev/v1alpha1", "ClusterReconciler"),
            ("rbac.authorization.k8s.io/v1", "RoleBinding"),
            ("rbac.authorization.k8s.io/v1", "Role"),
            ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"),
            ("rbac.authorization.k8s.io/v1", "ClusterRole"),
            ("v1", "ServiceAccount"),
            ("apiextensions.k8s.io/v1", "CustomResourceDefinition"),
        ] {
            let kind = kinds::assumed(&KindName { api_version: api_version.to_owned(), kind: kind.to_owned() });
            let of_kind = |verb, key: &ObjectKey| {
                let (kind, key) = (kind.api.kind.clone(), key.clone());
                move |source| Error::Request { verb, kind, key, source: Box::new(source) }
            };
            let all = kind.objects::<DynamicObject>(&self.client, None);
            for object in all.list(&ours).await.map_err(of_kind("list", &self.key()))?.items {
                let key = ObjectKey { namespace: object.namespace(), name: object.name_any() };
                let mut action = Action::Removed;
                if kind.api.kind == "CustomResourceDefinition"
                    && self.is_in_use(&object).await.map_err(of_kind("list", &key))?
                {
                    // Its objects would go with it.
                    action = Action::Left;
                } else {
                    let api = kind.objects::<DynamicObject>(&self.client, key.namespace.as_deref());
                    let params = DeleteParams {
                        preconditions: Some(Preconditions { uid: object.uid(), resource_version: None }),
                        ..DeleteParams::default()
                    };
                    api.delete(&key.name, &params).await.map_err(of_kind("delete", &key))?;
                    if kind.api.kind == "ClusterReconciler" {
                        self.await_release(&api).await?;
                    }
                }
                removed.push(Applied { action, kind: kind.api.kind.clone(), namespace: key.namespace, name: key.name });
            }
        }
        let history = Api::<ControllerRevision>::namespaced(self.client.clone(), &self.namespace);
        let kept = ListParams::default().labels(&format!("{RECONCILER_LABEL}={}", Identity::of(&self.key()).label()));
        if removed.iter().any(|removed| removed.kind == "ClusterReconciler") {
            let deleted = history.delete_collection(&DeleteParams::default(), &kept).await;
            deleted.map_err(self.of_reconciler("delete the revisions of"))?;
        }
        Ok(removed)
    }

    async fn await_release(&self, api: &Api<DynamicObject>) -> Result<(), Error> {
        let gone = await_condition(api.clone(), &self.name, |object: Option<&DynamicObject>| object.is_none());
        match tokio::time::timeout(PATIENCE, gone).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Error::NotReleased(self.name.clone())),
        }
    }

    /// Whether there are objects of the kind that is defined so.
    async fn is_in_use(&self, definition: &DynamicObject) -> Result<bool, kube::Error> {
        let spec = &definition.data["spec"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let version = text(&spec["versions"][0]["name"]);
        let name =
            KindName { api_version: format!("{}/{version}", text(&spec["group"])), kind: text(&spec["names"]["kind"]) };
        let mut kind = kinds::assumed(&name);
        kind.api.plural = text(&spec["names"]["plural"]);
        let some = kind.objects::<DynamicObject>(&self.client, None).list(&ListParams::default().limit(1)).await?;
        Ok(!some.items.is_empty())
    }
}

fn kind_of(manifest: &Value) -> Kind {
    let text = |name: &str| manifest[name].as_str().unwrap_or_default().to_owned();
    let types = TypeMeta { api_version: text("apiVersion"), kind: text("kind") };
    kinds::assumed(&KindName { api_version: types.api_version, kind: types.kind })
}

fn key_of(manifest: &Value) -> ObjectKey {
    let text = |name: &str| manifest["metadata"][name].as_str().map(str::to_owned);
    ObjectKey { namespace: text("namespace"), name: text("name").unwrap_or_default() }
}

/// What this process calls itself in a cluster: its machine and its id.
pub(super) fn host() -> String {
    format!("{}.{}", machine(), std::process::id())
}

/// The machine, as a label may name it.
fn machine() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim().replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    // With the id it has to be at most 63 characters.
    let name = name.get(..50).unwrap_or(&name).trim_matches('-');
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

/// Whether a host that called itself so has ended: then it was on this machine, and its process is no more.
fn ended(holder: &str, machine: &str, runs: impl Fn(&str) -> bool) -> bool {
    holder.rsplit_once('.').is_some_and(|(other, pid)| other == machine && !runs(pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_ended_is_known_on_its_own_machine_only() {
        let runs = |pid: &str| pid == "7";
        assert!(!ended("laptop.7", "laptop", runs));
        assert!(ended("laptop.8", "laptop", runs));
        assert!(!ended("other.8", "laptop", runs));
        assert!(!ended("blue", "laptop", runs));
        assert!(ended(&host(), &machine(), |_| false) && host().len() <= 63);
    }
}
