//! Barriers, and instructions of a whole warp.

use std::ffi::c_void;

use super::abi::{Meet, Thread};
use super::team::{Fault, Team, fail, leave};
use crate::error::LAUNCH_FAILED;

/// The waits of the threads of a warp.
pub struct Warp {
    /// Lanes whose threads have not ended.
    pub alive: u32,
    /// Lanes that wait at an instruction of the whole warp.
    waiting: u32,
    slots: [*mut c_void; 32],
    /// The mask that each waiting lane came with.
    masks: [u32; 32],
    /// The instruction of each waiting lane.
    meets: [Option<Meet>; 32],
    /// Barriers of the whole warp that it has passed: the order that they give to its accesses.
    pub passed: u32,
    /// The line of the barrier that a thread of the warp waits at.
    barrier_line: Option<u32>,
}

impl Warp {
    pub fn new(threads: u32) -> Self {
        Self {
            alive: if threads == 32 { u32::MAX } else { (1 << threads) - 1 },
            waiting: 0,
            slots: [std::ptr::null_mut(); 32],
            masks: [0; 32],
            meets: [None; 32],
            passed: 0,
            barrier_line: None,
        }
    }
}

/// A barrier of the block.
#[derive(Default)]
pub struct Barrier {
    /// Lanes of each warp that have come.
    lanes: [u32; 32],
    arrived: u32,
    /// How many must come. Zero for all threads of the block that have not ended.
    count: u32,
    /// How many came with a true predicate.
    votes: u32,
    op: u32,
    /// The line of PTX that the first came to.
    line: u32,
}

/// A thread's arrival at a barrier.
struct Arrival {
    count: u32,
    op: u32,
    value: u32,
}

/// How a barrier makes one number of its threads' predicates, as the C code numbers it. Else it counts the true ones.
const ALL: u32 = 2;
const ANY: u32 = 3;
/// The thread does not wait for the others.
const ARRIVE: u32 = 4;

fn fault(text: String) -> Fault {
    Fault { code: LAUNCH_FAILED, text }
}

impl Team {
    /// Executes the instruction of the lanes of `mask` once all live ones have reached it, and lets them continue.
    fn try_meet(&mut self, w: u32, mask: u32) -> Result<bool, Fault> {
        let warp = &self.warps[w as usize];
        let want = mask & warp.alive;
        if want == 0 || warp.waiting & want != want {
            return Ok(false);
        }
        let first = want.trailing_zeros() as usize;
        let same = |l: usize| {
            warp.masks[l] == mask && warp.meets[l].map(|m| m as usize) == warp.meets[first].map(|m| m as usize)
        };
        if let Some(lane) = (first..32).find(|&l| want >> l & 1 == 1 && !same(l)) {
            // SAFETY: no fiber but the caller's runs, which waits for this.
            let [a, b] = [lane, first].map(|l| self.place(unsafe { (*self.thread(w * 32 + l as u32)).line }));
            return Err(fault(format!("lanes of one warp meet at different instructions, {a} and {b}")));
        }
        let warp = &mut self.warps[w as usize];
        warp.waiting &= !want;
        if let Some(meet) = warp.meets[first] {
            // SAFETY: each lane that waits has left a slot of the kind that this function takes.
            unsafe { meet(warp.slots.as_mut_ptr(), want) };
        }
        self.ready.add(w, want);
        self.advanced();
        Ok(true)
    }

    /// After a thread has ended: does what its warp waited for it to do.
    pub fn release_warp(&mut self, w: u32) -> Result<(), Fault> {
        let mut left = self.warps[w as usize].waiting;
        while left != 0 {
            let mask = self.warps[w as usize].masks[left.trailing_zeros() as usize];
            self.try_meet(w, mask)?;
            left &= !(mask | 1 << left.trailing_zeros());
        }
        Ok(())
    }

    /// After a thread has ended: opens the barriers that waited for it.
    pub fn release_barriers(&mut self) -> Result<(), Fault> {
        for id in 0..self.barriers.len() {
            if self.barriers[id].arrived > 0 && self.barriers[id].count == 0 {
                self.try_barrier(id);
            }
        }
        Ok(())
    }

