//! The engine's counters, and its throughput of the recent past.

use std::collections::VecDeque;
use std::time::Duration;

use super::command::Status;
use crate::scheduler::Outcome;

/// Stepping time over which the throughput is measured.
const WINDOW: Duration = Duration::from_secs(10);

/// Counts of what has happened since the engine started.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    throughput: Throughput,
    steps: u64,
    /// Tokens that the scheduler counted as generated and that no request was given.
    dropped_tokens: u64,
    finished_requests: u64,
    aborted_requests: u64,
    /// Requests that ended because their answer panicked.
    internal_errors: u64,
}

impl Statistics {
    /// Counts a step that took `time` and has these outcomes. Returns the number of sampled tokens.
    pub fn count_step(&mut self, time: Duration, outcomes: &[Outcome]) -> usize {
        let sampled = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Token { .. })).count();
        self.steps += 1;
        self.throughput.record(time, sampled);
        sampled
    }

    /// Counts the outcome of a step that came after it.
    pub fn count_late(&mut self, outcome: &Outcome) {
        if matches!(outcome, Outcome::Token { .. }) {
            self.throughput.record(Duration::ZERO, 1);
        }
    }

    /// Counts a sampled token that was given to nobody, since its request or sample had ended.
    pub fn count_dropped_token(&mut self) {
        self.dropped_tokens += 1;
    }

    pub fn dropped_tokens(&self) -> u64 {
        self.dropped_tokens
    }

    pub fn internal_errors(&self) -> u64 {
        self.internal_errors
    }

    pub fn count_finished_request(&mut self) {
        self.finished_requests += 1;
    }

    pub fn count_aborted_request(&mut self) {
        self.aborted_requests += 1;
    }

    pub fn count_internal_error(&mut self) {
        self.internal_errors += 1;
    }

    /// Writes the counters into a status. Its `generated_tokens` must be the scheduler's count, from which tokens that
    /// were given to nobody are subtracted.
    pub fn report(&self, status: &mut Status) {
        status.steps = self.steps;
        status.generated_tokens -= self.dropped_tokens;
        status.finished_requests = self.finished_requests;
        status.aborted_requests = self.aborted_requests;
        status.internal_errors = self.internal_errors;
        status.tokens_per_second = self.throughput.tokens_per_second();
    }
}

/// Sampled tokens over the last ten seconds spent in steps. Idle time does not count, so the figure stays what the
/// server reached when it last worked.
#[derive(Debug, Default)]
struct Throughput {
    /// Durations and numbers of sampled tokens of the steps in the window, the oldest first.
    steps: VecDeque<(Duration, usize)>,
    /// Sums over `steps`.
    time: Duration,
    tokens: usize,
}

impl Throughput {
    fn record(&mut self, time: Duration, tokens: usize) {
        self.steps.push_back((time, tokens));
        self.time += time;
        self.tokens += tokens;
        while self.time > WINDOW && self.steps.len() > 1 {
            let (time, tokens) = self.steps.pop_front().expect("more than one step");
            self.time -= time;
            self.tokens -= tokens;
        }
    }

    fn tokens_per_second(&self) -> f64 {
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
            throughput.record(Duration::from_secs(1), 1_000);
        }
        for _ in 0..10 {
            throughput.record(Duration::from_secs(1), 30);
        }
        assert_eq!(throughput.tokens_per_second(), 30.0);
    }
}
