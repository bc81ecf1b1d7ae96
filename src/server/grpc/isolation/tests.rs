use http_body::Body as _;
use tonic::Code;

use super::*;

/// A service that panics at the place that the request's path names.
#[derive(Clone)]
struct Fragile;

struct FragileBody {
    left: usize,
}

impl http_body::Body for FragileBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        assert!(self.left > 0, "in the body");
        self.left -= 1;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"data")))))
    }
}

impl Service<http::Request<Body>> for Fragile {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path().to_string();
        assert_ne!(path, "/call");
        Box::pin(async move {
            tokio::task::yield_now().await;
            assert_ne!(path, "/future");
            Ok(http::Response::new(Body::new(FragileBody { left: 2 })))
        })
    }
}

async fn call(service: &mut Isolated<Fragile>, path: &str) -> http::Response<Body> {
    let request = http::Request::builder().uri(path).body(Body::empty()).expect("a request");
    service.call(request).await.expect("never fails")
}

async fn frame(body: &mut Body) -> Option<Result<Frame<Bytes>, Status>> {
    std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
}

#[tokio::test]
async fn a_panic_before_the_response_is_the_calls_status() {
    let panics = Panics::default();
    let mut service = Isolated::new(Fragile, &panics);
    for (path, count) in [("/call", 1), ("/future", 2)] {
        let response = call(&mut service, path).await;
        let status = Status::from_header_map(response.headers()).expect("a status");
        assert_eq!(status.code(), Code::Internal, "{path}");
        assert_eq!(panics.count(), count, "{path}");
    }
    // Later calls are served as before.
    assert!(Status::from_header_map(call(&mut service, "/ok").await.headers()).is_none());
}

#[tokio::test]
async fn a_panic_in_the_stream_ends_it_with_a_status() {
    let panics = Panics::default();
    let mut body = call(&mut Isolated::new(Fragile, &panics), "/ok").await.into_body();
    for _ in 0..2 {
        assert!(frame(&mut body).await.expect("a frame").expect("no error").is_data());
    }
    let last = frame(&mut body).await.expect("the end").expect("no error");
    let status = Status::from_header_map(&last.into_trailers().expect("trailers")).expect("a status");
    assert_eq!(status.code(), Code::Internal);
    assert!(frame(&mut body).await.is_none() && body.is_end_stream());
    assert_eq!(panics.count(), 1);
}
