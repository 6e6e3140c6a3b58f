//! Requests to the API server, counted where they leave the host: a layer of its clients. There no write can be missed, and a watch
//! shows also what the code that watches never sees: the bookmarks that say that it still lives.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use http::{Method, Request, Response, header::CONTENT_TYPE};
use http_body_util::BodyExt as _;
use kube::client::{Body, DynBody};
use tower::{BoxError, Layer, Service};

use super::handles::Handles;

/// The requests of all clients.
#[derive(Default)]
pub(super) struct Requests(Mutex<BTreeMap<Answered, u64>>);

/// The status of the answer (none: there was no answer), the method, and who was asked.
type Answered = (Option<u16>, Method, Arc<str>);

impl Requests {
    fn count(&self, answered: Answered) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(answered).or_default() += 1;
    }

    /// The counts so far.
    pub(super) fn counts(&self) -> BTreeMap<Answered, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Counts what passes through a client.
#[derive(Clone)]
pub(super) struct CountRequests {
    pub(super) requests: Arc<Requests>,
    /// The API server, as `name:port`.
    pub(super) host: Arc<str>,
    /// Whose client it is; none: the host's own.
    pub(super) of: Option<Arc<Handles>>,
}

impl<S> Layer<S> for CountRequests {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { count: self.clone(), inner }
    }
}

/// A client whose requests are counted.
#[derive(Clone)]
pub(super) struct Counted<S> {
    count: CountRequests,
    inner: S,
}

impl<S> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<Box<DynBody>>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + 'static,
{
    type Response = Response<Box<DynBody>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let count = self.count.clone();
        let method = request.method().clone();
        let purpose = count.of.as_ref().and_then(|_| Purpose::of(&request));
        let response = self.inner.call(request);
        Box::pin(async move {
            let response = response.await;
            let code = response.as_ref().ok().map(|response| response.status());
            count.requests.count((code.map(|code| code.as_u16()), method, count.host));
            let mut response = response?;
            match (purpose, count.of) {
                (Some(Purpose::Write { verb, resource }), Some(of)) if response.status().is_success() => {
                    of.wrote(verb, resource);
                }
                (Some(Purpose::Watch { resource }), Some(of)) if response.status().is_success() => {
                    let heard = of.watch(&resource);
                    let listen = |body: Box<DynBody>| -> Box<DynBody> {
                        Box::new(body.map_frame(move |frame| {
                            heard.now();
                            frame
                        }))
                    };
                    response = response.map(listen);
                }
                _ => {}
            }
            Ok(response)
        })
    }
}

/// What a request is for, if that is counted.
#[derive(Debug, PartialEq, Eq)]
enum Purpose {
    Write { verb: &'static str, resource: String },
    Watch { resource: String },
}

impl Purpose {
    fn of<B>(request: &Request<B>) -> Option<Self> {
        let query = |wanted: &str| request.uri().query().unwrap_or_default().split('&').any(|part| part == wanted);
        let resource = || resource(request.uri().path());
        let verb = match *request.method() {
            Method::GET => return Some(Self::Watch { resource: resource().filter(|_| query("watch=true"))? }),
            Method::POST => "create",
            Method::PUT => "update",
            Method::DELETE => "delete",
            Method::PATCH => {
                let apply = "application/apply-patch+yaml";
                if request.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == apply) { "apply" } else { "patch" }
            }
            _ => return None,
        };
        // What is only tried writes nothing.
        if query("dryRun=All") { None } else { Some(Self::Write { verb, resource: resource()? }) }
    }
}

/// The resource that a path of the API names, as RBAC rules have it: `deployments.apps`, `myapps.example.com/status`.
fn resource(path: &str) -> Option<String> {
    let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
    let (group, rest) = match *parts.as_slice() {
        ["api", _, ref rest @ ..] => ("", rest),
        ["apis", group, _, ref rest @ ..] => (group, rest),
        _ => return None,
    };
    let (plural, subresource) = match *rest {
        ["namespaces", _, subresource @ ("status" | "finalize")] => ("namespaces", Some(subresource)),
        ["namespaces", _, plural] | ["namespaces", _, plural, _] => (plural, None),
        ["namespaces", _, plural, _, subresource] => (plural, Some(subresource)),
        [plural] | [plural, _] => (plural, None),
        [plural, _, subresource] => (plural, Some(subresource)),
        _ => return None,
    };
    let separator = if group.is_empty() { "" } else { "." };
    let subresource = subresource.map(|subresource| format!("/{subresource}")).unwrap_or_default();
    Some(format!("{plural}{separator}{group}{subresource}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_its_resource() {
        for (path, expected) in [
            ("/api/v1/configmaps", Some("configmaps")),
            ("/api/v1/namespaces/n/configmaps/c", Some("configmaps")),
            ("/api/v1/namespaces", Some("namespaces")),
            ("/api/v1/namespaces/n", Some("namespaces")),
            ("/api/v1/namespaces/n/status", Some("namespaces/status")),
            ("/apis/apps/v1/namespaces/n/deployments", Some("deployments.apps")),
            ("/apis/apps/v1/namespaces/n/deployments/d/scale", Some("deployments.apps/scale")),
            ("/apis/t.example/v1/widgets/w", Some("widgets.t.example")),
            ("/apis/t.example/v1/widgets/w/status", Some("widgets.t.example/status")),
            ("/apis/apps", None),
            ("/version", None),
        ] {
            assert_eq!(resource(path).as_deref(), expected, "{path}");
        }
    }

    #[test]
    fn a_request_is_a_write_a_watch_or_nothing_that_counts() {
        let purpose = |method: Method, uri: &str, kind: &str| {
            let request = Request::builder().method(method).uri(uri).header(CONTENT_TYPE, kind).body(());
            Purpose::of(&request.unwrap())
        };
        let write = |verb| Some(Purpose::Write { verb, resource: "configmaps".to_owned() });
        let object = "/api/v1/namespaces/n/configmaps/c";
        let apply = "application/apply-patch+yaml";
        assert_eq!(purpose(Method::PATCH, &format!("{object}?fieldManager=m&force=true"), apply), write("apply"));
        assert_eq!(purpose(Method::PATCH, object, "application/merge-patch+json"), write("patch"));
        assert_eq!(purpose(Method::DELETE, object, "application/json"), write("delete"));
        assert_eq!(purpose(Method::POST, "/api/v1/namespaces/n/configmaps?&dryRun=All", "application/json"), None);
        assert_eq!(purpose(Method::GET, object, ""), None);
        let watch = Some(Purpose::Watch { resource: "configmaps".to_owned() });
        assert_eq!(purpose(Method::GET, "/api/v1/configmaps?&watch=true&allowWatchBookmarks=true", ""), watch);
    }
}
