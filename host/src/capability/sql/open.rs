//! How a connection comes about: a name is looked up, TLS is shaken hands on, the host proves whose it is. Each step fails by a name of
//! its own; a plugin is told which it was, and neither address nor user, which the log has.

use std::{io, sync::Arc, time::Duration};

use bytes::BytesMut;
use fallible_iterator::FallibleIterator as _;
use postgres_protocol::{
    authentication::{
        md5_hash,
        sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256},
    },
    message::{
        backend::{ErrorResponseBody, Message},
        frontend,
    },
};
use rustls::{
    CertificateError, ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem, pem::PemObject as _},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, lookup_host},
};
use tokio_rustls::TlsConnector;

use super::{
    target::Target,
    wire::{self, Stream, Wire},
};
use crate::bindings::v0_1::pilothouse::plugin::sql::DatabaseError;

/// How long it may take until a connection is there, within the time of a call. A firewall that swallows packets is the usual reason.
const CONNECT: Duration = Duration::from_secs(10);

/// Makes connections to one database.
pub(super) struct Connector {
    target: Target,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// By what a statement that runs can be cancelled: a process of the server, and the secret that it gave to us alone.
#[derive(Clone, Copy)]
pub(super) struct Key {
    process: i32,
    secret: i32,
}

/// Why a Secret's certificates or address cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SetupError {
    #[error("ca.crt of the Secret is no certificate in PEM")]
    Certificates(#[source] Option<pem::Error>),
    #[error("ca.crt of the Secret cannot be used")]
    Authority(#[source] rustls::Error),
    #[error("the host that the Secret names is no name, and no address")]
    Name,
    #[error("failed to set up TLS")]
    Tls(#[source] rustls::Error),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("failed to look up the name {host}")]
    Name { host: String, source: io::Error },
    #[error("failed to connect to {host}")]
    Connect { host: String, source: io::Error },
    #[error("{host} speaks no TLS; if that is as it should be, say sslmode=disable")]
    NoTls { host: String },
    #[error("TLS with {host} failed")]
    Tls { host: String, source: io::Error },
    #[error("{host} did not answer within {} s", CONNECT.as_secs())]
    Slow { host: String },
    #[error("{host} refuses {user}: {message} ({code})")]
    Refused { host: String, user: String, code: String, message: String },
    #[error("{host} asks {user} for a password, and the Secret has none")]
    NoPassword { host: String, user: String },
    #[error(
        "{host} asks {user} for a proof that this host cannot give; it knows passwords by SCRAM-SHA-256, MD5 and in plain text"
    )]
    NoProof { host: String, user: String },
    #[error("the exchange with {host} failed")]
    Exchange { host: String, source: wire::Error },
    #[error("{host} does not prove that it knows the password")]
    Untrusted { host: String, source: io::Error },
}

impl Error {
    /// What a plugin may know.
    pub(super) fn told(&self) -> String {
        match self {
            Self::Name { .. } => "the name of the database is not known".to_owned(),
            Self::Connect { .. } => "nothing listens where the database should be".to_owned(),
            Self::NoTls { .. } => "the database speaks no TLS".to_owned(),
            Self::Tls { source, .. } => format!("no TLS with the database that could be verified{}", why(source)),
            Self::Slow { .. } => format!("no connection to the database within {} s", CONNECT.as_secs()),
            Self::Refused { code, .. } => format!("the database refuses the connection (SQLSTATE {code})"),
            Self::NoPassword { .. } => "the database asks for a password, and the Secret has none".to_owned(),
            Self::NoProof { .. } => "the database asks for a proof that the host cannot give".to_owned(),
            Self::Exchange { .. } => "the connection to the database was lost while it came about".to_owned(),
            Self::Untrusted { .. } => "the database does not prove that it knows the password".to_owned(),
        }
    }
}

/// What is wrong with the certificate, where that is for somebody else to mend than the author of the plugin. Names are left out.
fn why(failed: &io::Error) -> &'static str {
    match failed.get_ref().and_then(|source| source.downcast_ref()) {
        Some(rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) => ": its certificate has expired",
        Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            ": its certificate is of no authority that is trusted (ca.crt)"
        }
        _ => "",
    }
}

