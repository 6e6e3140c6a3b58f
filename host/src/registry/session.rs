//! The requests of one piece of work with one repository, as one user or nobody: what they share is what the registry has accepted
//! of who we are.

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures::stream;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri,
    header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, LOCATION, RETRY_AFTER, USER_AGENT},
};
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::{Body as _, Bytes, Frame, Incoming};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::{
    Error, Progress, Said,
    authorization::{self, Challenge, Token},
    connection::{self, Body, Connector},
    credentials::Login,
    digest::Digest,
    manifest::{self, Descriptor, Manifest},
    reference::Repository,
};
use crate::connection::Error as Broken;

/// The largest manifest: registries need not take more, says the specification.
const MAX_MANIFEST: u64 = 4 << 20;
/// The largest answer that is a token or an error.
const MAX_ANSWER: usize = 64 << 10;
/// How much of what a registry says of an error is told.
const MAX_SAID: usize = 200;
/// How often we are sent elsewhere: blobs are often in a store of another name.
const REDIRECTS: usize = 5;
/// The longest wait that a registry may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(30);
/// In how large pieces a blob is written; progress is told after each.
const PIECE: usize = 64 << 10;

const DIGEST_HEADER: &str = "docker-content-digest";

/// See the module's documentation.
pub(crate) struct Session {
    connector: Arc<Connector>,
    repository: Repository,
    /// Scheme and host.
    registry: String,
    login: Option<Login>,
    authorization: Option<HeaderValue>,
    progress: Option<Progress>,
}

/// A request that can be sent several times.
struct Ask {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
    /// Whether its body is worth telling of.
    tell: bool,
}

impl Ask {
    fn new(method: Method, uri: Uri) -> Self {
        Self { method, uri, headers: HeaderMap::new(), body: Bytes::new(), tell: false }
    }

    fn with(mut self, name: http::HeaderName, value: &'static str) -> Self {
        self.headers.insert(name, HeaderValue::from_static(value));
        self
    }
}

impl Session {
    pub(super) fn new(
        connector: Arc<Connector>,
        repository: &Repository,
        login: Option<Login>,
        progress: Option<Progress>,
    ) -> Self {
        // The one registry whose name is not that of its server.
        let host = if repository.registry == "docker.io" { "registry-1.docker.io" } else { &repository.registry };
        let registry = format!("{}://{host}", connector.scheme(&repository.registry));
        Self { connector, repository: repository.clone(), registry, login, authorization: None, progress }
    }

    /// The digest of a tag's manifest.
    pub(super) async fn digest_of(&mut self, tag: &str) -> Result<Digest, Error> {
        let uri = self.uri(&format!("manifests/{tag}"))?;
        let response = self.send(&Ask::new(Method::HEAD, uri).with(ACCEPT, manifest::ACCEPT)).await?;
        let header = response.headers().get(DIGEST_HEADER).and_then(|value| value.to_str().ok());
        let digest = header.and_then(|text| Digest::try_from(text.to_owned()).ok());
        match digest.filter(|_| response.status().is_success()) {
            // It is no more than a claim, and is checked when the manifest comes.
            Some(digest) => Ok(digest),
            // An answer to GET has a body, which says more.
            None => Ok(Digest::of(&self.any_manifest(tag, &format!("tag {tag}")).await?)),
        }
    }

    /// The manifest of a tag, if there is one.
    pub(crate) async fn manifest_of(&mut self, tag: &str) -> Result<Option<Bytes>, Error> {
        match self.any_manifest(tag, tag).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(Error::NoManifest { .. } | Error::NoRepository(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The manifest of a digest, which it is.
    pub(crate) async fn manifest(&mut self, digest: &Digest) -> Result<Bytes, Error> {
        let result = self.any_manifest(digest.as_str(), &format!("manifest {digest}")).await;
        if matches!(result, Err(Error::NoManifest { .. })) && matches!(self.has_blob(digest).await, Ok(true)) {
            return Err(Error::NotTheManifest { repository: self.repository.clone(), digest: digest.clone() });
        }
        let manifest = result?;
        self.check(digest, Digest::of(&manifest))?;
        Ok(manifest)
    }

    async fn any_manifest(&mut self, reference: &str, what: &str) -> Result<Bytes, Error> {
        let uri = self.uri(&format!("manifests/{reference}"))?;
        let response = self.send(&Ask::new(Method::GET, uri).with(ACCEPT, manifest::ACCEPT)).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(response, Missing::Manifest(what.to_owned())).await);
        }
        let too_large = || self.too_large(what.to_owned(), MAX_MANIFEST);
        let body = Limited::new(response.into_body(), MAX_MANIFEST as usize).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| match error.downcast::<hyper::Error>() {
            Ok(source) => self.broken(*source),
            Err(_) => too_large(),
        })
    }

