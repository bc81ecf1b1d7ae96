//! All metrics as one text, in a fixed order. Those that vLLM has too come twice, the second time under its names.

use super::exposition::Exposition;
use super::labels::{Finished, Label};
use super::{Histogram, Lifecycle, Metrics, PushKind, SleepState, StepKind, TRANSPORTS, Transport};
use crate::config::MetricNames;
use crate::memory::MemoryReport;
use crate::observe::Timeline;
use crate::types::{ENGINE_STATS, EngineStats, TenantStats};

/// Facts from outside the engine, read at each scrape.
#[derive(Clone, Debug, Default)]
pub struct ServerFacts {
    /// `None` while the model loads. vLLM's names have values only after that, as in vLLM.
    pub served: Option<ServedFacts>,
    pub panics: u64,
    pub log_lines_dropped: u64,
    pub resident_bytes: u64,
    pub traffic_bytes: u64,
    pub open_files: Option<u64>,
    pub max_open_files: u64,
    pub started_unix_seconds: f64,
}

/// Facts of the loaded model.
#[derive(Clone, Debug, Default)]
pub struct ServedFacts {
    /// Labels of `rollout:server_info`.
    pub info: Vec<(&'static str, String)>,
    /// vLLM's `model_name`.
    pub model_name: String,
    pub dtype: String,
    pub block_size: u64,
    pub max_model_len: u64,
}

const C: &str = "counter";
const G: &str = "gauge";

impl Metrics {
    /// The metrics under these names in Prometheus' text format.
    pub fn render(&self, timeline: &Timeline, names: &[MetricNames], facts: &ServerFacts) -> String {
        let mut text = Exposition::new(names.contains(&MetricNames::Rollout));
        let stats = self.engine();
        engine(&mut text, &stats);
        self.requests(&mut text);
        self.tenants(&mut text);
        self.tool_calls(&mut text);
        self.latencies(&mut text, [&self.request_time, &self.queue_time, &self.prompt_lengths], u64::MAX);
        cache(&mut text, &stats);
        blocks(&mut text, &stats);
        self.steps(&mut text, timeline);
        self.step_tokens(&mut text);
        self.pushes(&mut text);
        self.sleeps(&mut text);
        self.sleep_state(&mut text);
        self.memory(&mut text, facts);
        self.server(&mut text, facts);
        if let Some(served) = facts.served.as_ref().filter(|_| names.contains(&MetricNames::Vllm)) {
            self.under_vllms_names(&mut text, &stats, served);
        }
        text.into_text()
    }

    /// Writes the metrics that vLLM has too, with its names, labels and bounds. Its requests are our samples.
    fn under_vllms_names<'a>(&self, text: &mut Exposition<'a>, stats: &EngineStats, served: &'a ServedFacts) {
        cache_config(text, stats, served);
        text.vllm_model = Some(&served.model_name);
        engine(text, stats);
        self.samples(text);
        let of_samples = [&self.sample_time, &self.sample_queue_time, &self.sample_prompts];
        self.latencies(text, of_samples, served.max_model_len);
        cache(text, stats);
        self.step_tokens(text);
        self.sleep_state(text);
    }

    fn samples(&self, text: &mut Exposition<'_>) {
        text.begin("rollout:request_success_total", C, "Samples that have ended, by reason.");
        for (reason, count) in Finished::ALL.iter().zip(&self.finished) {
            text.sample(&[("finished_reason", reason.name())], count.get());
        }
    }

    fn tenants(&self, text: &mut Exposition<'_>) {
        let tenants = self.tenants.snapshot();
        for (index, (kind, name, help)) in TenantStats::METRICS.into_iter().enumerate() {
            text.begin(name, kind, help);
            for (tenant, stats) in &tenants {
                text.sample(&[("tenant", tenant.as_str())], stats.values()[index]);
            }
        }
    }

    fn tool_calls(&self, text: &mut Exposition<'_>) {
        let help = "Tool calls in samples, by format and by what has become of them: parsed, or malformed.";
        text.begin("rollout:tool_calls_total", C, help);
        for (format, calls) in self.tool_calls.snapshot() {
            for (outcome, count) in calls.named() {
                text.sample(&[("format", format.name()), ("outcome", outcome)], count);
            }
        }
    }

