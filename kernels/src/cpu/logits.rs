//! Passes over one row of logits `[vocab]`, float32: maximum and sum of exponentials, inverse CDF, candidates,
//! histogram.
//!
//! A row is cut into blocks of [`VOCAB_BLOCK`] tokens. The exponentials of a block are relative to the block's own
//! maximum, so that the row is read once for both. They are added in a fixed tree and scaled to the row's maximum, and
//! the sums of the blocks are added in a fixed order in float64. So the bits are the same on every instruction set and
//! for every caller. The maxima and sums per block let later passes skip blocks that cannot matter.

#![allow(clippy::needless_range_loop)] // indices, so that vectors stay in registers

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};

mod divergence;
mod select;
pub use divergence::divergences;
pub use select::{BINS, Bins, Candidate, Measure, candidates, candidates_of_bin, histogram};

/// Tokens per block. It is short enough for the k-th largest block maximum to be a tight bound of the k-th largest
/// logit.
pub const VOCAB_BLOCK: usize = 128;
const VECTORS: usize = VOCAB_BLOCK / LANES;
/// How many block maxima are found before the exponentials of these blocks are added. No addition has to wait for a
/// maximum then, and the logits are still in the first-level cache.
const BLOCKS_AT_ONCE: usize = 32;
/// A row of logits, and the maxima that [`summarise`] has found in it.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    pub logits: &'a [f32],
    /// The largest logit of each block.
    pub maxima: &'a [f32],
    pub max: f32,
}

/// A bound on the tokens that filters keep: the last token kept, in the order of descending logits, ties by ascending
/// id.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitBound {
    pub logit: f32,
    pub id: u32,
}

impl LogitBound {
    /// The bound that keeps every token.
    pub const NONE: LogitBound = LogitBound { logit: f32::NEG_INFINITY, id: u32::MAX };

    pub fn keeps(&self, logit: f32, id: u32) -> bool {
        logit > self.logit || (logit == self.logit && id <= self.id)
    }

    /// The bound that keeps fewer tokens.
    pub fn tighter(self, other: LogitBound) -> LogitBound {
        if self.keeps(other.logit, other.id) { other } else { self }
    }

    /// The lowest logit of a block that is kept; `None` if that differs between the block's tokens.
    #[inline(always)]
    fn floor(&self, block: usize) -> Option<f32> {
        let start = block * VOCAB_BLOCK;
        if start + VOCAB_BLOCK - 1 <= self.id as usize {
            Some(self.logit)
        } else if start > self.id as usize {
            Some(self.logit.next_up())
        } else {
            None
        }
    }

    /// The logits of a block, with `-inf` for tokens that are not kept or are beyond the row.
    fn kept(&self, row: &Row<'_>, block: usize) -> [f32; VOCAB_BLOCK] {
        let start = block * VOCAB_BLOCK;
        let mut kept = [f32::NEG_INFINITY; VOCAB_BLOCK];
        for (i, (kept, &logit)) in kept.iter_mut().zip(&row.logits[start..]).enumerate() {
            if self.keeps(logit, (start + i) as u32) {
                *kept = logit;
            }
        }
        kept
    }
}

/// Fills `maxima` with the maximum of each block and `sums` with the sum `Σ e^((x - max) * scale)` of each block, and
/// returns the maximum and the sum of the row. `scale` must be positive. Maxima ignore NaN (a block of NaN alone has
/// `-inf`); NaN and `+inf` make sums NaN, and `-inf` adds 0.
pub fn summarise(isa: Isa, logits: &[f32], scale: f32, maxima: &mut Vec<f32>, sums: &mut Vec<f32>) -> (f32, f64) {
    isa.dispatch(Summarise { logits, scale, maxima, sums })
}

/// Fills `sums` with the sum `Σ e^((x - max) * scale)` over the tokens of each block that `bound` keeps, and returns
/// the sum of the row. The row must have a finite maximum and no NaN. With [`LogitBound::NONE`] the bits are those of
/// [`summarise`].
pub fn sum_exp(isa: Isa, row: &Row<'_>, scale: f32, bound: LogitBound, sums: &mut Vec<f32>) -> f64 {
    isa.dispatch(SumExp { row, scale, bound, sums })
}

/// The sum `Σ w ln w` of the weights `w = e^((x - max) * scale)` over the tokens that `bound` keeps, in a fixed order.
/// The row must have a finite maximum and no NaN.
pub fn sum_weight_ln_weight(isa: Isa, row: &Row<'_>, scale: f32, bound: LogitBound) -> f64 {
    isa.dispatch(SumWeightLnWeight { row, scale, bound })
}

