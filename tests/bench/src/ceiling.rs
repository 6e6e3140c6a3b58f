//! What the API server itself allows: the writes that every operator has to send, and nothing else, by one client that knows them.

use anyhow::Context as _;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::json;

use crate::load;

/// How many parents it works on at once, as many as the others.
const AT_ONCE: usize = 32;

/// Creates each parent as its users, and converges it as this client.
pub(crate) async fn converge(users: &Client, client: &Client, names: &[String]) -> anyhow::Result<()> {
    let kind = |group: &str, kind: &str| ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
    let created: Api<DynamicObject> =
        Api::default_namespaced_with(users.clone(), &kind("mygroup.example.com", "MyApp"));
    let parents: Api<DynamicObject> =
        Api::default_namespaced_with(client.clone(), &kind("mygroup.example.com", "MyApp"));
    let deployments: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &kind("apps", "Deployment"));
    let merge = PatchParams::default();
    let apply = PatchParams::apply("ceiling").force();
    let converge = async |name: &String| -> anyhow::Result<()> {
        let parent = created.create(&PostParams::default(), &serde_json::from_value(load::parent(name))?).await?;
        let finalizer = json!({"metadata": {"finalizers": ["mygroup.example.com/finalizer"]}});
        parents.patch(name, &merge, &Patch::Merge(finalizer)).await?;
        let uid = parent.metadata.uid.context("the API server gives a UID to each object")?;
        let labels = json!({"app.kubernetes.io/name": "myapp", "app.kubernetes.io/instance": name});
        let deployment = json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels, "ownerReferences": [{
                "apiVersion": "mygroup.example.com/v1", "kind": "MyApp", "name": name, "uid": uid, "controller": true,
            }]},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [{"name": "myapp", "image": "nginx:1"}]},
                },
            },
        });
        deployments.patch(name, &apply, &Patch::Apply(deployment)).await?;
        let condition = json!({
            "type": "Available", "status": "True", "reason": "ReplicasAvailable", "observedGeneration": 1,
            "message": "0 of 0 replicas are available", "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let status = json!({"status": {"availableReplicas": 0, "observedGeneration": 1, "conditions": [condition]}});
        parents.patch_status(name, &merge, &Patch::Merge(status)).await?;
        Ok(())
    };
    stream::iter(names).map(converge).buffer_unordered(AT_ONCE).try_collect::<()>().await
}
