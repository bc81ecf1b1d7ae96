//! Grouped speculation: draft tokens for a sample come from its group's own prompt and samples, without a draft model.
//! (Idea: Seer, arXiv 2511.14617.)
//!
//! A *draft* is a token that followed, earlier in the group, the same context that a sample ends with now. A step runs
//! drafts behind the sample's last token, one row each, which costs little where a step is bound by reading the
//! weights.
//!
//! Drafts do not change a bit of the result. Each row has a task of its own with the random counter of its place, so
//! the sampler draws from it what it would draw if all drafts before it were right. Draws are accepted up to and
//! including the first one that differs from its draft. KV of a wrong draft is never read: `num_computed` counts
//! accepted tokens only, and the slot is written again.
//!
//! A draft that the sample's grammar forbids, or whose mask takes long, is not tried, and each row has the mask after
//! the drafts before it.
//!
//! No draft is tried where a token is forced, or before one.
//!
//! Drafts are added after everything else is planned, into rows and blocks that are left over.

mod acceptance;
mod index;

use std::collections::BTreeSet;

pub use acceptance::Acceptance;
pub use index::{Continuation, LONGEST, NgramIndex};

use super::schedule::PlanBuilder;
use super::{GroupState, Scheduler, SeqId};
use crate::types::TokenId;

/// Most tokens of ended samples that a group keeps to find drafts in.
const MOST_ENDED_TOKENS: usize = 1 << 14;

/// Most tokens of a prompt that are indexed, its last ones. The rest of the index is for samples.
const MOST_PROMPT_TOKENS: usize = index::MOST_TOKENS / 2;

/// Limits of speculation, and the costs by which it is decided whether a draft is worth its row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speculation {
    /// Most rows of a step that has drafts; 0 turns speculation off.
    pub max_rows: usize,
    /// Time that one more row adds to a step, as a fraction of the time of a step with one row.
    pub row_cost: f32,
}

impl Speculation {
    pub const OFF: Self = Self { max_rows: 0, row_cost: 0.0 };

    /// Measured with SmolLM2-135M on two cores with AVX-512: steps of 1, 4, 8, 12, 14 and 16 rows take 24, 27, 33, 40,
    /// 51 and 54 ms of CPU time. From 14 rows on they pass a layer in two turns.
    pub const AUTO: Self = Self { max_rows: 12, row_cost: 0.055 };

    /// Least probability of being right with which a draft is worth its row, in a step that has so many rows and
    /// sequences without drafts. A right draft saves its sequence's share of a step; every draft costs a row.
    fn least_likelihood(&self, rows: usize, sequences: usize) -> f32 {
        let step = 1.0 + self.row_cost * rows as f32;
        self.row_cost * sequences as f32 / step
    }
}

impl Scheduler {
    /// Adds drafts to the planned sequences that decode, the likeliest drafts first, up to [`Speculation::max_rows`]
    /// rows.
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

    /// Drops the indexes of all groups but those of `sequences`, so that there are never many.
    fn forget_other_groups(&mut self, sequences: &[SeqId]) {
        let wanted: BTreeSet<u64> = sequences.iter().map(|id| id.admission).collect();
        let others = self.groups.values_mut().filter(|group| !wanted.contains(&group.admission));
        others.for_each(|group| group.index = None);
    }

    /// Finds at most `limit` drafts for a planned sequence; none if it does not decode.
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
        let Some(mut found) = index.find(&sequence.context(LONGEST), limit) else { return Continuation::default() };
        if let Some(thinking) = sequence.thinking {
            found.tokens.truncate(thinking.drawn_after(&found.tokens));
        }
        Some(found)
            .filter(|found| found.tokens.first().is_some_and(|&token| sequence.allows(token)))
            .unwrap_or_default()
    }

    /// Adds drafts to the planned sequence at `place` in the plan, as many as fit into free blocks and its grammar
    /// allows.
    fn add_draft(&mut self, place: usize, draft: &[TokenId], matched: usize, builder: &mut PlanBuilder) {
        if draft.is_empty() {
            return;
        }
        let sequence = self.running.get_mut(&self.in_flight[place]).expect("a planned sequence runs");
        let known = sequence.num_tokens();
        let room = self.cache.room(&sequence.table) - known;
        let mut draft = &draft[..draft.len().min(room)];
        let masks = match &sequence.grammar {
            Some(grammar) => grammar.masks_after(draft, &mut self.mask_budget),
            None => vec![None; draft.len()],
        };
        draft = &draft[..masks.len()];
        self.cache.grow(&mut sequence.table, known + draft.len());
        sequence.matched = matched;
        sequence.add_draft(draft, masks, &mut builder.plan.sequences[place]);
        builder.budget -= draft.len();
        self.stats.drafts += u64::from(!draft.is_empty());
        self.stats.drafted_tokens += draft.len() as u64;
    }
}

impl GroupState {
    /// The state of a group whose first sequence is `first`.
    pub(super) fn new(first: SeqId, live_samples: usize) -> Self {
        let SeqId { tenant, admission, .. } = first;
        Self { tenant, admission, live_samples, ended: Vec::new(), index: None, acceptance: Acceptance::default() }
    }

    /// Id of the sequence of a sample.
    pub(super) fn id(&self, sample_index: u32) -> SeqId {
        SeqId { tenant: self.tenant, admission: self.admission, sample_index }
    }

    /// Keeps the output of a sample that has ended, if there is room for all of it.
    pub(super) fn keep(&mut self, sample_index: u32, outputs: Vec<TokenId>) {
        let kept: usize = self.ended.iter().map(|(_, outputs)| outputs.len()).sum();
        if kept + outputs.len() <= MOST_ENDED_TOKENS {
            self.ended.push((sample_index, outputs));
        }
    }
}
