//! The numbers for Prometheus. Their names, types and meanings are in `docs/observability.md`. Those that vLLM has too
//! have its names with `rollout:` for `vllm:`, and are written under both.
//!
//! The crate prometheus-client writes only OpenMetrics, with other names for counters, and the engine's thread would
//! take a lock in its histograms for every token. metrics-exporter-prometheus allocates for every value of a histogram
//! until the next scrape.

mod calls;
mod exposition;
mod labels;
mod ledger;
mod look;
mod number;
mod render;
mod tenants;
mod tool_calls;

use std::array::from_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub use calls::CallCounts;
use labels::{Finished, Label};
pub use labels::{Lifecycle, PushKind, SleepState, StepKind, Transport};
use ledger::LedgerGauges;
use number::{Bounds, FIRST_TOKEN, LATENCY, NEXT_TOKEN, ORDER, SAMPLES, STEP, STEP_TOKENS, TOKENS, Unit};
pub use number::{Counter, Gauge, Histogram};
pub use render::{ServedFacts, ServerFacts};
pub use tenants::TenantMetrics;
pub use tool_calls::ToolCallMetrics;

use crate::error::Error;
use crate::memory::MemoryReport;
use crate::types::{ENGINE_STATS, EngineStats, FinishReason};

/// Outcome of a request whose samples all ended by themselves. The outcome of any other request is the kind of an
/// error: that of [`Error::Aborted`] if a client or a command ended it.
const FINISHED: &str = "finished";
const ABORTED: &str = "aborted";

/// A value of a closed set, which one thread writes and others read.
#[derive(Debug, Default)]
struct State(AtomicUsize);

