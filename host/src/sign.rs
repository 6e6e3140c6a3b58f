//! `pilothouse sign` and `pilothouse verify`: who vouches for a plugin in a registry.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde::Serialize;

use crate::{
    login, output,
    registry::{self, Credentials, Digest, Reference, Registries},
    signature::{self, PrivateKey, PublicKey},
};

/// What to sign.
#[derive(Clone, Debug, clap::Args)]
pub struct SignOptions {
    #[command(flatten)]
    what: What,
    /// The private key: ECDSA on P-256, as PKCS #8 in PEM, or as cosign encrypts it, with its password in the environment variable
    /// COSIGN_PASSWORD.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

/// What to verify.
#[derive(Clone, Debug, clap::Args)]
pub struct VerifyOptions {
    #[command(flatten)]
    what: What,
    /// The public key, in PEM. Of several, one has to have signed.
    #[arg(long, value_name = "FILE", required = true)]
    key: Vec<PathBuf>,
}

#[derive(Clone, Debug, clap::Args)]
struct What {
    /// Where it is, as registry.example.com/team/plugin:1.0, or with @sha256:… behind it.
    reference: Reference,
    /// How the result is shown.
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,
    #[command(flatten)]
    registry: registry::Options,
}

/// The document of `pilothouse sign -o json` and `pilothouse verify -o json`. Its keys are there to stay.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Signed {
    /// What is signed, with its digest.
    reference: String,
    /// The digest of its manifest, which is what the signature is of.
    digest: Digest,
}

/// Signs a plugin, and prints its reference with the digest.
///
/// # Errors
/// If the key is none, the plugin is not there, or the registry does not take the signature.
pub async fn sign(options: &SignOptions) -> anyhow::Result<()> {
    let (pem, password) = (read(&options.key)?, std::env::var("COSIGN_PASSWORD").ok());
    let key = PrivateKey::read(&pem, password.as_deref());
    let key = key.with_context(|| format!("{} is no private key that can sign", options.key.display()))?;
    let (registries, credentials, digest) = options.what.resolve().await?;
    signature::sign(&registries, options.what.reference.repository(), &digest, &key, &credentials).await?;
    options.what.tell(digest)
}

/// Makes sure that a plugin is signed, and prints its reference with the digest.
///
/// # Errors
/// If it is not, or not by one of the keys.
pub async fn verify(options: &VerifyOptions) -> anyhow::Result<()> {
    let key =
        |path: &PathBuf| PublicKey::read(&read(path)?).with_context(|| format!("{} is no public key", path.display()));
    let keys = options.key.iter().map(key).collect::<anyhow::Result<Vec<_>>>()?;
    let (registries, credentials, digest) = options.what.resolve().await?;
    signature::verify(&registries, options.what.reference.repository(), &digest, &keys, &credentials).await?;
    options.what.tell(digest)
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))
}

impl What {
    async fn resolve(&self) -> anyhow::Result<(Registries, Credentials, Digest)> {
        let registries = Registries::new(&self.registry)?;
        let credentials = login::credentials(self.reference.repository())?;
        let digest = registries.resolve(&self.reference, &credentials).await?;
        Ok((registries, credentials, digest))
    }

    fn tell(&self, digest: Digest) -> anyhow::Result<()> {
        let signed = Signed { reference: self.reference.pinned(digest.clone()).to_string(), digest };
        match self.output {
            output::Format::Text => writeln!(anstream::stdout().lock(), "{}", signed.reference)?,
            output::Format::Json => output::json(&signed)?,
        }
        Ok(())
    }
}
