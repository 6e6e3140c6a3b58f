//! One reconciler at work: its watches, its queue, its reconciles.

use std::{panic::AssertUnwindSafe, pin::pin, sync::Arc};

use futures::{FutureExt as _, StreamExt as _};
use kube::{
    Api,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, info_span};

use crate::{
    identity::RECONCILER_LABEL,
    object::{Kind, Object},
    queue::{Next, Queue, Run, Wake},
    reconcile::{Context, ParentKey, reconcile},
    store::{Change, Store},
    telemetry,
};

/// How the watches are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Watching {
    /// The first lists are under way.
    #[default]
    Starting,
    /// Every kind is being watched.
    Yes,
    /// A kind cannot be listed or watched: which, and why. It is tried again.
    Failing(String),
}

/// Which of the watched kinds.
#[derive(Clone, Copy)]
enum Watched {
    Parents,
    Children(usize),
}

struct Controller {
    context: Arc<Context>,
    queue: Queue<ParentKey>,
}

/// Reconciles until `stop`, then lets what runs come to its end. Nothing is reconciled before every kind was listed: a child that has
/// not been listed yet would look absent, and one too many would be made or pruned (`C41`, `C42`).
pub async fn run(context: Arc<Context>, watching: watch::Sender<Watching>, stop: CancellationToken) {
    let controller = Arc::new(Controller { context, queue: Queue::default() });
    let context = &controller.context;
    let mut tasks = JoinSet::new();
    let watched = std::iter::once(Watched::Parents).chain((0..context.child_kinds.len()).map(Watched::Children));
    let failing = Arc::new(watching);
    for watched in watched {
        tasks.spawn(follow(controller.clone(), watched, failing.clone()).in_current_span());
    }
    let listed = async {
        context.parents.wait_synced().await;
        for store in &context.children {
            store.wait_synced().await;
        }
        failing.send_replace(Watching::Yes);
    };
    if stop.run_until_cancelled(listed).await.is_some() {
        tracing::info!(parents = context.parents.len(), "watching");
        work(&controller, &stop).await;
    }
    tasks.shutdown().await;
}

/// Hands due parents to workers.
async fn work(controller: &Arc<Controller>, stop: &CancellationToken) {
    let concurrency = controller.context.limits.concurrency.max(1);
    let slots = Arc::new(Semaphore::new(usize::try_from(concurrency).unwrap_or(1)));
    let mut workers = JoinSet::new();
    loop {
        let due = async {
            // The semaphore is never closed.
            let slot = slots.clone().acquire_owned().await.ok()?;
            Some((slot, controller.queue.next().await))
        };
        let Some(Some((slot, run))) = stop.run_until_cancelled(due).await else { break };
        let controller = controller.clone();
        workers.spawn(async move {
            work_on(&controller, run).await;
            drop(slot);
        });
        while workers.try_join_next().is_some() {}
    }
    while workers.join_next().await.is_some() {}
}

async fn work_on(controller: &Controller, run: Run<ParentKey>) {
    let context = &controller.context;
    let span = info_span!(
        "reconcile",
        reconciler = context.identity.label(),
        parent = %run.key,
        revision = context.revision,
        reconcileID = format!("{:016x}", fastrand::u64(..)),
    );
    let reconciled = AssertUnwindSafe(reconcile(context, &run.key, run.attempt)).catch_unwind().instrument(span);
    // A bug in one reconcile is a failure of that parent, and of nobody else.
    let next = reconciled.await.unwrap_or(Next::Failed(None));
    controller.queue.done(run, next);
}

/// Keeps a store up to date and wakes whom a change concerns.
async fn follow(controller: Arc<Controller>, watched: Watched, watching: Arc<watch::Sender<Watching>>) {
    let context = &controller.context;
    let kind = watched.kind(context);
    let api = Api::<Object>::all_with(context.client.clone(), &kind.api);
    let config = match watched {
        Watched::Parents => watcher::Config::default(),
        Watched::Children(_) => {
            watcher::Config::default().labels(&format!("{RECONCILER_LABEL}={}", context.identity.label()))
        }
    };
    let mut events = pin!(watcher(api, config).default_backoff());
    let store = watched.store(context);
    let mut failed = false;
    while let Some(event) = events.next().await {
        let changes: Vec<Change> = match event {
            Ok(event) => {
                if failed && matches!(event, watcher::Event::InitDone | watcher::Event::Apply(_)) {
                    failed = false;
                    tracing::info!("watching {kind} again");
                }
                match event {
                    watcher::Event::Init => {
                        store.begin_list();
                        Vec::new()
                    }
                    watcher::Event::InitApply(object) => {
                        store.list_item(object.with_kind(&kind.api)).into_iter().collect()
                    }
                    watcher::Event::InitDone => store.end_list(),
                    watcher::Event::Apply(object) => store.apply(object.with_kind(&kind.api)).into_iter().collect(),
                    watcher::Event::Delete(object) => store.delete(&object).into_iter().collect(),
                }
            }
            Err(error) => {
                let why = format!("cannot watch {kind}: {}", telemetry::chain(&error));
                if !failed {
                    tracing::warn!("{why}");
                }
                failed = true;
                if !store.is_synced() {
                    watching.send_replace(Watching::Failing(why));
                }
                Vec::new()
            }
        };
        for change in changes {
            controller.wake(watched, &change);
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

impl Controller {
    fn wake(&self, watched: Watched, change: &Change) {
        let concerned = [change.before.as_deref(), change.after.as_deref()].into_iter().flatten();
        match watched {
            Watched::Parents => {
                for parent in concerned {
                    let key = ParentKey { object: parent.key(), uid: parent.uid().to_owned() };
                    self.queue.wake(&key, Wake::Parent);
                }
            }
            Watched::Children(_) => {
                for uid in concerned.filter_map(Object::controller_uid) {
                    if let Some(object) = self.context.parents.key_of(uid) {
                        self.queue.wake(&ParentKey { object, uid: uid.to_owned() }, Wake::Child);
                    }
                }
            }
        }
    }
}