    fn requests(&self, text: &mut Exposition<'_>) {
        self.samples(text);
        let help = "Requests that have ended: finished, aborted, or the kind of an error.";
        text.begin("rollout:requests_total", C, help);
        for (outcome, count) in &self.outcomes {
            text.sample(&[("outcome", outcome)], count.get());
        }
    }

    /// Writes the histograms of requests and samples. Time, queue time and prompts are those of requests under our
    /// names, and of samples under vLLM's, whose bounds for tokens end at `longest`.
    fn latencies(&self, text: &mut Exposition<'_>, [time, queue_time, prompts]: [&Histogram; 3], longest: u64) {
        let histograms = [
            ("rollout:time_to_first_token_seconds", "From a request's arrival to each sample's first token.", {
                &self.first_token
            }),
            ("rollout:inter_token_latency_seconds", "Between two tokens of a sample.", &self.next_token),
            ("rollout:request_time_per_output_token_seconds", "Of a sample: its time per token after the first.", {
                &self.token_time
            }),
            ("rollout:e2e_request_latency_seconds", "From a request's arrival to its end.", time),
            ("rollout:request_queue_time_seconds", "From a request's arrival to its first step.", queue_time),
            ("rollout:request_inference_time_seconds", "From a request's first step to each sample's last token.", {
                &self.inference_time
            }),
            ("rollout:request_prefill_time_seconds", "From a request's first step to each sample's first token.", {
                &self.prefill_time
            }),
            ("rollout:request_decode_time_seconds", "From a sample's first token to its end.", &self.decode_time),
        ];
        for (name, help, histogram) in histograms {
            text.begin(name, "histogram", help);
            text.histogram(&[], histogram);
        }
        text.begin("rollout:request_prompt_tokens", "histogram", "Prompt tokens of a request.");
        text.histogram_up_to(longest, &[], prompts);
        text.begin("rollout:request_generation_tokens", "histogram", "Tokens of a sample.");
        text.histogram_up_to(longest, &[], &self.completion_lengths);
    }

    fn step_tokens(&self, text: &mut Exposition<'_>) {
        text.begin("rollout:iteration_tokens_total", "histogram", "Tokens that a step computes.");
        text.histogram(&[], &self.step_tokens);
    }

    fn sleep_state(&self, text: &mut Exposition<'_>) {
        text.begin("rollout:engine_sleep_state", G, "1 for the depth of the sleep, 0 for all others.");
        for state in SleepState::ALL {
            text.sample(&[("sleep_state", state.name())], u8::from(self.sleep_state.get() == state.index()));
        }
    }

    fn steps(&self, text: &mut Exposition<'_>, timeline: &Timeline) {
        text.begin("rollout:step_time_seconds", "histogram", "Time of a step, by what it computes.");
        for (kind, histogram) in StepKind::ALL.iter().zip(&self.step_time) {
            text.histogram(&[("kind", kind.name())], histogram);
        }
        text.begin("rollout:step_samples", "histogram", "Sequences of a step.");
        text.histogram(&[], &self.step_samples);
        text.begin("rollout:engine_seconds_total", C, "Time of the engine since the start, by phase.");
        for (phase, nanos) in timeline.sums() {
            // Only the timeline has an entry for brief phases: the sums count each phase by itself.
            if phase != crate::observe::Phase::Brief {
                text.sample(&[("phase", phase.name())], nanos as f64 / 1e9);
            }
        }
    }

    fn each_push(&self) -> impl Iterator<Item = ([(&'static str, &'static str); 2], &super::PushMetrics)> {
        PushKind::ALL.iter().zip(&self.pushes).flat_map(|(kind, row)| {
            let of = move |i: usize| [("kind", kind.name()), ("transport", Transport::ALL[i].name())];
            (0..TRANSPORTS).map(move |i| (of(i), &row[i]))
        })
    }

