//! The capability `http`: one request to a service that the reconciler grants, and its whole answer.
//!
//! What is asked for is checked before anything is looked up ([`target`], [`header`]), the address before anything is connected to
//! ([`address`]), and credentials are added last ([`auth`], [`sigv4`]). No redirect is followed, no proxy of the environment asked, and
//! nothing is sent twice: what to do next is for the plugin to say.

mod address;
mod auth;
mod header;
mod sigv4;
mod target;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use http::{
    HeaderValue, Method,
    header::{CONTENT_LENGTH, HOST, USER_AGENT},
};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use jiff::Timestamp;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use tokio_rustls::TlsConnector;

use self::{address::Network, target::Place};
use super::access::{Access, Outside};
use crate::{
    bindings::v0_1::pilothouse::plugin::http::{Error, Host, Request, Response},
    connection,
    crd::{Grants, HttpGrant},
    secrets, telemetry,
};

/// Who we say that we are, if the plugin says nothing: some services refuse a request without it.
const AGENT: HeaderValue = HeaderValue::from_static(concat!("pilothouse/", env!("CARGO_PKG_VERSION")));

/// Who is told one of these has changed nothing.
const REFUSALS: [u16; 2] = [401, 403];

impl Host for Outside {
    async fn send(&mut self, request: Request) -> Result<Response, Error> {
        let access = match self.to_change("http") {
            Ok(access) => access.clone(),
            Err(why) => return Err(Error::Denied(why.to_owned())),
        };
        let grant = request.grant.clone();
        let result = match Ask::new(&access.grants(), request) {
            Ok(ask) => {
                let on_host = access.clone();
                access.on_host(async move { ask.send(&on_host).await }).await.unwrap_or(Err(Failure::Host))
            }
            Err(refused) => Err(refused),
        };
        if let Err(Failure::Auth(auth::Error::Secret(lack))) = &result {
            self.note_lack(lack);
        }
        let is_vain = match &result {
            Ok(answer) => REFUSALS.contains(&answer.status),
            Err(failure) => failure.is_unsent(),
        };
        if is_vain {
            self.note_vain();
        }
        let result = result.map_err(|failure| failure.told(&grant));
        let (outcome, refusal) = match &result {
            Ok(_) => ("ok", None),
            Err(Error::Denied(why)) => ("denied", Some(why.as_str())),
            Err(Error::Credentials(_)) => ("credentials", None),
            Err(Error::Dns(_)) => ("dns", None),
            Err(Error::Connection(_)) => ("connection", None),
            Err(Error::Timeout(_)) => ("timeout", None),
            Err(Error::TooLarge(_)) => ("too-large", None),
        };
        access.note("http", outcome, refusal);
        result
    }
}

