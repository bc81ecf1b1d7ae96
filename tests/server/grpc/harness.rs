//! A server on a loopback port whose engine is the test itself, which takes the commands and sends the events.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use rollout_server::comm::Trainers;
use rollout_server::engine::{Command, Completion, EngineHandle, Event, GenerateCommand, PolicyScores, Summary};
use rollout_server::error::Result;
use rollout_server::memory::Traffic;
use rollout_server::observe::Observer;
use rollout_server::server::pb::control_client::ControlClient;
use rollout_server::server::pb::rollout_client::RolloutClient;
use rollout_server::server::pb::weights_client::WeightsClient;
use rollout_server::server::pb::{self, generate_response::Event as Message};
use rollout_server::server::{
    Bound, Ended, ModelFacts, SecurityConfig, ServerConfig, ServingContext, ShutdownHandle, serve, shutdown_channel,
};
use rollout_server::types::{FinishReason, TokenLogprobs};
use rollout_server::weights::{Dtype, ParamSpec, Parameters, ShardRule};
use tonic::transport::Channel;

/// Longest wait for anything; a test that waits longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Harness {
    pub url: String,
    pub commands: Receiver<Command>,
    pub shutdown: ShutdownHandle,
    pub server: tokio::task::JoinHandle<Result<Ended>>,
}

pub fn config(port: u16) -> ServerConfig {
    ServerConfig {
        host: "127.0.0.1".into(),
        port,
        http_port: None,
        max_connections: 64,
        shutdown_grace: Duration::from_secs(60),
        security: SecurityConfig::default(),
        lora_modules: Vec::new(),
    }
}

/// The serving context of a model with vocabulary 100, context 32, token 99 as the end of a sequence, no tokenizer, and
/// two parameters.
pub fn context(engine: EngineHandle) -> ServingContext {
    let model = ModelFacts {
        names: vec!["fake".into()],
        root: "fake".into(),
        vocab_size: 100,
        max_model_len: 32,
        eos_token_ids: vec![99],
        ..ModelFacts::default()
    };
    let info =
        pb::GetInfoResponse { model: "fake".into(), dtype: "float32".into(), block_size: 16, ..Default::default() };
    let specs = vec![
        ParamSpec::new("model.norm.weight", vec![4], ShardRule::Replicated),
        ParamSpec::new("lm_head.weight", vec![6, 4], ShardRule::Rows),
    ];
    let parameters = Arc::new(Parameters::new(specs, Dtype::F32, 1, false));
    let traffic = Traffic::new(1 << 30);
    let update_idle = Duration::from_secs(3600);
    let (model, sources, trainers) = (Arc::new(model), Arc::default(), Trainers::default());
    ServingContext {
        model,
        info,
        engine,
        metrics: Arc::default(),
        traffic,
        parameters,
        sources,
        adapters_dir: None,
        update_idle,
        liveness: update_idle,
        trainers,
        forces_usage: false,
        reports_times: false,
        reports_prompt_details: false,
        writes_token_ids: false,
    }
}

/// Starts a server whose command queue holds `queue` commands.
pub async fn start_with_queue(queue: usize) -> Harness {
    start_with(queue, Duration::from_secs(3600)).await
}

/// Starts a server that gives up pushes which have sent nothing for `update_idle`.
pub async fn start_with(queue: usize, update_idle: Duration) -> Harness {
    let (sender, commands) = sync_channel(queue);
    let (shutdown, orders) = shutdown_channel();
    let bound = Bound::new(&config(0)).expect("a free port");
    let url = format!("http://{}", bound.address());
    let server = tokio::spawn(serve(
        bound,
        Observer::new().0,
        std::future::ready(Ok(ServingContext { update_idle, ..context(EngineHandle::new(sender)) })),
        orders,
    ));
    let harness = Harness { url, commands, shutdown, server };
    harness.serves().await;
    harness
}

pub async fn start() -> Harness {
    start_with_queue(16).await
}

