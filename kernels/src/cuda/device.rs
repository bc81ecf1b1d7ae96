//! A GPU as the device of a rank.

use std::ops::Range;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys};
use candle_core::{Result, Tensor, bail};

use super::attention::flash;
use super::attention::plan::MAX_PARTIAL_BYTES;
use super::borrowed::{ARRIVING_BYTES, CudaBorrowed};
use super::broadcast::CudaBroadcastReceiver;
use super::context::{Context, ROUNDING_BYTES};
use super::experts::{CudaRouting, max_kept_bytes};
use super::footprint::{self, FootprintReadings};
use super::group::{self, CudaGroup, EXCHANGE_BYTES};
use super::kv::CudaKv;
use super::linear::plan::most_part_bytes;
use super::matrix::{COPIED_BYTES, CudaMatrix};
use super::nvml::Monitor;
use super::ops::CudaOps;
use super::patches::PIXEL_BYTES;
use super::rows::READ_BYTES;
use super::sampling::{DIVERGENCE_BYTES, max_download_bytes};
use super::staging;
use super::tensor::{over, pointer};
use crate::activations::Activations;
use crate::backend::broadcast::{BroadcastReceiverImpl, IsCancelled};
use crate::backend::device::{AttentionKernel, DeviceImpl, DeviceOptions, ModelShape};
use crate::backend::group::GroupImpl;
use crate::backend::operators::OpsImpl;
use crate::backend::storage::{KvCacheImpl, MatrixImpl, MemoryImpl, RoutingImpl};
use crate::borrowed::{BorrowedMemory, MemoryHandle};
use crate::error::DeviceError;
use crate::group::{AllReduce, GroupId, Membership};
use crate::kv_layout::KvLayout;
use crate::routing_shape::RoutingShape;
use crate::weights::MatrixShape;

/// Head dimensions that the attention kernel is compiled for.
const MAX_HEAD_DIM: usize = 256;
/// Head dimensions must be a multiple of this: the `k` of one tensor-core instruction.
const HEAD_DIM_STEP: usize = 16;

/// Bytes reserved for NCCL's own memory on each of several GPUs: the buffers of its channels. Not measured on a card.
const NCCL_BYTES: u64 = 256 << 20;
/// Most bytes that operators take for what they read of a step (block tables, questions to the sampler), and lose at
/// the edges of pages.
const LIST_BYTES: usize = 48 << 20;
/// Rows whose experts are computed at once: of 128 experts of which each row takes 8, as many for each as the largest
/// tile has. `cu/ROOFLINE.md` has what other numbers would read and take.
const EXPERT_ROWS: usize = 2048;
/// Threads that copy weights at the same time, beside those of the rank: a push that is packed, and a checksum.
const OTHER_COPIES: usize = 2;

/// The GPU with the number of the rank.
pub(crate) struct CudaDevice {
    context: Arc<Context>,
    ordinal: usize,
    threads: usize,
    attention: AttentionKernel,
    /// Bytes that the driver took when it opened the device.
    footprint: u64,
}

impl CudaDevice {
    /// # Errors
    /// [`DeviceError::Unsupported`] if there is no such GPU, it is too old, or a kernel is asked for by name.
    pub fn open(options: &DeviceOptions<'_>) -> std::result::Result<Self, DeviceError> {
        if options.kernel != "auto" {
            let kernel = options.kernel;
            return Err(DeviceError::Unsupported(format!("--kernel {kernel}: a CUDA device has only auto")));
        }
        let DeviceOptions { rank: ordinal, threads, attention, .. } = *options;
        if attention == AttentionKernel::Flash && !flash::IS_BUILT_IN {
            let how = "make cuda FEATURES=cuda,flash-attn";
            return Err(DeviceError::Unsupported(format!(
                "--attention flash: this binary was built without it ({how})"
            )));
        }
        // Without any device the context says why.
        if let Ok(count @ 1..) = CudaContext::device_count()
            && ordinal >= count as usize
        {
            return Err(DeviceError::Unsupported(format!(
                "--tp: each rank needs a GPU of its own, and rank {ordinal} has none: this process sees {count}"
            )));
        }
        let footprint = footprint::of_device(ordinal, || open_and_close(ordinal).map_err(|e| e.to_string()));
        Ok(Self { context: Arc::new(Context::open(ordinal)?), ordinal, threads, attention, footprint })
    }
}

