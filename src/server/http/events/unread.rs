//! The feeds whose readers have left an event unread.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::server::http::listener::HangUp;

/// The connections of these feeds, the one that has been unread for longest first. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Unread(watch::Sender<Waiting>);

#[derive(Default)]
struct Waiting {
    /// Each with when it was noted.
    connections: BTreeMap<u64, (Instant, HangUp)>,
    /// Key of the next one.
    next: u64,
}

/// A feed is unread until this is dropped.
pub(super) struct Note<'a> {
    unread: &'a Unread,
    key: u64,
}

impl Drop for Note<'_> {
    fn drop(&mut self) {
        self.unread.0.send_modify(|waiting| {
            waiting.connections.remove(&self.key);
        });
    }
}

impl Unread {
    /// Notes that the reader at the other end of `connection` lags.
    pub(super) fn note(&self, connection: &HangUp) -> Note<'_> {
        let mut key = 0;
        self.0.send_modify(|waiting| {
            key = waiting.next;
            waiting.next += 1;
            waiting.connections.insert(key, (Instant::now(), connection.clone()));
        });
        Note { unread: self, key }
    }

    /// Hangs up on the reader that has lagged for longest; false if none has lagged for `least`.
    pub(super) fn hang_up_oldest(&self, least: Duration) -> bool {
        let mut oldest = None;
        self.0.send_modify(|waiting| {
            let lags = waiting.connections.first_entry().filter(|entry| entry.get().0.elapsed() >= least);
            oldest = lags.map(|entry| entry.remove().1);
        });
        oldest.inspect(|connection| connection.hang_up()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_gives_way_and_only_if_it_is_still_unread() {
        let unread = Unread::default();
        assert!(!unread.hang_up_oldest(Duration::ZERO), "all are read");
        let [first, second, third] = std::array::from_fn(|_| HangUp::default());
        let read = unread.note(&first);
        let (_second, _third) = (unread.note(&second), unread.note(&third));
        drop(read);
        assert!(!unread.hang_up_oldest(Duration::from_secs(3600)), "neither has lagged for so long");
        assert!(unread.clone().hang_up_oldest(Duration::ZERO));
        second.asked().await;
        assert!(unread.hang_up_oldest(Duration::ZERO));
        third.asked().await;
        assert!(!unread.hang_up_oldest(Duration::ZERO));
    }
}
