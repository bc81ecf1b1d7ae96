//! Weights made where they are stored: a base with an adapter merged, single elements that change.

#![allow(clippy::needless_range_loop)] // indices, so that vectors stay in registers

use super::super::isa::{Isa, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::pool::ThreadPool;
use super::super::rows::SharedSlice;
use super::super::storage::Plain;
use super::{PANEL, Pack, PackedMatrix, Stored, WeightDtype};
use half::bf16;
use std::ops::Range;

/// Rows made at once, as float32: they stay in the second-level cache (1 MiB or more) beside what they are made from.
const TILE_BYTES: usize = 256 << 10;

/// Panels made at once where rows are short: more gain nothing and would leave threads without work.
const MOST_PANELS: usize = 4;

/// Makes the values of some whole rows, row-major; finds their content unspecified. Called from several threads.
pub type Fill<'a> = dyn Fn(Range<usize>, &mut [f32]) + Sync + 'a;

/// Calls the function it is given with (row, column, value) of each element of some whole rows. Called from several
/// threads.
pub type WriteElements<'a> = dyn Fn(Range<usize>, &mut dyn FnMut(usize, usize, f32)) + Sync + 'a;

/// An element of a panel, of which a line of 64 bytes holds some neighbours of each of 16 rows.
trait Packed: Stored<f32> {
    /// Neighbours of a row in 16 lines.
    const PER_LINE: usize;

    /// # Safety
    /// `p` is readable for [`PER_LINE`](Self::PER_LINE) float32.
    unsafe fn load<L: Lanes>(p: *const f32) -> L;
}

impl Packed for bf16 {
    const PER_LINE: usize = 2 * LANES;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_rounded_pairs(p) }
    }
}

impl Packed for f32 {
    const PER_LINE: usize = LANES;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p) }
    }
}

/// Writes a panel of 16 rows whose length `k` is whole lines, past the caches: it is not read before the next step.
struct PackWhole<'a, D> {
    panel: &'a mut [D],
    k: usize,
    rows: &'a [f32],
}

impl<D: Packed> Kernel for PackWhole<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { panel, k, rows } = self;
        assert!(k.is_multiple_of(D::PER_LINE) && rows.len() == PANEL * k && panel.len() == PANEL * k);
        assert!(panel.as_ptr().addr().is_multiple_of(64), "panels start with a cache line");
        for first in (0..k).step_by(D::PER_LINE) {
            let mut lines = [L::zero(); LANES];
            for row in 0..PANEL {
                // SAFETY: the row has a whole line from here on.
                lines[row] = unsafe { D::load(rows.as_ptr().add(row * k + first)) };
            }
            // SAFETY: 16 lines of 64 bytes of the panel, which starts with a line.
            unsafe { L::stream_transposed(&lines, panel.as_mut_ptr().add(PANEL * first).cast()) };
        }
        L::fence();
    }
}

impl PackedMatrix {
    /// Stores `rows`, rounded to nearest even where the matrix is bfloat16. `fill` makes them on all threads of the
    /// pool, some at a time.
    ///
    /// # Panics
    /// If `rows` pass the end.
    pub fn fill_rows(&mut self, pool: &ThreadPool, rows: Range<usize>, fill: &Fill<'_>) {
        match self.dtype {
            WeightDtype::Bf16 => self.fill_as::<2, bf16>(pool, rows, fill),
            WeightDtype::F32 => self.fill_as::<1, f32>(pool, rows, fill),
        }
    }

    fn fill_as<const GROUP: usize, D: Packed>(&mut self, pool: &ThreadPool, rows: Range<usize>, fill: &Fill<'_>) {
        let (k, isa) = (self.k, Isa::detect());
        let at_once = (TILE_BYTES / (4 * PANEL * k)).clamp(1, MOST_PANELS);
        let tile = |panels: Range<usize>, stored: &mut [D], scratch: &mut [f32]| {
            let mine = rows.start.max(panels.start * PANEL)..rows.end.min(panels.end * PANEL);
            let values = &mut scratch[..mine.len() * k];
            fill(mine.clone(), values);
            let mut row = mine.start;
            for (p, panel) in panels.clone().zip(stored.chunks_exact_mut(stored.len() / panels.len())) {
                let end = mine.end.min((p + 1) * PANEL);
                let values = &values[(row - mine.start) * k..(end - mine.start) * k];
                if end - row == PANEL && k.is_multiple_of(D::PER_LINE) {
                    isa.dispatch(PackWhole { panel, k, rows: values });
                } else {
                    isa.dispatch(Pack::<GROUP, D, f32> { panel, first_lane: row % PANEL, k, rows: values });
                }
                row = end;
            }
        };
        self.for_panels(pool, &rows, at_once, at_once * PANEL * k, tile);
    }

    /// Stores single elements of `rows`, which `write` names on all threads of the pool, some rows at a time; rounds as
    /// [`PackedMatrix::fill_rows`] does.
    ///
    /// # Panics
    /// If `rows` pass the end, or an element is outside the rows it was asked for.
    pub fn write_elements(&mut self, pool: &ThreadPool, rows: Range<usize>, write: &WriteElements<'_>) {
        match self.dtype {
            WeightDtype::Bf16 => self.write_elements_as::<2, bf16>(pool, rows, write),
            WeightDtype::F32 => self.write_elements_as::<1, f32>(pool, rows, write),
        }
    }

    fn write_elements_as<const GROUP: usize, D: Stored<f32>>(
        &mut self,
        pool: &ThreadPool,
        rows: Range<usize>,
        write: &WriteElements<'_>,
    ) {
        let k = self.k;
        self.for_panels(pool, &rows, MOST_PANELS, 0, |panels, stored: &mut [D], _| {
            let mine = rows.start.max(panels.start * PANEL)..rows.end.min(panels.end * PANEL);
            let panel_len = stored.len() / panels.len();
            write(mine.clone(), &mut |row, column, value| {
                assert!(mine.contains(&row) && column < k, "row {row}, column {column} of rows {mine:?} of {k}");
                let panel = (row / PANEL - panels.start) * panel_len;
                stored[panel + (column / GROUP * PANEL + row % PANEL) * GROUP + column % GROUP] = D::rounded(value);
            });
        });
    }

    /// Calls `f(panels, their storage, scratch)` for all panels that hold `rows`, `at_once` in one task.
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
            f(panels, stored, scratch);
        });
    }
}
