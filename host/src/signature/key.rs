//! The keys that sign and verify: pairs of ECDSA on P-256, in the files that `openssl` writes, and the public ones of cosign.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::{
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _, UnparsedPublicKey,
    },
};
use sha2::{Digest as _, Sha256};

use crate::identity;

/// What stands before the point in the DER of a public key on P-256: the names of the algorithm and the curve (RFC 5480).
const P256: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// A point that is not compressed: a byte that says so, and two coordinates.
const POINT: usize = 65;

/// Who has signed something is asked by this.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PublicKey(Vec<u8>);

/// Signs.
pub struct PrivateKey(EcdsaKeyPair);

/// Why a text is no key. The texts say nothing of what is in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is no PEM.
    #[error("it is no PEM file: a key begins with a line `-----BEGIN … KEY-----`")]
    Pem,
    /// It is PEM of something else.
    #[error("it is a {found:?}, and a {wanted} is needed")]
    Kind {
        /// What it says that it is.
        found: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// The key is of another kind.
    #[error("it is no key for ECDSA on the curve P-256, which is what `cosign generate-key-pair` makes")]
    Algorithm,
    /// The machine has no randomness.
    #[error("no signature can be made on this machine")]
    Random,
}

impl std::fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PublicKey({})", STANDARD.encode(&self.0))
    }
}

impl std::fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PrivateKey(…)")
    }
}

impl PublicKey {
    /// The SHA-256 of the key, in hex: its name.
    pub fn fingerprint(&self) -> String {
        identity::hex(&Sha256::digest(&self.0), 32)
    }

    /// The key in a PEM file.
    ///
    /// # Errors
    /// If it is not one on P-256.
    pub fn read(pem: &str) -> Result<Self, Error> {
        let pem = pem::parse(pem).map_err(|_| Error::Pem)?;
        if pem.tag() != "PUBLIC KEY" {
            return Err(Error::Kind { found: pem.tag().to_owned(), wanted: "PUBLIC KEY" });
        }
        let point = pem.contents().strip_prefix(&P256).ok_or(Error::Algorithm)?;
        if point.len() != POINT {
            return Err(Error::Algorithm);
        }
        Ok(Self(point.to_vec()))
    }

    /// Whether its other half has signed this.
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.0).verify(message, signature).is_ok()
    }
}

impl PrivateKey {
    /// The key in a PEM file: PKCS #8, as it is. One that cosign has encrypted is not read.
    ///
    /// # Errors
    /// If it is not one on P-256.
    pub fn read(pem: &str) -> Result<Self, Error> {
        let pem = pem::parse(pem).map_err(|_| Error::Pem)?;
        let der = match pem.tag() {
            "PRIVATE KEY" => pem.contents().to_vec(),
            tag => {
                return Err(Error::Kind { found: tag.to_owned(), wanted: "PRIVATE KEY (PKCS #8, not encrypted)" });
            }
        };
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &der, &SystemRandom::new());
        pair.map(Self).map_err(|_| Error::Algorithm)
    }

    /// Signs a message.
    ///
    /// # Errors
    /// If there is no randomness.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        let signature = self.0.sign(&SystemRandom::new(), message).map_err(|_| Error::Random)?;
        Ok(signature.as_ref().to_vec())
    }

    /// Its other half.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.public_key().as_ref().to_vec())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A new pair.
    pub(crate) fn pair() -> (PrivateKey, PublicKey) {
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new()).unwrap();
        let pem = pem::encode(&pem::Pem::new("PRIVATE KEY", pkcs8.as_ref()));
        let private = PrivateKey::read(&pem).unwrap();
        let public = private.public();
        (private, public)
    }

    #[test]
    fn a_public_key_is_read_from_pem_and_knows_its_signatures() {
        let (private, public) = pair();
        let pem = pem::encode(&pem::Pem::new("PUBLIC KEY", [&P256[..], &public.0].concat()));
        let read = PublicKey::read(&pem).unwrap();
        assert_eq!(read, public);
        let signature = private.sign(b"message").unwrap();
        assert!(read.has_signed(b"message", &signature));
        assert!(!read.has_signed(b"massage", &signature) && !read.has_signed(b"message", b""));
    }

    #[test]
    fn what_is_no_key_says_what_is_needed() {
        let pem = |tag, content: &[u8]| pem::encode(&pem::Pem::new(tag, content));
        assert!(matches!(PublicKey::read("key"), Err(Error::Pem)));
        assert!(matches!(PublicKey::read(&pem("CERTIFICATE", b"x")), Err(Error::Kind { .. })));
        assert!(matches!(PublicKey::read(&pem("PUBLIC KEY", b"x")), Err(Error::Algorithm)));
        assert!(matches!(PublicKey::read(&pem("PUBLIC KEY", &P256)), Err(Error::Algorithm)));
        assert!(matches!(PrivateKey::read(&pem("PRIVATE KEY", b"x")), Err(Error::Algorithm)));
        assert!(matches!(PrivateKey::read(&pem("PUBLIC KEY", b"x")), Err(Error::Kind { .. })));
    }
}