/// Returns the first token, in the order of ids, at which the running sum of `e^((x - max) * scale)` over the kept
/// tokens exceeds `target`, a value in `[0, total)`. `sums` comes from [`sum_exp`] with the same arguments, and its
/// total must be positive. A token whose exponential is 0 is never returned.
pub fn inverse_cdf(isa: Isa, row: &Row<'_>, scale: f32, bound: LogitBound, sums: &[f32], target: f64) -> usize {
    let (mut block, mut running, mut cumulative) = (None, 0f64, 0f64);
    for (b, &sum) in sums.iter().enumerate() {
        if sum > 0.0 {
            (block, running) = (Some(b), cumulative);
        }
        cumulative += f64::from(sum);
        if cumulative > target {
            break;
        }
    }
    let block = block.expect("the total is positive");
    let mut weights = bound.kept(row, block);
    isa.dispatch(WeighBlock { block: &mut weights, max: row.max, scale });
    // Rounding may leave the running sum of the block's tokens slightly below the block's sum: then the last token is
    // chosen.
    let mut choice = None;
    for (i, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            choice = Some(block * VOCAB_BLOCK + i);
            running += f64::from(weight);
            if running > target {
                break;
            }
        }
    }
    choice.expect("a block with a positive sum has a token with a positive weight")
}

// No closures from here on: a closure is compiled without the target features of the kernel that contains it, and
// unless the compiler inlines it, every operation on lanes becomes a call.

type VocabBlock = [f32; VOCAB_BLOCK];

/// The tokens after the last whole block, padded with `-inf`.
#[inline(always)]
fn padded(rest: &[f32]) -> VocabBlock {
    let mut block = [f32::NEG_INFINITY; VOCAB_BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// Prefetches the block whose maximum is due after the exponentials of the current blocks.
#[inline(always)]
fn fetch<L: Lanes>(block: &VocabBlock) {
    let ahead = block.as_ptr().wrapping_add(BLOCKS_AT_ONCE * VOCAB_BLOCK);
    for v in 0..VECTORS {
        L::prefetch_near(ahead.wrapping_add(v * LANES).cast());
    }
}

/// The largest logit of a block in each lane.
#[inline(always)]
fn max_of_block<L: Lanes>(block: &VocabBlock) -> L {
    let (vectors, lowest) = (block.as_chunks::<LANES>().0, L::splat(f32::NEG_INFINITY));
    let (mut even, mut odd) = (lowest, lowest);
    for pair in vectors.as_chunks::<2>().0 {
        even = L::from_array(&pair[0]).max(even);
        odd = L::from_array(&pair[1]).max(odd);
    }
    even.max(odd)
}

/// The sum `Σ e^((x - max) * scale)` in each lane over a block's tokens that are not below `floor`, or over all if
/// `ALL`. `max` is the block's maximum.
#[inline(always)]
fn sum_of_block<L: Lanes, const ALL: bool>(block: &VocabBlock, max: f32, scale: f32, floor: f32) -> L {
    // A block without tokens has the maximum -inf, and -inf - -inf would be NaN. A finite maximum leaves its logits
    // -inf.
    let (max, scale) = (L::splat(max.max(f32::MIN)), L::splat(scale));
    let vectors = block.as_chunks::<LANES>().0;
    let mut sums = [L::zero(); VECTORS];
    for v in 0..VECTORS {
        sums[v] = L::from_array(&vectors[v]).sub(max).mul(scale);
    }
    sums = L::exp_each(sums);
    if !ALL {
        for v in 0..VECTORS {
            sums[v] = sums[v].zero_where_below(L::from_array(&vectors[v]), floor);
        }
    }
    let mut half = VECTORS / 2;
    while half > 0 {
        for v in 0..half {
            sums[v] = sums[v].add(sums[v + half]);
        }
        half /= 2;
    }
    sums[0]
}

/// Rescales the sums of blocks, each relative to its block's maximum, to the row's maximum, and returns their total.
#[inline(always)]
fn add_blocks<L: Lanes>(maxima: &[f32], max: f32, scale: f32, sums: &mut [f32]) -> f64 {
    let (max, scale) = (L::splat(max.max(f32::MIN)), L::splat(scale));
    let mut totals = [0f64; LANES];
    for (sums, maxima) in sums.chunks_mut(LANES).zip(maxima.chunks(LANES)) {
        let (mut sum, mut own) = ([0.0; LANES], [0.0; LANES]);
        sum[..sums.len()].copy_from_slice(sums);
        own[..sums.len()].copy_from_slice(maxima);
        let scaled = L::from_array(&sum).mul(L::from_array(&own).sub(max).mul(scale).exp()).to_array();
        sums.copy_from_slice(&scaled[..sums.len()]);
        for l in 0..LANES {
            totals[l] += f64::from(scaled[l]);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            totals[l] += totals[l + half];
        }
        half /= 2;
    }
    totals[0]
}

struct Summarise<'a> {
    logits: &'a [f32],
    scale: f32,
    maxima: &'a mut Vec<f32>,
    sums: &'a mut Vec<f32>,
}

impl Kernel for Summarise<'_> {
    type Output = (f32, f64);

    #[inline(always)]
    fn run<L: Lanes>(self) -> (f32, f64) {
        let Summarise { logits, scale, maxima, sums } = self;
        maxima.clear();
        sums.clear();
        let (blocks, rest) = logits.as_chunks::<VOCAB_BLOCK>();
        for blocks in blocks.chunks(BLOCKS_AT_ONCE) {
            let (first, mut lanes) = (maxima.len(), [L::zero(); BLOCKS_AT_ONCE]);
            for (lanes, block) in lanes.iter_mut().zip(blocks) {
                *lanes = max_of_block::<L>(block);
            }
            for lanes in &lanes[..blocks.len()] {
                maxima.push(lanes.largest());
            }
            for ((lanes, block), &max) in lanes.iter_mut().zip(blocks).zip(&maxima[first..]) {
                fetch::<L>(block);
                *lanes = sum_of_block::<L, true>(block, max, scale, 0.0);
            }
            for lanes in &lanes[..blocks.len()] {
                sums.push(lanes.sum());
            }
        }
        if !rest.is_empty() {
            let block = padded(rest);
            let max = max_of_block::<L>(&block).largest();
            maxima.push(max);
            sums.push(sum_of_block::<L, true>(&block, max, scale, 0.0).sum());
        }
        let mut max = f32::NEG_INFINITY;
        for &m in maxima.iter() {
            max = max.max(m);
        }
        let total = add_blocks::<L>(maxima, max, scale, sums);
        (max, total)
    }
}

