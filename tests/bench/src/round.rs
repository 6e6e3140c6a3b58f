//! What is measured of one contestant with so many parents.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use bench::report::{Sample, percentile};
use kube::{Client, Config};
use tokio::time::sleep;

use crate::{
    audit::{Audit, Request},
    ceiling,
    cluster::Cluster,
    contestant::{Contestant, Programs, WORDS},
    load::Load,
    process::Process,
};

/// How long an operator asks for nothing once it has done all that there was to do.
const CALM: Duration = Duration::from_secs(2);
/// And how long until also what is told at intervals was told, as the counts of a reconciler.
const REST: Duration = Duration::from_secs(12);
/// How many edits a figure is made of.
const EDITS: usize = 100;
const PATIENCE: Duration = Duration::from_secs(300);

/// See the module's documentation.
pub(crate) struct Round<'a> {
    cluster: &'a Cluster,
    contestant: Contestant,
    parents: usize,
    audit: Audit,
    load: Load,
    samples: Vec<Sample>,
}

impl<'a> Round<'a> {
    pub(crate) fn new(cluster: &'a Cluster, contestant: Contestant, parents: usize) -> Self {
        let (audit, load) = (cluster.audit(contestant), Load::new(&cluster.client));
        Self { cluster, contestant, parents, audit, load, samples: Vec::new() }
    }

    /// What was measured.
    pub(crate) fn samples(self) -> Vec<Sample> {
        self.samples
    }

    fn note(&mut self, figure: &str, value: f64) {
        let (size, contestant) = (self.parents, self.contestant.name());
        self.samples.push(Sample { figure: figure.to_owned(), size, contestant, value });
    }

    /// The ceiling has nothing but convergence.
    pub(crate) async fn ceiling(&mut self) -> anyhow::Result<()> {
        let client = self.cluster.client_of(self.contestant).await?;
        let names = names("app", self.parents);
        let start = Instant::now();
        ceiling::converge(&self.cluster.client, &client, &names).await?;
        self.load.converged(self.parents).await?;
        self.note("time until all parents have converged, s", start.elapsed().as_secs_f64());
        self.load.clear().await
    }

    /// An operator's life: start, convergence, and with `quiet` also a time without changes, edits, a restart; then the end of all parents.
    pub(crate) async fn operator(&mut self, programs: &Programs, quiet: Option<Duration>) -> anyhow::Result<()> {
        let start = Instant::now();
        self.load.create(&names("first", 1)).await?;
        let mut process = self.start(programs)?;
        self.load.converged(1).await?;
        self.note("start until a waiting parent has converged, s", start.elapsed().as_secs_f64());
        self.settle(&process).await?;

        self.converge(&process).await?;
        if let Some(quiet) = quiet {
            self.quiet(&process, quiet).await?;
            self.edits().await?;
            self.settle(&process).await?;
            self.edits_under_load().await?;
            self.settle(&process).await?;
            process.stop().await?;
            process = self.restart(programs).await?;
            process = self.change_logic(programs, process).await?;
        }
        self.end(&process).await?;
        process.stop().await?;
        if self.contestant == Contestant::Pilothouse {
            self.cluster.replace_plugin(programs.plugin()?).await?;
        }
        self.load.clear().await
    }

    fn start(&self, programs: &Programs) -> anyhow::Result<Process> {
        self.start_with(programs, WORDS[0])
    }

    fn start_with(&self, programs: &Programs, word: &str) -> anyhow::Result<Process> {
        let mut command = programs.command(self.contestant, self.cluster)?;
        command.env("MYAPP_WORD", word);
        Process::start(command, &self.cluster.log(self.contestant.name()))
    }

