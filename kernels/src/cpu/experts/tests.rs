use half::bf16;

use super::super::isa::Isa;
use super::super::packed::PackedMatrix;
use super::super::pool::Cpu;
use super::super::rows::{Rows, RowsMut};
use super::super::testing::{Random, bits, close};
use super::*;
use crate::backend::storage::MatrixImpl;
use crate::host::{HostRouter, HostRouting};
use crate::reference;
use crate::routing_shape::{NOT_FORCED, RoutingShape, expert_groups};
use crate::values::{StorageDtype, TensorView};
use crate::weights::MatrixShape;

/// A router with rows that it routes.
struct Case {
    x: Vec<f32>,
    gate: Vec<f32>,
    bias: Option<Vec<f32>>,
    hidden: usize,
    experts: usize,
    top_k: usize,
    normalise: bool,
    scale: f32,
    dtype: StorageDtype,
}

fn pack(dtype: StorageDtype, k: usize, weights: &[f32]) -> PackedMatrix {
    let mut matrix = PackedMatrix::zeros(dtype, weights.len() / k, k, 1);
    matrix.write_rows(0, TensorView::F32(weights));
    matrix
}

/// The matrix as the reference has it.
fn row_major(dtype: StorageDtype, k: usize, weights: &[f32]) -> reference::RowMajor {
    let mut matrix = reference::RowMajor::zeros(MatrixShape { dtype, n: weights.len() / k, k, leaves: 1 });
    matrix.write_columns(0, TensorView::F32(weights), k, 0);
    matrix
}

impl Case {
    fn new(random: &mut Random, rows: usize, experts: usize, top_k: usize) -> Case {
        let (hidden, dtype) = (random.between(20, 60), [StorageDtype::F32, StorageDtype::Bf16][random.below(2)]);
        let stored = |gate: f32| if dtype == StorageDtype::Bf16 { bf16::from_f32(gate).to_f32() } else { gate };
        Case {
            x: random.normals(rows * hidden, 1.0),
            gate: random.normals(experts * hidden, 0.3).into_iter().map(stored).collect(),
            dtype,
            bias: (random.below(2) == 0).then(|| random.normals(experts, 0.1)),
            hidden,
            experts,
            top_k,
            normalise: random.below(2) == 0,
            scale: [1.0, 2.5][random.below(2)],
        }
    }

    fn rows(&self) -> usize {
        self.x.len() / self.hidden
    }

    fn router(&self) -> HostRouter<'_> {
        HostRouter { top_k: self.top_k, bias: self.bias.as_deref(), normalise: self.normalise, scale: self.scale }
    }

    fn route(&self, cpu: &Cpu, x: &[f32], forced: Option<&[u16]>) -> (Vec<u16>, Vec<f32>) {
        let gate = pack(self.dtype, self.hidden, &self.gate);
        let (x, rows) = (Rows::dense(x, self.hidden), x.len() / self.hidden);
        let mut routing = self.routing(rows);
        let mut logits = vec![0.0; rows * self.experts];
        let logits = RowsMut::dense(&mut logits, self.experts);
        route(cpu, x, &gate, &self.router(), forced, logits, &mut routing);
        (routing.experts, routing.weights)
    }

    fn routing(&self, rows: usize) -> HostRouting {
        HostRouting::new(&RoutingShape {
            rows,
            experts: self.experts,
            top_k: self.top_k,
            local: 0..self.experts,
            kept_layers: 0,
        })
    }

    fn by_reference(&self, forced: Option<&[u16]>) -> (Vec<u16>, Vec<f32>) {
        let gate = row_major(self.dtype, self.hidden, &self.gate);
        let mut routing = self.routing(self.rows());
        reference::route(Rows::dense(&self.x, self.hidden), &gate, &self.router(), forced, &mut routing);
        (routing.experts, routing.weights)
    }

    /// By how much the last chosen score of a row is above the first that is not chosen, in float64.
    fn gap(&self, row: usize) -> f64 {
        let x = &self.x[row * self.hidden..][..self.hidden];
        let dot = |gate: &[f32]| x.iter().zip(gate).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        let score = |(expert, gate): (usize, &[f32])| match &self.bias {
            None => dot(gate),
            Some(bias) => 1.0 / (1.0 + (-dot(gate)).exp()) + f64::from(bias[expert]),
        };
        let mut scores: Vec<f64> = self.gate.chunks(self.hidden).enumerate().map(score).collect();
        scores.sort_by(|a, b| b.total_cmp(a));
        if self.top_k == self.experts { f64::INFINITY } else { scores[self.top_k - 1] - scores[self.top_k] }
    }
}

