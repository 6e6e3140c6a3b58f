//! Requests to the HTTP services that the reconciler grants (`spec.grants.http`), each named by its grant.
//!
//! The host adds address and credentials, sends the request once, and gives its answer whatever the status: whether to try again is
//! for the plugin to say, and a [`Failure`](crate::Failure) is how. A request whose answer is lost may have taken effect.
//!
//! ```no_run
//! use pilothouse_sdk::{http, prelude::*};
//!
//! #[derive(serde::Deserialize)]
//! struct Team {
//!     id: u64,
//! }
//!
//! fn team(name: &str) -> Result<Option<Team>, Failure> {
//!     let answer = http::get("directory", format!("/v1/teams/{}", http::encode(name))).send()?;
//!     if answer.status == 404 {
//!         return Ok(None);
//!     }
//!     Ok(Some(answer.success()?.json()?))
//! }
//! ```

use std::fmt;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

#[cfg(target_family = "wasm")]
use crate::failure::millis;
use crate::object::parse;
use crate::raw::http as raw;

/// A request, until it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The name of the grant.
    pub grant: String,
    /// Such as `GET`. The grant says which are allowed.
    pub method: String,
    /// Path and query from the root of the host, percent-encoded: see [`encode`].
    pub target: String,
    /// Names and values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
    /// How long to wait for the answer; none: as long as the grant allows, which is the most in any case.
    pub timeout: Option<Duration>,
}

/// An answer, whatever its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// 200 to 599.
    pub status: u16,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
    /// What it is the answer to, for messages.
    asked: String,
}

/// Why there is no answer, or not the one that was hoped for. `?` makes a [`Failure::Retry`](crate::Failure) of it: an administrator,
/// or time, can heal each of these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// There is no such grant, or it does not allow this. No byte was sent.
    Denied(String),
    /// The credentials of the grant cannot be had. No byte was sent.
    Credentials(String),
    /// The name of the host cannot be resolved. No byte was sent.
    Dns(String),
    /// The host cannot be reached, does not prove who it is, or has closed the connection.
    Connection(String),
    /// No answer within the time.
    Timeout(String),
    /// The answer is larger than the grant allows.
    TooLarge(String),
    /// [`Response::success`] is none.
    Status {
        /// What was asked, such as `GET /v1/teams of grant directory`.
        asked: String,
        /// What it was answered with.
        status: u16,
    },
    /// The body is not what it was read as.
    Body {
        /// What was asked.
        asked: String,
        /// What is wrong with it, and where.
        problem: String,
    },
}

/// A request by `GET`.
#[must_use]
pub fn get(grant: impl Into<String>, target: impl Into<String>) -> Request {
    Request::new("GET", grant, target)
}

/// A request by `HEAD`.
#[must_use]
pub fn head(grant: impl Into<String>, target: impl Into<String>) -> Request {
    Request::new("HEAD", grant, target)
}

/// A request by `PUT`.
#[must_use]
pub fn put(grant: impl Into<String>, target: impl Into<String>) -> Request {
    Request::new("PUT", grant, target)
}

/// A request by `POST`.
#[must_use]
pub fn post(grant: impl Into<String>, target: impl Into<String>) -> Request {
    Request::new("POST", grant, target)
}

/// A request by `PATCH`.
#[must_use]
pub fn patch(grant: impl Into<String>, target: impl Into<String>) -> Request {
    Request::new("PATCH", grant, target)
}

/// A request by `DELETE`.
#[must_use]
pub fn delete(grant: impl Into<String>, target: impl Into<String>) -> Request {
    Request::new("DELETE", grant, target)
}

/// A text as one segment of a path, or one name or value of a query. Segments `.` and `..`, and those with a slash, have no form that
/// the host sends.
#[must_use]
pub fn encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push('%');
            encoded.extend([byte >> 4, byte & 15].map(|digit| char::from(b"0123456789ABCDEF"[usize::from(digit)])));
        }
    }
    encoded
}

