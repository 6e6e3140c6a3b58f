//! The versions of the contract that this host serves, and how a component of each is called.
//!
//! The host speaks the values of the newest version. A version is a module of bindings and a file here, which finds the exports of
//! a component and converts; which one a plugin gets is decided when it is loaded, by what it exports. A patch version only adds to
//! what a plugin may import, so each minor version is served by its newest patch.

mod v0_1;

#[cfg(test)]
mod frozen;
#[cfg(test)]
mod v0_0;

use std::{pin::Pin, sync::Arc};

use wasmtime::{
    Store,
    component::{Instance, InstancePre},
};

use super::{Answer, CallState, Failure, FinalizeAnswer, Request, Selector, Surface};

/// The package of the contract.
const PACKAGE: &str = "pilothouse:plugin";
/// What this host knows to call.
const PARTS: [&str; 3] = ["reconciler", "finalizer", "relations"];

/// One version of the contract.
pub(super) struct Version {
    /// The newest patch of it.
    version: &'static str,
    bind: fn(&InstancePre<CallState>) -> Bound,
}

/// All that are served, the newest first.
const SERVED: &[Version] = &[
    Version { version: "0.1.0", bind: v0_1::bind },
    #[cfg(test)]
    Version { version: "0.0.9", bind: v0_0::bind },
];

/// The exports of a component, in the version that it was built from.
pub(super) trait Contract: Send + Sync {
    /// Whether it cleans up after its parents.
    fn has_finalizer(&self) -> bool;

    /// Whether it looks at objects that it does not own.
    fn has_relations(&self) -> bool;

    /// Asks what it is, and sees that all that it exports is as the contract has it.
    fn describe<'a>(self: Arc<Self>, store: &'a mut Store<CallState>, instance: &'a Instance) -> Entered<'a, String>;

    /// Asks what it needs to see of a parent's surroundings. Only one that has relations is asked.
    fn relate<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<Vec<Selector>, Failure>>;

    /// Asks for the children of a parent.
    fn reconcile<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<Answer, Failure>>;

    /// Asks to clean up after a parent. Only one that has a finalizer is asked.
    fn finalize<'a>(
        self: Arc<Self>,
        store: &'a mut Store<CallState>,
        instance: &'a Instance,
        request: Request,
    ) -> Entered<'a, Result<FinalizeAnswer, Failure>>;
}

/// The exports of a component, if it has those that it should.
type Bound = Result<Arc<dyn Contract>, wasmtime::Error>;

/// A call of a guest.
pub(super) type Entered<'a, T> = Pin<Box<dyn Future<Output = Result<T, wasmtime::Error>> + Send + 'a>>;

/// An export that is there, but not of the type that the contract says; with the part of the contract.
#[derive(Debug, thiserror::Error)]
#[error("the plugin's {PACKAGE}/{0} is not as the contract has it in that version")]
pub(super) struct Mismatch(&'static str);

/// Why a component is in no version that this host serves.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It exports a part in a version, or a part altogether, that this host does not know.
    #[error("the plugin exports {export}, which this host does not know; it serves {PACKAGE}@{}: {}", served().join(", "), PARTS.join(", "))]
    UnknownExport {
        /// The name of the export.
        export: String,
    },
    /// It exports a part in another version than its reconciler.
    #[error("the plugin exports {export}, but its reconciler in {version}: export both in one version")]
    TwoVersions {
        /// The name of the export.
        export: String,
        /// The version in which its reconciler is called.
        version: &'static str,
    },
    /// It does not export `reconciler`.
    #[error("the plugin does not export {PACKAGE}/reconciler@{}; it exports {}", served().join(" or @"), listed(.exports))]
    NoReconciler {
        /// What it exports.
        exports: Vec<String>,
    },
}

/// The versions that this host serves, the newest first.
pub fn served() -> Vec<&'static str> {
    SERVED.iter().map(|version| version.version).collect()
}

/// Whether this host knows to call what a component exports under this name.
pub fn serves_export(name: &str) -> bool {
    part(name).is_some_and(|(part, version)| PARTS.contains(&part) && version.is_some())
}

/// Whether an interface of this name is one of these of the contract, in a version that this host serves.
pub(crate) fn serves_import(name: &str, interfaces: &[&str]) -> bool {
    part(name).is_some_and(|(part, version)| interfaces.contains(&part) && version.is_some())
}

/// Chooses the version in which a component is called: the newest that it exports.
pub(super) fn choose(surface: &Surface) -> Result<&'static Version, Error> {
    let ours = || surface.exports.iter().filter_map(|export| Some((export, part(export)?)));
    // An export of ours that nobody would ever call is a mistake worth telling: a finalizer of another version would never clean up.
    for (export, (part, version)) in ours() {
        if version.is_none() || !PARTS.contains(&part) {
            return Err(Error::UnknownExport { export: export.clone() });
        }
    }
    let exported = |wanted: &str, of: &Version| {
        ours()
            .any(|(_, (part, version))| part == wanted && version.is_some_and(|version| version.version == of.version))
    };
    let Some(chosen) = SERVED.iter().find(|version| exported("reconciler", version)) else {
        return Err(Error::NoReconciler { exports: surface.exports.clone() });
    };
    match ours().find(|(_, (part, _))| !exported(part, chosen)) {
        Some((export, _)) => Err(Error::TwoVersions { export: export.clone(), version: chosen.version }),
        None => Ok(chosen),
    }
}

impl Version {
    /// Finds the exports of a component for which it was chosen.
    pub(super) fn bind(&self, component: &InstancePre<CallState>) -> Bound {
        (self.bind)(component)
    }
}

/// The part of the contract that an interface is, with the version of it that this host serves; None: it is of somebody else.
fn part(interface: &str) -> Option<(&str, Option<&'static Version>)> {
    let (part, version) = interface.strip_prefix(PACKAGE)?.strip_prefix('/')?.split_once('@')?;
    Some((part, SERVED.iter().find(|served| minor(served.version) == minor(version))))
}

/// `0.1` of `0.1.7`: what is compatible.
fn minor(version: &str) -> &str {
    version.rsplit_once('.').map_or(version, |(minor, _)| minor)
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}
