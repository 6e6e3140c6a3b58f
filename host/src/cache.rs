//! What is kept on disk for the next start: components that were pulled, and what the compiler made of them.
//!
//! An entry is a file whose name ends with the SHA-256 of its content. It is written beside its place and renamed, never changed, and
//! hashed whenever it is opened: what was cut off, damaged or put there by somebody else is no entry, and is made anew (`C48`). So
//! several hosts may share a directory, of different versions, too. One that is in use is locked, and is not removed for another one.
//!
//! `<directory>/pilothouse/<shelf>/<tenant>/<key>-<checksum>`: whoever brings an entry pays for it with its own quota, and everybody
//! finds it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use sha2::{Digest as _, Sha256};

use crate::identity;

/// Where reconcilers of no namespace keep theirs; no namespace has such a name.
const CLUSTER: &str = "_cluster";
/// A file that is being written begins with this, and is left over if nobody has written to it for so long.
const UNFINISHED: (&str, Duration) = (".", Duration::from_hours(1));

/// See the module's documentation.
#[derive(Debug)]
pub struct Cache {
    directory: PathBuf,
    quotas: Quotas,
}

/// How many bytes each may keep.
#[derive(Clone, Copy, Debug)]
pub struct Quotas {
    /// The ClusterReconcilers together.
    pub cluster: u64,
    /// The Reconcilers of a namespace together.
    pub namespace: u64,
}

/// Why there is no cache.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be made or looked at.
    #[error("failed to use {} as cache (--cache-dir)", .0.display())]
    Directory(PathBuf, #[source] io::Error),
    /// Others could put code there that this host would run.
    #[error(
        "{} belongs to another user, or others may write to it, so it is no place for code that this host runs; remove it, or give \
         another --cache-dir", .0.display()
    )]
    NotOurs(PathBuf),
}

/// Why something is not kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// The file system refuses.
    #[error("failed to write to the cache")]
    Write(#[from] io::Error),
    /// Its tenant may not keep as much.
    #[error("{tenant} may keep {quota} bytes in the cache, and what is in use leaves no room for {size}")]
    Quota {
        /// Whose.
        tenant: String,
        /// How much that is.
        quota: u64,
        /// How large the entry is.
        size: u64,
    },
}

/// A file of the cache, for what is to be removed first.
struct Kept {
    path: PathBuf,
    used: SystemTime,
    size: u64,
}

impl Cache {
    /// The cache below `directory`, made if it is not there.
    ///
    /// # Errors
    /// If it cannot be, or if others could write to it.
    pub fn open(directory: &Path, quotas: Quotas) -> Result<Self, Error> {
        // A folder of our own, since the one that is mounted into a pod is open to everybody.
        let directory = directory.join("pilothouse");
        let failed = |error| Error::Directory(directory.clone(), error);
        make_directory(&directory).map_err(failed)?;
        let metadata = fs::symlink_metadata(&directory).map_err(failed)?;
        let ours = metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw();
        if !ours || metadata.mode() & 0o022 != 0 {
            return Err(Error::NotOurs(directory));
        }
        Ok(Self { directory, quotas })
    }

