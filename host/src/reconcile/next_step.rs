//! What to do next for a parent: one pure function of what is known of it.
//!
//! A turn takes a step, learns from it, and asks again, until a step ends the turn. So the rules of a parent's life stand here, and only
//! here: the finalizer before the first child, nothing made for a parent that is being deleted, cleanup before the finalizer goes.
//! `model.rs` checks them in every order of events, faults and crashes.

use super::finalizer::Phase;

/// What is known of a parent at some point of its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The parent itself.
    pub parent: Parent,
    /// The plugin that serves cleans up.
    pub cleans_up: bool,
    /// What the plugin has said in this turn.
    pub answer: Option<Answer>,
    /// Whether all children that are ours to delete are gone; none: nobody has looked.
    pub children_gone: Option<bool>,
}

/// What is known of the parent itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parent {
    /// The watch does not show it: it is gone, or no longer selected, or the watch is late.
    Absent {
        /// Our finalizer may still be on it.
        finalizer: bool,
    },
    /// It is gone, says the watch, with our finalizer on: against the rules (kubernetes#110521, `C11`).
    Vanished {
        /// The API server says so, too.
        confirmed: bool,
    },
    /// It is there.
    Present(Present),
}

/// A parent that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Present {
    /// It is selected, and no older reconciler has it.
    pub selected: bool,
    /// It is being deleted.
    pub deleting: bool,
    /// Our finalizer is on it.
    pub finalizer: bool,
    /// The API server has shown it in this turn; else it is as the watch has shown it.
    pub read: bool,
    /// The user wants it to be left alone.
    pub paused: bool,
    /// The user wants it to go without cleanup.
    pub abandoned: bool,
    /// The user wants its children to stay when it goes, and its record does not say so yet.
    pub orphan_unrecorded: bool,
}

/// What the plugin has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// Which children a living parent should have.
    Desired {
        /// Some of them are ours to delete when the parent goes: the garbage collector would not, or not in their order.
        ours_to_delete: bool,
        /// Some of those are not there yet.
        missing: bool,
        /// The record on the parent does not name all of those.
        unrecorded: bool,
    },
    /// How the cleanup of a parent that is being deleted stands.
    Cleanup {
        /// It is over.
        finished: bool,
        /// It still wants children, and they have not been seen to.
        children: bool,
        /// The record on the parent does not name all of them that cannot have an owner reference.
        unrecorded: bool,
    },
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing, now or later: it is none of our business. Ends the turn.
    Forget,
    /// Take our finalizer off, without cleanup: nobody else ever would. Ends the turn.
    Leave,
    /// Tell that the user wants it left alone. Ends the turn.
    Pause,
    /// Put our finalizer on.
    AddFinalizer,
    /// Ask the plugin which children there should be.
    Ask,
    /// Put the children that cannot have an owner reference on record.
    Record,
    /// Bring about the children that the plugin wants. Ends the turn of a living parent.
    Converge,
    /// Read the parent from the API server: what follows must be about the very object that is there now.
    Read,
    /// Let it go without cleanup, since the user says so. Ends the turn.
    Abandon,
    /// Put on record that the user wants the children to stay: the API server will not say it for long.
    RecordOrphan,
    /// Ask the plugin how its cleanup stands.
    AskCleanup,
    /// Delete the children that are ours to delete.
    DeleteChildren,
    /// Tell that cleanup is under way, and look again later. Ends the turn.
    Wait,
    /// Cleanup is over: take our finalizer off, if the parent is there. Ends the turn.
    RemoveFinalizer,
}

/// See the module's documentation.
pub fn next_step(view: &View) -> Step {
    let parent = match view.parent {
        Parent::Absent { finalizer: true } => return Step::Read,
        Parent::Absent { finalizer: false } => return Step::Forget,
        Parent::Vanished { confirmed: false } => return Step::Read,
        Parent::Vanished { confirmed: true } => return clean_up(view),
        Parent::Present(parent) => parent,
    };
    if !parent.selected {
        return if parent.finalizer { Step::Leave } else { Step::Forget };
    }
    match view.phase(parent) {
        Phase::Released => Step::Forget,
        _ if parent.paused => Step::Pause,
        Phase::New => Step::AddFinalizer,
        Phase::Live => match view.answer {
            Some(Answer::Desired { unrecorded: true, .. }) => Step::Record,
            // Nobody would ever delete it if the parent were gone already.
            Some(Answer::Desired { missing: true, .. }) if !parent.read => Step::Read,
            Some(Answer::Desired { .. }) => Step::Converge,
            _ => Step::Ask,
        },
        Phase::Finalizing if !parent.read => Step::Read,
        Phase::Finalizing if parent.abandoned => Step::Abandon,
        Phase::Finalizing if parent.orphan_unrecorded => Step::RecordOrphan,
        Phase::Finalizing => clean_up(view),
    }
}

fn clean_up(view: &View) -> Step {
    match (view.answer, view.children_gone) {
        (Some(Answer::Cleanup { unrecorded: true, .. }), _) => Step::Record,
        (Some(Answer::Cleanup { children: true, .. }), _) => Step::Converge,
        (Some(Answer::Cleanup { finished: false, .. }), _) => Step::Wait,
        (Some(Answer::Cleanup { .. }), None) => Step::DeleteChildren,
        (Some(Answer::Cleanup { .. }), Some(false)) => Step::Wait,
        (Some(Answer::Cleanup { .. }), Some(true)) => Step::RemoveFinalizer,
        // An answer of when it lived is about a past.
        (None | Some(Answer::Desired { .. }), _) => Step::AskCleanup,
    }
}

