//! Linear layers: `out = x · Wᵀ + bias`.
//!
//! The reduction over `k` is cut into the matrix's leaves; each is summed in ascending order by one accumulator per
//! output, and leaves are added as a balanced binary tree: `((0+1)+(2+3))+((4+5)+(6+7))`. Nothing else decides the order,
//! so a row has the same bits in any batch, and the tree-added results of ranks that hold runs of leaves are those of
//! the whole matrix.

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use super::packed::{PackedMatrix, WeightDtype};
use super::pool::Cpu;
use super::rows::{Rows, RowsMut, SharedRows};
use super::tile::{Format, Operands, Pairs, RoundedPairs, Single, accumulate, most_rows, tile_width};
use half::bf16;

/// How a linear layer stores activations for its format.
trait LinearFormat: Format {
    /// Elements of the reduction per step.
    const PER_STEP: usize;

    fn pack(values: &[f32]) -> Self::X;
}

impl LinearFormat for Single<f32> {
    const PER_STEP: usize = 1;

    #[inline(always)]
    fn pack(values: &[f32]) -> f32 {
        values[0]
    }
}

impl LinearFormat for Pairs {
    const PER_STEP: usize = 2;

    #[inline(always)]
    fn pack(values: &[f32]) -> [f32; 2] {
        [values[0], *values.get(1).unwrap_or(&0.0)]
    }
}

impl LinearFormat for RoundedPairs {
    const PER_STEP: usize = 2;

    #[inline(always)]
    fn pack(values: &[f32]) -> u32 {
        let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
        bits(values[0]) | bits(*values.get(1).unwrap_or(&0.0)) << 16
    }
}

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
        (WeightDtype::Bf16, false) => run::<Pairs>(cpu, x, w, bias, out),
        (WeightDtype::Bf16, true) => run::<RoundedPairs>(cpu, x, w, bias, out),
    }
}

fn run<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, out: RowsMut<'_>) {
    let plan = Plan::new::<F>(cpu, x.rows(), w);
    let mut shared = cpu.shared();
    let packed = shared.packed.values::<F::X>(x.rows() * plan.steps);
    pack_activations::<F>(cpu, x, &plan, packed);
    let job = Job::<F> { isa: cpu.isa(), plan, packed, weights: w.storage().as_slice(), bias, out: out.share() };
    let scratch = job.plan.slots() * job.plan.slot_len();
    cpu.pool().run_with_scratch(job.plan.chunks * job.plan.groups, scratch, |task, scratch| job.task(task, scratch));
}

/// How one call is cut into register tiles and tasks.
struct Plan {
    rows: usize,
    /// Tiles of at most the register tile's rows, of equal height but for one row.
    tiles: usize,
    /// Runs of tiles whose activations fit the cache of a core; a task has one.
    chunks: usize,
    panels: usize,
    /// Runs of at most `width` panels, equal but for one panel; a task has one.
    groups: usize,
    /// Panels side by side in a register tile.
    width: usize,
    steps: usize,
    leaves: usize,
}

/// Activations of a chunk: half of a 1 MiB second-level cache, the rest is for weights and results.
const CHUNK_BYTES: usize = 512 << 10;

/// Reduction steps between which weights stay in the first-level cache while all tiles of a chunk pass.
const BLOCK_STEPS: usize = 256;

impl Plan {
    fn new<F: LinearFormat>(cpu: &Cpu, rows: usize, w: &PackedMatrix) -> Plan {
        let accumulators = cpu.isa().accumulators();
        let tiles = rows.div_ceil(most_rows(accumulators));
        let tile_rows = rows.div_ceil(tiles);
        let width = tile_width(tile_rows, accumulators);
        let steps = w.padded_k() / F::PER_STEP;
        let tile_bytes = tile_rows * steps * size_of::<F::X>();
        let chunks = tiles.div_ceil((CHUNK_BYTES / tile_bytes).clamp(2, 8));
        let panels = w.panels();
        let groups = panels.div_ceil(width).next_multiple_of(cpu.pool().threads()).min(panels);
        Plan { rows, tiles, chunks, panels, groups, width, steps, leaves: w.leaves() }
    }

