//! Runs one control plane: starts its servers, obeys commands on stdin, and leaves nothing when it ends.

use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io::{self, Write},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{self, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use control_plane::{Answer, Location};
use serde::Serialize;
use serde_json::{Value, json};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use tempfile::TempDir;

use crate::{
    binaries::{self, Binaries},
    credentials::{self, Credentials},
    ports::Ports,
    server::{self, Server},
};

/// Far more than a start takes; a machine that is busy with a build needs some of it.
const PATIENCE: Duration = Duration::from_secs(120);
const NODE: &str = "/api/v1/nodes/fake";

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Binaries(#[from] binaries::Error),
    #[error("cannot make keys and certificates: {0}")]
    Credentials(#[from] credentials::Error),
    #[error(transparent)]
    NotStarted(#[from] server::NotStarted),
    #[error(transparent)]
    Ended(#[from] server::Ended),
    #[error("{what} is not ready after {} s; {log}", PATIENCE.as_secs())]
    NotReady { what: &'static str, log: String },
    #[error("cannot {doing}: {source}")]
    Io { doing: &'static str, source: io::Error },
    #[error("the API server refused the fake node: {0}")]
    Node(String),
    #[error("another control plane is up already, it holds {}", .0.display())]
    AlreadyUp(PathBuf),
    #[error("{0:?} is not one of stop-api-server, start-api-server, stop-controller-manager, start-controller-manager")]
    UnknownCommand(String),
    #[error("stopped before it was ready")]
    Stopped,
    #[error("{source}\nthe data folder is kept: {}", .data.display())]
    Kept { source: Box<Self>, data: PathBuf },
}

fn io(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Io { doing, source }
}

/// What reaches the main thread, which alone starts and stops servers.
enum Event {
    Command(String),
    Stop,
}

/// Runs a control plane until its stdin ends or a signal says so. With a state file it runs in the background instead:
/// in a session of its own, deaf to stdin, and with the file locked and holding its location for as long as it lives.
pub(crate) fn run(state: Option<&Path>, api_server_flags: &[OsString]) -> Result<(), Error> {
    let mut state = state.map(take_state).transpose()?;
    let binaries = Binaries::find()?;
    let inbox = Inbox::open(state.is_none())?;
    let dir =
        tempfile::Builder::new().prefix("pilothouse-control-plane-").tempdir().map_err(io("make a data folder"))?;
    let mut cluster = Cluster::new(&binaries, &dir, api_server_flags)?;
    let outcome = cluster.start(&inbox).and_then(|location| {
        if let Some(state) = &mut state {
            serde_json::to_writer(state, &location).map_err(|error| io("write the state file")(error.into()))?;
        }
        say(&location);
        Ok(())
    });
    match outcome {
        Ok(()) => cluster.serve(&inbox),
        Err(Error::Stopped) => return Err(Error::Stopped),
        Err(error) => {
            drop(cluster);
            return Err(Error::Kept { source: Box::new(error), data: dir.keep() });
        }
    }
    drop(cluster);
    dir.close().map_err(io("remove the data folder"))
}

/// Prints one line of JSON. Nobody may be listening any more: then there is nobody to tell.
pub(crate) fn say(answer: &impl Serialize) {
    if let Ok(line) = serde_json::to_string(answer) {
        let mut out = io::stdout().lock();
        drop(writeln!(out, "{line}").and_then(|()| out.flush()));
    }
}

fn take_state(path: &Path) -> Result<File, Error> {
    // Fails only in a process that leads a group already: one that a shell started by hand, not `up`.
    rustix::process::setsid().ok();
    let file =
        File::options().create(true).truncate(false).write(true).open(path).map_err(io("open the state file"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(Error::AlreadyUp(path.to_owned())),
        Err(TryLockError::Error(error)) => return Err(io("lock the state file")(error)),
    }
    file.set_len(0).map_err(io("empty the state file"))?;
    Ok(file)
}

/// Commands and the wish to stop, from threads that only listen.
struct Inbox {
    events: Receiver<Event>,
    stopping: Arc<AtomicBool>,
}

impl Inbox {
    fn open(stdin: bool) -> Result<Self, Error> {
        let (sender, events) = mpsc::channel();
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = |sender: Sender<Event>| {
            let stopping = Arc::clone(&stopping);
            move || {
                stopping.store(true, Ordering::Relaxed);
                // The other end is gone only when the process is ending anyway.
                drop(sender.send(Event::Stop));
            }
        };

        let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(io("listen to signals"))?;
        let on_signal = stop(sender.clone());
        thread::spawn(move || signals.forever().for_each(|_| on_signal()));
        if stdin {
            let on_end = stop(sender.clone());
            thread::spawn(move || {
                for line in io::stdin().lines().map_while(Result::ok) {
                    drop(sender.send(Event::Command(line)));
                }
                on_end();
            });
        }
        Ok(Self { events, stopping })
    }
}

/// The servers and what they share. Dropping it kills them.
struct Cluster {
    api_server: Server,
    controller_manager: Server,
    scheduler: Server,
    kwok: Server,
    etcd: Server,
    ports: Ports,
    location: Location,
}

impl Cluster {
    fn new(binaries: &Binaries, dir: &TempDir, api_server_flags: &[OsString]) -> Result<Self, Error> {
        let data = dir.path();
        let ports = Ports::take().map_err(io("find free ports"))?;
        let location = Location {
            kubeconfig: data.join("admin.kubeconfig"),
            audit_log: data.join("audit.log"),
            data_dir: data.to_owned(),
            server: format!("https://127.0.0.1:{}", ports.api_server),
            certificate_authority: data.join("ca.crt"),
            bin_dir: binaries.bin.clone(),
            pid: process::id(),
        };
        let credentials = Credentials::write(data, &location.server)?;
        let policy = data.join("audit-policy.yaml");
        fs::write(&policy, include_str!("audit-policy.yaml")).map_err(io("write the audit policy"))?;

        let mut for_api_server = api_server(&ports, &credentials, &policy, &location.audit_log);
        for_api_server.extend_from_slice(api_server_flags);
        let server = |name, arguments: Vec<OsString>| Server::new(name, &binaries.bin, data, arguments);
        Ok(Self {
            etcd: server("etcd", etcd(data, &ports)),
            api_server: server("kube-apiserver", for_api_server),
            controller_manager: server("kube-controller-manager", controller_manager(&credentials)),
            scheduler: server("kube-scheduler", scheduler(&credentials)),
            kwok: server("kwok", kwok(&credentials, &binaries.stages)),
            ports,
            location,
        })
    }

    fn start(&mut self, inbox: &Inbox) -> Result<Location, Error> {
        self.etcd.start()?;
        self.wait("etcd", inbox, |cluster| &cluster.etcd, |cluster| listens(cluster.ports.etcd))?;
        self.start_api_server(inbox)?;
        // These give up when the API server is not there for them.
        for client in self.clients() {
            client.start()?;
        }
        self.create_node()?;
        self.wait("the fake node", inbox, |cluster| &cluster.kwok, Self::node_is_ready)?;
        self.wait(
            "the default namespace",
            inbox,
            |cluster| &cluster.controller_manager,
            |cluster| cluster.get("/api/v1/namespaces/default/serviceaccounts/default").is_some(),
        )?;
        Ok(self.location.clone())
    }

    fn start_api_server(&mut self, inbox: &Inbox) -> Result<(), Error> {
        self.api_server.start()?;
        self.wait("the API server", inbox, |cluster| &cluster.api_server, |cluster| listens(cluster.ports.api_server))?;
        self.wait(
            "the API server",
            inbox,
            |cluster| &cluster.api_server,
            |cluster| cluster.kubectl(&["get", "--raw", "/readyz"], None).is_ok(),
        )
    }

    fn clients(&mut self) -> [&mut Server; 3] {
        [&mut self.controller_manager, &mut self.scheduler, &mut self.kwok]
    }

    /// Starts the API server again, and those of its clients anew that are running: they would come back by themselves,
    /// but only after up to a minute of backing off.
    fn restart_api_server(&mut self, inbox: &Inbox) -> Result<(), Error> {
        if self.api_server.is_running() {
            return Ok(());
        }
        self.start_api_server(inbox)?;
        for client in self.clients().into_iter().filter(|client| client.is_running()) {
            client.stop();
            client.start()?;
        }
        Ok(())
    }

    /// Obeys until told to stop.
    fn serve(&mut self, inbox: &Inbox) {
        loop {
            match inbox.events.recv_timeout(Duration::from_secs(1)) {
                Ok(Event::Command(command)) => match self.obey(command.trim(), inbox) {
                    Ok(()) => say(&Answer::Ok(true)),
                    Err(error) => say(&Answer::Error(error.to_string())),
                },
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(error) = self.check() {
                        eprintln!("control-plane: {error}");
                    }
                }
            }
        }
    }

    fn obey(&mut self, command: &str, inbox: &Inbox) -> Result<(), Error> {
        match command {
            "stop-api-server" => self.api_server.stop(),
            "start-api-server" => return self.restart_api_server(inbox),
            "stop-controller-manager" => self.controller_manager.stop(),
            "start-controller-manager" => self.controller_manager.start()?,
            _ => return Err(Error::UnknownCommand(command.to_owned())),
        }
        Ok(())
    }

    /// Waits for something that a server brings about, as long as all servers live and nobody wants to stop.
    fn wait(
        &mut self,
        what: &'static str,
        inbox: &Inbox,
        server: impl Fn(&Self) -> &Server,
        is_ready: impl Fn(&Self) -> bool,
    ) -> Result<(), Error> {
        let start = Instant::now();
        while !is_ready(self) {
            self.check()?;
            if inbox.stopping.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            if start.elapsed() > PATIENCE {
                return Err(Error::NotReady { what, log: server(self).log_tail() });
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), server::Ended> {
        let servers =
            [&mut self.etcd, &mut self.api_server, &mut self.controller_manager, &mut self.scheduler, &mut self.kwok];
        servers.into_iter().try_for_each(Server::check)
    }

    fn create_node(&self) -> Result<(), Error> {
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": "fake",
                "annotations": {"kwok.x-k8s.io/node": "fake"},
                "labels": {"kubernetes.io/hostname": "fake", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
            },
        });
        let file = self.location.data_dir.join("node.json");
        fs::write(&file, node.to_string()).map_err(io("write the fake node"))?;
        self.kubectl(&["create", "--raw", "/api/v1/nodes", "-f"], Some(&file)).map_err(Error::Node)?;
        Ok(())
    }

    /// Ready, and without the taint that keeps pods away from a node that is not.
    fn node_is_ready(&self) -> bool {
        let Some(node) = self.get(NODE) else { return false };
        let ready = node["status"]["conditions"]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"));
        ready && node["spec"]["taints"].is_null()
    }

    fn get(&self, path: &str) -> Option<Value> {
        serde_json::from_str(&self.kubectl(&["get", "--raw", path], None).ok()?).ok()
    }

    fn kubectl(&self, arguments: &[&str], file: Option<&Path>) -> Result<String, String> {
        let output: Output = server::command(&self.location.bin_dir.join("kubectl"), &self.location.data_dir)
            .arg("--kubeconfig")
            .arg(&self.location.kubeconfig)
            .arg("--request-timeout=5s")
            .args(arguments)
            .args(file)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot run kubectl: {error}"))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
    }
}

fn listens(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// `--name=value`, for values that are paths too.
fn flag(name: &str, value: impl Into<OsString>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value.into());
    flag
}

fn etcd(data: &Path, ports: &Ports) -> Vec<OsString> {
    let client = format!("http://127.0.0.1:{}", ports.etcd);
    let peer = format!("http://127.0.0.1:{}", ports.etcd_peer);
    vec![
        flag("name", "default"),
        flag("data-dir", data.join("etcd")),
        flag("listen-client-urls", &client),
        flag("advertise-client-urls", &client),
        flag("listen-peer-urls", &peer),
        flag("initial-advertise-peer-urls", &peer),
        flag("initial-cluster", format!("default={peer}")),
        flag("quota-backend-bytes", "8589934592"),
        flag("log-level", "warn"),
        "--unsafe-no-fsync".into(),
    ]
}

fn api_server(ports: &Ports, credentials: &Credentials, policy: &Path, audit_log: &Path) -> Vec<OsString> {
    vec![
        flag("etcd-servers", format!("http://127.0.0.1:{}", ports.etcd)),
        flag("bind-address", "127.0.0.1"),
        flag("advertise-address", "127.0.0.1"),
        flag("secure-port", ports.api_server.to_string()),
        // The Service named kubernetes gets no endpoints: a loopback address is not allowed there.
        flag("endpoint-reconciler-type", "none"),
        flag("service-cluster-ip-range", "10.96.0.0/16"),
        flag("tls-cert-file", &credentials.server_certificate),
        flag("tls-private-key-file", &credentials.server_key),
        flag("token-auth-file", &credentials.tokens),
        flag("authorization-mode", "RBAC"),
        flag("service-account-issuer", "https://kubernetes.default.svc"),
        flag("service-account-signing-key-file", &credentials.account_key),
        flag("service-account-key-file", &credentials.account_public_key),
        // It would refuse pods until the controllers have made the ServiceAccount of a new namespace.
        flag("disable-admission-plugins", "ServiceAccount"),
        flag("allow-privileged", "true"),
        flag("audit-policy-file", policy),
        flag("audit-log-path", audit_log),
        // No rotation: a test reads one file.
        flag("audit-log-maxsize", "0"),
        flag("profiling", "false"),
    ]
}

fn controller_manager(credentials: &Credentials) -> Vec<OsString> {
    vec![
        flag("kubeconfig", credentials.kubeconfig("controller-manager")),
        flag("leader-elect", "false"),
        // Serves nothing: no port.
        flag("secure-port", "0"),
        flag("service-account-private-key-file", &credentials.account_key),
        flag("root-ca-file", &credentials.certificate_authority),
        // A test that stops the API server for a while must not find its node taken for lost.
        flag("node-monitor-grace-period", "1h"),
        flag("kube-api-qps", "1000"),
        flag("kube-api-burst", "2000"),
        flag("concurrent-gc-syncs", "40"),
        flag("concurrent-namespace-syncs", "20"),
        flag("concurrent-deployment-syncs", "20"),
        flag("concurrent-replicaset-syncs", "20"),
        flag("concurrent-job-syncs", "20"),
        flag("concurrent-service-endpoint-syncs", "20"),
    ]
}

fn scheduler(credentials: &Credentials) -> Vec<OsString> {
    vec![
        flag("kubeconfig", credentials.kubeconfig("scheduler")),
        flag("leader-elect", "false"),
        flag("secure-port", "0"),
        flag("kube-api-qps", "1000"),
        flag("kube-api-burst", "2000"),
    ]
}

fn kwok(credentials: &Credentials, stages: &[PathBuf]) -> Vec<OsString> {
    let mut arguments = vec![
        flag("kubeconfig", credentials.kubeconfig("kwok")),
        flag("manage-all-nodes", "true"),
        // Addresses of pods: not those of Services, and more than the 254 of the default.
        flag("cidr", "10.128.0.1/9"),
    ];
    arguments.extend(stages.iter().map(|stage| flag("config", stage)));
    arguments
}
