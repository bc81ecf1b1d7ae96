//! Streams.

use std::ffi::c_void;

use super::{Out, put};
use crate::entry_points::entry_points;
use crate::error::{NOT_READY, Result};
use crate::handles::Handle;
use crate::memory;
use crate::stream::{Operation, OperationKind, STREAMS, Stream, check_device, current_device, stream};

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

/// A function of the program that a stream calls.
type HostFunction = unsafe extern "C" fn(*mut c_void);

fn create(flags: u32) -> Result<Handle> {
    let device = current_device()?;
    check_device(device)?;
    Ok(STREAMS.add(Stream::new(device, flags & NON_BLOCKING == 0)))
}

entry_points! {
    fn cuStreamCreate(out: Out<Handle>, flags: u32) { put(out, create(flags)?) }
    fn cuStreamCreateWithPriority(out: Out<Handle>, flags: u32, _priority: i32) { put(out, create(flags)?) }
    fn cuStreamDestroy_v2(handle: Handle) { STREAMS.remove(handle)?.close(); Ok(()) }
    fn cuStreamSynchronize(on: Handle) {
        let stream = stream(on)?;
        stream.forbid_capture()?;
        stream.wait()?;
        memory::get().trim(stream.device, None);
        Ok(())
    }
    fn cuStreamQuery(on: Handle) {
        let stream = stream(on)?;
        stream.forbid_capture()?;
        check_device(stream.device)?;
        if stream.is_idle() { check_device(stream.device) } else { Err(NOT_READY) }
    }
    fn cuStreamGetDevice(on: Handle, out: Out<i32>) { put(out, stream(on)?.device as i32) }
    fn cuStreamGetCtx(on: Handle, out: Out<Handle>) { put(out, stream(on)?.device + 1) }
    fn cuStreamGetPriority(on: Handle, out: Out<i32>) { stream(on)?; put(out, 0) }
    fn cuStreamGetId(on: Handle, out: Out<u64>) { stream(on)?; put(out, on as u64) }
    fn cuLaunchHostFunc(on: Handle, function: HostFunction, data: Handle) {
        stream(on)?.push(Operation::new(OperationKind::Host, move || {
            // SAFETY: the program gave the function this argument.
            unsafe { function(data as *mut c_void) };
            Ok(())
        }))
    }
}
