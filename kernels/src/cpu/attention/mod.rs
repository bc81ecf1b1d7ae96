//! Attention of query rows over a paged cache, for any mix of prefill chunks and decodes.
//!
//! A query row takes its keys in units of 64 absolute positions, in order, with an online softmax from unit to unit;
//! inside a unit, positions in order. Each span of 512 positions begins a softmax of its own, and spans are folded in
//! order. Which rows and heads share a register tile, which sequences share a call, which thread takes a span and where
//! blocks lie in memory has no part in it: chunked is whole, and alone is in a batch, bit for bit.
//!
//! There are two arithmetics: float32 products of queries and weights with keys and values that are widened as they are
//! read ([`tile`], [`mod@unit`]), and products of bfloat16 pairs ([`dots`], [`dot_tile`]) where an instruction set has
//! these.

use super::isa::Isa;
use super::kv::KvBlocks;
use super::pool::{Cpu, SharedScratch};
use super::rows::{Rows, RowsMut, SharedRows, SharedSlice};
use crate::kv_layout::KvDtype;
use crate::step::{AttentionSequence, AttentionShape};
use half::bf16;

mod blocks;
mod dot_tile;
mod dots;
mod plan;
mod span;
mod task;
mod tile;
mod unit;
mod units;
pub(crate) mod work;

use plan::Planner;
use task::{Next, finish};
use units::{TilePairs, record_len, state_len};

/// `out[row] = softmax(scale * q[row] · K) V` per head, over positions `[max(0, p + 1 - window), p]` for a row at `p`.
/// `q` and `out` are `[rows, heads * head_dim]`; rows of no sequence are not touched.
///
/// # Panics
/// If shapes do not agree, a block table is too short or names a block outside the cache, or sequences share rows.
pub fn paged_attention(
    cpu: &Cpu,
    q: Rows<'_>,
    shape: &AttentionShape,
    sequences: &[AttentionSequence<'_>],
    cache: &KvBlocks,
    out: RowsMut<'_>,
) {
    let layout = *cache.layout();
    let width = shape.heads * layout.head_dim;
    assert!(shape.heads.is_multiple_of(layout.kv_heads), "{} heads over {} KV heads", shape.heads, layout.kv_heads);
    assert_eq!((q.width(), out.rows(), out.width()), (width, q.rows(), width), "rows and width of query and output");
    assert!(shape.sliding_window != Some(0), "a window of 0 positions sees nothing");
    assert!(shape.scale > 0.0, "a scale of {} does not keep the order of the scores", shape.scale);
    check_sequences(sequences, q.rows(), cache);

    let dots = layout.dtype == KvDtype::Bf16 && cpu.isa().rounds_activations();
    let tile = if dots { dots::TILE_PAIRS } else { TilePairs::new(cpu.isa().accumulators()) };
    let mut shared = cpu.shared();
    let SharedScratch { plan, records, .. } = &mut *shared;
    Planner { shape, sequences, layout: &layout, tile, threads: cpu.pool().threads() }.plan(plan);
    let records = records.floats(plan.records * record_len(layout.head_dim));
    let call = Call { isa: cpu.isa(), q, shape, sequences, cache, out: out.share() };
    let shared = SharedSlice::new(records);
    let scratch = if dots { dots::scratch_len(&layout) } else { tile::scratch_len(tile, &layout) };
    cpu.pool().run_with_scratch(plan.tasks.len(), scratch, |i, scratch| {
        let task = &plan.tasks[i];
        // Threads take tasks in turn: this one's next is probably as many further on as there are threads.
        let after = Next::task(&call, plan.tasks.get(i + cpu.pool().threads()).unwrap_or(task));
        match layout.dtype {
            KvDtype::Bf16 if dots => dots::run(&call, task, after, &shared, scratch),
            KvDtype::Bf16 => tile::run::<bf16>(&call, task, after, tile, &shared, scratch),
            KvDtype::F32 => tile::run::<f32>(&call, task, after, tile, &shared, scratch),
        }
    });
    let finish = |i: usize, state: &mut [f32]| finish(&call, &plan.splits[i], records, state);
    cpu.pool().run_with_scratch(plan.splits.len(), state_len(layout.head_dim), finish);
}

/// What the tasks of a call share.
struct Call<'a> {
    isa: Isa,
    q: Rows<'a>,
    shape: &'a AttentionShape,
    sequences: &'a [AttentionSequence<'a>],
    cache: &'a KvBlocks,
    out: SharedRows<'a>,
}

fn check_sequences(sequences: &[AttentionSequence<'_>], rows: usize, cache: &KvBlocks) {
    let layout = cache.layout();
    let mut end = 0;
    for s in sequences {
        assert!(s.first_row >= end, "sequences must come in the order of their rows and share none: {s:?}");
        end = s.first_row + s.rows;
        assert!(end <= rows, "{s:?} passes the end of {rows} rows");
        let blocks = (s.start_position + s.rows).div_ceil(layout.block_size);
        assert!(s.block_table.len() >= blocks, "{s:?} needs {blocks} blocks");
        let inside = s.block_table[..blocks].iter().all(|b| (*b as usize) < layout.blocks);
        assert!(inside, "{s:?} names a block outside a cache of {}", layout.blocks);
    }
}

#[cfg(test)]
mod tests;
