//! A control plane with the host and two plugins on it, and a namespace for each test.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use control_plane::ControlPlane;
use kube::{
    Api, Client, Config,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, PropagationPolicy},
    config::{KubeConfigOptions, Kubeconfig},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};

use crate::audit;

/// How long anything may take on a machine that is busy with other things. What takes longer has failed.
const PATIENCE: Duration = Duration::from_mins(2);

/// A control plane with everything installed, and no host yet.
pub(crate) struct Cluster {
    pub(crate) control_plane: ControlPlane,
    host_kubeconfig: PathBuf,
    hosts: AtomicUsize,
}

fn write_kubeconfig(file: &Path, cluster: &Value, token: &str) {
    let kubeconfig = json!({"apiVersion": "v1", "kind": "Config", "current-context": "host",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "host", "user": {"token": token}}],
        "contexts": [{"name": "host", "context": {"cluster": "test", "user": "host"}}]});
    fs::write(file, kubeconfig.to_string()).expect("the kubeconfig can be written");
}

/// A host process. Killed when dropped, and with the test process.
pub(crate) struct Host {
    shell: Child,
    /// The shell around the host ends it when this closes, which it does at the latest when the test process ends.
    lifeline: Option<ChildStdin>,
    pid: String,
    pub(crate) log: PathBuf,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// One with nothing installed.
    pub(crate) fn empty() -> Self {
        let control_plane = ControlPlane::start_with(&[]).expect("the control plane starts");
        let host_kubeconfig = control_plane.data_dir().join("host.kubeconfig");
        Self { control_plane, host_kubeconfig, hosts: AtomicUsize::new(0) }
    }

    /// The same as [`Self::start`], with these flags of the API server besides its usual ones.
    pub(crate) fn start_with(api_server_flags: &[&str]) -> Self {
        let control_plane = ControlPlane::start_with(api_server_flags).expect("the control plane starts");
        let dir = control_plane.data_dir();
        let host_kubeconfig = dir.join("host.kubeconfig");
        let cluster = Self { hosts: AtomicUsize::new(0), host_kubeconfig, control_plane };
        cluster.apply(&pilothouse(&["crds"]));
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/host.yaml");
        cluster.apply(&fs::read(deploy).expect("host.yaml is there"));
        for plugin in ["myapp", "mirror"] {
            cluster.apply(&manifests(plugin, plugin));
        }
        cluster.kubectl(&["patch", "crec", "mirror", "--type=merge", "-p", r#"{"spec":{"limits":{"timeout":"1s"}}}"#]);
        // The garbage collector learns of new kinds within half a minute, or when it starts.
        cluster.control_plane.stop_controller_manager().expect("the controller manager stops");
        cluster.control_plane.start_controller_manager().expect("the controller manager starts");
        cluster.write_kubeconfig(&cluster.host_kubeconfig);
        cluster
    }

    /// The control plane and the host that most tests share.
    pub(crate) fn shared() -> &'static Self {
        &Self::shared_with_host().0
    }

    /// Both of them.
    pub(crate) fn shared_with_host() -> &'static (Self, Host) {
        static SHARED: OnceLock<(Cluster, Host)> = OnceLock::new();
        SHARED.get_or_init(|| {
            let cluster = Self::start();
            let host = cluster.run_host();
            (cluster, host)
        })
    }

    /// What a client says to be the host.
    pub(crate) fn host_token(&self) -> String {
        let token = self.kubectl(&["create", "token", "pilothouse", "--namespace=pilothouse-system", "--duration=10h"]);
        token.trim().to_owned()
    }

    /// For a host with a token of its own, by which its requests can be told from those of others.
    pub(crate) fn kubeconfig(&self, name: &str) -> PathBuf {
        let file = self.control_plane.data_dir().join(format!("{name}.kubeconfig"));
        self.write_kubeconfig(&file);
        file
    }

    fn write_kubeconfig(&self, file: &Path) {
        let plane = &self.control_plane;
        let cluster = json!({"server": plane.server(), "certificate-authority": plane.certificate_authority()});
        write_kubeconfig(file, &cluster, &self.host_token());
    }

