//! The executor: runs step plans on the ranks.

mod input;
mod load;
mod ranks;
mod runner;
pub mod sampler;

use std::sync::Arc;

use crate::error::Result;
use crate::types::{StepOutput, StepPlan};

pub use load::load;
pub use ranks::Ranks;
pub use runner::ModelRunner;

/// Runs steps, at most one at a time. Launch and collect are apart so that the engine can work while the ranks do.
pub trait Executor {
    /// Starts a step.
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()>;
    /// Waits for the step that was launched and gives its answers, in the plan's order of tasks.
    fn collect(&mut self) -> Result<StepOutput>;
}
