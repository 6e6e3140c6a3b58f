//! `pilothouse dev`: the loop of a plugin's author. The source is watched and built, what the new plugin would change in the cluster is shown,
//! and it is swapped into a host that runs here, with the rights of whoever runs it.
//!
//! That host serves one reconciler, which is labelled as its own, so that it and the host of the cluster are never at the same parents for
//! longer than it takes to see the label. What fails on the way, be it a build or the API server, leaves the plugin serving that did before.

mod edits;
mod follow;
mod install;
mod lines;
mod view;

use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use kube::Api;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    process::Command,
    sync::{Semaphore, watch},
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::{Instrument as _, info_span};

use self::{
    edits::{Edit, Edits},
    follow::Expected,
    install::{Claim, Install},
    view::{Event, View},
};
use crate::{
    build::{self, Profile, Source},
    cache::{Cache, Quotas},
    client::ApiServer,
    crd::ClusterReconciler,
    declaration::Declaration,
    lease::{self, Term},
    lookup,
    manifests::Granted,
    metrics::Metrics,
    object::Kind,
    output,
    plugin::{Engine, GUEST_MEMORY, Plugin, compile},
    preview,
    reconcile::Events,
    registry::{self, Registries},
    revision::Material,
    run,
    source::Sources,
    supervisor::{Serves, Supervisor},
    telemetry,
};

/// How to develop.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Builds the plugin at each edit, without optimisation. What it needs is applied to the cluster of the kubeconfig: the kinds of the host, the
plugin's CRD, a service account with its rights, and a ClusterReconciler, which this host has to itself. Then each edit is one of
these: a build that fails, and what serves goes on; or a preview of what changes of the parents that there are, and the swap. It
runs until it is interrupted. What it has applied stays then, until --rm.
Needs what `kubectl apply` of it needs, and to impersonate the service account.")]
pub struct Options {
    /// The folder of the plugin: a Rust crate, or a Go module.
    #[arg(default_value = ".")]
    directory: PathBuf,
    /// Name of the reconciler; by default the name of the crate, or of the module's folder.
    #[arg(long)]
    name: Option<String>,
    /// Namespace of the plugin's service account.
    #[arg(short, long, default_value = lease::NAMESPACE)]
    namespace: String,
    /// A YAML file with spec.grants of the reconciler: what the plugin may use. It is read when this begins.
    #[arg(long, value_name = "FILE", conflicts_with = "take_over")]
    grants: Option<PathBuf>,
    /// Serve the parents of a reconciler that is there already: the host of the cluster leaves it alone until this ends. Nothing is applied.
    #[arg(long)]
    take_over: bool,
    /// Remove what earlier runs have applied, and end. Parents are released, and stay, and so does their CRD as long as there are any.
    #[arg(long = "rm", conflicts_with = "take_over")]
    remove: bool,
    /// How it is shown; with json as an object for each event, one a line.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
}

/// How long a watch may be silent; as `pilothouse run` has it.
const IDLE: Duration = Duration::from_secs(295);
/// How long before what the cluster has refused is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// How long reconciles may take to come to their end.
const GRACE: Duration = Duration::from_secs(10);
/// What is kept of plugins, so that each is compiled once: in the preview, and not again when it serves.
const QUOTAS: Quotas = Quotas { cluster: 256 << 20, namespace: 0 };

