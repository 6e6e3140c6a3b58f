//! The types of the crate `k8s-openapi` serve as children, both ways, without anything of the SDK's own.

use k8s_openapi::api::core::v1::ConfigMap;
use pilothouse_sdk::{prelude::*, testing::Case};
use serde_json::Value;

struct Typed;

impl Plugin for Typed {
    type Spec = Value;
    type Status = usize;

    fn describe() -> Describe {
        Describe::parent("example.com/v1", "Typed").child("v1", "ConfigMap")
    }

    fn reconcile(request: &Request<Self>) -> Result<Desired<usize>, Failure> {
        let found: Option<ConfigMap> = request.child("ConfigMap", "a")?;
        let mut wanted = ConfigMap::default();
        wanted.metadata.name = Some("a".to_owned());
        wanted.data = Some([("key".to_owned(), "value".to_owned())].into());
        Ok(Desired::new().child(wanted).status(found.and_then(|found| found.data).map_or(0, |data| data.len())))
    }
}

#[test]
fn a_typed_child_goes_out_with_its_kind_and_comes_back() {
    let case = Case::parent(json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {}}));
    let answer = case.reconcile::<Typed>().unwrap();
    let expected =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"key": "value"}});
    assert_eq!(answer.child("ConfigMap", "a"), &expected);
    assert_eq!(answer.status, 0);
    let mut live = expected;
    live["metadata"]["namespace"] = "n".into();
    assert_eq!(case.child(live).reconcile::<Typed>().unwrap().status, 1);
}
