//! Pushes that are packed as they come, compared with the parts that each rank should hold.

use std::collections::BTreeMap;

use rollout_kernels::{Backend, DeviceOptions, MatrixShape, StorageDtype};

use super::names::fuse;
use super::sources::{Segment, checkpoint, from_directory, from_segment, lay_out};
use super::streams::{random_chunks, slice_of};
use super::*;
use crate::weights::{ShadowShard, ShadowWeights};

/// A rank's number and a parameter's name.
type Place = (usize, String);

fn is_matrix(spec: &ParamSpec) -> bool {
    spec.shape.len() == 2
}

/// The parameters that share a matrix, in the model's order.
fn matrices(parameters: &Parameters) -> Vec<Vec<&ParamSpec>> {
    let mut groups: BTreeMap<String, Vec<&ParamSpec>> = BTreeMap::new();
    for spec in parameters.iter().filter(|spec| is_matrix(spec)) {
        let mut shared = spec.name.replace("gate_proj", "up_proj");
        for other in ["k_proj", "v_proj"] {
            shared = shared.replace(other, "q_proj");
        }
        groups.entry(shared).or_default().push(spec);
    }
    groups.into_values().collect()
}

fn slice(spec: &ParamSpec, rank: usize, parameters: &Parameters) -> Slice {
    Partition::new(rank, parameters.world()).slice(spec).unwrap()
}

fn precision(parameters: &Parameters) -> StorageDtype {
    if parameters.dtype() == Dtype::F32 { StorageDtype::F32 } else { StorageDtype::Bf16 }
}

/// Shadow weights as the ranks would give them.
pub(super) fn shadow_weights(parameters: &Parameters) -> ShadowWeights {
    let dtype = precision(parameters);
    let device = Backend::Cpu.open(&DeviceOptions::default()).unwrap();
    let shards = |rank| {
        let part = |spec: &&ParamSpec| (spec.name.clone(), slice(spec, rank, parameters));
        let mut shards = Vec::new();
        for specs in matrices(parameters) {
            let slices: Vec<_> = specs.iter().map(part).collect();
            let rows = slices.iter().map(|(_, slice)| slice.rows.len()).sum();
            let shape = MatrixShape { dtype, n: rows, k: slices[0].1.cols.len(), leaves: 1 };
            let matrix = device.zeros(shape).unwrap();
            shards.push(ShadowShard::matrix(matrix, slices.into_iter()));
        }
        let vectors: Vec<_> = parameters.iter().filter(|spec| !is_matrix(spec)).collect();
        shards.push(ShadowShard::vectors(vectors.iter().map(part)));
        shards
    };
    ShadowWeights::new((0..parameters.world()).map(shards).collect())
}

/// The values that each rank holds of each parameter.
fn contents(received: VerifiedPush, parameters: &Parameters) -> BTreeMap<Place, Vec<f32>> {
    let WeightUpdate::Packed(shadow) = received.update else { panic!("not packed: {:?}", received.update) };
    let mut contents = BTreeMap::new();
    for (rank, mut shards) in shadow.into_ranks().into_iter().enumerate() {
        let vectors = shards.pop().unwrap();
        for spec in parameters.iter().filter(|spec| !is_matrix(spec)) {
            contents.insert((rank, spec.name.clone()), vectors.vector(&spec.name).unwrap().to_vec());
        }
        for (specs, shard) in matrices(parameters).into_iter().zip(&mut shards) {
            let matrix = shard.as_matrix_mut().unwrap();
            let mut row = 0;
            for spec in specs {
                let slice = slice(spec, rank, parameters);
                let mut values = vec![f32::NAN; slice.len()];
                matrix.read_f32(row, &mut values);
                row += slice.rows.len();
                contents.insert((rank, spec.name.clone()), values);
            }
            assert_eq!(row, matrix.n());
        }
    }
    contents
}

