//! From a component to machine code, once: in a child process of this very program, and kept on disk for the next time.
//!
//! A compiler that is handed what somebody made to hurt it takes as long, and as much memory, as it is allowed. So it runs outside of
//! the host, as the command [`Options`], one at a time, with limits that the kernel holds, no environment, and no descriptor but its
//! input, its output and what it complains to. Namespaces take turns, so that one with many plugins does not keep the others waiting.

use std::{
    collections::HashMap,
    fs::File,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{self, Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::process::ExitStatusExt as _},
    process::{ExitCode, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::{Resource, Rlimit, Signal, nice, set_parent_process_death_signal, setrlimit},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::Command,
    sync::OwnedMutexGuard,
};
use wasmtime::component::Component;

use super::engine::compiling_engine;
use crate::{cache::Cache, metrics::Compilations, telemetry};

/// The hidden command that compiles.
const COMMAND: &str = "compile-component";
/// Memory of the compiler. What JavaScript toolchains make of a small plugin passes at 600 MiB, and fails at 400.
const MEMORY: u64 = 1 << 30;
/// The largest result. That of a component of 18 MB from Python has 60.
const OUTPUT: u64 = 512 << 20;
/// How much of its complaint is read.
const COMPLAINT: u64 = 64 << 10;
/// Below everything that serves somebody.
const NICE: i32 = 5;
/// How long a component that met a limit is not tried again: doubles from the first to the last.
const AGAIN: (Duration, Duration) = (Duration::from_mins(1), Duration::from_hours(1));

/// How long compiling may take, unless the host is told otherwise.
pub const TIMEOUT: Duration = Duration::from_mins(2);

/// Why there is no machine code.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is no WebAssembly, or broken.
    #[error("failed to compile the plugin; it must be a WebAssembly component")]
    Invalid(#[source] wasmtime::Error),
    /// It takes too long.
    #[error("compiling the plugin takes more than {0:?} (--compile-timeout); make it smaller, or raise the limit")]
    Timeout(Duration),
    /// It takes too much memory, or its result is too large.
    #[error("compiling the plugin takes more memory than {} MiB; make it smaller", MEMORY >> 20)]
    Memory,
    /// The compiler did not start, or its result cannot be used.
    #[error("the compiler of plugins failed")]
    Compiler(#[source] io::Error),
    /// A bug of the host, or of the compiler.
    #[error("the compiler of plugins ended by a bug; please report it: {0}")]
    Bug(String),
}

/// Machine code, ready to be linked.
pub(super) struct Compiled {
    pub(super) component: Component,
    /// What it was loaded from: the entry stays in the cache as long as this is open.
    pub(super) file: Option<File>,
}

/// See the module's documentation.
pub struct Compiler {
    cache: Option<Arc<Cache>>,
    timeout: Duration,
    turns: Turns,
    /// By digest: what met a limit, and when it may be tried again.
    refused: Mutex<HashMap<String, Refusal>>,
    counts: Arc<Compilations>,
}

#[derive(Clone, Copy)]
struct Refusal {
    limit: Limit,
    until: Instant,
    wait: Duration,
}

/// A limit that a component met.
#[derive(Clone, Copy)]
enum Limit {
    Time,
    Memory,
}

impl Compiler {
    /// One that lets its child take so long, and keeps what comes of it in `cache`.
    pub fn new(cache: Option<Arc<Cache>>, timeout: Duration, counts: Arc<Compilations>) -> Self {
        Self { cache, timeout, turns: Turns::default(), refused: Mutex::default(), counts }
    }

    /// What becomes of the component of this digest, which a namespace or the cluster brings: from the cache, or compiled.
    pub(super) async fn compile(
        &self,
        engine: &wasmtime::Engine,
        namespace: Option<&str>,
        digest: &str,
        bytes: &[u8],
    ) -> Result<Compiled, Error> {
        if let Some(found) = self.find(engine, digest).await {
            return Ok(found);
        }
        let _turn = self.turns.next(namespace).await;
        // Another reconciler may have brought it in the meantime.
        if let Some(found) = self.find(engine, digest).await {
            return Ok(found);
        }
        self.check_refused(digest)?;
        let begun = Instant::now();
        let compiled = run(bytes, self.timeout).await;
        self.counts.compiled(compiled.is_ok());
        self.remember(digest, compiled.as_ref().err());
        let artifact = compiled?;
        tracing::info!(digest, milliseconds = begun.elapsed().as_millis(), "compiled the plugin");
        let (engine, shelf, namespace, digest) =
            (engine.clone(), shelf(engine), namespace.map(str::to_owned), digest.to_owned());
        let cache = self.cache.clone();
        blocking(move || {
            let mut artifact = artifact;
            let kept = cache.and_then(|cache| match cache.keep(&shelf, namespace.as_deref(), &digest, &mut artifact) {
                Ok(()) => cache.find(&shelf, &digest),
                Err(error) => {
                    tracing::warn!(digest, "a restart will compile the plugin again: {}", telemetry::chain(&error));
                    None
                }
            });
            load(&engine, kept.unwrap_or(artifact)).map_err(|error| Error::Bug(format!("{error:#}")))
        })
        .await?
    }

    async fn find(&self, engine: &wasmtime::Engine, digest: &str) -> Option<Compiled> {
        let cache = self.cache.clone()?;
        let (engine, digest) = (engine.clone(), digest.to_owned());
        let found = blocking(move || {
            let file = cache.find(&shelf(&engine), &digest)?;
            load(&engine, file)
                .inspect_err(|error| tracing::warn!(digest, "what is kept of the plugin is compiled anew: {error:#}"))
                .ok()
        });
        let found = found.await.ok()??;
        self.counts.found();
        Some(found)
    }

    fn check_refused(&self, digest: &str) -> Result<(), Error> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        match refused.get(digest).filter(|refusal| Instant::now() < refusal.until).map(|refusal| refusal.limit) {
            Some(Limit::Time) => Err(Error::Timeout(self.timeout)),
            Some(Limit::Memory) => Err(Error::Memory),
            None => Ok(()),
        }
    }

    fn remember(&self, digest: &str, error: Option<&Error>) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = match error {
            Some(Error::Timeout(_)) => Limit::Time,
            Some(Error::Memory) => Limit::Memory,
            _ => {
                refused.remove(digest);
                return;
            }
        };
        let wait = refused.get(digest).map_or(AGAIN.0, |before| (before.wait * 2).min(AGAIN.1));
        let now = Instant::now();
        // Those that nobody asks for any more.
        refused.retain(|_, refusal| now < refusal.until + AGAIN.1);
        refused.insert(digest.to_owned(), Refusal { limit, until: now + wait, wait });
    }
}

