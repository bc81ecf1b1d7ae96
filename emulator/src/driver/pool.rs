//! The pool of each device, whose handle is the device's number plus one, and allocations in the order of a stream.

use super::{Out, device::device, put};
use crate::entry_points::entry_points;
use crate::error::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, Result};
use crate::handles::Handle;
use crate::memory;
use crate::settings;
use crate::stream::{Operation, OperationKind, check_device, stream};

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, and what a pool holds and has given out.
const RELEASE_THRESHOLD: i32 = 4;
const RESERVED_MEM_CURRENT: i32 = 5;
const USED_MEM_CURRENT: i32 = 7;

fn pool_of(handle: Handle) -> Result<usize> {
    handle.checked_sub(1).filter(|&device| device < settings::get().devices).ok_or(INVALID_HANDLE)
}

/// Memory of the device's pool.
fn allocate(bytes: usize, on: Handle) -> Result<u64> {
    let stream = stream(on)?;
    check_device(stream.device)?;
    let memory = memory::get();
    let at = memory.allocate(stream.device, bytes as u64, true).or_else(|_| {
        // What earlier operations of the stream free is used again.
        stream.forbid_capture()?;
        stream.wait()?;
        memory.allocate(stream.device, bytes as u64, true)
    })?;
    if let Some(capture) = stream.capture() {
        capture.own(at);
    }
    Ok(at)
}

entry_points! {
    fn cuMemAllocAsync(out: Out<u64>, bytes: usize, on: Handle) { put(out, allocate(bytes, on)?) }
    fn cuMemAllocFromPoolAsync(out: Out<u64>, bytes: usize, pool: Handle, on: Handle) {
        if pool_of(pool)? != stream(on)?.device { return Err(NOT_SUPPORTED) }
        put(out, allocate(bytes, on)?)
    }
    fn cuMemFreeAsync(at: u64, on: Handle) {
        let stream = stream(on)?;
        check_device(stream.device)?;
        if let Some(capture) = stream.capture() {
            capture.own(at);
            return Ok(());
        }
        stream.push(Operation::new(OperationKind::Empty, move || memory::get().free(at)))
    }
    fn cuDeviceGetDefaultMemPool(out: Out<Handle>, number: i32) { put(out, device(number)? + 1) }
    fn cuDeviceGetMemPool(out: Out<Handle>, number: i32) { put(out, device(number)? + 1) }
    fn cuDeviceSetMemPool(number: i32, pool: Handle) {
        if pool_of(pool)? == device(number)? { Ok(()) } else { Err(NOT_SUPPORTED) }
    }
    fn cuMemPoolSetAttribute(pool: Handle, which: i32, value: *const u64) {
        if value.is_null() { return Err(INVALID_VALUE) }
        match which {
            RELEASE_THRESHOLD => memory::get().set_pool_threshold(pool_of(pool)?, *value),
            1..=3 => drop(pool_of(pool)?), // ways to use memory again, which the emulator does not do
            _ => return Err(NOT_SUPPORTED),
        }
        Ok(())
    }
    fn cuMemPoolGetAttribute(pool: Handle, which: i32, out: Out<u64>) {
        let device = pool_of(pool)?;
        match which {
            RELEASE_THRESHOLD => put(out, memory::get().pool_threshold(device)),
            RESERVED_MEM_CURRENT => put(out, memory::get().pool_bytes(device).1),
            USED_MEM_CURRENT => put(out, memory::get().pool_bytes(device).0),
            _ => Err(NOT_SUPPORTED),
        }
    }
    fn cuMemPoolTrimTo(pool: Handle, keep: usize) { memory::get().trim(pool_of(pool)?, Some(keep as u64)); Ok(()) }
}
