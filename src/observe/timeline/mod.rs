//! The timeline: a ring of the engine's last phases, and another of the last pushes.
//!
//! The engine's thread writes its track with a [`Recorder`], which takes a fifth of a microsecond per step. Consecutive
//! steps of the same kind are one span, up to a second. If phases alternate so fast that the ring could not hold a
//! quarter of an hour, they are folded into spans of [`Phase::Brief`], which record the time of each phase. The
//! engine's track has no gaps and no overlaps. Pushes are received beside the engine and have a track of their own.

mod cell;
mod follow;
mod recorder;
mod span;
#[cfg(test)]
mod tests;
mod trace;
mod track;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::stall::Work;
use cell::Cell;
use recorder::{SUM_WORDS, nanos};
use track::{Ring, ring_bytes};

pub use follow::{Follower, News};
pub use recorder::Recorder;
pub use span::{Phase, Span};
pub use trace::TraceFile;

/// Number of spans of the engine's track: 16 minutes of 32 spans a second, after a burst.
const ENGINE_SPANS: usize = 32 << 10;
/// Number of spans of the push track; a push has three.
const PUSH_SPANS: usize = 4 << 10;

/// Bytes that a timeline takes; part of the ledger's entry for the process.
pub const TIMELINE_BYTES: usize = ring_bytes(ENGINE_SPANS) + ring_bytes(PUSH_SPANS);

/// The two tracks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrackName {
    Engine,
    Push,
}

impl TrackName {
    pub const ALL: [Self; 2] = [Self::Engine, Self::Push];

    pub fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Push => "push",
        }
    }
}

/// The last phases, for any number of readers. Clones share them.
#[derive(Clone, Debug)]
pub struct Timeline {
    origin: Instant,
    /// Wall clock at `origin`, in nanoseconds since 1970.
    origin_unix: u64,
    engine: Arc<Ring>,
    pushes: Arc<Ring>,
    sums: Arc<Cell<SUM_WORDS>>,
}

/// The part of a timeline within a period. Times are nanoseconds since 1970, by the wall clock at the timeline's start.
#[derive(Clone, Debug)]
pub struct Window {
    /// Begin of the period: the requested one, or that of the oldest returned span.
    pub from: u64,
    /// End of the period: the time of the call.
    pub now: u64,
    /// Whether older spans of the period are missing, because of the requested limit or the size of the ring.
    pub truncated: bool,
    /// Spans that overlap the period, in order within each track. Open spans have no end.
    pub spans: Vec<(TrackName, Span)>,
    /// Time of each phase of the engine within the period, in nanoseconds, without phases that have none.
    pub times: Vec<(Phase, u64)>,
}

