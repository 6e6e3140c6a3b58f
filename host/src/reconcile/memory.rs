//! What is remembered of the children after a plan and after an apply, and what is there to tell of them: once.

use crate::state::{Applied, ChildKey, Memory, Plan};

/// Something to tell of a child that is no error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    /// Reason of the Event.
    pub(super) reason: &'static str,
    /// For a person.
    pub(super) message: String,
}

/// A message is for a person: the first few paths say it.
const SHOWN: usize = 3;

impl Memory {
    /// The plan has seen these children as they should be.
    pub(super) fn planned(&mut self, plan: &Plan) {
        for (key, resource_version) in &plan.unchanged {
            if let Some(last) = self.children.get_mut(key) {
                last.resource_version.clone_from(resource_version);
            }
        }
        self.children.extend(plan.recognized.iter().cloned());
    }

    /// What came of the plan; the notes that are news.
    pub(super) fn applied(&mut self, applied: &Applied) -> Vec<(ChildKey, Note)> {
        let mut news = Vec::new();
        for written in &applied.written {
            match &written.last {
                Some(last) => drop(self.children.insert(written.key.clone(), last.clone())),
                None => drop(self.children.remove(&written.key)),
            }
            self.held.remove(&written.key);
            self.notes.remove(&(written.key.clone(), WAITS_FOR_DELETION));
            match applied_differently(&written.differences) {
                Some(note) => self.note(&written.key, note, &mut news),
                None => drop(self.notes.remove(&(written.key.clone(), APPLIED_DIFFERENTLY))),
            }
            if let Some(note) = field_taken(&written.taken) {
                self.note(&written.key, note, &mut news);
            }
        }
        for (key, held, why) in &applied.held {
            self.held.insert(key.clone(), held.clone());
            if held.running {
                continue;
            }
            let message = format!("stays as it is until somebody deletes it, since it cannot be changed: {why}");
            self.note(key, Note { reason: WAITS_FOR_DELETION, message }, &mut news);
        }
        for key in &applied.deleted {
            self.children.remove(key);
            self.held.remove(key);
            self.notes.retain(|(known, _), _| known != key);
        }
        for (key, _) in &applied.failures {
            // It may have been applied all the same; what is not known is looked at anew.
            self.children.remove(key);
        }
        news
    }

    /// Whether an Event is to tell that `Synced` goes from `before` to `now`, status and reason each. Once: if somebody edits the
    /// parent at that moment, the status is refused and the same transition comes again.
    pub(super) fn is_transition(&mut self, before: Option<&(String, String)>, now: Option<&(String, String)>) -> bool {
        let is_news = before != now && self.transition.as_ref() != now;
        self.transition = now.cloned();
        is_news
    }

    fn note(&mut self, key: &ChildKey, note: Note, news: &mut Vec<(ChildKey, Note)>) {
        let told = self.notes.insert((key.clone(), note.reason), note.message.clone());
        if told.as_ref() != Some(&note.message) {
            news.push((key.clone(), note));
        }
    }
}

const APPLIED_DIFFERENTLY: &str = "AppliedDifferently";
const WAITS_FOR_DELETION: &str = "WaitsForDeletion";

/// The answer to an apply is not what was sent. It is the new normal: sending the same again would get the same answer.
fn applied_differently(differences: &[String]) -> Option<Note> {
    let message = format!(
        "{}: the cluster keeps something else than the plugin wants, since the kind does not have the field, or an \
         admission policy or webhook decides it; it is left at that",
        first(differences)
    );
    (!differences.is_empty()).then_some(Note { reason: APPLIED_DIFFERENTLY, message })
}

/// Fields that somebody else had set are the plugin's now (`C27`).
fn field_taken(taken: &[(String, Vec<String>)]) -> Option<Note> {
    let of_manager =
        |(manager, paths): &(String, Vec<String>)| format!("{} from field manager {manager:?}", first(paths));
    let all: Vec<_> = taken.iter().map(of_manager).collect();
    let message = format!(
        "taken, since the plugin sends it: {}; if it is theirs to decide, let the plugin leave it out, or set force false",
        all.join("; ")
    );
    (!taken.is_empty()).then_some(Note { reason: "FieldTaken", message })
}

