//! The model of the simulation: each number that it computes depends on the weights, on the adapter, and on every slot
//! of the KV cache that it reads, so that a wrong block, a stale one or a wrong policy changes what is sampled.

use rollout_server::types::{SamplingParams, TokenId};

pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 32)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^ (z >> 29)
}

/// What computes a token: the weights' fingerprint, and the content of the resident adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Computer {
    pub weights: u64,
    pub adapter: u64,
}

impl Computer {
    /// KV of a token, where `context` sums up all slots before it.
    pub fn slot(self, token: TokenId, position: usize, context: u64) -> u64 {
        mix(mix(self.weights, self.adapter), mix(context, (position as u64) << 32 | u64::from(token))) | 1
    }

    /// The logits after a context.
    pub fn logits(self, context: u64) -> u64 {
        mix(context, mix(self.adapter, self.weights))
    }
}

/// Sums up a context and the next slot.
pub fn extend(context: u64, slot: u64) -> u64 {
    mix(context, slot)
}

/// The token that a seed draws as output number `index`, of a vocabulary of `vocabulary` tokens.
pub fn draw(logits: u64, seed: u64, index: u32, params: &SamplingParams, vocabulary: TokenId) -> TokenId {
    let first = (mix(logits, mix(seed, u64::from(index))) >> 33) as TokenId % vocabulary;
    let mut candidates = (0..vocabulary).map(|i| (first + i) % vocabulary);
    candidates.find(|&token| params.may_sample(token, index as usize)).expect("a token that may be sampled")
}

/// The log-probability of a token.
pub fn logprob(logits: u64, token: TokenId) -> f32 {
    -((mix(logits, u64::from(token)) >> 40) as f32) / 65536.0
}

/// Computes a sequence alone, from its first token on, with one policy.
pub struct Alone {
    pub computer: Computer,
    context: u64,
    position: usize,
}

impl Alone {
    pub fn new(computer: Computer) -> Self {
        Self { computer, context: 0, position: 0 }
    }

    pub fn push(&mut self, token: TokenId) {
        self.context = extend(self.context, self.computer.slot(token, self.position, self.context));
        self.position += 1;
    }

    pub fn logits(&self) -> u64 {
        self.computer.logits(self.context)
    }
}
