//! The definitions applied to tensors and storage.

use std::any::Any;
use std::ops::Range;

use candle_core::{Result, Tensor};
use half::{bf16, f16};

use super::sampling::{answer, divergences};
use super::storage::{RowMajor, Slots};
use super::{experts, operators};
use crate::backend::operators::OpsImpl;
use crate::backend::storage::MatrixImpl;
use crate::buffer::DeviceBuffer;
use crate::deferred::Deferred;
use crate::divergence::{Divergences, LogitsPair};
use crate::host::{HostRouter, HostRouting, keep_experts, kept_experts};
use crate::kv_cache::KvCache;
use crate::kv_layout::BlockCopy;
use crate::matrix::Matrix;
use crate::merge::Merge;
use crate::merge::{LoraDelta, LowRank, MergeBase, WeightChange};
use crate::patches::Patches;
use crate::rotary::RotaryTables;
use crate::routing::{Router, Routing, Scoring};
use crate::sampling::SampledTokens;
use crate::step::{AttentionShape, Step, StepInput};
use crate::tensor::{read_rows, rows, rows_mut, with_f32, with_f32_mut, write_rows};
use crate::values::Dtype;
use crate::weights::{ReadRows, WriteElements};

/// All operators, without any state.
pub(super) struct ReferenceOps;

fn values(buffer: &DeviceBuffer) -> Result<Vec<f32>> {
    buffer.read(0..buffer.len())
}

impl OpsImpl for ReferenceOps {
    fn prepare(&self, _: &StepInput<'_>) -> Result<Box<dyn Any>> {
        Ok(Box::new(()))
    }

    fn patches(&self, patches: &Patches<'_>, out: &Tensor) -> Result<()> {
        rows_mut(out, |out| operators::patches(patches, out))
    }

    fn embed(&self, table: &Matrix, first_token: usize, step: &Step<'_>, out: &Tensor) -> Result<()> {
        let rows: &RowMajor = table.storage();
        rows_mut(out, |mut out| {
            for (i, token) in step.input().tokens.iter().enumerate() {
                match (*token as usize).checked_sub(first_token) {
                    Some(row) if row < table.n() => out.row_mut(i).copy_from_slice(rows.row(row)),
                    _ => out.row_mut(i).fill(0.0),
                }
            }
        })
    }

    fn linear(&self, x: &Tensor, w: &Matrix, bias: Option<&DeviceBuffer>, out: &Tensor) -> Result<()> {
        let bias = bias.map(values).transpose()?;
        rows(x, |x| rows_mut(out, |out| operators::linear(x, w.storage(), bias.as_deref(), out)))?
    }

