//! A plugin: a loaded component, and the only functions that enter a guest.
//!
//! Each call runs in a fresh instance under the limits of its reconciler and leaves nothing behind. What comes out is a value of
//! ours, an error of ours, and never a panic.

pub mod compile;
pub mod describe;
pub mod engine;

mod answer;
#[cfg(test)]
mod churn;
mod contract;
#[cfg(test)]
mod hostile;
mod load;
mod store;
mod surface;
#[cfg(test)]
mod wat;

use std::{
    fs::File,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;
use tracing::{Instrument as _, debug_span, field::Empty};
use wasmtime::{
    Store, Trap, WasmBacktrace,
    component::{Instance, InstancePre},
};

pub use self::{
    answer::{
        Answer, Child, Cleanup, Condition, ConditionStatus, Event, EventKind, Failure, FinalizeAnswer, Next, Selector,
    },
    contract::{served as contracts, serves_export},
    describe::Description,
    engine::{Engine, GUEST_MEMORY},
    load::Error as LoadError,
    store::CallLimits,
    surface::{Format, Surface},
};
pub(crate) use self::{contract::serves_import as serves_contract, store::CallState};
use self::{
    contract::{Contract, Entered, Mismatch},
    store::Refused,
};
pub use crate::capability::{
    access::{Access, Reached},
    kube::Reader,
    serves as serves_import,
};
use crate::{
    capability::{access::Outside, log::LogRate, wasi},
    metrics::{Function, Usage},
};

/// See the module's documentation.
pub struct Plugin {
    guest: Guest,
    contract: Arc<dyn Contract>,
    /// The entry of the cache that it was loaded from, which stays as long as it is in use.
    _file: Option<File>,
    imports: Vec<String>,
    description: Description,
    digest: String,
}

/// What the calls of a plugin share.
#[derive(Clone)]
struct Guest {
    engine: Arc<Engine>,
    component: InstancePre<CallState>,
    /// How many of its calls can be in their first turn.
    turns: Arc<Semaphore>,
    log_rate: Arc<LogRate>,
    access: Arc<Access>,
}

/// What a plugin is asked with: `request` of the WIT.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The parent, as JSON.
    pub parent: String,
    /// Its children, as JSON each.
    pub children: Vec<String>,
    /// The objects that its relations select, as JSON each.
    pub related: Vec<String>,
    /// `spec.config` of the reconciler, as JSON.
    pub config: String,
    /// `context` of the WIT, as JSON.
    pub context: String,
    /// Where it is kept in mind what the plugin may have changed outside on the way; no part of the WIT.
    pub reached: Reached,
}

/// Why a call gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The guest computed or waited for too long.
    #[error("the plugin gave no answer within {0:?} (limits.timeout)")]
    Deadline(Duration),
    /// The guest wanted more memory than it may have, and gave up.
    #[error("the plugin needs more memory than {0} bytes (limits.memory)")]
    Memory(usize),
    /// The guest wanted more memory than is left of that of all guests, and gave up.
    #[error("the plugins of this host together need more memory than {0} bytes (--guest-memory)")]
    GuestMemory(usize),
    /// The guest gave up: a panic in most languages.
    #[error("the plugin crashed: {0}")]
    Trap(Trap),
    /// The guest ended itself: a panic where a language has a program for a plugin.
    #[error("the plugin crashed: it ended itself with exit code {0}")]
    Exit(i32),
    /// The guest asked the host for something that it may not have, or for more of it, or in no way that the contract allows.
    #[error("the plugin called the host as it may not: {0}")]
    Refused(String),
    /// The guest could not be started.
    #[error("failed to start the plugin")]
    Instantiate(#[source] wasmtime::Error),
    /// The guest answered something that the contract does not allow, or more than `limits.output`.
    #[error(
        "the plugin's answer cannot be read; it breaks the WIT contract or is larger than {output} bytes (limits.output)"
    )]
    Undecodable {
        /// The limit.
        output: usize,
        /// What the engine says of it.
        source: wasmtime::Error,
    },
    /// The guest is not of the type that the contract says.
    #[error("the plugin does not keep the contract that it exports")]
    Mismatch(#[source] wasmtime::Error),
    /// The guest gave up because it could not use what it is granted: a Secret is missing, or is not as it has to be.
    #[error("{0}")]
    Credentials(String),
    /// A preview wanted to change, or to look at, what is outside of the cluster: nobody knows what would come of it.
    #[error(
        "what the plugin makes of this parent depends on what is outside of the cluster ({0}), which no preview touches"
    )]
    NotPreviewable(&'static str),
    /// A bug of the host, which ended this call only.
    #[error("the call ended by a bug in the host; please report it")]
    Host,
}

impl CallError {
    /// All categories, in the order of [`Self::place`].
    pub const CATEGORIES: [&str; 10] = [
        "PluginDeadline",
        "PluginMemory",
        "GuestMemoryExhausted",
        "PluginTrap",
        "PluginCallRefused",
        "PluginNotStarted",
        "PluginAnswerUndecodable",
        "CredentialsMissing",
        "NotPreviewable",
        "HostError",
    ];

