//! The headers of a request and of an answer: which a plugin may set, and which it is told.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Most headers of a request.
const MAX_HEADERS: usize = 100;

/// What belongs to the host: where a request goes, who asks, how it is framed, and which connection it uses.
const OWNED: [&str; 10] = [
    "host",
    "authorization",
    "content-length",
    "transfer-encoding",
    "connection",
    "te",
    "trailer",
    "upgrade",
    "keep-alive",
    "expect",
];
/// What would have a server do something else than the grant allows: another method, another path, on behalf of another.
const OVERRIDES: [&str; 6] =
    ["x-http-method-override", "x-http-method", "x-method-override", "x-original-url", "x-rewrite-url", "forwarded"];
/// Families of both.
const PREFIXES: [&str; 2] = ["proxy-", "x-forwarded-"];
/// What a signature consists of.
pub(super) const SIGNED: [&str; 3] = ["x-amz-date", "x-amz-security-token", "x-amz-content-sha256"];

/// Headers of one connection, which an answer has no more when it comes to the plugin.
const OF_CONNECTION: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Why a header is refused. Values are not told: they may be secret.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error("{0:?} is no name of a header")]
    Name(String),
    #[error("the value of the header {0} has a line's end or another control character")]
    Value(HeaderName),
    #[error("the header {0} is set by the host alone")]
    Owned(HeaderName),
    #[error("there are more than {MAX_HEADERS} headers")]
    TooMany,
}

/// The headers that a plugin has set, if it may. `more` are those that the grant's credentials use.
pub(super) fn of_request(given: &[(String, String)], more: &[&str]) -> Result<HeaderMap, Error> {
    if given.len() > MAX_HEADERS {
        return Err(Error::TooMany);
    }
    let mut headers = HeaderMap::new();
    for (name, value) in given {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| Error::Name(name.chars().take(80).collect()))?;
        if is_of_host(&name) || more.iter().any(|more| is_same(more, &name)) {
            return Err(Error::Owned(name));
        }
        let value = HeaderValue::from_str(value).map_err(|_| Error::Value(name.clone()))?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// Whether a header belongs to the host, and is for neither plugins nor credentials but `Authorization`.
pub(super) fn is_of_host(name: &HeaderName) -> bool {
    let owned = OWNED.iter().chain(&OVERRIDES).any(|owned| is_same(owned, name));
    owned || PREFIXES.iter().any(|prefix| name.as_str().replace('_', "-").starts_with(prefix))
}

/// Servers of CGI and WSGI do not tell `-` and `_` apart.
fn is_same(owned: &str, name: &HeaderName) -> bool {
    owned.len() == name.as_str().len() && owned.eq_ignore_ascii_case(&name.as_str().replace('_', "-"))
}

/// The headers of an answer, as the plugin sees them.
pub(super) fn of_answer(headers: &HeaderMap) -> Vec<(String, String)> {
    let listed = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let listed: Vec<_> = listed.flat_map(|list| list.split(',')).map(str::trim).collect();
    let is_of_connection =
        |name: &str| OF_CONNECTION.contains(&name) || listed.iter().any(|listed| listed.eq_ignore_ascii_case(name));
    let kept = headers.iter().filter(|(name, _)| !is_of_connection(name.as_str()));
    let text = |value: &HeaderValue| std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned);
    kept.filter_map(|(name, value)| Some((name.as_str().to_owned(), text(value)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(name: &str, value: &str) -> Vec<(String, String)> {
        vec![(name.to_owned(), value.to_owned())]
    }

    #[test]
    fn what_belongs_to_the_host_is_refused_however_it_is_written() {
        for name in [
            "Host",
            "HOST",
            "authorization",
            "Content-Length",
            "Content_Length",
            "transfer-encoding",
            "Transfer_Encoding",
            "Connection",
            "TE",
            "Trailer",
            "Upgrade",
            "Keep-Alive",
            "Expect",
            "Proxy-Authorization",
            "proxy_connection",
            "X-HTTP-Method-Override",
            "x_http_method_override",
            "X-Original-URL",
            "X-Rewrite-Url",
            "Forwarded",
            "X-Forwarded-Host",
            "x_forwarded_for",
            "X-Amz-Date",
            "x-api-key",
            "X_Api_Key",
        ] {
            let refused = of_request(&given(name, "x"), &["x-amz-date", "X-Api-Key"]);
            assert!(matches!(refused, Err(Error::Owned(_))), "{name} {refused:?}");
        }
        for name in ["Accept", "content-type", "If-Match", "X-Amz-Meta-Owner", "Cookie", "x-api-keys", "X-Amz-Date"] {
            assert_eq!(of_request(&given(name, "x"), &[]).map(|headers| headers.len()), Ok(1), "{name}");
        }
    }

    #[test]
    fn what_would_end_a_header_is_none() {
        for name in ["", "a b", "a:", "a\r\nhost", "ä"] {
            assert!(matches!(of_request(&given(name, "x"), &[]), Err(Error::Name(_))), "{name:?}");
        }
        for value in ["x\r\nHost: other", "x\n", "x\0", "\u{7f}"] {
            let refused = of_request(&given("accept", value), &[]);
            assert_eq!(refused, Err(Error::Value(header::ACCEPT)), "{value:?}");
        }
        let many = vec![("accept".to_owned(), "x".to_owned()); MAX_HEADERS + 1];
        assert_eq!(of_request(&many, &[]), Err(Error::TooMany));
        assert_eq!(of_request(&many[1..], &[]).map(|headers| headers.len()), Ok(MAX_HEADERS));
    }

    #[test]
    fn an_answer_has_no_headers_of_its_connection() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("keep-alive", "timeout=5"),
            ("etag", "\"1\""),
            ("set-cookie", "a"),
            ("set-cookie", "b"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers.append("x-latin", HeaderValue::from_bytes(b"\xe4").expect("it is a value"));
        let told = of_answer(&headers);
        let told: Vec<_> = told.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(told, [("etag", "\"1\""), ("set-cookie", "a"), ("set-cookie", "b")]);
    }
}
