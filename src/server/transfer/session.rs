//! The task that has a trainer's group and the push that is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use rollout_kernels::Broadcast;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::layout::{BroadcastTensors, Cursor, Packing, broadcasts};
use super::{Call, TransferCommand, TransferReply};
use crate::comm::{ByteSink, RankRange, Rendezvous, TrainerGroup, TrainerTimeout};
use crate::engine::UpdateSender;
use crate::error::{Error, Result};
use crate::observe::PushGuard;
use crate::server::pushes::{PushThread, StagedUpdate, transact};
use crate::server::state::{ServerState, ServingContext};
use crate::weights::{Source, TensorEntry, TransitBytes, UpdateHeader, UpdateKind, largest_broadcast, most_announced};

/// Pieces of what is broadcast that wait for those before them.
const PIECES: usize = 2;
/// Bytes of the host that pieces take on their way from the device to where they are packed.
const PIECES_BYTES: u64 = 32 << 20;

/// A trainer's group.
struct JoinedGroup {
    group: Arc<TrainerGroup>,
    packing: Packing,
    /// The tensors that the last push received last, for one that names none. They were verified, so that the model
    /// bounds what they take.
    last: Vec<TensorEntry>,
}

/// The task's state.
pub(super) struct TransferSession {
    server: ServerState,
    calls: mpsc::Receiver<Call>,
    /// How many groups were made; callers of `Transfers` read it.
    groups: Arc<AtomicU64>,
    joined: Option<JoinedGroup>,
    /// Whether something is received that the trainer may not have broadcast to its end.
    is_receiving: bool,
    /// A command that has ended a push, and is still to be executed.
    next: Option<Call>,
}

/// Ends the waits of a call whose work is dropped.
struct EndOnDrop(TrainerTimeout);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl TransferSession {
    pub(super) fn new(server: ServerState, calls: mpsc::Receiver<Call>, groups: Arc<AtomicU64>) -> Self {
        Self { server, calls, groups, joined: None, is_receiving: false, next: None }
    }

    /// Executes commands until no sender is left.
    pub(super) async fn run(mut self) {
        loop {
            let call = match self.next.take() {
                None => self.calls.recv().await,
                next => next,
            };
            let Some((command, mut reply)) = call else { break };
            let result = match command {
                command if self.is_late(&command) => Err(no_update()),
                TransferCommand::Begin(peer) => {
                    self.push(peer, reply).await;
                    continue;
                }
                TransferCommand::Join(meeting, places, packing) => {
                    self.leave().await;
                    self.join(meeting, places, packing, &mut reply).await
                }
                TransferCommand::Leave | TransferCommand::Abandon(..) => {
                    self.leave().await;
                    Ok(())
                }
                TransferCommand::Receive(..) => {
                    // The tensors that the trainer broadcasts now are not received.
                    self.leave().await;
                    Err(no_update())
                }
                TransferCommand::Finish(_) => Err(no_update()),
            };
            answer(reply, result);
        }
        self.leave().await;
    }

    /// Whether a command is of a call that came before the group was made: its trainer has left.
    fn is_late(&self, command: &TransferCommand) -> bool {
        use TransferCommand::{Abandon, Receive};
        matches!(command, Receive(group, _) | Abandon(group, _) if *group != self.groups.load(Ordering::Relaxed))
    }

    async fn join(
        &mut self,
        meeting: Rendezvous,
        places: RankRange,
        packing: Packing,
        reply: &mut TransferReply,
    ) -> Result<()> {
        let (context, _in_flight) = self.server.admit()?;
        let timeout = TrainerTimeout::new(context.update_idle);
        let _end = EndOnDrop(timeout.clone());
        let joining = spawn_blocking(move || context.trainers.join(&meeting, places, &timeout));
        let group = tokio::select! {
            group = joining => group.map_err(|e| Error::Internal(format!("joining a trainer failed: {e}")))??,
            () = reply.closed() => return Err(Error::Aborted("the trainer is gone".into())),
            error = self.server.ending() => return Err(error),
        };
        self.groups.fetch_add(1, Ordering::Relaxed);
        self.joined = Some(JoinedGroup { group: Arc::new(group), packing, last: Vec::new() });
        Ok(())
    }

