//! Structures that the C code of a kernel shares with the emulator, with the layout of `runtime/types.h`.

use std::collections::VecDeque;
use std::ffi::c_void;

use super::team::Team;

/// An instruction of a whole warp, which the last lane to reach it executes for all: `slots` has each lane's operands.
pub type Meet = unsafe extern "C" fn(slots: *mut *mut c_void, mask: u32);

/// The emulator's functions that a kernel calls.
#[repr(C)]
pub struct Runtime {
    pub fault: unsafe extern "C" fn(*mut Thread, kind: u32, address: u64, bytes: u32),
    pub barrier: unsafe extern "C" fn(*mut Thread, id: u32, count: u32, op: u32, value: u32) -> u32,
    pub meet: unsafe extern "C" fn(*mut Thread, mask: u32, orders: u32, Meet, slot: *mut c_void),
    pub copy_async: unsafe extern "C" fn(*mut Thread, to: u32, from: u64, bytes: u32, valid: u32),
    pub copy_commit: unsafe extern "C" fn(*mut Thread),
    pub copy_wait: unsafe extern "C" fn(*mut Thread, left: u32),
    pub race: unsafe extern "C" fn(*mut Thread, at: u32, bytes: u32, access: u32),
    pub host: unsafe extern "C" fn(address: u64, bytes: u32) -> u64,
    pub pause: unsafe extern "C" fn(*mut Thread),
    pub print: unsafe extern "C" fn(*mut Thread, format: u64, arguments: u64),
    pub ordered: unsafe extern "C" fn(*mut Thread),
}

/// The block that a thread is of.
#[repr(C)]
pub struct Block {
    pub ctaid: [u32; 3],
    pub ntid: [u32; 3],
    pub nctaid: [u32; 3],
    pub shared_size: u32,
    pub shared: *mut u8,
    pub globals: *const u64,
    pub limits: *const u16,
    pub runtime: *const Runtime,
}

/// An asynchronous copy to shared memory that has not been waited for.
pub struct AsyncCopy {
    pub to: u32,
    pub from: u64,
    pub bytes: u32,
    /// How many of the bytes are copied. The others become zero.
    pub valid: u32,
}

/// A CUDA thread. The C code knows the fields up to `block`.
#[repr(C)]
pub struct Thread {
    pub tid: [u32; 3],
    pub lane: u32,
    pub warp: u32,
    /// The line of PTX that it has come to.
    pub line: u32,
    pub block: *const Block,
    pub team: *mut Team,
    pub index: u32,
    /// Where its fiber continues.
    pub stack: *mut u8,
    /// The result of its last barrier.
    pub result: u32,
    /// Copies that have not come, in the order in which they were asked for.
    pub copies: VecDeque<AsyncCopy>,
    /// How many of them are in each group that was committed.
    pub groups: VecDeque<usize>,
}
