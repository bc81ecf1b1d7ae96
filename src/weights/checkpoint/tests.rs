//! Checkpoints, compared with matrices in memory.

mod formats;
mod gguf;
mod sources;

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::weights::parameters::{Dtype, HeadCounts, ShardRule};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The text of the `Config` error that `result` must be.
fn config_error<T>(result: crate::error::Result<T>) -> String {
    match result {
        Err(Error::Config(message)) => message,
        Err(other) => panic!("not a Config error: {other:?}"),
        Ok(_) => panic!("no error"),
    }
}

fn as_f32(data: TensorData<'_>) -> Vec<f32> {
    data.into_f32().into_owned()
}

/// `n` random values that float16 and bfloat16 represent exactly.
fn random_values(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-128i32..128) as f32 / 16.0).collect()
}

/// The values of a slice of a row-major matrix with `cols` columns.
fn slice_of(values: &[f32], cols: usize, slice: &Slice) -> Vec<f32> {
    let rows = slice.rows.clone();
    rows.flat_map(|row| slice.cols.clone().map(move |col| values[row * cols + col])).collect()
}

fn random_slice(rng: &mut StdRng, rows: usize, cols: usize) -> Slice {
    let mut part = |n: usize| {
        let start = rng.random_range(0..=n);
        start..rng.random_range(start..=n)
    };
    Slice { rows: part(rows), cols: part(cols) }
}

/// One tensor of a safetensors file in a test.
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Stored {
    fn random(rng: &mut StdRng, name: &str, shape: &[usize]) -> Self {
        let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16][rng.random_range(0..3)];
        let values = random_values(rng, shape.iter().product());
        Self { name: name.into(), dtype, shape: shape.to_vec(), values }
    }

    fn bytes(&self) -> Vec<u8> {
        let value = |&v: &f32| match self.dtype {
            Dtype::F32 => v.to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
            Dtype::Bf16 => bf16::from_f32(v).to_le_bytes().to_vec(),
        };
        self.values.iter().flat_map(value).collect()
    }
}

fn write_safetensors(path: &Path, tensors: &[Stored]) {
    use ::safetensors::tensor::TensorView;
    let bytes: Vec<_> = tensors.iter().map(Stored::bytes).collect();
    let views = tensors.iter().zip(&bytes).map(|(t, bytes)| {
        let dtype = match t.dtype {
            Dtype::F32 => ::safetensors::Dtype::F32,
            Dtype::F16 => ::safetensors::Dtype::F16,
            Dtype::Bf16 => ::safetensors::Dtype::BF16,
        };
        (t.name.clone(), TensorView::new(dtype, t.shape.clone(), bytes).unwrap())
    });
    ::safetensors::serialize_to_file(views, None, path).unwrap();
}

fn open_directory(dir: &Path) -> Checkpoint {
    Checkpoint::Safetensors(SafetensorsCheckpoint::open(dir).unwrap())
}

fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}
