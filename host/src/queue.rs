//! The work queue of one reconciler: which parent is due when, and which goes first; one run per parent at a time.
//!
//! A user waits for an edit, and nobody for a parent that is looked at because the host has started: so of those that are due the most
//! urgent goes first ([`Wake`]), and every few runs the one that is due longest, so that none waits for ever (`C45`).
//!
//! Backoff belongs to the parent, not to the event: a failure makes it wait twice as long as the one before, and what
//! happens while it waits neither counts as a failure nor lengthens the wait (`C43`). Its own change ends every wait. A change of a
//! child never makes it run more often than `Item::due_for_child` allows.

use std::{
    array,
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use self::circuit::Circuit;

mod circuit;

/// How long a parent waits after its first failure.
pub const BACKOFF_BASE: Duration = Duration::from_millis(500);
/// The longest that a parent waits after a failure, before jitter.
pub const BACKOFF_CAP: Duration = Duration::from_secs(60);
/// How often at most a change of a child may wake a parent that waits after a failure, or has been woken much in short time.
const STRAINED_INTERVAL: Duration = circuit::REFILL;
/// How often at most while its circuit is open.
const OPEN_CIRCUIT_INTERVAL: Duration = Duration::from_secs(30);
/// How many runs in a row may overtake the parent that is due longest.
const OVERTAKING: u32 = 7;
/// How long a parent rests when nothing wakes it: what a lost event could cost at most.
pub const RESYNC: Duration = Duration::from_hours(10);

/// Why a parent is to run, the most urgent first. Of several reasons the most urgent counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wake {
    /// Its own change, a user's most of the time, and maybe the remedy: run now, whatever it waits for.
    Parent,
    /// It is new: run now. Behind edits, which are few where new parents come by the thousand, and mend what is in use already.
    Created,
    /// A change of a child, by us or by others, or of what its relations select: run now, or not so soon if it fails or does so all the time.
    Child,
    /// A time that was set has come: after a failure, or as the plugin asked.
    Timer,
    /// No change is known, and all are looked at: the host has just started, something else serves, or [`RESYNC`] has passed. Run now.
    Resync,
}

impl Wake {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [Self::Parent, Self::Created, Self::Child, Self::Timer, Self::Resync];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parent => "parent",
            Self::Created => "created",
            Self::Child => "child",
            Self::Timer => "timer",
            Self::Resync => "resync",
        }
    }
}

/// What follows a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing, until it is woken or [`RESYNC`] has passed.
    OnChange,
    /// Nothing, until it is woken: the parent is gone, or none of our business any more.
    Forget,
    /// At once, for the sake of its children: this run changed what the next one sees.
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
    /// Why it runs.
    pub wake: Wake,
    /// How many runs in a row have failed before this one.
    pub attempt: u32,
    /// How long it was due before it began.
    pub waited: Duration,
    /// Whether children have made it run so often that they wake it but rarely now.
    pub circuit_open: bool,
    /// Whether an event started it before its backoff was over.
    early: bool,
}

