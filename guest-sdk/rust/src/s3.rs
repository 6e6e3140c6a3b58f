//! Buckets and objects in S3, and in what speaks like it, over a grant of [`http`] with `awsSigV4` credentials.
//!
//! Deletes are made for cleanup, which is asked for again and again: that there is nothing is a success. That access is refused (401, 403),
//! that there are too many requests (429, 503) or that the server fails is none, ever: nothing is proven by it.
//!
//! ```no_run
//! use pilothouse_sdk::{external, prelude::*, s3::{Deleted, S3}};
//! use std::time::Duration;
//!
//! # struct Store;
//! # impl Plugin for Store {
//! #     type Spec = ();
//! #     type Status = ();
//! #     fn describe() -> Describe { Describe::parent("example.com/v1", "Store") }
//! fn reconcile(request: &Request<Self>) -> Result<Desired<()>, Failure> {
//!     S3::new("storage").create_bucket(&external::label("store", &request.parent.metadata)?, None)?;
//!     Ok(Desired::new())
//! }
//! # }
//!
//! impl Finalize for Store {
//!     fn finalize(request: &Request<Self>) -> Result<Finalization<()>, Failure> {
//!         match S3::new("storage").remove_bucket(&external::label("store", &request.parent.metadata)?)? {
//!             Deleted::Gone => Ok(Finalization::finished()),
//!             // There is more in it than one call deletes.
//!             Deleted::NotEmpty => Ok(Finalization::waiting(Duration::from_secs(1))),
//!         }
//!     }
//! }
//! ```
//!
//! Buckets are the first part of the path (`https://s3.example.com/bucket/key`), since a grant has one host.

mod md5;
mod xml;

use std::fmt;

use crate::http::{self, Response, encode};

/// How many keys are listed, and deleted, at once: the most that S3 takes.
const PAGE: &str = "1000";

/// A client of the service of one grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3 {
    grant: String,
}

/// How far a delete has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "what is not gone yet has to be waited for"]
pub enum Deleted {
    /// It is not there (any more).
    Gone,
    /// There is something in it: come again.
    NotEmpty,
}

/// An object in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its key.
    pub key: String,
    /// How many bytes it has.
    pub size: u64,
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The objects, by key.
    pub objects: Vec<Object>,
    /// Where the next page begins; none: this is the last.
    pub next: Option<String>,
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// There is no answer.
    Http(http::Error),
    /// The service has refused it, or failed.
    Refused {
        /// What was asked, such as `create bucket a by grant storage`.
        asked: String,
        /// The status of the answer; 200 if it is of one object of several.
        status: u16,
        /// The code in it, such as `AccessDenied`, if it has one.
        code: String,
        /// What it says beside that.
        message: String,
    },
    /// The answer is not what S3 answers.
    Unreadable {
        /// What was asked.
        asked: String,
    },
}

impl S3 {
    /// The service that this grant names. Its `url` has no path, or that of the one bucket that may be used.
    #[must_use]
    pub fn new(grant: impl Into<String>) -> Self {
        Self { grant: grant.into() }
    }

    /// Makes a bucket, in this region if one is given. One that is ours already is a success.
    ///
    /// # Errors
    /// Also if it is somebody else's: the code is then `BucketAlreadyExists`.
    pub fn create_bucket(&self, bucket: &str, region: Option<&str>) -> Result<(), Error> {
        let asked = self.asked("create bucket", bucket);
        let mut request = http::put(&self.grant, path(bucket, None));
        if let Some(region) = region {
            let region = xml::escape(region);
            request = request.body(format!(
                "<CreateBucketConfiguration><LocationConstraint>{region}</LocationConstraint></CreateBucketConfiguration>"
            ));
        }
        match succeeded(asked, request.send()?) {
            Err(Error::Refused { status: 409, code, .. }) if code == "BucketAlreadyOwnedByYou" => Ok(()),
            result => result.map(drop),
        }
    }

    /// Whether there is a bucket of this name. One that is somebody else's is an error (403).
    ///
    /// # Errors
    /// If it cannot be told.
    pub fn head_bucket(&self, bucket: &str) -> Result<bool, Error> {
        let answer = http::head(&self.grant, path(bucket, None)).send()?;
        Ok(found(self.asked("look for bucket", bucket), answer)?.is_some())
    }

    /// Deletes a bucket, if there is nothing in it.
    ///
    /// # Errors
    /// If that is not certain.
    pub fn delete_bucket(&self, bucket: &str) -> Result<Deleted, Error> {
        let answer = http::delete(&self.grant, path(bucket, None)).send()?;
        match found(self.asked("delete bucket", bucket), answer) {
            Ok(_) => Ok(Deleted::Gone),
            Err(Error::Refused { status: 409, code, .. }) if code == "BucketNotEmpty" => Ok(Deleted::NotEmpty),
            Err(error) => Err(error),
        }
    }

