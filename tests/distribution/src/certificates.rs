//! The certificate of a registry at 127.0.0.1, and the authority that it is from.

use std::{fs, path::Path};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::Error;

/// The authority's certificate.
pub(crate) const AUTHORITY: &str = "ca.crt";
/// The registry's.
pub(crate) const CERTIFICATE: &str = "registry.crt";
/// The key of the registry's.
pub(crate) const KEY: &str = "registry.key";

/// Makes and writes them.
pub(crate) fn write(folder: &Path) -> Result<(), Error> {
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, "registry test authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let mut registry = CertificateParams::new(["127.0.0.1", "localhost"].map(String::from))?;
    registry.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let registry = registry.signed_by(&key, &authority)?;

    fs::write(folder.join(AUTHORITY), authority.pem())?;
    fs::write(folder.join(CERTIFICATE), registry.pem())?;
    fs::write(folder.join(KEY), key.serialize_pem())?;
    Ok(())
}
