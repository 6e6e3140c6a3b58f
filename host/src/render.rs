//! `pilothouse render`: what a plugin makes of a parent, without a cluster.
//!
//! The plugin runs in the same engine as in the host, with the default limits, and its answer is checked by the same rules: what
//! is accepted here is accepted there. What a cluster would know, and files do not, is assumed: see [`input`] for the objects and
//! [`kinds`] for how a kind is served.

use std::{
    future::{self, Ready},
    io::{self, Write as _},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::{
    crd::Limits,
    kinds,
    object::{Kind, Object},
    output,
    plugin::{Engine, Failure, GUEST_MEMORY, LoadError, Plugin, Request, Selector, describe::KindName, engine},
    reconcile::{self, desired::Rules},
    related,
    revision::Material,
    selection,
    state::{Desired, DesiredChild, Finalization},
};

pub mod compare;
pub mod input;
pub mod report;

use self::{
    compare::compare,
    input::{Parent, Seen},
    report::{Child, Rendered},
};

/// What to render.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// The component.
    plugin: PathBuf,
    /// The parent, a file in YAML or JSON; `-` for standard input.
    parent: PathBuf,
    /// Children that are there already, as `kubectl get -o yaml` prints them: what would change is shown instead of the children.
    /// With `--show-managed-fields` it also shows what the plugin no longer sends. Can be repeated.
    #[arg(long, value_name = "FILE")]
    children: Vec<PathBuf>,
    /// Objects that the plugin's relations select. Can be repeated.
    #[arg(long, value_name = "FILE")]
    related: Vec<PathBuf>,
    /// The plugin's config (`spec.config` of its reconciler), in YAML or JSON.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The time that the plugin is told, as 2026-01-31T12:00:00Z; by default the time of the clock.
    #[arg(long, value_name = "TIME")]
    now: Option<Timestamp>,
    /// Ask for the cleanup of a parent that is being deleted.
    #[arg(long)]
    finalize: bool,
    /// How the answer is shown.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
}

/// What the exit code is when children differ. Errors have 1.
pub const DIFFERENT: u8 = 2;

const AFTER_HELP: &str = "\
Standard output has the children alone, as YAML documents for `kubectl apply --dry-run=server -f -`, or with --children
what would change; status, conditions, events and notes go to standard error. With -o json all of it is one object.

What the files leave out of metadata is filled in, the same each time: namespace (default, or that of the parent), uid,
resourceVersion, creationTimestamp, and a generation of the parent. Defaults and rules of a schema are not applied, and
nothing asks whether an API server would take the children.

