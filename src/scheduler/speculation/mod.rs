//! Grouped speculation: a step asks for the tokens behind the next one too, where the group has said before what they may
//! be. (Idea: Seer, arXiv 2511.14617.)
//!
//! A *draft* is a token of the group's own past, its prompt and all its samples, that came after what a sample ends with
//! now. A row of a draft costs little where a step is bound by the weights that it reads. Each row has its own task with
//! the counter of its place, so the sampler draws for it what it would draw if the drafts before it were tokens; as long
//! as the drafts are what was drawn they are tokens, and the first other draw is one as well. So tokens and
//! log-probabilities are the same bits as without drafts. KV of a wrong draft is never read: `num_computed` counts
//! tokens only, and the place is written again.
//!
//! Drafts are only added to a plan that is made: they take rows and blocks that nobody wanted.

mod acceptance;
mod index;

use std::collections::BTreeSet;

pub use acceptance::Acceptance;
pub use index::{Continuation, LONGEST, NgramIndex};

use super::schedule::PlanBuilder;
use super::{GroupState, Scheduler, SeqId};
use crate::types::TokenId;

/// Tokens of ended samples that a group keeps for drafts.
const MOST_ENDED_TOKENS: usize = 1 << 14;

/// The last tokens of a prompt that are looked at; the rest of the index is for samples.
const MOST_PROMPT_TOKENS: usize = index::MOST_TOKENS / 2;

/// When drafts are worth their rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speculation {
    /// Most rows that a step has with drafts; 0 for none.
    pub max_rows: usize,
    /// What one row more costs, in steps of one row.
    pub row_cost: f32,
}

impl Speculation {
    pub const OFF: Self = Self { max_rows: 0, row_cost: 0.0 };

    /// Of SmolLM2-135M on two cores with AVX-512 a step of 1, 4, 8, 12, 14 and 16 rows takes 24, 27, 33, 40, 51 and 54 ms
    /// of CPU time: from 14 rows on they pass a layer in two turns.
    pub const AUTO: Self = Self { max_rows: 12, row_cost: 0.055 };

    /// The least likelihood with which a draft pays in a step of so many rows and sequences: a right one saves its
    /// sequence's share of a step, and any one costs a row.
    fn least_likelihood(&self, rows: usize, sequences: usize) -> f32 {
        let step = 1.0 + self.row_cost * rows as f32;
        self.row_cost * sequences as f32 / step
    }
}

impl Scheduler {
    /// Adds drafts to sequences that decode, the likeliest first, up to [`Speculation::max_rows`].
    pub(super) fn speculate(&mut self, builder: &mut PlanBuilder) {
        let speculation = self.config.speculation;
        let rows = builder.plan.num_tokens();
        let spare = speculation.max_rows.saturating_sub(rows).min(builder.budget);
        let sequences = if spare > 0 { self.in_flight.clone() } else { Vec::new() };
        self.forget_other_groups(&sequences);
        let least = speculation.least_likelihood(rows, sequences.len());
        let found: Vec<Continuation> = sequences.iter().map(|&id| self.find_draft(id, spare)).collect();
        let mut drafts: Vec<(f32, usize)> = Vec::new();
        for (place, (id, draft)) in sequences.iter().zip(&found).enumerate() {
            let group = self.groups.get_mut(&self.running[id].key.group).expect("a running sequence has a group");
            let likelihoods = group.acceptance.likelihoods(draft.matched).take(draft.tokens.len());
            let before = drafts.len();
            drafts.extend(likelihoods.take_while(|&p| p >= least).map(|p| (p, place)));
            if drafts.len() == before && !draft.tokens.is_empty() {
                group.acceptance.pass(draft.matched);
            }
        }
        drafts.sort_by(|a, b| b.0.total_cmp(&a.0));
        drafts.truncate(spare);
        for (place, draft) in found.into_iter().enumerate() {
            let len = drafts.iter().filter(|draft| draft.1 == place).count();
            self.add_draft(place, &draft.tokens[..len], draft.matched, builder);
        }
    }

    /// Indexes are of groups that may get drafts now, so there are few.
    fn forget_other_groups(&mut self, sequences: &[SeqId]) {
        let wanted: BTreeSet<u64> = sequences.iter().map(|id| id.admission).collect();
        let others = self.groups.values_mut().filter(|group| !wanted.contains(&group.admission));
        others.for_each(|group| group.index = None);
    }

    /// At most `limit` tokens that may follow a planned sequence's last; none if it does not decode.
    fn find_draft(&mut self, id: SeqId, limit: usize) -> Continuation {
        let sequence = &self.running[&id];
        let limit = limit.min(sequence.num_tokens_left(self.config.max_model_len).saturating_sub(1));
        if limit == 0 || !sequence.is_decoding() {
            return Continuation::default();
        }
        let group = self.groups.get_mut(&sequence.key.group).expect("a running sequence has a group");
        let index = group.index.get_or_insert_default();
        index.extend(0, &sequence.prompt.tokens[sequence.prompt.tokens.len().saturating_sub(MOST_PROMPT_TOKENS)..]);
        let stream = |sample_index: u32| 1 + sample_index as usize;
        group.ended.iter().for_each(|(sample_index, outputs)| index.extend(stream(*sample_index), outputs));
        let siblings = SeqId { sample_index: 0, ..id }..=SeqId { sample_index: u32::MAX, ..id };
        for (id, sibling) in self.running.range(siblings.clone()).chain(self.waiting.range(siblings)) {
            index.extend(stream(id.sample_index), &sibling.outputs);
        }
        index.find(&sequence.context(LONGEST), limit).unwrap_or_default()
    }

    /// Puts as much of a draft into the plan as fits into free blocks.
    fn add_draft(&mut self, place: usize, draft: &[TokenId], matched: usize, builder: &mut PlanBuilder) {
        if draft.is_empty() {
            return;
        }
        let sequence = self.running.get_mut(&self.in_flight[place]).expect("a planned sequence runs");
        let known = sequence.num_tokens();
        let room = self.cache.room(&sequence.table) - known;
        let draft = &draft[..draft.len().min(room)];
        self.cache.grow(&mut sequence.table, known + draft.len());
        sequence.matched = matched;
        sequence.add_draft(draft, &mut builder.plan.sequences[place]);
        builder.budget -= draft.len();
        self.counters.drafted_tokens += draft.len() as u64;
    }
}

impl GroupState {
    pub(super) fn new(admission: u64, live_samples: usize) -> Self {
        Self { admission, live_samples, ended: Vec::new(), index: None, acceptance: Acceptance::default() }
    }

    /// Keeps the outputs of a sample that has ended, as far as there is room.
    pub(super) fn keep(&mut self, sample_index: u32, outputs: Vec<TokenId>) {
        let kept: usize = self.ended.iter().map(|(_, outputs)| outputs.len()).sum();
        if kept + outputs.len() <= MOST_ENDED_TOKENS {
            self.ended.push((sample_index, outputs));
        }
    }
}
