//! `pilothouse run`: puts the parts together and takes them apart again.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use http::{HeaderValue, header::USER_AGENT};
use kube::Config;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{Semaphore, watch},
};
use tokio_util::sync::CancellationToken;

use crate::{
    cache::{Cache, Quotas},
    client::ApiServer,
    crd::Bytes,
    lease::{self, Election, Term, Timing},
    metrics::{self, Metrics},
    plugin::{Engine, compile::Compiler},
    policy::TenantPolicy,
    probes,
    reconcile::Events,
    registry::{self, Registries},
    signature::policy::Policy,
    source::Sources,
    supervisor::{Serves, Supervisor},
    telemetry,
};

/// How long the Events that wait to be published keep a host from its end, on top of `--graceful-shutdown-timeout`.
const LAST_EVENTS: Duration = Duration::from_secs(3);

/// How to run.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Where /livez and /readyz are served.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8081")]
    pub health_probe_bind_address: SocketAddr,
    /// Where /metrics is served; 0 for nowhere.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080")]
    pub metrics_bind_address: BindAddress,
    /// Where traces go: a collector that speaks OTLP over HTTP, as in http://collector:4318. Without it there are none.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// How many parents are reconciled at the same time. One reconciler takes at most half of it.
    #[arg(long, value_name = "NUMBER", default_value_t = 32, value_parser = slots)]
    pub max_concurrent_reconciles: usize,
    /// How much memory the calls of all plugins may use together, as in 1Gi. A call that finds none left is tried again later.
    #[arg(long, value_name = "BYTES", default_value = "1Gi")]
    pub guest_memory: Bytes,
    /// Where plugins are kept, as they were pulled and compiled, so that a start does neither again. Hosts may share it. Without it, plugins
    /// are compiled at each start.
    #[arg(long, value_name = "DIRECTORY", env = "PILOTHOUSE_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// How much of it the plugins of ClusterReconcilers may take.
    #[arg(long, value_name = "BYTES", default_value = "2Gi")]
    pub cache_size: Bytes,
    /// How much of it the plugins of Reconcilers may take, those of each namespace.
    #[arg(long, value_name = "BYTES", default_value = "256Mi")]
    pub cache_size_per_namespace: Bytes,
    /// How long a plugin may be compiled. One that takes longer is refused.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration)]
    pub compile_timeout: Duration,
    /// A YAML file that says what Reconcilers (those in namespaces) may ask for; without it, the usual limits and no grants.
    #[arg(long, value_name = "FILE")]
    pub tenant_policy: Option<PathBuf>,
    /// How registries are reached.
    #[command(flatten)]
    pub registries: registry::Options,
    /// A YAML file that says which images have to be signed, and by whom; without it, what reconcilers say holds.
    #[arg(long, value_name = "FILE")]
    pub verification_policy: Option<PathBuf>,
    /// Let ClusterReconcilers take plugins from files of this machine (spec.plugin.path). For development.
    #[arg(long)]
    pub allow_plugin_paths: bool,
    /// Be at work only while no other host is, and stand by otherwise. To be set in every Deployment: without it, there may be one host.
    #[arg(long)]
    pub leader_elect: bool,
    /// Where the Lease is, and what the host keeps of Reconcilers; by default in the namespace of the pod, outside of a pod in
    /// pilothouse-system.
    #[arg(long, value_name = "NAMESPACE")]
    pub leader_election_namespace: Option<String>,
    /// How long the others wait for a leader that is silent before one of them leads.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration)]
    pub leader_election_lease_duration: Duration,
    /// How long a leader that cannot renew its Lease goes on, before it ends.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub leader_election_renew_deadline: Duration,
    /// How often the Lease is renewed, or looked at.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = duration)]
    pub leader_election_retry_period: Duration,
    /// How long a watch may show nothing before its connection counts as dead, and another one is made: 10s to 299s. The API server is
    /// asked to end each watch 5s sooner, so only a dead connection meets this limit. Shorter finds one sooner, and costs a request for
    /// each watch and round.
    #[arg(long, value_name = "DURATION", default_value = "295s", value_parser = idle)]
    pub watch_idle_timeout: Duration,
    /// How long reconciles that run may take to come to their end after SIGTERM.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub graceful_shutdown_timeout: Duration,
}

/// An address to listen on, or `0` for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindAddress(pub Option<SocketAddr>);

