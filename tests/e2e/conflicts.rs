//! Two who want the same field (`C27`), and a change that has to wait (`C31`).

use std::time::Duration;

use kube::api::{DynamicObject, ListParams, Patch, PatchParams, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, Namespace, condition, config_map, delete, edit, eventually, get, refused, synced, until,
};

async fn namespace(name: &str) -> Namespace<'static> {
    Cluster::shared().namespace(name).await
}

/// Applies the ConfigMap as another operator does that takes what it wants.
async fn take(ns: &Namespace<'_>, name: &str, data: Value) -> DynamicObject {
    let mut object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
    // An empty map would be theirs, too.
    if !data.is_null() {
        object["data"] = data;
    }
    let params = PatchParams::apply("gitops").force();
    ns.config_maps().patch(name, &params, &Patch::Apply(object)).await.expect("it can be applied")
}

/// The notes of the Events of this reason.
fn events(ns: &Namespace<'_>, reason: &str) -> Vec<String> {
    let mut requests = ns.requests();
    requests.retain(|request| request.resource == "events" && request.body["reason"] == reason);
    requests.iter().map(|event| event.body["note"].as_str().unwrap_or_default().to_owned()).collect()
}

fn writes(ns: &Namespace<'_>, name: &str, code: u16) -> usize {
    ns.writes()
        .iter()
        .filter(|write| write.resource == "configmaps" && write.name == name && write.code == code)
        .count()
}

