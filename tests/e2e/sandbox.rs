//! What plugins try that is not theirs to do, by a real plugin in a real host: each attempt is refused, counted and logged once, and no byte of
//! it is sent. And what they find in their own memory: no credential, and nothing of another plugin.

use std::{
    fs,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::{Api, api::DynamicObject};
use postgres::Postgres;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::watch,
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    cluster::{Cluster, Host, Namespace, component, edit, eventually, pilothouse, refused, synced},
    observability::Page,
    outside::everything_told,
    tripwire::Tripwire,
};

/// A server that notes what it is sent, and answers as it is told to.
struct Witness {
    port: u16,
    connections: Arc<AtomicUsize>,
    requests: Arc<Mutex<Vec<String>>>,
    _accepts: AbortOnDropHandle<()>,
}

impl Witness {
    async fn start<F>(answer: impl Fn(String) -> F + Clone + Send + Sync + 'static) -> Self
    where
        F: Future<Output = String> + Send,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let port = listener.local_addr().expect("it listens").port();
        let (connections, requests) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<String>>>::default());
        let (count, notes) = (connections.clone(), requests.clone());
        let accepts = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (answer, notes) = (answer.clone(), notes.clone());
                tokio::spawn(async move {
                    let (mut request, mut buffer) = (String::new(), [0; 4096]);
                    while !request.contains("\r\n\r\n") {
                        match stream.read(&mut buffer).await {
                            Ok(read) if read > 0 => request += &String::from_utf8_lossy(&buffer[..read]),
                            _ => return,
                        }
                    }
                    notes.lock().unwrap_or_else(PoisonError::into_inner).push(request.clone());
                    // Whoever asks may be gone by then.
                    drop(stream.write_all(answer(request).await.as_bytes()).await);
                });
            }
        });
        Self { port, connections, requests, _accepts: AbortOnDropHandle::new(accepts) }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len())
}

/// Installs a build of reach as a reconciler of that name, for the parents with the label `who` of that value.
fn install(cluster: &Cluster, name: &str, bytes: &[u8], mut grants: Value, limits: &Value) {
    // It imports that, too.
    grants["kube"] = json!({});
    let file = |suffix: &str| cluster.control_plane.data_dir().join(format!("{name}.{suffix}"));
    fs::write(file("wasm"), bytes).expect("it can be written");
    fs::write(file("yaml"), grants.to_string()).expect("it can be written");
    let (plugin, grants) = (file("wasm").display().to_string(), file("yaml").display().to_string());
    cluster.apply(&pilothouse(&["manifests", &plugin, "--name", name, "--grants", &grants]));
    let spec = json!({"spec": {"selector": {"matchLabels": {"who": name}}, "limits": limits}});
    cluster.kubectl(&["patch", "crec", name, "--type=merge", "-p", &spec.to_string()]);
}

fn put_secret(cluster: &Cluster, name: &str, data: &Value) {
    let metadata = json!({"name": name, "namespace": "pilothouse-system"});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data});
    cluster.apply(secret.to_string().as_bytes());
}

fn of_secret(name: &str) -> Value {
    json!({"namespace": "pilothouse-system", "name": name})
}

fn reaches(ns: &Namespace<'_>) -> Api<DynamicObject> {
    ns.api("t.example/v1", "Reach")
}

