//! How the parents of one reconciler are, counted: for its status and for `/metrics`. Pure.
//!
//! Each reconcile that comes to an outcome is noted once, by the UID of its parent. A host that starts knows nothing of its parents
//! yet, so the counts are no news until each parent that it has found was reconciled once.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;

use crate::{crd::ParentCounts, rollout::Health};

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Tally {
    /// The revision that serves.
    active: String,
    /// The one that takes over from it, step by step.
    candidate: Option<String>,
    parents: HashMap<String, Standing>,
    /// Those that were there at the start, and of which nothing is known yet. None: they have not been listed yet.
    awaited: Option<HashSet<String>>,
    current: u32,
    ready: u32,
    failing: u32,
}

/// How a parent is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Standing {
    with: With,
    ready: bool,
    health: Health,
}

/// What a parent was last reconciled with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum With {
    /// The revision that serves.
    Active,
    /// The one that takes over from it.
    Candidate,
    /// One of before.
    #[default]
    Former,
}

impl Standing {
    fn is_current(&self) -> bool {
        self.with == With::Active && !self.is_failing()
    }

    fn is_failing(&self) -> bool {
        self.health.failing.is_some()
    }
}

/// What came of a reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome<'a> {
    /// The revision that it was done with.
    pub revision: &'a str,
    /// Whether it came to its end.
    pub succeeded: bool,
    /// The condition `Ready`. None: nothing new is known of it.
    pub ready: Option<bool>,
    /// Now.
    pub now: Timestamp,
}

impl Tally {
    /// These are the parents that there are at the start.
    pub fn start(&mut self, uids: impl IntoIterator<Item = String>) {
        self.awaited = Some(uids.into_iter().filter(|uid| !self.parents.contains_key(uid)).collect());
    }

    /// This revision serves from now on, and that one takes over from it. Those that were reconciled with another are to be reconciled again.
    pub fn serve(&mut self, active: &str, candidate: Option<&str>) {
        if self.active == active && self.candidate.as_deref() == candidate {
            return;
        }
        let with = |before: With| {
            let revision = match before {
                With::Active => Some(self.active.as_str()),
                With::Candidate => self.candidate.as_deref(),
                With::Former => None,
            };
            match revision {
                Some(revision) if revision == active => With::Active,
                Some(revision) if Some(revision) == candidate => With::Candidate,
                _ => With::Former,
            }
        };
        let (of_active, of_candidate) = (with(With::Active), with(With::Candidate));
        self.current = 0;
        for standing in self.parents.values_mut() {
            standing.with = match standing.with {
                With::Active => of_active,
                With::Candidate => of_candidate,
                With::Former => With::Former,
            };
            self.current += u32::from(standing.is_current());
        }
        active.clone_into(&mut self.active);
        self.candidate = candidate.map(str::to_owned);
    }

    /// A reconcile of this parent has come to an outcome. `before` is how it was, as far as it is known to itself; it is asked for only if it
    /// is not known here.
    pub fn note(&mut self, uid: &str, outcome: Outcome<'_>, before: impl FnOnce() -> Health) {
        let known = self.parents.get(uid).copied();
        let health = known.map_or_else(before, |known| known.health);
        let ready = outcome.ready.unwrap_or_else(|| known.is_some_and(|known| known.ready));
        let with = match Some(outcome.revision) {
            revision if revision == Some(self.active.as_str()) => With::Active,
            revision if revision == self.candidate.as_deref() => With::Candidate,
            _ => With::Former,
        };
        let since = |is: bool, since: Option<Timestamp>| is.then(|| since.unwrap_or(outcome.now));
        let health =
            Health { failing: since(!outcome.succeeded, health.failing), not_ready: since(!ready, health.not_ready) };
        let now = Standing { with, ready, health };
        self.replace(known.unwrap_or_default(), now);
        match self.parents.get_mut(uid) {
            Some(known) => *known = now,
            None => drop(self.parents.insert(uid.to_owned(), now)),
        }
        self.no_longer_awaited(uid);
    }

    /// How a parent is, if it was last reconciled with the revision that takes over.
    pub fn with_candidate(&self, uid: &str) -> Option<Health> {
        self.parents.get(uid).filter(|standing| standing.with == With::Candidate).map(|standing| standing.health)
    }

    /// This parent is gone, or none of ours any more.
    pub fn forget(&mut self, uid: &str) {
        if let Some(before) = self.parents.remove(uid) {
            self.replace(before, Standing::default());
        }
        self.no_longer_awaited(uid);
    }

    /// Whether anything is known of this parent.
    pub fn knows(&self, uid: &str) -> bool {
        self.parents.contains_key(uid)
    }

    /// Whether each parent that was there at the start is known by now.
    pub fn is_complete(&self) -> bool {
        self.awaited.as_ref().is_some_and(HashSet::is_empty)
    }

    /// The counts, of so many selected parents.
    pub fn counts(&self, total: usize) -> ParentCounts {
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        ParentCounts { total, current: self.current, ready: self.ready, failing: self.failing }
    }

    fn replace(&mut self, before: Standing, now: Standing) {
        for (count, before, now) in [
            (&mut self.current, before.is_current(), now.is_current()),
            (&mut self.ready, before.ready, now.ready),
            (&mut self.failing, before.is_failing(), now.is_failing()),
        ] {
            // What was counted is there to be taken back.
            *count = count.saturating_add(u32::from(now)).saturating_sub(u32::from(before));
        }
    }

