//! Guests as text, for tests: core modules, made into components of a contract.

use std::path::Path;

use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// The contract in a folder beside `host`, as one text.
pub(super) fn contract(folder: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
    // The one that begins with the name of the package has to be the first.
    files.sort_by_key(|file| (!file.ends_with("types.wit"), file.clone()));
    files.iter().map(|file| std::fs::read_to_string(file).unwrap() + "\n").collect()
}

/// A text of WAT that is these bytes.
pub(super) fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\{byte:02x}")).collect()
}

/// A component of the world `guest { <imports and exports> }` beside a contract.
pub(super) fn component(wat: &str, contract: &str, world: &str) -> Vec<u8> {
    let mut module = wat::parse_str(wat).unwrap();
    let mut resolve = Resolve::default();
    let package = resolve.push_str("guest.wit", &format!("{contract}\nworld guest {{ {world} }}")).unwrap();
    let world = resolve.select_world(&[package], Some("guest")).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false).unwrap();
    ComponentEncoder::default().validate(true).module(&module).unwrap().encode().unwrap()
}
