//! What is logged, as lines of the view: those of the plugin by parent, and of the host's own what has gone wrong.

use std::fmt::Debug;

use serde::Serialize;
use tokio::sync::mpsc;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

/// How many lines wait to be shown. A plugin that logs faster than that loses some.
const WAITING: usize = 1000;

/// The spans of which plugins' lines get their parent, and all that plugins log, with where they crashed.
pub(super) const FILTER: &str = "plugin=debug,pilothouse::plugin=debug";

/// A line that was logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Line {
    /// The parent that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) parent: Option<String>,
    /// `error`, `warn`, `info` or `debug`.
    pub(super) level: String,
    /// Whether the plugin has logged it, and not the host.
    #[serde(rename = "ofPlugin")]
    pub(super) of_plugin: bool,
    /// What it says.
    pub(super) message: String,
}

/// What takes the lines, and where they come out.
pub(super) fn lines() -> (Lines, mpsc::Receiver<Line>) {
    let (tell, told) = mpsc::channel(WAITING);
    (Lines(tell), told)
}

/// See the module's documentation.
pub(super) struct Lines(mpsc::Sender<Line>);

/// The parent that a span is about.
struct Parent(String);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let (Some(span), Some(parent)) = (context.span(id), fields.parent) {
            span.extensions_mut().insert(Parent(parent));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        let of_plugin = metadata.target() == "plugin";
        if !of_plugin && *metadata.level() > Level::WARN {
            return;
        }
        let mut parent = None;
        for span in context.event_scope(event).into_iter().flatten() {
            // What a plugin logs when it is only asked what it would do, it logs again when that is done.
            if span.name() == "preview" {
                return;
            }
            parent = parent.or_else(|| span.extensions().get::<Parent>().map(|parent| parent.0.clone()));
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let message = fields.message + &fields.others;
        let level = metadata.level().to_string().to_lowercase();
        let _ = self.0.try_send(Line { parent, level, of_plugin, message });
    }
}

/// The fields of a span or an event.
#[derive(Default)]
struct Fields {
    parent: Option<String>,
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "parent" => self.parent = Some(format!("{value:?}")),
            "message" => self.message = format!("{value:?}"),
            name => self.others += &format!(" {name}={value:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn a_line_of_a_plugin_tells_its_parent_and_the_host_tells_what_went_wrong() {
        let (layer, mut told) = lines();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::info_span!("reconcile", parent = %"default/web").in_scope(|| {
                let _call = tracing::debug_span!("plugin").entered();
                tracing::debug!(target: "plugin", "hello bucket={}", 1);
                tracing::info!("reconciled");
                tracing::warn!(reason = "Why", "it failed");
            });
            tracing::info_span!("preview").in_scope(|| tracing::info!(target: "plugin", "hello"));
        });
        let line = |level: &str, of_plugin, message: &str| Line {
            parent: Some("default/web".to_owned()),
            level: level.to_owned(),
            of_plugin,
            message: message.to_owned(),
        };
        assert_eq!(told.try_recv().ok(), Some(line("debug", true, "hello bucket=1")));
        assert_eq!(told.try_recv().ok(), Some(line("warn", false, "it failed reason=\"Why\"")));
        assert!(told.try_recv().is_err());
    }
}
