//! The activations of feed-forward blocks.

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::pool::Cpu;
use super::rows::{Rows, RowsMut};

/// `out[rows, n] = silu(gate) * up`, where each row of `gate_up[rows, 2 n]` has the gates in its first half.
///
/// # Panics
/// If shapes do not agree.
pub fn silu_mul(cpu: &Cpu, gate_up: Rows<'_>, out: RowsMut<'_>) {
    let width = out.width();
    assert_eq!((gate_up.rows(), gate_up.width()), (out.rows(), 2 * width), "rows and twice the width of the output");
    for_segments(cpu, out, |row, column, out| {
        let (gate, up) = gate_up.row(row).split_at(width);
        let (gate, up) = (&gate[column..][..out.len()], &up[column..][..out.len()]);
        cpu.isa().dispatch(SiluMul { gate, up, out });
    });
}

/// `x = gelu(x)`, the exact form `0.5 * x * (1 + erf(x / sqrt(2)))`, to about 5 ulp: 0 for `-inf`.
pub fn gelu(cpu: &Cpu, x: RowsMut<'_>) {
    for_segments(cpu, x, |_, _, x| cpu.isa().dispatch(Gelu { x }));
}

/// Calls `f` with the row, the first column and the values of segments of all rows, so that the threads can share even
/// a single wide row.
fn for_segments(cpu: &Cpu, rows: RowsMut<'_>, f: impl Fn(usize, usize, &mut [f32]) + Sync) {
    const SEGMENT: usize = 1024; // columns
    let (count, width) = (rows.rows(), rows.width());
    let segments = width.div_ceil(SEGMENT);
    let rows = rows.share();
    cpu.for_ranges(count * segments, 4 * width.min(SEGMENT), |from, to| {
        for item in from..to {
            let (row, column) = (item / segments, item % segments * SEGMENT);
            // SAFETY: each segment of a row is in one range.
            f(row, column, unsafe { rows.part(row, column, SEGMENT.min(width - column)) });
        }
    });
}

/// Computes `out = silu(gate) * up` for slices of one length.
pub(super) struct SiluMul<'a> {
    pub gate: &'a [f32],
    pub up: &'a [f32],
    pub out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (gates, gate_tail) = self.gate.as_chunks::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        let (outs, out_tail) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            *out = silu_times(L::from_array(gate), L::from_array(up)).to_array();
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..gate_tail.len()].copy_from_slice(gate_tail);
        up[..up_tail.len()].copy_from_slice(up_tail);
        let last = silu_times(L::from_array(&gate), L::from_array(&up)).to_array();
        out_tail.copy_from_slice(&last[..gate_tail.len()]);
    }
}

/// `silu(gate) * up` in each lane. It is not a closure, which would lack the target features of the kernel.
#[inline(always)]
pub(super) fn silu_times<L: Lanes>(gate: L, up: L) -> L {
    gate.div(L::splat(1.0).add(L::zero().sub(gate).exp())).mul(up)
}

/// Computes `x = gelu(x)`.
struct Gelu<'a> {
    x: &'a mut [f32],
}

impl Kernel for Gelu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (whole, tail) = self.x.as_chunks_mut::<LANES>();
        for x in whole {
            *x = gelu_of(L::from_array(x)).to_array();
        }
        let mut last = [0.0; LANES];
        last[..tail.len()].copy_from_slice(tail);
        tail.copy_from_slice(&gelu_of(L::from_array(&last)).to_array()[..tail.len()]);
    }
}

