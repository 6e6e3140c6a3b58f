//! A page, followed in one bash on a control plane of its own: as its reader would, with `pilothouse` and `kubectl` at hand.

use std::{
    env,
    fmt::Write as _,
    fs,
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use control_plane::ControlPlane;

use super::{
    page::{self, Page, What},
    root,
};

/// For a page: most of it is what the first build of a plugin takes on a slow machine, with all that it depends on.
const PATIENCE: Duration = Duration::from_mins(15);

/// Marks in the output where the commands of a step begin.
const MARK: char = '\u{1e}';

/// What comes before the commands. Nothing outlives the page: the shell ends what it has started, and all of it ends when the test
/// does, in whatever way, since that closes the standard input.
const OPENING: &str = r#"set -euo pipefail
exec 9<&0 </dev/null
{ read -r _ <&9 || kill -TERM -- -$$; } & disown
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
"#;

/// Does all that the page says.
///
/// # Errors
/// What went wrong, with the page and the line.
pub(crate) fn follow(page: &Page) -> Result<(), String> {
    let control_plane = ControlPlane::start().expect("the control plane starts");
    let folder = folder(page);
    let (script, output) = (folder.join("page.sh"), folder.join("page.log"));
    fs::write(&script, self::script(page)).expect("the script can be written");
    let file = fs::File::create(&output).expect("the output can be written");
    let mut path = vec![control_plane.bin_dir().to_owned(), folder.join("cache/target/debug")];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let mut bash = Command::new("bash")
        .arg(&script)
        .current_dir(&folder)
        .env("PATH", env::join_paths(path).expect("no folder has a colon in its name"))
        .env("KUBECONFIG", control_plane.kubeconfig())
        .env("KUBECACHEDIR", control_plane.data_dir().join("kubectl"))
        .env("PILOTHOUSE_CACHE", folder.join("cache"))
        // What a plugin depends on is built once, and needs nothing from the internet.
        .env("CARGO_TARGET_DIR", target().join("docs-plugin"))
        .env("CARGO_NET_OFFLINE", "true")
        .stdin(Stdio::piped())
        .stdout(file.try_clone().expect("a file can be shared"))
        .stderr(file)
        .process_group(0)
        .spawn()
        .expect("bash starts");
    let lifeline = bash.stdin.take();
    let start = Instant::now();
    let ended = loop {
        match bash.try_wait().expect("it is our child") {
            Some(status) => break Some(status),
            None if start.elapsed() > PATIENCE => break None,
            None => thread::sleep(Duration::from_millis(50)),
        }
    };
    drop(lifeline);
    bash.wait().expect("it is our child");
    let output = String::from_utf8_lossy(&fs::read(&output).expect("the output is there")).into_owned();
    judge(page, ended.is_some_and(|status| status.success()), &output)
        .map_err(|problem| format!("{problem}\nIt was run in {}, and took {:?}.", folder.display(), start.elapsed()))
}

/// The target folder of this test.
fn target() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target folder")
}

/// An empty folder, the same each time, so that what is built from it is not built anew. In it are the clone, and the folder in which
/// the Makefile keeps what it has built.
fn folder(page: &Page) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("docs").join(page.name());
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("what an earlier run has left can be removed");
    }
    let cache = folder.join("cache/target");
    fs::create_dir_all(&cache).expect("the folder can be made");
    let host = Path::new(env!("CARGO_BIN_EXE_pilothouse"));
    symlink(root(), folder.join("pilothouse")).expect("a link can be made");
    symlink(host.parent().expect("it is in a folder"), cache.join("debug")).expect("a link can be made");
    symlink(target().join("plugins"), cache.join("plugins")).expect("a link can be made");
    // The first plugin gets the versions that the workspace was built with: those are on this machine.
    let plugin = folder.join("greeting");
    fs::create_dir(&plugin).expect("the folder can be made");
    fs::copy(root().join("Cargo.lock"), plugin.join("Cargo.lock")).expect("the lock can be copied");
    folder
}

/// All steps of the page, as one script.
fn script(page: &Page) -> String {
    let mut script = OPENING.to_owned();
    for (number, step) in page.steps.iter().enumerate() {
        let step = match &step.what {
            What::Run { commands, .. } => commands.clone(),
            What::Write { name, text } => format!("cat >'{name}' <<'END OF THE FILE'\n{text}END OF THE FILE\n"),
        };
        let _ = writeln!(script, "printf '{MARK}{number}\\n'\n{step}");
    }
    script
}

/// What there is to say against how it went.
fn judge(page: &Page, ended_well: bool, output: &str) -> Result<(), String> {
    let outputs: Vec<_> = output.split(MARK).skip(1).map(|part| part.split_once('\n').unwrap_or((part, ""))).collect();
    let problem = |at: usize, problem: &str| {
        let (step, output) = (&page.steps[at], outputs.get(at).map_or(output, |(_, output)| output));
        let commands = match &step.what {
            What::Run { commands, .. } => commands,
            What::Write { name, .. } => name,
        };
        let place = format!("{}:{}", page.file.display(), step.line);
        Err(format!("{place}: {problem}\n{}\n--- and this was printed:\n{}", commands.trim_end(), output.trim_end()))
    };
    for (at, step) in page.steps.iter().enumerate().take(outputs.len()) {
        if let What::Run { prints, .. } = &step.what
            && (ended_well || at + 1 < outputs.len())
            && let Some(line) = page::missing(prints, outputs[at].1)
        {
            return problem(at, &format!("these commands have not printed {line:?}, or not in this order:"));
        }
    }
    if ended_well {
        Ok(())
    } else {
        problem(outputs.len().saturating_sub(1), "one of these commands failed, or has not ended:")
    }
}
