//! Pushes of every kind and source, valid at first and then spoilt.

use bytes::Bytes;
use prost::Message as _;
use rollout_server::server::pb::{self, update_request::Kind};
use xxhash_rust::xxh3::xxh3_128;

use super::dice::Dice;
use super::mutate::{mutated, rough};
use super::run::Facts;
use super::server::{STORED_VERSIONS, fixture};
use super::wire::{Call, End, Leave, envelope};

/// A declared tensor, and the bytes that are sent for it.
type Sent = (pb::Tensor, Vec<u8>);

/// One push, before it is cut into messages.
struct Push {
    header: pb::Header,
    tensors: Vec<Sent>,
}

fn tensor(name: &str, dtype: pb::TensorDtype, shape: &[u64], bytes: Vec<u8>) -> Sent {
    let digest = xxh3_128(&bytes).to_be_bytes().to_vec();
    let tensor =
        pb::Tensor { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), digest, ..Default::default() };
    (tensor, bytes)
}

/// An adapter of the fixtures. With all its values zero it changes nothing.
fn lora(dice: &mut Dice) -> Push {
    let directory = fixture(dice.pick(&["peft/bfloat16", "peft/rslora_patterns", "peft/plain"]));
    let file = std::fs::read(directory.join("adapter_model.safetensors")).expect("a fixture");
    let stored = safetensors::SafeTensors::deserialize(&file).expect("a fixture");
    let is_zero = dice.coin();
    let sent = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = match view.dtype() {
            safetensors::Dtype::BF16 => pb::TensorDtype::Bfloat16,
            safetensors::Dtype::F16 => pb::TensorDtype::Float16,
            _ => pb::TensorDtype::Float32,
        };
        let shape: Vec<u64> = view.shape().iter().map(|&d| d as u64).collect();
        let bytes = if is_zero { vec![0; view.data().len()] } else { view.data().to_vec() };
        tensor(&name, dtype, &shape, bytes)
    };
    let tensors = stored.tensors().into_iter().map(sent).collect();
    let adapter_config = std::fs::read_to_string(directory.join("adapter_config.json")).expect("a fixture");
    let adapter = if dice.coin() { String::new() } else { dice.name(&["student", "teacher", "third"]) };
    let kind = pb::UpdateKind::Lora.into();
    Push { header: pb::Header { kind, adapter_config, adapter, ..Default::default() }, tensors }
}

/// A push of the base without an adapter.
fn base() -> Push {
    Push { header: pb::Header { kind: pb::UpdateKind::Lora.into(), ..Default::default() }, tensors: Vec::new() }
}

/// `count` values; seldom such that a model with them computes NaN.
fn values(dice: &mut Dice, count: usize) -> Vec<u8> {
    let pattern: Vec<f32> = match dice.below(8) {
        0 => vec![f32::MAX, f32::MIN],
        1 => vec![0.0],
        _ => (0..61).map(|i| (i as f32 - 30.0) / 400.0).collect(),
    };
    pattern.iter().cycle().take(count).flat_map(|value| value.to_le_bytes()).collect()
}

fn full(dice: &mut Dice, facts: &Facts) -> Push {
    let mut sent = |parameter: &pb::Parameter| {
        let count = parameter.shape.iter().product::<u64>() as usize;
        tensor(&parameter.name, pb::TensorDtype::Float32, &parameter.shape, values(dice, count))
    };
    let tensors = facts.parameters.iter().map(&mut sent).collect();
    let header = pb::Header { kind: pb::UpdateKind::Full.into(), in_place: dice.one_in(3), ..Default::default() };
    Push { header, tensors }
}

/// A zstd payload of four bytes a block, each of which decompresses to 32,768 bytes.
fn bomb(blocks: usize) -> Vec<u8> {
    const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
    /// Several segments, no size, no checksum; a window of 128 MiB.
    const HEADER: [u8; 2] = [0, 0x88];
    let block = |last: usize| (((32_768 << 3) | 1 << 1 | last) as u32).to_le_bytes();
    let mut bytes = [&MAGIC[..], &HEADER].concat();
    for number in 0..blocks {
        bytes.extend(&block(usize::from(number + 1 == blocks))[..3]);
        bytes.push(0);
    }
    bytes
}