    /// First row of a tile.
    fn row(&self, tile: usize) -> usize {
        self.rows * tile / self.tiles
    }

    /// First tile of a chunk.
    fn tile(&self, chunk: usize) -> usize {
        self.tiles * chunk / self.chunks
    }

    /// First panel of a group.
    fn panel(&self, group: usize) -> usize {
        self.panels * group / self.groups
    }

    /// Partial sums that wait for their sibling in the tree of leaves, and the one being added up.
    fn slots(&self) -> usize {
        self.leaves.ilog2() as usize + 1
    }

    /// Values of one partial sum: those of a chunk times a group of panels.
    fn slot_len(&self) -> usize {
        let tiles = self.tiles.div_ceil(self.chunks);
        tiles * self.rows.div_ceil(self.tiles) * self.width * LANES
    }
}

/// Activations by tile: `[step][row of the tile]`.
fn pack_activations<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, plan: &Plan, packed: &mut [F::X]) {
    let tile = |tile: usize, packed: &mut [F::X]| {
        let (from, to) = (plan.row(tile), plan.row(tile + 1));
        for row in from..to {
            let cells = packed[row - from..].iter_mut().step_by(to - from);
            for (cell, values) in cells.zip(x.row(row).chunks(F::PER_STEP)) {
                *cell = F::pack(values);
            }
        }
    };
    if plan.tiles == 1 {
        return tile(0, packed);
    }
    cpu.pool().run_parts(packed, plan.tiles, |i| plan.row(i) * plan.steps, tile);
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

impl<F: LinearFormat> Job<'_, F> {
    /// One chunk of rows times one group of panels.
    fn task(&self, task: usize, scratch: &mut [f32]) {
        let (chunk, group) = (task / self.plan.groups, task % self.plan.groups);
        let tiles = (self.plan.tile(chunk), self.plan.tile(chunk + 1));
        let panels = (self.plan.panel(group), self.plan.panel(group + 1));
        let leaf_steps = self.plan.steps / self.plan.leaves;
        let len = self.plan.slot_len();
        for leaf in 0..self.plan.leaves {
            // The partial sums on the stack are one for each bit set in the number of leaves done.
            let depth = leaf.count_ones() as usize;
            let (waiting, rest) = scratch.split_at_mut(depth * len);
            let sum = &mut rest[..len];
            let (mut from, end) = (leaf * leaf_steps, (leaf + 1) * leaf_steps);
            while from < end {
                let steps = (from, end.min(from + BLOCK_STEPS));
                self.block(tiles, panels, steps, from > leaf * leaf_steps, sum);
                from = steps.1;
            }
            let mut sum = sum;
            for left in waiting.chunks_exact_mut(len).rev().take(leaf.trailing_ones() as usize) {
                left.iter_mut().zip(&*sum).for_each(|(left, right)| *left += right);
                sum = left;
            }
        }
        self.finish(tiles, panels, &scratch[..len]);
    }

    /// Steps `steps` of every tile of a chunk into `sum`, `[row of the chunk][column of the group]`.
    fn block(
        &self,
        tiles: (usize, usize),
        panels: (usize, usize),
        steps: (usize, usize),
        carry: bool,
        sum: &mut [f32],
    ) {
        let columns = self.plan.width * LANES;
        let panel_len = self.weights.len() / self.plan.panels;
        let step_len = panel_len / self.plan.steps;
        // A group may be a panel short: its last panel is computed twice and dropped.
        let panel = |v: usize| &self.weights[(panels.0 + v).min(panels.1 - 1) * panel_len..][..panel_len];
        let first_row = self.plan.row(tiles.0);
        for tile in tiles.0..tiles.1 {
            let (from, to) = (self.plan.row(tile), self.plan.row(tile + 1));
            let x = &self.packed[from * self.plan.steps + steps.0 * (to - from)..][..(steps.1 - steps.0) * (to - from)];
            let sum = &mut sum[(from - first_row) * columns..(to - first_row) * columns];
            let weights = |v: usize| &panel(v)[steps.0 * step_len..steps.1 * step_len];
            tile_of::<F>(self.isa, to - from, self.plan.width, x, weights, carry, sum);
        }
    }

    /// Adds the bias and writes the columns that are not padding.
    fn finish(&self, tiles: (usize, usize), panels: (usize, usize), sum: &[f32]) {
        let (first_row, last_row) = (self.plan.row(tiles.0), self.plan.row(tiles.1));
        let first_column = panels.0 * LANES;
        let columns = (panels.1 * LANES).min(self.out.width()) - first_column;
        for (row, sum) in (first_row..last_row).zip(sum.chunks(self.plan.width * LANES)) {
            // SAFETY: no other task has these rows and columns.
            let out = unsafe { self.out.part(row, first_column, columns) };
            match self.bias {
                None => out.copy_from_slice(&sum[..columns]),
                Some(bias) => {
                    let bias = &bias[first_column..];
                    out.iter_mut().zip(sum).zip(bias).for_each(|((out, sum), bias)| *out = sum + bias);
                }
            }
        }
    }
}