fn first(paths: &[String]) -> String {
    let first = paths.get(..SHOWN).unwrap_or(paths).join(", ");
    match paths.len().saturating_sub(SHOWN) {
        0 => first,
        more => format!("{first} and {more} more fields"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        object::ObjectKey,
        state::{ChildError, Held, LastApply, Written},
    };

    fn key() -> ChildKey {
        ChildKey { kind: 0, object: ObjectKey { namespace: None, name: "a".into() } }
    }

    fn written(differences: &[&str]) -> Applied {
        let last = LastApply { desired: [1; 32], projection: [2; 32], resource_version: "1".into() };
        let differences = differences.iter().map(ToString::to_string).collect();
        let written = Written { key: key(), last: Some(last), differences, taken: Vec::new() };
        Applied { written: vec![written], ..Applied::default() }
    }

    #[test]
    fn c27_what_is_taken_from_others_is_told_once() {
        let mut memory = Memory::default();
        let taken = |path: &str| {
            let mut applied = written(&[]);
            applied.written[0].taken = vec![("kubectl".to_owned(), vec![path.to_owned()])];
            applied
        };
        let told = memory.applied(&taken("data.a"));
        assert_eq!(told[0].1.reason, "FieldTaken");
        assert!(told[0].1.message.contains("data.a from field manager \"kubectl\""), "{told:?}");
        // Also if there was a pass that took nothing.
        assert_eq!((memory.applied(&written(&[])), memory.applied(&taken("data.a"))), (vec![], vec![]));
        assert_eq!(memory.applied(&taken("data.b")).len(), 1);
    }

    #[test]
    fn a_transition_is_told_once_also_when_the_status_was_not_written() {
        let mut memory = Memory::default();
        let [good, bad] =
            [("True", "ReconcileSuccess"), ("False", "Forbidden")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert!(memory.is_transition(None, Some(&good)));
        assert!(!memory.is_transition(Some(&good), Some(&good)), "nothing has changed");
        assert!(memory.is_transition(Some(&good), Some(&bad)));
        assert!(memory.is_transition(Some(&bad), Some(&good)));
        assert!(!memory.is_transition(Some(&bad), Some(&good)), "the status was refused, and is tried again");
        assert!(memory.is_transition(Some(&good), Some(&bad)), "the next one is news");
        // Another host has told of it, as the status shows.
        assert!(!Memory::default().is_transition(Some(&good), Some(&good)));
    }

    #[test]
    fn a_difference_is_told_once_and_again_when_it_is_another_one() {
        let mut memory = Memory::default();
        let told = memory.applied(&written(&["spec.a", "spec.b", "spec.c", "spec.d"]));
        assert_eq!(told[0].1.reason, "AppliedDifferently");
        assert!(told[0].1.message.starts_with("spec.a, spec.b, spec.c and 1 more fields: "), "{told:?}");
        assert_eq!(memory.applied(&written(&["spec.a", "spec.b", "spec.c", "spec.d"])), []);
        assert_eq!(memory.applied(&written(&["spec.a"])).len(), 1);
        assert_eq!(memory.applied(&written(&[])), []);
        assert_eq!(memory.applied(&written(&["spec.a"])).len(), 1);
    }

    #[test]
    fn what_is_held_is_told_once_and_forgotten_with_the_next_write() {
        let mut memory = Memory::default();
        let held = || Applied {
            held: vec![(key(), Held { desired: [1; 32], uid: "u".into(), running: false }, "immutable".into())],
            ..Applied::default()
        };
        assert_eq!(memory.applied(&held()).len(), 1);
        assert_eq!(memory.applied(&held()).len(), 0);
        assert_eq!(memory.held.len(), 1);
        memory.applied(&written(&[]));
        assert_eq!((memory.held.len(), memory.children.len()), (0, 1));
        assert_eq!(memory.applied(&held()).len(), 1, "it waits again");
    }

    #[test]
    fn a_child_that_failed_is_looked_at_anew() {
        let mut memory = Memory::default();
        memory.applied(&written(&[]));
        memory.applied(&Applied { failures: vec![(key(), ChildError::NameCollision)], ..Applied::default() });
        assert!(memory.children.is_empty());
    }
}
