//! The capability on real servers: what it refuses, what it sends, and what it says when something goes wrong.

mod s3;
mod server;

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex},
    time::Instant,
};

use serde_json::{Value, json};

use self::server::{Answer, Certificate, Server};
use super::*;
use crate::{crd::SecretRef, metrics::Calls, secrets::Secrets};

/// What a plugin has that may reach this.
struct Reach {
    access: Arc<Access>,
    calls: Arc<Calls>,
}

impl Reach {
    /// With these grants of `http`, and a Secret `default/secret`.
    fn new(grants: Value, secret: &[(&str, &str)]) -> Self {
        let calls = Arc::new(Calls::default());
        let access = Arc::new(Access::new(calls.clone(), Arc::new(Secrets::fixed())));
        let reach = Self { access, calls };
        reach.rotate(Some(secret));
        reach.access.grant(serde_json::from_value(json!({ "http": grants })).expect("these are grants"), &[]);
        reach
    }

    fn rotate(&self, secret: Option<&[(&str, &str)]>) {
        self.access.secrets().expect("there are some").put(&the_secret(), secret);
    }

    async fn send(&self, request: Request) -> Result<Response, Error> {
        Outside::new(self.access.clone(), false, 1 << 20).send(request).await
    }

    fn uses(&self) -> BTreeMap<&'static str, u64> {
        self.calls.uses().into_iter().map(|((_, outcome), count)| (outcome, count)).collect()
    }
}

fn the_secret() -> SecretRef {
    SecretRef { namespace: "default".to_owned(), name: "secret".to_owned() }
}

/// A grant for a server of the test, which is on the loopback.
fn grant(url: &str, more: Value) -> Value {
    let mut grant = json!({ "name": "api", "url": url, "allowNetworks": ["127.0.0.0/8"] });
    let all = grant.as_object_mut().expect("it is an object");
    all.extend(more.as_object().expect("so is this").clone());
    grant
}

fn get(target: &str) -> Request {
    Request {
        grant: "api".to_owned(),
        method: "GET".to_owned(),
        target: target.to_owned(),
        headers: Vec::new(),
        body: Vec::new(),
        timeout: None,
    }
}

fn secret_ref() -> Value {
    json!({ "secretRef": { "namespace": "default", "name": "secret" } })
}