/// Whose turn it is: one at a time, and each namespace waits with one of its plugins at a time, so that they take turns.
#[derive(Default)]
struct Turns {
    all: Arc<tokio::sync::Mutex<()>>,
    by_namespace: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

impl Turns {
    async fn next(&self, namespace: Option<&str>) -> [OwnedMutexGuard<()>; 2] {
        let own = {
            let mut namespaces = self.by_namespace.lock().unwrap_or_else(PoisonError::into_inner);
            namespaces.retain(|_, own| Arc::strong_count(own) > 1);
            namespaces.entry(namespace.unwrap_or_default().to_owned()).or_default().clone()
        };
        let own = own.lock_owned().await;
        [self.all.clone().lock_owned().await, own]
    }
}

/// Where the cache keeps what this engine can load.
fn shelf(engine: &wasmtime::Engine) -> String {
    format!("compiled-{:016x}", compatibility(engine))
}

/// Equal for engines that can load what the other one has compiled.
fn compatibility(engine: &wasmtime::Engine) -> u64 {
    let mut hasher = DefaultHasher::new();
    engine.precompile_compatibility_hash().hash(&mut hasher);
    hasher.finish()
}

/// Loads from the very file that was checked: mapped, not read, so that the code of idle plugins needs no memory of their own.
fn load(engine: &wasmtime::Engine, file: File) -> Result<Compiled, wasmtime::Error> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    #[expect(unsafe_code, reason = "the compiler made it, and its checksum says that it is what the compiler made")]
    // SAFETY: it comes from our child, or from the cache, whose entries are of our child and checked by their SHA-256. The folder is
    // open to nobody else, and its files are never changed in place, but replaced.
    let component = unsafe { Component::deserialize_file(engine, path)? };
    Ok(Compiled { component, file: Some(file) })
}

