//! The state that all services share: the stage of the process's life, the loaded model, and the engine's handle.
//! No call is admitted while the model loads, all are while the server serves, and only questions while it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::adapters_dir::AdaptersDir;
use super::encoder::PromptEncoder;
use super::held_pictures::HeldPictures;
use super::pb;
use crate::comm::Trainers;
use crate::engine::EngineHandle;
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::model::config::VisionConfig;
use crate::observe::{Metrics, Observer};
use crate::pixels::{DecodeSlots, Preprocessor};
use crate::text::ReasoningFormat;
use crate::types::{RoutingFormat, TokenId};
use crate::weights::{Parameters, Sources};

/// Everything the services need once the model is loaded.
#[derive(Clone)]
pub struct ServingContext {
    pub model: Arc<ModelFacts>,
    /// The answer to GetInfo, without the facts of `model`.
    pub info: pb::GetInfoResponse,
    pub engine: EngineHandle,
    /// Counts what the services find in requests and answers.
    pub metrics: Arc<Metrics>,
    /// Count of the bytes of requests and replies in progress.
    pub traffic: Traffic,
    /// The model's parameters, against which pushes are checked.
    pub parameters: Arc<Parameters>,
    /// The directory and segments that pushes may be read from.
    pub sources: Arc<Sources>,
    /// The directory of adapters that requests may name although they are not resident.
    pub adapters_dir: Option<Arc<AdaptersDir>>,
    /// Time without a message after which a push is ended.
    pub update_idle: Duration,
    /// Time after which an engine that has not answered `/liveness` counts as hanging.
    pub liveness: Duration,
    /// Joins groups of trainers that broadcast their weights.
    pub trainers: Trainers,
    /// Whether every stream of OpenAI's routes has usage figures.
    pub forces_usage: bool,
    /// Whether answers of OpenAI's routes have the times of a sample.
    pub reports_times: bool,
    /// Whether usage figures over HTTP have the parts of prompts, such as the tokens found in the prefix cache.
    pub reports_prompt_details: bool,
    /// Whether answers of OpenAI's routes write tokens as their ids, unless a request says otherwise.
    pub writes_token_ids: bool,
}

/// Facts of the model that requests are checked against.
#[derive(Default)]
pub struct ModelFacts {
    /// The names of the policy, of which answers give the first unless a request gives another.
    pub names: Vec<String>,
    /// The value of `--model`.
    pub root: String,
    pub vocab_size: usize,
    /// Most tokens that a prompt and its completion may have together.
    pub max_model_len: usize,
    /// The model's end-of-sequence tokens, ascending.
    pub eos_token_ids: Vec<TokenId>,
    /// Encodes prompts of text; None if the model has no tokenizer, so that requests must use token ids.
    pub encoder: Option<Arc<PromptEncoder>>,
    /// How prompts may have images; `None` for a model of text alone.
    pub images: Option<ImageRules>,
    /// The experts that tokens take; `None` for a dense model.
    pub routing: Option<RoutingRules>,
    /// Whether the base below a merged adapter is kept, so that requests may ask for scores under it.
    pub keeps_base: bool,
    /// The configuration of the tokenizer and the chat template, as JSON; empty without a tokenizer.
    pub tokenizer_info: Bytes,
}

/// The images that prompts may have.
#[derive(Clone, Debug)]
pub struct ImageRules {
    pub vision: VisionConfig,
    /// Most images of a prompt.
    pub most_per_prompt: usize,
    /// Most tokens of an image.
    pub most_tokens: usize,
    /// How an image that comes as a file is resized.
    pub preprocessor: Preprocessor,
    pub decode_slots: DecodeSlots,
    /// Pictures that requests may name by their hashes.
    pub held: HeldPictures,
}

/// The experts of a model.
#[derive(Clone, Debug)]
pub struct RoutingRules {
    /// Indices of the layers with experts.
    pub layers: Vec<usize>,
    pub format: RoutingFormat,
    /// Whether the experts that tokens took are kept, so that requests may ask for them.
    pub is_kept: bool,
    /// Layers of the model, with and without experts.
    pub num_layers: usize,
}

impl ModelFacts {
    /// Tokens that no sample has.
    pub(super) fn forbidden_tokens(&self) -> &[TokenId] {
        self.images.as_ref().map_or(&[], |images| &images.vision.forbidden_tokens)
    }

    /// The first name of the policy.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Whether a request that gives `name` as its model means the policy.
    pub fn is_policy(&self, name: &str) -> bool {
        name.is_empty() || self.names.iter().any(|served| served == name)
    }

    /// The tokens that open and close reasoning, if the model can sample both.
    pub(super) fn reasoning_marks(&self) -> Option<(TokenId, TokenId)> {
        let marks = ReasoningFormat::marks(&self.encoder.as_ref()?.tokenizer);
        marks.filter(|(open, close)| (*open.max(close) as usize) < self.vocab_size)
    }
}

