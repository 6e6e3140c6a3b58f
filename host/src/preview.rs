//! `pilothouse preview`: what would change in a cluster if a component were the plugin of a reconciler.
//!
//! The plugin runs here, with the rights of whoever asks, in the same engine and by the same rules as in the host. What it wants is held against
//! the children that there are, not against what the present plugin wants: that is what will be written, and it also shows where the cluster
//! is not yet as the present plugin wants it. Nothing is changed.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    path::PathBuf,
    sync::Arc,
};

use anstyle::Style;
use futures::FutureExt as _;
use jiff::Timestamp;
use kube::{
    Api, Client, Config,
    api::{DynamicObject, ListParams, TypeMeta},
    core::Selector,
    runtime::watcher,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use crate::{
    crd::{self, Grants},
    declaration::{self, Declaration},
    identity::{Identity, RECONCILER_LABEL},
    lookup,
    object::{Kind, Object, ObjectKey},
    output,
    plugin::{
        Access, CallError, Engine, GUEST_MEMORY, LoadError, Plugin, Reader, Request, Selector as Selects, engine,
    },
    reconcile::{
        self,
        desired::Rules,
        preview::{Change, Outcome, Summary},
    },
    related::{self, Shown},
    render::{
        compare::{Action, compare},
        input,
        report::Child,
    },
    revision::Material,
    secrets::Secrets,
    selection,
    state::{ChildKey, DesiredChild, Tie},
    telemetry,
};

/// What to look at.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Shows each child that would be made, changed or deleted, by parent, as it is and as the plugin wants it; with -o json as one
object. The config is that of the reconciler, unless --config is given. Nothing is asked of the host, and nothing written.
Needs get on the reconciler, and list on the kinds of its parents and children.

Exit codes: 0 nothing would change; 2 something would, or the plugin fails for a parent; 1 an error.")]
pub struct Options {
    /// The name of a ClusterReconciler, or NAMESPACE/NAME of a Reconciler.
    #[arg(value_parser = declaration::key_of)]
    reconciler: ObjectKey,
    /// The component.
    plugin: PathBuf,
    /// The config that the plugin would have, in YAML or JSON.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How the answer is shown.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing says where the API server is.
    #[error("found no cluster: neither in-cluster configuration nor a kubeconfig")]
    NoCluster(#[source] kube::config::InferConfigError),
    /// No connection can be set up.
    #[error("failed to set up the Kubernetes client")]
    Client(#[source] kube::Error),
    /// The reconciler cannot be read.
    #[error("failed to read {kind} {key}")]
    Reconciler {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        key: ObjectKey,
        /// Why.
        source: kube::Error,
    },
    /// The selector is none.
    #[error("spec.selector of the reconciler is no label selector")]
    Selector(#[source] kube::core::ParseExpressionError),
    /// The component cannot be read.
    #[error("failed to read {file}")]
    Read {
        /// Which one.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// The config cannot be used.
    #[error(transparent)]
    Config(#[from] input::Error),
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
    /// A kind is not there.
    #[error(transparent)]
    KindMissing(#[from] lookup::KindMissing),
    /// It reconciles something else.
    #[error("the plugin reconciles {to}, and the reconciler has parents of {from}")]
    ParentKind {
        /// What the reconciler has.
        from: String,
        /// What the plugin wants.
        to: String,
    },
    /// Objects cannot be listed.
    #[error("failed to list {0}")]
    List(String, #[source] kube::Error),
    /// An object is not as Kubernetes has it.
    #[error("failed to read one of {0}")]
    Object(String, #[source] serde_json::Error),
    /// The answer cannot be shown.
    #[error("failed to write the answer")]
    Write(#[from] io::Error),
}

/// What would change: the document of `pilothouse preview -o json`. Its keys are there to stay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The revision that the component would be, with its config.
    pub revision: String,
    /// In a sentence.
    pub summary: String,
    /// How many parents were looked at.
    pub seen: usize,
    /// The parents of which something changes, or for which the plugin fails.
    pub parents: Vec<Parent>,
}

/// A parent.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Parent {
    /// Its kind.
    pub kind: String,
    /// Its namespace, or null.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// Its children that change.
    pub children: Vec<Child>,
    /// Why there is no answer; missing if there is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Shows what would change; whether something would.
///
/// # Errors
/// If that cannot be seen.
pub async fn preview(options: &Options) -> Result<bool, Error> {
    let config = Config::infer().await.map_err(Error::NoCluster)?;
    let client = Client::try_from(config).map_err(Error::Client)?;
    let declared = declared(&client, &options.reconciler).await?;
    let file = options.plugin.display().to_string();
    let bytes = match std::fs::read(&options.plugin) {
        Ok(bytes) => bytes,
        Err(source) => return Err(Error::Read { file, source }),
    };
    let config = match &options.config {
        Some(file) => input::config(&input::name(file), &input::read(file)?)?,
        None => declared.terms.config.clone(),
    };
    let material = Material { plugin: bytes.into(), config };
    let limits = declared.terms.limits.of_a_call();
    let engine = Arc::new(Engine::new(GUEST_MEMORY)?);
    let access = Arc::new(access(&client, &declared));
    let plugin = Plugin::open(&engine, None, material.plugin.bytes.clone(), limits, access).await;
    let plugin = plugin.map_err(|source| Error::Plugin { file, source })?;

    let report = report(&client, &declared, &plugin, &material).await?;
    match options.output {
        output::Format::Json => output::json(&report)?,
        output::Format::Text => anstream::stdout().lock().write_all(report.text()?.as_bytes())?,
    }
    Ok(!report.parents.is_empty())
}

/// What would change if `plugin`, which is made of `material`, were that of the reconciler that is declared so.
///
/// # Errors
/// If that cannot be seen.
pub async fn report(
    client: &Client,
    declared: &Declaration,
    plugin: &Plugin,
    material: &Material,
) -> Result<Report, Error> {
    Seen::list(client, declared, plugin).await?.report(declared, plugin, material).await
}

async fn declared(client: &Client, key: &ObjectKey) -> Result<Declaration, Error> {
    let found = match &key.namespace {
        None => Api::<crd::ClusterReconciler>::all(client.clone()).get(&key.name).await.map(Declaration::from),
        Some(namespace) => {
            Api::<crd::Reconciler>::namespaced(client.clone(), namespace).get(&key.name).await.map(Declaration::from)
        }
    };
    found.map_err(|source| Error::Reconciler { kind: declaration::kind(key), key: key.clone(), source })
}

/// What the plugin may reach: it reads as who previews, as far as the reconciler grants it.
pub(crate) fn access(client: &Client, declared: &Declaration) -> Access {
    let Declaration { grants, plugin: source, .. } = declared;
    let own: Vec<_> = grants.secrets().chain(&source.pull_secrets).cloned().collect();
    let access = Access::new(Arc::default(), Arc::new(Secrets::new(client.clone(), watcher::Config::default(), None)));
    access.grant(Grants { kube: grants.kube.clone(), ..Grants::default() }, &own);
    access.read_as(Some(Reader::new(client.clone(), declared.scope().map(str::to_owned))));
    access
}

/// What there is.
struct Seen {
    client: Client,
    parents: Vec<Arc<Object>>,
    parent_kind: Kind,
    child_kinds: Vec<Kind>,
    /// Everything of these kinds that the reconciler has made, as it is and as the plugin sees it.
    children: BTreeMap<ChildKey, (Value, Object)>,
}

impl Seen {
    async fn list(client: &Client, declared: &Declaration, plugin: &Plugin) -> Result<Self, Error> {
        let description = plugin.description();
        let parent_kind = lookup::kind(client, &description.parent).await?;
        let status = declared.status.clone().unwrap_or_default();
        let api = &parent_kind.api;
        let full = format!("{}.{}.{}", api.kind, api.version, api.group);
        if let Some(from) = status.parent_kind.filter(|from| without_version(from) != without_version(&full)) {
            return Err(Error::ParentKind { from, to: full });
        }
        let kinds: Vec<_> = description.children.iter().collect();
        let child_kinds = lookup::child_kinds(client, &[], &kinds, &status.applied_kinds).await?;

        let selector = declared.terms.selector.clone().map(Selector::try_from);
        let selector = selector.transpose().map_err(Error::Selector)?.unwrap_or_default();
        let params = ListParams::default().labels_from(&selector);
        let parents = list(&parent_kind.objects::<Object>(client, declared.scope()), &parent_kind, params).await?;
        let parents = parents.into_iter().map(|parent| Arc::new(parent.with_kind(&parent_kind.api))).collect();
        let ours = format!("{RECONCILER_LABEL}={}", Identity::of(&declared.key).label());
        let mut children = BTreeMap::new();
        for (place, kind) in child_kinds.iter().enumerate() {
            let params = ListParams::default().labels(&ours);
            for mut child in list(&kind.objects::<DynamicObject>(client, declared.scope()), kind, params).await? {
                // Lists of built-in kinds leave that out of their items.
                child.types = Some(TypeMeta { api_version: kind.api.api_version.clone(), kind: kind.api.kind.clone() });
                let unreadable = |source| Error::Object(kind.resource(), source);
                let value = serde_json::to_value(child).map_err(unreadable)?;
                let object = Object::from_json(&value.to_string()).map_err(unreadable)?;
                children.insert(ChildKey { kind: place, object: object.key() }, (value, object));
            }
        }
        Ok(Self { client: client.clone(), parents, parent_kind, child_kinds, children })
    }

    async fn report(&self, declared: &Declaration, plugin: &Plugin, material: &Material) -> Result<Report, Error> {
        let now = Timestamp::now();
        let revision = material.id();
        let config = Value::from(material.config.clone()).to_string();
        let context = reconcile::call_context(now, &declared.terms.limits, 0, &revision, &json!({})).to_string();
        // Those in deletion are asked for their cleanup only.
        let living: Vec<_> = self.parents.iter().filter(|parent| !parent.is_deleting()).collect();
        let mut summary = Summary::of(living.len());
        let mut parents = Vec::new();
        for parent in living {
            let ask = async {
                let children = self.owned_by(parent).map(|(_, (_, child))| child.json().to_owned()).collect();
                let request = Request {
                    parent: parent.json().to_owned(),
                    children,
                    config: config.clone(),
                    context: context.clone(),
                    ..Request::default()
                };
                let limits = declared.terms.limits.of_a_call();
                let answer = plugin.preview(request, self.related(declared, plugin), limits).await?;
                let answer = answer.map_err(reconcile::Error::Refused)?;
                let rules = Rules {
                    kinds: &self.child_kinds,
                    declared: &plugin.description().children,
                    parent,
                    scope: declared.scope(),
                    max_children: usize::try_from(declared.terms.limits.children).unwrap_or(usize::MAX),
                };
                Ok::<_, reconcile::Error>(rules.desired(answer)?)
            };
            let mut found = Parent {
                kind: self.parent_kind.api.kind.clone(),
                namespace: parent.key().namespace,
                name: parent.name().to_owned(),
                children: Vec::new(),
                error: None,
            };
            let mut outcome = Outcome::default();
            match ask.await {
                Ok(desired) => {
                    for (kind, change, child) in self.changes(parent, &desired.children)? {
                        outcome.changes.push((kind, change));
                        found.children.push(child);
                    }
                }
                Err(error) => {
                    found.error = Some(format!("{}: {}", error.category(), telemetry::chain(&error)));
                    outcome.unseen = error.is_unseen();
                }
            }
            if !outcome.unseen {
                outcome.error.clone_from(&found.error);
            }
            summary.add(&parent.key(), outcome);
            if !found.children.is_empty() || found.error.is_some() {
                parents.push(found);
            }
        }
        Ok(Report { revision, summary: summary.to_string(), seen: summary.seen, parents })
    }

    /// The objects that the plugin's relations select, read as who previews.
    fn related(
        &self,
        declared: &Declaration,
        plugin: &Plugin,
    ) -> impl FnOnce(Vec<Selects>) -> Shown + Send + 'static + use<> {
        let Declaration { grants, plugin: source, .. } = declared;
        let (client, secrets) = (self.client.clone(), grants.readable_secrets(&source.pull_secrets));
        let (kinds, scope) = (plugin.description().related.clone(), declared.scope().map(str::to_owned));
        // It is asked for on the threads of the guests, which have no network.
        let threads = Handle::current();
        move |selectors| {
            async move {
                let rules = selection::Rules { kinds: Some(&kinds), scope: scope.as_deref(), secrets: Some(&secrets) };
                let selections = rules.relations(selectors).map_err(related::Error::from)?;
                let listed = threads.spawn(async move { related::list(&client, &selections).await });
                Ok(listed.await.map_err(|_| CallError::Host)??)
            }
            .boxed()
        }
    }

    fn owned_by<'a>(&'a self, parent: &'a Object) -> impl Iterator<Item = (&'a ChildKey, &'a (Value, Object))> {
        self.children.iter().filter(|(key, (_, child))| {
            child.parent_uid(&self.child_kinds[key.kind].group_kind()) == Some(parent.uid())
        })
    }

    /// The children that change: their kind, and how.
    fn changes(&self, parent: &Object, wanted: &[DesiredChild]) -> io::Result<Vec<(String, Change, Child)>> {
        let owned: BTreeMap<_, _> = self.owned_by(parent).collect();
        let mut compared = Vec::new();
        for child in wanted {
            // What nothing ties to its parent is found by its name.
            let loose = || self.children.get(&child.key).filter(|_| child.tie == Tie::Loose);
            let live = owned.get(&child.key).copied().or_else(loose).map(|(live, _)| live);
            let kind = &self.child_kinds[child.key.kind];
            let comparison = compare(Some(&child.object), live, kind.is_built_in())?;
            compared.push((kind, comparison.action, Child::wanted(child, kind, Some(comparison))));
        }
        for (key, (live, _)) in owned.iter().filter(|(key, _)| !wanted.iter().any(|child| child.key == ***key)) {
            let kind = &self.child_kinds[key.kind];
            let comparison = compare(None, Some(live), kind.is_built_in())?;
            compared.push((kind, comparison.action, Child::named(&key.object, kind, Some(comparison))));
        }
        let changes = compared.into_iter().filter_map(|(kind, action, child)| {
            let change = match action {
                Action::Create => Change::Create,
                Action::Change => Change::Update,
                Action::Delete => Change::Delete,
                Action::Unchanged => return None,
            };
            Some((kind.group_kind(), change, child))
        });
        Ok(changes.collect())
    }
}

/// `Kind.group` of `Kind.version.group`.
pub(crate) fn without_version(full: &str) -> (&str, &str) {
    let (kind, rest) = full.split_once('.').unwrap_or((full, ""));
    (kind, rest.split_once('.').map_or("", |(_, group)| group))
}

/// How many objects are listed at once.
const PAGE: u32 = 500;

async fn list<K>(api: &Api<K>, kind: &Kind, params: ListParams) -> Result<Vec<K>, Error>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut params = params.limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = api.list(&params).await.map_err(|source| Error::List(kind.resource(), source))?;
        all.extend(page.items);
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(all);
        }
    }
}

const PARENT: Style = Style::new().bold().underline();

impl Report {
    /// For a person: the differences, then the sentence.
    fn text(&self) -> io::Result<String> {
        Ok(format!("{}revision {}: {}\n", self.differences(usize::MAX)?, self.revision, self.summary))
    }

    /// The differences by parent, then a line for each child. Of no more than so many parents.
    pub(crate) fn differences(&self, shown: usize) -> io::Result<String> {
        let mut text = String::new();
        let mut rows = Vec::new();
        for parent in self.parents.iter().take(shown) {
            let key = ObjectKey { namespace: parent.namespace.clone(), name: parent.name.clone() };
            text += &format!("{PARENT}{} {key}{PARENT:#}\n", parent.kind);
            for child in &parent.children {
                text += &child.text()?;
                let named = ObjectKey { namespace: child.namespace.clone(), name: child.name.clone() };
                let action = match child.action {
                    Some(Action::Create) => "create",
                    Some(Action::Delete) => "delete",
                    _ => "change",
                };
                rows.push([key.to_string(), action.to_owned(), child.kind.clone(), named.to_string()]);
            }
            if let Some(error) = &parent.error {
                text += &format!("{error}\n");
                rows.push([key.to_string(), "fail".to_owned(), String::new(), String::new()]);
            }
            text.push('\n');
        }
        if !rows.is_empty() {
            rows.insert(0, ["PARENT", "ACTION", "KIND", "CHILD"].map(str::to_owned));
        }
        for line in output::columns(&rows) {
            text += &format!("{line}\n");
        }
        if let Some(more) = self.parents.len().checked_sub(shown).filter(|more| *more > 0) {
            text += &format!("… and {more} more parents\n");
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kinds, plugin::describe::KindName, render::compare::Comparison};

    #[test]
    fn a_version_of_a_kind_is_the_same_kind() {
        assert_eq!(without_version("MyApp.v1.g.example.com"), without_version("MyApp.v2beta1.g.example.com"));
        assert_ne!(without_version("MyApp.v1.g.example.com"), without_version("MyApp.v1.other.example.com"));
        assert_eq!(without_version("ConfigMap.v1."), ("ConfigMap", ""));
        assert_eq!(without_version("ConfigMap.v1"), ("ConfigMap", ""));
    }

    #[test]
    fn a_person_reads_each_difference_a_table_and_a_sentence() {
        let kind = kinds::assumed(&KindName { api_version: "v1".to_owned(), kind: "ConfigMap".to_owned() });
        let key = ObjectKey { namespace: Some("n".to_owned()), name: "c".to_owned() };
        let comparison = Comparison { action: Action::Change, diff: "-a: 1\n+a: 2\n".to_owned() };
        let parent = |name: &str, children, error: Option<&str>| Parent {
            kind: "Widget".to_owned(),
            namespace: Some("n".to_owned()),
            name: name.to_owned(),
            children,
            error: error.map(str::to_owned),
        };
        let children = vec![Child::named(&key, &kind, Some(comparison))];
        let report = Report {
            revision: "r".to_owned(),
            summary: "of 3 parents 1 changes: …".to_owned(),
            seen: 3,
            parents: vec![parent("w", children, None), parent("x", Vec::new(), Some("PluginTrap: it crashed"))],
        };
        let expected = "Widget n/w\nchange ConfigMap n/c\n-a: 1\n+a: 2\n\nWidget n/x\nPluginTrap: it crashed\n\n\
            PARENT  ACTION  KIND       CHILD\nn/w     change  ConfigMap  n/c\nn/x     fail\n\
            revision r: of 3 parents 1 changes: …\n";
        let text = report.text().unwrap();
        assert_eq!(anstream::adapter::strip_str(&text).to_string(), expected);
        let text = anstream::adapter::strip_str(&report.differences(1).unwrap()).to_string();
        assert!(
            !text.contains("n/x") && text.contains("n/w     change") && text.contains("… and 1 more parents\n"),
            "{text}"
        );
        let none = Report { parents: Vec::new(), ..report };
        assert_eq!(none.text().unwrap(), "revision r: of 3 parents 1 changes: …\n");
    }
}
