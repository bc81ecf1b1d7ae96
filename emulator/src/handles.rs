//! Handles that the driver gives out: numbers that are never given twice, so that one which has been destroyed is
//! refused and not followed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, RwLock};

use crate::error::{self, INVALID_HANDLE};

/// A handle as a program has it. Zero is none.
pub type Handle = usize;

/// The things of one kind that a program has handles of.
pub struct Handles<T>(LazyLock<RwLock<HashMap<Handle, Arc<T>>>>);

impl<T> Handles<T> {
    pub const fn new() -> Self {
        Self(LazyLock::new(RwLock::default))
    }

    pub fn add(&self, thing: Arc<T>) -> Handle {
        // The first are left out, because small handles have meanings of their own (streams, contexts, pools).
        static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
        let handle = NEXT.fetch_add(16, Ordering::Relaxed);
        self.0.write().expect("no holder panics").insert(handle, thing);
        handle
    }

    pub fn get(&self, handle: Handle) -> error::Result<Arc<T>> {
        self.0.read().expect("no holder panics").get(&handle).cloned().ok_or(INVALID_HANDLE)
    }

    pub fn remove(&self, handle: Handle) -> error::Result<Arc<T>> {
        self.0.write().expect("no holder panics").remove(&handle).ok_or(INVALID_HANDLE)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.0.read().expect("no holder panics").values().cloned().collect()
    }
}
