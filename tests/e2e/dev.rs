//! `pilothouse dev`, as an author runs it: a copy of the example plugin is edited, on a cluster that knows nothing of it.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use control_plane::ControlPlane;
use kube::api::{DynamicObject, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::{Cluster, delete, eventually, get, our_finalizers, synced, until};

/// How long the first build may take, with all that the plugin depends on.
const FIRST_BUILD: Duration = Duration::from_mins(10);
/// How long all else may.
const PATIENCE: Duration = Duration::from_secs(60);

/// A copy of plugins/myapp, in a folder of its own, under the name of the test: what cargo makes of all of them goes to one folder.
struct Plugin(PathBuf);

impl Plugin {
    fn new(test: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("host is in the checkout");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dev").join(test).join("myapp");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("src")).expect("a folder can be made");
        for file in ["src/lib.rs", "src/outside.rs", "crd.json", "grants.yaml"] {
            fs::copy(root.join("plugins/myapp").join(file), folder.join(file)).expect("it can be copied");
        }
        fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).expect("it can be copied");
        let sdk = root.join("guest-sdk/rust");
        let manifest = format!(
            "[package]\nname = \"{test}\"\nversion = \"1.0.0\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n\
             pilothouse-sdk = {{ path = {sdk:?} }}\nschemars = \"1\"\nserde = {{ version = \"1\", features = [\"derive\"] }}\n"
        );
        fs::write(folder.join("Cargo.toml"), manifest).expect("it can be written");
        Self(folder)
    }

    fn edit(&self, file: &str, from: &str, to: &str) {
        let file = self.0.join(file);
        let text = fs::read_to_string(&file).expect("it can be read");
        assert!(text.contains(from), "{} has no {from}", file.display());
        fs::write(&file, text.replacen(from, to, 1)).expect("it can be written");
    }
}

/// `pilothouse dev`, as it runs. Killed when dropped.
struct Dev {
    child: Child,
    shown: Arc<Mutex<Vec<String>>>,
    /// How many lines were looked at.
    seen: usize,
}

impl Dev {
    fn run(cluster: &ControlPlane, plugin: &Plugin, arguments: &[&str]) -> Self {
        Self::run_as("myapp", cluster, plugin, arguments)
    }

