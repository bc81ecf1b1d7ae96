//! The stack of every thread of the process, for reports of what hangs.
//!
//! On Linux a signal makes each thread in turn write the addresses of its frames to one place. Their names are looked
//! up afterwards, outside the signal's handler, because that takes memory and locks.

/// The stack of one thread.
#[derive(Clone, Debug)]
pub struct ThreadStack {
    /// The system's number of the thread.
    pub id: i32,
    pub name: String,
    /// The frames, the innermost first and each on a line of its own; or the reason why they are not known.
    pub frames: String,
}

#[cfg(not(target_os = "linux"))]
mod system {
    /// Stacks are read on Linux only.
    pub fn thread_stacks() -> Vec<super::ThreadStack> {
        Vec::new()
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::cell::UnsafeCell;
    use std::ffi::c_void;
    use std::fs;
    use std::sync::Mutex;
    use std::sync::PoisonError;
    use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
    use std::thread::sleep;
    use std::time::Duration;

    use super::ThreadStack;

    /// Most frames of a stack: those further out say which thread it is, which its name says too.
    const MOST_FRAMES: usize = 64;
    /// How often, and for how long, a thread is waited for. A thread that runs answers at once; one in a system call
    /// that no signal interrupts does not.
    const LOOKS: usize = 500;
    const LOOK: Duration = Duration::from_millis(1);
    /// Name of the signal's handler.
    const HANDLER: &str = "write_frames";

    /// The place that one thread at a time writes its frames to.
    struct Place {
        /// The thread that is asked for its frames: its number, the negated number while it writes them, or 0.
        asked: AtomicI32,
        /// Number of frames, once they are written.
        len: AtomicUsize,
        frames: UnsafeCell<[*mut c_void; MOST_FRAMES]>,
    }

    // SAFETY: only the thread that has claimed `asked` writes `frames`, and they are read after it has given it back.
    unsafe impl Sync for Place {}

    static PLACE: Place = Place {
        asked: AtomicI32::new(0),
        len: AtomicUsize::new(0),
        frames: UnsafeCell::new([std::ptr::null_mut(); MOST_FRAMES]),
    };
    /// Held by the thread that asks the others.
    static ASKING: Mutex<()> = Mutex::new(());

    /// The stacks of all threads but the calling one.
    pub fn thread_stacks() -> Vec<ThreadStack> {
        let _asking = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = install() {
            tracing::warn!("cannot read stacks: {error}");
            return Vec::new();
        }
        let own = own_id();
        let ids = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let mut ids: Vec<i32> = ids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        ids.retain(|id| *id != own);
        ids.sort_unstable();
        let stacks = ids.into_iter().filter_map(|id| {
            let read = |file| fs::read_to_string(format!("/proc/self/task/{id}/{file}")).unwrap_or_default();
            let name = read("comm").trim_end().to_owned();
            if name.is_empty() {
                return None; // it has ended
            }
            let frames = frames_of(id).map(|frames| named(&frames));
            let frames =
                frames.unwrap_or_else(|| format!("  does not answer; it waits in {}", read("wchan").trim_end()));
            Some(ThreadStack { id, name, frames })
        });
        let stacks = stacks.collect();
        // The names of a large binary take memory.
        backtrace::clear_symbol_cache();
        stacks
    }

    fn own_id() -> i32 {
        // SAFETY: it has no preconditions.
        unsafe { libc::gettid() }
    }

    /// A signal that nothing else uses: the system's library has the first two of the real-time signals.
    fn signal() -> i32 {
        libc::SIGRTMIN() + 7
    }

    fn install() -> std::io::Result<()> {
        // SAFETY: a zeroed `sigaction` is valid, the handler has the signature that the flags ask for, and the pointers
        // are to values that live through the call.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = write_frames as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal(), &raw const action, std::ptr::null_mut())
        };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// The addresses of a thread's frames; `None` if it does not answer.
    fn frames_of(id: i32) -> Option<Vec<*mut c_void>> {
        PLACE.asked.store(id, Ordering::Release);
        // SAFETY: a call of the system without pointers. A thread that has ended is an error.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), id, signal()) } == 0;
        let mut looks = if sent { LOOKS } else { 0 };
        loop {
            match PLACE.asked.load(Ordering::Acquire) {
                0 => break,
                // The handler does nothing but read the stack, so it ends soon.
                asked if asked < 0 => sleep(LOOK),
                // If the exchange fails, the handler has just begun.
                _ if looks == 0 => {
                    if PLACE.asked.compare_exchange(id, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                        return None;
                    }
                }
                _ => {
                    looks -= 1;
                    sleep(LOOK);
                }
            }
        }
        // SAFETY: the handler has ended, and no other begins before `asked` is set again.
        let frames = unsafe { &*PLACE.frames.get() };
        Some(frames[..PLACE.len.load(Ordering::Relaxed)].to_vec())
    }

    /// The signal's handler. It writes the addresses of its thread's frames, if this thread is the one that was asked:
    /// a thread that answers too late must not write. It takes no lock and no memory.
    extern "C" fn write_frames(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
        // SAFETY: `errno` is this thread's own, and the interrupted code finds it as it was.
        let (errno, before) = unsafe {
            let errno = libc::__errno_location();
            (errno, *errno)
        };
        let id = own_id();
        if PLACE.asked.compare_exchange(id, -id, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            let mut len = 0;
            // SAFETY: this thread has claimed the place. `trace_unsynchronized` may run in several threads at once as
            // long as no symbols are looked up in it.
            unsafe {
                let frames = &mut *PLACE.frames.get();
                backtrace::trace_unsynchronized(|frame| {
                    frames[len] = frame.ip();
                    len += 1;
                    len < MOST_FRAMES
                });
            }
            PLACE.len.store(len, Ordering::Relaxed);
            PLACE.asked.store(0, Ordering::Release);
        }
        // SAFETY: as above.
        unsafe { *errno = before };
    }

    /// The functions at these addresses, with their lines where the binary has them, without those of the handler.
    fn named(frames: &[*mut c_void]) -> String {
        let names: Vec<Vec<String>> = frames.iter().map(|address| names_at(*address)).collect();
        // The handler's frames come first, and then the one to which it returns.
        let handler = names.iter().position(|names| names.iter().any(|name| name.contains(HANDLER)));
        let interrupted = handler.map_or(0, |handler| handler + 2);
        names.into_iter().skip(interrupted).flatten().map(|name| format!("  {name}")).collect::<Vec<_>>().join("\n")
    }

    /// The function at an address, and those that are inlined there.
    fn names_at(address: *mut c_void) -> Vec<String> {
        let mut names = Vec::new();
        backtrace::resolve(address, |symbol| {
            let name = symbol.name().map_or_else(|| "?".to_owned(), |name| format!("{name:#}"));
            // Types of a function's parameters are long, and say less than its line.
            let len = name.find('<').filter(|at| *at > 0).unwrap_or(name.len());
            let place = symbol.filename().map(|file| (file.display().to_string(), symbol.lineno().unwrap_or(0)));
            let place = place.map_or_else(String::new, |(file, line)| format!(" at {file}:{line}"));
            names.push(format!("{}{place}", &name[..len]));
        });
        if names.is_empty() {
            names.push(format!("{address:p}"));
        }
        names
    }
}

pub use system::thread_stacks;

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc::{Receiver, TryRecvError, channel};

