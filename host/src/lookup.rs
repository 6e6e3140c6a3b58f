//! One object by name, and what proves that it is not there. And how a kind is served.
//!
//! An API server that does not know a kind yet, or knows it no longer, answers 404 as well. Taken for the absence of the object it would
//! end a cleanup that has not begun. So only a 404 that names the object counts.

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

/// How the API server serves a kind.
///
/// # Errors
/// If it does not, or does not say.
pub async fn kind(client: &Client, name: &KindName) -> Result<Kind, kube::Error> {
    let (api, capabilities) = discovery::pinned_kind(client, &name.gvk()).await?;
    let has_status = capabilities
        .subresources
        .iter()
        .any(|(subresource, _)| subresource.plural == "status" || subresource.plural.ends_with("/status"));
    Ok(Kind { api, namespaced: capabilities.scope == Scope::Namespaced, has_status })
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
