"""MyApp as an operator in Python, on kopf. What it has to do is said by plugins/myapp; parents of the benchmark have neither config nor
anything outside of the cluster.

Handlers are coroutines, so that they run side by side, and kopf posts no Events. Neither it nor the client has a limit of requests."""

import datetime
import os

import kopf
import lightkube
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment

GROUP = "mygroup.example.com"
LABELS = {"app.kubernetes.io/name": "myapp"}
MyApp = create_namespaced_resource(GROUP, "v1", "MyApp", "myapps")
# A logic that is changed says something else.
WORD = os.environ.get("MYAPP_WORD", "available")
client: lightkube.AsyncClient


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, **_):
    global client
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.posting.enabled = False
    client = lightkube.AsyncClient(field_manager="myapp")


@kopf.on.resume(GROUP, "v1", "myapps")
@kopf.on.create(GROUP, "v1", "myapps")
@kopf.on.update(GROUP, "v1", "myapps", field="spec")
async def reconcile(name, namespace, spec, status, meta, body, patch, **_):
    labels = {**LABELS, "app.kubernetes.io/instance": name}
    container = {"name": "myapp", "image": spec["image"]}
    wanted = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    if "replicas" in spec:
        wanted["spec"]["replicas"] = spec["replicas"]
    kopf.append_owner_reference(wanted, owner=body)
    found = await client.apply(Deployment.from_dict(wanted), force=True)
    have = (found.status.availableReplicas if found.status else None) or 0
    # kopf writes the patch when the handler has ended.
    patch.status.update(changed(status, meta["generation"], have, found.spec.replicas))


@kopf.on.delete(GROUP, "v1", "myapps")
async def finalize(**_):
    """Children need no cleanup; this is for what lives outside the cluster."""


@kopf.index(GROUP, "v1", "myapps")
async def parents(name, namespace, body, **_):
    return {(namespace, name): body}


@kopf.on.event("apps", "v1", "deployments", labels=LABELS)
async def count(name, namespace, spec, status, parents: kopf.Index, **_):
    """A child is no reason for kopf to look at its parent, so its replicas are told here."""
    for parent in parents.get((namespace, name), []):
        have, told = status.get("availableReplicas", 0), parent.get("status", {})
        if told and have != told.get("availableReplicas"):
            now = changed(told, parent["metadata"]["generation"], have, spec.get("replicas", 1))
            await client.patch(MyApp.Status, name, {"status": now}, namespace=namespace)


def changed(told, generation, have, want):
    """The status, if it differs from what was told."""
    ready = have >= want
    condition = {
        "type": "Available",
        "status": "True" if ready else "False",
        "reason": "ReplicasAvailable" if ready else "ReplicasUnavailable",
        "message": f"{have} of {want} replicas are {WORD}",
        "observedGeneration": generation,
    }
    before = next((one for one in told.get("conditions", []) if one["type"] == "Available"), {})
    since = before.get("lastTransitionTime") if before.get("status") == condition["status"] else None
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition["lastTransitionTime"] = since or now
    status = {"availableReplicas": have, "observedGeneration": generation, "conditions": [condition]}
    return {} if all(told.get(key) == value for key, value in status.items()) else status
