//! The objects that parents of one reconciler see without owning them: watched as its service account as long as somebody selects
//! them, and a change wakes those who do.
//!
//! A plugin says in each reconcile what its parent needs to see. In the steady state that is what it has said before: one comparison,
//! and no request. What is new is listed first: nobody is reconciled with a part of what it selects, since what has not been listed
//! looks as if it did not exist (`C41`). What cannot be listed fails those who select it, and nobody else, and is tried again.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use kube::{Client, api::ListParams, runtime::watcher};
use tokio::{runtime::Handle, sync::watch};
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument as _, Span};

use self::index::Index;
use crate::{
    lookup,
    object::{Kind, Object},
    plugin::{Access, Reader, Selector},
    queue::{Queue, Wake},
    reconcile::{self, ParentKey},
    revision::Revision,
    selection::{self, Rules, Selection},
    store::{Change, Size, Store},
    telemetry,
    watch::watch,
};

mod index;

/// How long what nobody selects any more is still watched: who selects it again soon finds it there.
const LINGER: Duration = Duration::from_mins(5);
/// How long a reconcile waits for a first list, which mostly takes milliseconds. Beyond that it is its end that wakes the parent.
const LISTS: Duration = Duration::from_secs(2);
/// How long a first list may say nothing before those who wait for it are told.
const SILENCE: Duration = Duration::from_secs(30);
/// How many objects are listed at once.
const PAGE: u32 = 500;
/// How long to wait before what may not be watched, or is not served, is tried again: doubles from the first to the last.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Why a parent's related objects cannot be shown.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// What the plugin selects is refused.
    #[error(transparent)]
    Selection(#[from] selection::Error),
    /// They may not be watched.
    #[error(
        "{selected}: the service account may not list and watch them: {message}; grant it (see `pilothouse manifests`)"
    )]
    Forbidden {
        /// What is selected.
        selected: String,
        /// What the API server says.
        message: String,
    },
    /// They cannot be watched.
    #[error("{selected} cannot be watched: {message}")]
    Unavailable {
        /// What is selected.
        selected: String,
        /// Why.
        message: String,
    },
    /// They are not listed yet; that they are will wake the parent.
    #[error("what the plugin selects is not listed yet")]
    Listing,
}

/// The objects that are shown, as JSON each.
pub type Shown = BoxFuture<'static, Result<Vec<String>, reconcile::Error>>;

/// How a watch is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Health {
    Listing,
    Synced,
    Failing { forbidden: bool, message: String },
}

/// What is watched for some selections.
struct Watched {
    scope: Selection,
    store: Store,
    health: watch::Sender<Health>,
    /// Whose reconcile has not waited until all is listed.
    waiting: Mutex<BTreeSet<ParentKey>>,
}

/// A watch, which ends when this is dropped.
struct Watch {
    watched: Arc<Watched>,
    _follows: AbortOnDropHandle<()>,
}

/// See the module's documentation.
pub struct Related {
    client: Client,
    /// The one namespace that the reconciler may see.
    scope: Option<String>,
    /// The account has no rights any more: nothing is shown, since nothing can be, and cleanup does not wait for it.
    is_over: bool,
    access: Arc<Access>,
    watches: watcher::Config,
    queue: Arc<Queue<ParentKey>>,
    /// The host's threads: relations are asked for on those of the guests.
    threads: Handle,
    /// That of the reconciler: a watch outlives the reconcile that it begins in.
    span: Span,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    index: Index,
    watches: BTreeMap<Selection, Watch>,
}

impl Related {
    /// Nothing yet. `client` acts as the service account, and sees this namespace only, if there is one. To be called on the host's threads.
    pub fn new(
        client: Client,
        scope: Option<String>,
        is_over: bool,
        access: Arc<Access>,
        watches: watcher::Config,
        queue: Arc<Queue<ParentKey>>,
    ) -> Arc<Self> {
        let (threads, span, state) = (Handle::current(), Span::current(), Mutex::default());
        Arc::new(Self { client, scope, is_over, access, watches, queue, threads, span, state })
    }

