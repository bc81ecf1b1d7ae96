//! Receives a push on a thread of the blocking pool, because copying, hashing and reading files would keep the async
//! threads from their streams.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::engine::{Activity, Command, EngineHandle, UpdateSender, UpdateTicket};
use crate::error::{Error, Result};
use crate::observe::{Phase, PushGuard};
use crate::server::calls::{ask, engine_gone, reply_channel};
use crate::server::state::ServingContext;
use crate::server::{convert, pb};
use crate::types::WeightVersion;
use crate::weights::{DeclaredPush, Source, TensorEntry, Tensors, UpdateHeader, VerifiedPush};

/// Messages between the stream and the thread: further chunks arrive while one is being hashed.
const QUEUE: usize = 4;

/// An open update, and the thread that receives its content.
pub(in crate::server) struct PushThread {
    messages: mpsc::Sender<PushMessage>,
    thread: JoinHandle<Result<VerifiedPush>>,
    update: u64,
    noted: PushGuard,
}

/// An open update with its verified push, ready to be committed.
pub(in crate::server) struct StagedUpdate {
    pub(in crate::server) id: u64,
    pub(in crate::server) push: VerifiedPush,
    /// The version of the policy, where it comes with the commit.
    pub(in crate::server) new_version: Option<WeightVersion>,
}

/// A message to the thread.
enum PushMessage {
    Declare(Vec<TensorEntry>),
    Write(Vec<pb::Chunk>),
    Finish,
}

impl PushThread {
    /// Checks the manifest, opens the update at the engine, and starts the receiving thread.
    pub(in crate::server) async fn open(
        context: &Arc<ServingContext>,
        mut header: UpdateHeader,
        tensors: Vec<TensorEntry>,
        sender: UpdateSender,
        noted: PushGuard,
    ) -> Result<Self> {
        convert::describe(&header, &noted);
        if let Source::DeltaStore(store) = &mut header.source {
            store.serving = ask(&context.engine, |reply| Command::Status { reply }).await?.stored;
        }
        let (parameters, sources) = (context.parameters.clone(), context.sources.clone());
        let opened = spawn_blocking(move || DeclaredPush::open(Arc::new(header), tensors, parameters, &sources)).await;
        let push = opened.map_err(failed)??;
        let (header, staging) = (push.header().clone(), push.staging());
        let (engine, signs) = (context.engine.clone(), (sender.activity.clone(), noted.clone()));
        let (messages, queue) = mpsc::channel(QUEUE);
        // The thread has the push from here on, because dropping it closes what it has opened of device memory.
        let (begun, ticket) = oneshot::channel();
        let thread = spawn_blocking(move || match ticket.blocking_recv() {
            Ok(ticket) => receive(push, queue, ticket, &engine, &signs),
            Err(_) => Err(Error::Aborted("the push was not begun".into())),
        });
        let begin = |reply| Command::BeginUpdate { header, staging, sender, reply };
        let ticket = match ask(&context.engine, begin).await.flatten() {
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
        Ok(Self { messages, thread, update, noted })
    }

    pub(in crate::server) async fn declare(&mut self, tensors: Vec<TensorEntry>) -> Result<()> {
        self.send(PushMessage::Declare(tensors)).await
    }

    pub(in crate::server) async fn chunks(&mut self, chunks: Vec<pb::Chunk>) -> Result<()> {
        self.send(PushMessage::Write(chunks)).await
    }

    /// Ends the push and verifies what has arrived.
    pub(in crate::server) async fn finish(mut self) -> Result<StagedUpdate> {
        self.noted.verifies();
        self.send(PushMessage::Finish).await?;
        let push = self.thread.await.map_err(failed)??;
        Ok(StagedUpdate { id: self.update, push, new_version: None })
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

/// Body of the receiving thread. If the stream is dropped, it ends early and drops the push.
fn receive(
    push: DeclaredPush,
    mut queue: mpsc::Receiver<PushMessage>,
    ticket: UpdateTicket,
    engine: &EngineHandle,
    (activity, noted): &(Activity, PushGuard),
) -> Result<VerifiedPush> {
    let works = |phase| (activity.busy(), noted.works(phase, ticket.id));
    // Has the engine write tensors in place, and waits, so that only one part is on its way at a time.
    let write_part = |tensors: Tensors| {
        let (reply, answer) = reply_channel();
        engine.send_blocking(Command::WritePart { update: ticket.id, tensors: Arc::new(tensors), reply })?;
        answer.blocking_recv().map_err(|_| engine_gone())?
    };
    let mut push = {
        let _works = works(Phase::PushReceive);
        push.receive(ticket.mode)?
    };
    while let Some(message) = queue.blocking_recv() {
        let (_busy, work) =
            works(if matches!(message, PushMessage::Finish) { Phase::PushVerify } else { Phase::PushReceive });
        match message {
            PushMessage::Declare(tensors) => push.declare(tensors)?,
            PushMessage::Write(chunks) => {
                for pb::Chunk { tensor, offset, data } in chunks {
                    push.write(tensor, offset, &data)?.map_or(Ok(()), write_part)?;
                }
            }
            PushMessage::Finish => {
                // The tensors of a push in place that come from files are read now, one after the other.
                while let Some(tensors) = push.read_next()? {
                    work.progress();
                    write_part(tensors)?;
                    work.progress();
                }
                return push.finish();
            }
        }
    }
    Err(Error::Aborted("the stream broke before its commit".into()))
}

fn failed(error: tokio::task::JoinError) -> Error {
    Error::Internal(format!("receiving the push failed: {error}"))
}
