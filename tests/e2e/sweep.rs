//! A parent's life, met with each fault at each point of it: requests that are refused, delayed or cut, watches that end, lose an event
//! or go back in time, and a host that is killed. Whatever happens, the life ends as the plugin wants it, and what is true
//! always is true all the way.
//!
//! A run without a fault tells which points there are, so a step that is added to [`life`] is swept without more code.
//! `SWEEP=17 cargo test … sweep` repeats one run by its number, and keeps its log.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    io::Write as _,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use faults::{Fault, Options, Point, Proxy};
use futures::{StreamExt as _, stream};
use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams, PropagationPolicy},
    runtime::watcher,
};
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    audit::{self, Request},
    cluster::{Cluster, Host, Namespace, condition, config_map, delete, edit, get, mirror, our_finalizers},
};

/// How many runs go on at once: they wait most of the time.
const AT_ONCE: usize = 6;
/// The numbers of the runs without a fault.
const CALM: Range<usize> = 900..900 + 2 * AT_ONCE;
/// What is added to the number of a run that is repeated alone.
const REPEATED: usize = 1000;
/// How long a step may take, a fault and a backoff included.
const PATIENCE: Duration = Duration::from_secs(90);
const HOLD: &str = "t.example/hold";

/// What happens to a request.
const REQUEST_FAULTS: [Fault; 10] = [
    Fault::Refuse(403),
    Fault::Refuse(404),
    Fault::Refuse(409),
    Fault::Refuse(422),
    Fault::Refuse(429),
    Fault::Refuse(503),
    Fault::CutBefore,
    Fault::CutAfter,
    Fault::CrashBefore,
    Fault::CrashAfter,
];
/// What happens to an event.
const EVENT_FAULTS: [Fault; 5] = [
    Fault::CutBefore,
    Fault::Lose,
    Fault::Delay(Duration::from_millis(700)),
    Fault::Stale(Duration::from_millis(700)),
    Fault::CrashBefore,
];

/// One run, with its number in the sweep.
#[derive(Clone)]
struct Run {
    number: usize,
    fault: Option<(Point, Fault)>,
}

impl Run {
    fn name(&self) -> String {
        format!("run-{:03}", self.number)
    }

    fn far(&self) -> String {
        format!("far-{:03}", self.number)
    }

    fn namespaces(&self) -> [String; 2] {
        [self.name(), self.far()]
    }
}

/// What came of a run.
struct Outcome {
    run: Run,
    points: Vec<Point>,
    stored: Stored,
    problems: Vec<String>,
    log: String,
}

impl Outcome {
    /// Looks at what only the API server knows.
    fn audit(&mut self, writes: &Writes) {
        let deletes = self.run.namespaces().into_iter().filter_map(|namespace| writes.get(&namespace)).flatten();
        let mut deletes = deletes.filter(|write| write.verb == "delete");
        if deletes.any(|write| write.body["preconditions"]["uid"].is_null()) {
            self.problems.push("a delete without the UID of what it means".to_owned());
        }
        let writes = accepted(writes, &self.run);
        self.stored.events = events(&writes);
        self.problems.extend(end_violations(&self.log, &writes));
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.run.number)?;
        if let Some((point, fault)) = &self.run.fault {
            write!(f, " {point}, {fault}")?;
        }
        write!(f, ": {}", self.problems.join("; "))
    }
}

/// How often something was stored.
#[derive(Clone, Debug, Default)]
struct Stored {
    /// By name of the child.
    children: BTreeMap<String, usize>,
    finalizer: usize,
    status: usize,
    /// Those of the parent, repetitions included.
    events: usize,
}

impl Stored {
    /// The most of both.
    fn widen(&mut self, other: &Self) {
        for (name, count) in &other.children {
            let most = self.children.entry(name.clone()).or_default();
            *most = (*most).max(*count);
        }
        self.finalizer = self.finalizer.max(other.finalizer);
        self.status = self.status.max(other.status);
        self.events = self.events.max(other.events);
    }
}

/// A state of an object that a watch has shown.
struct Seen {
    object: DynamicObject,
    deleted: bool,
}

impl Seen {
    fn version(&self) -> u64 {
        self.object.metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
    }

    fn name(&self) -> &str {
        self.object.metadata.name.as_deref().unwrap_or_default()
    }
}

type History = Arc<Mutex<Vec<Seen>>>;

