//! Streams. Each is a thread of the host that runs its operations in order and behind the program's back, so that a
//! synchronisation that was forgotten is noticed.

mod capture;
mod event;
mod table;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

pub use capture::{Capture, CaptureMode, Graph, GraphExec, forbid_while_capturing};
pub use event::StreamEvent;
pub use table::{
    PER_THREAD, STREAMS, current_device, current_stream, drain_device, set_current_device, stream, wait_for_default,
    wait_for_device,
};

use crate::error::{ErrorCode, Result, STREAM_CAPTURE_UNSUPPORTED};
use crate::settings::{self, MAX_DEVICES};

/// The work of an operation, which runs each time that a graph with it is launched.
pub type OperationWork = Arc<dyn Fn() -> Result + Send + Sync>;

/// The kind of an operation, by its `CUgraphNodeType`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OperationKind {
    Kernel = 0,
    Copy = 1,
    Fill = 2,
    Host = 3,
    Empty = 5,
}

/// One operation of a stream, and a node of a graph.
#[derive(Clone)]
pub struct Operation {
    pub kind: OperationKind,
    pub work: OperationWork,
}

impl Operation {
    pub fn new(kind: OperationKind, work: impl Fn() -> Result + Send + Sync + 'static) -> Self {
        Self { kind, work: Arc::new(work) }
    }
}

/// The error that each device has met, and gives for each call from then on.
static ERRORS: [AtomicI32; MAX_DEVICES] = [const { AtomicI32::new(0) }; MAX_DEVICES];

/// Fails if the device has met an error that lasts.
pub fn check_device(device: usize) -> Result {
    match ERRORS[device].load(Ordering::SeqCst) {
        0 => Ok(()),
        code => Err(code),
    }
}

/// Notes an error that a device has met. Its first one stays.
pub fn break_device(device: usize, code: ErrorCode) {
    let _ = ERRORS[device].compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
}

#[derive(Default)]
struct Queue {
    operations: VecDeque<Operation>,
    /// An operation is being run.
    running: bool,
    /// The stream's thread sleeps until there are operations.
    idle: bool,
    /// Threads that wait until there are none.
    waiting: usize,
    closed: bool,
}

pub struct Stream {
    pub device: usize,
    /// The default stream waits for it, and it for the default stream.
    blocking: bool,
    queue: Mutex<Queue>,
    pushed: Condvar,
    drained: Condvar,
    capture: Mutex<Option<Arc<Capture>>>,
}

impl Stream {
    pub fn new(device: usize, blocking: bool) -> Arc<Self> {
        let stream = Arc::new(Self {
            device,
            blocking,
            queue: Mutex::default(),
            pushed: Condvar::new(),
            drained: Condvar::new(),
            capture: Mutex::default(),
        });
        let worker = stream.clone();
        let thread = std::thread::Builder::new().name(format!("stream-{device}"));
        thread.spawn(move || worker.work()).expect("a thread for a stream");
        stream
    }

    fn work(&self) {
        static SEEDS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let jitter_us = settings::get().jitter_us;
        let mut random = SEEDS.fetch_add(1, Ordering::Relaxed).wrapping_add(settings::get().seed << 32);
        while let Some(operation) = self.next() {
            if jitter_us > 0 {
                // The operation starts later than the program may think.
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                std::thread::sleep(Duration::from_micros((random >> 33) % jitter_us));
            }
            if check_device(self.device).is_ok()
                && let Err(code) = (operation.work)()
            {
                break_device(self.device, code);
            }
        }
    }

    /// The next operation, or none once the stream is closed.
    fn next(&self) -> Option<Operation> {
        let mut queue = self.queue.lock().unwrap();
        queue.running = false;
        loop {
            if let Some(operation) = queue.operations.pop_front() {
                queue.running = true;
                return Some(operation);
            }
            if queue.waiting > 0 {
                self.drained.notify_all();
            }
            if queue.closed {
                return None;
            }
            queue.idle = true;
            queue = self.pushed.wait(queue).unwrap();
            queue.idle = false;
        }
    }

    /// The capture that the stream's operations go to, if there is one.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        self.capture.lock().unwrap().clone()
    }

    /// Fails, and breaks the capture, if the stream is being captured: for calls that wait for the stream.
    pub fn forbid_capture(&self) -> Result {
        match self.capture() {
            Some(capture) => {
                capture.break_off();
                Err(STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// Queues an operation, or adds it to the graph that is being captured.
    pub fn push(&self, operation: Operation) -> Result {
        check_device(self.device)?;
        if let Some(capture) = self.capture() {
            return capture.add(operation);
        }
        let mut queue = self.queue.lock().unwrap();
        queue.operations.push_back(operation);
        if queue.idle {
            self.pushed.notify_one();
        }
        Ok(())
    }

    pub fn is_idle(&self) -> bool {
        let queue = self.queue.lock().unwrap();
        queue.operations.is_empty() && !queue.running
    }

    /// Waits until all operations have ended.
    pub fn wait(&self) -> Result {
        let mut queue = self.queue.lock().unwrap();
        queue.waiting += 1;
        while !queue.operations.is_empty() || queue.running {
            queue = self.drained.wait(queue).unwrap();
        }
        queue.waiting -= 1;
        drop(queue);
        check_device(self.device)
    }

    /// Ends the stream's thread after the operations that it has.
    pub fn close(&self) {
        self.queue.lock().unwrap().closed = true;
        self.pushed.notify_all();
    }
}
