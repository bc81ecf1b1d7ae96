//! Reads files of secrets again when they have changed, or when SIGHUP asks for it. What is wrong with a new file is
//! logged, and the old content stays in use.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::files::{Named, Stamp};
use crate::error::{Error, Result};

/// Time between two looks at the files. A change is read at the second look that finds it, so that files that are
/// replaced one after the other are read together.
const LOOK: Duration = Duration::from_millis(500);

/// Something made of files, which is made anew when they change.
pub(super) struct Watched<T> {
    what: &'static str,
    files: Vec<Named>,
    load: fn(&[Named]) -> Result<T>,
    current: watch::Sender<Arc<T>>,
    /// The files when they were read last, well or in vain.
    read: Vec<Stamp>,
    /// The files at the last look, if they have changed since they were read.
    changed: Option<Vec<Stamp>>,
}

impl<T> Watched<T> {
    /// Makes it for the first time. `what` names it in the log.
    ///
    /// # Errors
    /// The errors of `load`.
    pub(super) fn new(what: &'static str, files: Vec<Named>, load: fn(&[Named]) -> Result<T>) -> Result<Self> {
        let read = stamps(&files);
        let current = watch::Sender::new(Arc::new(load(&files)?));
        Ok(Self { what, files, load, current, read, changed: None })
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<T>> {
        self.current.subscribe()
    }

    /// Looks at the files, and makes it anew if they have changed since they were read, and not since the last look.
    fn look(&mut self) {
        let now = stamps(&self.files);
        if now == self.read {
            self.changed = None;
        } else if self.changed.as_ref() == Some(&now) {
            self.reload();
        } else {
            self.changed = Some(now);
        }
    }

    /// Makes it anew, if the files allow.
    fn reload(&mut self) {
        // Looked at before they are read: what changes meanwhile is found at the next look.
        self.read = stamps(&self.files);
        self.changed = None;
        match (self.load)(&self.files) {
            Ok(made) => {
                self.current.send_replace(Arc::new(made));
                tracing::info!("{} read again", self.what);
            }
            Err(error) => tracing::error!("{} not changed: {error}", self.what),
        }
    }
}

fn stamps(files: &[Named]) -> Vec<Stamp> {
    files.iter().map(Named::stamp).collect()
}

/// Anything that is [`Watched`].
pub(super) trait Look: Send {
    fn look(&mut self);
    fn reload(&mut self);
}

impl<T: Send + Sync> Look for Watched<T> {
    fn look(&mut self) {
        self.look();
    }

    fn reload(&mut self) {
        self.reload();
    }
}

/// Watches for ever. Must be called inside a tokio runtime.
///
/// # Errors
/// `Internal` if SIGHUP cannot be handled.
pub(super) async fn watch(mut watched: Vec<Box<dyn Look>>) -> Result<Infallible> {
    let internal = |what: &str, e: &dyn std::fmt::Display| Error::Internal(format!("{what}: {e}"));
    let mut hangups = signal(SignalKind::hangup()).map_err(|e| internal("cannot handle SIGHUP", &e))?;
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let asked = tokio::select! {
            _ = hangups.recv() => true,
            _ = looks.tick() => false,
        };
        // On the blocking pool, because a file may lie on a network.
        let looked = tokio::task::spawn_blocking(move || {
            watched.iter_mut().for_each(|each| if asked { each.reload() } else { each.look() });
            watched
        });
        watched = looked.await.map_err(|e| internal("looking at files of secrets failed", &e))?;
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
        let mut watched = Watched::new("the files are", files, read_all).unwrap();
        let current = watched.subscribe();
        let now = || current.borrow().to_string();
        let mut looks = |times| (0..times).for_each(|_| watched.look());
        looks(2);
        assert_eq!(now(), "one!");

        // As Kubernetes does it: a link is turned to another file.
        std::fs::write(&next, "two").unwrap();
        std::os::unix::fs::symlink(&next, dir.path().join("new link")).unwrap();
        std::fs::rename(dir.path().join("new link"), &link).unwrap();
        looks(1);
        assert_eq!(now(), "one!", "the other file may follow");
        std::fs::write(&other, "?").unwrap();
        looks(1);
        assert_eq!(now(), "one!");
        looks(1);
        assert_eq!(now(), "two?");

        // As editors and cert-manager do it: a file is replaced by another.
        for (text, then) in [("broken", "two?"), ("three", "three?")] {
            std::fs::write(dir.path().join("new"), text).unwrap();
            std::fs::rename(dir.path().join("new"), &next).unwrap();
            looks(3);
            assert_eq!(now(), then);
        }
        std::fs::remove_file(&next).unwrap();
        looks(3);
        assert_eq!(now(), "three?", "a file that is missing is broken too");
    }

    #[test]
    fn what_is_no_file_is_refused_and_not_waited_for() {
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
