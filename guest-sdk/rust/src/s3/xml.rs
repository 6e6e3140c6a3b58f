//! The little XML that S3 speaks: elements with text, without attributes that matter. By hand, since a reader of all XML would be larger than
//! most plugins.

/// What is between the tags of each element of this name, from the first on. One within another of the same name is not told apart.
pub(super) fn elements<'a>(document: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let mut rest = document;
    std::iter::from_fn(move || {
        let (inner, after) = element(rest, name)?;
        rest = after;
        Some(inner)
    })
}

/// The text of the first element of this name.
pub(super) fn text(document: &str, name: &str) -> Option<String> {
    element(document, name).map(|(inner, _)| unescape(inner))
}

/// The inside of the first element of this name, and what comes after it.
fn element<'a>(document: &'a str, name: &str) -> Option<(&'a str, &'a str)> {
    let mut rest = document;
    loop {
        let (_, tag) = rest.split_once('<')?;
        let (tag, after) = tag.split_once('>')?;
        rest = after;
        if tag.strip_suffix('/').unwrap_or(tag).split_ascii_whitespace().next() != Some(name) {
            continue;
        }
        if tag.ends_with('/') {
            return Some(("", after));
        }
        return after.split_once(&format!("</{name}>"));
    }
}

/// Text as it may stand in an element.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            // As they are, readers make line ends and spaces of them.
            '\t' | '\n' | '\r' => escaped.push_str(&format!("&#{};", u32::from(character))),
            character => escaped.push(character),
        }
    }
    escaped
}

/// What is no entity stays as it is.
fn unescape(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, entity)) = rest.split_once('&') {
        plain.push_str(before);
        let known = entity.split_once(';').and_then(|(name, after)| Some((character(name)?, after)));
        let (character, after) = known.unwrap_or(('&', entity));
        plain.push(character);
        rest = after;
    }
    plain.push_str(rest);
    plain
}

fn character(entity: &str) -> Option<char> {
    match entity {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        entity => {
            let number = entity.strip_prefix('#')?;
            let number = match number.strip_prefix(['x', 'X']) {
                Some(hex) => u32::from_str_radix(hex, 16),
                None => number.parse(),
            };
            char::from_u32(number.ok()?)
        }
    }
}

/// Text that is encoded like that of a form: `+` is a space. What is no escape stays as it is, and what is no UTF-8 is replaced.
pub(super) fn decode_url(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let mut ahead = rest.clone();
        let mut digit =
            || ahead.next().and_then(|byte| char::from(byte).to_digit(16)).and_then(|it| u8::try_from(it).ok());
        match (byte, digit(), digit()) {
            (b'%', Some(high), Some(low)) => {
                bytes.push(high << 4 | low);
                rest = ahead;
            }
            (b'+', ..) => bytes.push(b' '),
            _ => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Prefix/><KeyCount>2</KeyCount>
  <Contents><Key>a&amp;b &lt;1&gt;</Key><Owner><ID>x</ID></Owner><Size>3</Size></Contents>
  <Contents ><Key>&#228;&#x41;&unknown; &</Key></Contents>
  <NextContinuationToken>t==</NextContinuationToken>
</ListBucketResult>"#;

    #[test]
    fn elements_are_found_and_their_text_is_read() {
        let entries: Vec<_> = elements(LIST, "Contents").collect();
        assert_eq!(entries.len(), 2);
        assert_eq!(text(entries[0], "Key").as_deref(), Some("a&b <1>"));
        assert_eq!(text(entries[0], "Size").as_deref(), Some("3"));
        assert_eq!(text(entries[1], "Key").as_deref(), Some("äA&unknown; &"));
        assert_eq!(text(entries[1], "Size"), None);
        assert_eq!(text(LIST, "NextContinuationToken").as_deref(), Some("t=="));
        assert_eq!(text(LIST, "Prefix").as_deref(), Some(""));
        assert_eq!(text(LIST, "Key2"), None);
    }

    #[test]
    fn what_is_broken_off_has_no_element() {
        for broken in ["", "<", "<Key", "<Key>a", "<Key>a</Ke>", "Key>a</Key>", "<>"] {
            assert_eq!(text(broken, "Key"), None, "{broken}");
        }
    }

    #[test]
    fn what_is_escaped_is_read_as_it_was() {
        for plain in ["a & b < c > d", "&amp;", "line\r\nend\t", "ä", ""] {
            assert_eq!(unescape(&escape(plain)), plain);
            assert!(!escape(plain).contains(['<', '>', '\n']));
        }
    }

    #[test]
    fn keys_are_decoded_as_those_of_forms() {
        for (encoded, key) in
            [("a%2Fb+c", "a/b c"), ("%C3%A4", "ä"), ("100%", "100%"), ("%zz%4", "%zz%4"), ("%2B", "+")]
        {
            assert_eq!(decode_url(encoded), key);
        }
    }
}
