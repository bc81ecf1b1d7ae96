//! Rows of weights, copied within the device from one layout and type to another.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaStream, sys};

use super::launch::{Launch, grid};
use super::layout::{DeviceRows, PackedRowLayout};
use super::module::{Module, fat_binary};
use crate::values::{Dtype, StorageDtype};

/// Threads of a block.
const THREADS: usize = 128;
/// Values that a thread copies: `CHUNK` of `cu/pack.cu`.
const CHUNK: usize = 8;

/// Rows that are copied: of a matrix, or as they were pushed.
#[derive(Clone, Copy)]
pub(super) struct CopiedRows {
    /// A multiple of a value's bytes.
    pub pointer: sys::CUdeviceptr,
    pub dtype: Dtype,
    /// Values from the start of a row to that of the next.
    pub stride: usize,
    pub layout: PackedRowLayout,
}

impl From<DeviceRows> for CopiedRows {
    fn from(DeviceRows { pointer, dtype, stride, layout }: DeviceRows) -> Self {
        Self { pointer, dtype: dtype.into(), stride, layout }
    }
}

/// The kernels that copy rows.
pub(super) struct WeightRowCopies {
    /// By the types that are copied from and to.
    functions: [[CudaFunction; 2]; 3],
}

impl WeightRowCopies {
    pub fn load(context: &Arc<CudaContext>) -> Result<Self> {
        let module = Module::load(context, fat_binary!("pack"))?;
        let load = |from: &str| -> Result<[CudaFunction; 2]> {
            Ok([module.function(&format!("copy_{from}_bf16"))?, module.function(&format!("copy_{from}_f32"))?])
        };
        Ok(Self { functions: [load("bf16")?, load("f16")?, load("f32")?] })
    }

    /// Starts to copy `count` rows on `stream`, rounded to nearest even where that is needed.
    ///
    /// # Panics
    /// If they have different widths.
    pub fn start(&self, stream: &CudaStream, from: CopiedRows, to: DeviceRows, count: usize) -> Result<()> {
        let columns = from.layout.columns();
        assert_eq!(columns, to.layout.columns(), "columns of rows that are copied");
        let functions = match from.dtype {
            Dtype::Bf16 => &self.functions[0],
            Dtype::F16 => &self.functions[1],
            Dtype::F32 => &self.functions[2],
        };
        let function = match to.dtype {
            StorageDtype::Bf16 => &functions[0],
            StorageDtype::F32 => &functions[1],
        };
        let mut launch = Launch::of(stream, function);
        for rows in [from, to.into()] {
            launch.pointer(rows.pointer).long(rows.stride).int(rows.layout.run).int(rows.layout.padded_run);
        }
        launch.int(columns);
        let blocks = [count, columns.div_ceil(CHUNK * THREADS)];
        let [x, y] = blocks.map(|blocks| u32::try_from(blocks).expect("rows and columns of a matrix"));
        // SAFETY: callers give rows of matrices, of tensors or of memory that they have borrowed, with as many columns.
        unsafe { launch.start(grid((x, y, 1), THREADS as u32, 0)) }
    }
}
