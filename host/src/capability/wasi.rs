//! WASI 0.2, for toolchains whose programs import it whether they use it or not: all of it is there, and none of it leads out of
//! the call. No files, environment, arguments or network; the standard streams go to the log; the wall clock stands still at `now`
//! of the request, so that the same request gives the same answer; the monotonic clock begins at zero.
//!
//! Only randomness is real, since what takes it for secrets must not get what can be guessed. `wasi:http` is not here: a plugin
//! that imports it means to reach somebody, and is refused by the name of the import.

use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use wasmtime::component::{Linker, ResourceTable};
use wasmtime_wasi::{
    Deterministic, HostWallClock, I32Exit, WasiCtx, WasiCtxView, WasiView, async_trait,
    cli::{IsTerminal, StdoutStream},
    p2::{OutputStream, Pollable, StreamResult},
};

use super::log::{LogContext, Stream};
use crate::plugin::CallState;

/// The packages of WASI with what is linked of them, of any 0.2: a patch version only adds.
const SERVED: [(&str, &[&str]); 6] = [
    (
        "cli",
        &[
            "environment",
            "exit",
            "stderr",
            "stdin",
            "stdout",
            "terminal-input",
            "terminal-output",
            "terminal-stderr",
            "terminal-stdin",
            "terminal-stdout",
        ],
    ),
    ("clocks", &["monotonic-clock", "wall-clock"]),
    ("filesystem", &["preopens", "types"]),
    ("io", &["error", "poll", "streams"]),
    ("random", &["insecure", "insecure-seed", "random"]),
    (
        "sockets",
        &["instance-network", "ip-name-lookup", "network", "tcp", "tcp-create-socket", "udp", "udp-create-socket"],
    ),
];
/// Most objects of the host (streams, pollables, errors) that a call can hold at once. Toolchains hold ten at rest.
const MAX_RESOURCES: usize = 1_000;
/// Most random bytes at once: the host makes them before the guest has the memory for them. Hash seeds and keys take 64.
const MAX_RANDOM: u64 = 64 << 10;
/// What the guest can write to a stream at once without asking again.
const WRITE_AT_ONCE: usize = 4 << 10;
/// What `insecure` answers with, again and again. Not one byte only: code that looks for two values which differ would never end.
const INSECURE: [u8; 8] = [0x9e, 0x37, 0x79, 0xb9, 0x7f, 0x4a, 0x7c, 0x15];

/// What a call has of WASI. It is built when the guest first asks for something, since most guests never do.
pub(crate) struct Wasi {
    /// `context` of the request.
    context: String,
    built: Option<Box<(WasiCtx, ResourceTable)>>,
}

/// Whether a plugin may import an interface of this name.
pub(super) fn serves(import: &str) -> bool {
    SERVED.iter().any(|(package, interfaces)| {
        let interface = import.strip_prefix("wasi:").and_then(|name| name.strip_prefix(package)?.strip_prefix('/'));
        let named = interface.and_then(|interface| interface.split_once("@0.2."));
        named.is_some_and(|(interface, _)| interfaces.contains(&interface))
    })
}

/// Makes all of it importable.
pub(super) fn add_to_linker(linker: &mut Linker<CallState>) -> Result<(), wasmtime::Error> {
    wasmtime_wasi::p2::add_to_linker_async(linker)
}

/// The exit code with which a guest has ended itself.
pub(crate) fn exit_code(error: &wasmtime::Error) -> Option<i32> {
    error.downcast_ref::<I32Exit>().map(|exit| exit.0)
}

impl Wasi {
    /// That of a call whose request has this `context`.
    pub(crate) fn new(context: String) -> Self {
        Self { context, built: None }
    }

    fn build(context: &str, log: &LogContext) -> (WasiCtx, ResourceTable) {
        let stream = |stream| Output { log: log.clone(), stream };
        let ctx = WasiCtx::builder()
            .stdout(stream(Stream::Stdout))
            .stderr(stream(Stream::Stderr))
            .wall_clock(Standing { at: now(context) })
            .insecure_random(Deterministic::new(INSECURE.to_vec()))
            .insecure_random_seed(u64::from_le_bytes(INSECURE).into())
            .max_random_size(MAX_RANDOM)
            // These are the defaults of today, and must be those of tomorrow.
            .allow_tcp(false)
            .allow_udp(false)
            .allow_ip_name_lookup(false)
            .build();
        let mut table = ResourceTable::new();
        table.set_max_capacity(MAX_RESOURCES);
        (ctx, table)
    }
}

impl WasiView for CallState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let Wasi { context, built } = &mut self.wasi;
        let (ctx, table) = &mut **built.get_or_insert_with(|| Box::new(Wasi::build(context, &self.log)));
        WasiCtxView { ctx, table }
    }
}

/// The time of the call as the request tells it; what is asked without a request is asked in 1970.
fn now(context: &str) -> Duration {
    #[derive(Deserialize)]
    struct Context {
        now: jiff::Timestamp,
    }
    let now = serde_json::from_str::<Context>(context).map(|context| context.now.as_duration());
    now.ok().and_then(|now| Duration::try_from(now).ok()).unwrap_or_default()
}

/// A wall clock that stands still.
struct Standing {
    at: Duration,
}

impl HostWallClock for Standing {
    fn resolution(&self) -> Duration {
        // That of `now` in the request.
        Duration::from_secs(1)
    }

    fn now(&self) -> Duration {
        self.at
    }
}

/// A standard stream that goes to the log.
#[derive(Clone)]
struct Output {
    log: LogContext,
    stream: Stream,
}

impl IsTerminal for Output {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for Output {
    fn async_stream(&self) -> Box<dyn tokio::io::AsyncWrite + Send + Sync> {
        // What WASI 0.3 would write to.
        Box::new(tokio::io::sink())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

impl OutputStream for Output {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.log.print(self.stream, &bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(WRITE_AT_ONCE)
    }
}

#[async_trait]
impl Pollable for Output {
    async fn ready(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_0_2_of_what_is_linked_is_served_and_nothing_else() {
        for import in ["wasi:cli/stdout@0.2.0", "wasi:io/poll@0.2.99", "wasi:sockets/tcp-create-socket@0.2.6"] {
            assert!(serves(import), "{import}");
        }
        for import in [
            "wasi:http/types@0.2.0",
            "wasi:http/outgoing-handler@0.2.6",
            "wasi:cli/run@0.2.0",
            "wasi:cli/stdout@0.3.0",
            "wasi:clocks/timezone@0.2.0",
            "wasi:clicks/stdout@0.2.0",
            "wasi:cli@0.2.0",
        ] {
            assert!(!serves(import), "{import}");
        }
    }

    #[test]
    fn the_clock_of_a_call_is_that_of_its_request() {
        assert_eq!(now(r#"{"now":"2026-03-01T00:00:01Z","attempt":0}"#), Duration::from_secs(1_772_323_201));
        for none in ["", "{}", r#"{"now":"1960-01-01T00:00:00Z"}"#] {
            assert_eq!(now(none), Duration::ZERO);
        }
    }
}
