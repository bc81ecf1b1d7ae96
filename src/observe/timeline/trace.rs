//! The timeline as a file in Chrome's trace format, which Perfetto and chrome://tracing open.
//!
//! A separate thread reads settled spans from the ring and writes them. The ring is the thread's buffer: if the disk
//! stalls for less than the ring's quarter of an hour, no span is lost, and no other thread waits for the disk. The
//! file is a JSON array with one event per line. While the server runs, and after it is killed, only the closing
//! bracket is missing, which the format allows.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Phase, Span, Timeline, TrackName};
use crate::error::{Error, Result};

/// Time between two writes.
const INTERVAL: Duration = Duration::from_millis(250);
/// Bytes per write. A write ends with a whole event, so that the file stays valid if the process is killed.
const PIECE_BYTES: usize = 32 << 10;
/// Longest time that the end of the process waits for a stalled disk.
const PATIENCE: Duration = Duration::from_secs(2);

/// Handle to the thread that writes `--trace-file`. The thread ends with the process at the latest.
pub struct TraceFile {
    stop: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl TraceFile {
    /// Creates or truncates the file, and starts the thread.
    ///
    /// # Errors
    /// `Config` if the file cannot be created.
    pub fn create(path: &Path, timeline: Timeline) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::Config(format!("--trace-file {}: {e}; name a file that can be written", path.display()))
        };
        let mut file = File::create(path).map_err(failed)?;
        file.write_all(header().as_bytes()).map_err(failed)?;
        let (stop, stopped) = sync_channel(1);
        let writer = Writer { path: path.into(), file, timeline, next: [0; 2] };
        let thread = std::thread::Builder::new().name("trace".into()).spawn(move || writer.run(&stopped));
        let thread = thread.map_err(|e| Error::Internal(format!("the thread of --trace-file did not start: {e}")))?;
        Ok(Self { stop, thread })
    }

    /// Writes the remaining spans, closes the file, and waits for that at most [`PATIENCE`].
    pub fn finish(self) {
        // Sending fails if the thread stopped after a failed write.
        let _ = self.stop.send(());
        let started = Instant::now();
        while !self.thread.is_finished() && started.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Writer {
    path: PathBuf,
    file: File,
    timeline: Timeline,
    /// Number of the next span of each track.
    next: [u64; 2],
}

impl Writer {
    fn run(mut self, stopped: &Receiver<()>) {
        loop {
            let ends = !matches!(stopped.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout));
            let written = self.write_settled().and_then(|()| if ends { self.write_end() } else { Ok(()) });
            if let Err(error) = written {
                let path = self.path.display();
                tracing::warn!(
                    "--trace-file {path}: {error}; the file ends here, and the server keeps running without it"
                );
                return;
            }
            if ends {
                return;
            }
        }
    }

    fn write_settled(&mut self) -> std::io::Result<()> {
        for (i, track) in TrackName::ALL.into_iter().enumerate() {
            let (spans, next) = self.timeline.settled(track, self.next[i]);
            let missing = next - self.next[i] - spans.len() as u64;
            self.next[i] = next;
            self.write(track, &spans)?;
            if missing > 0 {
                let path = self.path.display();
                tracing::warn!("--trace-file {path}: {missing} spans are missing: the disk was too slow for them");
            }
        }
        Ok(())
    }

    /// Writes the open spans as if they ended now, and closes the array.
    fn write_end(&mut self) -> std::io::Result<()> {
        for (i, track) in TrackName::ALL.into_iter().enumerate() {
            let spans = self.timeline.rest(track, self.next[i]);
            self.write(track, &spans)?;
        }
        self.file.write_all(b"\n]\n")
    }

    fn write(&mut self, track: TrackName, spans: &[Span]) -> std::io::Result<()> {
        let (now, mut piece) = (self.timeline.now(), String::new());
        for span in spans {
            event(&mut piece, track, span, now);
            if piece.len() >= PIECE_BYTES {
                self.file.write_all(piece.as_bytes())?;
                piece.clear();
            }
        }
        self.file.write_all(piece.as_bytes())
    }
}

/// Writes to an open file.
#[cfg(test)]
pub(super) fn run_on(file: File, timeline: Timeline, stopped: &Receiver<()>) {
    Writer { path: "a test's".into(), file, timeline, next: [0; 2] }.run(stopped);
}

/// The beginning of the array, with names for the process and its tracks.
fn header() -> String {
    let mut text = String::from("[\n");
    let name = |what: &str, tid: usize, name: &str| {
        format!(r#"{{"name":"{what}","ph":"M","pid":1,"tid":{tid},"args":{{"name":"{name}"}}}}"#)
    };
    text.push_str(&name("process_name", 0, "rollout-server"));
    for (tid, track) in TrackName::ALL.into_iter().enumerate() {
        let _ = write!(text, ",\n{}", name("thread_name", tid + 1, track.name()));
    }
    text
}

/// Appends a complete event. Times are microseconds.
fn event(text: &mut String, track: TrackName, span: &Span, now: u64) {
    let micros = |nanos: u64| nanos as f64 / 1e3;
    let tid = 1 + usize::from(track == TrackName::Push);
    let _ = write!(
        text,
        ",\n{{\"name\":\"{}\",\"ph\":\"X\",\"pid\":1,\"tid\":{tid},\"ts\":{:.3},\"dur\":{:.3},\"args\":{{",
        span.phase.name(),
        micros(span.start),
        micros(span.end_or(now) - span.start),
    );
    let mut separator = "";
    for (name, value) in facts(span) {
        let _ = write!(text, "{separator}\"{name}\":{value}");
        separator = ",";
    }
    text.push_str("}}");
}

/// The span's attributes by name, except those that are zero.
fn facts(span: &Span) -> impl Iterator<Item = (&'static str, u64)> {
    let micros = |part: usize| span.parts[part] / 1000;
    let facts = [
        ("steps", span.steps),
        ("computed_tokens", span.computed_tokens),
        ("sampled_tokens", span.sampled_tokens),
        ("weight_version", span.weight_version),
        ("bytes", span.bytes),
        ("push", span.push),
        ("level", span.level),
        ("prefill_us", micros(0)),
        ("decode_us", micros(1)),
        ("mixed_us", micros(2)),
        ("waiting_us", micros(3)),
    ];
    let is_brief = span.phase == Phase::Brief;
    facts.into_iter().filter(move |(name, value)| *value > 0 && (is_brief || !name.ends_with("_us")))
}
