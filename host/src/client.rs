//! The way to the API server, which all clients of a host share: connections of HTTP/2, on which requests and watches of all reconcilers
//! go side by side. One more reconciler takes a few streams, where it would take several connections with buffers of their own. A
//! connection belongs to nobody: who asks is said in the head of each request, which its client writes.
//!
//! A server that speaks only HTTP/1.1 gets a connection for each request that is under way.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body as HttpBody, Frame, Incoming};
use hyper_rustls::{DefaultServerNameResolver, FixedServerNameResolver, HttpsConnector, ResolveServerName};
use hyper_timeout::TimeoutConnector;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Config,
    client::{
        Body, ClientBuilder, ConfigExt as _, DynBody, RustlsTlsError, middleware::ExtraHeaders, retry::RetryPolicy,
    },
};
use tokio::time::{Instant, Sleep};
use tower::{BoxError, Service, ServiceBuilder, retry::RetryLayer, util::BoxCloneSyncService};

/// How many requests and watches go by one connection. An API server takes 100 at a time unless it is told otherwise; more would wait
/// until others have ended, which watches do not.
const STREAMS: usize = 64;
/// How much of an answer may come before it is read. A connection takes as much for all its streams together, so one that is not read
/// keeps none of the others waiting.
const WINDOW: u32 = 256 << 10;
/// How long a connection may be silent before it is asked whether it is alive, and how long that may take: as client-go does.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(15));

type Connector = TimeoutConnector<HttpsConnector<HttpConnector>>;
/// What takes requests to the API server.
type Requests = BoxCloneSyncService<Request<Body>, Response<Box<DynBody>>, BoxError>;

/// See the module's documentation. Clones share their connections.
#[derive(Clone)]
pub struct ApiServer {
    config: Arc<Config>,
    requests: Requests,
}

/// The API server says nothing more.
#[derive(Debug, thiserror::Error)]
#[error("the API server was silent for {0:?}")]
struct Silent(Duration);

impl ApiServer {
    /// The API server of this configuration. It is asked nothing yet.
    ///
    /// # Errors
    /// If the configuration is not good.
    pub fn new(config: Config) -> Result<Self, kube::Error> {
        if let Some(proxy_url) = &config.proxy_url {
            let proxy_url = Box::new(proxy_url.clone());
            return Err(kube::Error::ProxyProtocolDisabled { proxy_url, protocol_feature: "kube/http-proxy" });
        }
        let requests = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .option_layer(config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry())))
            .option_layer(config.auth_layer()?)
            .service(Connections::new(&config)?);
        let requests = BoxCloneSyncService::new(ServiceBuilder::new().map_err(BoxError::from).service(requests));
        Ok(Self { config: Arc::new(config), requests })
    }

    /// Its name and port.
    pub fn authority(&self) -> &str {
        self.config.cluster_url.authority().map(http::uri::Authority::as_str).unwrap_or_default()
    }

    /// What becomes a client that acts as this user; none: as the host itself.
    ///
    /// # Errors
    /// If that can be no user's name.
    pub fn client(&self, user: Option<&str>) -> Result<ClientBuilder<ExtraHeaders<Requests>>, kube::Error> {
        let mut config = Config::clone(&self.config);
        if let Some(user) = user {
            config.auth_info.impersonate = Some(user.to_owned());
        }
        let headers = config.extra_headers_layer()?;
        Ok(ClientBuilder::new(self.requests.clone(), config.default_namespace).with_layer(&headers))
    }
}

/// Connections to one server, as many as it takes.
#[derive(Clone)]
struct Connections {
    connector: Connector,
    silence: Option<Duration>,
    open: Arc<Mutex<Vec<Connection>>>,
}

/// A connection, which is made when there is something to send, and anew when it was lost.
struct Connection {
    client: HttpClient<Connector, Body>,
    /// Each request that is under way holds it, too.
    under_way: Arc<()>,
}