    use super::*;

    #[inline(never)]
    fn waits_for_the_test(until: &Receiver<()>) {
        // Its frame is there only if it has something left to do.
        std::hint::black_box(until.recv().is_err());
    }

    #[inline(never)]
    fn computes_for_the_test(until: &Receiver<()>) {
        while until.try_recv() == Err(TryRecvError::Empty) {
            std::hint::spin_loop();
        }
        std::hint::black_box(until);
    }

    #[test]
    fn each_thread_says_where_it_is() {
        let (started, starts) = channel();
        let (end, until) = channel();
        let (end_busy, busy_until) = channel::<()>();
        let waiting = std::thread::Builder::new().name("test-waits".into()).spawn(move || waits_for_the_test(&until));
        let busy = move || {
            started.send(()).expect("the test waits");
            computes_for_the_test(&busy_until);
        };
        let busy = std::thread::Builder::new().name("test-computes".into()).spawn(busy);
        starts.recv().expect("it starts");
        let mut looks = 0;
        // The threads may not have come to these functions yet.
        let frames = loop {
            let stacks = thread_stacks();
            let frames = ["test-waits", "test-computes"].map(|name| {
                stacks.iter().find(|stack| stack.name == name).map_or_else(String::new, |stack| stack.frames.clone())
            });
            let [waits, computes] = &frames;
            if waits.contains("waits_for_the_test") && computes.contains("computes_for_the_test") {
                break frames;
            }
            looks += 1;
            assert!(looks < 100_000, "{waits}\n\n{computes}");
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        assert!(frames.iter().all(|frames| !frames.contains("write_frames")), "the handler's own: {frames:?}");
        drop((end, end_busy));
        waiting.expect("a thread").join().expect("no panic");
        busy.expect("a thread").join().expect("no panic");
    }
}
