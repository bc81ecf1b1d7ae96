//! Samples tokens from rows of logits, and computes their log-probabilities.
//!
//! The steps of a [`SamplingTask`], in this order (vLLM's, where both have the step):
//!
//! 1. *raw* log-probabilities, from the row as the model gave it;
//! 2. edits of the logits: allowed tokens, mask, banned tokens, logit bias, repetition penalty (prompt and output),
//!    frequency and presence penalty (output);
//! 3. temperature;
//! 4. filters, each on the renormalised result of the one before: min-p, top-k, top-p. Ties go to the lower token id,
//!    so exactly k tokens pass top-k;
//! 5. *processed* log-probabilities, of what is left, renormalised;
//! 6. one draw, by inverse CDF in the order of token ids.
//!
//! The most likely tokens and the token's rank are of the raw or of the processed distribution ([`Distribution`]), by
//! their logits: a token of a higher logit is more likely even where the float32 log-probabilities are equal.
//!
//! Beside the token, a task may ask for the entropies of both distributions and for the support of the processed one
//! ([`TaskReturns`]).
//!
//! The answer is a pure function of (row, task): the draw uses one uniform number made from (seed, output index), so
//! other requests, and timing, have no effect on it. Scoring a token and sampling it give the same bits.
//!
//! Edge cases:
//! - Temperature 0 takes the highest edited logit; filters cannot change that. It has processed log-probability 0, any
//!   other token `-inf`; it is the whole support, which has entropy 0 and log mass 0.
//! - If edits leave no token (all `-inf`), the lowest allowed token is taken as if greedy, where there is a mask the
//!   lowest that it, `allowed` and `banned` leave; if one overflows to `+inf`, the lowest such token.
//! - If the row has a NaN or `+inf` (a broken policy), the highest edited logit is taken, and both log-probabilities of
//!   every token are NaN, so that the trainer sees it, and so are entropies and the support's log mass.

use std::any::Any;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::divergence::Divergences;

/// One question to a row of logits. Every token id in it is below the vocabulary's size, except in `banned`.
#[derive(Clone, Copy, Debug)]
pub struct SamplingTask<'a> {
    /// `>= 0`; 0 takes the most likely token (ties: the lowest id).
    pub temperature: f32,
    /// Keep the `k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose mass reaches this, in `(0, 1]`; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the best token's probability, in `[0, 1]`; 0 keeps all.
    pub min_p: f32,
    /// `> 0`; divides positive and multiplies negative logits of the tokens of `history`.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens of the output.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f32,
    /// Added to logits; ascending by token, no duplicates, finite.
    pub logit_bias: &'a [(u32, f32)],
    /// If given, only these may be sampled; ascending, no duplicates, not empty.
    pub allowed: Option<&'a [u32]>,
    /// If given, only tokens whose bits are set may be sampled: bit `i % 32` of word `i / 32` is that of token i.
    /// Tokens beyond the words may not. At least one token is left by this, `allowed` and `banned`.
    pub mask: Option<&'a [u32]>,
    /// Tokens that have probability 0; those beyond the vocabulary are passed over.
    pub banned: [&'a [u32]; 4],
    /// The prompt and the output so far, which the penalties count, if there are any.
    pub history: Option<(&'a [u32], &'a [u32])>,
    /// The sample's own seed.
    pub seed: u64,
    /// Number of output tokens before this one: the counter of the random generator.
    pub output_index: u32,
    /// `Some(token)`: give its log-probabilities instead of sampling.
    pub target: Option<u32>,
    /// How many of the most likely tokens to give beside the token. Its rank is given if any token is beside it.
    pub top_logprobs: u32,
    /// Tokens to give in this order after the most likely ones.
    pub logprobs_of: &'a [u32],
    /// The distribution that these and the rank are of.
    pub top_of: Distribution,
    /// Further values to give beside the log-probabilities.
    pub returns: TaskReturns,
}

/// Further values that a task asks for beside tokens and their log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskReturns {
    /// The entropies of both distributions.
    pub entropy: bool,
    /// The support of the processed distribution, with the ids of its tokens if they are at most so many.
    pub support: Option<u32>,
}

/// One of the two distributions of a [`SamplingTask`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distribution {
    /// The model's own.
    #[default]
    Raw,
    /// The one that is sampled from. Only tokens that edits and filters have left are listed; where the highest logit
    /// is taken without a draw, that is the one token.
    Processed,
}

