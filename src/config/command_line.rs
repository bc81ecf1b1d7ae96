//! From arguments to a task. The model may be the first argument, and flags of vLLM 0.33 and SGLang 0.5 may have their
//! names there: each is replaced by our flag of the same meaning, accepted if it asks for what this server does anyway,
//! or rejected with the reason.

use clap::{Parser as _, ValueEnum as _};
use clap_complete::Shell;

use super::Config;
use crate::error::{Error, Result};

use Arity::{Many, One, Switch};
use Meaning::{Always, Only, Rejected, Same, Sets};

/// The task of a command line.
pub enum CommandLine {
    /// Serve with these flags. Each note names a flag that was translated.
    Serve { config: Box<Config>, notes: Vec<String> },
    /// Print a script with which a shell completes the flags.
    Completion(Shell),
}

impl CommandLine {
    /// Parses the arguments behind the program's name. `--help`, `--version` and unknown flags end the process.
    ///
    /// # Errors
    /// `Config` for a shell without completion, and for a flag of another server that asks for what this one does not
    /// have.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut arguments = arguments.into_iter().peekable();
        if arguments.next_if(|argument| argument == "completion").is_some() {
            let shell = arguments.next().unwrap_or_default();
            return Shell::from_str(&shell, true).map(Self::Completion).map_err(|_| {
                Error::Config(format!("completion {shell:?}: must be bash, zsh, fish, elvish or powershell"))
            });
        }
        let Translated { arguments, mut notes, .. } = translate(arguments)?;
        let mut config = Config::parse_from(std::iter::once("rollout-server".into()).chain(arguments));
        notes.extend(take_api_key(&mut config));
        Ok(Self::Serve { config: Box::new(config), notes })
    }
}

/// Takes the key of clients from vLLM's variable, unless the configuration has tokens. Returns a note if it does.
fn take_api_key(config: &mut Config) -> Option<String> {
    let has_tokens = !config.api_key.is_empty() || config.auth_token_file.is_some();
    let key = config.vllm_api_key.take().filter(|key| !key.is_empty() && !has_tokens)?;
    config.api_key.push(key);
    Some("VLLM_API_KEY is --api-key here".into())
}

/// A command line in our flags.
#[derive(Debug, Default, PartialEq)]
struct Translated {
    /// The arguments behind the program's name.
    arguments: Vec<String>,
    /// One line for each argument that was replaced or has no effect.
    notes: Vec<String>,
    /// Our flags that switches of others set, and their values.
    settings: Vec<(&'static str, &'static str)>,
}

/// How many values a flag takes.
#[derive(Clone, Copy, PartialEq)]
enum Arity {
    Switch,
    One,
    /// All arguments up to the next flag.
    Many,
}