fn delta(dice: &mut Dice, facts: &Facts) -> Push {
    let mut tensors = Vec::new();
    for parameter in facts.parameters.iter().filter(|_| dice.one_in(4)).cloned().collect::<Vec<_>>() {
        let elements = parameter.shape.iter().product::<u64>() as usize;
        let changed = 1 + dice.below(elements.min(40));
        let mut plain: Vec<u8> = (0..changed).flat_map(|i| u32::from(i > 0).to_le_bytes()).collect();
        plain.extend(values(dice, changed));
        match dice.below(8) {
            0 => plain.truncate(dice.below(plain.len())),
            1 => plain = mutated(dice, plain),
            2 => plain.extend(vec![0; 1 << 20]),
            _ => {}
        }
        let payload = match dice.below(10) {
            0 => dice.bytes(99),
            1 => bomb(dice.pick(&[1, 300, 30_000])),
            2 => {
                let whole = zstd::encode_all(&plain[..], 1).expect("it compresses");
                mutated(dice, whole)
            }
            _ => zstd::encode_all(&plain[..], 1).expect("it compresses"),
        };
        let (mut declared, bytes) = tensor(&parameter.name, pb::TensorDtype::Float32, &parameter.shape, payload);
        declared.changed = if dice.one_in(10) { dice.u64() } else { changed as u64 };
        declared.payload_bytes = bytes.len() as u64;
        tensors.push((declared, bytes));
    }
    let expected_version = if dice.one_in(6) { dice.maybe(Dice::u64) } else { Some(0) };
    Push { header: pb::Header { kind: pb::UpdateKind::Delta.into(), expected_version, ..Default::default() }, tensors }
}

fn directory(dice: &mut Dice) -> Push {
    let path = match dice.below(4) {
        0 => dice.text(),
        _ => dice.pick(&["adapter", "full", "empty", "bad", "outside", "../weights/full", "", ".", "/"]).into(),
    };
    let kind = dice.pick(&[pb::UpdateKind::Lora, pb::UpdateKind::Full, pb::UpdateKind::Delta]).into();
    Push { header: pb::Header { kind, source: below_weights_dir(path), ..Default::default() }, tensors: Vec::new() }
}

/// A version of the delta store, of which most are damaged.
fn stored(dice: &mut Dice) -> Push {
    let header = pb::Header {
        kind: pb::UpdateKind::Delta.into(),
        source: below_weights_dir("store".into()),
        new_version: Some(dice.below(STORED_VERSIONS + 2) as u64),
        ..Default::default()
    };
    Push { header, tensors: Vec::new() }
}

fn below_weights_dir(path: String) -> Option<pb::Source> {
    Some(pb::Source { kind: Some(pb::source::Kind::Directory(pb::Directory { path })) })
}

/// Puts wrong facts into the header and the declarations.
fn spoil(dice: &mut Dice, push: &mut Push) {
    let header = &mut push.header;
    match dice.below(21) {
        0 => header.kind = dice.pick(&[0, -1, 4, 1, 2, 3]),
        1 => header.running = dice.pick(&[-1, 5, i32::MAX]),
        2 => header.total_bytes = Some(dice.u64()),
        3 => header.expected_version = Some(dice.u64()),
        4 => header.expected_generation = Some(dice.u64()),
        5 => header.adapter = dice.text(),
        6 => header.adapter_config = dice.text(),
        7 => {
            let config = mutated(dice, std::mem::take(&mut header.adapter_config).into_bytes());
            header.adapter_config = String::from_utf8_lossy(&config).into_owned();
        }
        8 => header.source = Some(pb::Source { kind: None }),
        9 => {
            let name = dice.text();
            header.source = Some(pb::Source { kind: Some(pb::source::Kind::SharedMemory(pb::SharedMemory { name })) });
        }
        10 => header.in_place = true,
        _ if push.tensors.is_empty() => {}
        number => {
            let (at, other) = (dice.below(push.tensors.len()), dice.below(push.tensors.len()));
            spoil_tensor(dice, &mut push.tensors, number, at, other);
        }
    }
}

