//! Commands that change the lifecycle, for gRPC and HTTP. One whose caller vanishes while running requests are drained
//! is withdrawn.

use super::calls::{ask, ask_cancellable};
use super::state::{ServerState, ServingContext};
use crate::engine::{Command, DrainMode, LifecycleStatus, SleepLevel, SleepReply, WakeTags};
use crate::error::Result;

pub(super) async fn sleep(server: &ServerState, level: SleepLevel, mode: DrainMode) -> Result<SleepReply> {
    let (context, _in_flight) = server.admit()?;
    // Released before the sleep, so that neither is part of the bytes that it measures.
    context.sources.segments().release();
    drop_held_pictures(&context);
    ask_cancellable(&context.engine, |cancel, reply| Command::Sleep { level, mode, cancel, reply }).await?
}

/// Takes memory back. With `reload` the weights are read from the checkpoint if there is no policy.
pub(super) async fn wake(server: &ServerState, tags: WakeTags, reload: bool) -> Result<LifecycleStatus> {
    let (context, _in_flight) = server.admit()?;
    ask(&context.engine, |reply| Command::Wake { tags, reload, reply }).await?
}

pub(super) async fn pause(server: &ServerState, mode: DrainMode) -> Result<()> {
    let (context, _in_flight) = server.admit()?;
    ask_cancellable(&context.engine, |cancel, reply| Command::Pause { mode, cancel, reply }).await?
}

pub(super) async fn resume(server: &ServerState) -> Result<()> {
    let (context, _in_flight) = server.admit()?;
    ask(&context.engine, |reply| Command::Resume { reply }).await?
}

/// Drops the pictures that requests may name by their hashes.
pub(super) fn reset_picture_cache(server: &ServerState) -> Result<()> {
    server.context().map(|context| drop_held_pictures(&context))
}

fn drop_held_pictures(context: &ServingContext) {
    if let Some(images) = &context.model.images {
        images.held.clear();
    }
}

/// Drops the embeddings of all pictures, and returns the number of the pictures.
pub(super) async fn reset_encoder_cache(server: &ServerState) -> Result<usize> {
    let context = server.context()?;
    ask(&context.engine, |reply| Command::ResetEncoderCache { reply }).await
}

/// Removes the prefixes that no sequence holds from the cache, and returns the number of their blocks.
pub(super) async fn reset_prefix_cache(server: &ServerState) -> Result<usize> {
    let context = server.context()?;
    ask(&context.engine, |reply| Command::ResetPrefixCache { reply }).await?
}
