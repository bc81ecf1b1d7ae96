//! The operators over candle tensors: what the model is written in. Activations are float32 tensors made once and
//! written in place, so that a step allocates nothing and addresses stay stable.

use std::ops::Range;

use candle_core::{Result, Tensor};
use tracing::{Span, trace_span};

use crate::cpu::{
    self, AttentionSequence, AttentionShape, BlockCopy, Cpu, Fill, Isa, KvCache, PackedMatrix, ReadRows, WriteElements,
};
use crate::tensor::{rows, rows_mut, with_f32};

/// Where the operators of one rank run. Each that a step uses is a trace-level span, which costs the comparison of two
/// levels while nobody listens.
pub struct Ops {
    cpu: Cpu,
}

impl Ops {
    /// On `threads >= 1` threads of the CPU, with one of its instruction sets.
    pub fn cpu(threads: usize, isa: Isa) -> Self {
        Self { cpu: Cpu::with_isa(threads, isa) }
    }

    pub fn isa(&self) -> Isa {
        self.cpu.isa()
    }

    pub fn threads(&self) -> usize {
        self.cpu.pool().threads()
    }

    /// Calls `f` with each item, on all threads.
    pub fn for_each<T: Send>(&self, items: &mut [T], f: impl Fn(&mut T) + Sync) {
        self.cpu.pool().run_chunks(items, 1, |_, item| f(&mut item[0]));
    }

    /// `out[i]` = row `tokens[i] - first_token` of `table`, or zeros if the table has no such row.
    pub fn gather_rows(&self, table: &PackedMatrix, tokens: &[u32], first_token: usize, out: &Tensor) -> Result<()> {
        let _span = trace_span!("gather_rows").entered();
        rows_mut(out, |out| cpu::gather_rows(&self.cpu, table, tokens, first_token, out))
    }

