//! Passes over one row of logits `[vocab]`, float32: maximum and sum of exponentials, inverse CDF, candidates,
//! histogram.
//!
//! A row is cut into blocks of [`BLOCK`] tokens. A block's exponentials are relative to the block's own maximum, so
//! that one reading of the row gives both; they are added in a fixed tree, then scaled to the row's maximum, and the
//! blocks are added in a fixed order in float64: the same bits on every instruction set and for every caller. What the
//! first pass learns per block lets the later ones touch only the blocks that matter.

#![allow(clippy::needless_range_loop)] // indices, so that vectors stay in registers

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};

mod select;
pub use select::{BINS, Bins, Candidate, Measure, candidates, candidates_of_bin, histogram};

/// Tokens per block: short enough that the k-th largest block maximum is a tight bound of the k-th largest logit.
pub const BLOCK: usize = 128;
const VECTORS: usize = BLOCK / LANES;
/// Blocks whose maxima are found before their exponentials are added: no addition waits for a maximum, and their logits
/// are still in the first-level cache.
const BLOCKS_AT_ONCE: usize = 32;
/// A row with what [`summarise`] has found.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    pub logits: &'a [f32],
    /// The largest logit of each block.
    pub maxima: &'a [f32],
    pub max: f32,
}

/// The last token that is kept, in the order of descending logits, ties by ascending id.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    pub logit: f32,
    pub id: u32,
}

impl Bound {
    /// Keeps every token.
    pub const NONE: Bound = Bound { logit: f32::NEG_INFINITY, id: u32::MAX };

    pub fn keeps(&self, logit: f32, id: u32) -> bool {
        logit > self.logit || (logit == self.logit && id <= self.id)
    }

    /// The one that keeps fewer.
    pub fn tighter(self, other: Bound) -> Bound {
        if self.keeps(other.logit, other.id) { other } else { self }
    }

    /// The lowest logit that is kept of a block, unless that depends on the token.
    #[inline(always)]
    fn floor(&self, block: usize) -> Option<f32> {
        let start = block * BLOCK;
        if start + BLOCK - 1 <= self.id as usize {
            Some(self.logit)
        } else if start > self.id as usize {
            Some(self.logit.next_up())
        } else {
            None
        }
    }

    /// A block's logits, those that are not kept or beyond the row `-inf`.
    fn kept(&self, row: &Row<'_>, block: usize) -> [f32; BLOCK] {
        let start = block * BLOCK;
        let mut kept = [f32::NEG_INFINITY; BLOCK];
        for (i, (kept, &logit)) in kept.iter_mut().zip(&row.logits[start..]).enumerate() {
            if self.keeps(logit, (start + i) as u32) {
                *kept = logit;
            }
        }
        kept
    }
}

/// Fills `maxima` with the maximum of each block and `sums` with its `Σ e^((x - max) * scale)`, and returns the row's
/// maximum and sum; `scale > 0`. NaN is passed over by maxima (an empty or all-NaN block has `-inf`) and makes sums
/// NaN, as `+inf` does; `-inf` adds 0.
pub fn summarise(isa: Isa, logits: &[f32], scale: f32, maxima: &mut Vec<f32>, sums: &mut Vec<f32>) -> (f32, f64) {
    isa.dispatch(Summarise { logits, scale, maxima, sums })
}

/// Fills `sums` with `Σ e^((x - max) * scale)` of each block's tokens that `bound` keeps, and returns that of the row.
/// The row has a finite maximum and no NaN. With [`Bound::NONE`] the same bits as [`summarise`].
pub fn sum_exp(isa: Isa, row: &Row<'_>, scale: f32, bound: Bound, sums: &mut Vec<f32>) -> f64 {
    isa.dispatch(SumExp { row, scale, bound, sums })
}

/// The first token, in order of ids, at which the running sum of `e^((x - max) * scale)` over the kept ones exceeds
/// `target`, a value in `[0, total)`. `sums` is [`sum_exp`]'s of the same arguments, with a positive total. A token
/// whose exponential is 0 is never returned.
pub fn inverse_cdf(isa: Isa, row: &Row<'_>, scale: f32, bound: Bound, sums: &[f32], target: f64) -> usize {
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
    isa.dispatch(Weights { block: &mut weights, max: row.max, scale });
    // Rounding may leave the running sum of the block's tokens a little short of the block's sum: then it is its last.
    let mut choice = None;
    for (i, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            choice = Some(block * BLOCK + i);
            running += f64::from(weight);
            if running > target {
                break;
            }
        }
    }
    choice.expect("a block with a positive sum has a token with a positive weight")
}

// No closures from here on: one is compiled without the features of the kernel that it is part of, and unless the
// compiler happens to inline it, every operation on lanes becomes a call.

type Block = [f32; BLOCK];

/// The tokens after the last whole block, filled up with `-inf`.
#[inline(always)]
fn padded(rest: &[f32]) -> Block {
    let mut block = [f32::NEG_INFINITY; BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// Asks for the block whose maximum is due when the processor has added those of this turn.
#[inline(always)]
fn fetch<L: Lanes>(block: &Block) {
    let ahead = block.as_ptr().wrapping_add(BLOCKS_AT_ONCE * BLOCK);
    for v in 0..VECTORS {
        L::prefetch_near(ahead.wrapping_add(v * LANES).cast());
    }
}

/// The largest of a block in each lane.
#[inline(always)]
fn max_of_block<L: Lanes>(block: &Block) -> L {
    let (vectors, lowest) = (block.as_chunks::<LANES>().0, L::splat(f32::NEG_INFINITY));
    let (mut even, mut odd) = (lowest, lowest);
    for pair in vectors.as_chunks::<2>().0 {
        even = L::from_array(&pair[0]).max(even);
        odd = L::from_array(&pair[1]).max(odd);
    }
    even.max(odd)
}

/// `Σ e^((x - max) * scale)` of the tokens not below `floor` in each lane, where `max` is the block's maximum.
#[inline(always)]
fn sum_of_block<L: Lanes, const ALL: bool>(block: &Block, max: f32, scale: f32, floor: f32) -> L {
    // Without a token there is nothing to be relative to: this leaves -inf what it is.
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

/// Makes sums that are relative to each block's maximum relative to the row's, and adds them.
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
        let (blocks, rest) = logits.as_chunks::<BLOCK>();
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
    bound: Bound,
    sums: &'a mut Vec<f32>,
}

impl Kernel for SumExp<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f64 {
        let SumExp { row, scale, bound, sums } = self;
        sums.clear();
        let (blocks, rest) = row.logits.as_chunks::<BLOCK>();
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

/// Makes logits weights.
struct Weights<'a> {
    block: &'a mut Block,
    max: f32,
    scale: f32,
}

impl Kernel for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let exp = Exp { max: self.max, scale: self.scale };
        for vector in self.block.as_chunks_mut::<LANES>().0 {
            *vector = exp.of(L::from_array(vector)).to_array();
        }
    }
}

/// A function of logits.
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
