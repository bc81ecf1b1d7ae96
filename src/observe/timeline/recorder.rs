//! Records the engine's phase whenever it changes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cell::Cell;
use super::span::{PHASES, Phase, Span};
use super::track::Ring;

/// Longest span of steps. Consecutive steps of the same kind are one span up to this length.
const MERGE: Duration = Duration::from_secs(1);
/// A phase of at least this length has a span of its own, however many spans there are.
const LONG: Duration = Duration::from_millis(250);
/// Spans per second that may be written in the long run. Beyond this rate, phases shorter than [`LONG`] are folded into
/// brief spans of at least that length.
pub(super) const SPANS_PER_SECOND: u64 = 24;
/// Spans that may be written in a burst after a quiet time.
pub(super) const BURST: u64 = 2048;

/// Number of words of the sums: the open phase, the time up to which the sums count, and the time of each phase.
pub(super) const SUM_WORDS: usize = 2 + PHASES;

/// Writes the engine's track. Every moment belongs to exactly one span: a phase lasts until the next one begins.
pub struct Recorder {
    origin: Instant,
    ring: Arc<Ring>,
    sums: Arc<Cell<SUM_WORDS>>,
    /// The sums as they were last written.
    written: [u64; SUM_WORDS],
    /// The last closed span, if the next short phase may still be folded into it. It directly precedes the open span.
    folded: Option<Span>,
    open: Span,
    /// Credit for writing spans: a span costs [`COST`], and each nanosecond adds [`SPANS_PER_SECOND`].
    credit: u64,
    credited: u64,
}

const COST: u64 = 1_000_000_000;

impl Recorder {
    /// A recorder whose first phase, the load of the model, began at `origin`.
    pub(super) fn new(origin: Instant, ring: Arc<Ring>, sums: Arc<Cell<SUM_WORDS>>) -> Self {
        let mut recorder = Self {
            origin,
            ring,
            sums,
            written: [0; SUM_WORDS],
            folded: None,
            open: Span::new(0, Phase::Load, 0),
            credit: BURST * COST,
            credited: 0,
        };
        recorder.publish(0);
        recorder
    }

    fn at(&self, time: Instant) -> u64 {
        nanos(time.saturating_duration_since(self.origin))
    }

    /// Begins a phase at `time`. If the engine is already in it, this only splits a span of steps that has become too
    /// long.
    pub fn enter(&mut self, phase: Phase, time: Instant) {
        // A stopped clock, or a time that was read early, must not make a span end before it began.
        let now = self.at(time).max(self.open.start).max(self.written[1]);
        let goes_on = self.open.phase == phase && !(phase.is_step() && now - self.open.start >= nanos(MERGE));
        if goes_on {
            return self.publish(now);
        }
        self.close(now);
        self.open = Span::new(self.open.id + 1, phase, now);
        self.publish(now);
    }

    /// Ends the open span. It becomes a span of its own or is folded into a brief one.
    fn close(&mut self, now: u64) {
        self.account(now);
        self.open.end = Some(now);
        let is_short = self.open.phase.is_foldable() && now - self.open.start < nanos(LONG);
        // A brief span keeps growing for a while; otherwise each credit would end one.
        let goes_on = self.folded.is_some_and(|folded| is_short && now - folded.start < nanos(LONG));
        let may_fold = is_short && (goes_on || !self.take_credit(now));
        match &mut self.folded {
            // The brief span grows, and the next span takes the place of the open one.
            Some(folded) if may_fold && now - folded.start < nanos(MERGE) => {
                folded.fold(&self.open);
                self.ring.write(folded);
                self.open.id = folded.id;
            }
            _ => {
                self.ring.write(&self.open);
                self.folded = may_fold.then_some(self.open);
                self.ring.settle(self.open.id + u64::from(!may_fold));
            }
        }
    }

    /// Takes the cost of a span from the credit, if there is enough.
    fn take_credit(&mut self, now: u64) -> bool {
        let earned = (now - self.credited).saturating_mul(SPANS_PER_SECOND);
        self.credit = self.credit.saturating_add(earned).min(BURST * COST);
        self.credited = now;
        let enough = self.credit >= COST;
        if enough {
            self.credit -= COST;
        }
        enough
    }

    /// Counts a step that ended at `time` in the open span.
    pub fn count_step(&mut self, time: Instant, computed: u64, sampled: u64, weight_version: u64) {
        self.open.steps += 1;
        self.open.computed_tokens += computed;
        self.open.sampled_tokens += sampled;
        self.open.weight_version = weight_version;
        let now = self.at(time).max(self.written[1]);
        self.publish(now);
    }

    /// Changes the attributes of the open span.
    pub fn note(&mut self, change: impl FnOnce(&mut Span)) {
        change(&mut self.open);
        self.ring.write(&self.open);
    }

    fn account(&mut self, now: u64) {
        let [phase, until, times @ ..] = &mut self.written;
        times[self.open.phase as usize] += now - *until;
        (*phase, *until) = (self.open.phase as u64, now);
    }

    fn publish(&mut self, now: u64) {
        self.account(now);
        self.written[0] = self.open.phase as u64;
        self.ring.write(&self.open);
        self.sums.write(&self.written);
    }
}

/// Nanoseconds of `time`; 64 bits count 584 years.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
