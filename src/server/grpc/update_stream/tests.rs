//! The decoder of an update's frames compared with prost, on streams that are cut anywhere and damaged in any way.

use std::task::{Context, Waker};
use std::time::Duration;

use prost::Message as _;
use prost::encoding::encode_varint;
use rand::seq::SliceRandom as _;
use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic::codegen::Service as _;

use super::*;
use crate::server::grpc::services;
use crate::server::grpc::tests::{limited, open};
use crate::server::grpc::weights::MAX_UPDATES;

type Frame = std::result::Result<Bytes, axum::Error>;

/// The messages of a stream before its end, with the pieces of each chunk joined, and the code of the error that ends
/// it.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    messages: Vec<Kind>,
    error: Option<Code>,
}

impl Outcome {
    fn fail(mut self, error: &Error) -> Self {
        self.error = Some(match error {
            Error::InvalidArgument { .. } => Code::InvalidArgument,
            other => panic!("no error of a reader: {other}"),
        });
        self
    }
}

/// A decoder without a limit on the time between two frames.
fn decoder(frames: impl Stream<Item = Frame> + Send + 'static, traffic: &Traffic) -> UpdateMessages {
    UpdateMessages::new(frames, traffic, Activity::start(), Duration::MAX)
}

/// The outcome of the decoder under test. A chunk that does not end is left out.
async fn read(frames: Vec<Bytes>) -> Outcome {
    let mut messages = decoder(tokio_stream::iter(frames.into_iter().map(Ok)), &Traffic::new(1 << 30));
    let mut outcome = Outcome::default();
    let mut open: Option<pb::Chunk> = None;
    loop {
        match messages.next().await {
            Ok(Some(Kind::Chunk(piece))) => {
                let pieces = messages.with_those_here(piece);
                let last = pieces.len() - 1;
                for (i, piece) in pieces.into_iter().enumerate() {
                    let whole = match open.take() {
                        None => piece,
                        Some(chunk) => {
                            assert_eq!(piece.tensor, chunk.tensor);
                            assert_eq!(piece.offset, chunk.offset.saturating_add(chunk.data.len() as u64));
                            pb::Chunk { data: [chunk.data, piece.data].concat().into(), ..chunk }
                        }
                    };
                    // Only the last can be a piece: it has all bytes that are here.
                    match messages.chunk {
                        Some(_) if i == last => open = Some(whole),
                        _ => outcome.messages.push(Kind::Chunk(whole)),
                    }
                }
            }
            Ok(Some(kind)) => outcome.messages.push(kind),
            Ok(None) => return outcome,
            Err(error) => return outcome.fail(&error),
        }
    }
}

/// The expected outcome: each message is taken whole and decoded by prost.
fn reference(mut stream: &[u8]) -> Outcome {
    let mut outcome = Outcome::default();
    while !stream.is_empty() {
        if stream.len() < PREFIX_BYTES {
            return outcome.fail(&cut());
        }
        let bytes = match message_bytes(&stream[..PREFIX_BYTES], MAX_MESSAGE_BYTES) {
            Ok(bytes) => bytes,
            Err(error) => return outcome.fail(&error),
        };
        stream = &stream[PREFIX_BYTES..];
        if stream.len() < bytes {
            return outcome.fail(&cut());
        }
        match pb::UpdateRequest::decode(&stream[..bytes]).ok().and_then(|message| message.kind) {
            Some(kind) => outcome.messages.push(kind),
            None => return outcome.fail(&Error::invalid("message", "")),
        }
        stream = &stream[bytes..];
    }
    outcome
}

fn random_bytes(rng: &mut ChaCha8Rng, most: usize) -> Vec<u8> {
    let mut data = vec![0; rng.random_range(0..=most)];
    rng.fill(&mut data[..]);
    data
}

