//! Which Events were published lately: one that is published again is counted in the object that is there, as `series` (events.k8s.io/v1). Pure.
//!
//! What is forgotten costs an object more, so what is kept has a bound: a host that sees many parents come and go does not grow by them.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::{BuildHasher as _, Hash},
};

use jiff::{SignedDuration, Timestamp};

/// A series that has not gone on for so long has ended, as client-go has it.
const SERIES_ENDS: SignedDuration = SignedDuration::from_mins(6);

/// How many are kept.
const MOST: usize = 1000;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Recent {
    hasher: RandomState,
    published: HashMap<u64, Published>,
}

/// An Event that was published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Published {
    /// Of the object.
    pub name: String,
    /// How often.
    pub count: i32,
    pub last: Timestamp,
}

impl Recent {
    /// What stands for an Event here: everything that makes it the same one.
    pub(super) fn key(&self, event: impl Hash) -> u64 {
        self.hasher.hash_one(event)
    }

    /// The object in which this Event is to be counted now, if there is one.
    pub(super) fn series(&self, key: u64, now: Timestamp) -> Option<&Published> {
        self.published.get(&key).filter(|published| now.duration_since(published.last) < SERIES_ENDS)
    }

    /// The Event was published. The one that was silent for longest makes room.
    pub(super) fn note(&mut self, key: u64, published: Published) {
        if self.published.len() >= MOST
            && !self.published.contains_key(&key)
            && let Some(oldest) = self.published.iter().min_by_key(|(_, known)| known.last).map(|(key, _)| *key)
        {
            self.published.remove(&oldest);
        }
        self.published.insert(key, published);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn published(name: &str, last: i64) -> Published {
        Published { name: name.to_owned(), count: 1, last: at(last) }
    }

    #[test]
    fn an_event_is_counted_in_its_series_until_it_was_silent_for_six_minutes() {
        let mut recent = Recent::default();
        let (key, other) = (recent.key(("uid", "Failed", "why")), recent.key(("uid", "Failed", "why else")));
        assert_eq!(recent.series(key, at(0)), None);
        recent.note(key, published("a", 0));
        assert_eq!(recent.series(key, at(359)), Some(&published("a", 0)));
        assert_eq!(recent.series(other, at(359)), None);
        recent.note(key, published("a", 359));
        assert_eq!(recent.series(key, at(700)), Some(&published("a", 359)));
        assert_eq!(recent.series(key, at(719)), None);
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_oldest_goes_first() {
        let mut recent = Recent::default();
        let keys: Vec<_> = (0..=MOST).map(|n| recent.key(n)).collect();
        for (n, key) in keys[..MOST].iter().enumerate() {
            recent.note(*key, published("a", i64::try_from(n).unwrap()));
        }
        // One that goes on is none more.
        recent.note(keys[0], published("a", 5000));
        assert_eq!(recent.published.len(), MOST);
        recent.note(keys[MOST], published("a", 5001));
        assert_eq!(recent.published.len(), MOST);
        let now = at(5001);
        assert_eq!(recent.series(keys[1], now), None);
        assert!(keys.iter().filter(|key| recent.published.contains_key(key)).count() == MOST);
        assert!(recent.series(keys[0], now).is_some() && recent.series(keys[MOST], now).is_some());
    }
}
