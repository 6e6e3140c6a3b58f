//! Where plugins come from: a ConfigMap, read as the host, or a file, for development.

use std::{path::Path, path::PathBuf, pin::Pin, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, ResourceExt as _, api::PartialObjectMeta, runtime::watcher};
use notify::Watcher as _;
use tokio::sync::mpsc;

use crate::{
    crd::{ConfigMapRef, PluginSource},
    lookup, telemetry,
    watch::watch,
};

/// How long a file that changes is left alone: whoever writes it may not have finished.
const SETTLE: Duration = Duration::from_millis(50);

/// Why there are no bytes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is not one source. The CRD has a rule against it, which an old API server may not know.
    #[error("spec.plugin must have exactly one of configMap and path")]
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
}

/// The bytes of a plugin.
///
/// # Errors
/// If they are not where `source` says.
pub async fn fetch(client: &Client, source: &PluginSource, allow_paths: bool) -> Result<Vec<u8>, Error> {
    match (&source.config_map, &source.path) {
        (Some(reference), None) => fetch_config_map(client, reference).await,
        (None, Some(_)) if !allow_paths => Err(Error::PathsNotAllowed),
        (None, Some(path)) => tokio::fs::read(path).await.map_err(|source| Error::File { path: path.clone(), source }),
        _ => Err(Error::NotOne),
    }
}

async fn fetch_config_map(client: &Client, reference: &ConfigMapRef) -> Result<Vec<u8>, Error> {
    let api = Api::<ConfigMap>::namespaced(client.clone(), &reference.namespace);
    let config_map = match lookup::get(&api, &reference.name).await {
        Ok(Some(config_map)) => config_map,
        Ok(None) => return Err(Error::NoConfigMap(reference.clone())),
        Err(source) => return Err(Error::Read { reference: reference.clone(), source: source.into() }),
    };
    let bytes = config_map.binary_data.and_then(|mut data| data.remove(&reference.key));
    bytes.map(|bytes| bytes.0).ok_or_else(|| Error::NoKey(reference.clone()))
}

/// Tells, without end, when [`fetch`] may get other bytes.
pub type Changes = Pin<Box<dyn Stream<Item = ()> + Send>>;

/// See [`Changes`].
pub fn changes(client: &Client, watches: &watcher::Config, source: &PluginSource, allow_paths: bool) -> Changes {
    match (&source.config_map, &source.path) {
        (Some(reference), None) => changes_of_config_map(client, watches, reference),
        (None, Some(path)) if allow_paths => changes_of_file(path).unwrap_or_else(|error| {
            tracing::warn!("cannot watch {}, it is read once: {}", path.display(), telemetry::chain(&error));
            Box::pin(stream::pending())
        }),
        _ => Box::pin(stream::pending()),
    }
}

fn changes_of_config_map(
    client: &Client,
    watches: &watcher::Config,
    ConfigMapRef { namespace, name, .. }: &ConfigMapRef,
) -> Changes {
    let api = Api::<PartialObjectMeta<ConfigMap>>::namespaced(client.clone(), namespace);
    let config = watches.clone().fields(&format!("metadata.name={name}"));
    let mut version = None;
    let changes = watch(api, config).filter_map(move |event| {
        let news = match event {
            // The first sight of it counts: it may have changed since it was fetched.
            Ok(watcher::Event::Apply(map) | watcher::Event::InitApply(map)) => {
                let now = map.resource_version();
                std::mem::replace(&mut version, now.clone()) != now
            }
            Ok(watcher::Event::Delete(_)) => true,
            Ok(watcher::Event::Init | watcher::Event::InitDone) => false,
            Err(error) => {
                tracing::debug!("cannot watch the plugin's ConfigMap: {}", telemetry::chain(&error));
                false
            }
        };
        std::future::ready(news.then_some(()))
    });
    Box::pin(changes.chain(stream::pending()))
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
        Some(((), (told, watcher)))
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
