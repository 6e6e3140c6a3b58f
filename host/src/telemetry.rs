//! Logs: text for a person at a terminal, JSON lines for a collector. And how an error is written, everywhere.

use std::{error::Error, fmt::Write as _, io::IsTerminal as _};

use tracing_subscriber::EnvFilter;

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

/// Starts logging to standard error. `filter` as in `info,pilothouse=debug`.
pub fn init(format: LogFormat, filter: &str) {
    let terminal = std::io::stderr().is_terminal();
    let filter = EnvFilter::builder().parse_lossy(filter);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(terminal);
    match format {
        LogFormat::Auto if terminal => builder.init(),
        LogFormat::Text => builder.init(),
        LogFormat::Auto | LogFormat::Json => builder.json().flatten_event(true).init(),
    }
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
