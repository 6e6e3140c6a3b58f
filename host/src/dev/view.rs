//! What `pilothouse dev` shows: events, as lines for a person, who also sees that something goes on, or as JSON for a program.

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use super::{
    follow::Row,
    install::{Action, Applied},
    lines::Line,
};
use crate::{object::ObjectKey, output, preview::Report};

/// Something that has happened: a document of `pilothouse dev -o json`. Its keys are there to stay.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(super) enum Event {
    /// It begins.
    Started { directory: PathBuf, reconciler: String, server: String },
    /// The source was edited: these files.
    Edited { files: Vec<PathBuf> },
    /// There is a component; null: it is the one that serves already.
    Built { bytes: Option<usize>, seconds: f64, findings: String },
    /// The source does not compile.
    BuildFailed { findings: String },
    /// Objects were applied, or removed.
    Applied { objects: Vec<Applied> },
    /// What the new revision will change.
    Preview(Report),
    /// What was built does not come to serve, and what serves goes on.
    Refused { message: String },
    /// The new revision serves.
    Serving { revision: String, seconds: f64 },
    /// The host says that it does not.
    Failing { reason: String, message: String },
    /// How parents are, of which something has changed.
    Parents { kind: String, parents: Vec<Row> },
    /// Something was logged.
    Logged(Line),
    /// It has ended; what that means for the cluster.
    Ended { message: String },
}

/// Of how many parents the differences are shown, …
const COMPARED: usize = 10;
/// … and of how many how they are.
const LISTED: usize = 20;

const HEADING: Style = Style::new().bold();
const QUIET: Style = Style::new().dimmed();
const GOOD: Style = AnsiColor::Green.on_default();
const WARNING: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();

/// How far what is told of an event stands from the edge.
const LABEL: usize = 10;

impl Event {
    /// For a person.
    fn text(&self) -> io::Result<String> {
        Ok(match self {
            Self::Started { directory, reconciler, server } => output::labelled(&[
                ("plugin", vec![directory.display().to_string()]),
                ("cluster", vec![server.clone()]),
                ("reconciler", vec![format!("ClusterReconciler {reconciler}")]),
            ]),
            Self::Edited { files } => {
                let names = files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
                format!("\n{HEADING}{names}{HEADING:#}\n")
            }
            Self::Built { bytes, seconds, findings } => {
                let what = bytes
                    .map_or_else(|| "the same as before".to_owned(), |bytes| format!("{} KB", bytes.div_ceil(1000)));
                format!("{findings}{}", told(GOOD, "built", &format!("{what} in {seconds:.1} s")))
            }
            Self::BuildFailed { findings } => {
                format!("{}\n{}", findings.trim_end(), told(BAD, "failed", "it does not compile; what serves goes on"))
            }
            Self::Applied { objects } => objects.iter().map(applied).collect(),
            Self::Preview(report) => {
                format!("{}{}", told(HEADING, "preview", &report.summary), report.differences(COMPARED)?)
            }
            Self::Refused { message } => told(BAD, "refused", message),
            Self::Serving { revision, seconds } => {
                told(GOOD, "serving", &format!("revision {revision} after {seconds:.1} s"))
            }
            Self::Failing { reason, message } => told(BAD, "failing", &format!("{reason}: {message}")),
            Self::Parents { kind, parents } => table(kind, parents),
            Self::Logged(line) => logged(line),
            Self::Ended { message } => format!("\n{message}\n"),
        })
    }
}

fn told(style: Style, label: &str, what: &str) -> String {
    format!("{style}{label:LABEL$}{style:#}{what}\n")
}

fn applied(object: &Applied) -> String {
    let (style, label) = match object.action {
        Action::Created => (GOOD, "created"),
        Action::Changed => (WARNING, "changed"),
        Action::Unchanged => (QUIET, "unchanged"),
        Action::Removed => (WARNING, "removed"),
        Action::Left => (QUIET, "left"),
    };
    let key = ObjectKey { namespace: object.namespace.clone(), name: object.name.clone() };
    let why = if object.action == Action::Left { ", since there are objects of its kind" } else { "" };
    told(style, label, &format!("{} {key}{why}", object.kind))
}

