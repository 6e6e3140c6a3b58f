//! A real PostgreSQL for tests, on a port of its own, with TLS if it should.
//!
//! ```no_run
//! let database = postgres::Postgres::start(postgres::Options { tls: true })?;
//! database.sql("CREATE ROLE app LOGIN PASSWORD 'secret'")?;
//! println!("{}", database.uri("app", "secret"));
//! # Ok::<(), postgres::Error>(())
//! ```
//!
//! It ends with the value, or when the test dies in any way, and what it has stored goes with it.

mod certificates;
mod processes;

use std::{
    fs::{self, Permissions},
    io::{self, BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::unix::{
        fs::{PermissionsExt as _, chown},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

use self::certificates::Authority;

/// The role that may do everything; it comes in by a socket in the file system alone.
const SUPERUSER: &str = "postgres";

/// How a server is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether it speaks TLS, and nothing else, under a certificate of an authority of its own.
    pub tls: bool,
}

/// Why there is no server, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not installed.
    #[error("PostgreSQL is not installed: run `make postgres`")]
    NotInstalled,
    /// It does not start.
    #[error("PostgreSQL has ended before it listened; it said:\n{0}")]
    Ended(String),
    /// A program of it has failed.
    #[error("{0} has failed; it said:\n{1}")]
    Failed(String, String),
    /// A file or a process cannot be had.
    #[error("cannot set up PostgreSQL")]
    Io(#[from] io::Error),
    /// No certificate can be made.
    #[error("cannot make the certificate of a server")]
    Certificate(#[from] rcgen::Error),
}

/// A server, stopped and removed when dropped.
#[derive(Debug)]
pub struct Postgres {
    folder: TempDir,
    programs: PathBuf,
    /// Who it runs as: it refuses to as root.
    owner: Option<(u32, u32)>,
    options: Options,
    /// If it speaks TLS.
    authority: Option<Authority>,
    port: u16,
    /// A shell between us, whose child the server is.
    process: Option<Child>,
}

impl Postgres {
    /// Starts one, and waits until it listens. Any number can run at once.
    ///
    /// # Errors
    /// If it is not installed, or does not start.
    pub fn start(options: Options) -> Result<Self, Error> {
        let folder = TempDir::with_prefix("postgres-")?;
        let owner = owner()?;
        let mut database = Self {
            programs: programs()?,
            folder,
            owner,
            options,
            authority: None,
            port: TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port(),
            process: None,
        };
        database.give(database.folder.path())?;
        let initdb = ["--no-sync", "--no-instructions", "--auth=trust", "--encoding=UTF8", "--no-locale"];
        database.run("initdb", &[&initdb[..], &["--username", SUPERUSER, "-D", &database.path("data")]].concat())?;
        database.configure()?;
        database.start_again()?;
        Ok(database)
    }

    /// How a role connects, as a Secret says it. Without TLS it says that, too.
    #[must_use]
    pub fn uri(&self, role: &str, password: &str) -> String {
        let mode = if self.options.tls { "verify-full" } else { "disable" };
        format!("postgres://{role}:{password}@127.0.0.1:{}/postgres?sslmode={mode}", self.port)
    }

    /// The port at 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The certificate of the authority that its own is from, as PEM, if it speaks TLS.
    #[must_use]
    pub fn authority(&self) -> Option<&str> {
        self.authority.as_ref().map(|authority| authority.pem.as_str())
    }

    /// Runs statements as the superuser, and returns the values that they give: a line for each row, columns parted by `|`.
    ///
    /// # Errors
    /// If one of them fails.
    pub fn sql(&self, statements: &str) -> Result<String, Error> {
        let folder = self.folder.path().display().to_string();
        let port = self.port.to_string();
        let arguments =
            ["-XAtq", "-v", "ON_ERROR_STOP=1", "-U", SUPERUSER, "-d", "postgres", "-h", &folder, "-p", &port];
        let said = self.run("psql", &[&arguments[..], &["-c", statements]].concat())?;
        Ok(said.trim_end().to_owned())
    }

    /// Ends it at once, as a crash would; what it has stored stays.
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It fails only for a process that is gone already.
            drop(process.stdin.take().map(|mut input| input.write_all(b"stop\n")));
            drop(process.wait());
        }
    }

    /// Starts it again after [`Self::stop`], at the same address.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_again(&mut self) -> Result<(), Error> {
        // A shell between us that ends it when we are gone: then nobody holds the other end of its input.
        let shell = r#"exec 3<&0
            "$0" -D "$1/data" -k "$1" -h 127.0.0.1 -p "$2" </dev/null 3<&- & server=$!
            read -r word <&3
            kill -QUIT $server 2>/dev/null; kill -CONT $server 2>/dev/null; wait $server
            [ "$word" = stop ] || rm -rf "$1""#;
        let mut command = self.command("sh");
        let mut process = command
            .args(["-c", shell])
            .args([&self.programs.join("postgres"), self.folder.path()])
            .arg(self.port.to_string())
            // Ctrl-C in a terminal reaches us alone, and then the shell by its input.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = process.stderr.take();
        self.process = Some(process);
        let mut said = String::new();
        let mut lines = BufReader::new(stderr.ok_or_else(|| io::Error::other("no pipe"))?).lines();
        for line in lines.by_ref() {
            let line = line?;
            if line.contains("database system is ready to accept connections") {
                // Somebody has to read on, or it would wait for that.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(());
            }
            said += &format!("{line}\n");
            if line.contains("FATAL") {
                break;
            }
        }
        self.stop();
        Err(Error::Ended(said))
    }

    /// Stops it where it stands: connections stay, new ones are made by the kernel, and nothing answers.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pause(&self) -> Result<(), Error> {
        let shell = self.process.as_ref().ok_or_else(|| io::Error::other("it does not run"))?.id();
        Ok(processes::pause(shell)?)
    }

    /// Lets it go on after [`Self::pause`].
    ///
    /// # Errors
    /// If the system refuses.
    pub fn go_on(&self) -> Result<(), Error> {
        let shell = self.process.as_ref().ok_or_else(|| io::Error::other("it does not run"))?.id();
        Ok(processes::go_on(shell)?)
    }

    /// Gives it another certificate of its authority, if it speaks TLS: one whose time is over, if it should be. It shows that from its next
    /// start on.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn certify(&self, is_expired: bool) -> Result<(), Error> {
        let Some(authority) = &self.authority else { return Ok(()) };
        let made = authority.certify(is_expired)?;
        self.write("data/server.crt", &made.certificate)?;
        self.write("data/server.key", &made.key)
    }

    /// What it is to be, beside what it is by itself.
    fn configure(&mut self) -> Result<(), Error> {
        let kind = if self.options.tls { "hostssl" } else { "host" };
        let who = format!("local all {SUPERUSER} trust\n{kind} all all 127.0.0.1/32 scram-sha-256\n");
        self.write("data/pg_hba.conf", &who)?;
        let mut settings = "timezone = UTC\nfsync = off\nfull_page_writes = off\n".to_owned();
        if self.options.tls {
            self.authority = Some(Authority::new()?);
            self.certify(false)?;
            settings += "ssl = on\n";
        }
        self.write("data/postgresql.auto.conf", &settings)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.folder.path().join(name);
        fs::write(&path, text)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        self.give(&path)
    }

    fn give(&self, path: &Path) -> Result<(), Error> {
        let Some((user, group)) = self.owner else { return Ok(()) };
        Ok(chown(path, Some(user), Some(group))?)
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<String, Error> {
        let output = self.command(self.programs.join(program)).args(arguments).output()?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(Error::Failed(program.to_owned(), String::from_utf8_lossy(&output.stderr).into_owned()))
        }
    }

    /// A command that depends on nothing in the environment.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(self.folder.path());
        if let Some((user, group)) = self.owner {
            command.uid(user).gid(group);
        }
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The newest version that the system has, or what is on the path.
fn programs() -> Result<PathBuf, Error> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().filter_map(Result::ok);
    let version = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
    let newest =
        versions.map(|entry| entry.path()).filter(|path| path.join("bin/initdb").is_file()).max_by_key(version);
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let mut on_path = std::env::split_paths(&on_path).filter(|path| path.join("initdb").is_file());
    newest.map(|path| path.join("bin")).or_else(|| on_path.next()).ok_or(Error::NotInstalled)
}

/// Who it is to run as, if we are root: `nobody`, whom every system has.
fn owner() -> Result<Option<(u32, u32)>, Error> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd")?;
    let nobody = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let (user, group) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        (name == "nobody").then_some((user, group))
    });
    nobody.map(Some).ok_or_else(|| io::Error::other("there is no user nobody in /etc/passwd").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_has_stored_is_there_again_after_a_crash() -> Result<(), Error> {
        let mut database = Postgres::start(Options::default())?;
        database.sql("CREATE TABLE t (a int); INSERT INTO t VALUES (1), (2)")?;
        database.stop();
        assert!(database.sql("SELECT 1").is_err());
        database.start_again()?;
        assert_eq!(database.sql("SELECT a, a + 1 FROM t ORDER BY a")?, "1|2\n2|3");
        Ok(())
    }

    #[test]
    fn nothing_is_left_of_it() -> Result<(), Error> {
        let database = Postgres::start(Options { tls: true })?;
        let (folder, port) = (database.folder.path().to_owned(), database.port());
        assert!(folder.exists());
        drop(database);
        assert!(!folder.exists());
        assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
        Ok(())
    }
}
