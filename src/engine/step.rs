//! A step, and what it brings to the requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::trace_span;

use super::Engine;
use super::core::Ending;
use crate::error::{Error, Result, panic_message};
use crate::executor::Executor;
use crate::grammar::GrammarError;
use crate::scheduler::Outcome;
use crate::types::WeightVersion;

/// What a step has brought and its requests have not been given yet.
pub(super) struct Untold {
    outcomes: Vec<Outcome>,
    /// Version of the policy that made it.
    version: WeightVersion,
    /// When the step ended.
    ended: Instant,
}

impl<X: Executor> Engine<X> {
    /// Runs one step: `schedule → launch → collect → update`. Emits what the step before has brought while the ranks
    /// compute this one.
    pub(super) fn step(&mut self) -> Result<()> {
        let _step = trace_span!("step").entered();
        let begun = self.core.clock.now();
        let plan = Arc::new(trace_span!("schedule").in_scope(|| self.core.scheduler.schedule()));
        if plan.is_empty() {
            self.emit();
            return Ok(());
        }
        let kind = self.core.watch.begin_step(begun, &plan);
        for group in self.core.scheduler.begun() {
            self.core.requests.get_mut(group.request).into_iter().for_each(|request| request.begin(begun));
        }
        trace_span!("launch").in_scope(|| self.core.executor.launch(plan.clone()))?;
        self.emit();
        let output = trace_span!("wait for the ranks").in_scope(|| self.core.executor.collect())?;
        for (request, panic) in &output.failed {
            self.core.fail(*request, panic);
        }
        let outcomes = trace_span!("update").in_scope(|| self.core.scheduler.update(&plan, output));
        for job in self.core.scheduler.take_mask_jobs() {
            self.masks.push(job, self.core.policy.version());
        }
        let ended = self.core.clock.now();
        let sampled = self.core.statistics.count_step(ended - begun, &outcomes);
        self.core.watch.end_step(kind, (begun, ended), &plan, sampled, self.core.policy.version());
        self.untold = Some(Untold { outcomes, version: self.core.policy.version(), ended });
        Ok(())
    }

    /// Lets the samples run on whose masks have been computed since the last call, and gives their requests the tokens
    /// before them. If there are none yet, waits for one up to `longest`.
    pub(super) fn take_masks(&mut self, longest: Duration) {
        for (done, version) in self.masks.take(longest) {
            self.emit();
            if let Some(outcome) = self.core.scheduler.advance_grammar(done) {
                self.core.statistics.count_late(&outcome);
                self.emit_one(outcome, version, self.core.clock.now());
            }
        }
    }

    /// Gives the requests what the last step has brought, unless they have it.
    pub(super) fn emit(&mut self) {
        let Some(Untold { outcomes, version, ended }) = self.untold.take() else { return };
        let _emit = trace_span!("emit").entered();
        for outcome in outcomes {
            self.emit_one(outcome, version, ended);
        }
    }

    /// Gives an outcome of a step, which the policy `version` has made and which has ended `now`, to its request.
    fn emit_one(&mut self, outcome: Outcome, version: WeightVersion, now: Instant) {
        let key = match &outcome {
            Outcome::PromptDone { group, .. } => group.request,
            Outcome::Token { sample, .. } | Outcome::GrammarFailed { sample, .. } => sample.group.request,
        };
        let Some(request) = self.core.requests.get_mut(key) else {
            if matches!(outcome, Outcome::Token { .. }) {
                self.core.statistics.count_dropped_token();
            }
            return;
        };
        let scheduler = &mut self.core.scheduler;
        let mut failed = None;
        let taken = catch_unwind(AssertUnwindSafe(|| match outcome {
            Outcome::PromptDone { group, cached_tokens, logprobs } => {
                request.prompt_done(group, cached_tokens, logprobs, version);
            }
            // A step may give a sample several tokens. Those after a stop string are dropped.
            Outcome::Token { sample, .. } if !request.is_running(sample) => self.core.statistics.count_dropped_token(),
            Outcome::Token { sample, logprobs, finish, grammar_bytes } => {
                let stopped = request.token(sample, logprobs, finish, grammar_bytes, (version, now));
                if stopped && finish.is_none() {
                    // The scheduler knows no text, so it has to be told of a stop string.
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
        }));
        if let Err(panic) = taken {
            return self.core.fail(key, &panic_message(&*panic));
        }
        if let Some(error) = failed {
            return self.core.reject(key, error);
        }
        if request.is_done() {
            self.core.end(key, Ending::Finished);
        }
    }
}