impl FromStr for BindAddress {
    type Err = std::net::AddrParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "0" { Ok(Self(None)) } else { text.parse().map(Some).map(Self) }
    }
}

impl fmt::Display for BindAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("0"),
        }
    }
}

fn duration(text: &str) -> Result<Duration, crate::crd::ParseLimitError> {
    text.parse::<crate::crd::Timeout>().map(|timeout| timeout.0)
}

/// Below it watches would do little but begin; above it the API server, or what is in between, has ended them long since.
fn idle(text: &str) -> Result<Duration, String> {
    let read = duration(text).map_err(|error| error.to_string())?;
    let may = Duration::from_secs(10)..=Duration::from_secs(299);
    if may.contains(&read) { Ok(read) } else { Err("it must be between 10s and 299s".to_owned()) }
}

fn slots(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|slots| *slots >= 2).ok_or_else(|| "it must be a number of at least 2".to_owned())
}

/// Runs until SIGTERM or SIGINT. A host that no longer leads ends the process at once: another may be at work.
///
/// # Errors
/// If the host cannot start: no API server to reach, no port, no engine.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let tenants = options.tenant_policy.as_deref();
    let tenants = tenants.map(|path| read(path, "--tenant-policy", "tenant policy", TenantPolicy::read)).transpose()?;
    let verification = options.verification_policy.as_deref();
    let verification = verification
        .map(|path| read(path, "--verification-policy", "verification policy", Policy::read))
        .transpose()?;
    let config = config(options.watch_idle_timeout).await?;
    let term = if options.leader_elect { Term::not_begun() } else { Term::endless() };
    let metrics = Arc::new(Metrics::new(term.clone()));
    let mut election = options.leader_elect.then(|| election(&options, &config, &metrics, term)).transpose()?;
    let server = ApiServer::new(config).context("failed to set up the way to the API server")?;
    let client = metrics.client(&server, None).context("failed to set up the Kubernetes client")?;
    let cache = options.cache_dir.as_deref().and_then(|directory| cache(directory, &options)).map(Arc::new);
    let sources = Sources {
        client: client.clone(),
        registries: Registries::new(&options.registries).context("failed to read the certificates for registries")?,
        cache: cache.clone(),
        policy: Arc::new(verification.unwrap_or_default()),
        allow_paths: options.allow_plugin_paths,
    };
    let compiler = Compiler::new(cache, options.compile_timeout, metrics.compilations.clone());
    let engine = Arc::new(Engine::new(options.guest_memory.0)?.with_compiler(compiler));
    let listener = listen(options.health_probe_bind_address, "--health-probe-bind-address").await?;
    let health = listener.local_addr()?;
    let mut metrics_address = options.metrics_bind_address;
    if let Some(address) = metrics_address.0 {
        let listener = listen(address, "--metrics-bind-address").await?;
        metrics_address = BindAddress(Some(listener.local_addr()?));
        // As long as the process.
        tokio::spawn(metrics::serve(listener, metrics.clone()));
    }

    let stop = CancellationToken::new();
    let ready = watch::Sender::new(false);
    tokio::spawn(stop_on_signal(stop.clone())?);
    let probes = tokio::spawn(probes::serve(listener, ready.subscribe()));
    tracing::info!(version = env!("CARGO_PKG_VERSION"), %health, metrics = %metrics_address, "pilothouse runs");
    if let Some(election) = &mut election {
        if stop.run_until_cancelled(election.acquire(&ready)).await.is_none() {
            tracing::info!("stopped");
            return Ok(());
        }
        ready.send_replace(false);
    }

    let events = Events::new(client.clone());
    let supervisor = Supervisor {
        server,
        client,
        engine,
        events: events.clone(),
        metrics,
        claims: Arc::default(),
        tenants: Arc::new(tenants.unwrap_or_default()),
        sources,
        home: lease::home(options.leader_election_namespace.clone()),
        slots: Arc::new(Semaphore::new(options.max_concurrent_reconciles)),
        total_slots: options.max_concurrent_reconciles,
        kinds: watch::Sender::new(0),
        watches: crate::watch::config(options.watch_idle_timeout),
        serves: Serves::All,
    };
    let supervisor = tokio::spawn(supervisor.run(ready, stop.clone()));
    let ended = async {
        stop.cancelled().await;
        tracing::info!("stopping");
        tokio::time::sleep(options.graceful_shutdown_timeout).await;
    };
    let lost = async {
        match &mut election {
            Some(election) => election.hold().await,
            None => std::future::pending().await,
        }
    };
    let in_order = tokio::select! {
        result = supervisor => {
            result.context("the supervisor ended by a bug; please report it")?;
            true
        }
        () = ended => {
            tracing::warn!("reconciles still ran after {:?}; they will be taken up again", options.graceful_shutdown_timeout);
            false
        }
        lost = lost => {
            tracing::error!("this host no longer leads, and ends: {}", telemetry::chain(&lost));
            // No return, which would wait for calls and traces.
            std::process::exit(1);
        }
    };
    // An error means that the API server is too slow for a courtesy.
    drop(tokio::time::timeout(LAST_EVENTS, events.flush()).await);
    // While something may still run, nobody else is to begin: the Lease ends by itself.
    if let Some(election) = election.filter(|_| in_order) {
        election.release().await;
    }
    probes.abort();
    tracing::info!("stopped");
    Ok(())
}

