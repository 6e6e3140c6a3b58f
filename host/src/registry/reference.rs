//! Where an artifact is: `registry/repository:tag`, `registry/repository@sha256:…`, or with both, where the digest counts.
//!
//! The grammar is that of the OCI distribution specification. Two things that docker adds are left out, since they make a reference
//! mean something else than what is written there: a registry that goes without saying, and a tag `latest` that does.

use std::{fmt, str::FromStr};

use super::digest::{self, Digest};

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    repository: Repository,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// A repository of a registry: `ghcr.io/acme/plugin`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Repository {
    /// The registry as it is written: a host, and a port if it is not the usual one.
    pub registry: String,
    /// The name of the repository in it.
    pub name: String,
}

/// Why a text is no reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It begins as a URL.
    #[error("{0:?} begins with a scheme: write it without, as registry.example.com/team/plugin:1.0")]
    Scheme(String),
    /// What comes before the first slash is no host.
    #[error(
        "{0:?} names no registry: write it first, as registry.example.com/team/plugin:1.0 or localhost:5000/plugin:1.0"
    )]
    NoRegistry(String),
    /// The name of the repository is not one.
    #[error(
        "{0:?} names no repository: it has lower case letters and digits, with single `.`, `_` or `-` between them, in parts \
         separated by `/`"
    )]
    Repository(String),
    /// The tag is not one.
    #[error("{0:?} has no valid tag: letters, digits, `.`, `_` and `-`, at most 128 of them")]
    Tag(String),
    /// It says neither which tag nor which digest.
    #[error("{0:?} does not say which version: add a tag, as :1.0, or a digest, as @sha256:…")]
    NoVersion(String),
    /// The digest is not one.
    #[error("{text:?} has no valid digest")]
    Digest {
        /// The reference.
        text: String,
        /// What there is in its place.
        source: digest::Invalid,
    },
}

impl Reference {
    /// The repository.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// The digest, if it is pinned.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// The tag, if it has one.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The same, pinned to what it turned out to be.
    #[must_use]
    pub fn pinned(&self, digest: Digest) -> Self {
        Self { digest: Some(digest), ..self.clone() }
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let error = |variant: fn(String) -> Error| variant(text.to_owned());
        if text.contains("://") {
            return Err(error(Error::Scheme));
        }
        let (rest, digest) = match text.split_once('@') {
            None => (text, None),
            Some((rest, digest)) => {
                let digest = Digest::try_from(digest.to_owned());
                (rest, Some(digest.map_err(|source| Error::Digest { text: text.to_owned(), source })?))
            }
        };
        let (registry, rest) = rest.split_once('/').ok_or_else(|| error(Error::NoRegistry))?;
        if !is_registry(registry) {
            return Err(error(Error::NoRegistry));
        }
        let (name, tag) = match rest.split_once(':') {
            None => (rest, None),
            Some((name, tag)) => (name, Some(tag)),
        };
        if !is_repository(name) {
            return Err(error(Error::Repository));
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(error(Error::Tag));
        }
        if tag.is_none() && digest.is_none() {
            return Err(error(Error::NoVersion));
        }
        let repository = Repository { registry: registry.to_ascii_lowercase(), name: name.to_owned() };
        Ok(Self { repository, tag: tag.map(str::to_owned), digest })
    }
}

/// A host that nobody takes for the first part of a repository's name: it has a dot or a port, or it is this machine.
fn is_registry(text: &str) -> bool {
    let authority = text.parse::<http::uri::Authority>();
    let valid = authority.is_ok_and(|authority| !authority.host().is_empty() && !text.contains('@'));
    valid && (text.contains(['.', ':']) || text.eq_ignore_ascii_case("localhost"))
}

fn is_repository(name: &str) -> bool {
    name.len() <= 255 && name.split('/').all(is_part)
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`
fn is_part(part: &str) -> bool {
    let is_word = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9');
    let bytes = part.as_bytes();
    let ends = bytes.first().is_some_and(|byte| is_word(*byte)) && bytes.last().is_some_and(|byte| is_word(*byte));
    let mut separators = bytes.split(|byte| is_word(*byte)).filter(|between| !between.is_empty());
    ends && separators.all(|between| matches!(between, b"." | b"_" | b"__") || between.iter().all(|byte| *byte == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=128).contains(&tag.len()) && tag.bytes().all(valid) && !tag.starts_with(['.', '-'])
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.repository.fmt(f)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_written_the_same() {
        let digest = Digest::of(b"x");
        for text in [
            "registry.example.com/team/plugin:1.0",
            "localhost/plugin:latest",
            "localhost:5000/plugin:1.0",
            "127.0.0.1:5000/a/b/c/d__e--f.g:V_1",
            "[::1]:5000/plugin:1.0",
            &format!("ghcr.io/acme/plugin@{digest}"),
            &format!("ghcr.io/acme/plugin:1.0@{digest}"),
        ] {
            let reference = text.parse::<Reference>().expect(text);
            assert_eq!(reference.to_string(), text);
        }
    }

    #[test]
    fn a_port_is_no_tag() {
        let reference = "registry:5000/plugin:1.0".parse::<Reference>().unwrap();
        assert_eq!(reference.repository(), &Repository { registry: "registry:5000".into(), name: "plugin".into() });
        assert_eq!(reference.tag(), Some("1.0"));
        assert!(matches!("registry:5000/plugin".parse::<Reference>(), Err(Error::NoVersion(_))));
    }

    #[test]
    fn an_error_says_what_is_missing() {
        let error = |text: &str| text.parse::<Reference>().unwrap_err();
        assert!(matches!(error("https://ghcr.io/a/b:1"), Error::Scheme(_)));
        for text in ["", "plugin:1.0", "team/plugin:1.0", "/plugin:1", "us er.io/a:1", "me@host.io/a:1"] {
            assert!(matches!(error(text), Error::NoRegistry(_) | Error::Digest { .. }), "{text}: {}", error(text));
        }
        for text in ["ghcr.io/:1", "ghcr.io/A:1", "ghcr.io/a//b:1", "ghcr.io/a._b:1", "ghcr.io/-a:1", "ghcr.io/a/:1"] {
            assert!(matches!(error(text), Error::Repository(_)), "{text}");
        }
        for text in ["ghcr.io/a:", "ghcr.io/a:.1", "ghcr.io/a:b/c", "ghcr.io/a:1:2"] {
            assert!(matches!(error(text), Error::Tag(_)), "{text}");
        }
        assert!(matches!(error("ghcr.io/a@sha256:1"), Error::Digest { .. }));
    }

    #[test]
    fn a_digest_pins_and_the_tag_stays_for_people() {
        let reference = "ghcr.io/a:1".parse::<Reference>().unwrap().pinned(Digest::of(b"x"));
        assert_eq!(reference.to_string(), format!("ghcr.io/a:1@{}", Digest::of(b"x")));
    }
}
