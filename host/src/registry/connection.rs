//! How registries are connected to: by whose authority, and which may be asked over plain HTTP.
//!
//! Connections are not kept: a pull is a handful of requests, and may come once in months.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use http::{Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use rustls::pki_types::{CertificateDer, pem, pem::PemObject as _};
use tokio_rustls::TlsConnector;

pub(super) use crate::connection::Body;
use crate::connection::{self, Error as Broken};

/// How long it may take until a server is connected. A firewall that swallows packets is the usual reason.
const CONNECT: Duration = Duration::from_secs(10);

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
    /// There is no connection, or it broke.
    #[error(transparent)]
    Broken(#[from] Broken),
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
}

impl Error {
    /// What to do about the two mistakes that nearly everybody makes.
    pub(super) fn advice(&self) -> &'static str {
        let Self::Broken(broken) = self else { return "" };
        match broken.of_tls() {
            Some(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)) => {
                "; if its authority is private, give the host its certificate (--registry-ca)"
            }
            Some(rustls::Error::InvalidMessage(_)) => {
                "; if it speaks plain HTTP, it has to be listed for that (--insecure-registry)"
            }
            _ => "",
        }
    }

    /// Whether it may go better a little later.
    pub(super) fn heals(&self) -> bool {
        match self {
            Self::Broken(broken) => broken.heals(),
            Self::Slow { .. } => true,
            Self::Certificates { .. } | Self::NoCertificates(_) | Self::PlainHttp(_) => false,
        }
    }
}

impl Connector {
    /// With the authorities of the system, and those in these files.
    pub(super) fn new(authorities: &[PathBuf], insecure: &[String]) -> Result<Self, Error> {
        let mut roots = connection::system_roots();
        for path in authorities {
            let failed = |source| Error::Certificates { path: path.clone(), source };
            let certificates = CertificateDer::pem_file_iter(path).map_err(failed)?;
            let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(failed)?;
            if certificates.is_empty() {
                return Err(Error::NoCertificates(path.clone()));
            }
            for certificate in certificates {
                roots.add(certificate).map_err(|error| Broken::Setup(Box::new(error)))?;
            }
        }
        let insecure = insecure.iter().map(|host| host.to_ascii_lowercase()).collect();
        Ok(Self { tls: connection::tls(roots)?, insecure })
    }

    /// The scheme for a registry.
    pub(super) fn scheme(&self, registry: &str) -> &'static str {
        if self.insecure.contains(registry) { "http" } else { "https" }
    }

    /// Sends a request to where its URI says, and returns the answer when its head is there.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, Error> {
        let uri = request.uri();
        let authority = uri.authority().ok_or_else(|| Broken::Address(uri.to_string()))?.clone();
        let (tls, port) = match uri.scheme_str() {
            Some("https") => (Some(&self.tls), 443),
            Some("http") if self.insecure.contains(&authority.as_str().to_ascii_lowercase()) => (None, 80),
            _ => return Err(Error::PlainHttp(authority.to_string())),
        };
        let connect = async {
            let addresses = connection::look_up(&authority, port).await?;
            connection::open(&authority, &addresses, tls).await
        };
        let slow = |_| Error::Slow { host: authority.to_string(), limit: CONNECT };
        let mut sender = tokio::time::timeout(CONNECT, connect).await.map_err(slow)??;
        Ok(connection::send(&mut sender, &authority, request).await?)
    }
}

/// Nothing to send.
pub(super) fn empty() -> Body {
    http_body_util::Empty::new().boxed_unsync()
}
