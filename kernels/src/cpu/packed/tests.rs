use super::super::testing::Random;
use super::*;

fn matrix(random: &mut Random, dtype: WeightDtype) -> PackedMatrix {
    let (n, k) = (random.between(1, 70), random.between(1, 40));
    PackedMatrix::zeros(dtype, n, k, 1)
}

#[test]
fn rows_written_in_any_order_are_read_back_rounded_to_nearest_even() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let dtype = [WeightDtype::Bf16, WeightDtype::F32][seed as usize % 2];
        let mut matrix = matrix(&mut random, dtype);
        let (n, k, pool) = (matrix.n(), matrix.k(), ThreadPool::new(2));
        let mut expected = vec![0.0; n * k];
        for _ in 0..6 {
            let row0 = random.below(n);
            let rows = random.between(1, n - row0);
            let values = random.normals(rows * k, 1.0);
            let (half, bfloat): (Vec<f16>, Vec<bf16>) =
                values.iter().map(|x| (f16::from_f32(*x), bf16::from_f32(*x))).unzip();
            let (source, exact): (_, Vec<f32>) = match random.below(3) {
                0 => (WeightRows::Bf16(&bfloat), bfloat.iter().map(|x| x.to_f32()).collect()),
                1 => (WeightRows::F16(&half), half.iter().map(|x| x.to_f32()).collect()),
                _ => (WeightRows::F32(&values), values.clone()),
            };
            match random.below(2) {
                0 => matrix.write_rows(row0, source),
                _ => matrix.write_rows_parallel(&pool, row0, source),
            }
            let stored = |x: &f32| if dtype == WeightDtype::Bf16 { bf16::from_f32(*x).to_f32() } else { *x };
            let stored: Vec<f32> = exact.iter().map(stored).collect();
            expected[row0 * k..][..rows * k].copy_from_slice(&stored);
        }
        let mut all = vec![f32::NAN; n * k];
        matrix.read_rows(0, RowBits::F32(&mut all));
        assert_eq!(all, expected, "{dtype:?} {n} x {k}");
        if dtype == WeightDtype::Bf16 {
            let mut all = vec![bf16::NAN; n * k];
            matrix.read_rows(0, RowBits::Bf16(&mut all));
            assert_eq!(all, expected.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>());
        }
        let (row, mut one) = (random.below(n), vec![f32::NAN; k]);
        matrix.read_row(row, &mut one);
        assert_eq!(one, expected[row * k..][..k]);
    }
}

#[test]
fn gather_gives_zeros_for_rows_of_other_shards() {
    let mut random = Random::new(1);
    for dtype in [WeightDtype::Bf16, WeightDtype::F32] {
        let (n, k, offset) = (50, 33, 20);
        let mut matrix = PackedMatrix::zeros(dtype, n, k, 1);
        matrix.write_rows(0, WeightRows::F32(&random.normals(n * k, 1.0)));
        let tokens: Vec<u32> = (0..3000).map(|_| random.below(100) as u32).collect();
        let mut out = vec![f32::NAN; tokens.len() * k];
        gather_rows(&Cpu::new(2), &matrix, &tokens, offset, RowsMut::dense(&mut out, k));
        for (out, token) in out.chunks(k).zip(tokens) {
            let mut expected = vec![0.0; k];
            if (offset..offset + n).contains(&(token as usize)) {
                matrix.read_row(token as usize - offset, &mut expected);
            }
            assert_eq!(out, expected);
        }
    }
}

#[test]
fn leaves_are_the_largest_power_of_two_of_whole_pairs() {
    let cases =
        [(1, 1), (2, 1), (4, 2), (6, 1), (8, 4), (12, 2), (16, 8), (576, 8), (1536, 8), (896, 8), (4864, 8), (35, 1)];
    assert_eq!(cases.map(|(k, _)| reduction_leaves(k)), cases.map(|(_, leaves)| leaves));
}

#[test]
fn padding_is_counted_as_memory() {
    assert_eq!(PackedMatrix::zeros(WeightDtype::Bf16, 17, 3, 1).bytes(), 32 * 4 * 2);
    assert_eq!(PackedMatrix::zeros(WeightDtype::F32, 17, 3, 1).bytes(), 32 * 3 * 4);
}