/// The values that each rank should hold after this push.
fn expected(push: &[Sent], parameters: &Parameters) -> BTreeMap<Place, Vec<f32>> {
    let mut expected = BTreeMap::new();
    for sent in push {
        let spec = parameters.get(&sent.entry.name).unwrap();
        let (_, columns) = matrix_shape(&spec.shape);
        for rank in 0..parameters.world() {
            let mut values = slice_of(&sent.values(), columns, &slice(spec, rank, parameters));
            // Vectors are rounded when they are exchanged.
            if parameters.dtype() == Dtype::Bf16 && is_matrix(spec) {
                values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
            expected.insert((rank, spec.name.clone()), values);
        }
    }
    expected
}

/// The model in this dtype on `world` ranks.
fn model_of(dtype: Dtype, world: usize, tied_head: bool) -> Arc<Parameters> {
    let specs = model(tied_head).iter().cloned().collect();
    Arc::new(Parameters::new(specs, dtype, world, tied_head))
}

fn models() -> impl Iterator<Item = Arc<Parameters>> {
    let worlds = [1, 2].into_iter();
    worlds.flat_map(|world| [Dtype::Bf16, Dtype::F32].map(|dtype| model_of(dtype, world, false)))
}

fn packing(push: DeclaredPush, parameters: &Parameters) -> ReceivingPush {
    push.receive(ReceiveMode::Pack(shadow_weights(parameters))).unwrap()
}

fn same(received: VerifiedPush, push: &[Sent], parameters: &Parameters, context: &str) {
    assert_eq!((received.bytes, received.parameters), (total(push), parameters.len()), "{context}");
    let (held, expected) = (contents(received, parameters), expected(push, parameters));
    assert!(held.keys().eq(expected.keys()), "{context}");
    for (place, values) in expected {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&held[&place]), bits(&values), "{context}: {place:?}");
    }
}

#[test]
fn chunks_in_any_order_are_packed_as_they_were_sent() {
    for parameters in models() {
        for seed in 0..30 {
            let mut rng = rng(seed);
            let push = random_push(&mut rng, &parameters);
            let first = rng.random_range(0..=push.len());
            let mut receiver = packing(open_first(UpdateKind::Full, &push, first, &parameters), &parameters);
            let (early, late) = push.split_at(first);
            let mut send = |receiver: &mut ReceivingPush, part: &[Sent], start: usize| {
                let is_in_order = rng.random_bool(0.3);
                let mut chunks = random_chunks(&mut rng, part);
                // One tensor after another, so that no more than one tensor has bytes that wait.
                chunks.sort_by_key(|(tensor, offset, _)| (*tensor, if is_in_order { *offset } else { 0 }));
                for (tensor, offset, data) in chunks {
                    receiver.write(tensor + start as u32, offset, data).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
                }
            };
            send(&mut receiver, early, 0);
            receiver.declare(entries(late)).unwrap();
            send(&mut receiver, late, first);
            let received = receiver.finish().unwrap();
            let context = format!("seed {seed}: {:?} on {}", parameters.dtype(), parameters.world());
            same(received, &push, &parameters, &context);
        }
    }
}

#[test]
fn fused_tensors_and_second_names_are_packed() {
    for world in [1, 2] {
        let parameters = model_of(Dtype::Bf16, world, true);
        for seed in 0..20 {
            let mut rng = rng(seed);
            let dtype = random_dtype(&mut rng);
            let mut random = |spec: &ParamSpec| {
                Sent::new(&spec.name, dtype, &spec.shape, random_bytes(&mut rng, dtype, spec.shape.iter().product()))
            };
            let push: Vec<Sent> = parameters.iter().map(&mut random).collect();
            let mut fused = fuse(&push);
            let embedding = fused.iter().find(|sent| sent.entry.name == EMBEDDING).unwrap();
            fused.push(embedding.renamed(HEAD));
            fused.push(Sent::random(&mut rng, "model.rotary_emb.inv_freq", &[4]));
            fused.shuffle(&mut rng);
            // The head may be declared, and come, before the embedding.
            let first = rng.random_range(0..fused.len());
            let mut receiver = packing(open_first(UpdateKind::Full, &fused, first, &parameters), &parameters);
            for (i, sent) in fused.iter().enumerate() {
                if i >= first {
                    receiver.declare(entries(&fused[i..=i])).unwrap();
                }
                let cut = rng.random_range(0..=sent.bytes.len());
                receiver.write(i as u32, 0, &sent.bytes[..cut]).unwrap();
                receiver.write(i as u32, cut as u64, &sent.bytes[cut..]).unwrap();
            }
            let mut received = receiver.finish().unwrap();
            assert_eq!(received.bytes, total(&fused));
            received.bytes = total(&push);
            same(received, &push, &parameters, &format!("seed {seed} on {world}"));
        }
    }
}

