//! A Kubernetes object that came from the host: text until somebody asks for it, then the author's own type.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::Failure;

/// An object of the cluster, such as a child that exists now.
///
/// It is decoded only on demand, and only into what the author's type names: a plugin that wants to know how many replicas
/// are available does not pay for the rest of the Deployment.
#[derive(Debug)]
pub struct Object {
    json: String,
    head: OnceCell<Head>,
}

/// What every object has.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Head {
    api_version: String,
    kind: String,
    metadata: Metadata,
}

/// The part of an object's metadata that a plugin may want.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metadata {
    /// The name.
    pub name: String,
    /// The namespace; none for a kind of cluster scope.
    pub namespace: Option<String>,
    /// Unique over time: an object that is deleted and created again has another.
    pub uid: String,
    /// Counts the changes of the spec.
    pub generation: i64,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The annotations.
    pub annotations: BTreeMap<String, String>,
    /// When it was created, RFC 3339.
    pub creation_timestamp: String,
    /// Since when it is being deleted, RFC 3339.
    pub deletion_timestamp: Option<String>,
}

// By hand, since every plugin carries it: derived it is several times as large.
impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let metadata = Value::deserialize(deserializer)?;
        let text = |key: &str| metadata[key].as_str().map(str::to_owned);
        let map = |key: &str| {
            // No `collect`: it would bring a sort of several kilobytes.
            let mut map = BTreeMap::new();
            for (key, value) in metadata[key].as_object().into_iter().flatten() {
                map.insert(key.clone(), value.as_str().unwrap_or_default().to_owned());
            }
            map
        };
        Ok(Self {
            name: text("name").unwrap_or_default(),
            namespace: text("namespace"),
            uid: text("uid").unwrap_or_default(),
            generation: metadata["generation"].as_i64().unwrap_or_default(),
            labels: map("labels"),
            annotations: map("annotations"),
            creation_timestamp: text("creationTimestamp").unwrap_or_default(),
            deletion_timestamp: text("deletionTimestamp"),
        })
    }
}

impl Object {
    pub(crate) fn new(json: String) -> Self {
        Self { json, head: OnceCell::new() }
    }

    fn head(&self) -> &Head {
        // The host sends objects of the API server, so there is no text here without these fields.
        self.head.get_or_init(|| serde_json::from_str(&self.json).unwrap_or_default())
    }

    /// Group and version, such as `apps/v1`.
    pub fn api_version(&self) -> &str {
        &self.head().api_version
    }

    /// The kind, such as `Deployment`.
    pub fn kind(&self) -> &str {
        &self.head().kind
    }

    /// Name, labels and the like.
    pub fn metadata(&self) -> &Metadata {
        &self.head().metadata
    }

    /// The whole object as JSON text.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// The object as the author's type: a partial struct, `serde_json::Value`, or a type of the crate `k8s-openapi`.
    ///
    /// # Errors
    /// [`Failure::terminal`] with object and path, such as ``Deployment web: spec.replicas: invalid type: …``.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        parse(&self.json)
            .map_err(|problem| Failure::terminal(format!("{} {}: {problem}", self.kind(), self.metadata().name)))
    }
}

/// Decodes `json`; an error reads `<path>: <what is wrong>`.
pub(crate) fn parse<T: DeserializeOwned>(json: &str) -> Result<T, String> {
    serde_json::from_str(json).map_err(|err| {
        let text = err.to_string();
        // The position is one in a text that the reader never saw; the path says it better.
        let position = format!(" at line {} column {}", err.line(), err.column());
        let reason = text.strip_suffix(&position).unwrap_or(&text);
        match path(json, err.line(), err.column()) {
            path if path.is_empty() => reason.to_owned(),
            path => format!("{path}: {reason}"),
        }
    })
}

/// The path of the value at a position, as `spec.containers[0].image`; empty for the whole document.
///
/// This reads the text again, but only after an error: following the path while decoding (as the crate `serde_path_to_error`
/// does) makes every plugin larger and every call slower.
fn path(json: &str, line: usize, column: usize) -> String {
    enum Frame<'a> {
        List(usize),
        Map(Option<&'a str>),
    }
    let before = json.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum::<usize>() + column;
    let bytes = &json.as_bytes()[..before.min(json.len())];
    let mut frames = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'{' => frames.push(Frame::Map(None)),
            b'[' => frames.push(Frame::List(0)),
            b'}' | b']' => drop(frames.pop()),
            b',' => match frames.last_mut() {
                Some(Frame::List(index)) => *index += 1,
                Some(Frame::Map(key)) => *key = None,
                None => {}
            },
            b'"' => {
                let start = at + 1;
                at = start;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                // The first string of an entry is its key, the next one its value.
                if let Some(Frame::Map(key @ None)) = frames.last_mut() {
                    *key = json.get(start..at);
                }
            }
            _ => {}
        }
        at += 1;
    }
    let mut path = String::new();
    for frame in frames {
        match frame {
            Frame::List(index) => path.push_str(&format!("[{index}]")),
            Frame::Map(Some(key)) if path.is_empty() => path.push_str(key),
            Frame::Map(Some(key)) => path.push_str(&format!(".{key}")),
            Frame::Map(None) => {}
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Pod {
        #[expect(dead_code, reason = "only decoded")]
        spec: Spec,
    }

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only decoded")]
    struct Spec {
        node: Option<String>,
        containers: Vec<Container>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only decoded")]
    struct Container {
        image: String,
        port: Option<u16>,
    }

    fn problem(json: &str) -> String {
        parse::<Pod>(json).unwrap_err()
    }

    #[test]
    fn errors_name_the_path() {
        let cases = [
            (
                r#"{"spec":{"containers":[{"image":"a"},{"image":"b","port":"x"}]}}"#,
                r#"spec.containers[1].port: invalid type: string "x", expected u16"#,
            ),
            (
                r#"{"spec":{"containers":[{"image":"a"},{"image":7}]}}"#,
                "spec.containers[1].image: invalid type: integer `7`, expected a string",
            ),
            (r#"{"spec":{"containers":[{"image":"a"},{"port":7}]}}"#, "spec.containers[1]: missing field `image`"),
            (
                r#"{"spec":{"containers":[{"image":"a","prot":7}]}}"#,
                "spec.containers[0].prot: unknown field `prot`, expected `image` or `port`",
            ),
            (r#"{"spec":{"containers":{}}}"#, "spec.containers: invalid type: map, expected a sequence"),
            (r#"{"spec":{"containers":null}}"#, "spec.containers: invalid type: null, expected a sequence"),
            (
                r#"{"spec":{"node":"a\",\"b","containers":1}}"#,
                "spec.containers: invalid type: integer `1`, expected a sequence",
            ),
            (r#"{"metadata":{}}"#, "missing field `spec`"),
            (
                "{\n  \"spec\": {\n    \"containers\": [\n      {}\n    ]\n  }\n}",
                "spec.containers[0]: missing field `image`",
            ),
        ];
        for (json, expected) in cases {
            assert_eq!(problem(json), expected);
        }
    }

    #[test]
    fn text_that_is_not_json_is_an_error_as_well() {
        assert_eq!(problem("{\"spec\":"), "spec: EOF while parsing a value");
        assert_eq!(problem(""), "EOF while parsing a value");
        assert_eq!(problem("{\"spec\":{\"node\":\"\\"), "spec.node: EOF while parsing a string");
    }
}
