//! What a rank's device is made of: candle's handle of it, its stream, and an arena for each kind of memory.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::CudaDevice as CandleDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};

use super::arena::{Allocation, Arena};
use super::copy::Copies;
use super::staging::Staging;
use crate::error::DeviceError;

/// The device of one rank.
pub(super) struct Context {
    pub candle: CandleDevice,
    /// On which all operators of the rank run, one after the other.
    pub stream: Arc<CudaStream>,
    /// Weight matrices.
    pub weights: Arc<Arena>,
    /// Keys and values.
    pub kv: Arc<Arena>,
    /// Activations, vectors, and what operators keep between them.
    pub workspace: Arc<Arena>,
    /// To and from the host.
    pub copies: Copies,
    pub total_bytes: u64,
    pub processors: u32,
}

impl Context {
    /// Takes the device with this number.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if there is none, or it is too old.
    pub fn open(ordinal: usize) -> std::result::Result<Self, DeviceError> {
        Self::try_open(ordinal)
            .map_err(|e| DeviceError::Unsupported(format!("--device cuda: device {ordinal} cannot be used: {e}")))
    }

    fn try_open(ordinal: usize) -> Result<Self> {
        let candle = CandleDevice::new_with_stream(ordinal)?;
        // SAFETY: all tensors of the device are used on its one stream, and copies wait for it.
        unsafe { candle.disable_event_tracking() };
        let stream = candle.cuda_stream();
        let context = stream.context().clone();
        let (_, total) = context.mem_get_info().w()?;
        let attribute = |which| context.attribute(which).w();
        let (major, minor) = (
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if major < 8 {
            candle_core::bail!("its compute capability is {major}.{minor}; the kernels need 8.0 (Ampere) or newer");
        }
        let processors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let arena = || Arena::reserve(&stream, total).map_err(candle_core::Error::wrap);
        Ok(Self {
            copies: Copies::new(&stream)?,
            weights: arena()?,
            kv: arena()?,
            workspace: arena()?,
            candle,
            total_bytes: total as u64,
            processors,
            stream,
        })
    }

    /// Bytes of the device that the arenas have mapped. What the driver takes for the process's context, code and
    /// stacks is not in it: no call of the driver tells it apart from what other processes take.
    pub fn used_bytes(&self) -> u64 {
        [&self.weights, &self.kv, &self.workspace].map(|arena| arena.mapped_bytes()).iter().sum()
    }

    /// Gives what nothing uses back to the driver.
    pub fn trim(&self) {
        [&self.weights, &self.kv, &self.workspace].into_iter().for_each(|arena| arena.trim());
    }

    /// Copies words to new memory of the workspace. The memory may be dropped when what uses it has been started: what
    /// takes it next runs behind that on the stream.
    pub fn upload(&self, staging: &Staging, words: &[u32]) -> Result<Allocation> {
        let memory = self.workspace.allocate(size_of_val(words)).map_err(candle_core::Error::wrap)?;
        staging.copy(words, memory.pointer).w()?;
        Ok(memory)
    }

    /// Zeros, on the rank's stream, in new memory.
    pub fn zeros(&self, arena: &Arc<Arena>, bytes: usize) -> std::result::Result<Allocation, DeviceError> {
        let allocation = arena.allocate(bytes)?;
        self.copies.zero(allocation.pointer, bytes).map_err(|e| DeviceError::Unsupported(e.to_string()))?;
        Ok(allocation)
    }
}
