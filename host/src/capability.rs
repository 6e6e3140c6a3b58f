//! The capabilities: what a plugin can import. This list is the whole surface that the host offers to a guest.

pub(crate) mod log;

use wasmtime::component::{HasSelf, Linker};

use crate::plugin::CallState;

/// The interfaces of [`linker`], and the one of types that the others use. A patch version is as good as another.
const SERVED: [&str; 2] = ["pilothouse:plugin/log@0.1.", "pilothouse:plugin/types@0.1."];

/// Whether a plugin may import an interface of this name without a grant. That it is as the contract has it is seen by linking.
pub fn serves(import: &str) -> bool {
    SERVED.iter().any(|served| import.starts_with(served))
}

/// A linker with everything that a plugin without grants may import; an import that is not in it refuses the plugin.
pub(crate) fn linker(engine: &wasmtime::Engine) -> Result<Linker<CallState>, wasmtime::Error> {
    let mut linker = Linker::new(engine);
    crate::bindings::pilothouse::plugin::log::add_to_linker::<_, HasSelf<log::LogContext>>(
        &mut linker,
        |state: &mut CallState| &mut state.log,
    )?;
    Ok(linker)
}
