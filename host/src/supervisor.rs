//! The reconcilers of the cluster, as they come, change and go. Each lives on its own, so that one that is broken harms none of
//! the others.

use std::{collections::HashMap, fmt::Debug, path::PathBuf, pin::pin, sync::Arc};

use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, Client, Resource, api::PartialObjectMeta, runtime::watcher};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::{Instrument as _, info_span};

use crate::{
    claims::Claims,
    client::ApiServer,
    crd::{self, ClusterReconciler, PluginSource, Preview, Rollout, Strategy},
    declaration::{self, Declaration},
    identity::HOST_LABEL,
    metrics::Metrics,
    object::ObjectKey,
    plugin::Engine,
    policy::TenantPolicy,
    reconcile::Events,
    reconciler::Reconciler,
    source::Sources,
    telemetry,
    watch::watch,
};

/// What all reconcilers share.
#[derive(Clone)]
pub struct Supervisor {
    /// The way to the API server.
    pub server: ApiServer,
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
    /// What reconcilers in namespaces may ask for.
    pub tenants: Arc<TenantPolicy>,
    /// Where plugins come from.
    pub sources: Sources,
    /// The host's own namespace: what has to outlive the namespace of a `Reconciler` is kept there.
    pub home: String,
    /// Reconciles under way at once in the whole host.
    pub slots: Arc<Semaphore>,
    /// How many slots there are.
    pub total_slots: usize,
    /// Changes when a CustomResourceDefinition does: a kind that was missing may be there.
    pub kinds: watch::Sender<u64>,
    /// How to watch.
    pub watches: watcher::Config,
    /// Which of the reconcilers are its own.
    pub serves: Serves,
}

/// Which reconcilers a host serves.
#[derive(Clone, Debug)]
pub enum Serves {
    /// All but those that another host has to itself.
    All,
    /// Those that are labelled as its own, each with the plugin in a file, which takes over at once.
    Own {
        /// The value of the label.
        host: String,
        /// The component.
        plugin: PathBuf,
    },
}

impl Serves {
    fn selector(&self) -> String {
        match self {
            Self::All => format!("!{HOST_LABEL}"),
            Self::Own { host, .. } => format!("{HOST_LABEL}={host}"),
        }
    }

    /// What is declared, as this host takes it.
    fn take(&self, mut declared: Declaration) -> Declaration {
        if let Self::Own { plugin, .. } = self {
            declared.plugin = PluginSource { path: Some(plugin.clone()), ..PluginSource::default() };
            let rollout = declared.terms.rollout;
            declared.terms.rollout = Rollout { strategy: Strategy::Immediate, preview: Preview::Off, ..rollout };
        }
        declared
    }
}

/// A reconciler that lives, or comes to its end.
struct Living {
    uid: String,
    declared: watch::Sender<Declaration>,
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
        let mut events = stream::select(self.declared::<ClusterReconciler>(), self.declared::<crd::Reconciler>());
        let mut living: HashMap<ObjectKey, Living> = HashMap::new();
        // Of either kind: what a list that has begun has shown so far, and whether there was a list.
        let mut seen: [Vec<ObjectKey>; 2] = Default::default();
        let mut known = [false; 2];
        while let Some(Some((namespaced, event))) = stop.run_until_cancelled(events.next()).await {
            let of_kind = usize::from(namespaced);
            match event {
                Ok(watcher::Event::Init) => seen[of_kind].clear(),
                Ok(watcher::Event::InitApply(declaration)) => {
                    seen[of_kind].push(declaration.key.clone());
                    self.show(declaration, &mut living);
                }
                Ok(watcher::Event::Apply(declaration)) => self.show(declaration, &mut living),
                Ok(watcher::Event::Delete(declaration)) => {
                    if let Some(living) = living.get(&declaration.key) {
                        living.stop.cancel();
                    }
                }
                Ok(watcher::Event::InitDone) => {
                    let is_gone =
                        |key: &ObjectKey| key.namespace.is_some() == namespaced && !seen[of_kind].contains(key);
                    for (_, gone) in living.iter().filter(|(key, _)| is_gone(key)) {
                        gone.stop.cancel();
                    }
                    known[of_kind] = true;
                    listed.send_replace(known == [true; 2]);
                }
                Err(error) => tracing::warn!(
                    "cannot watch {} (is the CRD installed? `pilothouse crds | kubectl apply --server-side -f -`): {}",
                    if namespaced { "Reconcilers" } else { "ClusterReconcilers" },
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

    /// The reconcilers of one kind, as they come, change and go; and whether that kind lives in namespaces.
    fn declared<K>(&self) -> impl Stream<Item = (bool, watcher::Result<watcher::Event<Declaration>>)> + Send + use<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Into<Declaration> + Send + 'static,
    {
        let namespaced = K::kind(&()) == declaration::NAMESPACED;
        let serves = self.serves.clone();
        let events = watch(Api::<K>::all(self.client.clone()), self.watches.clone().labels(&serves.selector()));
        Box::pin(events.map(move |event| (namespaced, event.map(|event| declaration(event, &serves)))))
    }

    /// Shows a reconciler what is declared of it, or brings it to life.
    fn show(&self, declaration: Declaration, living: &mut HashMap<ObjectKey, Living>) {
        let (key, uid) = (declaration.key.clone(), declaration.metadata.uid.clone().unwrap_or_default());
        let same = living.get(&key).filter(|living| living.uid == uid && !living.stop.is_cancelled());
        if let Some(same) = same {
            same.declared.send_if_modified(|known| {
                // Our own status is no news.
                let news = known.metadata.generation != declaration.metadata.generation
                    || known.allowed_rollout() != declaration.allowed_rollout();
                *known = declaration;
                news
            });
            return;
        }
        let before = living.remove(&key);
        let stop = CancellationToken::new();
        let (declared, declarations) = watch::channel(declaration.clone());
        let life = Box::pin(Reconciler::new(self.clone(), declaration).run(declarations, stop.clone()));
        let task = async move {
            // One at a time: what the former one has begun comes to its end first.
            if let Some(before) = before {
                before.end().await;
            }
            life.await;
        };
        let task = tokio::spawn(task.instrument(info_span!("reconciler", reconciler = %key)));
        living.insert(key, Living { uid, declared, stop, task });
    }

    async fn watch_kinds(self) {
        let api = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(self.client.clone());
        let mut events = pin!(watch(api, self.watches.clone()));
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

fn declaration<K: Into<Declaration>>(event: watcher::Event<K>, serves: &Serves) -> watcher::Event<Declaration> {
    match event {
        watcher::Event::Init => watcher::Event::Init,
        watcher::Event::InitApply(declared) => watcher::Event::InitApply(serves.take(declared.into())),
        watcher::Event::InitDone => watcher::Event::InitDone,
        watcher::Event::Apply(declared) => watcher::Event::Apply(serves.take(declared.into())),
        watcher::Event::Delete(declared) => watcher::Event::Delete(declared.into()),
    }
}