#[tokio::test]
async fn c27_what_is_taken_from_another_manager_is_told_once_with_manager_and_path() {
    let ns = namespace("c27").await;
    let spec = |data: Value| {
        let child = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data});
        json!({"reply": {"children": [child]}})
    };
    ns.widget("w", spec(json!({"key": "ours"}))).await;
    synced(&ns.widgets(), "w").await;
    // A field that the plugin does not send is theirs, and stays theirs when we apply.
    take(&ns, "c", json!({"theirs": "1", "later": "1"})).await;
    edit(&ns.widgets(), "w", json!({"spec": spec(json!({"key": "ours", "more": "1"}))})).await;
    synced(&ns.widgets(), "w").await;
    assert_eq!(events(&ns, "FieldTaken"), Vec::<String>::new());
    // Until the plugin wants it otherwise.
    edit(&ns.widgets(), "w", json!({"spec": spec(json!({"key": "ours", "more": "1", "later": "2"}))})).await;
    until(&ns.config_maps(), "c", "taken", |child| child.data["data"]["later"] == "2").await;
    let told = eventually("it is told", async || Some(events(&ns, "FieldTaken")).filter(|told| !told.is_empty())).await;
    assert!(told.len() == 1 && told[0].contains("data.later from field manager \"gitops\""), "{told:?}");
    assert!(told[0].starts_with("ConfigMap c27/c: ") && !told[0].contains("data.theirs"), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c27_a_fight_over_a_field_is_slowed_down_and_shown() {
    let ns = namespace("c27-fight").await;
    ns.widget("w", json!({"reply": {"children": [config_map("c", "ours")]}})).await;
    synced(&ns.widgets(), "w").await;
    for round in 0..10 {
        take(&ns, "c", json!({"key": format!("theirs {round}")})).await;
        until(&ns.config_maps(), "c", "taken back", |child| child.data["data"]["key"] == "ours").await;
    }
    let message = refused(&ns.widgets(), "w", "FieldContested").await;
    assert!(
        message.starts_with("ConfigMap c27-fight/c: field manager \"gitops\" and the plugin take data.key"),
        "{message}"
    );
    assert_eq!(writes(&ns, "c", 200), 10, "one for each time that it was taken: {:#?}", ns.writes());
    assert_eq!(events(&ns, "FieldTaken").len(), 1);
    // From here on there is no answer at once.
    for round in 10..40 {
        take(&ns, "c", json!({"key": format!("theirs {round}")})).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(writes(&ns, "c", 200) <= 14, "{}", writes(&ns, "c", 200));
    // The other one has had enough.
    let last = get(&ns.config_maps(), "c").await.expect("it is there");
    take(&ns, "c", Value::Null).await;
    until(&ns.config_maps(), "c", "ours for good", |child| child.data["data"]["key"] == "ours").await;
    synced(&ns.widgets(), "w").await;
    assert_ne!(last.metadata.resource_version, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c27_without_force_a_field_of_another_manager_stays_theirs_and_is_told() {
    let ns = namespace("c27-yield").await;
    let yields = json!({"object": config_map("c", "ours"), "options": {"force": false}});
    ns.widget("w", json!({"reply": {"children": [yields, config_map("other", "1")]}})).await;
    synced(&ns.widgets(), "w").await;
    take(&ns, "c", json!({"key": "theirs", "more": "theirs"})).await;
    let message = refused(&ns.widgets(), "w", "FieldConflict").await;
    assert!(
        message.contains("ConfigMap c27-yield/c") && message.contains("\"gitops\"") && message.contains(".data.key"),
        "{message}"
    );
    assert!(!message.contains(".data.more"), "{message}");
    // They may go on as they like, and the other children do.
    let (stored, tries) = (writes(&ns, "c", 200), writes(&ns, "c", 409));
    for round in 0..10 {
        take(&ns, "c", json!({"key": format!("theirs {round}")})).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let others = json!({"children": [{"object": config_map("c", "ours"), "options": {"force": false}}, config_map("other", "2")]});
    edit(&ns.widgets(), "w", json!({"spec": {"reply": others}})).await;
    until(&ns.config_maps(), "other", "it goes on", |child| child.data["data"]["key"] == "2").await;
    let tried = writes(&ns, "c", 409) - tries;
    assert!(tried <= 10, "{tried} tries, {:#?}", ns.writes());
    assert_eq!(writes(&ns, "c", 200), stored, "nothing of it is written");
    assert_eq!(events(&ns, "FieldConflict").len(), 1, "told once");
    assert_eq!(get(&ns.config_maps(), "c").await.expect("it is there").data["data"]["key"], "theirs 9");
    // Who lets go has lost nothing: the value is there, and everybody's.
    take(&ns, "c", Value::Null).await;
    until(&ns.config_maps(), "c", "ours", |child| child.data["data"]["key"] == "ours").await;
    synced(&ns.widgets(), "w").await;
}

#[tokio::test]
async fn c58_without_force_an_object_of_somebody_else_is_a_collision_and_no_conflict_of_fields() {
    let ns = namespace("c58-yield").await;
    take(&ns, "c", json!({"key": "theirs"})).await;
    let yields = json!({"object": config_map("c", "ours"), "options": {"force": false}});
    ns.widget("w", json!({"reply": {"children": [yields]}})).await;
    refused(&ns.widgets(), "w", "NameCollision").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c31_a_job_that_runs_is_made_anew_once_it_has_finished() {
    let ns = namespace("c31").await;
    let job = |env: Value| {
        json!({"object": {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {"spec": {
            "restartPolicy": "Never", "nodeSelector": {"no": "node"}, "containers": [{"name": "c", "image": "i:1", "env": env}]}}}},
            "options": {"updateStrategy": "Recreate"}})
    };
    let spec = |env: Value| json!({"reply": {"children": [job(env), config_map("c", "1")], "log": ["called"]}});
    ns.widget("w", spec(json!([]))).await;
    synced(&ns.widgets(), "w").await;
    let jobs = ns.api("batch/v1", "Job");
    let first = until(&jobs, "j", "active", |job| job.data["status"]["active"] == 1).await;
    edit(&ns.widgets(), "w", json!({"spec": spec(json!([{"name": "MORE", "value": "1"}]))})).await;
    let message = refused(&ns.widgets(), "w", "PendingRecreate").await;
    assert!(message.starts_with("Job c31/j: it is a Job that runs"), "{message}");
    let of_job = || ns.writes().into_iter().filter(|write| write.resource == "jobs").collect::<Vec<_>>();
    let (tries, calls) = (of_job().len(), ns.calls("w", "called"));
    for round in 0..10 {
        edit(&jobs, "j", json!({"metadata": {"labels": {"round": round.to_string()}}})).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    edit(&ns.widgets(), "w", json!({"metadata": {"labels": {"a": "1"}}})).await;
    eventually("the plugin is asked", async || (ns.calls("w", "called") > calls).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(of_job().len(), tries, "nothing is tried before it has finished: {:#?}", of_job());
    assert_eq!(events(&ns, "PendingRecreate").len(), 1);
    assert_eq!(get(&jobs, "j").await.expect("it runs").metadata.uid, first.metadata.uid);

    let pods = ns.api("v1", "Pod");
    let list = pods.list(&ListParams::default()).await.expect("they can be listed");
    let pod = list.items[0].metadata.name.clone().expect("it has one");
    let done = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    pods.patch_status(&pod, &PatchParams::default(), &done).await.expect("it can be patched");
    let second = until(&jobs, "j", "made anew", |job| job.metadata.uid != first.metadata.uid).await;
    assert_eq!(second.data["spec"]["template"]["spec"]["containers"][0]["env"][0]["name"], "MORE");
    synced(&ns.widgets(), "w").await;
    let deletes = of_job().iter().filter(|write| write.verb == "delete").count();
    assert_eq!(deletes, 1, "{:#?}", of_job());
    assert!(condition(&second, "Complete").is_none());
    // Somebody who cannot wait deletes it.
    edit(&ns.widgets(), "w", json!({"spec": spec(json!([]))})).await;
    refused(&ns.widgets(), "w", "PendingRecreate").await;
    delete(&jobs, "j", PropagationPolicy::Background).await;
    until(&jobs, "j", "made anew", |job| job.metadata.uid != second.metadata.uid).await;
    synced(&ns.widgets(), "w").await;
}