    /// The entry of this key, whoever brought it: checked, in use as long as the file is open.
    pub fn find(&self, shelf: &str, key: &str) -> Option<File> {
        let prefix = format!("{key}-");
        let tenants = fs::read_dir(self.directory.join(shelf)).ok()?.flatten();
        let mut entries = tenants.filter_map(|tenant| fs::read_dir(tenant.path()).ok()).flatten().flatten();
        entries.find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let checksum = name.strip_prefix(&prefix)?;
            let path = entry.path();
            match open_checked(&path, checksum) {
                Ok(file) => file.or_else(|| {
                    tracing::warn!("{} is damaged, and made anew", path.display());
                    let _ = fs::remove_file(&path);
                    None
                }),
                Err(error) => {
                    tracing::warn!("cannot read {}, which is made anew: {error}", path.display());
                    None
                }
            }
        })
    }

    /// Keeps all of `content`, for the namespace that brings it, or for the cluster; the oldest of its entries that are not in use make room.
    ///
    /// # Errors
    /// If there is no room, or the file system refuses. Nothing depends on it but the time of the next start.
    pub fn keep(
        &self,
        shelf: &str,
        namespace: Option<&str>,
        key: &str,
        content: &mut (impl io::Read + io::Seek),
    ) -> Result<(), KeepError> {
        let size = content.seek(SeekFrom::End(0))?;
        self.make_room(namespace, size)?;
        let directory = self.directory.join(shelf).join(namespace.unwrap_or(CLUSTER));
        make_directory(&directory)?;
        let unfinished = directory.join(format!("{}{:016x}", UNFINISHED.0, fastrand::u64(..)));
        let kept = write(&unfinished, content)
            .and_then(|checksum| fs::rename(&unfinished, directory.join(format!("{key}-{checksum}"))));
        if kept.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        Ok(kept?)
    }

    fn make_room(&self, namespace: Option<&str>, size: u64) -> Result<(), KeepError> {
        let quota = if namespace.is_some() { self.quotas.namespace } else { self.quotas.cluster };
        let tenant = namespace.unwrap_or(CLUSTER);
        let mut kept = self.all_of(tenant)?;
        kept.sort_unstable_by_key(|kept| kept.used);
        let mut total: u64 = kept.iter().map(|kept| kept.size).sum();
        for oldest in kept {
            if total.saturating_add(size) <= quota {
                break;
            }
            if remove_unused(&oldest.path) {
                total -= oldest.size;
            }
        }
        if total.saturating_add(size) > quota {
            return Err(KeepError::Quota { tenant: tenant.to_owned(), quota, size });
        }
        Ok(())
    }

    /// What a tenant keeps, on all shelves: also those of other versions of the host. What was left unfinished goes.
    fn all_of(&self, tenant: &str) -> io::Result<Vec<Kept>> {
        let mut all = Vec::new();
        for shelf in fs::read_dir(&self.directory)? {
            let Ok(entries) = fs::read_dir(shelf?.path().join(tenant)) else { continue };
            for entry in entries.flatten() {
                // Another host may have removed it.
                let Ok(metadata) = entry.metadata() else { continue };
                let (path, used) = (entry.path(), metadata.modified()?);
                let unfinished = entry.file_name().to_string_lossy().starts_with(UNFINISHED.0);
                if unfinished && used.elapsed().is_ok_and(|age| age > UNFINISHED.1) {
                    let _ = fs::remove_file(&path);
                    continue;
                }
                all.push(Kept { path, used, size: metadata.len() });
            }
        }
        Ok(all)
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The checksum of what was written.
fn write(path: &Path, content: &mut (impl io::Read + io::Seek)) -> io::Result<String> {
    content.rewind()?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(path)?;
    let checksum = copy(content, &mut file)?;
    file.flush()?;
    Ok(checksum)
}

/// The file, if its content has this checksum. It is locked from before it is looked at.
fn open_checked(path: &Path, checksum: &str) -> io::Result<Option<File>> {
    let mut file = File::open(path)?;
    file.lock_shared()?;
    if copy(&mut file, &mut io::sink())? != checksum {
        return Ok(None);
    }
    file.rewind()?;
    // For what is to be removed first; where it may not be written, nothing is removed either.
    let _ = file.set_modified(SystemTime::now());
    Ok(Some(file))
}

fn remove_unused(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok() && fs::remove_file(path).is_ok())
}

