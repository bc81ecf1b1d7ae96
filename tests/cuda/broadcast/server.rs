//! The server as a process of its own, and a client of its HTTP door.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rollout_server::server::pb::control_client::ControlClient;
use rollout_server::server::pb::weights_client::WeightsClient;
use rollout_server::server::pb::{CancelUpdateRequest, GetStatusRequest};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::common::{fixture, path_of};

/// Longest wait for an answer; a longer one is a hang.
const PATIENCE: Duration = Duration::from_secs(240);

/// An answer: its status and body.
pub type Answer = (u16, Value);

pub struct Server {
    child: Child,
    dir: tempfile::TempDir,
    pub http: Http,
}

/// The address of the HTTP door.
#[derive(Clone)]
pub struct Http(pub String);

impl Server {
    pub fn start(model: &str, flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        let child = Command::new(path_of("ROLLOUT_SERVER_BINARY", env!("CARGO_BIN_EXE_rollout-server")))
            .args(["--port", "0", "--http-port", "0", "--device", "cuda", "--dtype", "bfloat16"])
            .args(["--kv-cache-bytes", "4MiB", "--threads", "2", "--model"])
            .arg(fixture(model))
            .args(flags)
            .stderr(log)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { child, dir, http: Http(String::new()) };
        let started = Instant::now();
        loop {
            let log = server.log();
            let ready = log.lines().find_map(|line| line.contains("ready").then(|| line.split_once(" http="))?);
            if let Some((_, http)) = ready {
                server.http = Http(http.trim().into());
                return server;
            }
            assert!(server.child.try_wait().unwrap().is_none() && started.elapsed() < PATIENCE, "no start:\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Address of the sender of the push that is open, as gRPC tells it.
    pub fn update_peer(&self) -> String {
        Runtime::new().unwrap().block_on(async {
            let mut client = ControlClient::connect(self.grpc()).await.unwrap();
            let status = client.get_status(GetStatusRequest {}).await.unwrap().into_inner();
            status.update.unwrap().peer
        })
    }

    /// Ends the push that is open, as another client may over gRPC.
    pub fn cancel_update(&self) {
        Runtime::new().unwrap().block_on(async {
            let mut client = WeightsClient::connect(self.grpc()).await.unwrap();
            client.cancel_update(CancelUpdateRequest::default()).await.unwrap();
        });
    }

    fn grpc(&self) -> String {
        let log = self.log();
        let (_, address) = log.split_once(" address=").unwrap();
        format!("http://{}", address.split(' ').next().unwrap())
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.path().join("log")).unwrap()).into_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the server's log:\n{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Http {
    /// The answer of a question that must succeed.
    pub fn get(&self, path: &str) -> Value {
        let (status, answer) = self.ask("GET", path, "");
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, &body.to_string())
    }

    /// Posts a body whose length is not known before its end.
    pub fn post_in_chunks(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        let chunks = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
        self.exchange("POST", path, &format!("transfer-encoding: chunked\r\n\r\n{chunks}"))
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        self.exchange(method, path, &format!("content-length: {}\r\n\r\n{body}", body.len()))
    }

    /// The answer to a request, of which `rest` begins with the header of its body's length.
    fn exchange(&self, method: &str, path: &str, rest: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.0).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
        stream.write_all(format!("{head}content-type: application/json\r\n{rest}").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap_or_else(|e| panic!("{path}: {e}"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: {answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|_| panic!("{path}: {answer}")))
    }

    /// Begins to post, and breaks the connection behind a part of the body.
    pub fn break_off(&self, path: &str, part: &str) {
        let mut stream = TcpStream::connect(&self.0).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n");
        stream.write_all(format!("{head}content-length: 1000\r\n\r\n{part}").as_bytes()).unwrap();
    }

    /// Begins to post, and gives the connection when the server waits for the body.
    pub fn begin(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.0).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n");
        stream.write_all(format!("{head}expect: 100-continue\r\ncontent-length: 1000\r\n\r\n").as_bytes()).unwrap();
        let mut answer = [0; 21];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 100 Continue");
        stream
    }

    /// Posts on a thread of its own, as trainers do whose call waits for what they broadcast.
    pub fn post_later(&self, path: &'static str, body: Value) -> JoinHandle<Answer> {
        let http = self.clone();
        std::thread::spawn(move || http.post(path, &body))
    }

    /// The answer of a call that must succeed.
    pub fn done(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// The message of a call that must be refused with this status.
    pub fn refused(&self, path: &str, body: &Value, status: u16) -> String {
        refusal(self.post(path, body), status)
    }

    /// SHA-256 of each parameter.
    pub fn checksums(&self) -> BTreeMap<String, String> {
        let answer = self.done("/weight_checker", &json!({"action": "checksum"}));
        serde_json::from_value(answer["checksums"].clone()).unwrap()
    }

    /// What can be seen of a policy: checksums, version, tokens and log-probabilities.
    pub fn seen(&self) -> (BTreeMap<String, String>, Value) {
        let body = json!({"model": null, "prompt": [[3, 1, 4, 1, 5], [9, 2, 6]], "max_tokens": 4, "seed": 5,
            "temperature": 0.9, "logprobs": 0, "return_token_ids": true});
        let mut answer = self.done("/v1/completions", &body);
        (self.checksums(), answer["choices"].take())
    }
}

/// Waits until something is so.
pub fn until(is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE / 8, "it takes too long");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The message of an answer that must refuse with this status.
pub fn refusal((status, answer): Answer, expected: u16) -> String {
    assert_eq!(status, expected, "{answer}");
    answer["error"]["message"].as_str().unwrap().to_owned()
}
