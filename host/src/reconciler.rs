//! The life of one reconciler: its plugin is loaded, served, replaced by the next revision, and what happens is told on it.
//!
//! A revision comes up beside the one that serves: fetched, loaded, asked what it is, its kinds resolved, listed and watched. Only
//! then is it swapped in; a step that fails leaves the last good one serving, and condition `Degraded` says which step and why.
//! A reconciler that is deleted releases its parents first, or nobody would ever take its finalizer off them (`C16`).

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::Namespace,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{
    Api, Client,
    api::{PartialObjectMeta, Patch, PatchParams},
    core::Selector,
};
use serde_json::json;
use tokio::{sync::watch, task::JoinHandle, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::Instrument as _;

use crate::{
    claims::Claim,
    controller::{Controller, Watching},
    crd::{DeletionPolicy, ImageStatus, PluginSource, ReconcilerStatus, RolloutState, RolloutStatus, Terms},
    declaration::{self, Declaration},
    identity::{Identity, RELEASE_FINALIZER},
    lookup,
    metrics::Handles,
    object::{Kind, ObjectKey},
    plugin::{self, Access, describe::KindName},
    policy,
    queue::Queue,
    reconcile::{
        self, Context, ParentKey, Revisions, Settings,
        finalizer::{self, Ours},
    },
    related::Related,
    revision::{History, Kept, Material, Origin, Revision},
    rollout::{WITHDRAWN, Wait},
    secrets::{Copies, Secrets},
    source::{self, Image, Source},
    store::Store,
    supervisor::Supervisor,
    tally::Tally,
    telemetry,
};

/// How long to wait before what failed is tried again: doubles from the first to the last. A change of the spec, of the plugin's
/// ConfigMap or of a CRD ends the wait.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How long the kinds of a new revision may take to be listed before it is given up, and tried again.
const LISTING: Duration = Duration::from_secs(30);
/// How long after a change of a CRD its kind is looked at: the API server shows a definition before it serves it.
const SETTLING: Duration = Duration::from_secs(2);
/// Farther away than any process lives.
const NEVER: Duration = Duration::from_hours(24 * 365 * 30);
/// How often at most the counts of the parents are published for their own sake.
const COUNTS: Duration = Duration::from_secs(10);
/// Who writes the status of reconcilers.
const FIELD_MANAGER: &str = "pilothouse";
/// How often a rollout looks whether it can go on.
const STEPS: Duration = Duration::from_secs(1);

mod rollout;

use self::rollout::{Determinism, Previewed};

/// The host itself, in the place of an account that has no rights any more.
const HOST: &str = "";

/// Why a revision does not serve.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Source(#[from] source::Error),
    #[error(transparent)]
    Policy(#[from] policy::Error),
    #[error(transparent)]
    Plugin(#[from] plugin::LoadError),
    #[error(transparent)]
    KindMissing(#[from] lookup::KindMissing),
    #[error("the plugin reconciles {to}, and this reconciler has parents of {from}; make another reconciler for it")]
    ParentKindChanged { from: String, to: String },
    #[error(
        "{0} is of cluster scope, and a Reconciler sees only its own namespace; make a ClusterReconciler for this plugin"
    )]
    ClusterScoped(String),
    #[error("spec.selector is no label selector")]
    Selector(#[source] kube::core::ParseExpressionError),
    #[error("failed to make a client that acts as the service account")]
    Client(#[source] kube::Error),
    #[error("failed to note the kinds of the children in the status of the reconciler")]
    Status(#[source] kube::Error),
    #[error("its kinds cannot be watched: {0}")]
    Watch(String),
    #[error("ControllerRevision {0} is not as the host has made it")]
    Changed(String),
    #[error("failed to read the revisions that are kept")]
    History(#[source] kube::Error),
    #[error("failed to remove what was kept of this reconciler in the namespace of the host (see deploy/host.yaml)")]
    Kept(#[source] kube::Error),
    #[error("failed to see whether the namespace is being deleted (see deploy/host.yaml)")]
    Namespace(#[source] kube::Error),
    #[error(
        "its kinds are {0} and {1}, and two versions of a kind cannot be seen at the same time, as a staged rollout has to; set \
         spec.rollout.strategy to Immediate for this revision"
    )]
    KindVersions(KindName, KindName),
    #[error("{0}")]
    Guarded(String),
    #[error("{0}")]
    RolledBack(String),
    #[error("failed to write the finalizer of the reconciler, or of a parent that it releases")]
    Finalizer(#[from] finalizer::Error),
    #[error(
        "{0} parents still carry the finalizer of this reconciler, and spec.deletionPolicy is Block; delete them first"
    )]
    Blocked(usize),
    #[error("the namespace is being deleted, and {0} parents in it are not cleaned up yet; their conditions say why")]
    NamespaceEnds(usize),
    #[error(
        "its parents cannot be released, since nothing serves that could see them; mend the reconciler, or remove its finalizer by \
         hand, and {0} from its parents"
    )]
    CannotRelease(String),
}

impl Error {
    /// A stable name: the reason of the condition.
    fn reason(&self) -> &'static str {
        match self {
            Self::Source(error) => error.reason(),
            Self::Policy(_) => "NotAllowed",
            Self::Plugin(plugin::LoadError::NotGranted { .. }) => "NotGranted",
            Self::Plugin(_) => "InvalidPlugin",
            Self::KindMissing(_) => "KindMissing",
            Self::ParentKindChanged { .. } => "ParentKindChanged",
            Self::ClusterScoped(_) => "ClusterScoped",
            Self::Selector(_) => "InvalidSelector",
            Self::Client(_) => "ClientFailed",
            Self::Status(_) => "StatusNotWritten",
            Self::Watch(_) => "WatchFailed",
            Self::Changed(_) => "RevisionChanged",
            Self::History(_) => "HistoryNotRead",
            Self::Kept(_) => "KeptNotRemoved",
            Self::Namespace(_) => "NamespaceNotRead",
            Self::KindVersions(..) => "KindVersions",
            Self::Guarded(_) => "RolloutGuarded",
            Self::RolledBack(_) => "RolledBack",
            Self::Finalizer(_) => "FinalizerNotWritten",
            Self::Blocked(_) => "DeletionBlocked",
            Self::NamespaceEnds(_) => "NamespaceTerminating",
            Self::CannotRelease(_) => "CannotRelease",
        }
    }

    /// Whether it is no failure, but waits for what takes its time: then it is looked at again soon.
    fn is_wait(&self) -> bool {
        matches!(self, Self::NamespaceEnds(_))
    }

    /// Whether the revision works, and is not let in all the same: then it is not tried again for its own sake.
    fn is_held(&self) -> bool {
        matches!(self, Self::Guarded(_) | Self::RolledBack(_))
    }
}

/// One reconciler as long as it exists.
pub struct Reconciler {
    supervisor: Supervisor,
    /// As it was last seen, with the status that we last wrote.
    declared: Declaration,
    identity: Identity,
    metrics: Arc<Handles>,
    /// The Secrets that its grants name.
    secrets: Arc<Secrets>,
    /// What the calls of its plugin may reach.
    access: Arc<Access>,
    serving: Option<Serving>,
    /// What came of the latest attempt, if it failed.
    problem: Option<Error>,
    /// The id of the revision that the spec asks for, if it could be fetched.
    desired: Option<String>,
    /// The image that the spec asks for, as it was fetched last.
    image: Option<Image>,
    /// How far the latest revision has taken over.
    rollout: Option<RolloutStatus>,
    /// What it would change, as the latest preview has shown.
    previewed: Option<Previewed>,
    /// Whether its answers were the same each time; none: as it was told before.
    determinism: Option<Determinism>,
    /// What the rollout was last seen to wait for.
    waits_for: Option<Wait>,
    /// The claims that went before ours when it was last looked.
    rivals: Vec<Claim>,
}

/// A revision that serves.
struct Serving {
    controller: Arc<Controller>,
    /// What it runs under: a change of these needs new watches.
    binding: Binding,
    _watches: AbortOnDropHandle<()>,
    workers: Option<JoinHandle<()>>,
    stop: CancellationToken,
}

/// A revision that watches, and does not reconcile yet.
struct Started {
    controller: Arc<Controller>,
    watches: AbortOnDropHandle<()>,
}

/// What the watches of a controller are made for.
#[derive(Clone, PartialEq)]
struct Binding {
    /// Whom it acts as: an account, or [`HOST`].
    account: String,
    selector: Selector,
}

impl Serving {
    /// Begins no more reconciles, and lets those that run come to their end.
    async fn halt(&mut self) {
        self.stop.cancel();
        if let Some(workers) = &mut self.workers {
            let ended = workers.await;
            // Not before: who is interrupted here has not seen them end.
            self.workers = None;
            if let Err(error) = ended {
                tracing::error!("the workers of a reconciler ended by a bug; please report it: {error}");
            }
        }
    }
}

impl Drop for Serving {
    /// Whoever drops it without [`Self::halt`] wants what runs to stop at once.
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(workers) = &self.workers {
            workers.abort();
        }
    }
}

