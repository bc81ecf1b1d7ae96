//! Delta stores that must be refused: damaged, incomplete, out of order, outside of the directory, or too large.

use std::path::Path;

use safetensors::Dtype as Stored;

use super::stores::{
    Layout, Saved, index_json, open_store, payload, random_patch, write_bytes, write_file, write_index, write_shards,
};
use super::*;

/// A store of a whole version and two deltas.
fn fresh(parameters: &Parameters, seed: u64) -> Saved {
    Saved::random(&mut rng(seed), parameters, Layout::Shards, 2)
}

#[track_caller]
fn is_refused(saved: &Saved, parameters: &Arc<Parameters>, parts: &[&str]) {
    refused(saved.push(parameters, 2, None), "source.directory", parts);
}

#[test]
fn files_that_are_missing_or_damaged_are_named() {
    let parameters = model(false);
    let fresh = |seed| fresh(&parameters, seed);
    let missing = |saved: &Saved, what: &str| match saved.push(&parameters, 2, None) {
        Err(Error::NotFound(message)) => assert!(message.contains(what), "{message}"),
        other => panic!("{:?}", other.err()),
    };
    let shard = |version: u64| format!("weight_v{version:06}/model-00000-of-00002.safetensors");
    let saved = fresh(20);
    std::fs::remove_dir_all(saved.directory(1)).unwrap();
    missing(&saved, "weight_v000001");
    let saved = fresh(21);
    std::fs::remove_file(saved.root().join(shard(1))).unwrap();
    missing(&saved, &shard(1));
    match saved.push(&parameters, 3, None) {
        Err(Error::NotFound(message)) => assert!(message.contains("version 3 does not exist"), "{message}"),
        other => panic!("{:?}", other.err()),
    }

    // A byte that was changed, anywhere in the data of either delta.
    for version in [1, 2] {
        let saved = fresh(22);
        let path = saved.root().join(shard(version));
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        lost(saved.push(&parameters, 2, None), &shard(version));
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        is_refused(&saved, &parameters, &[&shard(version), "not a whole safetensors file"]);
        // It is cut short between the declarations and the commit.
        std::fs::write(&path, &bytes).unwrap();
        let receiving = staged(saved.open(&parameters, 2, None).unwrap());
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(9).unwrap();
        lost(receiving.finish(), &shard(version));
    }
}

#[test]
fn indexes_that_are_not_right_are_refused() {
    let parameters = model(false);
    let fresh = |seed| fresh(&parameters, seed);
    let is = |saved: &Saved, parts: &[&str]| is_refused(saved, &parameters, parts);
    let with_index = |change: &dyn Fn(&mut serde_json::Value)| {
        let saved = fresh(23);
        let path = saved.directory(2).join("model.safetensors.index.json");
        let mut index: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut index);
        write_index(&saved.directory(2), &index);
        saved
    };
    let set = |key: &'static str, value: &'static str| with_index(&|index| index["metadata"][key] = value.into());
    is(&set("delta_encoding", "patch"), &["delta_encoding is \"patch\"", "elements"]);
    is(&set("compression_format", "lz4"), &["compression_format is \"lz4\"", "zstd"]);
    is(&set("checksum_format", "crc32"), &["checksum_format is \"crc32\""]);
    is(&set("dtype", "int8"), &["dtype is \"int8\""]);
    is(&set("version", "7"), &["is of version 7", "expected was version 2"]);
    is(&set("base_version", "2"), &["changes version 2"]);
    is(&set("base_version", "x"), &["base_version is \"x\""]);
    let escape = with_index(&|index| index["weight_map"]["model.norm.weight"] = "../../model.safetensors".into());
    is(&escape, &["is no name of a file"]);
    let other = with_index(&|index| {
        let name = index["weight_map"].as_object().unwrap().keys().next().unwrap().clone();
        index["weight_map"].as_object_mut().unwrap().remove(&name);
    });
    is(&other, &["does not have its tensor"]);
    let more = with_index(&|index| index["weight_map"]["w"] = "model-00000-of-00002.safetensors".into());
    is(&more, &["names tensors that their files do not have"]);
    let saved = fresh(24);
    std::fs::write(saved.directory(2).join("model.safetensors.index.json"), "{\"metadata\": 3}").unwrap();
    is(&saved, &["weight_v000002/model.safetensors.index.json", "not an index"]);
}

#[test]
fn changes_that_do_not_fit_the_model_are_refused() {
    let parameters = model(false);
    let patch = || random_patch(&mut rng(11), &parameters, Dtype::Bf16);
    let is = |saved: &Saved, parts: &[&str]| is_refused(saved, &parameters, parts);
    let saved = fresh(&parameters, 25);
    let mut unknown = patch();
    unknown.insert("model.other.weight".into(), (vec![0], vec![0, 0]));
    write_shards(&saved.directory(2), 2, 1, Dtype::Bf16, &unknown);
    is(&saved, &["weight_v000002/", "no tensor \"model.other.weight\""]);
    let mut outside = patch();
    outside.insert(EMBEDDING.into(), (vec![5, 96], vec![0, 0, 0, 0]));
    write_shards(&saved.directory(2), 2, 1, Dtype::Bf16, &outside);
    is(&saved, &["weight_v000002/", EMBEDDING, "index 96 is outside its 96 elements"]);
    outside.insert(EMBEDDING.into(), (vec![5], vec![0x80, 0x7f]));
    write_shards(&saved.directory(2), 2, 1, Dtype::Bf16, &outside);
    is(&saved, &["weight_v000002/", EMBEDDING, "element 5 is not finite"]);
}

