//! The memory of each device that each process holds. Processes that name the same file in `CUEMU_LEDGER` share
//! devices: memory that one holds is not free for the others. A process that has died holds nothing.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{OUT_OF_MEMORY, Result};
use crate::settings::{self, MAX_DEVICES};

/// Most processes that share a device.
const SLOTS: usize = 64;

/// The bytes that one process holds. A slot of zeros is free.
#[repr(C)]
struct Slot {
    process: AtomicU64,
    held: [AtomicU64; MAX_DEVICES],
}

pub struct DeviceLedger {
    slots: &'static [Slot],
    own: usize,
    /// The bytes of another process, simulated by tests.
    neighbour: [AtomicU64; MAX_DEVICES],
    /// The most that this process has held.
    peak: [AtomicU64; MAX_DEVICES],
}

/// The slots in the file at `path`, or in memory of this process alone.
fn open(path: Option<&Path>) -> &'static [Slot] {
    let bytes = SLOTS * size_of::<Slot>();
    let file = path.map(|path| {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.unwrap_or_else(|e| panic!("CUEMU_LEDGER is «{}»: {e}", path.display()));
        file.set_len(bytes as u64).expect("room for the ledger");
        file
    });
    let (flags, descriptor) =
        file.as_ref().map_or((libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1), |file| (libc::MAP_SHARED, file.as_raw_fd()));
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the system chooses, which is never unmapped.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, descriptor, 0) };
    assert!(start != libc::MAP_FAILED, "the ledger: {}", std::io::Error::last_os_error());
    // SAFETY: the mapping has this many slots, of atomics for which any bytes are valid.
    unsafe { std::slice::from_raw_parts(start.cast::<Slot>(), SLOTS) }
}

fn is_alive(process: u64) -> bool {
    // SAFETY: signal 0 is not sent, it only asks whether the process is there.
    process != 0 && unsafe { libc::kill(process as i32, 0) } == 0
}

impl DeviceLedger {
    pub fn new() -> Self {
        let slots = open(settings::get().ledger.as_deref());
        let process = u64::from(std::process::id());
        let claim = |slot: &Slot| {
            let owner = slot.process.load(Ordering::SeqCst);
            !is_alive(owner)
                && slot.process.compare_exchange(owner, process, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        let own = slots.iter().position(claim).expect("no more than 64 processes share a device");
        slots[own].held.iter().for_each(|held| held.store(0, Ordering::SeqCst));
        Self { slots, own, neighbour: Default::default(), peak: Default::default() }
    }

    /// Free bytes of `device`; negative where two processes take the last of it at once.
    fn left(&self, device: usize) -> i64 {
        let is_held = |(i, slot): &(usize, &Slot)| *i == self.own || is_alive(slot.process.load(Ordering::SeqCst));
        let slots = self.slots.iter().enumerate().filter(is_held);
        let held: u64 = slots.map(|(_, slot)| slot.held[device].load(Ordering::SeqCst)).sum();
        settings::get().memory as i64 - (held + self.neighbour[device].load(Ordering::SeqCst)) as i64
    }

    pub fn free(&self, device: usize) -> u64 {
        self.left(device).max(0) as u64
    }

    /// Takes `bytes` of `device`.
    pub fn take(&self, device: usize, bytes: u64) -> Result {
        let held = self.slots[self.own].held[device].fetch_add(bytes, Ordering::SeqCst) + bytes;
        if self.left(device) >= 0 {
            self.peak[device].fetch_max(held, Ordering::SeqCst);
            return Ok(());
        }
        self.give_back(device, bytes);
        Err(OUT_OF_MEMORY)
    }

    pub fn give_back(&self, device: usize, bytes: u64) {
        self.slots[self.own].held[device].fetch_sub(bytes, Ordering::SeqCst);
    }

    /// The processes that hold some of `device`, and how much. The made-up neighbour is process 1.
    pub fn holders(&self, device: usize) -> Vec<(u32, u64)> {
        let held = |slot: &Slot| slot.held[device].load(Ordering::SeqCst);
        let processes = self.slots.iter().map(|slot| (slot.process.load(Ordering::SeqCst), held(slot)));
        let neighbour = (1, self.neighbour[device].load(Ordering::SeqCst));
        let alive = processes.filter(|(process, _)| is_alive(*process)).chain([neighbour]);
        alive.filter(|(_, held)| *held > 0).map(|(process, held)| (process as u32, held)).collect()
    }

    /// The most bytes of `device` that this process has held at a time since the last call.
    pub fn take_peak(&self, device: usize) -> u64 {
        self.peak[device].swap(self.slots[self.own].held[device].load(Ordering::SeqCst), Ordering::SeqCst)
    }

    /// Lets a neighbour hold so much of `device` from now on.
    pub fn set_neighbour(&self, device: usize, bytes: u64) {
        self.neighbour[device].store(bytes, Ordering::SeqCst);
    }
}
