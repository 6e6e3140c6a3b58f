//! `pilothouse:plugin@0.1`: its exports, and the border between its types and ours. Plain copies, no judgement.

use std::{sync::Arc, time::Duration};

use wasmtime::{
    Store,
    component::{Instance, InstancePre},
};

use super::{Bound, Contract, Entered, Mismatch};
use crate::{
    bindings::v0_1::{
        exports::pilothouse::plugin::{finalizer, reconciler, relations},
        pilothouse::plugin::types,
    },
    plugin::{
        Answer, CallState, Child, Cleanup, Condition, ConditionStatus, Event, EventKind, Failure, FinalizeAnswer, Next,
        Request, Selector, describe::KindName,
    },
};

struct Exports {
    reconciler: reconciler::GuestIndices,
    finalizer: Option<finalizer::GuestIndices>,
    relations: Option<relations::GuestIndices>,
}

/// Finds the exports of a component.
pub(super) fn bind(component: &InstancePre<CallState>) -> Bound {
    let has = |part: &str| component.component().get_export_index(None, part).is_some();
    let cleans_up = has("pilothouse:plugin/finalizer@0.1.0");
    let relates = has("pilothouse:plugin/relations@0.1.0");
    Ok(Arc::new(Exports {
        reconciler: reconciler::GuestIndices::new(component)?,
        finalizer: cleans_up.then(|| finalizer::GuestIndices::new(component)).transpose()?,
        relations: relates.then(|| relations::GuestIndices::new(component)).transpose()?,
    }))
}

impl Exports {
    fn reconciler(
        &self,
        store: &mut Store<CallState>,
        instance: &Instance,
    ) -> Result<reconciler::Guest, wasmtime::Error> {
        self.reconciler.load(store, instance).map_err(|error| error.context(Mismatch("reconciler")))
    }

    fn finalizer(
        &self,
        store: &mut Store<CallState>,
        instance: &Instance,
    ) -> Result<Option<finalizer::Guest>, wasmtime::Error> {
        let Some(finalizer) = &self.finalizer else { return Ok(None) };
        finalizer.load(store, instance).map(Some).map_err(|error| error.context(Mismatch("finalizer")))
    }

    fn relations(
        &self,
        store: &mut Store<CallState>,
        instance: &Instance,
    ) -> Result<Option<relations::Guest>, wasmtime::Error> {
        let Some(relations) = &self.relations else { return Ok(None) };
        relations.load(store, instance).map(Some).map_err(|error| error.context(Mismatch("relations")))
    }
}

impl Contract for Exports {
    fn has_finalizer(&self) -> bool {
        self.finalizer.is_some()
    }

    fn has_relations(&self) -> bool {
        self.relations.is_some()
    }

    fn describe<'a>(self: Arc<Self>, store: &'a mut Store<CallState>, instance: &'a Instance) -> Entered<'a, String> {
        Box::pin(async move {
            self.finalizer(store, instance)?;
            self.relations(store, instance)?;
            self.reconciler(store, instance)?.call_describe(store).await
        })
    }

    fn relate<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<Vec<Selector>, Failure>> {
        Box::pin(async move {
            let relations = self.relations(store, instance)?.ok_or(Mismatch("relations"))?;
            Ok(relations.call_relate(store, &request.into()).await?.map(all).map_err(Failure::from))
        })
    }

    fn reconcile<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<Answer, Failure>> {
        Box::pin(async move {
            let answer = self.reconciler(store, instance)?.call_reconcile(store, &request.into()).await?;
            Ok(answer.map(Answer::from).map_err(Failure::from))
        })
    }

    fn finalize<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<FinalizeAnswer, Failure>> {
        Box::pin(async move {
            let finalizer = self.finalizer(store, instance)?.ok_or(Mismatch("finalizer"))?;
            let answer = finalizer.call_finalize(store, &request.into()).await?;
            Ok(answer.map(FinalizeAnswer::from).map_err(Failure::from))
        })
    }
}

impl From<Request> for types::Request {
    fn from(request: Request) -> Self {
        let Request { parent, children, related, config, context, reached: _ } = request;
        Self { parent, children, related, config, context }
    }
}

impl From<types::Desired> for Answer {
    fn from(desired: types::Desired) -> Self {
        let types::Desired { children, status, conditions, events, next, extra } = desired;
        Self {
            children: all(children),
            status,
            conditions: all(conditions),
            events: all(events),
            next: next.into(),
            extra,
        }
    }
}

impl From<types::Finalization> for FinalizeAnswer {
    fn from(finalization: types::Finalization) -> Self {
        let types::Finalization { cleanup, children, status, conditions, events, extra } = finalization;
        Self {
            cleanup: cleanup.into(),
            children: children.map(all),
            status,
            conditions: all(conditions),
            events: all(events),
            extra,
        }
    }
}

fn all<T, U: From<T>>(values: Vec<T>) -> Vec<U> {
    values.into_iter().map(U::from).collect()
}

fn millis(millis: u32) -> Duration {
    Duration::from_millis(millis.into())
}

impl From<types::Selector> for Selector {
    fn from(types::Selector { api_version, kind, namespace, names, labels }: types::Selector) -> Self {
        Self { kind: KindName { api_version, kind }, namespace, names, labels }
    }
}

impl From<types::Child> for Child {
    fn from(types::Child { object, options }: types::Child) -> Self {
        Self { object, options }
    }
}

impl From<types::Condition> for Condition {
    fn from(types::Condition { kind, status, reason, message }: types::Condition) -> Self {
        let status = match status {
            types::ConditionStatus::True => ConditionStatus::True,
            types::ConditionStatus::False => ConditionStatus::False,
            types::ConditionStatus::Unknown => ConditionStatus::Unknown,
        };
        Self { kind, status, reason, message }
    }
}

impl From<types::Event> for Event {
    fn from(types::Event { kind, reason, message }: types::Event) -> Self {
        let kind = match kind {
            types::EventKind::Normal => EventKind::Normal,
            types::EventKind::Warning => EventKind::Warning,
        };
        Self { kind, reason, message }
    }
}

impl From<types::Next> for Next {
    fn from(next: types::Next) -> Self {
        match next {
            types::Next::OnChange => Self::OnChange,
            types::Next::Immediately => Self::Immediately,
            types::Next::After(wait) => Self::After(millis(wait)),
        }
    }
}

impl From<types::Failure> for Failure {
    fn from(failure: types::Failure) -> Self {
        match failure {
            types::Failure::Retry(message) => Self::Retry(message),
            types::Failure::RetryAfter((wait, message)) => Self::RetryAfter(millis(wait), message),
            types::Failure::Terminal(message) => Self::Terminal(message),
        }
    }
}

impl From<types::Cleanup> for Cleanup {
    fn from(cleanup: types::Cleanup) -> Self {
        match cleanup {
            types::Cleanup::Finished => Self::Finished,
            types::Cleanup::Waiting(wait) => Self::Waiting(millis(wait)),
        }
    }
}
