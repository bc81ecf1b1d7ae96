//! The receipt of one pushed tensor: how much of it has come, and where its bytes are until they are used.

use std::ops::Range;

use rollout_kernels::Digested;

use super::buffer::Buffer;
use super::row_stream::{RowLayout, RowSink, RowStream};
use super::source::SourceFile;
use super::verify::{Digest, Verifier, verify};
use crate::error::{Error, Result};
use crate::weights::Dtype;

/// Bytes of a file that are read, hashed and checked at a time, so that the second and third find them in the core's
/// cache.
const PIECE_BYTES: usize = 256 << 10;
/// Most pieces of one tensor that may be there with gaps between them. A sender that goes through a tensor in order has
/// one; more are for senders with several threads, and the bound for hostile ones.
const MAX_PIECES: usize = 4096;

/// What of one tensor has come. Either the tensor is kept ([`Receipt::gather`], [`Receipt::read`]), or its rows are
/// passed on ([`Receipt::stream`], [`Receipt::stream_file`], [`Receipt::take_digested`]).
pub(super) struct Receipt {
    /// Bytes of the tensor as transported.
    bytes: usize,
    /// The dtype of the tensor's values; `None` for a payload that is not values.
    dtype: Option<Dtype>,
    /// The digest that the sender announced; `None` where it announced none.
    announced: Option<Digest>,
    state: State,
}

enum State {
    /// Nothing has come, and no memory is taken.
    Untouched,
    /// The tensor comes in pieces, and is kept.
    Gathering(Box<Gathering>),
    /// The tensor comes in pieces, and its rows are passed on.
    Streaming(Box<RowStream>),
    /// The tensor is whole, verified and kept.
    Verified { digest: Digest, buffer: Buffer },
    /// The tensor was whole and verified. Its bytes were passed on, or taken.
    Taken { digest: Digest },
}

impl Receipt {
    pub fn new(bytes: usize, dtype: Option<Dtype>, announced: Option<Digest>) -> Self {
        Self { bytes, dtype, announced, state: State::Untouched }
    }

