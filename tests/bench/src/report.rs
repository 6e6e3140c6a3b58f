//! Figures summed up over the rounds, as Markdown, JSON and plots.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{machine::Machine, plot};

/// Who the others are compared with.
pub const OURS: &str = "Pilothouse";

/// One figure, measured once.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// What it is, with its unit.
    pub figure: String,
    /// At which size of the problem.
    pub size: usize,
    /// Whose it is.
    pub contestant: &'static str,
    /// How much.
    pub value: f64,
}

/// A figure over all rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// What it is, with its unit.
    pub figure: String,
    /// At which size of the problem.
    pub size: usize,
    /// Whose it is.
    pub contestant: &'static str,
    /// The least of all rounds.
    pub min: f64,
    /// The one in the middle; of an even number the lower.
    pub median: f64,
    /// The most.
    pub max: f64,
    /// The median as a multiple of ours; none where ours is nothing.
    pub ratio: Option<f64>,
}

/// Why a report was not written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be written.
    #[error("cannot write {}", .path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A plot cannot be drawn.
    #[error("cannot draw {figure}: {why}")]
    Plot {
        /// Of what.
        figure: String,
        /// What the library says.
        why: String,
    },
}

/// All of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What it is about, in a sentence.
    pub title: &'static str,
    /// What the size of the problem is counted in.
    pub size: &'static str,
    /// Where it was measured.
    pub machine: Machine,
    /// Each figure, in the order in which they were first measured.
    pub summaries: Vec<Summary>,
    /// Everything that was measured.
    pub samples: Vec<Sample>,
}

impl Report {
    /// Sums up.
    #[must_use]
    pub fn new(title: &'static str, size: &'static str, machine: Machine, samples: Vec<Sample>) -> Self {
        Self { title, size, machine, summaries: summaries(&samples), samples }
    }

    /// Writes `NAME.md` and `NAME.json` into the folder, and a plot of each of these figures.
    ///
    /// # Errors
    /// If it cannot.
    pub fn write(&self, folder: &Path, name: &str, plots: &[(&str, &str)]) -> Result<(), Error> {
        let write = |file: String, text: String| {
            let path = folder.join(file);
            fs::write(&path, text).map_err(|source| Error::Write { path, source })
        };
        fs::create_dir_all(folder).map_err(|source| Error::Write { path: folder.to_owned(), source })?;
        write(format!("{name}.md"), self.markdown())?;
        let json = serde_json::to_string_pretty(self)
            .map_err(|error| Error::Write { path: folder.join(format!("{name}.json")), source: error.into() })?;
        write(format!("{name}.json"), json + "\n")?;
        for (file, figure) in plots {
            let svg = plot::lines(figure, self.size, &self.summaries)
                .map_err(|why| Error::Plot { figure: (*figure).to_owned(), why })?;
            write(format!("{file}.svg"), svg)?;
        }
        Ok(())
    }

