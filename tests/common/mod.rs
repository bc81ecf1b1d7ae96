//! Runs an engine on a fixture checkpoint, without the server, and sends it requests and pushes.
#![allow(dead_code, unused_imports)] // each test binary uses a part of this module

pub mod images;
mod machine;
mod policy;
mod request;
mod weights;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use clap::Parser;
pub use machine::{fixture, kernels, orders, path_of, recorded_routing, rounds_activations};
pub use policy::{Bits, FAMILIES, check_pushes_and_sleep, push_in_place};
pub use request::Request;
use rollout_server::config::Config;
use rollout_server::engine::{
    Activity, AdapterTarget, CancelFlag, Command, Completion, DrainMode, EngineHandle, EngineStatus, Event,
    GenerateCommand, LifecycleStatus, PolicyScores, PromptSampling, RequestClient, RequestKind, RunningPolicy,
    SleepLevel, SleepReply, Summary, UpdateReply, UpdateSender, ValidRequest, WakeTags,
};
use rollout_server::error::Result;
use rollout_server::grammar::Grammar;
use rollout_server::memory::Backlog;
use rollout_server::observe::Observer;
use rollout_server::server::ServingContext;
use rollout_server::startup::{self, EngineThread};
use rollout_server::types::{ForcedRouting, Picture, Prompt, SamplingParams, Tenant, TokenId, TokenLogprobs};
use rollout_server::weights::{
    DeclaredPush, Dtype, Parameters, Source, Sources, TensorEntry, UpdateHeader, UpdateKind, VerifiedPush,
};
use safetensors::tensor::TensorView;
pub use weights::{StateDict, random_weights, to_bytes, with_fused_experts, write_checkpoint};

/// Longest wait for an answer; a longer one is a hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running engine, which is shut down on drop.
pub struct Engine {
    pub started: Option<(ServingContext, EngineThread)>,
}

impl Engine {
    /// Starts an engine on a fixture with further flags, e.g. `&["--tp", "2"]`.
    pub fn start(model: &str, flags: &[&str]) -> Self {
        Self::try_start(model, flags).unwrap_or_else(|e| panic!("{model} with {flags:?} did not start: {e}"))
    }

    pub fn try_start(model: &str, flags: &[&str]) -> Result<Self> {
        Self::try_start_at(&fixture(model), flags)
    }

    /// Starts an engine on the checkpoint at `model`.
    pub fn try_start_at(model: &Path, flags: &[&str]) -> Result<Self> {
        // With a small cache, as the tests of one binary run at the same time.
        let base = ["rollout-server", "--model", model.to_str().unwrap(), "--mem-util", "0.2", "--threads", "2"];
        let has_cache = flags.contains(&"--kv-cache-bytes");
        let cache: &[&str] = if has_cache { &[] } else { &["--kv-cache-bytes", "64MiB"] };
        let config = Config::try_parse_from(base.iter().chain(cache).chain(flags)).unwrap();
        let (observer, recorder) = Observer::new();
        Ok(Self { started: Some(startup::start(&config, observer, recorder)?) })
    }

    pub fn context(&self) -> &ServingContext {
        &self.started.as_ref().unwrap().0
    }

    pub fn handle(&self) -> &EngineHandle {
        &self.context().engine
    }

    /// Sends a request and leaves its events to the caller.
    pub fn send(&self, request: Request) -> Running {
        let (sender, events) = channel();
        let cancel = CancelFlag::default();
        let traffic = &self.context().traffic;
        let (mut rows, mut images) = (request.rows.into_iter(), request.images.into_iter());
        let mut routing = request.routing.into_iter();
        let format = self.context().model.routing.as_ref().map(|rules| rules.format);
        let prompt = |tokens: Vec<TokenId>| Prompt {
            logprob_token_ids: rows.next().unwrap_or_default().into(),
            routing: routing.next().flatten(),
            ..Prompt::with_images(tokens, images.next().unwrap_or_default())
        };
        let request = ValidRequest {
            request_id: request.id,
            prompts: request.prompts.into_iter().map(prompt).collect(),
            kind: request.kind,
            params: Arc::new(request.params),
            grammar: request.grammar,
            prompt_sampling: request.own,
            policies: request.policies,
            top_arrays: None,
            return_routing: format.filter(|_| request.return_routing),
            adapter: request.adapter,
            if_weight_version: request.if_weight_version,
            min_weight_version: request.min_weight_version,
            time_limit: None,
        };
        let client = RequestClient {
            owner: None,
            tenant: Tenant::default(),
            arrived: std::time::Instant::now(),
            waits_for_resume: true,
            cancel: cancel.clone(),
            responder: Box::new(move |event| {
                let _ = sender.send(event);
            }),
            adapter_reader: None,
            backlog: Backlog::new(traffic),
            charge: traffic.charge_always(0),
        };
        self.handle().send(Command::Generate(Box::new(GenerateCommand { request, client }))).unwrap();
        Running { events, cancel }
    }

