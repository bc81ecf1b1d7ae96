//! Entry points by name, for programs that are not linked with the driver.

use std::ffi::{CStr, CString, c_char, c_void};

use super::{Out, put, put_if_asked};
use crate::entry_points::entry_points;
use crate::error::{INVALID_VALUE, NOT_FOUND, Result};

/// The newest version of an entry point that there is.
fn find(name: &str) -> *mut c_void {
    let own = find as *const () as *const c_void;
    // SAFETY: the addresses and strings are valid; the library is loaded, since this is its code.
    unsafe {
        let mut place: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(own, &raw mut place) == 0 {
            return std::ptr::null_mut();
        }
        let library = libc::dlopen(place.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let versions = ["_v4", "_v3", "_v2", ""].map(|version| CString::new(format!("{name}{version}")));
        let found = versions.iter().flatten().map(|name| libc::dlsym(library, name.as_ptr()));
        found.into_iter().find(|address| !address.is_null()).unwrap_or(std::ptr::null_mut())
    }
}

/// # Safety
/// As of the entry points below.
unsafe fn look_up(name: *const c_char, out: Out<*mut c_void>, status: Out<i32>) -> Result {
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's name is a C string, and the others are null or valid.
    unsafe {
        let address = find(&CStr::from_ptr(name).to_string_lossy());
        put(out, address)?;
        put_if_asked(status, i32::from(address.is_null())); // found, or not
        if address.is_null() { Err(NOT_FOUND) } else { Ok(()) }
    }
}

entry_points! {
    fn cuGetProcAddress(name: *const c_char, out: Out<*mut c_void>, _version: i32, _flags: u64) {
        look_up(name, out, std::ptr::null_mut())
    }
    fn cuGetProcAddress_v2(name: *const c_char, out: Out<*mut c_void>, _version: i32, _flags: u64, status: Out<i32>) {
        look_up(name, out, status)
    }
}
