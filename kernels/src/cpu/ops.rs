//! The operators of a rank on the CPU: applies the operators over slices to tensors.

use std::any::Any;
use std::ops::Range;

use candle_core::{Result, Tensor};

use super::adapters::AdapterThreads;
use super::kv::KvBlocks;
use super::logits::divergences;
use super::packed::PackedMatrix;
use super::pool::Cpu;
use super::rows::{Rows, RowsMut, SelectedRows};
use super::sampling::{LogitsTasks, Samplers};
use super::{experts, linear, merge};
use crate::adapter::AdapterRows;
use crate::backend::operators::OpsImpl;
use crate::buffer::DeviceBuffer;
use crate::deferred::Deferred;
use crate::divergence::{Divergences, LogitsPair};
use crate::error::DeviceError;
use crate::host::{HostRouter, HostRouting, keep_experts, kept_experts};
use crate::kv_cache::KvCache;
use crate::kv_layout::BlockCopy;
use crate::matrix::Matrix;
use crate::merge::Merge;
use crate::patches::Patches;
use crate::rotary::RotaryTables;
use crate::routing::{Router, Routing, Scoring};
use crate::sampling::SampledTokens;
use crate::step::{AttentionShape, Step, StepInput};
use crate::tensor::{read_rows, rows, rows_mut, with_f32, with_f32_mut, write_rows};
use crate::weights::{ReadRows, WriteElements};

/// The thread pool of a rank, with the memory that operators reuse.
pub(crate) struct CpuOps {
    cpu: Cpu,
    samplers: Samplers,
    adapters: AdapterThreads,
}

/// The part of a step that is prepared for the operators on the CPU; they read the rest from [`StepInput`].
struct CpuStep {
    /// The rows whose logits are wanted.
    logits_rows: Vec<u32>,
}

impl CpuOps {
    pub fn new(cpu: Cpu) -> Self {
        Self { samplers: Samplers::new(cpu.isa()), adapters: AdapterThreads::new(), cpu }
    }
}

fn packed(w: &Matrix) -> &PackedMatrix {
    w.storage()
}

fn packed_mut(w: &mut Matrix) -> &mut PackedMatrix {
    w.storage_mut()
}

fn blocks(cache: &KvCache) -> &KvBlocks {
    cache.storage()
}

fn blocks_mut(cache: &mut KvCache) -> &mut KvBlocks {
    cache.storage_mut()
}

/// Refuses experts whose `n` rows of a matrix do not fill whole panels.
fn check_panels(n: usize) -> Result<()> {
    if n.is_multiple_of(super::PANEL) {
        return Ok(());
    }
    let panel = super::PANEL;
    Err(DeviceError::Unsupported(format!("experts of {n} outputs: the CPU takes multiples of {panel}")).into())
}

/// `out += x`.
fn add(out: &mut [f32], x: &[f32]) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out += x);
}

/// Calls `write` with row `indices[i]` of `out` and row `i` of `x`, for each index.
fn scatter(x: &Tensor, indices: &[u32], out: &Tensor, write: impl Fn(&mut [f32], &[f32])) -> Result<()> {
    rows(x, |x| {
        rows_mut(out, |mut out: RowsMut<'_>| {
            for (i, &index) in indices.iter().enumerate() {
                write(out.row_mut(index as usize), x.row(i));
            }
        })
    })?
}

fn with_optional<R>(buffer: Option<&DeviceBuffer>, f: impl FnOnce(Option<&[f32]>) -> R) -> Result<R> {
    match buffer {
        Some(buffer) => with_f32(buffer.tensor(), |values| f(Some(values))),
        None => Ok(f(None)),
    }
}

impl OpsImpl for CpuOps {
    fn prepare(&self, input: &StepInput<'_>) -> Result<Box<dyn Any>> {
        Ok(Box::new(CpuStep { logits_rows: input.logits.iter().map(|wanted| wanted.row).collect() }))
    }

    fn patches(&self, patches: &Patches<'_>, out: &Tensor) -> Result<()> {
        rows_mut(out, |out| super::patches(&self.cpu, patches, out))
    }

    fn embed(&self, table: &Matrix, first_token: usize, step: &Step<'_>, out: &Tensor) -> Result<()> {
        rows_mut(out, |out| super::gather_rows(&self.cpu, packed(table), step.input().tokens, first_token, out))
    }

    fn linear(&self, x: &Tensor, w: &Matrix, bias: Option<&DeviceBuffer>, out: &Tensor) -> Result<()> {
        let product = |bias: Option<&[f32]>| {
            rows(x, |x| rows_mut(out, |out| linear::linear(&self.cpu, x, packed(w), bias, out)))?
        };
        with_optional(bias, product)?
    }

    fn linear_silu_mul(
        &self,
        x: &Tensor,
        w: &Matrix,
        bias: Option<&DeviceBuffer>,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        if !w.n().is_multiple_of(2 * super::PANEL) {
            self.linear(x, w, bias, gate_up)?;
            return self.silu_mul(gate_up, out);
        }
        let product = |bias: Option<&[f32]>| {
            rows(x, |x| rows_mut(out, |out| linear::linear_silu_mul(&self.cpu, x, packed(w), bias, out)))?
        };
        with_optional(bias, product)?
    }

