//! `pilothouse release`: takes the finalizers of this host off all objects of a kind, where there is no host any more that would.
//!
//! It is the last resort of an administrator, and runs with their rights, by the same guarded writes as the host itself. Nothing is
//! cleaned up, so it shows first what it would do, and each object gets an Event that says who asked.

use std::{
    fmt::Write as _,
    io::{self, BufRead as _, Write as _},
};

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::{
    Api, Client, Config,
    api::{ListParams, PostParams},
    discovery::{Discovery, Scope},
};
use serde::Serialize;

use crate::{
    declaration,
    identity::{self, Identity},
    lease, lookup,
    object::{Kind, Object, ObjectKey},
    output,
    reconcile::{
        Events,
        finalizer::{self, Ours},
        remote::Record,
    },
    telemetry,
};

/// What to release.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 all of them are released, 1 something failed, or it was not confirmed.
Needs list and patch on the kind, get on the Lease of the host, and create on Events (events.k8s.io).")]
pub struct Options {
    /// The kind, as in myapps, MyApp or myapps.mygroup.example.com.
    kind: String,
    /// Only the finalizer of this reconciler: the name of a ClusterReconciler, or NAMESPACE/NAME of a Reconciler.
    #[arg(long, value_name = "NAME", value_parser = declaration::key_of)]
    reconciler: Option<ObjectKey>,
    /// Do not ask.
    #[arg(short, long)]
    yes: bool,
    /// Also while a host is at work, which may put them on again.
    #[arg(long)]
    force: bool,
    /// Where the Lease of the host is.
    #[arg(long, value_name = "NAMESPACE", default_value = lease::NAMESPACE)]
    leader_election_namespace: String,
    /// How the outcome is shown; with json the question goes to standard error.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
}