    pub fn generate(&self, request: Request) -> Reply {
        self.send(request).wait()
    }

    pub fn status(&self) -> EngineStatus {
        self.ask(|reply| Command::Status { reply })
    }

    pub fn reset_prefix_cache(&self) -> usize {
        self.ask(|reply| Command::ResetPrefixCache { reply }).expect("it is awake")
    }

    /// Waits until no request runs, and checks that every block is free.
    pub fn assert_all_free(&self) {
        let status = self.status();
        assert_eq!(status.stats.free_blocks, status.stats.total_blocks, "{status:?}");
        assert_eq!(
            (status.stats.accepted_requests, status.stats.running_samples, status.stats.waiting_samples),
            (0, 0, 0)
        );
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some((ServingContext { engine, .. }, thread)) = self.started.take() {
            let _ = engine.send(Command::Shutdown { grace: Duration::ZERO });
            let ended = thread.join().expect("the engine's thread does not panic");
            if !std::thread::panicking() {
                ended.expect("the engine ends well");
            }
        }
    }
}

/// A picture of a prompt, its placeholders, and the rows and columns of its tokens.
pub type PlacedPicture = (Picture, Range<usize>, [usize; 2]);

/// A request that is running.
pub struct Running {
    pub events: Receiver<Event>,
    pub cancel: CancelFlag,
}

impl Running {
    /// Collects the request's events up to the terminal one.
    pub fn wait(self) -> Reply {
        let mut reply = Reply::default();
        loop {
            match self.events.recv_timeout(PATIENCE).expect("the engine answers") {
                Event::Token { prompt_index, sample_index, text, .. } => {
                    reply.streamed += 1;
                    reply.add_text(prompt_index, sample_index, &text.unwrap_or_default());
                }
                Event::Text { prompt_index, sample_index, text } => {
                    assert!(!text.is_empty());
                    reply.add_text(prompt_index, sample_index, &text);
                }
                Event::PromptDone { prompt_index, logprobs, routing, scores, .. } => {
                    reply.scores.push((prompt_index, scores));
                    reply.prompt_logprobs.extend(logprobs.map(|logprobs| (prompt_index, logprobs)));
                    reply.prompt_routing.insert(prompt_index, routing);
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
                reply.scores.sort_by_key(|p| p.0);
                return reply;
            }
        }
    }
}

/// Everything that a request got, with its completions in the order of prompts and samples.
#[derive(Default)]
pub struct Reply {
    /// Scores of prompts under other policies, by the index of the prompt.
    pub scores: Vec<(u32, PolicyScores)>,
    pub completions: Vec<Completion>,
    pub prompt_logprobs: Vec<(u32, Vec<TokenLogprobs>)>,
    /// Rows of experts by prompt index.
    pub prompt_routing: BTreeMap<u32, Vec<u8>>,
    pub streamed: usize,
    /// Text of the streamed tokens by (prompt index, sample index), for samples that have any.
    pub streamed_text: BTreeMap<(u32, u32), String>,
    pub summary: Option<Summary>,
    pub error: Option<rollout_server::error::Error>,
}

impl Reply {
    fn add_text(&mut self, prompt_index: u32, sample_index: u32, text: &str) {
        if !text.is_empty() {
            self.streamed_text.entry((prompt_index, sample_index)).or_default().push_str(text);
        }
    }

    /// What equalities compare: of each completion the tokens and the bits of both log-probabilities.
    pub fn bits(&self) -> Vec<Vec<(TokenId, u32, u32)>> {
        self.completions.iter().map(|c| bits(&c.tokens)).collect()
    }
}

pub fn bits(tokens: &[TokenLogprobs]) -> Vec<(TokenId, u32, u32)> {
    tokens.iter().map(|t| (t.token, t.raw.to_bits(), t.processed.to_bits())).collect()
}

/// `count` random prompts with lengths in `lengths` and tokens below `vocab`.
pub fn random_prompts(seed: u64, count: usize, lengths: std::ops::Range<usize>, vocab: u32) -> Vec<Vec<TokenId>> {
    use rand::{Rng, SeedableRng};
    println!("prompts from seed {seed}");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| (0..rng.random_range(lengths.clone())).map(|_| rng.random_range(0..vocab)).collect()).collect()
}

