//! Converts the values of GGUF files to float32, with the bits that candle gives them.
//!
//! A file has blocks of a fixed number of values, one after the other. Each block is unpacked from one array to
//! another, so that the compiler can vectorise the loops and needs no bounds checks in them.

#![allow(clippy::needless_range_loop)] // indices, so that loops over several arrays become vectors

use std::marker::PhantomData;

use candle_core::quantized::GgmlDType;
use half::{bf16, f16};

use super::isa::{Isa, Kernel};
use super::lanes::Lanes;
use super::math::{round_bf16, widen_f16};
use crate::values::StorageDtype;

/// Values of a block in the formats whose scales are quantised too.
const LONG: usize = 256;

/// De-quantises blocks as a GGUF file has them, at any address, on one thread. Floats count as blocks of one value.
///
/// `out` gets the values that a matrix of `precision` would hold. They have the same bits on every instruction set.
///
/// # Panics
/// If `blocks` do not have exactly as many values as `out`.
pub fn dequantise(isa: Isa, dtype: GgmlDType, blocks: &[u8], precision: StorageDtype, out: &mut [f32]) {
    match precision {
        StorageDtype::Bf16 => dequantise_as::<true>(isa, dtype, blocks, out),
        StorageDtype::F32 => dequantise_as::<false>(isa, dtype, blocks, out),
    }
}

fn dequantise_as<const ROUND: bool>(isa: Isa, dtype: GgmlDType, blocks: &[u8], out: &mut [f32]) {
    match dtype {
        GgmlDType::F32 => run::<ROUND, F32, _, _>(isa, blocks, out),
        GgmlDType::F16 => run::<ROUND, F16, _, _>(isa, blocks, out),
        GgmlDType::BF16 => run::<ROUND, Bf16, _, _>(isa, blocks, out),
        GgmlDType::Q4_0 => run::<ROUND, Q4_0, _, _>(isa, blocks, out),
        GgmlDType::Q4_1 => run::<ROUND, Q4_1, _, _>(isa, blocks, out),
        GgmlDType::Q5_0 => run::<ROUND, Q5_0, _, _>(isa, blocks, out),
        GgmlDType::Q5_1 => run::<ROUND, Q5_1, _, _>(isa, blocks, out),
        GgmlDType::Q8_0 => run::<ROUND, Q8_0, _, _>(isa, blocks, out),
        GgmlDType::Q8_1 => run::<ROUND, Q8_1, _, _>(isa, blocks, out),
        GgmlDType::Q2K => run::<ROUND, Q2K, _, _>(isa, blocks, out),
        GgmlDType::Q3K => run::<ROUND, Q3K, _, _>(isa, blocks, out),
        GgmlDType::Q4K => run::<ROUND, Q4K, _, _>(isa, blocks, out),
        GgmlDType::Q5K => run::<ROUND, Q5K, _, _>(isa, blocks, out),
        GgmlDType::Q6K => run::<ROUND, Q6K, _, _>(isa, blocks, out),
        GgmlDType::Q8K => run::<ROUND, Q8K, _, _>(isa, blocks, out),
    }
}

/// A format of GGUF blocks: `BYTES` bytes that hold `VALUES` values. `unpack` and all that it calls must be
/// `#[inline(always)]`, for the reason that [`Kernel`] gives.
trait QuantBlock<const BYTES: usize, const VALUES: usize> {
    fn unpack(block: &[u8; BYTES], out: &mut [f32; VALUES]);
}

fn run<const ROUND: bool, B: QuantBlock<BYTES, VALUES>, const BYTES: usize, const VALUES: usize>(
    isa: Isa,
    blocks: &[u8],
    out: &mut [f32],
) {
    let ((blocks, rest), (out, more)) = (blocks.as_chunks(), out.as_chunks_mut());
    let fits = rest.is_empty() && more.is_empty() && blocks.len() == out.len();
    assert!(fits, "{} blocks of {BYTES} bytes for {} of {VALUES} values", blocks.len(), out.len());
    isa.dispatch(Dequantise::<ROUND, B, BYTES, VALUES> { blocks, out, block: PhantomData });
}

struct Dequantise<'a, const ROUND: bool, B, const BYTES: usize, const VALUES: usize> {
    blocks: &'a [[u8; BYTES]],
    out: &'a mut [[f32; VALUES]],
    block: PhantomData<B>,
}

