//! Events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::{Capture, Operation, OperationKind, Stream, check_device};
use crate::error::{CAPTURED_EVENT, INVALID_HANDLE, NOT_READY, Result, STREAM_CAPTURE_ISOLATION};

/// How often a thread that waits for an event looks whether its device has failed.
const POLL: Duration = Duration::from_millis(20);

pub struct StreamEvent {
    timed: bool,
    /// How often it was recorded.
    recorded: AtomicU64,
    /// The last of its records that a stream has come to, and when.
    done: Mutex<(u64, Option<Instant>)>,
    change: Condvar,
    /// The capture in which it was last recorded.
    capture: Mutex<Option<Arc<Capture>>>,
}

impl StreamEvent {
    pub fn new(timed: bool) -> Arc<Self> {
        Arc::new(Self {
            timed,
            recorded: AtomicU64::new(0),
            done: Mutex::default(),
            change: Condvar::new(),
            capture: Mutex::default(),
        })
    }

    pub fn record(self: &Arc<Self>, stream: &Stream) -> Result {
        let capture = stream.capture();
        let captured = capture.is_some();
        *self.capture.lock().unwrap() = capture;
        if captured {
            return check_device(stream.device);
        }
        let (record, event) = (self.recorded.fetch_add(1, Ordering::SeqCst) + 1, self.clone());
        stream.push(Operation::new(OperationKind::Empty, move || {
            *event.done.lock().unwrap() = (record, Some(Instant::now()));
            event.change.notify_all();
            Ok(())
        }))
    }

    /// Fails for an event of a capture in progress, which the host cannot query.
    pub fn forbid_capture(&self) -> Result {
        match &*self.capture.lock().unwrap() {
            Some(capture) if capture.is_going_on() => Err(CAPTURED_EVENT),
            _ => Ok(()),
        }
    }

    pub fn is_done(&self) -> bool {
        self.done.lock().unwrap().0 >= self.recorded.load(Ordering::SeqCst)
    }

    /// Waits for the last record, or until `device` fails.
    pub fn wait(&self, device: usize) -> Result {
        self.wait_for(self.recorded.load(Ordering::SeqCst), device)
    }

    fn wait_for(&self, record: u64, device: usize) -> Result {
        let mut done = self.done.lock().unwrap();
        while done.0 < record {
            // An operation that failed before the event keeps it from ever happening.
            check_device(device)?;
            done = self.change.wait_timeout(done, POLL).unwrap().0;
        }
        Ok(())
    }

    /// Makes a stream wait for what was recorded until now, or join the capture that the event was recorded in.
    pub fn hold(self: &Arc<Self>, stream: &Stream) -> Result {
        let capture = self.capture.lock().unwrap().clone();
        if let Some(capture) = capture.filter(|capture| capture.is_going_on()) {
            stream.capture.lock().unwrap().get_or_insert(capture);
            return Ok(());
        }
        if let Some(capture) = stream.capture() {
            capture.break_off();
            return Err(STREAM_CAPTURE_ISOLATION);
        }
        let (event, record, device) = (self.clone(), self.recorded.load(Ordering::SeqCst), stream.device);
        stream.push(Operation::new(OperationKind::Empty, move || event.wait_for(record, device)))
    }

    pub fn milliseconds_since(&self, start: &Self) -> Result<f32> {
        if !self.timed || !start.timed {
            return Err(INVALID_HANDLE);
        }
        if !self.is_done() || !start.is_done() {
            return Err(NOT_READY);
        }
        let (begin, end) = (start.done.lock().unwrap().1, self.done.lock().unwrap().1);
        let (Some(begin), Some(end)) = (begin, end) else { return Err(INVALID_HANDLE) };
        let seconds =
            end.saturating_duration_since(begin).as_secs_f32() - begin.saturating_duration_since(end).as_secs_f32();
        Ok(seconds * 1e3)
    }
}