impl Request {
    /// A request by any method.
    #[must_use]
    pub fn new(method: impl Into<String>, grant: impl Into<String>, target: impl Into<String>) -> Self {
        Self {
            grant: grant.into(),
            method: method.into(),
            target: target.into(),
            headers: Vec::new(),
            body: Vec::new(),
            timeout: None,
        }
    }

    /// The same with one more header. `Host`, `Authorization` and those of the connection are the host's.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// The same with this body.
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// The same with a body in JSON, and the header that says so.
    #[must_use]
    pub fn json(self, body: &Value) -> Self {
        self.header("content-type", "application/json").body(body.to_string())
    }

    /// The same, but the answer is waited for no longer than this.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sends it, once, and waits for the whole answer.
    ///
    /// # Errors
    /// If there is none. An answer with any status is one.
    pub fn send(self) -> Result<Response, Error> {
        // A query may hold what is not for everybody.
        let path = self.target.split('?').next().unwrap_or_default();
        let asked = format!("{} {path} of grant {}", self.method, self.grant);
        let mut response = send(self)?;
        response.asked = asked;
        Ok(response)
    }
}

#[cfg(target_family = "wasm")]
fn send(request: Request) -> Result<Response, Error> {
    let Request { grant, method, target, headers, body, timeout } = request;
    let request = raw::Request { grant, method, target, headers, body, timeout: timeout.map(millis) };
    Ok(raw::send(&request)?.into())
}

#[cfg(not(target_family = "wasm"))]
fn send(request: Request) -> Result<Response, Error> {
    match FAKE.with_borrow(Clone::clone) {
        Some(fake) => fake.0(&request),
        None => Err(Error::Denied(format!("grant {}: there is no host here; a test can give a fake", request.grant))),
    }
}

impl Response {
    /// An answer of this status, for the fake of a test.
    #[must_use]
    pub fn new(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), asked: String::new() }
    }

    /// The same with one more header.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_ascii_lowercase(), value.into()));
        self
    }

    /// The same with this body.
    #[must_use]
    pub fn with_body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// The first header of this name, in lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Whether the status is 200 to 299.
    #[must_use]
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Itself, if it is a success.
    ///
    /// # Errors
    /// [`Error::Status`] otherwise.
    pub fn success(self) -> Result<Self, Error> {
        if self.is_success() { Ok(self) } else { Err(Error::Status { asked: self.asked, status: self.status }) }
    }

    /// That what was to be deleted is gone: a success, or that there is no such thing (404, 410). A refusal (401, 403), too many requests
    /// (429) and errors of the server prove nothing.
    ///
    /// # Errors
    /// [`Error::Status`] otherwise.
    pub fn gone(self) -> Result<(), Error> {
        if matches!(self.status, 404 | 410) { Ok(()) } else { self.success().map(|_| ()) }
    }

    /// The body as text.
    ///
    /// # Errors
    /// [`Error::Body`] if it is not UTF-8.
    pub fn text(&self) -> Result<&str, Error> {
        std::str::from_utf8(&self.body)
            .map_err(|_| Error::Body { asked: self.asked.clone(), problem: "it is not UTF-8".to_owned() })
    }

    /// The body, which is JSON, as the author's type.
    ///
    /// # Errors
    /// [`Error::Body`], with the path of the field.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Error> {
        parse(self.text()?).map_err(|problem| Error::Body { asked: self.asked.clone(), problem })
    }
}

impl From<raw::Response> for Response {
    fn from(response: raw::Response) -> Self {
        Self { status: response.status, headers: response.headers, body: response.body, asked: String::new() }
    }
}

