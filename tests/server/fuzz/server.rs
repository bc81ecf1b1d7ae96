//! The server of one target, as a process of its own, so that its end is a finding and does not end the tests.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::dice::Dice;
use super::mutate::mutated;
use super::wire::{Connection, PATIENCE};

/// Longest line of the log in bytes: a status of 2 KiB, escaped, with what the line says of the call.
const MAX_LOG_LINE_BYTES: usize = 16 << 10;

/// Versions of the delta store after the whole one.
pub const STORED_VERSIONS: usize = 24;

pub struct Server {
    child: Child,
    /// Directory of the log and of the files that pushes may name.
    dir: tempfile::TempDir,
    pub authority: String,
    /// Address of the HTTP port.
    pub http: String,
    /// Bytes of the log that have been checked.
    read: usize,
}

pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

impl Server {
    /// Starts a server with small limits, so that requests are preempted, queues fill and pushes do not fit.
    pub async fn start(flags: &[&str]) -> Self {
        Self::of_model("qwen2", flags).await
    }

    /// A server like that of [`Server::start`], of another fixture.
    pub async fn of_model(model: &str, flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let weights = dir.path().join("weights");
        fill_weights_dir(&weights);
        let log = File::create(dir.path().join("log")).expect("a file for the log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_rollout-server"));
        command
            .args([
                "--port",
                "0",
                "--http-port",
                "0",
                "--dtype",
                "float32",
                "--mem-util",
                "0.1",
                "--kv-cache-bytes",
                "2MiB",
            ])
            .args(["--max-model-len", "256", "--max-num-seqs", "16", "--max-batch-tokens", "96", "--threads", "1"])
            .args(["--max-adapters", "2", "--max-lora-rank", "8", "--max-queued-samples", "4096"])
            .args(flags)
            .arg("--model")
            .arg(fixture(model))
            .arg("--weights-dir")
            .arg(&weights)
            .env("RUST_BACKTRACE", "0")
            .stderr(log)
            .stdout(Stdio::null());
        let child = command.spawn().expect("the server's binary is there");
        let mut server = Self { child, dir, authority: String::new(), http: String::new(), read: 0 };
        (server.authority, server.http) = server.ready().await;
        server
    }

    /// Waits for the log line that says the server is ready, and returns the addresses in it.
    async fn ready(&mut self) -> (String, String) {
        let started = Instant::now();
        loop {
            let log = self.log();
            if let Some(line) = log.lines().find(|line| line.contains("ready"))
                && let Some((_, addresses)) = line.split_once("address=")
                && let Some((grpc, http)) = addresses.trim().split_once(" http=")
            {
                return (grpc.into(), http.into());
            }
            assert!(self.has_ended().is_none() && started.elapsed() < PATIENCE, "the server does not start:\n{log}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn connect(&self) -> Connection {
        Connection::open(&self.authority).await.expect("the server listens")
    }

    /// How the process ended, or None if it is running.
    pub fn has_ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().expect("it is our child")?;
        Some(status.to_string())
    }

    fn log(&self) -> String {
        let bytes = std::fs::read(self.dir.path().join("log")).expect("the log can be read");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Checks the log lines since the last check.
    ///
    /// # Errors
    /// The first line that speaks of a bug, or that a client has made too long.
    pub fn check_log(&mut self) -> Result<(), String> {
        let log = self.log();
        let new = log.get(self.read..).unwrap_or_default();
        self.read = log.len();
        let is_bad =
            |line: &&str| line.contains(" ERROR ") || line.contains("panicked at") || line.len() > MAX_LOG_LINE_BYTES;
        match new.lines().find(is_bad) {
            Some(line) => Err(format!("the log has a line of {} bytes: {:.400}", line.len(), line)),
            None => Ok(()),
        }
    }

    /// Ends the test with why it failed, what the log says, and how to do it again.
    pub fn fail(&mut self, name: &str, again: &str, why: &str) -> ! {
        let ended = self.has_ended().map(|how| format!("\n  the server ended: {how}")).unwrap_or_default();
        panic!(
            "{name}: {why}{ended}\n  log: {}\n  again: {again} cargo test --release --test server {name}",
            self.last_lines()
        );
    }

    /// The last lines of the log, for the report of a failure.
    fn last_lines(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().filter(|line| !line.contains("loading:")).collect();
        let shortened = |line: &&str| line.chars().take(400).collect::<String>();
        lines[lines.len().saturating_sub(15)..].iter().map(shortened).collect::<Vec<_>>().join("\n    ")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fills the directory that pushes may name: an adapter, a checkpoint, and files that are neither.
fn fill_weights_dir(dir: &Path) {
    for (from, to) in [("peft/bfloat16", "adapter"), ("qwen2", "full")] {
        let to = dir.join(to);
        std::fs::create_dir_all(&to).expect("a directory");
        for file in std::fs::read_dir(fixture(from)).expect("a fixture").map(|file| file.expect("a file").path()) {
            std::fs::copy(&file, to.join(file.file_name().expect("it has a name"))).expect("room for a copy");
        }
    }
    std::fs::create_dir(dir.join("empty")).expect("a directory");
    std::fs::create_dir(dir.join("bad")).expect("a directory");
    std::fs::write(dir.join("bad/model.safetensors"), [0xff; 64]).expect("a file");
    std::fs::write(dir.join("bad/adapter_model.safetensors"), [0; 3]).expect("a file");
    std::fs::write(dir.join("bad/adapter_config.json"), "{\"r\": -1}").expect("a file");
    std::os::unix::fs::symlink("/etc", dir.join("outside")).expect("a link");
    fill_store(&dir.join("store"));
}

/// A delta store of the model: a whole version, and deltas that change nothing, of which all but the first two are
/// damaged.
fn fill_store(dir: &Path) {
    let directory = |version: usize| dir.join(format!("weight_v{version:06}"));
    let (model, file, name) =
        (fixture("qwen2/model.safetensors"), "model-00000-of-00001.safetensors", "model.norm.weight");
    std::fs::create_dir_all(directory(0)).expect("a directory");
    std::fs::copy(&model, directory(0).join(file)).expect("room for a copy");
    let model = std::fs::read(&model).expect("a fixture");
    let norm = safetensors::SafeTensors::deserialize(&model).expect("a checkpoint");
    let norm = norm.tensor(name).expect("it has one");
    let element = norm.data().len() / norm.shape()[0];
    let raw = [&[0; 4][..], &norm.data()[..element]].concat();
    let payload = zstd::bulk::compress(&raw, 1).expect("it compresses");
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![payload.len()], &payload);
    let digest = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&payload));
    let metadata = std::collections::HashMap::from([(name.to_string(), digest)]);
    let shard = safetensors::serialize([(name, view.expect("a tensor"))], Some(metadata)).expect("a file");
    for version in 1..=STORED_VERSIONS {
        let index = serde_json::json!({
            "metadata": {
                "version": format!("{version:06}"),
                "base_version": "000000",
                "delta_encoding": if version < 8 { "elements" } else { ["xor", "overwrite"][version % 2] },
                "compression_format": "zstd",
                "checksum_format": "xxh3-128",
                "dtype": if element == 2 { "bfloat16" } else { "float32" },
            },
            "weight_map": { name: file },
        });
        let (mut index, mut shard) = (index.to_string().into_bytes(), shard.clone());
        let mut dice = Dice::of(7, "store", version as u64);
        match version {
            0..3 => {}
            _ if version % 2 == 0 => index = mutated(&mut dice, index),
            _ => shard = mutated(&mut dice, shard),
        }
        std::fs::create_dir(directory(version)).expect("a directory");
        std::fs::write(directory(version).join(file), shard).expect("a file");
        std::fs::write(directory(version).join("model.safetensors.index.json"), index).expect("a file");
    }
}