fn sorted(experts: &[u16]) -> Vec<u16> {
    let mut experts = experts.to_vec();
    experts.sort_unstable();
    experts
}

#[test]
fn a_hundred_thousand_rows_take_the_experts_that_float64_chooses() {
    let mut undecided = 0;
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let (experts, top_k) = [(8, 2), (60, 4), (128, 8), (64, 1), (5, 5)][seed as usize % 5];
        let case = Case::new(&mut random, 5000, experts, top_k);
        let (found, weights) = case.route(&Cpu::new(2), &case.x, None);
        let (expected, expected_weights) = case.by_reference(None);
        for row in 0..case.rows() {
            let entries = row * top_k..(row + 1) * top_k;
            let (experts, weights) = (&found[entries.clone()], &weights[entries.clone()]);
            assert!(weights.is_sorted_by(|a, b| a >= b), "seed {seed}, row {row}: {weights:?}");
            if case.gap(row) < 1e-5 {
                undecided += 1;
                continue;
            }
            assert_eq!(sorted(experts), sorted(&expected[entries.clone()]), "seed {seed}, row {row}");
            for (weight, expected) in weights.iter().zip(&expected_weights[entries]) {
                close(*weight, f64::from(*expected), 2e-6, &format!("seed {seed}, row {row}"));
            }
        }
    }
    assert!(undecided < 1000, "{undecided} rows are within rounding");
}

#[test]
fn a_rows_routing_has_the_same_bits_on_every_isa_with_any_threads_alone_and_in_a_batch() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let (experts, top_k) = [(8, 2), (60, 4), (128, 8), (17, 16)][seed as usize % 4];
        let case = Case::new(&mut random, 70, experts, top_k);
        let (experts, weights) = case.route(&Cpu::new(1), &case.x, None);
        for isa in Isa::all() {
            for threads in [1, 2, 3] {
                let (found, found_weights) = case.route(&Cpu::with_isa(threads, isa), &case.x, None);
                assert_eq!((&found, bits(&found_weights)), (&experts, bits(&weights)), "seed {seed}, {}", isa.name());
            }
            let cpu = Cpu::with_isa(2, isa);
            for row in [0, 33, 69] {
                let (alone, alone_weights) = case.route(&cpu, &case.x[row * case.hidden..][..case.hidden], None);
                let entries = row * top_k..(row + 1) * top_k;
                assert_eq!((&alone[..], bits(&alone_weights)), (&experts[entries.clone()], bits(&weights[entries])));
            }
        }
    }
}

