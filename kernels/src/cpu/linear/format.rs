//! How linear layers store activations, and what tiles that share weights read.

use super::super::lanes::{LANES, Lanes};
use super::super::rows::Rows;
use super::super::tile::{Format, LINE, Pairs, RoundedPairs, Single, Widening};
use super::register::TALLEST;
use half::bf16;
use std::ops::Range;

/// The format of a matrix as it is stored.
pub(super) trait LinearFormat: Format {
    /// Whether of several tiles that share weights the first leaves a copy, as [`First`](Self::First), which the others
    /// read, as [`Wide`](Self::Wide).
    const COPIES: bool = false;
    type First: Format<X = Self::X, W = Self::W>;
    type Wide: Format<X = Self::X>;

    /// What the first tile left.
    fn copied(_: &[f32]) -> &[<Self::Wide as Format>::W] {
        unreachable!("a format that does not copy")
    }

    /// Values that one thread packs in about the time that waking others takes.
    const WORTH_WAKING: usize = 4 << 10;

    /// Packs the rows of one tile as `[step][row]`.
    fn pack<L: Lanes>(x: Rows<'_>, rows: Range<usize>, packed: &mut [Self::X]);
}

impl LinearFormat for Single<f32> {
    type First = Self;
    type Wide = Self;

    #[inline(always)]
    fn pack<L: Lanes>(x: Rows<'_>, rows: Range<usize>, packed: &mut [f32]) {
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
    fn pack<L: Lanes>(x: Rows<'_>, rows: Range<usize>, packed: &mut [[f32; 2]]) {
        interleave(x, rows, packed);
    }
}

impl LinearFormat for RoundedPairs {
    type First = Self;
    type Wide = Self;
    const WORTH_WAKING: usize = 16 << 10;

    /// 16 steps at a time are rounded, transposed and written.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // as in `tile`
    fn pack<L: Lanes>(x: Rows<'_>, rows: Range<usize>, packed: &mut [f32]) {
        const { assert!(TALLEST <= LANES) };
        let (first, tile_rows) = (rows.start, rows.len());
        for (block, packed_from) in (0..packed.len()).step_by(LANES * tile_rows).enumerate() {
            let packed = &mut packed[packed_from..];
            let mut lines = [L::zero(); LANES];
            for m in 0..tile_rows {
                let elements = &x.row(first + m)[2 * LANES * block..];
                // The processor does not foresee reads from so many rows in turn: those of the next tile are asked for.
                let ahead = elements.as_ptr().wrapping_add(tile_rows * x.stride()).cast::<u8>();
                L::prefetch_near(ahead);
                L::prefetch_near(ahead.wrapping_add(LINE));
                lines[m] = rounded_pairs(elements);
            }
            if tile_rows == 1 {
                write(lines[0], packed);
                continue;
            }
            // What a step's vector has beyond the rows is where the next step is written.
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

/// Up to 32 elements as pairs, zeros where there are fewer.
#[inline(always)]
fn rounded_pairs<L: Lanes>(x: &[f32]) -> L {
    let pairs = match x.first_chunk::<{ 2 * LANES }>() {
        Some(pairs) => *pairs,
        None => {
            let mut padded = [0.0; 2 * LANES];
            padded[..x.len()].copy_from_slice(x);
            padded
        }
    };
    let halves = pairs.as_chunks::<LANES>().0;
    L::rounded_pairs(L::from_array(&halves[0]), L::from_array(&halves[1]))
}

/// As many lanes as there are values.
#[inline(always)]
fn write<L: Lanes>(lanes: L, values: &mut [f32]) {
    match values.first_chunk_mut() {
        Some(values) => *values = lanes.to_array(),
        None => values.copy_from_slice(&lanes.to_array()[..values.len()]),
    }
}

/// What a row has for one step.
trait Step: Copy {
    /// A row's whole steps, and one of what is left.
    fn of(row: &[f32]) -> (&[Self], Option<Self>);
}

impl Step for f32 {
    #[inline(always)]
    fn of(row: &[f32]) -> (&[f32], Option<f32>) {
        (row, None)
    }
}

impl Step for [f32; 2] {
    #[inline(always)]
    fn of(row: &[f32]) -> (&[[f32; 2]], Option<[f32; 2]>) {
        let (pairs, rest) = row.as_chunks();
        (pairs, rest.first().map(|x| [*x, 0.0]))
    }
}

/// Packs the rows of one tile, element by element.
#[inline(always)]
fn interleave<S: Step>(x: Rows<'_>, rows: Range<usize>, packed: &mut [S]) {
    const BLOCK: usize = 256; // steps of all rows of a tile that the first-level cache holds
    const ABREAST: usize = 4; // rows that are written together, as one row alone waits for each of its stores
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

/// Packs the steps `from..` of `N` rows, of which the first is row `m` of a tile of `rows`.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // as in `tile`
fn interleave_rows<S: Step, const N: usize>(
    x: Rows<'_>,
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
        whole[i] = &whole[i][..whole[0].len()]; // as many, so that no step asks
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
