//! Signatures of AWS, version 4, as S3 and its kin ask for: a request becomes a text of one form, and the text is signed with a key that
//! is made from the secret, the day, the region and the service.
//!
//! Written here because the crate `aws-sigv4` would bring a dozen others for what is a page of code over the cryptography of TLS.

use std::{collections::BTreeMap, fmt::Write as _};

use http::{HeaderName, HeaderValue, Request, header};
use hyper::body::Bytes;
use jiff::Timestamp;
use ring::{digest, hmac};

const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// Who signs, and for what. Does not show itself.
pub(super) struct Signer<'a> {
    pub(super) access_key_id: &'a str,
    pub(super) secret_access_key: &'a str,
    pub(super) session_token: Option<&'a str>,
    pub(super) region: &'a str,
    pub(super) service: &'a str,
}

impl Signer<'_> {
    /// Signs the request as it is, with all its headers: `Host` has to be among them, and nothing may change afterwards.
    ///
    /// # Errors
    /// If a part of the credentials is no text for a header.
    pub(super) fn sign(&self, request: &mut Request<Bytes>, now: Timestamp) -> Result<(), header::InvalidHeaderValue> {
        let time = now.strftime("%Y%m%dT%H%M%SZ").to_string();
        let day = now.strftime("%Y%m%d").to_string();
        let is_s3 = self.service == "s3";
        let hash = hex(digest::digest(&digest::SHA256, request.body()).as_ref());
        let headers = request.headers_mut();
        headers.insert("x-amz-date", HeaderValue::from_str(&time)?);
        if let Some(token) = self.session_token {
            headers.insert("x-amz-security-token", sensitive(token)?);
        }
        if is_s3 {
            headers.insert("x-amz-content-sha256", HeaderValue::from_str(&hash)?);
        }

        let signed = signed_headers(request.headers());
        let names = signed.keys().copied().collect::<Vec<_>>().join(";");
        let canonical = canonical_request(request, is_s3, &signed, &names, &hash);
        let scope = format!("{day}/{}/{}/aws4_request", self.region, self.service);
        let canonical = hex(digest::digest(&digest::SHA256, canonical.as_bytes()).as_ref());
        let to_sign = format!("{ALGORITHM}\n{time}\n{scope}\n{canonical}");

        let mut key = hmac::Key::new(hmac::HMAC_SHA256, format!("AWS4{}", self.secret_access_key).as_bytes());
        for part in [day.as_str(), self.region, self.service, "aws4_request"] {
            key = hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&key, part.as_bytes()).as_ref());
        }
        let signature = hex(hmac::sign(&key, to_sign.as_bytes()).as_ref());
        let who = self.access_key_id;
        let authorization =
            format!("{ALGORITHM} Credential={who}/{scope}, SignedHeaders={names}, Signature={signature}");
        request.headers_mut().insert(header::AUTHORIZATION, sensitive(&authorization)?);
        Ok(())
    }
}

fn sensitive(text: &str) -> Result<HeaderValue, header::InvalidHeaderValue> {
    let mut value = HeaderValue::from_str(text)?;
    value.set_sensitive(true);
    Ok(value)
}

/// Names in order, and the values of each: trimmed, with one space for several.
fn signed_headers(headers: &header::HeaderMap) -> BTreeMap<&str, String> {
    let mut signed = BTreeMap::<_, String>::new();
    // What proxies on the way may change says AWS, and what says nothing.
    for (name, value) in headers.iter().filter(|(name, _)| !matches!(*name, &header::USER_AGENT)) {
        let value = String::from_utf8_lossy(value.as_bytes());
        let value = value.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        signed
            .entry(HeaderName::as_str(name))
            .and_modify(|all| {
                let _ = write!(all, ",{value}");
            })
            .or_insert(value);
    }
    signed
}

fn canonical_request(
    request: &Request<Bytes>,
    is_s3: bool,
    signed: &BTreeMap<&str, String>,
    names: &str,
    hash: &str,
) -> String {
    let mut text = format!("{}\n{}\n", request.method(), canonical_path(request.uri().path(), is_s3));
    let _ = writeln!(text, "{}", canonical_query(request.uri().query().unwrap_or_default()));
    for (name, value) in signed {
        let _ = writeln!(text, "{name}:{value}");
    }
    let _ = write!(text, "\n{names}\n{hash}");
    text
}

/// S3 signs the path as it is meant, each character encoded once. Everybody else signs it as it is sent, encoded once more, without
/// empty segments; there are none with dots here.
fn canonical_path(path: &str, is_s3: bool) -> String {
    if is_s3 {
        return path.split('/').map(|segment| encode(&decode(segment))).collect::<Vec<_>>().join("/");
    }
    let mut segments: Vec<_> =
        path.split('/').filter(|segment| !segment.is_empty()).map(|it| encode(it.as_bytes())).collect();
    if path.ends_with('/') {
        segments.push(String::new());
    }
    format!("/{}", segments.join("/")).replace("//", "/")
}

