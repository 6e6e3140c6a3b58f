//! The capabilities: what a plugin can import. This list is the whole surface that the host offers to a guest.

pub(crate) mod log;
pub(crate) mod wasi;

use wasmtime::component::{HasSelf, Linker};

use crate::{
    bindings,
    plugin::{self, CallState},
};

/// The interfaces of the contract that a plugin may import without a grant; `types` is the one that the others use.
const INTERFACES: [&str; 2] = ["log", "types"];

/// Whether a plugin may import an interface of this name without a grant. That it is as the contract has it is seen by linking.
pub fn serves(import: &str) -> bool {
    plugin::serves_contract(import, &INTERFACES) || wasi::serves(import)
}

/// What a plugin may import, for a person.
pub(crate) fn served() -> String {
    format!("log of pilothouse:plugin@{}, and WASI 0.2 without wasi:http", plugin::contracts().join(", "))
}

/// A linker with everything that a plugin without grants may import; an import that is not in it refuses the plugin.
pub(crate) fn linker(engine: &wasmtime::Engine) -> Result<Linker<CallState>, wasmtime::Error> {
    let mut linker = Linker::new(engine);
    bindings::v0_1::pilothouse::plugin::log::add_to_linker::<_, HasSelf<log::LogContext>>(&mut linker, log)?;
    #[cfg(test)]
    bindings::v0_0::pilothouse::plugin::log::add_to_linker::<_, HasSelf<log::LogContext>>(&mut linker, log)?;
    wasi::add_to_linker(&mut linker)?;
    Ok(linker)
}

fn log(state: &mut CallState) -> &mut log::LogContext {
    &mut state.log
}
