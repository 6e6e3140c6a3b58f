//! What holds of [`plan`] for every life of its children: random wishes, edits by others, deletions and restarts, on a toy of
//! server-side apply. A failure is shrunk to the few steps that it takes; `PROPTEST_CASES=100000` looks for longer.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proptest::{collection, option, prelude::*, sample};
use serde_json::{Map, Value, json};

use self::server::Live;
use super::{Owner, plan};
use crate::{
    identity::{PARENT_LABEL, RECORD_ANNOTATION},
    object::{Kind, Object, ObjectKey},
    plugin::{Answer, Child},
    reconcile::{apply::written, desired::Rules, projection::digest_object, remote::Record},
    state::{Applied, ChildApply, ChildError, ChildKey, DesiredChild, Memory, Observed, Plan, Tie},
};

mod server;

const OURS: &str = "pilothouse/1";
/// Names of map keys and items that plugins use, and those that they never use.
const NAMES: [&str; 2] = ["a", "b"];
const NAMES_OF_OTHERS: [&str; 2] = ["y", "z"];

/// A child: its namespace, that of the parent or another one, and its name.
type Place = (&'static str, &'static str);

fn kind(name: &str) -> Kind {
    let api = kube::discovery::ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk("t.example", "v1", name));
    Kind { api, namespaced: true, has_status: true }
}

fn key((namespace, name): Place) -> ChildKey {
    ChildKey { kind: 0, object: ObjectKey { namespace: Some(namespace.into()), name: name.into() } }
}

fn place() -> impl Strategy<Value = Place> {
    sample::select(vec![("n", "a"), ("n", "b"), ("other", "a"), ("other", "b")])
}

fn text() -> impl Strategy<Value = &'static str> {
    sample::select(vec!["1", "2"])
}

/// What a plugin wants of a child: of each part nothing, none, or some.
fn spec() -> impl Strategy<Value = Value> {
    let map = option::of(collection::btree_map(sample::select(NAMES.to_vec()), text(), 0..3));
    let list = option::of(collection::vec(text(), 0..3));
    let items = option::of((sample::subsequence(NAMES.to_vec(), 0..=2).prop_shuffle(), text()));
    (map, list, items).prop_map(|(map, list, items)| {
        let items = items.map(|(names, value)| -> Value {
            names.into_iter().map(|name| json!({"name": name, "value": value})).collect()
        });
        let parts = [("map", map.map(|map| json!(map))), ("list", list.map(|list| json!(list))), ("items", items)];
        parts.into_iter().filter_map(|(name, part)| Some((name.to_owned(), part?))).collect::<Map<_, _>>().into()
    })
}

/// What a plugin wants: of each child its spec, and in which wave it comes.
type Wishes = BTreeMap<Place, (Value, u16)>;

/// So many waves there are at most.
const WAVES: u16 = 3;

fn wishes() -> impl Strategy<Value = Wishes> {
    collection::btree_map(place(), (spec(), prop_oneof![3 => Just(0), 2 => 0..WAVES]), 0..4)
}

