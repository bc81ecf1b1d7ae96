//! Which seeds are run.

use std::time::{Duration, Instant};

/// First seed and number of runs of `make test`, so that they are the same each time. They take a few seconds on a slow
/// core.
const FIRST: u64 = 1;
const RUNS: u64 = 150;

/// Options from the environment: `SIMULATE_SEED`, the first seed; `SIMULATE_SECONDS`, for how long to go on from it,
/// with a random first seed. A seed alone is one run.
pub struct Options {
    pub first: u64,
    runs: Option<u64>,
    seconds: Option<Duration>,
}

impl Options {
    pub fn read() -> Self {
        let number = |text: String| text.trim().parse::<u64>().unwrap_or_else(|e| panic!("{text:?}: {e}"));
        #[expect(clippy::disallowed_methods, reason = "`cargo test` hands a test no arguments that its harness lacks")]
        let given = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty()).map(number);
        let (seed, seconds) = (given("SIMULATE_SEED"), given("SIMULATE_SECONDS").map(Duration::from_secs));
        let (unset, runs) = match (seed, seconds) {
            (_, Some(_)) => (u64::from(rand::random::<u32>()) << 20, None),
            (Some(_), None) => (0, Some(1)),
            (None, None) => (FIRST, Some(RUNS)),
        };
        Self { first: seed.unwrap_or(unset), runs, seconds }
    }

    /// Whether these are the runs of `make test`.
    pub fn is_bounded(&self) -> bool {
        self.runs == Some(RUNS)
    }

    /// The seeds, one after the other, as long as there is time.
    pub fn seeds(&self) -> impl Iterator<Item = u64> {
        let (started, seconds, runs) = (Instant::now(), self.seconds, self.runs.unwrap_or(u64::MAX));
        let goes_on = move |_: &u64| seconds.is_none_or(|seconds| started.elapsed() < seconds);
        (self.first..self.first.saturating_add(runs)).take_while(goes_on)
    }
}
