//! Until when this host may begin requests. The term is checked when a request begins and each time that it goes on, so that a
//! process that slept (`SIGSTOP`, a machine that was suspended, a paused VM) sends nothing that it was about to send when it wakes.
//!
//! What the API server was sent before cannot be called back. It is fenced there: deletes and finalizers test the UID, and an apply
//! that comes late is seen, and undone, by whoever leads then.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::Request;
use rustix::time::{ClockId, clock_gettime};
use tower::{BoxError, Layer, Service};

const NOT_BEGUN: u64 = 0;
const OVER: u64 = 1;
const ENDLESS: u64 = u64::MAX;

/// The time since the machine was booted. It goes on while the machine is suspended, as `Instant` does not, and does not jump, as the
/// time of day does.
pub(super) fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    // The kernel's numbers are never negative.
    Duration::new(now.tv_sec.try_into().unwrap_or_default(), now.tv_nsec.try_into().unwrap_or_default())
}

/// A request that may not be sent.
#[derive(Debug, thiserror::Error)]
#[error("this host does not lead, so it sends nothing")]
struct NotLeading;

/// The time in which this host leads. Clones are the same term.
#[derive(Clone)]
pub struct Term(Arc<AtomicU64>);

impl Term {
    /// The term of a host that needs no Lease.
    pub fn endless() -> Self {
        Self(Arc::new(ENDLESS.into()))
    }

    /// The term of a host that does not lead yet.
    pub fn not_begun() -> Self {
        Self(Arc::new(NOT_BEGUN.into()))
    }

    /// Whether the host leads now.
    pub fn is_on(&self) -> bool {
        now_nanos() < self.0.load(Ordering::Acquire)
    }

    /// How much is left of it; none if it has not begun, or is over.
    pub(super) fn left(&self) -> Option<Duration> {
        let until = Duration::from_nanos(self.0.load(Ordering::Acquire));
        until.checked_sub(now()).filter(|left| !left.is_zero())
    }

    /// Begins or extends it. A term that is over stays over.
    pub(super) fn extend(&self, until: Duration) {
        let until = nanos(until);
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |before| {
            (before == NOT_BEGUN || now_nanos() < before).then_some(until)
        });
    }

    /// Ends it, before its time.
    pub(super) fn end(&self) {
        self.0.store(OVER, Ordering::Release);
    }
}

fn now_nanos() -> u64 {
    nanos(now())
}

fn nanos(time: Duration) -> u64 {
    // Enough for 584 years.
    u64::try_from(time.as_nanos()).unwrap_or(ENDLESS)
}

impl<S> Layer<S> for Term {
    type Service = WithinTerm<S>;

    fn layer(&self, inner: S) -> WithinTerm<S> {
        WithinTerm { term: self.clone(), inner }
    }
}

/// A client that sends within the term only.
#[derive(Clone)]
pub struct WithinTerm<S> {
    term: Term,
    inner: S,
}

impl<S, B> Service<Request<B>> for WithinTerm<S>
where
    S: Service<Request<B>, Error = BoxError>,
    S::Future: Unpin,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Sending<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let sending = self.term.is_on().then(|| self.inner.call(request));
        Sending { term: self.term.clone(), sending }
    }
}

/// A request on its way: connecting, waiting for a connection or for its answer, or for another try.
pub struct Sending<F> {
    term: Term,
    sending: Option<F>,
}

impl<F, T> Future for Sending<F>
where
    F: Future<Output = Result<T, BoxError>> + Unpin,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        match &mut this.sending {
            Some(sending) if this.term.is_on() => Pin::new(sending).poll(context),
            _ => {
                // Not even what waits for a connection goes on.
                this.sending = None;
                Poll::Ready(Err(NotLeading.into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{Ready, ready},
        sync::atomic::AtomicUsize,
    };

    use tower::service_fn;

    use super::*;

    #[test]
    fn a_term_begins_is_extended_and_ends_for_good() {
        let hour = Duration::from_secs(3600);
        let term = Term::not_begun();
        assert!(!term.is_on());
        term.extend(now() + hour);
        assert!(term.is_on());
        term.extend(now() + 2 * hour);
        assert!(term.left().unwrap() > hour);
        term.end();
        assert!(!term.is_on() && term.left().is_none());
        term.extend(now() + hour);
        assert!(!term.is_on(), "it is over");

        let missed = Term::not_begun();
        missed.extend(now().saturating_sub(Duration::from_millis(1)));
        assert!(!missed.is_on() && missed.left().is_none());
        missed.extend(now() + hour);
        assert!(!missed.is_on(), "a late answer does not bring it back");

        assert!(Term::endless().is_on());
    }

    #[tokio::test]
    async fn a_request_neither_begins_nor_goes_on_out_of_term() {
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = sent.clone();
        let send = move |_: Request<()>| -> Ready<Result<(), BoxError>> {
            counted.fetch_add(1, Ordering::SeqCst);
            ready(Ok(()))
        };
        let term = Term::not_begun();
        let mut client = term.layer(service_fn(send));
        assert!(client.call(Request::new(())).await.is_err());
        assert_eq!(sent.load(Ordering::SeqCst), 0);
        term.extend(now() + Duration::from_secs(3600));
        assert!(client.call(Request::new(())).await.is_ok());
        let on_its_way = client.call(Request::new(()));
        term.end();
        let error = on_its_way.await.err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("this host does not lead, so it sends nothing"));
        assert!(client.call(Request::new(())).await.is_err());
        assert_eq!(sent.load(Ordering::SeqCst), 2);
    }
}
