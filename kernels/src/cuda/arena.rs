//! Device memory in one reserved range of addresses: pages are mapped when they are needed and unmapped when nothing
//! uses them any more, so that released memory really returns to the driver.
//!
//! An allocation has its address from the beginning to its end, whether there is memory behind it or not: while it is
//! released it has none, and while it is offloaded the host keeps what it holds. New allocations get the lowest
//! addresses that are free, so that the same ones in the same order get the same addresses again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::slice::from_ref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream, sys};

use super::capture::{StreamLock, is_capturing};
use super::offloaded::Offloaded;
use crate::error::DeviceError;

/// Addresses of an arena per byte of the device: room for gaps between allocations. Addresses cost nothing.
const ADDRESSES_PER_BYTE: usize = 2;
/// Smallest part of an arena that is mapped at once; a multiple of the driver's granularity of 2 MiB. Fewer and larger
/// mappings make a wake faster, and waste at most this much.
pub(super) const PAGE_BYTES: usize = 8 << 20;
/// Alignment of allocations: wide loads and the copy engines want it.
const ALIGNMENT: usize = 512;

/// The limit on the memory that all arenas of a device map together.
///
/// The ledger above this crate rejects allocations that do not fit before anything changes. The quota enforces the
/// ledger's limit where fragmentation would exceed it: unused pages are unmapped first, then the request fails.
pub(super) struct Quota {
    most: AtomicU64,
    mapped: AtomicU64,
    arenas: Mutex<Vec<Weak<Arena>>>,
}

/// The reason why pages were not mapped.
enum Shortage {
    /// The arenas may not map as much.
    Quota,
    Driver(String),
}

/// Whether memory may be refused.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemoryNeed {
    MayBeRefused,
    /// A step cannot be undone. Its memory is reserved, so it fits unless parts of pages are lost to fragmentation.
    OfStep,
}

/// A range of addresses of one device, and the physical memory behind parts of it.
pub(super) struct Arena {
    /// Released with the last allocation; its streams are waited for before pages are unmapped.
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Lock of `stream`.
    stream_lock: StreamLock,
    /// Addresses that are reserved, in bytes.
    reserved: usize,
    quota: Arc<Quota>,
    state: Mutex<ArenaState>,
}

struct ArenaState {
    base: sys::CUdeviceptr,
    quota: Arc<Quota>,
    /// Allocated ranges by their start, as offsets from `base`.
    taken: BTreeMap<usize, AllocatedRange>,
    /// Physical memory by the number of its page.
    pages: BTreeMap<usize, sys::CUmemGenericAllocationHandle>,
    /// The contents of offloaded allocations.
    offloaded: Vec<Offloaded>,
}

/// An allocated range.
struct AllocatedRange {
    end: usize,
    place: Residence,
}

/// Where the content of an allocation is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Residence {
    Device,
    Host,
    /// It has none.
    Nowhere,
}

/// Memory of an arena, which goes back to it when this is dropped. The pages stay mapped until [`Arena::trim`].
pub(super) struct ArenaAllocation {
    arena: Arc<Arena>,
    offset: usize,
    pub pointer: sys::CUdeviceptr,
}

impl Arena {
    /// Reserves addresses on a device of `device_bytes`; takes no memory. Its pages count in `quota`.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if the driver has no virtual memory management.
    pub fn reserve(
        stream: &Arc<CudaStream>,
        stream_lock: &StreamLock,
        device_bytes: usize,
        quota: &Arc<Quota>,
    ) -> Result<Arc<Self>, DeviceError> {
        let context = stream.context().clone();
        bind(&context)?;
        let reserved = (ADDRESSES_PER_BYTE * device_bytes).next_multiple_of(PAGE_BYTES);
        let mut base = 0;
        // SAFETY: `base` is written; no fixed address is asked for.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut base, reserved, 0, 0, 0) };
        result.result().map_err(|e| DeviceError::Unsupported(format!("the driver reserves no addresses: {e}")))?;
        let (quota, taken, pages) = (quota.clone(), BTreeMap::new(), BTreeMap::new());
        let state = Mutex::new(ArenaState { base, quota: quota.clone(), taken, pages, offloaded: Vec::new() });
        let (stream, stream_lock) = (stream.clone(), stream_lock.clone());
        let arena = Arc::new(Self { context, stream, stream_lock, reserved, quota, state });
        arena.quota.arenas().push(Arc::downgrade(&arena));
        Ok(arena)
    }