/// In this process: for the tools of a person who brings the plugin.
pub(super) fn compile_here(engine: &wasmtime::Engine, bytes: &[u8]) -> Result<Compiled, Error> {
    let component = Component::from_binary(engine, bytes).map_err(Error::Invalid)?;
    Ok(Compiled { component, file: None })
}

pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::Bug(error.to_string()))
}

/// Lets a child compile. What it makes is in memory only.
async fn run(bytes: &[u8], timeout: Duration) -> Result<File, Error> {
    let artifact = memfd_create("component", MemfdFlags::CLOEXEC).map_err(io::Error::from).map_err(Error::Compiler)?;
    let artifact = File::from(artifact);
    // This program, also when its file was replaced since.
    let mut child = Command::new("/proc/self/exe")
        .args([COMMAND, "--cpu-seconds", &cpu_seconds(timeout).to_string()])
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(artifact.try_clone().map_err(Error::Compiler)?)
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(Error::Compiler)?;
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    let feed = async {
        if let Some(mut stdin) = stdin {
            // If it does not read on, it has ended, and says why.
            let _ = stdin.write_all(bytes).await;
        }
    };
    let listen = async {
        let mut complaint = Vec::new();
        if let Some(stderr) = stderr {
            let _ = stderr.take(COMPLAINT).read_to_end(&mut complaint).await;
        }
        String::from_utf8_lossy(&complaint).trim().to_owned()
    };
    let ended = async {
        let ((), complaint) = tokio::join!(feed, listen);
        (child.wait().await, complaint)
    };
    // Dropping the child kills it.
    let (status, complaint) = tokio::time::timeout(timeout, ended).await.map_err(|_| Error::Timeout(timeout))?;
    verdict(status.map_err(Error::Compiler)?, complaint, timeout)?;
    Ok(artifact)
}

/// What the end of a child means.
fn verdict(status: ExitStatus, complaint: String, timeout: Duration) -> Result<(), Error> {
    match (status.code(), status.signal().and_then(Signal::from_named_raw)) {
        (Some(0), _) => Ok(()),
        (Some(1), _) => Err(Error::Invalid(wasmtime::Error::msg(complaint))),
        (_, Some(Signal::XCPU)) => Err(Error::Timeout(timeout)),
        // An allocation that is refused ends a Rust program so; a result that is too large by the other signal.
        (_, Some(Signal::ABORT)) if complaint.contains("memory allocation") => Err(Error::Memory),
        (_, Some(Signal::XFSZ)) => Err(Error::Memory),
        // Nobody but a kernel that is out of memory.
        (_, Some(Signal::KILL)) => Err(Error::Memory),
        _ => Err(Error::Bug(format!("{status}: {complaint}"))),
    }
}

/// For all of its threads together: what is left to a child whose host is gone.
fn cpu_seconds(timeout: Duration) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, |cores| u64::try_from(cores.get()).unwrap_or(1));
    timeout.as_secs().saturating_add(1).saturating_mul(cores)
}

/// The command that compiles its standard input to its standard output.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// How much time of all processors it may take.
    #[arg(long, value_name = "SECONDS")]
    cpu_seconds: u64,
    /// How much memory it may take, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = MEMORY)]
    memory: u64,
}

