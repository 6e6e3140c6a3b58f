//! The reconcilers of the cluster: each is loaded, run and told about on its own, so that one that is broken harms none of the others.

use std::{collections::HashMap, pin::pin, sync::Arc, time::Duration};

use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
    discovery::{self, Scope},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, info_span};

use crate::{
    controller::{self, Watching},
    crd::{ClusterReconciler, ClusterReconcilerStatus},
    identity::{self, Identity},
    object::Kind,
    plugin::{self, CallLimits, Engine, Plugin, describe::KindName},
    reconcile::{Context, Events},
    source,
    store::Store,
    telemetry,
};

/// How long to wait before a reconciler that could not be loaded is tried again: doubles from the first to the last.
const RELOAD: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Who writes the status of reconcilers.
const FIELD_MANAGER: &str = "pilothouse";

/// Why a reconciler cannot be loaded.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Source(#[from] source::Error),
    #[error(transparent)]
    Plugin(#[from] plugin::LoadError),
    #[error("the API server does not serve {kind} ({api_version}); if it is a custom kind, install its CRD", kind = .0.kind, api_version = .0.api_version)]
    KindMissing(KindName, #[source] kube::Error),
    #[error("{kind} ({api_version}) is listed in the plugin's describe(), and is no proper kind", kind = .0.kind, api_version = .0.api_version)]
    KindName(KindName, #[source] kube::core::gvk::ParseGroupVersionError),
    #[error("failed to make a client that acts as the service account")]
    Client(#[source] kube::Error),
}

impl Error {
    /// The reason of condition `Loaded`.
    fn reason(&self) -> &'static str {
        match self {
            Self::Source(_) => "SourceUnavailable",
            Self::Plugin(_) => "InvalidPlugin",
            Self::KindMissing(..) => "KindMissing",
            Self::KindName(..) => "InvalidKind",
            Self::Client(_) => "ClientFailed",
        }
    }
}

/// What the host hands to each reconciler.
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
}

/// A reconciler that is being run, or comes to its end.
struct Running {
    uid: String,
    generation: Option<i64>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    async fn end(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            tracing::error!("a reconciler ended by a bug; please report it: {error}");
        }
    }
}

