//! `servers`: a PostgreSQL with the table of MyApp, and an S3 server, for a script. Prints where they are as one line of JSON, obeys the
//! lines `stop-buckets` and `start-buckets`, each with a line in answer, and ends both when its input ends.

use std::{
    io::{self, BufRead as _},
    process::ExitCode,
};

use postgres::Postgres;
use s3::Server;
use serde_json::json;

/// The password of the role `app`: anybody may know it, the server is reached from this machine alone.
const PASSWORD: &str = "demo";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Postgres(#[from] postgres::Error),
    #[error(transparent)]
    S3(#[from] s3::Error),
    #[error("cannot read what to do")]
    Input(#[from] io::Error),
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("servers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let database = Postgres::start(postgres::Options::default())?;
    database.sql(&format!(
        "CREATE TABLE myapps (id text PRIMARY KEY, owner text NOT NULL);
         CREATE ROLE app LOGIN PASSWORD '{PASSWORD}';
         GRANT SELECT, INSERT, DELETE ON myapps TO app"
    ))?;
    let mut buckets = Server::start(s3::Options::default())?;
    println!(
        "{}",
        json!({
            "database": database.uri("app", PASSWORD),
            "buckets": buckets.url(),
            "folder": buckets.folder(),
            "region": s3::REGION,
            "accessKeyId": s3::ACCESS_KEY_ID,
            "secretAccessKey": s3::SECRET_ACCESS_KEY,
        })
    );
    for line in io::stdin().lock().lines() {
        match line?.as_str() {
            "stop-buckets" => buckets.stop(),
            "start-buckets" => buckets.start_again()?,
            other => eprintln!("servers: {other:?} is nothing that can be done"),
        }
        println!("done");
    }
    Ok(())
}
