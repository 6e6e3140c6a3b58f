//! One reconcile, hop by hop: observe → plugin call → check → plan → apply → status → what comes next.
//!
//! A reconcile gets no hint of what changed: it reads the level. What is to be done next is decided in [`mod@next_step`], and each hop is a
//! file, a function and a type. None calls another; they meet here and in [`crate::state`]. The status is published also when a step
//! failed, and the step's error wins over an error of the status.

use std::{
    collections::HashMap,
    ops::ControlFlow::{self, Break, Continue},
    sync::{Arc, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use kube::core::SelectorExt as _;
use serde_json::json;
use tracing::{Instrument as _, Span, debug_span};

pub mod context;
pub mod coverage;
pub mod desired;
pub mod failures;
pub mod fields;
pub mod finalizer;
pub mod handles;
pub mod heal;
pub mod next_step;
pub mod plan;
pub mod projection;
pub mod quantity;
pub mod remote;
pub mod settling;

mod apply;
#[cfg(test)]
mod edge;
mod events;
mod jobs;
mod managers;
mod memory;
#[cfg(test)]
mod model;
mod observe;
pub mod preview;
mod readiness;
mod restored;
mod status;
mod taken;
mod tell;

pub use self::{
    context::{Candidate, Context, ParentKey, Revisions, Settings},
    events::Events,
};
use self::{
    failures::Failures,
    next_step::{Parent, Present, Step, View, next_step},
    plan::Owner,
    remote::Record,
    tell::{Told, next_unless_untold, ready_condition},
};
use crate::{
    crd::Limits,
    identity::ALLOW_PRUNE_ANNOTATION,
    lookup,
    object::Object,
    plugin::{self, CallError, Condition, ConditionStatus, Failure, Reached, Request, Selector},
    queue::{BACKOFF_CAP, Next, Run, Wake},
    related::{self, Shown},
    revision::Revision,
    selection,
    state::{Applied, ChildKey, Desired, DesiredChild, Finalization, Memory, Observed, Tie},
    telemetry,
};

/// How long to wait for children that others hold before looking again; their end wakes the parent.
const HELD_CHILDREN: Duration = Duration::from_secs(10);

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
    /// What the plugin needs to see cannot be shown to it.
    #[error(transparent)]
    Related(#[from] related::Error),
    /// The plugin gave an answer that the host cannot follow.
    #[error(transparent)]
    Answer(#[from] desired::Error),
    /// The plugin said that it cannot.
    #[error("the plugin reports: {}", failure_message(.0))]
    Refused(Failure),
    /// The parent waits for a cleanup that the plugin does not have.
    #[error(
        "the parent carries the finalizer of this reconciler, and the plugin has no cleanup (it exports no finalizer); \
         install a version that has one, or set spec.dropFinalizer of the reconciler if there is nothing to clean up"
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
    /// Somebody takes back what the plugin wants, each time.
    #[error(
        "{child}: field manager {manager:?} and the plugin take {path} from each other all the time; it is taken again, ever more slowly; \
         let one of the two leave it out, or let the plugin set force false"
    )]
    Contested {
        /// Which child, by kind and name.
        child: String,
        /// Who it is.
        manager: String,
        /// The field.
        path: String,
    },
    /// Children could not be brought to where they should be.
    #[error("{0}")]
    Children(Failures),
}

const PRUNE_HELD: &str = "PruneHeld";
const PAUSED: &str = "ReconcilePaused";

fn failure_message(failure: &Failure) -> &str {
    match failure {
        Failure::Retry(message) | Failure::RetryAfter(_, message) | Failure::Terminal(message) => message,
    }
}

impl Error {
    /// Whether it is a preview's, of what no preview touches.
    pub fn is_unseen(&self) -> bool {
        matches!(self, Self::Plugin(CallError::NotPreviewable(_)))
    }

    /// A stable name: the reason of the condition and the Event, the label of the metric.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Finalizer(_) => "FinalizerNotWritten",
            Self::Read(_) => "ParentNotRead",
            Self::Plugin(error) => error.category(),
            Self::Related(related::Error::Selection(selection::Error::Refused { .. })) | Self::Answer(_) => {
                "InvalidAnswer"
            }
            Self::Related(related::Error::Selection(selection::Error::SecretNotGranted { .. })) => "RelatedNotGranted",
            Self::Related(related::Error::Forbidden { .. }) => "RelatedForbidden",
            Self::Related(related::Error::Unavailable { .. } | related::Error::Listing) => "RelatedUnavailable",
            Self::Refused(Failure::Terminal(_)) => "PluginTerminal",
            Self::Refused(_) => "PluginRetry",
            Self::NoCleanup => "NoCleanup",
            Self::PruneHeld { .. } => PRUNE_HELD,
            Self::Unstable { .. } => "UnstableOutput",
            Self::Contested { .. } => "FieldContested",
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
            Self::Unstable { .. } | Self::Contested { .. } => Next::Unstable,
            Self::Children(failures) if failures.is_waiting() => Next::Failed(Some(BACKOFF_CAP)),
            _ => Next::Failed(None),
        }
    }
}