impl<const ROUND: bool, B, const BYTES: usize, const VALUES: usize> Kernel for Dequantise<'_, ROUND, B, BYTES, VALUES>
where
    B: QuantBlock<BYTES, VALUES>,
{
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (block, out) in self.blocks.iter().zip(self.out) {
            B::unpack(block, out);
            if ROUND {
                out.iter_mut().for_each(|x| *x = widen_bf16(round_bf16(*x)));
            }
        }
    }
}

#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

struct F32;

impl QuantBlock<4, 1> for F32 {
    #[inline(always)]
    fn unpack(block: &[u8; 4], out: &mut [f32; 1]) {
        out[0] = f32::from_le_bytes(*block);
    }
}

struct F16;

impl QuantBlock<2, 1> for F16 {
    #[inline(always)]
    fn unpack(block: &[u8; 2], out: &mut [f32; 1]) {
        out[0] = float16(block, 0);
    }
}

struct Bf16;

impl QuantBlock<2, 1> for Bf16 {
    #[inline(always)]
    fn unpack(block: &[u8; 2], out: &mut [f32; 1]) {
        out[0] = widen_bf16(bf16::from_le_bytes(*block));
    }
}

/// `N` bytes of a block, from `at` on.
#[inline(always)]
fn bytes_at<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("inside the block")
}

/// The float16 at byte `at` of a block, widened.
#[inline(always)]
fn float16(block: &[u8], at: usize) -> f32 {
    widen_f16(f16::from_le_bytes(*bytes_at(block, at)))
}

/// Calls `value` with each half-byte and its index. The low half-bytes are the first 16 values, the high ones the last
/// 16.
#[inline(always)]
fn nibbles(bytes: &[u8; 16], out: &mut [f32; 32], value: impl Fn(u8, usize) -> f32) {
    for i in 0..16 {
        out[i] = value(bytes[i] & 0xf, i);
        out[i + 16] = value(bytes[i] >> 4, i + 16);
    }
}

/// Bytes: the scale, then the quants as half-bytes. Quants count from -8.
struct Q4_0;

impl QuantBlock<18, 32> for Q4_0 {
    #[inline(always)]
    fn unpack(block: &[u8; 18], out: &mut [f32; 32]) {
        let scale = float16(block, 0);
        nibbles(bytes_at(block, 2), out, |q, _| (i32::from(q) - 8) as f32 * scale);
    }
}

/// Bytes: the scale and the minimum, then the quants as half-bytes.
struct Q4_1;

impl QuantBlock<20, 32> for Q4_1 {
    #[inline(always)]
    fn unpack(block: &[u8; 20], out: &mut [f32; 32]) {
        let (scale, min) = (float16(block, 0), float16(block, 2));
        nibbles(bytes_at(block, 4), out, |q, _| f32::from(q) * scale + min);
    }
}

/// Bytes: the scale, the fifth bits of the 32 quants, then their low bits as half-bytes. Quants count from -16.
struct Q5_0;

impl QuantBlock<22, 32> for Q5_0 {
    #[inline(always)]
    fn unpack(block: &[u8; 22], out: &mut [f32; 32]) {
        let (scale, fifths) = (float16(block, 0), u32::from_le_bytes(*bytes_at(block, 2)));
        nibbles(bytes_at(block, 6), out, |q, i| ((u32::from(q) | (fifths >> i & 1) << 4) as i32 - 16) as f32 * scale);
    }
}

/// Bytes: the scale, the minimum, the fifth bits of the 32 quants, then their low bits as half-bytes.
struct Q5_1;

impl QuantBlock<24, 32> for Q5_1 {
    #[inline(always)]
    fn unpack(block: &[u8; 24], out: &mut [f32; 32]) {
        let (scale, min, fifths) = (float16(block, 0), float16(block, 2), u32::from_le_bytes(*bytes_at(block, 4)));
        nibbles(bytes_at(block, 8), out, |q, i| (u32::from(q) | (fifths >> i & 1) << 4) as f32 * scale + min);
    }
}

/// Bytes: the scale, then the quants as signed bytes.
struct Q8_0;

impl QuantBlock<34, 32> for Q8_0 {
    #[inline(always)]
    fn unpack(block: &[u8; 34], out: &mut [f32; 32]) {
        scaled(bytes_at(block, 2), float16(block, 0), out);
    }
}

