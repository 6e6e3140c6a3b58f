//! The certificates of a server at 127.0.0.1, and the authority that they are from.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// Who signs them.
#[derive(Debug)]
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Its own certificate, as PEM.
    pub(crate) pem: String,
}

/// As PEM, each.
pub(crate) struct Certificate {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    /// A new one.
    pub(crate) fn new() -> Result<Self, rcgen::Error> {
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "PostgreSQL test authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
        Ok(Self { pem: issuer.pem(), issuer })
    }

    /// Makes a certificate for a server, whose time is over if it should be.
    pub(crate) fn certify(&self, is_expired: bool) -> Result<Certificate, rcgen::Error> {
        let mut server = CertificateParams::new(["127.0.0.1".to_owned()])?;
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        if is_expired {
            server.not_before = date_time_ymd(2019, 1, 1);
            server.not_after = date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate()?;
        let server = server.signed_by(&key, &self.issuer)?;
        Ok(Certificate { certificate: server.pem(), key: key.serialize_pem() })
    }
}
