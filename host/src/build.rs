//! `pilothouse build`: from a plugin's source, a crate of Rust or a module of Go, to the component that the host loads.
//!
//! For Rust any cargo will do if the machine has a WebAssembly target. Where rustup cannot fetch one, Debian's compiler can build it
//! together with the standard library (`plugins/setup.sh` installs what that takes). Either way the result goes through
//! the component encoder, which checks that it keeps the contract that it was built against.

mod go;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use wit_component::ComponentEncoder;

/// What to build.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The folder of the plugin's `Cargo.toml`, or `go.mod`.
    pub dir: PathBuf,
    /// Where the component goes; without it `plugins/<crate>.wasm` in cargo's target folder, or for Go `plugin.wasm` in the module's.
    pub output: Option<PathBuf>,
    /// A cargo profile of the author's; without it one that makes the component small.
    pub profile: Option<String>,
}

/// What was built.
#[derive(Debug, Clone)]
pub struct Built {
    /// The component.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: u64,
    /// How long it took, everything included.
    pub duration: Duration,
}

/// Why there is no component; the texts say what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no crate to build.
    #[error("no Rust crate and no Go module in {}: give the folder of the plugin's Cargo.toml or go.mod", .0.display())]
    NoCrate(PathBuf),
    /// A program could not be started.
    #[error("failed to run {program}: is it installed and in PATH?")]
    Start {
        /// The program.
        program: String,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Cargo does not understand the crate.
    #[error("cargo cannot read the crate: {0}")]
    Metadata(String),
    /// The crate is a program.
    #[error("the crate `{0}` is no plugin: it has no library (src/lib.rs)")]
    NoLibrary(String),
    /// Nothing here compiles to WebAssembly.
    #[error(
        "there is no WebAssembly target for Rust: run `rustup target add wasm32-unknown-unknown`, or where rustup cannot \
         download it, on Debian `apt-get install rustc-web cargo-web rust-web-src lld-19`"
    )]
    NoTarget,
    /// The crate does not compile; cargo has printed why.
    #[error("the plugin does not compile: see the compiler's messages above")]
    Compile,
    /// The module is no component of the contract.
    #[error(
        "the module does not make a component: does it export what the contract asks for (in Rust, by `export_plugin!`), and is its \
         SDK of this release?"
    )]
    Encode(#[source] anyhow::Error),
    /// A file could not be read or written.
    #[error("failed to access {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
}

/// How cargo is to compile.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Profile<'a> {
    /// Small rather than fast, since components travel in ConfigMaps and registries.
    Small,
    /// In no time, for one who waits: what the plugin depends on is compiled once, and of the plugin only what has changed.
    Quick,
    /// One of the author's.
    Named(&'a str),
}

impl Profile<'_> {
    /// Its name, and what makes it up. Ours have names of their own, so that they change nothing of what the author has set.
    fn settings(&self) -> (&str, &'static [&'static str]) {
        match self {
            Self::Small => (
                "plugin",
                &[
                    "inherits='release'",
                    "opt-level='s'",
                    "lto=true",
                    "codegen-units=1",
                    "panic='abort'",
                    // Without names the component is a fifth smaller, and a panic logs where it was.
                    "strip='symbols'",
                ],
            ),
            Self::Quick => (
                "plugin-dev",
                &[
                    "inherits='dev'",
                    "incremental=true",
                    "panic='abort'",
                    // A trap tells the names of functions, which are there all the same.
                    "debug=false",
                    // Takes cargo no longer, and leaves less code for the host to compile.
                    "opt-level=1",
                ],
            ),
            Self::Named(name) => (name, &[]),
        }
    }
}

