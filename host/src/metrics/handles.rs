//! What is counted of one reconciler as it happens. Resolved once in its life, so that a reconcile looks nothing up; all that can be
//! read when `/metrics` is scraped is read there instead, from what serves then.

use std::{
    array,
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use prometheus_client::metrics::{
    counter::Counter,
    histogram::{Histogram, exponential_buckets},
};

use crate::{
    controller::Controller,
    plugin::{CallError, Failure},
    queue::Next,
};

/// What a reconcile can come to, as controller-runtime names it.
const RESULTS: [&str; 4] = ["success", "error", "requeue", "requeue_after"];
/// The buckets of controller-runtime's `reconcile_time_seconds`.
const RECONCILE_BUCKETS: [f64; 40] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5,
    1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0,
];
/// From ten microseconds, which an instance takes, to what a limit may allow.
const CALL_BUCKETS: [f64; 20] = [
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
    2.5, 5.0, 10.0, 30.0,
];

/// See the module's documentation.
pub struct Handles {
    pub(super) reconciler: String,
    /// The calls of its plugin.
    pub calls: Arc<Calls>,
    pub(super) results: [Counter; RESULTS.len()],
    pub(super) terminal: Counter,
    pub(super) panics: Counter,
    pub(super) reconcile_time: Histogram,
    pub(super) queue_time: Histogram,
    pub(super) work_time: Histogram,
    /// Writes that the API server has accepted, by verb and resource.
    writes: Mutex<BTreeMap<(&'static str, String), u64>>,
    /// When each watch has last been heard of, by resource.
    watches: Mutex<HashMap<String, Arc<Heard>>>,
    serving: Mutex<Weak<Controller>>,
}

/// How plugins came to be machine code.
#[derive(Debug, Default)]
pub struct Compilations {
    cache: Counter,
    compiler: Counter,
    failed: Counter,
}

impl Compilations {
    /// It was in the cache.
    pub fn found(&self) {
        self.cache.inc();
    }

    /// It was compiled, or could not be.
    pub fn compiled(&self, well: bool) {
        if well {
            self.compiler.inc()
        } else {
            self.failed.inc()
        };
    }

    /// How many came from where.
    pub(super) fn counts(&self) -> [(&'static str, u64); 3] {
        [("cache", self.cache.get()), ("compiler", self.compiler.get()), ("failed", self.failed.get())]
    }
}

impl Handles {
    /// Of the reconciler with that name.
    pub(super) fn of(reconciler: &str) -> Self {
        // As client-go has them.
        let of_queue = || Histogram::new(exponential_buckets(1e-8, 10.0, 12));
        Self {
            reconciler: reconciler.to_owned(),
            calls: Arc::default(),
            results: array::from_fn(|_| Counter::default()),
            terminal: Counter::default(),
            panics: Counter::default(),
            reconcile_time: Histogram::new(RECONCILE_BUCKETS),
            queue_time: of_queue(),
            work_time: of_queue(),
            writes: Mutex::default(),
            watches: Mutex::default(),
            serving: Mutex::default(),
        }
    }

    /// This controller serves from now on: what is read when scraped is read from it.
    pub fn serve(&self, controller: &Arc<Controller>) {
        *lock(&self.serving) = Arc::downgrade(controller);
    }

    /// What serves now.
    pub(super) fn serving(&self) -> Option<Arc<Controller>> {
        lock(&self.serving).upgrade()
    }

    /// A reconcile has ended, after it was due for `waited`; None: in a panic. What it came to, by name.
    pub fn reconciled(&self, waited: Duration, took: Duration, next: Option<Next>) -> &'static str {
        self.queue_time.observe(waited.as_secs_f64());
        self.work_time.observe(took.as_secs_f64());
        self.reconcile_time.observe(took.as_secs_f64());
        let result = match next {
            Some(Next::OnChange | Next::Forget) => 0,
            None | Some(Next::Failed(_) | Next::Unstable | Next::Terminal) => 1,
            Some(Next::Again | Next::Immediately) => 2,
            Some(Next::After(_)) => 3,
        };
        self.results[result].inc();
        match next {
            None => drop(self.panics.inc()),
            Some(Next::Terminal) => drop(self.terminal.inc()),
            Some(_) => {}
        }
        RESULTS[result]
    }