fn spoil_tensor(dice: &mut Dice, tensors: &mut Vec<Sent>, number: usize, at: usize, other: usize) {
    let tensor = &mut tensors[at].0;
    match number {
        11 => tensor.name = dice.text(),
        12 => tensor.dtype = dice.pick(&[-1, 0, 2, 3, 4]),
        13 => tensor.shape = dice.list(4, Dice::u64),
        14 => tensor.digest = dice.bytes(20),
        15 => (tensor.changed, tensor.payload_bytes) = (dice.u64(), dice.u64()),
        16 => tensor.offset = dice.u64(),
        17 => drop(tensors.remove(at)),
        18 => tensors.push(tensors[at].clone()),
        19 => tensor.allocation = Some(allocation(dice)),
        _ => tensors.swap(at, other),
    }
}

/// Moves all bytes of the push into a shared-memory segment.
fn share(dice: &mut Dice, push: &mut Push, segment: &Segment) {
    let mut content = Vec::new();
    for (tensor, bytes) in &mut push.tensors {
        tensor.offset = content.len() as u64;
        content.append(bytes);
    }
    if dice.one_in(4) {
        content.truncate(dice.below(content.len() + 1));
    }
    std::fs::write(&segment.path, &content).expect("room for a segment");
    let name = segment.name.clone();
    push.header.source = Some(pb::Source { kind: Some(pb::source::Kind::SharedMemory(pb::SharedMemory { name })) });
}

/// Says that the push lies in device memory, which no server of these tests can open.
fn lend(dice: &mut Dice, push: &mut Push) {
    for (tensor, bytes) in &mut push.tensors {
        bytes.clear();
        tensor.allocation = dice.maybe(allocation);
    }
    push.header.source = Some(pb::Source { kind: Some(pb::source::Kind::DeviceMemory(pb::DeviceMemory {})) });
}

fn allocation(dice: &mut Dice) -> pb::DeviceAllocation {
    let handle = if dice.one_in(4) { dice.bytes(200) } else { vec![dice.u32() as u8; 64] };
    pb::DeviceAllocation { device_uuid: dice.text(), handle }
}

/// A shared-memory segment of this process, which is removed on drop.
pub struct Segment {
    name: String,
    path: std::path::PathBuf,
}

