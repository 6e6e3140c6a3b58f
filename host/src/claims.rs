//! Which reconciler a parent belongs to: the oldest of those that select it. Pure.

use std::{
    collections::BTreeMap,
    sync::{PoisonError, RwLock},
};

use kube::core::{Selector, SelectorExt as _};
use tokio::sync::watch;

/// All claims of this host.
pub struct Claims {
    claims: RwLock<Vec<Claim>>,
    changed: watch::Sender<u64>,
}

/// One reconciler's claim on the parents that it selects.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The reconciler's name.
    pub name: String,
    /// When it was created, RFC 3339 in UTC: the older claim holds, and of two from the same second that of the lesser name.
    pub created: String,
    /// The kind of its parents, as `Kind.group`: versions of a kind are the same objects.
    pub kind: String,
    /// Which of them.
    pub selector: Selector,
}

impl Default for Claims {
    fn default() -> Self {
        Self { claims: RwLock::default(), changed: watch::Sender::new(0) }
    }
}

impl Claims {
    /// Adds a claim, or replaces that of the same reconciler.
    pub fn set(&self, claim: Claim) {
        let mut claims = self.claims.write().unwrap_or_else(PoisonError::into_inner);
        claims.retain(|other| other.name != claim.name);
        claims.push(claim);
        drop(claims);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Takes back the claim of a reconciler.
    pub fn remove(&self, name: &str) {
        self.claims.write().unwrap_or_else(PoisonError::into_inner).retain(|claim| claim.name != name);
        self.changed.send_modify(|count| *count += 1);
    }

    /// The reconciler that goes before `name` for a parent of this kind; `labels` are asked for only if there is a rival.
    pub fn rival(&self, name: &str, kind: &str, labels: impl FnOnce() -> BTreeMap<String, String>) -> Option<String> {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let mine = claims.iter().find(|claim| claim.name == name)?;
        let mut older = claims
            .iter()
            .filter(|claim| claim.kind == kind && (&claim.created, &claim.name) < (&mine.created, &mine.name))
            .peekable();
        older.peek()?;
        let labels = labels();
        older.find(|claim| claim.selector.matches(&labels)).map(|claim| claim.name.clone())
    }

    /// Tells when a claim was added, changed or taken back.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Expression;

    use super::*;

    fn claim(name: &str, created: &str, label: Option<&str>) -> Claim {
        let selector = label.map(|label| Selector::from(Expression::Equal("team".to_owned(), label.to_owned())));
        Claim {
            name: name.to_owned(),
            created: created.to_owned(),
            kind: "Widget.t.example".to_owned(),
            selector: selector.unwrap_or_default(),
        }
    }

    fn rival(claims: &Claims, name: &str, team: &str) -> Option<String> {
        let labels = || BTreeMap::from([("team".to_owned(), team.to_owned())]);
        claims.rival(name, "Widget.t.example", labels)
    }

    #[test]
    fn the_oldest_that_matches_holds() {
        let claims = Claims::default();
        claims.set(claim("young", "2026-01-03T00:00:00Z", None));
        claims.set(claim("old", "2026-01-01T00:00:00Z", Some("blue")));
        claims.set(claim("other", "2026-01-02T00:00:00Z", Some("green")));
        assert_eq!(rival(&claims, "young", "blue").as_deref(), Some("old"));
        assert_eq!(rival(&claims, "young", "green").as_deref(), Some("other"));
        assert_eq!(rival(&claims, "young", "red"), None);
        assert_eq!(rival(&claims, "old", "blue"), None);
        claims.remove("old");
        assert_eq!(rival(&claims, "young", "blue"), None);
    }

    #[test]
    fn labels_are_read_only_if_there_is_a_rival() {
        let claims = Claims::default();
        claims.set(claim("only", "2026-01-01T00:00:00Z", None));
        let rival = claims.rival("only", "Widget.t.example", || panic!("nobody asks"));
        assert_eq!(rival, None);
    }
}
