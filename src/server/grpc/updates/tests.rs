//! The method Update beside the other calls of its service.

use std::sync::mpsc::Receiver;
use std::time::Duration;

use tonic::Code;
use tonic::codegen::Service as _;

use super::*;
use crate::engine::Command;
use crate::memory::Traffic;
use crate::observe::Observer;
use crate::server::gate::{GateKeeper, gate};
use crate::server::grpc::note_call;
use crate::server::grpc::tests::open;

/// The service with an engine that answers nothing.
fn service() -> (GateKeeper, WeightsService, Receiver<Command>) {
    let (keeper, gate, commands) = open();
    (keeper, WeightsService::new(gate), commands)
}

#[tokio::test]
async fn updates_come_here_and_other_calls_go_on() {
    let (_keeper, weights, _commands) = service();
    let mut direct = DirectUpdates::new(weights);
    for (path, code) in
        [("Update", Code::InvalidArgument), ("ListParameters", Code::Ok), ("Updates", Code::Unimplemented)]
    {
        // For Update a commit; for other methods an empty request with an unknown field.
        let body = Body::new("\0\0\0\0\u{2}\"\0".to_string());
        let uri = format!("/{}/{path}", DirectUpdates::NAME);
        let request =
            http::Request::post(uri).header("content-type", "application/grpc").body(body).expect("a request");
        let response = direct.call(request).await.expect("infallible");
        let status = Status::from_header_map(response.headers());
        assert_eq!(status.as_ref().map_or(Code::Ok, Status::code), code, "{path}: {status:?}");
        if path == "Update" {
            assert!(status.expect("an error").message().starts_with("header: is missing"));
        }
    }
}

#[tokio::test]
async fn an_update_ends_at_its_deadline() {
    let (keeper, weights, _commands) = service();
    let mut request = Request::new(());
    request.metadata_mut().insert("grpc-timeout", "50m".parse().expect("a header value"));
    let (metadata, extensions, ()) = note_call(&gate(Observer::new().0).1)(request).expect("readable").into_parts();
    let messages = Messages::new(tokio_stream::pending(), &Traffic::new(1 << 30));
    let update = weights.update_from(Request::from_parts(metadata, extensions, messages));
    let status = tokio::time::timeout(Duration::from_secs(10), update).await.expect("ends").expect_err("no message");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    tokio::time::timeout(Duration::from_secs(10), keeper.drained()).await.expect("nothing runs");
}

#[tokio::test]
async fn only_so_many_updates_are_received_at_once() {
    let (_keeper, weights, _commands) = service();
    let mut direct = DirectUpdates::new(weights);
    let mut update = || {
        let (sender, receiver) = tokio::sync::mpsc::channel::<()>(1);
        let body = Body::new(Silent(receiver));
        let uri = format!("/{}/Update", DirectUpdates::NAME);
        let request =
            http::Request::post(uri).header("content-type", "application/grpc").body(body).expect("a request");
        (sender, direct.call(request))
    };
    let open: Vec<_> = (0..MAX_UPDATES).map(|_| update()).collect();
    let (_sender, refused) = update();
    let code = |response: &http::Response<Body>| Status::from_header_map(response.headers()).map(|s| s.code());
    assert_eq!(code(&refused.await.expect("infallible")), Some(Code::ResourceExhausted));
    drop(open);
    let (sender, next) = update();
    drop(sender);
    assert_eq!(code(&next.await.expect("infallible")), Some(Code::InvalidArgument));
}

/// A body without frames, which ends when its sender is dropped.
struct Silent(tokio::sync::mpsc::Receiver<()>);

impl http_body::Body for Silent {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<http_body::Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|_| None)
    }
}
