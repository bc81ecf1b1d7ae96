//! The executor: runs step plans on the ranks.

mod adapters;
mod input;
mod ranks;
mod runner;
#[cfg(test)]
mod tests;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::types::{StepOutput, StepPlan};
use crate::weights::{Adapter, Delta, ParamSpec, ShadowWeights, Tensors};

pub use adapters::resident_adapter_bytes;
pub use ranks::Ranks;
pub use runner::ModelRunner;
pub use weights::RankWeights;

/// Runs steps, at most one at a time. Launch and collect are apart so that the engine can work while the ranks do. The
/// other orders are given between a `collect` and the next `launch`; each is carried out by all ranks before it returns.
pub trait Executor {
    /// Starts a step.
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()>;
    /// Waits for the step that was launched and gives its answers, in the plan's order of tasks.
    fn collect(&mut self) -> Result<StepOutput>;
    /// Whether what `order` reads of the checkpoint is what was loaded. Touches nothing.
    ///
    /// # Errors
    /// `DataLoss` naming a file that is not.
    fn check(&mut self, order: &WeightOrder) -> Result<()>;
    /// Changes the weights.
    ///
    /// # Errors
    /// `DataLoss` if the checkpoint changed while it was read: the weights are of no policy then.
    fn write(&mut self, order: WeightOrder) -> Result<()>;
    /// Maps shadow weights: storage of the serving weights' shapes beside them. Its pages take memory as they are
    /// written.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system cannot map as much.
    fn shadow_weights(&mut self) -> Result<ShadowWeights>;
    /// Serves from `shadow`, in which every parameter has its value, and gives back the storage that served. The values
    /// of `shadow` are the base from now on.
    fn exchange(&mut self, shadow: ShadowWeights) -> Result<ShadowWeights>;
    /// Bytes of whole rows of a parameter in the dtype in which it serves (row-major, little-endian), gathered from the
    /// ranks.
    fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>>;
    /// Gives memory back to the system, and says what came of it.
    fn release(&mut self, memory: Memory) -> Result<Released>;
    /// Takes released memory again; its content is unspecified.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has not as much.
    fn restore(&mut self, memory: Memory) -> Result<()>;
    /// Gives the storage of shadow weights back to the system; the bytes that came back.
    fn discard(&mut self, shadow: ShadowWeights) -> Result<u64>;
    /// Bytes of the devices' memory that the process takes now, when allocators keep nothing of what was freed.
    fn used_bytes(&self) -> u64;
}

/// What came of a release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Bytes that the devices have back, as they measure it.
    pub freed: u64,
    /// Bytes of weights that stay, because nothing else has their values.
    pub kept: u64,
}

/// What a rank's memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    KvCache,
    Workspace,
    /// Weights that can be read from the checkpoint again: what FULL and DELTA pushes have brought stays.
    Weights,
    /// All weights and copies of the base; the checkpoint is the base again.
    WeightsAndBase,
}

/// A change of the weights. The base of a parameter is the checkpoint's value, or what a FULL or DELTA push has put in
/// its place; an adapter is always merged into the base.
#[derive(Clone, Debug)]
pub enum WeightOrder {
    /// Every parameter: the base with `adapter` merged. For weights that were released.
    Load { adapter: Arc<Adapter> },
    /// The parameters that either touches: the base with `after` merged instead of `before`. Where the base is no longer
    /// the checkpoint's, the ranks keep a copy of it as long as an adapter is merged into it.
    Merge { before: Arc<Adapter>, after: Arc<Adapter> },
    /// These parameters take these values, which are their base from now on.
    Replace { tensors: Arc<Tensors> },
    /// Single elements take new values. What serves then is the base from now on: of the changed parameters, and of those
    /// that `merged`, the adapter merged now, touches.
    Patch { delta: Arc<Delta>, merged: Arc<Adapter> },
    /// Keeps an adapter resident under this number, which a [`PlanSequence`](crate::types::PlanSequence) can name.
    AddAdapter { generation: u64, adapter: Arc<Adapter> },
    /// Drops a resident adapter.
    RemoveAdapter { generation: u64 },
}
