//! The operators of mixture-of-experts layers, on every device.

use std::ops::Range;

use rollout_kernels::{
    Matrix, MatrixShape, NOT_FORCED, Router, Routing, RoutingShape, Scoring, StorageDtype, TensorView, expert_groups,
};

use super::common::{Random, Rank, close, devices, reference, values_of};

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];

fn matrix(rank: &Rank, dtype: StorageDtype, k: usize, weights: &[f32]) -> Matrix {
    let mut matrix = rank.device.zeros(MatrixShape { dtype, n: weights.len() / k, k, leaves: 1 }).unwrap();
    matrix.write_rows(0, TensorView::F32(weights));
    matrix
}

/// A layer with random weights and inputs.
struct Layer {
    rows: usize,
    experts: usize,
    top_k: usize,
    hidden: usize,
    width: usize,
    dtype: StorageDtype,
    normalise: bool,
    x: Vec<f32>,
    gate: Vec<f32>,
    bias: Option<Vec<f32>>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

impl Layer {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (experts, top_k) = [(8, 2), (60, 4), (6, 3), (16, 8)][seed as usize % 4];
        let (rows, hidden, width) = (random.between(1, 50), 16 * random.between(1, 5), 16 * random.between(1, 4));
        Self {
            rows,
            experts,
            top_k,
            hidden,
            width,
            dtype: DTYPES[seed as usize / 4 % 2],
            normalise: random.below(2) == 0,
            x: random.normals(rows * hidden, 1.0),
            gate: random.normals(experts * hidden, 0.3),
            bias: (random.below(2) == 0).then(|| random.normals(experts, 0.1)),
            gate_up: random.normals(experts * 2 * width * hidden, 0.2),
            down: random.normals(experts * hidden * width, 0.2),
        }
    }

    fn shape(&self, local: Range<usize>) -> RoutingShape {
        RoutingShape { rows: self.rows, experts: self.experts, top_k: self.top_k, local, kept_layers: 0 }
    }

    /// Routes all rows for a rank that has these experts.
    fn route(&self, rank: &Rank, local: Range<usize>, forced: Option<&[u16]>) -> Routing {
        let mut routing = rank.device.routing(self.shape(local)).unwrap();
        self.route_as(rank, 0, forced, &mut routing);
        routing
    }

    /// Routes all rows, as layer `layer` of those that are kept.
    fn route_as(&self, rank: &Rank, layer: usize, forced: Option<&[u16]>, routing: &mut Routing) {
        let (gate, bias) = (matrix(rank, self.dtype, self.hidden, &self.gate), self.bias.as_ref());
        let bias = bias.map(|bias| rank.device.upload(bias).unwrap());
        let scoring = bias.as_ref().map_or(Scoring::Softmax, |bias| Scoring::Sigmoid { bias });
        let router = Router { gate: &gate, scoring, normalise: self.normalise, scale: 1.5, layer };
        let (x, logits) = (rank.tensor(&self.x, self.rows, self.hidden), rank.zeros(self.rows, self.experts));
        rank.ops.route(&x, &router, forced, &logits, routing).unwrap();
    }

    /// The part of a matrix of all experts that a rank with these experts has.
    fn part(&self, rank: &Rank, weights: &[f32], k: usize, local: &Range<usize>) -> Matrix {
        let each = weights.len() / self.experts;
        matrix(rank, self.dtype, k, &weights[local.start * each..local.end * each])
    }