/// Opens the device with all that it needs, and closes it again.
///
/// # Errors
/// If the process has it open already, or NVML does not report how much of its memory is used.
fn open_and_close(ordinal: usize) -> Result<FootprintReadings> {
    result::init().w()?;
    let device = result::device::get(ordinal as i32).w()?;
    let (mut uuid, mut flags, mut is_open) = (sys::CUuuid { bytes: [0; 16] }, 0, 0);
    // SAFETY: the results are written; the driver is initialised, and the device one of its.
    unsafe {
        sys::cuDeviceGetUuid_v2(&raw mut uuid, device).result().w()?;
        sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut is_open).result().w()?;
    }
    if is_open != 0 {
        bail!("the process has opened it before");
    }
    let monitor = Monitor::of(uuid).map_err(candle_core::Error::msg)?;
    let read = || monitor.read().map_err(candle_core::Error::msg);
    let before = read()?;
    let opened = CudaOps::new(Arc::new(Context::open(ordinal)?), 1, AttentionKernel::Invariant)?;
    let open = read()?;
    drop(opened);
    Ok([before, open, read()?])
}

impl DeviceImpl for CudaDevice {
    fn kernel(&self) -> &'static str {
        match self.attention {
            AttentionKernel::Invariant => "cuda",
            AttentionKernel::Flash => "cuda_flash",
        }
    }

    fn check(&self, model: &ModelShape) -> std::result::Result<(), DeviceError> {
        let head_dim = model.head_dim;
        if !head_dim.is_multiple_of(HEAD_DIM_STEP) || head_dim > MAX_HEAD_DIM {
            return Err(DeviceError::Unsupported(format!(
                "config.json: head_dim is {head_dim}; the attention kernel takes multiples of {HEAD_DIM_STEP} up to \
                 {MAX_HEAD_DIM}"
            )));
        }
        match self.attention {
            AttentionKernel::Invariant => Ok(()),
            AttentionKernel::Flash => flash::check(&self.context, model),
        }
    }

    fn memory(&self) -> usize {
        self.ordinal
    }

    fn total_bytes(&self) -> u64 {
        self.context.total_bytes
    }

    fn used_bytes(&self) -> u64 {
        self.footprint + self.context.mapped_bytes()
    }

    fn has_own_memory(&self) -> bool {
        true
    }

    fn context_bytes(&self, ranks: usize) -> u64 {
        self.footprint + if ranks > 1 { NCCL_BYTES } else { 0 }
    }

    fn rounding_bytes(&self) -> u64 {
        ROUNDING_BYTES
    }

    fn scratch_bytes(&self) -> usize {
        most_part_bytes(self.context.processors as usize)
            + MAX_PARTIAL_BYTES
            + LIST_BYTES
            + DIVERGENCE_BYTES
            + PIXEL_BYTES
            + flash::SUM_BYTES
    }

    fn host_bytes(&self, logits_bytes: usize, kept_bytes: usize) -> u64 {
        let copies = (self.threads + OTHER_COPIES) * COPIED_BYTES;
        staging::MOST_BYTES
            + copies as u64
            + max_download_bytes(logits_bytes)
            + max_kept_bytes(kept_bytes)
            + READ_BYTES as u64
    }

    fn expert_rows(&self) -> usize {
        EXPERT_ROWS
    }

    fn limit(&self, bytes: u64) {
        self.context.limit(bytes);
    }

    fn free_bytes(&self) -> Option<u64> {
        self.context.free_bytes().ok()
    }

    fn trim(&self) {
        self.context.trim();
    }

    fn offload(&self, most: u64) -> std::result::Result<(), DeviceError> {
        self.context.weights.offload(most)
    }

    fn offloaded_bytes(&self) -> u64 {
        self.context.weights.offloaded_bytes()
    }

    fn bring_back(&self) -> std::result::Result<(), DeviceError> {
        self.context.weights.bring_back()
    }

    fn uuid(&self) -> Option<String> {
        let uuid = self.context.stream.context().uuid().ok()?;
        let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect();
        let ends = [0, 8, 12, 16, 20, 32];
        Some(ends.windows(2).map(|part| &hex[part[0]..part[1]]).collect::<Vec<_>>().join("-"))
    }

    fn borrow_memory(&self, handle: &MemoryHandle) -> std::result::Result<BorrowedMemory, DeviceError> {
        CudaBorrowed::open(&self.context, handle).map(BorrowedMemory::new)
    }

    fn arriving_bytes(&self) -> usize {
        ARRIVING_BYTES
    }

    fn ops(&self) -> Box<dyn OpsImpl> {
        let ops = CudaOps::new(self.context.clone(), self.threads, self.attention);
        Box::new(ops.unwrap_or_else(|e| panic!("the kernels of device {} were not loaded: {e}", self.ordinal)))
    }

    fn group_id(&self) -> std::result::Result<Option<GroupId>, DeviceError> {
        group::new_id().map(Some)
    }

    fn join(&self, membership: &Membership, all_reduce: AllReduce) -> Result<Box<dyn GroupImpl>> {
        Ok(Box::new(CudaGroup::join(&self.context, membership, all_reduce)?))
    }

    fn exchange_bytes(&self) -> usize {
        EXCHANGE_BYTES
    }

    fn broadcast_library(&self) -> Option<&'static str> {
        Some("nccl")
    }

    fn join_broadcast(
        &self,
        membership: &Membership,
        is_cancelled: IsCancelled<'_>,
    ) -> std::result::Result<Box<dyn BroadcastReceiverImpl>, DeviceError> {
        Ok(Box::new(CudaBroadcastReceiver::join(&self.context, membership, is_cancelled)?))
    }
}