/// Waits until `look` finds what it looks for.
async fn step<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> Result<T, String> {
    let start = Instant::now();
    loop {
        match look().await {
            Some(found) => return Ok(found),
            None if start.elapsed() > PATIENCE => return Err(format!("not within {PATIENCE:?}: {what}")),
            None => tokio::time::sleep(Duration::from_millis(40)).await,
        }
    }
}

async fn synced(ns: &Namespace<'_>) -> Result<(), String> {
    step("Synced is True for the latest spec", async || {
        let parent = get(&ns.widgets(), "w").await?;
        let synced = condition(&parent, "Synced")?;
        let current = synced["observedGeneration"].as_i64() == parent.metadata.generation;
        (synced["status"] == "True" && current).then_some(())
    })
    .await
}

async fn child(
    api: &Api<DynamicObject>,
    name: &str,
    what: &str,
    is: impl Fn(&DynamicObject) -> bool,
) -> Result<DynamicObject, String> {
    step(&format!("{name}: {what}"), async || get(api, name).await.filter(|child| is(child))).await
}

/// The script: what a user does, and what has to come of it.
async fn life(ns: &Namespace<'_>, far: &Namespace<'_>) -> Result<(), String> {
    let key = |value: &'static str| move |child: &DynamicObject| child.data["data"]["key"] == value;
    let mut remote = config_map("far", "1");
    remote["metadata"]["namespace"] = json!(far.name);
    let reply = |a: &str| vec![config_map("a", a), remote.clone()];
    let with_b = |a: &str| [reply(a), vec![config_map("b", "1")]].concat();
    let (maps, far_maps) = (ns.config_maps(), far.config_maps());

    // Created, and converged.
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Widget",
        "metadata": {"name": "w", "labels": {"run": ns.name}, "finalizers": [HOLD]},
        "spec": {"reply": {"children": with_b("1"), "status": {"n": 1}}, "cleanup": {"log": ["cleanup"], "waitingMs": 60_000}}}))
        .await;
    child(&maps, "a", "is made", key("1")).await?;
    child(&far_maps, "far", "is made", key("1")).await?;
    let b = child(&maps, "b", "is made", key("1")).await?;
    synced(ns).await?;
    // The spec changes.
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": with_b("2"), "status": {"n": 2}}}})).await;
    child(&maps, "a", "is changed", key("2")).await?;
    synced(ns).await?;
    // A child is deleted by hand.
    delete(&maps, "b", PropagationPolicy::Background).await;
    child(&maps, "b", "is made again", |again| again.metadata.uid != b.metadata.uid).await?;
    // A field is taken by another manager, and others are added.
    let theft = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "labels": {"team": "blue"}},
        "data": {"key": "3", "theirs": "1"}});
    let params = PatchParams::apply("thief").force();
    maps.patch("a", &params, &Patch::Apply(theft)).await.map_err(|error| error.to_string())?;
    child(&maps, "a", "is ours again", key("2")).await?;
    // One child is no longer wanted.
    edit(&ns.widgets(), "w", json!({"spec": {"reply": {"children": reply("2"), "status": {"n": 3}}}})).await;
    step("b is pruned", async || get(&maps, "b").await.is_none().then_some(())).await?;
    synced(ns).await?;
    // Deleted; cleanup takes two steps.
    delete(&ns.widgets(), "w", PropagationPolicy::Background).await;
    step("cleanup waits", async || {
        let parent = get(&ns.widgets(), "w").await?;
        condition(&parent, "Ready").filter(|ready| ready["reason"] == "Deleting").map(drop)
    })
    .await?;
    edit(&ns.widgets(), "w", json!({"spec": {"cleanup": {"waitingMs": null}}})).await;
    step("our finalizer goes", async || {
        get(&ns.widgets(), "w").await.filter(|parent| our_finalizers(parent).is_empty()).map(drop)
    })
    .await?;
    if get(&far_maps, "far").await.is_some() {
        return Err("our finalizer went before the child in the other namespace".to_owned());
    }
    // Touched after we have left it: none of our business.
    edit(&ns.widgets(), "w", json!({"metadata": {"annotations": {"touched": "1"}}})).await;
    edit(&ns.widgets(), "w", json!({"metadata": {"finalizers": null}})).await;
    step("the children go", async || get(&maps, "a").await.is_none().then_some(())).await
}

