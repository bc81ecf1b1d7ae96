//! The manager against a naive model: lists searched from end to end, prefixes compared token by token.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cache::CacheSalt;
use crate::types::{Prompt, TokenId};

const BLOCK_SIZE: usize = 3;
const NUM_BLOCKS: usize = 12;

/// Content of a block in the naive model: the salt, and all tokens up to the block's end.
type Content = (u64, Vec<TokenId>);

#[derive(Default)]
struct Naive {
    refs: Vec<u32>,
    /// The free list, its front first.
    free: Vec<BlockId>,
    cached: Vec<(Content, BlockId)>,
}

impl Naive {
    fn allocate(&mut self) -> BlockId {
        let id = self.free.remove(0);
        self.cached.retain(|&(_, block)| block != id);
        self.refs[id as usize] = 1;
        id
    }

    fn acquire(&mut self, id: BlockId) {
        self.free.retain(|&block| block != id);
        self.refs[id as usize] += 1;
    }

    fn release(&mut self, id: BlockId) {
        self.refs[id as usize] -= 1;
        if self.refs[id as usize] == 0 {
            let place = if self.is_cached(id) { self.free.len() } else { 0 };
            self.free.insert(place, id);
        }
    }

    fn is_cached(&self, id: BlockId) -> bool {
        self.cached.iter().any(|&(_, block)| block == id)
    }

    fn lookup(&self, content: &Content) -> Option<BlockId> {
        self.cached.iter().find(|(cached, _)| cached == content).map(|&(_, block)| block)
    }
}

/// A sequence in the manager and in the naive model.
struct Live {
    salt: u64,
    tokens: Vec<TokenId>,
    chain: HashChain,
    table: BlockTable,
    naive: Vec<BlockId>,
    num_registered: usize,
}

fn chain_of(salt: u64, tokens: &[TokenId]) -> HashChain {
    let mut chain = HashChain::new(CacheSalt { epoch: salt, ..CacheSalt::default() });
    tokens.chunks_exact(BLOCK_SIZE).for_each(|block| chain.push(block, &Prompt::default()));
    chain
}

struct Test {
    rng: ChaCha8Rng,
    manager: KvCacheManager,
    naive: Naive,
    live: Vec<Live>,
    hits: usize,
    copies: usize,
}

impl Test {
    fn tokens(&mut self, max: usize) -> Vec<TokenId> {
        let n = self.rng.random_range(1..=max);
        (0..n).map(|_| self.rng.random_range(0..2)).collect()
    }

    fn start(&mut self) {
        let (salt, tokens) = (self.rng.random_range(0..2), self.tokens(10));
        let chain = chain_of(salt, &tokens);
        let max_tokens = self.rng.random_range(0..tokens.len());
        let prefix = self.manager.find_prefix(&chain, max_tokens);
        let ends = (1..=max_tokens / BLOCK_SIZE).map(|i| i * BLOCK_SIZE);
        let naive: Vec<BlockId> = ends.map_while(|end| self.naive.lookup(&(salt, tokens[..end].to_vec()))).collect();
        let free = naive.iter().filter(|&id| self.naive.free.contains(id)).count();
        assert_eq!((prefix.num_blocks(), prefix.num_free()), (naive.len(), free));
        let cached = naive.len();
        self.hits += cached;
        naive.iter().for_each(|&id| self.naive.acquire(id));
        let table = self.manager.acquire(prefix);
        let start = tokens[..cached * BLOCK_SIZE].to_vec();
        let chain = chain_of(salt, &start);
        self.live.push(Live { salt, tokens: start, chain, table, naive, num_registered: cached });
        let index = self.live.len() - 1;
        if !self.extend(index, &tokens[cached * BLOCK_SIZE..]) {
            self.release(index);
        }
    }