    /// `[gated, expert_out]` of the pairs of `rows`, from inputs that are the same on all devices.
    fn products(&self, rank: &Rank, routing: &mut Routing, rows: Range<usize>, x: &[f32], h: &[f32]) -> [Vec<f32>; 2] {
        let (local, pairs) = (routing.shape().local.clone(), routing.shape().most_pairs(rows.len()));
        rank.ops.group_by_expert(routing, rows).unwrap();
        let (gate_up, gated) = (rank.zeros(pairs, 2 * self.width), rank.zeros(pairs, self.width));
        let (x, w) = (rank.tensor(x, self.rows, self.hidden), self.part(rank, &self.gate_up, self.hidden, &local));
        rank.ops.expert_linear_silu_mul(&x, &w, routing, &gate_up, &gated).unwrap();
        let (h, w) =
            (rank.tensor(&h[..pairs * self.width], pairs, self.width), self.part(rank, &self.down, self.width, &local));
        let out = rank.zeros(pairs, self.hidden);
        rank.ops.expert_linear(&h, &w, routing, &out).unwrap();
        [values_of(&gated), values_of(&out)]
    }

    /// The whole block for a rank that has these experts, in runs of `chunk` rows.
    fn block(&self, rank: &Rank, local: Range<usize>, chunk: usize) -> Vec<f32> {
        let mut routing = self.route(rank, local.clone(), None);
        let pairs = routing.shape().most_pairs(chunk);
        let x = rank.tensor(&self.x, self.rows, self.hidden);
        let [gate_up, gated] = [2 * self.width, self.width].map(|width| rank.zeros(pairs, width));
        let (expert_out, out) = (rank.zeros(pairs, self.hidden), rank.zeros(self.rows, self.hidden));
        let [w, down] = [(&self.gate_up, self.hidden), (&self.down, self.width)]
            .map(|(weights, k)| self.part(rank, weights, k, &local));
        for first in (0..self.rows).step_by(chunk) {
            rank.ops.group_by_expert(&mut routing, first..self.rows.min(first + chunk)).unwrap();
            rank.ops.expert_linear_silu_mul(&x, &w, &routing, &gate_up, &gated).unwrap();
            rank.ops.expert_linear(&gated, &down, &routing, &expert_out).unwrap();
            rank.ops.combine(&expert_out, &routing, &out).unwrap();
        }
        values_of(&out)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn routers_and_products_of_experts_are_those_of_the_reference() {
    let reference = reference();
    for seed in 0..16 {
        let layer = Layer::new(seed);
        let (all, mut random) = (0..layer.experts, Random::new(seed));
        let expected = layer.route(&reference, all.clone(), None);
        let experts = expected.read_experts(0..layer.rows).unwrap();
        let h = random.normals(layer.rows * layer.top_k * layer.width, 1.0);
        for rank in devices() {
            let found = layer.route(&rank, all.clone(), None);
            assert_eq!(found.read_experts(0..layer.rows).unwrap(), experts, "{} seed {seed}", rank.name());
            let weights = [&found, &expected].map(|routing| routing.read_weights(0..layer.rows).unwrap());
            for (found, expected) in weights[0].iter().zip(&weights[1]) {
                close(*found, *expected, 2e-6, rank.name());
            }
            // Some devices round the input to bfloat16 before they multiply.
            let seen = |x: &[f32]| if layer.dtype == StorageDtype::Bf16 { rank.seen(x) } else { x.to_vec() };
            let (x, h, rows) = (seen(&layer.x), seen(&h), random.below(layer.rows)..layer.rows);
            let [mut found, mut expected] =
                [&rank, &reference].map(|rank| layer.route(rank, all.clone(), Some(&experts)));
            let found = layer.products(&rank, &mut found, rows.clone(), &x, &h);
            let expected = layer.products(&reference, &mut expected, rows, &x, &h);
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                close(*found, *expected, 1e-5, rank.name());
            }
        }
    }
}

#[test]
fn a_block_is_that_of_the_reference_in_any_chunks_and_on_any_ranks() {
    let reference = reference();
    for seed in 0..16 {
        let layer = Layer { dtype: StorageDtype::F32, ..Layer::new(seed) };
        let expected = layer.block(&reference, 0..layer.experts, layer.rows);
        for rank in devices() {
            let whole = layer.block(&rank, 0..layer.experts, layer.rows);
            for (found, expected) in whole.iter().zip(&expected) {
                close(*found, *expected, 2e-5, rank.name());
            }
            let chunk = Random::new(seed).between(1, layer.rows);
            let in_chunks = layer.block(&rank, 0..layer.experts, chunk);
            assert!(bits(&in_chunks) == bits(&whole), "{} seed {seed}: chunks of {chunk}", rank.name());
            let ranks = expert_groups(layer.experts);
            let each = layer.experts / ranks;
            let part = |i: usize| layer.block(&rank, i * each..(i + 1) * each, chunk);
            let mut sums: Vec<Vec<f32>> = (0..ranks).map(part).collect();
            while sums.len() > 1 {
                let add = |pair: &[Vec<f32>]| pair[0].iter().zip(&pair[1]).map(|(a, b)| a + b).collect();
                sums = sums.chunks(2).map(add).collect();
            }
            assert!(bits(&sums[0]) == bits(&whole), "{} seed {seed}: {ranks} ranks", rank.name());
        }
    }
}

#[test]
fn a_pair_has_the_bits_of_a_linear_layer_of_its_expert_alone() {
    for seed in 0..8 {
        let layer = Layer::new(seed);
        let h = Random::new(seed).normals(layer.rows * layer.top_k * layer.width, 1.0);
        for rank in devices() {
            let mut routing = layer.route(&rank, 0..layer.experts, None);
            let [gated, out] = layer.products(&rank, &mut routing, 0..layer.rows, &layer.x, &h);
            let experts = routing.read_experts(0..layer.rows).unwrap();
            let mut pair = 0;
            for expert in 0..layer.experts {
                let rows = (0..layer.rows)
                    .filter(|row| experts[row * layer.top_k..(row + 1) * layer.top_k].contains(&(expert as u16)));
                for row in rows {
                    let x = rank.tensor(&layer.x[row * layer.hidden..][..layer.hidden], 1, layer.hidden);
                    let h = rank.tensor(&h[pair * layer.width..][..layer.width], 1, layer.width);
                    let local = expert..expert + 1;
                    let [w, down] = [(&layer.gate_up, layer.hidden), (&layer.down, layer.width)]
                        .map(|(weights, k)| layer.part(&rank, weights, k, &local));
                    let [between, alone] = [2 * layer.width, layer.width].map(|width| rank.zeros(1, width));
                    rank.ops.linear_silu_mul(&x, &w, None, &between, &alone).unwrap();
                    let found = &gated[pair * layer.width..][..layer.width];
                    assert!(bits(found) == bits(&values_of(&alone)), "{} seed {seed} pair {pair}", rank.name());
                    let alone = rank.zeros(1, layer.hidden);
                    rank.ops.linear(&h, &down, None, &alone).unwrap();
                    let found = &out[pair * layer.hidden..][..layer.hidden];
                    assert!(bits(found) == bits(&values_of(&alone)), "{} seed {seed} pair {pair}", rank.name());
                    pair += 1;
                }
            }
        }
    }
}

#[test]
fn widths_of_half_panels_pass_through_gate_up_and_others_are_refused() {
    let reference = reference();
    for seed in 0..4 {
        let mut layer = Layer { dtype: StorageDtype::F32, width: 24, ..Layer::new(seed) };
        let mut random = Random::new(seed);
        layer.gate_up = random.normals(layer.experts * 2 * layer.width * layer.hidden, 0.2);
        layer.down = random.normals(layer.experts * layer.hidden * layer.width, 0.2);
        let expected = layer.block(&reference, 0..layer.experts, layer.rows);
        for rank in devices() {
            let found = layer.block(&rank, 0..layer.experts, layer.rows);
            found.iter().zip(&expected).for_each(|(found, expected)| close(*found, *expected, 2e-5, rank.name()));
        }
    }
    for rank in devices().into_iter().filter(|rank| rank.name() != "cuda") {
        let layer = Layer::new(0);
        let mut routing = layer.route(&rank, 0..layer.experts, None);
        rank.ops.group_by_expert(&mut routing, 0..layer.rows).unwrap();
        let (w, pairs) = (matrix(&rank, StorageDtype::F32, 16, &vec![0.0; layer.experts * 20 * 16]), layer.rows * 2);
        let (x, out) = (rank.zeros(pairs, 16), rank.zeros(pairs, 20));
        let refused = rank.ops.expert_linear(&x, &w, &routing, &out).unwrap_err().to_string();
        assert_eq!(refused, "experts of 20 outputs: the CPU takes multiples of 16", "{}", rank.name());
    }
}

#[test]
fn gated_shared_experts_are_those_of_the_reference() {
    let reference = reference();
    for (seed, (rows, width)) in [(1, 1), (3, 20), (9, 1024)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (gates, shared) = (random.normals(rows, 2.0), random.normals(rows * width, 0.5));
        let old = random.normals(rows * width, 2.0);
        let run = |rank: &Rank| {
            let [shared, out] = [&shared, &old].map(|values| rank.tensor(values, rows, width));
            rank.ops.add_gated(&rank.tensor(&gates, rows, 1), &shared, &out).unwrap();
            values_of(&out)
        };
        let expected = run(&reference);
        for rank in devices() {
            run(&rank).iter().zip(&expected).for_each(|(found, expected)| close(*found, *expected, 1e-6, rank.name()));
        }
    }
}

#[test]
fn logits_that_are_not_finite_make_the_weights_of_their_row_nan_and_no_others() {
    for seed in 0..8 {
        let mut layer = Layer { rows: 9, ..Layer::new(seed) };
        let (mut random, top_k) = (Random::new(seed), layer.top_k);
        layer.x = random.normals(layer.rows * layer.hidden, 1.0);
        let finite = layer.x.clone();
        for (row, value) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX].into_iter().enumerate() {
            layer.x[2 * row * layer.hidden + random.below(layer.hidden)] = value;
        }
        // The product with the largest float is infinite for this expert.
        layer.gate[5 * layer.hidden..6 * layer.hidden].fill(4.0);
        let last: Vec<u16> = (layer.experts as u16 - top_k as u16..layer.experts as u16).collect();
        for rank in devices() {
            let all = 0..layer.experts;
            let found = layer.route(&rank, all.clone(), None);
            let forced = layer.route(&rank, all.clone(), Some(&last.repeat(layer.rows)));
            let others = Layer { x: finite.clone(), ..Layer::new(seed) };
            let others = Layer { rows: 9, gate: layer.gate.clone(), ..others }.route(&rank, all, None);
            for row in 0..layer.rows {
                let (is_broken, rows) = (row % 2 == 0 && row < 8, row..row + 1);
                let [weights, of_forced, expected] =
                    [&found, &forced, &others].map(|routing| routing.read_weights(rows.clone()).unwrap());
                for weights in [&weights, &of_forced] {
                    assert_eq!(weights.iter().all(|w| w.is_nan()), is_broken, "{} seed {seed}: {row}", rank.name());
                }
                let [experts, of_forced] = [&found, &forced].map(|routing| routing.read_experts(rows.clone()).unwrap());
                if is_broken {
                    assert_eq!(experts, (0..top_k as u16).collect::<Vec<_>>(), "{} seed {seed}: {row}", rank.name());
                    assert_eq!(of_forced, last, "{} seed {seed}: {row}", rank.name());
                } else {
                    assert!(bits(&weights) == bits(&expected), "{} seed {seed}: {row}", rank.name());
                }
            }
        }
    }
}

