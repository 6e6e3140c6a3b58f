//! `pilothouse render`.

use serde_json::{Value, json};

use crate::{Files, Ran, component, pilothouse, pilothouse_reads};

const MYAPP: &str = "\
apiVersion: mygroup.example.com/v1
kind: MyApp
metadata:
  name: web
spec:
  image: nginx:1.27
  replicas: 2
  config:
    greeting: hello
";

/// A Widget, with what the mirror is to answer.
fn widget(spec: Value) -> String {
    json!({"apiVersion": "t.example/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": spec}).to_string()
}

fn mirror(spec: Value, more: &[&str]) -> Ran {
    let mirror = component("mirror");
    pilothouse_reads(&[&["render", &mirror, "-"], more].concat(), &widget(spec))
}

fn myapp(parent: &str, more: &[&str]) -> Ran {
    let myapp = component("myapp");
    pilothouse_reads(&[&["render", &myapp, "-"], more].concat(), parent)
}

fn documents(yaml: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(yaml).expect(yaml)
}

#[test]
fn standard_output_is_the_children_and_nothing_else() {
    let rendered = myapp(MYAPP, &[]).with_code(0);
    let children = documents(&rendered.stdout);
    let of = |kind: &str| children.iter().find(|child| child["kind"] == kind).unwrap();
    assert_eq!(children.len(), 2);
    let (deployment, config_map) = (of("Deployment"), of("ConfigMap"));
    assert_eq!(deployment["metadata"]["namespace"], "default");
    assert_eq!(deployment["spec"]["replicas"], 2);
    assert_eq!(config_map["data"], json!({"greeting": "hello"}));
    let expected = "Children    2\n\
        Status      availableReplicas: 0\n\
        Conditions  Available  False  DeploymentMissing  the Deployment does not exist yet\n\
        Events      none\n\
        Next        when something changes\n";
    assert_eq!(rendered.stderr, expected);
}

#[test]
fn one_json_object_has_all_of_it() {
    let json = myapp(MYAPP, &["-o", "json"]).with_code(0).json();
    assert_eq!(json["children"][1]["object"]["spec"]["replicas"], 2);
    assert_eq!(
        (&json["children"][0]["kind"], &json["children"][0]["name"]),
        (&"ConfigMap".into(), &"web-config".into())
    );
    assert_eq!(json["status"], json!({"availableReplicas": 0}));
    assert_eq!(json["conditions"][0]["reason"], "DeploymentMissing");
    assert_eq!(json["next"], json!({"when": "onChange"}));
    assert_eq!(json["children"][0].get("action"), None);
}

#[test]
fn children_that_are_as_they_should_be_are_no_difference() {
    let files = Files::of("unchanged");
    let children = files.write("children.yaml", myapp(MYAPP, &[]).stdout);
    let same = myapp(MYAPP, &["--children", &children]).with_code(0);
    assert_eq!(same.stdout, "unchanged ConfigMap default/web-config\nunchanged Deployment default/web\n");
    assert!(same.stderr.contains("0 to create, 0 to change, 0 to delete, 2 unchanged"), "{same:?}");
    assert!(same.stderr.contains("ReplicasUnavailable"), "the plugin sees its children: {same:?}");
}

#[test]
fn what_would_change_is_a_diff_and_exit_code_2() {
    let files = Files::of("changed");
    let children = files.write("children.yaml", myapp(MYAPP, &[]).stdout);
    let other = MYAPP.replace("1.27", "1.28").replace("  config:\n    greeting: hello\n", "");
    let changed = myapp(&other, &["--children", &children]).with_code(2);
    assert!(changed.stdout.contains("change Deployment default/web\n--- live\n+++ wanted\n"), "{changed:?}");
    assert!(changed.stdout.contains("-      - image: nginx:1.27\n+      - image: nginx:1.28\n"), "{changed:?}");
    assert!(changed.stdout.contains("delete ConfigMap default/web-config\n"), "{changed:?}");
    assert!(!changed.stdout.contains("volumes"), "who sent them is not told: {changed:?}");
    assert!(changed.stderr.contains("note: not all children tell their managed fields"), "{changed:?}");

    // As a cluster has it, with what the host applied, and what others made of it.
    let mut deployment = documents(&myapp(MYAPP, &[]).stdout).remove(1);
    deployment["spec"]["replicas"] = json!(2);
    deployment["spec"]["paused"] = json!(false);
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    deployment["status"] = json!({"availableReplicas": 2});
    deployment["metadata"]["managedFields"] = json!([{"manager": "pilothouse/1", "operation": "Apply", "fieldsV1": {
        "f:spec": {"f:replicas": {}, "f:template": {"f:spec": {"f:volumes": {"k:{\"name\":\"config\"}": {".": {}, "f:name": {}}}}}}}}]);
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [deployment]}).to_string();
    let children = files.write("list.json", list);
    let json = myapp(&other, &["--children", &children, "-o", "json"]).with_code(2).json();
    let child = &json["children"][0];
    assert_eq!((&child["kind"], &child["action"]), (&"Deployment".into(), &"change".into()));
    let diff = child["diff"].as_str().unwrap();
    assert!(diff.contains("-      volumes:\n") && !diff.contains("paused") && !diff.contains("Always"), "{diff}");
    assert_eq!(json["conditions"][0]["reason"], "ReplicasAvailable");

    let missing = files.write("none.yaml", "");
    let created = myapp(&other, &["--children", &missing]).with_code(2);
    assert!(created.stdout.starts_with("create Deployment default/web\n"), "{created:?}");
}

