//! What the engine can be told, and what it answers. The server is the only maker of commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::activity::Activity;
use super::event::Event;
use crate::error::{Error, Result};
use crate::memory::{Backlog, Charge, MemoryReport};
use crate::types::{Prompt, SamplingParams, WeightVersion};
use crate::weights::{ShadowWeights, Tensors, UpdateKind, WeightUpdate};

/// Set when the client is gone; the engine looks before each step and ends the request.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Where a request's events go. Never blocks. Exactly one terminal event ([`Event::Done`] or [`Event::Failed`]) is
/// sent, last.
pub type Responder = Box<dyn FnMut(Event) + Send>;

/// Answer to a command that has one.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// One message to the engine.
pub enum Command {
    Generate(Box<GenerateCommand>),
    Abort {
        target: AbortTarget,
        reply: Reply<AbortReply>,
    },
    Status {
        reply: Reply<Status>,
    },
    ResetPrefixCache {
        reply: Reply<Result<usize>>,
    },
    /// Opens a transaction: checks what can be checked now and sets memory aside.
    BeginUpdate {
        begin: UpdateBegin,
        reply: Reply<Result<UpdateTicket>>,
    },
    /// Writes tensors of a FULL push in place; the weights are missing until its commit.
    WritePart {
        update: u64,
        tensors: Arc<Tensors>,
        reply: Reply<Result<()>>,
    },
    /// Ends a transaction: applied at a step boundary, at once or as its [`RunningPolicy`] says. In place, `update` is
    /// the rest.
    CommitUpdate {
        update: u64,
        content: WeightUpdate,
        reply: Reply<Result<UpdateReply>>,
    },
    /// Ends the open update, or the one of this number: it never happened. Answered with what was known of it.
    CancelUpdate {
        update: Option<u64>,
        reply: Reply<Option<OpenUpdate>>,
    },
    Sleep {
        level: SleepLevel,
        mode: DrainMode,
        cancel: CancelFlag,
        reply: Reply<Result<SleepReply>>,
    },
    Wake {
        tags: WakeTags,
        /// After level 2: read the checkpoint again.
        reload: bool,
        reply: Reply<Result<LifecycleStatus>>,
    },
    Pause {
        mode: DrainMode,
        cancel: CancelFlag,
        reply: Reply<Result<()>>,
    },
    Resume {
        reply: Reply<Result<()>>,
    },
    /// SHA-256 of parameters as they serve; all if `names` is empty. Computed in pieces between steps.
    Checksum {
        names: Vec<String>,
        cancel: CancelFlag,
        reply: Reply<Result<ChecksumReply>>,
    },
    ListAdapters {
        reply: Reply<Vec<AdapterStatus>>,
    },
    /// Answered with the generation when the last lease has ended and the memory is free.
    RemoveAdapter {
        name: String,
        expected_generation: Option<u64>,
        cancel: CancelFlag,
        reply: Reply<Result<u64>>,
    },
    /// Some [`CancelFlag`] was set, or a reader has drained its [`Backlog`]; wakes an idle engine to look.
    Look,
    /// Refuse new requests, finish the running ones until the deadline passes, then abort the rest and end.
    Shutdown {
        grace: Duration,
    },
}

/// A valid request: the server has checked every field against the model.
pub struct GenerateCommand {
    /// Unique among running requests.
    pub request_id: String,
    /// Each `1..=max_model_len - 1` tokens below the vocabulary size (`max_model_len` for [`RequestKind::Score`]).
    pub prompts: Vec<Prompt>,
    pub kind: RequestKind,
    pub params: Arc<SamplingParams>,
    /// Name of a resident adapter.
    pub adapter: Option<String>,
    pub if_weight_version: Option<WeightVersion>,
    pub min_weight_version: Option<WeightVersion>,
    pub cancel: CancelFlag,
    pub responder: Responder,
    /// What the responder was given and its reader has not taken.
    pub backlog: Backlog,
    /// For what the request keeps until its terminal event: prompts, records of its samples, their tokens.
    pub charge: Charge,
}

/// The header of a push.
pub struct UpdateBegin {
    pub kind: UpdateKind,
    /// LORA: keep it resident under this name.
    pub adapter: Option<AdapterTarget>,
    /// Always given for DELTA.
    pub expected_version: Option<WeightVersion>,
    /// None: one more than now.
    pub new_version: Option<WeightVersion>,
    pub running: RunningPolicy,
    /// Most memory that the push takes while it is received, and in place.
    pub staging_bytes: u64,
    pub in_place_bytes: u64,
    /// FULL: may be written in place if it does not fit.
    pub in_place: bool,
    /// Set when the stream breaks: the transaction never happened.
    pub cancel: CancelFlag,
    /// Address of the sender.
    pub peer: String,
    pub activity: Activity,
    /// Told why, if `CancelUpdate` ends the update before its commit has come.
    pub ended: Reply<Error>,
}

/// Who holds the update that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpdate {
    pub id: u64,
    pub peer: String,
    pub kind: UpdateKind,
    /// Name of an adapter that is to become resident.
    pub adapter: Option<String>,
    /// As the sender has given it.
    pub new_version: Option<WeightVersion>,
    pub open_for: Duration,
    /// Since something was last heard of it, or done for it.
    pub idle_for: Duration,
    /// Whether its commit waits for requests to end.
    pub committed: bool,
}

/// Under which name an adapter stays resident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterTarget {
    pub name: String,
    /// `Some(0)`: the name must be free.
    pub expected_generation: Option<u64>,
}

