//! The service Weights: Update, CancelUpdate, ListParameters, Checksum, ListAdapters, RemoveAdapter.

use tokio::sync::Semaphore;
use tonic::{Request, Response, Status, Streaming};

use super::middleware::{Answer, answer, deadline_of};
use super::status::to_status;
use super::update_stream;
use crate::engine::Command;
use crate::server::calls::{ask, ask_cancellable};
use crate::server::{ServerState, ServingContext, convert, pb};

/// Most updates that are received at once. The engine rejects all but one when their headers are here; until then each
/// may hold a message, and the bytes that its stream's window lets through.
pub(super) const MAX_UPDATES: usize = 8;

pub(super) struct WeightsService {
    server: ServerState,
    /// A permit for each update that is received.
    updates: Semaphore,
}

impl WeightsService {
    pub(super) fn new(server: ServerState) -> Self {
        Self { server, updates: Semaphore::new(MAX_UPDATES) }
    }
}

#[tonic::async_trait]
impl pb::weights_server::Weights for WeightsService {
    async fn update(&self, request: Request<Streaming<pb::UpdateRequest>>) -> Answer<pb::UpdateResponse> {
        let Ok(_permit) = self.updates.try_acquire() else {
            let message =
                format!("{MAX_UPDATES} updates are being received already; one is applied at a time, so wait");
            return Err(Status::resource_exhausted(message));
        };
        update_stream::receive(&self.server, request).await
    }

    async fn list_parameters(&self, _: Request<pb::ListParametersRequest>) -> Answer<pb::ListParametersResponse> {
        self.server.context().map(|context| Response::new(parameters(&context))).map_err(to_status)
    }

    async fn checksum(&self, request: Request<pb::ChecksumRequest>) -> Answer<pb::ChecksumResponse> {
        let deadline = deadline_of(&request);
        let checksums = async {
            let context = self.server.context()?;
            let names = convert::parameter_names(request.into_inner().names)?;
            let checksum = |cancel, reply| Command::Checksum { names, cancel, reply };
            let reply = ask_cancellable(&context.engine, checksum).await??;
            let checksum = |(name, sha256): (String, [u8; 32])| pb::ParameterChecksum { name, sha256: sha256.to_vec() };
            let parameters = reply.parameters.into_iter().map(checksum).collect();
            Ok(pb::ChecksumResponse { weight_version: reply.weight_version, parameters })
        };
        answer(deadline, checksums).await
    }

    async fn cancel_update(&self, request: Request<pb::CancelUpdateRequest>) -> Answer<pb::CancelUpdateResponse> {
        let cancel = async {
            let (context, update) = (self.server.context()?, request.get_ref().id);
            let ended = ask(&context.engine, |reply| Command::CancelUpdate { update, reply }).await?;
            if let Some(update) = &ended {
                tracing::info!(update = update.id, peer = update.peer, "an update was ended by CancelUpdate");
            }
            Ok(pb::CancelUpdateResponse { update: ended.as_ref().map(convert::open_update) })
        };
        answer(deadline_of(&request), cancel).await
    }

    async fn list_adapters(&self, request: Request<pb::ListAdaptersRequest>) -> Answer<pb::ListAdaptersResponse> {
        let adapters = async {
            let context = self.server.context()?;
            let adapters = ask(&context.engine, |reply| Command::ListAdapters { reply }).await?;
            Ok(convert::adapters(adapters, &context.info))
        };
        answer(deadline_of(&request), adapters).await
    }

    async fn remove_adapter(&self, request: Request<pb::RemoveAdapterRequest>) -> Answer<pb::RemoveAdapterResponse> {
        let deadline = deadline_of(&request);
        let remove = async {
            let (context, _in_flight) = self.server.admit()?;
            let pb::RemoveAdapterRequest { name, expected_generation } = request.into_inner();
            let name = convert::adapter_name(name)?;
            let remove = |cancel, reply| Command::RemoveAdapter { name, expected_generation, cancel, reply };
            let generation = ask_cancellable(&context.engine, remove).await??;
            Ok(pb::RemoveAdapterResponse { generation })
        };
        answer(deadline, remove).await
    }
}

fn parameters(context: &ServingContext) -> pb::ListParametersResponse {
    let parameter = |spec: &crate::weights::ParamSpec| pb::Parameter {
        name: spec.name.clone(),
        shape: spec.shape.iter().map(|&d| d as u64).collect(),
        dtype: convert::dtype(spec.dtype(context.parameters.dtype())).into(),
    };
    pb::ListParametersResponse { parameters: context.parameters.iter().map(parameter).collect() }
}