/// Bytes: the scale, a sum that is not needed here, then the quants as signed bytes.
struct Q8_1;

impl QuantBlock<36, 32> for Q8_1 {
    #[inline(always)]
    fn unpack(block: &[u8; 36], out: &mut [f32; 32]) {
        scaled(bytes_at(block, 4), float16(block, 0), out);
    }
}

/// Bytes: the scale as float32, the quants as signed bytes, then sums that are not needed here.
struct Q8K;

impl QuantBlock<292, LONG> for Q8K {
    #[inline(always)]
    fn unpack(block: &[u8; 292], out: &mut [f32; LONG]) {
        scaled(bytes_at(block, 4), f32::from_le_bytes(*bytes_at(block, 0)), out);
    }
}

#[inline(always)]
fn scaled<const N: usize>(bytes: &[u8; N], scale: f32, out: &mut [f32; N]) {
    for i in 0..N {
        out[i] = f32::from(bytes[i] as i8) * scale;
    }
}

/// Bytes: 16 bytes that each have the scale and the minimum of 16 values; the quants of 2 bits, where 32 bytes hold 4
/// runs of 32 values; then the scale of the scales and the scale of the minima.
struct Q2K;

impl QuantBlock<84, LONG> for Q2K {
    #[inline(always)]
    fn unpack(block: &[u8; 84], out: &mut [f32; LONG]) {
        let (scale, min) = (float16(block, 80), float16(block, 82));
        for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (bytes, shift) = (bytes_at::<32>(block, 16 + run / 4 * 32), run % 4 * 2);
            for i in 0..32 {
                out[i] = f32::from(bytes[i] >> shift & 3);
            }
            for (half, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let scales = block[2 * run + half];
                let (scale, min) = (scale * f32::from(scales & 0xf), min * f32::from(scales >> 4));
                out.iter_mut().for_each(|x| *x = scale * *x - min);
            }
        }
    }
}

/// Bytes: the third bits of the quants; their low 2 bits as in [`Q2K`]; 16 scales of 6 bits; the scale of the scales.
/// Quants count from -4 and scales from -32.
struct Q3K;

