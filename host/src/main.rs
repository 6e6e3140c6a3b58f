//! The command `pilothouse`.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use pilothouse::{
    allocator, build,
    crd::{self, Limits, ServiceAccountRef},
    dev, inspect, manifests, output,
    plugin::{Engine, GUEST_MEMORY, Plugin, compile},
    preview, release, render, run, sign,
    telemetry::{self, LogFormat},
    traces::Traces,
    transfer, version,
};

/// A host for Kubernetes operators whose logic is WebAssembly.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// What to log, as in `info,pilothouse=debug`; lines of plugins have the target `plugin`.
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "PILOTHOUSE_LOG",
        default_value = "info,kube_runtime=error"
    )]
    log: String,
    /// How log lines look.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Auto)]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Run the host against the cluster of the pod, or of the kubeconfig.
    Run(run::Options),
    /// Build the plugin in a directory, in Rust or Go, into a component.
    Build(BuildArguments),
    /// Build the plugin in a directory whenever it changes, and serve it in the cluster of the kubeconfig: the loop of its author.
    Dev(dev::Options),
    /// Push a component into a registry.
    Push(transfer::PushOptions),
    /// Pull a component out of a registry.
    Pull(transfer::PullOptions),
    /// Sign a plugin in a registry with a key, as `cosign sign --key` does.
    Sign(sign::SignOptions),
    /// Make sure that a plugin in a registry is signed by a key.
    Verify(sign::VerifyOptions),
    /// Show what a component is: its contract, its kinds, what it asks for.
    Inspect(inspect::Options),
    /// Show what a plugin makes of a parent, without a cluster.
    Render(render::Options),
    /// Show what would change in a cluster if a component were the plugin of a reconciler; nothing is changed.
    Preview(preview::Options),
    /// Print what has to be in the cluster for a plugin, ready for `kubectl apply --server-side -f -`.
    Manifests(ManifestsArguments),
    /// Take the finalizers of this host off all objects of a kind, where there is no host any more that would.
    Release(release::Options),
    /// Print the definitions of the host's own kinds, ready for `kubectl apply --server-side -f -`.
    Crds,
    /// Print the script that completes these commands in a shell.
    Completion {
        /// Which shell.
        shell: Shell,
    },
    /// Compile a component to machine code: what the host lets a child of itself do.
    #[command(hide = true)]
    CompileComponent(compile::Options),
    /// Show the versions of the host, of the contract that it serves, and of its engine.
    Version(version::Options),
}

#[derive(clap::Args)]
struct BuildArguments {
    /// The folder of the plugin: a Rust crate, or a Go module.
    #[arg(default_value = ".")]
    directory: PathBuf,
    /// Where the component goes.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// A cargo profile of your own; by default one that makes the component small.
    #[arg(long)]
    profile: Option<String>,
}

#[derive(clap::Args)]
struct ManifestsArguments {
    /// The component.
    plugin: PathBuf,
    /// Name of the reconciler; by default the name of the file.
    #[arg(long)]
    name: Option<String>,
    /// Namespace of the plugin's ConfigMap and service account.
    #[arg(short, long, default_value = "pilothouse-system")]
    namespace: String,
    /// Make a Reconciler, which sees and writes its own namespace only, instead of a ClusterReconciler.
    #[arg(long, requires = "namespace")]
    namespaced: bool,
    /// Take the plugin from this image, where it was pushed, and not from a ConfigMap.
    #[arg(long, value_name = "REFERENCE")]
    image: Option<String>,
    /// A Secret in the namespace with credentials for the registry of the image. May be given several times.
    #[arg(long = "pull-secret", value_name = "NAME", requires = "image")]
    pull_secrets: Vec<String>,
    /// A YAML file with spec.grants of the reconciler: what the plugin may use. The host is given the right to read its Secrets.
    #[arg(long, value_name = "FILE")]
    grants: Option<PathBuf>,
    /// Leave out the CustomResourceDefinitions and the host's role for their objects, since somebody else installs them.
    #[arg(long)]
    skip_crds: bool,
    /// Print these and nothing else: what an administrator installs for all tenants.
    #[arg(long, conflicts_with_all = ["skip_crds", "grants", "image"])]
    only_crds: bool,
    /// The service account that the host runs as, as NAMESPACE/NAME.
    #[arg(long, value_name = "ACCOUNT", default_value = "pilothouse-system/pilothouse", value_parser = service_account)]
    host: ServiceAccountRef,
}

fn service_account(text: &str) -> Result<ServiceAccountRef, String> {
    let (namespace, name) = text.split_once('/').ok_or("write it as NAMESPACE/NAME")?;
    Ok(ServiceAccountRef { namespace: namespace.to_owned(), name: name.to_owned() })
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            // Not the code that clap has for it: that one says that something would change.
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    start(arguments).unwrap_or_else(|error| fail(&error))
}

