//! An engine that a test drives step by step, with an executor without a model.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, TryRecvError, channel, sync_channel};

pub use super::fake::*;
use crate::cache::KvCacheManager;
use crate::clock::Clock;
use crate::engine::*;
use crate::memory::{Backlog, MemoryBudget, MemoryUse, Traffic};
use crate::observe::Observer;
use crate::scheduler::{ImageScheduling, SchedulerConfig, Speculation};
use crate::types::{Prompt, SamplingParams, Tenant, TokenId};
use crate::weights::{
    Adapter, AdapterSpec, AdapterTensor, Delta, Dtype, ParamSpec, Parameters, ReceiveMode, ShadowWeights, ShardRule,
    StagingBytes, TensorData, TensorEntry, Tensors, UpdateHeader, UpdateKind, WeightUpdate,
};

pub const BLOCK_SIZE: usize = 4;
pub const BLOCKS: usize = 64;
pub const MAX_QUEUED: usize = 16;
/// Bytes of the rig's ledger that are free at the start; the ceiling is 1,000.
pub const STAGING: u64 = 300;
/// Most bytes that requests and replies in flight may take.
pub const TRAFFIC_BYTES: u64 = 1 << 30;

/// Names of the parameters of the rig's model, each a matrix of 5 x 3 float32.
pub const PARAMETERS: [&str; 2] = ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"];

/// State of a channel for one reply.
#[derive(Debug)]
pub enum Told<T> {
    Reply(T),
    Waits,
    /// The sender was dropped without a reply.
    Dropped,
}

pub fn told<T>(receiver: &Receiver<T>) -> Told<T> {
    match receiver.try_recv() {
        Ok(value) => Told::Reply(value),
        Err(TryRecvError::Empty) => Told::Waits,
        Err(TryRecvError::Disconnected) => Told::Dropped,
    }
}

impl<T> Told<T> {
    pub fn reply(self) -> T {
        match self {
            Told::Reply(value) => value,
            Told::Waits => panic!("no reply yet"),
            Told::Dropped => panic!("the reply was dropped"),
        }
    }

    pub fn is_waiting(&self) -> bool {
        matches!(self, Told::Waits)
    }
}

/// A request that a rig received.
pub struct Asked {
    pub events: Receiver<Event>,
    pub cancel: CancelFlag,
}

impl Asked {
    /// The events since the last call.
    pub fn events(&self) -> Vec<Event> {
        self.events.try_iter().collect()
    }

    /// The completion of a finished request of one sample.
    pub fn completion(&self) -> Completion {
        match &self.events()[..] {
            [Event::Completion(completion), Event::Done(_)] => completion.clone(),
            other => panic!("{other:?}"),
        }
    }

    pub fn error(&self) -> Error {
        match &self.events()[..] {
            [Event::Failed(error)] => error.clone(),
            other => panic!("{other:?}"),
        }
    }
}

pub fn sampled(completion: &Completion) -> Vec<TokenId> {
    completion.tokens.iter().map(|t| t.token).collect()
}

/// A request for one sample of `max_tokens` tokens, after a prompt of `prompt` tokens.
pub fn ask(id: &str, prompt: usize, max_tokens: u32) -> (GenerateCommand, Asked) {
    let (sender, events) = channel();
    let cancel = CancelFlag::default();
    let traffic = Traffic::new(TRAFFIC_BYTES);
    let request = ValidRequest {
        request_id: id.into(),
        prompts: vec![Prompt::from_tokens((900..900 + prompt as TokenId).collect::<Vec<_>>())],
        kind: RequestKind::Generate { n: 1, seed: 1, prompt_logprobs: false, stream_tokens: false, return_text: false },
        params: Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() }),
        grammar: None,
        prompt_sampling: BTreeMap::new(),
        policies: OtherPolicies::default(),
        top_arrays: None,
        return_routing: None,
        adapter: None,
        if_weight_version: None,
        min_weight_version: None,
        time_limit: None,
    };
    let client = RequestClient {
        owner: None,
        tenant: Tenant::default(),
        arrived: std::time::Instant::now(),
        waits_for_resume: true,
        cancel: cancel.clone(),
        responder: Box::new(move |event| drop(sender.send(event))),
        adapter_reader: None,
        backlog: Backlog::new(&traffic),
        charge: traffic.charge_always(0),
    };
    (GenerateCommand { request, client }, Asked { events, cancel })
}

/// An update to begin.
pub struct Begin {
    pub header: UpdateHeader,
    pub staging: StagingBytes,
    pub sender: UpdateSender,
}

