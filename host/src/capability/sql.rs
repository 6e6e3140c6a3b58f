//! The capability `sql`: statements for the databases that a reconciler grants, each by a connection of its grant's pool.
//!
//! The client is our own, on the messages of `postgres-protocol`: a complete one reads every message whole, however large it is, and
//! asks for values in the binary format alone, which has no text for a type that it does not know.

mod open;
mod pool;
mod session;
mod statement;
mod target;
#[cfg(test)]
mod tests;
mod value;
mod wire;

use std::{slice, sync::Arc};

pub(super) use self::pool::Pools;
use self::{pool::Taken, session::Error as Failed};
use super::access::{Access, Outside};
use crate::{
    bindings::v0_1::pilothouse::plugin::sql::{Error, Host, Rows, Statement},
    crd::{SqlAccess, SqlGrant},
    telemetry,
};

/// Most statements in a transaction.
const STATEMENTS: usize = 100;
/// How much of a grant's name is shown that does not exist, since the plugin made it up.
const NAME: usize = 63;

impl Host for Outside {
    async fn query(&mut self, grant: String, statement: Statement) -> Result<Rows, Error> {
        let access = self.of_sql()?;
        let allowed = allowed(&access, &grant, slice::from_ref(&statement));
        serve(self, &access, &grant, allowed, move |mut taken| async move { taken.query(&statement).await }).await
    }

    async fn execute(&mut self, grant: String, statement: Statement) -> Result<u64, Error> {
        let access = self.of_sql()?;
        let allowed = allowed(&access, &grant, slice::from_ref(&statement));
        serve(self, &access, &grant, allowed, move |mut taken| async move { taken.execute(&statement).await }).await
    }

    async fn transact(&mut self, grant: String, statements: Vec<Statement>) -> Result<Vec<u64>, Error> {
        let access = self.of_sql()?;
        let allowed = allowed(&access, &grant, &statements).and_then(|grant| match grant.access {
            SqlAccess::Write if statements.len() > STATEMENTS => {
                Err(format!("{} statements are more than a transaction can have ({STATEMENTS})", statements.len()))
            }
            SqlAccess::Write => Ok(grant),
            SqlAccess::Read => Err("a transaction needs access: Write".to_owned()),
        });
        serve(self, &access, &grant, allowed, move |mut taken| async move { taken.transact(&statements).await }).await
    }
}

impl Outside {
    /// A query can change something as well, by a function that it calls.
    fn of_sql(&mut self) -> Result<Arc<Access>, Error> {
        self.to_change("sql").cloned().map_err(|why| Error::Denied(why.to_owned()))
    }
}

/// The grant of that name, if it allows these statements.
fn allowed(access: &Access, name: &str, statements: &[Statement]) -> Result<SqlGrant, String> {
    let grants = access.grants();
    let grant = grants.sql.iter().find(|grant| grant.name == name);
    let grant = grant.ok_or("spec.grants.sql has no grant of this name")?;
    let refusal = statements.iter().find_map(|it| statement::refusal(&it.text, grant.access));
    refusal.map_or_else(|| Ok(grant.clone()), Err)
}

/// Does it on a connection of the grant, on the host's threads and within the time of the grant; and counts what comes of it.
async fn serve<T, F>(
    outside: &mut Outside,
    access: &Arc<Access>,
    name: &str,
    allowed: Result<SqlGrant, String>,
    work: impl FnOnce(Taken) -> F + Send + 'static,
) -> Result<T, Error>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Failed>> + Send + 'static,
{
    let answer = match allowed {
        Ok(grant) => run(access, grant, work).await,
        Err(why) => Err(Unanswered::Unsent(Error::Denied(why))),
    };
    if matches!(answer, Err(Unanswered::Unsent(_))) {
        outside.note_vain();
    }
    let answer = answer.map_err(|(Unanswered::Unsent(error) | Unanswered::Sent(error))| error);
    let refusal = match &answer {
        Err(Error::Denied(why)) => Some(format!("{:?}: {why}", name.chars().take(NAME).collect::<String>())),
        Err(Error::Credentials(why)) => {
            outside.note_lack(why);
            None
        }
        _ => None,
    };
    access.note("sql", answer.as_ref().map_or_else(outcome, |_| "ok"), refusal.as_deref());
    answer
}

/// Why there is no answer, and whether the statement may have been sent.
enum Unanswered {
    Unsent(Error),
    Sent(Error),
}

async fn run<T, F>(
    access: &Arc<Access>,
    grant: SqlGrant,
    work: impl FnOnce(Taken) -> F + Send + 'static,
) -> Result<T, Unanswered>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Failed>> + Send + 'static,
{
    let reached = access.clone();
    let done = async move {
        let (Some(secrets), Some(pools)) = (reached.secrets(), reached.databases()) else { return Err(nowhere()) };
        let answer = async {
            let pool = pools.of(&grant, secrets).await;
            let pool = pool.map_err(|error| Unanswered::Unsent(Error::Credentials(telemetry::chain(&error))))?;
            let taken = pool.take().await.map_err(|error| {
                tracing::warn!(grant = grant.name, "no connection to a database: {}", telemetry::chain(&error));
                Unanswered::Unsent(Error::Connection(error.told()))
            })?;
            work(taken).await.map_err(|error| Unanswered::Sent(told(error, &grant)))
        };
        let limit = grant.timeout.0;
        let late = |_| {
            Unanswered::Sent(Error::Timeout(format!("no answer within {limit:?}, waiting for a connection included")))
        };
        tokio::time::timeout(limit, answer).await.map_err(late)?
    };
    access.on_host(done).await.unwrap_or_else(|| Err(nowhere()))
}

fn nowhere() -> Unanswered {
    Unanswered::Unsent(Error::Denied("no database can be reached from here".to_owned()))
}

/// What the plugin is told.
fn told(error: Failed, grant: &SqlGrant) -> Error {
    match error {
        Failed::Lost(_) | Failed::Unexpected => Error::Connection(telemetry::chain(&error)),
        Failed::TooManyRows => Error::TooLarge(format!("the answer has more than {} rows (maxRows)", grant.max_rows)),
        Failed::TooLarge => {
            Error::TooLarge(format!("the answer is larger than {} bytes (maxResponse)", grant.max_response.0))
        }
        Failed::Database(refused) => match refused.code.as_str() {
            // The statement was one that reads, and what it called was not. (A standby says the same to a grant that writes.)
            "25006" if grant.access == SqlAccess::Read => {
                Error::Denied(format!("the grant has access: Read: {}", refused.message))
            }
            // Ended by who runs the database, or it goes down.
            "57P01" | "57P02" | "57P03" => Error::Connection(refused.message),
            // By a time limit that the database has for the role, or by who runs it.
            "57014" => Error::Timeout(refused.message),
            code if code.starts_with("23") => Error::Constraint(refused),
            _ => Error::Database(refused),
        },
    }
}

/// The name of an error in the contract.
fn outcome(error: &Error) -> &'static str {
    match error {
        Error::Denied(_) => "denied",
        Error::Credentials(_) => "credentials",
        Error::Connection(_) => "connection",
        Error::Timeout(_) => "timeout",
        Error::TooLarge(_) => "too-large",
        Error::Constraint(_) => "constraint",
        Error::Database(_) => "database",
    }
}
