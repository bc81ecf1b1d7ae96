//! Physical blocks: reference counts, the LRU free list and the map of cached hashes. Every operation but a reset is O(1).

use std::collections::HashMap;

use super::BlockHash;
use crate::types::BlockId;

/// How the blocks are used at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub total: usize,
    /// Held by no sequence (`cached` among them).
    pub free: usize,
    /// Free, and still findable by hash.
    pub cached: usize,
}

#[derive(Clone, Debug)]
struct KvBlock {
    refs: u32,
    /// Set exactly while the map leads from this hash to this block.
    hash: Option<BlockHash>,
    /// Neighbours in the free list; meaningless while `refs > 0`.
    prev: BlockId,
    next: BlockId,
}

/// All physical blocks of one cache.
///
/// The free list is doubly linked through the blocks themselves, so that a lookup can take a block out of its middle
/// without a search. Its front is allocated next: blocks without content first, then cached ones, least recently
/// freed first. Of those without content the ones that have been allocated before come first: their memory is there,
/// where another's would be new pages.
#[derive(Clone, Debug)]
pub struct BlockPool {
    /// The last element is no block but the list's sentinel: its `next` is the front, its `prev` the back.
    blocks: Vec<KvBlock>,
    cached: HashMap<BlockHash, BlockId>,
    num_free: usize,
    num_free_cached: usize,
}

impl BlockPool {
    /// # Panics
    /// If there are more blocks than a `BlockId` can name.
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

    /// Takes the front of the free list with one reference, forgetting what it held. `None` if every block is held.
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

    /// One more holder; takes the block out of the free list if it had none.
    pub fn acquire(&mut self, id: BlockId) {
        if self.block(id).refs == 0 {
            self.unlink(id);
        }
        self.blocks[id as usize].refs += 1;
    }

    /// One holder less. The last one gives the block to the free list, where it keeps its hash.
    ///
    /// # Panics
    /// If nobody holds the block.
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

    /// Makes a held block findable, unless another block already is under this hash: the first is kept.
    ///
    /// # Panics
    /// If nobody holds the block, or it is registered already.
    pub fn register(&mut self, id: BlockId, hash: BlockHash) {
        assert!(self.block(id).refs > 0, "block {id} is registered but nobody holds it");
        assert!(!self.is_registered(id), "block {id} is registered twice");
        if let std::collections::hash_map::Entry::Vacant(entry) = self.cached.entry(hash) {
            entry.insert(id);
            self.blocks[id as usize].hash = Some(hash);
        }
    }

    /// Forgets the content of every free block and returns how many had one. Held blocks stay findable.
    ///
    /// Free blocks are then allocated in ascending order, as at the start. Those that were never allocated, whose memory
    /// the system has still to find, are the last of all blocks, so all that had content come before them.
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

    /// Asserts that the free list is exactly the blocks with reference count 0, that reference counts are
    /// `expected_refs` (one per block), and that hashes and map agree.
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

    /// To the back if it is worth finding again, else to the front, so that it is reused before any cached block.
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
