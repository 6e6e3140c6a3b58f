//! What a request asks of the API server, told from its method, path and query: the same words as in the audit log.

use std::fmt;

use http::{Method, Request, header::CONTENT_TYPE};

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Asked {
    /// `get`, `list`, `watch`, `create`, `apply`, `patch`, `delete`; anything else is the HTTP method.
    pub verb: String,
    /// The plural name, with the subresource behind a slash. Of what is no object, the path.
    pub resource: String,
    /// Empty: of cluster scope, or in all namespaces.
    pub namespace: String,
    /// Empty: of a list, a watch or a create.
    pub name: String,
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        match (self.namespace.as_str(), self.name.as_str()) {
            ("", "") => Ok(()),
            ("", name) => write!(f, " {name}"),
            (namespace, "") => write!(f, " {namespace}/"),
            (namespace, name) => write!(f, " {namespace}/{name}"),
        }
    }
}

impl Asked {
    /// What `request` asks.
    pub fn of<B>(request: &Request<B>) -> Self {
        let path = request.uri().path();
        let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
        // /api/v1/… and /apis/group/version/…, then maybe namespaces/name before the resource.
        let rest = match parts.as_slice() {
            ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] if !rest.is_empty() => rest,
            _ => return Self::of_no_object(request.method(), path),
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let (resource, name) = match rest {
            [resource] => ((*resource).to_owned(), ""),
            [resource, name] => ((*resource).to_owned(), *name),
            [resource, name, subresource, ..] => (format!("{resource}/{subresource}"), *name),
            [] => return Self::of_no_object(request.method(), path),
        };
        let watches = request.uri().query().is_some_and(|query| query.split('&').any(|part| part == "watch=true"));
        let applies = request
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/apply-patch"));
        let verb = match *request.method() {
            Method::GET if watches => "watch",
            Method::GET if name.is_empty() => "list",
            Method::GET => "get",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH if applies => "apply",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => request.method().as_str(),
        };
        Self { verb: verb.to_owned(), resource, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    fn of_no_object(method: &Method, path: &str) -> Self {
        let verb = method.as_str().to_lowercase();
        Self { verb, resource: path.to_owned(), namespace: String::new(), name: String::new() }
    }

    /// Whether it changes something.
    pub fn is_write(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_as_in_the_audit_log() {
        for (method, uri, content_type, told) in [
            ("GET", "/apis", "", "get /apis"),
            ("GET", "/apis/apps/v1", "", "get /apis/apps/v1"),
            ("GET", "/apis/t.example/v1/widgets?limit=500", "", "list widgets"),
            ("GET", "/apis/t.example/v1/widgets?watch=true&limit=5", "", "watch widgets"),
            ("GET", "/api/v1/namespaces/n/configmaps/c", "", "get configmaps n/c"),
            ("GET", "/api/v1/namespaces/n", "", "get namespaces n"),
            (
                "PATCH",
                "/api/v1/namespaces/n/configmaps/c?force=true",
                "application/apply-patch+yaml",
                "apply configmaps n/c",
            ),
            (
                "PATCH",
                "/apis/t.example/v1/namespaces/n/widgets/w/status",
                "application/merge-patch+json",
                "patch widgets/status n/w",
            ),
            ("POST", "/apis/events.k8s.io/v1/namespaces/n/events", "application/json", "create events n/"),
            ("DELETE", "/api/v1/namespaces/n/configmaps/c", "", "delete configmaps n/c"),
            (
                "PATCH",
                "/apis/pilothouse.dev/v1alpha1/clusterreconcilers/m",
                "application/json-patch+json",
                "patch clusterreconcilers m",
            ),
        ] {
            let request =
                Request::builder().method(method).uri(uri).header(CONTENT_TYPE, content_type).body(()).unwrap();
            assert_eq!(Asked::of(&request).to_string(), told);
        }
    }
}
