//! Values of the contract, as PostgreSQL takes and gives them: as the text that its own functions of input and output read and write,
//! which every type has; only bytes go as they are.

use std::borrow::Cow;

use crate::bindings::v0_1::pilothouse::plugin::sql::Value;

/// The number of a type in the catalog.
pub(super) type Oid = u32;

/// Types whose numbers never change.
const BOOL: Oid = 16;
const BYTEA: Oid = 17;
const NAME: Oid = 19;
const INT8: Oid = 20;
const INT2: Oid = 21;
const INT4: Oid = 23;
const TEXT: Oid = 25;
const OID: Oid = 26;
const FLOAT4: Oid = 700;
const FLOAT8: Oid = 701;
/// That of a literal which nobody has asked for the type of.
const UNKNOWN: Oid = 705;
const BPCHAR: Oid = 1042;
const VARCHAR: Oid = 1043;

/// What a column holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Boolean,
    Int,
    Float,
    Text,
    Binary,
    /// Another type, by its number.
    Other(Oid),
}

impl Kind {
    pub(super) fn of(type_: Oid) -> Self {
        match type_ {
            BOOL => Self::Boolean,
            INT2 | INT4 | INT8 | OID => Self::Int,
            FLOAT4 | FLOAT8 => Self::Float,
            TEXT | VARCHAR | BPCHAR | NAME | UNKNOWN => Self::Text,
            BYTEA => Self::Binary,
            other => Self::Other(other),
        }
    }

    /// In which format it is to come: 0 is text, 1 is binary.
    pub(super) fn format(&self) -> i16 {
        i16::from(*self == Self::Binary)
    }

    /// A value of it; none if it is not as the server's text is. `name` is that of another type.
    pub(super) fn read(&self, bytes: Option<&[u8]>, name: &str) -> Option<Value> {
        let Some(bytes) = bytes else { return Some(Value::Null) };
        if *self == Self::Binary {
            return Some(Value::Binary(bytes.to_vec()));
        }
        let text = std::str::from_utf8(bytes).ok()?;
        Some(match self {
            Self::Boolean => Value::Boolean(text == "t"),
            Self::Int => Value::Int(text.parse().ok()?),
            Self::Float => Value::Float(text.parse().ok()?),
            Self::Text | Self::Binary => Value::Text(text.to_owned()),
            Self::Other(_) => Value::Typed((name.to_owned(), text.to_owned())),
        })
    }
}

/// The type that a parameter has by itself. None: it is for the statement to say, as of a literal, or (of another type) to be looked up.
pub(super) fn type_of(parameter: &Value) -> Option<Oid> {
    match parameter {
        Value::Boolean(_) => Some(BOOL),
        Value::Binary(_) => Some(BYTEA),
        Value::Null | Value::Int(_) | Value::Float(_) | Value::Text(_) | Value::Typed(_) => None,
    }
}

/// The format of a parameter: 0 is text, 1 is binary.
pub(super) fn format_of(parameter: &Value) -> i16 {
    i16::from(matches!(parameter, Value::Binary(_)))
}

/// What is sent for a parameter; none for null.
pub(super) fn sent(parameter: &Value) -> Option<Cow<'_, [u8]>> {
    let text = |text: String| Some(Cow::Owned(text.into_bytes()));
    match parameter {
        Value::Null => None,
        Value::Boolean(value) => text(value.to_string()),
        Value::Int(value) => text(value.to_string()),
        // The shortest text that reads as the same number.
        Value::Float(value) => text(format!("{value:?}")),
        Value::Text(value) | Value::Typed((_, value)) => Some(value.as_bytes().into()),
        Value::Binary(value) => Some(value.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sent_as_they_are_read_again() {
        for value in [0.1, -0.0, 1e300, 5e-324, f64::MAX, f64::INFINITY, f64::NEG_INFINITY] {
            let value = Value::Float(value);
            let sent = sent(&value);
            assert_eq!(Kind::Float.read(sent.as_deref(), ""), Some(value));
        }
        assert_eq!(sent(&Value::Int(i64::MIN)).as_deref(), Some(b"-9223372036854775808".as_slice()));
    }

    #[test]
    fn what_cannot_be_read_is_no_value() {
        assert_eq!(Kind::Int.read(Some(b"1.5"), ""), None);
        assert_eq!(Kind::Text.read(Some(b"\xff"), ""), None);
        assert_eq!(Kind::Binary.read(Some(b"\xff"), ""), Some(Value::Binary(vec![0xff])));
        assert_eq!(Kind::Int.read(None, ""), Some(Value::Null));
    }
}
