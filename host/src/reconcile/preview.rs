//! A preview: what another revision would make of a parent, held against what the one that serves makes of it. In memory, with the same time
//! for both, and checked by the same rules as in a reconcile: what is refused here would be refused there. Nothing is written.
//!
//! What of it is no question to a plugin is pure: what becomes of the children of one parent, and the [`Summary`] of many.

use std::{collections::BTreeMap, fmt, sync::Arc};

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Context, Error, call_context, desired, observe};
use crate::{
    crd::{Guards, Percent},
    object::{Kind, Object, ObjectKey},
    plugin::Request,
    revision::Revision,
    state::{Desired, DesiredChild, Observed},
    telemetry,
};

/// One parent, and what its revisions are asked.
pub struct Question<'a> {
    context: &'a Context,
    kinds: &'a [Kind],
    observed: Observed,
    now: Timestamp,
}

impl<'a> Question<'a> {
    /// About this parent as it is now. `kinds` are those of the children of all revisions that are asked.
    pub fn about(context: &'a Context, kinds: &'a [Kind], parent: Arc<Object>) -> Self {
        Self { context, kinds, observed: observe::observe(context, parent), now: Timestamp::now() }
    }

    /// What the revision wants.
    ///
    /// # Errors
    /// As in a reconcile.
    pub async fn ask(&self, revision: &Arc<Revision>) -> Result<Desired, Error> {
        let settings = self.context.settings();
        let context = call_context(self.now, &settings.limits, 0, &revision.id, &json!({}));
        let request = Request {
            parent: self.observed.parent.json().to_owned(),
            children: self.observed.children.iter().map(|(_, child)| child.json().to_owned()).collect(),
            config: revision.config.clone(),
            context: context.to_string(),
            ..Request::default()
        };
        let related = self.context.related.glance(revision);
        let answer = revision.plugin.preview(request, related, settings.limits.of_a_call()).await?;
        let rules = desired::Rules {
            kinds: self.kinds,
            declared: &revision.plugin.description().children,
            parent: &self.observed.parent,
            scope: self.context.key.namespace.as_deref(),
            max_children: usize::try_from(settings.limits.children).unwrap_or(usize::MAX),
        };
        Ok(rules.desired(answer.map_err(Error::Refused)?)?)
    }

    /// What the new answer changes.
    pub fn compare(&self, old: &Result<Desired, Error>, new: &Result<Desired, Error>) -> Outcome {
        let unseen = |answer: &Result<Desired, Error>| answer.as_ref().is_err_and(Error::is_unseen);
        let new = match new {
            _ if unseen(old) || unseen(new) => return Outcome { unseen: true, ..Outcome::default() },
            Ok(new) => new,
            Err(error) => {
                let message = format!("{}: {}", error.category(), telemetry::chain(error));
                return Outcome { error: Some(message), failed_before: old.is_err(), ..Outcome::default() };
            }
        };
        let named = |(kind, object): (&Kind, &ObjectKey)| Name { kind: kind.group_kind(), object: object.clone() };
        let of = |child: &DesiredChild| (named((&self.kinds[child.key.kind], &child.key.object)), Some(child.digest));
        let before: BTreeMap<_, _> = match old {
            Ok(old) => old.children.iter().map(of).collect(),
            // Then it is not known what it wants of them.
            Err(_) => {
                let live = self.observed.children.iter();
                live.map(|(key, _)| (named((&self.context.child_kinds[key.kind], &key.object)), None)).collect()
            }
        };
        Outcome {
            changes: changes(&before, &new.children.iter().map(of).collect()),
            failed_before: old.is_err(),
            ..Outcome::default()
        }
    }

    /// Where two answers to the same question differ, for a person; none if they are the same.
    pub fn difference(&self, one: &Desired, other: &Desired) -> Option<String> {
        let parts = |desired: &Desired| {
            let children: BTreeMap<_, _> = desired
                .children
                .iter()
                .map(|child| (format!("{} {}", self.kinds[child.key.kind].api.kind, child.key.object), &child.object))
                .collect();
            let conditions: BTreeMap<_, _> = desired
                .report
                .conditions
                .iter()
                .map(|it| (&it.kind, json!([it.status.as_str(), it.reason, it.message])))
                .collect();
            json!({"children": children, "status": desired.report.status, "conditions": conditions})
        };
        let path = difference(&parts(one), &parts(other), "")?;
        Some(format!("{}, {path}", self.observed.parent.key()))
    }
}

