//! Device memory in one reserved range of addresses: pages are mapped as they are needed and unmapped when nothing uses
//! them any more, so that what is released really goes back to the driver, and what is taken again in the same order
//! has the same addresses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream, sys};

use crate::error::DeviceError;

/// Addresses of an arena per byte of the device: room for gaps between allocations. Addresses cost nothing.
const ADDRESSES_PER_BYTE: usize = 2;
/// Smallest part of an arena that is mapped at once; a multiple of the driver's granularity of 2 MiB. Fewer and larger
/// mappings make a wake faster, and waste at most this much.
const PAGE_BYTES: usize = 8 << 20;
/// Alignment of allocations: wide loads and the copy engines want it.
const ALIGNMENT: usize = 512;

/// A range of addresses of one device, and the physical memory behind parts of it.
pub(super) struct Arena {
    /// Released with the last allocation; its streams are waited for before pages are unmapped.
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Addresses that are reserved, in bytes.
    reserved: usize,
    state: Mutex<State>,
}

struct State {
    base: sys::CUdeviceptr,
    /// Allocated ranges, as offsets from `base`: start to end.
    taken: BTreeMap<usize, usize>,
    /// Physical memory by the number of its page.
    pages: BTreeMap<usize, sys::CUmemGenericAllocationHandle>,
}

/// Memory of an arena, which goes back to it when this is dropped. The pages stay mapped until [`Arena::trim`].
pub(super) struct Allocation {
    arena: Arc<Arena>,
    offset: usize,
    pub pointer: sys::CUdeviceptr,
}

impl Arena {
    /// Reserves addresses on a device of `device_bytes`; takes no memory.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if the driver has no virtual memory management.
    pub fn reserve(stream: &Arc<CudaStream>, device_bytes: usize) -> Result<Arc<Self>, DeviceError> {
        let context = stream.context().clone();
        bind(&context)?;
        let reserved = (ADDRESSES_PER_BYTE * device_bytes).next_multiple_of(PAGE_BYTES);
        let mut base = 0;
        // SAFETY: `base` is written; no fixed address is asked for.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut base, reserved, PAGE_BYTES, 0, 0) };
        result.result().map_err(|e| DeviceError::Unsupported(format!("the driver reserves no addresses: {e}")))?;
        let state = State { base, taken: BTreeMap::new(), pages: BTreeMap::new() };
        Ok(Arc::new(Self { context, stream: stream.clone(), reserved, state: Mutex::new(state) }))
    }

    /// Takes `bytes`, at the lowest free address. What they hold is unspecified.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the device has not as much; nothing is taken then.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Allocation, DeviceError> {
        bind(&self.context)?;
        let mut state = self.lock();
        let len = bytes.max(1).next_multiple_of(ALIGNMENT);
        let offset = state.first_gap(len);
        if offset + len > self.reserved {
            return Err(out_of_memory(bytes, "the arena has no addresses left"));
        }
        state.map(offset..offset + len, &self.context).map_err(|e| out_of_memory(bytes, &e))?;
        state.taken.insert(offset, offset + len);
        let pointer = state.base + offset as u64;
        Ok(Allocation { arena: self.clone(), offset, pointer })
    }

    /// Gives the pages that no allocation uses back to the driver, after what uses them has run.
    pub fn trim(&self) {
        if let Err(error) = bind(&self.context).and_then(|()| synchronize(&self.stream)) {
            tracing::error!("pages of the device stay mapped: {error}");
            return;
        }
        self.lock().unmap_unused();
    }

    /// Bytes of the device that are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        (self.lock().pages.len() * PAGE_BYTES) as u64
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The lowest offset with `len` free bytes.
    fn first_gap(&self, len: usize) -> usize {
        let mut start = 0;
        for (&taken, &end) in &self.taken {
            if taken - start >= len {
                break;
            }
            start = end;
        }
        start
    }

    /// Maps the pages of `range` that have no memory yet: all of them or none.
    fn map(&mut self, range: Range<usize>, context: &CudaContext) -> Result<(), String> {
        let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
        let missing: Vec<usize> = pages.filter(|page| !self.pages.contains_key(page)).collect();
        for (done, &page) in missing.iter().enumerate() {
            match map_page(self.base + (page * PAGE_BYTES) as u64, context.ordinal()) {
                Ok(handle) => drop(self.pages.insert(page, handle)),
                Err(error) => {
                    missing[..done].iter().for_each(|page| self.unmap(*page));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn unmap(&mut self, page: usize) {
        let Some(handle) = self.pages.remove(&page) else { return };
        let address = self.base + (page * PAGE_BYTES) as u64;
        // SAFETY: the page is mapped by this handle, and nothing that runs uses it.
        let result =
            unsafe { sys::cuMemUnmap(address, PAGE_BYTES).result().and_then(|()| sys::cuMemRelease(handle).result()) };
        if let Err(error) = result {
            tracing::error!("a page of the device was not given back: {error}");
        }
    }

    fn unmap_unused(&mut self) {
        let used: std::collections::BTreeSet<usize> =
            self.taken.iter().flat_map(|(start, end)| start / PAGE_BYTES..end.div_ceil(PAGE_BYTES)).collect();
        let unused: Vec<usize> = self.pages.keys().copied().filter(|page| !used.contains(page)).collect();
        unused.into_iter().for_each(|page| self.unmap(page));
    }
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

impl Drop for Allocation {
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
