//! Passes over one row of logits `[vocab]`, float32: maximum, sum of exponentials, inverse CDF, candidates.
//!
//! A row is cut into blocks of [`BLOCK`] tokens. Inside a block the sum has a fixed number of lanes and a fixed tree,
//! and the blocks are added in order in float64: the same bits on every instruction set and for every caller. What the
//! first passes learn per block lets the later ones touch only the few blocks that matter.

use super::math;

/// Tokens per block: short enough that the k-th largest block maximum is a tight bound of the k-th largest logit.
pub const BLOCK: usize = 128;
const LANES: usize = 32;

/// A token that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub logit: f32,
    /// `e^((logit - max) * scale)`, not normalised.
    pub weight: f32,
    pub id: u32,
}

/// Calls the body compiled for the widest instruction set that this machine has.
macro_rules! dispatch {
    ($body:ident($($arg:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                // SAFETY: the features that the function is compiled with were just detected.
                unsafe { avx512::$body($($arg),*) }
            } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: as above.
                unsafe { avx2::$body($($arg),*) }
            } else {
                $body($($arg),*)
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        $body($($arg),*)
    }};
}
/// Fills `maxima` with the maximum of each block and returns that of the row. NaN is passed over; an empty or all-NaN
/// block has `-inf`.
pub fn block_max(row: &[f32], maxima: &mut Vec<f32>) -> f32 {
    maxima.clear();
    dispatch!(block_max_body(row, maxima))
}

/// Fills `sums` with `Σ e^((x - max) * scale)` of each block and returns that of the row. `max` is finite, `scale > 0`;
/// `-inf` adds 0 and NaN makes the sum NaN.
pub fn block_sum_exp(row: &[f32], max: f32, scale: f32, sums: &mut Vec<f32>) -> f64 {
    sums.clear();
    dispatch!(block_sum_exp_body(row, max, scale, sums))
}

/// The first token, in order of ids, at which the running sum of `e^((x - max) * scale)` exceeds `target`, a value in
/// `[0, total)`. `sums` is [`block_sum_exp`]'s of the same arguments, with a positive total. A token whose exponential
/// is 0 is never returned.
pub fn inverse_cdf(row: &[f32], max: f32, scale: f32, sums: &[f32], target: f64) -> usize {
    dispatch!(inverse_cdf_body(row, max, scale, sums, target))
}

/// Fills `out` with the tokens whose logit is at least `floor`, in order of ids, passing over NaN. `maxima` is
/// [`block_max`]'s of this row.
pub fn candidates(row: &[f32], maxima: &[f32], floor: f32, max: f32, scale: f32, out: &mut Vec<Candidate>) {
    out.clear();
    dispatch!(candidates_body(row, maxima, floor, max, scale, out));
}

macro_rules! versions {
    ($($features:literal $module:ident),*) => {$(
        #[cfg(target_arch = "x86_64")]
        mod $module {
            use super::Candidate;

            #[target_feature(enable = $features)]
            pub fn block_max_body(row: &[f32], maxima: &mut Vec<f32>) -> f32 {
                super::block_max_body(row, maxima)
            }

            #[target_feature(enable = $features)]
            pub fn block_sum_exp_body(row: &[f32], max: f32, scale: f32, sums: &mut Vec<f32>) -> f64 {
                super::block_sum_exp_body(row, max, scale, sums)
            }

            #[target_feature(enable = $features)]
            pub fn inverse_cdf_body(row: &[f32], max: f32, scale: f32, sums: &[f32], target: f64) -> usize {
                super::inverse_cdf_body(row, max, scale, sums, target)
            }

            #[target_feature(enable = $features)]
            pub fn candidates_body(
                row: &[f32],
                maxima: &[f32],
                floor: f32,
                max: f32,
                scale: f32,
                out: &mut Vec<Candidate>,
            ) {
                super::candidates_body(row, maxima, floor, max, scale, out)
            }
        }
    )*};
}
versions!("avx512f,fma" avx512, "avx2,fma" avx2);

// No closures from here on: one is compiled without the features of the function that calls it, and unless the compiler
// happens to inline it, every `mul_add` in it becomes a library call.

/// The tokens after the last whole block, filled up with `-inf`.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; BLOCK] {
    let mut block = [f32::NEG_INFINITY; BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    block
}

#[inline(always)]
fn block_max_body(row: &[f32], maxima: &mut Vec<f32>) -> f32 {
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    for block in blocks {
        maxima.push(max_of_block(block));
    }
    if !rest.is_empty() {
        maxima.push(max_of_block(&padded(rest)));
    }
    let mut max = f32::NEG_INFINITY;
    for &m in maxima.iter() {
        max = larger(max, m);
    }
    max
}

#[inline(always)]
fn block_sum_exp_body(row: &[f32], max: f32, scale: f32, sums: &mut Vec<f32>) -> f64 {
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    for block in blocks {
        sums.push(sum_exp_of_block(block, max, scale));
    }
    if !rest.is_empty() {
        sums.push(sum_exp_of_block(&padded(rest), max, scale));
    }
    let mut total = 0f64;
    for &sum in sums.iter() {
        total += f64::from(sum);
    }
    total
}

/// `b` if it is larger, else `a` (also if `b` is NaN).
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
fn max_of_block(block: &[f32; BLOCK]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in block.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], chunk[l]);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = larger(lanes[l], lanes[l + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn sum_exp_of_block(block: &[f32; BLOCK], max: f32, scale: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    for chunk in block.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] += math::exp((chunk[l] - max) * scale);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn inverse_cdf_body(row: &[f32], max: f32, scale: f32, sums: &[f32], target: f64) -> usize {
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
    let start = block * BLOCK;
    let tokens = &row[start..row.len().min(start + BLOCK)];
    // Rounding may leave the running sum of the block's tokens a little short of the block's sum: then it is its last.
    let mut choice = None;
    for (i, &x) in tokens.iter().enumerate() {
        let weight = math::exp((x - max) * scale);
        if weight > 0.0 {
            choice = Some(start + i);
            running += f64::from(weight);
            if running > target {
                break;
            }
        }
    }
    choice.expect("a block with a positive sum has a token with a positive weight")
}

#[inline(always)]
fn candidates_body(row: &[f32], maxima: &[f32], floor: f32, max: f32, scale: f32, out: &mut Vec<Candidate>) {
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    for (b, block) in blocks.iter().enumerate() {
        if maxima[b] >= floor {
            push_candidates(block, b * BLOCK, floor, max, scale, out);
        }
    }
    if !rest.is_empty() && maxima[blocks.len()] >= floor {
        push_candidates(&padded(rest), blocks.len() * BLOCK, floor, max, scale, out);
        // With a floor of `-inf` the padding has passed too.
        while out.last().is_some_and(|c| c.id as usize >= row.len()) {
            out.pop();
        }
    }
}

#[inline(always)]
fn push_candidates(block: &[f32; BLOCK], start: usize, floor: f32, max: f32, scale: f32, out: &mut Vec<Candidate>) {
    let mut weights = [0f32; BLOCK];
    for i in 0..BLOCK {
        weights[i] = math::exp((block[i] - max) * scale);
    }
    // Written always, kept only if it passes: no branch to mispredict.
    let mut len = out.len();
    out.resize(len + BLOCK, Candidate { logit: 0.0, weight: 0.0, id: 0 });
    for i in 0..BLOCK {
        out[len] = Candidate { logit: block[i], weight: weights[i], id: (start + i) as u32 };
        len += usize::from(block[i] >= floor);
    }
    out.truncate(len);
}

#[cfg(test)]
mod tests;
