use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cache::{CacheSalt, HashChain};
use crate::types::Prompt;

fn hashes(n: u32) -> Vec<BlockHash> {
    let mut chain = HashChain::new(CacheSalt::default());
    (0..n).for_each(|token| chain.push(&[token], &Prompt::default()));
    chain.as_slice().to_vec()
}

#[test]
fn blocks_without_content_go_first_then_the_least_recently_freed() {
    let mut pool = BlockPool::new(4);
    let hashes = hashes(2);
    let ids: Vec<BlockId> = (0..4).map(|_| pool.allocate().expect("4 are free")).collect();
    assert_eq!(ids, [0, 1, 2, 3]);
    assert_eq!(pool.allocate(), None);
    pool.register(1, hashes[0]);
    pool.register(2, hashes[1]);
    for id in [2, 1, 0, 3] {
        pool.release(id);
    }
    pool.check_integrity(&[0; 4]);
    assert_eq!(pool.counts(), BlockCounts { total: 4, free: 4, cached: 2 });
    let order: Vec<BlockId> = std::iter::from_fn(|| pool.allocate()).collect();
    assert_eq!(order, [3, 0, 2, 1]);
    assert_eq!(pool.lookup(&hashes[0]), None, "an allocated block is forgotten");
    pool.check_integrity(&[1; 4]);
}

#[test]
fn a_freed_block_can_be_taken_back_out_of_the_middle() {
    let mut pool = BlockPool::new(3);
    let hashes = hashes(3);
    for hash in &hashes {
        let id = pool.allocate().expect("3 are free");
        pool.register(id, *hash);
    }
    (0..3).for_each(|id| pool.release(id));
    pool.acquire(pool.lookup(&hashes[1]).expect("it is cached"));
    pool.check_integrity(&[0, 1, 0]);
    assert_eq!(pool.counts(), BlockCounts { total: 3, free: 2, cached: 2 });
}

#[test]
fn of_two_equal_blocks_the_first_is_kept() {
    let mut pool = BlockPool::new(2);
    let hash = hashes(1)[0];
    for _ in 0..2 {
        let id = pool.allocate().expect("2 are free");
        pool.register(id, hash);
    }
    assert_eq!(pool.lookup(&hash), Some(0));
    assert!(!pool.is_registered(1));
    pool.check_integrity(&[1, 1]);
}

#[test]
fn reset_forgets_free_blocks_and_spares_held_ones() {
    let mut pool = BlockPool::new(3);
    let hashes = hashes(2);
    for hash in &hashes {
        let id = pool.allocate().expect("3 are free");
        pool.register(id, *hash);
    }
    pool.release(1);
    assert_eq!(pool.reset(), 1);
    assert_eq!((pool.lookup(&hashes[0]), pool.lookup(&hashes[1])), (Some(0), None));
    assert_eq!(pool.reset(), 0);
    pool.check_integrity(&[1, 0, 0]);
}

#[test]
fn blocks_that_were_allocated_before_go_first() {
    for seed in 0..50 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut pool = BlockPool::new(64);
        let hashes = hashes(64);
        let mut held: Vec<BlockId> = Vec::new();
        let mut used = 0;
        for _ in 0..400 {
            match random.random_range(0..20) {
                0 => {
                    pool.reset();
                }
                1..9 if !held.is_empty() => {
                    let id = held.swap_remove(random.random_range(0..held.len()));
                    if random.random() && !pool.is_registered(id) {
                        pool.register(id, hashes[id as usize]);
                    }
                    pool.release(id);
                }
                _ => {
                    let BlockCounts { free, cached, .. } = pool.counts();
                    let Some(id) = pool.allocate() else { continue };
                    // Empty blocks that have been used come first, then blocks that were never used, then cached ones.
                    if free - cached > 64 - used {
                        assert!((id as usize) < used, "block {id} is new, though one of the first {used} is empty");
                    } else if used < 64 {
                        assert_eq!(id as usize, used, "new blocks go in order, and before cached ones");
                        used += 1;
                    }
                    held.push(id);
                }
            }
            let refs: Vec<u32> = (0..64).map(|id| u32::from(held.contains(&id))).collect();
            pool.check_integrity(&refs);
        }
        assert!(used > 20, "only {used} blocks were used");
    }
}

#[test]
#[should_panic(expected = "nobody holds it")]
fn a_block_is_released_once() {
    let mut pool = BlockPool::new(1);
    let id = pool.allocate().expect("1 is free");
    pool.release(id);
    pool.release(id);
}
