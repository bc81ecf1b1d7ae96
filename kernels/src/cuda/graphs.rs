//! CUDA graphs: steps that are captured once, and replayed for later steps that look the same to the host.
//!
//! The first step of a shape runs eagerly, so that its memory is allocated and its kernels are loaded. The second is
//! captured, and later ones replay the capture, which reads the new step from the addresses of the old one. If the
//! driver cannot capture, all steps run eagerly.
//!
//! Collectives are captured too. NCCL requires that all ranks capture them or none, and that all replay graphs that
//! they have captured together. So the ranks agree on each step, by the minimum of what each of them can do. A rank
//! whose memory has moved keeps the others from replaying. A rank that cannot capture keeps the others from it
//! permanently. Graphs are found by a key that is the same on all ranks, and all ranks capture at once, so graphs that
//! all of them have for a key were captured together.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus as CaptureStatus;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, sys};
use candle_core::{Result, bail};

use super::capture::CapturingThread;
use super::context::Context;
use super::step::{CudaStep, GraphKey};
use crate::group::HostCollective;
use crate::kv_layout::KvLayout;

/// Captures in a row that another thread may invalidate before no more are tried.
const MAX_INVALIDATED: u32 = 3;
/// Shapes of steps that are kept: numbers of rows times lengths of the longest sequence.
const MAX_SHAPES: usize = 64;

/// The graphs of a rank.
pub(super) struct CudaGraphs {
    context: Arc<Context>,
    /// The shapes of steps that have run, the most recently used one last.
    known: RefCell<Vec<GraphEntry>>,
    /// Caches that the step under capture reads; `None` if no capture is active.
    read: RefCell<Option<Vec<KvLayout>>>,
    is_disabled: Cell<bool>,
    /// Captures in a row that were invalidated.
    invalidated: Cell<u32>,
}

struct GraphEntry {
    key: GraphKey,
    /// [`Context::moves`] after its last run.
    moves: u64,
    /// `None` after the first run.
    graph: Option<CapturedGraph>,
}

struct CapturedGraph {
    graph: CudaGraph,
    caches: Vec<KvLayout>,
}

/// How a step runs. Ranks agree on the smallest number.
#[derive(Clone, Copy)]
enum GraphAction {
    Eager,
    Capture,
    Replay,
}

/// The action that all ranks take, where this one could take `action`.
fn agree(ranks: &dyn HostCollective, action: GraphAction) -> GraphAction {
    match ranks.all_reduce_min(action as u32) {
        0 => GraphAction::Eager,
        1 => GraphAction::Capture,
        _ => GraphAction::Replay,
    }
}

/// Whether the condition holds on all ranks.
fn on_all(ranks: &dyn HostCollective, holds: bool) -> bool {
    ranks.all_reduce_min(u32::from(holds)) == 1
}

// SAFETY: a graph belongs to no thread of the host; it must not be used by two at once, and the operators of a rank are
// called by one at a time.
unsafe impl Send for CapturedGraph {}

impl CudaGraphs {
    pub fn new(context: &Arc<Context>) -> Self {
        let (known, read) = (RefCell::default(), RefCell::default());
        Self { context: context.clone(), known, read, is_disabled: Cell::default(), invalidated: Cell::default() }
    }

    /// Runs `launches`, which returns whether it succeeded, or replays a graph of it.
    ///
    /// # Errors
    /// If the driver does not launch a graph or end a capture; if this rank alone failed to capture.
    ///
    /// # Panics
    /// As the operators that `launches` starts, for the step.
    pub fn run(&self, step: &CudaStep, ranks: &dyn HostCollective, launches: &mut dyn FnMut() -> bool) -> Result<()> {
        let Some(key) = step.key().filter(|_| !self.is_disabled.get()) else {
            launches();
            return Ok(());
        };
        let known = self.take(key);
        let action = match &known {
            None => GraphAction::Eager,
            Some(GraphEntry { graph: None, .. }) => GraphAction::Capture,
            Some(GraphEntry { graph: Some(_), .. }) => GraphAction::Replay,
        };
        let (action, known) = (agree(ranks, action), known.and_then(|entry| entry.graph));
        let graph = match (action, known) {
            (GraphAction::Replay, Some(graph)) => {
                graph.caches.iter().for_each(|cache| step.plan.check(cache, step.rows));
                Some(graph)
            }
            (GraphAction::Capture | GraphAction::Replay, outdated) => {
                self.drop_when_idle(outdated);
                match self.capture(ranks, launches)? {
                    Some(graph) => Some(graph),
                    None => {
                        launches();
                        return Ok(());
                    }
                }
            }
            (GraphAction::Eager, outdated) => {
                self.drop_when_idle(outdated);
                launches();
                None
            }
        };
        let launched = graph.as_ref().map_or(Ok(()), |graph| graph.graph.launch());
        self.keep(GraphEntry { key, moves: self.context.moves(), graph });
        launched.w()
    }

