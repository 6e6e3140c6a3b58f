//! Many operators at once, without parents: what each more of them costs. Each plugin has a reconciler and an account, in one host; the others
//! are a process each, from a file of its own: different operators are different programs, so their machine code is shared no more than
//! that of different plugins.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use bench::report::Sample;
use tokio::{process::Command, time::sleep};

use crate::{
    cluster::Cluster,
    contestant::{Contestant, Programs},
    process::Process,
};

/// Until what a start needed is given back.
const REST: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(300);

/// Starts so many operators, more in each turn.
pub(crate) async fn measure(
    cluster: &Cluster,
    programs: &Programs,
    contestant: Contestant,
    counts: &[usize],
) -> anyhow::Result<Vec<Sample>> {
    let mut samples = Vec::new();
    let mut installed = 1;
    for count in counts {
        if contestant == Contestant::Pilothouse {
            for number in installed..*count {
                // Another digest for each: nothing of a plugin is there already.
                let plugin = programs.changed_plugin(&format!("up{number:07}"))?;
                cluster.add_reconciler(programs, &format!("fleet-{number}"), &plugin)?;
            }
            installed = installed.max(*count);
            // Whatever is compiled once is compiled.
            let (process, _) = start(cluster, programs, contestant, *count).await?;
            end(process).await?;
        }
        let (processes, time) = start(cluster, programs, contestant, *count).await?;
        sleep(REST).await;
        let mut proportional = 0.0;
        for process in &processes {
            proportional += process.memory()?.proportional;
        }
        for (figure, value) in
            [("proportional set size, MB", proportional), ("start until all watch, s", time.as_secs_f64())]
        {
            samples.push(Sample { figure: figure.to_owned(), size: *count, contestant: contestant.name(), value });
        }
        println!("  {count:>6} operators {:<20} {proportional:.0} MB, {:.1} s", contestant.name(), time.as_secs_f64());
        end(processes).await?;
    }
    Ok(samples)
}

/// Waits until each of them watches its parents.
async fn start(
    cluster: &Cluster,
    programs: &Programs,
    contestant: Contestant,
    count: usize,
) -> anyhow::Result<(Vec<Process>, Duration)> {
    let in_one = contestant == Contestant::Pilothouse;
    let mut commands = Vec::new();
    for number in 0..if in_one { 1 } else { count } {
        let name = format!("{}-{number}", contestant.name());
        let command = programs.command(contestant, cluster)?;
        let command = if in_one { command } else { own_copy(&command, &cluster.folder().join(&name))? };
        commands.push((command, cluster.log(&name)));
    }
    let mut audit = cluster.audit(contestant);
    let start = Instant::now();
    let started = commands.into_iter().map(|(command, log)| Process::start(command, &log));
    let processes = started.collect::<anyhow::Result<Vec<_>>>()?;
    let mut watches = 0;
    while watches < count {
        anyhow::ensure!(start.elapsed() < PATIENCE, "{watches} of {count} operators watch");
        let requests = audit.new_requests()?;
        watches += requests.iter().filter(|request| request.verb == "watch" && request.resource == "myapps").count();
        sleep(Duration::from_millis(20)).await;
    }
    Ok((processes, start.elapsed()))
}

/// The same from a copy of its program.
fn own_copy(command: &Command, copy: &Path) -> anyhow::Result<Command> {
    let command = command.as_std();
    if !copy.exists() {
        fs::copy(command.get_program(), copy).with_context(|| format!("cannot write {}", copy.display()))?;
    }
    let mut own = Command::new(copy);
    own.args(command.get_args()).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    Ok(own)
}

async fn end(processes: Vec<Process>) -> anyhow::Result<()> {
    for process in processes {
        process.stop().await?;
    }
    Ok(())
}