#[test]
fn of_equal_scores_the_lower_number_is_chosen() {
    for seed in 0..8 {
        let mut random = Random::new(seed);
        let (experts, top_k) = (24, 6);
        let mut case = Case::new(&mut random, 200, experts, top_k);
        // Each gate three times, dealt out at random.
        let twin: Vec<usize> = (0..experts).map(|_| random.below(8)).collect();
        let base = case.gate.clone();
        for (expert, twin) in twin.iter().enumerate() {
            case.gate[expert * case.hidden..][..case.hidden]
                .copy_from_slice(&base[twin * case.hidden..][..case.hidden]);
        }
        if let Some(bias) = &mut case.bias {
            let base = bias.clone();
            bias.iter_mut().zip(&twin).for_each(|(bias, twin)| *bias = base[*twin]);
        }
        let (found, _) = case.route(&Cpu::new(2), &case.x, None);
        for experts in found.chunks(top_k) {
            for expert in experts.iter().map(|expert| usize::from(*expert)) {
                let lower = (0..expert).filter(|other| twin[*other] == twin[expert]);
                let are_chosen = lower.into_iter().all(|other| experts.contains(&(other as u16)));
                assert!(are_chosen, "seed {seed}: {expert} of {experts:?} before a lower one of {twin:?}");
            }
        }
        assert_eq!(found, case.by_reference(None).0, "seed {seed}");
    }
    let mut case = Case::new(&mut Random::new(1), 3, 10, 4);
    (case.bias, case.normalise, case.scale) = (None, true, 1.0);
    case.gate.fill(0.0);
    let (experts, weights) = case.route(&Cpu::new(1), &case.x, None);
    assert_eq!((experts, weights), ([0, 1, 2, 3].repeat(3), vec![0.25; 12]));
}

#[test]
fn logits_that_are_not_finite_make_the_weights_of_their_row_nan_and_no_others() {
    for seed in 0..10 {
        let mut random = Random::new(seed);
        let mut case = Case::new(&mut random, 9, 12, 3);
        for (row, value) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX].into_iter().enumerate() {
            case.x[2 * row * case.hidden + random.below(case.hidden)] = value;
        }
        // The product with the largest float is infinite for this expert.
        case.gate[5 * case.hidden..6 * case.hidden].fill(4.0);
        let (_, changed) = case.route(&Cpu::new(1), &case.x, None);
        let forced: Vec<u16> = [11, 4, 7].repeat(9);
        for forced in [None, Some(&forced[..])] {
            for isa in Isa::all() {
                let (found, found_weights) = case.route(&Cpu::with_isa(2, isa), &case.x, forced);
                for row in 0..9 {
                    let entries = row * 3..row * 3 + 3;
                    let is_broken = row % 2 == 0 && row < 8;
                    let expected: &[u16] = if forced.is_some() { &[11, 4, 7] } else { &[0, 1, 2] };
                    if is_broken {
                        assert_eq!(&found[entries.clone()], expected, "seed {seed}, row {row}");
                    }
                    let are_nan = found_weights[entries.clone()].iter().all(|weight| weight.is_nan());
                    assert_eq!(are_nan, is_broken, "seed {seed}, {}, row {row}", isa.name());
                    if !is_broken && forced.is_none() {
                        assert_eq!(bits(&found_weights[entries.clone()]), bits(&changed[entries]), "seed {seed}");
                    }
                }
            }
        }
    }
}

#[test]
fn forced_rows_take_what_they_are_given_with_the_routers_own_weights() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let (experts, top_k) = [(8, 2), (60, 4), (128, 8)][seed as usize % 3];
        let case = Case::new(&mut random, 60, experts, top_k);
        let cpu = Cpu::with_isa(2, Isa::all()[random.below(Isa::all().len())]);
        let (free, free_weights) = case.route(&cpu, &case.x, None);
        // Some rows are forced to the experts that they chose, in any order; the others are free.
        let mut replayed = free.clone();
        for row in replayed.chunks_mut(top_k) {
            random.shuffle(row);
            if random.below(3) == 0 {
                row.fill(NOT_FORCED);
            }
        }
        let (found, weights) = case.route(&cpu, &case.x, Some(&replayed));
        assert_eq!((found, bits(&weights)), (free.clone(), bits(&free_weights)), "seed {seed}");
        // Other experts, for every second row.
        let mut numbers: Vec<u16> = (0..experts as u16).collect();
        let mut forced = vec![NOT_FORCED; free.len()];
        for row in forced.chunks_mut(top_k).step_by(2) {
            random.shuffle(&mut numbers);
            row.copy_from_slice(&numbers[..top_k]);
        }
        let (found, weights) = case.route(&cpu, &case.x, Some(&forced));
        let (expected, expected_weights) = case.by_reference(Some(&forced));
        for row in 0..case.rows() {
            let entries = row * top_k..(row + 1) * top_k;
            if row % 2 == 1 {
                assert_eq!(found[entries.clone()], free[entries.clone()], "seed {seed}, row {row}");
                assert_eq!(bits(&weights[entries.clone()]), bits(&free_weights[entries]), "seed {seed}, row {row}");
                continue;
            }
            assert_eq!(sorted(&found[entries.clone()]), sorted(&expected[entries.clone()]), "seed {seed}, row {row}");
            for (weight, expected) in weights[entries.clone()].iter().zip(&expected_weights[entries]) {
                close(*weight, f64::from(*expected), 2e-6, &format!("seed {seed}, row {row}"));
            }
        }
    }
}

