//! Taking the answers of a step: sequences advance, fork and end.

use std::ops::Range;

use super::stop::stop_reason;
use super::{Outcome, Scheduler, SeqId, Sequence};
use crate::types::{FinishReason, LogitsRow, PlanSequence, StepOutput, StepPlan, TokenId, TokenLogprobs};

impl Scheduler {
    /// Advances every sequence of the plan by its answers, and returns the outcomes in the plan's order. Answers for
    /// samples that have been aborted or finished since [`Scheduler::schedule`] are dropped.
    ///
    /// # Panics
    /// If `plan` is not the last plan, or `output` has not one answer for each of its tasks.
    pub fn update(&mut self, plan: &StepPlan, output: StepOutput) -> Vec<Outcome> {
        let ids = std::mem::take(&mut self.in_flight);
        assert_eq!(ids.len(), plan.sequences.len(), "sequences of the plan that is answered");
        assert_eq!(output.tokens.len(), plan.tasks().count(), "one answer for each task");
        self.keep_routing(plan, &output.routing);
        let mut answers = output.tokens.into_iter();
        let mut outcomes = Vec::with_capacity(ids.len());
        for (id, planned) in ids.into_iter().zip(&plan.sequences) {
            let num_tasks = planned.logits.iter().map(|row| row.tasks.len()).sum();
            let mut answers = answers.by_ref().take(num_tasks);
            if let Some(sequence) = self.running.remove(&id) {
                self.update_sequence(id, sequence, planned, &mut answers, &mut outcomes);
            }
            answers.for_each(drop);
        }
        outcomes
    }

    /// Keeps the experts of the plan's tokens beside their KV.
    fn keep_routing(&mut self, plan: &StepPlan, rows: &[u8]) {
        let Some(routing) = &mut self.routing else { return };
        plan.copies.iter().for_each(|copy| routing.copy(copy));
        let mut left = rows;
        for planned in &plan.sequences {
            let (own, others) = left.split_at(planned.tokens.len() * routing.row_bytes());
            routing.write(planned, own);
            left = others;
        }
    }

    /// The experts of some tokens of a sequence, if it returns them.
    fn routing_of(&self, sequence: &Sequence, tokens: Range<usize>) -> Vec<u8> {
        let routing = self.routing.as_ref().filter(|_| sequence.returns_routing);
        routing.map_or_else(Vec::new, |routing| routing.read(sequence.table.as_slice(), tokens))
    }

    fn update_sequence(
        &mut self,
        id: SeqId,
        mut sequence: Sequence,
        planned: &PlanSequence,
        answers: &mut impl Iterator<Item = TokenLogprobs>,
        outcomes: &mut Vec<Outcome>,
    ) {
        let known = sequence.num_tokens().min(planned.start + planned.tokens.len());
        let draft = &planned.tokens[known - planned.start..];
        sequence.advance(known, &mut self.cache);
        let is_target = |row: &&LogitsRow| row.tasks.iter().any(|task| task.target.is_some());
        let num_targets = planned.logits.iter().filter(is_target).count();
        let scored = answers.by_ref().take(num_targets);
        match (&mut sequence.prompt_logprobs, &mut sequence.rescored) {
            (Some(collected), _) => collected.extend(scored),
            (None, Some(done)) if num_targets > 0 => {
                let (sample, start, logprobs) = (sequence.key, *done, scored.collect());
                *done += num_targets;
                outcomes.push(Outcome::Rescored { sample, start, logprobs });
            }
            _ => {}
        }
        if sequence.num_computed < sequence.num_tokens() {
            self.running.insert(id, sequence);
        } else if sequence.score_only {
            outcomes.push(self.prompt_done(&mut sequence));
            self.end_sample(sequence);
        } else if sequence.is_forked() {
            if let Some(sequence) = self.append_tokens(sequence, draft, answers, outcomes) {
                self.running.insert(id, sequence);
            }
        } else {
            outcomes.push(self.prompt_done(&mut sequence));
            self.fork(id, sequence, answers, outcomes);
        }
    }

    fn prompt_done(&self, sequence: &mut Sequence) -> Outcome {
        Outcome::PromptDone {
            group: sequence.key.group,
            cached_tokens: sequence.cached_tokens.expect("an admitted sequence has looked into the cache"),
            logprobs: sequence.prompt_logprobs.take(),
            routing: self.routing_of(sequence, 0..sequence.num_computed),
        }
    }

