//! The machine that figures come from, without its name.

use std::{collections::BTreeMap, fs, thread};

use serde::Serialize;

/// What a reader has to know to compare figures with theirs.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    /// What its processors call themselves.
    pub processor: String,
    /// How many of them there are.
    pub cores: usize,
    /// Memory, in GiB.
    pub memory: f64,
    /// The version of Linux.
    pub kernel: String,
    /// Whether what was measured is optimised.
    pub optimised: bool,
    /// The versions of what was measured.
    pub versions: BTreeMap<String, String>,
}

impl Machine {
    /// This one. What it does not tell stays empty.
    #[must_use]
    pub fn this() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let kibibytes: f64 =
            field(&read("/proc/meminfo"), "MemTotal").trim_end_matches(" kB").parse().unwrap_or_default();
        let locked = include_str!("../../../Cargo.lock");
        let go = include_str!("../controller-runtime/go.mod");
        let python = include_str!("../kopf/requirements.txt");
        let versions = [
            ("Pilothouse", Some(env!("CARGO_PKG_VERSION"))),
            ("kube-runtime", after(locked, "name = \"kube-runtime\"\nversion = \"")),
            ("wasmtime", after(locked, "name = \"wasmtime\"\nversion = \"")),
            ("controller-runtime", after(go, "sigs.k8s.io/controller-runtime v")),
            ("kopf", after(python, "kopf==")),
        ];
        let versions = versions.into_iter().filter_map(|(name, version)| Some((name.to_owned(), version?.to_owned())));
        Self {
            processor: field(&read("/proc/cpuinfo"), "model name"),
            cores: thread::available_parallelism().map_or(0, Into::into),
            memory: (kibibytes / 1024.0 / 1024.0 * 10.0).round() / 10.0,
            // What comes after its number is about who built it.
            kernel: read("/proc/sys/kernel/osrelease").trim().split('-').next().unwrap_or_default().to_owned(),
            optimised: !cfg!(debug_assertions),
            versions: versions.collect(),
        }
    }
}

/// The word that comes after this text.
fn after<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split(['"', '\n', ' ']).next()
}

#[cfg(test)]
mod tests {
    use super::Machine;

    #[test]
    fn it_knows_the_versions_of_all_that_is_measured() {
        let versions = Machine::this().versions;
        assert_eq!(versions.len(), 5, "{versions:?}");
        assert!(versions.values().all(|version| version.starts_with(|first: char| first.is_ascii_digit())));
    }
}
