//! The driver's entry points, one file a subject. Each is counted, and may be made to fail, by [`crate::failures`].

pub mod device;
pub mod event;
pub mod graph;
pub mod launch;
pub mod lookup;
pub mod memory;
pub mod missing;
pub mod pool;
pub mod stream;
pub mod virtual_memory;

use crate::error::{INVALID_VALUE, Result, is_sticky};
use crate::failures::CallCounter;
use crate::stream::{break_device, current_device};

/// Where a call writes a result.
type Out<T> = *mut T;

/// Counts a call, which may be one that is to fail. An error that lasts breaks the device that is current.
pub fn begin(call: &'static CallCounter) -> Result {
    call.begin().inspect_err(|&code| {
        if let Ok(device) = current_device()
            && is_sticky(code)
        {
            break_device(device, code);
        }
    })
}

/// Writes a result.
///
/// # Safety
/// `out` is null or valid for the value.
unsafe fn put<T>(out: Out<T>, value: T) -> Result {
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller answers for it.
    unsafe { out.write(value) };
    Ok(())
}

/// Writes a result that the caller may not want.
///
/// # Safety
/// As for [`put`].
unsafe fn put_if_asked<T>(out: Out<T>, value: T) {
    if !out.is_null() {
        // SAFETY: the caller answers for it.
        unsafe { out.write(value) };
    }
}