    /// A stable name, for conditions, Events and metrics.
    pub fn category(&self) -> &'static str {
        Self::CATEGORIES[self.place()]
    }

    /// Where its category stands among all of them.
    pub fn place(&self) -> usize {
        match self {
            Self::Deadline(_) => 0,
            Self::Memory(_) => 1,
            Self::GuestMemory(_) => 2,
            Self::Trap(_) | Self::Exit(_) => 3,
            Self::Refused(_) => 4,
            Self::Instantiate(_) => 5,
            Self::Undecodable { .. } | Self::Mismatch(_) => 6,
            Self::Credentials(_) => 7,
            Self::NotPreviewable(_) => 8,
            Self::Host => 9,
        }
    }
}

impl Plugin {
    /// What the plugin says of itself.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The SHA-256 of the component, in hex.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether it cleans up after its parents.
    pub fn has_finalizer(&self) -> bool {
        self.contract.has_finalizer()
    }

    /// Whether it looks at objects that it does not own.
    pub fn has_relations(&self) -> bool {
        self.contract.has_relations()
    }

    /// Asks for the children that the parent should have. `related` gives the objects that its relations select, if it has relations.
    ///
    /// # Errors
    /// If there is no answer, or `related` fails; what the plugin itself refuses is an answer.
    pub async fn reconcile<F, E>(
        &self,
        request: Request,
        related: impl FnOnce(Vec<Selector>) -> F + Send + 'static,
        limits: CallLimits,
    ) -> Result<Result<Answer, Failure>, E>
    where
        F: Future<Output = Result<Vec<String>, E>> + Send,
        E: From<CallError> + Send + 'static,
    {
        let enter: Enter<Answer> = |contract, store, instance, request| contract.reconcile(store, instance, request);
        self.ask(Function::Reconcile, request, related, limits, enter).await
    }

    /// The same, for a preview: nothing is to come of the answer.
    ///
    /// # Errors
    /// If there is no answer, or `related` fails.
    pub async fn preview<F, E>(
        &self,
        request: Request,
        related: impl FnOnce(Vec<Selector>) -> F + Send + 'static,
        limits: CallLimits,
    ) -> Result<Result<Answer, Failure>, E>
    where
        F: Future<Output = Result<Vec<String>, E>> + Send,
        E: From<CallError> + Send + 'static,
    {
        let enter: Enter<Answer> = |contract, store, instance, request| contract.reconcile(store, instance, request);
        self.ask(Function::Preview, request, related, limits, enter).await
    }

    /// Asks to clean up after a parent that is being deleted. None: the plugin never cleans up.
    ///
    /// # Errors
    /// If there is no answer, or `related` fails; what the plugin itself refuses is an answer.
    pub async fn finalize<F, E>(
        &self,
        request: Request,
        related: impl FnOnce(Vec<Selector>) -> F + Send + 'static,
        limits: CallLimits,
    ) -> Result<Option<Result<FinalizeAnswer, Failure>>, E>
    where
        F: Future<Output = Result<Vec<String>, E>> + Send,
        E: From<CallError> + Send + 'static,
    {
        if !self.has_finalizer() {
            return Ok(None);
        }
        let enter: Enter<FinalizeAnswer> =
            |contract, store, instance, request| contract.finalize(store, instance, request);
        self.ask(Function::Finalize, request, related, limits, enter).await.map(Some)
    }

    /// The relations, if there are any, and then the question itself: each a call in an instance of its own, and both in one hop to the
    /// guests' threads, which costs more than a call.
    async fn ask<T, F, E>(
        &self,
        function: Function,
        request: Request,
        related: impl FnOnce(Vec<Selector>) -> F + Send + 'static,
        limits: CallLimits,
        enter: Enter<T>,
    ) -> Result<Result<T, Failure>, E>
    where
        T: Send + 'static,
        F: Future<Output = Result<Vec<String>, E>> + Send,
        E: From<CallError> + Send + 'static,
    {
        let (guest, contract, mut request) = (self.guest.clone(), self.contract.clone(), request);
        let is_preview = function == Function::Preview;
        let asked = async move {
            if contract.has_relations() {
                let (asked, question) = (contract.clone(), request.clone());
                let (context, reached) = (request.context.clone(), request.reached.clone());
                let call = Call { function: Function::Relate, is_preview, limits, context, reached };
                let answer = guest.call(call, move |store, instance| asked.relate(store, instance, question)).await;
                match guest.note(Function::Relate, answer)? {
                    Ok(selectors) => request.related = related(selectors).await?,
                    Err(failure) => return Ok(Err(failure)),
                }
            }
            let (context, reached) = (request.context.clone(), request.reached.clone());
            let call = Call { function, is_preview, limits, context, reached };
            let answer = guest.call(call, move |store, instance| enter(contract, store, instance, request)).await;
            Ok(guest.note(function, answer)?)
        };
        match self.guest.engine.run(&self.guest.turns, asked.in_current_span()).await {
            Some(answer) => answer,
            None => Ok(self.guest.note(function, (Err(CallError::Host), None))?),
        }
    }
}

