//! What `pilothouse render` prints: its JSON document, and what a person sees of it. Pure.

use std::{io, time::Duration};

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::compare::{Action, Comparison};
use crate::{
    object::{Kind, ObjectKey},
    output,
    plugin::{self, EventKind},
    state::{AdoptionPolicy, ChildOptions, Desired, DesiredChild, Finalization, Readiness, Report, UpdateStrategy},
};

/// What a plugin answers: the document of `pilothouse render -o json`. Its keys are there to stay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rendered {
    /// With `--finalize`: whether cleanup is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cleanup: Option<Cleanup>,
    /// The children that it wants, in its order, then those that are deleted. Null: with `--finalize` it leaves them alone.
    pub children: Option<Vec<Child>>,
    /// Its part of the parent's status. Null: the status keeps what it last returned.
    pub status: Option<Map<String, Value>>,
    /// Its conditions, without those that the host adds.
    pub conditions: Vec<Condition>,
    /// Its Events.
    pub events: Vec<Event>,
    /// When it is asked again if nothing changes; missing with `--finalize`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<Next>,
}

/// A child.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Child {
    /// Group and version of its kind.
    pub api_version: String,
    /// Its kind.
    pub kind: String,
    /// Its namespace, or null.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// What the plugin wants of it, as the host would apply it without its own marks; missing for one that is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<Map<String, Value>>,
    /// Its options that are not the default, as `{"updateStrategy": "Recreate"}`.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub options: Map<String, Value>,
    /// With `--children`: `create`, `change`, `delete` or `unchanged`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<Action>,
    /// With `--children`: what changes, as a unified diff of YAML; empty for one that is unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
}

/// Whether cleanup is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Cleanup {
    /// It is: the finalizer goes.
    Finished,
    /// It is not.
    Waiting {
        /// When it is asked again, in milliseconds.
        after_ms: u64,
    },
}

/// When the plugin is asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "when", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Next {
    /// When something changes.
    OnChange,
    /// Soon, more slowly each time.
    Immediately,
    /// After a time.
    After {
        /// In milliseconds.
        after_ms: u64,
    },
}

/// A condition, as Kubernetes writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Its type.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    /// One CamelCase word.
    pub reason: String,
    /// For a person; may be empty.
    pub message: String,
}

/// An Event, as Kubernetes writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// `Normal` or `Warning`.
    pub r#type: &'static str,
    /// One CamelCase word.
    pub reason: String,
    /// For a person.
    pub message: String,
}

impl Rendered {
    /// The answer of `reconcile`, with its children as [`Child`]s.
    pub fn of_desired(desired: Desired, children: Vec<Child>) -> Self {
        let next = match desired.next {
            plugin::Next::OnChange => Next::OnChange,
            plugin::Next::Immediately => Next::Immediately,
            plugin::Next::After(wait) => Next::After { after_ms: millis(wait) },
        };
        Self { next: Some(next), ..Self::of_report(desired.report, Some(children)) }
    }

    /// The answer of `finalize`, with its children as [`Child`]s.
    pub fn of_finalization(finalization: Finalization, children: Option<Vec<Child>>) -> Self {
        let waiting = finalization.waiting.map(|wait| Cleanup::Waiting { after_ms: millis(wait) });
        let cleanup = Some(waiting.unwrap_or(Cleanup::Finished));
        Self { cleanup, ..Self::of_report(finalization.report, children) }
    }

