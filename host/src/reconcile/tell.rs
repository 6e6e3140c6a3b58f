//! What a turn tells: status, conditions and Events of its parent.

use tracing::{Instrument as _, Span, debug_span};

use super::{Context, Error, PAUSED, Subject, Turn, handles, plan::in_waves, readiness::is_ready, status};
use crate::{
    lookup,
    object::Object,
    plugin::{Condition, ConditionStatus},
    queue::Next,
    state::{Desired, Report},
    telemetry,
};

const SUCCESS: &str = "ReconcileSuccess";

/// Status and reason of `Synced` where all is well.
pub(super) fn success() -> (String, String) {
    (ConditionStatus::True.as_str().to_owned(), SUCCESS.to_owned())
}

/// What there is to tell once the plugin has answered.
pub(super) struct Told<'a> {
    /// What the plugin tells.
    pub(super) report: &'a Report,
    /// What the host makes of the children.
    pub(super) ready: Condition,
}

impl Told<'_> {
    /// Whether the parent is ready: the plugin may decide it.
    pub(super) fn is_ready(&self) -> bool {
        let by_plugin = self.report.conditions.iter().find(|condition| condition.kind == "Ready");
        by_plugin.unwrap_or(&self.ready).status == ConditionStatus::True
    }
}

/// The condition `Ready`, from the children as the store has them now.
pub(super) fn ready_condition(context: &Context, parent: &Object, desired: &Desired) -> Condition {
    let mut ready = 0;
    let mut waiting_for = None;
    for child in in_waves(&desired.children) {
        let live = context.children[child.key.kind].get(&child.key.object);
        if live.is_some_and(|live| context.is_child(&child.key, &live, parent) && is_ready(child, &live)) {
            ready += 1;
        } else if waiting_for.is_none() {
            waiting_for = Some(context.describe(&child.key));
        }
    }
    status::ready(desired.children.len(), ready, waiting_for)
}

/// A status that was not written is tried again: nothing else might ever wake the parent.
pub(super) fn next_unless_untold(next: Next, published: bool) -> Next {
    match next {
        Next::OnChange | Next::After(_) | Next::Terminal if !published => Next::Failed(None),
        next => next,
    }
}

impl Turn<'_> {
    /// Tells what went wrong, and how to go on.
    pub(super) async fn failed(&mut self, error: Error, told: Option<&Told<'_>>) -> Next {
        let context = self.context;
        let message = telemetry::chain(&error);
        let parent = match &self.subject {
            Subject::Present { parent, .. } => parent.clone(),
            Subject::Vanished { .. } | Subject::Absent => {
                tracing::warn!(
                    reason = error.category(),
                    "no longer shown by the watch, and what is left to do failed: {message}"
                );
                return error.next(true);
            }
        };
        if error.is_conflict() {
            tracing::debug!("{message}; reading again");
            if let Ok(Some(fresh)) = lookup::get(&context.parent_api(&parent.key()), parent.name()).await {
                context.see(&fresh);
                context.parents.apply(fresh);
            }
            return Next::Immediately;
        }
        tracing::warn!(reason = error.category(), "reconcile failed: {message}");
        Span::current().record("category", error.category()).record("otel.status_code", "ERROR");
        let published = self.publish(&parent, &Err((error.category(), message)), told).await;
        next_unless_untold(error.next(parent.is_deleting()), published)
    }

    /// Status and Events; whether the status says now what it should. Its failure is told in the log only.
    pub(super) async fn publish(
        &mut self,
        parent: &Object,
        outcome: &Result<(), (&'static str, String)>,
        told: Option<&Told<'_>>,
    ) -> bool {
        let (context, memory) = (self.context, &mut self.memory);
        context.note(parent, &self.revision.id, outcome.is_ok(), told);
        let handled = handles::handled(parent);
        let revision = &self.revision.id;
        let (status, reason, message) = match outcome {
            Ok(()) => (ConditionStatus::True, SUCCESS, status::success_message(revision, &handled)),
            // That is by a person.
            Err((PAUSED, message)) => (ConditionStatus::False, PAUSED, message.clone()),
            Err((category, message)) => (ConditionStatus::False, *category, format!("revision {revision}: {message}")),
        };
        let now = Some((status.as_str().to_owned(), reason.to_owned()));
        let before = context.synced(parent, memory);
        memory.synced.clone_from(&now);
        let is_transition = memory.is_transition(before.as_ref(), now.as_ref());
        let is_handled = outcome.is_ok() && !handled.is_empty() && memory.handled.as_ref() != Some(&handled);
        if is_handled {
            memory.handled = Some(handled.clone());
        }
        let pin = parent.annotation(handles::REVISION).filter(|pin| !context.revisions().has(pin));
        let before = std::mem::replace(&mut memory.pin, pin.clone());
        let ignored = pin.filter(|pin| before.as_ref() != Some(pin));
        let circuit_open = self.run.circuit_open;
        let circuit_changes = std::mem::replace(&mut memory.circuit_open, circuit_open) != circuit_open;
        let (events, kind) = (&context.events, &context.parent_kind);
        if is_transition {
            events.publish_transition(parent, kind, reason, outcome.as_ref().err()).await;
        }
        if is_handled && !status::tells(parent, &handled) {
            events.publish_handled(parent, kind, "ReconcileRequestHandled", &handled).await;
        }
        if let Some(pin) = &ignored {
            events.publish_pin_ignored(parent, kind, pin, revision).await;
        }
        if circuit_changes {
            events.publish_circuit(parent, kind, circuit_open).await;
        }
        if let Some(told) = told {
            events.publish_plugin(parent, kind, &told.report.events, &mut memory.events).await;
        }
        if !context.parent_kind.tells_status() {
            memory.made_changes = false;
            return true;
        }
        let synced = Condition { kind: "Synced".to_owned(), status, reason: reason.to_owned(), message };
        let manager = context.manager(parent);
        let ready = told.map(|told| told.ready.clone());
        let conditions = [Some(synced), ready, circuit_open.then(status::unresponsive)].into_iter().flatten().collect();
        let report = told.map(|told| told.report);
        let publish = status::Publish { report, conditions, manager: &manager, made_changes: memory.made_changes };
        let api = context.parent_api(&parent.key());
        let told_before = memory.status.as_ref().map(|last| last.dropped.clone()).unwrap_or_default();
        match status::publish(&api, parent, &publish, &mut memory.status).instrument(debug_span!("status")).await {
            Ok(answer) => {
                memory.made_changes = false;
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
}
