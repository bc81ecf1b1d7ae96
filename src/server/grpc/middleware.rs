//! Middleware of all calls: reads the deadline, counts the call by its status, turns a panic into INTERNAL, and checks
//! the token. All of it runs before the message of the call is received.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::status::to_status;
use crate::error::{Error, shown};
use crate::observe::Metrics;
use crate::server::ServerState;
use crate::server::calls::{Deadline, deadline_exceeded};
use crate::server::security::{Access, Caller, Role};
use crate::server::state::Panics;

/// Every method, with the role that its callers need. A test compares the list with the services' descriptors.
const METHODS: &[(&str, Role)] = &[
    ("/rollout.v1.Rollout/Generate", Role::Generate),
    ("/rollout.v1.Rollout/Score", Role::Generate),
    ("/rollout.v1.Rollout/Abort", Role::Generate),
    ("/rollout.v1.Weights/Update", Role::Control),
    ("/rollout.v1.Weights/CancelUpdate", Role::Control),
    ("/rollout.v1.Weights/ListParameters", Role::Control),
    ("/rollout.v1.Weights/Checksum", Role::Control),
    ("/rollout.v1.Weights/ListAdapters", Role::Generate),
    ("/rollout.v1.Weights/RemoveAdapter", Role::Control),
    ("/rollout.v1.Control/GetInfo", Role::Generate),
    ("/rollout.v1.Control/GetStatus", Role::Generate),
    ("/rollout.v1.Control/GetTimeline", Role::Generate),
    ("/rollout.v1.Control/ResetPrefixCache", Role::Control),
    ("/rollout.v1.Control/Sleep", Role::Control),
    ("/rollout.v1.Control/Wake", Role::Control),
    ("/rollout.v1.Control/Pause", Role::Control),
    ("/rollout.v1.Control/Resume", Role::Control),
    ("/grpc.health.v1.Health/Check", Role::Anyone),
    ("/grpc.health.v1.Health/Watch", Role::Anyone),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Role::Generate),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Role::Generate),
];

/// How much earlier than tonic's own timer for the same deadline a call is ended, so that the status is ours.
const HEAD_START: Duration = Duration::from_millis(2);

/// The role that a call of `path` needs. An unknown method needs any token, so that only clients with one learn that it
/// is unknown.
pub(super) fn role_of(path: &str) -> Role {
    METHODS.iter().find(|(method, _)| *method == path).map_or(Role::Generate, |(_, role)| *role)
}

/// Checks the token of a call, so that a client without one cannot make the server hold a message. Inserts the
/// [`Caller`] into the extensions of the request.
pub(super) async fn authenticate(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    match access.check(request.headers(), role_of(path), path.trim_start_matches('/')) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => to_status(error).into_http(),
    }
}

/// The caller that [`authenticate`] has found.
pub(super) fn caller_of<T>(request: &tonic::Request<T>) -> Caller {
    request.extensions().get().cloned().unwrap_or_default()
}

/// Reads the deadline of a call (INVALID_ARGUMENT if it is malformed). tonic applies `grpc-timeout` only until the
/// response starts, and answers CANCELLED. Here a deadline covers the whole stream and gives DEADLINE_EXCEEDED.
pub(super) async fn read_deadline(State(server): State<ServerState>, mut request: Request, next: Next) -> Response {
    let at = match timeout(request.headers()) {
        Err(status) => return status.into_http(),
        Ok(Some(timeout)) if timeout <= HEAD_START => return to_status(deadline_exceeded()).into_http(),
        Ok(timeout) => timeout.map(|timeout| Instant::now() + (timeout - HEAD_START)),
    };
    request.extensions_mut().insert(Deadline::new(at, &server));
    next.run(request).await
}

/// The time in the `grpc-timeout` header: at most eight digits and a unit.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(header) = headers.get("grpc-timeout") else { return Ok(None) };
    let invalid = || {
        let header = shown(&format!("{header:?}"), 100);
        Status::invalid_argument(format!("grpc-timeout: {header} is not up to 8 digits and a unit"))
    };
    let text = header.to_str().map_err(|_| invalid())?;
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(invalid)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(invalid());
    }
    let value: u64 = digits.parse().map_err(|_| invalid())?;
    let timeout = match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return Err(invalid()),
    };
    Ok(Some(timeout))
}

