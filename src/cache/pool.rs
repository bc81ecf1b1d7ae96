//! Physical blocks: reference counts, the LRU free list and the map from hashes to blocks. Every operation is O(1), but
//! for a reset.

use std::collections::HashMap;

use super::BlockHash;
use crate::types::BlockId;

/// Numbers of blocks by their state, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub total: usize,
    /// Held by no sequence, whether cached or not.
    pub free: usize,
    /// Free, with a prefix that can still be found by its hash.
    pub cached: usize,
}

/// The pool's state of one block.
#[derive(Clone, Debug)]
struct KvBlock {
    /// Number of block tables that contain it.
    refs: u32,
    /// Hash that the block is registered under. The pool's map has this hash exactly as long.
    hash: Option<BlockHash>,
    /// Neighbours in the free list; without meaning while `refs > 0`.
    prev: BlockId,
    next: BlockId,
}

/// All physical blocks of one cache.
///
/// The free list is doubly linked through the blocks themselves, so that a block can be taken out of its middle without
/// a search. Blocks are allocated from its front. Blocks without a hash come first, then cached ones, the least
/// recently freed first. Among the blocks without a hash, those that have been used come before those that never were:
/// the system has given pages for the first, and would have to find new ones for the others.
#[derive(Clone, Debug)]
pub struct BlockPool {
    /// All blocks by their id, and behind them the sentinel of the free list, whose `next` is the list's front and
    /// whose `prev` is its back.
    blocks: Vec<KvBlock>,
    cached: HashMap<BlockHash, BlockId>,
    num_free: usize,
    num_free_cached: usize,
}

impl BlockPool {
    /// # Panics
    /// If there are more blocks than a `BlockId` can count.
    pub fn new(num_blocks: usize) -> Self {
        let sentinel = BlockId::try_from(num_blocks).expect("a block id has 32 bits");
        let block = |i: BlockId| KvBlock {
            refs: 0,
            hash: None,
            prev: if i == 0 { sentinel } else { i - 1 },
            next: if i == sentinel { 0 } else { i + 1 },
        };
        Self {
            blocks: (0..=sentinel).map(block).collect(),
            cached: HashMap::new(),
            num_free: num_blocks,
            num_free_cached: 0,
        }
    }

    pub fn counts(&self) -> BlockCounts {
        BlockCounts { total: self.blocks.len() - 1, free: self.num_free, cached: self.num_free_cached }
    }

    pub fn num_free(&self) -> usize {
        self.num_free
    }

    pub fn refs(&self, id: BlockId) -> u32 {
        self.block(id).refs
    }

    pub fn is_registered(&self, id: BlockId) -> bool {
        self.block(id).hash.is_some()
    }

