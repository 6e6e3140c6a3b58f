//! One reconcile, hop by hop: observe → plugin call → check → plan → apply → status → what comes next.
//!
//! A reconcile gets no hint of what changed: it reads the level. Each step is a file, a function and a type, and none calls
//! another; they meet here and in [`crate::state`]. The status is published also when a step failed, and the step's error wins
//! over an error of the status.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Duration,
};

use jiff::Timestamp;
use kube::{Api, Client, api::ListParams, core::Selector};
use serde_json::json;
use tokio::sync::watch;
use tracing::{Instrument as _, Span, debug_span};

pub mod coverage;
pub mod desired;
pub mod failures;
pub mod fields;
pub mod finalizer;
pub mod handles;
pub mod heal;
pub mod plan;
pub mod projection;
pub mod quantity;
pub mod remote;
pub mod settling;

mod apply;
#[cfg(test)]
mod edge;
mod events;
mod managers;
mod memory;
mod observe;
mod status;

pub use self::events::Events;
use self::{failures::Failures, finalizer::Phase, plan::Owner, remote::Record};
use crate::{
    claims::Claims,
    crd::{Limits, ParentCounts},
    identity::{ALLOW_PRUNE_ANNOTATION, Identity},
    lookup, metrics,
    object::{Kind, Object, ObjectKey},
    plugin::{self, CallError, Condition, ConditionStatus, Failure, Request},
    queue::{BACKOFF_CAP, Next},
    revision::Revision,
    state::{Applied, ChildKey, Desired, DesiredChild, Finalization, LastStatus, Memory, Observed, Report, Tie},
    store::Store,
    tally::{Outcome, Tally},
    telemetry,
};

/// Which parent: its name, and the very object of that name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParentKey {
    /// Where it is.
    pub object: ObjectKey,
    /// Its UID: a parent that is deleted and made again under the same name is another one.
    pub uid: String,
}

impl ParentKey {
    /// That of a parent as it is known.
    pub fn of(parent: &Object) -> Self {
        Self { object: parent.key(), uid: parent.uid().to_owned() }
    }
}

impl fmt::Display for ParentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.fmt(f)
    }
}

/// Everything that the reconciles of one reconciler share.
pub struct Context {
    /// Its name. One in a namespace sees and writes nothing elsewhere.
    pub key: ObjectKey,
    /// Its names in the cluster.
    pub identity: Identity,
    /// A client that acts as its service account.
    pub client: Client,
    /// Who else claims its parents.
    pub claims: Arc<Claims>,
    /// What serves now. A reconcile keeps the one that it began with.
    pub revision: RwLock<Arc<Revision>>,
    /// The revision that served last, before this host started.
    pub trusted: Option<String>,
    /// What holds from the next call on, whatever the revision.
    pub settings: RwLock<Arc<Settings>>,
    /// The kind of its parents.
    pub parent_kind: Kind,
    /// Which parents.
    pub selector: Selector,
    /// The kinds of its children: those that its plugin declares, and those that an earlier one may have made.
    pub child_kinds: Vec<Kind>,
    /// Its parents.
    pub parents: Store,
    /// Its children, a store for each of `child_kinds`.
    pub children: Vec<Store>,
    /// Parents whose children are to stay, by UID.
    pub orphaned: Mutex<HashSet<String>>,
    /// Parents that are gone though our finalizer was on them, by UID, as they were at last.
    pub vanished: Mutex<HashMap<String, Arc<Object>>>,
    /// What it remembers of each parent, by UID.
    pub memory: Mutex<HashMap<String, Memory>>,
    /// How its parents are.
    pub tally: Mutex<Tally>,
    /// What is counted of it.
    pub metrics: Arc<metrics::Handles>,
    /// Where Events go; they are published as the host.
    pub events: Events,
    /// A reconciler that goes before this one for one of its parents, once there was such a parent.
    pub rival: watch::Sender<Option<ObjectKey>>,
}

/// What a reconciler allows, apart from its revision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// What a call may use.
    pub limits: Limits,
    /// Do nothing.
    pub paused: bool,
}

/// Why a reconcile did not get to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The finalizer could not be written.
    #[error(transparent)]
    Finalizer(#[from] finalizer::Error),
    /// The parent could not be read again.
    #[error("failed to read the parent")]
    Read(#[source] kube::Error),
    /// The plugin gave no answer.
    #[error(transparent)]
    Plugin(#[from] CallError),
    /// The plugin gave an answer that the host cannot follow.
    #[error(transparent)]
    Answer(#[from] desired::Error),
    /// The plugin said that it cannot.
    #[error("the plugin reports: {}", failure_message(.0))]
    Refused(Failure),
    /// The parent waits for a cleanup that the plugin does not have.
    #[error(
        "the parent carries the finalizer of this reconciler, and the plugin has no cleanup (it exports no finalizer); \
         install a version that has one, or remove the finalizer by hand if there is nothing to clean up"
    )]
    NoCleanup,
    /// A new revision wants none of the children that its predecessor made.
    #[error(
        "revision {revision} of the plugin wants to delete all {children} children of this parent, unlike the one before; if that \
         is meant, annotate the parent with {ALLOW_PRUNE_ANNOTATION}={revision}"
    )]
    PruneHeld {
        /// The revision.
        revision: String,
        /// How many children there are.
        children: usize,
    },
    /// The plugin wants something else each time it is asked.
    #[error(
        "{child}: the plugin wants another value each time it is asked, at {path}, though neither the spec nor the plugin has changed; \
         each is applied, ever more slowly; let it give the same answer to the same request"
    )]
    Unstable {
        /// Which child, by kind and name.
        child: String,
        /// The field.
        path: String,
    },
    /// Children could not be brought to where they should be.
    #[error("{0}")]
    Children(Failures),
}

