//! Messages that arrive in pieces, stop half way, are malformed or too large; and the walk over a message compared with
//! prost.

use std::pin::Pin;
use std::task::Poll;

use axum::Router;
use axum::middleware::from_fn_with_state;
use prost::Message as _;
use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic::Status;
use tonic::codegen::Service as _;

use super::*;
use crate::server::grpc::tests::open;
use crate::server::pb::prompt::Kind as PromptKind;

const GENERATE: &str = "/rollout.v1.Rollout/Generate";
const LONG: Duration = Duration::from_secs(60);
/// The errors for an entry of a map that is not a message.
const ENTRIES: [&str; 2] =
    ["another wire type at sampling.logit_bias", "another wire type at prompts.sampling.logit_bias"];

fn schema() -> Schema {
    Schema::new(&[pb::DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET]).expect("the descriptors are whole")
}

fn decoded_bytes(schema: &Schema, message: &[u8]) -> Result<u64> {
    schema.decoded_bytes(schema.input_of(GENERATE).expect("it is a method"), message)
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&[0], &(message.len() as u32).to_be_bytes()[..], message].concat()
}

fn random_request(rng: &mut ChaCha8Rng) -> pb::GenerateRequest {
    let mut text = |most| (0..rng.random_range(0..most)).map(|_| rng.random_range(' '..'龜')).collect::<String>();
    let chat = pb::Chat {
        messages: vec![pb::ChatMessage { role: text(6), content: text(30) }; 3],
        messages_json: text(40),
        tools_json: text(40),
        documents_json: text(9),
        template_arguments_json: text(9),
        add_generation_prompt: Some(true),
        continue_final_message: true,
        chat_template: text(9),
    };
    let (text, stop) = (text(40), vec![text(5), text(5)]);
    let ids = (0..rng.random_range(0..50)).map(|_| rng.random::<u32>() >> rng.random_range(0..32)).collect();
    let kinds = [PromptKind::Tokens(pb::TokenIds { ids }), PromptKind::Text(text), PromptKind::Chat(chat)];
    let sampling = pb::SamplingParams {
        temperature: Some(0.5),
        logit_bias: (0..rng.random_range(0..20)).map(|i| (i, 1.0)).collect(),
        allowed_token_ids: vec![1, 2, 300],
        stop,
        seed: Some(rng.random()),
        ..Default::default()
    };
    pb::GenerateRequest {
        request_id: "a request".into(),
        prompts: kinds
            .into_iter()
            .map(|kind| pb::Prompt {
                kind: Some(kind),
                add_special_tokens: None,
                sampling: rng.random::<bool>().then(|| Box::new(sampling.clone())),
                ..Default::default()
            })
            .collect(),
        sampling: Some(sampling),
        return_text: rng.random(),
        min_weight_version: Some(3),
        ..Default::default()
    }
}

/// Bytes that prost's decoded request takes, by the capacities of its lists.
fn bytes_of(request: &pb::GenerateRequest) -> usize {
    let sampling = |s: &pb::SamplingParams| {
        let stop = s.stop.iter().map(String::capacity).sum::<usize>() + s.stop.capacity() * size_of::<String>();
        s.logit_bias.capacity() * 17 + s.allowed_token_ids.capacity() * 4 + stop
    };
    let own = |s: &pb::SamplingParams| size_of::<pb::SamplingParams>() + sampling(s);
    let content = |prompt: &pb::Prompt| match &prompt.kind {
        None => 0,
        Some(PromptKind::Tokens(tokens)) => tokens.ids.capacity() * 4,
        Some(PromptKind::Text(text)) => text.capacity(),
        Some(PromptKind::Chat(chat)) => {
            let texts: usize = chat.messages.iter().map(|m| m.role.capacity() + m.content.capacity()).sum();
            let json = [&chat.messages_json, &chat.tools_json, &chat.documents_json, &chat.template_arguments_json];
            let texts = texts + json.iter().map(|text| text.capacity()).sum::<usize>();
            texts + chat.messages.capacity() * size_of::<pb::ChatMessage>()
        }
    };
    let prompt = |prompt: &pb::Prompt| content(prompt) + prompt.sampling.as_ref().map_or(0, |s| own(s));
    let sampling = request.sampling.as_ref().map_or(0, sampling);
    let prompts = request.prompts.iter().map(prompt).sum::<usize>();
    let own = size_of::<pb::GenerateRequest>() + request.request_id.capacity();
    own + prompts + request.prompts.capacity() * size_of::<pb::Prompt>() + sampling
}