/// What is true at all times, on what the watches have shown.
fn violations(run: &Run, parents: &[Seen], children: &[Seen]) -> Vec<String> {
    let mut problems = Vec::new();
    let ours = |seen: &Seen| !our_finalizers(&seen.object).is_empty();
    let with_finalizer = parents.iter().find(|seen| ours(seen)).map_or(u64::MAX, Seen::version);
    let deleting = |seen: &&Seen| seen.object.metadata.deletion_timestamp.is_some();
    let deleted_at = parents.iter().find(deleting).map_or(u64::MAX, Seen::version);
    let mut known: BTreeMap<(String, String), &Seen> = BTreeMap::new();
    for seen in children {
        let place = (seen.object.metadata.namespace.clone().unwrap_or_default(), seen.name().to_owned());
        let before = known.get(&place).copied();
        let is_new =
            before.is_none_or(|before| before.deleted || before.object.metadata.uid != seen.object.metadata.uid);
        if is_new && !seen.deleted && seen.version() < with_finalizer {
            problems.push(format!("{place:?} was made before our finalizer was there"));
        }
        if is_new && !seen.deleted && seen.version() > deleted_at {
            problems.push(format!("{place:?} was made after the deletion of its parent"));
        }
        if let Some(before) = before.filter(|_| !is_new && !seen.deleted) {
            let theirs = |seen: &Seen| {
                (
                    seen.object.data["data"]["theirs"].clone(),
                    seen.object.metadata.labels.as_ref().and_then(|labels| labels.get("team").cloned()),
                )
            };
            if theirs(before).0 == "1" && theirs(before) != theirs(seen) {
                problems.push(format!("a field or label of somebody else on {place:?} was changed"));
            }
        }
        known.insert(place, seen);
    }
    let mut released = false;
    for pair in parents.windows(2) {
        let [before, after] = pair else { continue };
        let held = |seen: &Seen| seen.object.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == HOLD);
        released |= after.object.metadata.annotations.iter().flatten().any(|(name, _)| name == "touched");
        if held(before) && !held(after) && !after.deleted && !released {
            problems.push("the finalizer of somebody else was removed".to_owned());
        }
        if ours(before) && !ours(after) && after.object.metadata.deletion_timestamp.is_none() {
            problems.push("our finalizer was removed from a parent that lives".to_owned());
        }
        if !ours(before) && ours(after) && after.object.metadata.deletion_timestamp.is_some() {
            problems.push("our finalizer was put on a parent that is being deleted".to_owned());
        }
    }
    let last = |name: &str| children.iter().rev().find(|seen| seen.name() == name).is_none_or(|seen| seen.deleted);
    for name in ["a", "b", "far"] {
        if !last(name) {
            problems.push(format!("{name} was left behind by {}", run.name()));
        }
    }
    problems
}

fn stored(parents: &[Seen], children: &[Seen]) -> Stored {
    let mut stored = Stored::default();
    for seen in children.iter().filter(|seen| !seen.deleted) {
        *stored.children.entry(seen.name().to_owned()).or_default() += 1;
    }
    for pair in parents.windows(2) {
        let [before, after] = pair else { continue };
        stored.finalizer += usize::from(our_finalizers(&before.object) != our_finalizers(&after.object));
        stored.status += usize::from(before.object.data["status"] != after.object.data["status"]);
    }
    stored
}

async fn follow(api: Api<DynamicObject>, history: History) {
    let mut events = std::pin::pin!(watcher(api, watcher::Config::default()));
    while let Some(event) = events.next().await {
        let seen = match event.expect("the test's own watch does not fail") {
            watcher::Event::Apply(object) | watcher::Event::InitApply(object) => Seen { object, deleted: false },
            watcher::Event::Delete(object) => Seen { object, deleted: true },
            watcher::Event::Init | watcher::Event::InitDone => continue,
        };
        // Kubernetes puts a ConfigMap of its own into each namespace.
        if seen.name() != "kube-root-ca.crt" {
            history.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
        }
    }
}

/// The host of a run: killed at its crash point, and started again.
struct Restarted {
    cluster: &'static Cluster,
    kubeconfig: std::path::PathBuf,
    /// One at a time: a crash at the very end must not take the log of the first host from who reads it.
    life: Mutex<HostLife>,
}

#[derive(Default)]
struct HostLife {
    host: Option<Host>,
    /// Of all hosts that have ended.
    log: String,
    is_over: bool,
}