    /// Allocates `bytes` of unspecified content at the lowest free address.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has too little memory; nothing is allocated then.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<ArenaAllocation, DeviceError> {
        self.take(bytes, MemoryNeed::MayBeRefused)
    }

    /// As [`Arena::allocate`], for what a step needs: only the driver refuses it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has too little memory; nothing is allocated then.
    pub fn allocate_for_step(self: &Arc<Self>, bytes: usize) -> Result<ArenaAllocation, DeviceError> {
        self.take(bytes, MemoryNeed::OfStep)
    }

    fn take(self: &Arc<Self>, bytes: usize, need: MemoryNeed) -> Result<ArenaAllocation, DeviceError> {
        bind(&self.context)?;
        let len = bytes.max(1).next_multiple_of(ALIGNMENT);
        self.with_pages(bytes, need, |state, beyond| {
            let offset = state.first_gap(len);
            if offset + len > self.reserved {
                return Err(Shortage::Driver("the arena has no addresses left".into()));
            }
            state.map(from_ref(&(offset..offset + len)), &self.context, beyond)?;
            state.taken.insert(offset, AllocatedRange { end: offset + len, place: Residence::Device });
            Ok(ArenaAllocation { arena: self.clone(), offset, pointer: state.base + offset as u64 })
        })
    }

    /// Calls `map` to map pages. If that exceeds the quota, unused pages are unmapped and `map` is called again; its
    /// second argument says whether it may exceed the quota then.
    fn with_pages<T>(
        &self,
        bytes: usize,
        need: MemoryNeed,
        mut map: impl FnMut(&mut ArenaState, bool) -> Result<T, Shortage>,
    ) -> Result<T, DeviceError> {
        let first = map(&mut self.lock(), false);
        let mapped = match first {
            Err(Shortage::Quota) => {
                self.quota.trim();
                map(&mut self.lock(), need == MemoryNeed::OfStep)
            }
            mapped => mapped,
        };
        mapped.map_err(|shortage| match shortage {
            Shortage::Quota => {
                let [mapped, most] = [&self.quota.mapped, &self.quota.most].map(|bytes| bytes.load(Ordering::SeqCst));
                out_of_memory(bytes, &format!("{mapped} of the {most} that the process may store there are taken"))
            }
            Shortage::Driver(why) => out_of_memory(bytes, &why),
        })
    }

    /// Returns pages that no allocation uses to the driver, after pending work has run. Does nothing on a
    /// thread that captures a graph, whose launches cannot be waited for.
    pub fn trim(&self) {
        if is_capturing() {
            return;
        }
        let _lock = self.stream_lock.lock();
        // Locked before the wait: memory that is given back later may still be in use when the wait is over.
        let mut state = self.lock();
        if let Err(error) = bind(&self.context).and_then(|()| synchronize(&self.stream)) {
            tracing::error!("pages of the device stay mapped: {error}");
            return;
        }
        state.unmap_unused();
        let of_host = state.ranges(Residence::Host);
        state.offloaded.retain(|offloaded| of_host.iter().any(|range| offloaded.has_part_of(range)));
    }

    /// Moves the contents of the allocations to page-locked host memory, and returns all pages to the driver.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the host would then keep more than `most` bytes of this arena, or has too
    /// little memory; nothing has changed then.
    pub fn offload(&self, most: u64) -> Result<(), DeviceError> {
        bind(&self.context)?;
        self.trim();
        let mut state = self.lock();
        let ranges = state.ranges(Residence::Device);
        let bytes = state.offloaded_bytes() + ranges.iter().map(|range| range.len() as u64).sum::<u64>();
        if bytes > most {
            return Err(DeviceError::OutOfMemory(format!(
                "they take {bytes} bytes of the host's memory, of which the ledger has {most}"
            )));
        }
        let mut offloaded = Vec::new();
        let taken = ranges.into_iter().try_for_each(|range| {
            offloaded.push(Offloaded::take(&self.stream, state.base, range)?);
            Ok(())
        });
        synchronize(&self.stream)?;
        taken?;
        state.offloaded.append(&mut offloaded);
        state.move_all(Residence::Device, Residence::Host);
        state.unmap_unused();
        Ok(())
    }

    /// Copies offloaded contents back to their addresses.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has too little memory; nothing has changed then.
    pub fn bring_back(&self) -> Result<(), DeviceError> {
        bind(&self.context)?;
        let bytes = self.lock().ranges(Residence::Host).iter().map(Range::len).sum();
        self.with_pages(bytes, MemoryNeed::MayBeRefused, |state, beyond| {
            let ranges = state.ranges(Residence::Host);
            state.map(&ranges, &self.context, beyond)?;
            Ok(state.copy_back(&ranges, &self.stream))
        })?
    }

    /// The stream on which all that uses the memory runs.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Bytes of host memory that hold offloaded contents.
    pub fn offloaded_bytes(&self) -> u64 {
        self.lock().offloaded_bytes()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ArenaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ArenaState {
    /// The lowest offset with `len` free bytes.
    fn first_gap(&self, len: usize) -> usize {
        let mut start = 0;
        for (&taken, AllocatedRange { end, .. }) in &self.taken {
            if taken - start >= len {
                break;
            }
            start = *end;
        }
        start
    }

    /// The ranges of all allocations whose content is in `place`; neighbours are one range.
    fn ranges(&self, place: Residence) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (&start, taken) in self.taken.iter().filter(|(_, taken)| taken.place == place) {
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = taken.end,
                _ => ranges.push(start..taken.end),
            }
        }
        ranges
    }

    fn move_all(&mut self, from: Residence, to: Residence) {
        self.taken.values_mut().filter(|taken| taken.place == from).for_each(|taken| taken.place = to);
    }

    /// Copies what was offloaded to `ranges`, all that the host has, which are mapped.
    fn copy_back(&mut self, ranges: &[Range<usize>], stream: &CudaStream) -> Result<(), DeviceError> {
        for range in ranges {
            self.offloaded.iter().try_for_each(|offloaded| offloaded.copy_back(stream, self.base, range))?;
        }
        synchronize(stream)?;
        self.move_all(Residence::Host, Residence::Device);
        self.offloaded.clear();
        Ok(())
    }

    fn offloaded_bytes(&self) -> u64 {
        self.offloaded.iter().map(Offloaded::bytes).sum()
    }

    /// Maps the pages of `ranges` that have no memory yet: all of them or none. `beyond`: even if there are more then
    /// than is allowed.
    fn map(&mut self, ranges: &[Range<usize>], context: &CudaContext, beyond: bool) -> Result<(), Shortage> {
        let missing: BTreeSet<usize> =
            ranges.iter().flat_map(pages_of).filter(|page| !self.pages.contains_key(page)).collect();
        let missing: Vec<usize> = missing.into_iter().collect();
        self.quota.take(missing.len(), beyond)?;
        for (done, &page) in missing.iter().enumerate() {
            match map_page(self.base + (page * PAGE_BYTES) as u64, context.ordinal()) {
                Ok(handle) => drop(self.pages.insert(page, handle)),
                Err(error) => {
                    missing[..done].iter().for_each(|page| self.unmap(*page));
                    self.quota.give_back(missing.len() - done);
                    return Err(Shortage::Driver(error));
                }
            }
        }
        Ok(())
    }

    fn unmap(&mut self, page: usize) {
        let Some(handle) = self.pages.remove(&page) else { return };
        self.quota.give_back(1);
        let address = self.base + (page * PAGE_BYTES) as u64;
        // SAFETY: the page is mapped by this handle, and nothing that runs uses it.
        let result =
            unsafe { sys::cuMemUnmap(address, PAGE_BYTES).result().and_then(|()| sys::cuMemRelease(handle).result()) };
        if let Err(error) = result {
            tracing::error!("a page of the device was not given back: {error}");
        }
    }

    fn unmap_unused(&mut self) {
        let used: BTreeSet<usize> = self.ranges(Residence::Device).iter().flat_map(pages_of).collect();
        let unused: Vec<usize> = self.pages.keys().copied().filter(|page| !used.contains(page)).collect();
        unused.into_iter().for_each(|page| self.unmap(page));
    }
}

