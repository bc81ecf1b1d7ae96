use super::super::super::lanes::LANES;
use super::super::super::testing::{Random, bits};
use super::super::{linear, linear_silu_mul};
use super::*;
use crate::cpu::Rows;
use crate::values::TensorView;

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];

/// The rows of each product, drawn in one of the ways in which experts may share them.
fn shares(random: &mut Random, products: usize, rows: usize) -> Vec<usize> {
    let mut counts = vec![0; products];
    match random.below(4) {
        0 => counts[random.below(products)] = rows,
        1 => counts.fill(1),
        2 => (0..rows).for_each(|_| counts[random.below(products)] += 1),
        _ => counts.iter_mut().step_by(2).for_each(|count| *count = random.below(rows)),
    }
    counts
}

struct Case {
    x: Vec<f32>,
    tokens: Vec<u32>,
    starts: Vec<u32>,
    weights: Vec<f32>,
    dtype: StorageDtype,
    /// Rows of a part of the matrix, and its columns.
    n: usize,
    k: usize,
}

fn matrix(dtype: StorageDtype, k: usize, weights: &[f32]) -> PackedMatrix {
    let mut matrix = PackedMatrix::zeros(dtype, weights.len() / k, k, 1);
    matrix.write_rows(0, TensorView::F32(weights));
    matrix
}

impl Case {
    fn new(random: &mut Random, dtype: StorageDtype, most: usize) -> Case {
        let (products, rows) = (random.between(1, 6), random.between(1, most));
        let (n, k) = (2 * LANES * random.between(1, 6), random.between(1, 120));
        let ends = shares(random, products, rows).into_iter().scan(0, |end, count| {
            *end += count as u32;
            Some(*end)
        });
        let starts: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let tokens = (0..starts[products]).map(|_| random.below(rows) as u32).collect();
        let (x, weights) = (random.normals(rows * k, 1.0), random.normals(products * n * k, 0.5));
        Case { x, tokens, starts, weights, dtype, n, k }
    }

    /// The outputs of all products in one job.
    fn together(&self, cpu: &Cpu, gated: bool) -> Vec<f32> {
        let width = if gated { self.n / 2 } else { self.n };
        let mut out = vec![7.0; (self.tokens.len() + 1) * (width + 3)];
        let x = SelectedRows::of(Rows::dense(&self.x, self.k), &self.tokens);
        let rows = RowsMut::new(&mut out, self.tokens.len() + 1, width, width + 3);
        let w = matrix(self.dtype, self.k, &self.weights);
        if gated {
            grouped_linear_silu_mul(cpu, x, &w, &self.starts, rows);
        } else {
            grouped_linear(cpu, x, &w, &self.starts, rows);
        }
        out
    }

    /// The same outputs, of each product alone and with a matrix of its own.
    fn alone(&self, cpu: &Cpu, gated: bool) -> Vec<f32> {
        let (k, width) = (self.k, if gated { self.n / 2 } else { self.n });
        let mut out = vec![7.0; (self.tokens.len() + 1) * (width + 3)];
        for (product, weights) in self.weights.chunks(self.n * k).enumerate() {
            let pairs = self.starts[product] as usize..self.starts[product + 1] as usize;
            let row = |token: &u32| &self.x[*token as usize * k..][..k];
            let x: Vec<f32> = self.tokens[pairs.clone()].iter().flat_map(row).copied().collect();
            if pairs.is_empty() {
                continue;
            }
            let rows = RowsMut::new(&mut out[pairs.start * (width + 3)..], pairs.len(), width, width + 3);
            let (x, w) = (Rows::dense(&x, k), matrix(self.dtype, k, weights));
            if gated { linear_silu_mul(cpu, x, &w, None, rows) } else { linear(cpu, x, &w, None, rows) }
        }
        out
    }
}

#[test]
fn a_product_among_others_has_the_bits_that_it_has_alone() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let most = [3, 40, 250][seed as usize % 3];
        let case = Case::new(&mut random, DTYPES[seed as usize / 3 % 2], most);
        for isa in Isa::all().into_iter().filter(|isa| most < 100 || isa.name() != "scalar") {
            let threads = random.between(1, 3);
            for gated in [false, true] {
                let together = case.together(&Cpu::with_isa(threads, isa), gated);
                let alone = case.alone(&Cpu::with_isa(2, isa), gated);
                assert_eq!(
                    bits(&together),
                    bits(&alone),
                    "seed {seed}, {}, gated {gated}, {:?}",
                    isa.name(),
                    case.starts
                );
            }
        }
    }
}

#[test]
fn long_reductions_and_many_rows_pass_through_several_chunks_and_blocks() {
    let mut random = Random::new(1);
    for dtype in DTYPES {
        let (n, k, starts) = (64, 2064, vec![0, 170, 170, 171, 200]);
        let tokens = (0..200).map(|_| random.below(50) as u32).collect();
        let (x, weights) = (random.normals(50 * k, 1.0), random.normals(4 * n * k, 0.2));
        let case = Case { x, tokens, starts, weights, dtype, n, k };
        for isa in Isa::all().into_iter().filter(|isa| isa.name() != "scalar" && !isa.is_emulated()) {
            for gated in [false, true] {
                let together = case.together(&Cpu::with_isa(3, isa), gated);
                let alone = case.alone(&Cpu::with_isa(1, isa), gated);
                assert_eq!(bits(&together), bits(&alone), "{} {dtype:?} gated {gated}", isa.name());
            }
        }
    }
}
