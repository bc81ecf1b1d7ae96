//! The server's only configuration: command line and environment variables, checked once and passed on as structs.

mod adapters;
mod choices;
mod command_line;
mod image_limit;
mod lora_module;
mod tenants;
mod values;
mod watch;

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{CommandFactory as _, Parser};
use clap_complete::Shell;
use rollout_kernels::{AllReduce, AttentionKernel, Backend};

pub use adapters::AdapterFlags;
pub use choices::*;
pub use command_line::CommandLine;
pub use image_limit::ImageLimit;
pub use lora_module::LoraModule;
pub use tenants::TenantFlags;
pub use values::HttpPort;
use values::{parse_bytes, parse_host_name, parse_port};
pub use watch::WatchLimits;

use crate::error::{Error, Result};

/// The device of NVIDIA GPUs, which only builds with the feature `cuda` have.
const CUDA: &str = "cuda";

/// Largest `--tp`: more ranks than any machine has devices. Without a limit, a typing error would start that many
/// threads.
pub const MAX_RANKS: usize = 64;

/// Usage and a first run stand before the list of flags, so that they are on the first screen.
const HELP: &str = "{about-with-newline}\n{usage-heading} {usage}\n\n{before-help}{all-args}{after-help}";
const FIRST_RUN: &str = "\
First run:
  rollout-server ./SmolLM2-135M-Instruct    a directory from Hugging Face, a GGUF file, or org/name
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{\"prompt\": \"Hello\"}'
  open http://localhost:8000/               the server's page

Beside a training job on GPUs:
  rollout-server MODEL --device cuda --tp 4 --mem-util 0.5 --weights-dir /checkpoints

Flags of vLLM and SGLang work under their names if they mean the same here.
";

/// A rollout inference server for RL fine-tuning: groups of samples with log-probabilities you can trust, over gRPC
/// and HTTP.
#[derive(Clone, Debug, Parser)]
#[command(name = "rollout-server", version, help_template = HELP, before_help = FIRST_RUN, args_override_self = true)]
#[command(override_usage = "rollout-server MODEL [FLAGS]\n       rollout-server completion SHELL")]
pub struct Config {
    /// Model to serve: a Hugging Face directory, a GGUF file, or org/name or org/name@revision on the hub.
    #[arg(long, help_heading = "Model", env = "ROLLOUT_MODEL", value_name = "DIR|FILE.gguf|ORG/NAME[@REV]")]
    pub model: String,

    /// Names of the model in requests over HTTP; answers give the first [default: the value of --model].
    #[arg(
        long,
        help_heading = "Model",
        env = "ROLLOUT_SERVED_MODEL_NAME",
        num_args = 1..,
        value_delimiter = ',',
        value_name = "NAME"
    )]
    pub served_model_name: Vec<String>,

    /// Jinja template that turns chat messages into a prompt [default: the model's].
    #[arg(long, help_heading = "Model", env = "ROLLOUT_CHAT_TEMPLATE", value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    /// Format of the reasoning that chats over HTTP report apart from the answer: auto finds it from the chat template,
    /// none leaves it in the answer.
    #[arg(long, help_heading = "Model", env = "ROLLOUT_REASONING_PARSER", value_enum, default_value_t = ReasoningChoice::Auto)]
    pub reasoning_parser: ReasoningChoice,

    /// Type of weights and KV cache; auto takes the checkpoint's (bfloat16 for float16 and quantised checkpoints).
    #[arg(long, help_heading = "Model", env = "ROLLOUT_DTYPE", value_enum, default_value_t = DTypeChoice::Auto)]
    pub dtype: DTypeChoice,

    /// Maximum tokens of a prompt and its completion together [default: the model's].
    #[arg(long, help_heading = "Model", env = "ROLLOUT_MAX_MODEL_LEN", value_name = "TOKENS")]
    pub max_model_len: Option<usize>,

    /// Address to listen on.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_HOST", default_value = "127.0.0.1")]
    pub host: String,

    /// Port of gRPC; 0 picks a free one and prints it.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_PORT", default_value_t = 50051)]
    pub port: u16,

    /// Port of HTTP (OpenAI's API, vLLM's routes for trainers, metrics, the page); 0 picks a free one and prints it,
    /// off disables HTTP.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_HTTP_PORT", default_value = "8000", value_parser = parse_port, value_name = "PORT|off")]
    pub http_port: HttpPort,

    /// Maximum samples in one step.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_MAX_NUM_SEQS", default_value_t = 256, value_name = "N")]
    pub max_num_seqs: usize,

    /// Maximum tokens computed in one step; longer prompts are prefilled in chunks.
    #[arg(
        long,
        help_heading = "Serving",
        env = "ROLLOUT_MAX_BATCH_TOKENS",
        default_value_t = 1024,
        value_name = "TOKENS"
    )]
    pub max_batch_tokens: usize,

    /// Maximum images of a prompt, as vLLM's flag: image=N, or {"image": N}. 0 rejects prompts with images.
    #[arg(
        long,
        help_heading = "Serving",
        env = "ROLLOUT_LIMIT_MM_PER_PROMPT",
        default_value = "image=1",
        value_name = "image=N"
    )]
    pub limit_mm_per_prompt: ImageLimit,

    /// Keep the experts that tokens take beside their KV, so that requests may ask for them (a mixture-of-experts model
    /// only).
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_RETURN_ROUTING")]
    pub return_routing: bool,

    /// Keep the base beside the weights into which an adapter is merged, so that requests may ask for scores under it
    /// (`returns.base`). Takes as much memory as the weights.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_KEEP_BASE")]
    pub keep_base: bool,

    /// Maximum samples that wait; further requests fail with RESOURCE_EXHAUSTED.
    #[arg(
        long,
        help_heading = "Serving",
        env = "ROLLOUT_MAX_QUEUED_SAMPLES",
        default_value_t = 65_536,
        value_name = "N"
    )]
    pub max_queued_samples: usize,

    /// Maximum connections per port; further ones are closed at once. Lowered if the process may not open that many
    /// files.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_MAX_CONNECTIONS", default_value_t = 1024, value_name = "N")]
    pub max_connections: usize,

    /// Whether all streams of completions and chats have usage figures in each event and at the end, as vLLM's flag.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_ENABLE_FORCE_INCLUDE_USAGE")]
    pub enable_force_include_usage: bool,

    /// Whether answers to completions and chats with one sample have its times, as vLLM's flag.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_ENABLE_PER_REQUEST_METRICS")]
    pub enable_per_request_metrics: bool,

    /// Whether `usage` has `prompt_tokens_details`, the tokens found in the prefix cache, as vLLM's flag.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_ENABLE_PROMPT_TOKENS_DETAILS")]
    pub enable_prompt_tokens_details: bool,

    /// Whether completions and chats write tokens beside log-probabilities as `token_id:N` unless a request's
    /// `return_tokens_as_token_ids` is false, as vLLM's flag.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_RETURN_TOKENS_AS_TOKEN_IDS")]
    pub return_tokens_as_token_ids: bool,

    /// Seconds that running requests get to finish after SIGTERM.
    #[arg(
        long,
        help_heading = "Serving",
        env = "ROLLOUT_SHUTDOWN_GRACE_SECONDS",
        default_value_t = 30,
        value_name = "SECONDS"
    )]
    pub shutdown_grace_seconds: u64,

    /// Ceiling on the memory of the whole process, as a fraction of the device's memory (on the CPU: of the smallest of
    /// the machine's memory, its cgroup's limit and the limits of `ulimit -v` and `ulimit -d`).
    #[arg(long, help_heading = "Memory", env = "ROLLOUT_MEM_UTIL", default_value_t = 0.5, value_name = "F")]
    pub mem_util: f64,

    /// Size of the KV cache, e.g. 2GiB [default: the rest of the ceiling].
    #[arg(long, help_heading = "Memory", env = "ROLLOUT_KV_CACHE_BYTES", value_parser = parse_bytes, value_name = "BYTES")]
    pub kv_cache_bytes: Option<u64>,

    /// Memory that the KV cache leaves free for pushes, e.g. 1GiB [default: 1.5 times the weights' size, at most a
    /// quarter of the memory beside them].
    #[arg(long, help_heading = "Memory", env = "ROLLOUT_STAGING_BYTES", value_parser = parse_bytes, value_name = "BYTES")]
    pub staging_bytes: Option<u64>,

    /// Memory for all requests and replies in flight, e.g. 256MiB; beyond it requests fail with RESOURCE_EXHAUSTED
    /// [default: a quarter of the memory beside the weights, at most 512 MiB].
    #[arg(long, help_heading = "Memory", env = "ROLLOUT_REQUEST_BYTES", value_parser = parse_bytes, value_name = "BYTES")]
    pub request_bytes: Option<u64>,

    /// Ceiling on the host memory of the process if the device has its own memory, e.g. 64GiB [default: half of the
    /// smallest of the machine's memory, its cgroup's limit and the limits of `ulimit -v` and `ulimit -d`].
    #[arg(long, help_heading = "Memory", env = "ROLLOUT_HOST_MEMORY", value_parser = parse_bytes, value_name = "BYTES")]
    pub host_memory: Option<u64>,

    /// Maximum tokens of an image, for a model that takes images: buffers are made for so many. Larger pixels are
    /// rejected, larger files resized [default: 1280, and larger files are rejected too].
    #[arg(long, help_heading = "Memory", env = "ROLLOUT_MAX_IMAGE_TOKENS", value_name = "TOKENS")]
    pub max_image_tokens: Option<usize>,

    /// Memory for images that requests may name by their hashes after they were sent once, e.g. 64MiB. 0 holds none.
    #[arg(
        long,
        help_heading = "Memory",
        env = "ROLLOUT_IMAGE_BYTES",
        default_value = "64MiB",
        value_parser = parse_bytes,
        value_name = "BYTES"
    )]
    pub image_bytes: u64,

    /// Tokens per KV block.
    #[arg(long, help_heading = "Memory", env = "ROLLOUT_BLOCK_SIZE", default_value_t = 16, value_name = "TOKENS")]
    pub block_size: usize,

    /// Number of tensor-parallel ranks.
    #[arg(long, help_heading = "Parallelism", env = "ROLLOUT_TP", default_value_t = 1, value_name = "N")]
    pub tp: usize,

    /// Compute threads of all ranks together [default: one per core].
    #[arg(long, help_heading = "Parallelism", env = "ROLLOUT_THREADS", value_name = "N")]
    pub threads: Option<usize>,

    /// How sums over ranks are added: in one tree, so that results do not depend on --tp, or by NCCL.
    #[arg(long, help_heading = "Parallelism", env = "ROLLOUT_ALL_REDUCE", value_enum, default_value_t = AllReduce::Tree)]
    pub all_reduce: AllReduce,

    /// Device that runs the model.
    #[arg(long, help_heading = "Device", env = "ROLLOUT_DEVICE", value_parser = device_parser(), default_value = Backend::ALL[0].name())]
    pub device: Backend,

    /// Instruction set of the kernels; auto is the fastest that the processor has.
    #[arg(long, help_heading = "Device", env = "ROLLOUT_KERNEL", value_enum, default_value_t = KernelChoice::Auto)]
    pub kernel: KernelChoice,

    /// Kernels for the attention of prompts: the server's own, which keep results independent of the batch, or
    /// FlashAttention 2, if the build has it.
    #[arg(long, help_heading = "Device", env = "ROLLOUT_ATTENTION", value_enum, default_value_t = AttentionKernel::Invariant)]
    pub attention: AttentionKernel,

    /// Whether decode steps are captured as CUDA graphs and replayed, if the device supports it: auto does so with one
    /// rank, on with any number of ranks; off launches each kernel separately.
    #[arg(long, help_heading = "Device", env = "ROLLOUT_GRAPHS", value_enum, default_value_t = GraphsChoice::Auto)]
    pub graphs: GraphsChoice,

    /// Existing directory; pushes may name files and directories below it [default: pushes name none].
    #[arg(long, help_heading = "Weights and adapters", env = "ROLLOUT_WEIGHTS_DIR", value_name = "DIR")]
    pub weights_dir: Option<PathBuf>,

    /// Seconds after which an open push that sends nothing ends without effect.
    #[arg(
        long,
        help_heading = "Weights and adapters",
        env = "ROLLOUT_UPDATE_IDLE_SECONDS",
        default_value_t = 60,
        value_name = "SECONDS"
    )]
    pub update_idle_seconds: u64,

    #[command(flatten)]
    pub adapters: AdapterFlags,

    #[command(flatten)]
    pub tenants: TenantFlags,

    /// File of the accepted tokens, one `generate TOKEN` or `control TOKEN` per line, each with a
    /// tenant if there are several; reloaded when it changes.
    #[arg(long, help_heading = "Security", env = "ROLLOUT_AUTH_TOKEN_FILE", value_name = "FILE")]
    pub auth_token_file: Option<PathBuf>,

    /// Accepted tokens with the role control, as vLLM's flag. Other users of the machine can read command lines: prefer
    /// --auth-token-file.
    #[arg(
        long,
        help_heading = "Security",
        env = "ROLLOUT_API_KEY",
        hide_env_values = true,
        num_args = 1..,
        value_name = "TOKEN",
        conflicts_with = "auth_token_file"
    )]
    pub api_key: Vec<String>,

    /// An `--api-key` from vLLM's variable; it has no effect if other tokens are given.
    #[arg(long, hide = true, env = "VLLM_API_KEY", hide_env_values = true)]
    pub vllm_api_key: Option<String>,

    /// Host name, without a port, that clients use for the HTTP port; repeatable. On 127.0.0.1, and whenever this is
    /// given, the server accepts only IP addresses, localhost, --host and these names.
    #[arg(long, help_heading = "Security", env = "ROLLOUT_ALLOW_HOST", value_delimiter = ',', value_parser = parse_host_name, value_name = "NAME")]
    pub allow_host: Vec<String>,

    /// Allow listening beyond this machine without --auth-token-file: anyone who reaches the server can then use and
    /// change the model.
    #[arg(long, help_heading = "Security", env = "ROLLOUT_INSECURE")]
    pub insecure: bool,

    /// Accept chat templates of requests (`chat_template`), as vLLM's flag: a template decides what the model reads,
    /// and takes the server's time.
    #[arg(long, help_heading = "Security", env = "ROLLOUT_TRUST_REQUEST_CHAT_TEMPLATE")]
    pub trust_request_chat_template: bool,

    /// Server certificate in PEM, followed by its intermediate certificates; both ports then use TLS.
    #[arg(long, help_heading = "Security", env = "ROLLOUT_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of --tls-cert in PEM, without a passphrase.
    #[arg(long, help_heading = "Security", env = "ROLLOUT_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Authorities in PEM; every client must have a certificate from one of them.
    #[arg(long, help_heading = "Security", env = "ROLLOUT_TLS_CLIENT_CA", value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,

    /// Whether steps with few rows also verify drafts, tokens that the group has produced before: the results are the
    /// same, in fewer steps.
    #[arg(long, help_heading = "Speculation", env = "ROLLOUT_SPECULATION", value_enum, default_value_t = SpeculationChoice::Auto)]
    pub speculation: SpeculationChoice,

    /// Log level (error, warn, info, debug, trace) or a filter of the tracing crate.
    #[arg(long, help_heading = "Observability", env = "ROLLOUT_LOG", default_value = "info")]
    pub log: String,

    /// Format of the log lines.
    #[arg(long, help_heading = "Observability", env = "ROLLOUT_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// Names of the metrics that vLLM has too: its own, so that its dashboards and autoscalers work, ours, or both.
    #[arg(
        long,
        help_heading = "Observability",
        env = "ROLLOUT_METRICS_NAMES",
        value_enum,
        value_delimiter = ',',
        default_value = "vllm,rollout",
        value_name = "NAMES"
    )]
    pub metrics_names: Vec<MetricNames>,

    /// File for the phases of the engine and of pushes, written as they end, in Chrome's trace format, which Perfetto
    /// opens.
    #[arg(long, help_heading = "Observability", env = "ROLLOUT_TRACE_FILE", value_name = "FILE")]
    pub trace_file: Option<PathBuf>,

    /// Print the time of each part of a step: at the end, and at each SIGUSR1 for the time since the last report.
    #[arg(long, help_heading = "Observability", env = "ROLLOUT_PROFILE")]
    pub profile: bool,

    #[command(flatten)]
    pub watch: WatchLimits,
}