    /// Leaves the group, if there is one. On the blocking pool, because its threads end before.
    async fn leave(&mut self) {
        if let Some(joined) = self.joined.take() {
            let _ = spawn_blocking(move || drop(joined)).await;
        }
    }

    /// One push of `peer`, from the command that begins it to the one that ends it.
    async fn push(&mut self, peer: String, reply: TransferReply) {
        if self.joined.is_none() {
            return answer(reply, Err(no_group()));
        }
        let (server, mut reply) = (self.server.clone(), Some(reply));
        let (session, slot) = (&mut *self, &mut reply);
        let receive = |context, sender, noted| async move { session.receive_push(context, sender, noted, slot).await };
        let result = transact(&server, peer, receive).await;
        // It has ended in the middle of receiving, or between two calls: no later broadcast of it is received.
        if std::mem::take(&mut self.is_receiving) || reply.is_none() {
            self.leave().await;
        }
        if let Some(reply) = reply {
            answer(reply, result.map(drop));
        }
    }

    /// Receives a push up to its commit. `reply` is that of the command in progress.
    async fn receive_push(
        &mut self,
        context: Arc<ServingContext>,
        sender: UpdateSender,
        noted: PushGuard,
        reply: &mut Option<TransferReply>,
    ) -> Result<StagedUpdate> {
        let activity = sender.activity.clone();
        let packing = self.joined.as_ref().ok_or_else(no_group)?.packing;
        let header = header(&context, packing);
        let mut push = PushThread::open(&context, header, Vec::new(), sender, noted).await?;
        let (mut declared, mut last) = (0, Vec::new());
        loop {
            if let Some(reply) = reply.take() {
                answer(reply, Ok(()));
            }
            activity.touch();
            let call = timeout(context.update_idle, self.calls.recv()).await.map_err(|_| silent(&context))?;
            let (command, caller) = call.ok_or_else(|| Error::Unavailable("the server is shutting down".into()))?;
            match command {
                command if self.is_late(&command) => answer(caller, Err(no_update())),
                TransferCommand::Receive(_, announced) => {
                    let reply = reply.insert(caller);
                    last = self.receive(&context, &mut push, declared, announced, reply).await?;
                    declared += last.len();
                }
                TransferCommand::Finish(version) => {
                    *reply = Some(caller);
                    let staged = push.finish().await?;
                    if let Some(joined) = &mut self.joined {
                        joined.last = last;
                    }
                    return Ok(StagedUpdate { new_version: version, ..staged });
                }
                TransferCommand::Begin(_) => {
                    let why = "a weight update is under way; POST /finish_weight_update first";
                    answer(caller, Err(Error::FailedPrecondition(why.into())));
                }
                TransferCommand::Join(..) | TransferCommand::Leave | TransferCommand::Abandon(..) => {
                    let why = match &command {
                        TransferCommand::Abandon(_, why) => format!("/update_weights was refused: {why}"),
                        _ => "the trainer has left, or another has come".into(),
                    };
                    self.next = Some((command, caller));
                    return Err(Error::Aborted(why));
                }
            }
        }
    }

