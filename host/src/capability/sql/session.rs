//! A connection on which statements run, by the extended protocol: it takes one statement at a time, and its parameters apart from it.
//!
//! A grant that reads has each in a read-only transaction, which is rolled back whatever comes of it. So what the server lets a function do
//! in there (a notification, in older versions large objects) is undone, too. A query that may write is a transaction as well: one whose
//! answer is too large has changed nothing. A statement that is only executed has none around it, since some of them refuse that.

use std::io;

use fallible_iterator::FallibleIterator as _;
use postgres_protocol::{
    IsNull,
    message::{
        backend::{DataRowBody, Message, RowDescriptionBody},
        frontend::{self, BindError},
    },
};

use super::{
    open::{Key, refused},
    value::{self, Kind, Oid},
    wire::{self, Wire},
};
use crate::{
    bindings::v0_1::pilothouse::plugin::sql::{DatabaseError, Rows, Statement, Value},
    crd::{SqlAccess, SqlGrant},
};

/// A transaction stays read-only from its first query on: the server itself refuses to change that then.
const BEGIN_READ: &str = "START TRANSACTION READ ONLY; SELECT 1";
const BEGIN: &str = "START TRANSACTION";
const COMMIT: &str = "COMMIT";
/// What ends a transaction that a call has left, and undoes what it has left in the session. Each is a message of its own, since the
/// second may be in no transaction.
const RESET: [&str; 2] = ["ROLLBACK", "DISCARD ALL"];

/// The names of types by their numbers: `int4[]` for what the catalog calls `_int4`. With the schema, unless it is on the path. 11 is the
/// schema `pg_catalog`, in every database; its types are named as they are there (`timestamptz`), others as the server would write them.
const NAMES: &str = "\
    SELECT CASE \
        WHEN t.typnamespace <> 11 THEN pg_catalog.format_type(t.oid, NULL) \
        WHEN pg_catalog.substr(t.typname::pg_catalog.text, 1, 1) = '_' \
            THEN pg_catalog.substr(t.typname::pg_catalog.text, 2) || '[]' \
        ELSE t.typname::pg_catalog.text END \
    FROM pg_catalog.json_array_elements_text($1::pg_catalog.json) WITH ORDINALITY AS asked(type, place) \
    LEFT JOIN pg_catalog.pg_type t ON t.oid = asked.type::pg_catalog.oid ORDER BY asked.place";
/// The numbers of types by their names, where there are such.
const NUMBERS: &str = "\
    SELECT pg_catalog.to_regtype(asked.name)::pg_catalog.oid \
    FROM pg_catalog.json_array_elements_text($1::pg_catalog.json) WITH ORDINALITY AS asked(name, place) ORDER BY asked.place";
/// By this name our own lookups are prepared, beside the statement of the plugin, which has none.
const LOOKUP: &str = "lookup";

/// See the module's documentation.
pub(super) struct Session {
    wire: Wire,
    pub(super) key: Option<Key>,
    /// Whether the server has answered all that it was asked.
    pub(super) in_step: bool,
}

/// Why a statement has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The connection is gone.
    #[error("the connection to the database was lost")]
    Lost(#[source] io::Error),
    /// It does not speak as it should.
    #[error("the database has answered what was not asked")]
    Unexpected,
    /// There are more rows than the grant allows.
    #[error("the answer has too many rows")]
    TooManyRows,
    /// There are more bytes than the grant allows.
    #[error("the answer is too large")]
    TooLarge,
    /// It was refused, and nothing has come of it.
    #[error("the database refuses the statement: {}", .0.message)]
    Database(DatabaseError),
}

impl From<wire::Error> for Error {
    fn from(error: wire::Error) -> Self {
        match error {
            wire::Error::Lost(source) => Self::Lost(source),
            wire::Error::TooLong => Self::TooLarge,
        }
    }
}

/// A statement that the server knows.
struct Prepared {
    columns: Vec<String>,
    kinds: Vec<Kind>,
    /// The name of each type that is an [other one](Kind::Other); else empty.
    types: Vec<String>,
}

/// What is kept of an answer.
struct Kept {
    rows: Vec<Vec<Value>>,
    affected: u64,
}

impl Session {
    pub(super) fn new(wire: Wire, key: Option<Key>) -> Self {
        Self { wire, key, in_step: true }
    }

