//! What a plugin has outside of the cluster, on a real PostgreSQL and a real S3 server: MyApp with a record and a bucket. The host is
//! killed before, during and after each call, servers go down and come back, credentials are wrong and become right. In the end nothing is
//! left, and no MyApp is ever gone before its record and its bucket are.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kube::api::{DynamicObject, PropagationPolicy};
use postgres::Postgres;
use s3::Server;
use serde_json::{Value, json};

use crate::{
    audit,
    cluster::{
        Cluster, Host, Namespace, component, condition, delete, edit, eventually, get, gone, our_finalizers,
        pilothouse, until,
    },
    tripwire::{Place, Tripwire, When},
};

/// What may never be seen outside of the Secrets.
const PASSWORD: &str = "correct-horse-battery";

/// The servers, and a cluster whose MyApps may use them.
struct Stage {
    cluster: Cluster,
    database: Postgres,
    buckets: Server,
    to_database: Tripwire,
    to_buckets: Tripwire,
}

impl Stage {
    async fn set() -> Self {
        Self::set_with(postgres::Options::default()).await
    }

    /// The same with a database as it is told.
    async fn set_with(options: postgres::Options) -> Self {
        let cluster = Cluster::start();
        cluster.kubectl(&["delete", "crec", "mirror", "myapp"]);
        let database = Postgres::start(options).expect("PostgreSQL starts");
        database
            .sql(&format!(
                "CREATE TABLE myapps (id text PRIMARY KEY, owner text NOT NULL);
                 CREATE ROLE app LOGIN PASSWORD '{PASSWORD}';
                 GRANT SELECT, INSERT, DELETE ON myapps TO app"
            ))
            .expect("it is set up");
        let buckets = Server::start(s3::Options::default()).expect("the S3 server starts");
        let port = buckets.url().rsplit(':').next().and_then(|port| port.parse().ok()).expect("it has a port");
        let (to_database, to_buckets) = (Tripwire::before(database.port()).await, Tripwire::before(port).await);
        let stage = Self { cluster, database, buckets, to_database, to_buckets };
        stage.let_in(PASSWORD, s3::SECRET_ACCESS_KEY);
        let grants = stage.cluster.control_plane.data_dir().join("grants.yaml");
        std::fs::write(&grants, stage.grants(&stage.buckets_url()).to_string()).expect("it can be written");
        stage.cluster.apply(&pilothouse(&[
            "manifests",
            &component("myapp").to_string_lossy(),
            "--grants",
            &grants.to_string_lossy(),
        ]));
        stage
    }

    fn grants(&self, buckets: &str) -> Value {
        let secret = |name: &str| json!({"namespace": "pilothouse-system", "name": name});
        json!({
            "sql": [{
                "name": "records", "engine": "postgres", "access": "Write", "timeout": "2s", "secretRef": secret("myapp-database"),
            }],
            "http": [{
                "name": "buckets", "url": buckets, "methods": ["GET", "HEAD", "PUT", "POST", "DELETE"], "timeout": "2s",
                "allowNetworks": ["127.0.0.0/8"],
                "auth": {"awsSigV4": {"region": s3::REGION, "service": "s3", "secretRef": secret("myapp-buckets")}},
            }],
        })
    }

    /// Has the buckets be at this URL.
    fn move_buckets(&self, url: &str) {
        let patch = json!({"spec": {"grants": self.grants(url)}}).to_string();
        self.cluster.kubectl(&["patch", "crec", "myapp", "--type=merge", "-p", &patch]);
    }

