//! Kubernetes Events, as the host: on parents, on a transition of `Synced`, and those that the plugin asks for; and on reconcilers. Once each.

mod recent;

use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use self::recent::{Published, Recent};
use super::{
    handles,
    memory::Note,
    status::{CIRCUIT_OPEN, CIRCUIT_OPEN_MESSAGE},
};
use crate::{
    declaration::{self, Declaration},
    identity,
    object::{Kind, Object},
    plugin::{self, EventKind},
};

/// An Event's note, by the API (events.k8s.io/v1).
const MAX_NOTE: usize = 1024;

/// The longest name of an object whose Event's name, with its time, has no more than the 253 characters that a name may have.
const MAX_NAME: usize = 253 - 1 - 16;

const REPORTER: &str = "pilothouse.dev/host";

/// Why a part of the status cannot be seen.
const STATUS_PRUNED: &str = "StatusPruned";

/// Where Events go.
#[derive(Clone)]
pub struct Events {
    client: Client,
    recent: Arc<Mutex<Recent>>,
}

/// What kubectl shows of an Event as its `TYPE`.
#[derive(Clone, Copy, Hash)]
enum EventType {
    Normal,
    Warning,
}

impl Events {
    /// Publishes with `client`, which acts as the host.
    pub fn new(client: Client) -> Self {
        Self { client, recent: Arc::default() }
    }

    /// `Synced` has changed to this reason, by this failure if it was one.
    pub(super) async fn publish_transition(
        &self,
        parent: &Object,
        kind: &Kind,
        reason: &str,
        failure: Option<&(&str, String)>,
    ) {
        let (type_, note) = match failure {
            None => (EventType::Normal, "children are as the plugin wants them"),
            Some((_, message)) => (EventType::Warning, message.as_str()),
        };
        self.publish(parent, kind, type_, reason, note).await;
    }

    /// What the plugin tells, without what it told last time.
    pub(super) async fn publish_plugin(
        &self,
        parent: &Object,
        kind: &Kind,
        events: &[plugin::Event],
        last: &mut Vec<plugin::Event>,
    ) {
        for event in events.iter().filter(|event| !last.contains(event)) {
            let type_ = match event.kind {
                EventKind::Normal => EventType::Normal,
                EventKind::Warning => EventType::Warning,
            };
            self.publish(parent, kind, type_, &event.reason, &event.message).await;
        }
        last.clear();
        last.extend_from_slice(events);
    }

    /// Something was done that no condition tells: a user asked for it, or there is no parent any more that has conditions.
    pub(crate) async fn publish_handled(&self, parent: &Object, kind: &Kind, reason: &str, note: &str) {
        self.publish(parent, kind, EventType::Normal, reason, note).await;
    }

    /// Its circuit has opened or closed.
    pub(super) async fn publish_circuit(&self, parent: &Object, kind: &Kind, open: bool) {
        if open {
            tracing::warn!(reason = CIRCUIT_OPEN, "{CIRCUIT_OPEN_MESSAGE}");
            self.publish(parent, kind, EventType::Warning, CIRCUIT_OPEN, CIRCUIT_OPEN_MESSAGE).await;
        } else {
            let note = "changes of children wake it at once again";
            tracing::info!(reason = "WatchCircuitClosed", "{note}");
            self.publish(parent, kind, EventType::Normal, "WatchCircuitClosed", note).await;
        }
    }

    /// Something about a child that is no error.
    pub(super) async fn publish_note(&self, parent: &Object, kind: &Kind, child: &str, note: &Note) {
        let message = format!("{child}: {}", note.message);
        tracing::warn!(reason = note.reason, "{message}");
        self.publish(parent, kind, EventType::Warning, note.reason, &message).await;
    }

    /// It is pinned to a revision that does not serve.
    pub(super) async fn publish_pin_ignored(&self, parent: &Object, kind: &Kind, pin: &str, revision: &str) {
        let message = format!(
            "pinned to revision {pin:?} by annotation {}, which does not serve; it has revision {revision}",
            handles::REVISION
        );
        self.publish(parent, kind, EventType::Warning, "PinIgnored", &message).await;
    }

    /// Something has happened to a reconciler.
    pub(crate) async fn publish_of_reconciler(&self, of: &Declaration, bad: bool, reason: &str, note: &str) {
        let type_ = if bad { EventType::Warning } else { EventType::Normal };
        let reference = ObjectReference {
            api_version: Some(format!("{}/v1alpha1", identity::DOMAIN)),
            kind: Some(declaration::kind(&of.key).to_owned()),
            name: Some(of.key.name.clone()),
            namespace: of.key.namespace.clone(),
            uid: of.metadata.uid.clone(),
            ..ObjectReference::default()
        };
        self.record(&reference, type_, reason, "Rollout", note).await;
    }

