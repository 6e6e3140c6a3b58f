//! A real S3 server for tests: versitygw over a folder, on a port of its own, with versions, and with TLS if it should.
//!
//! ```no_run
//! let server = s3::Server::start(s3::Options::default())?;
//! println!("{}, with {} and {}", server.url(), s3::ACCESS_KEY_ID, s3::SECRET_ACCESS_KEY);
//! # Ok::<(), s3::Error>(())
//! ```
//!
//! Like the real one it refuses to delete a bucket that is not empty, and requests that are not signed by its one user. It ends with the
//! value, or when the test dies in any way, and what it has stored goes with it. What is stored can be seen, and added to, behind its
//! back: a bucket is a folder, and an object a file.

use std::{
    fs::{self, File},
    io,
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;

/// Who may do everything.
pub const ACCESS_KEY_ID: &str = "tester";
/// The secret of [`ACCESS_KEY_ID`].
pub const SECRET_ACCESS_KEY: &str = "the secret of the tester";
/// The region that requests are to be signed for.
pub const REGION: &str = "us-east-1";

/// How long it may take until it listens.
const START: Duration = Duration::from_secs(30);

/// How a server is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether it speaks TLS, by a certificate for 127.0.0.1 that is its own authority.
    pub tls: bool,
    /// Whether its buckets can keep versions. They do once they are told to.
    pub versions: bool,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was not built.
    #[error("the S3 server is not built in {}: run `make s3`", .0.display())]
    NotBuilt(PathBuf),
    /// It does not start.
    #[error("the S3 server does not listen; it said:\n{0}")]
    Ended(String),
    /// A file or a process cannot be had.
    #[error("cannot set up an S3 server")]
    Io(#[from] io::Error),
    /// No certificate can be made.
    #[error("cannot make the certificate of an S3 server")]
    Certificate(#[from] rcgen::Error),
}

/// A server, stopped and removed when dropped.
#[derive(Debug)]
pub struct Server {
    folder: TempDir,
    program: PathBuf,
    options: Options,
    port: u16,
    certificate: Option<String>,
    process: Option<Child>,
}

impl Server {
    /// Starts one, and waits until it listens. Any number can run at once.
    ///
    /// # Errors
    /// If it was not built, or does not start.
    pub fn start(options: Options) -> Result<Self, Error> {
        let program = folder()?.join("versitygw");
        if !program.is_file() {
            return Err(Error::NotBuilt(program));
        }
        let folder = TempDir::with_prefix("s3-")?;
        for name in ["buckets", "metadata", "versions"] {
            fs::create_dir(folder.path().join(name))?;
        }
        let mut certificate = None;
        if options.tls {
            let key = KeyPair::generate()?;
            let own = CertificateParams::new(["127.0.0.1", "localhost"].map(String::from))?.self_signed(&key)?;
            fs::write(folder.path().join("server.crt"), own.pem())?;
            fs::write(folder.path().join("server.key"), key.serialize_pem())?;
            certificate = Some(own.pem());
        }
        let mut server = Self { folder, program, options, port: 0, certificate, process: None };
        // The port is free when it is looked for, and may be somebody else's a moment later.
        for _ in 0..5 {
            server.port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
            if server.start_again().is_ok() {
                return Ok(server);
            }
        }
        Err(Error::Ended(server.log()))
    }

    /// Scheme, host and port.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", if self.options.tls { "https" } else { "http" }, self.port)
    }

    /// The certificate of the authority that its own is from, as PEM, if it speaks TLS.
    #[must_use]
    pub fn authority(&self) -> Option<&str> {
        self.certificate.as_deref()
    }

    /// The folder whose folders are the buckets.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.path("buckets")
    }

    /// The buckets that there are, sorted.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn buckets(&self) -> Result<Vec<String>, Error> {
        names(&self.path("buckets"))
    }

    /// The objects at the top of a bucket, and the folders, sorted.
    ///
    /// # Errors
    /// If there is no such bucket.
    pub fn objects(&self, bucket: &str) -> Result<Vec<String>, Error> {
        names(&self.path("buckets").join(bucket))
    }

    /// Puts an object into a bucket behind the server's back.
    ///
    /// # Errors
    /// If there is no such bucket.
    pub fn put_object(&self, bucket: &str, key: &str, content: &str) -> Result<(), Error> {
        Ok(fs::write(self.path("buckets").join(bucket).join(key), content)?)
    }

    /// Removes a bucket, with all that is in it, behind the server's back.
    ///
    /// # Errors
    /// If there is no such bucket.
    pub fn remove_bucket(&self, bucket: &str) -> Result<(), Error> {
        Ok(fs::remove_dir_all(self.path("buckets").join(bucket))?)
    }

    /// The requests that it has answered, a line each, as it logs them.
    ///
    /// # Errors
    /// If its log cannot be read.
    pub fn requests(&self) -> Result<Vec<String>, Error> {
        Ok(fs::read_to_string(self.path("access.log"))?.lines().map(str::to_owned).collect())
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
        let log = File::create(self.path("server.log"))?;
        // A shell between us that ends it when we are gone: then nobody holds the other end of its input.
        let shell = r#"exec 3<&0; "$0" "$@" </dev/null 3<&- & cat <&3 >/dev/null 2>&1; kill $! 2>/dev/null; wait $!"#;
        let mut command = Command::new("sh");
        command.args(["-c", shell]).arg(&self.program);
        command.args(["--port", &format!("127.0.0.1:{}", self.port), "--region", REGION]);
        command.arg("--access-log").arg(self.path("access.log"));
        if self.options.tls {
            command.arg("--cert").arg(self.path("server.crt")).arg("--key").arg(self.path("server.key"));
        }
        command.arg("posix");
        if self.options.versions {
            command.arg("--versioning-dir").arg(self.path("versions"));
        }
        // Beside the objects, since not every file system has attributes for it.
        command.arg("--sidecar").arg(self.path("metadata")).arg(self.path("buckets"));
        let process = command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .envs([("ROOT_ACCESS_KEY_ID", ACCESS_KEY_ID), ("ROOT_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)])
            .current_dir(self.folder.path())
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        self.process = Some(process);
        let begun = Instant::now();
        // It says so before it listens, and so it is asked as well.
        while !(self.log().contains("listening on") && TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok()) {
            if begun.elapsed() > START || self.log().contains("address already in use") {
                self.stop();
                return Err(Error::Ended(self.log()));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("server.log")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn names(folder: &Path) -> Result<Vec<String>, Error> {
    let names = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<Vec<String>, Error>>()?;
    // What the server keeps there for itself.
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    Ok(names)
}

/// Asks the build script, which alone knows where it builds to.
fn folder() -> Result<PathBuf, Error> {
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("build.sh")).arg("--where").output()?;
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}
