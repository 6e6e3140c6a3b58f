//! The capability `sql`.

use super::access::Outside;
use crate::bindings::v0_1::pilothouse::plugin::sql::{Error, Host, Rows, Statement};

impl Host for Outside {
    async fn query(&mut self, _: String, _: Statement) -> Result<Rows, Error> {
        Err(Error::Denied("cannot be served yet".to_owned()))
    }

    async fn execute(&mut self, _: String, _: Statement) -> Result<u64, Error> {
        Err(Error::Denied("cannot be served yet".to_owned()))
    }

    async fn transact(&mut self, _: String, _: Vec<Statement>) -> Result<Vec<u64>, Error> {
        Err(Error::Denied("cannot be served yet".to_owned()))
    }
}
