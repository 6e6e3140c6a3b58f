//! A SHA-256, as registries write it: `sha256:` and 64 hex digits. It is what a manifest or a blob is, so that whoever has been told it
//! by somebody they trust need not trust who sends the bytes.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use crate::identity;

/// See the module's documentation. Other algorithms are not read: nobody publishes components under them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Digest(String);

/// What is written before the hex digits.
const ALGORITHM: &str = "sha256:";

/// A text is no digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no digest: write `sha256:` and 64 hex digits in lower case")]
pub struct Invalid(String);

impl Digest {
    /// That of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self::hashed(&sha2::Sha256::digest(bytes))
    }

    /// That of what has been hashed already.
    pub(super) fn hashed(hash: &[u8]) -> Self {
        Self(format!("{ALGORITHM}{}", identity::hex(hash, 32)))
    }

    /// All of it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its 64 hex digits.
    pub fn hex(&self) -> &str {
        &self.0[ALGORITHM.len()..]
    }
}

impl TryFrom<String> for Digest {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        let hex = text.strip_prefix(ALGORITHM).unwrap_or_default();
        if hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            Ok(Self(text))
        } else {
            Err(Invalid(text))
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_sha256_is_a_digest() {
        let nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").as_str(), nothing);
        assert_eq!(Digest::try_from(nothing.to_owned()), Ok(Digest::of(b"")));
        assert_eq!(Digest::of(b"").hex().len(), 64);
        for text in ["", "sha256:", "sha256:e3b0", "sha512:e3b0", &nothing.to_uppercase(), &format!("{nothing}0")] {
            assert_eq!(Digest::try_from(text.to_owned()), Err(Invalid(text.to_owned())));
        }
    }
}