enum Meaning {
    /// Our flag, which takes the same values.
    Same(&'static str),
    /// Our flag with its value.
    Sets(&'static str, &'static str),
    /// No effect, for this reason.
    Always(&'static str),
    /// No effect with these values; others are rejected for this reason.
    Only(&'static [&'static str], &'static str),
    /// Rejected for this reason.
    Rejected(&'static str),
}

/// Names of flags, without hyphens in front, their values and their meaning.
type Row = (&'static [&'static str], Arity, Meaning);

#[rustfmt::skip]
const FLAGS: &[Row] = &[
    // Model
    (&["model-path"], One, Same("model")),
    (&["tokenizer", "tokenizer-path"], One, Rejected("the tokenizer is the model's; put its files into the model's directory")),
    (&["tokenizer-mode"], One, Only(&["auto", "hf", "slow", "fast"], "the tokenizer is tokenizer.json of the model")),
    (&["skip-tokenizer-init"], Switch, Always("a model without a tokenizer serves token ids")),
    (&["trust-remote-code"], Switch, Always("code of a model is never run")),
    (&["revision"], One, Rejected("give the revision with the model: --model org/name@revision")),
    (&["code-revision", "tokenizer-revision"], One, Rejected("model and tokenizer have one revision: --model org/name@revision")),
    (&["hf-token"], One, Rejected("set the variable HF_TOKEN instead, which other processes cannot read")),
    (&["ignore-patterns"], Many, Always("only the files of the model are downloaded")),
    (&["download-dir"], One, Rejected("set the variable HF_HOME instead")),
    (&["load-format"], One, Only(&["auto", "safetensors", "hf", "gguf"], "checkpoints are safetensors or GGUF")),
    (&["config-format"], One, Only(&["auto", "hf"], "config.json has the format of transformers")),
    (&["model-impl"], One, Only(&["auto", "vllm", "sglang"], "models run on this server's own implementation")),
    (&["hf-overrides", "json-model-override-args"], One, Rejected("edit config.json of the model instead")),
    (&["generation-config"], One, Only(&["auto", "vllm"], "requests give their sampling parameters")),
    (&["override-generation-config"], One, Rejected("requests give their sampling parameters")),
    (&["runner"], One, Only(&["auto", "generate"], "this server generates and scores")),
    (&["task"], One, Only(&["auto", "generate"], "this server generates and scores")),
    (&["convert"], One, Only(&["auto", "none"], "this server generates and scores")),
    (&["is-embedding"], Switch, Rejected("this server generates and scores; it computes no embeddings")),
    (&["quantization", "-q"], One, Rejected("weights are served as bfloat16 or float32; give the unquantised checkpoint, or a GGUF file, which is dequantised")),
    (&["context-length"], One, Same("max-model-len")),
    (&["language-model-only", "trust-request-mm-kwargs"], Switch, Always("this server takes images as pixels, over gRPC")),
    // Memory
    (&["gpu-memory-utilization", "device-memory-utilization", "mem-fraction-static"], One, Same("mem-util")),
    (&["kv-cache-memory-bytes"], One, Same("kv-cache-bytes")),
    (&["kv-cache-dtype"], One, Only(&["auto", "bfloat16"], "the KV cache has the type of the weights; see --dtype")),
    (&["num-gpu-blocks-override"], One, Rejected("give the size of the cache in bytes: --kv-cache-bytes")),
    (&["page-size"], One, Same("block-size")),
    (&["swap-space", "cpu-offload-gb", "kv-offloading-size"], One, Only(&["0", "0.0"], "nothing is swapped to the host while the server runs")),
    (&["enable-sleep-mode", "enable-memory-saver", "enable-weights-cpu-backup"], Switch, Always("sleep and wake are always available")),
    (&["enable-cumem-allocator", "sleep-mode-offload-cudagraph"], Switch, Always("sleep releases all memory of the device that it can")),
    (&["sleep-mode-backend"], One, Only(&["cumem"], "sleep has one implementation")),
    (&["enable-prefix-caching"], Switch, Always("the prefix cache is always on")),
    (&["no-enable-prefix-caching", "disable-radix-cache"], Switch, Rejected("the prefix cache is always on: it changes no result, and a push of weights empties it")),
    (&["prefix-caching-hash-algo"], One, Always("blocks are hashed with SHA-256")),
    // Parallelism
    (&["tensor-parallel-size", "tp-size", "-tp"], One, Same("tp")),
    (&["pipeline-parallel-size", "pp-size", "-pp"], One, Only(&["1"], "ranks share each layer: use --tp")),
    (&["data-parallel-size", "dp-size", "dp", "-dp"], One, Only(&["1"], "start one server per replica, and address them together with rollout_client.Fleet")),
    (&["nnodes", "-n"], One, Only(&["1"], "one server runs on one machine; address several with rollout_client.Fleet")),
    (&["enable-expert-parallel", "-ep", "enable-ep-weight-filter"], Switch, Always("each rank of --tp has whole experts")),
    (&["ep-size", "expert-parallel-size", "ep"], One, Always("each rank of --tp has whole experts")),
    (&["enable-eplb"], Switch, Always("experts stay on their ranks")),
    (&["eplb-config"], One, Always("experts stay on their ranks")),
    (&["all2all-backend", "moe-backend", "moe-a2a-backend", "moe-runner-backend"], One, Always("experts have one implementation for each device")),
    (&["kv-transfer-config", "kv-events-config", "ec-transfer-config"], One, Rejected("keys and values stay in the server that computed them")),
    (&["distributed-executor-backend"], One, Always("ranks are threads of one process")),
    (&["disable-custom-all-reduce"], Switch, Always("sums over ranks are added in a tree; the alternative is --all-reduce nccl")),
    (&["worker-extension-cls", "worker-cls"], One, Always("weights are pushed over gRPC or HTTP, without code in the workers; there is no /collective_rpc")),
    (&["weight-transfer-config"], One, Always("each transport of weights is always available")),
    // Serving
    (&["max-num-batched-tokens", "chunked-prefill-size"], One, Same("max-batch-tokens")),
    (&["max-running-requests"], One, Same("max-num-seqs")),
    (&["max-num-queued-reqs", "max-queued-requests"], One, Rejected("give the number of samples that may wait: --max-queued-samples")),
    (&["enable-chunked-prefill"], Switch, Always("long prompts are always computed in chunks")),
    (&["no-enable-chunked-prefill"], Switch, Rejected("long prompts are always computed in chunks, with the bits of a whole prefill; --max-batch-tokens is the size of a chunk")),
    (&["async-scheduling", "no-async-scheduling"], Switch, Always("tokens are sent while the next step runs")),
    (&["scheduling-policy", "schedule-policy"], One, Only(&["fcfs"], "requests are scheduled in the order of their arrival")),
    (&["scheduler-delay-factor", "schedule-conservativeness"], One, Always("the scheduler has no such parameter")),
    (&["attention-backend", "attention-config", "-ac"], One, Rejected("use --attention invariant or --attention flash")),
    (&["enforce-eager", "disable-cuda-graph"], Switch, Sets("graphs", "off")),
    (&["compilation-config", "-cc", "kernel-config", "optimization-level", "-O"], One, Always("kernels are compiled ahead; --graphs controls CUDA graphs")),
    (&["-O0", "-O1", "-O2", "-O3"], Switch, Always("kernels are compiled ahead; --graphs controls CUDA graphs")),
    (&["cuda-graph-max-bs", "max-cudagraph-capture-size"], One, Always("graphs are captured for the sizes that occur")),
    (&["enable-deterministic-inference"], Switch, Always("results never depend on the batch")),
    (&["max-logprobs"], One, Always("each request may ask for 100 tokens, and name 128 others")),
    (&["logprobs-mode"], One, Only(&["processed_logprobs"], "requests choose with logprobs_mode, \"raw\" or \"processed\"; the default is processed")),
    (&["seed", "random-seed"], One, Always("requests give their seeds; without one, the server draws and returns it")),
    (&["enable-auto-tool-choice"], Switch, Always("calls of tools are always parsed")),
    (&["tool-call-parser"], One, Only(&["hermes", "llama3_json", "mistral", "qwen3_coder", "qwen3_xml", "qwen", "qwen25", "llama3"], "the chat template says which of the formats hermes, qwen3_coder, llama3_json and mistral the model writes")),
    (&["structured-outputs-config", "guided-decoding-backend", "grammar-backend"], One, Always("llguidance is the only backend, and computes all grammars")),
    (&["reasoning-config"], One, Always("the marks of reasoning are <think> and </think>")),
    (&["exclude-tools-when-tool-choice-none"], Switch, Rejected("leave tools out of such requests")),
    (&["enable-prompt-embeds"], Switch, Rejected("prompts are texts or token ids")),
    (&["tool-server"], One, Rejected("the client runs the tools")),
    (&["watermark-config"], One, Rejected("samples have no watermark")),
    (&["default-chat-template-kwargs"], One, Rejected("requests give their variables of the template: chat_template_kwargs")),
    (&["chat-template-content-format"], One, Only(&["auto", "string", "openai"], "it is found from the template")),
    (&["speculative-config", "-sc", "speculative-algorithm", "speculative-draft-model-path"], One, Rejected("drafts come from the group's own tokens: --speculation auto")),
    (&["enable-return-routed-experts"], Switch, Same("return-routing")),
    (&["return-sampling-mask"], Switch, Rejected("not available yet")),
    // Adapters
    (&["enable-lora"], Switch, Sets("max-adapters", "8")),
    (&["max-loras", "max-loras-per-batch"], One, Same("max-adapters")),
    (&["max-cpu-loras", "max-loaded-loras"], One, Always("--max-adapters alone limits the resident adapters")),
    (&["lora-dtype"], One, Only(&["auto", "float32"], "adapters are kept in float32")),
    (&["lora-target-modules"], Many, Always("an adapter may have factors for every linear layer")),
    (&["fully-sharded-loras"], Switch, Always("factors are sharded as their layers are")),
    // HTTP and security
    (&["ssl-keyfile"], One, Same("tls-key")),
    (&["ssl-certfile"], One, Same("tls-cert")),
    (&["ssl-ca-certs"], One, Same("tls-client-ca")),
    (&["enable-ssl-refresh"], Switch, Always("certificates are reloaded when they change")),
    (&["allowed-origins", "allowed-methods", "allowed-headers"], One, Rejected("pages of other origins are never allowed; put a proxy in front of the server")),
    (&["root-path"], One, Rejected("let the proxy strip its prefix")),
    (&["middleware"], One, Rejected("code cannot be loaded into the server; put a proxy in front of it")),
    (&["uds"], One, Rejected("the server listens on --host and --port")),
    (&["api-server-count", "-asc", "renderer-num-workers", "tokenizer-worker-num"], One, Always("one process serves all connections with a thread per core")),
    (&["enable-scale-out", "tokens-only", "enable-tokenizer-info-endpoint", "enable-server-load-tracking"], Switch, Always("those of its routes that this server has are always there (docs/http.md)")),
    (&["enable-request-id-headers"], Switch, Rejected("the id of an answer has the request's X-Request-Id")),
    // Observability
    (&["uvicorn-log-level", "log-level"], One, Same("log")),
    (&["disable-log-requests", "disable-log-stats", "no-enable-log-requests", "disable-uvicorn-access-log", "disable-fastapi-docs"], Switch, Always("the log has a line per request at --log info, and no access log")),
    (&["enable-log-requests", "log-requests"], Switch, Always("the log has a line per request at --log info")),
    (&["show-hidden-metrics-for-version"], One, Always("no metric is hidden")),
    (&["enable-metrics"], Switch, Always("/metrics is always there")),
    (&["profiler-config"], One, Rejected("use --profile or --trace-file")),
    (&["otlp-traces-endpoint"], One, Rejected("phases are written to --trace-file")),
    (&["shutdown-timeout"], One, Same("shutdown-grace-seconds")),
];

/// Translates the arguments behind the program's name.
///
/// # Errors
/// `Config` if a flag of vLLM or SGLang asks for what this server does not have.
fn translate(arguments: impl IntoIterator<Item = String>) -> Result<Translated> {
    let mut arguments = arguments.into_iter().peekable();
    let mut translated = Translated::default();
    let is_value = |argument: &String| !argument.starts_with('-');
    if arguments.next_if(|argument| argument == "serve").is_some() {
        translated.notes.push("`serve` is not needed: rollout-server MODEL".into());
    }
    if let Some(model) = arguments.next_if(is_value) {
        translated.arguments.push(format!("--model={model}"));
    }
    while let Some(argument) = arguments.next() {
        let (flag, mut value) = match argument.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (&*argument, None),
        };
        let name = flag.strip_prefix("--").map_or_else(|| flag.to_owned(), |name| name.replace('_', "-"));
        // `--config.key value` sets a part of `--config`, which has no flag here that takes parts.
        let whole = name.split_once('.').map_or(&*name, |(whole, _)| whole);
        let is_ours = |meaning: &Meaning| matches!(meaning, Same(_) | Sets(..));
        let is_row = |(names, _, meaning): &&Row| names.contains(&whole) && (whole == name || !is_ours(meaning));
        let row = FLAGS.iter().find(|row| flag.starts_with('-') && is_row(row));
        let Some((_, arity, meaning)) = row else {
            let separator = if value.is_some() { "=" } else { "" };
            let dashes = if flag.starts_with("--") { "--" } else { "" };
            translated.arguments.push(format!("{dashes}{name}{separator}{}", value.unwrap_or_default()));
            continue;
        };
        if *arity == One && value.is_none() {
            value = arguments.next_if(is_value);
        }
        while *arity == Many && arguments.next_if(is_value).is_some() {}
        translated.add(flag, value, meaning)?;
    }
    translated.add_settings();
    Ok(translated)
}

/// Whether `argument` is the flag `name`, with a value or without.
fn is_flag(argument: &str, name: &str) -> bool {
    let flag = argument.split_once('=').map_or(argument, |(flag, _)| flag);
    flag.strip_prefix("--") == Some(name)
}

impl Translated {
    /// Adds the flag's translation.
    fn add(&mut self, flag: &str, value: Option<String>, meaning: &Meaning) -> Result<()> {
        let given = value.as_ref().map_or_else(|| flag.to_owned(), |value| format!("{flag} {value}"));
        match *meaning {
            Same(ours) => {
                self.notes.push(format!("{flag} is --{ours} here"));
                self.arguments.push(format!("--{ours}"));
                self.arguments.extend(value);
            }
            Sets(ours, setting) => {
                self.notes.push(format!("{flag} is --{ours} {setting} here"));
                self.settings.push((ours, setting));
            }
            Always(why) => self.notes.push(format!("{given} has no effect here: {why}")),
            Only(values, why) if value.as_ref().is_some_and(|value| values.contains(&&**value)) => {
                self.notes.push(format!("{given} has no effect here: {why}"));
            }
            Only(_, why) | Rejected(why) => return Err(Error::Config(format!("{given}: {why}"))),
        }
        Ok(())
    }

