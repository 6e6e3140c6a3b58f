//! The supervisor that the library starts, and `up` and `down` for a person at a shell.

mod background;
mod binaries;
mod credentials;
mod ports;
mod server;
mod supervisor;

use std::{env, ffi::OsString, path::Path, process::ExitCode};

use control_plane::Answer;

const USAGE: &str = "\
A real Kubernetes control plane for tests. Build its servers first: `make control-plane`.

  control-plane run    run one until stdin ends or SIGTERM; prints where it is as one line of JSON, then obeys the lines
                       stop-api-server, start-api-server, stop-controller-manager and start-controller-manager;
                       what follows `--` are flags of its API server
  control-plane up     start one in the background unless it is up; prints what a shell has to export
  control-plane down   stop that one";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let words: Vec<&str> = arguments.iter().filter_map(|word| word.to_str()).collect();
    match *words {
        ["run"] => run(None, &[]),
        ["run", "--", ..] => run(None, &arguments[2..]),
        ["run", "--background", state] => run(Some(Path::new(state)), &[]),
        ["up"] => report(background::up().map(|exports| print!("{exports}"))),
        ["down"] => report(background::down()),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Whoever started the supervisor reads its stdout, so an error goes there, in the form of an answer.
fn run(state: Option<&Path>, api_server_flags: &[OsString]) -> ExitCode {
    match supervisor::run(state, api_server_flags) {
        Ok(()) | Err(supervisor::Error::Stopped) => ExitCode::SUCCESS,
        Err(error) => {
            supervisor::say(&Answer::Error(error.to_string()));
            ExitCode::FAILURE
        }
    }
}

fn report(outcome: Result<(), background::Error>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("control-plane: {error}");
            ExitCode::FAILURE
        }
    }
}
