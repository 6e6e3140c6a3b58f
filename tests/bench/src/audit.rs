//! What was asked of the API server, read from its audit log as it grows.

use std::{
    fs::File,
    io::{Read as _, Seek as _, SeekFrom},
    path::PathBuf,
};

use anyhow::Context as _;
use serde::Deserialize;

/// One request, answered; a watch, begun.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) verb: String,
    /// With its subresource.
    pub(crate) resource: String,
}

impl Request {
    /// What an operator asks because it is there, and not because of a parent: discovery, access reviews, lists, watches, its Lease.
    /// Events are left out, too.
    pub(crate) fn is_overhead(&self) -> bool {
        let asks = ["list", "watch"].contains(&&*self.verb);
        let reviews = self.resource.ends_with("accessreviews") || self.resource.ends_with("rulesreviews");
        asks || reviews || ["", "leases", "events"].contains(&&*self.resource)
    }

    /// `patch myapps/status`, for counting.
    pub(crate) fn what(&self) -> String {
        format!("{} {}", self.verb, self.resource)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    stage: String,
    verb: String,
    user: User,
    #[serde(default)]
    object_ref: ObjectRef,
}

#[derive(Deserialize)]
struct User {
    username: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ObjectRef {
    resource: String,
    subresource: String,
}

/// The requests of one account.
pub(crate) struct Audit {
    log: PathBuf,
    user: String,
    position: u64,
}

impl Audit {
    /// Begins with what comes from now on.
    pub(crate) fn of(log: PathBuf, (namespace, account): (&str, &str)) -> Self {
        let position = log.metadata().map_or(0, |log| log.len());
        Self { log, user: format!("system:serviceaccount:{namespace}:{account}"), position }
    }

    /// What was answered since the last time.
    pub(crate) fn new_requests(&mut self) -> anyhow::Result<Vec<Request>> {
        let mut text = String::new();
        let mut read = || {
            let mut log = File::open(&self.log)?;
            log.seek(SeekFrom::Start(self.position))?;
            log.read_to_string(&mut text)
        };
        read().with_context(|| format!("cannot read {}", self.log.display()))?;
        // The last line may be half written.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        self.position += u64::try_from(whole).unwrap_or_default();
        let mut requests = Vec::new();
        for line in text[..whole].lines() {
            let line: Line = serde_json::from_str(line).context("the audit log is not as expected")?;
            let stage = if line.verb == "watch" { "ResponseStarted" } else { "ResponseComplete" };
            if line.user.username == self.user && line.stage == stage {
                let ObjectRef { resource, subresource } = line.object_ref;
                let resource = if subresource.is_empty() { resource } else { format!("{resource}/{subresource}") };
                requests.push(Request { verb: line.verb, resource });
            }
        }
        Ok(requests)
    }
}
