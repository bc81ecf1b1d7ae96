//! Memory of the devices and page-locked memory of the host. Addresses of what was allocated are not given out twice,
//! so that use after free is always seen. Addresses that were reserved are, once most of the window has been given out.

mod ledger;
mod pinned;
mod shared;
mod space;
mod virtual_memory;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock};

pub use pinned::PinnedRegions;
pub use shared::IpcKey;
pub use space::{DEVICE, DeviceSet, LOCAL, PAGE, READ_WRITE, protect, release, reserve};
pub use virtual_memory::GRANULARITY;

use crate::error::{ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, Result};
use crate::settings::{self, MAX_DEVICES};
use ledger::DeviceLedger;
use space::{AddressSpace, WINDOW};
use virtual_memory::Physical;

/// The address of an allocation of no bytes from a pool. No access to it is allowed.
const EMPTY: u64 = DEVICE + PAGE;

struct Region {
    bytes: u64,
    kind: RegionKind,
}

enum RegionKind {
    Allocated {
        device: usize,
        /// Where its bytes are in the file.
        physical: u64,
        pool: bool,
        /// Another process may have it mapped.
        exported: bool,
    },
    /// Another process's memory.
    Imported { file: i32, key: IpcKey, opened: u32 },
    /// Addresses for virtual memory.
    Reserved,
}

#[derive(Default)]
struct State {
    /// The next address to give out.
    next: u64,
    /// The next place in the file to give out.
    next_physical: u64,
    regions: BTreeMap<u64, Region>,
    /// Addresses that were reserved and freed, by how many they are.
    unreserved: BTreeMap<u64, Vec<u64>>,
    /// Physical memory by its handle.
    physical: BTreeMap<u64, Physical>,
    /// Mappings into reserved addresses: bytes and handle.
    mapped: BTreeMap<u64, (u64, u64)>,
    /// Of each device, those whose kernels may access what is allocated there.
    peers: [DeviceSet; MAX_DEVICES],
    /// Bytes that the pool of each device has given out.
    pool_used: [u64; MAX_DEVICES],
    /// Bytes that were freed into the pool of each device and not yet given back to the device.
    pool_cached: [u64; MAX_DEVICES],
    /// How much each pool keeps at a synchronisation.
    pool_threshold: [u64; MAX_DEVICES],
}

pub struct Memory {
    space: AddressSpace,
    ledger: DeviceLedger,
    state: Mutex<State>,
    pub pinned: PinnedRegions,
}

/// Whether an address is one of a device.
pub fn is_device_address(at: u64) -> bool {
    (DEVICE..DEVICE + WINDOW).contains(&at)
}

/// The memory of all devices of this process.
pub fn get() -> &'static Memory {
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    MEMORY.get_or_init(|| {
        // The first pages are never given out: an address near the start of the window is a mistake.
        let state = State { next: DEVICE + (1 << 30), ..State::default() };
        Memory {
            space: AddressSpace::new(),
            ledger: DeviceLedger::new(),
            state: Mutex::new(state),
            pinned: PinnedRegions::default(),
        }
    })
}

impl State {
    /// Addresses of `bytes` bytes that were never given out, followed by a page that never will be.
    fn addresses(&mut self, bytes: u64, align: u64) -> u64 {
        let at = self.next.next_multiple_of(align);
        self.next = at + bytes.next_multiple_of(PAGE) + PAGE;
        assert!(self.next < DEVICE + WINDOW, "the emulator's addresses are used up");
        at
    }

    /// The devices whose kernels may access what is allocated on a device.
    fn accessors(&self, device: usize) -> DeviceSet {
        self.peers[device] | 1 << device
    }

    fn place_in_file(&mut self, bytes: u64) -> u64 {
        let place = self.next_physical;
        self.next_physical += bytes.next_multiple_of(PAGE);
        place
    }
}

impl Memory {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// For each page of the devices' addresses: how many of its bytes kernels of a device may access.
    pub fn limits(&self, device: usize) -> *const u16 {
        self.space.limits(device)
    }

    /// Free bytes of `device`, this process's pool included.
    pub fn free_bytes(&self, device: usize) -> u64 {
        self.ledger.free(device)
    }

    /// Takes a context's memory on its device.
    pub fn open_context(&self, device: usize) -> Result {
        self.ledger.take(device, settings::get().context)
    }

    pub fn close_context(&self, device: usize) {
        self.ledger.give_back(device, settings::get().context);
    }

    /// The processes that hold some of `device`, and how much. The made-up neighbour is process 1.
    pub fn holders(&self, device: usize) -> Vec<(u32, u64)> {
        self.ledger.holders(device)
    }

    /// The most bytes of `device` that this process has held at a time since the last call.
    pub fn take_peak(&self, device: usize) -> u64 {
        self.ledger.take_peak(device)
    }

    pub fn set_neighbour(&self, device: usize, bytes: u64) {
        self.ledger.set_neighbour(device, bytes);
    }

    /// Takes memory of a device, of what the pool has cached if need be.
    fn take(&self, state: &mut State, device: usize, bytes: u64) -> Result {
        self.ledger.take(device, bytes).or_else(|_| {
            self.ledger.give_back(device, std::mem::take(&mut state.pool_cached[device]));
            self.ledger.take(device, bytes)
        })
    }

    /// Takes memory of a device for its pool: first what the pool has cached.
    fn take_for_pool(&self, state: &mut State, device: usize, bytes: u64) -> Result {
        let reused = state.pool_cached[device].min(bytes);
        self.ledger.take(device, bytes - reused)?;
        state.pool_cached[device] -= reused;
        state.pool_used[device] += bytes;
        Ok(())
    }

