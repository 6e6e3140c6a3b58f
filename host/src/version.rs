//! `pilothouse version`: what this host is, and what it serves.

use std::io::Write as _;

use serde::Serialize;

use crate::{output, plugin};

/// How to show it.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// How it is shown.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
}

/// The document of `pilothouse version -o json`. Its keys are there to stay.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    /// The version of the host.
    version: &'static str,
    /// The versions of the contract `pilothouse:plugin` that it serves.
    contracts: Vec<&'static str>,
    /// What runs the plugins.
    engine: Engine,
}

/// A WebAssembly engine.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Engine {
    /// Its name.
    name: &'static str,
    /// Its version.
    version: &'static str,
}

/// Shows the versions.
///
/// # Errors
/// If standard output cannot be written.
pub fn version(options: &Options) -> anyhow::Result<()> {
    let engine = Engine { name: "wasmtime", version: plugin::engine::VERSION };
    let version = Version { version: env!("CARGO_PKG_VERSION"), contracts: plugin::contracts(), engine };
    match options.output {
        output::Format::Json => output::json(&version)?,
        output::Format::Text => {
            let rows = [
                ["pilothouse".to_owned(), version.version.to_owned()],
                ["contract".to_owned(), format!("pilothouse:plugin@{}", version.contracts.join(", "))],
                ["engine".to_owned(), format!("{} {}", version.engine.name, version.engine.version)],
            ];
            let mut stdout = std::io::stdout().lock();
            output::columns(&rows).iter().try_for_each(|line| writeln!(stdout, "{line}"))?;
        }
    }
    Ok(())
}