    fn of_report(Report { status, conditions, events }: Report, children: Option<Vec<Child>>) -> Self {
        let condition = |condition: plugin::Condition| Condition {
            r#type: condition.kind,
            status: condition.status.as_str(),
            reason: condition.reason,
            message: condition.message,
        };
        let event = |event: plugin::Event| Event {
            r#type: match event.kind {
                EventKind::Normal => "Normal",
                EventKind::Warning => "Warning",
            },
            reason: event.reason,
            message: event.message,
        };
        Self {
            cleanup: None,
            children,
            status,
            conditions: conditions.into_iter().map(condition).collect(),
            events: events.into_iter().map(event).collect(),
            next: None,
        }
    }

    /// Whether some child is not as it should be.
    pub fn differs(&self) -> bool {
        let mut actions = self.children.iter().flatten().filter_map(|child| child.action);
        actions.any(|action| action != Action::Unchanged)
    }

    /// For standard output: the children as YAML documents, or if they were compared, what becomes of each.
    ///
    /// # Errors
    /// If something cannot be written as YAML.
    pub fn children_text(&self) -> io::Result<String> {
        self.children.iter().flatten().map(Child::text).collect()
    }

    /// For standard error: all that is no child.
    ///
    /// # Errors
    /// If something cannot be written as YAML.
    pub fn report_text(&self) -> io::Result<String> {
        let mut rows = Vec::new();
        match self.cleanup {
            None => {}
            Some(Cleanup::Finished) => rows.push(("Cleanup", vec!["finished: the finalizer goes".to_owned()])),
            Some(Cleanup::Waiting { after_ms }) => {
                rows.push(("Cleanup", vec![format!("not finished; asked again {}", after(after_ms))]));
            }
        }
        rows.push(("Children", vec![self.count()]));
        let status = match &self.status {
            None => vec!["as it was last returned".to_owned()],
            Some(status) => output::to_yaml(status)?.lines().map(str::to_owned).collect(),
        };
        rows.push(("Status", status));
        let conditions: Vec<_> = self
            .conditions
            .iter()
            .map(|it| [it.r#type.clone(), it.status.to_owned(), it.reason.clone(), it.message.clone()])
            .collect();
        rows.push(("Conditions", output::columns(&conditions)));
        let events: Vec<_> =
            self.events.iter().map(|it| [it.r#type.to_owned(), it.reason.clone(), it.message.clone()]).collect();
        rows.push(("Events", output::columns(&events)));
        let next = self.next.map(|next| match next {
            Next::OnChange => "when something changes".to_owned(),
            Next::Immediately => "at once, more slowly each time".to_owned(),
            Next::After { after_ms } => after(after_ms),
        });
        rows.extend(next.map(|next| ("Next", vec![next])));
        Ok(output::labelled(&rows))
    }

    fn count(&self) -> String {
        let Some(children) = &self.children else { return "left alone".to_owned() };
        if !children.iter().any(|child| child.action.is_some()) {
            return children.len().to_string();
        }
        let count = |action| children.iter().filter(|child| child.action == Some(action)).count();
        format!(
            "{} to create, {} to change, {} to delete, {} unchanged",
            count(Action::Create),
            count(Action::Change),
            count(Action::Delete),
            count(Action::Unchanged)
        )
    }
}

const CHILD: Style = Style::new().bold();
const QUIET: Style = Style::new().dimmed();
const REMOVED: Style = AnsiColor::Red.on_default();
const ADDED: Style = AnsiColor::Green.on_default();

impl Child {
    /// One that is wanted.
    pub fn wanted(child: &DesiredChild, kind: &Kind, comparison: Option<Comparison>) -> Self {
        let options = options(&child.options);
        Self { object: Some(child.object.clone()), options, ..Self::named(&child.key.object, kind, comparison) }
    }

    /// One that is not wanted.
    pub fn named(key: &ObjectKey, kind: &Kind, comparison: Option<Comparison>) -> Self {
        let (action, diff) = comparison.map(|comparison| (comparison.action, comparison.diff)).unzip();
        Self {
            api_version: kind.api.api_version.clone(),
            kind: kind.api.kind.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            object: None,
            options: Map::new(),
            action,
            diff,
        }
    }

    /// What becomes of it and how, if it was compared; else the document that it is.
    pub(crate) fn text(&self) -> io::Result<String> {
        let (Some(action), Some(diff)) = (self.action, &self.diff) else { return self.document() };
        let (word, style) = match action {
            Action::Create => ("create", CHILD),
            Action::Change => ("change", CHILD),
            Action::Delete => ("delete", CHILD),
            Action::Unchanged => ("unchanged", QUIET),
        };
        let Self { kind, name, .. } = self;
        let namespace = self.namespace.as_ref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
        Ok(format!("{style}{word} {kind} {namespace}{name}{style:#}\n{}", coloured(diff)))
    }

    fn document(&self) -> io::Result<String> {
        let Some(object) = &self.object else { return Ok(String::new()) };
        let options = match self.options.is_empty() {
            true => String::new(),
            false => format!("# options: {}\n", Value::from(self.options.clone())),
        };
        Ok(format!("---\n{options}{}", output::to_yaml(object)?))
    }
}

fn coloured(diff: &str) -> String {
    let style = |line: &str| match line.chars().next() {
        Some('-') => REMOVED,
        Some('+') => ADDED,
        _ => Style::new(),
    };
    diff.lines().map(|line| format!("{0}{line}{0:#}\n", style(line))).collect()
}

/// Those that are not the default, as the contract writes them.
fn options(options: &ChildOptions) -> Map<String, Value> {
    let ChildOptions { update, adoption, orphan, adopt_field_managers, wave, readiness, yields } = options;
    let update = match update {
        UpdateStrategy::Apply => None,
        UpdateStrategy::Recreate => Some(json!("Recreate")),
        UpdateStrategy::OnDelete => Some(json!("OnDelete")),
    };
    let adoption = match adoption {
        AdoptionPolicy::Never => None,
        AdoptionPolicy::IfUnowned => Some(json!("IfUnowned")),
    };
    let deletion = orphan.then(|| json!("Orphan"));
    let managers = (!adopt_field_managers.is_empty()).then(|| json!(adopt_field_managers));
    let readiness = match readiness {
        Readiness::Auto => None,
        Readiness::Ready => Some(json!("Ready")),
        Readiness::NotReady => Some(json!("NotReady")),
    };
    let all = [
        ("updateStrategy", update),
        ("adoptionPolicy", adoption),
        ("deletionPolicy", deletion),
        ("adoptFieldManagers", managers),
        ("wave", (*wave > 0).then(|| json!(wave))),
        ("readiness", readiness),
        ("force", yields.then(|| json!(false))),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

fn millis(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)
}

fn after(after_ms: u64) -> String {
    format!("after {:?}", Duration::from_millis(after_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kinds,
        plugin::describe::KindName,
        state::{ChildKey, Tie},
    };

    fn child(comparison: Option<Comparison>, options: ChildOptions) -> Child {
        let kind = kinds::assumed(&KindName { api_version: "v1".to_owned(), kind: "Secret".to_owned() });
        let object = json!({"kind": "Secret", "metadata": {"name": "a"}});
        let key = ChildKey { kind: 0, object: ObjectKey { namespace: Some("n".to_owned()), name: "a".to_owned() } };
        let object = object.as_object().unwrap().clone();
        let desired = DesiredChild { key, object, digest: [0; 32], tie: Tie::Owner, options };
        Child::wanted(&desired, &kind, comparison)
    }

    fn plain(text: &str) -> String {
        anstream::adapter::strip_str(text).to_string()
    }

    fn desired(status: Option<Value>) -> Desired {
        let condition = plugin::Condition {
            kind: "Up".to_owned(),
            status: plugin::ConditionStatus::True,
            reason: "Yes".to_owned(),
            message: "it is".to_owned(),
        };
        let event = plugin::Event { kind: EventKind::Warning, reason: "Slow".to_owned(), message: "m".to_owned() };
        let status = status.map(|status| status.as_object().unwrap().clone());
        let report = Report { status, conditions: vec![condition], events: vec![event] };
        Desired { children: Vec::new(), report, next: plugin::Next::After(Duration::from_secs(90)) }
    }

    #[test]
    fn the_keys_of_the_json_document() {
        let options = ChildOptions { update: UpdateStrategy::Recreate, ..ChildOptions::default() };
        let comparison = Comparison { action: Action::Change, diff: "d".to_owned() };
        let children = vec![child(Some(comparison), options)];
        let rendered = Rendered::of_desired(desired(Some(json!({"n": 1}))), children);
        let expected = json!({
            "children": [{"apiVersion": "v1", "kind": "Secret", "namespace": "n", "name": "a", "object": {"kind": "Secret", "metadata": {"name": "a"}},
                "options": {"updateStrategy": "Recreate"}, "action": "change", "diff": "d"}],
            "status": {"n": 1},
            "conditions": [{"type": "Up", "status": "True", "reason": "Yes", "message": "it is"}],
            "events": [{"type": "Warning", "reason": "Slow", "message": "m"}],
            "next": {"when": "after", "afterMs": 90000},
        });
        assert_eq!(serde_json::to_value(&rendered).unwrap(), expected);
        let waiting = Finalization { waiting: Some(Duration::from_secs(1)), ..Finalization::finished() };
        let expected = json!({"cleanup": {"state": "waiting", "afterMs": 1000}, "children": null, "status": null,
            "conditions": [], "events": []});
        assert_eq!(serde_json::to_value(Rendered::of_finalization(waiting, None)).unwrap(), expected);
        let finished = serde_json::to_value(Rendered::of_finalization(Finalization::finished(), None)).unwrap();
        assert_eq!(finished["cleanup"], json!({"state": "finished"}));
    }

    #[test]
    fn what_a_person_reads_beside_the_children() {
        let rendered = Rendered::of_desired(desired(None), vec![child(None, ChildOptions::default())]);
        let expected = "Children    1\n\
            Status      as it was last returned\n\
            Conditions  Up  True  Yes  it is\n\
            Events      Warning  Slow  m\n\
            Next        after 90s\n";
        assert_eq!(plain(&rendered.report_text().unwrap()), expected);
        let finished = Rendered::of_finalization(Finalization::finished(), None);
        let text = plain(&finished.report_text().unwrap());
        assert!(text.starts_with("Cleanup     finished: the finalizer goes\nChildren    left alone\n"), "{text}");
    }

    #[test]
    fn children_are_documents_and_their_options_comments() {
        let options = ChildOptions {
            update: UpdateStrategy::OnDelete,
            adoption: AdoptionPolicy::IfUnowned,
            orphan: true,
            adopt_field_managers: vec!["old".to_owned()],
            wave: 2,
            readiness: Readiness::Ready,
            yields: true,
        };
        let children = vec![child(None, ChildOptions::default()), child(None, options)];
        let text = Rendered::of_desired(desired(None), children).children_text().unwrap();
        let document = "kind: Secret\nmetadata:\n  name: a\n";
        let comment = r#"# options: {"updateStrategy":"OnDelete","adoptionPolicy":"IfUnowned","deletionPolicy":"Orphan","adoptFieldManagers":["old"],"wave":2,"readiness":"Ready","force":false}"#;
        assert_eq!(text, format!("---\n{document}---\n{comment}\n{document}"));
    }

    #[test]
    fn children_that_were_compared_say_what_becomes_of_them() {
        let with =
            |action, diff: &str| child(Some(Comparison { action, diff: diff.to_owned() }), ChildOptions::default());
        let same = Rendered::of_desired(desired(None), vec![with(Action::Unchanged, "")]);
        assert_eq!(plain(&same.children_text().unwrap()), "unchanged Secret n/a\n");
        assert!(!same.differs());
        let other =
            Rendered::of_desired(desired(None), vec![with(Action::Unchanged, ""), with(Action::Delete, "-a\n")]);
        assert_eq!(plain(&other.children_text().unwrap()), "unchanged Secret n/a\ndelete Secret n/a\n-a\n");
        assert!(other.differs());
        assert_eq!(other.count(), "0 to create, 0 to change, 1 to delete, 1 unchanged");
        assert!(!Rendered::of_desired(desired(None), vec![child(None, ChildOptions::default())]).differs());
    }
}
