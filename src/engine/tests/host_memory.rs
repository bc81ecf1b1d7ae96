//! The host's ledger beside that of a device with memory of its own.

use super::rig::*;
use crate::engine::*;
use crate::memory::MemoryUse;
use crate::weights::{StagingBytes, UpdateKind, WeightUpdate};

/// Bytes of the host's ledger that the process does not take.
const ROOM: u64 = 200;

fn rig() -> Rig {
    Rig::beside_host(100 + ROOM)
}

/// Bytes that each ledger has for a use.
fn entries(rig: &mut Rig, used_for: MemoryUse) -> (u64, u64) {
    let status = rig.status();
    let of = |report: &crate::memory::MemoryReport| {
        report.entries.iter().find(|entry| entry.0 == used_for).map_or(0, |entry| entry.1)
    };
    (of(&status.memory), of(status.host_memory.as_ref().expect("there are two")))
}

fn sleep(rig: &mut Rig, level: SleepLevel) {
    told(&rig.sleep(level, DrainMode::Wait)).reply().unwrap();
}

#[test]
fn each_use_is_in_the_ledger_of_its_memory() {
    let mut rig = rig();
    assert_eq!(entries(&mut rig, MemoryUse::Process), (0, 100));
    assert_eq!(entries(&mut rig, MemoryUse::Weights), (120, 0));
    assert_eq!(Rig::new().status().host_memory, None);
}

#[test]
fn shadow_weights_are_the_devices_and_what_arrives_is_the_hosts() {
    let mut rig = rig();
    let full =
        |staged, shadow| Begin { staging: StagingBytes { staged, shadow, in_place: 1 }, ..begin(UpdateKind::Full) };
    rig.begin(full(320, 300)).unwrap();
    assert_eq!(entries(&mut rig, MemoryUse::UpdateStaging), (300, 20));
    rig.call(|reply| Command::CancelUpdate { update: None, reply });
    assert_eq!(entries(&mut rig, MemoryUse::UpdateStaging), (0, 0));
    // Each ledger rejects for itself, and nothing stays reserved.
    for (push, part) in [
        (full(421, 401), "the device's ceiling of 1000 B is left"),
        (full(300 + ROOM + 1, 300), "start the server with a larger --host-memory"),
        (full(ROOM + 1, 0), "the host's ceiling of 300 B is left"),
    ] {
        let Err(error) = rig.begin(push) else { panic!("{part}") };
        assert!(matches!(error, Error::ResourceExhausted(_)) && error.to_string().contains(part), "{error}");
        rig.assert_clean();
    }
    let ticket = rig.begin(full(300 + ROOM, 300)).unwrap();
    told(&rig.commit(ticket.id, WeightUpdate::Packed(shadow(ticket.mode).unwrap()))).reply().unwrap();
    assert_eq!(entries(&mut rig, MemoryUse::SpareWeights), (120, 0));
}

#[test]
fn what_sleeps_in_the_hosts_memory_is_in_its_ledger() {
    for level in [SleepLevel::One, SleepLevel::Two] {
        let mut rig = rig();
        (rig.engine.core.executor.kept, rig.engine.core.executor.moved) = (0, 150);
        sleep(&mut rig, level);
        assert_eq!(entries(&mut rig, MemoryUse::Offloaded), (0, 150), "{level:?}");
        assert_eq!(entries(&mut rig, MemoryUse::Weights), (0, 0), "{level:?}");
        // The cache takes no host memory.
        rig.wake(false, true, false).unwrap();
        assert_eq!(entries(&mut rig, MemoryUse::Offloaded), (0, 150), "{level:?}");
        rig.wake(true, true, true).unwrap();
        assert_eq!(entries(&mut rig, MemoryUse::Offloaded), (0, 0), "{level:?}");
        assert_eq!(entries(&mut rig, MemoryUse::Weights), (120, 0), "{level:?}");
    }
}

#[test]
fn a_deeper_sleep_gives_back_what_slept_in_the_hosts_memory() {
    let mut rig = rig();
    rig.engine.core.executor.moved = 150;
    sleep(&mut rig, SleepLevel::One);
    assert_eq!(entries(&mut rig, MemoryUse::Offloaded), (0, 150));
    rig.engine.core.executor.moved = 0;
    sleep(&mut rig, SleepLevel::Two);
    assert_eq!(entries(&mut rig, MemoryUse::Offloaded), (0, 0));
    rig.wake(true, true, true).unwrap();
    assert_eq!(entries(&mut rig, MemoryUse::Weights), (120, 0));
}

#[test]
fn what_the_host_has_no_room_for_stays_on_the_device() {
    let mut rig = rig();
    let before = rig.status();
    rig.engine.core.executor.moved = 120;
    rig.engine.core.budget.set(MemoryUse::CopyBuffers, ROOM - 119).unwrap();
    sleep(&mut rig, SleepLevel::One);
    assert_eq!(entries(&mut rig, MemoryUse::Offloaded), (0, 0));
    assert_eq!(entries(&mut rig, MemoryUse::Weights), (120, 0), "it stays");
    rig.wake(true, true, false).unwrap();
    rig.engine.core.budget.free(MemoryUse::CopyBuffers);
    assert_eq!((rig.status().memory, rig.status().host_memory), (before.memory, before.host_memory));
}

#[test]
fn a_wake_that_fails_leaves_both_ledgers_asleep() {
    let mut rig = rig();
    rig.engine.core.executor.moved = 70;
    sleep(&mut rig, SleepLevel::One);
    let before = rig.status();
    rig.engine.core.executor.no_room = true;
    let error = rig.wake(true, true, false).unwrap_err();
    assert!(matches!(error, Error::ResourceExhausted(_)), "{error}");
    let after = rig.status();
    assert_eq!((after.memory, after.host_memory), (before.memory, before.host_memory));
    rig.engine.core.executor.no_room = false;
    rig.wake(true, true, false).unwrap();
    assert_eq!(entries(&mut rig, MemoryUse::Offloaded), (0, 0));
}
