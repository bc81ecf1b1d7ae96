//! Linear layers: `out = x · Wᵀ + bias`.
//!
//! The reduction over `k` is cut into the matrix's leaves; each is summed in ascending order by one accumulator per
//! output, and leaves are added as a balanced binary tree: `((0+1)+(2+3))+((4+5)+(6+7))`. Nothing else decides the
//! order, so a row has the same bits in any batch, and the tree-added results of ranks that hold runs of leaves are
//! those of the whole matrix.

use super::activation::SiluMul;
use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use super::packed::PackedMatrix;
use super::pool::Cpu;
use super::rows::{Rows, RowsMut, SharedRows};
use super::tile::{Ahead, Format, LINE, Pairs, RoundedPairs, Single};
use crate::weights::WeightDtype;
use format::LinearFormat;
use half::bf16;
use plan::Plan;
use register::{Out, Sums, Tile, WIDEST, Weights};

mod format;
mod plan;
mod register;

/// `out[rows, n] = x[rows, k] · wᵀ + bias[n]`, float32 accumulation; see the module for the order of the sums.
///
/// # Panics
/// If shapes do not agree.
pub fn linear(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>) {
    assert_eq!(out.width(), w.n(), "output features");
    by_format(cpu, x, w, bias, out, false);
}

/// [`silu_mul`](super::silu_mul) of what [`linear`] gives, bit by bit, of which nothing is written: `w` has `n` gates
/// before `n` rows of what they gate, `out` is `[rows, n]`.
///
/// # Panics
/// If shapes do not agree, or `n` is no multiple of 16.
pub fn linear_silu_mul(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>) {
    assert_eq!(2 * out.width(), w.n(), "output features");
    assert!(out.width().is_multiple_of(LANES), "{} gates are no whole panels", out.width());
    by_format(cpu, x, w, bias, out, true);
}

fn by_format(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>, gated: bool) {
    assert_eq!(x.width(), w.k(), "input features");
    assert_eq!(out.rows(), x.rows(), "rows of the output");
    assert!(bias.is_none_or(|b| b.len() == w.n()), "length of the bias");
    if x.rows() == 0 {
        return;
    }
    match (w.dtype(), cpu.isa().rounds_activations()) {
        (WeightDtype::F32, _) => run::<Single<f32>>(cpu, x, w, bias, out, gated),
        (WeightDtype::Bf16, false) => run::<Pairs<bf16>>(cpu, x, w, bias, out, gated),
        (WeightDtype::Bf16, true) => run::<RoundedPairs>(cpu, x, w, bias, out, gated),
    }
}

fn run<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>, gated: bool) {
    let plan = Plan::new::<F>(cpu, x.rows(), w, gated);
    let mut shared = cpu.shared();
    let packed = shared.packed.values::<F::X>(x.rows() * plan.steps);
    pack_activations::<F>(cpu, x, &plan, packed);
    let job = Job::<F> { isa: cpu.isa(), plan, packed, weights: w.storage().as_slice(), bias, out: out.share() };
    let scratch = job.plan.copy_len + job.plan.slots() * job.plan.slot_len();
    cpu.pool().run_with_scratch(job.plan.chunks * job.plan.groups, scratch, |task, scratch| job.task(task, scratch));
}

/// Activations by tile: `[step][row of the tile]`.
fn pack_activations<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, plan: &Plan, packed: &mut [F::X]) {
    let parts = if packed.len() < F::WORTH_WAKING { 1 } else { plan.tiles.min(4 * cpu.pool().threads()) };
    let first = |part: usize| plan.tiles * part / parts;
    cpu.pool().run_parts(
        packed,
        parts,
        |part| plan.row(first(part)) * plan.steps,
        |part, packed| cpu.isa().dispatch(Pack::<F> { x, plan, tiles: first(part)..first(part + 1), packed }),
    );
}

/// Packs a run of tiles.
struct Pack<'a, F: LinearFormat> {
    x: Rows<'a>,
    plan: &'a Plan,
    tiles: Run,
    packed: &'a mut [F::X],
}

impl<F: LinearFormat> Kernel for Pack<'_, F> {
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

