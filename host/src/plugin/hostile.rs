//! Guests that nobody should write: each is held by its limits, told by its category, and leaves the engine as it was.
//!
//! They are core modules as text, made into components of the real contract. One that behaves comes first: what the others do is the
//! difference to it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Answer, CallError, CallLimits, Engine, Failure, GUEST_MEMORY, LoadError, Plugin, Request, none_related,
    wat::{self, escaped},
};
use crate::telemetry;

pub(super) const LIMITS: CallLimits =
    CallLimits { memory: 4 << 20, timeout: Duration::from_millis(300), output: 64 << 10 };

/// Where the texts of a guest are: far from its answer, which begins at 1024, and from what it allocates.
const TEXTS: usize = 2048;
const DESCRIPTION: &str =
    r#"{"parent":{"apiVersion":"t.example/v1","kind":"Widget"},"children":[{"apiVersion":"v1","kind":"ConfigMap"}]}"#;
/// Before the number of MB, in the output.
const PEAK: &str = "peak of memory in MB: ";
const CHILD: &str = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}"#;

/// A guest in parts.
pub(super) struct Guest {
    /// What it imports of the host.
    imports: &'static str,
    /// The child that it answers with, as bytes.
    child: Vec<u8>,
    /// What `reconcile` does before it answers.
    before: &'static str,
    /// How many children it says that there are; there is one in memory.
    children: u32,
    /// Which case of `result` it answers with.
    case: u32,
    /// More of the module, such as a start function.
    more: &'static str,
    /// Pages of memory that it begins with.
    pages: u32,
}

impl Default for Guest {
    fn default() -> Self {
        let child = CHILD.as_bytes().to_vec();
        Self { imports: "", child, before: "", children: 1, case: 0, more: "", pages: 1 }
    }
}

/// As much of WASI as the guests here import, and an interface of their own that has a resource.
const WASI: &str = r#"
package wasi:io@0.2.0 {
    interface poll { resource pollable { block: func(); } }
    interface error { resource error; }
    interface streams {
        use error.{error};
        variant stream-error { last-operation-failed(error), closed }
        resource output-stream { write: func(contents: list<u8>) -> result<_, stream-error>; }
    }
}
package wasi:clocks@0.2.0 {
    interface monotonic-clock {
        use wasi:io/poll@0.2.0.{pollable};
        subscribe-duration: func(when: u64) -> pollable;
    }
    interface wall-clock {
        record datetime { seconds: u64, nanoseconds: u32 }
        now: func() -> datetime;
    }
}
package wasi:random@0.2.0 { interface random { get-random-bytes: func(len: u64) -> list<u8>; } }
package wasi:cli@0.2.0 {
    interface exit { exit: func(status: result); }
    interface stdout {
        use wasi:io/streams@0.2.0.{output-stream};
        get-stdout: func() -> output-stream;
    }
}
package wasi:http@0.2.0 { interface types { http-error-code: func() -> u32; } }
package guest:things@1.0.0 { interface things { resource thing { constructor(); } } }
"#;

impl Guest {
    /// One that answers with this child, and does that before it does.
    pub(super) fn new(child: Vec<u8>, before: &'static str) -> Self {
        Self { child, before, ..Self::default() }
    }

    /// The answer of the contract, as the canonical ABI lays it out: `result`, then `desired`, whose list of children is at 1100.
    fn wat(&self, package: &str) -> String {
        let Self { imports, child, before, children, case, more, pages } = self;
        let child_at = TEXTS + DESCRIPTION.len();
        let options_at = child_at + child.len();
        format!(
            r#"(module
  {imports}
  (memory (export "memory") {pages})
  (global $top (mut i32) (i32.const 32768))
  (data (i32.const {TEXTS}) "{description}{child_text}{{}}")
  (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
    (global.get $top)
    (global.set $top (i32.and (i32.add (i32.add (global.get $top) (local.get 3)) (i32.const 7)) (i32.const -8))))
  (func (export "{package}/reconciler@0.1.0#describe") (result i32)
    (i32.store (i32.const 1000) (i32.const {TEXTS}))
    (i32.store (i32.const 1004) (i32.const {description_length}))
    (i32.const 1000))
  (func $recurse (param i32) (result i32) (i32.add (call $recurse (i32.add (local.get 0) (i32.const 1))) (local.get 0)))
  (func $reconcile (export "{package}/reconciler@0.1.0#reconcile")
    (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)
    {before}
    (i32.store8 (i32.const 1024) (i32.const {case}))
    (i32.store (i32.const 1028) (i32.const 1100))
    (i32.store (i32.const 1032) (i32.const {children}))
    (i32.store (i32.const 1100) (i32.const {child_at}))
    (i32.store (i32.const 1104) (i32.const {child_length}))
    (i32.store (i32.const 1108) (i32.const {options_at}))
    (i32.store (i32.const 1112) (i32.const 2))
    (i32.store (i32.const 1072) (i32.const {options_at}))
    (i32.store (i32.const 1076) (i32.const 2))
    (i32.const 1024))
  {more})"#,
            description = escaped(DESCRIPTION.as_bytes()),
            child_text = escaped(child),
            description_length = DESCRIPTION.len(),
            child_length = child.len(),
        )
    }

    pub(super) fn component(&self) -> Vec<u8> {
        self.component_of(&wat::contract("wit/0.1.0"), "export reconciler;")
    }

    fn component_of(&self, contract: &str, world: &str) -> Vec<u8> {
        wat::component(&self.wat("pilothouse:plugin"), contract, world)
    }

    /// One that imports interfaces of WASI, and what else its world has.
    fn with_wasi(&self, world: &str) -> Vec<u8> {
        self.component_of(&(wat::contract("wit/0.1.0") + WASI), &format!("export reconciler; {world}"))
    }
}

