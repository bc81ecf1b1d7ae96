//! The start of a Generate or Score over gRPC or HTTP: parsed, checked, counted, and sent to the engine.

use std::collections::VecDeque;
use std::time::Instant;

use tokio::runtime::Handle;

use super::calls::{CancelOnDrop, Deadline};
use super::pb;
use super::replies::{ReplyStream, Writer, event_channel};
use super::state::{ModelFacts, ServerState, ServingContext};
use crate::engine::{AdapterReader, Command, GenerateCommand, RequestClient, ValidRequest};
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::types::{Owner, Tenant};

/// Requests of more bytes are parsed and tokenized on the blocking pool: an async thread may be kept busy for the few
/// milliseconds that so much takes.
pub(super) const INLINE_PARSE_BYTES: usize = 8 << 10;

/// A Generate or Score that was received, and is not checked yet.
pub(super) struct ReceivedRequest<M> {
    pub(super) message: M,
    /// Whether checking it takes long.
    pub(super) takes_long: bool,
    /// Covers the message.
    pub(super) charge: Charge,
    pub(super) deadline: Deadline,
    /// The token's owner, who may abort the request.
    pub(super) owner: Option<Owner>,
    pub(super) tenant: Tenant,
    /// Whether it is held, and not rejected, while the server is paused by the modes `wait` and `abort`.
    pub(super) waits_for_resume: bool,
}

/// Whether checking a request of `bytes` bytes takes long: it is large, a grammar is compiled, a chat is rendered, or
/// an image is decoded, which may be large though its file is small.
pub(super) fn takes_long(request: &pb::GenerateRequest, bytes: usize) -> bool {
    let own = request.prompts.iter().filter_map(|prompt| prompt.sampling.as_deref());
    bytes > INLINE_PARSE_BYTES
        || request.sampling.iter().chain(own).any(|sampling| sampling.structured_outputs.is_some())
        || request.prompts.iter().any(|prompt| is_chat(prompt) || !prompt.images.is_empty())
}

/// Whether a prompt is a chat. The model's template may take seconds for a short one.
pub(super) fn is_chat(prompt: &pb::Prompt) -> bool {
    matches!(prompt.kind, Some(pb::prompt::Kind::Chat(_)))
}

/// Checks a request with `convert` and sends it to the engine. The `Writer` that `writer` returns makes the messages of
/// the reply.
///
/// # Errors
/// The errors of `convert`; `Unavailable` while the server starts, or if it ends before the engine has the request;
/// `ResourceExhausted` if the engine's queue is full; `DeadlineExceeded`. They are counted here; once the engine has
/// the request it counts it.
pub(super) async fn start<M: Send + 'static, W: Writer>(
    server: &ServerState,
    received: ReceivedRequest<M>,
    convert: impl FnOnce(M, &ModelFacts, &mut Charge) -> Result<ValidRequest> + Send + 'static,
    writer: impl FnOnce(&ValidRequest) -> W,
) -> Result<ReplyStream<W>> {
    let start = async {
        let arrived = Instant::now();
        let (context, in_flight) = server.admit()?;
        let model = context.model.clone();
        let ReceivedRequest { message, takes_long, mut charge, deadline, owner, tenant, waits_for_resume } = received;
        let parse = off_thread(takes_long, move || {
            let request = convert(message, &model, &mut charge)?;
            // The charge, which has covered the message, covers the parsed request from here on.
            charge.set(request.bytes() + request.prompt_bytes())?;
            Ok((request, charge))
        });
        // A template that is still rendered must not delay the server's end.
        let (request, mut charge) = tokio::select! {
            biased;
            parsed = deadline.limit(parse) => parsed?,
            error = server.ending() => return Err(error),
        };
        tracing::debug!(request_id = request.request_id, prompts = request.prompts.len(), "request accepted");
        let (request_id, prompts, samples) = (request.request_id.clone(), request.prompts.len(), request.num_samples());
        let writer = writer(&request);
        let prompts_charge = charge.split(request.prompt_bytes());
        let (responder, backlog, events) = event_channel(&context);
        let cancel = CancelOnDrop::new(&context.engine);
        let ends_at = request.time_limit.and_then(|limit| arrived.checked_add(limit));
        let time_limit = ends_at.map(|at| cancel.expire_at(at));
        let flag = cancel.flag.clone();
        let adapter_reader = adapter_reader(server, &context);
        let client = RequestClient {
            owner,
            tenant,
            arrived,
            cancel: flag,
            waits_for_resume,
            responder,
            adapter_reader,
            backlog,
            charge,
        };
        context.engine.send(Command::Generate(Box::new(GenerateCommand { request, client })))?;
        Ok(ReplyStream {
            events,
            writer,
            request_id,
            messages: VecDeque::new(),
            deadline: Box::pin(deadline.passed()),
            ended: false,
            prompts,
            samples,
            server: server.clone(),
            _guards: (cancel, in_flight, prompts_charge, time_limit),
        })
    };
    let started: Result<_> = start.await;
    started.inspect_err(|error| server.observer.metrics.request_failed(error))
}

/// Reads adapters for a request on the blocking pool, and gives them to the engine; `None` without `--adapters-dir`.
fn adapter_reader(server: &ServerState, context: &ServingContext) -> Option<AdapterReader> {
    let (directory, runtime) = (context.adapters_dir.clone()?, Handle::current());
    let (engine, panics) = (context.engine.clone(), server.panics.clone());
    Some(Box::new(move |name| {
        let (directory, engine, panics, name) = (directory.clone(), engine.clone(), panics.clone(), name.to_owned());
        runtime.spawn_blocking(move || {
            let read = panics.catch(|| directory.read(&name)).flatten();
            // Fails only if the engine has ended.
            let _ = engine.send_blocking(Command::AdapterRead { name, read });
        });
    }))
}

/// The result of parsing a request, on the blocking pool if that takes long.
pub(super) async fn off_thread<T: Send + 'static>(
    takes_long: bool,
    parse: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    if !takes_long {
        return parse();
    }
    let parsed = tokio::task::spawn_blocking(parse).await;
    parsed.unwrap_or_else(|e| Err(Error::Internal(format!("parsing the request failed: {e}"))))
}