    /// `out[i] = x[indices[i]]`.
    pub fn select_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        let _span = trace_span!("select_rows").entered();
        rows(x, |x| {
            rows_mut(out, |mut out| {
                for (i, &index) in indices.iter().enumerate() {
                    out.row_mut(i).copy_from_slice(x.row(index as usize));
                }
            })
        })?
    }

    /// `out[indices[i]] += x[i]`.
    pub fn add_rows(&self, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
        let _span = trace_span!("add_rows").entered();
        rows(x, |x| {
            rows_mut(out, |mut out| {
                for (i, &index) in indices.iter().enumerate() {
                    out.row_mut(index as usize).iter_mut().zip(x.row(i)).for_each(|(out, x)| *out += x);
                }
            })
        })?
    }

    /// `out = x wᵀ + bias`.
    pub fn linear(&self, x: &Tensor, w: &PackedMatrix, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
        let _span = linear_span(x, w).entered();
        rows(x, |x| with_optional(bias, |bias| rows_mut(out, |out| cpu::linear(&self.cpu, x, w, bias, out))))??
    }

    /// `out = x / rms(x) * weight` by row.
    pub fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &Tensor) -> Result<()> {
        let _span = trace_span!("rms_norm").entered();
        rows(x, |x| with_f32(weight, |w| rows_mut(out, |out| cpu::rms_norm(&self.cpu, x, w, eps, out))))??
    }

    /// `residual += x (+ bias)`, then `out = rms_norm(residual)`.
    pub fn add_rms_norm(
        &self,
        residual: &Tensor,
        x: &Tensor,
        bias: Option<&Tensor>,
        weight: &Tensor,
        eps: f32,
        out: &Tensor,
    ) -> Result<()> {
        let _span = trace_span!("add_rms_norm").entered();
        let norm = |bias: Option<&[f32]>| {
            rows(x, |x| {
                with_f32(weight, |w| {
                    rows_mut(residual, |residual| {
                        rows_mut(out, |out| cpu::add_rms_norm(&self.cpu, residual, x, bias, w, eps, out))
                    })
                })
            })
        };
        with_optional(bias, norm)????
    }

    /// Normalises each head of `x` (`[rows, heads * weight.len()]`) in place.
    pub fn rms_norm_heads(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<()> {
        let _span = trace_span!("rms_norm_heads").entered();
        with_f32(weight, |w| rows_mut(x, |x| cpu::head_rms_norm(&self.cpu, x, w, eps)))?
    }

    /// Rotates each head of `x` (`[rows, heads * head_dim]`) in place; `cos` and `sin` are `[positions, head_dim / 2]`.
    pub fn rope(&self, x: &Tensor, head_dim: usize, positions: &[u32], cos: &Tensor, sin: &Tensor) -> Result<()> {
        let _span = trace_span!("rope").entered();
        with_f32(cos, |cos| {
            with_f32(sin, |sin| rows_mut(x, |x| cpu::rope(&self.cpu, x, head_dim, positions, cos, sin)))
        })??
    }

    /// `out = silu(left half of gate_up) * right half`.
    pub fn silu_mul(&self, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        let _span = trace_span!("silu_mul").entered();
        rows(gate_up, |gate_up| rows_mut(out, |out| cpu::silu_mul(&self.cpu, gate_up, out)))?
    }

    /// `out = silu(left half) * right half` of `x wᵀ + bias`. That is written to `gate_up` first where the halves are not
    /// whole panels of 16 rows of `w`, and not at all elsewhere.
    pub fn linear_silu_mul(
        &self,
        x: &Tensor,
        w: &PackedMatrix,
        bias: Option<&Tensor>,
        gate_up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        if !w.n().is_multiple_of(32) {
            self.linear(x, w, bias, gate_up)?;
            return self.silu_mul(gate_up, out);
        }
        let _span = linear_span(x, w).entered();
        rows(x, |x| with_optional(bias, |bias| rows_mut(out, |out| cpu::linear_silu_mul(&self.cpu, x, w, bias, out))))??
    }

    /// Puts one key and value row per slot (`block * block_size + offset`) into the cache.
    pub fn write_kv(&self, k: &Tensor, v: &Tensor, slots: &[u32], cache: &mut KvCache) -> Result<()> {
        let _span = trace_span!("write_kv").entered();
        rows(k, |k| rows(v, |v| cache.write(&self.cpu, k, v, slots)))?
    }

    pub fn copy_blocks(&self, cache: &mut KvCache, copies: &[BlockCopy]) {
        let _span = trace_span!("copy_blocks").entered();
        cache.copy_blocks(copies);
    }

    /// Causal attention of each query row over its sequence's cached positions.
    pub fn paged_attention(
        &self,
        q: &Tensor,
        shape: &AttentionShape,
        sequences: &[AttentionSequence<'_>],
        cache: &KvCache,
        out: &Tensor,
    ) -> Result<()> {
        let _span = attention_span(q, sequences).entered();
        rows(q, |q| rows_mut(out, |out| cpu::paged_attention(&self.cpu, q, shape, sequences, cache, out)))?
    }

    /// Stores rows that `fill` makes; see [`PackedMatrix::fill_rows`].
    pub fn fill_rows(&self, w: &mut PackedMatrix, rows: Range<usize>, fill: &Fill<'_>) {
        let _span = trace_span!("fill_rows", n = w.n(), k = w.k()).entered();
        w.fill_rows(self.cpu.pool(), rows, fill);
    }

    /// Stores rows as `read` gives them; see [`PackedMatrix::store_rows`].
    pub fn store_rows(&self, w: &mut PackedMatrix, rows: Range<usize>, read: &ReadRows<'_>) {
        w.store_rows(self.cpu.pool(), rows, read);
    }

    /// Stores single elements of rows; see [`PackedMatrix::write_elements`].
    pub fn write_elements(&self, w: &mut PackedMatrix, rows: Range<usize>, write: &WriteElements<'_>) {
        let _span = trace_span!("write_elements", n = w.n(), k = w.k()).entered();
        w.write_elements(self.cpu.pool(), rows, write);
    }

    /// Drops the memory that the operators reuse; the next ones take it again.
    pub fn release(&self) {
        self.cpu.release();
    }
}

/// A span that tells the layer by its matrix, and what it must compute and read.
fn linear_span(x: &Tensor, w: &PackedMatrix) -> Span {
    let flop = || 2 * x.dims().first().map_or(0, |rows| rows * w.n() * w.k());
    trace_span!("linear", n = w.n(), k = w.k(), flop = flop(), bytes = w.bytes())
}

/// A span with what rows compute that see all positions before them: a window makes it less.
fn attention_span(q: &Tensor, sequences: &[AttentionSequence<'_>]) -> Span {
    let seen = |s: &AttentionSequence<'_>| s.rows * s.start_position + s.rows * (s.rows + 1) / 2;
    let flop = || 4 * q.dims().last().map_or(0, |width| width * sequences.iter().map(seen).sum::<usize>());
    trace_span!("paged_attention", flop = flop())
}

fn with_optional<R>(t: Option<&Tensor>, f: impl FnOnce(Option<&[f32]>) -> R) -> Result<R> {
    match t {
        Some(t) => with_f32(t, |v| f(Some(v))),
        None => Ok(f(None)),
    }
}
