//! Writes log lines to standard error from a thread of its own, so that no other thread waits for the reader.
//!
//! A process that starts the server with a pipe for its standard error and never reads it would otherwise stop every
//! thread that logs, once the pipe's 64 KiB are full. Here lines are queued; when the queue is full, lines are dropped
//! and counted. (`tracing-appender` limits the queue in lines instead of bytes, does not log how many lines are
//! missing, and cannot wait for the queue when a panic of a rank ends the process.)

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

use crate::error::{Error, Result};

/// Most bytes of queued lines: about 40,000 lines, which a busy server logs at level debug within a few seconds.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// How long the end of the process waits for queued lines to be written.
const FLUSH: Duration = Duration::from_secs(1);
/// How long a panicking thread waits for queued lines to be written.
const PANIC_FLUSH: Duration = Duration::from_millis(200);
/// Pause between two checks whether all queued lines have been written.
const FLUSH_POLL: Duration = Duration::from_millis(1);

/// Queues log lines for the writing thread, without ever waiting for it. Cheap to clone.
#[derive(Clone)]
pub struct LogWriter {
    lines: Sender<Vec<u8>>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    /// Bytes of the queued lines that are not written yet.
    queued_bytes: AtomicUsize,
    /// Number of lines dropped because the queue was full.
    dropped: AtomicU64,
}

impl LogWriter {
    /// Starts the thread that writes the lines to `out`. It ends with the process, or when the last clone of the writer
    /// is dropped.
    ///
    /// # Errors
    /// `Internal` if the thread cannot be started.
    pub fn new(out: impl Write + Send + 'static) -> Result<Self> {
        let (lines, queue) = channel();
        let counts = Arc::new(Counts::default());
        let shared = counts.clone();
        let thread = std::thread::Builder::new().name("logs".into()).spawn(move || write_lines(out, &queue, &shared));
        thread.map_err(|e| Error::Internal(format!("cannot start the log thread: {e}")))?;
        Ok(Self { lines, counts })
    }

    /// Queues `line` (one line, or several at once). If the queue is full, the line is dropped and counted.
    pub fn write(&self, line: &[u8]) {
        let queued = self.counts.queued_bytes.fetch_add(line.len(), Ordering::AcqRel);
        // Sending fails only if the output panicked: the thread lives as long as there is a writer.
        if queued + line.len() > MAX_QUEUED_BYTES || self.lines.send(line.to_vec()).is_err() {
            self.counts.queued_bytes.fetch_sub(line.len(), Ordering::AcqRel);
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Number of lines dropped since the start.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all queued lines are written, or until `longest` has passed.
    fn flush(&self, longest: Duration) {
        let start = Instant::now();
        while self.counts.queued_bytes.load(Ordering::Acquire) > 0 && start.elapsed() < longest {
            std::thread::sleep(FLUSH_POLL);
        }
    }
}

fn write_lines(mut out: impl Write, queue: &Receiver<Vec<u8>>, counts: &Counts) {
    let mut reported = 0;
    for line in queue {
        // If standard error has no reader any more, the error cannot be reported anywhere.
        let _ = out.write_all(&line).and_then(|()| out.flush());
        let queued = counts.queued_bytes.fetch_sub(line.len(), Ordering::AcqRel) - line.len();
        let dropped = counts.dropped.load(Ordering::Relaxed);
        // The report is a log line too, so it waits until the queue has room.
        if dropped > reported && queued < MAX_QUEUED_BYTES / 2 {
            tracing::warn!("{} log lines were dropped: standard error was not read in time", dropped - reported);
            reported = dropped;
        }
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

/// Writer for the line of one event, which `tracing_subscriber` passes in one call of `write`.
pub struct Line<'a>(&'a LogWriter);

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.write(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// On drop, waits at most a second until all queued lines are written, however the main thread ends.
pub struct FlushOnDrop(pub LogWriter);

impl Drop for FlushOnDrop {
    fn drop(&mut self) {
        self.0.flush(FLUSH);
    }
}

/// Installs a panic hook that logs panics. The default hook writes to standard error itself and would wait for its
/// reader. The panicking thread waits a moment until its line is written, because the panic may end the process.
pub fn log_panics(logs: LogWriter) {
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        let location = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("no text");
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            tracing::error!(thread = name, location, %backtrace, "panic: {text}");
        } else {
            tracing::error!(thread = name, location, "panic: {text}");
        }
        logs.flush(PANIC_FLUSH);
    }));
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{SyncSender, sync_channel};

    use super::*;

    /// A pipe whose reader takes one line at a time.
    struct Pipe(SyncSender<Vec<u8>>);

    impl Write for Pipe {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            self.0.send(line.to_vec()).map_err(std::io::Error::other)?;
            Ok(line.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn line(i: usize) -> Vec<u8> {
        format!("{i:01000}\n").into_bytes()
    }

    #[test]
    fn writers_never_wait_for_a_reader_and_dropped_lines_are_counted() {
        let (pipe, reader) = sync_channel(0);
        let logs = LogWriter::new(Pipe(pipe)).expect("a thread");
        let (mut lines, room) = (0, MAX_QUEUED_BYTES / line(0).len());
        while logs.dropped() < 10 {
            logs.write(&line(lines));
            lines += 1;
        }
        // The lines written are the first ones, and the thread holds no line beyond the queue.
        assert_eq!(lines, room + 10);
        let start = Instant::now();
        drop(FlushOnDrop(logs.clone()));
        assert!(start.elapsed() < 20 * FLUSH, "the end waited for a reader that never came");
        for i in 0..room {
            assert_eq!(reader.recv().expect("a line"), line(i));
        }
        logs.write(b"after\n");
        assert_eq!(reader.recv().expect("a line"), b"after\n");
        assert_eq!(logs.dropped(), 10);
    }

    #[test]
    fn with_a_reader_no_line_is_lost() {
        let (pipe, reader) = channel();
        struct Always(Sender<Vec<u8>>);
        impl Write for Always {
            fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
                self.0.send(line.to_vec()).map_err(std::io::Error::other)?;
                Ok(line.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let logs = LogWriter::new(Always(pipe)).expect("a thread");
        for i in 0..5_000 {
            logs.write(&line(i));
        }
        drop(FlushOnDrop(logs.clone()));
        assert_eq!(logs.dropped(), 0);
        assert_eq!(reader.try_iter().count(), 5_000);
    }
}
