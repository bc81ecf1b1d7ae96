//! Writes rows of a packed matrix on all threads: rows as they arrive, rows that are computed (such as a base with an
//! adapter merged), and single elements.

#![allow(clippy::needless_range_loop)] // indices, so that vectors stay in registers

use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::pool::ThreadPool;
use super::super::rows::SharedSlice;
use super::super::storage::Plain;
use super::{PANEL, PackLanes, PackedMatrix, Source, StorageDtype, TensorView, WeightElement, round_bf16};
use crate::weights::{FillRows, ReadRows, WriteElements};
use half::{bf16, f16};
use std::ops::Range;

/// Bytes of float32 rows that are computed at once. They stay in the second-level cache (1 MiB or more) beside the
/// values that they are computed from.
const TILE_BYTES: usize = 256 << 10;

/// The most panels that one task writes. For short rows more would gain nothing and leave threads without work.
const MOST_PANELS: usize = 4;

/// An element type of a panel, made from `S`. A cache line of a panel holds some neighbours of a row for each of 16
/// rows.
pub(super) trait PanelElement<S>: WeightElement<S> {
    /// Elements of one row in 16 cache lines of a panel.
    const PER_LINE: usize;

    /// # Safety
    /// `p` is readable for [`PER_LINE`](Self::PER_LINE) values.
    unsafe fn load<L: Lanes>(p: *const S) -> L;
}

/// Implements `PanelElement` for one pair of types: the elements of a row in 16 lines, and how they are loaded.
macro_rules! panel_element {
    ($stored:ty, $from:ty, $per_line:expr, $load:expr) => {
        impl PanelElement<$from> for $stored {
            const PER_LINE: usize = $per_line;

            #[inline(always)]
            unsafe fn load<L: Lanes>(p: *const $from) -> L {
                // SAFETY: the caller's promise.
                unsafe { $load(p) }
            }
        }
    };
}

// Bfloat16 is copied without conversion.
panel_element!(bf16, bf16, 2 * LANES, |p: *const bf16| L::load(p.cast()));
panel_element!(bf16, f32, 2 * LANES, |p| L::load_rounded_pairs(p));
panel_element!(f32, f32, LANES, |p| L::load(p));
panel_element!(f32, bf16, LANES, |p| L::load_bf16(p));
panel_element!(bf16, f16, 2 * LANES, |p| pairs_of_f16(p));
panel_element!(f32, f16, LANES, |p: *const f16| L::from_array(&std::array::from_fn(|i| (*p.add(i)).to_f32())));

/// Converts 32 float16 to 16 bfloat16 pairs.
///
/// # Safety
/// `p` is readable for 32 values.
#[inline(always)]
unsafe fn pairs_of_f16<L: Lanes>(p: *const f16) -> L {
    // SAFETY: the caller's promise.
    let bits = |i: usize| u32::from(round_bf16(unsafe { *p.add(i) }.to_f32()).to_bits());
    L::from_array(&std::array::from_fn(|i| f32::from_bits(bits(2 * i) | bits(2 * i + 1) << 16)))
}

/// Writes a panel of 16 rows, which start `stride` values apart and have a length `k` of whole lines. It uses
/// non-temporal stores, since the panel is not read before the next step.
pub(super) struct PackPanel<'a, D, S> {
    pub panel: &'a mut [D],
    pub k: usize,
    pub rows: &'a [S],
    pub stride: usize,
}

