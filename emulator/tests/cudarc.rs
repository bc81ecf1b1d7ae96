//! A program that links libcuda, as the server does: `LD_LIBRARY_PATH` says where the emulator's libraries are.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{
    CUdriverProcAddressQueryResult, CUgraphInstantiate_flags_enum, CUstreamCaptureMode_enum, cuGetProcAddress_v2,
};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

const KERNEL: &str = r"
.version 8.8
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 x, .param .u32 n) {
    .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
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
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd3], %f2;
DONE:
    ret;
}
";

unsafe extern "C" {
    fn dlsym(library: *const c_void, name: *const c_char) -> *const c_void;
}

type Fail = unsafe extern "C" fn(*const c_char, u32, i32);
type Calls = unsafe extern "C" fn(*const c_char) -> u64;

/// The address of a function that only the emulator has.
fn of_the_emulator(name: &CStr) -> *const c_void {
    // SAFETY: the name is a C string.
    let address = unsafe { dlsym(std::ptr::null(), name.as_ptr()) };
    assert!(!address.is_null(), "this is no emulator: does LD_LIBRARY_PATH name its folder?");
    address
}

fn fail(call: &CStr, after: u32, code: i32) {
    // SAFETY: the function has this type.
    let fail = unsafe { std::mem::transmute::<*const c_void, Fail>(of_the_emulator(c"cuemu_fail")) };
    // SAFETY: the name is a C string.
    unsafe { fail(call.as_ptr(), after, code) };
}

fn calls(call: &CStr) -> u64 {
    // SAFETY: the function has this type.
    let calls = unsafe { std::mem::transmute::<*const c_void, Calls>(of_the_emulator(c"cuemu_calls")) };
    // SAFETY: the name is a C string.
    unsafe { calls(call.as_ptr()) }
}

/// Keeps other tests from running: failures and counts are the process'.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open() -> (Arc<CudaContext>, Arc<CudaStream>, CudaFunction) {
    of_the_emulator(c"cuemu_calls");
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let module = context.load_module(Ptx::from_src(KERNEL)).unwrap();
    let function = module.load_function("twice").unwrap();
    (context, stream, function)
}

/// Launches the kernel on `n` numbers.
fn twice(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    x: &mut cudarc::driver::CudaSlice<f32>,
) -> Result<(), cudarc::driver::DriverError> {
    let n = x.len() as u32;
    let mut launch = stream.launch_builder(function);
    launch.arg(x).arg(&n);
    // SAFETY: the kernel takes an address of as many numbers, and their number.
    unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }.map(drop)
}

#[test]
fn a_kernel_runs() {
    let _alone = alone();
    let (context, stream, function) = open();
    assert_eq!(context.compute_capability().unwrap(), (9, 0));
    assert!(context.name().unwrap().contains("Emulated"));
    let mut x = stream.clone_htod(&(0..1000).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
    twice(&stream, &function, &mut x).unwrap();
    let got = stream.clone_dtoh(&x).unwrap();
    assert!((0..1000).all(|i| got[i] == 2.0 * i as f32));
}

#[test]
fn a_graph_is_captured_and_replayed() {
    let _alone = alone();
    let (context, stream, function) = open();
    // SAFETY: the slices of this test are used on one stream.
    unsafe { context.disable_event_tracking() };
    let mut x = stream.clone_htod(&[1f32; 64]).unwrap();
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    twice(&stream, &function, &mut x).unwrap();
    let flags = CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("a graph");
    (0..5).for_each(|_| graph.launch().unwrap());
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [32.0; 64]);
}

#[test]
fn each_allocation_can_fail() {
    let _alone = alone();
    let (_context, stream, _function) = open();
    let work = || -> Result<Vec<f32>, cudarc::driver::DriverError> {
        let (a, b) = (stream.alloc_zeros::<f32>(10)?, stream.clone_htod(&[1f32; 10])?);
        let mut c = stream.alloc_zeros::<f32>(20)?;
        stream.memcpy_dtod(&a, &mut c.slice_mut(..10))?;
        stream.memcpy_dtod(&b, &mut c.slice_mut(10..))?;
        stream.clone_dtoh(&c)
    };
    let before = calls(c"allocation");
    let want = work().unwrap();
    let count = calls(c"allocation") - before;
    assert_eq!(count, 3);
    for i in 0..count {
        fail(c"allocation", i as u32, 2);
        assert!(work().is_err(), "allocation {i} did not fail");
        assert_eq!(work().unwrap(), want);
    }
}

#[test]
fn entry_points_are_found_by_name() {
    const FOUND: CUdriverProcAddressQueryResult = CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
    let _alone = alone();
    let (mut address, mut status, mut version) = (std::ptr::null_mut(), FOUND, 0);
    let mut find = |name: &CStr| {
        // SAFETY: the pointers are valid, and the name is a C string.
        unsafe { cuGetProcAddress_v2(name.as_ptr(), &raw mut address, 13000, 0, &raw mut status) }
            .result()
            .map(|()| address)
    };
    let address = find(c"cuDriverGetVersion").unwrap();
    // SAFETY: the function has this type.
    let get_version = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut i32) -> i32>(address) };
    // SAFETY: the pointer is valid.
    assert_eq!((unsafe { get_version(&raw mut version) }, version), (0, 13000));
    assert!(find(c"cuMemAlloc").is_ok(), "a version of it is there");
    assert!(find(c"cuNothing").is_err());
}
