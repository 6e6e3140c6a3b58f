//! The capabilities: what a plugin can import. This list is the whole surface that the host offers to a guest.

pub(crate) mod log;

use wasmtime::component::{HasSelf, Linker};

use crate::plugin::CallState;

/// A linker with everything that a plugin without grants may import; an import that is not in it refuses the plugin.
pub(crate) fn linker(engine: &wasmtime::Engine) -> Result<Linker<CallState>, wasmtime::Error> {
    let mut linker = Linker::new(engine);
    crate::bindings::pilothouse::plugin::log::add_to_linker::<_, HasSelf<log::LogContext>>(
        &mut linker,
        |state: &mut CallState| &mut state.log,
    )?;
    Ok(linker)
}
