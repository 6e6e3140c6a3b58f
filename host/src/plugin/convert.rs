//! The border between the WIT types and ours: plain copies, no judgement.

use std::time::Duration;

use super::{Request, types};

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

/// `cleanup` of the WIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleanup {
    /// All is gone.
    Finished,
    /// Ask again after this time.
    Waiting(Duration),
}

impl From<Request> for types::Request {
    fn from(request: Request) -> Self {
        let Request { parent, children, related, config, context } = request;
        Self { parent, children, related, config, context }
    }
}

impl From<types::Desired> for Answer {
    fn from(desired: types::Desired) -> Self {
        let types::Desired { children, status, conditions, events, next, extra } = desired;
        Self {
            children: all(children),
            status,
            conditions: all(conditions),
            events: all(events),
            next: next.into(),
            extra,
        }
    }
}

impl From<types::Finalization> for FinalizeAnswer {
    fn from(finalization: types::Finalization) -> Self {
        let types::Finalization { cleanup, children, status, conditions, events, extra } = finalization;
        Self {
            cleanup: cleanup.into(),
            children: children.map(all),
            status,
            conditions: all(conditions),
            events: all(events),
            extra,
        }
    }
}

fn all<T, U: From<T>>(values: Vec<T>) -> Vec<U> {
    values.into_iter().map(U::from).collect()
}

fn millis(millis: u32) -> Duration {
    Duration::from_millis(millis.into())
}

impl From<types::Child> for Child {
    fn from(types::Child { object, options }: types::Child) -> Self {
        Self { object, options }
    }
}

impl From<types::Condition> for Condition {
    fn from(types::Condition { kind, status, reason, message }: types::Condition) -> Self {
        let status = match status {
            types::ConditionStatus::True => ConditionStatus::True,
            types::ConditionStatus::False => ConditionStatus::False,
            types::ConditionStatus::Unknown => ConditionStatus::Unknown,
        };
        Self { kind, status, reason, message }
    }
}

impl From<types::Event> for Event {
    fn from(types::Event { kind, reason, message }: types::Event) -> Self {
        let kind = match kind {
            types::EventKind::Normal => EventKind::Normal,
            types::EventKind::Warning => EventKind::Warning,
        };
        Self { kind, reason, message }
    }
}

impl From<types::Next> for Next {
    fn from(next: types::Next) -> Self {
        match next {
            types::Next::OnChange => Self::OnChange,
            types::Next::Immediately => Self::Immediately,
            types::Next::After(wait) => Self::After(millis(wait)),
        }
    }
}

impl From<types::Failure> for Failure {
    fn from(failure: types::Failure) -> Self {
        match failure {
            types::Failure::Retry(message) => Self::Retry(message),
            types::Failure::RetryAfter((wait, message)) => Self::RetryAfter(millis(wait), message),
            types::Failure::Terminal(message) => Self::Terminal(message),
        }
    }
}

impl From<types::Cleanup> for Cleanup {
    fn from(cleanup: types::Cleanup) -> Self {
        match cleanup {
            types::Cleanup::Finished => Self::Finished,
            types::Cleanup::Waiting(wait) => Self::Waiting(millis(wait)),
        }
    }
}
