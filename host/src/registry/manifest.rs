//! The manifest of a plugin: the artifact format for WebAssembly of the CNCF's TAG Runtime, in the image manifest of the OCI image
//! specification.
//!
//! What we write is that format: a config `application/vnd.wasm.config.v0+json` and one layer `application/wasm`. What we read is any
//! manifest with one layer of WebAssembly, also of the type that tools used before, whatever its config: the config says nothing that
//! the component does not say better. Indexes are not read, since a component is the same for all platforms.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::digest::Digest;
use crate::plugin::Surface;

/// The media type of manifests.
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// What is asked for: also the indexes, so that an error can say that it is one.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";

const CONFIG: &str = "application/vnd.wasm.config.v0+json";
const COMPONENT: &str = "application/wasm";
const COMPONENT_BEFORE: &str = "application/vnd.wasm.content.layer.v1+wasm";

/// An image manifest: as much of it as we read or write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) schema_version: u32,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) media_type: String,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

/// What says which blob is meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub(crate) annotations: serde_json::Map<String, serde_json::Value>,
}

/// Why a manifest is not that of a plugin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is an index, or something else altogether.
    #[error("it is no image manifest, as artifacts of WebAssembly have (an index of several platforms is none)")]
    NoManifest(#[source] serde_json::Error),
    /// There is not one component in it.
    #[error("it has {found} layers of WebAssembly, and a plugin has one; its layers are of type {types}")]
    Layers {
        /// How many there are.
        found: usize,
        /// What there is.
        types: String,
    },
}

impl Manifest {
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Error> {
        serde_json::from_slice(bytes).map_err(Error::NoManifest)
    }

    /// The one of a component, and the config that it names. The same component always has the same manifest, and so the same digest.
    pub(super) fn of(component: &[u8]) -> (Self, Vec<u8>) {
        let Surface { imports, exports, .. } = Surface::of(component);
        let config = json!({
            // A date is asked for, and one that says something would make another manifest each time.
            "created": "1970-01-01T00:00:00Z",
            "architecture": "wasm",
            "os": "wasip2",
            "layerDigests": [Digest::of(component)],
            "component": {"exports": exports, "imports": imports},
        });
        let config = config.to_string().into_bytes();
        let manifest = Self::with(Descriptor::of(CONFIG, &config), vec![Descriptor::of(COMPONENT, component)]);
        (manifest, config)
    }

    pub(crate) fn with(config: Descriptor, layers: Vec<Descriptor>) -> Self {
        Self { schema_version: 2, media_type: MANIFEST.to_owned(), config, layers }
    }

    /// The layer that is the component.
    pub(super) fn component(&self) -> Result<&Descriptor, Error> {
        let is_component = |layer: &&Descriptor| matches!(layer.media_type.as_str(), COMPONENT | COMPONENT_BEFORE);
        let components: Vec<_> = self.layers.iter().filter(is_component).collect();
        match components.as_slice() {
            [component] => Ok(component),
            _ => {
                // Somebody else's text, and it goes into a condition.
                let shown = |layer: &Descriptor| layer.media_type.chars().take(80).collect::<String>();
                let types: Vec<_> = self.layers.iter().take(5).map(shown).collect();
                Err(Error::Layers { found: components.len(), types: types.join(", ") })
            }
        }
    }
}

impl Descriptor {
    pub(crate) fn of(media_type: &str, bytes: &[u8]) -> Self {
        let (digest, size) = (Digest::of(bytes), bytes.len() as u64);
        Self { media_type: media_type.to_owned(), digest, size, annotations: serde_json::Map::new() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_component_has_the_manifest_of_the_standard_and_always_the_same() {
        let (manifest, config) = Manifest::of(b"\0asm\x0d\0\x01\0");
        let value = serde_json::to_value(&manifest).unwrap();
        let digest = Digest::of(b"\0asm\x0d\0\x01\0");
        assert_eq!(value["layers"], json!([{"mediaType": "application/wasm", "digest": digest, "size": 8}]));
        assert_eq!(value["config"]["mediaType"], "application/vnd.wasm.config.v0+json");
        let read = serde_json::from_slice::<Value>(&config).unwrap();
        assert_eq!((&read["architecture"], &read["layerDigests"]), (&json!("wasm"), &json!([digest])));
        assert_eq!(Manifest::of(b"\0asm\x0d\0\x01\0"), (manifest, config));
    }

    #[test]
    fn one_layer_of_webassembly_is_the_component_whatever_is_beside_it() {
        let layer = |media_type: &str| Descriptor::of(media_type, b"x");
        let manifest = |types: &[&str]| Manifest::with(layer("x/y"), types.iter().map(|it| layer(it)).collect());
        for media_type in ["application/wasm", "application/vnd.wasm.content.layer.v1+wasm"] {
            assert_eq!(manifest(&["a/b", media_type]).component().unwrap().media_type, media_type);
        }
        let error = manifest(&["application/vnd.oci.image.layer.v1.tar+gzip"]).component().unwrap_err().to_string();
        assert!(error.contains("0 layers") && error.contains("tar+gzip"), "{error}");
        assert!(manifest(&["application/wasm", "application/wasm"]).component().is_err());
    }

    #[test]
    fn an_index_is_no_manifest() {
        assert!(Manifest::read(br#"{"schemaVersion":2,"manifests":[]}"#).is_err());
    }
}
