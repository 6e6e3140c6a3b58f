//! What a plugin call costs: MyApp asked by the host in a fresh sandbox, over a webhook with keep-alive on the same machine, and as a plain
//! function, in one run, with parents of several sizes. What makes a parent large is its config, which goes through all of the logic.
//! Beside it what of a call is the way to the guests' threads and back, and plugins in other languages, where they have been built.
//!
//!     call --plugin MYAPP.wasm --others FOLDER --guests FOLDER --output FOLDER

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use bench::{
    machine::Machine,
    report::{OURS, Report, Sample, percentile, short},
};
use clap::Parser;
use myapp::MyApp;
use pilothouse::plugin::{Access, CallLimits, Engine, GUEST_MEMORY, Plugin, Request, none_related};
use pilothouse_sdk::raw::{reconciler::Guest, types};
use serde_json::{Value, json};

const SIZES: [usize; 4] = [1 << 10, 10 << 10, 100 << 10, 1 << 20];
const ROUNDS: usize = 3;
/// How long each is asked in a round.
const TIME: Duration = Duration::from_secs(1);
const WARM_UP: usize = 50;
/// How many calls a figure is made of at least: some take so long that the time is over with the warm-up.
const LEAST: usize = 20;
/// The defaults of a reconciler.
const LIMITS: CallLimits = CallLimits { memory: 64 << 20, timeout: Duration::from_secs(5), output: 4 << 20 };
/// Plugins in other languages, of `tests/guests`: each answers with a ConfigMap.
const GUESTS: [(&str, &str); 3] =
    [("go.wasm", "plugin in Go"), ("javascript.wasm", "plugin in JavaScript"), ("python.wasm", "plugin in Python")];

#[derive(Parser)]
struct Arguments {
    /// The component of plugins/myapp.
    #[arg(long)]
    plugin: PathBuf,
    /// The folder that tests/bench/build.sh prints.
    #[arg(long)]
    others: PathBuf,
    /// Where `make guests` has put plugins in other languages; those that are not there are left out.
    #[arg(long)]
    guests: Option<PathBuf>,
    /// Where the report goes.
    #[arg(long)]
    output: PathBuf,
    /// What cargo says to a benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let engine = Arc::new(Engine::new(GUEST_MEMORY)?);
    let open = |component: Vec<u8>| {
        // Without grants, which no parent here asks for.
        let plugin = Plugin::open(&engine, None, component, LIMITS, Arc::new(Access::default()));
        anyhow::Ok(Arc::new(runtime.block_on(plugin)?))
    };
    let plugin = open(std::fs::read(&arguments.plugin).context("cannot read the plugin: run `make plugins`")?)?;
    let mut guests = Vec::new();
    for (file, contestant) in GUESTS {
        let component = arguments.guests.as_ref().and_then(|folder| std::fs::read(folder.join(file)).ok());
        guests.extend(component.map(|component| anyhow::Ok((contestant, open(component)?))).transpose()?);
    }
    let webhook = Webhook::start(&arguments.others)?;

    let mut samples = Vec::new();
    for _ in 0..ROUNDS {
        let hop = Arc::clone(&engine);
        let hop = runtime.block_on(runtime.spawn(async move { to_the_guests(&hop).await }))??;
        note(&mut samples, "the way to the guests' threads and back", 0, OURS, hop)?;
        for size in SIZES {
            let (parent, child) = (parent(size), child());
            let asked = |plugin: &Arc<Plugin>, children| {
                let (plugin, request) = (Arc::clone(plugin), request(&parent, &child));
                runtime.block_on(runtime.spawn(async move { in_sandbox(&plugin, &request, children).await }))?
            };
            for (contestant, times) in [
                (OURS, asked(&plugin, 2)?),
                ("webhook in Go", webhook.measure(&parent, &child)?),
                ("native function", natively(&parent, &child)?),
            ] {
                note(&mut samples, "a call of MyApp's logic", size, contestant, times)?;
            }
            for &(contestant, ref guest) in &guests {
                note(&mut samples, "a call that makes a ConfigMap", size, contestant, asked(guest, 1)?)?;
            }
        }
    }
    let title = "A plugin call, a webhook, a function";
    Report::new(title, "bytes of the parent", Machine::this(), samples).write(&arguments.output, "call", &[])?;
    Ok(())
}

fn note(
    samples: &mut Vec<Sample>,
    what: &str,
    size: usize,
    contestant: &'static str,
    mut times: Vec<f64>,
) -> anyhow::Result<()> {
    times.sort_by(f64::total_cmp);
    for percent in [50, 99] {
        let value = percentile(&times, percent).context("nothing was measured")?;
        samples.push(Sample { figure: format!("{what}: p{percent}, µs"), size, contestant, value });
    }
    println!("  {size:>8} bytes  {contestant:<20} {:>8} µs", short(percentile(&times, 50).unwrap_or(0.0)));
    Ok(())
}