fn start(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let collector = match &arguments.command {
        // Set to nothing is as good as not set.
        Command::Run(options) => options.otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty()),
        _ => None,
    };
    let traces = collector.map(|endpoint| Traces::start(endpoint, runtime.handle().clone())).transpose()?;
    // Tools are run by people, also where their standard error is no terminal.
    let log_format = match (&arguments.command, arguments.log_format) {
        (Command::Run(_), format) => format,
        (_, LogFormat::Auto) => LogFormat::Text,
        (_, format) => format,
    };
    // What is logged there is a part of what it shows.
    if !matches!(arguments.command, Command::Dev(_)) {
        telemetry::init(log_format, &arguments.log, traces.as_ref());
    }
    let result = runtime.block_on(execute(arguments.command, &arguments.log));
    if let Some(traces) = traces {
        traces.end();
    }
    result
}

fn fail(error: &anyhow::Error) -> ExitCode {
    let mut stderr = anstream::stderr().lock();
    let _ = writeln!(stderr, "error: {}", telemetry::chain(error.as_ref()));
    ExitCode::FAILURE
}

async fn execute(command: Command, log: &str) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(options) => {
            allocator::set_up();
            run::run(options).await?;
        }
        Command::Build(arguments) => build_plugin(arguments)?,
        Command::Dev(options) => Box::pin(dev::dev(&options, log)).await?,
        Command::Push(options) => transfer::push(&options).await?,
        Command::Pull(options) => transfer::pull(&options).await?,
        Command::Sign(options) => sign::sign(&options).await?,
        Command::Verify(options) => sign::verify(&options).await?,
        Command::Inspect(options) => inspect::inspect(&options).await?,
        Command::Render(options) => {
            let differs = render::render(&options).await?;
            return Ok(if differs { ExitCode::from(render::DIFFERENT) } else { ExitCode::SUCCESS });
        }
        Command::Preview(options) => {
            let differs = preview::preview(&options).await?;
            return Ok(if differs { ExitCode::from(render::DIFFERENT) } else { ExitCode::SUCCESS });
        }
        Command::Release(options) => {
            let all = release::release(&options).await?;
            return Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Manifests(arguments) => print_manifests(&arguments).await?,
        Command::Crds => output::yaml(&crd::definitions())?,
        Command::Completion { shell } => {
            // It panics where it cannot write.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "pilothouse", &mut script);
            std::io::stdout().write_all(&script)?;
        }
        Command::CompileComponent(options) => return Ok(compile::command(&options)),
        Command::Version(options) => version::version(&options)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn build_plugin(arguments: BuildArguments) -> anyhow::Result<()> {
    let BuildArguments { directory, output, profile } = arguments;
    let built = build::build(&build::Options { dir: directory, output, profile })?;
    let mut stderr = anstream::stderr().lock();
    let seconds = built.duration.as_secs_f64();
    writeln!(stderr, "{}  {} KB  {seconds:.1} s", built.path.display(), built.size.div_ceil(1000))?;
    Ok(())
}

async fn print_manifests(arguments: &ManifestsArguments) -> anyhow::Result<()> {
    let bytes =
        std::fs::read(&arguments.plugin).with_context(|| format!("failed to read {}", arguments.plugin.display()))?;
    let engine = Arc::new(Engine::new(GUEST_MEMORY)?);
    let plugin = Plugin::open(&engine, None, bytes.clone(), Limits::default().of_a_call(), Arc::default())
        .await
        .with_context(|| format!("{} is no plugin that this host can run", arguments.plugin.display()))?;
    let name =
        arguments.name.clone().or_else(|| stem(&arguments.plugin)).context("give the reconciler a name with --name")?;
    let options = manifests::Options {
        name,
        namespace: arguments.namespace.clone(),
        host: arguments.host.clone(),
        namespaced: arguments.namespaced,
        image: arguments.image.clone(),
        path: None,
        pull_secrets: arguments.pull_secrets.clone(),
        skip_crds: arguments.skip_crds,
        only_crds: arguments.only_crds,
        grants: arguments.grants.as_deref().map(|file| read_grants(file, arguments)).transpose()?,
    };
    Ok(output::yaml(&manifests::manifests(&plugin, &bytes, &options)?)?)
}

fn read_grants(file: &Path, arguments: &ManifestsArguments) -> anyhow::Result<manifests::Granted> {
    let yaml =
        std::fs::read_to_string(file).with_context(|| format!("failed to read {} (--grants)", file.display()))?;
    manifests::Granted::read(&yaml, arguments.namespaced.then_some(arguments.namespace.as_str()))
        .with_context(|| format!("{} is not what spec.grants can be", file.display()))
}

fn stem(path: &Path) -> Option<String> {
    Some(path.file_stem()?.to_str()?.replace('_', "-"))
}