/// Runs until it is interrupted.
///
/// # Errors
/// If it cannot begin: no plugin, no cluster, or a reconciler that is somebody else's.
pub async fn dev(options: &Options, log: &str) -> anyhow::Result<()> {
    let view = View::new(options.output);
    let (layer, mut lines) = lines::lines();
    telemetry::init_to(&format!("{},{log}", lines::FILTER), layer);
    let stop = CancellationToken::new();
    tokio::spawn(run::stop_on_signal(stop.clone())?);
    let _drawing = AbortOnDropHandle::new(tokio::spawn(view.clone().draw()));
    let (shown, removes) = (view.clone(), options.remove);
    let _lines = AbortOnDropHandle::new(tokio::spawn(async move {
        // Where all is removed, the host that does it finds things gone, which is no news.
        while let Some(line) = lines.recv().await.filter(|_| !removes) {
            shown.show(&Event::Logged(line));
        }
    }));

    let directory = options.directory.canonicalize().unwrap_or_else(|_| options.directory.clone());
    let source = Source::read(&directory)?;
    let name = options.name.clone().or_else(|| source.name()).context("give the reconciler a name with --name")?;
    let name = name.replace('_', "-");
    let component = source.default_output().with_extension("dev.wasm");
    let mut session = Session::begin(options, view.clone(), name, directory, component).await?;
    if options.remove {
        return session.remove(stop).await;
    }
    let claim = session.install.claim(options.take_over).await?;
    let ended = stop.run_until_cancelled(Box::pin(session.work(source, claim))).await;
    view.now(None);
    session.end(claim).await?;
    ended.unwrap_or(Ok(()))
}

/// One run.
struct Session {
    view: View,
    /// The folder of the plugin, as it was named, and as it is.
    named: PathBuf,
    directory: PathBuf,
    /// Where the component is that serves.
    component: PathBuf,
    install: Install,
    server: ApiServer,
    metrics: Arc<Metrics>,
    engine: Arc<Engine>,
    /// What was applied last.
    applied: Option<Vec<serde_json::Value>>,
    /// The component that serves, or is about to.
    serves: Option<Vec<u8>>,
    /// Which revision that is.
    expected: watch::Sender<Option<Expected>>,
    host: Option<Host>,
}

/// The host, and those that look at what it does.
struct Host {
    stop: CancellationToken,
    supervisor: JoinHandle<()>,
    _reconciler: AbortOnDropHandle<()>,
    parents: Option<(Kind, AbortOnDropHandle<()>)>,
}

impl Session {
    async fn begin(
        options: &Options,
        view: View,
        name: String,
        directory: PathBuf,
        component: PathBuf,
    ) -> anyhow::Result<Self> {
        let config = run::config(IDLE).await?;
        let url = config.cluster_url.to_string();
        let metrics = Arc::new(Metrics::new(Term::endless()));
        let server = ApiServer::new(config).context("failed to set up the way to the API server")?;
        let client = metrics.client(&server, None).context("failed to set up the Kubernetes client")?;
        client.apiserver_version().await.with_context(|| format!("no answer from the cluster at {url}"))?;
        let compiler = compile::Compiler::new(cache(), compile::TIMEOUT, metrics.compilations.clone());
        let engine = Arc::new(Engine::new(GUEST_MEMORY)?.with_compiler(compiler));
        let named = options.directory.clone();
        let grants = options.grants.as_deref();
        let grants = grants
            .map(|file| run::read(file, "--grants", "spec.grants of a reconciler", |yaml| Granted::read(yaml, None)))
            .transpose()?;
        view.show(&Event::Started { directory: named.clone(), reconciler: name.clone(), server: url });
        let install = Install { client, name, namespace: options.namespace.clone(), grants, host: install::host() };
        let expected = watch::Sender::new(None);
        let (applied, serves, host) = (None, None, None);
        Ok(Self {
            view,
            named,
            directory,
            component,
            install,
            server,
            metrics,
            engine,
            applied,
            serves,
            expected,
            host,
        })
    }

    /// Build, show, swap, for each edit.
    async fn work(&mut self, source: Source, claim: Claim) -> anyhow::Result<()> {
        let mut edits = Edits::of(source.folders()).context("failed to watch the source of the plugin")?;
        let mut since = Instant::now();
        let mut source = Ok(source);
        loop {
            let built = match &source {
                Ok(source) => self.build(source).await,
                Err(error) => {
                    self.view.show(&Event::BuildFailed { findings: telemetry::chain(error) });
                    None
                }
            };
            // What was edited in the meantime is built first.
            let deployed = match built.filter(|_| !edits.are_there()) {
                Some(component) => self.deploy_until_edited(component, claim, since, &mut edits).await,
                None => None,
            };
            let edit = match deployed {
                Some(edit) => edit,
                None => edits.next().await,
            };
            since = edit.since;
            let files = edit.files.iter().map(|file| view::called(file, &self.directory)).collect();
            self.view.show(&Event::Edited { files });
            // Also what it is called, and what it depends on, may be another now.
            source = Source::read(&self.directory);
        }
    }