impl Connections {
    fn new(config: &Config) -> Result<Self, kube::Error> {
        let mut tls = config.rustls_client_config()?;
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let server_name: Arc<dyn ResolveServerName + Send + Sync> = match &config.tls_server_name {
            Some(name) => {
                let wrong = |error| kube::Error::RustlsTls(RustlsTlsError::InvalidServerName(error));
                Arc::new(FixedServerNameResolver::new(name.clone().try_into().map_err(wrong)?))
            }
            None => Arc::new(DefaultServerNameResolver::default()),
        };
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        // A small request does not wait for the acknowledgement of the one before it.
        tcp.set_nodelay(true);
        let mut connector = TimeoutConnector::new(HttpsConnector::new(tcp, tls, false, server_name));
        connector.set_connect_timeout(config.connect_timeout);
        connector.set_write_timeout(config.write_timeout);
        Ok(Self { connector, silence: config.read_timeout, open: Arc::default() })
    }

    /// Who sends the next request, and what that request has to hold until its answer has ended.
    fn place(&self) -> (HttpClient<Connector, Body>, Arc<()>) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let free = open.iter().position(|connection| Arc::strong_count(&connection.under_way) <= STREAMS);
        let at = free.unwrap_or_else(|| {
            open.push(self.connection());
            open.len() - 1
        });
        let Connection { client, under_way } = &open[at];
        (client.clone(), under_way.clone())
    }

    fn connection(&self) -> Connection {
        let client = HttpClient::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            // It is the server that ends one on which nothing is asked: here a watch is no sign of use.
            .pool_idle_timeout(None)
            .http2_initial_stream_window_size(WINDOW)
            .http2_initial_connection_window_size(u32::try_from(STREAMS).unwrap_or(u32::MAX).saturating_mul(WINDOW))
            .http2_keep_alive_interval(PING.0)
            .http2_keep_alive_timeout(PING.1)
            .build(self.connector.clone());
        Connection { client, under_way: Arc::default() }
    }
}

impl Service<Request<Body>> for Connections {
    type Response = Response<Box<DynBody>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (client, place) = self.place();
        let silence = self.silence;
        Box::pin(async move {
            let asked = client.request(request);
            let answer = match silence {
                Some(silence) => tokio::time::timeout(silence, asked).await.map_err(|_| Silent(silence))?,
                None => asked.await,
            };
            Ok(answer?.map(|body| -> Box<DynBody> {
                let silence = silence.map(|limit| (limit, Box::pin(tokio::time::sleep(limit))));
                Box::new(Answer { body, silence, _place: place })
            }))
        })
    }
}

