//! Everything that observers can see of the server: metrics, a timeline of the engine's phases, the last pushes and
//! errors.
//!
//! The engine's thread writes between and around its steps, and the server's threads write at pushes and calls. Writers
//! use atomics, or locks that readers hold only briefly; the engine's thread takes no lock at all. Readers never ask
//! the engine, so they get an answer while it computes a long step, sleeps, or loads.

mod journal;
mod metrics;
mod stall;
mod timeline;
mod watchdog;

use std::sync::Arc;

use crate::config::MetricNames;
use crate::logs::LogWriter;

pub use journal::{ErrorNote, Journal, PushGuard, PushNote, PushWork};
pub use metrics::{
    CallCounts, Counter, Gauge, Histogram, Lifecycle, Metrics, PushKind, SampleEnd, ServedFacts, ServerFacts,
    SleepState, StepKind, ToolCallMetrics, Transport,
};
pub use stall::Stall;
pub use timeline::{Follower, News, Phase, Recorder, Span, TIMELINE_BYTES, Timeline, TraceFile, TrackName, Window};
pub use watchdog::EngineWatchdog;

/// Everything that observers read. Clones share it.
#[derive(Clone)]
pub struct Observer {
    pub metrics: Arc<Metrics>,
    pub timeline: Timeline,
    pub journal: Journal,
    /// Counts dropped log lines; `None` if the process does not log through a [`LogWriter`].
    pub logs: Option<LogWriter>,
    /// The names under which metrics are written.
    pub metric_names: Vec<MetricNames>,
}

impl Observer {
    /// An observer whose timeline begins now, and the recorder with which the engine writes that.
    pub fn new() -> (Self, Recorder) {
        let metrics = Arc::new(Metrics::default());
        let (timeline, recorder, pushes) = Timeline::new();
        let journal = Journal::new(metrics.clone(), pushes);
        let metric_names = vec![MetricNames::Vllm, MetricNames::Rollout];
        (Self { metrics, timeline, journal, logs: None, metric_names }, recorder)
    }
}
