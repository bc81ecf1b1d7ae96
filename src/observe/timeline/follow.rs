//! Follows the timeline as it grows.

use super::{Span, Timeline, TrackName};

/// A reader that follows the timeline. It gets each new span, and gets it again while the span may still change.
#[derive(Clone, Debug)]
pub struct Follower {
    timeline: Timeline,
    /// Number of the next span of each track, in the order of [`TrackName::ALL`].
    next: [u64; 2],
}

/// Spans that a follower has not seen yet.
#[derive(Clone, Debug)]
pub struct News {
    /// Time of this reading, in nanoseconds since the timeline's start.
    pub now: u64,
    /// New spans of each track in order, and spans that were read before but may have changed.
    pub spans: [Vec<Span>; 2],
    /// Whether there are more spans than the limit.
    pub has_more: bool,
}

impl Timeline {
    /// Follows the timeline, beginning with the spans that ended within the last `nanos` nanoseconds, at most `most` of
    /// each track.
    pub fn follow(&self, nanos: u64, most: u64) -> Follower {
        let since = self.now().saturating_sub(nanos);
        let next = TrackName::ALL.map(|track| {
            let ring = self.ring(track);
            let ids = ring.ids();
            let oldest = ids.start.max(ids.end.saturating_sub(most));
            let ended_before = |id: &u64| ring.read(*id).is_some_and(|span| span.end.is_some_and(|end| end <= since));
            let newest_before = (oldest..ids.end).rev().find(ended_before);
            newest_before.map_or(oldest, |id| id + 1)
        });
        Follower { timeline: self.clone(), next }
    }
}

impl Follower {
    /// The next spans, at most `most` of each track.
    pub fn news(&mut self, most: u64) -> News {
        let (now, mut has_more) = (self.timeline.now(), false);
        let spans = std::array::from_fn(|i| {
            let ring = self.timeline.ring(TrackName::ALL[i]);
            // The settled count is read before the spans: a span that settles in between is returned once more.
            let (settled, ids) = (ring.settled(), ring.ids());
            let from = self.next[i].max(ids.start);
            let to = ids.end.min(from.saturating_add(most));
            self.next[i] = to.min(settled).max(from);
            has_more |= to < ids.end;
            (from..to).filter_map(|id| ring.read(id)).collect()
        });
        News { now, spans, has_more }
    }
}
