//! Registries: the client and the commands, on a real registry with TLS and passwords, and on one that misbehaves as it is told to.

mod commands;
mod content;
mod reach;
mod scripted;
mod signatures;

use distribution::{Options, Password, Registry, USER};
use pilothouse::registry::{self, Credentials, Digest, Reference, Registries, credentials::Login};

/// The smallest component, with a few bytes of its own.
fn component(own: &str) -> Vec<u8> {
    let mut bytes = b"\0asm\x0d\0\x01\0".to_vec();
    let section = [b"\x03own", own.as_bytes()].concat();
    bytes.extend([0, u8::try_from(section.len()).expect("it is short")]);
    bytes.extend(section);
    bytes
}

fn reference(text: &str) -> Reference {
    text.parse().expect(text)
}

/// A reference into a registry.
fn at(registry: &Registry, rest: &str) -> Reference {
    reference(&format!("{}/{rest}", registry.host()))
}

/// A host's options for this registry.
fn reach(registry: &Registry, tls: bool) -> registry::Options {
    if tls {
        registry::Options { authorities: vec![registry.authority()], insecure: vec![] }
    } else {
        registry::Options { authorities: vec![], insecure: vec![registry.host()] }
    }
}

/// A registry without TLS and password, and what reaches it.
fn open() -> (Registry, Registries) {
    let registry = Registry::start(Options::default()).expect("it starts");
    let registries = Registries::new(&reach(&registry, false)).expect("there is nothing to read");
    (registry, registries)
}

/// A registry with TLS and a password, and what reaches it.
fn closed() -> (Registry, Registries) {
    let options = Options { tls: true, password: Some(Password::First) };
    let registry = Registry::start(options).expect("it starts");
    let registries = Registries::new(&reach(&registry, true)).expect("its authority is read");
    (registry, registries)
}

/// Credentials under keys as in a docker config.
fn credentials(logins: &[(&str, &str)]) -> Credentials {
    let mut credentials = Credentials::default();
    for (key, password) in logins {
        credentials.add_login(key, Login { username: USER.to_owned(), password: (*password).to_owned() });
    }
    credentials
}

fn nobody() -> Credentials {
    Credentials::default()
}

fn digest(of: &[u8]) -> Digest {
    Digest::of(of)
}

/// An error with its causes, as a condition has it.
fn told(error: &impl std::error::Error) -> String {
    pilothouse::telemetry::chain(error)
}