    /// Where the buckets are.
    fn buckets_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.to_buckets.port)
    }

    /// The Secrets, with these passwords.
    fn let_in(&self, database: &str, buckets: &str) {
        self.let_in_at("127.0.0.1", database, buckets);
    }

    /// The same, with a database on this host.
    fn let_in_at(&self, host: &str, database: &str, buckets: &str) {
        let (port, authority) = (self.to_database.port, self.database.authority());
        let mode = if authority.is_some() { "verify-full" } else { "disable" };
        let uri = format!("postgres://app:{database}@{host}:{port}/postgres?sslmode={mode}");
        let mut login = json!({"uri": uri});
        authority.into_iter().for_each(|authority| login["ca.crt"] = authority.into());
        let secrets = [
            ("myapp-database", login),
            ("myapp-buckets", json!({"accessKeyId": s3::ACCESS_KEY_ID, "secretAccessKey": buckets})),
        ];
        for (name, data) in secrets {
            let secret = json!({"apiVersion": "v1", "kind": "Secret",
                "metadata": {"name": name, "namespace": "pilothouse-system"}, "stringData": data});
            self.cluster.apply(secret.to_string().as_bytes());
        }
    }

    fn records(&self) -> Vec<String> {
        let records = self.database.sql("SELECT id FROM myapps ORDER BY id").expect("it answers");
        records.lines().map(ToOwned::to_owned).collect()
    }

    fn all_buckets(&self) -> Vec<String> {
        self.buckets.buckets().expect("they can be listed")
    }

    /// A MyApp with a record and a bucket of its name, once both are there.
    async fn app(&self, ns: &Namespace<'_>, name: &str) -> DynamicObject {
        ask_for(ns, name).await;
        let app = until(&ns.my_apps(), name, "record and bucket", |app| {
            ["RecordReady", "BucketReady"].iter().all(|kind| holds(app, kind))
        })
        .await;
        assert!(self.records().contains(&name.to_owned()) && self.all_buckets().contains(&name.to_owned()));
        app
    }

    /// Waits until it is gone; both others have to be before it.
    async fn ends(&self, ns: &Namespace<'_>, name: &str) {
        gone(&ns.my_apps(), name).await;
        let (records, buckets) = (self.records(), self.all_buckets());
        assert!(!records.contains(&name.to_owned()), "{name} is gone, and its record is not: {records:?}");
        assert!(!buckets.contains(&name.to_owned()), "{name} is gone, and its bucket is not: {buckets:?}");
    }
}

async fn ask_for(ns: &Namespace<'_>, name: &str) {
    ns.my_app(name, json!({"image": "nginx:1", "replicas": 0, "databaseID": name, "bucketName": name})).await;
}

fn holds(app: &DynamicObject, kind: &str) -> bool {
    condition(app, kind).is_some_and(|condition| condition["status"] == "True")
}

/// What the condition of that kind says, once it says so.
async fn says(ns: &Namespace<'_>, name: &str, kind: &str, part: &str) -> Value {
    eventually(&format!("{kind} of {name} says {part:?}"), async || {
        let app = get(&ns.my_apps(), name).await?;
        condition(&app, kind).filter(|condition| condition.to_string().contains(part))
    })
    .await
}

const INSERT: Place = Place { request: "INSERT INTO myapps", answer: "INSERT 0 1" };
const MAKE: Place = Place { request: "PUT /", answer: "HTTP/1.1 200" };
const DELETE: Place = Place { request: "DELETE FROM myapps", answer: "DELETE 1" };
const EMPTY: Place = Place { request: "POST /", answer: "HTTP/1.1 200" };
const REMOVE: Place = Place { request: "DELETE /", answer: "HTTP/1.1 204" };