    fn linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        bias: Option<&DeviceBuffer>,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        self.linear(x, w, bias, gate_up)?;
        self.silu_mul(gate_up, out)
    }

    fn silu_mul(&self, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        rows(gate_up, |gate_up| rows_mut(out, |out| operators::silu_mul(gate_up, out)))?
    }

    fn gelu(&self, x: &Tensor) -> Result<()> {
        rows_mut(x, operators::gelu)
    }

    fn rms_norm(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()> {
        let weight = values(weight)?;
        rows(x, |x| rows_mut(out, |out| operators::rms_norm(x, &weight, eps, out)))?
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
        let (bias, weight) = (bias.map(values).transpose()?, values(weight)?);
        rows(x, |x| {
            rows_mut(residual, |residual| {
                rows_mut(out, |out| operators::add_rms_norm(residual, x, bias.as_deref(), &weight, eps, out))
            })?
        })?
    }

    fn rms_norm_heads(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32) -> Result<()> {
        let weight = values(weight)?;
        rows_mut(x, |x| operators::head_rms_norm(x, &weight, eps))
    }

    fn layer_norm(&self, x: &Tensor, weight: &DeviceBuffer, bias: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()> {
        let (weight, bias) = (values(weight)?, values(bias)?);
        rows(x, |x| rows_mut(out, |out| operators::layer_norm(x, &weight, &bias, eps, out)))?
    }

    fn rope(&self, x: &Tensor, head_dim: usize, step: &Step<'_>, tables: &RotaryTables<'_>) -> Result<()> {
        let RotaryTables { rotary_dim, axis_of, .. } = *tables;
        let (cos, sin) = (values(tables.cos)?, values(tables.sin)?);
        let positions = step.input().rotary_positions(axis_of);
        rows_mut(x, |x| operators::rope(x, head_dim, rotary_dim, positions, &cos, &sin))
    }

    fn write_kv(&self, k: &Tensor, v: &Tensor, step: &Step<'_>, cache: &mut KvCache) -> Result<()> {
        let cache: &mut Slots = cache.storage_mut();
        rows(k, |k| rows(v, |v| cache.write(k, v, step.input().slots)))?
    }

    fn copy_blocks(&self, cache: &mut KvCache, copies: &[BlockCopy]) -> Result<()> {
        let cache: &mut Slots = cache.storage_mut();
        copies.iter().for_each(|copy| cache.copy(*copy));
        Ok(())
    }

    fn paged_attention(
        &self,
        q: &Tensor,
        shape: &AttentionShape,
        step: &Step<'_>,
        cache: &KvCache,
        out: &Tensor,
    ) -> Result<()> {
        let sequences = step.input().sequences;
        rows(q, |q| rows_mut(out, |out| operators::attention(q, shape, sequences, cache.storage(), out)))?
    }

    fn select_logits_rows(&self, x: &Tensor, step: &Step<'_>, rows: Range<usize>, out: &Tensor) -> Result<()> {
        let rows: Vec<u32> = step.input().logits[rows].iter().map(|wanted| wanted.row).collect();
        self.select_rows(x, &rows, out)
    }

    fn sample<'a>(
        &'a self,
        logits: &Tensor,
        step: &'a Step<'_>,
        wanted: Range<usize>,
    ) -> Result<Deferred<'a, SampledTokens>> {
        let StepInput { logits: all, tasks, .. } = *step.input();
        let tokens = rows(logits, |logits| {
            let answers = |(i, wanted): (usize, usize)| {
                let row = logits.row(i);
                tasks[all[wanted].tasks.clone()].iter().map(move |task| answer(row, task))
            };
            wanted.enumerate().flat_map(answers).collect()
        })?;
        Ok(Deferred::ready(SampledTokens { tokens, failed: Vec::new() }))
    }

    fn divergences<'a>(&'a self, logits: &Tensor, pairs: &[LogitsPair]) -> Result<Deferred<'a, Vec<Divergences>>> {
        let found = rows(logits, |logits| {
            let of = |pair: &LogitsPair| divergences(logits.row(pair.policy), logits.row(pair.reference), pair);
            pairs.iter().map(of).collect()
        })?;
        Ok(Deferred::ready(found))
    }

    fn read_rows(&self, x: &Tensor, indices: &[u32]) -> Result<Vec<f32>> {
        read_rows(x, indices)
    }

    fn write_rows(&self, values: &[f32], out: &Tensor) -> Result<()> {
        write_rows(values, out)
    }

    fn select_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        rows(x, |x| {
            rows_mut(out, |mut out| {
                let rows = indices.iter().enumerate();
                rows.for_each(|(i, index)| out.row_mut(i).copy_from_slice(x.row(*index as usize)));
            })
        })?
    }

    fn put_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        rows(x, |x| {
            rows_mut(out, |mut out| {
                let rows = indices.iter().enumerate();
                rows.for_each(|(i, index)| out.row_mut(*index as usize).copy_from_slice(x.row(i)));
            })
        })?
    }

    fn add_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        rows(x, |x| {
            rows_mut(out, |mut out| {
                for (i, index) in indices.iter().enumerate() {
                    out.row_mut(*index as usize).iter_mut().zip(x.row(i)).for_each(|(out, x)| *out += x);
                }
            })
        })?
    }

    fn add(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        let count = out.dim(0)?;
        rows(x, |x| {
            rows_mut(out, |mut out| {
                (0..count).for_each(|i| out.row_mut(i).iter_mut().zip(x.row(i)).for_each(|(out, x)| *out += x));
            })
        })?
    }

    fn add_scaled(&self, x: &Tensor, scale: &DeviceBuffer, out: &Tensor) -> Result<()> {
        let scale = values(scale)?;
        rows(x, |x| rows_mut(out, |out| operators::add_scaled(x, &scale, out)))?
    }

    fn route(
        &self,
        x: &Tensor,
        router: &Router<'_>,
        forced: Option<&[u16]>,
        _: &Tensor,
        routing: &mut Routing,
    ) -> Result<()> {
        let bias = match router.scoring {
            Scoring::Softmax => None,
            Scoring::Sigmoid { bias } => Some(values(bias)?),
        };
        let Router { normalise, scale, layer, .. } = *router;
        let host = HostRouter { top_k: routing.shape().top_k, bias: bias.as_deref(), normalise, scale };
        rows(x, |x| experts::route(x, router.gate.storage(), &host, forced, routing.storage_mut()))?;
        keep_experts(routing, layer);
        Ok(())
    }

    fn kept_experts<'a>(&'a self, routing: &'a Routing, rows: usize) -> Result<Deferred<'a, Vec<u16>>> {
        Ok(kept_experts(routing, rows))
    }

    fn group_by_expert(&self, routing: &mut Routing) -> Result<()> {
        let (shape, rows) = (routing.shape().clone(), routing.grouped());
        routing.storage_mut::<HostRouting>().group(&shape, rows);
        Ok(())
    }

    fn expert_linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        routing: &Routing,
        _: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        rows(x, |x| rows_mut(out, |out| experts::expert_linear_silu_mul(x, w.storage(), routing.storage(), out)))?
    }

    fn expert_linear(&self, x: &Tensor, w: &Matrix, routing: &Routing, out: &Tensor) -> Result<()> {
        let starts = &routing.storage::<HostRouting>().starts;
        rows(x, |x| rows_mut(out, |out| experts::expert_linear(x, |pair| pair, w.storage(), starts, out)))?
    }

    fn combine(&self, expert_out: &Tensor, routing: &Routing, out: &Tensor) -> Result<()> {
        let (shape, grouped) = (routing.shape(), routing.grouped());
        rows(expert_out, |expert_out| {
            rows_mut(out, |out| experts::combine(expert_out, routing.storage(), shape, grouped, out))
        })?
    }

    fn add_gated(&self, gates: &Tensor, shared: &Tensor, out: &Tensor) -> Result<()> {
        rows(gates, |gates| rows(shared, |shared| rows_mut(out, |out| experts::add_gated(gates, shared, out)))?)?
    }

    fn store_rows(&self, w: &mut Matrix, rows: Range<usize>, read: &ReadRows<'_>) -> Result<()> {
        let (first, width) = (rows.start, w.k());
        let stored: &mut RowMajor = w.storage_mut();
        read(rows, &mut |values| stored.write_columns(first, values, width, 0));
        Ok(())
    }

    fn copy_rows(&self, from: &Matrix, rows: Range<usize>, to: &mut Matrix) -> Result<()> {
        let (from, to): (&RowMajor, &mut RowMajor) = (from.storage(), to.storage_mut());
        for (i, row) in rows.enumerate() {
            from.row(row).iter().enumerate().for_each(|(column, value)| to.set(i, column, *value));
        }
        Ok(())
    }

    fn merge_rows(&self, w: &mut Matrix, first_row: usize, merge: &Merge<'_>) -> Result<()> {
        let has_whole_rows = merge.goes_by_whole_rows() || matches!(merge.base, MergeBase::WholeRows(_));
        let columns = if has_whole_rows { 0..merge.width } else { merge.columns.clone() };
        let mut merged = vec![0.0; merge.rows.len() * columns.len()];
        match &merge.base {
            MergeBase::Read(read) => read(merge.rows.clone(), columns.clone(), &mut merged),
            MergeBase::Matrix(base) => base.read_f32(0, &mut merged),
            MergeBase::WholeRows(base) => {
                let len = merged.len();
                with_f32(base, |base| merged.copy_from_slice(&base[..len]))?;
            }
        }
        let stored: &mut RowMajor = w.storage_mut();
        for (i, values) in merged.chunks_exact_mut(columns.len()).enumerate() {
            apply(merge.change, merge.rows.start + i, columns.start, values);
            for (to, column) in merge.columns.clone().enumerate() {
                stored.set(first_row + i, to, values[column - columns.start]);
            }
        }
        Ok(())
    }

    fn write_elements(&self, w: &mut Matrix, rows: Range<usize>, write: &WriteElements<'_>) -> Result<()> {
        let stored: &mut RowMajor = w.storage_mut();
        write(rows, &mut |row, column, value| stored.set(row, column, value));
        Ok(())
    }

    fn unpack(&self, w: &Matrix, out: &Tensor) -> Result<()> {
        let stored: &RowMajor = w.storage();
        with_f32_mut(out, |values| stored.read_f32(0, values))
    }

    fn run_on_host(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }

    fn release(&self) {}
}