/// What the tasks of a call share.
struct Job<'a, F: LinearFormat> {
    isa: Isa,
    plan: Plan,
    packed: &'a [F::X],
    weights: &'a [F::W],
    bias: Option<&'a [f32]>,
    out: SharedRows<'a>,
}

type Run = std::ops::Range<usize>;

/// A run of steps of one task.
struct Block<'a> {
    tiles: &'a Run,
    group: usize,
    steps: Run,
    leaves: Run,
    /// Whether steps of its one leaf went before, and come after.
    carry: bool,
    more: bool,
}

impl<F: LinearFormat> Job<'_, F> {
    /// One chunk of rows times one group of panels.
    fn task(&self, task: usize, scratch: &mut [f32]) {
        let (chunk, group) = (task / self.plan.groups, task % self.plan.groups);
        let tiles = &(self.plan.tile(chunk)..self.plan.tile(chunk + 1));
        let (copy, sums) = scratch.split_at_mut(self.plan.copy_len);
        let (plan, leaf_steps) = (&self.plan, self.plan.steps / self.plan.leaves);
        for leaf in (0..plan.leaves).step_by(plan.block_leaves) {
            let leaves = leaf..plan.leaves.min(leaf + plan.block_leaves);
            let (first, end) = (leaf * leaf_steps, (leaf + 1) * leaf_steps);
            for from in (first..end).step_by(plan.block_steps) {
                let to = if leaves.len() > 1 { leaves.end * leaf_steps } else { end.min(from + plan.block_steps) };
                let (carry, more) = (from > first, to < end);
                let leaves = leaves.clone();
                self.block(&Block { tiles, group, steps: from..to, leaves, carry, more }, copy, sums);
            }
        }
        if !self.whole(group) {
            self.finish(tiles, group, sums);
        }
    }

    fn block(&self, block: &Block<'_>, copy: &mut [f32], sums: &mut [f32]) {
        let plan = &self.plan;
        let narrow = || Weights {
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
                    let weights = Weights { panels, step: plan.width * plan.step_len };
                    self.tile::<F::Wide>(block, tile, weights, &mut [], sums);
                }
            }
        }
    }

    fn tile<T: Format<X = F::X>>(
        &self,
        block: &Block<'_>,
        tile: usize,
        weights: Weights<'_, T::W>,
        copy: &mut [f32],
        sums: &mut [f32],
    ) {
        let plan = &self.plan;
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
        let sums = Sums { values, stride: plan.slot_len(), leaves: block.leaves.clone(), carry, more };
        let ahead = self.ahead(block, tile - block.tiles.start);
        Tile::<T> { x, weights, copy, ahead, sums, out }.run(self.isa, to - from, plan.width);
    }

    /// What a tile asks for: of the panels of the next block, which is of this task or, as threads take tasks in turn,
    /// that of the group as many further on as there are threads. One tile alone fetches all of them, as it fetches its
    /// own shortly before they are needed; several fetch a part each.
    fn ahead(&self, block: &Block<'_>, tile: usize) -> Ahead<WIDEST> {
        let plan = &self.plan;
        let (group, step) = match block.steps.end {
            end if end < plan.steps => (block.group, end),
            _ => match block.group + plan.threads {
                next if next < plan.groups => (next, 0),
                _ => (block.group % plan.threads, 0),
            },
        };
        let line = |v: usize| {
            let from = plan.weight(plan.tile_panel(group, v), step);
            self.weights.as_ptr().wrapping_add(from).cast::<u8>()
        };
        if plan.tiles == 1 {
            return Ahead::Near(std::array::from_fn(line));
        }
        let part = tile.min(plan.width * plan.parts - 1);
        let stride = LINE.div_ceil(plan.parts);
        Ahead::Far(line(part / plan.parts).wrapping_add(part % plan.parts * block.steps.len() * stride), stride)
    }

    /// Whether every column of a group's register tile is one of the output.
    fn whole(&self, group: usize) -> bool {
        let (first, end) = (self.plan.panel(group), self.plan.panel(group + 1));
        end - first == self.plan.outputs() && end * LANES <= self.out.width()
    }

    /// Adds the bias, gates, and writes the columns that are not padding.
    fn finish(&self, tiles: &Run, group: usize, sums: &mut [f32]) {
        let plan = &self.plan;
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
