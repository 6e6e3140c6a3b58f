//! One reconciler at work: its watches, its queue, its reconciles.

use std::{
    collections::BTreeMap,
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{FutureExt as _, StreamExt as _};
use kube::runtime::watcher;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::{Instrument as _, field::Empty, info_span};

use crate::{
    crd::ParentCounts,
    identity::RECONCILER_LABEL,
    object::{Kind, Object},
    queue::{Figures, Next, Queue, Run, Wake},
    reconcile::{Context, ParentKey, Revisions, reconcile},
    store::{Change, Store},
    telemetry,
    watch::{code, watch},
};

/// How long to wait before a list that failed is tried again.
const AGAIN: Duration = Duration::from_secs(5);
/// A watch that has failed, and has not failed again for so long, is well: twice the longest pause between two tries, and more.
const QUIET: Duration = Duration::from_secs(90);

/// How the watches of a reconciler are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watching {
    /// Every kind has been listed.
    pub synced: bool,
    /// The kinds that cannot be listed or watched now, and why. They are tried again.
    pub failing: BTreeMap<String, WatchFailure>,
}

/// Why a kind cannot be watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchFailure {
    /// Whether the service account may not; else it is something else.
    pub forbidden: bool,
    /// What the API server says, for a person.
    pub message: String,
}

/// Which of the watched kinds.
#[derive(Clone, Copy)]
enum Watched {
    Parents,
    Children(usize),
}

/// See the module's documentation.
pub struct Controller {
    /// What its reconciles share.
    pub context: Arc<Context>,
    queue: Arc<Queue<ParentKey>>,
    watches: watcher::Config,
    watching: watch::Sender<Watching>,
    counts: watch::Sender<Option<ParentCounts>>,
    workers: AtomicUsize,
}

impl Controller {
    /// A controller that does not watch yet.
    pub fn new(context: Arc<Context>, queue: Arc<Queue<ParentKey>>, watches: watcher::Config) -> Self {
        Self {
            context,
            queue,
            watches,
            watching: watch::Sender::default(),
            counts: watch::Sender::default(),
            workers: AtomicUsize::new(0),
        }
    }

    /// How the watches are, and how they come to be.
    pub fn watching(&self) -> watch::Receiver<Watching> {
        self.watching.subscribe()
    }

    /// How its parents are; none until each that there was at the start is known.
    pub fn counts(&self) -> watch::Receiver<Option<ParentCounts>> {
        self.counts.subscribe()
    }

    /// How its queue is now.
    pub fn queue(&self) -> Figures {
        self.queue.figures()
    }

    /// How many parents it may reconcile at once.
    pub fn workers(&self) -> usize {
        self.workers.load(Ordering::Relaxed)
    }

    /// Watches, for ever. Dropping it ends the watches.
    pub async fn watch(self: Arc<Self>) {
        let mut watches = JoinSet::new();
        let kinds = (0..self.context.child_kinds.len()).map(Watched::Children);
        for watched in std::iter::once(Watched::Parents).chain(kinds) {
            watches.spawn(self.clone().follow(watched).in_current_span());
        }
        self.context.parents.wait_synced().await;
        for store in &self.context.children {
            store.wait_synced().await;
        }
        self.watching.send_modify(|watching| watching.synced = true);
        while watches.join_next().await.is_some() {}
    }

    /// Reconciles until `stop`, then lets what runs come to its end. Nothing is reconciled before every kind was listed: a child
    /// that has not been listed yet would look absent (`C41`, `C42`). `slots` are those of the whole host: this reconciler takes at
    /// most half of them.
    pub async fn work(self: Arc<Self>, slots: Arc<Semaphore>, total: usize, stop: CancellationToken) {
        let synced = self.watching.subscribe();
        let mut synced = pin!(synced);
        if stop.run_until_cancelled(synced.wait_for(|watching| watching.synced)).await.is_none() {
            return;
        }
        tracing::info!(parents = self.context.parents.len(), revision = self.context.revisions().active.id, "watching");
        self.context.start_tally();
        self.count();
        let _unselected = AbortOnDropHandle::new(tokio::spawn(self.clone().wake_unselected().in_current_span()));
        let mut workers = JoinSet::new();
        loop {
            let due = async {
                while workers.try_join_next().is_some() {}
                while workers.len() >= self.allow(total) {
                    workers.join_next().await;
                }
                let run = self.queue.next().await;
                // The semaphore is never closed.
                let slot = slots.clone().acquire_owned().await.ok()?;
                Some((slot, run))
            };
            let Some(Some((slot, run))) = stop.run_until_cancelled(due).await else { break };
            let controller = self.clone();
            workers.spawn(
                async move {
                    controller.work_on(run).await;
                    drop(slot);
                }
                .in_current_span(),
            );
        }
        while workers.join_next().await.is_some() {}
    }

