//! Which requests may go on: not those whose readers lag, and fewer where the memory for requests runs short.

use super::Engine;
use crate::error::Error;
use crate::executor::Executor;
use crate::memory::{Level, human_bytes};
use crate::types::RequestKey;

impl<X: Executor> Engine<X> {
    /// Holds back the accepted requests whose readers lag, and lets go those that have caught up. Where memory is tight
    /// only the oldest whose reader keeps up goes on, so that it can finish and give back what it holds. Where there is
    /// none left the request that holds most ends.
    ///
    /// While any request keeps up at least one goes on, and the reader of one that lags wakes the engine; so what is held
    /// back is always looked at again.
    pub(super) fn suspend_laggards(&mut self) {
        if self.traffic.level() == Level::Full {
            self.end_largest();
        }
        if self.traffic.level() == Level::Free {
            // Mostly nobody: this runs around every step, whatever the number of requests.
            for key in self.requests.accepted_keys(|_, request| request.lags() != request.is_suspended()) {
                let is_suspended = self.requests.get_mut(key).is_some_and(|request| request.is_suspended());
                self.set_suspended(key, !is_suspended);
            }
            return;
        }
        let mut one_goes_on = false;
        for key in self.requests.accepted_keys(|_, _| true) {
            let hold = one_goes_on || self.requests.get_mut(key).is_some_and(|request| request.lags());
            one_goes_on |= !hold;
            self.set_suspended(key, hold);
        }
    }

    fn set_suspended(&mut self, key: RequestKey, hold: bool) {
        let Some(request) = self.requests.get_mut(key) else { return };
        if hold == request.is_suspended() {
            return;
        }
        request.note_suspended(hold);
        match hold {
            true => self.scheduler.suspend(key),
            false => self.scheduler.resume(key),
        }
    }

    fn end_largest(&mut self) {
        let Some((bytes, key)) = self.largest() else { return };
        self.reject(
            key,
            Error::ResourceExhausted(format!(
                "requests and replies under way hold all of --request-bytes {}, and this request more than any other, {}; ask for \
                 fewer samples or top_logprobs at once, or raise --request-bytes",
                human_bytes(self.traffic.limit()),
                human_bytes(bytes),
            )),
        );
    }

    fn largest(&mut self) -> Option<(u64, RequestKey)> {
        let keys = self.requests.accepted_keys(|_, _| true);
        keys.into_iter().filter_map(|key| Some((self.requests.get_mut(key)?.bytes(), key))).max()
    }
}
