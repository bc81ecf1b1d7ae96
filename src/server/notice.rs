//! Log lines about what clients can cause at will.

use std::time::Duration;

use tokio::time::Instant;

/// Shortest time between two log lines about events of one kind.
const NOTICE: Duration = Duration::from_secs(10);

/// Counts events between two log lines about them.
#[derive(Default)]
pub(super) struct Notice {
    last: Option<Instant>,
    unsaid: u64,
}

impl Notice {
    /// Counts one event. If it is time for a log line, returns the number of events since the last one.
    pub(super) fn due(&mut self, now: Instant) -> Option<u64> {
        self.unsaid += 1;
        if self.last.is_some_and(|last| now - last < NOTICE) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_are_rare_and_count_what_they_left_out() {
        let (mut notice, start) = (Notice::default(), Instant::now());
        assert_eq!([start, start, start + NOTICE / 2].map(|now| notice.due(now)), [Some(1), None, None]);
        assert_eq!([start + NOTICE, start + NOTICE].map(|now| notice.due(now)), [Some(3), None]);
    }
}
