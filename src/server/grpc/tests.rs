//! Deadlines of calls with a single answer. Without a real channel, because a client's own timer would race with ours.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use tokio_stream::StreamExt as _;
use tonic::{Code, Request};

use super::control::ControlService;
use super::rollout::RolloutService;
use crate::comm::Trainers;
use crate::engine::{Command, EngineHandle, EngineStatus};
use crate::memory::Traffic;
use crate::observe::Observer;
use crate::server::calls::Deadline;
use crate::server::pb::{self, control_server::Control as _, rollout_server::Rollout as _};
use crate::server::state::{Stage, StageSetter};
use crate::server::{ModelFacts, ServerState, ServingContext};
use crate::types::EngineStats;
use crate::weights::{Dtype, Parameters};

/// A server that serves, and the engine's command queue, which no thread reads.
pub(super) fn open() -> (StageSetter, ServerState, Receiver<Command>) {
    let (sender, commands) = sync_channel(16);
    let model = ModelFacts { vocab_size: 100, max_model_len: 8, eos_token_ids: vec![99], ..Default::default() };
    let (stage, server) = ServerState::new(Observer::new().0);
    stage.set(Stage::Serving(Arc::new(ServingContext {
        model: Arc::new(model),
        info: pb::GetInfoResponse::default(),
        engine: EngineHandle::new(sender),
        metrics: Arc::default(),
        traffic: Traffic::new(1 << 30),
        parameters: Arc::new(Parameters::new(Vec::new(), Dtype::F32, 1, false)),
        sources: Arc::default(),
        adapters_dir: None,
        update_idle: Duration::from_secs(3600),
        liveness: Duration::from_secs(3600),
        trainers: Trainers::default(),
        forces_usage: false,
        reports_times: false,
        reports_prompt_details: false,
        writes_token_ids: false,
    })));
    (stage, server, commands)
}

/// A request with `message` and a deadline in 50 ms.
pub(super) fn limited<M>(message: M) -> Request<M> {
    let mut request = Request::new(message);
    let at = tokio::time::Instant::now() + Duration::from_millis(50);
    request.extensions_mut().insert(Deadline::new(Some(at), &ServerState::new(Observer::new().0).1));
    request
}

/// The result of `work`; fails if it hangs.
async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(10), work).await.expect("does not hang")
}

#[tokio::test]
async fn a_score_past_its_deadline_is_cancelled() {
    let (stage, server, commands) = open();
    let sequences = vec![pb::TokenIds { ids: vec![1, 2] }];
    let request = limited(pb::ScoreRequest { sequences, ..Default::default() });
    let mut stream = in_time(RolloutService::new(server).score(request)).await.expect("accepted").into_inner();
    let status = in_time(stream.next()).await.expect("an end").expect_err("no answer");
    drop(stream);
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    let Ok(Command::Generate(command)) = commands.try_recv() else { panic!("not a request") };
    assert!(command.client.cancel.is_cancelled());
    in_time(stage.drained()).await;
}

#[tokio::test]
async fn questions_do_not_outlive_their_deadline() {
    let (_stage, server, _commands) = open();
    let control = ControlService::new(server.clone());
    let status = in_time(control.get_status(limited(pb::GetStatusRequest {}))).await.expect_err("no answer");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    let reset = limited(pb::ResetPrefixCacheRequest {});
    let status = in_time(control.reset_prefix_cache(reset)).await.expect_err("no answer");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    let abort = limited(pb::AbortRequest { all: true, ..Default::default() });
    let status = in_time(RolloutService::new(server).abort(abort)).await.expect_err("no answer");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
}

#[tokio::test]
async fn an_engine_that_ends_by_itself_ends_what_waits_for_the_server() {
    let (stage, server, _commands) = open();
    let context = server.context().expect("it serves");
    let waits = tokio::spawn({
        let server = server.clone();
        async move { server.ending().await }
    });
    tokio::task::yield_now().await;
    assert!(!server.is_ending());
    // As `serve` does, without a moment between the two.
    stage.set(Stage::Ending(context.clone()));
    stage.set(Stage::Ended(context));
    in_time(waits).await.expect("it returns");
    assert!(server.is_ending());
}

#[tokio::test]
async fn a_refused_request_is_not_running() {
    let (stage, server, commands) = open();
    let wrong = Request::new(pb::GenerateRequest::default());
    assert!(RolloutService::new(server.clone()).generate(wrong).await.is_err());
    in_time(stage.drained()).await;
    drop(commands);
    let prompts =
        vec![pb::Prompt { kind: Some(pb::prompt::Kind::Tokens(pb::TokenIds { ids: vec![1] })), ..Default::default() }];
    let request = Request::new(pb::GenerateRequest { prompts, ..Default::default() });
    assert!(RolloutService::new(server).generate(request).await.is_err());
    in_time(stage.drained()).await;
}

#[tokio::test]
async fn the_status_counts_panics_of_calls_and_of_the_engine() {
    let (_stage, server, commands) = open();
    let _ = server.panics.catch(|| panic!("a call"));
    let engine = std::thread::spawn(move || {
        let Ok(Command::Status { reply }) = commands.recv() else { panic!("not a question") };
        let stats = EngineStats { internal_errors: 2, ..Default::default() };
        reply(EngineStatus { stats, ..Default::default() });
    });
    let status = in_time(ControlService::new(server).get_status(Request::new(pb::GetStatusRequest {}))).await;
    assert_eq!(status.expect("answered").get_ref().internal_errors, 3);
    engine.join().expect("asked once");
}