/// A request that the grant allows, as far as can be seen before its host is looked up.
struct Ask {
    grant: HttpGrant,
    place: Place,
    networks: Vec<Network>,
    request: http::Request<Bytes>,
    limit: Duration,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("spec.grants.http of the reconciler has no grant of this name")]
    NoGrant,
    #[error("the method {asked:?} is not allowed; the grant has {allowed}")]
    Method { asked: String, allowed: String },
    #[error(transparent)]
    Target(#[from] target::Error),
    #[error(transparent)]
    Header(#[from] header::Error),
    #[error("the body has {size} bytes, and the grant allows {most}")]
    Body { size: usize, most: usize },
    #[error("its allowNetworks cannot be used")]
    Network(#[from] address::Error),
    #[error("its ca cannot be used: it has to be certificates as PEM")]
    Authorities,
    #[error("its host {host} is at {found}, which is not public; a grant can allow a network (allowNetworks)")]
    Address { host: String, found: String },
    #[error(transparent)]
    Auth(#[from] auth::Error),
    #[error("{}", advised(.0))]
    Connection(#[source] connection::Error),
    #[error("the answer was broken off")]
    Broken(#[source] hyper::Error),
    #[error("{0} is no status of an answer")]
    Status(u16),
    #[error("there was no answer within {} ms", .0.as_millis())]
    Slow(Duration),
    #[error("the answer has more than {0} bytes, which is what the grant allows")]
    TooLarge(usize),
    #[error("the host failed to send it")]
    Host,
}

/// The two mistakes that nearly everybody makes.
fn advised(error: &connection::Error) -> String {
    let advice = match error.of_tls() {
        Some(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)) => {
            "; if its authority is private, the grant has to name its certificate (ca)"
        }
        Some(rustls::Error::InvalidMessage(_)) => "; if it speaks plain HTTP, the url of the grant has to say so",
        _ => "",
    };
    format!("{error}{advice}")
}

impl From<connection::Error> for Failure {
    fn from(error: connection::Error) -> Self {
        Self::Connection(error)
    }
}

impl Failure {
    /// Whether certainly nothing of the request was sent.
    fn is_unsent(&self) -> bool {
        match self {
            Self::Connection(error) => !matches!(error, connection::Error::Http { .. }),
            Self::Broken(_) | Self::Status(_) | Self::Slow(_) | Self::TooLarge(_) | Self::Host => false,
            _ => true,
        }
    }

    /// As the plugin is told.
    fn told(&self, grant: &str) -> Error {
        // The name is the plugin's: any text, of any length.
        let grant: String = grant.escape_debug().take(80).collect();
        let text = format!("grant {grant}: {}", telemetry::chain(self));
        match self {
            Self::NoGrant
            | Self::Method { .. }
            | Self::Target(_)
            | Self::Header(_)
            | Self::Body { .. }
            | Self::Network(_)
            | Self::Authorities
            | Self::Address { .. }
            | Self::Auth(auth::Error::Kind | auth::Error::Header(_)) => Error::Denied(text),
            Self::Auth(auth::Error::Secret(_)) => Error::Credentials(text),
            Self::Connection(connection::Error::Name { .. }) => Error::Dns(text),
            Self::Connection(connection::Error::Http { source, .. }) if source.is_parse_too_large() => {
                Error::TooLarge(text)
            }
            Self::Connection(_) | Self::Broken(_) | Self::Status(_) | Self::Host => Error::Connection(text),
            Self::Slow(_) => Error::Timeout(text),
            Self::TooLarge(_) => Error::TooLarge(text),
        }
    }
}

impl Ask {
    /// Checks what a plugin asks for.
    fn new(grants: &Grants, asked: Request) -> Result<Self, Failure> {
        let grant = grants.http.iter().find(|grant| grant.name == asked.grant).ok_or(Failure::NoGrant)?;
        let place = Place::parse(&grant.url)?;
        let networks = grant.allow_networks.iter().map(|network| Network::parse(network)).collect::<Result<_, _>>()?;
        let method = method(grant, &asked.method)?;
        place.check(&asked.target)?;
        let mut headers = header::of_request(&asked.headers, &auth::headers(grant.auth.as_ref()))?;
        let (size, most) = (asked.body.len(), grant.max_request.0);
        if size > most {
            return Err(Failure::Body { size, most });
        }
        let host = HeaderValue::from_str(place.authority.as_str()).map_err(|_| target::Error::Url)?;
        headers.insert(HOST, host);
        headers.entry(USER_AGENT).or_insert(AGENT);
        let mut request = http::Request::new(Bytes::from(asked.body));
        *request.uri_mut() = asked.target.parse().map_err(|_| target::Error::Absolute(asked.target))?;
        *request.method_mut() = method;
        *request.headers_mut() = headers;
        let wanted = asked.timeout.map(|millis| Duration::from_millis(millis.into()));
        let limit = wanted.map_or(grant.timeout.0, |wanted| wanted.min(grant.timeout.0));
        Ok(Self { grant: grant.clone(), place, networks, request, limit })
    }

    /// Sends it. All of it has to be over within the time.
    async fn send(self, access: &Arc<Access>) -> Result<Response, Failure> {
        let limit = self.limit;
        tokio::time::timeout(limit, self.exchange(access)).await.unwrap_or(Err(Failure::Slow(limit)))
    }

    async fn exchange(mut self, access: &Arc<Access>) -> Result<Response, Failure> {
        self.add_credentials(access).await?;
        let tls = if self.place.is_tls { Some(self.tls()?) } else { None };
        let usual_port = if self.place.is_tls { 443 } else { 80 };
        let authority = &self.place.authority;

        let found = connection::look_up(authority, usual_port).await?;
        let (allowed, refused): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|found| address::is_allowed(found.ip(), &self.networks));
        if allowed.is_empty() {
            let found = refused.first().map_or_else(|| "no address".to_owned(), |found| found.ip().to_string());
            return Err(Failure::Address { host: authority.to_string(), found });
        }
        let mut sender = connection::open(authority, &allowed, tls.as_ref()).await?;
        let answer = connection::send(&mut sender, authority, framed(self.request)).await?;
        read(answer, self.grant.max_response.0).await
    }

    async fn add_credentials(&mut self, access: &Access) -> Result<(), Failure> {
        let Some(auth) = &self.grant.auth else { return Ok(()) };
        let name = auth.secret().ok_or(auth::Error::Kind)?;
        let unnamed = || auth::Error::Secret(secrets::Error::Unnamed(name.clone()));
        let secret = access.secrets().ok_or_else(unnamed)?.get(name).await.map_err(auth::Error::Secret)?;
        Ok(auth::add(auth, name, &secret, &mut self.request, Timestamp::now())?)
    }

    fn tls(&self) -> Result<TlsConnector, Failure> {
        let Some(ca) = &self.grant.ca else { return Ok(connection::system_tls()?) };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(ca.as_bytes()) {
            let certificate = certificate.map_err(|_| Failure::Authorities)?;
            roots.add(certificate).map_err(|_| Failure::Authorities)?;
        }
        if roots.is_empty() { Err(Failure::Authorities) } else { Ok(connection::tls(roots)?) }
    }
}

/// The method, if the grant has it. Two never are: a tunnel, and what has the server say our credentials.
fn method(grant: &HttpGrant, asked: &str) -> Result<Method, Failure> {
    let method = grant.methods.iter().find(|method| *method == asked).and_then(|method| method.parse().ok());
    method.filter(|method| ![Method::CONNECT, Method::TRACE].contains(method)).ok_or_else(|| {
        let allowed = grant.methods.join(", ");
        Failure::Method { asked: asked.chars().take(20).collect(), allowed }
    })
}

/// With its length, which some servers ask for also where nothing is.
fn framed(request: http::Request<Bytes>) -> http::Request<connection::Body> {
    let (mut head, body) = request.into_parts();
    if !body.is_empty() || [Method::POST, Method::PUT, Method::PATCH].contains(&head.method) {
        head.headers.insert(CONTENT_LENGTH, body.len().into());
    }
    http::Request::from_parts(head, Full::new(body).boxed_unsync())
}

async fn read(answer: http::Response<Incoming>, most: usize) -> Result<Response, Failure> {
    let (head, mut incoming) = answer.into_parts();
    let status = head.status.as_u16();
    if !(200..600).contains(&status) {
        return Err(Failure::Status(status));
    }
    // Its length, where the head tells it.
    if usize::try_from(incoming.size_hint().lower()).map_or(true, |size| size > most) {
        return Err(Failure::TooLarge(most));
    }
    let mut body = Vec::new();
    while let Some(frame) = incoming.frame().await {
        // What is no data is a trailer.
        let Ok(data) = frame.map_err(Failure::Broken)?.into_data() else { continue };
        if data.len() > most - body.len() {
            return Err(Failure::TooLarge(most));
        }
        body.extend_from_slice(&data);
    }
    Ok(Response { status, headers: header::of_answer(&head.headers), body })
}
