use super::super::pool::ThreadPool;
use super::super::testing::Random;
use super::*;

fn matrix(random: &mut Random, dtype: StorageDtype) -> PackedMatrix {
    let (n, k) = (random.between(1, 70), random.between(1, 40));
    PackedMatrix::zeros(dtype, n, k, 1)
}

#[test]
fn rows_written_in_any_order_are_read_back_rounded_to_nearest_even() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let dtype = [StorageDtype::Bf16, StorageDtype::F32][seed as usize % 2];
        let mut matrix = matrix(&mut random, dtype);
        let (n, k) = (matrix.n(), matrix.k());
        let mut expected = vec![0.0; n * k];
        for _ in 0..6 {
            let row0 = random.below(n);
            let rows = random.between(1, n - row0);
            let values = random.normals(rows * k, 1.0);
            let (half, bfloat): (Vec<f16>, Vec<bf16>) =
                values.iter().map(|x| (f16::from_f32(*x), bf16::from_f32(*x))).unzip();
            let (source, exact): (_, Vec<f32>) = match random.below(3) {
                0 => (TensorView::Bf16(&bfloat), bfloat.iter().map(|x| x.to_f32()).collect()),
                1 => (TensorView::F16(&half), half.iter().map(|x| x.to_f32()).collect()),
                _ => (TensorView::F32(&values), values.clone()),
            };
            matrix.write_rows(row0, source);
            let stored = |x: &f32| if dtype == StorageDtype::Bf16 { bf16::from_f32(*x).to_f32() } else { *x };
            let stored: Vec<f32> = exact.iter().map(stored).collect();
            expected[row0 * k..][..rows * k].copy_from_slice(&stored);
        }
        let mut all = vec![f32::NAN; n * k];
        matrix.read_f32(0, &mut all);
        assert_eq!(all, expected, "{dtype:?} {n} x {k}");
        if dtype == StorageDtype::Bf16 {
            let expected = expected.iter().map(|x| bf16::from_f32(*x)).collect();
            assert_eq!(matrix.read_rows(0..n), TensorData::Bf16(expected));
        }
        let (row, mut one) = (random.below(n), vec![f32::NAN; k]);
        matrix.read_f32(row, &mut one);
        assert_eq!(one, expected[row * k..][..k]);
    }
}

#[test]
fn gather_gives_zeros_for_rows_of_other_shards() {
    let mut random = Random::new(1);
    for dtype in [StorageDtype::Bf16, StorageDtype::F32] {
        let (n, k, offset) = (50, 33, 20);
        let mut matrix = PackedMatrix::zeros(dtype, n, k, 1);
        matrix.write_rows(0, TensorView::F32(&random.normals(n * k, 1.0)));
        let tokens: Vec<u32> = (0..3000).map(|_| random.below(100) as u32).collect();
        let mut out = vec![f32::NAN; tokens.len() * k];
        gather_rows(&Cpu::new(2), &matrix, &tokens, offset, RowsMut::dense(&mut out, k));
        for (out, token) in out.chunks(k).zip(tokens) {
            let mut expected = vec![0.0; k];
            if (offset..offset + n).contains(&(token as usize)) {
                matrix.read_f32(token as usize - offset, &mut expected);
            }
            assert_eq!(out, expected);
        }
    }
}

#[test]
fn padding_is_counted_as_memory() {
    assert_eq!(PackedMatrix::zeros(StorageDtype::Bf16, 17, 3, 1).bytes(), 32 * 4 * 2);
    assert_eq!(PackedMatrix::zeros(StorageDtype::F32, 17, 3, 1).bytes(), 32 * 3 * 4);
}

#[test]
fn filled_rows_are_written_rows() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let dtype = [StorageDtype::Bf16, StorageDtype::F32][seed as usize % 2];
        let (n, pool) = (random.between(1, 200), ThreadPool::new(2));
        let k = [random.between(1, 40), random.between(1, 1200), 32 * random.between(1, 40)][random.below(3)];
        let [mut filled, mut written] = [(); 2].map(|()| PackedMatrix::zeros(dtype, n, k, 1));
        for _ in 0..4 {
            let start = random.below(n);
            let rows = start..random.between(start, n);
            let values = random.normals(rows.len() * k, 1.0);
            filled.fill_rows(&pool, rows.clone(), &|some, out| {
                assert!(!some.is_empty() && rows.start <= some.start && some.end <= rows.end);
                out.copy_from_slice(&values[(some.start - rows.start) * k..(some.end - rows.start) * k]);
            });
            written.write_rows(rows.start, TensorView::F32(&values));
            // The bytes of the panels are compared, so that the padding is compared too.
            assert!(
                filled.storage.as_slice::<u16>() == written.storage.as_slice::<u16>(),
                "{dtype:?} {n} x {k}, {rows:?}"
            );
        }
    }
}

/// Values of one of the types that rows come in.
enum SourceValues {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
}

impl SourceValues {
    fn random(random: &mut Random, len: usize) -> SourceValues {
        let values = random.normals(len, 1.0);
        match random.below(3) {
            0 => SourceValues::Bf16(values.iter().map(|x| bf16::from_f32(*x)).collect()),
            1 => SourceValues::F16(values.iter().map(|x| f16::from_f32(*x)).collect()),
            _ => SourceValues::F32(values),
        }
    }

