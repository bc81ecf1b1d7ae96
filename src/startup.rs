//! From a configuration to a running engine: opens the model, divides the memory, builds the ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rollout_kernels::{Devices, KvDtype, ModelShape, WeightDtype};

use crate::cache::KvCacheManager;
use crate::comm::{Communicator, LocalGroup, Solo};
use crate::config::{Config, DTypeChoice, SpeculationChoice};
use crate::engine::{COMMAND_QUEUE, Engine, EngineHandle, Setup};
use crate::error::{Error, Result};
use crate::executor::{ModelRunner, RankWeights, Ranks, resident_adapter_bytes};
use crate::memory::{MemoryBudget, MemoryReport, MemoryUse, Traffic, human_bytes};
use crate::model::config::ModelConfig;
use crate::model::{Build, Decoder, Parameterized, Workspace, WorkspaceShape, kv_bytes_per_block, kv_caches};
use crate::observe::{Observer, Recorder, TIMELINE_BYTES};
use crate::scheduler::{Scheduler, SchedulerConfig, Speculation};
use crate::server::{ModelFacts, PromptEncoder, ServerInfo, ServingContext};
use crate::text::{ChatTemplate, Tokenizer};
use crate::weights::{Checkpoint, Dtype, ModelFiles, ModelSource, Parameters, Partition, Sources, TokenizerFiles};

/// Bytes set aside for what is not reserved one by one: code, threads, tokenizer, and the allocator's slack. With
/// SmolLM2-135M, resident memory less the reservations touched: 45 MiB when idle, an estimated 115 MiB after 64 samples
/// (the touched part of the cache is counted from its blocks). What the transport holds of frames that are not whole
/// comes out of it too: 32 MiB of long ones, and 96 KiB at most for each connection; and so do the 4 MiB of the
/// timeline.
const PROCESS_BYTES: u64 = 192 << 20;
const _: () = assert!(TIMELINE_BYTES < 4 << 20, "docs/observability.md says so");

/// Most bytes that TLS holds of one connection: two records as they are read, one that arrives, its decrypted bytes,
/// and one that is sent, with what a growing buffer takes more.
const TLS_CONNECTION_BYTES: u64 = 96 << 10;

/// Most bytes that are set aside for requests and replies in flight where `--request-bytes` is not given: what several
/// batches of a large trainer take while they are decoded.
const MAX_REQUEST_BYTES: u64 = 512 << 20;
/// Fewest bytes that are set aside for requests and replies in flight: a request of a few prompts, its text being
/// encoded, and its reply.
const MIN_REQUEST_BYTES: u64 = 8 << 20;

/// A running engine and what is known about it.
pub struct Started {
    pub engine: EngineHandle,
    pub traffic: Traffic,
    /// Ends after `Command::Shutdown`, or when all handles are gone.
    pub thread: JoinHandle<Result<()>>,
    pub model: ModelConfig,
    pub model_name: String,
    pub dtype: &'static str,
    pub max_model_len: usize,
    pub parameters: Arc<Parameters>,
    /// Number of weights (elements of all parameters); a tied head counts once.
    pub num_weights: u64,
    pub kernel: &'static str,
    pub text: Text,
}

impl Started {
    /// What the server needs, and the engine's thread.
    pub fn into_context(self, config: &Config) -> (ServingContext, JoinHandle<Result<()>>) {
        let Self { engine, thread, model, text, .. } = self;
        let info = ServerInfo {
            model: self.model_name,
            architecture: model.architecture_name().into(),
            dtype: self.dtype.into(),
            device: config.device.name().into(),
            tensor_parallel_size: config.tp,
            max_num_seqs: config.max_num_seqs,
            max_batch_tokens: config.max_batch_tokens,
            block_size: config.block_size,
            parameters: self.num_weights,
            kernel: self.kernel.into(),
            max_adapters: config.max_adapters,
            max_lora_rank: config.max_lora_rank,
        };
        let facts = ModelFacts {
            vocab_size: model.vocab_size,
            max_model_len: self.max_model_len,
            eos_token_ids: model.eos_token_ids,
            encoder: text.tokenizer.map(|tokenizer| Arc::new(PromptEncoder::new(tokenizer, text.chat_template))),
        };
        let sources = Arc::new(Sources::new(config.weights_dir.clone()));
        let update_idle = Duration::from_secs(config.update_idle_seconds);
        let (traffic, parameters) = (self.traffic, self.parameters);
        (ServingContext { model: Arc::new(facts), info, engine, traffic, parameters, sources, update_idle }, thread)
    }
}

