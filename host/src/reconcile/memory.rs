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
            self.note(&written.key, applied_differently(&written.differences), &mut news);
        }
        for (key, held, why) in &applied.held {
            self.held.insert(key.clone(), held.clone());
            let message = format!("stays as it is until somebody deletes it, since it cannot be changed: {why}");
            self.note(key, Some(Note { reason: "WaitsForDeletion", message }), &mut news);
        }
        for key in &applied.deleted {
            self.children.remove(key);
            self.held.remove(key);
            self.notes.remove(key);
        }
        for (key, _) in &applied.failures {
            // It may have been applied all the same; what is not known is looked at anew.
            self.children.remove(key);
        }
        news
    }

    fn note(&mut self, key: &ChildKey, note: Option<Note>, news: &mut Vec<(ChildKey, Note)>) {
        let Some(note) = note else { return drop(self.notes.remove(key)) };
        if self.notes.get(key) != Some(&note.message) {
            self.notes.insert(key.clone(), note.message.clone());
            news.push((key.clone(), note));
        }
    }
}

/// The answer to an apply is not what was sent. It is the new normal: sending the same again would get the same answer.
fn applied_differently(differences: &[String]) -> Option<Note> {
    let first = differences.get(..SHOWN).unwrap_or(differences).join(", ");
    let more = match differences.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more fields"),
    };
    let message = format!(
        "{first}{more}: the cluster keeps something else than the plugin wants, since the kind does not have the field, or an \
         admission policy or webhook decides it; it is left at that"
    );
    (!differences.is_empty()).then_some(Note { reason: "AppliedDifferently", message })
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
        Applied { written: vec![Written { key: key(), last: Some(last), differences }], ..Applied::default() }
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
            held: vec![(key(), Held { desired: [1; 32], uid: "u".into() }, "immutable".into())],
            ..Applied::default()
        };
        assert_eq!(memory.applied(&held()).len(), 1);
        assert_eq!(memory.applied(&held()).len(), 0);
        assert_eq!(memory.held.len(), 1);
        memory.applied(&written(&[]));
        assert_eq!((memory.held.len(), memory.notes.len(), memory.children.len()), (0, 0, 1));
    }

    #[test]
    fn a_child_that_failed_is_looked_at_anew() {
        let mut memory = Memory::default();
        memory.applied(&written(&[]));
        memory.applied(&Applied { failures: vec![(key(), ChildError::NameCollision)], ..Applied::default() });
        assert!(memory.children.is_empty());
    }
}
