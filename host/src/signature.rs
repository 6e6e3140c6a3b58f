//! Signatures of artifacts: who vouches for a digest, told by a key, without asking anybody but the registry.
//!
//! The format is that of cosign with a key ("simple signing"): beside the artifact there is another, whose tag is made of the digest, and
//! whose layers are documents that name the digest, each with a signature (ECDSA on P-256 over SHA-256) in an annotation. So
//! `cosign sign --key` and [`sign`] can be read by each other's [`verify`]. Neither transparency log nor certificates are looked at: a key
//! that was handed over is proof enough, and works where there is no internet.
//!
//! This is not the crate `sigstore`: to check one signature it brings hundreds of crates, among them clients for OpenID and a browser.
//!
//! Which artifacts need which key is for [`policy`] to say.

pub mod key;
pub mod policy;

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hyper::body::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::registry::{
    self, Credentials, Digest, Registries, Repository, Session,
    manifest::{Descriptor, Manifest},
};
pub use key::{PrivateKey, PublicKey};

const PAYLOAD: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// What a payload says that it is.
const TYPE: &str = "cosign container image signature";

/// The largest payload. Ours have 300 bytes; those of others may carry annotations.
const MAX_PAYLOAD: u64 = 64 << 10;
/// How many signatures of one artifact are looked at. Who may push could add any number.
const MAX_SIGNATURES: usize = 50;
/// How long all of it may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Why an artifact is not verified, or not signed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The registry does not do what it should.
    #[error("failed to {doing} {digest}")]
    Registry {
        /// Of what.
        digest: Digest,
        /// `sign` or `verify`.
        doing: &'static str,
        /// Why.
        source: Box<registry::Error>,
    },
    /// Nobody has signed it.
    #[error(
        "{digest} in {repository} is not signed: there is no {tag} beside it (`pilothouse sign` or `cosign sign --key` makes it)"
    )]
    NotSigned {
        /// Where.
        repository: Repository,
        /// What.
        digest: Digest,
        /// The tag of its signatures.
        tag: String,
    },
    /// Somebody has, but not who should have.
    #[error("none of the {found} signatures of {digest} in {repository} is by a key that it has to be signed with")]
    OtherKey {
        /// Where.
        repository: Repository,
        /// What.
        digest: Digest,
        /// How many there are.
        found: usize,
    },
    /// The key cannot sign.
    #[error("failed to sign")]
    Key(#[source] key::Error),
}

/// What is signed: as much of it as counts.
#[derive(Serialize, Deserialize)]
struct Payload {
    critical: Critical,
    /// Whatever else the signer wants to say.
    #[serde(default)]
    optional: Value,
}

#[derive(Serialize, Deserialize)]
struct Critical {
    identity: Identity,
    image: Image,
    r#type: String,
}

/// Where it was when it was signed. It may have been copied since, signature and all.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Identity {
    docker_reference: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Image {
    docker_manifest_digest: Digest,
}

/// Makes sure that one of these keys has signed a manifest.
///
/// # Errors
/// If none has, or it cannot be found out.
pub async fn verify(
    registries: &Registries,
    repository: &Repository,
    digest: &Digest,
    keys: &[PublicKey],
    credentials: &Credentials,
) -> Result<(), Error> {
    let tag = tag(digest);
    let read = |mut session: Session| {
        let tag = &tag;
        async move {
            let Some(manifest) = manifest(&mut session, repository, tag).await? else { return Ok(None) };
            let mut found = 0;
            for layer in manifest.layers.iter().filter(|layer| layer.media_type == PAYLOAD).take(MAX_SIGNATURES) {
                found += 1;
                let payload = session.blob(layer, MAX_PAYLOAD).await?;
                if keys.iter().any(|key| is_by(key, layer, &payload, digest)) {
                    return Ok(Some((true, found)));
                }
            }
            Ok(Some((false, found)))
        }
    };
    let result = registries.session(repository, credentials, LIMIT, read).await;
    let result = result.map_err(|source| Error::Registry {
        digest: digest.clone(),
        doing: "verify",
        source: Box::new(source),
    })?;
    let (repository, digest) = (repository.clone(), digest.clone());
    match result {
        Some((true, _)) => Ok(()),
        Some((false, found)) if found > 0 => Err(Error::OtherKey { repository, digest, found }),
        _ => Err(Error::NotSigned { repository, digest, tag }),
    }
}

/// Signs a manifest. Signatures of others stay.
///
/// # Errors
/// If there is no such manifest, or the registry does not take the signature.
pub async fn sign(
    registries: &Registries,
    repository: &Repository,
    digest: &Digest,
    key: &PrivateKey,
    credentials: &Credentials,
) -> Result<(), Error> {
    let critical = Critical {
        identity: Identity { docker_reference: repository.to_string() },
        image: Image { docker_manifest_digest: digest.clone() },
        r#type: TYPE.to_owned(),
    };
    let payload = json!(Payload { critical, optional: Value::Null }).to_string().into_bytes();
    let mut layer = Descriptor::of(PAYLOAD, &payload);
    let signature = key.sign(&payload).map_err(Error::Key)?;
    layer.annotations.insert(ANNOTATION.to_owned(), STANDARD.encode(signature).into());
    let (tag, payload) = (tag(digest), Bytes::from(payload));
    let write = |mut session: Session| {
        let (tag, layer, payload) = (&tag, &layer, payload.clone());
        async move {
            // What is not there cannot be signed.
            session.manifest(digest).await?;
            let before = manifest(&mut session, repository, tag).await?;
            let mut layers = before.map(|manifest| manifest.layers).unwrap_or_default();
            layers.push(layer.clone());
            let config = config(&layers);
            let manifest = Manifest::with(Descriptor::of(CONFIG, &config), layers);
            session.push_blob(layer, payload).await?;
            session.push_blob(&manifest.config, config.into()).await?;
            session.push_manifest(Some(tag), &manifest).await
        }
    };
    let result = registries.session(repository, credentials, LIMIT, write).await;
    let failed = |source| Error::Registry { digest: digest.clone(), doing: "sign", source: Box::new(source) };
    result.map(drop).map_err(failed)
}

