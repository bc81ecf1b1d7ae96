//! One register tile: some steps of the reduction for a few rows and panels, and where their sums go.

use super::super::activation::silu_times;
use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::rows::SharedRows;
use super::super::tile::{Format, LINE, Operands, Prefetch, accumulate, tile_width};
use std::ops::Range;

/// Panels of the widest register tile.
pub(super) const WIDEST: usize = 4;

/// Rows of the tallest register tile, on instruction sets with accumulators for two vectors of columns per row. So many
/// rows hide the cost of loading and widening weights.
pub(super) const TALLEST: usize = 13;

/// The weights of one register tile. Each panel has a step every `step` elements; panels beyond the tile's width are
/// not read.
pub(super) struct TileWeights<'a, W> {
    pub panels: [&'a [W]; WIDEST],
    pub step: usize,
}

/// The product of one register tile over some steps: `x[steps][rows] · weights[width][steps][16]`.
pub(super) struct LinearTile<'a, F: Format> {
    pub x: &'a [F::X],
    pub weights: TileWeights<'a, F::W>,
    /// The copy `[steps][width][32]` of the weights, which a format that widens writes.
    pub copy: &'a mut [f32],
    pub ahead: Prefetch<WIDEST>,
    pub sums: Sums<'a>,
    /// Where the results go after the last step, if all columns of the tile are columns of the output.
    pub out: Option<Out<'a>>,
}

/// Partial sums `[rows][width][16]` of this tile, one set every `stride` values: first those of runs of leaves that
/// wait for their sibling in the tree, then those of the current leaf.
pub(super) struct Sums<'a> {
    pub values: &'a mut [f32],
    pub stride: usize,
    /// The leaves that the steps belong to, all of one length.
    pub leaves: Range<usize>,
    /// Whether the first leaf has partial sums of earlier steps, and whether the last leaf has later steps.
    pub carry: bool,
    pub more: bool,
}

/// The part of the output that a tile writes: columns `column..` of rows `row..`, which no other task writes.
pub(super) struct Out<'a> {
    pub rows: &'a SharedRows<'a>,
    pub row: usize,
    pub column: usize,
    pub bias: Option<&'a [f32]>,
    /// For a gated layer, the number of its outputs. The second half of the tile's panels then holds the values that
    /// the first half gates.
    pub gated: Option<usize>,
}

/// How many bytes ahead of its reads a task's only tile prefetches a panel.
const LEAD: usize = 2048;

impl<F: Format> LinearTile<'_, F> {
    /// Runs the kernel for a register tile of `rows` rows and `width` panels.
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

struct Shaped<'a, F: Format, const MR: usize, const NV: usize>(LinearTile<'a, F>);

