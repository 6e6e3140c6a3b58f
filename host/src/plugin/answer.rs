//! What a plugin answers, as values of ours: those of the newest version of the contract. What an older one lacks has its default.
//! Plain values, no judgement.

use std::time::Duration;

use super::describe::KindName;

/// `desired` of the WIT.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The children, as the plugin wrote them.
    pub children: Vec<Child>,
    /// The plugin's part of the status, as JSON.
    pub status: Option<String>,
    /// Its conditions.
    pub conditions: Vec<Condition>,
    /// Its Events.
    pub events: Vec<Event>,
    /// When to run again.
    pub next: Next,
    /// Room for growth, as JSON.
    pub extra: String,
}

/// `finalization` of the WIT.
#[derive(Clone, Debug, PartialEq)]
pub struct FinalizeAnswer {
    /// Whether cleanup is over.
    pub cleanup: Cleanup,
    /// The children that cleanup still wants; none: leave them.
    pub children: Option<Vec<Child>>,
    /// As in [`Answer`].
    pub status: Option<String>,
    /// As in [`Answer`].
    pub conditions: Vec<Condition>,
    /// As in [`Answer`].
    pub events: Vec<Event>,
    /// As in [`Answer`].
    pub extra: String,
}

/// `child` of the WIT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Child {
    /// The object, as JSON.
    pub object: String,
    /// How to treat it, as JSON.
    pub options: String,
}

/// `condition` of the WIT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The condition's type.
    pub kind: String,
    /// Its status.
    pub status: ConditionStatus,
    /// One CamelCase word.
    pub reason: String,
    /// For a person.
    pub message: String,
}

/// `condition-status` of the WIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// Nobody knows.
    Unknown,
}

impl ConditionStatus {
    /// As the Kubernetes API writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// `event` of the WIT.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// Routine or not.
    pub kind: EventKind,
    /// One CamelCase word.
    pub reason: String,
    /// For a person.
    pub message: String,
}

/// `event-kind` of the WIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// Routine.
    Normal,
    /// Asks for attention.
    Warning,
}

/// `next` of the WIT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Next {
    /// When something changes.
    #[default]
    OnChange,
    /// Soon, rate limited.
    Immediately,
    /// After this time.
    After(Duration),
}

/// `failure` of the WIT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Try again with backoff.
    Retry(String),
    /// Try again after this time.
    RetryAfter(Duration, String),
    /// Do not try again until something changes.
    Terminal(String),
}

/// `selector` of the WIT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    /// Which kind.
    pub kind: KindName,
    /// In which namespace.
    pub namespace: Option<String>,
    /// Which names; empty: all.
    pub names: Vec<String>,
    /// With which labels, as `kubectl -l` has it; empty: with any.
    pub labels: String,
}

/// `cleanup` of the WIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleanup {
    /// All is gone.
    Finished,
    /// Ask again after this time.
    Waiting(Duration),
}
