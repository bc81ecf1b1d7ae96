//! Memory, copies and fills.

use super::device::device_of;
use super::{Out, put, put_if_asked};
use crate::entry_points::entry_points;
use crate::error::{INVALID_VALUE, NOT_SUPPORTED, Result};
use crate::handles::Handle;
use crate::memory::{self, is_device_address};
use crate::settings;
use crate::stream::{
    Operation, OperationKind, Stream, check_device, current_device, current_stream, drain_device,
    forbid_while_capturing, stream, wait_for_default,
};

/// Copies where the bytes are now.
///
/// # Safety
/// An address outside of the device's memory is valid for this many bytes of the host.
unsafe fn copy_now(to: u64, from: u64, bytes: usize) -> Result {
    let memory = memory::get();
    // SAFETY: the caller answers for the host's memory, and the device's is checked.
    unsafe { memory.bytes_at(from, bytes)?.copy_to(memory.bytes_at(to, bytes)?, bytes) };
    Ok(())
}

/// A copy in its turn.
fn copy_operation(to: u64, from: u64, bytes: usize) -> Operation {
    Operation::new(OperationKind::Copy, move || {
        let memory = memory::get();
        let (to, from) = (memory.bytes_at_run(to, bytes)?, memory.bytes_at_run(from, bytes)?);
        // SAFETY: the device's memory is checked, and the host's is page-locked or is waited for by its owner.
        unsafe { from.copy_to(to, bytes) };
        Ok(())
    })
}

