//! Which credentials are for which repository, chosen as the kubelet chooses among pull secrets (`C57`).
//!
//! They are read from the JSON of a Secret of type `kubernetes.io/dockerconfigjson`, which is also that of `~/.docker/config.json`:
//! a key is a host, a host with its port, or either with a path (`scope.rs`), and the longest path that fits goes first. All that
//! fit are tried.

use std::{collections::BTreeMap, fmt};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;

use super::{reference::Repository, scope::Scope};

/// Credentials for any number of registries. None at all means anonymous.
#[derive(Clone, Debug, Default)]
pub struct Credentials(Vec<Entry>);

#[derive(Clone, Debug)]
struct Entry {
    scope: Scope,
    login: Login,
}

/// Who we are for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// A name; some registries do not care which.
    pub username: String,
    /// A password or a token.
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(…)")
    }
}

/// Why there are no credentials. The texts say nothing of what is in them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is another document.
    #[error("it is not the JSON of a docker config (line {line}, column {column})")]
    Json {
        /// Where it stops to be.
        line: usize,
        /// Likewise.
        column: usize,
    },
    /// The login of a registry cannot be read.
    #[error("the entry of {0:?} has neither `auth` (base64 of user:password) nor `username` and `password`")]
    Login(String),
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    auths: BTreeMap<String, Auth>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Auth {
    auth: String,
    username: String,
    password: String,
}

impl Credentials {
    /// Adds those of a docker config. Those that were added before go first, where the paths are as long.
    ///
    /// # Errors
    /// If it is no such document; then nothing was added.
    pub fn add(&mut self, config: &str) -> Result<(), Error> {
        // Not the error of the parser, which may quote what is there.
        let json = |error: serde_json::Error| Error::Json { line: error.line(), column: error.column() };
        let Config { auths } = serde_json::from_str(config).map_err(json)?;
        let entry = |(key, auth): (String, Auth)| {
            let login = auth.login().ok_or_else(|| Error::Login(key.clone()))?;
            Ok(Entry { scope: Scope::read(&key), login })
        };
        let entries = auths.into_iter().filter(|(_, auth)| !auth.is_empty()).map(entry);
        self.0.extend(entries.collect::<Result<Vec<_>, Error>>()?);
        Ok(())
    }

    /// Adds a login for a key as in a docker config.
    pub fn add_login(&mut self, key: &str, login: Login) {
        self.0.push(Entry { scope: Scope::read(key), login });
    }

    /// Those to be tried for a repository, in this order. Who has some is never anonymous.
    pub(super) fn of(&self, repository: &Repository) -> Vec<&Login> {
        let mut entries: Vec<_> = self.0.iter().filter(|entry| entry.scope.covers(repository)).collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.scope.precision()));
        entries.into_iter().map(|entry| &entry.login).collect()
    }
}

impl Auth {
    /// Docker leaves an empty entry where a program of its own keeps the password.
    fn is_empty(&self) -> bool {
        self.auth.is_empty() && self.username.is_empty() && self.password.is_empty()
    }

    fn login(self) -> Option<Login> {
        if !self.username.is_empty() && !self.password.is_empty() {
            return Some(Login { username: self.username, password: self.password });
        }
        let text = String::from_utf8(STANDARD.decode(self.auth.trim()).ok()?).ok()?;
        let (username, password) = text.split_once(':')?;
        // Some tools pad it with zeros.
        Some(Login { username: username.to_owned(), password: password.trim_end_matches('\0').to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn repository(text: &str) -> Repository {
        let (registry, name) = text.split_once('/').unwrap();
        Repository { registry: registry.to_owned(), name: name.to_owned() }
    }

    /// The names of the logins for a repository, where each key is the name of its own.
    fn names(keys: &[&str], of: &str) -> Vec<String> {
        let mut credentials = Credentials::default();
        for key in keys {
            credentials.add_login(key, Login { username: (*key).to_owned(), password: "p".to_owned() });
        }
        credentials.of(&repository(of)).iter().map(|login| login.username.clone()).collect()
    }

    #[test]
    fn c57_the_longest_path_goes_first_and_all_that_fit_are_tried() {
        let keys = ["r.io", "r.io/team", "r.io/team/app", "r.io:443", "other.io", "r.io/teamwork"];
        assert_eq!(names(&keys, "r.io/team/app"), ["r.io/team/app", "r.io/team", "r.io"]);
        assert_eq!(names(&keys, "r.io/team/apps"), ["r.io/team", "r.io"]);
        assert_eq!(names(&keys, "r.io/x"), ["r.io"]);
        assert_eq!(names(&keys, "sub.r.io/x"), Vec::<String>::new());
    }

    #[test]
    fn c57_a_port_is_part_of_the_host() {
        let keys = ["r.io", "r.io:5000", "https://r.io:5001/v2/", "http://r.io:5002/v1/team"];
        assert_eq!(names(&keys, "r.io:5000/x"), ["r.io:5000"]);
        assert_eq!(names(&keys, "r.io:5001/x"), ["https://r.io:5001/v2/"]);
        assert_eq!(names(&keys, "r.io:5002/team/x"), ["http://r.io:5002/v1/team"]);
        assert_eq!(names(&keys, "r.io:5002/x"), Vec::<String>::new());
    }

    #[test]
    fn a_login_is_read_in_either_form_and_never_shown() {
        let mut credentials = Credentials::default();
        let auth = STANDARD.encode("me:pass:word");
        let config = json!({"auths": {
            "a.io": {"auth": auth}, "b.io": {"username": "me", "password": "pass:word"}, "c.io": {}}});
        credentials.add(&config.to_string()).unwrap();
        let login = Login { username: "me".to_owned(), password: "pass:word".to_owned() };
        assert_eq!(credentials.of(&repository("a.io/x")), [&login]);
        assert_eq!(credentials.of(&repository("b.io/x")), [&login]);
        assert_eq!(credentials.of(&repository("c.io/x")), [] as [&Login; 0]);
        assert!(!format!("{credentials:?}").contains("pass"), "{credentials:?}");
    }

    #[test]
    fn what_is_no_config_is_refused_without_telling_what_it_is() {
        let mut credentials = Credentials::default();
        let error = credentials.add(r#"{"auths": {"a.io": "secret"}}"#).unwrap_err();
        assert!(matches!(error, Error::Json { line: 1, .. }) && !error.to_string().contains("secret"), "{error}");
        let error = credentials.add(r#"{"auths": {"a.io": {"auth": "secret"}}}"#).unwrap_err();
        assert!(matches!(&error, Error::Login(key) if key == "a.io") && !error.to_string().contains("secret"));
        assert!(credentials.0.is_empty());
    }
}
