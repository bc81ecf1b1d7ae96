//! Work that makes no progress.

use std::time::{Duration, Instant, SystemTime};

use super::Phase;

/// Work that makes no progress, or made none until it went on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Wall clock at the report.
    pub at: SystemTime,
    pub phase: Phase,
    /// Number of the push, if the work is for one beside the engine.
    pub push: Option<u64>,
    /// Time without progress: until the report, or until the work went on.
    pub lasted: Duration,
    /// Whether the work has gone on, or has ended.
    pub is_over: bool,
}

/// The work that is watched, and when it last made progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub phase: Phase,
    pub push: Option<u64>,
    pub since: Instant,
}