impl<F: Format, const MR: usize, const NV: usize> Kernel for Shaped<'_, F, MR, NV> {
    type Output = ();
    const DOT_PAIRS: bool = F::DOT_PAIRS;

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // indices, as in `tile`
    fn run<L: Lanes>(self) {
        if const { MR * NV > L::ACCUMULATORS || NV < tile_width(MR + 1, L::ACCUMULATORS) } {
            unreachable!("the plan has no such tile");
        }
        let LinearTile { x, weights, copy, ahead, sums, out } = self.0;
        let (steps, step_len) = (x.len() / MR, F::PER_STEP * LANES);
        assert!(steps > 0 && (!F::WIDENS || copy.len() >= steps * NV * step_len));
        let (mut w, w_step) = ([weights.panels[0].as_ptr(); NV], weights.step);
        for v in 0..NV {
            assert!(weights.panels[v].len() >= (steps - 1) * w_step + step_len);
            w[v] = weights.panels[v].as_ptr();
        }
        let leaf_steps = steps / sums.leaves.len();
        // Stores to cache lines that are not in the cache would delay the next tile, so these are prefetched between
        // the steps.
        let rows_by_leaf = if out.is_some() { MR.div_ceil(sums.leaves.len()) } else { 1 };
        for (i, leaf) in sums.leaves.clone().enumerate() {
            let (waiting, siblings) = (leaf.count_ones() as usize, leaf.trailing_ones() as usize);
            let last = i + 1 == sums.leaves.len();
            let mut acc = [[L::zero(); NV]; MR];
            if sums.carry {
                acc = kept(vectors(sums.values, waiting * sums.stride, MR * NV));
            }
            let (runs, run_steps) = match ahead {
                Prefetch::Near(_) if last => (2, leaf_steps.saturating_sub(LEAD / LINE).max(LEAD / LINE)),
                Prefetch::Near(_) => (1, leaf_steps),
                Prefetch::Far(..) => (rows_by_leaf, leaf_steps.div_ceil(rows_by_leaf)),
            };
            for run in 0..runs {
                let run_end = leaf_steps.min((run + 1) * run_steps);
                let (first, end) = (i * leaf_steps + leaf_steps.min(run * run_steps), i * leaf_steps + run_end);
                let mut at = w;
                for v in 0..NV {
                    at[v] = w[v].wrapping_add(first * w_step);
                }
                let ahead = match ahead {
                    Prefetch::Far(stream, stride) => {
                        if let Some(out) = &out {
                            out.fetch::<L, MR, NV>(i * rows_by_leaf + run);
                        }
                        Prefetch::Far(stream.wrapping_add(first * stride), stride)
                    }
                    Prefetch::Near(next) => Prefetch::Near(if run == 0 { lead(&at) } else { next_of(&next) }),
                };
                let x = x.as_ptr().wrapping_add(first * MR);
                let copy = copy.as_mut_ptr().wrapping_add(first * NV * step_len);
                let operands = Operands { x, x_row: 1, x_step: MR, w: at, w_step, copy, ahead };
                // SAFETY: by the assertions above `x` has all steps of MR rows, and each panel and the copy have as
                // many steps.
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

/// The address [`LEAD`] bytes ahead in the stream of each panel.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // indices, as in `tile`
fn lead<W, const NV: usize>(at: &[*const W; NV]) -> [*const u8; NV] {
    let mut streams = [std::ptr::null(); NV];
    for v in 0..NV {
        streams[v] = at[v].cast::<u8>().wrapping_add(LEAD);
    }
    streams
}

/// The first `NV` of the streams that are read next.
#[inline(always)]
fn next_of<const NV: usize>(next: &[*const u8; WIDEST]) -> [*const u8; NV] {
    let mut streams = [std::ptr::null(); NV];
    streams.copy_from_slice(&next[..NV]);
    streams
}

/// Loads partial sums that [`keep`] has stored.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // indices, as in `tile`
fn kept<L: Lanes, const MR: usize, const NV: usize>(sums: &[[f32; LANES]]) -> [[L; NV]; MR] {
    let mut acc = [[L::zero(); NV]; MR];
    for m in 0..MR {
        for v in 0..NV {
            acc[m][v] = L::from_array(&sums[m * NV + v]);
        }
    }
    acc
}

/// Stores partial sums for the next steps, or until their sibling in the tree of leaves is ready.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // indices, as in `tile`
fn keep<L: Lanes, const MR: usize, const NV: usize>(acc: &[[L; NV]; MR], sums: &mut [[f32; LANES]]) {
    for m in 0..MR {
        for v in 0..NV {
            sums[m * NV + v] = acc[m][v].to_array();
        }
    }
}

impl Out<'_> {
    /// How many vectors of columns a tile of `width` panels writes.
    #[inline(always)]
    fn vectors(&self, width: usize) -> usize {
        if self.gated.is_some() { width / 2 } else { width }
    }

    /// Prefetches the cache lines of row `m` of the tile, if the tile has it.
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
        L::prefetch_near(start.wrapping_add(vectors * LINE - 1)); // the row need not start at a cache line
    }
}

#[inline(always)]
fn vectors(values: &mut [f32], from: usize, len: usize) -> &mut [[f32; LANES]] {
    values[from..from + len * LANES].as_chunks_mut().0
}

/// Adds the bias, applies the gates, and writes the outputs.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // indices, as in `tile`
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