impl View {
    fn phase(&self, parent: Present) -> Phase {
        let needed = self.cleans_up || matches!(self.answer, Some(Answer::Desired { ours_to_delete: true, .. }));
        Phase::of(parent.deleting, parent.finalizer, needed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIVE: Present = Present {
        selected: true,
        deleting: false,
        finalizer: true,
        read: false,
        paused: false,
        abandoned: false,
        orphan_unrecorded: false,
    };
    const DYING: Present = Present { deleting: true, read: true, ..LIVE };

    fn view(parent: Parent) -> View {
        View { parent, cleans_up: true, answer: None, children_gone: None }
    }

    fn present(parent: Present) -> View {
        view(Parent::Present(parent))
    }

    fn desired(ours_to_delete: bool, unrecorded: bool) -> Option<Answer> {
        Some(Answer::Desired { ours_to_delete, missing: unrecorded, unrecorded })
    }

    fn cleanup(finished: bool) -> Option<Answer> {
        Some(Answer::Cleanup { finished, children: false, unrecorded: false })
    }

    #[test]
    fn a_parent_that_is_not_ours_is_left() {
        assert_eq!(next_step(&view(Parent::Absent { finalizer: false })), Step::Forget);
        assert_eq!(next_step(&view(Parent::Absent { finalizer: true })), Step::Read, "the watch may be late");
        assert_eq!(next_step(&present(Present { selected: false, ..LIVE })), Step::Leave);
        assert_eq!(next_step(&present(Present { selected: false, finalizer: false, ..LIVE })), Step::Forget);
    }

    #[test]
    fn a_life_begins_with_the_finalizer_where_one_is_needed() {
        let new = present(Present { finalizer: false, ..LIVE });
        let without = View { cleans_up: false, ..new };
        assert_eq!(next_step(&new), Step::AddFinalizer);
        assert_eq!(next_step(&without), Step::Ask);
        assert_eq!(next_step(&View { answer: desired(false, false), ..without }), Step::Converge);
        assert_eq!(next_step(&View { answer: desired(true, true), ..without }), Step::AddFinalizer);
        let live = present(LIVE);
        assert_eq!(next_step(&live), Step::Ask);
        assert_eq!(next_step(&View { answer: desired(true, true), ..live }), Step::Record);
        assert_eq!(next_step(&View { answer: desired(true, false), ..live }), Step::Converge);
        let missing = Some(Answer::Desired { ours_to_delete: true, missing: true, unrecorded: false });
        assert_eq!(next_step(&View { answer: missing, ..live }), Step::Read, "the watch may be late");
        let read = present(Present { read: true, ..LIVE });
        assert_eq!(next_step(&View { answer: missing, ..read }), Step::Converge);
    }

    #[test]
    fn it_ends_with_cleanup_and_then_with_what_is_on_record() {
        assert_eq!(next_step(&present(Present { read: false, ..DYING })), Step::Read);
        let dying = present(DYING);
        assert_eq!(next_step(&dying), Step::AskCleanup);
        assert_eq!(next_step(&View { answer: desired(false, false), ..dying }), Step::AskCleanup);
        assert_eq!(next_step(&View { answer: cleanup(false), ..dying }), Step::Wait);
        let finished = View { answer: cleanup(true), ..dying };
        assert_eq!(next_step(&finished), Step::DeleteChildren);
        assert_eq!(next_step(&View { children_gone: Some(false), ..finished }), Step::Wait);
        assert_eq!(next_step(&View { children_gone: Some(true), ..finished }), Step::RemoveFinalizer);
        let more = Some(Answer::Cleanup { finished: true, children: true, unrecorded: true });
        assert_eq!(next_step(&View { answer: more, ..dying }), Step::Record);
        let more = Some(Answer::Cleanup { finished: true, children: true, unrecorded: false });
        assert_eq!(next_step(&View { answer: more, ..dying }), Step::Converge);
        let released = present(Present { finalizer: false, ..DYING });
        assert_eq!(next_step(&released), Step::Forget);
    }

    #[test]
    fn a_user_may_hold_it_let_it_go_or_keep_its_children() {
        assert_eq!(next_step(&present(Present { paused: true, finalizer: false, ..LIVE })), Step::Pause);
        assert_eq!(next_step(&present(Present { paused: true, abandoned: true, ..DYING })), Step::Pause);
        assert_eq!(next_step(&present(Present { paused: true, finalizer: false, ..DYING })), Step::Forget);
        assert_eq!(next_step(&present(Present { abandoned: true, orphan_unrecorded: true, ..DYING })), Step::Abandon);
        assert_eq!(next_step(&present(Present { orphan_unrecorded: true, ..DYING })), Step::RecordOrphan);
    }

    #[test]
    fn c11_one_that_vanished_is_cleaned_up_after() {
        assert_eq!(next_step(&view(Parent::Vanished { confirmed: false })), Step::Read);
        let gone = view(Parent::Vanished { confirmed: true });
        assert_eq!(next_step(&gone), Step::AskCleanup);
        assert_eq!(next_step(&View { answer: cleanup(true), ..gone }), Step::DeleteChildren);
    }
}