/// Builds the plugin in `options.dir` and returns where its component is. Compiler messages go to stderr.
///
/// # Errors
/// See [`Error`]. A component that was there before stays until the new one is complete.
pub fn build(options: &Options) -> Result<Built, Error> {
    let start = Instant::now();
    let source = Source::read(&options.dir)?;
    let profile = options.profile.as_deref().map_or(Profile::Small, Profile::Named);
    let mut compiler = source.compiler(profile)?;
    // In a form for programs is on its standard output what was compiled; its messages are not.
    let output = compiler.args(source.messages_to_stderr()).stderr(Stdio::inherit()).output();
    let component = source.component(&output.map_err(|source| start_error(&compiler, source))?)?;
    let path = options.output.clone().unwrap_or_else(|| source.default_output());
    write(&path, &component).map_err(|source| Error::File { path: path.clone(), source })?;
    Ok(Built { path, size: component.len() as u64, duration: start.elapsed() })
}

/// The source of a plugin.
pub(crate) enum Source {
    /// A crate.
    Rust(Package),
    /// A module.
    Go(go::Module),
}

impl Source {
    pub(crate) fn read(dir: &Path) -> Result<Self, Error> {
        if dir.join("go.mod").is_file() {
            Ok(Self::Go(go::Module::of(dir)))
        } else {
            Package::read(dir).map(Self::Rust)
        }
    }

    /// What the plugin is called.
    pub(crate) fn name(&self) -> Option<String> {
        match self {
            Self::Rust(package) => Some(package.name.clone()),
            Self::Go(module) => Some(module.dir.canonicalize().ok()?.file_name()?.to_str()?.to_owned()),
        }
    }

    /// Where its component goes if nobody says otherwise.
    pub(crate) fn default_output(&self) -> PathBuf {
        match self {
            Self::Rust(package) => package.target.join("plugins").join(&package.name).with_extension("wasm"),
            Self::Go(module) => module.dir.join("plugin.wasm"),
        }
    }

    /// The folders that it is made from: its own, and those of what it depends on by path.
    pub(crate) fn folders(&self) -> Vec<PathBuf> {
        match self {
            Self::Rust(package) => {
                [package.dir().to_owned()].into_iter().chain(package.beside.iter().cloned()).collect()
            }
            Self::Go(module) => vec![module.dir.clone()],
        }
    }

    /// What compiles it, to be run by whoever wants to. Both its outputs belong to [`Self::component`].
    pub(crate) fn compiler(&self, profile: Profile<'_>) -> Result<Command, Error> {
        match self {
            Self::Rust(package) => package.compiler(profile),
            Self::Go(module) => Ok(module.compiler()),
        }
    }

    fn messages_to_stderr(&self) -> Option<&'static str> {
        matches!(self, Self::Rust(_)).then_some("--message-format=json-render-diagnostics")
    }

    /// What makes the compiler tell what it finds in a form for [`Self::findings`].
    pub(crate) fn messages_to_stdout(&self, coloured: bool) -> Option<&'static str> {
        let format = if coloured { "--message-format=json-diagnostic-rendered-ansi" } else { "--message-format=json" };
        matches!(self, Self::Rust(_)).then_some(format)
    }

    /// What the compiler finds fault with, as it says it.
    pub(crate) fn findings(&self, output: &Output) -> String {
        let rendered = match self {
            Self::Rust(_) => {
                let messages = messages(output).filter(|message| message["reason"] == "compiler-message");
                messages.filter_map(|message| message["message"]["rendered"].as_str().map(str::to_owned)).collect()
            }
            Self::Go(_) => String::new(),
        };
        // What is wrong before anything is compiled, such as with its Cargo.toml, cargo says as any program does.
        if rendered.is_empty() && !output.status.success() {
            return String::from_utf8_lossy(&output.stderr).into_owned();
        }
        rendered
    }

    /// The component of what the compiler has made.
    pub(crate) fn component(&self, output: &Output) -> Result<Vec<u8>, Error> {
        if !output.status.success() {
            return Err(Error::Compile);
        }
        let component = match self {
            Self::Rust(package) => {
                let module = package.module(output).ok_or(Error::Compile)?;
                component(std::fs::read(&module).map_err(|source| Error::File { path: module, source })?)
            }
            Self::Go(module) => go::component(module.take()?),
        };
        component.map_err(Error::Encode)
    }
}

/// What cargo has told on its standard output.
fn messages(output: &Output) -> impl Iterator<Item = Value> {
    output.stdout.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
}

