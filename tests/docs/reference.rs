//! host/docs/reference.md: what in it is generated from the code is current, and what is written by hand names all there is.
//!
//! `UPDATE_DOCS=1 cargo test --workspace --test docs` writes it anew.

use std::{env, fmt::Write as _, fs, process::Command};

use pilothouse::{crd, identity, policy::TenantPolicy};
use serde_json::{Map, Value};

use super::{read, root};

/// One field of a custom resource.
struct Field {
    path: String,
    kind: String,
    default: String,
    meaning: String,
}

/// A part of a schema with all that is below it, in the order of the code.
fn fields(path: &str, schema: &Value, required: bool, fields: &mut Vec<Field>) {
    let is_object = schema["properties"].is_object();
    let default = match &schema["default"] {
        _ if required => "required".to_owned(),
        // Its parts have theirs.
        _ if is_object => String::new(),
        Value::Null => String::new(),
        default => format!("`{}`", default.as_str().map_or_else(|| default.to_string(), str::to_owned)),
    };
    let rules = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
    let rules: String =
        rules.filter_map(|rule| rule["message"].as_str()).map(|rule| format!(" Rule: {rule}.")).collect();
    let meaning = schema["description"].as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
    let meaning = format!("{meaning}{rules}").replace('|', "\\|");
    fields.push(Field { path: path.to_owned(), kind: kind(schema), default, meaning });
    below(path, schema, fields);
}

fn below(path: &str, schema: &Value, found: &mut Vec<Field>) {
    // What these consist of is Kubernetes' own, and long.
    if path == "spec.selector" || path == "status.conditions[]" {
        return;
    }
    let required = |name: &str| schema["required"].as_array().is_some_and(|names| names.iter().any(|it| it == name));
    for (name, part) in schema["properties"].as_object().unwrap_or(&Map::new()) {
        fields(&format!("{path}.{name}"), part, required(name), found);
    }
    for (suffix, part) in [("[]", &schema["items"]), (".*", &schema["additionalProperties"])] {
        if part.is_object() {
            below(&format!("{path}{suffix}"), part, found);
        }
    }
}

fn kind(schema: &Value) -> String {
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<_> = values.iter().filter_map(Value::as_str).map(|value| format!("`{value}`")).collect();
        return values.join(" or ");
    }
    let of = |part: &Value| kind(part);
    match schema["type"].as_str().unwrap_or_default() {
        "array" => format!("list of {}", of(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("map of {}", of(&schema["additionalProperties"]))
        }
        "object" if schema["x-kubernetes-preserve-unknown-fields"] == true => "any object".to_owned(),
        "string" if schema["format"] == "date-time" => "time".to_owned(),
        "integer" if schema["minimum"].is_number() => {
            format!("integer, at least {}", schema["minimum"].as_f64().unwrap_or_default())
        }
        other => other.to_owned(),
    }
}

fn table(fields: &[&Field]) -> String {
    let mut table = "| Field | Type | Default | Meaning |\n|---|---|---|---|\n".to_owned();
    for Field { path, kind, default, meaning } in fields {
        let _ = writeln!(table, "| `{path}` | {kind} | {default} | {meaning} |");
    }
    table
}

/// What the commands say of themselves.
fn help() -> String {
    let help = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilothouse"));
        let output = command.args(arguments).arg("-h").env_remove("PILOTHOUSE_LOG").output().expect("pilothouse runs");
        assert!(output.status.success(), "{arguments:?}");
        String::from_utf8(output.stdout).expect("it is text").lines().map(str::trim_end).fold(
            String::new(),
            |mut text, line| {
                let _ = writeln!(text, "{line}");
                text
            },
        )
    };
    let all = help(&[]);
    let commands = all.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands = commands.filter_map(|line| line.split_whitespace().next()).filter(|command| *command != "help");
    let mut text = format!("```console\n$ pilothouse -h\n{all}```\n");
    for command in commands {
        let _ = write!(
            text,
            "\n### `pilothouse {command}`\n\n```console\n$ pilothouse {command} -h\n{}```\n",
            help(&[command])
        );
    }
    text
}

/// The generated parts, by the name that the page gives them.
fn parts() -> Vec<(&'static str, String)> {
    let schemas: Vec<Value> = crd::definitions()
        .iter()
        .map(|definition| serde_json::to_value(&definition.spec.versions[0].schema).expect("it is JSON"))
        .collect();
    let part = |kind: usize, name: &str| {
        let mut found = Vec::new();
        below(name, &schemas[kind]["openAPIV3Schema"]["properties"][name], &mut found);
        found
    };
    let (of_cluster, of_namespace, status) = (part(0, "spec"), part(1, "spec"), part(0, "status"));
    let same = |field: &Field| {
        let is_same =
            |other: &&Field| (&other.path, &other.kind, &other.meaning) == (&field.path, &field.kind, &field.meaning);
        of_cluster.iter().any(|other| is_same(&other))
    };
    let own: Vec<_> = of_namespace.iter().filter(|field| !same(field)).collect();
    vec![
        ("the spec of a ClusterReconciler", table(&of_cluster.iter().collect::<Vec<_>>())),
        ("the spec of a Reconciler", table(&own)),
        ("the status", table(&status.iter().collect::<Vec<_>>())),
        ("the commands", help()),
    ]
}

#[test]
fn the_reference_is_current() {
    let path = root().join("host/docs/reference.md");
    let before = read(&path);
    let mut page = before.clone();
    for (name, part) in parts() {
        let (opening, closing) = (format!("<!-- generated: {name} -->\n"), "<!-- end -->");
        let place = page.find(&opening).map(|at| at + opening.len());
        let start = place.expect("the page has a place for each part, under its name");
        let end = start + page[start..].find(closing).expect("a generated part has an end");
        page.replace_range(start..end, &format!("\n{part}\n"));
    }
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, page).expect("reference.md can be written");
    } else {
        assert!(
            page == before,
            "host/docs/reference.md is not current; write it anew: UPDATE_DOCS=1 cargo test --workspace --test docs reference"
        );
    }
}

#[test]
fn the_reference_names_all_that_is_written_on_objects() {
    let page = read(&root().join("host/docs/reference.md"));
    for name in [
        identity::RECONCILER_LABEL,
        identity::PARENT_LABEL,
        identity::APPLIED_LABEL,
        identity::BINDING_ANNOTATION,
        identity::RECORD_ANNOTATION,
        identity::ALLOW_PRUNE_ANNOTATION,
        identity::HOST_LABEL,
        identity::DEV_LABEL,
    ] {
        assert!(page.contains(&format!("| `{name}` |")), "host/docs/reference.md does not name {name}");
    }
}

#[test]
fn the_policy_in_the_reference_is_one() {
    let page = read(&root().join("host/docs/reference.md"));
    let policy = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("there is an example");
    assert_ne!(TenantPolicy::read(policy).expect("it can be read"), TenantPolicy::default());
}
