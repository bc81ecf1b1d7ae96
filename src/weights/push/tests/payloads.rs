use std::collections::BTreeMap;

use super::super::delta::{self, decoded_bytes};
use super::*;
use crate::weights::Delta;
use crate::weights::update::TensorDelta;

const GAP: usize = 4;

fn compress(raw: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(raw, 3).unwrap()
}

/// A payload before it is compressed: the gaps between ascending indices, then values.
fn raw_payload(indices: &[u64], values: &[u8]) -> Vec<u8> {
    let before = std::iter::once(0).chain(indices.iter().copied());
    let gaps = indices.iter().zip(before).flat_map(|(&index, before)| ((index - before) as u32).to_le_bytes());
    gaps.chain(values.iter().copied()).collect()
}

/// A payload of `changed` elements of a tensor.
fn payload(name: &str, dtype: Dtype, shape: &[usize], changed: usize, bytes: Vec<u8>) -> Sent {
    let mut sent = Sent::new(name, dtype, shape, bytes);
    sent.entry.payload = Some((changed as u64, sent.bytes.len() as u64));
    sent
}

/// Decodes the payload of a vector.
fn decode(name: &str, payload: &[u8], dtype: Dtype, changed: usize, elements: usize) -> Result<TensorDelta> {
    let sent = Sent::new(name, dtype, &[elements], payload.to_vec());
    delta::decode(&TensorEntry { payload: Some((changed as u64, payload.len() as u64)), ..sent.entry }, payload)
}

fn random_indices(rng: &mut StdRng, elements: usize) -> Vec<u64> {
    let share = rng.random_range(0.0..=1.0);
    (0..elements as u64).filter(|_| rng.random_bool(share)).collect()
}

fn delta(received: VerifiedPush) -> Arc<Delta> {
    match received.update {
        WeightUpdate::Delta(delta) => delta,
        other => panic!("not a DELTA: {other:?}"),
    }
}

#[test]
fn a_delta_is_a_direct_patch() {
    let parameters = model(true);
    for seed in 0..60 {
        let mut rng = rng(seed);
        let (mut push, mut expected) = (Vec::new(), BTreeMap::new());
        for spec in parameters.iter().filter(|_| rng.random_bool(0.7)).cloned().collect::<Vec<_>>() {
            let elements = spec.shape.iter().product();
            let indices = random_indices(&mut rng, elements);
            let dtype = random_dtype(&mut rng);
            let values = random_bytes(&mut rng, dtype, indices.len());
            let bytes = compress(&raw_payload(&indices, &values));
            push.push(payload(&format!("module.{}", spec.name), dtype, &spec.shape, indices.len(), bytes));
            expected.insert(spec.name, (indices, floats(&values, dtype), dtype));
        }
        push.shuffle(&mut rng);
        let most = open(UpdateKind::Delta, &push, &parameters).unwrap().staging().staged;
        let decoded: u64 = expected.values().map(|(i, _, dtype)| decoded_bytes(i.len() as u64, *dtype)).sum();
        assert_eq!(most, total(&push) + decoded, "seed {seed}");
        let received = receive(UpdateKind::Delta, &push, &parameters).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_eq!((received.parameters, received.bytes), (expected.len(), total(&push)), "seed {seed}");
        let delta = delta(received);
        assert!(delta.names().eq(expected.keys()), "seed {seed}");
        for (name, (indices, values, dtype)) in &expected {
            let changes = delta.changes(name).unwrap();
            assert_eq!(changes.indices, indices, "seed {seed}: {name}");
            assert_eq!(changes.values.dtype(), *dtype, "seed {seed}: {name}");
            assert_eq!(*changes.values.into_f32(), *values, "seed {seed}: {name}");
        }
        assert!(delta.changes("model.norm.weight").is_none());
    }
}