    /// Bytes of the whole tensor as transported.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_untouched(&self) -> bool {
        matches!(self.state, State::Untouched)
    }

    /// Whether the tensor, or a part of it, is kept in memory of its size.
    pub fn is_kept(&self) -> bool {
        matches!(self.state, State::Gathering(_) | State::Verified { .. })
    }

    /// How many bytes of the tensor have come.
    pub fn received(&self) -> usize {
        match &self.state {
            State::Untouched => 0,
            State::Gathering(gathering) => gathering.received(),
            State::Streaming(stream) => stream.done() + stream.early_bytes(),
            State::Verified { .. } | State::Taken { .. } => self.bytes,
        }
    }

    /// The digest of a tensor that is whole and verified.
    pub fn digest(&self) -> Option<Digest> {
        match &self.state {
            State::Verified { digest, .. } | State::Taken { digest } => Some(*digest),
            _ => None,
        }
    }

    /// The verified bytes of a tensor that is kept, unless they were taken.
    pub fn verified(&self) -> Option<&Buffer> {
        match &self.state {
            State::Verified { buffer, .. } => Some(buffer),
            _ => None,
        }
    }

    /// Takes the verified bytes of a tensor that is kept; `None` if they were taken before.
    pub fn take(&mut self) -> Option<Buffer> {
        let State::Verified { digest, buffer } = &mut self.state else { return None };
        let (digest, buffer) = (*digest, std::mem::take(buffer));
        self.state = State::Taken { digest };
        Some(buffer)
    }

    /// Bytes of a tensor that is passed on which are kept until those in front of them have come.
    pub fn early_bytes(&self) -> u64 {
        match &self.state {
            State::Streaming(stream) => stream.early_bytes() as u64,
            _ => 0,
        }
    }

    /// Keeps bytes of the tensor `name`. True if the tensor is whole and verified with them.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are outside the tensor, have come before, or leave too many gaps; as for
    /// [`Verifier::verify`] if the tensor is whole with them.
    pub fn gather(&mut self, name: &str, offset: u64, data: &[u8]) -> Result<bool> {
        let piece = self.check_inside(name, offset, data)?;
        if data.is_empty() {
            return Ok(false);
        }
        if self.is_untouched() {
            self.state = State::Gathering(Box::new(Gathering::new(self.bytes, self.dtype)?));
        }
        let State::Gathering(gathering) = &mut self.state else { return Err(overlaps(name, &piece)) };
        if gathering.overlaps(&piece) {
            return Err(overlaps(name, &piece));
        }
        gathering.take(piece, data);
        if gathering.pieces.len() > MAX_PIECES {
            return Err(too_many_gaps(name));
        }
        if !gathering.is_whole() {
            return Ok(false);
        }
        let digest = gathering.verify(name, self.announced)?;
        self.state = State::Verified { digest, buffer: std::mem::take(&mut gathering.buffer) };
        Ok(true)
    }

    /// Reads the whole tensor `name` from `offset` of a file, verifies and keeps it.
    ///
    /// # Errors
    /// `DataLoss` if the file has become too short; as for [`Verifier::verify`].
    pub fn read(&mut self, name: &str, file: &SourceFile, offset: u64) -> Result<()> {
        let mut buffer = Buffer::zeroed(self.bytes)?;
        let mut verifier = Verifier::new(self.dtype);
        let mut done = 0;
        for piece in buffer.chunks_mut(PIECE_BYTES) {
            file.read(name, offset + done as u64, piece)?;
            verifier.hash(piece);
            verifier.check_values(done / self.dtype.map_or(1, Dtype::size), piece);
            done += piece.len();
        }
        self.state = State::Verified { digest: verifier.verify(name, self.announced)?, buffer };
        Ok(())
    }

    /// Passes the rows that are whole with these bytes of the tensor `name` on to `sink`, and verifies the tensor with
    /// its last bytes. Bytes that come before those in front of them are kept, if they are at most `room`.
    ///
    /// # Errors
    /// As for [`Receipt::gather`]; `ResourceExhausted` if the bytes come too early and are more than `room`.
    pub fn stream(
        &mut self,
        name: &str,
        (offset, data): (u64, &[u8]),
        layout: RowLayout,
        room: u64,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let piece = self.check_inside(name, offset, data)?;
        if data.is_empty() {
            return Ok(());
        }
        if self.is_untouched() {
            self.state = State::Streaming(Box::new(RowStream::new(layout)));
        }
        let State::Streaming(stream) = &mut self.state else { return Err(overlaps(name, &piece)) };
        if stream.overlaps(&piece) {
            return Err(overlaps(name, &piece));
        }
        if piece.start != stream.done() && piece.len() as u64 > room {
            return Err(Error::ResourceExhausted(format!(
                "tensor {name:?}: bytes {}.. come before those from {} on, and there is no room to keep them; send \
                 each tensor from its beginning to its end",
                piece.start,
                stream.done()
            )));
        }
        stream.take(piece.start, data, sink);
        if stream.early_pieces() > MAX_PIECES {
            return Err(too_many_gaps(name));
        }
        if stream.done() == self.bytes {
            self.state = State::Taken { digest: stream.verify(name, self.announced)? };
        }
        Ok(())
    }

    /// Passes the rows of the whole tensor `name`, which begins at `offset` of a file, on to `sink`, and verifies it.
    /// `room` is memory for the bytes of a file that is not mapped.
    ///
    /// # Errors
    /// As for [`Receipt::read`].
    pub fn stream_file(
        &mut self,
        name: &str,
        (file, offset): (&SourceFile, u64),
        layout: RowLayout,
        room: &mut Vec<u8>,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let mut stream = RowStream::new(layout);
        let most = layout.piece_rows() * layout.row_bytes() * file.pieces_at_once();
        while stream.done() < self.bytes {
            let done = stream.done();
            let piece = (offset + done as u64, most.min(self.bytes - done));
            file.with(name, piece, room, |bytes| stream.take(done, bytes, sink))?;
        }
        self.state = State::Taken { digest: stream.verify(name, self.announced)? };
        Ok(())
    }

    /// Takes note that the whole tensor `name` was passed on and digested where it lies.
    ///
    /// # Errors
    /// As for [`Verifier::verify`].
    pub fn take_digested(&mut self, name: &str, digested: &Digested) -> Result<()> {
        self.state = State::Taken { digest: verify(name, digested, self.announced)? };
        Ok(())
    }

    /// The bytes of the tensor `name` that `data` is, if it is inside.
    fn check_inside(&self, name: &str, offset: u64, data: &[u8]) -> Result<Range<usize>> {
        let end = offset.saturating_add(data.len() as u64);
        if end > self.bytes as u64 {
            let what = format!("tensor {name:?}: bytes {offset}..{end} are outside its {} bytes", self.bytes);
            return Err(Error::invalid("chunk", what));
        }
        // No truncation: both are at most the tensor's bytes.
        Ok(offset as usize..end as usize)
    }
}