    async fn converge(&mut self, process: &Process) -> anyhow::Result<()> {
        let calls = self.plugin_calls().await?;
        let (processor, writes, start) = (process.processor_time()?, self.load.writes(), Instant::now());
        self.load.create(&names("app", self.parents)).await?;
        self.load.converged(self.parents + 1).await?;
        self.note("time until all parents have converged, s", start.elapsed().as_secs_f64());

        let requests = self.settle(process).await?;
        let each = number(self.parents);
        self.note("processor time per parent, ms", millis(process.processor_time()? - processor) / each);
        let events = requests.iter().filter(|request| request.resource == "events").count();
        self.note_requests("requests per parent", &requests, each);
        self.note("Events per parent", number(events) / each);
        let written = self.load.writes() - writes;
        // The creation is that of the user.
        self.note("stored writes per parent", f64::from(written) / each - 1.0);
        if let (Some(before), Some(after)) = (calls, self.plugin_calls().await?) {
            self.note("plugin calls per event", (after - before) / f64::from(written));
        }
        let memory = process.memory()?;
        self.note("resident memory, MB", memory.resident);
        self.note("proportional set size, MB", memory.proportional);
        Ok(())
    }

    async fn quiet(&mut self, process: &Process, time: Duration) -> anyhow::Result<()> {
        sleep(REST).await;
        self.audit.new_requests()?;
        let (processor, writes) = (process.processor_time()?, self.load.writes());
        sleep(time).await;
        let requests = self.audit.new_requests()?;
        let asked = requests.iter().filter(|request| !request.is_overhead()).count();
        self.note("quiet time: requests", number(asked));
        self.note("quiet time: requests, with watches and the like", number(requests.len()));
        self.note("quiet time: stored writes", f64::from(self.load.writes() - writes));
        self.note(
            "quiet time: processor time per minute, ms",
            millis(process.processor_time()? - processor) * 60.0 / time.as_secs_f64(),
        );
        Ok(())
    }

    async fn edits(&mut self) -> anyhow::Result<()> {
        let mut times = Vec::new();
        for edit in 0..EDITS {
            let name = format!("app-{}", edit % self.parents);
            times.push(millis(self.load.edit(&name, &format!("nginx:idle-{edit}")).await?));
        }
        self.note_times("edit until its child has changed, idle", times);
        Ok(())
    }

    /// While as many parents again converge.
    async fn edits_under_load(&mut self) -> anyhow::Result<()> {
        let all = 2 * self.parents + 1;
        let mut times = Vec::new();
        let more = names("more", self.parents);
        let create = self.load.create(&more);
        let edit = async {
            while self.load.converged_now() < all {
                let name = format!("app-{}", times.len() % self.parents);
                times.push(millis(self.load.edit(&name, &format!("nginx:load-{}", times.len())).await?));
            }
            anyhow::Ok(())
        };
        tokio::try_join!(create, edit)?;
        self.note("edits under load", number(times.len()));
        self.note_times("edit until its child has changed, under load", times);
        Ok(())
    }

    /// All that are because of a parent, and those of each kind.
    fn note_requests(&mut self, figure: &str, requests: &[Request], parents: f64) {
        let mut counted = BTreeMap::<_, usize>::new();
        for request in requests.iter().filter(|request| !request.is_overhead()) {
            *counted.entry(request.what()).or_default() += 1;
        }
        self.note(figure, number(counted.values().sum()) / parents);
        for (what, count) in counted {
            self.note(&format!("{figure}: {what}"), number(count) / parents);
        }
    }

    fn note_times(&mut self, figure: &str, mut times: Vec<f64>) {
        times.sort_by(f64::total_cmp);
        for percent in [50, 99] {
            if let Some(time) = percentile(&times, percent) {
                self.note(&format!("{figure}: p{percent}, ms"), time);
            }
        }
    }

    /// With everything as it should be.
    async fn restart(&mut self, programs: &Programs) -> anyhow::Result<Process> {
        self.audit.new_requests()?;
        let (writes, start) = (self.load.writes(), Instant::now());
        let process = self.start(programs)?;
        let mut requests = Vec::new();
        // Until it watches nothing can be told from its silence.
        while !requests.iter().any(|request: &Request| request.verb == "watch" && request.resource == "myapps") {
            anyhow::ensure!(start.elapsed() < PATIENCE, "it does not watch its parents");
            requests.extend(self.audit.new_requests()?);
            sleep(Duration::from_millis(50)).await;
        }
        let (more, end) = self.calm(&process).await?;
        requests.extend(more);
        let asked = requests.iter().filter(|request| !request.is_overhead()).count();
        self.note("restart in sync: time until all is seen, s", (end - start).as_secs_f64());
        self.note("restart in sync: processor time, ms", millis(process.processor_time()?));
        self.note("restart in sync: requests", number(asked));
        self.note("restart in sync: requests, with lists, watches and the like", number(requests.len()));
        self.note("restart in sync: stored writes", f64::from(self.load.writes() - writes));
        Ok(process)
    }

