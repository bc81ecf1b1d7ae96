//! The gated activation of the feed-forward block.

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::pool::Cpu;
use super::rows::{Rows, RowsMut};

/// `out[rows, n] = silu(gate) * up`, where each row of `gate_up[rows, 2 n]` has the gates in its first half.
///
/// # Panics
/// If shapes do not agree.
pub fn silu_mul(cpu: &Cpu, gate_up: Rows<'_>, out: RowsMut<'_>) {
    let (rows, width) = (out.rows(), out.width());
    assert_eq!((gate_up.rows(), gate_up.width()), (rows, 2 * width), "rows and twice the width of the output");
    const SEGMENT: usize = 1024; // columns of one item, so that the threads can share even a single wide row
    let segments = width.div_ceil(SEGMENT);
    let out = out.share();
    cpu.for_ranges(rows * segments, 4 * width.min(SEGMENT), |from, to| {
        for item in from..to {
            let (row, column) = (item / segments, item % segments * SEGMENT);
            let len = SEGMENT.min(width - column);
            let (gate, up) = gate_up.row(row).split_at(width);
            // SAFETY: each segment of a row is in one range.
            let out = unsafe { out.part(row, column, len) };
            cpu.isa().dispatch(SiluMul { gate: &gate[column..][..len], up: &up[column..][..len], out });
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

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::super::testing::{Random, close};
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
}
