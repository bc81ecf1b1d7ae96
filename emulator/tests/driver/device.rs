//! Helpers that the tests share: a device, kernels, and processes of their own.

use std::ffi::{CString, c_void};
use std::process::Command;
use std::ptr::{null, null_mut};

pub use cuda::driver::device::*;
pub use cuda::driver::event::*;
pub use cuda::driver::graph::*;
pub use cuda::driver::launch::*;
pub use cuda::driver::memory::*;
pub use cuda::driver::pool::*;
pub use cuda::driver::stream::*;
pub use cuda::driver::virtual_memory::*;
pub use cuda::failures::{cuemu_calls, cuemu_fail};

/// Says in a process that it runs the body of a test.
const BODY: &str = "CUEMU_TEST_BODY";

pub const KERNELS: &str = r"
.version 8.8
.target sm_80
.address_size 64
.global .align 4 .u32 counter = 41;

// x[i] += 1 for i < n
.visible .entry increment(.param .u64 x, .param .u32 n) {
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    add.f32 %f2, %f1, 0f3F800000;
    st.global.f32 [%rd3], %f2;
DONE:
    ret;
}

// Reverses the 128 numbers of each block through shared memory, with a barrier if asked for.
.visible .entry reverse(.param .u64 x, .param .u32 wait) {
    .reg .pred %p<2>; .reg .b32 %r<12>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
    .shared .align 4 .b8 tile[512];
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [wait];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    shl.b32 %r4, %r2, 7;
    add.s32 %r5, %r4, %r3;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    mov.u32 %r6, tile;
    shl.b32 %r7, %r3, 2;
    add.s32 %r8, %r6, %r7;
    st.shared.f32 [%r8], %f1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra READ;
    bar.sync 0;
READ:
    sub.s32 %r9, 508, %r7;
    add.s32 %r10, %r6, %r9;
    ld.shared.f32 %f2, [%r10];
    st.global.f32 [%rd3], %f2;
    ret;
}

// Half of each warp waits at one barrier and half at another.
.visible .entry diverge() {
    .reg .pred %p<2>; .reg .b32 %r<3>;
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra OTHER;
    bar.sync 0;
    ret;
OTHER:
    bar.sync 1;
    ret;
}
";

/// Fails unless a call went well.
#[track_caller]
pub fn ok(code: i32) {
    assert_eq!(code, 0, "a call failed");
}

/// The value that a successful call writes.
#[track_caller]
pub fn get<T: Default>(call: impl FnOnce(*mut T) -> i32) -> T {
    let mut out = T::default();
    ok(call(&raw mut out));
    out
}

/// Runs `body` in a process of its own with these settings, since what it breaks stays broken and settings are read
/// once. Its messages must have each of `said` in them.
#[expect(clippy::disallowed_methods, reason = "the settings of the emulator are environment variables")]
pub fn alone(test: &str, settings: &[(&str, &str)], said: &[&str], body: fn()) {
    if std::env::var_os(BODY).is_some() {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().expect("the test's path"));
    command.args(["--exact", test, "--nocapture"]).env(BODY, test).envs(settings.iter().copied());
    let output = command.output().expect("the test runs once more");
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{test} in its own process:\n{text}");
    assert!(text.contains("1 passed"), "{test} is the name of a test:\n{text}");
    said.iter().for_each(|part| assert!(text.contains(part), "«{part}» is not said:\n{text}"));
}

/// Makes a device this thread's.
pub fn open(number: i32) {
    // SAFETY: the pointers are valid.
    unsafe {
        ok(cuInit(0));
        let context = get(|out| cuDevicePrimaryCtxRetain(out, number));
        ok(cuCtxSetCurrent(context));
    }
}

/// A stream that the default stream does not wait for.
pub fn new_stream() -> usize {
    // SAFETY: the pointer is valid.
    get(|out| unsafe { cuStreamCreate(out, 1) })
}

/// Device memory with these numbers.
pub fn upload(numbers: &[f32]) -> u64 {
    let bytes = size_of_val(numbers);
    // SAFETY: the pointers are valid.
    let at = get(|out| unsafe { cuMemAlloc_v2(out, bytes) });
    // SAFETY: as many bytes are read as there are.
    ok(unsafe { cuMemcpyHtoD_v2(at, numbers.as_ptr() as u64, bytes) });
    at
}

/// The numbers at a device address, or the code that the copy fails with.
pub fn download(at: u64, count: usize) -> Result<Vec<f32>, i32> {
    let mut numbers = vec![0f32; count];
    // SAFETY: there is room for as many bytes.
    match unsafe { cuMemcpyDtoH_v2(numbers.as_mut_ptr() as u64, at, 4 * count) } {
        0 => Ok(numbers),
        code => Err(code),
    }
}

/// The module of the tests' kernels.
pub fn module() -> usize {
    let text = CString::new(KERNELS).expect("no zero");
    // SAFETY: the text ends with a zero.
    get(|out| unsafe { cuModuleLoadData(out, text.as_ptr().cast()) })
}

pub fn function(name: &str) -> usize {
    let (module, name) = (module(), CString::new(name).expect("no zero"));
    // SAFETY: the name ends with a zero.
    get(|out| unsafe { cuModuleGetFunction(out, module, name.as_ptr()) })
}

/// Launches a kernel that takes an address and a number.
pub fn launch(function: usize, blocks: u32, threads: u32, at: u64, number: u32, stream: usize) -> i32 {
    let parameters = [(&raw const at).cast::<c_void>(), (&raw const number).cast()];
    // SAFETY: the kernel takes these two parameters.
    unsafe { cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.as_ptr().cast(), null()) }
}

/// Launches a kernel that takes nothing.
pub fn launch_bare(function: usize, threads: u32, stream: usize) -> i32 {
    // SAFETY: the kernel takes no parameters.
    unsafe { cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, null(), null()) }
}

/// Waits for a stream.
pub fn synchronize(stream: usize) -> i32 {
    // SAFETY: any handle may be given.
    unsafe { cuStreamSynchronize(stream) }
}

/// Free and total memory of the current device in MiB.
pub fn memory_mib() -> (usize, usize) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers are valid.
    ok(unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) });
    (free >> 20, total >> 20)
}

/// Makes a call fail.
pub fn fail(call: &str, after: u32, code: i32) {
    let call = CString::new(call).expect("no zero");
    // SAFETY: the name is a C string.
    unsafe { cuemu_fail(call.as_ptr(), after, code) };
}

/// How often a call was made.
pub fn calls(call: &str) -> u64 {
    let call = CString::new(call).expect("no zero");
    // SAFETY: the name is a C string.
    unsafe { cuemu_calls(call.as_ptr()) }
}

/// Page-locked memory of the host.
pub fn pinned(count: usize) -> &'static mut [f32] {
    // SAFETY: the pointer is valid, and so is the memory it gives, which nobody else has.
    unsafe { std::slice::from_raw_parts_mut(get::<u64>(|out| cuMemHostAlloc(out, 4 * count, 0)) as *mut f32, count) }
}

/// A null pointer for what a call need not give.
pub fn unwanted<T>() -> *mut T {
    null_mut()
}
