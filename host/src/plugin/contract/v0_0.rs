//! `pilothouse:plugin@0.0.9`, a version that never was: what serving an older one takes, and the proof that it is served.

use std::{sync::Arc, time::Duration};

use wasmtime::{
    Store,
    component::{Instance, InstancePre},
};

use super::{Bound, Contract, Entered, Mismatch};
use crate::{
    bindings::v0_0::{
        exports::pilothouse::plugin::{finalizer, reconciler},
        pilothouse::plugin::{log, types},
    },
    capability::log::LogContext,
    plugin::{Answer, CallState, Child, Cleanup, Failure, FinalizeAnswer, Next, Request, Selector},
};

struct Exports {
    reconciler: reconciler::GuestIndices,
    finalizer: finalizer::GuestIndices,
}

pub(super) fn bind(component: &InstancePre<CallState>) -> Bound {
    Ok(Arc::new(Exports {
        reconciler: reconciler::GuestIndices::new(component)?,
        finalizer: finalizer::GuestIndices::new(component)?,
    }))
}

impl Contract for Exports {
    fn has_finalizer(&self) -> bool {
        true
    }

    fn has_relations(&self) -> bool {
        false
    }

    fn describe<'a>(self: Arc<Self>, store: &'a mut Store<CallState>, instance: &'a Instance) -> Entered<'a, String> {
        Box::pin(async move {
            let reconciler = self.reconciler.load(&mut *store, instance);
            reconciler.map_err(|error| error.context(Mismatch("reconciler")))?.call_describe(store).await
        })
    }

    fn relate<'a>(
        self: Arc<Self>,
        _: &'a mut Store<CallState>,
        _: &'a Instance,
        _: Request,
    ) -> Entered<'a, Result<Vec<Selector>, Failure>> {
        Box::pin(async move { Ok(Ok(Vec::new())) })
    }

    fn reconcile<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<Answer, Failure>> {
        Box::pin(async move {
            let reconciler = self.reconciler.load(&mut *store, instance)?;
            Ok(reconciler.call_reconcile(store, &request.into()).await?.map(Answer::from).map_err(Failure::from))
        })
    }

    fn finalize<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<FinalizeAnswer, Failure>> {
        Box::pin(async move {
            let finalizer = self.finalizer.load(&mut *store, instance)?;
            let answer = finalizer.call_finalize(store, &request.into()).await?;
            Ok(answer.map(FinalizeAnswer::from).map_err(Failure::from))
        })
    }
}

impl log::Host for LogContext {
    fn write(&mut self, message: String) {
        use crate::bindings::v0_1::pilothouse::plugin::log::{Host, Level};
        Host::write(self, Level::Info, message, Vec::new());
    }
}

impl From<Request> for types::Request {
    fn from(request: Request) -> Self {
        let Request { parent, children, related: _, config: _, context, reached: _ } = request;
        Self { parent, children, context }
    }
}

impl From<types::Desired> for Answer {
    fn from(types::Desired { children, status, again }: types::Desired) -> Self {
        let child = |object| Child { object, options: "{}".to_owned() };
        let next = again.map_or(Next::OnChange, |again| Next::After(Duration::from_millis(again.into())));
        let children = children.into_iter().map(child).collect();
        Self { children, status, next, extra: "{}".to_owned(), ..Self::default() }
    }
}

impl From<types::Cleanup> for FinalizeAnswer {
    fn from(cleanup: types::Cleanup) -> Self {
        let cleanup = match cleanup {
            types::Cleanup::Finished => Cleanup::Finished,
            types::Cleanup::Waiting(wait) => Cleanup::Waiting(Duration::from_millis(wait.into())),
        };
        let (conditions, events) = (Vec::new(), Vec::new());
        Self { cleanup, children: None, status: None, conditions, events, extra: "{}".to_owned() }
    }
}

impl From<types::Failure> for Failure {
    fn from(failure: types::Failure) -> Self {
        match failure {
            types::Failure::Retry(message) => Self::Retry(message),
            types::Failure::Terminal(message) => Self::Terminal(message),
        }
    }
}

/// A guest of it, as text.
pub(super) fn guest() -> Vec<u8> {
    use crate::plugin::wat;
    let description = br#"{"parent":{"apiVersion":"t.example/v1","kind":"Widget"}}"#;
    let child = br#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"old"}}"#;
    let text = format!(
        r#"(module
  (import "pilothouse:plugin/log@0.0.9" "write" (func $log (param i32 i32)))
  (memory (export "memory") 2)
  (global $top (mut i32) (i32.const 32768))
  (data (i32.const 2048) "{description}")
  (data (i32.const 4096) "{child}")
  (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
    (global.get $top)
    (global.set $top (i32.and (i32.add (i32.add (global.get $top) (local.get 3)) (i32.const 7)) (i32.const -8))))
  (func (export "pilothouse:plugin/reconciler@0.0.9#describe") (result i32)
    (i32.store (i32.const 1000) (i32.const 2048))
    (i32.store (i32.const 1004) (i32.const {description_length}))
    (i32.const 1000))
  ;; result: desired, whose list of one child is at 1100; asked again after 5 s. With a parent that is `!`, a failure of it.
  (func (export "pilothouse:plugin/reconciler@0.0.9#reconcile")
    (param $parent i32) (param $length i32) (param i32 i32 i32 i32) (result i32)
    (call $log (i32.const 4096) (i32.const {child_length}))
    (if (i32.eq (i32.load8_u (local.get $parent)) (i32.const 33))
      (then
        (i32.store8 (i32.const 1024) (i32.const 1))
        (i32.store8 (i32.const 1028) (i32.const 1))
        (i32.store (i32.const 1032) (local.get $parent))
        (i32.store (i32.const 1036) (local.get $length)))
      (else
        (i32.store (i32.const 1028) (i32.const 1100))
        (i32.store (i32.const 1032) (i32.const 1))
        (i32.store (i32.const 1100) (i32.const 4096))
        (i32.store (i32.const 1104) (i32.const {child_length}))
        (i32.store8 (i32.const 1048) (i32.const 1))
        (i32.store (i32.const 1052) (i32.const 5000))))
    (i32.const 1024))
  ;; result: cleanup, waiting for 7 s
  (func (export "pilothouse:plugin/finalizer@0.0.9#finalize") (param i32 i32 i32 i32 i32 i32) (result i32)
    (i32.store8 (i32.const 1028) (i32.const 1))
    (i32.store (i32.const 1032) (i32.const 7000))
    (i32.const 1024)))"#,
        description = wat::escaped(description),
        description_length = description.len(),
        child = wat::escaped(child),
        child_length = child.len(),
    );
    wat::component(&text, &wat::contract("tests/contract/0.0.9"), "import log; export reconciler; export finalizer;")
}
