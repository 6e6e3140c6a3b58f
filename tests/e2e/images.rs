//! Plugins from a real registry: resolved, verified, pulled, kept, and served also when the registry is gone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use distribution::{Password, Registry, USER};
use kube::api::DynamicObject;
use rcgen::KeyPair;
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, Host, Namespace, component, config_map, edit, get, manifests_with, mirror, told, until},
    compile::loads,
    idle::numbered,
};

/// A cluster with a registry beside it, and an administrator who may push.
struct Site {
    cluster: Cluster,
    registry: Registry,
    folder: PathBuf,
}

impl Site {
    fn start() -> Self {
        let options = distribution::Options { tls: true, password: Some(Password::First) };
        let cluster = Cluster::start();
        let folder = cluster.control_plane.data_dir().join("images");
        fs::create_dir_all(&folder).expect("it can be made");
        let site = Self { cluster, registry: Registry::start(options).expect("it starts"), folder };
        fs::write(site.folder.join("config.json"), site.docker_config("first")).expect("it can be written");
        site
    }

    fn docker_config(&self, password: &str) -> String {
        json!({"auths": {self.registry.host(): {"username": USER, "password": password}}}).to_string()
    }

    /// What `pilothouse` prints, as somebody who may push.
    fn pilothouse(&self, arguments: &[&str]) -> String {
        let authority = self.registry.authority();
        let output = Command::new(env!("CARGO_BIN_EXE_pilothouse"))
            .args(arguments)
            .arg("--registry-ca")
            .arg(authority)
            .env("DOCKER_CONFIG", &self.folder)
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("it is text").trim().to_owned()
    }

    /// Pushes a component to a tag; the digest of its manifest.
    fn push(&self, bytes: &[u8], tag: &str) -> String {
        let file = self.folder.join("pushed.wasm");
        fs::write(&file, bytes).expect("it can be written");
        let pushed = self.pilothouse(&["push", &file.to_string_lossy(), &self.image(tag)]);
        pushed.split_once('@').expect("it is pinned").1.to_owned()
    }

    fn image(&self, tag: &str) -> String {
        format!("{}/team/mirror:{tag}", self.registry.host())
    }

    /// The Secret with the credentials of the registry.
    fn write_secret(&self, password: &str) {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"name": "registry", "namespace": "pilothouse-system"},
            "data": {".dockerconfigjson": BASE64_STANDARD.encode(self.docker_config(password))}});
        self.cluster.apply(secret.to_string().as_bytes());
    }

    /// Lets the reconciler `mirror` take its plugin from an image.
    fn install(&self, image: &str) {
        // As an administrator does who had it in a ConfigMap.
        self.cluster.kubectl(&["delete", "crec", "mirror", "--wait"]);
        let file = component("mirror");
        self.cluster.apply(&crate::cluster::pilothouse(&[
            "manifests",
            &file.to_string_lossy(),
            "--image",
            image,
            "--pull-secret=registry",
        ]));
    }

    /// Installs so many plugins from images, each with a component, a reconciler and an account of its own.
    fn install_many(&self, count: usize) {
        let bytes = fs::read(component("myapp")).expect("it was built");
        let image = self.image("number");
        let one = manifests_with("myapp", "plugin-number", &["--image", &image, "--pull-secret=registry"]);
        let one = String::from_utf8(one).expect("it is YAML");
        let mut all = String::new();
        for number in 0..count {
            let number = number.to_string();
            self.push(&numbered(&bytes, &number), &number);
            all += "---\n";
            all += &one.replace(&image, &self.image(&number)).replace("plugin-number", &format!("plugin-{number}"));
        }
        self.cluster.apply(all.as_bytes());
    }

    fn start_host(&self, arguments: &[&str]) -> Host {
        let authority = format!("--registry-ca={}", self.registry.authority().display());
        self.cluster.run_host_with(&[&[authority.as_str()], arguments].concat(), 2)
    }

    fn patch(&self, plugin: &Value) {
        let patch = json!({"spec": {"plugin": plugin}}).to_string();
        self.cluster.kubectl(&["patch", "crec", "mirror", "--type=merge", "-p", &patch]);
    }

    /// How often the registry was asked for this.
    fn asked(&self, what: &str) -> usize {
        self.registry.requests().expect("it has a log").iter().filter(|request| request.contains(what)).count()
    }
}

/// Waits until the plugin of this version has made the child of a parent.
async fn shows(ns: &Namespace<'_>, version: u8) {
    let text = format!("the mirror, version {version}");
    until(&ns.config_maps(), "w", &text, |child| {
        child.metadata.annotations.iter().flatten().any(|(key, value)| key == "t.example/version" && *value == text)
    })
    .await;
}

/// Waits until the status says that the image is the one of this digest.
async fn recorded(ns: &Namespace<'_>, digest: &str) -> DynamicObject {
    let what = format!("it is {digest}");
    until(&ns.reconcilers(), "mirror", &what, |object| object.data["status"]["image"]["digest"] == digest).await
}

