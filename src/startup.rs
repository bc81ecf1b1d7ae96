//! From a configuration to a running engine: opens the model, divides the memory, builds the ranks.

mod memory;
mod ranks;

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

use clap::ValueEnum;
use rollout_kernels::{DeviceOptions, Devices, ModelShape, StorageDtype};
use serde_json::Value as Json;

use crate::cache::KvCacheManager;
use crate::clock::Clock;
use crate::comm::Trainers;
use crate::config::{Config, DTypeChoice, GraphsChoice, ReasoningChoice, SpeculationChoice, TenantFlags};
use crate::engine::{COMMAND_QUEUE, Engine, EngineHandle, Setup};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::model::config::{ExpertsConfig, ModelConfig, VisionConfig};
use crate::model::{Build, Model, ModelLimits, Parameterized, Tower, TowerShape, WorkspaceShape};
use crate::observe::{EngineWatchdog, Observer, Recorder};
use crate::pixels::DecodeSlots;
use crate::scheduler::{ImageScheduling, Scheduler, SchedulerConfig, Speculation, TenantQuotas};
use crate::server::{
    AdaptersDir, HeldPictures, ImageRules, ModelFacts, PromptEncoder, RequestTemplates, RoutingRules, ServingContext,
    pb,
};
use crate::text::{
    ChatTemplate, ReasoningFormat, TiktokenRanks, Tokenizer, read_tokenizer_config, special_tokens_of_config,
    special_tokens_of_gguf, tokenizer_info,
};
use crate::types::RoutingFormat;
use crate::weights::{
    BROADCAST_BUFFER_BYTES, Dtype, ModelFiles, ModelSource, ParamSpec, Parameters, Partition, Sources, TokenizerFiles,
    largest_broadcast,
};
use memory::Plan;
use ranks::{CommunicatorPlan, Ingredients, LoadProgress, start_ranks};

/// Most tokens of an image, if `--max-image-tokens` does not say.
const MAX_IMAGE_TOKENS: usize = 1280;
/// Files of images that are decoded at once.
const DECODED_AT_ONCE: usize = 2;
/// Rows that the layers of a vision tower take at once.
const TOWER_ROWS: usize = 1024;

/// The tokenizer and chat template of the model, and their configuration as JSON; `None` for a model without a
/// tokenizer, which serves token ids only.
fn open_encoder(files: &TokenizerFiles, config: &Config) -> Result<Option<(Arc<PromptEncoder>, String)>> {
    let given = config.chat_template.as_deref();
    let (tokenizer, chat_template, tokenizer_config, special_tokens) = match files {
        TokenizerFiles::Gguf(metadata) => {
            let template = ChatTemplate::from_gguf(metadata, given)?;
            (Some(Tokenizer::from_gguf(metadata)?), template, Json::Null, special_tokens_of_gguf(metadata))
        }
        TokenizerFiles::HuggingFace { tokenizer_json, tokenizer_config_json, chat_template } => {
            let tokenizer = tokenizer_json.exists().then(|| Tokenizer::from_file(tokenizer_json)).transpose()?;
            let tokenizer_config = read_tokenizer_config(tokenizer_config_json.as_deref())?;
            let template = ChatTemplate::from_files(&tokenizer_config, given.or(chat_template.as_deref()))?;
            let special_tokens = special_tokens_of_config(&tokenizer_config);
            (tokenizer, template, tokenizer_config, special_tokens)
        }
        TokenizerFiles::Tiktoken { ranks, tokenizer_config_json, chat_template } => {
            let tokenizer = Tokenizer::from_tiktoken(&TiktokenRanks::read(ranks)?)?;
            let tokenizer_config = read_tokenizer_config(tokenizer_config_json.as_deref())?;
            let template = ChatTemplate::from_files(&tokenizer_config, given.or(chat_template.as_deref()))?;
            let template = template.map_or_else(|| ChatTemplate::of_qwen_v1(&tokenizer_config), Ok)?;
            let special_tokens = special_tokens_of_config(&tokenizer_config);
            (Some(tokenizer), Some(template), tokenizer_config, special_tokens)
        }
    };
    if tokenizer.is_some() && chat_template.is_none() {
        tracing::warn!(
            "the model has no chat template: prompts of chat messages are rejected; give one with --chat-template FILE"
        );
    }
    let info = tokenizer_info(tokenizer_config, chat_template.as_ref().map(ChatTemplate::source));
    let Some(tokenizer) = tokenizer else { return Ok(None) };
    let reasoning = reasoning_format(config.reasoning_parser, &tokenizer, chat_template.as_ref())?;
    let finds_reasoning = config.reasoning_parser == ReasoningChoice::Auto;
    let request_templates =
        config.trust_request_chat_template.then_some(RequestTemplates { special_tokens, finds_reasoning });
    let encoder = PromptEncoder::new(Arc::new(tokenizer), chat_template, reasoning, request_templates);
    Ok(Some((Arc::new(encoder), info)))
}

