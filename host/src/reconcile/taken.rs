//! What an apply of ours has taken from others (`C27`): with force the API server takes a field from whoever has set it to another value,
//! and says so only in `metadata.managedFields`. Pure.

use serde_json::{Value, value::RawValue};

use super::fields;
use crate::object::Object;

/// The fields that others have lost between `before` and `after`, and `manager` has now, by field manager.
pub(super) fn taken(before: &Object, after: &Object, manager: &str) -> Vec<(String, Vec<String>)> {
    let ours = after.owned_by(manager, "Apply", "").map(read).unwrap_or_default();
    let of_other = |other: &crate::object::OwnedFields| {
        let same = after.others().iter().find(|it| (&it.manager, &it.operation) == (&other.manager, &other.operation));
        let left = same.map(|it| read(&it.fields)).unwrap_or_default();
        let lost = fields::difference(&read(&other.fields), &left);
        let paths = fields::paths(&fields::intersection(&lost, &ours));
        (!paths.is_empty()).then(|| (other.manager.clone(), paths))
    };
    before.others().iter().filter_map(of_other).collect()
}

fn read(fields: &RawValue) -> Value {
    serde_json::from_str(fields.get()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OURS: &str = "pilothouse/1";

    fn object(entries: &[(&str, &str, Value)]) -> Object {
        let entries: Vec<_> = entries
            .iter()
            .map(|(manager, operation, fields)| json!({"manager": manager, "operation": operation, "fieldsV1": fields}))
            .collect();
        Object::from_json(&json!({"metadata": {"name": "a", "managedFields": entries}}).to_string()).unwrap()
    }

    #[test]
    fn c27_a_field_is_taken_if_somebody_has_lost_it_and_we_have_it() {
        let before = object(&[
            ("kubectl", "Update", json!({"f:data": {"f:a": {}, "f:theirs": {}}})),
            ("gitops", "Apply", json!({"f:data": {"f:b": {}, "f:given-up": {}}})),
            (OURS, "Apply", json!({"f:data": {"f:b": {}}})),
        ]);
        let after = object(&[
            ("kubectl", "Update", json!({"f:data": {"f:theirs": {}}})),
            (OURS, "Apply", json!({"f:data": {"f:a": {}, "f:b": {}}})),
        ]);
        let lost = |manager: &str, path: &str| (manager.to_owned(), vec![path.to_owned()]);
        assert_eq!(taken(&before, &after, OURS), [lost("kubectl", "data.a"), lost("gitops", "data.b")]);
        assert_eq!(taken(&after, &after, OURS), []);
        // Of an object that we have never applied nothing is known.
        let foreign = object(&[("kubectl", "Update", json!({"f:data": {"f:a": {}}}))]);
        assert_eq!(taken(&foreign, &after, OURS), []);
    }
}
