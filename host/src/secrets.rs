//! Secrets that a reconciler names, as they are now: read as the host, by name, and watched, so that a new password holds at once and a
//! quiet cluster costs no request. Their content never leaves the capabilities.
//!
//! The Secrets of a `Reconciler` are in its namespace. When that is deleted, they are gone long before the last parent is cleaned up
//! (`C08`). So a copy of each is kept where the host is, and holds from the moment on that the namespace is seen to end, and not before: a
//! Secret that somebody deletes is no longer used.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::StreamExt as _;
use k8s_openapi::{ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    runtime::watcher,
};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use crate::{
    crd::SecretRef,
    identity::{self, RECONCILER_LABEL},
    lookup, telemetry,
    watch::watch,
};

/// The annotation on a copy that says of which Secret it is.
const COPY_ANNOTATION: &str = "internal.pilothouse.dev/copy-of";

/// See the module's documentation.
pub struct Secrets {
    client: Client,
    watches: watcher::Config,
    followed: Mutex<HashMap<SecretRef, Followed>>,
    copies: Option<Copies>,
    copies_hold: AtomicBool,
    changed: watch::Sender<u64>,
}

/// Copies of Secrets, in the namespace of the host.
#[derive(Clone)]
pub struct Copies {
    api: Api<Secret>,
    /// The label of the reconciler whose Secrets they are.
    label: String,
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
    /// A key is no text for a header.
    #[error("what the Secret {0} holds cannot be sent in a header: it has to be one line of text")]
    NoLine(SecretRef),
    /// No grant names it.
    #[error("the Secret {0} is not named in spec.grants")]
    Unnamed(SecretRef),
}

impl Secrets {
    /// None yet; `client` acts as the host. `copies`: where they are kept beyond the end of their namespace.
    pub fn new(client: Client, watches: watcher::Config, copies: Option<Copies>) -> Self {
        let (followed, changed) = (Mutex::default(), watch::Sender::default());
        Self { client, watches, followed, copies, copies_hold: AtomicBool::new(false), changed }
    }

    /// Changes when one of them does, after it was first seen.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Their namespace ends: from now on the copies hold of those that are gone.
    pub fn let_copies_hold(&self) {
        self.copies_hold.store(true, Ordering::Relaxed);
    }

    /// Removes all copies: their reconciler has come to its end.
    ///
    /// # Errors
    /// If the API server refuses.
    pub async fn remove_copies(&self) -> Result<(), kube::Error> {
        match &self.copies {
            Some(copies) => copies.remove_all().await,
            None => Ok(()),
        }
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
        drop(followed);
        for (name, followed) in before {
            drop(followed);
            if let Some(copies) = self.copies.clone() {
                tokio::spawn(async move { copies.remove(&name).await }.in_current_span());
            }
        }
    }

    async fn copy(&self, name: &SecretRef) -> Result<Content, Error> {
        let Some(copies) = &self.copies else { return Err(Error::Missing(name.clone())) };
        match lookup::get(&copies.api, &copies.name(name)).await {
            Ok(Some(copy)) => Ok(Content::of(name, copy)),
            Ok(None) => Err(Error::Missing(name.clone())),
            Err(error) => Err(Error::Unreadable(name.clone(), telemetry::chain(&error))),
        }
    }

    fn begin(&self, name: &SecretRef) -> Followed {
        let (tell, now) = watch::channel(State::Unknown);
        let api = Api::<Secret>::namespaced(self.client.clone(), &name.namespace);
        let config = self.watches.clone().fields(&format!("metadata.name={}", name.name));
        let watching = follow(api, config, name.clone(), self.copies.clone(), tell, self.changed.clone());
        let watching = watching.in_current_span();
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
            Ok(_) if self.copies_hold.load(Ordering::Relaxed) => self.copy(name).await,
            Ok(State::Unreadable(why)) => Err(Error::Unreadable(name.clone(), why)),
            Ok(State::Missing | State::Unknown) => Err(Error::Missing(name.clone())),
            // It is no longer followed.
            Err(_) => Err(Error::Unnamed(name.clone())),
        }
    }
}

async fn follow(
    api: Api<Secret>,
    config: watcher::Config,
    name: SecretRef,
    copies: Option<Copies>,
    tell: watch::Sender<State>,
    changed: watch::Sender<u64>,
) {
    let there = |secret: Secret| State::There(Content::of(&name, secret));
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
        if let (State::There(content), Some(copies)) = (&state, &copies) {
            copies.keep(content).await;
        }
        let before = tell.send_replace(state.clone());
        if state.is_news_after(&before) {
            changed.send_modify(|count| *count += 1);
        }
    }
}

