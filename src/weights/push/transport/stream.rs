//! Tensors that come in pieces: gathered in any order, or passed on as rows in order, whatever the order of the pieces.

use std::collections::BTreeMap;
use std::ops::Range;

use rollout_kernels::ROW_GROUP;

use super::source_file::PIECE_BYTES;
use crate::error::{Error, Result};
use crate::weights::parameters::Dtype;
use crate::weights::push::verify::Verifier;
use crate::weights::update::{PushedRows, RowLayout, TensorBuffer};

/// Most pieces of one tensor that may be there with gaps between them. A sender that goes through a tensor in order has
/// one; more are for senders with several threads, and the bound for hostile ones.
const MAX_PIECES: usize = 4096;

/// Takes the rows of a tensor, each once and in order.
type RowSink<'a> = dyn FnMut(PushedRows<'_>) + 'a;

/// A tensor that is kept while it comes in pieces, in any order.
pub(in crate::weights::push) struct PartialTensor {
    buffer: TensorBuffer,
    /// The bytes that have come: ascending ranges with gaps between them.
    pieces: Vec<Range<usize>>,
    verifier: Verifier,
    /// Bytes from the tensor's start that have been hashed.
    hashed: usize,
}

impl PartialTensor {
    /// Memory for a tensor of `bytes` bytes. Its values have `dtype`; `None` for a payload that is not values.
    ///
    /// # Errors
    /// As for [`TensorBuffer::zeroed`].
    pub fn new(bytes: usize, dtype: Option<Dtype>) -> Result<Self> {
        let buffer = TensorBuffer::zeroed(bytes)?;
        Ok(Self { buffer, pieces: Vec::new(), verifier: Verifier::new(dtype), hashed: 0 })
    }

    pub fn received(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }

    /// Keeps a piece of the tensor `name`, and joins it with its neighbours. Returns whether the tensor is whole.
    ///
    /// # Errors
    /// `InvalidArgument` if the piece overlaps another or leaves too many gaps.
    pub fn take(&mut self, name: &str, piece: Range<usize>, data: &[u8]) -> Result<bool> {
        let pieces = &mut self.pieces;
        let next = pieces.partition_point(|p| p.end <= piece.start);
        if pieces.get(next).is_some_and(|p| p.start < piece.end) {
            return Err(overlaps(name, &piece));
        }
        self.buffer[piece.clone()].copy_from_slice(data);
        if self.hashed == piece.start {
            self.verifier.hash(data);
            self.hashed = piece.end;
        }
        let follows = next > 0 && pieces[next - 1].end == piece.start;
        let precedes = pieces.get(next).is_some_and(|p| p.start == piece.end);
        match (follows, precedes) {
            (true, true) => pieces[next - 1].end = pieces.remove(next).end,
            (true, false) => pieces[next - 1].end = piece.end,
            (false, true) => pieces[next].start = piece.start,
            (false, false) => pieces.insert(next, piece),
        }
        check_gaps(name, pieces.len())?;
        Ok(pieces[0].len() == self.buffer.len())
    }

    /// The bytes of the whole tensor with what was found in them.
    pub fn finish(&mut self) -> (&Verifier, TensorBuffer) {
        self.verifier.hash(&self.buffer[self.hashed..]);
        self.verifier.check_values(0, &self.buffer);
        (&self.verifier, std::mem::take(&mut self.buffer))
    }
}

/// Puts the rows of one tensor in order. Rows are passed on before the tensor is verified, and only bytes that come
/// before those in front of them are kept.
pub(in crate::weights::push) struct RowStream {
    layout: RowLayout,
    pub verifier: Verifier,
    /// Bytes from the tensor's start that have been hashed, and passed on as far as they are whole rows.
    pub done: usize,
    /// The beginning of a row whose end has not come. Its bytes count as done.
    row: Vec<u8>,
    /// Pieces that came before those in front of them, by their offset.
    early: BTreeMap<usize, Vec<u8>>,
    pub early_bytes: usize,
}

impl RowStream {
    pub fn new(layout: RowLayout) -> Self {
        let verifier = Verifier::new(Some(layout.dtype));
        Self { layout, verifier, done: 0, row: Vec::new(), early: BTreeMap::new(), early_bytes: 0 }
    }

    /// Rows that are passed on at a time: whole groups of a matrix's rows, for those are written fastest.
    pub fn piece_rows(&self) -> usize {
        (PIECE_BYTES / self.layout.row_bytes() / ROW_GROUP).max(1) * ROW_GROUP
    }

    /// Takes a piece of the tensor `name`: passes on the rows that are whole with it, or keeps it if bytes in front of
    /// it are missing and it has at most `most_early` bytes.
    ///
    /// # Errors
    /// As for [`PartialTensor::take`]; `ResourceExhausted` if the piece comes too early and is too large.
    pub fn take(
        &mut self,
        name: &str,
        piece: Range<usize>,
        data: &[u8],
        most_early: u64,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let before = self.early.range(..piece.end).next_back();
        if piece.start < self.done || before.is_some_and(|(offset, early)| offset + early.len() > piece.start) {
            return Err(overlaps(name, &piece));
        }
        if piece.start != self.done {
            if piece.len() as u64 > most_early {
                return Err(Error::ResourceExhausted(format!(
                    "tensor {name:?}: bytes {}.. come before those from {} on, and there is no room to keep them; send \
                     each tensor from its beginning to its end",
                    piece.start, self.done
                )));
            }
            self.early_bytes += data.len();
            self.early.insert(piece.start, data.to_vec());
            return check_gaps(name, self.early.len());
        }
        self.take_next(data, sink);
        while let Some(next) = self.early.remove(&self.done) {
            self.early_bytes -= next.len();
            self.take_next(&next, sink);
        }
        Ok(())
    }

    /// Takes the bytes that follow those that are done.
    pub fn take_next(&mut self, mut data: &[u8], sink: &mut RowSink<'_>) {
        let (row_bytes, piece_rows) = (self.layout.row_bytes(), self.piece_rows());
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
            // Hashed last: a change that a sender makes too early in shared memory is either not passed on, or noticed.
            self.verifier.hash(piece);
            self.done += piece.len();
            data = rest;
        }
    }

    fn pass_on(&mut self, first: usize, bytes: &[u8], sink: &mut RowSink<'_>) {
        self.verifier.check_values(first * self.layout.columns, bytes);
        sink(PushedRows { layout: self.layout, first, bytes });
    }
}

/// The error for a piece of the tensor `name`, some of whose bytes have come before.
pub(in crate::weights::push) fn overlaps(name: &str, piece: &Range<usize>) -> Error {
    let Range { start, end } = piece;
    Error::invalid("chunk", format!("tensor {name:?}: bytes {start}..{end} overlap bytes that were sent before"))
}

fn check_gaps(name: &str, pieces: usize) -> Result<()> {
    if pieces <= MAX_PIECES {
        return Ok(());
    }
    let what = format!("tensor {name:?}: its chunks leave {MAX_PIECES} gaps; send them nearer to their order");
    Err(Error::invalid("chunk", what))
}
