//! What a component shows on its outside: the names of its imports and exports, read from its bytes without compiling them, so
//! that also one which this host cannot run says what it is.

use serde::Serialize;
use wasmparser::{BinaryReaderError, Encoding, Parser, Payload};

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surface {
    /// What kind of WebAssembly it is.
    pub format: Format,
    /// What it imports, sorted: the order of the file means nothing. Those of a core module as `module::name`.
    pub imports: Vec<String>,
    /// What it exports, likewise.
    pub exports: Vec<String>,
}

/// A kind of WebAssembly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Format {
    /// A component: what plugins are.
    Component,
    /// A core module: what is inside of components.
    Module,
    /// No WebAssembly that begins as it should.
    Unknown,
}

impl Surface {
    /// That of a file, or of as much of it as can be read.
    pub fn of(bytes: &[u8]) -> Self {
        let mut surface = Self { format: Format::Unknown, imports: Vec::new(), exports: Vec::new() };
        // What is broken is the compiler's to say, and precisely.
        let _ = surface.read(bytes);
        surface.imports.sort_unstable();
        surface.exports.sort_unstable();
        surface
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), BinaryReaderError> {
        // Components hold modules and other components, whose imports and exports are their own affair.
        let mut depth = 0_u32;
        for payload in Parser::new(0).parse_all(bytes) {
            match payload? {
                Payload::Version { encoding, .. } if depth == 0 && self.format == Format::Unknown => {
                    self.format = match encoding {
                        Encoding::Component => Format::Component,
                        Encoding::Module => Format::Module,
                    };
                }
                Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
                Payload::End(_) => depth = depth.saturating_sub(1),
                _ if depth > 0 => {}
                Payload::ComponentImportSection(section) => {
                    for import in section {
                        self.imports.push(import?.name.full_name().into_owned());
                    }
                }
                Payload::ComponentExportSection(section) => {
                    for export in section {
                        self.exports.push(export?.name.full_name().into_owned());
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import?;
                        self.imports.push(format!("{}::{}", import.module, import.name));
                    }
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        self.exports.push(export?.name.to_owned());
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(component (import "a:b/c@1.0.0" (instance)) (core module (export "inner" (memory ..)) ..) (export ..))`, by hand: the
    /// preamble, one import of an instance of an empty type, and what follows.
    const PREAMBLE: &[u8] = b"\0asm\x0d\0\x01\0";
    /// Type section: one instance type without members.
    const EMPTY_INSTANCE_TYPE: &[u8] = b"\x07\x03\x01\x42\x00";
    /// Import section: `a:b/c@1.0.0`, an instance of type 0.
    const IMPORT: &[u8] = b"\x0a\x10\x01\x00\x0ba:b/c@1.0.0\x05\x00";
    /// A core module that exports its memory as `inner`.
    const MODULE: &[u8] = b"\x01\x18\0asm\x01\0\0\0\x05\x03\x01\0\0\x07\x09\x01\x05inner\x02\0";
    /// Export section: that instance as `d:e/f@1.0.0`.
    const EXPORT: &[u8] = b"\x0b\x11\x01\x00\x0bd:e/f@1.0.0\x05\x00\x00";

    #[test]
    fn imports_and_exports_of_a_component_and_not_of_what_is_in_it() {
        let component = [PREAMBLE, EMPTY_INSTANCE_TYPE, IMPORT, MODULE, EXPORT].concat();
        let surface = Surface::of(&component);
        assert_eq!(surface.format, Format::Component);
        assert_eq!(
            (surface.imports, surface.exports),
            (vec!["a:b/c@1.0.0".to_owned()], vec!["d:e/f@1.0.0".to_owned()])
        );
    }

    #[test]
    fn what_is_cut_off_is_read_as_far_as_it_goes() {
        let component = [PREAMBLE, EMPTY_INSTANCE_TYPE, IMPORT, MODULE, EXPORT].concat();
        let surface = Surface::of(&component[..component.len() - 5]);
        assert_eq!((surface.format, surface.imports.len(), surface.exports.len()), (Format::Component, 1, 0));
        for bytes in [&b""[..], b"\0as", b"#!/bin/sh"] {
            assert_eq!(Surface::of(bytes).format, Format::Unknown);
        }
    }

    #[test]
    fn a_core_module() {
        let surface = Surface::of(&MODULE[2..]);
        assert_eq!((surface.format, surface.exports), (Format::Module, vec!["inner".to_owned()]));
    }
}