/// The crate, as cargo sees it.
pub(crate) struct Package {
    manifest: PathBuf,
    name: String,
    /// Cargo's target folder for this crate, wherever the user has put it.
    target: PathBuf,
    /// The folders of the crates that it names by path.
    beside: Vec<PathBuf>,
}

impl Package {
    fn read(dir: &Path) -> Result<Self, Error> {
        let manifest = dir.join("Cargo.toml").canonicalize().map_err(|_| Error::NoCrate(dir.to_owned()))?;
        let mut cargo = Command::new("cargo");
        cargo.args(["metadata", "--no-deps", "--format-version=1", "--manifest-path"]).arg(&manifest);
        // In its folder, since `.cargo/config.toml` and `rust-toolchain.toml` are found from there.
        let output = cargo.current_dir(dir).output().map_err(|source| start_error(&cargo, source))?;
        if !output.status.success() {
            return Err(Error::Metadata(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|err| Error::Metadata(err.to_string()))?;
        let Some(package) = list(&metadata["packages"]).find(|package| path(&package["manifest_path"]) == manifest)
        else {
            return Err(Error::NoCrate(dir.to_owned()));
        };
        let name = package["name"].as_str().unwrap_or_default().to_owned();
        let library =
            |target: &Value| list(&target["kind"]).any(|kind| kind == "lib" || kind == "rlib" || kind == "cdylib");
        if !list(&package["targets"]).any(library) {
            return Err(Error::NoLibrary(name));
        }
        let beside = list(&package["dependencies"]).filter_map(|it| it["path"].as_str()).map(PathBuf::from).collect();
        Ok(Self { manifest, name, target: path(&metadata["target_directory"]), beside })
    }

    /// Cargo, to compile to a core module, or to a component, where the target makes one by itself.
    fn compiler(&self, profile: Profile<'_>) -> Result<Command, Error> {
        let mut cargo = Toolchain::find(self.dir())?.cargo_rustc();
        cargo.args(["--lib", "--manifest-path"]).arg(&self.manifest);
        // Whatever the manifest says: a second crate type beside this one would turn link-time optimisation off.
        cargo.args(["--crate-type", "cdylib"]);
        // A target folder of its own: another compiler may be at work here, and each would rebuild what the other has built.
        cargo.arg("--target-dir").arg(self.target.join("guests"));
        let (name, settings) = profile.settings();
        cargo.args(["--profile", name]);
        cargo.args(settings.iter().flat_map(|setting| ["--config".to_owned(), format!("profile.{name}.{setting}")]));
        cargo.arg("--config").arg(remap());
        cargo.current_dir(self.dir());
        Ok(cargo)
    }

    /// What cargo has made of the crate.
    fn module(&self, output: &Output) -> Option<PathBuf> {
        let artifacts = messages(output).filter(|message| {
            message["reason"] == "compiler-artifact" && path(&message["manifest_path"]) == self.manifest
        });
        let mut files = artifacts.flat_map(|artifact| list(&artifact["filenames"]).map(path).collect::<Vec<_>>());
        files.find(|file| file.extension().is_some_and(|extension| extension == "wasm"))
    }

    fn dir(&self) -> &Path {
        self.manifest.parent().unwrap_or(Path::new("."))
    }
}

/// What can compile to WebAssembly here.
struct Toolchain {
    target: &'static str,
    /// The linker, where the compiler is Debian's. It has no library for the target, so it builds that as well.
    debian: Option<PathBuf>,
}

impl Toolchain {
    /// The target of choice, and what is as good. The first imports nothing, while components of the second import WASI.
    const TARGETS: [&str; 2] = ["wasm32-unknown-unknown", "wasm32-wasip2"];

    fn find(dir: &Path) -> Result<Self, Error> {
        let libraries = |args: &[&str]| libraries(dir, args);
        for target in Self::TARGETS {
            if libraries(&["--target", target]).is_some_and(|libraries| libraries.is_dir()) {
                return Ok(Self { target, debian: None });
            }
        }
        let needed = ["/usr/bin/cargo", "/usr/bin/rustc", "/usr/lib/rustlib/src/rust/library/std"];
        let beside = libraries(&[]).map(|libraries| libraries.with_file_name("bin").join("rust-lld"));
        let linkers = ["/usr/bin/rust-lld", "/usr/bin/wasm-ld", "/usr/bin/wasm-ld-19"].map(PathBuf::from);
        let linker = beside.into_iter().chain(linkers).find(|linker| linker.exists());
        match linker {
            Some(linker) if needed.iter().all(|path| Path::new(path).exists()) => {
                Ok(Self { target: Self::TARGETS[0], debian: Some(linker) })
            }
            _ => Err(Error::NoTarget),
        }
    }

    /// `cargo rustc` for the target.
    fn cargo_rustc(&self) -> Command {
        let mut cargo = Command::new(if self.debian.is_some() { "/usr/bin/cargo" } else { "cargo" });
        cargo.args(["rustc", "--target", self.target]);
        if let Some(linker) = &self.debian {
            // For this one command: with these variables everything else would be built by the wrong compiler.
            cargo.env("RUSTC", "/usr/bin/rustc").env("RUSTC_BOOTSTRAP", "1").arg("-Zbuild-std=std,panic_abort");
            cargo.env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", linker);
        }
        cargo
    }
}

/// Where the compiler has, or would have, the standard library of a target.
fn libraries(dir: &Path, args: &[&str]) -> Option<PathBuf> {
    let output = Command::new("rustc").args(["--print", "target-libdir"]).args(args).current_dir(dir).output().ok()?;
    output.status.success().then(|| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// Rust keeps the path of each file that can panic. Without the home of whoever builds, the same source and compiler make the
/// same component, with the same digest, for everyone.
fn remap() -> String {
    let folder = |variable| std::env::var_os(variable).map(PathBuf::from);
    let cargo = folder("CARGO_HOME").or_else(|| folder("HOME").map(|home| home.join(".cargo"))).unwrap_or_default();
    let flag = format!("--remap-path-prefix={}=", cargo.display());
    format!("target.'cfg(target_family=\"wasm\")'.rustflags=[{flag:?}]")
}

/// The component of a core module. Where the target makes components by itself, it is one already.
fn component(module: Vec<u8>) -> anyhow::Result<Vec<u8>> {
    // The version field: 1 for a module, 13 in layer 1 for a component.
    if module.get(4..8) == Some(&[0x0d, 0, 1, 0]) {
        return Ok(module);
    }
    ComponentEncoder::default().validate(true).module(&module)?.encode()
}

/// Writes beside the file and renames, so that whoever watches it never sees half a component.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let part = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, path)).inspect_err(|_| {
        // Best effort: the error that matters is the one before.
        let _ = std::fs::remove_file(&part);
    })
}

pub(crate) fn start_error(command: &Command, source: io::Error) -> Error {
    Error::Start { program: command.get_program().to_string_lossy().into_owned(), source }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn path(value: &Value) -> PathBuf {
    PathBuf::from(value.as_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_at(dir: &Path) -> Error {
        build(&Options { dir: dir.to_owned(), ..Options::default() }).unwrap_err()
    }

    /// An empty folder for a test, removed with it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("pilothouse-build-{name}-{}", std::process::id()));
            std::fs::create_dir_all(dir.join("src")).unwrap();
            Self(dir)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_folder_without_a_crate_is_refused() {
        let dir = Folder::new("empty");
        assert!(matches!(build_at(&dir.0), Error::NoCrate(_)));
    }

    #[test]
    fn a_program_is_no_plugin() {
        let dir = Folder::new("program");
        let manifest = "[package]\nname = \"plain\"\nedition = \"2024\"\n[workspace]\n";
        std::fs::write(dir.0.join("Cargo.toml"), manifest).unwrap();
        std::fs::write(dir.0.join("src/main.rs"), "fn main() {}").unwrap();
        assert!(matches!(build_at(&dir.0), Error::NoLibrary(_)));
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let dir = Folder::new("write");
        let file = dir.0.join("out/plugin.wasm");
        write(&file, b"old").unwrap();
        write(&file, b"new").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(dir.0.join("out")).unwrap().count(), 1);
    }
}
