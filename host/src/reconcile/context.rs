//! What the reconciles of one reconciler share: its stores, what serves now, and what it remembers of its parents.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use jiff::Timestamp;
use kube::{Api, Client, api::ListParams, core::Selector};
use tokio::sync::watch;

use super::{
    Events,
    finalizer::{self, Ours},
    handles,
    remote::Record,
    status,
    tell::Told,
};
use crate::{
    claims::Claims,
    crd::{Limits, ParentCounts},
    identity::Identity,
    metrics,
    object::{Kind, Object, ObjectKey},
    plugin::ConditionStatus,
    related::Related,
    revision::Revision,
    rollout::{self, Health, Standing},
    state::{ChildKey, LastStatus, Memory},
    store::Store,
    tally::{Outcome, Tally},
};

/// Which parent: its name, and the very object of that name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParentKey {
    /// Where it is.
    pub object: ObjectKey,
    /// Its UID: a parent that is deleted and made again under the same name is another one.
    pub uid: String,
}

impl ParentKey {
    /// That of a parent as it is known.
    pub fn of(parent: &Object) -> Self {
        Self { object: parent.key(), uid: parent.uid().to_owned() }
    }
}

impl fmt::Display for ParentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.fmt(f)
    }
}

/// Everything that the reconciles of one reconciler share.
pub struct Context {
    /// Its name. One in a namespace sees and writes nothing elsewhere.
    pub key: ObjectKey,
    /// Its names in the cluster.
    pub identity: Identity,
    /// A client that acts as its service account.
    pub client: Client,
    /// Who else claims its parents.
    pub claims: Arc<Claims>,
    /// What serves now. A reconcile keeps the one that it began with.
    pub revisions: RwLock<Revisions>,
    /// The revision that served last, before this host started.
    pub trusted: Option<String>,
    /// What holds from the next call on, whatever the revision.
    pub settings: RwLock<Arc<Settings>>,
    /// The kind of its parents.
    pub parent_kind: Kind,
    /// Which parents.
    pub selector: Selector,
    /// The kinds of its children: those that its plugin declares, and those that an earlier one may have made.
    pub child_kinds: Vec<Kind>,
    /// Its parents.
    pub parents: Store,
    /// Its children, a store for each of `child_kinds`.
    pub children: Vec<Store>,
    /// Parents whose children are to stay, by UID.
    pub orphaned: Mutex<HashSet<String>>,
    /// Parents that are gone though our finalizer was on them, by UID, as they were at last.
    pub vanished: Mutex<HashMap<String, Arc<Object>>>,
    /// What its parents see beside their children.
    pub related: Arc<Related>,
    /// What it remembers of each parent, by UID.
    pub memory: Mutex<HashMap<String, Memory>>,
    /// How its parents are.
    pub tally: Mutex<Tally>,
    /// What is counted of it.
    pub metrics: Arc<metrics::Handles>,
    /// Where Events go; they are published as the host.
    pub events: Events,
    /// A reconciler that goes before this one for one of its parents, once there was such a parent.
    pub rival: watch::Sender<Option<ObjectKey>>,
}

/// The revisions that serve.
#[derive(Clone)]
pub struct Revisions {
    /// The one that has the parents which no other has.
    pub active: Arc<Revision>,
    /// One that takes over from it, step by step.
    pub candidate: Option<Candidate>,
}

/// A revision that takes over from another.
#[derive(Clone)]
pub struct Candidate {
    /// The revision.
    pub revision: Arc<Revision>,
    /// Its share of the parents.
    pub percent: u8,
    /// When it began to take over.
    pub started: Timestamp,
}

impl Revisions {
    /// One, for all parents.
    pub fn only(active: Arc<Revision>) -> Self {
        Self { active, candidate: None }
    }

    /// The one for a parent: that to which it is pinned, if it serves, else by its UID.
    pub fn of(&self, uid: &str, parent: Option<&Object>) -> &Arc<Revision> {
        let Some(candidate) = &self.candidate else { return &self.active };
        let pin = parent.and_then(|parent| parent.annotation(handles::REVISION));
        let goes_over = match pin {
            Some(pin) if pin == candidate.revision.id => true,
            Some(pin) if pin == self.active.id => false,
            _ => rollout::is_among(uid, candidate.percent),
        };
        if goes_over { &candidate.revision } else { &self.active }
    }

    /// All of them.
    pub fn all(&self) -> Vec<&Revision> {
        let candidate = self.candidate.as_ref().map(|candidate| &*candidate.revision);
        std::iter::once(&*self.active).chain(candidate).collect()
    }