/// A sender that is gone when `cancel` is set.
pub fn update_sender(cancel: CancelFlag) -> UpdateSender {
    UpdateSender { peer: "10.0.0.7:4711".into(), cancel, activity: Activity::start(), ended: Box::new(drop) }
}

/// Builder of a push.
#[derive(Clone)]
pub struct Push {
    pub kind: UpdateKind,
    pub adapter_config: String,
    pub adapter: Option<AdapterTarget>,
    pub tensors: Vec<(TensorEntry, Vec<u8>)>,
    pub expected_version: Option<u64>,
    pub new_version: Option<u64>,
    pub force_version: bool,
    pub running: RunningPolicy,
    pub in_place: bool,
}

impl Push {
    fn new(kind: UpdateKind, tensors: Vec<(TensorEntry, Vec<u8>)>) -> Self {
        let (expected_version, new_version, force_version) = (None, None, false);
        let (adapter_config, adapter, running) = (String::new(), None, RunningPolicy::Keep);
        Self {
            kind,
            adapter_config,
            adapter,
            tensors,
            expected_version,
            new_version,
            force_version,
            running,
            in_place: false,
        }
    }

    /// The header of this push from `source`.
    pub fn header(&self, source: Source) -> UpdateHeader {
        UpdateHeader {
            adapter: self.adapter.clone(),
            adapter_config: self.adapter_config.clone(),
            expected_version: self.expected_version,
            new_version: self.new_version,
            force_version: self.force_version,
            running: self.running,
            in_place: self.in_place,
            source,
            ..UpdateHeader::new(self.kind)
        }
    }

    pub fn full(weights: &StateDict) -> Self {
        let tensor = |(name, (shape, values)): (&String, &(Vec<usize>, Vec<f32>))| {
            entry(name, shape, Dtype::F32, None, to_bytes(values))
        };
        Self::new(UpdateKind::Full, weights.iter().map(tensor).collect())
    }

    /// A delta push of the elements in which two sets of weights differ.
    pub fn delta(before: &StateDict, after: &StateDict, base_version: u64) -> Self {
        let mut tensors = Vec::new();
        for (name, (shape, values)) in after {
            let old = &before[name].1;
            let changed: Vec<usize> = (0..values.len()).filter(|&i| old[i].to_bits() != values[i].to_bits()).collect();
            let gap = |(i, &index): (usize, &usize)| (index - if i == 0 { 0 } else { changed[i - 1] }) as u32;
            let mut payload: Vec<u8> = changed.iter().enumerate().flat_map(|c| gap(c).to_le_bytes()).collect();
            payload.extend(changed.iter().flat_map(|&i| values[i].to_le_bytes()));
            let payload = zstd::encode_all(payload.as_slice(), 1).unwrap();
            if !changed.is_empty() {
                tensors.push(entry(name, shape, Dtype::F32, Some(changed.len() as u64), payload));
            }
        }
        Self { expected_version: Some(base_version), ..Self::new(UpdateKind::Delta, tensors) }
    }

    /// A push of the fixtures' PEFT directory `directory`.
    pub fn lora(directory: &str) -> Self {
        let dir = fixture(directory);
        let file = std::fs::read(dir.join("adapter_model.safetensors")).unwrap();
        let stored = safetensors::SafeTensors::deserialize(&file).unwrap();
        let tensor = |(name, view): (String, TensorView<'_>)| {
            let dtype = match view.dtype() {
                safetensors::Dtype::BF16 => Dtype::Bf16,
                safetensors::Dtype::F16 => Dtype::F16,
                _ => Dtype::F32,
            };
            entry(&name, view.shape(), dtype, None, view.data().to_vec())
        };
        let tensors = stored.tensors().into_iter().map(tensor).collect();
        let adapter_config = std::fs::read_to_string(dir.join("adapter_config.json")).unwrap();
        Self { adapter_config, ..Self::new(UpdateKind::Lora, tensors) }
    }

    /// A push of an adapter on all linear layers of the blocks, with the same values each time.
    pub fn lora_of_all(parameters: &Parameters) -> Self {
        let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        Self::lora_of(parameters, &modules)
    }

