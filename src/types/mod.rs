//! Plain data shared by every layer: valid requests, the plan of one step, and what a step gives back.
//!
//! Nothing here owns a device, a clock, a channel or a runtime.

mod plan;
mod prompt;
mod sampling;

pub use plan::{BlockCopy, BlockId, History, LogitsRow, LogitsTask, PlanSequence, StepOutput, StepPlan};
pub use prompt::{MediaItem, Prompt};
pub use rollout_kernels::TokenLogprobs;
pub use sampling::{FinishReason, SamplingParams, sample_seed};

/// A token of the vocabulary.
pub type TokenId = u32;

/// Version of the policy that computed something. The checkpoint the server starts with is version 0.
pub type WeightVersion = u64;

/// One running request (one RPC), unique for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey(pub u64);

/// One prompt of a request together with its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKey {
    pub request: RequestKey,
    /// Index of the prompt in the request.
    pub prompt_index: u32,
}

/// One sample of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleKey {
    pub group: GroupKey,
    /// Index of the sample in its group, `[0, n)`.
    pub sample_index: u32,
}
