//! Page-locked memory of the host: its own, and what a program registers.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::space::{PAGE, PINNED, PINNED_WINDOW, host_pages};
use crate::error::{HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY, Result};

#[derive(Default)]
struct State {
    /// Bytes of the window that were given out.
    given: u64,
    /// Bytes of what is page-locked, and whether it was allocated here.
    regions: BTreeMap<u64, (u64, bool)>,
}

#[derive(Default)]
pub struct PinnedRegions(Mutex<State>);

impl PinnedRegions {
    pub fn allocate(&self, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let mut state = self.0.lock().unwrap();
        let (at, pages) = (PINNED + state.given, bytes.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?);
        if pages >= PINNED_WINDOW - state.given {
            return Err(OUT_OF_MEMORY);
        }
        // An unreadable page follows.
        state.given += pages + PAGE;
        state.regions.insert(at, (bytes, true));
        host_pages(at, pages, true);
        Ok(at)
    }

    pub fn free(&self, at: u64) -> Result {
        let mut state = self.0.lock().unwrap();
        let Some((bytes, true)) = state.regions.get(&at).copied() else { return Err(INVALID_VALUE) };
        state.regions.remove(&at);
        host_pages(at, bytes.next_multiple_of(PAGE), false);
        Ok(())
    }

    pub fn register(&self, at: u64, bytes: u64) -> Result {
        if at == 0 || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let mut state = self.0.lock().unwrap();
        let before = state.regions.range(..at + bytes).next_back();
        if before.is_some_and(|(start, (bytes, _))| start + bytes > at) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        state.regions.insert(at, (bytes, false));
        Ok(())
    }

    pub fn unregister(&self, at: u64) -> Result {
        let mut state = self.0.lock().unwrap();
        let Some((_, false)) = state.regions.get(&at) else { return Err(HOST_MEMORY_NOT_REGISTERED) };
        state.regions.remove(&at);
        Ok(())
    }

    /// Whether all of these bytes are page-locked.
    pub fn holds(&self, at: u64, bytes: u64) -> bool {
        let state = self.0.lock().unwrap();
        state.regions.range(..=at).next_back().is_some_and(|(start, (held, _))| at + bytes <= start + held)
    }
}