/// Applies a change to the values of a row from column `first` on.
fn apply(change: &WeightChange, row: usize, first: usize, values: &mut [f32]) {
    if let Some(replacement) = &change.replacement {
        replacement.values.read_f32(row * replacement.cols + first, values);
    }
    match &change.delta {
        None => {}
        Some(LoraDelta::Bias(bias)) => values.iter_mut().for_each(|value| *value += bias[row]),
        Some(LoraDelta::LowRank(low_rank)) => add_low_rank(low_rank, row, first, values),
    }
}

fn add_low_rank(change: &LowRank, row: usize, first: usize, values: &mut [f32]) {
    let LowRank { rank, cols, a, b, product, scaling, roundings, magnitude, .. } = change;
    let (a, b) = (a.part_f32(0..a.len()), b.part_f32(row * rank..(row + 1) * rank));
    for (i, value) in values.iter_mut().enumerate() {
        let sum: f64 = b.iter().enumerate().map(|(k, b)| f64::from(*b) * f64::from(a[k * cols + first + i])).sum();
        let delta = match product {
            Dtype::F32 => (f64::from(*scaling) * sum) as f32,
            _ => scaling * rounded(sum as f32, *product),
        };
        *value += roundings.iter().fold(delta, |delta, dtype| rounded(delta, *dtype));
    }
    if let Some(magnitude) = magnitude {
        values.iter_mut().for_each(|value| *value = rounded(*value, magnitude.sum));
        let norm = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        let factor = rounded(magnitude.lengths[row] / rounded(norm as f32, magnitude.sum), magnitude.factor);
        values.iter_mut().for_each(|value| *value *= factor);
    }
}

/// To the nearest of this type, ties to even.
fn rounded(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
    }
}
