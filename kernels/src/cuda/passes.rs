//! Passes over a step that are recorded as CUDA graphs and launched again for steps that look alike to the host.
//!
//! The first pass of a kind is started plainly, so that what it keeps has its memory and its kernels are loaded; the
//! second is recorded; the next ones launch the recording, which reads the new step from where the old one was. Where
//! the driver records nothing all go plainly.
//!
//! What ranks exchange is recorded too, of which NCCL wants that all ranks record it or none, and that all launch what
//! they have recorded together. So they agree on each pass, on the host: all do the least of what each can. A rank
//! whose memory has moved keeps the others from launching their recordings; one that cannot record keeps all from it,
//! for ever. A pass is known by what is the same on all ranks, and recorded by all at once, so that recordings that all
//! have of it were made together.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus as CaptureStatus;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, sys};
use candle_core::{Result, bail};

use super::context::Context;
use super::recording::RecordingThread;
use super::step::{CudaStep, Key};
use crate::kv_layout::KvLayout;
use crate::step::Least;

/// Most recordings in a row that may be broken off from outside before no more are made.
const MOST_BROKEN_OFF: u32 = 3;
/// Most kinds of passes that are kept: numbers of rows times lengths of the longest sequence.
const MOST_PASSES: usize = 64;

/// The passes that are known.
pub(super) struct Passes {
    context: Arc<Context>,
    /// The one that was used last at the end.
    known: RefCell<Vec<Pass>>,
    /// Caches that the pass that is being recorded reads.
    read: RefCell<Option<Vec<KvLayout>>>,
    is_refused: Cell<bool>,
    /// Recordings in a row that were broken off.
    broken_off: Cell<u32>,
}

struct Pass {
    key: Key,
    /// [`Context::moves`] at its end.
    moves: u64,
    /// `None` after the first.
    recording: Option<Recording>,
}

struct Recording {
    graph: CudaGraph,
    caches: Vec<KvLayout>,
}

/// What a rank can do about a pass, as ranks tell one another.
#[derive(Clone, Copy)]
enum Way {
    Plain,
    Record,
    Repeat,
}

/// What all ranks do, if this one can go so far.
fn agree(ranks: Option<Least<'_>>, way: Way) -> Way {
    match ranks.map_or(way as u32, |least| least(way as u32)) {
        0 => Way::Plain,
        1 => Way::Record,
        _ => Way::Repeat,
    }
}

/// Whether all ranks say so.
fn all(ranks: Option<Least<'_>>, says_so: bool) -> bool {
    ranks.map_or(says_so, |least| least(u32::from(says_so)) == 1)
}

// SAFETY: a graph belongs to no thread of the host; it must not be used by two at once, and the operators of a rank are
// called by one at a time.
unsafe impl Send for Recording {}

impl Passes {
    pub fn new(context: &Arc<Context>) -> Self {
        let (known, read) = (RefCell::default(), RefCell::default());
        Self { context: context.clone(), known, read, is_refused: Cell::default(), broken_off: Cell::default() }
    }

    /// Starts what `launches` starts, which says whether that went well, or does so by a recording.
    ///
    /// # Errors
    /// If the driver does not launch a recording, or does not end it; if this rank alone has not recorded what others
    /// have.
    ///
    /// # Panics
    /// As the operators of the pass, for the step.
    pub fn run(&self, step: &CudaStep, ranks: Option<Least<'_>>, launches: &mut dyn FnMut() -> bool) -> Result<()> {
        let Some(key) = step.key().filter(|_| !self.is_refused.get()) else {
            launches();
            return Ok(());
        };
        let known = self.take(key);
        let way = match &known {
            None => Way::Plain,
            Some(Pass { recording: None, .. }) => Way::Record,
            Some(Pass { recording: Some(_), .. }) => Way::Repeat,
        };
        let (way, known) = (agree(ranks, way), known.and_then(|pass| pass.recording));
        let recording = match (way, known) {
            (Way::Repeat, Some(recording)) => {
                recording.caches.iter().for_each(|cache| step.plan.check(cache, step.rows));
                Some(recording)
            }
            (Way::Record | Way::Repeat, outdated) => {
                self.drop_all(outdated);
                match self.record(ranks, launches)? {
                    Some(recording) => Some(recording),
                    None => {
                        launches();
                        return Ok(());
                    }
                }
            }
            (Way::Plain, outdated) => {
                self.drop_all(outdated);
                launches();
                None
            }
        };
        let launched = recording.as_ref().map_or(Ok(()), |recording| recording.graph.launch());
        self.keep(Pass { key, moves: self.context.moves(), recording });
        launched.w()
    }

