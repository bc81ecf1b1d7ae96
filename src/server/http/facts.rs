//! Facts about the server: liveness, version, metrics and the timeline. Metrics and the timeline do not ask the
//! engine, so they are answered while it computes, sleeps or loads.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{AppState, HttpResult};
use crate::error::Error;
use crate::memory::{open_files_limit, resident_bytes};
use crate::observe::{ServedFacts, ServerFacts};
use crate::server::{convert, pb};

/// Content type of Prometheus' text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Liveness: 200 with an empty body once the model is loaded, 503 before.
#[utoipa::path(get, path = "/health", responses((status = 200, description = "the server is ready"), (status = 503)))]
pub(super) async fn health(State(app): State<AppState>) -> HttpResult<StatusCode> {
    app.server.admit()?;
    Ok(StatusCode::OK)
}

/// Same as `/health`, under the name that some orchestrators use.
#[utoipa::path(get, path = "/ping", responses((status = 200, description = "the server is ready"), (status = 503)))]
pub(super) async fn ping(app: State<AppState>) -> HttpResult<StatusCode> {
    health(app).await
}

#[derive(Serialize, ToSchema)]
pub(super) struct Version {
    version: &'static str,
}

/// The server's version.
#[utoipa::path(get, path = "/version", responses((status = 200, body = Version)))]
pub(super) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, description = "all metrics in Prometheus' text format", content_type = "text/plain", body = String),
))]
pub(super) async fn metrics(State(AppState { server, .. }): State<AppState>) -> Response {
    let observer = &server.observer;
    let context = server.context().ok();
    let served = context.as_ref().map(|context| {
        let info = &context.info;
        ServedFacts {
            info: vec![
                ("model", info.model.clone()),
                ("architecture", info.architecture.clone()),
                ("dtype", info.dtype.clone()),
                ("device", info.device.clone()),
                ("kernel", info.kernel.clone()),
                ("tensor_parallel_size", info.tensor_parallel_size.to_string()),
            ],
            model_name: info.model.clone(),
            dtype: info.dtype.clone(),
            block_size: info.block_size.into(),
            max_model_len: context.model.max_model_len as u64,
        }
    });
    let text = observer.metrics.render(
        &observer.timeline,
        &observer.metric_names,
        &ServerFacts {
            served,
            panics: server.panics.count(),
            log_lines_dropped: observer.logs.as_ref().map_or(0, |logs| logs.dropped()),
            resident_bytes: resident_bytes(),
            traffic_bytes: context.map_or(0, |context| context.traffic.used()),
            open_files: std::fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as u64),
            max_open_files: open_files_limit(),
            started_unix_seconds: observer.timeline.origin_unix() as f64 / 1e9,
        },
    );
    ([(CONTENT_TYPE, PROMETHEUS)], text).into_response()
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TimelinePart {
    /// Spans that end after this time, in nanoseconds since 1970; 0 or less for all that are kept.
    #[serde(default)]
    since: i64,
    /// Most spans of each track; the newest are returned. 0 means 8192.
    #[serde(default)]
    #[param(value_type = u64)]
    max_spans: u32,
}

/// The engine's last phases and those of the pushes, as spans of time.
#[utoipa::path(get, path = "/timeline.json", params(TimelinePart), responses(
    (status = 200, body = pb::GetTimelineResponse),
    (status = 400),
))]
pub(super) async fn timeline(
    State(app): State<AppState>,
    part: Result<Query<TimelinePart>, QueryRejection>,
) -> HttpResult<Json<pb::GetTimelineResponse>> {
    let Query(TimelinePart { since, max_spans }) = part.map_err(|error| Error::invalid("query", error.body_text()))?;
    let request = pb::GetTimelineRequest { since: u64::try_from(since).unwrap_or(0), max_spans };
    Ok(Json(convert::timeline(&app.server.observer.timeline, &request)))
}
