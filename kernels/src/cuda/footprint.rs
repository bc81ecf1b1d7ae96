//! The memory that the driver takes on a device for a process before anything is stored there: the context, the
//! kernels, the libraries' own memory. It cannot be computed, so it is measured when the process first opens the
//! device.
//!
//! Everything is opened and closed again once, with a reading of NVML before, between and after. The best figure is the
//! driver's own for this process, which other processes do not change. A process id alone does not identify it, since
//! in a container NVML may report ids of the host, and another process can have ours: it is the one entry that appears
//! when we open and disappears when we close. Where the driver gives no such figure (in some containers, for parts of
//! devices), the change of the total counts, if it rose by as much as it fell again: memory that another process
//! allocates or frees meanwhile makes one of the two larger and the other smaller. If no attempt is quiet, we
//! use the median of all changes, in which such errors cancel. Some libraries keep the context after everything is
//! closed; then we make one attempt and count the memory that appeared with it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::nvml::Reading;

/// Bytes reserved where nothing can be measured. Contexts of recent cards with the kernels and cuBLAS are said to
/// take 300 to 600 MiB; not measured on a card.
pub(super) const UNMEASURED_BYTES: u64 = 512 << 20;
/// Attempts to measure while neighbours take and free memory.
const ATTEMPTS: usize = 5;
/// Changes of which the difference is at most a page of the driver are equal.
const PAGE: u64 = 2 << 20;

/// Measured bytes by the number of the device. The process has one context of each, which lives as long as anything
/// uses it: only the first time shows what it takes.
static MEASURED: Mutex<BTreeMap<usize, u64>> = Mutex::new(BTreeMap::new());

/// Before, while and after everything was open.
pub(super) type FootprintReadings = [Reading; 3];

/// Bytes that a context takes on device `ordinal`, measured by `measure`, which opens and closes everything.
pub(super) fn of_device(ordinal: usize, measure: impl FnMut() -> Result<FootprintReadings, String>) -> u64 {
    let mut measured = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
    *measured.entry(ordinal).or_insert_with(|| {
        from_attempts(measure).unwrap_or_else(|why| {
            let mib = UNMEASURED_BYTES >> 20;
            tracing::warn!(
                "device {ordinal}: what its context takes was not measured ({why}); {mib} MiB are set aside"
            );
            UNMEASURED_BYTES
        })
    })
}

fn from_attempts(mut measure: impl FnMut() -> Result<FootprintReadings, String>) -> Result<u64, String> {
    let (mut changes, mut last) = (Vec::new(), None);
    for _ in 0..ATTEMPTS {
        let attempt = match (measure(), last) {
            (Ok(attempt), _) => attempt,
            (Err(why), last) => return last.and_then(|last| came(&last, std::process::id())).ok_or(why),
        };
        if let Some(bytes) = own(&attempt, std::process::id()) {
            return Ok(bytes);
        }
        let [before, open, after] = attempt.each_ref().map(|reading| reading.used as i64);
        let (up, down) = (open - before, open - after);
        if up > 0 && up.abs_diff(down) <= PAGE {
            return Ok(up.max(down) as u64);
        }
        changes.extend([up, down]);
        last = Some(attempt);
    }
    changes.sort_unstable();
    let middle = (changes[ATTEMPTS - 1] + changes[ATTEMPTS]) / 2;
    u64::try_from(middle).ok().filter(|bytes| *bytes > 0).ok_or_else(|| "other processes change what they hold".into())
}

/// Bytes of the only process that is listed only while everything is open. If there are several such processes, the one
/// with our id counts.
fn own([before, open, after]: &FootprintReadings, our_number: u32) -> Option<u64> {
    ours(open, &[before, after], our_number)
}

/// Bytes of the only process that appeared when everything was opened, or else the rise of the total.
fn came([before, open, _]: &FootprintReadings, our_number: u32) -> Option<u64> {
    let more = open.used.checked_sub(before.used).filter(|bytes| *bytes > 0);
    ours(open, &[before], our_number).or(more)
}