#[test]
fn files_are_packed_as_they_are_declared_or_at_the_end() {
    for parameters in models() {
        for seed in 0..10 {
            let mut rng = rng(seed);
            let mut push = random_push(&mut rng, &parameters);
            let dir = checkpoint(&push);
            let receiver = from_directory(UpdateKind::Full, "step-7", &parameters, dir.path()).unwrap();
            same(packing(receiver, &parameters).finish().unwrap(), &push, &parameters, &format!("seed {seed}"));

            let segment = Segment::new("packing", &lay_out(&mut rng, &mut push));
            let whole = from_segment(UpdateKind::Full, &push, &segment.name(), &parameters).unwrap();
            same(packing(whole, &parameters).finish().unwrap(), &push, &parameters, &format!("seed {seed}"));

            let source = Source::SharedMemory(segment.name());
            let total_bytes = Some(total(&push));
            let header = UpdateHeader { source, total_bytes, ..UpdateHeader::new(UpdateKind::Full) };
            let declared = declare(header, &push[..2], &parameters, &Sources::default()).unwrap();
            let mut receiver = packing(declared, &parameters);
            for sent in &push[2..] {
                receiver.declare(vec![sent.entry.clone()]).unwrap();
            }
            // Tensors that have been read are not read again.
            segment.cut(0);
            same(receiver.finish().unwrap(), &push, &parameters, &format!("seed {seed}"));
        }
    }
}

#[test]
fn a_tensor_that_is_refused_when_it_is_kept_is_refused_when_it_is_packed() {
    let parameters = model_of(Dtype::Bf16, 2, false);
    let push = random_push(&mut rng(3), &parameters);
    let place = push.iter().position(|sent| sent.entry.dtype == Dtype::F32 && sent.bytes.len() > 100).unwrap();
    let name = push[place].entry.name.clone();
    let write_all = |push: &[Sent]| {
        let mut receiver = packing(open(UpdateKind::Full, push, &parameters).unwrap(), &parameters);
        for (i, sent) in push.iter().enumerate() {
            for (piece, offset) in sent.bytes.chunks(7).zip((0..).step_by(7)) {
                receiver.write(i as u32, offset, piece)?;
            }
        }
        receiver.finish()
    };
    let mut other = push.clone();
    other[place].bytes[50] ^= 1;
    lost(write_all(&other), &name);
    let mut bytes = push[place].bytes.clone();
    bytes[84..88].copy_from_slice(&f32::NAN.to_le_bytes());
    let mut bad = push.clone();
    bad[place] = push[place].with(bytes);
    refused(write_all(&bad), "tensors", &[&name, "is not finite at element 21"]);

    let open = || packing(open(UpdateKind::Full, &push, &parameters).unwrap(), &parameters);
    let mut receiver = open();
    receiver.write(place as u32, 8, &push[place].bytes[8..20]).unwrap();
    for (start, end) in [(8, 9), (4, 12), (19, 30), (10, 12)] {
        let again = receiver.write(place as u32, start, &push[place].bytes[start as usize..end]);
        refused(again, "chunk", &["overlap bytes that were sent before"]);
    }
    receiver.write(place as u32, 0, &push[place].bytes[..8]).unwrap();
    refused(receiver.write(place as u32, 0, &[1]), "chunk", &["overlap"]);
    let past = receiver.write(place as u32, push[place].bytes.len() as u64, &[1]);
    refused(past, "chunk", &["are outside its"]);
    refused(receiver.finish(), "tensors", &["is not whole"]);
    let mut receiver = open();
    receiver.write(place as u32, 4, &push[place].bytes[4..]).unwrap();
    refused(receiver.finish(), "tensors", &["is not whole"]);
}

