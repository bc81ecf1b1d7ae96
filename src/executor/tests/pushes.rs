//! Weights after loads and pushes, as they are read back from the ranks, against the same made directly.

use std::sync::Arc;

use rand::Rng;

use super::harness::{DTYPES, MODELS, Setup, bytes_of, fixture, outputs, random, worlds};
use crate::executor::{Executor, Ranks, WeightOrder};
use crate::weights::{Adapter, ParamSpec, is_of_tower};

const ALL: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Calls `check` for every model, precision and number of ranks.
fn everywhere(models: &[&str], check: impl Fn(&Setup, &mut Ranks)) {
    for model in models {
        for world in worlds(model) {
            for dtype in DTYPES {
                let setup = Setup::open(&fixture(model), dtype, world);
                check(&setup, &mut setup.ranks());
            }
        }
    }
}

fn rounded(setup: &Setup, values: &[Vec<f32>]) -> Vec<Vec<f32>> {
    setup.parameters.iter().zip(values).map(|(spec, values)| setup.rounded(spec, values)).collect()
}

fn merge(ranks: &mut Ranks, before: &Arc<Adapter>, after: &Arc<Adapter>) {
    ranks.write(WeightOrder::Merge { before: before.clone(), after: after.clone() }).unwrap();
}

#[test]
fn what_is_loaded_and_read_is_the_checkpoint() {
    everywhere(&MODELS, |setup, ranks| setup.assert_serves(ranks, &bytes_of(setup, &setup.base()), "loaded"));
    everywhere(&["qwen2", "qwen3"], |setup, ranks| {
        let mut random = random(1);
        for (spec, values) in setup.parameters.iter().zip(setup.base()) {
            let start = random.random_range(0..spec.shape[0]);
            let rows = start..random.random_range(start..=spec.shape[0]);
            let columns = values.len() / spec.shape[0];
            let expected = setup.bytes(spec, &values[rows.start * columns..rows.end * columns]);
            assert_eq!(ranks.read(spec, rows.clone()).unwrap(), expected, "{} {rows:?}", spec.name);
        }
    });
}

#[test]
fn merged_weights_are_the_base_with_the_adapter_and_none_gives_the_base_back() {
    everywhere(&["llama", "qwen2", "llama-tied.gguf"], |setup, ranks| {
        let (none, base) = (Arc::new(Adapter::none()), setup.base());
        let first = setup.adapter(5, &ALL, 3, 0.5, false);
        let second = setup.adapter(6, &["q_proj", "v_proj", "down_proj"], 2, 0.5, false);
        let before = outputs(ranks);
        merge(ranks, &none, &first);
        setup.assert_serves(ranks, &setup.merged(&base, &first), "first");
        assert_ne!(outputs(ranks), before, "an adapter changes what comes out");
        merge(ranks, &first, &second);
        setup.assert_serves(ranks, &setup.merged(&base, &second), "second");
        merge(ranks, &second, &none);
        setup.assert_serves(ranks, &bytes_of(setup, &base), "none");
        assert_eq!(outputs(ranks), before);
    });
}

#[test]
fn dora_sees_whole_rows_of_layers_that_are_split_by_columns() {
    everywhere(&["qwen2"], |setup, ranks| {
        let (none, pushed) = (Arc::new(Adapter::none()), setup.random_values(8));
        let adapter = setup.adapter(9, &["o_proj", "down_proj", "up_proj"], 2, 0.5, true);
        merge(ranks, &none, &adapter);
        setup.assert_serves(ranks, &setup.merged(&setup.base(), &adapter), "from the checkpoint");
        ranks.write(WeightOrder::Replace { tensors: setup.full(&pushed) }).unwrap();
        merge(ranks, &none, &adapter);
        let base = rounded(setup, &pushed);
        setup.assert_serves(ranks, &setup.merged(&base, &adapter), "from a push");
    });
}

#[test]
fn pushed_tensors_are_those_of_a_fresh_start() {
    for model in ["llama", "qwen2", "glm4_moe"] {
        for world in worlds(model) {
            for dtype in DTYPES {
                let setup = Setup::open(&fixture(model), dtype, world);
                let pushed = setup.random_values(3);
                let mut ranks = setup.ranks();
                let adapter = setup.adapter(4, &ALL, 2, 0.5, false);
                merge(&mut ranks, &Arc::new(Adapter::none()), &adapter);
                ranks.write(WeightOrder::Replace { tensors: setup.full(&pushed) }).unwrap();
                setup.assert_serves(&mut ranks, &bytes_of(&setup, &pushed), "pushed");
                let dir = setup.checkpoint_of(&fixture(model), &pushed);
                let fresh = Setup::open(dir.path(), dtype, world);
                assert_eq!(outputs(&mut ranks), outputs(&mut fresh.ranks()));
            }
        }
    }
}

