//! Weights that are stored, copied and merged have the CPU's bits, which are PEFT's.

use half::{bf16, f16};
use rollout_kernels::{
    Backend, DeviceOptions, Dtype, LoraDelta, LowRank, MAX_LEAVES, Magnitude, Matrix, MatrixShape, Merge, MergeBase,
    Replacement, StorageDtype, TensorData, TensorView, WeightChange,
};

use crate::common::{Random, Rank, cuda, stored, values_of};

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];

fn cpu() -> Rank {
    let device = Backend::Cpu.open(&DeviceOptions { threads: 2, ..DeviceOptions::default() }).unwrap();
    Rank { ops: device.ops(), device }
}

/// The bits of all values of a matrix.
fn bits(matrix: &Matrix) -> Vec<u32> {
    let mut values = vec![f32::NAN; matrix.n() * matrix.k()];
    matrix.read_f32(0, &mut values);
    values.into_iter().map(f32::to_bits).collect()
}

/// Any number of leaves that `k` can be cut into.
fn leaves(random: &mut Random, k: usize) -> usize {
    let fitting: Vec<usize> =
        (0..).map(|i| 1 << i).take_while(|&n| n <= MAX_LEAVES && (n == 1 || k.is_multiple_of(2 * n))).collect();
    fitting[random.below(fitting.len())]
}

/// A weight `[rows, cols]` of which a matrix has some columns, with the places of its rows.
struct Weight {
    rows: usize,
    cols: usize,
    first_row: usize,
    columns: std::ops::Range<usize>,
    shape: MatrixShape,
    base: Vec<f32>,
}

impl Weight {
    fn new(random: &mut Random, dtype: StorageDtype, most_rows: usize, most_cols: usize) -> Self {
        let (rows, cols) = (random.between(1, most_rows), random.between(1, most_cols));
        let start = random.below(cols);
        let columns = [0..cols, start..random.between(start + 1, cols)][random.below(2)].clone();
        let (first_row, k) = (random.below(5), columns.len());
        let shape = MatrixShape { dtype, n: first_row + rows + random.below(4), k, leaves: leaves(random, k) };
        let mut base: Vec<f32> = random.normals(rows * cols, 1.0).into_iter().map(|x| stored(x, dtype)).collect();
        base[0] = -0.0;
        Self { rows, cols, first_row, columns, shape, base }
    }

    /// The bits of a new matrix after the merges, one for each kind of base that the change can have.
    fn merged(&self, rank: &Rank, change: &WeightChange) -> Vec<Vec<u32>> {
        let read = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>, out: &mut [f32]| {
            let rows = self.base.chunks_exact(self.cols).take(rows.end).skip(rows.start);
            out.chunks_exact_mut(columns.len()).zip(rows).for_each(|(out, row)| {
                out.copy_from_slice(&row[columns.clone()]);
            });
        };
        let merge = |base| {
            let mut w = rank.device.zeros(self.shape).unwrap();
            let Self { columns, cols: width, rows, .. } = self;
            let merge = Merge { change, base, rows: 0..*rows, columns: columns.clone(), width: *width };
            rank.ops.merge_rows(&mut w, self.first_row, &merge).unwrap();
            bits(&w)
        };
        let whole = rank.tensor(&self.base, self.rows, self.cols);
        let mut found = vec![merge(MergeBase::Read(&read)), merge(MergeBase::WholeRows(&whole))];
        if self.columns == (0..self.cols) || !change.needs_whole_rows() {
            let mut copy = rank.device.zeros(MatrixShape { n: self.rows, leaves: 1, ..self.shape }).unwrap();
            copy.write_columns(0, TensorView::F32(&self.base), self.cols, self.columns.start);
            found.push(merge(MergeBase::Matrix(&copy)));
        }
        found
    }

    fn low_rank(&self, random: &mut Random, rank: usize) -> LowRank {
        LowRank {
            rank,
            cols: self.cols,
            a: TensorData::F32(random.normals(rank * self.cols, 1.0).into()),
            b: TensorData::F32(random.normals(self.rows * rank, 0.1).into()),
            product: Dtype::F32,
            scaling: [0.7, -2.0, 1.0][random.below(3)],
            roundings: vec![],
            magnitude: None,
            linear: true,
        }
    }

