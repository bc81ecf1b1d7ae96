//! Virtual memory, and memory of other processes.

use super::{Out, device::device, put};
use crate::entry_points::entry_points;
use crate::error::{INVALID_VALUE, NOT_SUPPORTED, Result};
use crate::memory::{self, GRANULARITY, IpcKey};
use crate::stream::{check_device, current_device, drain_device, forbid_while_capturing};

/// `CUmemLocation`
#[repr(C)]
pub struct Location {
    kind: i32,
    number: i32,
}

impl Location {
    fn device(&self) -> Result<usize> {
        if self.kind == 1 { device(self.number) } else { Err(NOT_SUPPORTED) }
    }
}

/// The beginning of `CUmemAllocationProp`.
#[repr(C)]
pub struct Properties {
    kind: i32,
    handles: i32,
    location: Location,
}

/// `CUmemAccessDesc`
#[repr(C)]
pub struct MemoryAccess {
    location: Location,
    flags: i32,
}

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const READ_WRITE: i32 = 3;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: i32 = 1;

/// The device on which physical memory with these properties is made.
unsafe fn device_for(properties: *const Properties) -> Result<usize> {
    // SAFETY: the caller's pointer is null or valid.
    let properties = unsafe { properties.as_ref() }.ok_or(INVALID_VALUE)?;
    if properties.kind != PINNED {
        return Err(INVALID_VALUE);
    }
    if properties.handles != 0 {
        eprintln!("emulator: shareable handles of virtual memory are not emulated");
        return Err(NOT_SUPPORTED);
    }
    properties.location.device()
}

/// `CUipcMemHandle`
#[repr(C)]
pub struct IpcHandle(IpcKey);

entry_points! {
    fn cuMemGetAllocationGranularity(out: Out<usize>, properties: *const Properties, _option: i32) {
        device_for(properties)?;
        put(out, GRANULARITY as usize)
    }
    fn cuMemAddressReserve(out: Out<u64>, bytes: usize, align: usize, _at: u64, flags: u64) {
        if flags != 0 { return Err(INVALID_VALUE) }
        put(out, memory::get().reserve_addresses(bytes as u64, align as u64)?)
    }
    fn cuMemAddressFree(at: u64, bytes: usize) { memory::get().free_addresses(at, bytes as u64) }
    fn cuMemCreate(out: Out<u64>, bytes: usize, properties: *const Properties, flags: u64) {
        if flags != 0 { return Err(INVALID_VALUE) }
        forbid_while_capturing()?;
        let device = device_for(properties)?;
        check_device(device)?;
        put(out, memory::get().create(device, bytes as u64)?)
    }
    fn cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        if flags != 0 { return Err(INVALID_VALUE) }
        forbid_while_capturing()?;
        memory::get().map(at, bytes as u64, offset as u64, handle)
    }
    fn cuMemSetAccess(at: u64, bytes: usize, access: *const MemoryAccess, count: usize) {
        let access = if access.is_null() { &[] } else { std::slice::from_raw_parts(access, count) };
        if access.is_empty() { return Err(INVALID_VALUE) }
        let mut devices = 0;
        for access in access {
            devices |= 1 << access.location.device()?;
            if access.flags != READ_WRITE {
                eprintln!("emulator: access other than to read and write is not emulated");
                return Err(NOT_SUPPORTED);
            }
        }
        memory::get().allow_access(at, bytes as u64, devices)
    }
    fn cuMemUnmap(at: u64, bytes: usize) {
        forbid_while_capturing()?;
        memory::get().unmap(at, bytes as u64)
    }
    fn cuMemRelease(handle: u64) {
        forbid_while_capturing()?;
        memory::get().release(handle)
    }

    fn cuIpcGetMemHandle(out: Out<IpcHandle>, at: u64) { put(out, IpcHandle(memory::get().export(at)?)) }
    fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: IpcHandle, _flags: u32) {
        let device = current_device()?;
        check_device(device)?;
        put(out, memory::get().import(device, handle.0)?)
    }
    fn cuIpcCloseMemHandle(at: u64) {
        forbid_while_capturing()?;
        drain_device(current_device()?)?;
        memory::get().close(at)
    }
}
