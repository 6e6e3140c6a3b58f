//! The keys that sign and verify: pairs of ECDSA on P-256, in the files that `openssl` and cosign write.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use crypto_secretbox::{KeyInit as _, XSalsa20Poly1305, aead::Aead as _};
use ring::{
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _, UnparsedPublicKey,
    },
};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::identity;

/// What stands before the point in the DER of a public key on P-256: the names of the algorithm and the curve (RFC 5480).
const P256: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// What cosign has written over its private keys, now and at first.
const SEALED: [&str; 2] = ["ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY"];
/// The most memory that opening one takes, as the logarithm of how often 1 KiB: four times what cosign makes it take.
const MOST_WORK: u8 = 18;
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
    /// It is encrypted, and nobody says with what.
    #[error("it is encrypted; give its password in the environment variable COSIGN_PASSWORD")]
    PasswordMissing,
    /// The password is another one, or the file is damaged.
    #[error("the password (COSIGN_PASSWORD) does not open it")]
    Password,
    /// It is not as cosign encrypts.
    #[error("it is encrypted in another way than cosign's: scrypt and nacl/secretbox")]
    Encryption,
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
    /// The key in a PEM file: PKCS #8 as it is, or as cosign encrypts it with a password.
    ///
    /// # Errors
    /// If it is not one on P-256, or the password does not open it.
    pub fn read(pem: &str, password: Option<&str>) -> Result<Self, Error> {
        let pem = pem::parse(pem).map_err(|_| Error::Pem)?;
        let der = match pem.tag() {
            "PRIVATE KEY" => pem.contents().to_vec(),
            tag if SEALED.contains(&tag) => {
                let sealed: Sealed = serde_json::from_slice(pem.contents()).map_err(|_| Error::Encryption)?;
                sealed.open(password.ok_or(Error::PasswordMissing)?)?
            }
            tag => {
                let wanted = "PRIVATE KEY (PKCS #8), or one that cosign has encrypted";
                return Err(Error::Kind { found: tag.to_owned(), wanted });
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

/// What is in the PEM of a private key that cosign has encrypted.
#[derive(Deserialize)]
struct Sealed {
    kdf: Kdf,
    cipher: Cipher,
    ciphertext: String,
}

/// How a password becomes a key.
#[derive(Deserialize)]
struct Kdf {
    name: String,
    params: Work,
    salt: String,
}

/// How much work that is.
#[derive(Deserialize)]
struct Work {
    #[serde(rename = "N")]
    n: u64,
    r: u32,
    p: u32,
}

/// How that key encrypts.
#[derive(Deserialize)]
struct Cipher {
    name: String,
    nonce: String,
}

impl Sealed {
    fn open(&self, password: &str) -> Result<Vec<u8>, Error> {
        let Self { kdf: Kdf { name, params: Work { n, r, p }, salt }, cipher, ciphertext } = self;
        let decode = |text: &String| STANDARD.decode(text).map_err(|_| Error::Encryption);
        let work = n.is_power_of_two().then(|| n.ilog2()).and_then(|log| u8::try_from(log).ok());
        let work = work.filter(|log| *log <= MOST_WORK && *r <= 8 && *p <= 4).ok_or(Error::Encryption)?;
        let nonce = <[u8; 24]>::try_from(decode(&cipher.nonce)?).map_err(|_| Error::Encryption)?;
        if (name.as_str(), cipher.name.as_str()) != ("scrypt", "nacl/secretbox") {
            return Err(Error::Encryption);
        }
        let mut key = [0; 32];
        scrypt::Params::new(work, *r, *p, key.len())
            .ok()
            .and_then(|params| scrypt::scrypt(password.as_bytes(), &decode(salt).ok()?, &params, &mut key).ok())
            .ok_or(Error::Encryption)?;
        let opened = XSalsa20Poly1305::new(&key.into()).decrypt(&nonce.into(), decode(ciphertext)?.as_slice());
        opened.map_err(|_| Error::Password)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A new pair.
    pub(crate) fn pair() -> (PrivateKey, PublicKey) {
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new()).unwrap();
        let pem = pem::encode(&pem::Pem::new("PRIVATE KEY", pkcs8.as_ref()));
        let private = PrivateKey::read(&pem, None).unwrap();
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
        assert!(matches!(PrivateKey::read(&pem("PRIVATE KEY", b"x"), None), Err(Error::Algorithm)));
        assert!(matches!(PrivateKey::read(&pem("PUBLIC KEY", b"x"), None), Err(Error::Kind { .. })));
    }

    /// Made with the scrypt of Python and a secretbox that was written out there, which open what cosign makes.
    const SEALED_KEY: &str = "\
-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----
eyJrZGYiOnsibmFtZSI6InNjcnlwdCIsInBhcmFtcyI6eyJOIjo2NTUzNiwiciI6
OCwicCI6MX0sInNhbHQiOiJ0QlRGa0dkWU1VeXlhWUVOQVVzcGRmZk8rKzZSMnRt
d0crVW5KQVpZSFBnPSJ9LCJjaXBoZXIiOnsibmFtZSI6Im5hY2wvc2VjcmV0Ym94
Iiwibm9uY2UiOiI0dldWNmZXL211emp2S1UwNDhScm1TTWVBOWFEQmV2ZiJ9LCJj
aXBoZXJ0ZXh0IjoiajlWZ0htdjFsdG5vOFpoMUkzMzNRamFoQ3p0aWhKdi82Um95
bU5KNHVXbVZlMC9taEhQcGs0cVVVYVRDV0ZpdmFNNnQwSnZITTY4SE12NnlTVStL
SENNNy9Ha2pYYU1MVStnQ3h0K3V4b01wZWZtQTJVS2ZzWjgyd0NQSUFqRSthTFZ3
L3VESGlVY3B2WU1VWDVQZUFnL0Z4M2ZjeFlrbklITlJ5Vm5JRHhkT2hJNEpZc3dw
N0gwYnE5SENrTWplYkhvNDljNzZIdjdmeFE9PSJ9
-----END ENCRYPTED SIGSTORE PRIVATE KEY-----";
    const ITS_OTHER_HALF: &str = "\
-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE2tb0Ek5YcYTMUUGQRFj9FIZSDHUw
L7cDgpLCMhUPmikYNmvrEkow3r0bxRqfBu6qN87d7DZbxJsIotBmTnpREA==
-----END PUBLIC KEY-----";

    #[test]
    fn a_private_key_that_cosign_has_encrypted_is_opened_by_its_password() {
        let private = PrivateKey::read(SEALED_KEY, Some("open sesame")).unwrap();
        assert_eq!(private.public(), PublicKey::read(ITS_OTHER_HALF).unwrap());
        assert!(matches!(PrivateKey::read(SEALED_KEY, None), Err(Error::PasswordMissing)));
        assert!(matches!(PrivateKey::read(SEALED_KEY, Some("open says me")), Err(Error::Password)));
        let sealed = pem::parse(SEALED_KEY).unwrap();
        let edited = |from: &str, to: &str| {
            let text = str::from_utf8(sealed.contents()).unwrap().replacen(from, to, 1);
            PrivateKey::read(&pem::encode(&pem::Pem::new(SEALED[0], text)), Some("open sesame"))
        };
        // Another way to encrypt, more memory than it may take, and no such document.
        for (from, to) in [("nacl/secretbox", "none"), ("65536", "1073741824"), ("65536", "0"), ("kdf", "key")] {
            assert!(matches!(edited(from, to), Err(Error::Encryption)), "{to}");
        }
    }
}
