//! One register tile: some steps of a reduction for a few rows and panels, and what happens to the sums.

use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::rows::SharedRows;
use super::super::tile::{Format, Operands, accumulate, tile_width};

/// Panels of the widest register tile.
pub(super) const WIDEST: usize = 4;

/// The weights of one register tile; those beyond its width are not read.
pub(super) type Panels<'a, W> = [&'a [W]; WIDEST];

/// Some steps of a register tile: `x[steps][rows] · weights[width][steps][16]`.
pub(super) struct Tile<'a, F: Format> {
    pub x: &'a [F::X],
    pub weights: &'a Panels<'a, F::W>,
    /// See [`Operands::next`].
    pub next: *const u8,
    pub sums: Sums<'a>,
    /// Where the sums go in the end, if these are the last steps and all columns are the output's.
    pub out: Option<Out<'a>>,
}

/// Sums `[rows][width][16]` of this tile, one every `stride` values: those of runs of leaves that wait for their sibling
/// in the tree, then those of the leaf being added up.
pub(super) struct Sums<'a> {
    pub values: &'a mut [f32],
    pub stride: usize,
    pub waiting: usize,
    /// Whether the leaf has sums of earlier steps.
    pub carry: bool,
    /// How many of those that wait are siblings of what ends with these steps, the last first.
    pub siblings: usize,
}

/// Columns `column..` of rows `row..`, which no other task writes.
pub(super) struct Out<'a> {
    pub rows: &'a SharedRows<'a>,
    pub row: usize,
    pub column: usize,
    pub bias: Option<&'a [f32]>,
}

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
            (1 2)(2 2)(3 2)(4 2)(5 2)(6 2)(7 2)(8 2)(9 2)(10 2)(11 2)(12 2)
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
        let Tile { x, weights, next, sums, out } = self.0;
        let steps = x.len() / MR;
        let w_step = weights[0].len() / steps;
        assert!(w_step >= LANES);
        let mut w = [weights[0].as_ptr(); NV];
        for v in 0..NV {
            assert!(weights[v].len() == steps * w_step);
            w[v] = weights[v].as_ptr();
        }
        let mut acc = [[L::zero(); NV]; MR];
        if sums.carry {
            let carried = vectors(sums.values, sums.waiting * sums.stride, MR * NV);
            for m in 0..MR {
                for v in 0..NV {
                    acc[m][v] = L::from_array(&carried[m * NV + v]);
                }
            }
        }
        // Writing to lines that are not in the cache would hold up the next tile: they are fetched between the steps.
        let parts = if out.is_some() { MR } else { 1 };
        let part_steps = steps.div_ceil(parts);
        for m in 0..parts {
            if let Some(out) = &out {
                out.fetch::<L, NV>(m);
            }
            let (first, end) = ((m * part_steps).min(steps), ((m + 1) * part_steps).min(steps));
            let mut at = w;
            for v in 0..NV {
                at[v] = w[v].wrapping_add(first * w_step);
            }
            let (x, next) = (x.as_ptr().wrapping_add(first * MR), next.wrapping_add(F::FETCH * first));
            let operands = Operands { x, x_row: 1, x_step: MR, w: at, w_step, next };
            // SAFETY: `x` holds `steps` steps of MR rows, each panel as many steps of 16 columns.
            unsafe { accumulate::<L, F, MR, NV>(&mut acc, end - first, &operands) };
        }
        for sibling in 1..=sums.siblings {
            let left = vectors(sums.values, (sums.waiting - sibling) * sums.stride, MR * NV);
            for m in 0..MR {
                for v in 0..NV {
                    acc[m][v] = L::from_array(&left[m * NV + v]).add(acc[m][v]);
                }
            }
        }
        match out {
            Some(out) => write(&acc, &out),
            None => {
                let kept = vectors(sums.values, (sums.waiting - sums.siblings) * sums.stride, MR * NV);
                for m in 0..MR {
                    for v in 0..NV {
                        kept[m * NV + v] = acc[m][v].to_array();
                    }
                }
            }
        }
    }
}

impl Out<'_> {
    /// Asks for the cache lines of a row.
    #[inline(always)]
    fn fetch<L: Lanes, const NV: usize>(&self, m: usize) {
        let start = self.rows.as_ptr(self.row + m, self.column).cast::<u8>();
        for v in 0..NV {
            L::prefetch_near(start.wrapping_add(v * 64));
        }
        L::prefetch_near(start.wrapping_add(NV * 64 - 1)); // they need not start with a line
    }
}

#[inline(always)]
fn vectors(values: &mut [f32], from: usize, len: usize) -> &mut [[f32; LANES]] {
    values[from..from + len * LANES].as_chunks_mut().0
}

/// Adds the bias and writes.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // as in `tile`
fn write<L: Lanes, const MR: usize, const NV: usize>(acc: &[[L; NV]; MR], out: &Out<'_>) {
    let mut acc = *acc;
    if let Some(bias) = out.bias {
        let bias = &bias[out.column..out.column + NV * LANES];
        for v in 0..NV {
            // SAFETY: 16 values of the slice.
            let bias = unsafe { L::load(bias.as_ptr().add(v * LANES)) };
            for m in 0..MR {
                acc[m][v] = acc[m][v].add(bias);
            }
        }
    }
    for m in 0..MR {
        // SAFETY: no other task has these rows and columns.
        let row = unsafe { out.rows.part(out.row + m, out.column, NV * LANES) };
        for v in 0..NV {
            // SAFETY: 16 values of the slice.
            unsafe { acc[m][v].store(row.as_mut_ptr().add(v * LANES)) };
        }
    }
}