/// The model's tokenizer and chat template. A model without a tokenizer serves token ids only.
pub struct Text {
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub chat_template: Option<ChatTemplate>,
}

impl Text {
    fn open(files: &TokenizerFiles) -> Result<Self> {
        let (tokenizer, chat_template) = match files {
            TokenizerFiles::Gguf(metadata) => {
                (Some(Tokenizer::from_gguf(metadata)?), ChatTemplate::from_gguf(metadata)?)
            }
            TokenizerFiles::HuggingFace { tokenizer_json, tokenizer_config_json, chat_template } => (
                tokenizer_json.exists().then(|| Tokenizer::from_file(tokenizer_json)).transpose()?,
                ChatTemplate::from_files(tokenizer_config_json.as_deref(), chat_template.as_deref())?,
            ),
        };
        Ok(Self { tokenizer: tokenizer.map(Arc::new), chat_template })
    }
}

/// Everything that all ranks are built alike with: sizes, precisions and devices.
#[derive(Clone)]
struct Layout {
    world: usize,
    weights: WeightDtype,
    kv: KvDtype,
    max_model_len: usize,
    max_batch_tokens: usize,
    block_size: usize,
    devices: Devices,
}

/// Opens the model, fills the memory plan, loads the weights and starts the engine. The observer sees the load as the
/// timeline's first phase.
///
/// # Errors
/// `Config` or `ResourceExhausted`, with one message that says what to change.
pub fn start(config: &Config, observer: Observer, recorder: Recorder) -> Result<Started> {
    config.check()?;
    let files = ModelSource::parse(&config.model)?.open()?;
    let model = ModelConfig::from_files(&files)?;
    model.check_tensor_parallel(config.tp)?;
    check_ranks(config)?;
    let layout = Layout::new(config, &model)?;
    let text = Text::open(&files.tokenizer)?;

    let mut budget = MemoryBudget::new(layout.devices.total_bytes(), config.mem_util);
    let mut decoders = reserve_fixed(&mut budget, config, &model, &layout)?;
    let traffic = reserve_requests(&mut budget, config, &model, &layout)?;
    let blocks = reserve_kv(&mut budget, config, &model, &layout)?;
    let parameters = Arc::new(parameters(&mut decoders[0], &model, &layout)?);
    print_ledger(&budget.report(), blocks, &layout);

    let ModelFiles { name: model_name, checkpoint, .. } = files;
    let num_weights = count_weights(&checkpoint, &model);
    let progress = Progress::new(&checkpoint, layout.world);
    let ingredients = Ingredients {
        model: model.clone(),
        layout: layout.clone(),
        checkpoint: Arc::new(checkpoint),
        blocks,
        progress,
    };
    let executor = start_ranks(decoders, ingredients)?;
    let scheduler = Scheduler::new(
        SchedulerConfig {
            max_num_seqs: config.max_num_seqs,
            max_batch_tokens: config.max_batch_tokens,
            max_model_len: layout.max_model_len,
            max_queued_samples: config.max_queued_samples,
            speculation: match config.speculation {
                SpeculationChoice::Auto => Speculation::AUTO,
                SpeculationChoice::Off => Speculation::OFF,
            },
        },
        KvCacheManager::new(blocks, layout.block_size),
    );
    let (sender, commands) = sync_channel(COMMAND_QUEUE);
    let setup = Setup {
        parameters: parameters.clone(),
        budget,
        traffic: traffic.clone(),
        max_adapters: config.max_adapters,
        max_lora_rank: config.max_lora_rank,
        observer,
        recorder,
    };
    let engine = Engine::new(executor, scheduler, text.tokenizer.clone(), commands, setup);
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || engine.run());
    Ok(Started {
        engine: EngineHandle::new(sender),
        traffic,
        thread: thread.map_err(|e| Error::Internal(format!("the engine's thread did not start: {e}")))?,
        dtype: layout.dtype_name(),
        max_model_len: layout.max_model_len,
        model,
        model_name,
        parameters,
        num_weights,
        kernel: layout.devices.of_rank(0).kernel(),
        text,
    })
}

/// # Errors
/// `Config` if the ranks of the device cannot reach one another.
fn check_ranks(config: &Config) -> Result<()> {
    if config.tp == 1 || config.device.is_on_the_host() {
        return Ok(());
    }
    let (tp, device) = (config.tp, config.device.name());
    Err(Error::Config(format!("--tp {tp}: --device {device} has no communication between ranks yet; use --tp 1")))
}

