//! Device memory of another process.

use std::ops::Range;

use candle_core::Result;

use crate::backend::storage::{BorrowedImpl, BorrowedRows, Digested};
use crate::values::Dtype;

/// By which a process names an allocation of its device memory to others: bytes of the driver, and an offset is not
/// among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryHandle(pub [u8; MemoryHandle::BYTES]);

impl MemoryHandle {
    pub const BYTES: usize = 64;
}

/// An allocation of another process, open for reading until this is dropped. Its owner can write to it or free it at
/// any time: what is read then is unspecified, or an error.
pub struct BorrowedMemory(Box<dyn BorrowedImpl>);

impl BorrowedMemory {
    #[cfg(feature = "cuda")]
    pub(crate) fn new(memory: impl BorrowedImpl + 'static) -> Self {
        Self(Box::new(memory))
    }

    /// Bytes of the allocation.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Calls `use_bytes` with a copy of the bytes `part` in memory of the host.
    ///
    /// # Errors
    /// If the device cannot copy them, or the host has no memory for them.
    ///
    /// # Panics
    /// If `part` is not inside the allocation.
    pub fn read<T>(&self, part: Range<u64>, use_bytes: impl FnOnce(&[u8]) -> T) -> Result<T> {
        assert!(part.start <= part.end && part.end <= self.bytes(), "{part:?} of {} bytes", self.bytes());
        let (mut use_bytes, mut used) = (Some(use_bytes), None);
        self.0.read(part, &mut |bytes| used = use_bytes.take().map(|use_bytes| use_bytes(bytes)))?;
        Ok(used.expect("it was called once"))
    }

    /// The values from `offset` on as so many rows and columns, row by row. Nothing is read.
    ///
    /// # Panics
    /// If they are not inside the allocation.
    pub fn rows(&self, offset: u64, dtype: Dtype, [rows, columns]: [usize; 2]) -> BorrowedRows<'_> {
        let rows = BorrowedRows { memory: &*self.0, offset, dtype, rows, columns };
        let end = offset.checked_add(rows.bytes());
        assert!(end.is_some_and(|end| end <= self.bytes()), "{rows:?} of {} bytes", self.bytes());
        rows
    }
}

impl BorrowedRows<'_> {
    /// Bytes of all values.
    pub fn bytes(&self) -> u64 {
        (self.rows * self.columns * self.dtype.size()) as u64
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Those of some of the rows.
    ///
    /// # Panics
    /// If `rows` pass the end.
    pub fn part(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "{rows:?} of {self:?}");
        let before = (rows.start * self.columns * self.dtype.size()) as u64;
        Self { offset: self.offset + before, rows: rows.len(), ..*self }
    }

    /// Whether the device computes their digest where they are; few bytes are for the host.
    pub fn can_be_digested(&self) -> bool {
        self.memory.can_digest(self)
    }

    /// The digests of rows that can be digested, in their order.
    ///
    /// # Errors
    /// If a device has failed, or has no memory for what it is asked.
    pub fn digest(all: &[Self]) -> Result<Vec<Digested>> {
        let mut digests = vec![Digested::default(); all.len()];
        let mut left: Vec<usize> = (0..all.len()).collect();
        while let Some(&first) = left.first() {
            // Those of one device are computed at once.
            let memory = all[first].memory;
            let (beside, others) = left.into_iter().partition(|&i| memory.is_beside(all[i].memory));
            left = others;
            let rows: Vec<Self> = beside.iter().map(|&i: &usize| all[i]).collect();
            beside.iter().zip(memory.digest(&rows)?).for_each(|(&i, digest)| digests[i] = digest);
        }
        Ok(digests)
    }
}

impl std::fmt::Debug for BorrowedRows<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { offset, dtype, rows, columns, .. } = self;
        write!(f, "BorrowedRows({rows} x {columns} of {dtype:?} at {offset})")
    }
}

impl std::fmt::Debug for BorrowedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BorrowedMemory({} bytes)", self.bytes())
    }
}
