//! Calls of Generate, Score and Abort: what the engine is told, and what the client gets.

use std::time::Duration;

use rollout_server::engine::{
    AbortReply, AbortTarget, Command, EngineStatus, Event, LifecycleStatus, PolicyScores, RequestKind, SleepLevel,
    Summary, WakeTags,
};
use rollout_server::error::Error;
use rollout_server::memory::{MemoryReport, MemoryUse};
use rollout_server::server::pb::{self, generate_response::Event as Message};
use rollout_server::types::{EngineStats, FinishReason, Prompt};
use tonic::{Code, Request};

use super::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_come_in_the_order_of_the_events_and_end_with_one_summary() {
    let server = start().await;
    let (mut stream, mut engine) =
        server.running(pb::GenerateRequest { n: Some(2), stream_tokens: true, ..request() }).await;
    assert_eq!(engine.request.prompts, [Prompt::from_tokens([1, 2, 3])]);
    assert!(matches!(engine.request.kind, RequestKind::Generate { n: 2, stream_tokens: true, .. }));

    // Each message arrives while the request still runs.
    (engine.client.responder)(token_event(1, 7));
    let Some(Message::Prompt(prompt)) = any(&mut stream).await else { panic!("not a prompt") };
    assert_eq!((prompt.prompt_index, prompt.token_ids), (0, vec![1, 2, 3]));
    let Some(Message::Delta(delta)) = next(&mut stream).await else { panic!("not a delta") };
    assert_eq!((delta.sample_index, delta.token_ids, delta.raw_logprobs), (1, vec![7], vec![-7.0]));
    (engine.client.responder)(completion_event(1, &[7, 99], FinishReason::Eos));
    let Some(Message::Completion(first)) = next(&mut stream).await else { panic!("not a completion") };
    assert_eq!((first.sample_index, first.finish_reason()), (1, pb::FinishReason::Eos));

    (engine.client.responder)(token_event(0, 8));
    (engine.client.responder)(completion_event(0, &[8], FinishReason::Length));
    (engine.client.responder)(done());
    assert!(matches!(next(&mut stream).await, Some(Message::Delta(_))));
    let Some(Message::Completion(second)) = next(&mut stream).await else { panic!("not a completion") };
    assert_eq!((second.sample_index, second.finish_reason()), (0, pb::FinishReason::Length));
    let Some(Message::Summary(summary)) = next(&mut stream).await else { panic!("not a summary") };
    assert_eq!((summary.request_id.as_str(), summary.completion_tokens), ("r", 2));
    assert_eq!(next(&mut stream).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_time_limit_asks_the_engine_for_what_there_is() {
    let server = start().await;
    let limited = |seconds| pb::GenerateRequest { time_limit_seconds: Some(seconds), ..request() };
    let (mut stream, mut engine) = server.running(limited(0.01)).await;
    eventually("the end of the time", || engine.client.cancel.is_expired()).await;
    assert!(matches!(server.command(), Command::Look) && !engine.client.cancel.is_cancelled());
    (engine.client.responder)(completion_event(0, &[7], FinishReason::Aborted));
    (engine.client.responder)(done());
    let Some(Message::Completion(partial)) = next(&mut stream).await else { panic!("not a completion") };
    assert_eq!((partial.token_ids.as_slice(), partial.finish_reason()), ([7].as_slice(), pb::FinishReason::Aborted));
    assert!(matches!(next(&mut stream).await, Some(Message::Summary(_))));
    drop(stream);
    assert!(matches!(server.command(), Command::Look));
    // A client that goes before is gone, and nothing is left that waits for the time.
    let (stream, engine) = server.running(limited(3600.0)).await;
    drop(stream);
    eventually("the cancel flag", || engine.client.cancel.is_cancelled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_follows_the_terminal_event() {
    let server = start().await;
    let (mut stream, mut engine) = server.running(request()).await;
    (engine.client.responder)(done());
    (engine.client.responder)(completion_event(0, &[1], FinishReason::Length));
    (engine.client.responder)(done());
    assert!(matches!(next(&mut stream).await, Some(Message::Summary(_))));
    assert_eq!(next(&mut stream).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_stream_cancels_the_work() {
    let server = start().await;
    let (mut stream, mut engine) = server.running(request()).await;
    (engine.client.responder)(token_event(0, 7));
    assert!(next(&mut stream).await.is_some());
    assert!(!engine.client.cancel.is_cancelled());
    drop(stream);
    eventually("the cancel flag", || engine.client.cancel.is_cancelled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_score_cancels_the_work() {
    let server = start().await;
    let mut client = server.rollout().await;
    let sequences = vec![pb::TokenIds { ids: vec![1, 2] }];
    let stream = client.score(pb::ScoreRequest { sequences, ..Default::default() }).await.expect("accepted");
    let engine = server.generate_command();
    assert!(!engine.client.cancel.is_cancelled());
    drop(stream);
    eventually("the cancel flag", || engine.client.cancel.is_cancelled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_the_stream_and_the_work() {
    let server = start().await;
    let mut limited = Request::new(request());
    limited.set_timeout(Duration::from_secs(3));
    let mut stream = server.rollout().await.generate(limited).await.expect("accepted").into_inner();
    let mut engine = server.generate_command();
    (engine.client.responder)(completion_event(0, &[7], FinishReason::Length));
    assert!(matches!(next(&mut stream).await, Some(Message::Completion(_))));
    let status = failure(&mut stream).await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    eventually("the cancel flag", || engine.client.cancel.is_cancelled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_deadline_is_refused() {
    let server = start().await;
    let mut wrong = Request::new(request());
    wrong.metadata_mut().insert("grpc-timeout", "soon".parse().expect("a header value"));
    let status = server.rollout().await.generate(wrong).await.expect_err("refused");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("grpc-timeout"), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_request_names_its_field_and_never_reaches_the_engine() {
    let server = start().await;
    let wrong = pb::GenerateRequest { prompts: vec![prompt(&[1]), prompt(&[5, 100])], ..request() };
    let status = server.rollout().await.generate(wrong).await.expect_err("refused");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "prompts[1].tokens.ids[1]: 100 is not below the vocabulary size 100");
    assert!(server.commands.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_request_is_parsed_and_an_oversized_one_refused() {
    let server = start().await;
    let large = |prompts| pb::GenerateRequest { prompts: vec![prompt(&[1; 31]); prompts], ..request() };
    let (_stream, engine) = server.running(large(60_000)).await;
    assert_eq!(engine.request.prompts.len(), 60_000);

    let text = pb::prompt::Kind::Text("a".repeat((64 << 20) + 1));
    let oversized =
        pb::GenerateRequest { prompts: vec![pb::Prompt { kind: Some(text), ..Default::default() }], ..request() };
    let status = server.rollout().await.generate(oversized).await.expect_err("refused");
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().starts_with("request: ") && status.message().contains("67108864"), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_engine_refuses_is_the_status() {
    let server = start().await;
    let (mut stream, mut engine) = server.running(request()).await;
    (engine.client.responder)(Event::Failed(Error::AlreadyExists("request \"r\" is running".into())));
    let status = failure(&mut stream).await;
    assert_eq!((status.code(), status.message()), (Code::AlreadyExists, "request \"r\" is running"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_resource_exhausted() {
    let server = start_with_queue(1).await;
    let mut client = server.rollout().await;
    let _first = client.generate(request()).await.expect("fits in the queue");
    let status = client.generate(request()).await.expect_err("does not fit");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    // The engine catches up, and the next command fits into the queue. The command is kept alive, because dropping it
    // would end the first stream, whose cancel would take the place in the queue.
    let _taken = server.generate_command();
    client.generate(request()).await.expect("fits again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_engine_is_unavailable() {
    let mut server = start().await;
    let (mut stream, engine) = server.running(request()).await;
    drop(engine);
    assert_eq!(failure(&mut stream).await.code(), Code::Unavailable);

    server.commands = std::sync::mpsc::sync_channel(1).1;
    let status = server.rollout().await.generate(request()).await.expect_err("nobody there");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    let status = server.control().await.get_status(pb::GetStatusRequest {}).await.expect_err("nobody there");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scores_come_as_they_are_computed() {
    let server = start().await;
    let mut client = server.rollout().await;
    let sequences = vec![pb::TokenIds { ids: vec![1, 2, 3] }, pb::TokenIds { ids: vec![4] }];
    let sent = pb::ScoreRequest { sequences, min_weight_version: Some(2), ..Default::default() };
    let mut stream = client.score(sent).await.expect("accepted").into_inner();
    let mut engine = server.generate_command();
    assert_eq!((engine.request.kind, engine.request.min_weight_version), (RequestKind::Score, Some(2)));
    let scored = |prompt_index, ids: &[u32]| Event::PromptDone {
        prompt_index,
        logprobs: Some(ids.iter().map(|&id| token(id)).collect()),
        routing: Vec::new(),
        weight_version: 2,
        scores: PolicyScores::default(),
    };
    (engine.client.responder)(scored(1, &[]));
    let first = stream.message().await.expect("no error").expect("a score");
    assert_eq!((first.sequence_index, first.score.expect("set").raw_logprobs.len()), (1, 1));
    (engine.client.responder)(scored(0, &[2, 3]));
    (engine.client.responder)(Event::Done(Summary::default()));
    let second = stream.message().await.expect("no error").expect("a score");
    let score = second.score.expect("set");
    assert_eq!((second.sequence_index, second.start, score.weight_version), (0, 0, 2));
    assert!(score.raw_logprobs[0].is_nan());
    assert_eq!(score.raw_logprobs[1..], [-2.0, -3.0]);
    assert!(stream.message().await.expect("no error").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aborted_score_is_aborted_and_one_cut_by_the_end_unavailable() {
    let server = start().await;
    let mut client = server.rollout().await;
    let sequences = vec![pb::TokenIds { ids: vec![1, 2, 3] }];
    let sent = pb::ScoreRequest { sequences, ..Default::default() };
    for code in [Code::Aborted, Code::Unavailable] {
        let mut stream = client.score(sent.clone()).await.expect("accepted").into_inner();
        let mut engine = server.generate_command();
        if code == Code::Unavailable {
            server.shutdown.order();
            assert!(matches!(server.command(), Command::Shutdown { .. }));
        }
        (engine.client.responder)(Event::Done(Summary::default()));
        let status = stream.message().await.expect_err("not scored");
        assert_eq!(status.code(), code, "{status}");
        drop(stream);
        // A stream wakes the engine when it ends.
        assert!(matches!(server.command(), Command::Look));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_reader_has_not_taken_is_in_the_backlog() {
    let server = start().await;
    let (mut stream, mut engine) = server.running(request()).await;
    let mut sent = 0;
    while !engine.client.backlog.is_full() {
        (engine.client.responder)(token_event(0, 7));
        sent += 1;
        assert!(sent < 10_000_000, "a reader that does not read is never full");
    }
    // The engine holds the request back, and is woken when the reader has caught up.
    while sent > 0 {
        assert!(next(&mut stream).await.is_some());
        sent -= 1;
    }
    assert!(matches!(server.command(), Command::Look));
    assert!(!engine.client.backlog.is_full());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_is_passed_on_and_partial_completions_are_delivered() {
    let server = start().await;
    let (mut stream, mut engine) = server.running(request()).await;
    let mut client = server.rollout().await;
    let ids = vec!["r".to_owned(), "other".to_owned()];
    let sent = pb::AbortRequest { request_ids: ids.clone(), all: false };
    let call = tokio::spawn(async move { client.abort(sent).await });
    let Command::Abort { target, owner: None, reply } = server.command() else { panic!("not an Abort") };
    assert_eq!(target, AbortTarget::Requests(ids));
    (engine.client.responder)(completion_event(0, &[7], FinishReason::Aborted));
    (engine.client.responder)(done());
    reply(AbortReply { aborted: vec!["r".into()], unknown: vec!["other".into()] });
    let answer = call.await.expect("no panic").expect("aborted").into_inner();
    assert_eq!((answer.aborted, answer.unknown), (vec!["r".to_owned()], vec!["other".to_owned()]));
    let Some(Message::Completion(partial)) = next(&mut stream).await else { panic!("not a completion") };
    assert_eq!((partial.token_ids.as_slice(), partial.finish_reason()), ([7].as_slice(), pb::FinishReason::Aborted));
    assert!(matches!(next(&mut stream).await, Some(Message::Summary(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_tells_what_it_was_given() {
    let server = start().await;
    let mut client = server.control().await;
    let info = client.get_info(pb::GetInfoRequest {}).await.expect("info").into_inner();
    assert_eq!((info.model.as_str(), info.dtype.as_str(), info.block_size), ("fake", "float32", 16));
    assert_eq!((info.vocab_size, info.max_model_len, info.eos_token_ids), (100, 32, vec![99]));
    assert!(!info.has_tokenizer && !info.has_chat_template && !info.server_version.is_empty());

    let mut asking = client.clone();
    let call = tokio::spawn(async move { asking.get_status(pb::GetStatusRequest {}).await });
    let Command::Status { reply } = server.command() else { panic!("not a Status") };
    let entries = vec![(MemoryUse::Weights, 300), (MemoryUse::KvCache, 100)];
    reply(EngineStatus {
        lifecycle: LifecycleStatus::Asleep {
            level: SleepLevel::Two,
            resident: WakeTags { weights: true, kv_cache: false },
            pending_update: true,
        },
        memory: MemoryReport { total: 1000, ceiling: 500, entries },
        traffic_bytes: 17,
        stats: EngineStats {
            weight_version: 7,
            total_blocks: 9,
            free_blocks: 8,
            preemptions: 3,
            drafted_tokens: 6,
            accepted_tokens: 5,
            held_requests: 2,
            updates: 4,
            ..Default::default()
        },
        ..Default::default()
    });
    let status = call.await.expect("no panic").expect("status").into_inner();
    assert_eq!((status.lifecycle(), status.weight_version), (pb::Lifecycle::Asleep, 7));
    let asleep = status.asleep.clone().expect("it sleeps");
    assert_eq!((asleep.level(), asleep.pending_update), (pb::SleepLevel::SleepLevel2, true));
    assert_eq!(asleep.resident().collect::<Vec<_>>(), [pb::MemoryTag::Weights]);
    assert_eq!((status.held_requests, status.updating, status.updates), (2, false, 4));
    assert_eq!((status.total_blocks, status.free_blocks, status.preemptions), (9, 8, 3));
    assert_eq!((status.drafted_tokens, status.accepted_tokens), (6, 5));
    let memory = status.memory.expect("always there");
    assert_eq!((memory.total_bytes, memory.ceiling_bytes, memory.traffic_bytes), (1000, 500, 17));
    assert!(memory.resident_bytes > 1 << 20, "{}", memory.resident_bytes);
    let entries: Vec<_> = memory.entries.iter().map(|e| (e.name.as_str(), e.bytes)).collect();
    assert_eq!(entries, [("weights", 300), ("kv_cache", 100)]);
    assert!(status.uptime_seconds > 0.0);

    let call = tokio::spawn(async move { client.reset_prefix_cache(pb::ResetPrefixCacheRequest {}).await });
    let Command::ResetPrefixCache { reply } = server.command() else { panic!("not a reset") };
    reply(Ok(6));
    assert_eq!(call.await.expect("no panic").expect("reset").into_inner().blocks, 6);
}