impl Reconciler {
    /// The reconciler that is declared so.
    pub fn new(supervisor: Supervisor, declared: Declaration) -> Self {
        let identity = Identity::of(&declared.key);
        let metrics = supervisor.metrics.of(&declared.key.to_string());
        let copies =
            declared.scope().map(|_| Copies::new(supervisor.client.clone(), &supervisor.home, identity.label()));
        let secrets = Arc::new(Secrets::new(supervisor.client.clone(), supervisor.watches.clone(), copies));
        let access = Arc::new(Access::new(metrics.calls.clone(), secrets.clone()));
        access.grant(supervisor.tenants.grants(&declared.key, &declared.grants), &declared.plugin.pull_secrets);
        let rollout = declared.status.as_ref().and_then(|status| status.rollout.clone());
        Self {
            supervisor,
            declared,
            identity,
            metrics,
            secrets,
            access,
            serving: None,
            problem: None,
            desired: None,
            image: None,
            rollout,
            previewed: None,
            determinism: None,
            waits_for: None,
            rivals: Vec::new(),
        }
    }

    /// Follows the reconciler as `specs` shows it, until `stop`.
    pub async fn run(mut self, mut specs: watch::Receiver<Declaration>, stop: CancellationToken) {
        let mut kinds = self.supervisor.kinds.subscribe();
        let mut claims = self.supervisor.claims.changes();
        let mut secrets = self.secrets.changes();
        let mut source = self.source();
        let mut wait = RETRY.0;
        let mut settled = std::pin::pin!(tokio::time::sleep(NEVER));
        let (mut only_kinds, mut kinds_changed) = (false, false);
        loop {
            if !std::mem::take(&mut only_kinds) {
                self.bring_up(&mut source, &mut specs, &stop).await;
            }
            if kinds_changed {
                kinds_changed = !self.follow_kinds(&mut specs, &stop).await;
            }
            // Before it is told how things are: what changes meanwhile is told, too.
            let (mut watching, mut rival) = self.signals();
            let mut counts = self.counts();
            self.publish().await;
            let retry = self.problem.as_ref().filter(|problem| !problem.is_held()).map(|_| wait);
            let waits = self.problem.as_ref().is_none_or(Error::is_wait);
            wait = if retry.is_some() && !waits { (wait * 2).min(RETRY.1) } else { RETRY.0 };
            let mut retry = std::pin::pin!(async {
                match retry {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            });
            let mut steps = tokio::time::interval(STEPS);
            // Until something says that there may be another revision to bring up.
            loop {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return self.end().await,
                    Ok(()) = specs.changed() => {
                        let declared = specs.borrow_and_update().clone();
                        let moved = declared.plugin != self.declared.plugin;
                        self.renew(declared);
                        if moved {
                            source = self.source();
                        }
                        wait = RETRY.0;
                        break;
                    }
                    () = source.changed() => { wait = RETRY.0; break; }
                    Ok(()) = kinds.changed() => {
                        if self.problem.is_some() {
                            wait = RETRY.0;
                            break;
                        }
                        settled.as_mut().reset(Instant::now() + SETTLING);
                    }
                    () = &mut settled => {
                        settled.as_mut().reset(Instant::now() + NEVER);
                        (only_kinds, kinds_changed) = (true, true);
                        break;
                    }
                    () = &mut retry => break,
                    Ok(()) = claims.changed() => {
                        let now = self.supervisor.claims.rivals(&self.declared.key);
                        let before = std::mem::replace(&mut self.rivals, now);
                        if let Some(serving) = self.serving.as_ref().filter(|_| before != self.rivals) {
                            serving.controller.resync();
                        }
                    }
                    // What went wrong for want of a Secret may go well now.
                    Ok(()) = secrets.changed() => {
                        if let Some(serving) = &self.serving {
                            serving.controller.resync();
                        }
                    }
                    Some(()) = changed(&mut watching) => self.publish().await,
                    Some(()) = changed(&mut rival) => self.publish().await,
                    Some(()) = counts.next() => self.publish().await,
                    _ = steps.tick(), if self.is_rolling() => {
                        if self.advance().await {
                            self.publish().await;
                        }
                    }
                }
            }
        }
    }