    /// How many may be at work. Asked each time: it may have been changed.
    fn allow(&self, total: usize) -> usize {
        let wanted = usize::try_from(self.context.settings().limits.concurrency).unwrap_or(1);
        let allowed = wanted.clamp(1, total.div_ceil(2));
        self.workers.store(allowed, Ordering::Relaxed);
        allowed
    }

    /// All parents are to be looked at: what they are reconciled with has changed.
    pub fn resync(&self) {
        for parent in self.context.parents.all() {
            self.queue.wake(&ParentKey::of(&parent), Wake::Resync);
        }
        // Some wait that have left the selection.
        self.queue.resync();
    }

    /// The parents that have another revision now than with `before` are to be looked at.
    pub fn resync_moved(&self, before: &Revisions) {
        let now = self.context.revisions();
        for parent in self.context.parents.all() {
            if before.of(parent.uid(), Some(&parent)).id != now.of(parent.uid(), Some(&parent)).id {
                self.queue.wake(&ParentKey::of(&parent), Wake::Resync);
            }
        }
    }

    /// Parents that left the selection while nobody watched still carry our finalizer.
    async fn wake_unselected(self: Arc<Self>) {
        let context = &self.context;
        if context.selector.selects_all() {
            return;
        }
        let holding = loop {
            match context.holding().await {
                Ok(holding) => break holding,
                Err(error) => tracing::warn!("cannot look for parents to release: {}", telemetry::chain(&error)),
            }
            tokio::time::sleep(AGAIN).await;
        };
        for parent in holding.iter().filter(|parent| context.parents.get(&parent.key()).is_none()) {
            context.note_finalizer(parent.uid());
            self.queue.wake(&ParentKey::of(parent), Wake::Resync);
        }
    }

    async fn work_on(&self, mut run: Run<ParentKey>) {
        let context = &self.context;
        // A trace of its own, not part of the reconciler's whole life.
        let span = info_span!(
            parent: None,
            "reconcile",
            reconciler = %context.key,
            parent = %run.key,
            generation = Empty,
            revision = context.revision_of(&run.key).id,
            reconcileID = format!("{:016x}", fastrand::u64(..)),
            outcome = Empty,
            category = Empty,
            otel.status_code = Empty,
        );
        let reconciled = async {
            loop {
                let next = reconcile(context, &run).await;
                if next != Next::Again || !self.queue.goes_on(&mut run) {
                    break next;
                }
            }
        };
        let reconciled = AssertUnwindSafe(reconciled).catch_unwind();
        let begun = Instant::now();
        let next = reconciled.instrument(span.clone()).await.ok();
        span.record("outcome", context.metrics.reconciled(run.waited, begun.elapsed(), next));
        if next == Some(Next::Forget) {
            context.tally().forget(&run.key.uid);
        }
        // A bug in one reconcile is a failure of that parent, and of nobody else.
        let seen = context.seen(&run.key.uid);
        self.queue.done(run, next.unwrap_or(Next::Failed(None)), seen.as_deref());
        self.count();
    }

    /// Tells how the parents are, if that has changed.
    fn count(&self) {
        let counts = self.context.known_parents();
        self.counts.send_if_modified(|known| std::mem::replace(known, counts) != counts);
    }

