//! Finds the tokens above a logit, a histogram of the logits, and the tokens of one of its bins.

use super::{Exp, OfLogits, Row, VOCAB_BLOCK, VocabBlock, padded};
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::lanes::{LANES, Lanes};

/// Bins of a [`histogram`]. In a flat row of 150,000 tokens each has some hundred of them.
pub const BINS: usize = 512;

/// Copies of a histogram. Together they take 16 KiB, half of a first-level cache.
const COPIES: usize = 4;
/// The constant that, added to a float32 of `[0, BINS)`, leaves the nearest integer in the low bits.
const TO_INTEGER: f32 = 8_388_608.0; // 2^23

/// A token that a filter or the sampler may choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub logit: f32,
    /// The weight `e^((logit - max) * scale)`, not normalised.
    pub weight: f32,
    pub id: u32,
}

/// Fills `out` with the tokens whose logit is at least `floor`, in the order of ids. NaN is skipped.
pub fn candidates(isa: Isa, row: &Row<'_>, floor: f32, scale: f32, out: &mut Vec<Candidate>) {
    out.clear();
    isa.dispatch(Gather { row, key: Logit, from: floor, to: f32::INFINITY, scale, out });
}

/// A cut of the logits into [`BINS`] bins, ascending. The last bin has the maximum; the first has all logits below the
/// others.
#[derive(Clone, Copy, Debug)]
pub struct Bins {
    max: f32,
    per_logit: f32,
}

impl Bins {
    /// Bins that reach from `max` to about `depth > 0` below it.
    pub fn new(max: f32, depth: f32) -> Bins {
        Bins { max, per_logit: (BINS as f32 / depth).clamp(f32::MIN_POSITIVE, f32::MAX) }
    }
}

/// The value that a [`histogram`] adds for each token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Measure {
    Count,
    /// The token's [`weight`](Candidate::weight) at this scale.
    Mass(f32),
}

/// The sum of the measure over the tokens of each bin, in float64. The sum of the first bin is incomplete, since blocks
/// without a token above it are skipped. The row must have a finite maximum and no NaN.
pub fn histogram(isa: Isa, row: &Row<'_>, bins: Bins, measure: Measure) -> [f64; BINS] {
    match measure {
        Measure::Count => isa.dispatch(Histogram { row, bins, weight: One }),
        Measure::Mass(scale) => isa.dispatch(Histogram { row, bins, weight: Exp { max: row.max, scale } }),
    }
}

/// Fills `out` with the tokens of one bin, in the order of ids.
pub fn candidates_of_bin(isa: Isa, row: &Row<'_>, bins: Bins, bin: usize, scale: f32, out: &mut Vec<Candidate>) {
    out.clear();
    let bin = bin as f32 + TO_INTEGER;
    isa.dispatch(Gather { row, key: bins, from: bin, to: bin, scale, out });
}

// No closures from here on: they would be compiled without the target features of the kernels, see [`super`].

#[derive(Clone, Copy)]
struct Logit;
impl OfLogits for Logit {
    #[inline(always)]
    fn of<L: Lanes>(self, logits: L) -> L {
        logits
    }
}

#[derive(Clone, Copy)]
struct One;
impl OfLogits for One {
    #[inline(always)]
    fn of<L: Lanes>(self, _: L) -> L {
        L::splat(1.0)
    }
}

/// The number of each logit's bin, plus [`TO_INTEGER`].
impl OfLogits for Bins {
    #[inline(always)]
    fn of<L: Lanes>(self, logits: L) -> L {
        let height = logits.sub(L::splat(self.max)).mul_add(L::splat(self.per_logit), L::splat((BINS - 1) as f32));
        height.max(L::zero()).add(L::splat(TO_INTEGER))
    }
}

/// Collects the tokens whose key is in `from..=to`. Keys must never rise where logits fall.
struct Gather<'a, K> {
    row: &'a Row<'a>,
    key: K,
    from: f32,
    to: f32,
    scale: f32,
    out: &'a mut Vec<Candidate>,
}

