//! Why a plugin gives no answer, and what the host does about it.

use std::error::Error;
use std::time::Duration;

use crate::raw;

/// Why there is no answer. Nothing in the cluster is changed or deleted; the message is shown on the parent, so never put a
/// secret in it.
///
/// `?` turns every [`std::error::Error`] into [`Failure::Retry`] with the texts of the error and its sources: an unexpected
/// error is most often one that passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Try again, with exponential backoff.
    Retry(String),
    /// Try again after this time (counted in milliseconds, at most 49 days).
    RetryAfter(Duration, String),
    /// Trying again makes no sense until the parent, a child or the plugin changes.
    Terminal(String),
}

impl Failure {
    /// Try again, with exponential backoff.
    pub fn retry(message: impl Into<String>) -> Self {
        Self::Retry(message.into())
    }

    /// Try again after `delay`.
    pub fn retry_after(delay: Duration, message: impl Into<String>) -> Self {
        Self::RetryAfter(delay, message.into())
    }

    /// Do not try again until the parent, a child or the plugin changes.
    pub fn terminal(message: impl Into<String>) -> Self {
        Self::Terminal(message.into())
    }

    /// What the user is told.
    pub fn message(&self) -> &str {
        match self {
            Self::Retry(message) | Self::RetryAfter(_, message) | Self::Terminal(message) => message,
        }
    }
}

// Failure itself is no `Error`, which is what lets this exist.
impl<E: Error> From<E> for Failure {
    fn from(err: E) -> Self {
        let mut message = err.to_string();
        let mut source = err.source();
        while let Some(err) = source {
            message.push_str(": ");
            message.push_str(&err.to_string());
            source = err.source();
        }
        Self::Retry(message)
    }
}

impl From<Failure> for raw::types::Failure {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Retry(message) => Self::Retry(message),
            Failure::RetryAfter(delay, message) => Self::RetryAfter((millis(delay), message)),
            Failure::Terminal(message) => Self::Terminal(message),
        }
    }
}

/// The contract counts in milliseconds of 32 bits; what is longer is cut.
pub(crate) fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_mark_keeps_the_sources() {
        fn port(text: &str) -> Result<u16, Failure> {
            Ok(text.parse()?)
        }
        assert_eq!(port("80"), Ok(80));
        assert_eq!(port("x"), Err(Failure::retry("invalid digit found in string")));
    }

    #[test]
    fn long_waits_are_cut_to_what_the_contract_can_carry() {
        assert_eq!(millis(Duration::from_secs(2)), 2000);
        assert_eq!(millis(Duration::MAX), u32::MAX);
    }
}