    fn run_as(name: &str, cluster: &ControlPlane, plugin: &Plugin, arguments: &[&str]) -> Self {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let mut child = Command::new(env!("CARGO_BIN_EXE_pilothouse"))
            .arg("dev")
            .arg(&plugin.0)
            .args(["--name", name])
            .args(arguments)
            .env("KUBECONFIG", cluster.kubeconfig())
            // What a plugin depends on is built once for all of these tests, and needs nothing from the internet.
            .env("CARGO_TARGET_DIR", target.join("dev").join("target"))
            .env("CARGO_NET_OFFLINE", "true")
            .env("XDG_CACHE_HOME", target.join("dev").join("cache"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("it starts");
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (lines, stdout) = (shown.clone(), BufReader::new(child.stdout.take().expect("it is piped")));
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                lines.lock().expect("nobody panics with it").push(line);
            }
        });
        Self { child, shown, seen: 0 }
    }

    /// Waits for a line, behind those that were waited for before; it.
    async fn shows(&mut self, what: &str, is: impl Fn(&str) -> bool, patience: Duration) -> String {
        let start = Instant::now();
        loop {
            let found = {
                let shown = self.shown.lock().expect("nobody panics with it");
                let place = shown.iter().skip(self.seen).position(|line| is(line));
                place.map(|at| (self.seen + at + 1, shown[self.seen + at].clone()))
            };
            if let Some((seen, line)) = found {
                self.seen = seen;
                return line;
            }
            let ended = self.child.try_wait().expect("it is our child");
            let shown = || self.shown.lock().expect("nobody panics with it").join("\n");
            assert!(ended.is_none() && start.elapsed() < patience, "{what} ({ended:?}):\n{}", shown());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for a line that begins so.
    async fn tells(&mut self, begin: &str) -> String {
        self.shows(begin, |line| line.starts_with(begin), PATIENCE).await
    }

    /// Waits for an event of that name, with `-o json`.
    async fn event(&mut self, name: &str, patience: Duration) -> Value {
        let read = |line: &str| serde_json::from_str::<Value>(line).expect("each line is JSON");
        read(&self.shows(name, |line| read(line)["event"] == name, patience).await)
    }

    /// Ends it as Ctrl-C does; what it has shown since it was last waited for.
    async fn interrupt(mut self) -> String {
        let sent = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
        let status = eventually("it ends", async || self.child.try_wait().expect("it is our child")).await;
        assert!(status.success(), "{status}");
        // The pipe is read to its end soon.
        eventually("its last words", async || (Arc::strong_count(&self.shown) == 1).then_some(())).await;
        self.shown.lock().expect("nobody panics with it")[self.seen..].join("\n")
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn image(deployment: &DynamicObject) -> &Value {
    &deployment.data["spec"]["template"]["spec"]["containers"][0]["image"]
}

#[tokio::test]
async fn an_edit_is_previewed_and_serves_and_what_does_not_compile_changes_nothing() {
    let cluster = Cluster::empty();
    let plane = &cluster.control_plane;
    let plugin = Plugin::new("edited");
    let grants = plugin.0.join("grants.yaml").display().to_string();
    let mut dev = Dev::run(plane, &plugin, &["--grants", &grants]);
    // The kinds of the host are installed as well, since nothing is there.
    let ended = |line: &str| line.starts_with("built ") || line.starts_with("failed ");
    let built = dev.shows("the first build", ended, FIRST_BUILD).await;
    assert!(built.starts_with("built "), "{}", dev.shown.lock().expect("nobody panics with it").join("\n"));
    dev.tells("created   CustomResourceDefinition clusterreconcilers.pilothouse.dev").await;
    dev.tells("created   CustomResourceDefinition myapps.mygroup.example.com").await;
    dev.tells("created   ClusterReconciler myapp").await;
    dev.tells("serving ").await;
    let ns = cluster.namespace("dev-loop").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 0})).await;
    synced(&ns.my_apps(), "web").await;
    dev.tells("dev-loop/web  True").await;

    plugin.edit("src/lib.rs", r#""image": spec.image"#, r#""image": format!("{}-edited", spec.image)"#);
    dev.tells("src/lib.rs").await;
    let built = dev.tells("built ").await;
    dev.tells("preview").await;
    dev.tells("MyApp dev-loop/web").await;
    dev.tells("-      - image: nginx:1").await;
    dev.tells("+      - image: nginx:1-edited").await;
    let serving = dev.tells("serving ").await;
    eprintln!("{built}; {serving}");
    until(&ns.deployments(), "web", "the image", |deployment| *image(deployment) == "nginx:1-edited").await;

    // What does not compile is shown as the compiler says it, and the last good one goes on.
    plugin.edit("src/lib.rs", "spec.image)", "spec.imag)");
    dev.tells("error[E0609]: no field `imag`").await;
    dev.tells("failed ").await;
    crate::cluster::edit(&ns.my_apps(), "web", json!({"spec": {"image": "nginx:2"}})).await;
    until(&ns.deployments(), "web", "the image", |deployment| *image(deployment) == "nginx:2-edited").await;

    // And one that crashes says where, and its children stay.
    plugin.edit("src/lib.rs", "-edited\", spec.imag)", "-again\", spec.image)");
    plugin.edit(
        "src/lib.rs",
        "let desired = Desired::new()",
        "assert!(spec.image != \"nginx:3\", \"three\");\n        let desired = Desired::new()",
    );
    dev.tells("serving ").await;
    until(&ns.deployments(), "web", "the image", |deployment| *image(deployment) == "nginx:2-again").await;
    crate::cluster::edit(&ns.my_apps(), "web", json!({"spec": {"image": "nginx:3"}})).await;
    dev.shows("the panic", |line| line.starts_with("dev-loop/web │") && line.contains("three"), PATIENCE).await;
    dev.shows("its parent", |line| line.starts_with("dev-loop/web  False"), PATIENCE).await;
    assert_eq!(*image(&get(&ns.deployments(), "web").await.expect("it stays")), "nginx:2-again");
    plugin.edit("src/lib.rs", "\"nginx:3\"", "\"nginx:4\"");
    dev.tells("serving ").await;
    until(&ns.deployments(), "web", "the image", |deployment| *image(deployment) == "nginx:3-again").await;

    // Another kind of children, and another field of the parent: what has to be in the cluster is applied again.
    plugin.edit("src/lib.rs", r#".child("v1", "ConfigMap")"#, r#".child("v1", "ConfigMap").child("v1", "Secret")"#);
    plugin.edit("crd.json", "The container image to run.", "The image.");
    dev.tells("changed   CustomResourceDefinition myapps.mygroup.example.com").await;
    dev.tells("changed   ClusterRole pilothouse:myapp").await;
    dev.tells("serving ").await;

    let last = dev.interrupt().await;
    assert!(last.contains("nobody serves it") && last.contains("pilothouse dev --rm "), "{last}");
    assert!(!our_finalizers(&get(&ns.my_apps(), "web").await.expect("it stays")).is_empty());
    // All that was made goes, but the parents and what holds them.
    let mut remove = Dev::run(plane, &plugin, &["--rm"]);
    remove.tells("removed   ClusterReconciler myapp").await;
    remove.tells("removed   ServiceAccount pilothouse-system/myapp").await;
    remove.tells("left      CustomResourceDefinition myapps.mygroup.example.com").await;
    eventually("it ends", async || remove.child.try_wait().expect("it is our child")).await;
    assert!(get(&ns.reconcilers(), "myapp").await.is_none());
    assert!(our_finalizers(&get(&ns.my_apps(), "web").await.expect("it stays")).is_empty());
    delete(&ns.my_apps(), "web", PropagationPolicy::Background).await;
    let mut remove = Dev::run(plane, &plugin, &["--rm", "-o", "json"]);
    let removed = remove.event("applied", PATIENCE).await;
    let definition = json!({"action": "removed", "kind": "CustomResourceDefinition", "namespace": null, "name": "myapps.mygroup.example.com"});
    assert_eq!(removed["objects"], json!([definition]));
}

#[tokio::test]
async fn a_reconciler_of_the_host_is_taken_over_only_if_asked_for_and_given_back() {
    let cluster = Cluster::start();
    let host = cluster.run_host();
    let ns = cluster.namespace("taken-over").await;
    ns.my_app("web", json!({"image": "nginx:1", "replicas": 0})).await;
    synced(&ns.my_apps(), "web").await;
    let plugin = Plugin::new("taken-over");
    plugin.edit("src/lib.rs", r#""image": spec.image"#, r#""image": format!("{}-dev", spec.image)"#);

    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_pilothouse"))
            .arg("dev")
            .arg(&plugin.0)
            .args(["--name", "myapp"])
            .args(arguments)
            .env("KUBECONFIG", cluster.control_plane.kubeconfig())
            .output()
            .expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, error) = run(&[]);
    assert!(code == Some(1) && error.contains("--take-over"), "{error}");

    let mut dev = Dev::run(&cluster.control_plane, &plugin, &["--take-over", "-o", "json"]);
    assert_eq!(dev.event("started", PATIENCE).await["reconciler"], "myapp");
    assert!(dev.event("built", FIRST_BUILD).await["bytes"].is_number());
    let preview = dev.event("preview", PATIENCE).await;
    let child = &preview["parents"][0]["children"][0];
    assert_eq!((&preview["parents"][0]["name"], &child["kind"]), (&json!("web"), &json!("Deployment")), "{preview}");
    assert!(child["diff"].as_str().is_some_and(|diff| diff.contains("nginx:1-dev")), "{preview}");
    let serving = dev.event("serving", PATIENCE).await;
    assert_eq!(serving["revision"], preview["revision"]);
    until(&ns.deployments(), "web", "the image", |deployment| *image(deployment) == "nginx:1-dev").await;
    // Another one cannot have it as well.
    let (code, error) = run(&[]);
    assert!(code == Some(1) && error.contains("to itself"), "{error}");
    // One that is at the same parents by another name is refused.
    let mut rival = Dev::run_as("other", &cluster.control_plane, &plugin, &[]);
    rival
        .shows("the rival", |line| line.starts_with("refused") && line.contains("ClusterReconciler myapp"), FIRST_BUILD)
        .await;
    assert!(rival.interrupt().await.contains("Nothing was applied."));

    let last = dev.interrupt().await;
    assert!(last.contains(r#""event":"ended""#), "{last}");
    until(&ns.deployments(), "web", "the image", |deployment| *image(deployment) == "nginx:1").await;
    let reconciler = get(&ns.reconcilers(), "myapp").await.expect("it stays");
    assert!(reconciler.metadata.labels.is_none_or(|labels| labels.is_empty()));
    host.terminate();
}

#[test]
fn without_a_cluster_or_a_plugin_it_ends_and_says_what_is_missing() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let plugin = Plugin::new("alone");
    let run = |directory: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
        let command = command.arg("dev").arg(directory).env("KUBECONFIG", folder.join("no-kubeconfig"));
        let output = command.env_remove("KUBERNETES_SERVICE_HOST").output().expect("it runs");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(run(&plugin.0).contains("found no cluster"), "{}", run(&plugin.0));
    assert!(run(&plugin.0.join("src")).contains("no Rust crate and no Go module"));
}
