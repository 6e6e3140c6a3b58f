//! A real registry of OCI artifacts for tests: the CNCF's distribution, on a port of its own, with TLS and a password if it should.
//!
//! ```no_run
//! let registry = distribution::Registry::start(distribution::Options { tls: true, ..Default::default() })?;
//! println!("{}/team/plugin:1.0, by {:?}", registry.host(), registry.authority());
//! # Ok::<(), distribution::Error>(())
//! ```
//!
//! It ends with the value, or when the test dies in any way, and what it has stored goes with it.

mod certificates;

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

/// Who may come in where a password is asked for.
pub const USER: &str = "tester";

/// How a registry is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether it speaks TLS, under a certificate of an authority of its own.
    pub tls: bool,
    /// The password that [`USER`] has; without one everybody may do everything.
    pub password: Option<Password>,
}

/// One of two, so that it can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Password {
    /// `first`
    First,
    /// `second`
    Second,
}

/// Why there is no registry.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was not built.
    #[error("the registry is not built in {}: run `make registry`", .0.display())]
    NotBuilt(PathBuf),
    /// It does not start.
    #[error("the registry has ended before it listened; it said:\n{0}")]
    Ended(String),
    /// A file or a process cannot be had.
    #[error("cannot set up a registry")]
    Io(#[from] io::Error),
    /// No certificate can be made.
    #[error("cannot make the certificate of a registry")]
    Certificate(#[from] rcgen::Error),
}

/// A registry, stopped and removed when dropped.
#[derive(Debug)]
pub struct Registry {
    folder: TempDir,
    program: PathBuf,
    options: Options,
    port: u16,
    process: Option<Child>,
}

impl Registry {
    /// Starts one, and waits until it listens. Any number can run at once.
    ///
    /// # Errors
    /// If it was not built, or does not start.
    pub fn start(options: Options) -> Result<Self, Error> {
        let program = folder()?.join("registry");
        if !program.is_file() {
            return Err(Error::NotBuilt(program));
        }
        let folder = TempDir::with_prefix("registry-")?;
        if options.tls {
            certificates::write(folder.path())?;
        }
        let mut registry = Self { folder, program, options, port: 0, process: None };
        if let Some(password) = options.password {
            registry.set_password(password)?;
        }
        registry.start_again()?;
        Ok(registry)
    }

    /// Its host and port, as in a reference.
    #[must_use]
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The certificate of the authority that its own is from, if it speaks TLS.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join(certificates::AUTHORITY)
    }

    /// Changes the password of [`USER`]. It holds at once.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn set_password(&mut self, password: Password) -> Result<(), Error> {
        // One that is replaced is seen as another by its time; so is one within the same second, since it counts finer.
        fs::write(self.folder.path().join("htpasswd"), format!("{USER}:{}\n", password.hash()))?;
        Ok(())
    }

    /// The file of a blob or a manifest, by its digest (`sha256:…`): for tests that damage it.
    #[must_use]
    pub fn file_of(&self, digest: &str) -> PathBuf {
        let hex = digest.trim_start_matches("sha256:");
        let blobs = self.folder.path().join("data/docker/registry/v2/blobs/sha256");
        blobs.join(hex.get(..2).unwrap_or_default()).join(hex).join("data")
    }

    /// The requests that it has answered, a line each, as `GET /v2/team/plugin/manifests/1.0 200`. It notes one a moment after it has
    /// answered.
    ///
    /// # Errors
    /// If its log cannot be read.
    pub fn requests(&self) -> Result<Vec<String>, Error> {
        let log = fs::read_to_string(self.folder.path().join("access.log"))?;
        // The common log format: the request is in quotes, and the status behind it.
        let request = |line: &str| {
            let (_, rest) = line.split_once('"')?;
            let (request, rest) = rest.split_once('"')?;
            let (status, _) = rest.trim_start().split_once(' ')?;
            Some(format!("{} {status}", request.strip_suffix(" HTTP/1.1").unwrap_or(request)))
        };
        Ok(log.lines().filter_map(request).collect())
    }

    /// Ends it; what it has stored stays.
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            drop(process.stdin.take());
            // It fails only for a process that was waited for already.
            drop(process.wait());
        }
    }

    /// Starts it again after [`Self::stop`], at the same address.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_again(&mut self) -> Result<(), Error> {
        let config = self.folder.path().join("config.yaml");
        fs::write(&config, self.config())?;
        let log = File::options().create(true).append(true).open(self.folder.path().join("access.log"))?;
        // A shell between us that ends it when we are gone: then nobody holds the other end of its input.
        let shell =
            r#"exec 3<&0; "$0" serve "$1" </dev/null 3<&- & cat <&3 >/dev/null 2>&1; kill $! 2>/dev/null; wait $!"#;
        let mut process = Command::new("sh")
            .args(["-c", shell])
            .args([&self.program, &config])
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .current_dir(self.folder.path())
            .stdin(Stdio::piped())
            .stdout(log)
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = process.stderr.take();
        self.process = Some(process);
        let mut said = String::new();
        let mut lines = BufReader::new(stderr.ok_or_else(|| io::Error::other("no pipe"))?).lines();
        for line in lines.by_ref() {
            let line = line?;
            if let Some(port) = listens_on(&line) {
                self.port = port;
                // Somebody has to read on, or it would wait for that.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(());
            }
            said += &format!("{line}\n");
            if line.contains("level=fatal") {
                break;
            }
        }
        self.stop();
        Err(Error::Ended(said))
    }

    /// JSON would do, too; it reads YAML.
    fn config(&self) -> String {
        let folder = self.folder.path().display();
        let mut config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n\
             http:\n  addr: 127.0.0.1:{}\n  secret: none\n",
            self.port
        );
        if self.options.tls {
            let file = |name: &str| format!("{folder}/{name}");
            let (certificate, key) = (file(certificates::CERTIFICATE), file(certificates::KEY));
            config += &format!("  tls: {{certificate: {certificate}, key: {key}}}\n");
        }
        if self.options.password.is_some() {
            config += &format!("auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}\n");
        }
        config
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Password {
    /// As [`USER`] types it.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Second => "second",
        }
    }

    /// By bcrypt, at its lowest cost.
    fn hash(self) -> &'static str {
        match self {
            Self::First => "$2a$04$OLLDz8E9fWie/j4/jjaOAeSjk7Vf9QgCJle2Ux/suD6.f13202EW.",
            Self::Second => "$2a$04$aS0.t4uziN.2kp80j84izOXE1UX6lSLBbWDpWweFmpV8Aw81LTDy.",
        }
    }
}

/// The port in `msg="listening on 127.0.0.1:41234, tls"`.
fn listens_on(line: &str) -> Option<u16> {
    let (_, rest) = line.split_once("listening on 127.0.0.1:")?;
    rest.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
}

/// Asks the build script, which alone knows where it builds to.
fn folder() -> Result<PathBuf, Error> {
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("build.sh")).arg("--where").output()?;
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_read_from_what_it_logs() {
        assert_eq!(listens_on(r#"level=info msg="listening on 127.0.0.1:41234, tls" go.version=go1.26"#), Some(41234));
        assert_eq!(listens_on(r#"level=info msg="listening on 127.0.0.1:5000""#), Some(5000));
        assert_eq!(listens_on("level=info msg=\"using inmemory cache\""), None);
    }
}
