//! The weight transfer engine: a trainer makes a group with the server's ranks and broadcasts its weights to them. The
//! trainer waits in the same broadcasts as the server, so it makes these calls beside them.

use axum::extract::{FromRequest as _, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http_body::Body as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::weights::version_of;
use crate::comm::{RankRange, Rendezvous};
use crate::error::{Error, shown};
use crate::memory::Charge;
use crate::server::http::{AppState, HttpError, HttpResult, Ignored, JsonBody, Peer, Query};
use crate::server::pushes::load_checkpoint;
use crate::server::transfer::{BroadcastTensors, Packing, TransferCommand, dtype};
use crate::weights::TensorEntry;

/// Bytes of a group's id.
const ID_BYTES: usize = 128;

#[derive(Deserialize, ToSchema)]
pub(super) struct Init {
    init_info: InitInfo,
}

/// Where the ranks of a group find one another, and how its trainer will broadcast.
#[derive(Deserialize, ToSchema)]
struct InitInfo {
    /// Where the trainer, rank 0, serves torch's `TCPStore`.
    master_address: Option<String>,
    #[schema(minimum = 1)]
    master_port: Option<u16>,
    /// The group's id instead: its 128 bytes in base64.
    nccl_unique_id_b64: Option<String>,
    /// Rank of the server's first rank in the group.
    #[schema(minimum = 1)]
    rank_offset: usize,
    /// Number of ranks: those of the trainer, and as many as `/get_world_size` answers.
    #[schema(minimum = 2)]
    world_size: usize,
    /// Whether several tensors are broadcast at once, as bytes; false if left out.
    packed: Option<bool>,
    /// A broadcast ends behind the tensor with which it has more bytes than this; 1 GiB if left out.
    packed_buffer_size_bytes: Option<u64>,
}

/// Exactly one of the two.
#[derive(Deserialize, ToSchema)]
pub(super) struct Update {
    update_info: Option<UpdateInfo>,
    /// A directory below `--weights-dir` with a checkpoint, relative to it or absolute, which becomes the policy: the
    /// body of prime-rl. Also a delta store, whose newest version becomes the policy, or one of its versions.
    weight_dir: Option<String>,
}

/// Tensors in the order in which they are broadcast. Without names they are those of the last time.
#[derive(Deserialize, ToSchema)]
struct UpdateInfo {
    #[serde(default)]
    names: Vec<String>,
    /// `float32`, `bfloat16` or `float16`.
    #[serde(default)]
    dtype_names: Vec<String>,
    #[serde(default)]
    shapes: Vec<Vec<usize>>,
    /// As at the group's beginning, if left out.
    packed: Option<bool>,
    packed_buffer_size_bytes: Option<u64>,
}

#[derive(Default, Deserialize, ToSchema)]
pub(super) struct Finish {
    /// The policy's version from now on, a decimal number below 2^64 above the present one; one more if left out.
    #[schema(pattern = "^(0|[1-9][0-9]{0,18})$")]
    weight_version: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Transferred {
    message: &'static str,
    /// `ok`, if the body was prime-rl's.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
}

/// Joins a trainer's group with all ranks, and leaves any other; answers when all ranks of the group have joined.
#[utoipa::path(post, path = "/init_weight_transfer_engine", request_body = Init, responses(
    (status = 200, body = Transferred),
    (status = 408, description = "the trainer did not join within --update-idle-seconds"),
    (status = 409, description = "the group could not be formed"),
    (status = 501, description = "no trainer can broadcast to the server's device"),
))]
pub(super) async fn init_weight_transfer_engine(State(app): State<AppState>, request: Request) -> HttpResult<Response> {
    let JsonBody { value: Init { init_info }, ignored, .. } = body(&app, request).await?;
    let meeting = meeting(&init_info)?;
    let places = RankRange { first: init_info.rank_offset, world: init_info.world_size };
    let packing = Packing { packed: init_info.packed, buffer_bytes: init_info.packed_buffer_size_bytes };
    // Checked before the command, which ends the open push and leaves the current group.
    app.server.context()?.trainers.check(places)?;
    app.transfers.execute(TransferCommand::Join(meeting, places, packing)).await?;
    Ok(done(&ignored, "Weight transfer initialized"))
}

