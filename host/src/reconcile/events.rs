//! Kubernetes Events, as the host: on parents, on a transition of `Synced`, and those that the plugin asks for; and on reconcilers. Once each.
//!
//! An Event is a courtesy: what it tells is in a condition or in the log as well. So nobody waits for it, and they are published one after
//! another. Where thousands of parents converge at once, their writes go first, and their Events come a little later.

mod recent;

use std::time::Duration;

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
use tokio::sync::{mpsc, oneshot};

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

/// How many may wait to be published, 1 KB each: those of the first minutes of as many parents. Beyond it who tells more waits.
const WAITING: usize = 10_000;

/// How long one may take: the others wait for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where Events go.
#[derive(Clone)]
pub struct Events {
    told: mpsc::Sender<Told>,
}

/// What the one who publishes is told.
enum Told {
    Event(Box<Event>),
    /// Say when all that were told before are published.
    Flush(oneshot::Sender<()>),
}

/// What kubectl shows of an Event as its `TYPE`.
#[derive(Clone, Copy)]
enum EventType {
    Normal,
    Warning,
}

impl Events {
    /// Publishes with `client`, which acts as the host, in a task of the runtime that this is called in.
    pub fn new(client: Client) -> Self {
        let (told, events) = mpsc::channel(WAITING);
        tokio::spawn(publish_all(client, events));
        Self { told }
    }

    /// Waits until all that were told so far are published.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.told.send(Told::Flush(done)).await.is_ok() {
            // An error means the end of who publishes, which this keeps alive.
            drop(is_done.await);
        }
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
        self.record(reference, type_, reason, "Rollout", note).await;
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
        self.record(reference, type_, reason, "Reconcile", note).await;
    }

    async fn record(&self, about: ObjectReference, type_: EventType, reason: &str, action: &str, note: &str) {
        let note = &note[..note.floor_char_boundary(MAX_NOTE)];
        let event = event(about, type_, reason, action, note, Timestamp::now());
        // It fails if nobody publishes any more, at the very end of the host.
        drop(self.told.send(Told::Event(Box::new(event))).await);
    }
}

async fn publish_all(client: Client, mut told: mpsc::Receiver<Told>) {
    let mut recent = Recent::default();
    while let Some(told) = told.recv().await {
        match told {
            Told::Event(event) => {
                let sent = tokio::time::timeout(PATIENCE, send(&client, &mut recent, &event)).await;
                let failure = match sent {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => format!("the API server has not answered within {} s", PATIENCE.as_secs()),
                };
                let of = event.regarding.as_ref();
                let [namespace, name] =
                    [of.and_then(|of| of.namespace.as_deref()), of.and_then(|of| of.name.as_deref())];
                tracing::warn!(reason = event.reason, namespace, name, "failed to publish an Event: {failure}");
            }
            Told::Flush(done) => drop(done.send(())),
        }
    }
}

/// Counts the Event in its series, or makes it.
async fn send(client: &Client, recent: &mut Recent, event: &Event) -> Result<(), kube::Error> {
    // Events about objects of cluster scope are in this namespace, by their validation.
    let events: Api<Event> = Api::namespaced(client.clone(), event.metadata.namespace.as_deref().unwrap_or("default"));
    let about = event.regarding.as_ref().map(|of| (&of.kind, &of.namespace, &of.name, &of.uid));
    let key = recent.key((about, &event.type_, &event.reason, &event.action, &event.note));
    let now = event.event_time.as_ref().map_or_else(Timestamp::now, |time| time.0);
    if let Some(Published { name, count, .. }) = recent.series(key, now).cloned() {
        let count = count.saturating_add(1);
        let patch = json!({"series": {"count": count, "lastObservedTime": MicroTime(now)}});
        match events.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {
                recent.note(key, Published { name, count, last: now });
                return Ok(());
            }
            // It has expired, or was deleted.
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    events.create(&PostParams::default(), event).await?;
    recent.note(key, Published { name: event.metadata.name.clone().unwrap_or_default(), count: 1, last: now });
    Ok(())
}

/// An Event that is published for the first time.
fn event(about: ObjectReference, type_: EventType, reason: &str, action: &str, note: &str, now: Timestamp) -> Event {
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
        regarding: Some(about),
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
    format!("{}.{:x}", name.trim_matches(['.', '-']), now.as_nanosecond())
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
    };

    use http::{Method, Request, Response};
    use kube::client::Body;
    use tower::service_fn;

    use super::*;

    #[tokio::test]
    async fn they_are_published_in_their_order_and_counted_and_a_flush_waits_for_all() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = asked.clone();
        let answer = move |request: Request<Body>| {
            let seen = seen.clone();
            async move {
                // The first is answered last, if they do not wait for each other.
                let first = seen.lock().unwrap().is_empty();
                seen.lock().unwrap().push((request.method().clone(), request.uri().path().to_owned()));
                tokio::time::sleep(Duration::from_millis(if first { 50 } else { 0 })).await;
                let object =
                    json!({"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {}, "eventTime": null});
                Ok::<_, Infallible>(Response::new(Body::from(object.to_string().into_bytes())))
            }
        };
        let events = Events::new(Client::new(service_fn(answer), "default"));
        let about = |name: &str| ObjectReference {
            namespace: Some("shop".to_owned()),
            name: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        for name in ["one", "two", "one"] {
            events.record(about(name), EventType::Normal, "Reason", "Reconcile", "a note").await;
        }
        events.flush().await;
        let asked = asked.lock().unwrap();
        let all = "/apis/events.k8s.io/v1/namespaces/shop/events";
        let [one, two, again] = &asked[..] else { panic!("{asked:?}") };
        assert_eq!([one, two], [&(Method::POST, all.to_owned()); 2]);
        assert!(again.0 == Method::PATCH && again.1.starts_with(&format!("{all}/one.")), "{again:?}");
    }

    #[test]
    fn the_name_of_an_event_is_one_whatever_it_is_about() {
        let now = Timestamp::new(1_800_000_000, 5).unwrap();
        assert_eq!(name("app-1", now), "app-1.18fae27693b40005");
        assert_eq!(name("system:Node", now), "system--ode.18fae27693b40005");
        assert_eq!(name(":system:node:", now), "system-node.18fae27693b40005");
        let long = format!("{}-{}", "a".repeat(MAX_NAME - 1), "b".repeat(17));
        assert_eq!(name(&long, now), format!("{}.18fae27693b40005", "a".repeat(MAX_NAME - 1)));
        assert!(name(&"a".repeat(300), now).len() <= 253);
    }
}