#[tokio::test(flavor = "multi_thread")]
async fn the_host_may_be_killed_before_during_and_after_each_call() {
    let stage = Stage::set().await;
    let stage = &stage;
    let ns = stage.cluster.namespace("matrix").await;
    let host = Arc::new(Mutex::new(Some(stage.cluster.run_host_with(&[], 1))));
    let kill = |host: &Arc<Mutex<Option<Host>>>| {
        let host = host.clone();
        move || host.lock().unwrap_or_else(PoisonError::into_inner).take().expect("it runs").kill()
    };
    let mut number = 0;
    for (place, wire, in_cleanup) in [
        (INSERT, &stage.to_database, false),
        (MAKE, &stage.to_buckets, false),
        (DELETE, &stage.to_database, true),
        (EMPTY, &stage.to_buckets, true),
        (REMOVE, &stage.to_buckets, true),
    ] {
        for when in [When::Before, When::During, When::After] {
            number += 1;
            let name = format!("app-{number}");
            if in_cleanup {
                stage.app(&ns, &name).await;
                stage.buckets.put_object(&name, "object", "content").expect("it can be put");
                wire.set(place, when, kill(&host));
                delete(&ns.my_apps(), &name, PropagationPolicy::Background).await;
            } else {
                wire.set(place, when, kill(&host));
                ask_for(&ns, &name).await;
            }
            eventually(&format!("the host is killed at {place:?}, {when:?}"), async || (!wire.is_set()).then_some(()))
                .await;
            assert!(get(&ns.my_apps(), &name).await.is_some(), "it is gone in the midst of {place:?}, {when:?}");
            *host.lock().unwrap_or_else(PoisonError::into_inner) = Some(stage.cluster.run_host_with(&[], 1));
            if !in_cleanup {
                until(&ns.my_apps(), &name, "record and bucket", |app| {
                    ["RecordReady", "BucketReady"].iter().all(|kind| holds(app, kind))
                })
                .await;
                delete(&ns.my_apps(), &name, PropagationPolicy::Background).await;
            }
            stage.ends(&ns, &name).await;
        }
    }
    assert_eq!((stage.records(), stage.all_buckets()), (Vec::new(), Vec::new()));
    drop(host);
}

#[tokio::test(flavor = "multi_thread")]
async fn c06_what_is_gone_already_is_success_and_c72_what_does_not_answer_is_waited_for() {
    let mut stage = Stage::set().await;
    let ns = stage.cluster.namespace("gone").await;
    let host = stage.cluster.run_host_with(&[], 1);

    // Somebody was there first.
    stage.app(&ns, "by-hand").await;
    stage.database.sql("DELETE FROM myapps").expect("it is deleted");
    stage.buckets.remove_bucket("by-hand").expect("it is deleted");
    delete(&ns.my_apps(), "by-hand", PropagationPolicy::Background).await;
    stage.ends(&ns, "by-hand").await;

    // The database is down when the end comes, and then S3.
    stage.app(&ns, "down").await;
    stage.database.stop();
    delete(&ns.my_apps(), "down", PropagationPolicy::Background).await;
    let synced = says(&ns, "down", "Synced", "grant records").await;
    assert_eq!(synced["status"], "False");
    let since = synced["lastTransitionTime"].clone();
    stage.buckets.stop();
    stage.database.start_again().expect("it comes back");
    // The record is gone, and that is said, while the bucket is waited for.
    says(&ns, "down", "RecordDeleted", "True").await;
    let synced = says(&ns, "down", "Synced", "grant buckets").await;
    assert!(synced["lastTransitionTime"].is_string() && since.is_string());
    assert_eq!(our_finalizers(&get(&ns.my_apps(), "down").await.expect("it waits")).len(), 1);
    assert_eq!(stage.records(), Vec::<String>::new());
    stage.buckets.start_again().expect("it comes back");
    stage.ends(&ns, "down").await;

    // A server that takes connections and is silent.
    stage.app(&ns, "hangs").await;
    stage.database.pause().expect("it is paused");
    delete(&ns.my_apps(), "hangs", PropagationPolicy::Background).await;
    let synced = says(&ns, "hangs", "Synced", "grant records").await;
    assert!(
        synced["message"].to_string().contains("timeout") || synced["message"].to_string().contains("2s"),
        "{synced}"
    );
    stage.database.go_on().expect("it goes on");
    stage.ends(&ns, "hangs").await;
    host.terminate();
}

