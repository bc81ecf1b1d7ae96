//! Writes rows of keys and values to their slots. No closures in the kernels, for the reason that
//! [`tile`](super::super::tile) gives.

#![allow(clippy::needless_range_loop)] // indices, for the reason that `tile` gives

use super::super::isa::Kernel;
use super::super::lanes::{LANES, Lanes};
use super::super::pool::Cpu;
use super::super::rows::{Rows, SharedSlice};
use super::super::tile::{LINE, TileElement};
use super::KvLayout;
use half::bf16;
use std::ops::Range;

/// The fewest columns of a head that one task writes: a vector of bfloat16.
const COLUMNS: usize = 32;

/// An element type of a KV cache; a vector has [`LEN`](Self::LEN) elements.
pub(super) trait KvElement: TileElement {
    const LEN: usize = LINE / size_of::<Self>();
    const ZERO: Self;

    /// # Safety
    /// `p` is readable for `LEN` float32.
    unsafe fn rounded<L: Lanes>(p: *const f32) -> L;

    /// Reorders a vector whose lanes each hold neighbouring columns of one position: the result has the first column of
    /// all positions, then the next one.
    fn by_column<L: Lanes>(positions: L) -> L;
}

impl KvElement for bf16 {
    const ZERO: bf16 = bf16::ZERO;

    #[inline(always)]
    unsafe fn rounded<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_rounded_pairs(p) }
    }

    #[inline(always)]
    fn by_column<L: Lanes>(positions: L) -> L {
        positions.parted_pairs()
    }
}

impl KvElement for f32 {
    const ZERO: f32 = 0.0;

    #[inline(always)]
    unsafe fn rounded<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p) }
    }

    #[inline(always)]
    fn by_column<L: Lanes>(positions: L) -> L {
        positions
    }
}

/// Writes row `i` of `k` and `v` to slot `slots[i]`. Tasks are split by columns and not by rows, so that slots which
/// occur more than once are written in order, each cell by one thread.
pub(super) fn write<E: KvElement>(
    cpu: &Cpu,
    layout: KvLayout,
    (k, keys): (Rows<'_>, &mut [E]),
    (v, values): (Rows<'_>, &mut [E]),
    slots: &[u32],
) {
    let (keys, values) = (SharedSlice::new(keys), SharedSlice::new(values));
    let KvLayout { kv_heads, head_dim, .. } = layout;
    let parts = head_dim.div_ceil(COLUMNS);
    // Keys take longer, so they come first.
    cpu.for_ranges(2 * kv_heads * parts, 2 * COLUMNS * slots.len(), |from, to| {
        let mut part = from;
        while part < to {
            let (head, end) = (part / parts, to.min((part / parts + 1) * parts));
            let columns = part % parts * COLUMNS..head_dim.min((end - head * parts) * COLUMNS);
            part = end;
            if head < kv_heads {
                cpu.isa().dispatch(Keys(HeadColumns { layout, rows: k, slots, cells: &keys, head, columns }));
            } else {
                let head = head - kv_heads;
                cpu.isa().dispatch(Values(HeadColumns { layout, rows: v, slots, cells: &values, head, columns }));
            }
        }
    });
}

/// Some columns of one head, in all rows.
struct HeadColumns<'a, E> {
    layout: KvLayout,
    rows: Rows<'a>,
    slots: &'a [u32],
    cells: &'a SharedSlice<'a, E>,
    head: usize,
    columns: Range<usize>,
}

impl<E: KvElement> HeadColumns<'_, E> {
    /// The columns of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> &[f32] {
        let first = self.head * self.layout.head_dim;
        &self.rows.row(row)[first + self.columns.start..first + self.columns.end]
    }

    /// The start of this head in the block of a slot, and the slot's offset in the block.
    #[inline(always)]
    fn head_of(&self, slot: u32) -> (usize, usize) {
        let (block, offset) = (slot as usize / self.layout.block_size, slot as usize % self.layout.block_size);
        ((block * self.layout.kv_heads + self.head) * self.layout.head_len(), offset)
    }
}

/// Loads the elements of a row from `from` on as a vector, with zeros beyond its end.
#[inline(always)]
fn rounded<E: KvElement, L: Lanes>(row: &[f32], from: usize) -> L {
    let row = &row[from..];
    let mut short = [0.0; COLUMNS];
    let p = if row.len() >= E::LEN {
        row.as_ptr()
    } else {
        short[..row.len()].copy_from_slice(row);
        short.as_ptr()
    };
    // SAFETY: `p` is readable for `LEN` elements: of the row, or of `short`, which has `COLUMNS` and no `LEN` exceeds
    // that.
    unsafe { E::rounded(p) }
}

/// Writes keys. Column `d` of a slot is `d * block_size` elements after its column 0.
struct Keys<'a, E>(HeadColumns<'a, E>);

impl<E: KvElement> Kernel for Keys<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let slots = self.0.slots;
        let mut row = 0;
        while row < slots.len() {
            if self.is_vector(row) {
                self.prefetch::<L>(row + LANES);
                self.write_vectors::<L>(row);
                row += LANES;
            } else {
                self.prefetch::<L>(row + 1);
                self.write_row::<L>(row);
                row += 1;
            }
        }
    }
}