/// One parent's turn, from beginning to end: what it is reconciled with, and what it has learned so far.
struct Turn<'a> {
    context: &'a Context,
    run: &'a Run<ParentKey>,
    revision: Arc<Revision>,
    memory: Memory,
    subject: Subject,
    answered: Option<Answered>,
    children_gone: Option<bool>,
}

/// Whose turn it is; see [`Parent`].
enum Subject {
    Absent,
    Vanished {
        parent: Arc<Object>,
        confirmed: bool,
    },
    /// With what is decided by, read from it once: it stands in the JSON.
    Present {
        parent: Arc<Object>,
        facts: Present,
    },
}

/// What the plugin has said.
struct Answered {
    /// The children that it was shown.
    children: Vec<(ChildKey, Arc<Object>)>,
    /// The record that has to be on the parent before what it wants is made.
    unrecorded: Option<Record>,
    said: Said,
}

enum Said {
    Desired(Desired),
    /// `wanted`: children that were not seen to yet. `changed`: the next pass sees what became of them.
    Cleanup {
        finalization: Finalization,
        wanted: Option<Vec<DesiredChild>>,
        changed: bool,
    },
}

/// Brings one parent one step closer to where it should be.
///
/// A turn that has changed children leaves it to the next one to say how the parent is: what it knew of them is past, and the next one
/// sees what it made of them, as the API server answered. So a status is written once where it would be twice. That next turn follows at
/// once ([`crate::queue::Queue::goes_on`]): neither other parents nor anything that children have yet to report comes between, so a user
/// waits for one call of the plugin more, and a host that ends in between leaves a status that the next one finds out of date. It tells,
/// whatever it has come to; and what fails is told at once.
pub async fn reconcile(context: &Context, run: &Run<ParentKey>) -> Next {
    if context.settings().paused {
        return Next::OnChange;
    }
    let mut turn = Turn::begin(context, run);
    let next = loop {
        match turn.take(next_step(&turn.view())).await {
            Ok(Continue(())) => {}
            Ok(Break(next)) => break next,
            Err(error) => break turn.failed(error, None).await,
        }
    };
    turn.end(next)
}

impl<'a> Turn<'a> {
    fn begin(context: &'a Context, run: &'a Run<ParentKey>) -> Self {
        let key = &run.key;
        let mut turn = Self {
            context,
            run,
            revision: context.revision_of(key),
            memory: context.recall(&key.uid),
            subject: Subject::Absent,
            answered: None,
            children_gone: None,
        };
        if let Some(parent) = context.parents.get(&key.object).filter(|parent| parent.uid() == key.uid) {
            Span::current().record("generation", parent.generation());
            turn.know(parent, false);
        } else {
            context.orphaned.lock().unwrap_or_else(PoisonError::into_inner).remove(&key.uid);
            if let Some(parent) = context.vanished(&key.uid) {
                turn.subject = Subject::Vanished { parent, confirmed: false };
            }
        }
        turn
    }

