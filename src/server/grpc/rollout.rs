//! The service Rollout: Generate, Score, Abort.

use std::pin::Pin;

use prost::Message as _;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Status};

use super::middleware::{Answer, answer, caller_of, deadline_of};
use super::receive::charge_of;
use super::reply::{GenerateWriter, ScoreWriter};
use super::status::to_status;
use crate::engine::{Command, ValidRequest};
use crate::error::Result;
use crate::memory::Charge;
use crate::server::calls::ask;
use crate::server::replies::Writer;
use crate::server::requests::{INLINE_PARSE_BYTES, ReceivedRequest, start, takes_long};
use crate::server::{ModelFacts, ServerState, convert, pb};

pub(super) struct RolloutService {
    server: ServerState,
}

/// The messages of one reply, as tonic takes them.
type Replies<M> = Pin<Box<dyn Stream<Item = std::result::Result<M, Status>> + Send>>;

impl RolloutService {
    pub(super) fn new(server: ServerState) -> Self {
        Self { server }
    }

    /// Starts a request. The `Writer` that `writer` returns makes the messages of the reply.
    async fn start<M: Send + 'static, W: Writer + 'static>(
        &self,
        mut request: Request<M>,
        takes_long: bool,
        tenant: fn(&mut M) -> &mut String,
        convert: impl FnOnce(M, &ModelFacts, &mut Charge) -> Result<ValidRequest> + Send + 'static,
        writer: impl FnOnce(&ValidRequest) -> W,
    ) -> Answer<Replies<W::Message>> {
        let (deadline, caller) = (deadline_of(&request), caller_of(&request));
        let traffic = self.server.traffic().map_err(to_status)?;
        let charge = charge_of(&mut request, &traffic);
        let mut message = request.into_inner();
        let tenant = caller.tenant_of(&std::mem::take(tenant(&mut message))).map_err(to_status)?;
        let received = ReceivedRequest {
            message,
            takes_long,
            charge,
            deadline: deadline.clone(),
            owner: caller.owner,
            tenant,
            waits_for_resume: true,
        };
        let replies = answer(deadline, start(&self.server, received, convert, writer)).await?;
        Ok(replies.map(|replies| Box::pin(replies.map(|message| message.map_err(to_status))) as Replies<_>))
    }
}

#[tonic::async_trait]
impl pb::rollout_server::Rollout for RolloutService {
    type GenerateStream = Replies<pb::GenerateResponse>;
    type ScoreStream = Replies<pb::ScoreResponse>;

    async fn generate(&self, request: Request<pb::GenerateRequest>) -> Answer<Self::GenerateStream> {
        let takes_long = takes_long(request.get_ref(), request.get_ref().encoded_len());
        self.start(request, takes_long, |request| &mut request.tenant, convert::generate, GenerateWriter::new).await
    }

    async fn score(&self, request: Request<pb::ScoreRequest>) -> Answer<Self::ScoreStream> {
        let convert = convert::score;
        let has_images = !request.get_ref().images.is_empty();
        let takes_long = has_images || request.get_ref().encoded_len() > INLINE_PARSE_BYTES;
        self.start(request, takes_long, |request| &mut request.tenant, convert, ScoreWriter::new).await
    }

    async fn abort(&self, request: Request<pb::AbortRequest>) -> Answer<pb::AbortResponse> {
        let (deadline, owner) = (deadline_of(&request), caller_of(&request).limited_to);
        let abort = async {
            let context = self.server.context()?;
            let target = convert::abort(request.into_inner())?;
            let reply = ask(&context.engine, |reply| Command::Abort { target, owner, reply }).await?;
            Ok(pb::AbortResponse { aborted: reply.aborted, unknown: reply.unknown })
        };
        answer(deadline, abort).await
    }
}