/// The format of the model's reasoning; `None` if chats do not report it apart from the answer.
///
/// # Errors
/// `Config` if the texts do not have the marks of the format that `--reasoning-parser` names.
fn reasoning_format(
    choice: ReasoningChoice,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Option<ReasoningFormat>> {
    let (name, format) = match choice {
        ReasoningChoice::Auto => {
            let found = template.and_then(ChatTemplate::reasoning_format);
            return Ok(found.filter(|_| ReasoningFormat::has_marks(tokenizer)));
        }
        ReasoningChoice::None => return Ok(None),
        ReasoningChoice::DeepseekR1 => ("deepseek_r1", ReasoningFormat::DeepSeekR1),
        ReasoningChoice::Qwen3 => ("qwen3", ReasoningFormat::Qwen3),
    };
    match ReasoningFormat::has_marks(tokenizer) {
        true => Ok(Some(format)),
        false => Err(Error::Config(format!(
            "--reasoning-parser {name}: <think> and </think> are special tokens of this model, which texts leave out; \
             use --reasoning-parser none"
        ))),
    }
}

/// The sizes, precisions and devices that all ranks share.
#[derive(Clone)]
struct Layout {
    world: usize,
    weights: StorageDtype,
    kv: StorageDtype,
    max_model_len: usize,
    max_batch_tokens: usize,
    /// Most tokens of a picture; 0 for a model that takes no images.
    max_image_tokens: usize,
    block_size: usize,
    /// Whether devices may capture steps as CUDA graphs and replay them.
    uses_graphs: bool,
    /// How the experts of a token are kept beside its KV, if they are.
    routing: Option<RoutingFormat>,
    /// Whether the base below a merged adapter is kept.
    keeps_base: bool,
    devices: Devices,
}

/// The engine's thread. It ends after `Command::Shutdown`, or when all handles are gone.
pub type EngineThread = JoinHandle<Result<()>>;

/// Opens the model, fills the memory plan, loads the weights and starts the engine. Returns what the server needs, and
/// the engine's thread. The observer sees the load as the timeline's first phase.
///
/// # Errors
/// `Config` or `ResourceExhausted`, with one message that says what to change.
pub fn start(config: &Config, observer: Observer, recorder: Recorder) -> Result<(ServingContext, EngineThread)> {
    config.check()?;
    let files = ModelSource::parse(&config.model)?.open()?;
    let model = ModelConfig::from_files(&files)?;
    model.check_tensor_parallel(config.tp)?;
    let layout = Layout::new(config, &model)?;
    let communicators = CommunicatorPlan::of_ranks(&layout.devices, config.tp, config.all_reduce)?;
    let (encoder, tokenizer_info) = open_encoder(&files.tokenizer, config)?.unzip();
    encoder.iter().for_each(|encoder| encoder.prepare_grammars(model.vocab_size));

    let limits = ModelLimits { max_model_len: layout.max_model_len, max_image_tokens: layout.max_image_tokens };
    let mut models: Vec<_> =
        (0..layout.world).map(|rank| Model::new(&model, &layout.build(rank), limits)).collect::<Result<_>>()?;
    let parameters = Arc::new(parameters(&mut models[0], &model, &layout)?);
    let trainers = Trainers::new(&layout.devices);
    let broadcast = trainers.ranks() as u64 * largest_broadcast(&parameters, BROADCAST_BUFFER_BYTES);
    let Plan { budget, traffic, blocks } = Plan::new(config, &model, &layout, &models, broadcast)?;
    let sources = Sources::new(config.weights_dir.clone()).with_devices(layout.devices.clone());
    let sources = sources.with_traffic(traffic.clone());

    let ModelFiles { checkpoint, .. } = files;
    let info = server_info(config, &layout, &model, count_weights(&parameters), &sources);
    let progress = LoadProgress::new(&checkpoint, &parameters);
    let ingredients = Ingredients {
        model: model.clone(),
        layout: layout.clone(),
        checkpoint: Arc::new(checkpoint),
        blocks,
        progress,
    };
    let executor = start_ranks(models, communicators, ingredients)?;
    let cache = KvCacheManager::new(blocks, layout.block_size);
    let mut scheduler = Scheduler::new(layout.scheduler(config, &model), cache);
    let TenantFlags { tenant_max_running: max_running, tenant_kv_share: kv_share, .. } = config.tenants;
    scheduler.limit_tenants(TenantQuotas { max_running, kv_share });
    let (sender, commands) = sync_channel(COMMAND_QUEUE);
    let setup = Setup {
        parameters: parameters.clone(),
        budget,
        traffic: traffic.clone(),
        max_adapters: config.adapters.max_adapters,
        max_lora_rank: config.adapters.max_lora_rank,
        max_tenant_adapters: config.tenants.tenant_max_adapters,
        clock: Clock::System,
        observer: observer.clone(),
        recorder,
    };
    let tokenizer = encoder.as_ref().map(|encoder| encoder.tokenizer.clone());
    let thread = start_thread(Engine::new(executor, scheduler, tokenizer, commands, setup))?;
    let adapters_dir = config.adapters.adapters_dir.clone();
    let adapters_dir = adapters_dir.map(|dir| Arc::new(AdaptersDir::new(dir, parameters.clone(), traffic.clone())));
    let engine = EngineHandle::new(sender);
    let context = ServingContext {
        model: Arc::new(model_facts(config, &layout, model, encoder, tokenizer_info.unwrap_or_default())),
        info,
        sources: Arc::new(sources.with_serving(Arc::new(engine.clone()))),
        engine,
        metrics: observer.metrics.clone(),
        traffic,
        parameters,
        adapters_dir,
        update_idle: Duration::from_secs(config.update_idle_seconds),
        liveness: Duration::from_secs(config.watch.liveness_seconds),
        trainers,
        forces_usage: config.enable_force_include_usage,
        reports_times: config.enable_per_request_metrics,
        reports_prompt_details: config.enable_prompt_tokens_details,
        writes_token_ids: config.return_tokens_as_token_ids,
    };
    start_watchdog(&observer, config.watch.watchdog_seconds).map(|()| (context, thread))
}

fn start_thread(engine: Engine<impl Executor + Send + 'static>) -> Result<EngineThread> {
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || engine.run());
    thread.map_err(|e| Error::Internal(format!("cannot start the engine's thread: {e}")))
}

