//! What the allocator does with memory that is used no more: it gives it back.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// How much of it glibc may keep at the end of a heap. That it is set matters more than to what: otherwise glibc takes it that what is
/// freed will be wanted again, and raises this limit with each large buffer. Here such buffers, of plugins that are loaded and of first
/// lists, come at the start and then no more.
const KEPT: c_int = 128 << 10;
/// How many heaps there are. glibc would have eight for each core, and each keeps what it has; small things are in a cache of each thread
/// anyway.
const HEAPS: c_int = 2;
/// How long after it is asked for free memory is given back.
const AFTER: Duration = Duration::from_secs(1);

/// Sets both, for the life of the process.
pub fn set_up() {
    #[cfg(target_env = "gnu")]
    #[expect(unsafe_code, reason = "glibc is asked in no other way; it sets numbers of its own")]
    // SAFETY: it may be called at any time, and has no pointer in it.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
    }
}

/// Gives back what is free also in the midst of a heap, in the background: after a plugin was loaded that is several times what is kept
/// of it. Not at once, since whoever allocates has to wait meanwhile, and the parents of that plugin are about to be reconciled; and once
/// for all plugins that come together.
pub fn give_back() {
    static ASKED: AtomicBool = AtomicBool::new(false);
    if ASKED.swap(true, Ordering::Relaxed) {
        return;
    }
    tokio::spawn(async {
        tokio::time::sleep(AFTER).await;
        ASKED.store(false, Ordering::Relaxed);
        tokio::task::spawn_blocking(trim);
    });
}

fn trim() {
    #[cfg(target_env = "gnu")]
    #[expect(unsafe_code, reason = "glibc is asked in no other way; it looks at memory of its own")]
    // SAFETY: it may be called at any time, and touches nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
