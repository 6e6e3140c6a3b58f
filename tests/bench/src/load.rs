//! The users of the benchmark: they create, edit and delete parents, and watch what comes of it.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
    runtime::{WatchStreamExt as _, watcher, watcher::Event},
};
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinSet, time::timeout};

/// How many requests of users are under way at once.
const AT_ONCE: usize = 16;
/// Far more than anybody takes.
const PATIENCE: Duration = Duration::from_secs(1800);

/// The parents and children as a user sees them.
#[derive(Default)]
pub(crate) struct Seen {
    parents: HashMap<String, Parent>,
    /// With their images.
    deployments: HashMap<String, String>,
    converged: usize,
    /// How often one of them was written.
    writes: u32,
}

struct Parent {
    /// Whether its operator has said all that is to be said: a finalizer, and a status with the replicas and the condition.
    has_all: bool,
    /// Of its condition.
    message: String,
}

impl Seen {
    fn has_converged(&self, name: &str) -> bool {
        self.parents.get(name).is_some_and(|parent| parent.has_all) && self.deployments.contains_key(name)
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Self)) {
        self.converged -= usize::from(self.has_converged(name));
        change(self);
        self.converged += usize::from(self.has_converged(name));
    }

    fn parent(&mut self, parent: &DynamicObject, exists: bool) {
        let name = parent.name_any();
        self.change(&name, |seen| {
            if exists {
                seen.parents.insert(name.clone(), Parent::read(parent));
            } else {
                seen.parents.remove(&name);
            }
        });
    }

    fn deployment(&mut self, deployment: &DynamicObject, exists: bool) {
        let name = deployment.name_any();
        let image = &deployment.data["spec"]["template"]["spec"]["containers"][0]["image"];
        self.change(&name, |seen| {
            if exists {
                seen.deployments.insert(name.clone(), image.as_str().unwrap_or_default().to_owned());
            } else {
                seen.deployments.remove(&name);
            }
        });
    }
}

impl Parent {
    fn read(parent: &DynamicObject) -> Self {
        let status = &parent.data["status"];
        let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
        let available = conditions.iter().find(|condition| condition["type"] == "Available");
        let has_status = status["availableReplicas"].is_number();
        let is_available = available.is_some_and(|condition| condition["status"] == "True");
        let message = available.and_then(|condition| condition["message"].as_str()).unwrap_or_default();
        Self { has_all: !parent.finalizers().is_empty() && has_status && is_available, message: message.to_owned() }
    }
}

/// See the module's documentation.
pub(crate) struct Load {
    parents: Api<DynamicObject>,
    deployments: Api<DynamicObject>,
    seen: watch::Receiver<Seen>,
    /// Ended when dropped.
    _followers: JoinSet<()>,
}

impl Load {
    /// Begins to watch.
    pub(crate) fn new(client: &Client) -> Self {
        let api = |group: &str, version: &str, kind: &str| {
            let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
            Api::<DynamicObject>::default_namespaced_with(client.clone(), &kind)
        };
        let parents = api("mygroup.example.com", "v1", "MyApp");
        let deployments = api("apps", "v1", "Deployment");
        let (sender, seen) = watch::channel(Seen::default());
        let mut followers = JoinSet::new();
        followers.spawn(follow(parents.clone(), sender.clone(), Seen::parent));
        followers.spawn(follow(deployments.clone(), sender, Seen::deployment));
        Self { parents, deployments, seen, _followers: followers }
    }

    /// Creates parents as fast as the API server takes them.
    pub(crate) async fn create(&self, names: &[String]) -> anyhow::Result<()> {
        let create = |name: &String| {
            let parent = parent(name);
            async move {
                self.parents
                    .create(&PostParams::default(), &serde_json::from_value(parent)?)
                    .await
                    .map(drop)
                    .map_err(anyhow::Error::from)
            }
        };
        stream::iter(names).map(create).buffer_unordered(AT_ONCE).try_collect::<()>().await
    }

    /// Waits until so many parents have converged.
    pub(crate) async fn converged(&self, count: usize) -> anyhow::Result<()> {
        self.until(|seen| seen.converged == count).await
    }

    pub(crate) fn converged_now(&self) -> usize {
        self.seen.borrow().converged
    }

    /// How often parents and children were written so far, by anybody.
    pub(crate) fn writes(&self) -> u32 {
        self.seen.borrow().writes
    }

