//! Rollout: Generate, Score, Abort.

use tonic::{Request, Response};

use super::arrival::charge_of;
use super::deadline::Deadline;
use super::stream::{CancelOnDrop, GenerateStream, StreamGuards, event_channel};
use super::{ask, engine_gone};
use crate::engine::Command;
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::server::convert::{self, Progress, ReplyWriter, ScoreCollector, ValidRequest, to_status};
use crate::server::gate::Gate;
use crate::server::pb;

/// Requests larger than this many bytes are parsed and tokenised on the blocking pool: a few milliseconds of
/// tokenising is what an async thread may be kept busy.
const INLINE_PARSE_BYTES: usize = 8 << 10;

pub(super) struct RolloutService {
    gate: Gate,
}

impl RolloutService {
    pub(super) fn new(gate: Gate) -> Self {
        Self { gate }
    }

    async fn score_all(&self, mut request: Request<pb::ScoreRequest>) -> Result<pb::ScoreResponse> {
        let (parts, _running) = self.gate.admit()?;
        let model = parts.model.clone();
        let charge = charge_of(&mut request, &parts.traffic);
        let parsed = parse(request.into_inner(), charge, move |r, _| convert::score(r, &model));
        let (request, charge) = parsed.await?;
        let (reply, mut events) = event_channel(&parts);
        let cancel = CancelOnDrop::new(&parts.engine);
        let mut collector = ScoreCollector::new(&request);
        parts.engine.send(request.into_command(cancel.flag.clone(), reply, charge))?;
        loop {
            match collector.take(events.next().await.ok_or_else(engine_gone)?) {
                Progress::More => {}
                Progress::Done => return collector.finish(),
                Progress::Failed(error) => return Err(error),
            }
        }
    }
}

#[tonic::async_trait]
impl pb::rollout_server::Rollout for RolloutService {
    type GenerateStream = GenerateStream;

    async fn generate(&self, mut request: Request<pb::GenerateRequest>) -> tonic::Result<Response<GenerateStream>> {
        let deadline = Deadline::of(&request);
        let (parts, running) = self.gate.admit().map_err(to_status)?;
        let model = parts.model.clone();
        let charge = charge_of(&mut request, &parts.traffic);
        let parsed = parse(request.into_inner(), charge, move |r, charge| convert::generate(r, &model, charge));
        let (request, charge) = deadline.clone().limit(parsed).await?;
        tracing::debug!(request_id = request.request_id, prompts = request.prompts.len(), "request accepted");
        let size = (request.prompts.len(), request.samples());
        let writer = ReplyWriter::new(&request, &parts.model);
        let (reply, events) = event_channel(&parts);
        let cancel = CancelOnDrop::new(&parts.engine);
        parts.engine.send(request.into_command(cancel.flag.clone(), reply, charge)).map_err(to_status)?;
        let guards = StreamGuards { cancel, running, deadline };
        Ok(Response::new(GenerateStream::new(events, writer, size, guards)))
    }

    async fn score(&self, request: Request<pb::ScoreRequest>) -> tonic::Result<Response<pb::ScoreResponse>> {
        let deadline = Deadline::of(&request);
        deadline.limit(self.score_all(request)).await.map(Response::new)
    }

    async fn abort(&self, request: Request<pb::AbortRequest>) -> tonic::Result<Response<pb::AbortResponse>> {
        let deadline = Deadline::of(&request);
        let abort = async {
            let parts = self.gate.look()?;
            let target = convert::abort(request.into_inner())?;
            let reply = ask(&parts.engine, |reply| Command::Abort { target, reply }).await?;
            Ok(pb::AbortResponse { aborted: reply.aborted, unknown: reply.unknown })
        };
        deadline.limit(abort).await.map(Response::new)
    }
}

/// Parses a request, here or, if it is large, on the blocking pool. `charge`, that of the message, becomes that of what
/// is kept of it.
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
