//! Normalisation of rows, and the scaled sum behind it. Terms are summed in 4 accumulators of 16 lanes, which are then
//! added as a tree.

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use super::pool::Cpu;
use super::rows::{Rows, RowsMut};

/// `out = x / sqrt(mean(x²) + eps) * weight`, row by row.
///
/// # Panics
/// If shapes do not agree.
pub fn rms_norm(cpu: &Cpu, x: Rows<'_>, weight: &[f32], eps: f32, out: RowsMut<'_>) {
    assert_eq!((out.rows(), out.width()), (x.rows(), x.width()), "rows and width of the output");
    assert_eq!(weight.len(), x.width(), "length of the weight");
    let out = out.share();
    cpu.for_ranges(x.rows(), 2 * x.width(), |from, to| {
        for i in from..to {
            // SAFETY: each row is in one range.
            let out = unsafe { out.row(i) };
            out.copy_from_slice(x.row(i));
            normalise(cpu.isa(), out, weight, eps);
        }
    });
}

/// `residual += x (+ x_bias)`, then `out = rms_norm(residual)`, row by row.
///
/// # Panics
/// If shapes do not agree.
pub fn add_rms_norm(
    cpu: &Cpu,
    residual: RowsMut<'_>,
    x: Rows<'_>,
    x_bias: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
    out: RowsMut<'_>,
) {
    let shape = (x.rows(), x.width());
    assert_eq!((residual.rows(), residual.width()), shape, "rows and width of the residual");
    assert_eq!((out.rows(), out.width()), shape, "rows and width of the output");
    assert_eq!(weight.len(), x.width(), "length of the weight");
    assert!(x_bias.is_none_or(|b| b.len() == x.width()), "length of the bias");
    let (residual, out) = (residual.share(), out.share());
    cpu.for_ranges(x.rows(), 4 * x.width(), |from, to| {
        for i in from..to {
            // SAFETY: each row is in one range.
            let (residual, out) = unsafe { (residual.row(i), out.row(i)) };
            match x_bias {
                None => residual.iter_mut().zip(x.row(i)).for_each(|(r, x)| *r += x),
                Some(b) => residual.iter_mut().zip(x.row(i)).zip(b).for_each(|((r, x), b)| *r += x + b),
            }
            out.copy_from_slice(residual);
            normalise(cpu.isa(), out, weight, eps);
        }
    });
}

/// Normalises every head by itself, in place: each row of `x` has heads of `weight.len()` elements.
///
/// # Panics
/// If the width of `x` is not a whole number of heads.
pub fn head_rms_norm(cpu: &Cpu, x: RowsMut<'_>, weight: &[f32], eps: f32) {
    assert!(!weight.is_empty() && x.width().is_multiple_of(weight.len()), "heads of {} in a row", weight.len());
    let (rows, width) = (x.rows(), x.width());
    let x = x.share();
    cpu.for_ranges(rows, 2 * width, |from, to| {
        for i in from..to {
            // SAFETY: each row is in one range.
            let row = unsafe { x.row(i) };
            row.chunks_mut(weight.len()).for_each(|head| normalise(cpu.isa(), head, weight, eps));
        }
    });
}

/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, row by row.
///
/// # Panics
/// If shapes do not agree.
pub fn layer_norm(cpu: &Cpu, x: Rows<'_>, weight: &[f32], bias: &[f32], eps: f32, out: RowsMut<'_>) {
    assert_eq!((out.rows(), out.width()), (x.rows(), x.width()), "rows and width of the output");
    assert_eq!((weight.len(), bias.len()), (x.width(), x.width()), "lengths of weight and bias");
    let out = out.share();
    cpu.for_ranges(x.rows(), 4 * x.width(), |from, to| {
        for i in from..to {
            // SAFETY: each row is in one range.
            let out = unsafe { out.row(i) };
            let (x, count) = (x.row(i), out.len() as f32);
            let mean = cpu.isa().dispatch(Sum(x)) / count;
            out.iter_mut().zip(x).for_each(|(out, x)| *out = x - mean);
            let variance = cpu.isa().dispatch(SumOfSquares(out)) / count;
            cpu.isa().dispatch(Scale { x: out, scale: 1.0 / (variance + eps).sqrt(), weight });
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        }
    });
}

