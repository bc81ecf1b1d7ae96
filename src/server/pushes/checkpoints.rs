//! Checkpoints from directories, which become the policy by the same transaction as a push over gRPC.

use std::sync::Arc;

use tokio::task::spawn_blocking;

use super::{PushThread, transact};
use crate::engine::UpdateSender;
use crate::error::{Error, Result};
use crate::server::convert;
use crate::server::pb;
use crate::server::state::{ServerState, ServingContext};

/// Makes the checkpoint in `directory`, below the server's `--weights-dir`, the policy. A delta store gives its newest
/// version, and a version of a store itself. Running requests keep their KV.
///
/// # Errors
/// Those of a push.
pub(in crate::server) async fn load_checkpoint(
    server: &ServerState,
    peer: String,
    directory: String,
) -> Result<pb::UpdateResponse> {
    let sources = server.context()?.sources.clone();
    let path = directory.clone();
    let stored = spawn_blocking(move || sources.stored_version(&path)).await;
    let stored = stored.map_err(|e| Error::Internal(format!("looking for a delta store failed: {e}")))??;
    let (kind, path, new_version) = match stored {
        Some((store, version)) => (pb::UpdateKind::Delta, store, Some(version)),
        None => (pb::UpdateKind::Full, directory, None),
    };
    let header = pb::Header {
        kind: kind.into(),
        new_version,
        source: Some(pb::Source { kind: Some(pb::source::Kind::Directory(pb::Directory { path })) }),
        ..pb::Header::default()
    };
    let (header, tensors) = convert::header(header)?;
    let push = async move |context: Arc<ServingContext>, sender: UpdateSender, noted| {
        PushThread::open(&context, header, tensors, sender, noted).await?.finish().await
    };
    transact(server, peer, push).await
}
