//! Statements for the databases that the reconciler grants (`spec.grants.sql`).
//!
//! ```
//! use pilothouse_sdk::{Failure, sql};
//!
//! fn quota(team: &str) -> Result<Option<i64>, Failure> {
//!     let rows = sql::query("db", "SELECT quota FROM teams WHERE name = $1", &[team.into()])?;
//!     Ok(rows.first().map(|team| team.get("quota")).transpose()?)
//! }
//!
//! fn forget(team: &str) -> Result<(), Failure> {
//!     // Again after a crash: what is gone already is success.
//!     sql::delete("db", "DELETE FROM teams WHERE name = $1", &[team.into()])?;
//!     Ok(())
//! }
//! ```
//!
//! Values are parameters, never a part of the text: each has the type that the statement asks for at its place, as a literal would.
//! Where it asks for none it is text, unless the parameter is [`typed`]. For names, which can be no parameters, there is [`identifier`].
//!
//! A call is one statement, or one transaction, and may be repeated: an answer that is lost ([`Reason::Connection`],
//! [`Reason::Timeout`]) does not say that nothing was done.
//!
//! In tests without a host a call goes to the fake of [`Case::sql`](crate::testing::Case::sql).

use std::{error, fmt};

use crate::raw::sql as raw;

pub use crate::raw::sql::{Error as Reason, Statement, Value};

/// The rows of one statement.
///
/// # Errors
/// If it has no answer.
pub fn query(grant: &str, text: &str, parameters: &[Value]) -> Result<Rows, Error> {
    let answer = host::query(grant, &statement(text, parameters)).map_err(|reason| Error::new(grant, reason))?;
    let raw::Rows { columns, rows } = answer;
    Ok(Rows { columns, rows })
}

/// Runs one statement, and returns the number of rows that it has affected.
///
/// # Errors
/// If it has no answer.
pub fn execute(grant: &str, text: &str, parameters: &[Value]) -> Result<u64, Error> {
    host::execute(grant, &statement(text, parameters)).map_err(|reason| Error::new(grant, reason))
}

/// Runs a statement that removes something, for cleanup: nothing left to remove is success. Returns whether there was something.
///
/// # Errors
/// If it has no answer.
pub fn delete(grant: &str, text: &str, parameters: &[Value]) -> Result<bool, Error> {
    execute(grant, text, parameters).map(|rows| rows > 0)
}

/// Runs all statements in one transaction, or none of them; returns the number of rows that each has affected.
///
/// # Errors
/// If one of them fails.
pub fn transact(grant: &str, statements: &[Statement]) -> Result<Vec<u64>, Error> {
    host::transact(grant, statements).map_err(|reason| Error::new(grant, reason))
}

/// A statement for [`transact`].
pub fn statement(text: &str, parameters: &[Value]) -> Statement {
    Statement { text: text.to_owned(), parameters: parameters.to_vec() }
}

/// A value of a type that has none in Rust, as the database writes it: `typed("numeric", "1.50")`, `typed("uuid", &id)`,
/// `typed("int4[]", "{1,2}")`.
pub fn typed(name: &str, text: impl Into<String>) -> Value {
    Value::Typed((name.to_owned(), text.into()))
}

/// A name as it is written in a statement, where no parameter can stand: in quotes, so that it is this name whatever it is.
///
/// ```
/// use pilothouse_sdk::sql::identifier;
///
/// assert_eq!(format!("CREATE DATABASE {}", identifier("a \"b\"")), r#"CREATE DATABASE "a ""b""""#);
/// ```
pub fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Why there is no answer, and from which grant. `?` makes it a [`Failure`](crate::Failure) that is tried again.
#[derive(Debug, Clone, PartialEq)]
pub struct Error {
    /// The name of the grant.
    pub grant: String,
    /// Why.
    pub reason: Reason,
}

impl Error {
    fn new(grant: &str, reason: Reason) -> Self {
        Self { grant: grant.to_owned(), reason }
    }

    /// The constraint that was violated, if it is that.
    pub fn constraint(&self) -> Option<&str> {
        match &self.reason {
            Reason::Constraint(refused) => refused.constraint.as_deref(),
            _ => None,
        }
    }

    /// What the database calls its refusal, if it is one: the five characters of SQLSTATE.
    pub fn code(&self) -> Option<&str> {
        match &self.reason {
            Reason::Constraint(refused) | Reason::Database(refused) => Some(&refused.code),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grant = &self.grant;
        match &self.reason {
            Reason::Credentials(why) => write!(f, "CredentialsMissing: the sql grant {grant} has none: {why}"),
            Reason::Denied(why) => write!(f, "the sql grant {grant} does not allow this: {why}"),
            Reason::Connection(why) => write!(f, "the sql grant {grant} has no connection: {why}"),
            Reason::Timeout(why) => write!(f, "the sql grant {grant} gave no answer in time: {why}"),
            Reason::TooLarge(why) => write!(f, "the sql grant {grant} allows no such answer: {why}"),
            Reason::Constraint(refused) | Reason::Database(refused) => {
                write!(f, "the database of the sql grant {grant} refuses this: {} ({})", refused.message, refused.code)
            }
        }
    }
}

impl error::Error for Error {}

/// What a query gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

impl Rows {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The first.
    pub fn first(&self) -> Option<Row<'_>> {
        self.iter().next()
    }