    /// Keeps a store up to date and wakes whom a change concerns.
    async fn follow(self: Arc<Self>, watched: Watched) {
        let context = &self.context;
        let kind = watched.kind(context);
        let api = context.all(kind);
        let config = self.watches.clone();
        let config = match watched {
            Watched::Parents => config.labels_from(&context.selector),
            Watched::Children(_) => config.labels(&format!("{RECONCILER_LABEL}={}", context.identity.label())),
        };
        let mut events = pin!(watch(api, config));
        let store = watched.store(context);
        loop {
            let event = match tokio::time::timeout(QUIET, events.next()).await {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(_) => {
                    // A watch that goes on is silent about it.
                    if store.is_synced() {
                        self.well(kind);
                    }
                    continue;
                }
            };
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    self.failing(kind, &error);
                    continue;
                }
            };
            let changes: Vec<Change> = match event {
                watcher::Event::Init => {
                    store.begin_list();
                    continue;
                }
                watcher::Event::InitApply(object) => store.list_item(object.with_kind(&kind.api)).into_iter().collect(),
                watcher::Event::InitDone => {
                    self.well(kind);
                    store.end_list()
                }
                watcher::Event::Apply(object) => {
                    self.well(kind);
                    store.show(object.with_kind(&kind.api)).into_iter().collect()
                }
                watcher::Event::Delete(object) => {
                    let object = object.with_kind(&kind.api);
                    if matches!(watched, Watched::Parents) {
                        context.see_gone(&object);
                    }
                    store.delete(&object).into_iter().collect()
                }
            };
            for change in changes {
                self.wake(watched, &change);
            }
        }
    }

    fn failing(&self, kind: &Kind, error: &watcher::Error) {
        let failure = WatchFailure { forbidden: code(error) == Some(403), message: telemetry::chain(error) };
        let news = self.watching.send_if_modified(|watching| {
            watching.failing.insert(kind.to_string(), failure.clone()).as_ref() != Some(&failure)
        });
        if news {
            tracing::warn!("cannot watch {kind}: {}", failure.message);
        }
    }

    fn well(&self, kind: &Kind) {
        if self.watching.borrow().failing.is_empty() {
            return;
        }
        if self.watching.send_if_modified(|watching| watching.failing.remove(&kind.to_string()).is_some()) {
            tracing::info!("watching {kind} again");
        }
    }

    fn wake(&self, watched: Watched, change: &Change) {
        // What the first list brings is no news: it is how things are when the host starts.
        let is_news = watched.store(&self.context).is_synced();
        match watched {
            Watched::Parents => {
                change.after.iter().for_each(|parent| self.context.show(parent));
                let (before, after) = (change.before.as_deref(), change.after.as_deref());
                let is_same = before.map(Object::uid) == after.map(Object::uid);
                if let Some(after) = after {
                    let key = ParentKey::of(after);
                    match (is_news, is_same) {
                        (false, _) => self.queue.wake(&key, Wake::Resync),
                        (true, false) => self.queue.wake(&key, Wake::Created),
                        (true, true) => self.queue.changed(&key, after.resource_version()),
                    }
                }
                if let Some(gone) = before.filter(|_| !is_same) {
                    self.queue.wake(&ParentKey::of(gone), Wake::Parent);
                }
            }
            Watched::Children(place) => {
                let kind = self.context.child_kinds[place].group_kind();
                let wake = if is_news { Wake::Child } else { Wake::Resync };
                let concerned = [change.before.as_deref(), change.after.as_deref()].into_iter().flatten();
                for uid in concerned.filter_map(|child| child.parent_uid(&kind)) {
                    if let Some(object) = self.context.parents.key_of(uid) {
                        self.queue.wake(&ParentKey { object, uid: uid.to_owned() }, wake);
                    }
                }
            }
        }
    }
}

impl Watched {
    fn kind(self, context: &Context) -> &Kind {
        match self {
            Self::Parents => &context.parent_kind,
            Self::Children(place) => &context.child_kinds[place],
        }
    }

    fn store(self, context: &Context) -> &Store {
        match self {
            Self::Parents => &context.parents,
            Self::Children(place) => &context.children[place],
        }
    }
}
