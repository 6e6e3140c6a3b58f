//! `up` and `down`: one control plane in the background for a person at a shell.

use std::{
    env,
    fs::{self, File, TryLockError},
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use control_plane::Location;
use rustix::process::{Pid, Signal, kill_process};

use crate::binaries;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Binaries(#[from] binaries::Error),
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("the control plane did not start: {source}\nmore may be in {}", .log.display())]
    Start { source: control_plane::Error, log: PathBuf },
}

fn io<'a>(doing: &'static str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |source| Error::Io { doing, path: path.to_owned(), source }
}

/// The files by which `up`, `down` and the supervisor find each other.
struct Background {
    /// The supervisor's: locked while it lives, and says where it is.
    state: PathBuf,
    log: PathBuf,
    /// Lets one `up` or `down` work at a time.
    _turn: File,
}

/// Starts a control plane unless one is up, and returns the shell commands that point to it.
pub(crate) fn up() -> Result<String, Error> {
    let background = Background::open(&binaries::cache()?)?;
    let location = match background.find()? {
        Some(location) => location,
        None => background.start()?,
    };
    let export = |name: &str, value: &Path| format!("export {name}={}\n", quote(value));
    Ok([
        export("KUBECONFIG", &location.kubeconfig),
        export("PILOTHOUSE_AUDIT_LOG", &location.audit_log),
        // What kubectl remembers of an address would outlive the cluster that was there.
        export("KUBECACHEDIR", &location.data_dir.join("kubectl")),
        format!("export PATH={}:\"$PATH\"\n", quote(&location.bin_dir)),
    ]
    .concat())
}

/// Stops the control plane that `up` started, if there is one, and waits until all of it is gone.
pub(crate) fn down() -> Result<(), Error> {
    let background = Background::open(&binaries::cache()?)?;
    let running = background.find()?;
    if let Some(pid) = running.and_then(|location| Pid::from_raw(location.pid.cast_signed())) {
        // It may have ended since: then the lock is free.
        kill_process(pid, Signal::TERM).ok();
        let state = File::open(&background.state).map_err(io("open", &background.state))?;
        state.lock().map_err(io("wait for the end of the process that holds", &background.state))?;
    }
    background.clear()
}

impl Background {
    fn open(cache: &Path) -> Result<Self, Error> {
        fs::create_dir_all(cache).map_err(io("create", cache))?;
        let turn = cache.join("up.lock");
        let file = File::create(&turn).map_err(io("create", &turn))?;
        file.lock().map_err(io("lock", &turn))?;
        Ok(Self { state: cache.join("up.json"), log: cache.join("up.log"), _turn: file })
    }

    /// Where the control plane is that is up. One that is still starting is waited for.
    fn find(&self) -> Result<Option<Location>, Error> {
        loop {
            let file = match File::open(&self.state) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(io("open", &self.state)(error)),
            };
            match file.try_lock() {
                Ok(()) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(io("lock", &self.state)(error)),
                Err(TryLockError::WouldBlock) => {}
            }
            if let Some(location) = self.read() {
                return Ok(Some(location));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn read(&self) -> Option<Location> {
        serde_json::from_str(&fs::read_to_string(&self.state).ok()?).ok()
    }

    fn start(&self) -> Result<Location, Error> {
        self.clear()?;
        let me = env::current_exe().map_err(io("find the running program beside", &self.state))?;
        let log = File::create(&self.log).map_err(io("create", &self.log))?;
        let mut supervisor = Command::new(&me)
            .arg("run")
            .arg("--background")
            .arg(&self.state)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(io("run", &me))?;
        let mut line = String::new();
        if let Some(out) = supervisor.stdout.take() {
            BufReader::new(out).read_line(&mut line).map_err(io("hear", &me))?;
        }
        control_plane::parse(&line).map_err(|source| Error::Start { source, log: self.log.clone() })
    }

    /// Removes what a supervisor left that was killed hard, or the state of one that ended.
    fn clear(&self) -> Result<(), Error> {
        if let Some(location) = self.read() {
            remove(&location.data_dir, |path| fs::remove_dir_all(path))?;
        }
        remove(&self.state, |path| fs::remove_file(path))
    }
}

fn remove(path: &Path, how: impl Fn(&Path) -> io::Result<()>) -> Result<(), Error> {
    match how(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// One word for a POSIX shell.
fn quote(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::quote;

    #[test]
    fn a_quoted_path_is_one_word() {
        assert_eq!(quote(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
