//! The certificate of a server at 127.0.0.1, and the authority that it is from.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// As PEM, each.
pub(crate) struct Certificates {
    pub(crate) authority: String,
    pub(crate) server: String,
    pub(crate) key: String,
}

/// Makes them.
pub(crate) fn make() -> Result<Certificates, rcgen::Error> {
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, "PostgreSQL test authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let mut server = CertificateParams::new(["127.0.0.1".to_owned()])?;
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let server = server.signed_by(&key, &authority)?;
    Ok(Certificates { authority: authority.pem(), server: server.pem(), key: key.serialize_pem() })
}
