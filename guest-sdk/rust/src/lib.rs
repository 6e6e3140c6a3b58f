//! Write the logic of a Kubernetes operator as a function, and run it on [Pilothouse](https://github.com/pilothouse-dev/pilothouse).
//!
//! A plugin is a type that implements [`Plugin`]: from a parent object and the children that it has now, to the children that it
//! should have. The host watches, compares, writes, retries and cleans up.
//!
//! ```
//! use pilothouse_sdk::prelude::*;
//! use serde::{Deserialize, Serialize};
//!
//! /// What a user of the kind `Greeting` asks for.
//! #[derive(Deserialize)]
//! struct Spec {
//!     text: String,
//! }
//!
//! #[derive(Serialize)]
//! struct Status {
//!     length: usize,
//! }
//!
//! struct Greeting;
//!
//! impl Plugin for Greeting {
//!     type Spec = Spec;
//!     type Status = Status;
//!
//!     fn describe() -> Describe {
//!         Describe::parent("example.com/v1", "Greeting").child("v1", "ConfigMap")
//!     }
//!
//!     fn reconcile(request: &Request<Self>) -> Result<Desired<Status>, Failure> {
//!         let Parent { metadata, spec } = &request.parent;
//!         Ok(Desired::new()
//!             .child(json!({
//!                 "apiVersion": "v1",
//!                 "kind": "ConfigMap",
//!                 "metadata": { "name": metadata.name },
//!                 "data": { "text": spec.text },
//!             }))
//!             .status(Status { length: spec.text.len() }))
//!     }
//! }
//!
//! pilothouse_sdk::export_plugin!(Greeting);
//! # fn main() {}
//! ```
//!
//! The crate is a `cdylib` (and an `rlib`, for its tests); `pilothouse build` makes the component. A component imports
//! nothing that the plugin does not use, but the log.

mod describe;
mod desired;
#[doc(hidden)]
pub mod export;
pub mod external;
mod failure;
pub mod http;
pub mod kube;
pub mod log;
mod object;
mod options;
pub mod raw;
mod report;
mod request;
pub mod s3;
mod selector;
pub mod sql;

#[cfg(not(target_family = "wasm"))]
pub mod crd;
#[cfg(not(target_family = "wasm"))]
mod fake;
#[cfg(not(target_family = "wasm"))]
pub mod testing;

pub use describe::Describe;
pub use desired::{Desired, Finalization};
pub use failure::Failure;
pub use object::{Metadata, Object};
pub use options::ChildOptions;
pub use report::{Condition, Event, Holds};
pub use request::{Context, Parent, Propagation, Request};
pub use selector::Selector;
pub use serde_json::{Value, json};

/// All that a plugin usually names.
pub mod prelude {
    pub use crate::{
        ChildOptions, Condition, Describe, Desired, Event, Failure, Finalization, Finalize, Parent, Plugin, Relate,
        Request, Selector, export_plugin, json, kube, log, sql,
    };
}

/// The logic of an operator for one kind of parent.
pub trait Plugin: Sized + 'static {
    /// What a user asks for: the parent's `spec`.
    type Spec: serde::de::DeserializeOwned;
    /// What the plugin reports: its part of the parent's `status`, without `conditions` and `observedGeneration`. A plugin
    /// that reports nothing has `()` and never calls [`Desired::status`].
    type Status: serde::Serialize;

    /// What this plugin reconciles and needs: a constant, asked once when it is loaded.
    fn describe() -> Describe;

    /// The children that the parent should have now.
    ///
    /// Called whenever the parent or one of its children may have changed, and at any other time: it is not told what changed,
    /// and remembers nothing between calls. A parent whose spec cannot be read does not get here: it fails with the path
    /// of the field.
    ///
    /// # Errors
    /// See [`Failure`]: nothing is changed, and the message is shown on the parent.
    fn reconcile(request: &Request<Self>) -> Result<Desired<Self::Status>, Failure>;
}

/// For a plugin that makes something outside the cluster. Export it with `export_plugin!(MyApp, finalizer)`.
pub trait Finalize: Plugin {
    /// Clean up after a parent that is being deleted.
    ///
    /// Called at least once, and again after a failure or a crash, also when an earlier call has already done the work: what is
    /// already gone is success. The parent stays until the answer is [`Finalization::finished`].
    ///
    /// # Errors
    /// See [`Failure`]: the parent stays, and the host asks again.
    fn finalize(request: &Request<Self>) -> Result<Finalization<Self::Status>, Failure>;
}

/// For a plugin that looks at objects which it does not own. Export it with `export_plugin!(MyApp, relations)`.
pub trait Relate: Plugin {
    /// The other objects that [`Plugin::reconcile`] and [`Finalize::finalize`] need to see, at most 50 selectors. They are
    /// watched: a change wakes the parent. [`Request::related`] is empty here.
    ///
    /// # Errors
    /// See [`Failure`].
    fn relate(request: &Request<Self>) -> Result<Vec<Selector>, Failure>;
}