impl Connector {
    /// To the database that a Secret names.
    pub(super) fn new(target: Target) -> Result<Self, SetupError> {
        let tls = if target.tls {
            let name = ServerName::try_from(target.host.clone()).map_err(|_| SetupError::Name)?;
            Some((TlsConnector::from(Arc::new(config(target.authorities.as_deref())?)), name))
        } else {
            None
        };
        Ok(Self { target, tls })
    }

    /// A connection on which statements can be sent.
    pub(super) async fn open(&self) -> Result<(Wire, Option<Key>), Error> {
        let opened = async {
            let mut wire = Wire::new(self.connect().await?);
            let key = self.prove(&mut wire).await?;
            Ok((wire, key))
        };
        tokio::time::timeout(CONNECT, opened).await.unwrap_or_else(|_| Err(Error::Slow { host: self.host() }))
    }

    /// Asks the server to stop what it does on a connection. It does not say whether it has.
    pub(super) async fn cancel(&self, key: Key) -> Result<(), Error> {
        let cancelled = async {
            let mut stream = self.connect().await?;
            let mut message = BytesMut::new();
            frontend::cancel_request(key.process, key.secret, &mut message);
            let lost = |source| Error::Exchange { host: self.host(), source: wire::Error::Lost(source) };
            stream.write_all(&message).await.map_err(lost)?;
            stream.flush().await.map_err(lost)?;
            // It closes when it has told the other process.
            stream.read(&mut [0]).await.map_err(lost)?;
            Ok(())
        };
        tokio::time::timeout(CONNECT, cancelled).await.unwrap_or_else(|_| Err(Error::Slow { host: self.host() }))
    }

