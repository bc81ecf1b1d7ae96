//! The shape of a paged key-value cache.

use crate::values::StorageDtype;

/// The shape of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub blocks: usize,
    /// Tokens in a block; a multiple of 16 is fastest.
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: StorageDtype,
}

impl KvLayout {
    /// Memory of one block of one layer: keys and values.
    pub fn bytes_per_block(&self) -> usize {
        2 * self.block_len() * self.dtype.size()
    }

    /// Elements of a block's keys, or of its values.
    pub(crate) fn block_len(&self) -> usize {
        self.kv_heads * self.head_len()
    }

    /// Elements of one head of a block.
    pub(crate) fn head_len(&self) -> usize {
        self.head_dim * self.block_size
    }
}

/// Copies the first `tokens` slots of block `src` to block `dst`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub src: u32,
    pub dst: u32,
    pub tokens: usize,
}
