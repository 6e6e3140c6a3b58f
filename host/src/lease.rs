//! Which of several hosts is at work: the one that holds a Lease, by the rules of client-go. The others stand by.
//!
//! Times of two machines are never compared. A holder is taken for dead when its Lease, as we see it, has not changed for as long as
//! it said. `decide` tells what to do with a Lease that looks so; [`Election`] does it.
//!
//! A leader that has not renewed its Lease for the renew deadline has lost it, whatever the Lease says, and ends at once. That is well
//! before anybody else can have it, and until then its [`Term`] keeps it from sending anything. Who leads next begins from nothing: it
//! lists everything, and reconciles each parent. For the same reason a standby watches nothing before it leads: it is a process that
//! runs, with its engine set up, and looks at the Lease.

use std::{fs, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

mod term;

pub use self::term::Term;
use self::term::now;
use crate::{lookup, telemetry};

/// The name of the Lease: `deploy/host.yaml` lets the host write this one.
pub const NAME: &str = "pilothouse";
/// Where the Lease is, if not in the namespace of the pod.
pub const NAMESPACE: &str = "pilothouse-system";
/// Where the kubelet writes the namespace of a pod.
const POD_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// How long what may take: the flags `--leader-election-…`.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long the others wait for a holder that is silent.
    pub lease_duration: Duration,
    /// How long a holder leads without having renewed.
    pub renew_deadline: Duration,
    /// How long everybody waits before they look again.
    pub retry_period: Duration,
}

/// Times that would let two hosts lead, or none for long.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTiming {
    /// The next one would begin before the former one has stopped.
    #[error(
        "--leader-election-lease-duration ({lease_duration:?}) has to be longer than --leader-election-renew-deadline \
         ({renew_deadline:?}): what is on its way at the deadline needs time to arrive"
    )]
    Lease {
        /// As it is.
        lease_duration: Duration,
        /// As it is.
        renew_deadline: Duration,
    },
    /// One failure would be the end.
    #[error(
        "--leader-election-renew-deadline ({renew_deadline:?}) has to be at least twice --leader-election-retry-period \
         ({retry_period:?}), for a second try"
    )]
    Retry {
        /// As it is.
        renew_deadline: Duration,
        /// As it is.
        retry_period: Duration,
    },
}

impl Timing {
    /// The times, if they go together.
    ///
    /// # Errors
    /// If they do not.
    pub fn checked(self) -> Result<Self, BadTiming> {
        let Self { lease_duration, renew_deadline, retry_period } = self;
        if lease_duration <= renew_deadline {
            return Err(BadTiming::Lease { lease_duration, renew_deadline });
        }
        if renew_deadline < 2 * retry_period {
            return Err(BadTiming::Retry { renew_deadline, retry_period });
        }
        Ok(self)
    }
}

/// Why this host no longer leads.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// It could not say in time that it lives, or it slept.
    #[error("the Lease was not renewed within {0:?} (--leader-election-renew-deadline)")]
    Deadline(Duration),
    /// Somebody has taken it, or taken it away.
    #[error("the Lease is no longer ours; its holder is {0}")]
    Taken(String),
}

/// A Lease as it is seen.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    spec: LeaseSpec,
    /// When it was first seen to be so.
    since: Duration,
}

impl Seen {
    fn again(before: Option<Self>, spec: LeaseSpec, now: Duration) -> Self {
        before.filter(|before| before.spec == spec).unwrap_or(Self { spec, since: now })
    }
}

/// What to do about the Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// There is none: make it.
    Create,
    /// Nobody holds it, or nobody who lives.
    Take,
    /// It is ours.
    Renew,
    /// It is somebody else's.
    Wait,
    /// It was ours.
    Lose,
}

/// What `identity` does about the Lease that it sees, given whether it leads. Pure.
fn decide(seen: Option<&Seen>, identity: &str, leads: bool, lease_duration: Duration, now: Duration) -> Step {
    let holder = seen.map(|seen| holder(&seen.spec));
    if holder == Some(identity) {
        return Step::Renew;
    }
    // Even if nobody has it now: somebody may have had it in between.
    if leads {
        return Step::Lose;
    }
    match (seen, holder) {
        (None, _) => Step::Create,
        (_, Some("")) => Step::Take,
        (Some(seen), _) => {
            let promised = seen.spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
            let promised = promised.map_or(lease_duration, Duration::from_secs);
            if now.saturating_sub(seen.since) < promised { Step::Wait } else { Step::Take }
        }
    }
}

