//! A tensor's rows in order, whatever the order in which its bytes come. Rows are passed on before the tensor is known
//! to be right, and only bytes that come too early are kept.

use std::collections::BTreeMap;
use std::ops::Range;

use rollout_kernels::ROW_GROUP;

use super::verify::{Digest, Verifier};
use crate::error::Result;
use crate::weights::Dtype;

/// Bytes of a tensor that are checked, packed and hashed at a time: few enough that they are still in the core's cache
/// when they are packed and hashed.
const PIECE_BYTES: usize = 256 << 10;

/// How the bytes of a tensor are rows of values.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowLayout {
    pub dtype: Dtype,
    pub columns: usize,
}

impl RowLayout {
    pub fn row_bytes(self) -> usize {
        self.columns * self.dtype.size()
    }

    /// Rows that are passed on at a time: whole groups of a matrix's rows, for those are written fastest.
    pub fn piece_rows(self) -> usize {
        (PIECE_BYTES / self.row_bytes() / ROW_GROUP).max(1) * ROW_GROUP
    }
}

/// Some whole rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub layout: RowLayout,
    /// The tensor's row that `bytes` begin with.
    pub first: usize,
    pub bytes: &'a [u8],
}

impl Rows<'_> {
    /// The tensor's rows that these are.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.bytes.len() / self.layout.row_bytes()
    }
}

/// Takes the rows of a tensor, each once and in order.
pub(super) type RowSink<'a> = dyn FnMut(Rows<'_>) + 'a;

/// Puts the rows of one tensor in order, and verifies the tensor.
pub(super) struct RowStream {
    layout: RowLayout,
    verifier: Verifier,
    /// Bytes from the tensor's start that have been hashed, and passed on as far as they are whole rows.
    done: usize,
    /// The beginning of a row whose end has not come. Its bytes count as done.
    row: Vec<u8>,
    /// Pieces that came before those in front of them, by their offset.
    early: BTreeMap<usize, Vec<u8>>,
    early_bytes: usize,
}

impl RowStream {
    pub fn new(layout: RowLayout) -> Self {
        let verifier = Verifier::new(Some(layout.dtype));
        Self { layout, verifier, done: 0, row: Vec::new(), early: BTreeMap::new(), early_bytes: 0 }
    }

    /// Bytes from the tensor's start that have come without a gap.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Bytes that are kept until those in front of them have come.
    pub fn early_bytes(&self) -> usize {
        self.early_bytes
    }

    /// Pieces that are kept until the bytes in front of them have come.
    pub fn early_pieces(&self) -> usize {
        self.early.len()
    }

    /// Whether some of these bytes of the tensor have come before.
    pub fn overlaps(&self, piece: &Range<usize>) -> bool {
        let before = self.early.range(..piece.end).next_back();
        piece.start < self.done || before.is_some_and(|(offset, early)| offset + early.len() > piece.start)
    }

    /// Takes the bytes of a piece that overlaps nothing: passes on the rows that are whole with it, or keeps it if
    /// bytes in front of it are missing.
    pub fn take(&mut self, offset: usize, data: &[u8], sink: &mut RowSink<'_>) {
        if offset != self.done {
            self.early_bytes += data.len();
            self.early.insert(offset, data.to_vec());
            return;
        }
        self.take_next(data, sink);
        while let Some(next) = self.early.remove(&self.done) {
            self.early_bytes -= next.len();
            self.take_next(&next, sink);
        }
    }

    /// Verifies the tensor `name`, all of whose bytes were taken.
    ///
    /// # Errors
    /// As for [`Verifier::verify`].
    pub fn verify(&self, name: &str, announced: Option<Digest>) -> Result<Digest> {
        self.verifier.verify(name, announced)
    }

    /// Takes the bytes that follow those that are done.
    fn take_next(&mut self, mut data: &[u8], sink: &mut RowSink<'_>) {
        let (row_bytes, piece_rows) = (self.layout.row_bytes(), self.layout.piece_rows());
        while !data.is_empty() {
            if !self.row.is_empty() || data.len() < row_bytes {
                let (part, rest) = data.split_at(data.len().min(row_bytes - self.row.len()));
                self.row.extend_from_slice(part);
                self.verifier.hash(part);
                self.done += part.len();
                data = rest;
                if self.row.len() == row_bytes {
                    let row = std::mem::take(&mut self.row);
                    self.pass_on(self.done / row_bytes - 1, &row, sink);
                }
                continue;
            }
            // Up to the next multiple of `piece_rows`, so that pieces are whole groups however the bytes are cut.
            let first = self.done / row_bytes;
            let rows = (data.len() / row_bytes).min(piece_rows - first % piece_rows);
            let (piece, rest) = data.split_at(rows * row_bytes);
            self.pass_on(first, piece, sink);
            // Hashed last: what a sender changes too early in memory that it shares is either not passed on, or
            // noticed.
            self.verifier.hash(piece);
            self.done += piece.len();
            data = rest;
        }
    }

    fn pass_on(&mut self, first: usize, bytes: &[u8], sink: &mut RowSink<'_>) {
        self.verifier.check_values(first * self.layout.columns, bytes);
        sink(Rows { layout: self.layout, first, bytes });
    }
}