    /// Notes that the step under capture, if there is one, reads a cache.
    pub fn reads(&self, cache: KvLayout) {
        if let Some(caches) = &mut *self.read.borrow_mut()
            && !caches.contains(&cache)
        {
            caches.push(cache);
        }
    }

    /// Drops all graphs, because the memory at their addresses is about to change.
    pub fn clear(&self) {
        self.drop_when_idle(self.known.take().into_iter().filter_map(|entry| entry.graph));
    }

    /// Takes the entry of a shape, if it is known and no memory has moved since.
    fn take(&self, key: GraphKey) -> Option<GraphEntry> {
        let mut known = self.known.borrow_mut();
        let moves = self.context.moves();
        self.drop_when_idle(known.extract_if(.., |entry| entry.moves != moves).filter_map(|entry| entry.graph));
        let index = known.iter().position(|entry| entry.key == key)?;
        Some(known.remove(index))
    }

    fn keep(&self, entry: GraphEntry) {
        let mut known = self.known.borrow_mut();
        if known.len() == MAX_SHAPES {
            self.drop_when_idle(known.remove(0).graph);
        }
        known.push(entry);
    }

    /// Drops graphs after the device has finished its work, which may include them.
    fn drop_when_idle(&self, graphs: impl IntoIterator<Item = CapturedGraph>) {
        let graphs: Vec<CapturedGraph> = graphs.into_iter().collect();
        if !graphs.is_empty()
            && let Err(error) = self.context.stream.synchronize()
        {
            tracing::debug!("the device has failed: {error}");
        }
    }

    /// Captures what `launches` starts, without running it. `None` if not all ranks have captured it: the driver of one
    /// cannot, or the capture of a rank alone was invalidated.
    ///
    /// # Errors
    /// If the stream is still capturing, or the other ranks have captured and this one has not.
    fn capture(&self, ranks: &dyn HostCollective, launches: &mut dyn FnMut() -> bool) -> Result<Option<CapturedGraph>> {
        let stream = &self.context.stream;
        let moves = self.context.moves();
        let guards = (CapturingThread::begin(), self.context.copies.operators_lock().lock());
        // Other threads may allocate memory meanwhile, and copy through streams of their own.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let begun = stream.begin_capture(mode);
        // Agreed on before anything is captured: collectives are captured on all ranks or on none.
        let all_capture = on_all(ranks, begun.is_ok());
        if let Err(error) = begun {
            return Ok(self.disable(Some(error.to_string())));
        }
        self.read.replace(Some(Vec::new()));
        let has_launched = all_capture && launches();
        let caches = self.read.take().unwrap_or_default();
        let is_invalidated = stream.capture_status() == Ok(CaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        // Also after a failed launch, because the stream captures until then.
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        drop(guards);
        if graph.is_err() && stream.capture_status().w()? != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            bail!("the driver does not end a capture");
        }
        if !all_capture {
            return Ok(self.disable(None));
        }
        if is_invalidated && ranks.world() == 1 && self.invalidated.get() < MAX_INVALIDATED {
            // By another thread, as libraries do that wait for the whole device. The step runs eagerly.
            tracing::debug!("a graph capture was invalidated");
            self.invalidated.update(|count| count + 1);
            return Ok(None);
        }
        if !has_launched && ranks.world() > 1 {
            bail!("a launch was not captured, and other ranks have captured the collectives behind it");
        }
        let graph = graph.map_err(|e| e.to_string()).and_then(|graph| {
            let graph = graph.filter(|_| has_launched).ok_or("a launch was not captured")?;
            if self.context.moves() != moves {
                return Err("memory has moved during the capture".into());
            }
            // Allocates the device's part of the graph, where a lack of memory can still be handled.
            graph.upload().map_err(|e| e.to_string()).map(|()| graph)
        });
        if !on_all(ranks, graph.is_ok()) {
            return Ok(self.disable(graph.err()));
        }
        self.invalidated.set(0);
        Ok(graph.ok().map(|graph| CapturedGraph { graph, caches }))
    }

    /// Captures no more graphs, on any rank; `why` if this one is the reason.
    fn disable(&self, why: Option<String>) -> Option<CapturedGraph> {
        match why {
            Some(why) => tracing::warn!("CUDA graphs are off from now on, because the driver cannot capture: {why}"),
            None => tracing::debug!("CUDA graphs are off: the driver of another rank cannot capture"),
        }
        self.is_disabled.set(true);
        self.clear();
        None
    }
}