/// The deadline that [`read_deadline`] has found.
pub(super) fn deadline_of<T>(request: &tonic::Request<T>) -> Deadline {
    request.extensions().get().cloned().unwrap_or_default()
}

/// The answer of a call with one message.
pub(super) type Answer<T> = tonic::Result<tonic::Response<T>>;

/// The answer of a call: the result of `work`, within the deadline.
pub(super) async fn answer<T>(deadline: Deadline, work: impl Future<Output = Result<T, Error>>) -> Answer<T> {
    let result = deadline.limit(work).await.inspect_err(|error| deadline.note(error));
    result.map(tonic::Response::new).map_err(to_status)
}

/// Counts a call when it ends, and turns a panic into INTERNAL for this call alone. Otherwise the transport would drop
/// the call's task, and the client would see its stream reset without a status.
pub(super) async fn track_call(State(server): State<ServerState>, request: Request, next: Next) -> Response {
    // Unknown methods are not counted, because a client chooses their names.
    let method = METHODS.iter().find(|(method, _)| *method == request.uri().path());
    let method = method.and_then(|(method, _)| method.trim_start_matches('/').split_once('/'));
    let mut call = TrackedCall { metrics: server.observer.metrics.clone(), method };
    let response = match server.panics.catch_future(next.run(request)).await {
        Ok(response) => response,
        Err(error) => to_status(error).into_http(),
    };
    call.note(response.headers());
    response.map(|body| Body::new(TrackedBody { body: Some(body), call, panics: server.panics }))
}

/// Name of a status in metrics of gRPC servers, which spell two statuses in another way than tonic.
fn metric_name(code: Code) -> String {
    match code {
        Code::Ok => "OK".into(),
        Code::Cancelled => "Canceled".into(),
        code => format!("{code:?}"),
    }
}

/// A call that has not ended. It counts as canceled if it is dropped before its status is known.
struct TrackedCall {
    metrics: Arc<Metrics>,
    /// Service and method; None once the call is counted, and for an unknown method.
    method: Option<(&'static str, &'static str)>,
}

impl TrackedCall {
    /// Counts the call if its status is among `headers`.
    fn note(&mut self, headers: &HeaderMap) {
        if let Some(status) = Status::from_header_map(headers) {
            self.end(status.code());
        }
    }

    fn end(&mut self, code: Code) {
        if let Some((service, method)) = self.method.take() {
            self.metrics.grpc_calls.count([service, method, &metric_name(code)]);
        }
    }
}

impl Drop for TrackedCall {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

/// The body of a response, whose trailers have the status of the call. Streams make their messages while they are sent,
/// so a panic may happen here too.
struct TrackedBody {
    /// None after a panic.
    body: Option<Body>,
    call: TrackedCall,
    panics: Panics,
}

impl http_body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        let frame = match this.panics.catch(|| Pin::new(body).poll_frame(cx)) {
            Ok(frame) => ready!(frame),
            Err(error) => {
                this.body = None;
                let mut trailers = HeaderMap::new();
                let added = to_status(error).add_header(&mut trailers).map_err(axum::Error::new);
                Some(added.map(|()| Frame::trailers(trailers)))
            }
        };
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            this.call.note(trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::new, http_body::Body::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::middleware::from_fn_with_state;
    use http_body::Body as _;
    use prost::Message as _;
    use tokio_stream::StreamExt as _;
    use tonic::codegen::Service as _;

    use super::*;
    use crate::observe::Observer;

    #[test]
    fn every_method_has_a_role() {
        let mut described = BTreeSet::new();
        for set in [
            crate::server::pb::DESCRIPTORS,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ] {
            for file in prost_types::FileDescriptorSet::decode(set).expect("descriptors").file {
                for service in &file.service {
                    let name = format!("/{}.{}", file.package(), service.name());
                    described.extend(service.method.iter().map(|method| format!("{name}/{}", method.name())));
                }
            }
        }
        let listed: BTreeSet<String> = METHODS.iter().map(|(method, _)| (*method).to_owned()).collect();
        assert_eq!(listed, described, "give each method a role in METHODS");
        assert_eq!(listed.len(), METHODS.len(), "each method is listed once");
    }

    #[test]
    fn statuses_have_the_names_that_dashboards_know() {
        let names: Vec<_> = (0..17).map(|code| metric_name(Code::from_i32(code))).collect();
        let known = "OK Canceled Unknown InvalidArgument DeadlineExceeded NotFound AlreadyExists PermissionDenied \
                     ResourceExhausted FailedPrecondition Aborted OutOfRange Unimplemented Internal Unavailable \
                     DataLoss Unauthenticated";
        assert_eq!(names.join(" "), known);
    }

    #[test]
    fn only_health_needs_no_token() {
        for path in ["/rollout.v1.Rollout/Nothing", "/nothing", "", "/grpc.health.v1.Health/Check/", "/x"] {
            assert_eq!(role_of(path), Role::Generate, "{path:?}");
        }
        let open: Vec<_> =
            METHODS.iter().filter(|(_, role)| *role == Role::Anyone).map(|(method, _)| *method).collect();
        assert_eq!(open, ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]);
    }

