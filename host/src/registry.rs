//! Registries: a reference becomes a digest, a digest becomes the bytes of a component, and a component goes into a registry.
//!
//! Of the OCI distribution specification this is what a plugin needs: manifests and blobs are read by HEAD and GET, and blobs are written
//! whole, by POST and PUT. What is read is never believed: a manifest is asked for by its digest and hashed, and so is the layer that it
//! names, so that neither a registry nor what is between can give another component than the one that was meant (`C55`). What a plugin's
//! manifest looks like is in [`manifest`].
//!
//! Who has credentials for a repository is never anonymous there ([`credentials`]), and they go only to the registry, or to where it has
//! its tokens from; both over TLS, unless a person has listed the host ([`connection`]). That is why this is not the crate
//! `oci-client`, which follows redirects and challenges to plain HTTP, reads manifests of any size, keeps one login per registry, and
//! brings a second HTTP client, more than fifty crates in all.

pub mod connection;
pub mod credentials;
pub mod digest;
pub mod manifest;
pub mod reference;

mod authorization;
pub(crate) mod scope;
mod session;

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use http::StatusCode;
use hyper::body::Bytes;
use tokio::time::Instant;

use connection::Connector;
use manifest::Manifest;
pub(crate) use session::Session;

pub use credentials::Credentials;
pub use digest::Digest;
pub use reference::{Reference, Repository};

/// The largest component that is read or written. Those of JavaScript have 12 MiB, and a host compiles each in memory.
pub const MAX_COMPONENT: u64 = 64 << 20;

/// How long a name may take to become a digest, retries included. Somebody waits for it: a person, or a reconciler.
const RESOLVE: Duration = Duration::from_secs(30);
/// How long a component may be on its way, retries included: 64 MiB over a line of 2 Mbit/s.
const TRANSFER: Duration = Duration::from_secs(300);

/// How often a request is tried that may go better a little later; what is longer is for whoever asks to try again.
const ATTEMPTS: u32 = 4;
/// The wait before the second attempt. It doubles.
const BACKOFF: Duration = Duration::from_millis(500);

/// How registries are reached, for all of the host.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// A file of PEM certificates of authorities that registries are trusted by, beside those of the system. May be given several times.
    #[arg(long = "registry-ca", value_name = "FILE")]
    pub authorities: Vec<PathBuf>,
    /// A registry that may be asked over plain HTTP, as HOST or HOST:PORT. May be given several times.
    #[arg(long = "insecure-registry", value_name = "HOST")]
    pub insecure: Vec<String>,
}

/// All registries. Cheap to clone.
#[derive(Clone)]
pub struct Registries {
    connector: Arc<Connector>,
    progress: Option<Progress>,
}

/// Told how many bytes of how many have been transferred.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// A component that has come from a registry, and is what its digests say.
#[derive(Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The component.
    pub bytes: Vec<u8>,
    /// The digest of the manifest: the one by which it was asked for.
    pub digest: Digest,
    /// The digest of the component itself.
    pub component: Digest,
}

impl fmt::Debug for Pulled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pulled({} bytes, {})", self.bytes.len(), self.digest)
    }
}