impl SamplingTask<'_> {
    /// Whether the task changes logits before the temperature.
    pub(crate) fn edits(&self) -> bool {
        let is_restricted = self.allowed.is_some() || self.mask.is_some() || self.banned.iter().any(|b| !b.is_empty());
        is_restricted || !self.logit_bias.is_empty() || self.history.is_some()
    }

    /// Whether the answer lists tokens beside its own, and has its rank.
    pub(crate) fn lists_tokens(&self) -> bool {
        self.top_logprobs > 0 || !self.logprobs_of.is_empty()
    }

    /// Factor of the logits: the temperature's inverse, clamped to normal numbers, so that `0 * scale` is 0 and
    /// `-inf * scale` is `-inf`.
    pub(crate) fn scale(&self) -> f32 {
        self.temperature.recip().clamp(f32::MIN_POSITIVE, f32::MAX)
    }

    /// Whether any filter can drop a token of a vocabulary of this size.
    pub(crate) fn filters(&self, vocab: usize) -> bool {
        self.top_k_applies(vocab) || self.top_p < 1.0 || self.min_p > 0.0
    }

    pub(crate) fn top_k_applies(&self, vocab: usize) -> bool {
        self.top_k > 0 && (self.top_k as usize) < vocab
    }

    /// How far from the highest logit min-p keeps logits: at most 0. The task must have a min-p.
    pub(crate) fn min_p_depth(&self) -> f64 {
        f64::from(self.min_p).ln() / f64::from(self.scale())
    }

    /// The token that is taken where no token has a logit above `-inf`.
    pub(crate) fn lowest(&self) -> u32 {
        let lowest_allowed = self.allowed.map_or(0, |allowed| allowed[0]);
        let Some(mask) = self.mask else { return lowest_allowed };
        let is_left = |token: &u32| {
            let is_allowed = self.allowed.is_none_or(|allowed| allowed.binary_search(token).is_ok());
            is_set(mask, *token) && is_allowed && !self.banned.iter().any(|banned| banned.contains(token))
        };
        (0..32 * mask.len() as u32).find(is_left).unwrap_or(lowest_allowed)
    }
}

/// Whether the bit of `token` is set.
pub(crate) fn is_set(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Log-probabilities of one token at one position, natural logarithm.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    pub token: u32,
    /// The token's log-probability in the model's own distribution (temperature 1, nothing applied).
    pub raw: f32,
    /// The token's log-probability in the distribution sampled from (temperature, penalties, filters applied and
    /// renormalised); `-inf` for a scored token which that distribution excludes; 0 for greedy's own choice.
    pub processed: f32,
    /// The most likely tokens of the distribution asked for, descending; ties by ascending id. Then those that the task
    /// names, in its order.
    pub top: Vec<(u32, f32)>,
    /// 1 + the number of tokens that are more likely than this one in the same distribution; 0 where it is not asked
    /// for.
    pub rank: u32,
    /// The answers to [`SamplingTask::returns`], if it asks for any.
    pub returned: Option<Box<TokenReturns>>,
}

/// The answers to [`TaskReturns`] at one position. A value that is not asked for has its default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenReturns {
    /// Entropy of the model's own distribution, in nats.
    pub raw_entropy: f32,
    /// Entropy of the distribution sampled from, in nats.
    pub entropy: f32,
    pub support: Support,
    /// The final hidden state of the row, from which its logits can be computed again. The sampler leaves it empty.
    pub hidden: Vec<f32>,
    /// The divergences between this row's distribution and another policy's. The sampler leaves them unset.
    pub divergences: Option<Divergences>,
}

/// The tokens that have a probability in the distribution sampled from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Support {
    /// Number of the tokens.
    pub size: u32,
    /// Logarithm of the probability that they have together in the model's own distribution at the task's temperature.
    pub log_mass: f32,
    /// The tokens, ascending; empty if they are more than the task's limit.
    pub ids: Vec<u32>,
}

impl TokenLogprobs {
    /// Stands where there is no answer.
    pub const NONE: Self =
        Self { token: 0, raw: f32::NAN, processed: f32::NAN, top: Vec::new(), rank: 0, returned: None };

    /// Bytes of the heap that it takes beside its own.
    pub fn heap_bytes(&self) -> usize {
        /// The allocator's own bytes of each block.
        const HEADER: usize = 16;
        let list = |bytes: usize| if bytes == 0 { 0 } else { bytes + HEADER };
        let returned = self.returned.as_ref().map_or(0, |returned| {
            list(size_of::<TokenReturns>())
                + list(size_of_val(&returned.support.ids[..]))
                + list(size_of_val(&returned.hidden[..]))
        });
        list(size_of_val(&self.top[..])) + returned
    }
}

/// Answers to the tasks of some rows.
#[derive(Debug, Default)]
pub struct SampledTokens {
    /// Flat, in the order of the tasks.
    pub tokens: Vec<TokenLogprobs>,
    /// Rows, counted among those that were sampled, whose answer panicked, with the panic: their answers are
    /// [`TokenLogprobs::NONE`].
    pub failed: Vec<(usize, Box<dyn Any + Send>)>,
}

/// Uniform in `[0, 1)`, a function of (seed, output index) alone: 53 bits of ChaCha8's stream under the key `seed`
/// (little-endian, zero-filled) at words `2 * output_index` and the next.
pub(crate) fn uniform(seed: u64, output_index: u32) -> f64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_word_pos(2 * u128::from(output_index));
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_seed_and_output_index_only_and_look_uniform() {
        let mut cells = [0u32; 64];
        for seed in 0..40u64 {
            for index in 0..400 {
                let u = uniform(seed << 32 | seed, index);
                assert!((0.0..1.0).contains(&u));
                cells[(u * 64.0) as usize] += 1;
            }
        }
        let chi2: f64 = cells.iter().map(|&c| (f64::from(c) - 250.0).powi(2) / 250.0).sum();
        assert!(chi2 < 110.0, "chi-square {chi2} of 63 degrees of freedom");
        // What a client may have recorded must come back from any later version.
        let recorded = [uniform(0, 0), uniform(7, 0), uniform(7, 1), uniform(u64::MAX, u32::MAX)];
        assert_eq!(recorded, [0.8369197568826472, 0.764109042047738, 0.4659376151199609, 0.24953541245859245]);
    }
}
