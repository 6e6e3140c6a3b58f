//! A staged rollout: which parents the new revision has, and what is to be done next. Pure.
//!
//! Which parents it has is decided by their UIDs, the same for each revision and each host: a parent that has gone over stays over while the
//! share grows, and goes back when it becomes none. What was wrong with a parent before the rollout began is not held against it, and
//! that is read from the conditions of the parent, which outlive a host.

use std::time::Duration;

use jiff::Timestamp;
use sha2::{Digest as _, Sha256};

use crate::crd::{Preview, Rollout, RolloutState, RolloutStatus, Strategy};

/// How many places there are for parents to stand in.
const PLACES: u64 = 10_000;
/// How long a parent has to fail before it counts. A request that was refused for a moment has been tried again some times by then.
const FAILING: Duration = Duration::from_secs(30);

/// Where a parent stands among all: those in front go over first. The same for ever.
pub fn place(uid: &str) -> u64 {
    let digest = Sha256::digest(uid);
    let first: [u8; 8] = std::array::from_fn(|at| digest[at]);
    u64::from_be_bytes(first) % PLACES
}

/// Whether a parent of this UID is among so many percent of all.
pub fn is_among(uid: &str, percent: u8) -> bool {
    place(uid) < u64::from(percent) * PLACES / 100
}

/// How the parents of the new revision are. Those that are paused or being deleted do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// All parents of the reconciler.
    pub all: usize,
    /// Those that the new revision has.
    pub parents: usize,
    /// Of these, those that were reconciled with it.
    pub reconciled: usize,
    /// Those that fail, and did not when the rollout began.
    pub failing: usize,
    /// Of these, those that have failed for longer than a moment.
    pub failing_for_long: usize,
    /// Those that are not ready, and were when the rollout began, or were not there yet.
    pub not_ready: usize,
}

/// How one of these parents is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Since when its reconciles fail.
    pub failing: Option<Timestamp>,
    /// Since when it is not ready.
    pub not_ready: Option<Timestamp>,
}

impl Standing {
    /// One more parent that the new revision has; none: it was not reconciled with it yet.
    pub fn add(&mut self, health: Option<Health>, started: Timestamp, now: Timestamp) {
        self.parents += 1;
        let Some(health) = health else { return };
        self.reconciled += 1;
        let since = |since: Option<Timestamp>| since.filter(|since| *since >= started);
        if let Some(since) = since(health.failing) {
            self.failing += 1;
            self.failing_for_long += usize::from(elapsed(since, now) >= FAILING);
        } else {
            self.not_ready += usize::from(since(health.not_ready).is_some());
        }
    }
}

/// How far a rollout has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The share of the parents that the new revision has.
    pub percent: u8,
    /// Since when.
    pub since: Timestamp,
    /// Whether somebody has said that it goes on, whatever the guards say.
    pub allowed: bool,
    /// Whether the reconciler is paused.
    pub paused: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing, and why.
    Wait(Wait),
    /// The new revision gets this share of the parents.
    Step(u8),
    /// It has all of them, and they are well.
    Complete,
    /// It goes, for this reason.
    RollBack(String),
}

/// What a rollout waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Until its reconciler is no longer paused.
    Paused,
    /// Until the pause of the step is over.
    Until(Timestamp),
    /// Until its parents are reconciled.
    Reconciled,
    /// Until they are well.
    Guards,
}

/// Decides what to do next.
pub fn next(rollout: &Rollout, progress: Progress, standing: &Standing, now: Timestamp) -> Decision {
    let guards = &rollout.guards;
    let guarded = !progress.allowed;
    if progress.paused {
        return Decision::Wait(Wait::Paused);
    }
    if guarded && guards.max_failing.is_exceeded(standing.failing_for_long, standing.parents) {
        return Decision::RollBack(format!(
            "{} of the {} parents that it had fail, and spec.rollout.guards.maxFailing is {}",
            standing.failing_for_long,
            standing.parents,
            String::from(guards.max_failing)
        ));
    }
    if rollout.strategy == Strategy::Immediate {
        return Decision::Complete;
    }
    let pause = pause(rollout, progress.percent);
    let over = progress.since.saturating_add(signed(pause)).unwrap_or(Timestamp::MAX);
    if now < over {
        return Decision::Wait(Wait::Until(over));
    }
    let reconciled = standing.reconciled == standing.parents;
    let well = !guards.max_failing.is_exceeded(standing.failing, standing.parents)
        && !guards.max_not_ready.is_exceeded(standing.not_ready, standing.parents);
    if reconciled && (well || !guarded) {
        let next = rollout.steps.iter().map(|step| step.percent).find(|percent| *percent > progress.percent);
        return match next {
            _ if progress.percent >= 100 => Decision::Complete,
            next => Decision::Step(next.unwrap_or(100)),
        };
    }
    let waited = elapsed(over, now);
    if guarded && waited >= rollout.progress_deadline.0 {
        return Decision::RollBack(format!(
            "of the {} parents that it had {} are not reconciled, {} fail and {} are not ready, {:?} after the pause of the step",
            standing.parents,
            standing.parents - standing.reconciled,
            standing.failing,
            standing.not_ready,
            Duration::from_secs(waited.as_secs()),
        ));
    }
    Decision::Wait(if reconciled { Wait::Guards } else { Wait::Reconciled })
}