    /// The rows of a statement.
    pub(super) async fn query(&mut self, grant: &SqlGrant, statement: &Statement) -> Result<Rows, Error> {
        self.begin(grant.access).await?;
        let prepared = self.prepare(statement).await?;
        let kept = self.run(&prepared, &statement.parameters, grant, true).await?;
        if grant.access == SqlAccess::Write {
            self.commit().await?;
        }
        Ok(Rows { columns: prepared.columns, rows: kept.rows })
    }

    /// How many rows a statement has affected.
    pub(super) async fn execute(&mut self, grant: &SqlGrant, statement: &Statement) -> Result<u64, Error> {
        if grant.access == SqlAccess::Read {
            self.begin(grant.access).await?;
        }
        let prepared = self.prepare(statement).await?;
        Ok(self.run(&prepared, &statement.parameters, grant, false).await?.affected)
    }

    /// How many rows each statement has affected, if all of them hold.
    pub(super) async fn transact(&mut self, grant: &SqlGrant, statements: &[Statement]) -> Result<Vec<u64>, Error> {
        self.begin(grant.access).await?;
        let mut affected = Vec::with_capacity(statements.len());
        for statement in statements {
            let prepared = self.prepare(statement).await?;
            affected.push(self.run(&prepared, &statement.parameters, grant, false).await?.affected);
        }
        self.commit().await?;
        Ok(affected)
    }

    /// As it was when it was opened.
    pub(super) async fn reset(&mut self) -> Result<(), Error> {
        for command in RESET {
            self.command(command).await?;
        }
        Ok(())
    }

    /// Whether a statement can be sent, as far as that can be told without one.
    pub(super) fn is_ready(&mut self) -> bool {
        self.in_step && self.wire.is_silent()
    }

    async fn begin(&mut self, access: SqlAccess) -> Result<(), Error> {
        let command = match access {
            SqlAccess::Read => BEGIN_READ,
            SqlAccess::Write => BEGIN,
        };
        self.command(command).await.map(drop)
    }

    async fn commit(&mut self) -> Result<(), Error> {
        // The server ends a transaction that has failed by the same command, and says by this that it was rolled back.
        if self.command(COMMIT).await? == COMMIT { Ok(()) } else { Err(Error::Unexpected) }
    }

    /// Runs a command of ours, and returns what the server calls it.
    async fn command(&mut self, command: &str) -> Result<String, Error> {
        frontend::query(command, &mut self.wire.outgoing).map_err(Error::Lost)?;
        let mut tag = String::new();
        self.exchange(usize::MAX, |message| {
            if let Message::CommandComplete(body) = message {
                tag = body.tag().map_err(Error::Lost)?.to_owned();
            }
            Ok(())
        })
        .await?;
        Ok(tag)
    }

    /// Has the server parse a statement, which says of what types its parameters and columns are.
    async fn prepare(&mut self, statement: &Statement) -> Result<Prepared, Error> {
        let types = self.types(&statement.parameters).await?;
        frontend::parse("", &statement.text, types, &mut self.wire.outgoing)
            .map_err(|error| self.unsendable(&error))?;
        frontend::describe(b'S', "", &mut self.wire.outgoing).map_err(Error::Lost)?;
        frontend::sync(&mut self.wire.outgoing);
        let mut wanted = 0;
        let mut columns = Vec::new();
        self.exchange(0, |message| match message {
            Message::ParameterDescription(body) => {
                wanted = body.parameters().count().map_err(Error::Lost)?;
                Ok(())
            }
            Message::RowDescription(body) => {
                columns = described(&body).map_err(Error::Lost)?;
                Ok(())
            }
            Message::ParseComplete | Message::NoData => Ok(()),
            _ => Err(Error::Unexpected),
        })
        .await?;
        let given = statement.parameters.len();
        if wanted != given {
            return Err(invalid("07001", format!("the statement has {wanted} parameters, and {given} are given")));
        }
        let (columns, numbers): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
        let kinds: Vec<_> = numbers.into_iter().map(Kind::of).collect();
        let types = self.names(&kinds).await?;
        Ok(Prepared { columns, kinds, types })
    }