/// How a queue is now, and what it has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Parents that are due and wait for a worker, by [`Wake`].
    pub due: [usize; Wake::ALL.len()],
    /// Parents whose circuit is open.
    pub open_circuits: usize,
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

    /// Every parent that waits or runs is to be looked at.
    pub fn resync(&self) {
        let mut schedule = self.lock();
        let keys: Vec<_> = schedule.items.keys().cloned().collect();
        for key in &keys {
            schedule.wake(key, Wake::Resync, Instant::now());
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

    /// The run is to go on at once, for the sake of children that it has changed ([`Next::Again`]): whether it may. One that began for
    /// their sake ends, and comes again: those are counted.
    pub fn goes_on(&self, run: &mut Run<K>) -> bool {
        self.lock().goes_on(run)
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
    /// Those that wait, by [`Wake`] and place.
    waiting: [BTreeMap<Place, K>; Wake::ALL.len()],
    /// How many runs have overtaken the parent that is due longest.
    overtaken: u32,
    arrivals: u64,
    adds: u64,
    retries: u64,
}

/// When a waiting item is due. The number keeps the order of arrival among equals.
type Place = (Instant, u64);

#[derive(Default)]
struct Item {
    /// Where it waits.
    waiting: Option<(Wake, Place)>,
    /// Whether it was put there to become due later: then it counts as added when its time has come.
    later: bool,
    running: bool,
    /// Woken while it ran.
    woken: Option<Wake>,
    /// Changed while it ran: the latest resource version.
    changed_to: Option<String>,
    failures: u32,
    /// When its backoff ends.
    retry_at: Option<Instant>,
    /// Whether children cannot shorten it.
    firm: bool,
    circuit: Circuit,
    last_start: Option<Instant>,
}

impl<K> Default for Schedule<K> {
    fn default() -> Self {
        Self {
            items: HashMap::new(),
            waiting: array::from_fn(|_| BTreeMap::new()),
            overtaken: 0,
            arrivals: 0,
            adds: 0,
            retries: 0,
        }
    }
}

impl<K: Clone + Eq + Hash> Schedule<K> {
    fn wake(&mut self, key: &K, wake: Wake, now: Instant) {
        let item = self.items.entry(key.clone()).or_default();
        if item.running {
            item.woken = item.woken.into_iter().chain([wake]).min();
            return;
        }
        let at = item.due_when_woken(wake, now);
        self.plan(key, wake, at, now);
    }

    fn parent_changed(&mut self, key: &K, version: &str, now: Instant) {
        match self.items.get_mut(key) {
            Some(item) if item.running => item.changed_to = Some(version.to_owned()),
            _ => self.wake(key, Wake::Parent, now),
        }
    }

    /// The next run, or when there will be one.
    fn start(&mut self, now: Instant) -> Result<Run<K>, Option<Instant>> {
        let first = |wake: Wake| self.waiting[wake as usize].first_key_value().map(|(place, _)| (*place, wake));
        let Some(oldest) = Wake::ALL.into_iter().filter_map(first).min() else { return Err(None) };
        let (at, _) = oldest.0;
        if at > now {
            return Err(Some(at));
        }
        let most_urgent = Wake::ALL.into_iter().filter_map(first).find(|((at, _), _)| *at <= now);
        let (_, wake) = most_urgent.filter(|_| self.overtaken < OVERTAKING).unwrap_or(oldest);
        let Some((place, key)) = self.waiting[wake as usize].pop_first() else { return Err(None) };
        self.overtaken = if place == oldest.0 { 0 } else { self.overtaken + 1 };
        let item = self.items.entry(key.clone()).or_default();
        item.waiting = None;
        item.running = true;
        item.last_start = Some(now);
        self.adds += u64::from(item.later);
        if wake == Wake::Child {
            item.circuit.spend(now);
        }
        Ok(Run {
            key,
            wake,
            attempt: item.failures,
            waited: now - place.0,
            circuit_open: item.circuit.open_until(now).is_some(),
            early: item.retry_at.is_some_and(|retry_at| retry_at > now),
        })
    }

    fn goes_on(&mut self, run: &mut Run<K>) -> bool {
        let Some(item) = self.items.get_mut(&run.key).filter(|_| run.wake != Wake::Child) else { return false };
        // What goes on sees all that has woken it, such as its own writes where the watch was faster than the answer.
        item.woken = None;
        run.wake = Wake::Child;
        true
    }

    fn done(&mut self, run: Run<K>, next: Next, seen: Option<&str>, now: Instant) {
        let Some(item) = self.items.get_mut(&run.key) else { return };
        item.running = false;
        self.retries += u64::from(matches!(next, Next::Failed(_) | Next::Immediately | Next::Unstable));
        let at = match next {
            Next::OnChange => Some(now + jitter(RESYNC)),
            Next::Forget | Next::Terminal | Next::Again => None,
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
            Next::Failed(_) | Next::Immediately if at == item.retry_at => {}
            Next::Failed(_) | Next::Immediately | Next::Unstable => {
                (item.failures, item.retry_at) = (item.failures.saturating_add(1), at);
            }
        }
        let planned = at.map(|at| (if next == Next::OnChange { Wake::Resync } else { Wake::Timer }, at));
        // The watch may show a write of ours before its answer is here: that is no news.
        let changed = item.changed_to.take().is_some_and(|version| seen != Some(version.as_str()));
        let woken = item.woken.take().into_iter().chain(changed.then_some(Wake::Parent));
        let woken = woken.map(|wake| (wake, item.due_when_woken(wake, now)));
        let again = (next == Next::Again).then(|| (Wake::Child, item.due_again(now)));
        // Whoever is told that the circuit is open has to be told, too, that it no longer is.
        let closes = item.circuit.open_until(now).filter(|_| next != Next::Forget).map(|at| (Wake::Timer, at));
        let plans: Vec<_> = woken.chain(again).chain(planned).chain(closes).collect();
        for &(wake, at) in &plans {
            self.plan(&run.key, wake, at, now);
        }
        if plans.is_empty() && next == Next::Forget {
            self.items.remove(&run.key);
        }
    }

    /// Lets the item be due at `at`, or when it would be already if that is earlier.
    fn plan(&mut self, key: &K, wake: Wake, at: Instant, now: Instant) {
        let item = self.items.entry(key.clone()).or_default();
        let (mut wake, mut at, mut is_new) = (wake, at, true);
        if let Some((already, place)) = item.waiting {
            (wake, at, is_new) = (wake.min(already), at.min(place.0), at < place.0);
            if (wake, at) == (already, place.0) {
                return;
            }
            self.waiting[already as usize].remove(&place);
        }
        if is_new {
            item.later = at > now;
            self.adds += u64::from(!item.later);
        }
        self.arrivals += 1;
        let place = (at, self.arrivals);
        item.waiting = Some((wake, place));
        self.waiting[wake as usize].insert(place, key.clone());
    }

    fn figures(&self, now: Instant) -> Figures {
        let due = self.waiting.each_ref().map(|waiting| waiting.range(..=(now, u64::MAX)));
        // What has become due by the passing of time is noted down only when it begins.
        let is_later = |key: &K| self.items.get(key).is_some_and(|item| item.later);
        let ripened = due.iter().flat_map(Clone::clone).filter(|(_, key)| is_later(key)).count();
        let running = self.items.values().filter(|item| item.running);
        Figures {
            due: due.map(Iterator::count),
            open_circuits: self.items.values().filter(|item| item.circuit.open_until(now).is_some()).count(),
            running: running.filter_map(|item| Some(now - item.last_start?)).collect(),
            adds: self.adds + u64::try_from(ripened).unwrap_or_default(),
            retries: self.retries,
        }
    }
}

impl Item {
    fn due_when_woken(&self, wake: Wake, now: Instant) -> Instant {
        if wake == Wake::Child { self.due_for_child(now) } else { now }
    }

    /// When a change of a child lets it run: at once. At most once in a while if it has been woken much, or if it waits after a
    /// failure, which the change may have ended. And not before its time if it is its own plugin that changes children all the time.
    fn due_for_child(&self, now: Instant) -> Instant {
        match self.retry_at.filter(|retry_at| *retry_at > now) {
            Some(retry_at) if self.firm => retry_at,
            None if !self.circuit.is_strained(now) => self.due_again(now),
            _ => self.due_again(now).max(self.after(STRAINED_INTERVAL, now)),
        }
    }

    /// When a change of its own lets it run: at once, unless its circuit is open.
    fn due_again(&self, now: Instant) -> Instant {
        if self.circuit.open_until(now).is_some() { self.after(OPEN_CIRCUIT_INTERVAL, now) } else { now }
    }

    /// So long after it began last.
    fn after(&self, interval: Duration, now: Instant) -> Instant {
        self.last_start.map_or(now, |last| (last + interval).max(now))
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
    fn a_run_that_changed_children_goes_on_once_and_has_seen_what_woke_it_before() {
        let mut clock = Clock::new();
        clock.wake("a", Wake::Parent);
        let mut run = clock.due().unwrap();
        clock.wake("a", Wake::Child);
        assert!(clock.schedule.goes_on(&mut run));
        assert!(!clock.schedule.goes_on(&mut run), "a loop is for the circuit to see");
        clock.done(run, Next::OnChange);
        assert!(clock.due().is_none());
        // What happens while it goes on is news.
        clock.wake("a", Wake::Timer);
        let mut run = clock.due().unwrap();
        assert!(clock.schedule.goes_on(&mut run));
        clock.wake("a", Wake::Child);
        clock.done(run, Next::OnChange);
        let mut run = clock.due().unwrap();
        assert_eq!(run.wake, Wake::Child);
        assert!(!clock.schedule.goes_on(&mut run), "it began for the sake of children");
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
    fn of_those_that_are_due_an_edit_goes_first_and_a_resync_last() {
        let mut clock = Clock::new();
        clock.wake("resync", Wake::Resync);
        clock.wake("failed", Wake::Parent);
        let run = clock.due().unwrap();
        clock.done(run, Next::Failed(Some(Duration::from_secs(1))));
        clock.pass(Duration::from_secs(2));
        for (key, wake) in [("first", Wake::Child), ("second", Wake::Child), ("later", Wake::Parent)] {
            clock.wake(key, wake);
            clock.pass(Duration::from_secs(1));
        }
        clock.wake("new", Wake::Created);
        // One that waits already and is edited moves up, and keeps its place in time.
        clock.wake("edited", Wake::Resync);
        clock.wake("edited", Wake::Parent);
        assert_eq!(clock.schedule.figures(clock.now).due, [2, 1, 2, 1, 1]);
        let order: Vec<_> = std::iter::from_fn(|| clock.due()).map(|run| run.key).collect();
        assert_eq!(order, ["later", "edited", "new", "first", "second", "failed", "resync"]);
    }

    #[test]
    fn c45_an_edit_overtakes_a_thousand_parents_that_are_new_or_resynced() {
        for wake in [Wake::Created, Wake::Resync] {
            an_edit_overtakes_a_thousand(wake);
        }
    }

    fn an_edit_overtakes_a_thousand(wake: Wake) {
        let mut clock = Clock::new();
        let names: Vec<&'static str> = (0..1000).map(|number| &*number.to_string().leak()).collect();
        names.iter().for_each(|name| clock.wake(name, wake));
        for name in &names[..20] {
            let run = clock.due().unwrap();
            assert_eq!(run.key, *name);
            clock.done(run, Next::OnChange);
            clock.pass(Duration::from_millis(50));
        }
        clock.wake(names[900], Wake::Parent);
        let run = clock.due().unwrap();
        assert_eq!(run.key, names[900]);
        // What it has changed is looked at before the resync goes on; others that are new wait for their first look.
        clock.done(run, Next::Again);
        if wake > Wake::Child {
            let run = clock.due().unwrap();
            assert_eq!(run.key, names[900]);
            clock.done(run, Next::OnChange);
        }
        let rest = std::iter::from_fn(|| clock.due()).count();
        let edited = usize::from(wake < Wake::Child);
        assert_eq!(
            rest,
            979 + edited,
            "each of the others has its turn, once, and so has the edited one where it waits"
        );
    }

    #[test]
    fn c45_a_stream_of_edits_starves_nobody() {
        let mut clock = Clock::new();
        for name in ["a", "b", "c"] {
            clock.wake(name, Wake::Resync);
        }
        clock.wake("child", Wake::Child);
        let mut order = Vec::new();
        for _ in 0..40 {
            clock.pass(Duration::from_millis(10));
            clock.wake("edited", Wake::Parent);
            let run = clock.due().unwrap();
            order.push(run.key);
            clock.done(run, Next::OnChange);
        }
        let place = |key| order.iter().position(|run| *run == key).unwrap();
        assert_eq!(["a", "b", "c", "child"].map(place), [7, 15, 23, 31]);
    }

    #[test]
    fn a_loop_of_children_opens_the_circuit_and_the_end_of_it_closes_it() {
        let mut clock = Clock::new();
        // What is written is undone at once, and that wakes it, too.
        for undone in [false, true] {
            clock.wake("a", Wake::Parent);
            let (since, mut run) = (clock.now, clock.due().unwrap());
            let next = |clock: &mut Clock, run| {
                clock.done(run, Next::Again);
                if undone {
                    clock.wake("a", Wake::Child);
                }
                clock.wait()
            };
            let mut runs = 0;
            while !run.circuit_open {
                clock.pass(Duration::from_millis(20));
                run = next(&mut clock, run).1;
                runs += 1;
            }
            assert!((100..110).contains(&runs), "{runs} runs");
            assert_eq!(clock.schedule.figures(clock.now).open_circuits, 1);
            let mut rare = 0;
            while run.circuit_open {
                let (waited, again) = next(&mut clock, run);
                assert!(waited == OPEN_CIRCUIT_INTERVAL || !again.circuit_open, "{waited:?}");
                run = again;
                rare += 1;
            }
            assert!(rare <= 11 && clock.now - since >= Duration::from_mins(5), "{rare} in {:?}", clock.now - since);
            clock.done(run, Next::OnChange);
        }
        assert_eq!(clock.schedule.figures(clock.now).open_circuits, 0);
    }

    #[test]
    fn children_that_change_without_end_wake_their_parent_each_second_and_open_no_circuit() {
        let mut clock = Clock::new();
        let mut runs = 0;
        for _ in 0..100 * 60 {
            clock.wake("a", Wake::Child);
            if let Some(run) = clock.due() {
                assert!(!run.circuit_open);
                clock.done(run, Next::OnChange);
                runs += 1;
            }
            clock.pass(Duration::from_millis(10));
        }
        assert!((100..=120).contains(&runs), "{runs} runs in a minute");
    }

    #[test]
    fn an_open_circuit_holds_back_no_edit_and_is_told_to_be_closed_though_nothing_happens() {
        let mut clock = Clock::new();
        let open = |clock: &mut Clock| {
            clock.wake("a", Wake::Child);
            loop {
                let run = clock.due().expect("it is due");
                if run.circuit_open {
                    return clock.done(run, Next::OnChange);
                }
                clock.done(run, Next::Again);
            }
        };
        open(&mut clock);
        clock.wake("a", Wake::Child);
        assert!(clock.due().is_none());
        for wake in [Wake::Parent, Wake::Resync] {
            clock.wake("a", wake);
            let run = clock.due().expect("it is due at once");
            assert!(run.circuit_open);
            clock.done(run, Next::Terminal);
        }
        let (waited, run) = clock.wait();
        assert!(!run.circuit_open && waited <= Duration::from_mins(5), "{waited:?}");
        clock.done(run, Next::OnChange);
        // Of one that is gone nothing is left to tell.
        open(&mut clock);
        clock.wake("a", Wake::Parent);
        let run = clock.due().unwrap();
        clock.done(run, Next::Forget);
        assert!(clock.schedule.items.is_empty());
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
        assert!(clock.schedule.items.is_empty() && clock.schedule.waiting.iter().all(BTreeMap::is_empty));
    }

    #[test]
    fn the_figures_count_what_becomes_due_once_at_its_time() {
        let mut clock = Clock::new();
        let figures = |clock: &Clock| clock.schedule.figures(clock.now);
        clock.wake("a", Wake::Parent);
        clock.wake("a", Wake::Child);
        clock.wake("b", Wake::Parent);
        assert_eq!(figures(&clock), Figures { due: [2, 0, 0, 0, 0], adds: 2, ..Figures::default() });
        clock.pass(Duration::from_secs(2));
        let a = clock.due().unwrap();
        assert_eq!(a.waited, Duration::from_secs(2));
        clock.pass(Duration::from_secs(1));
        assert_eq!(
            figures(&clock),
            Figures { due: [1, 0, 0, 0, 0], running: vec![Duration::from_secs(1)], adds: 2, ..Figures::default() }
        );
        clock.done(a, Next::Failed(Some(Duration::from_secs(5))));
        let b = clock.due().unwrap();
        clock.done(b, Next::OnChange);
        assert_eq!(figures(&clock), Figures { adds: 2, retries: 1, ..Figures::default() });
        clock.pass(Duration::from_secs(7));
        assert_eq!(figures(&clock), Figures { due: [0, 0, 0, 1, 0], adds: 3, retries: 1, ..Figures::default() });
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