/// What somebody else does to a child.
#[derive(Clone, Debug)]
enum Edit {
    Label(&'static str),
    Status(&'static str),
    Map(&'static str, Option<&'static str>),
    /// Puts an item to the front, or takes it away.
    Item(&'static str, bool),
    /// A field within each item.
    Note(&'static str),
    Value(&'static str),
    List(Vec<&'static str>),
    Reverse,
    NoLabels,
    NoOwner,
    AnotherOwner,
}

/// Edits of fields that no plugin wants.
fn edit_of_theirs() -> impl Strategy<Value = Edit> {
    let name = || sample::select(NAMES_OF_OTHERS.to_vec());
    prop_oneof![
        text().prop_map(Edit::Label),
        text().prop_map(Edit::Status),
        (name(), option::of(text())).prop_map(|(name, value)| Edit::Map(name, value)),
        (name(), any::<bool>()).prop_map(|(name, add)| Edit::Item(name, add)),
        text().prop_map(Edit::Note),
    ]
}

fn any_edit() -> impl Strategy<Value = Edit> {
    let name = || sample::select(NAMES.to_vec());
    prop_oneof![
        edit_of_theirs(),
        (name(), option::of(text())).prop_map(|(name, value)| Edit::Map(name, value)),
        (name(), any::<bool>()).prop_map(|(name, add)| Edit::Item(name, add)),
        text().prop_map(Edit::Value),
        collection::vec(text(), 0..3).prop_map(Edit::List),
        sample::select(vec![Edit::Reverse, Edit::NoLabels, Edit::NoOwner, Edit::AnotherOwner]),
    ]
}

impl Edit {
    fn make(&self, object: &mut Value) {
        let spec = &mut object["spec"];
        let items = |spec: &Value| spec.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
        match self {
            Self::Label(value) => object["metadata"]["labels"]["theirs"] = json!(value),
            Self::Status(value) => object["status"] = json!(value),
            Self::Map(name, Some(value)) => spec["map"][name] = json!(value),
            Self::Map(name, None) => {
                if let Some(Value::Object(map)) = spec.get_mut("map") {
                    map.remove(*name);
                }
            }
            Self::Item(name, add) => {
                let mut items = items(spec);
                items.retain(|item| item["name"] != *name);
                if *add {
                    items.insert(0, json!({"name": name, "value": "theirs"}));
                }
                spec["items"] = items.into();
            }
            Self::Note(value) | Self::Value(value) => {
                let field = if matches!(self, Self::Note(_)) { "note" } else { "value" };
                let mut items = items(spec);
                items.iter_mut().for_each(|item| item[field] = json!(value));
                spec["items"] = items.into();
            }
            Self::List(list) => spec["list"] = json!(list),
            Self::Reverse => spec["items"] = items(spec).into_iter().rev().collect(),
            Self::NoLabels => object["metadata"]["labels"] = json!({}),
            Self::NoOwner => object["metadata"]["ownerReferences"] = json!([]),
            Self::AnotherOwner => {
                object["metadata"]["ownerReferences"] =
                    json!([{"apiVersion": "v1", "kind": "X", "name": "x", "uid": "u-x", "controller": true}]);
            }
        }
    }
}

/// One step in the life of a parent.
#[derive(Clone, Debug)]
enum Step {
    /// The plugin wants something else.
    Want(Wishes),
    /// Somebody writes a child.
    Edit(Place, Edit),
    /// Somebody deletes a child. Whether a finalizer holds it.
    Delete(Place, bool),
    /// The finalizers of others go.
    LetGo,
    /// The host forgets everything.
    Restart,
    /// The host reconciles.
    Reconcile,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => wishes().prop_map(Step::Want),
        4 => (place(), any_edit()).prop_map(|(place, edit)| Step::Edit(place, edit)),
        1 => (place(), any::<bool>()).prop_map(|(place, held)| Step::Delete(place, held)),
        1 => Just(Step::LetGo),
        1 => Just(Step::Restart),
        4 => Just(Step::Reconcile),
    ];
    collection::vec(step, 0..16)
}

/// One parent, its children, and what the host remembers.
struct World {
    kinds: [Kind; 1],
    parent_kind: Kind,
    parent: Value,
    children: BTreeMap<ChildKey, Live>,
    wanted: Vec<DesiredChild>,
    memory: Memory,
    made: usize,
}

impl World {
    fn new() -> Self {
        let parent = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u-p", "annotations": {}}});
        let (kinds, parent_kind) = ([kind("Toy")], kind("Parent"));
        let (children, wanted, memory) = (BTreeMap::new(), Vec::new(), Memory::default());
        Self { kinds, parent_kind, parent, children, wanted, memory, made: 0 }
    }

    fn live(steps: &[Step]) -> Self {
        let mut world = Self::new();
        steps.iter().for_each(|step| world.step(step));
        world
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Want(wishes) => self.wanted = self.check(wishes),
            Step::Edit(place, edit) => {
                if let Some(live) = self.children.get_mut(&key(*place)) {
                    live.update("somebody", |object| edit.make(object));
                }
            }
            Step::Delete(place, held) => {
                if let Some(live) = self.children.get_mut(&key(*place)) {
                    live.update("somebody", |object| {
                        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")
                    });
                }
                if !held {
                    self.children.remove(&key(*place));
                }
            }
            Step::LetGo => self.children.retain(|_, live| !live.object().is_deleting()),
            Step::Restart => self.memory = Memory::default(),
            Step::Reconcile => drop(self.reconcile()),
        }
    }

    /// The plugin's answer, as the check step hands it on.
    fn check(&self, wishes: &Wishes) -> Vec<DesiredChild> {
        let child = |((namespace, name), (spec, wave)): (&Place, &(Value, u16))| {
            let object = json!({"apiVersion": "t.example/v1", "kind": "Toy", "spec": spec,
                "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}}});
            Child { object: object.to_string(), options: json!({"wave": wave}).to_string() }
        };
        let answer =
            Answer { children: wishes.iter().map(child).collect(), extra: "{}".to_owned(), ..Answer::default() };
        let (declared, parent) = ([self.kinds[0].name()], self.parent());
        let rules = Rules { kinds: &self.kinds, declared: &declared, parent: &parent, scope: None, max_children: 9 };
        rules.desired(answer).unwrap().children
    }

    fn parent(&self) -> Object {
        Object::from_json(&self.parent.to_string()).unwrap()
    }

    fn observe(&self, show: impl Fn(&Value) -> Value) -> Observed {
        let parent = self.parent();
        let child = |(key, live): (&ChildKey, &Live)| {
            let object = Object::from_json(&show(&live.text()).to_string()).unwrap();
            (object.parent_uid(&self.kinds[0].group_kind()) == Some("u-p")).then(|| (key.clone(), Arc::new(object)))
        };
        let children = self.children.iter().filter_map(child).collect();
        Observed { record: Record::of(&parent), parent: Arc::new(parent), children }
    }

    fn plan(&self, memory: &Memory) -> Plan {
        self.plan_for(&self.observe(Value::clone), &self.wanted, memory)
    }

    fn plan_for(&self, observed: &Observed, wanted: &[DesiredChild], memory: &Memory) -> Plan {
        let owner = Owner { kind: &self.parent_kind, child_kinds: &self.kinds, label: "c-x-1", manager: OURS };
        plan(observed, wanted, memory, &owner)
    }

    /// The same with everything the other way round: children, wishes, and the keys of all objects.
    fn plan_reversed(&self) -> Plan {
        let mut observed = self.observe(reversed);
        observed.children.reverse();
        let turn = |child: &DesiredChild| {
            let Value::Object(object) = reversed(&child.object.clone().into()) else { unreachable!() };
            assert_eq!(digest_object(&object), digest_object(&child.object));
            DesiredChild { object, ..child.clone() }
        };
        let wanted: Vec<_> = self.wanted.iter().rev().map(turn).collect();
        self.plan_for(&observed, &wanted, &self.memory)
    }

    fn reconcile(&mut self) -> Plan {
        let live: Vec<_> = self.children.keys().collect();
        let remote: Vec<_> =
            self.wanted.iter().filter(|child| child.tie == Tie::Record).map(|child| &child.key).collect();
        if let Some(record) = Record::before(&self.parent(), &remote, &live, &[], false, &self.kinds) {
            self.parent["metadata"]["annotations"][RECORD_ANNOTATION] = json!(serde_json::to_string(&record).unwrap());
        }
        let plan = self.plan(&self.memory);
        assert_eq!(sorted(self.plan_reversed()), sorted(plan.clone()), "the order of inputs decides nothing");
        // One that is to be created is not among those that are observed; what has its name then is for the apply step to see.
        for apply in plan.applies.iter().filter(|apply| !apply.create) {
            assert!(!self.children[&apply.key].object().is_deleting(), "{apply:?}");
        }
        self.memory.planned(&plan);
        let mut applied = Applied::default();
        for child in &plan.applies {
            match self.write(child) {
                Some(answer) => applied.written.push(written(child, &answer, OURS)),
                None => applied.failures.push((child.key.clone(), ChildError::NameCollision)),
            }
        }
        let at_work = plan.applies.iter().map(|apply| apply.options.wave).max();
        let waits = |key: &ChildKey| self.wanted.iter().find(|child| child.key == *key).map(|child| child.options.wave);
        assert!(plan.waiting.iter().all(|key| waits(key) > at_work.or(Some(0))), "{plan:?}");
        if applied.failures.is_empty() && plan.waiting.is_empty() {
            for delete in &plan.deletes {
                let deleted = self.children.remove(&delete.key).unwrap();
                let object = deleted.object();
                assert_eq!(object.uid(), delete.uid);
                assert!(
                    object.controller_uid() == Some("u-p")
                        || Record::of(&self.parent()).unwrap().has(&delete.key, &self.kinds)
                );
                applied.deleted.push(delete.key.clone());
            }
        }
        self.memory.applied(&applied);
        plan
    }

    /// One apply, as the apply step makes it. None: the name belongs to somebody else.
    fn write(&mut self, child: &ChildApply) -> Option<Object> {
        if child.create && !self.children.contains_key(&child.key) {
            self.made += 1;
            self.children.insert(child.key.clone(), Live::new(&child.body, &format!("u-{}", self.made)));
        }
        let live = self.children.get_mut(&child.key)?;
        let object = live.object();
        if child.create {
            let is_new = object.resource_version() == "0";
            let is_ours = object.parent_uid("").is_none() && object.owned_by(OURS, "Apply", "").is_some();
            if !is_new && (!is_ours || object.is_deleting()) {
                return None;
            }
        } else {
            assert_eq!(child.body["metadata"]["uid"], object.uid(), "an apply means the very object that was seen");
        }
        live.apply(OURS, &child.body);
        Some(live.object())
    }

    /// There is nothing to do. But an empty list may have been taken by whoever has put something there: where nothing remembered says
    /// otherwise, that is a doubt, and applied once.
    fn assert_settled(&self, memory: &Memory) {
        let mut plan = self.plan(memory);
        let is_doubt = |apply: &ChildApply| {
            let live = &self.children[&apply.key].json["spec"]["items"];
            apply.body["spec"].get("items") == Some(&json!([]))
                && live.as_array().is_some_and(|items| !items.is_empty())
        };
        plan.applies.retain(|apply| apply.create || !is_doubt(apply));
        assert_quiet(&plan);
    }

    /// Reconciles until there is nothing to do, once those who are in the way have gone.
    fn settle(&mut self) {
        let of_others = |live: &Live| live.object().controller_uid().is_some_and(|uid| uid != "u-p");
        self.children.retain(|_, live| !live.object().is_deleting() && !of_others(live));
        // A pass for each wave, and one more if it lost a name to somebody, or had no owner reference.
        (0..=WAVES).for_each(|_| drop(self.reconcile()));
    }
}

fn reversed(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            members.iter().rev().map(|(name, value)| (name.clone(), reversed(value))).collect::<Map<_, _>>().into()
        }
        Value::Array(items) => items.iter().map(reversed).collect(),
        scalar => scalar.clone(),
    }
}

/// Steps of a plan are independent of one another.
fn sorted(mut plan: Plan) -> Plan {
    plan.applies.sort_by(|left, right| left.key.cmp(&right.key));
    plan.deletes.sort_by(|left, right| left.key.cmp(&right.key));
    plan.unchanged.sort();
    plan.recognized.sort_by(|left, right| left.0.cmp(&right.0));
    plan.deleting.sort();
    plan.waiting.sort();
    plan
}

fn assert_quiet(plan: &Plan) {
    let bodies: Vec<_> = plan.applies.iter().map(|apply| Value::from(apply.body.clone()).to_string()).collect();
    assert!(bodies.is_empty() && plan.deletes.is_empty(), "applies {bodies:#?}, deletes {:#?}", plan.deletes);
}

/// Reconciles after these steps, until there is nothing to do: then everything is as the plugin wants it.
fn assert_settles(steps: &[Step]) {
    let mut world = World::live(steps);
    world.settle();
    assert_quiet(&world.plan(&world.memory));
    world.assert_settled(&Memory::default());
    let wanted: BTreeSet<_> = world.wanted.iter().map(|child| child.key.clone()).collect();
    assert!(world.observe(Value::clone).children.iter().all(|(key, _)| wanted.contains(key)));
    // What is sent is told by a plan for a world in which nothing is yet.
    let empty = Observed { children: Vec::new(), ..world.observe(Value::clone) };
    for child in &world.wanted {
        for sent in world.plan_for(&empty, std::slice::from_ref(child), &Memory::default()).applies {
            let live = world.children.get(&sent.key);
            assert!(live.is_some_and(|live| live.is(OURS, &sent.body)), "{live:#?}");
        }
    }
}

#[test]
fn an_empty_list_that_somebody_has_filled_for_a_while_is_as_it_is_wanted() {
    let edit = |list: &[&'static str]| Step::Edit(("n", "a"), Edit::List(list.to_vec()));
    let wishes = BTreeMap::from([(("n", "a"), (json!({"list": []}), 0))]);
    assert_settles(&[Step::Want(wishes), Step::Reconcile, edit(&["1"]), edit(&[]), Step::Restart]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_has_happened_a_pass_makes_what_is_wanted_and_then_there_is_nothing_to_do(steps in steps()) {
        assert_settles(&steps);
    }

    #[test]
    fn fields_of_others_never_cause_an_apply(
        steps in steps(),
        edits in collection::vec((place(), edit_of_theirs()), 1..6),
    ) {
        let mut world = World::live(&steps);
        world.settle();
        for (place, edit) in edits {
            world.step(&Step::Edit(place, edit));
            world.assert_settled(&world.memory);
            world.assert_settled(&Memory::default());
        }
    }

    #[test]
    fn nothing_is_deleted_without_proof(
        children in collection::btree_map(place(), (0..4_usize, any::<bool>(), any::<bool>()), 0..5),
        wishes in wishes(),
    ) {
        let world = World::new();
        let owner = |uid: &str, controller: bool| json!([{"apiVersion": "v1", "kind": "P", "name": "p", "uid": uid, "controller": controller}]);
        let owners = [json!(null), owner("u-p", true), owner("u-p", false), owner("u-x", true)];
        let objects = children.iter().map(|(place, (owner, _, deleting))| {
            let mut object = json!({"metadata": {"name": place.1, "namespace": place.0, "uid": place.0.to_owned() + place.1,
                "labels": {PARENT_LABEL: "u-p"}, "ownerReferences": owners[*owner]}});
            if *deleting {
                object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            (key(*place), Arc::new(Object::from_json(&object.to_string()).unwrap()))
        });
        let recorded: Vec<_> = children.iter().filter(|(_, (_, recorded, _))| *recorded).map(|(place, _)| key(*place)).collect();
        let parent = world.parent();
        let record = Record::before(&parent, &recorded.iter().collect::<Vec<_>>(), &[], &[], false, &world.kinds);
        let observed = Observed { parent: Arc::new(parent), children: objects.collect(), record };
        let plan = world.plan_for(&observed, &world.check(&wishes), &Memory::default());
        let deleted: BTreeSet<_> = plan.deletes.into_iter().map(|delete| delete.key).collect();
        for (place, (owner, recorded, deleting)) in &children {
            let unwanted = !wishes.contains_key(place) && !deleting;
            prop_assert_eq!(deleted.contains(&key(*place)), unwanted && (*owner == 1 || *recorded));
        }
    }
}
