//! Where the proxy can fail, and how.

use std::{fmt, time::Duration};

use crate::Asked;

/// A place in the traffic.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Point {
    /// The request that asks this for the `nth` time, from 1.
    Request {
        /// What it asks.
        asked: Asked,
        /// Which of those that ask the same.
        nth: usize,
    },
    /// The event that a watch shows for the `nth` time, from 1.
    Event {
        /// The plural name of the watched resource.
        resource: String,
        /// `ADDED`, `MODIFIED` or `DELETED`.
        kind: String,
        /// The name of the object.
        name: String,
        /// Which of those that show the same.
        nth: usize,
    },
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request { asked, nth } => write!(f, "{asked} #{nth}"),
            Self::Event { resource, kind, name, nth } => write!(f, "{resource} {name} {kind} #{nth}"),
        }
    }
}

/// What happens at a point, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A request: it is answered with this HTTP status, and the API server never sees it.
    Refuse(u16),
    /// A request: the API server sees it only after this time. An event: it, and what follows, is shown after this time.
    Delay(Duration),
    /// A request: the connection is closed, and the API server never sees it. An event: the watch ends before it.
    CutBefore,
    /// A request: the API server has answered, and the connection is closed instead of telling.
    CutAfter,
    /// The host is killed before the API server sees the request, or before the event is shown.
    CrashBefore,
    /// The host is killed when the API server has answered the request, or right after the event was shown.
    CrashAfter,
    /// An event: the watch ends before it, and then its resource version is too old (410): a new list has to tell.
    Lose,
    /// An event: as `Lose`, but the next watch is refused with that status instead of told in its stream.
    LoseAndRefuse,
    /// An event: the watch shows nothing any more, and does not end either, as if its connection had died without a word.
    Silence,
    /// An event: the watch ends, and for this time lists and watches of this resource show the state before it.
    Stale(Duration),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refuse(status) => write!(f, "{status}"),
            Self::Delay(time) => write!(f, "delay {time:?}"),
            Self::CutBefore => f.write_str("cut before"),
            Self::CutAfter => f.write_str("cut after"),
            Self::CrashBefore => f.write_str("crash before"),
            Self::CrashAfter => f.write_str("crash after"),
            Self::Lose => f.write_str("lose"),
            Self::LoseAndRefuse => f.write_str("lose and refuse"),
            Self::Silence => f.write_str("silence"),
            Self::Stale(time) => write!(f, "stale {time:?}"),
        }
    }
}
