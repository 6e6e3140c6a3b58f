//! What the capability promises, on a real PostgreSQL.

use std::{
    io::Write,
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures::future::join_all;
use postgres::{Options, Postgres};

use crate::{
    bindings::v0_1::pilothouse::plugin::sql::{DatabaseError, Error, Host as _, Rows, Statement, Value},
    capability::access::{Access, Outside},
    crd::{Bytes, Grants, SecretRef, SqlAccess, SqlEngine, SqlGrant, Timeout},
    metrics::Calls,
    secrets::Secrets,
};

/// The server that most tests share, each with a role of its own.
pub(super) static SHARED: LazyLock<Postgres> =
    LazyLock::new(|| Postgres::start(Options::default()).expect("PostgreSQL is installed: make postgres"));
/// The password of each role.
pub(super) const PASSWORD: &str = "open-sesame";

/// A reconciler with grants `db` (to write) and `look` (to read), by the same role.
struct Reconciler {
    access: Arc<Access>,
    calls: Arc<Calls>,
}

fn secret() -> SecretRef {
    SecretRef { namespace: "apps".to_owned(), name: "db".to_owned() }
}

fn grant(name: &str, access: SqlAccess) -> SqlGrant {
    SqlGrant {
        name: name.to_owned(),
        engine: SqlEngine::Postgres,
        secret_ref: secret(),
        access,
        pool_size: 2,
        timeout: Timeout(Duration::from_secs(20)),
        max_rows: 1000,
        max_response: Bytes(1 << 20),
    }
}

fn grants() -> Vec<SqlGrant> {
    vec![grant("db", SqlAccess::Write), grant("look", SqlAccess::Read)]
}

impl Reconciler {
    /// A role of this name on the shared server, with a schema of its own.
    fn new(role: &str) -> Self {
        role_on(&SHARED, role);
        Self::with(&[("uri", &SHARED.uri(role, PASSWORD))], grants())
    }

    fn with(keys: &[(&str, &str)], sql: Vec<SqlGrant>) -> Self {
        let calls = Arc::new(Calls::default());
        let access = Access::new(calls.clone(), Arc::new(Secrets::fixed()));
        let this = Self { access: Arc::new(access), calls };
        this.put(keys);
        this.grant(sql);
        this
    }

    fn put(&self, keys: &[(&str, &str)]) {
        let secrets = self.access.secrets().expect("there are some");
        secrets.put(&secret(), Some(keys));
    }

    fn grant(&self, sql: Vec<SqlGrant>) {
        self.access.grant(Grants { sql, ..Grants::default() }, &[]);
    }

    async fn query(&self, grant: &str, text: &str, parameters: &[Value]) -> Result<Rows, Error> {
        Outside::new(self.access.clone(), false, 1 << 20).query(grant.to_owned(), statement(text, parameters)).await
    }

    async fn execute(&self, grant: &str, text: &str, parameters: &[Value]) -> Result<u64, Error> {
        Outside::new(self.access.clone(), false, 1 << 20).execute(grant.to_owned(), statement(text, parameters)).await
    }

    async fn transact(&self, grant: &str, texts: &[&str]) -> Result<Vec<u64>, Error> {
        let statements = texts.iter().map(|text| statement(text, &[])).collect();
        Outside::new(self.access.clone(), false, 1 << 20).transact(grant.to_owned(), statements).await
    }

    /// The one value of a query.
    async fn value(&self, grant: &str, text: &str) -> Result<Value, Error> {
        let rows = self.query(grant, text, &[]).await?;
        Ok(rows.rows.into_iter().flatten().next().expect("a value"))
    }

    fn counted(&self, outcome: &'static str) -> u64 {
        self.calls.uses().get(&("sql", outcome)).copied().unwrap_or(0)
    }
}

pub(super) fn role_on(server: &Postgres, role: &str) {
    let make = format!("CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'; CREATE SCHEMA {role} AUTHORIZATION {role}");
    server.sql(&make).expect("a role can be made");
}

fn statement(text: &str, parameters: &[Value]) -> Statement {
    Statement { text: text.to_owned(), parameters: parameters.to_vec() }
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn typed(name: &str, text: &str) -> Value {
    Value::Typed((name.to_owned(), text.to_owned()))
}

/// The SQLSTATE of a refusal.
fn code<T: std::fmt::Debug>(answer: Result<T, Error>) -> String {
    match answer {
        Err(Error::Database(DatabaseError { code, .. }) | Error::Constraint(DatabaseError { code, .. })) => code,
        other => panic!("not refused by the database: {other:?}"),
    }
}

/// Waits for this answer of the superuser's.
async fn eventually(server: &Postgres, query: &str, expected: &str) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let answer = server.sql(query).expect("it can be asked");
        if answer == expected {
            return;
        }
        assert!(Instant::now() < end, "{query}: {answer}, not {expected}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_value_of_each_type_comes_back_as_it_went() -> Result<(), Error> {
    let it = Reconciler::new("values_role");
    SHARED.sql("CREATE SCHEMA elsewhere AUTHORIZATION values_role").expect("it can be made");
    it.transact(
        "db",
        &[
            "CREATE TYPE mood AS ENUM ('fine', 'so so')",
            "CREATE TYPE elsewhere.\"Pair\" AS (a int, b text)",
            "CREATE DOMAIN word AS text CHECK (value <> '')",
            "CREATE TYPE elsewhere._odd AS ENUM ('x')",
        ],
    )
    .await?;
    let table = [
        ("bool", Value::Boolean(true)),
        ("int2", Value::Int(i16::MIN.into())),
        ("int4", Value::Int(i32::MAX.into())),
        ("int8", Value::Int(i64::MIN)),
        ("oid", Value::Int(u32::MAX.into())),
        ("float4", Value::Float(0.1)),
        ("float8", Value::Float(1e-300)),
        ("float8", Value::Float(f64::NEG_INFINITY)),
        ("text", text("naïve 'quoted'; -- $1 \u{1F600}")),
        ("varchar(4)", text("four")),
        ("char(4)", text("a   ")),
        ("name", text("a_name")),
        ("bytea", Value::Binary((0..=255).collect())),
        ("numeric", typed("numeric", "123456789012345678901234567890.0000000010")),
        ("uuid", typed("uuid", "a81bc81b-dead-4e5d-abff-90865d1e13b1")),
        ("date", typed("date", "2026-11-30")),
        ("timestamptz", typed("timestamptz", "2026-11-30 13:42:38.123456+00")),
        ("timestamp", typed("timestamp", "2026-11-30 13:42:38")),
        ("interval", typed("interval", "1 year 2 days 00:00:03")),
        ("json", typed("json", r#"{"b":1, "a":[null]}"#)),
        ("jsonb", typed("jsonb", r#"{"a": [null], "b": 1}"#)),
        ("inet", typed("inet", "10.0.0.0/8")),
        ("int4[]", typed("int4[]", "{1,NULL,3}")),
        ("text[]", typed("text[]", r#"{"a b","c\"d",NULL}"#)),
        ("numrange", typed("numrange", "[1.5,2)")),
        ("aclitem[]", typed("aclitem[]", "{values_role=r/values_role}")),
        ("mood", typed("mood", "so so")),
        ("mood[]", typed("mood[]", r#"{fine,"so so"}"#)),
        ("word", text("a")),
        // One of another schema than those on the path is named with that.
        (r#"elsewhere."Pair""#, typed(r#"elsewhere."Pair""#, r#"(1,"a ""b""")"#)),
        ("elsewhere._odd", typed("elsewhere._odd", "x")),
        ("oidvector", typed("oidvector", "1 2")),
        ("point", typed("point", "(1,2)")),
        (r#"elsewhere."Pair"[]"#, typed(r#"elsewhere."Pair"[]"#, r#"{"(1,)"}"#)),
    ];
    for (type_, value) in table {
        let select = format!("SELECT $1::{type_}");
        let rows = it.query("look", &select, std::slice::from_ref(&value)).await?;
        assert_eq!(rows.rows, [[value]], "{type_}");
        let rows = it.query("look", &select, &[Value::Null]).await?;
        assert_eq!(rows.rows, [[Value::Null]], "{type_}");
    }
    // The type of a typed value is its own, where the statement does not say it.
    let rows = it.query("look", "SELECT $1 AS a, $2 AS b", &[typed("numeric", "1.50"), text("b")]).await?;
    assert_eq!(
        (rows.columns, rows.rows),
        (vec!["a".to_owned(), "b".to_owned()], vec![vec![typed("numeric", "1.50"), text("b")]])
    );
    assert_eq!(it.value("look", "SELECT pg_sleep(0)").await?, typed("void", ""));
    assert_eq!(it.value("look", "SELECT row(1, 'a')").await?, typed("record", "(1,a)"));
    Ok(())
}

#[tokio::test]
async fn plain_values_are_taken_as_literals_are() -> Result<(), Error> {
    let it = Reconciler::new("literals_role");
    it.execute("db", "CREATE TABLE t (u uuid, z timestamptz, j jsonb, n numeric, f float8, s text)", &[]).await?;
    let parameters = [
        text("a81bc81b-dead-4e5d-abff-90865d1e13b1"),
        text("2026-11-30T13:42:38Z"),
        text(r#"{"a": 1}"#),
        Value::Float(1.5),
        Value::Int(3),
        Value::Int(5),
    ];
    assert_eq!(it.execute("db", "INSERT INTO t VALUES ($1, $2, $3, $4, $5, $6)", &parameters).await?, 1);
    let rows = it.query("look", "SELECT z, j -> 'a', n, f, s FROM t", &[]).await?;
    let expected = [
        typed("timestamptz", "2026-11-30 13:42:38+00"),
        typed("jsonb", "1"),
        typed("numeric", "1.5"),
        Value::Float(3.0),
        text("5"),
    ];
    assert_eq!(rows.rows, [expected]);
    Ok(())
}

#[tokio::test]
async fn what_does_not_fit_is_refused_and_nothing_is_done() -> Result<(), Error> {
    let it = Reconciler::new("fits_role");
    it.execute("db", "CREATE TABLE t (small int2, b bytea)", &[]).await?;
    let table = [
        ("INSERT INTO t (small) VALUES ($1)", vec![Value::Int(32768)], "22003"),
        ("INSERT INTO t (small) VALUES ($1)", vec![text("a lot")], "22P02"),
        ("INSERT INTO t (small) VALUES ($1)", vec![Value::Binary(vec![1])], "42804"),
        ("INSERT INTO t (small) VALUES ($1)", vec![typed("no.such", "1")], "42704"),
        ("INSERT INTO t (small) VALUES ($1)", vec![], "07001"),
        ("INSERT INTO t (small) VALUES ($1)", vec![Value::Int(1); 2], "42P18"),
        ("INSERT INTO t (small) VALUES (1); COMMIT", vec![], "42601"),
        ("INSERT INTO t (small) VALUES (1)\0", vec![], "22021"),
        ("SELECT $1::text", vec![text("a\0b")], "22021"),
    ];
    for (statement, parameters, expected) in table {
        assert_eq!(code(it.execute("db", statement, &parameters).await), expected, "{statement} {parameters:?}");
    }
    assert_eq!(it.value("look", "SELECT count(*) FROM t").await?, Value::Int(0));
    Ok(())
}

#[tokio::test]
async fn a_grant_to_read_changes_nothing_whoever_the_role_is() -> Result<(), Error> {
    let it = Reconciler::new("reads_role");
    it.transact(
        "db",
        &[
            "CREATE TABLE t (a int)",
            "INSERT INTO t VALUES (1)",
            "CREATE SEQUENCE s",
            "CREATE FUNCTION writes() RETURNS int LANGUAGE sql AS 'INSERT INTO t VALUES (2) RETURNING a'",
            "CREATE FUNCTION turns() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
                 SET TRANSACTION READ WRITE; INSERT INTO t VALUES (3); RETURN 1; END $$",
            "CREATE FUNCTION sets() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM set_config('transaction_read_only', 'off', false); INSERT INTO t VALUES (4); RETURN 1; END $$",
            "CREATE FUNCTION has() RETURNS int LANGUAGE sql SET transaction_read_only = off
                 AS 'INSERT INTO t VALUES (5) RETURNING a'",
            "CREATE FUNCTION hides() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
                 BEGIN SET TRANSACTION READ WRITE; EXCEPTION WHEN OTHERS THEN NULL; END;
                 BEGIN SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE; EXCEPTION WHEN OTHERS THEN NULL; END;
                 SET default_transaction_read_only = off; INSERT INTO t VALUES (6); RETURN 1; END $$",
        ],
    )
    .await?;
    // By their words, and by what they do.
    let denied = [
        "INSERT INTO t VALUES (7)",
        "DO $$ BEGIN SET TRANSACTION READ WRITE; INSERT INTO t VALUES (8); END $$",
        "SET TRANSACTION READ WRITE",
        "/* SELECT */ -- SELECT\n ; SET TRANSACTION READ WRITE",
        "COMMIT",
        "DROP TABLE t",
        "WITH w AS (INSERT INTO t VALUES (9) RETURNING a) SELECT a FROM w",
        "EXPLAIN ANALYZE INSERT INTO t VALUES (10)",
        "SELECT a INTO u FROM t",
        "SELECT nextval('s')",
        "SELECT a FROM t FOR UPDATE",
        "SELECT writes()",
        "SELECT hides()",
    ];
    for text in denied {
        let answer = it.query("look", text, &[]).await;
        assert!(matches!(answer, Err(Error::Denied(_))), "{text}: {answer:?}");
    }
    let refused = [
        "SELECT turns()",
        "SELECT sets()",
        "SELECT has()",
        "SELECT set_config('transaction_read_only', 'off', false), writes()",
        "SELECT 1; INSERT INTO t VALUES (11)",
    ];
    for text in refused {
        code(it.query("look", text, &[]).await);
    }
    for attempt in
        [it.execute("look", "SELECT writes()", &[]).await.map(drop), it.transact("look", &["SELECT 1"]).await.map(drop)]
    {
        assert!(matches!(attempt, Err(Error::Denied(_))), "{attempt:?}");
    }
    // What older servers let pass, and what lies outside of what is read-only, is undone.
    drop(it.query("look", "SELECT lo_create(4711)", &[]).await);
    it.query("look", "SELECT set_config('default_transaction_read_only', 'off', false)", &[]).await?;
    assert_eq!(
        SHARED.sql("SELECT count(*) FROM pg_largeobject_metadata WHERE oid = 4711").expect("it can be asked"),
        "0"
    );
    assert_eq!(it.query("look", "SELECT a FROM t", &[]).await?.rows, [[Value::Int(1)]]);
    assert_eq!(it.value("look", "SELECT is_called FROM s").await?, Value::Boolean(false));
    assert_eq!(it.counted("denied"), 15);
    Ok(())
}

#[tokio::test]
async fn what_is_not_granted_is_refused_counted_and_logged_once() {
    let logged = Logged::default();
    let _guard = logged.collect();
    let it = Reconciler::with(&[("uri", "postgres://nobody:needs@127.0.0.1:1/this")], grants());
    for _ in 0..3 {
        let answer = it.query("other", "SELECT 1", &[]).await;
        assert!(matches!(&answer, Err(Error::Denied(why)) if why.contains("no grant of this name")), "{answer:?}");
        let answer = it.execute("look", "DELETE FROM t", &[]).await;
        assert!(matches!(&answer, Err(Error::Denied(why)) if why == "DELETE needs access: Write"), "{answer:?}");
    }
    assert_eq!(it.counted("denied"), 6);
    let lines = logged.text();
    for line in [
        "refused to a plugin: \\\"other\\\": spec.grants.sql has no grant",
        "refused to a plugin: \\\"look\\\": DELETE",
    ] {
        let line = line.replace("\\\"", "\"");
        assert_eq!(lines.matches(&line).count(), 1, "{line}: {lines}");
    }
    // Nothing outlives a grant, and a preview touches nothing.
    it.grant(Vec::new());
    assert!(matches!(it.query("look", "SELECT 1", &[]).await, Err(Error::Denied(_))));
    let mut preview = Outside::new(it.access.clone(), true, 1 << 20);
    let answer = preview.query("look".to_owned(), statement("SELECT 1", &[])).await;
    assert!(matches!(answer, Err(Error::Denied(_))));
    assert_eq!(preview.touched(), Some("sql"));
}

#[tokio::test]
async fn a_transaction_is_all_or_nothing() -> Result<(), Error> {
    let it = Reconciler::new("transactions_role");
    let made = it
        .transact(
            "db",
            &[
                "CREATE TABLE t (a int CONSTRAINT a_once UNIQUE DEFERRABLE INITIALLY DEFERRED)",
                "INSERT INTO t VALUES (1), (2)",
            ],
        )
        .await?;
    assert_eq!(made, [0, 2]);
    // In the middle, and at the very end.
    assert_eq!(
        code(it.transact("db", &["INSERT INTO t VALUES (3)", "SELECT 1 / 0", "INSERT INTO t VALUES (4)"]).await),
        "22012"
    );
    match it.transact("db", &["INSERT INTO t VALUES (3)", "INSERT INTO t VALUES (1)"]).await {
        Err(Error::Constraint(refused)) => {
            assert_eq!((refused.code.as_str(), refused.constraint.as_deref()), ("23505", Some("a_once")));
        }
        other => panic!("{other:?}"),
    }
    for end in ["COMMIT", "/**/commit", ";END", "ROLLBACK AND CHAIN", "SAVEPOINT a"] {
        let answer = it.transact("db", &["INSERT INTO t VALUES (3)", end, "SELECT 1 / 0"]).await;
        assert!(matches!(answer, Err(Error::Denied(_))), "{end}: {answer:?}");
    }
    let procedure = "CREATE PROCEDURE ends() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$";
    it.execute("db", procedure, &[]).await?;
    assert_eq!(code(it.transact("db", &["INSERT INTO t VALUES (3)", "CALL ends()"]).await), "2D000");
    let many = vec!["INSERT INTO t VALUES (3)"; 101];
    assert!(matches!(it.transact("db", &many).await, Err(Error::Denied(_))));
    assert_eq!(it.value("look", "SELECT count(*) FROM t").await?, Value::Int(2));
    assert_eq!(it.execute("db", "UPDATE t SET a = a + 10", &[]).await?, 2);
    assert_eq!(it.execute("db", "DELETE FROM t WHERE a = $1", &[Value::Int(99)]).await?, 0);
    assert_eq!(it.transact("db", &[]).await?, Vec::<u64>::new());
    Ok(())
}

#[tokio::test]
async fn what_refuses_a_transaction_around_it_can_be_executed() -> Result<(), Error> {
    let it = Reconciler::new("alone_role");
    SHARED.sql("ALTER ROLE alone_role CREATEDB").expect("it can");
    it.execute("db", "CREATE DATABASE alone", &[]).await?;
    it.execute("db", "DROP DATABASE alone", &[]).await?;
    it.execute("db", "VACUUM", &[]).await?;
    assert_eq!(code(it.query("db", "CREATE DATABASE alone", &[]).await), "25001");
    Ok(())
}

#[tokio::test]
async fn nothing_of_a_session_reaches_another_call() -> Result<(), Error> {
    let it = Reconciler::new("sessions_role");
    let one = SqlGrant { pool_size: 1, ..grant("db", SqlAccess::Write) };
    it.grant(vec![one]);
    let before = it.value("db", "SELECT pg_backend_pid()").await?;
    let leaves = "DO $$ BEGIN
        CREATE TEMP TABLE left_behind (a int);
        PERFORM set_config('search_path', 'left_behind', false), set_config('work_mem', '65kB', false);
        PERFORM set_config('role', 'pg_monitor', false) WHERE pg_has_role('pg_monitor', 'MEMBER');
        PERFORM pg_advisory_lock(4711);
        EXECUTE 'LISTEN left_behind';
        EXECUTE 'PREPARE left_behind AS SELECT 1';
        EXECUTE 'DECLARE left_behind CURSOR WITH HOLD FOR SELECT 1';
    END $$";
    it.execute("db", leaves, &[]).await?;
    let table = [
        ("SELECT to_regclass('pg_temp.left_behind') IS NULL", Value::Boolean(true)),
        ("SELECT current_setting('search_path') LIKE '%left%'", Value::Boolean(false)),
        ("SELECT current_setting('work_mem') = '65kB'", Value::Boolean(false)),
        ("SELECT current_user = session_user", Value::Boolean(true)),
        ("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()", Value::Int(0)),
        ("SELECT count(*) FROM pg_listening_channels()", Value::Int(0)),
        ("SELECT count(*) FROM pg_prepared_statements WHERE name = 'left_behind'", Value::Int(0)),
        ("SELECT count(*) FROM pg_cursors WHERE name = 'left_behind'", Value::Int(0)),
    ];
    for (query, expected) in table {
        assert_eq!(it.value("db", query).await?, expected, "{query}");
    }
    // Else all this would show nothing: it is the same connection.
    assert_eq!(it.value("db", "SELECT pg_backend_pid()").await?, before);
    Ok(())
}

#[tokio::test]
async fn a_call_that_is_late_or_given_up_leaves_no_connection_and_no_statement() -> Result<(), Error> {
    let it = Reconciler::new("late_role");
    let short = |seconds| SqlGrant { timeout: Timeout(Duration::from_secs(seconds)), ..grant("db", SqlAccess::Write) };
    it.grant(vec![short(2)]);
    let backend = it.value("db", "SELECT pg_backend_pid()").await?;
    let begun = Instant::now();
    let answer = it.query("db", "SELECT pg_sleep(600)", &[]).await;
    assert!(matches!(&answer, Err(Error::Timeout(why)) if why.contains("2s")), "{answer:?}");
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(it.counted("timeout"), 1);
    let sleeping = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'late_role' AND query LIKE '%pg_sleep(600%'";
    eventually(&SHARED, sleeping, "0").await;
    // The call of a plugin that has met its own deadline is dropped.
    it.grant(vec![short(60)]);
    let call = it.transact("db", &["CREATE TABLE t (a int)", "SELECT pg_sleep(600)"]);
    assert!(tokio::time::timeout(Duration::from_millis(300), call).await.is_err());
    eventually(&SHARED, sleeping, "0").await;
    assert_eq!(it.value("db", "SELECT to_regclass('late_role.t') IS NULL").await?, Value::Boolean(true));
    assert_ne!(it.value("db", "SELECT pg_backend_pid()").await?, backend);
    Ok(())
}

#[tokio::test]
async fn an_answer_beyond_the_grant_is_neither_held_nor_kept() -> Result<(), Error> {
    let it = Reconciler::new("large_role");
    let small = SqlGrant { max_rows: 10, max_response: Bytes(1000), ..grant("db", SqlAccess::Write) };
    it.grant(vec![small]);
    assert_eq!(it.query("db", "SELECT generate_series(1, 10)", &[]).await?.rows.len(), 10);
    it.execute("db", "CREATE TABLE t (a int)", &[]).await?;
    let table = [
        "SELECT generate_series(1, 11)",
        "SELECT repeat('x', 1000)",
        // 8 GB, and then 100 MB at once.
        "SELECT repeat('x', 800), generate_series(1, 10000000)",
        "SELECT repeat('x', 100 * 1000 * 1000)",
        "INSERT INTO t SELECT generate_series(1, 11) RETURNING a",
    ];
    for query in table {
        let answer = it.query("db", query, &[]).await;
        assert!(
            matches!(&answer, Err(Error::TooLarge(why)) if why.contains("1000 bytes") || why.contains("10 rows")),
            "{query}: {answer:?}"
        );
    }
    let answer = it.execute("db", "DO $$ BEGIN RAISE EXCEPTION '%', repeat('x', 100 * 1000 * 1000); END $$", &[]).await;
    assert!(matches!(answer, Err(Error::TooLarge(_))), "{answer:?}");
    assert_eq!(it.value("db", "SELECT count(*) FROM t").await?, Value::Int(0));
    // What is not asked for is not counted.
    assert_eq!(it.execute("db", "SELECT generate_series(1, 1000)", &[]).await?, 1000);
    Ok(())
}

#[tokio::test]
async fn there_are_no_more_connections_than_the_grant_says() {
    let it = Reconciler::new("pool_role");
    let calls = (0..20).map(|_| it.value("db", "SELECT pg_backend_pid() FROM pg_sleep(0.02)"));
    let mut backends: Vec<String> = join_all(calls).await.into_iter().map(|answer| format!("{answer:?}")).collect();
    backends.sort();
    backends.dedup();
    assert!(backends.len() <= 2 && backends.iter().all(|backend| backend.starts_with("Ok")), "{backends:?}");
    // Once the grant is gone, they are.
    let connected = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'pool_role'";
    it.grant(vec![grant("look", SqlAccess::Read)]);
    eventually(&SHARED, connected, "0").await;
    it.value("look", "SELECT 1").await.expect("another grant goes on");
    it.access.secrets().expect("there are some").put(&secret(), None);
    let answer = it.value("look", "SELECT 1").await;
    assert_eq!(answer, Err(Error::Credentials("the Secret apps/db does not exist".to_owned())));
    eventually(&SHARED, connected, "0").await;
}

#[tokio::test]
async fn a_new_password_holds_at_once() -> Result<(), Error> {
    let it = Reconciler::new("rotates_role");
    let before = it.value("db", "SELECT pg_backend_pid()").await?;
    SHARED.sql("ALTER ROLE rotates_role PASSWORD 'another'").expect("it can be changed");
    it.put(&[("uri", &SHARED.uri("rotates_role", "another"))]);
    assert_ne!(it.value("db", "SELECT pg_backend_pid()").await?, before);
    eventually(&SHARED, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'rotates_role'", "1").await;
    // And one that is wrong does, too, although a connection was there.
    it.put(&[("uri", &SHARED.uri("rotates_role", PASSWORD))]);
    let answer = it.value("db", "SELECT 1").await;
    assert_eq!(answer, Err(Error::Connection("the database refuses the connection (SQLSTATE 28P01)".to_owned())));
    Ok(())
}

#[tokio::test]
async fn a_server_that_is_down_or_hangs_is_an_error_in_time() {
    let mut server = Postgres::start(Options::default()).expect("PostgreSQL is installed: make postgres");
    role_on(&server, "down_role");
    let short = SqlGrant { timeout: Timeout(Duration::from_secs(1)), ..grant("db", SqlAccess::Write) };
    let it = Reconciler::with(&[("uri", &server.uri("down_role", PASSWORD))], vec![short]);
    assert_eq!(it.value("db", "SELECT 1").await, Ok(Value::Int(1)));
    server.pause().expect("it can be paused");
    // On the connection that is there, and on a new one.
    for _ in 0..2 {
        let begun = Instant::now();
        let answer = it.value("db", "SELECT 1").await;
        assert!(matches!(answer, Err(Error::Timeout(_))), "{answer:?}");
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
    server.go_on().expect("it can go on");
    assert_eq!(it.value("db", "SELECT 1").await, Ok(Value::Int(1)));
    // Killed while a statement runs, and while none does.
    it.grant(grants());
    let running = it.value("db", "SELECT pg_sleep(600)");
    let killing = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        server.stop();
    };
    let (answer, ()) = tokio::join!(running, killing);
    assert!(matches!(answer, Err(Error::Connection(_))), "{answer:?}");
    let answer = it.value("db", "SELECT 1").await;
    assert_eq!(answer, Err(Error::Connection("nothing listens where the database should be".to_owned())));
    server.start_again().expect("it starts");
    assert_eq!(it.value("db", "SELECT 1").await, Ok(Value::Int(1)));
    // A connection that has gone in between is not used.
    server.stop();
    server.start_again().expect("it starts");
    assert_eq!(it.value("db", "SELECT 1").await, Ok(Value::Int(1)));
    assert_eq!(it.counted("connection"), 2);
}

#[tokio::test]
async fn tls_is_verified() -> Result<(), Error> {
    let server = Postgres::start(Options { tls: true }).expect("PostgreSQL is installed: make postgres");
    role_on(&server, "tls_role");
    let authority = server.authority().expect("it speaks TLS").to_owned();
    let uri = server.uri("tls_role", PASSWORD);
    let one = SqlGrant { pool_size: 1, ..grant("look", SqlAccess::Read) };
    let it = Reconciler::with(&[("uri", &uri), ("ca.crt", &authority)], vec![one]);
    assert_eq!(
        it.value("look", "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").await?,
        Value::Boolean(true)
    );
    let backend = it.value("look", "SELECT pg_backend_pid()").await?;
    assert_eq!(it.value("look", "SELECT pg_backend_pid()").await?, backend);
    // A statement is cancelled over TLS, too.
    let call = it.value("look", "SELECT pg_sleep(600)");
    assert!(tokio::time::timeout(Duration::from_millis(300), call).await.is_err());
    eventually(&server, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(600%'", "0").await;

    let port = server.port().to_string();
    let no_tls =
        [("host", "127.0.0.1"), ("port", &port), ("user", "tls_role"), ("password", PASSWORD), ("sslmode", "disable")];
    let elsewhere = uri.replace("127.0.0.1", "localhost").replace("verify-full", "require");
    let plain = SHARED.uri("tls_role", PASSWORD).replace("disable", "require");
    let table: [(&[(&str, &str)], &str); 5] = [
        (&[("uri", &uri)], "could be verified"),
        (&[("uri", &elsewhere), ("ca.crt", &authority)], "could be verified"),
        (&[("uri", &plain)], "speaks no TLS"),
        (&no_tls, "SQLSTATE 28000"),
        (&[("uri", &uri), ("ca.crt", "no certificate")], "ca.crt"),
    ];
    for (keys, expected) in table {
        it.put(keys);
        match it.value("look", "SELECT 1").await {
            Err(Error::Connection(why) | Error::Credentials(why)) => assert!(why.contains(expected), "{why}"),
            other => panic!("{expected}: {other:?}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn no_error_and_no_line_of_the_log_shows_a_credential() {
    let logged = Logged::default();
    let _guard = logged.collect();
    role_on(&SHARED, "secret_role");
    let right = SHARED.uri("secret_role", PASSWORD);
    let cases = [
        right.clone(),
        right.replace(PASSWORD, "wrong-sesame"),
        right.replace("secret_role", "other_role"),
        right.replace("/postgres?", "/sesame?"),
        right.replace("disable", "verify-full"),
        right.replace("disable", "sesame"),
        format!("{right}&options=sesame"),
        right.replace("127.0.0.1", "sesame.invalid"),
        format!("x{right}"),
        format!("postgres://me:{PASSWORD}@127.0.0.1:1/x"),
    ];
    let it = Reconciler::with(&[("uri", &right)], grants());
    let mut told = String::new();
    for uri in &cases {
        it.put(&[("uri", uri)]);
        told += &format!("{:?}\n", it.value("db", "SELECT 1").await);
        told += &format!("{:?}\n", it.value("db", "SELECT 1 / 0").await);
    }
    it.put(&[("uri", &right)]);
    told += &format!("{:?}", it.access.secrets().expect("there are some").get(&secret()).await.expect("it is there"));
    assert_eq!(told.matches("Connection(").count(), 12, "{told}");
    assert_eq!(told.matches("Credentials(").count(), 6, "{told}");
    assert!(!told.contains("sesame") && !told.contains("_role") && !told.contains("127.0.0.1"), "{told}");
    // Who runs the host is told whom it could not reach, and for whom.
    let lines = logged.text();
    assert!(
        lines.contains("refuses other_role") && !lines.contains(PASSWORD) && !lines.contains("wrong-sesame"),
        "{lines}"
    );
}

/// What is logged on this thread, in all detail.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl Logged {
    fn collect(&self) -> tracing::subscriber::DefaultGuard {
        let this = self.clone();
        let lines = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_ansi(false);
        tracing::subscriber::set_default(lines.with_writer(move || this.clone()).finish())
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl Write for Logged {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
