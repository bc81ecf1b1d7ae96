//! The threads of one block: fibers that give up the processor where they must wait for others. All of a team runs on
//! one thread of the machine. Fibers keep raw pointers to it, because each of them is in the middle of a call.

use std::cell::UnsafeCell;
use std::collections::{BTreeMap, VecDeque};

use super::abi::{Block, Thread};
use super::fiber::{MAX_THREADS, Stacks, switch};
use super::race::Shadow;
use super::ready::Ready;
use super::wait::{Barrier, Warp};
use super::{KernelLaunch, RUNTIME};
use crate::error::{ErrorCode, LAUNCH_TIMEOUT};
use crate::memory;
use crate::settings;

/// NaN in every floating-point type.
const POISON: u128 = 0x7fff_7fff_7fff_7fff_7fff_7fff_7fff_7fff;
/// How often all threads may pause without one of them coming further: more than any kernel polls for.
const MAX_PAUSES: u32 = 1 << 20;

/// Why a block ended early: the code that its device keeps, and a message.
pub struct Fault {
    pub code: ErrorCode,
    pub text: String,
}

pub struct Team {
    launch: *const KernelLaunch,
    pub block: Block,
    /// Raw, because the fiber of a thread uses it while the team does.
    threads: Vec<UnsafeCell<Thread>>,
    pub warps: Vec<Warp>,
    pub barriers: [Barrier; 16],
    pub ready: Ready,
    shared: Vec<u128>,
    /// Who touched each byte of shared memory, if races are looked for.
    pub shadow: Vec<Shadow>,
    /// Barriers that have been passed.
    pub epoch: u32,
    pub alive: u32,
    pauses: u32,
    stacks: Stacks,
    /// Where the host continues when no fiber can run.
    host: *mut u8,
    pub fault: Option<Fault>,
}

impl Team {
    pub fn new() -> Box<Self> {
        let block = Block {
            ctaid: [0; 3],
            ntid: [0; 3],
            nctaid: [0; 3],
            shared_size: 0,
            shared: std::ptr::null_mut(),
            globals: std::ptr::null(),
            limits: std::ptr::null(),
            runtime: &RUNTIME,
        };
        Box::new(Self {
            launch: std::ptr::null(),
            block,
            // As many as a block may have, so that they never move: fibers point to them.
            threads: Vec::with_capacity(MAX_THREADS as usize),
            warps: Vec::new(),
            barriers: Default::default(),
            ready: Ready::default(),
            shared: Vec::new(),
            shadow: Vec::new(),
            epoch: 0,
            alive: 0,
            pauses: 0,
            stacks: Stacks::new(),
            host: std::ptr::null_mut(),
            fault: None,
        })
    }

    /// The thread of a number, which the block has.
    pub fn thread(&self, index: u32) -> *mut Thread {
        self.threads[index as usize].get()
    }

    pub fn launch(&self) -> &KernelLaunch {
        // SAFETY: set by `run`, whose caller's launch outlives the block.
        unsafe { &*self.launch }
    }

    /// Where a line of the kernel is.
    pub fn place(&self, line: u32) -> String {
        self.launch().kernel.place(line)
    }

    /// Runs one block.
    ///
    /// # Safety
    /// `team` is valid, and no other block is on it.
    pub unsafe fn run(team: *mut Self, launch: &KernelLaunch, index: u64) -> Result<(), Fault> {
        // SAFETY: the caller gives a valid team; references to it end before a fiber runs.
        unsafe {
            (*team).prepare(launch, index);
            if launch.kernel.alone {
                (*team).alive = 1;
                Self::add_thread(team, 0);
                (*team).start_fiber(0, run_alone);
            } else {
                for i in 0..(*team).alive {
                    Self::add_thread(team, i);
                    (*team).start_fiber(i, run_thread);
                }
            }
            while let Some(next) = (*team).ready.take() {
                let to = (*(*team).thread(next)).stack;
                switch(&raw mut (*team).host, to);
                if let Some(fault) = (*team).fault.take() {
                    return Err(fault);
                }
                if (*team).alive > 0 && !(*team).look_again() {
                    break;
                }
            }
            if (*team).alive == 0 { Ok(()) } else { Err((*team).stuck()) }
        }
    }

