//! Logs: text for a person at a terminal, JSON lines for a collector. And how an error is written, everywhere.

use std::{error::Error, fmt::Write as _, io::IsTerminal as _};

use tracing_subscriber::{EnvFilter, Layer as _, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::traces::Traces;

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    Auto,
    /// Lines for a person.
    Text,
    /// A JSON object a line.
    Json,
}

/// Starts logging to standard error. `filter` as in `info,pilothouse=debug`; it is for the logs, not for the traces.
pub fn init(format: LogFormat, filter: &str, traces: Option<&Traces>) {
    let terminal = std::io::stderr().is_terminal();
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(terminal);
    let lines = match format {
        LogFormat::Auto if terminal => lines.boxed(),
        LogFormat::Text => lines.boxed(),
        LogFormat::Auto | LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let mut layers = vec![lines.with_filter(EnvFilter::builder().parse_lossy(filter)).boxed()];
    layers.extend(traces.map(Traces::layer));
    tracing_subscriber::registry().with(layers).init();
}

/// Hands what is logged to a view, and writes it nowhere else.
pub fn init_to<L>(filter: &str, view: L)
where
    L: tracing_subscriber::Layer<tracing_subscriber::Registry> + Send + Sync,
{
    let filter = EnvFilter::builder().parse_lossy(filter);
    tracing_subscriber::registry().with(view.with_filter(filter)).init();
}

/// An error with all its causes, in one line: `failed to x: because y: because z`.
pub fn chain(error: &dyn Error) -> String {
    // Some texts have several lines; conditions and log lines have one.
    let line = |error: &dyn Error| error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    let mut text = line(error);
    let mut source = error.source();
    while let Some(error) = source {
        let cause = line(error);
        // Some libraries repeat the cause in their own text.
        if !text.ends_with(&cause) {
            let _ = write!(text, ": {cause}");
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_says_everything_once() {
        let inner = std::io::Error::other("disk full");
        let error = crate::plugin::engine::Error::Threads(inner);
        assert_eq!(chain(&error), "failed to start the threads that run plugins: disk full");
    }
}