#[test]
fn of_equal_scores_the_lower_number_is_chosen() {
    let reference = reference();
    for seed in 0..8 {
        let (mut layer, mut random) = (Layer::new(seed), Random::new(seed));
        let twins: Vec<usize> = (0..layer.experts).map(|_| random.below(layer.experts.div_ceil(3))).collect();
        let (base, hidden) = (layer.gate.clone(), layer.hidden);
        for (gate, twin) in layer.gate.chunks_mut(hidden).zip(&twins) {
            gate.copy_from_slice(&base[twin * hidden..][..hidden]);
        }
        layer.bias = layer.bias.map(|bias| twins.iter().map(|twin| bias[*twin]).collect());
        let routed = |rank: &Rank| layer.route(rank, 0..layer.experts, None).read_experts(0..layer.rows).unwrap();
        let expected = routed(&reference);
        for rank in devices() {
            assert_eq!(routed(&rank), expected, "{} seed {seed}", rank.name());
        }
    }
}

#[test]
fn rows_are_routed_alone_and_replayed_with_the_bits_of_the_batch() {
    for seed in 0..8 {
        let (mut layer, mut random) = (Layer { rows: 70, ..Layer::new(seed) }, Random::new(seed));
        let (all, top_k) = (0..layer.experts, layer.top_k);
        layer.x = random.normals(layer.rows * layer.hidden, 1.0);
        for rank in devices() {
            let batch = layer.route(&rank, all.clone(), None);
            let experts = batch.read_experts(0..70).unwrap();
            let weights = bits(&batch.read_weights(0..70).unwrap());
            // Some rows are forced to the experts that they chose, in any order.
            let mut forced = experts.clone();
            for row in forced.chunks_mut(top_k) {
                random.shuffle(row);
                if random.below(3) == 0 {
                    row.fill(NOT_FORCED);
                }
            }
            let replayed = layer.route(&rank, all.clone(), Some(&forced));
            assert_eq!(replayed.read_experts(0..70).unwrap(), experts, "{} seed {seed}", rank.name());
            assert!(bits(&replayed.read_weights(0..70).unwrap()) == weights, "{} seed {seed}", rank.name());
            for row in [0, 33, 69] {
                let x = layer.x[row * layer.hidden..][..layer.hidden].to_vec();
                let alone =
                    Layer { rows: 1, x, gate: layer.gate.clone(), bias: layer.bias.clone(), ..Layer::new(seed) };
                let alone = alone.route(&rank, all.clone(), None);
                let entries = row * top_k..(row + 1) * top_k;
                assert_eq!(alone.read_experts(0..1).unwrap(), experts[entries.clone()], "{} {row}", rank.name());
                assert!(bits(&alone.read_weights(0..1).unwrap()) == weights[entries], "{} {row}", rank.name());
            }
        }
    }
}

