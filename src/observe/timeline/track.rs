//! One track: a ring of spans with one writer and any number of readers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cell::Cell;
use super::span::{SPAN_WORDS, Span};

/// The ring of a track's last spans.
#[derive(Debug)]
pub(super) struct Ring {
    slots: Box<[Cell<SPAN_WORDS>]>,
    /// Number of spans so far, including those that may still change.
    written: AtomicU64,
    /// Number of spans that never change again.
    settled: AtomicU64,
}

/// Size in bytes of a ring of `spans` spans.
pub(super) const fn ring_bytes(spans: usize) -> usize {
    spans * size_of::<Cell<SPAN_WORDS>>()
}

impl Ring {
    /// A ring of empty slots. Empty slots are not zeros, so that the ring holds all its memory from the start: the
    /// system would give pages of zeros memory only when they are written, and the process would seem to leak until the
    /// ring is full.
    pub fn new(spans: usize) -> Arc<Self> {
        let slots = (0..spans).map(|_| Cell::new([u64::MAX; SPAN_WORDS])).collect();
        Arc::new(Self { slots, written: AtomicU64::new(0), settled: AtomicU64::new(0) })
    }

    fn slot(&self, id: u64) -> &Cell<SPAN_WORDS> {
        &self.slots[(id % self.slots.len() as u64) as usize]
    }

    /// Writes a new span, or one that may still change. Only the track's writer calls this.
    pub fn write(&self, span: &Span) {
        self.slot(span.id).write(&span.to_words());
        if span.id >= self.written.load(Ordering::Relaxed) {
            self.written.store(span.id + 1, Ordering::Release);
        }
    }

    /// Declares that spans below `id` never change again.
    pub fn settle(&self, id: u64) {
        self.settled.fetch_max(id, Ordering::Release);
    }

    /// Number of spans that never change again.
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::Acquire)
    }

    /// The span `id`, if the ring still has it.
    pub fn read(&self, id: u64) -> Option<Span> {
        Span::from_words(&self.slot(id).read()?).filter(|span| span.id == id)
    }

    /// Ids of the spans that the ring has, ascending.
    pub fn ids(&self) -> std::ops::Range<u64> {
        let written = self.written.load(Ordering::Acquire);
        written.saturating_sub(self.slots.len() as u64)..written
    }
}
