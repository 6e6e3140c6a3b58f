//! Kubernetes Events, as the host: on parents, on a transition of `Synced`, and those that the plugin asks for; and on reconcilers. Once each.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

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

/// Why a part of the status cannot be seen.
const STATUS_PRUNED: &str = "StatusPruned";

/// Where Events go.
#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
}

impl Events {
    /// Publishes with `client`, which acts as the host.
    pub fn new(client: Client) -> Self {
        let reporter = Reporter { controller: "pilothouse.dev/host".to_owned(), instance: None };
        Self { recorder: Recorder::new(client, reporter) }
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

    /// Something was done because a user asked for it.
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
        let end = note.floor_char_boundary(MAX_NOTE);
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note[..end].to_owned()).filter(|note| !note.is_empty()),
            action: action.to_owned(),
            secondary: None,
        };
        // An Event is a courtesy: the condition says the same.
        if let Err(error) = self.recorder.publish(&event, about).await {
            tracing::warn!(reason, "failed to publish an Event: {error}");
        }
    }
}