/// One that logs before it answers.
fn logs() -> Guest {
    Guest {
        imports: r#"(import "pilothouse:plugin/log@0.1.0" "write" (func $log (param i32 i32 i32 i32 i32)))"#,
        before: "(call $log (i32.const 2) (i32.const 2048) (i32.const 8) (i32.const 0) (i32.const 0))",
        ..Guest::default()
    }
}

async fn load(engine: &Arc<Engine>, bytes: Vec<u8>) -> Result<Plugin, LoadError> {
    Plugin::load(engine, None, bytes, LIMITS, Arc::default()).await
}

pub(super) fn request() -> Request {
    let empty = || "{}".to_owned();
    Request { parent: empty(), config: empty(), context: empty(), ..Request::default() }
}

async fn ask(engine: &Arc<Engine>, guest: Guest) -> Result<Result<Answer, Failure>, CallError> {
    // What is to be answered has to be in its memory.
    let limits = CallLimits { memory: LIMITS.memory.max(guest.pages as usize * 65_536), ..LIMITS };
    let plugin = Plugin::load(engine, None, guest.component(), limits, Arc::default()).await.unwrap();
    plugin.reconcile(request(), none_related, limits).await
}

/// The most memory that this process ever had, in MB.
fn peak_of_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB")).unwrap();
    peak.trim().parse::<usize>().unwrap() / 1000
}

#[tokio::test]
async fn one_that_behaves_is_answered_and_what_is_wrong_with_an_answer_is_found_when_it_is_read() {
    let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
    let answer = ask(&engine, Guest::default()).await.unwrap().unwrap();
    assert_eq!((answer.children.len(), answer.children[0].object.as_str()), (1, CHILD));
    // Texts that are no JSON, or too deep, are the plugin's answer all the same: `desired` refuses them by path.
    for child in ["{", &"[".repeat(10_000)] {
        let answer = ask(&engine, Guest { child: child.into(), ..Guest::default() }).await.unwrap().unwrap();
        assert_eq!(answer.children[0].object, child);
    }
}

#[tokio::test]
async fn each_that_does_harm_is_ended_by_its_limit_and_the_next_one_is_answered() {
    let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
    for (what, guest, category) in [
        ("computes for ever", Guest { before: "(loop $on (br $on))", ..Guest::default() }, "PluginDeadline"),
        (
            "recurses for ever",
            Guest { before: "(drop (call $recurse (i32.const 0)))", ..Guest::default() },
            "PluginTrap",
        ),
        ("gives up half-way", Guest { before: "(unreachable)", ..Guest::default() }, "PluginTrap"),
        (
            "takes all memory",
            Guest {
                before: "(loop $on (br_if $on (i32.ne (memory.grow (i32.const 16)) (i32.const -1)))) (unreachable)",
                ..Guest::default()
            },
            "PluginMemory",
        ),
        ("answers outside its memory", Guest { children: 1_000_000, ..Guest::default() }, "PluginAnswerUndecodable"),
        (
            "answers with a million children",
            Guest { children: 1_000_000, pages: 260, ..Guest::default() },
            "PluginAnswerUndecodable",
        ),
        (
            "answers more than limits.output",
            Guest { child: vec![b'x'; 70_000], pages: 2, ..Guest::default() },
            "PluginAnswerUndecodable",
        ),
        ("answers no UTF-8", Guest { child: vec![0xff, 0xfe], ..Guest::default() }, "PluginAnswerUndecodable"),
        ("answers a case that is none", Guest { case: 7, ..Guest::default() }, "PluginAnswerUndecodable"),
    ] {
        let Err(error) = ask(&engine, guest).await else { panic!("{what}: it was answered") };
        assert_eq!(error.category(), category, "{what}: {}", telemetry::chain(&error));
        assert!(ask(&engine, Guest::default()).await.is_ok(), "after one that {what}");
    }
    println!("{PEAK}{}", peak_of_memory());
}

