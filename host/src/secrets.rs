//! Secrets that a reconciler names, as they are now: read as the host, by name, and watched, so that a new password holds at once and a
//! quiet cluster costs no request. Their content never leaves the capabilities.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
};

use futures::StreamExt as _;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{Api, Client, runtime::watcher};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use crate::{crd::SecretRef, telemetry, watch::watch};

/// See the module's documentation.
pub struct Secrets {
    client: Client,
    watches: watcher::Config,
    followed: Mutex<HashMap<SecretRef, Followed>>,
}

/// A Secret that is watched.
struct Followed {
    now: watch::Receiver<State>,
    _watch: AbortOnDropHandle<()>,
}

/// What is known of a Secret.
#[derive(Clone, Debug)]
enum State {
    /// Nothing yet.
    Unknown,
    There(Content),
    Missing,
    Unreadable(String),
}

/// What a Secret holds, by key. It does not show itself.
#[derive(Clone)]
pub struct Content {
    name: SecretRef,
    /// Changes whenever the Secret does.
    pub version: String,
    data: Arc<BTreeMap<String, ByteString>>,
}

/// Why credentials cannot be had. Names the Secret, and nothing of what it holds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It does not exist.
    #[error("the Secret {0} does not exist")]
    Missing(SecretRef),
    /// It cannot be read.
    #[error("the host cannot read the Secret {0} (see `pilothouse manifests --grants`): {1}")]
    Unreadable(SecretRef, String),
    /// It lacks a key.
    #[error("the Secret {0} has no key {1}")]
    NoKey(SecretRef, &'static str),
    /// A key is no text.
    #[error("the key {1} of the Secret {0} is not UTF-8")]
    NoText(SecretRef, &'static str),
    /// No grant names it.
    #[error("the Secret {0} is not named in spec.grants")]
    Unnamed(SecretRef),
}

impl Secrets {
    /// None yet; `client` acts as the host.
    pub fn new(client: Client, watches: watcher::Config) -> Self {
        Self { client, watches, followed: Mutex::default() }
    }

    /// Watches these, and no others.
    pub fn follow<'a>(&self, named: impl Iterator<Item = &'a SecretRef>) {
        let mut followed = self.followed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = std::mem::take(&mut *followed);
        for name in named {
            if !followed.contains_key(name) {
                let it = before.remove(name).unwrap_or_else(|| self.begin(name));
                followed.insert(name.clone(), it);
            }
        }
    }

    fn begin(&self, name: &SecretRef) -> Followed {
        let (tell, now) = watch::channel(State::Unknown);
        let api = Api::<Secret>::namespaced(self.client.clone(), &name.namespace);
        let config = self.watches.clone().fields(&format!("metadata.name={}", name.name));
        let watching = follow(api, config, name.clone(), tell).in_current_span();
        Followed { now, _watch: AbortOnDropHandle::new(tokio::spawn(watching)) }
    }

    /// What the Secret holds now. Waits until it was looked for.
    ///
    /// # Errors
    /// If it cannot be had.
    pub async fn get(&self, name: &SecretRef) -> Result<Content, Error> {
        let now = self.followed.lock().unwrap_or_else(PoisonError::into_inner).get(name).map(|it| it.now.clone());
        let mut now = now.ok_or_else(|| Error::Unnamed(name.clone()))?;
        let known = now.wait_for(|state| !matches!(state, State::Unknown)).await;
        match known.map(|state| state.clone()) {
            Ok(State::There(content)) => Ok(content),
            Ok(State::Unreadable(why)) => Err(Error::Unreadable(name.clone(), why)),
            Ok(State::Missing | State::Unknown) => Err(Error::Missing(name.clone())),
            // It is no longer followed.
            Err(_) => Err(Error::Unnamed(name.clone())),
        }
    }
}

async fn follow(api: Api<Secret>, config: watcher::Config, name: SecretRef, tell: watch::Sender<State>) {
    let there = |secret: Secret| {
        let version = secret.metadata.resource_version.unwrap_or_default();
        State::There(Content { name: name.clone(), version, data: Arc::new(secret.data.unwrap_or_default()) })
    };
    let mut listed = None;
    let mut events = pin!(watch(api, config));
    while let Some(event) = events.next().await {
        let state = match event {
            Ok(watcher::Event::Init) => {
                listed = None;
                continue;
            }
            Ok(watcher::Event::InitApply(secret)) => {
                listed = Some(there(secret));
                continue;
            }
            Ok(watcher::Event::InitDone) => listed.take().unwrap_or(State::Missing),
            Ok(watcher::Event::Apply(secret)) => there(secret),
            Ok(watcher::Event::Delete(_)) => State::Missing,
            // What is known goes on to hold while the API server is away. That the host may no longer read it is a revocation.
            Err(error) => match (&*tell.borrow(), is_forbidden(&error)) {
                (State::There(_) | State::Missing, false) => continue,
                _ => State::Unreadable(telemetry::chain(&error)),
            },
        };
        tell.send_replace(state);
    }
}

fn is_forbidden(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.is_forbidden(),
        watcher::Error::WatchError(status) => status.is_forbidden(),
        _ => false,
    }
}

impl Content {
    /// The text of a key.
    ///
    /// # Errors
    /// If there is none.
    pub fn text(&self, key: &'static str) -> Result<&str, Error> {
        self.find(key)?.ok_or_else(|| Error::NoKey(self.name.clone(), key))
    }

    /// The text of a key, which may be missing.
    ///
    /// # Errors
    /// If it is no text.
    pub fn find(&self, key: &'static str) -> Result<Option<&str>, Error> {
        let text = self.data.get(key).map(|value| std::str::from_utf8(&value.0)).transpose();
        text.map_err(|_| Error::NoText(self.name.clone(), key))
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}
