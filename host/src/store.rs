//! The objects of one kind that the host has seen, kept up to date by a watch and found by name, UID or owner.
//!
//! One watch feeds a store; reconciles read it and lay their own writes over it, so that a pass sees what the one before
//! it wrote, whether or not the watch has shown it yet (`C37`: a stale cache makes nothing twice).

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ops::AddAssign,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use tokio::sync::watch;

use crate::object::{Kind, Object, ObjectKey};

/// See the module's documentation.
pub struct Store {
    state: RwLock<State>,
    synced: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    /// The kind of the objects, as `Kind.group`.
    kind: String,
    // A key is held once, whatever finds it.
    objects: HashMap<Arc<ObjectKey>, Arc<Object>>,
    by_uid: HashMap<String, Arc<ObjectKey>>,
    /// Sorted. Most have a child or two of a kind, for which a tree would be large.
    by_owner: HashMap<String, Vec<Arc<ObjectKey>>>,
    /// During a list: what it has brought so far.
    listed: Option<HashSet<ObjectKey>>,
    /// UIDs that the watch has shown to be gone, and the same in order, the latest last.
    gone: HashSet<String>,
    gone_in_order: VecDeque<String>,
}

/// How many deletions are remembered: far more than there are answers under way at any time.
const REMEMBERED_DELETIONS: usize = 1024;

/// What a store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// How many objects.
    pub objects: usize,
    /// Their JSON texts, in bytes.
    pub json: usize,
    /// All memory for them, in bytes: the texts, what is read from them, and the indices. Not what the allocator itself needs.
    pub bytes: usize,
}

impl AddAssign for Size {
    fn add_assign(&mut self, other: Self) {
        self.objects += other.objects;
        self.json += other.json;
        self.bytes += other.bytes;
    }
}

/// A change that a watch event made to the store: the states before and after.
#[derive(Debug)]
pub struct Change {
    /// None: it was not there.
    pub before: Option<Arc<Object>>,
    /// None: it is gone.
    pub after: Option<Arc<Object>>,
}

impl Store {
    /// An empty store for objects of this kind.
    pub fn of(kind: &Kind) -> Self {
        Self::of_group_kind(kind.group_kind())
    }

    /// The same, for a kind as `Kind.group`.
    pub fn of_group_kind(kind: String) -> Self {
        let state = State { kind, ..State::default() };
        Self { state: RwLock::new(state), synced: watch::Sender::new(false) }
    }

