//! Pause, sleep, wake, caches and aborts as in vLLM: with the arguments in the query, and its defaults.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::facts::status;
use crate::engine::{AbortTarget, Command, DrainMode, LifecycleStatus, SleepLevel, WakeTags};
use crate::server::calls::ask;
use crate::server::http::{AppState, HttpError, HttpResult, JsonBody, Query};
use crate::server::security::Caller;
use crate::server::{convert, lifecycle, pb};

/// Modes for running requests. The first is the default, as in vLLM.
const MODES: [(&str, DrainMode); 3] =
    [("abort", DrainMode::Abort), ("wait", DrainMode::Wait), ("keep", DrainMode::Keep)];

/// How long a pause that ends requests waits before it answers, as in vLLM: the last events of their streams are on
/// their way to other connections.
const LAST_EVENTS: Duration = Duration::from_millis(20);

#[derive(Serialize, ToSchema)]
pub(super) struct Done {
    status: &'static str,
}

/// Pauses generation: new requests are held until `/resume`. Returns when running requests have ended or are frozen.
#[utoipa::path(post, path = "/pause", params(
    ("mode" = Option<String>, Query, pattern = "^(abort|wait|keep)$", description = "how to treat running \
        requests: `abort` (the default) ends them with their tokens so far, `wait` lets them finish, `keep` \
        freezes them until `/resume`"),
    ("clear_cache" = Option<bool>, Query, description = "clear the prefix cache (default: true); ignored with `keep`"),
), responses(
    (status = 200, body = Done),
    (status = 400),
    (status = 409, description = "the server is asleep or without weights, or `/resume` cancelled the pause"),
))]
pub(super) async fn pause(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    let (mode, clear) = (query.choice("mode", &MODES)?, query.flag("clear_cache", true)?);
    lifecycle::pause(&app.server, mode).await?;
    if mode != DrainMode::Keep {
        if clear {
            lifecycle::reset_prefix_cache(&app.server).await?;
        }
        tokio::time::sleep(LAST_EVENTS).await;
    }
    Ok(query.ignored(&["mode", "clear_cache"]).name_in(Json(Done { status: "paused" })))
}

/// Resumes generation. Succeeds if the server was not paused.
#[utoipa::path(post, path = "/resume", responses(
    (status = 200, body = Done),
    (status = 409, description = "the server is asleep or without weights"),
))]
pub(super) async fn resume(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    lifecycle::resume(&app.server).await?;
    Ok(query.ignored(&[]).name_in(Json(Done { status: "resumed" })))
}

#[derive(Serialize, ToSchema)]
pub(super) struct Asleep {
    status: &'static str,
    level: u8,
}

/// Releases memory, and returns when the operating system has it. Level 0 only pauses.
#[utoipa::path(post, path = "/sleep", params(
    ("level" = Option<u8>, Query, maximum = 2, description = "0: pause only. 1 (the default): keep the policy. \
        2: drop the policy as well; a push or `/wake_up?reload=true` loads one"),
    ("mode" = Option<String>, Query, pattern = "^(abort|wait|keep)$", description = "how to treat running \
        requests: `abort` (the default), `wait` or `keep`, as for `/pause`"),
), responses(
    (status = 200, body = Asleep),
    (status = 400),
    (status = 409, description = "a push is open, frozen requests cannot end, or the server's state does not \
        allow this level"),
))]
pub(super) async fn sleep(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    const LEVELS: [(&str, u8); 3] = [("1", 1), ("0", 0), ("2", 2)];
    let (level, mode) = (query.choice("level", &LEVELS)?, query.choice("mode", &MODES)?);
    match level {
        0 => lifecycle::pause(&app.server, mode).await?,
        1 => _ = lifecycle::sleep(&app.server, SleepLevel::One, mode).await?,
        _ => _ = lifecycle::sleep(&app.server, SleepLevel::Two, mode).await?,
    }
    Ok(query.ignored(&["level", "mode"]).name_in(Json(Asleep { status: "sleeping", level })))
}

#[derive(Serialize, ToSchema)]
pub(super) struct Awake {
    /// `awake`, or `sleeping` while other tags are still asleep.
    status: &'static str,
    /// The requested tags; null for all.
    tags: Option<Vec<&'static str>>,
}