    /// For a host that finds the API server behind a proxy at this address.
    pub(crate) fn write_kubeconfig_by_way_of(&self, file: &Path, proxy: SocketAddr, token: &str) {
        write_kubeconfig(file, &json!({"server": format!("http://{proxy}")}), token);
    }

    /// Starts a host, under its own role, and waits until it watches for both reconcilers.
    pub(crate) fn run_host(&self) -> Host {
        self.run_host_with(&[], 2)
    }

    /// Starts a host with these arguments, and waits until it watches for so many reconcilers.
    pub(crate) fn run_host_with(&self, arguments: &[&str], reconcilers: usize) -> Host {
        self.run_host_until(arguments, |log| log.matches("\"message\":\"watching\"").count() == reconcilers)
    }

    /// Starts a host and waits until it logs this.
    pub(crate) fn run_host_that(&self, logs: &str) -> Host {
        self.run_host_until(&[], |log| log.contains(logs))
    }

    fn run_host_until(&self, arguments: &[&str], is_up: impl Fn(&str) -> bool) -> Host {
        let host = self.spawn_host(&self.host_kubeconfig, arguments);
        let (mut heard, mut since) = (0, Instant::now());
        loop {
            let log = host.log_text();
            if is_up(&log) {
                return host;
            }
            // One that has a hundred plugins to compile is at it for minutes, and says so.
            if log.len() > heard {
                (heard, since) = (log.len(), Instant::now());
            }
            assert!(since.elapsed() < PATIENCE, "the host does not come up: {log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts a host that finds its cluster by this kubeconfig, and does not wait for it.
    pub(crate) fn spawn_host(&self, kubeconfig: &Path, arguments: &[&str]) -> Host {
        let number = self.hosts.fetch_add(1, Ordering::SeqCst);
        let log = self.control_plane.data_dir().join(format!("host-{number}.log"));
        let mut shell = Command::new("sh")
            .args(["-c", r#""$0" "$@" & host=$!; echo $host; read -r _; kill $host 2>/dev/null; wait $host"#])
            .arg(env!("CARGO_BIN_EXE_pilothouse"))
            .args([
                "run",
                "--health-probe-bind-address=127.0.0.1:0",
                "--metrics-bind-address=127.0.0.1:0",
                "--log-format=json",
            ])
            // Unless the test wants to see more.
            .args((!arguments.iter().any(|it| it.starts_with("--log="))).then_some("--log=info,pilothouse=debug"))
            .args(arguments)
            .env("KUBECONFIG", kubeconfig)
            // Hosts on a cluster share what they have compiled.
            .env("PILOTHOUSE_CACHE_DIR", self.control_plane.data_dir().join("plugins"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).expect("the log can be written"))
            .spawn()
            .expect("the host starts");
        let lifeline = shell.stdin.take();
        let mut pid = String::new();
        BufReader::new(shell.stdout.take().expect("it is piped")).read_line(&mut pid).expect("the shell tells the pid");
        Host { shell, lifeline, pid: pid.trim().to_owned(), log }
    }

    /// The text of all logs of hosts on this cluster.
    pub(crate) fn host_logs(&self) -> String {
        let hosts = self.hosts.load(Ordering::SeqCst);
        let logs = (0..hosts).map(|host| self.control_plane.data_dir().join(format!("host-{host}.log")));
        logs.map(|log| fs::read_to_string(log).unwrap_or_default()).collect()
    }

    /// What kubectl prints, as an administrator.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        let output = self.control_plane.kubectl().args(arguments).output().expect("kubectl runs");
        assert!(output.status.success(), "kubectl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub(crate) fn apply(&self, manifests: &[u8]) {
        let mut kubectl = self.control_plane.kubectl();
        kubectl
            .args(["apply", "--server-side", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut kubectl = kubectl.spawn().expect("kubectl runs");
        kubectl.stdin.take().expect("it is piped").write_all(manifests).expect("kubectl reads");
        let output = kubectl.wait_with_output().expect("kubectl ends");
        assert!(output.status.success(), "kubectl apply: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A namespace for one test.
    pub(crate) async fn namespace(&self, name: &str) -> Namespace<'_> {
        let kubeconfig = Kubeconfig::read_from(self.control_plane.kubeconfig()).expect("the kubeconfig is there");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("the kubeconfig is good")).expect("a client can be made");
        let namespace = Namespace { cluster: self, client, name: name.to_owned() };
        namespace.create(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})).await;
        namespace
    }
}

impl Host {
    /// The memory that it has in RAM, in MiB.
    pub(crate) fn resident(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).expect("the host runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux says so");
        line.trim().trim_end_matches(" kB").parse::<f64>().expect("it is a number") / 1024.0
    }

    /// A file of `/proc` about it: `maps` what its memory is made of, `smaps_rollup` how much that is.
    pub(crate) fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.pid)).expect("the host runs")
    }

    pub(crate) fn log_text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// What it serves as `/metrics`.
    pub(crate) async fn metrics(&self) -> String {
        self.ask("metrics", "/metrics").await.expect("it is served")
    }

    /// Whether it says that it is ready.
    pub(crate) async fn is_ready(&self) -> bool {
        self.ask("health", "/readyz").await.is_ok()
    }

    async fn ask(&self, server: &str, path: &str) -> Result<String, kube::Error> {
        let starts = self.logged("pilothouse runs").expect("it says so");
        let address = starts[server].as_str().expect("it says where");
        let config = Config::new(format!("http://{address}").parse().expect("it is an address"));
        let client = Client::try_from(config).expect("a client can be made");
        client.request_text(http::Request::get(path).body(Vec::new()).expect("it is a request")).await
    }

    /// The first line of its log with this message.
    pub(crate) fn logged(&self, message: &str) -> Option<Value> {
        let message = format!("\"message\":\"{message}\"");
        let log = self.log_text();
        let line = log.lines().find(|line| line.contains(&message))?;
        // The last line may be half written.
        serde_json::from_str(line).ok()
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.pid]).status();
        assert!(sent.expect("kill runs").success(), "the host runs until it is killed");
    }

    /// Lets it sleep: what happens now it will find all at once.
    pub(crate) fn pause(&self) {
        self.signal("-STOP");
    }

    /// Wakes it up.
    pub(crate) fn resume(&self) {
        self.signal("-CONT");
    }

    /// Kills it as a crash of its machine would.
    pub(crate) fn kill(mut self) {
        self.signal("-KILL");
        drop(self.lifeline.take());
        self.shell.wait().expect("the shell ends");
    }

    /// The code with which it has ended by itself.
    pub(crate) fn exit_code(mut self) -> Option<i32> {
        drop(self.lifeline.take());
        self.shell.wait().expect("the shell ends").code()
    }

    /// Ends it as the kubelet would.
    pub(crate) fn terminate(mut self) {
        drop(self.lifeline.take());
        self.shell.wait().expect("the shell ends");
        assert!(self.log_text().contains("\"message\":\"stopped\""), "SIGTERM ends it in order: {}", self.log_text());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.lifeline.take());
        let _ = self.shell.wait();
    }
}