    /// What a revision shows of the objects that a parent selects; it goes on to select them.
    pub fn of(
        self: &Arc<Self>,
        parent: &ParentKey,
        revision: &Arc<Revision>,
    ) -> impl FnOnce(Vec<Selector>) -> Shown + Send + 'static + use<> {
        let (related, parent, revision) = (self.clone(), parent.clone(), revision.clone());
        move |selectors| {
            async move {
                if related.is_over {
                    return Ok(Vec::new());
                }
                let selections = related.selections(&revision, selectors)?;
                related.select(&parent, &selections);
                Ok(related.show(Some(&parent), &selections, LISTS).await?)
            }
            .boxed()
        }
    }

    /// The same for a preview, of which no parent hears.
    pub fn glance(
        self: &Arc<Self>,
        revision: &Arc<Revision>,
    ) -> impl FnOnce(Vec<Selector>) -> Shown + Send + 'static + use<> {
        let (related, revision) = (self.clone(), revision.clone());
        move |selectors| {
            async move {
                let selections = related.selections(&revision, selectors)?;
                Ok(related.show(None, &selections, SILENCE).await?)
            }
            .boxed()
        }
    }

    /// The parent selects nothing any more.
    pub fn forget(self: &Arc<Self>, parent: &ParentKey) {
        self.select(parent, &[]);
    }

    /// What reads for the capability `kube`, as the same account and in the same namespace.
    pub fn reader(&self) -> Reader {
        Reader::new(self.client.clone(), self.scope.clone())
    }

    /// How much is held, by kind, and by how many watches.
    pub fn sizes(&self) -> BTreeMap<String, (usize, Size)> {
        let watched: Vec<_> = self.lock().watches.values().map(|watch| watch.watched.clone()).collect();
        let mut sizes = BTreeMap::<_, (usize, Size)>::new();
        for watched in watched {
            let (watches, size) = sizes.entry(watched.scope.kind.group_kind()).or_default();
            *watches += 1;
            *size += watched.store.size();
        }
        sizes
    }

    fn selections(&self, revision: &Revision, selectors: Vec<Selector>) -> Result<Vec<Selection>, Error> {
        let readable = self.access.readable_secrets();
        let kinds = Some(revision.plugin.description().related.as_slice());
        Rules { kinds, scope: self.scope.as_deref(), secrets: Some(&readable) }
            .relations(selectors)
            .map_err(Error::from)
    }

    fn select(self: &Arc<Self>, parent: &ParentKey, selections: &[Selection]) {
        let left = self.lock().index.select(parent, selections);
        self.let_go(left);
    }

    /// The objects that are selected, sorted by kind, namespace and name, each once; all of them, or none. Waits so long for those that
    /// are not listed yet.
    async fn show(
        self: &Arc<Self>,
        parent: Option<&ParentKey>,
        selections: &[Selection],
        patience: Duration,
    ) -> Result<Vec<String>, Error> {
        let watches: Vec<_> = selections.iter().map(|selection| (self.watch(selection), selection)).collect();
        let end = tokio::time::Instant::now() + patience;
        for (watched, _) in &watches {
            let mut health = watched.health.subscribe();
            let listed = health.wait_for(|health| *health != Health::Listing);
            if tokio::time::timeout_at(end, listed).await.is_err() {
                watched.waiting().extend(parent.cloned());
            }
            // Only now: what has come since has not seen that somebody waits.
            watched.check()?;
        }
        let mut shown = BTreeMap::new();
        for (watched, selection) in &watches {
            let objects = match (&selection.name, &selection.namespace) {
                (Some(_), Some(_)) => watched.store.get(&selection.key()).into_iter().collect(),
                _ => watched.store.all(),
            };
            for object in objects {
                if watched.scope == **selection || selection.matches(&object) {
                    let kind = &selection.kind;
                    shown.insert((kind.kind.clone(), object.key(), kind.api_version.clone()), object);
                }
            }
        }
        Ok(shown.values().map(|object| object.json().to_owned()).collect())
    }

    /// The watch that shows what is selected; it begins now if there is none.
    fn watch(self: &Arc<Self>, selection: &Selection) -> Arc<Watched> {
        let mut state = self.lock();
        let (scope, is_unselected) = state.index.follow(selection);
        let watched = match state.watches.get(&scope) {
            Some(watch) => watch.watched.clone(),
            None => {
                tracing::debug!("watching {scope} for those who select it");
                let watch = self.begin(scope.clone());
                let watched = watch.watched.clone();
                state.watches.insert(scope, watch);
                watched
            }
        };
        drop(state);
        if is_unselected {
            self.let_go(vec![selection.clone()]);
        }
        watched
    }

    fn begin(self: &Arc<Self>, scope: Selection) -> Watch {
        let store = Store::of_group_kind(scope.kind.group_kind());
        let health = watch::Sender::new(Health::Listing);
        let watched = Arc::new(Watched { scope, store, health, waiting: Mutex::default() });
        // No strong reference: it would keep alive what ends it.
        let follows = follow(Arc::downgrade(self), self.client.clone(), self.watches.clone(), watched.clone());
        let follows = AbortOnDropHandle::new(self.threads.spawn(follows.instrument(self.span.clone())));
        Watch { watched, _follows: follows }
    }

    /// Ends the watches of what is still selected by nobody after a while.
    fn let_go(self: &Arc<Self>, selections: Vec<Selection>) {
        if selections.is_empty() {
            return;
        }
        let related = Arc::downgrade(self);
        self.threads.spawn(async move {
            tokio::time::sleep(LINGER).await;
            let Some(related) = related.upgrade() else { return };
            let mut state = related.lock();
            for scope in state.index.drop_unselected(&selections) {
                tracing::debug!("no longer watching {scope}: nobody selects it");
                state.watches.remove(&scope);
            }
        });
    }

    fn wake<'a>(&self, parents: impl IntoIterator<Item = &'a ParentKey>) {
        for parent in parents {
            self.queue.wake(parent, Wake::Child);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched {
    fn check(&self) -> Result<(), Error> {
        let selected = || self.scope.to_string();
        match &*self.health.borrow() {
            Health::Synced => Ok(()),
            Health::Listing => Err(Error::Listing),
            Health::Failing { forbidden: true, message } => {
                Err(Error::Forbidden { selected: selected(), message: message.clone() })
            }
            Health::Failing { forbidden: false, message } => {
                Err(Error::Unavailable { selected: selected(), message: message.clone() })
            }
        }
    }

    fn is_synced(&self) -> bool {
        *self.health.borrow() == Health::Synced
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeSet<ParentKey>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells how it is, if that is news: to those who wait for the first list; or to all, if it is not the first.
    fn tell(&self, related: &Weak<Related>, health: Health) {
        if let Health::Failing { message, .. } = &health {
            tracing::warn!("cannot watch {}: {message}", self.scope);
        }
        let before = self.health.send_replace(health.clone());
        let waiting = std::mem::take(&mut *self.waiting());
        let Some(related) = related.upgrade() else { return };
        related.wake(&waiting);
        if before != Health::Listing && before != health {
            related.wake(related.lock().index.all(&self.scope));
        }
    }

    /// How the API server serves its kind, if this can be watched at all.
    async fn kind(&self, client: &Client) -> Result<Kind, Health> {
        let failing = |message| Health::Failing { forbidden: false, message };
        let kind = lookup::kind(client, &self.scope.kind).await.map_err(|error| failing(telemetry::chain(&error)))?;
        match (&self.scope.namespace, kind.namespaced) {
            (Some(namespace), false) => {
                Err(failing(format!("it has no namespaces, and namespace {namespace} is selected")))
            }
            _ => Ok(kind),
        }
    }

    /// Watches until that is refused; how it failed.
    async fn keep(
        &self,
        related: &Weak<Related>,
        kind: &Kind,
        api: kube::Api<Object>,
        config: watcher::Config,
    ) -> Health {
        let ListParams { field_selector, label_selector, .. } = self.scope.list_params();
        let config = watcher::Config { field_selector, label_selector, ..config };
        let mut events = pin!(watch(api, config));
        loop {
            let event = match tokio::time::timeout(SILENCE, events.next()).await {
                Ok(Some(event)) => event,
                Ok(None) => return Health::Listing,
                Err(_) if *self.health.borrow() == Health::Listing => {
                    let message = "the API server does not answer the first list".to_owned();
                    self.tell(related, Health::Failing { forbidden: false, message });
                    continue;
                }
                Err(_) => continue,
            };
            let changes: Vec<Change> = match event {
                Err(error) => {
                    let code = crate::watch::code(&error);
                    let failing = Health::Failing { forbidden: code == Some(403), message: telemetry::chain(&error) };
                    // It may not see it any more, or there is no such kind. What else happens passes, and what is known holds.
                    if matches!(code, Some(403 | 404)) {
                        return failing;
                    }
                    if !self.is_synced() {
                        self.tell(related, failing);
                    }
                    continue;
                }
                Ok(watcher::Event::Init) => {
                    self.store.begin_list();
                    continue;
                }
                Ok(watcher::Event::InitApply(object)) => {
                    self.store.list_item(object.with_kind(&kind.api)).into_iter().collect()
                }
                Ok(watcher::Event::InitDone) => {
                    let changes = self.store.end_list();
                    self.tell(related, Health::Synced);
                    changes
                }
                Ok(watcher::Event::Apply(object)) => self.store.show(object.with_kind(&kind.api)).into_iter().collect(),
                Ok(watcher::Event::Delete(object)) => {
                    self.store.delete(&object.with_kind(&kind.api)).into_iter().collect()
                }
            };
            // Who waits for the first list hears of its end.
            if self.is_synced()
                && let Some(related) = related.upgrade()
            {
                let state = related.lock();
                changes.iter().for_each(|change| related.wake(state.index.concerned(&self.scope, change)));
            }
        }
    }
}

/// What is selected, as [`Related`] would show it, listed once.
///
/// # Errors
/// If it cannot be listed.
pub async fn list(client: &Client, selections: &[Selection]) -> Result<Vec<String>, Error> {
    let mut listed = BTreeMap::new();
    for selection in selections {
        let unavailable = |message| Error::Unavailable { selected: selection.to_string(), message };
        let kind = lookup::kind(client, &selection.kind).await;
        let kind = kind.map_err(|error| unavailable(telemetry::chain(&error)))?;
        let api = kind.objects::<Object>(client, selection.namespace.as_deref());
        let mut params = selection.list_params().limit(PAGE);
        loop {
            let page = api.list(&params).await.map_err(|error| unavailable(telemetry::chain(&error)))?;
            for object in page.items {
                let object = object.with_kind(&kind.api);
                listed.insert((kind.api.kind.clone(), object.key(), kind.api.api_version.clone()), object);
            }
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                break;
            }
        }
    }
    Ok(listed.values().map(|object| object.json().to_owned()).collect())
}

/// Watches what is in the scope, without end.
async fn follow(related: Weak<Related>, client: Client, config: watcher::Config, watched: Arc<Watched>) {
    let mut pause = RETRY.0;
    loop {
        let failing = match watched.kind(&client).await {
            Ok(kind) => {
                let api = kind.objects(&client, watched.scope.namespace.as_deref());
                watched.keep(&related, &kind, api, config.clone()).await
            }
            Err(failing) => failing,
        };
        if watched.is_synced() {
            pause = RETRY.0;
        }
        watched.tell(&related, failing);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY.1);
    }
}