#[test]
fn the_walk_agrees_with_prost_and_counts_at_least_what_it_makes() {
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (schema, mut malformed) = (schema(), 0);
    for _ in 0..5000 {
        let mut bytes = random_request(&mut rng).encode_to_vec();
        for _ in 0..rng.random_range(0..3) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] = rng.random();
        }
        match (pb::GenerateRequest::decode(&bytes[..]), decoded_bytes(&schema, &bytes)) {
            (Ok(request), Ok(counted)) => {
                let made = bytes_of(&request) as u64;
                assert!(counted >= made, "{counted} bytes counted, {made} made of {bytes:?}");
            }
            (Err(_), Err(Error::InvalidArgument { .. })) => malformed += 1,
            // prost skips groups in fields that it does not know; no encoder of proto3 writes a group.
            (Ok(_), Err(error)) if error.to_string().contains("groups") => {}
            // prost takes a value for a map's entry whatever its wire type is.
            (Ok(_), Err(error)) if ENTRIES.iter().any(|entry| error.to_string().ends_with(entry)) => {}
            (theirs, ours) => panic!("prost: {theirs:?}, the walk: {ours:?}, of {bytes:?}"),
        }
    }
    assert!(malformed > 100, "only {malformed} were malformed");
}

#[test]
fn small_things_count_as_what_they_become() {
    let ids = |n| pb::TokenIds { ids: vec![1; n] };
    let prompt = |tokens| pb::Prompt { kind: Some(PromptKind::Tokens(tokens)), ..Default::default() };
    let many_ids = pb::GenerateRequest { prompts: vec![prompt(ids(1 << 20))], ..Default::default() };
    let counted = decoded_bytes(&schema(), &many_ids.encode_to_vec()).expect("well formed");
    assert!((4 << 20..10 << 20).contains(&counted), "{counted} for 4 MiB of ids in 1 MiB");
    let messages = vec![pb::ChatMessage::default(); 100_000];
    let chat =
        pb::Prompt { kind: Some(PromptKind::Chat(pb::Chat { messages, ..Default::default() })), ..Default::default() };
    let many_messages = pb::GenerateRequest { prompts: vec![chat], ..Default::default() };
    let counted = decoded_bytes(&schema(), &many_messages.encode_to_vec()).expect("well formed");
    assert!(counted >= 100_000 * 48, "{counted} for 100,000 messages of 2 bytes");
    let sampled = |sampling: Option<pb::SamplingParams>| {
        let prompt = pb::Prompt { sampling: sampling.map(Box::new), ..prompt(ids(1)) };
        let request = pb::GenerateRequest { prompts: vec![prompt; 1000], ..Default::default() };
        decoded_bytes(&schema(), &request.encode_to_vec()).expect("well formed") as usize
    };
    let (own, size) = (sampled(Some(Default::default())) - sampled(None), size_of::<pb::SamplingParams>());
    assert!((1000 * size..3000 * size).contains(&own), "{own} for 1,000 prompts with sampling of their own");
}

#[test]
fn a_malformed_field_is_named() {
    let refused = |bytes: &[u8]| decoded_bytes(&schema(), bytes).expect_err("malformed").to_string();
    let path = refused(&[0x12, 0x04, 0x12, 0x02, 0xff, 0xfe]);
    assert_eq!(path, "request: is not a rollout.v1.GenerateRequest: the text is not UTF-8 at prompts.text");
    for (bytes, says) in [
        (&[0x12, 0x05, 0x00][..], "a value is cut"),
        (&[0x07], "unknown wire type"),
        (&[0x02, 0x00], "number 0"),
        (&[0x13, 0x14], "groups"),
        (&[0x18], "a number is cut"),
        (&[0x1d, 0, 0, 0, 0], "another wire type at n"),
    ] {
        let message = refused(bytes);
        assert!(message.contains(says), "{message:?} does not say {says:?}");
    }
}

type Frame = std::result::Result<Bytes, &'static str>;

async fn gathered(traffic: &Traffic, frames: Vec<Vec<u8>>, max_bytes: usize) -> Result<(Bytes, Charge)> {
    let frames = frames.into_iter().map(|frame| Frame::Ok(Bytes::from(frame)));
    gather(tokio_stream::iter(frames), traffic, max_bytes, LONG).await
}

#[tokio::test]
async fn a_message_is_whole_however_it_is_cut() {
    let traffic = Traffic::new(1 << 20);
    let message: Vec<u8> = (0..=255).collect();
    for size in [1, 2, 3, 7, 100, 300] {
        let frames = framed(&message).chunks(size).map(<[u8]>::to_vec).collect();
        let (bytes, _charge) = gathered(&traffic, frames, 256).await.expect("whole");
        assert_eq!((&bytes[..], traffic.used()), (&framed(&message)[..], 261));
    }
    assert_eq!(traffic.used(), 0);
}

#[tokio::test]
async fn a_body_of_not_one_message_is_rejected() {
    let traffic = Traffic::new(1 << 20);
    let whole = framed(&[1, 2, 3]);
    for (frames, says) in [
        (vec![], "is missing"),
        (vec![whole[..4].to_vec()], "is missing"),
        (vec![whole[..6].to_vec()], "ends after 1 of its 3 bytes"),
        (vec![[&whole[..], &whole].concat()], "is followed by more"),
        (vec![whole.clone(), vec![0]], "is followed by more"),
        (vec![vec![1, 0, 0, 0, 0]], "compression flag 1"),
        (vec![framed(&[0; 257])[..5].to_vec()], "257 bytes are more than 256; split"),
    ] {
        let Err(Error::InvalidArgument { field, message }) = gathered(&traffic, frames, 256).await else {
            panic!("not refused: {says}");
        };
        assert!(field == "request" && message.contains(says), "{message:?} does not say {says:?}");
    }
    assert_eq!(traffic.used(), 0);
}