/// Who holds it; empty if nobody does.
fn holder(spec: &LeaseSpec) -> &str {
    spec.holder_identity.as_deref().unwrap_or_default()
}

/// The Lease as `identity` writes it: `before` is what is there.
fn held(before: LeaseSpec, identity: &str, lease_duration: Duration, time: Timestamp) -> LeaseSpec {
    let again = holder(&before) == identity;
    let transitions = before.lease_transitions.map_or(0, |count| if again { count } else { count.saturating_add(1) });
    // Whole seconds, and rather too many.
    let seconds = lease_duration.as_millis().div_ceil(1000);
    LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: Some(seconds.try_into().unwrap_or(i32::MAX)),
        acquire_time: if again { before.acquire_time } else { Some(MicroTime(time)) },
        renew_time: Some(MicroTime(time)),
        lease_transitions: Some(transitions),
        ..before
    }
}

/// Who is at work, by the Lease in `namespace`. None: nobody holds it, or has renewed it for as long as it says, which takes that long to
/// see.
///
/// # Errors
/// If the Lease cannot be read.
pub async fn at_work(client: Client, namespace: &str) -> Result<Option<String>, kube::Error> {
    let api = Api::<Lease>::namespaced(client, namespace);
    let mut seen: Option<Seen> = None;
    loop {
        let Some(lease) = lookup::get(&api, NAME).await? else { return Ok(None) };
        let (before, now) = (seen.take(), now());
        let since = before.as_ref().map(|before| before.since);
        let current = Seen::again(before, lease.spec.unwrap_or_default(), now);
        if holder(&current.spec).is_empty() || decide(Some(&current), "", false, USUAL, now) != Step::Wait {
            return Ok(None);
        }
        if since.is_some_and(|since| since != current.since) {
            return Ok(Some(holder(&current.spec).to_owned()));
        }
        seen = Some(current);
        sleep(Duration::from_secs(1)).await;
    }
}

/// How long a holder is waited for that does not say how long; see the flags.
const USUAL: Duration = Duration::from_secs(15);

/// A host that stands for election.
pub struct Election {
    api: Api<Lease>,
    identity: String,
    timing: Timing,
    term: Term,
    leads: bool,
    seen: Option<Seen>,
    /// The Lease as our last write has left it, unless something failed since: it can be written without a look.
    current: Option<Lease>,
}

/// The namespace of the host: the one that it is told, or that of its pod.
pub fn home(told: Option<String>) -> String {
    told.or_else(|| read(POD_NAMESPACE)).unwrap_or(NAMESPACE.to_owned())
}

