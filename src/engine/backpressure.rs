//! Backpressure: requests whose readers lag are suspended, and more of them where memory for requests runs short.

use super::Engine;
use crate::error::Error;
use crate::executor::Executor;
use crate::memory::{Level, human_bytes};
use crate::types::RequestKey;

impl<X: Executor> Engine<X> {
    /// Suspends the accepted requests whose readers lag, and resumes those whose readers have caught up. If memory for
    /// requests is tight, only the oldest request whose reader keeps up runs on, so that it can finish and free what it
    /// holds. If none is left, the request that holds most is ended.
    ///
    /// No request stays suspended for ever: at least one runs while any reader keeps up, and the reader of a request
    /// that lags wakes the engine when it has caught up.
    pub(super) fn suspend_laggards(&mut self) {
        if self.core.traffic.level() == Level::Full {
            self.end_largest();
        }
        if self.core.traffic.level() == Level::Free {
            // This runs at every step, and most of the time there is nothing to change.
            for key in self.core.requests.accepted_keys(|_, request| request.lags() != request.is_suspended()) {
                let is_suspended = self.core.requests.get_mut(key).is_some_and(|request| request.is_suspended());
                self.set_suspended(key, !is_suspended);
            }
            return;
        }
        let mut one_runs = false;
        for key in self.core.requests.accepted_keys(|_, _| true) {
            let suspend = one_runs || self.core.requests.get_mut(key).is_some_and(|request| request.lags());
            one_runs |= !suspend;
            self.set_suspended(key, suspend);
        }
    }

    /// Suspends or resumes a request, if it is not suspended or running already.
    fn set_suspended(&mut self, key: RequestKey, suspend: bool) {
        let Some(request) = self.core.requests.get_mut(key) else { return };
        if suspend == request.is_suspended() {
            return;
        }
        request.note_suspended(suspend);
        match suspend {
            true => self.core.scheduler.suspend(key),
            false => self.core.scheduler.resume(key),
        }
    }

    /// Ends the request that holds the most bytes.
    fn end_largest(&mut self) {
        let Some((bytes, key)) = self.largest() else { return };
        self.core.reject(
            key,
            Error::ResourceExhausted(format!(
                "requests and replies under way hold all of --request-bytes {}, and this request more than any other, \
                 {}; ask for fewer samples or top_logprobs at once, or raise --request-bytes",
                human_bytes(self.core.traffic.limit()),
                human_bytes(bytes),
            )),
        );
    }

    /// The accepted request that holds the most bytes.
    fn largest(&mut self) -> Option<(u64, RequestKey)> {
        let keys = self.core.requests.accepted_keys(|_, _| true);
        keys.into_iter().filter_map(|key| Some((self.core.requests.get_mut(key)?.bytes(), key))).max()
    }
}