    fn pushes(&self, text: &mut Exposition<'_>) {
        text.begin("rollout:push_total", C, "Pushes that have ended, by kind, transport and outcome.");
        for ([kind, transport], push) in self.each_push() {
            text.sample(&[kind, transport, ("outcome", "applied")], push.applied.get());
            text.sample(&[kind, transport, ("outcome", "failed")], push.failed.get());
        }
        text.begin("rollout:push_bytes_total", C, "Bytes of applied pushes.");
        self.each_push().for_each(|(labels, push)| text.sample(&labels, push.bytes.get()));
        let histogram = |text: &mut Exposition<'_>, name, help, of: fn(&super::PushMetrics) -> &Histogram| {
            text.begin(name, "histogram", help);
            self.each_push().for_each(|(labels, push)| text.histogram(&labels, of(push)));
        };
        let help = "From a push's header to the end of its verification.";
        histogram(text, "rollout:push_seconds", help, |push| &push.seconds);
        let help = "Time for which nothing stepped while a push was applied.";
        histogram(text, "rollout:push_pause_seconds", help, |push| &push.pause);
        text.single(
            "rollout:pushes_open",
            G,
            "Pushes that are received or wait to be applied.",
            self.pushes_open.get(),
        );
    }

    fn sleeps(&self, text: &mut Exposition<'_>) {
        text.begin("rollout:lifecycle", G, "1 for the state of the lifecycle, 0 for all others.");
        for state in Lifecycle::ALL {
            text.sample(&[("state", state.name())], u8::from(self.lifecycle.get() == state.index()));
        }
        text.begin("rollout:sleep_seconds", "histogram", "Time to give memory back, by the level of the sleep.");
        for (level, histogram) in ["1", "2"].into_iter().zip(&self.sleep_time) {
            text.histogram(&[("level", level)], histogram);
        }
        text.begin("rollout:sleep_freed_bytes_total", C, "Bytes given back by sleeps, as measured.");
        for (tag, counter) in ["weights", "kv_cache"].into_iter().zip(&self.slept_bytes) {
            text.sample(&[("tag", tag)], counter.get());
        }
        text.begin("rollout:wake_seconds", "histogram", "Time to take memory again and to load the weights.");
        for (reload, histogram) in ["false", "true"].into_iter().zip(&self.wake_time) {
            text.histogram(&[("reload", reload)], histogram);
        }
        text.single("rollout:wake_bytes_total", C, "Bytes taken again by wakes, as reserved.", self.woken_bytes.get());
    }

    fn memory(&self, text: &mut Exposition<'_>, facts: &ServerFacts) {
        let [device, host] = &self.ledgers;
        let [names, help] = [
            ["rollout:memory_bytes", "rollout:memory_ceiling_bytes", "rollout:memory_total_bytes"],
            [
                "The ledger: bytes reserved, by use.",
                "Bytes that --mem-util allows the process.",
                "Bytes of the device's memory.",
            ],
        ];
        ledger(text, &device.report(), names, help);
        let [names, help] = [
            ["rollout:host_memory_bytes", "rollout:host_memory_ceiling_bytes", "rollout:host_memory_total_bytes"],
            [
                "The host's ledger, where the device has memory of its own: bytes reserved, by use.",
                "Bytes of the host's memory that --host-memory allows the process; 0 where that is the device's.",
                "Bytes of the host's memory; 0 where that is the device's.",
            ],
        ];
        ledger(text, &host.report(), names, help);
        let help = "Bytes that requests and replies under way take.";
        text.single("rollout:request_bytes", G, help, facts.traffic_bytes);
        let help = "Resident memory of the process.";
        text.single("process_resident_memory_bytes", G, help, facts.resident_bytes);
    }

    fn server(&self, text: &mut Exposition<'_>, facts: &ServerFacts) {
        text.single("rollout:connections", G, "Open connections.", self.connections.get());
        text.begin("grpc_server_handled_total", C, "gRPC calls that have ended, by status.");
        for ([service, method, code], count) in self.grpc_calls.snapshot() {
            text.sample(&[("grpc_service", &service), ("grpc_method", &method), ("grpc_code", &code)], count);
        }
        text.begin("http_requests_total", C, "HTTP requests that were answered, by class of status.");
        for ([handler, method, status], count) in self.http_calls.snapshot() {
            text.sample(&[("handler", &handler), ("method", &method), ("status", &status)], count);
        }
        let panics = facts.panics + self.engine().internal_errors;
        text.single("rollout:panics_total", C, "Panics that ended one call or request each.", panics);
        let help = "Reports of steps, orders and pushes that made no progress for --watchdog-seconds.";
        text.single("rollout:stalls_total", C, help, self.stalls.get());
        let help = "Log lines dropped because standard error was not read.";
        text.single("rollout:log_lines_dropped_total", C, help, facts.log_lines_dropped);
        text.begin("rollout:build_info", G, "1, with the server's version.");
        text.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        if let Some(served) = &facts.served {
            let labels: Vec<(&str, &str)> = served.info.iter().map(|(name, value)| (*name, value.as_str())).collect();
            text.begin("rollout:server_info", G, "1, with the model and how it is served.");
            text.sample(&labels, 1);
        }
        let help = "Start of the process, in seconds since 1970.";
        text.single("process_start_time_seconds", G, help, format_args!("{:.3}", facts.started_unix_seconds));
        if let Some(open_files) = facts.open_files {
            text.single("process_open_fds", G, "Open file descriptors.", open_files);
        }
        text.single("process_max_fds", G, "Most file descriptors.", facts.max_open_files);
    }
}

