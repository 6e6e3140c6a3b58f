//! Children that could not be brought to where they should be, told as one error.

use std::{error::Error as _, fmt};

use crate::{state::ChildError, telemetry};

/// A message on a condition is for a person: the first few say it.
const SHOWN: usize = 3;

/// At least one child failed.
#[derive(Debug)]
pub struct Failures {
    /// Each with its name and cause.
    pub children: Vec<(String, ChildError)>,
    /// How many children that are no longer wanted stay until that is over (`C42`).
    pub waiting_deletes: usize,
}

impl Failures {
    /// A stable name: that of the first child for which somebody has to do something, or else of one that waits.
    pub fn category(&self) -> &'static str {
        let errors = || self.children.iter().map(|(_, error)| error);
        let acute = errors().find(|error| !is_wait(error));
        let said = acute.or_else(|| errors().find(|error| !matches!(error, ChildError::Conflict(_))));
        said.map_or("ApplyFailed", ChildError::category)
    }

    /// Whether others only wrote at the same moment: read again, tell nobody.
    pub fn is_conflict(&self) -> bool {
        self.children.iter().all(|(_, error)| matches!(error, ChildError::Conflict(_)))
    }

    /// Whether nothing can be done before something else happens: the namespace is gone, a Job has finished, another field manager lets go.
    pub fn is_waiting(&self) -> bool {
        self.children.iter().all(|(_, error)| is_wait(error))
    }
}

fn is_wait(error: &ChildError) -> bool {
    matches!(
        error,
        ChildError::NamespaceTerminating(_)
            | ChildError::PendingRecreate
            | ChildError::FieldConflict(_)
            | ChildError::Conflict(_)
    )
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (child, error)) in self.children.iter().take(SHOWN).enumerate() {
            let separator = if at > 0 { "; " } else { "" };
            write!(f, "{separator}{child}: {error}")?;
            if let Some(cause) = error.source().and_then(|cause| cause.downcast_ref()) {
                write!(f, ": {}", message(cause))?;
            }
        }
        if let Some(more) = self.children.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            write!(f, "; and {more} more children failed")?;
        }
        if self.waiting_deletes > 0 {
            write!(f, "; until then {} children that are no longer wanted are not deleted", self.waiting_deletes)?;
        }
        Ok(())
    }
}

/// What an error says to a person; kube would add the whole answer.
pub fn message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        error => telemetry::chain(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failures(errors: Vec<ChildError>, waiting_deletes: usize) -> Failures {
        let children = errors.into_iter().enumerate().map(|(at, error)| (format!("ConfigMap n/{at}"), error)).collect();
        Failures { children, waiting_deletes }
    }

    fn api_error() -> kube::Error {
        kube::Error::Api(kube::core::Status::failure("no", "Reason").with_code(409).boxed())
    }

    #[test]
    fn the_message_names_the_first_children_and_what_waits_for_them() {
        let collisions = |count| (0..count).map(|_| ChildError::NameCollision).collect();
        let text = failures(collisions(5), 2).to_string();
        assert!(text.starts_with("ConfigMap n/0: an object of this name exists"), "{text}");
        assert!(text.contains("; and 2 more children failed; until then 2 children"), "{text}");
        assert!(!failures(collisions(1), 0).to_string().contains("until then"));
    }

    #[test]
    fn a_conflict_hides_no_other_error() {
        let mixed = failures(vec![ChildError::Conflict(api_error()), ChildError::NameCollision], 0);
        assert_eq!((mixed.category(), mixed.is_conflict()), ("NameCollision", false));
        assert!(failures(vec![ChildError::Conflict(api_error())], 0).is_conflict());
        let text = failures(vec![ChildError::Forbidden(api_error())], 0).to_string();
        assert!(text.ends_with("see `pilothouse manifests` for the rights that it needs: no"), "{text}");
        let waiting = failures(vec![ChildError::NamespaceTerminating(api_error())], 0);
        assert!(waiting.is_waiting() && !waiting.is_conflict());
        let mixed = failures(vec![ChildError::PendingRecreate, ChildError::NameCollision], 0);
        assert_eq!((mixed.category(), mixed.is_waiting()), ("NameCollision", false));
        let waiting = failures(vec![ChildError::Conflict(api_error()), ChildError::PendingRecreate], 0);
        assert_eq!((waiting.category(), waiting.is_waiting()), ("PendingRecreate", true));
    }
}