/// Begins a push of every parameter. The serving policy does not change before its end.
#[utoipa::path(post, path = "/start_weight_update", responses(
    (status = 200, body = Transferred),
    (status = 409, description = "no trainer has joined, another push is open, or the server's state does not allow \
        one"),
    (status = 429, description = "no room under the memory ceiling"),
    (status = 501, description = "no trainer can broadcast to the server's device"),
))]
pub(super) async fn start_weight_update(
    State(app): State<AppState>,
    Extension(peer): Extension<Peer>,
    query: Query,
) -> HttpResult<Response> {
    check_device(&app, "/start_weight_update")?;
    app.transfers.execute(TransferCommand::Begin(peer.0)).await?;
    Ok(done(&query.ignored(&[]), "Weight update started"))
}

/// Receives tensors of the push that was begun; answers when the trainer has broadcast all of them. Rejected
/// tensors are received all the same, so that the trainer gets to the end of its broadcasts. If the body of the call is
/// invalid, the server leaves the group.
///
/// With `weight_dir`, as prime-rl calls it: one whole push from a directory, on any device.
#[utoipa::path(post, path = "/update_weights", request_body = Update, responses(
    (status = 200, body = Transferred),
    (status = 400, description = "a tensor does not match the model: the push is dropped. A member of the body is \
        wrong: the group is left as well"),
    (status = 404, description = "no such directory, or no checkpoint in it"),
    (status = 408, description = "the trainer broadcast nothing for --update-idle-seconds; the push is dropped and \
        the group left"),
    (status = 409, description = "no push is open, or the trainer disconnected; with `weight_dir`: another push is \
        open, or the server's state does not allow one"),
    (status = 429, description = "no memory on a device or for the body; the push is dropped and the group left"),
    (status = 501, description = "no trainer can broadcast to the server's device"),
))]
pub(super) async fn update_weights(
    State(app): State<AppState>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> HttpResult<Response> {
    let update_call = app.transfers.update_call();
    let path = request.uri().path().to_owned();
    // The charge covers the announced tensors.
    let read = async {
        let body = JsonBody::<Update>::from_request(request, &app).await;
        if let Ok(JsonBody { value: Update { weight_dir: Some(directory), .. }, .. }) = &body {
            return Ok(Read::Checkpoint(directory.clone()));
        }
        check_device(&app, &path)?;
        let JsonBody { value: Update { update_info, .. }, ignored, charge, .. } = body?;
        let update_info = update_info.ok_or_else(|| Error::invalid("update_info", "is missing"))?;
        Ok::<_, HttpError>(Read::Announced(announced(update_info)?, ignored, charge))
    };
    let (announced, ignored, charge) = match read.await {
        Ok(Read::Announced(announced, ignored, charge)) => (announced, ignored, charge),
        Ok(Read::Checkpoint(directory)) => {
            update_call.release();
            load_checkpoint(&app.server, peer.0, directory).await.map_err(explain)?;
            return Ok(Json(Transferred { message: "Weights updated", status: Some("ok") }).into_response());
        }
        Err(refused) => {
            update_call.abandon(&refused.message).await?;
            return Err(refused);
        }
    };
    update_call.receive(announced).await?;
    drop(charge);
    Ok(done(&ignored, "Weights updated"))
}

/// The body of `/update_weights`.
enum Read {
    Announced(BroadcastTensors, Ignored, Charge),
    Checkpoint(String),
}

/// The error of a push from a directory, with the member of the body.
fn explain(error: Error) -> HttpError {
    match error {
        Error::InvalidArgument { message, .. } => HttpError::invalid("weight_dir", &message),
        error => error.into(),
    }
}

/// Ends the push: all its parameters serve from the next step on, or it is rejected and nothing has changed.
#[utoipa::path(post, path = "/finish_weight_update", request_body = Option<Finish>, responses(
    (status = 200, body = Transferred),
    (status = 400, description = "parameters are missing; the policy is unchanged"),
    (status = 409, description = "no push is open, or the version is not above the policy's"),
    (status = 501, description = "no trainer can broadcast to the server's device"),
))]
pub(super) async fn finish_weight_update(State(app): State<AppState>, request: Request) -> HttpResult<Response> {
    let (Finish { weight_version }, ignored) = if request.body().is_end_stream() {
        check_device(&app, request.uri().path())?;
        Default::default()
    } else {
        let JsonBody { value, ignored, .. } = body(&app, request).await?;
        (value, ignored)
    };
    let version = weight_version.map(|text| version_of("weight_version", &text)).transpose()?;
    app.transfers.execute(TransferCommand::Finish(version)).await?;
    Ok(done(&ignored, "Weight update finished"))
}