/// Which child, whatever the version of its kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    /// As `Kind.group`.
    kind: String,
    object: ObjectKey,
}

/// What a new revision does to a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It makes it.
    Create,
    /// It wants another thing of it.
    Update,
    /// It no longer wants it.
    Delete,
}

/// What a new revision does to a parent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Its children that change, by kind (`Kind.group`).
    pub changes: Vec<(String, Change)>,
    /// Why there is no answer.
    pub error: Option<String>,
    /// Whether the revision that serves gives none either.
    pub failed_before: bool,
    /// Whether nobody knows, since a revision asks what no preview touches.
    pub unseen: bool,
}

/// `None` of what was wanted before: it is not known.
fn changes<D: PartialEq>(before: &BTreeMap<Name, Option<D>>, now: &BTreeMap<Name, Option<D>>) -> Vec<(String, Change)> {
    let new = now.iter().filter_map(|(name, wanted)| match before.get(name) {
        None => Some((name.kind.clone(), Change::Create)),
        Some(Some(before)) if Some(before) != wanted.as_ref() => Some((name.kind.clone(), Change::Update)),
        Some(_) => None,
    });
    let gone = before.keys().filter(|name| !now.contains_key(name)).map(|name| (name.kind.clone(), Change::Delete));
    new.chain(gone).collect()
}

/// The path of the first difference of two values.
fn difference(one: &Value, other: &Value, path: &str) -> Option<String> {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let below = |name: &str| {
                let dot = if path.is_empty() { "" } else { "." };
                let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
                if plain { format!("{path}{dot}{name}") } else { format!("{path}[{name:?}]") }
            };
            let only_other = other.keys().filter(|name| !one.contains_key(*name));
            one.keys().chain(only_other).find_map(|name| match (one.get(name), other.get(name)) {
                (Some(one), Some(other)) => difference(one, other, &below(name)),
                _ => Some(below(name)),
            })
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            let mut items = one.iter().zip(other).enumerate();
            items.find_map(|(at, (one, other))| difference(one, other, &format!("{path}[{at}]")))
        }
        _ => (one != other).then(|| path.to_owned()),
    }
}

/// What a new revision does to many parents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// How many there are.
    pub parents: usize,
    /// How many of them were looked at.
    pub seen: usize,
    /// Of these, how many change.
    pub changing: usize,
    /// How many lose children.
    pub losing: usize,
    /// For how many it fails, and the one that serves does not.
    pub failing: usize,
    /// For how many both fail.
    pub failing_before: usize,
    /// For how many nobody knows, since a revision asks what no preview touches.
    pub unseen: usize,
    /// The first of the failures that are new, and of which parent.
    pub first_error: Option<String>,
    /// How many children of a kind are created, updated and deleted.
    pub kinds: BTreeMap<String, [usize; 3]>,
}