impl Segment {
    pub fn new(target: &str) -> Self {
        let name = format!("rollout-fuzz-{target}-{}", std::process::id());
        let path = std::path::Path::new("/dev/shm").join(&name);
        Self { name, path }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Fails if no case has used the segment.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The messages of a push: tensors in the header or in manifests, bytes in chunks of any size and order.
fn messages(dice: &mut Dice, push: Push) -> Vec<Kind> {
    let Push { mut header, tensors } = push;
    let (declared, bytes): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let in_header = if dice.coin() || header.kind() == pb::UpdateKind::Delta {
        declared.len()
    } else {
        dice.below(declared.len() + 1)
    };
    let later = declared[in_header..].to_vec();
    if !later.is_empty() && dice.below(4) > 0 {
        header.total_bytes.get_or_insert(bytes.iter().map(|bytes| bytes.len() as u64).sum());
    }
    header.tensors = declared[..in_header].to_vec();
    let mut chunks = Vec::new();
    let size = dice.pick(&[1 << 20, 100_000, 100_000, 20_000]);
    for (tensor, bytes) in (0u32..).zip(&bytes) {
        for (data, offset) in bytes.chunks(size).zip((0u64..).step_by(size)) {
            chunks.push(Kind::Chunk(pb::Chunk { tensor, offset, data: data.to_vec().into() }));
        }
    }
    if dice.one_in(4) {
        chunks.reverse();
    }
    let manifest = (!later.is_empty()).then_some(Kind::Manifest(pb::Manifest { tensors: later }));
    let whole = [Kind::Header(header)].into_iter().chain(manifest).chain(chunks);
    whole.chain([Kind::Commit(pb::Commit {})]).collect()
}

/// Leaves messages out, sends them twice or in another order, or changes facts in chunks.
fn disorder(dice: &mut Dice, messages: &mut Vec<Kind>) {
    let (at, other) = (dice.below(messages.len()), dice.below(messages.len()));
    match dice.below(8) {
        0 => drop(messages.remove(at)),
        1 => messages.insert(at, messages[other].clone()),
        2 => messages.swap(at, other),
        3 => messages.truncate(at),
        4 => {
            let data = Bytes::from(dice.bytes(300));
            messages.insert(at, Kind::Chunk(pb::Chunk { tensor: dice.u32(), offset: dice.u64(), data }));
        }
        5 => messages.insert(at, Kind::Commit(pb::Commit {})),
        _ => {
            if let Kind::Chunk(chunk) = &mut messages[at] {
                match dice.below(4) {
                    0 => chunk.offset = dice.u64(),
                    1 => chunk.offset = chunk.offset.saturating_sub(1),
                    2 => chunk.tensor = dice.u32(),
                    _ => chunk.data = dice.bytes(5_000).into(),
                }
            }
        }
    }
}

fn describe(push: &Push) -> String {
    let pb::Header { adapter_config, .. } = &push.header;
    let short = pb::Header { adapter_config: adapter_config.chars().take(60).collect(), ..push.header.clone() };
    let names = push.tensors.iter().take(4).map(|(tensor, bytes)| (tensor, bytes.len()));
    let mut what = format!("{short:?} with {} tensors: {:?}", push.tensors.len(), names.collect::<Vec<_>>());
    what.truncate(what.floor_char_boundary(3_000));
    what
}

pub fn update(dice: &mut Dice, facts: &Facts) -> Call {
    let mut push = match dice.below(9) {
        0 => base(),
        1 => directory(dice),
        8 => stored(dice),
        2 | 3 => full(dice, facts),
        4 | 5 => delta(dice, facts),
        _ => lora(dice),
    };
    push.header.running = dice.enumeration(4);
    // Mostly version 0, the one that deltas are against.
    let version = push.header.new_version.or(Some(0));
    push.header.new_version = if dice.one_in(6) { dice.maybe(Dice::u64) } else { version };
    push.header.force_version = !dice.one_in(6);
    if !push.tensors.is_empty() && dice.one_in(5) {
        share(dice, &mut push, &facts.segment);
    }
    if !push.tensors.is_empty() && dice.one_in(20) {
        lend(dice, &mut push);
    }
    (0..dice.pick(&[0, 0, 1, 1, 2])).for_each(|_| spoil(dice, &mut push));
    let what = describe(&push);
    let mut messages = messages(dice, push);
    if dice.one_in(3) && messages.len() > 1 {
        disorder(dice, &mut messages);
    }
    let encoded = messages.into_iter().map(|kind| pb::UpdateRequest { kind: Some(kind) }.encode_to_vec());
    let mut body: Vec<Bytes> = encoded.map(|message| envelope(&message)).collect();
    if dice.one_in(5) && !body.is_empty() {
        spoil_bytes(dice, &mut body);
    }
    let mut call = Call { what, ..Call::raw("rollout.v1.Weights/Update", body) };
    rough(dice, &mut call);
    if dice.one_in(10) {
        // The client never sends the rest.
        call.end = End::Open;
        call.body.truncate(1 + dice.below(call.body.len().max(1)));
        call.timeout = Some("40m".into());
    }
    if let Leave::AfterMessages(_) = call.leave {
        call.leave = Leave::Never;
    }
    call
}

/// Replaces one message by other bytes, breaks its length or flag, or cuts the stream at any byte.
fn spoil_bytes(dice: &mut Dice, body: &mut Vec<Bytes>) {
    let at = dice.below(body.len());
    let mut bytes = body[at].to_vec();
    match dice.below(5) {
        0 => bytes[0] = dice.pick(&[1, 2, 255]),
        1 => bytes[1..5].copy_from_slice(&dice.u32().to_be_bytes()),
        2 => bytes.truncate(dice.below(bytes.len())),
        _ => bytes = envelope(&mutated(dice, bytes[5..].to_vec())).to_vec(),
    }
    body[at] = bytes.into();
    if dice.coin() {
        body.truncate(at + 1);
    }
    body.retain(|piece| !piece.is_empty());
}
