//! From bytes to a plugin: compile, link what is granted, find its parts, ask what it is.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::{CallError, CallLimits, Description, Engine, Plugin, Surface, call, compile, describe};
use crate::{
    bindings::exports::pilothouse::plugin::{finalizer, reconciler},
    capability, identity,
    metrics::{Calls, Function},
};

/// The package whose exports are ours.
const PACKAGE: &str = "pilothouse:plugin/";
/// The version of it that this host serves.
pub const VERSION: &str = "0.1.0";
/// What this host knows to call.
const SERVED: [&str; 2] = ["reconciler", "finalizer"];
/// What is in the contract, and no host can call yet.
const RELATIONS: &str = "relations";

/// Why a plugin cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes are no component.
    #[error("this is a WebAssembly core module, not a component; build it with `pilothouse build`")]
    CoreModule,
    /// The bytes are what a compiler of WebAssembly makes of a component: machine code, which would run without any limit.
    #[error("this was compiled already, to machine code; give the WebAssembly component that it was compiled from")]
    Precompiled,
    /// It cannot be compiled.
    #[error(transparent)]
    Compile(#[from] compile::Error),
    /// It imports what is not there or not granted.
    #[error("the plugin imports something that this host does not serve or that is not granted")]
    Link(#[source] wasmtime::Error),
    /// It exports a part in a version, or a part altogether, that this host does not know.
    #[error(
        "the plugin exports {0}, which this host does not know; it serves pilothouse:plugin@{VERSION}: reconciler, finalizer"
    )]
    UnknownExport(String),
    /// It looks at objects that it does not own.
    #[error(
        "the plugin exports {PACKAGE}{RELATIONS}@{VERSION}, which this host does not serve yet; `pilothouse render` can show what \
         it makes of a parent"
    )]
    Relations,
    /// It does not export `reconciler`.
    #[error("the plugin does not export pilothouse:plugin/reconciler@{VERSION}")]
    NoReconciler(#[source] wasmtime::Error),
    /// It exports `finalizer`, but not as the contract has it.
    #[error("the plugin's pilothouse:plugin/finalizer@{VERSION} is not as the contract has it")]
    Finalizer(#[source] wasmtime::Error),
    /// It gave no description.
    #[error("failed to ask the plugin what it is (describe)")]
    Describe(#[source] CallError),
    /// It gave a description that is refused.
    #[error(transparent)]
    Description(#[from] describe::Error),
}

impl Plugin {
    /// Loads a component that this host serves, which a namespace or the cluster brings, and whose calls are counted in `calls`.
    ///
    /// # Errors
    /// If it is none.
    pub async fn load(
        engine: &Arc<Engine>,
        namespace: Option<&str>,
        bytes: Vec<u8>,
        limits: CallLimits,
        calls: Arc<Calls>,
    ) -> Result<Self, Error> {
        let plugin = Self::open(engine, namespace, bytes, limits, calls).await?;
        plugin.check_served()?;
        Ok(plugin)
    }

    /// Loads a component to look at it, also one that wants more of a host than this one has.
    ///
    /// # Errors
    /// If it cannot be called.
    pub async fn open(
        engine: &Arc<Engine>,
        namespace: Option<&str>,
        bytes: Vec<u8>,
        limits: CallLimits,
        calls: Arc<Calls>,
    ) -> Result<Self, Error> {
        let digest = identity::hex(&Sha256::digest(&bytes), 32);
        let surface = check(&bytes)?;
        let compile::Compiled { component, file } = engine.compile(namespace, &digest, bytes).await?;
        let linker = capability::linker(engine.wasm()).map_err(Error::Link)?;
        let component = linker.instantiate_pre(&component).map_err(Error::Link)?;
        let reconciler = reconciler::GuestIndices::new(&component).map_err(Error::NoReconciler)?;
        let finalizer = match component.component().get_export_index(None, "pilothouse:plugin/finalizer@0.1.0") {
            Some(_) => Some(finalizer::GuestIndices::new(&component).map_err(Error::Finalizer)?),
            None => None,
        };
        let relations = surface.exports.contains(&export(RELATIONS));
        let guest = reconciler.clone();
        let (answer, usage) = call(engine, &component, limits, Function::Describe, |store, instance| {
            Box::pin(async move { guest.load(&mut *store, instance)?.call_describe(store).await })
        })
        .await;
        calls.note(Function::Describe, answer.as_ref().map(|_| None), usage);
        let description = Description::read(&answer.map_err(Error::Describe)?)?;
        let engine = engine.clone();
        Ok(Self { engine, calls, component, _file: file, reconciler, finalizer, relations, description, digest })
    }

    /// Whether this host has all that the plugin wants of it.
    ///
    /// # Errors
    /// If something is missing.
    pub fn check_served(&self) -> Result<(), Error> {
        if self.relations {
            return Err(Error::Relations);
        }
        Ok(self.description.check_capabilities()?)
    }
}

/// Whether this host knows to call what a component exports under this name.
pub fn serves_export(name: &str) -> bool {
    SERVED.iter().any(|part| name == export(part))
}

fn export(part: &str) -> String {
    format!("{PACKAGE}{part}@{VERSION}")
}

/// What it shows on its outside, if it is worth compiling.
fn check(bytes: &[u8]) -> Result<Surface, Error> {
    // The eight bytes that open a core module of version 1.
    if bytes.starts_with(b"\0asm\x01\0\0\0") {
        return Err(Error::CoreModule);
    }
    if wasmtime::Engine::detect_precompiled(bytes).is_some() {
        return Err(Error::Precompiled);
    }
    let surface = Surface::of(bytes);
    check_exports(&surface)?;
    Ok(surface)
}

/// An export of ours that nobody would ever call is a mistake worth telling: a finalizer of another version would never clean up.
fn check_exports(surface: &Surface) -> Result<(), Error> {
    let is_unknown = |name: &&String| name.starts_with(PACKAGE) && !serves_export(name) && **name != export(RELATIONS);
    surface.exports.iter().find(is_unknown).map_or(Ok(()), |name| Err(Error::UnknownExport(name.clone())))
}
