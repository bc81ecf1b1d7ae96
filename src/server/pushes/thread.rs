//! Receives a push on a thread of the blocking pool, because copying, hashing and reading files would keep the async
//! threads from their streams.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::engine::{Activity, CancelFlag, Command, EngineHandle, Reply, UpdateBegin, UpdateTicket};
use crate::error::{Error, Result};
use crate::observe::PushGuard;
use crate::server::calls::{ask, engine_gone, reply_channel};
use crate::server::convert::{ReceivedFacts, Terms, ValidHeader};
use crate::server::pb;
use crate::server::state::ServingContext;
use crate::types::WeightVersion;
use crate::weights::{Received, Receiver, TensorEntry, WeightUpdate};

/// Messages between the stream and the thread: further chunks arrive while one is being hashed.
const QUEUE: usize = 4;

/// An open transaction, and the thread that receives its content.
pub(in crate::server) struct PushThread {
    messages: mpsc::Sender<PushMessage>,
    thread: JoinHandle<Result<Received>>,
    update: u64,
    declared: usize,
    noted: PushGuard,
}

/// A verified push, ready to be committed.
pub(in crate::server) struct VerifiedPush {
    pub(super) update: u64,
    pub(super) content: WeightUpdate,
    pub(super) facts: ReceivedFacts,
    /// The version of the policy, where it comes with the commit.
    pub(in crate::server) new_version: Option<WeightVersion>,
}

/// The sender of a push, as the engine reports it.
pub(in crate::server) struct Sender {
    pub(super) peer: String,
    pub(in crate::server) activity: Activity,
    pub(super) cancel: CancelFlag,
    pub(super) ended: Reply<Error>,
    /// Records the push for observers.
    pub(super) noted: PushGuard,
}

/// A message to the thread.
enum PushMessage {
    Declare(Vec<TensorEntry>),
    Write { tensor: u32, offset: u64, data: Bytes },
    Finish,
}

impl PushThread {
    /// Checks the manifest, opens the transaction at the engine, and starts the receiving thread.
    pub(in crate::server) async fn open(
        context: &Arc<ServingContext>,
        header: ValidHeader,
        sender: Sender,
    ) -> Result<Self> {
        let noted = sender.noted.clone();
        header.describe(&noted);
        let ValidHeader { spec, terms } = header;
        let declared = spec.tensors.len();
        let (parameters, sources) = (context.parameters.clone(), context.sources.clone());
        let opened = spawn_blocking(move || Receiver::open(spec, parameters, &sources)).await;
        let receiver = opened.map_err(failed)??;
        let (engine, activity) = (context.engine.clone(), sender.activity.clone());
        let begin = begin(terms, &receiver, sender);
        let (messages, queue) = mpsc::channel(QUEUE);
        // The thread has the receiver from here on, because dropping it closes what it has opened of device memory.
        let (begun, ticket) = oneshot::channel();
        let thread = spawn_blocking(move || match ticket.blocking_recv() {
            Ok(ticket) => receive(receiver, queue, ticket, &engine, &activity),
            Err(_) => Err(Error::Aborted("the push was not begun".into())),
        });
        let asked = ask(&context.engine, |reply| Command::BeginUpdate { begin, reply }).await;
        let ticket = match asked.and_then(|answer| answer) {
            Ok(ticket) => ticket,
            Err(error) => {
                // The sender may free its memory once it has the error.
                drop(begun);
                let _ = thread.await;
                return Err(error);
            }
        };
        let update = ticket.id;
        // Fails only if the thread has died, which the next message finds.
        let _ = begun.send(ticket);
        noted.receives(update);
        Ok(Self { messages, thread, update, declared, noted })
    }

    /// Number of tensors that the header has declared.
    pub(in crate::server) fn declared(&self) -> usize {
        self.declared
    }

    pub(in crate::server) async fn declare(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        self.send(PushMessage::Declare(tensors)).await
    }

    pub(in crate::server) async fn chunk(&mut self, chunk: pb::Chunk) -> Result<()> {
        self.send(PushMessage::Write { tensor: chunk.tensor, offset: chunk.offset, data: chunk.data }).await
    }

    /// Ends the push and verifies what has arrived.
    pub(in crate::server) async fn finish(mut self) -> Result<VerifiedPush> {
        self.noted.verifies();
        self.send(PushMessage::Finish).await?;
        let received = self.thread.await.map_err(failed)??;
        let facts = ReceivedFacts::from(&received);
        Ok(VerifiedPush { update: self.update, content: received.update, facts, new_version: None })
    }

    /// Sends a message to the thread. If the thread has ended, returns the error that it ended with.
    async fn send(&mut self, message: PushMessage) -> Result<()> {
        if self.messages.send(message).await.is_ok() {
            return Ok(());
        }
        match (&mut self.thread).await.map_err(failed)? {
            Err(error) => Err(error),
            Ok(_) => Err(Error::Internal("the push was taken before its end".into())),
        }
    }
}

fn begin(terms: Terms, receiver: &Receiver, sender: Sender) -> UpdateBegin {
    let Sender { peer, activity, cancel, ended, .. } = sender;
    UpdateBegin {
        kind: terms.kind,
        adapter: terms.adapter,
        expected_version: terms.expected_version,
        new_version: terms.new_version,
        force_version: terms.force_version,
        running: terms.running,
        staging_bytes: receiver.staging_bytes(false),
        shadow_bytes: receiver.shadow_bytes(),
        in_place_bytes: receiver.staging_bytes(true),
        in_place: terms.in_place,
        is_broadcast: receiver.is_broadcast(),
        cancel,
        peer,
        activity,
        ended,
    }
}

/// Body of the receiving thread. If the stream is dropped, it ends early and drops what was received.
fn receive(
    mut receiver: Receiver,
    mut queue: mpsc::Receiver<PushMessage>,
    ticket: UpdateTicket,
    engine: &EngineHandle,
    activity: &Activity,
) -> Result<Received> {
    if let Some(shadow) = ticket.shadow {
        let _busy = activity.busy();
        receiver.pack_into(shadow);
        receiver.read_declared()?;
    }
    while let Some(message) = queue.blocking_recv() {
        let _busy = activity.busy();
        match message {
            PushMessage::Declare(tensors) => {
                receiver.declare(tensors)?;
                receiver.read_declared()?;
            }
            PushMessage::Write { tensor, offset, data } => receiver.write(tensor, offset, &data)?,
            PushMessage::Finish => {
                // Tensors of a source other than the stream are read now.
                while ticket.in_place && receiver.read_next()? {
                    write_complete(&mut receiver, ticket.id, engine)?;
                }
                return receiver.finish();
            }
        }
        if ticket.in_place {
            write_complete(&mut receiver, ticket.id, engine)?;
        }
    }
    Err(Error::Aborted("the stream broke before its commit".into()))
}

/// Has the engine write the complete tensors in place, and waits, so that only one part is on its way at a time.
fn write_complete(receiver: &mut Receiver, update: u64, engine: &EngineHandle) -> Result<()> {
    let Some(tensors) = receiver.take_complete() else { return Ok(()) };
    let (reply, answer) = reply_channel();
    engine.send_blocking(Command::WritePart { update, tensors: Arc::new(tensors), reply })?;
    answer.blocking_recv().map_err(|_| engine_gone())?
}

fn failed(error: tokio::task::JoinError) -> Error {
    Error::Internal(format!("receiving the push failed: {error}"))
}
