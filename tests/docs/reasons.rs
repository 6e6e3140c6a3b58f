//! Every reason that the host gives, on a condition or an Event, is explained: a person who meets one looks for it.

use std::collections::BTreeSet;

use pilothouse::plugin::CallError;

use super::{read, root};

/// Where reasons are made up: a file, and what stands before the function, or the value, that does.
const PLACES: [(&str, &str); 6] = [
    ("reconcile.rs", "pub fn category"),
    ("state.rs", "pub fn category"),
    ("reconciler.rs", "fn reason"),
    ("source.rs", "pub fn reason"),
    ("reconciler.rs", "fn set_conditions"),
    ("reconcile/status.rs", "pub(super) fn ready"),
];

/// Words in these places that are no reasons, and reasons that are made elsewhere.
const NO_REASONS: [&str; 10] =
    ["True", "False", "Unknown", "Permitted", "Watching", "Loaded", "Ready", "Degraded", "Conflict", "Deterministic"];
const ELSEWHERE: [&str; 22] = [
    "PruneHeld",
    "ReconcileSuccess",
    "ReconcilePaused",
    "ReconcileRequestHandled",
    "CleanedUpVanished",
    "CleanupAbandoned",
    "Deleting",
    "AppliedDifferently",
    "FieldTaken",
    "Released",
    "StatusPruned",
    "WaitsForDeletion",
    "WatchCircuitOpen",
    "WatchCircuitClosed",
    "AnswersDiffer",
    "NotPreviewed",
    "PinIgnored",
    "Previewed",
    "RolloutComplete",
    "RolloutStep",
    "SameAnswer",
    "Withdrawn",
];

/// The words in quotes between a place and the end of what begins there.
fn reasons(source: &str, place: &str) -> BTreeSet<String> {
    assert!(source.contains(place), "there is no {place:?} any more");
    let start = source.find(place).unwrap_or_default();
    let line = source[..start].rfind('\n').map_or(0, |at| at + 1);
    let indent: String = source[line..].chars().take_while(|c| *c == ' ').collect();
    let end = source[start..].find(&format!("\n{indent}}}\n")).expect("it ends");
    let words = source[start..start + end].split('"').skip(1).step_by(2);
    let is_reason = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_alphabetic())
            && word.chars().any(|c| c.is_ascii_lowercase())
    };
    words.filter(is_reason).map(str::to_owned).collect()
}

#[test]
fn every_reason_is_explained() {
    let elsewhere = ELSEWHERE.iter().chain(&CallError::CATEGORIES);
    let mut all: BTreeSet<_> = elsewhere.map(ToString::to_string).collect();
    for (file, place) in PLACES {
        let found = reasons(&read(&root().join("host/src").join(file)), place);
        assert!(!found.is_empty(), "{file} gives no reasons any more in {place:?}");
        all.extend(found);
    }
    all.retain(|reason| !NO_REASONS.contains(&reason.as_str()));
    assert!(all.len() > 30, "{all:?}");
    let page = read(&root().join("host/docs/operations.md"));
    let missing: Vec<_> = all.iter().filter(|reason| !page.contains(&format!("| `{reason}` |"))).collect();
    assert!(missing.is_empty(), "host/docs/operations.md has no row for the reasons {missing:?}");
}
