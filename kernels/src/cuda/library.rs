//! Libraries that are loaded where they are needed, so that no program wants them that does without.

use std::ffi::{CStr, c_void};

/// A library of the system, which is never closed.
pub(super) struct Library {
    name: &'static CStr,
    handle: *mut c_void,
}

impl Library {
    /// `None` if there is no such library.
    pub fn open(name: &'static CStr) -> Option<Self> {
        // SAFETY: the name is a C string; the initialisation of NVIDIA's libraries has no requirement.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        (!handle.is_null()).then_some(Self { name, handle })
    }

    /// The function with this name.
    ///
    /// # Errors
    /// If there is none.
    ///
    /// # Safety
    /// `F` is the function's type.
    pub unsafe fn find<F: Copy>(&self, function: &CStr) -> Result<F, String> {
        // SAFETY: the library is open.
        let found = unsafe { libc::dlsym(self.handle, function.as_ptr()) };
        if found.is_null() {
            return Err(format!("{} has no {}", self.name.to_string_lossy(), function.to_string_lossy()));
        }
        // SAFETY: a function's type is a pointer, and this one is the function's.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }
}
