//! The proxy itself: takes what the host sends, hands it on, and fails once where it is told to.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Bytes, Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use kube::{
    Client, Config,
    client::Body,
    config::{AuthInfo, KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    Asked, Fault, Point,
    watched::{GONE, Lines, Shown},
};

/// What a proxy does besides handing on.
pub struct Options {
    /// The host is shown only reconcilers that have this value of the label `run`, so that several hosts can work on one cluster.
    pub run: Option<String>,
    /// Where to fail, and how.
    pub fault: Option<(Point, Fault)>,
    /// So many of all requests but watches fail at random, beside that: 0 to 1.
    pub failing: f64,
    /// Kills the host.
    pub crash: Box<dyn Fn() + Send + Sync>,
    /// Names that differ from run to run, and what stands for them in points.
    pub aliases: Vec<(String, String)>,
}

/// Why there is no proxy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig is not what it should be.
    #[error("cannot read the kubeconfig of the API server")]
    Kubeconfig(#[from] kube::config::KubeconfigError),
    /// There is no client for the API server.
    #[error("cannot make a client for the API server")]
    Client(#[from] kube::Error),
    /// There is no port.
    #[error("cannot listen")]
    Listen(#[from] std::io::Error),
}

/// A proxy that runs until it is dropped.
pub struct Proxy {
    /// Where the host finds it.
    pub address: SocketAddr,
    state: Arc<State>,
    stop: CancellationToken,
}

struct State {
    upstream: Client,
    options: Options,
    traffic: Mutex<Traffic>,
}

#[derive(Default)]
struct Traffic {
    /// How often each was asked, or shown.
    seen: HashMap<Point, usize>,
    /// All points, in the order in which they were reached.
    points: Vec<Point>,
    fired: bool,
    /// How many requests came, and how many of them failed at random.
    asked: usize,
    failed: usize,
    /// Per path that is watched, the resource versions that were shown, those of lists included: a kind may be watched in one namespace and
    /// in all of them.
    versions: HashMap<String, Vec<String>>,
    /// Paths whose next watch is told that its resource version is too old: in its stream, or by the status of the answer.
    expired: HashMap<String, Expiry>,
    /// Paths whose lists are of an older state, and whose watches show nothing, until then.
    stale: HashMap<String, (String, Instant)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expiry {
    InStream,
    ByStatus,
}

/// What happens to requests that fail at random.
const RANDOM: [Fault; 6] =
    [Fault::Refuse(409), Fault::Refuse(429), Fault::Refuse(500), Fault::Refuse(503), Fault::CutBefore, Fault::CutAfter];

type Answer = Response<UnsyncBoxBody<Bytes, kube::Error>>;

/// The connection is closed without an answer.
#[derive(Debug, thiserror::Error)]
#[error("cut")]
struct Cut;

impl Proxy {
    /// Starts a proxy in front of the API server of `kubeconfig`, on a free port. Who asks has to say who it is.
    ///
    /// # Errors
    /// If the kubeconfig is not good, or there is no port.
    pub async fn start(kubeconfig: &Path, options: Options) -> Result<Self, Error> {
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        config.auth_info = AuthInfo::default();
        config.read_timeout = None;
        let upstream = Client::try_from(config)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let state = Arc::new(State { upstream, options, traffic: Mutex::default() });
        let stop = CancellationToken::new();
        tokio::spawn(stop.clone().run_until_cancelled_owned(accept(listener, state.clone(), stop.clone())));
        Ok(Self { address, state, stop })
    }

    /// All points that were reached so far, in order.
    pub fn points(&self) -> Vec<Point> {
        self.state.traffic().points.clone()
    }

    /// How many requests came, watches aside, and how many of them failed at random.
    pub fn counts(&self) -> (usize, usize) {
        let traffic = self.state.traffic();
        (traffic.asked, traffic.failed)
    }

    /// Whether the fault has happened.
    pub fn has_fired(&self) -> bool {
        self.state.traffic().fired
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn accept(listener: TcpListener, state: Arc<State>, stop: CancellationToken) {
    loop {
        let Ok((connection, _)) = listener.accept().await else { continue };
        let state = state.clone();
        let serve = async move {
            let service = service_fn(move |request| {
                let state = state.clone();
                async move { state.handle(request).await }
            });
            // A connection that ends is no concern of ours.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(connection), service).await;
        };
        tokio::spawn(stop.clone().run_until_cancelled_owned(serve));
    }
}

impl State {
    fn traffic(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alias(&self, text: &str) -> String {
        self.options.aliases.iter().fold(text.to_owned(), |text, (name, alias)| text.replace(name, alias))
    }

    /// Counts a point; the fault that is to happen there.
    fn reach(&self, point: impl Fn(usize) -> Point) -> Option<Fault> {
        let mut traffic = self.traffic();
        let nth = traffic.seen.entry(point(0)).or_default();
        *nth += 1;
        let point = point(*nth);
        traffic.points.push(point.clone());
        let fault =
            self.options.fault.as_ref().filter(|(at, _)| !traffic.fired && *at == point).map(|(_, fault)| *fault);
        traffic.fired |= fault.is_some();
        fault
    }

    /// What happens to one of many requests.
    fn at_random(&self) -> Option<Fault> {
        let mut traffic = self.traffic();
        traffic.asked += 1;
        let fails = fastrand::f64() < self.options.failing;
        traffic.failed += usize::from(fails);
        fails.then(|| RANDOM[fastrand::usize(..RANDOM.len())])
    }

    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Result<Answer, Cut> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
        let mut request = Request::from_parts(parts, Body::from(body.to_vec()));
        let asked = Asked::of(&request);
        // These belong to a connection, and this is another one.
        for name in [header::HOST, header::CONNECTION, HeaderName::from_static("keep-alive")] {
            request.headers_mut().remove(name);
        }
        if let (Some(run), "list" | "watch", "clusterreconcilers" | "reconcilers") =
            (&self.options.run, asked.verb.as_str(), asked.resource.as_str())
        {
            select(request.uri_mut(), &format!("run%3D{run}"));
        }
        let path = request.uri().path().to_owned();
        if asked.verb == "watch" {
            return self.watch(request, asked.resource, path).await;
        }
        let point = |nth| {
            let asked =
                Asked { name: self.alias(&asked.name), namespace: self.alias(&asked.namespace), ..asked.clone() };
            Point::Request { asked, nth }
        };
        match self.reach(point).or_else(|| self.at_random()) {
            Some(Fault::Refuse(status)) => return Ok(refusal(status)),
            Some(Fault::Delay(time)) => tokio::time::sleep(time).await,
            Some(Fault::CutBefore) => return Err(Cut),
            Some(Fault::CrashBefore) => self.crash().await,
            Some(Fault::CutAfter) => {
                self.upstream(request).await?;
                return Err(Cut);
            }
            Some(Fault::CrashAfter) => {
                self.upstream(request).await?;
                self.crash().await;
                return Err(Cut);
            }
            Some(Fault::Lose | Fault::LoseAndRefuse | Fault::Silence | Fault::Stale(_)) | None => {}
        }
        if asked.verb == "list" {
            let stale = self.traffic().stale.get(&path).filter(|(_, until)| *until > Instant::now()).cloned();
            if let Some((version, _)) = stale {
                set_version(request.uri_mut(), &version);
            }
        }
        let answer = self.upstream(request).await?;
        if asked.verb == "list" {
            self.note_list(&path, answer.body());
        }
        Ok(answer.map(|body| Full::new(body).map_err(never).boxed_unsync()))
    }

    /// Asks the API server, and waits for the whole answer.
    async fn upstream(&self, request: Request<Body>) -> Result<Response<Bytes>, Cut> {
        let (mut parts, body) = self.upstream.send(request).await.map_err(|_| Cut)?.into_parts();
        let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
        parts.headers.remove(header::TRANSFER_ENCODING);
        Ok(Response::from_parts(parts, body))
    }

    fn note_list(&self, path: &str, body: &Bytes) {
        let list: Value = serde_json::from_slice(body).unwrap_or_default();
        if let Some(version) = list.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
            self.traffic().versions.entry(path.to_owned()).or_default().push(version.to_owned());
        }
    }

    /// The host dies, so nobody waits any longer.
    async fn crash(&self) {
        (self.options.crash)();
        std::future::pending().await
    }

    async fn watch(self: Arc<Self>, request: Request<Body>, resource: String, path: String) -> Result<Answer, Cut> {
        let expired = self.traffic().expired.remove(&path);
        match expired {
            Some(Expiry::InStream) => {
                let body = Full::new(Bytes::from_static(GONE.as_bytes())).map_err(never).boxed_unsync();
                return Ok(json_answer(StatusCode::OK, body));
            }
            Some(Expiry::ByStatus) => return Ok(refusal(410)),
            None => {}
        }
        let held = self.traffic().stale.get(&path).map(|(_, until)| *until);
        if let Some(until) = held {
            tokio::time::sleep_until(until.into()).await;
            self.traffic().stale.remove(&path);
        }
        let (mut parts, body) = self.upstream.send(request).await.map_err(|_| Cut)?.into_parts();
        parts.headers.remove(header::TRANSFER_ENCODING);
        if parts.status != StatusCode::OK {
            let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
            return Ok(Response::from_parts(parts, Full::new(body).map_err(never).boxed_unsync()));
        }
        let events = self.events(body, resource, path).map_ok(Frame::data);
        Ok(Response::from_parts(parts, BodyExt::boxed_unsync(StreamBody::new(events))))
    }

    /// The events of a watch, as they come, and the fault among them.
    fn events(
        self: Arc<Self>,
        body: Body,
        resource: String,
        path: String,
    ) -> impl Stream<Item = Result<Bytes, kube::Error>> + Send + use<> {
        let mut lines = Lines::default();
        let chunks = body.into_data_stream().map(move |chunk| match chunk {
            Ok(bytes) => lines.push(&bytes).into_iter().map(Ok).collect::<Vec<_>>(),
            Err(error) => vec![Err(error)],
        });
        let events = chunks.flat_map(stream::iter);
        let shown = events.then(move |line| {
            let (state, resource, path) = (self.clone(), resource.clone(), path.clone());
            async move {
                match line {
                    Ok(line) => state.show(&resource, &path, line).await.map(Ok),
                    Err(error) => Some(Err(error)),
                }
            }
        });
        // After the first that is not shown, the watch is over.
        shown.take_while(|shown| std::future::ready(shown.is_some())).filter_map(std::future::ready)
    }

    /// One line of a watch; none: the watch ends before it.
    async fn show(&self, resource: &str, path: &str, line: Vec<u8>) -> Option<Bytes> {
        let line = Bytes::from(line);
        let Some(shown) = Shown::read(&line) else { return Some(line) };
        let point = |nth| Point::Event {
            resource: resource.to_owned(),
            kind: shown.kind.clone(),
            name: self.alias(&shown.name),
            nth,
        };
        let fault = self.reach(point);
        match fault {
            Some(Fault::CutBefore) => return None,
            Some(Fault::Lose) => {
                self.traffic().expired.insert(path.to_owned(), Expiry::InStream);
                return None;
            }
            Some(Fault::LoseAndRefuse) => {
                self.traffic().expired.insert(path.to_owned(), Expiry::ByStatus);
                return None;
            }
            Some(Fault::Silence) => std::future::pending().await,
            Some(Fault::Stale(time)) => {
                let mut traffic = self.traffic();
                // Older than what the host has seen last, if there is anything older.
                let versions = traffic.versions.get(path).map(Vec::as_slice).unwrap_or_default();
                if let Some(version) = versions.iter().rev().nth(1).or(versions.last()).cloned() {
                    traffic.stale.insert(path.to_owned(), (version, Instant::now() + time));
                    traffic.expired.insert(path.to_owned(), Expiry::InStream);
                }
                return None;
            }
            Some(Fault::Delay(time)) => tokio::time::sleep(time).await,
            Some(Fault::CrashBefore) => self.crash().await,
            Some(Fault::CrashAfter) => (self.options.crash)(),
            Some(Fault::Refuse(_) | Fault::CutAfter) | None => {}
        }
        self.traffic().versions.entry(path.to_owned()).or_default().push(shown.resource_version);
        Some(line)
    }
}

fn never(never: Infallible) -> kube::Error {
    match never {}
}

fn json_answer(status: StatusCode, body: UnsyncBoxBody<Bytes, kube::Error>) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// What the API server says when it refuses.
fn refusal(status: u16) -> Answer {
    let reason = match status {
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        410 => "Expired",
        422 => "Invalid",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status, "reason": reason,
        "message": format!("injected {status}"), "details": {}});
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = json_answer(status, Full::new(Bytes::from(body.to_string())).map_err(never).boxed_unsync());
    if status == StatusCode::TOO_MANY_REQUESTS {
        answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    answer
}

/// Asks for those with this label as well: of several selectors the API server takes the first.
fn select(uri: &mut Uri, label: &str) {
    let query = uri.query().unwrap_or_default();
    let mut parts: Vec<_> = query.split('&').filter(|part| !part.is_empty()).map(str::to_owned).collect();
    match parts.iter_mut().find(|part| part.starts_with("labelSelector=")) {
        Some(selector) => selector.push_str(&format!("%2C{label}")),
        None => parts.push(format!("labelSelector={label}")),
    }
    if let Ok(narrower) = format!("{}?{}", uri.path(), parts.join("&")).parse() {
        *uri = narrower;
    }
}

/// Asks for a list of exactly this state.
fn set_version(uri: &mut Uri, version: &str) {
    let kept = uri.query().unwrap_or_default().split('&').filter(|part| !part.starts_with("resourceVersion"));
    let query: Vec<_> = kept.filter(|part| !part.is_empty()).collect();
    let path = uri.path();
    let exact = format!("resourceVersion={version}&resourceVersionMatch=Exact");
    if let Ok(exact) = format!("{path}?{}", [query.as_slice(), &[&exact]].concat().join("&")).parse() {
        *uri = exact;
    }
}
