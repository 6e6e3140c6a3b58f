//! Where plugins come from: an image in a registry, verified and kept; a ConfigMap, read as the host; or a file, for development.

use std::{
    fs::File,
    io::{Cursor, Read as _},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client, ResourceExt, runtime::watcher};
use notify::Watcher as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::{OnceCell, mpsc};

use crate::{
    cache::Cache,
    crd::{ConfigMapRef, ImageStatus, PluginSource, PullPolicy, SecretRef, Verify},
    identity, lookup,
    registry::{self, Credentials, Digest, Reference, Registries, Repository},
    signature::{
        self, PublicKey,
        policy::{Decision, Policy},
    },
    telemetry,
    watch::watch,
};

/// How long a file that changes is left alone: whoever writes it may not have finished.
const SETTLE: Duration = Duration::from_millis(50);

/// How often a tag is asked for that may mean something else by now.
const AGAIN: Duration = Duration::from_mins(10);
/// Where the cache keeps components, by the digest of their manifest.
const COMPONENTS: &str = "components";
/// Where it keeps that one was verified, by the digest of its manifest and by what was asked of it.
const VERIFIED: &str = "verified";
/// The key of a Secret of type `kubernetes.io/dockerconfigjson`.
const DOCKER_CONFIG: &str = ".dockerconfigjson";

/// Why there are no bytes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is not one source. The CRD has a rule against it, which an old API server may not know.
    #[error("spec.plugin must have exactly one of image, configMap and path")]
    NotOne,
    /// There is no such ConfigMap.
    #[error("there is no ConfigMap {namespace}/{name} (spec.plugin.configMap)", namespace = .0.namespace, name = .0.name)]
    NoConfigMap(ConfigMapRef),
    /// It has no such key.
    #[error(
        "ConfigMap {namespace}/{name} has no key {key:?} in its binaryData (spec.plugin.configMap.key)",
        namespace = .0.namespace, name = .0.name, key = .0.key
    )]
    NoKey(ConfigMapRef),
    /// It cannot be read.
    #[error(
        "failed to read ConfigMap {namespace}/{name}; the host needs `get` on it (see `pilothouse manifests`)",
        namespace = reference.namespace, name = reference.name
    )]
    Read {
        /// Which one.
        reference: ConfigMapRef,
        /// Why.
        source: Box<kube::Error>,
    },
    /// Files are for development.
    #[error("spec.plugin.path is for development, and this host does not allow it (--allow-plugin-paths)")]
    PathsNotAllowed,
    /// The file cannot be read.
    #[error("failed to read {} (spec.plugin.path) on the machine of the host", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It names no image.
    #[error("spec.plugin.image")]
    Reference(#[source] registry::reference::Error),
    /// The registry may not be asked, and the host does not have it.
    #[error("{0} is not here, and spec.plugin.pullPolicy is Never")]
    NotPresent(String),
    /// The registry does not give it.
    #[error("failed to pull {image}")]
    Pull {
        /// What.
        image: String,
        /// Why.
        source: Box<registry::Error>,
    },
    /// A pull secret cannot be used.
    #[error(
        "Secret {}/{} (spec.plugin.pullSecrets) {what}", .reference.namespace, .reference.name
    )]
    Secret {
        /// Which one.
        reference: SecretRef,
        /// What is wrong with it.
        what: &'static str,
        /// Why.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The key is none.
    #[error("spec.plugin.verify.cosign.publicKey is no public key")]
    Key(#[source] signature::key::Error),
    /// This host takes nothing from there.
    #[error("this host takes no plugins from {0} (--verification-policy)")]
    Denied(Repository),
    /// It is not signed as it has to be.
    #[error("{image} is not verified")]
    NotVerified {
        /// What.
        image: String,
        /// Why.
        source: Box<signature::Error>,
    },
}

impl Error {
    /// A stable name: the reason of the condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Pull { .. } => "PullFailed",
            Self::Denied(_) | Self::NotVerified { .. } | Self::Key(_) => "NotVerified",
            _ => "SourceUnavailable",
        }
    }

    /// Whether the plugin was found, and is not trusted.
    pub fn is_of_verification(&self) -> bool {
        self.reason() == "NotVerified"
    }
}

/// The bytes of a plugin, and where they came from.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// The component.
    pub bytes: Vec<u8>,
    /// The image that it is of.
    pub image: Option<Image>,
}

