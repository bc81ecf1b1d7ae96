//! Random values for one case: valid ones with their boundaries and, in hostile cases, invalid ones.

use rand::seq::IndexedRandom;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Source of all randomness of one case. Equal seeds, targets and case numbers make equal cases.
pub struct Dice {
    rng: ChaCha8Rng,
    /// Percentage of values that may be invalid.
    hostility: u32,
}

const STRINGS: &[&str] = &[
    "Hello",
    "a",
    " e",
    "<|im_end|>",
    "<|im_start|>user\n",
    "\0",
    "\u{feff}\u{202e}",
    "e\u{301}\u{1f469}\u{200d}\u{1f680}",
    "{{ messages }}{% for x in range(9) %}",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "/",
    "a/b",
    "%s%n",
    "model.norm.weight",
];

impl Dice {
    pub fn of(seed: u64, target: &str, case: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&case.to_le_bytes());
        for (at, byte) in target.bytes().enumerate() {
            key[16 + at % 16] ^= byte.rotate_left(at as u32 / 16);
        }
        let mut dice = Self { rng: ChaCha8Rng::from_seed(key), hostility: 0 };
        dice.hostility = dice.pick(&[0, 0, 0, 3, 10, 50]);
        dice
    }

    /// A number below `end`, which must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.rng.random_range(0..end)
    }

    /// True once in `many` times.
    pub fn one_in(&mut self, many: usize) -> bool {
        self.below(many) == 0
    }

    pub fn coin(&mut self) -> bool {
        self.one_in(2)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        *from.choose(&mut self.rng).expect("something to choose from")
    }

    /// Whether the next value may be an invalid one.
    pub fn is_hostile(&mut self) -> bool {
        self.below(100) < self.hostility as usize
    }

    pub fn maybe<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.coin() { Some(value(self)) } else { None }
    }

    /// A list of up to `most` values.
    pub fn list<T>(&mut self, most: usize, mut value: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(most + 1)).map(|_| value(self)).collect()
    }

    pub fn u64(&mut self) -> u64 {
        let any = self.rng.next_u64();
        self.pick(&[0, 1, 2, u64::from(u32::MAX), 1 << 63, u64::MAX - 1, u64::MAX, any, any >> 40])
    }

    pub fn u32(&mut self) -> u32 {
        let any = self.rng.next_u32();
        self.pick(&[0, 1, 2, 1 << 16, 1 << 31, u32::MAX - 1, u32::MAX, any, any >> 20])
    }

    /// A number from `low` to `high`, or any number if hostile.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        if self.is_hostile() {
            let any = self.u32();
            return self.pick(&[low.wrapping_sub(1), high.wrapping_add(1), any]);
        }
        let inside = self.rng.random_range(low..=high);
        self.pick(&[low, high, inside, inside, inside])
    }

    /// One of `valid`, or any number if hostile.
    pub fn float(&mut self, valid: &[f32]) -> f32 {
        if self.is_hostile() {
            let any = f32::from_bits(self.rng.next_u32());
            let hostile = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45];
            return self.pick(&[&hostile[..], &[-0.0, 0.0, -1e-45, -1.0, any]].concat());
        }
        self.pick(valid)
    }

    /// A value of an enum with values from 0 to `last`, or any number if hostile.
    pub fn enumeration(&mut self, last: i32) -> i32 {
        if self.is_hostile() {
            self.pick(&[-1, last + 1, i32::MIN, i32::MAX])
        } else {
            self.below(last as usize + 1) as i32
        }
    }

    /// A text with a few awkward characters; may be long or empty if hostile.
    pub fn text(&mut self) -> String {
        if self.is_hostile() {
            let part = self.pick(STRINGS);
            let times = self.pick(&[0, 100, 3_000, 20_000]);
            return part.repeat(times);
        }
        (0..1 + self.below(4)).map(|_| self.pick(STRINGS)).collect()
    }

    /// One of `names`, or any text if hostile.
    pub fn name(&mut self, names: &[&str]) -> String {
        if self.is_hostile() { self.text() } else { self.pick(names).into() }
    }

    pub fn bytes(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.below(most + 1)];
        self.rng.fill_bytes(&mut bytes);
        bytes
    }
}
