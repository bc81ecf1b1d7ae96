//! FULL pushes that are packed into shadow weights: their exchange, and the storage that they replace.

use std::collections::HashSet;

use super::rig::*;
use crate::engine::*;
use crate::error::Error;
use crate::memory::MemoryUse;
use crate::weights::{UpdateKind, WeightUpdate};

#[test]
fn a_packed_push_is_exchanged_at_its_commit() {
    let mut rig = Rig::new();
    rig.push_lora(RunningPolicy::Keep);
    let ticket = rig.begin(begin(UpdateKind::Full)).unwrap();
    let packed = shadow(ticket.mode).expect("FULL is packed");
    rig.did();
    let reply = told(&rig.commit(ticket.id, WeightUpdate::Packed(packed))).reply().unwrap();
    assert_eq!(rig.did(), [Did::Exchange]);
    assert_eq!((reply.weight_version, rig.reserved(MemoryUse::MergedAdapter)), (2, 0));
    // The replaced weights are kept for the next FULL push, and dropped for a push of another kind.
    assert_eq!(rig.reserved(MemoryUse::SpareWeights), rig.reserved(MemoryUse::Weights));
    assert!(shadow(rig.begin(begin(UpdateKind::Full)).unwrap().mode).is_some());
    assert_eq!((rig.reserved(MemoryUse::SpareWeights), rig.did()), (0, vec![]));
    rig.engine.updates.roll_back(&mut rig.engine.core);
    // The pushed weights are the base now, so the parameters that the next adapter changes are copied.
    let ticket = rig.begin(begin(UpdateKind::Lora)).unwrap();
    let merged = WeightUpdate::Lora(adapter(&rig.engine.core.parameters, 1, 1));
    told(&rig.commit(ticket.id, merged)).reply().unwrap();
    assert_eq!(rig.reserved(MemoryUse::BaseCopies), 60);
    assert!(shadow(rig.begin(begin(UpdateKind::Lora)).unwrap().mode).is_none());
    rig.engine.updates.roll_back(&mut rig.engine.core);
    rig.assert_clean();
}

#[test]
fn parameters_that_a_push_keeps_have_their_base_afterwards() {
    let mut rig = Rig::new();
    let merged = adapter(&rig.engine.core.parameters, 1, 1);
    let ticket = rig.begin(begin(UpdateKind::Lora)).unwrap();
    told(&rig.commit(ticket.id, WeightUpdate::Lora(merged.clone()))).reply().unwrap();
    let kept: HashSet<String> = merged.parameters().take(1).map(String::from).collect();
    let commit = |rig: &mut Rig, kept: &HashSet<String>| {
        let ticket = rig.begin(begin(UpdateKind::Full)).unwrap();
        let mut packed = shadow(ticket.mode).expect("FULL is packed");
        packed.keep(kept.clone());
        rig.did();
        told(&rig.commit(ticket.id, WeightUpdate::Packed(packed))).reply()
    };
    commit(&mut rig, &kept).unwrap();
    // The adapter is taken out first.
    assert_eq!(rig.did(), [Did::Merge, Did::Exchange]);
    let policy = &rig.engine.core.policy;
    assert!(!policy.is_replaced(kept.iter().next().unwrap()) && policy.has_replaced());
    assert_eq!(rig.reserved(MemoryUse::MergedAdapter), 0);
    commit(&mut rig, &kept).unwrap();
    assert_eq!(rig.did(), [Did::Exchange], "nothing is merged");
    told(&rig.sleep(SleepLevel::Two, DrainMode::Wait)).reply().unwrap();
    rig.wake(true, true, false).unwrap();
    let error = commit(&mut rig, &kept).unwrap_err();
    assert!(matches!(&error, Error::FailedPrecondition(why) if why.contains("none to keep")), "{error}");
    commit(&mut rig, &HashSet::new()).unwrap();
    rig.assert_clean();
}

#[test]
fn what_a_packed_push_replaced_goes_with_a_sleep() {
    for level in [SleepLevel::One, SleepLevel::Two] {
        let mut rig = Rig::new();
        let ticket = rig.begin(begin(UpdateKind::Full)).unwrap();
        told(&rig.commit(ticket.id, WeightUpdate::Packed(shadow(ticket.mode).unwrap()))).reply().unwrap();
        assert_eq!(
            (rig.reserved(MemoryUse::SpareWeights), rig.engine.core.spare.is_some()),
            (rig.reserved(MemoryUse::Weights), true)
        );
        told(&rig.sleep(level, DrainMode::Wait)).reply().unwrap();
        assert_eq!((rig.reserved(MemoryUse::SpareWeights), rig.engine.core.spare.is_some()), (0, false), "{level:?}");
        rig.wake(true, true, level == SleepLevel::Two).unwrap();
        rig.assert_clean();
    }
}

#[test]
fn a_packed_push_after_the_deep_sleep_leaves_no_spare() {
    let mut rig = Rig::new();
    told(&rig.sleep(SleepLevel::Two, DrainMode::Wait)).reply().unwrap();
    rig.wake(true, true, false).unwrap();
    let ticket = rig.begin(begin(UpdateKind::Full)).unwrap();
    told(&rig.commit(ticket.id, WeightUpdate::Packed(shadow(ticket.mode).unwrap()))).reply().unwrap();
    // The replaced weights had no memory any more.
    assert_eq!((rig.reserved(MemoryUse::Weights), rig.reserved(MemoryUse::SpareWeights)), (120, 0));
    rig.assert_clean();
}
