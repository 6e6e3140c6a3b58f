//! Plugins of toolchains whose programs import WASI: they load as they are, see nothing of the world outside, and are held by the same
//! limits. Each is loaded once, since compiling one takes long.

use std::{fs, sync::Arc, time::Duration};

use pilothouse::plugin::{
    Answer, CallError, CallLimits, Engine, Failure, GUEST_MEMORY, Plugin, Request, Surface, none_related, serves_import,
};
use serde_json::{Value, json};

use crate::component;

/// The defaults of a reconciler, but for the time: the machine may be busy, and Python takes its time to raise.
const LIMITS: CallLimits = CallLimits { memory: 64 << 20, timeout: Duration::from_secs(20), output: 4 << 20 };

struct Language {
    plugin: Plugin,
    imports: Vec<String>,
}

impl Language {
    async fn load(name: &str) -> Self {
        let bytes = fs::read(component(name)).expect("it can be read");
        let imports = Surface::of(&bytes).imports;
        assert!(imports.iter().any(|import| import.starts_with("wasi:")), "{imports:?}");
        assert!(imports.iter().all(|import| serves_import(import)), "{imports:?}");
        let engine = Arc::new(Engine::new(GUEST_MEMORY).expect("there is an engine"));
        let plugin = Plugin::load(&engine, None, bytes, LIMITS, Arc::default()).await.expect("it is a plugin");
        Self { plugin, imports }
    }

    async fn ask(
        &self,
        what: &str,
        children: Vec<String>,
        limits: CallLimits,
    ) -> Result<Result<Answer, Failure>, CallError> {
        let parent =
            json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": {"do": what}});
        let context = json!({"now": "2026-03-01T12:00:00Z", "attempt": 0}).to_string();
        let (parent, config) = (parent.to_string(), "{}".to_owned());
        self.plugin
            .reconcile(Request { parent, children, config, context, ..Request::default() }, none_related, limits)
            .await
    }

    /// What it sees of the world outside, as the data of its child.
    async fn sees(&self, children: Vec<String>) -> Value {
        let answer = self.ask("", children, LIMITS).await.expect("it is answered").expect("it is no failure");
        let child: Value = serde_json::from_str(&answer.children[0].object).expect("a child is JSON");
        assert_eq!(child["metadata"], json!({"name": "w"}));
        child["data"].clone()
    }

    /// That each of these ends as it should, and that the next call is answered.
    async fn is_held(&self, cases: &[(&str, &str)]) {
        for (what, category) in cases {
            let timeout = if *category == "PluginDeadline" { Duration::from_secs(1) } else { LIMITS.timeout };
            let error = self.ask(what, Vec::new(), CallLimits { timeout, ..LIMITS }).await.expect_err(what);
            assert_eq!(error.category(), *category, "{what}: {}", pilothouse::telemetry::chain(&error));
        }
        self.ask("print", Vec::new(), LIMITS).await.expect("it is answered").expect("it is no failure");
        let failure = self.ask("fail", Vec::new(), LIMITS).await.expect("it is answered").expect_err("it says no");
        assert!(
            matches!(&failure, Failure::Retry(message) | Failure::Terminal(message) if message == "as it was told")
        );
        self.sees(Vec::new()).await;
    }
}

/// 5 MB of children, as a large parent has them.
fn many() -> Vec<String> {
    vec![json!({"data": {"text": "x".repeat(10_000)}}).to_string(); 500]
}

#[tokio::test]
async fn a_plugin_in_go_is_called_and_held_like_any_other() {
    let go = Language::load("go").await;
    assert!(go.imports.iter().any(|import| import.starts_with("wasi:filesystem/")), "{:?}", go.imports);
    let seen = json!({"now": "2026-03-01T12:00:00Z", "arguments": "0", "environment": "0", "children": "500",
        "file": "open /etc/hostname: Bad file number", "folder": "open /: Bad file number"});
    assert_eq!(go.sees(many()).await, seen);
    let cases =
        [("sleep", "PluginDeadline"), ("panic", "PluginTrap"), ("exit", "PluginTrap"), ("grow", "PluginMemory")];
    go.is_held(&cases).await;
}

/// One that was built, or None where its tools could not be had; in CI they have to be.
async fn built(name: &str) -> Option<Language> {
    if crate::component_file(name).is_file() {
        return Some(Language::load(name).await);
    }
    assert!(std::env::var_os("CI").is_none(), "{name}.wasm is missing: run `make plugins`");
    eprintln!("skipped: {name}.wasm was not built; `make plugins` says why");
    None
}

#[tokio::test]
async fn a_plugin_in_javascript_is_called_and_held_like_any_other() {
    let Some(javascript) = built("javascript").await else { return };
    let seen = json!({"now": "2026-03-01T12:00:00Z", "children": "500"});
    assert_eq!(javascript.sees(many()).await, seen);
    javascript.is_held(&[("spin", "PluginDeadline"), ("panic", "PluginTrap"), ("grow", "PluginMemory")]).await;
}

#[tokio::test]
async fn a_plugin_in_python_is_called_and_held_like_any_other() {
    let Some(python) = built("python").await else { return };
    let seen = json!({"now": "2026-03-01T12:00:00Z", "arguments": "0", "environment": "0", "children": "500",
        "file": "error: No such file or directory", "folder": "error: No such file or directory"});
    assert_eq!(python.sees(many()).await, seen);
    let cases =
        [("sleep", "PluginDeadline"), ("panic", "PluginTrap"), ("exit", "PluginTrap"), ("grow", "PluginMemory")];
    python.is_held(&cases).await;
}