const PRUNE_HELD: &str = "PruneHeld";
const PAUSED: &str = "ReconcilePaused";
const SUCCESS: &str = "ReconcileSuccess";

fn failure_message(failure: &Failure) -> &str {
    match failure {
        Failure::Retry(message) | Failure::RetryAfter(_, message) | Failure::Terminal(message) => message,
    }
}

impl Error {
    /// A stable name: the reason of the condition and the Event, the label of the metric.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Finalizer(_) => "FinalizerNotWritten",
            Self::Read(_) => "ParentNotRead",
            Self::Plugin(error) => error.category(),
            Self::Answer(_) => "InvalidAnswer",
            Self::Refused(Failure::Terminal(_)) => "PluginTerminal",
            Self::Refused(_) => "PluginRetry",
            Self::NoCleanup => "NoCleanup",
            Self::PruneHeld { .. } => PRUNE_HELD,
            Self::Unstable { .. } => "UnstableOutput",
            Self::Children(failures) => failures.category(),
        }
    }

    /// Whether it only says that somebody else wrote at the same moment: read again, tell nobody.
    fn is_conflict(&self) -> bool {
        match self {
            Self::Finalizer(finalizer::Error::Conflict(_) | finalizer::Error::Gone(_)) => true,
            Self::Children(failures) => failures.is_conflict(),
            _ => false,
        }
    }

    fn next(&self, deleting: bool) -> Next {
        match self {
            Self::Refused(Failure::RetryAfter(wait, _)) => Next::Failed(Some(*wait)),
            // Nothing in the cluster changes when the outside heals.
            Self::Refused(Failure::Terminal(_)) if deleting => Next::Failed(Some(BACKOFF_CAP)),
            Self::Refused(Failure::Terminal(_)) | Self::PruneHeld { .. } => Next::Terminal,
            Self::Unstable { .. } => Next::Unstable,
            Self::Children(failures) if failures.is_waiting() => Next::Failed(Some(BACKOFF_CAP)),
            _ => Next::Failed(None),
        }
    }
}

/// One parent's turn: what it is reconciled with, from beginning to end.
struct Turn<'a> {
    context: &'a Context,
    revision: Arc<Revision>,
    attempt: u32,
}

/// Brings one parent one step closer to where it should be.
pub async fn reconcile(context: &Context, key: &ParentKey, attempt: u32) -> Next {
    if context.settings().paused {
        return Next::OnChange;
    }
    let mut memory = context.recall(&key.uid);
    let Some(mut parent) = context.parents.get(&key.object).filter(|parent| parent.uid() == key.uid) else {
        // Gone, or no longer selected.
        context.orphaned.lock().unwrap_or_else(PoisonError::into_inner).remove(&key.uid);
        return match context.vanished(&key.uid) {
            Some(vanished) => clean_up_after(context, key, attempt, &vanished, memory).await,
            None if memory.finalizer => leave(context, key).await,
            None => Next::Forget,
        };
    };
    Span::current().record("generation", parent.generation());
    memory.finalizer = parent.finalizers().contains(&context.finalizer());
    if let Some(rival) = context.rival(&parent) {
        context.rival.send_if_modified(|known| known.replace(rival.clone()) != Some(rival));
        return if memory.finalizer { leave(context, key).await } else { Next::Forget };
    }
    let turn = Turn { context, revision: context.revision(), attempt };
    if handles::is_set(&parent, handles::PAUSED) && turn.phase(&parent) != Phase::Released {
        memory.seen = Some(parent.resource_version().to_owned());
        let next = pause(&turn, &parent, &mut memory).await;
        context.remember(&key.uid, memory);
        return next;
    }
    if turn.phase(&parent) == Phase::New {
        // Before there is anything to clean up. What is true from here on is what the answer says: the parent may have been
        // deleted meanwhile (`C11`).
        match finalizer::add(&context.parent_api(&parent.key()), &parent, &context.finalizer()).await {
            Ok(answer) => {
                tracing::debug!("finalizer added");
                (memory.finalizer, memory.ever_applied) = (true, Some(false));
                context.parents.apply(answer.clone());
                parent = Arc::new(answer);
            }
            Err(error) => {
                let next = failed(&turn, &parent, &mut memory, error.into(), None).await;
                context.remember(&key.uid, memory);
                return next;
            }
        }
    }
    memory.seen = Some(parent.resource_version().to_owned());
    let next = match turn.phase(&parent) {
        Phase::Released => return Next::Forget,
        Phase::Finalizing => finalize(&turn, &parent, &mut memory).await,
        Phase::New | Phase::Live => converge(&turn, &parent, &mut memory).await,
    };
    context.remember(&key.uid, memory);
    next
}

