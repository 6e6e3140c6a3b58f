//! What a plugin asks to see: its selectors, checked, as selections that each can be watched or listed. Pure.
//!
//! Secrets are selected by name alone: those that the reconciler grants, each for itself, so that no other is ever read for a plugin.

use std::fmt;

use kube::api::ListParams;

use crate::{
    crd::SecretRef,
    labels::Labels,
    object::{Object, ObjectKey},
    plugin::{Selector, describe::KindName},
};

/// How many selectors the answer of `relate` may have.
const MAX_SELECTORS: usize = 50;
/// How many names a selector may have: each is a watch, or a request.
const MAX_NAMES: usize = 100;
/// A name or a namespace is at most so long, by the API.
const MAX_NAME: usize = 253;

/// All objects of a kind, or those in one namespace, of one name, or with such labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selection {
    /// The kind.
    pub kind: KindName,
    /// The namespace; none: all, or a kind of cluster scope.
    pub namespace: Option<String>,
    /// The name; none: all.
    pub name: Option<String>,
    /// The labels.
    pub labels: Labels,
}

/// Why a selector is not followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is none, or of what the plugin may not select.
    #[error("what the plugin selects is refused: {path} {problem}")]
    Refused {
        /// Where, as `selectors[0].labels`.
        path: String,
        /// What is wrong there, and what to do.
        problem: String,
    },
    /// It selects Secrets that are not granted.
    #[error(
        "{path} selects {what}; list it in spec.grants.kube.secrets of the reconciler, unless it is one that the reconciler itself uses: \
         these are shown to no plugin"
    )]
    SecretNotGranted {
        /// Which selector.
        path: String,
        /// What it selects, as `Secret team/database`.
        what: String,
    },
}

/// What selectors are checked against.
pub struct Rules<'a> {
    /// The kinds that may be selected; none: all.
    pub kinds: Option<&'a [KindName]>,
    /// The one namespace that the reconciler may see; none: all of them.
    pub scope: Option<&'a str>,
    /// The Secrets that may be seen; none: whichever there are.
    pub secrets: Option<&'a [SecretRef]>,
}

impl Rules<'_> {
    /// What the answer of `relate` selects, sorted, each once.
    ///
    /// # Errors
    /// If any part of it cannot be followed.
    pub fn relations(&self, selectors: Vec<Selector>) -> Result<Vec<Selection>, Error> {
        if selectors.len() > MAX_SELECTORS {
            return refuse("selectors", format!("has {} items, and {MAX_SELECTORS} are allowed", selectors.len()));
        }
        let mut selections = Vec::new();
        for (at, selector) in selectors.into_iter().enumerate() {
            selections.extend(self.selections(&format!("selectors[{at}]"), selector)?);
        }
        selections.sort_unstable();
        selections.dedup();
        Ok(selections)
    }

    /// What one selector selects. `path` is where it stands.
    ///
    /// # Errors
    /// If any part of it cannot be followed.
    pub fn selections(&self, path: &str, selector: Selector) -> Result<Vec<Selection>, Error> {
        let Selector { kind, namespace, names, labels } = selector;
        if self.kinds.is_some_and(|kinds| !kinds.contains(&kind)) {
            return refuse(format!("{path}.kind"), format!("is {kind}, which describe() does not list under related"));
        }
        if !is_kind(&kind) {
            return refuse(format!("{path}.kind"), format!("is {kind}, which is no kind"));
        }
        let namespace = self.namespace(&format!("{path}.namespace"), namespace)?;
        if names.len() > MAX_NAMES {
            let problem = format!("has {} items, and {MAX_NAMES} are allowed; select by labels", names.len());
            return refuse(format!("{path}.names"), problem);
        }
        if let Some(at) = names.iter().position(|name| !is_name(name)) {
            return refuse(format!("{path}.names[{at}]"), "is no name of an object");
        }
        let labels = match Labels::parse(&labels) {
            Ok(labels) => labels,
            Err(error) => return refuse(format!("{path}.labels"), format!("is no label selector: {error}")),
        };
        let selection = |namespace: Option<String>, name: Option<String>| Selection {
            kind: kind.clone(),
            namespace,
            name,
            labels: labels.clone(),
        };
        if let Some(secrets) = self.secrets.filter(|_| is_secret(&kind)) {
            let granted = granted(path, secrets, namespace.as_deref(), &names)?;
            return Ok(granted.map(|it| selection(Some(it.namespace.clone()), Some(it.name.clone()))).collect());
        }
        if names.is_empty() {
            return Ok(vec![selection(namespace, None)]);
        }
        Ok(names.into_iter().map(|name| selection(namespace.clone(), Some(name))).collect())
    }

    /// The namespace that is meant: one that sees only its own need not name it.
    ///
    /// # Errors
    /// If it is none, or may not be seen.
    fn namespace(&self, path: &str, given: Option<String>) -> Result<Option<String>, Error> {
        match (given, self.scope) {
            (Some(given), Some(scope)) if given != scope => {
                refuse(path, format!("is {given:?}, and a Reconciler sees its own namespace only"))
            }
            (Some(given), _) if !is_name(&given) => refuse(path, "is no name of a namespace"),
            (given, scope) => Ok(given.or_else(|| scope.map(str::to_owned))),
        }
    }
}