/// From somewhere else than an image.
impl From<Vec<u8>> for Fetched {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, image: None }
    }
}

/// An image that was pulled.
#[derive(Clone, Debug)]
pub struct Image {
    /// As the spec names it.
    pub reference: String,
    /// The same by the digest of its manifest.
    pub pinned: String,
    /// That digest.
    pub digest: String,
    /// Whether somebody had to have signed it.
    pub verified: bool,
    /// Its entry in the cache, which stays as long as this does.
    pub entry: Option<Arc<File>>,
}

/// All places that plugins may come from.
#[derive(Clone)]
pub struct Sources {
    /// A client that acts as the host.
    pub client: Client,
    /// Registries.
    pub registries: Registries,
    /// What was pulled before.
    pub cache: Option<Arc<Cache>>,
    /// Which images need which signatures.
    pub policy: Arc<Policy>,
    /// Whether files of this machine may be read.
    pub allow_paths: bool,
}

impl Sources {
    /// The plugin that a reconciler of this namespace, or of none, names. `known` is what its image was before.
    ///
    /// # Errors
    /// If it is not where `source` says, or not signed as it has to be.
    pub async fn fetch(
        &self,
        namespace: Option<&str>,
        source: &PluginSource,
        known: Option<&ImageStatus>,
    ) -> Result<Fetched, Error> {
        let bytes = match (&source.image, &source.config_map, &source.path) {
            (Some(image), None, None) => return self.fetch_image(namespace, source, image, known).await,
            (None, Some(reference), None) => fetch_config_map(&self.client, reference).await?,
            (None, None, Some(_)) if !self.allow_paths => return Err(Error::PathsNotAllowed),
            (None, None, Some(path)) => {
                let read = tokio::fs::read(path).await;
                read.map_err(|source| Error::File { path: path.clone(), source })?
            }
            _ => return Err(Error::NotOne),
        };
        Ok(bytes.into())
    }

    /// Tag → digest → verified → the bytes of that digest. What the host has is asked of nobody.
    async fn fetch_image(
        &self,
        namespace: Option<&str>,
        source: &PluginSource,
        image: &str,
        known: Option<&ImageStatus>,
    ) -> Result<Fetched, Error> {
        let reference: Reference = image.parse().map_err(Error::Reference)?;
        let repository = reference.repository();
        let keys = self.keys(repository, source.verify.as_ref())?;
        let login = Login { sources: self, secrets: &source.pull_secrets, read: OnceCell::new() };
        let digest = self.resolve(source, &reference, known, &login).await?;
        let pinned = reference.clone().pinned(digest.clone());
        self.verify(namespace, repository, &digest, &keys, &login).await?;
        let (bytes, entry) = self.component(namespace, source, &pinned, &digest, &login).await?;
        let image = Image {
            reference: image.to_owned(),
            pinned: pinned.to_string(),
            digest: digest.to_string(),
            verified: !keys.is_empty(),
            entry: entry.map(Arc::new),
        };
        Ok(Fetched { bytes, image: Some(image) })
    }

    /// The keys that have to have signed what comes from there: one of each list.
    fn keys(&self, repository: &Repository, verify: Option<&Verify>) -> Result<Vec<Vec<PublicKey>>, Error> {
        let of_host = match self.policy.decide(repository) {
            Decision::Required(keys) => Some(keys.clone()),
            Decision::NotRequired => None,
            Decision::Denied => return Err(Error::Denied(repository.clone())),
        };
        let of_reconciler = verify.map(|verify| PublicKey::read(&verify.cosign.public_key).map(|key| vec![key]));
        let of_reconciler = of_reconciler.transpose().map_err(Error::Key)?;
        Ok(of_host.into_iter().chain(of_reconciler).collect())
    }

    async fn resolve(
        &self,
        source: &PluginSource,
        reference: &Reference,
        known: Option<&ImageStatus>,
        login: &Login<'_>,
    ) -> Result<Digest, Error> {
        if let Some(digest) = reference.digest() {
            return Ok(digest.clone());
        }
        let known = known.filter(|known| Some(&known.reference) == source.image.as_ref());
        let known = known.and_then(|known| Digest::try_from(known.digest.clone()).ok());
        match (pull_policy(source.pull_policy, reference), known) {
            (PullPolicy::IfNotPresent | PullPolicy::Never, Some(known)) => Ok(known),
            (PullPolicy::Never, None) => Err(Error::NotPresent(reference.to_string())),
            _ => {
                let credentials = login.credentials().await?;
                let resolved = self.registries.resolve(reference, credentials).await;
                resolved.map_err(|source| Error::Pull { image: reference.to_string(), source: Box::new(source) })
            }
        }
    }