/// Why a registry has not done what it was asked for. Each text says which registry and which repository.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no answer.
    #[error("failed to reach registry {} for {}{}", .repository.registry, .repository.name, .source.advice())]
    Connection {
        /// For what.
        repository: Repository,
        /// Where it has failed.
        source: connection::Error,
    },
    /// It took too long, attempts and waits between them included.
    #[error("registry {} took more than {} s for {}", .repository.registry, .limit.as_secs(), .repository.name)]
    Slow {
        /// For what.
        repository: Repository,
        /// How long it may take.
        limit: Duration,
    },
    /// It wants to know who asks, and there is nothing to tell it.
    #[error("registry {} wants a credential for {} (401), and none was given that is for it", .0.registry, .0.name)]
    NoCredential(Repository),
    /// It does not accept who we are.
    #[error("registry {} refuses the credential that was given for {} (401)", .0.registry, .0.name)]
    Unauthorized(Repository),
    /// It accepts who we are, and we may not.
    #[error("registry {} forbids this for {} (403){said}", .repository.registry, .repository.name)]
    Forbidden {
        /// For what.
        repository: Repository,
        /// What it says.
        said: Said,
    },
    /// There is no such repository.
    #[error("registry {} has no repository {} (404)", .0.registry, .0.name)]
    NoRepository(Repository),
    /// There is no such tag, or no such digest.
    #[error("registry {} has no {what} in repository {} (404)", .repository.registry, .repository.name)]
    NoManifest {
        /// Where.
        repository: Repository,
        /// `tag x`, or `manifest sha256:…`.
        what: String,
    },
    /// It is pinned to something, but not to a manifest.
    #[error(
        "{digest} is the digest of a blob in repository {} of registry {}, and not of a manifest: pin the digest that `pilothouse push` \
         prints", .repository.name, .repository.registry
    )]
    NotTheManifest {
        /// Where.
        repository: Repository,
        /// What it is pinned to.
        digest: Digest,
    },
    /// A manifest names a blob that is not there.
    #[error("registry {} has lost blob {digest} of repository {} (404)", .repository.registry, .repository.name)]
    NoBlob {
        /// Where.
        repository: Repository,
        /// Which one.
        digest: Digest,
    },
    /// Something else than an answer.
    #[error("registry {} answers {status} for {}{said}", .repository.registry, .repository.name)]
    Status {
        /// For what.
        repository: Repository,
        /// What.
        status: StatusCode,
        /// What it says.
        said: Said,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// It answers, and not as a registry does.
    #[error("registry {} answers for {} in a way that is not understood: {what}", .repository.registry, .repository.name)]
    Protocol {
        /// For what.
        repository: Repository,
        /// What is wrong.
        what: &'static str,
    },
    /// The manifest is not that of a plugin.
    #[error("{digest} in repository {} of registry {} is no plugin", .repository.name, .repository.registry)]
    NotAPlugin {
        /// Where.
        repository: Repository,
        /// Which manifest.
        digest: Digest,
        /// Why.
        source: manifest::Error,
    },
    /// What came is not what was asked for.
    #[error(
        "registry {} gives something else for {expected} of repository {}: what came has the digest {found}",
        .repository.registry, .repository.name
    )]
    WrongDigest {
        /// Where.
        repository: Repository,
        /// What was asked for.
        expected: Digest,
        /// What came.
        found: Digest,
    },
    /// It is shorter or longer than it should be.
    #[error(
        "registry {} gives {found} bytes for {digest} of repository {}, and it has {expected}",
        .repository.registry, .repository.name
    )]
    WrongSize {
        /// Where.
        repository: Repository,
        /// What was asked for.
        digest: Digest,
        /// How many bytes it has.
        expected: u64,
        /// How many have come, or were announced.
        found: u64,
    },
    /// It is larger than it may be.
    #[error("{what} of repository {} in registry {} has more than {max} bytes", .repository.name, .repository.registry)]
    TooLarge {
        /// Where.
        repository: Repository,
        /// What.
        what: String,
        /// How many it may have.
        max: u64,
    },
}

/// What a registry says of an error, if it says anything: a short text, with a colon before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said(pub(crate) String);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": it says {:?}", self.0) }
    }
}

impl Error {
    /// Whether it may go better a little later, with the same question.
    pub fn heals(&self) -> bool {
        match self {
            Self::Connection { source, .. } => source.heals(),
            Self::Slow { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error()
                    || matches!(*status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
            }
            _ => false,
        }
    }

    /// Whether somebody else may be answered differently. Registries also say that there is no such thing to who may not know of it.
    fn depends_on_login(&self) -> bool {
        let absent = matches!(self, Self::NoRepository(_) | Self::NoManifest { .. });
        absent || matches!(self, Self::Unauthorized(_) | Self::Forbidden { .. })
    }

    fn retry_after(&self) -> Option<Duration> {
        if let Self::Status { retry_after, .. } = self { *retry_after } else { None }
    }
}

impl Registries {
    /// All registries, reached as the options say.
    ///
    /// # Errors
    /// If a file of certificates cannot be read.
    pub fn new(options: &Options) -> Result<Self, connection::Error> {
        let connector = Connector::new(&options.authorities, &options.insecure)?;
        Ok(Self { connector: Arc::new(connector), progress: None })
    }

    /// The same, and somebody is told how components come along.
    #[must_use]
    pub fn telling(self, progress: Progress) -> Self {
        Self { progress: Some(progress), ..self }
    }

