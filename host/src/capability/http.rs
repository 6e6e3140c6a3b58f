//! The capability `http`.

use super::access::Outside;
use crate::bindings::v0_1::pilothouse::plugin::http::{Error, Host, Request, Response};

impl Host for Outside {
    async fn send(&mut self, _: Request) -> Result<Response, Error> {
        match self.to_change("http") {
            Ok(access) => Err(Error::Denied(format!("{:?} cannot be served yet", access.grants().http.len()))),
            Err(why) => Err(Error::Denied(why.to_owned())),
        }
    }
}
