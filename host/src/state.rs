//! The values that travel through one reconcile, in order: [`Observed`] → [`Desired`] → [`Plan`] → [`Applied`].
//!
//! Each step takes the value of the step before and makes the next; steps meet only here.

use std::{collections::HashMap, sync::Arc, time::Duration};

use serde_json::{Map, Value};

use crate::{
    object::{Object, ObjectKey},
    plugin::{Condition, Event, Next},
    reconcile::{projection::Digest, remote::Record, settling::Settling},
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
    /// What ties it to its parent.
    pub tie: Tie,
    /// How it is treated.
    pub options: ChildOptions,
}

/// What ties a child to its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// An owner reference: the garbage collector deletes it with its parent.
    Owner,
    /// The record on the parent, since it cannot have an owner reference: we delete it. See [`crate::reconcile::remote`].
    Record,
    /// Nothing that would ever delete it: it stays, whatever becomes of its parent.
    Loose,
}

/// How a child is treated, as the plugin chose. What the keys mean is said in the contract (`child.options` in types.wit).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChildOptions {
    /// `updateStrategy`.
    pub update: UpdateStrategy,
    /// `adoptionPolicy`.
    pub adoption: AdoptionPolicy,
    /// `deletionPolicy`: whether it stays when it is no longer wanted, or its parent is gone.
    pub orphan: bool,
    /// `adoptFieldManagers`.
    pub adopt_field_managers: Vec<String>,
    /// `force: false`: whether a field stays with another manager that has set it to another value.
    pub yields: bool,
    /// `wave`: it waits until the children of earlier waves are ready.
    pub wave: u16,
    /// `readiness`.
    pub readiness: Readiness,
}

/// Who says whether a child is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Readiness {
    /// The child itself, by the conventions of its kind.
    #[default]
    Auto,
    /// The plugin: it is, once it exists.
    Ready,
    /// The plugin: it is not.
    NotReady,
}

/// What to do when the API server refuses to change a field that cannot change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// Report it.
    #[default]
    Apply,
    /// Delete the child and make it anew.
    Recreate,
    /// Leave the child as it is until somebody deletes it.
    OnDelete,
}

/// What to do with an object that has the name of a child.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdoptionPolicy {
    /// Leave it alone and report it.
    #[default]
    Never,
    /// Take it, if no controller owns it.
    IfUnowned,
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

impl DesiredChild {
    /// Whether some children of `children` come after others.
    pub fn are_in_waves(children: &[Self]) -> bool {
        children.windows(2).any(|two| two[0].options.wave != two[1].options.wave)
    }
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
    /// Children that are as they should be, though nothing was remembered of them.
    pub recognized: Vec<(ChildKey, LastApply)>,
    /// Children that are being deleted; their end wakes the parent.
    pub deleting: Vec<ChildKey>,
    /// Children that wait until those of earlier waves are ready.
    pub waiting: Vec<ChildKey>,
    /// Jobs that are to be made anew, and still run; their end wakes the parent.
    pub running: Vec<ChildKey>,
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
    /// Whether the plugin wants something else than when the child was last applied: if not, somebody has changed the child.
    pub changed: bool,
    /// Whether fields of earlier managers become ours first.
    pub fold: bool,
    /// How it is treated.
    pub options: ChildOptions,
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
    /// Children written.
    pub written: Vec<Written>,
    /// Children that stay as they are until somebody deletes them, and what the API server said.
    pub held: Vec<(ChildKey, Held, String)>,
    /// Children whose deletion was accepted.
    pub deleted: Vec<ChildKey>,
    /// Children that could not be written or deleted, and why.
    pub failures: Vec<(ChildKey, ChildError)>,
    /// How many deletes wait until every child can be written.
    pub waiting_deletes: usize,
    /// Whether the next pass would see something that this one did not.
    pub changed: bool,
}

/// A child that was applied.
#[derive(Debug)]
pub struct Written {
    /// Which one.
    pub key: ChildKey,
    /// What to remember; none if the answer does not say what we own.
    pub last: Option<LastApply>,
    /// The fields that are not as they were sent, by path.
    pub differences: Vec<String>,
    /// The fields that were another field manager's before, by manager and paths.
    pub taken: Vec<(String, Vec<String>)>,
}