/// Copies to the end; the SHA-256 of it.
fn copy(from: &mut impl io::Read, to: &mut impl io::Write) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok(identity::hex(&digest.finalize(), 32));
        }
        digest.update(&buffer[..read]);
        to.write_all(&buffer[..read])?;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        io::{Cursor, Read as _},
        os::unix::fs::PermissionsExt as _,
        sync::Arc,
    };

    use super::*;

    const QUOTAS: Quotas = Quotas { cluster: 1000, namespace: 100 };

    /// A folder that is gone at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("pilothouse-cache-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn cache(&self) -> Cache {
            Cache::open(&self.0, QUOTAS).unwrap()
        }

        /// The only entry.
        fn entry(&self) -> PathBuf {
            let mut entries = self.entries();
            assert_eq!(entries.len(), 1, "{entries:?}");
            entries.remove(0)
        }

        fn entries(&self) -> Vec<PathBuf> {
            let tenants = fs::read_dir(self.0.join("pilothouse/shelf")).unwrap();
            tenants
                .flat_map(|tenant| fs::read_dir(tenant.unwrap().path()).unwrap())
                .map(|e| e.unwrap().path())
                .collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn content(bytes: &[u8]) -> Cursor<&[u8]> {
        Cursor::new(bytes)
    }

    fn read(file: Option<File>) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        file?.read_to_end(&mut bytes).unwrap();
        Some(bytes)
    }

    #[test]
    fn what_is_kept_is_found_by_whoever_looks_for_it() {
        let folder = Folder::new("found");
        folder.cache().keep("shelf", Some("team-a"), "key", &mut content(b"one")).unwrap();
        assert_eq!(read(folder.cache().find("shelf", "key")).as_deref(), Some(&b"one"[..]));
        for (shelf, key) in [("shelf", "ke"), ("shelf", "other"), ("other", "key")] {
            assert!(folder.cache().find(shelf, key).is_none(), "{shelf} {key}");
        }
    }

    #[test]
    fn c48_what_is_damaged_cut_off_or_somebody_elses_is_no_entry_and_can_be_made_anew() {
        let folder = Folder::new("damaged");
        let cache = folder.cache();
        let damages: [fn(&Path); 4] = [
            |path| fs::write(path, b"one content, damagee").unwrap(),
            |path| fs::write(path, b"one cont").unwrap(),
            |path| fs::write(path, b"").unwrap(),
            |path| fs::write(path, b"\x7fELF of somebody else").unwrap(),
        ];
        for damage in damages {
            cache.keep("shelf", None, "key", &mut content(b"one content, damaged")).unwrap();
            assert!(cache.find("shelf", "key").is_some());
            damage(&folder.entry());
            assert!(cache.find("shelf", "key").is_none());
            assert!(folder.entries().is_empty(), "it is gone");
        }
        fs::write(folder.0.join("pilothouse/shelf/_cluster/key-nothing"), b"").unwrap();
        assert!(cache.find("shelf", "key").is_none());
    }

    #[test]
    fn c48_two_hosts_share_a_directory() {
        let folder = Folder::new("shared");
        let caches = [Arc::new(folder.cache()), Arc::new(folder.cache())];
        let threads = (0..8_usize).map(|thread| {
            let cache = caches[thread % 2].clone();
            std::thread::spawn(move || {
                for round in 0..50 {
                    let key = format!("key{}", round % 5);
                    cache.keep("shelf", None, &key, &mut content(key.as_bytes())).unwrap();
                    assert_eq!(read(cache.find("shelf", &key)), Some(key.into_bytes()));
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(folder.entries().len(), 5, "each content once, and nothing unfinished");
    }

    #[test]
    fn c48_what_cannot_be_written_is_an_error_and_leaves_what_is_there() {
        let folder = Folder::new("unwritable");
        let cache = folder.cache();
        cache.keep("shelf", None, "key", &mut content(b"one")).unwrap();
        // What a full disk or a read-only one does, also where the user of the tests may write everywhere.
        fs::write(folder.0.join("pilothouse/other"), b"").unwrap();
        assert!(matches!(cache.keep("other", None, "key", &mut content(b"two")), Err(KeepError::Write(_))));
        assert!(cache.find("other", "key").is_none());
        assert!(cache.find("shelf", "key").is_some());
    }

    #[test]
    fn the_oldest_that_is_not_in_use_makes_room_within_the_quota_of_its_tenant() {
        let folder = Folder::new("quota");
        let cache = folder.cache();
        let keep = |namespace, key: &str, size| cache.keep("shelf", namespace, key, &mut content(&vec![b'x'; size]));
        keep(None, "cluster", 90).unwrap();
        keep(Some("b"), "b", 90).unwrap();
        for key in ["first", "second", "third"] {
            keep(Some("a"), key, 30).unwrap();
            // Times of files are not finer everywhere.
            std::thread::sleep(Duration::from_millis(20));
        }
        let in_use = cache.find("shelf", "second").unwrap();
        // Used again, so it is no longer the oldest, and neither is it in use.
        drop(cache.find("shelf", "first"));
        keep(Some("a"), "fourth", 40).unwrap();
        let found = |key| cache.find("shelf", key).is_some();
        assert_eq!(
            ["first", "second", "third", "fourth", "cluster", "b"].map(found),
            [true, true, false, true, true, true]
        );
        let error = keep(Some("a"), "fifth", 80).unwrap_err();
        assert!(error.to_string().starts_with("a may keep 100 bytes"), "{error}");
        assert!(cache.find("shelf", "second").is_some(), "it is in use");
        drop(in_use);
    }

    #[test]
    fn what_a_host_left_unfinished_is_removed() {
        let folder = Folder::new("unfinished");
        let cache = folder.cache();
        cache.keep("shelf", None, "key", &mut content(b"one")).unwrap();
        let unfinished = folder.0.join("pilothouse/shelf/_cluster/.0123");
        fs::write(&unfinished, b"half").unwrap();
        File::options()
            .write(true)
            .open(&unfinished)
            .unwrap()
            .set_modified(SystemTime::now() - UNFINISHED.1 * 2)
            .unwrap();
        cache.keep("shelf", None, "other", &mut content(b"two")).unwrap();
        assert!(!unfinished.exists());
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let folder = Folder::new("open");
        drop(folder.cache());
        assert_eq!(fs::metadata(folder.0.join("pilothouse")).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(folder.0.join("pilothouse"), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(Cache::open(&folder.0, QUOTAS), Err(Error::NotOurs(_))));
        let file = folder.0.join("file");
        fs::write(&file, b"").unwrap();
        assert!(matches!(Cache::open(&file, QUOTAS), Err(Error::Directory(..))));
    }
}
