//! What a request may ask for: a path at or below that of the grant's URL, such that no server takes it for another.
//!
//! Servers and proxies differ in what they decode, and how often. So nothing is decoded or made straight here: what some of them could
//! take for another path is refused.

use http::{Uri, uri::Authority};

/// The longest target.
const MAX_TARGET: usize = 8 << 10;
/// How much of a path is shown to people.
const SHOWN: usize = 80;

/// Where the requests of a grant go: its URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) is_tls: bool,
    /// The host as the server knows itself, with the port if it is not the usual one.
    pub(super) authority: Authority,
    /// Without a slash at the end.
    path: String,
}

/// Why it is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    // It is not shown: who writes one that is refused may have put a password into it.
    #[error(
        "its url cannot be used: it has to be a scheme (http or https), a host, and a path if there is one, as in https://api.example.com/v1"
    )]
    Url,
    #[error("the target {0:?} has to begin with a slash: it is a path from the root of the host, and no URL")]
    Absolute(String),
    #[error("the target is longer than {MAX_TARGET} bytes")]
    TooLong,
    #[error("the target has the character {0:?}: percent-encode it")]
    Character(char),
    #[error("the target has a % that is not followed by two hexadecimal digits")]
    Escape,
    #[error(
        "the path {0:?} has an encoded dot, slash, backslash or control character, which servers read in different ways"
    )]
    Encoded(String),
    #[error("the path {0:?} has a segment . or ..")]
    Dots(String),
    #[error("the path {path:?} is not at or below {allowed:?}")]
    Outside { path: String, allowed: String },
}

impl Place {
    /// Reads the URL of a grant.
    pub(super) fn parse(url: &str) -> Result<Self, Error> {
        let uri: Uri = url.parse().map_err(|_| Error::Url)?;
        let (is_tls, usual_port) = match uri.scheme_str() {
            Some("https") => (true, 443),
            Some("http") => (false, 80),
            _ => return Err(Error::Url),
        };
        // A fragment is dropped by the parser.
        if uri.query().is_some() || url.contains('#') {
            return Err(Error::Url);
        }
        let authority = uri.authority().filter(|it| !it.host().is_empty() && !it.as_str().contains('@'));
        let authority = authority.ok_or(Error::Url)?;
        let host = authority.host().to_ascii_lowercase();
        // One that is no number is taken for none.
        if authority.port_u16().is_none() && authority.as_str() != authority.host() {
            return Err(Error::Url);
        }
        let port = authority.port_u16().filter(|port| *port != usual_port);
        let authority = port.map_or(host.clone(), |port| format!("{host}:{port}"));
        let path = uri.path().trim_end_matches('/');
        check_path(path).map_err(|_| Error::Url)?;
        Ok(Self { is_tls, authority: authority.parse().map_err(|_| Error::Url)?, path: path.to_owned() })
    }

    /// Checks a target.
    pub(super) fn check(&self, target: &str) -> Result<(), Error> {
        if !target.starts_with('/') {
            return Err(Error::Absolute(shown(target)));
        }
        if target.len() > MAX_TARGET {
            return Err(Error::TooLong);
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        check_characters(query, "/?")?;
        check_path(path)?;
        match path.strip_prefix(&self.path) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Ok(()),
            _ => Err(Error::Outside { path: shown(path), allowed: format!("{}/", self.path) }),
        }
    }
}

fn check_path(path: &str) -> Result<(), Error> {
    check_characters(path, "/")?;
    if has_encoded(path) {
        return Err(Error::Encoded(shown(path)));
    }
    // Some servers take what is behind a semicolon for parameters, and `..;` for `..`.
    let is_dots = |segment: &str| matches!(segment.split(';').next(), Some("." | ".."));
    if path.split('/').any(is_dots) { Err(Error::Dots(shown(path))) } else { Ok(()) }
}

/// What RFC 3986 allows: letters, digits, some signs, and escapes.
fn check_characters(text: &str, more: &str) -> Result<(), Error> {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-._~!$&'()*+,;=:@%".contains(character);
    if let Some(other) = text.chars().find(|character| !is_plain(*character) && !more.contains(*character)) {
        return Err(Error::Character(other));
    }
    let is_hex = |text: &str| text.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if text.split('%').skip(1).all(is_hex) { Ok(()) } else { Err(Error::Escape) }
}

/// Whether it has an escape that must not be there, also for who decodes more than once.
fn has_encoded(path: &str) -> bool {
    let mut text = path.to_ascii_lowercase();
    while text.contains("%25") {
        text = text.replace("%25", "%");
    }
    text.split('%').skip(1).any(|escape| {
        let escape = escape.get(..2).unwrap_or_default();
        matches!(escape, "2e" | "2f" | "5c" | "7f") || escape.starts_with(['0', '1'])
    })
}

