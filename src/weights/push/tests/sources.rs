use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::super::transport::{Segments, SourceFile};
use super::streams::tensor;
use super::*;
use crate::weights::parameters::ParameterMapping;
use crate::weights::update::PushedRows;

/// A segment, opened as a push opens it.
fn opened(segment: &Segment) -> Option<Arc<SourceFile>> {
    Some(Arc::new(SourceFile::mapped(&segment.name(), Segments::default().open(&segment.name()).unwrap())))
}

/// A segment that is removed when the test ends.
pub(super) struct Segment(pub(super) PathBuf);

impl Segment {
    pub(super) fn new(test: &str, bytes: &[u8]) -> Self {
        let path = Path::new("/dev/shm").join(format!("rollout-test-{}-{test}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    /// Cuts the segment down to its first `bytes` bytes.
    pub(super) fn cut(&self, bytes: u64) {
        std::fs::OpenOptions::new().write(true).open(&self.0).unwrap().set_len(bytes).unwrap();
    }

    pub(super) fn name(&self) -> String {
        self.0.file_name().unwrap().to_str().unwrap().into()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

/// Places the tensors of a push in a segment, with random bytes between them. Returns the bytes of the segment.
pub(super) fn lay_out(rng: &mut StdRng, push: &mut [Sent]) -> Vec<u8> {
    lay_out_apart(rng, push, 20)
}

/// [`lay_out`] with fewer than `gap` bytes between two tensors.
fn lay_out_apart(rng: &mut StdRng, push: &mut [Sent], gap: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for sent in push {
        bytes.extend((0..rng.random_range(0..gap)).map(|_| rng.random::<u8>()));
        sent.entry.offset = bytes.len() as u64;
        bytes.extend_from_slice(&sent.bytes);
    }
    bytes
}

pub(super) fn from_segment(
    kind: UpdateKind,
    push: &[Sent],
    name: &str,
    parameters: &Arc<Parameters>,
) -> Result<DeclaredPush> {
    let header = UpdateHeader { source: Source::SharedMemory(name.into()), ..UpdateHeader::new(kind) };
    declare(header, push, parameters, &Sources::default())
}

pub(super) fn from_directory(
    kind: UpdateKind,
    path: &str,
    parameters: &Arc<Parameters>,
    below: &Path,
) -> Result<DeclaredPush> {
    let header = UpdateHeader { source: Source::Directory(path.into()), ..UpdateHeader::new(kind) };
    declare(header, &[], parameters, &Sources::new(Some(below.into())))
}

/// Bytes of the parameters as they serve, on all ranks.
fn serving(parameters: &Parameters) -> u64 {
    parameters.iter().map(|spec| parameters.bytes_on_ranks(spec).unwrap()).sum()
}

fn assert_same(one: VerifiedPush, other: VerifiedPush, parameters: &Parameters, context: &str) {
    assert_eq!((one.digest, one.bytes, one.parameters), (other.digest, other.bytes, other.parameters), "{context}");
    let (one, other) = (full(one), full(other));
    for spec in parameters.iter() {
        assert_eq!(whole(&one, spec), whole(&other, spec), "{context}: {}", spec.name);
    }
}

#[test]
fn shared_memory_is_the_stream() {
    let parameters = model(true);
    for seed in 0..20 {
        let mut rng = rng(seed);
        let mut push = random_push(&mut rng, &parameters);
        let segment = Segment::new("stream", &lay_out(&mut rng, &mut push));
        let declared = from_segment(UpdateKind::Full, &push, &segment.name(), &parameters).unwrap();
        assert_eq!(declared.staging().staged, serving(&parameters), "nothing waits");
        let mut receiver = staged(declared);
        refused(receiver.write(0, 0, &[1]), "chunk", &["come from its source"]);
        let stream = receive(UpdateKind::Full, &push, &parameters).unwrap();
        assert_same(receiver.finish().unwrap(), stream, &parameters, &format!("seed {seed}"));
    }
}

#[test]
fn shared_memory_in_place_gives_one_tensor_after_another() {
    let parameters = model(true);
    let mut rng = rng(21);
    let mut push = random_push(&mut rng, &parameters);
    let segment = Segment::new("in-place", &lay_out(&mut rng, &mut push));
    let mut receiver = in_place(from_segment(UpdateKind::Full, &push, &segment.name(), &parameters).unwrap());
    for sent in &push[..5] {
        let tensors = receiver.read_next().unwrap().unwrap();
        assert_eq!(whole(&tensors, parameters.get(&sent.entry.name).unwrap()), sent.values());
    }
    let received = receiver.finish().unwrap();
    let expected = receive(UpdateKind::Full, &push, &parameters).unwrap();
    assert_eq!((received.digest, received.parameters), (expected.digest, parameters.len()));
    assert_eq!(full(received).names().count(), parameters.len() - 5);
    let mut receiver = in_place(from_segment(UpdateKind::Full, &push, &segment.name(), &parameters).unwrap());
    let read: Vec<Tensors> = std::iter::from_fn(|| receiver.read_next().unwrap()).collect();
    assert_eq!(read.len(), push.len());
    assert_eq!(read.iter().map(|tensors| tensors.names().count()).sum::<usize>(), push.len());
    let mut stream = in_place(open(UpdateKind::Full, &push, &parameters).unwrap());
    assert!(stream.read_next().unwrap().is_none());
}

#[test]
fn segments_that_are_not_right_are_refused() {
    let parameters = model(true);
    let mut rng = rng(22);
    let mut push = random_push(&mut rng, &parameters);
    let bytes = lay_out(&mut rng, &mut push);
    let open = |push: &[Sent], name: &str| from_segment(UpdateKind::Full, push, name, &parameters);
    for name in ["", ".", "..", "../etc/passwd", "/dev/shm/x", "a\0b", "rollout-/../x", "rollout-\0", "torch_1_2"] {
        refused(open(&push, name), "source.shared_memory", &["is not the name of a segment"]);
    }
    refused(open(&push, &format!("rollout-{}", "x".repeat(20_000))), "source.shared_memory", &["20008 bytes"]);
    match open(&push, "rollout-test-that-nobody-made") {
        Err(Error::NotFound(message)) => assert!(message.contains("rollout-test-that-nobody-made"), "{message}"),
        other => panic!("{:?}", other.err()),
    }
    let segment = Segment::new("right", &bytes);
    let link = Segment(segment.0.with_extension("link"));
    std::os::unix::fs::symlink(&segment.0, &link.0).unwrap();
    refused(open(&push, &link.name()), "source.shared_memory", &[&link.name()]);
    // A tensor that ends behind the end of the segment: as declared, or because the segment was cut short later.
    let (last, name) = (push.len() - 1, push[push.len() - 1].entry.name.clone());
    for offset in [push[last].entry.offset + 1, u64::MAX] {
        let mut outside = push.clone();
        outside[last].entry.offset = offset;
        refused(open(&outside, &segment.name()), "tensors", &[&name, "outside"]);
    }
    let receiver = staged(open(&push, &segment.name()).unwrap());
    std::fs::OpenOptions::new().write(true).open(&segment.0).unwrap().set_len(bytes.len() as u64 - 1).unwrap();
    lost(receiver.finish(), &name);
    refused(open(&push, &segment.name()), "tensors", &[&name, "outside"]);
    let mut corrupt = bytes.clone();
    corrupt[push[3].entry.offset as usize] ^= 1;
    std::fs::write(&segment.0, corrupt).unwrap();
    lost(staged(open(&push, &segment.name()).unwrap()).finish(), &push[3].entry.name);
}

/// Whether this process maps a file of this name. The file may have been removed.
fn is_mapped(segment: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().any(|line| line.contains(segment))
}

#[test]
fn a_segment_stays_mapped_for_the_next_push_until_it_is_let_go() {
    let parameters = model(true);
    let sources = Sources::default();
    let finish = |push: &[Sent], segment: &Segment| {
        let source = Source::SharedMemory(segment.name());
        let header = UpdateHeader { source, ..UpdateHeader::new(UpdateKind::Full) };
        let received = staged(declare(header, push, &parameters, &sources).unwrap()).finish().unwrap();
        assert_same(received, receive(UpdateKind::Full, push, &parameters).unwrap(), &parameters, &segment.name());
        let kept = sources.segments().last().clone().expect("the segment is kept");
        assert_eq!(kept.map.bytes() as u64, std::fs::metadata(&segment.0).unwrap().len());
        kept
    };
    let mut rng = rng(24);
    let mut push = random_push(&mut rng, &parameters);
    let layout = lay_out(&mut rng, &mut push);
    let segment = Segment::new("first", &layout);
    let first = finish(&push, &segment);
    // Other bytes at the same places are read through the same mapping.
    let mut other = push.clone();
    let mut bytes = layout.clone();
    for sent in &mut other {
        let start = sent.entry.offset as usize;
        *sent = sent.with(random_bytes(&mut rng, sent.entry.dtype, sent.bytes.len() / sent.entry.dtype.size()));
        sent.entry.offset = start as u64;
        bytes[start..start + sent.bytes.len()].copy_from_slice(&sent.bytes);
    }
    std::fs::write(&segment.0, &bytes).unwrap();
    assert!(Arc::ptr_eq(&first, &finish(&other, &segment)));
    // A file that has grown, another one of the same name, and another name are others.
    std::fs::OpenOptions::new().append(true).open(&segment.0).unwrap().write_all(&[0; 5000]).unwrap();
    let grown = finish(&other, &segment);
    assert!(!Arc::ptr_eq(&first, &grown));
    std::fs::remove_file(&segment.0).unwrap();
    std::fs::write(&segment.0, [&layout[..], &[0; 5000]].concat()).unwrap();
    let renewed = finish(&push, &segment);
    assert!(!Arc::ptr_eq(&grown, &renewed));
    let second = Segment::new("second", &layout);
    drop((first, grown, renewed));
    finish(&push, &second);
    assert!(!is_mapped(&segment.name()) && is_mapped(&second.name()), "one is kept");
    sources.segments().release_removed();
    assert!(is_mapped(&second.name()), "it is still there");
    std::fs::remove_file(&second.0).unwrap();
    sources.segments().release_removed();
    assert!(!is_mapped(&second.name()));
    std::fs::write(&second.0, &layout).unwrap();
    finish(&push, &second);
    sources.segments().release();
    assert!(!is_mapped(&second.name()));
}

#[test]
fn segments_that_are_cut_short_during_a_push_are_lost_and_nothing_else() {
    let parameters = model(true);
    let sources = Sources::default();
    let mut lost = 0;
    for seed in 0..60 {
        let mut rng = rng(seed);
        let mut push = random_push(&mut rng, &parameters);
        let bytes = lay_out_apart(&mut rng, &mut push, 9000);
        let segment = Segment::new("cut", &bytes);
        let open = |segment: &Segment| {
            let source = Source::SharedMemory(segment.name());
            let header = UpdateHeader { source, ..UpdateHeader::new(UpdateKind::Full) };
            declare(header, &push, &parameters, &sources).unwrap()
        };
        let declared = open(&segment);
        let mode = match seed % 2 {
            0 => ReceiveMode::Pack(packing::shadow_weights(&parameters)),
            _ => ReceiveMode::Stage,
        };
        let left = rng.random_range(0..bytes.len() as u64);
        if seed % 3 == 0 {
            segment.cut(left);
        }
        let result = std::thread::scope(|scope| {
            let cut = scope.spawn(|| segment.cut(left));
            let result = declared.receive(mode).and_then(ReceivingPush::finish);
            cut.join().unwrap();
            result
        });
        match result {
            Ok(_) => assert_ne!(seed % 3, 0, "seed {seed}: {left} of {} bytes were left", bytes.len()),
            Err(Error::DataLoss(_)) => lost += 1,
            Err(other) => panic!("seed {seed}: {other}"),
        }
        // A segment that is whole again can be used by the next push.
        std::fs::write(&segment.0, &bytes).unwrap();
        let received = staged(open(&segment)).finish().unwrap();
        assert_same(received, receive(UpdateKind::Full, &push, &parameters).unwrap(), &parameters, &format!("{seed}"));
    }
    assert!(lost >= 20, "{lost} of 60 were lost");
}

/// Whatever a trainer writes into a segment while it is read, a push either fails or brings what was announced.
#[test]
fn what_a_sender_changes_too_early_is_noticed_or_not_passed_on() {
    let mut failed = 0;
    for seed in 0..100 {
        let mut rng = rng(seed);
        let columns = rng.random_range(1..600);
        let mut bytes = vec![0; rng.random_range(1..2000) * columns * 2];
        rng.fill(&mut bytes[..]);
        bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte &= 0x3f); // finite
        let segment = Segment::new("early", &bytes);
        let file = std::fs::OpenOptions::new().write(true).open(&segment.0).unwrap();
        let mut tensor = tensor(Dtype::Bf16, &bytes, Some(xxh3_128(&bytes).to_be_bytes()));
        tensor.entry.shape = vec![bytes.len() / (columns * 2), columns];
        tensor.set_file(opened(&segment)).unwrap();
        let mut passed = Vec::new();
        // The byte is changed before or after the rows are taken, in any of the calls.
        let (before, mut left) = (rng.random(), rng.random_range(0..4));
        let place = rng.random_range(0..bytes.len());
        let mut sink = |_: &ParameterMapping, rows: PushedRows<'_>| {
            let change = |now: bool| {
                if now && left == 0 {
                    file.write_all_at(&[!bytes[place] & 0x3f], place as u64).unwrap();
                }
            };
            change(before);
            passed.extend_from_slice(rows.bytes);
            change(!before);
            left -= 1;
        };
        match tensor.stream_file(&mut Vec::new(), &mut sink) {
            Ok(()) => assert!(passed == bytes, "seed {seed}: byte {place}"),
            Err(Error::DataLoss(_)) => failed += 1,
            Err(other) => panic!("seed {seed}: {other}"),
        }
    }
    assert!((10..90).contains(&failed), "{failed} of 100 failed: the test is blind");
}

#[test]
fn values_of_a_segment_that_are_not_finite_are_named() {
    let parameters = model(true);
    let mut rng = rng(23);
    let mut push = random_push(&mut rng, &parameters);
    let (bad, size) = (7, push[7].entry.dtype.size());
    let mut bytes = push[bad].bytes.clone();
    bytes[5 * size..6 * size].fill(0xff);
    push[bad] = push[bad].with(bytes);
    let segment = Segment::new("finite", &lay_out(&mut rng, &mut push));
    let receiver = staged(from_segment(UpdateKind::Full, &push, &segment.name(), &parameters).unwrap());
    refused(receiver.finish(), "tensors", &[&push[bad].entry.name, "element 5;"]);
}

#[test]
fn large_tensors_of_a_segment_are_read_whole() {
    for seed in 0..4 {
        let mut rng = rng(seed);
        let dtype = random_dtype(&mut rng);
        let n = rng.random_range(300_000..1_000_000);
        let data = random_bytes(&mut rng, dtype, n);
        let segment = Segment::new("large", &[&[7; 3], &data[..]].concat());
        let digest = xxh3_128(&data).to_be_bytes();
        let read = |offset: u64, digest: Option<[u8; 16]>| {
            let mut tensor = tensor(dtype, &data, digest);
            tensor.entry.offset = offset;
            tensor.set_file(opened(&segment)).unwrap();
            tensor.read().map(|()| tensor)
        };
        let whole = read(3, Some(digest)).unwrap();
        assert_eq!(whole.digest(), Some(digest), "seed {seed}");
        assert!(**whole.verified().unwrap() == data[..], "seed {seed}");
        let bad = rng.random_range(0..n);
        let mut damaged = data.clone();
        damaged[bad * dtype.size()..][..dtype.size()].fill(0xff);
        std::fs::write(&segment.0, &damaged).unwrap();
        refused(read(0, None), "tensors", &["\"w\"", &format!("element {bad};")]);
        // Another digest is reported first, because then the values are not the trainer's.
        lost(read(0, Some(digest)), "\"w\"");
    }
}

/// A directory `step-7` with the push in two files.
pub(super) fn checkpoint(push: &[Sent]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let step = dir.path().join("step-7");
    std::fs::create_dir(&step).unwrap();
    let (one, two) = push.split_at(push.len() / 2);
    write_safetensors(&step.join("model-00001-of-00002.safetensors"), one);
    write_safetensors(&step.join("model-00002-of-00002.safetensors"), two);
    std::fs::write(step.join("model.safetensors.index.json"), "{}").unwrap();
    dir
}

#[test]
fn a_directory_is_the_stream() {
    let parameters = model(false);
    for seed in 0..10 {
        let mut rng = rng(seed);
        let push = random_push(&mut rng, &parameters);
        let dir = checkpoint(&push);
        let absolute = dir.path().canonicalize().unwrap().join("step-7");
        for path in ["step-7", "./step-7/", "step-7/../step-7", absolute.to_str().unwrap()] {
            let declared = from_directory(UpdateKind::Full, path, &parameters, dir.path()).unwrap();
            assert_eq!(declared.staging().staged, serving(&parameters));
            let stream = receive(UpdateKind::Full, &push, &parameters).unwrap();
            assert_same(staged(declared).finish().unwrap(), stream, &parameters, &format!("seed {seed}: {path}"));
        }
    }
}

#[test]
fn embedding_and_head_of_a_directory_must_agree() {
    let parameters = model(true);
    let mut rng = rng(34);
    let push = random_push(&mut rng, &parameters);
    let place = push.iter().position(|sent| sent.entry.name == EMBEDDING).unwrap();
    for flip in [0, 1] {
        let mut bytes = push[place].bytes.clone();
        bytes[0] ^= flip;
        let dir = checkpoint(&[&push[..], &[push[place].with(bytes).renamed(HEAD)]].concat());
        let result = staged(from_directory(UpdateKind::Full, "step-7", &parameters, dir.path()).unwrap()).finish();
        match flip {
            0 => assert_eq!(result.unwrap().parameters, parameters.len()),
            _ => refused(result, "tensors", &[HEAD, "is the embedding"]),
        }
    }
}

#[test]
fn nothing_outside_the_weights_directory_is_opened() {
    let parameters = model(false);
    let push = random_push(&mut rng(31), &parameters);
    let (dir, outside) = (checkpoint(&push), checkpoint(&push));
    let open = |path: &str| from_directory(UpdateKind::Full, path, &parameters, dir.path());
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
    let away = outside.path().join("step-7");
    refused(open(away.to_str().unwrap()), "source.directory", &["is outside --weights-dir"]);
    refused(open("/etc"), "source.directory", &["/etc is outside --weights-dir"]);
    refused(open(&"x".repeat(20_000)), "source.directory", &["20000 bytes"]);
    let up = format!("../{}/step-7", outside.path().file_name().unwrap().to_str().unwrap());
    refused(open(&up), "source.directory", &["leads out of --weights-dir"]);
    let up = format!("{}/../..{}", dir.path().canonicalize().unwrap().display(), away.display());
    refused(open(&up), "source.directory", &["leads out of --weights-dir"]);
    link(&away, "absolute-link");
    refused(open("absolute-link"), "source.directory", &["leads out of --weights-dir"]);
    std::fs::create_dir(dir.path().join("files")).unwrap();
    link(&away.join("model-00001-of-00002.safetensors"), "files/model.safetensors");
    refused(open("files"), "source.directory", &["leads out of --weights-dir"]);
    // A link that stays inside the directory is followed.
    link(Path::new("step-7"), "latest");
    staged(open("latest").unwrap()).finish().unwrap();
}

#[test]
fn directories_that_are_not_right_are_refused() {
    let parameters = model(false);
    let push = random_push(&mut rng(32), &parameters);
    let dir = checkpoint(&push);
    let open = |kind, path: &str| from_directory(kind, path, &parameters, dir.path());
    let not_found = |path: &str, what: &str| match open(UpdateKind::Full, path) {
        Err(Error::NotFound(message)) => assert!(message.contains(what), "{message}"),
        other => panic!("{:?}", other.err()),
    };
    not_found("step-8", "step-8 does not exist");
    not_found(".", "no *.safetensors");
    refused(open(UpdateKind::Full, ""), "source.directory", &["path is empty"]);
    refused(open(UpdateKind::Delta, "step-7"), "source.directory", &["DELTA"]);
    assert!(matches!(open(UpdateKind::Lora, "step-7"), Err(Error::NotFound(m)) if m.contains("adapter_config.json")));
    let header = UpdateHeader { source: Source::Directory("step-7".into()), ..UpdateHeader::new(UpdateKind::Full) };
    let without = declare(header.clone(), &[], &parameters, &Sources::default());
    refused(without, "source.directory", &["--weights-dir"]);
    let declared = declare(header, &push, &parameters, &Sources::new(Some(dir.path().into())));
    refused(declared, "source.directory", &["leave both out"]);
    let mut receiver = staged(open(UpdateKind::Full, "step-7").unwrap());
    refused(receiver.declare(Vec::new()), "tensors", &["the directory declares"]);

    let extra = dir.path().join("step-7/extra.safetensors");
    write_safetensors(&extra, &push[..1]);
    refused(open(UpdateKind::Full, "step-7"), "tensors", &[&push[0].entry.name, "declared twice"]);
    std::fs::write(&extra, [1, 2, 3]).unwrap();
    refused(open(UpdateKind::Full, "step-7"), "source.directory", &["extra.safetensors", "no header"]);
    std::fs::write(&extra, u64::MAX.to_le_bytes()).unwrap();
    refused(open(UpdateKind::Full, "step-7"), "source.directory", &["extra.safetensors", "its header would have"]);
    std::fs::remove_file(&extra).unwrap();
    std::fs::create_dir(&extra).unwrap();
    refused(open(UpdateKind::Full, "step-7"), "source.directory", &["extra.safetensors", "not a regular file"]);
    std::fs::remove_dir(&extra).unwrap();

    let second = dir.path().join("step-7/model-00002-of-00002.safetensors");
    let bytes = std::fs::metadata(&second).unwrap().len();
    let receiver = staged(open(UpdateKind::Full, "step-7").unwrap());
    std::fs::OpenOptions::new().write(true).open(&second).unwrap().set_len(bytes - 1).unwrap();
    lost(receiver.finish(), "model-00002-of-00002.safetensors");
    refused(open(UpdateKind::Full, "step-7"), "source.directory", &["model-00002", "not a whole safetensors file"]);
}

#[test]
fn damaged_headers_never_panic() {
    let parameters = model(false);
    let mut rng = rng(33);
    let push = random_push(&mut rng, &parameters);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write_safetensors(&path, &push);
    let good = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut refused = 0;
    for _ in 0..500 {
        let mut bytes = good.clone();
        for _ in 0..rng.random_range(1..4) {
            bytes[rng.random_range(0..header)] = rng.random();
        }
        std::fs::write(&path, &bytes).unwrap();
        let result =
            from_directory(UpdateKind::Full, ".", &parameters, dir.path()).and_then(|push| staged(push).finish());
        refused += usize::from(result.is_err());
    }
    assert!(refused > 250, "{refused} of 500 refused: the test is blind");
}