async fn reach(ns: &Namespace<'_>, who: &str, name: &str, spec: &Value) {
    let metadata = json!({"name": name, "labels": {"who": who}});
    ns.create(json!({"apiVersion": "t.example/v1", "kind": "Reach", "metadata": metadata, "spec": spec})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_granted_is_refused_counted_and_logged_once_and_no_byte_is_sent() {
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    let database = Postgres::start(postgres::Options::default()).expect("PostgreSQL starts");
    // The role may write: what it is granted for is to read.
    let setup = "CREATE TABLE t (a int); INSERT INTO t VALUES (1); CREATE ROLE app LOGIN PASSWORD 'sesame'; GRANT ALL ON t TO app;
        CREATE FUNCTION add() RETURNS int LANGUAGE sql AS 'INSERT INTO t VALUES (2) RETURNING a'";
    database.sql(setup).expect("it is set up");
    let wire = Tripwire::before(database.port()).await;
    let elsewhere = Witness::start(async |_| answer("200 OK", "", "")).await;
    let location = format!("Location: {}/v1\r\n", elsewhere.url());
    let granted = Witness::start(move |_| std::future::ready(answer("302 Found", &location, ""))).await;
    let (port, other) = (granted.port, elsewhere.port);

    put_secret(
        &cluster,
        "database",
        &json!({"uri": format!("postgres://app:sesame@127.0.0.1:{}/postgres?sslmode=disable", wire.port)}),
    );
    put_secret(&cluster, "token", &json!({"token": "the token of the host"}));
    let grants = json!({
        "http": [
            {"name": "api", "url": format!("http://127.0.0.1:{port}/v1"), "allowNetworks": ["127.0.0.0/8"],
                "auth": {"bearer": {"secretRef": of_secret("token")}}},
            {"name": "metadata", "url": "http://169.254.169.254"},
            {"name": "name", "url": format!("http://localhost:{other}")},
            {"name": "address", "url": format!("http://127.0.0.1:{other}")},
        ],
        "sql": [{"name": "reads", "engine": "postgres", "access": "Read", "secretRef": of_secret("database")}],
    });
    let plugin = fs::read(component("reach")).expect("it was built");
    install(&cluster, "tries", &plugin, grants, &json!({}));
    let host = cluster.run_host_with(&[], 1);
    let ns = cluster.namespace("tries").await;

    let api = |target: &str| json!({"grant": "api", "target": target});
    let at = |grant: &str| json!({"grant": grant, "target": "/"});
    let with = |name: &str, value: &str| json!({"grant": "api", "target": "/v1", "headers": [[name, value]]});
    let requests = [
        (at("others"), "no grant of this name"),
        (api("http://elsewhere.example.com/v1"), "begin with a slash"),
        (api(&format!("http://127.0.0.1:{other}/v1")), "begin with a slash"),
        (api(&format!("http://127.0.0.1:{port}/v1")), "begin with a slash"),
        (api(&format!("//127.0.0.1:{other}/v1")), "not at or below"),
        (api("/v2"), "not at or below"),
        (api("/v1/../v2"), "a segment . or .."),
        (api("/v1/%2e%2e/v2"), "an encoded dot"),
        (at("metadata"), "169.254.169.254, which is not public"),
        (at("name"), "which is not public"),
        (at("address"), "127.0.0.1, which is not public"),
        (with("Host", "elsewhere.example.com"), "set by the host alone"),
        (with("Authorization", "Bearer mine"), "set by the host alone"),
        (json!({"grant": "api", "method": "DELETE", "target": "/v1"}), "not allowed"),
    ];
    let statements = [
        (json!({"grant": "others", "text": "SELECT 1"}), "no grant of this name"),
        (json!({"grant": "reads", "text": "INSERT INTO t VALUES (2)", "execute": true}), "INSERT needs access: Write"),
        (json!({"grant": "reads", "text": "SET TRANSACTION READ WRITE"}), "SET is refused"),
    ];
    let asked = |of: &[(Value, &str)]| of.iter().map(|(what, _)| what.clone()).collect::<Vec<_>>();
    reach(&ns, "tries", "tries", &json!({"http": asked(&requests), "sql": asked(&statements)})).await;
    let status = synced(&reaches(&ns), "tries").await.data["status"].clone();
    for (kind, cases) in [("http", &requests[..]), ("sql", &statements[..])] {
        for (place, (what, why)) in cases.iter().enumerate() {
            let error = status[kind][place]["error"].as_str().unwrap_or_default();
            assert!(error.contains("Denied(") && error.contains(why), "{what}: {}", status[kind][place]);
        }
    }
    // Again, and all are counted, and none is logged anew.
    for round in 0..3 {
        let calls = ns.calls("tries", "asked");
        edit(&reaches(&ns), "tries", json!({"metadata": {"annotations": {"round": round.to_string()}}})).await;
        eventually("it is asked again", async || (ns.calls("tries", "asked") > calls).then_some(())).await;
    }
    ns.assert_quiet(Duration::from_secs(1)).await;
    let calls = ns.calls("tries", "asked");
    assert!(calls >= 4, "{calls}");
    let page = Page(host.metrics().await);
    for (kind, cases) in [("http", requests.len()), ("sql", statements.len())] {
        let counted = |outcome: &str| {
            let of = format!(r#"{{reconciler="tries",capability="{kind}",outcome="{outcome}"}}"#);
            page.sum(&format!("pilothouse_capability_calls_total{of}")).to_string()
        };
        assert_eq!([counted("denied"), counted("ok")], [(calls * cases).to_string(), "0".to_owned()]);
    }
    let refusals = || {
        let log = host.log_text();
        let lines = log.lines().filter(|line| line.contains("refused to a plugin"));
        lines.map(|line| serde_json::from_str::<Value>(line).expect("it is JSON")["message"].to_string()).collect()
    };
    let logged: Vec<String> = refusals();
    assert_eq!(logged.len(), requests.len() + statements.len(), "{logged:#?}");
    for (what, why) in requests.iter().chain(&statements) {
        assert!(logged.iter().any(|line| line.contains(why)), "{what}: {logged:#?}");
    }
    assert_eq!((granted.connections(), elsewhere.connections(), wire.connections()), (0, 0, 0), "no byte was sent");

    // Where the plugin makes it its own failure, the condition says what was refused.
    reach(&ns, "tries", "insists", &json!({"insist": true, "http": [at("metadata")]})).await;
    let message = refused(&reaches(&ns), "insists", "PluginRetry").await;
    assert!(message.contains("http is denied: grant metadata: ") && message.contains("169.254.169.254"), "{message}");
    reach(&ns, "tries", "insists-on-sql", &json!({"insist": true, "sql": [statements[1].0]})).await;
    let message = refused(&reaches(&ns), "insists-on-sql", "PluginRetry").await;
    assert!(message.contains("the sql grant reads does not allow this: INSERT needs access: Write"), "{message}");
    assert_eq!(refusals(), logged, "they were logged before");

    // What is granted is sent, under the host's own name and credentials; and nobody goes where the answer points to.
    reach(&ns, "tries", "granted", &json!({"http": [api("/v1/x")]})).await;
    let status = synced(&reaches(&ns), "granted").await.data["status"].clone();
    assert_eq!(status["http"], json!([302]));
    assert!(granted.connections() > 0 && elsewhere.connections() == 0);
    for sent in granted.requests() {
        let sent = sent.to_ascii_lowercase();
        let lines = |name: &str| sent.lines().filter(|line| line.starts_with(name)).collect::<Vec<_>>();
        assert_eq!(lines("host:"), [format!("host: 127.0.0.1:{port}")]);
        assert_eq!(lines("authorization:"), ["authorization: bearer the token of the host"]);
    }

    // What only the database can tell is undone by it.
    let writes = ["SELECT add()", "WITH added AS (INSERT INTO t VALUES (2) RETURNING a) SELECT a FROM added"];
    let writes = writes.map(|text| json!({"grant": "reads", "text": text}));
    let reads = json!({"grant": "reads", "text": "SELECT a FROM t"});
    reach(&ns, "tries", "writes", &json!({"sql": [writes[0], writes[1], reads]})).await;
    let status = synced(&reaches(&ns), "writes").await.data["status"].clone();
    for place in [0, 1] {
        let error = status["sql"][place]["error"].as_str().unwrap_or_default();
        assert!(error.contains("Denied(") && error.contains("the grant has access: Read"), "{status}");
    }
    assert_eq!(status["sql"][2], 1);
    assert_eq!(database.sql("SELECT a FROM t").expect("it answers"), "1");
    host.terminate();
}

/// As `tests/guests/reach/src/memory.rs` reads it.
fn disguised(text: &str) -> String {
    text.bytes().map(|byte| format!("{:02x}", byte ^ 0x5a)).collect()
}

/// The memory that the host may write, in MiB; that of a guest stays when its call is over, for the next one in its place.
fn writable(host: &Host) -> usize {
    let maps = host.proc("maps");
    let sizes = maps.lines().filter(|line| line.contains(" rw-p ")).filter_map(|line| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        Some(usize::from_str_radix(to, 16).ok()? - usize::from_str_radix(from, 16).ok()?)
    });
    sizes.sum::<usize>() >> 20
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_of_a_plugin_holds_no_credential_and_nothing_of_the_one_that_had_it_before() {
    /// More than the places of memory that the engine would rather leave alone when another plugin comes.
    const FIRST: usize = 40;
    /// How many of them look at their memory, which takes its time.
    const LOOKING: usize = 4;
    const SECOND: usize = 24;
    const MARKER: &str = "left behind by the first plugin";
    let cluster = Cluster::start();
    cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
    let database = Postgres::start(postgres::Options::default()).expect("PostgreSQL starts");
    database.sql("CREATE ROLE app LOGIN PASSWORD 'correct-horse-battery'").expect("it is set up");
    // All at once: who asks at the gate waits there until as many have come.
    let (came, gate) = watch::channel([0, 0]);
    let server = Witness::start(move |request| {
        let (came, mut gate) = (came.clone(), gate.clone());
        async move {
            for (of, (path, all)) in [("/first", FIRST), ("/second", SECOND)].into_iter().enumerate() {
                if request.contains(path) {
                    came.send_modify(|came| came[of] += 1);
                    drop(gate.wait_for(|came| came[of] >= all).await);
                }
            }
            let echo = if request.contains("/echo") { request.as_str() } else { "" };
            answer("200 OK", "", echo)
        }
    })
    .await;

    put_secret(&cluster, "database", &json!({"uri": database.uri("app", "correct-horse-battery")}));
    put_secret(&cluster, "bearer", &json!({"token": "bearer-of-good-news"}));
    put_secret(&cluster, "basic", &json!({"username": "somebody", "password": "basically-unknown"}));
    put_secret(&cluster, "header", &json!({"value": "header-and-shoulders"}));
    put_secret(
        &cluster,
        "signed",
        &json!({"accessKeyId": "tester", "secretAccessKey": "signed-and-sealed", "sessionToken": "session-of-spring"}),
    );
    let grant = |name: &str, auth: Value| json!({"name": name, "url": server.url(), "allowNetworks": ["127.0.0.0/8"], "auth": auth});
    let header = json!({"header": {"name": "X-Api-Key", "secretRef": of_secret("header")}});
    let signed = json!({"awsSigV4": {"region": "r", "service": "s3", "secretRef": of_secret("signed")}});
    let sql = json!([{"name": "db", "engine": "postgres", "timeout": "60s", "secretRef": of_secret("database")}]);
    let http = json!([
        grant("bearer", json!({"bearer": {"secretRef": of_secret("bearer")}})),
        grant("basic", json!({"basic": {"secretRef": of_secret("basic")}})),
        grant("header", header),
        grant("signed", signed),
    ]);
    let limits = json!({"timeout": "60s", "concurrency": FIRST});
    let plugin = fs::read(component("reach")).expect("it was built");
    install(&cluster, "first", &plugin, json!({"http": http, "sql": sql}), &limits);
    // Another plugin, of another digest: an empty section of another name at its end.
    let other = [&plugin[..], &[0, 2, 1, b'x']].concat();
    let http = json!([{"name": "plain", "url": server.url(), "allowNetworks": ["127.0.0.0/8"]}]);
    install(&cluster, "second", &other, json!({"http": http, "sql": sql}), &limits);
    let host = cluster.run_host_with(&["--log=trace", "--max-concurrent-reconciles=96"], 2);
    let ns = cluster.namespace("memory").await;

    let encoded = BASE64_STANDARD.encode("somebody:basically-unknown");
    let credentials = [
        "correct-horse-battery",
        "bearer-of-good-news",
        "basically-unknown",
        &encoded,
        "header-and-shoulders",
        "signed-and-sealed",
        "session-of-spring",
    ];
    let needles =
        |more: &str| credentials.iter().chain(&[MARKER, more]).map(|text| disguised(text)).collect::<Vec<_>>();
    let ask = |grant: &str, target: &str| json!({"grant": grant, "target": target});
    let statement = json!([{"grant": "db", "text": "SELECT 1"}]);
    // How often each is found; the last is what is there for certain.
    let found = async |name: &str| {
        let status = synced(&reaches(&ns), name).await.data["status"].clone();
        let answers = status["http"].as_array().into_iter().chain(status["sql"].as_array()).flatten();
        assert!(
            answers.clone().all(Value::is_number) && answers.count() > 0,
            "{name} has used what it is granted: {status}"
        );
        let found: Vec<u64> = serde_json::from_value(status["memory"].clone()).expect("it has looked");
        found
    };

    let http = [ask("bearer", "/first"), ask("basic", "/"), ask("header", "/"), ask("signed", "/")];
    for number in 0..FIRST {
        let name = format!("first-{number}");
        let scan = if number < LOOKING { needles(&name) } else { Vec::new() };
        let spec = json!({"leave": disguised(MARKER), "http": http, "sql": statement, "scan": scan});
        reach(&ns, "first", &name, &spec).await;
    }
    for number in LOOKING..FIRST {
        assert!(found(&format!("first-{number}")).await.is_empty());
    }
    for number in 0..LOOKING {
        let found = found(&format!("first-{number}")).await;
        assert_eq!(found[..credentials.len()], [0; 7], "a credential is in the memory of the plugin that uses it");
        // What is there is found: five megabytes of it.
        assert!(found[7] > 100_000 && found[8] > 0, "{found:?}");
    }

    // The second has the memory of the first, and does not see it.
    let before = writable(&host);
    for number in 0..SECOND {
        let name = format!("second-{number}");
        let spec = json!({"http": [ask("plain", "/second")], "sql": statement, "scan": needles(&name)});
        reach(&ns, "second", &name, &spec).await;
    }
    for number in 0..SECOND {
        let found = found(&format!("second-{number}")).await;
        assert_eq!(found[..8], [0; 8], "something of another plugin is in the memory of this one");
        assert!(found[8] > 0, "its own name is there: {found:?}");
    }
    // Each has looked through six megabytes, four of which a place keeps. Were all places new ones, it would show: some may be, since
    // others are at work while the first ones end.
    let more = writable(&host).saturating_sub(before);
    assert!(more < SECOND * 5, "the host has {more} MiB more, after {before}: the memory was not that of the first");

    // A server that sends back what it is sent tells the plugin what it should not know, as the documentation says. The search finds that.
    reach(&ns, "first", "echo", &json!({"http": [ask("bearer", "/echo")], "scan": needles("echo")})).await;
    let found = found("echo").await;
    assert!(found[1] > 0, "{found:?}");

    let told = everything_told(&cluster, &host, "reaches").await;
    for credential in credentials {
        assert!(!told.contains(credential), "{credential:?} was told");
    }
    assert!(told.contains("pilothouse_capability_calls_total") && told.contains(&disguised(MARKER)));
    host.terminate();
}