impl Timeline {
    /// A timeline that begins now, and the writers of its tracks.
    pub(super) fn new() -> (Self, Recorder, PushTrack) {
        let (engine, pushes) = (Ring::new(ENGINE_SPANS), Ring::new(PUSH_SPANS));
        let sums = Arc::new(Cell::new([0; SUM_WORDS]));
        let origin_unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanos);
        let timeline = Self { origin: Instant::now(), origin_unix, engine, pushes, sums };
        let recorder = Recorder::new(timeline.origin, timeline.engine.clone(), timeline.sums.clone());
        let pushes = PushTrack { origin: timeline.origin, ring: timeline.pushes.clone(), next: 0 };
        (timeline, recorder, pushes)
    }

    /// Wall clock at the timeline's start, in nanoseconds since 1970.
    pub fn origin_unix(&self) -> u64 {
        self.origin_unix
    }

    /// Nanoseconds since the timeline's start.
    pub fn now(&self) -> u64 {
        nanos(self.origin.elapsed())
    }

    fn ring(&self, track: TrackName) -> &Ring {
        match track {
            TrackName::Engine => &self.engine,
            TrackName::Push => &self.pushes,
        }
    }

    /// The engine's step or order, if it has one, and when that last made progress. Not watched is the load, which logs
    /// its own progress.
    pub(super) fn work(&self) -> Option<Work> {
        let words = self.sums.read()?;
        let phase = Phase::from_index(words[0]).filter(|phase| *phase != Phase::Load && !phase.is_waiting())?;
        Some(Work { phase, push: None, since: self.origin + Duration::from_nanos(words[1]) })
    }

    /// The time since the start that the engine has spent in each phase.
    pub fn sums(&self) -> Vec<(Phase, u64)> {
        let Some(words) = self.sums.read() else { return Vec::new() };
        let open_for = self.now().saturating_sub(words[1]);
        let time = |phase: Phase| {
            let is_open = words[0] == phase as u64;
            words[2 + phase as usize] + if is_open { open_for } else { 0 }
        };
        Phase::ALL.into_iter().filter(|phase| phase.is_of_engine()).map(|phase| (phase, time(phase))).collect()
    }

    /// The spans that end after `since` (nanoseconds since 1970), the newest `most` of each track.
    pub fn window(&self, since: u64, most: usize) -> Window {
        let now = self.now();
        let since = since.saturating_sub(self.origin_unix);
        let (mut from, mut truncated, mut spans) = (since.min(now), false, Vec::new());
        for track in TrackName::ALL {
            let (mut newest, is_cut) = self.newest(track, since, most);
            truncated |= is_cut;
            newest.reverse();
            if let (TrackName::Engine, true, Some(oldest)) = (track, is_cut, newest.first()) {
                from = from.max(oldest.start);
            }
            spans.extend(newest.into_iter().map(|span| (track, span)));
        }
        let mut times = vec![0; span::PHASES];
        for (_, span) in spans.iter().filter(|(track, _)| *track == TrackName::Engine) {
            span.times(from, now).into_iter().for_each(|(phase, time)| times[phase as usize] += time);
        }
        let times = Phase::ALL.into_iter().zip(times).filter(|time| time.1 > 0).collect();
        Window { from: self.origin_unix + from, now: self.origin_unix + now, truncated, spans, times }
    }

    /// The newest spans of a track that end after `since`, the newest first, and whether there were more.
    fn newest(&self, track: TrackName, since: u64, most: usize) -> (Vec<Span>, bool) {
        let (ring, mut spans) = (self.ring(track), Vec::new());
        let ids = ring.ids();
        let oldest = ids.start;
        for id in ids.rev() {
            // A slot that is overwritten meanwhile was the oldest; a slot that is being written is returned by the next
            // call.
            let Some(span) = ring.read(id) else { continue };
            if span.end.is_some_and(|end| end <= since) {
                return (spans, false);
            }
            if spans.len() == most {
                return (spans, true);
            }
            spans.push(span);
        }
        (spans, oldest > 0)
    }

    /// The spans of a track from id `from` on that never change again, and the id to continue from.
    fn settled(&self, track: TrackName, from: u64) -> (Vec<Span>, u64) {
        let ring = self.ring(track);
        let end = ring.settled();
        let spans = (from.max(ring.ids().start)..end).filter_map(|id| ring.read(id)).collect();
        (spans, end.max(from))
    }

    /// The spans of a track from id `from` on, including those that may still change.
    fn rest(&self, track: TrackName, from: u64) -> Vec<Span> {
        let ring = self.ring(track);
        (from..ring.ids().end).filter_map(|id| ring.read(id)).collect()
    }
}

/// Writes the push track.
#[derive(Debug)]
pub(super) struct PushTrack {
    origin: Instant,
    ring: Arc<Ring>,
    next: u64,
}

impl PushTrack {
    /// Begins a span of the push `number`.
    pub fn begin(&mut self, phase: Phase, number: u64) -> Span {
        let mut span = Span::new(self.next, phase, nanos(self.origin.elapsed()));
        span.push = number;
        self.next += 1;
        self.ring.write(&span);
        span
    }

    /// Ends a span that this track has begun.
    pub fn end(&mut self, mut span: Span, bytes: u64, weight_version: u64) {
        span.end = Some(nanos(self.origin.elapsed()));
        (span.bytes, span.weight_version) = (bytes, weight_version);
        self.ring.write(&span);
        // The server receives one push at a time, so all earlier spans have ended.
        self.ring.settle(span.id + 1);
    }
}
