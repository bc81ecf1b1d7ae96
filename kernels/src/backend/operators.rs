//! The trait of a device's operators. [`Ops`](crate::Ops) documents what each does.

use std::any::Any;
use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::adapter::AdapterRows;
use crate::buffer::DeviceBuffer;
use crate::deferred::Deferred;
use crate::divergence::{Divergences, LogitsPair};
use crate::group::HostCollective;
use crate::kv_cache::KvCache;
use crate::kv_layout::BlockCopy;
use crate::matrix::Matrix;
use crate::merge::Merge;
use crate::patches::Patches;
use crate::rotary::RotaryTables;
use crate::routing::{Router, Routing};
use crate::sampling::SampledTokens;
use crate::step::{AttentionShape, Padding, Step, StepInput};
use crate::weights::{ReadRows, WriteElements};

/// The operators of one rank. Called from its thread alone.
pub(crate) trait OpsImpl: Send {
    fn prepare(&self, input: &StepInput<'_>) -> Result<Box<dyn Any>>;
    /// The number of rows comes first.
    fn prepare_padded(&self, input: &StepInput<'_>, _padding: Padding) -> Result<(usize, Box<dyn Any>)> {
        Ok((input.tokens.len(), self.prepare(input)?))
    }
    /// `launches` returns whether it succeeded. It is called again if a capture of it is not used.
    fn capture_or_replay(
        &self,
        _step: &Step<'_>,
        _ranks: &dyn HostCollective,
        launches: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        launches();
        Ok(())
    }
    fn drop_graphs(&self) {}
    fn samples_in_graph(&self, _step: &Step<'_>) -> bool {
        false
    }
    fn sample_in_graph(&self, _logits: &Tensor, _step: &Step<'_>, _rows: Range<usize>) -> Result<()> {
        unreachable!("no graph answers tasks")
    }
    fn sampled<'a>(&'a self, _step: &'a Step<'_>) -> Result<Deferred<'a, SampledTokens>> {
        unreachable!("no graph answers tasks")
    }
    fn patches(&self, patches: &Patches<'_>, out: &Tensor) -> Result<()>;
    fn embed(&self, table: &Matrix, first_token: usize, step: &Step<'_>, out: &Tensor) -> Result<()>;
    fn linear(&self, x: &Tensor, w: &Matrix, bias: Option<&DeviceBuffer>, out: &Tensor) -> Result<()>;
    fn linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        bias: Option<&DeviceBuffer>,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()>;
    fn silu_mul(&self, gate_up: &Tensor, out: &Tensor) -> Result<()>;
    fn gelu(&self, x: &Tensor) -> Result<()>;
    fn rms_norm(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()>;
    fn add_rms_norm(
        &self,
        residual: &Tensor,
        x: &Tensor,
        bias: Option<&DeviceBuffer>,
        weight: &DeviceBuffer,
        eps: f32,
        out: &Tensor,
    ) -> Result<()>;
    fn rms_norm_heads(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32) -> Result<()>;
    fn layer_norm(&self, x: &Tensor, weight: &DeviceBuffer, bias: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()>;
    fn rope(&self, x: &Tensor, head_dim: usize, step: &Step<'_>, tables: &RotaryTables<'_>) -> Result<()>;
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
    /// The pairs are of rows of `logits`.
    fn divergences<'a>(&'a self, logits: &Tensor, pairs: &[LogitsPair]) -> Result<Deferred<'a, Vec<Divergences>>>;
    fn sample<'a>(
        &'a self,
        logits: &Tensor,
        step: &'a Step<'_>,
        rows: Range<usize>,
    ) -> Result<Deferred<'a, SampledTokens>>;

    fn read_rows(&self, x: &Tensor, rows: &[u32]) -> Result<Vec<f32>>;
    fn write_rows(&self, values: &[f32], out: &Tensor) -> Result<()>;
    fn select_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()>;
    fn put_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()>;
    fn add_rows(&self, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()>;
    fn add(&self, x: &Tensor, out: &Tensor) -> Result<()>;
    /// Whether the groups were added; otherwise nothing was done.
    fn add_adapters(
        &self,
        _x: &Tensor,
        _groups: &[AdapterRows<'_>],
        _scratch: [&Tensor; 3],
        _out: &Tensor,
    ) -> Result<bool> {
        Ok(false)
    }
    fn add_scaled(&self, x: &Tensor, scale: &DeviceBuffer, out: &Tensor) -> Result<()>;

    fn route(
        &self,
        x: &Tensor,
        router: &Router<'_>,
        forced: Option<&[u16]>,
        logits: &Tensor,
        routing: &mut Routing,
    ) -> Result<()>;
    fn kept_experts<'a>(&'a self, routing: &'a Routing, rows: usize) -> Result<Deferred<'a, Vec<u16>>>;
    fn group_by_expert(&self, routing: &mut Routing) -> Result<()>;
    fn expert_linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        routing: &Routing,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()>;
    fn expert_linear(&self, x: &Tensor, w: &Matrix, routing: &Routing, out: &Tensor) -> Result<()>;
    fn combine(&self, expert_out: &Tensor, routing: &Routing, out: &Tensor) -> Result<()>;
    fn add_gated(&self, gates: &Tensor, shared: &Tensor, out: &Tensor) -> Result<()>;

    fn store_rows(&self, w: &mut Matrix, rows: Range<usize>, read: &ReadRows<'_>) -> Result<()>;
    fn copy_rows(&self, from: &Matrix, rows: Range<usize>, to: &mut Matrix) -> Result<()>;
    fn merge_rows(&self, w: &mut Matrix, first_row: usize, merge: &Merge<'_>) -> Result<()>;
    fn write_elements(&self, w: &mut Matrix, rows: Range<usize>, write: &WriteElements<'_>) -> Result<()>;
    fn unpack(&self, w: &Matrix, out: &Tensor) -> Result<()>;

    /// Calls `task` with every number below `tasks`, on the host's threads.
    fn run_on_host(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
    fn release(&self);
}
