//! The sequences of a step that candle-flash-attn computes.

use crate::kv_layout::KvLayout;
use crate::step::AttentionSequence;

/// The host's view of these sequences.
pub(in crate::cuda) struct FlashPlan {
    /// Where its words begin.
    pub first_word: usize,
    /// Its sequences, and the gaps between them: rows that see nothing.
    pub parts: usize,
    /// Rows up to the end of its last sequence.
    pub rows: usize,
    /// Rows of the longest part.
    pub most_rows: usize,
    /// Positions of the longest sequence.
    pub most_positions: usize,
    /// Words of each part's block table.
    pub table: usize,
    /// Positions of each sequence, and blocks in its table.
    sequences: Vec<(usize, usize)>,
    /// The largest number of a block in a table.
    last_block: u32,
}

impl FlashPlan {
    /// Appends where the rows and positions of each part begin, then the block tables, to the words of a step. `None`
    /// if there is no sequence.
    pub fn write(sequences: &[AttentionSequence<'_>], words: &mut Vec<u32>) -> Option<Self> {
        let mut plan = Self {
            first_word: words.len(),
            parts: 0,
            rows: 0,
            most_rows: 0,
            most_positions: 0,
            table: sequences.iter().map(|s| s.block_table.len()).max()?,
            sequences: sequences.iter().map(|s| (s.start_position + s.rows, s.block_table.len())).collect(),
            last_block: sequences.iter().flat_map(|s| s.block_table.iter().copied()).max().unwrap_or(0),
        };
        let word = |count: usize| u32::try_from(count).expect("rows and positions of a step fit into 32 bits");
        let (mut rows, mut positions, mut tables) = (vec![0], vec![0], Vec::new());
        let mut part = |sequence: Option<&AttentionSequence<'_>>, end: usize| {
            let len = sequence.map_or(0, |s| s.start_position + s.rows);
            plan.most_rows = plan.most_rows.max(end - plan.rows);
            plan.most_positions = plan.most_positions.max(len);
            (plan.parts, plan.rows) = (plan.parts + 1, end);
            rows.push(word(end));
            positions.push(positions.last().expect("the first is 0") + word(len));
            tables.extend_from_slice(sequence.map_or(&[], |s| s.block_table));
            tables.resize(plan.parts * plan.table, 0);
            end
        };
        let mut end = 0;
        for sequence in sequences {
            if sequence.first_row > end {
                part(None, sequence.first_row);
            }
            end = part(Some(sequence), sequence.first_row + sequence.rows);
        }
        [rows, positions, tables].iter().for_each(|list| words.extend_from_slice(list));
        Some(plan)
    }

    /// # Panics
    /// If there are fewer rows, or a block table is too short or names a block outside the cache.
    pub fn check(&self, layout: &KvLayout, rows: usize) {
        let KvLayout { blocks, block_size, .. } = *layout;
        assert!(self.rows <= rows, "row {} of {rows}", self.rows);
        assert!((self.last_block as usize) < blocks, "block {} of {blocks}", self.last_block);
        for (positions, blocks) in &self.sequences {
            assert!(blocks * block_size >= *positions, "{blocks} blocks of {block_size} for {positions} tokens");
        }
    }
}

/// Whether a sequence is computed by it, and not by our own kernels: a prompt of which the rows see tokens up to their
/// own.
pub(in crate::cuda) fn is_of_flash(sequence: &AttentionSequence<'_>) -> bool {
    sequence.rows > 1 && sequence.visible.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_between_its_sequences_are_parts_that_see_nothing() {
        let sequence = |first_row, rows, start_position, block_table| AttentionSequence {
            first_row,
            rows,
            start_position,
            visible: None,
            block_table,
        };
        let mut words = vec![7];
        let sequences = [sequence(2, 3, 40, &[5, 6][..]), sequence(5, 2, 0, &[9]), sequence(9, 2, 1, &[4])];
        let plan = FlashPlan::write(&sequences, &mut words).unwrap();
        assert_eq!((plan.first_word, plan.parts, plan.rows, plan.table), (1, 5, 11, 2));
        assert_eq!((plan.most_rows, plan.most_positions, plan.last_block), (3, 43, 9));
        let (rows, positions) = ([0, 2, 5, 7, 9, 11], [0, 0, 43, 45, 45, 48]);
        let tables = [0, 0, 5, 6, 9, 0, 0, 0, 4, 0];
        assert_eq!(words[1..], [&rows[..], &positions, &tables].concat());
        assert!(FlashPlan::write(&[], &mut words).is_none());
    }
}