#[tokio::test]
async fn bytes_are_counted_as_they_come_and_given_back_with_the_call() {
    let traffic = Traffic::new(1 << 20);
    let frames = [framed(&[0; 5000])[..1005].to_vec(), vec![0; 2000]].map(|frame| Frame::Ok(Bytes::from(frame)));
    let endless = tokio_stream::iter(frames).chain(tokio_stream::pending());
    {
        let gathering = gather(endless, &traffic, 5000, LONG);
        tokio::pin!(gathering);
        assert!(futures_pending(gathering.as_mut()).await);
        assert_eq!(traffic.used(), 3005);
    }
    assert_eq!(traffic.used(), 0);
    let full = Traffic::new(4000);
    let frames = framed(&[0; 5000]).chunks(500).map(<[u8]>::to_vec).collect();
    let refused = gathered(&full, frames, 5000).await.err();
    assert!(matches!(refused, Some(Error::ResourceExhausted(_))), "{refused:?}");
    assert_eq!((full.used(), full.take_high_water()), (0, 3000));
}

/// Whether `work` is still pending when it is polled.
async fn futures_pending(work: Pin<&mut impl Future>) -> bool {
    let mut work = Some(work);
    std::future::poll_fn(|cx| {
        let work = work.take().expect("polled once");
        Poll::Ready(work.poll(cx).is_pending())
    })
    .await
}

#[tokio::test]
async fn a_message_that_stops_half_way_lets_go() {
    let traffic = Traffic::new(1 << 20);
    let frames = tokio_stream::iter([Frame::Ok(Bytes::from(framed(&[0; 100])[..50].to_vec()))]);
    let stopped = frames.chain(tokio_stream::pending());
    let late = gather(stopped, &traffic, 100, Duration::from_millis(20)).await.err();
    let Some(Error::DeadlineExceeded(message)) = late else { panic!("{late:?}") };
    assert!(message.contains("45 of 100 bytes are here"), "{message}");
    assert_eq!(traffic.used(), 0);
}

/// The number of bytes that reach the service behind the middleware, or the code with which the call is rejected.
async fn call(receiver: &MessageReceiver, path: &str, body: Vec<u8>) -> std::result::Result<usize, Code> {
    let echo = |request: Request| async move { Response::new(request.into_body()) };
    let mut router = Router::new().fallback(echo).layer(from_fn_with_state(receiver.clone(), receive_message));
    let request = Request::builder().uri(path).body(Body::from(body)).expect("a request");
    let response = router.call(request).await.expect("infallible");
    if let Some(status) = Status::from_header_map(response.headers()) {
        return Err(status.code());
    }
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("whole");
    Ok(body.len())
}

#[tokio::test]
async fn services_get_well_formed_messages_only() {
    let (_stage, server, _commands) = open();
    let receiver = MessageReceiver::new(&server).expect("the descriptors are whole");
    let message = random_request(&mut ChaCha8Rng::seed_from_u64(1)).encode_to_vec();
    assert_eq!(call(&receiver, GENERATE, framed(&message)).await, Ok(message.len() + 5));
    assert_eq!(call(&receiver, GENERATE, framed(&[])).await, Ok(5));
    assert_eq!(call(&receiver, GENERATE, framed(&[0x12])).await, Err(Code::InvalidArgument));
    let status = "/rollout.v1.Control/GetStatus";
    assert_eq!(call(&receiver, status, framed(&[])).await, Ok(5));
    assert_eq!(call(&receiver, status, framed(&vec![0; MAX_SMALL_BYTES + 1])).await, Err(Code::InvalidArgument));
    assert_eq!(call(&receiver, "/grpc.health.v1.Health/Check", framed(&[0x0a])).await, Err(Code::InvalidArgument));
    // A method that takes a stream of messages has its own decoder, and an unknown method has none.
    for path in ["/rollout.v1.Weights/Update", "/rollout.v1.Rollout/Nothing"] {
        assert_eq!(call(&receiver, path, vec![7; 3]).await, Ok(3));
    }
    let (_stage, starting) = ServerState::new(crate::observe::Observer::new().0);
    let receiver = MessageReceiver::new(&starting).expect("the descriptors are whole");
    assert_eq!(call(&receiver, GENERATE, framed(&message)).await, Ok(message.len() + 5), "the service rejects it");
    let endless = framed(&vec![0; 20 << 20]);
    assert_eq!(call(&receiver, GENERATE, endless).await, Err(Code::ResourceExhausted));
}
