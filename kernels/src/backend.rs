//! What a device's room implements. [`Device`](crate::Device), [`Ops`](crate::Ops), [`Matrix`] and [`KvCache`] are
//! these traits as everything above this crate sees them, and document what the methods here do.

use std::any::Any;
use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::device::{DeviceError, ModelShape};
use crate::matrix::{ReadRows, RowBits, WeightRows, WriteElements};
use crate::{
    AttentionShape, BlockCopy, Buffer, KvCache, KvLayout, Matrix, MatrixShape, Merge, Sampled, Step, StepInput,
};

/// The device of one rank.
pub(crate) trait DeviceImpl: Send + Sync + 'static {
    fn kernel(&self) -> &'static str;
    fn check(&self, model: &ModelShape) -> std::result::Result<(), DeviceError>;
    /// Which memory it uses: devices with the same number share one.
    fn memory(&self) -> usize;
    fn total_bytes(&self) -> u64;
    fn used_bytes(&self) -> u64;
    fn trim(&self);
    fn ops(&self) -> Box<dyn OpsImpl>;

    /// Bytes that [`DeviceImpl::matrix`] takes for this shape.
    fn matrix_bytes(&self, shape: MatrixShape) -> usize;
    /// Storage of zeros.
    fn matrix(&self, shape: MatrixShape) -> std::result::Result<Box<dyn MatrixImpl>, DeviceError>;
    fn kv_cache(&self, layout: KvLayout) -> std::result::Result<Box<dyn KvCacheImpl>, DeviceError>;
    /// `len` float32 zeros in one dimension.
    fn zeros(&self, len: usize) -> Result<Tensor>;
    fn activations(&self, rows: usize, width: usize) -> Result<Tensor>;
    /// Writes to a tensor of [`DeviceImpl::zeros`].
    fn write(&self, to: &Tensor, start: usize, values: &[f32]) -> Result<()>;
    /// Reads a tensor of [`DeviceImpl::zeros`].
    fn read(&self, from: &Tensor, range: Range<usize>) -> Result<Vec<f32>>;
}

/// A device's storage of a matrix. Its methods are called from any thread, beside the operators.
pub(crate) trait MatrixImpl: Any + Send + Sync {
    fn write_columns(&mut self, row0: usize, rows: WeightRows<'_>, width: usize, first_column: usize);
    fn read_rows(&self, row0: usize, out: RowBits<'_>);
}

/// A device's storage of a layer's keys and values.
pub(crate) trait KvCacheImpl: Any + Send {}

/// The operators of one rank. Called from its thread alone.
pub(crate) trait OpsImpl: Send {
    fn prepare(&self, input: &StepInput<'_>) -> Result<Box<dyn Any>>;
    fn embed(&self, table: &Matrix, first_token: usize, step: &Step<'_>, out: &Tensor) -> Result<()>;
    fn linear(&self, x: &Tensor, w: &Matrix, bias: Option<&Buffer>, out: &Tensor) -> Result<()>;
    fn linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        bias: Option<&Buffer>,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()>;
    fn silu_mul(&self, gate_up: &Tensor, out: &Tensor) -> Result<()>;
    fn rms_norm(&self, x: &Tensor, weight: &Buffer, eps: f32, out: &Tensor) -> Result<()>;
    fn add_rms_norm(
        &self,
        residual: &Tensor,
        x: &Tensor,
        bias: Option<&Buffer>,
        weight: &Buffer,
        eps: f32,
        out: &Tensor,
    ) -> Result<()>;
    fn rms_norm_heads(&self, x: &Tensor, weight: &Buffer, eps: f32) -> Result<()>;
    fn rope(&self, x: &Tensor, head_dim: usize, step: &Step<'_>, cos: &Buffer, sin: &Buffer) -> Result<()>;
    fn write_kv(&self, k: &Tensor, v: &Tensor, step: &Step<'_>, cache: &mut KvCache) -> Result<()>;
    fn copy_blocks(&self, cache: &mut KvCache, copies: &[BlockCopy]) -> Result<()>;
    fn paged_attention(
        &self,
        q: &Tensor,
        shape: &AttentionShape,
        step: &Step<'_>,
        cache: &KvCache,
        out: &Tensor,
    ) -> Result<()>;
    fn select_logits_rows(&self, x: &Tensor, step: &Step<'_>, rows: Range<usize>, out: &Tensor) -> Result<()>;
    fn sample(&self, logits: &Tensor, step: &Step<'_>, rows: Range<usize>) -> Result<Sampled>;

    fn select_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()>;
    fn add_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()>;

    fn store_rows(&self, w: &mut Matrix, rows: Range<usize>, read: &ReadRows<'_>) -> Result<()>;
    fn copy_rows(&self, from: &Matrix, rows: Range<usize>, to: &mut Matrix) -> Result<()>;
    fn merge_rows(&self, w: &mut Matrix, first_row: usize, merge: &Merge<'_>) -> Result<()>;
    fn write_elements(&self, w: &mut Matrix, rows: Range<usize>, write: &WriteElements<'_>) -> Result<()>;
    fn unpack(&self, w: &Matrix, out: &Tensor) -> Result<()>;

    /// Calls `task` with every number below `tasks`, on the host's threads.
    fn run_on_host(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
    fn release(&self);
}