    fn magnitude(&self, random: &mut Random) -> Magnitude {
        let lengths = random.normals(self.rows, 3.0).into_iter().map(f32::abs).collect();
        let [sum, factor] = [0, 1].map(|_| [Dtype::F32, Dtype::F16, Dtype::Bf16][random.below(3)]);
        Magnitude { lengths, sum, factor }
    }

    /// Values that a matrix of this type holds exactly.
    fn replacement(&self, random: &mut Random) -> Option<Replacement> {
        let values = random.normals(self.rows * self.cols, 1.0);
        let values = match (self.shape.dtype, random.below(3)) {
            (StorageDtype::Bf16, _) | (_, 0) => TensorData::Bf16(values.into_iter().map(bf16::from_f32).collect()),
            (_, 1) => TensorData::F16(values.into_iter().map(f16::from_f32).collect()),
            _ => TensorData::F32(values.into()),
        };
        Some(Replacement { values, cols: self.cols })
    }

    /// A change of every kind.
    fn changes(&self, random: &mut Random, rank: usize) -> Vec<WeightChange> {
        let roundings = [vec![Dtype::F16], vec![Dtype::Bf16], vec![Dtype::F32, Dtype::F16, Dtype::Bf16]];
        let rounded = LowRank { roundings: roundings[random.below(3)].clone(), ..self.low_rank(random, rank) };
        let [a, b] = [(rank * self.cols, 1.0), (self.rows * rank, 0.1)]
            .map(|(len, size)| TensorData::Bf16(random.normals(len, size).into_iter().map(bf16::from_f32).collect()));
        let product = [Dtype::Bf16, Dtype::F16][random.below(2)];
        let of_experts = LowRank { a, b, product, roundings: vec![product], ..self.low_rank(random, rank) };
        let dora = LowRank { magnitude: Some(self.magnitude(random)), ..self.low_rank(random, rank) };
        let of =
            |replacement, delta: Option<LowRank>| WeightChange { replacement, delta: delta.map(LoraDelta::LowRank) };
        vec![
            of(None, None),
            of(None, Some(self.low_rank(random, rank))),
            of(None, Some(rounded)),
            of(None, Some(of_experts)),
            of(None, Some(dora)),
            of(self.replacement(random), None),
            of(self.replacement(random), Some(self.low_rank(random, rank))),
        ]
    }
}

#[test]
fn merged_weights_have_the_bits_of_the_cpu() {
    let (cuda, cpu) = (cuda().unwrap(), cpu());
    let ranks = [1, 2, 15, 16, 17, 40, 64, 9];
    for seed in 0..16 {
        let mut random = Random::new(seed);
        let weight = Weight::new(&mut random, DTYPES[seed as usize % 2], 150, 140);
        let rank = ranks[seed as usize / 2];
        for (kind, change) in weight.changes(&mut random, rank).iter().enumerate() {
            let (found, expected) = (weight.merged(&cuda, change), weight.merged(&cpu, change));
            assert!(found == expected, "seed {seed}: change {kind}, rank {rank}, {:?}", weight.shape);
        }
    }
}

#[test]
fn a_sum_of_the_largest_rank_has_the_bits_of_the_cpu() {
    let (cuda, cpu) = (cuda().unwrap(), cpu());
    for dtype in DTYPES {
        let mut random = Random::new(7);
        let weight = Weight::new(&mut random, dtype, 140, 70);
        let change = weight.low_rank(&mut random, 384);
        let change = WeightChange { replacement: None, delta: Some(LoraDelta::LowRank(change)) };
        assert!(weight.merged(&cuda, &change) == weight.merged(&cpu, &change), "{:?}", weight.shape);
    }
}

