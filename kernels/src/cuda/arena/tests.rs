//! Allocations of an arena keep their addresses and bytes, and all arenas together stay within their quota.

use super::super::context::Context;
use super::super::kv::CudaKv;
use super::super::matrix::CudaMatrix;
use super::*;
use crate::backend::storage::{KvCacheImpl, MatrixImpl};
use crate::cpu::testing::Random;
use crate::kv_layout::KvLayout;
use crate::values::StorageDtype;
use crate::weights::MatrixShape;

/// An allocation, what was written to it, and whether it has memory.
struct Held {
    memory: ArenaAllocation,
    pointer: u64,
    values: Vec<u32>,
    has_memory: bool,
}

impl Held {
    fn new(context: &Context, random: &mut Random) -> Self {
        // From a few bytes to more than a page.
        let most = [64, 4096, 3 * PAGE_BYTES / 8][random.below(3)];
        let values: Vec<u32> = (0..1 + random.below(most)).map(|_| random.below(1 << 30) as u32).collect();
        let memory = context.weights.allocate(size_of_val(&values[..])).unwrap();
        context.copies.write(memory.pointer, &values).unwrap();
        Self { pointer: memory.pointer, memory, values, has_memory: true }
    }

    fn check(&self, context: &Context) {
        assert_eq!(self.memory.pointer, self.pointer);
        if self.has_memory {
            let mut read = vec![0_u32; self.values.len()];
            context.copies.read(self.pointer, &mut read).unwrap();
            assert!(read == self.values, "{} values at {:#x}", read.len(), self.pointer);
        }
    }
}

/// Bytes that `held` takes at least, and at most.
fn bounds(held: &[Held]) -> (u64, u64) {
    let with_memory = held.iter().filter(|held| held.has_memory).map(|held| size_of_val(&held.values[..]) as u64);
    with_memory.fold((0, 0), |(least, most), bytes| (least + bytes, most + bytes + 2 * PAGE_BYTES as u64))
}

#[test]
fn what_sleeps_wakes_at_its_address_with_its_bytes() {
    let context = Context::open(0).unwrap();
    for seed in 0..4 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let mut held: Vec<Held> = Vec::new();
        for _ in 0..40 {
            match random.below(6) {
                0 | 1 => held.push(Held::new(&context, &mut random)),
                2 if !held.is_empty() => drop(held.swap_remove(random.below(held.len()))),
                3 if !held.is_empty() => {
                    let i = random.below(held.len());
                    held[i].memory.release();
                    held[i].has_memory = false;
                }
                4 => {
                    for held in held.iter_mut().filter(|held| !held.has_memory) {
                        held.memory.restore().unwrap();
                        context.copies.write(held.pointer, &held.values).unwrap();
                        held.has_memory = true;
                    }
                }
                _ => {
                    let awake: u64 = bounds(&held).0;
                    context.weights.offload(u64::MAX).unwrap();
                    assert_eq!(context.mapped_bytes(), 0, "everything is with the driver again");
                    let offloaded = context.weights.offloaded_bytes();
                    assert!((awake..=awake + (held.len() * ALIGNMENT) as u64).contains(&offloaded), "{offloaded}");
                    context.weights.bring_back().unwrap();
                    assert_eq!(context.weights.offloaded_bytes(), 0);
                }
            }
            held.iter().for_each(|held| held.check(&context));
            context.trim();
            let (least, most) = bounds(&held);
            assert!(
                (least..=most).contains(&context.mapped_bytes()),
                "{} of {least} to {most}",
                context.mapped_bytes()
            );
        }
    }
}

#[test]
fn matrices_and_caches_keep_their_addresses() {
    let context = Arc::new(Context::open(0).unwrap());
    let shape = MatrixShape { dtype: StorageDtype::Bf16, n: 300, k: 256, leaves: 2 };
    let layout = KvLayout { blocks: 40, block_size: 16, kv_heads: 2, head_dim: 64, dtype: StorageDtype::Bf16 };
    let mut matrices: Vec<_> = (0..5).map(|_| CudaMatrix::zeros(&context, shape).unwrap()).collect();
    let mut caches: Vec<_> = (0..3).map(|_| CudaKv::new(&context, layout).unwrap()).collect();
    let addresses = |matrices: &[CudaMatrix], caches: &[CudaKv]| {
        let of_caches = caches.iter().flat_map(|cache| [cache.keys(), cache.values()]);
        matrices.iter().map(|matrix| matrix.row(0)).chain(of_caches).collect::<Vec<_>>()
    };
    let before = addresses(&matrices, &caches);
    for _ in 0..2 {
        // As a sleep does: some matrices go, the others are moved, the caches go.
        matrices.iter_mut().step_by(2).for_each(|matrix| assert!(matrix.release()));
        caches.iter_mut().for_each(|cache| assert!(cache.release()));
        context.weights.offload(u64::MAX).unwrap();
        context.trim();
        assert_eq!(context.mapped_bytes(), 0);
        context.weights.bring_back().unwrap();
        // In another order than they came.
        caches.iter_mut().rev().for_each(|cache| cache.restore().unwrap());
        matrices.iter_mut().rev().for_each(|matrix| matrix.restore().unwrap());
        assert_eq!(addresses(&matrices, &caches), before);
    }
}

#[test]
fn what_the_host_has_no_room_for_stays() {
    let context = Context::open(0).unwrap();
    let held: Vec<_> = (0..5).map(|seed| Held::new(&context, &mut Random::new(seed))).collect();
    let bytes: u64 = context.weights.lock().ranges(Residence::Device).iter().map(|range| range.len() as u64).sum();
    let mapped = context.mapped_bytes();
    for most in [0, bytes - 1] {
        let refused = context.weights.offload(most).unwrap_err();
        assert!(matches!(&refused, DeviceError::OutOfMemory(why) if why.contains(&bytes.to_string())), "{refused}");
        assert_eq!((context.weights.offloaded_bytes(), context.mapped_bytes()), (0, mapped));
    }
    context.weights.offload(bytes).unwrap();
    assert_eq!((context.weights.offloaded_bytes(), context.mapped_bytes()), (bytes, 0));
    context.weights.bring_back().unwrap();
    held.iter().for_each(|held| held.check(&context));
}

#[test]
fn all_arenas_together_map_no_more_than_they_may() {
    const PAGES: usize = 4;
    let context = Context::open(0).unwrap();
    context.quota.limit((PAGES * PAGE_BYTES) as u64);
    let weights = context.weights.allocate(2 * PAGE_BYTES).unwrap();
    let kv = context.kv.allocate(2 * PAGE_BYTES).unwrap();
    let refused = context.workspace.allocate(1).map(drop).unwrap_err();
    assert!(matches!(refused, DeviceError::OutOfMemory(_)), "{refused}");
    assert_eq!(context.mapped_bytes(), (PAGES * PAGE_BYTES) as u64);
    // Pages of one arena that nothing uses make room in another.
    kv.release();
    let workspace = context.workspace.allocate(PAGE_BYTES).unwrap();
    assert!(kv.restore().is_err());
    drop(workspace);
    kv.restore().unwrap();
    // A step is not refused, as long as the driver has memory.
    let step = context.scratch.allocate_for_step(1).unwrap();
    assert_eq!(context.mapped_bytes(), ((PAGES + 1) * PAGE_BYTES) as u64);
    assert!(context.scratch.allocate(PAGE_BYTES).is_err());
    drop((weights, kv, step));
    context.trim();
    assert_eq!(context.mapped_bytes(), 0);
}
