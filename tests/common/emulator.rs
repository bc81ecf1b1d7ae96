//! What only the emulator of a GPU has: counters of calls, calls that fail because a test asks, and who holds how
//! much of the memory.

use std::ffi::{CStr, c_char, c_void};

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Whether there is the emulator, and not a card.
pub fn is_there() -> bool {
    find(c"cuemu_calls").is_some()
}

/// The address of a function that only the emulator has, if this is one.
fn find(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let address = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

fn of_the_emulator(name: &CStr) -> *mut c_void {
    find(name).expect("this is no emulator: does LD_LIBRARY_PATH name its folder?")
}

/// Makes a call fail with `code` after it went well `after` times; with code 0 none of this name.
pub fn fail(call: &CStr, after: u64, code: i32) {
    type Fail = unsafe extern "C" fn(*const c_char, u32, i32);
    // SAFETY: the function has this type.
    let fail = unsafe { std::mem::transmute::<*mut c_void, Fail>(of_the_emulator(c"cuemu_fail")) };
    // SAFETY: the name is a C string.
    unsafe { fail(call.as_ptr(), after as u32, code) };
}

/// How often this process has made a call.
pub fn calls(call: &CStr) -> u64 {
    type Calls = unsafe extern "C" fn(*const c_char) -> u64;
    // SAFETY: the function has this type.
    let calls = unsafe { std::mem::transmute::<*mut c_void, Calls>(of_the_emulator(c"cuemu_calls")) };
    // SAFETY: the name is a C string.
    unsafe { calls(call.as_ptr()) }
}

/// Lets a neighbour, who is made up, hold so many bytes of device 0. False on a card.
pub fn neighbour(bytes: u64) -> bool {
    let Some(address) = find(c"cuemu_neighbour") else {
        println!("skipped: a neighbour who holds memory is made up by the emulator alone");
        return false;
    };
    // SAFETY: the emulator's function has this type.
    let call: extern "C" fn(i32, u64) -> i32 = unsafe { std::mem::transmute(address) };
    assert_eq!(call(0, bytes), 0);
    true
}

/// The most bytes of a device that this process has held at a time since the last call; `None` on a card.
pub fn peak(device: i32) -> Option<u64> {
    let Some(address) = find(c"cuemu_peak") else {
        println!("skipped: the most that a process has held is known to the emulator alone");
        return None;
    };
    // SAFETY: the emulator's function has this type.
    let call: extern "C" fn(i32) -> i64 = unsafe { std::mem::transmute(address) };
    Some(u64::try_from(call(device)).expect("there is such a device"))
}
