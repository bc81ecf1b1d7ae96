//! The service Rollout: Generate, Score, Abort.

use tonic::{Request, Response};

use super::arrival::charge_of;
use super::ask;
use super::deadline::Deadline;
use super::stream::{CancelOnDrop, ReplyStream, StreamGuards, event_channel};
use crate::engine::Command;
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::server::context::ModelFacts;
use crate::server::convert::{self, ReplyWriter, ScoreWriter, ValidRequest, Writer, to_status};
use crate::server::gate::Gate;
use crate::server::pb;

/// Requests of more bytes are parsed and tokenized on the blocking pool: an async thread may be kept busy for the few
/// milliseconds that so much takes.
const INLINE_PARSE_BYTES: usize = 8 << 10;

pub(super) struct RolloutService {
    gate: Gate,
}

impl RolloutService {
    pub(super) fn new(gate: Gate) -> Self {
        Self { gate }
    }

    /// Parses a request and hands it to the engine. The reply's messages are made by the `Writer` that `writer`
    /// returns.
    async fn start<M, W>(
        &self,
        mut request: Request<M>,
        convert: impl FnOnce(M, &ModelFacts, &mut Charge) -> Result<ValidRequest> + Send + 'static,
        writer: impl FnOnce(&ValidRequest) -> W,
    ) -> tonic::Result<Response<ReplyStream<W>>>
    where
        M: prost::Message + 'static,
        W: Writer,
    {
        let deadline = Deadline::of(&request);
        let (context, running) = self.gate.admit().map_err(to_status)?;
        let model = context.model.clone();
        let charge = charge_of(&mut request, &context.traffic);
        let parsed = parse(request.into_inner(), charge, move |message, charge| convert(message, &model, charge));
        let (request, charge) = deadline.clone().limit(parsed).await?;
        tracing::debug!(request_id = request.request_id, prompts = request.prompts.len(), "request accepted");
        let size = (request.prompts.len(), request.samples());
        let writer = writer(&request);
        let (reply, events) = event_channel(&context);
        let cancel = CancelOnDrop::new(&context.engine);
        context.engine.send(request.into_command(cancel.flag.clone(), reply, charge)).map_err(to_status)?;
        let guards = StreamGuards { cancel, running, deadline, gate: self.gate.clone() };
        Ok(Response::new(ReplyStream::new(events, writer, size, guards)))
    }
}

#[tonic::async_trait]
impl pb::rollout_server::Rollout for RolloutService {
    type GenerateStream = ReplyStream<ReplyWriter>;
    type ScoreStream = ReplyStream<ScoreWriter>;

    async fn generate(&self, request: Request<pb::GenerateRequest>) -> tonic::Result<Response<Self::GenerateStream>> {
        self.start(request, convert::generate, ReplyWriter::new).await
    }

    async fn score(&self, request: Request<pb::ScoreRequest>) -> tonic::Result<Response<Self::ScoreStream>> {
        let convert = |message, model: &ModelFacts, _: &mut Charge| convert::score(message, model);
        self.start(request, convert, ScoreWriter::new).await
    }

    async fn abort(&self, request: Request<pb::AbortRequest>) -> tonic::Result<Response<pb::AbortResponse>> {
        let deadline = Deadline::of(&request);
        let abort = async {
            let context = self.gate.look()?;
            let target = convert::abort(request.into_inner())?;
            let reply = ask(&context.engine, |reply| Command::Abort { target, reply }).await?;
            Ok(pb::AbortResponse { aborted: reply.aborted, unknown: reply.unknown })
        };
        deadline.limit(abort).await.map(Response::new)
    }
}

/// Parses a request, on the blocking pool if it is large. `charge`, which covers the message, is then set to cover the
/// parsed request.
async fn parse<M>(
    message: M,
    mut charge: Charge,
    convert: impl FnOnce(M, &mut Charge) -> Result<ValidRequest> + Send + 'static,
) -> Result<(ValidRequest, Charge)>
where
    M: prost::Message + 'static,
{
    let is_small = message.encoded_len() <= INLINE_PARSE_BYTES;
    let parse = move || {
        let request = convert(message, &mut charge)?;
        charge.set(request.bytes())?;
        Ok((request, charge))
    };
    if is_small {
        return parse();
    }
    let parsed = tokio::task::spawn_blocking(parse).await;
    parsed.unwrap_or_else(|e| Err(Error::Internal(format!("parsing the request failed: {e}"))))
}
