//! A real Kubernetes control plane for tests: etcd, API server, controller manager, scheduler and a fake node.
//!
//! ```no_run
//! let control_plane = control_plane::ControlPlane::start()?;
//! let nodes = control_plane.kubectl().args(["get", "nodes"]).output();
//! # Ok::<(), control_plane::Error>(())
//! ```
//!
//! [`ControlPlane::start`] runs the binary `control-plane run` of this package and talks with it over its stdin and
//! stdout. When the value is dropped, or the test dies in any way, the servers end and their data folder is removed.
//!
//! * Pods become Ready within a second of being scheduled, and those of a Job complete: no container runs.
//! * Everybody in `admin.kubeconfig` is `system:masters`, for set-up. A test of permissions makes a ServiceAccount and
//!   asks for a token (`kubectl create token NAME`): the ServiceAccount admission plugin is off and pods mount none.
//! * The audit log has one JSON line for every answered request and two for a watch (when it starts and when it ends),
//!   with `user`, `userAgent`, `verb`, `objectRef`, `responseStatus`, and the `requestObject` of writes. The servers use
//!   the API too, under names of their own (`system:kube-scheduler`, `kwok`, …).
//! * Some things take their time, as in any cluster. A namespace goes five seconds after its last content. The garbage
//!   collector learns of a new kind up to 30 seconds after its CRD was created: a test that cannot wait calls
//!   [`ControlPlane::stop_controller_manager`] and [`ControlPlane::start_controller_manager`] after creating it.

use std::{
    env,
    ffi::OsStr,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

/// Names the `control-plane` binary when it is not in the same target folder as the program that uses this library.
pub const BINARY_VARIABLE: &str = "PILOTHOUSE_CONTROL_PLANE";

/// Where a control plane is: the line that `control-plane run` prints once everything is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Location {
    /// Kubeconfig file of an administrator.
    pub kubeconfig: PathBuf,
    /// The API server's audit log, one JSON event a line.
    pub audit_log: PathBuf,
    /// Everything the servers write, their logs included; removed when they stop.
    pub data_dir: PathBuf,
    /// URL of the API server.
    pub server: String,
    /// PEM file of the authority that signed the API server's certificate.
    pub certificate_authority: PathBuf,
    /// Folder of the servers' binaries and of `kubectl`.
    pub bin_dir: PathBuf,
    /// Process id of the supervisor.
    pub pid: u32,
}

/// The supervisor's answer to a command, one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// Done.
    Ok(bool),
    /// Not done, and why.
    Error(String),
}

/// Why a control plane could not be started or told something.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The `control-plane` binary was not found beside the caller.
    #[error(
        "there is no control-plane binary at {}: run `cargo build -p control-plane`, or name it in {BINARY_VARIABLE}",
        .path.display()
    )]
    NoBinary {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The supervisor process could not be started or reached.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The supervisor ended or wrote something that is not an answer.
    #[error("the supervisor of the control plane has ended or is broken: it said {said:?}")]
    NoAnswer {
        /// The line it wrote; empty when it has ended.
        said: String,
    },
    /// The supervisor could not do it: the servers are not built, one of them ended, one is not ready in time.
    #[error("{0}")]
    Failed(String),
}

/// A running control plane, stopped and removed when dropped.
#[derive(Debug)]
pub struct ControlPlane {
    location: Location,
    supervisor: Mutex<Supervisor>,
}

#[derive(Debug)]
struct Supervisor {
    process: Child,
    /// Closing it ends the supervisor.
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl ControlPlane {
    /// Starts a control plane of its own and waits until it is ready. Any number can run at once.
    ///
    /// # Errors
    ///
    /// When the supervisor or the servers are not built (the message names the command that builds them) or a server
    /// does not start (the message has the end of its log, and its data folder is kept).
    pub fn start() -> Result<Self, Error> {
        Self::start_with(&[])
    }

    /// The same, with these flags of the API server besides its usual ones.
    ///
    /// # Errors
    ///
    /// As [`Self::start`].
    pub fn start_with(api_server_flags: &[&str]) -> Result<Self, Error> {
        let mut supervisor = Supervisor::spawn(&binary()?, api_server_flags)?;
        match supervisor.read() {
            Ok(location) => Ok(Self { location, supervisor: Mutex::new(supervisor) }),
            Err(error) => {
                supervisor.end();
                Err(error)
            }
        }
    }

    /// Kubeconfig file of an administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.location.kubeconfig
    }

    /// The API server's audit log, one JSON event a line.
    #[must_use]
    pub fn audit_log(&self) -> &Path {
        &self.location.audit_log
    }