const SLEEPS: &str = r#"
  (import "wasi:clocks/monotonic-clock@0.2.0" "subscribe-duration" (func $subscribe (param i64) (result i32)))
  (import "wasi:io/poll@0.2.0" "[method]pollable.block" (func $block (param i32)))"#;
const SLEEPING: &str = "import wasi:clocks/monotonic-clock@0.2.0; import wasi:io/poll@0.2.0;";

#[tokio::test]
async fn c51_c53_each_that_does_harm_by_calling_the_host_is_ended_too() {
    let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
    let with = |imports, before| Guest { imports, before, ..Guest::default() };
    for (what, guest, world, category, why) in [
        (
            "sleeps for ever",
            with(SLEEPS, "(call $block (call $subscribe (i64.const -1)))"),
            SLEEPING,
            "PluginDeadline",
            "limits.timeout",
        ),
        (
            "sleeps for no time, for ever",
            with(
                SLEEPS,
                "(i32.store (i32.const 1200) (call $subscribe (i64.const 0)))
                 (loop $on (call $block (i32.load (i32.const 1200))) (br $on))",
            ),
            SLEEPING,
            "PluginDeadline",
            "limits.timeout",
        ),
        (
            "takes resources of the host and gives none back",
            with(SLEEPS, "(loop $on (drop (call $subscribe (i64.const 1))) (br $on))"),
            SLEEPING,
            "PluginCallRefused",
            "resource table has no free keys",
        ),
        (
            "makes resources of its own and gives none back",
            Guest {
                more: r#"(func (export "guest:things/things@1.0.0#[constructor]thing") (result i32) (call $new (i32.const 1)))"#,
                ..with(
                    r#"(import "[export]guest:things/things@1.0.0" "[resource-new]thing" (func $new (param i32) (result i32)))"#,
                    "(loop $on (drop (call $new (i32.const 1))) (br $on))",
                )
            },
            "export guest:things/things@1.0.0;",
            "PluginCallRefused",
            "handle limit exceeded",
        ),
        (
            "wants a gigabyte of randomness",
            with(
                r#"(import "wasi:random/random@0.2.0" "get-random-bytes" (func $random (param i64 i32)))"#,
                "(call $random (i64.const 1073741824) (i32.const 1000))",
            ),
            "import wasi:random/random@0.2.0;",
            "PluginCallRefused",
            "exceeds limit",
        ),
        (
            "logs a message that is larger than limits.output",
            Guest {
                pages: 2,
                ..with(logs().imports, "(call $log (i32.const 2) (i32.const 0) (i32.const 100000) (i32.const 0) (i32.const 0))")
            },
            "import log;",
            "PluginCallRefused",
            "fuel",
        ),
        (
            "ends itself",
            with(r#"(import "wasi:cli/exit@0.2.0" "exit" (func $exit (param i32)))"#, "(call $exit (i32.const 1))"),
            "import wasi:cli/exit@0.2.0;",
            "PluginTrap",
            "exit code 1",
        ),
        (
            "prints for ever",
            with(
                r#"(import "wasi:cli/stdout@0.2.0" "get-stdout" (func $stdout (result i32)))
                   (import "wasi:io/streams@0.2.0" "[method]output-stream.write" (func $write (param i32 i32 i32 i32)))"#,
                "(i32.store (i32.const 1200) (call $stdout))
                 (loop $on
                   (call $write (i32.load (i32.const 1200)) (i32.const 0) (i32.const 60000) (i32.const 1000)) (br $on))",
            ),
            "import wasi:cli/stdout@0.2.0; import wasi:io/streams@0.2.0;",
            "PluginDeadline",
            "limits.timeout",
        ),
        (
            "logs for ever",
            with(
                logs().imports,
                "(loop $on (call $log (i32.const 2) (i32.const 0) (i32.const 60000) (i32.const 0) (i32.const 0)) (br $on))",
            ),
            "import log;",
            "PluginDeadline",
            "limits.timeout",
        ),
    ] {
        let plugin = load(&engine, guest.with_wasi(world)).await;
        let plugin = plugin.unwrap_or_else(|error| panic!("{what}: {}", telemetry::chain(&error)));
        let Err(error) = plugin.reconcile(request(), none_related, LIMITS).await else { panic!("{what}: it was answered") };
        let message = telemetry::chain(&error);
        assert_eq!(error.category(), category, "{what}: {message}");
        assert!(message.contains(why), "{what}: {message}");
        assert!(ask(&engine, Guest::default()).await.is_ok(), "after one that {what}");
    }
    println!("{PEAK}{}", peak_of_memory());
}

#[test]
fn c53_all_that_guests_do_here_takes_the_host_little_memory() {
    // In a process of its own, since other tests of this one take memory, too.
    let alone = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .arg("plugin::hostile::each_that_does_harm_is_ended_by_its_limit_and_the_next_one_is_answered")
        .arg("plugin::hostile::c51_c53_each_that_does_harm_by_calling_the_host_is_ended_too")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&alone.stdout);
    let peaks: Vec<usize> =
        output.lines().filter_map(|line| line.split_once(PEAK)).map(|(_, peak)| peak.parse().unwrap()).collect();
    assert!(alone.status.success() && peaks.len() == 2, "{output}");
    println!("{PEAK}{peaks:?}");
    // Most of it is this program and what compiles; 17 MB are the memory of the guest with a million children.
    assert!(peaks.iter().all(|peak| *peak < 100), "MB: {peaks:?}");
}

