//! Making a step's plan: running sequences first, oldest first, then admission, then drafts.

use std::collections::HashSet;

use super::{Scheduler, SeqId};
use crate::cache::BlockHash;
use crate::grammar::MaskBudget;
use crate::types::{PictureHash, StepPlan};

/// The plan of a step while it is being made.
#[derive(Default)]
pub(super) struct PlanBuilder {
    pub plan: StepPlan,
    /// Number of tokens that may still be added.
    pub budget: usize,
    /// Pictures that the sequences planned so far need.
    pub pictures: Vec<PictureHash>,
    /// The full blocks that the plan computes and that its answer registers in the prefix cache.
    pub blocks: HashSet<BlockHash>,
}

impl Scheduler {
    /// Plans the next step. A plan that is not empty must be answered by [`Scheduler::update`] before the next one.
    ///
    /// # Panics
    /// If the last plan has not been answered.
    pub fn schedule(&mut self) -> StepPlan {
        assert!(self.in_flight.is_empty(), "the last plan has not been answered");
        self.begun.clear();
        self.mask_budget = MaskBudget::default();
        let mut builder = PlanBuilder { budget: self.config.max_batch_tokens, ..PlanBuilder::default() };
        let oldest_first: Vec<SeqId> = self.running.keys().copied().collect();
        for id in oldest_first {
            if builder.budget == 0 {
                break;
            }
            self.continue_running(id, &mut builder);
        }
        self.admit(&mut builder);
        self.speculate(&mut builder);
        self.images.finish_plan(&builder);
        assert_eq!(self.has_work(), !builder.plan.is_empty(), "no sequence can advance");
        builder.plan
    }

    /// Plans the missing tokens of a running sequence, as far as the budget allows. If blocks are short it takes those
    /// of younger sequences. It is left out of this step if only older ones have blocks that it could use, or if it has
    /// itself been preempted in this step, or if its next token is one of an image that is not encoded yet.
    fn continue_running(&mut self, id: SeqId, builder: &mut PlanBuilder) {
        loop {
            let Some(sequence) = self.running.get_mut(&id) else { return };
            let start = sequence.num_computed;
            let end = sequence.num_tokens().min(start + builder.budget);
            let end = self.images.chunk_end(sequence, end, builder);
            if end == start {
                return;
            }
            if self.cache.extend(&mut sequence.table, start, end, &mut builder.plan.copies) {
                return self.plan_sequence(id, end, builder);
            }
            if !self.preempt_for(id) {
                return;
            }
        }
    }

    /// Adds the tokens `[num_computed, end)` of a running sequence to the plan.
    pub(super) fn plan_sequence(&mut self, id: SeqId, end: usize, builder: &mut PlanBuilder) {
        let sequence = &self.running[&id];
        let mut planned = sequence.plan(end);
        planned.embeddings = self.images.embeddings(sequence, planned.start..end);
        builder.blocks.extend(sequence.known_blocks(end / self.cache.block_size()));
        builder.budget -= planned.tokens.len();
        builder.plan.sequences.push(planned);
        self.in_flight.push(id);
    }

    /// Preempts the youngest sequence that holds blocks, for the sake of sequence `id`. Running sequences older than
    /// `id` are never preempted. Returns false if there is no victim. Running sequences are planned oldest first, so a
    /// victim is never in the plan yet.
    pub(super) fn preempt_for(&mut self, id: SeqId) -> bool {
        let running = self.running.last_key_value().map(|(&last, _)| last).filter(|&last| last > id);
        let holders = self.waiting.iter().rev().filter(|(_, sequence)| !sequence.table.is_empty());
        let waiting = holders.map(|(&holder, _)| holder).find(|&holder| holder != id);
        let Some(victim) = running.max(waiting) else { return false };
        self.stats.preemptions += 1;
        if let Some(sequence) = self.running.remove(&victim) {
            self.waiting.insert(victim, sequence);
        }
        let sequence = self.waiting.get_mut(&victim).expect("a victim runs or waits");
        sequence.release(&mut self.cache);
        true
    }
}
