//! The capability `kube`.

use super::access::Outside;
use crate::bindings::v0_1::pilothouse::plugin::{
    kube::{Error, Host},
    types,
};

impl Host for Outside {
    async fn get(&mut self, _: String, _: String, _: Option<String>, _: String) -> Result<Option<String>, Error> {
        Err(Error::Denied("cannot be served yet".to_owned()))
    }

    async fn list(&mut self, _: types::Selector) -> Result<Vec<String>, Error> {
        Err(Error::Denied("cannot be served yet".to_owned()))
    }
}
