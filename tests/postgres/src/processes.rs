//! The processes of a server: one for each connection, and some more, each in a session of its own, so that no signal finds all of them.

use std::{fs, io};

use rustix::process::{Pid, Signal, kill_process};

/// Stops the server that a shell has started: first the process that would start others.
pub(crate) fn pause(shell: u32) -> io::Result<()> {
    let server = children(shell)?;
    signal(&server, Signal::STOP)?;
    for process in server {
        signal(&children(process)?, Signal::STOP)?;
    }
    Ok(())
}

/// Lets it go on.
pub(crate) fn go_on(shell: u32) -> io::Result<()> {
    let server = children(shell)?;
    for process in &server {
        signal(&children(*process)?, Signal::CONT)?;
    }
    signal(&server, Signal::CONT)
}

fn signal(processes: &[u32], signal: Signal) -> io::Result<()> {
    for process in processes {
        let process = i32::try_from(*process).ok().and_then(Pid::from_raw);
        kill_process(process.ok_or_else(|| io::Error::other("no process"))?, signal)?;
    }
    Ok(())
}

fn children(parent: u32) -> io::Result<Vec<u32>> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(process) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One may end while we look.
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        // `1234 (name) S 1 …`; a name may have anything in it.
        let parent_of = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        if parent_of == Some(parent) {
            children.push(process);
        }
    }
    Ok(children)
}
