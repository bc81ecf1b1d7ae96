//! Random choices of one run, all from its seed.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub struct Dice(ChaCha8Rng);

impl Dice {
    pub fn of(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// A number below `end`, which must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        self.0.random_range(low..=high)
    }

    /// True once in `many` times.
    pub fn one_in(&mut self, many: usize) -> bool {
        self.below(many) == 0
    }

    pub fn coin(&mut self) -> bool {
        self.one_in(2)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub fn maybe<T>(&mut self, many: usize, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.one_in(many) { Some(value(self)) } else { None }
    }

    /// The index of one of `weights`, each as likely as its weight; `None` if all are 0.
    pub fn weighted(&mut self, weights: &[u32]) -> Option<usize> {
        let sum: u32 = weights.iter().sum();
        if sum == 0 {
            return None;
        }
        let mut at = self.below(sum as usize) as u32;
        weights.iter().position(|&weight| match at.checked_sub(weight) {
            Some(rest) => {
                at = rest;
                false
            }
            None => true,
        })
    }
}