/// Takes memory back. When every tag is awake, generation resumes, even if the server was only paused.
#[utoipa::path(post, path = "/wake_up", params(
    ("tags" = Option<Vec<String>>, Query, description = "`weights`, `kv_cache`, or vLLM's `scheduling`, which \
        takes no memory; may be repeated (default: all)"),
    ("reload" = Option<bool>, Query, description = "load the checkpoint if there is no policy, as after a sleep \
        at level 2 (default: false). Not in vLLM"),
), responses(
    (status = 200, body = Awake),
    (status = 400),
    (status = 429, description = "no room under the memory ceiling"),
))]
pub(super) async fn wake_up(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    const TAGS: [&str; 3] = ["weights", "kv_cache", "scheduling"];
    let mut named = Vec::new();
    for given in query.all("tags") {
        let Some(tag) = TAGS.into_iter().find(|tag| *tag == given) else {
            let message = "a tag is none of weights, kv_cache and scheduling; leave tags out to wake all";
            return Err(HttpError::invalid("query.tags", message));
        };
        if !named.contains(&tag) {
            named.push(tag);
        }
    }
    let wakes = |tag| named.is_empty() || named.contains(&tag);
    let tags = WakeTags { weights: wakes("weights"), kv_cache: wakes("kv_cache") };
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

#[derive(Serialize, ToSchema)]
pub(super) struct Reset {
    /// False if running requests still hold blocks, which other requests can reuse.
    success: bool,
}

/// Clears the prefix cache, except for blocks that running requests hold. Not needed after a push: prefixes of an old
/// policy are never reused.
#[utoipa::path(post, path = "/reset_prefix_cache", responses((status = 200, body = Reset)))]
pub(super) async fn reset_prefix_cache(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    lifecycle::reset_prefix_cache(&app.server).await?;
    let stats = status(&app).await?.stats;
    Ok(query.ignored(&[]).name_in(Json(Reset { success: stats.free_blocks == stats.total_blocks })))
}

/// Drops the pictures that requests over gRPC may name by their hashes.
#[utoipa::path(post, path = "/reset_mm_cache", responses((status = 200, description = "the pictures are dropped")))]
pub(super) async fn reset_mm_cache(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    lifecycle::reset_picture_cache(&app.server)?;
    Ok(query.ignored(&[]).name_in(()))
}

/// Drops the embeddings of all images. Not needed after a push, which drops them too.
#[utoipa::path(post, path = "/reset_encoder_cache", responses(
    (status = 200, description = "images of later requests, and of running ones that need them, are encoded again"),
))]
pub(super) async fn reset_encoder_cache(State(app): State<AppState>, query: Query) -> HttpResult<Response> {
    lifecycle::reset_encoder_cache(&app.server).await?;
    Ok(query.ignored(&[]).name_in(()))
}

#[derive(Deserialize, ToSchema)]
pub(super) struct Abort {
    /// Ids from the requests or from their answers. Empty or absent: all.
    request_ids: Option<Vec<String>>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Aborted {
    status: &'static str,
    aborted: usize,
}

/// Aborts requests, which return their tokens so far: all of the caller's, or the named ones. With the role `control`,
/// requests of other callers too. Unknown ids are ignored.
#[utoipa::path(post, path = "/abort_requests", request_body = Abort, responses((status = 200, body = Aborted)))]
pub(super) async fn abort_requests(State(app): State<AppState>, body: JsonBody<Abort>) -> HttpResult<Response> {
    let aborted = abort(&app, body.caller, body.value.request_ids.unwrap_or_default()).await?;
    Ok(body.ignored.name_in(Json(Aborted { status: "aborted", aborted })))
}

#[derive(Deserialize, ToSchema)]
pub(super) struct AbortById {
    /// Ids from the requests or from their answers.
    request_ids: Vec<String>,
}

/// Aborts the named requests, which return their tokens so far. Unknown ids are ignored.
#[utoipa::path(post, path = "/inference/v1/abort_requests", request_body = AbortById, responses(
    (status = 200, description = "the requests have ended"),
))]
pub(super) async fn abort_requests_by_id(
    State(app): State<AppState>,
    body: JsonBody<AbortById>,
) -> HttpResult<Response> {
    let ids = body.value.request_ids;
    if !ids.is_empty() {
        abort(&app, body.caller, ids).await?;
    }
    Ok(body.ignored.name_in(()))
}

/// Prefixes of the ids in answers, before the request's own id.
const PREFIXES: [&str; 3] = ["cmpl-", "chatcmpl-", "generate-tokens-"];

/// Aborts the requests named by `ids`, or all if there are none, as far as the caller may. An id is the request's own,
/// or the one in its answer. Returns how many have ended.
async fn abort(app: &AppState, caller: Caller, ids: Vec<String>) -> HttpResult<usize> {
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