impl Restarted {
    fn life(&self) -> MutexGuard<'_, HostLife> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) {
        self.life().host = Some(self.cluster.spawn_host(&self.kubeconfig, &[]));
    }

    fn crash(&self) {
        let mut life = self.life();
        if !life.is_over {
            life.stop();
            life.host = Some(self.cluster.spawn_host(&self.kubeconfig, &[]));
        }
    }

    /// Ends it for good; what its hosts have logged.
    fn end(&self) -> String {
        let mut life = self.life();
        life.is_over = true;
        life.stop();
        life.log.clone()
    }
}

impl HostLife {
    fn stop(&mut self) {
        let Some(host) = self.host.take() else { return };
        let log = host.log.clone();
        host.kill();
        self.log.push_str(&std::fs::read_to_string(log).unwrap_or_default());
    }
}

async fn perform(cluster: &'static Cluster, token: &str, run: Run) -> Outcome {
    let (ns, far) = (cluster.namespace(&run.name()).await, cluster.namespace(&run.far()).await);
    let kubeconfig = cluster.control_plane.data_dir().join(format!("{}.kubeconfig", run.name()));
    let host = Arc::new(Restarted { cluster, kubeconfig, life: Mutex::default() });
    let crashed = host.clone();
    let options = Options {
        run: Some(run.name()),
        fault: run.fault.clone(),
        failing: 0.0,
        crash: Box::new(move || crashed.crash()),
        aliases: vec![(run.name(), "RUN".to_owned()), (run.far(), "FAR".to_owned())],
    };
    let proxy = Proxy::start(cluster.control_plane.kubeconfig(), options).await.expect("the proxy starts");
    cluster.write_kubeconfig_by_way_of(&host.kubeconfig, proxy.address, token);
    let reconciler = json!({"apiVersion": "pilothouse.dev/v1alpha1", "kind": "ClusterReconciler", "metadata": {"name": run.name(), "labels": {"run": run.name()}},
        "spec": {"plugin": {"configMap": {"namespace": "pilothouse-system", "name": "mirror-plugin"}},
            "serviceAccount": {"namespace": "pilothouse-system", "name": "mirror"},
            "selector": {"matchLabels": {"run": run.name()}}}});
    let reconcilers = ns.cluster_api("pilothouse.dev/v1alpha1", "ClusterReconciler");
    let reconciler: DynamicObject = serde_json::from_value(reconciler).expect("it is an object");
    reconcilers.create(&Default::default(), &reconciler).await.expect("it can be created");

    let (parents, children) = (History::default(), History::default());
    let _watches: Vec<_> = [(ns.widgets(), &parents), (ns.config_maps(), &children), (far.config_maps(), &children)]
        .map(|(api, history)| AbortOnDropHandle::new(tokio::spawn(follow(api, history.clone()))))
        .into();
    host.start();
    let lived = life(&ns, &far).await;
    // The last events of the test's own watches.
    let last = async || {
        let seen = children.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().rev().find(|seen| seen.name() == "a").is_some_and(|seen| seen.deleted).then_some(())
    };
    let _ = tokio::time::timeout(Duration::from_secs(2), step("the watches have shown all", last)).await;
    let log = host.end();
    let (parents, children) = (
        parents.lock().unwrap_or_else(PoisonError::into_inner),
        children.lock().unwrap_or_else(PoisonError::into_inner),
    );
    let mut problems = violations(&run, &parents, &children);
    problems.extend(lived.err());
    if run.fault.is_some() && !proxy.has_fired() {
        problems.push("the point was not reached".to_owned());
    }
    if log.contains("panicked") {
        problems.push("the host panicked".to_owned());
    }
    Outcome { points: proxy.points(), stored: stored(&parents, &children), problems, log, run }
}

/// What is stored more often than it has to be.
fn excess(outcome: &Outcome, base: &Stored) -> Vec<String> {
    let spare = match outcome.run.fault {
        Some((_, Fault::CrashBefore | Fault::CrashAfter | Fault::Stale(_))) => 0,
        _ => 1,
    };
    let mut problems = Vec::new();
    for (name, count) in &outcome.stored.children {
        let most = base.children.get(name).copied().unwrap_or_default() + spare;
        if *count > most {
            problems.push(format!("{name} was stored {count} times, not {most}"));
        }
    }
    for (what, count, most) in [
        ("the finalizer", outcome.stored.finalizer, base.finalizer + spare),
        ("the status", outcome.stored.status, base.status + 2),
        ("Events", outcome.stored.events, base.events + 2),
    ] {
        if count > most {
            problems.push(format!("{what}: stored {count} times, not {most}"));
        }
    }
    problems
}

