//! A label selector as `kubectl -l` writes it, such as `app=web,tier in (a,b),!legacy`: read, held against labels, and written. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use kube::core::{Expression, SelectorExt as _};

/// See the module's documentation. Two that say the same in another order are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Labels(BTreeSet<Expression>);

/// A name or a value is at most so long, by the API.
const MAX_NAME: usize = 63;
/// The prefix of a key, a DNS name, is at most so long.
const MAX_PREFIX: usize = 253;

/// Why a text is no label selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} {1}")]
pub struct Error(String, &'static str);

impl Labels {
    /// Reads a selector; the empty one selects all.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        parts(text).into_iter().map(expression).collect::<Result<_, _>>().map(Self)
    }

    /// Whether it selects whatever has labels or not.
    pub fn selects_all(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it selects what has these labels.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|expression| expression.matches(labels))
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, expression) in self.0.iter().enumerate() {
            write!(f, "{}{expression}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// The requirements: what is between commas, but for those in parentheses.
fn parts(text: &str) -> Vec<&str> {
    let (mut parts, mut begin, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => inside = true,
            b')' => inside = false,
            b',' if !inside => {
                parts.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[begin..]);
    parts
}

fn expression(part: &str) -> Result<Expression, Error> {
    let part = part.trim();
    if part.contains(['<', '>']) {
        return Err(Error(part.to_owned(), "compares numbers, which no selection of objects can"));
    }
    if let Some((key, values)) = part.split_once('(') {
        let values = values.strip_suffix(')').ok_or_else(|| Error(part.to_owned(), "has no closing parenthesis"))?;
        let values = values.split(',').map(value).collect::<Result<BTreeSet<_>, _>>()?;
        let mut words = key.split_whitespace();
        return match (words.next(), words.next(), words.next()) {
            (Some(name), Some("in"), None) => Ok(Expression::In(key_of(name)?, values)),
            (Some(name), Some("notin"), None) => Ok(Expression::NotIn(key_of(name)?, values)),
            _ => Err(Error(part.to_owned(), "is neither KEY in (VALUES) nor KEY notin (VALUES)")),
        };
    }
    for (operator, make) in [
        ("!=", Expression::NotEqual as fn(String, String) -> Expression),
        ("==", Expression::Equal),
        ("=", Expression::Equal),
    ] {
        if let Some((key, of)) = part.split_once(operator) {
            return Ok(make(key_of(key)?, value(of)?));
        }
    }
    match part.strip_prefix('!') {
        Some(key) => Ok(Expression::DoesNotExist(key_of(key)?)),
        None => Ok(Expression::Exists(key_of(part)?)),
    }
}

fn key_of(text: &str) -> Result<String, Error> {
    let text = text.trim();
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let is_prefix = |prefix: &str| {
        let is_dns = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
        (1..=MAX_PREFIX).contains(&prefix.len()) && prefix.chars().all(is_dns) && has_firm_ends(prefix)
    };
    if is_word(name) && prefix.is_none_or(is_prefix) {
        Ok(text.to_owned())
    } else {
        Err(Error(text.to_owned(), "is no key of a label"))
    }
}

fn value(text: &str) -> Result<String, Error> {
    let text = text.trim();
    if text.is_empty() || is_word(text) {
        Ok(text.to_owned())
    } else {
        Err(Error(text.to_owned(), "is no value of a label"))
    }
}

fn is_word(text: &str) -> bool {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=MAX_NAME).contains(&text.len()) && text.chars().all(is_inner) && has_firm_ends(text)
}

fn has_firm_ends(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn each_form_of_kubectl_selects_what_it_says() {
        let web = labels(&[("app", "web"), ("t.example/tier", "a"), ("empty", "")]);
        for (text, selects) in [
            ("", true),
            ("app", true),
            ("!app", false),
            ("other", false),
            ("! other", true),
            ("app=web", true),
            ("app==web", true),
            ("app = web", true),
            ("app!=web", false),
            ("other!=web", true),
            ("empty=", true),
            ("t.example/tier in (a, b)", true),
            ("t.example/tier notin (a,b)", false),
            ("other notin (a)", true),
            ("app=web,t.example/tier in (b),!other", false),
            ("app=web,t.example/tier in (a,b),!other", true),
        ] {
            let parsed = Labels::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(parsed.matches(&web), selects, "{text}");
            assert_eq!(Labels::parse(&parsed.to_string()), Ok(parsed), "{text} is read as it is written");
        }
    }

    #[test]
    fn the_order_of_requirements_means_nothing() {
        assert_eq!(Labels::parse("b in (2,1),a=1"), Labels::parse("a=1, b in (1,2),a=1"));
        assert_eq!(Labels::parse("b,a=1").unwrap().to_string(), Labels::parse("a=1,b").unwrap().to_string());
    }

    #[test]
    fn what_is_no_selector_is_refused() {
        for text in [
            "a=b=c",
            "a b",
            "a in b",
            "a in (b",
            "a is (b)",
            ",",
            "a,",
            "=b",
            "a=b c",
            "-a",
            "a=-",
            "x/y/z",
            "/a",
            "A/a",
            "a>1",
            "a&limit=1",
            "a=b\u{e9}",
            &"a".repeat(64),
        ] {
            assert!(Labels::parse(text).is_err(), "{text}");
        }
    }
}
