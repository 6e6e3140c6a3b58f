//! Jobs, which are no good half done: one that has to be made anew is left to finish first (`C31`). Pure.

use serde::Deserialize;

use super::status::live_condition;
use crate::object::Object;

/// Whether it is a Job that has neither completed nor failed.
pub(super) fn is_running(live: &Object) -> bool {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Type {
        api_version: String,
        kind: String,
    }
    let is_job =
        serde_json::from_str(live.json()).is_ok_and(|it: Type| it.api_version == "batch/v1" && it.kind == "Job");
    let is = |condition| live_condition(live, condition).is_some_and(|(status, _)| status == "True");
    is_job && !is("Complete") && !is("Failed")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn c31_a_job_runs_until_a_condition_says_how_it_has_ended() {
        let is = |kind: &str, conditions: Value| {
            let object = json!({"apiVersion": "batch/v1", "kind": kind, "metadata": {"name": "j"}, "status": {"conditions": conditions}});
            is_running(&Object::from_json(&object.to_string()).unwrap())
        };
        let condition = |kind: &str, status: &str| json!([{"type": kind, "status": status}]);
        assert!(is("Job", Value::Null) && is("Job", condition("Suspended", "True")));
        assert!(is("Job", condition("SuccessCriteriaMet", "True")) && is("Job", condition("Failed", "False")));
        assert!(!is("Job", condition("Complete", "True")) && !is("Job", condition("Failed", "True")));
        assert!(!is("CronJob", Value::Null));
    }
}
