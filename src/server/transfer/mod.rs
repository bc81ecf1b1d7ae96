//! Pushes of a trainer that broadcasts its weights to the devices, as vLLM's weight transfer engine takes them: the
//! trainer makes a group with all ranks, and then drives each push by several calls, which are one transaction here.
//!
//! One task has the group and the open push; the calls are commands to it, which it executes in order. A push that
//! fails changes nothing. The trainer does not see errors while it broadcasts, and its broadcasts come in order: so a
//! rejected push is received to its end all the same, and where that is not possible the session leaves the group, so
//! that the next push never gets the bytes of this one.

mod layout;
mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use super::calls::engine_gone;
use super::state::ServerState;
use crate::comm::{RankRange, Rendezvous};
use crate::error::Result;
use crate::types::WeightVersion;
use session::TransferSession;

pub(super) use layout::{BroadcastTensors, Packing, dtype};

/// Commands that wait for those before them.
const QUEUE: usize = 4;

/// A trainer's command.
pub(super) enum TransferCommand {
    /// Make a group with these, in place of the one there may be. Done when all its ranks have joined.
    Join(Rendezvous, RankRange, Packing),
    /// Leave the group, if there is one, and drop the open push.
    Leave,
    /// Begin a push of the trainer with this address.
    Begin(String),
    /// Receive some tensors of the push, from the group with this number.
    Receive(u64, BroadcastTensors),
    /// Leave the group with this number, because a call to receive was rejected for this reason, so that the broadcast
    /// tensors are unknown.
    Abandon(u64, String),
    /// Verify the push, and let the policy have this version; the next one if none is given.
    Finish(Option<WeightVersion>),
}

/// A command, and the reply to its caller.
type Call = (TransferCommand, TransferReply);
type TransferReply = oneshot::Sender<Result<()>>;

/// Sends commands to the task of the transfer session, which ends when all of these are gone.
#[derive(Clone)]
pub(super) struct Transfers {
    calls: mpsc::Sender<Call>,
    /// How many groups were made: the number of the last one. A call that came before it is of a trainer that has left.
    groups: Arc<AtomicU64>,
}

impl Transfers {
    /// Starts the task.
    pub(super) fn start(server: &ServerState) -> Self {
        let (calls, commands) = mpsc::channel(QUEUE);
        let groups = Arc::new(AtomicU64::new(0));
        tokio::spawn(TransferSession::new(server.clone(), commands, groups.clone()).run());
        Self { calls, groups }
    }

    /// Sends a command, and waits until it is executed.
    ///
    /// # Errors
    /// Those of the command; `FailedPrecondition` if it needs a group or a push that there is not; `Unavailable` if the
    /// server ends.
    pub(super) async fn execute(&self, command: TransferCommand) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.calls.send((command, reply)).await.map_err(|_| engine_gone())?;
        answer.await.map_err(|_| engine_gone())?
    }

    /// Registers a call that announces tensors before its body is read, because the trainer broadcasts them at the same
    /// time, whether the body is valid or not.
    pub(super) fn update_call(&self) -> UpdateCall {
        let group = self.groups.load(Ordering::Relaxed);
        UpdateCall { transfers: Some(self.clone()), group, runtime: Handle::current() }
    }
}

/// A call that announces tensors. If it is dropped before its command is executed, because its connection broke, the
/// session leaves the group that there was when the call came.
pub(super) struct UpdateCall {
    /// None once its command was executed.
    transfers: Option<Transfers>,
    /// Number of the group that broadcasts the tensors.
    group: u64,
    runtime: Handle,
}

impl UpdateCall {
    /// Receives these tensors of the open push.
    ///
    /// # Errors
    /// `FailedPrecondition` without a push; `InvalidArgument` for wrong tensors, which end the push.
    pub(super) async fn receive(mut self, tensors: BroadcastTensors) -> Result<()> {
        self.execute(TransferCommand::Receive(self.group, tensors)).await
    }

    /// The call announces no tensors, and does nothing to the group.
    pub(super) fn release(mut self) {
        self.transfers = None;
    }

    /// Leaves the group and drops the open push, because the call was rejected for the reason `why`.
    ///
    /// # Errors
    /// `Unavailable` if the server ends.
    pub(super) async fn abandon(mut self, why: &str) -> Result<()> {
        self.execute(TransferCommand::Abandon(self.group, why.into())).await
    }

    async fn execute(&mut self, command: TransferCommand) -> Result<()> {
        let result = self.transfers.as_ref().expect("it has one command").execute(command).await;
        self.transfers = None;
        result
    }
}

impl Drop for UpdateCall {
    fn drop(&mut self) {
        if let Some(transfers) = self.transfers.take() {
            let abandon = TransferCommand::Abandon(self.group, "its connection broke".into());
            self.runtime.spawn(async move { transfers.execute(abandon).await });
        }
    }
}
