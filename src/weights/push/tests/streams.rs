use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::tensor::PushedTensor;
use super::super::threads::in_parallel;
use super::super::verify::first_not_finite;
use super::*;
use crate::weights::parameters::ParameterMapping;

/// Every byte of the push once, in chunks `(tensor, offset, data)` in random order.
pub(super) fn random_chunks<'a>(rng: &mut StdRng, push: &'a [Sent]) -> Vec<(u32, u64, &'a [u8])> {
    let mut chunks = Vec::new();
    for (i, sent) in push.iter().enumerate() {
        let mut start = 0;
        while start < sent.bytes.len() {
            let end = rng.random_range(start + 1..=sent.bytes.len());
            chunks.push((i as u32, start as u64, &sent.bytes[start..end]));
            start = end;
        }
    }
    chunks.shuffle(rng);
    chunks
}

/// The digest of a push: XXH3-128 over the digests of its tensors in the order of their names.
fn digest_of(push: &[Sent]) -> [u8; 16] {
    let mut sorted: Vec<_> = push.iter().map(|sent| (&sent.entry.name, xxh3_128(&sent.bytes).to_be_bytes())).collect();
    sorted.sort();
    let digests: Vec<u8> = sorted.into_iter().flat_map(|(_, digest)| digest).collect();
    xxh3_128(&digests).to_be_bytes()
}

/// The vector `w` of `dtype` that has `bytes`, before any of them come.
pub(super) fn tensor(dtype: Dtype, bytes: &[u8], digest: Option<[u8; 16]>) -> PushedTensor {
    let mut sent = Sent::new("w", dtype, &[bytes.len() / dtype.size()], bytes.to_vec());
    sent.entry.digest = digest;
    PushedTensor::new(sent.entry, ParameterMapping::default(), bytes.len())
}

pub(super) fn slice_of(values: &[f32], cols: usize, slice: &Slice) -> Vec<f32> {
    slice.rows.clone().flat_map(|row| slice.cols.clone().map(move |col| values[row * cols + col])).collect()
}

#[test]
fn chunks_in_any_order_give_what_was_sent() {
    let parameters = model(false);
    for seed in 0..60 {
        let mut rng = rng(seed);
        let push = random_push(&mut rng, &parameters);
        // Some tensors are declared only later.
        let first = rng.random_range(0..=push.len());
        let mut receiver = staged(open_first(UpdateKind::Full, &push, first, &parameters));
        let (early, late) = push.split_at(first);
        for (tensor, offset, data) in random_chunks(&mut rng, early) {
            receiver.write(tensor, offset, data).unwrap();
        }
        receiver.declare(entries(late)).unwrap();
        for (tensor, offset, data) in random_chunks(&mut rng, late) {
            receiver.write(tensor + first as u32, offset, data).unwrap();
        }
        let received = receiver.finish().unwrap();
        assert_eq!(received.digest, digest_of(&push), "seed {seed}");
        assert_eq!((received.bytes, received.parameters), (total(&push), parameters.len()), "seed {seed}");
        let tensors = full(received);
        for sent in &push {
            let spec = parameters.get(&sent.entry.name).unwrap();
            let (_, cols) = matrix_shape(&spec.shape);
            for (rank, world) in [(0, 1), (0, 2), (1, 2)] {
                let slice = Partition::new(rank, world).slice(spec).unwrap();
                let read = tensors.read(&spec.name, &slice).unwrap();
                assert_eq!(read.dtype(), sent.entry.dtype, "seed {seed}: {}", spec.name);
                let is_borrowed = matches!(
                    read,
                    TensorData::F32(std::borrow::Cow::Borrowed(_))
                        | TensorData::F16(std::borrow::Cow::Borrowed(_))
                        | TensorData::Bf16(std::borrow::Cow::Borrowed(_))
                );
                assert_eq!(is_borrowed, slice.cols == (0..cols), "seed {seed}: {}", spec.name);
                let expected = slice_of(&sent.values(), cols, &slice);
                assert_eq!(*read.into_f32(), expected, "seed {seed}: {} of rank {rank} of {world}", spec.name);
            }
        }
        let mut names: Vec<&str> = push.iter().map(|sent| sent.entry.name.as_str()).collect();
        names.sort();
        assert!(tensors.names().eq(names), "seed {seed}");
        assert!(tensors.read("model.norm.weight", &Slice::whole(&[HIDDEN])).is_none());
    }
}