impl Layout {
    fn new(config: &Config, model: &ModelConfig) -> Result<Self> {
        let is_float32 = match config.dtype {
            DTypeChoice::Float32 => true,
            DTypeChoice::Bfloat16 => false,
            DTypeChoice::Auto => model.dtype == Some(Dtype::F32),
        };
        let weights = if is_float32 { WeightDtype::F32 } else { WeightDtype::Bf16 };
        let kv = if is_float32 { KvDtype::F32 } else { KvDtype::Bf16 };
        let devices = open_devices(config)?;
        let shape = ModelShape { head_dim: model.head_dim, block_size: config.block_size, weights, kv };
        devices.iter().try_for_each(|device| device.check(&shape))?;
        let longest = model.max_position_embeddings;
        let max_model_len = config.max_model_len.unwrap_or(longest);
        if max_model_len > longest {
            return Err(Error::Config(format!(
                "--max-model-len {max_model_len}: the model's positions end at {longest}; give at most that"
            )));
        }
        Ok(Self {
            world: config.tp,
            weights,
            kv,
            max_model_len,
            max_batch_tokens: config.max_batch_tokens,
            block_size: config.block_size,
            devices,
        })
    }

    fn build(&self, rank: usize) -> Build {
        let device = self.devices.of_rank(rank).clone();
        Build { device, partition: Partition::new(rank, self.world), weights: self.weights }
    }

    fn dtype_name(&self) -> &'static str {
        match self.weights {
            WeightDtype::F32 => "float32",
            WeightDtype::Bf16 => "bfloat16",
        }
    }
}

/// The devices of the ranks. Each has threads of its own; together they are as many as asked for, and at least one
/// each.
///
/// # Errors
/// `Config` if there is no such device, or it has not the kernel that is asked for.
fn open_devices(config: &Config) -> Result<Devices> {
    let kernel = config.kernel.to_possible_value().expect("every choice has a name");
    let threads = (config.threads() / config.tp).max(1);
    Ok(Devices::open(config.device, config.tp, threads, kernel.get_name())?)
}

/// Reserves everything whose size does not depend on the KV cache, and makes the ranks' decoders, whose matrices take
/// their memory only when the ranks load them.
fn reserve_fixed(
    budget: &mut MemoryBudget,
    config: &Config,
    model: &ModelConfig,
    layout: &Layout,
) -> Result<Vec<Decoder>> {
    let decoders: Vec<_> = (0..layout.world)
        .map(|rank| Decoder::new(model, &layout.build(rank), layout.max_model_len))
        .collect::<Result<_>>()?;
    let workspace = Workspace::bytes(model, &layout.build(0), layout.max_batch_tokens) * layout.world as u64;
    let adapters = decoders.iter().enumerate().map(|(rank, decoder)| {
        resident_adapter_bytes(decoder, &layout.build(rank), config.max_lora_rank, config.max_adapters)
    });
    let adapters = adapters.sum::<Result<u64>>()?;
    let weights = decoders.iter().map(Parameterized::bytes).sum();
    let mut entries = vec![
        (MemoryUse::Process, PROCESS_BYTES + tls_bytes(config)),
        (MemoryUse::Weights, weights),
        (MemoryUse::Workspace, workspace),
    ];
    if adapters > 0 {
        entries.push((MemoryUse::Adapters, adapters));
    }
    let needed: u64 = entries.iter().map(|e| e.1).sum();
    let requests = config.request_bytes.unwrap_or(MIN_REQUEST_BYTES);
    let least = needed + requests + block_bytes(model, layout) * blocks_for(layout.max_model_len, layout);
    let total = budget.report().total;
    for (used_for, bytes) in entries {
        budget.reserve(used_for, bytes).map_err(|e| {
            Error::ResourceExhausted(format!(
                "--mem-util {}: {e}; this model with --max-model-len {} needs at least {} in all, {}",
                config.mem_util,
                layout.max_model_len,
                human_bytes(least),
                share_of(total, least),
            ))
        })?;
    }
    Ok(decoders)
}

/// What gives the server so many bytes: a `--mem-util`, or other than that more memory.
fn share_of(total: u64, bytes: u64) -> String {
    if bytes > total {
        return format!("and this machine or container has {}", human_bytes(total));
    }
    // Rounded up, so that it is enough.
    format!("--mem-util {:.3}", (bytes as f64 / total as f64 * 1000.0).ceil() / 1000.0)
}

