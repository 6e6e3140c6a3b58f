//! The credentials of the person at the terminal: what `docker login`, and every tool that does as docker does, has left in
//! `config.json`, and the programs that keep passwords for it.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    path::PathBuf,
    process::{Command, Stdio},
};

use serde::Deserialize;

use crate::registry::{Credentials, Repository, credentials};

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not what docker writes.
    #[error("failed to understand {}", path.display())]
    Config {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: credentials::Error,
    },
    /// The program that keeps the password cannot be asked.
    #[error("failed to run {program}, which keeps the passwords of registries by {}", path.display())]
    Program {
        /// Which one.
        program: String,
        /// The file that says so.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What it says is no login.
    #[error("{program} answers for {registry} with something that is no name and password")]
    Answer {
        /// Which one.
        program: String,
        /// For what it was asked.
        registry: String,
    },
}

/// What `config.json` says of programs that keep passwords.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keepers {
    creds_store: String,
    cred_helpers: BTreeMap<String, String>,
}

/// What such a program answers.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// The credentials for a repository. None, if nobody has ever logged in.
///
/// # Errors
/// If there are some, and they cannot be read.
pub fn credentials(repository: &Repository) -> Result<Credentials, Error> {
    let mut credentials = Credentials::default();
    let Some(path) = config_file() else { return Ok(credentials) };
    let config = match std::fs::read_to_string(&path) {
        Ok(config) => config,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(credentials),
        Err(source) => return Err(Error::Read { path, source }),
    };
    credentials.add(&config).map_err(|source| Error::Config { path: path.clone(), source })?;
    let keepers = serde_json::from_str::<Keepers>(&config).unwrap_or_default();
    // Docker Hub is written down by its oldest name.
    let registry = match repository.registry.as_str() {
        "docker.io" => "https://index.docker.io/v1/",
        registry => registry,
    };
    let keeper = keepers.cred_helpers.get(registry).unwrap_or(&keepers.creds_store);
    if !keeper.is_empty() {
        let program = format!("docker-credential-{keeper}");
        let failed = |source| Error::Program { program: program.clone(), path: path.clone(), source };
        if let Some(answer) = ask(&program, registry).map_err(failed)? {
            let answer = serde_json::from_slice::<Answer>(&answer).ok();
            // Some keep a token for another protocol in place of a password.
            let answer = answer.filter(|answer| answer.username != "<token>");
            let Answer { username, secret } =
                answer.ok_or_else(|| Error::Answer { program: program.clone(), registry: registry.to_owned() })?;
            credentials.add_login(registry, credentials::Login { username, password: secret });
        }
    }
    Ok(credentials)
}

fn config_file() -> Option<PathBuf> {
    let folder = std::env::var_os("DOCKER_CONFIG").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let folder = folder.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker")))?;
    Some(folder.join("config.json"))
}

/// Nothing, if it knows of no such registry: it ends with an error then.
fn ask(program: &str, registry: &str) -> io::Result<Option<Vec<u8>>> {
    let mut command = Command::new(program);
    let mut child = command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(registry.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    Ok(output.status.success().then_some(output.stdout))
}
