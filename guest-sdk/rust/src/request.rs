//! What a plugin is asked with: the parent, the children that it has now, and the circumstances.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::object::{Object, parse};
use crate::{Failure, Plugin, raw};

/// Everything that an answer may depend on. The same request must give the same answer.
#[derive(Debug)]
pub struct Request<P: Plugin> {
    /// The object being reconciled.
    pub parent: Parent<P::Spec>,
    /// When, how often and with what this is asked.
    pub context: Context,
    object: Object,
    children: Vec<Object>,
    related: Vec<Object>,
    config: String,
}

/// The object being reconciled, with the author's type for its `spec`.
#[derive(Debug, Deserialize)]
pub struct Parent<S> {
    /// Name, labels and the like.
    pub metadata: Metadata,
    /// What the user asks for. A kind whose objects may lack a spec has `Option<…>` as its [`Plugin::Spec`].
    pub spec: S,
}

/// The part of an object's metadata that a plugin may want.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// The name.
    pub name: String,
    /// The namespace; none for a kind of cluster scope.
    pub namespace: Option<String>,
    /// Unique over time: an object that is deleted and created again has another.
    pub uid: String,
    /// Counts the changes of the spec.
    pub generation: i64,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The annotations.
    pub annotations: BTreeMap<String, String>,
    /// When it was created, RFC 3339.
    pub creation_timestamp: String,
    /// Since when it is being deleted, RFC 3339; set in [`Finalize::finalize`](crate::Finalize::finalize).
    pub deletion_timestamp: Option<String>,
}

/// The circumstances of one call.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Context {
    /// The time of this call, RFC 3339 in UTC; the only wall clock there is. An answer that carries it changes with every
    /// call, so keep it out of children and status.
    pub now: String,
    /// How long this call may take before it is ended, in milliseconds.
    pub deadline_ms: u32,
    /// 0, then 1, 2, … for each failure of this parent in a row.
    pub attempt: u32,
    /// Which plugin and config are running, an opaque string.
    pub revision: String,
    /// How the parent is being deleted; set in [`Finalize::finalize`](crate::Finalize::finalize).
    pub deletion: Option<Deletion>,
    /// False only if it is certain that no answer was ever acted upon for this parent, so that nothing can be left to clean
    /// up.
    pub ever_applied: bool,
}

impl Default for Context {
    fn default() -> Self {
        Self {
            now: String::new(),
            deadline_ms: 0,
            attempt: 0,
            revision: String::new(),
            deletion: None,
            // Not told means not certain.
            ever_applied: true,
        }
    }
}

impl Context {
    /// How long this call may take before it is ended.
    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.into())
    }
}

/// How the parent is being deleted.
#[derive(Debug, Clone, Deserialize)]
pub struct Deletion {
    /// What the user wants to happen to the children.
    pub propagation: Propagation,
}

/// What the user wants to happen to the children of a deleted parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Propagation {
    /// They are deleted after the parent.
    Background,
    /// They are deleted before the parent.
    Foreground,
    /// They stay.
    Orphan,
}

impl<P: Plugin> Request<P> {
    pub(crate) fn parse(request: raw::types::Request) -> Result<Self, Failure> {
        Ok(Self {
            parent: parse(&request.parent).map_err(Failure::terminal)?,
            context: parse(&request.context).map_err(|problem| Failure::terminal(format!("context: {problem}")))?,
            object: Object::new(request.parent),
            children: request.children.into_iter().map(Object::new).collect(),
            related: request.related.into_iter().map(Object::new).collect(),
            config: request.config,
        })
    }

    /// The whole parent, for what [`Parent`] leaves out.
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// The parent's status as this plugin returned it last; none at first.
    ///
    /// A status is no memory: users may clear it, and backups restore an old one.
    ///
    /// # Errors
    /// [`Failure::terminal`] with the path, if an earlier version of the plugin left a status that this one cannot read.
    pub fn status(&self) -> Result<Option<P::Status>, Failure>
    where
        P::Status: DeserializeOwned,
    {
        #[derive(Deserialize)]
        struct WithStatus<S> {
            status: Option<S>,
        }
        Ok(self.object.parse::<WithStatus<P::Status>>()?.status)
    }

    /// The children that exist now, sorted by kind, namespace and name.
    pub fn children(&self) -> &[Object] {
        &self.children
    }

    /// A child that exists now, as the author's type; none while it does not exist. It is looked for beside the parent; for
    /// children in other namespaces go through [`children`](Self::children).
    ///
    /// ```
    /// # use pilothouse_sdk::prelude::*;
    /// /// The little that this plugin wants to know of a Deployment.
    /// #[derive(serde::Deserialize)]
    /// struct Deployment {
    ///     spec: DeploymentSpec,
    /// }
    /// #[derive(serde::Deserialize)]
    /// struct DeploymentSpec {
    ///     replicas: i32,
    /// }
    ///
    /// fn replicas<P: Plugin>(request: &Request<P>) -> Result<i32, Failure> {
    ///     let deployment = request.child::<Deployment>("Deployment", "web")?;
    ///     Ok(deployment.map_or(0, |deployment| deployment.spec.replicas))
    /// }
    /// ```
    ///
    /// # Errors
    /// As of [`Object::parse`].
    pub fn child<T: DeserializeOwned>(&self, kind: &str, name: &str) -> Result<Option<T>, Failure> {
        let ours = self.parent.metadata.namespace.as_deref();
        let beside = |child: &&Object| ours.is_none() || child.namespace().is_none_or(|namespace| Some(namespace) == ours);
        let child = self.children.iter().filter(|child| child.kind() == kind && child.name() == name).find(beside);
        child.map(Object::parse).transpose()
    }

    /// The objects that [`Relate::relate`](crate::Relate::relate) selected, sorted by kind, namespace and name.
    pub fn related(&self) -> &[Object] {
        &self.related
    }

    /// `spec.config` of the reconciler; `{}` when there is none.
    ///
    /// # Errors
    /// [`Failure::terminal`] with the path.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        parse(&self.config).map_err(|problem| Failure::terminal(format!("config: {problem}")))
    }
}