#[test]
fn changes_of_a_fused_tensor_are_those_of_its_parameters() {
    let (parameters, layer) = (model(true), "model.layers.0");
    for seed in 0..20 {
        let mut rng = rng(seed);
        let rows = |projection: &str| parameters.get(&format!("{layer}.{projection}.weight")).unwrap().shape[0];
        for (fused, projections) in [
            ("self_attn.qkv_proj", vec!["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("mlp.gate_up_proj", vec!["mlp.gate_proj", "mlp.up_proj"]),
        ] {
            let shape = [projections.iter().map(|projection| rows(projection)).sum(), HIDDEN];
            let (indices, dtype) = (random_indices(&mut rng, shape[0] * HIDDEN), random_dtype(&mut rng));
            if indices.is_empty() {
                continue;
            }
            let values = random_bytes(&mut rng, dtype, indices.len());
            let bytes = compress(&raw_payload(&indices, &values));
            let push = [payload(&format!("{layer}.{fused}.weight"), dtype, &shape, indices.len(), bytes)];
            let delta = delta(receive(UpdateKind::Delta, &push, &parameters).unwrap());
            let (mut found, mut first) = (Vec::new(), 0);
            for projection in projections {
                let changes = delta.changes(&format!("{layer}.{projection}.weight")).unwrap();
                let indices = changes.indices.iter().map(|index| index + first);
                found.extend(indices.zip(changes.values.into_f32().iter().copied()));
                first += (rows(projection) * HIDDEN) as u64;
            }
            let expected: Vec<(u64, f32)> = indices.into_iter().zip(floats(&values, dtype)).collect();
            assert_eq!(found, expected, "seed {seed}: {fused}");
        }
    }
}

#[test]
fn the_head_of_a_tied_model_is_patched_once() {
    let parameters = model(true);
    let bytes = compress(&raw_payload(&[5], &1f32.to_le_bytes()));
    let embedding = payload(EMBEDDING, Dtype::F32, &[12, HIDDEN], 1, bytes);
    for push in [vec![embedding.renamed(HEAD)], vec![embedding.renamed(HEAD), embedding.clone()]] {
        let received = receive(UpdateKind::Delta, &push, &parameters).unwrap();
        assert_eq!(received.parameters, 1);
        assert!(delta(received).names().eq([EMBEDDING]));
    }
}

#[test]
fn malformed_payloads_are_refused() {
    let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let good = raw_payload(&[0, 3, 7], &f32s(&[1.0, 2.0, 3.0]));
    let check = |raw: &[u8], parts: &[&str]| {
        refused(decode("w", &compress(raw), Dtype::F32, 3, 8), "tensors", &[&["\"w\""], parts].concat());
    };
    decode("w", &compress(&good), Dtype::F32, 3, 8).unwrap();
    refused(decode("w", &compress(&good), Dtype::F32, 3, 7), "tensors", &["index 7 is outside its 7 elements"]);
    let gaps = |gaps: [u32; 3]| -> Vec<u8> {
        let gaps = gaps.iter().flat_map(|gap| gap.to_le_bytes());
        gaps.chain(f32s(&[1.0, 2.0, 3.0])).collect()
    };
    check(&gaps([0, 0, 1]), &["index 0 is repeated"]);
    check(&gaps([2, 3, 0]), &["index 5 is repeated"]);
    check(&gaps([8, 1, 1]), &["index 8 is outside its 8 elements"]);
    check(&gaps([1, u32::MAX, 1]), &["outside its 8 elements"]);
    check(&raw_payload(&[0, 3, 7], &f32s(&[1.0, f32::NAN, 3.0])), &["element 3 is not finite"]);
    check(&good[..good.len() - 1], &["has 23 bytes", "have 24"]);
    check(&[], &["has 0 bytes"]);
    check(&[&good[..], &[0]].concat(), &["does not decompress to the 24 bytes"]);
    // A payload that would decompress to far more is stopped at the announced size.
    check(&vec![0; 64 << 20], &["does not decompress to the 24 bytes"]);
    let compressed = compress(&good);
    for end in 0..compressed.len() {
        refused(decode("w", &compressed[..end], Dtype::F32, 3, 8), "tensors", &["payload of tensor \"w\""]);
    }
    let two = [compress(&good), compress(&good)].concat();
    refused(decode("w", &two, Dtype::F32, 3, 8), "tensors", &["does not decompress"]);
}

#[test]
fn payloads_of_random_bytes_never_panic() {
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..4000 {
        let mut rng = rng(seed);
        let elements = rng.random_range(1..500);
        let indices = random_indices(&mut rng, elements);
        let dtype = random_dtype(&mut rng);
        let mut raw = raw_payload(&indices, &random_bytes(&mut rng, dtype, indices.len()));
        let flip = |bytes: &mut [u8], rng: &mut StdRng| {
            for _ in 0..rng.random_range(1..4) {
                if let Some(last) = bytes.len().checked_sub(1) {
                    bytes[rng.random_range(0..=last)] = rng.random();
                }
            }
        };
        // Half of the payloads are a whole zstd frame with garbage in it, and half are a damaged frame.
        let payload = if rng.random_bool(0.5) {
            flip(&mut raw, &mut rng);
            compress(&raw)
        } else {
            let mut payload = compress(&raw);
            flip(&mut payload, &mut rng);
            payload
        };
        match decode("w", &payload, dtype, indices.len(), elements) {
            Err(_) => refused += 1,
            Ok(decoded) => {
                accepted += 1;
                let divided = decoded.divide(vec![("w".into(), elements as u64)]);
                let changes = divided[0].1.changes();
                assert!(changes.indices.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}");
                assert!(changes.indices.last().is_none_or(|&last| last < elements as u64), "seed {seed}");
                assert_eq!(changes.values.len(), indices.len(), "seed {seed}");
                assert!(changes.values.into_f32().iter().all(|v| v.is_finite()), "seed {seed}");
            }
        }
    }
    assert!(accepted > 100 && refused > 1000, "{accepted} accepted, {refused} refused: the test is blind");
}

#[test]
fn what_a_delta_declares_is_checked() {
    let parameters = model(true);
    let shape = [12, HIDDEN];
    let bytes = compress(&raw_payload(&[5], &1f32.to_le_bytes()));
    let good = payload(EMBEDDING, Dtype::F32, &shape, 1, bytes.clone());
    let check = |change: &dyn Fn(&mut TensorEntry), field: &str, parts: &[&str]| {
        let mut sent = good.clone();
        change(&mut sent.entry);
        refused(receive(UpdateKind::Delta, &[sent], &parameters), field, parts);
    };
    receive(UpdateKind::Delta, std::slice::from_ref(&good), &parameters).unwrap();
    check(&|entry| entry.payload = None, "tensors", &[EMBEDDING, "`changed` and `payload_bytes`"]);
    check(&|entry| entry.payload = Some((97, 9)), "tensors", &[EMBEDDING, "97 of its 96 elements"]);
    check(&|entry| entry.payload = Some((1, 0)), "tensors", &[EMBEDDING, "has 0 bytes"]);
    check(&|entry| entry.payload = Some((1, u64::MAX)), "tensors", &[EMBEDDING]);
    check(&|entry| entry.payload = Some((2, bytes.len() as u64)), "tensors", &[EMBEDDING, "2 changed elements"]);
    check(&|entry| entry.shape = vec![96], "tensors", &[EMBEDDING, "expected was [12, 8]"]);
    check(&|entry| entry.shape = vec![1 << 16, 1 << 16], "tensors", &[EMBEDDING, "fewer than 2^32"]);
    check(&|entry| entry.name = "model.rotary_emb.inv_freq".into(), "tensors", &["a DELTA brings parameters only"]);
    let header = UpdateHeader { total_bytes: Some(1 << 20), ..UpdateHeader::new(UpdateKind::Delta) };
    let later = declare(header, std::slice::from_ref(&good), &parameters, &Sources::default());
    refused(later, "total_bytes", &["in the header"]);
    // The announced digest is that of the compressed payload.
    let mut corrupt = good.clone();
    corrupt.bytes[6] ^= 4;
    lost(receive(UpdateKind::Delta, &[corrupt], &parameters), EMBEDDING);
    assert_eq!(decoded_bytes(3, Dtype::Bf16), 3 * (8 + GAP as u64 + 2));
    assert_eq!(decoded_bytes(u64::MAX, Dtype::Bf16), u64::MAX);
}
