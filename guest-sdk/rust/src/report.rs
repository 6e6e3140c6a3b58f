//! What a plugin tells people about a parent: its conditions, and Events.

use crate::raw::types;

/// A condition of the parent's `status.conditions`. The host keeps `observedGeneration` and `lastTransitionTime`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition(types::Condition);

/// Whether a condition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// It does.
    True,
    /// It does not.
    False,
    /// It cannot be told yet.
    Unknown,
}

impl From<bool> for Holds {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

impl From<Option<bool>> for Holds {
    fn from(holds: Option<bool>) -> Self {
        holds.map_or(Self::Unknown, Self::from)
    }
}

impl Condition {
    /// A condition of the type `kind`, such as `DatabaseReady`; `reason` is one CamelCase word, always required. `Synced`
    /// belongs to the host.
    pub fn new(kind: impl Into<String>, holds: impl Into<Holds>, reason: impl Into<String>) -> Self {
        let status = match holds.into() {
            Holds::True => types::ConditionStatus::True,
            Holds::False => types::ConditionStatus::False,
            Holds::Unknown => types::ConditionStatus::Unknown,
        };
        Self(types::Condition { kind: kind.into(), status, reason: reason.into(), message: String::new() })
    }

    /// The condition `Ready`. Without it the host derives one from the children.
    pub fn ready(holds: impl Into<Holds>, reason: impl Into<String>) -> Self {
        Self::new("Ready", holds, reason)
    }

    /// The same, with a sentence for a person.
    #[must_use]
    pub fn message(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }
}

impl From<Condition> for types::Condition {
    fn from(condition: Condition) -> Self {
        condition.0
    }
}

/// A Kubernetes Event on the parent. It is published once while it stays in consecutive answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event(types::Event);

impl Event {
    /// Routine. `reason` is one CamelCase word of at most 128 characters, `message` is for a person and cut at 1,024 bytes.
    pub fn normal(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self(types::Event { kind: types::EventKind::Normal, reason: reason.into(), message: message.into() })
    }

    /// Something that asks for attention, otherwise as [`normal`](Self::normal).
    pub fn warning(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self(types::Event { kind: types::EventKind::Warning, reason: reason.into(), message: message.into() })
    }
}

impl From<Event> for types::Event {
    fn from(event: Event) -> Self {
        event.0
    }
}