    /// The object of that name.
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        self.read().objects.get(key).cloned()
    }

    /// Where the object with this UID is.
    pub fn key_of(&self, uid: &str) -> Option<ObjectKey> {
        self.read().by_uid.get(uid).map(|key| ObjectKey::clone(key))
    }

    /// Whether the watch has shown an object with this UID, also one that has gone since: of those, the latest `REMEMBERED_DELETIONS`.
    pub fn has_seen(&self, uid: &str) -> bool {
        let state = self.read();
        state.by_uid.contains_key(uid) || state.gone.contains(uid)
    }

    /// The children of the parent with this UID, sorted by namespace and name.
    pub fn owned_by(&self, uid: &str) -> Vec<Arc<Object>> {
        let state = self.read();
        let keys = state.by_owner.get(uid).into_iter().flatten();
        keys.filter_map(|key| state.objects.get(key).cloned()).collect()
    }

    /// All objects.
    pub fn all(&self) -> Vec<Arc<Object>> {
        self.read().objects.values().cloned().collect()
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// How much it holds. Reads all of it.
    pub fn size(&self) -> Size {
        self.read().size()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the first list is complete: before that, an absent object proves nothing.
    pub fn is_synced(&self) -> bool {
        *self.synced.borrow()
    }

    /// Waits for the first list.
    pub async fn wait_synced(&self) {
        // The sender lives in self, so the channel cannot close.
        let _ = self.synced.subscribe().wait_for(|synced| *synced).await;
    }

    /// A list begins: what it does not bring until [`Self::end_list`] is gone.
    pub fn begin_list(&self) {
        self.write().listed = Some(HashSet::new());
    }

    /// An item of the list that has begun.
    pub fn list_item(&self, object: Object) -> Option<Change> {
        let mut state = self.write();
        if let Some(listed) = &mut state.listed {
            listed.insert(object.key());
        }
        state.gone.remove(object.uid());
        state.insert(object)
    }

    /// The list is complete.
    pub fn end_list(&self) -> Vec<Change> {
        let mut state = self.write();
        let listed = state.listed.take().unwrap_or_default();
        let gone: Vec<_> = state.objects.keys().filter(|key| !listed.contains(key.as_ref())).cloned().collect();
        let changes: Vec<_> = gone.iter().filter_map(|key| state.remove(key)).collect();
        for gone in changes.iter().filter_map(|change| change.before.as_ref()) {
            state.bury(gone.uid());
        }
        drop(state);
        self.synced.send_replace(true);
        changes
    }

    /// The watch shows this state. An older one than is known is dropped, and so is the echo of a write of ours: neither
    /// is a change.
    pub fn show(&self, object: Object) -> Option<Change> {
        let mut state = self.write();
        state.gone.remove(object.uid());
        state.insert(object)
    }

    /// An answer of the API server shows this state, maybe before the watch does. Not if the watch has shown already that the object is
    /// gone or no longer selected: it would stay for ever, since nothing more is going to be told of it.
    pub fn apply(&self, object: Object) -> Option<Change> {
        let mut state = self.write();
        if state.gone.contains(object.uid()) { None } else { state.insert(object) }
    }

    /// The watch shows that this object was deleted.
    pub fn delete(&self, object: &Object) -> Option<Change> {
        let mut state = self.write();
        state.bury(object.uid());
        let key = object.key();
        // A later object of the same name stays.
        if state.objects.get(&key).is_some_and(|known| known.uid() != object.uid()) {
            return None;
        }
        state.remove(&key)
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a hash map keeps aside for so many entries.
fn table<K, V>(map: &HashMap<K, V>) -> usize {
    // Seven of eight places are used at most, and each has a byte of its own.
    map.capacity() * 8 / 7 * (size_of::<(K, V)>() + 1)
}

impl State {
    fn size(&self) -> Size {
        /// The two counters of an `Arc`.
        const COUNTERS: usize = 2 * size_of::<usize>();
        let mut size = Size { objects: self.objects.len(), ..Size::default() };
        for (key, object) in &self.objects {
            size.json += object.json().len();
            let key = size_of::<ObjectKey>() + key.name.len() + key.namespace.as_ref().map_or(0, String::len);
            size.bytes += key + object.overhead() + object.json().len() + 3 * COUNTERS;
        }
        size.bytes += table(&self.objects) + table(&self.by_uid) + table(&self.by_owner);
        size.bytes += self.by_uid.keys().chain(self.by_owner.keys()).map(String::capacity).sum::<usize>();
        size.bytes += self.by_owner.values().map(Vec::capacity).sum::<usize>() * size_of::<Arc<ObjectKey>>();
        size
    }

    fn insert(&mut self, object: Object) -> Option<Change> {
        let key = Arc::new(object.key());
        if self.objects.get(&key).is_some_and(|known| !object.is_newer_than(known)) {
            return None;
        }
        let before = self.remove(&key).and_then(|change| change.before);
        if let Some(replaced) = before.as_deref().filter(|before| before.uid() != object.uid()) {
            self.bury(replaced.uid());
        }
        let object = Arc::new(object);
        self.by_uid.insert(object.uid().to_owned(), key.clone());
        if let Some(owner) = object.parent_uid(&self.kind) {
            let keys = self.by_owner.entry(owner.to_owned()).or_default();
            if let Err(place) = keys.binary_search(&key) {
                keys.insert(place, key.clone());
            }
        }
        self.objects.insert(key, object.clone());
        Some(Change { before, after: Some(object) })
    }

    fn bury(&mut self, uid: &str) {
        if self.gone.insert(uid.to_owned()) {
            self.gone_in_order.push_back(uid.to_owned());
        }
        if self.gone_in_order.len() > REMEMBERED_DELETIONS
            && let Some(oldest) = self.gone_in_order.pop_front()
        {
            self.gone.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &ObjectKey) -> Option<Change> {
        let object = self.objects.remove(key)?;
        self.by_uid.remove(object.uid());
        if let Some(owner) = object.parent_uid(&self.kind)
            && let Some(keys) = self.by_owner.get_mut(owner)
        {
            if let Ok(place) = keys.binary_search_by(|known| known.as_ref().cmp(key)) {
                keys.remove(place);
            }
            if keys.is_empty() {
                self.by_owner.remove(owner);
            }
        }
        Some(Change { before: Some(object), after: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Store {
        let api = kube::discovery::ApiResource::erase::<k8s_openapi::api::core::v1::ConfigMap>(&());
        Store::of(&Kind { api, namespaced: true, has_status: false })
    }

    fn object(name: &str, uid: &str, version: u64, owner: &str) -> Object {
        Object::from_json(&format!(
            r#"{{"metadata":{{"name":"{name}","namespace":"n","uid":"{uid}","resourceVersion":"{version}",
               "ownerReferences":[{{"apiVersion":"v1","kind":"K","name":"p","uid":"{owner}","controller":true}}]}}}}"#
        ))
        .unwrap()
    }

    fn names(objects: &[Arc<Object>]) -> Vec<&str> {
        objects.iter().map(|object| object.name()).collect()
    }

    #[test]
    fn children_are_found_by_owner_and_follow_it() {
        let store = store();
        store.apply(object("b", "u2", 2, "p1"));
        store.apply(object("a", "u1", 1, "p1"));
        assert_eq!(names(&store.owned_by("p1")), ["a", "b"]);
        let change = store.apply(object("a", "u1", 3, "p2")).unwrap();
        assert_eq!(change.before.unwrap().controller_uid(), Some("p1"));
        assert_eq!(names(&store.owned_by("p1")), ["b"]);
        assert_eq!(names(&store.owned_by("p2")), ["a"]);
    }

    /// A ConfigMap as small ones are, with what the API server and the host put on it.
    fn child(number: usize) -> String {
        let uid = |of: usize| format!("{of:08}-5f0c-4e4c-9c39-0d6f3a6ad8a1");
        let (uid, owner) = (uid(number), uid(100_000 + number));
        let name = format!("application-{number}");
        let owns = format!(
            r#"{{"f:data":{{"f:config.yaml":{{}}}},"f:metadata":{{"f:annotations":{{"f:internal.pilothouse.dev/binding":{{}}}},"f:labels":{{"f:app.kubernetes.io/name":{{}},"f:internal.pilothouse.dev/applied":{{}},"f:internal.pilothouse.dev/reconciler":{{}}}},"f:ownerReferences":{{"k:{{\"uid\":\"{owner}\"}}":{{}}}}}}}}"#
        );
        format!(
            r#"{{"apiVersion":"v1","data":{{"config.yaml":"listen: 0.0.0.0:8080\nlog: info\nworkers: 4\n"}},"kind":"ConfigMap",
            "metadata":{{"creationTimestamp":"2026-01-01T00:00:00Z","labels":{{"app.kubernetes.io/name":"{name}","internal.pilothouse.dev/applied":"0123456789abcdef0123456789abcdef","internal.pilothouse.dev/reconciler":"c-myapp-0123456789"}},
            "managedFields":[{{"apiVersion":"v1","fieldsType":"FieldsV1","fieldsV1":{owns},"manager":"pilothouse/0123456789","operation":"Apply","time":"2026-01-01T00:00:00Z"}}],
            "name":"{name}","namespace":"team-blue",
            "ownerReferences":[{{"apiVersion":"mygroup.example.com/v1","blockOwnerDeletion":true,"controller":true,"kind":"MyApp","name":"{name}","uid":"{owner}"}}],
            "resourceVersion":"{}","uid":"{uid}"}}}}"#,
            1_000_000 + number
        )
    }

    #[test]
    fn an_object_takes_at_most_twice_its_json() {
        let store = store();
        let mut served = 0;
        for number in 0..1000 {
            let text = child(number);
            served += text.len();
            store.show(Object::from_json(&text).unwrap());
        }
        let Size { objects, json, bytes } = store.size();
        assert_eq!(objects, 1000);
        assert!(json < served, "managedFields are left out");
        assert!(bytes > json, "{bytes} are more than the JSON");
        assert!(bytes <= 2 * served, "{} bytes each, of {} as served", bytes / objects, served / objects);
    }

    #[test]
    fn an_echo_or_an_older_state_is_no_change() {
        let store = store();
        assert!(store.apply(object("a", "u1", 5, "p1")).is_some());
        assert!(store.apply(object("a", "u1", 5, "p1")).is_none());
        assert!(store.apply(object("a", "u1", 4, "p1")).is_none());
        assert!(store.apply(object("a", "u9", 4, "p1")).is_some(), "another UID is another object");
    }

    #[test]
    fn a_list_removes_what_it_does_not_bring() {
        let store = store();
        store.apply(object("old", "u1", 1, "p1"));
        store.begin_list();
        store.list_item(object("new", "u2", 2, "p1"));
        assert!(!store.is_synced());
        let gone = store.end_list();
        assert_eq!(gone.len(), 1);
        assert_eq!(gone[0].before.as_ref().unwrap().name(), "old");
        assert!(store.is_synced());
        assert_eq!(names(&store.owned_by("p1")), ["new"]);
    }

    #[test]
    fn a_late_answer_does_not_bring_back_what_the_watch_has_shown_to_be_gone() {
        let store = store();
        store.show(object("a", "u1", 1, "p1"));
        store.delete(&object("a", "u1", 2, "p1"));
        assert!(store.apply(object("a", "u1", 3, "p1")).is_none());
        assert!(store.is_empty());
        assert!(store.show(object("a", "u1", 4, "p1")).is_some(), "it is selected again");
        assert!(store.apply(object("a", "u1", 5, "p1")).is_some());
    }

    #[test]
    fn what_is_gone_was_seen_also_if_only_its_successor_shows_it() {
        let store = store();
        store.show(object("a", "u1", 1, "p1"));
        store.show(object("a", "u2", 2, "p1"));
        store.delete(&object("a", "u2", 3, "p1"));
        assert_eq!(["u1", "u2", "u3"].map(|uid| store.has_seen(uid)), [true, true, false]);
    }

    #[test]
    fn the_deletion_of_an_old_uid_leaves_its_successor() {
        let store = store();
        store.apply(object("a", "u2", 7, "p1"));
        assert!(store.delete(&object("a", "u1", 8, "p1")).is_none());
        assert!(store.delete(&object("a", "u2", 9, "p1")).is_some());
        assert!(store.is_empty());
        assert_eq!(store.key_of("u2"), None);
    }
}