    /// `bytes` bytes of `device`, from its pool or not, filled with NaN.
    pub fn allocate(&self, device: usize, bytes: u64, pool: bool) -> Result<u64> {
        if bytes == 0 {
            return if pool { Ok(EMPTY) } else { Err(INVALID_VALUE) };
        }
        let pages = bytes.checked_next_multiple_of(PAGE).filter(|&pages| pages < WINDOW).ok_or(OUT_OF_MEMORY)?;
        let mut state = self.state();
        if pool {
            self.take_for_pool(&mut state, device, pages)?;
        } else {
            self.take(&mut state, device, pages)?;
        }
        let (at, physical) = (state.addresses(bytes, PAGE), state.place_in_file(pages));
        let kind = RegionKind::Allocated { device, physical, pool, exported: false };
        state.regions.insert(at, Region { bytes, kind });
        self.space.show(at, pages, self.space.file, physical, READ_WRITE);
        self.space.poison(at, bytes);
        // As in CUDA, peers have access to a pool only where they ask it, which is not emulated.
        self.space.allow(at, bytes, if pool { 1 << device } else { state.accessors(device) });
        Ok(at)
    }

    /// Lets kernels of `device` access what is, and will be, allocated on `other`. False if they could before.
    pub fn enable_peer(&self, device: usize, other: usize) -> bool {
        let mut state = self.state();
        let is_new = state.peers[other] >> device & 1 == 0;
        state.peers[other] |= 1 << device;
        for (at, region) in &state.regions {
            if matches!(region.kind, RegionKind::Allocated { device, pool: false, .. } if device == other) {
                self.space.allow(*at, region.bytes, 1 << device);
            }
        }
        is_new
    }

    /// Frees what [`Memory::allocate`] gave.
    pub fn free(&self, at: u64) -> Result {
        if at == 0 || at == EMPTY {
            return Ok(());
        }
        let mut state = self.state();
        let Some(Region { bytes, kind: RegionKind::Allocated { device, physical, pool, exported } }) =
            state.regions.get(&at)
        else {
            return Err(INVALID_VALUE);
        };
        let (pages, device, physical) = (bytes.next_multiple_of(PAGE), *device, *physical);
        let (pool, exported) = (*pool, *exported);
        state.regions.remove(&at);
        if exported {
            // A process that still reads it shall see that it is gone.
            self.space.poison(at, pages);
        }
        self.space.hide(at, pages);
        if !exported {
            self.space.discard(physical, pages);
        }
        if pool {
            state.pool_used[device] -= pages;
            state.pool_cached[device] += pages;
        } else {
            self.ledger.give_back(device, pages);
        }
        Ok(())
    }

    /// Gives back what a device's pool has cached: at a synchronisation down to its threshold, else down to `keep`.
    pub fn trim(&self, device: usize, keep: Option<u64>) {
        let mut state = self.state();
        let keep = keep.unwrap_or(state.pool_threshold[device]).saturating_sub(state.pool_used[device]);
        let cached = state.pool_cached[device];
        state.pool_cached[device] = cached.min(keep);
        self.ledger.give_back(device, cached.saturating_sub(keep));
    }

    pub fn set_pool_threshold(&self, device: usize, bytes: u64) {
        self.state().pool_threshold[device] = bytes;
    }

    pub fn pool_threshold(&self, device: usize) -> u64 {
        self.state().pool_threshold[device]
    }

    /// Bytes that a device's pool has given out, and those that it holds with them.
    pub fn pool_bytes(&self, device: usize) -> (u64, u64) {
        let state = self.state();
        (state.pool_used[device], state.pool_used[device] + state.pool_cached[device])
    }

    /// Where the bytes at an address are. Addresses outside of device memory are the host's and are not checked.
    pub fn bytes_at(&self, at: u64, bytes: usize) -> Result<*mut u8> {
        self.space.bytes_at(at, bytes).map_err(|wrong| {
            eprintln!("emulator: {bytes} bytes at {at:#x} are not all allocated: those at {wrong:#x} are not");
            INVALID_VALUE
        })
    }

    /// As [`Memory::bytes_at`] on behalf of a kernel or an operation of a stream, whose device an error breaks.
    pub fn bytes_at_run(&self, at: u64, bytes: usize) -> Result<*mut u8> {
        self.bytes_at(at, bytes).map_err(|_| ILLEGAL_ADDRESS)
    }

    /// Start and size of the allocation that an address is in.
    pub fn allocation_of(&self, at: u64) -> Option<(u64, u64)> {
        let state = self.state();
        let (start, region) = state.regions.range(..=at).next_back()?;
        match region.kind {
            RegionKind::Reserved => {
                let (start, (bytes, _)) = state.mapped.range(..=at).next_back()?;
                (at < start + bytes).then_some((*start, *bytes))
            }
            _ => (at < start + region.bytes).then_some((*start, region.bytes)),
        }
    }

    /// The device whose memory is at an address.
    pub fn device_of(&self, at: u64) -> Option<usize> {
        let state = self.state();
        let (start, region) = state.regions.range(..=at).next_back()?;
        match &region.kind {
            RegionKind::Allocated { device, .. } => (at < start + region.bytes).then_some(*device),
            RegionKind::Imported { key, .. } => (at < start + region.bytes).then_some(key[4] as usize),
            RegionKind::Reserved => {
                let (start, (bytes, handle)) = state.mapped.range(..=at).next_back()?;
                (at < start + bytes).then(|| state.physical[handle].device)
            }
        }
    }
}