#[test]
fn nothing_outside_of_the_weights_directory_is_a_store() {
    let parameters = model(false);
    let layout = Layout::Shards;
    let (saved, outside) =
        (Saved::random(&mut rng(30), &parameters, layout, 1), Saved::random(&mut rng(31), &parameters, layout, 1));
    let sources = Sources::new(Some(saved.dir.path().into()));
    let open = |path: &str| open_store(path, &parameters, 1, None, &sources);
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, saved.dir.path().join(name)).unwrap();
    refused(open(outside.root().to_str().unwrap()), "source.directory", &["is outside --weights-dir"]);
    let up = format!("../{}/run", outside.dir.path().file_name().unwrap().to_str().unwrap());
    refused(open(&up), "source.directory", &["leads out of --weights-dir"]);
    link(&outside.root(), "link");
    refused(open("link"), "source.directory", &["leads out of --weights-dir"]);
    std::fs::remove_dir_all(saved.directory(0)).unwrap();
    link(&outside.directory(0), "run/weight_v000000");
    refused(open("run"), "source.directory", &["leads out of --weights-dir"]);
    std::fs::remove_file(saved.directory(0)).unwrap();
    link(Path::new("weight_v000001"), "run/weight_v000000");
    refused(open("run"), "source.directory", &["is of version 1", "expected was version 0"]);
    assert!(matches!(open("none"), Err(Error::NotFound(_))));
    let without = open_store("run", &parameters, 1, None, &Sources::default());
    refused(without, "source.directory", &["--weights-dir"]);
}

#[test]
fn compressed_changes_take_no_more_memory_than_they_declare() {
    let parameters = model(false);
    let saved = Saved::random(&mut rng(40), &parameters, Layout::Shards, 1);
    let write = |bytes: Vec<u8>| {
        let sum = format!("{:032x}", xxh3_128(&bytes));
        let file = "model-00000-of-00001.safetensors";
        let tensors = [(EMBEDDING.to_string(), Stored::U8, bytes)];
        write_file(&saved.directory(1).join(file), &tensors, &[(EMBEDDING, &sum)]);
        write_index(&saved.directory(1), &index_json(1, 0, Dtype::Bf16, &[(EMBEDDING.into(), file.into())]));
        saved.push(&parameters, 1, None)
    };
    // 64 MiB of zeros, of which the frame tells the size: more elements than the tensor has.
    let bomb = zstd::bulk::compress(&vec![0; 6 << 20], 1).unwrap();
    refused(write(bomb), "source.directory", &[EMBEDDING, "of its 96 elements"]);
    // A frame that does not tell it.
    let silent = zstd::stream::encode_all(&[0u8; 60][..], 1).unwrap();
    refused(write(silent), "source.directory", &[EMBEDDING, "declares its size"]);
    refused(write(vec![1, 2, 3]), "source.directory", &[EMBEDDING, "no zstd frame"]);
    refused(write(payload(&(vec![3], vec![0; 3]))), "source.directory", &[EMBEDDING, "not a multiple of the 6"]);
    // A frame that has more than it tells.
    let mut two = payload(&(vec![3], vec![0; 2]));
    two.extend(payload(&(vec![3], vec![0; 2])));
    refused(write(two), "source.directory", &[EMBEDDING, "does not decompress"]);
    write(payload(&(vec![3], vec![0; 2]))).unwrap();
}