    /// Adds the settings of switches, unless the command line gives a value.
    fn add_settings(&mut self) {
        for (ours, setting) in std::mem::take(&mut self.settings) {
            if !self.arguments.iter().any(|given| is_flag(given, ours)) {
                self.arguments.push(format!("--{ours}={setting}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> Result<Translated> {
        translate(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn flags_of_others_become_ours() {
        for (line, ours) in [
            ("--model m --tp 2", "--model m --tp 2"),
            ("--max_model_len 64", "--max-model-len 64"),
            ("org/name", "--model=org/name"),
            ("serve org/name --port 1", "--model=org/name --port 1"),
            ("m --gpu-memory-utilization 0.9", "--model=m --mem-util 0.9"),
            ("m --gpu_memory_utilization=0.9", "--model=m --mem-util 0.9"),
            ("m -tp 2 --enforce-eager", "--model=m --tp 2 --graphs=off"),
            ("m --tensor-parallel-size", "--model=m --tp"),
            ("m --trust-remote-code --seed 3 --dtype auto", "--model=m --dtype auto"),
            ("m --pipeline-parallel-size 1", "--model=m"),
            ("m --tp 4 --enable-expert-parallel --moe-backend triton", "--model=m --tp 4"),
            ("m --enable-return-routed-experts --ep-size 4", "--model=m --return-routing"),
            ("m --enable-lora", "--model=m --max-adapters=8"),
            ("m --enable-lora --max-loras 2", "--model=m --max-adapters 2"),
            ("m --lora-target-modules q_proj k_proj --tp 2", "--model=m --tp 2"),
            ("--log=a_b=debug", "--log=a_b=debug"),
            ("m --structured-outputs-config.backend xgrammar --tp 2", "--model=m --tp 2"),
            ("m --structured_outputs_config.disable_any_whitespace=true -cc.mode=3 -O3", "--model=m"),
            ("m --max-loras.x 3", "--model=m --max-loras.x 3"),
        ] {
            assert_eq!(translated(line).unwrap().arguments.join(" "), ours, "{line}");
        }
    }

    #[test]
    fn each_replaced_flag_has_its_note() {
        let notes = |line| translated(line).unwrap().notes;
        assert!(notes("--model m --tp 2 --mem-util 0.4").is_empty());
        assert_eq!(notes("m --tensor-parallel-size 2"), ["--tensor-parallel-size is --tp here"]);
        assert_eq!(
            notes("m --seed 3"),
            ["--seed 3 has no effect here: requests give their seeds; without one, the server draws and returns it"]
        );
        assert_eq!(
            notes("m --structured-outputs-config.backend guidance"),
            ["--structured-outputs-config.backend guidance has no effect here: llguidance is the only backend, and \
                 computes all grammars"]
        );
    }

    #[test]
    fn the_key_of_vllm_is_taken_without_tokens_of_ours() {
        let taken = |line: &str, key: &str| {
            let mut config = Config::parse_from(line.split_whitespace());
            config.vllm_api_key = Some(key.into());
            let note = take_api_key(&mut config);
            (config.api_key, note.is_some())
        };
        assert_eq!(taken("rollout-server --model m", "key"), (vec!["key".into()], true));
        assert_eq!(taken("rollout-server --model m", ""), (vec![], false));
        assert_eq!(taken("rollout-server --model m --api-key own", "key"), (vec!["own".into()], false));
        assert_eq!(taken("rollout-server --model m --auth-token-file f", "key"), (vec![], false));
    }

    #[test]
    fn the_last_of_equal_flags_counts() {
        let config = Config::parse_from("rollout-server --model m --tp 2 --mem-util 0.1 --tp 4".split_whitespace());
        assert_eq!(config.tp, 4);
    }

    #[test]
    fn a_flag_for_what_is_missing_says_so() {
        let error = |line| translated(line).unwrap_err().to_string();
        assert!(error("m -pp 2").contains("-pp 2: ranks share each layer: use --tp"), "{}", error("m -pp 2"));
        assert!(error("m --quantization awq").contains("--quantization awq: weights are served as bfloat16 or"));
        let error_of_part = error("m --speculative-config.method ngram");
        assert!(error_of_part.contains("--speculative-config.method ngram: drafts come from"), "{error_of_part}");
        assert!(error("m --no-enable-prefix-caching").contains("--no-enable-prefix-caching: the prefix cache is"));
    }

    #[test]
    fn no_flag_has_two_meanings_or_is_ours() {
        use clap::CommandFactory as _;
        let ours: Vec<String> =
            crate::config::Config::command().get_arguments().filter_map(|a| a.get_long().map(str::to_owned)).collect();
        let mut names: Vec<&str> = FLAGS.iter().flat_map(|(names, ..)| names.iter().copied()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| !ours.iter().any(|ours| ours == name)), "{ours:?}");
        for (_, _, meaning) in FLAGS {
            if let Same(name) | Sets(name, _) = meaning {
                assert!(ours.iter().any(|ours| ours == name), "--{name}");
            }
        }
    }
}