    /// Deletes up to 1,000 of the objects in a bucket, with their versions and delete markers. [`Deleted::Gone`]: there is none.
    ///
    /// # Errors
    /// If one of them cannot be deleted, as one that is locked. Others may be deleted by then.
    pub fn empty_bucket(&self, bucket: &str) -> Result<Deleted, Error> {
        let asked = self.asked("list versions in bucket", bucket);
        let target = format!("{}?encoding-type=url&max-keys={PAGE}&versions=", path(bucket, None));
        let listed = found(asked.clone(), http::get(&self.grant, target).send()?);
        let entries = match listed {
            Ok(None) => return Ok(Deleted::Gone),
            Ok(Some(answer)) => {
                let document = text(&asked, &answer)?;
                let all = xml::elements(document, "Version").chain(xml::elements(document, "DeleteMarker"));
                let mut entries = Vec::new();
                for entry in all {
                    entries.push((key(document, entry), xml::text(entry, "VersionId")));
                }
                entries
            }
            // A server without versions.
            Err(Error::Refused { status: 501, .. }) => {
                let page = self.list_objects(bucket, "", None)?;
                page.objects.into_iter().map(|object| (object.key, None)).collect()
            }
            Err(error) => return Err(error),
        };
        if entries.is_empty() {
            return Ok(Deleted::Gone);
        }
        self.delete_all(bucket, &entries)?;
        Ok(Deleted::NotEmpty)
    }

    /// Deletes a bucket with all that is in it, up to 2,000 objects a call: call it again until it is [`Deleted::Gone`].
    ///
    /// # Errors
    /// As of [`empty_bucket`](Self::empty_bucket) and [`delete_bucket`](Self::delete_bucket).
    pub fn remove_bucket(&self, bucket: &str) -> Result<Deleted, Error> {
        // Most often it is empty after the first page, and one more look costs less than to be asked again.
        for _ in 0..2 {
            if self.empty_bucket(bucket)? == Deleted::Gone {
                return self.delete_bucket(bucket);
            }
        }
        Ok(Deleted::NotEmpty)
    }

    /// The objects whose keys begin with `prefix`, up to 1,000, from where the page before has ended.
    ///
    /// # Errors
    /// If they cannot be listed; also if there is no such bucket.
    pub fn list_objects(&self, bucket: &str, prefix: &str, from: Option<&str>) -> Result<Page, Error> {
        let asked = self.asked("list bucket", bucket);
        let mut target = format!("{}?encoding-type=url&list-type=2&max-keys={PAGE}", path(bucket, None));
        if !prefix.is_empty() {
            target += &format!("&prefix={}", encode(prefix));
        }
        if let Some(from) = from {
            target += &format!("&continuation-token={}", encode(from));
        }
        let answer = succeeded(asked.clone(), http::get(&self.grant, target).send()?)?;
        let document = text(&asked, &answer)?;
        let mut objects = Vec::new();
        for entry in xml::elements(document, "Contents") {
            let size = xml::text(entry, "Size").and_then(|size| size.parse().ok()).unwrap_or_default();
            objects.push(Object { key: key(document, entry), size });
        }
        Ok(Page { objects, next: xml::text(document, "NextContinuationToken") })
    }

    /// Writes an object.
    ///
    /// # Errors
    /// If it is not written, or that is not certain.
    pub fn put_object(
        &self,
        bucket: &str,
        key: &str,
        content_type: &str,
        body: impl Into<Vec<u8>>,
    ) -> Result<(), Error> {
        let request = http::put(&self.grant, path(bucket, Some(key))).header("content-type", content_type).body(body);
        succeeded(self.asked("write an object in bucket", bucket), request.send()?).map(drop)
    }

    /// Reads an object; none: there is no such one.
    ///
    /// # Errors
    /// If that is not certain; also if the object is larger than the grant allows.
    pub fn get_object(&self, bucket: &str, key: &str) -> Result<Option<Vec<u8>>, Error> {
        let answer = http::get(&self.grant, path(bucket, Some(key))).send()?;
        let found = found(self.asked("read an object in bucket", bucket), answer)?;
        Ok(found.map(|answer| answer.body))
    }

    /// Whether there is an object with this key.
    ///
    /// # Errors
    /// If that is not certain.
    pub fn head_object(&self, bucket: &str, key: &str) -> Result<bool, Error> {
        let answer = http::head(&self.grant, path(bucket, Some(key))).send()?;
        Ok(found(self.asked("look for an object in bucket", bucket), answer)?.is_some())
    }