    /// Every status is to say something else: a plugin is replaced where the others are stopped, and started as something else.
    async fn change_logic(&mut self, programs: &Programs, process: Process) -> anyhow::Result<Process> {
        self.audit.new_requests()?;
        let plugin = programs.changed_plugin(WORDS[1])?;
        let start = Instant::now();
        let process = if self.contestant == Contestant::Pilothouse {
            self.cluster.replace_plugin(plugin).await?;
            process
        } else {
            process.stop().await?;
            self.start_with(programs, WORDS[1])?
        };
        self.load.say(WORDS[1]).await?;
        let parents = number(self.load.converged_now());
        self.note(
            "changed logic until all parents follow it, per 1,000, s",
            start.elapsed().as_secs_f64() * 1000.0 / parents,
        );
        let requests = self.settle(&process).await?;
        let asked = requests.iter().filter(|request| !request.is_overhead()).count();
        self.note("changed logic: requests per parent", number(asked) / parents);
        Ok(process)
    }

    async fn end(&mut self, process: &Process) -> anyhow::Result<()> {
        self.audit.new_requests()?;
        let (parents, start) = (self.load.converged_now(), Instant::now());
        self.load.delete().await?;
        self.note(
            "time until all parents are deleted, per 1,000, s",
            start.elapsed().as_secs_f64() * 1000.0 / number(parents),
        );
        let requests = self.settle(process).await?;
        self.note_requests("requests per deleted parent", &requests, number(parents));
        Ok(())
    }

    /// Waits until it has nothing more to do; what it has asked for since the last look.
    async fn settle(&mut self, process: &Process) -> anyhow::Result<Vec<Request>> {
        Ok(self.calm(process).await?.0)
    }

    /// The same, with the time when it had done everything: it neither asked nor computed from then on.
    async fn calm(&mut self, process: &Process) -> anyhow::Result<(Vec<Request>, Instant)> {
        let start = Instant::now();
        let (mut requests, mut last, mut computed) = (Vec::new(), start, process.processor_time()?);
        while last.elapsed() < CALM {
            anyhow::ensure!(start.elapsed() < PATIENCE, "it has something to do without end");
            sleep(Duration::from_millis(100)).await;
            let (new, now) = (self.audit.new_requests()?, process.processor_time()?);
            // A tenth of a processor is nothing that anybody waits for: the runtimes of Go and Python have something to do at all times.
            if !new.is_empty() || now - computed > Duration::from_millis(10) {
                last = Instant::now();
            }
            requests.extend(new);
            computed = now;
        }
        Ok((requests, last))
    }

    /// What Pilothouse says of itself.
    async fn plugin_calls(&self) -> anyhow::Result<Option<f64>> {
        if self.contestant != Contestant::Pilothouse {
            return Ok(None);
        }
        let log = std::fs::read_to_string(self.cluster.log(self.contestant.name()))?;
        let address = log.split_once("\"metrics\":\"").and_then(|(_, rest)| rest.split('"').next());
        let address = address.context("the host does not say where its metrics are")?;
        let client = Client::try_from(Config::new(format!("http://{address}").parse()?))?;
        let metrics = client.request_text(http::Request::get("/metrics").body(Vec::new())?).await?;
        let calls = metrics.lines().filter(|line| line.starts_with("pilothouse_plugin_calls_total{"));
        let calls = calls.filter(|line| line.contains("function=\"reconcile\""));
        Ok(Some(calls.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()))
    }
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}-{number}")).collect()
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Counts are far below what a float holds exactly.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn number(count: usize) -> f64 {
    count as f64
}