/// `gelu(x) = max(x, 0) - a Q(a)` for `a = |x|`, where `Q(a) = (1 - erf(a / sqrt(2))) / 2` has no cancellation: it is
/// `e^(-a² / 2) P(q) / (a + 3)` with `q = (a - 3) / (a + 3)` and the polynomial P that is nearest to it.
#[inline(always)]
fn gelu_of<L: Lanes>(x: L) -> L {
    const P: [f32; 8] = [
        -9.090_302_7e-4,
        1.077_120_5e-3,
        6.927_897_6e-3,
        -1.047_966_2e-2,
        -4.725_690_5e-2,
        2.300_192_9e-1,
        -5.093_322_4e-1,
        7.290_836_7e-1,
    ];
    let half = L::splat(-0.5);
    // Q is 0 from 13.2 on. `min` and `max` return their second operand if it is NaN.
    let a = L::splat(16.0).min(x.max(L::zero().sub(x)));
    let inverse = L::splat(1.0).div(a.add(L::splat(3.0)));
    let q = inverse.mul_add(L::splat(-6.0), L::splat(1.0));
    let mut p = L::splat(-2.706_337_9e-4);
    for c in P {
        p = p.mul_add(q, L::splat(c));
    }
    let square = a.mul(a);
    let lost = a.mul_add(a, L::zero().sub(square)); // by rounding the square
    let exp = square.mul(half).exp();
    let exp = exp.mul_add(lost.mul(half), exp);
    let tail = exp.mul(p.mul(inverse));
    L::zero().sub(a).mul_add(tail, x.max(L::zero()))
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::super::testing::{Random, bits, close};
    use super::*;
    use crate::reference;

    #[test]
    fn silu_mul_is_the_reference_and_the_same_bits_on_every_isa() {
        let mut random = Random::new(1);
        for (rows, width) in [(1, 1), (3, 16), (2, 37), (5, 1536), (1, 4864), (40, 1000)] {
            let x = random.normals(rows * 2 * width, 3.0);
            let mut expected = vec![f32::NAN; rows * width];
            reference::silu_mul(Rows::dense(&x, 2 * width), RowsMut::dense(&mut expected, width));
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads) in Isa::available().into_iter().zip([3, 1, 2, 1]) {
                let mut out = vec![f32::NAN; rows * width];
                let cpu = Cpu::with_isa(threads, isa);
                silu_mul(&cpu, Rows::dense(&x, 2 * width), RowsMut::dense(&mut out, width));
                for (y, expected) in out.iter().zip(&expected) {
                    close(*y, f64::from(*expected), 1e-6, isa.name());
                }
                assert_eq!(first.get_or_insert(out.clone()), &out, "{}", isa.name());
            }
        }
    }

    #[test]
    fn gelu_is_the_reference_and_the_same_bits_on_every_isa() {
        let mut random = Random::new(2);
        let specials = [0.0, -0.0, 1e-40, -1e-40, 13.0, -13.0, 1e9, -1e9, f32::MAX, f32::MIN, f32::INFINITY];
        for (rows, width) in [(1, 1), (3, 16), (2, 37), (5, 5120), (1, 40_000), (40, 1000)] {
            let deviation = [0.1, 1.0, 4.0][random.below(3)];
            let mut x = random.normals(rows * width, deviation);
            x.iter_mut().zip(specials).skip(1).step_by(2).for_each(|(x, special)| *x = special);
            let mut expected = x.clone();
            reference::gelu(RowsMut::dense(&mut expected, width));
            let mut first: Option<Vec<f32>> = None;
            for (isa, threads) in Isa::available().into_iter().zip([3, 1, 2, 1]) {
                let mut out = x.clone();
                gelu(&Cpu::with_isa(threads, isa), RowsMut::dense(&mut out, width));
                for ((y, expected), x) in out.iter().zip(&expected).zip(&x) {
                    let is_close = (y - expected).abs() <= 1e-6 * expected.abs() + 1e-37;
                    assert!(is_close || y == expected, "{}: gelu({x}) = {y}, expected {expected}", isa.name());
                }
                assert_eq!(bits(first.get_or_insert(out.clone())), bits(&out), "{}", isa.name());
            }
        }
    }

    #[test]
    fn gelu_of_what_is_not_finite_is_its_limit() {
        for isa in Isa::available() {
            let mut x = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0];
            gelu(&Cpu::with_isa(1, isa), RowsMut::dense(&mut x, 4));
            assert!(x[0] == f32::INFINITY && x[1] == 0.0 && x[2].is_nan() && x[3] > 0.8, "{}: {x:?}", isa.name());
        }
    }
}
