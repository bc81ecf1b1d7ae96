//! Captures and the graphs that they end in. A graph is its operations in the order in which they were captured.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use super::{Operation, OperationKind, STREAMS, Stream};
use crate::error::{
    GRAPH_EXEC_UPDATE_FAILURE, Result, STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_UNMATCHED,
    STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD,
};
use crate::memory;

/// Which threads' unsafe calls break a capture.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CaptureMode {
    Global,
    ThreadLocal,
    Relaxed,
}

/// A capture in progress, or one that has ended without a graph yet.
pub struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    operations: Mutex<Vec<Operation>>,
    memory: Mutex<Vec<u64>>,
    broken: AtomicBool,
    ended: AtomicBool,
}

static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

/// Fails, and breaks the captures that do not allow it: for calls that do not go through a stream.
pub fn forbid_while_capturing() -> Result {
    let captures = CAPTURES.lock().unwrap();
    let mut result = Ok(());
    for capture in captures.iter() {
        let own = capture.thread == std::thread::current().id();
        if capture.mode == CaptureMode::Global || (own && capture.mode == CaptureMode::ThreadLocal) {
            capture.break_off();
            result = Err(STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    result
}

impl Capture {
    /// Begins a capture of what is pushed into `stream`.
    pub fn begin(stream: &Stream, mode: CaptureMode) -> Result {
        let mut slot = stream.capture.lock().unwrap();
        if slot.is_some() {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        let capture = Arc::new(Self {
            mode,
            thread: std::thread::current().id(),
            operations: Mutex::default(),
            memory: Mutex::default(),
            broken: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        CAPTURES.lock().unwrap().push(capture.clone());
        *slot = Some(capture);
        Ok(())
    }

    /// Ends the capture of `stream` and of the streams that have joined it.
    pub fn end(stream: &Stream) -> Result<Arc<Graph>> {
        let capture = stream.capture().ok_or(STREAM_CAPTURE_UNMATCHED)?;
        if capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id() {
            return Err(STREAM_CAPTURE_WRONG_THREAD);
        }
        capture.ended.store(true, Ordering::SeqCst);
        CAPTURES.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &capture));
        stream.capture.lock().unwrap().take();
        for other in STREAMS.all() {
            other.capture.lock().unwrap().take_if(|slot| Arc::ptr_eq(slot, &capture));
        }
        let operations = std::mem::take(&mut *capture.operations.lock().unwrap());
        let graph = Graph { operations, memory: std::mem::take(&mut *capture.memory.lock().unwrap()) };
        if capture.is_broken() { Err(STREAM_CAPTURE_INVALIDATED) } else { Ok(Arc::new(graph)) }
    }

    pub fn add(&self, operation: Operation) -> Result {
        if self.is_broken() {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        self.operations.lock().unwrap().push(operation);
        Ok(())
    }

    /// Leaves memory that was allocated while capturing to the graph.
    pub fn own(&self, at: u64) {
        let mut memory = self.memory.lock().unwrap();
        if !memory.contains(&at) {
            memory.push(at);
        }
    }

    pub fn break_off(&self) {
        self.broken.store(true, Ordering::SeqCst);
    }

    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    pub fn is_going_on(&self) -> bool {
        !self.ended.load(Ordering::SeqCst) && !self.is_broken()
    }
}

/// Operations, and the memory that was allocated while they were captured, which lives as long as the graph.
pub struct Graph {
    pub operations: Vec<Operation>,
    memory: Vec<u64>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        for at in self.memory.drain(..) {
            let _ = memory::get().free(at);
        }
    }
}

/// A graph that can be launched, and the graph that it has got its operations from.
pub struct GraphExec(Mutex<Arc<Graph>>);

impl GraphExec {
    pub fn new(graph: Arc<Graph>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(graph)))
    }

    /// Takes the operations of a graph that has the same kinds of operations in the same order.
    pub fn update(&self, graph: Arc<Graph>) -> Result {
        let mut own = self.0.lock().unwrap();
        let kinds = |graph: &Graph| graph.operations.iter().map(|operation| operation.kind).collect::<Vec<_>>();
        if kinds(&own) != kinds(&graph) {
            return Err(GRAPH_EXEC_UPDATE_FAILURE);
        }
        *own = graph;
        Ok(())
    }

    pub fn launch(&self, stream: &Stream) -> Result {
        let graph = self.0.lock().unwrap().clone();
        if let Some(capture) = stream.capture() {
            return graph.operations.iter().try_for_each(|operation| capture.add(operation.clone()));
        }
        stream.push(Operation::new(OperationKind::Empty, move || {
            graph.operations.iter().try_for_each(|operation| (operation.work)())
        }))
    }
}
