//! End-to-end tests: the real host and real plugins on a real control plane, host and plugins under their own roles.
//!
//! Most tests share one control plane and one host, each in a namespace of its own. What the host did is read from the API
//! server's audit log: requests are counted, not guessed from logs.

mod audit;
mod cluster;

mod cases;
mod churn;
mod compile;
mod conflicts;
mod crash;
mod dev;
mod ending;
mod fair;
mod field;
mod handles;
mod idle;
mod images;
mod inputs;
mod kinds;
mod lease;
mod noop;
mod observability;
mod outside;
mod related;
mod release;
mod remote;
mod restore;
mod rollout;
mod sandbox;
mod seed;
mod soak;
mod swap;
mod sweep;
mod tenants;
mod tripwire;
mod versions;
mod waves;
mod workerpool;
