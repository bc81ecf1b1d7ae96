//! Linear layers: `out = x · Wᵀ + bias`.
//!
//! The reduction over `k` is cut into the matrix's leaves; each is summed in ascending order by one accumulator per
//! output, and leaves are added as a balanced binary tree: `((0+1)+(2+3))+((4+5)+(6+7))`. Nothing else decides the order,
//! so a row has the same bits in any batch, and the tree-added results of ranks that hold runs of leaves are those of
//! the whole matrix.

use super::isa::Isa;
use super::lanes::LANES;
use super::packed::{PackedMatrix, WeightDtype};
use super::pool::Cpu;
use super::rows::{Rows, RowsMut, SharedRows};
use super::tile::{Format, Pairs, RoundedPairs, Single};
use format::LinearFormat;
use half::bf16;
use plan::Plan;
use register::{Out, Panels, Sums, Tile};

mod format;
mod plan;
mod register;

/// `out[rows, n] = x[rows, k] · wᵀ + bias[n]`, float32 accumulation; see the module for the order of the sums.
///
/// # Panics
/// If shapes do not agree.
pub fn linear(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>) {
    assert_eq!(x.width(), w.k(), "input features");
    assert_eq!((out.rows(), out.width()), (x.rows(), w.n()), "rows and output features");
    assert!(bias.is_none_or(|b| b.len() == w.n()), "length of the bias");
    if x.rows() == 0 {
        return;
    }
    match (w.dtype(), cpu.isa().rounds_activations()) {
        (WeightDtype::F32, _) => run::<Single<f32>>(cpu, x, w, bias, out),
        (WeightDtype::Bf16, false) => run::<Pairs<bf16>>(cpu, x, w, bias, out),
        (WeightDtype::Bf16, true) => run::<RoundedPairs>(cpu, x, w, bias, out),
    }
}

fn run<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>) {
    let plan = Plan::new::<F>(cpu, x.rows(), w);
    let mut shared = cpu.shared();
    let packed = shared.packed.values::<F::X>(x.rows() * plan.steps);
    pack_activations::<F>(cpu, x, &plan, packed);
    let job = Job::<F> { isa: cpu.isa(), plan, packed, weights: w.storage().as_slice(), bias, out: out.share() };
    let scratch = job.plan.copy_len + job.plan.slots() * job.plan.slot_len();
    cpu.pool().run_with_scratch(job.plan.chunks * job.plan.groups, scratch, |task, scratch| job.task(task, scratch));
}

/// Activations by tile: `[step][row of the tile]`.
fn pack_activations<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, plan: &Plan, packed: &mut [F::X]) {
    const BLOCK: usize = 256; // steps of all rows of a tile that the first-level cache holds
    let tile = |tile: usize, packed: &mut [F::X]| {
        let first = plan.row(tile);
        let rows = plan.row(tile + 1) - first;
        for (block, cells) in packed.chunks_mut(BLOCK * rows).enumerate() {
            for m in 0..rows {
                let (steps, rest) = F::steps(x.row(first + m));
                let mut cells = cells.chunks_exact_mut(rows);
                for (step, cells) in steps[(block * BLOCK).min(steps.len())..].iter().zip(cells.by_ref()) {
                    cells[m] = F::pack(*step);
                }
                // Half a step is left, of rows of odd length.
                cells.zip(rest).for_each(|(cells, x)| cells[m] = F::pack_last(*x));
            }
        }
    };
    // Waking threads takes as long as packing some thousand values.
    let parts = if packed.len() < 4096 { 1 } else { plan.tiles.min(4 * cpu.pool().threads()) };
    let first = |part: usize| plan.tiles * part / parts;
    cpu.pool().run_parts(
        packed,
        parts,
        |part| plan.row(first(part)) * plan.steps,
        |part, mut packed| {
            for i in first(part)..first(part + 1) {
                let (cells, rest) = packed.split_at_mut((plan.row(i + 1) - plan.row(i)) * plan.steps);
                tile(i, cells);
                packed = rest;
            }
        },
    );
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
    leaf: usize,
    /// Whether steps of the leaf went before, and come after.
    carry: bool,
    more: bool,
}

