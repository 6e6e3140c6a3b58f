//! A plugin's lines in the host's log, by the capability `log` and by the standard streams of WASI. Needs no grant; bounded per
//! call, and per plugin over time, so that a plugin which is called often cannot flood it either.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::bindings::v0_1::pilothouse::plugin::log::{Host, Level};

/// Longest message, in bytes.
const MAX_MESSAGE: usize = 4 << 10;
/// All lines of a call together, in bytes.
const MAX_CALL: usize = 64 << 10;
/// All lines of a plugin together: so many bytes at once, as when a host starts and each of many parents is told of, …
const BURST: usize = 1 << 20;
/// … and so many a second from then on.
const PER_SECOND: usize = 64 << 10;
/// How often a plugin is told to have logged too much.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// What all calls of a plugin may still log.
pub(crate) struct LogRate(Mutex<Bucket>);

struct Bucket {
    left: usize,
    filled: Instant,
    dropped: usize,
    told: Option<Instant>,
}

/// What one call may still log. Its clones are the same one.
#[derive(Clone)]
pub(crate) struct LogContext(Arc<Mutex<Call>>);

struct Call {
    rate: Arc<LogRate>,
    written: usize,
    dropped: usize,
    /// What the guest has written to its standard output and error since the last end of a line.
    pending: [Vec<u8>; 2],
}

/// A standard stream of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl Default for LogRate {
    fn default() -> Self {
        Self(Mutex::new(Bucket { left: BURST, filled: Instant::now(), dropped: 0, told: None }))
    }
}

impl LogRate {
    fn take(&self, bytes: usize, now: Instant) -> bool {
        let mut bucket = lock(&self.0);
        let earned = now.saturating_duration_since(bucket.filled).as_millis() * PER_SECOND as u128 / 1000;
        if earned > 0 {
            bucket.left = bucket.left.saturating_add(usize::try_from(earned).unwrap_or(usize::MAX)).min(BURST);
            bucket.filled = now;
        }
        let has = bytes <= bucket.left;
        if has {
            bucket.left -= bytes;
        }
        has
    }

    /// How many lines were dropped since this was last told, if it is time to tell it.
    fn tell(&self, dropped: usize, now: Instant) -> Option<usize> {
        let mut bucket = lock(&self.0);
        bucket.dropped += dropped;
        if bucket.told.is_some_and(|told| now.saturating_duration_since(told) < TOLD_EVERY) {
            return None;
        }
        bucket.told = Some(now);
        Some(mem::take(&mut bucket.dropped))
    }
}

impl LogContext {
    pub(crate) fn new(rate: Arc<LogRate>) -> Self {
        Self(Arc::new(Mutex::new(Call { rate, written: 0, dropped: 0, pending: [const { Vec::new() }; 2] })))
    }

    /// Takes what the guest writes to a standard stream, and logs each line when it ends. A line is cut like a message.
    pub(super) fn print(&self, stream: Stream, bytes: &[u8]) {
        lock(&self.0).print(stream, bytes);
    }
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
        if !lock(&self.0).take(message.len()) {
            return;
        }
        match level {
            Level::Trace => tracing::trace!(target: "plugin", "{message}"),
            Level::Debug => tracing::debug!(target: "plugin", "{message}"),
            Level::Info => tracing::info!(target: "plugin", "{message}"),
            Level::Warn => tracing::warn!(target: "plugin", "{message}"),
            Level::Error => tracing::error!(target: "plugin", "{message}"),
        }
    }
}

impl Call {
    /// Whether one more line may be written; if not, it is counted.
    fn take(&mut self, bytes: usize) -> bool {
        let has = self.written + bytes <= MAX_CALL && self.rate.take(bytes, Instant::now());
        if has {
            self.written += bytes;
        } else {
            self.dropped += 1;
        }
        has
    }

    fn print(&mut self, stream: Stream, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ended) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            let pending = &mut self.pending[stream as usize];
            pending.extend_from_slice(&text[..text.len().min(MAX_MESSAGE - pending.len())]);
            if ended {
                self.end_line(stream);
            }
        }
    }

    fn end_line(&mut self, stream: Stream) {
        let text = mem::take(&mut self.pending[stream as usize]);
        let message = line(String::from_utf8_lossy(&text).trim_end_matches('\r'), &[]);
        if !message.is_empty() && self.take(message.len()) {
            tracing::info!(target: "plugin", ?stream, "{message}");
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end_line(Stream::Stdout);
        self.end_line(Stream::Stderr);
        if self.dropped > 0
            && let Some(dropped) = self.rate.tell(self.dropped, Instant::now())
        {
            tracing::warn!(
                target: "plugin",
                dropped,
                "the plugin logged more than {MAX_CALL} bytes in one call, or {PER_SECOND} bytes a second"
            );
        }
    }
}

/// A panic while it was held leaves counts that are as good as before.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn call() -> Call {
        Call { rate: Arc::default(), written: 0, dropped: 0, pending: [const { Vec::new() }; 2] }
    }

    #[test]
    fn a_line_is_one_line_and_bounded() {
        let fields = [("bucket".to_owned(), "b\n1".to_owned())];
        assert_eq!(line("deleted\r\nforged", &fields), r"deleted\r\nforged bucket=b\n1");
        assert!(line(&"é".repeat(10_000), &[]).len() <= MAX_MESSAGE + 1);
    }

    #[test]
    fn a_call_that_floods_is_cut() {
        let mut call = call();
        let taken = (0..100).filter(|_| call.take(4096)).count();
        assert_eq!((taken, call.written, call.dropped), (16, 65_536, 84));
    }

    #[test]
    fn a_plugin_that_is_called_often_has_a_burst_and_then_so_much_a_second_and_is_told_once_a_second() {
        let rate = LogRate::default();
        let begun = Instant::now();
        let taken = |now| (0..1000).filter(|_| rate.take(4096, now)).count();
        assert_eq!(taken(begun), BURST / 4096);
        assert_eq!(taken(begun + Duration::from_secs(2)), 2 * PER_SECOND / 4096);
        assert_eq!(rate.tell(3, begun), Some(3));
        assert_eq!(rate.tell(3, begun + Duration::from_millis(900)), None);
        assert_eq!(rate.tell(1, begun + Duration::from_secs(1)), Some(4));
    }

    #[test]
    fn a_stream_is_logged_by_the_line_and_a_line_without_end_is_cut() {
        let mut call = call();
        call.print(Stream::Stdout, b"half ");
        assert_eq!((call.written, call.pending[0].as_slice()), (0, &b"half "[..]));
        call.print(Stream::Stderr, b"other\n\n");
        call.print(Stream::Stdout, b"a line\r\nnext");
        assert_eq!((call.written, call.pending[0].as_slice()), ("other".len() + "half a line".len(), &b"next"[..]));
        call.print(Stream::Stdout, &[b'x'; 100_000]);
        assert_eq!(call.pending[0].len(), MAX_MESSAGE);
    }
}
