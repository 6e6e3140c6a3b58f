//! The capabilities: what a plugin can import. This list is the whole surface that the host offers to a guest.

pub(crate) mod access;
mod http;
pub(crate) mod kube;
pub(crate) mod log;
mod sql;
pub(crate) mod wasi;

use wasmtime::component::{HasSelf, Linker};

use self::access::Outside;
use crate::{
    bindings,
    plugin::{self, CallState},
};

/// The capabilities that need a grant: fields of `spec.grants`, and interfaces of the contract.
pub(crate) const NAMES: [&str; 3] = ["http", "kube", "sql"];
/// The interfaces of the contract that a plugin may import without a grant; `types` is the one that the others use.
const FREE: [&str; 2] = ["log", "types"];

/// Whether there is an interface of this name to import. That it is as the contract has it is seen by linking.
pub fn serves(import: &str) -> bool {
    plugin::serves_contract(import, &FREE) || granted(import).is_some() || wasi::serves(import)
}

/// The capability that has to be granted to who imports this.
pub(crate) fn granted(import: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|name| plugin::serves_contract(import, &[name]))
}

/// The capability of that name.
pub(crate) fn of_name(name: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|known| *known == name)
}

/// What a plugin may import, for a person.
pub(crate) fn served() -> String {
    format!(
        "log, http, kube and sql of pilothouse:plugin@{}, and WASI 0.2 without wasi:http",
        plugin::contracts().join(", ")
    )
}

/// A linker with everything that a plugin may import, granted or not: grants are asked at each use.
pub(crate) fn linker(engine: &wasmtime::Engine) -> Result<Linker<CallState>, wasmtime::Error> {
    let mut linker = Linker::new(engine);
    bindings::v0_1::pilothouse::plugin::log::add_to_linker::<_, HasSelf<log::LogContext>>(&mut linker, log)?;
    #[cfg(test)]
    bindings::v0_0::pilothouse::plugin::log::add_to_linker::<_, HasSelf<log::LogContext>>(&mut linker, log)?;
    bindings::v0_1::pilothouse::plugin::http::add_to_linker::<_, HasSelf<Outside>>(&mut linker, outside)?;
    bindings::v0_1::pilothouse::plugin::kube::add_to_linker::<_, HasSelf<Outside>>(&mut linker, outside)?;
    bindings::v0_1::pilothouse::plugin::sql::add_to_linker::<_, HasSelf<Outside>>(&mut linker, outside)?;
    wasi::add_to_linker(&mut linker)?;
    Ok(linker)
}

fn outside(state: &mut CallState) -> &mut Outside {
    &mut state.outside
}

fn log(state: &mut CallState) -> &mut log::LogContext {
    &mut state.log
}
