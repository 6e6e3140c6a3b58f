//! What a page asks of its reader: commands to run, what they print, and files to write.
//!
//! * A block of `sh` is run, in the order of the page and in one shell.
//! * A block of `text` is what the commands before it print: its lines, in that order, with others between them. `…` in it stands
//!   for anything, and so does the width of a space.
//! * A block under a line that is only a name, as in `` `src/lib.rs`: ``, is a file of that name.
//! * Code in a table that begins with `kubectl` is run, too.
//! * A block under `<!-- not run: why -->` is none of these, and so is a block in any other language.

use std::path::{Path, PathBuf};

/// A page of the documentation.
pub(crate) struct Page {
    /// Where it is.
    pub(crate) file: PathBuf,
    /// What a reader does, in order.
    pub(crate) steps: Vec<Step>,
}

/// One thing to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The line of the page on which it begins.
    pub(crate) line: usize,
    pub(crate) what: What,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Commands, and lines of what they print.
    Run { commands: String, prints: Vec<String> },
    /// A file, by its name from the folder that the reader is in.
    Write { name: String, text: String },
}

impl Page {
    pub(crate) fn read(file: &Path) -> Self {
        Self { file: file.to_owned(), steps: steps(&super::read(file)) }
    }

    /// Its name, without folder and ending.
    pub(crate) fn name(&self) -> String {
        self.file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }
}

fn steps(text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    // The last line before a block that is not empty.
    let mut above = "";
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let Some(language) = line.strip_prefix("```") else {
            if line.starts_with('|') {
                let commands = code(line).filter(|code| code.starts_with("kubectl "));
                steps.extend(commands.map(|commands| run(at, commands.replace("\\|", "|"))));
            }
            if !line.trim().is_empty() {
                above = line.trim();
            }
            continue;
        };
        let inside: Vec<_> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let introduced = std::mem::take(&mut above);
        if introduced.starts_with("<!-- not run: ") {
            continue;
        }
        let text = inside.iter().map(|line| format!("{line}\n")).collect();
        let name = introduced.strip_prefix('`').and_then(|rest| rest.strip_suffix("`:"));
        match (name, language) {
            (Some(name), _) => steps.push(Step { line: at + 1, what: What::Write { name: name.to_owned(), text } }),
            (None, "sh") => steps.push(run(at, text)),
            (None, "text") => {
                let before = steps.last_mut().map(|step| &mut step.what);
                assert!(matches!(before, Some(What::Run { .. })), "line {}: no commands print this", at + 1);
                if let Some(What::Run { prints, .. }) = before {
                    prints.extend(inside.into_iter().map(str::to_owned));
                }
            }
            _ => {}
        }
    }
    steps
}

fn run(at: usize, commands: String) -> Step {
    Step { line: at + 1, what: What::Run { commands, prints: Vec::new() } }
}

/// What stands between backquotes.
fn code(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The first of the lines that is not in the output behind those before it.
pub(crate) fn missing<'a>(prints: &'a [String], output: &str) -> Option<&'a str> {
    let mut printed = output.lines();
    prints.iter().find(|line| !printed.any(|printed| is_like(line, printed))).map(String::as_str)
}

/// Whether the line was printed: `…` in it stands for anything.
fn is_like(line: &str, printed: &str) -> bool {
    let [line, printed] = [line, printed].map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let mut parts = line.split('…').map(str::trim);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = printed.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
        last = Some(part);
    }
    last.map_or(rest.is_empty(), |last| last.is_empty() || printed.ends_with(last))
}

#[test]
fn a_page_is_read_as_its_reader_reads_it() {
    let page = "\
Words.

`a/b.txt`:

```rust
let a;
```

<!-- not run: no network -->

```sh
never
```

```sh
one
two
```

which prints

```text
1  …
```

| `not` | `kubectl get a \\| wc -l` |

```console
$ three
```
";
    let run = |line, commands: &str, prints: &[&str]| Step {
        line,
        what: What::Run { commands: commands.into(), prints: prints.iter().map(ToString::to_string).collect() },
    };
    let write = What::Write { name: "a/b.txt".into(), text: "let a;\n".into() };
    let expected =
        [Step { line: 5, what: write }, run(15, "one\ntwo\n", &["1  …"]), run(26, "kubectl get a | wc -l", &[])];
    assert_eq!(steps(page), expected);
}

#[test]
fn what_is_printed_is_looked_for_in_order() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let output = "NAME   AGE\nada    12s\nbob    3s\n";
    assert_eq!(missing(&lines("NAME AGE\nbob …"), output), None);
    assert_eq!(missing(&lines("NAME AGE\na…s"), output), None);
    assert_eq!(missing(&lines("bob …\nada …"), output), Some("ada …"));
    assert_eq!(missing(&lines("ada"), output), Some("ada"));
    assert_eq!(missing(&lines("ada … m"), output), Some("ada … m"));
}
