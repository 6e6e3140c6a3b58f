//! What has to be signed, and by whom, on all of a host: its verification file. What it decides is pure; whoever asks acts on it.
//!
//! ```yaml
//! default: Denied
//! rules:
//! - images: ghcr.io/acme
//!   signature: Required
//!   publicKeys:
//!   - |
//!     -----BEGIN PUBLIC KEY-----
//!     …
//! - images: "*.example.com:5000/demo"
//!   signature: NotRequired
//! ```
//!
//! `images` is a host, a host with its port, or either with a path, as the keys of pull secrets are. Of several rules the one with the
//! longest path counts, and no other: a rule for a part of a registry is an exception in either direction.

use serde::Deserialize;

use super::key::{self, PublicKey};
use crate::registry::{Repository, scope::Scope};

/// A verification file.
#[derive(Clone, Debug)]
pub struct Policy {
    default: Decision,
    rules: Vec<(Scope, Decision)>,
}

/// What a policy says of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// One of these keys has to have signed it.
    Required(Vec<PublicKey>),
    /// It is taken as it is.
    NotRequired,
    /// It is not taken, signed or not.
    Denied,
}

/// Why a file is no policy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is no such YAML.
    #[error("the verification file is not understood")]
    Yaml(#[source] Box<serde_saphyr::Error>),
    /// A rule has keys that it does not need, or needs some and has none.
    #[error("rules[{at}] of the verification file (images: {images:?}) {what}")]
    Rule {
        /// Which one.
        at: usize,
        /// What it is for.
        images: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A key is none.
    #[error("rules[{at}].publicKeys[{key}] of the verification file (images: {images:?}) is no public key")]
    Key {
        /// Which rule.
        at: usize,
        /// What it is for.
        images: String,
        /// Which key.
        key: usize,
        /// Why.
        source: key::Error,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    default: Otherwise,
    #[serde(default)]
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
enum Otherwise {
    NotRequired,
    Denied,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    images: String,
    signature: Signature,
    #[serde(default)]
    public_keys: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
enum Signature {
    Required,
    NotRequired,
    Denied,
}

/// Without a file, reconcilers say what has to be signed.
impl Default for Policy {
    fn default() -> Self {
        Self { default: Decision::NotRequired, rules: Vec::new() }
    }
}

impl Policy {
    /// Reads a verification file.
    ///
    /// # Errors
    /// If it is none. Nothing in it is ignored: what is not understood could have been a rule.
    pub fn read(yaml: &str) -> Result<Self, Error> {
        let File { default, rules } = serde_saphyr::from_str(yaml).map_err(|error| Error::Yaml(Box::new(error)))?;
        let default = match default {
            Otherwise::NotRequired => Decision::NotRequired,
            Otherwise::Denied => Decision::Denied,
        };
        let mut policy = Self { default, rules: Vec::with_capacity(rules.len()) };
        for (at, Rule { images, signature, public_keys }) in rules.into_iter().enumerate() {
            let scope = Scope::read(&images);
            let wrong = |what| Error::Rule { at, images: images.clone(), what };
            if images.trim_matches('/').is_empty() {
                return Err(wrong("names no registry"));
            }
            if images.contains('@') || (scope.path().contains(':')) {
                return Err(wrong("names a tag or a digest: it is for repositories"));
            }
            if policy.rules.iter().any(|(other, _)| *other == scope) {
                return Err(wrong("is there twice"));
            }
            match (signature, public_keys.is_empty()) {
                (Signature::Required, true) => return Err(wrong("requires a signature and has no publicKeys")),
                (Signature::NotRequired | Signature::Denied, false) => {
                    return Err(wrong("has publicKeys, which are for signature: Required"));
                }
                _ => {}
            }
            let read = |(key, pem): (usize, &String)| {
                PublicKey::read(pem).map_err(|source| Error::Key { at, images: images.clone(), key, source })
            };
            let keys = public_keys.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
            let decision = match signature {
                Signature::Required => Decision::Required(keys),
                Signature::NotRequired => Decision::NotRequired,
                Signature::Denied => Decision::Denied,
            };
            policy.rules.push((scope, decision));
        }
        Ok(policy)
    }

    /// What it says of a repository.
    pub fn decide(&self, repository: &Repository) -> &Decision {
        let rules = self.rules.iter().filter(|(scope, _)| scope.covers(repository));
        rules.max_by_key(|(scope, _)| scope.precision()).map_or(&self.default, |(_, decision)| decision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{registry::Reference, telemetry};

    const KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
        MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEj3E5awKj9ArkgX54UVlc5hs0ONsz\n\
        a3VOK4MxLOLk5fnpn52yF4AKc9GGW9QWOQhj2BHhvKV2zGg94jpoBXzNeg==\n\
        -----END PUBLIC KEY-----\n";

    /// A rule, with the key where it says so.
    fn rule(images: &str, signature: &str, keys: &[&str]) -> String {
        serde_json::json!({"images": images, "signature": signature, "publicKeys": keys}).to_string()
    }

    fn file(default: &str, rules: &[String]) -> String {
        format!("default: {default}\nrules: [{}]\n", rules.join(", "))
    }

    #[test]
    fn the_rule_with_the_longest_path_counts_and_no_other() {
        let rules = [
            rule("r.io", "Required", &[KEY]),
            rule("r.io/demo", "NotRequired", &[]),
            rule("r.io/demo/secret", "Denied", &[]),
            rule("*.corp:5000", "NotRequired", &[]),
        ];
        let policy = Policy::read(&file("Denied", &rules)).unwrap();
        let decide = |text: &str| policy.decide(text.parse::<Reference>().unwrap().repository()).clone();
        assert_eq!(decide("r.io/plugin:1"), Decision::Required(vec![PublicKey::read(KEY).unwrap()]));
        assert_eq!(decide("r.io/demo/plugin:1"), Decision::NotRequired);
        assert_eq!(decide("r.io/demo/secret/plugin:1"), Decision::Denied);
        assert!(matches!(decide("r.io/demonstration:1"), Decision::Required(_)), "a path ends with one of its parts");
        assert_eq!(decide("a.corp:5000/plugin:1"), Decision::NotRequired);
        assert_eq!(decide("a.corp/plugin:1"), Decision::Denied, "the default");
        let open = Policy::read("default: NotRequired").unwrap();
        assert_eq!(*open.decide("r.io/x:1".parse::<Reference>().unwrap().repository()), Decision::NotRequired);
    }

    #[test]
    fn what_is_wrong_is_named_and_nothing_is_ignored() {
        let error = |text: &str| telemetry::chain(&Policy::read(text).unwrap_err());
        for (text, says) in [
            ("", "not understood"),
            ("rules: []", "default"),
            ("default: Maybe", "Maybe"),
            ("default: Denied\nrule: []", "rule"),
            (
                &file("Denied", &[rule("r.io", "Required", &[])]),
                r#"rules[0] of the verification file (images: "r.io") requires"#,
            ),
            (&file("Denied", &[rule("r.io", "NotRequired", &[KEY])]), "which are for signature: Required"),
            (&file("Denied", &[rule("r.io", "Required", &[KEY, "x"])]), r"rules[0].publicKeys[1]"),
            (&file("Denied", &[rule("r.io/x:1", "Denied", &[])]), "names a tag"),
            (&file("Denied", &[rule("", "Denied", &[])]), "names no registry"),
            (&file("Denied", &[rule("r.io", "Denied", &[]), rule("r.io/", "NotRequired", &[])]), "rules[1]"),
        ] {
            assert!(error(text).contains(says), "{text}: {}", error(text));
        }
    }
}
