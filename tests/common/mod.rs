//! A running engine on a fixture checkpoint, and requests to it, without the server.
#![allow(dead_code)] // each test binary uses its part

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use clap::Parser;
use rollout_server::config::Config;
use rollout_server::engine::{
    CancelFlag, Command, Completion, EngineHandle, Event, GenerateCommand, Kind, Status, Summary,
};
use rollout_server::startup::{self, Started};
use rollout_server::types::{SamplingParams, TokenId, TokenLogprobs};

/// No answer for this long is a hang.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// An engine that ends when this is dropped.
pub struct Engine {
    pub started: Option<Started>,
}

impl Engine {
    /// Starts on a fixture with further flags, e.g. `&["--tp", "2"]`.
    pub fn start(model: &str, flags: &[&str]) -> Self {
        Self::try_start(model, flags).unwrap_or_else(|e| panic!("{model} with {flags:?} did not start: {e}"))
    }

    pub fn try_start(model: &str, flags: &[&str]) -> rollout_server::error::Result<Self> {
        let model = fixture(model);
        // A small cache: the tests of one binary run at the same time.
        let base = ["rollout-server", "--model", model.to_str().unwrap(), "--mem-util", "0.2", "--threads", "2"];
        let has_cache = flags.contains(&"--kv-cache-bytes");
        let cache: &[&str] = if has_cache { &[] } else { &["--kv-cache-bytes", "64MiB"] };
        let config = Config::try_parse_from(base.iter().chain(cache).chain(flags)).unwrap();
        Ok(Self { started: Some(startup::start(&config)?) })
    }

    pub fn handle(&self) -> &EngineHandle {
        &self.started.as_ref().unwrap().engine
    }

    /// Sends a request and leaves its events to the caller.
    pub fn send(&self, request: Request) -> Running {
        let (sender, events) = channel();
        let cancel = CancelFlag::default();
        let command = GenerateCommand {
            request_id: request.id,
            prompts: request.prompts.into_iter().map(Arc::from).collect(),
            kind: request.kind,
            params: Arc::new(request.params),
            if_weight_version: request.if_weight_version,
            min_weight_version: request.min_weight_version,
            cancel: cancel.clone(),
            responder: Box::new(move |event| {
                let _ = sender.send(event);
            }),
        };
        self.handle().send(Command::Generate(Box::new(command))).unwrap();
        Running { events, cancel }
    }

    pub fn generate(&self, request: Request) -> Reply {
        self.send(request).wait()
    }

    pub fn status(&self) -> Status {
        let (sender, reply) = channel();
        let reply_to = Box::new(move |status| sender.send(status).unwrap());
        self.handle().send(Command::Status { reply: reply_to }).unwrap();
        reply.recv_timeout(PATIENCE).expect("the engine answers")
    }

    pub fn reset_prefix_cache(&self) -> usize {
        let (sender, reply) = channel();
        let reply_to = Box::new(move |blocks| sender.send(blocks).unwrap());
        self.handle().send(Command::ResetPrefixCache { reply: reply_to }).unwrap();
        reply.recv_timeout(PATIENCE).expect("the engine answers")
    }

    /// Waits until nothing runs, and checks that every block is free.
    pub fn assert_all_free(&self) {
        let status = self.status();
        assert_eq!(status.free_blocks, status.total_blocks, "{status:?}");
        assert_eq!((status.running_requests, status.running_samples, status.waiting_samples), (0, 0, 0));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(Started { engine, thread, .. }) = self.started.take() {
            let _ = engine.send(Command::Shutdown { grace: Duration::ZERO });
            let ended = thread.join().expect("the engine's thread does not panic");
            if !std::thread::panicking() {
                ended.expect("the engine ends well");
            }
        }
    }
}

/// A request in the making.
#[derive(Clone)]
pub struct Request {
    pub id: String,
    pub prompts: Vec<Vec<TokenId>>,
    pub kind: Kind,
    pub params: SamplingParams,
    pub if_weight_version: Option<u64>,
    pub min_weight_version: Option<u64>,
}

impl Request {
    /// `n` samples of each prompt with `max_tokens` tokens at temperature 1.
    pub fn generate(prompts: Vec<Vec<TokenId>>, n: u32, seed: u64, max_tokens: u32) -> Self {
        let kind = Kind::Generate { n, seed, prompt_logprobs: false, stream_tokens: false };
        Self::new(prompts, kind, SamplingParams { max_tokens, ..Default::default() })
    }

    pub fn score(prompts: Vec<Vec<TokenId>>) -> Self {
        Self::new(prompts, Kind::Score, SamplingParams::default())
    }

    fn new(prompts: Vec<Vec<TokenId>>, kind: Kind, params: SamplingParams) -> Self {
        let id = String::new();
        Self { id, prompts, kind, params, if_weight_version: None, min_weight_version: None }
    }

    /// With an id of its own; without one, requests must run one after the other.
    pub fn named(mut self, id: impl Into<String>) -> Self {
        self.id = id.into();
        self
    }

    pub fn params(mut self, params: SamplingParams) -> Self {
        self.params = params;
        self
    }
}

/// A request under way.
pub struct Running {
    pub events: Receiver<Event>,
    pub cancel: CancelFlag,
}

impl Running {
    /// Collects events up to the terminal one.
    pub fn wait(self) -> Reply {
        let mut reply = Reply::default();
        loop {
            match self.events.recv_timeout(PATIENCE).expect("the engine answers") {
                Event::Token { .. } => reply.streamed += 1,
                Event::PromptLogprobs { prompt_index, logprobs, .. } => {
                    reply.prompt_logprobs.push((prompt_index, logprobs))
                }
                Event::Completion(completion) => reply.completions.push(completion),
                Event::Done(summary) => reply.summary = Some(summary),
                Event::Failed(error) => reply.error = Some(error),
            }
            if reply.summary.is_some() || reply.error.is_some() {
                let more = self.events.recv_timeout(Duration::from_millis(1));
                assert!(more.is_err(), "an event after the terminal one: {more:?}");
                reply.completions.sort_by_key(|c| (c.prompt_index, c.sample_index));
                reply.prompt_logprobs.sort_by_key(|p| p.0);
                return reply;
            }
        }
    }
}

/// All that came back, completions in the order of prompts and samples.
#[derive(Default)]
pub struct Reply {
    pub completions: Vec<Completion>,
    pub prompt_logprobs: Vec<(u32, Vec<TokenLogprobs>)>,
    pub streamed: usize,
    pub summary: Option<Summary>,
    pub error: Option<rollout_server::error::Error>,
}

impl Reply {
    /// Tokens and the bits of both log-probabilities of each completion: what must be equal.
    pub fn bits(&self) -> Vec<Vec<(TokenId, u32, u32)>> {
        self.completions.iter().map(|c| bits(&c.tokens)).collect()
    }
}

pub fn bits(tokens: &[TokenLogprobs]) -> Vec<(TokenId, u32, u32)> {
    tokens.iter().map(|t| (t.token, t.raw.to_bits(), t.processed.to_bits())).collect()
}

/// `count` prompts of random lengths in `lengths` with tokens below `vocab`.
pub fn random_prompts(seed: u64, count: usize, lengths: std::ops::Range<usize>, vocab: u32) -> Vec<Vec<TokenId>> {
    use rand::{Rng, SeedableRng};
    println!("prompts from seed {seed}");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| (0..rng.random_range(lengths.clone())).map(|_| rng.random_range(0..vocab)).collect()).collect()
}
