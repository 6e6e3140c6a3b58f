//! Where `build.sh` puts the servers.

use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
};

/// Folders of one build.
#[derive(Debug)]
pub(crate) struct Binaries {
    /// The servers and `kubectl`.
    pub(crate) bin: PathBuf,
    /// What the fake kubelet does to nodes and pods.
    pub(crate) stages: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the servers of the control plane are not built in {}: run `make control-plane`", .bin.display())]
    NotBuilt { bin: PathBuf },
    #[error("cannot ask {} where the servers are: {source}", .script.display())]
    Script { script: PathBuf, source: io::Error },
}

impl Binaries {
    /// The folders of the build that the checkout needs now.
    pub(crate) fn find() -> Result<Self, Error> {
        let bin = folder()?;
        let mut stages: Vec<PathBuf> = bin
            .with_file_name("kwok")
            .read_dir()
            .map_err(|_| Error::NotBuilt { bin: bin.clone() })?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        stages.sort();
        Ok(Self { bin, stages })
    }
}

/// The folder that all builds share, there or not.
pub(crate) fn cache() -> Result<PathBuf, Error> {
    Ok(folder()?.ancestors().nth(2).map(Path::to_owned).unwrap_or_default())
}

/// Asks the build script, which alone knows how the cache is laid out and keyed.
fn folder() -> Result<PathBuf, Error> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("build.sh");
    let failed = |source| Error::Script { script: script.clone(), source };
    let output = Command::new(&script).arg("--where").output().map_err(failed)?;
    if !output.status.success() {
        return Err(failed(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())));
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}
