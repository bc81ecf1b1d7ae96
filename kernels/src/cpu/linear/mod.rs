//! Linear layers: `out = x · Wᵀ + bias`.
//!
//! The reduction over `k` is cut into the matrix's leaves; each is summed in ascending order by one accumulator per
//! output, and leaves are added as a balanced binary tree: `((0+1)+(2+3))+((4+5)+(6+7))`. Nothing else decides the order,
//! so a row has the same bits in any batch, and the tree-added results of ranks that hold runs of leaves are those of
//! the whole matrix.

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use super::math::round_bf16;
use super::packed::{PackedMatrix, WeightDtype};
use super::pool::Cpu;
use super::rows::{Rows, RowsMut, SharedRows};
use super::tile::{Format, MOST_ROWS, Operands, Pairs, RoundedPairs, Single, accumulate, tile_width};
use plan::Plan;

mod plan;

/// How a linear layer stores activations for its format.
trait LinearFormat: Format {
    /// The elements of the reduction in one step.
    type Step: Copy + Sync;
    const PER_STEP: usize;

    /// A row's whole steps, and what is left.
    fn steps(row: &[f32]) -> (&[Self::Step], &[f32]);

    fn pack(step: Self::Step) -> Self::X;

    /// The step of an element that has no second.
    fn pack_last(x: f32) -> Self::X;
}

impl LinearFormat for Single<f32> {
    type Step = f32;
    const PER_STEP: usize = 1;

    fn steps(row: &[f32]) -> (&[f32], &[f32]) {
        (row, &[])
    }

    #[inline(always)]
    fn pack(x: f32) -> f32 {
        x
    }

    fn pack_last(x: f32) -> f32 {
        x
    }
}

impl LinearFormat for Pairs {
    type Step = [f32; 2];
    const PER_STEP: usize = 2;

    fn steps(row: &[f32]) -> (&[[f32; 2]], &[f32]) {
        row.as_chunks()
    }

    #[inline(always)]
    fn pack(pair: [f32; 2]) -> [f32; 2] {
        pair
    }

    fn pack_last(x: f32) -> [f32; 2] {
        [x, 0.0]
    }
}

impl LinearFormat for RoundedPairs {
    type Step = [f32; 2];
    const PER_STEP: usize = 2;

    fn steps(row: &[f32]) -> (&[[f32; 2]], &[f32]) {
        row.as_chunks()
    }

    #[inline(always)]
    fn pack(pair: [f32; 2]) -> u32 {
        let [first, second] = pair.map(|x| u32::from(round_bf16(x).to_bits()));
        first | second << 16
    }

