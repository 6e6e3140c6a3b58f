//! How the tools write their answer: text for a person, or JSON for a program.

use std::io::{self, Write};

use anstyle::Style;
use serde::Serialize;

/// How an answer is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For a person.
    #[default]
    Text,
    /// A JSON object.
    Json,
}

/// Writes a JSON document to standard output.
///
/// # Errors
/// If it cannot be written.
pub fn json(document: &impl Serialize) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    serde_json::to_writer_pretty(&mut stdout, document)?;
    writeln!(stdout)
}

/// Writes YAML documents to standard output, ready for `kubectl apply -f -`.
///
/// # Errors
/// If they cannot be written.
pub fn yaml<T: Serialize>(documents: &[T]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    documents.iter().try_for_each(|document| write!(stdout, "---\n{}", to_yaml(document)?))
}

/// A value as YAML, with a line break at the end.
///
/// # Errors
/// If it cannot be written as YAML.
pub fn to_yaml(value: &impl Serialize) -> io::Result<String> {
    let text = serde_saphyr::to_string(value).map_err(io::Error::other)?;
    Ok(format!("{}\n", text.trim_end()))
}

/// A line for each row, with the cells of a column below each other.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

const LABEL: Style = Style::new().bold();
const NOTHING: Style = Style::new().dimmed();

/// Labels, and beside each what there is, a line each. With styles; write it to a stream of `anstream`, which leaves them out
/// where they would not be understood.
pub fn labelled(rows: &[(&str, Vec<String>)]) -> String {
    let width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or_default();
    let none = [format!("{NOTHING}none{NOTHING:#}")];
    let mut text = String::new();
    for (label, values) in rows {
        let values = if values.is_empty() { &none[..] } else { values };
        for (at, value) in values.iter().enumerate() {
            let label = if at == 0 { *label } else { "" };
            text += &format!("{LABEL}{label:width$}{LABEL:#}  {value}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_stands_beside_its_label() {
        let rows =
            [("Parent", vec!["a".to_owned()]), ("Children", vec!["b".to_owned(), "c".to_owned()]), ("CRDs", vec![])];
        let text = anstream::adapter::strip_str(&labelled(&rows)).to_string();
        assert_eq!(text, "Parent    a\nChildren  b\n          c\nCRDs      none\n");
    }

    #[test]
    fn columns_stand_below_each_other_and_lines_end_where_the_text_does() {
        let rows = [["a", "é"], ["long", ""], ["b", "c"]].map(|row| row.map(str::to_owned));
        assert_eq!(columns(&rows), ["a     é", "long", "b     c"]);
        assert_eq!(columns::<2>(&[]), Vec::<String>::new());
    }

    #[test]
    fn yaml_ends_with_one_line_break() {
        assert_eq!(to_yaml(&serde_json::json!({"a": {"b": "1"}})).unwrap(), "a:\n  b: \"1\"\n");
    }
}