/// Why a child could not be brought to where it should be.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// There is such an object, and it is not this parent's.
    #[error(
        "an object of this name exists and does not belong to this parent; delete or rename one of them, or let the plugin set \
         adoptionPolicy IfUnowned if it may take an object that no controller owns"
    )]
    NameCollision,
    /// It was changed, replaced or removed in between; the next pass sees the new state.
    #[error("it was changed at the same time")]
    Conflict(#[source] kube::Error),
    /// The service account may not do this.
    #[error("the service account may not do this; see `pilothouse manifests` for the rights that it needs")]
    Forbidden(#[source] kube::Error),
    /// The API server finds it invalid.
    #[error("the API server refuses it as invalid; correct what the plugin makes of this parent")]
    Invalid(#[source] kube::Error),
    /// It is larger than the API server takes.
    #[error(
        "it has {0} bytes as JSON, more than the API server takes; let the plugin make it smaller, or several of it"
    )]
    TooLarge(usize, #[source] kube::Error),
    /// The plugin has changed a field that cannot be changed.
    #[error(
        "a field was changed that can be set only when the object is created; undo the change, delete the child, or let the plugin \
         set updateStrategy Recreate or OnDelete"
    )]
    Immutable(#[source] kube::Error),
    /// It is a Job, which has to be made anew, and still runs.
    #[error(
        "it is a Job that runs and cannot be changed; it is made anew once it has finished, or once somebody deletes it"
    )]
    PendingRecreate,
    /// Another field manager has what the plugin sends, and is not to lose it.
    #[error(
        "another field manager has set fields that the plugin sends with `force: false`; let one of the two leave them out, or let the \
         plugin take them"
    )]
    FieldConflict(#[source] kube::Error),
    /// Somebody has changed the child, and an apply cannot undo it.
    #[error("somebody changed it, and the API server refuses to change it back; undo that change, or delete the child")]
    Drifted(#[source] kube::Error),
    /// The namespace is being deleted; nothing can be made in it.
    #[error("its namespace is being deleted")]
    NamespaceTerminating(#[source] kube::Error),
    /// Its namespace or its kind is not there.
    #[error("its namespace or its kind does not exist; create it, and this goes on by itself")]
    NotFound(#[source] kube::Error),
    /// The API server cannot make sense of it: a field that this version of the kind does not have, most of the time.
    #[error(
        "the API server failed on it; if it names a field or a version, the plugin needs another version of the kind"
    )]
    Server(#[source] kube::Error),
    /// Anything else, most of it temporary.
    #[error("the request failed")]
    Request(#[source] kube::Error),
}

impl ChildError {
    /// A stable name: the reason of the condition and the Event, the label of the metric.
    pub fn category(&self) -> &'static str {
        match self {
            Self::NameCollision => "NameCollision",
            Self::Forbidden(_) => "Forbidden",
            Self::Invalid(_) => "ChildInvalid",
            Self::TooLarge(..) => "ChildTooLarge",
            Self::Immutable(_) => "ImmutableField",
            Self::PendingRecreate => "PendingRecreate",
            Self::FieldConflict(_) => "FieldConflict",
            Self::Drifted(_) => "ChildDrifted",
            Self::NamespaceTerminating(_) => "NamespaceTerminating",
            Self::NotFound(_) => "ChildNotFound",
            Self::Conflict(_) | Self::Server(_) | Self::Request(_) => "ApplyFailed",
        }
    }
}

/// What the host remembers of a parent between two reconciles. All of it can be lost at any time: what is forgotten costs a
/// request, never correctness.
#[derive(Debug, Default)]
pub struct Memory {
    /// Per child, what our last apply was and what came of it.
    pub children: HashMap<ChildKey, LastApply>,
    /// The children that wait for somebody to delete them.
    pub held: HashMap<ChildKey, Held>,
    /// How long the plugin has not settled.
    pub settling: Settling,
    /// How long others have taken back what we have taken from them.
    pub contest: Settling,
    /// What was last told of a child, by reason: it is told once.
    pub notes: HashMap<(ChildKey, &'static str), String>,
    /// The status that we last wrote, and what the API server made of it.
    pub status: Option<LastStatus>,
    /// Status and reason of `Synced` as they were last told, for a parent whose own status does not say it.
    pub synced: Option<(String, String)>,
    /// Whether its circuit was told to be open.
    pub circuit_open: bool,
    /// Status and reason of `Synced` that the latest Event told of.
    pub transition: Option<(String, String)>,
    /// The request of a user that was told to be handled.
    pub handled: Option<String>,
    /// The Events of the plugin's last answer.
    pub events: Vec<Event>,
    /// The resource version of the parent that the latest reconcile has seen last, or made.
    pub seen: Option<String>,
    /// The revision that it was last reconciled with.
    pub revision: Option<String>,
    /// Whether children were written since the status was last told.
    pub made_changes: bool,
    /// The revision to which it is pinned in vain, and that was told.
    pub pin: Option<String>,
    /// Whether our finalizer was on it when it was last seen.
    pub finalizer: bool,
    /// Whether an answer of the plugin was ever acted upon. None: that was before our time, so it may have been.
    pub ever_applied: Option<bool>,
    /// Whether a call of the plugin may have changed something outside. None: as above.
    pub ever_reached: Option<bool>,
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

/// A child that stays as it is until somebody deletes it, or until it has finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Digest of what the plugin wants.
    pub desired: Digest,
    /// The object that cannot become that.
    pub uid: String,
    /// Whether it is a Job that runs, and is made anew once it has finished (`C31`).
    pub running: bool,
}

/// Our last write of a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastStatus {
    /// Digest of what we sent.
    pub sent: Digest,
    /// Digest of the whole status in the answer.
    pub kept: Digest,
    /// The fields that the answer does not have, since the schema of the kind does not.
    pub dropped: Vec<String>,
}

impl LastStatus {
    /// Whether a condition cannot be read back.
    pub fn drops_conditions(&self) -> bool {
        self.dropped.iter().any(|field| field == "status.conditions")
    }
}