    /// Fields of the status that were written and are not kept.
    pub(super) async fn publish_pruned(&self, parent: &Object, kind: &Kind, fields: &[String]) {
        let message = format!(
            "not kept, since the CRD of {} does not have it: {}; install the CRD that belongs to the plugin",
            kind.api.kind,
            fields.join(", ")
        );
        tracing::warn!(reason = STATUS_PRUNED, "{message}");
        self.publish(parent, kind, EventType::Warning, STATUS_PRUNED, &message).await;
    }

    async fn publish(&self, parent: &Object, kind: &Kind, type_: EventType, reason: &str, note: &str) {
        let key = parent.key();
        let reference = ObjectReference {
            api_version: Some(kind.api.api_version.clone()),
            kind: Some(kind.api.kind.clone()),
            name: Some(key.name),
            namespace: key.namespace,
            uid: Some(parent.uid().to_owned()),
            ..ObjectReference::default()
        };
        self.record(&reference, type_, reason, "Reconcile", note).await;
    }

    async fn record(&self, about: &ObjectReference, type_: EventType, reason: &str, action: &str, note: &str) {
        let note = &note[..note.floor_char_boundary(MAX_NOTE)];
        // An Event is a courtesy: the condition says the same.
        if let Err(error) = self.send(about, type_, reason, action, note).await {
            tracing::warn!(reason, "failed to publish an Event: {error}");
        }
    }

    /// Counts the Event in its series, or makes it.
    async fn send(
        &self,
        about: &ObjectReference,
        type_: EventType,
        reason: &str,
        action: &str,
        note: &str,
    ) -> Result<(), kube::Error> {
        // Events about objects of cluster scope are in this namespace, by their validation.
        let events: Api<Event> = Api::namespaced(self.client.clone(), about.namespace.as_deref().unwrap_or("default"));
        let now = Timestamp::now();
        let (key, series) = {
            let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            let key = recent.key((&about.kind, &about.namespace, &about.name, &about.uid, type_, reason, action, note));
            (key, recent.series(key, now).cloned())
        };
        let counted = match series {
            None => None,
            Some(Published { name, count, .. }) => {
                let count = count.saturating_add(1);
                let patch = json!({"series": {"count": count, "lastObservedTime": MicroTime(now)}});
                match events.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                    Ok(_) => Some(Published { name, count, last: now }),
                    // It has expired, or was deleted.
                    Err(kube::Error::Api(status)) if status.is_not_found() => None,
                    Err(error) => return Err(error),
                }
            }
        };
        let published = match counted {
            Some(published) => published,
            None => {
                let event = event(about, type_, reason, action, note, now);
                let name = event.metadata.name.clone().unwrap_or_default();
                events.create(&PostParams::default(), &event).await?;
                Published { name, count: 1, last: now }
            }
        };
        self.recent.lock().unwrap_or_else(PoisonError::into_inner).note(key, published);
        Ok(())
    }
}

/// An Event that is published for the first time.
fn event(about: &ObjectReference, type_: EventType, reason: &str, action: &str, note: &str, now: Timestamp) -> Event {
    Event {
        metadata: ObjectMeta {
            name: Some(name(about.name.as_deref().unwrap_or_default(), now)),
            namespace: about.namespace.clone(),
            ..ObjectMeta::default()
        },
        type_: Some(match type_ {
            EventType::Normal => "Normal".to_owned(),
            EventType::Warning => "Warning".to_owned(),
        }),
        reason: Some(reason.to_owned()),
        action: Some(action.to_owned()),
        note: Some(note.to_owned()).filter(|note| !note.is_empty()),
        regarding: Some(about.clone()),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(REPORTER.to_owned()),
        reporting_instance: Some(REPORTER.to_owned()),
        ..Event::default()
    }
}

/// The name of an Event about an object of this name, which may be longer, and have other characters (roles have colons), than an Event's.
fn name(about: &str, now: Timestamp) -> String {
    let allowed = |c: char| if matches!(c, 'a'..='z' | '0'..='9' | '.') { c } else { '-' };
    let name: String = about.chars().take(MAX_NAME).map(allowed).collect();
    format!("{}.{:x}", name.trim_end_matches(['.', '-']), now.as_nanosecond())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_event_is_one_whatever_it_is_about() {
        let now = Timestamp::new(1_800_000_000, 5).unwrap();
        assert_eq!(name("app-1", now), "app-1.18fae27693b40005");
        assert_eq!(name("system:Node", now), "system--ode.18fae27693b40005");
        let long = format!("{}-{}", "a".repeat(MAX_NAME - 1), "b".repeat(17));
        assert_eq!(name(&long, now), format!("{}.18fae27693b40005", "a".repeat(MAX_NAME - 1)));
        assert!(name(&"a".repeat(300), now).len() <= 253);
    }
}
