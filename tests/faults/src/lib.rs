//! A proxy between a host and the API server that fails where it is told to.
//!
//! It understands Kubernetes requests and watches well enough to address them: a [`Point`] is "the second `apply` of ConfigMap a", or
//! "the first time that the watch on Widgets shows w changed". A run without a fault tells which points there are; then each of them can
//! be met with each [`Fault`]. What comes through unharmed is unchanged, so the audit log of the API server remains the ground truth.

mod asked;
mod point;
mod proxy;
mod watched;

pub use self::{
    asked::Asked,
    point::{Fault, Point},
    proxy::{Error, Options, Proxy},
};
