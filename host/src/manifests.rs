//! `pilothouse manifests`: what has to be in the cluster for a plugin, from what the plugin says of itself. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use crate::{
    crd::{Grants, LocalSecretRef, SecretRef, ServiceAccountRef},
    kinds,
    plugin::{Description, Plugin, describe::KindName},
    selection::is_secret,
};

/// What cannot be told from the plugin.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the reconciler, and of all that belongs to it.
    pub name: String,
    /// Where its service account and its plugin are.
    pub namespace: String,
    /// As whom the host runs.
    pub host: ServiceAccountRef,
    /// Whether it is a `Reconciler`, for its namespace only, and not a `ClusterReconciler`.
    pub namespaced: bool,
    /// The image that the plugin is in, if it is not to be in a ConfigMap.
    pub image: Option<String>,
    /// The file that the plugin is in, on the machine of the host, if it is not to be in a ConfigMap.
    pub path: Option<PathBuf>,
    /// The Secrets in its namespace with credentials for the registry of the image.
    pub pull_secrets: Vec<String>,
    /// Leave out the CustomResourceDefinitions and what comes with them, which somebody else installs.
    pub skip_crds: bool,
    /// These and nothing else.
    pub only_crds: bool,
    /// What is granted to the plugin: `spec.grants`.
    pub grants: Option<Granted>,
}

/// `spec.grants`, read.
#[derive(Clone, Debug)]
pub struct Granted {
    /// As it was written.
    spec: Value,
    /// The Secrets that the host reads for it.
    secrets: Vec<SecretRef>,
    /// The Secrets that the plugin may see, as its account.
    readable: Vec<SecretRef>,
}

impl Granted {
    /// Reads `spec.grants` of a reconciler from YAML; in a namespace, if it is for a `Reconciler`.
    ///
    /// # Errors
    /// If it is not what the API of that reconciler has.
    pub fn read(yaml: &str, namespace: Option<&str>) -> Result<Self, serde_saphyr::Error> {
        let grants = match namespace {
            Some(namespace) => serde_saphyr::from_str::<Grants<LocalSecretRef>>(yaml)?.within(namespace),
            None => serde_saphyr::from_str(yaml)?,
        };
        let (secrets, readable) = (grants.secrets().cloned().collect(), grants.readable_secrets(&[]));
        Ok(Self { spec: serde_saphyr::from_str(yaml)?, secrets, readable })
    }
}

/// The right to look at these Secrets, for each of their namespaces.
fn to_look_at(secrets: &[SecretRef]) -> BTreeMap<&str, Value> {
    let mut names = BTreeMap::<_, BTreeSet<_>>::new();
    for secret in secrets {
        names.entry(secret.namespace.as_str()).or_default().insert(secret.name.as_str());
    }
    let right = |names| json!({"apiGroups": [""], "resources": ["secrets"], "resourceNames": names, "verbs": ["get", "list", "watch"]});
    names.into_iter().map(|(namespace, names)| (namespace, right(names))).collect()
}

/// A ConfigMap holds at most this many bytes, counted decoded (Kubernetes documentation, "ConfigMaps").
const CONFIG_MAP_LIMIT: usize = 1 << 20;

/// Why there are no manifests.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plugin is too large for a ConfigMap.
    #[error(
        "the plugin has {0} bytes, and a ConfigMap holds at most {CONFIG_MAP_LIMIT}; build it for size, or push it to a registry and give \
         --image"
    )]
    TooLarge(usize),
}

/// The manifests of a plugin whose component is `bytes`, in the order in which they can be applied.
///
/// # Errors
/// If the component does not fit into a ConfigMap.
pub fn manifests(plugin: &Plugin, bytes: &[u8], options: &Options) -> Result<Vec<Value>, Error> {
    let Options { name, namespace, host, namespaced, skip_crds, grants, .. } = options;
    let (source, right, object) = source(bytes, options)?;
    let description = plugin.description();
    let mut manifests = Vec::new();
    if !skip_crds {
        manifests.extend(description.crds.iter().cloned());
        manifests.extend(seeing_out(description, host));
    }
    if options.only_crds {
        return Ok(manifests);
    }
    // A tenant has a namespace.
    if !namespaced {
        manifests.push(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}));
    }
    manifests.push(json!({
        "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": name, "namespace": namespace},
        // It is only impersonated: nobody needs its token.
        "automountServiceAccountToken": false,
    }));
    let account = ServiceAccountRef { namespace: namespace.clone(), name: name.clone() };
    let mut rights = rights_of_account(description);
    for (place, right) in grants.iter().flat_map(|granted| to_look_at(&granted.readable)) {
        if *namespaced {
            rights.push(right);
        } else {
            manifests.extend(role(place, name, &[right], &account));
        }
    }
    manifests.extend(if *namespaced {
        role(namespace, name, &rights, &account)
    } else {
        cluster_role(name, &rights, &account)
    });
    // What the host itself needs: to act as the account, to read the plugin and the credentials, and to keep revisions. Those of a tenant
    // are kept where the host is.
    let mut rights = vec![
        json!({"apiGroups": [""], "resources": ["serviceaccounts"], "resourceNames": [name], "verbs": ["impersonate"]}),
    ];
    if !namespaced {
        let verbs = ["get", "list", "create", "delete"];
        rights.push(json!({"apiGroups": ["apps"], "resources": ["controllerrevisions"], "verbs": verbs}));
    }
    rights.extend(right);
    for (place, right) in grants.iter().flat_map(|granted| to_look_at(&granted.secrets)) {
        if place == namespace {
            rights.push(right);
        } else {
            manifests.extend(role(place, &format!("{name}:host"), &[right], host));
        }
    }
    manifests.extend(role(namespace, &format!("{name}:host"), &rights, host));
    manifests.extend(object);
    let mut reconciler = if *namespaced {
        json!({
            "apiVersion": "pilothouse.dev/v1alpha1", "kind": "Reconciler",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"plugin": source, "serviceAccount": name},
        })
    } else {
        json!({
            "apiVersion": "pilothouse.dev/v1alpha1", "kind": "ClusterReconciler",
            "metadata": {"name": name},
            "spec": {
                "plugin": source,
                "serviceAccount": {"namespace": namespace, "name": name},
            },
        })
    };
    if let Some(granted) = grants {
        reconciler["spec"]["grants"] = granted.spec.clone();
    }
    manifests.push(reconciler);
    Ok(manifests)
}

