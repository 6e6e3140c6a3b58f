//! Tests of the documentation: its commands are run, its reference is generated, and no reason is left unexplained.
//!
//! README.md and the pages of host/docs are read as a reader does who does all that they say, on a control plane of their own
//! ([`page`] says what counts as a command, [`shell`] how they are run).

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

mod page;
mod reasons;
mod reference;
mod shell;

use page::Page;

/// The checkout.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("host is in the checkout").to_owned()
}

fn read(path: &Path) -> String {
    let text = fs::read_to_string(path);
    assert!(text.is_ok(), "{}: {text:?}", path.display());
    text.unwrap_or_default()
}

fn pages() -> Vec<Page> {
    let folder = root().join("host/docs");
    let entries = fs::read_dir(&folder).expect("the folder of the documentation is there");
    let files = entries.map(|entry| entry.expect("it can be read").path());
    let mut files: Vec<_> = files.filter(|file| file.extension().is_some_and(|extension| extension == "md")).collect();
    files.push(root().join("README.md"));
    files.sort();
    files.iter().map(|file| Page::read(file)).collect()
}

#[test]
fn every_command_of_the_documentation_does_what_it_says() {
    let pages = pages();
    let failures: Vec<_> = thread::scope(|scope| {
        let with_commands = pages.iter().filter(|page| !page.steps.is_empty());
        let runs: Vec<_> = with_commands.map(|page| scope.spawn(|| shell::follow(page))).collect();
        runs.into_iter().filter_map(|run| run.join().expect("a page is followed to its end").err()).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