    fn extend(&mut self, index: usize, more: &[TokenId]) -> bool {
        let sequence = &mut self.live[index];
        let (start, end) = (sequence.tokens.len(), sequence.tokens.len() + more.len());
        let copy_wanted =
            start % BLOCK_SIZE > 0 && self.naive.refs[sequence.naive[sequence.naive.len() - 1] as usize] > 1;
        let needed = end.div_ceil(BLOCK_SIZE) - sequence.naive.len() + usize::from(copy_wanted);
        let mut copies = Vec::new();
        let extended = self.manager.extend(&mut sequence.table, start, end, &mut copies);
        assert_eq!(extended, needed <= self.naive.free.len());
        if !extended {
            assert!(copies.is_empty());
            return false;
        }
        let mut naive_copies = Vec::new();
        if copy_wanted {
            let src = sequence.naive.pop().expect("there is a shared block");
            let dst = self.naive.allocate();
            self.naive.release(src);
            sequence.naive.push(dst);
            naive_copies.push(BlockCopy { src, dst, tokens: start % BLOCK_SIZE });
            self.copies += 1;
        }
        assert_eq!(copies, naive_copies);
        while sequence.naive.len() < end.div_ceil(BLOCK_SIZE) {
            sequence.naive.push(self.naive.allocate());
        }
        sequence.tokens.extend_from_slice(more);
        self.register(index);
        true
    }

    fn register(&mut self, index: usize) {
        let sequence = &mut self.live[index];
        for i in sequence.num_registered..sequence.tokens.len() / BLOCK_SIZE {
            let end = (i + 1) * BLOCK_SIZE;
            if i == sequence.chain.len() {
                sequence.chain.push(&sequence.tokens[end - BLOCK_SIZE..end], &Prompt::default());
            }
            self.manager.register(&sequence.table, i, sequence.chain.as_slice()[i]);
            let content = (sequence.salt, sequence.tokens[..end].to_vec());
            if self.naive.lookup(&content).is_none() {
                self.naive.cached.push((content, sequence.naive[i]));
            }
            sequence.num_registered = i + 1;
        }
    }

    fn fork(&mut self, index: usize) {
        let Live { salt, tokens, chain, table, naive, num_registered } = &self.live[index];
        naive.iter().for_each(|&id| self.naive.acquire(id));
        let fork = Live {
            salt: *salt,
            tokens: tokens.clone(),
            chain: chain.clone(),
            table: self.manager.fork(table),
            naive: naive.clone(),
            num_registered: *num_registered,
        };
        self.live.push(fork);
    }

    fn release(&mut self, index: usize) {
        let sequence = self.live.swap_remove(index);
        self.manager.release(sequence.table);
        sequence.naive.iter().rev().for_each(|&id| self.naive.release(id));
    }

    fn reset(&mut self) {
        let naive = &mut self.naive;
        let before = naive.cached.len();
        naive.cached.retain(|(_, id)| !naive.free.contains(id));
        naive.free.sort_unstable();
        assert_eq!(self.manager.reset_prefix_cache(), before - naive.cached.len());
    }

    fn compare(&self) {
        self.manager.check_integrity(self.live.iter().map(|sequence| &sequence.table));
        for sequence in &self.live {
            assert_eq!(sequence.table.as_slice(), sequence.naive);
        }
        let cached = self.naive.free.iter().filter(|&&id| self.naive.is_cached(id)).count();
        let counts = BlockCounts { total: NUM_BLOCKS, free: self.naive.free.len(), cached };
        assert_eq!(self.manager.counts(), counts);
    }
}

#[test]
fn a_hundred_thousand_random_operations_agree_with_the_naive_model() {
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut test = Test {
        rng: ChaCha8Rng::seed_from_u64(seed),
        manager: KvCacheManager::new(NUM_BLOCKS, BLOCK_SIZE),
        naive: Naive { refs: vec![0; NUM_BLOCKS], free: (0..NUM_BLOCKS as BlockId).collect(), cached: Vec::new() },
        live: Vec::new(),
        hits: 0,
        copies: 0,
    };
    for _ in 0..100_000 {
        let index = if test.live.is_empty() { 0 } else { test.rng.random_range(0..test.live.len()) };
        match test.rng.random_range(0..100) {
            0 => test.reset(),
            1..30 => test.start(),
            _ if test.live.is_empty() => {}
            30..60 => {
                let more = test.tokens(5);
                let _ = test.extend(index, &more);
            }
            60..75 if test.live.len() < 6 => test.fork(index),
            _ => test.release(index),
        }
        test.compare();
    }
    assert!(test.hits > 1000 && test.copies > 1000, "{} hits and {} copies are too few", test.hits, test.copies);
    while !test.live.is_empty() {
        test.release(0);
    }
    test.compare();
    assert_eq!(test.manager.num_free(), NUM_BLOCKS);
}
