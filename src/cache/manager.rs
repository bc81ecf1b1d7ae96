//! Block tables of sequences: prefix lookup, growth with copy on write, fork and release.

use super::{BlockCounts, BlockHash, BlockPool, HashChain};
use crate::types::{BlockCopy, BlockId};

/// The blocks of one sequence, in order: KV of the token with index `i` is in block `i / block_size`, slot
/// `i % block_size`.
///
/// Entries do not change, but for copy on write of the last one and for blocks behind the sequence's tokens. Each entry
/// is a reference in the pool, so a table cannot be cloned but only forked ([`KvCacheManager::fork`]), and must be
/// given back with [`KvCacheManager::release`].
#[derive(Debug, Default)]
pub struct BlockTable(Vec<BlockId>);

impl BlockTable {
    pub fn as_slice(&self) -> &[BlockId] {
        &self.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Cached blocks that hold the first tokens of a sequence. Valid until the manager is next changed.
#[derive(Debug, Default)]
pub struct PrefixMatch {
    blocks: Vec<BlockId>,
    num_free: usize,
}

impl PrefixMatch {
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Number of these blocks that are in the free list now, and leave it when they are acquired.
    pub fn num_free(&self) -> usize {
        self.num_free
    }
}

/// The KV cache's blocks, and all changes of block tables.
#[derive(Clone, Debug)]
pub struct KvCacheManager {
    pool: BlockPool,
    block_size: usize,
}

impl KvCacheManager {
    /// Manages `num_blocks` blocks of `block_size` tokens each, all free.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self { pool: BlockPool::new(num_blocks), block_size }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    pub fn counts(&self) -> BlockCounts {
        self.pool.counts()
    }

    pub fn num_free(&self) -> usize {
        self.pool.num_free()
    }

    /// Number of blocks that `num_tokens` tokens need.
    pub fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Looks up the longest cached prefix of a sequence: full blocks from its start, with at most `max_tokens` tokens.
    pub fn find_prefix(&self, chain: &HashChain, max_tokens: usize) -> PrefixMatch {
        let hashes = chain.as_slice();
        let limit = hashes.len().min(max_tokens / self.block_size);
        let blocks: Vec<BlockId> = hashes[..limit].iter().map_while(|hash| self.pool.lookup(hash)).collect();
        let num_free = blocks.iter().filter(|&&id| self.pool.refs(id) == 0).count();
        PrefixMatch { blocks, num_free }
    }

    /// Makes a table of the matched blocks, which are held from now on.
    pub fn acquire(&mut self, prefix: PrefixMatch) -> BlockTable {
        for &id in &prefix.blocks {
            assert!(self.pool.is_registered(id), "block {id} of a prefix is no longer cached");
            self.pool.acquire(id);
        }
        BlockTable(prefix.blocks)
    }

    /// Number of free blocks that [`Self::extend`] would take.
    pub fn blocks_to_extend(&self, table: &BlockTable, start: usize, end: usize) -> usize {
        self.blocks_for(end) - table.len() + usize::from(self.needs_copy(table, start))
    }

    /// Makes KV of the tokens `[start, end)` writable, where KV of `[0, start)` is present. Blocks are appended, and if
    /// the block of `start` is shared it is replaced by a copy, which is added to `copies`; its last holder keeps the
    /// original. Returns false and changes nothing if there are too few free blocks.
    ///
    /// Copies must be applied in the order of `copies`: the source of one may be the destination of a later one.
    ///
    /// # Panics
    /// If the table has not exactly the blocks of `[0, start)`, or if a registered block would be written.
    pub fn extend(&mut self, table: &mut BlockTable, start: usize, end: usize, copies: &mut Vec<BlockCopy>) -> bool {
        assert!(start < end, "nothing to write in [{start}, {end})");
        assert_eq!(table.len(), self.blocks_for(start), "blocks of a table with {start} computed tokens");
        if self.blocks_to_extend(table, start, end) > self.pool.num_free() {
            return false;
        }
        let tokens = start % self.block_size;
        if self.needs_copy(table, start) {
            let shared = table.0.last_mut().expect("a shared block is in the table");
            let dst = self.pool.allocate().expect("free blocks were counted");
            copies.push(BlockCopy { src: *shared, dst, tokens });
            self.pool.release(std::mem::replace(shared, dst));
        }
        if tokens > 0 {
            let id = *table.0.last().expect("a partial block is in the table");
            assert!(self.pool.refs(id) == 1 && !self.pool.is_registered(id), "block {id} must not be written");
        }
        self.grow(table, end);
        true
    }

    /// Number of tokens that the table could hold if it took all free blocks.
    pub fn room(&self, table: &BlockTable) -> usize {
        (table.len() + self.num_free()) * self.block_size
    }

    /// Appends blocks until the table has those of the tokens `[0, end)`. KV of draft tokens is written into them;
    /// [`Self::truncate`] takes back what turns out to be unused.
    ///
    /// # Panics
    /// If there are too few free blocks.
    pub fn grow(&mut self, table: &mut BlockTable, end: usize) {
        for _ in table.len()..self.blocks_for(end) {
            table.0.push(self.pool.allocate().expect("there is room for what a table is grown by"));
        }
    }

    /// Gives back the blocks behind those of the tokens `[0, end)`.
    pub fn truncate(&mut self, table: &mut BlockTable, end: usize) {
        for id in table.0.drain(self.blocks_for(end)..).rev() {
            self.pool.release(id);
        }
    }

    /// Makes a second table of the same blocks, which both hold.
    pub fn fork(&mut self, table: &BlockTable) -> BlockTable {
        for &id in &table.0 {
            self.pool.acquire(id);
        }
        BlockTable(table.0.clone())
    }

    /// Registers block `index` of the table in the prefix cache under `hash`. KV of all its slots must be computed.
    pub fn register(&mut self, table: &BlockTable, index: usize, hash: BlockHash) {
        self.pool.register(table.0[index], hash);
    }

    /// Gives all blocks of a table back. The last block goes first, so that it is also reused first: a prefix is of use
    /// without its end, but not without its beginning.
    pub fn release(&mut self, table: BlockTable) {
        for &id in table.0.iter().rev() {
            self.pool.release(id);
        }
    }

    /// Forgets every cached prefix that no sequence holds, and returns the number of its blocks.
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.pool.reset()
    }

    /// Asserts every invariant of the cache. `tables` are all tables that exist.
    pub fn check_integrity<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut refs = vec![0; self.counts().total];
        for table in tables {
            let mut own = table.0.clone();
            own.sort_unstable();
            assert!(own.windows(2).all(|pair| pair[0] != pair[1]), "a block is twice in the table {table:?}");
            for &id in &table.0 {
                refs[id as usize] += 1;
            }
        }
        self.pool.check_integrity(&refs);
    }

    fn needs_copy(&self, table: &BlockTable, start: usize) -> bool {
        !start.is_multiple_of(self.block_size) && table.0.last().is_some_and(|&id| self.pool.refs(id) > 1)
    }
}

#[cfg(test)]
mod tests;
