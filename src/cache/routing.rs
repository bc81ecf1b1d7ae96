//! The experts that tokens took, kept in the host's memory beside the KV cache: a row for each slot of a block.

use std::ops::Range;

use crate::types::{BlockCopy, BlockId, PlanSequence};

/// The rows of all blocks. It takes memory when the first row is written.
///
/// A row belongs to the token whose KV is in the same slot, so a prefix that is found in the cache has its rows.
#[derive(Clone, Debug)]
pub struct RoutingCache {
    row_bytes: usize,
    block_size: usize,
    blocks: usize,
    /// `[blocks, block_size, row_bytes]`; empty before the first row is written.
    rows: Vec<u8>,
}

impl RoutingCache {
    /// Rows of `row_bytes` for `blocks` blocks of `block_size` tokens.
    pub fn new(row_bytes: usize, blocks: usize, block_size: usize) -> Self {
        Self { row_bytes, block_size, blocks, rows: Vec::new() }
    }

    /// Bytes that so many blocks take.
    pub fn bytes(row_bytes: usize, blocks: usize, block_size: usize) -> u64 {
        (row_bytes * block_size * blocks) as u64
    }

    /// Copies the first rows of a block, as the KV of a fork is copied.
    pub fn copy(&mut self, copy: &BlockCopy) {
        if self.rows.is_empty() {
            return;
        }
        let [src, dst] = [copy.src, copy.dst].map(|block| self.slot(block, 0));
        self.rows.copy_within(src..src + copy.tokens * self.row_bytes, dst);
    }

    /// Keeps the rows of the tokens that a step has computed of a sequence. `rows` has a row for each of them.
    pub fn write(&mut self, planned: &PlanSequence, rows: &[u8]) {
        assert_eq!(rows.len(), planned.tokens.len() * self.row_bytes, "a row for each token");
        if self.rows.is_empty() {
            self.rows = vec![0; self.blocks * self.block_size * self.row_bytes];
        }
        for (token, row) in (planned.start..).zip(rows.chunks_exact(self.row_bytes)) {
            let slot = self.slot(planned.block_table[token / self.block_size], token % self.block_size);
            self.rows[slot..slot + self.row_bytes].copy_from_slice(row);
        }
    }

    /// The rows of `tokens` of a sequence with this block table. Their KV must have been computed.
    pub fn read(&self, block_table: &[BlockId], tokens: Range<usize>) -> Vec<u8> {
        let mut rows = Vec::with_capacity(tokens.len() * self.row_bytes);
        for token in tokens {
            let slot = self.slot(block_table[token / self.block_size], token % self.block_size);
            rows.extend_from_slice(&self.rows[slot..slot + self.row_bytes]);
        }
        rows
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Gives the memory back. No row is there any more.
    pub fn release(&mut self) {
        self.rows = Vec::new();
    }

    /// Where the row of a slot begins.
    fn slot(&self, block: BlockId, offset: usize) -> usize {
        (block as usize * self.block_size + offset) * self.row_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_blocks_of_their_tokens() {
        let mut cache = RoutingCache::new(2, 4, 2);
        cache.copy(&BlockCopy { src: 0, dst: 1, tokens: 1 });
        let planned = |start, tokens: usize, block_table: &[BlockId]| PlanSequence {
            start,
            tokens: vec![0; tokens],
            block_table: block_table.to_vec(),
            ..PlanSequence::default()
        };
        cache.write(&planned(0, 3, &[3, 1]), &[1, 2, 3, 4, 5, 6]);
        assert_eq!(cache.read(&[3, 1], 0..3), [1, 2, 3, 4, 5, 6]);
        // A fork gets a copy of the partial block, and both go on.
        cache.copy(&BlockCopy { src: 1, dst: 0, tokens: 1 });
        cache.write(&planned(3, 1, &[3, 1]), &[7, 8]);
        cache.write(&planned(3, 1, &[3, 0]), &[9, 9]);
        assert_eq!(cache.read(&[3, 1], 1..4), [3, 4, 5, 6, 7, 8]);
        assert_eq!(cache.read(&[3, 0], 1..4), [3, 4, 5, 6, 9, 9]);
        cache.release();
        cache.write(&planned(0, 1, &[2]), &[1, 1]);
        assert_eq!(cache.read(&[2], 0..1), [1, 1]);
    }
}
