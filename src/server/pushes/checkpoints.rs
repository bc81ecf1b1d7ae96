//! Checkpoints from directories, which become the policy by the same transaction as a push over gRPC.

use std::sync::Arc;

use super::{PushThread, transact};
use crate::engine::UpdateSender;
use crate::error::Result;
use crate::server::convert;
use crate::server::pb;
use crate::server::state::{ServerState, ServingContext};

/// Makes the checkpoint in `directory`, below the server's `--weights-dir`, the policy. Running requests keep their KV.
///
/// # Errors
/// Those of a push.
pub(in crate::server) async fn load_checkpoint(
    server: &ServerState,
    peer: String,
    directory: String,
) -> Result<pb::UpdateResponse> {
    let header = pb::Header {
        kind: pb::UpdateKind::Full.into(),
        source: Some(pb::Source { kind: Some(pb::source::Kind::Directory(pb::Directory { path: directory })) }),
        ..pb::Header::default()
    };
    let (header, tensors) = convert::header(header)?;
    let push = async move |context: Arc<ServingContext>, sender: UpdateSender, noted| {
        PushThread::open(&context, header, tensors, sender, noted).await?.finish().await
    };
    transact(server, peer, push).await
}