/// Runs the register tile of this shape.
fn tile_of<'a, F: Format>(
    isa: Isa,
    rows: usize,
    width: usize,
    x: &'a [F::X],
    weights: impl Fn(usize) -> &'a [F::W],
    carry: bool,
    sum: &'a mut [f32],
) {
    macro_rules! shapes {
        ($(($rows:literal $width:literal))*) => {
            match (rows, width) {
                $(($rows, $width) => {
                    isa.dispatch(Tile::<F, $rows, $width> { x, weights: std::array::from_fn(weights), carry, sum })
                })*
                _ => unreachable!("no register tile of {rows} rows and {width} panels"),
            }
        };
    }
    shapes!(
        (1 4)(2 4)(3 4)(4 4)(5 4)(6 4)
        (1 2)(2 2)(3 2)(4 2)(5 2)(6 2)(7 2)(8 2)(9 2)(10 2)(11 2)(12 2)
        (1 1)(2 1)(3 1)(4 1)(5 1)(6 1)
    );
}

/// `sum[MR][NV * 16] (+)= x[steps][MR] · weights[NV][steps][16]`.
struct Tile<'a, F: Format, const MR: usize, const NV: usize> {
    x: &'a [F::X],
    weights: [&'a [F::W]; NV],
    carry: bool,
    sum: &'a mut [f32],
}

impl<F: Format, const MR: usize, const NV: usize> Kernel for Tile<'_, F, MR, NV> {
    type Output = ();
    const DOT_PAIRS: bool = F::DOT_PAIRS;

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // as in `tile`
    fn run<L: Lanes>(self) {
        if const { MR * NV > L::ACCUMULATORS || NV < tile_width(MR + 1, L::ACCUMULATORS) } {
            unreachable!("the plan has no such tile");
        }
        let steps = self.x.len() / MR;
        let w_step = self.weights[0].len() / steps;
        assert!(w_step >= LANES && self.weights.iter().all(|w| w.len() == steps * w_step));
        let (sums, _) = self.sum[..MR * NV * LANES].as_chunks_mut::<LANES>();
        let mut acc = [[L::zero(); NV]; MR];
        if self.carry {
            for m in 0..MR {
                for v in 0..NV {
                    acc[m][v] = L::from_array(&sums[m * NV + v]);
                }
            }
        }
        let mut w = [self.weights[0].as_ptr(); NV];
        for v in 0..NV {
            w[v] = self.weights[v].as_ptr();
        }
        let operands = Operands { x: self.x.as_ptr(), x_row: 1, x_step: MR, w, w_step };
        // SAFETY: `x` holds `steps` steps of MR rows, each panel as many steps of 16 columns.
        unsafe { accumulate::<L, F, MR, NV>(&mut acc, steps, &operands) };
        for m in 0..MR {
            for v in 0..NV {
                sums[m * NV + v] = acc[m][v].to_array();
            }
        }
    }
}

#[cfg(test)]
mod tests;
