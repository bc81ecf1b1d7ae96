//! NVML, as far as it says who holds how much of a device. `CUEMU_NVML` says how much it tells.

use std::ffi::{CStr, c_char};

use crate::driver::device::uuid_text;
use crate::entry_points::entry_points;
use crate::error::{ErrorCode, Result};
use crate::memory;
use crate::settings::{self, Nvml};

const UNINITIALIZED: i32 = 1;
const INVALID_ARGUMENT: i32 = 2;
const NO_PERMISSION: i32 = 4;
const NOT_FOUND: i32 = 6;
const INSUFFICIENT_SIZE: i32 = 7;
const DRIVER_NOT_LOADED: i32 = 9;
const UNKNOWN: i32 = 999;

/// `nvmlMemory_t`
#[repr(C)]
pub struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`
#[repr(C)]
pub struct ProcessInfo {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// The library's status for a code, which may be one already.
fn status_of(code: ErrorCode) -> i32 {
    if (1..=29).contains(&code) { code } else { UNKNOWN }
}

/// The device of a handle, which is its number and one.
fn device(handle: usize) -> Result<usize> {
    if settings::get().nvml == Nvml::Off {
        return Err(UNINITIALIZED);
    }
    handle.checked_sub(1).filter(|&device| device < settings::get().devices).ok_or(INVALID_ARGUMENT)
}

/// # Safety
/// `out` is null or valid for the value.
unsafe fn put<T>(out: *mut T, value: T) -> Result {
    if out.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller answers for it.
    unsafe { out.write(value) };
    Ok(())
}

/// The text of a status.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is NVML's")]
pub extern "C" fn nvmlErrorString(status: i32) -> *const c_char {
    let text = match status {
        0 => c"Success",
        UNINITIALIZED => c"Uninitialized",
        NO_PERMISSION => c"Insufficient Permissions",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        DRIVER_NOT_LOADED => c"Driver Not Loaded",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

entry_points! {
    status status_of;
    fn nvmlInit_v2() { if settings::get().nvml == Nvml::Off { Err(DRIVER_NOT_LOADED) } else { Ok(()) } }
    fn nvmlShutdown() { Ok(()) }
    fn nvmlDeviceGetHandleByUUID(name: *const c_char, out: *mut usize) {
        let name = CStr::from_ptr(name).to_string_lossy();
        let found = (0..settings::get().devices).find(|&device| name == format!("GPU-{}", uuid_text(device)));
        put(out, found.ok_or(NOT_FOUND)? + 1)
    }
    fn nvmlDeviceGetMemoryInfo(handle: usize, out: *mut MemoryInfo) {
        let (total, free) = (settings::get().memory, memory::get().free_bytes(device(handle)?));
        put(out, MemoryInfo { total, free, used: total - free })
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(handle: usize, count: *mut u32, out: *mut ProcessInfo) {
        let device = device(handle)?;
        if settings::get().nvml == Nvml::Device {
            return Err(NO_PERMISSION);
        }
        let holders = memory::get().holders(device);
        let room = count.read() as usize;
        count.write(holders.len() as u32);
        if room < holders.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        for (i, (pid, used)) in holders.into_iter().enumerate() {
            out.add(i).write(ProcessInfo { pid, used, gpu_instance: u32::MAX, compute_instance: u32::MAX });
        }
        Ok(())
    }
}
