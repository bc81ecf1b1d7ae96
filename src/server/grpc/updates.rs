//! Routes the method Update around tonic's decoder, to one that works on the connection's frames.

use std::pin::Pin;
use std::sync::Arc;
use std::task::ready;

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::codegen::{Body as _, BoxFuture, Context, Poll, Service, http};
use tonic::server::{ClientStreamingService, Grpc, NamedService};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::messages::Messages;
use super::status::to_status;
use super::weights::WeightsService;
use crate::server::pb;
use crate::server::pb::weights_server::WeightsServer;

/// Most updates that are received at once. The engine refuses all but one when their headers are here; until then each
/// may hold a message, and the bytes that its stream's window lets through.
const MAX_UPDATES: usize = 8;

/// The service Weights: handles Update itself, and passes all other calls to the generated service.
#[derive(Clone)]
pub(super) struct DirectUpdates {
    weights: WeightsService,
    generated: WeightsServer<WeightsService>,
    slots: Arc<Semaphore>,
}

impl DirectUpdates {
    pub(super) fn new(weights: WeightsService) -> Self {
        Self { generated: WeightsServer::new(weights.clone()), weights, slots: Arc::new(Semaphore::new(MAX_UPDATES)) }
    }
}

impl NamedService for DirectUpdates {
    const NAME: &'static str = <WeightsServer<WeightsService> as NamedService>::NAME;
}

impl Service<http::Request<Body>> for DirectUpdates {
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<std::result::Result<(), Self::Error>> {
        Service::<http::Request<Body>>::poll_ready(&mut self.generated, cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = request.uri().path().strip_prefix('/').and_then(|path| path.strip_prefix(Self::NAME));
        if method != Some("/Update") {
            return self.generated.call(request);
        }
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            let message =
                format!("{MAX_UPDATES} updates are being received already; one is applied at a time, so wait");
            return Box::pin(std::future::ready(Ok(Status::resource_exhausted(message).into_http())));
        };
        let (head, body) = request.into_parts();
        let update = Update { weights: self.weights.clone(), frames: Some(Frames(body)) };
        Box::pin(async move {
            let _slot = slot;
            // tonic reads the request's head and writes the response; the body is read elsewhere.
            let mut grpc = Grpc::new(ProstCodec::default());
            Ok(grpc.client_streaming(update, http::Request::from_parts(head, Body::empty())).await)
        })
    }
}

/// One call of Update.
struct Update {
    weights: WeightsService,
    /// The request's frames; None once the call has taken them.
    frames: Option<Frames>,
}

impl ClientStreamingService<pb::UpdateRequest> for Update {
    type Response = pb::UpdateResponse;
    type Future = BoxFuture<Response<pb::UpdateResponse>, Status>;

    fn call(&mut self, request: Request<Streaming<pb::UpdateRequest>>) -> Self::Future {
        let (weights, frames) = (self.weights.clone(), self.frames.take());
        Box::pin(async move {
            let frames = frames.ok_or_else(|| Status::internal("an update is received once"))?;
            let traffic = weights.traffic().map_err(to_status)?;
            weights.update_from(request.map(|_| Messages::new(frames, &traffic))).await
        })
    }
}

/// The data frames of a request's body, as they arrive.
pub(super) struct Frames(pub(super) Body);

impl Stream for Frames {
    type Item = std::result::Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let frame = ready!(Pin::new(&mut self.0).poll_frame(cx));
        // Trailers end the data.
        Poll::Ready(frame.and_then(|frame| frame.map(|frame| frame.into_data().ok()).transpose()))
    }
}

#[cfg(test)]
mod tests;