/// How the API server is reached, by connections that are dead when they are silent for longer than `idle` (`C39`).
///
/// # Errors
/// If nothing says where it is.
pub async fn config(idle: Duration) -> anyhow::Result<Config> {
    let mut config =
        Config::infer().await.context("found no cluster: neither in-cluster configuration nor a kubeconfig")?;
    let user_agent = concat!("pilothouse/", env!("CARGO_PKG_VERSION"));
    config.headers.push((USER_AGENT, HeaderValue::from_static(user_agent)));
    config.read_timeout = Some(idle);
    Ok(config)
}

fn election(options: &Options, config: &Config, metrics: &Metrics, term: Term) -> anyhow::Result<Election> {
    let timing = Timing {
        lease_duration: options.leader_election_lease_duration,
        renew_deadline: options.leader_election_renew_deadline,
        retry_period: options.leader_election_retry_period,
    };
    // By a connection of its own: the Lease waits for nobody.
    let server = ApiServer::new(config.clone()).context("failed to set up the way to the API server")?;
    let client = metrics.election_client(&server).context("failed to set up the Kubernetes client")?;
    Ok(Election::new(client, options.leader_election_namespace.clone(), timing.checked()?, term))
}

/// Without a cache a host only starts more slowly.
fn cache(directory: &Path, options: &Options) -> Option<Cache> {
    let bytes = |Bytes(bytes)| u64::try_from(bytes).unwrap_or(u64::MAX);
    let quotas = Quotas { cluster: bytes(options.cache_size), namespace: bytes(options.cache_size_per_namespace) };
    Cache::open(directory, quotas)
        .inspect_err(|error| tracing::warn!("nothing is kept of plugins: {}", telemetry::chain(error)))
        .ok()
}

/// What a file says that an option names.
pub(crate) fn read<T, E>(
    path: &Path,
    option: &str,
    what: &str,
    read: impl FnOnce(&str) -> Result<T, E>,
) -> anyhow::Result<T>
where
    Result<T, E>: anyhow::Context<T, E>,
{
    let text =
        std::fs::read_to_string(path).with_context(|| format!("failed to read {} ({option})", path.display()))?;
    read(&text).with_context(|| format!("{} is no {what}", path.display()))
}

async fn listen(address: SocketAddr, option: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("failed to listen on {address} ({option})"))
}

/// What cancels `stop` at SIGTERM and SIGINT.
///
/// # Errors
/// If the process cannot wait for them.
pub fn stop_on_signal(stop: CancellationToken) -> anyhow::Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to wait for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_may_be_silent_for_a_time_that_makes_sense() {
        assert_eq!(idle("295s"), Ok(Duration::from_secs(295)));
        assert_eq!(idle("10s"), Ok(Duration::from_secs(10)));
        for text in ["9s", "5m", "0s", "soon"] {
            assert!(idle(text).is_err(), "{text}");
        }
    }

    #[test]
    fn metrics_are_served_somewhere_or_nowhere() {
        assert_eq!("0".parse(), Ok(BindAddress(None)));
        assert_eq!("[::1]:8080".parse(), Ok(BindAddress(Some(([0, 0, 0, 0, 0, 0, 0, 1], 8080).into()))));
        assert!("8080".parse::<BindAddress>().is_err());
        for text in ["0", "127.0.0.1:8080"] {
            assert_eq!(text.parse::<BindAddress>().map(|address| address.to_string()).as_deref(), Ok(text));
        }
    }
}
