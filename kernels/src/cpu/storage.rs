//! Memory: mappings for large and long-lived storage, and buffers of cache lines for scratch.

use half::bf16;
use memmap2::MmapMut;

/// Zeroed memory in its own mapping, aligned to a page. A page takes memory when it is first written, and all memory
/// goes back to the operating system when the mapping is dropped.
pub(crate) struct Mapping(MmapMut);

/// The smallest mapping in bytes for which huge pages are requested. Smaller ones, which tests make, are left alone.
const SMALLEST_ADVISED: usize = 256 << 10;

/// Types as which raw memory may be read and written.
///
/// # Safety
/// Every bit pattern of the type is a value, it has no padding, and its alignment is at most a cache line.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: numbers, and a pair of such, of which every bit pattern is one.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for bf16 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for [f32; 2] {}

impl Mapping {
    /// # Errors
    /// If the system cannot map the memory.
    pub fn try_zeroed(bytes: usize) -> std::io::Result<Mapping> {
        let map = MmapMut::map_anon(bytes)?;
        #[cfg(target_os = "linux")]
        if bytes >= SMALLEST_ADVISED {
            // A failure is ignored: without huge pages the kernels are correct, with more TLB misses. Mappings that are
            // made one after the other are neighbours and can share huge pages, so even those of a small model get
            // them.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Mapping(map))
    }

    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    pub fn as_slice<T: Plain>(&self) -> &[T] {
        // SAFETY: a mapping is aligned to a page, T has no invalid bits, and the length is rounded down.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() / size_of::<T>()) }
    }

    pub fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() / size_of::<T>()) }
    }
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([f32; 16]);

/// A buffer that grows to the largest size requested and keeps it, aligned to 64 bytes.
#[derive(Default)]
pub(crate) struct Scratch(Vec<CacheLine>);

impl Scratch {
    /// `len` float32 values of unspecified content.
    pub fn floats(&mut self, len: usize) -> &mut [f32] {
        self.values(len)
    }

    /// `len` values of unspecified content.
    pub fn values<T: Plain>(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(size_of::<CacheLine>());
        if self.0.len() < lines {
            self.0.resize(lines, CacheLine([0.0; 16]));
        }
        // SAFETY: the lines are initialised, aligned to 64 and at least as long; T has no invalid bits.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}