    /// Receives tensors of a push after the first `declared`, and returns them. If this fails or is dropped, the
    /// session leaves the group and the push ends.
    async fn receive(
        &mut self,
        context: &ServingContext,
        push: &mut PushThread,
        declared: usize,
        announced: BroadcastTensors,
        reply: &mut TransferReply,
    ) -> Result<Vec<TensorEntry>> {
        self.is_receiving = true;
        let joined = self.joined.as_ref().ok_or_else(no_group)?;
        let tensors = if announced.tensors.is_empty() { joined.last.clone() } else { announced.tensors };
        if tensors.is_empty() {
            return Err(Error::invalid("update_info.names", "is empty, and there are no names of before"));
        }
        let packing = announced.packing.or(joined.packing);
        let (broadcasts, sizes) = broadcasts(&tensors, packing)?;
        check_room(context, &broadcasts, packing, joined.packing)?;
        let mut refused = push.declare(tensors.clone()).await;
        let timeout = TrainerTimeout::new(context.update_idle);
        let _end = EndOnDrop(timeout.clone());
        let (sender, mut pieces) = mpsc::channel(PIECES);
        let take: ByteSink = Box::new(move |piece| sender.blocking_send(Bytes::copy_from_slice(piece)).is_ok());
        let group = joined.group.clone();
        let receiving = spawn_blocking(move || group.receive(broadcasts, take, &timeout));
        let mut cursor = Cursor::new(declared as u32, sizes);
        let received = async {
            while let (Ok(()), Some(mut piece)) = (&refused, pieces.recv().await) {
                let chunks = std::iter::from_fn(|| cursor.split(&mut piece)).collect();
                refused = push.chunks(chunks).await;
            }
            drop(pieces);
            receiving.await.map_err(|e| Error::Internal(format!("receiving from the trainer failed: {e}")))?
        };
        tokio::select! {
            received = received => received?,
            () = reply.closed() => return Err(Error::Aborted("the trainer is gone".into())),
        }
        // The trainer has broadcast them to the end, also if the push has rejected them.
        self.is_receiving = false;
        refused.map(|()| tensors)
    }
}

/// Answers the caller of a command, who may be gone.
fn answer(reply: TransferReply, result: Result<()>) {
    let _ = reply.send(result);
}

/// Checks that there is room for each of these broadcasts, which is set aside by what the group began with.
fn check_room(context: &ServingContext, broadcasts: &[Broadcast], packing: Packing, begun: Packing) -> Result<()> {
    let most = largest_broadcast(&context.parameters, begun.buffer());
    let Some(larger) = broadcasts.iter().find(|broadcast| broadcast.bytes() as u64 > most) else { return Ok(()) };
    let (asked, room) = (packing.buffer(), begun.buffer());
    if packing.is_packed() && asked > room {
        let message = format!(
            "{asked} is more than the {room} of init_info, for which room is set aside; give it with init_info"
        );
        return Err(Error::invalid("update_info.packed_buffer_size_bytes", message));
    }
    let message = format!("{} bytes are broadcast at once; for this model they are {most} at most", larger.bytes());
    Err(Error::invalid("update_info.shapes", message))
}

/// The header of a push whose tensors are declared as they come. It takes the memory of one broadcast on each device,
/// and on the host that of the pieces on their way from there.
fn header(context: &ServingContext, packing: Packing) -> UpdateHeader {
    let largest = largest_broadcast(&context.parameters, packing.buffer());
    let on_devices = (context.trainers.ranks() as u64).saturating_mul(largest);
    UpdateHeader {
        total_bytes: Some(most_announced(&context.parameters)),
        source: Source::Broadcast(TransitBytes { on_devices, on_host: PIECES_BYTES }),
        ..UpdateHeader::new(UpdateKind::Full)
    }
}

fn no_update() -> Error {
    let why = "no weight update is under way: it has failed, or none was started; POST /start_weight_update";
    Error::FailedPrecondition(why.into())
}

fn no_group() -> Error {
    let why = "no trainer has joined, or its group was left after a failure; POST /init_weight_transfer_engine";
    Error::FailedPrecondition(why.into())
}

fn silent(context: &ServingContext) -> Error {
    let seconds = context.update_idle.as_secs_f64();
    Error::Aborted(format!("the trainer has sent no command for {seconds:.1} s (--update-idle-seconds)"))
}