    async fn verify(
        &self,
        namespace: Option<&str>,
        repository: &Repository,
        digest: &Digest,
        keys: &[Vec<PublicKey>],
        login: &Login<'_>,
    ) -> Result<(), Error> {
        for keys in keys {
            // By all that was asked: another key, and it is asked anew.
            let asked = {
                let names: Vec<_> = keys.iter().map(PublicKey::fingerprint).collect();
                identity::hex(&Sha256::digest(format!("{repository} {}", names.join(" "))), 32)
            };
            let key = format!("{}-{asked}", digest.hex());
            if self.find(VERIFIED, &key).await.is_some() {
                continue;
            }
            let credentials = login.credentials().await?;
            let verified = signature::verify(&self.registries, repository, digest, keys, credentials).await;
            let image = || format!("{repository}@{digest}");
            verified.map_err(|source| Error::NotVerified { image: image(), source: Box::new(source) })?;
            self.keep(VERIFIED, namespace, &key, image().into_bytes()).await;
        }
        Ok(())
    }

    async fn component(
        &self,
        namespace: Option<&str>,
        source: &PluginSource,
        pinned: &Reference,
        digest: &Digest,
        login: &Login<'_>,
    ) -> Result<(Vec<u8>, Option<File>), Error> {
        if let Some(mut entry) = self.find(COMPONENTS, digest.hex()).await {
            let mut bytes = Vec::new();
            match entry.read_to_end(&mut bytes) {
                Ok(_) => return Ok((bytes, Some(entry))),
                Err(error) => tracing::warn!("cannot read what was pulled, it is pulled again: {error}"),
            }
        }
        if pull_policy(source.pull_policy, pinned) == PullPolicy::Never {
            return Err(Error::NotPresent(pinned.to_string()));
        }
        let credentials = login.credentials().await?;
        let pulled = self.registries.pull(pinned.repository(), digest, credentials).await;
        let pulled = pulled.map_err(|source| Error::Pull { image: pinned.to_string(), source: Box::new(source) })?;
        tracing::info!(image = %pinned, bytes = pulled.bytes.len(), "pulled the plugin");
        self.keep(COMPONENTS, namespace, digest.hex(), pulled.bytes.clone()).await;
        let entry = self.find(COMPONENTS, digest.hex()).await;
        Ok((pulled.bytes, entry))
    }

    async fn find(&self, shelf: &'static str, key: &str) -> Option<File> {
        let (cache, key) = (self.cache.clone()?, key.to_owned());
        tokio::task::spawn_blocking(move || cache.find(shelf, &key)).await.ok()?
    }

    async fn keep(&self, shelf: &'static str, namespace: Option<&str>, key: &str, content: Vec<u8>) {
        let Some(cache) = self.cache.clone() else { return };
        let (namespace, key) = (namespace.map(str::to_owned), key.to_owned());
        let keep = move || cache.keep(shelf, namespace.as_deref(), &key, &mut Cursor::new(content));
        if let Ok(Err(error)) = tokio::task::spawn_blocking(keep).await {
            tracing::warn!("the next start asks the registry again: {}", telemetry::chain(&error));
        }
    }
}

/// What the registry is asked with, read when it is asked.
struct Login<'a> {
    sources: &'a Sources,
    secrets: &'a [SecretRef],
    read: OnceCell<Credentials>,
}

