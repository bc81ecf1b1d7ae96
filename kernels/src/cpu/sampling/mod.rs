//! Samples tokens from rows of logits and computes their log-probabilities, as [`crate::SamplingTask`] says. Each
//! thread takes one row at a time.

mod edit;
mod filter;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::isa::Isa;
use super::logits::{self, Bound, Row, VOCAB_BLOCK};
use crate::sampling::{SampledTokens, SamplingTask, TokenLogprobs, uniform};

/// The answers of one thread, and the buffers that it needs to compute them.
pub(super) struct Sampler {
    scratch: SamplerScratch,
    tokens: Vec<TokenLogprobs>,
    failed: Vec<(usize, Box<dyn Any + Send>)>,
}

impl Sampler {
    pub fn new(isa: Isa) -> Self {
        Self { scratch: SamplerScratch::new(isa), tokens: Vec::new(), failed: Vec::new() }
    }

    /// Answers the tasks of row `row`. A panic costs that row's answers and nothing else: tasks only read the logits,
    /// and the scratch, which may be half written, is replaced.
    pub fn answer(&mut self, row: usize, logits: &[f32], tasks: &[SamplingTask<'_>]) {
        let Self { scratch, tokens, failed } = self;
        let answered = tokens.len();
        let answers = AssertUnwindSafe(|| answer_row(logits, tasks, scratch, tokens));
        if let Err(panic) = catch_unwind(answers) {
            tokens.resize(answered + tasks.len(), TokenLogprobs::NONE);
            failed.push((row, panic));
            *scratch = SamplerScratch::new(scratch.isa);
        }
    }

    /// Moves the answers to the end of `all`.
    pub fn hand_over(&mut self, all: &mut SampledTokens) {
        all.tokens.append(&mut self.tokens);
        all.failed.append(&mut self.failed);
    }
}

/// Buffers of one thread that grow to the vocabulary's size once and are reused for every row.
struct SamplerScratch {
    isa: Isa,
    raw_maxima: Vec<f32>,
    raw_sums: Vec<f32>,
    work: TaskScratch,
}

/// The part of [`SamplerScratch`] that each task of a row overwrites.
#[derive(Default)]
struct TaskScratch {
    edited: Vec<f32>,
    maxima: Vec<f32>,
    sums: Vec<f32>,
    counts: Vec<u32>,
    selection: filter::Selection,
}

impl SamplerScratch {
    /// Empty buffers for computations with `isa`; all instruction sets give the same answers.
    fn new(isa: Isa) -> Self {
        Self { isa, raw_maxima: Vec::new(), raw_sums: Vec::new(), work: TaskScratch::default() }
    }
}

/// The model's own distribution: temperature 1, no edits, no filters.
struct Raw<'a> {
    isa: Isa,
    row: Row<'a>,
    sums: &'a [f32],
    /// The sum `Σ e^(x - max)`; NaN if the row has a NaN or `+inf`.
    total: f64,
}

/// Appends the answers of all tasks of one row to `out`, in order. `logits` is `[vocab]`; every token id in the tasks
/// is below its length, except in `banned`.
fn answer_row(logits: &[f32], tasks: &[SamplingTask<'_>], scratch: &mut SamplerScratch, out: &mut Vec<TokenLogprobs>) {
    let SamplerScratch { isa, raw_maxima, raw_sums, work } = scratch;
    let (max, total) = logits::summarise(*isa, logits, 1.0, raw_maxima, raw_sums);
    let raw = Raw { isa: *isa, row: Row { logits, maxima: raw_maxima, max }, sums: raw_sums, total };
    out.extend(tasks.iter().map(|task| answer_task(&raw, task, work)));
}

fn answer_task(raw: &Raw, task: &SamplingTask<'_>, work: &mut TaskScratch) -> TokenLogprobs {
    let top = top_logprobs(raw, task.top_logprobs as usize, &mut work.selection);
    let (token, processed) = choose(raw, task, work);
    TokenLogprobs { token, raw: raw.logprob(token), processed, top }
}

impl Raw<'_> {
    fn logprob(&self, token: u32) -> f32 {
        logprob(self.row.logits[token as usize], self.row.max, 1.0, self.total)
    }
}

/// The log-probability of a token with logit `x`, where the highest logit is `max` and `total` is the sum
/// `Σ e^((x - max) / temperature)`.
fn logprob(x: f32, max: f32, temperature: f32, total: f64) -> f32 {
    if x == f32::NEG_INFINITY && !total.is_nan() {
        return f32::NEG_INFINITY;
    }
    ((f64::from(x) - f64::from(max)) / f64::from(temperature) - total.ln()) as f32
}

/// The `k` most likely tokens of the raw distribution, descending, ties by ascending id.
fn top_logprobs(raw: &Raw, k: usize, selection: &mut filter::Selection) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    filter::top_k(raw.isa, &raw.row, k, selection);
    selection.candidates.sort_unstable_by(filter::descending);
    selection.candidates.iter().map(|c| (c.id, raw.logprob(c.id))).collect()
}

/// The task's token and its processed log-probability.
fn choose(raw: &Raw, task: &SamplingTask<'_>, work: &mut TaskScratch) -> (u32, f32) {
    let isa = raw.isa;
    let TaskScratch { edited, maxima, sums, counts, selection } = work;
    // The scale is clamped to normal numbers, so that `0 * scale` is 0 and `-inf * scale` is `-inf`.
    let scale = task.temperature.recip().clamp(f32::MIN_POSITIVE, f32::MAX);
    let is_edited = edit::apply(raw.row.logits, task, edited, counts);
    let (row, total) = if is_edited {
        let (max, total) = logits::summarise(isa, edited, scale, maxima, sums);
        (Row { logits: edited, maxima, max }, Some(total))
    } else {
        (raw.row, (task.temperature == 1.0).then_some(raw.total))
    };
    let broken = raw.total.is_nan();
    if broken || !row.max.is_finite() || task.temperature == 0.0 {
        let choice = argmax(row, task);
        let token = task.target.unwrap_or(choice);
        let processed = if token == choice { 0.0 } else { f32::NEG_INFINITY };
        return (token, if broken { f32::NAN } else { processed });
    }
    let filtered = filter::applies(task, row.logits.len());
    let bound = if filtered { filter::bound(isa, &row, task, scale, total, sums, selection) } else { Bound::NONE };
    let (sums, total) = match total {
        Some(total) if !filtered => (if is_edited { sums } else { raw.sums }, total),
        _ => {
            let total = logits::sum_exp(isa, &row, scale, bound, sums);
            (&sums[..], total)
        }
    };
    let token = task.target.unwrap_or_else(|| {
        let target = uniform(task.seed, task.output_index) * total;
        logits::inverse_cdf(isa, &row, scale, bound, sums, target) as u32
    });
    let logit = row.logits[token as usize];
    let processed = match bound.keeps(logit, token) {
        true => logprob(logit, row.max, task.temperature, total),
        false => f32::NEG_INFINITY,
    };
    (token, processed)
}

/// The token with the highest logit, ties to the lowest id. If all logits are `-inf` it is the lowest allowed id.
fn argmax(row: Row, task: &SamplingTask<'_>) -> u32 {
    if row.max == f32::NEG_INFINITY {
        return task.allowed.map_or(0, |allowed| allowed[0]);
    }
    let is_max = |&x: &f32| x == row.max;
    let block = row.maxima.iter().position(is_max).expect("the maximum is one of the block maxima");
    let start = block * VOCAB_BLOCK;
    let offset = row.logits[start..].iter().position(is_max).expect("the block has its maximum");
    (start + offset) as u32
}