/// An open transaction.
#[derive(Debug)]
pub struct UpdateTicket {
    pub id: u64,
    /// Send complete tensors with `WritePart`.
    pub in_place: bool,
    /// The shadow weights to pack a FULL push into; `None` for other kinds, and for a push in place.
    pub shadow: Option<ShadowWeights>,
}

/// What becomes of requests that run when an update is applied. See `weights.proto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunningPolicy {
    #[default]
    Keep,
    Recompute,
    Wait,
    Abort,
}

/// What a commit has done.
#[derive(Debug)]
pub struct UpdateReply {
    pub weight_version: WeightVersion,
    /// For how long nothing stepped.
    pub pause: Duration,
    /// Applied when the weights wake.
    pub pending: bool,
    /// The generation that a resident adapter got; None for a push that changes the policy.
    pub adapter_generation: Option<u64>,
}

/// What becomes of running requests at a sleep or pause. See `control.proto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DrainMode {
    #[default]
    Wait,
    Abort,
    Keep,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SleepLevel {
    /// The policy is kept, outside the device's memory.
    #[default]
    One,
    /// The policy is dropped.
    Two,
}

/// What is to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeTags {
    pub weights: bool,
    pub kv_cache: bool,
}

/// What a sleep has given back, measured as the fall of the process's resident memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SleepReply {
    pub weights_bytes: u64,
    /// With the workspace.
    pub kv_cache_bytes: u64,
    pub resident_bytes: u64,
    pub took: Duration,
}

/// The lifecycle as clients see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LifecycleStatus {
    #[default]
    Running,
    Paused,
    Asleep {
        level: SleepLevel,
        /// What is awake again.
        resident: WakeTags,
        /// A push waits for the weights to wake.
        pending_update: bool,
    },
    WeightsMissing,
    ShuttingDown,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChecksumReply {
    pub weight_version: WeightVersion,
    /// In the model's order.
    pub parameters: Vec<(String, [u8; 32])>,
}

/// A resident adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterStatus {
    pub name: String,
    pub generation: u64,
    pub rank: usize,
    pub bytes: u64,
    /// Running requests that use it.
    pub leases: usize,
    /// Replaced or removed; goes with its last lease.
    pub retired: bool,
}

/// What is asked of the prompts.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestKind {
    /// `n` samples of each.
    ///
    /// `stream_tokens`: each token is told as it is sampled. `return_text`: completions, and streamed tokens, have text;
    /// only for a model with a tokenizer.
    Generate { n: u32, seed: u64, prompt_logprobs: bool, stream_tokens: bool, return_text: bool },
    /// Log-probabilities of each token after the first; nothing is sampled.
    Score,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AbortTarget {
    All,
    Requests(Vec<String>),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct AbortReply {
    pub aborted: Vec<String>,
    pub unknown: Vec<String>,
}

/// A look at the engine between two steps.
#[derive(Clone, Debug, Default)]
pub struct Status {
    pub lifecycle: LifecycleStatus,
    pub memory: MemoryReport,
    /// What requests and replies under way take now.
    pub traffic_bytes: u64,
    /// Requests that wait for a newer policy, for `Resume`, or for a drain to end.
    pub held_requests: usize,
    /// The update that is open.
    pub update: Option<OpenUpdate>,
    /// Updates applied since the start.
    pub updates: u64,
    pub weight_version: WeightVersion,
    pub total_blocks: usize,
    pub free_blocks: usize,
    pub cached_blocks: usize,
    pub running_requests: usize,
    pub running_samples: usize,
    pub waiting_samples: usize,
    pub steps: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub cached_tokens: u64,
    pub preemptions: u64,
    /// Rows that drafts of further tokens took.
    pub drafted_tokens: u64,
    /// Drafted tokens that turned out right.
    pub accepted_tokens: u64,
    pub finished_requests: u64,
    pub aborted_requests: u64,
    /// Requests that ended because their answer panicked.
    pub internal_errors: u64,
    /// Over the last ten seconds in which the engine was stepping.
    pub tokens_per_second: f64,
}

/// The way into the engine: a bounded queue. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    sender: std::sync::mpsc::SyncSender<Command>,
}

impl EngineHandle {
    pub fn new(sender: std::sync::mpsc::SyncSender<Command>) -> Self {
        Self { sender }
    }

    /// Ends the request behind `flag`.
    pub fn cancel(&self, flag: &CancelFlag) {
        flag.cancel();
        self.look();
    }

    /// Wakes an idle engine. Nothing is lost if the queue is full: then it is awake and will look.
    pub fn look(&self) {
        let _ = self.sender.try_send(Command::Look);
    }

    /// Hands the command over, waiting while the queue is full; not for threads of a runtime.
    ///
    /// # Errors
    /// `Unavailable` if the engine has ended.
    pub fn send_blocking(&self, command: Command) -> Result<()> {
        self.sender.send(command).map_err(|_| Error::Unavailable("the engine has ended".into()))
    }

    /// Hands the command over without blocking.
    ///
    /// # Errors
    /// `ResourceExhausted` if the queue is full, `Unavailable` if the engine has ended.
    pub fn send(&self, command: Command) -> Result<()> {
        use std::sync::mpsc::TrySendError;
        self.sender.try_send(command).map_err(|e| match e {
            TrySendError::Full(_) => Error::ResourceExhausted("the engine's command queue is full; try again".into()),
            TrySendError::Disconnected(_) => Error::Unavailable("the engine has ended".into()),
        })
    }
}
