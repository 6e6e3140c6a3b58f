//! A server that answers, or not, as a test says, byte by byte, and notes what it was sent.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

/// What a request is answered with.
pub(super) enum Answer {
    /// These bytes, and the end.
    Say(Vec<u8>),
    /// These bytes, and nothing more.
    Hang(Vec<u8>),
}

impl Answer {
    pub(super) fn say(status: u16, body: &str) -> Self {
        Self::Say(format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes())
    }
}

#[derive(Default)]
struct Seen {
    connections: usize,
    closed: usize,
    requests: Vec<String>,
}

/// See the module's documentation. It ends with the value.
pub(super) struct Server {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Server {
    pub(super) async fn start(answer: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Self {
        Self::listen(None, answer).await
    }

    pub(super) async fn start_tls(
        certificate: &Certificate,
        answer: impl Fn(&str) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::listen(Some(certificate.acceptor()), answer).await
    }

    async fn listen(tls: Option<TlsAcceptor>, answer: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (notes, answer) = (seen.clone(), Arc::new(answer));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                notes.lock().expect("nobody has panicked").connections += 1;
                let (tls, notes, answer) = (tls.clone(), notes.clone(), answer.clone());
                tokio::spawn(async move {
                    match tls {
                        None => serve(stream, &notes, answer.as_ref()).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve(stream, &notes, answer.as_ref()).await;
                            }
                        }
                    }
                    notes.lock().expect("nobody has panicked").closed += 1;
                });
            }
        });
        Self { address, seen, task }
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn connections(&self) -> usize {
        self.seen.lock().expect("nobody has panicked").connections
    }

    /// Head and body of each.
    pub(super) fn requests(&self) -> Vec<String> {
        self.seen.lock().expect("nobody has panicked").requests.clone()
    }

    pub(super) async fn connected(&self, times: usize) {
        self.until(|seen| seen.connections >= times && seen.requests.len() >= times).await;
    }

    /// Waits until whoever connected has gone.
    pub(super) async fn all_closed(&self) {
        self.until(|seen| seen.closed == seen.connections).await;
    }

    async fn until(&self, holds: impl Fn(&Seen) -> bool) {
        let waiting = async {
            while !holds(&self.seen.lock().expect("nobody has panicked")) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("it comes about");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    seen: &Mutex<Seen>,
    answer: &(impl Fn(&str) -> Answer + Sync),
) {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&request).into_owned();
        if is_whole(&text) {
            seen.lock().expect("nobody has panicked").requests.push(text.clone());
            let answer = answer(&text);
            let (Answer::Say(bytes) | Answer::Hang(bytes)) = &answer;
            // It may have had enough by then.
            let said = stream.write_all(bytes).await.is_ok() && stream.flush().await.is_ok();
            if said && matches!(answer, Answer::Hang(_)) {
                // Until the other side goes.
                while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
            }
            drop(stream.shutdown().await);
            return;
        }
        match stream.read(&mut buffer).await {
            Ok(read) if read > 0 => request.extend_from_slice(&buffer[..read]),
            _ => return,
        }
    }
}

fn is_whole(request: &str) -> bool {
    // The first byte of TLS, where plain HTTP is spoken: servers complain of it at once.
    if request.starts_with('\u{16}') {
        return true;
    }
    let Some((head, body)) = request.split_once("\r\n\r\n") else { return false };
    let head = head.to_ascii_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
    body.len() >= length.unwrap_or(0)
}

/// A certificate, from an authority of its own.
pub(super) struct Certificate {
    /// That of the authority, as PEM.
    pub(super) authority: String,
    certificate: CertificateDer<'static>,
    key: KeyPair,
}

impl Certificate {
    pub(super) fn new(name: &str, is_expired: bool) -> Self {
        let mut authority = CertificateParams::default();
        // Two of one name are told apart by their signature, which is another error.
        let number = fastrand::u64(..).to_string();
        authority.distinguished_name.push(DnType::CommonName, number);
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("there is randomness");
        let authority = CertifiedIssuer::self_signed(authority, key).expect("it can be signed");
        let mut own = CertificateParams::new([name.to_owned()]).expect("it is a name");
        if is_expired {
            own.not_before = date_time_ymd(2019, 1, 1);
            own.not_after = date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().expect("there is randomness");
        let certificate = own.signed_by(&key, &authority).expect("it can be signed").der().clone();
        Self { authority: authority.pem(), certificate, key }
    }

    fn acceptor(&self) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("they are supported").with_no_client_auth();
        let key = PrivateKeyDer::Pkcs8(self.key.serialize_der().into());
        let config = config.with_single_cert(vec![self.certificate.clone()], key).expect("they belong together");
        TlsAcceptor::from(Arc::new(config))
    }
}
