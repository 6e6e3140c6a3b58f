//! The reconcilers of the cluster, as they come, change and go. Each lives on its own, so that one that is broken harms none of
//! the others.

use std::{collections::HashMap, pin::pin, sync::Arc};

use futures::StreamExt as _;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt as _,
    api::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::{Instrument as _, info_span};

use crate::{
    claims::Claims, crd::ClusterReconciler, metrics::Metrics, plugin::Engine, reconcile::Events,
    reconciler::Reconciler, telemetry,
};

/// What all reconcilers share.
#[derive(Clone)]
pub struct Supervisor {
    /// How to reach the API server, as the host.
    pub config: kube::Config,
    /// A client that acts as the host.
    pub client: Client,
    /// Where plugins run.
    pub engine: Arc<Engine>,
    /// Where Events go.
    pub events: Events,
    /// What `/metrics` shows.
    pub metrics: Arc<Metrics>,
    /// Which reconciler has which parents.
    pub claims: Arc<Claims>,
    /// Reconciles under way at once in the whole host.
    pub slots: Arc<Semaphore>,
    /// How many slots there are.
    pub total_slots: usize,
    /// Changes when a CustomResourceDefinition does: a kind that was missing may be there.
    pub kinds: watch::Sender<u64>,
}

/// A reconciler that lives, or comes to its end.
struct Living {
    uid: String,
    spec: watch::Sender<ClusterReconciler>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Living {
    async fn end(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            tracing::error!("a reconciler ended by a bug; please report it: {error}");
        }
    }
}

impl Supervisor {
    /// Lets the reconcilers live until `stop`. `listed` becomes true once all are known.
    pub async fn run(self, listed: watch::Sender<bool>, stop: CancellationToken) {
        let _kinds = AbortOnDropHandle::new(tokio::spawn(self.clone().watch_kinds()));
        let api = Api::<ClusterReconciler>::all(self.client.clone());
        let mut events = pin!(watcher(api, watcher::Config::default()).default_backoff());
        let mut living: HashMap<String, Living> = HashMap::new();
        let mut seen = Vec::new();
        while let Some(Some(event)) = stop.run_until_cancelled(events.next()).await {
            match event {
                Ok(watcher::Event::Init) => seen.clear(),
                Ok(watcher::Event::InitApply(reconciler)) => {
                    seen.push(reconciler.name_any());
                    self.show(reconciler, &mut living);
                }
                Ok(watcher::Event::Apply(reconciler)) => self.show(reconciler, &mut living),
                Ok(watcher::Event::Delete(reconciler)) => {
                    if let Some(living) = living.get(&reconciler.name_any()) {
                        living.stop.cancel();
                    }
                }
                Ok(watcher::Event::InitDone) => {
                    for (_, gone) in living.iter().filter(|(name, _)| !seen.contains(name)) {
                        gone.stop.cancel();
                    }
                    listed.send_replace(true);
                }
                Err(error) => tracing::warn!(
                    "cannot watch ClusterReconcilers (is the CRD installed? `pilothouse crds | kubectl apply --server-side -f -`): {}",
                    telemetry::chain(&error)
                ),
            }
        }
        for living in living.values() {
            living.stop.cancel();
        }
        for (_, living) in living {
            living.end().await;
        }
    }

    /// Shows a reconciler its spec, or brings it to life.
    fn show(&self, reconciler: ClusterReconciler, living: &mut HashMap<String, Living>) {
        let (name, uid) = (reconciler.name_any(), reconciler.uid().unwrap_or_default());
        let same = living.get(&name).filter(|living| living.uid == uid && !living.stop.is_cancelled());
        if let Some(same) = same {
            same.spec.send_if_modified(|known| {
                // Our own status is no news.
                let news = known.metadata.generation != reconciler.metadata.generation;
                *known = reconciler;
                news
            });
            return;
        }
        let before = living.remove(&name);
        let stop = CancellationToken::new();
        let (spec, specs) = watch::channel(reconciler.clone());
        let life = Reconciler::new(self.clone(), reconciler).run(specs, stop.clone());
        let task = async move {
            // One at a time: what the former one has begun comes to its end first.
            if let Some(before) = before {
                before.end().await;
            }
            life.await;
        };
        let task = tokio::spawn(task.instrument(info_span!("reconciler", reconciler = name)));
        living.insert(name, Living { uid, spec, stop, task });
    }

    async fn watch_kinds(self) {
        let api = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(self.client.clone());
        let mut events = pin!(watcher(api, watcher::Config::default()).default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Apply(_) | watcher::Event::Delete(_) | watcher::Event::InitDone) => {
                    self.kinds.send_modify(|count| *count += 1);
                }
                Ok(_) => {}
                Err(error) => tracing::warn!("cannot watch CustomResourceDefinitions: {}", telemetry::chain(&error)),
            }
        }
    }
}
