//! How linear layers pack activations, and what the tiles that share weights read.

use super::super::lanes::{LANES, Lanes, rounded_pairs};
use super::super::rows::SelectedRows;
use super::super::tile::{Format, LINE, Pairs, RoundedPairs, Single, Widening};
use super::register::TALLEST;
use half::bf16;
use std::ops::Range;

/// The format of the weights of a linear layer as they are stored.
pub(super) trait LinearFormat: Format {
    /// Whether the first of several tiles that share weights stores a widened copy of them. It then runs in the format
    /// [`First`](Self::First), and the others read the copy in the format [`Wide`](Self::Wide).
    const COPIES: bool = false;
    type First: Format<X = Self::X, W = Self::W>;
    type Wide: Format<X = Self::X>;

    /// The widened weights that the first tile has stored.
    fn copied(_: &[f32]) -> &[<Self::Wide as Format>::W] {
        unreachable!("a format that does not copy")
    }

    /// How many values one thread packs in about the time that it takes to wake other threads.
    const WORTH_WAKING: usize = 4 << 10;

    /// Packs the rows of one tile as `[step][row]`.
    fn pack<L: Lanes>(x: SelectedRows<'_>, rows: Range<usize>, packed: &mut [Self::X]);
}

impl LinearFormat for Single<f32> {
    type First = Self;
    type Wide = Self;

    #[inline(always)]
    fn pack<L: Lanes>(x: SelectedRows<'_>, rows: Range<usize>, packed: &mut [f32]) {
        interleave(x, rows, packed);
    }
}

impl LinearFormat for Pairs<bf16> {
    const COPIES: bool = true;
    type First = Widening;
    type Wide = Pairs<f32>;

    fn copied(copy: &[f32]) -> &[f32] {
        copy
    }

    #[inline(always)]
    fn pack<L: Lanes>(x: SelectedRows<'_>, rows: Range<usize>, packed: &mut [[f32; 2]]) {
        interleave(x, rows, packed);
    }
}

impl LinearFormat for RoundedPairs {
    type First = Self;
    type Wide = Self;
    const WORTH_WAKING: usize = 16 << 10;

    /// Rounds, transposes and writes 16 steps at a time.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // indices, as in `tile`
    fn pack<L: Lanes>(x: SelectedRows<'_>, rows: Range<usize>, packed: &mut [f32]) {
        const { assert!(TALLEST <= LANES) };
        let (first, tile_rows) = (rows.start, rows.len());
        for (block, packed_from) in (0..packed.len()).step_by(LANES * tile_rows).enumerate() {
            let packed = &mut packed[packed_from..];
            let mut lines = [L::zero(); LANES];
            for m in 0..tile_rows {
                let elements = &x.row(first + m)[2 * LANES * block..];
                // The hardware prefetcher does not follow reads from so many rows in turn, so the rows of the next tile
                // are prefetched.
                let ahead = x.as_ptr(first + tile_rows + m).wrapping_add(2 * LANES * block).cast::<u8>();
                L::prefetch_near(ahead);
                L::prefetch_near(ahead.wrapping_add(LINE));
                lines[m] = rounded_pairs(elements);
            }
            if tile_rows == 1 {
                write(lines[0], packed);
                continue;
            }
            // Each vector holds a step in its first `tile_rows` lanes; the next vector's store overwrites the lanes
            // beyond them.
            let steps = L::transposed(&lines);
            if packed.len() >= LANES * tile_rows + LANES {
                for i in 0..LANES {
                    write(steps[i], &mut packed[i * tile_rows..][..LANES]);
                }
            } else {
                for i in 0..packed.len().div_ceil(tile_rows).min(LANES) {
                    write(steps[i], &mut packed[i * tile_rows..]);
                }
            }
        }
    }
}

/// Writes the first lanes of a vector, as many as `values` holds.
#[inline(always)]
fn write<L: Lanes>(lanes: L, values: &mut [f32]) {
    match values.first_chunk_mut() {
        Some(values) => *values = lanes.to_array(),
        None => values.copy_from_slice(&lanes.to_array()[..values.len()]),
    }
}

/// The elements of a row that one step of the reduction takes.
trait RowStep: Copy {
    /// Splits a row into whole steps and, if elements are left over, one padded step.
    fn of(row: &[f32]) -> (&[Self], Option<Self>);
}

impl RowStep for f32 {
    #[inline(always)]
    fn of(row: &[f32]) -> (&[f32], Option<f32>) {
        (row, None)
    }
}

impl RowStep for [f32; 2] {
    #[inline(always)]
    fn of(row: &[f32]) -> (&[[f32; 2]], Option<[f32; 2]>) {
        let (pairs, rest) = row.as_chunks();
        (pairs, rest.first().map(|x| [*x, 0.0]))
    }
}

/// Packs the rows of one tile as `[step][row]`, element by element.
#[inline(always)]
fn interleave<S: RowStep>(x: SelectedRows<'_>, rows: Range<usize>, packed: &mut [S]) {
    const BLOCK: usize = 256; // steps of all rows of a tile that the first-level cache holds
    const ABREAST: usize = 4; // rows written together, since the stores of a single row wait for one another
    let (first, rows) = (rows.start, rows.len());
    for (block, cells) in packed.chunks_mut(BLOCK * rows).enumerate() {
        for m in (0..rows - rows % ABREAST).step_by(ABREAST) {
            interleave_rows::<S, ABREAST>(x, first + m, block * BLOCK, m, rows, cells);
        }
        for m in rows - rows % ABREAST..rows {
            interleave_rows::<S, 1>(x, first + m, block * BLOCK, m, rows, cells);
        }
    }
}

/// Packs the steps `from..` of `N` rows, from row `first` of `x` on, as rows `m..m + N` of a tile of `rows`.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // indices, as in `tile`
fn interleave_rows<S: RowStep, const N: usize>(
    x: SelectedRows<'_>,
    first: usize,
    from: usize,
    m: usize,
    rows: usize,
    cells: &mut [S],
) {
    let (mut whole, mut last) = ([[].as_slice(); N], [None; N]);
    for i in 0..N {
        let (steps, rest) = S::of(x.row(first + i));
        whole[i] = &steps[from.min(steps.len())..steps.len().min(from + cells.len() / rows)];
        whole[i] = &whole[i][..whole[0].len()]; // equal lengths, so that the loop below needs no bounds checks
        last[i] = rest;
    }
    let mut cells = cells.chunks_exact_mut(rows);
    for (step, cells) in (0..whole[0].len()).zip(cells.by_ref()) {
        let cells = &mut cells[m..m + N];
        for i in 0..N {
            cells[i] = whole[i][step];
        }
    }
    for cells in cells {
        for i in 0..N {
            if let Some(step) = last[i] {
                cells[m + i] = step;
            }
        }
    }
}