fn parent(size: usize) -> Value {
    let object = |config: Value| {
        json!({
            "apiVersion": "mygroup.example.com/v1",
            "kind": "MyApp",
            "metadata": {
                "name": "web", "namespace": "default", "uid": "5a0dd0a2-7d36-4f0c-bb0c-5bd4f3a1d3a0", "generation": 1,
                "resourceVersion": "1234", "creationTimestamp": "2026-01-01T00:00:00Z",
                "finalizers": ["pilothouse.dev/c-myapp-00000000"],
            },
            "spec": {"image": "nginx:1", "replicas": 3, "config": config},
        })
    };
    // Lines of a file, as a config has them: some of its characters are escaped.
    let line = "listen: \"127.0.0.1:8080\" # where it serves\n";
    let room = size.saturating_sub(object(json!({"app.yaml": ""})).to_string().len());
    object(json!({"app.yaml": line.repeat(room / (json!(line).to_string().len() - 2))}))
}

/// The Deployment as the API server shows it.
fn child() -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "default", "generation": 1},
        "spec": {"replicas": 3},
        "status": {"availableReplicas": 2, "replicas": 3, "observedGeneration": 1},
    })
}

fn context() -> String {
    json!({"now": "2026-01-01T00:00:00Z", "deadlineMs": 5000, "attempt": 0}).to_string()
}

fn request(parent: &Value, child: &Value) -> Request {
    Request {
        parent: parent.to_string(),
        children: vec![child.to_string()],
        config: "{}".to_owned(),
        context: context(),
        ..Request::default()
    }
}

async fn to_the_guests(engine: &Engine) -> anyhow::Result<Vec<f64>> {
    let (mut times, turns) = (Vec::new(), Engine::turns());
    let begun = Instant::now();
    while begun.elapsed() < TIME {
        let start = Instant::now();
        engine.run(&turns, async {}).await.context("a call of nothing has panicked")?;
        times.push(micros(start.elapsed()));
    }
    Ok(times)
}

async fn in_sandbox(plugin: &Plugin, request: &Request, children: usize) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::new();
    let mut asked = 0;
    let start = Instant::now();
    while times.len() < LEAST || start.elapsed() < TIME {
        let request = request.clone();
        let start = Instant::now();
        let answer = plugin.reconcile(request, none_related, LIMITS).await?;
        let time = micros(start.elapsed());
        let is_right = answer.is_ok_and(|answer| answer.children.len() == children);
        anyhow::ensure!(is_right, "the plugin answers something else");
        times.extend((asked >= WARM_UP).then_some(time));
        asked += 1;
    }
    Ok(times)
}

fn natively(parent: &Value, child: &Value) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::new();
    let mut asked = 0;
    let start = Instant::now();
    while times.len() < LEAST || start.elapsed() < TIME {
        let request = types::Request {
            parent: parent.to_string(),
            children: vec![child.to_string()],
            related: Vec::new(),
            config: "{}".to_owned(),
            context: context(),
        };
        let start = Instant::now();
        let answer = <MyApp as Guest>::reconcile(request);
        let time = micros(start.elapsed());
        anyhow::ensure!(answer.is_ok_and(|answer| answer.children.len() == 2), "the function answers something else");
        times.extend((asked >= WARM_UP).then_some(time));
        asked += 1;
    }
    Ok(times)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The server, and the program that is its client, too. Ended when dropped.
struct Webhook {
    server: Child,
    program: PathBuf,
    url: String,
}

impl Webhook {
    fn start(others: &std::path::Path) -> anyhow::Result<Self> {
        let program = others.join("webhook");
        let mut server = Command::new(&program)
            .arg("serve")
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        let mut url = String::new();
        BufReader::new(server.stdout.take().context("it is piped")?).read_line(&mut url)?;
        Ok(Self { server, program, url: url.trim().to_owned() })
    }

    fn measure(&self, parent: &Value, child: &Value) -> anyhow::Result<Vec<f64>> {
        let asked = json!({
            "parent": parent, "finalizing": false,
            "children": {"Deployment.apps/v1": {"web": child}, "ConfigMap.v1": {}},
        });
        let mut client = Command::new(&self.program)
            .args(["measure", &self.url, &TIME.as_secs_f64().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        client.stdin.take().context("it is piped")?.write_all(asked.to_string().as_bytes())?;
        let output = client.wait_with_output()?;
        anyhow::ensure!(output.status.success(), "the client of the webhook failed");
        let lines = String::from_utf8(output.stdout)?;
        lines.lines().map(|line| line.parse().context("it prints numbers")).collect()
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.server.kill());
        drop(self.server.wait());
    }
}
