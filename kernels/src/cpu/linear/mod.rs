//! Linear layers: `out = x · Wᵀ + bias`.
//!
//! The reduction over `k` is cut into the leaves of the matrix. One accumulator per output sums a leaf in ascending
//! order, and the leaves are added as a balanced binary tree: `((0+1)+(2+3))+((4+5)+(6+7))`. The order depends on
//! nothing else, so a row has the same bits in any batch. Tensor-parallel ranks that each hold a run of leaves get the
//! result of the whole matrix when their results are added as a tree.
//!
//! [`grouped`] runs several products in one job, with the same tiles and so the same bits.
//!
//! On AMX a leaf is summed tile by tile instead, in an order that depends on its length alone: see [`tiles`].

use super::activation::SiluMul;
use super::isa::{Isa, Kernel, Products};
use super::lanes::{LANES, Lanes};
use super::packed::PackedMatrix;
use super::pool::Cpu;
use super::rows::{Rows, RowsMut, SelectedRows, SharedRows};
use super::tile::{Format, LINE, Pairs, Prefetch, RoundedPairs, Single};
use crate::values::StorageDtype;
use format::LinearFormat;
pub(super) use grouped::{grouped_linear, grouped_linear_silu_mul};
use half::bf16;
use plan::{LinearPlan, Panels};
use register::{LinearTile, Out, Sums, TileWeights, WIDEST};
use std::ops::Range;

mod format;
mod grouped;
mod plan;
mod register;
mod tiles;

/// `out[rows, n] = x[rows, k] · wᵀ + bias[n]`, float32 accumulation; see the module for the order of the sums.
///
/// # Panics
/// If shapes do not agree.
pub fn linear(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>) {
    assert_eq!(out.width(), w.n(), "output features");
    by_format(cpu, x, w, bias, out, false);
}

/// `out[rows, n] = silu(gate) * up`, where the first `n` rows of `w` give the gates and its last `n` rows the values
/// that they gate. The bits are those of [`linear`] followed by [`silu_mul`](super::silu_mul), but the product in
/// between is not written to memory.
///
/// # Panics
/// If shapes do not agree, or `n` is not a multiple of 16.
pub fn linear_silu_mul(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>) {
    assert_eq!(2 * out.width(), w.n(), "output features");
    assert!(out.width().is_multiple_of(LANES), "{} gates are no whole panels", out.width());
    by_format(cpu, x, w, bias, out, true);
}

/// As [`linear()`] without a bias, with the products of float32 on every instruction set: neither activations nor
/// weights are rounded.
///
/// # Panics
/// If shapes do not agree.
pub(super) fn linear_unrounded(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, out: RowsMut<'_>) {
    assert_eq!(x.width(), w.k(), "input features");
    assert_eq!((out.rows(), out.width()), (x.rows(), w.n()), "rows and width of the output");
    match w.dtype() {
        _ if x.rows() == 0 => {}
        StorageDtype::F32 => run::<Single<f32>>(cpu, x, w, None, out, false),
        StorageDtype::Bf16 => run::<Pairs<bf16>>(cpu, x, w, None, out, false),
    }
}

fn by_format(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>, gated: bool) {
    assert_eq!(x.width(), w.k(), "input features");
    assert_eq!(out.rows(), x.rows(), "rows of the output");
    assert!(bias.is_none_or(|b| b.len() == w.n()), "length of the bias");
    if x.rows() == 0 {
        return;
    }
    match (w.dtype(), cpu.isa().products()) {
        (StorageDtype::F32, _) => run::<Single<f32>>(cpu, x, w, bias, out, gated),
        (StorageDtype::Bf16, Products::Widened) => run::<Pairs<bf16>>(cpu, x, w, bias, out, gated),
        (StorageDtype::Bf16, Products::Pairs) => run::<RoundedPairs>(cpu, x, w, bias, out, gated),
        (StorageDtype::Bf16, Products::Tiles) => tiles::run(cpu, x, w, bias, out, gated),
    }
}

fn run<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>, gated: bool) {
    let plan = &LinearPlan::new::<F>(cpu, x.rows(), Panels::all(w), gated);
    let mut shared = cpu.shared();
    let packed = shared.packed.values::<F::X>(x.rows() * plan.steps);
    pack_activations::<F>(cpu, SelectedRows::all(x), plan, packed);
    let call =
        LinearCall::<F> { isa: cpu.isa(), plan, packed, weights: w.storage().as_slice(), bias, out: out.share() };
    cpu.pool().run_with_scratch(plan.tasks(), plan.scratch_len(), |task, scratch| call.task(task, scratch));
}

