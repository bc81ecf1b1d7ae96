//! A persistent thread pool, and [`Cpu`]: a pool with an instruction set and reusable memory.

use super::isa::Isa;
use super::rows::SharedSlice;
use super::storage::Scratch;
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for the next job before it sleeps. It is longer than the gap between two operators of a
/// step, and short enough that an idle server takes no processor time.
const SPIN: Duration = Duration::from_micros(40);

/// Where operators run: a thread pool, an instruction set, and memory that operators reuse from call to call. One
/// operator runs at a time; a second one that starts meanwhile panics.
pub struct Cpu {
    pool: ThreadPool,
    isa: Isa,
    shared: Mutex<SharedScratch>,
}

/// Memory of the running operator that all its threads share, beside the scratch of each thread.
#[derive(Default)]
pub(crate) struct SharedScratch {
    /// Activations packed by `linear`.
    pub packed: Scratch,
    /// The plan of `paged_attention`, and the partial results of its split tasks.
    pub plan: super::attention::plan::AttentionPlan,
    pub partials: Scratch,
}

impl Cpu {
    /// A pool of `threads >= 1` threads, the caller's included, with the fastest instruction set of the processor.
    pub fn new(threads: usize) -> Cpu {
        Cpu::with_isa(threads, Isa::detect())
    }

    pub fn with_isa(threads: usize, isa: Isa) -> Cpu {
        Cpu::of_rank(0, threads, isa)
    }

    /// A pool as of [`Cpu::with_isa`], whose threads are named after the rank.
    pub fn of_rank(rank: usize, threads: usize, isa: Isa) -> Cpu {
        Cpu { pool: ThreadPool::of_rank(rank, threads), isa, shared: Mutex::default() }
    }

    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Frees the memory that operators reuse. The next operators allocate it again.
    pub fn release(&self) {
        *self.shared() = SharedScratch::default();
        self.pool.release();
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, SharedScratch> {
        exclusive(&self.shared)
    }

    /// Runs `f(from, to)` on ranges that cover `0..items`. `cost` is the number of float32 values that one item reads
    /// and writes; the ranges run in parallel if all items together are worth waking a thread.
    pub(crate) fn for_ranges(&self, items: usize, cost: usize, f: impl Fn(usize, usize) + Sync) {
        const WORTH_A_TASK: usize = 16 * 1024; // about 5 us of a memory-bound loop
        let tasks = (items * cost / WORTH_A_TASK).clamp(1, 4 * self.pool.threads()).min(items.max(1));
        self.pool.run(tasks, |t| f(items * t / tasks, items * (t + 1) / tasks));
    }
}

/// Threads that wait for jobs. With one thread, everything runs on the caller. Dropping the pool joins its workers.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Scratch memory of each thread, the caller's first.
    scratch: Box<[ThreadScratch]>,
    running: Mutex<()>,
}

struct ThreadScratch(UnsafeCell<Scratch>);
// SAFETY: scratch `i` is touched only by thread `i` of the job that is running, and `running` admits one job.
unsafe impl Sync for ThreadScratch {}

/// The state of a pool. Threads claim the tasks of a job by incrementing `next`. They join a job while it is open. The
/// caller closes it when no task is left and waits only for the threads that have joined, so a worker that wakes late
/// delays no one else.
struct Shared {
    /// `epoch << 32 | OPEN | number of workers inside the job`.
    state: AtomicU64,
    next: AtomicUsize,
    job: UnsafeCell<Job>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    asleep: Box<[AtomicBool]>,
    stop: AtomicBool,
}

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

#[derive(Clone, Copy)]
struct Job {
    call: unsafe fn(*const (), usize, usize),
    closure: *const (),
    tasks: usize,
}

