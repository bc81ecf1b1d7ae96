//! Sampling by full sorts in float64, one step after the other; [`SamplingTask`] says what each step is.

use std::cmp::Ordering;

use crate::divergence::{Divergences, LogitsPair};
use crate::sampling::{Distribution, SamplingTask, Support, TokenLogprobs, TokenReturns, is_set, uniform};

/// The answer to one task of a row.
pub(super) fn answer(logits: &[f32], task: &SamplingTask<'_>) -> TokenLogprobs {
    let exact: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
    let is_broken = logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
    let all = log_softmax(&exact);
    let raw = |token: u32| if is_broken { f32::NAN } else { all[token as usize] as f32 };
    let edited = edited(logits, task);
    let Processed { probabilities, kept } = processed(&edited, task, is_broken);
    let draw = || draw(&probabilities, uniform(task.seed, task.output_index));
    let token = task.target.unwrap_or_else(draw);
    let processed = |token: u32| if is_broken { f32::NAN } else { probabilities[token as usize].ln() as f32 };
    let possible = |token: u32| probabilities[token as usize] > 0.0;
    let (top, rank) = match task.top_of {
        _ if !task.lists_tokens() => (Vec::new(), 0),
        Distribution::Raw => ranking(&exact, token, task, |_| true, raw),
        Distribution::Processed => ranking(&edited, token, task, possible, processed),
    };
    let returned = returned(&exact, &probabilities, &kept, task, is_broken);
    TokenLogprobs { token, raw: raw(token), processed: processed(token), top, rank, returned }
}

/// The values that the task asks for beside log-probabilities. `kept` are the tokens that have the `probabilities`.
fn returned(
    logits: &[f64],
    probabilities: &[f64],
    kept: &[bool],
    task: &SamplingTask<'_>,
    is_broken: bool,
) -> Option<Box<TokenReturns>> {
    let number = |value: f64| if is_broken { f32::NAN } else { value as f32 };
    let mut returned = TokenReturns::default();
    if task.returns.entropy {
        let exp = |log: &f64| log.exp();
        returned.raw_entropy = number(entropy(&log_softmax(logits).iter().map(exp).collect::<Vec<_>>()));
        returned.entropy = number(entropy(probabilities));
    }
    if let Some(limit) = task.returns.support {
        let ids: Vec<u32> = (0..).zip(kept).filter(|(_, kept)| **kept).map(|(id, _)| id).collect();
        let scaled: Vec<f64> = logits.iter().map(|x| x / f64::from(task.temperature)).collect();
        let log_mass = match ids.len() {
            1 if task.temperature == 0.0 => 0.0,
            _ => ids.iter().map(|id| log_softmax(&scaled)[*id as usize].exp()).sum::<f64>().ln(),
        };
        let size = ids.len() as u32;
        let ids = if size <= limit { ids } else { Vec::new() };
        returned.support = Support { size, log_mass: number(log_mass), ids };
    }
    (task.returns.entropy || task.returns.support.is_some()).then(|| Box::new(returned))
}

/// The divergences of two rows.
pub(super) fn divergences(policy: &[f32], reference: &[f32], pair: &LogitsPair) -> Divergences {
    let log_probabilities =
        |row: &[f32]| log_softmax(&row.iter().map(|x| f64::from(*x) * f64::from(pair.scale())).collect::<Vec<_>>());
    let (p, q) = (log_probabilities(policy), log_probabilities(reference));
    let kl = |p: &[f64], q: &[f64]| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
    Divergences::new(kl(&p, &q), kl(&q, &p))
}

/// In nats.
fn entropy(probabilities: &[f64]) -> f64 {
    -probabilities.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>()
}

/// The distribution that a task samples from.
struct Processed {
    probabilities: Vec<f64>,
    /// The tokens that no edit and no filter excludes. The probability of one may be too small for float64.
    kept: Vec<bool>,
}

/// The most likely tokens of those that are `possible`, and the rank of `token`.
fn ranking(
    logits: &[f64],
    token: u32,
    task: &SamplingTask<'_>,
    possible: impl Fn(u32) -> bool,
    logprob: impl Fn(u32) -> f32,
) -> (Vec<(u32, f32)>, u32) {
    let order: Vec<u32> = by_rank(logits).into_iter().filter(|other| possible(*other)).collect();
    let is_above = |other: &&u32| !possible(token) || logits[**other as usize] > logits[token as usize];
    let rank = 1 + order.iter().filter(is_above).count() as u32;
    let most_likely = order.iter().take(task.top_logprobs as usize);
    (most_likely.chain(task.logprobs_of).map(|other| (*other, logprob(*other))).collect(), rank)
}

/// The distribution that a task samples from; of a broken row, that of the token that is taken.
fn processed(edited: &[f64], task: &SamplingTask<'_>, is_broken: bool) -> Processed {
    let highest = edited.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let is_greedy = is_broken || task.temperature == 0.0 || !(highest as f32).is_finite();
    if is_greedy {
        let of_highest = |_: &usize| highest > f64::NEG_INFINITY;
        let greedy = edited.iter().position(|x| *x == highest).filter(of_highest);
        let greedy = greedy.map_or_else(|| task.lowest(), |token| token as u32);
        let mut probabilities = vec![0.0; edited.len()];
        probabilities[greedy as usize] = 1.0;
        let kept = probabilities.iter().map(|p| *p > 0.0).collect();
        return Processed { probabilities, kept };
    }
    filtered(edited, task)
}

