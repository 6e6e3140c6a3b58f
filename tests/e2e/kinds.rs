//! What the tools know of the kinds of Kubernetes is what the API server says of them.

use kube::discovery::{Discovery, Scope};
use pilothouse::{kinds, object::Kind, plugin::describe::KindName};

use crate::cluster::Cluster;

#[tokio::test]
async fn kinds_are_known_without_a_cluster_as_the_api_server_serves_them() {
    let ns = Cluster::shared().namespace("kinds").await;
    let discovery = Discovery::new(ns.client.clone()).run().await.expect("the API server tells its kinds");
    let mut seen = 0;
    for group in discovery.groups() {
        for version in group.versions() {
            for (api, capabilities) in group.versioned_resources(version) {
                let has_status = capabilities.subresources.iter().any(|(it, _)| it.plural.ends_with("status"));
                let served = Kind { api, namespaced: capabilities.scope == Scope::Namespaced, has_status };
                if !served.is_built_in() {
                    continue;
                }
                let name = KindName { api_version: served.api.api_version.clone(), kind: served.api.kind.clone() };
                assert_eq!(kinds::served(&name, &[]), Some(served));
                seen += 1;
            }
        }
    }
    assert!(seen > 50, "{seen}");
}