/// What hosts have tried to write, by namespace.
type Writes = BTreeMap<String, Vec<Request>>;

fn writes(cluster: &Cluster) -> Writes {
    let mut writes = Writes::new();
    for request in audit::requests(cluster.control_plane.audit_log()) {
        if request.is_write() {
            writes.entry(request.namespace.clone()).or_default().push(request);
        }
    }
    writes
}

/// What the API server has accepted of a run, in the order of time.
fn accepted<'a>(writes: &'a Writes, run: &Run) -> Vec<&'a Request> {
    let of_run = run.namespaces().into_iter().filter_map(|namespace| writes.get(&namespace)).flatten();
    let mut accepted: Vec<_> = of_run.filter(|write| write.code < 300).collect();
    accepted.sort_by(|a, b| a.at.cmp(&b.at));
    accepted
}

/// The Events among what the host has written.
fn events(writes: &[&Request]) -> usize {
    writes.iter().filter(|write| write.resource == "events").count()
}

/// Whether this takes our finalizer off a parent.
fn releases(write: &Request) -> bool {
    let ours = |list: &Value| {
        list.as_array()
            .into_iter()
            .flatten()
            .any(|name| name.as_str().is_some_and(|name| name.starts_with("pilothouse.dev/")))
    };
    let sets = |operation: &&Value| operation["op"] == "add" && operation["path"] == "/metadata/finalizers";
    let set = write.body.as_array().into_iter().flatten().find(sets);
    write.what() == "patch widgets" && set.is_some_and(|operation| !ours(&operation["value"]))
}

/// When these lines were logged: sorts as text, together with the times of the audit log.
fn logged<'a>(log: &'a str, message: &str) -> impl Iterator<Item = String> + use<'a> {
    let message = format!("\"message\":\"{message}\"");
    let lines = log.lines().filter(move |line| line.contains(&message));
    lines.filter_map(|line| Some(serde_json::from_str::<Value>(line).ok()?["timestamp"].as_str()?.to_owned()))
}

/// What is wrong with the end of a life, by the writes that the API server has accepted: the host that takes our finalizer off has asked
/// the plugin itself, whatever a host before it had been told; and from then on nothing is asked, and nothing done.
fn end_violations(log: &str, writes: &[&Request]) -> Vec<String> {
    let Some(at) = writes.iter().position(|write| releases(write)) else {
        return vec!["nobody took our finalizer off".to_owned()];
    };
    let released = &writes[at].at;
    let mut problems = Vec::new();
    let born = logged(log, "pilothouse runs").filter(|born| born < released).last().unwrap_or_default();
    if !logged(log, "cleanup").any(|call| born < call && call < *released) {
        problems.push("our finalizer was taken off by a host that had not called finalize".to_owned());
    }
    if logged(log, "cleanup").any(|call| call > *released) {
        problems.push("finalize was called when our finalizer was gone".to_owned());
    }
    let after = writes[at + 1..].iter().filter(|write| write.resource != "events");
    problems.extend(after.map(|write| format!("{} {} when our finalizer was gone", write.what(), write.name)));
    problems
}

/// Points that belong to the life of the parent; those of the start of a host come on top by crashes.
fn belongs(point: &Point) -> bool {
    match point {
        Point::Request { asked, .. } => asked.namespace == "RUN" || asked.namespace == "FAR",
        Point::Event { resource, .. } => matches!(resource.as_str(), "widgets" | "configmaps"),
    }
}

fn runs(points: &[Point]) -> Vec<Run> {
    let pairs = points.iter().filter(|point| belongs(point)).flat_map(|point| {
        let faults: &[Fault] = match point {
            Point::Request { .. } => &REQUEST_FAULTS,
            Point::Event { .. } => &EVENT_FAULTS,
        };
        faults.iter().map(|fault| (point.clone(), *fault))
    });
    pairs.enumerate().map(|(at, fault)| Run { number: at + 1, fault: Some(fault) }).collect()
}

