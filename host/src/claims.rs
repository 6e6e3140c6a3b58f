//! Which reconciler a parent belongs to: the oldest of those that select it. Pure.

use std::{
    collections::BTreeMap,
    sync::{PoisonError, RwLock},
};

use kube::core::{Selector, SelectorExt as _};
use tokio::sync::watch;

use crate::object::ObjectKey;

/// All claims of this host.
pub struct Claims {
    claims: RwLock<Vec<Claim>>,
    changed: watch::Sender<u64>,
}

/// One reconciler's claim on the parents that it selects.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// The reconciler.
    pub reconciler: ObjectKey,
    /// When it was created, RFC 3339 in UTC: the older claim holds, and of two from the same second the one that sorts first.
    pub created: String,
    /// The kind of its parents, as `Kind.group`: versions of a kind are the same objects.
    pub kind: String,
    /// Which of them.
    pub selector: Selector,
}

impl Claim {
    /// A reconciler in a namespace has no parents elsewhere.
    fn sees(&self, namespace: Option<&str>) -> bool {
        self.reconciler.namespace.is_none() || self.reconciler.namespace.as_deref() == namespace
    }

    fn precedes(&self, other: &Self) -> bool {
        (&self.created, &self.reconciler) < (&other.created, &other.reconciler)
    }
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
        claims.retain(|other| other.reconciler != claim.reconciler);
        claims.push(claim);
        drop(claims);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Takes back the claim of a reconciler.
    pub fn remove(&self, reconciler: &ObjectKey) {
        self.claims.write().unwrap_or_else(PoisonError::into_inner).retain(|claim| claim.reconciler != *reconciler);
        self.changed.send_modify(|count| *count += 1);
    }

    /// The reconciler that goes before `reconciler` for a parent of this kind and namespace; `labels` are asked for only if there is a
    /// rival.
    pub fn rival(
        &self,
        reconciler: &ObjectKey,
        kind: &str,
        namespace: Option<&str>,
        labels: impl FnOnce() -> BTreeMap<String, String>,
    ) -> Option<ObjectKey> {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let mine = claims.iter().find(|claim| claim.reconciler == *reconciler)?;
        let mut older = claims
            .iter()
            .filter(|claim| claim.kind == kind && claim.sees(namespace) && claim.precedes(mine))
            .peekable();
        older.peek()?;
        let labels = labels();
        older.find(|claim| claim.selector.matches(&labels)).map(|claim| claim.reconciler.clone())
    }

    /// The claims that go before that of `reconciler`, as far as they agree on a parent: while they stay the same, no parent of it moves.
    pub fn rivals(&self, reconciler: &ObjectKey) -> Vec<Claim> {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        let Some(mine) = claims.iter().find(|claim| claim.reconciler == *reconciler) else { return Vec::new() };
        let mut rivals: Vec<_> =
            claims.iter().filter(|claim| claim.kind == mine.kind && claim.precedes(mine)).cloned().collect();
        rivals.sort_by(|one, other| one.reconciler.cmp(&other.reconciler));
        rivals
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

    fn key(name: &str) -> ObjectKey {
        match name.split_once('/') {
            Some((namespace, name)) => ObjectKey { namespace: Some(namespace.to_owned()), name: name.to_owned() },
            None => ObjectKey { namespace: None, name: name.to_owned() },
        }
    }

    fn claim(name: &str, created: &str, label: Option<&str>) -> Claim {
        let selector = label.map(|label| Selector::from(Expression::Equal("team".to_owned(), label.to_owned())));
        Claim {
            reconciler: key(name),
            created: created.to_owned(),
            kind: "Widget.t.example".to_owned(),
            selector: selector.unwrap_or_default(),
        }
    }

    fn rival(claims: &Claims, name: &str, team: &str) -> Option<String> {
        let labels = || BTreeMap::from([("team".to_owned(), team.to_owned())]);
        claims.rival(&key(name), "Widget.t.example", Some("n"), labels).map(|rival| rival.to_string())
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
        claims.remove(&key("old"));
        assert_eq!(rival(&claims, "young", "blue"), None);
    }

    #[test]
    fn one_in_a_namespace_claims_nothing_elsewhere() {
        let claims = Claims::default();
        claims.set(claim("young", "2026-01-03T00:00:00Z", None));
        claims.set(claim("elsewhere/old", "2026-01-01T00:00:00Z", None));
        assert_eq!(rival(&claims, "young", "blue"), None);
        claims.set(claim("n/young", "2026-01-02T00:00:00Z", None));
        assert_eq!(rival(&claims, "young", "blue").as_deref(), Some("n/young"));
    }

    #[test]
    fn only_older_claims_on_the_same_kind_move_a_parent() {
        let claims = Claims::default();
        claims.set(claim("mine", "2026-01-02T00:00:00Z", None));
        claims.set(claim("younger", "2026-01-03T00:00:00Z", None));
        claims.set(Claim { kind: "Other.t.example".to_owned(), ..claim("other", "2026-01-01T00:00:00Z", None) });
        assert_eq!(claims.rivals(&key("mine")), []);
        let (one, two) = (claim("one", "2026-01-01T00:00:00Z", None), claim("two", "2026-01-01T00:00:00Z", None));
        claims.set(two.clone());
        claims.set(one.clone());
        assert_eq!(claims.rivals(&key("mine")), [one.clone(), two.clone()]);
        claims.set(one.clone());
        assert_eq!(claims.rivals(&key("mine")), [one, two.clone()], "the order in which they came decides nothing");
        let narrower = claim("one", "2026-01-01T00:00:00Z", Some("blue"));
        claims.set(narrower.clone());
        assert_eq!(claims.rivals(&key("mine")), [narrower, two.clone()]);
        claims.remove(&key("one"));
        assert_eq!(claims.rivals(&key("mine")), [two]);
        assert_eq!(claims.rivals(&key("nobody")), []);
    }

    #[test]
    fn labels_are_read_only_if_there_is_a_rival() {
        let claims = Claims::default();
        claims.set(claim("only", "2026-01-01T00:00:00Z", None));
        let rival = claims.rival(&key("only"), "Widget.t.example", None, || panic!("nobody asks"));
        assert_eq!(rival, None);
    }
}
