//! Fibers: stacks, and the switch from one to another.

use std::arch::naked_asm;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::{LOCAL, PAGE, READ_WRITE, protect, release, reserve};

/// Bytes of a thread's stack, which holds its local memory.
const STACK: u64 = 64 << 10;
/// Most threads of a block.
pub const MAX_THREADS: u32 = 1024;
/// The tops of the stacks are this much further down from one to the next, in `COLOURS` steps: were they a power of two
/// apart, all would compete for the same few lines of the processor's caches.
const STEP: u64 = 320;
const COLOURS: u64 = 48;

/// The stacks of the fibers that one thread of the machine runs. The system limits the mappings of a process (65,530
/// by default), and a stack and its guard page are one each, so they are unmapped when the thread ends.
pub struct Stacks {
    start: u64,
    /// How many can be used.
    ready: u32,
}

impl Stacks {
    const BYTES: u64 = STACK * MAX_THREADS as u64;

    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let start = LOCAL + NEXT.fetch_add(1, Ordering::Relaxed) * Self::BYTES;
        reserve(start, Self::BYTES);
        Self { start, ready: 0 }
    }

    /// Makes the first `count` stacks usable. The lowest page of each stays unreadable.
    pub fn prepare(&mut self, count: u32) {
        while self.ready < count {
            protect(self.start + u64::from(self.ready) * STACK + PAGE, STACK - PAGE, READ_WRITE);
            self.ready += 1;
        }
    }

    /// Where the fiber of thread `index` begins: the first switch to it calls `main` with `argument`.
    ///
    /// # Safety
    /// No fiber uses this stack.
    pub unsafe fn begin(&self, index: u32, main: unsafe extern "C" fn(*mut u8) -> !, argument: *mut u8) -> *mut u8 {
        assert!(index < self.ready);
        let top = self.start + (u64::from(index) + 1) * STACK - u64::from(index) % COLOURS * STEP;
        // What `switch` takes from a stack: r15, r14, r13, r12, rbx, rbp, and where to return to.
        let frame: [u64; 7] = [0, 0, main as *const () as u64, argument as u64, 0, 0, start as *const () as u64];
        // So that the stack is aligned as a function expects it when `start` has called `main`.
        let place = (top - size_of_val(&frame) as u64) as *mut [u64; 7];
        // SAFETY: the place is in this stack, below its top, and aligned: tops are multiples of 64.
        unsafe { place.write(frame) };
        place.cast()
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        release(self.start, Self::BYTES);
    }
}

/// Saves the registers that a function must preserve, stores the stack pointer in `save`, and continues at `to`.
///
/// # Safety
/// `to` comes from [`Stacks::begin`] or was saved by a switch, and no switch has continued there since.
#[unsafe(naked)]
pub unsafe extern "C" fn switch(save: *mut *mut u8, to: *mut u8) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, rsi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret"
    )
}

/// Calls the function in r13 with the argument in r12.
#[unsafe(naked)]
unsafe extern "C" fn start() {
    naked_asm!("mov rdi, r12", "call r13", "ud2")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Talk {
        fiber: *mut u8,
        host: *mut u8,
        said: Vec<u32>,
    }

    unsafe extern "C" fn count(talk: *mut u8) -> ! {
        let talk = talk.cast::<Talk>();
        for i in 0.. {
            // SAFETY: the test's Talk outlives the fiber, and only one of both runs.
            unsafe {
                (*talk).said.push(i);
                switch(&raw mut (*talk).fiber, (*talk).host);
            }
        }
        unreachable!("the fiber counts for ever");
    }

    #[test]
    fn a_fiber_goes_on_where_it_stopped() {
        let mut stacks = Stacks::new();
        stacks.prepare(3);
        let mut talk = Talk { fiber: std::ptr::null_mut(), host: std::ptr::null_mut(), said: Vec::new() };
        let argument = &raw mut talk;
        // SAFETY: the stack is new.
        talk.fiber = unsafe { stacks.begin(2, count, argument.cast()) };
        for _ in 0..3 {
            // SAFETY: the fiber began above, or was left by its own switch.
            unsafe { switch(&raw mut (*argument).host, (*argument).fiber) };
        }
        assert_eq!(talk.said, [0, 1, 2]);
    }

    #[test]
    fn stacks_are_unmapped_with_their_thread() {
        let mut stacks = Stacks::new();
        stacks.prepare(3);
        let (start, end) = (stacks.start, stacks.start + Stacks::BYTES);
        let mappings = || {
            let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings of this process");
            let starts = maps.lines().map(|line| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap());
            starts.filter(|at| (start..end).contains(at)).count()
        };
        assert_ne!(mappings(), 0);
        drop(stacks);
        assert_eq!(mappings(), 0);
    }
}
