//! `bench`: the same job done by Pilothouse and by what users would otherwise run, on one control plane, one after another and
//! in turns. `bench run` measures everything; `bench smoke` only counts, and fails where a count is beyond its limit.

mod audit;
mod ceiling;
mod cluster;
mod contestant;
mod fleet;
mod limits;
mod load;
mod process;
mod round;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use bench::{
    machine::Machine,
    report::{Report, Sample, short},
};
use clap::{Args, Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    cluster::Cluster,
    contestant::{Contestant, Programs},
    round::Round,
};

/// Of parents that all are measured with. What is measured beside convergence (a quiet time, edits, a restart) is measured at the middle.
const SIZES: [usize; 3] = [100, 1000, 5000];

/// Figures that are plotted, and the names of their files.
const PLOTS: [(&str, &str); 2] =
    [("converge", "time until all parents have converged, s"), ("cpu", "processor time per parent, ms")];

/// What is told of each while it runs, under these headings.
const TOLD: [(&str, &str); 6] = [
    ("converged, s", PLOTS[0].1),
    ("CPU each, ms", PLOTS[1].1),
    ("requests each", "requests per parent"),
    ("memory, MB", "proportional set size, MB"),
    ("edit p50, ms", "edit until its child has changed, idle: p50, ms"),
    ("under load p99", "edit until its child has changed, under load: p99, ms"),
];

#[derive(Parser)]
#[command(about = "Pilothouse, native operators, kopf and the bare API server, measured on one control plane")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    programs: ProgramArguments,
}

#[derive(Subcommand)]
enum Command {
    /// Measure everything, and write the report.
    Run {
        /// How often.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// How many parents, each in turn.
        #[arg(long, value_delimiter = ',', default_values_t = SIZES)]
        sizes: Vec<usize>,
        /// How long to look whether anything is asked for where nothing changes.
        #[arg(long, default_value_t = 60)]
        quiet_seconds: u64,
        /// At which number of parents to measure also a quiet time, edits, and a restart.
        #[arg(long, default_value_t = SIZES[1])]
        closely: usize,
        /// With how many parents to measure memory, once, of those that are native.
        #[arg(long)]
        memory: Option<usize>,
        /// How many operators to start at once, each number in turn, once, of those that are native.
        #[arg(long, value_delimiter = ',')]
        fleets: Vec<usize>,
        /// Who is measured.
        #[arg(long, value_enum, value_delimiter = ',', default_values_t = Contestant::ALL)]
        only: Vec<Contestant>,
        /// Where the report goes.
        #[arg(long)]
        output: PathBuf,
    },
    /// Count with few parents, and compare with limits.
    Smoke,
}

/// What was built before.
#[derive(Args)]
struct ProgramArguments {
    /// The component of plugins/myapp.
    #[arg(long, global = true)]
    plugin: Option<PathBuf>,
    /// The folder that tests/bench/build.sh prints.
    #[arg(long, global = true)]
    others: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen to signals")?;
    // What runs is ended with the value that holds it, so all ways out of here lead through its end.
    tokio::select! {
        outcome = run(arguments) => outcome,
        _ = tokio::signal::ctrl_c() => Ok(ExitCode::FAILURE),
        _ = terminate.recv() => Ok(ExitCode::FAILURE),
    }
}

async fn run(Arguments { command, programs }: Arguments) -> anyhow::Result<ExitCode> {
    let programs = Programs::find(programs.plugin, programs.others)?;
    match command {
        Command::Smoke => smoke(&programs).await,
        Command::Run { rounds, sizes, quiet_seconds, closely, memory, fleets, only, output } => {
            let cluster = Cluster::start(&programs).await?;
            let quiet = Duration::from_secs(quiet_seconds);
            let mut samples = Vec::new();
            for round in 0..rounds {
                println!("round {} of {rounds}", round + 1);
                println!("  parents  {:<20} {}", "", TOLD.map(|(heading, _)| format!("{heading:>15}")).concat());
                for size in &sizes {
                    // Who goes first is another one in each round.
                    for place in 0..only.len() {
                        let contestant = only[(place + round) % only.len()];
                        let quiet = (*size == closely).then_some(quiet);
                        samples.extend(measure(&cluster, &programs, contestant, *size, quiet).await?);
                    }
                }
            }
            for contestant in only.iter().filter(|contestant| contestant.is_native()) {
                if let Some(size) = memory {
                    samples.extend(measure(&cluster, &programs, *contestant, size, None).await?);
                }
            }
            let report = Report::new("Operators for MyApp, compared", "parents", Machine::this(), samples);
            report.write(&output, "operators", &PLOTS)?;
            if !fleets.is_empty() {
                let mut samples = Vec::new();
                for contestant in only.iter().filter(|contestant| contestant.is_native()) {
                    samples.extend(fleet::measure(&cluster, &programs, *contestant, &fleets).await?);
                }
                let report = Report::new("Many operators without parents", "operators", Machine::this(), samples);
                report.write(&output, "fleets", &[("fleets", "proportional set size, MB")])?;
            }
            println!("written to {}", output.display());
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn measure(
    cluster: &Cluster,
    programs: &Programs,
    contestant: Contestant,
    size: usize,
    quiet: Option<Duration>,
) -> anyhow::Result<Vec<Sample>> {
    let name = contestant.name();
    let mut round = Round::new(cluster, contestant, size);
    let outcome = match contestant {
        Contestant::Ceiling => round.ceiling().await,
        _ => round.operator(programs, quiet).await,
    };
    outcome.with_context(|| format!("{name} with {size} parents; its log is {}", cluster.log(name).display()))?;
    let samples = round.samples();
    let told = TOLD.map(|(_, figure)| {
        let sample = samples.iter().find(|sample| sample.figure == figure);
        sample.map_or_else(|| "–".to_owned(), |sample| short(sample.value))
    });
    println!("  {size:>7}  {name:<20} {}", told.map(|value| format!("{value:>15}")).concat());
    Ok(samples)
}

async fn smoke(programs: &Programs) -> anyhow::Result<ExitCode> {
    const PARENTS: usize = 50;
    const QUIET: Duration = Duration::from_secs(10);
    let cluster = Cluster::start(programs).await?;
    let samples = measure(&cluster, programs, Contestant::Pilothouse, PARENTS, Some(QUIET)).await?;
    for (figure, limit) in limits::LIMITS {
        if let Some(sample) = samples.iter().find(|sample| sample.figure == figure) {
            println!("  {figure:<34} {:>6}, at most {limit}", short(sample.value));
        }
    }
    let exceeded = limits::exceeded(&samples);
    for line in &exceeded {
        println!("  failed  {line}");
    }
    Ok(if exceeded.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