#[test]
fn the_plugin_is_asked_as_the_host_would_ask() {
    let files = Files::of("asked");
    let children = files.write(
        "children.yaml",
        "apiVersion: v1\nkind: Secret\nmetadata: {name: b}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: z}\n---\n\
         apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\n\
         apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: theirs\n  ownerReferences:\n  - {apiVersion: v1, kind: Pod, name: p, uid: u, controller: true}\n",
    );
    let config = files.write("config.yaml", "word: hello\n");
    let options = ["--children", &children, "--config", &config, "--now", "2026-01-31T12:00:00Z", "-o", "json"];
    let asked = mirror(json!({"reply": {"echo": true}}), &options).with_code(2);
    let echo = &asked.json()["status"]["echo"];
    assert_eq!(echo["children"], json!(["ConfigMap/default/a", "ConfigMap/default/z", "Secret/default/b"]));
    assert_eq!(echo["config"], json!({"word": "hello"}));
    let context = &echo["context"];
    assert_eq!(
        (&context["now"], &context["attempt"], &context["deadlineMs"]),
        (&json!("2026-01-31T12:00:00Z"), &json!(0), &json!(5000))
    );
    assert!(context["revision"].is_string() && context.get("deletion").is_none(), "{context}");
    assert!(asked.stderr.contains("note: ConfigMap default/theirs belongs to Pod p"), "{asked:?}");
}

#[test]
fn related_objects_are_for_plugins_with_relations() {
    let files = Files::of("related");
    let related = files.write(
        "related.yaml",
        "apiVersion: t.example/v1\nkind: Widget\nmetadata: {name: other}\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: s, namespace: x}\n",
    );
    let refused = mirror(json!({}), &["--related", &related]).with_code(1);
    assert!(refused.stderr.contains("does not export relations"), "{refused:?}");

    let reach = component("reach");
    let parent = |relate: Value| {
        json!({"apiVersion": "t.example/v1", "kind": "Reach", "metadata": {"name": "r"}, "spec": {"relate": relate}})
            .to_string()
    };
    // The plugin sees what it selects, and nothing else.
    let relate = parent(json!([
        {"apiVersion": "v1", "kind": "Secret", "namespace": "x", "names": ["s", "missing"]},
        {"apiVersion": "v1", "kind": "ConfigMap", "labels": "app=web"},
    ]));
    let related = files.write(
        "related.yaml",
        "apiVersion: v1\nkind: Secret\nmetadata: {name: s, namespace: x}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c, labels: {app: web}}\ndata: {key: v}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: other}\n",
    );
    let seen = pilothouse_reads(&["render", &reach, "-", "--related", &related, "-o", "json"], &relate).with_code(0);
    assert_eq!(seen.json()["status"]["seen"], json!(["ConfigMap default/c v", "Secret x/s -"]));
    assert!(
        seen.stderr.contains("note: ConfigMap default/other is not selected by the plugin's relations"),
        "{seen:?}"
    );
    let service = files.write("service.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n");
    let refused = pilothouse_reads(&["render", &reach, "-", "--related", &service], &relate).with_code(1);
    assert!(
        refused
            .stderr
            .contains("service.yaml, document 1: kind is Service (v1), which describe() does not list under related"),
        "{refused:?}"
    );
    let wrong = parent(json!([{"apiVersion": "v1", "kind": "ConfigMap", "labels": "a in b"}]));
    let refused = pilothouse_reads(&["render", &reach, "-"], &wrong).with_code(1);
    assert!(
        refused.stderr.contains("fails with InvalidAnswer: what the plugin selects is refused: selectors[0].labels"),
        "{refused:?}"
    );
}

#[test]
fn cleanup_is_shown_with_finalize() {
    let finished = myapp(MYAPP, &["--finalize"]).with_code(0);
    assert_eq!(finished.stdout, "");
    assert!(
        finished.stderr.contains("Cleanup     finished: the finalizer goes\nChildren    left alone\n"),
        "{finished:?}"
    );
    assert!(finished.stderr.contains("nothing of web is left outside the cluster"), "the plugin's log: {finished:?}");

    let spec = json!({"cleanup": {"waitingMs": 7000, "echo": true,
        "children": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}}]}});
    let waiting = mirror(spec.clone(), &["--finalize", "-o", "json"]).with_code(0).json();
    assert_eq!(waiting["cleanup"], json!({"state": "waiting", "afterMs": 7000}));
    assert_eq!(waiting["children"][0]["object"]["metadata"]["namespace"], "default");
    assert_eq!(waiting["status"]["echo"]["context"]["deletion"], json!({"propagation": "Background"}));
    assert_eq!(waiting.get("next"), None);
    let files = Files::of("finalize");
    let children = files.write("children.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: old}\n");
    let differs = mirror(spec, &["--finalize", "--children", &children]).with_code(2);
    assert!(
        differs.stdout.contains("create ConfigMap default/kept\n")
            && differs.stdout.contains("delete Secret default/old\n"),
        "{differs:?}"
    );

    let without = files.edited("mirror", "pilothouse:plugin/finalizer@", "pilothouse:plugxx/finalizer@");
    let refused = pilothouse_reads(&["render", &without, "-", "--finalize"], &widget(json!({}))).with_code(1);
    assert!(refused.stderr.contains("does not export finalizer"), "{refused:?}");
}

