//! Memory that is released comes back with the same weights.

use std::sync::Arc;

use rollout_kernels::MatrixShape;

use super::harness::{BLOCK_SIZE, DTYPES, Setup, bytes_of, fixture, outputs, sequence, worlds};
use crate::executor::{Executor, MemoryKind, WeightOrder};
use crate::memory::resident_bytes;
use crate::types::{BlockCopy, StepPlan};
use crate::weights::{Adapter, Partition};

#[test]
fn what_wakes_is_what_slept() {
    for (model, dtype) in [("llama", DTYPES[0]), ("qwen2", DTYPES[1]), ("glm4_moe", DTYPES[1])] {
        for world in worlds(model) {
            let setup = Setup::open(&fixture(model), dtype, world);
            let mut ranks = setup.ranks();
            let none = Arc::new(Adapter::none());
            let adapter = setup.adapter(5, &["q_proj", "down_proj"], 3, 0.5, false);
            let pushed = setup.random_values(11);
            let part = setup.part(&pushed, |name| name.contains("layers.1") || name.contains("embed"));
            let merge = |before: &Arc<Adapter>, after: &Arc<Adapter>| WeightOrder::Merge {
                before: before.clone(),
                after: after.clone(),
            };
            let steps = [
                (merge(&none, &none), &none),
                (merge(&none, &adapter), &adapter),
                (merge(&adapter, &none), &none),
                (WeightOrder::Replace { tensors: part }, &none),
                (merge(&none, &adapter), &adapter),
            ];
            for (i, (order, merged)) in steps.into_iter().enumerate() {
                ranks.write(order).unwrap();
                let (serving, before) = (setup.snapshot(&mut ranks), outputs(&mut ranks));
                let all = [MemoryKind::KvCache, MemoryKind::Workspace, MemoryKind::Weights];
                for memory in &all {
                    ranks.release(*memory, u64::MAX).unwrap();
                }
                all.iter().for_each(|memory| ranks.restore(*memory).unwrap());
                ranks.write(WeightOrder::Load { adapter: merged.clone() }).unwrap();
                setup.assert_serves(&mut ranks, &serving, &format!("after step {i}"));
                assert_eq!(outputs(&mut ranks), before, "after step {i}");
            }
            // The deep sleep: what was pushed is gone.
            ranks.release(MemoryKind::WeightsAndBase, u64::MAX).unwrap();
            ranks.restore(MemoryKind::WeightsAndBase).unwrap();
            ranks.write(WeightOrder::Load { adapter: none }).unwrap();
            let fresh = setup.snapshot(&mut setup.ranks());
            setup.assert_serves(&mut ranks, &fresh, "after the deep sleep");
            // Or it is brought by a packed push.
            ranks.release(MemoryKind::WeightsAndBase, u64::MAX).unwrap();
            ranks.restore(MemoryKind::WeightsAndBase).unwrap();
            let shadow = setup.staged(&mut ranks, &pushed);
            drop(ranks.exchange(shadow).unwrap());
            let mut direct = setup.ranks();
            direct.write(WeightOrder::Replace { tensors: setup.full(&pushed) }).unwrap();
            assert_eq!(outputs(&mut ranks), outputs(&mut direct), "after the deep sleep and a packed push");
        }
    }
}