    /// Lets threads that have paused run again, unless they have done so too often.
    fn look_again(&mut self) -> bool {
        self.pauses += 1;
        self.pauses < MAX_PAUSES && self.ready.resume()
    }

    /// Notes that a thread has come further.
    pub fn advanced(&mut self) {
        self.pauses = 0;
    }

    fn prepare(&mut self, launch: &KernelLaunch, index: u64) {
        let threads = launch.threads();
        let [gx, gy, _] = launch.grid.map(u64::from);
        self.launch = launch;
        let shared = (launch.kernel.shared as u32 + launch.dynamic_shared) as usize;
        self.shared.clear();
        self.shared.resize(shared.div_ceil(16), POISON);
        self.shadow.clear();
        if launch.kernel.races {
            self.shadow.resize(shared, Shadow::NONE);
        }
        self.block.ctaid = [(index % gx) as u32, (index / gx % gy) as u32, (index / gx / gy) as u32];
        (self.block.ntid, self.block.nctaid) = (launch.block, launch.grid);
        self.block.shared_size = shared as u32;
        self.block.shared = self.shared.as_mut_ptr().cast();
        self.block.limits = memory::get().limits(launch.device);
        self.block.globals = launch.kernel.globals.as_ptr();
        self.ready.clear(settings::get().seed, index);
        (self.epoch, self.pauses, self.alive) = (0, 0, threads);
        self.warps.clear();
        self.warps.extend((0..threads.div_ceil(32)).map(|w| Warp::new((threads - w * 32).min(32))));
        self.barriers = Default::default();
        self.stacks.prepare(if launch.kernel.alone { 1 } else { threads });
    }

    /// Makes thread `index` as it is before it begins.
    ///
    /// # Safety
    /// `team` is valid, and its threads 0 to `index - 1` have been added.
    unsafe fn add_thread(team: *mut Self, index: u32) {
        // SAFETY: the caller gives a valid team, none of whose fibers runs.
        let this = unsafe { &mut *team };
        let [x, y, _] = this.block.ntid;
        let tid = [index % x, index / x % y, index / x / y];
        if let Some(thread) = this.threads.get_mut(index as usize).map(UnsafeCell::get_mut) {
            thread.tid = tid;
            thread.line = 0;
            thread.copies.clear();
            thread.groups.clear();
            return;
        }
        assert!(this.threads.len() < this.threads.capacity(), "threads must not move");
        this.threads.push(UnsafeCell::new(Thread {
            tid,
            lane: index % 32,
            warp: index / 32,
            line: 0,
            block: &this.block,
            team,
            index,
            stack: std::ptr::null_mut(),
            result: 0,
            copies: VecDeque::new(),
            groups: VecDeque::new(),
        }));
    }

    /// Lets thread `index` begin with `main`.
    fn start_fiber(&mut self, index: u32, main: unsafe extern "C" fn(*mut u8) -> !) {
        let thread = self.thread(index);
        // SAFETY: the block has just been prepared, so no fiber uses a stack, and the thread is one of its.
        unsafe { (*thread).stack = self.stacks.begin(index, main, thread.cast()) };
        self.ready.add(index / 32, 1 << (index % 32));
    }

    /// Notes that a thread has ended, which may be what others wait for.
    fn exited(&mut self, index: u32) {
        self.alive -= 1;
        self.advanced();
        let warp = &mut self.warps[(index / 32) as usize];
        warp.alive &= !(1 << (index % 32));
        if let Err(fault) = self.release_warp(index / 32).and_then(|()| self.release_barriers()) {
            self.fault = Some(fault);
        }
    }