/// The stage of the process's life. It only moves forward.
#[derive(Clone)]
pub(super) enum Stage {
    Starting,
    Serving(Arc<ServingContext>),
    Ending(Arc<ServingContext>),
    /// The engine has ended; calls that still wait for it will get no answer.
    Ended(Arc<ServingContext>),
}

impl Stage {
    /// Whether the server ends. If the engine has ended by itself, no call may have seen the stage before.
    fn is_ending(&self) -> bool {
        matches!(self, Self::Ending(_) | Self::Ended(_))
    }
}

/// Moves the stage forward. Only `serve` has it.
pub(super) struct StageSetter {
    stage: watch::Sender<Stage>,
    in_flight: watch::Sender<()>,
}

/// The services' view of the state. Cheap to clone.
#[derive(Clone)]
pub(super) struct ServerState {
    stage: watch::Receiver<Stage>,
    /// Has one receiver for each call in flight.
    in_flight: watch::Sender<()>,
    /// Metrics, timeline and journal, which exist before the model is loaded.
    pub(super) observer: Observer,
    /// Number of calls that ended with a panic.
    pub(super) panics: Panics,
}

/// Counts a call as in flight until it is dropped. Shutdown waits until none is left.
pub(super) type InFlight = watch::Receiver<()>;

impl StageSetter {
    pub(super) fn set(&self, stage: Stage) {
        self.stage.send_replace(stage);
    }

    /// Returns once no call is in flight.
    pub(super) async fn drained(&self) {
        self.in_flight.closed().await;
    }
}

impl ServerState {
    /// The state of a server that starts.
    pub(super) fn new(observer: Observer) -> (StageSetter, Self) {
        let (stage, watched) = watch::channel(Stage::Starting);
        let in_flight = watch::Sender::new(());
        let setter = StageSetter { stage, in_flight: in_flight.clone() };
        (setter, Self { stage: watched, in_flight, observer, panics: Panics::default() })
    }

    /// Admits a call that takes a while, and counts it as in flight.
    ///
    /// # Errors
    /// `Unavailable` while the server starts or ends.
    pub(super) fn admit(&self) -> Result<(Arc<ServingContext>, InFlight)> {
        // The count is raised before the stage is read, so that shutdown waits for every call that is admitted.
        let in_flight = self.in_flight.subscribe();
        match &*self.stage.borrow() {
            Stage::Starting => Err(starting()),
            Stage::Serving(context) => Ok((Arc::clone(context), in_flight)),
            Stage::Ending(_) | Stage::Ended(_) => Err(shutting_down()),
        }
    }

    /// Admits a question, which is answered until the very end.
    ///
    /// # Errors
    /// `Unavailable` while the server starts.
    pub(super) fn context(&self) -> Result<Arc<ServingContext>> {
        match &*self.stage.borrow() {
            Stage::Starting => Err(starting()),
            Stage::Serving(context) | Stage::Ending(context) | Stage::Ended(context) => Ok(Arc::clone(context)),
        }
    }

    /// The count of the bytes of requests and replies; `Unavailable` while the server starts.
    pub(super) fn traffic(&self) -> Result<Traffic> {
        self.context().map(|context| context.traffic.clone())
    }

    pub(super) fn is_ending(&self) -> bool {
        self.stage.borrow().is_ending()
    }

    /// Waits until the server ends. Returns the error for calls that the engine does not have yet.
    pub(super) async fn ending(&self) -> Error {
        // If the setter is gone, the server has ended.
        let _ = self.stage.clone().wait_for(Stage::is_ending).await;
        shutting_down()
    }

    /// Waits for the end of the engine. Returns the error for calls whose work ends with it.
    pub(super) async fn ended(&self) -> Error {
        if self.stage.clone().wait_for(|stage| matches!(stage, Stage::Ended(_))).await.is_err() {
            // Without its setter the stage never changes again.
            std::future::pending::<()>().await;
        }
        shutting_down()
    }
}

pub(super) fn shutting_down() -> Error {
    Error::Unavailable("the server is shutting down".into())
}

fn starting() -> Error {
    Error::Unavailable("the server is starting: the model is not loaded yet".into())
}

/// Counts calls that panic. Each such call ends with INTERNAL, and all others continue. Clones share one count.
#[derive(Clone, Debug, Default)]
pub(super) struct Panics(Arc<AtomicU64>);

impl Panics {
    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The result of `work`, or the error of a call that panicked. The log has the panic itself.
    pub(super) fn catch<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        catch_unwind(AssertUnwindSafe(work)).map_err(|_| {
            let before = self.0.fetch_add(1, Ordering::Relaxed);
            tracing::error!(panics = before + 1, "a call was given up after a panic");
            Error::Internal("the call was given up after a panic; the server's log has it".into())
        })
    }

    /// The same for a future, which is never polled again after a panic.
    pub(super) async fn catch_future<F: Future>(&self, work: F) -> Result<F::Output> {
        let mut work = pin!(work);
        std::future::poll_fn(|cx| match self.catch(|| work.as_mut().poll(cx)) {
            Ok(polled) => polled.map(Ok),
            Err(error) => Poll::Ready(Err(error)),
        })
        .await
    }
}
