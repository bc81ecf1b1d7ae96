//! Digests of device memory are those of twox_hash, and the first value that is not finite is the host's.

use twox_hash::XxHash3_128;

use super::super::context::Context;
use super::*;
use crate::cpu::testing::Random;
use crate::host::first_saturated;

const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

/// Some bytes and where they begin in device memory.
struct Given {
    start: usize,
    bytes: Vec<u8>,
    dtype: Dtype,
}

fn random_bytes(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.below(256) as u8).collect()
}

/// Values that are finite, some of them nearly not.
fn finite_bytes(random: &mut Random, values: usize, dtype: Dtype) -> Vec<u8> {
    let mut bytes = random_bytes(random, values * dtype.size());
    for value in bytes.chunks_exact_mut(dtype.size()) {
        let [.., low, high] = value else { unreachable!("values have two bytes at least") };
        match dtype {
            Dtype::Bf16 | Dtype::F32 if *high & 0x7f == 0x7f => *low &= 0x7f,
            Dtype::F16 if *high & 0x7c == 0x7c => *high &= !0x04,
            _ => {}
        }
    }
    bytes
}

/// The digests that the device computes of `given` in one launch. The values between them are not finite.
fn computed(context: &Context, given: &[Given]) -> Vec<Digested> {
    let end = given.iter().map(|given| given.start + given.bytes.len()).max().unwrap();
    let mut all = vec![0xff; end];
    given.iter().for_each(|given| all[given.start..given.start + given.bytes.len()].copy_from_slice(&given.bytes));
    let memory = context.weights.allocate(all.len()).unwrap();
    context.copies.write(memory.pointer, &all).unwrap();
    let range = |given: &Given| {
        let pointer = memory.pointer + given.start as u64;
        DeviceRange { pointer, bytes: given.bytes.len() as u64, dtype: given.dtype }
    };
    let ranges: Vec<_> = given.iter().map(range).collect();
    context.digests.compute(&context.scratch, &context.copies, &ranges).unwrap()
}

fn expected(given: &Given) -> Digested {
    let not_finite = match given.dtype {
        Dtype::Bf16 => first_saturated(given.bytes.as_chunks::<2>().0, 0x7f80),
        Dtype::F16 => first_saturated(given.bytes.as_chunks::<2>().0, 0x7c00),
        Dtype::F32 => first_saturated(given.bytes.as_chunks::<4>().0, 0x7f80_0000),
    };
    Digested { digest: XxHash3_128::oneshot(&given.bytes).to_be_bytes(), not_finite }
}

#[test]
fn digests_are_those_of_the_host_at_all_lengths_and_addresses() {
    let context = Context::open(0).unwrap();
    let seed = 11;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    // Ends of stripes of 64 bytes, of rounds of 1 KiB and of chunks of 32 KiB.
    let mut lengths: Vec<usize> = vec![241, 255, 256, 257, 319, 320, 321, 512, 1000];
    for end in [1024, 2048, 3 << 10, 32 << 10, 33 << 10, 64 << 10, 65 << 10, 96 << 10] {
        lengths.extend([end - 64, end - 1, end, end + 1, end + 64, end + random.below(64)]);
    }
    lengths.extend((0..40).map(|_| 241 + random.below(5000)));
    let (mut given, mut end) = (Vec::new(), 0);
    for (i, len) in lengths.into_iter().enumerate() {
        // Every remainder of eight, and of some lengths two.
        for _ in 0..=usize::from(len < 2100) {
            let start = end + random.below(8);
            given.push(Given { start, bytes: random_bytes(&mut random, len), dtype: DTYPES[i % 3] });
            end = start + len;
        }
    }
    for (given, computed) in given.iter().zip(computed(&context, &given)) {
        let (len, expected) = (given.bytes.len(), expected(given));
        assert_eq!(computed.digest, expected.digest, "{len} bytes from {} on", given.start);
        if len.is_multiple_of(given.dtype.size()) {
            assert_eq!(computed.not_finite, expected.not_finite, "{len} bytes of {:?}", given.dtype);
        }
    }
}

#[test]
fn the_first_value_that_is_not_finite_is_found_wherever_it_is() {
    let context = Context::open(0).unwrap();
    let seed = 12;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let (mut given, mut end) = (Vec::new(), 0);
    for i in 0..120 {
        let dtype = DTYPES[i % 3];
        let values = (241 + random.below(if i % 20 == 0 { 70_000 } else { 6_000 })).div_ceil(dtype.size());
        let mut bytes = finite_bytes(&mut random, values, dtype);
        // None, one or several, the first value and the last among them.
        for _ in 0..i % 4 {
            let at = [0, values - 1, random.below(values), random.below(values)][random.below(4)];
            let sign = (random.below(2) as u8) << 7;
            let (low, high) = if dtype == Dtype::F16 { (0x00, 0x7c) } else { (0x80, 0x7f) };
            let value = &mut bytes[at * dtype.size()..(at + 1) * dtype.size()];
            let [.., value_low, value_high] = value else { unreachable!("values have two bytes at least") };
            (*value_low, *value_high) = (*value_low | low, high | sign);
        }
        let start = end + random.below(8);
        end = start + bytes.len();
        given.push(Given { start, bytes, dtype });
    }
    for (i, (given, computed)) in given.iter().zip(computed(&context, &given)).enumerate() {
        assert_eq!(computed.not_finite.is_some(), i % 4 > 0, "range {i}");
        assert_eq!(computed, expected(given), "{} bytes of {:?}", given.bytes.len(), given.dtype);
    }
}