/// All that is logged by this thread while it lives.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn begin() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_ansi(false);
        (log, tracing::subscriber::set_default(subscriber.with_writer(move || writer.clone()).finish()))
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("nobody has panicked")).into_owned()
    }

    fn count(&self, part: &str) -> usize {
        self.text().matches(part).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("nobody has panicked").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn what_is_not_granted_is_refused_counted_and_logged_once_and_no_byte_is_sent() {
    let server = Server::start(|_| Answer::say(200, "")).await;
    let port = server.port();
    let header = json!({ "header": { "name": "X-Api-Key", "secretRef": secret_ref()["secretRef"] } });
    let named =
        |name: &str, url: &str, networks: &[&str]| json!({ "name": name, "url": url, "allowNetworks": networks });
    let reach = Reach::new(
        json!([
            grant(&format!("{}/v1", server.url()), json!({ "auth": header, "maxRequest": "8" })),
            named("metadata", "http://169.254.169.254", &[]),
            named("loopback", &format!("http://127.0.0.1:{port}"), &[]),
            named("mapped", &format!("http://[::ffff:127.0.0.1]:{port}"), &[]),
            named("decimal", &format!("http://2130706433:{port}"), &[]),
            named("name", &format!("http://localhost:{port}"), &["10.0.0.0/8"]),
            named("user", &format!("http://a:b@127.0.0.1:{port}"), &["127.0.0.0/8"]),
            named("network", &server.url(), &["loopback"]),
        ]),
        &[("value", "key")],
    );
    let of = |grant: &str| Request { grant: grant.to_owned(), ..get("/") };
    let by = |method: &str| Request { method: method.to_owned(), ..get("/v1") };
    let with = |name: &str, value: &str| Request { headers: vec![(name.to_owned(), value.to_owned())], ..get("/v1") };
    let cases = [
        of("other"),
        of("metadata"),
        of("loopback"),
        of("mapped"),
        of("decimal"),
        of("name"),
        of("user"),
        of("network"),
        get("/v2"),
        get("/v1/../v2"),
        get("/v1/%2e%2e/v2"),
        get("/v1/x%2f..%2f../v2"),
        get(&format!("http://127.0.0.1:{}/v1", port + 1)),
        get("http://169.254.169.254/v1"),
        by("POST"),
        by("get"),
        by("CONNECT"),
        with("Host", "other"),
        with("authorization", "Bearer mine"),
        with("X-Api-Key", "mine"),
        with("Content-Length", "100"),
        with("accept", "x\r\nHost: other"),
        Request { body: vec![b'x'; 9], ..get("/v1") },
    ];
    let (log, _guard) = Log::begin();
    for request in &cases {
        for _ in 0..2 {
            let refused = reach.send(request.clone()).await;
            assert!(matches!(&refused, Err(Error::Denied(_))), "{request:?} {refused:?}");
        }
    }
    assert_eq!(reach.uses(), BTreeMap::from([("denied", 2 * cases.len() as u64)]));
    assert_eq!(log.count("refused to a plugin"), cases.len(), "{}", log.text());
    assert_eq!((server.connections(), server.requests().len()), (0, 0));

    // The same server, as the grant has it.
    reach.send(get("/v1")).await.expect("it is granted");
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn what_is_sent_is_what_was_asked_for_and_what_the_host_adds() {
    let server = Server::start(|_| {
        let head =
            "HTTP/1.1 201 Created\r\nContent-Length: 2\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nX-Mine: 1\r\n\r\n";
        Answer::Say(format!("{head}ok").into_bytes())
    })
    .await;
    let more = json!({ "methods": ["PUT"], "auth": { "basic": secret_ref() } });
    let reach = Reach::new(json!([grant(&server.url(), more)]), &[("username", "tester"), ("password", "first\n")]);
    let request = Request {
        method: "PUT".to_owned(),
        headers: vec![("Accept".to_owned(), "text/plain".to_owned())],
        body: b"hello".to_vec(),
        ..get("/a%20b?c=d")
    };
    let answer = reach.send(request.clone()).await.expect("it is granted");
    assert_eq!(answer.status, 201);
    assert_eq!(answer.body, b"ok");
    let headers = [("content-length", "2"), ("x-mine", "1")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(answer.headers, headers);

    let asked = server.requests().remove(0).to_ascii_lowercase();
    let (head, body) = asked.split_once("\r\n\r\n").expect("it has a head");
    let mut lines: Vec<_> = head.split("\r\n").collect();
    assert_eq!((lines.remove(0), body), ("put /a%20b?c=d http/1.1", "hello"));
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "accept: text/plain",
            // tester:first
            "authorization: basic dgvzdgvyomzpcnn0",
            "content-length: 5",
            &format!("host: 127.0.0.1:{}", server.port()),
            concat!("user-agent: pilothouse/", env!("CARGO_PKG_VERSION")),
        ]
    );
    reach.send(Request { body: Vec::new(), ..request }).await.expect("it is granted");
    assert!(server.requests()[1].to_ascii_lowercase().contains("content-length: 0"), "{:?}", server.requests());
    assert_eq!(reach.uses(), BTreeMap::from([("ok", 2)]));
}

#[tokio::test]
async fn any_status_is_an_answer_and_a_redirect_is_not_followed() {
    let elsewhere = Server::start(|_| Answer::say(200, "")).await;
    let location = format!("{}/x", elsewhere.url());
    let server = Server::start(move |request| {
        let status: u16 = request[5..8].parse().expect("the path is a status");
        Answer::Say(format!("HTTP/1.1 {status} X\r\nLocation: {location}\r\nContent-Length: 1\r\n\r\nx").into_bytes())
    })
    .await;
    let reach = Reach::new(json!([grant(&server.url(), json!({}))]), &[]);
    for status in [301, 302, 307, 308, 401, 403, 404, 429, 500, 503, 599] {
        let answer = reach.send(get(&format!("/{status}"))).await.expect("it is an answer");
        assert_eq!((answer.status, answer.body.as_slice()), (status, b"x".as_slice()));
        assert!(answer.headers.iter().any(|(name, _)| name == "location"), "{:?}", answer.headers);
    }
    assert_eq!(elsewhere.connections(), 0);
    for status in [199, 600, 999] {
        let answer = reach.send(get(&format!("/{status}"))).await;
        assert!(matches!(answer, Err(Error::Connection(_))), "{status} {answer:?}");
    }
}

#[tokio::test]
async fn a_server_that_hangs_is_given_up_in_time_and_the_connection_with_it() {
    let hanging = Server::start(|_| Answer::Hang(Vec::new())).await;
    let halfway = Server::start(|_| Answer::Hang(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx".to_vec())).await;
    for server in [&hanging, &halfway] {
        let reach = Reach::new(json!([grant(&server.url(), json!({ "timeout": "300ms" }))]), &[]);
        for (timeout, expected) in [(None, 300), (Some(60_000), 300), (Some(100), 100)] {
            let begun = Instant::now();
            let answer = reach.send(Request { timeout, ..get("/") }).await;
            let text = format!("within {expected} ms");
            assert!(matches!(&answer, Err(Error::Timeout(why)) if why.contains(&text)), "{answer:?}");
            assert!((100..10_000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
        }
        server.all_closed().await;
        assert_eq!((server.connections(), reach.uses()), (3, BTreeMap::from([("timeout", 3)])));
    }

    // A call that is ended takes its request with it.
    let reach = Reach::new(json!([grant(&hanging.url(), json!({}))]), &[]);
    let call = tokio::spawn(async move { reach.send(get("/")).await });
    hanging.connected(4).await;
    call.abort();
    hanging.all_closed().await;
}

#[tokio::test]
async fn what_goes_wrong_has_a_name() {
    let early = Server::start(|_| Answer::Say(Vec::new())).await;
    let halfway = Server::start(|_| Answer::Say(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx".to_vec())).await;
    let other = Server::start(|_| Answer::Say(b"220 ready for mail\r\n".to_vec())).await;
    let gone = {
        let server = Server::start(|_| Answer::say(200, "")).await;
        server.url()
    };
    for url in [early.url(), halfway.url(), other.url(), gone] {
        let reach = Reach::new(json!([grant(&url, json!({}))]), &[]);
        let answer = reach.send(get("/")).await;
        assert!(matches!(&answer, Err(Error::Connection(why)) if why.starts_with("grant api: ")), "{url} {answer:?}");
        assert_eq!(reach.uses(), BTreeMap::from([("connection", 1)]));
    }
    let reach = Reach::new(json!([grant("https://nobody.invalid", json!({}))]), &[]);
    let answer = reach.send(get("/")).await;
    assert!(matches!(&answer, Err(Error::Dns(why)) if why.contains("nobody.invalid")), "{answer:?}");
    assert_eq!(reach.uses(), BTreeMap::from([("dns", 1)]));
}

#[tokio::test]
async fn an_answer_that_is_too_large_is_not_read_to_its_end() {
    let piece = "x".repeat(1000);
    let chunks =
        format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{}", format!("3e8\r\n{piece}\r\n").repeat(20));
    let announced = b"HTTP/1.1 200 OK\r\nContent-Length: 5001\r\n\r\n".to_vec();
    let head = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    for answer in [chunks.into_bytes(), announced, head.into_bytes()] {
        let server = Server::start(move |_| Answer::Hang(answer.clone())).await;
        let reach = Reach::new(json!([grant(&server.url(), json!({ "maxResponse": "5k" }))]), &[]);
        let answer = reach.send(get("/")).await;
        assert!(matches!(answer, Err(Error::TooLarge(_))), "{answer:?}");
        assert_eq!(reach.uses(), BTreeMap::from([("too-large", 1)]));
    }
    // What is announced by HEAD does not come.
    let head = Server::start(|_| Answer::Say(b"HTTP/1.1 200 OK\r\nContent-Length: 5001\r\n\r\n".to_vec())).await;
    let reach = Reach::new(json!([grant(&head.url(), json!({ "maxResponse": "5k" }))]), &[]);
    let answer = reach.send(Request { method: "HEAD".to_owned(), ..get("/") }).await.expect("it fits");
    assert_eq!((answer.headers[0].1.as_str(), answer.body.len()), ("5001", 0));

    let exact = Server::start(|_| Answer::say(200, &"x".repeat(5000))).await;
    let reach = Reach::new(json!([grant(&exact.url(), json!({ "maxResponse": "5k" }))]), &[]);
    assert_eq!(reach.send(get("/")).await.expect("it fits").body.len(), 5000);
}

#[tokio::test]
async fn a_server_has_to_prove_its_name_by_an_authority_that_the_grant_trusts() {
    let good = Certificate::new("localhost", false);
    let expired = Certificate::new("localhost", true);
    let named = Certificate::new("other.example.com", false);
    let unknown = Certificate::new("localhost", false);
    for (certificate, ca, expected) in [
        (&good, Some(&good), None),
        (&good, None, Some("UnknownIssuer; if its authority is private")),
        (&good, Some(&unknown), Some("UnknownIssuer")),
        (&expired, Some(&expired), Some("expired")),
        (&named, Some(&named), Some("not valid for name")),
    ] {
        let server = Server::start_tls(certificate, |_| Answer::say(200, "ok")).await;
        let url = format!("https://localhost:{}", server.port());
        let more = match ca {
            Some(ca) => json!({ "ca": ca.authority }),
            None => json!({}),
        };
        let reach = Reach::new(json!([grant(&url, more)]), &[]);
        let answer = reach.send(get("/")).await;
        let part = expected.map(|text| text.split(';').next().unwrap_or_default());
        match (&answer, part) {
            (Ok(answer), None) => assert_eq!(answer.body, b"ok"),
            (Err(Error::Connection(why)), Some(part)) if why.contains(part) => {
                assert_eq!(why.contains("if its authority is private"), part == "UnknownIssuer", "{why}");
                assert!(server.requests().is_empty());
            }
            _ => panic!("{expected:?} {answer:?}"),
        }
    }
    let plain = Server::start(|_| Answer::say(400, "")).await;
    let reach = Reach::new(json!([grant(&format!("https://localhost:{}", plain.port()), json!({}))]), &[]);
    let answer = reach.send(get("/")).await;
    assert!(matches!(&answer, Err(Error::Connection(why)) if why.contains("plain HTTP")), "{answer:?}");

    let reach = Reach::new(json!([grant("https://localhost", json!({ "ca": "none" }))]), &[]);
    let answer = reach.send(get("/")).await;
    assert!(matches!(&answer, Err(Error::Denied(why)) if why.contains("ca")), "{answer:?}");
}

#[tokio::test]
async fn credentials_are_added_as_they_are_now_and_nothing_is_sent_without() {
    let server = Server::start(|_| Answer::say(200, "")).await;
    let header = json!({ "header": { "name": "X-Api-Key", "secretRef": secret_ref()["secretRef"] } });
    for (auth, key, expected) in
        [(json!({ "bearer": secret_ref() }), "token", "authorization: bearer "), (header, "value", "x-api-key: ")]
    {
        let reach = Reach::new(json!([grant(&server.url(), json!({ "auth": auth }))]), &[(key, "first")]);
        let sent = || server.requests().last().expect("there was one").to_ascii_lowercase();
        reach.send(get("/")).await.expect("it is granted");
        assert!(sent().contains(&format!("{expected}first\r\n")), "{}", sent());
        reach.rotate(Some(&[(key, "second")]));
        reach.send(get("/")).await.expect("it is granted");
        assert!(sent().contains(&format!("{expected}second\r\n")), "{}", sent());

        let before = server.connections();
        for secret in [&[("another", "x")][..], &[(key, "two\nlines")]] {
            reach.rotate(Some(secret));
            let answer = reach.send(get("/")).await;
            assert!(matches!(&answer, Err(Error::Credentials(why)) if why.contains("default/secret")), "{answer:?}");
        }
        reach.rotate(None);
        let mut outside = Outside::new(reach.access.clone(), false, 1 << 20);
        assert!(matches!(outside.send(get("/")).await, Err(Error::Credentials(_))));
        assert!(outside.lacks().is_some_and(|why| why.contains("default/secret")), "the condition says it");
        assert_eq!(server.connections(), before);
        assert_eq!(reach.uses(), BTreeMap::from([("ok", 2), ("credentials", 3)]));
    }
}

#[tokio::test]
async fn credentials_are_in_no_error_and_no_log() {
    const SECRET: &str = "s3cr3t";
    let (log, _guard) = Log::begin();
    let certificate = Certificate::new("localhost", false);
    let tls = Server::start_tls(&certificate, |_| Answer::say(200, "")).await;
    let early = Server::start(|_| Answer::Say(Vec::new())).await;
    let hanging = Server::start(|_| Answer::Hang(Vec::new())).await;
    let secret = [
        ("token", SECRET),
        ("username", SECRET),
        ("password", SECRET),
        ("value", SECRET),
        ("accessKeyId", SECRET),
        ("secretAccessKey", SECRET),
        ("sessionToken", SECRET),
    ];
    let broken = secret.map(|(key, _)| (key, "s3cr3t\r\n\0s3cr3t"));
    let header = json!({ "header": { "name": "X-Api-Key", "secretRef": secret_ref()["secretRef"] } });
    let mut aws = secret_ref();
    aws["region"] = json!("us-east-1");
    aws["service"] = json!("s3");
    let mut told = String::new();
    for auth in
        [json!({ "bearer": secret_ref() }), json!({ "basic": secret_ref() }), header, json!({ "awsSigV4": aws })]
    {
        let urls = [
            early.url(),
            hanging.url(),
            format!("https://localhost:{}", tls.port()),
            "http://nobody.invalid".to_owned(),
        ];
        for url in urls {
            let reach = Reach::new(json!([grant(&url, json!({ "auth": auth, "timeout": "200ms" }))]), &secret);
            told += &format!("{:?}\n", reach.send(get("/")).await.expect_err("there is no good server"));
            reach.rotate(Some(&broken));
            told += &format!("{:?}\n", reach.send(get("/")).await.expect_err("there is no good server"));
            let content = reach.access.secrets().expect("there are some").get(&the_secret()).await;
            told += &format!("{:?}\n", content.expect("it is there"));
        }
    }
    // The name of a user in base64 as well.
    for text in [told, log.text()] {
        assert!(!text.contains(SECRET) && !text.contains("czNjcjN0"), "{text}");
    }
    assert!(early.requests().iter().any(|request| request.contains(SECRET)), "it was in what was sent");
}

#[tokio::test]
async fn what_is_revoked_is_refused_from_the_next_request_on() {
    let server = Server::start(|_| Answer::say(200, "")).await;
    let reach = Reach::new(json!([grant(&server.url(), json!({}))]), &[]);
    reach.send(get("/")).await.expect("it is granted");
    reach.access.grant(Grants::default(), &[]);
    assert!(matches!(reach.send(get("/")).await, Err(Error::Denied(_))));
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_preview_sends_nothing_and_is_told_apart() {
    let server = Server::start(|_| Answer::say(200, "")).await;
    let reach = Reach::new(json!([grant(&server.url(), json!({}))]), &[]);
    let mut outside = Outside::new(reach.access.clone(), true, 1 << 20);
    assert!(matches!(outside.send(get("/")).await, Err(Error::Denied(_))));
    assert_eq!((outside.touched(), server.connections()), (Some("http"), 0));
}
