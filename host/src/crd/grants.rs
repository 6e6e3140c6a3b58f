//! What a plugin may use of the world outside, as a reconciler says it. What is not granted does not exist for it.
//!
//! `S` is how a Secret is named: by namespace and name, or in a namespace by its name alone.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Bytes, LocalSecretRef, SecretRef, Timeout};

/// What `url` of a grant looks like. The rest is checked where it is used.
const URL: &str = "^https?://[^/?#@]+(/[^?#]*)?$";

/// What the plugin may use beside its request. Default: nothing. Holds from its next call of a capability on, whatever revision serves.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(default, bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "Grants")]
pub struct Grants<S = SecretRef> {
    /// HTTP services.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub http: Vec<HttpGrant<S>>,
    /// Databases.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub sql: Vec<SqlGrant<S>>,
    /// Reads from the API server beyond `relations`, as the service account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kube: Option<KubeGrant<S>>,
}

impl<S> Default for Grants<S> {
    fn default() -> Self {
        Self { http: Vec::new(), sql: Vec::new(), kube: None }
    }
}

/// An HTTP service: one origin, and what is below one path.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase", bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "HttpGrant")]
pub struct HttpGrant<S = SecretRef> {
    /// The name by which the plugin asks for it.
    pub name: String,
    /// Scheme, host, port and the path that requests have to be at or below, as in `https://api.example.com/v1`.
    #[schemars(regex(pattern = URL))]
    pub url: String,
    /// The methods that may be used, in upper case.
    #[serde(default = "reading")]
    #[schemars(length(max = 16))]
    pub methods: Vec<String>,
    /// What the host adds to each request to prove whose it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<Auth<S>>,
    /// How long a request may take, its answer included.
    #[serde(default = "thirty_seconds")]
    pub timeout: Timeout,
    /// The largest body of a request, as a quantity in bytes.
    #[serde(default = "one_mebibyte")]
    pub max_request: Bytes,
    /// The largest body of an answer, as a quantity in bytes.
    #[serde(default = "one_mebibyte")]
    pub max_response: Bytes,
    /// The certificate authorities that are trusted instead of the usual ones, as PEM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// Networks that the host may resolve to although they are private, loopback or link-local, as in `10.0.0.0/8`. Without them only public
    /// addresses are connected to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub allow_networks: Vec<String>,
}

/// What the host adds to each request: exactly one of these.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase", bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(
    rename = "Auth",
    extend("x-kubernetes-validations" = [{
        "rule": "[has(self.bearer), has(self.basic), has(self.header), has(self.awsSigV4)].filter(given, given).size() == 1",
        "message": "give exactly one of bearer, basic, header and awsSigV4"
    }])
)]
pub struct Auth<S = SecretRef> {
    /// `Authorization: Bearer` with the key `token` of the Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bearer: Option<FromSecret<S>>,
    /// `Authorization: Basic` with the keys `username` and `password` of the Secret (type `kubernetes.io/basic-auth`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub basic: Option<FromSecret<S>>,
    /// A header of any name with the key `value` of the Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<HeaderAuth<S>>,
    /// A signature of AWS (version 4), as S3 and its kin ask for.
    #[serde(default, rename = "awsSigV4", skip_serializing_if = "Option::is_none")]
    pub aws_sig_v4: Option<AwsSigV4<S>>,
}

/// Credentials in a Secret.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase", bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "FromSecret")]
pub struct FromSecret<S = SecretRef> {
    /// The Secret.
    pub secret_ref: S,
}

/// A header with credentials.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase", bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "HeaderAuth")]
pub struct HeaderAuth<S = SecretRef> {
    /// The name of the header, such as `X-Api-Key`.
    pub name: String,
    /// The Secret, with a key `value`.
    pub secret_ref: S,
}

/// Signatures of AWS.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase", bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "AwsSigV4")]
pub struct AwsSigV4<S = SecretRef> {
    /// The Secret, with the keys `accessKeyId` and `secretAccessKey`, and `sessionToken` for temporary ones.
    pub secret_ref: S,
    /// The region, such as `eu-central-1`.
    pub region: String,
    /// The service, such as `s3`. For `s3` the rules of S3 hold: the path is signed as it is, and the body's hash is a header.
    pub service: String,
}

/// A database.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase", bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "SqlGrant")]
pub struct SqlGrant<S = SecretRef> {
    /// The name by which the plugin asks for it.
    pub name: String,
    /// What kind of database it is.
    pub engine: SqlEngine,
    /// The Secret that says how to connect: the key `uri` (`postgres://user:password@host:port/database?sslmode=verify-full`), or the keys `host`,
    /// `port`, `dbname`, `user` (or `username`), `password` and `sslmode`; and `ca.crt` for a private certificate authority. TLS is spoken and
    /// verified unless `sslmode` is `disable`.
    pub secret_ref: S,
    /// What statements may do. `Read` runs each in a read-only transaction of its own, which is rolled back; the line that holds is what the
    /// role may do in the database.
    #[serde(default)]
    pub access: SqlAccess,
    /// How many connections are kept at most.
    #[serde(default = "pool_size")]
    #[schemars(with = "i32", range(min = 1, max = 100))]
    pub pool_size: u32,
    /// How long a call may take, waiting for a connection included.
    #[serde(default = "thirty_seconds")]
    pub timeout: Timeout,
    /// The most rows in an answer.
    #[serde(default = "thousand")]
    #[schemars(with = "i32", range(min = 1))]
    pub max_rows: u32,
    /// The largest answer, as a quantity in bytes.
    #[serde(default = "one_mebibyte")]
    pub max_response: Bytes,
}

