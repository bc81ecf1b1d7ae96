//! A bound on the files that are decoded at once.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Slots for decoding files, which takes tens of milliseconds of a core for each: with a bound, a burst of requests
/// leaves the engine its cores. Clones share the slots.
#[derive(Clone, Debug)]
pub struct DecodeSlots(Arc<FreeSlots>);

#[derive(Debug)]
struct FreeSlots {
    free: Mutex<usize>,
    is_free: Condvar,
}

impl DecodeSlots {
    pub fn new(slots: usize) -> Self {
        Self(Arc::new(FreeSlots { free: Mutex::new(slots), is_free: Condvar::new() }))
    }

    /// The result of `decode`, which runs once a slot is free. The thread waits until then.
    pub fn run<T>(&self, decode: impl FnOnce() -> T) -> T {
        let free = self.0.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self.0.is_free.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        drop(free);
        let _slot = Slot(&self.0);
        decode()
    }
}

/// A slot that is taken until it is dropped, also by a panic.
struct Slot<'a>(&'a FreeSlots);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.is_free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn no_more_run_at_once_than_there_are_slots_also_after_a_panic() {
        let slots = DecodeSlots::new(2);
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let panicked = catch_unwind(AssertUnwindSafe(|| slots.run(|| panic!("planted"))));
        assert!(panicked.is_err());
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    slots.run(|| {
                        most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        thread::yield_now();
                        running.fetch_sub(1, Ordering::SeqCst);
                    });
                });
            }
        });
        assert!((1..=2).contains(&most.into_inner()));
    }
}