/// Does what [`Options`] says; what is wrong with the component goes to standard error.
pub fn command(options: &Options) -> ExitCode {
    let compiled = limit(options).map_err(wasmtime::Error::from).and_then(|()| {
        let mut bytes = Vec::new();
        io::stdin().lock().read_to_end(&mut bytes)?;
        let artifact = compiling_engine()?.precompile_component(&bytes)?;
        io::stdout().lock().write_all(&artifact)?;
        Ok(())
    });
    match compiled {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = write!(io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Takes from this process what it must not need.
fn limit(options: &Options) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let most = |most| Rlimit { current: Some(most), maximum: Some(most) };
    // The first one is told apart from other ends; the second one cannot be ignored.
    let seconds = options.cpu_seconds;
    setrlimit(Resource::Cpu, Rlimit { current: Some(seconds), maximum: Some(seconds.saturating_add(1)) })?;
    setrlimit(Resource::Data, most(options.memory))?;
    setrlimit(Resource::Fsize, most(OUTPUT))?;
    setrlimit(Resource::Core, most(0))?;
    nice(NICE)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::{Engine, GUEST_MEMORY};

    #[test]
    fn the_child_compiles_for_the_engine_of_the_host() {
        let host = Engine::new(GUEST_MEMORY).unwrap();
        assert_eq!(compatibility(host.wasm()), compatibility(&compiling_engine().unwrap()));
        let artifact = compiling_engine().unwrap().precompile_component(b"\0asm\x0d\0\x01\0").unwrap();
        let mut file = File::from(memfd_create("component", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(&artifact).unwrap();
        load(host.wasm(), file).unwrap();
    }

    #[test]
    fn the_end_of_a_child_says_what_was_wrong() {
        let category = |raw, complaint: &str| match verdict(ExitStatus::from_raw(raw), complaint.to_owned(), TIMEOUT) {
            Ok(()) => "ok",
            Err(Error::Invalid(_)) => "invalid",
            Err(Error::Timeout(_)) => "timeout",
            Err(Error::Memory) => "memory",
            Err(Error::Compiler(_) | Error::Bug(_)) => "bug",
        };
        let exit = |code: i32| code << 8;
        assert_eq!(category(exit(0), ""), "ok");
        assert_eq!(category(exit(1), "unexpected end"), "invalid");
        assert_eq!(category(Signal::XCPU.as_raw(), ""), "timeout");
        assert_eq!(category(Signal::ABORT.as_raw(), "memory allocation of 8 bytes failed"), "memory");
        assert_eq!(category(Signal::XFSZ.as_raw(), ""), "memory");
        assert_eq!(category(Signal::KILL.as_raw(), ""), "memory");
        assert_eq!(category(Signal::ABORT.as_raw(), "assertion failed"), "bug");
        assert_eq!(category(Signal::SEGV.as_raw(), ""), "bug");
        assert_eq!(category(exit(101), "panicked at"), "bug");
    }

    #[tokio::test]
    async fn namespaces_take_turns() {
        let turns = Arc::new(Turns::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let held = turns.next(None).await;
        let mut waiting = Vec::new();
        for namespace in ["a", "a", "a", "b", "c"] {
            let (turns, order) = (turns.clone(), order.clone());
            waiting.push(tokio::spawn(async move {
                let _turn = turns.next(Some(namespace)).await;
                order.lock().unwrap().push(namespace);
                tokio::task::yield_now().await;
            }));
            tokio::task::yield_now().await;
        }
        drop(held);
        for waiting in waiting {
            waiting.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), ["a", "b", "c", "a", "a"]);
    }

    #[test]
    fn what_met_a_limit_is_not_tried_again_at_once_and_each_time_later() {
        let compiler = Compiler::new(None, TIMEOUT, Arc::default());
        compiler.check_refused("digest").unwrap();
        compiler.remember("digest", Some(&Error::Memory));
        assert!(matches!(compiler.check_refused("digest"), Err(Error::Memory)));
        compiler.check_refused("other").unwrap();
        let wait = || compiler.refused.lock().unwrap()["digest"].wait;
        assert_eq!(wait(), AGAIN.0);
        for _ in 0..10 {
            compiler.remember("digest", Some(&Error::Timeout(TIMEOUT)));
        }
        assert_eq!(wait(), AGAIN.1);
        assert!(matches!(compiler.check_refused("digest"), Err(Error::Timeout(_))));
        compiler.remember("digest", None);
        compiler.check_refused("digest").unwrap();
    }
}
