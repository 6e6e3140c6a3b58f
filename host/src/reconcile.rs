//! One reconcile, hop by hop: observe → plugin call → check → plan → apply → status → what comes next.
//!
//! A reconcile gets no hint of what changed: it reads the level. Each step is a file, a function and a type, and none calls
//! another; they meet here and in [`crate::state`]. The status is published also when a step failed, and the step's error wins
//! over an error of the status.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use jiff::Timestamp;
use kube::{Api, Client};
use serde_json::json;

pub mod coverage;
pub mod desired;
pub mod failures;
pub mod fields;
pub mod finalizer;
pub mod heal;
pub mod plan;
pub mod projection;
pub mod quantity;

mod apply;
mod events;
mod managers;
mod memory;
mod observe;
mod status;

pub use self::events::Events;
use self::{failures::Failures, finalizer::Phase, plan::Owner};
use crate::{
    crd::Limits,
    identity::Identity,
    object::{Kind, Object, ObjectKey},
    plugin::{self, CallError, CallLimits, Condition, ConditionStatus, Failure, Plugin, Request},
    queue::{BACKOFF_CAP, Next},
    state::{Applied, ChildKey, Desired, Finalization, Memory, Observed, Report},
    store::Store,
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

impl fmt::Display for ParentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.fmt(f)
    }
}

/// Everything that the reconciles of one reconciler share.
pub struct Context {
    /// Its names in the cluster.
    pub identity: Identity,
    /// A client that acts as its service account.
    pub client: Client,
    /// Its plugin.
    pub plugin: Arc<Plugin>,
    /// Digest of plugin and config.
    pub revision: String,
    /// What the plugin is configured with, as JSON.
    pub config: String,
    /// What a call may use.
    pub limits: Limits,
    /// The kind of its parents.
    pub parent_kind: Kind,
    /// The kinds of its children.
    pub child_kinds: Vec<Kind>,
    /// Its parents.
    pub parents: Store,
    /// Its children, a store for each of `child_kinds`.
    pub children: Vec<Store>,
    /// What it remembers of each parent, by UID.
    pub memory: Mutex<HashMap<String, Memory>>,
    /// Where Events go; they are published as the host.
    pub events: Events,
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
    /// Children could not be brought to where they should be.
    #[error("{0}")]
    Children(Failures),
}

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
            Self::Refused(Failure::Terminal(_)) => Next::Terminal,
            Self::Children(failures) if failures.is_waiting() => Next::Failed(Some(BACKOFF_CAP)),
            _ => Next::Failed(None),
        }
    }
}

/// Brings one parent one step closer to where it should be.
pub async fn reconcile(context: &Context, key: &ParentKey, attempt: u32) -> Next {
    let Some(mut parent) = context.parents.get(&key.object).filter(|parent| parent.uid() == key.uid) else {
        context.forget(&key.uid);
        return Next::Forget;
    };
    let mut memory = context.recall(&key.uid);
    if context.phase(&parent) == Phase::New {
        // Before there is anything to clean up. What is true from here on is what the answer says: the parent may have been
        // deleted meanwhile (`C11`).
        match finalizer::add(&context.parent_api(&parent), &parent, &context.finalizer()).await {
            Ok(answer) => {
                tracing::debug!("finalizer added");
                memory.ever_applied = Some(false);
                context.parents.apply(answer.clone());
                parent = Arc::new(answer);
            }
            Err(error) => {
                let next = failed(context, &parent, &mut memory, error.into(), None).await;
                context.remember(&key.uid, memory);
                return next;
            }
        }
    }
    let next = match context.phase(&parent) {
        Phase::Released => {
            context.forget(&key.uid);
            return Next::Forget;
        }
        Phase::Finalizing => finalize(context, &parent, &mut memory, attempt).await,
        Phase::New | Phase::Live => converge(context, &parent, &mut memory, attempt).await,
    };
    context.remember(&key.uid, memory);
    next
}

/// The common life of a parent: its children as the plugin wants them.
async fn converge(context: &Context, parent: &Arc<Object>, memory: &mut Memory, attempt: u32) -> Next {
    let observed = observe::observe(context, parent.clone());
    let desired = match desire(context, &observed, attempt).await {
        Ok(desired) => desired,
        Err(error) => return failed(context, parent, memory, error, None).await,
    };
    memory.ever_applied = Some(true);
    let applied = bring_about(context, &observed, &desired.children, memory).await;
    let ready = readiness(context, &observed, &desired);
    let told = Told { report: &desired.report, ready };
    match applied {
        Ok(applied) => {
            publish(context, parent, memory, &Ok(()), Some(&told)).await;
            match (applied.changed, desired.next) {
                // The next pass sees what this one made, such as the address that a Service got.
                (true, _) => Next::Again,
                (false, plugin::Next::OnChange) => Next::OnChange,
                (false, plugin::Next::Immediately) => Next::Immediately,
                (false, plugin::Next::After(wait)) => Next::After(wait),
            }
        }
        Err(error) => failed(context, parent, memory, error, Some(&told)).await,
    }
}