    /// All, in their order.
    pub fn iter(&self) -> impl Iterator<Item = Row<'_>> {
        self.rows.iter().map(|values| Row { columns: &self.columns, values })
    }
}

/// One row.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    columns: &'a [String],
    values: &'a [Value],
}

impl Row<'_> {
    /// The value of a column; `Option<…>` for one that can be null.
    ///
    /// # Errors
    /// If there is no such column, or its value is none of these.
    pub fn get<T: FromValue>(&self, column: &str) -> Result<T, ColumnError> {
        let place = self.columns.iter().position(|name| name == column);
        let value = place.and_then(|place| self.values.get(place));
        let value =
            value.ok_or_else(|| ColumnError { column: column.to_owned(), problem: "there is none".to_owned() })?;
        T::from_value(value).ok_or_else(|| {
            let problem = format!("it has {}, which is no {}", kind(value), std::any::type_name::<T>());
            ColumnError { column: column.to_owned(), problem }
        })
    }
}

/// A column is not what the plugin takes it for. It does not show the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnError {
    column: String,
    problem: String,
}

impl fmt::Display for ColumnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the column {}: {}", self.column, self.problem)
    }
}

impl error::Error for ColumnError {}

fn kind(value: &Value) -> &str {
    match value {
        Value::Null => "null",
        Value::Boolean(_) => "a boolean",
        Value::Int(_) => "a whole number",
        Value::Float(_) => "a float",
        Value::Text(_) => "text",
        Value::Binary(_) => "bytes",
        Value::Typed((name, _)) => name,
    }
}

/// What a value of a column can be read as.
pub trait FromValue: Sized {
    /// None: it is none of these.
    fn from_value(value: &Value) -> Option<Self>;
}

impl FromValue for Value {
    fn from_value(value: &Value) -> Option<Self> {
        Some(value.clone())
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: &Value) -> Option<Self> {
        if matches!(value, Value::Null) { Some(None) } else { T::from_value(value).map(Some) }
    }
}

impl FromValue for bool {
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Boolean(value) = value { Some(*value) } else { None }
    }
}

impl FromValue for f64 {
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Float(value) = value { Some(*value) } else { None }
    }
}

/// Text, and every value of another type as the database writes it.
impl FromValue for String {
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Text(text) | Value::Typed((_, text)) = value { Some(text.clone()) } else { None }
    }
}

impl FromValue for Vec<u8> {
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Binary(bytes) = value { Some(bytes.clone()) } else { None }
    }
}

/// A value of `json` or `jsonb`.
impl FromValue for serde_json::Value {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Typed((name, text)) if name == "json" || name == "jsonb" => serde_json::from_str(text).ok(),
            _ => None,
        }
    }
}

macro_rules! whole_number {
    ($($type:ty),*) => {
        $(impl FromValue for $type {
            fn from_value(value: &Value) -> Option<Self> {
                if let Value::Int(value) = value { (*value).try_into().ok() } else { None }
            }
        })*
    };
}

whole_number!(i16, i32, i64, u16, u32, u64, usize);

macro_rules! parameter {
    ($($type:ty => |$value:ident| $made:expr),* $(,)?) => {
        $(impl From<$type> for Value {
            fn from($value: $type) -> Self {
                $made
            }
        })*
    };
}

