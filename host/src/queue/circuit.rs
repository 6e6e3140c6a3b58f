//! What ends a runaway loop: a budget of runs that one parent may have for the sake of its children.
//!
//! Two writers of a field that never agree, or a plugin that makes a child of another name each time, keep a parent busy for ever, and
//! with it a worker and the API server. So each such run spends a part of a budget, which comes back with time. When half of it is
//! gone, children wake the parent no faster than it comes back: many children that start, each with many changes, get no further
//! than that. Who writes in such a run spends twice, since another follows to see what came of it. Once all is gone the circuit opens,
//! and for a while children wake the parent but rarely. It closes by itself. The model is Crossplane's, and so are most numbers.

use std::time::{Duration, Instant};

/// How many runs may follow each other at once: more than any plugin needs to settle.
const BURST: u32 = 100;
/// How long it takes until a run that was spent may be spent again.
pub(super) const REFILL: Duration = Duration::from_secs(1);
/// How long it stays open: who looks once in a few minutes sees it, and a loop that goes on is told of as often, no more.
const COOLDOWN: Duration = Duration::from_mins(5);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Circuit {
    /// When the whole budget is there again.
    full_at: Option<Instant>,
    open_until: Option<Instant>,
}

impl Circuit {
    /// A run for the sake of children begins.
    pub(super) fn spend(&mut self, now: Instant) {
        if self.open_until(now).is_some() {
            return;
        }
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + REFILL;
        // By the time that it closes the budget is full.
        (self.full_at, self.open_until) =
            if full_at - now >= REFILL * BURST { (None, Some(now + COOLDOWN)) } else { (Some(full_at), None) };
    }

    /// Whether half of the budget is gone.
    pub(super) fn is_strained(&self, now: Instant) -> bool {
        self.full_at.is_some_and(|full_at| full_at > now + REFILL * BURST / 2)
    }

    /// Until when it is open. None: it is closed.
    pub(super) fn open_until(&self, now: Instant) -> Option<Instant> {
        self.open_until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_when_the_budget_is_spent_and_closes_by_itself_with_a_whole_one() {
        let (mut circuit, mut now) = (Circuit::default(), Instant::now());
        for _ in 0..2 {
            for spent in 1..BURST {
                circuit.spend(now);
                assert_eq!(circuit.is_strained(now), spent > BURST / 2);
            }
            assert_eq!(circuit.open_until(now), None);
            circuit.spend(now);
            assert_eq!(circuit.open_until(now), Some(now + COOLDOWN));
            // What is spent meanwhile keeps it open no longer.
            now += COOLDOWN / 2;
            circuit.spend(now);
            assert_eq!(circuit.open_until(now), Some(now + COOLDOWN / 2));
            now += COOLDOWN / 2;
            assert_eq!(circuit.open_until(now), None);
        }
    }

    #[test]
    fn who_spends_no_more_than_comes_back_never_opens_it() {
        let (mut circuit, mut now) = (Circuit::default(), Instant::now());
        for _ in 2..BURST {
            circuit.spend(now);
        }
        for _ in 0..10 * BURST {
            now += REFILL;
            circuit.spend(now);
            assert_eq!(circuit.open_until(now), None);
        }
        for _ in 0..2 {
            circuit.spend(now);
        }
        assert!(circuit.open_until(now).is_some());
    }
}