    /// Takes over a new spec. What does not belong to a revision holds at once.
    fn renew(&mut self, declared: Declaration) {
        // The status is what we last wrote, which the watch may not have shown yet.
        let status = self.declared.status.take().or(declared.status.clone());
        let account = self.declared.account.user();
        self.declared = Declaration { status, ..declared };
        let readable = self.access.readable_secrets();
        let grants = self.supervisor.tenants.grants(&self.declared.key, &self.declared.grants);
        self.access.grant(grants, &self.declared.plugin.pull_secrets);
        if account != self.declared.account.user() {
            // Not even what runs may go on as an account that is no longer named.
            self.access.read_as(None);
            self.serving = None;
        }
        let Some(serving) = &self.serving else { return };
        if self.access.readable_secrets() != readable {
            // What its parents see may be another thing.
            serving.controller.resync();
        }
        let settings = self.settings();
        let before = serving.controller.context.settings();
        if *before != settings {
            let concerns_all = (before.paused && !settings.paused)
                || before.legacy_finalizers != settings.legacy_finalizers
                || before.drop_finalizer != settings.drop_finalizer;
            serving.controller.context.set(settings);
            if concerns_all {
                serving.controller.resync();
            }
        }
    }

    fn settings(&self) -> Settings {
        let Terms { limits, paused, legacy_finalizers, drop_finalizer, .. } = &self.declared.terms;
        Settings {
            limits: self.supervisor.tenants.limits(&self.declared.key, limits),
            paused: *paused,
            legacy_finalizers: legacy_finalizers.clone(),
            drop_finalizer: *drop_finalizer,
        }
    }

    async fn end(mut self) {
        if let Some(serving) = &mut self.serving {
            serving.halt().await;
            if self.declared.metadata.deletion_timestamp.is_none() {
                // Or the next host would have to tell what this one knows: the counts of the parents.
                self.publish().await;
            }
        }
        // Only now: another reconciler may take the parents over at once.
        self.supervisor.claims.remove(&self.declared.key);
    }

    /// Brings up the revision that the spec asks for, unless it serves already; and if there is none that serves, the last good one.
    async fn bring_up(
        &mut self,
        source: &mut Source,
        specs: &mut watch::Receiver<Declaration>,
        stop: &CancellationToken,
    ) {
        let outcome = tokio::select! {
            biased;
            outcome = self.bring_up_desired(source) => outcome,
            // What was begun is about a spec that no longer holds.
            Ok(()) = specs.changed() => { specs.mark_changed(); return; }
            () = stop.cancelled() => return,
        };
        match outcome {
            Ok(()) => self.problem = None,
            Err(error) => {
                let message = telemetry::chain(&error);
                // What is tried again and fails the same way is no news.
                if self.problem.as_ref().map(|known| telemetry::chain(known)).as_ref() != Some(&message) {
                    tracing::warn!(reason = error.reason(), "the desired revision does not serve: {message}");
                }
                self.problem = Some(error);
                if self.serving.is_none() {
                    self.fall_back().await;
                }
            }
        }
    }

