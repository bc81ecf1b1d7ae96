//! All metrics as one text, in a fixed order.

use super::exposition::Exposition;
use super::labels::{Finished, Label};
use super::{Histogram, Lifecycle, Metrics, PushKind, SleepState, StepKind, TRANSPORTS, Transport};
use crate::memory::MemoryReport;
use crate::observe::Timeline;
use crate::types::{ENGINE_STATS, EngineStats};

/// Facts from outside the engine, read at each scrape.
#[derive(Clone, Debug, Default)]
pub struct ServerFacts {
    /// Labels of `rollout:server_info`; empty while the model loads.
    pub info: Vec<(&'static str, String)>,
    pub panics: u64,
    pub log_lines_dropped: u64,
    pub resident_bytes: u64,
    pub traffic_bytes: u64,
    pub open_files: Option<u64>,
    pub max_open_files: u64,
    pub started_unix_seconds: f64,
}

const C: &str = "counter";
const G: &str = "gauge";

impl Metrics {
    /// All metrics in Prometheus' text format.
    pub fn render(&self, timeline: &Timeline, facts: &ServerFacts) -> String {
        let mut text = Exposition::default();
        let stats = self.engine();
        engine(&mut text, &stats);
        self.requests(&mut text);
        self.latencies(&mut text);
        cache(&mut text, &stats);
        self.steps(&mut text, timeline);
        self.pushes(&mut text);
        self.sleeps(&mut text);
        self.memory(&mut text, facts);
        self.server(&mut text, facts);
        text.into_text()
    }

    fn requests(&self, text: &mut Exposition) {
        text.begin("rollout:request_success_total", C, "Samples that have ended, by reason.");
        for (reason, count) in Finished::ALL.iter().zip(&self.finished) {
            text.sample(&[("finished_reason", reason.name())], count.get());
        }
        text.begin(
            "rollout:requests_total",
            C,
            "Requests that have ended: finished, aborted, or the kind of an error.",
        );
        for (outcome, count) in &self.outcomes {
            text.sample(&[("outcome", outcome)], count.get());
        }
    }

    fn latencies(&self, text: &mut Exposition) {
        let histograms = [
            ("rollout:time_to_first_token_seconds", "From a request's arrival to each sample's first token.", {
                &self.first_token
            }),
            ("rollout:inter_token_latency_seconds", "Between two tokens of a sample.", &self.next_token),
            ("rollout:request_time_per_output_token_seconds", "Of a sample: its time per token after the first.", {
                &self.token_time
            }),
            ("rollout:e2e_request_latency_seconds", "From a request's arrival to its end.", &self.request_time),
            ("rollout:request_queue_time_seconds", "From a request's arrival to its first step.", &self.queue_time),
            ("rollout:request_prefill_time_seconds", "From a request's first step to each sample's first token.", {
                &self.prefill_time
            }),
            ("rollout:request_decode_time_seconds", "From a sample's first token to its end.", &self.decode_time),
            ("rollout:request_prompt_tokens", "Prompt tokens of a request.", &self.prompt_lengths),
            ("rollout:request_generation_tokens", "Tokens of a sample.", &self.completion_lengths),
        ];
        for (name, help, histogram) in histograms {
            text.begin(name, "histogram", help);
            text.histogram(&[], histogram);
        }
    }

    fn steps(&self, text: &mut Exposition, timeline: &Timeline) {
        text.begin("rollout:step_time_seconds", "histogram", "Time of a step, by what it computes.");
        for (kind, histogram) in StepKind::ALL.iter().zip(&self.step_time) {
            text.histogram(&[("kind", kind.name())], histogram);
        }
        text.begin("rollout:iteration_tokens_total", "histogram", "Tokens that a step computes.");
        text.histogram(&[], &self.step_tokens);
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

    fn pushes(&self, text: &mut Exposition) {
        text.begin("rollout:push_total", C, "Pushes that have ended, by kind, transport and outcome.");
        for ([kind, transport], push) in self.each_push() {
            text.sample(&[kind, transport, ("outcome", "applied")], push.applied.get());
            text.sample(&[kind, transport, ("outcome", "failed")], push.failed.get());
        }
        text.begin("rollout:push_bytes_total", C, "Bytes of applied pushes.");
        self.each_push().for_each(|(labels, push)| text.sample(&labels, push.bytes.get()));
        let histogram = |text: &mut Exposition, name, help, of: fn(&super::PushMetrics) -> &Histogram| {
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

    fn sleeps(&self, text: &mut Exposition) {
        text.begin("rollout:lifecycle", G, "1 for the state of the lifecycle, 0 for all others.");
        for state in Lifecycle::ALL {
            text.sample(&[("state", state.name())], u8::from(self.lifecycle.get() == state.index()));
        }
        text.begin("rollout:engine_sleep_state", G, "1 for the depth of the sleep, 0 for all others.");
        for state in SleepState::ALL {
            text.sample(&[("sleep_state", state.name())], u8::from(self.sleep_state.get() == state.index()));
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

    fn memory(&self, text: &mut Exposition, facts: &ServerFacts) {
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

    fn server(&self, text: &mut Exposition, facts: &ServerFacts) {
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
        let help = "Log lines dropped because standard error was not read.";
        text.single("rollout:log_lines_dropped_total", C, help, facts.log_lines_dropped);
        text.begin("rollout:build_info", G, "1, with the server's version.");
        text.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        if !facts.info.is_empty() {
            let labels: Vec<(&str, &str)> = facts.info.iter().map(|(name, value)| (*name, value.as_str())).collect();
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

/// Writes the numbers that the engine publishes.
fn engine(text: &mut Exposition, stats: &EngineStats) {
    for (stat, value) in ENGINE_STATS.iter().zip(stats.values()) {
        if let Some((kind, name)) = stat.metric {
            text.single(name, kind, stat.help, value);
        }
    }
}

/// Writes the numbers of the prefix cache and its blocks, under vLLM's names.
fn cache(text: &mut Exposition, stats: &EngineStats) {
    let help = "Prompt tokens looked for in the prefix cache.";
    text.single("rollout:prefix_cache_queries_total", C, help, stats.prompt_tokens);
    let help = "Prompt tokens found in the prefix cache.";
    text.single("rollout:prefix_cache_hits_total", C, help, stats.cached_tokens);
    let &EngineStats { total_blocks: total, free_blocks: free, cached_blocks: cached, .. } = stats;
    let used = total.saturating_sub(free);
    let share = if total == 0 { 0.0 } else { used as f64 / total as f64 };
    text.single("rollout:kv_cache_usage_perc", G, "Share of KV blocks that sequences hold, from 0 to 1.", share);
    text.begin("rollout:kv_cache_blocks", G, "KV blocks: held by sequences, free with a cached prefix, free.");
    for (state, blocks) in [("used", used), ("cached", cached), ("free", free.saturating_sub(cached))] {
        text.sample(&[("state", state)], blocks);
    }
}

/// Writes a ledger as three metrics: its entries, its ceiling, and the total memory.
fn ledger(text: &mut Exposition, report: &MemoryReport, names: [&'static str; 3], help: [&str; 3]) {
    text.begin(names[0], G, help[0]);
    for (used_for, bytes) in &report.entries {
        text.sample(&[("use", used_for.name())], bytes);
    }
    text.single(names[1], G, help[1], report.ceiling);
    text.single(names[2], G, help[2], report.total);
}
