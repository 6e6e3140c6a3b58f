//! Which parent selects what, and by which watch each selection is seen. Pure.
//!
//! A selection has a watch of its own, as narrow as itself, which all parents share that select the same: so the host holds what is
//! selected, and no more. Each watch is a connection, though. Of a kind of which very many different things are selected a
//! whole namespace is watched for what comes on top, and of very many namespaces all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    reconcile::ParentKey,
    selection::{Selection, is_secret},
    store::Change,
};

/// How many watches of one kind may be narrow, and then again how many may be of a namespace: a few MB here, and in the API server.
const NARROW: usize = 50;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Index {
    parents: HashMap<ParentKey, Vec<Selection>>,
    selections: BTreeMap<Selection, Selected>,
    watches: BTreeMap<Selection, BTreeSet<Selection>>,
}

/// What is known of a selection.
struct Selected {
    /// What is watched for it: itself, or more.
    watch: Selection,
    /// Who selects it.
    parents: BTreeSet<ParentKey>,
}

impl Index {
    /// The parent selects these from now on, sorted, and no others. What nobody selects any more.
    pub(super) fn select(&mut self, parent: &ParentKey, selections: &[Selection]) -> Vec<Selection> {
        let before = self.parents.get(parent).map(Vec::as_slice).unwrap_or_default();
        if before == selections {
            return Vec::new();
        }
        let before = if selections.is_empty() {
            self.parents.remove(parent).unwrap_or_default()
        } else {
            self.parents.insert(parent.clone(), selections.to_vec()).unwrap_or_default()
        };
        for selection in selections {
            self.follow(selection);
            if let Some(selected) = self.selections.get_mut(selection) {
                selected.parents.insert(parent.clone());
            }
        }
        let mut left = Vec::new();
        for selection in before.into_iter().filter(|selection| selections.binary_search(selection).is_err()) {
            if let Some(selected) = self.selections.get_mut(&selection) {
                selected.parents.remove(parent);
                if selected.parents.is_empty() {
                    left.push(selection);
                }
            }
        }
        left
    }

    /// By which watch this is seen: that which it has already, or one that is chosen now. And whether nobody selects it.
    pub(super) fn follow(&mut self, selection: &Selection) -> (Selection, bool) {
        if let Some(selected) = self.selections.get(selection) {
            return (selected.watch.clone(), selected.parents.is_empty());
        }
        let watch = self.choose(selection);
        self.watches.entry(watch.clone()).or_default().insert(selection.clone());
        self.selections.insert(selection.clone(), Selected { watch: watch.clone(), parents: BTreeSet::new() });
        (watch, true)
    }

    /// It keeps what it was given: if it went to and fro each time would be a list.
    fn choose(&self, selection: &Selection) -> Selection {
        // Those are few, and no other may be read on the way.
        if self.watches.contains_key(selection) || is_secret(&selection.kind) {
            return selection.clone();
        }
        let of_kind = || self.watches.keys().filter(|watch| watch.kind == selection.kind);
        if of_kind().filter(|watch| !watch.is_whole()).count() < NARROW && !selection.is_whole() {
            return selection.clone();
        }
        let in_namespace = selection.in_namespace();
        let whole = of_kind().filter(|watch| watch.is_whole()).count();
        if self.watches.contains_key(&in_namespace) || whole < NARROW { in_namespace } else { selection.anywhere() }
    }

    /// Lets go what nobody selects; the watches that are needed no more.
    pub(super) fn drop_unselected(&mut self, selections: &[Selection]) -> Vec<Selection> {
        let mut needless = Vec::new();
        for selection in selections {
            let is_unselected = |selected: &Selected| selected.parents.is_empty();
            if !self.selections.get(selection).is_some_and(is_unselected) {
                continue;
            }
            let Some(Selected { watch, .. }) = self.selections.remove(selection) else { continue };
            if let Some(seen) = self.watches.get_mut(&watch) {
                seen.remove(selection);
                if seen.is_empty() {
                    self.watches.remove(&watch);
                    needless.push(watch);
                }
            }
        }
        needless
    }

    /// Whom a change that this watch has shown concerns: those who select the object as it was before, or as it is now.
    pub(super) fn concerned(&self, watch: &Selection, change: &Change) -> BTreeSet<&ParentKey> {
        let states = || [&change.before, &change.after].into_iter().flatten();
        let is_seen = |selection: &&Selection| *selection == watch || states().any(|object| selection.matches(object));
        self.seen_by(watch).filter(is_seen).flat_map(|selection| self.parents_of(selection)).collect()
    }

    /// Who sees something by this watch.
    pub(super) fn all(&self, watch: &Selection) -> BTreeSet<&ParentKey> {
        self.seen_by(watch).flat_map(|selection| self.parents_of(selection)).collect()
    }

    fn seen_by(&self, watch: &Selection) -> impl Iterator<Item = &Selection> {
        self.watches.get(watch).into_iter().flatten()
    }

    fn parents_of(&self, selection: &Selection) -> impl Iterator<Item = &ParentKey> {
        self.selections.get(selection).into_iter().flat_map(|selected| &selected.parents)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        labels::Labels,
        object::{Object, ObjectKey},
        plugin::describe::KindName,
    };

    fn parent(number: usize) -> ParentKey {
        let object = ObjectKey { namespace: None, name: format!("p{number}") };
        ParentKey { object, uid: format!("u{number}") }
    }

