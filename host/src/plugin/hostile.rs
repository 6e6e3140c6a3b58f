//! Guests that nobody should write: each is held by its limits, told by its category, and leaves the engine as it was.
//!
//! They are core modules as text, made into components of the real contract. One that behaves comes first: what the others do is the
//! difference to it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

use super::{Answer, CallError, CallLimits, Engine, Failure, GUEST_MEMORY, LoadError, Plugin, Request};
use crate::{metrics::Calls, telemetry};

pub(super) const LIMITS: CallLimits =
    CallLimits { memory: 4 << 20, timeout: Duration::from_millis(300), output: 64 << 10 };

/// Where the texts of a guest are: far from its answer, which begins at 1024, and from what it allocates.
const TEXTS: usize = 2048;
const DESCRIPTION: &str =
    r#"{"parent":{"apiVersion":"t.example/v1","kind":"Widget"},"children":[{"apiVersion":"v1","kind":"ConfigMap"}]}"#;
const CHILD: &str = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}"#;

/// A guest in parts.
pub(super) struct Guest {
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
        Self { child, before: "", children: 1, case: 0, more: "", pages: 1 }
    }
}

/// A text of WAT that is these bytes.
fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\{byte:02x}")).collect()
}

impl Guest {
    /// One that answers with this child, and does that before it does.
    pub(super) fn new(child: Vec<u8>, before: &'static str) -> Self {
        Self { child, before, ..Self::default() }
    }

    /// The answer of the contract, as the canonical ABI lays it out: `result`, then `desired`, whose list of children is at 1100.
    fn wat(&self, package: &str) -> String {
        let Self { child, before, children, case, more, pages } = self;
        let child_at = TEXTS + DESCRIPTION.len();
        let options_at = child_at + child.len();
        format!(
            r#"(module
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
        component(&self.wat("pilothouse:plugin"), &contract())
    }
}

/// The contract, as one text.
fn contract() -> String {
    ["types", "exports", "log", "worlds"]
        .map(|file| {
            let path = format!("{}/../wit/0.1.0/{file}.wit", env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
        })
        .join("\n")
}

/// A component of the world `hostile`, which exports a reconciler and imports nothing.
fn component(wat: &str, contract: &str) -> Vec<u8> {
    let mut module = wat::parse_str(wat).unwrap();
    let mut resolve = Resolve::default();
    let package =
        resolve.push_str("hostile.wit", &format!("{contract}\nworld hostile {{ export reconciler; }}")).unwrap();
    let world = resolve.select_world(&[package], Some("hostile")).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false).unwrap();
    ComponentEncoder::default().validate(true).module(&module).unwrap().encode().unwrap()
}

async fn load(engine: &Arc<Engine>, bytes: Vec<u8>) -> Result<Plugin, LoadError> {
    Plugin::load(engine, None, bytes, LIMITS, Arc::new(Calls::default())).await
}

pub(super) fn request() -> Request {
    let empty = || "{}".to_owned();
    Request { parent: empty(), children: Vec::new(), related: Vec::new(), config: empty(), context: empty() }
}

async fn ask(engine: &Arc<Engine>, guest: Guest) -> Result<Result<Answer, Failure>, CallError> {
    load(engine, guest.component()).await.unwrap().reconcile(request(), LIMITS).await
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
            Guest { children: 1_000_000, pages: 60, ..Guest::default() },
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
    let newer = {
        let next = |text: &str| text.replace("0.1.0", "0.2.0");
        component(&next(&Guest::default().wat("pilothouse:plugin")), &next(&contract()))
    };
    let other = {
        let other = |text: &str| text.replace("pilothouse:plugin", "somebody:else");
        component(&other(&Guest::default().wat("pilothouse:plugin")), &other(&contract()))
    };
    for (what, bytes, why) in [
        ("nothing", Vec::new(), "failed to compile the plugin"),
        ("text", b"#!/bin/sh".to_vec(), "failed to compile the plugin"),
        ("half of one", good[..good.len() / 2].to_vec(), "failed to compile the plugin"),
        ("a core module", wat::parse_str("(module)").unwrap(), "not a component"),
        ("compiled already", engine.wasm().precompile_component(&good).unwrap(), "compiled already"),
        (
            "of the next minor",
            newer,
            "exports pilothouse:plugin/reconciler@0.2.0, which this host does not know; it serves",
        ),
        ("of another world", other, "does not export pilothouse:plugin/reconciler@0.1.0"),
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
async fn c51_neighbours_that_compute_for_ever_leave_a_guest_its_turn() {
    let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
    let spinner =
        Arc::new(load(&engine, Guest { before: "(loop $on (br $on))", ..Guest::default() }.component()).await.unwrap());
    let neighbour = load(&engine, Guest::default().component()).await.unwrap();
    let long = CallLimits { timeout: Duration::from_secs(20), ..LIMITS };
    let spinners: Vec<_> = (0..8)
        .map(|_| {
            let spinner = spinner.clone();
            tokio::spawn(async move { spinner.reconcile(request(), long).await })
        })
        .collect();
    let begun = Instant::now();
    for _ in 0..50 {
        neighbour.reconcile(request(), long).await.unwrap().unwrap();
    }
    // Each turn takes a tick for each spinner at the worst: a guest that had to wait for one to end would take 20 s.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    spinners.iter().for_each(tokio::task::JoinHandle::abort);
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
        tokio::spawn(async move { holds.reconcile(request(), long).await })
    };
    let held = [hold(), hold()];
    // Until both are there.
    while good.reconcile(request(), LIMITS).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = good.reconcile(request(), LIMITS).await.unwrap_err();
    assert_eq!(error.category(), "GuestMemoryExhausted", "{}", telemetry::chain(&error));
    for held in held {
        assert_eq!(held.await.unwrap().unwrap_err().category(), "PluginDeadline");
    }
    good.reconcile(request(), LIMITS).await.unwrap().unwrap();
}