/// The objects related to the parent of a plugin that has no relations.
///
/// # Errors
/// None: it is what the calls of a plugin ask for.
pub async fn none_related(_: Vec<Selector>) -> Result<Vec<String>, CallError> {
    Ok(Vec::new())
}

/// What a call gives.
trait Answered {
    /// Whether the plugin says that it cannot.
    fn is_failure(&self) -> bool;
}

impl Answered for String {
    fn is_failure(&self) -> bool {
        false
    }
}

impl<T> Answered for Result<T, Failure> {
    fn is_failure(&self) -> bool {
        self.is_err()
    }
}

/// How a function of a contract is called.
type Enter<T> =
    for<'a> fn(Arc<dyn Contract>, &'a mut Store<CallState>, &'a Instance, Request) -> Entered<'a, Result<T, Failure>>;

/// One call of a guest.
struct Call {
    function: Function,
    is_preview: bool,
    limits: CallLimits,
    /// `context` of its request, and what it is to keep in mind.
    context: String,
    reached: Reached,
}

impl Guest {
    /// The one place where guest code runs: a fresh store, an instance, one call, and all of it dropped. To be called on the guests'
    /// threads. With what it took.
    async fn call<T: Answered>(
        &self,
        call: Call,
        enter: impl for<'a> FnOnce(&'a mut Store<CallState>, &'a Instance) -> Entered<'a, T> + Send,
    ) -> (Result<T, CallError>, Option<Usage>) {
        let Call { function, is_preview, limits, context, reached } = call;
        let span = debug_span!("plugin", function = function.name(), category = Empty);
        let call = async {
            let outside = Outside::new(self.access.clone(), is_preview, limits.output).keeping(reached);
            let mut store = store::new_store(&self.engine, limits, context, self.log_rate.clone(), outside);
            let begun = Instant::now();
            let mut entered = None;
            let result = async {
                let instance = self.component.instantiate_async(&mut store).await.map_err(|error| (true, error))?;
                entered = Some(begun.elapsed());
                enter(&mut store, &instance).await.map_err(|error| (false, error))
            };
            // The epoch ends a guest that computes; this ends one that waits.
            let result = match tokio::time::timeout(limits.timeout, result).await {
                Ok(result) => result.map_err(|(starting, error)| classify(error, starting, &store, limits)),
                Err(_) => Err(CallError::Deadline(limits.timeout)),
            };
            // Whatever it answered: it would have answered something else.
            let outside = &store.data().outside;
            let result = match (outside.touched(), outside.lacks()) {
                (Some(capability), _) => Err(CallError::NotPreviewable(capability)),
                (None, Some(why)) if result.as_ref().is_ok_and(T::is_failure) => {
                    Err(CallError::Credentials(why.to_owned()))
                }
                _ => result,
            };
            let took = begun.elapsed();
            let usage = Usage {
                instantiate: entered.unwrap_or(took),
                call: entered.map(|entered| took.saturating_sub(entered)),
                memory: store.data().memory_used(),
            };
            (result, Some(usage))
        };
        let (result, usage) = call.instrument(span.clone()).await;
        if let Err(error) = &result {
            span.record("category", error.category());
        }
        (result, usage)
    }

    /// Counts a call that has ended; its answer.
    fn note<T>(
        &self,
        function: Function,
        (answer, usage): (Result<Result<T, Failure>, CallError>, Option<Usage>),
    ) -> Result<Result<T, Failure>, CallError> {
        self.access.calls().note(function, answer.as_ref().map(|answer| answer.as_ref().err()), usage);
        answer
    }
}

fn classify(error: wasmtime::Error, starting: bool, store: &Store<CallState>, limits: CallLimits) -> CallError {
    let trap = error.downcast_ref::<Trap>().copied();
    // It ended in the midst of the guest, and tells where.
    let in_guest = error.is::<WasmBacktrace>();
    if in_guest {
        tracing::debug!(target: "plugin", "{error:?}");
    }
    let of_memory = || match store.data().memory_refused()? {
        Refused::Own => Some(CallError::Memory(limits.memory)),
        Refused::Shared => Some(CallError::GuestMemory(store.data().guest_memory())),
    };
    match (trap, wasi::exit_code(&error)) {
        (Some(Trap::Interrupt), _) => CallError::Deadline(limits.timeout),
        (Some(trap), _) => of_memory().unwrap_or(CallError::Trap(trap)),
        (None, Some(code)) => of_memory().unwrap_or(CallError::Exit(code)),
        // A function of the host said no.
        (None, None) if in_guest => CallError::Refused(error.root_cause().to_string()),
        (None, None) if error.is::<Mismatch>() => CallError::Mismatch(error),
        (None, None) if starting => of_memory().unwrap_or(CallError::Instantiate(error)),
        (None, None) => CallError::Undecodable { output: limits.output, source: error },
    }
}