#[test]
fn changes_of_bytes_that_are_not_right_are_refused() {
    let parameters = model(false);
    let file = "weight_v000001/model-00000-of-00001.safetensors";
    for encoding in ["xor", "overwrite"] {
        let saved = Saved::random(&mut rng(60), &parameters, Layout::Bytes(encoding), 1);
        let (old, mut new) = (&saved.states[0][EMBEDDING], saved.states[1][EMBEDDING].clone());
        new[7] ^= 1;
        let write = |old: &Vec<u8>, new: &Vec<u8>| {
            write_bytes(&saved.directory(1), 1, encoding, &[(EMBEDDING.into(), [old, new])]);
            saved.push(&parameters, 1, None)
        };
        write(old, &new).unwrap();
        // The version before is another one than that which the trainer had.
        let mut other = old.clone();
        other[0] ^= 1;
        write_bytes(&saved.directory(1), 1, encoding, &[(EMBEDDING.into(), [&other, &new])]);
        let result = saved.push(&parameters, 1, None);
        match encoding {
            "xor" => lost(result, &format!("{file}: tensor {EMBEDDING:?}: with these changes")),
            // What is overwritten need not be known.
            _ => assert!(result.is_ok() || new[0] == other[0]),
        }
        write_bytes(&saved.directory(1), 1, encoding, &[("model.other.weight".into(), [old, &new])]);
        refused(saved.push(&parameters, 1, None), "source.directory", &[file, "is not in the version"]);
    }
    let saved = Saved::random(&mut rng(61), &parameters, Layout::Bytes("overwrite"), 2);
    let write = |encoding: &str, raw: &[u8]| {
        let (name, sum) = ("model-00000-of-00001.safetensors", "0".repeat(32));
        let tensors = [(EMBEDDING.to_string(), Stored::U8, zstd::bulk::compress(raw, 1).unwrap())];
        write_file(&saved.directory(1).join(name), &tensors, &[(EMBEDDING, &sum)]);
        let mut index = index_json(1, 0, Dtype::Bf16, &[(EMBEDDING.into(), name.into())]);
        index["metadata"]["delta_encoding"] = encoding.into();
        write_index(&saved.directory(1), &index);
        saved.push(&parameters, 1, None)
    };
    lost(write("overwrite", &[1, 0, 0, 0, 192, 0, 0, 0, 9]), "a position outside");
    lost(write("overwrite", &[2, 0, 0, 0, 1, 0, 0, 0, 9]), "as many positions");
    lost(write("overwrite", &[0xff; 9]), "as many positions");
    lost(write("overwrite", &[1, 0]), "as many positions");
    lost(write("overwrite", &[0, 0, 0, 0]), "with these changes");
    lost(write("xor", &[0; 192]), "with these changes");
    // What it decompresses to is known before it is, and no more is taken.
    refused(write("overwrite", &[0; 965]), "source.directory", &[EMBEDDING, "changes of 965 bytes", "has 192 bytes"]);
    refused(write("xor", &[0; 191]), "source.directory", &[EMBEDDING, "changes of 191 bytes"]);
    refused(write("xor", &vec![0; 6 << 20]), "source.directory", &[EMBEDDING, "changes of 6291456 bytes"]);
    // A chain of which some versions have changed elements.
    let saved = Saved::random(&mut rng(62), &parameters, Layout::Bytes("xor"), 2);
    write_shards(&saved.directory(2), 2, 1, Dtype::Bf16, &random_patch(&mut rng(63), &parameters, Dtype::Bf16));
    refused(saved.push(&parameters, 2, None), "source.directory", &["weight_v000002", "changes of elements"]);
}

#[test]
fn patches_that_are_not_right_are_refused() {
    let parameters = model(false);
    let saved = Saved::random(&mut rng(50), &parameters, Layout::Patches("gap_delta"), 1);
    let path = saved.root().join("deltas/step_000001.safetensors");
    let floats = |n: usize| (format!("{EMBEDDING}.val"), Stored::BF16, vec![0; 2 * n]);
    let write = |tensors: &[(String, Stored, Vec<u8>)], metadata: &[(&str, &str)]| {
        write_file(&path, tensors, metadata);
        saved.push(&parameters, 1, None)
    };
    let idx = |dtype, bytes: &[u8]| (format!("{EMBEDDING}.idx"), dtype, bytes.to_vec());
    let file = "deltas/step_000001.safetensors";
    let good = [idx(Stored::U16, &[5, 0]), floats(1)];
    write(&good, &[]).unwrap();
    write(&[], &[]).unwrap();
    write(&[idx(Stored::U16, &[]), floats(0)], &[]).unwrap();
    let check = |tensors: &[(String, Stored, Vec<u8>)], metadata: &[(&str, &str)], parts: &[&str]| {
        refused(write(tensors, metadata), "source.directory", &[&[file], parts].concat());
    };
    check(&good, &[("encoding", "nvcomp_cascaded")], &["nvcomp_cascaded", "raw, gap_delta"]);
    check(&good, &[("model_version", "2")], &["model_version is \"2\""]);
    check(&good, &[("encoding", "raw")], &["is stored as U16"]);
    check(&good[..1], &[], &["neither values"]);
    check(&good[1..], &[], &["has no indices"]);
    check(&[idx(Stored::U16, &[5, 0]), floats(2)], &[], &["different numbers"]);
    check(&[idx(Stored::U16, &[96, 0]), floats(1)], &[], &[EMBEDDING, "index 96 is outside"]);
    let raw = [("encoding", "raw")];
    let two =
        |first: i32, second: i32| [idx(Stored::I32, &[first.to_le_bytes(), second.to_le_bytes()].concat()), floats(2)];
    write(&two(3, 4), &raw).unwrap();
    check(&two(4, 3), &raw, &["index 3 follows a larger one"]);
    check(&two(4, 4), &raw, &["index 4 is repeated"]);
    check(&two(-1, 4), &raw, &["is outside"]);
    let wide = idx(Stored::U32, &u32::MAX.to_le_bytes());
    check(&[wide, floats(1)], &[], &["is outside"]);
}
