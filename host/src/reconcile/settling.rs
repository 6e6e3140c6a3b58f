//! What never settles. A plugin that wants something else each time it is asked: a timestamp, a random value, a list in the order of a hash
//! map. Each answer is applied, and each apply would roll a Deployment; so it is slowed down, and told where its answers differ (`C22`).
//! And somebody who takes back what we take, as often as we do: so neither has it, and it is told who that is (`C27`).

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use super::coverage::differences;
use crate::state::{Applied, ChildKey, Memory, Observed, Plan};

/// How many passes within [`WINDOW`] may want something else of the children, or take something from others, while spec and plugin are the
/// same. What a plugin sees of its children, such as the address of a Service, can make it change others, and that may take a few.
const PATIENCE: usize = 10;
/// See [`PATIENCE`].
const WINDOW: Duration = Duration::from_mins(1);

/// How a parent settles.
#[derive(Debug, Default)]
pub struct Settling {
    /// Generation of the parent and revision of the plugin. Another one begins anew.
    basis: Option<(i64, String)>,
    /// When it last wanted something else, at most [`PATIENCE`] times.
    changes: VecDeque<Instant>,
    unstable: bool,
}

impl Settling {
    /// Notes a pass that wants, or does not want, something else of what there is; whether that was too often. Once it was, it takes
    /// a pass without a change: by then the passes are slow, and changes far apart.
    fn note(&mut self, generation: i64, revision: &str, changes: bool, now: Instant) -> bool {
        let same = self.basis.as_ref().is_some_and(|basis| basis.0 == generation && basis.1 == revision);
        if !same {
            *self = Self { basis: Some((generation, revision.to_owned())), ..Self::default() };
        }
        if changes {
            self.changes.truncate(PATIENCE - 1);
            self.changes.push_front(now);
        }
        let too_often = self.changes.get(PATIENCE - 1).is_some_and(|first| now - *first <= WINDOW);
        self.unstable = changes && (self.unstable || too_often);
        self.unstable
    }
}

/// Where the plugin does not settle, if it has not for too long: a child, and the path of a field that it wants otherwise now.
pub(super) fn unstable(
    memory: &mut Memory,
    observed: &Observed,
    plan: &Plan,
    revision: &str,
    manager: &str,
) -> Option<(ChildKey, String)> {
    // Only what is known to have been wanted otherwise: an apply that failed is tried again with the same.
    let change = plan.applies.iter().find(|apply| {
        memory.children.get(&apply.key).is_some_and(|last| !apply.create && last.desired != apply.digest)
    });
    let unstable = memory.settling.note(observed.parent.generation(), revision, change.is_some(), Instant::now());
    let change = change.filter(|_| unstable)?;
    let (_, live) = observed.children.iter().find(|(key, _)| *key == change.key)?;
    let fields = live.owned_by(manager, "Apply", "").and_then(|fields| serde_json::from_str(fields.get()).ok());
    let live = serde_json::from_str(live.json()).unwrap_or_default();
    let found = differences(&change.body, &fields.unwrap_or_default(), &live);
    // Our own label always differs, since it says what was applied.
    let path = found.into_iter().map(|found| found.path).find(|path| !path.contains("pilothouse.dev/"));
    // Else it sends less than before, and nothing new.
    Some((change.key.clone(), path.unwrap_or_else(|| "a field that it does not always set".to_owned())))
}

/// Whose fields are taken again and again, if that has gone on for too long: a child, a field manager, and the path of a field.
pub(super) fn contested(
    memory: &mut Memory,
    observed: &Observed,
    applied: &Applied,
    revision: &str,
) -> Option<(ChildKey, String, String)> {
    let mut taken = applied.written.iter().filter_map(|written| {
        let (manager, paths) = written.taken.first()?;
        Some((written.key.clone(), manager.clone(), paths.first()?.clone()))
    });
    let taken = taken.next();
    memory.contest.note(observed.parent.generation(), revision, taken.is_some(), Instant::now()).then_some(taken)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_changes_within_a_minute_for_the_same_spec_and_plugin_are_too_many() {
        let mut now = Instant::now();
        let mut settling = Settling::default();
        let mut pass = |generation, revision, changes, seconds| {
            now += Duration::from_secs(seconds);
            settling.note(generation, revision, changes, now)
        };
        // The clock of a plugin has seconds: passes that follow at once want the same.
        for _ in 1..PATIENCE {
            assert!(!pass(1, "a", true, 1));
            assert!(!pass(1, "a", false, 0));
        }
        assert!(pass(1, "a", true, 1));
        // Slowed down, it is still the same plugin.
        assert!((0..20).all(|_| pass(1, "a", true, 70)));
        // It has settled.
        assert!(!pass(1, "a", false, 70));
        assert!(!(1..PATIENCE).any(|_| pass(1, "a", true, 1)));
        // The user, or a new plugin, wants something else.
        assert!(!pass(2, "a", true, 1));
        assert!(!(2..PATIENCE).any(|_| pass(2, "a", true, 1)));
        assert!(!pass(2, "b", true, 1));
        // Slow changes have a reason.
        assert!(!(0..30).any(|_| pass(2, "b", true, 10)));
    }
}