/// Bytes set aside for TLS on both ports, with all their connections open.
fn tls_bytes(config: &Config) -> u64 {
    let ports = 1 + u64::from(config.http_port.is_some());
    if config.tls_cert.is_some() { ports * config.max_connections as u64 * TLS_CONNECTION_BYTES } else { 0 }
}

/// Reserves the memory of requests and replies in flight, and makes the counter that holds them to it.
fn reserve_requests(
    budget: &mut MemoryBudget,
    config: &Config,
    model: &ModelConfig,
    layout: &Layout,
) -> Result<Traffic> {
    let one_sequence = block_bytes(model, layout) * blocks_for(layout.max_model_len, layout);
    let default = || {
        // A KV cache of one longest sequence must fit beside them.
        let share = (budget.remaining() / 4).min(budget.remaining().saturating_sub(one_sequence));
        share.clamp(MIN_REQUEST_BYTES, MAX_REQUEST_BYTES)
    };
    let bytes = config.request_bytes.unwrap_or_else(default);
    budget.reserve(MemoryUse::Requests, bytes).map_err(|e| {
        Error::ResourceExhausted(format!("--request-bytes {bytes}: {e}; lower it, or raise --mem-util"))
    })?;
    Ok(Traffic::new(bytes))
}

/// Reserves the KV cache, as large as asked for or all that is left, and returns its number of blocks.
fn reserve_kv(budget: &mut MemoryBudget, config: &Config, model: &ModelConfig, layout: &Layout) -> Result<usize> {
    let per_block = block_bytes(model, layout);
    let needed = blocks_for(layout.max_model_len, layout);
    let bytes = config.kv_cache_bytes.unwrap_or_else(|| {
        let left = budget.remaining() - staging_room(budget, config);
        // One sequence must fit; the room for pushes is what is left of the rest, unless it was asked for.
        if config.staging_bytes.is_some() { left } else { left.max(needed * per_block).min(budget.remaining()) }
    });
    let blocks = bytes / per_block;
    if blocks < needed {
        let tokens = blocks * layout.block_size as u64;
        let staging = config.staging_bytes.map(|bytes| format!("beside --staging-bytes {bytes} ")).unwrap_or_default();
        return Err(Error::ResourceExhausted(format!(
            "{staging}the KV cache of {} holds {tokens} tokens, but one sequence of --max-model-len {} needs {}; raise \
             --mem-util to at least {:.3}, or lower --max-model-len to at most {tokens}",
            human_bytes(bytes),
            layout.max_model_len,
            human_bytes(needed * per_block),
            budget.utilization_for(needed * per_block),
        )));
    }
    budget.reserve(MemoryUse::KvCache, blocks * per_block).map_err(|e| {
        Error::ResourceExhausted(format!("--kv-cache-bytes {bytes}: {e}; lower it, or raise --mem-util"))
    })?;
    usize::try_from(blocks).ok().filter(|&b| b <= u32::MAX as usize / layout.block_size).ok_or_else(|| {
        Error::Config(format!("a KV cache of {blocks} blocks is more than slots can number; give --kv-cache-bytes"))
    })
}

/// Bytes that the KV cache leaves free for pushes: shadow weights for a FULL push, or copies of replaced bases below an
/// adapter, and the adapter itself.
fn staging_room(budget: &MemoryBudget, config: &Config) -> u64 {
    let (weights, remaining) = (budget.reserved(MemoryUse::Weights), budget.remaining());
    config.staging_bytes.unwrap_or_else(|| (weights + weights / 2).min(remaining / 4)).min(remaining)
}

/// All parameters of the model, and how they serve.
fn parameters(decoder: &mut Decoder, model: &ModelConfig, layout: &Layout) -> Result<Parameters> {
    let mut specs = Vec::new();
    decoder.visit(&mut |spec, _| {
        specs.push(spec.clone());
        Ok(())
    })?;
    let dtype = match layout.weights {
        WeightDtype::F32 => Dtype::F32,
        WeightDtype::Bf16 => Dtype::Bf16,
    };
    Ok(Parameters::new(specs, dtype, layout.world, model.tie_word_embeddings))
}

/// Bytes of one KV block on all ranks together.
fn block_bytes(model: &ModelConfig, layout: &Layout) -> u64 {
    let one = kv_bytes_per_block(model, &layout.build(0), layout.kv, layout.block_size);
    one * layout.world as u64
}

fn blocks_for(tokens: usize, layout: &Layout) -> u64 {
    tokens.div_ceil(layout.block_size) as u64
}