#[tokio::test]
async fn c55_c57_an_image_is_what_its_digest_says_and_an_outage_of_its_registry_harms_nothing() {
    let mut site = Site::start();
    let first = site.push(&mirror(1), "1");
    site.write_secret("first");
    let host = site.start_host(&[]);
    let ns = site.cluster.namespace("images").await;
    ns.widget("w", json!({"reply": {"children": [config_map("w", "1")], "versioned": true}})).await;
    let told =
        async |kind: &str, status: &str, reason: &str| told(&ns.reconcilers(), "mirror", kind, status, reason).await;

    site.install(&site.image("1"));
    let message = told("Resolved", "True", "Resolved").await;
    assert_eq!(message, format!("{} is {first}", site.image("1")));
    told("Verified", "True", "NotRequired").await;
    told("Ready", "True", "Ready").await;
    shows(&ns, 1).await;
    assert_eq!(recorded(&ns, &first).await.data["status"]["image"]["reference"], site.image("1"));

    // The tag moves. Nobody has asked for that, until the image is pinned to it.
    let second = site.push(&mirror(2), "1");
    assert_ne!(first, second);
    edit(&ns.widgets(), "w", json!({"metadata": {"annotations": {"touched": "1"}}})).await;
    shows(&ns, 1).await;
    site.patch(&json!({"image": format!("{}@{second}", site.image("1"))}));
    shows(&ns, 2).await;

    // A digest that is none, and that of a layer.
    let none = format!("{}@sha256:{}", site.image("1"), "0".repeat(64));
    site.patch(&json!({"image": none}));
    let message = told("Degraded", "True", "PullFailed").await;
    assert!(message.contains("has no manifest") && message.contains("in repository team/mirror (404)"), "{message}");
    assert_eq!(told("Resolved", "False", "PullFailed").await, message.split_once("serves: ").expect("it says so").1);
    let pulled = site.pilothouse(&["pull", &site.image("1"), "-o", &site.folder.join("layer.wasm").to_string_lossy()]);
    assert!(pulled.ends_with(&second));
    let layer = pilothouse::registry::Digest::of(&fs::read(site.folder.join("layer.wasm")).expect("it was pulled"));
    site.patch(&json!({"image": format!("{}@{layer}", site.image("1"))}));
    let message = crate::cluster::eventually("the digest of the layer is refused", async || {
        let message = told("Resolved", "False", "PullFailed").await;
        message.contains(layer.as_str()).then_some(message)
    })
    .await;
    assert!(message.contains("is the digest of a blob"), "{message}");
    // A version that is refused has changed nothing.
    shows(&ns, 2).await;

    // The registry is gone. What was here before is here: the other version at once, and after a restart.
    site.patch(&json!({"image": format!("{}@{second}", site.image("1"))}));
    told("Degraded", "False", "AsDesired").await;
    let blobs = site.asked("/blobs/");
    site.registry.stop();
    site.patch(&json!({"image": format!("{}@{first}", site.image("1"))}));
    shows(&ns, 1).await;
    host.kill();
    let host = site.start_host(&[]);
    assert!(!host.log_text().contains("pulled the plugin") && !host.log_text().contains("compiled the plugin"));
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("w", "2")]}}})).await;
    until(&ns.config_maps(), "w", "the new value", |child| child.data["data"]["key"] == "2").await;
    // An image that nobody has seen yet is another matter; and what serves, serves.
    site.patch(&json!({"image": site.image("2")}));
    let message = told("Degraded", "True", "PullFailed").await;
    assert!(message.contains("failed to reach registry") && message.contains("refused"), "{message}");
    host.kill();
    // Not even a start in the middle of that.
    let host = site.cluster.run_host_that("the last good revision serves");
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": [config_map("w", "3")]}}})).await;
    until(&ns.config_maps(), "w", "the new value", |child| child.data["data"]["key"] == "3").await;
    site.registry.start_again().expect("it starts");
    assert_eq!(site.asked("/blobs/"), blobs);
    host.kill();

    // Another password: the one in the Secret is refused, and not left out. The next try takes the new one.
    let third = site.push(&mirror(3), "3");
    site.registry.set_password(Password::Second).expect("it can be written");
    let _host = site.start_host(&[]);
    site.patch(&json!({"image": site.image("3")}));
    let refusal =
        format!("registry {} refuses the credential that was given for team/mirror (401)", site.registry.host());
    crate::cluster::eventually("the credential is refused", async || {
        told("Degraded", "True", "PullFailed").await.contains(&refusal).then_some(())
    })
    .await;
    site.write_secret("second");
    shows(&ns, 3).await;
    recorded(&ns, &third).await;
}

#[tokio::test]
async fn a_start_with_fifty_plugins_in_the_cache_compiles_none_and_fetches_none() {
    const PLUGINS: usize = 50;
    let site = Site::start();
    site.write_secret("first");
    site.install_many(PLUGINS);
    let all = PLUGINS + 2;
    let authority = format!("--registry-ca={}", site.registry.authority().display());
    let host = site.cluster.run_host_with(&[&authority], all);
    assert_eq!(loads(&host).await, [0, all as u64, 0]);
    host.terminate();
    let asked = site.asked("");
    assert!(asked >= PLUGINS, "the registry counts requests: {asked}");
    let host = site.cluster.run_host_with(&[&authority], all);
    assert_eq!(loads(&host).await, [all as u64, 0, 0]);
    assert_eq!(site.asked(""), asked);
    host.terminate();
}

