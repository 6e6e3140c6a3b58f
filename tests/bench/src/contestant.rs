//! Who is measured, and how each is started.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use bench::report::OURS;
use clap::ValueEnum;
use tokio::process::Command;

use crate::cluster::Cluster;

/// How the message of a condition ends, and how it does with a changed logic: what compilers leave as it is, so that a plugin can be
/// changed without one.
pub(crate) const WORDS: [&str; 2] = ["available", "reachable"];

/// One of those who do the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Contestant {
    /// The host, with plugins/myapp.
    Pilothouse,
    /// `native`.
    KubeRuntime,
    /// `controller-runtime`.
    ControllerRuntime,
    /// `kopf`.
    Kopf,
    /// The same writes, sent as fast as one client can.
    Ceiling,
}

impl Contestant {
    pub(crate) const ALL: [Self; 5] =
        [Self::Pilothouse, Self::KubeRuntime, Self::ControllerRuntime, Self::Kopf, Self::Ceiling];

    /// As it is called in the report, and its account in the cluster.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pilothouse => OURS,
            Self::KubeRuntime => "kube-runtime",
            Self::ControllerRuntime => "controller-runtime",
            Self::Kopf => "kopf",
            Self::Ceiling => "ceiling",
        }
    }

    /// The namespace of its account, and the account.
    pub(crate) fn account(self) -> (&'static str, &'static str) {
        match self {
            Self::Pilothouse => ("pilothouse-system", "pilothouse"),
            other => ("bench", other.name()),
        }
    }

    /// Whether it is machine code, whose memory is worth a comparison with many parents.
    pub(crate) fn is_native(self) -> bool {
        matches!(self, Self::Pilothouse | Self::KubeRuntime | Self::ControllerRuntime)
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// Where everything is.
pub(crate) struct Programs {
    pub(crate) pilothouse: PathBuf,
    pub(crate) plugin: PathBuf,
    native: PathBuf,
    others: Option<PathBuf>,
}

impl Programs {
    /// Those of cargo are beside this one.
    pub(crate) fn find(plugin: Option<PathBuf>, others: Option<PathBuf>) -> anyhow::Result<Self> {
        let me = env::current_exe().context("cannot find the running program")?;
        let beside = |name: &str| me.with_file_name(name);
        let plugin = plugin.unwrap_or_else(|| beside("../plugins/myapp.wasm"));
        anyhow::ensure!(plugin.is_file(), "{} is missing: run `make plugins`", plugin.display());
        Ok(Self { pilothouse: beside("pilothouse"), native: beside("bench-native"), plugin, others })
    }

    /// The plugin as if its logic had been changed, or built by others: with this word of the same length in its message.
    pub(crate) fn changed_plugin(&self, word: &str) -> anyhow::Result<Vec<u8>> {
        let mut plugin = self.plugin()?;
        let text = format!("replicas are {}", WORDS[0]);
        let place = plugin.windows(text.len()).position(|bytes| bytes == text.as_bytes());
        let end = place.context("the plugin does not hold its message as it used to")? + text.len();
        anyhow::ensure!(word.len() == WORDS[0].len(), "{word} is of another length");
        plugin[end - word.len()..end].copy_from_slice(word.as_bytes());
        Ok(plugin)
    }

    pub(crate) fn plugin(&self) -> anyhow::Result<Vec<u8>> {
        fs::read(&self.plugin).with_context(|| format!("cannot read {}", self.plugin.display()))
    }

    /// How this one is started on the cluster.
    pub(crate) fn command(&self, contestant: Contestant, cluster: &Cluster) -> anyhow::Result<Command> {
        let others = || self.others.as_deref().context("give --others, the folder that tests/bench/build.sh prints");
        let mut command = match contestant {
            Contestant::Pilothouse => {
                let mut command = Command::new(&self.pilothouse);
                command.args(["run", "--log-format=json", "--max-concurrent-reconciles=64"]);
                command.args(["--health-probe-bind-address=127.0.0.1:0", "--metrics-bind-address=127.0.0.1:0"]);
                command.env("PILOTHOUSE_CACHE_DIR", cluster.folder().join("plugins"));
                command
            }
            Contestant::KubeRuntime => Command::new(&self.native),
            Contestant::ControllerRuntime => Command::new(others()?.join("controller-runtime")),
            Contestant::Kopf => {
                let mut command = Command::new(others()?.join("kopf/bin/python"));
                command.args(["-m", "kopf", "run", "--quiet", "--all-namespaces"]);
                command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("kopf/operator.py"));
                command
            }
            Contestant::Ceiling => anyhow::bail!("the ceiling is no process"),
        };
        command.env("KUBECONFIG", cluster.kubeconfig(contestant)?);
        Ok(command)
    }
}
