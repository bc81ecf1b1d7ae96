//! Requests for sleep, wake and pause as valid types, and the lifecycle in replies.

use crate::engine::{DrainMode, LifecycleStatus, SleepLevel, SleepReply, WakeTags};
use crate::error::{Error, Result};
use crate::server::pb;

/// The level of a sleep; unspecified is level 1.
pub(in crate::server) fn sleep_level(value: i32) -> Result<SleepLevel> {
    match pb::SleepLevel::try_from(value) {
        Ok(pb::SleepLevel::Unspecified | pb::SleepLevel::SleepLevel1) => Ok(SleepLevel::One),
        Ok(pb::SleepLevel::SleepLevel2) => Ok(SleepLevel::Two),
        Err(_) => Err(Error::invalid("level", format!("{value} is not a level; give 1 or 2"))),
    }
}

/// How running requests are drained; unspecified is WAIT.
pub(in crate::server) fn drain_mode(value: i32) -> Result<DrainMode> {
    match pb::DrainMode::try_from(value) {
        Ok(pb::DrainMode::Unspecified | pb::DrainMode::Wait) => Ok(DrainMode::Wait),
        Ok(pb::DrainMode::Abort) => Ok(DrainMode::Abort),
        Ok(pb::DrainMode::Keep) => Ok(DrainMode::Keep),
        Err(_) => Err(Error::invalid("mode", format!("{value} is not a mode; give WAIT, ABORT or KEEP"))),
    }
}

/// The parts to wake; no tags mean all parts. To `reload` the weights is wrong unless they wake.
pub(in crate::server) fn wake_tags(tags: &[i32], reload: bool) -> Result<WakeTags> {
    let mut wanted = WakeTags { weights: tags.is_empty(), kv_cache: tags.is_empty() };
    for &tag in tags {
        match pb::MemoryTag::try_from(tag) {
            Ok(pb::MemoryTag::Weights) => wanted.weights = true,
            Ok(pb::MemoryTag::KvCache) => wanted.kv_cache = true,
            Ok(pb::MemoryTag::Unspecified) | Err(_) => {
                return Err(Error::invalid("tags", format!("{tag} is not a tag; give WEIGHTS or KV_CACHE")));
            }
        }
    }
    ensure!(wanted.weights || !reload, "reload", "reads the weights again; name WEIGHTS among the tags");
    Ok(wanted)
}

pub(in crate::server) fn sleep_reply(reply: &SleepReply) -> pb::SleepResponse {
    pb::SleepResponse {
        released: vec![
            pb::ReleasedMemory { tag: pb::MemoryTag::Weights.into(), bytes: reply.weights_bytes },
            pb::ReleasedMemory { tag: pb::MemoryTag::KvCache.into(), bytes: reply.kv_cache_bytes },
        ],
        resident_bytes: reply.resident_bytes,
        seconds: reply.took.as_secs_f64(),
    }
}

pub(in crate::server) fn lifecycle(status: LifecycleStatus) -> pb::Lifecycle {
    match status {
        LifecycleStatus::Running => pb::Lifecycle::Running,
        LifecycleStatus::Paused => pb::Lifecycle::Paused,
        LifecycleStatus::Asleep { .. } => pb::Lifecycle::Asleep,
        LifecycleStatus::WeightsMissing => pb::Lifecycle::WeightsMissing,
        LifecycleStatus::ShuttingDown => pb::Lifecycle::ShuttingDown,
    }
}

/// Which parts are asleep; None while everything is awake.
pub(in crate::server) fn asleep(status: LifecycleStatus) -> Option<pb::Asleep> {
    let LifecycleStatus::Asleep { level, resident, pending_update } = status else { return None };
    let level = match level {
        SleepLevel::One => pb::SleepLevel::SleepLevel1,
        SleepLevel::Two => pb::SleepLevel::SleepLevel2,
    };
    let tags = [(resident.weights, pb::MemoryTag::Weights), (resident.kv_cache, pb::MemoryTag::KvCache)];
    let resident = tags.into_iter().filter(|(awake, _)| *awake).map(|(_, tag)| tag.into()).collect();
    Some(pb::Asleep { level: level.into(), resident, pending_update })
}