    /// Notes that the pass that is being recorded, if there is one, reads a cache.
    pub fn reads(&self, cache: KvLayout) {
        if let Some(caches) = &mut *self.read.borrow_mut()
            && !caches.contains(&cache)
        {
            caches.push(cache);
        }
    }

    /// Drops all recordings: addresses that they have are going to be others'.
    pub fn forget(&self) {
        self.drop_all(self.known.take().into_iter().filter_map(|pass| pass.recording));
    }

    /// Takes the pass of this kind, if it is known and all memory is where it was.
    fn take(&self, key: Key) -> Option<Pass> {
        let mut known = self.known.borrow_mut();
        let moves = self.context.moves();
        self.drop_all(known.extract_if(.., |pass| pass.moves != moves).filter_map(|pass| pass.recording));
        let index = known.iter().position(|pass| pass.key == key)?;
        Some(known.remove(index))
    }

    fn keep(&self, pass: Pass) {
        let mut known = self.known.borrow_mut();
        if known.len() == MOST_PASSES {
            self.drop_all(known.remove(0).recording);
        }
        known.push(pass);
    }

    /// Drops recordings when the device has done what it was given.
    fn drop_all(&self, recordings: impl IntoIterator<Item = Recording>) {
        let recordings: Vec<Recording> = recordings.into_iter().collect();
        if !recordings.is_empty()
            && let Err(error) = self.context.stream.synchronize()
        {
            tracing::debug!("the device has failed: {error}");
        }
    }

    /// Records what `launches` starts; nothing of it has run then. `None` if it is not recorded on all ranks: they have
    /// all refused, or the recording of a rank alone was broken off.
    ///
    /// # Errors
    /// If the stream records on, or others have recorded what this rank has not.
    fn record(&self, ranks: Option<Least<'_>>, launches: &mut dyn FnMut() -> bool) -> Result<Option<Recording>> {
        let stream = &self.context.stream;
        let moves = self.context.moves();
        let turns = (RecordingThread::begin(), self.context.copies.turn().take());
        // Other threads may take memory meanwhile, and copy through streams of their own.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let begun = stream.begin_capture(mode);
        // Before anything is recorded: what ranks exchange is recorded on all of them or on none.
        let all_record = all(ranks, begun.is_ok());
        if let Err(error) = begun {
            return Ok(self.refuse(Some(error.to_string())));
        }
        self.read.replace(Some(Vec::new()));
        let went_well = all_record && launches();
        let caches = self.read.take().unwrap_or_default();
        let is_broken_off = stream.capture_status() == Ok(CaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        // Also where a launch has failed: the stream records until then.
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        drop(turns);
        if graph.is_err() && stream.capture_status().w()? != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            bail!("the driver does not end a recording");
        }
        if !all_record {
            return Ok(self.refuse(None));
        }
        if is_broken_off && ranks.is_none() && self.broken_off.get() < MOST_BROKEN_OFF {
            // By another thread, as libraries do that wait for the whole device. The pass is begun anew.
            tracing::debug!("a recording was broken off");
            self.broken_off.update(|count| count + 1);
            return Ok(None);
        }
        if !went_well && ranks.is_some() {
            bail!("a launch was not recorded, and other ranks have recorded what they exchange behind it");
        }
        let graph = graph.map_err(|e| e.to_string()).and_then(|graph| {
            let graph = graph.filter(|_| went_well).ok_or("a launch was not recorded")?;
            if self.context.moves() != moves {
                return Err("memory has moved while launches were recorded".into());
            }
            // What the device keeps of it: here a lack of memory can be answered.
            graph.upload().map_err(|e| e.to_string()).map(|()| graph)
        });
        if !all(ranks, graph.is_ok()) {
            return Ok(self.refuse(graph.err()));
        }
        self.broken_off.set(0);
        Ok(graph.ok().map(|graph| Recording { graph, caches }))
    }

    /// Records nothing from now on, as no rank does; `why` if it is for this one.
    fn refuse(&self, why: Option<String>) -> Option<Recording> {
        match why {
            Some(why) => {
                tracing::warn!("steps are launched kernel by kernel from now on, as the driver records none: {why}");
            }
            None => tracing::debug!("another rank's driver records nothing"),
        }
        self.is_refused.set(true);
        self.forget();
        None
    }
}
