//! Texts of any length in every field that takes text: too long ones are refused with a short status that does not
//! repeat them.

use rollout_server::engine::Command;
use rollout_server::server::pb::{self, update_request::Kind};
use tonic::{Code, Status};

use super::harness::*;

/// Twice the longest text that any field may have, in bytes.
const LONG: usize = 2 << 20;
/// Longest status header in bytes that every client accepts.
const SHORT: usize = 2200;

async fn check<T>(field: &str, call: impl Future<Output = Result<T, Status>>) {
    let answer = tokio::time::timeout(PATIENCE, call).await;
    let status = answer.unwrap_or_else(|_| panic!("{field} was taken")).map(|_| ()).expect_err(field);
    assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status}");
    let (message, bytes) = (status.message(), status.message().len());
    assert!(bytes < SHORT && message.contains(field), "{field}: {bytes} bytes: {}", &message[..bytes.min(SHORT)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_text_in_a_request_is_refused_by_its_field() {
    let server = start().await;
    let mut client = server.rollout().await;
    let long = "x".repeat(LONG);
    let text = pb::Prompt { kind: Some(pb::prompt::Kind::Text(long.clone())), ..Default::default() };
    let message = |role: &str, content: &str| pb::ChatMessage { role: role.into(), content: content.into() };
    let chat = |message| pb::Prompt {
        kind: Some(pb::prompt::Kind::Chat(pb::Chat { messages: vec![message], ..Default::default() })),
        ..Default::default()
    };
    let sampling = pb::SamplingParams { stop: vec![long.clone()], ..Default::default() };
    for (field, request) in [
        ("request_id", pb::GenerateRequest { request_id: long.clone(), ..request() }),
        ("adapter", pb::GenerateRequest { adapter: long.clone(), ..request() }),
        ("prompts[0].text", pb::GenerateRequest { prompts: vec![text], ..request() }),
        ("prompts[0].chat", pb::GenerateRequest { prompts: vec![chat(message(&long, "x"))], ..request() }),
        ("prompts[0].chat", pb::GenerateRequest { prompts: vec![chat(message("user", &long))], ..request() }),
        ("sampling.stop", pb::GenerateRequest { sampling: Some(sampling), ..request() }),
    ] {
        check(field, client.generate(request)).await;
    }
    let sequences = vec![pb::TokenIds { ids: vec![1, 2] }];
    let score = pb::ScoreRequest { sequences, adapter: long.clone(), ..Default::default() };
    check("adapter", client.score(score)).await;
    let abort = |request_ids| pb::AbortRequest { request_ids, all: false };
    check("request_ids[1]", client.abort(abort(vec!["a".into(), long.clone()]))).await;
    check("request_ids", client.abort(abort(vec!["a".into(); 65_537]))).await;
    assert!(server.commands.try_recv().is_err(), "the engine has heard of it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_text_about_weights_is_refused_by_its_field() {
    let server = start().await;
    let mut client = server.weights().await;
    let long = "x".repeat(LONG);
    let checksum = pb::ChecksumRequest { names: vec!["a".into(), long.clone()] };
    check("names[1]", client.checksum(checksum)).await;
    let remove = pb::RemoveAdapterRequest { name: long.clone(), ..Default::default() };
    check("name", client.remove_adapter(remove)).await;

    let header = || pb::Header { kind: pb::UpdateKind::Lora.into(), ..Default::default() };
    let source = |kind| Some(pb::Source { kind: Some(kind) });
    let segment = pb::source::Kind::SharedMemory(pb::SharedMemory { name: long.clone() });
    let directory = pb::source::Kind::Directory(pb::Directory { path: long.clone() });
    let tensor = pb::Tensor { name: long.clone(), ..Default::default() };
    for (field, header) in [
        ("header.adapter", pb::Header { adapter: long.clone(), ..header() }),
        ("header.adapter_config", pb::Header { adapter_config: long.clone(), ..header() }),
        ("header.source.shared_memory.name", pb::Header { source: source(segment), ..header() }),
        ("header.source.directory.path", pb::Header { source: source(directory), ..header() }),
        ("tensors[0].name", pb::Header { tensors: vec![tensor], ..header() }),
    ] {
        let messages = vec![pb::UpdateRequest { kind: Some(Kind::Header(header)) }];
        check(field, client.update(tokio_stream::iter(messages))).await;
    }
    // Calls wake the engine when they end, whatever their result.
    assert!(server.commands.try_iter().all(|command| matches!(command, Command::Look)), "the engine has heard of it");
}