/// Starts the watchdog, unless it is to wait for 0 seconds.
fn start_watchdog(observer: &Observer, seconds: u64) -> Result<()> {
    if seconds == 0 {
        return Ok(());
    }
    let (timeline, journal, metrics) = (observer.timeline.clone(), observer.journal.clone(), observer.metrics.clone());
    let watchdog = EngineWatchdog::new(timeline, journal, metrics, Duration::from_secs(seconds));
    watchdog.start().map_err(|e| Error::Internal(format!("cannot start the watchdog's thread: {e}")))
}

fn model_facts(
    config: &Config,
    layout: &Layout,
    model: ModelConfig,
    encoder: Option<Arc<PromptEncoder>>,
    tokenizer_info: String,
) -> ModelFacts {
    ModelFacts {
        routing: model.experts.as_ref().map(|experts| routing_rules(layout, experts)),
        keeps_base: config.keep_base,
        images: model.vision.map(|vision| image_rules(config, layout, vision)),
        names: config.served_names(),
        root: config.model.clone(),
        vocab_size: model.vocab_size,
        max_model_len: layout.max_model_len,
        eos_token_ids: model.eos_token_ids,
        encoder,
        tokenizer_info: tokenizer_info.into(),
    }
}

/// The experts that tokens take.
fn routing_rules(layout: &Layout, experts: &ExpertsConfig) -> RoutingRules {
    RoutingRules {
        layers: (0..).zip(&experts.layers).filter(|(_, has)| **has).map(|(layer, _)| layer).collect(),
        format: experts.routing_format(),
        is_kept: layout.routing.is_some(),
        num_layers: experts.layers.len(),
    }
}

/// How prompts may have images.
fn image_rules(config: &Config, layout: &Layout, vision: VisionConfig) -> ImageRules {
    let preprocessor = vision.preprocessor.clone();
    ImageRules {
        // Files are made smaller only if the flag says how small.
        preprocessor: match config.max_image_tokens {
            Some(tokens) => preprocessor.with_max_tokens(tokens as u32),
            None => preprocessor,
        },
        vision,
        most_per_prompt: config.limit_mm_per_prompt.0,
        most_tokens: layout.max_image_tokens,
        decode_slots: DecodeSlots::new(DECODED_AT_ONCE),
        held: HeldPictures::new(config.image_bytes),
    }
}

