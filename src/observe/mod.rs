//! What observers see of the server: numbers for Prometheus, where the engine's time went, the last pushes and errors.
//!
//! Those who do the work write: the engine's thread between and around its steps, the server at pushes and calls. They
//! write atomics and take no lock that a reader holds for long, and the engine's thread takes none at all. Readers
//! never ask the engine, so they are answered while it computes a long step, sleeps, or is being loaded.

mod journal;
mod metrics;
mod timeline;

use std::sync::Arc;

use crate::logs::LogWriter;

pub use journal::{ErrorNote, Journal, PushGuard, PushNote};
pub use metrics::{
    CallCounts, Counter, Gauge, Histogram, Lifecycle, Metrics, PushKind, ServerFacts, SleepState, StepKind, Transport,
};
pub use timeline::{Follower, News, Phase, Recorder, Span, TIMELINE_BYTES, Timeline, TraceFile, TrackName, Window};

/// Everything that observers read. Clones share it.
#[derive(Clone)]
pub struct Observer {
    pub metrics: Arc<Metrics>,
    pub timeline: Timeline,
    pub journal: Journal,
    /// Counts the log lines that were dropped; `None` where the process logs otherwise.
    pub logs: Option<LogWriter>,
}

impl Observer {
    /// An observer whose timeline begins now, with what is given to the engine to write it.
    pub fn new() -> (Self, Recorder) {
        let metrics = Arc::new(Metrics::default());
        let (timeline, recorder, pushes) = Timeline::new();
        let journal = Journal::new(metrics.clone(), pushes);
        (Self { metrics, timeline, journal, logs: None }, recorder)
    }
}
