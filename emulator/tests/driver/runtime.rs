//! Launches by the runtime, as nvcc compiles `<<<>>>`.

use crate::device::*;
use cuda::libraries::cudart::*;
use std::ffi::{CString, c_void};
use std::ptr::null;

/// A function of the host that stands for a kernel: never called.
extern "C" fn increment() {}

/// As code of nvcc's does before `main`.
fn register() {
    let image = CString::new(KERNELS).expect("no zero").into_raw();
    let wrapper = Wrapper { magic: 0x4662_43b1, version: 1, image: image.cast(), file: null() };
    // SAFETY: the image is kept; what is null is not read.
    unsafe {
        let binary = __cudaRegisterFatBinary(&raw const wrapper);
        let (function, name) = (increment as *const c_void, c"increment".as_ptr());
        __cudaRegisterFunction(binary, function, function, name, -1, null(), null(), null(), null(), null());
        __cudaRegisterFatBinaryEnd(binary);
    }
}

/// `increment<<<blocks, 128, shared, stream>>>(at, n)`
fn launch_as_nvcc_does((at, n): (u64, u32), blocks: u32, shared: usize, stream: usize) -> i32 {
    let (x, y) = (Dim3 { x: blocks, y: 1, z: 1 }, Dim3 { x: 128, y: 1, z: 1 });
    let (mut grid, mut block, mut bytes, mut on, mut kernel) = (y, y, 0, 0, 0);
    let arguments = [(&raw const at).cast::<u8>(), (&raw const n).cast()];
    // SAFETY: all pointers are to variables of this function.
    unsafe {
        ok(__cudaPushCallConfiguration(x, y, shared, stream));
        ok(__cudaGetKernel(&raw mut kernel, increment as *const () as usize));
        ok(__cudaPopCallConfiguration(&raw mut grid, &raw mut block, &raw mut bytes, &raw mut on));
        __cudaLaunchKernel(kernel, grid, block, arguments.as_ptr(), bytes, on)
    }
}

#[test]
fn what_nvcc_makes_of_a_launch_runs_on_the_stream_and_its_error_is_told_once() {
    open(0);
    register();
    let (stream, at) = (new_stream(), upload(&[0.0; 300]));
    ok(launch_as_nvcc_does((at, 300), 3, 0, stream));
    ok(launch_as_nvcc_does((at, 200), 3, 0, stream));
    ok(synchronize(stream));
    let expected: Vec<f32> = (0..300).map(|i| if i < 200 { 2.0 } else { 1.0 }).collect();
    assert_eq!(download(at, 300), Ok(expected));
    assert_eq!(cudaGetLastError(), 0);
    assert_ne!(launch_as_nvcc_does((at, 300), 3, 60 << 10, stream), 0, "more shared memory than it asked for");
    assert_ne!(cudaGetLastError(), 0);
    assert_eq!(cudaGetLastError(), 0, "it was told");
    // SAFETY: the function is one of those that were registered.
    ok(unsafe { cudaFuncSetAttribute(increment as *const () as usize, 8, 60 << 10) });
    ok(launch_as_nvcc_does((at, 300), 3, 60 << 10, stream));
    ok(synchronize(stream));
    assert_ne!(launch_as_nvcc_does((at, 300), 0, 0, stream), 0, "an empty grid");
}