impl<F: LinearFormat> Job<'_, F> {
    /// One chunk of rows times one group of panels.
    fn task(&self, task: usize, scratch: &mut [f32]) {
        let (chunk, group) = (task / self.plan.groups, task % self.plan.groups);
        let tiles = &(self.plan.tile(chunk)..self.plan.tile(chunk + 1));
        let (copy, sums) = scratch.split_at_mut(self.plan.copy_len);
        let leaf_steps = self.plan.steps / self.plan.leaves;
        for leaf in 0..self.plan.leaves {
            let (first, end) = (leaf * leaf_steps, (leaf + 1) * leaf_steps);
            for from in (first..end).step_by(self.plan.block_steps) {
                let steps = from..end.min(from + self.plan.block_steps);
                let (carry, more) = (from > first, steps.end < end);
                let block = Block { tiles, group, steps, leaf, carry, more };
                let weights = self.weights(&block);
                match self.plan.widened {
                    false => self.block::<F>(&block, &weights, sums),
                    true => self.block::<F::Wide>(&block, &F::wide(self.isa, weights, copy), sums),
                }
            }
        }
        if !self.whole(group) {
            self.finish(tiles, group, sums);
        }
    }

    /// The weights of a block. A group may have a panel less than a register tile: its last one is then computed again
    /// and dropped.
    fn weights(&self, block: &Block<'_>) -> Panels<'_, F::W> {
        let (first, end) = (self.plan.panel(block.group), self.plan.panel(block.group + 1));
        std::array::from_fn(|v| {
            let panel = (first + v).min(end - 1);
            &self.weights[self.plan.weight(panel, block.steps.start)..self.plan.weight(panel, block.steps.end)]
        })
    }

    fn block<T: Format<X = F::X>>(&self, block: &Block<'_>, weights: &Panels<'_, T::W>, sums: &mut [f32]) {
        let plan = &self.plan;
        let first_row = plan.row(block.tiles.start);
        let (waiting, done) = (block.leaf.count_ones() as usize, block.steps.end == plan.steps);
        let siblings = if block.more { 0 } else { block.leaf.trailing_ones() as usize };
        for tile in block.tiles.clone() {
            let (from, to) = (plan.row(tile), plan.row(tile + 1));
            let x =
                &self.packed[from * plan.steps + block.steps.start * (to - from)..][..block.steps.len() * (to - from)];
            let out = (done && self.whole(block.group)).then(|| Out {
                rows: &self.out,
                row: from,
                column: plan.panel(block.group) * LANES,
                bias: self.bias,
            });
            let values = &mut sums[(from - first_row) * plan.width * LANES..];
            let sums = Sums { values, stride: plan.slot_len(), waiting, carry: block.carry, siblings };
            let next = self.next_weights::<T>(block, tile - block.tiles.start);
            Tile::<T> { x, weights, next, sums, out }.run(self.isa, to - from, plan.width);
        }
    }

    /// What a tile fetches: its part of the panels of the next block, which is of this task or, as threads take tasks in
    /// turn, that of the group as many further on as there are threads.
    fn next_weights<T: Format>(&self, block: &Block<'_>, tile: usize) -> *const u8 {
        let plan = &self.plan;
        let (group, step) = match block.steps.end {
            end if end < plan.steps => (block.group, end),
            _ => match block.group + plan.threads {
                next if next < plan.groups => (next, 0),
                _ => (block.group % plan.threads, 0),
            },
        };
        let (panel, bytes) = match plan.tiles {
            1 => (plan.weight(plan.panel(block.group), block.steps.start), 0), // in the cache: a single pass is left to itself
            _ => {
                let per_panel = plan.step_bytes::<F>() / T::FETCH;
                let part = tile.min(plan.width * per_panel - 1);
                let panel = plan.panel(group) + part / per_panel;
                (plan.weight(panel, step), part % per_panel * block.steps.len() * T::FETCH)
            }
        };
        self.weights.as_ptr().wrapping_add(panel).cast::<u8>().wrapping_add(bytes)
    }

    /// Whether every column of a group's register tile is one of the output.
    fn whole(&self, group: usize) -> bool {
        let (first, end) = (self.plan.panel(group), self.plan.panel(group + 1));
        end - first == self.plan.width && end * LANES <= self.out.width()
    }

    /// Adds the bias and writes the columns that are not padding.
    fn finish(&self, tiles: &Run, group: usize, sums: &[f32]) {
        let first = self.plan.panel(group) * LANES;
        let len = (self.plan.panel(group + 1) * LANES).min(self.out.width()) - first;
        let rows = self.plan.row(tiles.start)..self.plan.row(tiles.end);
        for (row, sum) in rows.zip(sums.chunks(self.plan.width * LANES)) {
            // SAFETY: no other task has these rows and columns.
            let out = unsafe { self.out.part(row, first, len) };
            match self.bias {
                None => out.copy_from_slice(&sum[..len]),
                Some(bias) => {
                    let bias = &bias[first..];
                    out.iter_mut().zip(sum).zip(bias).for_each(|((out, sum), bias)| *out = sum + bias);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