fn overlaps(name: &str, piece: &Range<usize>) -> Error {
    let Range { start, end } = piece;
    Error::invalid("chunk", format!("tensor {name:?}: bytes {start}..{end} overlap bytes that were sent before"))
}

fn too_many_gaps(name: &str) -> Error {
    let what = format!("tensor {name:?}: its chunks leave {MAX_PIECES} gaps; send them nearer to their order");
    Error::invalid("chunk", what)
}

/// A tensor that is kept while it comes in pieces, in any order.
struct Gathering {
    buffer: Buffer,
    /// The bytes that have come: ascending ranges with gaps between them.
    pieces: Vec<Range<usize>>,
    verifier: Verifier,
    /// Bytes from the tensor's start that have been hashed.
    hashed: usize,
}

impl Gathering {
    fn new(bytes: usize, dtype: Option<Dtype>) -> Result<Self> {
        let buffer = Buffer::zeroed(bytes)?;
        Ok(Self { buffer, pieces: Vec::new(), verifier: Verifier::new(dtype), hashed: 0 })
    }

    fn received(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }

    fn is_whole(&self) -> bool {
        self.pieces.first().is_some_and(|piece| piece.len() == self.buffer.len())
    }

    /// Whether some of these bytes have come before.
    fn overlaps(&self, piece: &Range<usize>) -> bool {
        let next = self.pieces.partition_point(|p| p.end <= piece.start);
        self.pieces.get(next).is_some_and(|p| p.start < piece.end)
    }

    /// Keeps the bytes of a piece that overlaps no other, and joins it with its neighbours.
    fn take(&mut self, piece: Range<usize>, data: &[u8]) {
        self.buffer[piece.clone()].copy_from_slice(data);
        if self.hashed == piece.start {
            self.verifier.hash(data);
            self.hashed = piece.end;
        }
        let pieces = &mut self.pieces;
        let next = pieces.partition_point(|p| p.end <= piece.start);
        let follows = next > 0 && pieces[next - 1].end == piece.start;
        let precedes = pieces.get(next).is_some_and(|p| p.start == piece.end);
        match (follows, precedes) {
            (true, true) => pieces[next - 1].end = pieces.remove(next).end,
            (true, false) => pieces[next - 1].end = piece.end,
            (false, true) => pieces[next].start = piece.start,
            (false, false) => pieces.insert(next, piece),
        }
    }

    /// Verifies the tensor `name`, all of whose bytes have come.
    fn verify(&mut self, name: &str, announced: Option<Digest>) -> Result<Digest> {
        self.verifier.hash(&self.buffer[self.hashed..]);
        self.verifier.check_values(0, &self.buffer);
        self.verifier.verify(name, announced)
    }
}