impl State {
    fn set(&self, value: impl Label) {
        self.0.store(value.index(), Ordering::Relaxed);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

const KINDS: usize = PushKind::ALL.len();
const TRANSPORTS: usize = Transport::ALL.len();

/// A sample that has ended.
#[derive(Clone, Copy, Debug)]
pub struct SampleEnd {
    pub reason: FinishReason,
    pub prompt_tokens: usize,
    pub tokens: usize,
    /// From the request's arrival to its first step.
    pub queued: Duration,
    /// From that step to the sample's last token.
    pub inference: Duration,
    /// From its first token to its last.
    pub decoded: Duration,
    /// From the request's arrival to the sample's end.
    pub total: Duration,
}

/// Numbers of the pushes of one kind by one transport.
#[derive(Debug)]
struct PushMetrics {
    applied: Counter,
    failed: Counter,
    bytes: Counter,
    seconds: Histogram,
    pause: Histogram,
}

/// All numbers. They are allocated at the start; a write never allocates or waits.
#[derive(Debug)]
pub struct Metrics {
    /// The engine's numbers as it last published them, in the order of [`ENGINE_STATS`].
    engine: [Gauge; ENGINE_STATS.len()],
    /// The device's ledger, and the host's if the device has memory of its own.
    ledgers: [LedgerGauges; 2],
    lifecycle: State,
    sleep_state: State,

    // Requests and samples.
    finished: [Counter; Finished::ALL.len()],
    outcomes: Vec<(&'static str, Counter)>,
    prompt_lengths: Histogram,
    completion_lengths: Histogram,
    first_token: Histogram,
    next_token: Histogram,
    token_time: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    request_time: Histogram,
    inference_time: Histogram,
    /// Of each sample, as vLLM counts: its prompt, its request's queue time, and its time.
    sample_prompts: Histogram,
    sample_queue_time: Histogram,
    sample_time: Histogram,

    // Steps.
    step_time: [Histogram; StepKind::ALL.len()],
    step_tokens: Histogram,
    step_samples: Histogram,

    // Pushes, sleeps and wakes.
    pushes: [[PushMetrics; TRANSPORTS]; KINDS],
    pub pushes_open: Gauge,
    sleep_time: [Histogram; 2],
    slept_bytes: [Counter; 2],
    wake_time: [Histogram; 2],
    woken_bytes: Counter,

    // The server.
    pub tenants: TenantMetrics,
    pub tool_calls: ToolCallMetrics,
    /// Reports of the watchdog.
    pub stalls: Counter,
    pub connections: Gauge,
    pub grpc_calls: CallCounts,
    pub http_calls: CallCounts,
}

fn seconds(bounds: Bounds) -> Histogram {
    Histogram::new(Unit::Nanoseconds, bounds)
}

fn counts(bounds: Bounds) -> Histogram {
    Histogram::new(Unit::Count, bounds)
}

impl Default for Metrics {
    fn default() -> Self {
        let push = || PushMetrics {
            applied: Counter::default(),
            failed: Counter::default(),
            bytes: Counter::default(),
            seconds: seconds(ORDER),
            pause: seconds(ORDER),
        };
        let outcomes = [FINISHED].iter().chain(Error::KINDS).map(|name| (*name, Counter::default()));
        Self {
            engine: from_fn(|_| Gauge::default()),
            ledgers: from_fn(|_| LedgerGauges::new()),
            lifecycle: State::default(),
            sleep_state: State::default(),
            finished: from_fn(|_| Counter::default()),
            outcomes: outcomes.collect(),
            prompt_lengths: counts(TOKENS),
            completion_lengths: counts(TOKENS),
            first_token: Histogram::with_quantiles(FIRST_TOKEN),
            next_token: Histogram::with_quantiles(NEXT_TOKEN),
            token_time: seconds(NEXT_TOKEN),
            queue_time: seconds(LATENCY),
            prefill_time: seconds(LATENCY),
            decode_time: seconds(LATENCY),
            request_time: seconds(LATENCY),
            inference_time: seconds(LATENCY),
            sample_prompts: counts(TOKENS),
            sample_queue_time: seconds(LATENCY),
            sample_time: seconds(LATENCY),
            step_time: from_fn(|_| seconds(STEP)),
            step_tokens: counts(STEP_TOKENS),
            step_samples: counts(SAMPLES),
            pushes: from_fn(|_| from_fn(|_| push())),
            pushes_open: Gauge::default(),
            sleep_time: from_fn(|_| seconds(ORDER)),
            slept_bytes: from_fn(|_| Counter::default()),
            wake_time: from_fn(|_| seconds(ORDER)),
            woken_bytes: Counter::default(),
            tenants: TenantMetrics::default(),
            tool_calls: ToolCallMetrics::default(),
            stalls: Counter::default(),
            connections: Gauge::default(),
            grpc_calls: CallCounts::default(),
            http_calls: CallCounts::default(),
        }
    }
}

impl Metrics {
    /// Stores the engine's numbers.
    pub fn publish(&self, stats: &EngineStats) {
        self.engine.iter().zip(stats.values()).for_each(|(gauge, value)| gauge.set(value));
    }

    /// Stores the ledger, and the host's if the device has memory of its own.
    pub fn publish_memory(&self, device: &MemoryReport, host: Option<&MemoryReport>) {
        let [of_device, of_host] = &self.ledgers;
        of_device.publish(device);
        host.into_iter().for_each(|report| of_host.publish(report));
    }

    pub fn publish_lifecycle(&self, lifecycle: Lifecycle, sleep: SleepState) {
        self.lifecycle.set(lifecycle);
        self.sleep_state.set(sleep);
    }

    /// Counts a step of `samples` sequences that computed `tokens`.
    pub fn step(&self, kind: StepKind, took: Duration, tokens: usize, samples: usize) {
        self.step_time[kind.index()].observe(took);
        self.step_tokens.count(tokens);
        self.step_samples.count(samples);
    }

    /// Counts the end of a request; `outcome` is [`FINISHED`] or the kind of an error.
    fn ended(&self, outcome: &str) {
        if let Some((_, count)) = self.outcomes.iter().find(|(name, _)| *name == outcome) {
            count.add(1);
        }
    }

    /// Counts a request whose samples have all ended, `took` after it arrived.
    pub fn request_done(&self, is_aborted: bool, prompt_tokens: u64, took: Duration) {
        self.ended(if is_aborted { ABORTED } else { FINISHED });
        self.prompt_lengths.count(prompt_tokens as usize);
        self.request_time.observe(took);
    }

    /// Counts a request that ended with an error, before or after it was accepted.
    pub fn request_failed(&self, error: &Error) {
        self.ended(error.kind());
    }

    /// Notes that a request's first sequence began to run, `waited` after the request arrived.
    pub fn request_scheduled(&self, waited: Duration) {
        self.queue_time.observe(waited);
    }

    /// Notes that a sample has its first token, `since_arrival` after its request arrived and `since_scheduled` after
    /// the request began to run.
    pub fn first_token(&self, since_arrival: Duration, since_scheduled: Duration) {
        self.first_token.observe(since_arrival);
        self.prefill_time.observe(since_scheduled);
    }

    /// Notes that a sample has another token, `gap` after the previous one.
    pub fn next_token(&self, gap: Duration) {
        self.next_token.observe(gap);
    }

    pub fn sample_done(&self, end: &SampleEnd) {
        self.finished[Finished::from(end.reason).index()].add(1);
        self.sample_prompts.count(end.prompt_tokens);
        self.completion_lengths.count(end.tokens);
        self.sample_queue_time.observe(end.queued);
        self.inference_time.observe(end.inference);
        self.decode_time.observe(end.decoded);
        self.sample_time.observe(end.total);
        if end.tokens > 1 {
            self.token_time.observe(end.decoded / (end.tokens - 1) as u32);
        }
    }

    fn of_push(&self, kind: PushKind, transport: Transport) -> &PushMetrics {
        &self.pushes[kind.index()][transport.index()]
    }

    /// Notes that a push was applied: it was received in `staging`, and no step ran for `pause`.
    pub fn push_applied(&self, kind: PushKind, transport: Transport, bytes: u64, staging: Duration, pause: Duration) {
        let push = self.of_push(kind, transport);
        push.applied.add(1);
        push.bytes.add(bytes);
        push.seconds.observe(staging);
        push.pause.observe(pause);
    }

    pub fn push_failed(&self, kind: PushKind, transport: Transport) {
        self.of_push(kind, transport).failed.add(1);
    }

    /// Number of pushes that have ended, applied or not.
    pub fn pushes_ended(&self) -> u64 {
        self.pushes.iter().flatten().map(|push| push.applied.get() + push.failed.get()).sum()
    }

    /// Notes that a sleep at `level` released so many bytes of weights and of KV cache.
    pub fn slept(&self, level: u64, took: Duration, weights: u64, kv_cache: u64) {
        self.sleep_time[usize::from(level == 2)].observe(took);
        self.slept_bytes[0].add(weights);
        self.slept_bytes[1].add(kv_cache);
    }

    /// Notes that a wake took `bytes` back; with `reload` it loaded the checkpoint as the policy.
    pub fn woke(&self, reload: bool, took: Duration, bytes: u64) {
        self.wake_time[usize::from(reload)].observe(took);
        self.woken_bytes.add(bytes);
    }
}
