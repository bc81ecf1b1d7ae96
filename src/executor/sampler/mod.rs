//! From a row of logits to tokens and their log-probabilities.
//!
//! The steps of a [`LogitsTask`], in this order (vLLM's, where both have the step):
//!
//! 1. *raw* log-probabilities, from the row as the model gave it;
//! 2. edits of the logits: allowed tokens, `min_tokens` (end-of-sequence and stop tokens), logit bias, repetition
//!    penalty (prompt and output), frequency and presence penalty (output);
//! 3. temperature;
//! 4. filters, each on the renormalised result of the one before: min-p, top-k, top-p. Ties go to the lower token id,
//!    so exactly k tokens pass top-k;
//! 5. *processed* log-probabilities, of what is left, renormalised;
//! 6. one draw, by inverse CDF in the order of token ids.
//!
//! The answer is a pure function of (row, task): the draw uses one uniform number made from (seed, output index), so it
//! does not matter what else runs, or when. Scoring a token and sampling it give the same bits.
//!
//! Cases at the edge:
//! - Temperature 0 takes the highest edited logit; filters cannot change that. It has processed log-probability 0, any
//!   other token `-inf`.
//! - If edits leave no token (all `-inf`), the lowest allowed token is taken as if greedy; if one overflows to `+inf`,
//!   the lowest such token.
//! - If the row has a NaN or `+inf` (a broken policy), the highest edited logit is taken, and both log-probabilities of
//!   every token are NaN, so that the trainer sees it.

mod edit;
mod filter;
#[cfg(test)]
mod tests;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rollout_kernels::cpu::Isa;
use rollout_kernels::cpu::logits::{self, BLOCK, Bound, Row};

use crate::types::{LogitsTask, SamplingParams, TokenId, TokenLogprobs};

/// Buffers that grow to the vocabulary's size once and are used again for every row; one per thread.
pub struct Scratch {
    isa: Isa,
    raw_maxima: Vec<f32>,
    raw_sums: Vec<f32>,
    work: Work,
}

/// The part of [`Scratch`] that each task of a row overwrites.
#[derive(Default)]
struct Work {
    edited: Vec<f32>,
    maxima: Vec<f32>,
    sums: Vec<f32>,
    counts: Vec<u32>,
    selection: filter::Selection,
}

impl Scratch {
    /// To compute with `isa`; all of them give the same answers.
    pub fn new(isa: Isa) -> Self {
        Self { isa, raw_maxima: Vec::new(), raw_sums: Vec::new(), work: Work::default() }
    }

    /// Forgets all it holds: after a panic some of it may break the next answer.
    pub fn reset(&mut self) {
        *self = Self::new(self.isa);
    }
}

/// The model's own distribution.
struct Raw<'a> {
    isa: Isa,
    row: Row<'a>,
    sums: &'a [f32],
    /// `Σ e^(x - max)`; NaN if the row is broken.
    total: f64,
}

/// Answers all tasks of one row, in order, at the end of `out`. `logits` is `[vocab]`; every token id in the tasks is
/// below its length.
pub fn answer_row(logits: &[f32], tasks: &[LogitsTask], scratch: &mut Scratch, out: &mut Vec<TokenLogprobs>) {
    let Scratch { isa, raw_maxima, raw_sums, work } = scratch;
    let (max, total) = logits::summarise(*isa, logits, 1.0, raw_maxima, raw_sums);
    let raw = Raw { isa: *isa, row: Row { logits, maxima: raw_maxima, max }, sums: raw_sums, total };
    out.extend(tasks.iter().map(|task| answer_task(&raw, task, work)));
}

fn answer_task(raw: &Raw, task: &LogitsTask, work: &mut Work) -> TokenLogprobs {
    let top = top_logprobs(raw, task.params.top_logprobs as usize, &mut work.selection);
    let (token, processed) = choose(raw, task, work);
    TokenLogprobs { token, raw: raw.logprob(token), processed, top }
}

