//! Many plugins in one host, of which none has anything to do: what one more of them costs.

use std::{fmt::Write as _, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::cluster::{Cluster, Host, component, manifests};

/// How much anonymous memory one more plugin may take, with its connections and watches, in MiB.
const MOST: f64 = 0.25;

/// Memory of a host, in MiB.
#[derive(Clone, Copy, Debug)]
struct Memory {
    anonymous: f64,
    /// Pages of files: the kernel can drop them, and hosts on one machine share them.
    of_files: f64,
}

impl Memory {
    fn of(host: &Host) -> Self {
        let rollup = host.proc("smaps_rollup");
        let mib = |name: &str| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name)).expect("Linux says so");
            line.trim().trim_end_matches(" kB").parse::<f64>().expect("it is a number") / 1024.0
        };
        let anonymous = mib("Anonymous:");
        Self { anonymous, of_files: mib("Rss:") - anonymous }
    }

    /// Once the host has come to rest.
    async fn at_rest(host: &Host) -> Self {
        let mut before = Self::of(host);
        loop {
            tokio::time::sleep(Duration::from_secs(2)).await;
            let now = Self::of(host);
            if (now.anonymous - before.anonymous).abs() < 0.1 {
                return now;
            }
            before = now;
        }
    }
}

/// The component with a section more, of that number, which says nothing: another digest.
pub(crate) fn numbered(component: &[u8], number: &str) -> Vec<u8> {
    let name = b"number";
    let length = u8::try_from(1 + name.len() + number.len()).expect("both are short");
    [component, &[0, length, 6], name, number.as_bytes()].concat()
}

/// Installs so many plugins, each with a reconciler, an account and a digest of its own.
fn install(cluster: &Cluster, numbers: std::ops::Range<usize>) {
    let bytes = std::fs::read(component("workerpool")).expect("it was built");
    let one = String::from_utf8(manifests("workerpool", "idle-plugin-name")).expect("it is YAML");
    let encoded = BASE64_STANDARD.encode(&bytes);
    assert!(one.contains(&encoded), "the component is in one piece");
    let mut all = String::new();
    for number in numbers.map(|number| number.to_string()) {
        let one = one.replace("idle-plugin-name", &format!("idle-{number}"));
        let _ = writeln!(all, "---\n{}", one.replace(&encoded, &BASE64_STANDARD.encode(numbered(&bytes, &number))));
    }
    cluster.apply(all.as_bytes());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_plugin_takes_little_memory() {
    /// In parts, since a host compiles what is new to it while the test waits for it.
    const PLUGINS: [usize; 3] = [5, 50, 100];
    let cluster = Cluster::start();
    let mut memory = Vec::new();
    let mut installed = 0;
    for plugins in PLUGINS {
        install(&cluster, installed..plugins);
        installed = plugins;
        let host = cluster.run_host_with(&[], 2 + plugins);
        memory.push(Memory::at_rest(&host).await);
        host.terminate();
    }
    let (few, many) = (memory[0], memory[2]);
    let each = |of: fn(&Memory) -> f64| (of(&many) - of(&few)) / (PLUGINS[2] - PLUGINS[0]) as f64;
    let (anonymous, of_files) = (each(|memory| memory.anonymous), each(|memory| memory.of_files));
    println!(
        "with {PLUGINS:?} plugins {memory:.1?}: {anonymous:.3} MiB of it anonymous and {of_files:.3} MiB of files for each"
    );
    assert!(anonymous <= MOST, "{anonymous:.3} MiB for each");
}