/// The beginning of a path. A query may hold what is not for everybody.
fn shown(target: &str) -> String {
    let path = target.split('?').next().unwrap_or_default();
    let start: String = path.chars().take(SHOWN).collect();
    if start.len() < path.len() { format!("{start}…") } else { start }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(url: &str) -> Place {
        Place::parse(url).expect(url)
    }

    #[test]
    fn a_url_is_scheme_host_port_and_path() {
        for (url, is_tls, authority, path) in [
            ("https://api.example.com", true, "api.example.com", ""),
            ("https://API.example.com:443/", true, "api.example.com", ""),
            ("http://api.example.com:80/v1/", false, "api.example.com", "/v1"),
            ("http://api.example.com:443/v1/x", false, "api.example.com:443", "/v1/x"),
            ("https://[::1]:8443/v1", true, "[::1]:8443", "/v1"),
        ] {
            assert_eq!(place(url), Place { is_tls, authority: authority.parse().expect(url), path: path.to_owned() });
        }
        for url in [
            "",
            "api.example.com",
            "/v1",
            "ftp://api.example.com",
            "https://",
            "https://user:password@api.example.com",
            "https://api.example.com/v1?x=1",
            "https://api.example.com/v1#x",
            "https://api.example.com/../v1",
            "https://api.example.com/%2e%2e/v1",
            "https://api.example.com:99999",
            "https://api.example.com:",
        ] {
            assert_eq!(Place::parse(url), Err(Error::Url), "{url}");
        }
    }

    #[test]
    fn what_is_at_or_below_the_path_is_asked_for() {
        let place = place("https://api.example.com/v1");
        for target in
            ["/v1", "/v1/", "/v1/things?name=a/../b", "/v1?x=%2e%2e", "/v1//x", "/v1/a.b/...", "/v1/%20+:@x;y=1"]
        {
            assert_eq!(place.check(target), Ok(()), "{target}");
        }
        for target in ["/", "/v2", "/v1x", "/V1", "/%76%31/x", "//v1", "/?x=/v1", "//api.example.com/v1"] {
            let refused = place.check(target);
            assert!(
                matches!(&refused, Err(Error::Outside { allowed, .. }) if allowed == "/v1/"),
                "{target} {refused:?}"
            );
        }
        assert_eq!(self::place("https://api.example.com").check("/anything"), Ok(()));
    }

    #[test]
    fn what_could_be_taken_for_another_path_is_refused() {
        let place = place("https://api.example.com/v1");
        let refused = |target: &str| place.check(target).expect_err(target);
        for target in ["", "v1", "https://api.example.com/v1", "http://169.254.169.254/", "*", "api.example.com:443"] {
            assert_eq!(refused(target), Error::Absolute(target.to_owned()), "{target}");
        }
        for target in ["/v1/../x", "/v1/..", "/v1/.", "/v1/./x", "/../v1", "/v1/..;/x", "/v1/..;a=b/x", "/v1/.;/x"] {
            assert!(matches!(refused(target), Error::Dots(_)), "{target}");
        }
        for target in [
            "/v1/%2e%2e/x",
            "/v1/.%2E/x",
            "/v1/a%2fb",
            "/v1/a%2Fb",
            "/v1/a%5cb",
            "/v1/%252e%252e/x",
            "/v1/%25252E/x",
            "/v1/x%00",
            "/v1/x%0d%0aHost:%20other",
            "/v1/x%7f",
        ] {
            assert!(matches!(refused(target), Error::Encoded(_)), "{target}");
        }
        for (target, character) in [
            ("/v1/a b", ' '),
            ("/v1/x\r\nHost: other", '\r'),
            ("/v1/a\\b", '\\'),
            ("/v1/ä", 'ä'),
            ("/v1/x#y", '#'),
            ("/v1/x?a#y", '#'),
            ("/v1/\u{ff0e}\u{ff0e}/x", '\u{ff0e}'),
            ("/v1/[x]", '['),
            ("/v1/x?q=a b", ' '),
            ("/v1/x\0", '\0'),
        ] {
            assert_eq!(refused(target), Error::Character(character), "{target}");
        }
        for target in ["/v1/%", "/v1/%2", "/v1/%zz", "/v1?x=%g0", "/v1/%%32"] {
            assert_eq!(refused(target), Error::Escape, "{target}");
        }
        assert_eq!(refused(&format!("/v1/{}", "x".repeat(MAX_TARGET))), Error::TooLong);
    }

    #[test]
    fn a_long_path_is_told_in_part_and_a_query_not_at_all() {
        let place = place("https://api.example.com/v1");
        let text = place.check(&format!("/{}?token=secret", "x".repeat(100))).expect_err("it is outside").to_string();
        assert!(text.contains("xxx…") && text.len() < 150 && !text.contains("secret"), "{text}");
    }
}
