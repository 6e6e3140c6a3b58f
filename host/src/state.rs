//! The values that travel through one reconcile, in order: [`Observed`] → [`Desired`] → [`Plan`] → [`Applied`].
//!
//! Each step takes the value of the step before and makes the next; steps meet only here.

use std::{collections::HashMap, sync::Arc, time::Duration};

use serde_json::{Map, Value};

use crate::{
    object::{Object, ObjectKey},
    plugin::{Condition, Event, Next},
    reconcile::{projection::Digest, remote::Record},
};

/// Which child: its kind as a place in the reconciler's list of child kinds, and its name. Sorts by kind, namespace, name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChildKey {
    /// Place in the reconciler's child kinds, which are sorted.
    pub kind: usize,
    /// Where it is.
    pub object: ObjectKey,
}

/// What there is.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The parent.
    pub parent: Arc<Object>,
    /// Its children, sorted.
    pub children: Vec<(ChildKey, Arc<Object>)>,
    /// The record of its children that have no owner reference.
    pub record: Option<Record>,
}

/// What the plugin wants, checked: every child is complete, allowed and named once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// The children.
    pub children: Vec<DesiredChild>,
    /// What to tell on the parent.
    pub report: Report,
    /// When to run again.
    pub next: Next,
}

/// A child that the plugin wants.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredChild {
    /// Which one.
    pub key: ChildKey,
    /// What the plugin decides of it.
    pub object: Map<String, Value>,
    /// Digest of `object`, the same for every order of keys.
    pub digest: Digest,
    /// Whether it cannot have an owner reference; see [`crate::reconcile::remote`].
    pub remote: bool,
}

/// What a plugin tells of its parent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Its part of the status.
    pub status: Option<Map<String, Value>>,
    /// Its conditions.
    pub conditions: Vec<Condition>,
    /// Its Events.
    pub events: Vec<Event>,
}

/// What the plugin says of cleanup, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Finalization {
    /// None: finished. Else when to ask again.
    pub waiting: Option<Duration>,
    /// The children that cleanup still wants; none: leave them.
    pub children: Option<Vec<DesiredChild>>,
    /// What to tell on the parent.
    pub report: Report,
}

impl Finalization {
    /// There is nothing to clean up, and nothing to tell.
    pub fn finished() -> Self {
        Self { waiting: None, children: None, report: Report::default() }
    }
}

/// What to do about the children.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Writes, all independent of one another.
    pub applies: Vec<ChildApply>,
    /// Deletes, once every apply has succeeded.
    pub deletes: Vec<ChildDelete>,
    /// Children that are as they should be, with the resource version at which that was seen.
    pub unchanged: Vec<(ChildKey, String)>,
    /// Children that are being deleted; their end wakes the parent.
    pub deleting: Vec<ChildKey>,
}

/// One server-side apply.
#[derive(Clone, Debug, PartialEq)]
pub struct ChildApply {
    /// Which child.
    pub key: ChildKey,
    /// What to send.
    pub body: Map<String, Value>,
    /// Digest of what the plugin wants.
    pub digest: Digest,
    /// Whether the child is not there yet: the apply must create it.
    pub create: bool,
}

/// One delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildDelete {
    /// Which child.
    pub key: ChildKey,
    /// Only this very object.
    pub uid: String,
}

/// What came of the plan.
#[derive(Debug, Default)]
pub struct Applied {
    /// Children written, with the API server's answer.
    pub written: Vec<(ChildKey, Digest, Arc<Object>)>,
    /// Children whose deletion was accepted.
    pub deleted: Vec<ChildKey>,
    /// Children that could not be written or deleted, and why.
    pub failures: Vec<(ChildKey, ChildError)>,
    /// Whether the next pass would see something that this one did not.
    pub changed: bool,
}

/// Why a child could not be brought to where it should be.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// There is such an object, and it is not this parent's.
    #[error("an object of this name exists and does not belong to this parent; delete or rename one of them")]
    NameCollision,
    /// It was changed, replaced or removed in between; the next pass sees the new state.
    #[error("it was changed at the same time")]
    Conflict(#[source] kube::Error),
    /// The service account may not do this.
    #[error("the service account may not do this; see `pilothouse manifests` for the rights that it needs")]
    Forbidden(#[source] kube::Error),
    /// The API server finds it invalid.
    #[error("the API server refuses it as invalid")]
    Invalid(#[source] kube::Error),
    /// Anything else, most of it temporary.
    #[error("the request failed")]
    Request(#[source] kube::Error),
}

/// What the host remembers of a parent between two reconciles. All of it can be lost at any time: what is forgotten costs a
/// request, never correctness.
#[derive(Debug, Default)]
pub struct Memory {
    /// Per child, what our last apply was and what came of it.
    pub children: HashMap<ChildKey, LastApply>,
    /// The status that we last wrote, and what the API server made of it.
    pub status: Option<LastStatus>,
    /// The Events of the plugin's last answer.
    pub events: Vec<Event>,
    /// The revision that it was last reconciled with.
    pub revision: Option<String>,
    /// Whether our finalizer was on it when it was last seen.
    pub finalizer: bool,
    /// Whether an answer of the plugin was ever acted upon. None: that was before our time, so it may have been.
    pub ever_applied: Option<bool>,
}

/// Our last apply of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastApply {
    /// Digest of what the plugin wanted.
    pub desired: Digest,
    /// Digest of what we owned of the answer.
    pub projection: Digest,
    /// The latest resource version at which both were seen to hold.
    pub resource_version: String,
}

/// Our last write of a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastStatus {
    /// Digest of what we sent.
    pub sent: Digest,
    /// Digest of the whole status in the answer.
    pub kept: Digest,
}