/// The part of the answer to `GetInfo` that is not in [`ModelFacts`].
fn server_info(
    config: &Config,
    layout: &Layout,
    model: &ModelConfig,
    parameters: u64,
    sources: &Sources,
) -> pb::GetInfoResponse {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    pb::GetInfoResponse {
        model: config.served_names().swap_remove(0),
        architecture: model.architecture_name().into(),
        dtype: layout.dtype_name().into(),
        device: config.device.name().into(),
        tensor_parallel_size: count(config.tp),
        max_num_seqs: count(config.max_num_seqs),
        max_batch_tokens: count(config.max_batch_tokens),
        block_size: count(config.block_size),
        parameters,
        kernel: layout.devices.of_rank(0).kernel().into(),
        max_adapters: count(config.adapters.max_adapters),
        max_lora_rank: count(config.adapters.max_lora_rank),
        device_uuids: sources.device_uuids(),
        batch_invariant: config.is_batch_invariant(),
        ..Default::default()
    }
}

impl Layout {
    fn new(config: &Config, model: &ModelConfig) -> Result<Self> {
        let is_float32 = match config.dtype {
            DTypeChoice::Float32 => true,
            DTypeChoice::Bfloat16 => false,
            DTypeChoice::Auto => model.dtype == Some(Dtype::F32),
        };
        let dtype = if is_float32 { StorageDtype::F32 } else { StorageDtype::Bf16 };
        let (weights, kv) = (dtype, dtype);
        let devices = open_devices(config)?;
        let experts = model.experts.as_ref().map(|experts| [model.hidden_size, experts.intermediate_size]);
        let (head_dim, block_size) = (model.head_dim, config.block_size);
        let shape = ModelShape { head_dim, block_size, weights, kv, experts };
        devices.iter().try_for_each(|device| device.check(&shape))?;
        let vision = model.vision.as_ref().filter(|_| config.limit_mm_per_prompt.0 > 0);
        if let Some(vision) = vision {
            let tower = ModelShape { head_dim: vision.head_dim(), experts: None, ..shape };
            devices.iter().try_for_each(|device| device.check(&tower))?;
        }
        let longest = model.max_position_embeddings;
        let max_model_len = config.max_model_len.unwrap_or(longest);
        if max_model_len > longest {
            let limit = model.position_limit();
            return Err(Error::Config(format!("--max-model-len {max_model_len}: must be at most {longest}, {limit}")));
        }
        let routing = model.experts.as_ref().map(ExpertsConfig::routing_format);
        if config.return_routing && routing.is_none() {
            let name = model.architecture_name();
            return Err(Error::Config(format!("--return-routing: {name} has no experts; remove the flag")));
        }
        Ok(Self {
            world: config.tp,
            weights,
            kv,
            max_model_len,
            max_batch_tokens: config.max_batch_tokens,
            max_image_tokens: vision.map_or(Ok(0), |vision| max_image_tokens(config, vision))?,
            block_size: config.block_size,
            uses_graphs: match config.graphs {
                // According to NCCL, captures of several devices in one process can deadlock; no card has run them yet.
                GraphsChoice::Auto => config.tp == 1,
                GraphsChoice::On => true,
                GraphsChoice::Off => false,
            },
            routing: routing.filter(|_| config.return_routing),
            keeps_base: config.keep_base,
            devices,
        })
    }

    /// The shape of a rank's workspace.
    fn workspace(&self, model: &ModelConfig, rank: usize) -> WorkspaceShape {
        WorkspaceShape {
            config: model.clone(),
            build: self.build(rank),
            max_batch_tokens: self.max_batch_tokens,
            keeps_routing: self.routing.is_some(),
        }
    }

    /// The shape of the vision tower's workspace; `None` for a model that takes no images.
    fn tower(&self, model: &ModelConfig, rank: usize) -> Option<TowerShape> {
        let (build, max_image_tokens) = (self.build(rank), self.max_image_tokens);
        let (embedding_rows, layer_rows) = (self.embedding_rows(), TOWER_ROWS);
        let shape = |config| TowerShape { config, build, max_image_tokens, embedding_rows, layer_rows };
        model.vision.clone().filter(|_| max_image_tokens > 0).map(shape)
    }

    fn build(&self, rank: usize) -> Build {
        let device = self.devices.of_rank(rank).clone();
        Build { device, partition: Partition::new(rank, self.world), weights: self.weights }
    }

