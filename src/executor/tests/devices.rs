//! Pushes, sleep and steps on the reference device, beside the CPU's.

use std::sync::Arc;

use rollout_kernels::Backend;

use super::harness::{DTYPES, MODELS, Setup, bytes_of, fixture, outputs, worlds};
use crate::executor::{Executor, MemoryKind, WeightOrder};
use crate::weights::Adapter;

/// Largest difference between values in serving precision, beyond what `allowed` gives for a value of `expected`.
fn excess(setup: &Setup, found: &[Vec<u8>], expected: &[Vec<u8>], allowed: impl Fn(f32) -> f32) -> f32 {
    let values = |all: &[Vec<u8>]| {
        let of_each = setup.parameters.iter().zip(all);
        of_each.flat_map(|(spec, bytes)| setup.values(spec, bytes)).collect::<Vec<_>>()
    };
    let apart = values(found).into_iter().zip(values(expected));
    apart.map(|(found, expected)| (found - expected).abs() - allowed(expected)).fold(f32::MIN, f32::max)
}

#[test]
fn the_reference_device_serves_every_kind_of_push_and_wakes_with_it() {
    for model in MODELS {
        for world in worlds(model).into_iter().take(2) {
            for (dtype, unit) in DTYPES.into_iter().zip([0.0, 1.0 / 128.0]) {
                let setup = Setup::open_on(Backend::Reference, &fixture(model), dtype, world);
                let mut ranks = setup.ranks();
                let (none, base) = (Arc::new(Adapter::none()), setup.base());
                let serves = |values: &[Vec<f32>]| bytes_of(&setup, values);
                setup.assert_serves(&mut ranks, &serves(&base), "loaded");
                // Sum, norm, factor and result are rounded in turn, each perhaps to the other neighbour than in PEFT's
                // order.
                let adapter = setup.adapter(5, &["q_proj", "down_proj"], 3, 0.5, true);
                ranks.write(WeightOrder::Merge { before: none.clone(), after: adapter.clone() }).unwrap();
                let (merged, expected) = (setup.snapshot(&mut ranks), setup.merged(&base, &adapter));
                let changed = excess(&setup, &serves(&base), &expected, |_| 0.0);
                assert!(changed > 0.1, "{model} {dtype:?}: the adapter changes what serves by {changed:e} at most");
                let few_units = |value: f32| (4.0 * unit * value.abs()).min(unit);
                let apart = excess(&setup, &merged, &expected, few_units);
                assert!(
                    apart <= 1e-6,
                    "{model} {dtype:?} on {world} ranks: merged weights are {apart:e} too far apart"
                );
                ranks.write(WeightOrder::Merge { before: adapter, after: none.clone() }).unwrap();
                setup.assert_serves(&mut ranks, &serves(&base), "with nothing merged");

                let pushed = setup.random_values(7);
                let shadow = setup.staged(&mut ranks, &pushed);
                let old = ranks.exchange(shadow).unwrap();
                ranks.discard(old).unwrap();
                setup.assert_serves(&mut ranks, &serves(&pushed), "a FULL push");
                let before = outputs(&mut ranks);
                for memory in [MemoryKind::KvCache, MemoryKind::Workspace, MemoryKind::Weights] {
                    ranks.release(memory, u64::MAX).unwrap();
                    ranks.restore(memory).unwrap();
                }
                ranks.write(WeightOrder::Load { adapter: none }).unwrap();
                assert_eq!(outputs(&mut ranks), before, "after a sleep");
            }
        }
    }
}