    /// A CRD has changed: what serves begins anew if one of its kinds is served in another way now, such as with a status. Whether that is
    /// done.
    async fn follow_kinds(&mut self, specs: &mut watch::Receiver<Declaration>, stop: &CancellationToken) -> bool {
        let outcome = tokio::select! {
            biased;
            outcome = self.watch_changed_kinds() => outcome,
            Ok(()) = specs.changed() => { specs.mark_changed(); return false; }
            () = stop.cancelled() => return false,
        };
        // What is wrong with the desired revision stays wrong.
        let failed = outcome.is_err();
        self.problem = outcome.err().or(self.problem.take());
        !failed
    }

    async fn watch_changed_kinds(&mut self) -> Result<(), Error> {
        let Some(serving) = &self.serving else { return Ok(()) };
        let (context, binding) = (serving.controller.context.clone(), serving.binding.clone());
        let mut changed = false;
        let kinds = std::iter::once(&context.parent_kind).chain(&context.child_kinds);
        for kind in kinds.filter(|kind| !kind.is_built_in()) {
            // One that is not served at all is told by its watch, which goes on trying.
            changed |= lookup::kind(&context.client, &kind.name()).await.is_ok_and(|served| served != *kind);
        }
        if changed {
            let revisions = context.revisions();
            let (parent_kind, child_kinds) = self.resolve(&context.client, &[], &revisions.all()).await?;
            let started = self.start(context.client.clone(), &binding, parent_kind, child_kinds, revisions).await?;
            self.go(started, binding);
            tracing::info!("its kinds are served in another way: they are watched anew");
        }
        Ok(())
    }

    async fn bring_up_desired(&mut self, source: &mut Source) -> Result<(), Error> {
        self.desired = None;
        if self.declared.metadata.deletion_timestamp.is_some() {
            return self.release_parents().await;
        }
        let tenants = &self.supervisor.tenants;
        tenants.check(&self.declared.key, &self.declared.terms.limits, &self.declared.grants)?;
        let known = self.declared.status.as_ref().and_then(|status| status.image.as_ref());
        let plugin = source.fetch(self.declared.scope(), known).await?;
        self.image.clone_from(&plugin.image);
        let material = Material { plugin, config: self.declared.terms.config.clone() };
        self.desired = Some(material.id());
        self.take_over(material).await
    }

    /// The last thing that a reconciler does.
    async fn release_parents(&mut self) -> Result<(), Error> {
        if !self.declared.has_finalizer(RELEASE_FINALIZER) {
            return Ok(());
        }
        let ends = self.namespace_ends().await?;
        if ends {
            self.secrets.let_copies_hold();
            self.see_out().await?;
        } else if self.serving.is_none() {
            self.fall_back().await;
        }
        if !self.is_permitted().await {
            self.see_out().await?;
        }
        let finalizer = self.identity.finalizer();
        let Some(serving) = &mut self.serving else { return Err(Error::CannotRelease(finalizer)) };
        let controller = serving.controller.clone();
        let context = &controller.context;
        let mut watching = controller.watching();
        if tokio::time::timeout(LISTING, watching.wait_for(|watching| watching.synced)).await.is_err() {
            return Err(Error::CannotRelease(finalizer));
        }
        let holding = async || context.holding().await.map_err(finalizer::Error::Request);
        match self.declared.terms.deletion_policy {
            // Who deletes all of a namespace wants its parents gone, and not let go.
            _ if ends => {
                let waiting = holding().await?.len();
                if waiting > 0 {
                    return Err(Error::NamespaceEnds(waiting));
                }
            }
            DeletionPolicy::Block => {
                let waiting = holding().await?.len();
                if waiting > 0 {
                    return Err(Error::Blocked(waiting));
                }
            }
            DeletionPolicy::Release => {
                serving.halt().await;
                for parent in holding().await? {
                    reconcile::release(context, &parent).await?;
                }
            }
        }
        // Nobody would know of them any more.
        self.secrets.remove_copies().await.map_err(Error::Kept)?;
        match self.history().remove_all().await {
            Err(error) if self.declared.scope().is_some() => return Err(Error::Kept(error)),
            // Its role for them may be gone; they are beside the plugin, and do no harm.
            Err(error) => tracing::warn!("failed to remove the revisions that were kept: {}", telemetry::chain(&error)),
            Ok(()) => {}
        }
        self.write_finalizer(false).await
    }

    /// Whether all of the namespace is being deleted, and not this reconciler alone.
    async fn namespace_ends(&self) -> Result<bool, Error> {
        let Some(namespace) = self.declared.scope() else { return Ok(false) };
        let api = Api::<PartialObjectMeta<Namespace>>::all(self.supervisor.client.clone());
        let namespace = lookup::get(&api, namespace).await.map_err(Error::Namespace)?;
        Ok(namespace.is_none_or(|namespace| namespace.metadata.deletion_timestamp.is_some()))
    }