    /// Binds the parameters, and runs the statement to its end.
    async fn run(
        &mut self,
        prepared: &Prepared,
        parameters: &[Value],
        grant: &SqlGrant,
        keep: bool,
    ) -> Result<Kept, Error> {
        // One more, by which it shows that there are too many; 0 is all.
        let most = if keep { i32::try_from(grant.max_rows).unwrap_or(i32::MAX).saturating_add(1) } else { 0 };
        self.bind(parameters, prepared.kinds.iter().map(Kind::format))?;
        frontend::execute("", most, &mut self.wire.outgoing).map_err(Error::Lost)?;
        frontend::sync(&mut self.wire.outgoing);
        let mut kept = Kept { rows: Vec::new(), affected: 0 };
        let mut left = grant.max_response.0;
        self.exchange(left, |message| match message {
            Message::DataRow(_) if !keep => Ok(()),
            Message::DataRow(body) => {
                left = left.checked_sub(body.buffer().len()).ok_or(Error::TooLarge)?;
                kept.rows.push(read(&body, prepared)?);
                let too_many = u32::try_from(kept.rows.len()).is_ok_and(|rows| rows > grant.max_rows);
                if too_many { Err(Error::TooManyRows) } else { Ok(()) }
            }
            Message::CommandComplete(body) => {
                kept.affected = affected(body.tag().map_err(Error::Lost)?);
                Ok(())
            }
            Message::BindComplete | Message::EmptyQueryResponse => Ok(()),
            _ => Err(Error::Unexpected),
        })
        .await?;
        Ok(kept)
    }

    fn bind(&mut self, parameters: &[Value], formats: impl Iterator<Item = i16>) -> Result<(), Error> {
        let write = |parameter: &Value, to: &mut bytes::BytesMut| match value::sent(parameter) {
            Some(bytes) => {
                to.extend_from_slice(&bytes);
                Ok(IsNull::No)
            }
            None => Ok(IsNull::Yes),
        };
        let types = parameters.iter().map(value::format_of);
        frontend::bind("", "", types, parameters, write, formats, &mut self.wire.outgoing).map_err(
            |error| match error {
                BindError::Conversion(error) => self.unsendable(&error),
                BindError::Serialization(error) => self.unsendable(&error),
            },
        )
    }

    /// The types that are said of parameters; 0 leaves it to the statement.
    async fn types(&mut self, parameters: &[Value]) -> Result<Vec<Oid>, Error> {
        let named = |parameter: &Value| match parameter {
            Value::Typed((name, _)) => Some(name.clone()),
            _ => None,
        };
        let names: Vec<String> = parameters.iter().filter_map(named).collect();
        let mut numbers = self.lookup(NUMBERS, &names).await?.into_iter().zip(&names);
        let mut number = |parameter: &Value| match (parameter, value::type_of(parameter)) {
            (Value::Typed(_), _) => {
                let (number, name) = numbers.next().ok_or(Error::Unexpected)?;
                number.and_then(|number| number.parse().ok()).ok_or_else(|| {
                    invalid("42704", format!("there is no type {:?}", name.chars().take(63).collect::<String>()))
                })
            }
            (_, known) => Ok(known.unwrap_or(0)),
        };
        parameters.iter().map(&mut number).collect()
    }

    /// The names of the types of columns, as the contract has them.
    async fn names(&mut self, kinds: &[Kind]) -> Result<Vec<String>, Error> {
        let other = |kind: &Kind| match kind {
            Kind::Other(number) => Some(number.to_string()),
            _ => None,
        };
        let numbers: Vec<String> = kinds.iter().filter_map(other).collect();
        let mut names = self.lookup(NAMES, &numbers).await?.into_iter();
        let mut name = |kind: &Kind| match kind {
            Kind::Other(_) => names.next().flatten().ok_or(Error::Unexpected),
            _ => Ok(String::new()),
        };
        kinds.iter().map(&mut name).collect()
    }

