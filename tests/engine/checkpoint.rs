//! Whatever happens to a checkpoint's files while they are served is noticed, whatever the files' times say, and fails
//! only the order that would have read them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::MmapMut;
use rollout_server::engine::{Command, DrainMode, LifecycleStatus, SleepLevel, WakeTags};
use rollout_server::error::{Error, Result};

use crate::common::{Engine, Push, Request, fixture, random_prompts, random_weights};

/// Model and number of ranks: a model of several shards, one of a single file, and a GGUF file on one rank and on two.
const MODELS: [(&str, &str); 4] = [("qwen2", "1"), ("llama", "2"), ("llama-tied.gguf", "1"), ("llama-tied.gguf", "2")];

/// A writable copy of a model on a memory file system, where files' times change by calls alone.
struct Served {
    directory: tempfile::TempDir,
    model: PathBuf,
    /// The files of weights, with their original bytes.
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Served {
    fn of(model: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let from = fixture(model);
        let path = directory.path().join(model);
        if from.is_file() {
            std::fs::copy(&from, &path).unwrap();
        } else {
            std::fs::create_dir(&path).unwrap();
            for entry in std::fs::read_dir(&from).unwrap().map(|entry| entry.unwrap().path()).filter(|p| p.is_file()) {
                std::fs::copy(&entry, path.join(entry.file_name().unwrap())).unwrap();
            }
            if path.join("model.safetensors").exists() {
                split(&path);
            }
        }
        let paths = if path.is_file() { vec![path.clone()] } else { shards(&path) };
        let files = paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
        Self { directory, model: path, files }
    }

    fn start(&self, tp: &str) -> Engine {
        Engine::try_start_at(&self.model, &["--tp", tp]).expect("the copy is whole")
    }

    /// Writes the original bytes back into the same files.
    fn restore(&self) {
        self.files.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    }

    /// Puts the original bytes back as other files under the same names.
    fn replace(&self) {
        for (path, bytes) in &self.files {
            let new = self.directory.path().join("new");
            std::fs::write(&new, bytes).unwrap();
            std::fs::rename(&new, path).unwrap();
        }
    }
}

fn shards(model: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = std::fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("model-"));
    paths.sort();
    paths
}

/// Splits `model.safetensors` into two shards with an index.
fn split(model: &Path) {
    let bytes = std::fs::read(model.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<_> = tensors.names().into_iter().map(String::from).collect();
    names.sort();
    let mut map = serde_json::Map::new();
    for (i, part) in names.chunks(names.len().div_ceil(2)).enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", i + 1);
        let views = part.iter().map(|name| (name, tensors.tensor(name).unwrap()));
        safetensors::serialize_to_file(views, None, &model.join(&file)).unwrap();
        part.iter().for_each(|name| drop(map.insert(name.clone(), file.clone().into())));
    }
    std::fs::remove_file(model.join("model.safetensors")).unwrap();
    let index = serde_json::json!({ "weight_map": map }).to_string();
    std::fs::write(model.join("model.safetensors.index.json"), index).unwrap();
}

