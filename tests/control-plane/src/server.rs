//! One server process: it logs to a file, and it dies when its supervisor dies in whatever way.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

/// How much of a log an error shows.
const TAIL: usize = 15;

#[derive(Debug)]
pub(crate) struct Server {
    name: &'static str,
    program: PathBuf,
    arguments: Vec<OsString>,
    home: PathBuf,
    log: PathBuf,
    process: Option<Child>,
}

/// A server that ended by itself.
#[derive(Debug, thiserror::Error)]
#[error("{name} ended ({status}); the end of {}:\n{}", .log.display(), tail(.log))]
pub(crate) struct Ended {
    name: &'static str,
    status: ExitStatus,
    log: PathBuf,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot start {}: {source}", .program.display())]
pub(crate) struct NotStarted {
    program: PathBuf,
    source: io::Error,
}

impl Server {
    /// A server that is not running yet. It writes only below `data`.
    pub(crate) fn new(name: &'static str, bin: &Path, data: &Path, arguments: Vec<OsString>) -> Self {
        Self {
            name,
            program: bin.join(name),
            arguments,
            home: data.to_owned(),
            log: data.join(format!("{name}.log")),
            process: None,
        }
    }

    /// Starts it unless it runs. The caller must be the main thread: see [`die_with_parent`].
    pub(crate) fn start(&mut self) -> Result<(), NotStarted> {
        if self.process.is_none() {
            let failed = |source| NotStarted { program: self.program.clone(), source };
            self.process = Some(self.spawn().map_err(failed)?);
        }
        Ok(())
    }

    fn spawn(&self) -> io::Result<Child> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        command(&self.program, &self.home)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// Kills it hard and waits until it is gone.
    pub(crate) fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // Both fail only for a process that was waited for already.
            drop(process.kill());
            drop(process.wait());
        }
    }

    /// Finds out whether it has ended by itself; tells so once.
    pub(crate) fn check(&mut self) -> Result<(), Ended> {
        let Some(Ok(Some(status))) = self.process.as_mut().map(Child::try_wait) else { return Ok(()) };
        self.process = None;
        Err(Ended { name: self.name, status, log: self.log.clone() })
    }

    /// The last lines of its log.
    pub(crate) fn log_tail(&self) -> String {
        format!("the end of {}:\n{}", self.log.display(), tail(&self.log))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A command that depends on nothing in the environment and dies with this process.
pub(crate) fn command(program: &Path, home: &Path) -> Command {
    let mut command = Command::new(program);
    // A process group of its own: Ctrl-C in a terminal reaches the supervisor alone, which then ends the servers.
    command.env_clear().env("HOME", home).env("TMPDIR", home).current_dir(home).process_group(0);
    die_with_parent(&mut command);
    command
}

/// Has the kernel kill the process when the **thread** that spawns it ends, so only the main thread may spawn.
fn die_with_parent(command: &mut Command) {
    use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

    let parent: Option<Pid> = Some(getpid());
    #[expect(
        unsafe_code,
        reason = "pre_exec; the closure only makes system calls, which is all that is allowed after a fork"
    )]
    // SAFETY: the closure runs between fork and exec: it allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above.
            if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
        });
    }
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].iter().map(|line| format!("  {line}\n")).collect()
}
