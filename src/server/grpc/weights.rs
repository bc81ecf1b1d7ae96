//! Weights: Update, ListParameters, Checksum, ListAdapters, RemoveAdapter.

use std::time::Instant;

use tonic::{Request, Response, Streaming};

use super::ask;
use super::deadline::Deadline;
use super::staging::Staging;
use super::stream::CancelOnDrop;
use crate::engine::Command;
use crate::error::{Error, Result};
use crate::server::convert::{self, to_status};
use crate::server::gate::Gate;
use crate::server::parts::Parts;
use crate::server::pb::{self, update_request::Kind};

/// Largest chunk of a tensor, in bytes: one message of it and its copy in the transport stay small.
const MAX_CHUNK_BYTES: usize = 4 << 20;
/// Largest message of an update's stream: a chunk, or a header with the manifest of a model of 50,000 tensors.
pub(super) const MAX_UPDATE_MESSAGE_BYTES: usize = 8 << 20;

pub(super) struct WeightsService {
    gate: Gate,
}

impl WeightsService {
    pub(super) fn new(gate: Gate) -> Self {
        Self { gate }
    }

    /// One transaction, from the header to the engine's answer to the commit. Dropping this future cancels it.
    async fn receive(&self, mut stream: Streaming<pb::UpdateRequest>) -> Result<pb::UpdateResponse> {
        let started = Instant::now();
        let (parts, _running) = self.gate.admit()?;
        let Some(Kind::Header(header)) = next(&mut stream).await? else {
            return Err(Error::invalid("header", "is missing; it is the first message of an update"));
        };
        let header = convert::header(header)?;
        let cancel = CancelOnDrop::new(&parts.engine);
        let mut staging = Staging::open(&parts, header, cancel.flag.clone()).await?;
        let mut declared = staging.declared();
        loop {
            match next(&mut stream).await? {
                Some(Kind::Chunk(chunk)) if chunk.data.len() > MAX_CHUNK_BYTES => {
                    let message = format!("{} bytes; a chunk has at most {MAX_CHUNK_BYTES}", chunk.data.len());
                    return Err(Error::invalid("chunk.data", message));
                }
                Some(Kind::Chunk(chunk)) => staging.chunk(chunk).await?,
                Some(Kind::Manifest(manifest)) => {
                    let tensors = convert::tensors(manifest.tensors, declared)?;
                    declared += tensors.len();
                    staging.declare(tensors).await?;
                }
                Some(Kind::Commit(pb::Commit {})) => break,
                Some(Kind::Header(_)) => return Err(Error::invalid("header", "comes once, at the start")),
                None => {
                    return Err(Error::invalid("commit", "is missing: the stream ended without; nothing is changed"));
                }
            }
        }
        let staged = staging.finish().await?;
        let took = started.elapsed();
        let (update, content, facts) = (staged.update, staged.content, staged.facts);
        let commit = |reply| Command::CommitUpdate { update, content, reply };
        let mut reply = super::ask_patiently(&parts.engine, commit).await??;
        if let Some(replaced) = reply.replaced.take() {
            // Gives the memory of what served back before the client hears that the push is over.
            let _ = tokio::task::spawn_blocking(move || drop(replaced)).await;
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

    async fn checksums(&self, names: Vec<String>) -> Result<pb::ChecksumResponse> {
        let parts = self.gate.look()?;
        let reply = ask(&parts.engine, |reply| Command::Checksum { names, reply }).await??;
        let checksum = |(name, sha256): (String, [u8; 32])| pb::ParameterChecksum { name, sha256: sha256.to_vec() };
        let parameters = reply.parameters.into_iter().map(checksum).collect();
        Ok(pb::ChecksumResponse { weight_version: reply.weight_version, parameters })
    }

    async fn adapters(&self) -> Result<pb::ListAdaptersResponse> {
        let parts = self.gate.look()?;
        let adapters = ask(&parts.engine, |reply| Command::ListAdapters { reply }).await?;
        Ok(convert::adapters(adapters, &parts.info))
    }

    async fn remove(&self, request: pb::RemoveAdapterRequest) -> Result<pb::RemoveAdapterResponse> {
        let (parts, _running) = self.gate.admit()?;
        let cancel = CancelOnDrop::new(&parts.engine);
        let (name, expected_generation, flag) = (request.name, request.expected_generation, cancel.flag.clone());
        let remove = |reply| Command::RemoveAdapter { name, expected_generation, cancel: flag, reply };
        let generation = ask(&parts.engine, remove).await??;
        Ok(pb::RemoveAdapterResponse { generation })
    }
}

#[tonic::async_trait]
impl pb::weights_server::Weights for WeightsService {
    async fn update(
        &self,
        request: Request<Streaming<pb::UpdateRequest>>,
    ) -> tonic::Result<Response<pb::UpdateResponse>> {
        let deadline = Deadline::of(&request);
        deadline.limit(self.receive(request.into_inner())).await.map(Response::new)
    }

    async fn list_parameters(
        &self,
        _: Request<pb::ListParametersRequest>,
    ) -> tonic::Result<Response<pb::ListParametersResponse>> {
        self.gate.look().map(|parts| Response::new(parameters(&parts))).map_err(to_status)
    }

    async fn checksum(&self, request: Request<pb::ChecksumRequest>) -> tonic::Result<Response<pb::ChecksumResponse>> {
        let deadline = Deadline::of(&request);
        deadline.limit(self.checksums(request.into_inner().names)).await.map(Response::new)
    }

    async fn list_adapters(
        &self,
        request: Request<pb::ListAdaptersRequest>,
    ) -> tonic::Result<Response<pb::ListAdaptersResponse>> {
        Deadline::of(&request).limit(self.adapters()).await.map(Response::new)
    }

    async fn remove_adapter(
        &self,
        request: Request<pb::RemoveAdapterRequest>,
    ) -> tonic::Result<Response<pb::RemoveAdapterResponse>> {
        let deadline = Deadline::of(&request);
        deadline.limit(self.remove(request.into_inner())).await.map(Response::new)
    }
}

/// The next message of an update; None at the end of the stream.
async fn next(stream: &mut Streaming<pb::UpdateRequest>) -> Result<Option<Kind>> {
    let message = stream.message().await.map_err(|status| match status.code() {
        // The decoder's word for a message that is too long.
        tonic::Code::OutOfRange => Error::invalid("message", status.message()),
        _ => Error::Unavailable(format!("the stream broke: {}", status.message())),
    })?;
    let Some(message) = message else { return Ok(None) };
    let empty = || Error::invalid("kind", "is empty; send a header, manifests and chunks, and a commit");
    message.kind.ok_or_else(empty).map(Some)
}

fn parameters(parts: &Parts) -> pb::ListParametersResponse {
    let dtype = convert::dtype(parts.parameters.dtype());
    let parameter = |spec: &crate::weights::ParamSpec| pb::Parameter {
        name: spec.name.clone(),
        shape: spec.shape.iter().map(|&d| d as u64).collect(),
        dtype: dtype.into(),
    };
    pb::ListParametersResponse { parameters: parts.parameters.iter().map(parameter).collect() }
}
