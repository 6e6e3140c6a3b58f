//! How to connect, as a Secret says it. Errors name keys, and never show what is in them.

use percent_encoding::percent_decode_str;

use crate::{
    crd::SecretRef,
    secrets::{self, Content},
};

/// The port of PostgreSQL.
const PORT: u16 = 5432;

/// See the module's documentation. It does not show itself.
pub(super) struct Target {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) database: String,
    pub(super) user: String,
    pub(super) password: Option<String>,
    /// Whether TLS is spoken. Then it is verified.
    pub(super) tls: bool,
    /// The certificates of the authorities that are trusted instead of the system's, as PEM.
    pub(super) authorities: Option<String>,
}

/// Why a Secret does not say how to connect.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Secret(#[from] secrets::Error),
    #[error("the Secret {0} has neither a key uri nor a key host")]
    Nothing(SecretRef),
    #[error("the key uri of the Secret {secret} cannot be used: {why}")]
    Uri { secret: SecretRef, why: &'static str },
    #[error("the key {key} of the Secret {secret} cannot be used: {why}")]
    Key { secret: SecretRef, key: &'static str, why: &'static str },
}

const NO_MODE: &str = "sslmode has to be disable, or one that asks for TLS, which is then verified: verify-full";
const NO_PORT: &str = "the port is no number between 1 and 65535";

impl Target {
    /// As the keys of the Secret say it: `uri`, or `host` and the others.
    pub(super) fn new(content: &Content) -> Result<Self, Error> {
        let authorities = content.find("ca.crt")?.map(str::to_owned);
        let target = match content.find("uri")? {
            Some(uri) => Self::of_uri(uri.trim()).map_err(|why| Error::Uri { secret: content.name().clone(), why })?,
            None => Self::of_keys(content)?,
        };
        Ok(Self { authorities, ..target })
    }

    fn of_keys(content: &Content) -> Result<Self, Error> {
        let find = |key| content.find(key).map(|value| value.map(str::trim).filter(|value| !value.is_empty()));
        let unusable = |key, why| Error::Key { secret: content.name().clone(), key, why };
        let host = find("host")?.ok_or_else(|| Error::Nothing(content.name().clone()))?;
        let port = find("port")?.map_or(Some(PORT), port).ok_or_else(|| unusable("port", NO_PORT))?;
        let user = match find("user")? {
            Some(user) => user,
            None => find("username")?.ok_or_else(|| unusable("user", "it is missing, and so is username"))?,
        };
        Ok(Self {
            host: host.to_owned(),
            port,
            database: find("dbname")?.unwrap_or(user).to_owned(),
            user: user.to_owned(),
            // As it is: space may be a part of it.
            password: content.find("password")?.map(str::to_owned),
            tls: find("sslmode")?.map_or(Some(true), wants_tls).ok_or_else(|| unusable("sslmode", NO_MODE))?,
            authorities: None,
        })
    }

    /// `postgres://user:password@host:port/database?sslmode=…`
    fn of_uri(uri: &str) -> Result<Self, &'static str> {
        let rest = uri.strip_prefix("postgres://").or_else(|| uri.strip_prefix("postgresql://"));
        let rest = rest.ok_or("it does not begin with postgres://")?;
        let (rest, options) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, address) = authority.rsplit_once('@').ok_or("it has no user")?;
        let (user, password) = login.split_once(':').map_or((login, None), |(user, password)| (user, Some(password)));
        let user = Some(decoded(user)?).filter(|user| !user.is_empty()).ok_or("it has no user")?;
        let (host, number) = split_address(address);
        if host.contains(',') {
            return Err("it names more than one host");
        }
        let host = Some(decoded(host)?).filter(|host| !host.is_empty() && !host.starts_with('/'));
        let mut tls = true;
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("sslmode", mode)) => tls = wants_tls(mode).ok_or(NO_MODE)?,
                _ => return Err("it has a parameter other than sslmode"),
            }
        }
        Ok(Self {
            host: host.ok_or("it has no host")?,
            port: number.map_or(Some(PORT), port).ok_or(NO_PORT)?,
            database: if database.is_empty() { user.clone() } else { decoded(database)? },
            user,
            password: password.map(decoded).transpose()?,
            tls,
            authorities: None,
        })
    }
}

