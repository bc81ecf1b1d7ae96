//! Pause, sleep, wake, caches and aborts as in vLLM: with the arguments in the query, and its defaults.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::engine::{AbortTarget, Command, DrainMode, LifecycleStatus, SleepLevel, WakeTags};
use crate::server::calls::ask;
use crate::server::http::{AppState, ErrorBody, HttpError, JsonBody, Query};
use crate::server::security::Caller;
use crate::server::{convert, lifecycle, pb};

/// The fate of running requests; the first is the default, as in vLLM.
const MODES: [(&str, DrainMode); 3] =
    [("abort", DrainMode::Abort), ("wait", DrainMode::Wait), ("keep", DrainMode::Keep)];

/// The command was executed.
#[derive(Serialize, ToSchema)]
pub(super) struct Done {
    status: &'static str,
}

/// Pauses: no step runs, and requests wait until `/resume`. Answered when the running requests have ended, or are
/// frozen.
#[utoipa::path(post, path = "/pause",
    params(
        ("mode" = Option<String>, Query, pattern = "^(abort|wait|keep)$", description = "what happens to running requests: `abort` (the default) ends \
            them with their tokens so far, `wait` lets them finish, `keep` freezes them until `/resume`"),
        ("clear_cache" = Option<bool>, Query, description = "forget cached prefixes, except with `keep`; true"),
    ),
    responses(
        (status = 200, body = Done),
        (status = 400, body = ErrorBody),
        (status = 409, description = "asleep, without weights, or called off by `/resume`", body = ErrorBody),
    ),
)]
pub(super) async fn pause(State(app): State<AppState>, query: Query) -> Result<Response, HttpError> {
    let (mode, clear) = (query.choice("mode", &MODES)?, query.flag("clear_cache", true)?);
    lifecycle::pause(&app.server, mode).await?;
    if clear && mode != DrainMode::Keep {
        lifecycle::reset_prefix_cache(&app.server).await?;
    }
    Ok(query.ignored(&["mode", "clear_cache"]).name_in(Json(Done { status: "paused" })))
}

/// Steps again after a pause. No error if nothing was paused.
#[utoipa::path(post, path = "/resume", responses(
    (status = 200, body = Done),
    (status = 409, description = "asleep, or without weights", body = ErrorBody),
))]
pub(super) async fn resume(State(app): State<AppState>, query: Query) -> Result<Response, HttpError> {
    lifecycle::resume(&app.server).await?;
    Ok(query.ignored(&[]).name_in(Json(Done { status: "resumed" })))
}

/// A sleep that has given its memory back.
#[derive(Serialize, ToSchema)]
pub(super) struct Asleep {
    status: &'static str,
    level: u8,
}

/// Gives memory back, and answers when the operating system has it. Level 0 only pauses.
#[utoipa::path(post, path = "/sleep",
    params(
        ("level" = Option<u8>, Query, maximum = 2, description = "0: a pause. 1, the default: the policy is kept. 2: the policy \
            goes too, and a push or `/wake_up?reload=true` brings one"),
        ("mode" = Option<String>, Query, pattern = "^(abort|wait|keep)$", description = "what happens to running requests: `abort` (the default), \
            `wait` or `keep`, as for `/pause`"),
    ),
    responses(
        (status = 200, body = Asleep),
        (status = 400, body = ErrorBody),
        (status = 409, description = "a push is open, or the state forbids it", body = ErrorBody),
    ),
)]
pub(super) async fn sleep(State(app): State<AppState>, query: Query) -> Result<Response, HttpError> {
    const LEVELS: [(&str, u8); 3] = [("1", 1), ("0", 0), ("2", 2)];
    let (level, mode) = (query.choice("level", &LEVELS)?, query.choice("mode", &MODES)?);
    match level {
        0 => lifecycle::pause(&app.server, mode).await?,
        1 => _ = lifecycle::sleep(&app.server, SleepLevel::One, mode).await?,
        _ => _ = lifecycle::sleep(&app.server, SleepLevel::Two, mode).await?,
    }
    Ok(query.ignored(&["level", "mode"]).name_in(Json(Asleep { status: "sleeping", level })))
}

/// The parts that are awake now.
#[derive(Serialize, ToSchema)]
pub(super) struct Awake {
    /// `awake`, or `sleeping` while some memory is still given back.
    status: &'static str,
    /// The requested tags; null for all.
    tags: Option<Vec<&'static str>>,
}

/// Takes memory back. When all is awake the server runs, also if it was only paused.
#[utoipa::path(post, path = "/wake_up",
    params(
        ("tags" = Option<Vec<String>>, Query, description = "`weights`, `kv_cache`, and vLLM's `scheduling`, which \
            takes no memory; may be repeated. All without any"),
        ("reload" = Option<bool>, Query, description = "read the checkpoint where there is no policy, as after level \
            2; false. Not vLLM's"),
    ),
    responses(
        (status = 200, body = Awake),
        (status = 400, body = ErrorBody),
        (status = 429, description = "no room under the memory ceiling", body = ErrorBody),
    ),
)]
pub(super) async fn wake_up(State(app): State<AppState>, query: Query) -> Result<Response, HttpError> {
    const TAGS: [(&str, WakeTags); 3] = [
        ("weights", WakeTags { weights: true, kv_cache: false }),
        ("kv_cache", WakeTags { weights: false, kv_cache: true }),
        ("scheduling", WakeTags { weights: false, kv_cache: false }),
    ];
    let mut named = Vec::new();
    let mut tags = WakeTags { weights: false, kv_cache: false };
    for given in query.all("tags") {
        let Some((name, tag)) = TAGS.iter().find(|(name, _)| *name == given) else {
            let message = "a tag is none of weights, kv_cache and scheduling; leave tags out to wake all";
            return Err(HttpError::invalid("query.tags", message));
        };
        if !named.contains(name) {
            named.push(*name);
        }
        tags = WakeTags { weights: tags.weights || tag.weights, kv_cache: tags.kv_cache || tag.kv_cache };
    }
    if named.is_empty() {
        tags = WakeTags { weights: true, kv_cache: true };
    }
    let reload = query.flag("reload", false)?;
    if reload && !tags.weights {
        return Err(HttpError::invalid("query.reload", "reads the weights again; name weights among the tags"));
    }
    let status = lifecycle::wake(&app.server, tags, reload).await?;
    if status == LifecycleStatus::Paused {
        lifecycle::resume(&app.server).await?;
    }
    let status = if matches!(status, LifecycleStatus::Asleep { .. }) { "sleeping" } else { "awake" };
    let awake = Awake { status, tags: (!named.is_empty()).then_some(named) };
    Ok(query.ignored(&["tags", "reload"]).name_in(Json(awake)))
}