/// A kind of database.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum SqlEngine {
    /// PostgreSQL.
    Postgres,
}

/// What statements may do.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub enum SqlAccess {
    /// Look.
    #[default]
    Read,
    /// Look and change.
    Write,
}

/// Reads from the API server.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(default, bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "KubeGrant")]
pub struct KubeGrant<S = SecretRef> {
    /// The Secrets that may be read, if the service account may: by the capability, and by `relations`. Never those that reconcilers name
    /// for themselves.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub secrets: Vec<S>,
}

impl<S> Default for KubeGrant<S> {
    fn default() -> Self {
        Self { secrets: Vec::new() }
    }
}

fn reading() -> Vec<String> {
    ["GET", "HEAD"].map(str::to_owned).into()
}

fn thirty_seconds() -> Timeout {
    Timeout(std::time::Duration::from_secs(30))
}

fn one_mebibyte() -> Bytes {
    Bytes(1 << 20)
}

fn pool_size() -> u32 {
    4
}

fn thousand() -> u32 {
    1000
}

impl Grants<LocalSecretRef> {
    /// The same with every reference by namespace and name.
    pub fn within(self, namespace: &str) -> Grants {
        self.map(&|secret| SecretRef { namespace: namespace.to_owned(), name: secret.name })
    }
}

impl Grants {
    /// The Secrets that the plugin may see: those that are granted, but for what the host itself reads for these grants, and for those that
    /// the reconciler uses otherwise.
    pub fn readable_secrets(&self, own: &[SecretRef]) -> Vec<SecretRef> {
        let is_own = |secret: &SecretRef| own.contains(secret) || self.secrets().any(|known| known == secret);
        let listed = self.kube.iter().flat_map(|grant| &grant.secrets);
        listed.filter(|secret| !is_own(secret)).cloned().collect()
    }
}

impl<S> Grants<S> {
    /// The names of the capabilities of which something is granted.
    pub fn capabilities(&self) -> impl Iterator<Item = &'static str> {
        let granted = [("http", !self.http.is_empty()), ("kube", self.kube.is_some()), ("sql", !self.sql.is_empty())];
        granted.into_iter().filter_map(|(name, granted)| granted.then_some(name))
    }

    /// The Secrets that the host reads for them.
    pub fn secrets(&self) -> impl Iterator<Item = &S> {
        let of_http = self.http.iter().filter_map(|grant| grant.auth.as_ref()?.secret());
        of_http.chain(self.sql.iter().map(|grant| &grant.secret_ref))
    }

    /// The same with other references.
    fn map<T>(self, to: &impl Fn(S) -> T) -> Grants<T> {
        let http = |grant: HttpGrant<S>| HttpGrant {
            name: grant.name,
            url: grant.url,
            methods: grant.methods,
            auth: grant.auth.map(|auth| auth.map(to)),
            timeout: grant.timeout,
            max_request: grant.max_request,
            max_response: grant.max_response,
            ca: grant.ca,
            allow_networks: grant.allow_networks,
        };
        let sql = |grant: SqlGrant<S>| SqlGrant {
            name: grant.name,
            engine: grant.engine,
            secret_ref: to(grant.secret_ref),
            access: grant.access,
            pool_size: grant.pool_size,
            timeout: grant.timeout,
            max_rows: grant.max_rows,
            max_response: grant.max_response,
        };
        Grants {
            http: self.http.into_iter().map(http).collect(),
            sql: self.sql.into_iter().map(sql).collect(),
            kube: self.kube.map(|grant| KubeGrant { secrets: grant.secrets.into_iter().map(to).collect() }),
        }
    }
}

impl<S> Auth<S> {
    /// The Secret that it is in.
    pub fn secret(&self) -> Option<&S> {
        let Self { bearer, basic, header, aws_sig_v4 } = self;
        let plain = bearer.as_ref().or(basic.as_ref()).map(|it| &it.secret_ref);
        plain.or(header.as_ref().map(|it| &it.secret_ref)).or(aws_sig_v4.as_ref().map(|it| &it.secret_ref))
    }

    fn map<T>(self, to: &impl Fn(S) -> T) -> Auth<T> {
        let secret = |it: FromSecret<S>| FromSecret { secret_ref: to(it.secret_ref) };
        Auth {
            bearer: self.bearer.map(secret),
            basic: self.basic.map(secret),
            header: self.header.map(|it| HeaderAuth { name: it.name, secret_ref: to(it.secret_ref) }),
            aws_sig_v4: self.aws_sig_v4.map(|it| AwsSigV4 {
                secret_ref: to(it.secret_ref),
                region: it.region,
                service: it.service,
            }),
        }
    }
}