    /// Whether what serves, if anything does, may still see its parents. Who uninstalls a plugin may have removed its roles first.
    async fn is_permitted(&self) -> bool {
        let Some(serving) = &self.serving else { return false };
        let mut watching = serving.controller.watching();
        let told = watching.wait_for(|watching| watching.synced || watching.failing.values().any(|it| it.forbidden));
        match tokio::time::timeout(LISTING, told).await {
            Ok(Ok(watching)) => watching.synced && !watching.failing.values().any(|it| it.forbidden),
            _ => true,
        }
    }

    /// Goes on as the host, whose own rights end at the parents: their children are the garbage collector's now, or the namespace's.
    async fn see_out(&mut self) -> Result<(), Error> {
        if self.serving.as_ref().is_some_and(|serving| serving.binding.account == HOST) {
            return Ok(());
        }
        let served = self.serving.as_ref().map(|serving| serving.controller.context.revisions());
        let revisions = match served {
            Some(revisions) => revisions,
            None => match self.last_good().await? {
                Some(revision) => Revisions::only(revision),
                None => return Ok(()),
            },
        };
        let client = self.supervisor.client.clone();
        let parent_kind = lookup::kind(&client, &revisions.active.plugin.description().parent).await?;
        let binding = Binding { account: HOST.to_owned(), ..self.binding()? };
        let started = self.start(client, &binding, parent_kind, Vec::new(), revisions).await?;
        self.go(started, binding);
        tracing::info!("the service account is at its end: the host itself sees its parents out");
        Ok(())
    }

    /// Sees to it that this reconciler is not gone before its parents are released, or lets it go.
    async fn write_finalizer(&mut self, wanted: bool) -> Result<(), Error> {
        let api = self.declared.api(self.supervisor.client.clone());
        let fresh = lookup::get(&api, &self.declared.key.name).await.map_err(finalizer::Error::Request)?;
        let Some(fresh) = fresh.filter(|fresh| Some(fresh.uid()) == self.declared.metadata.uid.as_deref()) else {
            return Ok(());
        };
        let ours = Ours::new(RELEASE_FINALIZER, Vec::new());
        match (ours.are_on(&fresh), wanted) {
            (false, true) => drop(finalizer::add(&api, &fresh, &ours).await?),
            (true, false) => drop(finalizer::remove(&api, &fresh, &ours).await?),
            _ => {}
        }
        Ok(())
    }

    fn binding(&self) -> Result<Binding, Error> {
        let selector = self.declared.terms.selector.clone();
        let selector = selector.map(Selector::try_from).transpose().map_err(Error::Selector)?.unwrap_or_default();
        Ok(Binding { account: self.declared.account.user(), selector })
    }

    /// What a revision that is kept was made of; none if it is not kept.
    async fn kept(&self, id: &str) -> Result<Option<Material>, Error> {
        let Some(Kept { origin, config }) = self.history().find(id).await.map_err(Error::History)? else {
            return Ok(None);
        };
        let plugin = match origin {
            Origin::Component(bytes) => bytes.into(),
            Origin::Image(image) => {
                let source =
                    PluginSource { image: Some(image), config_map: None, path: None, ..self.declared.plugin.clone() };
                self.supervisor.sources.fetch(self.declared.scope(), &source, None).await?
            }
        };
        let material = Material { plugin, config };
        if material.id() == id { Ok(Some(material)) } else { Err(Error::Changed(id.to_owned())) }
    }

    /// Lets these revisions serve: beside what does until all is ready, then in its place.
    async fn install(&mut self, revisions: Revisions) -> Result<(), Error> {
        let binding = self.binding()?;
        // One that serves as this account has a client, with connections that are open.
        let client = match &self.serving {
            Some(serving) if serving.binding == binding => serving.controller.context.client.clone(),
            _ => self.impersonate(&binding.account)?,
        };
        let (parent_kind, child_kinds) = self.resolve(&client, &self.known_kinds(), &revisions.all()).await?;
        self.note_kinds(&child_kinds).await?;
        if !self.declared.has_finalizer(RELEASE_FINALIZER) {
            self.write_finalizer(true).await?;
        }

        let in_place = self.serving.as_ref().filter(|serving| {
            let context = &serving.controller.context;
            serving.binding == binding
                && context.parent_kind == parent_kind
                && child_kinds.iter().all(|kind| context.child_kinds.contains(kind))
        });
        if let Some(serving) = in_place {
            let context = &serving.controller.context;
            let before = context.revisions();
            context.serve(revisions);
            if before.active.id == context.revisions().active.id {
                serving.controller.resync_moved(&before);
            } else {
                serving.controller.resync();
            }
        } else {
            let started = self.start(client, &binding, parent_kind, child_kinds, revisions).await?;
            self.go(started, binding);
        }
        Ok(())
    }

    /// Keeps a revision that serves, and the one `beside` it.
    async fn keep(&self, material: &Material, beside: Option<&str>) {
        let limit = usize::try_from(self.declared.terms.revision_history_limit).unwrap_or(5);
        if let Err(error) = self.history().keep(material, beside, limit).await {
            tracing::warn!(
                "failed to keep the revision, a restart could not fall back to it (see `pilothouse manifests`): {error}"
            );
        }
    }

