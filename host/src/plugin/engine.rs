//! The WebAssembly engine that all plugins share, and the threads that guest code runs on.
//!
//! Guests have threads of their own, so that one which computes for long delays neither watches nor writes. Their clock
//! is the epoch: a tick per millisecond while a call runs, after which a guest gives the others their turn. Most calls are over in their
//! first turn; one that is not goes on among its like, on other threads.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use tokio::{
    runtime::{self, Runtime},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use wasmtime::{Config, Enabled, InstanceAllocationStrategy, PoolingAllocationConfig};

use super::compile::{self, Compiled, Compiler};

/// Which engine it is.
pub const VERSION: &str = wasmtime_environ::VERSION;
/// How long a guest computes before another one gets its turn.
const TICK: Duration = Duration::from_millis(1);
/// How many ticks a call has before it first gives the others their turn; then it does at each.
pub(super) const FIRST_TURN: u32 = 5;
/// How many calls can run at once in the whole process; further ones fail to instantiate and are retried. It is above
/// what the reconcilers' `limits.concurrency` add up to in practice, and costs address space only.
const MAX_CALLS: u32 = 256;
/// The largest memory that a reconciler can allow a plugin.
pub const MAX_MEMORY: usize = 1 << 30;
/// Components of Go and JavaScript toolchains hold several core modules.
const MAX_CORE_INSTANCES: u32 = 50;
/// Memory that stays resident in a slot between calls, and is reset instead of unmapped: the working set of a call. Only cheap
/// where the kernel tells which pages were written (PAGEMAP_SCAN, Linux 6.7), else the reset would rewrite all of it.
const KEEP_MEMORY: usize = 4 << 20;
const KEEP_TABLES: usize = 1 << 20;
/// The memory of all guests together, unless the host is told otherwise: 16 calls that use the default of `limits.memory` to the full.
pub const GUEST_MEMORY: usize = 1 << 30;

/// See the module's documentation.
pub struct Engine {
    wasm: wasmtime::Engine,
    memory: Arc<GuestMemory>,
    guests: Guests,
    ticker: Ticker,
    /// None: plugins are compiled in this process.
    compiler: Option<Compiler>,
}

/// What all guests together have of the process's memory, in bytes.
pub(super) struct GuestMemory {
    pub(super) cap: usize,
    used: AtomicUsize,
}

