//! Lines in the host's log, beside those of the host and marked with reconciler, parent and revision.
//!
//! ```
//! use pilothouse_sdk::log;
//!
//! let (name, replicas) = ("web", 3);
//! log::info!(replicas = replicas, "scaling {name}");
//! ```
//!
//! Names and values come first, then a message as of [`format!`]. Nothing is formatted when the host does not want the level.
//! Where there is no host (in tests) the lines go to stderr.

pub use crate::raw::log::Level;
pub use crate::{__debug as debug, __error as error, __info as info, __trace as trace, __warn as warn};

/// Whether a line of this level would be written; ask before you compute an expensive message.
pub fn enabled(level: Level) -> bool {
    #[cfg(target_family = "wasm")]
    return crate::raw::log::enabled(level);
    #[cfg(not(target_family = "wasm"))]
    return level >= Level::Debug;
}

/// Writes one line. `fields` are names and values beside the message; the host cuts messages at 4 KiB.
pub fn write(level: Level, message: &str, fields: &[(String, String)]) {
    #[cfg(target_family = "wasm")]
    crate::raw::log::write(level, message, fields);
    #[cfg(not(target_family = "wasm"))]
    {
        let fields: String = fields.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        eprintln!("{level:?}: {message}{fields}");
    }
}

/// Makes a panic say what and where in the log, before it traps. All that the host could tell otherwise is that it did.
pub(crate) fn panics() {
    #[cfg(target_family = "wasm")]
    std::panic::set_hook(Box::new(|panic| write(Level::Error, &panic.to_string(), &[])));
}

#[doc(hidden)]
#[macro_export]
macro_rules! __line {
    ($level:ident, $($name:ident = $value:expr,)* $message:literal $($rest:tt)*) => {
        if $crate::log::enabled($crate::log::Level::$level) {
            let fields = [$((stringify!($name).to_owned(), ($value).to_string())),*];
            $crate::log::write($crate::log::Level::$level, &format!($message $($rest)*), &fields);
        }
    };
}

/// Writes a line with the level `trace`.
#[doc(hidden)]
#[macro_export]
macro_rules! __trace {
    ($($line:tt)*) => { $crate::__line!(Trace, $($line)*) };
}

/// Writes a line with the level `debug`.
#[doc(hidden)]
#[macro_export]
macro_rules! __debug {
    ($($line:tt)*) => { $crate::__line!(Debug, $($line)*) };
}

/// Writes a line with the level `info`.
#[doc(hidden)]
#[macro_export]
macro_rules! __info {
    ($($line:tt)*) => { $crate::__line!(Info, $($line)*) };
}

/// Writes a line with the level `warn`.
#[doc(hidden)]
#[macro_export]
macro_rules! __warn {
    ($($line:tt)*) => { $crate::__line!(Warn, $($line)*) };
}

/// Writes a line with the level `error`.
#[doc(hidden)]
#[macro_export]
macro_rules! __error {
    ($($line:tt)*) => { $crate::__line!(Error, $($line)*) };
}