/// The numbers of the pages in which a range lies.
fn pages_of(range: &Range<usize>) -> Range<usize> {
    range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES)
}

/// Creates physical memory and maps it at `address`, to be read and written by device `ordinal`.
fn map_page(address: sys::CUdeviceptr, ordinal: usize) -> Result<sys::CUmemGenericAllocationHandle, String> {
    let location =
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as i32 };
    // SAFETY: the structure is plain data for which zeros are valid.
    let mut property: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location = location;
    let access = sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    let mut handle = 0;
    // SAFETY: the handle is written, and the property read, during the call.
    let created = unsafe { sys::cuMemCreate(&raw mut handle, PAGE_BYTES, &raw const property, 0) };
    created.result().map_err(|e| e.to_string())?;
    // SAFETY: the address is of the arena's reserved range, on a page that has no memory.
    let mapped = unsafe { sys::cuMemMap(address, PAGE_BYTES, 0, handle, 0).result() };
    let result = mapped.and_then(|()| {
        // SAFETY: the page is mapped; the description is read during the call.
        let opened = unsafe { sys::cuMemSetAccess(address, PAGE_BYTES, &raw const access, 1).result() };
        opened.inspect_err(|_| {
            // SAFETY: the page was mapped a moment ago and nothing uses it.
            let _ = unsafe { sys::cuMemUnmap(address, PAGE_BYTES) };
        })
    });
    if let Err(error) = result {
        // SAFETY: the memory is mapped nowhere.
        let _ = unsafe { sys::cuMemRelease(handle) };
        return Err(error.to_string());
    }
    Ok(handle)
}