    /// Asks the catalog for something of each of these, beside a statement that is prepared.
    async fn lookup(&mut self, what: &str, of: &[String]) -> Result<Vec<Option<String>>, Error> {
        if of.is_empty() {
            return Ok(Vec::new());
        }
        let of = serde_json::Value::from(of.to_vec()).to_string();
        let out = &mut self.wire.outgoing;
        frontend::parse(LOOKUP, what, [], out).map_err(Error::Lost)?;
        let write = |of: &String, to: &mut bytes::BytesMut| {
            to.extend_from_slice(of.as_bytes());
            Ok(IsNull::No)
        };
        let bound = frontend::bind("", LOOKUP, [], [&of], write, [], out);
        bound.map_err(|_| Error::Unexpected)?;
        frontend::execute("", 0, out).map_err(Error::Lost)?;
        frontend::close(b'S', LOOKUP, out).map_err(Error::Lost)?;
        frontend::sync(out);
        let mut found = Vec::new();
        self.exchange(usize::MAX, |message| {
            if let Message::DataRow(body) = message {
                let range = body.ranges().next().map_err(Error::Lost)?.flatten();
                let bytes = range.and_then(|range| body.buffer().get(range));
                found.push(bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned()));
            }
            Ok(())
        })
        .await?;
        Ok(found)
    }

    /// Sends what is outgoing, and reads all that comes of it. What the server refuses is told when it has come to the end, so that the next
    /// question gets the next answer.
    async fn exchange(&mut self, row: usize, mut each: impl FnMut(Message) -> Result<(), Error>) -> Result<(), Error> {
        self.in_step = false;
        self.wire.send().await?;
        let mut refusal = None;
        loop {
            match self.wire.next(row).await? {
                Message::ErrorResponse(body) => refusal = Some(refused(&body)),
                Message::ReadyForQuery(_) => {
                    self.in_step = true;
                    return refusal.map_or(Ok(()), |refusal| Err(Error::Database(refusal)));
                }
                message => each(message)?,
            }
        }
    }

    /// Something of a statement cannot be sent: a zero byte in its text, or more parameters than the protocol can count.
    fn unsendable(&mut self, error: &dyn std::fmt::Display) -> Error {
        self.wire.outgoing.clear();
        invalid("22021", format!("the statement cannot be sent: {error}"))
    }
}

/// A refusal of ours, as the database would say it.
fn invalid(code: &str, message: String) -> Error {
    Error::Database(DatabaseError { code: code.to_owned(), message, constraint: None })
}

fn described(body: &RowDescriptionBody) -> io::Result<Vec<(String, Oid)>> {
    body.fields().map(|field| Ok((field.name().to_owned(), field.type_oid()))).collect()
}

fn read(body: &DataRowBody, prepared: &Prepared) -> Result<Vec<Value>, Error> {
    let mut values = Vec::with_capacity(prepared.kinds.len());
    let mut ranges = body.ranges();
    for ((kind, name), column) in prepared.kinds.iter().zip(&prepared.types).zip(&prepared.columns) {
        let range = ranges.next().map_err(Error::Lost)?.ok_or(Error::Unexpected)?;
        let bytes = range.map(|range| body.buffer().get(range).ok_or(Error::Unexpected)).transpose()?;
        let read = kind.read(bytes, name);
        values.push(read.ok_or_else(|| invalid("22021", format!("a value of the column {column:?} is no UTF-8")))?);
    }
    Ok(values)
}

/// The number of rows in `INSERT 0 5`, `UPDATE 5`, `CREATE TABLE`.
fn affected(tag: &str) -> u64 {
    tag.rsplit(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            open::Connector,
            target::Target,
            tests::{PASSWORD, SHARED, role_on},
        },
        *,
    };
    use crate::{crd::SecretRef, secrets::Content};

    /// Even if a statement got by its first word, or this host had sent two.
    #[tokio::test]
    async fn the_server_itself_keeps_a_transaction_read_only() {
        role_on(&SHARED, "stays_role");
        let content = Content::with(
            &SecretRef { namespace: "apps".to_owned(), name: "db".to_owned() },
            &[("uri", &SHARED.uri("stays_role", PASSWORD))],
        );
        let connector = Connector::new(Target::new(&content).expect("it says how")).expect("it is set up");
        let (wire, key) = connector.open().await.expect("there is a server");
        let mut session = Session::new(wire, key);
        for escape in ["SET TRANSACTION READ WRITE", "SET transaction_read_only = off"] {
            session.begin(SqlAccess::Read).await.expect("it begins");
            let refused = session.command(escape).await;
            assert!(matches!(&refused, Err(Error::Database(error)) if error.code == "25001"), "{escape}: {refused:?}");
            session.reset().await.expect("it can be used again");
        }
    }

    #[test]
    fn a_tag_says_how_many_rows() {
        let table = [("INSERT 0 5", 5), ("DELETE 0", 0), ("SELECT 12", 12), ("CREATE TABLE", 0), ("", 0)];
        for (tag, count) in table {
            assert_eq!(affected(tag), count, "{tag}");
        }
    }
}
