//! Throughput of the recent past.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time of stepping that is remembered.
const WINDOW: Duration = Duration::from_secs(10);

/// Sampled tokens over the last ten seconds spent in steps: idle time does not count, so the figure stays what the
/// server reached when it last worked.
#[derive(Debug, Default)]
pub struct Throughput {
    steps: VecDeque<(Duration, usize)>,
    time: Duration,
    tokens: usize,
}

impl Throughput {
    /// Notes a step that began at `started` and ends now.
    pub fn record(&mut self, started: Instant, tokens: usize) {
        self.push(started.elapsed(), tokens);
    }

    fn push(&mut self, time: Duration, tokens: usize) {
        self.steps.push_back((time, tokens));
        self.time += time;
        self.tokens += tokens;
        while self.time > WINDOW && self.steps.len() > 1 {
            let (time, tokens) = self.steps.pop_front().expect("more than one step");
            self.time -= time;
            self.tokens -= tokens;
        }
    }

    pub fn tokens_per_second(&self) -> f64 {
        if self.time.is_zero() { 0.0 } else { self.tokens as f64 / self.time.as_secs_f64() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_ten_seconds_of_stepping_count() {
        let mut throughput = Throughput::default();
        assert_eq!(throughput.tokens_per_second(), 0.0);
        for _ in 0..20 {
            throughput.push(Duration::from_secs(1), 1_000);
        }
        for _ in 0..10 {
            throughput.push(Duration::from_secs(1), 30);
        }
        assert_eq!(throughput.tokens_per_second(), 30.0);
    }
}