    /// Watches for a revision; it does not reconcile yet.
    async fn start(
        &self,
        client: Client,
        binding: &Binding,
        parent_kind: Kind,
        child_kinds: Vec<Kind>,
        revisions: Revisions,
    ) -> Result<Started, Error> {
        let queue = Arc::<Queue<ParentKey>>::default();
        let scope = self.declared.scope().map(str::to_owned);
        let watches = self.supervisor.watches.clone();
        // What the host may see itself is no business of a plugin's.
        let reads = match binding.account.as_str() {
            HOST => self.impersonate(&self.declared.account.user())?,
            _ => client.clone(),
        };
        let is_over = binding.account == HOST;
        let related = Related::new(reads, scope, is_over, self.access.clone(), watches.clone(), queue.clone());
        let mut tally = Tally::default();
        tally.serve(&revisions.active.id, revisions.candidate.as_ref().map(|it| it.revision.id.as_str()));
        let context = Context {
            key: self.declared.key.clone(),
            identity: self.identity.clone(),
            client,
            claims: self.supervisor.claims.clone(),
            tally: Mutex::new(tally),
            metrics: self.metrics.clone(),
            revisions: revisions.into(),
            trusted: self.declared.status.as_ref().and_then(|status| status.last_good_revision.clone()),
            settings: Arc::new(self.settings()).into(),
            parents: Store::of(&parent_kind),
            parent_kind,
            selector: binding.selector.clone(),
            children: child_kinds.iter().map(Store::of).collect(),
            child_kinds,
            orphaned: std::sync::Mutex::default(),
            vanished: std::sync::Mutex::default(),
            related,
            memory: std::sync::Mutex::default(),
            events: self.supervisor.events.clone(),
            rival: watch::Sender::default(),
        };
        let controller = Arc::new(Controller::new(Arc::new(context), queue, watches));
        let watches = AbortOnDropHandle::new(tokio::spawn(controller.clone().watch().in_current_span()));
        // Without one that serves there is nothing to keep: the watches go on trying, and their state is told.
        if self.serving.is_some() {
            let mut watching = controller.watching();
            let synced = tokio::time::timeout(LISTING, watching.wait_for(|watching| watching.synced)).await.is_ok();
            if !synced {
                return Err(Error::Watch(failures(&controller.watching().borrow())));
            }
        }
        Ok(Started { controller, watches })
    }

    /// Lets what was started serve, once the former one has come to its end.
    fn go(&mut self, started: Started, binding: Binding) {
        let Started { controller, watches } = started;
        let context = &controller.context;
        self.supervisor.claims.set(Claim {
            reconciler: context.key.clone(),
            created: self
                .declared
                .metadata
                .creation_timestamp
                .as_ref()
                .map(|time| time.0.to_string())
                .unwrap_or_default(),
            kind: context.parent_kind.group_kind(),
            selector: context.selector.clone(),
        });
        self.rivals = self.supervisor.claims.rivals(&self.declared.key);
        self.metrics.serve(&controller);
        self.access.read_as(Some(context.related.reader()));
        let stop = CancellationToken::new();
        let slots = self.supervisor.slots.clone();
        let work = controller.clone().work(slots, self.supervisor.total_slots, stop.clone());
        let former = self.serving.take();
        let work = async move {
            // No parent is reconciled by two at a time.
            if let Some(mut former) = former {
                former.halt().await;
            }
            work.await;
        };
        let workers = tokio::spawn(work.in_current_span());
        self.serving = Some(Serving { controller, binding, _watches: watches, workers: Some(workers), stop });
    }

    fn impersonate(&self, account: &str) -> Result<Client, Error> {
        let Supervisor { server, metrics, .. } = &self.supervisor;
        metrics.client(server, Some((account, self.metrics.clone()))).map_err(Error::Client)
    }

    /// The kinds of what serves, whose definitions it follows: a revision that takes over need not ask for them again.
    fn known_kinds(&self) -> Vec<Kind> {
        let context = self.serving.as_ref().map(|serving| &serving.controller.context);
        let kinds = context.map(|context| std::iter::once(&context.parent_kind).chain(&context.child_kinds));
        kinds.into_iter().flatten().cloned().collect()
    }

    /// The kinds of the revisions that serve together, and those that earlier ones may have left something of. The API server is asked of
    /// those that are not `known`.
    async fn resolve(
        &self,
        client: &Client,
        known: &[Kind],
        revisions: &[&Revision],
    ) -> Result<(Kind, Vec<Kind>), Error> {
        let descriptions = || revisions.iter().map(|revision| revision.plugin.description());
        let mut declared: Vec<&KindName> = Vec::new();
        for kind in descriptions().flat_map(|description| &description.children) {
            if !declared.contains(&kind) {
                declared.push(kind);
            }
        }
        let parents: Vec<_> = descriptions().map(|description| &description.parent).collect();
        if revisions.len() > 1 {
            let all = || parents.iter().chain(&declared).copied();
            for kind in all() {
                if let Some(other) = all().find(|other| *other != kind && other.is_same_kind(kind)) {
                    return Err(Error::KindVersions(other.clone(), kind.clone()));
                }
            }
        }
        let mut parent_kind = None;
        for parent in parents {
            let kind = lookup::kind_or_known(client, known, parent).await?;
            let serves = self.serving.as_ref().map(|serving| &serving.controller.context.parent_kind);
            if let Some(from) = parent_kind.as_ref().or(serves).filter(|from| from.group_kind() != kind.group_kind()) {
                return Err(Error::ParentKindChanged { from: from.to_string(), to: kind.to_string() });
            }
            parent_kind = Some(kind);
        }
        let Some(parent_kind) = parent_kind else { return Err(Error::Watch("no revision serves".to_owned())) };
        let applied = self.declared.status.as_ref().map(|status| status.applied_kinds.as_slice());
        let child_kinds = lookup::child_kinds(client, known, &declared, applied.unwrap_or_default()).await?;
        if self.declared.scope().is_some()
            && let Some(kind) = std::iter::once(&parent_kind).chain(&child_kinds).find(|kind| !kind.namespaced)
        {
            return Err(Error::ClusterScoped(kind.to_string()));
        }
        Ok((parent_kind, child_kinds))
    }

