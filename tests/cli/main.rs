//! The commands that need no cluster, as a person or a script runs them: the real binary on real components.

mod compile;
mod inspect;
mod languages;
mod render;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

/// What a command has done.
#[derive(Debug)]
struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Ran {
    #[track_caller]
    fn with_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).expect(&self.stdout)
    }
}

fn pilothouse(arguments: &[&str]) -> Ran {
    pilothouse_reads(arguments, "")
}

fn pilothouse_reads(arguments: &[&str], stdin: &str) -> Ran {
    run(Command::new(env!("CARGO_BIN_EXE_pilothouse")).args(arguments), stdin)
}

fn run(command: &mut Command, stdin: &str) -> Ran {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    // It may end without reading.
    let _ = child.stdin.take().expect("it is piped").write_all(stdin.as_bytes());
    let output = child.wait_with_output().expect("it ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it is text");
    Ran {
        code: output.status.code().expect("it ends by itself"),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Where `make plugins` puts a component: beside the folder of the binary.
fn component_file(plugin: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_BIN_EXE_pilothouse")).ancestors().nth(2).expect("it is in target/debug");
    target.join("plugins").join(format!("{plugin}.wasm"))
}

fn component(plugin: &str) -> String {
    let component = component_file(plugin);
    assert!(component.is_file(), "{} is missing: run `make plugins`", component.display());
    component.to_string_lossy().into_owned()
}

/// The files of one test.
struct Files(PathBuf);

impl Files {
    fn of(test: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cli").join(test);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder can be made");
        Self(folder)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let file = self.0.join(name);
        fs::write(&file, content).expect("a file can be written");
        file.to_string_lossy().into_owned()
    }

    /// Another version of a component: `from` replaced wherever it stands.
    fn edited(&self, plugin: &str, from: &str, to: &str) -> String {
        assert_eq!(from.len(), to.len(), "or all that comes after it would move");
        let mut bytes = fs::read(component(plugin)).expect("it can be read");
        let mut edits = 0;
        for at in 0..bytes.len() - from.len() {
            if bytes[at..].starts_with(from.as_bytes()) {
                bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
                edits += 1;
            }
        }
        assert!(edits > 0, "{plugin} has no {from}");
        self.write(&format!("{plugin}.wasm"), bytes)
    }
}

#[test]
fn the_version_is_told_to_people_and_to_programs() {
    let text = pilothouse(&["version"]).with_code(0).stdout;
    assert!(text.starts_with(concat!("pilothouse  ", env!("CARGO_PKG_VERSION"), "\n")), "{text}");
    assert!(text.contains("pilothouse:plugin@0.1.0"), "{text}");
    let json = pilothouse(&["version", "-o", "json"]).with_code(0).json();
    assert_eq!((&json["version"], &json["contracts"][0]), (&env!("CARGO_PKG_VERSION").into(), &"0.1.0".into()));
    assert_eq!(json["engine"]["name"], "wasmtime");
    let lock = include_str!("../../Cargo.lock");
    let engine = json["engine"]["version"].as_str().unwrap();
    assert!(lock.contains(&format!("name = \"wasmtime\"\nversion = \"{engine}\"")), "{engine}");
    assert!(pilothouse(&["--version"]).with_code(0).stdout.contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_shell_takes_the_completion() {
    let script = pilothouse(&["completion", "bash"]).with_code(0).stdout;
    let files = Files::of("completion");
    let file = files.write("completion.bash", &script);
    run(Command::new("bash").args(["-n", &file]), "").with_code(0);
    let ask = format!(
        r#"source '{file}'; COMP_WORDS=(pilothouse ren); COMP_CWORD=1; _pilothouse pilothouse ren; echo "${{COMPREPLY[@]}}""#
    );
    let completed = run(Command::new("bash").args(["-c", &ask]), "").with_code(0);
    assert_eq!(completed.stdout, "render\n");
}

#[test]
fn what_is_not_understood_is_an_error_like_any_other() {
    // 2 would say that something would change.
    let error = pilothouse(&["render", "--no-such-option"]).with_code(1).stderr;
    assert!(error.contains("--no-such-option"), "{error}");
    assert!(pilothouse(&["render", "--help"]).with_code(0).stdout.contains("Exit codes:"));
}

#[test]
fn what_is_no_plugin_has_no_manifests() {
    let files = Files::of("manifests");
    let foreign = files.edited("mirror", "pilothouse:plugin/finalizer@", "pilothouse:plugin/relations@");
    let refused = pilothouse(&["manifests", &foreign]).with_code(1);
    assert!(
        refused
            .stderr
            .contains("is no plugin that this host can run: the plugin does not keep the contract that it exports")
    );
    assert_eq!(refused.stdout, "");
}
