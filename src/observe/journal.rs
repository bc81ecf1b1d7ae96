//! The last pushes and the last errors, for those who look at the server.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::metrics::{Metrics, PushKind, Transport};
use super::timeline::{Phase, PushTrack, Span};
use crate::error::{Error, shown};

/// Pushes, and errors, that are kept: a screen full.
const MOST: usize = 64;
/// Longest message of an error that is kept, in bytes.
const MESSAGE_BYTES: usize = 300;
/// Longest id of a request or name of an adapter that is kept, in bytes.
const NAME_BYTES: usize = 80;

/// A push that has ended.
#[derive(Clone, Debug)]
pub struct PushNote {
    /// When it ended.
    pub at: SystemTime,
    /// The number that the engine gave it; 0 if it was refused before.
    pub number: u64,
    pub kind: PushKind,
    pub transport: Transport,
    /// Name of the adapter that became resident.
    pub adapter: Option<String>,
    pub bytes: u64,
    /// From its header to the end of its verification, or to its failure.
    pub staging: Duration,
    /// Time for which nothing stepped; `None` if it failed.
    pub pause: Option<Duration>,
    /// Version of the policy after it; `None` if it failed.
    pub weight_version: Option<u64>,
    pub digest: [u8; 16],
    /// Kind and message of the error that ended it.
    pub error: Option<(&'static str, String)>,
}

/// An error that a caller was given.
#[derive(Clone, Debug)]
pub struct ErrorNote {
    pub at: SystemTime,
    pub kind: &'static str,
    /// The message, shortened and made safe to show.
    pub message: String,
    /// Id of the request, if it is one.
    pub request_id: Option<String>,
}

#[derive(Debug)]
struct Notes {
    pushes: VecDeque<PushNote>,
    errors: VecDeque<ErrorNote>,
    track: PushTrack,
}

/// Notes of what has ended. Clones share them. Only threads of the server write, and each holds the lock for the time
/// of one note.
#[derive(Clone)]
pub struct Journal {
    metrics: Arc<Metrics>,
    notes: Arc<Mutex<Notes>>,
}

impl Journal {
    pub(super) fn new(metrics: Arc<Metrics>, track: PushTrack) -> Self {
        let notes = Notes { pushes: VecDeque::new(), errors: VecDeque::new(), track };
        Self { metrics, notes: Arc::new(Mutex::new(notes)) }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Notes) -> T) -> T {
        work(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The last pushes, the newest first.
    pub fn pushes(&self) -> Vec<PushNote> {
        self.with(|notes| notes.pushes.iter().rev().cloned().collect())
    }

    /// The last errors, the newest first.
    pub fn errors(&self) -> Vec<ErrorNote> {
        self.with(|notes| notes.errors.iter().rev().cloned().collect())
    }

    /// Notes an error that a caller is given.
    pub fn error(&self, error: &Error, request_id: Option<&str>) {
        let note = ErrorNote {
            at: SystemTime::now(),
            kind: error.kind(),
            message: shown(&error.to_string(), MESSAGE_BYTES),
            request_id: request_id.map(|id| shown(id, NAME_BYTES)),
        };
        self.with(|notes| keep(&mut notes.errors, note));
    }

    /// Begins to follow a push whose header has come. Unless it says otherwise, it ends when the guard is dropped,
    /// because its sender is gone.
    pub fn push(&self, kind: PushKind, transport: Transport, adapter: Option<&str>) -> PushGuard {
        self.metrics.pushes_open.raise();
        let note = PushNote {
            at: SystemTime::now(),
            number: 0,
            kind,
            transport,
            adapter: adapter.map(|name| shown(name, NAME_BYTES)),
            bytes: 0,
            staging: Duration::ZERO,
            pause: None,
            weight_version: None,
            digest: [0; 16],
            error: None,
        };
        PushGuard { journal: self.clone(), started: Instant::now(), span: None, note: Some(note) }
    }
}

fn keep<T>(notes: &mut VecDeque<T>, note: T) {
    if notes.len() == MOST {
        notes.pop_front();
    }
    notes.push_back(note);
}

/// Follows one push: its spans in the timeline, its numbers, and its note at the end.
pub struct PushGuard {
    journal: Journal,
    started: Instant,
    span: Option<Span>,
    /// `None` once it has been written.
    note: Option<PushNote>,
}

impl PushGuard {
    /// The engine has opened the push under this number, and its bytes are awaited.
    pub fn receives(&mut self, number: u64) {
        self.change(|note| note.number = number);
        self.next_span(Some(Phase::PushReceive));
    }

    /// All bytes are here.
    pub fn verifies(&mut self) {
        self.next_span(Some(Phase::PushVerify));
    }

    /// The push is verified, and goes to the engine.
    pub fn commits(&mut self, bytes: u64, digest: [u8; 16]) {
        let staging = self.started.elapsed();
        self.change(|note| (note.bytes, note.digest, note.staging) = (bytes, digest, staging));
        self.next_span(Some(Phase::PushCommit));
    }

    /// The push was applied.
    pub fn applied(mut self, weight_version: u64, pause: Duration) {
        self.change(|note| (note.weight_version, note.pause) = (Some(weight_version), Some(pause)));
        self.end();
    }

    /// The push was refused or ended with an error.
    pub fn failed(mut self, error: &Error) {
        self.fail(error);
    }

    fn fail(&mut self, error: &Error) {
        let staging = self.started.elapsed();
        self.change(|note| {
            note.error = Some((error.kind(), shown(&error.to_string(), MESSAGE_BYTES)));
            note.staging = if note.staging.is_zero() { staging } else { note.staging };
        });
        self.end();
    }

    fn change(&mut self, change: impl FnOnce(&mut PushNote)) {
        if let Some(note) = &mut self.note {
            change(note);
        }
    }

    /// Ends the span of the push and begins the next one, if there is one.
    fn next_span(&mut self, next: Option<Phase>) {
        let Some(note) = &self.note else { return };
        let (bytes, version, number) = (note.bytes, note.weight_version.unwrap_or(0), note.number);
        let ended = self.span.take();
        self.span = self.journal.with(|notes| {
            ended.into_iter().for_each(|span| notes.track.end(span, bytes, version));
            next.map(|phase| notes.track.begin(phase, number))
        });
    }

    fn end(&mut self) {
        self.next_span(None);
        let Some(mut note) = self.note.take() else { return };
        let metrics = &self.journal.metrics;
        metrics.pushes_open.lower();
        match note.pause {
            Some(pause) => metrics.push_applied(note.kind, note.transport, note.bytes, note.staging, pause),
            None => metrics.push_failed(note.kind, note.transport),
        }
        note.at = SystemTime::now();
        self.journal.with(|notes| keep(&mut notes.pushes, note));
    }
}

impl Drop for PushGuard {
    fn drop(&mut self) {
        if self.note.is_some() {
            self.fail(&Error::Aborted("the sender is gone, or its deadline has passed".into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::{Observer, TrackName};

    #[test]
    fn a_push_leaves_its_spans_its_numbers_and_a_note() {
        let (observer, _recorder) = Observer::new();
        let journal = &observer.journal;
        let mut push = journal.push(PushKind::Lora, Transport::SharedMemory, None);
        assert_eq!(observer.metrics.pushes_open.get(), 1);
        push.receives(7);
        push.verifies();
        push.commits(1000, [3; 16]);
        push.applied(5, Duration::from_millis(2));
        let mut push = journal.push(PushKind::Adapter, Transport::Inline, Some("math\n"));
        push.receives(8);
        push.failed(&Error::DataLoss("x".repeat(1000)));
        drop(journal.push(PushKind::Full, Transport::Directory, None));
        assert_eq!(observer.metrics.pushes_open.get(), 0);

        let spans: Vec<_> = observer.timeline.window(0, 100).spans.into_iter().collect();
        let pushes: Vec<_> =
            spans.iter().filter(|(track, _)| *track == TrackName::Push).map(|(_, span)| span).collect();
        let phases: Vec<_> = pushes.iter().map(|span| (span.phase, span.push)).collect();
        let expected = [Phase::PushReceive, Phase::PushVerify, Phase::PushCommit].map(|phase| (phase, 7));
        assert_eq!(phases[..3], expected);
        assert_eq!(phases[3..], [(Phase::PushReceive, 8)]);
        assert!(pushes.windows(2).all(|pair| pair[0].end.is_some_and(|end| end <= pair[1].start)), "{pushes:?}");
        assert_eq!((pushes[2].bytes, pushes[2].weight_version), (1000, 5));

        let [refused, failed, applied] = &journal.pushes()[..] else { panic!("three notes") };
        assert_eq!((applied.number, applied.weight_version, applied.digest), (7, Some(5), [3; 16]));
        assert_eq!(applied.pause, Some(Duration::from_millis(2)));
        assert_eq!(failed.adapter.as_deref(), Some("math\\n"));
        let (kind, message) = failed.error.as_ref().expect("an error");
        assert!(*kind == "data_loss" && message.len() < MESSAGE_BYTES + 40, "{message}");
        assert_eq!(refused.error.as_ref().map(|error| error.0), Some("aborted"));
    }

    #[test]
    fn the_journal_is_bounded_and_gives_the_newest_first() {
        let (observer, _recorder) = Observer::new();
        for i in 0..MOST + 10 {
            observer.journal.error(&Error::NotFound(format!("{i}\u{1b}")), Some(&"r".repeat(1000)));
        }
        let errors = observer.journal.errors();
        assert_eq!((errors.len(), errors[0].kind), (MOST, "not_found"));
        assert_eq!(errors[0].message, format!("{}\\u{{1b}}", MOST + 9));
        assert!(errors[0].request_id.as_ref().is_some_and(|id| id.len() < NAME_BYTES + 40));
    }
}