impl Stage {
    /// While something fails: a MyApp that is to end waits for it, and one that is new; both say for what, the first since when, and it is
    /// tried ever more rarely.
    async fn waits(&self, ns: &Namespace<'_>, host: &Host, name: &str, kind: &str, why: &str) {
        let (ends, comes) = (format!("{name}-ends"), format!("{name}-comes"));
        ask_for(ns, &comes).await;
        delete(&ns.my_apps(), &ends, PropagationPolicy::Background).await;
        let ready = says(ns, &comes, kind, why).await;
        assert_eq!((&ready["status"], &ready["reason"]), (&json!("False"), &json!("NotMade")), "{ready}");
        let first = says(ns, &ends, "Synced", why).await;
        assert_eq!(first["status"], "False");
        let tries = || {
            let (log, parent) = (host.log_text(), format!("\"parent\":\"{}/{ends}\"", ns.name));
            log.lines().filter(|line| line.contains("reconcile failed") && line.contains(&parent)).count()
        };
        let before = tries();
        eventually("it is tried again", async || (tries() >= before + 2).then_some(())).await;
        // Half a second, one, two, four, and a little more each.
        let begun = tries();
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(tries() - begun <= 2, "{} tries in four seconds", tries() - begun);
        let still = says(ns, &ends, "Synced", why).await;
        assert_eq!(still["lastTransitionTime"], first["lastTransitionTime"], "since when it fails");
        assert_eq!(our_finalizers(&get(&ns.my_apps(), &ends).await.expect("it waits")).len(), 1);
    }

