//! Counts the calls of each method by their status.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::codegen::http::HeaderMap;
use tonic::service::Routes;

use super::guard::method_of;
use crate::observe::Metrics;

/// Statuses by their numbers, in the words that metrics of gRPC servers use.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];
const CANCELED: usize = 1;

/// A call that has not ended. It counts as canceled if it is dropped before its status is known.
struct Call {
    metrics: Arc<Metrics>,
    method: (&'static str, &'static str),
    ended: bool,
}

impl Call {
    /// Counts the call if its status is among `headers`.
    fn note(&mut self, headers: &HeaderMap) {
        if let Some(status) = Status::from_header_map(headers) {
            self.end(status.code() as usize);
        }
    }

    fn end(&mut self, code: usize) {
        if !std::mem::replace(&mut self.ended, true) {
            let code = CODES.get(code).copied().unwrap_or("Unknown");
            self.metrics.grpc_calls.count([self.method.0, self.method.1, code]);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end(CANCELED);
    }
}

/// The routes, of which each call is counted.
pub(in crate::server) fn counted(routes: Routes, metrics: &Arc<Metrics>) -> Routes {
    routes.into_axum_router().layer(from_fn_with_state(metrics.clone(), count)).into()
}

/// Passes a call on and counts it when it ends. Methods that there are not are not counted: a client chooses their
/// names.
async fn count(State(metrics): State<Arc<Metrics>>, request: Request, next: Next) -> Response {
    let Some(method) = method_of(request.uri().path()) else { return next.run(request).await };
    let mut call = Call { metrics, method, ended: false };
    let response = next.run(request).await;
    call.note(response.headers());
    response.map(|body| Body::new(CountedBody { body, call }))
}

/// The body of a response, whose trailers have the status of the call.
struct CountedBody {
    body: Body,
    call: Call,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.call.note(trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