/// An encoded chunk whose fields are ordered, repeated or extended as another library's encoder might do.
fn odd_chunk(rng: &mut ChaCha8Rng) -> Vec<u8> {
    let number = |rng: &mut ChaCha8Rng, key: u8| {
        let mut field = vec![key];
        let shift = rng.random_range(0..64);
        encode_varint(rng.random::<u64>() >> shift, &mut field);
        field
    };
    let data = |rng: &mut ChaCha8Rng, key: u8| {
        let (mut field, data) = (vec![key], random_bytes(rng, 40));
        encode_varint(data.len() as u64, &mut field);
        [field, data].concat()
    };
    let mut fields = vec![number(rng, 0x08), number(rng, 0x10), data(rng, 0x1a), number(rng, 0x20), data(rng, 0x2a)];
    fields.shuffle(rng);
    fields.truncate(rng.random_range(0..=5));
    let chunk = fields.concat();
    let mut message = vec![0x1a];
    encode_varint(chunk.len() as u64, &mut message);
    message.extend(chunk);
    if rng.random_bool(0.3) {
        message.extend(number(rng, 0x50));
    }
    message
}

fn random_message(rng: &mut ChaCha8Rng) -> Vec<u8> {
    let name = |rng: &mut ChaCha8Rng| format!("t{}", rng.random::<u64>());
    let tensor = |rng: &mut ChaCha8Rng| pb::Tensor { name: name(rng), shape: vec![rng.random()], ..Default::default() };
    let kind = match rng.random_range(0..8) {
        0 => Kind::Header(pb::Header { tensors: vec![tensor(rng)], adapter: name(rng), ..Default::default() }),
        1 => Kind::Manifest(pb::Manifest { tensors: (0..rng.random_range(0..4)).map(|_| tensor(rng)).collect() }),
        2 => Kind::Commit(pb::Commit {}),
        3 => return odd_chunk(rng),
        _ => {
            let (tensor, offset) = (rng.random::<u32>() >> rng.random_range(0..32), rng.random::<u64>());
            let offset = offset.checked_shr(rng.random_range(0..70)).unwrap_or(0);
            Kind::Chunk(pb::Chunk { tensor, offset, data: random_bytes(rng, 300).into() })
        }
    };
    pb::UpdateRequest { kind: Some(kind) }.encode_to_vec()
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
}

fn random_stream(rng: &mut ChaCha8Rng) -> Vec<u8> {
    (0..rng.random_range(1..12)).flat_map(|_| framed(&random_message(rng))).collect()
}

/// Cuts a stream into frames of random lengths, some of them empty.
fn split(rng: &mut ChaCha8Rng, stream: &[u8]) -> Vec<Bytes> {
    let most = [2, 9, 60, 2000][rng.random_range(0..4)];
    let (mut frames, mut rest) = (Vec::new(), Bytes::copy_from_slice(stream));
    while !rest.is_empty() {
        frames.push(rest.split_to(rng.random_range(0..=most).min(rest.len())));
    }
    frames
}

#[tokio::test]
async fn any_split_into_frames_gives_what_prost_gives() {
    for seed in 0..1500 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let stream = random_stream(&mut rng);
        assert_eq!(read(split(&mut rng, &stream)).await, reference(&stream), "seed {seed}");
    }
}

#[tokio::test]
async fn a_cut_at_every_byte_gives_the_same() {
    for seed in 0..20 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let stream = random_stream(&mut rng);
        let expected = reference(&stream);
        for at in 0..=stream.len() {
            let (front, back) = (Bytes::copy_from_slice(&stream[..at]), Bytes::copy_from_slice(&stream[at..]));
            assert_eq!(read(vec![front.clone(), back]).await, expected, "seed {seed}, cut at {at}");
            assert_eq!(read(vec![front]).await, reference(&stream[..at]), "seed {seed}, ends at {at}");
        }
    }
}

#[tokio::test]
async fn damaged_streams_and_garbage_give_an_error_where_prost_does() {
    let mut refused = 0;
    for seed in 0..6000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut stream = if rng.random_bool(0.2) { random_bytes(&mut rng, 200) } else { random_stream(&mut rng) };
        for _ in 0..rng.random_range(0..4) {
            let Some(at) = (!stream.is_empty()).then(|| rng.random_range(0..stream.len())) else { break };
            match rng.random_range(0..3) {
                0 => stream[at] = rng.random(),
                1 => drop(stream.remove(at)),
                _ => stream.insert(at, rng.random()),
            }
        }
        let expected = reference(&stream);
        refused += usize::from(expected.error.is_some());
        assert_eq!(read(split(&mut rng, &stream)).await, expected, "seed {seed}");
    }
    assert!(refused > 1000, "{refused}");
}