pub(crate) fn pilothouse(arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(env!("CARGO_BIN_EXE_pilothouse")).args(arguments).output().expect("pilothouse runs");
    assert!(output.status.success(), "pilothouse {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// What installs a plugin under that name; with grants, if it needs some.
pub(crate) fn manifests(plugin: &str, name: &str) -> Vec<u8> {
    manifests_with(plugin, name, &[])
}

/// The same, with these arguments besides.
pub(crate) fn manifests_with(plugin: &str, name: &str, more: &[&str]) -> Vec<u8> {
    let component = component(plugin);
    let mut arguments = vec!["manifests", component.to_str().expect("it is text"), "--name", name];
    arguments.extend(more);
    if plugin == "myapp" {
        arguments.extend(["--grants", concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/myapp/grants.yaml")]);
    }
    pilothouse(&arguments)
}

/// Where `make plugins` put a component: beside the folder of the test's binary.
pub(crate) fn component(plugin: &str) -> PathBuf {
    let binary = Path::new(env!("CARGO_BIN_EXE_pilothouse"));
    let target = binary.ancestors().nth(2).expect("it is in target/debug");
    let component = target.join("plugins").join(format!("{plugin}.wasm"));
    assert!(component.is_file(), "{} is missing: run `make plugins`", component.display());
    component
}

/// The mirror in another version: the digit in the text that it shows.
pub(crate) fn mirror(version: u8) -> Vec<u8> {
    let mut bytes = std::fs::read(component("mirror")).expect("it was built");
    let text = b"the mirror, version 1";
    let places: Vec<_> =
        bytes.windows(text.len()).enumerate().filter(|(_, part)| part == text).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the component holds its version");
    for at in places {
        bytes[at + text.len() - 1] = b'0' + version;
    }
    bytes
}

/// One test's namespace.
pub(crate) struct Namespace<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) client: Client,
    pub(crate) name: String,
}

impl Namespace<'_> {
    pub(crate) fn api(&self, api_version: &str, kind: &str) -> Api<DynamicObject> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let api = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        if kind == "Namespace" {
            Api::all_with(self.client.clone(), &api)
        } else {
            Api::namespaced_with(self.client.clone(), &self.name, &api)
        }
    }

    /// Objects of a kind of cluster scope.
    pub(crate) fn cluster_api(&self, api_version: &str, kind: &str) -> Api<DynamicObject> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        Api::all_with(self.client.clone(), &ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind)))
    }

    pub(crate) fn widgets(&self) -> Api<DynamicObject> {
        self.api("t.example/v1", "Widget")
    }

    pub(crate) fn my_apps(&self) -> Api<DynamicObject> {
        self.api("mygroup.example.com/v1", "MyApp")
    }

    /// The ClusterReconcilers.
    pub(crate) fn reconcilers(&self) -> Api<DynamicObject> {
        self.cluster_api("pilothouse.dev/v1alpha1", "ClusterReconciler")
    }

    pub(crate) fn config_maps(&self) -> Api<DynamicObject> {
        self.api("v1", "ConfigMap")
    }

    pub(crate) fn deployments(&self) -> Api<DynamicObject> {
        self.api("apps/v1", "Deployment")
    }

    pub(crate) async fn create(&self, object: Value) -> DynamicObject {
        let text = |name: &str| object[name].as_str().unwrap_or_default().to_owned();
        let api = self.api(&text("apiVersion"), &text("kind"));
        let object: DynamicObject = serde_json::from_value(object).expect("it is an object");
        api.create(&PostParams::default(), &object).await.expect("it can be created")
    }

    /// A Widget whose spec is that.
    pub(crate) async fn widget(&self, name: &str, spec: Value) -> DynamicObject {
        self.create(json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec}))
            .await
    }

    /// A MyApp whose spec is that.
    pub(crate) async fn my_app(&self, name: &str, spec: Value) -> DynamicObject {
        self.create(
            json!({"apiVersion": "mygroup.example.com/v1", "kind": "MyApp", "metadata": {"name": name}, "spec": spec}),
        )
        .await
    }

    /// The host's requests about objects of this namespace.
    pub(crate) fn requests(&self) -> Vec<audit::Request> {
        let mut requests = audit::requests(self.cluster.control_plane.audit_log());
        requests.retain(|request| request.namespace == self.name);
        requests
    }

    /// The host's writes in this namespace, Events aside.
    pub(crate) fn writes(&self) -> Vec<audit::Request> {
        let mut writes = self.requests();
        writes.retain(|request| request.is_write() && request.resource != "events");
        writes
    }

    /// Asserts that the host asks nothing about this namespace for so long.
    pub(crate) async fn assert_quiet(&self, time: Duration) {
        // What was under way may come to its end.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = self.requests().len();
        tokio::time::sleep(time).await;
        let requests = self.requests().split_off(before);
        assert!(requests.is_empty(), "not quiet: {requests:#?}");
    }

    /// How often the plugin of this parent was called: how often it logged `line`.
    pub(crate) fn calls(&self, parent: &str, line: &str) -> usize {
        let (parent, line) = (format!("\"parent\":\"{}/{parent}\"", self.name), format!("\"message\":\"{line}\""));
        self.cluster.host_logs().lines().filter(|text| text.contains(&line) && text.contains(&parent)).count()
    }
}