    /// The digest of the manifest that a reference means now: that of its tag, unless it is pinned.
    ///
    /// # Errors
    /// If the registry does not tell. A digest is its own, and is not asked for.
    pub async fn resolve(&self, reference: &Reference, credentials: &Credentials) -> Result<Digest, Error> {
        match (reference.digest(), reference.tag()) {
            (Some(digest), _) => Ok(digest.clone()),
            (None, tag) => {
                let tag = tag.unwrap_or_default();
                let resolve = |mut session: Session| async move { session.digest_of(tag).await };
                self.session(reference.repository(), credentials, RESOLVE, resolve).await
            }
        }
    }

    /// The component of a manifest.
    ///
    /// # Errors
    /// If it does not come, or is not what the digest says.
    pub async fn pull(
        &self,
        repository: &Repository,
        digest: &Digest,
        credentials: &Credentials,
    ) -> Result<Pulled, Error> {
        let pull = |mut session: Session| async move {
            let manifest = session.manifest(digest).await?;
            let not_a_plugin =
                |source| Error::NotAPlugin { repository: repository.clone(), digest: digest.clone(), source };
            let manifest = Manifest::read(&manifest).map_err(not_a_plugin)?;
            let layer = manifest.component().map_err(not_a_plugin)?;
            let bytes = session.blob(layer, MAX_COMPONENT).await?;
            Ok(Pulled { bytes, digest: digest.clone(), component: layer.digest.clone() })
        };
        self.session(repository, credentials, TRANSFER, pull).await
    }

    /// Writes a component to where a reference says, and returns the digest of its manifest.
    ///
    /// # Errors
    /// If the registry does not take it.
    pub async fn push(
        &self,
        reference: &Reference,
        component: Vec<u8>,
        credentials: &Credentials,
    ) -> Result<Digest, Error> {
        let (manifest, config) = Manifest::of(&component);
        let (component, config) = (Bytes::from(component), Bytes::from(config));
        let (manifest, component, config) = (&manifest, &component, &config);
        let push = |mut session: Session| async move {
            for (blob, bytes) in manifest.layers.iter().zip([component]).chain([(&manifest.config, config)]) {
                session.push_blob(blob, bytes.clone()).await?;
            }
            session.push_manifest(reference.tag(), manifest).await
        };
        self.session(reference.repository(), credentials, TRANSFER, push).await
    }

    /// Does something with a repository: with each credential for it until one does, and again when what has failed may heal.
    pub(crate) async fn session<T, F: Future<Output = Result<T, Error>>>(
        &self,
        repository: &Repository,
        credentials: &Credentials,
        limit: Duration,
        work: impl Fn(Session) -> F,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + limit;
        let logins = credentials.of(repository);
        let anonymous = logins.is_empty().then_some(None);
        let mut refused: Option<Error> = None;
        for login in logins.into_iter().map(Some).chain(anonymous) {
            let session = || Session::new(self.connector.clone(), repository, login.cloned(), self.progress.clone());
            let result = retried(deadline, || work(session())).await;
            match result.unwrap_or_else(|| Err(Error::Slow { repository: repository.clone(), limit })) {
                Err(error) if error.depends_on_login() => {
                    // The first one is the most particular, but who is known is told more.
                    if refused.as_ref().is_none_or(|refused| matches!(refused, Error::Unauthorized(_))) {
                        refused = Some(error);
                    }
                }
                result => return result,
            }
        }
        Err(refused.unwrap_or_else(|| Error::NoCredential(repository.clone())))
    }
}

/// Nothing, if it takes until the deadline and nothing else has failed before.
async fn retried<T, F: Future<Output = Result<T, Error>>>(
    deadline: Instant,
    work: impl Fn() -> F,
) -> Option<Result<T, Error>> {
    let mut last = None;
    for attempt in 0..ATTEMPTS {
        let Ok(result) = tokio::time::timeout_at(deadline, work()).await else { break };
        let error = match result {
            Err(error) if error.heals() => error,
            result => return Some(result),
        };
        let wait = error.retry_after().unwrap_or(BACKOFF * 2_u32.pow(attempt)).mul_f64(1.0 + fastrand::f64() / 4.0);
        tracing::debug!("{}", crate::telemetry::chain(&error));
        let again = Instant::now() + wait;
        last = Some(Err(error));
        if again >= deadline || attempt + 1 == ATTEMPTS {
            break;
        }
        tokio::time::sleep_until(again).await;
    }
    last
}
