//! Kubernetes quantities by value: the API server writes `1000m` as `1` and `2048Mi` as `2Gi`.
//!
//! The grammar is that of k8s.io/apimachinery/pkg/api/resource, `Quantity`.

use serde_json::Value;

/// An amount as `digits` · 10^`exponent`, without zeros at the end, so that equal amounts are equal values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantity {
    digits: i128,
    exponent: i32,
}

/// The amount that a JSON number or string says. None: it is no quantity, or one beyond all use.
pub fn quantity(value: &Value) -> Option<Quantity> {
    match value {
        Value::Number(number) => parse(&number.to_string()),
        Value::String(text) => parse(text),
        _ => None,
    }
}

fn parse(text: &str) -> Option<Quantity> {
    let (negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let (factor, exponent) = scale(suffix)?;
    let digits = digits.checked_mul(factor)?;
    let exponent = exponent.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    Some(normalized(if negative { -digits } else { digits }, exponent))
}

/// What a suffix stands for: a factor, and a power of ten.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    if let Some(binary) = suffix.strip_suffix('i') {
        let power = ["K", "M", "G", "T", "P", "E"].iter().position(|unit| *unit == binary)?;
        return Some((1 << (10 * (power + 1)), 0));
    }
    let decimal = match suffix {
        "n" => -9,
        "u" => -6,
        "m" => -3,
        "" => 0,
        "k" => 3,
        "M" => 6,
        "G" => 9,
        "T" => 12,
        "P" => 15,
        "E" => 18,
        _ => suffix.strip_prefix(['e', 'E'])?.parse().ok()?,
    };
    Some((1, decimal))
}

fn normalized(mut digits: i128, mut exponent: i32) -> Quantity {
    if digits == 0 {
        return Quantity { digits, exponent: 0 };
    }
    while digits % 10 == 0 {
        digits /= 10;
        exponent = exponent.saturating_add(1);
    }
    Quantity { digits, exponent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_amounts_are_equal() {
        for (left, right) in [
            ("1000m", "1"),
            ("0.5", "500m"),
            ("+.5", "500m"),
            ("2048Mi", "2Gi"),
            ("0.5Gi", "512Mi"),
            ("1e3", "1k"),
            ("1E3", "1000"),
            ("1E", "1e18"),
            ("100e-3", "0.1"),
            ("0", "0Mi"),
            ("-1.50", "-1500m"),
            ("5.", "5"),
        ] {
            assert!(parse(left).is_some(), "{left}");
            assert_eq!(parse(left), parse(right), "{left} {right}");
        }
    }

    #[test]
    fn other_amounts_and_other_texts_are_not() {
        assert_ne!(parse("1M"), parse("1Mi"));
        assert_ne!(parse("1m"), parse("1M"));
        for text in [
            "",
            "-",
            ".",
            "a",
            "1.2.3",
            "1x",
            "1ki",
            "1 ",
            "é",
            "1e",
            "60s",
            "1m0s",
            "99999999999999999999999999999999999999999",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