    /// Whether a revision of this id serves.
    pub fn has(&self, id: &str) -> bool {
        self.active.id == id || self.candidate.as_ref().is_some_and(|candidate| candidate.revision.id == id)
    }
}

/// What a reconciler allows, apart from its revision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// What a call may use.
    pub limits: Limits,
    /// Do nothing.
    pub paused: bool,
    /// Finalizers of earlier operators that count as ours.
    pub legacy_finalizers: Vec<String>,
    /// A plugin without cleanup has nothing to clean up.
    pub drop_finalizer: bool,
}

impl Context {
    /// What serves now.
    pub fn revisions(&self) -> Revisions {
        self.revisions.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets other revisions serve, from the next reconcile on.
    pub fn serve(&self, revisions: Revisions) {
        let candidate = revisions.candidate.as_ref().map(|candidate| candidate.revision.id.as_str());
        self.tally().serve(&revisions.active.id, candidate);
        *self.revisions.write().unwrap_or_else(PoisonError::into_inner) = revisions;
    }

    /// The revision of a parent, which may be gone.
    pub fn revision_of(&self, parent: &ParentKey) -> Arc<Revision> {
        let known = self.parents.get(&parent.object).filter(|known| known.uid() == parent.uid);
        let known = known.or_else(|| self.vanished(&parent.uid));
        self.revisions().of(&parent.uid, known.as_deref()).clone()
    }

    /// What holds now.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets other settings hold, from the next call on.
    pub fn set(&self, settings: Settings) {
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
    }

    /// The finalizer of this reconciler.
    pub fn finalizer(&self) -> String {
        self.identity.finalizer()
    }

    /// The finalizers that count as this reconciler's.
    pub(super) fn finalizers(&self) -> Ours {
        Ours::new(self.finalizer(), self.settings().legacy_finalizers.clone())
    }

    pub(super) fn manager(&self, parent: &Object) -> String {
        let api = &self.parent_kind.api;
        self.identity.field_manager(&api.group, &api.kind, &parent.key())
    }

    pub(super) fn parent_api(&self, parent: &ObjectKey) -> Api<Object> {
        self.parent_kind.objects(&self.client, parent.namespace.as_deref())
    }

    /// How the user wants the children to be treated, as the API server notes it among the finalizers. The garbage collector takes
    /// the note away when it has done its part, so it is kept in mind, and on record where there is one.
    pub(super) fn propagation(&self, parent: &Object) -> &'static str {
        let has = |name| finalizer::is_on(parent, name);
        let known = || self.orphaned.lock().unwrap_or_else(PoisonError::into_inner).contains(parent.uid());
        match () {
            () if has("orphan") || known() || Record::of(parent).is_some_and(|record| record.orphan) => "Orphan",
            () if has("foregroundDeletion") => "Foreground",
            () => "Background",
        }
    }

    /// The watch shows this state of a parent.
    pub fn show(&self, parent: &Object) {
        self.see(parent);
        // It had only left the selection.
        self.vanished.lock().unwrap_or_else(PoisonError::into_inner).remove(parent.uid());
    }

    /// Every state of a parent passes here when it is seen. That of an answer may be older than what the watch has told.
    pub(super) fn see(&self, parent: &Object) {
        if parent.is_deleting() && finalizer::is_on(parent, "orphan") {
            self.orphaned.lock().unwrap_or_else(PoisonError::into_inner).insert(parent.uid().to_owned());
        }
    }

    /// The watch no longer shows this parent.
    pub fn see_gone(&self, parent: &Object) {
        if finalizer::is_lost(parent, &self.finalizer()) {
            let mut vanished = self.vanished.lock().unwrap_or_else(PoisonError::into_inner);
            vanished.insert(parent.uid().to_owned(), Arc::new(parent.clone()));
        }
    }

    pub(super) fn vanished(&self, uid: &str) -> Option<Arc<Object>> {
        self.vanished.lock().unwrap_or_else(PoisonError::into_inner).get(uid).cloned()
    }

    /// Status and reason of `Synced`, as they were told last.
    pub(super) fn synced(&self, parent: &Object, memory: &Memory) -> Option<(String, String)> {
        // A CRD may keep no conditions (`C34`): then it is known only to us, as where there is no status.
        let dropped = memory.status.as_ref().is_some_and(LastStatus::drops_conditions);
        if self.parent_kind.tells_status() && !dropped {
            status::live_condition(parent, "Synced")
        } else {
            memory.synced.clone()
        }
    }