    fn pack_last(x: f32) -> u32 {
        Self::pack([x, 0.0])
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
    let plan = Plan::new(cpu, x.rows(), w, F::PER_STEP, size_of::<F::X>());
    let mut shared = cpu.shared();
    let packed = shared.packed.values::<F::X>(x.rows() * plan.steps);
    pack_activations::<F>(cpu, x, &plan, packed);
    let job = Job::<F> { isa: cpu.isa(), plan, packed, weights: w.storage().as_slice(), bias, out: out.share() };
    let scratch = job.plan.slots() * job.plan.slot_len();
    cpu.pool().run_with_scratch(job.plan.chunks * job.plan.groups, scratch, |task, scratch| job.task(task, scratch));
}

/// Activations by tile: `[step][row of the tile]`.
fn pack_activations<F: LinearFormat>(cpu: &Cpu, x: Rows<'_>, plan: &Plan, packed: &mut [F::X]) {
    let tile = |tile: usize, packed: &mut [F::X]| {
        let (from, to) = (plan.row(tile), plan.row(tile + 1));
        let mut rows: [&[F::Step]; MOST_ROWS] = [&[]; MOST_ROWS];
        (from..to).zip(&mut rows).for_each(|(i, row)| *row = F::steps(x.row(i)).0);
        let mut cells = packed.chunks_exact_mut(to - from);
        for (step, cells) in cells.by_ref().take(rows[0].len()).enumerate() {
            cells.iter_mut().zip(&rows).for_each(|(cell, row)| *cell = F::pack(row[step]));
        }
        if let Some(cells) = cells.next() {
            // Half a step is left, of rows of odd length.
            cells.iter_mut().zip(from..to).for_each(|(cell, i)| *cell = F::pack_last(F::steps(x.row(i)).1[0]));
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

impl<F: LinearFormat> Job<'_, F> {
    /// One chunk of rows times one group of panels.
    fn task(&self, task: usize, scratch: &mut [f32]) {
        let (chunk, group) = (task / self.plan.groups, task % self.plan.groups);
        let tiles = self.plan.tile(chunk)..self.plan.tile(chunk + 1);
        let panels = self.plan.panel(group)..self.plan.panel(group + 1);
        let leaf_steps = self.plan.steps / self.plan.leaves;
        let len = self.plan.slot_len();
        for leaf in 0..self.plan.leaves {
            // The partial sums on the stack are one for each bit set in the number of leaves done.
            let (waiting, rest) = scratch.split_at_mut(leaf.count_ones() as usize * len);
            let mut sum = &mut rest[..len];
            let (first, end) = (leaf * leaf_steps, (leaf + 1) * leaf_steps);
            for from in (first..end).step_by(self.plan.block_steps) {
                let steps = from..end.min(from + self.plan.block_steps);
                self.block(&tiles, &panels, &steps, from > first, sum);
            }
            for left in waiting.chunks_exact_mut(len).rev().take(leaf.trailing_ones() as usize) {
                left.iter_mut().zip(&*sum).for_each(|(left, right)| *left += right);
                sum = left;
            }
        }
        self.finish(&tiles, &panels, &scratch[..len]);
    }

    /// Steps `steps` of every tile of a chunk into `sum`, `[column of tiles][row of the chunk][16 * width]`.
    fn block(&self, tiles: &Run, panels: &Run, steps: &Run, carry: bool, sum: &mut [f32]) {
        let first_row = self.plan.row(tiles.start);
        let row_len = self.plan.width * LANES;
        let columns = panels.clone().step_by(self.plan.width).zip(sum.chunks_mut(self.plan.column_len()));
        for (panel, sum) in columns {
            let weights = self.weights(panel, panels.end, steps);
            for tile in tiles.clone() {
                let (from, to) = (self.plan.row(tile), self.plan.row(tile + 1));
                let x = &self.packed[from * self.plan.steps + steps.start * (to - from)..][..steps.len() * (to - from)];
                let next = self.next_weights(panel, panels, steps, tile - tiles.start);
                let sum = &mut sum[(from - first_row) * row_len..(to - first_row) * row_len];
                tile_of::<F>(self.isa, to - from, self.plan.width, Parts { x, weights: &weights, next, carry, sum });
            }
        }
    }

    /// Steps `steps` of the panels from `panel`: as many as a register tile is wide. A group may have fewer left: its
    /// last one is then computed again and dropped.
    fn weights(&self, panel: usize, end: usize, steps: &Run) -> [&[F::W]; WIDEST] {
        let panel_len = self.weights.len() / self.plan.panels;
        let step_len = panel_len / self.plan.steps;
        std::array::from_fn(|v| {
            let start = (panel + v).min(end - 1) * panel_len;
            &self.weights[start + steps.start * step_len..start + steps.end * step_len]
        })
    }

    /// What a tile fetches for the next one of another column or block: each of the first tiles, one panel.
    fn next_weights(&self, panel: usize, panels: &Run, steps: &Run, tile: usize) -> *const F::W {
        let panel_len = self.weights.len() / self.plan.panels;
        let step_len = panel_len / self.plan.steps;
        if self.plan.tiles == 1 {
            return self.weights.as_ptr().wrapping_add(panel * panel_len); // in the cache: a single pass is left to itself
        }
        let (panel, step) = match panel + self.plan.width {
            next if next < panels.end => (next, steps.start),
            _ => (panels.start, steps.end),
        };
        self.weights.as_ptr().wrapping_add((panel + tile.min(self.plan.width - 1)) * panel_len + step * step_len)
    }

    /// Adds the bias and writes the columns that are not padding.
    fn finish(&self, tiles: &Run, panels: &Run, sum: &[f32]) {
        let width = self.plan.width;
        for (panel, sum) in panels.clone().step_by(width).zip(sum.chunks(self.plan.column_len())) {
            let first = panel * LANES;
            let len = ((panel + width).min(panels.end) * LANES).min(self.out.width()) - first;
            for (row, sum) in (self.plan.row(tiles.start)..self.plan.row(tiles.end)).zip(sum.chunks(width * LANES)) {
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
}

type Run = std::ops::Range<usize>;

/// Panels of the widest register tile.
const WIDEST: usize = 4;

/// `sum[rows][width * 16] (+)= x[steps][rows] · weights[width][steps][16]`.
struct Parts<'a, F: Format> {
    x: &'a [F::X],
    weights: &'a [&'a [F::W]; WIDEST],
    /// A cache line from here is fetched with each step.
    next: *const F::W,
    carry: bool,
    sum: &'a mut [f32],
}

/// Runs the register tile of this shape.
fn tile_of<F: Format>(isa: Isa, rows: usize, width: usize, parts: Parts<'_, F>) {
    macro_rules! shapes {
        ($(($rows:literal $width:literal))*) => {
            match (rows, width) {
                $(($rows, $width) => isa.dispatch(Tile::<F, $rows, $width>(parts)),)*
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

struct Tile<'a, F: Format, const MR: usize, const NV: usize>(Parts<'a, F>);

impl<F: Format, const MR: usize, const NV: usize> Kernel for Tile<'_, F, MR, NV> {
    type Output = ();
    const DOT_PAIRS: bool = F::DOT_PAIRS;

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // as in `tile`
    fn run<L: Lanes>(self) {
        if const { MR * NV > L::ACCUMULATORS || NV < tile_width(MR + 1, L::ACCUMULATORS) } {
            unreachable!("the plan has no such tile");
        }
        let Parts { x, weights, next, carry, sum } = self.0;
        let steps = x.len() / MR;
        let w_step = weights[0].len() / steps;
        assert!(w_step >= LANES && weights.iter().all(|w| w.len() == steps * w_step));
        let (sums, _) = sum[..MR * NV * LANES].as_chunks_mut::<LANES>();
        let mut acc = [[L::zero(); NV]; MR];
        if carry {
            for m in 0..MR {
                for v in 0..NV {
                    acc[m][v] = L::from_array(&sums[m * NV + v]);
                }
            }
        }
        let mut w = [weights[0].as_ptr(); NV];
        for v in 0..NV {
            w[v] = weights[v].as_ptr();
        }
        let operands = Operands { x: x.as_ptr(), x_row: 1, x_step: MR, w, w_step, next: next.cast() };
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