#[test]
fn an_adapter_of_zeros_gives_the_bits_of_the_base_and_every_merge_those_of_the_first() {
    let cuda = cuda().unwrap();
    for dtype in DTYPES {
        let mut random = Random::new(3);
        let weight = Weight { first_row: 0, ..Weight::new(&mut random, dtype, 20, 40) };
        let of = |low_rank| WeightChange { replacement: None, delta: Some(LoraDelta::LowRank(low_rank)) };
        let zero =
            of(LowRank { b: TensorData::F32(vec![0.0; weight.rows * 5].into()), ..weight.low_rank(&mut random, 5) });
        let [with_zero, unchanged] =
            [zero, WeightChange { replacement: None, delta: None }].map(|change| weight.merged(&cuda, &change));
        // Only the sign of a zero changes.
        let same = |(a, b): (&u32, &u32)| a == b || f32::from_bits(*a) == 0.0 && f32::from_bits(*b) == 0.0;
        assert!(with_zero[0].iter().zip(&unchanged[0]).all(same), "{dtype:?}");

        let [one, other] = [of(weight.low_rank(&mut random, 5)), of(weight.low_rank(&mut random, 9))];
        let base = weight.base.chunks_exact(weight.cols).flat_map(|row| &row[weight.columns.clone()]);
        let mut w = cuda.device.zeros(weight.shape).unwrap();
        let mut copy = cuda.device.zeros(MatrixShape { n: weight.rows, ..weight.shape }).unwrap();
        copy.write_rows(0, TensorView::F32(&base.copied().collect::<Vec<_>>()));
        let mut merged = |change| {
            let (columns, width) = (weight.columns.clone(), weight.cols);
            let base = MergeBase::Matrix(&copy);
            cuda.ops.merge_rows(&mut w, 0, &Merge { change, base, rows: 0..weight.rows, columns, width }).unwrap();
            bits(&w)
        };
        let first = merged(&one);
        for _ in 0..50 {
            assert!(merged(&other) != first && merged(&one) == first, "{dtype:?}");
        }
    }
}

/// Values of all kinds: usual ones, and now and then infinities, NaNs, zeros and the smallest.
fn any_bits(random: &mut Random) -> u32 {
    match random.below(8) {
        0 => random.next() as u32,
        1 => [0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc1_2345, 0x0000_0001, 0x7f7f_ffff][random.below(6)],
        _ => random.normals(1, 1.0)[0].to_bits(),
    }
}

#[test]
fn columns_of_any_width_are_those_of_the_cpu() {
    let (cuda, cpu) = (cuda().unwrap(), cpu());
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let (n, k, dtype) = (random.between(1, 30), random.between(1, 90), DTYPES[seed as usize % 2]);
        let shape = MatrixShape { dtype, n, k, leaves: leaves(&mut random, k) };
        let [mut found, mut expected] = [&cuda, &cpu].map(|rank| rank.device.zeros(shape).unwrap());
        for _ in 0..4 {
            let (row0, first_column) = (random.below(n), random.below(20));
            let (rows, width) = (random.below(n - row0 + 1), first_column + k + random.below(20));
            let values: Vec<u32> = (0..rows * width).map(|_| any_bits(&mut random)).collect();
            let f32s: Vec<f32> = values.iter().map(|bits| f32::from_bits(*bits)).collect();
            let halves: Vec<u16> = values.iter().map(|bits| (bits >> 16) as u16).collect();
            let bf16s: Vec<bf16> = halves.iter().map(|bits| bf16::from_bits(*bits)).collect();
            let f16s: Vec<f16> = halves.iter().map(|bits| f16::from_bits(*bits)).collect();
            let rows = [TensorView::F32(&f32s), TensorView::Bf16(&bf16s), TensorView::F16(&f16s)][random.below(3)];
            for matrix in [&mut found, &mut expected] {
                matrix.write_columns(row0, rows, width, first_column);
            }
            assert!(bits(&found) == bits(&expected), "seed {seed}: {shape:?}");
        }
        if dtype == StorageDtype::Bf16 {
            let [found, expected] = [&found, &expected].map(|matrix| matrix.read_rows(0..n).to_le_bytes());
            assert!(found == expected, "seed {seed}: {shape:?}");
        }
    }
}

