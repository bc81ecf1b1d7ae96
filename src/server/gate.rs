//! Which calls are let in: none while the model loads, all while serving, only questions while the server ends.

use std::sync::Arc;

use tokio::sync::watch;

use super::context::ServingContext;
use super::panics::Panics;
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::observe::Observer;

/// The stage of the process's life. It only moves forward.
#[derive(Clone)]
enum Stage {
    Starting,
    Serving(Arc<ServingContext>),
    Ending(Arc<ServingContext>),
    /// The engine has ended; calls that still wait for it will get no answer.
    Ended(Arc<ServingContext>),
}

impl Stage {
    /// Whether the server has been told to end. Where the engine has ended by itself, the stage before that passes
    /// unseen.
    fn is_ending(&self) -> bool {
        matches!(self, Self::Ending(_) | Self::Ended(_))
    }
}

/// Changes the stage. Only `serve` has it.
pub(super) struct GateKeeper {
    stage: watch::Sender<Stage>,
    running: watch::Sender<usize>,
}

/// The services' view of the stage.
#[derive(Clone)]
pub(super) struct Gate {
    stage: watch::Receiver<Stage>,
    running: watch::Sender<usize>,
    /// What observers see of the server, from its start on.
    pub(super) observer: Observer,
    /// Number of calls that ended with a panic.
    pub(super) panics: Panics,
}

/// Counts a request as running until it is dropped. Shutdown waits until none is left.
pub(super) struct Running(watch::Sender<usize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.checked_sub(1).expect("as many ends as starts"));
    }
}

pub(super) fn gate(observer: Observer) -> (GateKeeper, Gate) {
    let (stage, watched) = watch::channel(Stage::Starting);
    let running = watch::Sender::new(0);
    let keeper = GateKeeper { stage, running: running.clone() };
    (keeper, Gate { stage: watched, running, observer, panics: Panics::default() })
}

impl GateKeeper {
    pub(super) fn serving(&self, context: Arc<ServingContext>) {
        self.stage.send_replace(Stage::Serving(context));
    }

    pub(super) fn ending(&self, context: Arc<ServingContext>) {
        self.stage.send_replace(Stage::Ending(context));
    }

    pub(super) fn ended(&self, context: Arc<ServingContext>) {
        self.stage.send_replace(Stage::Ended(context));
    }

    /// Returns once no request is running.
    pub(super) async fn drained(&self) {
        let mut running = self.running.subscribe();
        // The wait cannot fail, because the sender is a field of this value.
        let _ = running.wait_for(|n| *n == 0).await;
    }
}

impl Gate {
    /// Lets in a call that takes a while, and counts it as running.
    ///
    /// # Errors
    /// `Unavailable` while the server starts or ends.
    pub(super) fn admit(&self) -> Result<(Arc<ServingContext>, Running)> {
        // The count is raised before the stage is read, so that shutdown waits for every request that is let in.
        self.running.send_modify(|n| *n += 1);
        let running = Running(self.running.clone());
        match &*self.stage.borrow() {
            Stage::Starting => Err(starting()),
            Stage::Serving(context) => Ok((Arc::clone(context), running)),
            Stage::Ending(_) | Stage::Ended(_) => Err(ending()),
        }
    }

    /// Whether the server has been told to end.
    pub(super) fn is_ending(&self) -> bool {
        self.stage.borrow().is_ending()
    }

    /// The count of the bytes of requests and replies.
    ///
    /// # Errors
    /// `Unavailable` while the server starts.
    pub(super) fn traffic(&self) -> Result<Traffic> {
        self.look().map(|context| context.traffic.clone())
    }

    /// Returns once the server is told to end.
    pub(super) async fn ending(&self) {
        let mut stage = self.stage.clone();
        // If the keeper is gone, the server has ended.
        let _ = stage.wait_for(Stage::is_ending).await;
    }

    /// Waits until the server is told to end. Returns the error for requests that the engine does not have yet.
    pub(super) async fn refused(&self) -> Error {
        self.ending().await;
        ending()
    }

    /// Lets in a question, which is answered until the very end.
    ///
    /// # Errors
    /// `Unavailable` while the server starts.
    pub(super) fn look(&self) -> Result<Arc<ServingContext>> {
        match &*self.stage.borrow() {
            Stage::Starting => Err(starting()),
            Stage::Serving(context) | Stage::Ending(context) | Stage::Ended(context) => Ok(Arc::clone(context)),
        }
    }

    /// Waits for the end of the engine. Returns the error for calls whose work ends with it.
    pub(super) async fn ended(&self) -> Error {
        if self.stage.clone().wait_for(|stage| matches!(stage, Stage::Ended(_))).await.is_err() {
            // Without its keeper the stage never changes again.
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
