//! `pilothouse inspect`.

use std::fs;

use serde_json::{Value, json};

use crate::{Files, component, pilothouse};

/// What stands beside a label, its first line.
fn row(text: &str, label: &str) -> String {
    let line = text.lines().find(|line| line.starts_with(label)).expect(label);
    line[label.len()..].trim().to_owned()
}

#[test]
fn a_plugin_is_shown_to_a_person() {
    let file = component("myapp");
    let text = pilothouse(&["inspect", &file]).with_code(0).stdout;
    assert_eq!(row(&text, "File"), file);
    assert_eq!(row(&text, "Format"), "WebAssembly component");
    assert_eq!(row(&text, "Exports"), "pilothouse:plugin/finalizer@0.1.0");
    assert_eq!(row(&text, "Parent"), "MyApp  mygroup.example.com/v1");
    assert_eq!(row(&text, "Children"), "Deployment  apps/v1");
    assert!(text.contains("\n              ConfigMap   v1\n"), "{text}");
    assert_eq!(row(&text, "CRDs"), "myapps.mygroup.example.com  v1");
    assert_eq!(row(&text, "Rights"), "none");
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal: {text}");
    assert!(!text.contains("not served"), "{text}");
}

#[test]
fn a_plugin_is_shown_to_a_program() {
    let file = component("mirror");
    let bytes = fs::read(&file).unwrap();
    let json = pilothouse(&["inspect", &file, "-o", "json"]).with_code(0).json();
    assert_eq!(
        (&json["file"], &json["size"], &json["format"]),
        (&json!(file), &json!(bytes.len()), &json!("component"))
    );
    assert_eq!(json["digest"].as_str().unwrap().len(), 64);
    let served = |name: &str| json!({"name": format!("pilothouse:plugin/{name}@0.1.0"), "served": true});
    let has = |list: &str, name: &str| json[list].as_array().unwrap().contains(&served(name));
    assert!(has("exports", "reconciler") && has("exports", "finalizer") && has("imports", "log"), "{json}");
    assert_eq!(json["parent"], json!({"apiVersion": "t.example/v1", "kind": "Widget"}));
    assert!(json["children"].as_array().unwrap().contains(&json!({"apiVersion": "v1", "kind": "Pod"})));
    assert!(json["crds"].as_array().unwrap().contains(&json!({"name": "widgets.t.example", "versions": ["v1"]})));
    assert_eq!((&json["capabilities"], &json["configSchema"], &json["rights"]), (&json!([]), &Value::Null, &json!([])));
    assert_eq!(json.get("error"), None);
}

#[test]
fn an_import_that_is_not_served_is_shown_and_then_refused_as_the_host_would() {
    let file = Files::of("import").edited("mirror", "pilothouse:plugin/log@", "pilothouse:plugin/ftp@");
    let shown = pilothouse(&["inspect", &file]).with_code(1);
    assert!(shown.stdout.contains("pilothouse:plugin/ftp@0.1.0    not served by this host\n"), "{shown:?}");
    assert!(!shown.stdout.contains("Parent"), "it cannot be asked: {shown:?}");
    let error = "error: the plugin imports pilothouse:plugin/ftp@0.1.0, which this host does not serve; ";
    let serves = "it serves log, http, kube and sql of pilothouse:plugin@0.1.0, and WASI 0.2 without wasi:http\n";
    assert_eq!(shown.stderr, format!("{error}{serves}"));

    let json = pilothouse(&["inspect", &file, "-o", "json"]).with_code(1).json();
    let unserved = json!({"name": "pilothouse:plugin/ftp@0.1.0", "served": false});
    assert!(json["imports"].as_array().unwrap().contains(&unserved), "{json}");
    assert_eq!(format!("error: {}\n", json["error"].as_str().unwrap()), shown.stderr);
}

#[test]
fn a_part_of_another_version_is_refused() {
    let file =
        Files::of("version").edited("mirror", "pilothouse:plugin/finalizer@0.1.0", "pilothouse:plugin/finalizer@0.2.0");
    let shown = pilothouse(&["inspect", &file]).with_code(1);
    assert_eq!(row(&shown.stdout, "Exports"), "pilothouse:plugin/finalizer@0.2.0   not served by this host");
    assert!(
        shown.stderr.contains("exports pilothouse:plugin/finalizer@0.2.0, which this host does not know"),
        "{shown:?}"
    );
}

#[test]
fn relations_are_a_part_like_others_and_one_that_is_not_as_the_contract_has_it_is_refused() {
    let shown = pilothouse(&["inspect", &component("reach")]).with_code(0);
    assert!(shown.stdout.contains("pilothouse:plugin/relations@0.1.0\n"), "{shown:?}");
    assert_eq!(row(&shown.stdout, "Related"), "ConfigMap  v1");
    // A finalizer by the name of relations.
    let file = Files::of("relations").edited("mirror", "pilothouse:plugin/finalizer@", "pilothouse:plugin/relations@");
    let shown = pilothouse(&["inspect", &file]).with_code(1);
    assert!(
        shown.stderr.contains(
            "does not keep the contract that it exports: instance export `pilothouse:plugin/relations@0.1.0`"
        ),
        "{shown:?}"
    );
}

#[test]
fn a_core_module_and_what_is_broken_are_shown_as_far_as_they_can_be_read() {
    let files = Files::of("broken");
    let module = files.write("module.wasm", b"\0asm\x01\0\0\0\x05\x03\x01\0\0\x07\x09\x01\x05inner\x02\0");
    let shown = pilothouse(&["inspect", &module]).with_code(1);
    assert_eq!(
        (row(&shown.stdout, "Format"), row(&shown.stdout, "Exports")),
        ("WebAssembly core module".into(), "inner  not served by this host".into())
    );
    assert!(shown.stderr.contains("core module, not a component"), "{shown:?}");

    // Its imports are at the beginning, and its exports at the end.
    let bytes = fs::read(component("mirror")).unwrap();
    let truncated = files.write("truncated.wasm", &bytes[..bytes.len() / 2]);
    let shown = pilothouse(&["inspect", &truncated]).with_code(1);
    assert_eq!(
        (row(&shown.stdout, "Exports"), row(&shown.stdout, "Size")),
        ("none".into(), format!("{} KB ({} bytes)", (bytes.len() / 2).div_ceil(1000), bytes.len() / 2))
    );
    assert!(shown.stdout.contains("pilothouse:plugin/log@0.1.0"), "{shown:?}");
    assert!(shown.stderr.starts_with("error: failed to compile the plugin"), "{shown:?}");

    let text = files.write("text.wasm", "not even close");
    let shown = pilothouse(&["inspect", &text]).with_code(1);
    assert_eq!(row(&shown.stdout, "Format"), "no WebAssembly");

    let missing = pilothouse(&["inspect", "missing.wasm"]).with_code(1);
    assert!(missing.stderr.starts_with("error: failed to read missing.wasm: "), "{missing:?}");
    assert_eq!(missing.stdout, "");
}
