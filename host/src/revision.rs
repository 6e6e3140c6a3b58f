//! A revision: one plugin and one config, loaded. And how it is kept in the cluster, so that a host that starts while the latest
//! plugin is broken can serve the last good one.

use std::{collections::BTreeMap, sync::Arc};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use jiff::Timestamp;
use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PartialObjectMeta, PostParams},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::{
    identity::{self, Identity, RECONCILER_LABEL},
    lookup,
    plugin::{Access, CallLimits, Engine, LoadError, Plugin},
    source::{Fetched, Image},
};

/// What a revision is made of.
#[derive(Clone, Debug)]
pub struct Material {
    /// The component, and where it came from.
    pub plugin: Fetched,
    /// `spec.config` of the reconciler.
    pub config: Map<String, Value>,
}

/// A plugin with its config, ready to be called.
pub struct Revision {
    /// Digest of plugin and config.
    pub id: String,
    /// The plugin.
    pub plugin: Plugin,
    /// The config, as JSON.
    pub config: String,
    /// The image that its plugin came from.
    pub image: Option<Image>,
}

impl Material {
    /// The digest of plugin and config: what makes a revision another one.
    pub fn id(&self) -> String {
        let config = Value::from(self.config.clone());
        let digest =
            Sha256::new_with_prefix(Sha256::digest(&self.plugin.bytes)).chain_update(config.to_string()).finalize();
        identity::hex(&digest, 6)
    }

    /// Loads the plugin, which a namespace or the cluster brings; its calls may reach what `access` says.
    ///
    /// # Errors
    /// If it is no plugin that this host can serve.
    pub async fn load(
        &self,
        engine: &Arc<Engine>,
        namespace: Option<&str>,
        limits: CallLimits,
        access: Arc<Access>,
    ) -> Result<Revision, LoadError> {
        let plugin = Plugin::load(engine, namespace, self.plugin.bytes.clone(), limits, access).await?;
        let (config, image) = (Value::from(self.config.clone()).to_string(), self.plugin.image.clone());
        Ok(Revision { id: self.id(), plugin, config, image })
    }
}

/// The revisions of one reconciler that are kept in the cluster, as ControllerRevisions beside its plugin.
pub struct History {
    api: Api<ControllerRevision>,
    identity: Identity,
}

/// A revision that was kept.
#[derive(Debug)]
pub struct Kept {
    /// Where its plugin is.
    pub origin: Origin,
    /// Its config.
    pub config: Map<String, Value>,
}

/// Where the plugin of a revision that was kept is.
#[derive(Debug)]
pub enum Origin {
    /// With it.
    Component(Vec<u8>),
    /// In a registry, by the digest of its manifest.
    Image(String),
}

/// The data of a ControllerRevision of ours. Of `component` and `image` it has one.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Data {
    /// The component, base64: a ConfigMap changes under its name, so a reference would not do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    component: Option<String>,
    /// The image, by the digest of its manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image: Option<String>,
    config: Map<String, Value>,
}

impl History {
    /// The history in `namespace`, read and written as the host.
    pub fn new(client: Client, namespace: &str, identity: Identity) -> Self {
        Self { api: Api::namespaced(client, namespace), identity }
    }

    /// The revision `id`, if it is kept. Somebody may have changed it: what is made of it has that id, or is not what served.
    ///
    /// # Errors
    /// If the API server does not say.
    pub async fn find(&self, id: &str) -> Result<Option<Kept>, kube::Error> {
        let kept = lookup::get(&self.api, &self.name(id)).await?;
        let data: Option<Data> = kept.and_then(|kept| serde_json::from_value(kept.data?.0).ok());
        Ok(data.and_then(|Data { component, image, config }| {
            let origin = match (component, image) {
                (Some(component), None) => Origin::Component(BASE64_STANDARD.decode(component).ok()?),
                (None, Some(image)) => Origin::Image(image),
                _ => return None,
            };
            Some(Kept { origin, config })
        }))
    }

    /// Keeps a revision that serves, and forgets the oldest ones beyond `limit` others; never that of the id `beside`.
    ///
    /// # Errors
    /// If the API server refuses; nothing depends on it but falling back.
    pub async fn keep(&self, material: &Material, beside: Option<&str>, limit: usize) -> Result<(), kube::Error> {
        let name = self.name(&material.id());
        // Without their components, which are large.
        let mut kept = self.api.list_metadata(&self.all()).await?.items;
        if !kept.iter().any(|revision| revision.name_any() == name) {
            let image = material.plugin.image.as_ref().map(|image| image.pinned.clone());
            let component = image.is_none().then(|| BASE64_STANDARD.encode(&material.plugin.bytes));
            let data = Data { component, image, config: material.config.clone() };
            let revision = ControllerRevision {
                metadata: ObjectMeta {
                    name: Some(name.clone()),
                    labels: Some(BTreeMap::from([(RECONCILER_LABEL.to_owned(), self.identity.label().to_owned())])),
                    ..ObjectMeta::default()
                },
                // The kind wants a number that grows.
                revision: Timestamp::now().as_second(),
                data: serde_json::to_value(data).ok().map(RawExtension),
            };
            self.api.create(&PostParams::default(), &revision).await?;
        }
        let beside = beside.map(|beside| self.name(beside));
        kept.retain(|revision| revision.name_any() != name && Some(revision.name_any()) != beside);
        // Nobody changes them, so the newest version is that of the newest one.
        let version = |revision: &PartialObjectMeta<ControllerRevision>| {
            revision.resource_version().and_then(|it| it.parse::<u64>().ok())
        };
        kept.sort_by_key(|revision| std::cmp::Reverse(version(revision)));
        for old in kept.iter().skip(limit) {
            self.api.delete(&old.name_any(), &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// Forgets all of them: their reconciler has come to its end.
    ///
    /// # Errors
    /// If the API server refuses.
    pub async fn remove_all(&self) -> Result<(), kube::Error> {
        for revision in self.api.list_metadata(&self.all()).await?.items {
            let name = revision.name_any();
            match self.api.delete(&name, &DeleteParams::default()).await {
                Err(error) if !lookup::is_absent(&error, &name) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn all(&self) -> ListParams {
        ListParams::default().labels(&format!("{RECONCILER_LABEL}={}", self.identity.label()))
    }

    fn name(&self, id: &str) -> String {
        format!("{}-{id}", self.identity.label())
    }
}
