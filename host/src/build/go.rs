//! A plugin in Go, by Go's own toolchain: a program of WASI's first preview, which an adapter lifts to the second. What it exports
//! says which parts of the contract it has, and which world it is therefore built for.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use wasi_preview1_component_adapter_provider as adapter;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

use super::{Error, start_error};
use crate::plugin::Surface;

/// The newest contract, as one text.
const CONTRACT: &str = concat!(
    include_str!("../../../wit/0.1.0/types.wit"),
    include_str!("../../../wit/0.1.0/exports.wit"),
    include_str!("../../../wit/0.1.0/log.wit"),
    include_str!("../../../wit/0.1.0/worlds.wit"),
);
/// The worlds that are one part of the contract each, with what the part is called. That of all plugins is not listed.
const PARTS: [(&str, &str); 2] = [("finalizer", "finalizing"), ("relations", "relating")];

/// Compiles the Go module in a folder, to a core module.
pub(super) fn compile(dir: &Path) -> Result<Vec<u8>, Error> {
    // Go writes nowhere but to a file.
    let module = std::env::temp_dir().join(format!("pilothouse-build-{}.wasm", std::process::id()));
    let mut go = Command::new("go");
    go.args(["build", "-buildmode=c-shared", "-trimpath", "-ldflags=-s -w", "-o"]).arg(&module).arg(".");
    // Its messages go to stderr, as the compiler's do everywhere.
    go.env("GOOS", "wasip1").env("GOARCH", "wasm").current_dir(dir).stdout(Stdio::null());
    let status = go.status().map_err(|source| start_error(&go, source))?;
    if !status.success() {
        return Err(Error::Compile);
    }
    let bytes = std::fs::read(&module).map_err(|source| Error::File { path: module.clone(), source });
    // Best effort: it is in the folder for what may be lost.
    let _ = std::fs::remove_file(&module);
    bytes
}

/// The component of what [`compile`] gave.
pub(super) fn component(mut module: Vec<u8>) -> anyhow::Result<Vec<u8>> {
    let exports = Surface::of(&module).exports;
    let has = |part: &str| exports.iter().any(|export| export.starts_with(&format!("pilothouse:plugin/{part}@")));
    let worlds = PARTS.iter().filter(|(part, _)| has(part)).map(|(_, world)| format!("include {world};"));
    let world = format!("world built {{ include plugin; {} }}", worlds.collect::<String>());
    let mut resolve = Resolve::default();
    let package = resolve.push_str("contract.wit", &format!("{CONTRACT}\n{world}"))?;
    let world = resolve.select_world(&[package], Some("built"))?;
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false)?;
    ComponentEncoder::default()
        .validate(true)
        .module(&module)?
        .adapter(adapter::WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, adapter::WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER)?
        .encode()
}
