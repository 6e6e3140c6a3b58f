//! `/livez` and `/readyz`, for the kubelet.

use axum::{Router, http::StatusCode, routing::get};
use tokio::{net::TcpListener, sync::watch};

/// Serves the probes until the listener fails. Ready once `ready` is true: the host knows what it is to do, or stands by while another
/// one leads. If it were not, a Deployment that waits for a new pod before it ends an old one would wait for ever.
///
/// # Errors
/// If the socket breaks.
pub async fn serve(listener: TcpListener, ready: watch::Receiver<bool>) -> Result<(), std::io::Error> {
    let is_ready = move || {
        let ready = *ready.borrow();
        async move {
            match ready {
                true => (StatusCode::OK, "ok\n"),
                false => (StatusCode::SERVICE_UNAVAILABLE, "the reconcilers have not been listed yet\n"),
            }
        }
    };
    let router = Router::new().route("/livez", get(async || "ok\n")).route("/readyz", get(is_ready));
    axum::serve(listener, router).await
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;

    #[tokio::test]
    async fn it_lives_at_once_and_is_ready_when_the_reconcilers_are_listed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listed = watch::Sender::new(false);
        let served = tokio::spawn(serve(listener, listed.subscribe()));
        let probe = async |path: &str| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            let code: u16 = answer.split(' ').nth(1).unwrap().parse().unwrap();
            (code, answer.rsplit("\r\n").next().unwrap().to_owned())
        };
        assert_eq!(probe("/livez").await, (200, "ok\n".to_owned()));
        let (code, reason) = probe("/readyz").await;
        assert_eq!(code, 503);
        assert!(reason.contains("not been listed"), "{reason}");
        listed.send_replace(true);
        assert_eq!(probe("/readyz").await, (200, "ok\n".to_owned()));
        assert_eq!(probe("/livez").await, (200, "ok\n".to_owned()));
        served.abort();
    }
}
