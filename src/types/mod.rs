//! Plain data that every layer shares: prompts and sampling parameters, the plan of a step, and the output of a step.
//!
//! Nothing here owns a device, a clock, a channel or a runtime.

mod mask;
mod picture;
mod plan;
mod prompt;
mod routing;
mod sampling;
mod stats;
mod tenant;
mod tool_calls;

pub use mask::TokenMask;
pub use picture::{Picture, PictureHash};
pub use plan::{
    BlockCopy, BlockId, EmbeddingRows, History, LogitsRow, LogitsTask, PictureEncode, PlanSequence, PolicyRow,
    PolicyRows, PolicyWeights, StepOutput, StepPlan,
};
pub use prompt::{Prompt, PromptImage};
pub use rollout_kernels::{Distribution, Divergences, TaskReturns, TokenLogprobs};
pub use routing::{ForcedRouting, RoutingFormat};
pub use sampling::{FinishReason, SamplingParams, ThinkingBudget, sample_seed};
pub use stats::{ENGINE_STATS, EngineStats, TenantStats};
pub use tenant::Tenant;
pub use tool_calls::{ToolCallCounts, ToolFormat};

/// Index of a token in the vocabulary.
pub type TokenId = u32;

/// Version of a policy, as the trainer numbers them. The checkpoint that the server starts with is version 0.
pub type WeightVersion = u64;

/// Names one request (one RPC). Requests are numbered as they arrive, and no number is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey(pub u64);

/// Identifies the bearer token of a request. A request can be ended by its owner, or by a caller who may end all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(pub u64);

/// Names a group: one prompt of a request, together with its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKey {
    pub request: RequestKey,
    /// Index of the prompt in the request.
    pub prompt_index: u32,
}

/// Names one sample of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleKey {
    pub group: GroupKey,
    /// Index of the sample in its group, below `n`.
    pub sample_index: u32,
}