impl Raw<'_> {
    fn logprob(&self, token: TokenId) -> f32 {
        logprob(self.row.logits[token as usize], self.row.max, 1.0, self.total)
    }
}

/// Log-probability of a token with logit `x` where the highest logit is `max` and `total` is
/// `Σ e^((x - max) / temperature)`.
fn logprob(x: f32, max: f32, temperature: f32, total: f64) -> f32 {
    if x == f32::NEG_INFINITY && !total.is_nan() {
        return f32::NEG_INFINITY;
    }
    ((f64::from(x) - f64::from(max)) / f64::from(temperature) - total.ln()) as f32
}

/// The `k` most likely tokens of the raw distribution, descending, ties by ascending id.
fn top_logprobs(raw: &Raw, k: usize, selection: &mut filter::Selection) -> Vec<(TokenId, f32)> {
    if k == 0 {
        return Vec::new();
    }
    filter::top_k(raw.isa, &raw.row, k, selection);
    selection.candidates.sort_unstable_by(filter::descending);
    selection.candidates.iter().map(|c| (c.id, raw.logprob(c.id))).collect()
}

/// The task's token and its processed log-probability.
fn choose(raw: &Raw, task: &LogitsTask, work: &mut Work) -> (TokenId, f32) {
    let (isa, params) = (raw.isa, &*task.params);
    let Work { edited, maxima, sums, counts, selection } = work;
    // Bounds that keep 0 * scale and -inf * scale what they should be.
    let scale = params.temperature.recip().clamp(f32::MIN_POSITIVE, f32::MAX);
    let is_edited = edit::apply(raw.row.logits, task, edited, counts);
    let (row, total) = if is_edited {
        let (max, total) = logits::summarise(isa, edited, scale, maxima, sums);
        (Row { logits: edited, maxima, max }, Some(total))
    } else {
        (raw.row, (params.temperature == 1.0).then_some(raw.total))
    };
    let broken = raw.total.is_nan();
    if broken || !row.max.is_finite() || params.temperature == 0.0 {
        let choice = argmax(row, params);
        let token = task.target.unwrap_or(choice);
        let processed = if token == choice { 0.0 } else { f32::NEG_INFINITY };
        return (token, if broken { f32::NAN } else { processed });
    }
    let filtered = filter::applies(params, row.logits.len());
    let bound = if filtered { filter::bound(isa, &row, params, scale, total, sums, selection) } else { Bound::NONE };
    let (sums, total) = match total {
        Some(total) if !filtered => (if is_edited { sums } else { raw.sums }, total),
        _ => {
            let total = logits::sum_exp(isa, &row, scale, bound, sums);
            (&sums[..], total)
        }
    };
    let token = task.target.unwrap_or_else(|| {
        let target = uniform(task.seed, task.output_index) * total;
        logits::inverse_cdf(isa, &row, scale, bound, sums, target) as TokenId
    });
    let logit = row.logits[token as usize];
    let processed = match bound.keeps(logit, token) {
        true => logprob(logit, row.max, params.temperature, total),
        false => f32::NEG_INFINITY,
    };
    (token, processed)
}

/// The highest logit, ties to the lowest id; the lowest allowed id if there is none.
fn argmax(row: Row, params: &SamplingParams) -> TokenId {
    if row.max == f32::NEG_INFINITY {
        return params.allowed_tokens.as_ref().map_or(0, |allowed| allowed[0]);
    }
    let is_max = |&x: &f32| x == row.max;
    let block = row.maxima.iter().position(is_max).expect("the maximum is one of the block maxima");
    let start = block * BLOCK;
    let offset = row.logits[start..].iter().position(is_max).expect("the block has its maximum");
    (start + offset) as TokenId
}

/// Uniform in `[0, 1)`, a function of (seed, output index) alone: 53 bits of ChaCha8's stream under the key `seed`
/// (little-endian, zero-filled) at words `2 * output_index` and the next.
fn uniform(seed: u64, output_index: u32) -> f64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_word_pos(2 * u128::from(output_index));
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}