    fn part(&self, range: std::ops::Range<usize>) -> TensorView<'_> {
        match self {
            SourceValues::Bf16(values) => TensorView::Bf16(&values[range]),
            SourceValues::F16(values) => TensorView::F16(&values[range]),
            SourceValues::F32(values) => TensorView::F32(&values[range]),
        }
    }

    fn floats(&self) -> Vec<f32> {
        match self {
            SourceValues::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
            SourceValues::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
            SourceValues::F32(values) => values.clone(),
        }
    }
}

#[test]
fn stored_rows_and_columns_are_those_filled_from_float32() {
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let dtype = [StorageDtype::Bf16, StorageDtype::F32][seed as usize % 2];
        let (n, pool) = (random.between(1, 200), ThreadPool::new(2));
        let k = [random.between(1, 40), random.between(1, 300), 32 * random.between(1, 12)][random.below(3)];
        let [mut filled, mut stored, mut written] = [(); 3].map(|()| PackedMatrix::zeros(dtype, n, k, 1));
        for _ in 0..3 {
            let start = random.below(n);
            let rows = start..random.between(start, n);
            let first_column = random.below(9);
            let width = first_column + k + random.below(9);
            let wide = SourceValues::random(&mut random, rows.len() * width);
            let floats = wide.floats();
            let narrow: Vec<f32> = floats.chunks(width).flat_map(|row| row[first_column..][..k].to_vec()).collect();
            let part = |some: &std::ops::Range<usize>| (some.start - rows.start) * k..(some.end - rows.start) * k;
            filled.fill_rows(&pool, rows.clone(), &|some, out| out.copy_from_slice(&narrow[part(&some)]));
            stored.store_rows(&pool, rows.clone(), &|some, store| store(TensorView::F32(&narrow[part(&some)])));
            // The rows are written in two parts, cut at any row.
            let middle = random.between(0, rows.len());
            written.write_columns(start, wide.part(0..middle * width), width, first_column);
            written.write_columns(start + middle, wide.part(middle * width..rows.len() * width), width, first_column);
            let expected = filled.storage.as_slice::<u16>();
            assert!(stored.storage.as_slice::<u16>() == expected, "stored: {dtype:?} {n} x {k}, {rows:?}");
            assert!(written.storage.as_slice::<u16>() == expected, "written: {dtype:?} {n} x {k}, {rows:?} of {width}");
        }
    }
}

#[test]
fn every_instruction_set_packs_the_same_bits() {
    use crate::cpu::isa::Isa;
    use crate::cpu::lanes::LANES;
    let mut random = Random::new(5);
    for _ in 0..20 {
        let (k, stride) = (32 * random.between(1, 4), 128 + random.below(5));
        let values: Vec<bf16> = random.normals(LANES * stride, 1.0).iter().map(|x| bf16::from_f32(*x)).collect();
        let packed = |isa: Isa| {
            let mut matrix = PackedMatrix::zeros(StorageDtype::Bf16, LANES, k, 1);
            let panel = matrix.storage.as_mut_slice::<bf16>();
            isa.dispatch(fill::PackPanel { panel, k, rows: &values, stride });
            matrix.read_rows(0..LANES)
        };
        let expected = TensorData::Bf16(values.chunks(stride).flat_map(|row| row[..k].to_vec()).collect());
        for isa in Isa::available() {
            assert_eq!(packed(isa), expected, "{}", isa.name());
        }
    }
}

#[test]
fn written_elements_change_nothing_else() {
    for seed in 0..100 {
        let mut random = Random::new(seed);
        let dtype = [StorageDtype::Bf16, StorageDtype::F32][seed as usize % 2];
        let (n, k, pool) = (random.between(1, 200), random.between(1, 50), ThreadPool::new(2));
        let mut expected = random.normals(n * k, 1.0);
        let mut matrix = PackedMatrix::zeros(dtype, n, k, 1);
        matrix.write_rows(0, TensorView::F32(&expected));
        let start = random.below(n);
        let rows = start..random.between(start, n);
        let values = random.normals(n * k, 1.0);
        let chosen: Vec<bool> = (0..n * k).map(|_| random.below(5) == 0).collect();
        matrix.write_elements(&pool, rows.clone(), &|some, set| {
            for i in (some.start * k..some.end * k).filter(|i| chosen[*i]) {
                set(i / k, i % k, values[i]);
            }
        });
        for i in (rows.start * k..rows.end * k).filter(|i| chosen[*i]) {
            expected[i] = values[i];
        }
        let mut direct = PackedMatrix::zeros(dtype, n, k, 1);
        direct.write_rows(0, TensorView::F32(&expected));
        assert!(matrix.storage.as_slice::<u16>() == direct.storage.as_slice::<u16>(), "{dtype:?} {n} x {k}, {rows:?}");
    }
}

#[test]
fn widened_rows_are_those_of_a_matrix() {
    let mut random = Random::new(3);
    let values = random.normals(35, 1.0);
    let (half, bfloat): (Vec<f16>, Vec<bf16>) = values.iter().map(|x| (f16::from_f32(*x), bf16::from_f32(*x))).unzip();
    for dtype in [StorageDtype::Bf16, StorageDtype::F32] {
        for rows in [TensorView::Bf16(&bfloat), TensorView::F16(&half), TensorView::F32(&values)] {
            let mut matrix = PackedMatrix::zeros(dtype, 5, 7, 1);
            matrix.write_rows(0, rows);
            let (mut stored, mut widened) = ([f32::NAN; 35], [f32::NAN; 35]);
            matrix.read_f32(0, &mut stored);
            to_f32(rows, dtype, &mut widened);
            assert_eq!(widened, stored, "{dtype:?}");
        }
    }
}