/// Why nothing was released.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing says where the API server is.
    #[error("found no cluster: neither in-cluster configuration nor a kubeconfig")]
    NoCluster(#[source] kube::config::InferConfigError),
    /// No connection can be set up.
    #[error("failed to set up the Kubernetes client")]
    Client(#[source] kube::Error),
    /// The API server does not tell its kinds.
    #[error("failed to ask the API server for its kinds")]
    Kinds(#[source] kube::Error),
    /// There is no such kind.
    #[error("the API server serves no kind {0}; see `kubectl api-resources`")]
    NoKind(String),
    /// There are several.
    #[error("{0} can be any of {1}; name one of them in full")]
    Ambiguous(String, String),
    /// The Lease cannot be read.
    #[error("failed to read the Lease by which hosts say that they are at work; with --force it is not read")]
    Lease(#[source] kube::Error),
    /// A host is at work.
    #[error(
        "a host is at work ({0} holds the Lease): it releases what it should, and may put finalizers on again; delete its reconcilers \
         instead, or stop it first, or use --force"
    )]
    HostAtWork(String),
    /// The objects cannot be listed.
    #[error("failed to list {0}")]
    List(String, #[source] kube::Error),
    /// The API server does not say who asks.
    #[error("failed to ask the API server who you are, which the Events are to say")]
    WhoAmI(#[source] kube::Error),
    /// The user has not said yes.
    #[error("nothing was released, since it was not confirmed; --yes does without")]
    NotConfirmed,
    /// The outcome cannot be shown.
    #[error("failed to write the outcome")]
    Output(#[from] io::Error),
}

/// What was done: the document of `pilothouse release -o json`. Its keys are there to stay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The kind, as `plural.group`.
    pub resource: String,
    /// Who asked, as the API server knows them.
    pub user: String,
    /// The objects that carried finalizers of ours.
    pub objects: Vec<Released>,
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Released {
    /// Its namespace; missing for one of cluster scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// Whether it is being deleted, and so is gone once nobody else holds it.
    pub deleting: bool,
    /// The finalizers of ours.
    pub finalizers: Vec<String>,
    /// How many children it may have that nobody is going to delete: in other namespaces, or of cluster scope.
    pub remote_children: usize,
    /// Why it was not released; missing if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Releases all objects of a kind; whether all of them are.
///
/// # Errors
/// If it is not to be done, or cannot even be begun.
pub async fn release(options: &Options) -> Result<bool, Error> {
    let config = Config::infer().await.map_err(Error::NoCluster)?;
    let client = Client::try_from(config).map_err(Error::Client)?;
    let kind = find(&client, &options.kind).await?;
    if !options.force {
        let at_work = lease::at_work(client.clone(), &options.leader_election_namespace).await.map_err(Error::Lease)?;
        if let Some(holder) = at_work {
            return Err(Error::HostAtWork(holder));
        }
    }
    let only = options.reconciler.as_ref().map(|key| Identity::of(key).finalizer());
    let held = held(&client, &kind, only.as_deref()).await?;
    let user = who_am_i(&client).await?;
    let mut report = Report { resource: kind.resource(), user, objects: held.iter().map(Released::of).collect() };
    if !held.is_empty() {
        let mut shown: Box<dyn io::Write> = match options.output {
            output::Format::Text => Box::new(io::stdout()),
            output::Format::Json => Box::new(io::stderr()),
        };
        shown.write_all(report.table().as_bytes())?;
        if !options.yes && !confirm()? {
            return Err(Error::NotConfirmed);
        }
    }
    let events = Events::new(client.clone());
    for (held, released) in held.iter().zip(&mut report.objects) {
        match release_one(&client, &kind, held).await {
            Ok(()) => {
                let names = held.finalizers.join(", ");
                let note = format!("{} took {names} off with `pilothouse release`, without cleanup", report.user);
                events.publish_handled(&held.object, &kind, RELEASED, &note).await;
            }
            Err(error) => released.error = Some(telemetry::chain(&error)),
        }
    }
    events.flush().await;
    match options.output {
        output::Format::Text => io::stdout().write_all(report.outcome().as_bytes())?,
        output::Format::Json => output::json(&report)?,
    }
    Ok(report.objects.iter().all(|object| object.error.is_none()))
}

/// The reason of the Event.
const RELEASED: &str = "Released";
/// How many objects are listed at once.
const PAGE: u32 = 500;
/// How often the finalizers of an object are written from fresh when others write at the same time.
const TRIES: usize = 5;

/// An object with finalizers of ours.
struct Held {
    object: Object,
    finalizers: Vec<String>,
}

async fn find(client: &Client, wanted: &str) -> Result<Kind, Error> {
    let discovery = Discovery::new(client.clone()).run().await.map_err(Error::Kinds)?;
    let served = discovery.groups().flat_map(|group| group.recommended_resources()).map(|(api, capabilities)| {
        let has_status = capabilities.subresources.iter().any(|(it, _)| it.plural.ends_with("status"));
        Kind { api, namespaced: capabilities.scope == Scope::Namespaced, has_status }
    });
    choose(served, wanted)
}

fn choose(served: impl Iterator<Item = Kind>, wanted: &str) -> Result<Kind, Error> {
    let is_meant = |kind: &Kind| {
        let names = [kind.api.plural.clone(), kind.api.kind.clone(), kind.resource(), kind.group_kind()];
        names.iter().any(|name| name.eq_ignore_ascii_case(wanted))
    };
    let mut found: Vec<_> = served.filter(is_meant).collect();
    match (found.pop(), found.is_empty()) {
        (None, _) => Err(Error::NoKind(wanted.to_owned())),
        (Some(kind), true) => Ok(kind),
        (Some(last), false) => {
            found.push(last);
            let names: Vec<_> = found.iter().map(Kind::resource).collect();
            Err(Error::Ambiguous(wanted.to_owned(), names.join(", ")))
        }
    }
}

async fn held(client: &Client, kind: &Kind, only: Option<&str>) -> Result<Vec<Held>, Error> {
    let api = kind.objects(client, None);
    let mut held = Vec::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = api.list(&params).await.map_err(|error| Error::List(kind.resource(), error))?;
        held.extend(page.items.into_iter().filter_map(|object| Held::of(object, only)));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(held);
        }
    }
}

async fn who_am_i(client: &Client) -> Result<String, Error> {
    let review = Api::all(client.clone()).create(&PostParams::default(), &SelfSubjectReview::default()).await;
    let user = review.map_err(Error::WhoAmI)?.status.and_then(|status| status.user_info);
    Ok(user.and_then(|user| user.username).unwrap_or_default())
}

async fn release_one(client: &Client, kind: &Kind, held: &Held) -> Result<(), finalizer::Error> {
    let ObjectKey { namespace, name } = held.object.key();
    let api = kind.objects(client, namespace.as_deref());
    let ours = Ours::new(held.finalizers[0].clone(), held.finalizers[1..].to_vec());
    let mut object = held.object.clone();
    for tried in 1.. {
        match finalizer::remove(&api, &object, &ours).await {
            Ok(_) | Err(finalizer::Error::Gone(_)) => break,
            Err(finalizer::Error::Conflict(error)) if tried < TRIES => {
                let fresh = lookup::get(&api, &name).await.map_err(finalizer::Error::Request)?;
                match fresh.filter(|fresh| fresh.uid() == object.uid() && ours.are_on(fresh)) {
                    Some(fresh) if fresh.finalizers() != object.finalizers() => object = fresh,
                    // It is not the finalizers that the API server objects to.
                    Some(_) => return Err(finalizer::Error::Request(error)),
                    None => break,
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn confirm() -> Result<bool, Error> {
    let mut stderr = io::stderr().lock();
    write!(
        stderr,
        "Take them off, without cleanup? What is left outside the cluster is yours, and so are the children. [y/N] "
    )?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

impl Held {
    fn of(object: Object, only: Option<&str>) -> Option<Self> {
        let is_ours = |name: &str| only.map_or_else(|| identity::is_finalizer(name), |only| name == only);
        let finalizers: Vec<_> = object.finalizers().iter().filter(|name| is_ours(name)).cloned().collect();
        (!finalizers.is_empty()).then_some(Self { object, finalizers })
    }
}

impl Released {
    fn of(held: &Held) -> Self {
        let ObjectKey { namespace, name } = held.object.key();
        Self {
            namespace,
            name,
            deleting: held.object.is_deleting(),
            finalizers: held.finalizers.clone(),
            remote_children: Record::of(&held.object).map_or(0, |record| record.children.len()),
            error: None,
        }
    }

    fn key(&self) -> String {
        ObjectKey { namespace: self.namespace.clone(), name: self.name.clone() }.to_string()
    }
}

impl Report {
    /// What is going to be done.
    fn table(&self) -> String {
        let mut rows = vec![["OBJECT", "STATE", "CHILDREN ELSEWHERE", "FINALIZERS"].map(str::to_owned)];
        rows.extend(self.objects.iter().map(|object| {
            let state = if object.deleting { "deleting" } else { "live" };
            [object.key(), state.to_owned(), object.remote_children.to_string(), object.finalizers.join(",")]
        }));
        output::columns(&rows).iter().fold(String::new(), |mut text, line| {
            let _ = writeln!(text, "{line}");
            text
        })
    }

    /// What was done.
    fn outcome(&self) -> String {
        if self.objects.is_empty() {
            return format!("no finalizer of ours is on any of {}\n", self.resource);
        }
        self.objects.iter().fold(String::new(), |mut text, object| {
            let _ = match &object.error {
                None => writeln!(text, "{} released", object.key()),
                Some(error) => writeln!(text, "{} NOT released: {error}", object.key()),
            };
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use kube::{core::GroupVersionKind, discovery::ApiResource};
    use serde_json::json;

    use super::*;

    const OURS: &str = "pilothouse.dev/c-myapp-5c40a47d";

    fn held(only: Option<&str>) -> Option<Held> {
        let object = json!({"metadata": {"name": "w", "namespace": "n", "finalizers": ["t.example/hold", OURS, "pilothouse.dev/n-x-0123abcd"]}});
        Held::of(Object::from_json(&object.to_string()).unwrap(), only)
    }

    #[test]
    fn c16_only_finalizers_of_ours_are_taken_off() {
        assert_eq!(held(None).unwrap().finalizers, [OURS, "pilothouse.dev/n-x-0123abcd"]);
        assert_eq!(held(Some(OURS)).unwrap().finalizers, [OURS]);
        assert!(held(Some("pilothouse.dev/c-other-00000000")).is_none());
    }

    #[test]
    fn a_kind_is_named_as_kubectl_takes_it_and_only_if_it_is_one() {
        let kinds = || {
            [("a.example", "Widget", "widgets"), ("b.example", "Widget", "widgets"), ("", "ConfigMap", "configmaps")]
                .map(|(group, kind, plural)| {
                    let api = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, "v1", kind), plural);
                    Kind { api, namespaced: true, has_status: false }
                })
        };
        let chosen = |wanted| choose(kinds().into_iter(), wanted).map(|kind| kind.resource());
        for (wanted, resource) in [
            ("configmap", "configmaps"),
            ("ConfigMaps", "configmaps"),
            ("widgets.a.example", "widgets.a.example"),
            ("Widget.b.example", "widgets.b.example"),
        ] {
            assert_eq!(chosen(wanted).unwrap(), resource);
        }
        let ambiguous = chosen("widget").unwrap_err().to_string();
        assert!(ambiguous.contains("widgets.a.example, widgets.b.example"), "{ambiguous}");
        assert!(matches!(chosen("gadgets"), Err(Error::NoKind(_))));
    }

    #[test]
    fn what_is_shown_names_each_object() {
        let mut report = Report {
            resource: "widgets.t.example".to_owned(),
            user: "ada".to_owned(),
            objects: vec![Released::of(&held(Some(OURS)).unwrap())],
        };
        let expected = "OBJECT  STATE  CHILDREN ELSEWHERE  FINALIZERS\nn/w     live   0                   pilothouse.dev/c-myapp-5c40a47d\n";
        assert_eq!(report.table(), expected);
        assert_eq!(report.outcome(), "n/w released\n");
        report.objects[0].error = Some("no".to_owned());
        assert_eq!(report.outcome(), "n/w NOT released: no\n");
        report.objects.clear();
        assert_eq!(report.outcome(), "no finalizer of ours is on any of widgets.t.example\n");
    }
}