#[test]
fn rows_and_elements_that_operators_move_are_those_of_the_cpu() {
    let (cuda, cpu) = (cuda().unwrap(), cpu());
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let k = [random.between(1, 60), 16 * random.between(1, 12)][random.below(2)];
        let (n, dtype) = (random.between(1, 60), DTYPES[seed as usize % 2]);
        let shape = MatrixShape { dtype, n, k, leaves: leaves(&mut random, k) };
        let other = MatrixShape { leaves: leaves(&mut random, k), ..shape };
        let values = random.normals(n * k, 1.0);
        let first = random.below(n);
        let last = random.between(first, n);
        // Some places are named more than once.
        let elements: Vec<(usize, usize, f32)> =
            (0..40).map(|i| (random.below(n), random.below(k.min(9)), i as f32 / 3.0)).collect();
        let run = |rank: &Rank| {
            let [mut w, mut copy] = [shape, other].map(|shape| rank.device.zeros(shape).unwrap());
            let all = |rows: std::ops::Range<usize>| TensorView::F32(&values[rows.start * k..rows.end * k]);
            rank.ops.store_rows(&mut w, 0..n, &|rows, store| store(all(rows))).unwrap();
            let as_stored = bits(&w);
            rank.ops.copy_rows(&w, first..last, &mut copy).unwrap();
            rank.ops
                .write_elements(&mut w, 0..n, &|rows, write| {
                    let mine = elements.iter().filter(|(row, _, _)| rows.contains(row));
                    mine.for_each(|(row, column, value)| write(*row, *column, *value));
                })
                .unwrap();
            let out = rank.zeros(n, k);
            rank.ops.unpack(&w, &out).unwrap();
            assert!(values_of(&out).into_iter().map(f32::to_bits).eq(bits(&w)), "{}: unpacked", rank.name());
            [as_stored, bits(&copy), bits(&w)]
        };
        assert!(run(&cuda) == run(&cpu), "seed {seed}: {shape:?}");
    }
}

/// More rows than go through page-locked memory at once.
#[test]
fn a_large_matrix_is_stored_and_read_in_parts() {
    let cuda = cuda().unwrap();
    let shape = MatrixShape { dtype: StorageDtype::Bf16, n: 1100, k: 4096, leaves: 8 };
    let value = |i: usize| bf16::from_f32((i % 4099) as f32);
    let values: Vec<bf16> = (0..shape.n * shape.k).map(value).collect();
    let mut by_operator = cuda.device.zeros(shape).unwrap();
    cuda.ops
        .store_rows(&mut by_operator, 0..shape.n, &|rows, store| {
            store(TensorView::Bf16(&values[rows.start * shape.k..rows.end * shape.k]));
        })
        .unwrap();
    let mut by_push = cuda.device.zeros(shape).unwrap();
    by_push.write_rows(0, TensorView::Bf16(&values));
    for matrix in [by_operator, by_push] {
        assert!(matrix.read_rows(0..shape.n) == TensorData::Bf16((&values).into()));
    }
}

/// A push writes new matrices while operators run.
#[test]
fn matrices_are_written_from_threads_beside_the_operators() {
    let cuda = cuda().unwrap();
    let shape = MatrixShape { dtype: StorageDtype::Bf16, n: 40, k: 48, leaves: 2 };
    let values = |seed: u64| Random::new(seed).normals(shape.n * shape.k, 1.0);
    let expected = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| stored(*x, shape.dtype).to_bits()).collect() };
    let mut base = cuda.device.zeros(shape).unwrap();
    base.write_rows(0, TensorView::F32(&values(100)));
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let mut matrix = cuda.device.zeros(shape).unwrap();
            scope.spawn(move || {
                for round in 0..10 {
                    let values = values(10 * seed + round);
                    for (row, values) in values.chunks_exact(shape.k).enumerate() {
                        matrix.write_rows(row, TensorView::F32(values));
                    }
                    assert!(bits(&matrix) == expected(&values));
                }
            });
        }
        for _ in 0..10 {
            let mut copy = cuda.device.zeros(shape).unwrap();
            cuda.ops.copy_rows(&base, 0..shape.n, &mut copy).unwrap();
            assert!(bits(&copy) == expected(&values(100)));
        }
    });
}
