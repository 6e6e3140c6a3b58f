//! The stream of a watch, cut into the events that it shows.

use serde_json::Value;

/// Collects the bytes of a watch until an event is complete: one JSON document a line.
#[derive(Default)]
pub(crate) struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that `bytes` complete, each with its end.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.rest.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let rest = self.rest.split_off(end + 1);
            lines.push(std::mem::replace(&mut self.rest, rest));
        }
        lines
    }
}

/// What an event shows. Bookmarks and errors show no object.
pub(crate) struct Shown {
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) resource_version: String,
}

impl Shown {
    pub(crate) fn read(line: &[u8]) -> Option<Self> {
        let event: Value = serde_json::from_slice(line).ok()?;
        let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).map(ToOwned::to_owned);
        let kind = text("/type").filter(|kind| matches!(kind.as_str(), "ADDED" | "MODIFIED" | "DELETED"))?;
        Some(Self {
            kind,
            name: text("/object/metadata/name")?,
            resource_version: text("/object/metadata/resourceVersion")?,
        })
    }
}

/// What the API server says in a stream whose resource version is too old.
pub(crate) const GONE: &str = concat!(
    r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","#,
    r#""message":"too old resource version","reason":"Expired","code":410}}"#,
    "\n"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_whole_however_they_are_cut() {
        let mut lines = Lines::default();
        assert!(lines.push(b"{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"name\":").is_empty());
        let got = lines.push(b"\"a\",\"resourceVersion\":\"7\"}}}\n{\"type\":\"BOOKMARK\",\"object\":{}}\n{");
        assert_eq!(got.len(), 2);
        let shown = Shown::read(&got[0]).unwrap();
        assert_eq!((shown.kind.as_str(), shown.name.as_str(), shown.resource_version.as_str()), ("ADDED", "a", "7"));
        assert!(Shown::read(&got[1]).is_none() && Shown::read(GONE.as_bytes()).is_none());
    }
}