#[test]
fn experts_are_kept_of_all_layers_of_a_step() {
    for seed in 0..4 {
        let mut random = Random::new(seed);
        let mut layers: Vec<Layer> = (0..3).map(|_| Layer::new(seed)).collect();
        layers.iter_mut().for_each(|layer| layer.x = random.normals(layer.rows * layer.hidden, 1.0));
        layers[1].x[0] = f32::NAN;
        let (rows, top_k, all) = (layers[0].rows, layers[0].top_k, 0..layers[0].experts);
        let forced: Vec<u16> = (0..rows).flat_map(|_| (0..top_k as u16).rev()).collect();
        for rank in devices() {
            let shape = RoutingShape { kept_layers: layers.len(), ..layers[0].shape(all.clone()) };
            let mut routing = rank.device.routing(shape).unwrap();
            let mut expected = vec![Vec::<u16>::new(); rows];
            for (index, layer) in layers.iter().enumerate() {
                layer.route_as(&rank, index, (index == 2).then_some(&forced), &mut routing);
                let experts = routing.read_experts(0..rows).unwrap();
                expected.iter_mut().zip(experts.chunks(top_k)).for_each(|(row, experts)| row.extend(experts));
            }
            for rows in [rows, 1] {
                let kept = rank.ops.kept_experts(&routing, rows).unwrap().read().unwrap();
                assert_eq!(kept, expected[..rows].concat(), "{} seed {seed}: {rows} rows", rank.name());
            }
        }
    }
}

