//! The streams of the process by their handles, and the device that is current in each thread.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::{Stream, check_device};
use crate::error::{INVALID_CONTEXT, Result};
use crate::handles::{Handle, Handles};
use crate::memory;
use crate::settings::MAX_DEVICES;

/// The default stream of a thread (`CU_STREAM_PER_THREAD`).
pub const PER_THREAD: Handle = 2;

pub static STREAMS: Handles<Stream> = Handles::new();

static DEFAULT: [OnceLock<Arc<Stream>>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    static OF_THREAD: RefCell<HashMap<usize, Handle>> = RefCell::new(HashMap::new());
}

/// The device whose context is current in this thread.
pub fn current_device() -> Result<usize> {
    CURRENT.get().ok_or(INVALID_CONTEXT)
}

pub fn set_current_device(device: Option<usize>) {
    CURRENT.set(device);
}

/// The stream of a handle: one that was created, a device's default stream (0 and 1), or a thread's (2).
pub fn stream(handle: Handle) -> Result<Arc<Stream>> {
    if handle > PER_THREAD {
        return STREAMS.get(handle);
    }
    let device = current_device()?;
    if handle == PER_THREAD {
        let own = || STREAMS.add(Stream::new(device, true));
        return STREAMS.get(OF_THREAD.with_borrow_mut(|own_of| *own_of.entry(device).or_insert_with(own)));
    }
    Ok(DEFAULT[device].get_or_init(|| Stream::new(device, true)).clone())
}

/// The default stream of the current device.
pub fn current_stream() -> Result<Arc<Stream>> {
    stream(0)
}

/// Streams of a device, its default stream included.
fn streams_of(device: usize) -> Vec<Arc<Stream>> {
    let mut streams = STREAMS.all();
    streams.extend(DEFAULT[device].get().cloned());
    streams.retain(|stream| stream.device == device);
    streams
}

/// Waits for all that the device was given.
pub fn wait_for_device(device: usize) -> Result {
    check_device(device)?;
    streams_of(device).iter().try_for_each(|stream| stream.forbid_capture())?;
    drain_device(device)
}

/// As [`wait_for_device`], for calls that wait although the program has not asked for it: they may come from other
/// threads while a capture of this device is in progress.
pub fn drain_device(device: usize) -> Result {
    check_device(device)?;
    streams_of(device).iter().try_for_each(|stream| stream.wait())?;
    memory::get().trim(device, None);
    Ok(())
}

/// Waits for the default stream and those that it waits for, as a copy that is not asynchronous does.
pub fn wait_for_default(device: usize) -> Result {
    check_device(device)?;
    let mut streams = streams_of(device);
    streams.retain(|stream| stream.blocking);
    for stream in &streams {
        stream.forbid_capture()?;
        stream.wait()?;
    }
    Ok(())
}