#[tokio::test]
async fn c47_an_image_that_is_missing_harms_none_of_the_other_plugins() {
    const PLUGINS: usize = 5;
    let site = Site::start();
    site.write_secret("first");
    site.install_many(PLUGINS);
    let missing = json!({"spec": {"plugin": {"image": site.image("nowhere")}}});
    let ns = site.cluster.namespace("missing-image").await;
    edit(&ns.reconcilers(), "plugin-3", missing).await;
    // The others watch, and the two plugins from ConfigMaps.
    let authority = format!("--registry-ca={}", site.registry.authority().display());
    let host = site.cluster.run_host_with(&[&authority], PLUGINS - 1 + 2);
    let message = told(&ns.reconcilers(), "plugin-3", "Ready", "False", "PullFailed").await;
    assert!(message.contains("team/mirror") && message.contains("404"), "{message}");
    for other in ["plugin-0", "plugin-1", "plugin-2", "plugin-4", "mirror"] {
        told(&ns.reconcilers(), other, "Ready", "True", "Ready").await;
    }
    ns.widget("w", json!({"reply": {"children": [config_map("c", "1")]}})).await;
    crate::cluster::synced(&ns.widgets(), "w").await;
    // It comes, and is taken at the next try.
    site.push(&fs::read(component("myapp")).expect("it was built"), "nowhere");
    told(&ns.reconcilers(), "plugin-3", "Ready", "True", "Ready").await;
    host.terminate();
}

/// The private and the public key of somebody.
fn key_pair(folder: &Path, name: &str) -> [PathBuf; 2] {
    let [private, public] = ["key", "pub"].map(|end| folder.join(format!("{name}.{end}")));
    let pair = KeyPair::generate().expect("a key pair can be made");
    fs::write(&private, pair.serialize_pem()).expect("it can be written");
    fs::write(&public, pair.public_key_pem()).expect("it can be written");
    [private, public]
}

#[tokio::test]
async fn an_image_serves_once_it_is_signed_by_whom_it_has_to_be() {
    let site = Site::start();
    let [private, public] = key_pair(&site.folder, "team");
    let [other, _] = key_pair(&site.folder, "other");
    site.push(&mirror(1), "1");
    site.write_secret("first");
    let pem = fs::read_to_string(&public).expect("it was made");
    // The host wants it signed; what comes from elsewhere it does not take at all.
    let rule =
        json!({"images": format!("{}/team", site.registry.host()), "signature": "Required", "publicKeys": [pem]});
    let policy = site.folder.join("policy.yaml");
    fs::write(&policy, json!({"default": "Denied", "rules": [rule]}).to_string()).expect("it can be written");
    let policy = format!("--verification-policy={}", policy.display());
    let host = site.start_host(&[&policy]);
    let ns = site.cluster.namespace("signed").await;
    let told =
        async |kind: &str, status: &str, reason: &str| told(&ns.reconcilers(), "mirror", kind, status, reason).await;

    site.install(&site.image("1"));
    ns.widget("w", json!({"reply": {"children": [config_map("w", "1")], "versioned": true}})).await;
    let message = told("Verified", "False", "NotVerified").await;
    assert!(message.contains("is not signed"), "{message}");
    site.pilothouse(&["sign", &site.image("1"), "--key", &other.to_string_lossy()]);
    crate::cluster::eventually("the signature of somebody else does not do", async || {
        told("Verified", "False", "NotVerified").await.contains("none of the 1 signatures").then_some(())
    })
    .await;
    assert!(get(&ns.config_maps(), "w").await.is_none(), "nothing serves");
    site.pilothouse(&["sign", &site.image("1"), "--key", &private.to_string_lossy()]);
    told("Verified", "True", "Verified").await;
    shows(&ns, 1).await;

    // A key of the reconciler comes on top.
    let other_public = fs::read_to_string(other.with_extension("pub")).expect("it was made");
    let second = site.push(&mirror(2), "2");
    site.pilothouse(&["sign", &site.image("2"), "--key", &private.to_string_lossy()]);
    site.patch(&json!({"image": site.image("2"), "verify": {"cosign": {"publicKey": other_public}}}));
    let message = told("Degraded", "True", "NotVerified").await;
    assert!(message.contains("none of the 1 signatures"), "{message}");
    site.pilothouse(&["sign", &site.image("2"), "--key", &other.to_string_lossy()]);
    shows(&ns, 2).await;
    recorded(&ns, &second).await;

    // What was verified is not asked for again.
    host.kill();
    let asked = site.asked("");
    let host = site.start_host(&[&policy]);
    told("Ready", "True", "Ready").await;
    assert_eq!(site.asked(""), asked);
    site.patch(&json!({"image": "127.0.0.1:1/elsewhere/mirror:1"}));
    let message = told("Degraded", "True", "NotVerified").await;
    assert!(message.contains("takes no plugins from 127.0.0.1:1/elsewhere/mirror"), "{message}");
    drop(host);
}