/// A user wants the parent to be left alone, also while it is deleted.
async fn pause(turn: &Turn<'_>, parent: &Arc<Object>, memory: &mut Memory) -> Next {
    let known = turn.context.synced(parent, memory).is_some_and(|(_, reason)| reason == PAUSED);
    if known {
        return Next::OnChange;
    }
    let api = turn.context.parent_api(&parent.key());
    let who = handles::who_set(&api, &parent.key(), handles::PAUSED).await;
    let message = format!("paused by {who} with annotation {}; nothing is reconciled or cleaned up", handles::PAUSED);
    tracing::info!("{message}");
    let published = publish(turn, parent, memory, &Err((PAUSED, message)), None).await;
    next_unless_untold(Next::OnChange, published)
}

/// A parent that is not ours, or no longer: it is gone, it has left the selection, or an older reconciler has it. If our finalizer
/// is still on it, nobody else would ever take it off.
async fn leave(context: &Context, key: &ParentKey) -> Next {
    match try_leave(context, key).await {
        Ok(()) => Next::Forget,
        Err(error) => {
            tracing::debug!("not released yet: {}", telemetry::chain(&error));
            // Or the next turn would not know that there is something to do.
            context.note_finalizer(&key.uid);
            Next::Failed(None)
        }
    }
}

async fn try_leave(context: &Context, key: &ParentKey) -> Result<(), Error> {
    let left = lookup::get(&context.parent_api(&key.object), &key.object.name).await.map_err(Error::Read)?;
    let finalizer = context.finalizer();
    match left.filter(|left| left.uid() == key.uid && left.finalizers().contains(&finalizer)) {
        Some(left) => Ok(release(context, &left).await?),
        None => Ok(()),
    }
}

