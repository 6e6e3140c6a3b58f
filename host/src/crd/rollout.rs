//! How a new revision takes over from the one that serves: what the spec of a reconciler says of it, and what its status tells.

use std::{str::FromStr, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ParseLimitError, Timeout};

/// How a new revision takes over from the one that serves.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub struct Rollout {
    /// `Immediate`: all parents at once. `Staged`: step by step, by `steps`.
    pub strategy: Strategy,
    /// `On`: before it serves, what a new revision would change is computed for up to 500 parents, told, and held against `guards`. `Off`: it
    /// is not. Write it in quotes: YAML takes the bare word for true or false.
    pub preview: Preview,
    /// Beyond one of these a new revision does not go on. `100%` switches one off.
    pub guards: Guards,
    /// With `Staged`: which share of the parents a new revision has at each step, at most 20. After the last one it has all of them.
    #[schemars(
        length(max = 20),
        extend("x-kubernetes-validations" = [{
            "rule": "self.map(step, step.percent).isSorted()",
            "message": "each step has at least the percent of the one before",
        }])
    )]
    pub steps: Vec<RolloutStep>,
    /// With `Staged`: how long a step may wait, beyond its pause, until its parents are reconciled and ready. Then the revision is rolled
    /// back.
    pub progress_deadline: Timeout,
}

impl Default for Rollout {
    fn default() -> Self {
        let step = |percent, minutes| RolloutStep { percent, pause: Some(Timeout(Duration::from_mins(minutes))) };
        Self {
            strategy: Strategy::default(),
            preview: Preview::default(),
            guards: Guards::default(),
            steps: vec![step(5, 5), step(25, 10)],
            progress_deadline: Timeout(Duration::from_mins(10)),
        }
    }
}

/// Which parents a new revision has at first.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub enum Strategy {
    /// All of them.
    #[default]
    Immediate,
    /// A few, and more step by step.
    Staged,
}

/// Whether a new revision is looked at before it serves.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub enum Preview {
    /// It is.
    #[default]
    On,
    /// It is not.
    Off,
}

/// One step of a staged rollout.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub struct RolloutStep {
    /// The share of the parents, from 1 to 100. Which ones is decided by their UIDs, so each step has those of the step before.
    #[schemars(with = "i32", range(min = 1, max = 100))]
    pub percent: u8,
    /// How long the step lasts at least; as long as it takes to see that something is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<Timeout>,
}

/// How much of the parents may be the worse for a new revision. What was so before it came does not count.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub struct Guards {
    /// Parents for which the new revision fails.
    pub max_failing: Percent,
    /// Parents of which it deletes children. Only the preview sees that.
    pub max_losing_children: Percent,
    /// Parents that are not ready. Only a staged rollout sees that.
    pub max_not_ready: Percent,
}

impl Default for Guards {
    fn default() -> Self {
        Self { max_failing: Percent(10), max_losing_children: Percent(10), max_not_ready: Percent(10) }
    }
}

/// A share, written as `10%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Percent(pub u8);

impl Percent {
    /// Whether `part` is more than this share of `all`.
    pub fn is_exceeded(self, part: usize, all: usize) -> bool {
        part.saturating_mul(100) > all.saturating_mul(usize::from(self.0))
    }
}

impl FromStr for Percent {
    type Err = ParseLimitError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = text.strip_suffix('%').and_then(|number| number.parse().ok()).filter(|percent| *percent <= 100);
        read.map(Self).ok_or_else(|| ParseLimitError::Percent(text.to_owned()))
    }
}

impl TryFrom<String> for Percent {
    type Error = ParseLimitError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Percent> for String {
    fn from(Percent(percent): Percent) -> Self {
        format!("{percent}%")
    }
}

/// How far the latest revision that took over, or was to, has come.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// The revision.
    pub revision: String,
    /// The one that it takes over from, and to which the parents go back.
    pub from: Option<String>,
    /// Where it stands. `Progressing`: parents go over step by step. `Paused`: they would, and `spec.paused` is true. `Complete`: it has
    /// all of them. `RolledBack`: it has none any more. `Refused`: it never had one. `reason` and `message` say why.
    pub state: RolloutState,
    /// One word.
    pub reason: String,
    /// The same for a person, with the numbers.
    pub message: String,
    /// The step of a staged rollout, from 1.
    #[schemars(with = "Option<i32>")]
    pub step: Option<u32>,
    /// The share of the parents that it has.
    #[schemars(with = "i32", range(min = 0, max = 100))]
    pub percent: u8,
    /// When it began.
    pub started: Time,
    /// When the latest step began, or it came to its end.
    pub since: Time,
    /// The generation of the spec under which it was refused or rolled back: it is not tried again while this is the same.
    pub generation: Option<i64>,
    /// What the preview has shown.
    pub preview: Option<String>,
}

/// See [`RolloutStatus::state`].
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub enum RolloutState {
    /// Step by step.
    Progressing,
    /// It would go on if the reconciler were not paused.
    Paused,
    /// It has all parents.
    Complete,
    /// It has none any more.
    RolledBack,
    /// It never had one.
    Refused,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_written_with_its_sign_and_none_is_exceeded_by_nothing() {
        let guards: Guards = serde_json::from_str(r#"{"maxFailing": "0%"}"#).unwrap();
        assert_eq!((guards.max_failing, guards.max_not_ready), (Percent(0), Percent(10)));
        assert_eq!(String::from(guards.max_failing), "0%");
        for bad in ["10", "-1%", "101%", "ten %", "0.5%"] {
            assert!(bad.parse::<Percent>().unwrap_err().to_string().contains("10%"), "{bad}");
        }
        assert!(Percent(0).is_exceeded(1, 1000) && !Percent(0).is_exceeded(0, 0));
        assert!(Percent(10).is_exceeded(11, 100) && !Percent(10).is_exceeded(10, 100));
        // One of a few is more than a tenth of them.
        assert!(Percent(10).is_exceeded(1, 9) && !Percent(100).is_exceeded(9, 9));
    }
}
