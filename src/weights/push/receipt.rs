//! Memory for tensors on their way in, and what of them has come.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};

use memmap2::MmapMut;
use twox_hash::xxhash3_128::Hasher;

use super::files::SourceFile;
use super::finite::first_not_finite;
use super::ordered::{Layout, Ordered, Sink};
use crate::error::{Error, Result};
use crate::weights::Dtype;

/// From here on a tensor has its own mapping. A smaller one comes from the heap: rounding it up to pages would cost more
/// than the heap can keep.
const MAPPED_BYTES: usize = 32 << 10;
/// Read, hashed and checked at a time, so that the second and third look find it in the core's cache.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces of one tensor that may be there with gaps between them. A sender that goes through a tensor in order has one;
/// this is for those with several hands, and bounds what a hostile one can make the server keep.
const MAX_PIECES: usize = 4096;

/// Zeroed bytes that go back to the operating system when they are dropped, all but the small ones.
pub(super) enum Buffer {
    Heap(Vec<u8>),
    Mapped(MmapMut),
}

impl Buffer {
    /// # Errors
    /// `ResourceExhausted` if the system has not as much.
    pub fn zeroed(bytes: usize) -> Result<Self> {
        if bytes < MAPPED_BYTES {
            return Ok(Self::Heap(vec![0; bytes]));
        }
        // No huge pages: for memory that is written once and read once, finding and clearing them takes longer than the
        // faults that they save.
        let map = MmapMut::map_anon(bytes)
            .map_err(|e| Error::ResourceExhausted(format!("cannot map {bytes} bytes to stage a tensor: {e}")))?;
        Ok(Self::Mapped(map))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

/// One tensor on its way in. Its memory is taken with the first byte.
pub(super) struct Slot {
    bytes: usize,
    /// The type of the tensor's values; None for a payload that is not values.
    values: Option<Dtype>,
    /// None where the sender has not said it.
    expected: Option<[u8; 16]>,
    /// While it comes in pieces, and is kept.
    partial: Option<Box<Partial>>,
    /// While it comes in pieces, and is passed on.
    ordered: Option<Box<Ordered>>,
    /// Once it is whole and verified.
    digest: Option<[u8; 16]>,
    /// From then on until it is taken.
    buffer: Option<Buffer>,
}

struct Partial {
    buffer: Buffer,
    /// What has come: ascending, with gaps between.
    pieces: Vec<Range<usize>>,
    hasher: Hasher,
    /// Bytes from the tensor's start that the hasher has seen.
    hashed: usize,
}

impl Slot {
    pub fn new(bytes: usize, values: Option<Dtype>, expected: Option<[u8; 16]>) -> Self {
        Self { bytes, values, expected, partial: None, ordered: None, digest: None, buffer: None }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it has taken no memory yet.
    pub fn is_untouched(&self) -> bool {
        self.partial.is_none() && self.ordered.is_none() && self.digest.is_none()
    }

    /// How many bytes have come.
    pub fn received(&self) -> usize {
        match (&self.partial, &self.ordered) {
            (Some(partial), _) => partial.pieces.iter().map(Range::len).sum(),
            (_, Some(ordered)) => ordered.done() + ordered.early_bytes(),
            _ if self.digest.is_some() => self.bytes,
            _ => 0,
        }
    }

    /// Once it is whole and verified.
    pub fn digest(&self) -> Option<[u8; 16]> {
        self.digest
    }

    /// The verified bytes, unless they were taken.
    pub fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }

    /// The verified bytes, once.
    pub fn take(&mut self) -> Option<Buffer> {
        self.buffer.take()
    }

    /// Takes bytes; true if the tensor `name` is whole and verified with them.
    ///
    /// # Errors
    /// `InvalidArgument` if they are outside or overlap what has come, or leave too many gaps; as for
    /// [`Slot::verify`].
    pub fn write(&mut self, name: &str, offset: u64, data: &[u8]) -> Result<bool> {
        let piece = self.check_inside(name, offset, data)?;
        if data.is_empty() {
            return Ok(false);
        }
        if self.partial.is_none() && self.digest.is_none() {
            self.partial = Some(Box::new(Partial::new(self.bytes)?));
        }
        let Some(partial) = self.partial.as_mut().filter(|partial| !partial.overlaps(&piece)) else {
            return Err(overlaps(name, &piece));
        };
        partial.take(piece, data);
        if partial.pieces.len() > MAX_PIECES {
            return Err(too_many_gaps(name));
        }
        let Some(partial) = self.partial.take_if(|partial| partial.pieces[0].len() == self.bytes) else {
            return Ok(false);
        };
        let Partial { buffer, mut hasher, hashed, .. } = *partial;
        hasher.write(&buffer[hashed..]);
        let bad = self.values.and_then(|dtype| first_not_finite(&buffer, dtype));
        self.verify(name, &hasher, bad)?;
        self.buffer = Some(buffer);
        Ok(true)
    }

    /// As [`Slot::write`], but passes its rows on to `sink` instead of keeping them. At most `room` bytes wait for those
    /// before them.
    ///
    /// # Errors
    /// As for [`Slot::write`]; `ResourceExhausted` if more would wait.
    pub fn pass(
        &mut self,
        name: &str,
        offset: u64,
        data: &[u8],
        layout: Layout,
        room: u64,
        sink: &mut Sink<'_>,
    ) -> Result<bool> {
        let piece = self.check_inside(name, offset, data)?;
        if data.is_empty() {
            return Ok(false);
        }
        if self.is_untouched() {
            self.ordered = Some(Box::new(Ordered::new(layout)));
        }
        let Some(ordered) = self.ordered.as_mut().filter(|ordered| !ordered.overlaps(piece.start, piece.end)) else {
            return Err(overlaps(name, &piece));
        };
        if piece.start != ordered.done() && piece.len() as u64 > room {
            return Err(Error::ResourceExhausted(format!(
                "tensor {name:?}: bytes {}.. come before those from {} on, and there is no room to keep them; send each \
                 tensor from its beginning to its end",
                piece.start,
                ordered.done()
            )));
        }
        ordered.take(piece.start, data, sink);
        if ordered.early_pieces() > MAX_PIECES {
            return Err(too_many_gaps(name));
        }
        let Some(ordered) = self.ordered.take_if(|ordered| ordered.done() == self.bytes) else { return Ok(false) };
        self.verify(name, ordered.hasher(), ordered.bad())?;
        Ok(true)
    }

    /// Bytes that wait for those before them.
    pub fn early_bytes(&self) -> u64 {
        self.ordered.as_ref().map_or(0, |ordered| ordered.early_bytes() as u64)
    }

    /// Passes the rows of the whole tensor `name` on from a file to `sink`. `room` is memory to use.
    ///
    /// # Errors
    /// As for [`Slot::fill`].
    pub fn pass_file(
        &mut self,
        name: &str,
        (file, offset): (&SourceFile, u64),
        layout: Layout,
        room: &mut Vec<u8>,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let mut ordered = Ordered::new(layout);
        let most = layout.piece_rows() * layout.row_bytes();
        while ordered.done() < self.bytes {
            let done = ordered.done();
            let piece = (offset + done as u64, most.min(self.bytes - done));
            file.with(name, piece, room, |bytes| ordered.take(done, bytes, sink))?;
        }
        self.verify(name, ordered.hasher(), ordered.bad())
    }

    /// Where in the tensor the bytes are.
    fn check_inside(&self, name: &str, offset: u64, data: &[u8]) -> Result<Range<usize>> {
        let end = offset.saturating_add(data.len() as u64);
        if end > self.bytes as u64 {
            let what = format!("tensor {name:?}: bytes {offset}..{end} are outside its {} bytes", self.bytes);
            return Err(Error::invalid("chunk", what));
        }
        // Both are at most the tensor's bytes.
        Ok(offset as usize..end as usize)
    }

    /// Reads the whole tensor `name` from a file.
    ///
    /// # Errors
    /// `DataLoss` if the file has become too short; as for [`Slot::verify`].
    pub fn fill(&mut self, name: &str, file: &SourceFile, offset: u64) -> Result<()> {
        let mut buffer = Buffer::zeroed(self.bytes)?;
        let mut hasher = Hasher::new();
        let mut bad = None;
        let mut done = 0;
        for piece in buffer.chunks_mut(PIECE_BYTES) {
            file.read(name, offset + done as u64, piece)?;
            hasher.write(piece);
            if let (None, Some(dtype)) = (bad, self.values) {
                bad = first_not_finite(piece, dtype).map(|index| done / dtype.size() + index);
            }
            done += piece.len();
        }
        self.verify(name, &hasher, bad)?;
        self.buffer = Some(buffer);
        Ok(())
    }

    /// # Errors
    /// `DataLoss` if the digest is not the announced one, else `InvalidArgument` if the value at index `bad` is not
    /// finite.
    fn verify(&mut self, name: &str, hasher: &Hasher, bad: Option<usize>) -> Result<()> {
        let digest = hasher.finish_128().to_be_bytes();
        if self.expected.is_some_and(|expected| expected != digest) {
            // Without the digests: a sender would learn what lies in a file that only the server can read.
            return Err(Error::DataLoss(format!(
                "tensor {name:?}: XXH3-128 of the bytes that came is not the announced one; send it again"
            )));
        }
        if let Some(index) = bad {
            return Err(Error::invalid(
                "tensors",
                format!("tensor {name:?} is not finite at element {index}; the trainer has diverged or sent garbage"),
            ));
        }
        self.digest = Some(digest);
        Ok(())
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

impl Partial {
    fn new(bytes: usize) -> Result<Self> {
        Ok(Self { buffer: Buffer::zeroed(bytes)?, pieces: Vec::new(), hasher: Hasher::new(), hashed: 0 })
    }

    fn overlaps(&self, piece: &Range<usize>) -> bool {
        let next = self.pieces.partition_point(|p| p.end <= piece.start);
        self.pieces.get(next).is_some_and(|p| p.start < piece.end)
    }

    /// Takes the bytes of a piece that does not overlap, and joins it with its neighbours.
    fn take(&mut self, piece: Range<usize>, data: &[u8]) {
        self.buffer[piece.clone()].copy_from_slice(data);
        if self.hashed == piece.start {
            self.hasher.write(data);
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
}

/// More than these memory does not feed.
pub(super) const MOST_THREADS: usize = 4;

/// Does `work` for every item on some threads. Items are `(cost, item)`: the
/// largest go first, each to the thread that has least to do.
pub(super) fn in_parallel<T: Send>(items: Vec<(usize, T)>, work: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    in_parallel_with(items, &mut [(); MOST_THREADS], |(), item| work(item))
}

/// As [`in_parallel`]; each thread has one of `with`.
pub(super) fn in_parallel_with<T: Send, S: Send>(
    mut items: Vec<(usize, T)>,
    with: &mut [S; MOST_THREADS],
    work: impl Fn(&mut S, T) -> Result<()> + Sync,
) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS));
    items.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
    let mut shares: Vec<(usize, Vec<T>)> = (0..threads).map(|_| (0, Vec::new())).collect();
    for (cost, item) in items {
        let share = shares.iter_mut().min_by_key(|(load, _)| *load).expect("there is a thread");
        share.0 += cost;
        share.1.push(item);
    }
    // The first item is done here: one alone needs no other thread.
    let own = shares.swap_remove(0).1;
    let (own_with, with) = with.split_last_mut().expect("there is a thread");
    let do_all = &|with: &mut S, items: Vec<T>| items.into_iter().try_for_each(|item| work(with, item));
    std::thread::scope(|scope| {
        let others: Vec<_> = shares
            .into_iter()
            .zip(with)
            .filter(|((_, items), _)| !items.is_empty())
            .map(|((_, items), with)| scope.spawn(move || do_all(with, items)))
            .collect();
        let own = do_all(own_with, own);
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(Error::Internal("a thread that read tensors panicked".into())))
        };
        // All are joined, whatever the first of them says.
        others.into_iter().map(join).fold(own, |all, result| all.and(result))
    })
}