/// The probabilities that a task samples from, where the row is not broken and the temperature is above 0.
#[cfg(test)]
pub(crate) fn distribution(logits: &[f32], task: &SamplingTask<'_>) -> Vec<f64> {
    filtered(&edited(logits, task), task).probabilities
}

/// The logits after masks, bias and penalties, infinite where they are beyond float32.
fn edited(logits: &[f32], task: &SamplingTask<'_>) -> Vec<f64> {
    let (prompt, output) = task.history.unwrap_or((&[], &[]));
    let edit = |(token, logit): (u32, &f32)| {
        let is_banned = task.banned.iter().any(|banned| banned.contains(&token));
        let is_masked = task.mask.is_some_and(|mask| !is_set(mask, token));
        let mut x = match is_banned || is_masked || task.allowed.is_some_and(|allowed| !allowed.contains(&token)) {
            true => f64::NEG_INFINITY,
            false => f64::from(*logit),
        };
        x += task.logit_bias.iter().find(|bias| bias.0 == token).map_or(0.0, |bias| f64::from(bias.1));
        let count = output.iter().filter(|other| **other == token).count();
        if count > 0 || prompt.contains(&token) {
            let penalty = f64::from(task.repetition_penalty);
            x = if x > 0.0 { x / penalty } else { x * penalty };
        }
        if count > 0 {
            x -= f64::from(task.frequency_penalty) * count as f64 + f64::from(task.presence_penalty);
        }
        if (x as f32).is_finite() { x } else { f64::from(x as f32) }
    };
    (0..).zip(logits).map(edit).collect()
}

/// Temperature, then min-p, top-k and top-p, each on the renormalised result of the one before.
fn filtered(edited: &[f64], task: &SamplingTask<'_>) -> Processed {
    let highest = edited.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let scaled: Vec<f64> = edited.iter().map(|x| (x - highest) / f64::from(task.temperature)).collect();
    let mut probabilities: Vec<f64> = log_softmax(&scaled).into_iter().map(f64::exp).collect();
    let best = probabilities.iter().copied().fold(0.0, f64::max);
    let mut kept: Vec<bool> = edited.iter().map(|x| *x > f64::NEG_INFINITY).collect();
    keep(&mut probabilities, &mut kept, |_, p| p >= f64::from(task.min_p) * best);
    if task.top_k == 0 && task.top_p == 1.0 {
        return Processed { probabilities, kept };
    }
    let mut ranks = vec![0; edited.len()];
    let order = by_rank(edited);
    order.iter().enumerate().for_each(|(rank, token)| ranks[*token as usize] = rank);
    if task.top_k > 0 {
        keep(&mut probabilities, &mut kept, |token, _| ranks[token] < task.top_k as usize);
    }
    if task.top_p < 1.0 {
        let (mut most, mut mass) = (0, 0.0);
        while most < order.len() && (most == 0 || mass < f64::from(task.top_p)) {
            mass += probabilities[order[most] as usize];
            most += 1;
        }
        keep(&mut probabilities, &mut kept, |token, _| ranks[token] < most);
    }
    Processed { probabilities, kept }
}

/// Tokens by descending logit, ties by ascending id; those of NaN come last.
fn by_rank(logits: &[f64]) -> Vec<u32> {
    let height = |token: &u32| logits[*token as usize];
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|a, b| {
        let by_logit = height(b).partial_cmp(&height(a)).unwrap_or(Ordering::Equal);
        height(a).is_nan().cmp(&height(b).is_nan()).then(by_logit).then(a.cmp(b))
    });
    order
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if highest == f64::NEG_INFINITY {
        return vec![f64::NEG_INFINITY; logits.len()];
    }
    let total = logits.iter().map(|x| (x - highest).exp()).sum::<f64>().ln();
    logits.iter().map(|x| x - highest - total).collect()
}

/// Takes away the tokens for which `is_kept` is false, and makes the sum of the others' probabilities 1.
fn keep(probabilities: &mut [f64], kept: &mut [bool], is_kept: impl Fn(usize, f64) -> bool) {
    for (token, (p, kept)) in probabilities.iter_mut().zip(kept).enumerate() {
        *kept &= is_kept(token, *p);
        *p = if *kept { *p } else { 0.0 };
    }
    let total: f64 = probabilities.iter().sum();
    probabilities.iter_mut().for_each(|p| *p /= total);
}

/// The first token, in order of ids, at which the running sum exceeds `target`, which is below 1; the last possible one
/// where rounding leaves the sum short of it.
fn draw(probabilities: &[f64], target: f64) -> u32 {
    let mut sum = 0.0;
    let exceeds = |p: &f64| {
        sum += p;
        sum > target
    };
    let last = || probabilities.iter().rposition(|p| *p > 0.0);
    probabilities.iter().position(exceeds).or_else(last).expect("a token has a probability") as u32
}
