//! What the calls of one reconciler may reach outside of their guest: its grants as they are now, and by what means.
//!
//! Grants are no part of a revision: a plugin is linked with all capabilities, loaded only if what it imports is granted, and asked again
//! at each use of one. What waits for the network runs on the host's threads, never on those of the guests.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::{kube::Reader, sql::Pools};
use crate::{
    crd::{Grants, SecretRef},
    metrics::Calls,
    secrets::Secrets,
};

/// How many different refusals of one reconciler are logged; the metric counts all.
const LOGGED: usize = 100;

/// See the module's documentation. The default reaches nothing.
#[derive(Default)]
pub struct Access {
    grants: RwLock<Arc<Grants>>,
    /// The Secrets that the plugin may see, as the service account may.
    readable: RwLock<Arc<[SecretRef]>>,
    reader: RwLock<Option<Arc<Reader>>>,
    calls: Arc<Calls>,
    means: Option<Means>,
    refused: Mutex<HashSet<String>>,
}

/// Whether calls of a plugin may have changed something outside: how often they have used a capability that could, but for when certainly
/// nothing came of it. What a call that was ended has begun counts.
#[derive(Clone, Debug, Default)]
pub struct Reached(Arc<AtomicUsize>);

impl Reached {
    /// Whether they may have.
    pub fn anything(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

/// By what a host reaches something.
struct Means {
    /// The host's threads.
    threads: Handle,
    secrets: Arc<Secrets>,
    databases: Pools,
}

impl Access {
    /// That of a reconciler whose calls are counted in `calls`, and whose Secrets are these. To be called on the host's threads.
    pub fn new(calls: Arc<Calls>, secrets: Arc<Secrets>) -> Self {
        let means = Means { threads: Handle::current(), secrets, databases: Pools::default() };
        Self { calls, means: Some(means), ..Self::default() }
    }

    /// What is granted now.
    pub fn grants(&self) -> Arc<Grants> {
        self.grants.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Grants something else, from the next use of a capability on. Beside the Secrets that grants name the reconciler itself uses these.
    pub fn grant(&self, grants: Grants, own: &[SecretRef]) {
        if let Some(means) = &self.means {
            means.secrets.follow(grants.secrets());
            means.databases.keep(&grants.sql);
        }
        *self.readable.write().unwrap_or_else(PoisonError::into_inner) = grants.readable_secrets(own).into();
        *self.grants.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(grants);
    }

    /// The Secrets that the plugin may see now, as far as the service account may.
    pub fn readable_secrets(&self) -> Arc<[SecretRef]> {
        self.readable.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// By whom the API server is read for the plugin from now on; none: it is not.
    pub fn read_as(&self, reader: Option<Reader>) {
        *self.reader.write().unwrap_or_else(PoisonError::into_inner) = reader.map(Arc::new);
    }

    /// By whom the API server is read for the plugin now.
    pub(super) fn reader(&self) -> Option<Arc<Reader>> {
        self.reader.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where the calls of the plugin are counted.
    pub(crate) fn calls(&self) -> &Arc<Calls> {
        &self.calls
    }

    /// The Secrets that its grants name; none where there is no cluster.
    pub(super) fn secrets(&self) -> Option<&Secrets> {
        self.means.as_ref().map(|means| &*means.secrets)
    }

    /// The connections to the databases of its grants; none where there is no network.
    pub(super) fn databases(&self) -> Option<&Pools> {
        self.means.as_ref().map(|means| &means.databases)
    }

    /// Runs what waits for the network on the host's threads. It ends with the call that waits for it. None: it panicked, or there is no
    /// network for this plugin.
    pub(super) async fn on_host<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let threads = &self.means.as_ref()?.threads;
        AbortOnDropHandle::new(threads.spawn(work.in_current_span())).await.ok()
    }

    /// A capability was used, and it came to this: `ok`, or the name of the error in the contract. A refusal is logged, each once.
    pub(super) fn note(&self, capability: &'static str, outcome: &'static str, refusal: Option<&str>) {
        self.calls.note_use(capability, outcome);
        let Some(refusal) = refusal else { return };
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.len() < LOGGED && refused.insert(format!("{capability} {refusal}")) {
            tracing::warn!(capability, "refused to a plugin: {refusal}");
        }
    }
}

/// What one call may reach.
pub(crate) struct Outside {
    access: Arc<Access>,
    reached: Reached,
    is_preview: bool,
    /// The largest answer, in bytes.
    output: usize,
    touched: Option<&'static str>,
    lacks: Option<String>,
}

impl Outside {
    /// `output` is `limits.output` of the call.
    pub(crate) fn new(access: Arc<Access>, is_preview: bool, output: usize) -> Self {
        Self { access, reached: Reached::default(), is_preview, output, touched: None, lacks: None }
    }

    /// The same, for a call that keeps in mind there what it may have changed.
    pub(crate) fn keeping(self, reached: Reached) -> Self {
        Self { reached, ..self }
    }

    /// The largest answer that the plugin takes, in bytes.
    pub(super) fn output(&self) -> usize {
        self.output
    }

    /// The capability that a preview has tried to use, and that could change something outside.
    pub(crate) fn touched(&self) -> Option<&'static str> {
        self.touched
    }

    /// The credentials that it could not use, for want of a Secret.
    pub(crate) fn lacks(&self) -> Option<&str> {
        self.lacks.as_deref()
    }

    /// Credentials cannot be had: what the plugin makes of it is no failure of its own. The message for it.
    pub(super) fn note_lack(&mut self, error: &impl fmt::Display) -> String {
        let message = error.to_string();
        self.lacks.get_or_insert_with(|| message.clone());
        message
    }

    /// What the call may reach, whatever it is for.
    pub(super) fn to_read(&self) -> &Arc<Access> {
        &self.access
    }

    /// What the call may reach by a capability that could change something outside: nothing in a preview, and that it has tried is kept
    /// in mind, whatever the plugin makes of it.
    #[expect(clippy::wrong_self_convention, reason = "it is no conversion")]
    pub(super) fn to_change(&mut self, capability: &'static str) -> Result<&Arc<Access>, &'static str> {
        if self.is_preview {
            self.touched = Some(capability);
            return Err("this is a preview: nothing outside of the cluster is touched");
        }
        self.reached.0.fetch_add(1, Ordering::SeqCst);
        Ok(&self.access)
    }

    /// Certainly nothing has come of what was [begun](Self::to_change): it was not sent, or was refused.
    pub(super) fn note_vain(&mut self) {
        self.reached.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_to_nothing_has_changed_nothing_and_what_was_cut_off_may_have() {
        let reached = Reached::default();
        let mut outside = Outside::new(Arc::default(), false, 0).keeping(reached.clone());
        for _ in 0..3 {
            outside.to_change("sql").expect("it is no preview");
            assert!(reached.anything(), "it is under way");
            outside.note_vain();
        }
        assert!(!reached.anything());
        // The call has ended before the answer was there.
        outside.to_change("sql").expect("it is no preview");
        drop(outside);
        assert!(reached.anything());
        let mut outside = Outside::new(Arc::default(), false, 0).keeping(reached.clone());
        outside.to_change("sql").expect("it is no preview");
        outside.note_vain();
        assert!(reached.anything(), "for good");
    }

    #[test]
    fn a_preview_touches_nothing_and_it_is_kept_in_mind_that_it_tried() {
        let reached = Reached::default();
        let mut outside = Outside::new(Arc::default(), true, 0).keeping(reached.clone());
        assert_eq!(outside.touched(), None);
        assert!(outside.to_change("http").is_err());
        assert_eq!(outside.touched(), Some("http"));
        assert!(!reached.anything());
    }
}
