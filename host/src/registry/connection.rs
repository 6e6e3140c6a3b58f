//! One request to one server: a name is looked up, a connection is made, TLS is shaken hands on, an answer comes. Each of these steps
//! fails by a name of its own, since "cannot connect" has sent many people the wrong way (`C57`).
//!
//! Connections are not kept: a pull is a handful of requests, and may come once in months.

use std::{collections::BTreeSet, convert::Infallible, io, path::PathBuf, sync::Arc, time::Duration};

use http::{HeaderValue, Request, Response, Uri, header::HOST, uri::Authority};
use http_body_util::{BodyExt as _, combinators::UnsyncBoxBody};
use hyper::{
    body::{Bytes, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem, pem::PemObject as _},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
};
use tokio_rustls::TlsConnector;

/// How long it may take until a server is connected. A firewall that swallows packets is the usual reason.
const CONNECT: Duration = Duration::from_secs(10);

/// What is sent.
pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Makes connections, as the options of the host say.
pub(super) struct Connector {
    tls: TlsConnector,
    /// The hosts, with their ports, that may be asked over plain HTTP; others are never, also not by a redirect.
    insecure: BTreeSet<String>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the host's options cannot be used.
    #[error("failed to read the certificates in {}", path.display())]
    Certificates {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// A file of the host's options has no certificates.
    #[error("there is no certificate in {}: it has to be PEM", .0.display())]
    NoCertificates(PathBuf),
    /// The provider of cryptography does not fit.
    #[error("failed to set up TLS")]
    Setup(#[source] Box<rustls::Error>),
    /// The name is not known.
    #[error("failed to look up the name {host}")]
    Name {
        /// The name.
        host: String,
        /// What the resolver says.
        source: io::Error,
    },
    /// Nobody listens there, or nothing gets there.
    #[error("failed to connect to {host}")]
    Connect {
        /// Where to.
        host: String,
        /// What the system says.
        source: io::Error,
    },
    /// TLS does not come about.
    #[error("TLS with {host} failed{}", advice(.source))]
    Tls {
        /// With whom.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// The exchange was broken off, or is no HTTP.
    #[error("the exchange with {host} failed")]
    Http {
        /// With whom.
        host: String,
        /// Why.
        source: hyper::Error,
    },
    /// It takes too long.
    #[error("{host} did not answer within {} s", .limit.as_secs())]
    Slow {
        /// Who.
        host: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// It would have to be asked over plain HTTP.
    #[error("{0} is to be asked over plain HTTP, and it is not listed for that (--insecure-registry)")]
    PlainHttp(String),
    /// It was sent to a place that is none.
    #[error("{0:?} is no address of a server")]
    Address(String),
}

fn setup(error: rustls::Error) -> Error {
    Error::Setup(Box::new(error))
}

/// The two mistakes that nearly everybody makes.
fn advice(error: &io::Error) -> &'static str {
    match error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)) => {
            "; if its authority is private, give the host its certificate (--registry-ca)"
        }
        Some(rustls::Error::InvalidMessage(_)) => {
            "; if it speaks plain HTTP, it has to be listed for that (--insecure-registry)"
        }
        _ => "",
    }
}

impl Error {
    /// Whether it may go better a little later.
    pub(super) fn heals(&self) -> bool {
        match self {
            Self::Name { .. } | Self::Connect { .. } | Self::Http { .. } | Self::Slow { .. } => true,
            // Broken off half-way, rather than refused by either side.
            Self::Tls { source, .. } => source.get_ref().is_none_or(|error| !error.is::<rustls::Error>()),
            Self::Certificates { .. }
            | Self::NoCertificates(_)
            | Self::Setup(_)
            | Self::PlainHttp(_)
            | Self::Address(_) => false,
        }
    }
}

impl Connector {
    /// With the authorities of the system, and those in these files.
    pub(super) fn new(authorities: &[PathBuf], insecure: &[String]) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        // What cannot be read there is told when it is missed, as an unknown issuer.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for path in authorities {
            let failed = |source| Error::Certificates { path: path.clone(), source };
            let certificates = CertificateDer::pem_file_iter(path).map_err(failed)?;
            let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(failed)?;
            if certificates.is_empty() {
                return Err(Error::NoCertificates(path.clone()));
            }
            for certificate in certificates {
                roots.add(certificate).map_err(setup)?;
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(setup)?.with_root_certificates(roots).with_no_client_auth();
        let insecure = insecure.iter().map(|host| host.to_ascii_lowercase()).collect();
        Ok(Self { tls: TlsConnector::from(Arc::new(config)), insecure })
    }

    /// The scheme for a registry.
    pub(super) fn scheme(&self, registry: &str) -> &'static str {
        if self.insecure.contains(registry) { "http" } else { "https" }
    }

    /// Sends a request to where its URI says, and returns the answer when its head is there.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, Error> {
        let uri = request.uri();
        let authority = uri.authority().ok_or_else(|| Error::Address(uri.to_string()))?.clone();
        let plain = match uri.scheme_str() {
            Some("https") => false,
            Some("http") if self.insecure.contains(&authority.as_str().to_ascii_lowercase()) => true,
            _ => return Err(Error::PlainHttp(authority.to_string())),
        };
        let connect = async {
            let stream = connect(&authority, if plain { 80 } else { 443 }).await?;
            if plain { handshake(&authority, stream).await } else { self.encrypt(&authority, stream).await }
        };
        let slow = |_| Error::Slow { host: authority.to_string(), limit: CONNECT };
        let mut sender = tokio::time::timeout(CONNECT, connect).await.map_err(slow)??;
        let request = of_origin(request, &authority)?;
        sender.send_request(request).await.map_err(|source| Error::Http { host: authority.to_string(), source })
    }

    async fn encrypt(&self, authority: &Authority, stream: TcpStream) -> Result<http1::SendRequest<Body>, Error> {
        let name = bare(authority.host()).to_owned();
        let name = ServerName::try_from(name).map_err(|_| Error::Address(authority.to_string()))?;
        let stream = self.tls.connect(name, stream).await;
        handshake(authority, stream.map_err(|source| Error::Tls { host: authority.to_string(), source })?).await
    }
}

async fn connect(authority: &Authority, usual_port: u16) -> Result<TcpStream, Error> {
    let host = || authority.to_string();
    let port = authority.port_u16().unwrap_or(usual_port);
    let addresses = lookup_host((bare(authority.host()), port)).await;
    let addresses: Vec<_> = addresses.map_err(|source| Error::Name { host: host(), source })?.collect();
    TcpStream::connect(addresses.as_slice()).await.map_err(|source| Error::Connect { host: host(), source })
}

/// An address of IPv6 has brackets around it in URIs only.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

async fn handshake(
    authority: &Authority,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<http1::SendRequest<Body>, Error> {
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (sender, connection) = handshake.map_err(|source| Error::Http { host: authority.to_string(), source })?;
    // It ends with the answer, or when nobody wants that any more; its error is told to whoever reads the answer.
    tokio::spawn(connection);
    Ok(sender)
}

/// As a server wants to see it: the path, and the host in a header.
fn of_origin(mut request: Request<Body>, authority: &Authority) -> Result<Request<Body>, Error> {
    let address = || Error::Address(authority.to_string());
    let host = HeaderValue::from_str(authority.as_str()).map_err(|_| address())?;
    request.headers_mut().insert(HOST, host);
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse::<Uri>().map_err(|_| address())?;
    Ok(request)
}

/// Nothing to send.
pub(super) fn empty() -> Body {
    http_body_util::Empty::new().boxed_unsync()
}
