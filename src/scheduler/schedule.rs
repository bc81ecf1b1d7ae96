//! Making a step's plan: running sequences first, then admission, then drafts. Tenants that are owed places come after
//! the first running sequence.

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
        self.enforce_kv_share();
        let order = self.running_order();
        for (index, &id) in order.iter().enumerate() {
            if builder.budget == 0 {
                break;
            }
            self.continue_running(id, &order[index + 1..], &mut builder);
            if index == 0 {
                self.admit_owed(&mut builder);
            }
        }
        self.admit(&mut builder);
        self.speculate(&mut builder);
        self.images.finish_plan(&builder);
        self.note_service();
        assert_eq!(self.has_work(), !builder.plan.is_empty(), "no sequence can advance");
        builder.plan
    }

    /// Plans the missing tokens of a running sequence, as far as the budget allows. If blocks are short it takes those
    /// of sequences that are `later` in the order of service. It is left out of this step if only others have blocks
    /// that it could use, or if it has itself been preempted in this step, or if its next token is one of an image that
    /// is not encoded yet.
    fn continue_running(&mut self, id: SeqId, later: &[SeqId], builder: &mut PlanBuilder) {
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
            if !self.preempt_for(id, later) {
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
        self.charge(id, &planned);
        builder.plan.sequences.push(planned);
        self.in_flight.push(id);
    }

    /// Preempts the last sequence that holds blocks, for the sake of sequence `id`: a waiting one, or a running one
    /// that is `later` in the order of service, and so is not in the plan yet. Returns false if there is no victim.
    pub(super) fn preempt_for(&mut self, id: SeqId, later: &[SeqId]) -> bool {
        let later: HashSet<SeqId> = later.iter().copied().collect();
        let may_lose = |victim| victim != id && (later.contains(&victim) || self.waiting.contains_key(&victim));
        let victim = self.last_holder(|_, victim| may_lose(victim));
        victim.map(|victim| self.preempt(victim)).is_some()
    }

    /// Takes all blocks of a sequence, and its place.
    pub(super) fn preempt(&mut self, victim: SeqId) {
        self.stats.preemptions += 1;
        self.displace(victim);
        let sequence = self.waiting.get_mut(&victim).expect("a victim runs or waits");
        sequence.release(&mut self.cache);
    }

    /// Takes the place of a sequence, if it runs, but none of its blocks.
    pub(super) fn displace(&mut self, victim: SeqId) {
        if let Some(sequence) = self.running.remove(&victim) {
            self.waiting.insert(victim, sequence);
        }
    }
}
