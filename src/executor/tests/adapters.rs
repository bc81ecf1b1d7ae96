//! Adapters that stay resident: as merged ones up to rounding, and to the bit the same alone or in any batch.

use std::sync::Arc;

use rand::Rng;

use super::harness::{DTYPES, Setup, fixture, logprobs, random, sequence, worlds};
use crate::error::Error;
use crate::executor::{Executor, Ranks, WeightOrder};
use crate::weights::Adapter;

const ALL: [&str; 8] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"];

fn add(ranks: &mut Ranks, generation: u64, adapter: &Arc<Adapter>) {
    ranks.write(WeightOrder::AddAdapter { generation, adapter: adapter.clone() }).unwrap();
}

/// Adapters of other ranks, sizes and layers.
fn add_three(setup: &Setup, ranks: &mut Ranks) {
    add(ranks, 3, &setup.adapter(31, &ALL, 3, 0.5, false));
    add(ranks, 7, &setup.adapter(32, &["v_proj", "down_proj"], 8, 0.5, false));
    add(ranks, 8, &setup.adapter(33, &["k_proj", "gate_proj", "up_proj", "lm_head"], 1, 0.5, false));
}

/// Tokens of sequences with the adapter of each.
fn requests() -> Vec<(Vec<u32>, Option<u64>)> {
    let mut random = random(41);
    let mut tokens = |len: usize| (0..len).map(|_| random.random_range(0..512)).collect::<Vec<u32>>();
    let adapters = [None, Some(3), Some(7), Some(3), None, Some(8)];
    [9, 1, 17, 30, 2, 12].into_iter().zip(adapters).map(|(len, adapter)| (tokens(len), adapter)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_mix_on_any_number_of_ranks() {
    for model in ["llama", "qwen2", "qwen3", "qwen_v1", "qwen3_moe"] {
        for dtype in DTYPES {
            let setup = Setup::open(&fixture(model), dtype, 1);
            let mut ranks = setup.ranks();
            add_three(&setup, &mut ranks);
            let alone: Vec<Vec<u32>> = requests()
                .iter()
                .enumerate()
                .map(|(i, (tokens, adapter))| bits(&logprobs(&mut ranks, vec![sequence(i, tokens, *adapter)])))
                .collect();
            for world in worlds(model) {
                let setup = Setup::open(&fixture(model), dtype, world);
                let mut ranks = setup.ranks();
                add_three(&setup, &mut ranks);
                let mix = |order: &[usize]| {
                    let all = requests();
                    order.iter().map(|&i| sequence(i, &all[i].0, all[i].1)).collect::<Vec<_>>()
                };
                for order in [vec![0, 1, 2, 3, 4, 5], vec![3, 2, 5, 0, 1, 4], vec![1, 3], vec![2, 4]] {
                    let expected: Vec<u32> = order.iter().flat_map(|&i| alone[i].clone()).collect();
                    assert!(bits(&logprobs(&mut ranks, mix(&order))) == expected, "{order:?} on {world} ranks");
                }
            }
        }
    }
}

#[test]
fn rows_without_an_adapter_are_those_of_a_server_without_adapters() {
    let setup = Setup::open(&fixture("llama"), DTYPES[1], 2);
    let base = |ranks: &mut Ranks| {
        let requests = requests().into_iter().enumerate();
        bits(&logprobs(ranks, requests.map(|(i, (tokens, _))| sequence(i, &tokens, None)).collect()))
    };
    let mut ranks = setup.ranks();
    let before = base(&mut ranks);
    add_three(&setup, &mut ranks);
    assert_eq!(base(&mut ranks), before);
    let of_seven = |ranks: &mut Ranks| bits(&logprobs(ranks, vec![sequence(0, &requests()[2].0, Some(7))]));
    let seven = of_seven(&mut ranks);
    assert_ne!(seven, bits(&logprobs(&mut ranks, vec![sequence(0, &requests()[2].0, Some(3))])));
    ranks.write(WeightOrder::RemoveAdapter { generation: 3 }).unwrap();
    assert_eq!(of_seven(&mut ranks), seven, "after another one is gone");
    // Adapters outlive the sleep of the workspace.
    ranks.release(crate::executor::MemoryKind::Workspace, u64::MAX).unwrap();
    ranks.restore(crate::executor::MemoryKind::Workspace).unwrap();
    assert_eq!(of_seven(&mut ranks), seven, "after a sleep");
}

#[test]
fn an_adapter_of_zeros_changes_no_bit() {
    for dtype in DTYPES {
        let setup = Setup::open(&fixture("qwen2"), dtype, 2);
        let mut ranks = setup.ranks();
        add(&mut ranks, 1, &setup.adapter(34, &ALL, 4, 0.0, false));
        for (tokens, _) in requests() {
            let [base, zero] = [None, Some(1)].map(|a| bits(&logprobs(&mut ranks, vec![sequence(0, &tokens, a)])));
            assert_eq!(zero, base);
        }
    }
}

#[test]
fn factors_without_a_place_are_refused_by_name() {
    let adapter = Setup::open(&fixture("llama"), DTYPES[0], 1).adapter(1, &["q_proj", "lm_head"], 2, 0.5, false);
    for world in worlds("llama-tied") {
        let mut ranks = Setup::open(&fixture("llama-tied"), DTYPES[0], world).ranks();
        let error = ranks.check(&WeightOrder::AddAdapter { generation: 1, adapter: adapter.clone() }).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { field, .. } if field == "lm_head.weight"), "{error}");
    }
}

/// In float32, whose rounding is the only difference: of `W + B A` when it is stored, and of the order of the sums.
#[test]
fn unmerged_is_merged_up_to_rounding() {
    const TOLERANCE: f32 = 1e-4;
    for model in ["llama", "qwen2", "qwen3", "llama-tied", "qwen_v1", "phi3", "smollm3", "qwen3_moe", "glm4_moe"] {
        let setup = Setup::open(&fixture(model), DTYPES[0], 2);
        let layers = if setup.config.tie_word_embeddings { &ALL[..7] } else { &ALL[..] };
        let mut ranks = setup.ranks();
        let adapter = setup.adapter(35, layers, 4, 0.3, false);
        add(&mut ranks, 5, &adapter);
        let run = |ranks: &mut Ranks, adapter| {
            let requests = requests().into_iter().enumerate();
            logprobs(ranks, requests.map(|(i, (tokens, _))| sequence(i, &tokens, adapter)).collect())
        };
        let (base, unmerged) = (run(&mut ranks, None), run(&mut ranks, Some(5)));
        let none = Arc::new(Adapter::none());
        ranks.write(WeightOrder::Merge { before: none, after: adapter }).unwrap();
        let merged = run(&mut ranks, None);
        let furthest = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let (error, effect) = (furthest(&unmerged, &merged), furthest(&base, &merged));
        println!("{model}: error {error:e}, effect of the adapter {effect}");
        assert!(error < TOLERANCE && effect > 0.1, "{model}: error {error:e}, effect {effect}");
    }
}
