//! Min-p, top-k and top-p without sorting the vocabulary.
//!
//! Each filter keeps a prefix of one order: descending logit, ties by ascending id. Together they keep the tokens up to
//! one last token, and it is enough to find that token. Usually it is among the tokens above the largest block maxima,
//! which are a few hundred of 150,000. Otherwise a histogram of the row tells in which bin it is, and it is selected
//! from the tokens of that bin.

use std::cmp::Ordering;

use super::super::isa::Isa;
use super::super::logits::{self, BINS, Bins, Candidate, LogitBound, Measure, Row, VOCAB_BLOCK};
use crate::sampling::SamplingTask;

/// The number of block maxima that determine the floor of the tokens that are tried first.
const HEAD: usize = 256;
/// How far below the maximum the bins reach when tokens are counted. In all models logits lie closer together than
/// that.
const COUNTED_DEPTH: f32 = 32.0;

/// Buffers of the filters, which grow once and are reused.
#[derive(Default)]
pub struct Selection {
    floors: Vec<f32>,
    pub candidates: Vec<Candidate>,
}

/// The order of tokens of which every filter keeps a prefix: descending logit, ties by ascending id.
pub fn descending(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).expect("no NaN is a candidate").then(a.id.cmp(&b.id))
}

/// The last token that passes all filters of the task. The row's maximum must be finite; the most likely token always
/// passes. `total` is the row's sum `Σ e^((x - max) * scale)` if it is known; `sums` is overwritten.
pub fn bound(
    isa: Isa,
    row: &Row,
    task: &SamplingTask<'_>,
    scale: f32,
    total: Option<f64>,
    sums: &mut Vec<f32>,
    selection: &mut Selection,
) -> LogitBound {
    let mut bound = LogitBound::NONE;
    if task.min_p > 0.0 {
        bound.logit = (f64::from(row.max) + task.min_p_depth()) as f32;
    }
    if task.top_k_applies(row.logits.len()) {
        let k = task.top_k as usize;
        let head = if k <= row.maxima.len() { k } else { HEAD };
        let floor = nth_block_maximum(row.maxima, head, &mut selection.floors).max(bound.logit);
        let bins = Bins::new(row.max, COUNTED_DEPTH);
        bound = bound.tighter(prefix(isa, row, Measure::Count, k as f64, floor, bins, &mut selection.candidates));
    }
    if task.top_p < 1.0 {
        let total = match total {
            Some(total) if bound == LogitBound::NONE => total,
            _ => logits::sum_exp(isa, row, scale, bound, sums),
        };
        let target = f64::from(task.top_p) * total;
        // Tokens of less weight than this cannot outweigh, all together, the mass that may be left out.
        let least_weight = (total - target) / row.logits.len() as f64;
        let bins = Bins::new(row.max, (-least_weight.ln() / f64::from(scale)) as f32);
        let floor = nth_block_maximum(row.maxima, HEAD, &mut selection.floors).max(bound.logit);
        let measure = Measure::Mass(scale);
        bound = bound.tighter(prefix(isa, row, measure, target, floor, bins, &mut selection.candidates));
    }
    bound
}

/// The tokens of the `k` highest logits, as far as these are at least `least`, in the order of [`descending`].
pub fn most_likely<'a>(isa: Isa, row: &Row, k: usize, least: f32, selection: &'a mut Selection) -> &'a [Candidate] {
    let Selection { floors, candidates } = selection;
    let floor = if k <= row.maxima.len() { nth_block_maximum(row.maxima, k, floors) } else { f32::NEG_INFINITY };
    logits::candidates(isa, row, floor.max(least), 1.0, candidates);
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, descending);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(descending);
    candidates
}

/// Number of tokens of a row with a logit above `logit`.
pub fn above(row: &Row, logit: f32) -> u32 {
    let blocks = row.logits.chunks(VOCAB_BLOCK).zip(row.maxima).filter(|(_, max)| **max > logit);
    blocks.map(|(block, _)| block.iter().map(|&x| u32::from(x > logit)).sum::<u32>()).sum()
}

/// Number of tokens of a row that `bound` keeps and that have a logit above `-inf`.
pub fn kept(row: &Row, bound: LogitBound) -> u32 {
    let is_kept = |(id, &x): (u32, &f32)| x > f32::NEG_INFINITY && bound.keeps(x, id);
    (0..).zip(row.logits).filter(|token| is_kept(*token)).count() as u32
}

/// A logit that at least `n` logits reach (or as many as there are blocks): the n-th largest of the block maxima, each
/// of which is a logit of the row.
fn nth_block_maximum(maxima: &[f32], n: usize, floors: &mut Vec<f32>) -> f32 {
    floors.clear();
    floors.extend_from_slice(maxima);
    *floors.select_nth_unstable_by(n.min(maxima.len()) - 1, |a, b| b.total_cmp(a)).1
}

/// The last token of the shortest prefix whose measure reaches `target`, in the order of [`descending`]. Tokens with a
/// logit of at least `floor` are tried first, then the tokens of one of `bins`.
fn prefix(
    isa: Isa,
    row: &Row,
    measure: Measure,
    target: f64,
    floor: f32,
    bins: Bins,
    candidates: &mut Vec<Candidate>,
) -> LogitBound {
    let scale = match measure {
        Measure::Count => 1.0,
        Measure::Mass(scale) => scale,
    };
    logits::candidates(isa, row, floor, scale, candidates);
    if sum(measure, candidates) >= target {
        return shortest_prefix(candidates, measure, target);
    }
    let bin_sums = logits::histogram(isa, row, bins, measure);
    let (mut above, mut bin) = (0.0, BINS - 1);
    while bin > 0 && above + bin_sums[bin] < target {
        above += bin_sums[bin];
        bin -= 1;
    }
    logits::candidates_of_bin(isa, row, bins, bin, scale, candidates);
    if candidates.is_empty() {
        // Every bin was added and the target was not reached: it is within rounding of the total, so nothing is left
        // out.
        return LogitBound::NONE;
    }
    shortest_prefix(candidates, measure, target - above)
}

fn sum(measure: Measure, candidates: &[Candidate]) -> f64 {
    match measure {
        Measure::Count => candidates.len() as f64,
        Measure::Mass(_) => candidates.iter().map(|c| f64::from(c.weight)).sum(),
    }
}

/// The last of the fewest candidates, in the order of [`descending`], whose measure reaches `target`; the last of all
/// candidates if none do. It bisects by selection, in time linear in the number of candidates, of which there must be
/// at least one.
fn shortest_prefix(candidates: &mut [Candidate], measure: Measure, target: f64) -> LogitBound {
    const SORTED: usize = 64; // below this number a sort is cheaper than further selections
    let (mut low, mut high, mut reached) = (0, candidates.len(), 0.0);
    while high - low > SORTED {
        let middle = low + (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, descending);
        let upper = sum(measure, &candidates[low..middle]);
        if reached + upper >= target {
            high = middle;
        } else {
            (low, reached) = (middle, reached + upper);
        }
    }
    candidates[low..high].sort_unstable_by(descending);
    let reaches = |c: &&Candidate| {
        reached += sum(measure, std::slice::from_ref(c));
        reached >= target
    };
    let last = candidates[low..high].iter().find(reaches).unwrap_or(&candidates[high - 1]);
    LogitBound { logit: last.logit, id: last.id }
}