/// Packs the activations tile by tile, as `[step][row of the tile]`.
fn pack_activations<F: LinearFormat>(cpu: &Cpu, x: SelectedRows<'_>, plan: &LinearPlan, packed: &mut [F::X]) {
    let parts = if packed.len() < F::WORTH_WAKING { 1 } else { plan.tiles.min(4 * cpu.pool().threads()) };
    let first = |part: usize| plan.tiles * part / parts;
    cpu.pool().run_parts(
        packed,
        parts,
        |part| plan.row(first(part)) * plan.steps,
        |part, packed| {
            cpu.isa().dispatch(PackActivations::<F> { x, plan, tiles: first(part)..first(part + 1), packed })
        },
    );
}

/// Packs the activations of a run of tiles.
struct PackActivations<'a, F: LinearFormat> {
    x: SelectedRows<'a>,
    plan: &'a LinearPlan,
    tiles: Range<usize>,
    packed: &'a mut [F::X],
}

impl<F: LinearFormat> Kernel for PackActivations<'_, F> {
    type Output = ();
    const DOT_PAIRS: bool = F::DOT_PAIRS;

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { x, plan, tiles, mut packed } = self;
        for tile in tiles {
            let rows = plan.row(tile)..plan.row(tile + 1);
            let (cells, rest) = packed.split_at_mut(rows.len() * plan.steps);
            F::pack::<L>(x, rows, cells);
            packed = rest;
        }
    }
}

/// The plan, the operands and the output of one linear call, which all its tasks share.
struct LinearCall<'a, F: LinearFormat> {
    isa: Isa,
    plan: &'a LinearPlan,
    packed: &'a [F::X],
    weights: &'a [F::W],
    bias: Option<&'a [f32]>,
    out: SharedRows<'a>,
}

/// The steps of the reduction that all tiles of a task take before any of them continues with the next steps, so that
/// they find the weights in the cache.
struct KBlock<'a> {
    tiles: &'a Range<usize>,
    group: usize,
    steps: Range<usize>,
    leaves: Range<usize>,
    /// Whether the block's only leaf has earlier steps, and whether it has later ones.
    carry: bool,
    more: bool,
}

