//! The trait of a device, beside its storage and operators.

use super::broadcast::{BroadcastReceiverImpl, IsCancelled};
use super::group::GroupImpl;
use super::operators::OpsImpl;
use super::storage::MemoryImpl;
use crate::borrowed::{BorrowedMemory, MemoryHandle};
use crate::error::DeviceError;
use crate::group::{AllReduce, GroupId, Membership};
use crate::values::StorageDtype;

/// Options of one rank's device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOptions<'a> {
    /// Number of the rank: which device it takes where the machine has several, and what its threads are named after.
    pub rank: usize,
    /// Threads of the host that the rank computes with, at least 1.
    pub threads: usize,
    /// Name of the variant of the operators (an instruction set of the processor), or `auto` for the fastest there is.
    pub kernel: &'a str,
    pub attention: AttentionKernel,
}

impl Default for DeviceOptions<'_> {
    /// Of the first rank, with one thread.
    fn default() -> Self {
        Self { rank: 0, threads: 1, kernel: "auto", attention: AttentionKernel::Invariant }
    }
}

/// Which kernels compute attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AttentionKernel {
    /// The device's own: a row's bits depend on nothing but the row's own inputs.
    Invariant,
    /// FlashAttention 2 for sequences with several rows in a step, mainly prompts: a row's bits may depend on the other
    /// rows of the batch. Only on CUDA devices, in builds that have it.
    Flash,
}

/// The values of a model that a device may not support.
#[derive(Clone, Copy, Debug)]
pub struct ModelShape {
    pub head_dim: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
    pub weights: StorageDtype,
    pub kv: StorageDtype,
    /// Hidden size, and width of an expert; `None` for a model without experts.
    pub experts: Option<[usize; 2]>,
}

/// The device of one rank. [`Device`](crate::Device) and [`Devices`](crate::Devices) document what each method does.
pub(crate) trait DeviceImpl: MemoryImpl {
    fn kernel(&self) -> &'static str;
    fn check(&self, model: &ModelShape) -> Result<(), DeviceError>;
    /// Which memory it uses: devices with the same number share one.
    fn memory(&self) -> usize;
    fn total_bytes(&self) -> u64;
    fn used_bytes(&self) -> u64;
    fn free_bytes(&self) -> Option<u64> {
        None
    }
    fn trim(&self);
    fn has_own_memory(&self) -> bool {
        false
    }
    fn context_bytes(&self, _ranks: usize) -> u64 {
        0
    }
    fn rounding_bytes(&self) -> u64 {
        0
    }
    fn scratch_bytes(&self) -> usize {
        0
    }
    fn host_bytes(&self, _logits_bytes: usize, _kept_bytes: usize) -> u64 {
        0
    }
    fn expert_rows(&self) -> usize {
        512
    }
    fn limit(&self, _bytes: u64) {}
    fn offload(&self, _most: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    fn offloaded_bytes(&self) -> u64 {
        0
    }
    fn bring_back(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn uuid(&self) -> Option<String> {
        None
    }
    fn borrow_memory(&self, _: &MemoryHandle) -> Result<BorrowedMemory, DeviceError> {
        Err(DeviceError::Unsupported("this device has no memory of other processes".into()))
    }
    fn arriving_bytes(&self) -> usize {
        0
    }
    fn ops(&self) -> Box<dyn OpsImpl>;
    fn group_id(&self) -> Result<Option<GroupId>, DeviceError> {
        Ok(None)
    }
    fn join(&self, _: &Membership, _: AllReduce) -> candle_core::Result<Box<dyn GroupImpl>> {
        unreachable!("such devices have no group id")
    }
    fn exchange_bytes(&self) -> usize {
        0
    }
    fn broadcast_library(&self) -> Option<&'static str> {
        None
    }
    fn join_broadcast(
        &self,
        _: &Membership,
        _: IsCancelled<'_>,
    ) -> Result<Box<dyn BroadcastReceiverImpl>, DeviceError> {
        Err(DeviceError::Unsupported("other processes cannot send to such a device".into()))
    }
}