fn table(kind: &str, parents: &[Row]) -> String {
    let mut rows = vec![[kind.to_uppercase(), "SYNCED".to_owned(), "READY".to_owned(), "MESSAGE".to_owned()]];
    rows.extend(parents.iter().take(LISTED).map(|row| {
        let key = ObjectKey { namespace: row.namespace.clone(), name: row.name.clone() };
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
        [key.to_string(), value(&row.synced), value(&row.ready), row.message.clone()]
    }));
    let mut text = String::new();
    for (at, line) in output::columns(&rows).iter().enumerate() {
        let row = at.checked_sub(1).and_then(|at| parents.get(at));
        let is = |value: &Option<String>, what: &str| value.as_deref() == Some(what);
        let style = match row {
            None => QUIET,
            Some(row) if is(&row.synced, "False") => BAD,
            Some(row) if is(&row.synced, "True") && !is(&row.ready, "False") => GOOD,
            Some(_) => WARNING,
        };
        text += &format!("{style}{line}{style:#}\n");
    }
    match parents.len().checked_sub(LISTED).filter(|more| *more > 0) {
        Some(more) => text + &format!("… and {more} more\n"),
        None => text,
    }
}

fn logged(line: &Line) -> String {
    let style = match line.level.as_str() {
        "error" => BAD,
        "warn" => WARNING,
        _ => QUIET,
    };
    let parent = line.parent.as_deref().unwrap_or(if line.of_plugin { "plugin" } else { "host" });
    line.message.lines().map(|text| format!("{style}{parent} │{style:#} {text}\n")).collect()
}

/// Where events are shown. Its clones are the same one.
#[derive(Clone)]
pub(super) struct View {
    format: output::Format,
    screen: Arc<Mutex<Screen>>,
}

/// What is at the end of what was shown, and changes all the time; only where somebody looks.
struct Screen {
    is_terminal: bool,
    /// What goes on.
    now: Option<(String, Instant)>,
}

/// How often that is drawn.
const FRAME: Duration = Duration::from_millis(100);
const FRAMES: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
/// Back to the begin of the line, and all of it away.
const CLEAR: &str = "\r\x1b[2K";

impl View {
    /// A view on standard output.
    pub(super) fn new(format: output::Format) -> Self {
        let is_terminal = format == output::Format::Text && io::stdout().is_terminal();
        Self { format, screen: Arc::new(Mutex::new(Screen { is_terminal, now: None })) }
    }

    /// Whether somebody looks, and colours say something.
    pub(super) fn is_coloured(&self) -> bool {
        self.screen().is_terminal && anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never
    }

    /// Shows what has happened. What cannot be written nobody reads: that is no reason to end.
    pub(super) fn show(&self, event: &Event) {
        let screen = self.screen();
        let mut stdout = anstream::stdout().lock();
        let written = match self.format {
            output::Format::Json => serde_json::to_string(event).map_err(io::Error::from),
            output::Format::Text => event.text().map(|text| text.strip_suffix('\n').unwrap_or(&text).to_owned()),
        };
        let clear = if screen.now.is_some() && screen.is_terminal { CLEAR } else { "" };
        let _ = written.and_then(|text| writeln!(stdout, "{clear}{text}")).and_then(|()| stdout.flush());
    }

    /// Shows what goes on now; none: nothing does.
    pub(super) fn now(&self, what: Option<String>) {
        let mut screen = self.screen();
        if !screen.is_terminal {
            return;
        }
        match what {
            Some(what) => {
                let since = screen.now.as_ref().map_or_else(Instant::now, |(_, since)| *since);
                screen.now = Some((what, since));
            }
            None if screen.now.take().is_some() => {
                let mut stdout = io::stdout().lock();
                let _ = write!(stdout, "{CLEAR}").and_then(|()| stdout.flush());
            }
            None => {}
        }
    }

