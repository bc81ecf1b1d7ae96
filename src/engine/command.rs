//! What the engine can be told, and what it answers. The server is the only maker of commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::types::{FinishReason, SamplingParams, TokenId, TokenLogprobs, WeightVersion};

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
        reply: Reply<usize>,
    },
    /// Some [`CancelFlag`] was set; wakes an idle engine to look.
    Cancelled,
    /// Refuse new requests, finish the running ones until the deadline passes, then abort the rest and end.
    Shutdown {
        grace: std::time::Duration,
    },
}

/// A valid request: the server has checked every field against the model.
pub struct GenerateCommand {
    /// Unique among running requests.
    pub request_id: String,
    /// Each `1..=max_model_len - 1` tokens below the vocabulary size (`max_model_len` for [`Kind::Score`]).
    pub prompts: Vec<Arc<[TokenId]>>,
    pub kind: Kind,
    pub params: Arc<SamplingParams>,
    pub if_weight_version: Option<WeightVersion>,
    pub min_weight_version: Option<WeightVersion>,
    pub cancel: CancelFlag,
    pub responder: Responder,
}

/// What is asked of the prompts.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// `n` samples of each.
    Generate { n: u32, seed: u64, prompt_logprobs: bool, stream_tokens: bool },
    /// Log-probabilities of each token after the first; nothing is sampled.
    Score,
}

/// What a request is told, in the order it happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// One token of one sample; only if `stream_tokens`.
    Token { prompt_index: u32, sample_index: u32, logprobs: TokenLogprobs },
    /// Log-probabilities of prompt tokens 1.., when all are there (scoring, or `prompt_logprobs`).
    PromptLogprobs { prompt_index: u32, logprobs: Vec<TokenLogprobs>, weight_version: WeightVersion },
    /// One sample has ended.
    Completion(Completion),
    /// All samples have ended; terminal.
    Done(Summary),
    /// The request was refused; terminal.
    Failed(Error),
}

/// One finished sample.
#[derive(Clone, Debug)]
pub struct Completion {
    pub prompt_index: u32,
    pub sample_index: u32,
    pub tokens: Vec<TokenLogprobs>,
    pub finish_reason: FinishReason,
    /// Byte length of the text before the stop string, if one ended the sample.
    pub text_len: Option<usize>,
    /// `(version, start, end)` over `tokens`.
    pub weight_versions: Vec<(WeightVersion, u32, u32)>,
    pub seed: u64,
    pub cached_tokens: u32,
}

/// Totals of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub seconds: f64,
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
    pub shutting_down: bool,
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
    pub finished_requests: u64,
    pub aborted_requests: u64,
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

    /// Ends the request behind `flag`. Nothing is lost if the queue is full: then the engine is awake and will look.
    pub fn cancel(&self, flag: &CancelFlag) {
        flag.cancel();
        let _ = self.sender.try_send(Command::Cancelled);
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