impl Login<'_> {
    async fn credentials(&self) -> Result<&Credentials, Error> {
        self.read.get_or_try_init(|| self.read_secrets()).await
    }

    async fn read_secrets(&self) -> Result<Credentials, Error> {
        let mut credentials = Credentials::default();
        for reference in self.secrets {
            let wrong = |what, source| Error::Secret { reference: reference.clone(), what, source };
            let api = Api::<Secret>::namespaced(self.sources.client.clone(), &reference.namespace);
            let secret = lookup::get(&api, &reference.name).await.map_err(|error| {
                wrong("cannot be read; the host needs `get` on it (see `pilothouse manifests`)", Some(error.into()))
            })?;
            let mut data = secret.ok_or_else(|| wrong("is not there", None))?.data.unwrap_or_default();
            let config = data.remove(DOCKER_CONFIG).and_then(|config| String::from_utf8(config.0).ok());
            let config = config.ok_or_else(|| wrong("is not of type kubernetes.io/dockerconfigjson", None))?;
            credentials.add(&config).map_err(|error| wrong("cannot be understood", Some(error.into())))?;
        }
        Ok(credentials)
    }
}

/// As the kubelet chooses it.
fn pull_policy(said: Option<PullPolicy>, reference: &Reference) -> PullPolicy {
    said.unwrap_or_else(|| match (reference.digest(), reference.tag()) {
        (None, Some("latest") | None) => PullPolicy::Always,
        _ => PullPolicy::IfNotPresent,
    })
}

async fn fetch_config_map(client: &Client, reference: &ConfigMapRef) -> Result<Vec<u8>, Error> {
    let api = Api::<ConfigMap>::namespaced(client.clone(), &reference.namespace);
    let config_map = match lookup::get(&api, &reference.name).await {
        Ok(Some(config_map)) => config_map,
        Ok(None) => return Err(Error::NoConfigMap(reference.clone())),
        Err(source) => return Err(Error::Read { reference: reference.clone(), source: source.into() }),
    };
    component_of(config_map, reference)
}

fn component_of(map: ConfigMap, reference: &ConfigMapRef) -> Result<Vec<u8>, Error> {
    let bytes = map.binary_data.and_then(|mut data| data.remove(&reference.key));
    bytes.map(|bytes| bytes.0).ok_or_else(|| Error::NoKey(reference.clone()))
}

/// The plugin that one reconciler names, followed: its bytes, and when they may be others.
///
/// A ConfigMap comes with the watch that tells of its changes, so it is read once, and not again because the watch begins with it.
pub struct Source {
    sources: Sources,
    named: PluginSource,
    changes: Changes,
    /// The ConfigMap as the watch has shown it, until it is fetched.
    shown: Option<Sight>,
    /// Whether the watch has shown anything yet.
    is_known: bool,
}

/// What is seen of a plugin, without end.
type Changes = Pin<Box<dyn Stream<Item = Sight> + Send>>;

enum Sight {
    /// There may be other bytes.
    Changed,
    /// This ConfigMap, as it is now.
    Map(Box<ConfigMap>),
    /// There is no such ConfigMap.
    NoMap,
    /// It cannot be watched now, which is tried again.
    Failed(watcher::Error),
}

impl Sources {
    /// What a reconciler names, from now on.
    pub fn follow(&self, watches: &watcher::Config, named: &PluginSource) -> Source {
        let changes = match (&named.image, &named.config_map, &named.path) {
            (Some(image), None, None) => changes_of_image(image, named.pull_policy),
            (None, Some(reference), None) => changes_of_config_map(&self.client, watches, reference),
            (None, None, Some(path)) if self.allow_paths => changes_of_file(path).unwrap_or_else(|error| {
                tracing::warn!("cannot watch {}, it is read once: {}", path.display(), telemetry::chain(&error));
                Box::pin(stream::pending())
            }),
            _ => Box::pin(stream::pending()),
        };
        Source { sources: self.clone(), named: named.clone(), changes, shown: None, is_known: false }
    }
}

impl Source {
    /// See [`Sources::fetch`].
    ///
    /// # Errors
    /// If it is not where the reconciler says, or not signed as it has to be.
    pub async fn fetch(&mut self, namespace: Option<&str>, known: Option<&ImageStatus>) -> Result<Fetched, Error> {
        let reference = match (&self.named.image, &self.named.config_map, &self.named.path) {
            (None, Some(reference), None) => reference.clone(),
            _ => return self.sources.fetch(namespace, &self.named, known).await,
        };
        if !self.is_known {
            self.shown = self.changes.next().await;
            self.is_known = true;
        }
        match self.shown.take() {
            Some(Sight::Map(map)) => Ok(component_of(*map, &reference)?.into()),
            Some(Sight::NoMap) => Err(Error::NoConfigMap(reference)),
            // It was fetched before, or cannot be watched.
            _ => self.sources.fetch(namespace, &self.named, known).await,
        }
    }