#[test]
fn sums_over_experts_have_the_documented_order() {
    for seed in 0..8 {
        let (layer, mut random) = (Layer::new(seed), Random::new(seed));
        let (all, rows, top_k, width) = (0..layer.experts, layer.rows, layer.top_k, 300);
        let outputs = random.normals(rows * top_k * width, 1.0);
        let groups = expert_groups(layer.experts);
        for rank in devices() {
            let mut routing = layer.route(&rank, all.clone(), None);
            rank.ops.group_by_expert(&mut routing, 0..rows).unwrap();
            let out = rank.zeros(rows, width);
            rank.ops.combine(&rank.tensor(&outputs, rows * top_k, width), &routing, &out).unwrap();
            let (experts, weights) = (routing.read_experts(0..rows).unwrap(), routing.read_weights(0..rows).unwrap());
            let mut sums = vec![vec![0.0f32; rows * width]; groups];
            let of_expert = |expert: usize| {
                (0..rows * top_k).filter(|entry| usize::from(experts[*entry]) == expert).collect::<Vec<_>>()
            };
            for (pair, entry) in all.clone().flat_map(of_expert).enumerate() {
                let group = usize::from(experts[entry]) / (layer.experts / groups);
                let sum = &mut sums[group][entry / top_k * width..][..width];
                let output = &outputs[pair * width..][..width];
                sum.iter_mut().zip(output).for_each(|(sum, output)| *sum += weights[entry] * output);
            }
            while sums.len() > 1 {
                let add = |pair: &[Vec<f32>]| pair[0].iter().zip(&pair[1]).map(|(a, b)| a + b).collect();
                sums = sums.chunks(2).map(add).collect();
            }
            assert!(bits(&values_of(&out)) == bits(&sums[0]), "{} seed {seed}", rank.name());
        }
    }
}