    /// Opens a barrier if all have come.
    fn try_barrier(&mut self, id: usize) {
        let want = if self.barriers[id].count == 0 { self.alive } else { self.barriers[id].count };
        if self.barriers[id].arrived < want {
            return;
        }
        let barrier = std::mem::take(&mut self.barriers[id]);
        let result = match barrier.op {
            ALL => u32::from(barrier.votes == want),
            ANY => u32::from(barrier.votes > 0),
            _ => barrier.votes,
        };
        self.epoch += 1;
        self.advanced();
        for (w, &lanes) in (0..).zip(&barrier.lanes).filter(|(_, lanes)| **lanes != 0) {
            self.warps[w as usize].barrier_line = None;
            self.ready.add(w, lanes);
            for lane in (0..32).filter(|lane| barrier.op != 0 && lanes >> lane & 1 == 1) {
                // SAFETY: these fibers wait at the barrier.
                unsafe { (*self.thread(w * 32 + lane)).result = result };
            }
        }
    }

    /// A thread comes to a barrier.
    fn arrive(&mut self, (w, lane, line): (u32, u32, u32), id: usize, come: Arrival) -> Result<(), Fault> {
        let waits_at = self.warps[w as usize].barrier_line.replace(line);
        if let Some(other) = waits_at.filter(|other| *other != line) {
            let text = format!("threads of one warp wait at different barriers, one at {}", self.place(other));
            return Err(fault(text));
        }
        let barrier = &mut self.barriers[id];
        if barrier.arrived == 0 {
            (barrier.count, barrier.line) = (come.count, line);
        }
        let (count, first) = (barrier.count, barrier.line);
        if count == 0 && first != line {
            let text = format!("threads of one block wait at different barriers, one at {}", self.place(first));
            return Err(fault(text));
        }
        if come.op == ARRIVE {
            self.warps[w as usize].barrier_line = waits_at;
            self.ready.add(w, 1 << lane);
        } else {
            barrier.op = come.op;
            barrier.lanes[w as usize] |= 1 << lane;
        }
        let barrier = &mut self.barriers[id];
        barrier.votes += u32::from(come.value != 0);
        barrier.arrived += 1;
        self.try_barrier(id);
        Ok(())
    }

    /// A thread comes to an instruction of its warp. Says whether it need not wait.
    fn come(&mut self, (w, lane): (u32, u32), mask: u32, meet: Meet, slot: *mut c_void) -> Result<bool, Fault> {
        if mask >> lane & 1 == 0 {
            return Err(fault(format!("a thread that its mask {mask:#x} does not name")));
        }
        let warp = &mut self.warps[w as usize];
        warp.slots[lane as usize] = slot;
        warp.masks[lane as usize] = mask;
        warp.meets[lane as usize] = Some(meet);
        warp.waiting |= 1 << lane;
        self.try_meet(w, mask)
    }
}

/// `bar.sync` and `bar.red`.
///
/// # Safety
/// Called by the C code of a kernel in the fiber of `thread`.
pub unsafe extern "C" fn barrier(thread: *mut Thread, id: u32, count: u32, op: u32, value: u32) -> u32 {
    // SAFETY: the thread is the caller's; the reference to its team ends before the fiber is left.
    unsafe {
        let who = ((*thread).warp, (*thread).lane, (*thread).line);
        if let Err(fault) = (*(*thread).team).arrive(who, id as usize & 15, Arrival { count, op, value }) {
            fail(thread, fault);
        }
        leave(thread);
        (*thread).result
    }
}

/// An instruction of the lanes of `mask`. With `orders` it orders their accesses, too.
///
/// # Safety
/// As for [`barrier`]; `slot` is what `f` takes.
pub unsafe extern "C" fn meet(thread: *mut Thread, mask: u32, orders: u32, f: Meet, slot: *mut c_void) {
    // SAFETY: as for `barrier`.
    unsafe {
        let (w, team) = ((*thread).warp, (*thread).team);
        match (*team).come((w, (*thread).lane), mask, f, slot) {
            Ok(true) => {
                let warp = &mut (&mut (*team).warps)[w as usize];
                warp.passed += u32::from(orders != 0 && mask & warp.alive == warp.alive);
            }
            Ok(false) => {}
            Err(fault) => fail(thread, fault),
        }
        leave(thread);
    }
}

/// Lets the other threads run before this one continues.
///
/// # Safety
/// As for [`barrier`].
pub unsafe extern "C" fn pause(thread: *mut Thread) {
    // SAFETY: as for `barrier`.
    unsafe {
        (*(*thread).team).ready.pause((*thread).warp, (*thread).lane);
        leave(thread);
    }
}

/// A phase of an mbarrier is complete: accesses before it are ordered before those after it.
///
/// # Safety
/// As for [`barrier`].
pub unsafe extern "C" fn ordered(thread: *mut Thread) {
    // SAFETY: as for `barrier`.
    unsafe {
        let team = &mut *(*thread).team;
        team.epoch += 1;
        team.advanced();
    }
}