/// Merges `patch` into the object.
pub(crate) async fn edit(api: &Api<DynamicObject>, name: &str, patch: Value) -> DynamicObject {
    api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("it can be edited")
}

pub(crate) async fn delete(api: &Api<DynamicObject>, name: &str, propagation: PropagationPolicy) {
    let params = DeleteParams { propagation_policy: Some(propagation), ..DeleteParams::default() };
    api.delete(name, &params).await.expect("it can be deleted");
}

/// Waits until `look` finds what it looks for.
pub(crate) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the object is gone.
pub(crate) async fn gone(api: &Api<DynamicObject>, name: &str) {
    eventually(&format!("{name} is gone"), async || get(api, name).await.is_none().then_some(())).await;
}

/// Waits until the object is as `is` wants it.
pub(crate) async fn until(
    api: &Api<DynamicObject>,
    name: &str,
    what: &str,
    is: impl Fn(&DynamicObject) -> bool,
) -> DynamicObject {
    eventually(&format!("{name}: {what}"), async || get(api, name).await.filter(|object| is(object))).await
}

/// Waits until the host has followed the latest spec of this parent.
pub(crate) async fn synced(api: &Api<DynamicObject>, name: &str) -> DynamicObject {
    until(api, name, "Synced is True", |parent| {
        condition(parent, "Synced").is_some_and(|synced| {
            synced["status"] == "True" && synced["observedGeneration"].as_i64() == parent.metadata.generation
        })
    })
    .await
}