#[tokio::test]
async fn the_wall_clock_stands_still_at_the_time_of_the_request() {
    let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
    // The seconds, low half, as the text of the child.
    let child_at = 2156;
    assert_eq!(TEXTS + DESCRIPTION.len(), child_at);
    let guest = Guest {
        imports: r#"(import "wasi:clocks/wall-clock@0.2.0" "now" (func $now (param i32)))"#,
        before: "(call $now (i32.const 1200)) (i32.store (i32.const 2156) (i32.load (i32.const 1200)))",
        child: b"????".to_vec(),
        ..Guest::default()
    };
    let plugin = load(&engine, guest.with_wasi("import wasi:clocks/wall-clock@0.2.0;")).await.unwrap();
    // 0x6172_7479 seconds: `ytra` in memory.
    let request = Request { context: r#"{"now":"2021-10-22T08:21:13Z"}"#.to_owned(), ..request() };
    for _ in 0..2 {
        let answer = plugin.reconcile(request.clone(), none_related, LIMITS).await.unwrap().unwrap();
        assert_eq!(answer.children[0].object, "ytra");
    }
}

/// Why it is refused, or a text that fits nothing.
async fn refused(engine: &Arc<Engine>, bytes: Vec<u8>) -> String {
    load(engine, bytes).await.map_or_else(|error| telemetry::chain(&error), |_| "it was loaded".to_owned())
}

#[tokio::test]
async fn c49_c50_what_is_no_plugin_is_refused_when_it_is_loaded_and_says_why() {
    let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
    let good = Guest::default().component();
    let start = |more| Guest { more, ..Guest::default() }.component();
    let contract = wat::contract("wit/0.1.0");
    let edited = |guest: Guest, from: &str, to: &str| {
        let edit = |text: &str| text.replace(from, to);
        wat::component(&edit(&guest.wat("pilothouse:plugin")), &edit(&contract), "import log; export reconciler;")
    };
    let newer = edited(Guest::default(), "0.1.0", "0.2.0");
    let other = edited(Guest::default(), "pilothouse:plugin", "somebody:else");
    let one_case_more = |case: &str| edited(logs(), case, &format!("{case} another,"));
    let newer_log = {
        let log = "package pilothouse:plugin@0.2.0 { interface log { write: func(message: string); } }";
        let imports = r#"(import "pilothouse:plugin/log@0.2.0" "write" (func (param i32 i32)))"#;
        let guest = Guest { imports, ..Guest::default() };
        guest.component_of(&format!("{contract}{log}"), "export reconciler; import pilothouse:plugin/log@0.2.0;")
    };
    let reaches = Guest {
        imports: r#"(import "wasi:http/types@0.2.0" "http-error-code" (func (result i32)))"#,
        ..Guest::default()
    };
    for (what, bytes, why) in [
        ("nothing", Vec::new(), "failed to compile the plugin"),
        ("text", b"#!/bin/sh".to_vec(), "failed to compile the plugin"),
        ("half of one", good[..good.len() / 2].to_vec(), "failed to compile the plugin"),
        ("a core module", ::wat::parse_str("(module)").unwrap(), "not a component"),
        ("compiled already", engine.wasm().precompile_component(&good).unwrap(), "compiled already"),
        (
            "of the next minor",
            newer,
            "exports pilothouse:plugin/reconciler@0.2.0, which this host does not know; it serves",
        ),
        ("of another world", other, "does not export pilothouse:plugin/reconciler@0.1.0"),
        (
            "built with one case more than the contract has, in what it answers",
            one_case_more("unknown,"),
            "does not keep the contract that it exports: the plugin's pilothouse:plugin/reconciler is not as the contract has it",
        ),
        (
            "built with one case more than the contract has, in what it calls",
            one_case_more("trace,"),
            "expects an import to be other than it is in that version of the contract: component imports instance \
             `pilothouse:plugin/log@0.1.0`",
        ),
        (
            "calls a log of the next minor",
            newer_log,
            "the plugin imports pilothouse:plugin/log@0.2.0, which this host does not serve; it serves log",
        ),
        (
            "means to reach somebody by wasi:http",
            reaches.with_wasi("import wasi:http/types@0.2.0;"),
            "the plugin imports wasi:http/types@0.2.0, which",
        ),
        (
            "traps as it starts",
            start("(func $start (unreachable)) (start $start)"),
            "failed to ask the plugin what it is",
        ),
        ("starts for ever", start("(func $start (loop $on (br $on))) (start $start)"), "gave no answer within"),
        (
            "begins with more memory than it may have",
            Guest { pages: 100, ..Guest::default() }.component(),
            "needs more memory",
        ),
    ] {
        let message = refused(&engine, bytes).await;
        assert!(message.contains(why), "{what}: {message}");
    }
    assert!(load(&engine, good).await.is_ok());
}

#[tokio::test]
#[ignore = "compares times, so nothing else may run beside it: make soak"]
async fn c51_eight_neighbours_that_compute_for_ever_cost_a_call_little() {
    /// How much longer the slowest call of a hundred may take beside them.
    const MOST: u32 = 3;
    let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
    let spinner = load(&engine, Guest { before: "(loop $on (br $on))", ..Guest::default() }.component()).await;
    let spinner = Arc::new(spinner.unwrap());
    let neighbour = load(&engine, Guest::default().component()).await.unwrap();
    let long = CallLimits { timeout: Duration::from_secs(60), ..LIMITS };
    let calls = async |times: &mut Vec<Duration>| {
        for _ in 0..500 {
            let begun = Instant::now();
            neighbour.reconcile(request(), none_related, long).await.unwrap().unwrap();
            times.push(begun.elapsed());
        }
    };
    let mut seen = Vec::new();
    // Others may be at work on this machine, for one of the two and not for the other: then once more.
    for _ in 0..5 {
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            calls(&mut alone).await;
            let spin = || {
                let spinner = spinner.clone();
                tokio::spawn(async move { spinner.reconcile(request(), none_related, long).await })
            };
            let spinners = [(); 8].map(|()| spin());
            calls(&mut beside).await;
            spinners.iter().for_each(tokio::task::JoinHandle::abort);
        }
        let [alone, beside] = [alone, beside].map(|mut times| {
            times.sort_unstable();
            times[times.len() * 99 / 100]
        });
        seen.push(format!("{alone:?} alone and {beside:?} beside eight that spin"));
        if beside < alone * MOST {
            println!("p99 of a call: {seen:?}");
            return;
        }
    }
    panic!("p99 of a call: {seen:?}");
}

#[tokio::test]
async fn all_guests_together_have_so_much_memory_and_what_one_had_is_given_back() {
    // Two of them fit: each begins with 25 pages.
    let engine = Arc::new(Engine::new(60 * 65_536).unwrap());
    let guest = |before| Guest { before, pages: 25, ..Guest::default() }.component();
    let holds = Arc::new(load(&engine, guest("(loop $on (br $on))")).await.unwrap());
    let good = load(&engine, guest("")).await.unwrap();
    let long = CallLimits { timeout: Duration::from_secs(3), ..LIMITS };
    let hold = || {
        let holds = holds.clone();
        tokio::spawn(async move { holds.reconcile(request(), none_related, long).await })
    };
    let held = [hold(), hold()];
    // Until both are there.
    while good.reconcile(request(), none_related, LIMITS).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = good.reconcile(request(), none_related, LIMITS).await.unwrap_err();
    assert_eq!(error.category(), "GuestMemoryExhausted", "{}", telemetry::chain(&error));
    for held in held {
        assert_eq!(held.await.unwrap().unwrap_err().category(), "PluginDeadline");
    }
    good.reconcile(request(), none_related, LIMITS).await.unwrap().unwrap();
}