/// Bytes of the only process that is in no other reading; if there are several, of the one with our id.
fn ours(open: &Reading, others: &[&Reading], our_number: u32) -> Option<u64> {
    let is_elsewhere = |pid: u32| others.iter().any(|other| other.processes.iter().any(|process| process.0 == pid));
    let candidates: Vec<_> = open.processes.iter().filter(|process| !is_elsewhere(process.0)).collect();
    let ours = match candidates[..] {
        [ours] => Some(ours),
        _ => candidates.into_iter().find(|process| process.0 == our_number),
    };
    ours.map(|process| process.1).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const CONTEXT: u64 = 300 << 20;

    fn reading(used: u64, processes: &[(u32, u64)]) -> Reading {
        Reading { used, processes: processes.to_vec() }
    }

    /// The result of these attempts, one after the other.
    fn of(attempts: impl IntoIterator<Item = FootprintReadings>) -> Result<u64, String> {
        let mut attempts: VecDeque<FootprintReadings> = attempts.into_iter().collect();
        from_attempts(|| attempts.pop_front().ok_or_else(|| "there are no more".into()))
    }

    #[test]
    fn the_entry_that_comes_and_goes_with_us_counts_whatever_neighbours_do() {
        let (trainer, other) = ((7, 9 << 30), (8, 1 << 30));
        let mine = |pid| (pid, CONTEXT);
        // Our number is another one's on the host, and neighbours grow, come and go.
        for attempt in [
            [reading(5, &[trainer]), reading(0, &[trainer, mine(1)]), reading(90 << 30, &[trainer])],
            [reading(5, &[trainer]), reading(0, &[other, mine(4711)]), reading(0, &[other])],
            [reading(5, &[other]), reading(0, &[mine(4711), (7, 3)]), reading(0, &[(7, 12 << 30)])],
        ] {
            assert_eq!(of([attempt]), Ok(CONTEXT));
        }
    }

    #[test]
    fn without_an_entry_a_quiet_attempt_counts() {
        let quiet = |held: u64| [held, held + CONTEXT, held].map(|used| reading(used, &[]));
        assert_eq!(of([quiet(1 << 30)]), Ok(CONTEXT));
        // One neighbour takes memory while we open, another gives some back while we close.
        let took = [0, CONTEXT + (50 << 20), 50 << 20].map(|used| reading(used, &[]));
        let gave = [1 << 30, (1 << 30) + CONTEXT, (1 << 30) - (70 << 20)].map(|used| reading(used, &[]));
        assert_eq!(of([took, gave, quiet(3)]), Ok(CONTEXT));
        // Two new processes at once: neither is known to be ours, unless it has our number.
        let both = |pid| [reading(0, &[]), reading(5 << 30, &[(pid, CONTEXT), (0, 5 << 30)]), reading(1 << 30, &[])];
        assert_eq!(own(&both(1), 2), None);
        assert_eq!(own(&both(2), 2), Some(CONTEXT));
        assert_eq!(of([both(std::process::id())]), Ok(CONTEXT));
    }

    #[test]
    fn steady_growth_and_noise_do_not_count() {
        // A neighbour takes, or frees, as much in each interval.
        for step in [100 << 20, -(100 << 20)] {
            let held = |interval: i64| (20 << 30) + step * interval;
            let attempt = |i: i64| {
                let used = [held(3 * i), held(3 * i + 1) + CONTEXT as i64, held(3 * i + 2)];
                used.map(|used| reading(used as u64, &[]))
            };
            assert_eq!(of((0..5).map(attempt)), Ok(CONTEXT), "{step}");
        }
        // No attempt is quiet: what stands is no farther off than the disturbances are large.
        let noisy = |x: i64| [4 << 30, (4 << 30) + CONTEXT as i64 + x, 4 << 30].map(|used| reading(used as u64, &[]));
        let one_sided = |x: i64| {
            let [before, open, mut after] = noisy(x);
            after.used += (3 << 20) + x.unsigned_abs();
            [before, open, after]
        };
        let bytes = of([1 << 20, -(3 << 20), 40 << 20, 2 << 20, 0].map(one_sided)).unwrap();
        assert!(bytes.abs_diff(CONTEXT) <= 40 << 20, "{bytes}");
    }

    #[test]
    fn what_came_counts_where_the_context_stays() {
        let (trainer, mine) = ((7, 9 << 30), (1, CONTEXT));
        let listed = [reading(5, &[trainer]), reading(90 << 30, &[trainer, mine]), reading(90 << 30, &[mine, trainer])];
        assert_eq!(of([listed]), Ok(CONTEXT));
        let unlisted = [1 << 30, (1 << 30) + CONTEXT, (1 << 30) + CONTEXT].map(|used| reading(used, &[]));
        assert_eq!(of([unlisted]), Ok(CONTEXT));
    }

    #[test]
    fn what_cannot_be_measured_is_said() {
        assert!(of([]).unwrap_err().contains("there are no more"));
        let falling = |i: u64| [30, 20, 30].map(|used| reading((used - i) << 30, &[]));
        assert!(of((0..5).map(falling)).unwrap_err().contains("other processes"));
    }
}