/// Waits until `Synced` is False for this reason; its message.
pub(crate) async fn refused(api: &Api<DynamicObject>, name: &str, reason: &str) -> String {
    let parent = until(api, name, &format!("Synced is False, {reason}"), |parent| {
        condition(parent, "Synced").is_some_and(|synced| synced["status"] == "False" && synced["reason"] == reason)
    })
    .await;
    let message = condition(&parent, "Synced").and_then(|synced| synced["message"].as_str().map(str::to_owned));
    let message = message.unwrap_or_default();
    // The revision is another one for each build.
    let (revision, said) = message.split_once(": ").unwrap_or(("", &message));
    if revision.starts_with("revision ") { said.to_owned() } else { message }
}

/// Waits until the condition of a reconciler has this status, and this reason unless it is empty; its message.
pub(crate) async fn told(
    reconcilers: &Api<DynamicObject>,
    name: &str,
    kind: &str,
    status: &str,
    reason: &str,
) -> String {
    let object = until(reconcilers, name, &format!("{kind} is {status}, {reason}"), |object| {
        condition(object, kind)
            .is_some_and(|it| it["status"] == status && (reason.is_empty() || it["reason"] == reason))
    })
    .await;
    condition(&object, kind).map(|it| it["message"].as_str().unwrap_or_default().to_owned()).unwrap_or_default()
}

pub(crate) async fn get(api: &Api<DynamicObject>, name: &str) -> Option<DynamicObject> {
    // An API server that is being restarted does not answer.
    let answer = api.get_opt(name).await;
    assert!(!matches!(answer, Err(kube::Error::Api(_))), "{name}: {answer:?}");
    answer.unwrap_or_default()
}

pub(crate) fn condition(object: &DynamicObject, kind: &str) -> Option<Value> {
    object.data["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind).cloned()
}

/// The finalizers of ours on it.
pub(crate) fn our_finalizers(object: &DynamicObject) -> Vec<String> {
    let finalizers = object.metadata.finalizers.iter().flatten();
    finalizers.filter(|finalizer| finalizer.starts_with("pilothouse.dev/")).cloned().collect()
}

/// A ConfigMap for a Widget's reply.
pub(crate) fn config_map(name: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": value}})
}