/// A guard that was passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exceeded(String);

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Summary {
    /// Of so many parents, none of which was looked at yet.
    pub fn of(parents: usize) -> Self {
        Self { parents, ..Self::default() }
    }

    /// What becomes of one more parent.
    pub fn add(&mut self, parent: &ObjectKey, outcome: Outcome) {
        self.seen += 1;
        self.unseen += usize::from(outcome.unseen);
        self.changing += usize::from(!outcome.changes.is_empty());
        self.losing += usize::from(outcome.changes.iter().any(|(_, change)| *change == Change::Delete));
        for (kind, change) in outcome.changes {
            self.kinds.entry(kind).or_default()[change as usize] += 1;
        }
        match (outcome.error, outcome.failed_before) {
            (None, _) => {}
            (Some(_), true) => self.failing_before += 1,
            (Some(error), false) => {
                self.failing += 1;
                self.first_error.get_or_insert_with(|| format!("{parent}: {error}"));
            }
        }
    }

    /// The first guard that this goes beyond.
    pub fn exceeds(&self, guards: &Guards) -> Option<Exceeded> {
        let text = |count: usize, what: &str, name: &str, guard: Percent| {
            let all = self.seen - self.unseen;
            let exceeded = guard.is_exceeded(count, all);
            exceeded.then(|| {
                Exceeded(format!(
                    "{what} {count} of the {all} parents that were looked at, and {name} is {}",
                    String::from(guard)
                ))
            })
        };
        text(self.failing, "it fails for", "maxFailing", guards.max_failing)
            .or_else(|| text(self.losing, "it deletes children of", "maxLosingChildren", guards.max_losing_children))
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "of {} {} ", grouped(self.parents), plural("parent", self.parents))?;
        if self.seen < self.parents {
            write!(f, "{} were looked at, of which ", grouped(self.seen))?;
        }
        write!(f, "{} {}: ", grouped(self.changing), if self.changing == 1 { "changes" } else { "change" })?;
        for (kind, counts) in &self.kinds {
            for (count, word) in counts.iter().zip(["created", "updated", "deleted"]).filter(|(count, _)| **count > 0) {
                let kind = kind.split('.').next().unwrap_or(kind);
                write!(f, "{} {} {word}, ", grouped(*count), plural(kind, *count))?;
            }
        }
        write!(f, "{} {}", grouped(self.failing), plural("error", self.failing))?;
        if self.failing_before > 0 {
            write!(f, ", and {} that fail already", grouped(self.failing_before))?;
        }
        if self.unseen > 0 {
            write!(f, ", and {} that cannot be previewed", grouped(self.unseen))?;
        }
        if let Some(error) = &self.first_error {
            write!(f, "; the first: {error}")?;
        }
        Ok(())
    }
}

fn plural(word: &str, count: usize) -> String {
    match word {
        _ if count == 1 => word.to_owned(),
        _ if word.ends_with('s') || word.ends_with('x') || word.ends_with("ch") => format!("{word}es"),
        _ => match word.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u'])) {
            Some(stem) => format!("{stem}ies"),
            None => format!("{word}s"),
        },
    }
}

