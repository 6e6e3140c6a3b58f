//! Signatures: ours, and those of cosign.

use std::fs;

use distribution::Registry;
use pilothouse::{
    registry::{Digest, Registries},
    signature::{Error, PrivateKey, PublicKey, sign, verify},
};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use tempfile::TempDir;

use crate::{at, commands::pilothouse, component, digest, nobody, open, told};

/// A new pair, as PEM.
fn pair() -> (String, String) {
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key can be made");
    (pair.serialize_pem(), pair.public_key_pem())
}

fn keys() -> (PrivateKey, PublicKey) {
    let (private, public) = pair();
    (PrivateKey::read(&private, None).expect("it is one"), PublicKey::read(&public).expect("it is one"))
}

/// A registry with one plugin.
async fn pushed() -> (Registry, Registries, Digest) {
    let (registry, registries) = open();
    let digest = registries.push(&at(&registry, "plugin:1.0"), component("a"), &nobody()).await.expect("it is open");
    (registry, registries, digest)
}

#[tokio::test]
async fn a_plugin_is_verified_by_the_keys_that_have_signed_it_and_no_others() {
    let (registry, registries, digest) = pushed().await;
    let place = at(&registry, "plugin:1.0");
    let repository = place.repository();
    let ((first, by_first), (second, by_second), (_, by_nobody)) = (keys(), keys(), keys());
    let verified = async |keys: &[&PublicKey]| {
        let keys: Vec<_> = keys.iter().map(|key| (*key).clone()).collect();
        verify(&registries, repository, &digest, &keys, &nobody()).await
    };

    let unsigned = verified(&[&by_first]).await.unwrap_err();
    assert!(matches!(unsigned, Error::NotSigned { .. }), "{unsigned}");
    assert!(told(&unsigned).contains(digest.as_str()) && told(&unsigned).contains(&repository.to_string()));
    sign(&registries, repository, &digest, &first, &nobody()).await.unwrap();
    sign(&registries, repository, &digest, &second, &nobody()).await.unwrap();
    verified(&[&by_first]).await.unwrap();
    verified(&[&by_nobody, &by_second]).await.unwrap();
    let other = verified(&[&by_nobody]).await.unwrap_err();
    assert!(matches!(other, Error::OtherKey { found: 2, .. }), "{other}");
    assert!(matches!(verified(&[]).await, Err(Error::OtherKey { .. })), "no key is not any key");
}

#[tokio::test]
async fn a_signature_is_of_one_digest() {
    let (registry, registries, first) = pushed().await;
    let (private, public) = keys();
    let place = at(&registry, "plugin:1.0");
    sign(&registries, place.repository(), &first, &private, &nobody()).await.unwrap();
    let second = registries.push(&place, component("b"), &nobody()).await.unwrap();
    let error = verify(&registries, place.repository(), &second, &[public], &nobody()).await.unwrap_err();
    assert!(matches!(error, Error::NotSigned { .. }), "{error}");
    let error = sign(&registries, place.repository(), &digest(b"nothing"), &private, &nobody()).await.unwrap_err();
    assert!(told(&error).contains("404"), "what is not there is not signed: {}", told(&error));
}

#[test]
fn a_person_signs_and_verifies() {
    let ((registry, _), home) = (open(), TempDir::new().unwrap());
    let (home, host) = (home.path(), registry.host());
    let (private, public) = pair();
    for (name, content) in [("cosign.key", private.as_str()), ("cosign.pub", &public), ("other.pub", &pair().1)] {
        fs::write(home.join(name), content).unwrap();
    }
    fs::write(home.join("new.wasm"), component("a")).unwrap();
    let reference = format!("{host}/team/plugin:1.0");
    let run = |arguments: &[&str]| pilothouse(home, &[arguments, &["--insecure-registry", &host]].concat());

    let pushed = run(&["push", "new.wasm", &reference]).unwrap();
    let unsigned = run(&["verify", &reference, "--key", "cosign.pub"]).unwrap_err();
    assert!(unsigned.contains("is not signed"), "{unsigned}");
    assert_eq!(run(&["sign", &reference, "--key", "cosign.key"]).unwrap(), pushed);
    assert_eq!(run(&["verify", pushed.trim(), "--key", "cosign.pub"]).unwrap(), pushed);
    let other = run(&["verify", &reference, "--key", "other.pub"]).unwrap_err();
    assert!(other.contains("none of the 1 signatures"), "{other}");
    let wrong = run(&["sign", &reference, "--key", "cosign.pub"]).unwrap_err();
    assert!(wrong.contains("cosign.pub is no private key that can sign"), "{wrong}");
}