impl<K: OfLogits> Kernel for Gather<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let (blocks, rest) = self.row.logits.as_chunks::<VOCAB_BLOCK>();
        for (b, block) in blocks.iter().enumerate() {
            self.block::<L>(b, block);
        }
        if !rest.is_empty() {
            self.block::<L>(blocks.len(), &padded(rest));
            // The padding may have passed too: its tokens are beyond the row.
            while self.out.last().is_some_and(|c| c.id as usize >= self.row.logits.len()) {
                self.out.pop();
            }
        }
    }
}

impl<K: OfLogits> Gather<'_, K> {
    #[inline(always)]
    fn block<L: Lanes>(&mut self, b: usize, block: &VocabBlock) {
        if self.key.of(L::splat(self.row.maxima[b])).to_array()[0] < self.from {
            return;
        }
        let exp = Exp { max: self.row.max, scale: self.scale };
        for (v, vector) in block.as_chunks::<LANES>().0.iter().enumerate() {
            let mut hits = self.key.of(L::from_array(vector)).within(self.from, self.to);
            if hits == 0 {
                continue;
            }
            let weights = exp.of(L::from_array(vector)).to_array();
            while hits != 0 {
                let l = hits.trailing_zeros() as usize;
                let id = (b * VOCAB_BLOCK + v * LANES + l) as u32;
                self.out.push(Candidate { logit: vector[l], weight: weights[l], id });
                hits &= hits - 1;
            }
        }
    }
}

struct Histogram<'a, W> {
    row: &'a Row<'a>,
    bins: Bins,
    weight: W,
}

impl<W: OfLogits> Kernel for Histogram<'_, W> {
    type Output = [f64; BINS];

    #[inline(always)]
    fn run<L: Lanes>(self) -> [f64; BINS] {
        // Neighbours often fall into one bin. With several copies an addition rarely waits for the one before.
        let mut copies = [[0f64; COPIES]; BINS];
        let (blocks, rest) = self.row.logits.as_chunks::<VOCAB_BLOCK>();
        for (block, &max) in blocks.iter().zip(self.row.maxima) {
            self.block::<L>(block, max, &mut copies);
        }
        if !rest.is_empty() {
            self.block::<L>(&padded(rest), self.row.maxima[blocks.len()], &mut copies);
        }
        let mut bin_sums = [0f64; BINS];
        for (sum, copies) in bin_sums.iter_mut().zip(&copies) {
            for copy in copies {
                *sum += copy;
            }
        }
        bin_sums
    }
}

impl<W: OfLogits> Histogram<'_, W> {
    #[inline(always)]
    fn block<L: Lanes>(&self, block: &VocabBlock, max: f32, copies: &mut [[f64; COPIES]; BINS]) {
        if bin(self.bins.of(L::splat(max)).to_array()[0]) == 0 {
            return; // no token above the first bin
        }
        let (mut keys, mut weights) = ([0f32; VOCAB_BLOCK], [0f32; VOCAB_BLOCK]);
        let vectors = block.as_chunks::<LANES>().0.iter();
        let results = keys.as_chunks_mut::<LANES>().0.iter_mut().zip(weights.as_chunks_mut::<LANES>().0);
        for (vector, (keys, weights)) in vectors.zip(results) {
            let x = L::from_array(vector);
            (*keys, *weights) = (self.bins.of(x).to_array(), self.weight.of(x).to_array());
        }
        for (keys, weights) in keys.as_chunks::<COPIES>().0.iter().zip(weights.as_chunks::<COPIES>().0) {
            for i in 0..COPIES {
                copies[bin(keys[i])][i] += f64::from(weights[i]);
            }
        }
    }
}

/// The number of the bin that a key stands for.
#[inline(always)]
fn bin(key: f32) -> usize {
    key.to_bits() as usize % BINS
}