    fn scheduler(&self, config: &Config, model: &ModelConfig) -> SchedulerConfig {
        SchedulerConfig {
            max_num_seqs: config.max_num_seqs,
            max_batch_tokens: config.max_batch_tokens,
            max_model_len: self.max_model_len,
            max_queued_samples: config.max_queued_samples,
            images: self.images(model),
            routing_row_bytes: self.routing.map_or(0, |format| format.row_bytes()),
            speculation: match config.speculation {
                SpeculationChoice::Auto => Speculation::AUTO,
                SpeculationChoice::Off => Speculation::OFF,
            },
        }
    }

    /// How pictures are encoded. A step has time for as many patches in as many blocks as take about as long as the
    /// decoder takes for its tokens: a block of the tower computes as much as a layer of the decoder of its width.
    fn images(&self, model: &ModelConfig) -> ImageScheduling {
        let Some(vision) = model.vision.as_ref().filter(|_| self.max_image_tokens > 0) else {
            return ImageScheduling::default();
        };
        let work = |width: usize, layers: usize| (width * width * layers) as u64;
        let of_step = self.max_batch_tokens as u64 * work(model.hidden_size, model.num_layers);
        let of_token = vision.unit() as u64 * work(vision.hidden_size, 1);
        ImageScheduling {
            embedding_rows: self.embedding_rows(),
            tower_blocks: vision.depth,
            token_blocks: usize::try_from(of_step / of_token).unwrap_or(usize::MAX),
        }
    }

    /// Tokens of images whose embeddings are held at once: of two images of the most tokens.
    fn embedding_rows(&self) -> usize {
        2 * self.max_image_tokens
    }

    fn dtype_name(&self) -> &'static str {
        match self.weights {
            StorageDtype::F32 => "float32",
            StorageDtype::Bf16 => "bfloat16",
        }
    }
}

/// Most tokens of an image.
///
/// # Errors
/// `Config` if `--max-image-tokens` is less than a tile has.
fn max_image_tokens(config: &Config, vision: &VisionConfig) -> Result<usize> {
    let (given, fewest) = (config.max_image_tokens.unwrap_or(MAX_IMAGE_TOKENS), vision.fewest_tokens());
    if given < fewest {
        return Err(Error::Config(format!(
            "--max-image-tokens {given}: must be at least {fewest}, the tokens of one of this model's tiles"
        )));
    }
    Ok(given.min(vision.most_tokens()))
}

/// Opens the devices of the ranks. They share the configured number of threads evenly, with at least one each. Warns
/// if results are not batch-invariant.
///
/// # Errors
/// `Config` if the device does not exist or lacks the requested kernels.
fn open_devices(config: &Config) -> Result<Devices> {
    let kernel = config.kernel.to_possible_value().expect("every choice has a name");
    let threads = (config.threads() / config.tp).max(1);
    let attention = config.attention;
    let options = DeviceOptions { threads, kernel: kernel.get_name(), attention, ..DeviceOptions::default() };
    let devices = Devices::open(config.device, config.tp, &options)?;
    if !config.is_batch_invariant() {
        tracing::warn!(
            "results depend on the batch (--attention flash, or --all-reduce nccl with several ranks): samples cannot \
             be replayed bit for bit, and their log-probabilities may differ from scored ones"
        );
    }
    Ok(devices)
}

/// All parameters of the model, with their serving type and shards.
fn parameters(weights: &mut Model, model: &ModelConfig, layout: &Layout) -> Result<Parameters> {
    let specs = specs_of(weights)?;
    let parameters = Parameters::new(specs, layout.weights.into(), layout.world, model.tie_word_embeddings);
    let Some(vision) = model.vision.as_ref().filter(|_| layout.max_image_tokens == 0) else { return Ok(parameters) };
    tracing::info!(
        "--limit-mm-per-prompt image=0: the vision tower is not loaded; its tensors are ignored in pushes and adapters"
    );
    let mut tower = Tower::new(vision, &layout.build(0), vision.fewest_tokens())?;
    Ok(parameters.with_ignored(specs_of(&mut tower)?))
}

/// The parameters of a model or of a part of it.
fn specs_of(part: &mut impl Parameterized) -> Result<Vec<ParamSpec>> {
    let mut specs = Vec::new();
    part.visit(&mut |spec, _| {
        specs.push(spec.clone());
        Ok(())
    })?;
    Ok(specs)
}

/// Number of weights: elements of all parameters.
fn count_weights(parameters: &Parameters) -> u64 {
    parameters.iter().map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
}
