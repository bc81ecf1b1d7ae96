//! Turns a panic in a call into INTERNAL for that call alone. Without this the transport would drop the call's task,
//! and the client would see its stream reset without a status.

use std::convert::Infallible;
use std::pin::Pin;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::NamedService;

use super::status::to_status;
use crate::server::panics::Panics;

/// Wraps a service so that a panic ends only its call. The panicked call's state is dropped and never looked at again.
#[derive(Clone)]
pub(super) struct Isolated<S> {
    service: S,
    panics: Panics,
}

impl<S> Isolated<S> {
    pub(super) fn new(service: S, panics: &Panics) -> Self {
        Self { service, panics: panics.clone() }
    }
}

impl<S: NamedService> NamedService for Isolated<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Isolated<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let panics = self.panics.clone();
        let call = match panics.catch(|| self.service.call(request)) {
            Ok(call) => call,
            Err(error) => return Box::pin(std::future::ready(Ok(to_status(error).into_http()))),
        };
        let mut call = Box::pin(call);
        Box::pin(std::future::poll_fn(move |cx| match panics.catch(|| call.as_mut().poll(cx)) {
            Ok(polled) => polled.map_ok(|response| {
                let panics = panics.clone();
                response.map(|body| Body::new(IsolatedBody { body: Some(body), panics }))
            }),
            Err(error) => Poll::Ready(Ok(to_status(error).into_http())),
        }))
    }
}

/// The body of a response. Streams make their messages while they are sent, so a panic may come here too.
struct IsolatedBody {
    /// The wrapped body; None after it has panicked.
    body: Option<Body>,
    panics: Panics,
}

impl http_body::Body for IsolatedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        this.panics.catch(|| Pin::new(body).poll_frame(cx)).unwrap_or_else(|error| {
            this.body = None;
            let mut trailers = http::HeaderMap::new();
            Poll::Ready(Some(to_status(error).add_header(&mut trailers).map(|()| Frame::trailers(trailers))))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::new, http_body::Body::size_hint)
    }
}

#[cfg(test)]
mod tests;
