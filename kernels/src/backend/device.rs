//! What a device's room implements beside storage and operators.

use super::operators::OpsImpl;
use super::storage::MemoryImpl;
use crate::error::DeviceError;
use crate::kv_layout::KvDtype;
use crate::weights::WeightDtype;

/// What one rank asks of its device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOptions<'a> {
    /// Number of the rank: which device it takes where the machine has several, and what its threads are named after.
    pub rank: usize,
    /// Threads of the host that the rank computes with, at least 1.
    pub threads: usize,
    /// Name of the variant of the operators (an instruction set of the processor), or `auto` for the fastest there is.
    pub kernel: &'a str,
}

/// What a model asks of a device.
#[derive(Clone, Copy, Debug)]
pub struct ModelShape {
    pub head_dim: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
    pub weights: WeightDtype,
    pub kv: KvDtype,
}

/// The device of one rank. [`Device`](crate::Device) and [`Devices`](crate::Devices) document what each method does.
pub(crate) trait DeviceImpl: MemoryImpl {
    fn kernel(&self) -> &'static str;
    fn check(&self, model: &ModelShape) -> Result<(), DeviceError>;
    /// Which memory it uses: devices with the same number share one.
    fn memory(&self) -> usize;
    fn total_bytes(&self) -> u64;
    fn used_bytes(&self) -> u64;
    fn trim(&self);
    fn ops(&self) -> Box<dyn OpsImpl>;
}
