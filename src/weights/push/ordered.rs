//! A tensor that is passed on as it comes, in order, before it is known to be right; only what comes too early is kept.

use std::collections::BTreeMap;

use rollout_kernels::ROW_GROUP;
use twox_hash::xxhash3_128::Hasher;

use super::finite::first_not_finite;
use crate::weights::Dtype;

/// Hashed, checked and passed on at a time, so that all but the first look find it in the core's cache.
const PIECE_BYTES: usize = 256 << 10;

/// Is given some whole rows, and the number of the first.
pub(super) type Sink<'a> = dyn FnMut(usize, &[u8]) + 'a;

/// How a tensor's bytes are rows of values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub dtype: Dtype,
    pub columns: usize,
}

impl Layout {
    pub fn row_bytes(self) -> usize {
        self.columns * self.dtype.size()
    }

    /// Rows in a piece: whole groups of a matrix's rows, for those are written fastest.
    pub fn piece_rows(self) -> usize {
        (PIECE_BYTES / self.row_bytes() / ROW_GROUP).max(1) * ROW_GROUP
    }
}

/// What of a tensor has come.
pub(super) struct Ordered {
    layout: Layout,
    hasher: Hasher,
    /// Bytes from its start that were hashed, and passed on with their rows.
    done: usize,
    /// The beginning of a row whose end has not come; its bytes are among those that are done.
    row: Vec<u8>,
    /// Index of the first value that is not finite.
    bad: Option<usize>,
    /// Pieces by their offset, none of which starts where the rest ends.
    early: BTreeMap<usize, Vec<u8>>,
    early_bytes: usize,
}

impl Ordered {
    pub fn new(layout: Layout) -> Self {
        let early = BTreeMap::new();
        Self { layout, hasher: Hasher::new(), done: 0, row: Vec::new(), bad: None, early, early_bytes: 0 }
    }

    /// Bytes from its start that have come.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Bytes that wait for those before them.
    pub fn early_bytes(&self) -> usize {
        self.early_bytes
    }

    /// Pieces that wait.
    pub fn early_pieces(&self) -> usize {
        self.early.len()
    }

    pub fn hasher(&self) -> &Hasher {
        &self.hasher
    }

    pub fn bad(&self) -> Option<usize> {
        self.bad
    }

    /// Whether some of the bytes have come.
    pub fn overlaps(&self, start: usize, end: usize) -> bool {
        let before = self.early.range(..end).next_back();
        start < self.done || before.is_some_and(|(offset, piece)| offset + piece.len() > start)
    }

    /// Takes the bytes of a piece that does not overlap.
    pub fn take(&mut self, offset: usize, data: &[u8], sink: &mut Sink<'_>) {
        if offset != self.done {
            self.early_bytes += data.len();
            self.early.insert(offset, data.to_vec());
            return;
        }
        self.pass(data, sink);
        while let Some(next) = self.early.remove(&self.done) {
            self.early_bytes -= next.len();
            self.pass(&next, sink);
        }
    }

    /// Takes the next bytes.
    fn pass(&mut self, mut data: &[u8], sink: &mut Sink<'_>) {
        let (row_bytes, piece_rows) = (self.layout.row_bytes(), self.layout.piece_rows());
        while !data.is_empty() {
            if !self.row.is_empty() || data.len() < row_bytes {
                let (part, rest) = data.split_at(data.len().min(row_bytes - self.row.len()));
                self.row.extend_from_slice(part);
                self.hasher.write(part);
                self.done += part.len();
                data = rest;
                if self.row.len() == row_bytes {
                    let row = std::mem::take(&mut self.row);
                    self.emit(self.done / row_bytes - 1, &row, sink);
                }
                continue;
            }
            // Up to where a piece ends that began with the tensor.
            let first = self.done / row_bytes;
            let rows = (data.len() / row_bytes).min(piece_rows - first % piece_rows);
            let (piece, rest) = data.split_at(rows * row_bytes);
            self.emit(first, piece, sink);
            // Last: what a sender changes too early in memory that it shares is then either not passed on or noticed.
            self.hasher.write(piece);
            self.done += piece.len();
            data = rest;
        }
    }

    fn emit(&mut self, first_row: usize, rows: &[u8], sink: &mut Sink<'_>) {
        let Layout { dtype, columns } = self.layout;
        if self.bad.is_none() {
            self.bad = first_not_finite(rows, dtype).map(|index| first_row * columns + index);
        }
        sink(first_row, rows);
    }
}
