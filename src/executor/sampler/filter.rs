//! Min-p, top-k and top-p without sorting the vocabulary.
//!
//! Each filter keeps a prefix of one order: descending logit, ties by ascending id. So together they keep the tokens up
//! to one last token, and it is enough to find that. The block maxima give a floor below which no kept token lies;
//! what is above it (a few hundred of 150,000 tokens, for usual parameters) is selected exactly.

use std::cmp::Ordering;

use rollout_kernels::cpu::logits::{self, Candidate};

use super::Row;
use crate::types::SamplingParams;

/// The order of which every filter keeps a prefix.
pub fn descending(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).expect("no NaN is a candidate").then(a.id.cmp(&b.id))
}

/// Whether any filter can drop a token of a vocabulary of this size.
pub fn applies(params: &SamplingParams, vocab: usize) -> bool {
    top_k_applies(params, vocab) || params.top_p < 1.0 || params.min_p > 0.0
}

fn top_k_applies(params: &SamplingParams, vocab: usize) -> bool {
    params.top_k > 0 && (params.top_k as usize) < vocab
}

/// Fills `out` with the tokens that pass all filters, ascending by id. The row's maximum is finite; it always passes.
pub fn keep(
    row: Row,
    params: &SamplingParams,
    scale: f32,
    sums: &mut Vec<f32>,
    floors: &mut Vec<f32>,
    out: &mut Vec<Candidate>,
) {
    let min_p_floor = if params.min_p > 0.0 {
        (f64::from(row.max) + f64::from(params.min_p).ln() / f64::from(scale)) as f32
    } else {
        f32::NEG_INFINITY
    };
    let top_k = top_k_applies(params, row.logits.len()).then_some(params.top_k as usize);
    if top_k.is_none() && params.min_p == 0.0 {
        let total = logits::block_sum_exp(row.logits, row.max, scale, sums);
        top_p_candidates(row, params.top_p, scale, total, out);
    } else {
        let top_k_floor = top_k.map_or(f32::NEG_INFINITY, |k| kth_block_maximum(row.maxima, k, floors));
        logits::candidates(row.logits, row.maxima, min_p_floor.max(top_k_floor), row.max, scale, out);
        select(out, top_k.unwrap_or(out.len()));
        if params.top_p < 1.0 {
            let total = mass(out);
            nucleus(out, f64::from(params.top_p) * total);
        }
    }
    // Selection has shuffled them. Gathering again up to the last kept token costs less than sorting by id.
    let last = *out.iter().max_by(|a, b| descending(a, b)).expect("the highest logit passes every filter");
    logits::candidates(row.logits, row.maxima, last.logit, row.max, scale, out);
    out.retain(|c| c.logit > last.logit || c.id <= last.id);
}

/// Fills `out` with the `k` highest logits, in no particular order.
pub fn top_k(row: Row, scale: f32, k: usize, floors: &mut Vec<f32>, out: &mut Vec<Candidate>) {
    let floor = kth_block_maximum(row.maxima, k, floors);
    logits::candidates(row.logits, row.maxima, floor, row.max, scale, out);
    select(out, k);
}

fn select(candidates: &mut Vec<Candidate>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, descending);
        candidates.truncate(k);
    }
}

/// A bound that at least `k` logits reach: the k-th largest of the block maxima, each of which is a logit.
fn kth_block_maximum(maxima: &[f32], k: usize, floors: &mut Vec<f32>) -> f32 {
    if k > maxima.len() {
        return f32::NEG_INFINITY;
    }
    floors.clear();
    floors.extend_from_slice(maxima);
    *floors.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

/// Fills `out` with the nucleus of the whole vocabulary, whose mass is `total`, in no particular order.
fn top_p_candidates(row: Row, top_p: f32, scale: f32, total: f64, out: &mut Vec<Candidate>) {
    let target = f64::from(top_p) * total;
    let vocab = row.logits.len();
    // Tokens below a floor of (mass that may be left out) / vocab cannot outweigh that mass, so the last try succeeds. A
    // real model's tail is short: the first tries mostly do, with far fewer candidates.
    for count in [256, 4096, vocab] {
        let weight = (total - target) / count as f64;
        let floor = (f64::from(row.max) + weight.ln() / f64::from(scale)) as f32;
        logits::candidates(row.logits, row.maxima, floor.next_down().min(row.max), row.max, scale, out);
        if mass(out) >= target {
            break;
        }
    }
    nucleus(out, target);
}

fn mass(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|c| f64::from(c.weight)).sum()
}

/// Keeps the smallest set of most likely candidates with at least `target` mass (all, if they have less), at least one.
/// Bisection by selection: linear in the number of candidates.
fn nucleus(candidates: &mut Vec<Candidate>, target: f64) {
    const SORTED: usize = 64; // from here down a sort is cheaper than more selections
    let (mut low, mut high, mut reached) = (0, candidates.len(), 0.0);
    while high - low > SORTED {
        let middle = low + (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, descending);
        let upper = mass(&candidates[low..middle]);
        if reached + upper >= target {
            high = middle;
        } else {
            (low, reached) = (middle, reached + upper);
        }
    }
    candidates[low..high].sort_unstable_by(descending);
    while low < high {
        reached += f64::from(candidates[low].weight);
        low += 1;
        if reached >= target {
            break;
        }
    }
    candidates.truncate(low);
}