impl From<raw::Error> for Error {
    fn from(error: raw::Error) -> Self {
        match error {
            raw::Error::Denied(message) => Self::Denied(message),
            raw::Error::Credentials(message) => Self::Credentials(message),
            raw::Error::Dns(message) => Self::Dns(message),
            raw::Error::Connection(message) => Self::Connection(message),
            raw::Error::Timeout(message) => Self::Timeout(message),
            raw::Error::TooLarge(message) => Self::TooLarge(message),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(message) => write!(f, "http is denied: {message}"),
            // The word by which it is to be found, whichever capability it is.
            Self::Credentials(message) => write!(f, "CredentialsMissing: {message}"),
            Self::Dns(message) | Self::Connection(message) | Self::Timeout(message) | Self::TooLarge(message) => {
                write!(f, "http failed: {message}")
            }
            Self::Status { asked, status } => write!(f, "{asked}: the answer is {status}"),
            Self::Body { asked, problem } => write!(f, "{asked}: the answer cannot be read: {problem}"),
        }
    }
}

impl std::error::Error for Error {}

/// What answers a request where there is no host.
#[cfg(not(target_family = "wasm"))]
pub(crate) type Answers = dyn Fn(&Request) -> Result<Response, Error>;

#[cfg(not(target_family = "wasm"))]
thread_local! {
    pub(crate) static FAKE: std::cell::RefCell<Option<crate::fake::Fake<Answers>>> = const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Failure, json, testing::with_http};

    fn answered<T>(answer: Result<Response, Error>, work: impl FnOnce() -> T) -> T {
        with_http(move |_| answer.clone(), work)
    }

    #[test]
    fn a_request_is_what_was_built() {
        let answers = |request: &Request| {
            assert_eq!(request.method, "PUT");
            assert_eq!((request.grant.as_str(), request.target.as_str()), ("api", "/v1/a%20b"));
            assert_eq!(request.headers, [("content-type".to_owned(), "application/json".to_owned())]);
            assert_eq!(request.body, br#"{"a":1}"#);
            Ok(Response::new(201).with_header("ETag", "x"))
        };
        let target = format!("/v1/{}", encode("a b"));
        let answer = with_http(answers, || put("api", target).json(&json!({"a": 1})).send()).unwrap();
        assert_eq!((answer.status, answer.header("etag")), (201, Some("x")));
    }

    #[test]
    fn without_a_fake_nobody_answers() {
        let error = get("api", "/").send().unwrap_err();
        assert!(matches!(&error, Error::Denied(why) if why.contains("grant api")), "{error}");
        // Nor when it is over, however it ended.
        let ended = std::panic::catch_unwind(|| answered(Ok(Response::new(200)), || panic!("as a test fails")));
        assert!(ended.is_err());
        assert!(get("api", "/").send().is_err());
    }

    #[test]
    fn gone_is_a_success_or_not_found_and_nothing_else() {
        for status in [200, 202, 204, 404, 410] {
            assert_eq!(Response::new(status).gone(), Ok(()), "{status}");
        }
        for status in [301, 400, 401, 403, 405, 409, 429, 500, 501, 503] {
            assert!(matches!(Response::new(status).gone(), Err(Error::Status { .. })), "{status}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_what_was_asked_but_not_the_query() {
        let failed = |answer| -> Failure {
            let json = answered(answer, || get("api", "/v1/x?token=secret").send()?.success()?.json::<Vec<u8>>());
            json.unwrap_err().into()
        };
        let retry = |message: &str| Failure::retry(message);
        assert_eq!(failed(Ok(Response::new(503))), retry("GET /v1/x of grant api: the answer is 503"));
        let text = "GET /v1/x of grant api: the answer cannot be read: [0]: invalid type: string \"a\", expected u8";
        assert_eq!(failed(Ok(Response::new(200).with_body(r#"["a"]"#))), retry(text));
        let missing = "grant api: the Secret a/b does not exist".to_owned();
        let text = "CredentialsMissing: grant api: the Secret a/b does not exist";
        assert_eq!(failed(Err(Error::Credentials(missing))), retry(text));
    }

    #[test]
    fn everything_but_letters_digits_and_four_signs_is_encoded() {
        assert_eq!(encode("aZ09-._~"), "aZ09-._~");
        assert_eq!(encode("a/b c+ä%"), "a%2Fb%20c%2B%C3%A4%25");
    }
}