    /// Deletes an object. Where the bucket keeps versions, it is hidden; [`empty_bucket`](Self::empty_bucket) deletes those too.
    ///
    /// # Errors
    /// If that is not certain.
    pub fn delete_object(&self, bucket: &str, key: &str) -> Result<(), Error> {
        let answer = http::delete(&self.grant, path(bucket, Some(key))).send()?;
        found(self.asked("delete an object in bucket", bucket), answer).map(drop)
    }

    fn delete_all(&self, bucket: &str, entries: &[(String, Option<String>)]) -> Result<(), Error> {
        let asked = self.asked("delete objects in bucket", bucket);
        let mut body = "<Delete><Quiet>true</Quiet>".to_owned();
        for (key, version) in entries {
            body += &format!("<Object><Key>{}</Key>", xml::escape(key));
            if let Some(version) = version {
                body += &format!("<VersionId>{}</VersionId>", xml::escape(version));
            }
            body += "</Object>";
        }
        body += "</Delete>";
        let request = http::post(&self.grant, format!("{}?delete=", path(bucket, None)));
        // Asked for by S3 beside the signature.
        let request = request.header("content-md5", md5::base64(&md5::digest(body.as_bytes()))).body(body);
        let Some(answer) = found(asked.clone(), request.send()?)? else { return Ok(()) };
        for error in xml::elements(text(&asked, &answer)?, "Error") {
            let (code, message) = code_and_message(error);
            if !matches!(code.as_str(), "NoSuchKey" | "NoSuchVersion") {
                return Err(Error::Refused { asked, status: answer.status, code, message });
            }
        }
        Ok(())
    }

    fn asked(&self, what: &str, bucket: &str) -> String {
        format!("{what} {bucket} by grant {}", self.grant)
    }
}

/// Slashes in a key are slashes in the path.
fn path(bucket: &str, key: Option<&str>) -> String {
    let mut path = format!("/{}", encode(bucket));
    for segment in key.into_iter().flat_map(|key| key.split('/')) {
        path.push('/');
        path.push_str(&encode(segment));
    }
    path
}

fn succeeded(asked: String, answer: Response) -> Result<Response, Error> {
    if answer.is_success() {
        return Ok(answer);
    }
    let (code, message) = code_and_message(answer.text().unwrap_or_default());
    Err(Error::Refused { asked, status: answer.status, code, message })
}

/// None: what was asked for is not there. A proxy says 404 as well, and so does a server at another place of its own: with a body that
/// does not say what is missing nothing is proven.
fn found(asked: String, answer: Response) -> Result<Option<Response>, Error> {
    let is_silent = answer.body.is_empty();
    match succeeded(asked, answer) {
        Err(Error::Refused { status: 404, code, .. })
            if is_silent || matches!(code.as_str(), "NoSuchBucket" | "NoSuchKey" | "NoSuchVersion") =>
        {
            Ok(None)
        }
        result => result.map(Some),
    }
}

fn text<'a>(asked: &str, answer: &'a Response) -> Result<&'a str, Error> {
    answer.text().map_err(|_| Error::Unreadable { asked: asked.to_owned() })
}

/// The key of an entry of a list; encoded like a URL, where the server does as it was asked.
fn key(document: &str, entry: &str) -> String {
    let key = xml::text(entry, "Key").unwrap_or_default();
    if xml::text(document, "EncodingType").is_some_and(|encoding| encoding == "url") {
        xml::decode_url(&key)
    } else {
        key
    }
}

fn code_and_message(error: &str) -> (String, String) {
    let part = |tag| xml::text(error, tag).unwrap_or_default();
    (part("Code"), part("Message"))
}

