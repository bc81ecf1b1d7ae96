//! Which threads are capturing a graph, and what must not happen meanwhile. Nothing may wait for a stream under
//! capture: captured work does not run, and a driver that is asked to wait for it invalidates the capture.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Number of threads of the process that are capturing.
static THREADS: Mutex<usize> = Mutex::new(0);
/// Notified when one of them has finished.
static FINISHED: Condvar = Condvar::new();

thread_local! {
    static IS_CAPTURING: Cell<bool> = const { Cell::new(false) };
}

/// Guard: this thread is capturing until the guard is dropped, on the same thread. Other threads may capture at the
/// same time, even while a thread waits in [`forbid_captures`]: ranks wait for one another during a capture.
pub(super) struct CapturingThread(());

impl CapturingThread {
    pub fn begin() -> Self {
        *threads() += 1;
        IS_CAPTURING.set(true);
        Self(())
    }
}

impl Drop for CapturingThread {
    fn drop(&mut self) {
        IS_CAPTURING.set(false);
        *threads() -= 1;
        FINISHED.notify_all();
    }
}

fn threads() -> MutexGuard<'static, usize> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no thread of the process is capturing, and keeps all threads from it until the guard is dropped: for
/// calls in which the driver waits for all streams of a device.
pub(super) fn forbid_captures() -> MutexGuard<'static, usize> {
    FINISHED.wait_while(threads(), |threads| *threads > 0).unwrap_or_else(PoisonError::into_inner)
}

/// Whether this thread is capturing.
pub(super) fn is_capturing() -> bool {
    IS_CAPTURING.get()
}

/// Excludes captures on a stream and waits for that stream from each other. Clones are for the same stream.
#[derive(Clone, Default)]
pub(super) struct StreamLock(Arc<Mutex<()>>);

impl StreamLock {
    /// Holds the lock until the guard is dropped.
    pub fn lock(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
