//! The operators of a rank on its GPU: hands the memory of tensors to the launchers.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::activation::Activation;
use super::attention::PagedAttention;
use super::context::Context;
use super::experts::{DeviceRouter, ExpertKernels};
use super::graphs::CudaGraphs;
use super::host::HostSide;
use super::kv::CudaKv;
use super::linear::Gemm;
use super::matrix::CudaMatrix;
use super::merge::Merger;
use super::norm::Norms;
use super::pack::Packer;
use super::patches::PatchCutter;
use super::rope::Rope;
use super::rows::RowCopies;
use super::sampling::Sampler;
use super::scratch::DeviceScratch;
use super::staging::Staging;
use super::step::CudaStep;
use super::tensor::{pointer, rows};
use crate::backend::device::AttentionKernel;
use crate::backend::operators::OpsImpl;
use crate::buffer::DeviceBuffer;
use crate::cpu::ThreadPool;
use crate::deferred::Deferred;
use crate::divergence::{Divergences, LogitsPair};
use crate::group::HostCollective;
use crate::kv_cache::KvCache;
use crate::kv_layout::BlockCopy;
use crate::matrix::Matrix;
use crate::merge::Merge;
use crate::patches::Patches;
use crate::rotary::RotaryTables;
use crate::routing::{Router, Routing, Scoring};
use crate::sampling::SampledTokens;
use crate::step::{AttentionShape, Padding, Step, StepInput};
use crate::weights::{ReadRows, WriteElements};

/// The kernels, and the memory that they reuse.
pub(super) struct CudaOps {
    context: Arc<Context>,
    /// Reads what the host has, such as the base of a merge.
    pool: ThreadPool,
    staging: Staging,
    /// The indices of padded steps, at an address that graphs refer to.
    padded_step: DeviceScratch,
    linear: Gemm,
    patches: PatchCutter,
    activation: Activation,
    norms: Norms,
    rope: Rope,
    rows: RowCopies,
    attention: PagedAttention,
    experts: ExpertKernels,
    packer: Packer,
    merger: Merger,
    sampler: Sampler,
    graphs: CudaGraphs,
}

impl CudaOps {
    /// Loads the kernels.
    ///
    /// # Errors
    /// If the driver does not take them.
    pub fn new(context: Arc<Context>, threads: usize, attention: AttentionKernel) -> Result<Self> {
        Ok(Self {
            pool: ThreadPool::new(threads),
            staging: Staging::new(&context.stream),
            padded_step: DeviceScratch::new(&context),
            linear: Gemm::load(&context)?,
            patches: PatchCutter::load(&context)?,
            activation: Activation::load(&context)?,
            norms: Norms::load(&context)?,
            rope: Rope::load(&context)?,
            rows: RowCopies::load(&context)?,
            attention: PagedAttention::load(&context, attention)?,
            experts: ExpertKernels::load(&context)?,
            packer: Packer::load(&context)?,
            merger: Merger::load(&context)?,
            sampler: Sampler::load(&context)?,
            graphs: CudaGraphs::new(&context),
            context,
        })
    }

    fn host(&self) -> HostSide<'_> {
        HostSide { pool: &self.pool, staging: &self.staging }
    }
}

fn stored(w: &Matrix) -> &CudaMatrix {
    w.storage()
}

fn stored_mut(w: &mut Matrix) -> &mut CudaMatrix {
    w.storage_mut()
}

fn blocks(cache: &KvCache) -> &CudaKv {
    cache.storage()
}

fn prepared<'a>(step: &'a Step<'_>) -> &'a CudaStep {
    step.prepared()
}

/// The number of rows that a step is padded to: with few different numbers, few graphs are captured.
fn bucket(rows: usize) -> usize {
    if rows <= 8 { rows.next_power_of_two() } else { rows.next_multiple_of(8) }
}

/// Address of a vector, 0 if there is none.
fn vector(buffer: Option<&DeviceBuffer>) -> Result<u64> {
    buffer.map_or(Ok(0), |buffer| pointer(buffer.tensor()))
}

impl OpsImpl for CudaOps {
    fn prepare(&self, input: &StepInput<'_>) -> Result<Box<dyn Any>> {
        Ok(Box::new(CudaStep::upload(&self.context, &self.staging, input, self.attention.kernel())?))
    }

    fn prepare_padded(&self, input: &StepInput<'_>, padding: Padding) -> Result<(usize, Box<dyn Any>)> {
        let rows = bucket(input.tokens.len()).min(padding.most_rows);
        let step = CudaStep::upload_padded(&self.padded_step, &self.staging, input, rows, padding)?;
        Ok((rows, Box::new(step)))
    }

    fn capture_or_replay(
        &self,
        step: &Step<'_>,
        ranks: &dyn HostCollective,
        launches: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.graphs.run(prepared(step), ranks, launches)
    }

    fn drop_graphs(&self) {
        self.graphs.clear();
    }

