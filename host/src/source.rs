//! Where plugins come from: so far a ConfigMap, read as the host.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};

use crate::crd::{ConfigMapRef, PluginSource};

/// Why there are no bytes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
}

/// The bytes of a plugin.
///
/// # Errors
/// If they are not where `source` says.
pub async fn fetch(client: &Client, source: &PluginSource) -> Result<Vec<u8>, Error> {
    let reference = &source.config_map;
    let api = Api::<ConfigMap>::namespaced(client.clone(), &reference.namespace);
    let config_map = match api.get_opt(&reference.name).await {
        Ok(Some(config_map)) => config_map,
        Ok(None) => return Err(Error::NoConfigMap(reference.clone())),
        Err(source) => return Err(Error::Read { reference: reference.clone(), source: source.into() }),
    };
    let bytes = config_map.binary_data.and_then(|mut data| data.remove(&reference.key));
    bytes.map(|bytes| bytes.0).ok_or_else(|| Error::NoKey(reference.clone()))
}