    fn no_longer_awaited(&mut self, uid: &str) {
        if let Some(awaited) = self.awaited.as_mut().filter(|awaited| !awaited.is_empty()) {
            awaited.remove(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_r1() -> Tally {
        let mut tally = Tally::default();
        tally.serve("r1", None);
        tally
    }

    fn good(revision: &str) -> Outcome<'_> {
        Outcome { revision, succeeded: true, ready: Some(true), now: at(100) }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn note(tally: &mut Tally, uid: &str, outcome: Outcome<'_>) {
        tally.note(uid, outcome, Health::default);
    }

    fn counts(tally: &Tally) -> (u32, u32, u32) {
        let ParentCounts { current, ready, failing, .. } = tally.counts(0);
        (current, ready, failing)
    }

    #[test]
    fn each_parent_counts_once_as_it_last_was() {
        let mut tally = of_r1();
        note(&mut tally, "a", good("r1"));
        note(&mut tally, "a", good("r1"));
        note(&mut tally, "b", Outcome { ready: Some(false), ..good("r1") });
        assert_eq!(counts(&tally), (2, 1, 0));
        // A failure says nothing of what is there already.
        note(&mut tally, "a", Outcome { succeeded: false, ready: None, ..good("r1") });
        assert_eq!(counts(&tally), (1, 1, 1));
        note(&mut tally, "a", good("r1"));
        assert_eq!(counts(&tally), (2, 1, 0));
        tally.forget("a");
        tally.forget("a");
        assert_eq!(counts(&tally), (1, 0, 0));
        assert_eq!(tally.counts(7).total, 7);
    }

    #[test]
    fn a_new_revision_has_no_parents_at_first() {
        let mut tally = of_r1();
        note(&mut tally, "a", good("r1"));
        note(&mut tally, "b", good("r1"));
        tally.serve("r1", None);
        assert_eq!(counts(&tally), (2, 2, 0));
        tally.serve("r2", None);
        assert_eq!(counts(&tally), (0, 2, 0));
        // It was under way when the revision changed.
        note(&mut tally, "a", good("r1"));
        assert_eq!(counts(&tally), (0, 2, 0));
        note(&mut tally, "a", good("r2"));
        assert_eq!(counts(&tally), (1, 2, 0));
    }

    #[test]
    fn the_parents_of_a_revision_that_takes_over_stay_its_parents_when_it_serves() {
        let mut tally = of_r1();
        note(&mut tally, "a", good("r1"));
        note(&mut tally, "b", good("r1"));
        tally.serve("r1", Some("r2"));
        assert_eq!((counts(&tally), tally.with_candidate("b")), ((2, 2, 0), None));
        note(&mut tally, "b", good("r2"));
        assert_eq!((counts(&tally), tally.with_candidate("b")), ((1, 2, 0), Some(Health::default())));
        tally.serve("r2", None);
        assert_eq!(counts(&tally), (1, 2, 0));
        // Or it does not serve: they are to go back.
        tally.serve("r2", Some("r3"));
        note(&mut tally, "a", good("r3"));
        tally.serve("r2", None);
        assert_eq!((counts(&tally), tally.with_candidate("a")), ((1, 2, 0), None));
        // Nor does another that takes its place have them.
        tally.serve("r2", Some("r4"));
        assert_eq!(tally.with_candidate("a"), None);
    }

    #[test]
    fn a_parent_is_unwell_since_it_became_so_as_it_says_itself_if_the_host_is_new() {
        let mut tally = of_r1();
        tally.serve("r1", Some("r2"));
        let failed = Outcome { succeeded: false, ready: Some(false), ..good("r2") };
        let health = |failing, not_ready| Some(Health { failing, not_ready });
        note(&mut tally, "a", failed);
        note(&mut tally, "a", Outcome { now: at(200), ..failed });
        assert_eq!(tally.with_candidate("a"), health(Some(at(100)), Some(at(100))));
        note(&mut tally, "a", Outcome { ready: None, now: at(300), ..good("r2") });
        assert_eq!(tally.with_candidate("a"), health(None, Some(at(100))));
        tally.note("b", failed, || Health { failing: Some(at(7)), not_ready: None });
        assert_eq!(tally.with_candidate("b"), health(Some(at(7)), Some(at(100))));
        tally.note("c", good("r2"), || Health { failing: Some(at(7)), not_ready: Some(at(7)) });
        assert_eq!(tally.with_candidate("c"), health(None, None));
    }

    #[test]
    fn it_is_complete_when_each_parent_of_the_start_is_known() {
        let mut tally = of_r1();
        note(&mut tally, "early", good("r1"));
        assert!(!tally.is_complete());
        tally.start(["early", "a", "b"].map(str::to_owned));
        assert!(!tally.is_complete());
        note(&mut tally, "a", good("r1"));
        note(&mut tally, "new", good("r1"));
        assert!(!tally.is_complete());
        tally.forget("b");
        assert!(tally.is_complete());
        let mut none = of_r1();
        none.start([]);
        assert!(none.is_complete());
    }
}
