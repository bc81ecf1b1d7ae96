//! The service Weights: Update, CancelUpdate, ListParameters, Checksum, ListAdapters, RemoveAdapter.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::deadline::{answer, deadline_of};
use super::messages::Messages;
use super::push_thread::{PushThread, Sender, VerifiedPush};
use super::status::to_status;
use crate::engine::{Activity, Command};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::server::calls::{CancelOnDrop, ask, ask_patiently, reply_channel};
use crate::server::context::ServingContext;
use crate::server::convert;
use crate::server::gate::Gate;
use crate::server::pb::{self, update_request::Kind};

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

    /// One transaction, from the header to the engine's answer to the commit. Dropping this future cancels it. Until
    /// the engine has the commit, the end of the server and CancelUpdate end it too.
    async fn receive<S>(&self, messages: Messages<S>, peer: String) -> Result<pb::UpdateResponse>
    where
        S: Stream<Item = tonic::Result<Bytes>> + Unpin,
    {
        let started = Instant::now();
        let (context, _running) = self.gate.admit()?;
        let (ended, mut cancelled) = reply_channel();
        let cancel = CancelOnDrop::new(&context.engine);
        let activity = Activity::start();
        let messages = messages.with_patience(activity.clone(), context.update_idle);
        let sender = Sender { peer, activity, cancel: cancel.flag.clone(), ended };
        let verified = tokio::select! {
            verified = receive_push(&context, messages, sender) => verified?,
            Ok(error) = &mut cancelled => return Err(error),
            () = self.gate.ending() => return Err(Error::Unavailable("the server is shutting down".into())),
        };
        let took = started.elapsed();
        let (update, content, facts) = (verified.update, verified.content, verified.facts);
        let commit = |reply| Command::CommitUpdate { update, content, reply };
        let reply = match ask_patiently(&context.engine, commit).await? {
            // CancelUpdate came just before the commit.
            Err(error) => return Err(cancelled.try_recv().unwrap_or(error)),
            Ok(reply) => reply,
        };
        if reply.pending {
            // A sleeping server keeps no memory, so it does not keep the trainer's segment mapped either.
            context.sources.segments().release();
        }
        tracing::info!(
            version = reply.weight_version,
            staging_ms = took.as_millis() as u64,
            pause_ms = reply.pause.as_millis() as u64,
            pending = reply.pending,
            "weights updated"
        );
        Ok(convert::update_reply(reply, &facts, took))
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
    sender: Sender,
) -> Result<VerifiedPush>
where
    S: Stream<Item = tonic::Result<Bytes>> + Unpin,
{
    let Some(Kind::Header(header)) = messages.next().await? else {
        return Err(Error::invalid("header", "is missing; it is the first message of an update"));
    };
    let mut push = PushThread::open(context, convert::header(header)?, sender).await?;
    let mut declared = push.declared();
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