/// The Secrets of these that are in the namespace, and have one of the names.
fn granted<'a>(
    path: &str,
    secrets: &'a [SecretRef],
    namespace: Option<&'a str>,
    names: &'a [String],
) -> Result<impl Iterator<Item = &'a SecretRef>, Error> {
    let is_in = move |secret: &&SecretRef| namespace.is_none_or(|namespace| secret.namespace == namespace);
    let place = namespace.map_or_else(String::new, |namespace| format!("{namespace}/"));
    let denied = |name: &str| Error::SecretNotGranted { path: path.to_owned(), what: format!("Secret {place}{name}") };
    let is_there = |name: &String| secrets.iter().filter(is_in).any(|secret| secret.name == *name);
    if let Some(name) = names.iter().find(|name| !is_there(name)) {
        return Err(denied(name));
    }
    if !secrets.iter().any(|secret| is_in(&secret)) {
        return Err(denied("*"));
    }
    Ok(secrets.iter().filter(is_in).filter(|secret| names.is_empty() || names.contains(&secret.name)))
}

/// Whether the parts of its name can be those of a kind: they become part of paths.
fn is_kind(kind: &KindName) -> bool {
    let mut parts = kind.api_version.splitn(2, '/');
    parts.all(is_name) && kind.kind.chars().all(|c| c.is_ascii_alphanumeric())
}

/// Whether these are Secrets, however somebody writes it.
pub fn is_secret(kind: &KindName) -> bool {
    kind.api_version == "v1" && ["secret", "secrets", "secretlist"].contains(&kind.kind.to_ascii_lowercase().as_str())
}

impl Selection {
    /// Whether the object, which is of its kind, is selected.
    pub fn matches(&self, object: &Object) -> bool {
        let is = |wanted: &Option<String>, there: Option<&str>| wanted.is_none() || wanted.as_deref() == there;
        is(&self.namespace, object.namespace())
            && is(&self.name, Some(object.name()))
            && (self.labels.selects_all() || self.labels.matches(object.kept_labels()))
    }

    /// Where the object is that is selected by namespace and name.
    pub fn key(&self) -> ObjectKey {
        ObjectKey { namespace: self.namespace.clone(), name: self.name.clone().unwrap_or_default() }
    }

    /// How it is listed, and watched.
    pub fn list_params(&self) -> ListParams {
        let params = match &self.name {
            Some(name) => ListParams::default().fields(&format!("metadata.name={name}")),
            None => ListParams::default(),
        };
        if self.labels.selects_all() { params } else { params.labels(&self.labels.to_string()) }
    }

    /// All of its kind that is where this is.
    #[must_use]
    pub fn in_namespace(&self) -> Self {
        Self { name: None, labels: Labels::default(), ..self.clone() }
    }

    /// All of its kind.
    #[must_use]
    pub fn anywhere(&self) -> Self {
        Self { namespace: None, ..self.in_namespace() }
    }

    /// Whether all of its kind in a namespace, or anywhere, is selected.
    pub fn is_whole(&self) -> bool {
        self.name.is_none() && self.labels.selects_all()
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        if !self.labels.selects_all() {
            write!(f, " with labels {}", self.labels)?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in namespace {namespace}"),
            None => Ok(()),
        }
    }
}

fn refuse<T>(path: impl Into<String>, problem: impl Into<String>) -> Result<T, Error> {
    Err(Error::Refused { path: path.into(), problem: problem.into() })
}

