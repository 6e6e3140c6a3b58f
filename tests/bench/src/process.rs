//! An operator that runs, and what Linux says of it.

use std::{fs, fs::File, path::Path, process::Stdio, time::Duration};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

/// How long it may take to end.
const PATIENCE: Duration = Duration::from_secs(40);
/// Linux tells processor time in hundredths of a second, whatever the clock of the machine.
const TICK: Duration = Duration::from_millis(10);

/// Killed when dropped.
pub(crate) struct Process {
    child: Child,
    pid: Pid,
}

/// In MB.
pub(crate) struct Memory {
    pub(crate) resident: f64,
    /// What is shared with others counted in part.
    pub(crate) proportional: f64,
}

impl Process {
    /// What it says goes to the log.
    pub(crate) fn start(mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let file = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let output = file.try_clone().with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(output).stderr(file).kill_on_drop(true);
        let child = command.spawn().with_context(|| format!("cannot run {:?}", command.as_std().get_program()))?;
        let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).context("it has ended at once")?;
        Ok(Self { child, pid })
    }

    fn read(&self, file: &str) -> anyhow::Result<String> {
        let path = format!("/proc/{}/{file}", self.pid.as_raw_nonzero());
        fs::read_to_string(path).context("the operator has ended")
    }

    /// Processor time so far, with that of its children that have ended.
    pub(crate) fn processor_time(&self) -> anyhow::Result<Duration> {
        let stat = self.read("stat")?;
        // The name of the program may hold spaces; it ends with the last parenthesis.
        let (_, fields) = stat.rsplit_once(')').context("/proc/PID/stat is not as expected")?;
        let ticks = fields.split_whitespace().skip(11).take(4);
        let ticks: u32 = ticks.map(|ticks| ticks.parse::<u32>().unwrap_or_default()).sum();
        Ok(TICK * ticks)
    }

    pub(crate) fn memory(&self) -> anyhow::Result<Memory> {
        let text = self.read("smaps_rollup")?;
        let megabytes = |name: &str| -> anyhow::Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).context("smaps_rollup lacks a line")?;
            Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0 / 1e6)
        };
        Ok(Memory { resident: megabytes("Rss:")?, proportional: megabytes("Pss:")? })
    }

    /// Ends it as the kubelet would.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        kill_process(self.pid, Signal::TERM).context("the operator has ended before it was told to")?;
        timeout(PATIENCE, self.child.wait()).await.context("it does not end on SIGTERM")??;
        Ok(())
    }
}
