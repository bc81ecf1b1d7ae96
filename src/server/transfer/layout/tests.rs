//! The layout beside what vLLM's producer does, on random tensors.

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;

fn tensor(name: usize, dtype: Dtype, shape: Vec<usize>) -> TensorEntry {
    TensorEntry { name: name.to_string(), dtype, shape, digest: None, payload: None, offset: 0, allocation: None }
}

/// The sizes of vLLM's broadcasts, as its loop over an iterator of tensors has them: `packed_nccl_broadcast_producer`
/// and `pack_tensors` of vllm/distributed/weight_transfer/packed_tensor.py, in 0.32.
fn sizes_of_vllm(sizes: &[usize], buffer_size_bytes: usize) -> Vec<usize> {
    let (mut iterator, mut broadcasts) = (sizes.iter(), Vec::new());
    loop {
        let (mut tensor_list, mut total_bytes) = (Vec::new(), 0);
        for size in iterator.by_ref() {
            tensor_list.push(*size);
            total_bytes += size;
            if total_bytes > buffer_size_bytes {
                break;
            }
        }
        if tensor_list.is_empty() {
            return broadcasts;
        }
        broadcasts.push(tensor_list.iter().sum());
    }
}

#[test]
fn tensors_are_put_together_as_vllm_does() {
    for seed in 0..50 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let dtypes = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        let tensors: Vec<_> = (0..random.random_range(1..40))
            .map(|i| {
                let dimensions = random.random_range(0..4);
                let shape = (0..dimensions).map(|_| random.random_range(1..12)).collect();
                tensor(i, dtypes[random.random_range(0..3)], shape)
            })
            .collect();
        let buffer = random.random_range(0..2000u64);
        let single = broadcasts(&tensors, Packing::default()).expect("one by one");
        let bytes: Vec<usize> = single.0.iter().map(|broadcast| broadcast.bytes()).collect();
        assert!(single.0.iter().zip(&tensors).all(|(broadcast, tensor)| {
            broadcast.dtype == Some(tensor.dtype) && broadcast.count == tensor.shape.iter().product::<usize>()
        }));
        assert_eq!(single.1, bytes.iter().map(|&bytes| bytes as u64).collect::<Vec<_>>(), "seed {seed}");
        let packing = Packing { packed: Some(true), buffer_bytes: Some(buffer) };
        let (packed, sizes) = broadcasts(&tensors, packing).expect("packed");
        let expected: Vec<_> =
            sizes_of_vllm(&bytes, buffer as usize).into_iter().map(|count| Broadcast { count, dtype: None }).collect();
        assert_eq!((packed, sizes), (expected, single.1), "seed {seed}");
    }
}

#[test]
fn tensors_that_cannot_be_broadcast_are_refused() {
    for shape in [vec![3, 0], vec![usize::MAX, 2], vec![usize::MAX / 2]] {
        let one = [tensor(0, Dtype::F32, shape.clone())];
        assert!(broadcasts(&one, Packing::default()).is_err(), "{shape:?}");
    }
    let two = [0, 1].map(|i| tensor(i, Dtype::F32, vec![usize::MAX / 4]));
    assert!(broadcasts(&two, Packing { packed: Some(true), buffer_bytes: Some(u64::MAX) }).is_err());
    assert!(dtype("int8").is_err() && dtype("").is_err());
}

#[test]
fn pieces_are_cut_where_tensors_end() {
    for seed in 0..50 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let sizes: Vec<u64> = (0..random.random_range(1..20)).map(|_| random.random_range(1..50)).collect();
        let total: u64 = sizes.iter().sum();
        let all: Vec<u8> = (0..total).map(|_| random.random()).collect();
        let (mut cursor, mut came) = (Cursor::new(7, sizes.clone()), vec![Vec::new(); sizes.len()]);
        let mut rest = Bytes::from(all.clone());
        while !rest.is_empty() {
            let mut piece = rest.split_to(random.random_range(1..=rest.len().min(60)));
            while let Some(chunk) = cursor.split(&mut piece) {
                let tensor: &mut Vec<u8> = &mut came[chunk.tensor as usize - 7];
                assert_eq!(chunk.offset, tensor.len() as u64, "seed {seed}");
                tensor.extend(&chunk.data);
            }
            assert!(piece.is_empty());
        }
        assert_eq!(came.iter().map(|tensor| tensor.len() as u64).collect::<Vec<_>>(), sizes, "seed {seed}");
        assert_eq!(came.concat(), all, "seed {seed}");
    }
}
