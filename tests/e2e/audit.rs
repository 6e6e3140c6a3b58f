//! What the host asked of the API server, from the audit log.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

/// One request of the host, answered.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) verb: String,
    pub(crate) resource: String,
    pub(crate) subresource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) code: u16,
    /// When it arrived, RFC 3339 with microseconds: sorts as text.
    pub(crate) at: String,
    /// As whom: a service account.
    pub(crate) user: String,
    /// The token that it was sent with: two hosts have the same account, and may have a token each.
    pub(crate) token: String,
    pub(crate) body: Value,
}

impl Request {
    pub(crate) fn is_write(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }

    /// `patch deployments/scale`, for counting.
    pub(crate) fn what(&self) -> String {
        match self.subresource.as_str() {
            "" => format!("{} {}", self.verb, self.resource),
            subresource => format!("{} {}/{subresource}", self.verb, self.resource),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    stage: String,
    verb: String,
    #[serde(default)]
    user_agent: String,
    user: User,
    impersonated_user: Option<User>,
    #[serde(default)]
    object_ref: ObjectRef,
    response_status: Option<Status>,
    request_received_timestamp: String,
    #[serde(default)]
    request_object: Value,
}

#[derive(Deserialize)]
struct User {
    username: String,
    #[serde(default)]
    extra: Extra,
}

#[derive(Deserialize, Default)]
struct Extra {
    #[serde(rename = "authentication.kubernetes.io/credential-id", default)]
    token: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ObjectRef {
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    code: u16,
}

/// All requests of the host so far, in the order of their arrival.
pub(crate) fn requests(log: &Path) -> Vec<Request> {
    let text = std::fs::read_to_string(log).expect("the audit log can be read");
    // The last line may be half written.
    let lines =
        text.lines().filter(|line| line.contains("\"pilothouse/")).filter_map(|line| serde_json::from_str(line).ok());
    let mut requests: Vec<_> = lines
        .filter(|line: &Line| line.user_agent.starts_with("pilothouse/") && line.stage == "ResponseComplete")
        .map(|line| Request {
            verb: line.verb,
            resource: line.object_ref.resource,
            subresource: line.object_ref.subresource,
            namespace: line.object_ref.namespace,
            name: line.object_ref.name,
            code: line.response_status.map_or(0, |status| status.code),
            at: line.request_received_timestamp,
            token: line.user.extra.token.concat(),
            user: line.impersonated_user.unwrap_or(line.user).username,
            body: line.request_object,
        })
        .collect();
    requests.sort_by(|a, b| a.at.cmp(&b.at));
    requests
}
