//! `/livez` and `/readyz`, for the kubelet.

use axum::{Router, http::StatusCode, routing::get};
use tokio::{net::TcpListener, sync::watch};

/// Serves the probes until the listener fails. Ready once `listed` is true: the host then knows what it is to do.
///
/// # Errors
/// If the socket breaks.
pub async fn serve(listener: TcpListener, listed: watch::Receiver<bool>) -> Result<(), std::io::Error> {
    let ready = move || {
        let ready = *listed.borrow();
        async move {
            match ready {
                true => (StatusCode::OK, "ok\n"),
                false => (StatusCode::SERVICE_UNAVAILABLE, "the reconcilers have not been listed yet\n"),
            }
        }
    };
    let router = Router::new().route("/livez", get(async || "ok\n")).route("/readyz", get(ready));
    axum::serve(listener, router).await
}
