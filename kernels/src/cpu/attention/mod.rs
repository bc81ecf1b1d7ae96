//! Attention of query rows over a paged KV cache, for any mix of prefill chunks and decode rows in one call.
//!
//! A query is one row of one query head. It attends to its keys in units of 64 absolute positions, in order, with an
//! online softmax from unit to unit, and takes the positions inside a unit in order. Every span of 512 absolute
//! positions starts a new softmax, and the results of the spans are folded in order. The order depends on nothing else:
//! not on which queries share a register tile, which sequences share a call, which thread takes a span, or where the KV
//! blocks lie in memory. So chunked prefill gives the bits of whole prefill, and a sequence alone gives the bits that
//! it has in any batch.
//!
//! There are two kinds of arithmetic. [`tile`] and [`mod@unit`] multiply in float32 and widen keys and values as they
//! are read. [`dots`] and [`dot_tile`] multiply pairs of bfloat16, for an instruction set that has an instruction for
//! these dot products; where it has products of tiles, [`tiles`] multiplies in place of the latter.

use super::isa::Isa;
use super::kv::KvBlocks;
use super::pool::{Cpu, SharedScratch};
use super::rows::{Rows, RowsMut, SharedRows, SharedSlice};
use crate::step::{AttentionSequence, AttentionShape};
use crate::values::StorageDtype;
use half::bf16;

mod blocks;
mod dot_tile;
mod dots;
pub(crate) mod plan;
mod planner;
mod span;
mod task;
mod tile;
mod tiles;
mod unit;
mod units;

use planner::Planner;
use task::{NextKeys, finish};
use units::{TileSize, partial_len, state_len};

/// Computes `out[row] = softmax(scale * q[row] · K) V` per head, where a row at position `p` sees the positions
/// `[max(0, p + 1 - window), p]`, or `[0, visible)` where its sequence gives this. `q` and `out` are
/// `[rows, heads * head_dim]`; rows that belong to no sequence are left as they are.
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

    let dots = layout.dtype == StorageDtype::Bf16 && cpu.isa().rounds_activations();
    let tile = if dots { dots::TILE_SIZE } else { TileSize::new(cpu.isa().accumulators()) };
    let mut shared = cpu.shared();
    let SharedScratch { plan, partials, .. } = &mut *shared;
    Planner { shape, sequences, layout: &layout, tile, threads: cpu.pool().threads() }.plan(plan);
    let partials = partials.floats(plan.partials * partial_len(layout.head_dim));
    let call = AttentionCall { isa: cpu.isa(), q, shape, sequences, cache, out: out.share() };
    let shared = SharedSlice::new(partials);
    let scratch = if dots { dots::scratch_len(cpu.isa(), &layout) } else { tile::scratch_len(tile, &layout) };
    cpu.pool().run_with_scratch(plan.tasks.len(), scratch, |i, scratch| {
        let task = &plan.tasks[i];
        // Threads claim tasks in ascending order, so this thread's next task is probably as many further on as there
        // are threads.
        let after = NextKeys::of_task(&call, plan.tasks.get(i + cpu.pool().threads()).unwrap_or(task));
        match layout.dtype {
            StorageDtype::Bf16 if dots => dots::run(&call, task, after, &shared, scratch),
            StorageDtype::Bf16 => tile::run::<bf16>(&call, task, after, tile, &shared, scratch),
            StorageDtype::F32 => tile::run::<f32>(&call, task, after, tile, &shared, scratch),
        }
    });
    let finish = |i: usize, state: &mut [f32]| finish(&call, &plan.splits[i], partials, state);
    cpu.pool().run_with_scratch(plan.splits.len(), state_len(layout.head_dim), finish);
}

/// The inputs, the output and the instruction set of one call of [`paged_attention`], which all its tasks share.
struct AttentionCall<'a> {
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
        let blocks = s.end().div_ceil(layout.block_size);
        assert!(s.block_table.len() >= blocks, "{s:?} needs {blocks} blocks");
        let inside = s.block_table[..blocks].iter().all(|b| (*b as usize) < layout.blocks);
        assert!(inside, "{s:?} names a block outside a cache of {}", layout.blocks);
    }
}

#[cfg(test)]
mod tests;
