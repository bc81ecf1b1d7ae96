//! Orders that change the lifecycle, whichever door they come through. An order whose caller vanishes while running
//! requests finish is withdrawn.

use super::calls::{CancelOnDrop, ask};
use super::gate::Gate;
use crate::engine::{Command, DrainMode, LifecycleStatus, SleepLevel, SleepReply, WakeTags};
use crate::error::Result;

/// Puts the engine to sleep.
pub(super) async fn sleep(gate: &Gate, level: SleepLevel, mode: DrainMode) -> Result<SleepReply> {
    let (context, _running) = gate.admit()?;
    // Released before the sleep, so that the segments are not part of the bytes that it measures.
    context.sources.segments().release();
    let guard = CancelOnDrop::new(&context.engine);
    let cancel = guard.flag.clone();
    ask(&context.engine, |reply| Command::Sleep { level, mode, cancel, reply }).await?
}

/// Takes memory back; with `reload` the weights come from the checkpoint if there is no policy.
pub(super) async fn wake(gate: &Gate, tags: WakeTags, reload: bool) -> Result<LifecycleStatus> {
    let (context, _running) = gate.admit()?;
    ask(&context.engine, |reply| Command::Wake { tags, reload, reply }).await?
}

/// Pauses the engine.
pub(super) async fn pause(gate: &Gate, mode: DrainMode) -> Result<()> {
    let (context, _running) = gate.admit()?;
    let guard = CancelOnDrop::new(&context.engine);
    let cancel = guard.flag.clone();
    ask(&context.engine, |reply| Command::Pause { mode, cancel, reply }).await?
}

/// Lets the engine step again after a pause.
pub(super) async fn resume(gate: &Gate) -> Result<()> {
    let (context, _running) = gate.admit()?;
    ask(&context.engine, |reply| Command::Resume { reply }).await?
}

/// Forgets the prefixes that no sequence holds, and returns the number of their blocks.
pub(super) async fn reset_prefix_cache(gate: &Gate) -> Result<usize> {
    let context = gate.look()?;
    ask(&context.engine, |reply| Command::ResetPrefixCache { reply }).await?
}
