//! Pilothouse: a host for Kubernetes operators whose logic is WebAssembly.
//!
//! The tour, in the order of one reconcile:
//!
//! 1. [`supervisor`] watches the reconcilers ([`crd`]) and gives each its life ([`reconciler`]): its plugin is fetched ([`source`]),
//!    loaded ([`plugin`], [`revision`]) and put to work by a [`controller`]. Who has which parents is in [`claims`].
//! 2. The controller's watches fill its [`store`]s with [`object`]s, and wake parents in its [`queue`].
//! 3. [`reconcile`] takes one parent through its steps: `observe`, the plugin call, `desired`, `plan`, `apply`, `status`. What they
//!    hand on to one another is in [`state`].
//! 4. Under what names all of it is written to the cluster is in [`identity`].
//!
//! [`run`] puts the parts together; [`manifests`] and [`build`] are tools beside them. How all of it fares is told by [`metrics`],
//! [`tally`], [`traces`] and [`telemetry`].

pub mod build;
pub mod claims;
pub mod controller;
pub mod crd;
pub mod identity;
pub mod manifests;
pub mod metrics;
pub mod object;
pub mod plugin;
pub mod probes;
pub mod queue;
pub mod reconcile;
pub mod reconciler;
pub mod revision;
pub mod run;
pub mod source;
pub mod state;
pub mod store;
pub mod supervisor;
pub mod tally;
pub mod telemetry;
pub mod traces;

mod bindings;
mod capability;
