//! Downloads from a hub that the test serves on a local port.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use super::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// Serves a listing of `files` and the files, as the hub does, until the process ends. Returns its address.
fn serve(files: BTreeMap<&'static str, Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let files = Arc::new(files);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let files = files.clone();
            std::thread::spawn(move || answer(stream.unwrap(), &files));
        }
    });
    address
}

fn answer(mut stream: TcpStream, files: &BTreeMap<&'static str, Vec<u8>>) {
    let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(std::result::Result::ok);
    let request: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let path = request.first().map_or("", |line| line.split(' ').nth(1).unwrap());
    let file = path.strip_prefix(&format!("/org/name/resolve/{SHA}/")).and_then(|name| files.get(name));
    let (status, headers, body) = match file {
        _ if path == "/api/models/org/name/revision/v1" => {
            let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
            let info = serde_json::json!({"sha": SHA, "siblings": siblings});
            ("200 OK", "content-type: application/json\r\n".to_string(), info.to_string().into_bytes())
        }
        Some(bytes) => {
            let first_byte = request.iter().any(|line| line.to_lowercase() == "range: bytes=0-0");
            let body = if first_byte { bytes[..1].to_vec() } else { bytes.clone() };
            let range = format!("content-range: bytes 0-{}/{}\r\n", body.len() - 1, bytes.len());
            let etag = path.replace('/', "_");
            ("206 Partial Content", format!("{range}etag: \"{etag}\"\r\nx-repo-commit: {SHA}\r\n"), body)
        }
        None => ("404 Not Found", String::new(), Vec::new()),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n");
    // The client may have closed the connection.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
}

fn fixture_files(model: &str, names: &[&'static str]) -> BTreeMap<&'static str, Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
    names.iter().map(|&name| (name, std::fs::read(dir.join(name)).unwrap())).collect()
}

fn get(endpoint: &str, cache: &Cache, repo: &str) -> Result<PathBuf> {
    let api = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.to_string()).with_progress(false);
    snapshot_by(api, cache, repo, "v1")
}

#[test]
fn downloads_a_revision_once_and_needs_no_hub_for_what_is_cached() {
    let names = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    let mut files = fixture_files("mistral", &names);
    files.insert("README.md", b"not needed".to_vec());
    let temp = tempfile::tempdir().unwrap();
    let cache = Cache::new(temp.path().to_path_buf());
    let dir = get(&serve(files.clone()), &cache, "org/name").unwrap();
    let mut found: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|f| f.unwrap().file_name()).collect();
    found.sort();
    assert_eq!(found, names);
    for name in names {
        assert_eq!(std::fs::read(dir.join(name)).unwrap(), files[name], "{name}");
    }
    // A hub that has the listing but none of the files: a second download must fetch nothing.
    let listing_only = serve(names.iter().map(|name| (*name, b"changed".to_vec())).collect());
    assert_eq!(get(&listing_only, &cache, "org/name").unwrap(), dir);
    assert_eq!(std::fs::read(dir.join("config.json")).unwrap(), files["config.json"]);
    // Without a hub the branch is taken as last seen, if Python's client or an earlier start has left it in the cache.
    let refs = dir.ancestors().nth(2).unwrap().join("refs");
    std::fs::write(refs.join("v1"), SHA).unwrap();
    assert_eq!(get("http://127.0.0.1:1", &cache, "org/name").unwrap(), dir);
}

#[test]
fn a_vocabulary_in_tiktokens_form_is_among_the_files() {
    let files = fixture_files("qwen_v1", &["config.json", "model.safetensors", "qwen.tiktoken"]);
    let temp = tempfile::tempdir().unwrap();
    let cache = Cache::new(temp.path().to_path_buf());
    let dir = get(&serve(files.clone()), &cache, "org/name").unwrap();
    assert_eq!(std::fs::read(dir.join("qwen.tiktoken")).unwrap(), files["qwen.tiktoken"]);
    std::fs::write(dir.ancestors().nth(2).unwrap().join("refs/v1"), SHA).unwrap();
    assert_eq!(get("http://127.0.0.1:1", &cache, "org/name").unwrap(), dir, "the cache is whole");
}

#[test]
fn a_model_of_pickles_is_refused_before_any_download() {
    let temp = tempfile::tempdir().unwrap();
    let cache = Cache::new(temp.path().to_path_buf());
    let files = ["config.json", "pytorch_model.bin.index.json"].map(|name| (name, Vec::new()));
    let error = get(&serve(files.into()), &cache, "org/name").unwrap_err().to_string();
    assert!(error.contains("`hf download org/name --local-dir DIRECTORY`"), "{error}");
}

#[test]
fn a_single_file_is_preferred_to_shards() {
    let listing = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors", "pytorch_model.bin"];
    assert_eq!(wanted(listing.into_iter()), ["config.json", "model.safetensors"]);
}

#[test]
fn an_unreachable_hub_and_an_unknown_model_are_one_clear_error() {
    let temp = tempfile::tempdir().unwrap();
    let cache = Cache::new(temp.path().to_path_buf());
    for (endpoint, repo) in [("http://127.0.0.1:1", "org/name"), (&*serve(BTreeMap::new()), "org/other")] {
        let Err(Error::Config(message)) = get(endpoint, &cache, repo) else { panic!("{endpoint} gave a model") };
        assert!(message.starts_with(&format!("cannot reach the hub for {repo}: ")), "{message}");
        assert!(message.ends_with("download the model and pass its directory"), "{message}");
    }
}