impl GuestMemory {
    /// Takes more of it, if there is as much.
    pub(super) fn take(&self, more: usize) -> bool {
        let taken = |used: usize| used.checked_add(more).filter(|used| *used <= self.cap);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The threads that guests run on.
struct Guests {
    /// Where each call begins: one thread more than the calls of one plugin take, so that a plugin whose calls are all long keeps no other
    /// one waiting.
    first: Threads,
    /// Where those go on that are not over in their first turn.
    long: Threads,
}

/// Some only until it is dropped, from wherever that happens.
struct Threads(Option<Runtime>);

impl Threads {
    fn start(threads: usize) -> Result<Self, std::io::Error> {
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("guest")
            // New calls are looked for at each turn: those that run already may be endless.
            .global_queue_interval(1)
            .enable_time()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    async fn run<T: Send + 'static>(&self, call: impl Future<Output = T> + Send + 'static) -> Option<T> {
        // Aborted with its caller: an answer that nobody awaits is not worth computing.
        AbortOnDrop(self.0.as_ref()?.spawn(call)).await
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Waiting for the threads, as a runtime does when it is dropped, is not allowed in async code.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system grants no threads.
    #[error("failed to start the threads that run plugins")]
    Threads(#[source] std::io::Error),
    /// The operating system grants no address space, or the machine is not supported.
    #[error("failed to set up the WebAssembly engine; it reserves address space, so check `ulimit -v`")]
    Wasm(#[source] wasmtime::Error),
}

impl Engine {
    /// Reserves what calls will need: address space and threads, little memory. All guests together get `guest_memory` bytes.
    ///
    /// # Errors
    /// If the operating system grants too little.
    pub fn new(guest_memory: usize) -> Result<Self, Error> {
        let wasm = wasmtime::Engine::new(config().allocation_strategy(pool())).map_err(Error::Wasm)?;
        let guests = Threads::start(cores() + 1)
            .and_then(|first| Ok(Guests { first, long: Threads::start(cores())? }))
            .map_err(Error::Threads)?;
        let ticker = Ticker::start(wasm.weak()).map_err(Error::Threads)?;
        let memory = Arc::new(GuestMemory { cap: guest_memory, used: AtomicUsize::new(0) });
        Ok(Self { wasm, memory, guests, ticker, compiler: None })
    }

    /// The same, with a compiler that does not trust the plugins.
    #[must_use]
    pub fn with_compiler(self, compiler: Compiler) -> Self {
        Self { compiler: Some(compiler), ..self }
    }

    /// Machine code of the component of this digest, which a namespace or the cluster brings.
    pub(super) async fn compile(
        &self,
        namespace: Option<&str>,
        digest: &str,
        bytes: Vec<u8>,
    ) -> Result<Compiled, compile::Error> {
        if let Some(compiler) = &self.compiler {
            return compiler.compile(&self.wasm, namespace, digest, &bytes).await;
        }
        let wasm = self.wasm.clone();
        // It takes from milliseconds to seconds of CPU.
        compile::blocking(move || compile::compile_here(&wasm, &bytes)).await?
    }

    /// The engine itself.
    pub(super) fn wasm(&self) -> &wasmtime::Engine {
        &self.wasm
    }

    /// What all guests together have.
    pub(super) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// How many calls of one plugin can be in their first turn.
    #[must_use]
    pub fn turns() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(cores()))
    }

    /// Runs `call`, of the plugin that has these [`Self::turns`], on the guests' threads with the clock ticking. None: it panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        turns: &Arc<Semaphore>,
        call: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let turn = turns.clone().acquire_owned().await.ok()?;
        let running = self.ticker.hold();
        let call = async move {
            let _running = running;
            call.await
        };
        match self.guests.first.run(first_turn(Box::pin(call), turn)).await? {
            Ok(answer) => Some(answer),
            Err(unfinished) => self.guests.long.run(unfinished).await,
        }
    }
}

/// At least two: one that computes must not keep all others waiting.
fn cores() -> usize {
    thread::available_parallelism().map_or(2, |cores| cores.get().max(2))
}

/// Runs a call until it is over, or has computed for its first turn; then what is left of it. It has `turn` until it first waits.
async fn first_turn<F: Future>(call: Pin<Box<F>>, turn: OwnedSemaphorePermit) -> Result<F::Output, Pin<Box<F>>> {
    let (mut call, mut turn, mut computed) = (Some(call), Some(turn), Duration::ZERO);
    poll_fn(move |context| {
        let Some(running) = &mut call else { return Poll::Pending };
        let begun = Instant::now();
        if let Poll::Ready(answer) = running.as_mut().poll(context) {
            return Poll::Ready(Ok(answer));
        }
        drop(turn.take());
        computed += begun.elapsed();
        let is_long = computed >= TICK * FIRST_TURN;
        call.take_if(|_| is_long).map_or(Poll::Pending, |unfinished| Poll::Ready(Err(unfinished)))
    })
    .await
}

struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Future for AbortOnDrop<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        Pin::new(&mut self.0).poll(context).map(Result::ok)
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An engine that compiles for the others, and runs nothing.
pub(super) fn compiling_engine() -> Result<wasmtime::Engine, wasmtime::Error> {
    wasmtime::Engine::new(&config())
}

fn pool() -> InstanceAllocationStrategy {
    let resident = |bytes| if PoolingAllocationConfig::is_pagemap_scan_available() { bytes } else { 0 };
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(MAX_CALLS)
        .total_core_instances(MAX_CALLS * 4)
        .total_memories(MAX_CALLS * 2)
        .total_tables(MAX_CALLS * 4)
        .total_stacks(MAX_CALLS)
        .max_core_instances_per_component(MAX_CORE_INSTANCES)
        .max_memories_per_component(MAX_CORE_INSTANCES)
        .max_tables_per_component(MAX_CORE_INSTANCES)
        .max_memory_size(MAX_MEMORY)
        .pagemap_scan(Enabled::Auto)
        .linear_memory_keep_resident(resident(KEEP_MEMORY))
        .table_keep_resident(resident(KEEP_TABLES))
        .max_unused_warm_slots(16);
    InstanceAllocationStrategy::Pooling(pool)
}

fn config() -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        // Guests are called one at a time in a store of their own: the bookkeeping of concurrent tasks would cost a quarter of a call.
        .concurrency_support(false)
        .epoch_interruption(true)
        .memory_reservation(u64::try_from(MAX_MEMORY).unwrap_or(u64::MAX));
    config
}

/// Ticks while at least one call runs; parked otherwise, so that a quiet host uses no CPU.
struct Ticker {
    running: Arc<AtomicUsize>,
    thread: Thread,
}

/// A call that runs.
struct Running(Arc<AtomicUsize>);

impl Ticker {
    fn start(engine: wasmtime::EngineWeak) -> Result<Self, std::io::Error> {
        let running = Arc::new(AtomicUsize::new(0));
        let counter = Arc::downgrade(&running);
        let handle = thread::Builder::new().name("epoch".to_owned()).spawn(move || tick(&engine, &counter))?;
        Ok(Self { running, thread: handle.thread().clone() })
    }

