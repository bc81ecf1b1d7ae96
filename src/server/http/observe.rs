//! Metrics and the timeline. Neither asks the engine, so both are answered while it computes, sleeps or is loaded.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{MatchedPath, Query, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Door;
use super::error::{ErrorBody, HttpError, Shown};
use crate::error::Error;
use crate::observe::Observer;
use crate::server::convert;
use crate::server::pb;
use crate::server::scrape;

/// Content type of Prometheus' text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Counts a request by its route and the class of its status, and notes what went wrong.
pub(super) async fn count(State(observer): State<Observer>, request: Request, next: Next) -> Response {
    // A path without a route, and a method that HTTP does not know, are the client's to choose.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = match *request.method() {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        _ => "other",
    };
    let response = next.run(request).await;
    let (handler, status) = (route.as_ref().map_or("none", MatchedPath::as_str), response.status());
    let class = ["1xx", "2xx", "3xx", "4xx", "5xx"][usize::from(status.as_u16() / 100 - 1).min(4)];
    observer.metrics.http_calls.count([handler, method, class]);
    // Strangers at the door are no errors of the server's clients.
    let is_stranger = route.is_none() || [StatusCode::UNAUTHORIZED, StatusCode::METHOD_NOT_ALLOWED].contains(&status);
    if let Some(shown) = response.extensions().get::<Shown>().filter(|_| !is_stranger) {
        observer.journal.refusal(shown.kind, &shown.message, None);
    }
    response
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, description = "all metrics in Prometheus' text format", content_type = "text/plain", body = String),
))]
pub(super) async fn metrics(State(door): State<Door>) -> Response {
    ([(CONTENT_TYPE, PROMETHEUS)], scrape::metrics(&door.gate)).into_response()
}

/// Which part of the timeline to give.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Part {
    /// Spans that end after this time, in nanoseconds since 1970; 0 or less for all that are kept.
    #[serde(default)]
    since: i64,
    /// Most spans of each track, of which the newest are given; 0 means 8192.
    #[serde(default)]
    #[param(value_type = u64)]
    max_spans: u32,
}

/// Where the engine's time went.
#[derive(Serialize, ToSchema)]
pub(super) struct Timeline {
    /// Wall clock at the timeline's start, in nanoseconds since 1970. All times count from it by a clock that is never
    /// set.
    started: u64,
    /// The stretch of time that is described, in nanoseconds since 1970.
    start: u64,
    now: u64,
    /// Whether there were more spans than are given.
    truncated: bool,
    /// Spans of the track `engine`, then those of the track `push`, each in order.
    spans: Vec<Span>,
    /// Time of the engine in each phase between `start` and `now`.
    phases: Vec<PhaseTime>,
}

/// A stretch of time that was spent on one thing. Members that are zero are left out.
#[derive(Serialize, ToSchema)]
struct Span {
    /// `engine` or `push`.
    track: String,
    /// Number of the span in its track.
    id: u64,
    phase: String,
    /// In nanoseconds since 1970.
    start: u64,
    /// Missing while it lasts.
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<u64>,
    #[serde(skip_serializing_if = "is_zero")]
    steps: u64,
    #[serde(skip_serializing_if = "is_zero")]
    computed_tokens: u64,
    #[serde(skip_serializing_if = "is_zero")]
    sampled_tokens: u64,
    /// Version of the policy at its end.
    #[serde(skip_serializing_if = "is_zero")]
    weight_version: u64,
    /// Bytes that a push brought, a sleep gave back or a wake took.
    #[serde(skip_serializing_if = "is_zero")]
    bytes: u64,
    /// Number of the push.
    #[serde(skip_serializing_if = "is_zero")]
    push: u64,
    /// Level of the sleep.
    #[serde(skip_serializing_if = "is_zero")]
    level: u64,
    /// Of the phase `brief`: the time of what it consists of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<PhaseTime>,
}

/// Time of a phase.
#[derive(Serialize, ToSchema)]
struct PhaseTime {
    phase: String,
    seconds: f64,
    /// Share of the whole, from 0 to 1.
    share: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Where the engine's time went: its last phases, and those of pushes beside it.
#[utoipa::path(get, path = "/timeline.json", params(Part), responses(
    (status = 200, body = Timeline),
    (status = 400, body = ErrorBody),
))]
pub(super) async fn timeline(
    State(door): State<Door>,
    part: Result<Query<Part>, QueryRejection>,
) -> Result<Json<Timeline>, HttpError> {
    let Query(Part { since, max_spans }) = part.map_err(|error| Error::invalid("query", error.body_text()))?;
    let since = u64::try_from(since).unwrap_or(0);
    let reply = convert::timeline(&door.gate.observer.timeline, &pb::GetTimelineRequest { since, max_spans });
    Ok(Json(Timeline {
        started: reply.started,
        start: reply.start,
        now: reply.now,
        truncated: reply.truncated,
        spans: reply.spans.into_iter().map(Span::from).collect(),
        phases: reply.phases.into_iter().map(PhaseTime::from).collect(),
    }))
}

impl From<pb::Span> for Span {
    fn from(span: pb::Span) -> Self {
        Self {
            track: span.track,
            id: span.id,
            phase: span.phase,
            start: span.start,
            end: span.end,
            steps: span.steps,
            computed_tokens: span.computed_tokens,
            sampled_tokens: span.sampled_tokens,
            weight_version: span.weight_version,
            bytes: span.bytes,
            push: span.push,
            level: span.level.into(),
            parts: span.parts.into_iter().map(PhaseTime::from).collect(),
        }
    }
}

impl From<pb::PhaseTime> for PhaseTime {
    fn from(pb::PhaseTime { phase, seconds, share }: pb::PhaseTime) -> Self {
        Self { phase, seconds, share }
    }
}
