//! An oversized message is the client's mistake: INVALID_ARGUMENT that says so, where tonic says OUT_OF_RANGE.

use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

/// Wraps a service that itself never answers OUT_OF_RANGE, so that this code can only come from tonic's decoder.
#[derive(Clone)]
pub(super) struct NameMessageLimit<S>(pub(super) S);

impl<S: NamedService> NamedService for NameMessageLimit<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for NameMessageLimit<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<S::Response, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let response = self.0.call(request);
        Box::pin(async move {
            let response = response.await?;
            Ok(match Status::from_header_map(response.headers()) {
                Some(status) if status.code() == Code::OutOfRange => {
                    let message = format!("request: {}; split it over several requests", status.message());
                    Status::invalid_argument(message).into_http()
                }
                _ => response,
            })
        })
    }
}
