//! The parts of a rank's device: candle's handle of it, its stream, and an arena for each kind of memory.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Result;
use candle_core::cuda_backend::CudaDevice as CandleDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};

use super::arena::{Arena, ArenaAllocation, PAGE_BYTES, Quota};
use super::capture::{StreamLock, forbid_captures};
use super::copy::Copies;
use super::digest::Digests;
use super::staging::Staging;
use super::weight_row_copy::WeightRowCopies;
use crate::error::DeviceError;

/// Size of the driver's own memory pool once it is used: candle's tensors take one value of it when they are dropped.
/// Not measured on a card; the default pool grows by 32 MiB.
const POOL_BYTES: u64 = 32 << 20;
/// Pages that are lost at the edges of what lies in the arenas: two for each of the four.
const LOST_PAGES: u64 = 8;
/// Bytes that the process may take of a device beside the context and what is stored there.
pub(super) const ROUNDING_BYTES: u64 = POOL_BYTES + LOST_PAGES * PAGE_BYTES as u64;

/// The device of one rank.
pub(super) struct Context {
    pub candle: ManuallyDrop<CandleDevice>,
    /// On which all operators of the rank run, one after the other.
    pub stream: Arc<CudaStream>,
    /// Weights: matrices and vectors.
    pub weights: Arc<Arena>,
    /// Keys and values.
    pub kv: Arc<Arena>,
    /// Activations.
    pub workspace: Arc<Arena>,
    /// Temporary memory of operators, which they keep for the next time.
    pub scratch: Arc<Arena>,
    pub quota: Arc<Quota>,
    /// Broadcasts of other processes, on a stream of their own.
    pub broadcasts: Arc<Arena>,
    broadcast_quota: Arc<Quota>,
    /// To and from the host.
    pub copies: Copies,
    pub weight_row_copies: WeightRowCopies,
    pub digests: Digests,
    pub total_bytes: u64,
    pub processors: u32,
    /// How often memory that operators keep got another address.
    moves: AtomicU64,
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
        let _no_captures = forbid_captures();
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
        let (quota, broadcast_quota) = (Quota::new(), Quota::new());
        let lock = StreamLock::default();
        let arena = || Arena::reserve(&stream, &lock, total, &quota);
        Ok(Self {
            copies: Copies::new(&stream, &lock)?,
            weight_row_copies: WeightRowCopies::load(&context)?,
            digests: Digests::load(&context)?,
            weights: arena()?,
            kv: arena()?,
            workspace: arena()?,
            scratch: arena()?,
            quota: quota.clone(),
            // What it holds goes back by itself: its stream may wait for another process.
            broadcasts: Arena::reserve(&context.new_stream().w()?, &StreamLock::default(), total, &broadcast_quota)?,
            broadcast_quota: broadcast_quota.clone(),
            candle: ManuallyDrop::new(candle),
            total_bytes: total as u64,
            processors,
            stream,
            moves: AtomicU64::new(0),
        })
    }

    /// Bytes of the device that the arenas have mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.quota.mapped_bytes() + self.broadcast_quota.mapped_bytes()
    }

    /// Lets the arenas and the driver's pool take no more than `bytes` together from now on.
    pub fn limit(&self, bytes: u64) {
        self.quota.limit(bytes.saturating_sub(POOL_BYTES));
    }

    /// Free bytes of the device, as the driver reports them.
    pub fn free_bytes(&self) -> Result<u64> {
        let context = self.stream.context();
        context.bind_to_thread().w()?;
        context.mem_get_info().w().map(|(free, _)| free as u64)
    }

    /// Gives unused memory back to the driver. Broadcast receivers do so themselves, because their stream may wait for
    /// other processes.
    pub fn trim(&self) {
        self.quota.trim();
        self.copies.release();
    }

    /// Says that memory that operators keep gets another address.
    pub fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that is another after a move.
    pub fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Copies words to new memory for an operator of a step. The memory may be dropped when what uses it has been
    /// started: what takes it next runs behind that on the stream.
    pub fn upload(&self, staging: &Staging, words: &[u32]) -> Result<ArenaAllocation> {
        let memory = self.scratch.allocate_for_step(size_of_val(words))?;
        staging.copy(words, memory.pointer).w()?;
        Ok(memory)
    }

    /// Zeros, on the rank's stream, in new memory.
    pub fn zeros(&self, arena: &Arc<Arena>, bytes: usize) -> std::result::Result<ArenaAllocation, DeviceError> {
        let allocation = arena.allocate(bytes)?;
        self.fill_with_zeros(&allocation, bytes)?;
        Ok(allocation)
    }

    pub fn fill_with_zeros(&self, memory: &ArenaAllocation, bytes: usize) -> std::result::Result<(), DeviceError> {
        self.copies.zero(memory.pointer, bytes).map_err(|e| DeviceError::Unsupported(e.to_string()))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Its handle of cuBLAS waits for all streams of the device as it goes: that of this context, on any thread.
        let _no_captures = forbid_captures();
        if let Err(error) = self.stream.context().bind_to_thread() {
            tracing::debug!("the device has failed: {error}");
        }
        // SAFETY: it is not used any more.
        unsafe { ManuallyDrop::drop(&mut self.candle) };
    }
}
