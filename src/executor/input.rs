//! Flattens a plan's sequences into the rows of one batch.

use rollout_kernels::AttentionSequence;

use crate::model::{Additions, Input};
use crate::types::StepPlan;

/// The rows of one step, kept between steps so that their memory is reused.
#[derive(Default)]
pub struct FlatBatch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    /// Generation of the resident adapter of each row, if it has one.
    pub adapters: Vec<Option<u64>>,
    /// Row of each [`crate::types::LogitsRow`], in the plan's order.
    pub logits_rows: Vec<u32>,
}

impl FlatBatch {
    /// Takes the rows of `plan`, with `block_size` tokens to a block.
    pub fn fill(&mut self, plan: &StepPlan, block_size: usize) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.adapters.clear();
        self.logits_rows.clear();
        for sequence in &plan.sequences {
            let first_row = self.tokens.len();
            let end = sequence.start + sequence.tokens.len();
            assert!(sequence.block_table.len() * block_size >= end, "the block table ends before position {end}");
            self.tokens.extend_from_slice(&sequence.tokens);
            self.adapters.resize(self.tokens.len(), sequence.adapter);
            self.positions.extend(sequence.positions());
            for index in sequence.start..end {
                let block = sequence.block_table[index / block_size] as usize;
                self.slots.push((block * block_size + index % block_size) as u32);
            }
            self.logits_rows.extend(sequence.logits.iter().map(|row| (first_row + row.offset) as u32));
        }
    }

    /// The attention kernel's view of `plan`, which must be the one last taken.
    pub fn attention<'a>(plan: &'a StepPlan) -> Vec<AttentionSequence<'a>> {
        let mut first_row = 0;
        let view = |sequence: &'a crate::types::PlanSequence| {
            let rows = sequence.tokens.len();
            first_row += rows;
            AttentionSequence {
                first_row: first_row - rows,
                rows,
                start_position: sequence.start,
                block_table: &sequence.block_table,
            }
        };
        plan.sequences.iter().map(view).collect()
    }

    pub fn input<'a>(
        &'a self,
        sequences: &'a [AttentionSequence<'a>],
        additions: Option<&'a dyn Additions>,
    ) -> Input<'a> {
        Input { tokens: &self.tokens, positions: &self.positions, slots: &self.slots, sequences, additions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{LogitsRow, PlanSequence, Prompt};

    #[test]
    fn rows_follow_the_plan_and_slots_the_block_tables() {
        let logits = |offset| vec![LogitsRow { offset, tasks: Vec::new() }];
        let plan = StepPlan {
            copies: Vec::new(),
            sequences: vec![
                PlanSequence {
                    start: 3,
                    tokens: vec![7, 8, 9],
                    prompt: Prompt::default(),
                    block_table: vec![5, 2],
                    adapter: None,
                    logits: logits(2),
                },
                PlanSequence {
                    start: 8,
                    tokens: vec![4],
                    prompt: Prompt::default(),
                    block_table: vec![1, 0, 6],
                    adapter: Some(6),
                    logits: logits(0),
                },
            ],
        };
        let mut batch = FlatBatch::default();
        for _ in 0..2 {
            batch.fill(&plan, 4);
        }
        let sequences = FlatBatch::attention(&plan);
        let input = batch.input(&sequences, None);
        assert_eq!(input.tokens, [7, 8, 9, 4]);
        assert_eq!(input.positions, [3, 4, 5, 8]);
        assert_eq!(input.slots, [23, 8, 9, 24]);
        assert_eq!(batch.adapters, [None, None, None, Some(6)]);
        assert_eq!(batch.logits_rows, [2, 3]);
        assert_eq!((sequences[1].first_row, sequences[1].rows, sequences[1].start_position), (3, 1, 8));
    }
}
