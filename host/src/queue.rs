//! The work queue of one reconciler: which parent is due when, one run per parent at a time.
//!
//! Backoff belongs to the parent, not to the event: a failure makes it wait twice as long as the one before, and what
//! happens while it waits neither counts as a failure nor lengthens the wait (`C43`).

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

/// How long a parent waits after its first failure.
pub const BACKOFF_BASE: Duration = Duration::from_millis(500);
/// The longest that a parent waits after a failure, before jitter.
pub const BACKOFF_CAP: Duration = Duration::from_secs(60);
/// How often at most an event of a child may wake a parent that is waiting after a failure.
const EARLY_RUN_INTERVAL: Duration = Duration::from_secs(1);
/// How often in a row a parent may run again at once: writing takes a pass, and seeing what came of it another. One whose plugin
/// wants something else each time waits as after failures.
const FREE_AGAINS: u32 = 3;
/// How long a parent rests when nothing wakes it: what a lost event could cost at most.
pub const RESYNC: Duration = Duration::from_hours(10);

/// Why a parent is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Its own change, which may well be the remedy: run now, whatever it waits for.
    Parent,
    /// A change of a child: run now, or at most once per second while it waits after a failure.
    Child,
}

/// What follows a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing, until it is woken or [`RESYNC`] has passed.
    OnChange,
    /// Nothing, until it is woken: the parent is gone, or none of our business any more.
    Forget,
    /// At once: this run changed what the next one sees.
    Again,
    /// Run again after this time at the latest; it was no failure.
    After(Duration),
    /// Run again as after a failure, though it was none.
    Immediately,
    /// It failed: wait for the backoff, or for this time.
    Failed(Option<Duration>),
    /// Its plugin wants something else each time: wait as after a failure, and not shorter because children change, since it
    /// is this which changes them.
    Unstable,
    /// It failed and trying again is useless: wait to be woken.
    Terminal,
}

/// A run of a parent: hand it back with [`Queue::done`].
#[derive(Debug)]
pub struct Run<K> {
    /// Which parent.
    pub key: K,
    /// How many runs in a row have failed before this one.
    pub attempt: u32,
    /// How long it was due before it began.
    pub waited: Duration,
    /// Whether an event started it before its backoff was over.
    early: bool,
}

/// How a queue is now, and what it has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Parents that are due and wait for a worker.
    pub due: usize,
    /// How long each run that is under way has run.
    pub running: Vec<Duration>,
    /// How often a parent has become due.
    pub adds: u64,
    /// How often one was put off after a failure, or as after one.
    pub retries: u64,
}

/// See the module's documentation.
pub struct Queue<K> {
    schedule: Mutex<Schedule<K>>,
    changed: Notify,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self { schedule: Mutex::default(), changed: Notify::new() }
    }
}

impl<K: Clone + Eq + Hash> Queue<K> {
    /// Something changed for this parent.
    pub fn wake(&self, key: &K, wake: Wake) {
        self.lock().wake(key, wake, Instant::now());
        self.changed.notify_one();
    }

    /// The parent itself was changed, to this resource version. A run that is under way may have done that, or seen it.
    pub fn changed(&self, key: &K, version: &str) {
        self.lock().parent_changed(key, version, Instant::now());
        self.changed.notify_one();
    }

    /// The same for every parent that waits or runs.
    pub fn wake_all(&self, wake: Wake) {
        let mut schedule = self.lock();
        let keys: Vec<_> = schedule.items.keys().cloned().collect();
        for key in &keys {
            schedule.wake(key, wake, Instant::now());
        }
        drop(schedule);
        self.changed.notify_one();
    }

