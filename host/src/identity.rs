//! The names under which a reconciler writes to the cluster: its finalizer, its label, its field managers.
//!
//! They are derived from names, never from UIDs, so that a restored cluster finds itself again, and they can never change: an
//! object in some cluster carries them.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use crate::{
    declaration,
    object::{FIELD_MANAGER_PREFIX, ObjectKey},
};

/// The label on every child, whose value names the reconciler: what the child watches select. Internal: users must not
/// depend on it, and it never buys a delete.
pub const RECONCILER_LABEL: &str = "internal.pilothouse.dev/reconciler";

/// The annotation by which a user allows a revision to delete all children of a parent.
pub const ALLOW_PRUNE_ANNOTATION: &str = "pilothouse.dev/allow-prune";

/// The annotation on a reconciler by which a user lets a revision take over, whatever the guards of its rollout say.
pub const ALLOW_ROLLOUT_ANNOTATION: &str = "pilothouse.dev/allow-rollout";

/// The label on a reconciler that one host has to itself, whose value names the host: all others leave it alone. `pilothouse dev` sets
/// it.
pub const HOST_LABEL: &str = "pilothouse.dev/host";

/// The label on what `pilothouse dev` has made, whose value names the reconciler that it is for.
pub const DEV_LABEL: &str = "pilothouse.dev/dev";

/// The label on a child that cannot have an owner reference, since it is in another namespace than its parent or of cluster
/// scope (`C61`): the parent's UID. It finds such children, and proves nothing.
pub const PARENT_LABEL: &str = "internal.pilothouse.dev/parent-uid";

/// The annotation beside [`PARENT_LABEL`]: the parent's UID, and what the child itself is, so that a copy of the child is not
/// taken for it.
pub const BINDING_ANNOTATION: &str = "internal.pilothouse.dev/binding";

/// The label on a child of a wave after the first: which one, as a number. It lets cleanup go the way back.
pub const WAVE_LABEL: &str = "internal.pilothouse.dev/wave";

/// The annotation on a parent that lists its children without an owner reference: written before they are made, and the
/// proof that they may be deleted.
pub const RECORD_ANNOTATION: &str = "internal.pilothouse.dev/remote-children";

/// The value of [`BINDING_ANNOTATION`]. `kind` as `Kind.group`.
pub fn binding(parent_uid: &str, kind: &str, child: &ObjectKey) -> String {
    format!("{parent_uid} {kind} {child}")
}

/// The label on every child that says what we last applied: the version of its scheme, and a digest of what the plugin wanted. It lets
/// a host that remembers nothing see that there is nothing to do. Internal, as the other one is. Not an annotation: a Deployment counts
/// its generation up for those, and copies them to its ReplicaSets.
pub const APPLIED_LABEL: &str = "internal.pilothouse.dev/applied";

/// The domain of our labels, annotations and finalizers: plugins may not use it, nor one below it.
pub const DOMAIN: &str = "pilothouse.dev";

/// The finalizer on a reconciler, since its parents may carry finalizers.
pub const RELEASE_FINALIZER: &str = "pilothouse.dev/release";

/// Whether a finalizer is of this host: that of some reconciler on its parents, or the one on reconcilers.
pub fn is_finalizer(name: &str) -> bool {
    let slug = name.strip_prefix(DOMAIN).and_then(|rest| rest.strip_prefix('/'));
    let of_parents = |slug: &str| {
        let hash = slug.rsplit_once('-').map(|(_, hash)| hash).unwrap_or_default();
        slug.starts_with(['c', 'n']) && slug.get(1..2) == Some("-") && hash.len() == 8 && is_hex(hash)
    };
    name == RELEASE_FINALIZER || slug.is_some_and(of_parents)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Who a reconciler is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    kind: &'static str,
    key: ObjectKey,
    /// `c-<name, at most 40>-<8 hex>`, or `n-…` for one in a namespace: valid as a label value and as the name part of a finalizer.
    slug: String,
}