/// The body of an answer. It ends in an error if nothing of it comes for too long (`C39`): that its connection is alive is no sign that the
/// server still knows of it.
struct Answer {
    body: Incoming,
    silence: Option<(Duration, Pin<Box<Sleep>>)>,
    _place: Arc<()>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Self { body, silence, .. } = self.get_mut();
        let frame = Pin::new(body).poll_frame(context);
        let Some((limit, until)) = silence else { return frame.map_err(BoxError::from) };
        match frame {
            Poll::Ready(frame) => {
                until.as_mut().reset(Instant::now() + *limit);
                Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)))
            }
            Poll::Pending => until.as_mut().poll(context).map(|()| Some(Err(Silent(*limit).into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::{StreamExt as _, stream};
    use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
    use hyper::{server::conn::http2, service::service_fn};
    use hyper_util::rt::TokioIo;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// A server of HTTP/2 that begins each answer with the user who asks, and never ends one.
    struct Server {
        config: Config,
        connections: Arc<AtomicUsize>,
    }

    impl Server {
        async fn start() -> Self {
            let key = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let tls =
                rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
            let private = rustls::pki_types::PrivateKeyDer::try_from(key.signing_key.serialize_der()).unwrap();
            let mut tls = tls.with_no_client_auth().with_single_cert(vec![key.cert.der().clone()], private).unwrap();
            tls.alpn_protocols = vec![b"h2".to_vec()];
            let tls = TlsAcceptor::from(Arc::new(tls));
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut config =
                Config::new(format!("https://localhost:{}", listener.local_addr().unwrap().port()).parse().unwrap());
            config.root_cert = Some(vec![key.cert.der().to_vec()]);
            let connections = Arc::new(AtomicUsize::new(0));
            let counted = connections.clone();
            tokio::spawn(async move {
                loop {
                    let (connection, _) = listener.accept().await.unwrap();
                    counted.fetch_add(1, Ordering::SeqCst);
                    let connection = TokioIo::new(tls.accept(connection).await.unwrap());
                    // As an API server does.
                    let mut server = http2::Builder::new(TokioExecutor::new());
                    server.max_concurrent_streams(100);
                    tokio::spawn(server.serve_connection(
                        connection,
                        service_fn(async |request| Ok::<_, hyper::Error>(answer(&request))),
                    ));
                }
            });
            Self { config, connections }
        }
    }

    fn answer<B>(request: &Request<B>) -> Response<UnsyncBoxBody<Bytes, hyper::Error>> {
        let user = request.headers().get_all("impersonate-user").iter().map(|user| user.to_str().unwrap());
        // Never empty: nothing would be sent.
        let user = Bytes::from(format!("as {}", user.collect::<Vec<_>>().join(" and ")));
        let body = stream::iter([Ok(Frame::data(user))]).chain(stream::pending());
        Response::new(StreamBody::new(body).boxed_unsync())
    }

    async fn ask(client: &kube::Client) -> (String, Body) {
        let request = Request::get("/").body(Body::empty()).unwrap();
        let mut body = client.send(request).await.unwrap().into_body();
        let user = body.frame().await.unwrap().unwrap().into_data().unwrap();
        (String::from_utf8(user.to_vec()).unwrap(), body)
    }

    #[tokio::test]
    async fn clients_share_connections_and_each_request_says_who_asks() {
        let server = Server::start().await;
        let api_server = ApiServer::new(server.config.clone()).unwrap();
        let client = |user: Option<&str>| api_server.client(user).unwrap().build();
        let (host, a, b) = (client(None), client(Some("a")), client(Some("b")));
        let mut under_way = Vec::new();
        // The first ones at once, before there is a connection.
        let firsts = [(&a, "as a"), (&host, "as "), (&b, "as b")];
        let first = futures::future::join_all(firsts.map(|(client, _)| ask(client))).await;
        for ((user, body), (_, expected)) in first.into_iter().zip(firsts) {
            assert_eq!(user, expected);
            under_way.push(body);
        }
        let begun = server.connections.load(Ordering::SeqCst);
        for _ in 0..STREAMS {
            for (client, expected) in firsts {
                let (user, body) = ask(client).await;
                assert_eq!(user, expected);
                under_way.push(body);
            }
        }
        let connections = || server.connections.load(Ordering::SeqCst);
        assert_eq!(connections() - begun, 3, "{} requests that never end", under_way.len());
        // What has ended makes room.
        under_way.truncate(10);
        for _ in 0..STREAMS {
            under_way.push(ask(&a).await.1);
        }
        assert_eq!(connections() - begun, 3);
    }

    #[tokio::test]
    async fn c39_an_answer_that_is_silent_ends_though_its_connection_lives() {
        let mut server = Server::start().await;
        server.config.read_timeout = Some(Duration::from_millis(300));
        let client = ApiServer::new(server.config.clone()).unwrap().client(None).unwrap().build();
        let (_, mut body) = ask(&client).await;
        let error = body.frame().await.unwrap().unwrap_err();
        assert!(crate::telemetry::chain(&error).contains("was silent for 300ms"), "{error}");
        let begun = server.connections.load(Ordering::SeqCst);
        ask(&client).await;
        assert_eq!(server.connections.load(Ordering::SeqCst), begun, "it is no reason for another connection");
    }
}