    /// How many reconciles came to what.
    pub(super) fn by_result(&self) -> impl Iterator<Item = (&'static str, u64)> {
        RESULTS.into_iter().zip(self.results.iter().map(Counter::get))
    }

    /// How many reconciles failed.
    pub(super) fn errors(&self) -> u64 {
        self.results[1].get()
    }

    /// The API server has accepted a write.
    pub(super) fn wrote(&self, verb: &'static str, resource: String) {
        *lock(&self.writes).entry((verb, resource)).or_default() += 1;
    }

    /// The writes so far, by verb and resource.
    pub(super) fn writes(&self) -> BTreeMap<(&'static str, String), u64> {
        lock(&self.writes).clone()
    }

    /// A watch of this resource begins.
    pub(super) fn watch(&self, resource: &str) -> Arc<Heard> {
        let heard = Arc::<Heard>::default();
        lock(&self.watches).insert(resource.to_owned(), heard.clone());
        heard
    }

    /// How long the watch of this resource is silent. None: there was none yet.
    pub(super) fn watch_age(&self, resource: &str) -> Option<Duration> {
        lock(&self.watches).get(resource).map(|heard| lock(&heard.0).elapsed())
    }
}

/// When something was last heard of a watch.
pub(super) struct Heard(Mutex<Instant>);

impl Default for Heard {
    fn default() -> Self {
        Self(Mutex::new(Instant::now()))
    }
}

impl Heard {
    /// Something has come: an event or a bookmark.
    pub(super) fn now(&self) {
        *lock(&self.0) = Instant::now();
    }
}

/// The functions of a plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// `reconciler.describe`
    Describe,
    /// `relations.relate`
    Relate,
    /// `reconciler.reconcile`
    Reconcile,
    /// `finalizer.finalize`
    Finalize,
    /// `reconciler.reconcile`, for a preview.
    Preview,
}

impl Function {
    const ALL: [Self; 5] = [Self::Describe, Self::Relate, Self::Reconcile, Self::Finalize, Self::Preview];

    /// Its name in metrics: that in the contract, but for a preview.
    pub fn name(self) -> &'static str {
        match self {
            Self::Describe => "describe",
            Self::Relate => "relate",
            Self::Reconcile => "reconcile",
            Self::Finalize => "finalize",
            Self::Preview => "preview",
        }
    }
}

/// What one call took.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// Until the instance was there, or was not to be had.
    pub instantiate: Duration,
    /// In the guest. None: it was not entered.
    pub call: Option<Duration>,
    /// The most memory that the guest had, in bytes.
    pub memory: usize,
}

/// The calls of a plugin.
#[derive(Default)]
pub struct Calls {
    functions: [OfFunction; Function::ALL.len()],
    /// What it used, by capability and by what came of it.
    uses: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
}

/// The calls of one function.
pub(super) struct OfFunction {
    answered: Counter,
    retry: Counter,
    terminal: Counter,
    failed: [Counter; CallError::CATEGORIES.len()],
    pub(super) instantiate_time: Histogram,
    pub(super) call_time: Histogram,
    pub(super) memory: Histogram,
}

impl Default for OfFunction {
    fn default() -> Self {
        Self {
            answered: Counter::default(),
            retry: Counter::default(),
            terminal: Counter::default(),
            failed: array::from_fn(|_| Counter::default()),
            instantiate_time: Histogram::new(CALL_BUCKETS),
            call_time: Histogram::new(CALL_BUCKETS),
            // From 256 KiB to the 1 GiB that a limit can allow.
            memory: Histogram::new(exponential_buckets(262_144.0, 2.0, 13)),
        }
    }
}