#[test]
fn a_buffer_that_no_push_brings_stays_through_deep_sleeps() {
    for dtype in DTYPES {
        let setup = Setup::open(&fixture("glm4_moe"), dtype, 2);
        let is_buffer = |name: &str| setup.parameters.get(name).unwrap().is_buffer;
        let (mut ranks, none) = (setup.ranks(), Arc::new(Adapter::none()));
        let (first, second) = (setup.random_values(11), setup.random_values(12));
        let of_each = setup.parameters.iter().zip(first.iter().zip(&second));
        let both: Vec<_> = of_each.map(|(s, (old, new))| if s.is_buffer { old } else { new }.clone()).collect();
        ranks.write(WeightOrder::Replace { tensors: setup.full(&first) }).unwrap();
        ranks.release(MemoryKind::WeightsAndBase, u64::MAX).unwrap();
        ranks.restore(MemoryKind::WeightsAndBase).unwrap();
        ranks.write(WeightOrder::Replace { tensors: setup.part(&second, |name| !is_buffer(name)) }).unwrap();
        setup.assert_serves(&mut ranks, &bytes_of(&setup, &both), "pushed without buffers");
        // What serves is the base from then on.
        ranks.release(MemoryKind::Weights, u64::MAX).unwrap();
        ranks.restore(MemoryKind::Weights).unwrap();
        ranks.write(WeightOrder::Load { adapter: none.clone() }).unwrap();
        setup.assert_serves(&mut ranks, &bytes_of(&setup, &both), "after a sleep");
        ranks.release(MemoryKind::WeightsAndBase, u64::MAX).unwrap();
        ranks.restore(MemoryKind::WeightsAndBase).unwrap();
        ranks.write(WeightOrder::Load { adapter: none }).unwrap();
        setup.assert_serves(&mut ranks, &bytes_of(&setup, &setup.base()), "the checkpoint after a deep sleep");
    }
}

#[test]
fn a_released_cache_is_back_with_the_system() {
    const BLOCKS: u32 = 6000;
    let setup = Setup::open(&fixture("llama"), DTYPES[0], 2);
    let mut ranks = setup.ranks_with(BLOCKS as usize);
    let copies = (1..BLOCKS).map(|dst| BlockCopy { src: 0, dst, tokens: BLOCK_SIZE }).collect();
    ranks
        .launch(Arc::new(StepPlan { copies, sequences: vec![sequence(0, &[1], None)], ..StepPlan::default() }))
        .unwrap();
    ranks.collect().unwrap();
    let filled = resident_bytes();
    ranks.release(MemoryKind::KvCache, u64::MAX).unwrap();
    let fallen = filled.saturating_sub(resident_bytes());
    // Two layers of keys and values of four heads of 16 float32 each: 1 KiB a token. Other tests come and go meanwhile.
    let bytes = u64::from(BLOCKS) * BLOCK_SIZE as u64 * 1024;
    assert!(fallen > bytes * 8 / 10, "{fallen} of {bytes} bytes came back");
    ranks.restore(MemoryKind::KvCache).unwrap();
    assert_eq!(outputs(&mut ranks), outputs(&mut setup.ranks()));
}

#[test]
fn a_matrix_of_which_a_part_was_changed_stays_whole_and_is_counted() {
    for world in [1, 2] {
        let setup = Setup::open(&fixture("llama"), DTYPES[1], world);
        let mut ranks = setup.ranks();
        let name = "model.layers.0.self_attn.k_proj.weight".to_string();
        let delta = setup.delta(&[(name.clone(), vec![(3, 0.5)])]);
        ranks.write(WeightOrder::Patch { delta, merged: Arc::new(Adapter::none()) }).unwrap();
        let expected = setup.snapshot(&mut ranks);
        let local = |of: &str| {
            let spec = setup.parameters.get(&name.replace("k_proj", of)).unwrap();
            (Partition::new(0, world).slice(spec).unwrap().rows.len(), spec.shape[1])
        };
        let rows: usize = ["q_proj", "k_proj", "v_proj"].iter().map(|of| local(of).0).sum();
        let matrix = MatrixShape { dtype: DTYPES[1], n: rows, k: local("q_proj").1, leaves: 1 };
        let matrix = setup.build(0).device.matrix(matrix).bytes();
        assert_eq!(
            ranks.release(MemoryKind::Weights, u64::MAX).unwrap().kept,
            (world * matrix) as u64,
            "{world} ranks"
        );
        ranks.restore(MemoryKind::Weights).unwrap();
        ranks.write(WeightOrder::Load { adapter: Arc::new(Adapter::none()) }).unwrap();
        setup.assert_serves(&mut ranks, &expected, "awake");
    }
}

#[test]
#[should_panic(expected = "a step without weights")]
fn nothing_is_computed_with_weights_that_are_gone() {
    let mut weights = Setup::open(&fixture("llama"), DTYPES[0], 1).weights();
    weights.model();
    weights.release(true, u64::MAX).unwrap();
    weights.model();
}
