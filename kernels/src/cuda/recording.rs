//! Threads that record launches, and what may not be done meanwhile: nothing that waits for a stream that is being
//! recorded, as what is recorded does not run, and a driver that is asked to wait for it breaks the recording off.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Threads of the process that record.
static THREADS: Mutex<usize> = Mutex::new(0);
/// One of them has ended.
static ENDED: Condvar = Condvar::new();

thread_local! {
    static IS_ONE: Cell<bool> = const { Cell::new(false) };
}

/// Says, until it is dropped on the same thread, that this thread records launches. Others may too, and a thread that
/// waits in [`none_records`] does not keep them from it: ranks wait for one another while they record.
pub(super) struct RecordingThread(());

impl RecordingThread {
    pub fn begin() -> Self {
        *threads() += 1;
        IS_ONE.set(true);
        Self(())
    }
}

impl Drop for RecordingThread {
    fn drop(&mut self) {
        IS_ONE.set(false);
        *threads() -= 1;
        ENDED.notify_all();
    }
}

fn threads() -> MutexGuard<'static, usize> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no thread of the process records launches, and lets none do so until it is dropped: for calls in which
/// the driver waits for all streams of a device.
pub(super) fn none_records() -> MutexGuard<'static, usize> {
    ENDED.wait_while(threads(), |threads| *threads > 0).unwrap_or_else(PoisonError::into_inner)
}

/// Whether this thread records.
pub(super) fn this_thread_records() -> bool {
    IS_ONE.get()
}

/// Whose turn it is with a stream: a recording's, or that of a thread that waits for the stream. Clones are of the same
/// stream.
#[derive(Clone, Default)]
pub(super) struct Turn(Arc<Mutex<()>>);

impl Turn {
    /// Has it until it is dropped.
    pub fn take(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