    fn silu_mul(&self, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        rows(gate_up, |gate_up| rows_mut(out, |out| super::silu_mul(&self.cpu, gate_up, out)))?
    }

    fn gelu(&self, x: &Tensor) -> Result<()> {
        rows_mut(x, |x| super::gelu(&self.cpu, x))
    }

    fn rms_norm(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()> {
        with_f32(weight.tensor(), |w| rows(x, |x| rows_mut(out, |out| super::rms_norm(&self.cpu, x, w, eps, out)))?)?
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
        let norm = |weight: &[f32], bias: Option<&[f32]>| {
            rows(x, |x| {
                rows_mut(residual, |residual| {
                    rows_mut(out, |out| super::add_rms_norm(&self.cpu, residual, x, bias, weight, eps, out))
                })?
            })?
        };
        with_f32(weight.tensor(), |weight| with_optional(bias, |bias| norm(weight, bias))?)?
    }

    fn rms_norm_heads(&self, x: &Tensor, weight: &DeviceBuffer, eps: f32) -> Result<()> {
        with_f32(weight.tensor(), |w| rows_mut(x, |x| super::head_rms_norm(&self.cpu, x, w, eps)))?
    }

    fn layer_norm(&self, x: &Tensor, weight: &DeviceBuffer, bias: &DeviceBuffer, eps: f32, out: &Tensor) -> Result<()> {
        let norm = |weight: &[f32], bias: &[f32]| {
            rows(x, |x| rows_mut(out, |out| super::layer_norm(&self.cpu, x, weight, bias, eps, out)))?
        };
        with_f32(weight.tensor(), |weight| with_f32(bias.tensor(), |bias| norm(weight, bias))?)?
    }

    fn rope(&self, x: &Tensor, head_dim: usize, step: &Step<'_>, tables: &RotaryTables<'_>) -> Result<()> {
        let RotaryTables { rotary_dim, cos, sin, axis_of } = *tables;
        let positions = step.input().rotary_positions(axis_of);
        with_f32(cos.tensor(), |cos| {
            with_f32(sin.tensor(), |sin| {
                rows_mut(x, |x| super::rope(&self.cpu, x, head_dim, rotary_dim, positions, cos, sin))
            })?
        })?
    }

    fn write_kv(&self, k: &Tensor, v: &Tensor, step: &Step<'_>, cache: &mut KvCache) -> Result<()> {
        rows(k, |k| rows(v, |v| blocks_mut(cache).write(&self.cpu, k, v, step.input().slots)))?
    }

    fn copy_blocks(&self, cache: &mut KvCache, copies: &[BlockCopy]) -> Result<()> {
        blocks_mut(cache).copy_blocks(copies);
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
        let (sequences, cache) = (step.input().sequences, blocks(cache));
        rows(q, |q| rows_mut(out, |out| super::paged_attention(&self.cpu, q, shape, sequences, cache, out)))?
    }

    fn select_logits_rows(&self, x: &Tensor, step: &Step<'_>, rows: Range<usize>, out: &Tensor) -> Result<()> {
        self.select_rows(x, &step.prepared::<CpuStep>().logits_rows[rows], out)
    }

    fn sample<'a>(
        &'a self,
        logits: &Tensor,
        step: &'a Step<'_>,
        rows: Range<usize>,
    ) -> Result<Deferred<'a, SampledTokens>> {
        let (vocab, input) = (logits.dim(1)?, step.input());
        let tasks = input.logits[rows].iter().map(|wanted| &input.tasks[wanted.tasks.clone()]);
        let sampled = with_f32(logits, |logits| {
            let questions: Vec<LogitsTasks<'_>> = logits.chunks_exact(vocab).zip(tasks).collect();
            self.samplers.answer(self.cpu.pool(), &questions)
        })?;
        Ok(Deferred::ready(sampled))
    }

    fn divergences<'a>(&'a self, logits: &Tensor, pairs: &[LogitsPair]) -> Result<Deferred<'a, Vec<Divergences>>> {
        let vocab = logits.dim(1)?;
        let mut found = vec![Divergences::NONE; pairs.len()];
        with_f32(logits, |logits| {
            let row = |row: usize| &logits[row * vocab..(row + 1) * vocab];
            let isa = self.cpu.isa();
            self.cpu.pool().run_chunks(&mut found, 1, |i, found| {
                let pair = &pairs[i];
                found[0] = divergences(isa, row(pair.policy), row(pair.reference), pair.scale());
            });
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
                for (i, &index) in indices.iter().enumerate() {
                    out.row_mut(i).copy_from_slice(x.row(index as usize));
                }
            })
        })?
    }

    fn put_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        scatter(x, indices, out, <[f32]>::copy_from_slice)
    }

    fn add_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        scatter(x, indices, out, add)
    }

    fn add(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        let count = out.dim(0)?;
        rows(x, |x| {
            rows_mut(out, |mut out| {
                for i in 0..count {
                    add(out.row_mut(i), x.row(i));
                }
            })
        })?
    }

    fn add_adapters(
        &self,
        x: &Tensor,
        groups: &[AdapterRows<'_>],
        [selected, ranks, products]: [&Tensor; 3],
        out: &Tensor,
    ) -> Result<bool> {
        let add = |x: Rows<'_>, scratch: [&mut [f32]; 3], out: RowsMut<'_>| {
            self.adapters.add(&self.cpu, x, groups, scratch, out)
        };
        rows(x, |x| {
            rows_mut(out, |out| {
                with_f32_mut(selected, |selected| {
                    with_f32_mut(ranks, |ranks| {
                        with_f32_mut(products, |products| add(x, [selected, ranks, products], out))
                    })
                })
            })
        })????
    }

    fn add_scaled(&self, x: &Tensor, scale: &DeviceBuffer, out: &Tensor) -> Result<()> {
        with_f32(scale.tensor(), |scale| {
            rows(x, |x| rows_mut(out, |out| super::add_scaled(&self.cpu, x, scale, out)))?
        })?
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
            Scoring::Softmax => None,
            Scoring::Sigmoid { bias } => Some(bias),
        };
        let Router { gate, normalise, scale, layer, .. } = *router;
        let top_k = routing.shape().top_k;
        let route = |bias: Option<&[f32]>| {
            let (router, routing) = (HostRouter { top_k, bias, normalise, scale }, routing.storage_mut());
            rows(x, |x| {
                rows_mut(logits, |out| experts::route(&self.cpu, x, packed(gate), &router, forced, out, routing))
            })?
        };
        with_optional(bias, route)??;
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
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let (is_fused, host) = (out.dim(1)?.is_multiple_of(super::PANEL), routing.storage::<HostRouting>());
        check_panels(2 * out.dim(1)?)?;
        rows(x, |x| {
            let x = SelectedRows::of(x, host.pairs());
            if is_fused {
                return rows_mut(out, |out| {
                    linear::grouped_linear_silu_mul(&self.cpu, x, packed(w), &host.starts, out)
                });
            }
            rows_mut(gate_up, |out| linear::grouped_linear(&self.cpu, x, packed(w), &host.starts, out))?;
            let pairs = host.pairs().len();
            self.silu_mul(&gate_up.narrow(0, 0, pairs)?, &out.narrow(0, 0, pairs)?)
        })?
    }

    fn expert_linear(&self, x: &Tensor, w: &Matrix, routing: &Routing, out: &Tensor) -> Result<()> {
        check_panels(out.dim(1)?)?;
        let starts = &routing.storage::<HostRouting>().starts;
        rows(x, |x| {
            let x = SelectedRows::all(x);
            rows_mut(out, |out| linear::grouped_linear(&self.cpu, x, packed(w), starts, out))
        })?
    }

    fn combine(&self, expert_out: &Tensor, routing: &Routing, out: &Tensor) -> Result<()> {
        let (shape, grouped) = (routing.shape(), routing.grouped());
        rows(expert_out, |expert_out| {
            rows_mut(out, |out| experts::combine(&self.cpu, expert_out, routing.storage(), shape, grouped, out))
        })?
    }

    fn add_gated(&self, gates: &Tensor, shared: &Tensor, out: &Tensor) -> Result<()> {
        rows(gates, |gates| {
            rows(shared, |shared| rows_mut(out, |out| experts::add_gated(&self.cpu, gates, shared, out)))?
        })?
    }

    fn store_rows(&self, w: &mut Matrix, rows: Range<usize>, read: &ReadRows<'_>) -> Result<()> {
        packed_mut(w).store_rows(self.cpu.pool(), rows, read);
        Ok(())
    }

    fn copy_rows(&self, from: &Matrix, rows: Range<usize>, to: &mut Matrix) -> Result<()> {
        let (from, first) = (packed(from), rows.start);
        packed_mut(to).fill_rows(self.cpu.pool(), 0..rows.len(), &|rows, values| {
            from.read_f32(first + rows.start, values);
        });
        Ok(())
    }

    fn merge_rows(&self, w: &mut Matrix, first_row: usize, merge: &Merge<'_>) -> Result<()> {
        merge::merge_rows(&self.cpu, packed_mut(w), first_row, merge)
    }

    fn write_elements(&self, w: &mut Matrix, rows: Range<usize>, write: &WriteElements<'_>) -> Result<()> {
        packed_mut(w).write_elements(self.cpu.pool(), rows, write);
        Ok(())
    }

    fn unpack(&self, w: &Matrix, out: &Tensor) -> Result<()> {
        with_f32_mut(out, |values| packed(w).read_f32(0, values))
    }

    fn run_on_host(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.cpu.pool().run(tasks, task);
    }

    fn release(&self) {
        self.cpu.release();
        self.samplers.release();
        self.adapters.release();
    }
}