/// How a revision that is asked for comes to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At once: nothing has served before, it has served already, or nobody wants to look at it first.
    Directly,
    /// Where it was when the host ended.
    Resume,
    /// As the spec says, beside the one that serves.
    Beside,
    /// It does not: it was refused or rolled back, and nothing has changed since.
    Refused,
}

/// Decides how the revision `desired` comes to serve. `good` is the one that serves, or did when the last host ended, `before` the latest
/// rollout; `allowed` says whether somebody lets it take over, whatever the guards say.
pub fn start(
    desired: &str,
    good: Option<&str>,
    before: Option<&RolloutStatus>,
    rollout: &Rollout,
    generation: Option<i64>,
    allowed: bool,
) -> Start {
    let Some(good) = good.filter(|good| *good != desired) else { return Start::Directly };
    let latest = before.filter(|before| before.revision == desired).map(|before| (before.state, before));
    let is_way_back = |before: &RolloutStatus| {
        before.state == RolloutState::Complete && before.revision == good && before.from.as_deref() == Some(desired)
    };
    match latest {
        Some((RolloutState::Refused | RolloutState::RolledBack, before))
            if before.generation == generation && before.reason != WITHDRAWN && !allowed =>
        {
            Start::Refused
        }
        Some((RolloutState::Progressing | RolloutState::Paused, before)) if before.from.as_deref() == Some(good) => {
            Start::Resume
        }
        // The one before is known to everybody, and wanted in a hurry.
        _ if before.is_some_and(is_way_back) => Start::Directly,
        _ if rollout.strategy == Strategy::Immediate && rollout.preview == Preview::Off => Start::Directly,
        _ => Start::Beside,
    }
}

/// Why a revision was rolled back that the spec no longer asks for.
pub const WITHDRAWN: &str = "Withdrawn";

/// What a person reads of a rollout that goes on.
pub fn describe(rollout: &Rollout, status: &RolloutStatus, standing: &Standing, wait: Wait) -> String {
    let (step, steps) = step_of(rollout, status.percent);
    let wait = match wait {
        Wait::Paused => "the reconciler is paused".to_owned(),
        Wait::Until(at) => format!("next at {}", at.strftime("%Y-%m-%dT%H:%M:%SZ")),
        Wait::Reconciled => {
            format!("waits for {} of them to be reconciled", standing.parents.saturating_sub(standing.reconciled))
        }
        Wait::Guards => {
            format!("waits until they are well: {} fail, {} are not ready", standing.failing, standing.not_ready)
        }
    };
    format!(
        "{} of {} parents on revision {}, step {step} of {steps}, {wait}",
        standing.reconciled, standing.all, status.revision
    )
}

/// Which step has this share, from 1, and how many there are.
pub fn step_of(rollout: &Rollout, percent: u8) -> (usize, usize) {
    let before = rollout.steps.iter().filter(|step| step.percent < percent).count();
    let has_last = rollout.steps.last().is_some_and(|step| step.percent == 100);
    (before + 1, rollout.steps.len() + usize::from(!has_last))
}

/// The share of the first step.
pub fn first(rollout: &Rollout) -> u8 {
    rollout.steps.first().map_or(100, |step| step.percent)
}

fn pause(rollout: &Rollout, percent: u8) -> Duration {
    let step = rollout.steps.iter().rev().find(|step| step.percent == percent);
    step.and_then(|step| step.pause).map_or(Duration::ZERO, |pause| pause.0)
}

fn elapsed(since: Timestamp, now: Timestamp) -> Duration {
    now.duration_since(since).try_into().unwrap_or_default()
}