fn read(file: &str) -> Option<String> {
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

impl Election {
    /// An election by the Lease in `namespace`; by default that of the pod. `client` may send out of term.
    pub fn new(client: Client, namespace: Option<String>, timing: Timing, term: Term) -> Self {
        let namespace = home(namespace);
        // The name of a pod. With a number, since a container that starts again is another host in the same pod.
        let machine = read("/proc/sys/kernel/hostname").unwrap_or_default();
        let identity = format!("{}_{:016x}", machine, fastrand::u64(..));
        let api = Api::namespaced(client, &namespace);
        Self { api, identity, timing, term, leads: false, seen: None, current: None }
    }

    /// Returns when this host leads. `standby` becomes true when somebody else does.
    pub async fn acquire(&mut self, standby: &watch::Sender<bool>) {
        let mut known = String::new();
        loop {
            match timeout(self.patience(), self.round()).await {
                Ok(Ok(Step::Wait)) => {
                    let leader = self.seen.as_ref().map(|seen| holder(&seen.spec)).unwrap_or_default();
                    if known != leader {
                        leader.clone_into(&mut known);
                        tracing::info!(leader, identity = self.identity, "standing by");
                    }
                    standby.send_replace(true);
                }
                Ok(Ok(_)) => {
                    tracing::info!(identity = self.identity, "leading");
                    return;
                }
                // Somebody was faster.
                Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
                failed => self.warn(failed.map(|result| result.err())),
            }
            // Not all at the same time.
            sleep(self.timing.retry_period.mul_f64(1.0 + 0.2 * fastrand::f64())).await;
        }
    }

    /// Renews the Lease until it is lost.
    pub async fn hold(&mut self) -> Lost {
        loop {
            let Some(left) = self.term.left() else { return Lost::Deadline(self.timing.renew_deadline) };
            sleep(self.timing.retry_period.min(left)).await;
            let Some(left) = self.term.left() else { return Lost::Deadline(self.timing.renew_deadline) };
            match timeout(self.patience().min(left), self.round()).await {
                Ok(Ok(Step::Lose)) => {
                    let holder = match self.seen.as_ref().map(|seen| holder(&seen.spec)) {
                        None | Some("") => "nobody",
                        Some(holder) => holder,
                    };
                    return Lost::Taken(holder.to_owned());
                }
                Ok(Ok(_)) => {}
                failed => self.warn(failed.map(|result| result.err())),
            }
        }
    }

    /// Lets the next one have the Lease at once. Nothing of this host's work may be left to do.
    pub async fn release(self) {
        self.term.end();
        let release = async {
            let Some(mut lease) = lookup::get(&self.api, NAME).await? else { return Ok(()) };
            let before = lease.spec.unwrap_or_default();
            if holder(&before) != self.identity {
                return Ok(());
            }
            let time = Some(MicroTime(Timestamp::now()));
            lease.spec = Some(LeaseSpec { holder_identity: None, renew_time: time, ..before });
            self.api.replace(NAME, &PostParams::default(), &lease).await?;
            tracing::info!("the Lease is free");
            Ok(())
        };
        match timeout(self.patience(), release).await {
            Ok(Ok(())) => {}
            failed => self.warn(failed.map(|result| result.err())),
        }
    }

    /// How long a request may take: there has to be time for another.
    fn patience(&self) -> Duration {
        self.timing.renew_deadline / 2
    }

    fn warn<E>(&self, failed: Result<Option<kube::Error>, E>) {
        let why = match failed {
            Ok(error) => error.map(|error| telemetry::chain(&error)).unwrap_or_default(),
            Err(_) => format!("no answer within {:?}", self.patience()),
        };
        tracing::warn!("cannot read or write the Lease {NAME} (see host/deploy/host.yaml for its Role): {why}");
    }

    /// Looks at the Lease, and does what is to be done about it.
    async fn round(&mut self) -> Result<Step, kube::Error> {
        let lease = match self.current.take() {
            Some(lease) => Some(lease),
            None => lookup::get(&self.api, NAME).await?,
        };
        // Before it is sent: the others count from when they see it.
        let now = now();
        let before = self.seen.take();
        self.seen = lease.as_ref().map(|lease| Seen::again(before, lease.spec.clone().unwrap_or_default(), now));
        let step = decide(self.seen.as_ref(), &self.identity, self.leads, self.timing.lease_duration, now);
        let written = |before: Option<LeaseSpec>| {
            Some(held(before.unwrap_or_default(), &self.identity, self.timing.lease_duration, Timestamp::now()))
        };
        let params = PostParams::default();
        let answer = match (step, lease) {
            (Step::Wait, _) => return Ok(step),
            (Step::Lose, _) => {
                self.term.end();
                return Ok(step);
            }
            (_, None) => {
                let metadata = ObjectMeta { name: Some(NAME.to_owned()), ..ObjectMeta::default() };
                self.api.create(&params, &Lease { metadata, spec: written(None) }).await?
            }
            // Its resourceVersion is in it: refused if anybody has written in between.
            (_, Some(Lease { metadata, spec })) => {
                self.api.replace(NAME, &params, &Lease { metadata, spec: written(spec) }).await?
            }
        };
        self.current = Some(answer);
        self.leads = true;
        self.term.extend(now + self.timing.renew_deadline);
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(1_000_000 + seconds)
    }

    fn time(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    fn seen(holder: &str, renewed: i64, since: Duration) -> Seen {
        Seen { spec: held(LeaseSpec::default(), holder, LEASE, time(renewed)), since }
    }

    #[test]
    fn who_holds_the_lease_keeps_it_and_others_wait_until_it_is_silent_for_long() {
        let theirs = seen("a", 0, at(0));
        let released = Seen { spec: LeaseSpec { holder_identity: None, ..theirs.spec.clone() }, since: at(0) };
        for (seen, identity, leads, now, expected) in [
            (None, "b", false, at(0), Step::Create),
            (Some(&theirs), "b", false, at(0), Step::Wait),
            (Some(&theirs), "b", false, at(14), Step::Wait),
            (Some(&theirs), "b", false, at(15), Step::Take),
            (Some(&released), "b", false, at(0), Step::Take),
            (Some(&theirs), "a", true, at(1), Step::Renew),
            // A write of ours that has come through without its answer.
            (Some(&theirs), "a", false, at(1), Step::Renew),
            // Whoever leads and sees anything but its own name has lost, also if the Lease is free.
            (Some(&theirs), "b", true, at(15), Step::Lose),
            (Some(&released), "b", true, at(0), Step::Lose),
            (None, "b", true, at(0), Step::Lose),
        ] {
            assert_eq!(decide(seen, identity, leads, LEASE, now), expected, "{seen:?} {identity} {leads} {now:?}");
        }
    }

    #[test]
    fn a_lease_is_as_old_as_we_have_seen_it_unchanged_whatever_its_times_say() {
        // The other's clock is years behind, years ahead, and jumps back: each change is a sign of life.
        let mut known = None;
        for (step, renewed) in [(0, -100_000_000), (10, 100_000_000), (20, 50_000_000), (30, 50_000_001)] {
            let spec = seen("a", renewed, at(0)).spec;
            let now = Seen::again(known.take(), spec, at(step));
            assert_eq!(now.since, at(step));
            assert_eq!(decide(Some(&now), "b", false, LEASE, at(step)), Step::Wait);
            known = Some(now);
        }
        // And no change is none.
        let spec = known.clone().unwrap().spec;
        let silent = Seen::again(known, spec, at(44));
        assert_eq!(silent.since, at(30));
        assert_eq!(decide(Some(&silent), "b", false, LEASE, at(44)), Step::Wait);
        assert_eq!(decide(Some(&silent), "b", false, LEASE, at(45)), Step::Take);
    }

    #[test]
    fn the_holder_says_how_long_to_wait_for_it() {
        let mut patient = seen("a", 0, at(0));
        patient.spec.lease_duration_seconds = Some(60);
        assert_eq!(decide(Some(&patient), "b", false, LEASE, at(59)), Step::Wait);
        assert_eq!(decide(Some(&patient), "b", false, LEASE, at(60)), Step::Take);
        patient.spec.lease_duration_seconds = None;
        assert_eq!(decide(Some(&patient), "b", false, LEASE, at(15)), Step::Take);
    }

    #[test]
    fn a_write_renews_what_is_ours_and_counts_what_we_take() {
        let first = held(LeaseSpec::default(), "a", Duration::from_millis(2500), time(0));
        assert_eq!(first.lease_transitions, Some(0));
        assert_eq!(first.lease_duration_seconds, Some(3), "never shorter than it is");
        let renewed = held(first.clone(), "a", LEASE, time(5));
        assert_eq!((&renewed.acquire_time, renewed.lease_transitions), (&first.acquire_time, first.lease_transitions));
        assert_eq!(renewed.renew_time, Some(MicroTime(time(5))));
        let taken = held(renewed, "b", LEASE, time(30));
        assert_eq!((holder(&taken), taken.lease_transitions), ("b", Some(1)));
        assert_eq!(taken.acquire_time, Some(MicroTime(time(30))));
    }

    #[test]
    fn times_have_to_go_together() {
        let timing = |lease, renew, retry| {
            let [lease_duration, renew_deadline, retry_period] = [lease, renew, retry].map(Duration::from_secs);
            Timing { lease_duration, renew_deadline, retry_period }.checked().err()
        };
        assert_eq!(timing(15, 10, 2), None);
        assert!(matches!(timing(10, 10, 2), Some(BadTiming::Lease { .. })));
        assert!(matches!(timing(15, 3, 2), Some(BadTiming::Retry { .. })));
    }
}
