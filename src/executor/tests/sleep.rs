//! Memory that is released comes back with the same weights.

use std::sync::Arc;

use super::harness::{DTYPES, Setup, fixture, outputs, worlds};
use crate::executor::{Executor, Memory, WeightOrder};
use crate::weights::Adapter;

#[test]
fn what_wakes_is_what_slept() {
    for (model, dtype) in [("llama", DTYPES[0]), ("qwen2", DTYPES[1])] {
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
                let all = [Memory::KvCache, Memory::Workspace, Memory::Weights];
                all.iter().for_each(|memory| ranks.release(*memory).unwrap());
                all.iter().for_each(|memory| ranks.restore(*memory).unwrap());
                ranks.write(WeightOrder::Load { adapter: merged.clone() }).unwrap();
                setup.assert_serves(&mut ranks, &serving, &format!("after step {i}"));
                assert_eq!(outputs(&mut ranks), before, "after step {i}");
            }
            // The deep sleep: what was pushed is gone.
            ranks.release(Memory::WeightsAndBase).unwrap();
            ranks.restore(Memory::WeightsAndBase).unwrap();
            ranks.write(WeightOrder::Load { adapter: none }).unwrap();
            let fresh = setup.snapshot(&mut setup.ranks());
            setup.assert_serves(&mut ranks, &fresh, "after the deep sleep");
        }
    }
}
