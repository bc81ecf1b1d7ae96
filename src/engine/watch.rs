//! What the engine tells observers: the phase it is in, and its numbers between two steps.

use std::time::{Duration, Instant};

use super::Engine;
use super::command::{LifecycleStatus, SleepLevel, SleepReply};
use super::lifecycle::State;
use crate::clock::Clock;
use crate::executor::Executor;
use crate::observe::{EngineSnapshot, Lifecycle, Observer, Phase, Recorder, SleepState, StepKind};
use crate::types::{StepPlan, WeightVersion};

/// The engine's pen for observers.
pub(super) struct Watch {
    clock: Clock,
    pub observer: Observer,
    recorder: Recorder,
}

impl Watch {
    pub fn new(clock: Clock, observer: Observer, recorder: Recorder) -> Self {
        Self { clock, observer, recorder }
    }

    /// The engine is in `phase` from now on.
    pub fn enter(&mut self, phase: Phase) {
        self.recorder.enter(phase, self.clock.now());
    }

    /// A step that was begun at `begun` runs this plan.
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

    /// The push `number` is applied, or a part of it is written.
    pub fn apply_push(&mut self, number: u64) {
        self.enter(Phase::PushApply);
        self.recorder.note(|span| span.push = number);
    }

    /// Memory is reserved for a push.
    pub fn reserve_push(&mut self) {
        self.enter(Phase::PushReserve);
    }

    /// What the engine does now has made this version the one that serves.
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

    /// A wake has ended, `took` after it began, and has taken `bytes`.
    pub fn note_wake(&mut self, reload: bool, took: Duration, bytes: u64) {
        self.observer.metrics.woke(reload, took, bytes);
        self.recorder.note(|span| span.bytes = bytes);
    }
}

/// What a step computes. A sequence decodes if all tokens of its prompt were computed in earlier steps.
fn kind(plan: &StepPlan) -> StepKind {
    let decoding = plan.sequences.iter().filter(|s| s.start >= s.prompt.tokens.len()).count();
    match decoding {
        0 => StepKind::Prefill,
        n if n == plan.sequences.len() => StepKind::Decode,
        _ => StepKind::Mixed,
    }
}

impl<X: Executor> Engine<X> {
    /// What the engine waits for while nothing can step.
    pub(super) fn waiting_phase(&self) -> Phase {
        match self.core.state {
            State::Paused => Phase::Paused,
            State::Asleep(_) => Phase::Asleep,
            State::WeightsMissing { .. } => Phase::WeightsMissing,
            State::Running if !self.core.requests.is_empty() => Phase::WaitReaders,
            State::Running if self.admission.num_held() > 0 => Phase::WaitVersion,
            State::Running => Phase::Idle,
        }
    }

    /// Gives observers the engine's numbers, as they are between two steps.
    pub(super) fn publish(&self) {
        let (s, metrics) = (self.core.scheduler.stats(), &self.core.watch.observer.metrics);
        metrics.publish(&EngineSnapshot {
            running_samples: s.running_samples,
            waiting_samples: s.waiting_samples,
            accepted_requests: self.core.requests.len(),
            held_requests: self.admission.num_held(),
            total_blocks: s.total_blocks,
            free_blocks: s.free_blocks,
            cached_blocks: s.cached_blocks,
            prompt_tokens: s.prompt_tokens,
            cached_tokens: s.cached_tokens,
            generated_tokens: s.generated_tokens - self.core.statistics.dropped_tokens(),
            preemptions: s.preemptions,
            drafted_tokens: s.drafted_tokens,
            accepted_tokens: s.accepted_tokens,
            weight_version: self.core.policy.version(),
            updates: self.updates.applied(),
            resident_adapters: self.adapters.num_resident(),
            internal_errors: self.core.statistics.internal_errors(),
        });
        metrics.publish_memory(self.core.budget.report(), self.core.budget.host_report());
        let (lifecycle, sleep) = lifecycle(self.core.lifecycle());
        metrics.publish_lifecycle(lifecycle, sleep);
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
