//! Traces: each reconcile, with its steps as spans within, sent to a collector by OTLP over HTTP. Only if somebody asks for them.
//!
//! The spans are those that log lines carry anyway. Batches are sent from a thread of their own, so that a slow collector delays no
//! reconcile; what it does not take in time is dropped.

use std::time::Duration;

use http::{Request, Response, Uri};
use kube::client::Body;
use opentelemetry::{KeyValue, trace::TracerProvider as _};
use opentelemetry_http::{Bytes, HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
use tokio::runtime::Handle;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{Layer, Registry, filter::Targets};

/// How long a collector may take for a batch: the default of the specification.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why there are no traces.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No URL.
    #[error("{0:?} is no URL of a collector; write it as http://collector:4318 (--otlp-endpoint)")]
    Endpoint(String),
    /// No client for it.
    #[error("failed to make a client for the collector")]
    Client(#[source] kube::Error),
    /// The environment asks for something that cannot be had.
    #[error("failed to set up the export of traces; look at the environment variables OTEL_*")]
    Exporter(#[source] opentelemetry_otlp::ExporterBuildError),
}

/// Where spans go, until [`Self::end`].
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Traces that go to the collector at `endpoint`, as `OTEL_EXPORTER_OTLP_ENDPOINT` has it: `v1/traces` below it.
    ///
    /// # Errors
    /// If there is no such place.
    pub fn start(endpoint: &str, runtime: Handle) -> Result<Self, Error> {
        let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
        let parts = url.parse::<Uri>().ok().map(Uri::into_parts);
        let collector = parts.and_then(|parts| {
            Uri::builder().scheme(parts.scheme?).authority(parts.authority?).path_and_query("/").build().ok()
        });
        let collector = collector.ok_or_else(|| Error::Endpoint(endpoint.to_owned()))?;
        let client = {
            let _guard = runtime.enter();
            kube::Client::try_from(kube::Config::new(collector)).map_err(Error::Client)?
        };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Collector { client, runtime })
            .with_endpoint(url)
            .build()
            .map_err(Error::Exporter)?;
        let resource = Resource::builder()
            .with_service_name("pilothouse")
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Self(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build()))
    }

    /// What takes the spans of reconciles and their steps.
    pub fn layer(&self) -> Box<dyn Layer<Registry> + Send + Sync> {
        let steps = ["pilothouse::controller", "pilothouse::reconcile", "pilothouse::plugin", "plugin"];
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer("pilothouse"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_targets(steps.map(|step| (step, LevelFilter::DEBUG))))
            .boxed()
    }

    /// Sends what has not been sent yet.
    pub fn end(self) {
        if let Err(error) = self.0.shutdown_with_timeout(TIMEOUT) {
            tracing::warn!("the last traces were not sent: {error}");
        }
    }
}

/// The collector, reached by the HTTP client that is there for Kubernetes.
struct Collector {
    client: kube::Client,
    runtime: Handle,
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Collector").finish_non_exhaustive()
    }
}

#[async_trait::async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let exchange = async move {
            let (parts, body) = client.send(request.map(Body::from)).await?.into_parts();
            Ok(Response::from_parts(parts, body.collect_bytes().await?))
        };
        // The thread that exports is none of the runtime's.
        self.runtime.spawn(async { tokio::time::timeout(TIMEOUT, exchange).await? }).await?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_no_url_is_refused_with_what_to_write_instead() {
        for bad in ["", "collector:4318", "/v1/traces", "http://"] {
            let error = Traces::start(bad, Handle::current()).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("http://collector:4318"), "{bad}: {error}");
        }
        Traces::start("http://127.0.0.1:4318/prefix/", Handle::current()).unwrap().end();
    }
}
