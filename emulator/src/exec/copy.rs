//! Asynchronous copies to shared memory (`cp.async`). Their bytes come no sooner than they are waited for: who reads
//! them before reads what was there.

use super::abi::{AsyncCopy, Thread};
use super::race::{AccessKind, touch};
use super::team::{Fault, fail};
use crate::error::{ILLEGAL_ADDRESS, MISALIGNED_ADDRESS};
use crate::memory;

/// `cp.async`
///
/// # Safety
/// Called by the C code of a kernel in the fiber of `thread`.
pub unsafe extern "C" fn copy_async(thread: *mut Thread, to: u32, from: u64, bytes: u32, valid: u32) {
    // SAFETY: the thread is the caller's, and so is its team.
    unsafe {
        if !to.is_multiple_of(bytes) || !from.is_multiple_of(u64::from(bytes)) {
            let text = format!("asynchronous copy from {from:#x} to {to:#x}, not aligned to {bytes}");
            fail(thread, Fault { code: MISALIGNED_ADDRESS, text });
        }
        if to + bytes > (*(*thread).team).block.shared_size {
            let text = format!("asynchronous copy past the end of shared memory, to {to:#x}");
            fail(thread, Fault { code: ILLEGAL_ADDRESS, text });
        }
        // From here on the bytes may change at any time.
        touch(thread, to, bytes, AccessKind::Write);
        let valid = valid.min(bytes);
        (*thread).copies.push_back(AsyncCopy { to, from, bytes, valid });
    }
}

/// `cp.async.commit_group`
///
/// # Safety
/// As for [`copy_async`].
pub unsafe extern "C" fn copy_commit(thread: *mut Thread) {
    // SAFETY: the thread is the caller's; references to it end here.
    unsafe {
        let (copies, groups) = (&(*thread).copies, &mut (*thread).groups);
        let committed: usize = groups.iter().sum();
        groups.push_back(copies.len() - committed);
    }
}

/// `cp.async.wait_group`: all groups but the last `left` have come. With none left, also those that were not committed.
///
/// # Safety
/// As for [`copy_async`].
pub unsafe extern "C" fn copy_wait(thread: *mut Thread, left: u32) {
    // SAFETY: the thread is the caller's; references to it end before its copies come.
    unsafe {
        if left == 0 {
            copy_commit(thread);
        }
        while (*thread).groups.len() > left as usize {
            let count = (*thread).groups.pop_front().unwrap_or_default();
            for _ in 0..count {
                if let Some(copy) = (*thread).copies.pop_front() {
                    arrive(thread, &copy);
                }
            }
        }
    }
}

/// Finishes the remaining copies of a thread, when it ends.
///
/// # Safety
/// As for [`copy_async`].
pub unsafe fn finish(thread: *mut Thread) {
    // SAFETY: the thread is the caller's.
    unsafe {
        if !(*thread).groups.is_empty() || !(*thread).copies.is_empty() {
            copy_wait(thread, 0);
        }
    }
}

/// # Safety
/// As for [`copy_async`].
unsafe fn arrive(thread: *mut Thread, copy: &AsyncCopy) {
    // SAFETY: `copy_async` has checked that the bytes are in shared memory; those it reads are checked here.
    unsafe {
        let to = (*(*thread).team).block.shared.add(copy.to as usize);
        match memory::get().bytes_at(copy.from, copy.valid as usize) {
            // The size that kernels use, so that this is one load and one store.
            Ok(from) if copy.valid == 16 => to.cast::<[u8; 16]>().write(from.cast::<[u8; 16]>().read()),
            Ok(from) => {
                to.copy_from_nonoverlapping(from, copy.valid as usize);
                to.add(copy.valid as usize).write_bytes(0, (copy.bytes - copy.valid) as usize);
            }
            Err(code) => {
                let text = format!("asynchronous copy from {:#x}", copy.from);
                fail(thread, Fault { code, text });
            }
        }
        touch(thread, copy.to, copy.bytes, AccessKind::Write);
    }
}
