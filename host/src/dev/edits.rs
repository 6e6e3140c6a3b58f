//! Which edits of a plugin's source there are: told once they are all made, and none of what the compiler and editors write beside it.

use std::{
    collections::{BTreeSet, HashSet},
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _, event::AccessKind, event::AccessMode};
use tokio::sync::mpsc;

/// How long nothing is edited before what was edited counts as one: editors write several files, in several steps.
const SETTLE: Duration = Duration::from_millis(100);
/// How many paths wait to be heard. Of more than these it is enough to know that there are some.
const WAITING: usize = 1024;

/// The folders of a source, watched.
pub(super) struct Edits {
    roots: Vec<PathBuf>,
    told: mpsc::Receiver<PathBuf>,
    watcher: RecommendedWatcher,
    watched: HashSet<PathBuf>,
    /// What was heard of, and not told yet.
    heard: BTreeSet<PathBuf>,
    since: Option<Instant>,
}

/// Files that were edited together.
pub(super) struct Edit {
    pub(super) files: BTreeSet<PathBuf>,
    /// When the first of it was heard of.
    pub(super) since: Instant,
}

impl Edits {
    pub(super) fn of(roots: Vec<PathBuf>) -> Result<Self, notify::Error> {
        let (tell, told) = mpsc::channel(WAITING);
        let watcher = notify::recommended_watcher(move |event: Result<notify::Event, notify::Error>| {
            let Ok(event) = event else { return };
            if is_edit(&event.kind) {
                for path in event.paths {
                    let _ = tell.try_send(path);
                }
            }
        })?;
        let mut edits = Self { roots, told, watcher, watched: HashSet::new(), heard: BTreeSet::new(), since: None };
        edits.watch_folders()?;
        Ok(edits)
    }

    /// The next edits.
    pub(super) async fn next(&mut self) -> Edit {
        loop {
            // An edit that was heard of waits for those that come with it.
            let heard = match self.since {
                None => self.told.recv().await,
                Some(_) => tokio::time::timeout(SETTLE, self.told.recv()).await.ok().flatten(),
            };
            match (heard, self.since) {
                (Some(path), _) => self.hear(path),
                (None, Some(since)) => {
                    // There may be new folders among it. One that cannot be watched is as good as one that is not there.
                    let _ = self.watch_folders();
                    self.since = None;
                    let mut files = std::mem::take(&mut self.heard);
                    // What an editor has written first, to put it in the place of the file.
                    if files.iter().any(|file| file.exists()) {
                        files.retain(|file| file.exists());
                    }
                    return Edit { files, since };
                }
                // The watcher is gone, which it is not before this is.
                (None, None) => return std::future::pending().await,
            }
        }
    }

    /// Whether something was edited that was not told yet.
    pub(super) fn are_there(&mut self) -> bool {
        while let Ok(path) = self.told.try_recv() {
            self.hear(path);
        }
        self.since.is_some()
    }

    fn hear(&mut self, path: PathBuf) {
        if self.roots.iter().filter_map(|root| path.strip_prefix(root).ok()).any(is_source) {
            self.since.get_or_insert_with(Instant::now);
            self.heard.insert(path);
        }
    }

    /// Each folder for itself, since a watch of all that is below one would be told of all that the compiler does.
    fn watch_folders(&mut self) -> Result<(), notify::Error> {
        let found: HashSet<_> = self.roots.iter().flat_map(|root| folders(root)).collect();
        for folder in found.difference(&self.watched) {
            self.watcher.watch(folder, RecursiveMode::NonRecursive)?;
        }
        // A folder that is gone takes its watch with it, and may come again.
        self.watched = found;
        Ok(())
    }
}

fn is_edit(kind: &EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    }
}

/// Whether a path below a root is one of the source: not what a compiler has made of it, and not what an editor writes beside it.
fn is_source(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    // Vim tries out with this one whether it may write. And what this command itself shows may go to a file.
    let beside = name == "4913"
        || name.ends_with('~')
        || ["swp", "swx", "tmp", "part", "wasm", "log", "out"].contains(&extension);
    !beside && path.iter().all(|part| part.to_str().is_some_and(|part| !part.starts_with('.') && part != "target"))
}

/// A folder with all in it that may have source.
fn folders(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![root.to_owned()];
    let mut next = 0;
    while let Some(folder) = found.get(next) {
        next += 1;
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        // Cargo marks its target folders so, whatever they are called.
        let inner = inner.map(|entry| entry.path()).filter(|path| !path.join("CACHEDIR.TAG").exists());
        let inner: Vec<_> = inner.filter(|path| path.strip_prefix(root).is_ok_and(is_source)).collect();
        found.extend(inner);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_compiler_and_editors_write_is_no_source() {
        for source in ["src/lib.rs", "Cargo.toml", "crd.json", "go.mod", "src/a/b.txt"] {
            assert!(is_source(Path::new(source)), "{source}");
        }
        for other in
            ["target/debug/x", "src/.lib.rs.swp", "src/lib.rs~", ".git/index", "src/4913", "plugin.wasm", "dev.log", ""]
        {
            assert!(!is_source(Path::new(other)), "{other}");
        }
    }

    #[tokio::test]
    async fn edits_that_are_made_together_are_told_together_also_those_in_a_new_folder() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("src")).unwrap();
        fs::create_dir_all(root.join("built")).unwrap();
        fs::write(root.join("built/CACHEDIR.TAG"), "").unwrap();
        let mut edits = Edits::of(vec![root.clone()]).unwrap();
        assert!(!edits.are_there());
        let within = async |edits: &mut Edits| {
            let edit = tokio::time::timeout(Duration::from_secs(10), edits.next()).await.unwrap();
            edit.files.iter().map(|file| file.strip_prefix(&root).unwrap().display().to_string()).collect::<Vec<_>>()
        };
        fs::write(root.join("built/lib.rs"), "").unwrap();
        fs::write(root.join("src/lib.rs"), "a").unwrap();
        fs::write(root.join("src/new.rs.tmp"), "b").unwrap();
        fs::rename(root.join("src/new.rs.tmp"), root.join("src/new.rs")).unwrap();
        assert_eq!(within(&mut edits).await, ["src/lib.rs", "src/new.rs"]);
        fs::create_dir(root.join("src/inner")).unwrap();
        assert_eq!(within(&mut edits).await, ["src/inner"]);
        fs::write(root.join("src/inner/mod.rs"), "c").unwrap();
        assert_eq!(within(&mut edits).await, ["src/inner/mod.rs"]);
        fs::write(root.join("src/lib.rs"), "d").unwrap();
        tokio::time::timeout(Duration::from_secs(10), async {
            while !edits.are_there() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
        assert_eq!(within(&mut edits).await, ["src/lib.rs"]);
    }
}
