//! Plugins are compiled once, outside of the host, and what comes of it is kept: whatever happens to it there.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;

use crate::{
    cluster::{Cluster, Host, config_map, told, until},
    swap::push,
};

/// How many plugins a host has loaded: from the cache, from the compiler, and not at all.
pub(crate) async fn loads(host: &Host) -> [u64; 3] {
    let page = host.metrics().await;
    ["cache", "compiler", "failed"].map(|from| {
        let name = format!("pilothouse_plugin_loads_total{{from=\"{from}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&name)).expect("it is on the page");
        value.parse().expect("it is a number")
    })
}

/// The entries of a cache.
fn entries(cache: &Path) -> Vec<PathBuf> {
    let folder =
        |path: PathBuf| fs::read_dir(path).expect("it is a folder").map(|entry| entry.expect("it is there").path());
    folder(cache.join("pilothouse")).flat_map(folder).flat_map(folder).collect()
}

/// Files of the cache are for reading only, so a damaged one is another one in its place.
fn damage(entry: &Path, damage: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(entry).expect("it can be read");
    damage(&mut bytes);
    fs::remove_file(entry).expect("it can be removed");
    fs::write(entry, bytes).expect("it can be written");
}

#[tokio::test]
async fn c48_a_start_compiles_nothing_and_whatever_becomes_of_the_cache_the_plugins_serve() {
    let cluster = Cluster::start();
    let cache = cluster.control_plane.data_dir().join("cache");
    let with_cache = format!("--cache-dir={}", cache.display());
    let start = |arguments: &[&str]| cluster.run_host_with(&[&[with_cache.as_str()], arguments].concat(), 2);
    let ns = cluster.namespace("compile").await;
    let serves = async |name: &str| {
        ns.widget(name, json!({"reply": {"children": [config_map(name, "1")]}})).await;
        until(&ns.config_maps(), name, "the child", |_| true).await;
    };

    let host = start(&[]);
    assert_eq!(loads(&host).await, [0, 2, 0]);
    assert_eq!(entries(&cache).len(), 2);
    host.kill();
    let host = start(&[]);
    assert_eq!(loads(&host).await, [2, 0, 0]);
    serves("cached").await;
    host.kill();

    // Cut off, damaged in a bit, and those of a host that was built otherwise.
    // Their order is another one once one of them was replaced.
    let kept = entries(&cache);
    damage(&kept[0], |bytes| bytes.truncate(bytes.len() / 2));
    damage(&kept[1], |bytes| bytes[1000] ^= 1);
    let shelf = kept[0].ancestors().nth(2).expect("it is on a shelf").to_owned();
    fs::rename(&shelf, shelf.with_file_name("compiled-0123456789abcdef")).expect("it can be renamed");
    fs::create_dir_all(shelf.join("_cluster")).expect("it can be made");
    for entry in entries(&cache) {
        fs::copy(&entry, shelf.join("_cluster").join(entry.file_name().expect("it has one")))
            .expect("it can be copied");
    }
    let host = start(&[]);
    assert_eq!(loads(&host).await, [0, 2, 0]);
    serves("damaged").await;
    host.kill();

    // No room, and no folder.
    fs::remove_dir_all(&cache).expect("it can be removed");
    let host = start(&["--cache-size=1k"]);
    assert_eq!((loads(&host).await, entries(&cache).len()), ([0, 2, 0], 0));
    serves("full").await;
    host.kill();
    fs::remove_dir_all(&cache).expect("it can be removed");
    fs::write(&cache, "a file").expect("it can be written");
    let host = start(&[]);
    assert_eq!(loads(&host).await, [0, 2, 0]);
    assert!(host.log_text().contains("nothing is kept of plugins"));
    host.kill();
    fs::remove_file(&cache).expect("it can be removed");
    start(&[]).kill();

    // What takes too long to compile is refused, and disturbs nobody.
    let host = start(&["--compile-timeout=1s"]);
    assert_eq!(loads(&host).await, [2, 0, 0]);
    push(&cluster, "mirror", &endless());
    let message = told(&ns.reconcilers(), "mirror", "Degraded", "True", "InvalidPlugin").await;
    assert!(message.contains("compiling the plugin takes more than 1s (--compile-timeout)"), "{message}");
    assert_eq!(loads(&host).await, [2, 0, 1]);
    serves("slow").await;
}

/// A component of half a megabyte that keeps the compiler busy for many seconds.
fn endless() -> Vec<u8> {
    let calls = "(local.set 0 (call $f (local.get 0) (i64.mul (local.get 1) (local.get 0))))".repeat(60_000);
    let module = format!("(core module (func $f (param i64 i64) (result i64) {calls} (local.get 0)))");
    wat::parse_str(format!("(component {module})")).expect("it is WebAssembly")
}
