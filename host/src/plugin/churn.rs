//! Calls without end, of which three in ten trap, while plugins are replaced: nothing is left of either (`C52`).

use std::{
    sync::{
        Arc, RwLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt as _, stream};
use serde_json::Map;

use super::{
    CallLimits, Engine, GUEST_MEMORY, Request,
    hostile::{self, Guest},
    none_related,
};
use crate::{
    metrics::process,
    revision::{Material, Revision},
};

const AT_ONCE: usize = 8;
/// How much the process may grow from a fifth of the calls to the end of them.
const GROWTH: f64 = 0.10;
/// A machine that is busy with other tests is no deadline.
const LIMITS: CallLimits = CallLimits { timeout: Duration::from_secs(30), ..hostile::LIMITS };

/// Revisions that take each other's place, and what is left of those that did.
struct Revisions {
    engine: Arc<Engine>,
    serving: RwLock<Arc<Revision>>,
    former: RwLock<Vec<Weak<Revision>>>,
}

impl Revisions {
    async fn new() -> Self {
        let engine = Arc::new(Engine::new(GUEST_MEMORY).unwrap());
        let first = load(&engine, 0).await;
        Self { engine, serving: RwLock::new(first), former: RwLock::default() }
    }

    async fn swap(&self, number: usize) {
        let next = load(&self.engine, number).await;
        let former = std::mem::replace(&mut *self.serving.write().unwrap(), next);
        self.former.write().unwrap().push(Arc::downgrade(&former));
    }

    /// One call, on what serves now.
    async fn call(&self, traps: bool) {
        let revision = self.serving.read().unwrap().clone();
        let parent = if traps { String::new() } else { "{}".to_owned() };
        let answer = revision.plugin.reconcile(Request { parent, ..hostile::request() }, none_related, LIMITS).await;
        match answer {
            // It ends on the revision that it began with.
            Ok(Ok(answer)) => assert_eq!((answer.children[0].object.as_str(), traps), (&*revision.config, false)),
            Ok(Err(failure)) => panic!("{failure:?}"),
            Err(error) => assert_eq!((error.category(), traps), ("PluginTrap", true)),
        }
    }

    fn alive(&self) -> usize {
        self.former.read().unwrap().iter().filter(|former| former.strong_count() > 0).count()
    }
}

/// A revision that answers with its config as a child, and traps where there is no parent. Digest and config are its own.
async fn load(engine: &Arc<Engine>, number: usize) -> Arc<Revision> {
    let config = Map::from_iter([("number".to_owned(), number.into())]);
    let child = serde_json::to_vec(&config).unwrap();
    let before = "(if (i32.eqz (local.get 1)) (then (unreachable)))";
    let material = Material { plugin: Guest::new(child, before).component().into(), config };
    Arc::new(material.load(engine, None, LIMITS, Arc::default()).await.unwrap())
}

/// As many calls and swaps, with the resident memory after each tenth of the calls, in MiB.
async fn churn(calls: usize, swaps: usize) -> Vec<f64> {
    let revisions = Revisions::new().await;
    let (made, resident) = (AtomicUsize::new(0), RwLock::new(Vec::new()));
    let call = async |number: usize| {
        if number.is_multiple_of(calls / swaps) {
            revisions.swap(1 + number / (calls / swaps)).await;
            // Those that served when the calls began that still run.
            assert!(revisions.alive() <= AT_ONCE, "{} former revisions are alive", revisions.alive());
        }
        revisions.call(number % 10 < 3).await;
        if (1 + made.fetch_add(1, Ordering::Relaxed)).is_multiple_of(calls / 10) {
            resident.write().unwrap().push(resident_memory());
        }
    };
    stream::iter(0..calls).map(call).buffer_unordered(AT_ONCE).collect::<()>().await;
    assert_eq!((revisions.former.read().unwrap().len(), revisions.alive()), (swaps, 0));
    assert!(revisions.engine.memory().take(GUEST_MEMORY), "all memory of guests was given back");
    resident.into_inner().unwrap()
}

/// In MiB.
fn resident_memory() -> f64 {
    process::resident_memory().unwrap() as f64 / f64::from(1 << 20)
}

#[tokio::test]
async fn c52_nothing_is_left_of_calls_that_trap_and_of_revisions_that_were_replaced() {
    churn(2_000, 20).await;
}

#[tokio::test]
#[ignore = "takes a minute: make soak"]
async fn c52_soak_of_a_hundred_thousand_calls_and_two_hundred_swaps_takes_no_more_memory() {
    let resident = churn(100_000, 200).await;
    println!("{resident:.1?} MiB resident, after each tenth of the calls");
    let (before, after) = (resident[1], resident[9]);
    assert!(
        after <= before * (1.0 + GROWTH),
        "{before:.1} MiB after two tenths of the calls, {after:.1} MiB in the end"
    );
}