    fn markdown(&self) -> String {
        let Machine { processor, cores, memory, kernel, optimised, versions } = &self.machine;
        let versions: Vec<_> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let build = if *optimised { "optimised" } else { "not optimised: compare counts only" };
        let mut text = format!(
            "# {}\n\nOn {cores} cores ({processor}), {memory} GiB of memory, Linux {kernel}; {}; {build}.\n",
            self.title,
            versions.join(", ")
        );
        let mut sizes: Vec<usize> = self.summaries.iter().map(|summary| summary.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for size in sizes {
            self.medians(&mut text, size);
        }
        self.details(&mut text);
        text
    }

    /// A row for each figure, a column for each contestant: the median, and how many times ours it is.
    fn medians(&self, text: &mut String, size: usize) {
        let of_size: Vec<_> = self.summaries.iter().filter(|summary| summary.size == size).collect();
        let (mut figures, mut contestants): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
        for summary in &of_size {
            if !figures.contains(&&*summary.figure) {
                figures.push(&summary.figure);
            }
            if !contestants.contains(&summary.contestant) {
                contestants.push(summary.contestant);
            }
        }
        let _ = write!(text, "\n## {size} {}\n\nMedians, and in brackets how many times ours.\n\n", self.size);
        let _ = writeln!(text, "| | {} |\n|---|{}", contestants.join(" | "), "--:|".repeat(contestants.len()));
        for figure in figures {
            let _ = write!(text, "| {figure} |");
            for contestant in &contestants {
                let mut found = of_size.iter().filter(|one| one.figure == figure && one.contestant == *contestant);
                let _ = match found.next() {
                    Some(Summary { median, ratio: Some(ratio), contestant, .. }) if *contestant != OURS => {
                        write!(text, " {} ({ratio:.2}) |", short(*median))
                    }
                    Some(Summary { median, .. }) => write!(text, " {} |", short(*median)),
                    None => write!(text, " |"),
                };
            }
            text.push('\n');
        }
    }

    /// How far the rounds are from each other.
    fn details(&self, text: &mut String) {
        let _ =
            write!(text, "\n## All rounds\n\n| | {} | | min | median | max |\n|---|--:|---|--:|--:|--:|\n", self.size);
        for Summary { figure, size, contestant, min, median, max, .. } in &self.summaries {
            let [min, median, max] = [min, median, max].map(|value| short(*value));
            let _ = writeln!(text, "| {figure} | {size} | {contestant} | {min} | {median} | {max} |");
        }
    }
}

/// As many digits as mean something.
#[must_use]
pub fn short(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        small if small < 1.0 => 3,
        small if small < 10.0 => 2,
        small if small < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

fn summaries(samples: &[Sample]) -> Vec<Summary> {
    let mut figures: Vec<&str> = Vec::new();
    for sample in samples {
        if !figures.contains(&&*sample.figure) {
            figures.push(&sample.figure);
        }
    }
    let mut summaries = Vec::new();
    for figure in figures {
        let of_figure: Vec<_> = samples.iter().filter(|sample| sample.figure == figure).collect();
        let mut groups: Vec<(usize, &'static str)> = Vec::new();
        for sample in &of_figure {
            if !groups.contains(&(sample.size, sample.contestant)) {
                groups.push((sample.size, sample.contestant));
            }
        }
        // Ours first.
        groups.sort_by_key(|(size, contestant)| (*size, *contestant != OURS));
        for (size, contestant) in groups {
            let values = |of: &str| {
                let of_this = of_figure.iter().filter(|sample| sample.size == size && sample.contestant == of);
                let mut values: Vec<f64> = of_this.map(|sample| sample.value).collect();
                values.sort_by(f64::total_cmp);
                values
            };
            let all = values(contestant);
            let (Some(min), Some(middle), Some(max)) = (all.first(), median(&all), all.last()) else { continue };
            let ours = median(&values(OURS)).filter(|ours| *ours > 0.0);
            summaries.push(Summary {
                figure: figure.to_owned(),
                size,
                contestant,
                min: *min,
                median: middle,
                max: *max,
                ratio: ours.map(|ours| middle / ours),
            });
        }
    }
    summaries
}

/// The value in the middle of sorted ones.
fn median(sorted: &[f64]) -> Option<f64> {
    percentile(sorted, 50)
}

/// The value below which so many of a hundred are; the values are sorted.
#[must_use]
pub fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    sorted.get(sorted.len().checked_sub(1)? * percent / 100).copied()
}

#[cfg(test)]
mod tests {
    use super::{OURS, Sample, percentile, summaries};

    fn sample(contestant: &'static str, value: f64) -> Sample {
        Sample { figure: "time, s".to_owned(), size: 10, contestant, value }
    }

    #[test]
    fn a_summary_has_the_middle_of_the_rounds_and_how_it_compares() {
        let samples = [3.0, 1.0, 2.0].map(|value| sample("them", value)).into_iter();
        let summaries = summaries(&samples.chain([4.0, 5.0, 1.0].map(|value| sample(OURS, value))).collect::<Vec<_>>());
        assert_eq!(summaries.iter().map(|summary| summary.contestant).collect::<Vec<_>>(), [OURS, "them"]);
        let them = &summaries[1];
        assert_eq!((them.min, them.median, them.max, them.ratio), (1.0, 2.0, 3.0, Some(0.5)));
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let hundred: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!((percentile(&hundred, 50), percentile(&hundred, 99)), (Some(49.0), Some(98.0)));
        assert_eq!((percentile(&[7.0], 99), percentile(&[], 50)), (Some(7.0), None));
    }
}
