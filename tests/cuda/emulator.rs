//! What only the emulator of a GPU has: counters of calls, calls that fail because a test asks, and who holds how
//! much of the memory. And tests that need it, or more than one device: `require!(emulated("launches are counted"))`.

use std::ffi::{CStr, c_char, c_void};

use rollout_kernels::{Backend, DeviceOptions, Devices};

use crate::require::left_out;

/// With it no test may be left out.
const VARIABLE: &str = "ROLLOUT_REQUIRE_GPU";

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Whether there is the emulator, and not a card.
pub fn is_there() -> bool {
    find(c"cuemu_calls").is_some()
}

/// Whether there is the emulator; on a card the running test is left out, because `why`.
pub fn emulated(why: &str) -> bool {
    is_there() || left_out(VARIABLE, &format!("{why}; only the emulator does that"))
}

/// Whether there are as many GPUs, which the emulator has; without them the running test is left out.
pub fn gpus(count: usize) -> bool {
    let is_cuda = |backend: &&Backend| backend.name() == "cuda";
    let open = || Devices::open(*Backend::ALL.iter().find(is_cuda).unwrap(), count, &DeviceOptions::default());
    is_there() || open().is_ok() || left_out(VARIABLE, &format!("it needs {count} GPUs"))
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
    unsafe { fail(call.as_ptr(), u32::try_from(after).expect("fewer calls"), code) };
}

/// How often this process has made a call.
pub fn calls(call: &CStr) -> u64 {
    type Calls = unsafe extern "C" fn(*const c_char) -> u64;
    // SAFETY: the function has this type.
    let calls = unsafe { std::mem::transmute::<*mut c_void, Calls>(of_the_emulator(c"cuemu_calls")) };
    // SAFETY: the name is a C string.
    unsafe { calls(call.as_ptr()) }
}

/// Lets a neighbour, who is made up, hold so many bytes of device 0.
pub fn neighbour(bytes: u64) {
    type Neighbour = extern "C" fn(i32, u64) -> i32;
    // SAFETY: the emulator's function has this type.
    let call = unsafe { std::mem::transmute::<*mut c_void, Neighbour>(of_the_emulator(c"cuemu_neighbour")) };
    assert_eq!(call(0, bytes), 0);
}

/// The most bytes of a device that this process has held at a time since the last call.
pub fn peak(device: i32) -> u64 {
    // SAFETY: the emulator's function has this type.
    let call: extern "C" fn(i32) -> i64 = unsafe { std::mem::transmute(of_the_emulator(c"cuemu_peak")) };
    u64::try_from(call(device)).expect("there is such a device")
}