    /// Waits until [`Self::fetch`] may get other bytes. Cancel safe.
    pub async fn changed(&mut self) {
        loop {
            match self.changes.next().await {
                Some(Sight::Failed(error)) => {
                    tracing::debug!("cannot watch the plugin's ConfigMap: {}", telemetry::chain(&error));
                }
                Some(sight) => {
                    (self.shown, self.is_known) = (Some(sight), true);
                    return;
                }
                None => std::future::pending().await,
            }
        }
    }
}

/// A registry tells nobody that a tag means something else.
fn changes_of_image(image: &str, said: Option<PullPolicy>) -> Changes {
    let Ok(reference) = image.parse::<Reference>() else { return Box::pin(stream::pending()) };
    if reference.digest().is_some() || pull_policy(said, &reference) != PullPolicy::Always {
        return Box::pin(stream::pending());
    }
    Box::pin(stream::unfold((), async |()| {
        tokio::time::sleep(AGAIN).await;
        Some((Sight::Changed, ()))
    }))
}

fn changes_of_config_map(
    client: &Client,
    watches: &watcher::Config,
    ConfigMapRef { namespace, name, .. }: &ConfigMapRef,
) -> Changes {
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let config = watches.clone().fields(&format!("metadata.name={name}"));
    // Its resource version, if it is there; none: nothing is known.
    let mut known: Option<Option<String>> = None;
    let mut listed = None;
    let changes = watch(api, config).filter_map(move |event| {
        let now = match event {
            Ok(watcher::Event::Apply(map)) => Some(map),
            Ok(watcher::Event::Delete(_)) => None,
            Ok(watcher::Event::InitDone) => listed.take(),
            Ok(watcher::Event::Init) => {
                listed = None;
                return std::future::ready(None);
            }
            Ok(watcher::Event::InitApply(map)) => {
                listed = Some(map);
                return std::future::ready(None);
            }
            Err(error) => return std::future::ready(Some(Sight::Failed(error))),
        };
        let version = Some(now.as_ref().and_then(ResourceExt::resource_version));
        let is_news = std::mem::replace(&mut known, version.clone()) != version;
        std::future::ready(is_news.then(|| now.map_or(Sight::NoMap, |map| Sight::Map(map.into()))))
    });
    Box::pin(changes)
}

/// Its folder is watched, since most tools put a new file in the place of the old one.
fn changes_of_file(path: &Path) -> Result<Changes, notify::Error> {
    let (tell, told) = mpsc::channel(1);
    let name = path.file_name().map(ToOwned::to_owned);
    let mut watcher = notify::recommended_watcher(move |event: Result<notify::Event, notify::Error>| {
        let concerns = |event: &notify::Event| {
            let reads = matches!(event.kind, notify::EventKind::Access(kind) if !is_end_of_write(kind));
            !reads && event.paths.iter().any(|changed| changed.file_name() == name.as_deref())
        };
        // What is lost may have been about it. One that waits to be heard is enough.
        if event.as_ref().map_or(true, concerns) {
            let _ = tell.try_send(());
        }
    })?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    watcher.watch(folder, notify::RecursiveMode::NonRecursive)?;
    // It watches as long as it lives.
    Ok(Box::pin(stream::unfold((told, watcher), async |(mut told, watcher)| {
        told.recv().await?;
        tokio::time::sleep(SETTLE).await;
        Some((Sight::Changed, (told, watcher)))
    })))
}

fn is_end_of_write(kind: notify::event::AccessKind) -> bool {
    kind == notify::event::AccessKind::Close(notify::event::AccessMode::Write)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_tells_when_it_is_written_and_when_it_is_replaced() {
        let folder = std::env::temp_dir().join(format!("pilothouse-source-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("plugin.wasm");
        let mut changes = changes_of_file(&path).unwrap();
        let mut changed = async || tokio::time::timeout(Duration::from_secs(10), changes.next()).await.is_ok();
        std::fs::write(&path, "one").unwrap();
        assert!(changed().await);
        std::fs::write(folder.join("new"), "two").unwrap();
        std::fs::rename(folder.join("new"), &path).unwrap();
        assert!(changed().await);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