impl<D: PanelElement<S>, S> Kernel for PackPanel<'_, D, S> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { panel, k, rows, stride } = self;
        assert!(k.is_multiple_of(D::PER_LINE) && panel.len() == PANEL * k);
        assert!(k <= stride && rows.len() >= (PANEL - 1) * stride + k, "16 rows");
        assert!(panel.as_ptr().addr().is_multiple_of(64), "panels start with a cache line");
        for first in (0..k).step_by(D::PER_LINE) {
            let mut lines = [L::zero(); LANES];
            for row in 0..PANEL {
                // SAFETY: the row has `PER_LINE` values from here on.
                lines[row] = unsafe { D::load(rows.as_ptr().add(row * stride + first)) };
            }
            for (i, line) in L::transposed(&lines).into_iter().enumerate() {
                // SAFETY: 16 lines of 64 bytes of the panel, which starts at a cache line.
                unsafe { line.stream(panel.as_mut_ptr().add(PANEL * first).cast::<f32>().add(LANES * i)) };
            }
        }
        L::fence();
    }
}

/// Writes `rows` of a matrix to `panels`, which are exactly the panels that hold them.
pub(super) fn pack<const GROUP: usize, D>(panels: &mut [D], rows: &Range<usize>, k: usize, from: Source<'_>)
where
    D: PanelElement<bf16> + PanelElement<f16> + PanelElement<f32>,
{
    let Source { width, first_column, .. } = from;
    assert!(first_column + k <= width, "{k} columns from {first_column} on of {width}");
    match from.rows {
        TensorView::Bf16(values) => pack_as::<GROUP, D, _>(panels, rows, k, &values[first_column..], width),
        TensorView::F16(values) => pack_as::<GROUP, D, _>(panels, rows, k, &values[first_column..], width),
        TensorView::F32(values) => pack_as::<GROUP, D, _>(panels, rows, k, &values[first_column..], width),
    }
}

/// Writes `rows` of a matrix to `panels`, as [`pack`] does, from values whose rows start `stride` apart.
fn pack_as<const GROUP: usize, D: PanelElement<S>, S: Copy>(
    panels: &mut [D],
    rows: &Range<usize>,
    k: usize,
    values: &[S],
    stride: usize,
) {
    let isa = Isa::detect();
    let first = rows.start / PANEL;
    let panel_len = panels.len() / (rows.end.div_ceil(PANEL) - first);
    for (p, panel) in panels.chunks_exact_mut(panel_len).enumerate() {
        let lanes = rows.start.max((first + p) * PANEL)..rows.end.min((first + p + 1) * PANEL);
        let start = (lanes.start - rows.start) * stride;
        let rows = &values[start..start + (lanes.len() - 1) * stride + k];
        if lanes.len() == PANEL && k.is_multiple_of(D::PER_LINE) {
            isa.dispatch(PackPanel { panel, k, rows, stride });
        } else {
            isa.dispatch(PackLanes::<GROUP, D, S> { panel, first_lane: lanes.start % PANEL, k, rows, stride });
        }
    }
}

impl PackedMatrix {
    /// Stores `rows`, rounded to nearest even if the matrix is bfloat16. All threads of the pool call `fill` for some
    /// rows at a time.
    ///
    /// # Panics
    /// If `rows` pass the end of the matrix.
    pub fn fill_rows(&mut self, pool: &ThreadPool, rows: Range<usize>, fill: &FillRows<'_>) {
        match self.dtype {
            StorageDtype::Bf16 => self.fill_as::<2, bf16>(pool, rows, fill),
            StorageDtype::F32 => self.fill_as::<1, f32>(pool, rows, fill),
        }
    }

    fn fill_as<const GROUP: usize, D: PanelElement<f32>>(
        &mut self,
        pool: &ThreadPool,
        rows: Range<usize>,
        fill: &FillRows<'_>,
    ) {
        let k = self.k;
        let at_once = (TILE_BYTES / (4 * PANEL * k)).clamp(1, MOST_PANELS);
        self.for_panels(pool, &rows, at_once, at_once * PANEL * k, |mine, stored: &mut [D], scratch| {
            let values = &mut scratch[..mine.len() * k];
            fill(mine.clone(), values);
            pack_as::<GROUP, D, f32>(stored, &mine, k, values, k);
        });
    }

    /// Stores `rows` as `read` gives them, rounded as by [`PackedMatrix::fill_rows`]. All threads of the pool call
    /// `read` for some rows at a time.
    ///
    /// # Panics
    /// If `rows` pass the end of the matrix, or `read` gives another number of values than it was asked for.
    pub fn store_rows(&mut self, pool: &ThreadPool, rows: Range<usize>, read: &ReadRows<'_>) {
        match self.dtype {
            StorageDtype::Bf16 => self.store_as::<2, bf16>(pool, rows, read),
            StorageDtype::F32 => self.store_as::<1, f32>(pool, rows, read),
        }
    }

    fn store_as<const GROUP: usize, D>(&mut self, pool: &ThreadPool, rows: Range<usize>, read: &ReadRows<'_>)
    where
        D: PanelElement<bf16> + PanelElement<f16> + PanelElement<f32>,
    {
        let k = self.k;
        self.for_panels(pool, &rows, MOST_PANELS, 0, |mine, stored: &mut [D], _| {
            read(mine.clone(), &mut |rows| {
                assert_eq!(rows.len(), mine.len() * k, "values of rows {mine:?}");
                pack::<GROUP, D>(stored, &mine, k, Source { rows, width: k, first_column: 0 });
            });
        });
    }

    /// Stores the single elements of `rows` that `write` names, rounded as by [`PackedMatrix::fill_rows`]. All threads
    /// of the pool call `write` for some rows at a time.
    ///
    /// # Panics
    /// If `rows` pass the end of the matrix, or `write` names an element outside the rows that it was asked for.
    pub fn write_elements(&mut self, pool: &ThreadPool, rows: Range<usize>, write: &WriteElements<'_>) {
        match self.dtype {
            StorageDtype::Bf16 => self.write_elements_as::<2, bf16>(pool, rows, write),
            StorageDtype::F32 => self.write_elements_as::<1, f32>(pool, rows, write),
        }
    }

    fn write_elements_as<const GROUP: usize, D: WeightElement<f32>>(
        &mut self,
        pool: &ThreadPool,
        rows: Range<usize>,
        write: &WriteElements<'_>,
    ) {
        let k = self.k;
        let panel_len = PANEL * self.padded_k();
        self.for_panels(pool, &rows, MOST_PANELS, 0, |mine, stored: &mut [D], _| {
            write(mine.clone(), &mut |row, column, value| {
                assert!(mine.contains(&row) && column < k, "row {row}, column {column} of rows {mine:?} of {k}");
                let panel = (row / PANEL - mine.start / PANEL) * panel_len;
                stored[panel + (column / GROUP * PANEL + row % PANEL) * GROUP + column % GROUP] = D::rounded(value);
            });
        });
    }

    /// Calls `f(some of rows, the panels that hold them, scratch)` until all of `rows` are covered, with `at_once`
    /// panels per task.
    fn for_panels<D: Plain>(
        &mut self,
        pool: &ThreadPool,
        rows: &Range<usize>,
        at_once: usize,
        scratch: usize,
        f: impl Fn(Range<usize>, &mut [D], &mut [f32]) + Sync,
    ) {
        assert!(rows.start <= rows.end && rows.end <= self.n, "rows {rows:?} of a matrix of {} rows", self.n);
        if rows.is_empty() {
            return;
        }
        let panel_len = PANEL * self.padded_k();
        let (first, last) = (rows.start / PANEL, rows.end.div_ceil(PANEL));
        let stored = SharedSlice::new(self.storage.as_mut_slice::<D>());
        pool.run_with_scratch((last - first).div_ceil(at_once), scratch, |task, scratch| {
            let start = first + task * at_once;
            let panels = start..last.min(start + at_once);
            // SAFETY: each panel is in one task.
            let stored = unsafe { stored.part(panels.start * panel_len, panels.len() * panel_len) };
            f(rows.start.max(panels.start * PANEL)..rows.end.min(panels.end * PANEL), stored, scratch);
        });
    }
}
