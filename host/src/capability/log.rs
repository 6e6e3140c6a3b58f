//! The capability `log`: a plugin's lines in the host's log. Needs no grant; bounded per call.

use crate::bindings::pilothouse::plugin::log::{Host, Level};

/// Longest message, in bytes.
const MAX_MESSAGE: usize = 4 << 10;
/// All lines of a call together, in bytes.
const MAX_CALL: usize = 64 << 10;

/// What one call has logged.
#[derive(Default)]
pub(crate) struct LogContext {
    written: usize,
    dropped: usize,
}

impl Host for LogContext {
    fn enabled(&mut self, level: Level) -> bool {
        match level {
            Level::Trace => tracing::enabled!(target: "plugin", tracing::Level::TRACE),
            Level::Debug => tracing::enabled!(target: "plugin", tracing::Level::DEBUG),
            Level::Info => tracing::enabled!(target: "plugin", tracing::Level::INFO),
            Level::Warn => tracing::enabled!(target: "plugin", tracing::Level::WARN),
            Level::Error => tracing::enabled!(target: "plugin", tracing::Level::ERROR),
        }
    }

    fn write(&mut self, level: Level, message: String, fields: Vec<(String, String)>) {
        let message = line(&message, &fields);
        if self.written + message.len() > MAX_CALL {
            self.dropped += 1;
            return;
        }
        self.written += message.len();
        match level {
            Level::Trace => tracing::trace!(target: "plugin", "{message}"),
            Level::Debug => tracing::debug!(target: "plugin", "{message}"),
            Level::Info => tracing::info!(target: "plugin", "{message}"),
            Level::Warn => tracing::warn!(target: "plugin", "{message}"),
            Level::Error => tracing::error!(target: "plugin", "{message}"),
        }
    }
}

impl Drop for LogContext {
    fn drop(&mut self) {
        if self.dropped > 0 {
            tracing::warn!(target: "plugin", dropped = self.dropped, "the plugin logged more than {MAX_CALL} bytes in one call");
        }
    }
}

/// The message with its fields behind it, control characters escaped so that a guest cannot forge a line of the host.
fn line(message: &str, fields: &[(String, String)]) -> String {
    let mut line = String::new();
    push_cut(&mut line, message);
    for (name, value) in fields {
        line.push(' ');
        push_cut(&mut line, name);
        line.push('=');
        push_cut(&mut line, value);
    }
    line
}

fn push_cut(line: &mut String, text: &str) {
    for c in text.chars() {
        if line.len() >= MAX_MESSAGE {
            return;
        }
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_and_bounded() {
        let fields = [("bucket".to_owned(), "b\n1".to_owned())];
        assert_eq!(line("deleted\r\nforged", &fields), r"deleted\r\nforged bucket=b\n1");
        assert!(line(&"é".repeat(10_000), &[]).len() <= MAX_MESSAGE + 1);
    }

    #[test]
    fn a_call_that_floods_is_cut() {
        let mut context = LogContext::default();
        for _ in 0..100 {
            context.write(Level::Trace, "x".repeat(4096), Vec::new());
        }
        assert_eq!((context.written, context.dropped), (65_536, 84));
    }
}