    /// A push of an adapter on these linear layers, with the same values each time.
    pub fn lora_of(parameters: &Parameters, modules: &[&str]) -> Self {
        const RANK: usize = 2;
        let mut tensors = Vec::new();
        for spec in parameters.iter() {
            let Some(module) = spec.name.strip_suffix(".weight") else { continue };
            if modules.iter().any(|name| module.ends_with(name)) {
                for (part, shape) in [("A", [RANK, spec.shape[1]]), ("B", [spec.shape[0], RANK])] {
                    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| (i % 7) as f32 / 70.0 - 0.04).collect();
                    let name = format!("base_model.model.{module}.lora_{part}.weight");
                    tensors.push(entry(&name, &shape, Dtype::F32, None, to_bytes(&values)));
                }
            }
        }
        let adapter_config = serde_json::json!({
            "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules,
        });
        Self { adapter_config: adapter_config.to_string(), ..Self::new(UpdateKind::Lora, tensors) }
    }

    /// A push of the base without an adapter.
    pub fn base() -> Self {
        Self::new(UpdateKind::Lora, Vec::new())
    }
}

fn entry(name: &str, shape: &[usize], dtype: Dtype, changed: Option<u64>, bytes: Vec<u8>) -> (TensorEntry, Vec<u8>) {
    let digest = xxhash_rust::xxh3::xxh3_128(&bytes).to_be_bytes();
    let payload = changed.map(|changed| (changed, bytes.len() as u64));
    let (name, shape, allocation) = (name.into(), shape.to_vec(), None);
    (TensorEntry { name, dtype, shape, digest: Some(digest), payload, offset: 0, allocation }, bytes)
}

impl Engine {
    pub fn parameters(&self) -> &Arc<Parameters> {
        &self.context().parameters
    }

    /// Sends a command to the engine and waits for its answer.
    pub fn ask<T: Send + 'static>(&self, command: impl FnOnce(rollout_server::engine::Reply<T>) -> Command) -> T {
        self.ask_later(command).recv_timeout(PATIENCE).expect("the engine answers")
    }

    /// Sends a command to the engine, and returns where its answer will arrive.
    pub fn ask_later<T: Send + 'static>(
        &self,
        command: impl FnOnce(rollout_server::engine::Reply<T>) -> Command,
    ) -> Receiver<T> {
        let (sender, answer) = channel();
        let reply = Box::new(move |value| {
            let _ = sender.send(value);
        });
        self.handle().send(command(reply)).unwrap();
        answer
    }

    /// Pushes as the server does, and returns where the answer to the commit will arrive.
    pub fn push_later(&self, push: Push) -> Result<Receiver<Result<UpdateReply>>> {
        let header = Arc::new(push.header(Source::Inline));
        let entries = push.tensors.iter().map(|(entry, _)| entry.clone()).collect();
        let declared = DeclaredPush::open(header.clone(), entries, self.parameters().clone(), &Sources::default())?;
        let (staging, sender) = (declared.staging(), update_sender(CancelFlag::default()));
        let ticket = self.ask(|reply| Command::BeginUpdate { header, staging, sender, reply })?;
        let mut receiving = declared.receive(ticket.mode)?;
        for (index, (_, bytes)) in push.tensors.iter().enumerate() {
            for (chunk, offset) in bytes.chunks(4000).zip((0..).step_by(4000)) {
                if let Some(tensors) = receiving.write(index as u32, offset, chunk)? {
                    let (update, tensors) = (ticket.id, Arc::new(tensors));
                    self.ask(|reply| Command::WritePart { update, tensors, reply })?;
                }
            }
        }
        let VerifiedPush { update: content, tower, .. } = receiving.finish()?;
        let update = ticket.id;
        Ok(self.ask_later(|reply| Command::CommitUpdate { update, content, tower, new_version: None, reply }))
    }

    pub fn push(&self, push: Push) -> Result<UpdateReply> {
        self.push_later(push)?.recv_timeout(PATIENCE).expect("the engine answers")
    }

    /// SHA-256 of every parameter, by name.
    pub fn checksums(&self) -> Vec<(String, [u8; 32])> {
        self.ask(|reply| Command::Checksum { names: Vec::new(), cancel: CancelFlag::default(), reply })
            .expect("there are weights")
            .parameters
    }

    pub fn sleep(&self, level: SleepLevel, mode: DrainMode) -> Result<SleepReply> {
        self.ask(|reply| Command::Sleep { level, mode, cancel: CancelFlag::default(), reply })
    }

    pub fn wake(&self, weights: bool, kv_cache: bool) -> Result<LifecycleStatus> {
        self.ask(|reply| Command::Wake { tags: WakeTags { weights, kv_cache }, reload: false, reply })
    }
}
