//! One object by name, and what proves that it is not there. And how a kind is served.
//!
//! An API server that does not know a kind yet, or knows it no longer, answers 404 as well. Taken for the absence of the object it would
//! end a cleanup that has not begun. So only a 404 that names the object counts.

use futures::future;
use kube::{
    Api, Client, Resource,
    discovery::{self, Scope},
};
use serde::de::DeserializeOwned;

use crate::{object::Kind, plugin::describe::KindName};

/// The object; none if the API server says that there is none.
///
/// # Errors
/// Anything else that it says.
pub async fn get<K>(api: &Api<K>, name: &str) -> Result<Option<K>, kube::Error>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    match api.get(name).await {
        Ok(object) => Ok(Some(object)),
        Err(error) if is_absent(&error, name) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the API server says that there is no object of this name.
pub fn is_absent(error: &kube::Error, name: &str) -> bool {
    match error {
        kube::Error::Api(status) => {
            status.code == 404 && status.details.as_ref().is_some_and(|details| details.name == name)
        }
        _ => false,
    }
}

/// A kind that the API server does not serve, or does not say of.
#[derive(Debug, thiserror::Error)]
#[error("the API server does not serve {0}; if it is a custom kind, install its CRD")]
pub struct KindMissing(KindName, #[source] Box<kube::Error>);

impl KindMissing {
    /// Whether discovery says that there is no such kind, rather than nothing at all.
    pub fn is_absent(&self) -> bool {
        match &*self.1 {
            kube::Error::Discovery(_) => true,
            kube::Error::Api(status) => status.code == 404,
            _ => false,
        }
    }
}

/// How the API server serves a kind.
///
/// # Errors
/// If it does not, or does not say.
pub async fn kind(client: &Client, name: &KindName) -> Result<Kind, KindMissing> {
    let served = discovery::pinned_kind(client, &name.gvk()).await;
    let (api, capabilities) = served.map_err(|error| KindMissing(name.clone(), error.into()))?;
    let has_status = capabilities
        .subresources
        .iter()
        .any(|(subresource, _)| subresource.plural == "status" || subresource.plural.ends_with("/status"));
    Ok(Kind { api, namespaced: capabilities.scope == Scope::Namespaced, has_status })
}

/// The same, which is asked only if that is not `known`.
///
/// # Errors
/// If it does not, or does not say.
pub async fn kind_or_known(client: &Client, known: &[Kind], name: &KindName) -> Result<Kind, KindMissing> {
    match known.iter().find(|kind| kind.name() == *name) {
        Some(known) => Ok(known.clone()),
        None => kind(client, name).await,
    }
}

/// The kinds of children that there may be, sorted: those that plugins declare, and those of which an earlier one has `applied` some.
///
/// The API server is asked of those that are not `known`.
///
/// # Errors
/// If one that is declared is not served, or the API server does not say of one.
pub async fn child_kinds(
    client: &Client,
    known: &[Kind],
    declared: &[&KindName],
    applied: &[KindName],
) -> Result<Vec<Kind>, KindMissing> {
    // All at once: a revision that takes over waits for it.
    let mut kinds = future::try_join_all(declared.iter().map(|name| kind_or_known(client, known, name))).await?;
    // A kind that is declared in another version now is watched already: its objects are the same.
    let is_declared = |name: &KindName| declared.iter().any(|declared| declared.is_same_kind(name));
    let applied = applied.iter().filter(|name| !is_declared(name)).map(|name| kind_or_known(client, known, name));
    for found in future::join_all(applied).await {
        match found {
            Ok(kind) => kinds.push(kind),
            // No longer served: then there is nothing left of it.
            Err(error) if error.is_absent() => {}
            Err(error) => return Err(error),
        }
    }
    kinds.sort_by(|a, b| (&a.api.kind, &a.api.api_version).cmp(&(&b.api.kind, &b.api.api_version)));
    kinds.dedup();
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_404_that_names_the_object_proves_its_absence() {
        let error = |code: u16, details: serde_json::Value| {
            let status =
                json!({"status": "Failure", "message": "", "reason": "NotFound", "code": code, "details": details});
            kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
        };
        assert!(is_absent(&error(404, json!({"name": "w", "group": "t.example", "kind": "widgets"})), "w"));
        // "the server could not find the requested resource", and the namespace of the object.
        assert!(!is_absent(&error(404, json!({})), "w"));
        assert!(!is_absent(&error(404, json!({"name": "n", "kind": "namespaces"})), "w"));
        assert!(!is_absent(&error(409, json!({"name": "w"})), "w"));
    }
}
