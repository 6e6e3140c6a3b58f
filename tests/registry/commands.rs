//! `pilothouse push`, `pull` and `inspect`, as a person runs them.

use std::{fs, path::Path, process::Command};

use distribution::Registry;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{closed, component, digest, open};

/// What a command has written to standard output; what it has written to the other is the error.
pub(crate) fn pilothouse(home: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
    let output = command.args(arguments).env("DOCKER_CONFIG", home).current_dir(home).output().expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("it is text");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// What `docker login` writes.
fn log_in(home: &Path, registry: &Registry, password: &str) {
    let config = json!({"auths": {registry.host(): {"username": "tester", "password": password}}});
    fs::write(home.join("config.json"), config.to_string()).expect("it can be written");
}

#[test]
fn a_component_goes_in_and_comes_out_with_the_credentials_of_docker() {
    let ((registry, _), home) = (closed(), TempDir::new().unwrap());
    let (home, ca) = (home.path(), registry.authority());
    let (reference, ca) = (format!("{}/team/plugin:1.0", registry.host()), ca.to_str().unwrap());
    fs::write(home.join("new.wasm"), component("a")).unwrap();

    let refused = pilothouse(home, &["push", "new.wasm", &reference, "--registry-ca", ca]).unwrap_err();
    assert!(refused.contains("wants a credential for team/plugin (401)"), "{refused}");
    log_in(home, &registry, "first");
    let pushed = pilothouse(home, &["push", "new.wasm", &reference, "--registry-ca", ca]).unwrap();
    let pinned = pushed.trim();
    assert!(pinned.starts_with(&format!("{reference}@sha256:")), "{pushed}");

    let pulled = pilothouse(home, &["pull", &reference, "--registry-ca", ca]).unwrap();
    assert_eq!(pulled, pushed);
    assert_eq!(fs::read(home.join("plugin.wasm")).unwrap(), component("a"));
    pilothouse(home, &["pull", pinned, "-o", "there/it.wasm", "--registry-ca", ca]).unwrap();
    assert_eq!(fs::read(home.join("there/it.wasm")).unwrap(), component("a"));
}

#[test]
fn a_program_gets_the_digests_as_json() {
    let ((registry, _), home) = (open(), TempDir::new().unwrap());
    let (home, host) = (home.path(), registry.host());
    fs::write(home.join("new.wasm"), component("a")).unwrap();
    let reference = format!("{host}/plugin:1.0");
    let options = ["--insecure-registry", &host, "-o", "json"];
    let pushed = pilothouse(home, &[&["push", "new.wasm", &reference][..], &options].concat()).unwrap();
    let pushed = serde_json::from_str::<Value>(&pushed).unwrap();
    let manifest = pushed["digest"].as_str().unwrap();
    assert_eq!(pushed["reference"], format!("{reference}@{manifest}"));
    assert_eq!(
        (&pushed["component"], &pushed["size"]),
        (&json!(digest(&component("a"))), &json!(component("a").len()))
    );

    // It is no plugin, so the command fails; what there is, is shown all the same.
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
    let output = command.args([&["inspect", &reference][..], &options].concat()).env("DOCKER_CONFIG", home).output();
    let inspected = serde_json::from_slice::<Value>(&output.unwrap().stdout).unwrap();
    assert_eq!((&inspected["reference"], inspected.get("file")), (&pushed["reference"], None));
    assert_eq!(inspected["digest"], digest(&component("a")).hex());
}

#[test]
fn what_is_no_component_or_has_a_digest_before_it_is_pushed_is_not_pushed() {
    let ((registry, _), home) = (open(), TempDir::new().unwrap());
    let (home, host) = (home.path(), registry.host());
    fs::write(home.join("text.wasm"), "no component").unwrap();
    fs::write(home.join("new.wasm"), component("a")).unwrap();
    let push =
        |file, reference: &str| pilothouse(home, &["push", file, reference, "--insecure-registry", &host]).unwrap_err();
    assert!(push("text.wasm", &format!("{host}/plugin:1.0")).contains("is no WebAssembly component"));
    assert!(push("new.wasm", &format!("{host}/plugin@{}", digest(b""))).contains("push new.wasm to a tag"));
    assert!(push("new.wasm", "plugin:1.0").contains("names no registry: write it first"));
    assert_eq!(registry.requests().unwrap(), [] as [String; 0]);
}

#[test]
fn what_the_library_of_wkg_pushes_is_pulled_and_what_we_push_it_pulls() {
    let ((registry, _), home) = (open(), TempDir::new().unwrap());
    let (home, host) = (home.path(), registry.host());
    let target = Path::new(env!("CARGO_BIN_EXE_pilothouse")).ancestors().nth(2).unwrap();
    let client = target.join("oci-wasm/debug/oci-wasm-client");
    assert!(client.is_file(), "{} is missing: run `make registry`", client.display());
    // A real one: the library reads what it imports and exports.
    let plugin = target.join("plugins/myapp.wasm");
    let theirs = |arguments: [&str; 3]| {
        let output = Command::new(&client).args(arguments).current_dir(home).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    fs::copy(&plugin, home.join("myapp.wasm")).unwrap();
    let (from_them, from_us) = (format!("{host}/theirs:1.0"), format!("{host}/ours:1.0"));
    let insecure = ["--insecure-registry", &host];

    theirs(["push", "myapp.wasm", &from_them]);
    pilothouse(home, &[&["pull", &from_them, "-o", "from-them.wasm"][..], &insecure].concat()).unwrap();
    pilothouse(home, &[&["inspect", &from_them][..], &insecure].concat()).unwrap();
    pilothouse(home, &[&["push", "myapp.wasm", &from_us][..], &insecure].concat()).unwrap();
    theirs(["pull", &from_us, "from-us.wasm"]);
    for file in ["from-them.wasm", "from-us.wasm"] {
        assert_eq!(fs::read(home.join(file)).unwrap(), fs::read(&plugin).unwrap(), "{file}");
    }
}

#[test]
fn a_program_that_keeps_passwords_for_docker_is_asked() {
    let ((registry, _), home) = (closed(), TempDir::new().unwrap());
    let (home, ca) = (home.path(), registry.authority());
    let keeper = home.join("docker-credential-keeper");
    let script = "#!/bin/sh\nread -r server\necho \"{\\\"Username\\\":\\\"tester\\\",\\\"Secret\\\":\\\"first\\\"}\"\n";
    fs::write(&keeper, script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&keeper, mode).unwrap();
    fs::write(home.join("config.json"), r#"{"credsStore": "keeper"}"#).unwrap();
    fs::write(home.join("new.wasm"), component("a")).unwrap();
    let reference = format!("{}/plugin:1.0", registry.host());
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
    command.args(["push", "new.wasm", &reference, "--registry-ca"]).arg(ca).current_dir(home);
    let path = format!("{}:/usr/bin:/bin", home.display());
    let output = command.env("DOCKER_CONFIG", home).env("PATH", path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
