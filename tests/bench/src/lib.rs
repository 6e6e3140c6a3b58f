//! What all measurements share: the machine they were made on, and how figures are summed up and written.

pub mod machine;
pub mod report;

mod plot;