#[test]
fn large_tensors_in_chunks_are_the_bytes_that_were_sent() {
    for seed in 0..6 {
        let mut rng = rng(seed);
        let bytes = rng.random_range(1..3 << 20) * 4;
        let data: Vec<u8> = (0..bytes).map(|i| (i as u64).wrapping_mul(seed + 77).to_le_bytes()[1] & 0x3f).collect();
        let digest = xxh3_128(&data).to_be_bytes();
        let mut tensor = tensor(random_dtype(&mut rng), &data, Some(digest));
        let size = rng.random_range(1 << 16..1 << 19);
        let mut chunks: Vec<(usize, &[u8])> = data.chunks(size).enumerate().collect();
        let disorder = rng.random_range(0..4);
        for _ in 0..disorder {
            let (a, b) = (rng.random_range(0..chunks.len()), rng.random_range(0..chunks.len()));
            chunks.swap(a, b);
        }
        let mut received = 0;
        for (i, chunk) in chunks {
            received += chunk.len();
            let whole = tensor.gather((i * size) as u64, chunk).unwrap();
            assert_eq!((tensor.received(), whole), (received, received == bytes), "seed {seed}");
        }
        assert_eq!(tensor.digest(), Some(digest), "seed {seed}");
        assert!(**tensor.verified().unwrap() == data[..], "seed {seed}");
    }
}

#[test]
fn another_byte_is_data_loss_and_names_the_tensor() {
    let parameters = model(true);
    for seed in 0..30 {
        let mut rng = rng(seed);
        let mut push = random_push(&mut rng, &parameters);
        let mut receiver = staged(open(UpdateKind::Full, &push, &parameters).unwrap());
        let bad = rng.random_range(0..push.len());
        let byte = rng.random_range(0..push[bad].bytes.len());
        push[bad].bytes[byte] ^= 1 << rng.random_range(0..8);
        let mut send = |receiver: &mut ReceivingPush| -> Result<()> {
            for (tensor, offset, data) in random_chunks(&mut rng, &push) {
                receiver.write(tensor, offset, data)?;
            }
            Ok(())
        };
        lost(send(&mut receiver), &push[bad].entry.name);
    }
}

#[test]
fn chunks_that_do_not_fit_are_refused() {
    let parameters = model(true);
    let mut rng = rng(1);
    let push = random_push(&mut rng, &parameters);
    let tensors = push.len() as u32;
    let (name, bytes) = (push[0].entry.name.as_str(), push[0].bytes.as_slice());
    let all = bytes.len() as u64;
    let mut receiver = staged(open(UpdateKind::Full, &push, &parameters).unwrap());
    refused(receiver.write(tensors, 0, bytes), "chunk", &["no tensor 23; 23 are declared"]);
    refused(receiver.write(0, 1, bytes), "chunk", &[name, &format!("bytes 1..{} are outside its {all}", all + 1)]);
    refused(receiver.write(0, u64::MAX, &bytes[..2]), "chunk", &[name, "outside"]);
    receiver.write(0, all, &[]).unwrap();
    refused(receiver.write(0, all + 1, &[]), "chunk", &[name, "outside"]);
    receiver.write(0, 4, &bytes[4..8]).unwrap();
    for (start, end) in [(4, 8), (3, 5), (7, 9), (0, 10), (5, 6)] {
        refused(receiver.write(0, start as u64, &bytes[start..end]), "chunk", &[name, "overlap"]);
    }
    receiver.write(0, 0, &bytes[..4]).unwrap();
    receiver.write(0, 8, &bytes[8..]).unwrap();
    refused(receiver.write(0, 0, &bytes[..1]), "chunk", &[name, "overlap"]);
    let (second, size) = (push[1].entry.name.as_str(), push[1].bytes.len());
    receiver.write(1, 1, &push[1].bytes[1..]).unwrap();
    refused(receiver.finish(), "tensors", &[second, &format!("{} of its {size} bytes came", size - 1)]);
}

#[test]
fn gaps_are_bounded() {
    let mut tensor = tensor(Dtype::F32, &[0; 1 << 20], None);
    let sent = (0..1 << 19).take_while(|i| tensor.gather(i * 2, &[0]).is_ok()).count();
    assert_eq!(sent, 4096);
}

#[test]
fn values_that_are_not_finite_are_named() {
    for seed in 0..60 {
        let mut rng = rng(seed);
        let dtype = random_dtype(&mut rng);
        let n = rng.random_range(1..10_000);
        let mut bytes = random_bytes(&mut rng, dtype, n);
        assert_eq!(first_not_finite(&bytes, dtype), None, "seed {seed}");
        let bad = rng.random_range(0..n);
        for at in [bad, rng.random_range(bad..n)] {
            let value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][rng.random_range(0..3)];
            let value = match dtype {
                Dtype::F32 => value.to_le_bytes().to_vec(),
                Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
                Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            };
            bytes[at * dtype.size()..][..dtype.size()].copy_from_slice(&value);
        }
        assert_eq!(first_not_finite(&bytes, dtype), Some(bad), "seed {seed}: {dtype:?}");
        let expected = floats(&bytes, dtype).iter().position(|v| !v.is_finite());
        assert_eq!(expected, Some(bad), "seed {seed}");
        let gathered = tensor(dtype, &bytes, None).gather(0, &bytes);
        refused(gathered, "tensors", &["\"w\" is not finite", &format!("element {bad};")]);
    }
}

