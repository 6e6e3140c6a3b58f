//! What the host adds to a request to prove whose it is: as the grant says, from its Secret, and never from the plugin.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderName, HeaderValue, Request, header};
use hyper::body::Bytes;
use jiff::Timestamp;

use super::{
    header::{SIGNED, is_of_host},
    sigv4::Signer,
};
use crate::{
    crd::{Auth, SecretRef},
    secrets::{self, Content},
};

/// Why it cannot. Names the Secret, and nothing of what it holds.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("its auth has to be exactly one of bearer, basic, header and awsSigV4")]
    Kind,
    #[error("its auth.header.name {0:?} is no name of a header that credentials may be in")]
    Header(String),
    #[error(transparent)]
    Secret(#[from] secrets::Error),
}

/// The headers that are set by it, beside `Authorization`.
pub(super) fn headers(auth: Option<&Auth>) -> Vec<&str> {
    match auth {
        Some(Auth { header: Some(header), .. }) => vec![&header.name],
        Some(Auth { aws_sig_v4: Some(_), .. }) => SIGNED.into(),
        _ => Vec::new(),
    }
}

/// Adds it to a request that is complete otherwise.
pub(super) fn add(
    auth: &Auth,
    name: &SecretRef,
    secret: &Content,
    request: &mut Request<Bytes>,
    now: Timestamp,
) -> Result<(), Error> {
    // Files end with a line's end, and so do the Secrets that are made from them.
    let text = |key| secret.text(key).map(|text| text.trim_end_matches(['\r', '\n']));
    let value = |text: String| {
        let mut value = HeaderValue::from_str(&text).map_err(|_| secrets::Error::NoLine(name.clone()))?;
        value.set_sensitive(true);
        Ok::<_, Error>(value)
    };
    match auth {
        Auth { bearer: Some(_), basic: None, header: None, aws_sig_v4: None } => {
            let token = value(format!("Bearer {}", text("token")?))?;
            request.headers_mut().insert(header::AUTHORIZATION, token);
        }
        Auth { basic: Some(_), bearer: None, header: None, aws_sig_v4: None } => {
            let encoded = STANDARD.encode(format!("{}:{}", text("username")?, text("password")?));
            request.headers_mut().insert(header::AUTHORIZATION, value(format!("Basic {encoded}"))?);
        }
        Auth { header: Some(header), bearer: None, basic: None, aws_sig_v4: None } => {
            let of_credentials: Option<HeaderName> = header.name.parse().ok();
            let of_credentials = of_credentials.filter(|name| *name == header::AUTHORIZATION || !is_of_host(name));
            let key = of_credentials.ok_or_else(|| Error::Header(header.name.clone()))?;
            request.headers_mut().insert(key, value(text("value")?.to_owned())?);
        }
        Auth { aws_sig_v4: Some(aws), bearer: None, basic: None, header: None } => {
            let session_token = secret.find("sessionToken")?.map(|text| text.trim_end_matches(['\r', '\n']));
            let signer = Signer {
                access_key_id: text("accessKeyId")?,
                secret_access_key: text("secretAccessKey")?,
                session_token: session_token.filter(|token| !token.is_empty()),
                region: &aws.region,
                service: &aws.service,
            };
            signer.sign(request, now).map_err(|_| secrets::Error::NoLine(name.clone()))?;
        }
        _ => return Err(Error::Kind),
    }
    Ok(())
}
