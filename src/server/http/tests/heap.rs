//! Counts what a test's own thread allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that the thread holds, and the most since the count began.
    static HELD: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: i64) {
    // A thread that ends allocates when its locals are gone already.
    let _ = HELD.try_with(|cell| {
        let (held, most) = cell.get();
        cell.set((held + bytes, most.max(held + bytes)));
    });
}

// SAFETY: every call is handed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(taken(layout.size()));
        // SAFETY: the caller keeps the rules of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-taken(layout.size()));
        // SAFETY: the caller keeps the rules of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks are there while one is copied.
        count(taken(size));
        count(-taken(layout.size()));
        // SAFETY: the caller keeps the rules of `realloc`.
        unsafe { System.realloc(block, layout, size) }
    }
}

/// Bytes that the system's allocator takes for a block: its head and whole units of 16, at least 32.
fn taken(size: usize) -> i64 {
    ((size + 8).next_multiple_of(16)).max(32) as i64
}

/// The most bytes that the thread held while `work` ran, beyond those that it held before.
pub(in crate::server::http) fn peak_of<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let (before, _) = HELD.get();
    HELD.set((before, before));
    let done = work();
    ((HELD.get().1 - before) as u64, done)
}