/// A number, in groups of three digits.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(kind: &str, name: &str) -> Name {
        Name { kind: kind.to_owned(), object: ObjectKey { namespace: None, name: name.to_owned() } }
    }

    fn outcome(changes: &[(&str, Change)]) -> Outcome {
        let changes = changes.iter().map(|(kind, change)| ((*kind).to_owned(), *change)).collect();
        Outcome { changes, ..Outcome::default() }
    }

    fn failed(error: &str, before: bool) -> Outcome {
        Outcome { error: Some(error.to_owned()), failed_before: before, ..Outcome::default() }
    }

    fn summary(parents: usize, outcomes: Vec<Outcome>) -> Summary {
        let mut summary = Summary::of(parents);
        let parent = ObjectKey { namespace: Some("n".to_owned()), name: "w".to_owned() };
        outcomes.into_iter().for_each(|outcome| summary.add(&parent, outcome));
        summary
    }

    #[test]
    fn a_child_is_made_or_wanted_otherwise_or_not_wanted_any_more() {
        let before = [(name("A", "same"), Some(1)), (name("A", "other"), Some(1)), (name("B", "gone"), Some(1))];
        let now = [(name("A", "same"), Some(1)), (name("A", "other"), Some(2)), (name("B", "new"), Some(1))];
        let changed = |kind: &str, change| (kind.to_owned(), change);
        assert_eq!(
            changes(&before.into(), &now.into()),
            [changed("A", Change::Update), changed("B", Change::Create), changed("B", Change::Delete)]
        );
        // Where the old revision fails, it is only known what there is.
        let live = [(name("A", "a"), None), (name("B", "gone"), None)];
        let now = [(name("A", "a"), Some(1))];
        assert_eq!(changes(&live.into(), &now.into()), [changed("B", Change::Delete)]);
    }

    #[test]
    fn a_person_reads_how_many_change_and_how() {
        let (deployment, config_map) = ("Deployment.apps", "ConfigMap");
        let outcomes = vec![
            outcome(&[]),
            outcome(&[(deployment, Change::Update)]),
            outcome(&[(deployment, Change::Update), (config_map, Change::Delete)]),
            outcome(&[
                ("NetworkPolicy.networking.k8s.io", Change::Create),
                ("NetworkPolicy.networking.k8s.io", Change::Create),
            ]),
        ];
        let all = summary(4, outcomes.clone());
        assert_eq!(
            all.to_string(),
            "of 4 parents 3 change: 1 ConfigMap deleted, 2 Deployments updated, 2 NetworkPolicies created, 0 errors"
        );
        assert_eq!((all.changing, all.losing), (3, 1));
        let some = summary(2143, outcomes);
        assert!(some.to_string().starts_with("of 2,143 parents 4 were looked at, of which 3 change: "), "{some}");
        let bad = summary(3, vec![failed("it trapped", false), failed("again", false), failed("as ever", true)]);
        assert_eq!(
            bad.to_string(),
            "of 3 parents 0 change: 2 errors, and 1 that fail already; the first: n/w: it trapped"
        );
        assert_eq!(summary(1, vec![outcome(&[])]).to_string(), "of 1 parent 0 change: 0 errors");
        let unseen = Outcome { unseen: true, ..Outcome::default() };
        assert_eq!(
            summary(2, vec![unseen.clone(), unseen]).to_string(),
            "of 2 parents 0 change: 0 errors, and 2 that cannot be previewed"
        );
    }

    #[test]
    fn a_guard_counts_what_is_new_among_those_that_were_looked_at() {
        let guards = Guards::default();
        let of = |bad: Vec<Outcome>, all: usize| {
            let mut outcomes = bad;
            outcomes.resize_with(all, Outcome::default);
            summary(1000, outcomes).exceeds(&guards).map(|exceeded| exceeded.to_string())
        };
        let losing = || outcome(&[("A", Change::Delete), ("A", Change::Delete)]);
        assert_eq!(of(vec![failed("x", false)], 10), None);
        assert_eq!(
            of(vec![failed("x", false), failed("x", false)], 10).as_deref(),
            Some("it fails for 2 of the 10 parents that were looked at, and maxFailing is 10%")
        );
        assert_eq!(of(vec![failed("x", true), failed("x", true)], 10), None);
        let unseen = || Outcome { unseen: true, ..Outcome::default() };
        assert!(of(vec![failed("x", false), unseen(), unseen()], 10).is_some_and(|text| text.contains("1 of the 8")));
        assert_eq!(of(vec![unseen()], 1), None);
        assert_eq!(of(vec![losing()], 10), None);
        assert!(of(vec![losing()], 9).is_some_and(|text| text.starts_with("it deletes children of 1 of the 9")));
        assert_eq!(of(Vec::new(), 0), None);
        let open = Guards { max_failing: Percent(100), ..guards };
        assert_eq!(summary(1, vec![failed("x", false)]).exceeds(&open), None);
    }

    #[test]
    fn the_path_where_two_answers_differ() {
        let answer = json!({"children": {"Deployment n/w": {"spec": {"args": ["a", "b"]}}}, "status": {"at": 1}});
        assert_eq!(difference(&answer, &answer, ""), None);
        for (pointer, value, path) in [
            ("/children/Deployment n~1w/spec/args/1", json!("c"), r#"children["Deployment n/w"].spec.args[1]"#),
            ("/children/Deployment n~1w/spec/args", json!([]), r#"children["Deployment n/w"].spec.args"#),
            ("/children", json!({}), r#"children["Deployment n/w"]"#),
            ("/status", json!({"at": 1, "on": true}), "status.on"),
        ] {
            let mut other = answer.clone();
            *other.pointer_mut(pointer).unwrap() = value;
            assert_eq!(difference(&answer, &other, "").as_deref(), Some(path));
            assert_eq!(difference(&other, &answer, "").as_deref(), Some(path));
        }
    }
}
