//! The last pushes and the last errors, for operators who inspect the server.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::metrics::{Metrics, PushKind, Transport};
use super::stall::{Stall, Work};
use super::timeline::{Phase, PushTrack, Span};
use crate::error::{Error, shown};

/// Number of pushes, and of errors, that the journal keeps: a screenful.
const MOST: usize = 64;
/// Longest error message that the journal keeps, in bytes.
const MESSAGE_BYTES: usize = 300;
/// Longest request id or adapter name that the journal keeps, in bytes.
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

/// An error that the server returned to a caller.
#[derive(Clone, Debug)]
pub struct ErrorNote {
    pub at: SystemTime,
    pub kind: &'static str,
    /// The message, shortened and made safe to show.
    pub message: String,
    /// Id of the request, if the call was one.
    pub request_id: Option<String>,
}

#[derive(Debug)]
struct Notes {
    pushes: VecDeque<PushNote>,
    errors: VecDeque<ErrorNote>,
    track: PushTrack,
    /// The server's work for pushes, by the numbers of their [`PushWork`].
    works: Vec<(u64, Work)>,
    next_work: u64,
    stall: Option<Stall>,
}

/// Notes of pushes that have ended and of errors. Clones share them. Only threads of the server write, and each holds
/// the lock just long enough to write one note.
#[derive(Clone)]
pub struct Journal {
    metrics: Arc<Metrics>,
    notes: Arc<Mutex<Notes>>,
}

impl Journal {
    pub(super) fn new(metrics: Arc<Metrics>, track: PushTrack) -> Self {
        let (pushes, errors) = (VecDeque::new(), VecDeque::new());
        let notes = Notes { pushes, errors, track, works: Vec::new(), next_work: 0, stall: None };
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

    /// Notes an error that a caller receives.
    pub fn error(&self, error: &Error, request_id: Option<&str>) {
        self.refusal(error.kind(), &error.to_string(), request_id);
    }

    /// Notes an error in the words of HTTP or gRPC. An error with the message of the last note is not noted again: it
    /// is the same error on its way out, or a client that repeats the same call.
    pub fn refusal(&self, kind: &'static str, message: &str, request_id: Option<&str>) {
        let message = shown(message, MESSAGE_BYTES);
        let request_id = request_id.map(|id| shown(id, NAME_BYTES));
        self.with(|notes| {
            if notes.errors.back().is_none_or(|last| last.message != message) {
                keep(&mut notes.errors, ErrorNote { at: SystemTime::now(), kind, message, request_id });
            }
        });
    }

    /// The server's work for pushes, and when it last made progress.
    pub(super) fn works(&self) -> Vec<Work> {
        self.with(|notes| notes.works.iter().map(|(_, work)| *work).collect())
    }

    /// Notes work that makes no progress.
    pub(super) fn stall(&self, stall: Stall) {
        self.with(|notes| notes.stall = Some(stall));
    }

    /// Notes that the work of the last note has gone on, and how long it had made no progress.
    pub(super) fn stall_over(&self, lasted: Duration) {
        self.with(|notes| {
            notes.stall.iter_mut().for_each(|stall| (stall.is_over, stall.lasted) = (true, lasted));
        });
    }

    /// The work that made no progress last.
    pub fn last_stall(&self) -> Option<Stall> {
        self.with(|notes| notes.stall.clone())
    }

    /// Begins to follow a push. A push that was neither applied nor failed ends when the last clone of its guard is
    /// dropped, because its sender is gone.
    pub fn push(&self) -> PushGuard {
        let state = PushState { span: None, note: None };
        PushGuard(Arc::new(Followed { journal: self.clone(), started: Instant::now(), state: Mutex::new(state) }))
    }
}

fn keep<T>(notes: &mut VecDeque<T>, note: T) {
    if notes.len() == MOST {
        notes.pop_front();
    }
    notes.push_back(note);
}

/// Says that the server works for a push, until it is dropped.
pub struct PushWork {
    journal: Journal,
    id: u64,
}

impl PushWork {
    /// Notes that the work makes progress.
    pub fn progress(&self) {
        let now = Instant::now();
        self.journal.with(|notes| {
            notes.works.iter_mut().filter(|(id, _)| *id == self.id).for_each(|(_, work)| work.since = now);
        });
    }
}

impl Drop for PushWork {
    fn drop(&mut self) {
        self.journal.with(|notes| notes.works.retain(|(id, _)| *id != self.id));
    }
}

/// Follows one push: its spans in the timeline, its numbers, and its note at the end. Clones follow the same push.
#[derive(Clone)]
pub struct PushGuard(Arc<Followed>);

struct Followed {
    journal: Journal,
    started: Instant,
    state: Mutex<PushState>,
}

struct PushState {
    span: Option<Span>,
    /// `None` until the header arrives, and after the note is written.
    note: Option<PushNote>,
}

impl PushGuard {
    /// The header has arrived and describes the push.
    pub fn is(&self, kind: PushKind, transport: Transport, adapter: Option<&str>) {
        self.0.journal.metrics.pushes_open.raise();
        self.0.with(|state| {
            state.note = Some(PushNote {
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
            });
        });
    }