/// Where cosign looks for the signatures of a manifest.
fn tag(digest: &Digest) -> String {
    format!("sha256-{}.sig", digest.hex())
}

async fn manifest(
    session: &mut Session,
    repository: &Repository,
    tag: &str,
) -> Result<Option<Manifest>, registry::Error> {
    let Some(bytes) = session.manifest_of(tag).await? else { return Ok(None) };
    let not_signatures = |_| registry::Error::Protocol {
        repository: repository.clone(),
        what: "the tag of its signatures is no image manifest",
    };
    Manifest::read(&bytes).map(Some).map_err(not_signatures)
}

/// Whether a layer is a signature of this manifest by this key. What cannot be read is none.
fn is_by(key: &PublicKey, layer: &Descriptor, payload: &[u8], digest: &Digest) -> bool {
    let signature = layer.annotations.get(ANNOTATION).and_then(Value::as_str).unwrap_or_default();
    let Ok(signature) = STANDARD.decode(signature) else { return false };
    // The signature first: before it is known to be right, the payload is a stranger's.
    key.has_signed(payload, &signature)
        && serde_json::from_slice::<Payload>(payload).is_ok_and(|Payload { critical, .. }| {
            critical.r#type == TYPE && critical.image.docker_manifest_digest == *digest
        })
}

/// An image has one; this says no more than which layers there are, as cosign's does.
fn config(layers: &[Descriptor]) -> Vec<u8> {
    let digests: Vec<_> = layers.iter().map(|layer| &layer.digest).collect();
    let config = json!({
        "architecture": "", "os": "", "config": {}, "created": "0001-01-01T00:00:00Z",
        "rootfs": {"type": "layers", "diff_ids": digests},
    });
    config.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layer that says that `key` has signed this payload.
    fn signed(key: &PrivateKey, payload: &str) -> Descriptor {
        let mut layer = Descriptor::of(PAYLOAD, payload.as_bytes());
        let signature = STANDARD.encode(key.sign(payload.as_bytes()).unwrap());
        layer.annotations.insert(ANNOTATION.to_owned(), signature.into());
        layer
    }

    fn payload(digest: &Digest, r#type: &str) -> String {
        let image = json!({"docker-manifest-digest": digest});
        let identity = json!({"docker-reference": "r.io/x"});
        json!({"critical": {"identity": identity, "image": image, "type": r#type}, "optional": {"by": "me"}})
            .to_string()
    }

    #[test]
    fn a_signature_that_the_library_of_cosign_has_made_counts() {
        let pem = "-----BEGIN PUBLIC KEY-----\n\
            MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAExxjYSBl+C8IC9mPRbvtE5QsZ3sVB\n\
            sEaIPa7X0/wmGejfeb6hCb3L410gj6V7Jpq3bg4sUnrpLKwYuCguaPiCfQ==\n\
            -----END PUBLIC KEY-----\n";
        let payload = concat!(
            r#"{"critical":{"identity":{"docker-reference":"registry.example.com/team/plugin"},"#,
            r#""image":{"docker-manifest-digest":"sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"},"#,
            r#""type":"cosign container image signature"},"optional":null}"#
        );
        let signature =
            "MEQCIGTDO+QOc573hzGCf1JMbVyaaYpvROV+3gxyfjibb/ojAiAlbDg09euDear4FpuY6QGMaGcSxs9odWiOgUp3bcHFvw==";
        let mut layer = Descriptor::of(PAYLOAD, payload.as_bytes());
        layer.annotations.insert(ANNOTATION.to_owned(), signature.into());
        let digest = Digest::of(b"x");
        assert_eq!(digest.as_str(), "sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881");
        assert!(is_by(&PublicKey::read(pem).unwrap(), &layer, payload.as_bytes(), &digest));
    }

    #[test]
    fn a_signature_counts_for_its_digest_its_type_and_its_key_alone() {
        let (private, public) = key::tests::pair();
        let (_, other) = key::tests::pair();
        let digest = Digest::of(b"x");
        let right = payload(&digest, TYPE);
        let layer = signed(&private, &right);
        assert!(is_by(&public, &layer, right.as_bytes(), &digest));
        assert!(!is_by(&other, &layer, right.as_bytes(), &digest));
        assert!(!is_by(&public, &layer, right.as_bytes(), &Digest::of(b"y")), "it is of another artifact");
        for wrong in [payload(&digest, "another document"), "{}".to_owned()] {
            assert!(!is_by(&public, &signed(&private, &wrong), wrong.as_bytes(), &digest), "{wrong}");
        }
        let moved = payload(&Digest::of(b"y"), TYPE);
        assert!(!is_by(&public, &layer, moved.as_bytes(), &Digest::of(b"y")), "it was signed for another payload");
        assert!(!is_by(&public, &Descriptor::of(PAYLOAD, b""), right.as_bytes(), &digest), "there is no annotation");
    }
}