parameter! {
    bool => |value| Self::Boolean(value),
    i16 => |value| Self::Int(value.into()),
    i32 => |value| Self::Int(value.into()),
    i64 => |value| Self::Int(value),
    u16 => |value| Self::Int(value.into()),
    u32 => |value| Self::Int(value.into()),
    f32 => |value| Self::Float(value.into()),
    f64 => |value| Self::Float(value),
    &str => |value| Self::Text(value.to_owned()),
    String => |value| Self::Text(value),
    &String => |value| Self::Text(value.clone()),
    &[u8] => |value| Self::Binary(value.to_vec()),
    Vec<u8> => |value| Self::Binary(value),
    serde_json::Value => |value| typed("jsonb", value.to_string()),
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// Who answers: the host.
#[cfg(target_family = "wasm")]
use crate::raw::sql as host;

/// Who answers where there is no host: the fake of a test.
#[cfg(not(target_family = "wasm"))]
use fake as host;

#[cfg(not(target_family = "wasm"))]
pub(crate) mod fake {
    //! What stands for the databases in tests without a host.

    use std::cell::RefCell;

    use super::{Reason, Statement, Value, raw};
    use crate::fake::Fake;

    /// What a statement has come to.
    #[derive(Debug, Clone, PartialEq)]
    pub enum SqlAnswer {
        /// The names of the columns, and the rows.
        Rows(Vec<String>, Vec<Vec<Value>>),
        /// How many rows it has affected.
        Affected(u64),
    }

    /// See [`Case::sql`](crate::testing::Case::sql).
    pub(crate) type Answers = dyn Fn(&str, &Statement) -> Result<SqlAnswer, Reason>;

    thread_local! {
        pub(crate) static FAKE: RefCell<Option<Fake<Answers>>> = const { RefCell::new(None) };
    }

    fn ask(grant: &str, statement: &Statement) -> Result<SqlAnswer, Reason> {
        let fake = FAKE.with_borrow(Clone::clone);
        let fake = fake.ok_or_else(|| Reason::Denied("there is no database in this test; see Case::sql".to_owned()))?;
        (fake.0)(grant, statement)
    }

    pub(super) fn query(grant: &str, statement: &Statement) -> Result<raw::Rows, Reason> {
        Ok(match ask(grant, statement)? {
            SqlAnswer::Rows(columns, rows) => raw::Rows { columns, rows },
            SqlAnswer::Affected(_) => raw::Rows { columns: Vec::new(), rows: Vec::new() },
        })
    }

    pub(super) fn execute(grant: &str, statement: &Statement) -> Result<u64, Reason> {
        Ok(match ask(grant, statement)? {
            SqlAnswer::Rows(_, rows) => rows.len() as u64,
            SqlAnswer::Affected(affected) => affected,
        })
    }

    pub(super) fn transact(grant: &str, statements: &[Statement]) -> Result<Vec<u64>, Reason> {
        statements.iter().map(|statement| execute(grant, statement)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Failure;

    fn rows(values: &[(&str, Value)]) -> Rows {
        let (columns, row) = values.iter().map(|(column, value)| ((*column).to_owned(), value.clone())).unzip();
        Rows { columns, rows: vec![row] }
    }

    #[test]
    fn a_column_is_read_as_what_it_is() -> Result<(), ColumnError> {
        let rows = rows(&[
            ("int", 5.into()),
            ("null", None::<i32>.into()),
            ("text", "a".into()),
            ("numeric", typed("numeric", "1.50")),
            ("json", serde_json::json!({ "a": 1 }).into()),
            ("bytes", vec![1_u8].into()),
        ]);
        let row = rows.first().expect("there is one");
        assert_eq!((row.get::<i64>("int")?, row.get::<u16>("int")?), (5, 5));
        assert_eq!((row.get::<Option<i32>>("int")?, row.get::<Option<i32>>("null")?), (Some(5), None));
        assert_eq!((row.get::<String>("text")?, row.get::<String>("numeric")?), ("a".to_owned(), "1.50".to_owned()));
        assert_eq!(row.get::<serde_json::Value>("json")?["a"], 1);
        assert_eq!(row.get::<Vec<u8>>("bytes")?, [1]);
        Ok(())
    }

    #[test]
    fn what_a_column_is_not_is_told_without_its_value() {
        let rows = rows(&[("n", Value::Int(-70_000)), ("t", "sesame".into())]);
        let row = rows.first().expect("there is one");
        let told = |error: ColumnError| error.to_string();
        assert_eq!(
            row.get::<i16>("n").map_err(told),
            Err("the column n: it has a whole number, which is no i16".into())
        );
        assert_eq!(
            row.get::<u64>("n").map_err(told),
            Err("the column n: it has a whole number, which is no u64".into())
        );
        assert_eq!(row.get::<bool>("t").map_err(told), Err("the column t: it has text, which is no bool".into()));
        assert_eq!(row.get::<bool>("x").map_err(told), Err("the column x: there is none".into()));
    }

    #[test]
    fn an_error_names_the_grant_and_is_tried_again() {
        fn failure(reason: Reason) -> Failure {
            Error::new("db", reason).into()
        }
        let credentials = failure(Reason::Credentials("the Secret a/b does not exist".into()));
        let expected = "CredentialsMissing: the sql grant db has none: the Secret a/b does not exist";
        assert_eq!(credentials, Failure::retry(expected));
        let refused = raw::DatabaseError {
            code: "23505".into(),
            message: "there is one".into(),
            constraint: Some("once".into()),
        };
        let error = Error::new("db", Reason::Constraint(refused));
        assert_eq!((error.constraint(), error.code()), (Some("once"), Some("23505")));
        assert_eq!(error.to_string(), "the database of the sql grant db refuses this: there is one (23505)");
    }

    #[test]
    fn without_a_fake_everything_is_denied() {
        let denied = execute("db", "SELECT 1", &[]);
        assert!(matches!(denied, Err(Error { reason: Reason::Denied(_), .. })), "{denied:?}");
    }
}