Exit codes: 0 rendered, and with --children nothing would change; 2 with --children, something would change; 1 an error,
such as a plugin that fails or an answer that the host would refuse.";

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The input cannot be used.
    #[error(transparent)]
    Input(#[from] input::Error),
    /// The file cannot be read.
    #[error("failed to read {file}")]
    Read {
        /// Which one.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// There is no engine.
    #[error(transparent)]
    Engine(#[from] engine::Error),
    /// The file is no plugin.
    #[error("{file} is no plugin that this host can run")]
    Plugin {
        /// Which file.
        file: String,
        /// Why not.
        source: LoadError,
    },
    /// Related objects for a plugin that would never see them.
    #[error("the plugin does not export relations, so it sees no related objects; leave out --related")]
    NoRelations,
    /// Cleanup by a plugin that has none.
    #[error("the plugin does not export finalizer, so it cleans nothing up; leave out --finalize")]
    NoFinalizer,
    /// The reconcile would fail in the host, too.
    #[error("{call} fails with {}{}", .source.category(), again(.source))]
    Failed {
        /// `reconcile` or `finalize`.
        call: &'static str,
        /// As the host would tell it on the parent.
        source: Box<reconcile::Error>,
    },
    /// The answer cannot be shown.
    #[error("failed to write the answer")]
    Write(#[from] io::Error),
}

/// What the host does about a failure that the plugin itself reports.
fn again(error: &reconcile::Error) -> String {
    match error {
        reconcile::Error::Refused(Failure::Retry(_)) => ", tried again with backoff".to_owned(),
        reconcile::Error::Refused(Failure::RetryAfter(wait, _)) => format!(", tried again after {wait:?}"),
        _ => String::new(),
    }
}

/// Renders a parent. Whether with `--children` something would change.
///
/// # Errors
/// If there is no answer, or none that the host would follow.
pub async fn render(options: &Options) -> Result<bool, Error> {
    let file = options.plugin.display().to_string();
    let bytes = match std::fs::read(&options.plugin) {
        Ok(bytes) => bytes,
        Err(source) => return Err(Error::Read { file, source }),
    };
    let engine = Arc::new(Engine::new(GUEST_MEMORY)?);
    let plugin = Plugin::open(&engine, None, bytes.clone(), Limits::default().of_a_call(), Arc::default()).await;
    let plugin = plugin.map_err(|source| Error::Plugin { file, source })?;
    let mut notes = Vec::new();
    let question = Question::read(options, &plugin, &bytes, &mut notes)?;
    let rendered = question.ask(&plugin, &mut notes).await?;
    for note in notes {
        writeln!(anstream::stderr(), "note: {note}")?;
    }
    match options.output {
        output::Format::Json => output::json(&rendered)?,
        output::Format::Text => {
            anstream::stdout().lock().write_all(rendered.children_text()?.as_bytes())?;
            anstream::stderr().lock().write_all(rendered.report_text()?.as_bytes())?;
        }
    }
    Ok(rendered.differs())
}

/// What the plugin is asked, and what its answer is held against.
struct Question {
    parent: Parent,
    child_kinds: Vec<Kind>,
    /// None: they are not known, so there is nothing to compare with.
    live: Option<Vec<Seen>>,
    /// What the plugin's relations can select.
    related: Arc<Vec<(KindName, Object)>>,
    request: Request,
    finalize: bool,
    limits: Limits,
}

impl Question {
    fn read(options: &Options, plugin: &Plugin, bytes: &[u8], notes: &mut Vec<String>) -> Result<Self, Error> {
        if options.finalize && !plugin.has_finalizer() {
            return Err(Error::NoFinalizer);
        }
        if !options.related.is_empty() && !plugin.has_relations() {
            return Err(Error::NoRelations);
        }
        let description = plugin.description();
        let mut served = |name: &KindName| {
            kinds::served(name, &description.crds).unwrap_or_else(|| {
                notes.push(format!("{name} is taken to have namespaces and a status: the plugin carries no CRD of it"));
                kinds::assumed(name)
            })
        };
        let parent_kind = served(&description.parent);
        let child_kinds = in_order(description.children.iter().map(&mut served).collect());
        let related_kinds = in_order(description.related.iter().map(&mut served).collect());

        let now = options.now.unwrap_or_else(Timestamp::now);
        let deleted_at = options.finalize.then(|| now.to_string());
        let text = input::read(&options.parent)?;
        let parent = input::parent(&input::name(&options.parent), &text, &parent_kind, deleted_at.as_deref())?;
        if parent.object.is_deleting() && !options.finalize {
            notes.push("the parent is being deleted: the host would ask for its cleanup (--finalize)".to_owned());
        }
        let mut live = seen(&options.children, &child_kinds, "children", &parent, 0)?;
        let related = seen(&options.related, &related_kinds, "related", &parent, live.len())?;
        live.retain(|child| {
            let other = input::other_controller(child, &parent, &parent_kind);
            if let Some(other) = &other {
                let kind = &child_kinds[child.key.kind].api.kind;
                notes.push(format!("{kind} {} belongs to {other}, so it is no child of the parent", child.key.object));
            }
            other.is_none()
        });

        if live.iter().any(|child| compare::applied_fields(&child.value).is_none()) {
            notes.push(
                "not all children tell their managed fields (kubectl get --show-managed-fields), so what the plugin no longer \
                 sends does not show"
                    .to_owned(),
            );
        }
        let config = match &options.config {
            Some(file) => input::config(&input::name(file), &input::read(file)?)?,
            None => Map::new(),
        };
        let material = Material { plugin: bytes.to_vec().into(), config };
        let limits = Limits::default();
        let deletion = match options.finalize {
            true => json!({"deletion": {"propagation": "Background"}, "everApplied": true}),
            false => json!({}),
        };
        let context = reconcile::call_context(now, &limits, 0, &material.id(), &deletion);
        let request = Request {
            parent: parent.object.json().to_owned(),
            children: live.iter().map(|seen| seen.object.json().to_owned()).collect(),
            config: Value::from(material.config).to_string(),
            context: context.to_string(),
            ..Request::default()
        };
        let live = (!options.children.is_empty()).then_some(live);
        let related = related.into_iter().map(|seen| (related_kinds[seen.key.kind].name(), seen.object)).collect();
        Ok(Self { parent, child_kinds, live, related: Arc::new(related), request, finalize: options.finalize, limits })
    }

    async fn ask(self, plugin: &Plugin, notes: &mut Vec<String>) -> Result<Rendered, Error> {
        let call = if self.finalize { "finalize" } else { "reconcile" };
        let answer = self.answer(plugin, notes).await;
        let answer = answer.map_err(|source| Error::Failed { call, source: source.into() })?;
        Ok(match answer {
            Answer::Desired(desired) => {
                let children = self.children(&desired.children)?;
                Rendered::of_desired(desired, children)
            }
            Answer::Finalization(finalization) => {
                let children = finalization.children.as_ref().map(|children| self.children(children)).transpose()?;
                Rendered::of_finalization(finalization, children)
            }
        })
    }

    /// As a reconcile of the host asks and checks.
    async fn answer(&self, plugin: &Plugin, notes: &mut Vec<String>) -> Result<Answer, reconcile::Error> {
        let left_out = Arc::new(Mutex::new(Vec::new()));
        let related = self.related(plugin, left_out.clone());
        let rules = Rules {
            // As a ClusterReconciler has it.
            scope: None,
            kinds: &self.child_kinds,
            declared: &plugin.description().children,
            parent: &self.parent.object,
            max_children: usize::try_from(self.limits.children).unwrap_or(usize::MAX),
        };
        let (request, limits) = (self.request.clone(), self.limits.of_a_call());
        let answer = if self.finalize {
            let answer = plugin.finalize(request, related, limits).await?.ok_or(reconcile::Error::NoCleanup)?;
            Answer::Finalization(rules.finalization(answer.map_err(reconcile::Error::Refused)?)?)
        } else {
            let answer = plugin.reconcile(request, related, limits).await?.map_err(reconcile::Error::Refused)?;
            Answer::Desired(rules.desired(answer)?)
        };
        notes.append(&mut left_out.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(answer)
    }

    /// The related objects that are selected. The others are noted: somebody meant them to be seen.
    fn related(
        &self,
        plugin: &Plugin,
        left_out: Arc<Mutex<Vec<String>>>,
    ) -> impl FnOnce(Vec<Selector>) -> Ready<Result<Vec<String>, reconcile::Error>> + Send + 'static + use<> {
        let (related, kinds) = (self.related.clone(), plugin.description().related.clone());
        move |selectors| {
            // What the reconciler grants is not known.
            let rules = selection::Rules { kinds: Some(&kinds), scope: None, secrets: None };
            let selections = match rules.relations(selectors) {
                Ok(selections) => selections,
                Err(error) => return future::ready(Err(related::Error::from(error).into())),
            };
            let is_selected = |(kind, object): &&(KindName, Object)| {
                selections.iter().any(|selection| selection.kind == *kind && selection.matches(object))
            };
            let (seen, others): (Vec<_>, Vec<_>) = related.iter().partition(is_selected);
            let note = |(kind, object): &(KindName, Object)| {
                format!(
                    "{} {} is not selected by the plugin's relations, so it does not see it",
                    kind.kind,
                    object.key()
                )
            };
            left_out.lock().unwrap_or_else(PoisonError::into_inner).extend(others.into_iter().map(note));
            future::ready(Ok(seen.into_iter().map(|(_, object)| object.json().to_owned()).collect()))
        }
    }

    /// The children that are wanted, then those that are there and are not.
    fn children(&self, wanted: &[DesiredChild]) -> io::Result<Vec<Child>> {
        let mut children = Vec::new();
        for child in wanted {
            let kind = &self.child_kinds[child.key.kind];
            let comparison = match &self.live {
                None => None,
                Some(live) => {
                    let live = live.iter().find(|live| live.key == child.key);
                    Some(compare(Some(&child.object), live.map(|live| &live.value), kind.is_built_in())?)
                }
            };
            children.push(Child::wanted(child, kind, comparison));
        }
        let is_wanted = |seen: &Seen| wanted.iter().any(|child| child.key == seen.key);
        for seen in self.live.iter().flatten().filter(|seen| !is_wanted(seen)) {
            let kind = &self.child_kinds[seen.key.kind];
            let comparison = compare(None, Some(&seen.value), kind.is_built_in())?;
            children.push(Child::named(&seen.key.object, kind, Some(comparison)));
        }
        Ok(children)
    }
}

enum Answer {
    Desired(Desired),
    Finalization(Finalization),
}

/// The order in which the contract shows objects.
fn in_order(mut kinds: Vec<Kind>) -> Vec<Kind> {
    kinds.sort_by(|a, b| (&a.api.kind, &a.api.api_version).cmp(&(&b.api.kind, &b.api.api_version)));
    kinds
}

/// The objects in some files. `before` is how many others there are beside the parent.
fn seen(files: &[PathBuf], kinds: &[Kind], role: &str, parent: &Parent, before: usize) -> Result<Vec<Seen>, Error> {
    let mut inputs = Vec::new();
    for file in files {
        inputs.extend(input::documents(&input::name(file), &input::read(file)?)?);
    }
    Ok(input::seen(inputs, kinds, role, &parent.object, before)?)
}