    /// Notes the kinds in the status, before the first child of one is made.
    async fn note_kinds(&mut self, kinds: &[Kind]) -> Result<(), Error> {
        let mut status = self.declared.status.clone().unwrap_or_default();
        status.rollout.clone_from(&self.rollout);
        let noted: BTreeSet<_> = kinds.iter().map(Kind::name).collect();
        status.applied_kinds = noted.into_iter().collect();
        self.write(status).await.map_err(Error::Status)
    }

    /// What is kept of a tenant has to outlive its namespace.
    fn history(&self) -> History {
        let namespace = self.declared.scope().map_or(&self.declared.account.namespace, |_| &self.supervisor.home);
        History::new(self.supervisor.client.clone(), namespace, self.identity.clone())
    }

    fn source(&self) -> Source {
        self.supervisor.sources.follow(&self.supervisor.watches, &self.declared.plugin)
    }

    fn signals(&self) -> (Option<watch::Receiver<Watching>>, Option<watch::Receiver<Option<ObjectKey>>>) {
        let controller = self.serving.as_ref().map(|serving| &serving.controller);
        (
            controller.map(|controller| controller.watching()),
            controller.map(|controller| controller.context.rival.subscribe()),
        )
    }

    /// Tells when the counts of the parents have changed, at most every so often.
    fn counts(&self) -> std::pin::Pin<Box<dyn Stream<Item = ()> + Send>> {
        let Some(serving) = &self.serving else { return Box::pin(stream::pending()) };
        let changes = stream::unfold((serving.controller.counts(), Duration::ZERO), |(mut counts, pause)| async move {
            tokio::time::sleep(pause).await;
            counts.changed().await.ok()?;
            Some(((), (counts, COUNTS)))
        });
        Box::pin(changes.chain(stream::pending()))
    }

    /// Tells on the reconciler how it is; not while all goes well and is about to be listed, so that a host that starts writes nothing.
    async fn publish(&mut self) {
        let mut status = self.declared.status.clone().unwrap_or_default();
        let starting = self.serving.as_ref().is_some_and(|serving| {
            let watching = serving.controller.watching();
            let watching = watching.borrow();
            !watching.synced && watching.failing.is_empty()
        });
        if starting && !status.conditions.is_empty() {
            return;
        }
        status.observed_generation = self.declared.metadata.generation;
        status.desired_revision.clone_from(&self.desired);
        status.active_revision = None;
        if self.declared.plugin.image.is_none() {
            status.image = None;
        } else if let Some(Image { reference, digest, .. }) = self.image.clone() {
            status.image = Some(ImageStatus { reference, digest });
        }
        status.rollout = self.told_rollout();
        let watching = self.serving.as_ref().map(|serving| serving.controller.watching().borrow().clone());
        if let Some(serving) = &self.serving {
            let context = &serving.controller.context;
            let revisions = context.revisions();
            let active = &revisions.active;
            let api = &context.parent_kind.api;
            status.parent_kind =
                Some(format!("{}.{}.{}", api.kind, api.version, api.group).trim_end_matches('.').to_owned());
            let cleans_up = revisions.all().iter().any(|revision| revision.plugin.has_finalizer());
            status.finalizer = cleans_up.then(|| context.finalizer());
            status.last_good_revision = Some(active.id.clone());
            status.active_revision = Some(active.id.clone());
            status.parents = context.known_parents().or(status.parents);
        }
        let rival = self.serving.as_ref().and_then(|serving| serving.controller.context.rival.borrow().clone());
        self.set_conditions(&mut status, watching.as_ref(), rival.as_ref());
        if let Err(error) = self.write(status).await {
            tracing::warn!("failed to write the status of the reconciler: {}", telemetry::chain(&error));
        }
    }