async fn desire(context: &Context, observed: &Observed, attempt: u32) -> Result<Desired, Error> {
    let request = context.request(observed, attempt, &json!({}));
    let answer = context.plugin.reconcile(request, context.call_limits()).await?.map_err(Error::Refused)?;
    Ok(context.rules(&observed.parent).desired(answer)?)
}

/// A parent that is being deleted: the plugin cleans up, and our finalizer goes when it says so.
async fn finalize(context: &Context, parent: &Arc<Object>, memory: &mut Memory, attempt: u32) -> Next {
    let api = context.parent_api(parent);
    // Not from the store: what is asked for now must be about the very object that is there now.
    let fresh = match api.get_opt(parent.name()).await {
        Ok(fresh) => fresh.filter(|fresh| fresh.uid() == parent.uid()),
        Err(error) => return failed(context, parent, memory, Error::Read(error), None).await,
    };
    // Gone; the watch will say so, too.
    let Some(fresh) = fresh else { return Next::Forget };
    context.parents.apply(fresh.clone());
    if finalizer::phase(&fresh, &context.finalizer(), true) != Phase::Finalizing {
        return Next::Again;
    }
    let parent = Arc::new(fresh);
    match clean_up(context, &parent, memory, attempt).await {
        Ok((Finalization { waiting: None, report, .. }, _)) => {
            context.events.publish_plugin(&parent, &context.parent_kind, &report.events, &mut memory.events).await;
            match finalizer::remove(&api, &parent, &context.finalizer()).await {
                Ok(answer) => {
                    tracing::info!("cleanup finished, finalizer removed");
                    context.parents.apply(answer);
                    Next::Forget
                }
                Err(finalizer::Error::Gone(_)) => Next::Forget,
                Err(error) => failed(context, &parent, memory, error.into(), None).await,
            }
        }
        Ok((Finalization { waiting: Some(wait), report, .. }, changed)) => {
            let ready = Condition {
                kind: "Ready".to_owned(),
                status: ConditionStatus::False,
                reason: "Deleting".to_owned(),
                message: "waiting for the plugin's cleanup".to_owned(),
            };
            publish(context, &parent, memory, &Ok(()), Some(&Told { report: &report, ready })).await;
            if changed { Next::Again } else { Next::After(wait) }
        }
        Err(error) => failed(context, &parent, memory, error, None).await,
    }
}

async fn clean_up(
    context: &Context,
    parent: &Arc<Object>,
    memory: &mut Memory,
    attempt: u32,
) -> Result<(Finalization, bool), Error> {
    let propagation = propagation(parent);
    let observed = observe::observe(context, parent.clone());
    let deletion = json!({
        "deletion": {"propagation": propagation},
        "everApplied": memory.ever_applied.unwrap_or(true) || !observed.children.is_empty(),
    });
    let request = context.request(&observed, attempt, &deletion);
    let answer = context.plugin.finalize(request, context.call_limits()).await?.ok_or(Error::NoCleanup)?;
    let finalization = context.rules(parent).finalization(answer.map_err(Error::Refused)?)?;
    let changed = match &finalization.children {
        // Foreground: the garbage collector is at work; orphan: the user wants them left alone.
        Some(children) if propagation == "Background" => {
            bring_about(context, &observed, children, memory).await?.changed
        }
        _ => false,
    };
    Ok((finalization, changed))
}

/// How the user wants the children to be treated, as the API server notes it among the finalizers.
fn propagation(parent: &Object) -> &'static str {
    let has = |name: &str| parent.finalizers().iter().any(|finalizer| finalizer == name);
    match () {
        () if has("orphan") => "Orphan",
        () if has("foregroundDeletion") => "Foreground",
        () => "Background",
    }
}

