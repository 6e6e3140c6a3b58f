//! A plugin in Go, by Go's own toolchain: a program of WASI's first preview, which an adapter lifts to the second. What it exports and
//! imports says which parts of the contract it has, and which world it is therefore built for.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use wasi_preview1_component_adapter_provider as adapter;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

use super::Error;
use crate::plugin::Surface;

/// The newest contract, as one text.
const CONTRACT: &str = concat!(
    include_str!("../../../wit/0.1.0/types.wit"),
    include_str!("../../../wit/0.1.0/exports.wit"),
    include_str!("../../../wit/0.1.0/log.wit"),
    include_str!("../../../wit/0.1.0/kube.wit"),
    include_str!("../../../wit/0.1.0/sql.wit"),
    include_str!("../../../wit/0.1.0/http.wit"),
    include_str!("../../../wit/0.1.0/worlds.wit"),
);
/// The worlds that are one part of the contract each, with what the part is called. That of all plugins is not listed.
const PARTS: [(&str, &str); 5] = [
    ("finalizer", "finalizing"),
    ("relations", "relating"),
    ("kube", "with-kube"),
    ("sql", "with-sql"),
    ("http", "with-http"),
];

/// The module in a folder.
pub(crate) struct Module {
    pub(super) dir: PathBuf,
    /// Go writes nowhere but to a file.
    built: PathBuf,
}

impl Module {
    pub(super) fn of(dir: &Path) -> Self {
        let built = std::env::temp_dir().join(format!("pilothouse-build-{}.wasm", std::process::id()));
        Self { dir: dir.to_owned(), built }
    }

    /// Go, to compile to a core module. Its messages go to stderr, as the compiler's do everywhere.
    pub(super) fn compiler(&self) -> Command {
        let mut go = Command::new("go");
        go.args(["build", "-buildmode=c-shared", "-trimpath", "-ldflags=-s -w", "-o"]).arg(&self.built).arg(".");
        go.env("GOOS", "wasip1").env("GOARCH", "wasm").current_dir(&self.dir);
        go
    }

    /// The core module that it has made.
    pub(super) fn take(&self) -> Result<Vec<u8>, Error> {
        let bytes = std::fs::read(&self.built).map_err(|source| Error::File { path: self.built.clone(), source });
        // Best effort: it is in the folder for what may be lost.
        let _ = std::fs::remove_file(&self.built);
        bytes
    }
}

/// The component of what [`Module::take`] gave.
pub(super) fn component(mut module: Vec<u8>) -> anyhow::Result<Vec<u8>> {
    let Surface { exports, imports, .. } = Surface::of(&module);
    let names = || exports.iter().chain(&imports);
    let has = |part: &str| names().any(|name| name.starts_with(&format!("pilothouse:plugin/{part}@")));
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