    /// Draws what goes on, without end.
    pub(super) async fn draw(self) {
        let mut frames = FRAMES.iter().cycle();
        loop {
            tokio::time::sleep(FRAME).await;
            let screen = self.screen();
            if let (Some((what, since)), Some(frame)) = (&screen.now, frames.next()) {
                let mut stdout = anstream::stdout().lock();
                let seconds = since.elapsed().as_secs();
                let _ = write!(stdout, "{CLEAR}{GOOD}{frame}{GOOD:#} {what}  {QUIET}{seconds} s{QUIET:#}")
                    .and_then(|()| stdout.flush());
            }
        }
    }

    /// A panic while it was held leaves a line half written at most.
    fn screen(&self) -> MutexGuard<'_, Screen> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file as its author calls it: from the folder of the plugin.
pub(super) fn called(file: &Path, directory: &Path) -> PathBuf {
    file.strip_prefix(directory).unwrap_or(file).to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(event: &Event) -> String {
        anstream::adapter::strip_str(&event.text().unwrap()).to_string()
    }

    fn row(name: &str, synced: &str, message: &str) -> Row {
        let (synced, ready) = (Some(synced.to_owned()), None);
        Row { namespace: Some("n".to_owned()), name: name.to_owned(), synced, ready, message: message.to_owned() }
    }

    #[test]
    fn a_person_reads_a_line_for_each_event_and_a_table_of_parents() {
        let built = Event::Built { bytes: Some(473_358), seconds: 0.27, findings: "warning: w\n".to_owned() };
        assert_eq!(text(&built), "warning: w\nbuilt     474 KB in 0.3 s\n");
        let applied =
            |action| Applied { action, kind: "Role".to_owned(), namespace: Some("n".to_owned()), name: "r".to_owned() };
        let objects = vec![applied(Action::Created), applied(Action::Left)];
        let expected = "created   Role n/r\nleft      Role n/r, since there are objects of its kind\n";
        assert_eq!(text(&Event::Applied { objects }), expected);
        let parents = vec![row("a", "True", ""), row("long", "False", "PluginTrap: it crashed")];
        let expected =
            "MYAPP   SYNCED  READY  MESSAGE\nn/a     True    -\nn/long  False   -      PluginTrap: it crashed\n";
        assert_eq!(text(&Event::Parents { kind: "MyApp".to_owned(), parents }), expected);
        let many = Event::Parents { kind: "MyApp".to_owned(), parents: vec![row("a", "True", ""); 23] };
        assert!(text(&many).ends_with("… and 3 more\n"));
    }

    #[test]
    fn a_line_stands_beside_its_parent() {
        let line = |parent: Option<&str>, of_plugin| Line {
            parent: parent.map(str::to_owned),
            level: "info".to_owned(),
            of_plugin,
            message: "one\ntwo".to_owned(),
        };
        assert_eq!(text(&Event::Logged(line(Some("n/a"), true))), "n/a │ one\nn/a │ two\n");
        assert_eq!(text(&Event::Logged(line(None, true))), "plugin │ one\nplugin │ two\n");
        assert_eq!(text(&Event::Logged(line(None, false))), "host │ one\nhost │ two\n");
    }

    #[test]
    fn the_keys_of_the_json_documents() {
        let json = |event: &Event| serde_json::to_value(event).unwrap();
        let parents = vec![row("a", "True", "")];
        let parents = json(&Event::Parents { kind: "MyApp".to_owned(), parents });
        let row = json!({"namespace": "n", "name": "a", "synced": "True", "ready": null, "message": ""});
        assert_eq!(parents, json!({"event": "parents", "kind": "MyApp", "parents": [row]}));
        let report = Report { revision: "r".to_owned(), summary: "s".to_owned(), seen: 0, parents: Vec::new() };
        let preview = json!({"event": "preview", "revision": "r", "summary": "s", "seen": 0, "parents": []});
        assert_eq!(json(&Event::Preview(report)), preview);
        let failed = json(&Event::BuildFailed { findings: "f".to_owned() });
        assert_eq!(failed, json!({"event": "buildFailed", "findings": "f"}));
    }
}
