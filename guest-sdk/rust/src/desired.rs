//! What a plugin answers: the children, status, conditions and events that should be.

use std::marker::PhantomData;
use std::time::Duration;

use serde::Serialize;

use crate::failure::millis;
use crate::raw::types;
use crate::{ChildOptions, Condition, Event, Failure};

/// The state of the world that the plugin wants for one parent; `S` is its [`Plugin::Status`](crate::Plugin::Status).
///
/// ```
/// # use pilothouse_sdk::prelude::*;
/// # #[derive(serde::Serialize)] struct Status { available_replicas: i32 }
/// let desired = Desired::new()
///     .child(json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "web" }, "data": { "color": "blue" } }))
///     .status(Status { available_replicas: 3 })
///     .condition(Condition::ready(true, "Available"));
/// ```
#[derive(Debug)]
#[must_use]
pub struct Desired<S> {
    answer: Answer<S>,
    next: types::Next,
}

/// The answer while a parent is being deleted. Cleanup may run again after it is done, also after a crash: what is already gone
/// is success.
#[derive(Debug)]
#[must_use]
pub struct Finalization<S> {
    answer: Answer<S>,
    cleanup: types::Cleanup,
    children: bool,
}

/// What the two have in common.
#[derive(Debug)]
struct Answer<S> {
    children: Vec<types::Child>,
    status: Option<String>,
    conditions: Vec<types::Condition>,
    events: Vec<types::Event>,
    unserializable: Option<Failure>,
    of: PhantomData<S>,
}

/// What the documents of `extra` are while 0.1.0 knows no key for them.
const NONE: &str = "{}";

impl<S: Serialize> Answer<S> {
    const fn new() -> Self {
        Self {
            children: Vec::new(),
            status: None,
            conditions: Vec::new(),
            events: Vec::new(),
            unserializable: None,
            of: PhantomData,
        }
    }

    fn child(&mut self, object: &impl Serialize, options: &ChildOptions) {
        if let Some(object) = self.json("a child", object) {
            self.children.push(types::Child { object, options: options.json() });
        }
    }

    fn status(&mut self, status: &S) {
        self.status = self.json("the status", status);
    }

    /// Serialised here rather than at the end, so that an answer is flat text and needs no generic list.
    fn json(&mut self, what: &str, value: &impl Serialize) -> Option<String> {
        serde_json::to_string(value)
            .map_err(|err| self.unserializable = Some(Failure::terminal(format!("{what} is no JSON: {err}"))))
            .ok()
    }
}

impl<S: Serialize> Desired<S> {
    /// No children, an unchanged status, and a new call when something changes.
    pub const fn new() -> Self {
        Self { answer: Answer::new(), next: types::Next::OnChange }
    }

    /// One more child: `json!({…})`, a type of the crate `k8s-openapi`, or anything else that serialises to an object with
    /// `apiVersion`, `kind` and `metadata.name`.
    ///
    /// Name every field that you decide and leave out what you do not. A child that existed before and is not named here is
    /// deleted. Its kind has to be listed in [`Plugin::describe`](crate::Plugin::describe).
    pub fn child(mut self, object: impl Serialize) -> Self {
        self.answer.child(&object, &ChildOptions::new());
        self
    }

    /// The same for a child that is to be treated otherwise than most.
    pub fn child_with(mut self, object: impl Serialize, options: ChildOptions) -> Self {
        self.answer.child(&object, &options);
        self
    }

    /// Some more children, such as an `Option` of one.
    pub fn children(mut self, objects: impl IntoIterator<Item = impl Serialize>) -> Self {
        objects.into_iter().for_each(|object| self.answer.child(&object, &ChildOptions::new()));
        self
    }

    /// The plugin's part of the parent's status. Without it the status stays as it is.
    pub fn status(mut self, status: S) -> Self {
        self.answer.status(&status);
        self
    }

    /// One more condition of the parent's `status.conditions`.
    pub fn condition(mut self, condition: Condition) -> Self {
        self.answer.conditions.push(condition.into());
        self
    }

    /// One more Event on the parent.
    pub fn event(mut self, event: Event) -> Self {
        self.answer.events.push(event.into());
        self
    }

    /// Ask again soon, also if nothing changes; each time in a row waits longer. Children need no such thing: a change of one
    /// asks again by itself.
    pub fn requeue(mut self) -> Self {
        self.next = types::Next::Immediately;
        self
    }

    /// Ask again after `delay` (1 s to 49 days), also if nothing changes: for what cannot be watched, outside the cluster.
    pub fn requeue_after(mut self, delay: Duration) -> Self {
        self.next = types::Next::After(millis(delay));
        self
    }

    pub(crate) fn into_raw(self) -> Result<types::Desired, Failure> {
        let Answer { children, status, conditions, events, unserializable, .. } = self.answer;
        match unserializable {
            Some(failure) => Err(failure),
            None => {
                Ok(types::Desired { children, status, conditions, events, next: self.next, extra: NONE.to_owned() })
            }
        }
    }
}

impl<S: Serialize> Default for Desired<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Serialize> Finalization<S> {
    const fn new(cleanup: types::Cleanup) -> Self {
        Self { answer: Answer::new(), cleanup, children: false }
    }

    /// All that the plugin ever made outside the cluster is gone; the parent may go, and the children after it.
    pub const fn finished() -> Self {
        Self::new(types::Cleanup::Finished)
    }

    /// Not yet; ask again after `delay`, or when something changes.
    pub fn waiting(delay: Duration) -> Self {
        Self::new(types::Cleanup::Waiting(millis(delay)))
    }

    /// One more child that cleanup still wants. With the first, all children that are not named are deleted; without any, all
    /// are left alone.
    pub fn child(mut self, object: impl Serialize) -> Self {
        self.children = true;
        self.answer.child(&object, &ChildOptions::new());
        self
    }

    /// The same for a child that is to be treated otherwise than most.
    pub fn child_with(mut self, object: impl Serialize, options: ChildOptions) -> Self {
        self.children = true;
        self.answer.child(&object, &options);
        self
    }

    /// Delete all children now, before the parent goes.
    pub fn no_children(mut self) -> Self {
        self.children = true;
        self.answer.children.clear();
        self
    }

    /// The plugin's part of the parent's status. Without it the status stays as it is.
    pub fn status(mut self, status: S) -> Self {
        self.answer.status(&status);
        self
    }

    /// One more condition of the parent's `status.conditions`.
    pub fn condition(mut self, condition: Condition) -> Self {
        self.answer.conditions.push(condition.into());
        self
    }

    /// One more Event on the parent.
    pub fn event(mut self, event: Event) -> Self {
        self.answer.events.push(event.into());
        self
    }

    pub(crate) fn into_raw(self) -> Result<types::Finalization, Failure> {
        let Answer { children, status, conditions, events, unserializable, .. } = self.answer;
        let children = self.children.then_some(children);
        match unserializable {
            Some(failure) => Err(failure),
            None => {
                let extra = NONE.to_owned();
                Ok(types::Finalization { cleanup: self.cleanup, children, status, conditions, events, extra })
            }
        }
    }
}
