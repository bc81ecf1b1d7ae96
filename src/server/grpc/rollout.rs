//! The service Rollout: Generate, Score, Abort.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::arrival::charge_of;
use super::deadline::{answer, deadline_of};
use super::guard::caller_of;
use super::reply::{ReplyWriter, ScoreWriter};
use super::status::to_status;
use crate::engine::{Command, ValidRequest};
use crate::error::Result;
use crate::memory::Charge;
use crate::server::calls::{ReplyStream, Writer, ask};
use crate::server::context::ModelFacts;
use crate::server::convert;
use crate::server::gate::Gate;
use crate::server::pb;
use crate::server::requests::{Arrived, Ask, start};

pub(super) struct RolloutService {
    gate: Gate,
}

impl RolloutService {
    pub(super) fn new(gate: Gate) -> Self {
        Self { gate }
    }

    /// Starts a request. The reply's messages are made by the `Writer` that `writer` returns.
    async fn start<M, W>(
        &self,
        mut request: Request<M>,
        convert: impl FnOnce(M, &ModelFacts, &mut Charge) -> Result<ValidRequest> + Send + 'static,
        writer: impl FnOnce(&ValidRequest) -> W,
    ) -> tonic::Result<Response<Replies<W>>>
    where
        M: prost::Message + Ask,
        W: Writer,
    {
        let (deadline, owner) = (deadline_of(&request), caller_of(&request).owner);
        let noted = deadline.clone();
        let traffic = self.gate.traffic().map_err(to_status)?;
        let charge = charge_of(&mut request, &traffic);
        let message = request.into_inner();
        let arrived = Arrived { bytes: message.encoded_len(), message, charge, deadline, owner };
        let started = start(&self.gate, arrived, convert, writer).await;
        let stream = started.inspect_err(|error| noted.note(error)).map_err(to_status)?;
        Ok(Response::new(Replies(stream)))
    }
}

/// The messages of one reply, as tonic takes them.
pub(super) struct Replies<W: Writer>(ReplyStream<W>);

impl<W: Writer> Stream for Replies<W> {
    type Item = std::result::Result<W::Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.0).poll_next(cx).map(|message| message.map(|message| message.map_err(to_status)))
    }
}

#[tonic::async_trait]
impl pb::rollout_server::Rollout for RolloutService {
    type GenerateStream = Replies<ReplyWriter>;
    type ScoreStream = Replies<ScoreWriter>;

    async fn generate(&self, request: Request<pb::GenerateRequest>) -> tonic::Result<Response<Self::GenerateStream>> {
        self.start(request, convert::generate, ReplyWriter::new).await
    }

    async fn score(&self, request: Request<pb::ScoreRequest>) -> tonic::Result<Response<Self::ScoreStream>> {
        let convert = |message, model: &ModelFacts, _: &mut Charge| convert::score(message, model);
        self.start(request, convert, ScoreWriter::new).await
    }

    async fn abort(&self, request: Request<pb::AbortRequest>) -> tonic::Result<Response<pb::AbortResponse>> {
        let (deadline, owner) = (deadline_of(&request), caller_of(&request).limited_to);
        let abort = async {
            let context = self.gate.look()?;
            let target = convert::abort(request.into_inner())?;
            let reply = ask(&context.engine, |reply| Command::Abort { target, owner, reply }).await?;
            Ok(pb::AbortResponse { aborted: reply.aborted, unknown: reply.unknown })
        };
        answer(deadline, abort).await
    }
}
