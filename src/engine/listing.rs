//! What is known of the requests that run or wait, for those who look at the server.

use std::time::Duration;

use crate::types::Owner;

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It waits for a newer policy, for Resume, or for a drain to end.
    Held,
    /// None of its prompts has been computed yet.
    Queued,
    Running,
    /// Its reader lags, and nothing is computed for it.
    Suspended,
}

impl Progress {
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Suspended => "suspended",
        }
    }
}

/// What is known of a request that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestStatus {
    pub id: String,
    pub owner: Option<Owner>,
    pub progress: Progress,
    pub prompts: usize,
    pub prompt_tokens: u64,
    /// Number of samples that it asks for; 0 if its prompts are scored.
    pub samples: usize,
    /// Number of its samples that have not ended.
    pub open_samples: usize,
    /// Number of tokens that its samples have been given.
    pub tokens: u64,
    /// Time since its message had come.
    pub age: Duration,
}

/// The oldest requests that have not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestList {
    /// Number of all requests that have not ended.
    pub total: usize,
    pub oldest: Vec<RequestStatus>,
}