    fn hold(&self) -> Running {
        if self.running.fetch_add(1, Ordering::SeqCst) == 0 {
            self.thread.unpark();
        }
        Running(self.running.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        // Lets the thread see that its counter is gone.
        self.running = Arc::default();
        self.thread.unpark();
    }
}

fn tick(engine: &wasmtime::EngineWeak, running: &Weak<AtomicUsize>) {
    loop {
        // Upgraded for a moment only: the thread ends with the engine.
        let Some(calls) = running.upgrade().map(|running| running.load(Ordering::SeqCst)) else { return };
        if calls == 0 {
            thread::park();
            continue;
        }
        let Some(engine) = engine.upgrade() else { return };
        engine.increment_epoch();
        drop(engine);
        thread::sleep(TICK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn c51_a_call_begins_at_once_however_many_others_compute() {
        let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
        let computed = Arc::new(AtomicUsize::new(0));
        // One who computes keeps its thread; it takes no processor here, so that nothing but the threads decides who waits.
        let spin = || {
            let computed = computed.clone();
            async move {
                loop {
                    thread::sleep(TICK * FIRST_TURN * 4);
                    computed.fetch_add(1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                }
            }
        };
        let theirs = Engine::turns();
        let spinners = [(); 8].map(|()| {
            let (engine, theirs, spin) = (engine.clone(), theirs.clone(), spin());
            tokio::spawn(async move { engine.run(&theirs, spin).await })
        });
        let ours = Engine::turns();
        // From when they begin until each has long gone on.
        let mut waited = Vec::new();
        while computed.load(Ordering::SeqCst) < 8 * 5 {
            let before = computed.load(Ordering::SeqCst);
            let (computed, begun) = (computed.clone(), Instant::now());
            let turns = engine.run(&ours, async move { computed.load(Ordering::SeqCst) - before }).await.unwrap();
            waited.push(turns);
            tokio::time::sleep((TICK * FIRST_TURN).saturating_sub(begun.elapsed())).await;
        }
        spinners.iter().for_each(tokio::task::JoinHandle::abort);
        waited.sort_unstable();
        assert!(waited.len() > 10, "{waited:?}");
        // One that had to wait for a thread would wait for one turn at least. A busy machine makes some seem so, never most.
        assert_eq!(waited[waited.len() / 2], 0, "turns of the others while a call waited: {waited:?}");
    }
}
