//! MyApp as an operator in Rust, on kube-runtime, as its guide recommends: a controller that owns Deployments, its finalizer helper, a
//! server-side apply in each reconcile, and a status that is patched only when it differs. What it has to do is said by
//! `plugins/myapp`; parents of the benchmark have neither config nor anything outside of the cluster.
//!
//! It reconciles as many parents at a time as the others of the benchmark; the client has no limit of requests.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use k8s_openapi::{
    api::apps::v1::Deployment,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use kube::{
    Api, Client, CustomResource, Resource as _, ResourceExt as _,
    api::{Patch, PatchParams},
    runtime::{
        controller::{Action, Config, Controller},
        finalizer::{Error as FinalizerError, Event, finalizer},
        watcher,
    },
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

const FINALIZER: &str = "mygroup.example.com/finalizer";
const FIELD_MANAGER: &str = "myapp";
const AT_ONCE: u16 = 32;

/// What a user asks for.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[kube(group = "mygroup.example.com", version = "v1", kind = "MyApp", namespaced, status = "MyAppStatus")]
struct MyAppSpec {
    image: String,
    replicas: Option<i32>,
}

/// What is reported back.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
struct MyAppStatus {
    available_replicas: i32,
    observed_generation: Option<i64>,
    conditions: Vec<Condition>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the API server refused")]
    Kube(#[from] kube::Error),
    #[error("MyApp {0} has no UID")]
    NoUid(String),
    #[error(transparent)]
    Finalizer(Box<FinalizerError<Self>>),
}

async fn reconcile(app: Arc<MyApp>, client: Arc<Client>) -> Result<Action, Error> {
    let apps: Api<MyApp> = Api::namespaced(Client::clone(&client), &app.namespace().unwrap_or_default());
    let outcome = finalizer(&apps, FINALIZER, app, |event| async {
        match event {
            Event::Apply(app) => apply(&app, &apps).await,
            // Children need no cleanup; this is for what lives outside the cluster.
            Event::Cleanup(_) => Ok(Action::await_change()),
        }
    });
    outcome.await.map_err(|error| Error::Finalizer(Box::new(error)))
}

async fn apply(app: &MyApp, apps: &Api<MyApp>) -> Result<Action, Error> {
    let name = app.name_any();
    let owner = app.controller_owner_ref(&()).ok_or_else(|| Error::NoUid(name.clone()))?;
    let labels = json!({"app.kubernetes.io/name": "myapp", "app.kubernetes.io/instance": name});
    let wanted = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "spec": {
            "replicas": app.spec.replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "myapp", "image": app.spec.image}]},
            },
        },
    });
    let deployments: Api<Deployment> =
        Api::namespaced(apps.clone().into_client(), &app.namespace().unwrap_or_default());
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    let found = deployments.patch(&name, &parameters, &Patch::Apply(&wanted)).await?;

    let status = status(app, &found);
    if app.status.as_ref() != Some(&status) {
        apps.patch_status(&name, &PatchParams::default(), &Patch::Merge(json!({"status": status}))).await?;
    }
    Ok(Action::await_change())
}

fn status(app: &MyApp, found: &Deployment) -> MyAppStatus {
    let have = found.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0);
    let want = found.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let (status, reason) = if have >= want { ("True", "ReplicasAvailable") } else { ("False", "ReplicasUnavailable") };
    let before = app.status.iter().flat_map(|status| &status.conditions);
    let since = before.into_iter().find(|before| before.type_ == "Available" && before.status == status);
    let condition = Condition {
        type_: "Available".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: format!("{have} of {want} replicas are {}", word()),
        observed_generation: app.meta().generation,
        last_transition_time: since.map_or_else(|| Time(now()), |since| since.last_transition_time.clone()),
    };
    MyAppStatus { available_replicas: have, observed_generation: app.meta().generation, conditions: vec![condition] }
}

/// A logic that is changed says something else.
fn word() -> String {
    std::env::var("MYAPP_WORD").unwrap_or_else(|_| "available".to_owned())
}

/// To the second, as the API server keeps it: with more, a status would differ from itself.
fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default()
}

#[expect(clippy::needless_pass_by_value, reason = "the controller calls it so")]
fn after_a_failure(app: Arc<MyApp>, error: &Error, _: Arc<Client>) -> Action {
    tracing::warn!(app = app.name_any(), %error, "failed");
    Action::requeue(Duration::from_secs(1))
}

#[tokio::main]
async fn main() -> Result<(), kube::Error> {
    tracing_subscriber::fmt().json().with_writer(std::io::stderr).with_env_filter("info").init();
    let client = Client::try_default().await?;
    Controller::new(Api::<MyApp>::all(client.clone()), watcher::Config::default())
        .owns(Api::<Deployment>::all(client.clone()), watcher::Config::default())
        .with_config(Config::default().concurrency(AT_ONCE))
        .shutdown_on_signal()
        .run(reconcile, after_a_failure, Arc::new(client))
        .for_each(|outcome| async move {
            if let Err(error) = outcome {
                tracing::debug!(%error, "a reconcile ended");
            }
        })
        .await;
    Ok(())
}