/// Writes the numbers that the engine publishes; under vLLM's names those that vLLM has.
fn engine(text: &mut Exposition<'_>, stats: &EngineStats) {
    for (stat, value) in ENGINE_STATS.iter().zip(stats.values()) {
        if let Some((kind, name)) = stat.metric.filter(|_| stat.is_vllms || text.vllm_model.is_none()) {
            text.single(name, kind, stat.help, value);
        }
    }
}

/// Writes the numbers of the prefix cache.
fn cache(text: &mut Exposition<'_>, stats: &EngineStats) {
    let help = "Prompt tokens looked for in the prefix cache.";
    text.single("rollout:prefix_cache_queries_total", C, help, stats.prompt_tokens);
    let help = "Prompt tokens found in the prefix cache.";
    text.single("rollout:prefix_cache_hits_total", C, help, stats.cached_tokens);
    let help = "Share of KV blocks that sequences hold, from 0 to 1.";
    text.single("rollout:kv_cache_usage_perc", G, help, stats.kv_cache_usage());
}

/// Writes the KV blocks by their state.
fn blocks(text: &mut Exposition<'_>, stats: &EngineStats) {
    let &EngineStats { total_blocks: total, free_blocks: free, cached_blocks: cached, .. } = stats;
    let used = total.saturating_sub(free);
    text.begin("rollout:kv_cache_blocks", G, "KV blocks: held by sequences, free with a cached prefix, free.");
    for (state, blocks) in [("used", used), ("cached", cached), ("free", free.saturating_sub(cached))] {
        text.sample(&[("state", state)], blocks);
    }
}

/// Writes a ledger as three metrics: its entries, its ceiling, and the total memory.
fn ledger(text: &mut Exposition<'_>, report: &MemoryReport, names: [&'static str; 3], help: [&str; 3]) {
    text.begin(names[0], G, help[0]);
    for (used_for, bytes) in &report.entries {
        text.sample(&[("use", used_for.name())], bytes);
    }
    text.single(names[1], G, help[1], report.ceiling);
    text.single(names[2], G, help[2], report.total);
}

/// Writes vLLM's facts of the KV cache that this server has too, once the engine has published its blocks.
fn cache_config(text: &mut Exposition<'_>, stats: &EngineStats, served: &ServedFacts) {
    if stats.total_blocks == 0 {
        return;
    }
    let tokens = stats.total_blocks * served.block_size;
    let [blocks, block_size] = [stats.total_blocks, served.block_size].map(|n| n.to_string());
    let concurrency = tokens as f64 / served.max_model_len.max(1) as f64;
    text.begin("vllm:cache_config_info", G, "1, with the configuration of the KV cache.");
    text.sample(
        &[
            ("block_size", &block_size),
            ("cache_dtype", &served.dtype),
            ("enable_prefix_caching", "True"),
            ("engine", "0"),
            ("kv_cache_max_concurrency", &format!("{concurrency:?}")),
            ("kv_cache_size_tokens", &tokens.to_string()),
            ("num_gpu_blocks", &blocks),
        ],
        1,
    );
}