    /// The component; none if there is none, or none that is new.
    async fn build(&self, source: &Source) -> Option<Vec<u8>> {
        let begun = Instant::now();
        let built = self.compile(source).await;
        self.view.now(None);
        let seconds = begun.elapsed().as_secs_f64();
        match built {
            Ok((component, findings)) => {
                let component = Some(component).filter(|component| self.serves.as_ref() != Some(component));
                self.view.show(&Event::Built { bytes: component.as_ref().map(Vec::len), seconds, findings });
                component
            }
            Err(findings) => {
                self.view.show(&Event::BuildFailed { findings });
                None
            }
        }
    }

    /// The component and what the compiler finds fault with; or only that.
    async fn compile(&self, source: &Source) -> Result<(Vec<u8>, String), String> {
        let chain = |error: build::Error| telemetry::chain(&error);
        let mut command = source.compiler(Profile::Quick).map_err(chain)?;
        command.args(source.messages_to_stdout(self.view.is_coloured()));
        if self.view.is_coloured() {
            command.env("CARGO_TERM_COLOR", "always");
        }
        self.view.now(Some("building".to_owned()));
        let program = command.get_program().to_string_lossy().into_owned();
        let output = output(command, |line| self.view.now(Some(line.trim().to_owned()))).await;
        let output = output.map_err(|source| chain(build::Error::Start { program, source }))?;
        let findings = source.findings(&output);
        match source.component(&output) {
            Ok(component) => Ok((component, findings)),
            Err(build::Error::Compile) => Err(findings),
            Err(error) => Err(format!("{findings}{}", chain(error))),
        }
    }

    /// Lets a component serve; what the cluster refuses is tried again. An edit ends that.
    async fn deploy_until_edited(
        &mut self,
        component: Vec<u8>,
        claim: Claim,
        since: Instant,
        edits: &mut Edits,
    ) -> Option<Edit> {
        let mut known = String::new();
        loop {
            let deployed = self.deploy(&component, claim, since).await;
            self.view.now(None);
            let Err(error) = deployed else { return None };
            let message = telemetry::chain(error.as_ref());
            // What fails again in the same way is no news.
            if message != known {
                self.view.show(&Event::Refused { message: message.clone() });
                known = message;
            }
            tokio::select! {
                edit = edits.next() => return Some(edit),
                () = tokio::time::sleep(AGAIN) => {}
            }
        }
    }

    async fn deploy(&mut self, component: &[u8], claim: Claim, since: Instant) -> anyhow::Result<()> {
        self.view.now(Some("loading".to_owned()));
        let plugin = self.open(component).await?;
        if self.host.is_none() {
            let objects = self.install.install_own_kinds().await?;
            if !objects.is_empty() {
                self.view.show(&Event::Applied { objects });
            }
            self.install.check_rivals(&plugin).await?;
        }
        if claim == Claim::Own {
            self.apply(&plugin).await?;
        }
        let material = Material { plugin: component.to_vec().into(), config: self.declared().await?.terms.config };
        self.preview(&plugin, &material).await;
        self.expected.send_replace(Some(Expected { revision: material.id(), since }));
        build::write(&self.component, component)
            .with_context(|| format!("failed to write {}", self.component.display()))?;
        self.serves = Some(component.to_vec());
        self.serve(&plugin).await
    }