#[test]
fn forced_experts_far_below_the_others_still_weigh_one_together() {
    let mut case = Case::new(&mut Random::new(3), 1, 4, 2);
    (case.bias, case.normalise, case.scale) = (None, true, 1.0);
    case.x.fill(1.0);
    for (gate, value) in case.gate.chunks_mut(case.hidden).zip([500.0, -500.0, -500.0, 400.0]) {
        gate.fill(value / case.hidden as f32);
    }
    let (_, weights) = case.route(&Cpu::new(1), &case.x, Some(&[2, 1]));
    assert_eq!(weights, [0.5, 0.5]);
}

/// Random pairs of rows with experts, their outputs, and the shape with all experts.
fn routed(random: &mut Random, rows: usize) -> (RoutingShape, HostRouting, Vec<f32>, usize) {
    let experts = [8, 16, 60, 6, 64][random.below(5)];
    let (top_k, width) = (random.between(1, 6), random.between(1, 70));
    let shape = RoutingShape { rows, experts, top_k, local: 0..experts, kept_layers: 0 };
    let mut routing = HostRouting::new(&shape);
    let mut numbers: Vec<u16> = (0..experts as u16).collect();
    for row in routing.experts.chunks_mut(top_k) {
        random.shuffle(&mut numbers);
        row.copy_from_slice(&numbers[..top_k]);
    }
    routing.weights = random.normals(rows * top_k, 0.3);
    // The output of each (row, expert), some of which is -0.
    let mut outputs = random.normals(rows * experts * width, 1.0);
    outputs.iter_mut().step_by(7).for_each(|output| *output = -0.0);
    routing.weights.iter_mut().step_by(5).for_each(|weight| *weight = 0.0);
    (shape, routing, outputs, width)
}

/// The sum over the experts of `shape`, computed in runs of `chunk` rows.
fn combined(
    cpu: &Cpu,
    shape: &RoutingShape,
    routing: &mut HostRouting,
    outputs: &[f32],
    width: usize,
    chunk: usize,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; shape.rows * width];
    for first in (0..shape.rows).step_by(chunk) {
        let rows = first..shape.rows.min(first + chunk);
        routing.group(shape, rows.clone());
        let output = |(row, expert): (usize, usize)| &outputs[(row * shape.experts + expert) * width..][..width];
        let pairs = shape.local.clone().flat_map(|expert| {
            let of_expert = routing.starts[expert - shape.local.start]..routing.starts[expert - shape.local.start + 1];
            of_expert.map(move |pair| (pair, expert))
        });
        let mut expert_out: Vec<f32> = pairs
            .flat_map(|(pair, expert)| output((routing.tokens[pair as usize] as usize, expert)))
            .copied()
            .collect();
        expert_out.extend(vec![f32::NAN; width]);
        let (x, out) = (Rows::dense(&expert_out, width), RowsMut::dense(&mut out, width));
        combine(cpu, x, routing, shape, rows, out);
    }
    out
}

