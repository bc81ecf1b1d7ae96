//! How often a group's drafts turn out right.

use super::index::LONGEST;

/// Probability that a draft is right, as assumed before any was tried, and again after a long time without drafts.
const PRIOR: f32 = 0.5;

/// Weight of one tried draft in the moving average.
const WEIGHT: f32 = 1.0 / 8.0;

/// Weight with which a draft that was found but not tried pulls the moving average back to [`PRIOR`]. So of drafts that
/// do not pay one in some tens is tried nevertheless, and shows whether that has changed.
const FORGETTING: f32 = 1.0 / 256.0;

/// Probabilities that a draft is right, each a moving average, by the number of context tokens that matched where the
/// draft was found: two matching tokens say little about the next one, eight say much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Acceptance([f32; LONGEST + 1]);

impl Default for Acceptance {
    fn default() -> Self {
        Self([PRIOR; LONGEST + 1])
    }
}

impl Acceptance {
    /// Probabilities of consecutive drafts, the first of which was found with `matched` matching tokens: each is the
    /// probability that the draft and all drafts before it are right. Descending.
    pub fn likelihoods(&self, matched: usize) -> impl Iterator<Item = f32> {
        (matched..).scan(1.0, |likelihood, matched| {
            *likelihood *= self.0[matched.min(LONGEST)];
            Some(*likelihood)
        })
    }

    /// Notes whether a draft that was found with `matched` matching tokens turned out right.
    pub fn record(&mut self, matched: usize, is_right: bool) {
        let average = &mut self.0[matched.min(LONGEST)];
        *average += WEIGHT * (f32::from(is_right) - *average);
    }

    /// Notes that a draft was found with `matched` matching tokens and not tried, since it was not worth its row.
    pub fn pass(&mut self, matched: usize) {
        let average = &mut self.0[matched.min(LONGEST)];
        *average += FORGETTING * (PRIOR - *average);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likelihoods_follow_what_came_and_are_by_length() {
        let mut acceptance = Acceptance::default();
        for _ in 0..100 {
            acceptance.record(2, false);
            acceptance.record(7, true);
            acceptance.record(LONGEST + 3, true);
        }
        let of = |matched| acceptance.likelihoods(matched).take(3).collect::<Vec<_>>();
        assert!(of(2)[0] < 0.001 && of(7).iter().all(|&p| p > 0.99), "{acceptance:?}");
        assert_eq!(of(3), [0.5, 0.25, 0.125]);
        assert!(of(6)[2] > 0.49 && of(6)[2] <= of(6)[1] && of(6)[1] <= of(6)[0], "{acceptance:?}");
    }

    #[test]
    fn what_never_paid_is_tried_again_some_time() {
        let mut acceptance = Acceptance::default();
        (0..1000).for_each(|_| acceptance.record(4, false));
        let worthwhile = |acceptance: &Acceptance| acceptance.likelihoods(4).next() >= Some(0.1);
        let mut passes = 0;
        while !worthwhile(&acceptance) {
            acceptance.pass(4);
            passes += 1;
        }
        acceptance.record(4, false);
        assert!((20..200).contains(&passes) && !worthwhile(&acceptance), "{passes} passes, {acceptance:?}");
    }
}