impl Begin {
    pub fn command(self, reply: Reply<Result<UpdateTicket>>) -> Command {
        Command::BeginUpdate { header: Arc::new(self.header), staging: self.staging, sender: self.sender, reply }
    }

    /// The same, with so many bytes that it takes while it is staged.
    pub fn staging(mut self, staged: u64) -> Self {
        self.staging.staged = staged;
        self
    }
}

impl From<UpdateHeader> for Begin {
    fn from(header: UpdateHeader) -> Self {
        let sender = UpdateSender {
            peer: "10.0.0.7:4711".into(),
            cancel: CancelFlag::default(),
            activity: Activity::start(),
            ended: Box::new(drop),
        };
        Self { header, staging: StagingBytes { staged: 10, shadow: 0, in_place: 1 }, sender }
    }
}

pub fn begin(kind: UpdateKind) -> Begin {
    UpdateHeader::new(kind).into()
}

/// A FULL push of 2,000 bytes that may be written in place.
pub fn large_in_place() -> Begin {
    Begin::from(UpdateHeader { in_place: true, ..UpdateHeader::new(UpdateKind::Full) }).staging(2000)
}

/// The shadow weights that a push is packed into.
pub fn shadow(mode: ReceiveMode) -> Option<ShadowWeights> {
    if let ReceiveMode::Pack(shadow) = mode { Some(shadow) } else { None }
}

/// An adapter for the first `layers` layers of the rig's model.
pub fn adapter(parameters: &Parameters, layers: usize, rank: usize) -> Arc<Adapter> {
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": 1, "target_modules": ["o_proj"]}}"#);
    let entry = |name: &str, part: &str, shape| TensorEntry {
        name: format!("base_model.model.{}", name.replace("weight", part)),
        dtype: Dtype::F32,
        shape,
        digest: Some([0; 16]),
        payload: None,
        offset: 0,
        allocation: None,
    };
    let entries: Vec<_> = PARAMETERS[..layers]
        .iter()
        .flat_map(|name| [entry(name, "lora_A.weight", vec![rank, 3]), entry(name, "lora_B.weight", vec![5, rank])])
        .collect();
    let tensors: Vec<_> = entries.iter().map(AdapterTensor::from).collect();
    let spec = AdapterSpec::new(&config, &tensors, parameters, &Traffic::new(u64::MAX)).unwrap();
    Arc::new(spec.build(&|i| TensorData::F32(vec![1.0; entries[i].shape.iter().product()].into())))
}

pub fn lora() -> WeightUpdate {
    WeightUpdate::Lora(Arc::new(Adapter::none()))
}

pub fn content(kind: UpdateKind) -> WeightUpdate {
    match kind {
        UpdateKind::Lora => lora(),
        UpdateKind::Full => WeightUpdate::Full(Arc::new(Tensors::default())),
        UpdateKind::Delta => WeightUpdate::Delta(Arc::new(Delta::default())),
    }
}

pub struct Rig {
    pub engine: Engine<Fake>,
}

impl Rig {
    pub fn new() -> Self {
        Self::with_commands(sync_channel(1).1)
    }

    /// A rig whose engine takes commands from a queue, so that it can run on a thread of its own.
    pub fn with_commands(commands: Receiver<Command>) -> Self {
        Self::with(commands, MemoryBudget::new(1000, 1.0))
    }

    /// A rig on a device with its own memory, and so many bytes of host memory.
    pub fn beside_host(bytes: u64) -> Self {
        Self::with(sync_channel(1).1, MemoryBudget::beside_host(1000, 1.0, 10_000, bytes))
    }