    fn check(header: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", header.parse().expect("a header value"));
        timeout(&headers).ok().map(|t| t.expect("there is a header"))
    }

    #[test]
    fn the_header_is_read_in_every_unit_and_rejected_otherwise() {
        assert_eq!(check("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(check("3M"), Some(Duration::from_secs(180)));
        assert_eq!(check("99999999S"), Some(Duration::from_secs(99_999_999)));
        assert_eq!(check("250m"), Some(Duration::from_millis(250)));
        assert_eq!(check("7u"), Some(Duration::from_micros(7)));
        assert_eq!(check("9n"), Some(Duration::from_nanos(9)));
        for wrong in ["", "S", "5", "5x", "-1S", "+1S", "123456789S", "1 S"] {
            assert_eq!(check(wrong), None, "{wrong:?}");
        }
        assert!(matches!(timeout(&HeaderMap::new()), Ok(None)));
    }

    /// A method that panics at the place that the request's path names.
    async fn fragile(request: Request) -> Response {
        let path = request.uri().path().to_string();
        tokio::task::yield_now().await;
        assert_ne!(path, "/future");
        let frames = tokio_stream::iter(0..3).map(|frame| {
            assert!(frame < 2, "in the body");
            Ok::<_, std::convert::Infallible>(Bytes::from_static(b"data"))
        });
        Response::new(Body::from_stream(frames))
    }

    async fn call(server: &ServerState, path: &str) -> Response {
        let track = from_fn_with_state(server.clone(), track_call);
        let mut router = axum::Router::new().fallback(fragile).layer(track);
        let request = Request::builder().uri(path).body(Body::empty()).expect("a request");
        router.call(request).await.expect("never fails")
    }

    async fn frame(body: &mut Body) -> Option<Result<Frame<Bytes>, axum::Error>> {
        std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
    }

    #[tokio::test]
    async fn a_panic_before_the_response_is_the_calls_status() {
        let (_stage, server) = ServerState::new(Observer::new().0);
        let response = call(&server, "/future").await;
        assert_eq!(Status::from_header_map(response.headers()).map(|status| status.code()), Some(Code::Internal));
        assert_eq!(server.panics.count(), 1);
        // Later calls are served as before.
        assert!(Status::from_header_map(call(&server, "/ok").await.headers()).is_none());
    }

    #[tokio::test]
    async fn a_panic_in_the_stream_ends_it_with_a_status() {
        let (_stage, server) = ServerState::new(Observer::new().0);
        let mut body = call(&server, "/ok").await.into_body();
        for _ in 0..2 {
            assert!(frame(&mut body).await.expect("a frame").expect("no error").is_data());
        }
        let last = frame(&mut body).await.expect("the end").expect("no error");
        let status = Status::from_header_map(&last.into_trailers().expect("trailers")).expect("a status");
        assert_eq!(status.code(), Code::Internal);
        assert!(frame(&mut body).await.is_none() && body.is_end_stream());
        assert_eq!(server.panics.count(), 1);
    }
}