/// Takes our finalizer off a parent without cleanup. Its children stay, and go with it when it is deleted.
///
/// # Errors
/// If it could not be written, also because the parent has changed since.
pub async fn release(context: &Context, parent: &Object) -> Result<(), finalizer::Error> {
    match finalizer::remove(&context.parent_api(&parent.key()), parent, &context.finalizer()).await {
        Ok(answer) => {
            tracing::info!(parent = %parent.key(), "released");
            // One that is not selected has no place in the store.
            if context.parents.key_of(parent.uid()).is_some() {
                context.parents.apply(answer);
            }
            Ok(())
        }
        Err(finalizer::Error::Gone(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The common life of a parent: its children as the plugin wants them.
async fn converge(turn: &Turn<'_>, parent: &Arc<Object>, memory: &mut Memory) -> Next {
    let context = turn.context;
    let mut observed = observe::observe(context, parent.clone());
    let desired = match desire(turn, &observed).await {
        Ok(desired) => desired,
        Err(error) => return failed(turn, parent, memory, error, None).await,
    };
    if let Some(error) = held_by_guard(turn, &observed, &desired, memory) {
        return failed(turn, parent, memory, error, None).await;
    }
    match record_remote(turn, &observed, &desired.children).await {
        Ok(Some(recorded)) if recorded.is_deleting() => return Next::Again,
        Ok(Some(recorded)) => {
            memory.finalizer = true;
            memory.seen = Some(recorded.resource_version().to_owned());
            observed.record = Record::of(&recorded);
            observed.parent = recorded;
        }
        Ok(None) => {}
        Err(error) => return failed(turn, parent, memory, error.into(), None).await,
    }
    let parent = &observed.parent.clone();
    memory.ever_applied = Some(true);
    let applied = bring_about(turn, &observed, &desired.children, memory).await;
    let ready = readiness(context, &observed, &desired);
    let told = Told { report: &desired.report, ready };
    match applied {
        Ok(applied) => {
            memory.revision = Some(turn.revision.id.clone());
            if applied.written.is_empty() {
                // A host that starts where all is in place has nothing to tell.
                memory.synced.get_or_insert_with(|| ("True".to_owned(), SUCCESS.to_owned()));
            }
            let published = publish(turn, parent, memory, &Ok(()), Some(&told)).await;
            let next = match (applied.changed, desired.next) {
                // The next pass sees what this one made, such as the address that a Service got.
                (true, _) => Next::Again,
                (false, plugin::Next::OnChange) => Next::OnChange,
                (false, plugin::Next::Immediately) => Next::Immediately,
                (false, plugin::Next::After(wait)) => Next::After(wait),
            };
            next_unless_untold(next, published)
        }
        Err(error) => failed(turn, parent, memory, error, Some(&told)).await,
    }
}

/// A plugin that has changed, and of all that its predecessor made wants nothing any more, is more likely broken than right: it is
/// held until somebody says that it is meant.
fn held_by_guard(turn: &Turn<'_>, observed: &Observed, desired: &Desired, memory: &Memory) -> Option<Error> {
    if !desired.children.is_empty() || observed.children.is_empty() {
        return None;
    }
    let before = memory.revision.as_ref().or(turn.context.trusted.as_ref());
    let new = before.is_some_and(|before| *before != turn.revision.id);
    // A host that starts remembers no revision, but the parent tells that it was held.
    let was_held =
        || status::live_condition(&observed.parent, "Synced").is_some_and(|(_, reason)| reason == PRUNE_HELD);
    let allowed =
        || observed.parent.annotation(ALLOW_PRUNE_ANNOTATION).is_some_and(|allowed| allowed == turn.revision.id);
    ((new || was_held()) && !allowed())
        .then(|| Error::PruneHeld { revision: turn.revision.id.clone(), children: observed.children.len() })
}

/// Sees to it that children without an owner reference are on record, and our finalizer on the parent, before they are made. The
/// parent as it is then, if it had to be written.
async fn record_remote(
    turn: &Turn<'_>,
    observed: &Observed,
    children: &[DesiredChild],
) -> Result<Option<Arc<Object>>, finalizer::Error> {
    let context = turn.context;
    let tied = |tie| children.iter().filter(|child| child.tie == tie).map(|child| &child.key).collect::<Vec<_>>();
    let (wanted, loose) = (tied(Tie::Record), tied(Tie::Loose));
    let live: Vec<_> = observed.children.iter().map(|(key, _)| key).collect();
    let cleans_up = turn.revision.plugin.has_finalizer();
    let mut parent = observed.parent.clone();
    let Some(record) = Record::before(&parent, &wanted, &live, &loose, cleans_up, &context.child_kinds) else {
        return Ok(None);
    };
    let api = context.parent_api(&parent.key());
    if !parent.finalizers().contains(&context.finalizer()) {
        parent = Arc::new(finalizer::add(&api, &parent, &context.finalizer()).await?);
        context.parents.apply(Object::clone(&parent));
    }
    parent = Arc::new(record.write(&api, &parent).await.map_err(|error| finalizer::Error::of(error, &parent))?);
    context.parents.apply(Object::clone(&parent));
    Ok(Some(parent))
}

async fn desire(turn: &Turn<'_>, observed: &Observed) -> Result<Desired, Error> {
    let request = turn.request(observed, &json!({}));
    let answer = turn.revision.plugin.reconcile(request, turn.context.settings().limits.of_a_call()).await?;
    Ok(turn.desired(&observed.parent, answer.map_err(Error::Refused)?)?)
}

/// A parent that is being deleted: the plugin cleans up, and our finalizer goes when it says so.
async fn finalize(turn: &Turn<'_>, parent: &Arc<Object>, memory: &mut Memory) -> Next {
    let context = turn.context;
    let api = context.parent_api(&parent.key());
    // Not from the store: what is asked for now must be about the very object that is there now.
    let fresh = match lookup::get(&api, parent.name()).await {
        Ok(fresh) => fresh.filter(|fresh| fresh.uid() == parent.uid()),
        Err(error) => return failed(turn, parent, memory, Error::Read(error), None).await,
    };
    // Gone; the watch will say so, too.
    let Some(fresh) = fresh else { return Next::Forget };
    context.see(&fresh);
    context.parents.apply(fresh.clone());
    memory.seen = Some(fresh.resource_version().to_owned());
    if finalizer::phase(&fresh, &context.finalizer(), true) != Phase::Finalizing {
        return Next::Again;
    }
    let mut parent = Arc::new(fresh);
    if handles::is_set(&parent, handles::ABANDON_CLEANUP) {
        let who = handles::who_set(&api, &parent.key(), handles::ABANDON_CLEANUP).await;
        let note =
            format!("{who} abandoned cleanup with annotation {}; whatever is left stays", handles::ABANDON_CLEANUP);
        tracing::warn!("{note}");
        context.events.publish_handled(&parent, &context.parent_kind, "CleanupAbandoned", &note).await;
        return match release(context, &parent).await {
            Ok(()) => Next::Forget,
            Err(error) => failed(turn, &parent, memory, error.into(), None).await,
        };
    }
    if context.propagation(&parent) == "Orphan"
        && let Some(record) = Record::of(&parent).filter(|record| !record.orphan)
    {
        match (Record { orphan: true, ..record }).write(&api, &parent).await {
            Ok(answer) => parent = Arc::new(answer),
            Err(error) => {
                return failed(turn, &parent, memory, finalizer::Error::of(error, &parent).into(), None).await;
            }
        }
    }
    match clean_up(turn, &parent, memory).await {
        Ok((Finalization { waiting: None, report, .. }, _)) => {
            context.events.publish_plugin(&parent, &context.parent_kind, &report.events, &mut memory.events).await;
            match finalizer::remove(&api, &parent, &context.finalizer()).await {
                Ok(answer) => {
                    tracing::info!("cleanup finished, finalizer removed");
                    context.parents.apply(answer);
                    Next::Forget
                }
                Err(finalizer::Error::Gone(_)) => Next::Forget,
                Err(error) => failed(turn, &parent, memory, error.into(), None).await,
            }
        }
        Ok((Finalization { waiting: Some(wait), report, .. }, changed)) => {
            let ready = Condition {
                kind: "Ready".to_owned(),
                status: ConditionStatus::False,
                reason: "Deleting".to_owned(),
                message: "waiting for the plugin's cleanup".to_owned(),
            };
            let published = publish(turn, &parent, memory, &Ok(()), Some(&Told { report: &report, ready })).await;
            next_unless_untold(if changed { Next::Again } else { Next::After(wait) }, published)
        }
        Err(error) => failed(turn, &parent, memory, error, None).await,
    }
}

/// A parent of which the watch says that it is gone, with our finalizer on. It may only have left the selection. If it is gone indeed, the
/// API server has acknowledged the finalizer while it deleted the parent (kubernetes#110521): what was made for it in that moment is
/// cleaned up all the same (`C11`), with nobody left to tell how that went. Children that it owns are garbage.
async fn clean_up_after(
    context: &Context,
    key: &ParentKey,
    attempt: u32,
    vanished: &Arc<Object>,
    mut memory: Memory,
) -> Next {
    let turn = Turn { context, revision: context.revision(), attempt };
    let cleaned_up = async {
        let left = lookup::get(&context.parent_api(&key.object), &key.object.name).await.map_err(Error::Read)?;
        if left.is_some_and(|left| left.uid() == key.uid) {
            return Ok(None);
        }
        let observed = observe::observe(context, vanished.clone());
        let finalization = ask_to_clean_up(&turn, &observed, &memory).await?;
        let remote_gone = delete_remote(context, &observed).await?;
        Ok::<_, Error>(Some(finalization.waiting.or((!remote_gone).then_some(REMOTE_CHILDREN))))
    };
    let next = match cleaned_up.await {
        Ok(None) => leave(context, key).await,
        Ok(Some(None)) => {
            tracing::info!("gone though our finalizer was on it; cleanup finished");
            Next::Forget
        }
        Ok(Some(Some(wait))) => Next::After(wait),
        Err(error) => {
            tracing::warn!(
                reason = error.category(),
                "gone though our finalizer was on it, and its cleanup failed: {}",
                telemetry::chain(&error)
            );
            error.next(true)
        }
    };
    if next == Next::Forget {
        context.vanished.lock().unwrap_or_else(PoisonError::into_inner).remove(&key.uid);
    } else {
        memory.finalizer = true;
        context.remember(&key.uid, memory);
    }
    next
}

/// What the plugin says to the end of this parent.
async fn ask_to_clean_up(turn: &Turn<'_>, observed: &Observed, memory: &Memory) -> Result<Finalization, Error> {
    let context = turn.context;
    let deletion = json!({
        "deletion": {"propagation": context.propagation(&observed.parent)},
        "everApplied": memory.ever_applied.unwrap_or(true) || !observed.children.is_empty(),
    });
    let request = turn.request(observed, &deletion);
    match turn.revision.plugin.finalize(request, context.settings().limits.of_a_call()).await? {
        Some(answer) => Ok(turn.finalization(&observed.parent, answer.map_err(Error::Refused)?)?),
        // Our finalizer is there for the children on record only.
        None if observed.record.as_ref().is_some_and(|record| !record.cleanup) => Ok(Finalization::finished()),
        None => Err(Error::NoCleanup),
    }
}

async fn clean_up(turn: &Turn<'_>, parent: &Arc<Object>, memory: &mut Memory) -> Result<(Finalization, bool), Error> {
    let context = turn.context;
    let propagation = context.propagation(parent);
    let mut observed = observe::observe(context, parent.clone());
    let mut finalization = ask_to_clean_up(turn, &observed, memory).await?;
    let changed = match &finalization.children {
        // Foreground: the garbage collector is at work; orphan: the user wants them left alone.
        Some(children) if propagation == "Background" => {
            if let Some(recorded) = record_remote(turn, &observed, children).await? {
                observed.record = Record::of(&recorded);
                observed.parent = recorded;
            }
            bring_about(turn, &observed, children, memory).await?.changed
        }
        _ => false,
    };
    if finalization.waiting.is_none() && propagation != "Orphan" && !delete_remote(context, &observed).await? {
        finalization.waiting = Some(REMOTE_CHILDREN);
    }
    Ok((finalization, changed))
}

/// Deletes the children on record; whether all of them are gone. Read one by one from the API server: before our finalizer goes,
/// nothing may be left.
async fn delete_remote(context: &Context, observed: &Observed) -> Result<bool, Error> {
    let Some(record) = &observed.record else { return Ok(true) };
    let mut gone = true;
    let mut failures = Vec::new();
    for key in record.keys(&context.child_kinds) {
        match apply::delete_remote(context, &key, observed.parent.uid()).await {
            Ok(is_gone) => gone &= is_gone,
            Err(error) => failures.push((context.describe(&key), error)),
        }
    }
    if failures.is_empty() {
        Ok(gone)
    } else {
        Err(Error::Children(Failures { children: failures, waiting_deletes: 0 }))
    }
}

/// How long to wait for children that others hold before looking again; their end wakes the parent.
const REMOTE_CHILDREN: Duration = Duration::from_secs(10);

/// Plan and apply, and what to remember of it.
async fn bring_about(
    turn: &Turn<'_>,
    observed: &Observed,
    children: &[DesiredChild],
    memory: &mut Memory,
) -> Result<Applied, Error> {
    let context = turn.context;
    let manager = context.manager(&observed.parent);
    let owner = Owner {
        kind: &context.parent_kind,
        child_kinds: &context.child_kinds,
        label: context.identity.label(),
        manager: &manager,
    };
    let plan = plan::plan(observed, children, memory, &owner);
    let unstable = settling::unstable(memory, observed, &plan, &turn.revision.id, &manager);
    memory.planned(&plan);
    if !plan.applies.is_empty() || !plan.deletes.is_empty() {
        tracing::debug!(
            applies = plan.applies.len(),
            deletes = plan.deletes.len(),
            unchanged = plan.unchanged.len(),
            recognized = plan.recognized.len(),
            "planned"
        );
    }
    let span = debug_span!("apply", applies = plan.applies.len(), deletes = plan.deletes.len());
    let applied = apply::apply(context, plan, observed.parent.uid(), &manager).instrument(span).await;
    for (key, note) in memory.applied(&applied) {
        context.events.publish_note(&observed.parent, &context.parent_kind, &context.describe(&key), &note).await;
    }
    if !applied.written.is_empty() || !applied.deleted.is_empty() {
        tracing::info!(applied = applied.written.len(), deleted = applied.deleted.len(), "children changed");
    }
    if applied.failures.is_empty() {
        return match unstable {
            None => Ok(applied),
            Some((child, path)) => Err(Error::Unstable { child: context.describe(&child), path }),
        };
    }
    let children = applied.failures.into_iter().map(|(key, error)| (context.describe(&key), error)).collect();
    Err(Error::Children(Failures { children, waiting_deletes: applied.waiting_deletes }))
}

/// The condition `Ready`, from the children as the store has them now.
fn readiness(context: &Context, observed: &Observed, desired: &Desired) -> Condition {
    let mut ready = 0;
    let mut waiting_for = None;
    for child in &desired.children {
        let live = context.children[child.key.kind].get(&child.key.object);
        if live.is_some_and(|live| context.is_child(&child.key, &live, &observed.parent) && status::is_ready(&live)) {
            ready += 1;
        } else if waiting_for.is_none() {
            waiting_for = Some(context.describe(&child.key));
        }
    }
    status::ready(desired.children.len(), ready, waiting_for)
}

/// What there is to tell once the plugin has answered.
struct Told<'a> {
    report: &'a Report,
    ready: Condition,
}

impl Told<'_> {
    /// Whether the parent is ready: the plugin may decide it.
    fn is_ready(&self) -> bool {
        let by_plugin = self.report.conditions.iter().find(|condition| condition.kind == "Ready");
        by_plugin.unwrap_or(&self.ready).status == ConditionStatus::True
    }
}

/// Tells what went wrong, and how to go on.
async fn failed(
    turn: &Turn<'_>,
    parent: &Arc<Object>,
    memory: &mut Memory,
    error: Error,
    told: Option<&Told<'_>>,
) -> Next {
    let context = turn.context;
    if error.is_conflict() {
        tracing::debug!("{}; reading again", telemetry::chain(&error));
        if let Ok(Some(fresh)) = lookup::get(&context.parent_api(&parent.key()), parent.name()).await {
            context.see(&fresh);
            context.parents.apply(fresh);
        }
        return Next::Immediately;
    }
    let message = telemetry::chain(&error);
    tracing::warn!(reason = error.category(), "reconcile failed: {message}");
    Span::current().record("category", error.category()).record("otel.status_code", "ERROR");
    let published = publish(turn, parent, memory, &Err((error.category(), message)), told).await;
    next_unless_untold(error.next(parent.is_deleting()), published)
}

/// A status that was not written is tried again: nothing else might ever wake the parent.
fn next_unless_untold(next: Next, published: bool) -> Next {
    match next {
        Next::OnChange | Next::After(_) | Next::Terminal if !published => Next::Failed(None),
        next => next,
    }
}

/// Status and Events; whether the status says now what it should. Its failure is told in the log only.
async fn publish(
    turn: &Turn<'_>,
    parent: &Arc<Object>,
    memory: &mut Memory,
    outcome: &Result<(), (&'static str, String)>,
    told: Option<&Told<'_>>,
) -> bool {
    let context = turn.context;
    context.note(parent, &turn.revision.id, outcome.is_ok(), told);
    let handled = handles::handled(parent);
    let (status, reason, message) = match outcome {
        Ok(()) => (ConditionStatus::True, SUCCESS, handled.as_str()),
        Err((category, message)) => (ConditionStatus::False, *category, message.as_str()),
    };
    let now = Some((status.as_str().to_owned(), reason.to_owned()));
    let before = context.synced(parent, memory);
    memory.synced.clone_from(&now);
    if before != now {
        context.events.publish_transition(parent, &context.parent_kind, reason, outcome.as_ref().err()).await;
    }
    if outcome.is_ok() && !handled.is_empty() && memory.handled.as_ref() != Some(&handled) {
        if !status::tells(parent, &handled) {
            context.events.publish_handled(parent, &context.parent_kind, "ReconcileRequestHandled", &handled).await;
        }
        memory.handled = Some(handled.clone());
    }
    if let Some(told) = told {
        context.events.publish_plugin(parent, &context.parent_kind, &told.report.events, &mut memory.events).await;
    }
    if !context.parent_kind.tells_status() {
        return true;
    }
    let synced =
        Condition { kind: "Synced".to_owned(), status, reason: reason.to_owned(), message: message.to_owned() };
    let manager = context.manager(parent);
    let conditions = std::iter::once(synced).chain(told.map(|told| told.ready.clone())).collect();
    let publish = status::Publish { report: told.map(|told| told.report), conditions, manager: &manager };
    let api = context.parent_api(&parent.key());
    let told_before = memory.status.as_ref().map(|last| last.dropped.clone()).unwrap_or_default();
    let published = status::publish(&api, parent, &publish, &mut memory.status).instrument(debug_span!("status"));
    match published.await {
        Ok(answer) => {
            if let Some(answer) = answer {
                let dropped = memory.status.as_ref().map(|last| last.dropped.as_slice()).unwrap_or_default();
                if !dropped.is_empty() && dropped != told_before {
                    context.events.publish_pruned(parent, &context.parent_kind, dropped).await;
                }
                memory.seen = Some(answer.resource_version().to_owned());
                context.parents.apply(answer);
            }
            true
        }
        Err(error) => {
            match &error {
                status::Error::Conflict(cause) => tracing::debug!("status not written: {cause}"),
                error => tracing::warn!("{}", telemetry::chain(error)),
            }
            false
        }
    }
}

/// `context` of a request, as the contract has it; `more` is what only some calls are told.
pub fn call_context(
    now: Timestamp,
    limits: &Limits,
    attempt: u32,
    revision: &str,
    more: &serde_json::Value,
) -> serde_json::Value {
    let mut context = json!({
        "now": status::seconds(now),
        "deadlineMs": u64::try_from(limits.timeout.0.as_millis()).unwrap_or(u64::MAX),
        "attempt": attempt,
        "revision": revision,
    });
    if let (Some(context), Some(more)) = (context.as_object_mut(), more.as_object()) {
        context.extend(more.clone());
    }
    context
}

impl Turn<'_> {
    fn phase(&self, parent: &Object) -> Phase {
        finalizer::phase(parent, &self.context.finalizer(), self.revision.plugin.has_finalizer())
    }

    fn request(&self, observed: &Observed, more: &serde_json::Value) -> Request {
        let limits = &self.context.settings().limits;
        let context = call_context(Timestamp::now(), limits, self.attempt, &self.revision.id, more);
        Request {
            parent: observed.parent.json().to_owned(),
            children: observed.children.iter().map(|(_, child)| child.json().to_owned()).collect(),
            related: Vec::new(),
            config: self.revision.config.clone(),
            context: context.to_string(),
        }
    }

    fn desired(&self, parent: &Object, answer: plugin::Answer) -> Result<Desired, desired::Error> {
        self.rules(parent).desired(answer)
    }

    fn finalization(&self, parent: &Object, answer: plugin::FinalizeAnswer) -> Result<Finalization, desired::Error> {
        self.rules(parent).finalization(answer)
    }

    fn rules<'a>(&'a self, parent: &'a Object) -> desired::Rules<'a> {
        desired::Rules {
            kinds: &self.context.child_kinds,
            declared: &self.revision.plugin.description().children,
            parent,
            scope: self.context.key.namespace.as_deref(),
            max_children: usize::try_from(self.context.settings().limits.children).unwrap_or(usize::MAX),
        }
    }
}

impl Context {
    /// What serves now.
    pub fn revision(&self) -> Arc<Revision> {
        self.revision.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets another revision serve, from the next reconcile on.
    pub fn swap(&self, revision: Arc<Revision>) {
        self.tally().serve(&revision.id);
        *self.revision.write().unwrap_or_else(PoisonError::into_inner) = revision;
    }

    /// What holds now.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets other settings hold, from the next call on.
    pub fn set(&self, settings: Settings) {
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
    }

    /// The finalizer of this reconciler.
    pub fn finalizer(&self) -> String {
        self.identity.finalizer()
    }

    fn manager(&self, parent: &Object) -> String {
        let api = &self.parent_kind.api;
        self.identity.field_manager(&api.group, &api.kind, &parent.key())
    }

    fn parent_api(&self, parent: &ObjectKey) -> Api<Object> {
        match &parent.namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &self.parent_kind.api),
            None => Api::all_with(self.client.clone(), &self.parent_kind.api),
        }
    }

    /// How the user wants the children to be treated, as the API server notes it among the finalizers. The garbage collector takes
    /// the note away when it has done its part, so it is kept in mind, and on record where there is one.
    fn propagation(&self, parent: &Object) -> &'static str {
        let has = |name: &str| parent.finalizers().iter().any(|finalizer| finalizer == name);
        let known = || self.orphaned.lock().unwrap_or_else(PoisonError::into_inner).contains(parent.uid());
        match () {
            () if has("orphan") || known() || Record::of(parent).is_some_and(|record| record.orphan) => "Orphan",
            () if has("foregroundDeletion") => "Foreground",
            () => "Background",
        }
    }

    /// Every state of a parent passes here when it is seen.
    pub fn see(&self, parent: &Object) {
        let mut orphaned = self.orphaned.lock().unwrap_or_else(PoisonError::into_inner);
        if parent.is_deleting() && parent.finalizers().iter().any(|finalizer| finalizer == "orphan") {
            orphaned.insert(parent.uid().to_owned());
        }
        // It had only left the selection.
        self.vanished.lock().unwrap_or_else(PoisonError::into_inner).remove(parent.uid());
    }

    /// The watch no longer shows this parent.
    pub fn see_gone(&self, parent: &Object) {
        if finalizer::is_lost(parent, &self.finalizer()) {
            let mut vanished = self.vanished.lock().unwrap_or_else(PoisonError::into_inner);
            vanished.insert(parent.uid().to_owned(), Arc::new(parent.clone()));
        }
    }

    fn vanished(&self, uid: &str) -> Option<Arc<Object>> {
        self.vanished.lock().unwrap_or_else(PoisonError::into_inner).get(uid).cloned()
    }

    /// Status and reason of `Synced`, as they were told last.
    fn synced(&self, parent: &Object, memory: &Memory) -> Option<(String, String)> {
        // A CRD may keep no conditions (`C34`): then it is known only to us, as where there is no status.
        let dropped = memory.status.as_ref().is_some_and(LastStatus::drops_conditions);
        if self.parent_kind.tells_status() && !dropped {
            status::live_condition(parent, "Synced")
        } else {
            memory.synced.clone()
        }
    }

    /// The reconciler that has this parent in our place.
    fn rival(&self, parent: &Object) -> Option<ObjectKey> {
        let ObjectKey { namespace, .. } = parent.key();
        self.claims.rival(&self.key, &self.parent_kind.group_kind(), namespace.as_deref(), || parent.labels())
    }

    /// All objects of a kind that this reconciler may see.
    pub fn all(&self, kind: &Kind) -> Api<Object> {
        match &self.key.namespace {
            None => Api::all_with(self.client.clone(), &kind.api),
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &kind.api),
        }
    }

    fn is_child(&self, key: &ChildKey, live: &Object, parent: &Object) -> bool {
        live.parent_uid(&self.child_kinds[key.kind].group_kind()) == Some(parent.uid())
    }

    fn describe(&self, key: &ChildKey) -> String {
        format!("{} {}", self.child_kinds[key.kind].api.kind, key.object)
    }

    /// All parents that carry our finalizer, selected or not, from the API server.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub async fn holding(&self) -> Result<Vec<Object>, kube::Error> {
        let mut parents = self.all(&self.parent_kind).list(&ListParams::default()).await?.items;
        parents.retain(|parent| parent.finalizers().contains(&self.finalizer()));
        Ok(parents)
    }

    /// The resource version of the parent that the latest reconcile has left.
    pub fn seen(&self, uid: &str) -> Option<String> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).get(uid)?.seen.clone()
    }

    /// A parent that is not among ours was seen with our finalizer on.
    pub fn note_finalizer(&self, uid: &str) {
        self.remember(uid, Memory { finalizer: true, ..Memory::default() });
    }

    /// How its parents are.
    pub fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every kind was listed: these are the parents to get to know.
    pub fn start_tally(&self) {
        self.tally().start(self.parents.all().iter().map(|parent| parent.uid().to_owned()));
    }

    /// How many parents there are, and how they are.
    pub fn parent_counts(&self) -> ParentCounts {
        self.tally().counts(self.parents.len())
    }

    /// The same, once each parent that there was at the start is known: before, the counts say more of this host than of the parents.
    pub fn known_parents(&self) -> Option<ParentCounts> {
        let complete = self.tally().is_complete();
        complete.then(|| self.parent_counts())
    }

    fn note(&self, parent: &Object, revision: &str, succeeded: bool, told: Option<&Told<'_>>) {
        let mut tally = self.tally();
        let published = || Some(status::live_condition(parent, "Ready")?.0 == ConditionStatus::True.as_str());
        let ready = told.map(Told::is_ready).or_else(|| if tally.knows(parent.uid()) { None } else { published() });
        tally.note(parent.uid(), Outcome { revision, succeeded, ready });
    }

    fn recall(&self, uid: &str) -> Memory {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).remove(uid).unwrap_or_default()
    }

    fn remember(&self, uid: &str, memory: Memory) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).insert(uid.to_owned(), memory);
    }
}
