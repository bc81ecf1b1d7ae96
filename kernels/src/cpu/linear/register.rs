//! One register tile: some steps of a reduction for a few rows and panels, and what happens to the sums.

use super::super::activation::silu_times;
use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::rows::SharedRows;
use super::super::tile::{Ahead, Format, LINE, Operands, accumulate, tile_width};
use std::ops::Range;

/// Panels of the widest register tile.
pub(super) const WIDEST: usize = 4;

/// Rows of the tallest one, where there are accumulators for two vectors of columns: that is enough to hide what
/// loading and widening weights costs.
pub(super) const TALLEST: usize = 13;

/// The weights of one register tile: a step of each panel every `step` elements. Panels beyond its width are not read.
pub(super) struct Weights<'a, W> {
    pub panels: [&'a [W]; WIDEST],
    pub step: usize,
}

/// Some steps of a register tile: `x[steps][rows] · weights[width][steps][16]`.
pub(super) struct Tile<'a, F: Format> {
    pub x: &'a [F::X],
    pub weights: Weights<'a, F::W>,
    /// Where a format that widens leaves `[steps][width][32]`.
    pub copy: &'a mut [f32],
    pub ahead: Ahead<WIDEST>,
    pub sums: Sums<'a>,
    /// Where the sums go in the end, if these are the last steps and all columns are the output's.
    pub out: Option<Out<'a>>,
}

/// Sums `[rows][width][16]` of this tile, one every `stride` values: those of runs of leaves that wait for their
/// sibling in the tree, then those of the leaf being added up.
pub(super) struct Sums<'a> {
    pub values: &'a mut [f32],
    pub stride: usize,
    /// The leaves that these steps are of, all of one length.
    pub leaves: Range<usize>,
    /// Whether the first leaf has sums of earlier steps, and the last goes on after these.
    pub carry: bool,
    pub more: bool,
}

/// Columns `column..` of rows `row..`, which no other task writes.
pub(super) struct Out<'a> {
    pub rows: &'a SharedRows<'a>,
    pub row: usize,
    pub column: usize,
    pub bias: Option<&'a [f32]>,
    /// Whether the second half of the tile's panels is what its first half, of so many outputs in all, gates.
    pub gated: Option<usize>,
}

/// How many bytes of a panel are on their way where one tile alone passes.
const LEAD: usize = 2048;

impl<F: Format> Tile<'_, F> {
    /// Runs the register tile of this shape.
    pub fn run(self, isa: Isa, rows: usize, width: usize) {
        macro_rules! shapes {
            ($(($rows:literal $width:literal))*) => {
                match (rows, width) {
                    $(($rows, $width) => isa.dispatch(Shaped::<F, $rows, $width>(self)),)*
                    _ => unreachable!("no register tile of {rows} rows and {width} panels"),
                }
            };
        }
        shapes!(
            (1 4)(2 4)(3 4)(4 4)(5 4)(6 4)
            (1 2)(2 2)(3 2)(4 2)(5 2)(6 2)(7 2)(8 2)(9 2)(10 2)(11 2)(12 2)(13 2)
            (1 1)(2 1)(3 1)(4 1)(5 1)(6 1)
        );
    }
}

struct Shaped<'a, F: Format, const MR: usize, const NV: usize>(Tile<'a, F>);

impl<F: Format, const MR: usize, const NV: usize> Kernel for Shaped<'_, F, MR, NV> {
    type Output = ();
    const DOT_PAIRS: bool = F::DOT_PAIRS;

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // as in `tile`
    fn run<L: Lanes>(self) {
        if const { MR * NV > L::ACCUMULATORS || NV < tile_width(MR + 1, L::ACCUMULATORS) } {
            unreachable!("the plan has no such tile");
        }
        let Tile { x, weights, copy, ahead, sums, out } = self.0;
        let (steps, step_len) = (x.len() / MR, F::PER_STEP * LANES);
        assert!(steps > 0 && (!F::WIDENS || copy.len() >= steps * NV * step_len));
        let (mut w, w_step) = ([weights.panels[0].as_ptr(); NV], weights.step);
        for v in 0..NV {
            assert!(weights.panels[v].len() >= (steps - 1) * w_step + step_len);
            w[v] = weights.panels[v].as_ptr();
        }
        let leaf_steps = steps / sums.leaves.len();
        // Writing to lines that are not in the cache would hold up the next tile: they are fetched between the steps.
        let rows_by_leaf = if out.is_some() { MR.div_ceil(sums.leaves.len()) } else { 1 };
        for (i, leaf) in sums.leaves.clone().enumerate() {
            let (waiting, siblings) = (leaf.count_ones() as usize, leaf.trailing_ones() as usize);
            let last = i + 1 == sums.leaves.len();
            let mut acc = [[L::zero(); NV]; MR];
            if sums.carry {
                acc = kept(vectors(sums.values, waiting * sums.stride, MR * NV));
            }
            let (runs, run_steps) = match ahead {
                Ahead::Near(_) if last => (2, leaf_steps.saturating_sub(LEAD / LINE).max(LEAD / LINE)),
                Ahead::Near(_) => (1, leaf_steps),
                Ahead::Far(..) => (rows_by_leaf, leaf_steps.div_ceil(rows_by_leaf)),
            };
            for run in 0..runs {
                let run_end = leaf_steps.min((run + 1) * run_steps);
                let (first, end) = (i * leaf_steps + leaf_steps.min(run * run_steps), i * leaf_steps + run_end);
                let mut at = w;
                for v in 0..NV {
                    at[v] = w[v].wrapping_add(first * w_step);
                }
                let ahead = match ahead {
                    Ahead::Far(stream, stride) => {
                        if let Some(out) = &out {
                            out.fetch::<L, MR, NV>(i * rows_by_leaf + run);
                        }
                        Ahead::Far(stream.wrapping_add(first * stride), stride)
                    }
                    Ahead::Near(next) => Ahead::Near(if run == 0 { lead(&at) } else { next_of(&next) }),
                };
                let x = x.as_ptr().wrapping_add(first * MR);
                let copy = copy.as_mut_ptr().wrapping_add(first * NV * step_len);
                let operands = Operands { x, x_row: 1, x_step: MR, w: at, w_step, copy, ahead };
                // SAFETY: `x` holds all steps of MR rows, each panel and the copy as many, by the assertions above.
                unsafe { accumulate::<L, F, MR, NV>(&mut acc, end - first, &operands) };
            }
            if sums.more {
                keep(&acc, vectors(sums.values, waiting * sums.stride, MR * NV));
                continue;
            }
            for sibling in 1..=siblings {
                let left = vectors(sums.values, (waiting - sibling) * sums.stride, MR * NV);
                for m in 0..MR {
                    for v in 0..NV {
                        acc[m][v] = L::from_array(&left[m * NV + v]).add(acc[m][v]);
                    }
                }
            }
            match &out {
                Some(out) if last => write(&acc, out),
                _ => keep(&acc, vectors(sums.values, (waiting - siblings) * sums.stride, MR * NV)),
            }
        }
    }
}

