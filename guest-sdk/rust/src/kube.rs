//! Reads from the API server, as the service account of the reconciler. Needs `spec.grants.kube`.
//!
//! For what cannot be known in advance. What can is better selected with [`Relate`](crate::Relate): it costs no request, and a change of it
//! wakes the parent.
//!
//! ```no_run
//! # use pilothouse_sdk::prelude::*;
//! /// The little that this plugin wants to know of a Node.
//! #[derive(serde::Deserialize)]
//! struct Node {
//!     spec: NodeSpec,
//! }
//! #[derive(serde::Deserialize)]
//! struct NodeSpec {
//!     #[serde(default)]
//!     unschedulable: bool,
//! }
//!
//! # fn example() -> Result<bool, Failure> {
//! let node: Option<Node> = kube::get("v1", "Node", None, "worker-1")?;
//! let pods: Vec<serde_json::Value> = kube::list(Selector::of("v1", "Pod").namespace("team").labels("app=web"))?;
//! # Ok(node.is_some_and(|node| node.spec.unschedulable) && pods.is_empty())
//! # }
//! ```

use std::fmt;

use serde::de::DeserializeOwned;

use crate::Selector;
use crate::object::parse;
use crate::raw::types;

/// Why there is no answer. `?` makes it a [`Failure::Retry`](crate::Failure::Retry).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The reconciler does not grant it, or its service account may not do it.
    Denied(String),
    /// The API server serves no such kind.
    UnknownKind(String),
    /// It answers with another error, or not at all.
    Failed(String),
    /// There is more than fits into an answer.
    TooLarge(String),
    /// It was read, but is not as the author's type says.
    Unreadable(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, message) = match self {
            Self::Denied(message) => ("denied", message),
            Self::UnknownKind(message) => ("no such kind", message),
            Self::Failed(message) => ("failed", message),
            Self::TooLarge(message) => ("too large", message),
            Self::Unreadable(message) => ("not as expected", message),
        };
        write!(f, "reading from the API server: {what}: {message}")
    }
}

impl std::error::Error for Error {}

/// One object, as the author's type; none: it does not exist. `namespace` is none for a kind of cluster scope.
///
/// # Errors
/// See [`Error`].
pub fn get<T: DeserializeOwned>(
    api_version: &str,
    kind: &str,
    namespace: Option<&str>,
    name: &str,
) -> Result<Option<T>, Error> {
    let object = host::get(api_version, kind, namespace, name)?;
    object.map(|json| typed(&format!("{kind} {name}"), &json)).transpose()
}

/// The objects that are selected, as the author's type, sorted by namespace and name.
///
/// # Errors
/// See [`Error`].
pub fn list<T: DeserializeOwned>(selector: Selector) -> Result<Vec<T>, Error> {
    let selector = types::Selector::from(selector);
    let objects = host::list(&selector)?;
    let mut typed_objects = Vec::with_capacity(objects.len());
    for (at, json) in objects.iter().enumerate() {
        typed_objects.push(typed(&format!("{}[{at}]", selector.kind), json)?);
    }
    Ok(typed_objects)
}

fn typed<T: DeserializeOwned>(what: &str, json: &str) -> Result<T, Error> {
    parse(json).map_err(|problem| Error::Unreadable(format!("{what}: {problem}")))
}

#[cfg(target_family = "wasm")]
mod host {
    use super::{Error, types};
    use crate::raw::kube;

    pub(super) fn get(
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<String>, Error> {
        kube::get(api_version, kind, namespace, name).map_err(Error::from)
    }

    pub(super) fn list(selector: &types::Selector) -> Result<Vec<String>, Error> {
        kube::list(selector).map_err(Error::from)
    }

    impl From<kube::Error> for Error {
        fn from(error: kube::Error) -> Self {
            match error {
                kube::Error::Denied(message) => Self::Denied(message),
                kube::Error::UnknownKind(message) => Self::UnknownKind(message),
                kube::Error::Failed(message) => Self::Failed(message),
                kube::Error::TooLarge(message) => Self::TooLarge(message),
            }
        }
    }
}

/// What a plugin reads in a test; see [`Case::kube`](crate::testing::Case::kube).
#[cfg(not(target_family = "wasm"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read<'a> {
    /// One object: the first of the answer, if it has one.
    Get {
        /// Group and version.
        api_version: &'a str,
        /// The kind.
        kind: &'a str,
        /// The namespace.
        namespace: Option<&'a str>,
        /// The name.
        name: &'a str,
    },
    /// All that are selected.
    List(&'a types::Selector),
}

#[cfg(not(target_family = "wasm"))]
pub(crate) use host::{Answers, FAKE};

/// Where there is no host, a test answers.
#[cfg(not(target_family = "wasm"))]
mod host {
    use std::cell::RefCell;

    use serde_json::Value;

    use super::{Error, Read, types};
    use crate::fake::Fake;

    /// What answers a read.
    pub(crate) type Answers = dyn Fn(&Read<'_>) -> Result<Vec<Value>, Error>;

    thread_local! {
        pub(crate) static FAKE: RefCell<Option<Fake<Answers>>> = const { RefCell::new(None) };
    }

    fn ask(read: &Read<'_>) -> Result<Vec<Value>, Error> {
        let fake = FAKE.with_borrow(Clone::clone);
        let fake = fake.ok_or_else(|| Error::Denied("this test gives no answers (Case::kube)".to_owned()))?;
        (fake.0)(read)
    }

    pub(super) fn get(
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<String>, Error> {
        let found = ask(&Read::Get { api_version, kind, namespace, name })?;
        Ok(found.first().map(Value::to_string))
    }

    pub(super) fn list(selector: &types::Selector) -> Result<Vec<String>, Error> {
        Ok(ask(&Read::List(selector))?.iter().map(Value::to_string).collect())
    }
}
