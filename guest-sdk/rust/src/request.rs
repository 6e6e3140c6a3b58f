//! What a plugin is asked with: the parent, the children that it has now, and the circumstances.

use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::object::{Metadata, Object, parse};
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

/// The circumstances of one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// The time of this call, RFC 3339 in UTC; the only wall clock there is. An answer that carries it changes with every
    /// call, so keep it out of children and status.
    pub now: String,
    /// How long this call may take before it is ended.
    pub deadline: Duration,
    /// 0, then 1, 2, … for each failure of this parent in a row.
    pub attempt: u32,
    /// Which plugin and config are running, an opaque string.
    pub revision: String,
    /// What the user wants to happen to the children of a deleted parent; set in
    /// [`Finalize::finalize`](crate::Finalize::finalize).
    pub propagation: Option<Propagation>,
    /// False only if it is certain that no answer was ever acted upon for this parent, so that nothing can be left to clean
    /// up.
    pub ever_applied: bool,
    /// False only if it is certain that no call for this parent can have changed anything by [`http`](crate::http) or [`sql`](crate::sql),
    /// so that nothing can be left outside of the cluster: each was refused, or never got there.
    pub ever_reached: bool,
}

/// What the user wants to happen to the children of a deleted parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// They are deleted after the parent.
    Background,
    /// They are deleted before the parent.
    Foreground,
    /// They stay.
    Orphan,
}

impl Context {
    /// By hand, since it is a document that grows: what is missing or unknown must not fail.
    fn new(json: &str) -> Self {
        let context: Value = serde_json::from_str(json).unwrap_or_default();
        let text = |key: &str| context[key].as_str().unwrap_or_default().to_owned();
        let number = |key: &str| context[key].as_u64().unwrap_or_default();
        Self {
            now: text("now"),
            deadline: Duration::from_millis(number("deadlineMs")),
            attempt: u32::try_from(number("attempt")).unwrap_or(u32::MAX),
            revision: text("revision"),
            propagation: match context["deletion"]["propagation"].as_str() {
                Some("Background") => Some(Propagation::Background),
                Some("Foreground") => Some(Propagation::Foreground),
                Some("Orphan") => Some(Propagation::Orphan),
                _ => None,
            },
            // Not told means not certain.
            ever_applied: context["everApplied"].as_bool().unwrap_or(true),
            ever_reached: context["everReached"].as_bool().unwrap_or(true),
        }
    }
}

impl<P: Plugin> Request<P> {
    pub(crate) fn parse(request: raw::types::Request) -> Result<Self, Failure> {
        Ok(Self {
            parent: parse(&request.parent).map_err(Failure::terminal)?,
            context: Context::new(&request.context),
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
        let child = self.children.iter().find(|child| {
            let namespace = child.metadata().namespace.as_deref();
            child.metadata().name == name
                && child.kind() == kind
                && (ours.is_none() || namespace.is_none() || namespace == ours)
        });
        child.map(Object::parse).transpose()
    }

    /// The objects that [`Relate::relate`](crate::Relate::relate) selected, sorted by kind, namespace and name.
    pub fn related(&self) -> &[Object] {
        &self.related
    }

    /// One of the [related](Self::related) objects, as the author's type; none if it does not exist, or was not selected.
    ///
    /// # Errors
    /// As of [`Object::parse`].
    pub fn related_object<T: DeserializeOwned>(
        &self,
        kind: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<T>, Failure> {
        let related = self.related.iter().find(|object| {
            let metadata = object.metadata();
            metadata.name == name && metadata.namespace.as_deref() == namespace && object.kind() == kind
        });
        related.map(Object::parse).transpose()
    }

    /// `spec.config` of the reconciler; `{}` when there is none.
    ///
    /// # Errors
    /// [`Failure::terminal`] with the path.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        parse(&self.config).map_err(|problem| Failure::terminal(format!("config: {problem}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_may_lack_keys_and_have_others() {
        let context = Context::new(r#"{"attempt":2,"deletion":{"propagation":"Orphan"},"new":[1]}"#);
        assert_eq!((context.attempt, context.propagation, context.ever_applied), (2, Some(Propagation::Orphan), true));
        let context = Context::new(r#"{"everApplied":false}"#);
        assert_eq!((context.ever_applied, context.ever_reached), (false, true));
        assert!(!Context::new(r#"{"everReached":false}"#).ever_reached);
    }
}