impl Config {
    /// The script with which `shell` completes the flags.
    pub fn completion(shell: Shell) -> Vec<u8> {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Self::command(), "rollout-server", &mut script);
        script
    }
}

/// Parses the name of a device; `--help` lists only devices that are for serving.
fn device_parser() -> impl TypedValueParser<Value = Backend> {
    let value = |device: &Backend| PossibleValue::new(device.name()).hide(!device.is_for_serving());
    // A build for the CPU knows the other device's name, to say which build has it.
    let values = Backend::ALL.iter().map(value).chain([PossibleValue::new(CUDA).hide(true)]);
    PossibleValuesParser::new(values).try_map(|name| {
        let known = Backend::ALL.iter().copied().find(|device| device.name() == name);
        known.ok_or("this build is for the CPU; `make cuda` builds the server for NVIDIA GPUs")
    })
}

impl Config {
    /// Compute threads of all ranks together: `--threads`, or one per core.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Names of the policy: `--served-model-name`, or `--model` without the revision of the hub.
    pub fn served_names(&self) -> Vec<String> {
        if !self.served_model_name.is_empty() {
            return self.served_model_name.clone();
        }
        let is_path = Path::new(&self.model).exists();
        let name = self.model.split_once('@').filter(|_| !is_path).map_or(&*self.model, |(name, _)| name);
        vec![name.to_owned()]
    }

