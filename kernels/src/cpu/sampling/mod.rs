//! Samples tokens from rows of logits and computes their log-probabilities, as [`crate::SamplingTask`] says. Each
//! thread takes one row at a time.

mod edit;
mod filter;
mod returns;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::isa::Isa;
use super::logits::{self, LogitBound, Row, VOCAB_BLOCK};
use super::pool::ThreadPool;
use crate::sampling::{Distribution, SampledTokens, SamplingTask, TokenLogprobs, TokenReturns, uniform};
use returns::{Processed, SupportScratch};

/// A row of logits and what is asked of it.
pub(crate) type LogitsTasks<'a> = (&'a [f32], &'a [SamplingTask<'a>]);

/// The sampler of each thread of a pool.
pub(crate) struct Samplers {
    isa: Isa,
    threads: RefCell<Vec<Sampler>>,
}

impl Samplers {
    pub fn new(isa: Isa) -> Self {
        Self { isa, threads: RefCell::default() }
    }

    /// Answers the questions in their order.
    pub fn answer(&self, pool: &ThreadPool, questions: &[LogitsTasks<'_>]) -> SampledTokens {
        let threads = pool.threads();
        let mut samplers = self.threads.borrow_mut();
        samplers.resize_with(threads, || Sampler::new(self.isa));
        pool.run_chunks(&mut samplers, 1, |thread, sampler| {
            let first = questions.len() * thread / threads;
            let own = &questions[first..questions.len() * (thread + 1) / threads];
            for (row, (logits, tasks)) in (first..).zip(own) {
                sampler[0].answer(row, logits, tasks);
            }
        });
        let mut sampled = SampledTokens::default();
        samplers.iter_mut().for_each(|sampler| sampler.hand_over(&mut sampled));
        sampled
    }

    /// Gives the memory that samplers reuse back.
    pub fn release(&self) {
        self.threads.take();
    }
}

/// The answers of one thread, and the buffers that it needs to compute them.
struct Sampler {
    scratch: SamplerScratch,
    tokens: Vec<TokenLogprobs>,
    failed: Vec<(usize, Box<dyn Any + Send>)>,
}

impl Sampler {
    fn new(isa: Isa) -> Self {
        Self { scratch: SamplerScratch::new(isa), tokens: Vec::new(), failed: Vec::new() }
    }

