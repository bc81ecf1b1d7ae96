//! The cost of launches and waits: `cargo run --release --example overhead`. Figures of a machine, not a test.

use std::ffi::{CString, c_void};
use std::ptr::null;
use std::time::Instant;

use cuda::driver::device::{cuCtxSetCurrent, cuDevicePrimaryCtxRetain, cuInit};
use cuda::driver::launch::{cuLaunchKernel, cuModuleGetFunction, cuModuleLoadData};
use cuda::driver::memory::cuMemAlloc_v2;
use cuda::driver::stream::{cuStreamCreate, cuStreamSynchronize};

/// The loop of the kernels below: 100 times their instruction.
const KERNELS: &str = r"
.version 8.8
.target sm_80
.address_size 64
.visible .entry nothing(.param .u64 x) { ret; }
.visible .entry store(.param .u64 x) {
    .reg .b32 %r<3>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;
}
.visible .entry barriers(.param .u64 x) {
    .reg .pred %p<2>; .reg .b32 %r<3>;
    mov.u32 %r1, 0;
LOOP:
    bar.sync 0;
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p1, %r1, 100;
    @%p1 bra LOOP;
    ret;
}
.visible .entry shuffles(.param .u64 x) {
    .reg .pred %p<2>; .reg .b32 %r<4>;
    mov.u32 %r1, 0;
    mov.u32 %r2, %tid.x;
LOOP:
    shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1;
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p1, %r1, 100;
    @%p1 bra LOOP;
    ret;
}
";

fn ok(code: i32) {
    assert_eq!(code, 0, "a call failed");
}

/// Microseconds that `work` takes, at best of five times.
fn best(mut work: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..5).map(time).fold(f64::INFINITY, f64::min)
}

fn main() {
    let (mut context, mut module, mut stream, mut at) = (0, 0, 0, 0u64);
    let text = CString::new(KERNELS).expect("no zero");
    // SAFETY: the pointers are valid.
    unsafe {
        ok(cuInit(0));
        ok(cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(cuCtxSetCurrent(context));
        ok(cuModuleLoadData(&raw mut module, text.as_ptr().cast()));
        ok(cuStreamCreate(&raw mut stream, 1));
        ok(cuMemAlloc_v2(&raw mut at, 4096));
    }
    let function = |name: &str| {
        let (mut function, name) = (0, CString::new(name).expect("no zero"));
        // SAFETY: the pointers are valid.
        ok(unsafe { cuModuleGetFunction(&raw mut function, module, name.as_ptr()) });
        function
    };
    let launch = |function, blocks, threads| {
        let parameters = [(&raw const at).cast::<c_void>()];
        // SAFETY: the kernels take an address.
        ok(unsafe {
            cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.as_ptr().cast(), null())
        });
    };
    // SAFETY: the stream is the one above.
    let wait = || ok(unsafe { cuStreamSynchronize(stream) });
    let many = |function, blocks, threads| {
        best(|| {
            (0..1000).for_each(|_| launch(function, blocks, threads));
            wait();
        }) / 1e3
    };
    let nothing = function("nothing");
    println!("launch and wait: {:.1} us", best(|| (0..100).for_each(|_| (launch(nothing, 1, 32), wait()).1)) / 100.0);
    for (name, blocks, threads) in [("nothing", 1, 32), ("store", 1, 32), ("store", 1, 256), ("store", 16, 256)] {
        println!("{name}, {blocks} blocks of {threads}, queued: {:.2} us", many(function(name), blocks, threads));
    }
    for name in ["barriers", "shuffles"] {
        for threads in [32, 128, 256, 1024] {
            let time = many(function(name), 1, threads);
            println!(
                "{name}, {threads} threads: {:.1} ns for each thread's wait",
                time * 1e3 / 100.0 / f64::from(threads)
            );
        }
    }
}
