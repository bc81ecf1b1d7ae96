//! Virtual memory: addresses are reserved, physical memory is created, and the one is mapped to the other.

use super::space::{DEVICE, DeviceSet, READ_WRITE, STORE, WINDOW, protect};
use super::{Memory, Region, RegionKind, State};
use crate::error::{INVALID_VALUE, Result};

/// Sizes and addresses of virtual memory are multiples of this.
pub const GRANULARITY: u64 = 2 << 20;

/// From here on, addresses that were reserved and freed are given out again.
const USE_AGAIN: u64 = DEVICE + WINDOW / 2;

/// Physical memory that a handle stands for.
pub struct Physical {
    pub device: usize,
    /// Where its bytes are in the file.
    at: u64,
    bytes: u64,
    mappings: usize,
    released: bool,
    /// Its bytes have never been anybody's.
    fresh: bool,
}

fn is_granular(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(GRANULARITY)
}

impl State {
    /// Where `bytes` bytes at `at` are mapped, as address, bytes and handle of each mapping, which must fill them.
    fn mappings(&self, at: u64, bytes: u64) -> Result<Vec<(u64, u64, u64)>> {
        let (mut found, mut here) = (Vec::new(), at);
        while here < at + bytes {
            let &(bytes, handle) = self.mapped.get(&here).ok_or(INVALID_VALUE)?;
            found.push((here, bytes, handle));
            here += bytes;
        }
        if here == at + bytes { Ok(found) } else { Err(INVALID_VALUE) }
    }
}

impl Memory {
    pub fn reserve_addresses(&self, bytes: u64, align: u64) -> Result<u64> {
        if !is_granular(bytes) || (align != 0 && !align.is_power_of_two()) {
            return Err(INVALID_VALUE);
        }
        let mut state = self.state();
        let align = align.max(GRANULARITY);
        let used_again = if state.next > USE_AGAIN {
            let of_size = state.unreserved.entry(bytes).or_default();
            let fitting = of_size.iter().position(|at| at.is_multiple_of(align));
            fitting.map(|i| of_size.remove(i))
        } else {
            None
        };
        let at = used_again.unwrap_or_else(|| state.addresses(bytes, align));
        state.regions.insert(at, Region { bytes, kind: RegionKind::Reserved });
        Ok(at)
    }

    pub fn free_addresses(&self, at: u64, bytes: u64) -> Result {
        let mut state = self.state();
        let reserved =
            matches!(state.regions.get(&at), Some(Region { bytes: n, kind: RegionKind::Reserved }) if *n == bytes);
        if !reserved || state.mapped.range(at..at + bytes).next().is_some() {
            return Err(INVALID_VALUE);
        }
        state.regions.remove(&at);
        state.unreserved.entry(bytes).or_default().push(at);
        Ok(())
    }

    /// A handle of `bytes` bytes of a device.
    pub fn create(&self, device: usize, bytes: u64) -> Result<u64> {
        if !is_granular(bytes) {
            return Err(INVALID_VALUE);
        }
        let mut state = self.state();
        self.take(&mut state, device, bytes)?;
        let at = state.place_in_file(bytes);
        let handle = state.physical.last_key_value().map_or(1, |(last, _)| last + 1);
        let physical = Physical { device, at, bytes, mappings: 0, released: false, fresh: true };
        state.physical.insert(handle, physical);
        Ok(handle)
    }

    /// Puts physical memory behind reserved addresses. Nobody may access it before [`Memory::allow_access`].
    pub fn map(&self, at: u64, bytes: u64, offset: u64, handle: u64) -> Result {
        if !is_granular(bytes) || !at.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        let mut state = self.state();
        let region = state.regions.range(..=at).next_back().ok_or(INVALID_VALUE)?;
        let is_reserved = matches!(region.1.kind, RegionKind::Reserved) && at + bytes <= region.0 + region.1.bytes;
        let before = state.mapped.range(..at + bytes).next_back();
        let is_free = before.is_none_or(|(start, (n, _))| start + n <= at);
        let physical = state.physical.get_mut(&handle).filter(|p| !p.released && offset + bytes <= p.bytes);
        let Some(physical) = physical.filter(|_| is_reserved && is_free) else { return Err(INVALID_VALUE) };
        physical.mappings += 1;
        self.space.show(at, bytes, self.space.file, physical.at + offset, libc::PROT_NONE);
        state.mapped.insert(at, (bytes, handle));
        Ok(())
    }

    /// Lets these devices read and write what is mapped.
    pub fn allow_access(&self, at: u64, bytes: u64, devices: DeviceSet) -> Result {
        let mut state = self.state();
        for (at, bytes, handle) in state.mappings(at, bytes)? {
            protect(at + (STORE - DEVICE), bytes, READ_WRITE);
            let physical = state.physical.get_mut(&handle).expect("a mapping's handle lives as long as the mapping");
            if std::mem::take(&mut physical.fresh) {
                self.space.poison(at, bytes);
            }
        }
        self.space.allow(at, bytes, devices);
        Ok(())
    }

    pub fn unmap(&self, at: u64, bytes: u64) -> Result {
        let mut state = self.state();
        for (at, bytes, handle) in state.mappings(at, bytes)? {
            state.mapped.remove(&at);
            self.space.hide(at, bytes);
            state.physical.get_mut(&handle).expect("a mapping's handle lives as long as the mapping").mappings -= 1;
            self.reap(&mut state, handle);
        }
        Ok(())
    }

    /// Gives up a handle. Its memory goes back to the device once it is mapped nowhere.
    pub fn release(&self, handle: u64) -> Result {
        let mut state = self.state();
        state.physical.get_mut(&handle).filter(|p| !p.released).ok_or(INVALID_VALUE)?.released = true;
        self.reap(&mut state, handle);
        Ok(())
    }

    fn reap(&self, state: &mut State, handle: u64) {
        let physical = &state.physical[&handle];
        if physical.released && physical.mappings == 0 {
            self.space.discard(physical.at, physical.bytes);
            self.ledger.give_back(physical.device, physical.bytes);
            state.physical.remove(&handle);
        }
    }
}
