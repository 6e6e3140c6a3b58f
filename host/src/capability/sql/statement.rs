//! Which statements a plugin may use, by their first word. PostgreSQL itself takes one statement at a time by the protocol that is used,
//! so there is no second one behind it.
//!
//! This keeps a call in the transaction that the host has made for it. What a function does that a statement calls is not seen here:
//! that is for the read-only transaction to refuse, and for the rights of the role.

use crate::crd::SqlAccess;

/// The statements that only read, if what they call does.
const READS: [&str; 6] = ["SELECT", "WITH", "VALUES", "TABLE", "SHOW", "EXPLAIN"];
/// The others. Those are missing that begin or end a transaction, that leave something in the session or need what is in it, and `COPY`,
/// which would have the client send or take data.
const WRITES: [&str; 21] = [
    "INSERT", "UPDATE", "DELETE", "MERGE", "TRUNCATE", "CREATE", "ALTER", "DROP", "GRANT", "REVOKE", "COMMENT",
    "REASSIGN", "SECURITY", "CALL", "DO", "LOCK", "REFRESH", "REINDEX", "ANALYZE", "VACUUM", "CLUSTER",
];

/// Why this statement may not be used, if so.
pub(super) fn refusal(text: &str, access: SqlAccess) -> Option<String> {
    let word = first_word(text).to_ascii_uppercase();
    match access {
        _ if READS.contains(&word.as_str()) => None,
        SqlAccess::Write if WRITES.contains(&word.as_str()) => None,
        SqlAccess::Read if WRITES.contains(&word.as_str()) => Some(format!("{word} needs access: Write")),
        _ if word.is_empty() => Some("it is no statement".to_owned()),
        _ => Some(format!(
            "{word} is refused: a plugin may use {} and {}; a call is a transaction of its own",
            READS.join(", "),
            WRITES.join(", ")
        )),
    }
}

/// The word that PostgreSQL tells a statement by: behind space, comments, and semicolons that end nothing. A query may be in parentheses.
fn first_word(text: &str) -> &str {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c', ';', '(']);
        if let Some(comment) = rest.strip_prefix("--") {
            rest = comment.find(['\n', '\r']).and_then(|end| comment.get(end..)).unwrap_or_default();
        } else if rest.starts_with("/*") {
            rest = behind_comment(rest);
        } else {
            break;
        }
    }
    let end = rest.find(|character: char| !character.is_ascii_alphabetic()).unwrap_or(rest.len());
    // The longest is CHECKPOINT or DEALLOCATE; what is longer is no word of SQL, and shown to a person.
    rest.get(..end.min(20)).unwrap_or_default()
}

/// What follows a comment, which may hold others. Nothing if it does not end.
fn behind_comment(text: &str) -> &str {
    let mut depth = 0_usize;
    let mut rest = text;
    while let Some(at) = rest.find(['/', '*']) {
        let here = rest.get(at..).unwrap_or_default();
        let width = match here.get(..2) {
            Some("/*") => {
                depth += 1;
                2
            }
            Some("*/") => {
                depth -= 1;
                2
            }
            _ => 1,
        };
        rest = here.get(width..).unwrap_or_default();
        if depth == 0 {
            return rest;
        }
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_is_found_behind_space_and_comments() {
        let table = [
            ("select 1", "select"),
            ("  \n\tSELECT 1", "SELECT"),
            ("(select 1) union (select 2)", "select"),
            ("-- a comment\nselect", "select"),
            ("-- a comment\rset x", "set"),
            ("-- nothing else", ""),
            ("/* one */ commit", "commit"),
            ("/* one /* within */ select */ commit", "commit"),
            ("/*/ commit */ select", "select"),
            ("/**/set/**/transaction", "set"),
            ("/* not ended select", ""),
            (";;/* */;begin", "begin"),
            ("select/**/1", "select"),
            ("é", ""),
            ("", ""),
        ];
        for (text, word) in table {
            assert_eq!(first_word(text), word, "{text}");
        }
    }

    #[test]
    fn sessions_and_transactions_are_the_hosts() {
        let texts = [
            "SET TRANSACTION READ WRITE",
            "/* select */ set session characteristics as transaction read write",
            "; -- select\n SeT transaction_read_only = off",
            "RESET ALL",
            "BEGIN",
            "start transaction",
            "COMMIT",
            "end",
            "ROLLBACK TO a",
            "abort",
            "SAVEPOINT a",
            "RELEASE a",
            "PREPARE TRANSACTION 'x'",
            "EXECUTE x",
            "DEALLOCATE x",
            "DISCARD ALL",
            "LISTEN x",
            "UNLISTEN *",
            "NOTIFY x",
            "DECLARE c CURSOR FOR SELECT 1",
            "FETCH c",
            "COPY t FROM STDIN",
            "LOAD 'x'",
            "CHECKPOINT",
            "",
        ];
        for access in [SqlAccess::Read, SqlAccess::Write] {
            for text in texts {
                assert!(refusal(text, access).is_some(), "{text}");
            }
        }
    }

    #[test]
    fn a_grant_to_read_is_for_statements_that_read() {
        for text in [
            "select 1",
            "(select 1)",
            "with a as (select 1) select",
            "values (1)",
            "table t",
            "show x",
            "explain select 1",
        ] {
            assert_eq!(refusal(text, SqlAccess::Read), None, "{text}");
        }
        for text in ["insert into t values (1)", "do $$ begin end $$", "call p()", "create table t ()", "lock t"] {
            assert!(refusal(text, SqlAccess::Read).is_some(), "{text}");
            assert_eq!(refusal(text, SqlAccess::Write), None, "{text}");
        }
    }
}