    /// Makes each unforked sample a sequence of its own, and gives each its first token. The first sample keeps the
    /// place in the batch, the others wait for one.
    fn fork(
        &mut self,
        id: SeqId,
        mut sequence: Sequence,
        answers: &mut impl Iterator<Item = TokenLogprobs>,
        outcomes: &mut Vec<Outcome>,
    ) {
        let seeds = std::mem::take(&mut sequence.unforked);
        let forks: Vec<Sequence> = seeds
            .into_iter()
            .zip(1..)
            .map(|(seed, index)| sequence.fork(index, seed, self.cache.fork(&sequence.table)))
            .collect();
        if let Some(sequence) = self.append_tokens(sequence, &[], answers, outcomes) {
            self.running.insert(id, sequence);
        }
        for fork in forks {
            let id = SeqId { sample_index: fork.key.sample_index, ..id };
            if let Some(fork) = self.append_tokens(fork, &[], answers, outcomes) {
                self.waiting.insert(id, fork);
            }
        }
    }

    /// Appends the token that was sampled after a sequence's last one. As long as what was sampled is the next draft,
    /// the answer to that draft is appended too. Returns the sequence if it can run on; it may have ended, or wait for
    /// its mask.
    fn append_tokens(
        &mut self,
        mut sequence: Sequence,
        draft: &[TokenId],
        answers: &mut impl Iterator<Item = TokenLogprobs>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Sequence> {
        let mut accepted = 0;
        let appended = loop {
            let logprobs = answers.next().expect("one answer for each sample and each draft");
            let token = logprobs.token;
            let appended = self.append_token(&mut sequence, logprobs, outcomes);
            let is_right = match draft.get(accepted) {
                Some(&drafted) if appended == Appended::RunsOn => drafted == token,
                _ => break appended,
            };
            let group = self.groups.get_mut(&sequence.key.group).expect("a live sample has a group");
            group.acceptance.record(sequence.matched + accepted, is_right);
            if !is_right {
                break Appended::RunsOn;
            }
            accepted += 1;
        };
        self.stats.accepted_tokens += accepted as u64;
        self.charge_drafts(&sequence, accepted as u64);
        sequence.advance(sequence.num_tokens() - 1, &mut self.cache);
        self.cache.truncate(&mut sequence.table, sequence.num_computed);
        match appended {
            Appended::RunsOn => return Some(sequence),
            Appended::Ended => self.end_sample(sequence),
            Appended::Pending => self.wait_for_mask(sequence),
        }
        None
    }

    /// Appends one token to a sequence.
    fn append_token(
        &mut self,
        sequence: &mut Sequence,
        logprobs: TokenLogprobs,
        outcomes: &mut Vec<Outcome>,
    ) -> Appended {
        let token = logprobs.token;
        let known = sequence.prompt.tokens.len() + sequence.outputs.len();
        let before = if sequence.is_forked() { known - 1..known } else { known..known };
        let routing = self.routing_of(sequence, before);
        if let Some(done) = sequence.rescored.as_mut().filter(|done| **done == sequence.outputs.len()) {
            *done += 1;
        }
        sequence.outputs.push(token);
        if let Some(thinking) = &mut sequence.thinking {
            thinking.push(token);
        }
        let (num_outputs, prompt_len) = (sequence.outputs.len(), sequence.prompt.tokens.len());
        let finish = stop_reason(&sequence.params, token, num_outputs, prompt_len, self.config.max_model_len);
        let advanced = match &mut sequence.grammar {
            Some(grammar) if !matches!(finish, Some(FinishReason::Eos | FinishReason::StopToken)) => {
                grammar.advance_within(token, &mut self.mask_budget)
            }
            _ => Ok(Some(0)),
        };
        let Some(advanced) = advanced.transpose() else {
            self.postpone(sequence, (logprobs, routing), finish);
            return Appended::Pending;
        };
        let (outcome, has_ended) = self.outcome(sequence, (logprobs, routing), finish, advanced);
        outcomes.push(outcome);
        if has_ended { Appended::Ended } else { Appended::RunsOn }
    }
}

/// The state of a sequence after it was given a token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Appended {
    RunsOn,
    Ended,
    /// The mask after the token is computed elsewhere.
    Pending,
}
