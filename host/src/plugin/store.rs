//! What one call of a plugin runs in: a fresh store with its limits, thrown away afterwards.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use wasmtime::{ResourceLimiter, Store, UpdateDeadline};

use super::engine::{Engine, FIRST_TURN, GuestMemory};
use crate::capability::{
    access::Outside,
    log::{LogContext, LogRate},
    wasi::Wasi,
};

/// What one call may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallLimits {
    /// Memory, in bytes.
    pub memory: usize,
    /// Time, waiting included.
    pub timeout: Duration,
    /// Size of the answer, in bytes.
    pub output: usize,
}

/// A table of function pointers as large toolchains make it has a few thousand entries.
const MAX_TABLE_ELEMENTS: usize = 100_000;
/// Most handles of resources, its own included, that a guest can hold at once: the host keeps a table of them. Toolchains hold ten.
const MAX_HANDLES: usize = 10_000;

/// What the host keeps for a call.
pub(crate) struct CallState {
    pub(crate) log: LogContext,
    pub(crate) wasi: Wasi,
    pub(crate) outside: Outside,
    limiter: Limiter,
}

struct Limiter {
    limit: usize,
    used: usize,
    refused: Option<Refused>,
    /// That of all guests, of which `used` is a part.
    shared: Arc<GuestMemory>,
}

/// Which limit a guest met when it wanted more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Its own.
    Own,
    /// That of all guests together.
    Shared,
}

impl Drop for Limiter {
    fn drop(&mut self) {
        self.shared.give_back(self.used);
    }
}

impl CallState {
    /// Whether the guest was refused memory, which is what its trap then comes from.
    pub(super) fn memory_refused(&self) -> Option<Refused> {
        self.limiter.refused
    }

    /// The memory of all guests together.
    pub(super) fn guest_memory(&self) -> usize {
        self.limiter.shared.cap
    }

    /// The most memory that the guest had: it can only grow.
    pub(super) fn memory_used(&self) -> usize {
        self.limiter.used
    }
}

/// A store for one call, whose request has this `context`, and which may reach what is `outside`; its time begins now.
pub(super) fn new_store(
    engine: &Engine,
    limits: CallLimits,
    context: String,
    log_rate: Arc<LogRate>,
    outside: Outside,
) -> Store<CallState> {
    let limiter = Limiter { limit: limits.memory, used: 0, refused: None, shared: engine.memory().clone() };
    let state = CallState { log: LogContext::new(log_rate), wasi: Wasi::new(context), outside, limiter };
    let mut store = Store::new(engine.wasm(), state);
    store.limiter(|state| &mut state.limiter);
    store.set_hostcall_fuel(limits.output);
    store.set_max_component_handles(MAX_HANDLES);
    store.set_epoch_deadline(FIRST_TURN.into());
    let end = Instant::now() + limits.timeout;
    store.epoch_deadline_callback(move |_| {
        Ok(if Instant::now() < end { UpdateDeadline::Yield(1) } else { UpdateDeadline::Interrupt })
    });
    store
}

impl ResourceLimiter for Limiter {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> Result<bool, wasmtime::Error> {
        // All memories of a component together.
        let more = desired.saturating_sub(current);
        if more > self.limit - self.used {
            self.refused = Some(Refused::Own);
            return Ok(false);
        }
        if !self.shared.take(more) {
            self.refused = Some(Refused::Shared);
            return Ok(false);
        }
        self.used += more;
        Ok(true)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> Result<bool, wasmtime::Error> {
        Ok(desired <= MAX_TABLE_ELEMENTS)
    }
}
