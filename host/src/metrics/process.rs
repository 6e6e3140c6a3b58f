//! What the operating system says of this process, from `/proc`.

use std::fs;

/// Clock ticks per second in `/proc`, the same on every Linux (`USER_HZ`).
const TICKS: f64 = 100.0;

/// The memory that is resident, in bytes.
pub(crate) fn resident_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The time on a processor so far, in seconds.
pub(super) fn cpu_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is a name in parentheses, which may have spaces in it. `utime` and `stime` are fields 14 and 15.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    Some((f64::from(ticks()?) + f64::from(ticks()?)) / TICKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_runs_has_memory_and_time() {
        let memory = resident_memory().unwrap();
        assert!((1 << 20..1 << 40).contains(&memory), "{memory}");
        let before = cpu_seconds().unwrap();
        while cpu_seconds().unwrap() < before + 0.02 {}
    }
}