    /// A fault that lists where the remaining threads wait.
    fn stuck(&self) -> Fault {
        let mut places = BTreeMap::<String, Vec<u32>>::new();
        for (w, warp) in (0..).zip(&self.warps) {
            for lane in (0..32).filter(|lane| warp.alive >> lane & 1 == 1) {
                let index = w * 32 + lane;
                // SAFETY: no fiber runs.
                let line = unsafe { (*self.thread(index)).line };
                places.entry(self.place(line)).or_default().push(index);
            }
        }
        let text = places.iter().map(|(place, threads)| {
            format!("{} threads ({}..={}) wait at {place}", threads.len(), threads[0], threads[threads.len() - 1])
        });
        let text = format!("no thread can go on: {}", text.collect::<Vec<_>>().join("; "));
        Fault { code: LAUNCH_TIMEOUT, text }
    }
}

/// Gives up the processor until something makes the thread ready: to the next thread that can run, or to the host.
///
/// # Safety
/// The caller runs in the fiber of `thread` and holds no reference to the thread or its team.
pub unsafe fn leave(thread: *mut Thread) {
    // SAFETY: the thread's team is valid as long as it runs; the fiber of a ready thread was left by `leave` or is new.
    unsafe {
        let team = (*thread).team;
        let to = match (*team).ready.take() {
            Some(next) if next == (*thread).index => return,
            Some(next) => (*(*team).thread(next)).stack,
            None => (*team).host,
        };
        switch(&raw mut (*thread).stack, to);
    }
}

/// Ends the block with a fault of this thread.
///
/// # Safety
/// As for [`leave`].
pub unsafe fn fail(thread: *mut Thread, fault: Fault) -> ! {
    // SAFETY: as for `leave`; the host ends the block and never comes back to this fiber.
    unsafe {
        let team = (*thread).team;
        let (tid, block, place) = ((*thread).tid, (*team).block.ctaid, (*team).place((*thread).line));
        let text = format!("{}, thread {tid:?} of block {block:?}: {place}", fault.text);
        (*team).fault = Some(Fault { text, ..fault });
        switch(&raw mut (*thread).stack, (*team).host);
    }
    unreachable!("a block that has failed is not resumed")
}

/// The life of a fiber that is one thread.
unsafe extern "C" fn run_thread(thread: *mut u8) -> ! {
    let thread = thread.cast::<Thread>();
    // SAFETY: the team began this fiber for this thread; references to the team end before the fiber is left.
    unsafe {
        let team = (*thread).team;
        let launch = (*team).launch();
        (launch.kernel.function)(thread.cast(), launch.params.as_ptr());
        super::copy::finish(thread);
        (*team).exited((*thread).index);
        if (*team).fault.is_some() {
            switch(&raw mut (*thread).stack, (*team).host);
        }
        leave(thread);
    }
    unreachable!("a thread that has ended is not resumed")
}

/// The life of a fiber that is all threads of a block one after the other, where none waits for another.
unsafe extern "C" fn run_alone(thread: *mut u8) -> ! {
    let thread = thread.cast::<Thread>();
    // SAFETY: as for `run_thread`; there is one fiber.
    unsafe {
        let team = (*thread).team;
        let launch = (*team).launch();
        let ([x, y, _], count) = (launch.block, launch.threads());
        let seed = settings::get().seed;
        for i in 0..count {
            // With a seed, the threads come in another order.
            let i = if seed == 0 { i } else { (i + seed as u32) % count };
            let i = if seed % 2 == 1 { count - 1 - i } else { i };
            (*thread).tid = [i % x, i / x % y, i / x / y];
            (*thread).index = i;
            ((*thread).lane, (*thread).warp) = (i % 32, i / 32);
            (launch.kernel.function)(thread.cast(), launch.params.as_ptr());
            super::copy::finish(thread);
        }
        ((*thread).index, (*thread).lane, (*thread).warp) = (0, 0, 0);
        (*team).alive = 0;
        switch(&raw mut (*thread).stack, (*team).host);
    }
    unreachable!("a block that has ended is not resumed")
}