/// Whether an object can have this name. It becomes part of paths and of field selectors, so what means something there is left out.
fn is_name(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '@' | '~' | '+');
    (1..=MAX_NAME).contains(&text.len()) && text != "." && text != ".." && text.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(api_version: &str, kind: &str) -> KindName {
        KindName { api_version: api_version.to_owned(), kind: kind.to_owned() }
    }

    fn selector(of: &str, namespace: Option<&str>, names: &[&str], labels: &str) -> Selector {
        Selector {
            kind: kind("v1", of),
            namespace: namespace.map(str::to_owned),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            labels: labels.to_owned(),
        }
    }

    fn secret(namespace: &str, name: &str) -> SecretRef {
        SecretRef { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    fn told(selections: &[Selection]) -> Vec<String> {
        selections.iter().map(ToString::to_string).collect()
    }

    const ALL: Rules<'_> = Rules { kinds: None, scope: None, secrets: Some(&[]) };

    #[test]
    fn each_name_is_a_selection_and_what_is_selected_twice_counts_once() {
        let selectors = vec![
            selector("ConfigMap", Some("n"), &["b", "a"], ""),
            selector("ConfigMap", Some("n"), &["a"], ""),
            selector("Node", None, &[], "b=2,a=1"),
            selector("Node", None, &[], "a=1,b=2"),
        ];
        assert_eq!(
            told(&ALL.relations(selectors).unwrap()),
            ["ConfigMap (v1) a in namespace n", "ConfigMap (v1) b in namespace n", "Node (v1) with labels a=1,b=2"]
        );
    }

    #[test]
    fn what_is_wrong_is_told_by_path() {
        let kinds = [kind("v1", "ConfigMap")];
        let rules = Rules { kinds: Some(&kinds), scope: Some("mine"), secrets: Some(&[]) };
        let refused = |selector| match rules.relations(vec![selector]) {
            Err(Error::Refused { path, .. }) => path,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(selector("Pod", None, &[], "")), "selectors[0].kind");
        assert_eq!(refused(selector("ConfigMap", Some("other"), &[], "")), "selectors[0].namespace");
        assert_eq!(refused(selector("ConfigMap", None, &["a", "b,metadata.namespace=x"], "")), "selectors[0].names[1]");
        assert_eq!(refused(selector("ConfigMap", None, &["../x"], "")), "selectors[0].names[0]");
        assert_eq!(refused(selector("ConfigMap", None, &["a"; 101], "")), "selectors[0].names");
        assert_eq!(refused(selector("ConfigMap", None, &[], "a in b")), "selectors[0].labels");
        let many = vec![selector("ConfigMap", None, &[], ""); 51];
        assert!(matches!(rules.relations(many), Err(Error::Refused { path, .. }) if path == "selectors"));
        // One that sees only its own namespace need not name it.
        let own = rules.relations(vec![selector("ConfigMap", None, &[], "")]).unwrap();
        assert_eq!(told(&own), ["ConfigMap (v1) in namespace mine"]);
    }

    #[test]
    fn secrets_are_selected_by_the_names_that_are_granted() {
        let secrets = [secret("n", "a"), secret("n", "b"), secret("m", "a")];
        let rules = Rules { secrets: Some(&secrets), ..ALL };
        let of = |selector: Selector| rules.relations(vec![selector]).map(|selections| told(&selections));
        assert_eq!(
            of(selector("Secret", Some("n"), &[], "x=y")).unwrap(),
            ["Secret (v1) a with labels x=y in namespace n", "Secret (v1) b with labels x=y in namespace n"]
        );
        assert_eq!(of(selector("Secret", None, &["a"], "")).unwrap().len(), 2);
        for denied in [
            selector("Secret", Some("n"), &["a", "c"], ""),
            selector("Secret", Some("other"), &[], ""),
            selector("Secret", None, &["c"], ""),
            selector("secretlist", Some("n"), &["c"], ""),
        ] {
            assert!(matches!(of(denied.clone()), Err(Error::SecretNotGranted { .. })), "{denied:?}");
        }
        assert!(matches!(ALL.relations(vec![selector("Secret", None, &[], "")]), Err(Error::SecretNotGranted { .. })));
    }

    #[test]
    fn an_object_is_selected_by_namespace_name_and_labels() {
        let object =
            Object::from_json(r#"{"metadata":{"name":"a","namespace":"n","labels":{"x":"1"}},"data":{}}"#).unwrap();
        for (selected, selector) in [
            (true, selector("ConfigMap", None, &[], "")),
            (true, selector("ConfigMap", Some("n"), &["a"], "x=1")),
            (false, selector("ConfigMap", Some("m"), &[], "")),
            (false, selector("ConfigMap", Some("n"), &["b"], "")),
            (false, selector("ConfigMap", Some("n"), &[], "x=2")),
        ] {
            assert_eq!(ALL.relations(vec![selector.clone()]).unwrap()[0].matches(&object), selected, "{selector:?}");
        }
    }
}
