//! The executor: runs step plans on the ranks, and changes their weights between steps.

mod adapters;
mod head;
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

/// Runs steps, at most one at a time. `launch` and `collect` are two calls so that the engine can work while the ranks
/// compute. All other methods are called between a `collect` and the next `launch`; each returns when all ranks have
/// finished.
pub trait Executor {
    /// Starts a step.
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()>;
    /// Waits for the launched step. The answers are in the plan's order of tasks.
    fn collect(&mut self) -> Result<StepOutput>;
    /// Checks that the parts of the checkpoint that `order` will read have not changed since they were loaded, that the
    /// model has a place for an adapter's factors, and allocates the memory that the order needs. Changes no weights.
    ///
    /// # Errors
    /// `InvalidArgument` naming a parameter that no resident adapter can change; `DataLoss` naming a file that has
    /// changed; `ResourceExhausted` if the device has too little memory.
    fn check(&mut self, order: &WeightOrder) -> Result<()>;
    /// Changes the weights.
    ///
    /// # Errors
    /// `DataLoss` if the checkpoint changed while it was read: the weights then belong to no policy.
    /// `ResourceExhausted` if a device has too little memory.
    fn write(&mut self, order: WeightOrder) -> Result<()>;
    /// Maps shadow weights: storage of the serving weights' shapes beside them. Its pages take memory when they are
    /// written.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system cannot map them.
    fn shadow_weights(&mut self) -> Result<ShadowWeights>;
    /// Serves from `shadow`, and returns the storage that served before. The values of `shadow` become the base. The
    /// parameters that `shadow` keeps stay as they are.
    fn exchange(&mut self, shadow: ShadowWeights) -> Result<ShadowWeights>;
    /// Bytes of whole rows of a parameter in the dtype in which it serves (row-major, little-endian), gathered from the
    /// ranks.
    fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>>;
    /// Gives memory back to the system. It must be restored before it is used again. A device with memory of its own
    /// moves values that must be kept to the host, of whose memory it may take `host_bytes` in all.
    fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Result<Released>;
    /// Allocates released memory again; its content is unspecified.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has too little memory.
    fn restore(&mut self, memory: MemoryKind) -> Result<()>;
    /// Gives the storage of shadow weights back to the system. Returns the number of bytes that this frees.
    fn discard(&mut self, shadow: ShadowWeights) -> Result<u64>;
    /// Bytes of the devices' memory that the process takes now, after allocators have returned the freed memory that
    /// they cache.
    fn used_bytes(&self) -> u64;
}

/// The result of releasing memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Bytes that were freed on the devices, as measured.
    pub freed: u64,
    /// Bytes of weights that stay on the devices because their values are nowhere else; 0 for other memory.
    pub kept: u64,
    /// Bytes of host memory that hold values moved there, by this release or an earlier one.
    pub offloaded: u64,
}

/// A kind of memory that a rank can release and restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    KvCache,
    Workspace,
    /// Weights that can be read from the checkpoint again; values of FULL and DELTA pushes stay.
    Weights,
    /// All weights, and copies of bases that pushes have replaced: the checkpoint is the base again.
    WeightsAndBase,
}

/// A change of the weights. The base of a parameter is the checkpoint's value, or the value by which a FULL or DELTA
/// push has replaced it. An adapter is always merged into the base.
#[derive(Clone, Debug)]
pub enum WeightOrder {
    /// Sets every parameter to its base with `adapter` merged, for weights that were released.
    Load { adapter: Arc<Adapter> },
    /// Sets the parameters that either adapter touches to their base with `after` merged, where `before` is merged now.
    /// Where the base is no longer the checkpoint's, the ranks keep a copy of it for as long as an adapter is merged.
    Merge { before: Arc<Adapter>, after: Arc<Adapter> },
    /// Sets some parameters to new values, which are their base from now on.
    Replace { tensors: Arc<Tensors> },
    /// Sets single elements to new values. The resulting weights become the base of the changed parameters, and of
    /// those that `merged`, the adapter that is merged now, touches.
    Patch { delta: Arc<Delta>, merged: Arc<Adapter> },
    /// Makes an adapter resident under this generation, by which a [`PlanSequence`](crate::types::PlanSequence) names
    /// it.
    AddAdapter { generation: u64, adapter: Arc<Adapter> },
    /// Drops a resident adapter.
    RemoveAdapter { generation: u64 },
}
