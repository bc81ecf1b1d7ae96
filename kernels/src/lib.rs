//! The devices that rollout-server runs on: one set of operators, and a room of this crate for each device.
//!
//! [`Backend`] is the closed set of devices. [`Backend::open`] returns a [`Device`], which checks that it supports a
//! model, owns the memory ([`Matrix`], [`KvCache`], [`DeviceBuffer`]) and starts the operators of a rank ([`Ops`]). The
//! crates above use these types alone. Activations are candle tensors of the device, allocated once and written in
//! place.
//!
//! On every device, each reduction order depends only on the row's own inputs, so that a row's result has the same bits
//! alone and in any batch.

mod activations;
mod adapter;
mod backend;
mod borrowed;
mod broadcast;
mod buffer;
pub mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod deferred;
mod device;
mod divergence;
mod error;
mod group;
pub mod host;
mod kv_cache;
mod kv_layout;
mod matrix;
mod merge;
mod ops;
mod patches;
mod reference;
mod rotary;
mod routing;
mod routing_shape;
mod sampling;
mod step;
mod tensor;
mod values;
mod weights;

pub use activations::Activations;
pub use adapter::{AdapterFactors, AdapterRows, UpFactor};
pub use backend::broadcast::{Broadcast, IsCancelled, OnBytes};
pub use backend::device::{AttentionKernel, DeviceOptions, ModelShape};
pub use backend::storage::{BorrowedRows, Digested};
pub use borrowed::{BorrowedMemory, MemoryHandle};
pub use broadcast::BroadcastReceiver;
pub use buffer::DeviceBuffer;
pub use deferred::Deferred;
pub use device::{Device, Devices};
pub use divergence::{Divergences, LogitsPair};
pub use error::{DeviceError, out_of_memory};
pub use group::{AllReduce, GroupId, HostCollective, Membership, RankGroup};
pub use kv_cache::KvCache;
pub use kv_layout::{BlockCopy, KvLayout};
pub use matrix::Matrix;
pub use merge::{LoraDelta, LowRank, Magnitude, Merge, MergeBase, ReadValues, Replacement, WeightChange};
pub use ops::Ops;
pub use patches::Patches;
pub use rotary::{RotaryPositions, RotaryTables};
pub use routing::{Router, Routing, Scoring};
pub use routing_shape::{NOT_FORCED, RoutingShape, expert_groups};
pub use sampling::{Distribution, SampledTokens, SamplingTask, Support, TaskReturns, TokenLogprobs, TokenReturns};
pub use step::{AttentionSequence, AttentionShape, Padding, RowTasks, Step, StepInput};
pub use values::{Dtype, StorageDtype, TensorData, TensorView};
pub use weights::{MAX_LEAVES, MatrixShape, ROW_GROUP, ReadRows, WriteElements, reduction_leaves};

/// The devices there are. Another one is a room of this crate that implements the traits of `backend`, and a variant
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The processor, with its vector instructions.
    Cpu,
    /// An NVIDIA GPU for each rank.
    #[cfg(feature = "cuda")]
    Cuda,
    /// Plain loops in float64, which the others are compared with.
    Reference,
}

impl Backend {
    pub const ALL: &'static [Backend] = &[
        Backend::Cpu,
        #[cfg(feature = "cuda")]
        Backend::Cuda,
        Backend::Reference,
    ];

    /// As `--device` takes it and `GetInfo` shows it.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            #[cfg(feature = "cuda")]
            Backend::Cuda => "cuda",
            Backend::Reference => "reference",
        }
    }

    /// Whether people serve from it; the others are for tests and stay out of `--help`.
    pub fn is_for_serving(self) -> bool {
        match self {
            Backend::Cpu => true,
            #[cfg(feature = "cuda")]
            Backend::Cuda => true,
            Backend::Reference => false,
        }
    }

    /// Makes the device of one rank ready; takes no memory and starts no thread yet.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if this machine has no such device, or not the kernel that is asked for.
    pub fn open(self, options: &DeviceOptions<'_>) -> Result<Device, DeviceError> {
        if options.attention == AttentionKernel::Flash && matches!(self, Backend::Cpu | Backend::Reference) {
            let name = self.name();
            return Err(DeviceError::Unsupported(format!("--attention flash: --device {name} has only invariant")));
        }
        match self {
            Backend::Cpu => cpu::CpuDevice::open(options).map(Device::new),
            #[cfg(feature = "cuda")]
            Backend::Cuda => cuda::CudaDevice::open(options).map(Device::new),
            Backend::Reference => reference::ReferenceDevice::open(options).map(Device::new),
        }
    }
}