    /// The reconciler that has this parent in our place.
    pub(super) fn rival(&self, parent: &Object) -> Option<ObjectKey> {
        let ObjectKey { namespace, .. } = parent.key();
        self.claims.rival(&self.key, &self.parent_kind.group_kind(), namespace.as_deref(), || parent.labels())
    }

    /// Whether another reconciler has this parent in our place.
    pub fn is_others(&self, parent: &Object) -> bool {
        self.rival(parent).is_some()
    }

    /// All objects of a kind that this reconciler may see.
    pub fn all(&self, kind: &Kind) -> Api<Object> {
        kind.objects(&self.client, self.key.namespace.as_deref())
    }

    pub(super) fn is_child(&self, key: &ChildKey, live: &Object, parent: &Object) -> bool {
        live.parent_uid(&self.child_kinds[key.kind].group_kind()) == Some(parent.uid())
    }

    pub(super) fn describe(&self, key: &ChildKey) -> String {
        format!("{} {}", self.child_kinds[key.kind].api.kind, key.object)
    }

    /// All parents that wait for us, from the API server: those that carry our finalizer, selected or not, and of those that are ours those
    /// with one of an earlier operator. On others it may still serve.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub async fn holding(&self) -> Result<Vec<Object>, kube::Error> {
        let (finalizer, ours) = (self.finalizer(), self.finalizers());
        let is_ours = |parent: &Object| self.parents.get(&parent.key()).is_some() && self.rival(parent).is_none();
        let mut parents = self.all(&self.parent_kind).list(&ListParams::default()).await?.items;
        parents.retain(|parent| finalizer::is_on(parent, &finalizer) || (ours.has_legacy(parent) && is_ours(parent)));
        Ok(parents)
    }

    /// The resource version of the parent that the latest reconcile has left.
    pub fn seen(&self, uid: &str) -> Option<String> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).get(uid)?.seen.clone()
    }

    /// A parent that is not among ours was seen with our finalizer on.
    pub fn note_finalizer(&self, uid: &str) {
        self.remember(uid, Memory { finalizer: true, ..Memory::default() });
    }

    /// How its parents are.
    pub fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every kind was listed: these are the parents to get to know.
    pub fn start_tally(&self) {
        self.tally().start(self.parents.all().iter().map(|parent| parent.uid().to_owned()));
    }

    /// How many parents there are, and how they are.
    pub fn parent_counts(&self) -> ParentCounts {
        self.tally().counts(self.parents.len())
    }

    /// The same, once each parent that there was at the start is known: before, the counts say more of this host than of the parents.
    pub fn known_parents(&self) -> Option<ParentCounts> {
        let complete = self.tally().is_complete();
        complete.then(|| self.parent_counts())
    }

    /// How the parents of the revision that takes over are; none if there is none. Those that a person has stopped, that are being deleted,
    /// or that another reconciler has, tell nothing of it.
    pub fn standing(&self, now: Timestamp) -> Option<Standing> {
        let revisions = self.revisions();
        let candidate = revisions.candidate.as_ref()?;
        let parents = self.parents.all();
        let counts = |parent: &&Arc<Object>| {
            !parent.is_deleting() && !handles::is_set(parent, handles::PAUSED) && !self.is_others(parent)
        };
        let has = |parent: &&Arc<Object>| revisions.of(parent.uid(), Some(parent)).id == candidate.revision.id;
        let tally = self.tally();
        let mut standing = Standing { all: parents.len(), ..Standing::default() };
        for parent in parents.iter().filter(has).filter(counts) {
            standing.add(tally.with_candidate(parent.uid()), candidate.started, now);
        }
        Some(standing)
    }

    pub(super) fn note(&self, parent: &Object, revision: &str, succeeded: bool, told: Option<&Told<'_>>) {
        let mut tally = self.tally();
        let published = || Some(status::live_condition(parent, "Ready")?.0 == ConditionStatus::True.as_str());
        let ready = told.map(Told::is_ready).or_else(|| if tally.knows(parent.uid()) { None } else { published() });
        let before = || Health {
            failing: status::unmet_since(parent, "Synced"),
            not_ready: status::unmet_since(parent, "Ready"),
        };
        tally.note(parent.uid(), Outcome { revision, succeeded, ready, now: Timestamp::now() }, before);
    }

    pub(super) fn recall(&self, uid: &str) -> Memory {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).remove(uid).unwrap_or_default()
    }

    pub(super) fn remember(&self, uid: &str, memory: Memory) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).insert(uid.to_owned(), memory);
    }
}
