//! What Pilothouse may ask for, in counts that no busy machine changes.

use bench::report::{OURS, Sample};

/// Figures and their limits.
pub(crate) const LIMITS: [(&str, f64); 8] = [
    // The finalizer, the Deployment, the status; and the counts of the reconciler, now and then.
    ("requests per parent", 3.1),
    ("stored writes per parent", 3.0),
    // Each parent is asked about before and after its Deployment is there.
    ("plugin calls per event", 0.6),
    ("quiet time: requests", 0.0),
    ("quiet time: stored writes", 0.0),
    ("restart in sync: requests", 0.0),
    ("restart in sync: stored writes", 0.0),
    // A fresh read, the finalizer; and the counts of the reconciler.
    ("requests per deleted parent", 2.1),
];

/// In words; also what was not measured.
pub(crate) fn exceeded(samples: &[Sample]) -> Vec<String> {
    let of = |figure: &str, contestant: &str| {
        let mut found = samples.iter().filter(|sample| sample.figure == figure && sample.contestant == contestant);
        found.next().map(|sample| sample.value)
    };
    let mut exceeded = Vec::new();
    for (figure, limit) in LIMITS {
        match of(figure, OURS) {
            Some(value) if value <= limit => {}
            Some(value) => exceeded.push(format!("{figure}: {value}, and at most {limit} is allowed")),
            None => exceeded.push(format!("{figure}: not measured")),
        }
    }
    exceeded
}

#[cfg(test)]
mod tests {
    use bench::report::{OURS, Sample};

    use super::{LIMITS, exceeded};

    #[test]
    fn what_is_beyond_its_limit_or_missing_is_told() {
        let sample =
            |(figure, value): (&str, f64)| Sample { figure: figure.to_owned(), size: 1, contestant: OURS, value };
        let mut samples: Vec<Sample> = LIMITS.into_iter().map(sample).collect();
        assert_eq!(exceeded(&samples), [""; 0]);
        samples[0].value += 0.5;
        samples.pop();
        assert_eq!(exceeded(&samples).len(), 2);
    }
}