    fn end(mut self, next: Next) -> Next {
        if next == Next::Forget {
            self.context.related.forget(&self.run.key);
            self.context.vanished.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.run.key.uid);
            return next;
        }
        // Or the next turn would not know that there is something to do.
        self.memory.finalizer |= !matches!(self.subject, Subject::Present { .. });
        self.context.remember(&self.run.key.uid, self.memory);
        next
    }

    fn view(&self) -> View {
        let parent = match &self.subject {
            Subject::Absent => Parent::Absent { finalizer: self.memory.finalizer },
            Subject::Vanished { confirmed, .. } => Parent::Vanished { confirmed: *confirmed },
            Subject::Present { facts, .. } => Parent::Present(*facts),
        };
        let answer = self.answered.as_ref().map(|answered| {
            let unrecorded = answered.unrecorded.is_some();
            match &answered.said {
                Said::Desired(desired) => {
                    let mut ours = desired.children.iter().filter(|child| child.tie == Tie::Record).peekable();
                    // They are sorted.
                    let is_there = |key| answered.children.binary_search_by_key(&key, |(there, _)| there).is_ok();
                    next_step::Answer::Desired {
                        ours_to_delete: ours.peek().is_some() || DesiredChild::are_in_waves(&desired.children),
                        missing: ours.any(|child| !is_there(&child.key)),
                        unrecorded,
                    }
                }
                Said::Cleanup { finalization, wanted, .. } => next_step::Answer::Cleanup {
                    finished: finalization.waiting.is_none(),
                    children: wanted.is_some(),
                    unrecorded,
                },
            }
        });
        let cleans_up = self.revision.plugin.has_finalizer();
        View { parent, cleans_up, answer, children_gone: self.children_gone }
    }

    async fn take(&mut self, step: Step) -> Result<ControlFlow<Next>, Error> {
        match step {
            Step::Forget => Ok(Break(Next::Forget)),
            Step::Leave => Ok(Break(self.leave().await)),
            Step::Pause => Ok(Break(self.pause().await)),
            Step::AddFinalizer => self.add_finalizer().await,
            Step::Ask => self.ask().await,
            Step::Record => self.record().await,
            Step::Converge => self.converge().await,
            Step::Read => self.read().await,
            Step::Abandon => self.abandon().await,
            Step::RecordOrphan => self.record_orphan().await,
            Step::AskCleanup => self.ask_cleanup().await,
            Step::DeleteChildren => self.delete_children().await,
            Step::Wait => Ok(Break(self.wait().await)),
            Step::RemoveFinalizer => self.remove_finalizer().await,
        }
    }

    /// The parent as this turn knows it; none if there is none.
    fn parent(&self) -> Option<Arc<Object>> {
        match &self.subject {
            Subject::Absent => None,
            Subject::Vanished { parent, .. } | Subject::Present { parent, .. } => Some(parent.clone()),
        }
    }

    /// The API server has shown the parent, or answered a write with it: this is what holds from here on.
    fn see(&mut self, parent: Object) {
        self.context.see(&parent);
        let parent = Arc::new(parent);
        self.know(parent.clone(), true);
        // One that is not selected has no place in the store.
        if matches!(self.subject, Subject::Present { facts: Present { selected: true, .. }, .. }) {
            self.context.parents.apply(Object::clone(&parent));
        }
    }

    fn know(&mut self, parent: Arc<Object>, read: bool) {
        let context = self.context;
        let rival = context.rival(&parent);
        // The watch shows what is selected.
        let shown = !read || context.selector.selects_all() || context.selector.matches(&parent.labels());
        let selected = shown && rival.is_none();
        if rival.is_some() {
            context.rival.send_if_modified(|known| std::mem::replace(known, rival.clone()) != rival);
        }
        let finalizer = if selected {
            context.finalizers().hold(&parent, self.revision.plugin.has_finalizer())
        } else {
            // An earlier operator may still serve it.
            finalizer::is_on(&parent, &context.finalizer())
        };
        let deleting = parent.is_deleting();
        let facts = Present {
            selected,
            deleting,
            finalizer,
            read,
            paused: handles::is_set(&parent, handles::PAUSED),
            // The end of a life asks for these, and nothing before it.
            abandoned: deleting && handles::is_set(&parent, handles::ABANDON_CLEANUP),
            orphan_unrecorded: deleting
                && context.propagation(&parent) == "Orphan"
                && Record::of(&parent).is_some_and(|record| !record.orphan),
        };
        self.memory.finalizer = finalizer;
        self.memory.seen = Some(parent.resource_version().to_owned());
        self.subject = Subject::Present { parent, facts };
    }

    /// It has left the selection, or an older reconciler has it.
    async fn leave(&self) -> Next {
        let Some(parent) = self.parent() else { return Next::Forget };
        match release(self.context, &parent).await {
            Ok(()) => Next::Forget,
            Err(error) => {
                tracing::debug!("not released yet: {}", telemetry::chain(&error));
                Next::Failed(None)
            }
        }
    }

    async fn pause(&mut self) -> Next {
        let Some(parent) = self.parent() else { return Next::Forget };
        let known = self.context.synced(&parent, &self.memory).is_some_and(|(_, reason)| reason == PAUSED);
        if known {
            return Next::OnChange;
        }
        let api = self.context.parent_api(&self.run.key.object);
        let who = handles::who_set(&api, &self.run.key.object, handles::PAUSED).await;
        let message =
            format!("paused by {who} with annotation {}; nothing is reconciled or cleaned up", handles::PAUSED);
        tracing::info!("{message}");
        let published = self.publish(&parent, &Err((PAUSED, message)), None).await;
        next_unless_untold(Next::OnChange, published)
    }

    /// What is true from here on is what the answer says: the parent may have been deleted meanwhile (`C11`).
    async fn add_finalizer(&mut self) -> Result<ControlFlow<Next>, Error> {
        let Some(parent) = self.parent() else { return Ok(Break(Next::Forget)) };
        let api = self.context.parent_api(&self.run.key.object);
        let ours = self.context.finalizers();
        let answer = finalizer::add(&api, &parent, &ours).await?;
        tracing::debug!("finalizer added");
        if !ours.are_on(&parent) {
            self.memory.ever_applied = Some(false);
            // It may have been ours before, and released.
            if self.context.parent_kind.tells_status() && status::live_condition(&parent, "Synced").is_none() {
                self.memory.ever_reached.get_or_insert(false);
            }
        }
        self.see(answer);
        Ok(Continue(()))
    }

    async fn ask(&mut self) -> Result<ControlFlow<Next>, Error> {
        let Some(parent) = self.parent() else { return Ok(Break(Next::Forget)) };
        let observed = observe::observe(self.context, parent);
        let limits = self.context.settings().limits.of_a_call();
        let request = self.request(&observed, &json!({}));
        let reached = request.reached.clone();
        let answer = self.revision.plugin.reconcile(request, self.related(), limits).await;
        self.note_reached(&reached);
        let answer = match answer {
            Err(Error::Related(related::Error::Listing)) => return Ok(Break(Next::OnChange)),
            answer => answer?,
        };
        let desired = self.rules(&observed.parent).desired(answer.map_err(Error::Refused)?)?;
        if let Some(error) = self.held_by_guard(&observed, &desired) {
            return Err(error);
        }
        let unrecorded = self.unrecorded(&observed, &desired.children);
        self.answered = Some(Answered { children: observed.children, unrecorded, said: Said::Desired(desired) });
        Ok(Continue(()))
    }

    /// What the revision shows of the objects that the parent selects.
    fn related(&self) -> impl FnOnce(Vec<Selector>) -> Shown + Send + 'static + use<> {
        let related = &self.context.related;
        if !self.revision.plugin.has_relations() {
            // Its predecessor may have had some.
            related.forget(&self.run.key);
        }
        related.of(&self.run.key, &self.revision)
    }

    /// The record that has to be on the parent before these children are made, if it is not there.
    fn unrecorded(&self, observed: &Observed, children: &[DesiredChild]) -> Option<Record> {
        let tied = |tie| children.iter().filter(|child| child.tie == tie).map(|child| &child.key).collect::<Vec<_>>();
        let (wanted, loose) = (tied(Tie::Record), tied(Tie::Loose));
        let live: Vec<_> = observed.children.iter().map(|(key, _)| key).collect();
        // An earlier operator cleaned up, or it would not have a finalizer.
        let cleanup = self.revision.plugin.has_finalizer() || self.context.finalizers().has_legacy(&observed.parent);
        let kinds = &self.context.child_kinds;
        Record::before(&observed.parent, &wanted, &live, &loose, cleanup, kinds).or_else(|| {
            // It says why our finalizer is on.
            let says_why = observed.record.is_some() || !DesiredChild::are_in_waves(children);
            (!says_why).then(|| Record { cleanup, ..Record::default() })
        })
    }

    async fn record(&mut self) -> Result<ControlFlow<Next>, Error> {
        let record = self.answered.as_mut().and_then(|answered| answered.unrecorded.take());
        self.write_record(record).await
    }

    async fn record_orphan(&mut self) -> Result<ControlFlow<Next>, Error> {
        let record = self.parent().and_then(|parent| Record::of(&parent));
        self.write_record(record.map(|record| Record { orphan: true, ..record })).await
    }

    async fn write_record(&mut self, record: Option<Record>) -> Result<ControlFlow<Next>, Error> {
        if let (Some(parent), Some(record)) = (self.parent(), record) {
            let written = record.write(&self.context.parent_api(&self.run.key.object), &parent).await;
            self.see(written.map_err(|error| finalizer::Error::of(error, &parent))?);
        }
        Ok(Continue(()))
    }

    /// The common life of a parent: its children as the plugin wants them. Or what cleanup still wants.
    async fn converge(&mut self) -> Result<ControlFlow<Next>, Error> {
        let (Some(parent), Some(answered)) = (self.parent(), self.answered.take()) else { return Ok(Continue(())) };
        let record = Record::of(&parent);
        let observed = Observed { parent: parent.clone(), children: answered.children, record };
        let desired = match answered.said {
            Said::Desired(desired) => desired,
            Said::Cleanup { finalization, wanted, .. } => {
                let wanted = wanted.unwrap_or_default();
                let changed = self.bring_about(&observed, &wanted).await?.changed;
                let said = Said::Cleanup { finalization, wanted: None, changed };
                self.answered = Some(Answered { children: observed.children, unrecorded: None, said });
                return Ok(Continue(()));
            }
        };
        self.memory.ever_applied = Some(true);
        let applied = self.bring_about(&observed, &desired.children).await;
        let ready = ready_condition(self.context, &parent, &desired);
        let told = Told { report: &desired.report, ready };
        let applied = match applied {
            Ok(applied) => applied,
            Err(error) => return Ok(Break(self.failed(error, Some(&told)).await)),
        };
        self.memory.revision = Some(self.revision.id.clone());
        if applied.written.is_empty() && !self.memory.made_changes {
            // A host that starts where all is in place has nothing to tell.
            self.memory.synced.get_or_insert_with(tell::success);
        }
        if applied.changed && self.run.wake != Wake::Child {
            // The next turn may have other Events to tell.
            let (context, events) = (self.context, &desired.report.events);
            context.events.publish_plugin(&parent, &context.parent_kind, events, &mut self.memory.events).await;
            return Ok(Break(Next::Again));
        }
        let published = self.publish(&parent, &Ok(()), Some(&told)).await;
        let next = match (applied.changed, desired.next) {
            // The next pass sees what this one made, such as the address that a Service got.
            (true, _) => Next::Again,
            (false, plugin::Next::OnChange) => Next::OnChange,
            (false, plugin::Next::Immediately) => Next::Immediately,
            (false, plugin::Next::After(wait)) => Next::After(wait),
        };
        Ok(Break(next_unless_untold(next, published)))
    }

    async fn read(&mut self) -> Result<ControlFlow<Next>, Error> {
        let api = self.context.parent_api(&self.run.key.object);
        let fresh = lookup::get(&api, &self.run.key.object.name).await.map_err(Error::Read)?;
        match (fresh.filter(|fresh| fresh.uid() == self.run.key.uid), &mut self.subject) {
            (Some(fresh), _) => self.see(fresh),
            (None, Subject::Vanished { confirmed, .. }) => *confirmed = true,
            // The watch will say so, too.
            (None, subject) => {
                *subject = Subject::Absent;
                self.memory.finalizer = false;
            }
        }
        Ok(Continue(()))
    }

    async fn abandon(&mut self) -> Result<ControlFlow<Next>, Error> {
        let Some(parent) = self.parent() else { return Ok(Break(Next::Forget)) };
        let api = self.context.parent_api(&self.run.key.object);
        let who = handles::who_set(&api, &self.run.key.object, handles::ABANDON_CLEANUP).await;
        let note =
            format!("{who} abandoned cleanup with annotation {}; whatever is left stays", handles::ABANDON_CLEANUP);
        tracing::warn!("{note}");
        self.context.events.publish_handled(&parent, &self.context.parent_kind, "CleanupAbandoned", &note).await;
        release(self.context, &parent).await?;
        Ok(Break(Next::Forget))
    }

    async fn ask_cleanup(&mut self) -> Result<ControlFlow<Next>, Error> {
        let Some(parent) = self.parent() else { return Ok(Break(Next::Forget)) };
        let observed = observe::observe(self.context, parent);
        let propagation = self.context.propagation(&observed.parent);
        let deletion = json!({
            "deletion": {"propagation": propagation},
            "everApplied": self.memory.ever_applied.unwrap_or(true) || !observed.children.is_empty(),
            "everReached": self.memory.ever_reached.unwrap_or(true),
        });
        let limits = self.context.settings().limits.of_a_call();
        let request = self.request(&observed, &deletion);
        let reached = request.reached.clone();
        let answer = self.revision.plugin.finalize(request, self.related(), limits).await;
        self.note_reached(&reached);
        let answer = match answer {
            Err(Error::Related(related::Error::Listing)) => return Ok(Break(Next::OnChange)),
            answer => answer?,
        };
        let mut finalization = match answer {
            Some(answer) => self.rules(&observed.parent).finalization(answer.map_err(Error::Refused)?)?,
            // Our finalizer is there for children that are ours to delete only.
            None if observed.record.as_ref().is_some_and(|record| !record.cleanup) => Finalization::finished(),
            None if self.context.settings().drop_finalizer => Finalization::finished(),
            None => return Err(Error::NoCleanup),
        };
        // Foreground: the garbage collector is at work; orphan: the user wants them left alone.
        let may_want = propagation == "Background" && matches!(self.subject, Subject::Present { .. });
        let wanted = finalization.children.take().filter(|_| may_want);
        let unrecorded = wanted.as_ref().and_then(|wanted| self.unrecorded(&observed, wanted));
        let said = Said::Cleanup { finalization, wanted, changed: false };
        self.answered = Some(Answered { children: observed.children, unrecorded, said });
        if propagation == "Orphan" {
            self.children_gone = Some(true);
        }
        Ok(Continue(()))
    }

    /// The last wave first; what others hold is waited for. Read one by one from the API server: before our finalizer goes, nothing may
    /// be left.
    async fn delete_children(&mut self) -> Result<ControlFlow<Next>, Error> {
        let Some(parent) = self.parent() else { return Ok(Break(Next::Forget)) };
        let record = Record::of(&parent).unwrap_or_default();
        let mut gone = true;
        let mut failures = Vec::new();
        let ours = self.ours_to_delete(&parent, &record);
        for wave in ours.chunk_by(|(one, _), (other, _)| one == other) {
            for (_, key) in wave {
                match apply::delete_child(self.context, key, &parent, &record).await {
                    Ok(is_gone) => gone &= is_gone,
                    Err(error) => failures.push((self.context.describe(key), error)),
                }
            }
            if !failures.is_empty() {
                return Err(Error::Children(Failures { children: failures, waiting_deletes: 0 }));
            }
            if !gone {
                break;
            }
        }
        self.children_gone = Some(gone);
        Ok(Continue(()))
    }

    /// The children on record, and in the background those of later waves; the last wave first. What else it owns is garbage once the
    /// parent is gone.
    fn ours_to_delete(&self, parent: &Arc<Object>, record: &Record) -> Vec<(u16, ChildKey)> {
        let background = self.context.propagation(parent) == "Background";
        let observed = observe::observe(self.context, parent.clone());
        let waves: HashMap<_, _> =
            observed.children.into_iter().map(|(key, child)| (key, plan::wave_of(&child))).collect();
        let recorded = record.keys(&self.context.child_kinds).into_iter();
        let mut ours: Vec<_> = recorded.map(|key| (waves.get(&key).copied().unwrap_or_default(), key)).collect();
        ours.extend(waves.into_iter().filter(|(_, wave)| *wave > 0 && background).map(|(key, wave)| (wave, key)));
        ours.sort_unstable_by(|one, other| other.cmp(one));
        ours.dedup();
        ours
    }

    async fn wait(&mut self) -> Next {
        let Some(Said::Cleanup { finalization, changed, .. }) = self.answered.take().map(|answered| answered.said)
        else {
            return Next::Again;
        };
        let wait = finalization.waiting.unwrap_or(HELD_CHILDREN);
        let Subject::Present { parent, .. } = &self.subject else { return Next::After(wait) };
        let ready = Condition {
            kind: "Ready".to_owned(),
            status: ConditionStatus::False,
            reason: "Deleting".to_owned(),
            message: "waiting for the plugin's cleanup".to_owned(),
        };
        let told = Told { report: &finalization.report, ready };
        let published = self.publish(&parent.clone(), &Ok(()), Some(&told)).await;
        next_unless_untold(if changed { Next::Again } else { Next::After(wait) }, published)
    }

    async fn remove_finalizer(&mut self) -> Result<ControlFlow<Next>, Error> {
        let Subject::Present { parent, .. } = &self.subject else {
            let note = "gone though our finalizer was on it; it was cleaned up as it was last seen";
            tracing::warn!("{note}");
            if let Some(parent) = self.parent() {
                let kind = &self.context.parent_kind;
                self.context.events.publish_handled(&parent, kind, "CleanedUpVanished", note).await;
            }
            return Ok(Break(Next::Forget));
        };
        let context = self.context;
        if let Some(Said::Cleanup { finalization, .. }) = self.answered.as_ref().map(|answered| &answered.said) {
            let events = &finalization.report.events;
            context.events.publish_plugin(parent, &context.parent_kind, events, &mut self.memory.events).await;
        }
        let api = context.parent_api(&self.run.key.object);
        match finalizer::remove(&api, parent, &context.finalizers()).await {
            Ok(answer) => {
                tracing::info!("cleanup finished, finalizer removed");
                context.parents.apply(answer);
            }
            Err(finalizer::Error::Gone(_)) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Break(Next::Forget))
    }

    /// A plugin that has changed, and of all that its predecessor made wants nothing any more, is more likely broken than right: it is
    /// held until somebody says that it is meant.
    fn held_by_guard(&self, observed: &Observed, desired: &Desired) -> Option<Error> {
        if !desired.children.is_empty() || observed.children.is_empty() {
            return None;
        }
        let before = self.memory.revision.as_ref().or(self.context.trusted.as_ref());
        let new = before.is_some_and(|before| *before != self.revision.id);
        // A host that starts remembers no revision, but the parent tells that it was held.
        let was_held =
            || status::live_condition(&observed.parent, "Synced").is_some_and(|(_, reason)| reason == PRUNE_HELD);
        let allowed =
            || observed.parent.annotation(ALLOW_PRUNE_ANNOTATION).is_some_and(|allowed| allowed == self.revision.id);
        ((new || was_held()) && !allowed())
            .then(|| Error::PruneHeld { revision: self.revision.id.clone(), children: observed.children.len() })
    }

    /// Plan and apply, and what to remember of it.
    async fn bring_about(&mut self, observed: &Observed, children: &[DesiredChild]) -> Result<Applied, Error> {
        let (context, memory) = (self.context, &mut self.memory);
        let manager = context.manager(&observed.parent);
        let owner = Owner {
            kind: &context.parent_kind,
            child_kinds: &context.child_kinds,
            label: context.identity.label(),
            manager: &manager,
        };
        let plan = plan::plan(observed, children, memory, &owner);
        let unstable = settling::unstable(memory, observed, &plan, &self.revision.id, &manager);
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
        let applied = apply::apply(context, plan, observed, &manager).instrument(span).await;
        let contested = settling::contested(memory, observed, &applied, &self.revision.id);
        for (key, note) in memory.applied(&applied) {
            context.events.publish_note(&observed.parent, &context.parent_kind, &context.describe(&key), &note).await;
        }
        if !applied.written.is_empty() || !applied.deleted.is_empty() {
            memory.made_changes = true;
            tracing::info!(applied = applied.written.len(), deleted = applied.deleted.len(), "children changed");
        }
        if applied.failures.is_empty() {
            return match (unstable, contested) {
                (None, None) => Ok(applied),
                (Some((child, path)), _) => Err(Error::Unstable { child: context.describe(&child), path }),
                (_, Some((child, manager, path))) => {
                    Err(Error::Contested { child: context.describe(&child), manager, path })
                }
            };
        }
        let children = applied.failures.into_iter().map(|(key, error)| (context.describe(&key), error)).collect();
        Err(Error::Children(Failures { children, waiting_deletes: applied.waiting_deletes }))
    }

    fn request(&self, observed: &Observed, more: &serde_json::Value) -> Request {
        let limits = &self.context.settings().limits;
        let context = call_context(Timestamp::now(), limits, self.run.attempt, &self.revision.id, more);
        Request {
            parent: observed.parent.json().to_owned(),
            children: observed.children.iter().map(|(_, child)| child.json().to_owned()).collect(),
            config: self.revision.config.clone(),
            context: context.to_string(),
            ..Request::default()
        }
    }

    /// Keeps in mind that a call of the plugin may have changed something outside, whatever it answered, and if it was ended in the midst
    /// of it.
    fn note_reached(&mut self, reached: &Reached) {
        if reached.anything() {
            self.memory.ever_applied = Some(true);
            self.memory.ever_reached = Some(true);
        }
    }

    fn rules<'b>(&'b self, parent: &'b Object) -> desired::Rules<'b> {
        desired::Rules {
            kinds: &self.context.child_kinds,
            declared: &self.revision.plugin.description().children,
            parent,
            scope: self.context.key.namespace.as_deref(),
            max_children: usize::try_from(self.context.settings().limits.children).unwrap_or(usize::MAX),
        }
    }
}

/// Takes our finalizer off a parent without cleanup. Its children stay, and go with it when it is deleted.
///
/// # Errors
/// If it could not be written, also because the parent has changed since.
pub async fn release(context: &Context, parent: &Object) -> Result<(), finalizer::Error> {
    match finalizer::remove(&context.parent_api(&parent.key()), parent, &context.finalizers()).await {
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
