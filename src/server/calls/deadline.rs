//! When a call must end: at its client's deadline, or with the engine.

use std::future::Future;
use std::task::Poll;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::server::gate::Gate;

/// When a call must end: at its own deadline, or with the engine.
#[derive(Clone, Default)]
pub(in crate::server) struct Deadline {
    at: Option<Instant>,
    gate: Option<Gate>,
}

impl Deadline {
    /// The deadline `at`, if there is one, of a call that ends with the engine of `gate` at the latest.
    pub(in crate::server) fn new(at: Option<Instant>, gate: &Gate) -> Self {
        Self { at, gate: Some(gate.clone()) }
    }

    /// Notes the error that the call ends with, for observers.
    pub(in crate::server) fn note(&self, error: &Error) {
        self.gate.iter().for_each(|gate| gate.observer.journal.error(error, None));
    }

    /// Waits until the deadline has passed; for ever if there is none.
    pub(in crate::server) async fn passed(self) {
        let Some(at) = self.at else { return std::future::pending().await };
        let mut timer = std::pin::pin!(tokio::time::sleep_until(at));
        // The clock is compared as well, because another timer for the same deadline may wake the call just before this
        // one fires.
        std::future::poll_fn(|cx| if Instant::now() >= at { Poll::Ready(()) } else { timer.as_mut().poll(cx) }).await;
    }

    /// Waits until the engine has ended.
    async fn engine_ended(gate: Option<Gate>) -> Error {
        match gate {
            Some(gate) => gate.ended().await,
            None => std::future::pending().await,
        }
    }

    /// The result of `work`.
    ///
    /// # Errors
    /// The error of `work`. `DeadlineExceeded` at the deadline, or `Unavailable` once the engine has ended: `work` is
    /// dropped then.
    pub(in crate::server) async fn limit<T>(self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let gate = self.gate.clone();
        tokio::select! {
            biased;
            result = work => result,
            error = Self::engine_ended(gate) => Err(error),
            () = self.passed() => Err(exceeded()),
        }
    }
}

/// The error of a call whose deadline has passed.
pub(in crate::server) fn exceeded() -> Error {
    Error::DeadlineExceeded("the deadline passed before the work was done; its work is aborted".into())
}
