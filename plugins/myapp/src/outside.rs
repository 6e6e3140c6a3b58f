//! What a MyApp has outside of the cluster: a record in a database, by the grant `records`, and a bucket in S3, by the grant `buckets`.
//!
//! Each function can be called again at any time, by a host that does not know how the last call has ended.

use pilothouse_sdk::{
    Failure, Metadata, Object,
    s3::{Deleted, S3},
    sql,
};
use serde::Deserialize;

const RECORDS: &str = "records";
const BUCKETS: &str = "buckets";

/// Sees to it that there is the record, and that it is of this MyApp.
pub(crate) fn ensure_record(id: &str, app: &Metadata) -> Result<(), Failure> {
    let insert = "INSERT INTO myapps (id, owner) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING";
    sql::execute(RECORDS, insert, &[id.into(), owner(app).into()])?;
    let rows = sql::query(RECORDS, "SELECT owner FROM myapps WHERE id = $1", &[id.into()])?;
    match rows.first().map(|row| row.get::<String>("owner")).transpose()? {
        Some(found) if found == owner(app) => Ok(()),
        Some(found) => Err(Failure::terminal(format!("the record {id} is of {found}; choose another databaseID"))),
        None => Err(Failure::retry(format!("the record {id} was deleted at the same time"))),
    }
}

/// Deletes the record, unless it is of another MyApp.
pub(crate) fn delete_record(id: &str, app: &Metadata) -> Result<(), Failure> {
    sql::delete(RECORDS, "DELETE FROM myapps WHERE id = $1 AND owner = $2", &[id.into(), owner(app).into()])?;
    Ok(())
}

/// Sees to it that there is the bucket.
pub(crate) fn ensure_bucket(bucket: &str, region: Option<&str>) -> Result<(), Failure> {
    Ok(S3::new(BUCKETS).create_bucket(bucket, region)?)
}

/// Deletes the bucket with all that is in it, as far as it comes.
pub(crate) fn remove_bucket(bucket: &str) -> Result<Deleted, Failure> {
    Ok(S3::new(BUCKETS).remove_bucket(bucket)?)
}

/// A name and no UID: a MyApp that comes back from a backup finds its record.
fn owner(app: &Metadata) -> String {
    format!("{}/{}", app.namespace.as_deref().unwrap_or_default(), app.name)
}

/// Whether a MyApp shows this condition, and as true.
pub(crate) fn shows(app: &Object, kind: &str) -> Result<bool, Failure> {
    let Shown { status } = app.parse()?;
    Ok(status.conditions.iter().any(|condition| condition.kind == kind && condition.status == "True"))
}

/// The conditions of a MyApp.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Shown {
    status: ShownStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ShownStatus {
    conditions: Vec<ShownCondition>,
}

#[derive(Deserialize)]
struct ShownCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}