impl Calls {
    /// A call has ended. `refusal` is the plugin's own, which is an answer, too. Without a usage nothing is known of it.
    pub fn note(&self, function: Function, outcome: Result<Option<&Failure>, &CallError>, usage: Option<Usage>) {
        let of = &self.functions[function as usize];
        let counter = match outcome {
            Ok(None) => &of.answered,
            Ok(Some(Failure::Retry(_) | Failure::RetryAfter(..))) => &of.retry,
            Ok(Some(Failure::Terminal(_))) => &of.terminal,
            Err(error) => &of.failed[error.place()],
        };
        counter.inc();
        let Some(usage) = usage else { return };
        of.instantiate_time.observe(usage.instantiate.as_secs_f64());
        if let Some(call) = usage.call {
            of.call_time.observe(call.as_secs_f64());
        }
        // Far below 2^52: no precision is lost.
        of.memory.observe(usage.memory as f64);
    }

    /// The plugin has used a capability.
    pub fn note_use(&self, capability: &'static str, outcome: &'static str) {
        *lock(&self.uses).entry((capability, outcome)).or_default() += 1;
    }

    /// How often it used what, and what came of it.
    pub(crate) fn uses(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        lock(&self.uses).clone()
    }

    /// The calls by function.
    pub(super) fn by_function(&self) -> impl Iterator<Item = (&'static str, &OfFunction)> {
        Function::ALL.iter().map(|function| function.name()).zip(&self.functions)
    }
}

impl OfFunction {
    /// How many calls came to what.
    pub(super) fn by_outcome(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let answers = [("ok", self.answered.get()), ("retry", self.retry.get()), ("terminal", self.terminal.get())];
        answers.into_iter().chain(CallError::CATEGORIES.into_iter().zip(self.failed.iter().map(Counter::get)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_of_a_reconcile_is_one_result_and_terminal_ones_and_panics_are_errors_too() {
        let handles = Handles::of("r");
        for next in [
            Some(Next::OnChange),
            Some(Next::Forget),
            Some(Next::After(Duration::ZERO)),
            Some(Next::Again),
            Some(Next::Immediately),
            Some(Next::Failed(None)),
            Some(Next::Terminal),
            None,
        ] {
            handles.reconciled(Duration::ZERO, Duration::ZERO, next);
        }
        let results: Vec<_> = handles.by_result().collect();
        assert_eq!(results, [("success", 2), ("error", 3), ("requeue", 2), ("requeue_after", 1)]);
        assert_eq!((handles.errors(), handles.terminal.get(), handles.panics.get()), (3, 1, 1));
    }

    #[test]
    fn each_outcome_of_a_call_has_its_own_count() {
        let calls = Calls::default();
        calls.note(Function::Reconcile, Ok(None), None);
        calls.note(Function::Reconcile, Ok(Some(&Failure::Retry(String::new()))), None);
        calls.note(Function::Finalize, Ok(Some(&Failure::Terminal(String::new()))), None);
        for error in [CallError::Deadline(Duration::ZERO), CallError::Memory(1), CallError::Host] {
            calls.note(Function::Reconcile, Err(&error), None);
        }
        let counted: Vec<_> = calls
            .by_function()
            .flat_map(|(function, of)| of.by_outcome().map(move |(outcome, count)| (function, outcome, count)))
            .filter(|(_, _, count)| *count > 0)
            .collect();
        let expected = [
            ("reconcile", "ok", 1),
            ("reconcile", "retry", 1),
            ("reconcile", "PluginDeadline", 1),
            ("reconcile", "PluginMemory", 1),
            ("reconcile", "HostError", 1),
            ("finalize", "terminal", 1),
        ];
        assert_eq!(counted, expected);
    }
}