    /// Takes the block at the front of the free list, with a reference count of 1 and without a hash. `None` if every
    /// block is held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.num_free == 0 {
            return None;
        }
        let id = self.blocks[self.sentinel()].next;
        self.unlink(id);
        if let Some(hash) = self.blocks[id as usize].hash.take() {
            self.cached.remove(&hash);
        }
        self.blocks[id as usize].refs = 1;
        Some(id)
    }

    /// Adds a holder. A block that had none leaves the free list.
    pub fn acquire(&mut self, id: BlockId) {
        if self.block(id).refs == 0 {
            self.unlink(id);
        }
        self.blocks[id as usize].refs += 1;
    }

    /// Removes a holder. With the last one the block goes to the free list. It keeps its hash there, so that a request
    /// with the same prefix can reuse it.
    ///
    /// # Panics
    /// If no table holds the block.
    pub fn release(&mut self, id: BlockId) {
        let refs = self.block(id).refs;
        assert!(refs > 0, "block {id} is released but nobody holds it");
        self.blocks[id as usize].refs = refs - 1;
        if refs == 1 {
            self.link(id);
        }
    }

    /// The block registered under `hash`, held or free.
    pub fn lookup(&self, hash: &BlockHash) -> Option<BlockId> {
        self.cached.get(hash).copied()
    }

    /// Registers a held block under a hash, by which it can be found from now on. Nothing happens if another block has
    /// this hash already.
    ///
    /// # Panics
    /// If no table holds the block, or it is registered already.
    pub fn register(&mut self, id: BlockId, hash: BlockHash) {
        assert!(self.block(id).refs > 0, "block {id} is registered but nobody holds it");
        assert!(!self.is_registered(id), "block {id} is registered twice");
        if let std::collections::hash_map::Entry::Vacant(entry) = self.cached.entry(hash) {
            entry.insert(id);
            self.blocks[id as usize].hash = Some(hash);
        }
    }

    /// Removes the hashes of all free blocks and returns how many had one. Held blocks keep theirs.
    ///
    /// Free blocks are then allocated in ascending order, as at the start. So blocks that were never used stay behind
    /// all others.
    pub fn reset(&mut self) -> usize {
        let sentinel = self.sentinel();
        let mut last = sentinel;
        for id in 0..sentinel {
            if self.blocks[id].refs > 0 {
                continue;
            }
            if let Some(hash) = self.blocks[id].hash.take() {
                self.cached.remove(&hash);
            }
            self.blocks[id].prev = last as BlockId;
            self.blocks[last].next = id as BlockId;
            last = id;
        }
        self.blocks[last].next = sentinel as BlockId;
        self.blocks[sentinel].prev = last as BlockId;
        std::mem::take(&mut self.num_free_cached)
    }

    /// Asserts that the reference counts are `expected_refs` (one per block), that the free list has exactly the blocks
    /// with reference count 0, and that blocks and map agree about hashes.
    pub fn check_integrity(&self, expected_refs: &[u32]) {
        let sentinel = self.sentinel();
        assert_eq!(expected_refs.len(), sentinel, "one expected count per block");
        let mut listed = vec![false; sentinel];
        let (mut prev, mut id) = (sentinel, self.blocks[sentinel].next as usize);
        while id != sentinel {
            assert_eq!(self.blocks[id].prev as usize, prev, "free list: back link of block {id}");
            assert!(!listed[id], "free list: block {id} is in it twice");
            listed[id] = true;
            (prev, id) = (id, self.blocks[id].next as usize);
        }
        assert_eq!(self.blocks[sentinel].prev as usize, prev, "free list: its back");
        let (mut free, mut free_cached, mut hashed) = (0, 0, 0);
        for (id, &expected) in expected_refs.iter().enumerate() {
            let block = &self.blocks[id];
            assert_eq!(block.refs, expected, "reference count of block {id}");
            assert_eq!(listed[id], expected == 0, "block {id} with {expected} holders in the free list");
            free += usize::from(listed[id]);
            if let Some(hash) = &block.hash {
                assert_eq!(self.lookup(hash), Some(id as BlockId), "the map does not lead to block {id}");
                free_cached += usize::from(listed[id]);
                hashed += 1;
            }
        }
        assert_eq!(self.cached.len(), hashed, "hashes that lead to no block");
        assert_eq!((self.num_free, self.num_free_cached), (free, free_cached), "counts of free and cached blocks");
    }

    fn sentinel(&self) -> usize {
        self.blocks.len() - 1
    }

    fn block(&self, id: BlockId) -> &KvBlock {
        assert!((id as usize) < self.sentinel(), "block {id} does not exist");
        &self.blocks[id as usize]
    }

    fn unlink(&mut self, id: BlockId) {
        let KvBlock { prev, next, ref hash, .. } = self.blocks[id as usize];
        self.num_free -= 1;
        self.num_free_cached -= usize::from(hash.is_some());
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
    }

    /// Puts a block into the free list: at the back if it has a hash, else at the front, so that it is allocated before
    /// any cached block.
    fn link(&mut self, id: BlockId) {
        let sentinel = self.sentinel() as BlockId;
        let cached = self.blocks[id as usize].hash.is_some();
        self.num_free += 1;
        self.num_free_cached += usize::from(cached);
        let (prev, next) = if cached {
            (self.blocks[sentinel as usize].prev, sentinel)
        } else {
            (sentinel, self.blocks[sentinel as usize].next)
        };
        let block = &mut self.blocks[id as usize];
        (block.prev, block.next) = (prev, next);
        self.blocks[prev as usize].next = id;
        self.blocks[next as usize].prev = id;
    }
}

#[cfg(test)]
mod tests;