/// Whether a cache is empty now.
#[derive(Serialize, ToSchema)]
pub(super) struct Reset {
    /// False if running requests hold blocks, which other requests may still find.
    success: bool,
}

/// Forgets cached prefixes, except what running requests hold. Not needed after a push: the prefixes of an old policy
/// are never found again.
#[utoipa::path(post, path = "/reset_prefix_cache", responses((status = 200, body = Reset)))]
pub(super) async fn reset_prefix_cache(State(app): State<AppState>, query: Query) -> Result<Response, HttpError> {
    lifecycle::reset_prefix_cache(&app.server).await?;
    let context = app.server.context()?;
    let stats = ask(&context.engine, |reply| Command::Status { reply }).await?.stats;
    Ok(query.ignored(&[]).name_in(Json(Reset { success: stats.free_blocks == stats.total_blocks })))
}

/// Succeeds, because there is no such cache here.
#[utoipa::path(post, path = "/reset_mm_cache", responses((status = 200, description = "there is no such cache")))]
pub(super) async fn reset_mm_cache(query: Query) -> Response {
    query.ignored(&[]).name_in(())
}

/// Succeeds, because there is no such cache here.
#[utoipa::path(post, path = "/reset_encoder_cache", responses((status = 200, description = "there is no such cache")))]
pub(super) async fn reset_encoder_cache(query: Query) -> Response {
    query.ignored(&[]).name_in(())
}

/// The requests to abort.
#[derive(Deserialize, ToSchema)]
pub(super) struct Abort {
    /// Ids as they were given, or as the answers have them. Empty or absent: all.
    #[serde(default)]
    request_ids: Option<Vec<String>>,
}

/// How many requests have been ended.
#[derive(Serialize, ToSchema)]
pub(super) struct Aborted {
    status: &'static str,
    aborted: usize,
}

/// Ends requests, which keep the tokens that they have: all of the caller's, or those named (with the role `control`
/// others' too). Ids that are not there are no error.
#[utoipa::path(post, path = "/abort_requests", request_body = Abort, responses(
    (status = 200, body = Aborted),
    (status = 400, body = ErrorBody),
))]
pub(super) async fn abort_requests(State(app): State<AppState>, body: JsonBody<Abort>) -> Result<Response, HttpError> {
    let aborted = abort(&app, body.caller, body.value.request_ids.unwrap_or_default()).await?;
    Ok(body.ignored.name_in(Json(Aborted { status: "aborted", aborted })))
}

/// The requests to abort.
#[derive(Deserialize, ToSchema)]
pub(super) struct AbortById {
    /// Ids as they were given, or as the answers have them.
    request_ids: Vec<String>,
}

/// Ends the named requests, which keep the tokens that they have. Ids that are not there are no error.
#[utoipa::path(post, path = "/inference/v1/abort_requests", request_body = AbortById, responses(
    (status = 200, description = "they have ended"),
    (status = 400, body = ErrorBody),
))]
pub(super) async fn abort_requests_by_id(
    State(app): State<AppState>,
    body: JsonBody<AbortById>,
) -> Result<Response, HttpError> {
    let ids = body.value.request_ids;
    if !ids.is_empty() {
        abort(&app, body.caller, ids).await?;
    }
    Ok(body.ignored.name_in(().into_response()))
}

/// Prefixes of the ids in answers, before the request's own id.
const PREFIXES: [&str; 3] = ["cmpl-", "chatcmpl-", "generate-tokens-"];

/// Aborts the requests named by `ids`, or all if there are none, as far as the caller may. An id is the
/// request's own, or the one in its answer. Returns how many have ended.
async fn abort(app: &AppState, caller: Caller, ids: Vec<String>) -> Result<usize, HttpError> {
    let context = app.server.context()?;
    let (engine, owner) = (&context.engine, caller.limited_to);
    let target = convert::abort(pb::AbortRequest { all: ids.is_empty(), request_ids: ids })?;
    let reply = ask(engine, |reply| Command::Abort { target, owner, reply }).await?;
    let own = |id: &String| PREFIXES.iter().find_map(|prefix| id.strip_prefix(prefix)).map(String::from);
    let answered: Vec<_> = reply.unknown.iter().filter_map(own).collect();
    let mut aborted = reply.aborted.len();
    if !answered.is_empty() {
        let target = AbortTarget::Requests(answered);
        aborted += ask(engine, |reply| Command::Abort { target, owner, reply }).await?.aborted.len();
    }
    Ok(aborted)
}