/// `out += scale * x`, row by row, with one factor for each column.
///
/// # Panics
/// If shapes do not agree.
pub fn add_scaled(cpu: &Cpu, x: Rows<'_>, scale: &[f32], out: RowsMut<'_>) {
    assert_eq!((out.rows(), out.width()), (x.rows(), x.width()), "rows and widths that are added");
    assert_eq!(scale.len(), x.width(), "length of the scale");
    let out = out.share();
    cpu.for_ranges(x.rows(), x.width(), |from, to| {
        for i in from..to {
            // SAFETY: each row is in one range.
            let out = unsafe { out.row(i) };
            out.iter_mut().zip(x.row(i)).zip(scale).for_each(|((out, x), scale)| *out += scale * x);
        }
    });
}

fn normalise(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) {
    let mean = isa.dispatch(SumOfSquares(x)) / x.len() as f32;
    isa.dispatch(Scale { x, scale: 1.0 / (mean + eps).sqrt(), weight });
}

struct Sum<'a>(&'a [f32]);

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        sum_of::<L, false>(self.0)
    }
}

struct SumOfSquares<'a>(&'a [f32]);

impl Kernel for SumOfSquares<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        sum_of::<L, true>(self.0)
    }
}

/// The sum of the values, or with `SQUARED` that of their squares.
#[inline(always)]
fn sum_of<L: Lanes, const SQUARED: bool>(values: &[f32]) -> f32 {
    let mut acc = [L::zero(); 4];
    let (blocks, rest) = values.as_chunks::<{ 4 * LANES }>();
    for block in blocks {
        for (acc, x) in acc.iter_mut().zip(block.as_chunks::<LANES>().0) {
            let x = L::from_array(x);
            *acc = if SQUARED { x.mul_add(x, *acc) } else { x.add(*acc) };
        }
    }
    for (acc, tail) in acc.iter_mut().zip(rest.chunks(LANES)) {
        let x = L::from_array(&std::array::from_fn(|i| tail.get(i).copied().unwrap_or(0.0)));
        *acc = if SQUARED { x.mul_add(x, *acc) } else { x.add(*acc) };
    }
    acc[0].add(acc[1]).add(acc[2].add(acc[3])).sum()
}