    fn set_conditions(&self, status: &mut ReconcilerStatus, watching: Option<&Watching>, rival: Option<&ObjectKey>) {
        let problem = self.problem.as_ref().map(|error| (error.reason(), telemetry::chain(error)));
        let ok = |reason: &'static str| ("True", reason, String::new());
        let loaded = match (&problem, &self.serving) {
            (None, _) => ok("Loaded"),
            _ if self.problem.as_ref().is_some_and(Error::is_held) => ok("Loaded"),
            (Some((reason, message)), _) => ("False", *reason, message.clone()),
        };
        let (resolved, verified) = match &self.problem {
            Some(Error::Source(error)) if error.is_of_verification() => (ok("Resolved"), loaded.clone()),
            Some(Error::Source(_)) => (loaded.clone(), ("Unknown", "NotResolved", String::new())),
            _ => match self.image.as_ref().filter(|_| self.declared.plugin.image.is_some()) {
                Some(image) => {
                    let verified = if image.verified { "Verified" } else { "NotRequired" };
                    (("True", "Resolved", format!("{} is {}", image.reference, image.digest)), ok(verified))
                }
                None => (ok("Resolved"), ok("NotRequired")),
            },
        };
        let (permitted, watched) = match watching {
            None => (("Unknown", "NotLoaded", String::new()), ("Unknown", "NotLoaded", String::new())),
            Some(watching) => {
                let forbidden = watching.failing.values().find(|failure| failure.forbidden);
                let permitted = forbidden.map_or_else(
                    || ok("Permitted"),
                    |failure| {
                        let remedy = "grant it to the service account; see `pilothouse manifests`";
                        ("False", "Forbidden", format!("{}; {remedy}", failure.message))
                    },
                );
                let watched = match (watching.failing.is_empty(), watching.synced) {
                    (false, _) => ("False", "WatchFailed", failures(watching)),
                    (true, false) => ("Unknown", "Listing", String::new()),
                    (true, true) => ok("Watching"),
                };
                (permitted, watched)
            }
        };
        let degraded = match (&problem, &self.serving) {
            (Some((reason, message)), Some(serving)) => (
                "True",
                *reason,
                format!("revision {} serves: {message}", serving.controller.context.revisions().active.id),
            ),
            _ => ("False", "AsDesired", String::new()),
        };
        // Ready: something serves, and sees all that it has to see.
        let serving = if self.serving.is_some() { ok("Loaded") } else { loaded.clone() };
        let missing = [&serving, &permitted, &watched].into_iter().find(|condition| condition.0 != "True");
        let ready = missing.map_or_else(|| ok("Ready"), |missing| ("False", missing.1, missing.2.clone()));
        let conflict = match rival {
            None => ("False", "NoConflict", String::new()),
            Some(rival) => (
                "True",
                "OlderReconciler",
                format!("{} {rival} is older and reconciles some of the parents", declaration::kind(rival)),
            ),
        };
        let progressing = match status.rollout.as_ref() {
            None => ("False", "Complete", String::new()),
            Some(rollout) => {
                let (value, reason) = match rollout.state {
                    RolloutState::Progressing => ("True", "Progressing"),
                    RolloutState::Paused => ("False", "Paused"),
                    RolloutState::Complete => ("False", "Complete"),
                    RolloutState::RolledBack if rollout.reason == WITHDRAWN => ("False", WITHDRAWN),
                    RolloutState::RolledBack => ("False", "RolledBack"),
                    RolloutState::Refused => ("False", "RolloutGuarded"),
                };
                (value, reason, rollout.message.clone())
            }
        };
        let all = [
            ("Resolved", resolved),
            ("Verified", verified),
            ("Loaded", loaded),
            ("Permitted", permitted),
            ("Watching", watched),
            ("Ready", ready),
            ("Degraded", degraded),
            ("Progressing", progressing),
            ("Conflict", conflict),
        ];
        let determinism = self.determinism.clone().map(|determinism| ("Deterministic", determinism));
        for (kind, (value, reason, message)) in all.into_iter().chain(determinism) {
            set_condition(status, self.declared.metadata.generation, kind, value, reason, message);
        }
    }

    /// Writes the status if it differs from what we last wrote.
    async fn write(&mut self, status: ReconcilerStatus) -> Result<(), kube::Error> {
        if self.declared.status.as_ref() == Some(&status) {
            return Ok(());
        }
        let api = self.declared.api(self.supervisor.client.clone());
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let mut body = json!({"metadata": {"uid": self.declared.metadata.uid}, "status": status});
        // A merge patch removes by name only.
        for (name, gone) in [
            ("activeRevision", status.active_revision.is_none()),
            ("desiredRevision", status.desired_revision.is_none()),
            ("finalizer", status.finalizer.is_none()),
            ("image", status.image.is_none()),
            ("rollout", status.rollout.is_none()),
        ] {
            if gone {
                body["status"][name] = serde_json::Value::Null;
            }
        }
        api.patch_status(&self.declared.key.name, &params, &Patch::Merge(&body)).await?;
        self.declared.status = Some(status);
        Ok(())
    }
}

/// Resolves when the value has changed; never, if there is nothing to watch.
async fn changed<T>(receiver: &mut Option<watch::Receiver<T>>) -> Option<()> {
    match receiver {
        Some(receiver) => receiver.changed().await.ok(),
        None => std::future::pending().await,
    }
}

fn failures(watching: &Watching) -> String {
    let failures: Vec<_> =
        watching.failing.iter().map(|(kind, failure)| format!("{kind}: {}", failure.message)).collect();
    if failures.is_empty() { "the first list takes too long".to_owned() } else { failures.join("; ") }
}

fn set_condition(
    status: &mut ReconcilerStatus,
    generation: Option<i64>,
    kind: &str,
    value: &str,
    reason: &str,
    message: String,
) {
    let before = status.conditions.iter().position(|condition| condition.type_ == kind);
    let since = before.map(|place| &status.conditions[place]).filter(|before| before.status == value);
    let since = since.map_or_else(|| Time(Timestamp::now()), |before| before.last_transition_time.clone());
    let condition = Condition {
        type_: kind.to_owned(),
        status: value.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: since,
        observed_generation: generation,
    };
    match before {
        Some(place) => status.conditions[place] = condition,
        None => status.conditions.push(condition),
    }
}