/// The host's own right to see parents of this kind out, when the account has none any more: in a namespace that is being deleted, where
/// its roles go first.
fn seeing_out(description: &Description, host: &ServiceAccountRef) -> [Value; 2] {
    let (group, parents) = resource(&description.parent, &description.crds);
    let rules = [
        json!({"apiGroups": [group], "resources": [parents], "verbs": ["get", "list", "watch", "patch"]}),
        json!({"apiGroups": [group], "resources": [format!("{parents}/status")], "verbs": ["patch"]}),
    ];
    cluster_role(format!("host:{parents}.{group}").trim_end_matches('.'), &rules, host)
}

/// `spec.plugin`, the host's right to what it names, and the object that it names.
fn source(bytes: &[u8], options: &Options) -> Result<(Value, Option<Value>, Option<Value>), Error> {
    let Options { name, namespace, namespaced, image, path, pull_secrets, .. } = options;
    if let Some(path) = path {
        return Ok((json!({"path": path}), None, None));
    }
    let reference = |name: &str| {
        if *namespaced { json!({"name": name}) } else { json!({"namespace": namespace, "name": name}) }
    };
    let right = |resource: &str, names: &[String], verbs: &[&str]| json!({"apiGroups": [""], "resources": [resource], "resourceNames": names, "verbs": verbs});
    if let Some(image) = image {
        if pull_secrets.is_empty() {
            return Ok((json!({"image": image}), None, None));
        }
        let secrets: Vec<_> = pull_secrets.iter().map(|secret| reference(secret)).collect();
        let source = json!({"image": image, "pullSecrets": secrets});
        return Ok((source, Some(right("secrets", pull_secrets, &["get"])), None));
    }
    if bytes.len() > CONFIG_MAP_LIMIT {
        return Err(Error::TooLarge(bytes.len()));
    }
    let map = plugin_name(name);
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": map, "namespace": namespace},
        "binaryData": {"plugin.wasm": BASE64_STANDARD.encode(bytes)},
    });
    let right = right("configmaps", std::slice::from_ref(&map), &["get", "list", "watch"]);
    Ok((json!({"configMap": reference(&map)}), Some(right), Some(object)))
}

/// A ClusterRole, and who has it.
fn cluster_role(name: &str, rules: &[Value], account: &ServiceAccountRef) -> [Value; 2] {
    let name = format!("pilothouse:{name}");
    [
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules,
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account.name, "namespace": account.namespace}],
        }),
    ]
}

/// A Role in a namespace, and who has it.
fn role(namespace: &str, name: &str, rules: &[Value], account: &ServiceAccountRef) -> [Value; 2] {
    let metadata = json!({"name": format!("pilothouse:{name}"), "namespace": namespace});
    [
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": account.name, "namespace": account.namespace}],
        }),
    ]
}

fn plugin_name(name: &str) -> String {
    format!("{name}-plugin")
}

/// The rights of the service account: no more than its reconciles need.
fn rights_of_account(description: &Description) -> Vec<Value> {
    let (group, parents) = resource(&description.parent, &description.crds);
    let mut rules = vec![
        json!({"apiGroups": [group], "resources": [parents], "verbs": ["get", "list", "watch", "patch"]}),
        json!({"apiGroups": [group], "resources": [format!("{parents}/status")], "verbs": ["patch"]}),
        // Owner references that block the parent's deletion ask for this, where admission checks it (`C63`).
        json!({"apiGroups": [group], "resources": [format!("{parents}/finalizers")], "verbs": ["update"]}),
    ];
    rules.extend(description.children.iter().map(|kind| {
        let (group, children) = resource(kind, &description.crds);
        json!({"apiGroups": [group], "resources": [children], "verbs": ["get", "list", "watch", "create", "patch", "delete"]})
    }));
    // Secrets are seen one by one, as they are granted.
    let is_seen = |kind: &&KindName| !is_secret(kind) && !description.children.contains(kind);
    rules.extend(description.related.iter().filter(is_seen).map(|kind| {
        let (group, related) = resource(kind, &description.crds);
        json!({"apiGroups": [group], "resources": [related], "verbs": ["get", "list", "watch"]})
    }));
    rules.extend(description.rights.iter().filter_map(|rule| serde_json::to_value(rule).ok()));
    rules
}

/// Group and plural name of a kind: from its CRD if the plugin brings it, else by the rule that all built-in kinds follow.
fn resource(kind: &KindName, crds: &[Value]) -> (String, String) {
    let kind = kinds::served(kind, crds).unwrap_or_else(|| kinds::assumed(kind));
    (kind.api.group, kind.api.plural)
}