    /// Changes the image of a parent; how long it took until that of its Deployment changed.
    pub(crate) async fn edit(&self, name: &str, image: &str) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let patch = Patch::Merge(json!({"spec": {"image": image}}));
        self.parents.patch(name, &PatchParams::default(), &patch).await?;
        self.until(|seen| seen.deployments.get(name).is_some_and(|now| now == image)).await?;
        Ok(start.elapsed())
    }

    /// Waits until the condition of all parents says this.
    pub(crate) async fn say(&self, word: &str) -> anyhow::Result<()> {
        self.until(|seen| seen.parents.values().all(|parent| parent.message.ends_with(word))).await
    }

    /// Deletes all parents, and waits until they are gone.
    pub(crate) async fn delete(&self) -> anyhow::Result<()> {
        let names: Vec<_> = self.seen.borrow().parents.keys().cloned().collect();
        let delete = async |name: String| self.parents.delete(&name, &DeleteParams::default()).await.map(drop);
        stream::iter(names).map(delete).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        self.until(|seen| seen.parents.is_empty()).await
    }

    /// Does what the operator and the garbage collector would do, for who has neither.
    pub(crate) async fn clear(&self) -> anyhow::Result<()> {
        let names: Vec<_> = self.seen.borrow().parents.keys().cloned().collect();
        let release = async |name: String| {
            let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
            self.parents.patch(&name, &PatchParams::default(), &none).await.map(drop)
        };
        stream::iter(names).map(release).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        self.delete().await?;
        let names: Vec<_> = self.deployments.list_metadata(&ListParams::default()).await?.items;
        let delete = async |name: String| self.deployments.delete(&name, &DeleteParams::default()).await.map(drop);
        let names = names.into_iter().map(|deployment| deployment.name_any());
        stream::iter(names).map(delete).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        self.until(|seen| seen.deployments.is_empty()).await
    }

    async fn until(&self, is: impl FnMut(&Seen) -> bool) -> anyhow::Result<()> {
        let mut seen = self.seen.clone();
        timeout(PATIENCE, seen.wait_for(is))
            .await
            .with_context(|| {
                let seen = self.seen.borrow();
                let all = seen.parents.len();
                format!("not within {} s: {} of {all} parents have converged", PATIENCE.as_secs(), seen.converged)
            })?
            .context("the watches have ended")?;
        Ok(())
    }
}

/// A parent as users write it.
pub(crate) fn parent(name: &str) -> Value {
    json!({
        "apiVersion": "mygroup.example.com/v1",
        "kind": "MyApp",
        "metadata": {"name": name},
        "spec": {"image": "nginx:1", "replicas": 0},
    })
}

async fn follow(api: Api<DynamicObject>, seen: watch::Sender<Seen>, note: fn(&mut Seen, &DynamicObject, bool)) {
    let mut events = Box::pin(watcher(api, watcher::Config::default()).default_backoff());
    while let Some(event) = events.next().await {
        let (object, exists, is_new) = match event {
            Ok(Event::Apply(object)) => (object, true, true),
            Ok(Event::InitApply(object)) => (object, true, false),
            Ok(Event::Delete(object)) => (object, false, true),
            Ok(Event::Init | Event::InitDone) => continue,
            Err(error) => {
                eprintln!("a watch of the benchmark begins again, after: {error}");
                continue;
            }
        };
        seen.send_modify(|seen| {
            seen.writes += u32::from(is_new);
            note(seen, &object, exists);
        });
    }
}

#[cfg(test)]
mod tests {
    use kube::api::DynamicObject;
    use serde_json::{Value, json};

    use super::Seen;

    fn object(mut value: Value) -> DynamicObject {
        value["apiVersion"] = "v1".into();
        value["kind"] = "Any".into();
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_parent_has_converged_with_finalizer_child_and_status() {
        let status = json!({"availableReplicas": 0, "conditions": [{"type": "Available", "status": "True"}]});
        let whole = object(json!({"metadata": {"name": "a", "finalizers": ["f"]}, "status": status}));
        let without = object(json!({"metadata": {"name": "a"}, "status": status}));
        let mut seen = Seen::default();
        seen.parent(&whole, true);
        assert_eq!(seen.converged, 0, "its Deployment is missing");
        seen.deployment(&object(json!({"metadata": {"name": "a"}})), true);
        assert_eq!(seen.converged, 1);
        seen.parent(&without, true);
        assert_eq!(seen.converged, 0, "it has no finalizer");
        seen.parent(&whole, true);
        seen.parent(&whole, false);
        assert_eq!(seen.converged, 0, "it is gone");
    }
}
