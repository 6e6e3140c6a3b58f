//! `pilothouse push` and `pilothouse pull`: components into a registry, and out of it.

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;

use crate::{
    build, login, output,
    plugin::{Format, Surface},
    registry::{self, Digest, MAX_COMPONENT, Pulled, Reference, Registries},
};

/// What to push.
#[derive(Clone, Debug, clap::Args)]
pub struct PushOptions {
    /// The component.
    file: PathBuf,
    /// Where it goes, as registry.example.com/team/plugin:1.0.
    reference: Reference,
    /// How the result is shown.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
    #[command(flatten)]
    registry: registry::Options,
}

/// What to pull.
#[derive(Clone, Debug, clap::Args)]
pub struct PullOptions {
    /// Where it is, as registry.example.com/team/plugin:1.0, or with @sha256:… behind it.
    reference: Reference,
    /// Where the component goes; by default into this folder, under the last part of the repository's name.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    registry: registry::Options,
}

/// The document of `pilothouse push -o json`. Its keys are there to stay.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Pushed {
    /// Where it is now, with its digest: what `spec.plugin.image` takes.
    reference: String,
    /// The digest of its manifest.
    digest: Digest,
    /// The digest of the component itself.
    component: Digest,
    /// The size of the component in bytes.
    size: usize,
}

/// Pushes a component, and prints its reference with the digest.
///
/// # Errors
/// If it is no component, or the registry does not take it.
pub async fn push(options: &PushOptions) -> anyhow::Result<()> {
    let (file, reference) = (options.file.display(), &options.reference);
    let bytes = std::fs::read(&options.file).with_context(|| format!("failed to read {file}"))?;
    ensure!(
        Surface::of(&bytes).format == Format::Component,
        "{file} is no WebAssembly component: build one by `pilothouse build`"
    );
    ensure!(bytes.len() as u64 <= MAX_COMPONENT, "{file} has more than {MAX_COMPONENT} bytes");
    if reference.digest().is_some() {
        bail!("push {file} to a tag: its digest comes of what is pushed");
    }
    let credentials = login::credentials(reference.repository())?;
    let (component, size) = (Digest::of(&bytes), bytes.len());
    let digest = registries(&options.registry)?.push(reference, bytes, &credentials).await?;
    let pushed = Pushed { reference: reference.pinned(digest.clone()).to_string(), digest, component, size };
    match options.output {
        output::Format::Text => writeln!(anstream::stdout().lock(), "{}", pushed.reference)?,
        output::Format::Json => output::json(&pushed)?,
    }
    Ok(())
}

/// Pulls a component into a file, and prints its reference with the digest.
///
/// # Errors
/// If it does not come, or the file cannot be written.
pub async fn pull(options: &PullOptions) -> anyhow::Result<()> {
    let name = || {
        let last = options.reference.repository().name.rsplit('/').next().unwrap_or_default();
        PathBuf::from(format!("{last}.wasm"))
    };
    let file = options.output.clone().unwrap_or_else(name);
    let Pulled { bytes, digest, .. } = fetch(&options.reference, &options.registry).await?;
    build::write(&file, &bytes).with_context(|| format!("failed to write {}", file.display()))?;
    writeln!(anstream::stderr().lock(), "{}  {} KB", file.display(), bytes.len().div_ceil(1000))?;
    writeln!(anstream::stdout().lock(), "{}", options.reference.pinned(digest))?;
    Ok(())
}

/// The component of a reference, with the credentials of the person at the terminal.
///
/// # Errors
/// If it does not come.
pub async fn fetch(reference: &Reference, options: &registry::Options) -> anyhow::Result<Pulled> {
    let credentials = login::credentials(reference.repository())?;
    let registries = registries(options)?;
    let digest = registries.resolve(reference, &credentials).await?;
    Ok(registries.pull(reference.repository(), &digest, &credentials).await?)
}

/// Those of the options, which tell how it goes where somebody looks.
fn registries(options: &registry::Options) -> anyhow::Result<Registries> {
    let registries = Registries::new(options)?;
    if !io::stderr().is_terminal() {
        return Ok(registries);
    }
    Ok(registries.telling(Arc::new(|done: u64, all: u64| {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        // The line is taken back when all is there.
        let (line, end) =
            (format!("  {:.1} of {:.1} MB", megabytes(done), megabytes(all)), if done < all { "" } else { "\r\x1b[K" });
        // Nobody is harmed by progress that is not seen.
        let _ = write!(io::stderr().lock(), "\r\x1b[K{line}{end}");
    })))
}
