//! A wire that can be cut: between the host and a server outside of the cluster, it hands on what is sent, and at a place that is
//! named once it has the host killed, before, during or after what the server does. Or it answers instead of the server.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// When the host is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// The server has not seen the request.
    Before,
    /// It has, and may have done what it asks.
    During,
    /// It has answered, and the host has not seen that.
    After,
}

/// Where: what is sent, and what the answer to it has in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) request: &'static str,
    pub(crate) answer: &'static str,
}

type Crash = Box<dyn FnOnce() + Send>;

struct Trap {
    place: Place,
    when: When,
    crash: Crash,
}

/// See the module's documentation.
pub(crate) struct Tripwire {
    pub(crate) port: u16,
    trap: Arc<Mutex<Option<Trap>>>,
    instead: Arc<Mutex<Option<&'static str>>>,
    connections: Arc<AtomicUsize>,
    _accepts: AbortOnDropHandle<()>,
}

impl Tripwire {
    /// In front of the server at this port of this machine.
    pub(crate) async fn before(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
        let port = listener.local_addr().expect("it has an address").port();
        let trap = Arc::<Mutex<Option<Trap>>>::default();
        let instead = Arc::<Mutex<Option<&'static str>>>::default();
        let connections = Arc::<AtomicUsize>::default();
        let (set, said, count) = (trap.clone(), instead.clone(), connections.clone());
        let accepts = tokio::spawn(async move {
            while let Ok((host, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (trap, instead) = (set.clone(), *lock(&said));
                tokio::spawn(async move {
                    if let Some(answer) = instead {
                        say(host, answer).await;
                    } else if let Ok(server) = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], server))).await {
                        hand_on(host, server, &trap).await;
                    }
                });
            }
        });
        Self { port, trap, instead, connections, _accepts: AbortOnDropHandle::new(accepts) }
    }

    /// Answers what comes on new connections with this, instead of the server; with nothing, it is silent. None: the server answers again.
    pub(crate) fn answer(&self, instead: Option<&'static str>) {
        *lock(&self.instead) = instead;
    }

    /// How often somebody has connected.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Kills the host at this place, once.
    pub(crate) fn set(&self, place: Place, when: When, crash: impl FnOnce() + Send + 'static) {
        *lock(&self.trap) = Some(Trap { place, when, crash: Box::new(crash) });
    }

    /// Whether it waits to be reached.
    pub(crate) fn is_set(&self) -> bool {
        lock(&self.trap).is_some()
    }
}

/// Answers the first that comes, and waits until the other side has had enough.
async fn say(host: TcpStream, answer: &str) {
    let (mut from_host, mut to_host) = host.into_split();
    if read(&mut from_host).await.is_some() && to_host.write_all(answer.as_bytes()).await.is_ok() {
        while read(&mut from_host).await.is_some() {}
    }
}

/// Both ways, until either side is done or the wire is cut.
async fn hand_on(host: TcpStream, server: TcpStream, trap: &Arc<Mutex<Option<Trap>>>) {
    let (mut from_host, mut to_host) = host.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let cut = CancellationToken::new();
    // Set once the request was seen on this connection, whose answer is waited for.
    let asked = Mutex::new(false);
    // Set once the host is to see no more answers.
    let deaf = Mutex::new(false);
    let upwards = async {
        while let Some(sent) = read(&mut from_host).await {
            let trapped = lock(trap).as_ref().filter(|it| contains(&sent, it.place.request)).map(|it| it.when);
            match trapped {
                Some(When::Before) => return spring(trap, &cut).await,
                Some(When::During) => {
                    *lock(&deaf) = true;
                    let _ = to_server.write_all(&sent).await;
                    return spring(trap, &cut).await;
                }
                Some(When::After) => *lock(&asked) = true,
                None => {}
            }
            if to_server.write_all(&sent).await.is_err() {
                return;
            }
        }
    };
    let downwards = async {
        while let Some(answered) = read(&mut from_server).await {
            if *lock(&deaf) {
                continue;
            }
            let ends = *lock(&asked)
                && lock(trap).as_ref().is_some_and(|it| it.when == When::After && contains(&answered, it.place.answer));
            if ends {
                return spring(trap, &cut).await;
            }
            if to_host.write_all(&answered).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = upwards => {}
        () = downwards => {}
        () = cut.cancelled() => {}
    }
}

/// Kills the host, and cuts the wire. What is on its way to the server has the time to arrive.
async fn spring(trap: &Arc<Mutex<Option<Trap>>>, cut: &CancellationToken) {
    let sprung = lock(trap).take();
    if let Some(Trap { crash, .. }) = sprung {
        tokio::task::spawn_blocking(crash).await.expect("the host can be killed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cut.cancel();
}

async fn read(from: &mut OwnedReadHalf) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 64 << 10];
    let count = from.read(&mut bytes).await.ok().filter(|count| *count > 0)?;
    bytes.truncate(count);
    Some(bytes)
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|part| part == text.as_bytes())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