#[test]
fn more_than_a_model_can_have_is_not_announced() {
    let parameters = model(false);
    let push = random_push(&mut rng(5), &parameters);
    let elements: usize = parameters.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
    let most = 8 * elements as u64 + (64 << 20);
    let announce = |bytes| {
        let header = UpdateHeader { total_bytes: Some(bytes), ..UpdateHeader::new(UpdateKind::Full) };
        declare(header, &push, &parameters, &Sources::default())
    };
    announce(most).unwrap();
    for bytes in [most + 1, 1 << 62, u64::MAX] {
        refused(
            announce(bytes),
            "total_bytes",
            &[&format!("{bytes} bytes are announced"), &format!("{}", 4 * elements)],
        );
    }
}

#[test]
fn what_broadcasts_take_of_the_host_is_not_the_devices() {
    let parameters = model_of(Dtype::Bf16, 2, false);
    let source = Source::Broadcast(TransitBytes { on_devices: 1000, on_host: 70 });
    let header = UpdateHeader { total_bytes: Some(1 << 20), source, ..UpdateHeader::new(UpdateKind::Full) };
    let staging = declare(header, &[], &parameters, &Sources::default()).unwrap().staging();
    let serving: u64 = parameters.iter().map(|spec| parameters.bytes_on_ranks(spec).unwrap()).sum();
    assert_eq!((staging.shadow, staging.staged), (serving + 1000, serving + 1070));
}

#[test]
fn no_more_waits_than_is_set_aside() {
    let parameters = model_of(Dtype::Bf16, 2, false);
    let push = random_push(&mut rng(4), &parameters);
    let declared = open(UpdateKind::Full, &push, &parameters).unwrap();
    let serving: u64 = parameters.iter().map(|spec| parameters.bytes_on_ranks(spec).unwrap()).sum();
    let room = push.iter().map(|sent| sent.bytes.len()).max().unwrap() as u64;
    assert_eq!(declared.staging().staged, serving + room);
    let mut receiver = packing(declared, &parameters);
    let mut waits = 0;
    for (i, sent) in push.iter().enumerate() {
        let result = receiver.write(i as u32, 1, &sent.bytes[1..]);
        waits += sent.bytes.len() as u64 - 1;
        if waits > room {
            let Err(Error::ResourceExhausted(why)) = result else { panic!("{waits} of {room} wait: {result:?}") };
            assert!(why.contains(&sent.entry.name) && why.contains("from its beginning"), "{why}");
            return;
        }
        result.unwrap();
    }
    panic!("{waits} of {room} wait");
}

#[test]
fn what_was_passed_on_waits_no_more() {
    let parameters = model_of(Dtype::Bf16, 1, false);
    let push = random_push(&mut rng(6), &parameters);
    let room = push.iter().map(|sent| sent.bytes.len()).max().unwrap();
    let mut receiver = packing(open(UpdateKind::Full, &push, &parameters).unwrap(), &parameters);
    let largest = push.iter().position(|sent| sent.bytes.len() == room).unwrap();
    // Bytes of other tensors wait, so that there is room for a quarter of the largest one.
    let (part, mut left) = (room / 4, room - room / 4);
    for (i, sent) in push.iter().enumerate().filter(|(i, _)| *i != largest) {
        let waits = left.min(sent.bytes.len() - 1);
        receiver.write(i as u32, 1, &sent.bytes[1..=waits]).unwrap();
        left -= waits;
    }
    assert_eq!(left, 0, "the others are too small");
    for part in [1, 0, 3, 2].map(|i| i * part..if i == 3 { room } else { (i + 1) * part }) {
        receiver.write(largest as u32, part.start as u64, &push[largest].bytes[part.clone()]).unwrap();
    }
}