/// Passing a chunk's data on without a copy is the only reason for this decoder.
#[tokio::test]
async fn the_data_of_a_chunk_is_not_copied() {
    let data = vec![7; 5000];
    let chunk = pb::Chunk { tensor: 300, offset: 1 << 40, data: data.into() };
    let stream: Bytes = framed(&pb::UpdateRequest { kind: Some(Kind::Chunk(chunk)) }.encode_to_vec()).into();
    let frames = vec![stream.slice(..2000), stream.slice(2000..2001), stream.slice(2001..)];
    let mut messages = decoder(tokio_stream::iter(frames.clone().into_iter().map(Ok)), &Traffic::new(1 << 30));
    for frame in &frames {
        let Ok(Some(Kind::Chunk(piece))) = messages.next().await else { panic!("no piece") };
        assert_eq!(piece.data.as_ptr_range().end, frame.as_ptr_range().end);
    }
    assert!(matches!(messages.next().await, Ok(None)));
    // A frame that begins inside the head is copied only as far as the head goes.
    let frames = [stream.slice(..PREFIX_BYTES + 3), stream.slice(PREFIX_BYTES + 3..)];
    let mut messages = decoder(tokio_stream::iter(frames.clone().map(Ok)), &Traffic::new(1 << 30));
    let Ok(Some(Kind::Chunk(joined))) = messages.next().await else { panic!("no piece") };
    let Ok(Some(Kind::Chunk(piece))) = messages.next().await else { panic!("no second piece") };
    assert_eq!(piece.data.as_ptr_range().end, frames[1].as_ptr_range().end);
    assert!(joined.data.len() < HEAD_BYTES && joined.data.len() + piece.data.len() == 5000);
}

/// No bytes follow these heads: what is too long is refused before it arrives.
#[tokio::test]
async fn chunks_of_one_frame_come_together_up_to_the_one_that_breaks_off() {
    let chunk = |tensor: u32| pb::Chunk { tensor, offset: 0, data: vec![tensor as u8; 3000].into() };
    let message = |kind| framed(&pb::UpdateRequest { kind: Some(kind) }.encode_to_vec());
    let manifest = message(Kind::Manifest(pb::Manifest::default()));
    let chunks: Vec<Vec<u8>> = (1..200).map(|tensor| message(Kind::Chunk(chunk(tensor)))).collect();
    for (whole, of_next) in [(3, 0), (3, 7), (3, 1500), (MAX_TOGETHER, 0), (MAX_TOGETHER, 1500)] {
        let mut frame = [manifest.clone(), chunks[..whole].concat()].concat();
        frame.extend(&chunks[whole][..of_next]);
        let mut messages = decoder(tokio_stream::iter([Ok(frame.into())]), &Traffic::new(1 << 30));
        assert!(matches!(messages.next().await, Ok(Some(Kind::Manifest(_)))));
        let Ok(Some(Kind::Chunk(first))) = messages.next().await else { panic!("no chunk") };
        let together = messages.with_those_here(first);
        let is_begun = of_next > HEAD_BYTES && whole < MAX_TOGETHER;
        assert_eq!(together.len(), whole + usize::from(is_begun), "{whole} and {of_next} bytes");
        (1..).zip(&together[..whole]).for_each(|(tensor, given)| assert_eq!(*given, chunk(tensor)));
        if of_next > 0 {
            let mut rest = messages.next().await;
            while let Ok(Some(Kind::Chunk(piece))) = rest {
                assert_eq!(piece.tensor as usize, whole + 1);
                rest = messages.next().await;
            }
            assert!(matches!(rest, Err(Error::InvalidArgument { .. })), "{rest:?}");
        } else {
            assert!(matches!(messages.next().await, Ok(None)));
        }
    }
}