impl QuantBlock<110, LONG> for Q3K {
    #[inline(always)]
    fn unpack(block: &[u8; 110], out: &mut [f32; LONG]) {
        let (thirds, scales, scale) = (bytes_at::<32>(block, 0), bytes_at::<12>(block, 96), float16(block, 108));
        for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (bytes, shift) = (bytes_at::<32>(block, 32 + run / 4 * 32), run % 4 * 2);
            for i in 0..32 {
                let q = bytes[i] >> shift & 3 | (thirds[i] >> run & 1) << 2;
                out[i] = f32::from(q) - 4.0;
            }
            for (half, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let at = 2 * run + half;
                let (low, high) = (scales[at % 8] >> (at / 8 * 4) & 0xf, scales[8 + at % 4] >> (at / 4 * 2) & 3);
                let scale = scale * (f32::from(low | high << 4) - 32.0);
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }
}

/// The scale and the minimum of run `run` of 32 values, 6 bits each. Those of the last four runs are stored in two
/// pieces.
#[inline(always)]
fn scale_and_min(bytes: &[u8; 12], run: usize) -> (f32, f32) {
    let (scale, min) = if run < 4 {
        (bytes[run] & 63, bytes[run + 4] & 63)
    } else {
        (bytes[run + 4] & 0xf | bytes[run - 4] >> 6 << 4, bytes[run + 4] >> 4 | bytes[run] >> 6 << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// Bytes: the scale of the scales and the scale of the minima; the scales and minima of 8 runs of 32 values; then the
/// quants as half-bytes, where 32 bytes hold two runs.
struct Q4K;

impl QuantBlock<144, LONG> for Q4K {
    #[inline(always)]
    fn unpack(block: &[u8; 144], out: &mut [f32; LONG]) {
        let (scale, min, scales) = (float16(block, 0), float16(block, 2), bytes_at::<12>(block, 4));
        for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (run_scale, run_min) = scale_and_min(scales, run);
            let (scale, min) = (scale * run_scale, min * run_min);
            let (bytes, shift) = (bytes_at::<32>(block, 16 + run / 2 * 32), run % 2 * 4);
            for i in 0..32 {
                out[i] = scale * f32::from(bytes[i] >> shift & 0xf) - min;
            }
        }
    }
}

/// Bytes: those of [`Q4K`], with the fifth bits of the quants before their half-bytes.
struct Q5K;

impl QuantBlock<176, LONG> for Q5K {
    #[inline(always)]
    fn unpack(block: &[u8; 176], out: &mut [f32; LONG]) {
        let (scale, min, scales) = (float16(block, 0), float16(block, 2), bytes_at::<12>(block, 4));
        let fifths = bytes_at::<32>(block, 16);
        for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (run_scale, run_min) = scale_and_min(scales, run);
            let (scale, min) = (scale * run_scale, min * run_min);
            let (bytes, shift) = (bytes_at::<32>(block, 48 + run / 2 * 32), run % 2 * 4);
            for i in 0..32 {
                let q = bytes[i] >> shift & 0xf | (fifths[i] >> run & 1) << 4;
                out[i] = scale * f32::from(q) - min;
            }
        }
    }
}

/// Bytes: the low 4 bits of the quants, where 32 bytes hold the runs `i` and `i + 2` of each four runs of 32 values;
/// their high 2 bits, where 32 bytes hold four runs; 16 scales as signed bytes; the scale of the scales. Quants count
/// from -32.
struct Q6K;

impl QuantBlock<210, LONG> for Q6K {
    #[inline(always)]
    fn unpack(block: &[u8; 210], out: &mut [f32; LONG]) {
        let scale = float16(block, 208);
        for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (low, shift) = (bytes_at::<32>(block, run / 4 * 64 + run % 2 * 32), run % 4 / 2 * 4);
            let (high, high_shift) = (bytes_at::<32>(block, 128 + run / 4 * 32), run % 4 * 2);
            for i in 0..32 {
                let q = low[i] >> shift & 0xf | (high[i] >> high_shift & 3) << 4;
                out[i] = f32::from(q) - 32.0;
            }
            for (half, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let scale = scale * f32::from(block[192 + 2 * run + half] as i8);
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use candle_core::Device;
    use candle_core::quantized::{QStorage, QTensor};

    use super::super::testing::Random;
    use super::*;

    const TYPES: [GgmlDType; 15] = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q8_1,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
        GgmlDType::Q8K,
    ];

    /// De-quantises with candle. `blocks` are an allocation of their own, since candle needs them aligned.
    fn by_candle(dtype: GgmlDType, blocks: Vec<u8>) -> Vec<f32> {
        let values = blocks.len() / dtype.type_size() * dtype.block_size();
        let storage = QStorage::from_data(Cow::Borrowed(&blocks), &Device::Cpu, dtype).unwrap();
        let tensor = QTensor::new(storage, values).unwrap().dequantize(&Device::Cpu).unwrap();
        tensor.to_vec1().unwrap()
    }

    /// The bits of the values, with those of all NaNs alike: which NaN an addition of two NaNs gives is not defined.
    fn bits(values: impl IntoIterator<Item = f32>) -> Vec<u32> {
        values.into_iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    /// The blocks are random bytes, so that scales have all magnitudes and both signs and may be denormal, infinite or
    /// NaN.
    #[test]
    fn random_blocks_of_every_type_have_the_bits_of_candle_on_every_isa_at_every_address() {
        for (seed, dtype) in (0..).zip(TYPES.into_iter().cycle().take(20 * TYPES.len())) {
            let mut random = Random::new(seed);
            let offset = random.below(8);
            let len = random.between(1, 40) * dtype.type_size();
            let file: Vec<u8> = (0..offset + len).map(|_| random.next() as u8).collect();
            let expected = by_candle(dtype, file[offset..].to_vec());
            let rounded = bits(expected.iter().map(|x| bf16::from_f32(*x).to_f32()));
            let expected = bits(expected);
            for isa in Isa::available() {
                for (precision, expected) in [(StorageDtype::F32, &expected), (StorageDtype::Bf16, &rounded)] {
                    let mut out = vec![f32::NAN; expected.len()];
                    dequantise(isa, dtype, &file[offset..], precision, &mut out);
                    let context = format!("seed {seed}, {dtype:?} as {precision:?}, {}", isa.name());
                    assert_eq!(&bits(out), expected, "{context}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "2 blocks of 20 bytes for 3 of 32 values")]
    fn values_without_a_block_are_refused() {
        dequantise(Isa::detect(), GgmlDType::Q4_1, &[0; 40], StorageDtype::F32, &mut [0.0; 96]);
    }
}