fn signed(duration: Duration) -> jiff::SignedDuration {
    duration.try_into().unwrap_or(jiff::SignedDuration::MAX)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::crd::{Percent, RolloutStep, Timeout};

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    /// 10 % for a minute, 50 % without a pause, and the rest; ten minutes of patience.
    fn rollout() -> Rollout {
        let step = |percent, pause: Option<u64>| RolloutStep {
            percent,
            pause: pause.map(|seconds| Timeout(Duration::from_secs(seconds))),
        };
        Rollout { strategy: Strategy::Staged, steps: vec![step(10, Some(60)), step(50, None)], ..Rollout::default() }
    }

    fn well(parents: usize) -> Standing {
        Standing { all: 100, parents, reconciled: parents, ..Standing::default() }
    }

    fn progress(percent: u8) -> Progress {
        Progress { percent, since: at(0), allowed: false, paused: false }
    }

    #[test]
    fn a_share_is_the_same_parents_each_time_and_grows_by_more_of_them() {
        let uids: Vec<_> = (0..2000).map(|n| format!("8a6e0804-2bd0-4672-b79d-{n:012}")).collect();
        let among = |percent| uids.iter().filter(|uid| is_among(uid, percent)).collect::<Vec<_>>();
        assert!(among(0).is_empty());
        assert_eq!(among(100).len(), 2000);
        for (less, more) in [(5, 25), (25, 50), (50, 100)] {
            assert!(among(less).iter().all(|uid| among(more).contains(uid)));
            let share = among(less).len() * 100 / 2000;
            assert!(share.abs_diff(usize::from(less)) <= 3, "{share} of {less}");
        }
        // For ever: a host of another release takes over in the midst.
        assert_eq!(place("8a6e0804-2bd0-4672-b79d-d97027f9071a"), 6578);
    }

    #[test]
    fn a_step_lasts_for_its_pause_and_until_its_parents_are_reconciled_and_well() {
        let unreconciled = Standing { reconciled: 9, ..well(10) };
        let failing = Standing { failing: 2, ..well(10) };
        let for_long = Standing { failing_for_long: 2, ..failing };
        let not_ready = Standing { not_ready: 2, ..well(10) };
        let one_not_ready = Standing { not_ready: 1, ..well(10) };
        let until = Decision::Wait(Wait::Until(at(60)));
        for (percent, standing, now, expected) in [
            (10, well(10), 0, until.clone()),
            (10, well(10), 59, until.clone()),
            (10, well(10), 60, Decision::Step(50)),
            // Nobody is among so few.
            (10, well(0), 60, Decision::Step(50)),
            (10, one_not_ready, 60, Decision::Step(50)),
            (50, well(50), 0, Decision::Step(100)),
            (100, well(100), 0, Decision::Complete),
            (100, Standing { reconciled: 99, ..well(100) }, 0, Decision::Wait(Wait::Reconciled)),
            // The spec has other steps now.
            (30, well(30), 0, Decision::Step(50)),
            // It takes time until Pods are ready, and an API server can refuse for a moment.
            (10, not_ready, 30, until.clone()),
            (10, not_ready, 60, Decision::Wait(Wait::Guards)),
            (10, not_ready, 659, Decision::Wait(Wait::Guards)),
            (10, unreconciled, 60, Decision::Wait(Wait::Reconciled)),
            (10, failing, 30, until),
            (10, failing, 60, Decision::Wait(Wait::Guards)),
        ] {
            assert_eq!(next(&rollout(), progress(percent), &standing, at(now)), expected, "{standing:?} at {now}");
        }
        for (standing, now, words) in [
            (for_long, 31, "2 of the 10 parents that it had fail, and spec.rollout.guards.maxFailing is 10%"),
            (not_ready, 660, "0 are not reconciled, 0 fail and 2 are not ready, 600s after"),
            (unreconciled, 660, "1 are not reconciled"),
        ] {
            let Decision::RollBack(reason) = next(&rollout(), progress(10), &standing, at(now)) else {
                panic!("{standing:?} at {now} goes on")
            };
            assert!(reason.contains(words), "{reason}");
        }
    }

    #[test]
    fn who_pauses_the_reconciler_or_allows_the_revision_or_wants_it_at_once_is_heard() {
        let bad = Standing { failing: 10, failing_for_long: 10, not_ready: 10, ..well(10) };
        let paused = Progress { paused: true, ..progress(10) };
        assert_eq!(next(&rollout(), paused, &bad, at(900)), Decision::Wait(Wait::Paused));
        let allowed = Progress { allowed: true, ..progress(10) };
        assert_eq!(next(&rollout(), allowed, &bad, at(30)), Decision::Wait(Wait::Until(at(60))));
        assert_eq!(next(&rollout(), allowed, &bad, at(60)), Decision::Step(50));
        let unreconciled = Standing { reconciled: 9, ..well(10) };
        assert_eq!(next(&rollout(), allowed, &unreconciled, at(9000)), Decision::Wait(Wait::Reconciled));
        let at_once = Rollout { strategy: Strategy::Immediate, ..rollout() };
        assert_eq!(next(&at_once, progress(10), &unreconciled, at(1)), Decision::Complete);
        let mut open = rollout();
        open.guards.max_failing = Percent(100);
        open.guards.max_not_ready = Percent(100);
        assert_eq!(next(&open, progress(10), &bad, at(60)), Decision::Step(50));
    }

    #[test]
    fn what_was_wrong_before_does_not_count() {
        let health = |failing: Option<i64>, not_ready: Option<i64>| {
            Some(Health { failing: failing.map(at), not_ready: not_ready.map(at) })
        };
        let mut standing = Standing::default();
        for health in [
            None,
            health(None, None),
            health(Some(-10), Some(-10)),
            health(Some(0), Some(0)),
            health(Some(31), Some(-5)),
            health(None, Some(50)),
        ] {
            standing.add(health, at(0), at(60));
        }
        let expected = Standing { parents: 6, reconciled: 5, failing: 2, failing_for_long: 1, not_ready: 1, all: 0 };
        assert_eq!(standing, expected);
    }

    #[test]
    fn how_a_revision_comes_to_serve_is_decided_by_what_became_of_the_latest() {
        let status = |revision: &str, from: &str, state, reason: &str| RolloutStatus {
            revision: revision.to_owned(),
            from: Some(from.to_owned()),
            state,
            reason: reason.to_owned(),
            message: String::new(),
            step: None,
            percent: 0,
            started: Time(at(0)),
            since: Time(at(0)),
            generation: Some(7),
            preview: None,
        };
        use RolloutState::{Complete, Paused, Progressing, Refused, RolledBack};
        let ask =
            |desired, before: Option<&RolloutStatus>| start(desired, Some("good"), before, &rollout(), Some(7), false);
        assert_eq!(start("new", None, None, &rollout(), Some(7), false), Start::Directly);
        assert_eq!(ask("good", None), Start::Directly);
        assert_eq!(ask("new", None), Start::Beside);
        for (revision, from, state, reason, expected) in [
            ("new", "good", Progressing, "", Start::Resume),
            ("new", "good", Paused, "", Start::Resume),
            // What it began with is not what serves now.
            ("new", "other", Progressing, "", Start::Beside),
            ("other", "good", Progressing, "", Start::Beside),
            ("new", "good", Refused, "RolloutGuarded", Start::Refused),
            ("new", "good", RolledBack, "RolledBack", Start::Refused),
            ("other", "good", RolledBack, "RolledBack", Start::Beside),
            ("new", "good", RolledBack, WITHDRAWN, Start::Beside),
            ("good", "new", Complete, "", Start::Directly),
            ("good", "other", Complete, "", Start::Beside),
            ("other", "new", Complete, "", Start::Beside),
        ] {
            let before = status(revision, from, state, reason);
            assert_eq!(ask("new", Some(&before)), expected, "{before:?}");
        }
        let refused = status("new", "good", Refused, "RolloutGuarded");
        assert_eq!(start("new", Some("good"), Some(&refused), &rollout(), Some(8), false), Start::Beside);
        assert_eq!(start("new", Some("good"), Some(&refused), &rollout(), Some(7), true), Start::Beside);
        let blind = Rollout { preview: Preview::Off, ..Rollout::default() };
        assert_eq!(start("new", Some("good"), None, &blind, Some(7), false), Start::Directly);
        assert_eq!(start("new", Some("good"), Some(&refused), &blind, Some(7), false), Start::Refused);
        assert_eq!(start("new", Some("good"), None, &Rollout::default(), Some(7), false), Start::Beside);
    }

    #[test]
    fn the_last_step_has_all_of_them_whether_it_is_written_down_or_not() {
        let mut written = rollout();
        written.steps.push(RolloutStep { percent: 100, pause: None });
        for rollout in [rollout(), written] {
            assert_eq!([10, 50, 100].map(|percent| step_of(&rollout, percent)), [(1, 3), (2, 3), (3, 3)]);
        }
        let none = Rollout { steps: Vec::new(), ..rollout() };
        assert_eq!((first(&none), step_of(&none, 100)), (100, (1, 1)));
    }
}
