//! Runs launches: block after block, each CUDA thread as a fiber that gives up the processor where it must wait for
//! others (barriers, shuffles, tensor-core instructions).

mod abi;
mod copy;
mod fiber;
mod race;
mod ready;
mod team;
mod wait;
mod workers;

use std::sync::Arc;

use crate::error::{ASSERT, ILLEGAL_ADDRESS, LAUNCH_FAILED, MISALIGNED_ADDRESS, Result};
use crate::module::LoadedKernel;
use crate::{memory, print};
use abi::{Runtime, Thread};
pub use fiber::MAX_THREADS;
use team::{Fault, fail};

/// A kernel with all that a launch gives it.
pub struct KernelLaunch {
    pub device: usize,
    pub kernel: Arc<LoadedKernel>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: u32,
    /// The parameters, laid out as the kernel takes them.
    pub params: Vec<u8>,
}

impl KernelLaunch {
    fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }
}

static RUNTIME: Runtime = Runtime {
    fault,
    barrier: wait::barrier,
    meet: wait::meet,
    copy_async: copy::copy_async,
    copy_commit: copy::copy_commit,
    copy_wait: copy::copy_wait,
    race: race::race,
    host,
    pause: wait::pause,
    print: print_text,
    ordered: wait::ordered,
};

/// Runs all blocks of a launch. Faults are described on standard error.
pub fn run(launch: &Arc<KernelLaunch>) -> Result {
    workers::run(launch).map_err(|fault| {
        eprintln!("emulator: {}: {}", launch.kernel.name, fault.text);
        fault.code
    })
}

/// Ends the block: the thread did what it must not.
///
/// # Safety
/// Called by the C code of a kernel in the fiber of `thread`.
unsafe extern "C" fn fault(thread: *mut Thread, kind: u32, address: u64, bytes: u32) {
    // SAFETY: the thread is the caller's, and so is its team.
    let shared = unsafe { (*(*thread).team).block.shared_size };
    let (code, text) = match kind {
        1 if address >> 44 == memory::DEVICE >> 44 => {
            let what = "which is not allocated, or another device's, or past the end of an allocation";
            (ILLEGAL_ADDRESS, format!("{bytes} bytes at {address:#x}, {what}"))
        }
        1 => {
            let what = "which is no device address and no page-locked memory";
            (ILLEGAL_ADDRESS, format!("{bytes} bytes at {address:#x}, {what}"))
        }
        2 => (MISALIGNED_ADDRESS, format!("{bytes} bytes at {address:#x}, which is not aligned")),
        3 => (ILLEGAL_ADDRESS, format!("{bytes} bytes at {address:#x} of shared memory, past its {shared} bytes")),
        5 => (ASSERT, format!("assertion `{}`", String::from_utf8_lossy(&print::text(byte_of_text, address)))),
        6 => (LAUNCH_FAILED, "a matrix instruction needs all 32 lanes of its warp".into()),
        7 => {
            let what = "which is no mbarrier that was initialised, or has more arrivals than it expects";
            (LAUNCH_FAILED, format!("mbarrier at {address:#x}, {what}"))
        }
        8 => (ILLEGAL_ADDRESS, format!("{bytes} bytes at {address:#x}, which is no address of local memory")),
        _ => (LAUNCH_FAILED, "trap".into()),
    };
    // SAFETY: as above.
    unsafe { fail(thread, Fault { code, text }) };
}

/// Whether these bytes are page-locked memory of the host.
extern "C" fn host(address: u64, bytes: u32) -> u64 {
    u64::from(memory::get().pinned.holds(address, u64::from(bytes)))
}

/// A byte of a text in device memory.
fn byte_of_text(at: u64) -> Option<u8> {
    let byte = memory::get().bytes_at(at, 1).ok()?;
    // SAFETY: the byte is allocated.
    Some(unsafe { *byte })
}

/// `printf`
///
/// # Safety
/// Called by the C code of a kernel in the fiber of `thread`.
unsafe extern "C" fn print_text(_: *mut Thread, format: u64, arguments: u64) {
    // SAFETY: nvcc puts the arguments that the format asks for into the thread's local memory.
    unsafe { print::print(byte_of_text, format, arguments as *const u8) }
}