    /// The folder of everything the servers write, their logs included.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.location.data_dir
    }

    /// URL of the API server. It stays the same when the API server is stopped and started.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.location.server
    }

    /// PEM file of the authority that signed the API server's certificate.
    #[must_use]
    pub fn certificate_authority(&self) -> &Path {
        &self.location.certificate_authority
    }

    /// Folder of the servers' binaries and of a `kubectl` of the same version.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        &self.location.bin_dir
    }

    /// A `kubectl` that talks to this control plane as its administrator.
    #[must_use]
    pub fn kubectl(&self) -> Command {
        let mut kubectl = Command::new(self.bin_dir().join("kubectl"));
        kubectl
            .env("KUBECONFIG", self.kubeconfig())
            // What kubectl remembers of an address would outlive the cluster that was there.
            .env("KUBECACHEDIR", self.data_dir().join("kubectl"));
        kubectl
    }

    /// Kills the API server hard. Nobody else gets its port.
    ///
    /// # Errors
    ///
    /// When the supervisor does not answer.
    pub fn stop_api_server(&self) -> Result<(), Error> {
        self.tell("stop-api-server")
    }

    /// Starts the API server on the same port and data, and waits until it is ready. The controller manager, the
    /// scheduler and the fake node are started anew if they run, for they might find it again only after a minute.
    ///
    /// # Errors
    ///
    /// When it does not become ready.
    pub fn start_api_server(&self) -> Result<(), Error> {
        self.tell("start-api-server")
    }

    /// Kills the controller manager: no garbage collection, no Deployments, no namespace deletion until it is started.
    ///
    /// # Errors
    ///
    /// When the supervisor does not answer.
    pub fn stop_controller_manager(&self) -> Result<(), Error> {
        self.tell("stop-controller-manager")
    }

    /// Starts the controller manager. It works within a few seconds.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start_controller_manager(&self) -> Result<(), Error> {
        self.tell("start-controller-manager")
    }

    fn tell(&self, command: &str) -> Result<(), Error> {
        let mut supervisor = self.supervisor.lock().unwrap_or_else(PoisonError::into_inner);
        supervisor.write(command)?;
        match supervisor.read()? {
            Answer::Ok(_) => Ok(()),
            Answer::Error(message) => Err(Error::Failed(message)),
        }
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.supervisor.get_mut().unwrap_or_else(PoisonError::into_inner).end();
    }
}

impl Supervisor {
    fn spawn(binary: &Path, api_server_flags: &[&str]) -> Result<Self, Error> {
        let broken = |source| Error::Io { doing: "start the control plane's supervisor", source };
        let mut command = Command::new(binary);
        command.arg("run");
        if !api_server_flags.is_empty() {
            command.arg("--").args(api_server_flags);
        }
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(broken)?;
        let commands = process.stdin.take();
        let answers = process.stdout.take().ok_or_else(|| broken(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Self { process, commands, answers: BufReader::new(answers) })
    }

    fn write(&mut self, command: &str) -> Result<(), Error> {
        let broken = |source| Error::Io { doing: "tell the control plane's supervisor", source };
        let commands = self.commands.as_mut().ok_or_else(|| broken(io::ErrorKind::BrokenPipe.into()))?;
        writeln!(commands, "{command}").map_err(broken)
    }

    fn read<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, Error> {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .map_err(|source| Error::Io { doing: "hear the control plane's supervisor", source })?;
        parse(&line)
    }

    fn end(&mut self) {
        drop(self.commands.take());
        // It ends by itself at the end of its stdin; an error here would mean that it was waited for already.
        drop(self.process.wait());
    }
}

/// Reads a line of the supervisor: what is expected, or the error that came instead.
///
/// # Errors
///
/// [`Error::Failed`] when the supervisor reports an error, [`Error::NoAnswer`] when the line is neither.
pub fn parse<T: serde::de::DeserializeOwned>(line: &str) -> Result<T, Error> {
    serde_json::from_str(line).map_err(|_| match serde_json::from_str(line) {
        Ok(Answer::Error(message)) => Error::Failed(message),
        _ => Error::NoAnswer { said: line.trim_end().to_owned() },
    })
}

/// The binary of this package that Cargo built beside the running program; a test is one folder further down, in `deps`.
fn binary() -> Result<PathBuf, Error> {
    if let Some(path) = env::var_os(BINARY_VARIABLE) {
        let path = PathBuf::from(path);
        return if path.is_file() { Ok(path) } else { Err(Error::NoBinary { path }) };
    }
    let me = env::current_exe().map_err(|source| Error::Io { doing: "find the running program", source })?;
    let mut dir = me.parent().unwrap_or(Path::new("."));
    if dir.file_name().is_some_and(|name| name == "deps" || name == "examples") {
        dir = dir.parent().unwrap_or(dir);
    }
    let path = dir.join(OsStr::new("control-plane")).with_extension(env::consts::EXE_EXTENSION);
    if path.is_file() { Ok(path) } else { Err(Error::NoBinary { path }) }
}

#[cfg(test)]
mod tests {
    use super::{Answer, Error, parse};

    #[test]
    fn a_line_is_what_was_asked_for_or_the_error_that_came_instead() {
        assert_eq!(parse::<Answer>("{\"ok\":true}\n").unwrap(), Answer::Ok(true));
        assert!(matches!(parse::<bool>(r#"{"error":"why"}"#), Err(Error::Failed(why)) if why == "why"));
        assert!(matches!(parse::<bool>(""), Err(Error::NoAnswer { said }) if said.is_empty()));
    }
}