    fn host(&self) -> String {
        format!("{}:{}", self.target.host, self.target.port)
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, Error> {
        let host = || self.host();
        let addresses = lookup_host((self.target.host.as_str(), self.target.port)).await;
        let addresses: Vec<_> = addresses.map_err(|source| Error::Name { host: host(), source })?.collect();
        let connected = TcpStream::connect(addresses.as_slice()).await.and_then(|stream| {
            stream.set_nodelay(true)?;
            Ok(stream)
        });
        let mut stream = connected.map_err(|source| Error::Connect { host: host(), source })?;
        let Some((tls, name)) = &self.tls else { return Ok(Box::new(stream)) };
        let failed = |source| Error::Tls { host: host(), source };
        let mut request = BytesMut::new();
        frontend::ssl_request(&mut request);
        stream.write_all(&request).await.map_err(failed)?;
        // Nothing is read beyond this byte before TLS begins: what somebody between us slips in would pass for an answer.
        if stream.read_u8().await.map_err(failed)? != b'S' {
            return Err(Error::NoTls { host: host() });
        }
        Ok(Box::new(tls.connect(name.clone(), stream).await.map_err(failed)?))
    }

    /// Says who we are, proves it, and waits until the server is ready.
    async fn prove(&self, wire: &mut Wire) -> Result<Option<Key>, Error> {
        let Target { user, database, .. } = &self.target;
        let session = [
            ("user", user.as_str()),
            ("database", database),
            ("client_encoding", "UTF8"),
            ("application_name", "pilothouse"),
        ];
        let outgoing = |result: io::Result<()>| result.map_err(|source| self.exchange(wire::Error::Lost(source)));
        outgoing(frontend::startup_message(session, &mut wire.outgoing))?;
        wire.send().await.map_err(|source| self.exchange(source))?;
        let mut scram = None;
        let mut key = None;
        loop {
            match wire.next(0).await.map_err(|source| self.exchange(source))? {
                // With SCRAM the server has its own proof to give first.
                Message::AuthenticationOk if scram.is_none() => continue,
                Message::BackendKeyData(body) => {
                    key = Some(Key { process: body.process_id(), secret: body.secret_key() });
                    continue;
                }
                Message::ReadyForQuery(_) => return Ok(key),
                Message::AuthenticationCleartextPassword => {
                    outgoing(frontend::password_message(self.password()?, &mut wire.outgoing))?;
                }
                Message::AuthenticationMd5Password(body) => {
                    let hash = md5_hash(user.as_bytes(), self.password()?, body.salt());
                    outgoing(frontend::password_message(hash.as_bytes(), &mut wire.outgoing))?;
                }
                Message::AuthenticationSasl(body) => {
                    let offered = body.mechanisms().any(|mechanism| Ok(mechanism == SCRAM_SHA_256));
                    if !offered.unwrap_or(false) {
                        return Err(Error::NoProof { host: self.host(), user: user.clone() });
                    }
                    let begun = scram.insert(ScramSha256::new(self.password()?, ChannelBinding::unsupported()));
                    outgoing(frontend::sasl_initial_response(SCRAM_SHA_256, begun.message(), &mut wire.outgoing))?;
                }
                Message::AuthenticationSaslContinue(body) => {
                    let begun = scram.as_mut().ok_or_else(|| self.unexpected())?;
                    begun.update(body.data()).map_err(|source| self.untrusted(source))?;
                    outgoing(frontend::sasl_response(begun.message(), &mut wire.outgoing))?;
                }
                Message::AuthenticationSaslFinal(body) => {
                    let mut begun = scram.take().ok_or_else(|| self.unexpected())?;
                    begun.finish(body.data()).map_err(|source| self.untrusted(source))?;
                    continue;
                }
                Message::ErrorResponse(body) => {
                    let DatabaseError { code, message, .. } = refused(&body);
                    return Err(Error::Refused { host: self.host(), user: user.clone(), code, message });
                }
                Message::AuthenticationGss
                | Message::AuthenticationKerberosV5
                | Message::AuthenticationScmCredential
                | Message::AuthenticationSspi => {
                    return Err(Error::NoProof { host: self.host(), user: user.clone() });
                }
                _ => return Err(self.unexpected()),
            }
            wire.send().await.map_err(|source| self.exchange(source))?;
        }
    }

    fn password(&self) -> Result<&[u8], Error> {
        let missing = || Error::NoPassword { host: self.host(), user: self.target.user.clone() };
        self.target.password.as_deref().map(str::as_bytes).ok_or_else(missing)
    }

    fn exchange(&self, source: wire::Error) -> Error {
        Error::Exchange { host: self.host(), source }
    }

    fn unexpected(&self) -> Error {
        self.exchange(wire::Error::Lost(io::Error::other("an answer to what was not asked")))
    }

    fn untrusted(&self, source: io::Error) -> Error {
        Error::Untrusted { host: self.host(), source }
    }
}

/// What the server says of what it refuses.
pub(super) fn refused(body: &ErrorResponseBody) -> DatabaseError {
    let mut told = DatabaseError { code: String::new(), message: String::new(), constraint: None };
    // One that cannot be read to its end has told less.
    let _ = body.fields().for_each(|field| {
        let text = || String::from_utf8_lossy(field.value_bytes()).into_owned();
        match field.type_() {
            b'C' => told.code = text(),
            b'M' => told.message = text(),
            b'n' => told.constraint = Some(text()),
            _ => {}
        }
        Ok(())
    });
    told
}

/// TLS that verifies the other side by these authorities, or else by those of the system.
fn config(authorities: Option<&str>) -> Result<ClientConfig, SetupError> {
    let mut roots = RootCertStore::empty();
    match authorities {
        // What cannot be read there is told when it is missed, as an unknown issuer.
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        Some(text) => {
            for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
                let certificate = certificate.map_err(|error| SetupError::Certificates(Some(error)))?;
                roots.add(certificate).map_err(SetupError::Authority)?;
            }
            if roots.is_empty() {
                return Err(SetupError::Certificates(None));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(config.map_err(SetupError::Tls)?.with_root_certificates(roots).with_no_client_auth())
}
