//! Runs steps and emits their outcomes to the requests.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::trace_span;

use super::core::{Ending, EngineCore};
use crate::error::{Error, Result, panic_message};
use crate::executor::Executor;
use crate::grammar::{GrammarError, MaskQueue};
use crate::scheduler::Outcome;
use crate::types::WeightVersion;

/// Stepping time over which the throughput is measured.
const WINDOW: Duration = Duration::from_secs(10);

/// The outcomes of a step.
struct StepOutcomes {
    outcomes: Vec<Outcome>,
    /// Version of the policy that made them.
    version: WeightVersion,
    /// When the step ended.
    ended: Instant,
}

/// Runs steps, and emits their outcomes to the requests.
#[derive(Default)]
pub(super) struct Steps {
    /// The outcomes of the last step, until they are emitted.
    pending: Option<StepOutcomes>,
    /// Computes the masks that the scheduler has no time for.
    masks: MaskQueue,
    throughput: Throughput,
}

impl Steps {
    /// Whether the outcomes of the last step remain to be emitted.
    pub fn has_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Whether masks are being computed on another thread.
    pub fn awaits_masks(&self) -> bool {
        !self.masks.is_empty()
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.throughput.tokens_per_second()
    }

    /// Runs one step: `schedule → launch → collect → update`. Emits the outcomes of the previous step while the ranks
    /// compute this one.
    pub fn run<X: Executor>(&mut self, core: &mut EngineCore<X>) -> Result<()> {
        let _step = trace_span!("step").entered();
        let begun = core.clock.now();
        let plan = Arc::new(trace_span!("schedule").in_scope(|| core.scheduler.schedule()));
        if plan.is_empty() {
            self.emit(core);
            return Ok(());
        }
        let kind = core.telemetry.begin_step(begun, &plan);
        for group in core.scheduler.begun() {
            core.requests.get_mut(group.request).into_iter().for_each(|request| request.begin(begun));
        }
        trace_span!("launch").in_scope(|| core.executor.launch(plan.clone()))?;
        self.emit(core);
        let output = trace_span!("wait for the ranks").in_scope(|| core.executor.collect())?;
        for (request, panic) in &output.failed {
            core.fail(*request, panic);
        }
        let outcomes = trace_span!("update").in_scope(|| core.scheduler.update(&plan, output));
        for job in core.scheduler.take_mask_jobs() {
            self.masks.push(job, core.policy.version());
        }
        let ended = core.clock.now();
        let sampled = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Token { .. })).count();
        core.stats.steps += 1;
        self.throughput.record(ended - begun, sampled);
        core.telemetry.end_step(kind, (begun, ended), &plan, sampled, core.policy.version());
        self.pending = Some(StepOutcomes { outcomes, version: core.policy.version(), ended });
        Ok(())
    }

    /// Continues the samples whose masks were computed since the last call, and emits the tokens before these masks. If
    /// there are none, waits for one, at most for `longest`.
    pub fn take_masks<X: Executor>(&mut self, core: &mut EngineCore<X>, longest: Duration) {
        for (done, version) in self.masks.take(longest) {
            self.emit(core);
            if let Some(outcome) = core.scheduler.advance_grammar(done) {
                if matches!(outcome, Outcome::Token { .. }) {
                    self.throughput.record(Duration::ZERO, 1);
                }
                emit_one(core, outcome, version, core.clock.now());
            }
        }
    }

    /// Emits the outcomes of the last step, unless that is done.
    pub fn emit<X: Executor>(&mut self, core: &mut EngineCore<X>) {
        let Some(StepOutcomes { outcomes, version, ended }) = self.pending.take() else { return };
        let _emit = trace_span!("emit").entered();
        for outcome in outcomes {
            emit_one(core, outcome, version, ended);
        }
    }
}

/// Emits an outcome of a step, which the policy `version` ran and which ended `now`, to its request.
fn emit_one<X: Executor>(core: &mut EngineCore<X>, outcome: Outcome, version: WeightVersion, now: Instant) {
    let key = match &outcome {
        Outcome::PromptDone { group, .. } => group.request,
        Outcome::Token { sample, .. } | Outcome::Rescored { sample, .. } | Outcome::GrammarFailed { sample, .. } => {
            sample.group.request
        }
    };
    let Some(request) = core.requests.get_mut(key) else {
        if matches!(outcome, Outcome::Token { .. }) {
            core.stats.dropped_tokens += 1;
        }
        return;
    };
    let (scheduler, policy) = (&mut core.scheduler, &core.policy);
    let mut failed = None;
    let taken = catch_unwind(AssertUnwindSafe(|| {
        match outcome {
            Outcome::PromptDone { group, logprobs, .. } if request.is_rescored(group) => {
                request.rescored(group, &logprobs.unwrap_or_default(), version);
            }
            Outcome::PromptDone { group, cached_tokens, logprobs, routing } => {
                request.prompt_done(group, cached_tokens, logprobs, routing, version);
            }
            Outcome::Rescored { sample, start, logprobs } => request.recomputed(sample, start, logprobs, version),
            // A step may give a sample several tokens. Those after a stop string are dropped.
            Outcome::Token { sample, .. } if !request.is_running(sample) => core.stats.dropped_tokens += 1,
            Outcome::Token { sample, logprobs, finish, grammar_bytes, routing } => {
                let stopped = request.token(sample, logprobs, finish, (grammar_bytes, &routing), (version, now));
                if stopped && finish.is_none() {
                    // The scheduler knows no text, so it cannot see a stop string.
                    scheduler.finish(sample);
                }
            }
            Outcome::GrammarFailed { sample, error } => {
                let field = format!("{}.structured_outputs", request.sampling_field(sample.group.prompt_index));
                failed = Some(match error {
                    GrammarError::TooMuchWork(reason) => Error::invalid(field, reason),
                    GrammarError::TooMuchTime(reason) => Error::ResourceExhausted(format!(
                        "{field}: {reason} to find which tokens may follow; make the grammar less ambiguous"
                    )),
                });
            }
        }
        let following = request.rescore(policy.epoch(), policy.version());
        scheduler.add_following(&request.client.tenant, following, request.is_suspended());
    }));
    if let Err(panic) = taken {
        return core.fail(key, &panic_message(&*panic));
    }
    if let Some(error) = failed {
        return core.reject(key, error);
    }
    if request.is_done() {
        core.end(key, Ending::Finished);
    }
}

/// Throughput over the last ten seconds of stepping. Idle time does not count, so an idle server keeps the figure of
/// its last work.
#[derive(Debug, Default)]
struct Throughput {
    /// Duration and number of sampled tokens of each step in the window, the oldest first.
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
