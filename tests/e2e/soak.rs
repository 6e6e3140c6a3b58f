//! A long time under fire, a part of `make soak`: parents come, change and go at random while requests fail and the API server restarts. In the end
//! nothing of ours is left, and the host has not grown.
//!
//! `SOAK_SECONDS=60 make soak` is a short form, which says nothing of growth.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use faults::{Options, Proxy};
use futures::{StreamExt as _, stream};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Namespace, config_map, our_finalizers};

const PARENTS: usize = 500;
/// How many users are at work at once.
const USERS: usize = 8;
const FAILING: f64 = 0.05;
/// How long it may take until all is gone.
const PATIENCE: Duration = Duration::from_mins(4);
/// How much the host may grow from two fifths of the time to the end of it.
const GROWTH: f64 = 0.10;

/// What the users have asked for.
#[derive(Default)]
struct Done {
    created: usize,
    changed: usize,
    deleted: usize,
}

/// A parent with a child beside it, and every third one with a child elsewhere.
fn widget(n: usize, value: &str) -> Value {
    let name = format!("w{n}");
    let mut children = vec![config_map(&name, value)];
    if n.is_multiple_of(3) {
        let mut far = config_map(&name, value);
        far["metadata"]["namespace"] = "soak-far".into();
        children.push(far);
    }
    json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": name},
        "spec": {"reply": {"children": children}, "cleanup": {"log": ["cleanup"]}}})
}

/// One thing that a user does; the API server may be away.
async fn act(ns: &Namespace<'_>, round: usize) -> Option<fn(&mut Done)> {
    let widgets = ns.widgets();
    let n = fastrand::usize(..PARENTS);
    let name = format!("w{n}");
    let value = round.to_string();
    let object: DynamicObject = serde_json::from_value(widget(n, &value)).ok()?;
    match widgets.get_opt(&name).await.ok()? {
        None => {
            widgets.create(&PostParams::default(), &object).await.ok()?;
            Some(|done| done.created += 1)
        }
        Some(_) if fastrand::bool() => {
            let spec = json!({"spec": object.data["spec"]});
            widgets.patch(&name, &PatchParams::default(), &Patch::Merge(&spec)).await.ok()?;
            Some(|done| done.changed += 1)
        }
        Some(_) => {
            widgets.delete(&name, &DeleteParams::default()).await.ok()?;
            Some(|done| done.deleted += 1)
        }
    }
}

#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn soak() {
    let seconds = std::env::var("SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(300);
    let time = Duration::from_secs(seconds);
    let cluster = Cluster::start();
    let (ns, far) = (cluster.namespace("soak").await, cluster.namespace("soak-far").await);
    let options = Options { run: None, fault: None, failing: FAILING, crash: Box::new(|| {}), aliases: Vec::new() };
    let proxy = Proxy::start(cluster.control_plane.kubeconfig(), options).await.expect("the proxy starts");
    let kubeconfig = cluster.control_plane.data_dir().join("soak.kubeconfig");
    cluster.write_kubeconfig_by_way_of(&kubeconfig, proxy.address, &cluster.host_token());
    let host = cluster.spawn_host(&kubeconfig, &[]);

    let begun = Instant::now();
    let (mut done, mut restarts) = (Done::default(), 0_u32);
    let mut resident = BTreeMap::new();
    let mut round = 0;
    while begun.elapsed() < time {
        round += 1;
        let acts = stream::iter(0..USERS).map(|_| act(&ns, round)).buffer_unordered(USERS);
        let acted: Vec<_> = acts.collect().await;
        acted.into_iter().flatten().for_each(|note| note(&mut done));
        tokio::time::sleep(Duration::from_millis(150)).await;
        if begun.elapsed() > time * (restarts + 1) / 3 && restarts < 2 {
            restarts += 1;
            cluster.control_plane.stop_api_server().expect("it stops");
            tokio::time::sleep(Duration::from_secs(2)).await;
            cluster.control_plane.start_api_server().expect("it starts");
        }
        let tenth = usize::try_from(begun.elapsed().as_secs() * 10 / seconds).unwrap_or(usize::MAX);
        resident.entry(tenth).or_insert_with(|| {
            let (asked, failed) = proxy.counts();
            let (seconds, resident) = (begun.elapsed().as_secs(), host.resident());
            println!(
                "{seconds:4} s  {:6} created  {:6} changed  {:6} deleted  {asked:7} requests  {failed:5} failed  {restarts} restarts  {resident:6.1} MiB",
                done.created, done.changed, done.deleted,
            );
            resident
        });
    }

    // All of them are deleted, and everything goes.
    let ended = Instant::now();
    let left = loop {
        let widgets = ns.widgets().list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
        for widget in widgets.iter().filter(|widget| widget.metadata.deletion_timestamp.is_none()) {
            let name = widget.metadata.name.as_deref().unwrap_or_default();
            let _ = ns.widgets().delete(name, &DeleteParams::default()).await;
        }
        let mut left: Vec<_> =
            widgets.iter().map(|widget| format!("{:?} {:?}", widget.metadata.name, our_finalizers(widget))).collect();
        for maps in [ns.config_maps(), far.config_maps()] {
            let maps = maps.list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
            let ours = maps.iter().filter_map(|map| map.metadata.name.clone()).filter(|name| name.starts_with('w'));
            left.extend(ours);
        }
        if left.is_empty() || ended.elapsed() > PATIENCE {
            break left;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    let (asked, failed) = proxy.counts();
    println!(
        "\n{} created, {} changed, {} deleted; {asked} requests, {failed} failed; {restarts} restarts; all gone after {:.0} s",
        done.created,
        done.changed,
        done.deleted,
        ended.elapsed().as_secs_f64(),
    );
    assert_eq!(left, Vec::<String>::new(), "after {PATIENCE:?}");
    assert!(done.created > PARENTS / 2 && done.deleted > 0 && failed > 0 && restarts == 2, "nothing was tried");
    assert!(!host.log_text().contains("panicked"));
    let (before, after) = (resident[&4], host.resident());
    println!("{before:.1} MiB after two fifths of the time, {after:.1} MiB in the end");
    assert!(seconds < 240 || after <= before * (1.0 + GROWTH), "the host grows");
}