impl ArenaAllocation {
    /// Frees the memory and keeps the address; the content is lost.
    pub fn release(&self) {
        self.set_place(&mut self.arena.lock(), Residence::Nowhere);
    }

    /// Allocates memory of unspecified content at the same address again, if it was released.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has too little memory; nothing is allocated then.
    pub fn restore(&self) -> Result<(), DeviceError> {
        self.restore_as(MemoryNeed::MayBeRefused)
    }

    /// As [`ArenaAllocation::restore`], for what a step needs: only the driver refuses it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has too little memory; nothing is allocated then.
    pub fn restore_for_step(&self) -> Result<(), DeviceError> {
        self.restore_as(MemoryNeed::OfStep)
    }

    fn restore_as(&self, need: MemoryNeed) -> Result<(), DeviceError> {
        bind(&self.arena.context)?;
        let end = self.arena.lock().taken[&self.offset].end;
        self.arena.with_pages(end - self.offset, need, |state, beyond| {
            state.map(from_ref(&(self.offset..end)), &self.arena.context, beyond)?;
            self.set_place(state, Residence::Device);
            Ok(())
        })
    }

    fn set_place(&self, state: &mut ArenaState, place: Residence) {
        state.taken.get_mut(&self.offset).expect("it is taken until it is dropped").place = place;
    }
}

impl Quota {
    /// One that allows everything.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { most: AtomicU64::new(u64::MAX), mapped: AtomicU64::new(0), arenas: Mutex::default() })
    }

    /// Sets the limit to `bytes`. Pages that are already mapped stay.
    pub fn limit(&self, bytes: u64) {
        self.most.store(bytes, Ordering::SeqCst);
    }

    /// Bytes that all arenas have mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped.load(Ordering::SeqCst)
    }

    fn take(&self, pages: usize, beyond: bool) -> Result<(), Shortage> {
        let (bytes, most) = ((pages * PAGE_BYTES) as u64, self.most.load(Ordering::SeqCst));
        let more = |mapped: u64| (bytes == 0 || beyond || mapped + bytes <= most).then_some(mapped + bytes);
        self.mapped.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).map(drop).map_err(|_| Shortage::Quota)
    }

    fn give_back(&self, pages: usize) {
        self.mapped.fetch_sub((pages * PAGE_BYTES) as u64, Ordering::SeqCst);
    }

    /// Gives the pages of all arenas that nothing uses back to the driver.
    pub fn trim(&self) {
        let arenas: Vec<_> = self.arenas().iter().filter_map(Weak::upgrade).collect();
        arenas.iter().for_each(|arena| arena.trim());
    }

    fn arenas(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Arena>>> {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ArenaAllocation {
    fn drop(&mut self) {
        self.arena.lock().taken.remove(&self.offset);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.trim();
        let base = self.lock().base;
        // SAFETY: no allocation is left, so nothing is mapped in the range.
        let _ = unsafe { sys::cuMemAddressFree(base, self.reserved) };
    }
}

fn bind(context: &CudaContext) -> Result<(), DeviceError> {
    context.bind_to_thread().map_err(|e| DeviceError::Unsupported(format!("the device has failed: {e}")))
}

fn synchronize(stream: &CudaStream) -> Result<(), DeviceError> {
    stream.synchronize().map_err(|e| DeviceError::Unsupported(format!("the device has failed: {e}")))
}

fn out_of_memory(bytes: usize, why: &str) -> DeviceError {
    DeviceError::OutOfMemory(format!("the device cannot give {bytes} bytes: {why}"))
}

#[cfg(test)]
mod tests;
