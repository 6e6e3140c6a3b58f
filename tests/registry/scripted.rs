//! What a registry may do that a good one does not, or not when it should for a test: it answers as each test says.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use futures::stream;
use pilothouse::registry::{Digest, Error, Options, Pulled, Reference, Registries, connection};
use serde_json::json;

use crate::{component, credentials, digest, nobody, reference, told};

/// A request, as `GET /v2/plugin/manifests/1.0`, and who asks.
#[derive(Clone, Debug)]
struct Asked {
    line: String,
    authorization: Option<String>,
    /// How many requests of the same line there were before.
    before: usize,
}

/// A server that answers as a function says, and notes what it was asked.
struct Server {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    /// `answer` is also told the host of the server.
    async fn start(answer: impl Fn(&Asked, &str) -> Response + Clone + Send + Sync + 'static) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        let asked = Arc::new(Mutex::new(Vec::<Asked>::new()));
        let notes = asked.clone();
        let handle = move |request: Request| {
            let line = format!("{} {}", request.method(), request.uri());
            let authorization = request.headers().get(header::AUTHORIZATION);
            let authorization = authorization.map(|value| value.to_str().expect("it is text").to_owned());
            let mut notes = notes.lock().expect("nobody has panicked");
            let before = notes.iter().filter(|asked| asked.line == line).count();
            notes.push(Asked { line, authorization, before });
            std::future::ready(answer(notes.last().expect("it was noted"), &address.to_string()))
        };
        let router = Router::new().fallback(handle);
        let task = tokio::spawn(async move { axum::serve(listener, router).await.expect("it serves") });
        Self { address, asked, task }
    }

    fn host(&self) -> String {
        self.address.to_string()
    }

    fn place(&self) -> Reference {
        reference(&format!("{}/plugin:1.0", self.address))
    }

    fn registries(&self) -> Registries {
        Registries::new(&Options { insecure: vec![self.host()], ..Default::default() })
            .expect("there is nothing to read")
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("nobody has panicked").clone()
    }

    /// Pulls the plugin of this digest, with a password for all of the server.
    async fn pull(&self, digest: &Digest, registries: &Registries) -> Result<Pulled, Error> {
        registries.pull(self.place().repository(), digest, &credentials(&[(&self.host(), "password")])).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A manifest with one layer, and its digest.
fn manifest(media_type: &str, layer: &[u8]) -> (Vec<u8>, Digest) {
    let manifest = json!({
        "schemaVersion": 2,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest(b"{}"), "size": 2},
        "layers": [{"mediaType": media_type, "digest": digest(layer), "size": layer.len()}],
    });
    let bytes = manifest.to_string().into_bytes();
    let digest = digest(&bytes);
    (bytes, digest)
}

/// Answers as a registry with one plugin; anything else is 404.
fn plugin(asked: &Asked, manifest: &[u8], layer: &[u8]) -> Response {
    if asked.line.contains("/manifests/") {
        manifest.to_vec().into_response()
    } else if asked.line.contains("/blobs/") {
        layer.to_vec().into_response()
    } else {
        StatusCode::NOT_FOUND.into_response()
    }
}

/// A 401 that sends to the same server for a token.
fn challenge(host: &str) -> Response {
    let challenge = format!("Bearer realm=\"http://{host}/token\",service=\"tests\"");
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, challenge)]).into_response()
}

fn is_token(asked: &Asked) -> bool {
    asked.line.starts_with("GET /token?service=tests&scope=repository:plugin:pull")
}

#[tokio::test]
async fn c57_a_token_that_expires_in_the_midst_is_fetched_anew() {
    let bytes = component("a");
    let (manifest, digest) = manifest("application/wasm", &bytes);
    let answer = move |asked: &Asked, host: &str| match asked.authorization.as_deref() {
        Some(basic) if is_token(asked) && basic.starts_with("Basic ") => {
            json!({"token": format!("token-{}", asked.before)}).to_string().into_response()
        }
        // The first one is good for the manifest, and no more.
        Some("Bearer token-0") if asked.line.contains("/blobs/") => challenge(host),
        Some("Bearer token-0" | "Bearer token-1") => plugin(asked, &manifest, &bytes),
        _ => challenge(host),
    };
    let server = Server::start(answer).await;
    let pulled = server.pull(&digest, &server.registries()).await.unwrap();
    assert_eq!(pulled.bytes, component("a"));
    assert_eq!(server.asked().iter().filter(|asked| is_token(asked)).count(), 2, "{:?}", server.asked());
}

#[tokio::test]
async fn c57_a_token_that_does_not_help_is_fetched_once_and_no_more() {
    let answer = |asked: &Asked, host: &str| {
        if is_token(asked) { r#"{"token":"useless"}"#.into_response() } else { challenge(host) }
    };
    let server = Server::start(answer).await;
    let error = server.pull(&digest(b""), &server.registries()).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized(_)), "{error}");
    assert_eq!(server.asked().iter().filter(|asked| is_token(asked)).count(), 1, "{:?}", server.asked());
}