impl MemoryImpl for CudaDevice {
    fn matrix_bytes(&self, shape: MatrixShape) -> usize {
        CudaMatrix::bytes_for(shape)
    }

    fn matrix(&self, shape: MatrixShape) -> std::result::Result<Box<dyn MatrixImpl>, DeviceError> {
        Ok(Box::new(CudaMatrix::zeros(&self.context, shape)?))
    }

    fn kv_cache(&self, layout: KvLayout) -> std::result::Result<Box<dyn KvCacheImpl>, DeviceError> {
        Ok(Box::new(CudaKv::new(&self.context, layout)?))
    }

    fn routing(&self, shape: &RoutingShape) -> std::result::Result<Box<dyn RoutingImpl>, DeviceError> {
        Ok(Box::new(CudaRouting::new(&self.context, shape)?))
    }

    fn zeros(&self, len: usize) -> Result<Activations> {
        let allocation = self.context.zeros(&self.context.weights, len * size_of::<f32>())?;
        over(&self.context.candle, allocation, len)
    }

    fn activations(&self, rows: usize, width: usize) -> Result<Activations> {
        let allocation = self.context.zeros(&self.context.workspace, rows * width * size_of::<f32>())?;
        over(&self.context.candle, allocation, (rows, width))
    }

    fn write(&self, to: &Tensor, start: usize, values: &[f32]) -> Result<()> {
        let len = to.elem_count();
        assert!(start + values.len() <= len, "values {start} to {} of {len}", start + values.len());
        self.context.copies.write(pointer(to)? + (start * size_of::<f32>()) as u64, values)
    }

    fn read(&self, from: &Tensor, range: Range<usize>) -> Result<Vec<f32>> {
        let len = from.elem_count();
        assert!(range.end <= len, "values {range:?} of {len}");
        let mut values = vec![0.0; range.len()];
        self.context.copies.read(pointer(from)? + (range.start * size_of::<f32>()) as u64, &mut values)?;
        Ok(values)
    }
}
