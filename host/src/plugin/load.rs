//! From bytes to a plugin: compile, link what is granted, find its parts, ask what it is.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tracing::Instrument as _;

use super::{
    Access, Call, CallError, CallLimits, Description, Engine, Guest, Plugin, Reached, Surface, compile, contract,
    describe,
};
use crate::{capability, identity, metrics::Function};

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
    /// It imports what is not there.
    #[error("the plugin imports {import}, which this host does not serve; it serves {}", capability::served())]
    Import {
        /// The name of the import.
        import: String,
    },
    /// It imports, or says that it needs, what is not granted.
    #[error(
        "the plugin needs {import}, which is not granted; grant it (spec.grants.{capability}), or take another plugin"
    )]
    NotGranted {
        /// The import, or the capability as the description has it.
        import: String,
        /// The capability.
        capability: &'static str,
    },
    /// What it imports is there, but not of the type that it expects.
    #[error("the plugin expects an import to be other than it is in that version of the contract")]
    Link(#[source] wasmtime::Error),
    /// It is in no version of the contract that this host serves.
    #[error(transparent)]
    Contract(#[from] contract::Error),
    /// It exports what is in the contract, but not as the contract has it.
    #[error("the plugin does not keep the contract that it exports")]
    Export(#[source] wasmtime::Error),
    /// It gave no description.
    #[error("failed to ask the plugin what it is (describe)")]
    Describe(#[source] CallError),
    /// It gave a description that is refused.
    #[error(transparent)]
    Description(#[from] describe::Error),
}

impl Plugin {
    /// Loads a component that this host serves, which a namespace or the cluster brings, whose calls may reach what `access` says.
    ///
    /// # Errors
    /// If it is none.
    pub async fn load(
        engine: &Arc<Engine>,
        namespace: Option<&str>,
        bytes: Vec<u8>,
        limits: CallLimits,
        access: Arc<Access>,
    ) -> Result<Self, Error> {
        let plugin = Self::open(engine, namespace, bytes, limits, access).await?;
        plugin.check_granted()?;
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
        access: Arc<Access>,
    ) -> Result<Self, Error> {
        let digest = identity::hex(&Sha256::digest(&bytes), 32);
        let surface = check(&bytes)?;
        let compile::Compiled { component, file } = engine.compile(namespace, &digest, bytes).await?;
        let version = contract::choose(&surface)?;
        if let Some(import) = surface.imports.iter().find(|import| !capability::serves(import)) {
            return Err(Error::Import { import: import.clone() });
        }
        let linker = capability::linker(engine.wasm()).map_err(Error::Link)?;
        let component = linker.instantiate_pre(&component).map_err(Error::Link)?;
        let contract = version.bind(&component).map_err(Error::Export)?;
        let guest =
            Guest { engine: engine.clone(), component, turns: Engine::turns(), log_rate: Arc::default(), access };
        let asked = contract.clone();
        let (context, reached) = (String::new(), Reached::default());
        let call = Call { function: Function::Describe, is_preview: false, limits, context, reached };
        let entered = guest.clone();
        let described = async move { entered.call(call, |store, instance| asked.describe(store, instance)).await };
        let (answer, usage) =
            engine.run(&guest.turns, described.in_current_span()).await.unwrap_or((Err(CallError::Host), None));
        guest.access.calls().note(Function::Describe, answer.as_ref().map(|_| None), usage);
        let description = Description::read(&answer.map_err(|error| match error {
            CallError::Mismatch(error) => Error::Export(error),
            error => Error::Describe(error),
        })?)?;
        Ok(Self { guest, contract, _file: file, imports: surface.imports, description, digest })
    }

    fn check_granted(&self) -> Result<(), Error> {
        let grants = self.guest.access.grants();
        let is_granted = |capability| grants.capabilities().any(|granted| granted == capability);
        let imported = self.imports.iter().filter_map(|import| Some((import, capability::granted(import)?)));
        let needed = self.description.capabilities.iter().filter_map(|name| Some((name, capability::of_name(name)?)));
        match imported.chain(needed).find(|(_, capability)| !is_granted(*capability)) {
            Some((import, capability)) => Err(Error::NotGranted { import: import.clone(), capability }),
            None => Ok(()),
        }
    }
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
    Ok(Surface::of(bytes))
}