/// Plan and apply, and what to remember of it.
async fn bring_about(
    context: &Context,
    observed: &Observed,
    children: &[crate::state::DesiredChild],
    memory: &mut Memory,
) -> Result<Applied, Error> {
    let manager = context.manager(&observed.parent);
    let owner = Owner { kind: &context.parent_kind, label: context.identity.label(), manager: &manager };
    let plan = plan::plan(observed, children, memory, &owner);
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
    let applied = apply::apply(context, plan, observed.parent.uid(), &manager).await;
    for (key, note) in memory.applied(&applied) {
        context.events.publish_note(&observed.parent, &context.parent_kind, &context.describe(&key), &note).await;
    }
    if !applied.written.is_empty() || !applied.deleted.is_empty() {
        tracing::info!(applied = applied.written.len(), deleted = applied.deleted.len(), "children changed");
    }
    if applied.failures.is_empty() {
        return Ok(applied);
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
        if live.is_some_and(|live| live.controller_uid() == Some(observed.parent.uid()) && status::is_ready(&live)) {
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

/// Tells what went wrong, and how to go on.
async fn failed(
    context: &Context,
    parent: &Arc<Object>,
    memory: &mut Memory,
    error: Error,
    told: Option<&Told<'_>>,
) -> Next {
    if error.is_conflict() {
        tracing::debug!("{}; reading again", telemetry::chain(&error));
        if let Ok(Some(fresh)) = context.parent_api(parent).get_opt(parent.name()).await {
            context.parents.apply(fresh);
        }
        return Next::Immediately;
    }
    let message = telemetry::chain(&error);
    tracing::warn!(reason = error.category(), "reconcile failed: {message}");
    publish(context, parent, memory, &Err((error.category(), message)), told).await;
    error.next(parent.is_deleting())
}

/// Status and Events. Their own failure is told in the log only: the next reconcile tries again.
async fn publish(
    context: &Context,
    parent: &Arc<Object>,
    memory: &mut Memory,
    outcome: &Result<(), (&'static str, String)>,
    told: Option<&Told<'_>>,
) {
    let (status, reason, message) = match outcome {
        Ok(()) => (ConditionStatus::True, "ReconcileSuccess", ""),
        Err((category, message)) => (ConditionStatus::False, *category, message.as_str()),
    };
    let before = status::live_condition(parent, "Synced");
    if before != Some((status.as_str().to_owned(), reason.to_owned())) {
        context.events.publish_transition(parent, &context.parent_kind, reason, message).await;
    }
    if let Some(told) = told {
        context.events.publish_plugin(parent, &context.parent_kind, &told.report.events, &mut memory.events).await;
    }
    if !context.parent_kind.has_status {
        return;
    }
    let synced =
        Condition { kind: "Synced".to_owned(), status, reason: reason.to_owned(), message: message.to_owned() };
    let manager = context.manager(parent);
    let conditions = std::iter::once(synced).chain(told.map(|told| told.ready.clone())).collect();
    let publish = status::Publish { report: told.map(|told| told.report), conditions, manager: &manager };
    match status::publish(&context.parent_api(parent), parent, &publish, &mut memory.status).await {
        Ok(Some(answer)) => drop(context.parents.apply(answer)),
        Ok(None) => {}
        // Whoever changed the parent has woken it, too.
        Err(status::Error::Conflict(error)) => tracing::debug!("status not written: {error}"),
        Err(error) => tracing::warn!("{}", telemetry::chain(&error)),
    }
}

impl Context {
    fn phase(&self, parent: &Object) -> Phase {
        finalizer::phase(parent, &self.finalizer(), self.plugin.has_finalizer())
    }

    /// The finalizer of this reconciler.
    pub fn finalizer(&self) -> String {
        self.identity.finalizer()
    }

    fn manager(&self, parent: &Object) -> String {
        let api = &self.parent_kind.api;
        self.identity.field_manager(&api.group, &api.kind, &parent.key())
    }

    fn parent_api(&self, parent: &Object) -> Api<Object> {
        match parent.key().namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), &namespace, &self.parent_kind.api),
            None => Api::all_with(self.client.clone(), &self.parent_kind.api),
        }
    }

    fn call_limits(&self) -> CallLimits {
        CallLimits { memory: self.limits.memory.0, timeout: self.limits.timeout.0, output: self.limits.output.0 }
    }

    fn rules<'a>(&'a self, parent: &'a Object) -> desired::Rules<'a> {
        let max_children = usize::try_from(self.limits.children).unwrap_or(usize::MAX);
        desired::Rules { kinds: &self.child_kinds, parent, max_children }
    }

    fn request(&self, observed: &Observed, attempt: u32, more: &serde_json::Value) -> Request {
        let mut context = json!({
            "now": status::seconds(Timestamp::now()),
            "deadlineMs": u64::try_from(self.limits.timeout.0.as_millis()).unwrap_or(u64::MAX),
            "attempt": attempt,
            "revision": self.revision,
        });
        if let (Some(context), Some(more)) = (context.as_object_mut(), more.as_object()) {
            context.extend(more.clone());
        }
        Request {
            parent: observed.parent.json().to_owned(),
            children: observed.children.iter().map(|(_, child)| child.json().to_owned()).collect(),
            config: self.config.clone(),
            context: context.to_string(),
        }
    }

    fn describe(&self, key: &ChildKey) -> String {
        format!("{} {}", self.child_kinds[key.kind].api.kind, key.object)
    }

    fn recall(&self, uid: &str) -> Memory {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).remove(uid).unwrap_or_default()
    }

    fn remember(&self, uid: &str, memory: Memory) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).insert(uid.to_owned(), memory);
    }

    fn forget(&self, uid: &str) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }
}
