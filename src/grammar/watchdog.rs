//! Cancels work on a grammar that takes too long: an ambiguous grammar may take minutes per token, and the engine's
//! thread must serve other requests.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

/// Interval of the checks while there is work. Work may exceed its limit by this much.
const EVERY: Duration = Duration::from_millis(20);
/// Number of checks without work after which the watchdog waits for a call. A call costs as much as a mask.
const QUIET_LOOKS: u32 = 50;
/// Longest wait for a call. After it, the watchdog checks whether all its callers are gone.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A thread that cancels work past its deadline. It ends with the last clone.
#[derive(Clone)]
pub(super) struct Watchdog(Arc<Watched>);

#[derive(Default)]
struct Watched {
    work: Mutex<Work>,
    call: Condvar,
}

#[derive(Default)]
struct Work {
    under_way: Vec<(u64, Instant, CancellationHandle)>,
    next: u64,
    /// The number that was next at the last look, and looks at which it had not changed.
    seen: u64,
    quiet_looks: u32,
}

impl Watchdog {
    /// # Errors
    /// If the thread cannot be started.
    pub fn start() -> std::io::Result<Self> {
        let watched = Arc::new(Watched::default());
        let weak = Arc::downgrade(&watched);
        let watch = move || {
            while let Some(watched) = weak.upgrade() {
                watched.look();
            }
        };
        thread::Builder::new().name("grammar-watchdog".into()).spawn(watch)?;
        Ok(Self(watched))
    }

    /// The result of `work`, which `handle` cancels if it takes longer than `most`.
    pub fn limit<T>(&self, most: Duration, handle: CancellationHandle, work: impl FnOnce() -> T) -> T {
        let id = self.0.add(Instant::now() + most, handle);
        let _guard = Guard(&self.0, id);
        work()
    }
}

/// Registers running work until it is dropped, which a panic does too.
struct Guard<'a>(&'a Watched, u64);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.lock().under_way.retain(|(id, ..)| *id != self.1);
    }
}

impl Watched {
    fn lock(&self) -> std::sync::MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, deadline: Instant, handle: CancellationHandle) -> u64 {
        let mut work = self.lock();
        work.next += 1;
        let id = work.next;
        work.under_way.push((id, deadline, handle));
        if work.quiet_looks == QUIET_LOOKS {
            work.quiet_looks = 0;
            self.call.notify_one();
        }
        id
    }

    /// Cancels late work and sleeps; waits for a call if there has been no work for long.
    fn look(&self) {
        let mut work = self.lock();
        if work.quiet_looks == QUIET_LOOKS {
            drop(self.call.wait_timeout(work, LONGEST_WAIT).unwrap_or_else(PoisonError::into_inner));
            return;
        }
        let now = Instant::now();
        work.under_way.iter().filter(|(_, deadline, _)| *deadline <= now).for_each(|(.., handle)| handle.cancel());
        let is_quiet = work.next == work.seen && work.under_way.is_empty();
        work.quiet_looks = if is_quiet { work.quiet_looks + 1 } else { 0 };
        work.seen = work.next;
        drop(work);
        thread::sleep(EVERY);
    }
}
