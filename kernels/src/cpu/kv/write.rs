//! Rows of keys and values into their slots. No closures in the kernels, as in [`tile`](super::super::tile).

#![allow(clippy::needless_range_loop)] // indices, for the reason in `tile`

use super::super::isa::Kernel;
use super::super::lanes::{LANES, Lanes};
use super::super::pool::Cpu;
use super::super::rows::{Rows, SharedSlice};
use super::super::tile::{Element, LINE};
use super::KvLayout;
use half::bf16;
use std::ops::Range;

/// The fewest columns of a head that are a task: what a vector of bfloat16 holds.
const COLUMNS: usize = 32;

/// An element type of a cache, of which [`LEN`](Self::LEN) are a vector.
pub(super) trait Stored: Element {
    const LEN: usize = LINE / size_of::<Self>();
    const ZERO: Self;

    /// # Safety
    /// `p` is readable for `LEN` float32.
    unsafe fn rounded<L: Lanes>(p: *const f32) -> L;

    /// From lanes that hold neighbouring columns of one position each to one column of all positions after the other.
    fn by_column<L: Lanes>(positions: L) -> L;
}

impl Stored for bf16 {
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

impl Stored for f32 {
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

/// Writes row `i` of `k` and `v` in slot `slots[i]`. Tasks are columns and not rows: slots that repeat are then written
/// in order, each cell by one thread.
pub(super) fn write<E: Stored>(
    cpu: &Cpu,
    layout: KvLayout,
    (k, keys): (Rows<'_>, &mut [E]),
    (v, values): (Rows<'_>, &mut [E]),
    slots: &[u32],
) {
    let (keys, values) = (SharedSlice::new(keys), SharedSlice::new(values));
    let KvLayout { kv_heads, head_dim, .. } = layout;
    let parts = head_dim.div_ceil(COLUMNS);
    // Keys first, which take longer.
    cpu.for_ranges(2 * kv_heads * parts, 2 * COLUMNS * slots.len(), |from, to| {
        let mut part = from;
        while part < to {
            let (head, end) = (part / parts, to.min((part / parts + 1) * parts));
            let columns = part % parts * COLUMNS..head_dim.min((end - head * parts) * COLUMNS);
            part = end;
            if head < kv_heads {
                cpu.isa().dispatch(Keys(Part { layout, rows: k, slots, cells: &keys, head, columns }));
            } else {
                let head = head - kv_heads;
                cpu.isa().dispatch(Values(Part { layout, rows: v, slots, cells: &values, head, columns }));
            }
        }
    });
}

/// Columns of a head, of all rows.
struct Part<'a, E> {
    layout: KvLayout,
    rows: Rows<'a>,
    slots: &'a [u32],
    cells: &'a SharedSlice<'a, E>,
    head: usize,
    columns: Range<usize>,
}

impl<E: Stored> Part<'_, E> {
    /// The columns of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> &[f32] {
        let first = self.head * self.layout.head_dim;
        &self.rows.row(row)[first + self.columns.start..first + self.columns.end]
    }

    /// Where this head begins in the block of a slot, and the slot's offset there.
    #[inline(always)]
    fn head_of(&self, slot: u32) -> (usize, usize) {
        let (block, offset) = (slot as usize / self.layout.block_size, slot as usize % self.layout.block_size);
        ((block * self.layout.kv_heads + self.head) * self.layout.head_len(), offset)
    }
}

/// Elements `from..` of a row as a vector, zeros where it has no more.
#[inline(always)]
fn rounded<E: Stored, L: Lanes>(row: &[f32], from: usize) -> L {
    let row = &row[from..];
    let mut short = [0.0; COLUMNS];
    let p = if row.len() >= E::LEN {
        row.as_ptr()
    } else {
        short[..row.len()].copy_from_slice(row);
        short.as_ptr()
    };
    // SAFETY: `LEN` elements of the row, or of as many as `COLUMNS`, which no `LEN` exceeds.
    unsafe { E::rounded(p) }
}

/// Cell `d` of a column is `d * block_size` after that of column 0.
struct Keys<'a, E>(Part<'a, E>);

impl<E: Stored> Kernel for Keys<'_, E> {
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

impl<E: Stored> Keys<'_, E> {
    /// Whether this row and the next are 16 neighbours that lie in one block as vectors do.
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

    /// Asks for the cells that a later row writes. They lie in half as many cache lines as a head has columns, or more:
    /// of a block that was not used of late, stores alone would wait for most of them.
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

    /// These columns of a slot's block.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // as `SharedSlice::part`
    fn cells(&self, slot: u32) -> (&mut [E], usize) {
        let Part { layout, cells, columns, .. } = &self.0;
        let (start, offset) = self.0.head_of(slot);
        let (from, len) = (columns.start * layout.block_size, columns.len() * layout.block_size);
        // SAFETY: these columns of every block are this task's alone, which asks for them again only when it is done
        // with those it has.
        (unsafe { cells.part(start + from, len) }, offset)
    }

    /// 16 neighbours: as many vectors are transposed in registers.
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

/// The first `LEN` elements become those of the vector.
#[inline(always)]
fn store<E: Stored, L: Lanes>(vector: L, to: &mut [E]) {
    assert!(to.len() >= E::LEN);
    // SAFETY: `LEN` elements are as long as a vector.
    unsafe { vector.store(to.as_mut_ptr().cast()) };
}

/// A row's columns are neighbours.
struct Values<'a, E>(Part<'a, E>);

impl<E: Stored> Kernel for Values<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (slots, columns) = (self.0.slots, self.0.columns.len());
        for row in 0..slots.len() {
            if row + LANES < slots.len() {
                // As for keys.
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

impl<E: Stored> Values<'_, E> {
    /// These columns of a slot.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // as `SharedSlice::part`
    fn cells(&self, slot: u32) -> &mut [E] {
        let Part { layout, cells, columns, .. } = &self.0;
        let (start, offset) = self.0.head_of(slot);
        // SAFETY: as for keys: this task's alone, and of one slot at a time.
        unsafe { cells.part(start + offset * layout.head_dim + columns.start, columns.len()) }
    }
}