struct SumExp<'a> {
    row: &'a Row<'a>,
    scale: f32,
    bound: LogitBound,
    sums: &'a mut Vec<f32>,
}

impl Kernel for SumExp<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f64 {
        let SumExp { row, scale, bound, sums } = self;
        sums.clear();
        let (blocks, rest) = row.logits.as_chunks::<VOCAB_BLOCK>();
        for (b, &max) in row.maxima.iter().enumerate() {
            let floor = bound.floor(b);
            sums.push(if max < floor.unwrap_or(bound.logit) {
                0.0
            } else {
                match (floor, blocks.get(b)) {
                    (Some(f32::NEG_INFINITY), Some(block)) => sum_of_block::<L, true>(block, max, scale, 0.0),
                    (Some(floor), Some(block)) => sum_of_block::<L, false>(block, max, scale, floor),
                    _ => sum_of_block::<L, true>(&bound.kept(row, b), max, scale, 0.0),
                }
                .sum()
            });
        }
        debug_assert_eq!(sums.len(), blocks.len() + usize::from(!rest.is_empty()), "maxima of another row");
        add_blocks::<L>(row.maxima, row.max, scale, sums)
    }
}

/// The sum `Σ w ln w` of a block's weights `w = e^((x - max) * scale)` in each lane, over its tokens that are not below
/// `floor`.
#[inline(always)]
fn weight_ln_weight_of_block<L: Lanes>(block: &VocabBlock, max: f32, scale: f32, floor: f32) -> L {
    let (max, scale) = (L::splat(max), L::splat(scale));
    let vectors = block.as_chunks::<LANES>().0;
    let mut logs = [L::zero(); VECTORS];
    for v in 0..VECTORS {
        // A weight of 0 times -inf would be NaN.
        logs[v] = L::from_array(&vectors[v]).sub(max).mul(scale).max(L::splat(f32::MIN));
    }
    let weights = L::exp_each(logs);
    let mut sums = [L::zero(); VECTORS];
    for v in 0..VECTORS {
        sums[v] = weights[v].zero_where_below(L::from_array(&vectors[v]), floor).mul(logs[v]);
    }
    let mut half = VECTORS / 2;
    while half > 0 {
        for v in 0..half {
            sums[v] = sums[v].add(sums[v + half]);
        }
        half /= 2;
    }
    sums[0]
}

struct SumWeightLnWeight<'a> {
    row: &'a Row<'a>,
    scale: f32,
    bound: LogitBound,
}

impl Kernel for SumWeightLnWeight<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f64 {
        let SumWeightLnWeight { row, scale, bound } = self;
        let blocks = row.logits.as_chunks::<VOCAB_BLOCK>().0;
        let mut total = 0f64;
        for (b, &max) in row.maxima.iter().enumerate() {
            let floor = bound.floor(b);
            if max < floor.unwrap_or(bound.logit) {
                continue;
            }
            let sums = match (floor, blocks.get(b)) {
                (Some(floor), Some(block)) => weight_ln_weight_of_block::<L>(block, row.max, scale, floor),
                _ => weight_ln_weight_of_block::<L>(&bound.kept(row, b), row.max, scale, f32::NEG_INFINITY),
            };
            total += f64::from(sums.sum());
        }
        total
    }
}

/// Replaces the logits of a block by their weights.
struct WeighBlock<'a> {
    block: &'a mut VocabBlock,
    max: f32,
    scale: f32,
}

impl Kernel for WeighBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let exp = Exp { max: self.max, scale: self.scale };
        for vector in self.block.as_chunks_mut::<LANES>().0 {
            *vector = exp.of(L::from_array(vector)).to_array();
        }
    }
}

/// A function of logits, computed lane by lane.
trait OfLogits: Copy {
    fn of<L: Lanes>(self, logits: L) -> L;
}

#[derive(Clone, Copy)]
struct Exp {
    max: f32,
    scale: f32,
}
impl OfLogits for Exp {
    #[inline(always)]
    fn of<L: Lanes>(self, logits: L) -> L {
        logits.sub(L::splat(self.max)).mul(L::splat(self.scale)).exp()
    }
}

#[cfg(test)]
mod tests;