    /// A blob, which is what its descriptor says.
    pub(crate) async fn blob(&mut self, blob: &Descriptor, max: u64) -> Result<Vec<u8>, Error> {
        let Descriptor { digest, size, .. } = blob;
        if *size > max {
            return Err(self.too_large(format!("blob {digest}"), max));
        }
        let uri = self.uri(&format!("blobs/{digest}"))?;
        let response = self.send(&Ask::new(Method::GET, uri)).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(response, Missing::Blob(digest.clone())).await);
        }
        let wrong_size = |found| Error::WrongSize {
            repository: self.repository.clone(),
            digest: digest.clone(),
            expected: *size,
            found,
        };
        let mut body = response.into_body();
        if let Some(announced) = body.size_hint().exact().filter(|announced| announced != size) {
            return Err(wrong_size(announced));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(*size).unwrap_or_default());
        let mut hash = Sha256::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|source| self.broken(source))?.into_data() else { continue };
            let found = (bytes.len() + data.len()) as u64;
            if found > *size {
                return Err(wrong_size(found));
            }
            hash.update(&data);
            bytes.extend_from_slice(&data);
            self.tell(found, *size);
        }
        if bytes.len() as u64 != *size {
            return Err(wrong_size(bytes.len() as u64));
        }
        self.check(digest, Digest::hashed(&hash.finalize()))?;
        Ok(bytes)
    }

    async fn has_blob(&mut self, digest: &Digest) -> Result<bool, Error> {
        let uri = self.uri(&format!("blobs/{digest}"))?;
        let response = self.send(&Ask::new(Method::HEAD, uri)).await?;
        Ok(response.status().is_success())
    }

    /// Writes a blob, unless it is there.
    pub(crate) async fn push_blob(&mut self, blob: &Descriptor, bytes: Bytes) -> Result<(), Error> {
        if self.has_blob(&blob.digest).await? {
            return Ok(());
        }
        let uri = self.uri("blobs/uploads/")?;
        let response = self.send(&Ask::new(Method::POST, uri.clone())).await?;
        if response.status() != StatusCode::ACCEPTED {
            return Err(self.refusal(response, Missing::Repository).await);
        }
        let location = self.location(&uri, response.headers())?;
        let separator = if location.query().is_some() { '&' } else { '?' };
        let location = self.parsed(&format!("{location}{separator}digest={}", blob.digest))?;
        let mut ask = Ask::new(Method::PUT, location).with(CONTENT_TYPE, "application/octet-stream");
        (ask.body, ask.tell) = (bytes, true);
        let response = self.send(&ask).await?;
        if response.status() != StatusCode::CREATED {
            return Err(self.refusal(response, Missing::Repository).await);
        }
        Ok(())
    }

    /// Writes a manifest, under a tag or under its digest only, and returns the digest.
    pub(crate) async fn push_manifest(&mut self, tag: Option<&str>, manifest: &Manifest) -> Result<Digest, Error> {
        let protocol = |_| self.protocol("its manifest cannot be written as JSON");
        let bytes = serde_json::to_vec(manifest).map_err(protocol)?;
        let digest = Digest::of(&bytes);
        let uri = self.uri(&format!("manifests/{}", tag.unwrap_or(digest.as_str())))?;
        let mut ask = Ask::new(Method::PUT, uri).with(CONTENT_TYPE, manifest::MANIFEST);
        ask.body = bytes.into();
        let response = self.send(&ask).await?;
        if response.status() != StatusCode::CREATED {
            return Err(self.refusal(response, Missing::Repository).await);
        }
        Ok(digest)
    }

    /// Asks; where the registry wants to know who asks, or does not accept it any more, once again with what it accepts.
    async fn send(&mut self, ask: &Ask) -> Result<Response<Incoming>, Error> {
        let response = self.follow(ask).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        let challenge = Challenge::of(response.headers()).ok_or_else(|| self.unauthorized())?;
        self.authorization = Some(self.authorize(&challenge).await?);
        let response = self.follow(ask).await?;
        if response.status() == StatusCode::UNAUTHORIZED { Err(self.unauthorized()) } else { Ok(response) }
    }

    async fn authorize(&self, challenge: &Challenge) -> Result<HeaderValue, Error> {
        let basic =
            |login: &Login| format!("Basic {}", STANDARD.encode(format!("{}:{}", login.username, login.password)));
        let basic = self.login.as_ref().map(basic);
        let text = match challenge {
            Challenge::Basic => basic.ok_or_else(|| self.unauthorized())?,
            Challenge::Bearer { realm, service, scope } => {
                let uri = authorization::token_uri(realm, service.as_deref(), scope.as_deref(), &self.repository);
                let uri = uri.map_err(|_| self.protocol("where its tokens are is no URL"))?;
                let basic = basic.map(|basic| self.header(&basic)).transpose()?;
                format!("Bearer {}", self.token(uri, basic).await?)
            }
        };
        self.header(&text)
    }

    async fn token(&self, uri: Uri, basic: Option<HeaderValue>) -> Result<String, Error> {
        let request = self.request(&Ask::new(Method::GET, uri.clone()), &uri, basic.as_ref())?;
        let response = self.connector.send(request).await.map_err(|source| self.unreachable(source))?;
        match response.status() {
            StatusCode::OK => {}
            // Whoever gives tokens does not know us; what is asked for may be there or not.
            StatusCode::UNAUTHORIZED => return Err(self.unauthorized()),
            _ => return Err(self.refusal(response, Missing::Repository).await),
        }
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await.map(|body| body.to_bytes());
        let token = body.ok().and_then(|body| serde_json::from_slice::<Token>(&body).ok());
        token.map(|token| token.token).ok_or_else(|| self.protocol("what gives its tokens gives none"))
    }

    /// Asks, and goes where we are sent. What the registry has accepted of who we are is for the registry only.
    async fn follow(&self, ask: &Ask) -> Result<Response<Incoming>, Error> {
        let mut uri = ask.uri.clone();
        for _ in 0..=REDIRECTS {
            let own = uri.to_string().starts_with(&format!("{}/", self.registry));
            let authorization = self.authorization.as_ref().filter(|_| own);
            let request = self.request(ask, &uri, authorization)?;
            let response = self.connector.send(request).await.map_err(|source| self.unreachable(source))?;
            if response.status().is_redirection() && ask.body.is_empty() {
                uri = self.location(&uri, response.headers())?;
            } else if response.status() == StatusCode::UNAUTHORIZED && !own {
                return Err(self.protocol("it sends us to a place that does not let us in (401)"));
            } else {
                return Ok(response);
            }
        }
        Err(self.protocol("it sends us from place to place"))
    }

    fn request(&self, ask: &Ask, uri: &Uri, authorization: Option<&HeaderValue>) -> Result<Request<Body>, Error> {
        let (body, length) = (ask.body.clone(), ask.body.len());
        let progress = self.progress.clone().filter(|_| ask.tell);
        let pieces = (0..length).step_by(PIECE).map(move |start| {
            let end = length.min(start + PIECE);
            if let Some(progress) = &progress {
                progress(end as u64, length as u64);
            }
            Ok(Frame::data(body.slice(start..end)))
        });
        let body = if length == 0 { connection::empty() } else { StreamBody::new(stream::iter(pieces)).boxed_unsync() };
        let mut request = Request::new(body);
        *request.method_mut() = ask.method.clone();
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = ask.headers.clone();
        let agent = HeaderValue::from_static(concat!("pilothouse/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(USER_AGENT, agent);
        if length > 0 || ask.method == Method::POST {
            request.headers_mut().insert(CONTENT_LENGTH, length.into());
        }
        if let Some(authorization) = authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        Ok(request)
    }

    fn header(&self, text: &str) -> Result<HeaderValue, Error> {
        let header = HeaderValue::from_str(text).map(|mut value| {
            value.set_sensitive(true);
            value
        });
        header.map_err(|_| self.protocol("a credential or token cannot be sent in a header"))
    }

    fn uri(&self, path: &str) -> Result<Uri, Error> {
        self.parsed(&format!("{}/v2/{}/{path}", self.registry, self.repository.name))
    }

    fn parsed(&self, text: &str) -> Result<Uri, Error> {
        text.parse().map_err(|_| self.protocol("an address is no URL"))
    }

    /// Where we are sent, seen from where we are.
    fn location(&self, from: &Uri, headers: &HeaderMap) -> Result<Uri, Error> {
        let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
        let location = location.ok_or_else(|| self.protocol("it sends us elsewhere and does not say where"))?;
        if location.starts_with('/') {
            let authority = from.authority().map(ToString::to_string).unwrap_or_default();
            return self.parsed(&format!("{}://{authority}{location}", from.scheme_str().unwrap_or("https")));
        }
        self.parsed(location)
    }

    fn tell(&self, done: u64, all: u64) {
        if let Some(progress) = &self.progress {
            progress(done, all);
        }
    }

    fn check(&self, expected: &Digest, found: Digest) -> Result<(), Error> {
        if *expected == found {
            return Ok(());
        }
        Err(Error::WrongDigest { repository: self.repository.clone(), expected: expected.clone(), found })
    }

    fn protocol(&self, what: &'static str) -> Error {
        Error::Protocol { repository: self.repository.clone(), what }
    }

    fn too_large(&self, what: String, max: u64) -> Error {
        Error::TooLarge { repository: self.repository.clone(), what, max }
    }

    fn unreachable(&self, source: connection::Error) -> Error {
        Error::Connection { repository: self.repository.clone(), source }
    }

    fn broken(&self, source: hyper::Error) -> Error {
        self.unreachable(Broken::Http { host: self.repository.registry.clone(), source }.into())
    }

    fn unauthorized(&self) -> Error {
        let variant = if self.login.is_some() { Error::Unauthorized } else { Error::NoCredential };
        variant(self.repository.clone())
    }

    /// What an answer means that is none.
    async fn refusal(&self, response: Response<Incoming>, missing: Missing) -> Error {
        let (status, repository) = (response.status(), self.repository.clone());
        let after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let retry_after = after.map(Duration::from_secs).map(|after| after.min(MAX_RETRY_AFTER));
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        let Answer { code, said } = body.map(|body| Answer::read(&body.to_bytes())).unwrap_or_default();
        match (status, missing) {
            (StatusCode::FORBIDDEN, _) => Error::Forbidden { repository, said },
            (StatusCode::NOT_FOUND, Missing::Repository) => Error::NoRepository(repository),
            (StatusCode::NOT_FOUND, _) if code == "NAME_UNKNOWN" => Error::NoRepository(repository),
            (StatusCode::NOT_FOUND, Missing::Manifest(what)) => Error::NoManifest { repository, what },
            (StatusCode::NOT_FOUND, Missing::Blob(digest)) => Error::NoBlob { repository, digest },
            _ => Error::Status { repository, status, said, retry_after },
        }
    }
}

/// What there is none of, if an answer is 404.
enum Missing {
    Repository,
    Manifest(String),
    Blob(Digest),
}

/// What a registry says of an error: the document of the specification.
#[derive(Default)]
struct Answer {
    code: String,
    said: Said,
}

impl Answer {
    fn read(bytes: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Document {
            errors: Vec<One>,
        }
        #[derive(Deserialize)]
        struct One {
            code: String,
            #[serde(default)]
            message: String,
        }
        let document = serde_json::from_slice::<Document>(bytes);
        let Some(One { code, message }) = document.ok().and_then(|document| document.errors.into_iter().next()) else {
            return Self::default();
        };
        Self { said: Said(message.chars().take(MAX_SAID).collect()), code }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_registry_says_of_an_error_is_short_and_in_quotes() {
        let answer = Answer::read(br#"{"errors":[{"code":"DENIED","message":"not\nyou","detail":{}}]}"#);
        assert_eq!((answer.code.as_str(), answer.said.to_string().as_str()), ("DENIED", r#": it says "not\nyou""#));
        for none in [&b"<html>"[..], b"", br#"{"errors":[]}"#] {
            assert_eq!(Answer::read(none).said.to_string(), "");
        }
    }
}
