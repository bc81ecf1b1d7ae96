//! Publishes the engine's phases, its steps, and its numbers between two steps to observers.

use std::time::{Duration, Instant};

use super::command::{LifecycleStatus, SleepLevel, SleepReply};
use crate::clock::Clock;
use crate::memory::MemoryBudget;
use crate::observe::{Lifecycle, Observer, Phase, Recorder, SleepState, StepKind};
use crate::types::{EngineStats, StepPlan, WeightVersion};

/// Publishes the engine's state to observers.
pub(super) struct Telemetry {
    pub observer: Observer,
    clock: Clock,
    recorder: Recorder,
}

impl Telemetry {
    pub fn new(clock: Clock, observer: Observer, recorder: Recorder) -> Self {
        Self { observer, clock, recorder }
    }

    /// Publishes the engine's numbers, as they are between two steps.
    pub fn publish(&self, stats: &EngineStats, ledger: &MemoryBudget, status: LifecycleStatus) {
        self.observer.metrics.publish(stats);
        self.observer.metrics.publish_memory(ledger.report(), ledger.host_report());
        let (lifecycle, sleep) = lifecycle(status);
        self.observer.metrics.publish_lifecycle(lifecycle, sleep);
    }

    /// Begins `phase`.
    pub fn enter(&mut self, phase: Phase) {
        self.recorder.enter(phase, self.clock.now());
    }

    /// Notes that a step that began at `begun` runs this plan.
    pub fn begin_step(&mut self, begun: Instant, plan: &StepPlan) -> StepKind {
        let (kind, phase) = match kind(plan) {
            kind @ StepKind::Prefill => (kind, Phase::Prefill),
            kind @ StepKind::Decode => (kind, Phase::Decode),
            kind @ StepKind::Mixed => (kind, Phase::Mixed),
        };
        self.recorder.enter(phase, begun);
        kind
    }

    /// A step has ended.
    pub fn end_step(
        &mut self,
        kind: StepKind,
        times: (Instant, Instant),
        plan: &StepPlan,
        sampled: usize,
        version: WeightVersion,
    ) {
        let (tokens, (begun, ended)) = (plan.num_tokens(), times);
        self.observer.metrics.step(kind, ended - begun, tokens, plan.sequences.len());
        self.recorder.count_step(ended, tokens as u64, sampled as u64, version);
    }

    /// Begins the phase in which the push `number` is applied, or a part of it is written.
    pub fn apply_push(&mut self, number: u64) {
        self.enter(Phase::PushApply);
        self.recorder.note(|span| span.push = number);
    }

    /// Begins the phase in which memory is reserved for a push.
    pub fn reserve_push(&mut self) {
        self.enter(Phase::PushReserve);
    }

    /// Notes that the current phase made this version the serving one.
    pub fn note_version(&mut self, version: WeightVersion) {
        self.recorder.note(|span| span.weight_version = version);
    }

    /// A sleep has ended, and its memory is given back.
    pub fn note_sleep(&mut self, level: SleepLevel, reply: &SleepReply) {
        let level = match level {
            SleepLevel::One => 1,
            SleepLevel::Two => 2,
        };
        let SleepReply { weights_bytes, kv_cache_bytes, took, .. } = *reply;
        self.observer.metrics.slept(level, took, weights_bytes, kv_cache_bytes);
        self.recorder.note(|span| (span.bytes, span.level) = (weights_bytes + kv_cache_bytes, level));
    }

    /// Notes that a wake ended `took` after it began, and took `bytes` back.
    pub fn note_wake(&mut self, reload: bool, took: Duration, bytes: u64) {
        self.observer.metrics.woke(reload, took, bytes);
        self.recorder.note(|span| span.bytes = bytes);
    }
}

/// Kind of a step. A sequence decodes if all tokens of its prompt were computed in earlier steps.
fn kind(plan: &StepPlan) -> StepKind {
    let decoding = plan.sequences.iter().filter(|s| s.start >= s.prompt.tokens.len()).count();
    match decoding {
        0 => StepKind::Prefill,
        n if n == plan.sequences.len() => StepKind::Decode,
        _ => StepKind::Mixed,
    }
}

fn lifecycle(status: LifecycleStatus) -> (Lifecycle, SleepState) {
    let awake = SleepState::Awake;
    match status {
        LifecycleStatus::Running => (Lifecycle::Running, awake),
        LifecycleStatus::Paused => (Lifecycle::Paused, awake),
        LifecycleStatus::Asleep { level: SleepLevel::One, .. } => (Lifecycle::Asleep, SleepState::WeightsOffloaded),
        LifecycleStatus::Asleep { level: SleepLevel::Two, .. } => (Lifecycle::Asleep, SleepState::DiscardAll),
        LifecycleStatus::WeightsMissing => (Lifecycle::WeightsMissing, awake),
        LifecycleStatus::ShuttingDown => (Lifecycle::ShuttingDown, awake),
    }
}