// SAFETY: `job` is written only while the state is closed with nobody inside, and read only by threads inside; the
// closure it points to is Sync and outlives the job, because `ThreadPool::run_indexed` waits for all who joined.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl ThreadPool {
    /// A pool of `threads >= 1` threads in all: the caller of [`run`](Self::run) and `threads - 1` workers.
    pub fn new(threads: usize) -> ThreadPool {
        ThreadPool::of_rank(0, threads)
    }

    /// A pool as of [`ThreadPool::new`], whose workers are named after the rank.
    fn of_rank(rank: usize, threads: usize) -> ThreadPool {
        assert!(threads >= 1, "a thread pool needs at least 1 thread");
        unsafe fn nothing(_: *const (), _: usize, _: usize) {}
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(Job { call: nothing, closure: std::ptr::null(), tasks: 0 }),
            panic: Mutex::new(None),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
        });
        let spawn = |worker: usize| {
            let shared = Arc::clone(&shared);
            let name = format!("rank-{rank}-k{worker}");
            let thread = std::thread::Builder::new().name(name).spawn(move || shared.work(worker));
            thread.unwrap_or_else(|e| panic!("cannot start thread {worker} of {threads}: {e}"))
        };
        let workers = (1..threads).map(spawn).collect();
        let scratch = (0..threads).map(|_| ThreadScratch(UnsafeCell::default())).collect();
        ThreadPool { shared, workers, scratch, running: Mutex::new(()) }
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Frees the scratch of every thread.
    fn release(&self) {
        let _one_at_a_time = exclusive(&self.running);
        for scratch in &self.scratch {
            // SAFETY: see ThreadScratch: no job is running.
            unsafe { *scratch.0.get() = Scratch::default() };
        }
    }

    /// Calls `f` with every task index in `0..tasks`, on the caller and the workers, and returns when all tasks are
    /// done. A panic in a task is resumed on the caller.
    ///
    /// # Panics
    /// If a job of this pool is running already: a task must not start another one.
    pub fn run(&self, tasks: usize, f: impl Fn(usize) + Sync) {
        self.run_indexed(tasks, |_, task| f(task));
    }

    /// Calls `f` with every task index, as [`run`](Self::run) does, and with `len` float32 values of scratch for the
    /// task alone. The scratch is aligned to 64 bytes; its content is unspecified.
    pub fn run_with_scratch(&self, tasks: usize, len: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        self.run_indexed(tasks, |thread, task| {
            // SAFETY: see ThreadScratch: the index is this thread's own.
            let scratch = unsafe { &mut *self.scratch[thread].0.get() };
            f(task, scratch.floats(len));
        });
    }

    /// Calls `f` with the index and the elements of every chunk of `len` elements of `data`; the last chunk may be
    /// shorter.
    pub fn run_chunks<T: Send>(&self, data: &mut [T], len: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let total = data.len();
        self.run_parts(data, total.div_ceil(len), |i| (i * len).min(total), f);
    }

    /// Calls `f(i, &mut data[start(i)..start(i + 1)])` for every `i < parts`. `start` must be non-decreasing.
    pub(crate) fn run_parts<T: Send>(
        &self,
        data: &mut [T],
        parts: usize,
        start: impl Fn(usize) -> usize + Sync,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let (total, data) = (data.len(), SharedSlice::new(data));
        self.run(parts, |i| {
            let (from, to) = (start(i), start(i + 1));
            assert!(from <= to && to <= total, "part {i} is {from}..{to} of {total}");
            // SAFETY: parts are disjoint: part `i` ends where part `i + 1` starts, and `start` is non-decreasing.
            f(i, unsafe { data.part(from, to - from) });
        });
    }

    fn run_indexed<F: Fn(usize, usize) + Sync>(&self, tasks: usize, f: F) {
        unsafe fn call<F: Fn(usize, usize)>(closure: *const (), thread: usize, task: usize) {
            // SAFETY: `closure` was made from `&F` below and is still borrowed.
            unsafe { (*closure.cast::<F>())(thread, task) }
        }
        let _one_at_a_time = exclusive(&self.running);
        if self.workers.is_empty() || tasks <= 1 {
            return (0..tasks).for_each(|task| f(0, task));
        }
        let job = Job { call: call::<F>, closure: (&raw const f).cast(), tasks };
        // SAFETY: closed and nobody inside, see `Shared`.
        unsafe { *self.shared.job.get() = job };
        self.shared.next.store(0, Relaxed);
        let epoch = (self.shared.state.load(Relaxed) >> 32).wrapping_add(1) << 32;
        self.shared.state.store(epoch | OPEN, SeqCst);
        self.wake(tasks - 1);
        self.shared.run_tasks(job, 0);
        self.shared.close();
        let panic = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    fn wake(&self, most: usize) {
        for (asleep, worker) in self.shared.asleep.iter().zip(&self.workers).take(most) {
            if asleep.load(SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            worker.join().expect("a worker catches the panics of its tasks");
        }
    }
}

impl Shared {
    fn work(&self, worker: usize) {
        let mut seen = 0;
        while let Some(state) = self.wait_for_job(worker, seen) {
            if self.state.compare_exchange(state, state + 1, SeqCst, Relaxed).is_ok() {
                seen = state >> 32;
                // SAFETY: this thread is inside, see `Shared`.
                let job = unsafe { *self.job.get() };
                self.run_tasks(job, worker);
                self.state.fetch_sub(1, Release);
            }
        }
    }

    /// Spins, then sleeps, until a job other than `seen` is open; `None` when the pool stops.
    fn wait_for_job(&self, worker: usize, seen: u64) -> Option<u64> {
        let asleep = &self.asleep[worker - 1];
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                let state = self.state.load(SeqCst);
                if state & OPEN != 0 && state >> 32 != seen {
                    asleep.store(false, Relaxed);
                    return Some(state);
                }
                std::hint::spin_loop();
            }
            if self.stop.load(SeqCst) {
                return None;
            }
            // The state is read once more after `asleep` is set: the caller opens the job first and reads `asleep`
            // afterwards, so a wake-up cannot be missed.
            if asleep.load(Relaxed) {
                std::thread::park();
            } else if start.elapsed() > SPIN {
                asleep.store(true, SeqCst);
            }
        }
    }

    fn run_tasks(&self, job: Job, thread: usize) {
        let claim_all = || {
            loop {
                let task = self.next.fetch_add(1, Relaxed);
                if task >= job.tasks {
                    return;
                }
                // SAFETY: this thread is inside the job (or is its caller), so the closure is alive.
                unsafe { (job.call)(job.closure, thread, task) };
            }
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(claim_all)) {
            self.next.store(job.tasks, Relaxed);
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
    }

    /// Closes the job to further threads and waits for those inside.
    fn close(&self) {
        self.state.fetch_and(!OPEN, AcqRel);
        let mut spins = 0_u32;
        while self.state.load(Acquire) & INSIDE != 0 {
            spins += 1;
            // A worker whose thread was preempted runs sooner if this thread yields its processor.
            if spins < 10_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

/// Locks a mutex that no other thread holds: operators of one pool run one after the other.
fn exclusive<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => panic!("this thread pool is running an operator already"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in 1..=4 {
            let pool = ThreadPool::new(threads);
            for tasks in (0..300).chain([5000]) {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |t| {
                    counts[t].fetch_add(1, Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Relaxed) == 1), "{tasks} tasks on {threads} threads");
            }
        }
    }

    #[test]
    fn work_resumes_after_the_workers_fell_asleep() {
        let pool = ThreadPool::new(3);
        for _ in 0..20 {
            std::thread::sleep(3 * SPIN);
            let sum = AtomicUsize::new(0);
            pool.run(50, |t| {
                sum.fetch_add(t, Relaxed);
            });
            assert_eq!(sum.into_inner(), 49 * 50 / 2);
        }
    }

    #[test]
    fn a_panic_of_a_task_is_one_of_the_caller_and_the_pool_lives_on() {
        for threads in 1..=3 {
            let pool = ThreadPool::new(threads);
            for bad in [0, 7, 99] {
                let run = || pool.run(100, |t| assert_ne!(t, bad, "task {t} fails"));
                let payload = catch_unwind(AssertUnwindSafe(run)).expect_err("the panic must come through");
                assert!(payload.downcast_ref::<String>().is_some_and(|m| m.contains(&format!("task {bad} fails"))));
            }
            let done = AtomicUsize::new(0);
            pool.run(10, |_| {
                done.fetch_add(1, Relaxed);
            });
            assert_eq!(done.into_inner(), 10);
        }
    }

    #[test]
    fn scratch_belongs_to_the_task_while_it_runs() {
        let pool = ThreadPool::new(3);
        pool.run_with_scratch(200, 1000, |task, scratch| {
            assert_eq!((scratch.len(), scratch.as_ptr() as usize % 64), (1000, 0));
            scratch.fill(task as f32);
            std::thread::yield_now();
            assert!(scratch.iter().all(|x| *x == task as f32));
        });
    }

    #[test]
    #[should_panic(expected = "running an operator already")]
    fn a_nested_run_is_refused() {
        let pool = ThreadPool::new(2);
        pool.run(1, |_| pool.run(1, |_| ()));
    }
}
