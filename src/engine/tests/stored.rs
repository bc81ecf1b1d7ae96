//! Which version of a delta store the policy is, and updates that change it.

use std::sync::Arc;

use super::rig::{PARAMETERS, Rig, adapter, begin, lora, told};
use crate::engine::{Command, DrainMode, SleepLevel};
use crate::error::{Error, Result};
use crate::weights::{
    Delta, DeltaStore, Source, StoredUpdate, StoredVersion, Tensors, UpdateHeader, UpdateKind, WeightUpdate,
};

const CHECKPOINT: Option<StoredVersion> = Some(StoredVersion::CHECKPOINT);

fn stored(version: u64) -> StoredVersion {
    StoredVersion { version, digest: [version as u8; 16], stamp: [1; 16] }
}

/// A push of a version that changes the one that serves, or every parameter.
fn header(version: u64, serving: Option<StoredVersion>) -> UpdateHeader {
    let kind = if serving.is_some() { UpdateKind::Delta } else { UpdateKind::Full };
    let source = Source::DeltaStore(DeltaStore { path: "run".into(), version, serving });
    UpdateHeader { source, new_version: Some(version), ..UpdateHeader::new(kind) }
}

fn content(version: u64, is_whole: bool) -> WeightUpdate {
    let base = is_whole.then(|| Box::new(WeightUpdate::Full(Arc::new(Tensors::default()))));
    let deltas = vec![Arc::new(Delta::default()), Arc::new(Delta::default())];
    WeightUpdate::Stored(StoredUpdate { base, deltas, version: stored(version) })
}

fn push(rig: &mut Rig, version: u64, serving: Option<StoredVersion>) -> Result<u64> {
    let ticket = rig.begin(header(version, serving))?;
    let reply = told(&rig.commit(ticket.id, content(version, serving.is_none()))).reply()?;
    Ok(reply.weight_version)
}

#[test]
fn the_policy_is_a_version_until_another_push_changes_it() {
    let mut rig = Rig::new();
    let parameters = rig.engine.core.parameters.clone();
    let merge = |rig: &mut Rig, content| {
        let ticket = rig.begin(begin(UpdateKind::Lora)).unwrap();
        told(&rig.commit(ticket.id, content)).reply().unwrap();
    };
    let one = || WeightUpdate::Lora(adapter(&parameters, 1, 1));
    assert_eq!(rig.status().stored, CHECKPOINT);
    assert_eq!(push(&mut rig, 3, CHECKPOINT).unwrap(), 3);
    assert_eq!(rig.status().stored, Some(stored(3)));
    assert_eq!(push(&mut rig, 5, Some(stored(3))).unwrap(), 5);
    assert_eq!(rig.status().stored, Some(stored(5)));
    // With an adapter merged into it, it is not; the base below is.
    merge(&mut rig, one());
    assert_eq!(rig.status().stored, None);
    merge(&mut rig, lora());
    assert_eq!(rig.status().stored, Some(stored(5)));
    // A delta makes the merged weights the base.
    merge(&mut rig, one());
    let version = rig.engine.weight_version();
    rig.push_now(UpdateHeader { expected_version: Some(version), ..UpdateHeader::new(UpdateKind::Delta) }).unwrap();
    assert_eq!(rig.status().stored, None);
    assert_eq!(push(&mut rig, 20, None).unwrap(), 20);
    assert_eq!(rig.status().stored, Some(stored(20)));
    rig.push_now(begin(UpdateKind::Full)).unwrap();
    assert_eq!(rig.status().stored, None);
    push(&mut rig, 30, None).unwrap();
    told(&rig.sleep(SleepLevel::Two, DrainMode::Wait)).reply().unwrap();
    assert_eq!(rig.status().stored, None, "there is no policy");
    rig.wake(true, true, true).unwrap();
    assert_eq!(rig.status().stored, CHECKPOINT);
}

#[test]
fn changes_of_another_policy_are_refused() {
    let mut rig = Rig::new();
    let refused = |result: Result<u64>| match result {
        Err(Error::VersionConflict(why)) => assert!(why.contains("of run when the push began"), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(push(&mut rig, 3, Some(stored(2))));
    push(&mut rig, 3, CHECKPOINT).unwrap();
    refused(push(&mut rig, 4, CHECKPOINT));
    refused(push(&mut rig, 4, Some(StoredVersion { stamp: [2; 16], ..stored(3) })));
    assert_eq!(rig.status().stored, Some(stored(3)));
    rig.assert_clean();
}

#[test]
fn rows_are_read_as_they_serve() {
    let mut rig = Rig::new();
    let read = |rig: &mut Rig, name: &str| {
        let parameter = name.to_string();
        told(&rig.call(|reply| Command::ReadRows { parameter, rows: 0..2, reply })).reply()
    };
    assert!(!read(&mut rig, PARAMETERS[0]).unwrap().is_empty());
    assert!(matches!(read(&mut rig, "w"), Err(Error::NotFound(_))));
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    assert!(matches!(read(&mut rig, PARAMETERS[0]), Err(Error::FailedPrecondition(_))));
}
