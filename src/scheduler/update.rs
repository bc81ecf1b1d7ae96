//! Taking the answers of a step.

use super::stop::stop_reason;
use super::{Outcome, Scheduler, SeqId, Sequence};
use crate::types::{LogitsRow, PlanSequence, StepOutput, StepPlan, TokenLogprobs};

impl Scheduler {
    /// Advances every sequence of the plan and says what has come of it, in the plan's order. Answers for samples that
    /// have been aborted or finished since [`Scheduler::schedule`] are dropped.
    ///
    /// # Panics
    /// If `plan` is not the last one made, or `output` has not one answer for each of its tasks.
    pub fn update(&mut self, plan: &StepPlan, output: StepOutput) -> Vec<Outcome> {
        let ids = std::mem::take(&mut self.in_flight);
        assert_eq!(ids.len(), plan.sequences.len(), "sequences of the plan that is answered");
        assert_eq!(output.tokens.len(), plan.tasks().count(), "one answer for each task");
        let mut answers = output.tokens.into_iter();
        let mut outcomes = Vec::with_capacity(ids.len());
        for (id, planned) in ids.into_iter().zip(&plan.sequences) {
            let num_tasks = planned.logits.iter().map(|row| row.tasks.len()).sum();
            let answers = answers.by_ref().take(num_tasks);
            match self.running.remove(&id) {
                Some(sequence) => self.update_sequence(id, sequence, planned, answers, &mut outcomes),
                None => answers.for_each(drop),
            }
        }
        outcomes
    }

    fn update_sequence(
        &mut self,
        id: SeqId,
        mut sequence: Sequence,
        planned: &PlanSequence,
        mut answers: impl Iterator<Item = TokenLogprobs>,
        outcomes: &mut Vec<Outcome>,
    ) {
        sequence.advance(planned.start + planned.tokens.len(), &mut self.cache);
        let is_target = |row: &&LogitsRow| row.tasks.iter().any(|task| task.target.is_some());
        let num_targets = planned.logits.iter().filter(is_target).count();
        if let Some(collected) = &mut sequence.prompt_logprobs {
            collected.extend(answers.by_ref().take(num_targets));
        }
        if sequence.num_computed < sequence.num_tokens() {
            self.running.insert(id, sequence);
        } else if sequence.score_only {
            outcomes.push(prompt_done(&mut sequence));
            sequence.release(&mut self.cache);
            self.end_sample(sequence.key.group);
        } else {
            if !sequence.is_forked() {
                outcomes.push(prompt_done(&mut sequence));
            }
            self.sampled(id, sequence, answers, outcomes);
        }
    }

    /// Forks the samples that have waited for the prompt, and gives each its token. The first keeps its place, the
    /// others wait for one.
    fn sampled(
        &mut self,
        id: SeqId,
        mut sequence: Sequence,
        mut answers: impl Iterator<Item = TokenLogprobs>,
        outcomes: &mut Vec<Outcome>,
    ) {
        let seeds = std::mem::take(&mut sequence.unforked);
        let forks: Vec<Sequence> = seeds
            .into_iter()
            .zip(1..)
            .map(|(seed, index)| sequence.fork(index, seed, self.cache.fork(&sequence.table)))
            .collect();
        let mut next = || answers.next().expect("one answer for each sample");
        if let Some(sequence) = self.append_token(sequence, next(), outcomes) {
            self.running.insert(id, sequence);
        }
        for fork in forks {
            let id = SeqId { sample_index: fork.key.sample_index, ..id };
            if let Some(fork) = self.append_token(fork, next(), outcomes) {
                self.waiting.insert(id, fork);
            }
        }
    }

    /// Returns the sequence unless this token was its last.
    fn append_token(
        &mut self,
        mut sequence: Sequence,
        logprobs: TokenLogprobs,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Sequence> {
        let token = logprobs.token;
        sequence.outputs.push(token);
        self.counters.generated_tokens += 1;
        let (num_outputs, prompt_len) = (sequence.outputs.len(), sequence.prompt.len());
        let finish = stop_reason(&sequence.params, token, num_outputs, prompt_len, self.config.max_model_len);
        outcomes.push(Outcome::Token { sample: sequence.key, logprobs, finish });
        if finish.is_none() {
            return Some(sequence);
        }
        sequence.release(&mut self.cache);
        self.end_sample(sequence.key.group);
        None
    }
}

fn prompt_done(sequence: &mut Sequence) -> Outcome {
    Outcome::PromptDone {
        group: sequence.key.group,
        cached_tokens: sequence.cached_tokens.expect("an admitted sequence has looked into the cache"),
        logprobs: sequence.prompt_logprobs.take(),
    }
}
