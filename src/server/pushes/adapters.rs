//! Adapters from directories, which become resident by the same transaction as a push over gRPC.

use std::path::absolute;
use std::sync::Arc;

use super::{PushThread, transact};
use crate::config::LoraModule;
use crate::engine::UpdateSender;
use crate::error::{Error, Result};
use crate::server::convert;
use crate::server::pb;
use crate::server::state::{ServerState, ServingContext, Stage};
use crate::types::Tenant;
use crate::weights::{Sources, UpdateHeader};

/// Makes the adapter in `directory`, below the server's `--weights-dir`, resident as `name`. If no slot is free, it
/// takes that of the least recently used adapter that no request uses.
///
/// # Errors
/// `VersionConflict` if the name is taken, unless it `replaces` that adapter; those of a push.
pub(in crate::server) async fn load_adapter(
    server: &ServerState,
    (peer, tenant): (String, Tenant),
    name: &str,
    directory: &str,
    replaces: bool,
) -> Result<pb::UpdateResponse> {
    let directory = pb::Directory { path: directory.into() };
    let header = pb::Header {
        kind: pb::UpdateKind::Lora.into(),
        adapter: name.into(),
        expected_generation: (!replaces).then_some(0),
        evict_adapter: true,
        source: Some(pb::Source { kind: Some(pb::source::Kind::Directory(directory)) }),
        ..pb::Header::default()
    };
    let (header, tensors) = convert::header(header)?;
    let header = UpdateHeader { tenant, ..header };
    let push = async move |context: Arc<ServingContext>, sender: UpdateSender, noted| {
        PushThread::open(&context, header, tensors, sender, noted).await?.finish().await
    };
    transact(server, peer, push).await
}

/// Loads the adapters of `--lora-modules`, before `server` admits its first call.
///
/// # Errors
/// `Config` with the module and the reason.
pub(in crate::server) async fn load_modules(
    server: &ServerState,
    context: &ServingContext,
    modules: &[LoraModule],
) -> Result<()> {
    for LoraModule { name, path } in modules {
        let failed =
            |why: &dyn std::fmt::Display| Error::Config(format!("--lora-modules {name}={}: {why}", path.display()));
        if context.model.is_policy(name) {
            return Err(failed(&"the model itself has this name; choose another"));
        }
        let path = absolute(path).map_err(|error| failed(&error))?;
        if !path.is_dir() {
            return Err(failed(&"there is no such directory"));
        }
        // The operator may name any directory, also one outside --weights-dir.
        let sources = Arc::new(Sources::new(Some(path.clone())).with_traffic(context.traffic.clone()));
        let (setter, loading) = ServerState::new(server.observer.clone());
        setter.set(Stage::Serving(Arc::new(ServingContext { sources, ..context.clone() })));
        let operator = ("--lora-modules".into(), Tenant::default());
        load_adapter(&loading, operator, name, &path.to_string_lossy(), false).await.map_err(|error| match error {
            Error::NotFound(_) => failed(&"the directory needs adapter_config.json and adapter_model.safetensors"),
            Error::VersionConflict(_) => failed(&"another module has this name"),
            Error::InvalidArgument { message, .. } => failed(&message),
            error => failed(&error),
        })?;
    }
    Ok(())
}
