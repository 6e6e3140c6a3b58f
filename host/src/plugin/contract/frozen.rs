//! What was promised with a release: its folder of the contract never changes, and components that were built from it load for ever.
//!
//! `released.sha256` beside the folders says which versions are released, as `sha256sum` writes it; a folder that is not in it is a
//! draft. `tests/contract/fixtures` has components of each that is. All of this is checked on the contract itself, and on a version that
//! never was, in `tests/contract`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sha2::{Digest as _, Sha256};

use super::{Error, SERVED, choose, minor, served, v0_0};
use crate::{
    identity,
    plugin::{CallLimits, Cleanup, Engine, Failure, LoadError, Next, Plugin, Request, Surface, none_related},
    telemetry,
};

const LIMITS: CallLimits = CallLimits { memory: 64 << 20, timeout: Duration::from_secs(5), output: 4 << 20 };

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The versions that `released.sha256` lists, with the hash of each file.
fn released(list: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut versions = BTreeMap::<_, BTreeMap<_, _>>::new();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let (hash, path) = line.split_once("  ").expect("a line is as sha256sum writes it");
        let (version, file) = path.split_once('/').expect("a file is in the folder of its version");
        versions.entry(version.to_owned()).or_default().insert(file.to_owned(), hash.to_owned());
    }
    versions
}

/// What has changed of what was released, by path.
fn changed(contract: &Path, list: &str) -> Vec<String> {
    let mut changed = Vec::new();
    for (version, files) in released(list) {
        let now: BTreeMap<_, _> = names(&contract.join(&version))
            .into_iter()
            .map(|file| (file.clone(), fs::read(contract.join(&version).join(&file)).unwrap()))
            .map(|(file, bytes)| (file, identity::hex(&Sha256::digest(bytes), 32)))
            .collect();
        let all = files.keys().chain(now.keys()).collect::<BTreeSet<_>>();
        changed.extend(
            all.iter().filter(|file| files.get(**file) != now.get(**file)).map(|file| format!("{version}/{file}")),
        );
    }
    changed
}

fn list(contract: &Path) -> String {
    fs::read_to_string(contract.join("released.sha256")).unwrap()
}

async fn load(engine: &Arc<Engine>, bytes: Vec<u8>) -> Result<Plugin, LoadError> {
    Plugin::load(engine, None, bytes, LIMITS, Arc::default()).await
}

fn request(parent: &str) -> Request {
    let empty = || "{}".to_owned();
    let parent = parent.to_owned();
    Request { parent, config: empty(), context: empty(), ..Request::default() }
}

#[test]
fn c49_a_released_version_never_changes_and_the_newest_is_served() {
    for contract in ["wit", "tests/contract"].map(folder) {
        assert_eq!(
            changed(&contract, &list(&contract)),
            [""; 0],
            "{}: a released version is frozen",
            contract.display()
        );
    }
    let contract = folder("wit");
    let versions: Vec<_> = names(&contract).into_iter().filter(|name| contract.join(name).is_dir()).collect();
    let released = released(&list(&contract));
    let drafts: Vec<_> = versions.iter().filter(|version| !released.contains_key(*version)).collect();
    assert!(drafts.len() <= 1, "of these at most one is a draft, and the others were not released: {drafts:?}");
    let number = |version: &str| version.split('.').map(|part| part.parse::<u32>().unwrap()).collect::<Vec<_>>();
    for version in &versions {
        let newest = versions.iter().filter(|other| minor(other) == minor(version)).max_by_key(|other| number(other));
        let serves = SERVED.iter().find(|served| minor(served.version) == minor(version));
        // A minor that is older than the one before the newest may be given up.
        if let Some(serves) = serves {
            assert_eq!(Some(serves.version), newest.map(String::as_str), "a minor is served by its newest patch");
        }
    }
    let newest = versions.iter().max_by_key(|version| number(version)).unwrap();
    assert_eq!(served()[0], newest, "the newest version is served, and named first");
}

#[test]
fn c49_what_was_changed_after_the_release_is_named() {
    let contract = std::env::temp_dir().join(format!("pilothouse-frozen-{}", std::process::id()));
    fs::create_dir_all(contract.join("1.0.0")).unwrap();
    for file in ["same.wit", "edited.wit", "gone.wit"] {
        fs::write(contract.join("1.0.0").join(file), file).unwrap();
    }
    let hash = |text: &str| identity::hex(&Sha256::digest(text), 32);
    let list: String =
        ["same.wit", "edited.wit", "gone.wit"].map(|file| format!("{}  1.0.0/{file}\n", hash(file))).concat();
    assert_eq!(changed(&contract, &list), [""; 0]);
    fs::write(contract.join("1.0.0/edited.wit"), "edited.wiT").unwrap();
    fs::write(contract.join("1.0.0/new.wit"), "new").unwrap();
    fs::remove_file(contract.join("1.0.0/gone.wit")).unwrap();
    let changed = changed(&contract, &list);
    fs::remove_dir_all(&contract).unwrap();
    assert_eq!(changed, ["1.0.0/edited.wit", "1.0.0/gone.wit", "1.0.0/new.wit"]);
}