    fn selection(kind: &str, namespace: Option<&str>, name: Option<&str>, labels: &str) -> Selection {
        Selection {
            kind: KindName { api_version: "v1".to_owned(), kind: kind.to_owned() },
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
            labels: Labels::parse(labels).unwrap(),
        }
    }

    fn object(namespace: &str, name: &str, label: &str) -> Arc<Object> {
        let text = format!(
            r#"{{"metadata":{{"namespace":"{namespace}","name":"{name}","uid":"{name}","labels":{{"l":"{label}"}}}}}}"#
        );
        Arc::new(Object::from_json(&text).unwrap())
    }

    /// Those whom a change concerns, whichever watches show it.
    fn concerned(index: &Index, before: Option<&Arc<Object>>, after: Option<&Arc<Object>>) -> BTreeSet<ParentKey> {
        let change = Change { before: before.cloned(), after: after.cloned() };
        let shows = |watch: &&Selection| [before, after].into_iter().flatten().any(|object| watch.matches(object));
        index.watches.keys().filter(shows).flat_map(|watch| index.concerned(watch, &change)).cloned().collect()
    }

    #[test]
    fn what_two_select_has_one_watch_that_ends_with_the_last_of_them() {
        let mut index = Index::default();
        let x = [selection("ConfigMap", Some("n"), Some("x"), "")];
        assert!(index.select(&parent(1), &x).is_empty() && index.select(&parent(2), &x).is_empty());
        assert_eq!(index.watches.len(), 1);
        assert!(index.select(&parent(1), &[]).is_empty(), "somebody selects it");
        assert_eq!(index.select(&parent(2), &[]), x);
        index.select(&parent(3), &x);
        assert!(index.drop_unselected(&x).is_empty(), "somebody selects it again");
        index.select(&parent(3), &[]);
        assert_eq!(index.drop_unselected(&x), x);
        assert!(index.watches.is_empty() && index.selections.is_empty() && index.parents.is_empty());
    }

    #[test]
    fn very_many_selections_of_a_kind_are_seen_by_wider_watches_and_secrets_never() {
        let mut index = Index::default();
        let names: Vec<_> = (0..200).map(|number| format!("x{number}")).collect();
        for (number, name) in names.iter().enumerate() {
            for kind in ["ConfigMap", "Secret"] {
                index.select(&parent(number), &[selection(kind, Some("n"), Some(name), "")]);
            }
            index.select(
                &parent(number),
                &[selection("ConfigMap", Some("n"), Some(name), ""), selection("Secret", Some("n"), Some(name), "")],
            );
        }
        let of = |kind: &str| index.watches.keys().filter(|watch| watch.kind.kind == kind).count();
        assert_eq!((of("ConfigMap"), of("Secret")), (NARROW + 1, 200));
        // And in very many namespaces by one of all of them.
        for name in &names {
            index.select(&parent(1000), &[selection("ConfigMap", Some(name), Some("x"), "")]);
        }
        let all = index.watches.keys().filter(|watch| watch.is_whole()).map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(all.len(), NARROW + 1);
        assert!(all.contains(&"ConfigMap (v1)".to_owned()));
        // It keeps the narrow one that it has.
        let first = selection("ConfigMap", Some("n"), Some("x0"), "");
        assert_eq!(index.follow(&first), (first.clone(), false));
    }

    proptest! {
        /// Whoever selects what, and however it is watched: a change wakes those who select the object before or after it.
        #[test]
        fn a_change_concerns_those_who_select_it(
            steps in prop::collection::vec((0..6_usize, prop::collection::btree_set(0..90_usize, 0..40)), 1..30),
            (name, before, after) in (0..30_usize, 0..4_usize, 0..4_usize),
        ) {
            let all: Vec<_> = (0..90)
                .map(|number| match number % 3 {
                    0 => selection("ConfigMap", Some("n"), Some(&format!("x{}", number / 3)), ""),
                    1 => selection("ConfigMap", Some(["n", "m"][number / 3 % 2]), None, &format!("l={}", number / 6)),
                    _ => selection("ConfigMap", None, None, &format!("l!={}", number / 3)),
                })
                .collect();
            let mut index = Index::default();
            let mut wanted = std::collections::BTreeMap::new();
            for (who, what) in steps {
                let mut selections: Vec<_> = what.into_iter().map(|number| all[number].clone()).collect();
                selections.sort_unstable();
                let left = index.select(&parent(who), &selections);
                if who % 2 == 0 {
                    index.drop_unselected(&left);
                }
                wanted.insert(parent(who), selections);
            }
            let narrow = index.watches.keys().filter(|watch| !watch.is_whole()).count();
            prop_assert!(narrow <= NARROW && index.watches.len() <= 2 * NARROW + 1);
            // 0: it is not there.
            let state = |label: usize| (label > 0).then(|| object("n", &format!("x{name}"), &label.to_string()));
            let (before, after) = (state(before), state(after));
            let selects = |selections: &Vec<Selection>| {
                selections.iter().any(|it| [&before, &after].into_iter().flatten().any(|object| it.matches(object)))
            };
            let expected: BTreeSet<_> =
                wanted.iter().filter(|(_, selections)| selects(selections)).map(|(who, _)| who.clone()).collect();
            prop_assert_eq!(concerned(&index, before.as_ref(), after.as_ref()), expected);
        }
    }
}
