//! The control plane that all are measured on, with MyApp and an account for each.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::Context as _;
use control_plane::ControlPlane;
use k8s_openapi::{ByteString, api::core::v1::ConfigMap};
use kube::{
    Api, Client, Config,
    api::{Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;

use crate::{
    audit::Audit,
    contestant::{Contestant, Programs},
};

/// See the module's documentation.
pub(crate) struct Cluster {
    control_plane: ControlPlane,
    /// An administrator's.
    pub(crate) client: Client,
}

impl Cluster {
    pub(crate) async fn start(programs: &Programs) -> anyhow::Result<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        // The audit log of tests has the bodies of everybody's requests: time that nobody has to be measured with.
        let policy = format!("--audit-policy-file={}", folder.join("audit-policy.yaml").display());
        let control_plane = ControlPlane::start_with(&[&policy])?;
        let client = client(control_plane.kubeconfig()).await?;
        let cluster = Self { control_plane, client };
        let pilothouse = |arguments: &[&str]| output(Command::new(&programs.pilothouse).args(arguments));
        let plugin = programs.plugin.to_string_lossy();
        let grants = grants();
        let read = |path: &str| fs::read(folder.join(path)).with_context(|| format!("cannot read {path}"));
        for manifests in [
            pilothouse(&["crds"])?,
            read("../../host/deploy/host.yaml")?,
            pilothouse(&["manifests", &plugin, "--grants", &grants])?,
            read("accounts.yaml")?,
        ] {
            cluster.apply(&manifests)?;
        }
        // As many at a time as the others.
        let concurrency = r#"{"spec":{"limits":{"concurrency":32}}}"#;
        cluster.kubectl(&["patch", "clusterreconciler", "myapp", "--type=merge", "-p", concurrency])?;
        // What it would do with Deployments is the same for all, and takes the processors from those who are measured.
        cluster.control_plane.stop_controller_manager()?;
        Ok(cluster)
    }

    /// Everything in it goes when the cluster does.
    pub(crate) fn folder(&self) -> &Path {
        self.control_plane.data_dir()
    }

    /// Where a contestant's log is.
    pub(crate) fn log(&self, contestant: &str) -> PathBuf {
        self.folder().join(format!("{contestant}.log"))
    }

    pub(crate) fn audit(&self, contestant: Contestant) -> Audit {
        Audit::of(self.control_plane.audit_log().to_owned(), contestant.account())
    }

    /// A client with the account of this contestant.
    pub(crate) async fn client_of(&self, contestant: Contestant) -> anyhow::Result<Client> {
        client(&self.kubeconfig(contestant)?).await
    }

    /// Writes a kubeconfig with the account of this contestant.
    pub(crate) fn kubeconfig(&self, contestant: Contestant) -> anyhow::Result<PathBuf> {
        let (namespace, account) = contestant.account();
        let token = self.kubectl(&["create", "token", account, "--namespace", namespace, "--duration=24h"])?;
        let plane = &self.control_plane;
        let kubeconfig = json!({"apiVersion": "v1", "kind": "Config", "current-context": "bench",
            "clusters": [{"name": "bench", "cluster":
                {"server": plane.server(), "certificate-authority": plane.certificate_authority()}}],
            "users": [{"name": account, "user": {"token": token.trim()}}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": account}}]});
        let file = self.folder().join(format!("{account}.bench.kubeconfig"));
        fs::write(&file, kubeconfig.to_string()).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }

    /// Makes the plugin of Pilothouse another one.
    pub(crate) async fn replace_plugin(&self, plugin: Vec<u8>) -> anyhow::Result<()> {
        let config_maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), "pilothouse-system");
        let patch = Patch::Merge(json!({"binaryData": {"plugin.wasm": ByteString(plugin)}}));
        config_maps.patch("myapp-plugin", &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Installs one more reconciler, with a plugin of its own.
    pub(crate) fn add_reconciler(&self, programs: &Programs, name: &str, plugin: &[u8]) -> anyhow::Result<()> {
        let file = self.folder().join(format!("{name}.wasm"));
        fs::write(&file, plugin).with_context(|| format!("cannot write {}", file.display()))?;
        let arguments = ["manifests", "--skip-crds", "--grants", &grants(), "--name", name];
        self.apply(&output(Command::new(&programs.pilothouse).args(arguments).arg(&file))?)
    }

    fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        Ok(String::from_utf8(output(self.control_plane.kubectl().args(arguments))?)?)
    }

    fn apply(&self, manifests: &[u8]) -> anyhow::Result<()> {
        let mut kubectl = self.control_plane.kubectl();
        kubectl.args(["apply", "--server-side", "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut kubectl = kubectl.spawn().context("cannot run kubectl")?;
        kubectl.stdin.take().context("kubectl does not read")?.write_all(manifests)?;
        anyhow::ensure!(kubectl.wait()?.success(), "kubectl apply failed");
        Ok(())
    }
}

/// Of MyApp, which does not load without. No parent of the benchmark asks for what it is granted.
fn grants() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../plugins/myapp/grants.yaml").to_string_lossy().into_owned()
}

async fn client(kubeconfig: &Path) -> anyhow::Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn output(command: &mut Command) -> anyhow::Result<Vec<u8>> {
    let program = command.get_program().to_owned();
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    let error = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{} failed: {error}", program.display());
    Ok(output.stdout)
}