/// Leaves the trainer's group, and drops the push that is open.
#[utoipa::path(post, path = "/shutdown_weight_transfer_engine", responses(
    (status = 200, body = Transferred),
    (status = 501, description = "no trainer can broadcast to the server's device"),
))]
pub(super) async fn shutdown_weight_transfer_engine(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    check_device(&app, "/shutdown_weight_transfer_engine")?;
    app.transfers.execute(TransferCommand::Leave).await?;
    Ok(done(&query.ignored(&[]), "Weight transfer shut down"))
}

fn done(ignored: &Ignored, message: &'static str) -> Response {
    ignored.name_in(Json(Transferred { message, status: None }))
}

/// The body, if trainers can broadcast to the device.
async fn body<T: DeserializeOwned + Send + 'static>(app: &AppState, request: Request) -> HttpResult<JsonBody<T>> {
    if let Err(refused) = check_device(app, request.uri().path()) {
        // Receives the body first, so that its connection can be used again.
        Query::from_request(request, app).await?;
        return Err(refused);
    }
    JsonBody::from_request(request, app).await
}

/// Whether trainers can broadcast to the device.
fn check_device(app: &AppState, path: &str) -> HttpResult<()> {
    let context = app.server.context()?;
    if context.trainers.library().is_some() {
        return Ok(());
    }
    let message = format!(
        "{path}: a trainer broadcasts weights from its device to the server's, which is not possible with --device {}. \
         Push tensors over gRPC (Weights.Update; push_lora, push_full and push_delta of rollout_client), or save an \
         adapter below --weights-dir and POST /v1/load_lora_adapter, as TRL's AsyncGRPOTrainer does if the server has \
         --max-adapters",
        context.info.device
    );
    Err(HttpError::new(StatusCode::NOT_IMPLEMENTED, "NotImplementedError", None, &message))
}

fn meeting(info: &InitInfo) -> Result<Rendezvous, Error> {
    match (&info.master_address, info.master_port, &info.nccl_unique_id_b64) {
        (Some(host), Some(port), None) if !host.is_empty() && port > 0 => {
            Ok(Rendezvous::Store { host: host.clone(), port })
        }
        (None, None, Some(text)) => id(text).map(Rendezvous::Id).ok_or_else(|| {
            let message = format!("{:?} is not {ID_BYTES} bytes in base64", shown(text, 200));
            Error::invalid("init_info.nccl_unique_id_b64", message)
        }),
        _ => Err(Error::invalid("init_info", "give master_address and master_port, or nccl_unique_id_b64")),
    }
}

/// The bytes of an id in base64, as RFC 4648 has it.
fn id(text: &str) -> Option<[u8; ID_BYTES]> {
    BASE64_STANDARD.decode(text).ok()?.try_into().ok()
}

fn announced(info: UpdateInfo) -> Result<BroadcastTensors, Error> {
    let UpdateInfo { names, dtype_names, shapes, packed, packed_buffer_size_bytes } = info;
    for (field, count) in [("dtype_names", dtype_names.len()), ("shapes", shapes.len())] {
        if count != names.len() {
            let message = format!("has {count} entries, and names has {}", names.len());
            return Err(Error::invalid(format!("update_info.{field}"), message));
        }
    }
    let tensors = names.into_iter().zip(dtype_names).zip(shapes).map(|((name, dtype_name), shape)| {
        let dtype = dtype(&dtype_name)?;
        Ok(TensorEntry { name, dtype, shape, digest: None, payload: None, offset: 0, allocation: None })
    });
    let packing = Packing { packed, buffer_bytes: packed_buffer_size_bytes };
    Ok(BroadcastTensors { tensors: tensors.collect::<Result<_, Error>>()?, packing })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_python_writes_them() {
        // base64.b64encode(bytes(range(128)))
        let text = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+P0BBQkNERUZHSElKS0xN\
                    Tk9QUVJTVFVWV1hZWltcXV5fYGFiY2RlZmdoaWprbG1ub3BxcnN0dXZ3eHl6e3x9fn8=";
        let expected: Vec<u8> = (0..128).collect();
        assert_eq!(id(text).expect("an id")[..], expected);
        for wrong in [&text[..text.len() - 4], &text.replace('+', "-"), &text.replace('=', "A"), "", "=", "é"] {
            assert!(id(wrong).is_none(), "{wrong}");
        }
        assert!(id(&format!("{text}AAAA")).is_none());
    }
}