#[test]
fn what_is_exchanged_for_a_packed_push_is_a_fresh_start_and_the_base_from_then_on() {
    for model in ["llama", "qwen2", "qwen3", "glm4_moe", "llama-tied.gguf"] {
        for world in worlds(model) {
            for dtype in DTYPES {
                let setup = Setup::open(&fixture(model), dtype, world);
                let (none, pushed) = (Arc::new(Adapter::none()), setup.random_values(3));
                let mut ranks = setup.ranks();
                let before = outputs(&mut ranks);
                // Packed and never committed: nothing has changed.
                drop(setup.staged(&mut ranks, &pushed));
                assert_eq!(outputs(&mut ranks), before);
                let adapter = setup.adapter(4, &ALL, 2, 0.5, false);
                merge(&mut ranks, &none, &adapter);
                let shadow = setup.staged(&mut ranks, &pushed);
                setup.assert_serves(&mut ranks, &setup.merged(&setup.base(), &adapter), "before the exchange");
                drop(ranks.exchange(shadow).unwrap());
                setup.assert_serves(&mut ranks, &bytes_of(&setup, &pushed), "exchanged");
                let mut direct = setup.ranks();
                direct.write(WeightOrder::Replace { tensors: setup.full(&pushed) }).unwrap();
                assert_eq!(outputs(&mut ranks), outputs(&mut direct));
                merge(&mut ranks, &none, &adapter);
                setup.assert_serves(&mut ranks, &setup.merged(&rounded(&setup, &pushed), &adapter), "merged");
                let again = setup.random_values(13);
                let shadow = setup.staged(&mut ranks, &again);
                drop(ranks.exchange(shadow).unwrap());
                setup.assert_serves(&mut ranks, &bytes_of(&setup, &again), "exchanged again");
                // Not into the base that the adapter before was merged into.
                merge(&mut ranks, &none, &adapter);
                setup.assert_serves(&mut ranks, &setup.merged(&rounded(&setup, &again), &adapter), "merged again");
            }
        }
    }
}

#[test]
fn what_a_packed_push_keeps_is_as_it_was() {
    for model in ["qwen2_5_vl", "internvl3"] {
        for world in worlds(model) {
            for dtype in DTYPES {
                let setup = Setup::open(&fixture(model), dtype, world);
                let (base, pushed) = (setup.base(), setup.random_values(3));
                let names: Vec<&str> = setup.parameters.iter().map(|spec| spec.name.as_str()).collect();
                let mut ranks = setup.ranks();
                let mut shadow = setup.staged(&mut ranks, &pushed);
                shadow.keep(names.iter().filter(|name| is_of_tower(name)).map(|name| name.to_string()).collect());
                drop(ranks.exchange(shadow).unwrap());
                let of_both = names.iter().zip(base.iter().zip(&pushed));
                let expected: Vec<Vec<f32>> =
                    of_both.map(|(name, (old, new))| if is_of_tower(name) { old } else { new }.clone()).collect();
                setup.assert_serves(&mut ranks, &bytes_of(&setup, &expected), "exchanged");
            }
        }
    }
}

#[test]
fn adapters_are_merged_into_what_was_pushed() {
    everywhere(&["llama", "qwen3"], |setup, ranks| {
        let none = Arc::new(Adapter::none());
        let (first, second) = (setup.adapter(5, &ALL, 3, 0.5, false), setup.adapter(6, &["v_proj"], 2, 0.5, false));
        // Part of a push, so that bases are mixed: some of the checkpoint's, some pushed.
        let is_pushed = |name: &str| name.contains("layers.1") || name.contains("q_proj") || name.contains("norm");
        let pushed = setup.random_values(11);
        ranks.write(WeightOrder::Replace { tensors: setup.part(&pushed, is_pushed) }).unwrap();
        let choose = |((spec, pushed), base): ((&ParamSpec, &Vec<f32>), Vec<f32>)| {
            if is_pushed(&spec.name) { setup.rounded(spec, pushed) } else { base }
        };
        let base: Vec<_> = setup.parameters.iter().zip(&pushed).zip(setup.base()).map(choose).collect();
        setup.assert_serves(ranks, &bytes_of(setup, &base), "pushed");
        merge(ranks, &none, &first);
        setup.assert_serves(ranks, &setup.merged(&base, &first), "first");
        merge(ranks, &first, &second);
        setup.assert_serves(ranks, &setup.merged(&base, &second), "second");
        merge(ranks, &second, &none);
        setup.assert_serves(ranks, &bytes_of(setup, &base), "none");
        // What was pushed stays when the rest is loaded again.
        merge(ranks, &none, &first);
        ranks.write(WeightOrder::Load { adapter: second.clone() }).unwrap();
        setup.assert_serves(ranks, &setup.merged(&base, &second), "loaded with the second");
    });
}

#[test]
fn changed_elements_are_changed_and_what_serves_is_the_base_from_then_on() {
    everywhere(&["llama", "qwen2", "glm4_moe"], |setup, ranks| {
        let (none, mut random) = (Arc::new(Adapter::none()), random(21));
        // `up_proj` is merged and not changed.
        let adapter = setup.adapter(5, &["o_proj", "k_proj", "up_proj"], 3, 0.5, false);
        merge(ranks, &none, &adapter);
        let mut expected: Vec<Vec<f32>> = setup
            .parameters
            .iter()
            .zip(setup.merged(&setup.base(), &adapter))
            .map(|(spec, bytes)| setup.values(spec, &bytes))
            .collect();
        let mut changes = Vec::new();
        for (spec, expected) in setup.parameters.iter().zip(&mut expected).filter(|(s, _)| !s.name.contains("up_proj"))
        {
            let mut changed: Vec<(u64, f32)> = Vec::new();
            for (i, value) in expected.iter_mut().enumerate() {
                if random.random_range(0..7) == 0 {
                    *value = random.random::<f32>();
                    changed.push((i as u64, *value));
                }
            }
            if !changed.is_empty() {
                changes.push((spec.name.clone(), changed));
            }
        }
        ranks.write(WeightOrder::Patch { delta: setup.delta(&changes), merged: adapter }).unwrap();
        setup.assert_serves(ranks, &bytes_of(setup, &expected), "patched");
        let next = setup.adapter(6, &ALL, 2, 0.5, false);
        merge(ranks, &none, &next);
        let base = rounded(setup, &expected);
        setup.assert_serves(ranks, &setup.merged(&base, &next), "merged");
        merge(ranks, &next, &none);
        setup.assert_serves(ranks, &bytes_of(setup, &base), "none");
    });
}