impl Supervisor {
    /// Runs the reconcilers that there are, as they come, change and go, until `stop`. `listed` becomes true once all are known.
    pub async fn run(self, listed: watch::Sender<bool>, stop: CancellationToken) {
        let api = Api::<ClusterReconciler>::all(self.client.clone());
        let mut events = pin!(watcher(api, watcher::Config::default()).default_backoff());
        let mut running: HashMap<String, Running> = HashMap::new();
        let mut seen = Vec::new();
        while let Some(Some(event)) = stop.run_until_cancelled(events.next()).await {
            match event {
                Ok(watcher::Event::Init) => seen.clear(),
                Ok(watcher::Event::InitApply(reconciler)) => {
                    seen.push(reconciler.name_any());
                    self.ensure(reconciler, &mut running, &stop);
                }
                Ok(watcher::Event::Apply(reconciler)) => self.ensure(reconciler, &mut running, &stop),
                Ok(watcher::Event::Delete(reconciler)) => {
                    if let Some(running) = running.get(&reconciler.name_any()) {
                        running.stop.cancel();
                    }
                }
                Ok(watcher::Event::InitDone) => {
                    for (_, gone) in running.iter().filter(|(name, _)| !seen.contains(name)) {
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
        for (_, running) in running {
            running.end().await;
        }
    }

    fn ensure(&self, reconciler: ClusterReconciler, running: &mut HashMap<String, Running>, stop: &CancellationToken) {
        let (name, uid, generation) =
            (reconciler.name_any(), reconciler.uid().unwrap_or_default(), reconciler.metadata.generation);
        let same =
            |running: &Running| running.uid == uid && running.generation == generation && !running.stop.is_cancelled();
        if running.get(&name).is_some_and(same) {
            return;
        }
        let before = running.remove(&name);
        let stop = stop.child_token();
        let span = info_span!("reconciler", reconciler = name);
        let (supervisor, stopped) = (self.clone(), stop.clone());
        let task = async move {
            // One at a time: what the former one has begun comes to its end first.
            if let Some(before) = before {
                before.end().await;
            }
            supervisor.supervise(reconciler, stopped).await;
        };
        let task = tokio::spawn(task.instrument(span));
        running.insert(name, Running { uid, generation, stop, task });
    }

    /// Loads one reconciler and runs it; what fails is told and tried again.
    async fn supervise(&self, mut reconciler: ClusterReconciler, stop: CancellationToken) {
        let mut wait = RELOAD.0;
        loop {
            let loaded = self.load(&reconciler).await;
            match loaded {
                Ok(context) => {
                    tracing::info!(revision = context.revision, parent = %context.parent_kind, "plugin loaded");
                    self.run_loaded(&mut reconciler, Arc::new(context), stop).await;
                    return;
                }
                Err(error) => {
                    let message = telemetry::chain(&error);
                    tracing::warn!(reason = error.reason(), "reconciler not loaded: {message}");
                    let mut status = reconciler.status.clone().unwrap_or_default();
                    set_condition(&mut status, &reconciler, "Loaded", "False", error.reason(), &message);
                    set_condition(&mut status, &reconciler, "Watching", "Unknown", "NotLoaded", "");
                    set_condition(&mut status, &reconciler, "Ready", "False", error.reason(), &message);
                    self.publish(&mut reconciler, status).await;
                }
            }
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return;
            }
            wait = (wait * 2).min(RELOAD.1);
        }
    }

    async fn run_loaded(&self, reconciler: &mut ClusterReconciler, context: Arc<Context>, stop: CancellationToken) {
        let watching = watch::Sender::default();
        let mut states = watching.subscribe();
        let mut state = Watching::default();
        let mut controller = pin!(controller::run(context.clone(), watching, stop));
        loop {
            let mut status = reconciler.status.clone().unwrap_or_default();
            let api = &context.parent_kind.api;
            status.parent_kind =
                Some(format!("{}.{}.{}", api.kind, api.version, api.group).trim_end_matches('.').to_owned());
            status.active_revision = Some(context.revision.clone());
            status.finalizer = context.plugin.has_finalizer().then(|| context.finalizer());
            set_condition(&mut status, reconciler, "Loaded", "True", "Loaded", "");
            let (value, reason, message) = match &state {
                Watching::Starting => ("Unknown", "Listing", ""),
                Watching::Yes => ("True", "Watching", ""),
                Watching::Failing(why) => ("False", "WatchFailed", why.as_str()),
            };
            set_condition(&mut status, reconciler, "Watching", value, reason, message);
            let value = if value == "True" { "True" } else { "False" };
            set_condition(&mut status, reconciler, "Ready", value, reason, message);
            tokio::select! {
                () = &mut controller => return,
                () = self.publish(reconciler, status) => {}
            }
            tokio::select! {
                () = &mut controller => return,
                Ok(()) = states.changed() => state = states.borrow_and_update().clone(),
            }
        }
    }

    async fn load(&self, reconciler: &ClusterReconciler) -> Result<Context, Error> {
        let spec = &reconciler.spec;
        let bytes = source::fetch(&self.client, &spec.plugin).await?;
        let limits =
            CallLimits { memory: spec.limits.memory.0, timeout: spec.limits.timeout.0, output: spec.limits.output.0 };
        let plugin = Plugin::load(&self.engine, bytes, limits).await?;

        let mut config = self.config.clone();
        config.auth_info.impersonate = Some(spec.service_account.user());
        let client = Client::try_from(config).map_err(Error::Client)?;

        let description = plugin.description();
        let parent_kind = resolve(&client, &description.parent).await?;
        let mut child_kinds = Vec::with_capacity(description.children.len());
        for kind in &description.children {
            child_kinds.push(resolve(&client, kind).await?);
        }
        child_kinds.sort_by(|a, b| (&a.api.kind, &a.api.api_version).cmp(&(&b.api.kind, &b.api.api_version)));
        child_kinds.dedup();

        let config = serde_json::Value::from(spec.config.clone()).to_string();
        let revision = Sha256::new_with_prefix(plugin.digest()).chain_update(&config).finalize();
        Ok(Context {
            identity: Identity::cluster_reconciler(&reconciler.name_any()),
            client,
            revision: identity::hex(&revision, 6),
            config,
            limits: spec.limits.clone(),
            parent_kind,
            parents: Store::default(),
            children: child_kinds.iter().map(|_| Store::default()).collect(),
            child_kinds,
            memory: std::sync::Mutex::default(),
            events: self.events.clone(),
            plugin: Arc::new(plugin),
        })
    }

    /// Writes the status if it has changed.
    async fn publish(&self, reconciler: &mut ClusterReconciler, mut status: ClusterReconcilerStatus) {
        status.observed_generation = reconciler.metadata.generation;
        if reconciler.status.as_ref() == Some(&status) {
            return;
        }
        let api = Api::<ClusterReconciler>::all(self.client.clone());
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let body = json!({"metadata": {"uid": reconciler.uid()}, "status": status});
        match api.patch_status(&reconciler.name_any(), &params, &Patch::Merge(&body)).await {
            Ok(_) => reconciler.status = Some(status),
            Err(error) => tracing::warn!("failed to write the status of the reconciler: {}", telemetry::chain(&error)),
        }
    }
}

/// How the API server serves a kind.
async fn resolve(client: &Client, name: &KindName) -> Result<Kind, Error> {
    let gvk = name.gvk().map_err(|error| Error::KindName(name.clone(), error))?;
    let served = discovery::pinned_kind(client, &gvk).await;
    let (api, capabilities) = served.map_err(|error| Error::KindMissing(name.clone(), error))?;
    let has_status = capabilities
        .subresources
        .iter()
        .any(|(subresource, _)| subresource.plural.ends_with("/status") || subresource.plural == "status");
    Ok(Kind { api, namespaced: capabilities.scope == Scope::Namespaced, has_status })
}

fn set_condition(
    status: &mut ClusterReconcilerStatus,
    reconciler: &ClusterReconciler,
    type_: &str,
    value: &str,
    reason: &str,
    message: &str,
) {
    let before = status.conditions.iter().position(|condition| condition.type_ == type_);
    let since = before.map(|place| &status.conditions[place]).filter(|before| before.status == value);
    let since = since.map_or_else(|| Time(Timestamp::now()), |before| before.last_transition_time.clone());
    let condition = Condition {
        type_: type_.to_owned(),
        status: value.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: since,
        observed_generation: reconciler.metadata.generation,
    };
    match before {
        Some(place) => status.conditions[place] = condition,
        None => status.conditions.push(condition),
    }
}