    fn samples_in_graph(&self, step: &Step<'_>) -> bool {
        prepared(step).graph_tasks().is_some()
    }

    fn sample_in_graph(&self, logits: &Tensor, step: &Step<'_>, wanted: Range<usize>) -> Result<()> {
        let (tasks, counts, vocabulary) = prepared(step).graph_tasks().expect("the graph answers the step's tasks");
        let logits = rows(logits)?;
        assert_eq!(logits.width, vocabulary, "the vocabulary");
        self.sampler.answer(tasks, counts, logits, wanted)
    }

    fn sampled<'a>(&'a self, step: &'a Step<'_>) -> Result<Deferred<'a, SampledTokens>> {
        let (tasks, counts, vocabulary) = prepared(step).graph_tasks().expect("the graph answers the step's tasks");
        self.sampler.answered(tasks, counts, vocabulary, step.input().tasks)
    }

    fn patches(&self, patches: &Patches<'_>, out: &Tensor) -> Result<()> {
        self.patches.cut(self.host(), patches, rows(out)?)
    }

    fn embed(&self, table: &Matrix, first_token: usize, step: &Step<'_>, out: &Tensor) -> Result<()> {
        self.rows.embed(stored(table), first_token, prepared(step).tokens(), rows(out)?)
    }

    fn linear(&self, x: &Tensor, w: &Matrix, bias: Option<&DeviceBuffer>, out: &Tensor) -> Result<()> {
        self.linear.product(rows(x)?, stored(w), vector(bias)?, rows(out)?)
    }

    fn linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        bias: Option<&DeviceBuffer>,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        if self.linear.gates(stored(w)) {
            return self.linear.gated(rows(x)?, stored(w), vector(bias)?, rows(out)?);
        }
        self.linear(x, w, bias, gate_up)?;
        self.silu_mul(gate_up, out)
    }

    fn silu_mul(&self, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        self.activation.silu_mul(rows(gate_up)?, rows(out)?)
    }

    fn gelu(&self, x: &Tensor) -> Result<()> {
        self.activation.gelu(rows(x)?)
    }

    fn rms_norm(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()> {
        self.norms.rms_norm(rows(x)?, pointer(weight.tensor())?, eps, rows(out)?)
    }

    fn add_rms_norm(
        &self,
        residual: &Tensor,
        x: &Tensor,
        bias: Option<&DeviceBuffer>,
        weight: &DeviceBuffer,
        eps: f32,
        out: &Tensor,
    ) -> Result<()> {
        let (residual, x, out) = (rows(residual)?, rows(x)?, rows(out)?);
        self.norms.add_rms_norm(residual, x, vector(bias)?, pointer(weight.tensor())?, eps, out)
    }

    fn rms_norm_heads(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32) -> Result<()> {
        self.norms.rms_norm_heads(rows(x)?, pointer(weight.tensor())?, weight.len(), eps)
    }

    fn layer_norm(&self, x: &Tensor, weight: &DeviceBuffer, bias: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()> {
        let (x, out) = (rows(x)?, rows(out)?);
        assert_eq!((weight.len(), bias.len()), (x.width, x.width), "lengths of weight and bias");
        self.norms.layer_norm(x, pointer(weight.tensor())?, pointer(bias.tensor())?, eps, out)
    }

    fn rope(&self, x: &Tensor, head_dim: usize, step: &Step<'_>, tables: &RotaryTables<'_>) -> Result<()> {
        self.rope.rotate(rows(x)?, head_dim, prepared(step), tables)
    }

    fn write_kv(&self, k: &Tensor, v: &Tensor, step: &Step<'_>, cache: &mut KvCache) -> Result<()> {
        self.attention.write_kv(rows(k)?, rows(v)?, prepared(step).slots(), blocks(cache))
    }

    fn copy_blocks(&self, cache: &mut KvCache, copies: &[BlockCopy]) -> Result<()> {
        self.attention.copy_blocks(&self.staging, blocks(cache), copies)
    }

    fn paged_attention(
        &self,
        q: &Tensor,
        shape: &AttentionShape,
        step: &Step<'_>,
        cache: &KvCache,
        out: &Tensor,
    ) -> Result<()> {
        self.graphs.reads(blocks(cache).layout);
        self.attention.attend(rows(q)?, shape, prepared(step), blocks(cache), rows(out)?)
    }

    fn select_logits_rows(&self, x: &Tensor, step: &Step<'_>, wanted: Range<usize>, out: &Tensor) -> Result<()> {
        let indices = prepared(step).logits_rows() + (wanted.start * size_of::<u32>()) as u64;
        self.rows.select(rows(x)?, indices, wanted.len(), rows(out)?)
    }

    fn sample<'a>(
        &'a self,
        logits: &Tensor,
        step: &'a Step<'_>,
        wanted: Range<usize>,
    ) -> Result<Deferred<'a, SampledTokens>> {
        let StepInput { logits: all, tasks, .. } = *step.input();
        self.sampler.sample(&self.pool, &self.staging, rows(logits)?, &all[wanted], tasks)
    }

    fn divergences<'a>(&'a self, logits: &Tensor, pairs: &[LogitsPair]) -> Result<Deferred<'a, Vec<Divergences>>> {
        self.sampler.divergences(&self.staging, rows(logits)?, pairs)
    }

    fn read_rows(&self, x: &Tensor, indices: &[u32]) -> Result<Vec<f32>> {
        self.rows.read(rows(x)?, indices)
    }

    fn write_rows(&self, values: &[f32], out: &Tensor) -> Result<()> {
        self.rows.write(&self.staging, values, rows(out)?)
    }

    fn select_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        self.rows.select_listed(&self.staging, rows(x)?, indices, rows(out)?)
    }

    fn put_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        self.rows.put_listed(&self.staging, rows(x)?, indices, rows(out)?)
    }

    fn add_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        self.rows.add_listed(&self.staging, rows(x)?, indices, rows(out)?)
    }

    fn add(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        self.rows.add(rows(x)?, rows(out)?)
    }

    fn add_scaled(&self, x: &Tensor, scale: &DeviceBuffer, out: &Tensor) -> Result<()> {
        let out = rows(out)?;
        assert_eq!(scale.len(), out.width, "length of the scale");
        self.rows.add_scaled(rows(x)?, pointer(scale.tensor())?, out)
    }

    fn route(
        &self,
        x: &Tensor,
        router: &Router<'_>,
        forced: Option<&[u16]>,
        logits: &Tensor,
        routing: &mut Routing,
    ) -> Result<()> {
        let bias = match router.scoring {
            Scoring::Softmax => 0,
            Scoring::Sigmoid { bias } => {
                assert_eq!(bias.len(), router.gate.n(), "length of the bias");
                pointer(bias.tensor())?
            }
        };
        let Router { gate, normalise, scale, layer, .. } = *router;
        let router = DeviceRouter { gate: stored(gate), bias, normalise, scale, layer };
        self.experts.route(&self.staging, rows(x)?, &router, forced, rows(logits)?, routing)
    }

    fn kept_experts<'a>(&'a self, routing: &'a Routing, rows: usize) -> Result<Deferred<'a, Vec<u16>>> {
        self.experts.kept(routing, rows)
    }

    fn group_by_expert(&self, routing: &mut Routing) -> Result<()> {
        self.experts.group(routing)
    }

    fn expert_linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        routing: &Routing,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        if self.linear.gates(stored(w)) {
            return self.linear.gated_of_experts(rows(x)?, stored(w), routing, rows(out)?);
        }
        self.linear.of_experts_by_row(rows(x)?, stored(w), routing, rows(gate_up)?)?;
        let pairs = routing.shape().most_pairs(routing.grouped().len());
        self.activation.silu_mul(rows(gate_up)?.first(pairs), rows(out)?.first(pairs))
    }

    fn expert_linear(&self, x: &Tensor, w: &Matrix, routing: &Routing, out: &Tensor) -> Result<()> {
        self.linear.of_experts(rows(x)?, stored(w), routing, rows(out)?)
    }

    fn combine(&self, expert_out: &Tensor, routing: &Routing, out: &Tensor) -> Result<()> {
        self.experts.combine(rows(expert_out)?, routing, rows(out)?)
    }

    fn add_gated(&self, gates: &Tensor, shared: &Tensor, out: &Tensor) -> Result<()> {
        self.experts.add_gated(rows(gates)?, rows(shared)?, rows(out)?)
    }

    fn store_rows(&self, w: &mut Matrix, rows: Range<usize>, read: &ReadRows<'_>) -> Result<()> {
        self.packer.store_rows(self.host(), stored_mut(w), rows, read)
    }

    fn copy_rows(&self, from: &Matrix, rows: Range<usize>, to: &mut Matrix) -> Result<()> {
        self.packer.copy_rows(stored(from), rows, stored_mut(to), 0)
    }

    fn merge_rows(&self, w: &mut Matrix, first_row: usize, merge: &Merge<'_>) -> Result<()> {
        self.merger.merge_rows(&self.packer, self.host(), stored_mut(w), first_row, merge)
    }

    fn write_elements(&self, w: &mut Matrix, rows: Range<usize>, write: &WriteElements<'_>) -> Result<()> {
        self.packer.write_elements(self.host(), stored_mut(w), rows, write)
    }

    fn unpack(&self, w: &Matrix, out: &Tensor) -> Result<()> {
        self.packer.unpack(stored(w), pointer(out)?)
    }

    fn run_on_host(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pool.run(tasks, task);
    }

    fn release(&self) {
        self.graphs.clear();
        self.padded_step.release();
        self.linear.release();
        self.attention.release();
        self.experts.release();
        self.rows.release();
        self.sampler.release();
        self.staging.release();
    }
}