    /// Opens a component as its reconciler would, so that a preview may read what that is granted.
    async fn open(&self, component: &[u8]) -> anyhow::Result<Plugin> {
        let limits = crate::crd::Limits::default().of_a_call();
        // One that is about to be made has no parents with children yet, for which it would have to read anything.
        let declared = self.declared().await.ok();
        let access = declared.map(|declared| preview::access(&self.install.client, &declared)).unwrap_or_default();
        Ok(Plugin::open(&self.engine, None, component.to_vec(), limits, Arc::new(access)).await?)
    }

    async fn declared(&self) -> anyhow::Result<Declaration> {
        let api = Api::<ClusterReconciler>::all(self.install.client.clone());
        let name = &self.install.name;
        let there =
            lookup::get(&api, name).await.with_context(|| format!("failed to read ClusterReconciler {name}"))?;
        there.map(Declaration::from).with_context(|| format!("ClusterReconciler {name} is gone"))
    }

    async fn apply(&mut self, plugin: &Plugin) -> anyhow::Result<()> {
        let manifests = self.install.manifests(plugin, &self.component)?;
        if self.applied.as_ref() == Some(&manifests) {
            return Ok(());
        }
        self.view.now(Some("applying".to_owned()));
        let objects = self.install.apply(&manifests).await?;
        self.view.show(&Event::Applied { objects });
        self.applied = Some(manifests);
        Ok(())
    }

    /// Shows what the plugin will change. That this cannot be seen keeps it from nothing.
    async fn preview(&self, plugin: &Plugin, material: &Material) {
        self.view.now(Some("previewing".to_owned()));
        let report = async {
            let declared = self.declared().await?;
            anyhow::Ok(preview::report(&self.install.client, &declared, plugin, material).await?)
        };
        // By its span what the plugin logs meanwhile is known.
        match report.instrument(info_span!("preview")).await {
            Ok(report) => self.view.show(&Event::Preview(report)),
            Err(error) => {
                let message = format!("no preview: {}", telemetry::chain(error.as_ref()));
                self.view.show(&Event::Refused { message });
            }
        }
    }

    /// Starts the host, if it does not run yet, and looks at the parents of the plugin.
    async fn serve(&mut self, plugin: &Plugin) -> anyhow::Result<()> {
        let kind = lookup::kind(&self.install.client, &plugin.description().parent).await?;
        let mut host = match self.host.take() {
            Some(host) => host,
            None => self.start()?,
        };
        if host.parents.as_ref().is_none_or(|(known, _)| *known != kind) {
            let watches = crate::watch::config(IDLE);
            let follow = follow::parents(self.install.client.clone(), kind.clone(), watches, self.view.clone());
            host.parents = Some((kind, AbortOnDropHandle::new(tokio::spawn(follow))));
        }
        self.host = Some(host);
        Ok(())
    }

    fn start(&self) -> anyhow::Result<Host> {
        let client = self.install.client.clone();
        let registries = Registries::new(&registry::Options::default());
        let sources = Sources {
            client: client.clone(),
            registries: registries.context("failed to read the certificates for registries")?,
            cache: None,
            policy: Arc::default(),
            allow_paths: true,
        };
        let watches = crate::watch::config(IDLE);
        let slots = 8;
        let supervisor = Supervisor {
            server: self.server.clone(),
            client: client.clone(),
            engine: self.engine.clone(),
            events: Events::new(client.clone()),
            metrics: self.metrics.clone(),
            claims: Arc::default(),
            tenants: Arc::default(),
            sources,
            slots: Arc::new(Semaphore::new(slots)),
            total_slots: slots,
            kinds: watch::Sender::new(0),
            watches: watches.clone(),
            // Only of tenants something is kept there.
            home: lease::NAMESPACE.to_owned(),
            serves: Serves::Own { host: self.install.host.clone(), plugin: self.component.clone() },
        };
        let stop = CancellationToken::new();
        let supervisor = tokio::spawn(supervisor.run(watch::Sender::new(false), stop.clone()));
        let (name, expected) = (self.install.name.clone(), self.expected.subscribe());
        let follow = follow::reconciler(client, name, watches, expected, self.view.clone());
        Ok(Host { stop, supervisor, _reconciler: AbortOnDropHandle::new(tokio::spawn(follow)), parents: None })
    }

