//! The child that the host lets compile: what it makes, and where it ends.

use std::{
    fs,
    io::Write as _,
    os::unix::process::ExitStatusExt as _,
    process::{Command, Output, Stdio},
};

use crate::component;

fn compile(arguments: &[&str], component: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pilothouse"))
        .arg("compile-component")
        .args(arguments)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    let component = component.to_vec();
    let feed = std::thread::spawn(move || drop(stdin.write_all(&component)));
    let output = child.wait_with_output().expect("it ends");
    feed.join().expect("it was fed");
    output
}

/// A component with one function of so many calls: what the compiler allocates registers for at a stretch.
fn large(calls: usize) -> Vec<u8> {
    let calls = "(local.set 0 (call $f (local.get 0) (i64.mul (local.get 1) (local.get 0))))".repeat(calls);
    let module = format!("(core module (func $f (param i64 i64) (result i64) {calls} (local.get 0)))");
    wat::parse_str(format!("(component {module})")).expect("it is WebAssembly")
}

#[test]
fn a_component_becomes_machine_code() {
    let myapp = fs::read(component("myapp")).expect("it was built");
    let output = compile(&["--cpu-seconds=60"], &myapp);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.starts_with(b"\x7fELF"));
}

#[test]
fn what_is_no_component_is_refused_with_the_reason() {
    for bytes in [&b""[..], b"text", b"\0asm\x0d\0\x01\0\xff"] {
        let output = compile(&["--cpu-seconds=60"], bytes);
        assert_eq!(output.status.code(), Some(1));
        assert!(!output.stderr.is_empty() && output.stdout.is_empty());
    }
}

#[test]
fn c53_what_takes_too_long_or_too_much_memory_is_ended_by_the_kernel() {
    /// Of Linux.
    const SIGXCPU: i32 = 24;
    const SIGABRT: i32 = 6;
    // A fast machine has done with fewer within the second.
    assert_eq!(compile(&["--cpu-seconds=1"], &large(300_000)).status.signal(), Some(SIGXCPU));
    let output = compile(&["--cpu-seconds=60", "--memory=60000000"], &large(60_000));
    assert_eq!(output.status.signal(), Some(SIGABRT));
    assert!(String::from_utf8_lossy(&output.stderr).contains("memory allocation"));
}
