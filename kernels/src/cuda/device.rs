//! A GPU as the device of a rank.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::context::Context;
use super::kv::CudaKv;
use super::matrix::CudaMatrix;
use super::ops::CudaOps;
use super::tensor::{over, pointer};
use crate::activations::Activations;
use crate::backend::device::{DeviceImpl, DeviceOptions, ModelShape};
use crate::backend::operators::OpsImpl;
use crate::backend::storage::{KvCacheImpl, MatrixImpl, MemoryImpl};
use crate::error::DeviceError;
use crate::kv_layout::KvLayout;
use crate::weights::MatrixShape;

/// Head dimensions that the attention kernel is compiled for.
const MAX_HEAD_DIM: usize = 256;
/// What a head dimension must be a multiple of: the `k` of one tensor-core instruction.
const HEAD_DIM_STEP: usize = 16;

/// The GPU with the number of the rank.
pub(crate) struct CudaDevice {
    context: Arc<Context>,
    ordinal: usize,
    threads: usize,
}

impl CudaDevice {
    /// # Errors
    /// [`DeviceError::Unsupported`] if there is no such GPU, it is too old, or a kernel is asked for by name.
    pub fn open(options: &DeviceOptions<'_>) -> std::result::Result<Self, DeviceError> {
        if options.kernel != "auto" {
            let kernel = options.kernel;
            return Err(DeviceError::Unsupported(format!("--kernel {kernel}: a CUDA device has only auto")));
        }
        let context = Arc::new(Context::open(options.rank)?);
        Ok(Self { context, ordinal: options.rank, threads: options.threads })
    }
}

impl DeviceImpl for CudaDevice {
    fn kernel(&self) -> &'static str {
        "cuda"
    }

    fn check(&self, model: &ModelShape) -> std::result::Result<(), DeviceError> {
        let head_dim = model.head_dim;
        if head_dim.is_multiple_of(HEAD_DIM_STEP) && head_dim <= MAX_HEAD_DIM {
            return Ok(());
        }
        Err(DeviceError::Unsupported(format!(
            "config.json: head_dim is {head_dim}; the attention kernel takes multiples of {HEAD_DIM_STEP} up to \
             {MAX_HEAD_DIM}"
        )))
    }

    fn memory(&self) -> usize {
        self.ordinal
    }

    fn total_bytes(&self) -> u64 {
        self.context.total_bytes
    }

    fn used_bytes(&self) -> u64 {
        self.context.used_bytes()
    }

    fn trim(&self) {
        self.context.trim();
    }

    fn ops(&self) -> Box<dyn OpsImpl> {
        let ops = CudaOps::new(self.context.clone(), self.threads);
        Box::new(ops.unwrap_or_else(|e| panic!("the kernels of device {} were not loaded: {e}", self.ordinal)))
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

    fn zeros(&self, len: usize) -> Result<Activations> {
        let allocation = self.context.zeros(&self.context.workspace, len * size_of::<f32>());
        over(&self.context, allocation.map_err(candle_core::Error::wrap)?, len)
    }

    fn activations(&self, rows: usize, width: usize) -> Result<Activations> {
        let allocation = self.context.zeros(&self.context.workspace, rows * width * size_of::<f32>());
        over(&self.context, allocation.map_err(candle_core::Error::wrap)?, (rows, width))
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
