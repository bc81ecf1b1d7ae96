//! Files of secrets: read with a limit, and read again when they have changed or SIGHUP asks for it. If a new file is
//! wrong, the error is logged and the old content stays in use.

use std::convert::Infallible;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::error::{Error, Result};

/// Largest file in bytes: the certificates of all public authorities take a quarter of it.
const MAX_BYTES: u64 = 1 << 20;
/// Time between two checks of the files. A change is read at the second check that finds it, so that files that are
/// replaced one after the other are read together.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// A file that a flag names.
#[derive(Clone, Debug)]
pub(super) struct Named {
    flag: &'static str,
    path: PathBuf,
}

/// Which file a path leads to, and when it was last changed. Links are followed, so that a link that is turned to
/// another file is a change.
type Stamp = Option<[i64; 7]>;

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.flag, self.path.display())
    }
}

impl Named {
    pub(super) fn new(flag: &'static str, path: &Path) -> Self {
        Self { flag, path: path.to_owned() }
    }

    /// An error about this file.
    pub(super) fn wrong(&self, why: impl fmt::Display) -> Error {
        Error::Config(format!("{self}: {why}"))
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// `Config` if it is not a file, cannot be read, or is too large.
    pub(super) fn read(&self) -> Result<Vec<u8>> {
        let failed = |e: std::io::Error| self.wrong(format_args!("cannot be read: {e}"));
        // Checked first: opening a pipe would wait for its writer.
        if !self.path.metadata().map_err(failed)?.is_file() {
            return Err(self.wrong("is not a file"));
        }
        let mut bytes = Vec::new();
        File::open(&self.path).map_err(failed)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(self.wrong("has more than 1 MiB"));
        }
        Ok(bytes)
    }

    /// Warns if others than the owner may read the file, which has secrets.
    pub(super) fn warn_if_open(&self) {
        const OTHERS: u32 = 0o077;
        if let Ok(mode) = self.path.metadata().map(|metadata| metadata.mode() & 0o777)
            && mode & OTHERS != 0
        {
            tracing::warn!("{self}: others may open it (mode {mode:03o}); `chmod 600` it");
        }
    }

    fn stamp(&self) -> Stamp {
        let facts = |m: Metadata| {
            let (device, inode, length) = (m.dev() as i64, m.ino() as i64, m.len() as i64);
            [device, inode, length, m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec()]
        };
        self.path.metadata().ok().map(facts)
    }
}

/// Makes a value of files again, and puts it in place of the current one.
type Replace = Box<dyn Fn(&[Named]) -> Result<()> + Send>;

/// Files of which a value is made, which is made again when they change.
pub(super) struct WatchedFiles {
    name: &'static str,
    files: Vec<Named>,
    replace: Replace,
    /// The files when they were last read, whether or not that succeeded.
    read: Vec<Stamp>,
    /// The files at the last check, if they have changed since they were read.
    changed: Option<Vec<Stamp>>,
}

/// Makes a value of `files`, and adds them to `watched`: the receiver gets each later value. `name` is for the log.
pub(super) fn load<T: Send + Sync + 'static>(
    watched: &mut Vec<WatchedFiles>,
    name: &'static str,
    files: Vec<Named>,
    make: fn(&[Named]) -> Result<T>,
) -> Result<watch::Receiver<Arc<T>>> {
    let read = stamps(&files);
    let (sender, current) = watch::channel(Arc::new(make(&files)?));
    let replace = Box::new(move |files: &[Named]| make(files).map(|made| drop(sender.send_replace(Arc::new(made)))));
    watched.push(WatchedFiles { name, files, replace, read, changed: None });
    Ok(current)
}

fn stamps(files: &[Named]) -> Vec<Stamp> {
    files.iter().map(Named::stamp).collect()
}

impl WatchedFiles {
    /// Makes the value again if the files have changed since they were read, and not since the last check.
    fn check(&mut self) {
        let now = stamps(&self.files);
        if now == self.read {
            self.changed = None;
        } else if self.changed.as_ref() == Some(&now) {
            self.reload();
        } else {
            self.changed = Some(now);
        }
    }