impl State {
    /// Whether it is another than before, where something was known. What cannot be read is tried again and again, which is no news.
    fn is_news_after(&self, before: &Self) -> bool {
        match (before, self) {
            (Self::Unknown, _) | (Self::Missing, Self::Missing) | (Self::Unreadable(_), Self::Unreadable(_)) => false,
            (Self::There(before), Self::There(now)) => before.version != now.version,
            _ => true,
        }
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

impl Copies {
    /// In the namespace `home`, of the reconciler with this label; `client` acts as the host.
    pub fn new(client: Client, home: &str, label: &str) -> Self {
        Self { api: Api::namespaced(client, home), label: label.to_owned() }
    }

    fn name(&self, of: &SecretRef) -> String {
        format!("{}-{}", self.label, identity::hex(&Sha256::digest(of.to_string()), 4))
    }

    /// Nothing is stored where nothing has changed.
    async fn keep(&self, content: &Content) {
        let name = self.name(&content.name);
        let copy = Secret {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                labels: Some(BTreeMap::from([(RECONCILER_LABEL.to_owned(), self.label.clone())])),
                annotations: Some(BTreeMap::from([(COPY_ANNOTATION.to_owned(), content.name.to_string())])),
                ..ObjectMeta::default()
            },
            data: Some(BTreeMap::clone(&content.data)),
            ..Secret::default()
        };
        let params = PatchParams::apply("pilothouse").force();
        if let Err(error) = self.api.patch(&name, &params, &Patch::Apply(copy)).await {
            tracing::warn!(
                secret = %content.name,
                "failed to keep a copy of a Secret; if its namespace is deleted, nothing can be cleaned up with it: {}",
                telemetry::chain(&error)
            );
        }
    }

    async fn remove(&self, of: &SecretRef) {
        if let Err(error) = self.api.delete(&self.name(of), &DeleteParams::default()).await
            && !lookup::is_absent(&error, &self.name(of))
        {
            tracing::warn!(secret = %of, "failed to remove the copy of a Secret: {}", telemetry::chain(&error));
        }
    }

    async fn remove_all(&self) -> Result<(), kube::Error> {
        let ours = ListParams::default().labels(&format!("{RECONCILER_LABEL}={}", self.label));
        for copy in self.api.list(&ours).await?.items {
            let name = copy.metadata.name.unwrap_or_default();
            match self.api.delete(&name, &DeleteParams::default()).await {
                Err(error) if !lookup::is_absent(&error, &name) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Content {
    fn of(name: &SecretRef, secret: Secret) -> Self {
        let version = secret.metadata.resource_version.unwrap_or_default();
        Self { name: name.clone(), version, data: Arc::new(secret.data.unwrap_or_default()) }
    }

    /// Which Secret it is.
    pub fn name(&self) -> &SecretRef {
        &self.name
    }

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

#[cfg(test)]
impl Secrets {
    /// Without a cluster: what is [put](Self::put) there.
    pub(crate) fn fixed() -> Self {
        let nowhere = kube::Config::new(http::Uri::from_static("http://127.0.0.1:1"));
        Self::new(Client::try_from(nowhere).expect("no connection is made"), watcher::Config::default(), None)
    }

    /// A Secret becomes this; without keys, it is gone.
    pub(crate) fn put(&self, name: &SecretRef, keys: Option<&[(&str, &str)]>) {
        let state = keys.map_or(State::Missing, |keys| State::There(Content::with(name, keys)));
        let (tell, now) = watch::channel(state);
        // Dropped, it would be as if nobody followed it.
        let watching = async move { tell.closed().await };
        let followed = Followed { now, _watch: AbortOnDropHandle::new(tokio::spawn(watching)) };
        self.followed.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), followed);
    }
}

#[cfg(test)]
impl Content {
    /// With these keys.
    pub(crate) fn with(name: &SecretRef, keys: &[(&str, &str)]) -> Self {
        let value = |(key, text): &(&str, &str)| ((*key).to_owned(), ByteString(text.as_bytes().to_vec()));
        let data = Arc::new(keys.iter().map(value).collect());
        Self { name: name.clone(), version: fastrand::u64(..).to_string(), data }
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}