impl From<http::Error> for Error {
    fn from(error: http::Error) -> Self {
        Self::Http(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(error) => error.fmt(f),
            Self::Refused { asked, status, code, message } => {
                write!(f, "cannot {asked}: {status} {code}")?;
                if message.is_empty() { Ok(()) } else { write!(f, ": {message}") }
            }
            Self::Unreadable { asked } => write!(f, "cannot {asked}: the answer is not what S3 answers"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::with_http;

    fn answered<T>(status: u16, code: &str, ask: impl FnOnce(S3) -> T) -> T {
        let body = if code.is_empty() {
            String::new()
        } else {
            format!("<Error><Code>{code}</Code><Message>It says &lt;no&gt;.</Message></Error>")
        };
        let answer = Response::new(status).with_body(body);
        with_http(move |_| Ok(answer.clone()), || ask(S3::new("storage")))
    }

    #[test]
    fn only_that_there_is_nothing_is_gone() {
        for (status, code) in [(204, ""), (200, ""), (404, ""), (404, "NoSuchBucket"), (404, "NoSuchKey")] {
            assert_eq!(answered(status, code, |s3| s3.delete_bucket("a")), Ok(Deleted::Gone), "{status} {code}");
            assert_eq!(answered(status, code, |s3| s3.delete_object("a", "b")), Ok(()), "{status} {code}");
        }
        for (status, code) in [
            (301, "PermanentRedirect"),
            (400, "InvalidBucketName"),
            (401, ""),
            (403, "AccessDenied"),
            (403, "SignatureDoesNotMatch"),
            (404, "NoSuchUser"),
            (409, "OperationAborted"),
            (429, "TooManyRequests"),
            (500, "InternalError"),
            (503, "SlowDown"),
        ] {
            let is_refused = |error: &Error| matches!(error, Error::Refused { status: known, code: said, .. } if *known == status && said == code);
            let deleted = answered(status, code, |s3| s3.delete_bucket("a")).unwrap_err();
            assert!(is_refused(&deleted), "{deleted}");
            let deleted = answered(status, code, |s3| s3.delete_object("a", "b")).unwrap_err();
            assert!(is_refused(&deleted), "{deleted}");
            let removed = answered(status, code, |s3| s3.remove_bucket("a")).unwrap_err();
            assert!(is_refused(&removed), "{removed}");
        }
        // A page of somebody else's.
        let page = Response::new(404).with_body("<html>Not Found</html>");
        let deleted = with_http(move |_| Ok(page.clone()), || S3::new("storage").delete_bucket("a"));
        assert!(matches!(deleted, Err(Error::Refused { status: 404, .. })), "{deleted:?}");
        let broken = |_: &http::Request| Err(http::Error::Timeout("grant storage: late".to_owned()));
        assert!(matches!(with_http(broken, || S3::new("storage").remove_bucket("a")), Err(Error::Http(_))));
    }

    #[test]
    fn a_bucket_that_is_ours_is_made_and_one_of_somebody_else_is_not() {
        assert_eq!(answered(200, "", |s3| s3.create_bucket("a", None)), Ok(()));
        assert_eq!(answered(409, "BucketAlreadyOwnedByYou", |s3| s3.create_bucket("a", None)), Ok(()));
        let error = answered(409, "BucketAlreadyExists", |s3| s3.create_bucket("a", None)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot create bucket a by grant storage: 409 BucketAlreadyExists: It says <no>."
        );
    }

    #[test]
    fn an_object_that_cannot_be_deleted_stops_it_and_one_that_is_gone_does_not() {
        let bucket = |code: &'static str| {
            move |request: &http::Request| {
                let list = "<ListVersionsResult><EncodingType>url</EncodingType><Version><Key>a%26b</Key><VersionId>1</VersionId></Version>\
                    <DeleteMarker><Key>c</Key><VersionId>2</VersionId></DeleteMarker></ListVersionsResult>";
                let error = format!("<DeleteResult><Error><Key>c</Key><Code>{code}</Code></Error></DeleteResult>");
                if request.method == "GET" {
                    return Ok(Response::new(200).with_body(list));
                }
                assert_eq!((request.method.as_str(), request.target.as_str()), ("POST", "/a?delete="));
                let asked = "<Delete><Quiet>true</Quiet><Object><Key>a&amp;b</Key><VersionId>1</VersionId></Object>\
                    <Object><Key>c</Key><VersionId>2</VersionId></Object></Delete>";
                assert_eq!(String::from_utf8_lossy(&request.body), asked);
                Ok(Response::new(200).with_body(error))
            }
        };
        let emptied = with_http(bucket("NoSuchVersion"), || S3::new("storage").empty_bucket("a"));
        assert_eq!(emptied, Ok(Deleted::NotEmpty), "another look says whether that was all");
        let locked = with_http(bucket("AccessDenied"), || S3::new("storage").remove_bucket("a"));
        assert!(matches!(&locked, Err(Error::Refused { code, .. }) if code == "AccessDenied"), "{locked:?}");
    }

    #[test]
    fn where_there_are_no_versions_objects_are_deleted() {
        let answer = |request: &http::Request| {
            let list = "<ListBucketResult><Contents><Key>b</Key></Contents></ListBucketResult>";
            match request.target.as_str() {
                "/a?encoding-type=url&max-keys=1000&versions=" => Ok(Response::new(501)),
                "/a?encoding-type=url&list-type=2&max-keys=1000" => Ok(Response::new(200).with_body(list)),
                _ => {
                    assert_eq!(request.body, b"<Delete><Quiet>true</Quiet><Object><Key>b</Key></Object></Delete>");
                    Ok(Response::new(200).with_body("<DeleteResult/>"))
                }
            }
        };
        assert_eq!(with_http(answer, || S3::new("storage").empty_bucket("a")), Ok(Deleted::NotEmpty));
    }

    #[test]
    fn a_key_is_a_path() {
        assert_eq!(path("a", None), "/a");
        assert_eq!(path("a", Some("b c/d%//e+")), "/a/b%20c/d%25//e%2B");
    }
}