#[test]
fn the_tree_of_ranks_is_the_sum_of_one_rank_on_every_isa_and_in_any_chunks() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let rows = random.between(1, 40);
        let (shape, mut routing, outputs, width) = routed(&mut random, rows);
        let whole = combined(&Cpu::new(1), &shape, &mut routing, &outputs, width, rows);
        for isa in Isa::all() {
            let (cpu, chunk) = (Cpu::with_isa(random.between(1, 3), isa), random.between(1, rows));
            let found = combined(&cpu, &shape, &mut routing, &outputs, width, chunk);
            assert_eq!(bits(&found), bits(&whole), "seed {seed}, {}, chunks of {chunk}", isa.name());
        }
        for ranks in [2, 4, 8].into_iter().filter(|ranks| *ranks <= expert_groups(shape.experts)) {
            let each = shape.experts / ranks;
            let part = |rank: usize| {
                let shape = RoutingShape { local: rank * each..(rank + 1) * each, ..shape.clone() };
                shape.check();
                let mut part = HostRouting::new(&shape);
                (part.experts, part.weights) = (routing.experts.clone(), routing.weights.clone());
                combined(&Cpu::new(2), &shape, &mut part, &outputs, width, rows)
            };
            let mut sums: Vec<Vec<f32>> = (0..ranks).map(part).collect();
            while sums.len() > 1 {
                let add = |pair: &[Vec<f32>]| pair[0].iter().zip(&pair[1]).map(|(a, b)| a + b).collect();
                sums = sums.chunks(2).map(add).collect();
            }
            assert_eq!(bits(&sums[0]), bits(&whole), "seed {seed}, {ranks} ranks of {} experts", shape.experts);
        }
    }
}

#[test]
fn combined_rows_are_those_of_the_reference() {
    for seed in 0..10 {
        let mut random = Random::new(seed);
        let (shape, mut routing, outputs, width) = routed(&mut random, 20);
        let found = combined(&Cpu::new(2), &shape, &mut routing, &outputs, width, 20);
        for row in 0..20 {
            let entries = row * shape.top_k..(row + 1) * shape.top_k;
            let chosen: Vec<_> = routing.experts[entries.clone()].iter().zip(&routing.weights[entries]).collect();
            for column in 0..width {
                let output = |expert: u16| outputs[(row * shape.experts + usize::from(expert)) * width + column];
                let term = |(expert, weight): &(&u16, &f32)| f64::from(**weight) * f64::from(output(**expert));
                let expected = chosen.iter().map(term).sum();
                close(found[row * width + column], expected, 2e-6, &format!("seed {seed}, row {row}"));
            }
        }
    }
}

#[test]
fn a_gated_shared_expert_is_the_reference_and_the_same_bits_on_every_isa() {
    let mut random = Random::new(6);
    for (rows, width) in [(1, 1), (3, 35), (40, 1024)] {
        let (gates, shared) = (random.normals(rows, 2.0), random.normals(rows * width, 0.5));
        let old = random.normals(rows * width, 2.0);
        let mut expected = old.clone();
        let (gates, shared) = (Rows::dense(&gates, 1), Rows::dense(&shared, width));
        reference::add_gated(gates, shared, RowsMut::dense(&mut expected, width));
        let mut first: Option<Vec<u32>> = None;
        for (isa, threads) in Isa::all().into_iter().zip([3, 1, 2].into_iter().cycle()) {
            let mut out = old.clone();
            add_gated(&Cpu::with_isa(threads, isa), gates, shared, RowsMut::dense(&mut out, width));
            for (y, expected) in out.iter().zip(&expected) {
                close(*y, f64::from(*expected), 1e-6, isa.name());
            }
            assert_eq!(first.get_or_insert(bits(&out)), &bits(&out), "{}", isa.name());
        }
    }
}
