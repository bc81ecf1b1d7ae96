//! The service Weights: Update, CancelUpdate, ListParameters, Checksum, ListAdapters, RemoveAdapter.

use std::sync::Arc;

use bytes::Bytes;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::deadline::{answer, deadline_of};
use super::messages::Messages;
use super::status::to_status;
use crate::engine::{Command, UpdateSender};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::observe::PushGuard;
use crate::server::calls::{CancelOnDrop, ask};
use crate::server::context::ServingContext;
use crate::server::convert;
use crate::server::gate::Gate;
use crate::server::pb::{self, update_request::Kind};
use crate::server::pushes::{self, PushThread, StagedUpdate};

#[derive(Clone)]
pub(super) struct WeightsService {
    gate: Gate,
}

impl WeightsService {
    pub(super) fn new(gate: Gate) -> Self {
        Self { gate }
    }

    /// The count of the bytes of requests and replies.
    ///
    /// # Errors
    /// `Unavailable` while the server starts.
    pub(super) fn traffic(&self) -> Result<Traffic> {
        self.gate.traffic()
    }

    /// Handles a call of Update, within its deadline.
    pub(super) async fn update_from<S>(
        &self,
        request: Request<Messages<S>>,
    ) -> tonic::Result<Response<pb::UpdateResponse>>
    where
        S: Stream<Item = tonic::Result<Bytes>> + Unpin,
    {
        let deadline = deadline_of(&request);
        let peer = request.remote_addr().map_or_else(|| "an unknown address".into(), |peer| peer.to_string());
        answer(deadline, self.receive(request.into_inner(), peer)).await
    }

    /// One transaction, whose content is in `messages`.
    async fn receive<S>(&self, messages: Messages<S>, peer: String) -> Result<pb::UpdateResponse>
    where
        S: Stream<Item = tonic::Result<Bytes>> + Unpin,
    {
        let receive = |context: Arc<ServingContext>, sender: UpdateSender, noted| async move {
            let messages = messages.with_patience(sender.activity.clone(), context.update_idle);
            receive_push(&context, messages, sender, noted).await
        };
        pushes::transact(&self.gate, peer, receive).await
    }

    async fn cancel(&self, request: pb::CancelUpdateRequest) -> Result<pb::CancelUpdateResponse> {
        let context = self.gate.look()?;
        let update = request.id;
        let ended = ask(&context.engine, |reply| Command::CancelUpdate { update, reply }).await?;
        if let Some(update) = &ended {
            tracing::info!(update = update.id, peer = update.peer, "an update was ended by CancelUpdate");
        }
        Ok(pb::CancelUpdateResponse { update: ended.as_ref().map(convert::open_update) })
    }

    async fn checksums(&self, names: Vec<String>) -> Result<pb::ChecksumResponse> {
        let context = self.gate.look()?;
        let names = convert::parameter_names(names)?;
        let guard = CancelOnDrop::new(&context.engine);
        let cancel = guard.flag.clone();
        let reply = ask(&context.engine, |reply| Command::Checksum { names, cancel, reply }).await??;
        let checksum = |(name, sha256): (String, [u8; 32])| pb::ParameterChecksum { name, sha256: sha256.to_vec() };
        let parameters = reply.parameters.into_iter().map(checksum).collect();
        Ok(pb::ChecksumResponse { weight_version: reply.weight_version, parameters })
    }

    async fn adapters(&self) -> Result<pb::ListAdaptersResponse> {
        let context = self.gate.look()?;
        let adapters = ask(&context.engine, |reply| Command::ListAdapters { reply }).await?;
        Ok(convert::adapters(adapters, &context.info))
    }

    async fn remove(&self, request: pb::RemoveAdapterRequest) -> Result<pb::RemoveAdapterResponse> {
        let (context, _running) = self.gate.admit()?;
        let name = convert::adapter_name(request.name)?;
        let cancel = CancelOnDrop::new(&context.engine);
        let (expected_generation, flag) = (request.expected_generation, cancel.flag.clone());
        let remove = |reply| Command::RemoveAdapter { name, expected_generation, cancel: flag, reply };
        let generation = ask(&context.engine, remove).await??;
        Ok(pb::RemoveAdapterResponse { generation })
    }
}

#[tonic::async_trait]
impl pb::weights_server::Weights for WeightsService {
    /// Never called, because [`super::updates`] takes these calls.
    async fn update(&self, _: Request<Streaming<pb::UpdateRequest>>) -> tonic::Result<Response<pb::UpdateResponse>> {
        Err(Status::internal("an update has come past the reader of its frames"))
    }

    async fn list_parameters(
        &self,
        _: Request<pb::ListParametersRequest>,
    ) -> tonic::Result<Response<pb::ListParametersResponse>> {
        self.gate.look().map(|context| Response::new(parameters(&context))).map_err(to_status)
    }

    async fn checksum(&self, request: Request<pb::ChecksumRequest>) -> tonic::Result<Response<pb::ChecksumResponse>> {
        let deadline = deadline_of(&request);
        answer(deadline, self.checksums(request.into_inner().names)).await
    }

    async fn cancel_update(
        &self,
        request: Request<pb::CancelUpdateRequest>,
    ) -> tonic::Result<Response<pb::CancelUpdateResponse>> {
        answer(deadline_of(&request), self.cancel(request.into_inner())).await
    }

    async fn list_adapters(
        &self,
        request: Request<pb::ListAdaptersRequest>,
    ) -> tonic::Result<Response<pb::ListAdaptersResponse>> {
        answer(deadline_of(&request), self.adapters()).await
    }

    async fn remove_adapter(
        &self,
        request: Request<pb::RemoveAdapterRequest>,
    ) -> tonic::Result<Response<pb::RemoveAdapterResponse>> {
        let deadline = deadline_of(&request);
        answer(deadline, self.remove(request.into_inner())).await
    }
}

/// Receives and verifies a push up to its commit.
async fn receive_push<S>(
    context: &Arc<ServingContext>,
    mut messages: Messages<S>,
    sender: UpdateSender,
    noted: PushGuard,
) -> Result<StagedUpdate>
where
    S: Stream<Item = tonic::Result<Bytes>> + Unpin,
{
    let Some(Kind::Header(header)) = messages.next().await? else {
        return Err(Error::invalid("header", "is missing; it is the first message of an update"));
    };
    let (header, tensors) = convert::header(header)?;
    let mut declared = tensors.len();
    let mut push = PushThread::open(context, header, tensors, sender, noted).await?;
    loop {
        match messages.next().await? {
            Some(Kind::Chunk(chunk)) => push.chunk(chunk).await?,
            Some(Kind::Manifest(manifest)) => {
                let tensors = convert::tensors(manifest.tensors, declared)?;
                declared += tensors.len();
                push.declare(tensors).await?;
            }
            Some(Kind::Commit(pb::Commit {})) => return push.finish().await,
            Some(Kind::Header(_)) => return Err(Error::invalid("header", "comes once, at the start")),
            None => {
                return Err(Error::invalid("commit", "is missing: the stream ended without; nothing is changed"));
            }
        }
    }
}

fn parameters(context: &ServingContext) -> pb::ListParametersResponse {
    let dtype = convert::dtype(context.parameters.dtype());
    let parameter = |spec: &crate::weights::ParamSpec| pb::Parameter {
        name: spec.name.clone(),
        shape: spec.shape.iter().map(|&d| d as u64).collect(),
        dtype: dtype.into(),
    };
    pb::ListParametersResponse { parameters: context.parameters.iter().map(parameter).collect() }
}