    /// The engine has opened the push under this number, and the server waits for its bytes.
    pub fn receives(&self, number: u64) {
        self.0.change(|note| note.number = number);
        self.0.next_span(Some(Phase::PushReceive));
    }

    /// All bytes have arrived.
    pub fn verifies(&self) {
        self.0.next_span(Some(Phase::PushVerify));
    }

    /// The push is verified, and goes to the engine.
    pub fn commits(&self, bytes: u64, digest: [u8; 16]) {
        let staging = self.0.started.elapsed();
        self.0.change(|note| (note.bytes, note.digest, note.staging) = (bytes, digest, staging));
        self.0.next_span(Some(Phase::PushCommit));
    }

    /// The server begins to work for the push `number`.
    pub fn works(&self, phase: Phase, number: u64) -> PushWork {
        let work = Work { phase, push: Some(number), since: Instant::now() };
        let id = self.0.journal.with(|notes| {
            notes.next_work += 1;
            notes.works.push((notes.next_work, work));
            notes.next_work
        });
        PushWork { journal: self.0.journal.clone(), id }
    }

    /// The push was applied.
    pub fn applied(&self, weight_version: u64, pause: Duration) {
        self.0.change(|note| (note.weight_version, note.pause) = (Some(weight_version), Some(pause)));
        self.0.end();
    }

    /// The push was refused or ended with an error.
    pub fn failed(&self, error: &Error) {
        self.0.fail(error);
    }
}

impl Followed {
    fn with<T>(&self, work: impl FnOnce(&mut PushState) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn change(&self, change: impl FnOnce(&mut PushNote)) {
        self.with(|state| state.note.as_mut().map(change));
    }

    fn fail(&self, error: &Error) {
        let staging = self.started.elapsed();
        self.change(|note| {
            note.error = Some((error.kind(), shown(&error.to_string(), MESSAGE_BYTES)));
            note.staging = if note.staging.is_zero() { staging } else { note.staging };
        });
        self.end();
    }

    /// Ends the open span of the push and begins the span of `next`, if given.
    fn next_span(&self, next: Option<Phase>) {
        self.with(|state| {
            let Some(note) = &state.note else { return };
            let ended = state.span.take();
            state.span = self.journal.with(|notes| {
                let version = note.weight_version.unwrap_or(0);
                ended.into_iter().for_each(|span| notes.track.end(span, note.bytes, version));
                next.map(|phase| notes.track.begin(phase, note.number))
            });
        });
    }

    fn end(&self) {
        self.next_span(None);
        let Some(mut note) = self.with(|state| state.note.take()) else { return };
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

impl Drop for Followed {
    fn drop(&mut self) {
        self.fail(&Error::Aborted("the sender is gone, or its deadline has passed".into()));
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
        let push = journal.push();
        push.is(PushKind::Lora, Transport::SharedMemory, None);
        assert_eq!(observer.metrics.pushes_open.get(), 1);
        push.receives(7);
        push.verifies();
        push.commits(1000, [3; 16]);
        push.applied(5, Duration::from_millis(2));
        let push = journal.push();
        push.is(PushKind::Adapter, Transport::Inline, Some("math\n"));
        push.receives(8);
        push.failed(&Error::DataLoss("x".repeat(1000)));
        drop(journal.push());
        let push = journal.push();
        push.is(PushKind::Full, Transport::Directory, None);
        drop(push);
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
        observer.journal.error(&Error::NotFound("again".into()), Some("a"));
        observer.journal.refusal("NotFoundError", "again", None);
        let again = observer.journal.errors();
        assert_eq!((again[0].kind, &again[1].message), ("not_found", &errors[0].message));
        assert!(errors[0].request_id.as_ref().is_some_and(|id| id.len() < NAME_BYTES + 40));
    }
}