/// Rows in the memory of a device: a half of `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PeerRows {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    kind: i32,
    host: u64,
    at: u64,
    array: u64,
    context: Handle,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D_PEER`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PeerCopy {
    from: PeerRows,
    to: PeerRows,
    width: usize,
    height: usize,
    depth: usize,
}

impl PeerRows {
    /// `CU_MEMORYTYPE_DEVICE`
    const DEVICE: i32 = 2;

    /// `bytes` bytes at an address.
    fn one(at: u64, context: Handle, bytes: usize) -> Self {
        Self { x: 0, y: 0, z: 0, lod: 0, kind: Self::DEVICE, host: 0, at, array: 0, context, pitch: bytes, height: 1 }
    }

    /// The address of a row.
    fn row(&self, row: usize) -> u64 {
        self.at + (row * self.pitch) as u64
    }

    /// Fails unless they are `height` rows of `width` bytes in memory of the context's device.
    fn check(&self, width: usize, height: usize) -> Result {
        let Self { x, y, z, lod, kind, at, context, pitch, .. } = *self;
        if kind != Self::DEVICE || [x, y, z, lod] != [0; 4] {
            eprintln!("emulator: copies between devices from or to the middle of a box, or no device memory");
            return Err(NOT_SUPPORTED);
        }
        let memory = memory::get();
        if pitch < width || context == 0 || memory.device_of(at) != device_of(context)? {
            eprintln!("emulator: {width} bytes of each {pitch} at {at:#x} are not rows of the context's device");
            return Err(INVALID_VALUE);
        }
        (0..height).try_for_each(|row| memory.bytes_at(self.row(row), width).map(drop))
    }
}

impl PeerCopy {
    /// Does the copy in a stream.
    fn start(self, stream: &Stream) -> Result {
        check_device(stream.device)?;
        let Self { from, to, width, height, depth } = self;
        if depth > 1 {
            eprintln!("emulator: copies of several layers between devices");
            return Err(NOT_SUPPORTED);
        }
        if width * height * depth == 0 {
            return Ok(());
        }
        from.check(width, height)?;
        to.check(width, height)?;
        stream.push(Operation::new(OperationKind::Copy, move || {
            let memory = memory::get();
            for row in 0..height {
                let from = memory.bytes_at_run(from.row(row), width)?;
                // SAFETY: both are memory of devices, and checked.
                unsafe { from.copy_to(memory.bytes_at_run(to.row(row), width)?, width) };
            }
            Ok(())
        }))
    }
}

/// A copy that is not asynchronous: after all that the default stream waits for.
///
/// # Safety
/// As for [`copy_now`].
unsafe fn copy(to: u64, from: u64, bytes: usize) -> Result {
    forbid_while_capturing()?;
    wait_for_default(current_device()?)?;
    // SAFETY: the caller answers for the host's memory.
    unsafe { copy_now(to, from, bytes) }
}

/// A copy in a stream. As in CUDA, pageable memory of the host has been read, or been written, when the call returns.
///
/// # Safety
/// As for [`copy_now`], and until the operation has run.
unsafe fn copy_async(to: u64, from: u64, bytes: usize, stream: &Stream) -> Result {
    check_device(stream.device)?;
    let memory = memory::get();
    memory.bytes_at(to, bytes)?;
    memory.bytes_at(from, bytes)?;
    let is_pageable = |at| !is_device_address(at) && !memory.pinned.holds(at, bytes as u64);
    if bytes == 0 {
        return Ok(());
    }
    if is_pageable(from) {
        stream.forbid_capture()?;
        // SAFETY: the caller answers for the host's memory.
        let data = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
        stream.push(Operation::new(OperationKind::Copy, move || {
            let to = memory::get().bytes_at_run(to, bytes)?;
            // SAFETY: the device's memory is checked.
            unsafe { to.copy_from(data.as_ptr(), bytes) };
            Ok(())
        }))
    } else if is_pageable(to) {
        stream.forbid_capture()?;
        stream.push(copy_operation(to, from, bytes))?;
        stream.wait()
    } else {
        stream.push(copy_operation(to, from, bytes))
    }
}

/// Fills `count` values of `width` bytes in a stream.
fn fill(at: u64, value: u32, width: usize, count: usize, stream: &Stream) -> Result {
    if !at.is_multiple_of(width as u64) {
        return Err(INVALID_VALUE);
    }
    memory::get().bytes_at(at, width * count)?;
    stream.push(Operation::new(OperationKind::Fill, move || {
        let to = memory::get().bytes_at_run(at, width * count)?;
        // SAFETY: the device's memory is checked, and aligned to the width.
        unsafe {
            match width {
                1 => to.write_bytes(value as u8, count),
                2 => std::slice::from_raw_parts_mut(to.cast::<u16>(), count).fill(value as u16),
                _ => std::slice::from_raw_parts_mut(to.cast::<u32>(), count).fill(value),
            }
        }
        Ok(())
    }))
}

/// Fills and waits.
fn fill_now(at: u64, value: u32, width: usize, count: usize) -> Result {
    forbid_while_capturing()?;
    let stream = current_stream()?;
    fill(at, value, width, count, &stream)?;
    stream.wait()
}

/// An attribute of an address, by `CUpointer_attribute`.
///
/// # Safety
/// `out` is valid for the attribute's type.
unsafe fn pointer_attribute(out: Out<u64>, which: i32, at: u64) -> Result {
    let memory = memory::get();
    let device = memory.device_of(at);
    if device.is_none() && !memory.pinned.holds(at, 1) {
        return Err(INVALID_VALUE);
    }
    let (start, bytes) = memory.allocation_of(at).unwrap_or((at, 0));
    // SAFETY: the caller answers for `out`: handles and addresses have 8 bytes, numbers 4.
    unsafe {
        match which {
            1 => put(out, device.map_or(0, |device| device as u64 + 1)), // context
            2 => put(out.cast::<u32>(), if device.is_some() { 2 } else { 1 }), // memory of the device or of the host
            3 => put(out, at),
            9 => put(out.cast::<i32>(), device.unwrap_or(0) as i32),
            11 => put(out, start),
            12 => put(out, bytes),
            _ => Err(INVALID_VALUE),
        }
    }
}

entry_points! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let device = current_device()?;
        check_device(device)?;
        put(free, memory::get().free_bytes(device) as usize)?;
        put(total, settings::get().memory as usize)
    }
    fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) {
        forbid_while_capturing()?;
        let device = current_device()?;
        check_device(device)?;
        put(out, memory::get().allocate(device, bytes as u64, false)?)
    }
    fn cuMemFree_v2(at: u64) {
        forbid_while_capturing()?;
        drain_device(current_device()?)?;
        memory::get().free(at)
    }
    fn cuMemGetAddressRange_v2(start: Out<u64>, bytes: Out<usize>, at: u64) {
        let (own_start, own_bytes) = memory::get().allocation_of(at).ok_or(INVALID_VALUE)?;
        put_if_asked(start, own_start);
        put_if_asked(bytes, own_bytes as usize);
        Ok(())
    }
    fn cuPointerGetAttribute(out: Out<u64>, which: i32, at: u64) { pointer_attribute(out, which, at) }

    fn cuMemHostAlloc(out: Out<u64>, bytes: usize, _flags: u32) {
        forbid_while_capturing()?;
        check_device(current_device()?)?;
        put(out, memory::get().pinned.allocate(bytes as u64)?)
    }
    fn cuMemAllocHost_v2(out: Out<u64>, bytes: usize) {
        forbid_while_capturing()?;
        check_device(current_device()?)?;
        put(out, memory::get().pinned.allocate(bytes as u64)?)
    }
    fn cuMemFreeHost(at: u64) {
        forbid_while_capturing()?;
        drain_device(current_device()?)?;
        memory::get().pinned.free(at)
    }
    fn cuMemHostRegister_v2(at: u64, bytes: usize, _flags: u32) {
        forbid_while_capturing()?;
        check_device(current_device()?)?;
        memory::get().pinned.register(at, bytes as u64)
    }
    fn cuMemHostUnregister(at: u64) {
        forbid_while_capturing()?;
        drain_device(current_device()?)?;
        memory::get().pinned.unregister(at)
    }
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, at: u64, _flags: u32) {
        if memory::get().pinned.holds(at, 1) { put(out, at) } else { Err(INVALID_VALUE) }
    }
    fn cuMemHostGetFlags(out: Out<u32>, at: u64) {
        if memory::get().pinned.holds(at, 1) { put(out, 0) } else { Err(INVALID_VALUE) }
    }

    fn cuMemcpy(to: u64, from: u64, bytes: usize) { copy(to, from, bytes) }
    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) { copy(to, from, bytes) }
    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) { copy(to, from, bytes) }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) { copy(to, from, bytes) }
    fn cuMemcpyPeer(to: u64, _to_context: Handle, from: u64, _from_context: Handle, bytes: usize) {
        copy(to, from, bytes)
    }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, on: Handle) { copy_async(to, from, bytes, &*stream(on)?) }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, on: Handle) { copy_async(to, from, bytes, &*stream(on)?) }
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, on: Handle) { copy_async(to, from, bytes, &*stream(on)?) }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, on: Handle) { copy_async(to, from, bytes, &*stream(on)?) }
    fn cuMemcpyPeerAsync(
        to: u64, to_context: Handle, from: u64, from_context: Handle, bytes: usize, on: Handle
    ) {
        let (from, to) = (PeerRows::one(from, from_context, bytes), PeerRows::one(to, to_context, bytes));
        PeerCopy { from, to, width: bytes, height: 1, depth: 1 }.start(&*stream(on)?)
    }
    fn cuMemcpy3DPeerAsync(copy: *const PeerCopy, on: Handle) {
        copy.as_ref().ok_or(INVALID_VALUE)?.start(&*stream(on)?)
    }

    fn cuMemsetD8_v2(at: u64, value: u8, count: usize) { fill_now(at, value.into(), 1, count) }
    fn cuMemsetD16_v2(at: u64, value: u16, count: usize) { fill_now(at, value.into(), 2, count) }
    fn cuMemsetD32_v2(at: u64, value: u32, count: usize) { fill_now(at, value, 4, count) }
    fn cuMemsetD8Async(at: u64, value: u8, count: usize, on: Handle) { fill(at, value.into(), 1, count, &*stream(on)?) }
    fn cuMemsetD16Async(at: u64, value: u16, count: usize, on: Handle) {
        fill(at, value.into(), 2, count, &*stream(on)?)
    }
    fn cuMemsetD32Async(at: u64, value: u32, count: usize, on: Handle) { fill(at, value, 4, count, &*stream(on)?) }
}
