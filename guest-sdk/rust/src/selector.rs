//! Which objects a plugin needs to see although it does not own them.

use crate::raw::types;

/// Objects that a plugin needs to see: all of a kind, narrowed down by namespace, names and labels.
///
/// ```
/// # use pilothouse_sdk::Selector;
/// Selector::of("v1", "Secret").namespace("team").name("database");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Selector(types::Selector);

impl Selector {
    /// All objects of a kind that the reconciler may see. The kind has to be listed with
    /// [`Describe::related`](crate::Describe::related).
    pub fn of(api_version: impl Into<String>, kind: impl Into<String>) -> Self {
        let (namespace, names, labels) = (None, Vec::new(), String::new());
        Self(types::Selector { api_version: api_version.into(), kind: kind.into(), namespace, names, labels })
    }

    /// Only those in this namespace.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.0.namespace = Some(namespace.into());
        self
    }

    /// Only this name; more names may be added.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.0.names.push(name.into());
        self
    }

    /// Only those with these labels, written as for `kubectl -l`.
    pub fn labels(mut self, labels: impl Into<String>) -> Self {
        self.0.labels = labels.into();
        self
    }
}

impl From<Selector> for types::Selector {
    fn from(selector: Selector) -> Self {
        selector.0
    }
}