/// A row for each point, a column for each fault: a dot for a run that went well, else its number.
fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for (title, faults, is_event) in [("request", &REQUEST_FAULTS[..], false), ("event", &EVENT_FAULTS[..], true)] {
        let _ = write!(text, "\n{title:<44}");
        for fault in faults {
            let _ = write!(text, "{:>13}", fault.to_string());
        }
        let mut row = None;
        for outcome in outcomes {
            let Some((point, fault)) = &outcome.run.fault else { continue };
            if matches!(point, Point::Event { .. }) != is_event {
                continue;
            }
            if row != Some(point) {
                let _ = write!(text, "\n{:<44}", point.to_string());
                row = Some(point);
            }
            let _ = fault;
            let cell = if outcome.problems.is_empty() { ".".to_owned() } else { format!("#{}", outcome.run.number) };
            let _ = write!(text, "{cell:>13}");
        }
        text.push('\n');
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sweep_every_fault_at_every_point_of_a_life_ends_well() {
    let cluster: &'static Cluster = Box::leak(Box::new(Cluster::start()));
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    crate::swap::push(cluster, "mirror", &mirror(5));
    let token = cluster.host_token();
    // Without a fault, as many at once as later: what differs by chance is allowed.
    let mut base = Stored::default();
    let mut points = Vec::new();
    let calm = CALM.map(|number| perform(cluster, &token, Run { number, fault: None }));
    let mut calm = stream::iter(calm).buffer_unordered(AT_ONCE);
    while let Some(outcome) = calm.next().await {
        assert!(outcome.problems.is_empty(), "without a fault: {:#?}\n{}", outcome.problems, outcome.log);
        base.widen(&outcome.stored);
        points = outcome.points;
    }
    let mut runs = runs(&points);
    let only: Option<usize> = std::env::var("SWEEP").ok().map(|number| number.parse().expect("SWEEP is a number"));
    if let Some(only) = only {
        runs.retain(|run| run.number == only);
    }
    let start = Instant::now();
    let count = runs.len();
    let mut outcomes: Vec<_> =
        stream::iter(runs).map(|run| perform(cluster, &token, run)).buffer_unordered(AT_ONCE).collect().await;
    outcomes.sort_by_key(|outcome| outcome.run.number);
    let writes = self::writes(cluster);
    base.events = CALM.map(|number| events(&accepted(&writes, &Run { number, fault: None }))).max().unwrap_or_default();
    assert!(base.events > 0, "the audit log shows Events");
    for outcome in &mut outcomes {
        outcome.audit(&writes);
    }
    // Hosts that run at once delay each other, and then what happens may be told in one step more. What is stored too often by a fault is so
    // as well when the run is alone; what is wrong otherwise is never forgiven.
    for outcome in &mut outcomes {
        if outcome.problems.is_empty() && !excess(outcome, &base).is_empty() {
            let number = outcome.run.number + REPEATED;
            *outcome = perform(cluster, &token, Run { number, fault: outcome.run.fault.clone() }).await;
        }
    }
    let writes = self::writes(cluster);
    for outcome in &mut outcomes {
        if outcome.run.number > REPEATED {
            outcome.audit(&writes);
        }
        outcome.problems.extend(excess(outcome, &base));
        if outcome.stored.events > base.events + 2 {
            let told = accepted(&writes, &outcome.run).into_iter().filter(|write| write.resource == "events");
            let told = told.map(|write| format!("{} {} {}", write.at, write.what(), write.body["reason"]));
            outcome.problems.push(told.collect::<Vec<_>>().join(", "));
        }
    }
    let failed: Vec<_> = outcomes.iter().filter(|outcome| !outcome.problems.is_empty()).collect();
    let mut report = table(&outcomes);
    let _ = writeln!(report, "\n{count} runs in {:.0?}, {} failed", start.elapsed(), failed.len());
    // Past the capture of the test runner: the table is worth a look also when all went well.
    let _ = std::io::stdout().lock().write_all(report.as_bytes());
    if only.is_some() {
        let _ = std::io::stdout()
            .lock()
            .write_all(outcomes.iter().map(|outcome| outcome.log.as_str()).collect::<String>().as_bytes());
    }
    let failures: Vec<_> = failed.iter().map(|outcome| outcome.to_string()).collect();
    assert!(failed.is_empty(), "{} of {count} runs failed:\n{}", failed.len(), failures.join("\n"));
    assert!(only.is_some() || count >= 150, "only {count} runs");
}
