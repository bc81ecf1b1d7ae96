//! The emulated device by its driver's calls, as a program would make them.

use std::ffi::{CString, c_void};
use std::ptr::null;

// The library's symbols are those of libcuda.
use cuda as _;

unsafe extern "C" {
    fn cuInit(flags: u32) -> i32;
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) -> i32;
    fn cuCtxSetCurrent(context: usize) -> i32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> i32;
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> i32;
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> i32;
    fn cuModuleLoadData(module: *mut usize, image: *const c_void) -> i32;
    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const std::ffi::c_char) -> i32;
    fn cuStreamSynchronize(stream: usize) -> i32;
    fn cuLaunchKernel(
        function: usize,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared_bytes: u32,
        stream: usize,
        parameters: *const *const c_void,
        extra: *const *const c_void,
    ) -> i32;
}

fn check(call: &str, code: i32) {
    assert_eq!(code, 0, "{call} failed");
}

/// Makes the first device the calling thread's.
fn open() {
    let mut context = 0;
    // SAFETY: the context is a number that the driver gave.
    unsafe {
        check("cuInit", cuInit(0));
        check("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&mut context, 0));
        check("cuCtxSetCurrent", cuCtxSetCurrent(context));
    }
}

/// Device memory with these words, for as long as the process.
pub fn upload(words: &[u64]) -> u64 {
    open();
    let (mut address, bytes) = (0, size_of_val(words));
    // SAFETY: the allocation has as many bytes as the words.
    unsafe {
        check("cuMemAlloc", cuMemAlloc_v2(&mut address, bytes));
        check("cuMemcpyHtoD", cuMemcpyHtoD_v2(address, words.as_ptr().cast(), bytes));
    }
    address
}

pub fn download(address: u64, count: usize) -> Vec<u64> {
    let mut words = vec![0; count];
    // SAFETY: the words have as many bytes as are copied; the driver checks the address.
    unsafe { check("cuMemcpyDtoH", cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), address, size_of_val(&*words))) };
    words
}

/// The head of each module.
const HEAD: &str = ".version 8.8\n.target sm_90\n.address_size 64\n";

/// Loads a module; its text is without the head.
pub fn load(text: &str) -> Result<usize, i32> {
    open();
    let text = CString::new(format!("{HEAD}{text}")).expect("PTX has no zero byte");
    let mut module = 0;
    // SAFETY: the text ends with a zero byte.
    match unsafe { cuModuleLoadData(&mut module, text.as_ptr().cast()) } {
        0 => Ok(module),
        code => Err(code),
    }
}

/// Runs the module's entry point `test` on 64-bit parameters and waits for it.
pub fn launch(text: &str, blocks: u32, threads: u32, shared_bytes: u32, parameters: &[u64]) -> Result<(), i32> {
    let module = load(text).unwrap_or_else(|code| panic!("the module fails with {code}:\n{text}"));
    let pointers = parameters.iter().map(|p| (&raw const *p).cast::<c_void>()).collect::<Vec<_>>();
    let mut function = 0;
    // SAFETY: the entry point takes as many parameters of 64 bits.
    let code = unsafe {
        check("cuModuleGetFunction", cuModuleGetFunction(&mut function, module, c"test".as_ptr()));
        let started = cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, 0, pointers.as_ptr(), null());
        if started == 0 { cuStreamSynchronize(0) } else { started }
    };
    if code == 0 { Ok(()) } else { Err(code) }
}