impl<F: LinearFormat> LinearCall<'_, F> {
    /// Computes one task: one chunk of rows times one group of panels.
    fn task(&self, task: usize, scratch: &mut [f32]) {
        let (chunk, group) = (task / self.plan.groups, task % self.plan.groups);
        let tiles = &(self.plan.tile(chunk)..self.plan.tile(chunk + 1));
        let (copy, sums) = scratch.split_at_mut(self.plan.copy_len);
        let (plan, leaf_steps) = (self.plan, self.plan.steps / self.plan.leaves);
        for leaf in (0..plan.leaves).step_by(plan.k_block_leaves) {
            let leaves = leaf..plan.leaves.min(leaf + plan.k_block_leaves);
            let (first, end) = (leaf * leaf_steps, (leaf + 1) * leaf_steps);
            for from in (first..end).step_by(plan.k_block_steps) {
                let to = if leaves.len() > 1 { leaves.end * leaf_steps } else { end.min(from + plan.k_block_steps) };
                let (carry, more) = (from > first, to < end);
                let leaves = leaves.clone();
                self.k_block(&KBlock { tiles, group, steps: from..to, leaves, carry, more }, copy, sums);
            }
        }
        if !self.whole(group) {
            self.finish(tiles, group, sums);
        }
    }

    fn k_block(&self, block: &KBlock<'_>, copy: &mut [f32], sums: &mut [f32]) {
        let plan = self.plan;
        let narrow = || TileWeights {
            panels: std::array::from_fn(|v| {
                let panel = plan.tile_panel(block.group, v);
                &self.weights[plan.weight(panel, block.steps.start)..plan.weight(panel, block.steps.end)]
            }),
            step: plan.step_len,
        };
        let rest = match plan.widened {
            false => block.tiles.start,
            true => {
                self.tile::<F::First>(block, block.tiles.start, narrow(), copy, sums);
                block.tiles.start + 1
            }
        };
        for tile in rest..block.tiles.end {
            match plan.widened {
                false => self.tile::<F>(block, tile, narrow(), &mut [], sums),
                true => {
                    let copy = F::copied(copy);
                    let panels = std::array::from_fn(|v| &copy[(v * plan.step_len).min(copy.len())..]);
                    let weights = TileWeights { panels, step: plan.width * plan.step_len };
                    self.tile::<F::Wide>(block, tile, weights, &mut [], sums);
                }
            }
        }
    }

    fn tile<T: Format<X = F::X>>(
        &self,
        block: &KBlock<'_>,
        tile: usize,
        weights: TileWeights<'_, T::W>,
        copy: &mut [f32],
        sums: &mut [f32],
    ) {
        let plan = self.plan;
        let (from, to) = (plan.row(tile), plan.row(tile + 1));
        let done = block.steps.end == plan.steps;
        let x = &self.packed[from * plan.steps + block.steps.start * (to - from)..][..block.steps.len() * (to - from)];
        let out = (done && self.whole(block.group)).then(|| Out {
            rows: &self.out,
            row: from,
            column: plan.panel(block.group) * LANES,
            bias: self.bias,
            gated: plan.gated.map(|panels| panels * LANES),
        });
        let values = &mut sums[(from - plan.row(block.tiles.start)) * plan.width * LANES..];
        let (carry, more) = (block.carry, block.more);
        let sums = Sums { values, stride: plan.sum_set_len(), leaves: block.leaves.clone(), carry, more };
        let ahead = self.ahead(block, tile - block.tiles.start);
        LinearTile::<T> { x, weights, copy, ahead, sums, out }.run(self.isa, to - from, plan.width);
    }

    /// The panels of the next block that a tile prefetches. That block is the next block of this task or, after the
    /// last one, the first block of the thread's next group, which is probably as many groups further on as there are
    /// threads, since threads claim tasks in order; behind the last group it is one of the next product. A task's only
    /// tile prefetches all panels into the first-level cache, and its own weights shortly before it needs them; each of
    /// several tiles prefetches a part of a panel into the second-level cache.
    fn ahead(&self, block: &KBlock<'_>, tile: usize) -> Prefetch<WIDEST> {
        let plan = self.plan;
        let line = |v: usize| {
            let from = match (block.steps.end, block.group + plan.threads) {
                (end, _) if end < plan.steps => plan.weight(plan.tile_panel(block.group, v), end),
                (_, next) if next < plan.groups => plan.weight(plan.tile_panel(next, v), 0),
                _ => plan.next_weight(plan.tile_panel(block.group % plan.threads, v)),
            };
            self.weights.as_ptr().wrapping_add(from).cast::<u8>()
        };
        if plan.tiles == 1 {
            return Prefetch::Near(std::array::from_fn(line));
        }
        let part = tile.min(plan.width * plan.prefetch_parts - 1);
        let stride = LINE.div_ceil(plan.prefetch_parts);
        Prefetch::Far(
            line(part / plan.prefetch_parts).wrapping_add(part % plan.prefetch_parts * block.steps.len() * stride),
            stride,
        )
    }

    /// Whether all columns of a group's register tile are columns of the output, so that the tile can write
    /// them directly.
    fn whole(&self, group: usize) -> bool {
        let (first, end) = (self.plan.panel(group), self.plan.panel(group + 1));
        end - first == self.plan.outputs() && end * LANES <= self.out.width()
    }

    /// Adds the bias, applies the gates, and writes the columns that are not padding.
    fn finish(&self, tiles: &Range<usize>, group: usize, sums: &mut [f32]) {
        let plan = self.plan;
        let first = plan.panel(group) * LANES;
        let len = (plan.panel(group + 1) * LANES).min(self.out.width()) - first;
        let add_bias = |sums: &mut [f32], from: usize| {
            if let Some(bias) = self.bias {
                sums.iter_mut().zip(&bias[from..]).for_each(|(sum, bias)| *sum += bias);
            }
        };
        let rows = plan.row(tiles.start)..plan.row(tiles.end);
        for (row, sums) in rows.zip(sums.chunks_mut(plan.width * LANES)) {
            // SAFETY: no other task has these rows and columns.
            let out = unsafe { self.out.part(row, first, len) };
            let (sums, gated) = sums.split_at_mut(plan.outputs() * LANES);
            add_bias(&mut sums[..len], first);
            match plan.gated {
                None => out.copy_from_slice(&sums[..len]),
                Some(panels) => {
                    add_bias(&mut gated[..len], panels * LANES + first);
                    self.isa.dispatch(SiluMul { gate: &sums[..len], up: &gated[..len], out });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
