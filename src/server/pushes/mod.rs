//! Pushes of weights over gRPC and HTTP: one transaction each, which the engine applies between two steps or not at
//! all.

mod adapters;
mod checkpoints;
mod thread;

use std::sync::Arc;
use std::time::Instant;

pub(super) use adapters::{load_adapter, load_modules};
pub(super) use checkpoints::load_checkpoint;
pub(super) use thread::{PushThread, StagedUpdate};

use super::calls::{CancelOnDrop, ask_blocking, reply_channel};
use super::convert;
use super::pb;
use super::state::{ServerState, ServingContext};
use crate::engine::{Activity, Command, UpdateSender};
use crate::error::Result;
use crate::observe::PushGuard;
use crate::weights::VerifiedPush;

/// One transaction, from its opening to the engine's answer to the commit, recorded for observers however it ends.
/// `receive` takes the push and verifies it up to its commit. Dropping this future cancels the transaction. Until the
/// engine has the commit, the end of the server and CancelUpdate end it too.
///
/// # Errors
/// Those of `receive`; `Unavailable` while the server starts or ends; `Aborted` by CancelUpdate; those of the engine,
/// which has changed nothing then.
pub(super) async fn transact(
    server: &ServerState,
    peer: String,
    receive: impl AsyncFnOnce(Arc<ServingContext>, UpdateSender, PushGuard) -> Result<StagedUpdate>,
) -> Result<pb::UpdateResponse> {
    let noted = server.observer.journal.push();
    let transaction = async {
        let started = Instant::now();
        let (context, _in_flight) = server.admit()?;
        let (ended, mut cancelled) = reply_channel();
        let cancel = CancelOnDrop::new(&context.engine);
        let sender = UpdateSender { peer, cancel: cancel.flag.clone(), activity: Activity::start(), ended };
        let staged = tokio::select! {
            staged = receive(context.clone(), sender, noted.clone()) => staged?,
            Ok(error) = &mut cancelled => return Err(error),
            error = server.ending() => return Err(error),
        };
        let took = started.elapsed();
        let StagedUpdate { id, push, new_version } = staged;
        let VerifiedPush { update: content, digest, tower, bytes, parameters } = push;
        noted.commits(bytes, digest);
        let commit = |reply| Command::CommitUpdate { update: id, content, tower, new_version, reply };
        let reply = match ask_blocking(&context.engine, commit).await? {
            // CancelUpdate came just before the commit.
            Err(error) => return Err(cancelled.try_recv().unwrap_or(error)),
            Ok(reply) => reply,
        };
        noted.applied(reply.weight_version, reply.pause);
        if reply.pending {
            // A sleeping server keeps no memory, so it does not keep the trainer's segment mapped either.
            context.sources.segments().release();
        }
        tracing::info!(
            version = reply.weight_version,
            staging_ms = took.as_millis() as u64,
            pause_ms = reply.pause.as_millis() as u64,
            pending = reply.pending,
            "weights updated"
        );
        Ok(convert::update_reply(&reply, digest, bytes, parameters, took))
    };
    let result: Result<_> = transaction.await;
    result.inspect_err(|error| {
        noted.failed(error);
        tracing::info!("push failed: {error}");
    })
}
