//! The start of a Generate or Score, whichever door it comes through: parsed, checked, counted, and given to the
//! engine.

use std::time::Instant;

use super::calls::{CancelOnDrop, Deadline, ReplyEnd, ReplyStream, StreamGuards, Writer, event_channel};
use super::context::ModelFacts;
use super::gate::Gate;
use super::pb;
use crate::engine::{Command, GenerateCommand, RequestClient, ValidRequest};
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::types::Owner;

/// Requests of more bytes are parsed and tokenized on the blocking pool: an async thread may be kept busy for the few
/// milliseconds that so much takes.
pub(super) const INLINE_PARSE_BYTES: usize = 8 << 10;

/// A message that asks for a Generate or Score.
pub(super) trait Ask: Send + 'static {
    /// Whether checking it takes long even if it is short.
    fn takes_long(&self) -> bool;
}

impl Ask for pb::GenerateRequest {
    /// A grammar is compiled, or a chat is rendered.
    fn takes_long(&self) -> bool {
        let own = self.prompts.iter().filter_map(|prompt| prompt.sampling.as_deref());
        self.sampling.iter().chain(own).any(|sampling| sampling.structured_outputs.is_some())
            || self.prompts.iter().any(is_chat)
    }
}

impl Ask for pb::ScoreRequest {
    fn takes_long(&self) -> bool {
        false
    }
}

/// Whether a prompt is a chat. The model's template may take seconds for a short one.
pub(super) fn is_chat(prompt: &pb::Prompt) -> bool {
    matches!(prompt.kind, Some(pb::prompt::Kind::Chat(_)))
}

/// A message that asks for a Generate or Score, and is not checked yet.
pub(super) struct Arrived<M> {
    pub(super) message: M,
    /// Size of the message in bytes, as it came.
    pub(super) bytes: usize,
    /// Covers the message.
    pub(super) charge: Charge,
    pub(super) deadline: Deadline,
    /// Who may end the request.
    pub(super) owner: Option<Owner>,
}

/// Checks a request with `convert` and hands it to the engine. What the door sends is made by the `Writer` that
/// `writer` returns.
///
/// # Errors
/// The errors of `convert`; `Unavailable` while the server starts, or if it ends before the engine has the request;
/// `ResourceExhausted` if the engine's queue is full; `DeadlineExceeded`. They are counted here; once the engine has
/// the request it counts it.
pub(super) async fn start<M, W>(
    gate: &Gate,
    arrived: Arrived<M>,
    convert: impl FnOnce(M, &ModelFacts, &mut Charge) -> Result<ValidRequest> + Send + 'static,
    writer: impl FnOnce(&ValidRequest) -> W,
) -> Result<ReplyStream<W>>
where
    M: Ask,
    W: Writer,
{
    let started = start_uncounted(gate, arrived, convert, writer).await;
    started.inspect_err(|error| gate.observer.metrics.request_failed(error))
}

async fn start_uncounted<M, W>(
    gate: &Gate,
    arrived: Arrived<M>,
    convert: impl FnOnce(M, &ModelFacts, &mut Charge) -> Result<ValidRequest> + Send + 'static,
    writer: impl FnOnce(&ValidRequest) -> W,
) -> Result<ReplyStream<W>>
where
    M: Ask,
    W: Writer,
{
    let at = Instant::now();
    let (context, running) = gate.admit()?;
    let model = context.model.clone();
    let (deadline, owner) = (arrived.deadline.clone(), arrived.owner);
    let parsed = parse(arrived, move |message, charge| convert(message, &model, charge));
    // A template that is still rendered must not hold up the server's end.
    let (request, mut charge) = tokio::select! {
        biased;
        parsed = deadline.clone().limit(parsed) => parsed?,
        error = gate.refused() => return Err(error),
    };
    tracing::debug!(request_id = request.request_id, prompts = request.prompts.len(), "request accepted");
    let size = (request.prompts.len(), request.num_samples());
    let writer = writer(&request);
    let prompts = charge.split(request.prompt_bytes());
    let (ReplyEnd { responder, backlog }, events) = event_channel(&context);
    let cancel = CancelOnDrop::new(&context.engine);
    let ends_at = request.time_limit.and_then(|limit| at.checked_add(limit));
    let time_limit = ends_at.map(|at| cancel.expire_at(at));
    let client = RequestClient { owner, arrived: at, cancel: cancel.flag.clone(), responder, backlog, charge };
    context.engine.send(Command::Generate(Box::new(GenerateCommand { request, client })))?;
    let guards = StreamGuards { cancel, running, deadline, gate: gate.clone(), prompts, time_limit };
    Ok(ReplyStream::new(events, writer, size, guards))
}

/// Parses a request, on the blocking pool if that takes long. Its charge, which covers the message, is then set to
/// cover the parsed request.
async fn parse<M: Ask>(
    arrived: Arrived<M>,
    convert: impl FnOnce(M, &mut Charge) -> Result<ValidRequest> + Send + 'static,
) -> Result<(ValidRequest, Charge)> {
    let Arrived { message, bytes, mut charge, .. } = arrived;
    let takes_long = message.takes_long();
    let parse = move || {
        let request = convert(message, &mut charge)?;
        charge.set(request.bytes() + request.prompt_bytes())?;
        Ok((request, charge))
    };
    off_thread(takes_long, bytes, parse).await
}

/// The result of parsing `bytes` bytes, on the blocking pool if they are many or if it takes long.
pub(super) async fn off_thread<T: Send + 'static>(
    takes_long: bool,
    bytes: usize,
    parse: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    if !takes_long && bytes <= INLINE_PARSE_BYTES {
        return parse();
    }
    let parsed = tokio::task::spawn_blocking(parse).await;
    parsed.unwrap_or_else(|e| Err(Error::Internal(format!("parsing the request failed: {e}"))))
}