#[tokio::test]
async fn c57_who_was_refused_does_not_come_back_as_nobody() {
    let bytes = component("public");
    let (manifest, digest) = manifest("application/wasm", &bytes);
    // Everybody gets a token but who has a wrong password.
    let answer = move |asked: &Asked, host: &str| match asked.authorization.as_deref() {
        Some("Bearer anonymous") => plugin(asked, &manifest, &bytes),
        None if is_token(asked) => r#"{"access_token":"anonymous"}"#.into_response(),
        Some(_) if is_token(asked) => StatusCode::UNAUTHORIZED.into_response(),
        _ => challenge(host),
    };
    let server = Server::start(answer).await;
    let registries = server.registries();
    let error = server.pull(&digest, &registries).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized(_)), "{error}");
    let anonymous = |asked: &&Asked| is_token(asked) && asked.authorization.is_none();
    assert_eq!(server.asked().iter().filter(anonymous).count(), 0, "{:?}", server.asked());
    registries.pull(server.place().repository(), &digest, &nobody()).await.unwrap();
}

#[tokio::test]
async fn who_we_are_is_told_to_the_registry_and_to_nobody_it_sends_us_to() {
    let bytes = component("a");
    let (manifest, digest) = manifest("application/wasm", &bytes);
    let store = Server::start(move |_, _| bytes.clone().into_response()).await;
    let elsewhere = format!("http://{}/store", store.host());
    let answer = move |asked: &Asked, _: &str| match asked.authorization {
        None => (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Basic realm=\"tests\"")]).into_response(),
        Some(_) if asked.line.contains("/blobs/") => {
            (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, elsewhere.clone())]).into_response()
        }
        Some(_) => plugin(asked, &manifest, b""),
    };
    let server = Server::start(answer).await;
    let both = Options { insecure: vec![server.host(), store.host()], ..Default::default() };
    server.pull(&digest, &Registries::new(&both).unwrap()).await.unwrap();
    assert_eq!(store.asked().len(), 1);
    assert_eq!(store.asked()[0].authorization, None);

    // A store that is not listed is not asked over plain HTTP, though the registry says so.
    let error = server.pull(&digest, &server.registries()).await.unwrap_err();
    assert!(
        matches!(&error, Error::Connection { source: connection::Error::PlainHttp(host), .. } if *host == store.host())
    );
    assert_eq!(store.asked().len(), 1, "{error}");
}

#[tokio::test]
async fn what_may_heal_is_tried_again_and_what_will_not_is_not() {
    let answer = |asked: &Asked, _: &str| match asked.before {
        0 => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        1 => (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "0")]).into_response(),
        _ => {
            let body = r#"{"errors":[{"code":"DENIED","message":"this one is not for you"}]}"#;
            (StatusCode::FORBIDDEN, body).into_response()
        }
    };
    let server = Server::start(answer).await;
    let error = server.pull(&digest(b"x"), &server.registries()).await.unwrap_err();
    assert!(matches!(error, Error::Forbidden { .. }), "{error}");
    let text = told(&error);
    assert!(text.contains("403") && text.contains(r#"it says "this one is not for you""#), "{text}");
    assert_eq!(server.asked().len(), 3, "{:?}", server.asked());
}

#[tokio::test]
async fn what_does_not_heal_is_told_after_a_few_attempts() {
    let server = Server::start(|_, _| (StatusCode::BAD_GATEWAY, [(header::RETRY_AFTER, "0")]).into_response()).await;
    let error = server.pull(&digest(b"x"), &server.registries()).await.unwrap_err();
    assert!(told(&error).contains("answers 502 Bad Gateway for plugin"), "{}", told(&error));
    assert_eq!(server.asked().len(), 4);
}

#[tokio::test]
async fn an_answer_without_end_is_cut_off() {
    let endless = || {
        let piece = || Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 64 << 10]));
        Response::new(Body::from_stream(stream::repeat_with(piece)))
    };
    let (manifest, digest) = manifest("application/wasm", &component("a"));
    let answer = move |asked: &Asked, _: &str| {
        if asked.line.contains("/blobs/") { endless() } else { plugin(asked, &manifest, b"") }
    };
    let server = Server::start(answer).await;
    let error = server.pull(&digest, &server.registries()).await.unwrap_err();
    assert!(matches!(error, Error::WrongSize { .. }), "{error}");

    let server = Server::start(move |_, _| endless()).await;
    let error = server.pull(&digest, &server.registries()).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { max: 4_194_304, .. }), "{error}");
}

#[tokio::test]
async fn a_component_that_is_too_large_is_not_even_begun() {
    let layer = json!({"mediaType": "application/wasm", "digest": digest(b"x"), "size": (64 << 20) + 1});
    let config = json!({"mediaType": "a/b", "digest": digest(b"x"), "size": 1});
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": [layer]}).to_string().into_bytes();
    let of_manifest = digest(&manifest);
    let server = Server::start(move |asked, _| plugin(asked, &manifest, b"")).await;
    let error = server.pull(&of_manifest, &server.registries()).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { max: 67_108_864, .. }), "{error}");
    assert_eq!(server.asked().len(), 1);
}

#[tokio::test]
async fn a_component_under_the_media_type_of_before_is_read_and_an_image_is_no_plugin() {
    let bytes = component("a");
    let (legacy, digest) = manifest("application/vnd.wasm.content.layer.v1+wasm", &bytes);
    let server = Server::start(move |asked, _| plugin(asked, &legacy, &bytes)).await;
    assert_eq!(server.pull(&digest, &server.registries()).await.unwrap().bytes, component("a"));

    let (image, digest) = manifest("application/vnd.oci.image.layer.v1.tar+gzip", b"x");
    let server = Server::start(move |asked, _| plugin(asked, &image, b"x")).await;
    let error = server.pull(&digest, &server.registries()).await.unwrap_err();
    assert!(matches!(error, Error::NotAPlugin { .. }), "{error}");
    assert!(told(&error).contains("tar+gzip"), "{}", told(&error));
}