#[test]
fn in_place_each_tensor_comes_out_once_and_little_is_held() {
    let parameters = model(false);
    for seed in 0..30 {
        let mut rng = rng(seed);
        let push = random_push(&mut rng, &parameters);
        let declared = open_first(UpdateKind::Full, &push, 0, &parameters);
        // Twice the largest tensor that can come: gate_up_proj in float32.
        assert_eq!(declared.staging().in_place, (20 * HIDDEN * 4 * 2) as u64);
        let mut receiver = in_place(declared);
        let mut taken = Vec::new();
        for (i, sent) in push.iter().enumerate() {
            receiver.declare(entries(std::slice::from_ref(sent))).unwrap();
            let half = sent.bytes.len() / 2;
            assert!(receiver.write(i as u32, 0, &sent.bytes[..half]).unwrap().is_none(), "seed {seed}");
            let tensors = receiver.write(i as u32, half as u64, &sent.bytes[half..]).unwrap().unwrap();
            assert!(tensors.names().eq([sent.entry.name.as_str()]), "seed {seed}");
            assert_eq!(whole(&tensors, parameters.get(&sent.entry.name).unwrap()), sent.values(), "seed {seed}");
            assert!(receiver.write(i as u32, 0, &[]).unwrap().is_none(), "seed {seed}");
            taken.push(tensors);
        }
        let received = receiver.finish().unwrap();
        assert_eq!((received.digest, received.parameters), (digest_of(&push), parameters.len()), "seed {seed}");
        assert_eq!(full(received).names().count(), 0, "seed {seed}");
    }
}

#[test]
fn empty_chunks_take_no_memory_in_place() {
    let parameters = model(true);
    let push = random_push(&mut rng(6), &parameters);
    let mut receiver = in_place(open(UpdateKind::Full, &push, &parameters).unwrap());
    for _ in 0..100 {
        assert!(receiver.write(0, 0, &[]).unwrap().is_none());
    }
    for (i, sent) in push.iter().enumerate() {
        receiver.write(i as u32, 0, &sent.bytes).unwrap().unwrap();
    }
    receiver.finish().unwrap();
}

#[test]
fn in_place_more_than_is_set_aside_is_refused() {
    let parameters = model(true);
    let push = random_push(&mut rng(3), &parameters);
    let declared = open(UpdateKind::Full, &push, &parameters).unwrap();
    let (most, largest) = (declared.staging().in_place, push.iter().map(|sent| sent.bytes.len()).max().unwrap());
    assert_eq!(most, 2 * largest as u64);
    let mut receiver = in_place(declared);
    let mut begun = 0;
    for (i, sent) in push.iter().enumerate() {
        begun += sent.bytes.len() as u64;
        match receiver.write(i as u32, 0, &sent.bytes[..1]) {
            Ok(written) => assert!(begun <= most && written.is_none()),
            Err(Error::ResourceExhausted(message)) => {
                assert!(message.contains(&sent.entry.name), "{message}");
                assert!(begun > most);
                return;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    panic!("all of {begun} bytes were held");
}

#[test]
fn no_more_may_be_declared_than_was_announced() {
    let parameters = model(true);
    let push = random_push(&mut rng(4), &parameters);
    let open_with = |announced: u64| {
        let header = UpdateHeader { total_bytes: Some(announced), ..UpdateHeader::new(UpdateKind::Full) };
        declare(header, &push, &parameters, &Sources::default())
    };
    refused(open_with(total(&push) - 1), "total_bytes", &["announced"]);
    let mut receiver = staged(open_with(total(&push) + 1).unwrap());
    for (i, sent) in push.iter().enumerate() {
        receiver.write(i as u32, 0, &sent.bytes).unwrap();
    }
    assert_eq!(receiver.finish().unwrap().bytes, total(&push));
    let mut receiver = staged(open_with(total(&push)).unwrap());
    receiver.declare(Vec::new()).unwrap();
    let buffer = Sent::random(&mut rng(5), "model.rotary_emb.inv_freq", &[4]);
    refused(receiver.declare(entries(&[buffer])), "total_bytes", &["announced"]);
}

#[test]
fn an_adapter_of_nothing_is_the_base() {
    let received = receive(UpdateKind::Lora, &[], &model(true)).unwrap();
    assert!(matches!(received.update, WeightUpdate::Lora(_)));
    assert_eq!((received.bytes, received.parameters), (0, 0));
    let header = UpdateHeader { adapter_config: "{}".into(), ..UpdateHeader::new(UpdateKind::Full) };
    refused(declare(header, &[], &model(true), &Sources::default()), "adapter_config", &["LORA"]);
}

#[test]
fn all_is_done_in_parallel_and_every_error_is_seen() {
    for items in 0..20 {
        let done: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
        let work = |i: usize| {
            done[i].fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        in_parallel((0..items).map(|i| (i * 7 % 5, i)).collect(), work).unwrap();
        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1), "{items} items");
        for bad in 0..items {
            let work = |i: usize| if i == bad { Err(Error::DataLoss(format!("item {i}"))) } else { Ok(()) };
            lost(in_parallel((0..items).map(|i| (i * 7 % 5, i)).collect(), work), &format!("item {bad}"));
        }
    }
}
