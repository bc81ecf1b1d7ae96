//! Looks for races in shared memory: two accesses to a byte, one of them a write, by two threads with no barrier
//! between.

use super::abi::Thread;
use super::team::{Fault, fail};
use crate::error::LAUNCH_FAILED;

/// How a thread accesses bytes, as the C code numbers it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    Read = 0,
    Write = 1,
    /// An atomic operation or a strong write.
    Atomic = 2,
    StrongRead = 3,
}

impl AccessKind {
    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Atomic)
    }

    /// Strong accesses do not race with each other.
    fn is_strong(self) -> bool {
        matches!(self, Self::Atomic | Self::StrongRead)
    }
}

#[derive(Clone, Copy)]
struct ThreadAccess {
    thread: u32,
    /// Barriers of the block before it.
    epoch: u32,
    /// Barriers of the warp before it.
    passed: u32,
    line: u32,
    kind: AccessKind,
}

impl ThreadAccess {
    const NONE: Self = Self { thread: u32::MAX, epoch: u32::MAX, passed: 0, line: 0, kind: AccessKind::Read };

    fn warp(self) -> u32 {
        self.thread / 32
    }

    /// Whether this access is over before `later` begins, or is the same thread's.
    fn is_before(self, later: Self) -> bool {
        self.epoch != later.epoch
            || self.thread == later.thread
            || (self.warp() == later.warp() && self.passed < later.passed)
    }
}

/// The last accesses to a byte.
#[derive(Clone, Copy)]
pub struct Shadow {
    write: ThreadAccess,
    read: ThreadAccess,
    /// A reader of another thread of the same warp, or of another warp.
    other: ThreadAccess,
}

impl Shadow {
    pub const NONE: Self = Self { write: ThreadAccess::NONE, read: ThreadAccess::NONE, other: ThreadAccess::NONE };

    /// The access that this one races with, if there is one.
    fn conflict(&self, access: ThreadAccess) -> Option<ThreadAccess> {
        let earlier = if access.kind.writes() { &[self.write, self.read, self.other][..] } else { &[self.write] };
        let both_strong = |earlier: &ThreadAccess| earlier.kind.is_strong() && access.kind.is_strong();
        let races = |earlier: &ThreadAccess| !earlier.is_before(access) && !both_strong(earlier);
        earlier.iter().copied().find(races)
    }

    fn note(&mut self, access: ThreadAccess) {
        if access.kind.writes() {
            *self = Self { write: access, ..Self::NONE };
        } else if self.read.epoch != access.epoch || self.read.thread == access.thread {
            self.read = access;
        } else if self.other.epoch != access.epoch || self.other.warp() == access.warp() {
            // Of the readers that a later writer must not overtake, one in its own warp and one in another are enough.
            self.other = access;
        } else if self.read.warp() == access.warp() {
            self.read = access;
        }
    }
}

/// Notes an access to shared memory, if races are looked for.
///
/// # Safety
/// Called in the fiber of `thread`; the bytes are in the block's shared memory.
pub unsafe fn touch(thread: *mut Thread, at: u32, bytes: u32, kind: AccessKind) {
    // SAFETY: the thread is the caller's, and references to its team end before the fiber is left.
    unsafe {
        let team = &mut *(*thread).team;
        if team.shadow.is_empty() {
            return;
        }
        let passed = team.warps[(*thread).warp as usize].passed;
        let access = ThreadAccess { thread: (*thread).index, epoch: team.epoch, passed, line: (*thread).line, kind };
        let range = at as usize..(at + bytes) as usize;
        let conflict = range.clone().find_map(|i| Some((i, team.shadow[i].conflict(access)?)));
        let Some((i, earlier)) = conflict else {
            team.shadow[range].iter_mut().for_each(|byte| byte.note(access));
            return;
        };
        let (done, other) = (if kind.writes() { "written" } else { "read" }, team.place(earlier.line));
        let by = earlier.thread;
        let text = format!(
            "race: byte {i} of shared memory is {done} here and touched by thread {by} with no barrier between: {other}"
        );
        fail(thread, Fault { code: LAUNCH_FAILED, text });
    }
}

/// The C code's call of [`touch`].
///
/// # Safety
/// As for [`touch`].
pub unsafe extern "C" fn race(thread: *mut Thread, at: u32, bytes: u32, access: u32) {
    let kinds = [AccessKind::Read, AccessKind::Write, AccessKind::Atomic, AccessKind::StrongRead];
    // SAFETY: the caller keeps what `touch` asks for.
    unsafe { touch(thread, at, bytes, kinds[access as usize]) };
}