#[test]
fn what_fails_in_the_host_fails_here_with_the_same_name() {
    for (reply, error) in [
        (json!({"failure": {"terminal": "no"}}), "reconcile fails with PluginTerminal: the plugin reports: no"),
        (
            json!({"failure": {"retry": "later"}}),
            "reconcile fails with PluginRetry, tried again with backoff: the plugin reports: later",
        ),
        (
            json!({"failure": {"retryAfter": {"ms": 90000, "message": "busy"}}}),
            "reconcile fails with PluginRetry, tried again after 90s: the plugin reports: busy",
        ),
        (json!({"trap": true}), "reconcile fails with PluginTrap: the plugin crashed: "),
        (
            json!({"spin": true}),
            "reconcile fails with PluginDeadline: the plugin gave no answer within 5s (limits.timeout)",
        ),
        (json!({"allocateMiB": 100}), "reconcile fails with PluginMemory: "),
        (json!({"outputMiB": 5}), "reconcile fails with PluginAnswerUndecodable: "),
        (
            json!({"garbage": true}),
            "reconcile fails with InvalidAnswer: the plugin's answer is refused: children[0].object is not JSON: ",
        ),
        (
            json!({"children": [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}]}),
            "reconcile fails with InvalidAnswer: the plugin's answer is refused: children[0].object.kind is Node (v1), which describe()",
        ),
    ] {
        let failed = mirror(json!({"reply": reply}), &[]).with_code(1);
        assert!(failed.stderr.contains(&format!("error: {error}")), "{failed:?}");
        assert_eq!(failed.stdout, "");
    }
    let failed = mirror(json!({"cleanup": {"failure": {"terminal": "no"}}}), &["--finalize"]).with_code(1);
    assert!(failed.stderr.contains("error: finalize fails with PluginTerminal: "), "{failed:?}");
}

#[test]
fn options_events_and_the_next_time_are_shown() {
    let priority =
        json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "p"}, "value": 1});
    let reply = json!({"children": [{"object": priority, "options": {"updateStrategy": "Recreate"}}],
        "events": [{"type": "Warning", "reason": "Slow", "message": "very"}], "next": {"afterMs": 90000}});
    let rendered = mirror(json!({"reply": reply}), &[]).with_code(0);
    assert!(rendered.stdout.starts_with("---\n# options: {\"updateStrategy\":\"Recreate\"}\n"), "{rendered:?}");
    assert_eq!(documents(&rendered.stdout)[0]["metadata"], json!({"name": "p"}), "it has no namespace");
    assert!(rendered.stderr.contains("Events      Warning  Slow  very\nNext        after 90s\n"), "{rendered:?}");
}

#[test]
fn what_is_wrong_with_the_input_is_told_by_file_document_and_path() {
    let files = Files::of("input");
    let other = files.write("other.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n");
    let broken = files.write("broken.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n---\nkind: [\n");
    let (myapp_file, parent) = (component("myapp"), files.write("parent.yaml", MYAPP));
    let render = |arguments: &[&str]| pilothouse(&[&["render", &myapp_file], arguments].concat()).with_code(1).stderr;
    for (arguments, error) in [
        (&[&*broken][..], format!("error: {broken}, document 2 is no YAML: ")),
        (
            &[&*other],
            format!(
                "error: {other}, document 1: kind is Pod (v1), and the plugin reconciles MyApp (mygroup.example.com/v1)\n"
            ),
        ),
        (
            &[&*parent, "--children", &*other],
            format!("error: {other}, document 1: kind is Pod (v1), which describe() does not list under children\n"),
        ),
        (&[&*parent, "--children", &*broken], format!("error: {broken}, document 2 is no YAML: ")),
        (&["missing.yaml"], "error: failed to read missing.yaml: ".to_owned()),
        (&[&*parent, "--now", "yesterday"], "error: invalid value 'yesterday' for '--now <TIME>'".to_owned()),
    ] {
        let message = render(arguments);
        assert!(message.starts_with(&error), "{message}");
    }
    let no_plugin = pilothouse(&["render", &parent, &parent]).with_code(1).stderr;
    assert!(no_plugin.starts_with(&format!("error: {parent} is no plugin that this host can run: ")), "{no_plugin}");
}
