//! Headers of safetensors files that would take more memory than a push to the model needs.

use std::fmt::Write as _;
use std::path::Path;

use super::*;
use crate::memory::Traffic;

/// Writes a file with this text as its header, followed by `data` bytes.
fn write(path: &Path, header: &str, data: usize) {
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat();
    std::fs::write(path, bytes).unwrap();
}

/// The text of a member for a tensor of float32.
fn member(name: &str, shape: &[usize], start: usize) -> String {
    let end = start + 4 * shape.iter().product::<usize>();
    format!(r#""{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
}

fn from_dir(dir: &Path, parameters: &Arc<Parameters>, traffic: &Traffic) -> Result<DeclaredPush> {
    let header = UpdateHeader { source: Source::Directory(".".into()), ..UpdateHeader::new(UpdateKind::Full) };
    declare(header, &[], parameters, &Sources::new(Some(dir.into())).with_traffic(traffic.clone()))
}

/// A model of one parameter `[2]` with this name.
fn tiny(name: &str) -> Arc<Parameters> {
    Arc::new(Parameters::new(vec![ParamSpec::new(name, [2], ShardRule::Replicated)], Dtype::F32, 1, false))
}

#[test]
fn metadata_is_passed_over_and_the_order_of_members_does_not_count() {
    let parameters = model(false);
    let push = random_push(&mut rng(1), &parameters);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write_safetensors(&path, &push);
    let whole = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (header, data) = whole[8..].split_at(length);
    let members: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
    let mut text = String::from("{");
    for (name, value) in members.iter().rev() {
        write!(text, "{}:{value},", serde_json::to_string(name).unwrap()).unwrap();
    }
    text.push_str(r#""__metadata__":{"deep":[[[{"a":1}]]],"format":"pt"}}"#);
    std::fs::write(&path, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), data].concat()).unwrap();
    let traffic = Traffic::new(64 << 20);
    let received = staged(from_dir(dir.path(), &parameters, &traffic).unwrap()).finish().unwrap();
    assert_eq!(received.digest, receive(UpdateKind::Full, &push, &parameters).unwrap().digest);
    drop(received);
    assert_eq!(traffic.used(), 0, "what the files declared counts no longer than the push lives");
}

#[test]
fn tensors_that_are_not_one_behind_the_other_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let refuses = |header: String, says: &str| {
        write(&path, &header, 16);
        let opened = from_dir(dir.path(), &tiny("a"), &Traffic::new(64 << 20));
        refused(opened, "source.directory", &["model.safetensors", "not a safetensors header", says]);
    };
    refuses(format!("{{{}}}", member("a", &[1, 1, 1, 2, 1], 0)), "at most 4 dimensions");
    refuses(format!("{{{},{}}}", member("a", &[2], 0), member("b", &[1], 12)), "b begins at 12");
    refuses(format!("{{{},{}}}", member("a", &[2], 0), member("b", &[3], 4)), "b begins at 4");
    refuses(format!("{{{}}}", member("a", &[4], 0).replace("[4]", "[3]")), "cannot take the bytes 0 to 16");
    refuses(format!("{{{}}}", member("a", &[4], 0).replace("[4]", "[4611686018427387904]")), "cannot take");
    refuses(format!("{{{}}}", member("a", &[4], 0).replace("F32", "I32")), "stored as I32");
    refuses(format!("{{{}}}", member(&"n".repeat(5000), &[4], 0).replace("F32", "I32")), "bytes in all");
    refuses("[]".into(), "an object");
}

#[test]
fn headers_are_at_most_as_long_as_the_model_needs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let padding = |bytes: usize| format!(r#"{{"__metadata__":"{}",{}}}"#, "x".repeat(bytes), member("a", &[2], 0));
    let traffic = Traffic::new(u64::MAX);
    write(&path, &padding(4 << 20), 8);
    refused(
        from_dir(dir.path(), &tiny("a"), &traffic),
        "source.directory",
        &["its header has 4.00 MiB", "4.00 MiB more"],
    );
    // Those of all files count together.
    write(&path, &padding(3 << 20), 8);
    from_dir(dir.path(), &tiny("a"), &traffic).unwrap();
    write(&dir.path().join("more.safetensors"), &padding(2 << 20), 8);
    refused(
        from_dir(dir.path(), &tiny("a"), &traffic),
        "source.directory",
        &["more.safetensors", "its header has 2.00 MiB"],
    );
    // A model of 6,000 parameters needs 5.9 MiB.
    let specs = (0..6000).map(|i| ParamSpec::new(format!("w{i}"), [1], ShardRule::Replicated));
    let many = Arc::new(Parameters::new(specs.collect(), Dtype::F32, 1, false));
    refused(from_dir(dir.path(), &many, &traffic), "tensors", &["has no tensor"]);
}

#[test]
fn what_headers_declare_is_counted_before_it_is_held() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let members: Vec<String> = (0..30_000).map(|i| member(&format!("{i}"), &[1], 4 * i)).collect();
    write(&path, &format!("{{{}}}", members.join(",")), 4 * 30_000);
    let traffic = Traffic::new(64 << 20);
    match from_dir(dir.path(), &tiny("a"), &traffic) {
        Err(Error::ResourceExhausted(message)) => assert!(message.contains("--request-bytes"), "{message}"),
        other => panic!("{:?}", other.err()),
    }
    assert!(traffic.take_high_water() < 1 << 20, "nothing was read");
    let traffic = Traffic::new(256 << 20);
    refused(from_dir(dir.path(), &tiny("a"), &traffic), "tensors", &["has no tensor"]);
    assert!(traffic.take_high_water() > 24 * 1_800_000, "{} were counted", traffic.take_high_water());
    assert_eq!(traffic.used(), 0);
}