    /// Makes the value again, if the files are right.
    fn reload(&mut self) {
        // Before they are read, so that the next check finds a change in between.
        self.read = stamps(&self.files);
        self.changed = None;
        match (self.replace)(&self.files) {
            Ok(()) => tracing::info!("{} read again", self.name),
            Err(error) => tracing::error!("{} not changed: {error}", self.name),
        }
    }
}

/// Watches the files forever. Must be called inside a tokio runtime.
///
/// # Errors
/// `Internal` if SIGHUP cannot be handled.
pub(super) async fn watch(mut watched: Vec<WatchedFiles>) -> Result<Infallible> {
    let unhandled = |e| Error::Internal(format!("cannot handle SIGHUP: {e}"));
    let mut hangups = signal(SignalKind::hangup()).map_err(unhandled)?;
    let mut checks = interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let asked = tokio::select! {
            _ = hangups.recv() => true,
            _ = checks.tick() => false,
        };
        // On the blocking pool, because a file may lie on a network.
        let checked = tokio::task::spawn_blocking(move || {
            watched.iter_mut().for_each(|each| if asked { each.reload() } else { each.check() });
            watched
        });
        watched = checked.await.map_err(|e| Error::Internal(format!("checking files of secrets failed: {e}")))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(files: &[Named]) -> Result<String> {
        let text: String =
            files.iter().map(|f| f.read().map(|b| String::from_utf8(b).unwrap())).collect::<Result<_>>()?;
        if text.contains("broken") { Err(files[0].wrong("is broken")) } else { Ok(text) }
    }

    #[test]
    fn a_change_is_read_once_it_is_complete_and_a_broken_one_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let [real, next, link, other] = ["real", "next", "link", "other"].map(|name| dir.path().join(name));
        std::fs::write(&real, "one").unwrap();
        std::fs::write(&other, "!").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let files = vec![Named::new("--one", &link), Named::new("--other", &other)];
        let mut watched = Vec::new();
        let current = load(&mut watched, "the files are", files, read_all).unwrap();
        let now = || current.borrow().to_string();
        let mut checks = |times| (0..times).for_each(|_| watched[0].check());
        checks(2);
        assert_eq!(now(), "one!");

        // As Kubernetes does it: a link is turned to another file.
        std::fs::write(&next, "two").unwrap();
        std::os::unix::fs::symlink(&next, dir.path().join("new link")).unwrap();
        std::fs::rename(dir.path().join("new link"), &link).unwrap();
        checks(1);
        assert_eq!(now(), "one!", "the other file may follow");
        std::fs::write(&other, "?").unwrap();
        checks(1);
        assert_eq!(now(), "one!");
        checks(1);
        assert_eq!(now(), "two?");

        // As editors and cert-manager do it: a file is replaced by another.
        for (text, then) in [("broken", "two?"), ("three", "three?")] {
            std::fs::write(dir.path().join("new"), text).unwrap();
            std::fs::rename(dir.path().join("new"), &next).unwrap();
            checks(3);
            assert_eq!(now(), then);
        }
        std::fs::remove_file(&next).unwrap();
        checks(3);
        assert_eq!(now(), "three?", "a file that is missing is broken too");
    }

    #[test]
    fn a_path_without_a_file_is_rejected_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let large = dir.path().join("large");
        std::fs::write(&large, vec![b'x'; (1 << 20) + 1]).unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for (path, part) in [
            (dir.path().join("missing"), "missing: cannot be read: No such file"),
            (dir.path().into(), "is not a file"),
            (pipe, "pipe: is not a file"),
            (large, "large: has more than 1 MiB"),
        ] {
            let said = Named::new("--tls-key", &path).read().unwrap_err().to_string();
            assert!(said.starts_with("--tls-key /") && said.contains(part), "{said}");
        }
    }
}
