//! Keys, certificates, tokens and kubeconfig files of one control plane.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use serde_json::json;

/// Who the administrator and the servers are for the API server. They have names of their own so that the audit log tells
/// them apart, and all may do everything: a test makes its restricted users itself.
const USERS: [(&str, &str); 4] = [
    ("admin", "admin"),
    ("controller-manager", "system:kube-controller-manager"),
    ("scheduler", "system:kube-scheduler"),
    ("kwok", "kwok"),
];

/// The files, all in the data folder.
#[derive(Debug)]
pub(crate) struct Credentials {
    pub(crate) certificate_authority: PathBuf,
    pub(crate) server_certificate: PathBuf,
    pub(crate) server_key: PathBuf,
    /// Signs the tokens of ServiceAccounts.
    pub(crate) account_key: PathBuf,
    pub(crate) account_public_key: PathBuf,
    pub(crate) tokens: PathBuf,
    dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Certificate(#[from] rcgen::Error),
}

impl Credentials {
    /// Makes and writes them for an API server at this URL. The folder has to be readable by its owner only.
    pub(crate) fn write(dir: &Path, server: &str) -> Result<Self, Error> {
        let file = |name: &str| dir.join(name);
        let new = Self {
            certificate_authority: file("ca.crt"),
            server_certificate: file("api-server.crt"),
            server_key: file("api-server.key"),
            account_key: file("service-account.key"),
            account_public_key: file("service-account.pub"),
            tokens: file("tokens.csv"),
            dir: dir.to_owned(),
        };
        new.write_certificates()?;
        let account = KeyPair::generate()?;
        fs::write(&new.account_key, account.serialize_pem())?;
        fs::write(&new.account_public_key, account.public_key_pem())?;

        let mut tokens = String::new();
        for (name, user) in USERS {
            let token = random_token()?;
            tokens += &format!("{token},{user},{user},system:masters\n");
            fs::write(new.kubeconfig(name), new.kubeconfig_text(server, name, &token))?;
        }
        fs::write(&new.tokens, tokens)?;
        Ok(new)
    }

    /// The kubeconfig file of `admin`, `controller-manager`, `scheduler` or `kwok`.
    pub(crate) fn kubeconfig(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.kubeconfig"))
    }

    fn write_certificates(&self) -> Result<(), Error> {
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "control-plane test authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc"].map(String::from);
        let mut server = CertificateParams::new(names)?;
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let server_key = KeyPair::generate()?;
        let server = server.signed_by(&server_key, &authority)?;

        fs::write(&self.certificate_authority, authority.pem())?;
        fs::write(&self.server_certificate, server.pem())?;
        fs::write(&self.server_key, server_key.serialize_pem())?;
        Ok(())
    }

    /// JSON, which is YAML too.
    fn kubeconfig_text(&self, server: &str, name: &str, token: &str) -> String {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "control-plane",
            "contexts": [{"name": "control-plane", "context": {"cluster": "control-plane", "user": name}}],
            "clusters": [{
                "name": "control-plane",
                "cluster": {"server": server, "certificate-authority": self.certificate_authority},
            }],
            "users": [{"name": name, "user": {"token": token}}],
        })
        .to_string()
    }
}

fn random_token() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}