    /// When it fails no more, both get there by themselves.
    async fn heals(&self, ns: &Namespace<'_>, name: &str, kind: &str) {
        let (ends, comes) = (format!("{name}-ends"), format!("{name}-comes"));
        self.ends(ns, &ends).await;
        until(&ns.my_apps(), &comes, "it is made", |app| holds(app, kind)).await;
        delete(&ns.my_apps(), &comes, PropagationPolicy::Background).await;
        self.ends(ns, &comes).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_outside_is_said_with_since_when_tried_ever_more_rarely_and_heals_by_itself() {
    let mut stage = Stage::set_with(postgres::Options { tls: true }).await;
    let ns = stage.cluster.namespace("outages").await;
    let host = stage.cluster.run_host_with(&[], 1);
    let (record, bucket) = ("RecordReady", "BucketReady");

    for (name, answer, why) in [
        ("throttled", "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", "by grant buckets: 429"),
        (
            "slowed",
            "HTTP/1.1 503 Slow Down\r\nContent-Length: 36\r\n\r\n<Error><Code>SlowDown</Code></Error>",
            "by grant buckets: 503 SlowDown",
        ),
        ("silent", "", "grant buckets: there was no answer within 2000 ms"),
    ] {
        stage.app(&ns, &format!("{name}-ends")).await;
        stage.to_buckets.answer(Some(answer));
        stage.waits(&ns, &host, name, bucket, why).await;
        stage.to_buckets.answer(None);
        stage.heals(&ns, name, bucket).await;
    }

    stage.app(&ns, "nameless-ends").await;
    stage.move_buckets("http://buckets.invalid");
    stage.waits(&ns, &host, "nameless", bucket, "buckets.invalid").await;
    stage.move_buckets(&stage.buckets_url());
    stage.heals(&ns, "nameless", bucket).await;

    stage.app(&ns, "unnamed-ends").await;
    stage.let_in_at("database.invalid", PASSWORD, s3::SECRET_ACCESS_KEY);
    let why = "grant records has no connection: the name of the database is not known";
    stage.waits(&ns, &host, "unnamed", record, why).await;
    stage.let_in(PASSWORD, s3::SECRET_ACCESS_KEY);
    stage.heals(&ns, "unnamed", record).await;

    stage.app(&ns, "expired-ends").await;
    for is_expired in [true, false] {
        stage.database.certify(is_expired).expect("it can be certified");
        stage.database.stop();
        stage.database.start_again().expect("it comes back");
        if is_expired {
            let why = "no TLS with the database that could be verified: its certificate has expired";
            stage.waits(&ns, &host, "expired", record, why).await;
        }
    }
    stage.heals(&ns, "expired", record).await;
    assert_eq!((stage.records(), stage.all_buckets()), (Vec::new(), Vec::new()));
    assert!(!host.log_text().contains("panicked"));
    host.terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn c07_what_was_never_made_is_no_reason_to_stay_and_c14_an_old_one_leaves_what_a_new_one_has() {
    let stage = Stage::set().await;
    let ns = stage.cluster.namespace("never").await;
    stage.let_in("not-the-password", "not-the-secret-either");
    let host = stage.cluster.run_host_with(&[], 1);
    // The first thing that cleanup asks of S3, and nothing else does.
    stage.to_buckets.set(Place { request: "GET /", answer: "" }, When::Before, || ());
    let unmade = |bucket: &str| json!({"image": "nginx:1", "replicas": 0, "bucketName": bucket});

    // Both have refused from the beginning, and so they are not asked to delete what they have never made.
    ask_for(&ns, "never").await;
    says(&ns, "never", "RecordReady", "refuses the connection").await;
    says(&ns, "never", "BucketReady", "403").await;
    ns.my_app("no-bucket", unmade("no-bucket")).await;
    says(&ns, "no-bucket", "BucketReady", "403").await;
    for name in ["never", "no-bucket"] {
        assert!(get(&ns.deployments(), name).await.is_some(), "what is in the cluster is there");
        delete(&ns.my_apps(), name, PropagationPolicy::Background).await;
        gone(&ns.my_apps(), name).await;
    }
    assert!(stage.to_buckets.is_set(), "nothing was asked of S3");

    // One that has something stays for it, and one beside it that has nothing still does not.
    stage.let_in(PASSWORD, s3::SECRET_ACCESS_KEY);
    stage.app(&ns, "made").await;
    stage.let_in("not-the-password", "not-the-secret-either");
    delete(&ns.my_apps(), "made", PropagationPolicy::Background).await;
    says(&ns, "made", "Synced", "grant records").await;
    ns.my_app("no-bucket", unmade("no-bucket")).await;
    says(&ns, "no-bucket", "BucketReady", "403").await;
    delete(&ns.my_apps(), "no-bucket", PropagationPolicy::Background).await;
    gone(&ns.my_apps(), "no-bucket").await;
    assert_eq!(our_finalizers(&get(&ns.my_apps(), "made").await.expect("it waits")).len(), 1);
    stage.let_in(PASSWORD, s3::SECRET_ACCESS_KEY);
    stage.ends(&ns, "made").await;
    assert!(!stage.to_buckets.is_set(), "now it was");

    // The cleanup of the old one waits for its bucket. Somebody loses patience, and makes it anew by the same names at once.
    let old = stage.app(&ns, "again").await;
    stage.to_buckets.answer(Some(""));
    delete(&ns.my_apps(), "again", PropagationPolicy::Background).await;
    says(&ns, "again", "RecordDeleted", "True").await;
    says(&ns, "again", "Synced", "grant buckets").await;
    edit(&ns.my_apps(), "again", json!({"metadata": {"finalizers": null}})).await;
    stage.to_buckets.answer(None);
    let new = stage.app(&ns, "again").await;
    assert_ne!(old.metadata.uid, new.metadata.uid);
    // Longer than until the next try of the old one.
    ns.assert_quiet(Duration::from_secs(5)).await;
    assert_eq!((stage.records(), stage.all_buckets()), (vec!["again".to_owned()], vec!["again".to_owned()]));
    assert_eq!(our_finalizers(&get(&ns.my_apps(), "again").await.expect("it stays")).len(), 1);
    delete(&ns.my_apps(), "again", PropagationPolicy::Background).await;
    stage.ends(&ns, "again").await;
    host.terminate();
}

/// Everything that was logged, counted, or written to the API server but to Secrets, while this host ran.
pub(crate) async fn everything_told(cluster: &Cluster, host: &Host, parents: &str) -> String {
    let kinds = format!("events,{parents},clusterreconcilers,configmaps,controllerrevisions");
    let told = audit::requests(cluster.control_plane.audit_log());
    let told = told.iter().filter(|request| request.resource != "secrets").map(|request| request.body.to_string());
    let stored = cluster.kubectl(&["get", &kinds, "--all-namespaces", "--output=json"]);
    host.log_text() + &host.metrics().await + &stored + &told.collect::<String>()
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_never_seen_and_what_is_wrong_with_them_heals_without_a_restart() {
    let stage = Stage::set().await;
    let ns = stage.cluster.namespace("credentials").await;
    let host = stage.cluster.run_host_with(&["--log=trace"], 1);
    let second = "another-horse-altogether";

    // Wrong, and right again.
    stage.app(&ns, "wrong").await;
    stage.let_in("not-the-password", "not-the-secret-either");
    ask_for(&ns, "waits").await;
    says(&ns, "waits", "RecordReady", "False").await;
    says(&ns, "waits", "BucketReady", "403").await;
    delete(&ns.my_apps(), "wrong", PropagationPolicy::Background).await;
    says(&ns, "wrong", "Synced", "grant records").await;
    stage.database.sql(&format!("ALTER ROLE app PASSWORD '{second}'")).expect("it is altered");
    stage.let_in(second, s3::SECRET_ACCESS_KEY);
    stage.ends(&ns, "wrong").await;
    says(&ns, "waits", "BucketReady", "True").await;

    // Missing, for one that has something: it waits, says what for, and is tried no more often than its backoff allows.
    stage.cluster.kubectl(&["delete", "secret", "myapp-database", "myapp-buckets", "--namespace=pilothouse-system"]);
    delete(&ns.my_apps(), "waits", PropagationPolicy::Background).await;
    let synced = says(&ns, "waits", "Synced", "CredentialsMissing").await;
    assert!(synced["message"].to_string().contains("Secret pilothouse-system/myapp-database"), "{synced}");
    let tries = || host.log_text().matches("CredentialsMissing").count();
    let before = tries();
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(tries() - before <= 8, "{} lines", tries() - before);
    stage.let_in(second, s3::SECRET_ACCESS_KEY);
    stage.ends(&ns, "waits").await;

    // Given up by a person, who is named.
    stage.app(&ns, "abandoned").await;
    stage.cluster.kubectl(&["delete", "secret", "myapp-database", "--namespace=pilothouse-system"]);
    delete(&ns.my_apps(), "abandoned", PropagationPolicy::Background).await;
    says(&ns, "abandoned", "Synced", "CredentialsMissing").await;
    edit(&ns.my_apps(), "abandoned", json!({"metadata": {"annotations": {"pilothouse.dev/abandon-cleanup": "true"}}}))
        .await;
    gone(&ns.my_apps(), "abandoned").await;
    assert_eq!((stage.records(), stage.all_buckets()), (vec!["abandoned".to_owned()], vec!["abandoned".to_owned()]));
    let told = audit::requests(stage.cluster.control_plane.audit_log());
    assert!(told.iter().any(|it| it.resource == "events" && it.body["reason"] == "CleanupAbandoned"));

    let seen = everything_told(&stage.cluster, &host, "myapps").await;
    for secret in [PASSWORD, second, "not-the-password", s3::SECRET_ACCESS_KEY, "not-the-secret-either"] {
        assert!(!seen.contains(secret), "{secret:?} was seen");
    }
    assert!(seen.contains("myapp-database") && seen.contains("pilothouse_capability_calls_total"));
    host.terminate();
}
