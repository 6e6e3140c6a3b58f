//! How the parents of one reconciler are, counted: for its status and for `/metrics`. Pure.
//!
//! Each reconcile that comes to an outcome is noted once, by the UID of its parent. A host that starts knows nothing of its parents
//! yet, so the counts are no news until each parent that it has found was reconciled once.

use std::collections::{HashMap, HashSet};

use crate::crd::ParentCounts;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Tally {
    /// The revision that serves.
    active: String,
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
    current: bool,
    ready: bool,
    failing: bool,
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
}

impl Tally {
    /// Empty, of parents that this revision reconciles.
    pub fn of(active: &str) -> Self {
        Self { active: active.to_owned(), ..Self::default() }
    }

    /// These are the parents that there are at the start.
    pub fn start(&mut self, uids: impl IntoIterator<Item = String>) {
        self.awaited = Some(uids.into_iter().filter(|uid| !self.parents.contains_key(uid)).collect());
    }

    /// Another revision serves from now on: no parent is reconciled with it yet.
    pub fn serve(&mut self, active: &str) {
        if self.active == active {
            return;
        }
        active.clone_into(&mut self.active);
        self.current = 0;
        self.parents.values_mut().for_each(|standing| standing.current = false);
    }

    /// A reconcile of this parent has come to an outcome.
    pub fn note(&mut self, uid: &str, outcome: Outcome<'_>) {
        let before = self.parents.get(uid).copied().unwrap_or_default();
        let now = Standing {
            current: outcome.succeeded && outcome.revision == self.active,
            ready: outcome.ready.unwrap_or(before.ready),
            failing: !outcome.succeeded,
        };
        self.replace(before, now);
        match self.parents.get_mut(uid) {
            Some(known) => *known = now,
            None => drop(self.parents.insert(uid.to_owned(), now)),
        }
        self.no_longer_awaited(uid);
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
            (&mut self.current, before.current, now.current),
            (&mut self.ready, before.ready, now.ready),
            (&mut self.failing, before.failing, now.failing),
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

    fn good(revision: &str) -> Outcome<'_> {
        Outcome { revision, succeeded: true, ready: Some(true) }
    }

    fn counts(tally: &Tally) -> (u32, u32, u32) {
        let ParentCounts { current, ready, failing, .. } = tally.counts(0);
        (current, ready, failing)
    }

    #[test]
    fn each_parent_counts_once_as_it_last_was() {
        let mut tally = Tally::of("r1");
        tally.note("a", good("r1"));
        tally.note("a", good("r1"));
        tally.note("b", Outcome { ready: Some(false), ..good("r1") });
        assert_eq!(counts(&tally), (2, 1, 0));
        // A failure says nothing of what is there already.
        tally.note("a", Outcome { revision: "r1", succeeded: false, ready: None });
        assert_eq!(counts(&tally), (1, 1, 1));
        tally.note("a", good("r1"));
        assert_eq!(counts(&tally), (2, 1, 0));
        tally.forget("a");
        tally.forget("a");
        assert_eq!(counts(&tally), (1, 0, 0));
        assert_eq!(tally.counts(7).total, 7);
    }

    #[test]
    fn a_new_revision_has_no_parents_at_first() {
        let mut tally = Tally::of("r1");
        tally.note("a", good("r1"));
        tally.note("b", good("r1"));
        tally.serve("r1");
        assert_eq!(counts(&tally), (2, 2, 0));
        tally.serve("r2");
        assert_eq!(counts(&tally), (0, 2, 0));
        // It was under way when the revision changed.
        tally.note("a", good("r1"));
        assert_eq!(counts(&tally), (0, 2, 0));
        tally.note("a", good("r2"));
        assert_eq!(counts(&tally), (1, 2, 0));
    }

    #[test]
    fn it_is_complete_when_each_parent_of_the_start_is_known() {
        let mut tally = Tally::of("r1");
        tally.note("early", good("r1"));
        assert!(!tally.is_complete());
        tally.start(["early", "a", "b"].map(str::to_owned));
        assert!(!tally.is_complete());
        tally.note("a", good("r1"));
        tally.note("new", good("r1"));
        assert!(!tally.is_complete());
        tally.forget("b");
        assert!(tally.is_complete());
        let mut none = Tally::of("r1");
        none.start([]);
        assert!(none.is_complete());
    }
}
