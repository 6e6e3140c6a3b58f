//! A connection to one server: its name is looked up, it is connected, TLS is shaken hands on. Each of these steps fails by a name of its
//! own, since "cannot connect" has sent many people the wrong way (`C57`).
//!
//! Connections are not kept, and there are no proxies and no redirects here. Who is connected to, and by whose authority, is for those to
//! say who ask: [`crate::registry`], and the capability `http`.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use http::{HeaderValue, Request, Response, Uri, header::HOST, uri::Authority};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::{
    body::{Bytes, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
};
use tokio_rustls::TlsConnector;

/// What is sent.
pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
    #[error("TLS with {host} failed")]
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
    /// It is no place.
    #[error("{0:?} is no address of a server")]
    Address(String),
}

impl Error {
    /// Whether it may go better a little later.
    pub(crate) fn heals(&self) -> bool {
        match self {
            Self::Name { .. } | Self::Connect { .. } | Self::Http { .. } => true,
            // Broken off half-way, rather than refused by either side.
            Self::Tls { source, .. } => source.get_ref().is_none_or(|error| !error.is::<rustls::Error>()),
            Self::Setup(_) | Self::Address(_) => false,
        }
    }

    /// Why TLS was refused, if it was.
    pub(crate) fn of_tls(&self) -> Option<&rustls::Error> {
        match self {
            Self::Tls { source, .. } => source.get_ref()?.downcast_ref(),
            _ => None,
        }
    }
}

/// The authorities that the system trusts. What cannot be read there is told when it is missed, as an unknown issuer.
pub(crate) fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

/// TLS with those whose certificates these authorities have signed.
pub(crate) fn tls(roots: RootCertStore) -> Result<TlsConnector, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| Error::Setup(Box::new(error)))?.with_root_certificates(roots);
    Ok(TlsConnector::from(Arc::new(config.with_no_client_auth())))
}

/// TLS with those whom the system trusts, as it was when somebody first asked: there are many of them to read.
pub(crate) fn system_tls() -> Result<TlsConnector, Error> {
    static TLS: OnceLock<TlsConnector> = OnceLock::new();
    if let Some(tls) = TLS.get() {
        return Ok(tls.clone());
    }
    let new = tls(system_roots())?;
    Ok(TLS.get_or_init(|| new).clone())
}

/// The addresses of a server, with the port. One that is an address already is no name, and nobody is asked.
pub(crate) async fn look_up(authority: &Authority, usual_port: u16) -> Result<Vec<SocketAddr>, Error> {
    let port = authority.port_u16().unwrap_or(usual_port);
    let addresses = lookup_host((bare(authority.host()), port)).await;
    Ok(addresses.map_err(|source| Error::Name { host: authority.to_string(), source })?.collect())
}

/// Connects to a server at one of these addresses and no other, by TLS if there is a means for it: then it has to prove its name.
pub(crate) async fn open(
    authority: &Authority,
    addresses: &[SocketAddr],
    tls: Option<&TlsConnector>,
) -> Result<http1::SendRequest<Body>, Error> {
    let host = || authority.to_string();
    let stream = TcpStream::connect(addresses).await.map_err(|source| Error::Connect { host: host(), source })?;
    let Some(tls) = tls else { return handshake(authority, stream).await };
    let name = ServerName::try_from(bare(authority.host()).to_owned()).map_err(|_| Error::Address(host()))?;
    let stream = tls.connect(name, stream).await;
    handshake(authority, stream.map_err(|source| Error::Tls { host: host(), source })?).await
}

/// Sends a request, and returns the answer when its head is there. The server sees the path, and its own name in a header.
pub(crate) async fn send(
    sender: &mut http1::SendRequest<Body>,
    authority: &Authority,
    mut request: Request<Body>,
) -> Result<Response<Incoming>, Error> {
    let address = || Error::Address(authority.to_string());
    let host = HeaderValue::from_str(authority.as_str()).map_err(|_| address())?;
    request.headers_mut().insert(HOST, host);
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse::<Uri>().map_err(|_| address())?;
    sender.send_request(request).await.map_err(|source| Error::Http { host: authority.to_string(), source })
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