#[tokio::test]
async fn limits_are_checked_before_the_data_comes() {
    async fn refusal(start: &[u8]) -> String {
        let frames = tokio_stream::iter([Ok(Bytes::copy_from_slice(start))]);
        let mut messages = decoder(frames.chain(tokio_stream::pending()), &Traffic::new(1 << 30));
        match messages.next().await {
            Err(error @ Error::InvalidArgument { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }
    let too_long = (MAX_MESSAGE_BYTES as u32 + 1).to_be_bytes();
    assert!(refusal(&[&[0][..], &too_long].concat()).await.contains("8388609 bytes"));
    assert!(refusal(&[1, 0, 0, 0, 0]).await.contains("compression flag 1"));
    assert!(refusal(&[7, 0, 0, 0, 0]).await.contains("compression flag 7"));
    let chunk = |bytes: usize| {
        let chunk = pb::Chunk { tensor: 1, offset: 0, data: vec![0; bytes].into() };
        framed(&pb::UpdateRequest { kind: Some(Kind::Chunk(chunk)) }.encode_to_vec())
    };
    assert!(refusal(&chunk(MAX_CHUNK_BYTES + 1)[..40]).await.starts_with("chunk.data: 4194305 bytes"));
    assert_eq!(read(vec![chunk(MAX_CHUNK_BYTES).into()]).await.error, None);
    let mut odd =
        pb::UpdateRequest::decode(&chunk(MAX_CHUNK_BYTES + 1)[PREFIX_BYTES..]).expect("a chunk").encode_to_vec();
    odd.extend([0x50, 1]);
    assert!(refusal(&framed(&odd)).await.starts_with("chunk.data: 4194305 bytes"));
}

#[tokio::test]
async fn a_stream_that_breaks_is_aborted() {
    let frames = [Ok(Bytes::from_static(&[0, 0])), Err(axum::Error::new("the client is gone"))];
    let mut messages = decoder(tokio_stream::iter(frames), &Traffic::new(1 << 30));
    let error = messages.next().await.expect_err("broken");
    assert!(matches!(&error, Error::Aborted(message) if message.contains("the client is gone")), "{error}");
}

#[tokio::test]
async fn a_message_that_never_ends_is_counted_and_given_back() {
    let traffic = Traffic::new(8 << 20);
    let manifest = vec![0x12; 3 << 20];
    let mut frames = vec![Bytes::from([&[0][..], &(5u32 << 20).to_be_bytes()].concat())];
    frames.extend(manifest.chunks(1 << 20).map(|frame| Bytes::from(frame.to_vec())));
    let mut messages = decoder(tokio_stream::iter(frames.into_iter().map(Ok)).chain(tokio_stream::pending()), &traffic);
    let late = tokio::time::timeout(Duration::from_millis(50), messages.next()).await;
    assert!(late.is_err(), "{late:?}");
    assert!(traffic.used() >= 3 << 20, "{} bytes", traffic.used());
    let mut second = decoder(tokio_stream::iter([Ok(Bytes::from(vec![0x12; 5 << 20]))]), &traffic);
    assert!(matches!(second.next().await, Err(Error::ResourceExhausted(_))));
    drop((messages, second));
    assert_eq!(traffic.used(), 0);
}

const IDLE_LIMIT: Duration = Duration::from_millis(400);

/// How long the decoder waits for `frames` before it gives the push up.
async fn given_up(frames: impl Stream<Item = Frame> + Send + 'static, activity: Activity) -> Duration {
    let started = std::time::Instant::now();
    let mut messages = UpdateMessages::new(frames, &Traffic::new(1 << 30), activity, IDLE_LIMIT);
    let read = tokio::time::timeout(Duration::from_secs(60), messages.next());
    match read.await.expect("it ends") {
        Err(Error::Aborted(why)) => assert!(why.contains("--update-idle-seconds"), "{why}"),
        other => panic!("{other:?}"),
    }
    started.elapsed()
}

/// A sender of frames, and the stream of what it sends.
fn channel() -> (tokio::sync::mpsc::Sender<Frame>, impl Stream<Item = Frame>) {
    let (sender, receiver) = tokio::sync::mpsc::channel(16);
    (sender, tokio_stream::wrappers::ReceiverStream::new(receiver))
}

#[tokio::test]
async fn a_push_that_sends_nothing_is_given_up() {
    assert!(given_up(tokio_stream::pending(), Activity::start()).await >= IDLE_LIMIT);
    // Frames without a byte are no sign of life.
    let (sender, frames) = channel();
    let sending = tokio::spawn(async move { while sender.send(Ok(Bytes::new())).await.is_ok() {} });
    given_up(frames, Activity::start()).await;
    sending.await.expect("it ends");
}

#[tokio::test]
async fn every_byte_gives_a_push_its_time_again() {
    let (sender, frames) = channel();
    let waiting = tokio::spawn(given_up(frames, Activity::start()));
    // The first byte comes in time whenever this task runs, because it lies in the channel from the start.
    sender.send(Ok(Bytes::from_static(&[0]))).await.expect("it listens");
    tokio::time::sleep(IDLE_LIMIT / 2).await;
    let second = std::time::Instant::now();
    let is_heard = sender.send(Ok(Bytes::from_static(&[0]))).await.is_ok();
    waiting.await.expect("no panic");
    assert!(!is_heard || second.elapsed() >= IDLE_LIMIT, "{:?}", second.elapsed());
}

#[tokio::test]
async fn a_push_is_not_idle_while_the_server_works_on_it() {
    let activity = Activity::start();
    let busy = activity.busy();
    let mut waiting = tokio::spawn(given_up(tokio_stream::pending(), activity.clone()));
    tokio::time::timeout(3 * IDLE_LIMIT, &mut waiting).await.expect_err("it waits");
    assert_eq!(activity.idle(), Duration::ZERO);
    drop(busy);
    waiting.await.expect("it ends");
}

fn post(path: &str, body: Body) -> Request {
    let request = Request::post(format!("/rollout.v1.Weights/{path}")).header("content-type", "application/grpc");
    request.body(body).expect("a request")
}

fn code(response: &Response) -> Code {
    Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code())
}

#[tokio::test]
async fn updates_have_a_reader_of_their_own_and_other_calls_do_not() {
    let (_stage, server, _commands) = open();
    let mut router = services(&server);
    for (path, expected) in
        [("Update", Code::InvalidArgument), ("ListParameters", Code::Ok), ("Updates", Code::Unimplemented)]
    {
        // For Update a commit; for other methods an empty request with an unknown field.
        let response = router.call(post(path, Body::from("\0\0\0\0\u{2}\"\0"))).await.expect("infallible");
        let status = Status::from_header_map(response.headers());
        assert_eq!(code(&response), expected, "{path}: {status:?}");
        if path == "Update" {
            assert!(status.expect("an error").message().starts_with("header: is missing"));
        }
    }
}

#[tokio::test]
async fn an_update_ends_at_its_deadline() {
    let (stage, server, _commands) = open();
    let body = Body::from_stream(tokio_stream::pending::<Frame>());
    let mut request = limited(());
    request.extensions_mut().insert(UpdateBody(Arc::new(SyncWrapper::new(body))));
    let update = receive(&server, request);
    let status = tokio::time::timeout(Duration::from_secs(10), update).await.expect("ends").expect_err("no message");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    tokio::time::timeout(Duration::from_secs(10), stage.drained()).await.expect("nothing runs");
}

#[tokio::test]
async fn only_so_many_updates_are_received_at_once() {
    let (_stage, server, _commands) = open();
    let mut router = services(&server);
    let mut update = || {
        let (sender, receiver) = tokio::sync::mpsc::channel::<Frame>(1);
        let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
        (sender, Box::pin(router.call(post("Update", body))))
    };
    let mut open: Vec<_> = (0..MAX_UPDATES).map(|_| update()).collect();
    for (_, call) in &mut open {
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let (_sender, rejected) = update();
    assert_eq!(code(&rejected.await.expect("infallible")), Code::ResourceExhausted);
    drop(open);
    let (sender, next) = update();
    drop(sender);
    assert_eq!(code(&next.await.expect("infallible")), Code::InvalidArgument);
}