impl<E: KvElement> Keys<'_, E> {
    /// Whether this row and the next 15 have neighbouring slots that are a vector of one block.
    #[inline(always)]
    fn is_vector(&self, row: usize) -> bool {
        let slots = self.0.slots;
        if !self.0.layout.block_size.is_multiple_of(LANES)
            || !slots[row].is_multiple_of(LANES as u32)
            || slots.len() - row < LANES
        {
            return false;
        }
        let mut neighbours = true;
        for i in 1..LANES {
            neighbours &= slots[row + i] == slots[row] + i as u32;
        }
        neighbours
    }

    /// Prefetches the cells that a later row writes. They lie in at least half as many cache lines as the head has
    /// columns, and stores to a block that was not used recently would wait for most of them.
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, row: usize) {
        if row >= self.0.slots.len() {
            return;
        }
        let (cells, offset) = self.cells(self.0.slots[row]);
        let step = E::LEN.max(self.0.layout.block_size);
        for at in (offset..cells.len()).step_by(step) {
            L::prefetch_near((&raw const cells[at]).cast());
        }
    }

    /// These columns of a slot's block, and the slot's offset in the block.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // as `SharedSlice::part`
    fn cells(&self, slot: u32) -> (&mut [E], usize) {
        let HeadColumns { layout, cells, columns, .. } = &self.0;
        let (start, offset) = self.0.head_of(slot);
        let (from, len) = (columns.start * layout.block_size, columns.len() * layout.block_size);
        // SAFETY: these columns of every block belong to this task alone, which asks for them again only when it is
        // done with those it has.
        (unsafe { cells.part(start + from, len) }, offset)
    }

    /// Writes 16 rows with neighbouring slots, transposed in registers.
    #[inline(always)]
    fn write_vectors<L: Lanes>(&self, first: usize) {
        let (cells, offset) = self.cells(self.0.slots[first]);
        let block_size = self.0.layout.block_size;
        let wide = E::LEN / LANES; // columns in a lane
        let columns = self.0.columns.len();
        for d in (0..columns).step_by(E::LEN) {
            let mut positions = [L::zero(); LANES];
            for i in 0..LANES {
                positions[i] = rounded::<E, L>(self.0.row(first + i), d);
            }
            let lanes = L::transposed(&positions);
            for i in 0..LANES.min((columns - d) / wide) {
                let by_column = E::by_column(lanes[i]);
                let at = (d + i * wide) * block_size + offset;
                if wide * block_size == E::LEN || wide == 1 {
                    store(by_column, &mut cells[at..at + E::LEN]);
                } else {
                    let mut both = [E::ZERO; COLUMNS];
                    store(by_column, &mut both);
                    for column in 0..wide {
                        let at = at + column * block_size;
                        cells[at..at + LANES].copy_from_slice(&both[column * LANES..(column + 1) * LANES]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn write_row<L: Lanes>(&self, row: usize) {
        let (cells, offset) = self.cells(self.0.slots[row]);
        let (block_size, columns) = (self.0.layout.block_size, self.0.columns.len());
        for d in (0..columns).step_by(E::LEN) {
            let mut elements = [E::ZERO; COLUMNS];
            store(rounded::<E, L>(self.0.row(row), d), &mut elements);
            for i in 0..E::LEN.min(columns - d) {
                cells[(d + i) * block_size + offset] = elements[i];
            }
        }
    }
}

/// Stores a vector to the first `LEN` elements of `to`.
#[inline(always)]
fn store<E: KvElement, L: Lanes>(vector: L, to: &mut [E]) {
    assert!(to.len() >= E::LEN);
    // SAFETY: `LEN` elements are as long as a vector.
    unsafe { vector.store(to.as_mut_ptr().cast()) };
}

/// Writes values. The columns of a slot are adjacent.
struct Values<'a, E>(HeadColumns<'a, E>);

impl<E: KvElement> Kernel for Values<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (slots, columns) = (self.0.slots, self.0.columns.len());
        for row in 0..slots.len() {
            if row + LANES < slots.len() {
                // The cells of a later row are prefetched, as for keys.
                let ahead = self.cells(slots[row + LANES]);
                for d in (0..columns).step_by(E::LEN) {
                    L::prefetch_near((&raw const ahead[d]).cast());
                }
            }
            let to = self.cells(slots[row]);
            for d in (0..columns).step_by(E::LEN) {
                let vector = rounded::<E, L>(self.0.row(row), d);
                if columns - d >= E::LEN {
                    store(vector, &mut to[d..]);
                } else {
                    let mut elements = [E::ZERO; COLUMNS];
                    store(vector, &mut elements);
                    let left = &mut to[d..];
                    left.copy_from_slice(&elements[..left.len()]);
                }
            }
        }
    }
}

impl<E: KvElement> Values<'_, E> {
    /// These columns of a slot.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // as `SharedSlice::part`
    fn cells(&self, slot: u32) -> &mut [E] {
        let HeadColumns { layout, cells, columns, .. } = &self.0;
        let (start, offset) = self.0.head_of(slot);
        // SAFETY: these columns belong to this task alone, and it uses those of one slot at a time.
        unsafe { cells.part(start + offset * layout.head_dim + columns.start, columns.len()) }
    }
}