#[test]
fn what_is_not_routed_cannot_be_read_or_forced() {
    let rank = reference();
    let layer = Layer::new(1);
    let refused = |run: &dyn Fn()| super::panics(run).expect("it is refused");
    let forced = |expert: u16, other: u16| {
        let mut forced = vec![NOT_FORCED; layer.rows * layer.top_k];
        forced[..4].copy_from_slice(&[expert, other, 7, 8]);
        refused(&|| drop(layer.route(&rank, 0..layer.experts, Some(&forced))))
    };
    assert_eq!(forced(60, 1), "a row is forced to expert 60 of 60");
    assert_eq!(forced(NOT_FORCED, 1), "a row is forced to expert 65535 of 60");
    assert_eq!(forced(3, 3), "a row is forced to expert 3 twice");
    let routing = layer.route(&rank, 0..layer.experts, None);
    let text = refused(&|| drop(routing.read_experts(0..layer.rows + 1)));
    assert_eq!(text, format!("rows {:?} of {} that are routed", 0..layer.rows + 1, layer.rows));
    let empty: Vec<u16> = routing.read_experts(0..0).unwrap();
    assert!(empty.is_empty());
}

#[test]
fn a_run_without_rows_computes_nothing() {
    let layer = Layer::new(2);
    for rank in devices() {
        let mut routing = layer.route(&rank, 0..layer.experts, None);
        rank.ops.group_by_expert(&mut routing, 0..0).unwrap();
        let [x, out] = [1.0, 7.0].map(|value| rank.tensor(&vec![value; layer.x.len()], layer.rows, layer.hidden));
        let w = matrix(&rank, layer.dtype, layer.hidden, &layer.gate_up);
        let [gate_up, gated] = [2 * layer.width, layer.width].map(|width| rank.tensor(&vec![7.0; width], 1, width));
        rank.ops.expert_linear_silu_mul(&x, &w, &routing, &gate_up, &gated).unwrap();
        rank.ops.combine(&x, &routing, &out).unwrap();
        assert!([values_of(&gated), values_of(&out)].concat().iter().all(|value| *value == 7.0), "{}", rank.name());
    }
}