fn writable(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn truncate(copy: &Served) {
    let (path, bytes) = copy.files.last().unwrap();
    writable(path).set_len(bytes.len() as u64 / 2).unwrap();
}

/// Overwrites the last tensors with other values in place; the header stays as it was.
fn overwrite(copy: &Served) {
    let (path, bytes) = copy.files.last().unwrap();
    let (at, other) = other_weights(bytes);
    writable(path).write_all_at(&other, at as u64).unwrap();
}

/// Overwrites as [`overwrite`] does, and sets the file's time of the last change back.
fn overwrite_unseen(copy: &Served) {
    let (path, _) = copy.files.last().unwrap();
    let modified = std::fs::metadata(path).unwrap().modified().unwrap();
    overwrite(copy);
    writable(path).set_modified(modified).unwrap();
}

fn other_weights(bytes: &[u8]) -> (usize, Vec<u8>) {
    let at = bytes.len() / 2;
    (at, bytes[at..].iter().map(|byte| byte ^ 1).collect())
}

fn bits(engine: &Engine) -> Vec<Vec<(u32, u32, u32)>> {
    engine.reset_prefix_cache();
    let reply = engine.generate(Request::generate(random_prompts(3, 3, 20..40, 250), 2, 5, 8));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.bits()
}

#[track_caller]
fn assert_lost<T: std::fmt::Debug>(result: Result<T>, says: &str) {
    match result {
        Err(Error::DataLoss(why)) => assert!(why.contains(says), "{says:?} is missing in {why:?}"),
        other => panic!("{other:?}"),
    }
}

fn reload(engine: &Engine) -> Result<LifecycleStatus> {
    let tags = WakeTags { weights: true, kv_cache: true };
    engine.ask(|reply| Command::Wake { tags, reload: true, reply })
}

/// Pushes an adapter on all linear layers, so that every matrix of the model's layers is read from the checkpoint.
fn push(engine: &Engine) -> Result<()> {
    engine.push(Push::lora_of_all(engine.parameters())).map(drop)
}

type Damage = fn(&Served);

const DAMAGES: [(&str, Damage); 3] =
    [("truncated", truncate), ("overwritten", overwrite), ("overwritten, with its time set back", overwrite_unseen)];

#[test]
fn a_checkpoint_changed_in_place_is_noticed_before_anything_is_touched() {
    for (model, tp) in MODELS {
        let copy = Served::of(model);
        let engine = copy.start(tp);
        push(&engine).expect("whole");
        let merged = (engine.checksums(), bits(&engine));
        engine.push(Push::base()).expect("whole");
        let base = (engine.checksums(), bits(&engine));
        for ((what, damage), heal) in DAMAGES.into_iter().zip([Served::restore, Served::replace, Served::restore]) {
            println!("{model} on {tp}, {what}");
            damage(&copy);
            for _ in 0..2 {
                assert_lost(push(&engine), "nothing has changed");
                assert_eq!(engine.status().lifecycle, LifecycleStatus::Running);
                assert!((engine.checksums(), bits(&engine)) == base, "{model} on {tp}, {what}");
            }
            heal(&copy);
            push(&engine).expect("whole again");
            assert!((engine.checksums(), bits(&engine)) == merged, "{model} on {tp}, {what}");

            // A merged adapter can be restored after a sleep only from an unchanged checkpoint.
            engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
            damage(&copy);
            for _ in 0..2 {
                assert_lost(engine.wake(true, true), "sleep at level 2");
                assert!(matches!(engine.status().lifecycle, LifecycleStatus::Asleep { .. }));
            }
            heal(&copy);
            assert_eq!(engine.wake(true, true).expect("whole again"), LifecycleStatus::Running);
            assert!((engine.checksums(), bits(&engine)) == merged, "{model} on {tp}, {what}");

            engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
            damage(&copy);
            assert_lost(reload(&engine), "nothing has changed");
            assert_eq!(engine.wake(true, true).expect("without"), LifecycleStatus::WeightsMissing);
            assert_lost(reload(&engine), "nothing has changed");
            assert_lost(push(&engine), "nothing has changed");
            heal(&copy);
            assert_eq!(reload(&engine).expect("whole again"), LifecycleStatus::Running);
            assert!((engine.checksums(), bits(&engine)) == base, "{model} on {tp}, {what}");
        }
        engine.assert_all_free();
    }
}

#[test]
fn what_does_not_read_the_checkpoint_goes_on_without_it() {
    let copy = Served::of("qwen2");
    let engine = copy.start("2");
    let old = random_weights(engine.parameters(), 61);
    truncate(&copy);
    engine.push(Push::full(&old)).expect("a full push reads nothing");
    let mut new = old.clone();
    new.values_mut().for_each(|(_, values)| values[0] += 0.5);
    engine.push(Push::delta(&old, &new, 1)).expect("nor does a delta");
    push(&engine).expect("the base of all parameters was pushed");
    engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    assert_eq!(engine.wake(true, true).expect("nothing is read"), LifecycleStatus::Running);
    engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
    assert_lost(reload(&engine), "cut short");
    assert_eq!(engine.wake(true, true).expect("without"), LifecycleStatus::WeightsMissing);
    engine.push(Push::full(&new)).expect("a complete push brings it back");
    assert_eq!(engine.status().lifecycle, LifecycleStatus::Running);
    bits(&engine);
}

/// Overwrites through a mapping whose pages were already dirty when the server started, so that no time of the file
/// tells.
#[test]
fn a_change_that_no_time_tells_of_is_noticed_as_it_is_read() {
    for (model, tp) in MODELS {
        let copy = Served::of(model);
        let (path, bytes) = copy.files.last().unwrap();
        // SAFETY: the bytes are written and never read here.
        let mut map = unsafe { MmapMut::map_mut(&writable(path)).unwrap() };
        map.copy_from_slice(bytes);
        let engine = copy.start(tp);
        let base = (engine.checksums(), bits(&engine));
        let times = || std::fs::metadata(path).unwrap().modified().unwrap();
        let before = times();
        let (at, other) = other_weights(bytes);
        map[at..].copy_from_slice(&other);
        assert_eq!(times(), before, "the test is blind: the system has noticed the write");
        assert_lost(push(&engine), "the weights are missing now");
        assert_eq!(engine.status().lifecycle, LifecycleStatus::WeightsMissing);
        let refused = engine.generate(Request::generate(random_prompts(3, 1, 5..6, 250), 1, 5, 4)).error;
        assert!(matches!(refused, Some(Error::FailedPrecondition(_))), "{refused:?}");
        assert_lost(reload(&engine), "the weights are missing now");
        map.copy_from_slice(bytes);
        assert_eq!(reload(&engine).expect("whole again"), LifecycleStatus::Running, "{model} on {tp}");
        assert!((engine.checksums(), bits(&engine)) == base, "{model} on {tp}");

        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        map[at..].copy_from_slice(&other);
        assert_lost(engine.wake(true, true), "the weights are missing now");
        let resident = WakeTags { weights: true, kv_cache: false };
        let asleep = LifecycleStatus::Asleep { level: SleepLevel::One, resident, pending_update: false };
        assert_eq!(engine.status().lifecycle, asleep);
        assert_eq!(engine.wake(true, true).expect("the cache"), LifecycleStatus::WeightsMissing);
        engine.push(Push::full(&random_weights(engine.parameters(), 62))).expect("a complete push brings it back");
        bits(&engine);
        engine.assert_all_free();
    }
}

#[test]
fn a_checkpoint_replaced_by_another_goes_on_as_it_was() {
    for (model, tp) in MODELS {
        let copy = Served::of(model);
        let engine = copy.start(tp);
        let base = (engine.checksums(), bits(&engine));
        push(&engine).expect("whole");
        for (path, bytes) in &copy.files {
            let (at, other) = other_weights(bytes);
            let new = copy.directory.path().join("new");
            std::fs::write(&new, [&bytes[..at], &other[..]].concat()).unwrap();
            std::fs::rename(&new, path).unwrap();
        }
        engine.push(Push::base()).expect("the old files are there as long as they are mapped");
        assert!((engine.checksums(), bits(&engine)) == base, "{model} on {tp}");
        copy.files.iter().for_each(|(path, _)| std::fs::remove_file(path).unwrap());
        engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
        assert_eq!(reload(&engine).expect("they still are"), LifecycleStatus::Running);
        assert!((engine.checksums(), bits(&engine)) == base, "{model} on {tp}");
    }
}

/// Checkpoints of GLM-4.5 have a layer more than `num_hidden_layers`, which predicts a second token (MTP).
#[test]
fn a_layer_that_predicts_a_second_token_is_not_read() {
    let model = "glm4_moe";
    let copy = Served::of(model);
    let (path, bytes) = &copy.files[0];
    let tensors = safetensors::SafeTensors::deserialize(bytes).unwrap();
    let mut all = tensors.tensors();
    let last = all.iter().filter_map(|(name, view)| Some((name.strip_prefix("model.layers.2.")?, view)));
    let embedding = tensors.tensor("model.embed_tokens.weight").unwrap();
    let own = ["embed_tokens", "shared_head.head", "eh_proj"].map(|name| (format!("{name}.weight"), &embedding));
    let more: Vec<_> = last
        .map(|(name, view)| (name.to_owned(), view))
        .chain(own)
        .map(|(name, view)| (format!("model.layers.3.{name}"), view.clone()))
        .collect();
    let index = copy.model.join("model.safetensors.index.json");
    let mut map: serde_json::Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    for (name, _) in &more {
        map["weight_map"][name] = path.file_name().unwrap().to_str().unwrap().into();
    }
    std::fs::write(&index, map.to_string()).unwrap();
    all.extend(more);
    safetensors::serialize_to_file(all, None, path).unwrap();
    let (with, without) = (copy.start("2"), Engine::start(model, &["--tp", "2"]));
    assert!(with.parameters().iter().eq(without.parameters().iter()));
    assert_eq!(with.checksums(), without.checksums());
    assert_eq!(bits(&with), bits(&without));
    push(&with).expect("the other layers are read");
}