impl Identity {
    /// The identity of the reconciler of that name.
    pub fn of(key: &ObjectKey) -> Self {
        let (kind, namespace, name) = (declaration::kind(key), key.namespace.as_deref(), key.name.as_str());
        let hash = short_hash(&[kind, namespace.unwrap_or_default(), name], 4);
        let letter = if namespace.is_some() { 'n' } else { 'c' };
        // Names are DNS subdomains, so every byte is ASCII; a cut may not end in a separator.
        let short = name.get(..40).unwrap_or(name).trim_end_matches(['-', '.']);
        Self { kind, key: key.clone(), slug: format!("{letter}-{short}-{hash}") }
    }

    /// The value of [`RECONCILER_LABEL`].
    pub fn label(&self) -> &str {
        &self.slug
    }

    /// The finalizer on the parents of this reconciler.
    pub fn finalizer(&self) -> String {
        format!("{DOMAIN}/{}", self.slug)
    }

    /// The field manager of one parent's children and status.
    pub fn field_manager(&self, parent_group: &str, parent_kind: &str, parent: &ObjectKey) -> String {
        let namespace = self.key.namespace.as_deref().unwrap_or_default();
        let parent_namespace = parent.namespace.as_deref().unwrap_or_default();
        let parts =
            [self.kind, namespace, &self.key.name, parent_group, parent_kind, parent_namespace, parent.name.as_str()];
        format!("{FIELD_MANAGER_PREFIX}{}", short_hash(&parts, 16))
    }
}

/// The value of [`APPLIED_LABEL`]. The scheme is the rules by which a plugin's answer becomes what is sent: a host that sends
/// something else for the same answer has to count it up.
pub fn applied(digest: &[u8]) -> String {
    format!("1-{}", hex(digest, 16))
}

/// The first `bytes` of the SHA-256 of the parts, in hex. No part of a Kubernetes name holds a line break.
fn short_hash(parts: &[&str], bytes: usize) -> String {
    hex(&Sha256::digest(parts.join("\n")), bytes)
}

/// The first `bytes` of a digest, in hex.
pub fn hex(digest: &[u8], bytes: usize) -> String {
    digest.iter().take(bytes).fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable_and_within_kubernetes_limits() {
        let cluster = |name: &str| Identity::of(&ObjectKey { namespace: None, name: name.to_owned() });
        let identity = cluster("myapp");
        assert_eq!(identity.finalizer(), "pilothouse.dev/c-myapp-5c40a47d");
        assert!(is_finalizer(&identity.finalizer()) && is_finalizer(RELEASE_FINALIZER));
        for foreign in [
            "pilothouse.dev/x",
            "pilothouse.dev/c-myapp-5c40a47",
            "other.dev/c-myapp-5c40a47d",
            "orphan",
            "pilothouse.dev/cx-5c40a47d",
        ] {
            assert!(!is_finalizer(foreign), "{foreign}");
        }
        let long = cluster(&"a.".repeat(100));
        assert!(is_finalizer(&long.finalizer()));
        assert!(long.label().len() <= 63);
        assert!(!long.label().contains(".-"));
        let parent = ObjectKey { namespace: Some("n".into()), name: "p".into() };
        let manager = identity.field_manager("mygroup.example.com", "MyApp", &parent);
        assert!(manager.len() <= 128);
        let other = ObjectKey { namespace: Some("n".into()), name: "q".into() };
        assert_ne!(manager, identity.field_manager("mygroup.example.com", "MyApp", &other));
        let in_namespace = Identity::of(&ObjectKey { namespace: Some("n".into()), name: "myapp".into() });
        assert_eq!(in_namespace.finalizer(), "pilothouse.dev/n-myapp-3e3a59b8");
        assert_ne!(manager, in_namespace.field_manager("mygroup.example.com", "MyApp", &parent));
    }
}