    /// Waits for the next parent that is due, and marks it as running. Cancel safe.
    pub async fn next(&self) -> Run<K> {
        loop {
            let changed = self.changed.notified();
            let due = match self.lock().start(Instant::now()) {
                Ok(run) => return run,
                Err(due) => due,
            };
            match due {
                Some(at) => tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(at.into()) => {}
                },
                None => changed.await,
            }
        }
    }

    /// A run has ended, and left the parent at the resource version `seen`, if it knows.
    pub fn done(&self, run: Run<K>, next: Next, seen: Option<&str>) {
        self.lock().done(run, next, seen, Instant::now());
        self.changed.notify_one();
    }

    /// How the queue is now.
    pub fn figures(&self) -> Figures {
        self.lock().figures(Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, Schedule<K>> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue without its clock: every decision, a function of the time that it is told.
struct Schedule<K> {
    items: HashMap<K, Item>,
    /// When each waiting item is due. The number keeps the order of arrival among equals.
    due: BTreeMap<(Instant, u64), K>,
    arrivals: u64,
    adds: u64,
    retries: u64,
}

#[derive(Default)]
struct Item {
    /// Its place in `due`.
    waiting: Option<(Instant, u64)>,
    /// Whether it was put there to become due later: then it counts as added when its time has come.
    later: bool,
    running: bool,
    /// Woken while it ran.
    woken: Option<Wake>,
    /// Changed while it ran: the latest resource version.
    changed_to: Option<String>,
    failures: u32,
    /// How many runs in a row have ended with `Again`.
    agains: u32,
    /// When its backoff ends.
    retry_at: Option<Instant>,
    /// Whether children cannot shorten it.
    firm: bool,
    last_start: Option<Instant>,
}

impl<K> Default for Schedule<K> {
    fn default() -> Self {
        Self { items: HashMap::new(), due: BTreeMap::new(), arrivals: 0, adds: 0, retries: 0 }
    }
}

impl<K: Clone + Eq + Hash> Schedule<K> {
    fn wake(&mut self, key: &K, wake: Wake, now: Instant) {
        let item = self.items.entry(key.clone()).or_default();
        if item.running {
            // A change of the parent outranks one of a child.
            item.woken = if item.woken == Some(Wake::Parent) { item.woken } else { Some(wake) };
            return;
        }
        let at = item.due_when_woken(wake, now);
        self.plan(key, at, now);
    }

    fn parent_changed(&mut self, key: &K, version: &str, now: Instant) {
        match self.items.get_mut(key) {
            Some(item) if item.running => item.changed_to = Some(version.to_owned()),
            _ => self.wake(key, Wake::Parent, now),
        }
    }

    /// The next run, or when there will be one.
    fn start(&mut self, now: Instant) -> Result<Run<K>, Option<Instant>> {
        loop {
            let Some(first) = self.due.first_entry() else { return Err(None) };
            let (at, _) = *first.key();
            if at > now {
                return Err(Some(at));
            }
            let key = first.remove();
            let Some(item) = self.items.get_mut(&key) else { continue };
            item.waiting = None;
            item.running = true;
            item.last_start = Some(now);
            self.adds += u64::from(item.later);
            let early = item.retry_at.is_some_and(|retry_at| retry_at > now);
            return Ok(Run { attempt: item.failures, waited: now - at, early, key });
        }
    }

    fn done(&mut self, run: Run<K>, next: Next, seen: Option<&str>, now: Instant) {
        let Some(item) = self.items.get_mut(&run.key) else { return };
        item.running = false;
        item.agains = if next == Next::Again { item.agains + 1 } else { 0 };
        self.retries += u64::from(matches!(next, Next::Failed(_) | Next::Immediately | Next::Unstable));
        let planned = match next {
            Next::OnChange => Some(now + jitter(RESYNC)),
            Next::Forget | Next::Terminal => None,
            Next::Again => Some(now + item.agains.checked_sub(FREE_AGAINS + 1).map_or(Duration::ZERO, backoff)),
            Next::After(wait) | Next::Failed(Some(wait)) => Some(now + wait),
            // An early run that failed too is the same failure: the wait goes on.
            Next::Failed(None) | Next::Immediately if run.early => item.retry_at,
            Next::Failed(None) | Next::Immediately => Some(now + backoff(item.failures)),
            // Never so soon that a clock in seconds would show the same time.
            Next::Unstable => Some(now + backoff(item.failures.saturating_add(2))),
        };
        item.firm = next == Next::Unstable;
        match next {
            Next::OnChange | Next::Forget | Next::Again | Next::After(_) => (item.failures, item.retry_at) = (0, None),
            Next::Terminal => (item.failures, item.retry_at) = (item.failures.saturating_add(1), None),
            Next::Failed(_) | Next::Immediately if planned == item.retry_at => {}
            Next::Failed(_) | Next::Immediately | Next::Unstable => {
                (item.failures, item.retry_at) = (item.failures.saturating_add(1), planned);
            }
        }
        // The watch may show a write of ours before its answer is here: that is no news.
        let changed = item.changed_to.take().is_some_and(|version| seen != Some(version.as_str()));
        let woken = item.woken.take();
        let woken = if changed { Some(Wake::Parent) } else { woken };
        let woken = woken.map(|wake| item.due_when_woken(wake, now));
        match woken.into_iter().chain(planned).min() {
            Some(at) => self.plan(&run.key, at, now),
            None if next == Next::Forget => drop(self.items.remove(&run.key)),
            None => {}
        }
    }

    /// Makes the item due at `at`, or leaves it where it is if that is earlier.
    fn plan(&mut self, key: &K, at: Instant, now: Instant) {
        let item = self.items.entry(key.clone()).or_default();
        if let Some(already) = item.waiting {
            if already.0 <= at {
                return;
            }
            self.due.remove(&already);
        }
        self.arrivals += 1;
        item.waiting = Some((at, self.arrivals));
        item.later = at > now;
        self.adds += u64::from(!item.later);
        self.due.insert((at, self.arrivals), key.clone());
    }

    fn figures(&self, now: Instant) -> Figures {
        let running = self.items.values().filter(|item| item.running);
        let due = self.due.range(..=(now, u64::MAX));
        // What has become due by the passing of time is noted down only when it begins.
        let ripened = due.clone().filter(|(_, key)| self.items.get(*key).is_some_and(|item| item.later)).count();
        Figures {
            due: due.count(),
            running: running.filter_map(|item| Some(now - item.last_start?)).collect(),
            adds: self.adds + u64::try_from(ripened).unwrap_or_default(),
            retries: self.retries,
        }
    }
}

impl Item {
    fn due_when_woken(&self, wake: Wake, now: Instant) -> Instant {
        match (wake, self.retry_at, self.last_start) {
            (Wake::Child, Some(retry_at), _) if self.firm => retry_at.max(now),
            (Wake::Child, Some(retry_at), Some(last)) if retry_at > now => {
                retry_at.min((last + EARLY_RUN_INTERVAL).max(now))
            }
            _ => now,
        }
    }
}

/// Doubles from [`BACKOFF_BASE`] to [`BACKOFF_CAP`], and a little at random, so that parents that failed together do not
/// return together.
fn backoff(failures: u32) -> Duration {
    jitter(BACKOFF_BASE.saturating_mul(2_u32.saturating_pow(failures)).min(BACKOFF_CAP))
}

/// Up to a quarter more.
fn jitter(exact: Duration) -> Duration {
    exact.mul_f64(1.0 + fastrand::f64() / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A schedule with a clock that stands until it is moved.
    struct Clock {
        schedule: Schedule<&'static str>,
        now: Instant,
    }

    impl Clock {
        fn new() -> Self {
            Self { schedule: Schedule::default(), now: Instant::now() }
        }

        fn wake(&mut self, key: &'static str, wake: Wake) {
            self.schedule.wake(&key, wake, self.now);
        }

        fn due(&mut self) -> Option<Run<&'static str>> {
            self.schedule.start(self.now).ok()
        }

        /// Waits for the next run; how long that took, and the run.
        fn wait(&mut self) -> (Duration, Run<&'static str>) {
            let since = self.now;
            loop {
                match self.schedule.start(self.now) {
                    Ok(run) => return (self.now - since, run),
                    Err(at) => self.now = at.expect("something is due some time"),
                }
            }
        }

        fn done(&mut self, run: Run<&'static str>, next: Next) {
            self.schedule.done(run, next, None, self.now);
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
        }
    }

    #[test]
    fn one_run_per_parent_and_a_wake_during_it_is_kept() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        clock.wake("a", Wake::Parent);
        clock.wake("b", Wake::Parent);
        let a = clock.due().unwrap();
        assert_eq!((a.key, clock.due().unwrap().key), ("a", "b"));
        clock.wake("a", Wake::Child);
        assert!(clock.due().is_none());
        clock.done(a, Next::OnChange);
        let a = clock.due().unwrap();
        assert_eq!(a.key, "a");
        clock.done(a, Next::OnChange);
        assert!(clock.due().is_none());
    }

    #[test]
    fn what_the_run_itself_has_done_to_the_parent_is_no_news() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let run = clock.due().unwrap();
        clock.schedule.parent_changed(&"a", "5", clock.now);
        clock.schedule.done(run, Next::OnChange, Some("5"), clock.now);
        assert!(clock.due().is_none());
        // Somebody else's change is, and so is a child's, and any that comes later.
        for (version, child) in [("6", false), ("5", true)] {
            clock.wake("a", Wake::Parent);
            let run = clock.due().unwrap();
            clock.schedule.parent_changed(&"a", version, clock.now);
            if child {
                clock.wake("a", Wake::Child);
            }
            clock.schedule.done(run, Next::OnChange, Some("5"), clock.now);
            let run = clock.due().expect("it is woken");
            clock.done(run, Next::OnChange);
        }
        clock.schedule.parent_changed(&"a", "5", clock.now);
        assert!(clock.due().is_some());
    }

    #[test]
    fn failures_wait_longer_and_longer_and_success_resets() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let mut run = clock.due().unwrap();
        for attempt in 0..10 {
            assert_eq!(run.attempt, attempt);
            clock.done(run, Next::Failed(None));
            let (waited, again) = clock.wait();
            let exact = BACKOFF_BASE.saturating_mul(1 << attempt).min(BACKOFF_CAP);
            assert!(waited >= exact && waited <= exact.mul_f64(1.25), "wait {attempt} was {waited:?}");
            run = again;
        }
        clock.done(run, Next::OnChange);
        clock.wake("a", Wake::Parent);
        assert_eq!(clock.due().unwrap().attempt, 0);
    }

    #[test]
    fn c43_events_during_backoff_are_no_failures() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        for _ in 0..6 {
            let (_, run) = clock.wait();
            clock.done(run, Next::Failed(None));
        }
        // Sixteen seconds to wait, in a storm of child events; each early run fails as well.
        let (mut early, mut waited) = (0, Duration::ZERO);
        let last = loop {
            clock.wake("a", Wake::Child);
            if let Some(run) = clock.due() {
                assert_eq!(run.attempt, 6);
                if !run.early {
                    break run;
                }
                early += 1;
                clock.done(run, Next::Failed(None));
            }
            clock.pass(Duration::from_millis(20));
            waited += Duration::from_millis(20);
        };
        assert!(waited >= BACKOFF_BASE * 32 && waited <= BACKOFF_BASE * 41, "the wait became {waited:?}");
        assert!((15..=21).contains(&early), "{early} early runs in {waited:?}");
        clock.done(last, Next::OnChange);
    }

    #[test]
    fn a_change_of_the_parent_ends_the_wait() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let run = clock.due().unwrap();
        clock.done(run, Next::Failed(Some(Duration::from_secs(30))));
        assert!(clock.due().is_none());
        clock.wake("a", Wake::Parent);
        assert_eq!(clock.due().unwrap().attempt, 1);
    }

    #[test]
    fn the_four_outcomes() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let run = clock.due().unwrap();
        clock.done(run, Next::After(Duration::from_secs(30)));
        let (waited, run) = clock.wait();
        assert_eq!((waited, run.attempt), (Duration::from_secs(30), 0));

        clock.done(run, Next::Again);
        let run = clock.due().unwrap();

        clock.done(run, Next::Immediately);
        let (waited, run) = clock.wait();
        assert!(waited >= BACKOFF_BASE, "`immediately` goes through the rate limiter");
        assert_eq!(run.attempt, 1);

        clock.done(run, Next::Terminal);
        assert_eq!(clock.schedule.start(clock.now).unwrap_err(), None);
        clock.wake("a", Wake::Child);
        let run = clock.due().unwrap();
        clock.done(run, Next::OnChange);
        let (waited, _) = clock.wait();
        assert!(waited >= RESYNC);
    }

    #[test]
    fn c22_a_plugin_that_never_settles_is_slowed_down() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let since = clock.now;
        for _ in 0..20 {
            let (_, run) = clock.wait();
            clock.done(run, Next::Again);
        }
        assert!(clock.now - since > Duration::from_mins(5), "20 runs in {:?}", clock.now - since);
    }

    #[test]
    fn c22_what_an_unstable_plugin_does_to_its_children_is_no_reason_to_call_it_earlier() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let since = clock.now;
        for _ in 0..12 {
            let (_, run) = clock.wait();
            // Both while it runs and after.
            clock.wake("a", Wake::Child);
            clock.done(run, Next::Unstable);
            clock.wake("a", Wake::Child);
        }
        assert!(clock.now - since > Duration::from_mins(4), "12 runs in {:?}", clock.now - since);
        clock.wake("a", Wake::Parent);
        assert!(clock.due().is_some(), "the user's remedy holds at once");
    }

    #[test]
    fn a_parent_that_is_gone_leaves_nothing_behind() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let run = clock.due().unwrap();
        clock.done(run, Next::Forget);
        assert!(clock.schedule.items.is_empty() && clock.schedule.due.is_empty());
    }

    #[test]
    fn the_figures_count_what_becomes_due_once_at_its_time() {
        let mut clock = Clock::new();
        let figures = |clock: &Clock| clock.schedule.figures(clock.now);
        clock.wake("a", Wake::Parent);
        clock.wake("a", Wake::Child);
        clock.wake("b", Wake::Parent);
        assert_eq!(figures(&clock), Figures { due: 2, adds: 2, ..Figures::default() });
        clock.pass(Duration::from_secs(2));
        let a = clock.due().unwrap();
        assert_eq!(a.waited, Duration::from_secs(2));
        clock.pass(Duration::from_secs(1));
        assert_eq!(
            figures(&clock),
            Figures { due: 1, running: vec![Duration::from_secs(1)], adds: 2, ..Figures::default() }
        );
        clock.done(a, Next::Failed(Some(Duration::from_secs(5))));
        let b = clock.due().unwrap();
        clock.done(b, Next::OnChange);
        assert_eq!(figures(&clock), Figures { adds: 2, retries: 1, ..Figures::default() });
        clock.pass(Duration::from_secs(7));
        assert_eq!(figures(&clock), Figures { due: 1, adds: 3, retries: 1, ..Figures::default() });
        assert_eq!(clock.due().unwrap().waited, Duration::from_secs(2));
        assert_eq!(figures(&clock).adds, 3);
    }

    #[tokio::test]
    async fn waiting_ends_with_a_wake() {
        let queue = Queue::default();
        let next = async { queue.next().await.key };
        let wake = async {
            tokio::task::yield_now().await;
            queue.wake(&"a", Wake::Parent);
        };
        let (key, ()) = tokio::join!(next, wake);
        assert_eq!(key, "a");
    }
}