    async fn stop_host(&mut self) {
        let Some(host) = self.host.take() else { return };
        host.stop.cancel();
        if tokio::time::timeout(GRACE, host.supervisor).await.is_err() {
            tracing::warn!("reconciles still ran after {GRACE:?}; they will be taken up again");
        }
    }

    /// Ends the host, and tells what stays.
    async fn end(&mut self, claim: Claim) -> anyhow::Result<()> {
        self.stop_host().await;
        let name = &self.install.name;
        let message = match claim {
            Claim::TakenOver => {
                self.install.give_back().await?;
                format!(
                    "ClusterReconciler {name} is the host's of the cluster again, with the plugin that its spec names."
                )
            }
            Claim::Own if self.applied.is_none() => "Nothing was applied.".to_owned(),
            Claim::Own => format!(
                "ClusterReconciler {name} stays, and nobody serves it: what becomes of its parents waits until `pilothouse dev` runs \
                 again, also their deletion.\nTo remove it, and all that was made for it: {}",
                self.removal()
            ),
        };
        self.view.show(&Event::Ended { message });
        Ok(())
    }

    fn removal(&self) -> String {
        let Install { name, namespace, .. } = &self.install;
        let namespace = if namespace == lease::NAMESPACE { String::new() } else { format!(" --namespace {namespace}") };
        format!("pilothouse dev --rm {} --name {name}{namespace}", self.named.display())
    }

    /// Removes what earlier runs have applied, by a host that lets the parents go.
    async fn remove(&mut self, stop: CancellationToken) -> anyhow::Result<()> {
        let name = self.install.name.clone();
        self.view.now(Some("removing".to_owned()));
        if self.install.claim(false).await? == Claim::Own && self.declared().await.is_ok() {
            self.install.take().await?;
            self.host = Some(self.start()?);
        }
        let removed = stop.run_until_cancelled(self.install.remove()).await;
        self.view.now(None);
        self.stop_host().await;
        let Some(objects) = removed.transpose()? else { anyhow::bail!("it was interrupted, and not all is removed") };
        let message = match objects.is_empty() {
            true => format!("There is nothing of `pilothouse dev` for {name}."),
            false => {
                format!("What `pilothouse dev` has made for {name} is gone; the kinds of the host and namespaces stay.")
            }
        };
        self.view.show(&Event::Applied { objects });
        self.view.show(&Event::Ended { message });
        Ok(())
    }
}

/// What a command has written, once it ends; each line of its standard error at once. It ends when nobody waits for it any more.
async fn output(command: std::process::Command, mut told: impl FnMut(&str)) -> std::io::Result<Output> {
    let mut command = Command::from(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn()?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let answer = async {
        let mut bytes = Vec::new();
        if let Some(mut stdout) = stdout {
            stdout.read_to_end(&mut bytes).await?;
        }
        std::io::Result::Ok(bytes)
    };
    let complaint = async {
        let mut bytes = Vec::new();
        let mut stderr = stderr.map(BufReader::new);
        while let Some(stderr) = &mut stderr {
            let begun = bytes.len();
            if stderr.read_until(b'\n', &mut bytes).await? == 0 {
                break;
            }
            told(&String::from_utf8_lossy(&bytes[begun..]));
        }
        std::io::Result::Ok(bytes)
    };
    let (stdout, stderr) = tokio::try_join!(answer, complaint)?;
    Ok(Output { status: child.wait().await?, stdout, stderr })
}

/// Without it, each plugin is compiled twice.
fn cache() -> Option<Arc<Cache>> {
    let folder = |variable| std::env::var_os(variable).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let home = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    let directory = home.unwrap_or_else(std::env::temp_dir).join("pilothouse-dev");
    Cache::open(Path::new(&directory), QUOTAS)
        .inspect_err(|error| tracing::warn!("plugins are compiled twice: {}", telemetry::chain(error)))
        .ok()
        .map(Arc::new)
}