struct Scale<'a> {
    x: &'a mut [f32],
    scale: f32,
    weight: &'a [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (x, weight) in self.x.iter_mut().zip(self.weight) {
            *x = *x * self.scale * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, close};
    use super::*;
    use crate::reference;

    fn check(isa: Isa, out: &[f32], x: &[f32], weight: &[f32], eps: f32) {
        let mut expected = vec![f32::NAN; x.len()];
        let width = weight.len();
        reference::rms_norm(Rows::dense(x, width), weight, eps, RowsMut::dense(&mut expected, width));
        for (y, expected) in out.iter().zip(&expected) {
            close(*y, f64::from(*expected), 2e-6, isa.name());
        }
    }

    #[test]
    fn rms_norm_is_the_reference_and_the_same_bits_on_every_isa() {
        let mut random = Random::new(2);
        for (rows, width) in [(1, 1), (3, 16), (4, 100), (7, 576), (33, 896), (2, 4097)] {
            let (x, weight) = (random.normals(rows * width, 2.0), random.normals(width, 1.0));
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads) in Isa::available().into_iter().zip([3, 1, 2, 1]) {
                let mut out = vec![f32::NAN; rows * width];
                let cpu = Cpu::with_isa(threads, isa);
                rms_norm(&cpu, Rows::dense(&x, width), &weight, 1e-5, RowsMut::dense(&mut out, width));
                check(isa, &out, &x, &weight, 1e-5);
                assert_eq!(first.get_or_insert(out.clone()), &out, "{}", isa.name());
            }
        }
    }

    #[test]
    fn add_rms_norm_adds_the_bias_to_x_first_and_keeps_the_sum() {
        let mut random = Random::new(3);
        let (rows, width) = (37, 200);
        let (x, old) = (random.normals(rows * width, 1.0), random.normals(rows * width, 1.0));
        let (weight, bias) = (random.normals(width, 1.0), random.normals(width, 1.0));
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(2, isa);
            for bias in [None, Some(&bias[..])] {
                let (mut residual, mut out) = (old.clone(), vec![f32::NAN; rows * width]);
                let views = (RowsMut::dense(&mut residual, width), RowsMut::dense(&mut out, width));
                add_rms_norm(&cpu, views.0, Rows::dense(&x, width), bias, &weight, 1e-6, views.1);
                for i in 0..rows * width {
                    assert_eq!(residual[i], old[i] + bias.map_or(x[i], |b| x[i] + b[i % width]));
                }
                check(isa, &out, &residual, &weight, 1e-6);
            }
        }
    }

    #[test]
    fn head_rms_norm_takes_every_head_by_itself_inside_wider_rows() {
        let mut random = Random::new(4);
        let (rows, heads, head_dim, stride) = (9, 3, 80, 300);
        let old = random.normals(rows * stride, 1.0);
        let weight = random.normals(head_dim, 1.0);
        for isa in Isa::available() {
            let mut x = old.clone();
            let cpu = Cpu::with_isa(2, isa);
            head_rms_norm(&cpu, RowsMut::new(&mut x, rows, heads * head_dim, stride), &weight, 1e-6);
            for (new, old) in x.chunks(stride).zip(old.chunks(stride)) {
                check(isa, &new[..heads * head_dim], &old[..heads * head_dim], &weight, 1e-6);
                assert_eq!(new[heads * head_dim..], old[heads * head_dim..]);
            }
        }
    }

    #[test]
    fn layer_norm_is_the_reference_and_the_same_bits_on_every_isa_even_far_from_zero() {
        let mut random = Random::new(5);
        for (rows, width, mean) in [(1, 1, 0.0), (3, 16, 1.0), (4, 100, -30.0), (33, 1024, 0.5), (2, 4097, 10.0)] {
            let x: Vec<f32> = random.normals(rows * width, 2.0).into_iter().map(|x| x + mean).collect();
            let (weight, bias) = (random.normals(width, 1.0), random.normals(width, 1.0));
            let mut expected = vec![f32::NAN; rows * width];
            reference::layer_norm(Rows::dense(&x, width), &weight, &bias, 1e-6, RowsMut::dense(&mut expected, width));
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads) in Isa::available().into_iter().zip([3, 1, 2, 1]) {
                let mut out = vec![f32::NAN; rows * width];
                let cpu = Cpu::with_isa(threads, isa);
                layer_norm(&cpu, Rows::dense(&x, width), &weight, &bias, 1e-6, RowsMut::dense(&mut out, width));
                for (y, expected) in out.iter().zip(&expected) {
                    // The mean is rounded to a unit of its own size.
                    close(*y, f64::from(*expected), 4e-6 * f64::from(1.0 + mean.abs()), isa.name());
                }
                assert_eq!(first.get_or_insert(out.clone()), &out, "{}", isa.name());
            }
        }
    }

    #[test]
    fn add_scaled_is_the_reference_and_the_same_bits_on_every_isa() {
        let mut random = Random::new(6);
        for (rows, width) in [(1, 1), (3, 35), (40, 1024)] {
            let (x, old) = (random.normals(rows * width, 1.0), random.normals(rows * width, 1.0));
            let scale = random.normals(width, 0.5);
            let mut expected = old.clone();
            reference::add_scaled(Rows::dense(&x, width), &scale, RowsMut::dense(&mut expected, width));
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads) in Isa::available().into_iter().zip([3, 1, 2, 1]) {
                let mut out = old.clone();
                let cpu = Cpu::with_isa(threads, isa);
                add_scaled(&cpu, Rows::dense(&x, width), &scale, RowsMut::dense(&mut out, width));
                for (y, expected) in out.iter().zip(&expected) {
                    close(*y, f64::from(*expected), 1e-6, isa.name());
                }
                assert_eq!(first.get_or_insert(out.clone()), &out, "{}", isa.name());
            }
        }
    }
}