    /// Whether a row's results have the same bits in every batch.
    pub fn is_batch_invariant(&self) -> bool {
        self.attention == AttentionKernel::Invariant && (self.tp == 1 || self.all_reduce == AllReduce::Tree)
    }

    /// Checks each flag's bounds, as far as they do not depend on the model or the machine.
    ///
    /// # Errors
    /// `Config` with the flag, its value and the allowed values.
    pub fn check(&self) -> Result<()> {
        let fail = |flag: &str, value: &dyn std::fmt::Display, want: &str| {
            Err(Error::Config(format!("--{flag} {value}: must be {want}")))
        };
        if !(self.mem_util > 0.0 && self.mem_util <= 1.0) {
            return fail("mem-util", &self.mem_util, "above 0 and at most 1");
        }
        if self.port != 0 && self.http_port == Some(self.port) {
            return fail("port", &self.port, "different from --http-port: --port is gRPC's, and HTTP has this one");
        }
        if !(1..=MAX_RANKS).contains(&self.tp) {
            return fail("tp", &self.tp, &format!("from 1 to {MAX_RANKS}"));
        }
        if !(1..=1024).contains(&self.threads()) {
            return fail("threads", &self.threads(), "from 1 to 1024");
        }
        if let Some(tokens) = self.max_image_tokens.filter(|tokens| !(1..=65_536).contains(tokens)) {
            return fail("max-image-tokens", &tokens, "from 1 to 65536");
        }
        if !(1..=1024).contains(&self.block_size) {
            return fail("block-size", &self.block_size, "from 1 to 1024 tokens");
        }
        if !(1..=65_536).contains(&self.max_num_seqs) {
            return fail("max-num-seqs", &self.max_num_seqs, "from 1 to 65536");
        }
        if self.max_batch_tokens == 0 || self.max_batch_tokens > 1 << 20 {
            return fail("max-batch-tokens", &self.max_batch_tokens, "from 1 to 1048576");
        }
        self.adapters.check()?;
        self.tenants.check()?;
        // At most 2^24, because each waiting sample is a record of some hundred bytes.
        if !(1..=1 << 24).contains(&self.max_queued_samples) {
            return fail("max-queued-samples", &self.max_queued_samples, "from 1 to 16777216");
        }
        // At most as many as there are ports.
        if !(1..=65_536).contains(&self.max_connections) {
            return fail("max-connections", &self.max_connections, "from 1 to 65536");
        }
        // At most a day, so that sums of times do not overflow.
        if self.shutdown_grace_seconds > 86_400 {
            return fail("shutdown-grace-seconds", &self.shutdown_grace_seconds, "at most 86400 (one day)");
        }
        // At least many times the memory of a request of one prompt and its reply.
        if self.request_bytes.is_some_and(|bytes| bytes < 1 << 20) {
            return fail("request-bytes", &self.request_bytes.unwrap_or(0), "at least 1MiB");
        }
        if let Some(dir) = self.weights_dir.as_ref().filter(|dir| !dir.is_dir()) {
            let want = "an existing directory, below which pushes name files";
            return fail("weights-dir", &dir.display(), want);
        }
        // At most a week: a sender that is silent for longer has abandoned the push.
        if !(1..=604_800).contains(&self.update_idle_seconds) {
            return fail("update-idle-seconds", &self.update_idle_seconds, "from 1 to 604800");
        }
        match (&self.tls_cert, &self.tls_key, &self.tls_client_ca) {
            (Some(cert), None, _) => return fail("tls-cert", &cert.display(), "given together with --tls-key"),
            (None, Some(key), _) => return fail("tls-key", &key.display(), "given together with --tls-cert"),
            (None, None, Some(ca)) => {
                return fail("tls-client-ca", &ca.display(), "given together with --tls-cert and --tls-key");
            }
            _ => {}
        }
        if self.max_model_len.is_some_and(|n| n < 2) {
            return fail("max-model-len", &self.max_model_len.unwrap_or(0), "at least 2");
        }
        self.watch.check()
    }
}

#[cfg(test)]
mod tests;
