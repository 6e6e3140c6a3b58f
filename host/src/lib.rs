//! Pilothouse: a host for Kubernetes operators whose logic is WebAssembly.
//!
//! The tour, in the order of one reconcile:
//!
//! 1. [`supervisor`] watches the reconcilers ([`crd`], [`declaration`]) and gives each its life ([`reconciler`]): its plugin is fetched
//!    ([`source`]), loaded ([`plugin`], [`revision`]) and put to work by a [`controller`]. Who has which parents is in [`claims`], and what
//!    a tenant may ask for in [`policy`].
//! 2. The controller's watches ([`watch`]) fill its [`store`]s with [`object`]s, and wake parents in its [`queue`]. So do those of what
//!    parents see beside their children ([`related`], [`selection`], [`labels`]).
//! 3. [`reconcile`] takes one parent through its steps: `observe`, the plugin call, `desired`, `plan`, `apply`, `status`. What they
//!    hand on to one another is in [`state`].
//! 4. What proves that an object is not there is in [`lookup`]. Under what names all of it is written to the cluster is in [`identity`].
//!
//! [`run`] puts the parts together, on one way to the API server ([`client`]), with memory that is given back ([`allocator`]); of several hosts the one that holds a [`lease`] is at work. Beside them are tools that need no cluster: [`build`], [`inspect`], [`render`],
//! [`manifests`] and [`version`]; [`kinds`] and [`output`] are theirs. Those that [`transfer`] and [`sign`] plugins talk to a [`registry`],
//! by the [`login`] of who runs them, over a [`connection`]; whose [`signature`] counts is the host's to know. [`release`] is for when there is no host any more,
//! and [`dev`] is the loop of a plugin's author: build, preview, and a host for one reconciler.
//!
//! How all of it fares is told by [`metrics`], [`tally`], [`traces`] and [`telemetry`].

pub mod allocator;
pub mod build;
pub mod cache;
pub mod claims;
pub mod client;
pub mod connection;
pub mod controller;
pub mod crd;
pub mod declaration;
pub mod dev;
pub mod identity;
pub mod inspect;
pub mod kinds;
pub mod labels;
pub mod lease;
pub mod login;
pub mod lookup;
pub mod manifests;
pub mod metrics;
pub mod object;
pub mod output;
pub mod plugin;
pub mod policy;
pub mod preview;
pub mod probes;
pub mod queue;
pub mod reconcile;
pub mod reconciler;
pub mod registry;
pub mod related;
pub mod release;
pub mod render;
pub mod revision;
pub mod rollout;
pub mod run;
pub mod secrets;
pub mod selection;
pub mod sign;
pub mod signature;
pub mod source;
pub mod state;
pub mod store;
pub mod supervisor;
pub mod tally;
pub mod telemetry;
pub mod traces;
pub mod transfer;
pub mod version;
pub mod watch;

mod bindings;
mod capability;
