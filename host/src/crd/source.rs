//! Where a plugin comes from, as a reconciler says it.

use std::{fmt, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where a plugin comes from: exactly one of `image`, `configMap` and `path`.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "[has(self.image), has(self.configMap), has(self.path)].filter(given, given).size() == 1",
        "message": "give exactly one of image, configMap and path"
    },
    {
        "rule": "has(self.image) || !(has(self.pullPolicy) || has(self.pullSecrets) || has(self.verify))",
        "message": "pullPolicy, pullSecrets and verify are for an image"
    }
]))]
pub struct PluginSource {
    /// A WebAssembly artifact in a registry, as in `registry.example.com/team/plugin:1.0` or `registry.example.com/team/plugin@sha256:…`,
    /// where the digest is that of the manifest. `pilothouse push` makes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// When the registry is asked for the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullPolicy>,
    /// Secrets of type `kubernetes.io/dockerconfigjson` with the credentials for the registry. All that are for its repository are tried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pull_secrets: Vec<SecretRef>,
    /// Who has to have signed the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<Verify>,
    /// A ConfigMap that carries the component in `binaryData`. For small plugins: a ConfigMap holds at most 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapRef>,
    /// A file on the machine of the host, read again when it changes. For development: refused unless the host runs with
    /// `--allow-plugin-paths`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub path: Option<PathBuf>,
}

/// Where a plugin comes from: exactly one of `image` and `configMap`.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "has(self.image) != has(self.configMap)", "message": "give exactly one of image and configMap"},
    {
        "rule": "has(self.image) || !(has(self.pullPolicy) || has(self.pullSecrets) || has(self.verify))",
        "message": "pullPolicy, pullSecrets and verify are for an image"
    }
]))]
pub struct LocalPluginSource {
    /// A WebAssembly artifact in a registry, as in `registry.example.com/team/plugin:1.0` or `registry.example.com/team/plugin@sha256:…`,
    /// where the digest is that of the manifest. `pilothouse push` makes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// When the registry is asked for the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullPolicy>,
    /// Secrets of type `kubernetes.io/dockerconfigjson` in this namespace, with the credentials for the registry. All that are for its
    /// repository are tried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pull_secrets: Vec<LocalSecretRef>,
    /// Who has to have signed the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<Verify>,
    /// A ConfigMap in this namespace that carries the component in `binaryData`. For small plugins: a ConfigMap holds at most 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<LocalConfigMapRef>,
}

impl LocalPluginSource {
    /// The same with every reference by namespace and name.
    pub fn within(self, namespace: &str) -> PluginSource {
        let namespace = || namespace.to_owned();
        let secret = |secret: LocalSecretRef| SecretRef { namespace: namespace(), name: secret.name };
        let config_map = |map: LocalConfigMapRef| ConfigMapRef { namespace: namespace(), name: map.name, key: map.key };
        PluginSource {
            image: self.image,
            pull_policy: self.pull_policy,
            pull_secrets: self.pull_secrets.into_iter().map(secret).collect(),
            verify: self.verify,
            config_map: self.config_map.map(config_map),
            path: None,
        }
    }
}

/// When the registry is asked for an image.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub enum PullPolicy {
    /// What its tag means: when the host starts, when the reconciler changes, and every ten minutes. The default for the tag `latest`.
    Always,
    /// What its tag means: once, until `image` changes; the status says what it was. The component: if the host does not have it. The default
    /// for everything else.
    IfNotPresent,
    /// Not at all: the host has it from before.
    Never,
}

/// Who has to have signed an image.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Verify {
    /// Signatures as `cosign sign --key` and `pilothouse sign` make them.
    pub cosign: Cosign,
}

/// Signatures of cosign.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Cosign {
    /// The public key, as PEM.
    pub public_key: String,
}

/// What an image was when its registry was last asked.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ImageStatus {
    /// The image as the spec named it then.
    pub reference: String,
    /// The digest of its manifest.
    pub digest: String,
}

/// A key of a ConfigMap.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapRef {
    /// The ConfigMap's namespace.
    pub namespace: String,
    /// The ConfigMap's name.
    pub name: String,
    /// The key in its `binaryData`.
    #[serde(default = "default_key")]
    pub key: String,
}

/// A key of a ConfigMap in the same namespace.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub struct LocalConfigMapRef {
    /// The ConfigMap's name.
    pub name: String,
    /// The key in its `binaryData`.
    #[serde(default = "default_key")]
    pub key: String,
}

fn default_key() -> String {
    "plugin.wasm".to_owned()
}

/// A Secret.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretRef {
    /// The Secret's namespace.
    pub namespace: String,
    /// The Secret's name.
    pub name: String,
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A Secret in the same namespace.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub struct LocalSecretRef {
    /// The Secret's name.
    pub name: String,
}
