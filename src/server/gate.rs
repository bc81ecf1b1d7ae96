//! Who may come in: nobody while the model loads, everybody while serving, only questions while ending.

use std::sync::Arc;

use tokio::sync::watch;

use super::isolation::Panics;
use super::parts::Parts;
use crate::error::{Error, Result};
use crate::memory::Traffic;

/// Where the process is in its life. Moves forward only.
#[derive(Clone)]
enum Stage {
    Starting,
    Serving(Arc<Parts>),
    Ending(Arc<Parts>),
    /// The engine has ended: what still waits for it waits in vain.
    Ended(Arc<Parts>),
}

/// Held by `serve`, the only one to change the stage.
pub(super) struct GateKeeper {
    stage: watch::Sender<Stage>,
    running: watch::Sender<usize>,
}

/// Held by the services.
#[derive(Clone)]
pub(super) struct Gate {
    stage: watch::Receiver<Stage>,
    running: watch::Sender<usize>,
    /// Counts the calls that ended with a panic.
    pub(super) panics: Panics,
}

/// Counts a request as running until dropped: shutdown waits for all of them.
pub(super) struct Running(watch::Sender<usize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.checked_sub(1).expect("as many ends as starts"));
    }
}

pub(super) fn gate() -> (GateKeeper, Gate) {
    let (stage, watched) = watch::channel(Stage::Starting);
    let running = watch::Sender::new(0);
    (GateKeeper { stage, running: running.clone() }, Gate { stage: watched, running, panics: Panics::default() })
}

impl GateKeeper {
    pub(super) fn serving(&self, parts: Arc<Parts>) {
        self.stage.send_replace(Stage::Serving(parts));
    }

    pub(super) fn ending(&self, parts: Arc<Parts>) {
        self.stage.send_replace(Stage::Ending(parts));
    }

    pub(super) fn ended(&self, parts: Arc<Parts>) {
        self.stage.send_replace(Stage::Ended(parts));
    }

    /// Returns when no request is running.
    pub(super) async fn drained(&self) {
        let mut running = self.running.subscribe();
        // The sender is our own, so the channel cannot be closed.
        let _ = running.wait_for(|n| *n == 0).await;
    }
}

impl Gate {
    /// For work that takes a while.
    ///
    /// # Errors
    /// `Unavailable` while the server starts or ends.
    pub(super) fn admit(&self) -> Result<(Arc<Parts>, Running)> {
        // Counted first and looked at second: a request that passes is always waited for.
        self.running.send_modify(|n| *n += 1);
        let running = Running(self.running.clone());
        match &*self.stage.borrow() {
            Stage::Starting => Err(starting()),
            Stage::Serving(parts) => Ok((Arc::clone(parts), running)),
            Stage::Ending(_) | Stage::Ended(_) => Err(ending()),
        }
    }

    /// Whether the server has been told to end.
    pub(super) fn is_ending(&self) -> bool {
        matches!(&*self.stage.borrow(), Stage::Ending(_))
    }

    /// The count of what requests take.
    ///
    /// # Errors
    /// `Unavailable` while the server starts.
    pub(super) fn traffic(&self) -> Result<Traffic> {
        self.look().map(|parts| parts.traffic.clone())
    }

    /// Returns when the server is told to end.
    pub(super) async fn ending(&self) {
        let mut stage = self.stage.clone();
        // Without a keeper it has ended.
        let _ = stage.wait_for(|stage| matches!(stage, Stage::Ending(_))).await;
    }

    /// For questions, which are answered until the end.
    ///
    /// # Errors
    /// `Unavailable` while the server starts.
    pub(super) fn look(&self) -> Result<Arc<Parts>> {
        match &*self.stage.borrow() {
            Stage::Starting => Err(starting()),
            Stage::Serving(parts) | Stage::Ending(parts) | Stage::Ended(parts) => Ok(Arc::clone(parts)),
        }
    }

    /// Waits for the end of the engine; gives the error for those whose work ends with it.
    pub(super) async fn ended(&self) -> Error {
        if self.stage.clone().wait_for(|stage| matches!(stage, Stage::Ended(_))).await.is_err() {
            // Without its keeper the stage stays as it is.
            std::future::pending::<()>().await;
        }
        ending()
    }
}

fn ending() -> Error {
    Error::Unavailable("the server is shutting down".into())
}

fn starting() -> Error {
    Error::Unavailable("the server is starting: the model is not loaded yet".into())
}