fn print_ledger(report: &MemoryReport, blocks: usize, layout: &Layout) {
    let share = report.ceiling as f64 / report.total as f64;
    tracing::info!("memory: {} of {} ({share:.2})", human_bytes(report.ceiling), human_bytes(report.total));
    for (name, bytes) in &report.entries {
        tracing::info!("memory: {name:<9} {:>10}", human_bytes(*bytes));
    }
    let tokens = blocks * layout.block_size;
    tracing::info!("memory: the KV cache is {blocks} blocks of {} tokens, {tokens} tokens", layout.block_size);
}

/// What every rank is built from, shared by their threads.
struct Ingredients {
    model: ModelConfig,
    layout: Layout,
    checkpoint: Arc<Checkpoint>,
    blocks: usize,
    progress: Progress,
}

impl Ingredients {
    /// Builds one rank and loads its weights; runs on the rank's own thread.
    fn make(&self, rank: usize, decoder: Decoder, comm: Box<dyn Communicator>) -> Result<ModelRunner> {
        let Self { model, layout, checkpoint, blocks, progress } = self;
        let build = layout.build(rank);
        let ops = build.device.ops();
        let loaded = |bytes| progress.add(bytes);
        let weights = RankWeights::load(&ops, decoder, build.clone(), checkpoint.clone(), &loaded)?;
        let kv = kv_caches(model, &build, layout.kv, *blocks, layout.block_size);
        let workspace = WorkspaceShape { config: model.clone(), build, max_batch_tokens: layout.max_batch_tokens };
        ModelRunner::new(ops, comm, weights, kv, workspace, layout.block_size)
    }
}

fn start_ranks(decoders: Vec<Decoder>, ingredients: Ingredients) -> Result<Ranks> {
    let world = ingredients.layout.world;
    let comms: Vec<Box<dyn Communicator>> = match world {
        1 => vec![Box::new(Solo)],
        world => LocalGroup::create(world).into_iter().map(|g| Box::new(g) as _).collect(),
    };
    let ingredients = Arc::new(ingredients);
    let makers = decoders.into_iter().zip(comms).enumerate().map(|(rank, (decoder, comm))| {
        let ingredients = ingredients.clone();
        move || ingredients.make(rank, decoder, comm)
    });
    let ranks = Ranks::start(ingredients.layout.devices.clone(), makers)?;
    ingredients.progress.done();
    Ok(ranks)
}

/// Logs the progress of loading at each tenth.
struct Progress {
    total: u64,
    loaded: AtomicU64,
    started: Instant,
}

impl Progress {
    fn new(checkpoint: &Checkpoint, world: usize) -> Self {
        let total: u64 =
            checkpoint.names().iter().filter_map(|n| checkpoint.stored_bytes(n).ok()).map(|b| b as u64).sum();
        Self { total: total * world as u64, loaded: AtomicU64::new(0), started: Instant::now() }
    }

    fn add(&self, bytes: u64) {
        let before = self.loaded.fetch_add(bytes, Ordering::Relaxed);
        let tenth = |b: u64| 10 * b / self.total.max(1);
        if tenth(before) != tenth(before + bytes) {
            tracing::info!("loading: {} %", 10 * tenth(before + bytes));
        }
    }

    fn done(&self) {
        let (bytes, seconds) = (self.loaded.load(Ordering::Relaxed), self.started.elapsed().as_secs_f64());
        tracing::info!("loaded {} in {seconds:.2} s", human_bytes(bytes));
    }
}

/// Number of weights (elements of all parameters); a tied head counts once.
fn count_weights(checkpoint: &Checkpoint, model: &ModelConfig) -> u64 {
    let is_copy = |name: &str| model.tie_word_embeddings && name == "lm_head.weight";
    let elements = |name: &&str| checkpoint.shape(name).map_or(0, |s| s.iter().product::<usize>() as u64);
    checkpoint.names().iter().filter(|name| !is_copy(name)).map(elements).sum()
}

#[cfg(test)]
mod tests {
    use super::share_of;

    #[test]
    fn a_share_is_enough_or_there_is_none() {
        assert_eq!(share_of(8 << 30, 2 << 30), "--mem-util 0.250");
        assert_eq!(share_of(3, 1), "--mem-util 0.334");
        assert_eq!(share_of(1 << 30, 1 << 30), "--mem-util 1.000");
        assert_eq!(share_of(300 << 20, 698 << 20), "and this machine or container has 300.0 MiB");
    }
}