impl Harness {
    /// Waits until calls are let in. An order to end that comes earlier would end the start.
    async fn serves(&self) {
        let mut control = self.control().await;
        let started = Instant::now();
        while let Err(status) = control.get_info(pb::GetInfoRequest {}).await {
            assert!(status.code() == tonic::Code::Unavailable && started.elapsed() < PATIENCE, "{status}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub async fn channel(&self) -> Channel {
        Channel::from_shared(self.url.clone()).expect("a URL").connect().await.expect("the server listens")
    }

    pub async fn rollout(&self) -> RolloutClient<Channel> {
        RolloutClient::new(self.channel().await)
    }

    pub async fn weights(&self) -> WeightsClient<Channel> {
        WeightsClient::new(self.channel().await)
    }

    pub async fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel().await)
    }

    /// The next command to the engine. Blocks the test's own thread; the server runs on the runtime's workers.
    pub fn command(&self) -> Command {
        self.commands.recv_timeout(PATIENCE).expect("a command for the engine")
    }

    pub fn generate_command(&self) -> GenerateCommand {
        match self.command() {
            Command::Generate(command) => *command,
            _ => panic!("not a Generate"),
        }
    }

    /// Starts a request: returns the stream that the client reads and the command that the engine got.
    pub async fn running(
        &self,
        request: pb::GenerateRequest,
    ) -> (tonic::Streaming<pb::GenerateResponse>, GenerateCommand) {
        let mut client = self.rollout().await;
        let stream = client.generate(request).await.expect("accepted").into_inner();
        (stream, self.generate_command())
    }
}

pub fn prompt(ids: &[u32]) -> pb::Prompt {
    pb::Prompt { kind: Some(pb::prompt::Kind::Tokens(pb::TokenIds { ids: ids.to_vec() })), ..Default::default() }
}

pub fn request() -> pb::GenerateRequest {
    pb::GenerateRequest { request_id: "r".into(), prompts: vec![prompt(&[1, 2, 3])], ..Default::default() }
}

pub fn token(id: u32) -> TokenLogprobs {
    TokenLogprobs { token: id, raw: -(id as f32), processed: -0.5, top: Vec::new(), rank: 0, returned: None }
}

pub fn token_event(sample_index: u32, id: u32) -> Event {
    Event::Token { prompt_index: 0, sample_index, logprobs: token(id), text: None, is_last: false }
}

pub fn completion_event(sample_index: u32, ids: &[u32], finish_reason: FinishReason) -> Event {
    Event::Completion(Completion {
        prompt_index: 0,
        sample_index,
        tokens: ids.iter().map(|&id| token(id)).collect(),
        finish_reason,
        text: None,
        weight_versions: vec![(0, 0, ids.len() as u32)],
        seed: 5,
        cached_tokens: 0,
        routing: Vec::new(),
        scores: PolicyScores::default(),
    })
}

pub fn done() -> Event {
    Event::Done(Summary { prompt_tokens: 3, cached_tokens: 0, completion_tokens: 2, seconds: 0.1, times: None })
}

/// The next message of a stream, but for the prompts that are sent back; None at its end.
pub async fn next(stream: &mut tonic::Streaming<pb::GenerateResponse>) -> Option<Message> {
    loop {
        match any(stream).await {
            Some(Message::Prompt(_)) => {}
            other => return other,
        }
    }
}

/// The next message of a stream; None at its end.
pub async fn any(stream: &mut tonic::Streaming<pb::GenerateResponse>) -> Option<Message> {
    let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("a message or the end in time");
    message.expect("no error").map(|m| m.event.expect("a message has an event"))
}

/// The error with which a stream ends.
pub async fn failure(stream: &mut tonic::Streaming<pb::GenerateResponse>) -> tonic::Status {
    let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("an error in time");
    message.expect_err("an error")
}

/// Waits until `holds`, for conditions that nothing signals.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what} did not come to hold");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