/// `UPDATE_FIXTURES=1` writes that of the version that never was; those of a release are built by its SDK, and copied.
#[tokio::test]
async fn c49_components_of_every_released_version_load_for_ever() {
    let fixtures = folder("tests/contract/fixtures");
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs::create_dir_all(fixtures.join("0.0.9")).unwrap();
        fs::write(fixtures.join("0.0.9/text.wasm"), v0_0::guest()).unwrap();
    }
    let engine = Arc::new(Engine::new(1 << 30).unwrap());
    for contract in ["wit", "tests/contract"].map(folder) {
        for version in released(&list(&contract)).keys() {
            let components = names(&fixtures.join(version));
            assert!(!components.is_empty(), "{version} is released: keep a component of it in tests/contract/fixtures");
            for component in components {
                let bytes = fs::read(fixtures.join(version).join(&component)).unwrap();
                let loaded = load(&engine, bytes).await;
                assert!(loaded.is_ok(), "{version}/{component}: {}", telemetry::chain(&loaded.err().unwrap()));
            }
        }
    }
}

#[tokio::test]
async fn c49_a_plugin_of_the_version_before_is_called_in_it_and_answers_in_the_newest() {
    let engine = Arc::new(Engine::new(1 << 30).unwrap());
    let plugin = load(&engine, v0_0::guest()).await.unwrap();
    let answer = plugin.reconcile(request("{}"), none_related, LIMITS).await.unwrap().unwrap();
    assert_eq!((answer.children.len(), answer.children[0].options.as_str(), answer.extra.as_str()), (1, "{}", "{}"));
    assert_eq!(answer.next, Next::After(Duration::from_secs(5)));
    let failure = plugin.reconcile(request("!"), none_related, LIMITS).await.unwrap().unwrap_err();
    assert_eq!(failure, Failure::Terminal("!".to_owned()));
    assert!(plugin.has_finalizer());
    let cleanup = plugin.finalize(request("{}"), none_related, LIMITS).await.unwrap().unwrap().unwrap();
    assert_eq!((cleanup.cleanup, cleanup.children), (Cleanup::Waiting(Duration::from_secs(7)), None));
}

#[test]
fn c49_a_plugin_is_called_in_the_newest_version_that_it_exports_whole() {
    let choose = |exports: &[&str]| {
        let exports = exports.iter().map(|export| format!("pilothouse:plugin/{export}")).collect();
        let surface = Surface { format: crate::plugin::Format::Component, imports: Vec::new(), exports };
        choose(&surface).map(|version| version.version).map_err(|error| error.to_string())
    };
    assert_eq!(choose(&["reconciler@0.1.0", "finalizer@0.1.0"]), Ok("0.1.0"));
    assert_eq!(choose(&["reconciler@0.0.9"]), Ok("0.0.9"));
    assert_eq!(choose(&["reconciler@0.0.9", "reconciler@0.1.0"]), Ok("0.1.0"));
    assert_eq!(choose(&["reconciler@0.1.7"]), Ok("0.1.0"), "a newer patch exports the same");
    let refused = |exports| choose(exports).unwrap_err();
    let unknown = "the plugin exports pilothouse:plugin/reconciler@0.2.0, which this host does not know; it serves \
                   pilothouse:plugin@0.1.0, 0.0.9: reconciler, finalizer, relations";
    assert_eq!(refused(&["reconciler@0.2.0"]), unknown);
    let two =
        "the plugin exports pilothouse:plugin/finalizer@0.0.9, but its reconciler in 0.1.0: export both in one version";
    assert_eq!(refused(&["finalizer@0.0.9", "reconciler@0.1.0"]), two);
    let none = "the plugin does not export pilothouse:plugin/reconciler@0.1.0 or @0.0.9; it exports nothing";
    assert_eq!(refused(&[]), none);
    assert!(matches!(
        super::choose(&Surface {
            format: crate::plugin::Format::Component,
            imports: Vec::new(),
            exports: vec!["pilothouse:plugin/teapot@0.1.0".to_owned()]
        }),
        Err(Error::UnknownExport { .. })
    ));
}
