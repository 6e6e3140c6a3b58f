//! What a registry wants to see before it answers: the challenge of a 401, and the token that meets it, as docker's registries have it
//! and the OCI distribution specification leaves it to them.

use http::{HeaderMap, Uri, header::WWW_AUTHENTICATE};
use serde::Deserialize;

use super::reference::Repository;

/// What a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// Name and password with each request.
    Basic,
    /// A token, from elsewhere.
    Bearer {
        /// Where tokens are given.
        realm: String,
        /// Who asks.
        service: Option<String>,
        /// For what.
        scope: Option<String>,
    },
}

/// The answer of the place where tokens are given. It has either name.
#[derive(Deserialize)]
pub(super) struct Token {
    #[serde(alias = "access_token")]
    pub(super) token: String,
}

impl Challenge {
    /// The first one that we know.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| Self::parse(value.to_str().ok()?)).next()
    }

    fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        for (name, value) in parameters(rest) {
            match name.to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                "scope" => scope = Some(value),
                _ => {}
            }
        }
        Some(Self::Bearer { realm: realm?, service, scope })
    }
}

/// `name="value",name=value`, where a quoted value may have commas.
fn parameters(mut text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    while let Some((name, rest)) = text.split_once('=') {
        let (value, after) = match rest.trim_start().strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => rest.split_once(',').unwrap_or((rest, "")),
        };
        found.push((name.trim_matches([' ', ',']).to_owned(), value.trim().to_owned()));
        text = after;
    }
    found
}

/// Where to ask for a token.
pub(super) fn token_uri(
    realm: &str,
    service: Option<&str>,
    scope: Option<&str>,
    repository: &Repository,
) -> Result<Uri, http::uri::InvalidUri> {
    let usual = format!("repository:{}:pull", repository.name);
    // Several scopes are separated by spaces in a challenge, and are parameters of their own here.
    let scopes = scope.unwrap_or(&usual).split(' ').map(|scope| ("scope", scope));
    let query = service.map(|service| ("service", service)).into_iter().chain(scopes);
    let query: Vec<_> = query.map(|(name, value)| format!("{name}={}", escaped(value))).collect();
    let separator = if realm.contains('?') { '&' } else { '?' };
    format!("{realm}{separator}{}", query.join("&")).parse()
}

/// As a value in a query.
fn escaped(text: &str) -> String {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'/' | b':' | b',');
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn challenge(values: &[&'static str]) -> Option<Challenge> {
        let headers = values.iter().map(|value| (WWW_AUTHENTICATE, HeaderValue::from_static(value)));
        Challenge::of(&headers.collect())
    }

    #[test]
    fn a_challenge_is_read_whatever_it_looks_like() {
        assert_eq!(challenge(&["Basic realm=\"x\""]), Some(Challenge::Basic));
        assert_eq!(challenge(&["basic"]), Some(Challenge::Basic));
        let bearer =
            challenge(&["Negotiate", "bearer Realm=\"https://a.io/t\", service=a.io,scope=\"repository:x:pull,push\""]);
        let expected = Challenge::Bearer {
            realm: "https://a.io/t".to_owned(),
            service: Some("a.io".to_owned()),
            scope: Some("repository:x:pull,push".to_owned()),
        };
        assert_eq!(bearer, Some(expected));
        for none in ["", "Negotiate", "Bearer service=\"x\"", "Bearer"] {
            assert_eq!(challenge(&[none]), None, "{none}");
        }
    }

    #[test]
    fn the_place_of_a_token_says_for_what_it_is_to_be() {
        let repository = Repository { registry: "r.io".to_owned(), name: "team/x".to_owned() };
        let uri = |realm, service, scope| token_uri(realm, service, scope, &repository).unwrap().to_string();
        assert_eq!(
            uri("https://a.io/t", Some("the service"), None),
            "https://a.io/t?service=the%20service&scope=repository:team/x:pull"
        );
        let both = Some("repository:x:pull,push repository:y:pull");
        assert_eq!(
            uri("https://a.io/t?a=b", None, both),
            "https://a.io/t?a=b&scope=repository:x:pull,push&scope=repository:y:pull"
        );
    }

    #[test]
    fn a_token_has_either_name() {
        for text in [r#"{"token":"t"}"#, r#"{"access_token":"t","expires_in":300}"#] {
            assert_eq!(serde_json::from_str::<Token>(text).unwrap().token, "t");
        }
    }
}