/// Host and port; an address of IPv6 is in brackets.
fn split_address(address: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = address.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return (host, rest.strip_prefix(':'));
    }
    address.rsplit_once(':').map_or((address, None), |(host, port)| (host, Some(port)))
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port != 0)
}

/// Every mode of libpq that asks for TLS, or would like it, is taken as `verify-full`: the others do not protect the password.
fn wants_tls(mode: &str) -> Option<bool> {
    match mode {
        "disable" => Some(false),
        "allow" | "prefer" | "require" | "verify-ca" | "verify-full" => Some(true),
        _ => None,
    }
}

fn decoded(text: &str) -> Result<String, &'static str> {
    percent_decode_str(text).decode_utf8().map(Into::into).map_err(|_| "a part of it is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::SecretRef;

    fn keys(keys: &[(&'static str, &str)]) -> Result<Target, Error> {
        Target::new(&Content::with(&SecretRef { namespace: "apps".to_owned(), name: "db".to_owned() }, keys))
    }

    fn shown(target: &Target) -> String {
        let Target { host, port, database, user, password, tls, .. } = target;
        format!("{user} {password:?} {host} {port} {database} {tls}")
    }

    #[test]
    fn a_uri_says_it_all() {
        let table = [
            ("postgres://me:secret@db.example.com:6543/app", r#"me Some("secret") db.example.com 6543 app true"#),
            ("postgresql://me@db/app?sslmode=disable", "me None db 5432 app false"),
            ("postgres://me:p%40ss%2Fw%3Ard@[::1]:1/a%20b?sslmode=require", r#"me Some("p@ss/w:rd") ::1 1 a b true"#),
            ("postgres://me:a@b@db", r#"me Some("a@b") db 5432 me true"#),
        ];
        for (uri, expected) in table {
            assert_eq!(keys(&[("uri", uri)]).map(|target| shown(&target)), Ok(expected.to_owned()), "{uri}");
        }
    }

    #[test]
    fn so_do_keys_of_their_own() {
        let all =
            [("host", "db\n"), ("username", "me"), ("password", " p "), ("dbname", "app"), ("sslmode", "disable")];
        assert_eq!(keys(&all).map(|target| shown(&target)), Ok(r#"me Some(" p ") db 5432 app false"#.to_owned()));
        let few = [("host", "db"), ("user", "me"), ("port", "1")];
        assert_eq!(keys(&few).map(|target| shown(&target)), Ok("me None db 1 me true".to_owned()));
    }

    #[test]
    fn what_is_wrong_is_told_without_what_is_there() {
        let table: [&[(&'static str, &str)]; 12] = [
            &[],
            &[("host", "sesame"), ("user", "")],
            &[("host", "sesame"), ("user", "sesame"), ("port", "sesame")],
            &[("host", "sesame"), ("user", "sesame"), ("sslmode", "sesame")],
            &[("uri", "sesame://sesame@sesame")],
            &[("uri", "postgres://sesame")],
            &[("uri", "postgres://:sesame@sesame")],
            &[("uri", "postgres://sesame:sesame@")],
            &[("uri", "postgres://sesame:sesame@sesame:0/sesame")],
            &[("uri", "postgres://sesame:%ff@sesame/sesame")],
            &[("uri", "postgres://sesame:sesame@sesame,sesame/sesame")],
            &[("uri", "postgres://sesame:sesame@sesame/sesame?options=sesame")],
        ];
        for case in table {
            let error = keys(case).err().expect("it is wrong");
            let told = format!("{error} {error:?}");
            assert!(told.contains("apps/db") && !told.contains("sesame"), "{case:?}: {told}");
        }
    }
}