fn canonical_query(query: &str) -> String {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let mut pairs: Vec<_> = pairs.map(|(name, value)| (encode(&decode(name)), encode(&decode(value)))).collect();
    pairs.sort();
    pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

fn encode(text: &[u8]) -> String {
    let mut encoded = String::new();
    for byte in text {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(byte) {
            encoded.push(char::from(*byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// What is no escape stays as it is.
fn decode(text: &str) -> Vec<u8> {
    let mut decoded = Vec::new();
    let mut rest = text;
    while let Some((before, escape)) = rest.split_once('%') {
        decoded.extend_from_slice(before.as_bytes());
        match escape.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                rest = escape.get(2..).unwrap_or_default();
            }
            None => {
                decoded.push(b'%');
                rest = escape;
            }
        }
    }
    decoded.extend_from_slice(rest.as_bytes());
    decoded
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Signs, and gives what comes behind `SignedHeaders=`.
    fn signature(
        signer: &Signer<'_>,
        now: &str,
        method: &str,
        uri: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> String {
        let mut request = Request::new(Bytes::from(body.to_owned()));
        *request.method_mut() = method.parse().expect(method);
        *request.uri_mut() = uri.parse().expect(uri);
        for (name, value) in headers {
            let name: HeaderName = name.parse().expect(name);
            request.headers_mut().append(name, HeaderValue::from_str(value).expect(value));
        }
        signer.sign(&mut request, now.parse().expect(now)).expect("these are texts");
        let authorization = request.headers()[header::AUTHORIZATION].to_str().expect("it is text").to_owned();
        authorization.split_once("SignedHeaders=").expect("it names them").1.to_owned()
    }

    #[test]
    fn the_signatures_are_those_of_the_test_suite_of_aws() {
        const TOKEN: &str = "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267";
        let signer = |session_token| Signer {
            access_key_id: "AKIDEXAMPLE",
            secret_access_key: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
            session_token,
            region: "us-east-1",
            service: "service",
        };
        let header1 = |values: &[&'static str]| values.iter().map(|value| ("My-Header1", *value)).collect::<Vec<_>>();
        let unreserved = "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let cases = [
            (
                "GET",
                "/",
                vec![],
                None,
                "host;x-amz-date, Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
            ),
            (
                "GET",
                "/?Param1=value1",
                vec![],
                None,
                "host;x-amz-date, Signature=a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb",
            ),
            (
                "GET",
                "/?Param2=value2&Param1=value1",
                vec![],
                None,
                "host;x-amz-date, Signature=b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
            ),
            (
                "GET",
                &format!("/?{unreserved}={unreserved}"),
                vec![],
                None,
                "host;x-amz-date, Signature=9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197",
            ),
            (
                "GET",
                "//example//",
                vec![],
                None,
                "host;x-amz-date, Signature=9a624bd73a37c9a373b5312afbebe7a714a789de108f0bdfe846570885f57e84",
            ),
            (
                "POST",
                "/",
                header1(&["value1"]),
                None,
                "host;my-header1;x-amz-date, Signature=c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c",
            ),
            (
                "GET",
                "/",
                header1(&["value2", "value2", "value1"]),
                None,
                "host;my-header1;x-amz-date, Signature=c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea",
            ),
            (
                "GET",
                "/",
                vec![("My-Header1", " value1"), ("My-Header2", " \"a   b   c\"")],
                None,
                "host;my-header1;my-header2;x-amz-date, Signature=acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
            ),
            (
                "GET",
                "/",
                vec![],
                Some(TOKEN),
                "host;x-amz-date;x-amz-security-token, Signature=07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8",
            ),
        ];
        for (method, uri, headers, token, expected) in cases {
            let headers = [vec![("Host", "example.amazonaws.com")], headers].concat();
            let signature = signature(&signer(token), "2015-08-30T12:36:00Z", method, uri, &headers, "");
            assert_eq!(signature, expected, "{method} {uri} {headers:?}");
        }
    }

    #[test]
    fn the_signatures_for_s3_are_those_of_its_documentation() {
        let signer = Signer {
            access_key_id: "AKIAIOSFODNN7EXAMPLE",
            secret_access_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            session_token: None,
            region: "us-east-1",
            service: "s3",
        };
        let cases = [
            (
                "GET",
                "/test.txt",
                vec![("Range", "bytes=0-9")],
                "",
                "host;range;x-amz-content-sha256;x-amz-date, Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            ),
            (
                "PUT",
                "/test$file.text",
                vec![("Date", "Fri, 24 May 2013 00:00:00 GMT"), ("x-amz-storage-class", "REDUCED_REDUNDANCY")],
                "Welcome to Amazon S3.",
                "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class, Signature=98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
            ),
            (
                "GET",
                "/?lifecycle",
                vec![],
                "",
                "host;x-amz-content-sha256;x-amz-date, Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
            ),
            (
                "GET",
                "/?max-keys=2&prefix=J",
                vec![],
                "",
                "host;x-amz-content-sha256;x-amz-date, Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            ),
        ];
        for (method, uri, headers, body, expected) in cases {
            let headers = [vec![("Host", "examplebucket.s3.amazonaws.com")], headers].concat();
            assert_eq!(
                signature(&signer, "2013-05-24T00:00:00Z", method, uri, &headers, body),
                expected,
                "{method} {uri}"
            );
        }
    }

    #[test]
    fn s3_signs_a_path_as_it_is_meant_and_the_others_as_it_is_sent() {
        assert_eq!(canonical_path("/b/a%20b/c+d//%c3%A4:", true), "/b/a%20b/c%2Bd//%C3%A4%3A");
        assert_eq!(canonical_path("/b/a%20b//c/", false), "/b/a%2520b/c/");
        assert_eq!(canonical_path("/", false), "/");
        assert_eq!(canonical_query("b=%2f&a&c=x+y&a=1"), "a=&a=1&b=%2F&c=x%2By");
        assert_eq!(decode("%"), b"%");
        assert_eq!(decode("a%zz%41"), b"a%zzA");
    }
}