    fn with(commands: Receiver<Command>, mut budget: MemoryBudget) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: 4,
            max_batch_tokens: 8,
            max_model_len: 100,
            max_queued_samples: MAX_QUEUED,
            speculation: Speculation::OFF,
            images: ImageScheduling::default(),
            routing_row_bytes: 0,
        };
        let scheduler = Scheduler::new(config, KvCacheManager::new(BLOCKS, BLOCK_SIZE));
        let specs = PARAMETERS.map(|name| ParamSpec::new(name, vec![5, 3], ShardRule::Replicated));
        for (used_for, bytes) in [
            (MemoryUse::Process, 100),
            (MemoryUse::Weights, 120),
            (MemoryUse::Workspace, 30),
            (MemoryUse::KvCache, 450),
        ] {
            budget.reserve(used_for, bytes).unwrap();
        }
        let parameters = Arc::new(Parameters::new(specs.into(), Dtype::F32, 1, false));
        let traffic = Traffic::new(TRAFFIC_BYTES);
        let (observer, recorder) = Observer::new();
        let setup = Setup {
            parameters,
            budget,
            traffic,
            max_adapters: 2,
            max_lora_rank: 8,
            max_tenant_adapters: None,
            clock: Clock::System,
            observer,
            recorder,
        };
        Self { engine: Engine::new(Fake::new(), scheduler, None, commands, setup) }
    }

    /// Gives the engine a command, as its loop does.
    pub fn command(&mut self, command: Command) {
        self.engine.handle(command).unwrap();
        self.engine.settle().unwrap();
        self.engine.check_integrity();
    }

    /// Gives the engine a command with a reply, and returns the channel of the reply.
    pub fn call<T: Send + 'static>(&mut self, command: impl FnOnce(Reply<T>) -> Command) -> Receiver<T> {
        let (sender, receiver) = channel();
        self.command(command(Box::new(move |value| drop(sender.send(value)))));
        receiver
    }

    pub fn step(&mut self) {
        assert!(self.engine.core.can_step(), "nothing can step");
        self.engine.steps.run(&mut self.engine.core).unwrap();
        self.engine.settle().unwrap();
        self.engine.check_integrity();
    }

    pub fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| self.step());
    }

    /// Steps while any request can step.
    pub fn finish(&mut self) {
        while self.engine.core.can_step() {
            self.step();
        }
    }

    pub fn submit(&mut self, (command, asked): (GenerateCommand, Asked)) -> Asked {
        self.command(Command::Generate(Box::new(command)));
        asked
    }

    pub fn status(&mut self) -> EngineStatus {
        told(&self.call(|reply| Command::Status { reply })).reply()
    }

    /// The executor's orders since the last call.
    pub fn did(&mut self) -> Vec<Did> {
        std::mem::take(&mut self.engine.core.executor.did)
    }

    pub fn reserved(&self, used_for: MemoryUse) -> u64 {
        self.engine.core.budget.reserved(used_for)
    }

    pub fn pause(&mut self, mode: DrainMode) -> Receiver<Result<()>> {
        self.call(|reply| Command::Pause { mode, cancel: CancelFlag::default(), reply })
    }

    pub fn resume(&mut self) -> Result<()> {
        told(&self.call(|reply| Command::Resume { reply })).reply()
    }

    pub fn sleep(&mut self, level: SleepLevel, mode: DrainMode) -> Receiver<Result<SleepReply>> {
        self.call(|reply| Command::Sleep { level, mode, cancel: CancelFlag::default(), reply })
    }

    pub fn wake(&mut self, weights: bool, kv_cache: bool, reload: bool) -> Result<LifecycleStatus> {
        let tags = WakeTags { weights, kv_cache };
        told(&self.call(|reply| Command::Wake { tags, reload, reply })).reply()
    }

    pub fn begin(&mut self, begin: impl Into<Begin>) -> Result<UpdateTicket> {
        told(&self.call(|reply| begin.into().command(reply))).reply()
    }

    pub fn commit(&mut self, update: u64, content: WeightUpdate) -> Receiver<Result<UpdateReply>> {
        self.call(|reply| Command::CommitUpdate { update, content, tower: None, new_version: None, reply })
    }

    pub fn write_part(&mut self, update: u64) -> Result<()> {
        let tensors = Arc::new(Tensors::default());
        told(&self.call(|reply| Command::WritePart { update, tensors, reply })).reply()
    }

    /// Sends a whole update, and returns where the reply to its commit comes.
    pub fn push(&mut self, begin: impl Into<Begin>) -> Result<Receiver<Result<UpdateReply>>> {
        let begin = begin.into();
        let kind = begin.header.kind;
        let ticket = self.begin(begin)?;
        Ok(self.commit(ticket.id, content(kind)))
    }

    /// Sends a whole update that is applied or refused at once.
    pub fn push_now(&mut self, begin: impl Into<Begin>) -> Result<UpdateReply> {
        self.push(begin).and_then(|reply| told(&reply).reply())
    }

    pub fn push_lora(&mut self, running: RunningPolicy) -> UpdateReply {
        self.push_now(UpdateHeader { running, ..UpdateHeader::new(UpdateKind::Lora) }).unwrap()
    }

    /// Asserts that nothing is left: no request, no held block, no update and no reservation for one.
    pub fn assert_clean(&mut self) {
        let status = self.status();
        assert_eq!(
            (status.stats.accepted_requests, status.stats.held_requests, status.update.is_some()),
            (0, 0, false)
        );
        assert_eq!(status.stats.free_blocks, status.stats.total_blocks);
        assert_eq!(self.reserved(MemoryUse::UpdateStaging), 0);
        assert!(self.engine.drains.is_empty());
    }
}