    /// Answers the tasks of row `row`. A panic costs that row's answers and nothing else: tasks only read the logits,
    /// and the scratch, which may be half written, is replaced.
    fn answer(&mut self, row: usize, logits: &[f32], tasks: &[SamplingTask<'_>]) {
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
    fn hand_over(&mut self, all: &mut SampledTokens) {
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
    support: SupportScratch,
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
    let ChosenToken { token, processed, ranking, returned } = choose(raw, task, work);
    let Ranking { top, rank } = ranking.unwrap_or_else(|| raw.ranking(token, task, &mut work.selection));
    TokenLogprobs { token, raw: raw.logprob(token), processed, top, rank, returned }
}

impl Raw<'_> {
    fn logprob(&self, token: u32) -> f32 {
        logprob(self.row.logits[token as usize], self.row.max, 1.0, self.total)
    }

    /// The most likely tokens of the raw distribution, and the rank of `token` in it, if the task asks for them.
    fn ranking(&self, token: u32, task: &SamplingTask<'_>, selection: &mut filter::Selection) -> Ranking {
        if !task.lists_tokens() {
            return Ranking::default();
        }
        let rank = 1 + filter::above(&self.row, self.row.logits[token as usize]);
        let top = match task.top_logprobs {
            0 => &[],
            top => filter::most_likely(self.isa, &self.row, top as usize, f32::NEG_INFINITY, selection),
        };
        Ranking { top: listed(top.iter().map(|c| c.id), task, |token| self.logprob(token)), rank }
    }
}

/// The answer to a task, before its raw log-probability is known.
struct ChosenToken {
    token: u32,
    processed: f32,
    /// Of the processed distribution, if the task asks for that.
    ranking: Option<Ranking>,
    returned: Option<Box<TokenReturns>>,
}

/// See [`TokenLogprobs`].
#[derive(Default)]
struct Ranking {
    top: Vec<(u32, f32)>,
    rank: u32,
}

/// The log-probability of a token with logit `x`, where the highest logit is `max` and `total` is the sum
/// `Σ e^((x - max) / temperature)`.
pub(crate) fn logprob(x: f32, max: f32, temperature: f32, total: f64) -> f32 {
    if x == f32::NEG_INFINITY && !total.is_nan() {
        return f32::NEG_INFINITY;
    }
    // Adding 0 makes -0 of a certain token 0, whichever zero is the highest logit.
    ((f64::from(x) - f64::from(max)) / f64::from(temperature) - total.ln()) as f32 + 0.0
}

/// The task's token, its processed log-probability, and its ranking in the processed distribution.
fn choose(raw: &Raw, task: &SamplingTask<'_>, work: &mut TaskScratch) -> ChosenToken {
    let isa = raw.isa;
    let TaskScratch { edited, maxima, sums, counts, selection, support } = work;
    let scale = task.scale();
    let is_edited = edit::apply(raw.row.logits, task, edited, counts);
    let (row, total) = if is_edited {
        let (max, total) = logits::summarise(isa, edited, scale, maxima, sums);
        (Row { logits: edited, maxima, max }, Some(total))
    } else {
        (raw.row, (task.temperature == 1.0).then_some(raw.total))
    };
    let broken = raw.total.is_nan();
    if broken || !row.max.is_finite() || task.temperature == 0.0 {
        return greedy(raw, argmax(row, task), task, broken);
    }
    let filtered = task.filters(row.logits.len());
    let bound = if filtered { filter::bound(isa, &row, task, scale, total, sums, selection) } else { LogitBound::NONE };
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
    let logprob = |token: u32| {
        let logit = row.logits[token as usize];
        match bound.keeps(logit, token) {
            true => logprob(logit, row.max, task.temperature, total),
            false => f32::NEG_INFINITY,
        }
    };
    let ranking = asks_for_processed(task).then(|| {
        let top = match task.top_logprobs {
            0 => &[],
            top => filter::most_likely(isa, &row, top as usize, bound.logit.max(f32::MIN), selection),
        };
        let kept = top.iter().filter(|c| bound.keeps(c.logit, c.id));
        let top = listed(kept.map(|c| c.id), task, logprob);
        // All tokens above one that is kept are kept; above another one are those that are kept.
        let logit = row.logits[token as usize];
        let above = match bound.keeps(logit, token) {
            true => filter::above(&row, logit),
            false => filter::kept(&row, bound),
        };
        Ranking { top, rank: 1 + above }
    });
    let returned = Processed { row, is_edited, scale, bound, total }.returns(raw, task, support);
    ChosenToken { token, processed: logprob(token), ranking, returned }
}

/// The answer where `choice` is the one token of the processed distribution. In a `broken` row no log-probability is a
/// number.
fn greedy(raw: &Raw<'_>, choice: u32, task: &SamplingTask<'_>, broken: bool) -> ChosenToken {
    let token = task.target.unwrap_or(choice);
    let processed = certain_logprob(token == choice, broken);
    let most_likely = Some(choice).filter(|_| task.top_logprobs > 0);
    let top = || listed(most_likely.into_iter(), task, |token| certain_logprob(token == choice, broken));
    let ranking = || Ranking { top: top(), rank: 1 + u32::from(token != choice) };
    let returned = returns::of_certain(raw, task, choice, broken);
    ChosenToken { token, processed, ranking: asks_for_processed(task).then(ranking), returned }
}

/// The most likely tokens and those that the task names, with their log-probabilities.
fn listed(
    most_likely: impl Iterator<Item = u32>,
    task: &SamplingTask<'_>,
    logprob: impl Fn(u32) -> f32,
) -> Vec<(u32, f32)> {
    most_likely.chain(task.logprobs_of.iter().copied()).map(|token| (token, logprob(token))).collect()
}

/// The processed log-probability where one token is certain, of that one or of another.
pub(crate) fn certain_logprob(is_certain: bool, broken: bool) -> f32 {
    match is_certain {
        _ if broken => f32::NAN,
        true => 0.0,
        false => f32::NEG_INFINITY,
    }
}

fn asks_for_processed(task: &SamplingTask<'_>) -> bool {
    task.lists_tokens() && task.top_of == Distribution::Processed
}

/// The token with the highest logit, ties to the lowest id. If all logits are `-inf` it is the lowest that is allowed.
fn argmax(row: Row, task: &SamplingTask<'_>) -> u32 {
    if row.max == f32::NEG_INFINITY {
        return task.lowest();
    }
    let is_max = |&x: &f32| x == row.max;
    let block = row.maxima.iter().position(is_max).expect("the maximum is one of the block maxima");
    let start = block * VOCAB_BLOCK;
    let offset = row.logits[start..].iter().position(is_max).expect("the block has its maximum");
    (start + offset) as u32
}