/// What is needed [`LEAD`] later.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // as in `tile`
fn lead<W, const NV: usize>(at: &[*const W; NV]) -> [*const u8; NV] {
    let mut streams = [std::ptr::null(); NV];
    for v in 0..NV {
        streams[v] = at[v].cast::<u8>().wrapping_add(LEAD);
    }
    streams
}

/// Where the panels of this width go on.
#[inline(always)]
fn next_of<const NV: usize>(next: &[*const u8; WIDEST]) -> [*const u8; NV] {
    let mut streams = [std::ptr::null(); NV];
    streams.copy_from_slice(&next[..NV]);
    streams
}

/// Sums that were put away.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // as in `tile`
fn kept<L: Lanes, const MR: usize, const NV: usize>(sums: &[[f32; LANES]]) -> [[L; NV]; MR] {
    let mut acc = [[L::zero(); NV]; MR];
    for m in 0..MR {
        for v in 0..NV {
            acc[m][v] = L::from_array(&sums[m * NV + v]);
        }
    }
    acc
}

/// Puts sums away.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // as in `tile`
fn keep<L: Lanes, const MR: usize, const NV: usize>(acc: &[[L; NV]; MR], sums: &mut [[f32; LANES]]) {
    for m in 0..MR {
        for v in 0..NV {
            sums[m * NV + v] = acc[m][v].to_array();
        }
    }
}

impl Out<'_> {
    /// How many of a tile's vectors of columns are written.
    #[inline(always)]
    fn vectors(&self, width: usize) -> usize {
        if self.gated.is_some() { width / 2 } else { width }
    }

    /// Asks for the cache lines of a row, if the tile has it.
    #[inline(always)]
    fn fetch<L: Lanes, const MR: usize, const NV: usize>(&self, m: usize) {
        if m >= MR {
            return;
        }
        let start = self.rows.as_ptr(self.row + m, self.column).cast::<u8>();
        let vectors = self.vectors(NV);
        for v in 0..vectors {
            L::prefetch_near(start.wrapping_add(v * LINE));
        }
        L::prefetch_near(start.wrapping_add(vectors * LINE - 1)); // they need not start with a line
    }
}

#[inline(always)]
fn vectors(values: &mut [f32], from: usize, len: usize) -> &mut [[f32; LANES]] {
    values[from..from + len * LANES].as_chunks_mut().0
}

/// Adds the bias, gates, and writes.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // as in `tile`
fn write<L: Lanes, const MR: usize, const NV: usize>(acc: &[[L; NV]; MR], out: &Out<'_>) {
    let mut acc = *acc;
    if let Some(bias) = out.bias {
        for v in 0..NV {
            let column = match out.gated {
                Some(outputs) if v >= NV / 2 => outputs + out.column + (v - NV / 2) * LANES,
                _ => out.column + v * LANES,
            };
            let bias = L::from_array(bias[column..].first_chunk().expect("16 columns of the bias"));
            for m in 0..MR {
                acc[m][v] = acc[m][v].add(bias);
            }
        }
    }
    for m in 0..MR {
        // SAFETY: no other task has these rows and columns.
        let row = unsafe { out.rows.part(out.row + m, out.column, out.vectors(NV) * LANES) };
        let row = row.as_chunks_mut::<LANES>().0;
        if out.gated.is_some() {
            for v in 0..NV / 2 {
                row[v] = silu_times(acc[m][v], acc[m][NV / 2 + v]).to_array();
            }
        } else {
            for v in 0..NV {
                row[v] = acc[m][v].to_array();
            }
        }
    }
}
