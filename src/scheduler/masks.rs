//! Masks that are not computed within a step. Their samples wait without a place in the batch, as if they were
//! preempted, and the others run. A sample's tokens do not depend on when its mask is ready.

use super::sequence::PendingToken;
use super::{Outcome, Scheduler, Sequence};
use crate::grammar::{GrammarError, MaskDone, MaskJob};
use crate::types::{FinishReason, TokenLogprobs};

impl Scheduler {
    /// Takes the masks that the last step had no room for. Each is to be computed and given to
    /// [`Scheduler::advance_grammar`].
    pub fn take_mask_jobs(&mut self) -> Vec<MaskJob> {
        std::mem::take(&mut self.mask_jobs)
    }

    /// Takes a computed mask, so that its sample can run again. Returns the outcome of the sample's last token, or
    /// `None` if the sample has ended.
    ///
    /// # Panics
    /// If the last plan has not been answered.
    pub fn advance_grammar(&mut self, done: MaskDone) -> Option<Outcome> {
        assert!(self.in_flight.is_empty(), "the last plan has not been answered");
        let MaskDone { sample, state, advanced } = done;
        let id = self.groups.get(&sample.group)?.id(sample.sample_index);
        let is_suspended = self.suspended.contains_key(&id);
        let mut sequence = if is_suspended { self.suspended.remove(&id) } else { self.waiting.remove(&id) }?;
        let PendingToken { logprobs, finish, routing, .. } = sequence.pending.take().expect("a mask is computed once");
        sequence.grammar = Some(state);
        let (outcome, has_ended) = self.outcome(&sequence, (logprobs, routing), finish, advanced);
        if has_ended {
            self.end_sample(sequence);
        } else {
            let map = if is_suspended { &mut self.suspended } else { &mut self.waiting };
            map.insert(id, sequence);
        }
        Some(outcome)
    }

    /// Leaves the mask after the sequence's last token to a job.
    pub(super) fn postpone(
        &mut self,
        sequence: &mut Sequence,
        (logprobs, routing): (TokenLogprobs, Vec<u8>),
        finish: Option<FinishReason>,
    ) {
        let state = sequence.grammar.take().expect("only a sequence with a grammar has a mask");
        let (job, wanted) = MaskJob::new(sequence.key, sequence.outputs.clone(), state);
        self.mask_jobs.push(job);
        sequence.pending = Some(PendingToken { logprobs, finish, routing, _wanted: wanted });
    }

    /// Keeps a sequence until its mask has been computed.
    pub(super) fn wait_for_mask(&mut self, sequence: Sequence) {
        let id = self.groups[&sequence.key.group].id(sequence.key.sample_index);
        self.waiting.insert(id, sequence);
    }

    /// The outcome of a sequence's last token, which has come with the experts of the one before, and whether the
    /// sequence ends with it.
    pub(super) fn outcome(
        &mut self,
        sequence: &Sequence,
        (logprobs, routing): (TokenLogprobs, Vec<u8>),
        finish: Option<FinishReason>,
        advanced: Result<usize, GrammarError>,
    ) -> (Outcome, bool) {
        self.stats.generated_tokens += 1;
        let row = self.tenants.row(self.groups[&sequence.key.group].tenant);
        self.tenant_table.row_mut(row).generated_tokens += 1;
        let sample = sequence.key;
        let grammar_bytes = match advanced {
            Ok(bytes) => bytes,
            Err(error) => return (Outcome::GrammarFailed { sample, error }, true),
        };
        let is_text_complete = matches!(finish, Some(FinishReason::Eos | FinishReason::StopToken));
        let can_run_on = is_text_complete
            || sequence.grammar.as_ref().is_none_or(|grammar| grammar.goes_on(&sequence.params, &sequence.outputs));
        let finish = if can_run_on { finish } else { Some(FinishReason::Grammar) };
        (Outcome::Token { sample, logprobs, finish, grammar_bytes, routing }, finish.is_some())
    }
}
