//! Names of what a plugin makes outside of the cluster: the same for the same parent, always, and for no other.
//!
//! A plugin that thinks up a name and notes it afterwards makes a twin if it ends in between. One whose name comes from the parent's UID
//! asks for the same thing again, and finds it. A parent that is made anew, or comes back from a backup, has another UID, and so another
//! name: what has to outlive that belongs to a name in the spec.
//!
//! ```
//! # use pilothouse_sdk::{Metadata, external, Failure};
//! # fn main() -> Result<(), String> {
//! # let metadata = Metadata { uid: "0f1d2c3b-4a59-6877-8695-a4b3c2d1e0ff".into(), ..Metadata::default() };
//! let bucket = external::label("shop", &metadata).map_err(|failure| failure.message().to_owned())?;
//! assert_eq!(bucket, "shop-0f1d2c3b4a5968778695a4b3c2d1e0ff");
//! # Ok(())
//! # }
//! ```

use crate::{Failure, Metadata};

/// The longest prefix: with it and the UID a name has 63 characters at most, which is what DNS, S3 and PostgreSQL take.
const MAX_PREFIX: usize = 30;

/// A name in lower-case letters, digits and hyphens: a label of DNS, or a bucket.
///
/// # Errors
/// [`Failure::terminal`] if the prefix is not 1 to 30 lower-case letters, digits and single hyphens that begins with a letter and does not end
/// with a hyphen, or if the parent has no UID.
pub fn label(prefix: &str, parent: &Metadata) -> Result<String, Failure> {
    name(prefix, '-', parent)
}

/// A name in lower-case letters, digits and underscores: an identifier of SQL that needs no quotes.
///
/// # Errors
/// As [`label`], with underscores for hyphens.
pub fn identifier(prefix: &str, parent: &Metadata) -> Result<String, Failure> {
    name(prefix, '_', parent)
}

fn name(prefix: &str, separator: char, parent: &Metadata) -> Result<String, Failure> {
    let is_plain =
        |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == separator;
    let is_good = (1..=MAX_PREFIX).contains(&prefix.len())
        && prefix.chars().all(is_plain)
        && prefix.starts_with(|first: char| first.is_ascii_lowercase())
        && !prefix.ends_with(separator)
        && !prefix.contains([separator; 2].map(String::from).concat().as_str());
    if !is_good {
        return Err(Failure::terminal(format!(
            "{prefix:?} is no prefix of a name: it has to be 1 to {MAX_PREFIX} lower-case letters, digits and {separator}, beginning with a letter"
        )));
    }
    Ok(format!("{prefix}{separator}{}", of_uid(&parent.uid)?))
}

/// A UID as 32 hexadecimal digits.
fn of_uid(uid: &str) -> Result<String, Failure> {
    if uid.is_empty() {
        return Err(Failure::terminal("the parent has no metadata.uid, which names of what is outside are made from"));
    }
    let plain: String = uid.chars().filter(|character| *character != '-').collect();
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if plain.len() == 32 && plain.bytes().all(is_hex) {
        return Ok(plain);
    }
    // API servers give UUIDs, and promise no more than that it is unique. FNV-1a, since it has to be the same for ever.
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in uid.bytes() {
        hash = (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    Ok(format!("{hash:032x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(uid: &str) -> Metadata {
        Metadata { uid: uid.to_owned(), ..Metadata::default() }
    }

    #[test]
    fn a_name_is_prefix_and_uid() {
        let parent = parent("0f1d2c3b-4a59-6877-8695-a4b3c2d1e0ff");
        assert_eq!(label("a-shop", &parent).unwrap(), "a-shop-0f1d2c3b4a5968778695a4b3c2d1e0ff");
        assert_eq!(identifier("a_shop", &parent).unwrap(), "a_shop_0f1d2c3b4a5968778695a4b3c2d1e0ff");
        assert_eq!(label(&"x".repeat(MAX_PREFIX), &parent).unwrap().len(), 63);
    }

    #[test]
    fn a_uid_of_another_form_gives_a_name_of_the_same_form() {
        // The hash of FNV's own tables, for "foobar".
        assert_eq!(label("x", &parent("foobar")).unwrap(), "x-343e1662793c64bf6f0d3597ba446f18");
        assert_ne!(label("x", &parent("A")), label("x", &parent("a")));
        assert_eq!(label("x", &parent(&"9".repeat(200))).unwrap().len(), 34);
    }

    #[test]
    fn what_would_be_no_name_is_refused() {
        for prefix in ["", "Shop", "1shop", "-shop", "shop-", "a--b", "a_b", "a.b", "ä", &"x".repeat(MAX_PREFIX + 1)] {
            assert!(label(prefix, &parent("a")).is_err(), "{prefix:?}");
        }
        assert!(label("shop", &parent("")).is_err(), "all parents would share a name");
        assert!(identifier("a-b", &parent("a")).is_err());
    }
}
